// Stands in for CUDA's own header of this name.
#pragma once
#include <emulator/half_types.h>

using __half = emulator::types::Number16<emulator::types::Float16>;
using __half2 = emulator::types::Pair16<emulator::types::Float16>;
using half = __half;
using half2 = __half2;
using __half_raw = emulator::types::Raw16<emulator::types::Float16>;
using __half2_raw = emulator::types::RawPair16<emulator::types::Float16>;

EMULATOR_INLINE __half __float2half(float v) { return __half(v); }
EMULATOR_INLINE __half __float2half_rn(float v) { return __half(v); }
EMULATOR_INLINE __half __float2half_rz(float v) { return emulator::rounded_to<__half, emulator::Rounding::zero>(v); }
EMULATOR_INLINE __half __float2half_ru(float v) { return emulator::rounded_to<__half, emulator::Rounding::up>(v); }
EMULATOR_INLINE __half __float2half_rd(float v) { return emulator::rounded_to<__half, emulator::Rounding::down>(v); }
EMULATOR_INLINE __half __double2half(double v) { return __half(v); }
EMULATOR_INLINE float __half2float(__half v) { return v; }
EMULATOR_INLINE __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
EMULATOR_INLINE __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
EMULATOR_INLINE __half2 __float2half2_rn(float v) { return {__half(v), __half(v)}; }
EMULATOR_INLINE float2 __half22float2(__half2 v) { return {(float)v.x, (float)v.y}; }
EMULATOR_INLINE __half __low2half(__half2 v) { return v.x; }
EMULATOR_INLINE __half __high2half(__half2 v) { return v.y; }
EMULATOR_INLINE __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
EMULATOR_INLINE __half2 __high2half2(__half2 v) { return {v.y, v.y}; }
EMULATOR_INLINE __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
EMULATOR_INLINE __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
EMULATOR_INLINE __half2 __halves2half2(__half a, __half b) { return {a, b}; }
EMULATOR_INLINE __half2 __half2half2(__half v) { return {v, v}; }
EMULATOR_INLINE __half2 make_half2(__half a, __half b) { return {a, b}; }
EMULATOR_INLINE __half __ushort_as_half(unsigned short v) { return __half::of_bits(v); }
EMULATOR_INLINE __half __short_as_half(short v) { return __half::of_bits((unsigned short)v); }
EMULATOR_INLINE unsigned short __half_as_ushort(__half v) { return v.__x; }
EMULATOR_INLINE short __half_as_short(__half v) { return (short)v.__x; }
EMULATOR_ALL_INTEGER_CONVERSIONS(__half, half)

#define CUDART_INF_FP16 __ushort_as_half(0x7c00)
#define CUDART_NAN_FP16 __ushort_as_half(0x7fff)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(0x0001)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(0x7bff)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(0x8000)
#define CUDART_ZERO_FP16 __ushort_as_half(0x0000)
#define CUDART_ONE_FP16 __ushort_as_half(0x3c00)
