// float4 and its relatives.
#pragma once
#include <emulator/dim3.h>

// An access to a vector of 8 or 16 aligned bytes is one instruction on the device, also where only some of its members are
// used afterwards. In check mode it must reach the checks as one access too: a volatile member, here one without bytes, keeps
// the compiler from taking a copy apart. What it costs is that vectors are no literal types there (`constexpr float4`).
#ifdef EMULATOR_CHECKED
#define EMULATOR_WHOLE volatile char whole_[0];
#else
#define EMULATOR_WHOLE
#endif
#define EMULATOR_IN_PARTS  // larger than any access of the device
// The compiler puts no check at a store of what a call returns. Inlined, also without optimisation, these are no calls.
#define EMULATOR_MAKER inline __attribute__((always_inline))

#define EMULATOR_VECTOR1(NAME, T) \
    struct NAME {                 \
        T x;                      \
    };                            \
    EMULATOR_MAKER NAME make_##NAME(T x) { return NAME{x}; }
#define EMULATOR_VECTOR2(NAME, T, ALIGNMENT, COPIED) \
    struct alignas(ALIGNMENT) NAME {                 \
        T x, y;                                      \
        COPIED                                       \
    };                                               \
    EMULATOR_MAKER NAME make_##NAME(T x, T y) { return NAME{x, y}; }
#define EMULATOR_VECTOR3(NAME, T) \
    struct NAME {                 \
        T x, y, z;                \
    };                            \
    EMULATOR_MAKER NAME make_##NAME(T x, T y, T z) { return NAME{x, y, z}; }
#define EMULATOR_VECTOR4(NAME, T, ALIGNMENT, COPIED) \
    struct alignas(ALIGNMENT) NAME {                 \
        T x, y, z, w;                                \
        COPIED                                       \
    };                                               \
    EMULATOR_MAKER NAME make_##NAME(T x, T y, T z, T w) { return NAME{x, y, z, w}; }

#define EMULATOR_VECTORS(NAME, T, ALIGN2, COPIED2, ALIGN4, COPIED4) \
    EMULATOR_VECTOR1(NAME##1, T)                                    \
    EMULATOR_VECTOR2(NAME##2, T, ALIGN2, COPIED2)                   \
    EMULATOR_VECTOR3(NAME##3, T)                                    \
    EMULATOR_VECTOR4(NAME##4, T, ALIGN4, COPIED4)

EMULATOR_VECTORS(char, signed char, 2, EMULATOR_WHOLE, 4, EMULATOR_WHOLE)
EMULATOR_VECTORS(uchar, unsigned char, 2, EMULATOR_WHOLE, 4, EMULATOR_WHOLE)
EMULATOR_VECTORS(short, short, 4, EMULATOR_WHOLE, 8, EMULATOR_WHOLE)
EMULATOR_VECTORS(ushort, unsigned short, 4, EMULATOR_WHOLE, 8, EMULATOR_WHOLE)
EMULATOR_VECTORS(int, int, 8, EMULATOR_WHOLE, 16, EMULATOR_WHOLE)
EMULATOR_VECTORS(float, float, 8, EMULATOR_WHOLE, 16, EMULATOR_WHOLE)
EMULATOR_VECTORS(longlong, long long, 16, EMULATOR_WHOLE, 16, EMULATOR_IN_PARTS)
EMULATOR_VECTORS(ulonglong, unsigned long long, 16, EMULATOR_WHOLE, 16, EMULATOR_IN_PARTS)
EMULATOR_VECTORS(long, long, 16, EMULATOR_WHOLE, 16, EMULATOR_IN_PARTS)
EMULATOR_VECTORS(ulong, unsigned long, 16, EMULATOR_WHOLE, 16, EMULATOR_IN_PARTS)
EMULATOR_VECTORS(double, double, 16, EMULATOR_WHOLE, 16, EMULATOR_IN_PARTS)
EMULATOR_VECTOR1(uint1, unsigned)
EMULATOR_VECTOR2(uint2, unsigned, 8, EMULATOR_WHOLE)
EMULATOR_MAKER uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return uint3{x, y, z}; }
EMULATOR_VECTOR4(uint4, unsigned, 16, EMULATOR_WHOLE)
