// Atomic operations on the types that CUDA has them for.
#pragma once
#include <emulator/runtime_api.h>
#include <math.h>
#include <string.h>
#include <type_traits>

namespace emulator {

template <size_t BYTES>
struct Word;
template <>
struct Word<2> {
    using type = uint16_t;
};
template <>
struct Word<4> {
    using type = uint32_t;
};
template <>
struct Word<8> {
    using type = uint64_t;
};

// Replaces *address by update(*address) and returns the old value.
template <class T, class Update>
EMULATOR_UNCHECKED inline T atomic_update(T* address, Update update) {
    using Bits = typename Word<sizeof(T)>::type;
    Bits* word = (Bits*)address;
    Bits expected = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    for (;;) {
        T old;
        memcpy(&old, &expected, sizeof(T));
        const T next = update(old);
        Bits desired;
        memcpy(&desired, &next, sizeof(T));
        if (__atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            if (desired == expected) may_be_waiting(address);
#ifdef EMULATOR_CHECKED
            if (desired != expected) memory_changed();
#endif
            return old;
        }
    }
}

template <class T>
struct Same {
    using type = T;
};
template <class T>
using Given = typename Same<T>::type;  // keeps a parameter out of deduction, so that literals convert

}  // namespace emulator

#define EMULATOR_ATOMIC(NAME, EXPRESSION)                                                                     \
    template <class T>                                                                                        \
    EMULATOR_INLINE T NAME(T* address, ::emulator::Given<T> value) {                                          \
        ::emulator::note_atomic(address, sizeof(T));                                                          \
        return ::emulator::atomic_update(address, [&](T old) EMULATOR_UNCHECKED -> T { return EXPRESSION; }); \
    }                                                                                                         \
    template <class T>                                                                                        \
    EMULATOR_INLINE T NAME##_block(T* address, ::emulator::Given<T> value) {                                  \
        return NAME(address, value);                                                                          \
    }                                                                                                         \
    template <class T>                                                                                        \
    EMULATOR_INLINE T NAME##_system(T* address, ::emulator::Given<T> value) {                                 \
        return NAME(address, value);                                                                          \
    }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
EMULATOR_ATOMIC(atomicMax, old < value ? value : old)
EMULATOR_ATOMIC(atomicAnd, old& value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicExch, ((void)old, value))
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef EMULATOR_ATOMIC

// In device memory, unlike in shared memory, numbers too small to be normal count as zeros of their sign.
EMULATOR_INLINE float atomicAdd(float* address, float value) {
    ::emulator::note_atomic(address, sizeof(float));
    const bool keeps = ::emulator::is_shared(address);
    const auto number = [&](float x) EMULATOR_UNCHECKED { return !keeps && fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; };
    return ::emulator::atomic_update(
        address, [&](float old) EMULATOR_UNCHECKED -> float { return number(number(old) + number(value)); });
}

template <class T>
EMULATOR_INLINE T atomicCAS(T* address, ::emulator::Given<T> compare, ::emulator::Given<T> value) {
    ::emulator::note_atomic(address, sizeof(T));
    return ::emulator::atomic_update(
        address, [&](T old) EMULATOR_UNCHECKED -> T { return !memcmp(&old, &compare, sizeof(T)) ? value : old; });
}
template <class T>
EMULATOR_INLINE T atomicCAS_block(T* address, ::emulator::Given<T> compare, ::emulator::Given<T> value) {
    return atomicCAS(address, compare, value);
}
template <class T>
EMULATOR_INLINE T atomicCAS_system(T* address, ::emulator::Given<T> compare, ::emulator::Given<T> value) {
    return atomicCAS(address, compare, value);
}
