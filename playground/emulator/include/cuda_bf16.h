// Stands in for CUDA's own header of this name.
#pragma once
#include <emulator/half_types.h>

EMULATOR_HALF_TYPE(__nv_bfloat16, __nv_bfloat162, float_to_bfloat16, bfloat16_to_float)
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

EMULATOR_INLINE __nv_bfloat16 __float2bfloat16(float v) { return __nv_bfloat16(v); }
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
EMULATOR_INLINE float __bfloat162float(__nv_bfloat16 v) { return v; }
EMULATOR_INLINE __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
EMULATOR_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)}; }
EMULATOR_INLINE __nv_bfloat162 __float2bfloat162_rn(float v) { return {__nv_bfloat16(v), __nv_bfloat16(v)}; }
EMULATOR_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) { return {(float)v.x, (float)v.y}; }
EMULATOR_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
EMULATOR_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 v) { return {v, v}; }
EMULATOR_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
EMULATOR_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
EMULATOR_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return ::emulator::bits<__nv_bfloat16>(v); }
EMULATOR_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return ::emulator::bits<unsigned short>(v); }
