// Stands in for CUDA's own header of this name: numbers of 8 bits, which are converted and not computed with.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <emulator/float8.h>

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned __nv_fp8x4_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

EMULATOR_INLINE __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t saturate,
                                                          __nv_fp8_interpretation_t kind) {
    const bool saturates = saturate == __NV_SATFINITE;
    return kind == __NV_E4M3 ? emulator::to_float8<true>(x, saturates) : emulator::to_float8<false>(x, saturates);
}
EMULATOR_INLINE __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) {
    return __nv_cvt_double_to_fp8(x, saturate, kind);
}
EMULATOR_INLINE __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t saturate,
                                                           __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float_to_fp8(__half(x), saturate, kind);
}
EMULATOR_INLINE __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw x, __nv_saturation_t saturate,
                                                               __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float_to_fp8(__nv_bfloat16(x), saturate, kind);
}
// Of pairs: the first number is in the low byte.
#define EMULATOR_PAIR_TO_FP8(NAME, PAIR, OF_ONE, ONE)                                                               \
    EMULATOR_INLINE __nv_fp8x2_storage_t NAME(PAIR v, __nv_saturation_t saturate, __nv_fp8_interpretation_t kind) { \
        return __nv_fp8x2_storage_t(OF_ONE(ONE{v.x}, saturate, kind) | OF_ONE(ONE{v.y}, saturate, kind) << 8);      \
    }
EMULATOR_PAIR_TO_FP8(__nv_cvt_double2_to_fp8x2, double2, __nv_cvt_double_to_fp8, double)
EMULATOR_PAIR_TO_FP8(__nv_cvt_float2_to_fp8x2, float2, __nv_cvt_float_to_fp8, float)
EMULATOR_PAIR_TO_FP8(__nv_cvt_halfraw2_to_fp8x2, __half2_raw, __nv_cvt_halfraw_to_fp8, __half_raw)
EMULATOR_PAIR_TO_FP8(__nv_cvt_bfloat16raw2_to_fp8x2, __nv_bfloat162_raw, __nv_cvt_bfloat16raw_to_fp8, __nv_bfloat16_raw)
#undef EMULATOR_PAIR_TO_FP8

EMULATOR_INLINE __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t kind) {
    const float value = kind == __NV_E4M3 ? emulator::float8_to_float<true>(x) : emulator::float8_to_float<false>(x);
    return value != value ? __half_raw{0x7fff} : __half_raw(__half(value));
}
EMULATOR_INLINE __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t kind) {
    return {__nv_cvt_fp8_to_halfraw(x & 0xff, kind).x, __nv_cvt_fp8_to_halfraw(x >> 8, kind).x};
}

namespace emulator::types {

template <__nv_fp8_interpretation_t KIND>
struct Number8 {
    __nv_fp8_storage_t __x;
    Number8() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
    explicit EMULATOR_INLINE Number8(T v) : __x(__nv_cvt_double_to_fp8((double)v, __NV_SATFINITE, KIND)) {}
    explicit EMULATOR_INLINE Number8(__half v) : Number8((float)v) {}
    explicit EMULATOR_INLINE Number8(__nv_bfloat16 v) : Number8((float)v) {}
    explicit EMULATOR_INLINE operator __half() const { return __nv_cvt_fp8_to_halfraw(__x, KIND); }
    explicit EMULATOR_INLINE operator __nv_bfloat16() const { return __nv_bfloat16((float)*this); }
    explicit EMULATOR_INLINE operator float() const { return __half(__nv_cvt_fp8_to_halfraw(__x, KIND)); }
    explicit EMULATOR_INLINE operator double() const { return (float)*this; }
    explicit EMULATOR_INLINE operator bool() const { return __x & 0x7f; }
    template <class T, class = std::enable_if_t<std::is_integral<T>::value>>
    explicit EMULATOR_INLINE operator T() const {
        return to_integer<T>(std::trunc((float)*this));
    }
};
template <__nv_fp8_interpretation_t KIND>
struct Pair8 {
    __nv_fp8x2_storage_t __x;
    Pair8() = default;
    explicit EMULATOR_INLINE Pair8(float2 v) : __x(__nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, KIND)) {}
    explicit EMULATOR_INLINE Pair8(double2 v) : __x(__nv_cvt_double2_to_fp8x2(v, __NV_SATFINITE, KIND)) {}
    explicit EMULATOR_INLINE Pair8(__half2 v) : Pair8(__half22float2(v)) {}
    explicit EMULATOR_INLINE Pair8(__nv_bfloat162 v) : Pair8(__bfloat1622float2(v)) {}
    explicit EMULATOR_INLINE operator __half2() const { return __nv_cvt_fp8x2_to_halfraw2(__x, KIND); }
    explicit EMULATOR_INLINE operator float2() const { return __half22float2((__half2) * this); }
};
template <__nv_fp8_interpretation_t KIND>
struct Four8 {
    __nv_fp8x4_storage_t __x;
    Four8() = default;
    explicit EMULATOR_INLINE Four8(float4 v) : __x(of({v.x, v.y}) | of({v.z, v.w}) << 16) {}
    explicit EMULATOR_INLINE Four8(double4 v) : Four8(float_to_odd(v)) {}
    EMULATOR_INLINE Four8(__half2 low, __half2 high) : __x(of(__half22float2(low)) | of(__half22float2(high)) << 16) {}
    EMULATOR_INLINE Four8(__nv_bfloat162 low, __nv_bfloat162 high)
        : __x(of(__bfloat1622float2(low)) | of(__bfloat1622float2(high)) << 16) {}
    explicit EMULATOR_INLINE operator float4() const {
        const Pair8<KIND> pairs[] = {of_bits(__x & 0xffff), of_bits(__x >> 16)};
        const float2 low(pairs[0]), high(pairs[1]);
        return {low.x, low.y, high.x, high.y};
    }

 private:
    static EMULATOR_INLINE unsigned of(float2 v) { return Pair8<KIND>(v).__x; }
    static EMULATOR_INLINE float4 float_to_odd(double4 v) {
        return {::emulator::float_to_odd(v.x), ::emulator::float_to_odd(v.y), ::emulator::float_to_odd(v.z),
                ::emulator::float_to_odd(v.w)};
    }
    static EMULATOR_INLINE Pair8<KIND> of_bits(unsigned bits) {
        Pair8<KIND> pair;
        pair.__x = __nv_fp8x2_storage_t(bits);
        return pair;
    }
};

}  // namespace emulator::types

using __nv_fp8_e4m3 = emulator::types::Number8<__NV_E4M3>;
using __nv_fp8x2_e4m3 = emulator::types::Pair8<__NV_E4M3>;
using __nv_fp8x4_e4m3 = emulator::types::Four8<__NV_E4M3>;
using __nv_fp8_e5m2 = emulator::types::Number8<__NV_E5M2>;
using __nv_fp8x2_e5m2 = emulator::types::Pair8<__NV_E5M2>;
using __nv_fp8x4_e5m2 = emulator::types::Four8<__NV_E5M2>;
