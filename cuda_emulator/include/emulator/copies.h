// memcpy, memset and memmove of kernel text: the compiler expands many calls behind the back of its own instrumentation, and
// leaves others to the C library, which has none. nvcc_macros.h puts these in their place in check and count mode.
#pragma once
#include <emulator/runtime_api.h>

// A copy of such a size is a load and a store to the compiler, which reports them.
EMULATOR_INLINE void* emulator_memcpy(void* to, const void* from, size_t bytes) {
    if (__builtin_constant_p(bytes) && (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16))
        return __builtin_memcpy(to, from, bytes);
    return ::emulator::copy_memory(to, from, bytes);
}
EMULATOR_INLINE void* emulator_memmove(void* to, const void* from, size_t bytes) {
    return ::emulator::copy_memory(to, from, bytes);
}
EMULATOR_INLINE void* emulator_memset(void* to, int value, size_t bytes) { return ::emulator::fill_memory(to, value, bytes); }

namespace std {
using ::emulator_memcpy;
using ::emulator_memmove;
using ::emulator_memset;
}  // namespace std
