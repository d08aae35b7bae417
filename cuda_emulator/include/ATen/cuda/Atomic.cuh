// Stands in for PyTorch's header of this name: its atomic operations for all of its types.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

inline c10::Half gpuAtomicAdd(c10::Half* address, c10::Half value) {
    const __half old = atomicAdd((__half*)address, __half((float)value));
    return c10::Half((float)old);
}
inline c10::BFloat16 gpuAtomicAdd(c10::BFloat16* address, c10::BFloat16 value) {
    const __nv_bfloat16 old = atomicAdd((__nv_bfloat16*)address, __nv_bfloat16((float)value));
    return c10::BFloat16((float)old);
}
template <class T>
EMULATOR_INLINE T gpuAtomicAdd(T* address, ::emulator::Given<T> value) {
    return atomicAdd(address, value);
}
template <class T>
EMULATOR_INLINE void gpuAtomicAddNoReturn(T* address, ::emulator::Given<T> value) {
    gpuAtomicAdd(address, value);
}
template <class T>
EMULATOR_INLINE T gpuAtomicMax(T* address, ::emulator::Given<T> value) {
    return atomicMax(address, value);
}
template <class T>
EMULATOR_INLINE T gpuAtomicMin(T* address, ::emulator::Given<T> value) {
    return atomicMin(address, value);
}
