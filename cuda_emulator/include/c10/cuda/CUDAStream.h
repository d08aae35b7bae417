// Every stream is the one stream of the emulated device.
#pragma once
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

namespace c10::cuda {

class CUDAStream {
 public:
    operator cudaStream_t() const { return nullptr; }
    cudaStream_t stream() const { return nullptr; }
    c10::DeviceIndex device_index() const { return 0; }
    c10::Device device() const { return c10::Device(c10::kCPU); }
    int64_t id() const { return 0; }
    bool query() const { return true; }
    void synchronize() const {}
};

inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex = -1) { return {}; }
inline CUDAStream getDefaultCUDAStream(c10::DeviceIndex = -1) { return {}; }
inline CUDAStream getStreamFromPool(bool = false, c10::DeviceIndex = -1) { return {}; }
inline void setCurrentCUDAStream(CUDAStream) {}

}  // namespace c10::cuda

namespace at::cuda {
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;
using c10::cuda::getDefaultCUDAStream;
using c10::cuda::getStreamFromPool;
using c10::cuda::setCurrentCUDAStream;
}  // namespace at::cuda
