// The SIMD functions of CUDA's math API, on the two halves or four bytes of a word, and the DPX ones (__vi...).
#pragma once
#include <emulator/runtime_api.h>
#include <stdint.h>

namespace emulator {

template <class T, class Function>
EMULATOR_UNCHECKED inline unsigned by_lane(unsigned a, unsigned b, Function function) {
    constexpr int BITS = 8 * sizeof(T);
    unsigned result = 0;
    for (int at = 0; at < 32; at += BITS)
        result |= unsigned(typename std::make_unsigned<T>::type(function(int((T)(a >> at)), int((T)(b >> at))))) << at;
    return result;
}
template <class T, class Function>
EMULATOR_UNCHECKED inline unsigned sum_by_lane(unsigned a, unsigned b, Function function) {
    constexpr int BITS = 8 * sizeof(T);
    unsigned result = 0;
    for (int at = 0; at < 32; at += BITS) result += unsigned(function(int((T)(a >> at)), int((T)(b >> at))));
    return result;
}
EMULATOR_UNCHECKED inline int clamped(int value, int least, int most) {
    return value < least ? least : value > most ? most : value;
}

}  // namespace emulator

#define EMULATOR_SIMD(NAME, TYPE, EXPRESSION)                                                                      \
    EMULATOR_INLINE unsigned NAME(unsigned a, unsigned b) {                                                        \
        return ::emulator::by_lane<TYPE>(a, b, [](int x, int y) EMULATOR_UNCHECKED -> int { return EXPRESSION; }); \
    }
// For both widths: NAME2 and NAME4, of signed or of unsigned numbers.
#define EMULATOR_SIMD_PLAIN(NAME, EXPRESSION)    \
    EMULATOR_SIMD(NAME##2, uint16_t, EXPRESSION) \
    EMULATOR_SIMD(NAME##4, uint8_t, EXPRESSION)
#define EMULATOR_SIMD_SIGNED(NAME, EXPRESSION)  \
    EMULATOR_SIMD(NAME##2, int16_t, EXPRESSION) \
    EMULATOR_SIMD(NAME##4, int8_t, EXPRESSION)
#define EMULATOR_SIMD_COMPARE(NAME, OPERATOR)                    \
    EMULATOR_SIMD_SIGNED(__vcmp##NAME##s, x OPERATOR y ? -1 : 0) \
    EMULATOR_SIMD_PLAIN(__vcmp##NAME##u, x OPERATOR y ? -1 : 0)  \
    EMULATOR_SIMD_SIGNED(__vset##NAME##s, x OPERATOR y)          \
    EMULATOR_SIMD_PLAIN(__vset##NAME##u, x OPERATOR y)
EMULATOR_SIMD_PLAIN(__vadd, x + y)
EMULATOR_SIMD_PLAIN(__vsub, x - y)
EMULATOR_SIMD(__vaddss2, int16_t, ::emulator::clamped(x + y, -32768, 32767))
EMULATOR_SIMD(__vaddss4, int8_t, ::emulator::clamped(x + y, -128, 127))
EMULATOR_SIMD(__vaddus2, uint16_t, ::emulator::clamped(x + y, 0, 65535))
EMULATOR_SIMD(__vaddus4, uint8_t, ::emulator::clamped(x + y, 0, 255))
EMULATOR_SIMD(__vsubss2, int16_t, ::emulator::clamped(x - y, -32768, 32767))
EMULATOR_SIMD(__vsubss4, int8_t, ::emulator::clamped(x - y, -128, 127))
EMULATOR_SIMD_PLAIN(__vsubus, x > y ? x - y : 0)
EMULATOR_SIMD_SIGNED(__vmaxs, x > y ? x : y)
EMULATOR_SIMD_PLAIN(__vmaxu, x > y ? x : y)
EMULATOR_SIMD_SIGNED(__vmins, x < y ? x : y)
EMULATOR_SIMD_PLAIN(__vminu, x < y ? x : y)
EMULATOR_SIMD_SIGNED(__vavgs, x + y < 0 ? (x + y) >> 1 : (x + y + 1) >> 1)
EMULATOR_SIMD_PLAIN(__vavgu, (x + y + 1) >> 1)
EMULATOR_SIMD_PLAIN(__vhaddu, (x + y) >> 1)
EMULATOR_SIMD_SIGNED(__vabsdiffs, x > y ? x - y : y - x)
EMULATOR_SIMD_PLAIN(__vabsdiffu, x > y ? x - y : y - x)
EMULATOR_SIMD_PLAIN(__vcmpeq, x == y ? -1 : 0)
EMULATOR_SIMD_PLAIN(__vcmpne, x != y ? -1 : 0)
EMULATOR_SIMD_PLAIN(__vseteq, x == y)
EMULATOR_SIMD_PLAIN(__vsetne, x != y)
EMULATOR_SIMD_COMPARE(gt, >)
EMULATOR_SIMD_COMPARE(ge, >=)
EMULATOR_SIMD_COMPARE(lt, <)
EMULATOR_SIMD_COMPARE(le, <=)
EMULATOR_INLINE unsigned __vabs2(unsigned a) { return __vabsdiffs2(a, 0); }
EMULATOR_INLINE unsigned __vabs4(unsigned a) { return __vabsdiffs4(a, 0); }
EMULATOR_INLINE unsigned __vneg2(unsigned a) { return __vsub2(0, a); }
EMULATOR_INLINE unsigned __vneg4(unsigned a) { return __vsub4(0, a); }
EMULATOR_INLINE unsigned __vnegss2(unsigned a) { return __vsubss2(0, a); }
EMULATOR_INLINE unsigned __vnegss4(unsigned a) { return __vsubss4(0, a); }
EMULATOR_INLINE unsigned __vabsss2(unsigned a) { return __vmaxs2(a, __vnegss2(a)); }
EMULATOR_INLINE unsigned __vabsss4(unsigned a) { return __vmaxs4(a, __vnegss4(a)); }
#define EMULATOR_SIMD_SAD(NAME, TYPE)                                                                                       \
    EMULATOR_INLINE unsigned NAME(unsigned a, unsigned b) {                                                                 \
        return ::emulator::sum_by_lane<TYPE>(a, b,                                                                          \
                                             [](int x, int y) EMULATOR_UNCHECKED -> int { return x > y ? x - y : y - x; }); \
    }
EMULATOR_SIMD_SAD(__vsads2, int16_t)
EMULATOR_SIMD_SAD(__vsads4, int8_t)
EMULATOR_SIMD_SAD(__vsadu2, uint16_t)
EMULATOR_SIMD_SAD(__vsadu4, uint8_t)

// The DPX functions of each type: NAME_s32, NAME_u32, NAME_s16x2, NAME_u16x2, and, of the signed, those with _relu. An addition
// wraps.
namespace emulator {
template <class T>
EMULATOR_INLINE T larger(T a, T b) {
    return a < b ? b : a;
}
template <class T>
EMULATOR_INLINE T smaller(T a, T b) {
    return b < a ? b : a;
}
// function(a, b, c) of T, of each half where it has 16 bits.
template <class T, class R, class Function>
EMULATOR_INLINE R by_part(R a, R b, R c, Function function) {
    if constexpr (sizeof(T) == 4) return function(a, b, c);
    const unsigned low = uint16_t(function(T(a), T(b), T(c)));
    return low | unsigned(uint16_t(function(T(a >> 16), T(b >> 16), T(c >> 16)))) << 16;
}
}  // namespace emulator
#define EMULATOR_DPX(NAME, R, T, EXPRESSION)                                                                      \
    EMULATOR_INLINE R NAME(R a, R b, R c) {                                                                       \
        return ::emulator::by_part<T>(a, b, c, [](T x, T y, T z) EMULATOR_UNCHECKED -> T { return EXPRESSION; }); \
    }
#define EMULATOR_DPX_PAIR(NAME, R, T, EXPRESSION)                                                                  \
    EMULATOR_INLINE R NAME(R a, R b) {                                                                             \
        return ::emulator::by_part<T>(a, b, R(0), [](T x, T y, T) EMULATOR_UNCHECKED -> T { return EXPRESSION; }); \
    }
#define EMULATOR_DPX_ALL(NAME, MOST, SUM)                                                               \
    EMULATOR_DPX(__vi##NAME##_s32, int, int, ::emulator::MOST(SUM(int), z))                             \
    EMULATOR_DPX(__vi##NAME##_u32, unsigned, unsigned, ::emulator::MOST(SUM(unsigned), z))              \
    EMULATOR_DPX(__vi##NAME##_s16x2, unsigned, int16_t, ::emulator::MOST(SUM(int16_t), z))              \
    EMULATOR_DPX(__vi##NAME##_u16x2, unsigned, uint16_t, ::emulator::MOST(SUM(uint16_t), z))            \
    EMULATOR_DPX(__vi##NAME##_s32_relu, int, int, ::emulator::larger(0, ::emulator::MOST(SUM(int), z))) \
    EMULATOR_DPX(__vi##NAME##_s16x2_relu, unsigned, int16_t, ::emulator::larger<int16_t>(0, ::emulator::MOST(SUM(int16_t), z)))
#define EMULATOR_SUM(T) T(unsigned(x) + unsigned(y))
#define EMULATOR_LARGER(T) ::emulator::larger(x, y)
#define EMULATOR_SMALLER(T) ::emulator::smaller(x, y)
EMULATOR_DPX_ALL(addmax, larger, EMULATOR_SUM)
EMULATOR_DPX_ALL(addmin, smaller, EMULATOR_SUM)
EMULATOR_DPX_ALL(max3, larger, EMULATOR_LARGER)
EMULATOR_DPX_ALL(min3, smaller, EMULATOR_SMALLER)
EMULATOR_DPX_PAIR(__vimax_s32_relu, int, int, ::emulator::larger(0, ::emulator::larger(x, y)))
EMULATOR_DPX_PAIR(__vimin_s32_relu, int, int, ::emulator::larger(0, ::emulator::smaller(x, y)))
EMULATOR_DPX_PAIR(__vimax_s16x2_relu, unsigned, int16_t, ::emulator::larger<int16_t>(0, ::emulator::larger(x, y)))
EMULATOR_DPX_PAIR(__vimin_s16x2_relu, unsigned, int16_t, ::emulator::larger<int16_t>(0, ::emulator::smaller(x, y)))
// These also tell whether it was the first that was taken.
#define EMULATOR_DPX_TOLD(NAME, MOST, OPERATOR, SIGN, T)                                          \
    EMULATOR_INLINE T NAME##_##SIGN##32(T a, T b, bool* first) {                                  \
        *first = a OPERATOR b;                                                                    \
        return ::emulator::MOST(a, b);                                                            \
    }                                                                                             \
    EMULATOR_INLINE unsigned NAME##_##SIGN##16x2(unsigned a, unsigned b, bool* high, bool* low) { \
        using Half = std::conditional_t<std::is_signed<T>::value, int16_t, uint16_t>;             \
        *high = Half(a >> 16) OPERATOR Half(b >> 16);                                             \
        *low = Half(a) OPERATOR Half(b);                                                          \
        return (*high ? a : b) >> 16 << 16 | ((*low ? a : b) & 0xffff);                           \
    }
EMULATOR_DPX_TOLD(__vibmax, larger, >=, s, int)
EMULATOR_DPX_TOLD(__vibmax, larger, >=, u, unsigned)
EMULATOR_DPX_TOLD(__vibmin, smaller, <=, s, int)
EMULATOR_DPX_TOLD(__vibmin, smaller, <=, u, unsigned)
#undef EMULATOR_DPX_TOLD
#undef EMULATOR_SMALLER
#undef EMULATOR_LARGER
#undef EMULATOR_SUM
#undef EMULATOR_DPX_ALL
#undef EMULATOR_DPX_PAIR
#undef EMULATOR_DPX
#undef EMULATOR_SIMD_SAD
#undef EMULATOR_SIMD_COMPARE
#undef EMULATOR_SIMD_SIGNED
#undef EMULATOR_SIMD_PLAIN
#undef EMULATOR_SIMD
