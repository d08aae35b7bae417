// The part of PyTorch's header of this name that extensions use, in a third of the time. If a text needs more, it is compiled
// with the full headers instead.
#pragma once
#ifdef EMULATOR_DECLARATIONS_ONLY  // the text declares functions and defines none
#include <ATen/core/Tensor.h>
#else
#include <ATen/ATen.h>
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
