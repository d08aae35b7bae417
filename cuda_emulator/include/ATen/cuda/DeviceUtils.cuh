// Stands in for PyTorch's header of this name.
#pragma once
#include <cuda_runtime.h>

EMULATOR_INLINE unsigned WARP_BALLOT(int predicate, unsigned mask = 0xffffffff) { return __ballot_sync(mask, predicate); }
EMULATOR_INLINE unsigned ACTIVE_MASK() { return __activemask(); }
EMULATOR_INLINE void WARP_SYNC(unsigned mask = 0xffffffff) { __syncwarp(mask); }
template <class T>
EMULATOR_INLINE T WARP_SHFL_XOR(T value, int lanes, int width = 32, unsigned mask = 0xffffffff) {
    return __shfl_xor_sync(mask, value, lanes, width);
}
template <class T>
EMULATOR_INLINE T WARP_SHFL(T value, int source, int width = 32, unsigned mask = 0xffffffff) {
    return __shfl_sync(mask, value, source, width);
}
template <class T>
EMULATOR_INLINE T WARP_SHFL_UP(T value, unsigned delta, int width = 32, unsigned mask = 0xffffffff) {
    return __shfl_up_sync(mask, value, delta, width);
}
template <class T>
EMULATOR_INLINE T WARP_SHFL_DOWN(T value, unsigned delta, int width = 32, unsigned mask = 0xffffffff) {
    return __shfl_down_sync(mask, value, delta, width);
}
