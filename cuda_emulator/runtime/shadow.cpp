// What check mode knows of every word of shared and of device memory, and the rules that make a finding of it.
#include "shadow.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <memory>
#include <unordered_map>

#include "accepted_races.h"
#include "access.h"
#include "async_reads.h"
#include "clock.h"
#include "counters.h"
#include "device_memory.h"
#include "streams.h"

namespace emulator {

// The volatile accesses of a warp's lanes to one word.
struct Volatile {
    struct By {
        Segment segment;
        const void* instruction;
    };
    std::vector<By> readers;  // each lane's last
    By writer{0, nullptr};
};

struct BlockShadow {
    BlockClock clock;
    uint32_t era = 0;             // of the clock, when the cells were used last
    Cell* cells = nullptr;        // of the arena
    std::vector<uint32_t> split;  // words of the arena whose cell is split
    AsyncReads async_reads;
    std::unordered_map<uint64_t, Volatile> volatiles;  // by word and warp
    std::vector<Segment> landed;                       // by word: the writer, if what it wrote came by an asynchronous copy
    Finding uninitialised;  // the first such read, kept back: if a write follows that it raced with, that is the finding
};

// An atomic access of the block's scope.
struct OfBlock {
    Volatile::By by;
    bool only_reads;
};
static std::unordered_map<uintptr_t, OfBlock> block_scoped;  // by address: the launch's last, or last that writes

BlockClock& clock_of(Block& block) { return block.shadow->clock; }
AsyncReads& async_reads_of(Block& block) { return block.shadow->async_reads; }

namespace {

// ---- cells

constexpr uint32_t SEGMENT_BITS = SEGMENT_LIMIT - 1;
constexpr uint32_t SPLIT = 1u << 31;   // in `writer`: the four bytes have a cell each; `writer_instruction` says where
constexpr uint32_t ATOMIC = 1u << 30;  // in `writer`: it was an atomic operation
constexpr uint32_t IN_FLIGHT = ~0u;    // as `reader`: an asynchronous copy by `writer` has not been waited for

// In `reader`, two bits: whether others have read since without being ordered behind the one that is named.
enum Readers : uint32_t { one = 0, one_warp = 1u << 30, one_block = 2u << 30, blocks = 3u << 30 };
constexpr uint32_t READERS = 3u << 30;

std::vector<std::array<Cell, 4>> split_cells(1);
std::vector<uint32_t> unused_split_cells;

void split(Cell& cell) {
    uint32_t index;
    if (unused_split_cells.empty()) {
        index = (uint32_t)split_cells.size();
        split_cells.emplace_back();
    } else {
        index = unused_split_cells.back();
        unused_split_cells.pop_back();
    }
    split_cells[index].fill(cell);
    cell = {SPLIT, index, 0, 0};
}

void unsplit(Cell& cell) {
    if (!(cell.writer & SPLIT)) return;
    unused_split_cells.push_back(cell.writer_instruction);
    cell = Cell{};
}

// ---- the layout of the arena, the same for all blocks of a launch

constexpr size_t ARENA_WORDS = ARENA_BYTES / 4;
uint8_t word_extent[ARENA_WORDS];  // 1 + index in `extents`, 0 for what belongs to no variable
std::vector<Worker::Extent> extents;

// ---- the access under examination

struct Site {
    Thread& thread;
    BlockShadow& shadow;
    Access access;
    bool shared;
    uintptr_t address;
    unsigned bytes;
    const void* instruction;
    bool whole_object = false;  // of a type that is not known here: a struct's copy, memcpy
    Block* home = nullptr;      // whose shared memory it is, if not the thread's own block's: of another in the cluster

    Block& shared_home() const { return home ? *home : *thread.owner; }
};

const char* verb(Access access) {
    switch (access) {
        case Access::read:
        case Access::strong_read:
            return "reads";
        case Access::write:
        case Access::strong_write:
            return "writes";
        case Access::atomic:
            return "atomically updates";
        case Access::lands:
            return "lands in";
    }
    return "";
}

std::string bytes_text(uint64_t bytes) { return std::to_string(bytes) + (bytes == 1 ? " byte" : " bytes"); }

// "tile[1][7]", with "byte 2 of" in front where an element does not begin there.
std::string element_text(const std::string& name, const Shape& shape, long long at) {
    const long long inner = ((at % shape.element) + shape.element) % shape.element;
    long long index = (at - inner) / shape.element;
    std::string indices;
    for (unsigned d = shape.dimensions; d-- > 0;) {
        const long long extent = d && shape.extents[d] ? shape.extents[d] : 0;  // the first index may lie outside
        const long long own = extent ? ((index % extent) + extent) % extent : index;
        indices = "[" + std::to_string(own) + "]" + indices;
        if (extent) index = (index - own) / extent;
    }
    if (!shape.dimensions && index) return "byte " + std::to_string(at) + " of `" + name + "`";
    return (inner ? "byte " + std::to_string(inner) + " of `" : "`") + name + indices + "`";
}

std::string elements_text(size_t bytes, unsigned element) {
    const size_t count = bytes / element;
    return std::to_string(count) + (count == 1 ? " element" : " elements");
}

// "the array has 289 elements (17 x 17)".
std::string array_text(size_t bytes, const Shape& shape) {
    size_t inner = shape.element;
    std::string sizes;
    for (unsigned d = 1; d < shape.dimensions; d++)
        inner *= shape.extents[d], sizes += " x " + std::to_string(shape.extents[d]);
    const bool has_sizes = shape.dimensions > 1 && inner;
    return "the array has " + elements_text(bytes, shape.element) +
           (has_sizes ? " (" + std::to_string(bytes / inner) + sizes + ")" : "");
}

// Memory, named as the text names it as far as that is known, and how large it is.
struct Named {
    std::string object, size;
    int parameter = 0;  // of the kernel, from 1, whose name stands for "parameter" in `object`
};

Named named_shared(const Site& s) {
    const size_t offset = s.address - uintptr_t(s.shared_home().arena);
    const Worker::Extent* best = nullptr;
    for (const Worker::Extent& e : extents)
        if (!best || (e.begin <= offset && (best->begin > offset || e.begin > best->begin))) best = &e;
    if (!best) return {"shared memory", "the kernel has none"};
    const long long at = (long long)offset - (long long)best->begin;
    const size_t bytes = best->end - best->begin;
    const NamedShape& dynamic = worker->dynamic_shape;
    const bool is_named = best->declaration || dynamic.element;
    const Shape shape = best->declaration ? best->declaration->shape : Shape{dynamic.element, 1};
    if (!is_named || !shape.element)
        return {"byte " + std::to_string(at) + " of the dynamic shared memory", "it has " + bytes_text(bytes)};
    const std::string name = best->declaration ? best->declaration->name : dynamic.name;
    return {element_text(name, shape, at), shape.dimensions ? array_text(bytes, shape) : "it has " + bytes_text(bytes)};
}

const void* pointed_to;  // by the argument that points into the allocation at hand
bool points_into(const void* pointer, const void* address) {
    if (!device_memory.contains(pointer)) return false;
    const Allocation* a = device_memory.find(pointer);
    if (!a || a != device_memory.nearest(address)) return false;
    pointed_to = pointer;
    return true;
}

Named named_global(const Site& s) {
    const void* address = (const void*)s.address;
    const LaunchConfig& config = worker->launch->config;
    const std::string whole = place_in_memory(address);
    const Allocation* a = device_memory.base() ? device_memory.nearest(address) : nullptr;
    constexpr long long NEAR = 1 << 20;
    if (!a || (const char*)address < a->begin - NEAR || (const char*)address > a->begin + a->bytes + NEAR) return {whole, ""};
    if (a->name && a->shape.element)
        return {element_text(a->name, a->shape, (const char*)address - a->begin),
                a->shape.dimensions ? array_text(a->bytes, a->shape) : "it has " + bytes_text(a->bytes)};
    const int argument = config.argument_that ? config.argument_that(worker->launch->arguments, points_into, address) : -1;
    const unsigned element = argument >= 0 ? config.pointees[argument].element : 0;
    const size_t rest = element ? size_t(a->begin + a->bytes - (const char*)pointed_to) : 0;
    if (!element || rest % element) return {whole, ""};
    return {element_text("parameter", {element, 1}, (const char*)address - (const char*)pointed_to),
            "the array has " + elements_text(rest, element), argument + 1};
}

// Of what the memory at hand holds, as far as that is known.
Shape shape_at(const Site& s) {
    if (s.shared) {
        const uint8_t extent = word_extent[(s.address - uintptr_t(s.shared_home().arena)) / 4];
        return extent && extents[extent - 1].declaration ? extents[extent - 1].declaration->shape : Shape{};
    }
    const void* address = (const void*)s.address;
    const Allocation* a = device_memory.find(address);
    const LaunchConfig& config = worker->launch->config;
    if (!a || a->name || !config.argument_that) return a ? a->shape : Shape{};
    const int argument = config.argument_that(worker->launch->arguments, points_into, address);
    return argument >= 0 ? config.pointees[argument] : Shape{};
}

Named named(const Site& s) { return s.shared ? named_shared(s) : named_global(s); }

// `why` makes it a mistake; `did` says what the thread does, if not only "reads it".
Finding finding(const Site& s, const char* kind, const std::string& why, const std::string& did = "") {
    Finding f = worker->describe(kind, "", {0, s.instruction});
    const Named memory = named(s);
    f.object = memory.object;
    f.parameter = memory.parameter;
    f.why = why;
    f.party.did = did.empty() ? std::string(verb(s.access)) + " it" : did;
    return f;
}

// A cell keeps the lower half of an instruction's address; the upper is that of the instruction at hand.
const void* whole_address(uint32_t instruction, const Site& s) {
    return (const void*)((uintptr_t(s.instruction) & ~uintptr_t(0xffffffffu)) | instruction);
}

Party party_of(Segment segment, uint32_t instruction, const Site& s, const char* did) {
    const Chunk& chunk = launch_clock.chunk(segment);
    const unsigned linear = chunk.warp * 32 + (segment & 31);
    const dim3& size = s.thread.block->block_dim;
    return {true,
            launch_clock.block_index(chunk.block),
            {linear % size.x, linear / size.x % size.y, linear / size.x / size.y},
            {0, whole_address(instruction, s)},
            std::string(did) + " it"};
}

// Which rule of CUDA's memory model makes it a mistake; for the cases that are often thought to be none.
std::string rule_of(const Site& s, const char* did, bool blocks_differ, bool same_warp) {
    std::string none = blocks_differ ? "nothing between that orders two blocks"
                       : same_warp   ? "no barrier or __syncwarp() between them"
                                     : "no barrier between them";
    const bool atomic = s.access == Access::atomic, other_atomic = !strcmp(did, "atomically updated");
    if (atomic != other_atomic)
        return none + " (memory model: an atomic operation orders no plain access; a volatile or an atomic one may meet it)";
    if (s.access == Access::write && !strcmp(did, "wrote"))
        return none + " (memory model: a data race, also if both write the same value)";
    return none + " (memory model: a data race)";
}

// A fence that is left out behind the sign of another thread is named: many take the sign itself for an order.
Finding race_with(const Site& s, Segment other, uint32_t instruction, const char* did) {
    const Chunk& chunk = launch_clock.chunk(other);
    const bool blocks_differ = chunk.block != s.shadow.clock.serial;
    std::string why = rule_of(s, did, blocks_differ, !blocks_differ && int(chunk.warp) == s.thread.warp);
    if (launch_clock.is_seen_without_a_fence(other, s.shadow.clock))
        why = std::string("then set a flag after a fence, and the flag was read here with no ") +
              (blocks_differ ? "__threadfence()" : "__threadfence_block()") +
              " behind that (memory model: atomic and volatile accesses are relaxed, they order nothing by themselves)";
    Finding f = finding(s, s.shared ? "shared memory race" : blocks_differ ? "race between blocks" : "global memory race", why);
    f.other = party_of(other, instruction, s, did);
    return f;
}

// Returns only if the text accepts the race.
__attribute__((noinline)) void report_race(const Site& s, Segment other, uint32_t instruction, const char* did) {
    if (is_accepted_race(s.instruction, whole_address(instruction, s))) return;
    Finding f = race_with(s, other, instruction, did);
    // A cell names the first of several readers. If that one is in order, one of the others is not, who is not known by name.
    if (launch_clock.ordered(other, s.thread, s.shadow.clock, false)) {
        f.other = Party{};
        f.somebody = std::string("another thread ") + did + " it";
    }
    worker->stop(f);
}

[[noreturn]] void report_in_flight(const Site& s, const Cell& c) {
    Finding f = finding(s, "asynchronous copy not waited for", "the copy may still be under way");
    f.other = party_of(c.writer & SEGMENT_BITS, c.writer_instruction, s, "began a copy into");
    worker->stop(f);
}

[[noreturn]] __attribute__((noinline)) void report_async_read(const Site& s, const AsyncConflict& conflict) {
    const bool product = conflict.reader->product;
    Finding f = finding(s, "shared memory race",
                        conflict.pending ? std::string(product ? "the product" : "the store") +
                                               " has not been waited for and may still be reading"
                                         : "nothing orders this access behind the wait for that");
    f.other = worker->party(s.shared_home().threads[conflict.thread], {0, conflict.reader->instruction},
                            product ? "began a matrix product that reads it" : "began a bulk store that reads it");
    worker->stop(f);
}

[[noreturn]] __attribute__((noinline)) void report_missing_proxy_fence(const Site& s, Segment writer, uint32_t instruction) {
    Finding f = finding(s, "missing proxy fence", "no fence.proxy.async since", "has an asynchronous instruction read it");
    f.other = party_of(writer, instruction, s, "wrote");
    worker->stop(f);
}

// Has anything written to the word that holds the byte at an offset in the access?
bool is_written(const Site& s, unsigned at) {
    const uintptr_t word = (s.address + at) & ~uintptr_t(3);
    if (!s.shared) {
        const uint32_t writer = device_memory.cell((void*)word)->writer;
        return (writer && !(writer & SPLIT)) || *(const uint32_t*)word != POISON;
    }
    const BlockShadow& home = *s.shared_home().shadow;
    const Cell& cell = home.cells[(word - uintptr_t(s.shared_home().arena)) / 4];
    const auto counts = [&](const Cell& c) { return (c.writer & SEGMENT_BITS) >= home.clock.first; };
    if (!(cell.writer & SPLIT)) return counts(cell);
    const std::array<Cell, 4>& bytes = split_cells[cell.writer_instruction];
    return std::any_of(bytes.begin(), bytes.end(), counts);
}

// A struct's padding does not begin one of the parts into which its alignment divides it. The sanitizer tells of one of 16
// bytes that is aligned to 8 as of a float4, and calls one of 8 bytes whole only where it is aligned to less.
bool may_be_padding(const Site& s, unsigned at) {
    const uintptr_t most = s.bytes > 16 ? 16 : s.bytes / 2, multiple = s.address | s.bytes | most;
    return (s.whole_object || s.bytes == 16) && !shape_at(s).unpadded && is_written(s, unsigned(at & -(multiple & -multiple)));
}

__attribute__((noinline)) void note_uninitialised(const Site& s, unsigned at) {
    if (s.shadow.uninitialised.kind.empty() && !may_be_padding(s, at))
        s.shadow.uninitialised =
            finding(s, s.shared ? "uninitialised shared read" : "uninitialised global read", "nothing has written it");
}

[[noreturn]] __attribute__((noinline)) void report_bounds(const Site& s) {
    if (!s.shared && is_registered((const void*)s.address))
        worker->stop(
            finding(s, "not supported", "the host memory is pinned by cudaHostRegister; in check mode use cudaHostAlloc"));
    if (!s.shared) stop_at_host_memory((const void*)s.address);
    worker->stop(finding(s, s.shared ? "shared memory out of bounds" : "global memory out of bounds", named(s).size,
                         std::string(verb(s.access)) + " " + bytes_text(s.bytes)));
}

// A plain read of what another thread updates atomically: a mistake, but for the first look of a compare-and-swap loop, whose
// value the next instruction confirms. The Programming Guide's own atomicAdd for double begins like that.
__attribute__((noinline)) void defer_race(const Site& s, Segment other, uint32_t instruction) {
    if (is_accepted_race(s.instruction, whole_address(instruction, s))) return;
    s.thread.forgivable = std::make_shared<Finding>(race_with(s, other, instruction, "atomically updated"));
    s.thread.forgivable_at = (const void*)s.address;
}

void forgive_or_stop(Thread& t, const void* address) {
    const std::shared_ptr<Finding> finding = std::move(t.forgivable);
    t.forgivable = nullptr;
    if (!t.compares || address != t.forgivable_at) worker->stop(*finding);
}

// ---- the rules

// Are all who read, the named one and those that its flag stands for, ordered before what the thread does now?
inline bool readers_ordered(uint32_t reader, const Site& s) {
    const Segment first = reader & SEGMENT_BITS;
    const BlockClock& clock = s.shadow.clock;
    switch (reader & READERS) {
        case one:
            return launch_clock.ordered(first, s.thread, clock, false);
        case one_warp:
            return launch_clock.ordered(first, s.thread, clock, true);
        case one_block: {
            const Chunk& chunk = launch_clock.chunk(first);
            if (chunk.block == clock.serial && clock.others.empty()) return first < clock.barrier;
            return launch_clock.ordered(first, s.thread, clock, true);
        }
        default:
            return !clock.acquired.empty();  // cannot be told apart: assume the best
    }
}

inline void add_reader(Cell& c, const Site& s, Segment oldest, uint32_t here) {
    const Segment me = s.thread.segment, first = c.reader & SEGMENT_BITS;
    if (first == me) return;
    if (first >= oldest) {
        const uint32_t flag = c.reader & READERS;
        if (flag == blocks) return;
        const Chunk& chunk = launch_clock.chunk(first);
        const bool same_block = chunk.block == s.shadow.clock.serial;
        if (flag == one_block && same_block && first >= s.shadow.clock.barrier && s.shadow.clock.others.empty()) return;
        if (!readers_ordered(c.reader, s)) {
            const uint32_t relation = !same_block ? blocks : int(chunk.warp) == s.thread.warp ? one_warp : one_block;
            c.reader = std::max(flag, relation) | first;
            return;
        }
    }
    c.reader = me;
    c.reader_instruction = here;
}

// An atomic or volatile access follows the write in the cell. Does the cell go on to name that write, because others race with
// it more easily? It does if the thread itself wrote since the block's last barrier and the write was a plain one, and if it
// was another thread's atomic one in no order with this: of several the cell names the first.
inline bool still_counts(const Cell& c, const Site& s) {
    const Segment writer = c.writer & SEGMENT_BITS;
    const BlockClock& clock = s.shadow.clock;
    if (c.writer & ATOMIC) return !launch_clock.ordered(writer, s.thread, clock, false);
    if (writer == s.thread.segment) return true;
    const Chunk& chunk = launch_clock.chunk(writer);
    const bool own = chunk.block == clock.serial && int(chunk.warp) == s.thread.warp && int(writer & 31) == s.thread.lane;
    return own && writer >= clock.barrier;
}

// Examines an access to a cell and notes it. Segments before `oldest` are of no concern.
inline void visit(Cell& c, const Site& s, Segment oldest) {
    const Segment me = s.thread.segment, writer = c.writer & SEGMENT_BITS;
    const uint32_t here = uint32_t(uintptr_t(s.instruction));
    const bool strong = s.access == Access::atomic || s.access == Access::strong_read || s.access == Access::strong_write;
    if (c.reader == IN_FLIGHT) {
        if (writer >= oldest) report_in_flight(s, c);
        c.reader = 0;  // left by a launch that a finding ended
    }
    if (writer >= oldest && writer != me && !(strong && c.writer & ATOMIC) &&
        !launch_clock.ordered(writer, s.thread, s.shadow.clock, false)) {
        if (c.writer & ATOMIC && s.access == Access::read) return defer_race(s, writer, c.writer_instruction);
        report_race(s, writer, c.writer_instruction, c.writer & ATOMIC ? "atomically updated" : "wrote");
    }
    if (s.access == Access::read) return add_reader(c, s, oldest, here);
    if (s.access == Access::strong_read) return;
    if ((c.reader & SEGMENT_BITS) >= oldest && c.reader != me && !readers_ordered(c.reader, s)) {
        const Segment reader = c.reader & SEGMENT_BITS;
        report_race(s, reader, c.reader_instruction, "read");
    }
    if (s.thread.compares && c.reader == me) c.reader = 0;  // what it saw is confirmed
    if (strong && writer >= oldest && still_counts(c, s)) return;
    c = {me | (strong ? ATOMIC : 0), here, 0, 0};
}

inline bool is_whole(const Site& s) { return ((s.address | s.bytes) & 3) == 0; }

// Calls `function` for the cell of each word, or of each byte where the access does not cover whole words.
template <class Split, class Function>
inline void for_each_cell(Cell* cell, const Site& s, Split remember_split, Function function) {
    if (is_whole(s)) {
        for (unsigned word = 0; word < s.bytes / 4; ++word) {
            Cell& c = cell[word];
            if (!(c.writer & SPLIT)) {
                function(c, word * 4);
            } else {
                const uint32_t index = c.writer_instruction;
                for (int byte = 0; byte < 4; ++byte) function(split_cells[index][byte], word * 4);
            }
        }
        return;
    }
    const unsigned skew = s.address & 3;
    for (unsigned byte = 0; byte < s.bytes; ++byte) {
        Cell& c = cell[(skew + byte) / 4];
        if (!(c.writer & SPLIT)) {
            split(c);
            remember_split(&c);
        }
        function(split_cells[c.writer_instruction][(skew + byte) % 4], byte);
    }
}

inline bool reads(Access access) { return access == Access::read || access == Access::atomic || access == Access::strong_read; }

// ---- shared memory

inline void shared_access(const Site& s) {
    const size_t offset = s.address - uintptr_t(s.shared_home().arena);
    const uint8_t extent = word_extent[offset / 4];
    if (!extent || word_extent[(offset + s.bytes - 1) / 4] != extent || offset + s.bytes > extents[extent - 1].end)
        report_bounds(s);
    if (s.access == Access::write) s.shadow.clock.fenced_for_block[s.thread.linear] = 0;
    BlockShadow& home = *s.shared_home().shadow;
    const Segment oldest = home.clock.first;
    Cell* cells = home.cells;
    if (home.async_reads.any() && s.access != Access::read && s.access != Access::strong_read)
        for (size_t word = offset / 4; word <= (offset + s.bytes - 1) / 4; ++word) {
            const AsyncConflict conflict = home.async_reads.conflict(word, s.thread, s.shadow.clock);
            if (conflict.reader) report_async_read(s, conflict);
        }
    for_each_cell(
        cells + offset / 4, s, [&](Cell* c) { home.split.push_back(uint32_t(c - cells)); },
        [&](Cell& c, unsigned at) {
            if (reads(s.access) && (c.writer & SEGMENT_BITS) < oldest) note_uninitialised(s, at);
            visit(c, s, oldest);
        });
}

// ---- device memory

__attribute__((noinline)) void report_launches(const Site& s, const UnorderedLaunch& other, uint32_t instruction,
                                               const char* did) {
    if (is_accepted_race(s.instruction, whole_address(instruction, s))) return;
    Finding f = finding(s, "race between launches",
                        other.until_wait ? "programmatic dependent launch orders the two only behind griddepcontrol.wait "
                                           "(cudaGridDependencySynchronize)"
                                         : "the launches are in two streams, and no event or synchronisation orders them");
    f.somebody = "kernel " + other.kernel + " " + did + " it";
    f.other.place = {0, whole_address(instruction, s)};
    worker->stop(f);
}

// Launches that may still be running, though here they have ended.
__attribute__((noinline)) void examine_earlier_launches(const Cell& c, const Site& s) {
    const Segment writer = c.writer & SEGMENT_BITS, reader = c.reader & SEGMENT_BITS;
    const bool strong = s.access == Access::atomic || s.access == Access::strong_read || s.access == Access::strong_write;
    const bool writes = s.access != Access::read && s.access != Access::strong_read;
    for (const UnorderedLaunch& other : unordered_launches) {
        const auto did = [&](Segment segment) { return segment >= other.first && segment < other.end; };
        if (other.until_wait && s.thread.dependency_met) continue;
        if (did(writer) && !(strong && c.writer & ATOMIC))
            report_launches(s, other, c.writer_instruction, c.writer & ATOMIC ? "atomically updated" : "wrote");
        if (writes && did(reader)) report_launches(s, other, c.reader_instruction, "read");
    }
}

inline void global_access(const Site& s) {
    Allocation* a = device_memory.find((void*)s.address);
    const bool refused = a && a->owner == Owner::pageable && options.refuses_pageable;
    if (!a || refused || s.address < uintptr_t(a->begin) || s.address + s.bytes > uintptr_t(a->begin) + a->bytes)
        report_bounds(s);
    if (s.access == Access::write) {
        s.shadow.clock.fences[s.thread.linear] = Fence::missing;
        s.shadow.clock.fenced_for_block[s.thread.linear] = 0;
    }
    const Segment oldest = launch_clock.launch_first;
    for_each_cell(
        device_memory.cell((void*)s.address), s, [&](Cell*) { a->has_split_cells = true; },
        [&](Cell& c, unsigned offset) {
            if (c.writer == 0 && reads(s.access)) {
                const uintptr_t word = (s.address + offset) & ~uintptr_t(3);
                if (*(const uint32_t*)word == POISON) note_uninitialised(s, offset);
            }
            if (!unordered_launches.empty()) examine_earlier_launches(c, s);
            visit(c, s, oldest);
        });
}

// ---- memory that is neither

struct Image {
    uintptr_t begin, end;
};
struct Constant {
    Image image;
    const char* name;
};
std::vector<Constant>& constants() {  // registered before main()
    static std::vector<Constant> all;
    return all;
}
std::vector<Image> images;  // of the libraries that are loaded: __constant__ and __device__ variables, tables
Image last_image{0, 0};

int add_images(dl_phdr_info* info, size_t, void*) {
    for (int i = 0; i < info->dlpi_phnum; ++i)
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            images.push_back({begin, begin + info->dlpi_phdr[i].p_memsz});
        }
    return 0;
}

// Shared memory of another block of the cluster.
bool is_in_cluster(Site& s) {
    if (!s.thread.owner->membership.cluster) return false;
    for (Block* block : s.thread.owner->membership.cluster->blocks)
        if (block && s.address - uintptr_t(block->arena) < ARENA_BYTES) {
            s.home = block;
            return s.shared = true;
        }
    return false;
}

void report_constant(const Site& s, const Constant& c) {
    Finding f = finding(s, "write to constant memory", "only host code can set it",
                        std::string(verb(s.access)) + " " + bytes_text(s.bytes));
    f.object = "byte " + std::to_string(s.address - c.image.begin) + " of `" + c.name + "`";
    worker->stop(f);
}

__attribute__((noinline)) void other_access(Site& s) {
    if (s.thread.fiber->owns((void*)s.address)) {
        if (s.thread.awaits_products)
            examine_pending_accumulators(s.thread, (void*)s.address, s.bytes, s.access != Access::read, s.instruction);
        return;
    }
    if (s.address - uintptr_t(worker->launch->arguments) < worker->launch->argument_bytes) return;
    if (s.access != Access::read && s.access != Access::strong_read)
        for (const Constant& c : constants())
            if (s.address >= c.image.begin && s.address < c.image.end) report_constant(s, c);
    if (s.address - last_image.begin < last_image.end - last_image.begin) return;
    for (const Image& image : images)
        if (s.address >= image.begin && s.address < image.end) {
            last_image = image;
            return;
        }
    s.shared = s.address - (uintptr_t(s.thread.owner->arena) - ARENA_MARGIN) < ARENA_BYTES + 2 * ARENA_MARGIN;
    report_bounds(s);
}

__attribute__((noinline)) void report_misaligned(const Site& s, unsigned alignment) {
    // The sanitizer takes a struct of 16 bytes that is aligned to 8 for one that is aligned to 16.
    if (alignment == 16 && !(s.address & 7) && shape_at(s).loose) return;
    worker->stop(finding(s, "misaligned access", "the address is no multiple of " + std::to_string(alignment),
                         std::string(verb(s.access)) + " " + bytes_text(s.bytes)));
}

uint64_t accesses = 0;
constexpr uint64_t TIME_MASK = 0xffff;  // the clock is looked at when these bits of `accesses` are zero

void check_time(const Site& s) {
    if (worker->launch->is_late()) worker->stop_out_of_time(worker->launch->out_of_time(), {0, s.instruction});
}

}  // namespace

namespace {

// Is everything already noted that a plain read of the word at `address` would add, and nothing wrong with it? Most reads are
// such: of a value that was there before the launch or the last barrier, and which others have read since. A false answer
// only means that the read is examined in full.
inline bool adds_nothing(const Thread& t, uintptr_t address) {
    const BlockShadow& shadow = *t.owner->shadow;
    const size_t offset = address - uintptr_t(t.owner->arena);
    if (offset < ARENA_BYTES) {
        const Cell& c = shadow.cells[offset / 4];
        const BlockClock& clock = shadow.clock;
        if (c.writer & SPLIT || c.reader == IN_FLIGHT) return false;
        const Segment writer = c.writer & SEGMENT_BITS, reader = c.reader & SEGMENT_BITS;
        if (writer < clock.first || writer >= clock.barrier || launch_clock.chunk(writer).block != clock.serial) return false;
        if (reader == t.segment) return true;
        if (reader < clock.barrier || !clock.others.empty()) return false;
        const Chunk& chunk = launch_clock.chunk(reader);
        if (chunk.block != clock.serial) return false;
        if ((c.reader & READERS) == one_block) return true;
        const bool unordered = int(chunk.warp) == t.warp && chunk.tick >= clock.own[t.linear * 32 + (reader & 31)];
        return (c.reader & READERS) == one_warp && unordered;
    }
    if (!device_memory.holds_page(address) || !unordered_launches.empty()) return false;
    const Cell& c = *device_memory.cell((void*)address);
    if (c.writer & SPLIT || (c.writer & SEGMENT_BITS) >= launch_clock.launch_first || c.reader == IN_FLIGHT) return false;
    const Segment reader = c.reader & SEGMENT_BITS;
    return reader == t.segment || ((c.reader & READERS) == blocks && reader >= launch_clock.launch_first);
}

__attribute__((noinline)) void examine_in_full(Thread& t, const void* address, unsigned bytes, Access access,
                                               unsigned alignment, const void* instruction) {
    if (access == Access::read && bytes == 4 && !(uintptr_t(address) & 3) && !t.forgivable &&
        adds_nothing(t, uintptr_t(address))) {
        if (options.mode == Mode::count) count_access(t, address, bytes, access, instruction);
        return;
    }
    if (t.forgivable) forgive_or_stop(t, address);
    Site s{t, *t.owner->shadow, access, false, uintptr_t(address), bytes, instruction, alignment == 1};
    if (!(++accesses & TIME_MASK)) check_time(s);
    worker->changes += access == Access::write || access == Access::strong_write;
    if (s.address - uintptr_t(t.owner->arena) < ARENA_BYTES) {
        s.shared = true;
        if (s.address & (alignment - 1)) report_misaligned(s, alignment);
        shared_access(s);
        if (options.mode == Mode::count) count_access(t, address, bytes, access, instruction);
    } else if (device_memory.contains(address)) {
        if (s.address & (alignment - 1)) report_misaligned(s, alignment);
        global_access(s);
        if (options.mode == Mode::count) count_access(t, address, bytes, access, instruction);
    } else if (is_in_cluster(s)) {
        shared_access(s);
    } else {
        other_access(s);
    }
}

}  // namespace

ConstantVariable::ConstantVariable(const void* variable, size_t bytes, const char* name) {
    const uintptr_t begin = uintptr_t(variable);
    constants().push_back({{begin, begin + bytes}, name});
}

void examine(const void* address, unsigned bytes, Access access, unsigned alignment, const void* instruction) {
    if (!current) return options.program ? examine_host(address, bytes, access, instruction) : void();
    Thread& t = *static_cast<Thread*>(current);
    // Most accesses are to the thread's own stack, its accumulators for example, of which nothing is known or asked.
    if (t.fiber->owns(address) && !t.awaits_products && (accesses + 1) & TIME_MASK) {
        ++accesses;
        return;
    }
    examine_in_full(t, address, bytes, access, alignment, instruction);
}

void mark_in_flight(void* address, unsigned bytes, unsigned alignment, const void* instruction) {
    Thread& t = *static_cast<Thread*>(current);
    // As the write that it will be: bounds and races are found where the copy begins.
    examine(address, bytes, Access::write, alignment, instruction);
    Site s{t, *t.owner->shadow, Access::write, true, uintptr_t(address), bytes, instruction};
    const size_t offset = s.address - uintptr_t(t.owner->arena);
    for_each_cell(s.shadow.cells + offset / 4, s, [](Cell*) {}, [](Cell& c, unsigned) { c.reader = IN_FLIGHT; });
}

void mark_landed(Thread& t, void* address, unsigned bytes) {
    Site s{t, *t.owner->shadow, Access::lands, true, uintptr_t(address), bytes, nullptr};
    const size_t offset = s.address - uintptr_t(t.owner->arena);
    for_each_cell(s.shadow.cells + offset / 4, s, [](Cell*) {}, [&](Cell& c, unsigned) { c.writer = t.segment, c.reader = 0; });
    for (size_t word = offset / 4; word < (offset + bytes + 3) / 4; ++word) s.shadow.landed[word] = t.segment;
}

void examine_range(const void* address, unsigned bytes, Access access, const void* instruction) {
    Thread& t = *static_cast<Thread*>(current);
    Site s{t, *t.owner->shadow, access, false, uintptr_t(address), bytes, instruction};
    if (device_memory.contains(address))
        global_access(s);
    else
        other_access(s);
}

void examine_async_read(Thread& t, uint32_t offset, unsigned bytes, uint32_t reader, const void* instruction) {
    ThreadView* caller = current;
    current = &t;  // whose access it is
    BlockShadow& shadow = *t.owner->shadow;
    Site s{t, shadow, Access::read, true, uintptr_t(t.owner->arena + offset), bytes, instruction};
    const uint8_t extent = word_extent[offset / 4];
    if (!extent || word_extent[(offset + bytes - 1) / 4] != extent || offset + bytes > extents[extent - 1].end)
        report_bounds(s);
    const Segment oldest = shadow.clock.first;
    for_each_cell(
        shadow.cells + offset / 4, s, [](Cell*) {},
        [&](Cell& c, unsigned at) {
            const Segment writer = c.writer & SEGMENT_BITS;
            if (writer < oldest) return note_uninitialised(s, at);
            if (c.reader == IN_FLIGHT) report_in_flight(s, c);
            if (!launch_clock.ordered(writer, t, shadow.clock, false)) report_race(s, writer, c.writer_instruction, "wrote");
            if (shadow.landed[(offset + at) / 4] != writer && !launch_clock.behind_proxy_fence(writer, shadow.clock))
                report_missing_proxy_fence(s, writer, c.writer_instruction);
        });
    for (size_t word = offset / 4; word < (offset + bytes) / 4; ++word) shadow.async_reads.covers(reader, word);
    current = caller;
}

void proxy_fence() {
    if (options.checked()) launch_clock.proxy_fence(*static_cast<Thread*>(current));
}

// ---- what the scheduler tells

namespace {

// What was written stays written, by nobody in particular.
void forget_segments(Cell& c) { c = {c.writer ? 1u : 0u, 0, 0, 0}; }
void forget_segments_of(const Allocation& a) {
    for (size_t word = 0; word < (a.bytes + 3) / 4; ++word) {
        Cell& c = device_memory.cell(a.begin)[word];
        if (c.writer & SPLIT)
            for (Cell& byte : split_cells[c.writer_instruction]) forget_segments(byte);
        else
            forget_segments(c);
    }
}

void check_numbers() {
    if (launch_clock.exhausted())
        worker->stop(worker->describe("launch too large for check mode", "too many synchronisations; use smaller sizes", {}));
}

}  // namespace

void begin_launch_shadow(Launch& launch) {
    if (launch_clock.half_exhausted()) {
        device_memory.for_each(forget_segments_of);
        forget_earlier_launches();
        launch_clock.begin_anew();
    }
    launch_clock.begin_launch();
    order_launch(launch);
    block_scoped.clear();
    memset(word_extent, 0, sizeof word_extent);
    extents.clear();
    images.clear();
    last_image = {0, 0};
    dl_iterate_phdr(add_images, nullptr);
    if (options.mode == Mode::count) begin_launch_counters();
}

void end_launch_shadow(Launch& launch) {
    if (options.mode == Mode::count) end_launch_counters(launch);
}

void begin_block_shadow(Block& b) {
    if (!b.shadow) b.shadow = new BlockShadow;
    if (!b.shadow->cells) {
        void* cells = mmap(nullptr, ARENA_WORDS * sizeof(Cell), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (cells == MAP_FAILED) throw std::bad_alloc();
        b.shadow->cells = static_cast<Cell*>(cells);
    }
    if (b.shadow->era != launch_clock.era) {
        madvise(b.shadow->cells, ARENA_WORDS * sizeof(Cell), MADV_DONTNEED);  // zeros from now on
        b.shadow->landed.clear();
        b.shadow->era = launch_clock.era;
    }
    launch_clock.begin_block(b);
    b.shadow->volatiles.clear();
    b.shadow->async_reads.begin_block();
    b.shadow->landed.resize(ARENA_WORDS);
    // What earlier blocks left must not look like an answer.
    const size_t words = (worker->shared_used + 3) / 4;
    for (size_t word = 0; word < words; ++word) ((uint32_t*)b.arena)[word] = POISON;
}

void end_block_shadow(Block& b) {
    Finding pending = b.shadow->uninitialised;
    b.shadow->uninitialised = Finding();
    for (uint32_t word : b.shadow->split) unsplit(b.shadow->cells[word]);
    b.shadow->split.clear();
    if (options.mode == Mode::count) end_block_counters(b);
    if (worker->launch->failed) return;
    if (!pending.kind.empty()) worker->stop(pending);
    if (b.async.used) examine_loads_at_end(b);
    keep_rounds(b);
}

const Finding* uninitialised_in(const std::vector<Block*>& blocks) {
    for (const Block* b : blocks)
        if (b->shadow && !b->shadow->uninitialised.kind.empty()) return &b->shadow->uninitialised;
    return nullptr;
}

void free_shadow(Block& b) {
    if (b.shadow && b.shadow->cells) munmap(b.shadow->cells, ARENA_WORDS * sizeof(Cell));
    delete b.shadow;
}

void shared_variable_appears(const Worker::Extent& extent) {
    extents.push_back(extent);
    if (extents.size() > 255) return;
    for (size_t word = extent.begin / 4; word < (extent.end + 3) / 4; ++word) word_extent[word] = uint8_t(extents.size());
    for (Block* b : worker->resident)
        for (size_t word = extent.begin / 4; word < (extent.end + 3) / 4; ++word) ((uint32_t*)b->arena)[word] = POISON;
}

void forget_split_cells(const Allocation& a) {
    for (size_t word = 0; word < (a.bytes + 3) / 4; ++word) unsplit(device_memory.cell(a.begin)[word]);
}

void thread_ends(Thread& t) {
    Block& b = *t.owner;
    t.state = State::ended;
    check_numbers();
    if (t.forgivable) forgive_or_stop(t, nullptr);
    if (t.awaits_products) examine_products_at_end(t);
    if (b.async.used) examine_stores_at_end(t);
    if (!b.arrived) return;
    Thread& waiting = b.threads[b.first_at_barrier];
    Finding f = worker->describe("early exit before a barrier", "a thread waits at the block's barrier, but another has ended",
                                 {b.barrier_line, nullptr});
    f.party = worker->party(waiting, {b.barrier_line, nullptr}, "waits");
    f.other = worker->party(t, {}, "ended");
    worker->stop(f);
}

void report_early_exit(Block& b, int line) {
    Finding f = worker->describe("early exit before a barrier", "a thread comes to the block's barrier, but another has ended",
                                 {line, nullptr});
    f.party.did = "waits";
    for (const Thread& t : b.threads)
        if (t.state == State::ended) {
            f.other = worker->party(t, {}, "ended");
            break;
        }
    worker->stop(f);
}

void report_missing_lanes(Block& b, Warp& warp, unsigned mask, int line) {
    const int lane = __builtin_ctz(mask & ~warp.alive), linear = int(&warp - b.warps.data()) * 32 + lane;
    Finding f = worker->describe("warp lanes never arrive",
                                 "the mask of a warp operation names lane " + std::to_string(lane) +
                                     (linear < (int)b.threads.size() ? ", which has ended" : ", which the block does not have"),
                                 {line, nullptr});
    f.party.did = "waits";
    if (linear < (int)b.threads.size()) f.other = worker->party(b.threads[linear], {}, "ended");
    worker->stop(f);
}

void blocks_synchronised(const std::vector<Block*>& blocks) { launch_clock.blocks_synchronised(blocks); }
void cluster_begins(const std::vector<Block*>& blocks) { launch_clock.cluster_begins(blocks); }

namespace {
// What one of some threads that meet has waited for is there for all of them.
template <class Each>
void share_dependency(Each each) {
    if (!worker->launch->config.programmatic) return;
    bool met = false;
    each([&](Thread& t) { met |= t.dependency_met; });
    if (met) each([&](Thread& t) { t.dependency_met = true; });
}
}  // namespace

void wait_for_dependency() { static_cast<Thread*>(current)->dependency_met = true; }

void block_synchronised(Block& b) {
    launch_clock.block_synchronised(b);
    share_dependency([&](auto visit) {
        for (Thread& t : b.threads) visit(t);
    });
    check_numbers();
    if (options.mode == Mode::count) count_barrier(b);
}

void lanes_synchronised(Block& b, int warp, unsigned mask, WarpOp op) {
    // Only __syncwarp orders memory: shuffles, votes and the like exchange registers.
    if (op == WarpOp::matrix && options.mode == Mode::count) count_matrix();
    if (op != WarpOp::sync) return;
    launch_clock.lanes_synchronised(b, warp, mask);
    share_dependency([&](auto visit) {
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1 && warp * 32 + lane < (int)b.threads.size()) visit(b.threads[warp * 32 + lane]);
    });
    check_numbers();
}

void barrier_arrival(Thread& t, Block& home, uint32_t barrier) {
    check_numbers();
    if (t.owner == &home)
        launch_clock.arrive(home, barrier, t);
    else
        launch_clock.arrive_from_outside(home, barrier, t);
}
void barrier_departure(Thread& t, uint32_t barrier) { launch_clock.leave(*t.owner, barrier, t); }
void barrier_phase_ends(Block& b, uint32_t barrier) { launch_clock.phase_ends(b, barrier); }
void barrier_forget(Block& b, uint32_t barrier) { clock_of(b).brought.erase(barrier); }

// ---- atomics and fences

namespace {

// The same value seen twice in a row at one address: the thread may be waiting for another one.
void notice_spinning(Thread& t, const void* address, unsigned bytes) {
    uint64_t value = 0;
    memcpy(&value, address, bytes < 8 ? bytes : 8);
    const bool same = t.watched == address && t.watched_value == value;
    t.watched = address;
    t.watched_value = value;
    if (same) worker->pause();
}

}  // namespace

namespace {

Site site_of(Thread& t, const void* address, unsigned bytes, Access access, const void* instruction) {
    const bool shared = uintptr_t(address) - uintptr_t(t.owner->arena) < ARENA_BYTES;
    return {t, *t.owner->shadow, access, shared, uintptr_t(address), bytes, instruction};
}

// Does an access that is atomic to its own block only meet one of another block?
void examine_scope(Thread& t, const void* address, unsigned bytes, Access access, bool of_block, const void* instruction) {
    if (!device_memory.contains(address) || !device_memory.holds_page(uintptr_t(address))) return;
    const Site s = site_of(t, address, bytes, access, instruction);
    const auto check = [&](Segment other, uint32_t at, const char* did) {
        if (other < launch_clock.launch_first || launch_clock.chunk(other).block == s.shadow.clock.serial) return;
        if (launch_clock.ordered(other, t, s.shadow.clock, false)) return;
        Finding f =
            finding(s, "race between blocks", "one of the two has the block's scope and is atomic to its own block only");
        f.other = party_of(other, at, s, did);
        worker->stop(f);
    };
    const bool only_reads = access == Access::strong_read;
    const auto known = block_scoped.find(s.address);
    if (known != block_scoped.end() && !(only_reads && known->second.only_reads))
        check(known->second.by.segment, uint32_t(uintptr_t(known->second.by.instruction)),
              known->second.only_reads ? "read" : "wrote");
    if (!of_block) return;
    const Cell& c = *device_memory.cell(address);
    if (c.writer & ATOMIC && !(c.writer & SPLIT)) check(c.writer & SEGMENT_BITS, c.writer_instruction, "wrote");
    if (!only_reads || known == block_scoped.end()) block_scoped[s.address] = {{t.segment, instruction}, only_reads};
}

void report_warp_race(const Site& s, const Volatile::By& other, const char* did) {
    if (is_waiting(s.instruction) || is_waiting(other.instruction) || is_accepted_race(s.instruction, other.instruction))
        return;
    Finding f =
        finding(s, s.shared ? "shared memory race" : "global memory race",
                "no __syncwarp() between them (volatile orders nothing, and since Volta the threads of a warp need not go in "
                "step)");
    f.other = party_of(other.segment, uint32_t(uintptr_t(other.instruction)), s, did);
    worker->stop(f);
}

// Lanes of one warp that exchange values through volatile memory, as before Volta. To wait for a flag is something else.
void examine_in_warp(Thread& t, const void* address, unsigned bytes, Access access, const void* instruction) {
    BlockShadow& shadow = *t.owner->shadow;
    const Site s = site_of(t, address, bytes, access, instruction);
    const unsigned step = bytes < 4 ? 1 : 4;
    for (unsigned at = 0; at < bytes; at += step) {
        Volatile& known = shadow.volatiles[(s.address + at) << 6 | unsigned(t.warp)];
        const auto counts = [&](const Volatile::By& other) {
            return other.segment && int(other.segment & 31) != t.lane &&
                   !launch_clock.ordered(other.segment, t, shadow.clock, false);
        };
        if (access == Access::strong_read) {
            if (counts(known.writer)) report_warp_race(s, known.writer, "wrote");
            for (Volatile::By& reader : known.readers)
                if ((reader.segment & 31) == (t.segment & 31)) {
                    reader = {t.segment, instruction};
                    return;
                }
            known.readers.push_back({t.segment, instruction});
        } else {
            for (const Volatile::By& reader : known.readers)
                if (counts(reader)) report_warp_race(s, reader, "read");
            known.readers.clear();
            known.writer = {t.segment, instruction};
        }
    }
}

}  // namespace

void strong_access(const void* address, unsigned bytes, Access access, const void* instruction, bool of_block) {
    if (!current) return;
    Thread& t = *static_cast<Thread*>(current);
    if (t.fiber->owns(address)) return;  // a volatile variable of the thread's own
    t.watches_from = instruction;
    if (of_block || !block_scoped.empty()) examine_scope(t, address, bytes, access, of_block, instruction);
    if (access == Access::strong_read) notice_spinning(t, address, bytes);
    if (access != Access::strong_write) launch_clock.see(t, uintptr_t(address));
    examine(address, bytes, access, bytes, instruction);
    if (access != Access::strong_read) launch_clock.release(t, uintptr_t(address));
}

void volatile_access(const void* address, unsigned bytes, Access access, const void* instruction) {
    if (current) {
        Thread& t = *static_cast<Thread*>(current);
        const bool is_known = uintptr_t(address) - uintptr_t(t.owner->arena) < ARENA_BYTES ||
                              (device_memory.contains(address) && device_memory.holds_page(uintptr_t(address)));
        if (is_known) examine_in_warp(t, address, bytes, access, instruction);
    }
    strong_access(address, bytes, access, instruction);
}

static void examine_atomic(void* address, unsigned bytes, bool of_block, const void* instruction,
                           Access access = Access::atomic) {
    strong_access(address, bytes, access, instruction, of_block);
    if (options.mode == Mode::count) count_atomic();
}

void note_compare(void* address, unsigned bytes, bool of_block) {
    if (!options.checked()) return;
    Thread* t = static_cast<Thread*>(current);
    if (t) t->compares = true;
    examine_atomic(address, bytes, of_block, __builtin_return_address(0));
    if (t) t->compares = false;
}
void note_atomic(void* address, unsigned bytes, bool of_block) {
    if (options.checked()) examine_atomic(address, bytes, of_block, __builtin_return_address(0));
}
void note_read(const void* address, unsigned bytes) {
    if (options.checked()) examine(address, bytes, Access::read, bytes, __builtin_return_address(0));
}
void note_write(void* address, unsigned bytes) {
    if (options.checked()) examine(address, bytes, Access::write, bytes, __builtin_return_address(0));
}

// A range of any size and alignment.
static void examine_bytes(const void* address, size_t bytes, Access access, const void* instruction) {
    if (!options.checked()) return;
    const size_t MOST = options.mode == Mode::count ? 16 : 1u << 30;  // one load or store of a thread
    for (size_t at = 0; at < bytes; at += MOST)
        examine((const char*)address + at, unsigned(std::min(bytes - at, MOST)), access, 1, instruction);
}

void* copy_memory(void* to, const void* from, size_t bytes) {
    examine_bytes(from, bytes, Access::read, __builtin_return_address(0));
    examine_bytes(to, bytes, Access::write, __builtin_return_address(0));
    return memmove(to, from, bytes);
}
void* fill_memory(void* to, int value, size_t bytes) {
    examine_bytes(to, bytes, Access::write, __builtin_return_address(0));
    return memset(to, value, bytes);
}

void note_strong_read(const void* address, unsigned bytes, bool of_block) {
    if (options.checked())
        strong_access(address, bytes, Access::strong_read, __builtin_return_address(0), of_block);
    else if (current)
        may_be_waiting(address);
}
void note_strong_write(void* address, unsigned bytes, bool of_block) {
    if (options.checked()) strong_access(address, bytes, Access::strong_write, __builtin_return_address(0), of_block);
}
void note_atomic_store(void* address, unsigned bytes, bool of_block) {
    if (options.checked()) examine_atomic(address, bytes, of_block, __builtin_return_address(0), Access::strong_write);
}

void block_fence() {
    if (!options.checked() || !current) return;
    Thread& t = *static_cast<Thread*>(current);
    t.owner->shadow->clock.fenced_for_block[t.linear] = 1;
    launch_clock.fence(t, true);
}

void device_fence() {
    if (options.checked() && current) {
        Thread& t = *static_cast<Thread*>(current);
        t.owner->shadow->clock.fences[t.linear] = Fence::passed;
        launch_clock.fence(t, false);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace emulator

extern "C" long long emulator_first_unwritten(const char* begin, long long bytes) {
    using namespace emulator;
    if (!bytes || options.extents || !device_memory.contains(begin)) return -1;
    for (long long at = 0; at + 4 <= bytes; at += 4) {
        uint32_t word;
        memcpy(&word, begin + at, 4);
        if (word == POISON && (uintptr_t(begin + at) & 3) == 0 && !device_memory.cell(begin + at)->writer) return at;
    }
    return -1;
}

extern "C" long long emulator_count_unwritten(const char* begin, long long bytes) {  // in words
    long long count = 0;
    for (long long at; (at = emulator_first_unwritten(begin, bytes)) >= 0; count++) begin += at + 4, bytes -= at + 4;
    return count;
}
