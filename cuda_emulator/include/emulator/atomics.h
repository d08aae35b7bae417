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
struct Word<1> {
    using type = uint8_t;
};
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
template <>
struct Word<16> {
    using type = unsigned __int128;
};
template <class Bits>
EMULATOR_UNCHECKED inline bool exchanged(Bits* word, Bits* expected, Bits desired) {
    if constexpr (sizeof(Bits) == 16) {  // GCC has an instruction for it behind this name alone
        const Bits seen = __sync_val_compare_and_swap(word, *expected, desired);
        return seen == *expected || (*expected = seen, false);
    } else {
        return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
}

// Replaces *address by update(*address) and returns the old value.
template <class T, class Update>
EMULATOR_UNCHECKED inline T atomic_update(T* address, Update update) {
    using Bits = typename Word<sizeof(T)>::type;
    Bits* word = (Bits*)address;
    Bits expected{};  // with 16 bytes a guess
    if constexpr (sizeof(Bits) < 16) expected = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    for (;;) {
        T old;
        memcpy(&old, &expected, sizeof(T));
        const T next = update(old);
        Bits desired;
        memcpy(&desired, &next, sizeof(T));
        if (exchanged(word, &expected, desired)) {
            if (desired == expected) may_be_waiting(address);
#ifdef EMULATOR_CHECKED
            if (desired != expected) memory_changed();
#endif
            return old;
        }
    }
}

template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
EMULATOR_INLINE T emulator_sum(T a, T b) {  // other types bring theirs
    return a + b;
}

template <class T>
struct Same {
    using type = T;
};
template <class T>
using Given = typename Same<T>::type;  // keeps a parameter out of deduction, so that literals convert

}  // namespace emulator

#define EMULATOR_ATOMIC(NAME, EXPRESSION)                                              \
    template <class T>                                                                 \
    EMULATOR_INLINE T NAME(T* address, ::emulator::Given<T> value) {                   \
        ::emulator::note_atomic(address, sizeof(T));                                   \
        return ::emulator::atomic_update(address, [&](T old) EMULATOR_UNCHECKED -> T { \
            using ::emulator::emulator_sum;                                            \
            return EXPRESSION;                                                         \
        });                                                                            \
    }                                                                                  \
    template <class T>                                                                 \
    EMULATOR_INLINE T NAME##_block(T* address, ::emulator::Given<T> value) {           \
        ::emulator::note_atomic(address, sizeof(T), true);                             \
        return ::emulator::atomic_update(address, [&](T old) EMULATOR_UNCHECKED -> T { \
            using ::emulator::emulator_sum;                                            \
            return EXPRESSION;                                                         \
        });                                                                            \
    }                                                                                  \
    template <class T>                                                                 \
    EMULATOR_INLINE T NAME##_system(T* address, ::emulator::Given<T> value) {          \
        return NAME(address, value);                                                   \
    }
EMULATOR_ATOMIC(atomicAdd, emulator_sum(old, value))
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

namespace emulator {
template <class T>
EMULATOR_INLINE T compare_and_swap(T* address, T compare, T value, bool of_block) {
    note_compare(address, sizeof(T), of_block);
    return atomic_update(address,
                         [&](T old) EMULATOR_UNCHECKED -> T { return !memcmp(&old, &compare, sizeof(T)) ? value : old; });
}
}  // namespace emulator
template <class T>
EMULATOR_INLINE T atomicCAS(T* address, ::emulator::Given<T> compare, ::emulator::Given<T> value) {
    return ::emulator::compare_and_swap<T>(address, compare, value, false);
}
template <class T>
EMULATOR_INLINE T atomicCAS_block(T* address, ::emulator::Given<T> compare, ::emulator::Given<T> value) {
    return ::emulator::compare_and_swap<T>(address, compare, value, true);
}
template <class T>
EMULATOR_INLINE T atomicCAS_system(T* address, ::emulator::Given<T> compare, ::emulator::Given<T> value) {
    return atomicCAS(address, compare, value);
}

// atomicExch whose result nobody looks at: a store, which needs nothing to have been there (rewrite.py).
template <class T>
EMULATOR_INLINE void emulator_atomic_store(T* address, ::emulator::Given<T> value) {
    ::emulator::note_atomic_store(address, sizeof(T), false);
    ::emulator::atomic_update(address, [&](T) EMULATOR_UNCHECKED -> T { return value; });
}
template <class T>
EMULATOR_INLINE void emulator_atomic_store_block(T* address, ::emulator::Given<T> value) {
    ::emulator::note_atomic_store(address, sizeof(T), true);
    ::emulator::atomic_update(address, [&](T) EMULATOR_UNCHECKED -> T { return value; });
}

// The compiler's own functions, from CUDA 12.8 on. An order is a fence in front of the operation or behind it.
#define __NV_ATOMIC_RELAXED 0
#define __NV_ATOMIC_CONSUME 1
#define __NV_ATOMIC_ACQUIRE 2
#define __NV_ATOMIC_RELEASE 3
#define __NV_ATOMIC_ACQ_REL 4
#define __NV_ATOMIC_SEQ_CST 5
#define __NV_THREAD_SCOPE_THREAD 0
#define __NV_THREAD_SCOPE_BLOCK 1
#define __NV_THREAD_SCOPE_CLUSTER 2
#define __NV_THREAD_SCOPE_DEVICE 3
#define __NV_THREAD_SCOPE_SYSTEM 4
namespace emulator {
EMULATOR_INLINE void fence_for(bool wanted, int scope) {
    if (wanted) scope <= __NV_THREAD_SCOPE_BLOCK ? block_fence() : device_fence();
}
EMULATOR_INLINE bool releases(int order) { return order >= __NV_ATOMIC_RELEASE; }
EMULATOR_INLINE bool acquires(int order) { return order != __NV_ATOMIC_RELAXED && order != __NV_ATOMIC_RELEASE; }
}  // namespace emulator
#define EMULATOR_NV_ATOMIC(NAME, FUNCTION)                                                                            \
    template <class T>                                                                                                \
    EMULATOR_INLINE T NAME(T* address, ::emulator::Given<T> value, int order, int scope = __NV_THREAD_SCOPE_SYSTEM) { \
        ::emulator::fence_for(::emulator::releases(order), scope);                                                    \
        const T old = scope <= __NV_THREAD_SCOPE_BLOCK ? FUNCTION##_block(address, value) : FUNCTION(address, value); \
        ::emulator::fence_for(::emulator::acquires(order), scope);                                                    \
        return old;                                                                                                   \
    }
EMULATOR_NV_ATOMIC(__nv_atomic_fetch_add, atomicAdd)
EMULATOR_NV_ATOMIC(__nv_atomic_fetch_sub, atomicSub)
EMULATOR_NV_ATOMIC(__nv_atomic_fetch_min, atomicMin)
EMULATOR_NV_ATOMIC(__nv_atomic_fetch_max, atomicMax)
EMULATOR_NV_ATOMIC(__nv_atomic_fetch_and, atomicAnd)
EMULATOR_NV_ATOMIC(__nv_atomic_fetch_or, atomicOr)
EMULATOR_NV_ATOMIC(__nv_atomic_fetch_xor, atomicXor)
EMULATOR_NV_ATOMIC(__nv_atomic_exchange_n, atomicExch)
#undef EMULATOR_NV_ATOMIC
template <class T>
EMULATOR_INLINE T __nv_atomic_load_n(const T* address, int order, int scope = __NV_THREAD_SCOPE_SYSTEM) {
    ::emulator::fence_for(order == __NV_ATOMIC_SEQ_CST, scope);
    ::emulator::note_strong_read(address, sizeof(T), scope <= __NV_THREAD_SCOPE_BLOCK);
    T value;
    __atomic_load(address, &value, __ATOMIC_SEQ_CST);
    ::emulator::fence_for(::emulator::acquires(order), scope);
    return value;
}
template <class T>
EMULATOR_INLINE void __nv_atomic_load(const T* address, T* to, int order, int scope = __NV_THREAD_SCOPE_SYSTEM) {
    *to = __nv_atomic_load_n(address, order, scope);
}
template <class T>
EMULATOR_INLINE void __nv_atomic_store_n(T* address, ::emulator::Given<T> value, int order,
                                         int scope = __NV_THREAD_SCOPE_SYSTEM) {
    ::emulator::fence_for(::emulator::releases(order), scope);
    scope <= __NV_THREAD_SCOPE_BLOCK ? emulator_atomic_store_block(address, value) : emulator_atomic_store(address, value);
}
template <class T>
EMULATOR_INLINE void __nv_atomic_store(T* address, T* value, int order, int scope = __NV_THREAD_SCOPE_SYSTEM) {
    __nv_atomic_store_n(address, *value, order, scope);
}
template <class T>
EMULATOR_INLINE bool __nv_atomic_compare_exchange_n(T* address, T* expected, ::emulator::Given<T> desired, bool, int success,
                                                    int, int scope = __NV_THREAD_SCOPE_SYSTEM) {
    ::emulator::fence_for(::emulator::releases(success), scope);
    const T wanted = *expected;
    const T old = ::emulator::compare_and_swap<T>(address, wanted, desired, scope <= __NV_THREAD_SCOPE_BLOCK);
    ::emulator::fence_for(::emulator::acquires(success), scope);
    if (old == wanted) return true;
    *expected = old;
    return false;
}
EMULATOR_INLINE void __nv_atomic_thread_fence(int order, int scope = __NV_THREAD_SCOPE_SYSTEM) {
    ::emulator::fence_for(order != __NV_ATOMIC_RELAXED, scope);
}
