// Stands in front of each file of a plain CUDA program: what nvcc includes and defines by itself. The C++ library's headers
// come first, for they take other ways where they see __CUDACC__.
#pragma once
#include <assert.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime.h>
#include <emulator/nvcc_macros.h>
