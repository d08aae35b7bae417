// __half, __nv_bfloat16 and their pairs. Arithmetic is done in float and rounded once, which gives what the device's own gives:
// float has more than twice their bits. Functions of the same name for both types are friends, found by their arguments.
#pragma once
#include <emulator/atomics.h>
#include <emulator/conversions.h>
#include <emulator/float16.h>
#include <emulator/math.h>
#include <emulator/vector_types.h>
#include <emulator/warp.h>

namespace emulator {

// Types that a program uses stand in a namespace without functions: C++ looks for those beside their arguments' types, and they
// would stand beside a program's own functions of the same name.
namespace types {
struct Float16 {
    static constexpr uint16_t INFINITY_BITS = 0x7c00, NAN_BITS = 0x7fff;
    static float to_float(uint16_t bits) { return half_to_float(bits); }
    static uint16_t nearest(float value) { return float_to_half(value); }
};
struct BFloat16 {
    static constexpr uint16_t INFINITY_BITS = 0x7f80, NAN_BITS = 0x7fff;
    static float to_float(uint16_t bits) { return bfloat16_to_float(bits); }
    static uint16_t nearest(float value) { return float_to_bfloat16(value); }
};
}  // namespace types

// `value` rounded to 16 bits in a direction: the nearest number, and a step back where that lies on the wrong side.
template <class Format, Rounding TO>
EMULATOR_UNCHECKED inline uint16_t bits_rounded(float value) {
    const uint16_t bits = Format::nearest(value);
    const float near = Format::to_float(bits);
    const bool above = near > value, below = near < value, negative = bits >> 15;
    const bool step_down = above && (TO == Rounding::down || (TO == Rounding::zero && !negative));
    const bool step_up = below && (TO == Rounding::up || (TO == Rounding::zero && negative));
    if (step_down) return negative ? bits + 1 : bits - 1;
    if (step_up) return negative ? bits - 1 : bits + 1;
    return bits;
}

template <class Number, Rounding TO>
EMULATOR_INLINE Number rounded_to(float value) {
    return Number::of_bits(bits_rounded<typename Number::Format, TO>(value));
}

// PyTorch has nvcc compile its users' texts without the operators of __half; those of bfloat16 stay.
template <class F>
constexpr bool has_operators() {
#ifdef __CUDA_NO_HALF_OPERATORS__
    return !std::is_same<F, types::Float16>::value;
#else
    return true;
#endif
}
template <class F>
constexpr bool pair_has_operators() {
#ifdef __CUDA_NO_HALF2_OPERATORS__
    return !std::is_same<F, types::Float16>::value;
#else
    return true;
#endif
}
#define EMULATOR_OPERATOR                                \
    static_assert(                                       \
        has_operators<F>(),                              \
        "__half has no operators here: PyTorch defines " \
        "__CUDA_NO_HALF_OPERATORS__; use __hadd, __hmul and the like, or -U__CUDA_NO_HALF_OPERATORS__ in extra_cuda_cflags")
#define EMULATOR_PAIR_OPERATOR                                                                                           \
    static_assert(pair_has_operators<F>(),                                                                               \
                  "__half2 has no operators here: PyTorch defines "                                                      \
                  "__CUDA_NO_HALF2_OPERATORS__; use __hadd2, __hmul2 and the like, or -U__CUDA_NO_HALF2_OPERATORS__ in " \
                  "extra_cuda_cflags")
#define EMULATOR_NUMBER16_OPERATOR(NAME, EXPRESSION)               \
    friend EMULATOR_INLINE Number16 NAME(Number16 a, Number16 b) { \
        EMULATOR_OPERATOR;                                         \
        const float x = a, y = b;                                  \
        return Number16(EXPRESSION);                               \
    }

#define EMULATOR_NUMBER16_UNARY(NAME, EXPRESSION)      \
    friend EMULATOR_INLINE Number16 NAME(Number16 a) { \
        const float x = a;                             \
        return Number16(EXPRESSION);                   \
    }
#define EMULATOR_NUMBER16_BINARY(NAME, EXPRESSION)                 \
    friend EMULATOR_INLINE Number16 NAME(Number16 a, Number16 b) { \
        const float x = a, y = b;                                  \
        return Number16(EXPRESSION);                               \
    }
// NAME##u is also true if one of them is a NaN.
#define EMULATOR_NUMBER16_COMPARE(NAME, OPERATOR)                           \
    friend EMULATOR_INLINE bool operator OPERATOR(Number16 a, Number16 b) { \
        EMULATOR_OPERATOR;                                                  \
        return (float)a OPERATOR(float) b;                                  \
    }                                                                       \
    friend EMULATOR_INLINE bool __h##NAME(Number16 a, Number16 b) {         \
        return emulator_ordered(a, b) && (float)a OPERATOR(float) b;        \
    }                                                                       \
    friend EMULATOR_INLINE bool __h##NAME##u(Number16 a, Number16 b) {      \
        return !emulator_ordered(a, b) || (float)a OPERATOR(float) b;       \
    }

namespace types {

// The bits alone, of one number and of two.
template <class F>
struct alignas(2) Raw16 {
    unsigned short x;
};
template <class F>
struct alignas(4) RawPair16 {
    unsigned short x, y;
};

template <class F>
struct alignas(2) Number16 {
    using Format = F;
    uint16_t __x;

    Number16() = default;
    EMULATOR_INLINE Number16(Raw16<F> raw) : __x(raw.x) {}
    EMULATOR_INLINE operator Raw16<F>() const { return {__x}; }
    EMULATOR_INLINE Number16(float v) : __x(F::nearest(v)) {}
    EMULATOR_INLINE Number16(double v) : Number16(float_to_odd(v)) {}
    template <class T, class = std::enable_if_t<std::is_integral<T>::value>>
    EMULATOR_INLINE Number16(T v) : Number16(integer_to_odd(v)) {}
    EMULATOR_INLINE operator float() const { return F::to_float(__x); }
    static EMULATOR_INLINE Number16 of_bits(uint16_t bits) {
        Number16 number;
        number.__x = bits;
        return number;
    }

    EMULATOR_INLINE Number16& operator+=(Number16 b) { return *this = *this + b; }
    EMULATOR_INLINE Number16& operator-=(Number16 b) { return *this = *this - b; }
    EMULATOR_INLINE Number16& operator*=(Number16 b) { return *this = *this * b; }
    EMULATOR_INLINE Number16& operator/=(Number16 b) { return *this = *this / b; }
    EMULATOR_INLINE Number16& operator++() { return *this = *this + Number16(1.0f); }
    EMULATOR_INLINE Number16& operator--() { return *this = *this - Number16(1.0f); }
    EMULATOR_INLINE Number16 operator++(int) {
        const Number16 before = *this;
        ++*this;
        return before;
    }
    EMULATOR_INLINE Number16 operator--(int) {
        const Number16 before = *this;
        --*this;
        return before;
    }
    friend EMULATOR_INLINE Number16 operator+(Number16 a) { return a; }
    friend EMULATOR_INLINE Number16 emulator_sum(Number16 a, Number16 b) {
        return Number16((float)a + (float)b);
    }  // for atomicAdd

    friend EMULATOR_INLINE bool emulator_ordered(Number16 a, Number16 b) { return !__hisnan(a) && !__hisnan(b); }
    friend EMULATOR_INLINE bool __hisnan(Number16 a) { return (a.__x & 0x7fff) > F::INFINITY_BITS; }
    friend EMULATOR_INLINE int __hisinf(Number16 a) { return (a.__x & 0x7fff) != F::INFINITY_BITS ? 0 : a.__x >> 15 ? -1 : 1; }
    EMULATOR_NUMBER16_COMPARE(eq, ==)
    EMULATOR_NUMBER16_COMPARE(ne, !=)
    EMULATOR_NUMBER16_COMPARE(lt, <)
    EMULATOR_NUMBER16_COMPARE(le, <=)
    EMULATOR_NUMBER16_COMPARE(gt, >)
    EMULATOR_NUMBER16_COMPARE(ge, >=)

    EMULATOR_NUMBER16_UNARY(operator-, -x)
    EMULATOR_NUMBER16_UNARY(__hneg, -x)
    EMULATOR_NUMBER16_UNARY(__habs, fabsf(x))
    EMULATOR_NUMBER16_OPERATOR(operator+, x + y)
    EMULATOR_NUMBER16_OPERATOR(operator-, x - y)
    EMULATOR_NUMBER16_OPERATOR(operator*, x* y)
    EMULATOR_NUMBER16_OPERATOR(operator/, x / y)
    EMULATOR_NUMBER16_BINARY(__hadd, x + y)
    EMULATOR_NUMBER16_BINARY(__hsub, x - y)
    EMULATOR_NUMBER16_BINARY(__hmul, x* y)
    EMULATOR_NUMBER16_BINARY(__hdiv, x / y)
    EMULATOR_NUMBER16_BINARY(__hadd_rn, x + y)
    EMULATOR_NUMBER16_BINARY(__hsub_rn, x - y)
    EMULATOR_NUMBER16_BINARY(__hmul_rn, x* y)
    EMULATOR_NUMBER16_BINARY(__hadd_sat, __saturatef(x + y))
    EMULATOR_NUMBER16_BINARY(__hsub_sat, __saturatef(x - y))
    EMULATOR_NUMBER16_BINARY(__hmul_sat, __saturatef(x* y))
    EMULATOR_NUMBER16_BINARY(__hmax, maximum(x, y))
    EMULATOR_NUMBER16_BINARY(__hmin, minimum(x, y))
    EMULATOR_NUMBER16_BINARY(__hmax_nan, x != x || y != y ? x + y : maximum(x, y))
    EMULATOR_NUMBER16_BINARY(__hmin_nan, x != x || y != y ? x + y : minimum(x, y))
    friend EMULATOR_INLINE Number16 __hfma(Number16 a, Number16 b, Number16 c) {
        return Number16(float_to_odd(sum_to_odd((double)(float)a * (float)b, (float)c)));
    }
    friend EMULATOR_INLINE Number16 __hfma_sat(Number16 a, Number16 b, Number16 c) {
        return Number16(__saturatef(__hfma(a, b, c)));
    }
    friend EMULATOR_INLINE Number16 __hfma_relu(Number16 a, Number16 b, Number16 c) {
        const Number16 sum = __hfma(a, b, c);
        return sum < Number16(0.0f) ? Number16(0.0f) : sum;
    }

    EMULATOR_NUMBER16_UNARY(hexp, expf(x))
    EMULATOR_NUMBER16_UNARY(hexp2, exp2f(x))
    EMULATOR_NUMBER16_UNARY(hexp10, exp10f(x))
    EMULATOR_NUMBER16_UNARY(hlog, logf(x))
    EMULATOR_NUMBER16_UNARY(hlog2, log2f(x))
    EMULATOR_NUMBER16_UNARY(hlog10, log10f(x))
    EMULATOR_NUMBER16_UNARY(hsqrt, sqrtf(x))
    EMULATOR_NUMBER16_UNARY(hrsqrt, 1.0f / sqrtf(x))
    EMULATOR_NUMBER16_UNARY(hrcp, 1.0f / x)
    EMULATOR_NUMBER16_UNARY(hsin, sinf(x))
    EMULATOR_NUMBER16_UNARY(hcos, cosf(x))
    EMULATOR_NUMBER16_UNARY(htanh, tanhf(x))
    EMULATOR_NUMBER16_UNARY(htanh_approx, tanhf(x))
    EMULATOR_NUMBER16_UNARY(hfloor, floorf(x))
    EMULATOR_NUMBER16_UNARY(hceil, ceilf(x))
    EMULATOR_NUMBER16_UNARY(htrunc, truncf(x))
    EMULATOR_NUMBER16_UNARY(hrint, rintf(x))
};
#undef EMULATOR_NUMBER16_UNARY
#undef EMULATOR_NUMBER16_BINARY
#undef EMULATOR_NUMBER16_COMPARE

// What a pair's function does to each half.
#define EMULATOR_PAIR16_UNARY(NAME, SCALAR) \
    friend EMULATOR_INLINE Pair16 NAME(Pair16 a) { return {SCALAR(a.x), SCALAR(a.y)}; }
#define EMULATOR_PAIR16_BINARY(NAME, SCALAR) \
    friend EMULATOR_INLINE Pair16 NAME(Pair16 a, Pair16 b) { return {SCALAR(a.x, b.x), SCALAR(a.y, b.y)}; }
#define EMULATOR_PAIR16_OPERATOR(NAME, SCALAR)               \
    friend EMULATOR_INLINE Pair16 NAME(Pair16 a, Pair16 b) { \
        EMULATOR_PAIR_OPERATOR;                              \
        return {SCALAR(a.x, b.x), SCALAR(a.y, b.y)};         \
    }
#define EMULATOR_PAIR16_TERNARY(NAME, SCALAR) \
    friend EMULATOR_INLINE Pair16 NAME(Pair16 a, Pair16 b, Pair16 c) { return {SCALAR(a.x, b.x, c.x), SCALAR(a.y, b.y, c.y)}; }
// One and zero for each half, whether both are, and a mask of 16 bits for each half that is.
#define EMULATOR_PAIR16_COMPARE(NAME)                                                                                    \
    friend EMULATOR_INLINE Pair16 __h##NAME##2(Pair16 a, Pair16 b) {                                                     \
        return {Number(__h##NAME(a.x, b.x) ? 1.0f : 0.0f), Number(__h##NAME(a.y, b.y) ? 1.0f : 0.0f)};                   \
    }                                                                                                                    \
    friend EMULATOR_INLINE bool __hb##NAME##2(Pair16 a, Pair16 b) { return __h##NAME(a.x, b.x) && __h##NAME(a.y, b.y); } \
    friend EMULATOR_INLINE unsigned __h##NAME##2_mask(Pair16 a, Pair16 b) {                                              \
        return (__h##NAME(a.x, b.x) ? 0xffffu : 0) | (__h##NAME(a.y, b.y) ? 0xffff0000u : 0);                            \
    }
#define EMULATOR_PAIR16_COMPARES(NAME) EMULATOR_PAIR16_COMPARE(NAME) EMULATOR_PAIR16_COMPARE(NAME##u)
#define EMULATOR_PAIR16_FUNCTION(NAME) EMULATOR_PAIR16_UNARY(h2##NAME, h##NAME)

template <class F>
struct alignas(4) Pair16 {
    using Number = Number16<F>;
    Number x, y;
    EMULATOR_WHOLE

    Pair16() = default;
    EMULATOR_INLINE Pair16(Number x, Number y) : x(x), y(y) {}
    EMULATOR_INLINE Pair16(RawPair16<F> raw) : x(Number::of_bits(raw.x)), y(Number::of_bits(raw.y)) {}
    EMULATOR_INLINE operator RawPair16<F>() const { return {x.__x, y.__x}; }

    EMULATOR_INLINE Pair16& operator+=(Pair16 b) { return *this = *this + b; }
    EMULATOR_INLINE Pair16& operator-=(Pair16 b) { return *this = *this - b; }
    EMULATOR_INLINE Pair16& operator*=(Pair16 b) { return *this = *this * b; }
    EMULATOR_INLINE Pair16& operator/=(Pair16 b) { return *this = *this / b; }
    friend EMULATOR_INLINE Pair16 operator+(Pair16 a) { return a; }
    friend EMULATOR_INLINE Pair16 emulator_sum(Pair16 a, Pair16 b) { return {emulator_sum(a.x, b.x), emulator_sum(a.y, b.y)}; }
    friend EMULATOR_INLINE bool operator==(Pair16 a, Pair16 b) { return __hbeq2(a, b); }
    friend EMULATOR_INLINE bool operator!=(Pair16 a, Pair16 b) { return __hbneu2(a, b); }
    friend EMULATOR_INLINE bool operator<(Pair16 a, Pair16 b) { return __hblt2(a, b); }
    friend EMULATOR_INLINE bool operator<=(Pair16 a, Pair16 b) { return __hble2(a, b); }
    friend EMULATOR_INLINE bool operator>(Pair16 a, Pair16 b) { return __hbgt2(a, b); }
    friend EMULATOR_INLINE bool operator>=(Pair16 a, Pair16 b) { return __hbge2(a, b); }
    EMULATOR_PAIR16_COMPARES(eq)
    EMULATOR_PAIR16_COMPARES(ne)
    EMULATOR_PAIR16_COMPARES(lt)
    EMULATOR_PAIR16_COMPARES(le)
    EMULATOR_PAIR16_COMPARES(gt)
    EMULATOR_PAIR16_COMPARES(ge)
    friend EMULATOR_INLINE Pair16 __hisnan2(Pair16 a) {
        return {Number(__hisnan(a.x) ? 1.0f : 0.0f), Number(__hisnan(a.y) ? 1.0f : 0.0f)};
    }

    EMULATOR_PAIR16_UNARY(operator-, -)
    EMULATOR_PAIR16_UNARY(__hneg2, __hneg)
    EMULATOR_PAIR16_UNARY(__habs2, __habs)
    EMULATOR_PAIR16_OPERATOR(operator+, __hadd)
    EMULATOR_PAIR16_OPERATOR(operator-, __hsub)
    EMULATOR_PAIR16_OPERATOR(operator*, __hmul)
    EMULATOR_PAIR16_OPERATOR(operator/, __hdiv)
    EMULATOR_PAIR16_BINARY(__hadd2, __hadd)
    EMULATOR_PAIR16_BINARY(__hsub2, __hsub)
    EMULATOR_PAIR16_BINARY(__hmul2, __hmul)
    EMULATOR_PAIR16_BINARY(__h2div, __hdiv)
    EMULATOR_PAIR16_BINARY(__hadd2_rn, __hadd)
    EMULATOR_PAIR16_BINARY(__hsub2_rn, __hsub)
    EMULATOR_PAIR16_BINARY(__hmul2_rn, __hmul)
    EMULATOR_PAIR16_BINARY(__hadd2_sat, __hadd_sat)
    EMULATOR_PAIR16_BINARY(__hsub2_sat, __hsub_sat)
    EMULATOR_PAIR16_BINARY(__hmul2_sat, __hmul_sat)
    EMULATOR_PAIR16_BINARY(__hmax2, __hmax)
    EMULATOR_PAIR16_BINARY(__hmin2, __hmin)
    EMULATOR_PAIR16_BINARY(__hmax2_nan, __hmax_nan)
    EMULATOR_PAIR16_BINARY(__hmin2_nan, __hmin_nan)
    EMULATOR_PAIR16_TERNARY(__hfma2, __hfma)
    EMULATOR_PAIR16_TERNARY(__hfma2_sat, __hfma_sat)
    EMULATOR_PAIR16_TERNARY(__hfma2_relu, __hfma_relu)
    EMULATOR_PAIR16_FUNCTION(exp)
    EMULATOR_PAIR16_FUNCTION(exp2)
    EMULATOR_PAIR16_FUNCTION(exp10)
    EMULATOR_PAIR16_FUNCTION(log)
    EMULATOR_PAIR16_FUNCTION(log2)
    EMULATOR_PAIR16_FUNCTION(log10)
    EMULATOR_PAIR16_FUNCTION(sqrt)
    EMULATOR_PAIR16_FUNCTION(rsqrt)
    EMULATOR_PAIR16_FUNCTION(rcp)
    EMULATOR_PAIR16_FUNCTION(sin)
    EMULATOR_PAIR16_FUNCTION(cos)
    EMULATOR_PAIR16_FUNCTION(tanh)
    EMULATOR_PAIR16_FUNCTION(tanh_approx)
    EMULATOR_PAIR16_FUNCTION(floor)
    EMULATOR_PAIR16_FUNCTION(ceil)
    EMULATOR_PAIR16_FUNCTION(trunc)
    EMULATOR_PAIR16_FUNCTION(rint)

    friend EMULATOR_INLINE float __low2float(Pair16 a) { return a.x; }
    friend EMULATOR_INLINE float __high2float(Pair16 a) { return a.y; }
    friend EMULATOR_INLINE Pair16 __lowhigh2highlow(Pair16 a) { return {a.y, a.x}; }
};
#undef EMULATOR_PAIR16_UNARY
#undef EMULATOR_PAIR16_BINARY
#undef EMULATOR_PAIR16_TERNARY
#undef EMULATOR_PAIR16_COMPARE
#undef EMULATOR_PAIR16_COMPARES
#undef EMULATOR_PAIR16_FUNCTION

}  // namespace types
}  // namespace emulator

// Conversions between a type of 16 bits and the integers, in all roundings. In their names INTEGER stands for `int`, and NAME
// for `half`: __int2half_rn, __half2int_rn.
#define EMULATOR_FROM_INTEGER(TYPE, NAME, INTEGER, C, SUFFIX, TO)                  \
    EMULATOR_INLINE TYPE __##INTEGER##2##NAME##_##SUFFIX(C v) {                    \
        const float odd = ::emulator::float_to_odd(::emulator::integer_to_odd(v)); \
        return TYPE::of_bits(::emulator::bits_rounded<TYPE::Format, TO>(odd));     \
    }
#define EMULATOR_TO_INTEGER(TYPE, NAME, INTEGER, C, SUFFIX, ROUND) \
    EMULATOR_INLINE C __##NAME##2##INTEGER##_##SUFFIX(TYPE v) { return ::emulator::to_integer<C>(ROUND((float)v)); }
#define EMULATOR_INTEGER_CONVERSIONS(TYPE, NAME, INTEGER, C)                         \
    EMULATOR_FROM_INTEGER(TYPE, NAME, INTEGER, C, rn, ::emulator::Rounding::nearest) \
    EMULATOR_FROM_INTEGER(TYPE, NAME, INTEGER, C, rz, ::emulator::Rounding::zero)    \
    EMULATOR_FROM_INTEGER(TYPE, NAME, INTEGER, C, ru, ::emulator::Rounding::up)      \
    EMULATOR_FROM_INTEGER(TYPE, NAME, INTEGER, C, rd, ::emulator::Rounding::down)    \
    EMULATOR_TO_INTEGER(TYPE, NAME, INTEGER, C, rn, nearbyintf)                      \
    EMULATOR_TO_INTEGER(TYPE, NAME, INTEGER, C, rz, truncf)                          \
    EMULATOR_TO_INTEGER(TYPE, NAME, INTEGER, C, ru, ceilf)                           \
    EMULATOR_TO_INTEGER(TYPE, NAME, INTEGER, C, rd, floorf)
#define EMULATOR_ALL_INTEGER_CONVERSIONS(TYPE, NAME)                 \
    EMULATOR_INTEGER_CONVERSIONS(TYPE, NAME, int, int)               \
    EMULATOR_INTEGER_CONVERSIONS(TYPE, NAME, uint, unsigned)         \
    EMULATOR_INTEGER_CONVERSIONS(TYPE, NAME, short, short)           \
    EMULATOR_INTEGER_CONVERSIONS(TYPE, NAME, ushort, unsigned short) \
    EMULATOR_INTEGER_CONVERSIONS(TYPE, NAME, ll, long long)          \
    EMULATOR_INTEGER_CONVERSIONS(TYPE, NAME, ull, unsigned long long)
