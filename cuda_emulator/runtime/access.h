// The entry to check mode's rules, for those who see memory accesses: the compiler's instrumentation and the device API.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulator {

struct Thread;

enum class Access {
    read,
    write,
    atomic,       // reads and writes in one step
    strong_read,  // volatile: allowed to meet atomics
    strong_write,
    lands,  // an asynchronous copy arrives
};

// The device demands that the address is a multiple of `alignment`.
void examine(const void* address, unsigned bytes, Access access, unsigned alignment, const void* instruction);
// The host code of a plain CUDA program touches memory: the device's is none of its own (host_memory.cpp).
void examine_host(const void* address, unsigned bytes, Access access, const void* instruction);
// A volatile or atomic access, which may order others. of_block: it has the block's scope.
void strong_access(const void* address, unsigned bytes, Access access, const void* instruction, bool of_block = false);
// The same of a volatile one, which is no synchronisation between the lanes of a warp.
void volatile_access(const void* address, unsigned bytes, Access access, const void* instruction);
// An asynchronous instruction of `thread` begins to read the block's shared memory; `reader` is of async_reads.h.
void examine_async_read(Thread& thread, uint32_t offset, unsigned bytes, uint32_t reader, const void* instruction);
// The rules of `examine` for a range that count mode counts otherwise.
void examine_range(const void* address, unsigned bytes, Access access, const void* instruction);
// From here to its landing nobody may touch the range.
void mark_in_flight(void* address, unsigned bytes, unsigned alignment, const void* instruction);
// The copy that `issuer` began has arrived.
void mark_landed(Thread& issuer, void* address, unsigned bytes);

}  // namespace emulator
