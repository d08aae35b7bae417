// Numbers of 8 bits: E4M3, which has no infinities, and E5M2.
#pragma once
#include <emulator/runtime_api.h>
#include <cmath>

namespace emulator {

// To nearest even. What is too large becomes the largest number where it saturates, or else an infinity, of which E4M3 has
// none: NaN there.
template <bool E4M3>
EMULATOR_UNCHECKED inline uint8_t to_float8(double x, bool saturates) {
    const int fraction = E4M3 ? 3 : 2, bias = E4M3 ? 7 : 15;
    const unsigned largest = E4M3 ? 0x7e : 0x7b, sign = std::signbit(x) ? 0x80 : 0;
    if (x != x) return 0x7f;
    x = std::fabs(x);
    const int exponent = x < std::ldexp(1.0, 1 - bias) ? 1 - bias : std::ilogb(std::fmin(x, 1e9));
    const unsigned steps = (unsigned)std::nearbyint(std::ldexp(std::fmin(x, 1e9), fraction - exponent));
    const unsigned bits = ((exponent + bias - 1) << fraction) + steps;  // a carry goes into the exponent
    if (bits > largest) return uint8_t(sign | (saturates ? largest : largest + 1));
    return uint8_t(sign | bits);
}
template <bool E4M3>
EMULATOR_UNCHECKED inline float float8_to_float(uint8_t x) {
    const int fraction = E4M3 ? 3 : 2, bias = E4M3 ? 7 : 15;
    const int magnitude = x & 0x7f, exponent = magnitude >> fraction, rest = magnitude & ((1 << fraction) - 1);
    float value = std::ldexp(float(exponent ? rest + (1 << fraction) : rest), (exponent ? exponent : 1) - bias - fraction);
    if (E4M3 ? magnitude == 0x7f : magnitude > 0x7c) value = __builtin_nanf("");
    if (!E4M3 && magnitude == 0x7c) value = INFINITY;
    return x & 0x80 ? -value : value;
}

}  // namespace emulator
