// The shared window of a block: its dynamic part first, then each declared variable, with red zones between.
#include <string.h>

#include <mutex>

#include "scheduler.h"
#include "shadow.h"

namespace emulator {
namespace {
std::mutex declarations;
int declared = 0;
}  // namespace

void* shared_variable(SharedDeclaration* d) {
    static char nowhere[ARENA_BYTES];
    if (!current) return host_runs_device_code("shared memory", {d->line, nullptr}), nowhere;
    Worker& w = *worker;
    if (d->id < 0) {
        std::lock_guard<std::mutex> lock(declarations);
        if (d->id < 0) d->id = declared++;
    }
    if ((size_t)d->id >= w.shared_offsets.size()) w.shared_offsets.resize(d->id + 1, -1);
    int64_t& offset = w.shared_offsets[d->id];
    if (offset < 0) {
        const size_t alignment = d->alignment > 16 ? d->alignment : 16;
        offset = int64_t((w.shared_used + alignment - 1) / alignment * alignment);
        size_t declared_bytes = d->bytes;
        for (const Worker::Extent& extent : w.shared_extents)
            if (extent.declaration) declared_bytes += extent.declaration->bytes;
        if (declared_bytes > (48 << 10))
            w.stop(w.describe("shared memory exceeded",
                              "the kernel's __shared__ variables take " + std::to_string(declared_bytes) +
                                  " bytes; 49152 can be declared, more must be dynamic",
                              {d->line, nullptr}));
        w.shared_extents.push_back({size_t(offset), offset + d->bytes, d});
        w.shared_used = offset + d->bytes + RED_ZONE;
        if (options.checked()) shared_variable_appears(w.shared_extents.back());
    }
    return static_cast<Thread*>(current)->owner->arena + offset;
}

void* dynamic_shared(const char* name, unsigned element) {
    if (options.checked() && name != worker->dynamic_shape.name) {
        NamedShape& shape = worker->dynamic_shape;
        const bool other = shape.name && (strcmp(shape.name, name ? name : "") || shape.element != element);
        shape = {name ? name : "", other ? 0 : element};  // under several names it has none
    }
    return static_cast<Thread*>(current)->owner->arena + ARENA_START;
}

uint32_t shared_address(const void* pointer) {
    const Block& own = *static_cast<Thread*>(current)->owner;
    const size_t offset = size_t((const char*)pointer - own.arena);
    if (offset >= ARENA_BYTES && own.membership.cluster) {
        const auto& blocks = own.membership.cluster->blocks;
        for (size_t rank = 0; rank < blocks.size(); ++rank)
            if (blocks[rank] && size_t((const char*)pointer - blocks[rank]->arena) < ARENA_BYTES)
                return uint32_t((const char*)pointer - blocks[rank]->arena) | uint32_t(rank + 1) << RANK_SHIFT;
    }
    return uint32_t(offset);
}
void* shared_pointer(uint32_t address) {
    Block& home = home_of(address);
    return home.arena + address;
}
bool is_shared(const void* pointer) {
    return size_t((const char*)pointer - static_cast<Thread*>(current)->owner->arena) < ARENA_BYTES;
}

}  // namespace emulator
