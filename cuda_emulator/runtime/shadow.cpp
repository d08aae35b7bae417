// The rules that check mode applies to every access.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>

#include "accepted_races.h"
#include "counters.h"
#include "shadow_state.h"
#include "streams.h"

namespace emulator {
namespace {

// In `reader`, two bits: whether others have read since without being ordered behind the one that is named.
enum Readers : uint32_t { one = 0, one_warp = 1u << 30, one_block = 2u << 30, blocks = 3u << 30 };
constexpr uint32_t READERS = 3u << 30;

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

void begin_launch_images() {
    images.clear();
    last_image = {0, 0};
    dl_iterate_phdr(add_images, nullptr);
}

void proxy_fence() {
    if (options.checked()) launch_clock.proxy_fence(*static_cast<Thread*>(current));
}

}  // namespace emulator
