// Stands in for CUDA's own header of this name.
#pragma once
#include <emulator/half_types.h>

EMULATOR_HALF_TYPE(__half, __half2, float_to_half, half_to_float)
using half = __half;
using half2 = __half2;
struct __half_raw {
    unsigned short x;
};

EMULATOR_INLINE __half __float2half(float v) { return __half(v); }
EMULATOR_INLINE __half __float2half_rn(float v) { return __half(v); }
EMULATOR_INLINE __half __double2half(double v) { return __half(v); }
EMULATOR_INLINE float __half2float(__half v) { return v; }
EMULATOR_INLINE __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
EMULATOR_INLINE __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
EMULATOR_INLINE __half2 __float2half2_rn(float v) { return {__half(v), __half(v)}; }
EMULATOR_INLINE float2 __half22float2(__half2 v) { return {(float)v.x, (float)v.y}; }
EMULATOR_INLINE float __low2float(__half2 v) { return v.x; }
EMULATOR_INLINE float __high2float(__half2 v) { return v.y; }
EMULATOR_INLINE __half __low2half(__half2 v) { return v.x; }
EMULATOR_INLINE __half __high2half(__half2 v) { return v.y; }
EMULATOR_INLINE __half2 __halves2half2(__half a, __half b) { return {a, b}; }
EMULATOR_INLINE __half2 __half2half2(__half v) { return {v, v}; }
EMULATOR_INLINE __half2 make_half2(__half a, __half b) { return {a, b}; }
EMULATOR_INLINE __half __ushort_as_half(unsigned short v) { return ::emulator::bits<__half>(v); }
EMULATOR_INLINE unsigned short __half_as_ushort(__half v) { return ::emulator::bits<unsigned short>(v); }
EMULATOR_INLINE __half __int2half_rn(int v) { return __half((float)v); }
EMULATOR_INLINE int __half2int_rn(__half v) { return __float2int_rn(v); }
