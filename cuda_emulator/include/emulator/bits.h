// The bits of one type as a value of another.
#pragma once
#include <emulator/runtime_api.h>
#include <string.h>

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
inline double __hiloint2double(int high, int low) {
    return ::emulator::bits<double>((long long)((unsigned long long)(unsigned)high << 32 | (unsigned)low));
}
inline int __double2hiint(double x) { return (int)(::emulator::bits<long long>(x) >> 32); }
inline int __double2loint(double x) { return (int)::emulator::bits<long long>(x); }
