// The device's mathematical functions that the host's <math.h> lacks. Where the device approximates, this is exact:
// results may differ from the hardware's by the error that CUDA documents for the function.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <emulator/runtime_api.h>
#include <type_traits>

namespace emulator {
template <class To, class From>
EMULATOR_UNCHECKED inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    memcpy(&result, &value, sizeof(To));
    return result;
}
}  // namespace emulator

inline int __float_as_int(float x) { return ::emulator::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return ::emulator::bits<unsigned>(x); }
inline float __int_as_float(int x) { return ::emulator::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return ::emulator::bits<float>(x); }
inline long long __double_as_longlong(double x) { return ::emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return ::emulator::bits<double>(x); }

// ---- minimum and maximum, with CUDA's rule for mixed types: the common type
template <class A, class B, class = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value>>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value)
        return T(a) != T(a) ? T(b) : T(b) < T(a) ? T(b) : T(a);
    else
        return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic<A>::value && std::is_arithmetic<B>::value>>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point<T>::value)
        return T(a) != T(a) ? T(b) : T(a) < T(b) ? T(b) : T(a);
    else
        return T(a) < T(b) ? T(b) : T(a);
}
inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned umax(unsigned a, unsigned b) { return a < b ? b : a; }

// ---- float
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float fdividef(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
// The C library declares functions of these names for its own use, so they are macros here.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __tanhf(x) tanhf(x)
#define __powf(x, y) powf(x, y)
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float sinpif(float x) { return (float)sin(3.14159265358979323846 * x); }
inline float cospif(float x) { return (float)cos(3.14159265358979323846 * x); }
inline float rhypotf(float a, float b) { return 1.0f / hypotf(a, b); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

// Rounded to nearest and never contracted with a neighbour.
#define EMULATOR_KEEP(x) __asm__("" : "+g"(x))
inline float __fadd_rn(float a, float b) {
    float r = a + b;
    EMULATOR_KEEP(r);
    return r;
}
inline float __fsub_rn(float a, float b) {
    float r = a - b;
    EMULATOR_KEEP(r);
    return r;
}
inline float __fmul_rn(float a, float b) {
    float r = a * b;
    EMULATOR_KEEP(r);
    return r;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
inline double __dadd_rn(double a, double b) {
    double r = a + b;
    EMULATOR_KEEP(r);
    return r;
}
inline double __dmul_rn(double a, double b) {
    double r = a * b;
    EMULATOR_KEEP(r);
    return r;
}
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// ---- conversions
namespace emulator {
// Out of range saturates and NaN gives 0, as on the device.
template <class T, class F>
inline T to_integer(F x) {
    constexpr T low = T(1) << (sizeof(T) * 8 - 1);  // the sign bit; for unsigned types unused
    const T least = std::is_signed<T>::value ? low : T(0), most = std::is_signed<T>::value ? T(~low) : T(~T(0));
    if (x != x) return 0;
    if (x <= F(least)) return least;
    if (x >= F(most)) return most;
    return T(x);
}
}  // namespace emulator
inline int __float2int_rn(float x) { return ::emulator::to_integer<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return ::emulator::to_integer<int>(truncf(x)); }
inline int __float2int_rd(float x) { return ::emulator::to_integer<int>(floorf(x)); }
inline int __float2int_ru(float x) { return ::emulator::to_integer<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return ::emulator::to_integer<unsigned>(nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return ::emulator::to_integer<unsigned>(truncf(x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }

// ---- integers
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
    return r;
}
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> 4 * i & 0xf, byte = bytes >> 8 * (choice & 7) & 0xff;
        r |= (choice & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return c;
}

// ---- loads and stores with a cache hint
template <class T>
EMULATOR_INLINE T __ldg(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldca(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldcg(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldcs(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldlu(const T* p) {
    return *p;
}
template <class T>
EMULATOR_INLINE T __ldcv(const T* p) {
    return *(const volatile T*)p;
}
template <class T>
EMULATOR_INLINE void __stwb(T* p, T value) {
    *p = value;
}
template <class T>
EMULATOR_INLINE void __stcg(T* p, T value) {
    *p = value;
}
template <class T>
EMULATOR_INLINE void __stcs(T* p, T value) {
    *p = value;
}
template <class T>
EMULATOR_INLINE void __stwt(T* p, T value) {
    *p = value;
}
