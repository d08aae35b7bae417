// Stands in for CUDA's own header of this name.
#pragma once
#include <emulator/half_types.h>

using __nv_bfloat16 = emulator::types::Number16<emulator::types::BFloat16>;
using __nv_bfloat162 = emulator::types::Pair16<emulator::types::BFloat16>;
using __nv_bfloat16_raw = emulator::types::Raw16<emulator::types::BFloat16>;
using __nv_bfloat162_raw = emulator::types::RawPair16<emulator::types::BFloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

EMULATOR_INLINE __nv_bfloat16 __float2bfloat16(float v) { return __nv_bfloat16(v); }
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16_rz(float v) {
    return emulator::rounded_to<__nv_bfloat16, emulator::Rounding::zero>(v);
}
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16_ru(float v) {
    return emulator::rounded_to<__nv_bfloat16, emulator::Rounding::up>(v);
}
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16_rd(float v) {
    return emulator::rounded_to<__nv_bfloat16, emulator::Rounding::down>(v);
}
EMULATOR_INLINE __nv_bfloat16 __double2bfloat16(double v) { return __nv_bfloat16(v); }
EMULATOR_INLINE float __bfloat162float(__nv_bfloat16 v) { return v; }
EMULATOR_INLINE __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
EMULATOR_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)}; }
EMULATOR_INLINE __nv_bfloat162 __float2bfloat162_rn(float v) { return {__nv_bfloat16(v), __nv_bfloat16(v)}; }
EMULATOR_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) { return {(float)v.x, (float)v.y}; }
EMULATOR_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
EMULATOR_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 v) { return {v, v}; }
EMULATOR_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
EMULATOR_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
EMULATOR_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
EMULATOR_INLINE __nv_bfloat162 __low2bfloat162(__nv_bfloat162 v) { return {v.x, v.x}; }
EMULATOR_INLINE __nv_bfloat162 __high2bfloat162(__nv_bfloat162 v) { return {v.y, v.y}; }
EMULATOR_INLINE __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x, b.x}; }
EMULATOR_INLINE __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.y, b.y}; }
EMULATOR_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return __nv_bfloat16::of_bits(v); }
EMULATOR_INLINE __nv_bfloat16 __short_as_bfloat16(short v) { return __nv_bfloat16::of_bits((unsigned short)v); }
EMULATOR_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.__x; }
EMULATOR_INLINE short __bfloat16_as_short(__nv_bfloat16 v) { return (short)v.__x; }
EMULATOR_ALL_INTEGER_CONVERSIONS(__nv_bfloat16, bfloat16)

#define CUDART_INF_BF16 __ushort_as_bfloat16(0x7f80)
#define CUDART_NAN_BF16 __ushort_as_bfloat16(0x7fff)
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(0x0001)
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(0x7f7f)
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(0x8000)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(0x0000)
#define CUDART_ONE_BF16 __ushort_as_bfloat16(0x3f80)
