// Results rounded in a direction: the nearest float, and a step back where that lies on the wrong side of the exact value.
#pragma once
#include <emulator/runtime_api.h>
#include <math.h>
#include <string.h>

namespace emulator {

enum class Rounding { nearest, zero, up, down };

// The exact value is high + low, where |low| is at most half a unit of high's last place.
template <Rounding TO>
EMULATOR_UNCHECKED inline float rounded(double high, double low) {
    const float near = (float)high;
    const double over = (double)near - high;  // exact: the two are close
    const bool above = over > low, below = over < low;
    const bool step_down = above && (TO == Rounding::down || (TO == Rounding::zero && near > 0));
    const bool step_up = below && (TO == Rounding::up || (TO == Rounding::zero && near < 0));
    return step_down ? nextafterf(near, -INFINITY) : step_up ? nextafterf(near, INFINITY) : near;
}

// What a + b loses when it is rounded (Knuth's two-sum).
EMULATOR_UNCHECKED inline double lost(double a, double b, double sum) {
    const double from_b = sum - a;
    return (a - (sum - from_b)) + (b - from_b);
}

template <Rounding TO>
EMULATOR_UNCHECKED inline float sum_rounded(double a, double b) {
    const double sum = a + b;
    if (sum == 0 && TO == Rounding::down && (signbit(a) || signbit(b))) return -0.0f;
    return rounded<TO>(sum, isfinite(sum) ? lost(a, b, sum) : 0.0);
}
template <Rounding TO>
EMULATOR_UNCHECKED inline float product_rounded(float a, float b) {
    return rounded<TO>((double)a * b, 0.0);
}
template <Rounding TO>
EMULATOR_UNCHECKED inline float quotient_rounded(float a, float b) {
    const double quotient = (double)a / b;
    const double rest = isfinite(quotient) && b != 0 && isfinite(b) ? fma(-quotient, (double)b, (double)a) : 0.0;
    return rounded<TO>(quotient, rest / b);
}
template <Rounding TO>
EMULATOR_UNCHECKED inline float root_rounded(float a) {
    const double root = ::sqrt((double)a);
    return rounded<TO>(root, isfinite(root) && root > 0 ? fma(-root, root, (double)a) / (2 * root) : 0.0);
}
// a * b is exact as a double.
template <Rounding TO>
EMULATOR_UNCHECKED inline float fma_rounded(float a, float b, float c) {
    return sum_rounded<TO>((double)a * b, (double)c);
}

// a + b as a double whose last bit is set where anything was lost, so that rounding it once more is right ("round to odd").
EMULATOR_UNCHECKED inline double sum_to_odd(double a, double b) {
    double sum = a + b;
    const double rest = isfinite(sum) ? lost(a, b, sum) : 0.0;
    if (rest != 0) {
        long long bits;
        memcpy(&bits, &sum, 8);
        if (!(bits & 1)) sum = nextafter(sum, rest > 0 ? INFINITY : -INFINITY);
    }
    return sum;
}
EMULATOR_UNCHECKED inline float float_to_odd(double v) {
    float near = (float)v;
    if ((double)near == v || v != v) return near;
    int bits;
    memcpy(&bits, &near, 4);
    return bits & 1 ? near : nextafterf(near, v > (double)near ? INFINITY : -INFINITY);
}

}  // namespace emulator

#define EMULATOR_DIRECTED(SUFFIX, TO)                                                                                    \
    EMULATOR_UNCHECKED inline float __fadd_##SUFFIX(float a, float b) { return ::emulator::sum_rounded<TO>(a, b); }      \
    EMULATOR_UNCHECKED inline float __fsub_##SUFFIX(float a, float b) { return ::emulator::sum_rounded<TO>(a, -b); }     \
    EMULATOR_UNCHECKED inline float __fmul_##SUFFIX(float a, float b) { return ::emulator::product_rounded<TO>(a, b); }  \
    EMULATOR_UNCHECKED inline float __fdiv_##SUFFIX(float a, float b) { return ::emulator::quotient_rounded<TO>(a, b); } \
    EMULATOR_UNCHECKED inline float __frcp_##SUFFIX(float a) { return ::emulator::quotient_rounded<TO>(1.0f, a); }       \
    EMULATOR_UNCHECKED inline float __fsqrt_##SUFFIX(float a) { return ::emulator::root_rounded<TO>(a); }                \
    EMULATOR_UNCHECKED inline float __fmaf_##SUFFIX(float a, float b, float c) { return ::emulator::fma_rounded<TO>(a, b, c); }
EMULATOR_DIRECTED(rz, ::emulator::Rounding::zero)
EMULATOR_DIRECTED(ru, ::emulator::Rounding::up)
EMULATOR_DIRECTED(rd, ::emulator::Rounding::down)
#undef EMULATOR_DIRECTED

// Doubles by the processor's own rounding modes, between barriers that keep the compiler from moving the operation out.
#include <fenv.h>
namespace emulator {
template <class Operation>
EMULATOR_UNCHECKED inline double in_rounding_mode(int mode, double a, double b, double c, Operation operation) {
    const int before = fegetround();
    fesetround(mode);
    __asm__ volatile("" : "+g"(a), "+g"(b), "+g"(c));
    double result = operation(a, b, c);
    __asm__ volatile("" : "+g"(result));
    fesetround(before);
    return result;
}
}  // namespace emulator

#define EMULATOR_DOUBLE(NAME, MODE, PARAMETERS, A, B, C, EXPRESSION)                                                    \
    inline double NAME PARAMETERS {                                                                                     \
        return ::emulator::in_rounding_mode(MODE, A, B, C,                                                              \
                                            [](double x, double y, double z) { return (void)y, (void)z, EXPRESSION; }); \
    }
#define EMULATOR_DIRECTED_DOUBLE(SUFFIX, MODE)                                                     \
    EMULATOR_DOUBLE(__dadd_##SUFFIX, MODE, (double a, double b), a, b, 0, x + y)                   \
    EMULATOR_DOUBLE(__dsub_##SUFFIX, MODE, (double a, double b), a, b, 0, x - y)                   \
    EMULATOR_DOUBLE(__dmul_##SUFFIX, MODE, (double a, double b), a, b, 0, x* y)                    \
    EMULATOR_DOUBLE(__ddiv_##SUFFIX, MODE, (double a, double b), a, b, 0, x / y)                   \
    EMULATOR_DOUBLE(__fma_##SUFFIX, MODE, (double a, double b, double c), a, b, c, ::fma(x, y, z)) \
    EMULATOR_DOUBLE(__dsqrt_##SUFFIX, MODE, (double a), a, 0, 0, ::sqrt(x))                        \
    EMULATOR_DOUBLE(__drcp_##SUFFIX, MODE, (double a), a, 0, 0, 1.0 / x)
EMULATOR_DIRECTED_DOUBLE(rz, FE_TOWARDZERO)
EMULATOR_DIRECTED_DOUBLE(ru, FE_UPWARD)
EMULATOR_DIRECTED_DOUBLE(rd, FE_DOWNWARD)
#undef EMULATOR_DIRECTED_DOUBLE
#undef EMULATOR_DOUBLE
