// The part of PyTorch's header of this name that a guard of CUDA's takes.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace at {

inline std::optional<Device> device_of(const Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor.device()) : std::nullopt;
}
inline std::optional<Device> device_of(const std::optional<Tensor>& tensor) {
    return tensor ? device_of(*tensor) : std::nullopt;
}

}  // namespace at
