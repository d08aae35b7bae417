// What the bindings of most variants include, and take most of their time for; see precompiled_header.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <string>
#include <tuple>
