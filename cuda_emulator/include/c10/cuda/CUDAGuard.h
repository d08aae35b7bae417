// There is one device, and it is always the current one.
#pragma once
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Optional.h>

namespace c10::cuda {

struct CUDAGuard {
    explicit CUDAGuard(c10::DeviceIndex) {}
    explicit CUDAGuard(c10::Device) {}
    CUDAGuard(const CUDAGuard&) = delete;
    CUDAGuard& operator=(const CUDAGuard&) = delete;
    ~CUDAGuard() {}
    void set_device(c10::Device) {}
    void set_index(c10::DeviceIndex) {}
};

struct OptionalCUDAGuard {
    OptionalCUDAGuard() {}
    template <class T>
    explicit OptionalCUDAGuard(T&&) {}
    ~OptionalCUDAGuard() {}
    template <class T>
    void set_device(T&&) {}
};

struct CUDAStreamGuard {
    template <class T>
    explicit CUDAStreamGuard(T&&) {}
    ~CUDAStreamGuard() {}
};

}  // namespace c10::cuda

namespace at::cuda {
using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStreamGuard;
using c10::cuda::OptionalCUDAGuard;
using OptionalCUDADeviceGuard = OptionalCUDAGuard;
}  // namespace at::cuda
