// Arithmetic and conversions of PTX that C++ has no operator for.
#pragma once
#include <emulator/conversions.h>
#include <emulator/float16.h>
#include <emulator/math.h>
#include <math.h>
#include <type_traits>

namespace emulator::ptx {

// .ftz: numbers too small to be normal become zeros of their sign.
inline float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
inline float saturate(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline uint32_t shift_left(uint32_t a, uint32_t by) { return by > 31 ? 0 : a << by; }
inline uint64_t shift_left(uint64_t a, uint32_t by) { return by > 63 ? 0 : a << by; }
inline uint32_t shift_right(uint32_t a, uint32_t by) { return by > 31 ? 0 : a >> by; }
inline uint64_t shift_right(uint64_t a, uint32_t by) { return by > 63 ? 0 : a >> by; }
inline int32_t shift_right(int32_t a, uint32_t by) { return a >> (by > 31 ? 31 : by); }
inline int64_t shift_right(int64_t a, uint32_t by) { return a >> (by > 63 ? 63 : by); }

inline uint32_t funnel_left(uint32_t low, uint32_t high, uint32_t by) {
    return uint32_t(((uint64_t(high) << 32 | low) << by) >> 32);
}
inline uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t by) { return uint32_t((uint64_t(high) << 32 | low) >> by); }

inline uint32_t field_mask(uint32_t length) { return length > 31 ? ~0u : (1u << length) - 1; }
inline uint32_t field(uint32_t a, uint32_t begin, uint32_t length) {
    return shift_right(a, begin & 255) & field_mask(length & 255);
}
inline int32_t field(int32_t a, uint32_t begin, uint32_t length) {
    begin &= 255, length &= 255;
    if (!length) return 0;
    const uint32_t last = begin + length - 1;
    const uint32_t sign = uint32_t(a) >> (last > 31 ? 31 : last) & 1, mask = field_mask(length);
    // Beyond the word's end, and beyond the field's, stands the sign.
    const uint32_t inside = begin > 31 ? 0 : mask & (~0u >> begin);
    return int32_t((shift_right(uint32_t(a), begin) & inside) | (sign ? ~inside : 0));
}
inline uint32_t insert_field(uint32_t a, uint32_t into, uint32_t begin, uint32_t length) {
    const uint32_t mask = shift_left(field_mask(length & 255), begin & 255);
    return (into & ~mask) | (shift_left(a, begin & 255) & mask);
}

// Four of the eight bytes of b and a; where a selector's upper bit is set, the byte's sign eight times.
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t choice = selector >> 4 * i & 0xf, byte = bytes >> 8 * (choice & 7) & 0xff;
        r |= (choice & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return r;
}

// Bit 4 * a + 2 * b + c of `table`, for each bit of a, b, c.
inline uint32_t logic(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t r = 0;
    for (int k = 0; k < 8; ++k)
        if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return r;
}

// One step towards zero where rounding to nearest has gone away from it.
inline uint16_t half_to_zero(float f) {
    const uint16_t h = float_to_half(f);
    return fabsf(half_to_float(h)) > fabsf(f) ? uint16_t(h - 1) : h;
}
inline uint16_t bfloat16_to_zero(float f) { return f != f ? 0x7fff : uint16_t(bits<uint32_t>(f) >> 16); }
inline float relu(float x) { return x > 0.0f || x != x ? x : 0.0f; }
inline uint32_t pack(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }

// The numbers of 16 bits that a word holds.
struct f16 {
    static constexpr int PER_WORD = 2;
    static constexpr float LEAST_NORMAL = 0x1p-14f;
    static float at(uint32_t word, int i) { return half_to_float(uint16_t(word >> 16 * i)); }
    static uint16_t of(float value) { return float_to_half(value); }
};
struct bf16 {
    static constexpr int PER_WORD = 2;
    static constexpr float LEAST_NORMAL = 0x1p-126f;
    static float at(uint32_t word, int i) { return bits<float>((word >> 16 * i & 0xffffu) << 16); }
    static uint16_t of(float value) { return float_to_bfloat16(value); }
};
template <class Format>
float flush_small(float x) {
    return fabsf(x) < Format::LEAST_NORMAL ? copysignf(0.0f, x) : x;
}
// function(a, b, ...) of each of COUNT numbers. Float has more than twice their bits, so rounding twice changes nothing.
template <class Format, int COUNT, class Function, class... Words>
EMULATOR_UNCHECKED inline uint32_t each(Function function, Words... words) {
    uint32_t result = 0;
    for (int i = 0; i < COUNT; ++i) result |= uint32_t(Format::of(function(Format::at(uint32_t(words), i)...))) << 16 * i;
    return result;
}
// a * b + c for such numbers, rounded so that a second rounding gives what one alone does.
inline float fma_to_odd(float a, float b, float c) { return float_to_odd(sum_to_odd((double)a * b, (double)c)); }

// ---- the carry flag, CC.CF, of the thread that runs: instructions that hand it on follow each other
inline thread_local bool carry = false;

template <class T, bool TAKES, bool GIVES>
EMULATOR_UNCHECKED inline T add_carry(T a, T b) {
    const unsigned __int128 sum = (unsigned __int128)a + b + (TAKES && carry);
    if (GIVES) carry = sum >> 8 * sizeof(T);
    return T(sum);
}
template <class T, bool TAKES, bool GIVES>
EMULATOR_UNCHECKED inline T subtract_borrow(T a, T b) {
    const unsigned __int128 taken = (unsigned __int128)b + (TAKES && carry);
    if (GIVES) carry = a < taken;
    return T(a - taken);
}
// The upper half of a product.
template <class T>
T product_high(T a, T b) {
    using Wide = std::conditional_t<std::is_signed<T>::value, __int128, unsigned __int128>;
    return T((Wide)a * (Wide)b >> 8 * sizeof(T));
}

}  // namespace emulator::ptx
