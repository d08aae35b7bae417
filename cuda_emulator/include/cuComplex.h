// Stands in for CUDA's own header of this name.
#pragma once
#include <cuda_runtime.h>

#include <cmath>

typedef float2 cuFloatComplex;
typedef double2 cuDoubleComplex;
typedef cuFloatComplex cuComplex;

// SUFFIX ends the names of all but the constructor.
#define EMULATOR_COMPLEX(COMPLEX, REAL, SUFFIX)                                                                    \
    inline COMPLEX make_##COMPLEX(REAL x, REAL y) { return {x, y}; }                                               \
    inline REAL cuCreal##SUFFIX(COMPLEX a) { return a.x; }                                                         \
    inline REAL cuCimag##SUFFIX(COMPLEX a) { return a.y; }                                                         \
    inline COMPLEX cuConj##SUFFIX(COMPLEX a) { return {a.x, -a.y}; }                                               \
    inline COMPLEX cuCadd##SUFFIX(COMPLEX a, COMPLEX b) { return {a.x + b.x, a.y + b.y}; }                         \
    inline COMPLEX cuCsub##SUFFIX(COMPLEX a, COMPLEX b) { return {a.x - b.x, a.y - b.y}; }                         \
    inline COMPLEX cuCmul##SUFFIX(COMPLEX a, COMPLEX b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; } \
    inline COMPLEX cuCdiv##SUFFIX(COMPLEX a, COMPLEX b) {                                                          \
        const REAL scale = 1 / (std::abs(b.x) + std::abs(b.y));                                                    \
        const REAL x = b.x * scale, y = b.y * scale, factor = scale / (x * x + y * y);                             \
        return {(a.x * x + a.y * y) * factor, (a.y * x - a.x * y) * factor};                                       \
    }                                                                                                              \
    inline REAL cuCabs##SUFFIX(COMPLEX a) { return std::hypot(a.x, a.y); }                                         \
    inline COMPLEX cuCfma##SUFFIX(COMPLEX a, COMPLEX b, COMPLEX c) { return cuCadd##SUFFIX(cuCmul##SUFFIX(a, b), c); }
EMULATOR_COMPLEX(cuFloatComplex, float, f)
EMULATOR_COMPLEX(cuDoubleComplex, double, )
#undef EMULATOR_COMPLEX

inline cuComplex make_cuComplex(float x, float y) { return {x, y}; }
inline cuDoubleComplex cuComplexFloatToDouble(cuFloatComplex a) { return {a.x, a.y}; }
inline cuFloatComplex cuComplexDoubleToFloat(cuDoubleComplex a) { return {float(a.x), float(a.y)}; }
