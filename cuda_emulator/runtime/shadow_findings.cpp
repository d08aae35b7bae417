// The findings of check mode: memory as the text names it, who did what, and which rule makes it a mistake.
#include <string.h>

#include <algorithm>
#include <memory>

#include "accepted_races.h"
#include "shadow_state.h"

namespace emulator {

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

namespace {

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

}  // namespace

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

static Named named(const Site& s) { return s.shared ? named_shared(s) : named_global(s); }

Finding finding(const Site& s, const char* kind, const std::string& why, const std::string& did) {
    Finding f = worker->describe(kind, "", {0, s.instruction});
    const Named memory = named(s);
    f.object = memory.object;
    f.parameter = memory.parameter;
    f.why = why;
    f.party.did = did.empty() ? std::string(verb(s.access)) + " it" : did;
    return f;
}

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
static std::string rule_of(const Site& s, const char* did, bool blocks_differ, bool same_warp) {
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
static Finding race_with(const Site& s, Segment other, uint32_t instruction, const char* did) {
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

void report_race(const Site& s, Segment other, uint32_t instruction, const char* did) {
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

[[noreturn]] void report_async_read(const Site& s, const AsyncConflict& conflict) {
    const bool product = conflict.reader->product;
    Finding f = finding(s, "shared memory race",
                        conflict.pending ? std::string(product ? "the product" : "the store") +
                                               " has not been waited for and may still be reading"
                                         : "nothing orders this access behind the wait for that");
    f.other = worker->party(s.shared_home().threads[conflict.thread], {0, conflict.reader->instruction},
                            product ? "began a matrix product that reads it" : "began a bulk store that reads it");
    worker->stop(f);
}

[[noreturn]] void report_missing_proxy_fence(const Site& s, Segment writer, uint32_t instruction) {
    Finding f = finding(s, "missing proxy fence", "no fence.proxy.async since", "has an asynchronous instruction read it");
    f.other = party_of(writer, instruction, s, "wrote");
    worker->stop(f);
}

// Has anything written to the word that holds the byte at an offset in the access?
static bool is_written(const Site& s, unsigned at) {
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
static bool may_be_padding(const Site& s, unsigned at) {
    const uintptr_t most = s.bytes > 16 ? 16 : s.bytes / 2, multiple = s.address | s.bytes | most;
    return (s.whole_object || s.bytes == 16) && !shape_at(s).unpadded && is_written(s, unsigned(at & -(multiple & -multiple)));
}

void note_uninitialised(const Site& s, unsigned at) {
    if (s.shadow.uninitialised.kind.empty() && !may_be_padding(s, at))
        s.shadow.uninitialised =
            finding(s, s.shared ? "uninitialised shared read" : "uninitialised global read", "nothing has written it");
}

[[noreturn]] void report_bounds(const Site& s) {
    if (!s.shared && is_registered((const void*)s.address))
        worker->stop(
            finding(s, "not supported", "the host memory is pinned by cudaHostRegister; in check mode use cudaHostAlloc"));
    if (!s.shared) stop_at_host_memory((const void*)s.address);
    worker->stop(finding(s, s.shared ? "shared memory out of bounds" : "global memory out of bounds", named(s).size,
                         std::string(verb(s.access)) + " " + bytes_text(s.bytes)));
}

void defer_race(const Site& s, Segment other, uint32_t instruction) {
    if (is_accepted_race(s.instruction, whole_address(instruction, s))) return;
    s.thread.forgivable = std::make_shared<Finding>(race_with(s, other, instruction, "atomically updated"));
    s.thread.forgivable_at = (const void*)s.address;
}

void forgive_or_stop(Thread& t, const void* address) {
    const std::shared_ptr<Finding> finding = std::move(t.forgivable);
    t.forgivable = nullptr;
    if (!t.compares || address != t.forgivable_at) worker->stop(*finding);
}

}  // namespace emulator
