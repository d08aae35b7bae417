// CUDA's keywords as seen by a C++ compiler. `__shared__`, `<<< >>>` and
// `__noinline__`, a word that the C++ library uses, are rewritten before it sees the text.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __restrict__ __restrict
#define __align__(bytes) alignas(bytes)
#define __builtin_align__(bytes) alignas(bytes)
