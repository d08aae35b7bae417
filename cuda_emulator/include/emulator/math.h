// The device's mathematical functions that the host's <math.h> lacks. Where the device approximates, this is exact:
// results may differ from the hardware's by the error that CUDA documents for the function.
#pragma once
#include <emulator/bits.h>
#include <emulator/conversions.h>
#include <emulator/integers.h>
#include <emulator/rounding.h>
#include <emulator/runtime_api.h>
#include <emulator/special_functions.h>
#include <math.h>
#include <type_traits>

// ---- minimum and maximum as the device has them: -0 is less than +0, and a NaN of any kind loses
namespace emulator {
EMULATOR_UNCHECKED inline float minimum(float a, float b) {
    return a != a ? b : b != b ? a : a < b || (a == b && signbit(a)) ? a : b;
}
EMULATOR_UNCHECKED inline float maximum(float a, float b) {
    return a != a ? b : b != b ? a : a > b || (a == b && !signbit(a)) ? a : b;
}
// With .NaN a NaN of any kind wins, and becomes the device's own.
EMULATOR_UNCHECKED inline float minimum_or_nan(float a, float b) {
    return a != a || b != b ? __int_as_float(0x7fffffff) : minimum(a, b);
}
EMULATOR_UNCHECKED inline float maximum_or_nan(float a, float b) {
    return a != a || b != b ? __int_as_float(0x7fffffff) : maximum(a, b);
}
}  // namespace emulator
extern "C" inline float fminf(float a, float b) noexcept { return ::emulator::minimum(a, b); }
extern "C" inline float fmaxf(float a, float b) noexcept { return ::emulator::maximum(a, b); }

// ---- min and max, with CUDA's rule for mixed types: the common type
template <class A, class B, class = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value>>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value)
        return T(a) != T(a) ? T(b) : T(b) < T(a) ? T(b) : T(a);
    else
        return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value>>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value)
        return T(a) != T(a) ? T(b) : T(a) < T(b) ? T(b) : T(a);
    else
        return T(a) < T(b) ? T(b) : T(a);
}

// ---- powers, exponentials, angles
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float rcbrt(float x) { return rcbrtf(x); }
inline double rcbrt(double x) { return 1.0 / cbrt(x); }
inline float exp10(float x) { return exp10f(x); }
inline float fdividef(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
// The C library declares functions of these names for its own use, so they are macros here.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __tanhf(x) tanhf(x)
#define __powf(x, y) powf(x, y)
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline double sinpi(double x) {
    const double turn = fmod(x, 2.0);  // exact
    return turn == trunc(turn) ? copysign(0.0, x) : sin(3.14159265358979323846 * turn);
}
inline double cospi(double x) {
    const double turn = fmod(fabs(x), 2.0);
    return turn == 0.5 || turn == 1.5 ? 0.0 : cos(3.14159265358979323846 * turn);
}
inline float sinpif(float x) { return (float)sinpi(x); }
inline float cospif(float x) { return (float)cospi(x); }
inline void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }
inline void sincospi(double x, double* s, double* c) { *s = sinpi(x), *c = cospi(x); }

// Rounded to nearest and never contracted with a neighbour.
#define EMULATOR_KEEP(x) __asm__("" : "+g"(x))
inline float __fadd_rn(float a, float b) {
    float r = a + b;
    EMULATOR_KEEP(r);
    return r;
}
inline float __fsub_rn(float a, float b) {
    float r = a - b;
    EMULATOR_KEEP(r);
    return r;
}
inline float __fmul_rn(float a, float b) {
    float r = a * b;
    EMULATOR_KEEP(r);
    return r;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmaf_ieee_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __frsqrt_rn(float a) { return (float)(1.0 / sqrt((double)a)); }
inline double __dadd_rn(double a, double b) {
    double r = a + b;
    EMULATOR_KEEP(r);
    return r;
}
inline double __dsub_rn(double a, double b) { return __dadd_rn(a, -b); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dmul_rn(double a, double b) {
    double r = a * b;
    EMULATOR_KEEP(r);
    return r;
}
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline double __drcp_rn(double a) { return 1.0 / a; }
