// What declarations of load_inline's functions take of PyTorch's header of this name.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace at {
class Tensor;
}
namespace torch {
using at::Tensor;
}
