#pragma once
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublas_v2.h>

namespace at::cuda {
inline cudaDeviceProp* getCurrentDeviceProperties() {
    static cudaDeviceProp properties;
    return &properties;
}
inline cudaDeviceProp* getDeviceProperties(c10::DeviceIndex) { return getCurrentDeviceProperties(); }
inline int warp_size() { return 32; }
inline bool is_available() { return true; }
inline cublasHandle_t getCurrentCUDABlasHandle() {
    static cublasContext context;
    return &context;
}
}  // namespace at::cuda
