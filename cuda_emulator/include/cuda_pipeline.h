// cp.async under the names of CUDA's pipeline primitives.
#pragma once
#include <cuda_runtime.h>

// The last `zeros` bytes of `bytes` are not read, but filled with zeros.
EMULATOR_INLINE void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes, size_t zeros = 0) {
    ::emulator::async_copy(shared, global, (unsigned)bytes, (unsigned)(bytes - zeros));
}
EMULATOR_INLINE void __pipeline_commit() { ::emulator::async_commit(); }
EMULATOR_INLINE void __pipeline_wait_prior(size_t groups) { ::emulator::async_wait((int)groups); }
