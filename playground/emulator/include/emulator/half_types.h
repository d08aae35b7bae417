// __half, __nv_bfloat16 and their pairs. Arithmetic is done in float and rounded once, as the device's own is.
#pragma once
#include <emulator/atomics.h>
#include <emulator/float16.h>
#include <emulator/math.h>
#include <emulator/vector_types.h>
#include <emulator/warp.h>

#define EMULATOR_HALF_TYPE(H, H2, FROM, TO)                                                                 \
    struct alignas(2) H {                                                                                   \
        uint16_t __x;                                                                                       \
        H() = default;                                                                                      \
        EMULATOR_INLINE H(float v) : __x(::emulator::FROM(v)) {}                                            \
        EMULATOR_INLINE H(double v) : H((float)v) {}                                                        \
        EMULATOR_INLINE H(int v) : H((float)v) {}                                                           \
        EMULATOR_INLINE H(unsigned v) : H((float)v) {}                                                      \
        EMULATOR_INLINE H(long v) : H((float)v) {}                                                          \
        EMULATOR_INLINE H(long long v) : H((float)v) {}                                                     \
        EMULATOR_INLINE operator float() const { return ::emulator::TO(__x); }                              \
        EMULATOR_INLINE H& operator+=(H b) { return *this = H((float)*this + (float)b); }                   \
        EMULATOR_INLINE H& operator-=(H b) { return *this = H((float)*this - (float)b); }                   \
        EMULATOR_INLINE H& operator*=(H b) { return *this = H((float)*this * (float)b); }                   \
        EMULATOR_INLINE H& operator/=(H b) { return *this = H((float)*this / (float)b); }                   \
    };                                                                                                      \
    EMULATOR_INLINE H operator+(H a, H b) { return H((float)a + (float)b); }                                \
    EMULATOR_INLINE H operator-(H a, H b) { return H((float)a - (float)b); }                                \
    EMULATOR_INLINE H operator*(H a, H b) { return H((float)a * (float)b); }                                \
    EMULATOR_INLINE H operator/(H a, H b) { return H((float)a / (float)b); }                                \
    EMULATOR_INLINE H operator-(H a) { return H(-(float)a); }                                               \
    EMULATOR_INLINE bool operator==(H a, H b) { return (float)a == (float)b; }                              \
    EMULATOR_INLINE bool operator!=(H a, H b) { return (float)a != (float)b; }                              \
    EMULATOR_INLINE bool operator<(H a, H b) { return (float)a < (float)b; }                                \
    EMULATOR_INLINE bool operator>(H a, H b) { return (float)a > (float)b; }                                \
    EMULATOR_INLINE bool operator<=(H a, H b) { return (float)a <= (float)b; }                              \
    EMULATOR_INLINE bool operator>=(H a, H b) { return (float)a >= (float)b; }                              \
    struct alignas(4) H2 {                                                                                  \
        H x, y;                                                                                             \
        H2() = default;                                                                                     \
        EMULATOR_INLINE H2(H x, H y) : x(x), y(y) {}                                                        \
        EMULATOR_INLINE H2(const H2& o) { ::emulator::copy_word(this, &o); }                                \
        EMULATOR_INLINE H2& operator=(const H2& o) {                                                        \
            ::emulator::copy_word(this, &o);                                                                \
            return *this;                                                                                   \
        }                                                                                                   \
    };                                                                                                      \
    EMULATOR_INLINE H2 operator+(H2 a, H2 b) { return {a.x + b.x, a.y + b.y}; }                             \
    EMULATOR_INLINE H2 operator-(H2 a, H2 b) { return {a.x - b.x, a.y - b.y}; }                             \
    EMULATOR_INLINE H2 operator*(H2 a, H2 b) { return {a.x * b.x, a.y * b.y}; }                             \
    EMULATOR_INLINE H2 operator/(H2 a, H2 b) { return {a.x / b.x, a.y / b.y}; }                             \
    EMULATOR_INLINE H __hadd(H a, H b) { return a + b; }                                                    \
    EMULATOR_INLINE H __hsub(H a, H b) { return a - b; }                                                    \
    EMULATOR_INLINE H __hmul(H a, H b) { return a * b; }                                                    \
    EMULATOR_INLINE H __hdiv(H a, H b) { return a / b; }                                                    \
    EMULATOR_INLINE H __hneg(H a) { return -a; }                                                            \
    EMULATOR_INLINE H __habs(H a) { return H(fabsf(a)); }                                                   \
    EMULATOR_INLINE H __hfma(H a, H b, H c) { return H((float)((double)(float)a * (float)b + (float)c)); }  \
    EMULATOR_INLINE H __hmax(H a, H b) { return H(fmaxf(a, b)); }                                           \
    EMULATOR_INLINE H __hmin(H a, H b) { return H(fminf(a, b)); }                                           \
    EMULATOR_INLINE bool __heq(H a, H b) { return a == b; }                                                 \
    EMULATOR_INLINE bool __hne(H a, H b) { return a != b; }                                                 \
    EMULATOR_INLINE bool __hlt(H a, H b) { return a < b; }                                                  \
    EMULATOR_INLINE bool __hle(H a, H b) { return a <= b; }                                                 \
    EMULATOR_INLINE bool __hgt(H a, H b) { return a > b; }                                                  \
    EMULATOR_INLINE bool __hge(H a, H b) { return a >= b; }                                                 \
    EMULATOR_INLINE bool __hisnan(H a) { return (float)a != (float)a; }                                     \
    EMULATOR_INLINE H hexp(H a) { return H(expf(a)); }                                                      \
    EMULATOR_INLINE H hlog(H a) { return H(logf(a)); }                                                      \
    EMULATOR_INLINE H hsqrt(H a) { return H(sqrtf(a)); }                                                    \
    EMULATOR_INLINE H hrsqrt(H a) { return H(1.0f / sqrtf(a)); }                                            \
    EMULATOR_INLINE H hrcp(H a) { return H(1.0f / (float)a); }                                              \
    EMULATOR_INLINE H2 __hadd2(H2 a, H2 b) { return a + b; }                                                \
    EMULATOR_INLINE H2 __hsub2(H2 a, H2 b) { return a - b; }                                                \
    EMULATOR_INLINE H2 __hmul2(H2 a, H2 b) { return a * b; }                                                \
    EMULATOR_INLINE H2 __hfma2(H2 a, H2 b, H2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    EMULATOR_INLINE H2 __hmax2(H2 a, H2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                 \
    EMULATOR_INLINE H2 __hmin2(H2 a, H2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }

namespace emulator {
EMULATOR_INLINE void copy_word(void* to, const void* from) {
    typedef uint32_t Whole __attribute__((may_alias));
    *(Whole*)to = *(const Whole*)from;
}
}  // namespace emulator
