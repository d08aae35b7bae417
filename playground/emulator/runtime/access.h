// The entry to check mode's rules, for those who see memory accesses: the compiler's instrumentation and the device API.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulator {

enum class Access {
    read,
    write,
    atomic,        // reads and writes in one step
    strong_read,   // volatile: allowed to meet atomics
    strong_write,
    lands,         // an asynchronous copy arrives
};

// `aligned`: the device demands that the address is a multiple of the size.
void examine(const void* address, unsigned bytes, Access access, bool aligned, const void* instruction);
// A volatile or atomic access, which may order others.
void strong_access(const void* address, unsigned bytes, Access access, const void* instruction);
// From here to its landing nobody may touch the range.
void mark_in_flight(void* address, unsigned bytes, const void* instruction);
bool is_device_range(const void* address, size_t bytes);

}  // namespace emulator
