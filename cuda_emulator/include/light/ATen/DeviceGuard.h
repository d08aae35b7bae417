// The part of PyTorch's header of this name that does without its types of values, which take a second of each compilation.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

namespace at {
inline std::optional<Device> device_of(const Tensor& tensor) {
    return tensor.defined() ? std::optional<Device>(tensor.device()) : std::nullopt;
}
}  // namespace at
