// float4 and its relatives.
#pragma once
#include <emulator/dim3.h>

// An access to a vector of 8 or 16 aligned bytes is one instruction on the device. In check mode it must reach the checks
// as one access too, so copies go through a type that the compiler does not take apart.
#ifdef EMULATOR_CHECKED
#define EMULATOR_VECTOR_COPY(NAME, ALIGNMENT)                              \
    typedef char Whole __attribute__((vector_size(ALIGNMENT), may_alias)); \
    NAME() = default;                                                      \
    NAME(const NAME& other) { *(Whole*)this = *(const Whole*)&other; }     \
    NAME& operator=(const NAME& other) {                                   \
        *(Whole*)this = *(const Whole*)&other;                             \
        return *this;                                                      \
    }
#else
#define EMULATOR_VECTOR_COPY(NAME, ALIGNMENT) NAME() = default;
#endif

#define EMULATOR_VECTOR1(NAME, T) \
    struct NAME {                 \
        T x;                      \
    };                            \
    inline NAME make_##NAME(T x) { return NAME{x}; }
#define EMULATOR_VECTOR2(NAME, T, ALIGNMENT, COPY)    \
    struct alignas(ALIGNMENT) NAME {                  \
        T x, y;                                       \
        COPY(NAME, ALIGNMENT)                         \
        constexpr NAME(T x, T y = {}) : x(x), y(y) {} \
    };                                                \
    inline NAME make_##NAME(T x, T y) { return NAME(x, y); }
#define EMULATOR_VECTOR3(NAME, T) \
    struct NAME {                 \
        T x, y, z;                \
    };                            \
    inline NAME make_##NAME(T x, T y, T z) { return NAME{x, y, z}; }
#define EMULATOR_VECTOR4(NAME, T, ALIGNMENT, COPY)                                    \
    struct alignas(ALIGNMENT) NAME {                                                  \
        T x, y, z, w;                                                                 \
        COPY(NAME, ALIGNMENT)                                                         \
        constexpr NAME(T x, T y = {}, T z = {}, T w = {}) : x(x), y(y), z(z), w(w) {} \
    };                                                                                \
    inline NAME make_##NAME(T x, T y, T z, T w) { return NAME(x, y, z, w); }
#define EMULATOR_VECTOR_PLAIN(NAME, ALIGNMENT) NAME() = default;

#define EMULATOR_VECTORS(NAME, T, ALIGN2, COPY2, ALIGN4, COPY4) \
    EMULATOR_VECTOR1(NAME##1, T)                                \
    EMULATOR_VECTOR2(NAME##2, T, ALIGN2, COPY2)                 \
    EMULATOR_VECTOR3(NAME##3, T)                                \
    EMULATOR_VECTOR4(NAME##4, T, ALIGN4, COPY4)

EMULATOR_VECTORS(char, signed char, 2, EMULATOR_VECTOR_COPY, 4, EMULATOR_VECTOR_COPY)
EMULATOR_VECTORS(uchar, unsigned char, 2, EMULATOR_VECTOR_COPY, 4, EMULATOR_VECTOR_COPY)
EMULATOR_VECTORS(short, short, 4, EMULATOR_VECTOR_COPY, 8, EMULATOR_VECTOR_COPY)
EMULATOR_VECTORS(ushort, unsigned short, 4, EMULATOR_VECTOR_COPY, 8, EMULATOR_VECTOR_COPY)
EMULATOR_VECTORS(int, int, 8, EMULATOR_VECTOR_COPY, 16, EMULATOR_VECTOR_COPY)
EMULATOR_VECTORS(float, float, 8, EMULATOR_VECTOR_COPY, 16, EMULATOR_VECTOR_COPY)
EMULATOR_VECTORS(longlong, long long, 16, EMULATOR_VECTOR_COPY, 16, EMULATOR_VECTOR_PLAIN)
EMULATOR_VECTORS(ulonglong, unsigned long long, 16, EMULATOR_VECTOR_COPY, 16, EMULATOR_VECTOR_PLAIN)
EMULATOR_VECTORS(long, long, 16, EMULATOR_VECTOR_COPY, 16, EMULATOR_VECTOR_PLAIN)
EMULATOR_VECTORS(ulong, unsigned long, 16, EMULATOR_VECTOR_COPY, 16, EMULATOR_VECTOR_PLAIN)
EMULATOR_VECTORS(double, double, 16, EMULATOR_VECTOR_COPY, 16, EMULATOR_VECTOR_PLAIN)
EMULATOR_VECTOR1(uint1, unsigned)
EMULATOR_VECTOR2(uint2, unsigned, 8, EMULATOR_VECTOR_COPY)
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return uint3{x, y, z}; }
EMULATOR_VECTOR4(uint4, unsigned, 16, EMULATOR_VECTOR_COPY)
