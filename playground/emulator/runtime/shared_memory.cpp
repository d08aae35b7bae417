// The shared window of a block: its dynamic part first, then each declared variable, with red zones between.
#include <mutex>

#include "scheduler.h"
#include "shadow.h"

namespace emulator {
namespace {
std::mutex declarations;
int declared = 0;
}  // namespace

void* shared_variable(SharedDeclaration* d) {
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

void* dynamic_shared() { return static_cast<Thread*>(current)->owner->arena + ARENA_START; }

uint32_t shared_address(const void* pointer) {
    return uint32_t((const char*)pointer - static_cast<Thread*>(current)->owner->arena);
}
void* shared_pointer(uint32_t address) { return static_cast<Thread*>(current)->owner->arena + address; }
bool is_shared(const void* pointer) {
    return size_t((const char*)pointer - static_cast<Thread*>(current)->owner->arena) < ARENA_BYTES;
}

}  // namespace emulator
