// Conversions of half and bfloat16, to nearest even. By the compiler's own half type where it has one.
#pragma once
#include <stdint.h>
#include <string.h>

namespace emulator {

inline float half_to_float(uint16_t h) {
#ifdef __FLT16_MANT_DIG__
    _Float16 value;
    memcpy(&value, &h, 2);
    return (float)value;
#else
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ffu;
    uint32_t u;
    if (exponent == 31)
        u = sign | 0x7f800000u | mantissa << 13;
    else if (exponent)
        u = sign | (exponent + 112) << 23 | mantissa << 13;
    else {
        const float magnitude = (float)mantissa * 0x1p-24f;
        memcpy(&u, &magnitude, 4);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
#endif
}

inline uint16_t float_to_half(float f) {
#ifdef __FLT16_MANT_DIG__
    const _Float16 value = (_Float16)f;
    uint16_t h;
    memcpy(&h, &value, 2);
    return h;
#else
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // subnormal: let the addition round
        float small;
        memcpy(&small, &magnitude, 4);
        small += 0.5f;
        uint32_t bits;
        memcpy(&bits, &small, 4);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
#endif
}

inline float bfloat16_to_float(uint16_t b) {
    const uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline uint16_t float_to_bfloat16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

}  // namespace emulator
