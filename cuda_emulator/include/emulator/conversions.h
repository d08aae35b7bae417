// Conversions between floating-point numbers and integers, in the roundings that their names end in.
#pragma once
#include <emulator/rounding.h>
#include <emulator/runtime_api.h>
#include <cmath>
#include <type_traits>

namespace emulator {

// Out of range saturates, as on the device. NaN gives 0, or only the sign bit where one of the types has 64 bits (PTX ISA,
// cvt).
template <class T, class F>
inline T to_integer(F x) {
    constexpr T low = T(1) << (sizeof(T) * 8 - 1);  // the sign bit
    const T least = std::is_signed<T>::value ? low : T(0), most = std::is_signed<T>::value ? T(~low) : T(~T(0));
    if (x != x) return sizeof(T) == 8 || sizeof(F) == 8 ? low : T(0);
    if (x <= F(least)) return least;
    if (x >= F(most)) return most;
    return T(x);
}

// An integer as two doubles whose sum it is.
template <class T>
struct Parts {
    double high, low;
    EMULATOR_UNCHECKED explicit Parts(T v) : high((double)v), low(0) {
        if constexpr (sizeof(T) == 8) high = (double)(v >> 32) * 0x1p32, low = (double)(unsigned)v;
    }
};
// As a double whose last bit says that something was lost, so that another rounding is right.
template <class T>
EMULATOR_UNCHECKED inline double integer_to_odd(T v) {
    const Parts<T> parts(v);
    return sum_to_odd(parts.high, parts.low);
}
template <Rounding TO, class T>
EMULATOR_UNCHECKED inline float integer_rounded(T v) {
    const Parts<T> parts(v);
    return sum_rounded<TO>(parts.high, parts.low);
}

}  // namespace emulator

// In their names FLOAT stands for `float` and INTEGER for `int`: __float2int_rn, __int2float_rn.
#define EMULATOR_CONVERSIONS(FLOAT, INTEGER, C)                                                           \
    inline C __##FLOAT##2##INTEGER##_rn(FLOAT x) { return ::emulator::to_integer<C>(std::nearbyint(x)); } \
    inline C __##FLOAT##2##INTEGER##_rz(FLOAT x) { return ::emulator::to_integer<C>(std::trunc(x)); }     \
    inline C __##FLOAT##2##INTEGER##_rd(FLOAT x) { return ::emulator::to_integer<C>(std::floor(x)); }     \
    inline C __##FLOAT##2##INTEGER##_ru(FLOAT x) { return ::emulator::to_integer<C>(std::ceil(x)); }      \
    inline FLOAT __##INTEGER##2##FLOAT##_rn(C x) { return (FLOAT)x; }
EMULATOR_CONVERSIONS(float, int, int)
EMULATOR_CONVERSIONS(float, uint, unsigned)
EMULATOR_CONVERSIONS(float, ll, long long)
EMULATOR_CONVERSIONS(float, ull, unsigned long long)
EMULATOR_CONVERSIONS(double, int, int)
EMULATOR_CONVERSIONS(double, uint, unsigned)
EMULATOR_CONVERSIONS(double, ll, long long)
EMULATOR_CONVERSIONS(double, ull, unsigned long long)
#undef EMULATOR_CONVERSIONS
#define EMULATOR_TO_FLOAT(SUFFIX, TO)                                                                      \
    inline float __int2float_##SUFFIX(int x) { return ::emulator::integer_rounded<TO>(x); }                \
    inline float __uint2float_##SUFFIX(unsigned x) { return ::emulator::integer_rounded<TO>(x); }          \
    inline float __ll2float_##SUFFIX(long long x) { return ::emulator::integer_rounded<TO>(x); }           \
    inline float __ull2float_##SUFFIX(unsigned long long x) { return ::emulator::integer_rounded<TO>(x); } \
    inline float __double2float_##SUFFIX(double x) { return ::emulator::rounded<TO>(x, 0.0); }
EMULATOR_TO_FLOAT(rz, ::emulator::Rounding::zero)
EMULATOR_TO_FLOAT(ru, ::emulator::Rounding::up)
EMULATOR_TO_FLOAT(rd, ::emulator::Rounding::down)
#undef EMULATOR_TO_FLOAT
inline float __double2float_rn(double x) { return (float)x; }
#define EMULATOR_TO_DOUBLE(INTEGER, C, SUFFIX, MODE)                                                                        \
    inline double __##INTEGER##2double_##SUFFIX(C v) {                                                                      \
        const ::emulator::Parts<C> parts(v);                                                                                \
        return ::emulator::in_rounding_mode(MODE, parts.high, parts.low, 0,                                                 \
                                            [](double high, double low, double) EMULATOR_UNCHECKED { return high + low; }); \
    }
EMULATOR_TO_DOUBLE(ll, long long, rz, FE_TOWARDZERO)
EMULATOR_TO_DOUBLE(ll, long long, ru, FE_UPWARD)
EMULATOR_TO_DOUBLE(ll, long long, rd, FE_DOWNWARD)
EMULATOR_TO_DOUBLE(ull, unsigned long long, rz, FE_TOWARDZERO)
EMULATOR_TO_DOUBLE(ull, unsigned long long, ru, FE_UPWARD)
EMULATOR_TO_DOUBLE(ull, unsigned long long, rd, FE_DOWNWARD)
#undef EMULATOR_TO_DOUBLE
