// The part of PyTorch's header of this name that extensions use, in a fraction of the time. The headers of the operators that
// a text names are included behind its own. If it needs more, it is compiled with the full headers instead.
#pragma once
#include <map>
#include <set>
#include <unordered_set>

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#ifdef AT_PER_OPERATOR_HEADERS
#include <ATen/TensorOperators.h>
#else
#define AT_PER_OPERATOR_HEADERS  // or else it includes all operators
#include <ATen/TensorOperators.h>
#undef AT_PER_OPERATOR_HEADERS
#endif

namespace torch {
using namespace at;  // NOLINT
using Dtype = at::ScalarType;
constexpr auto kUInt8 = at::kByte;
constexpr auto kInt8 = at::kChar;
constexpr auto kInt16 = at::kShort;
constexpr auto kInt32 = at::kInt;
constexpr auto kInt64 = at::kLong;
constexpr auto kFloat16 = at::kHalf;
constexpr auto kBFloat16 = at::kBFloat16;
constexpr auto kFloat32 = at::kFloat;
constexpr auto kFloat64 = at::kDouble;
}  // namespace torch
