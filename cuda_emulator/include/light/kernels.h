// What kernels' texts with the light headers include, in this order; see precompiled_header.
#pragma once
#include <cfloat>

#include <cuda_runtime.h>

#include <torch/types.h>
