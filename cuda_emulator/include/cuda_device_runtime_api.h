// Stands in for CUDA's own header of this name.
#pragma once
#include <cuda_runtime_api.h>
