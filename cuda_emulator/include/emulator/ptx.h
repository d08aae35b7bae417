// What the PTX instructions do that the rewriter knows (ptx.py). Names follow the instructions.
#pragma once
#include <emulator/atomics.h>
#include <emulator/builtins.h>
#include <emulator/float16.h>
#include <emulator/math.h>
#include <emulator/ptx_arithmetic.h>
#include <emulator/ptx_matrices.h>
#include <emulator/runtime_api.h>
#include <emulator/warp.h>
#include <string.h>
#include <type_traits>

namespace emulator::ptx {

// An operand as an instruction of type T sees it: pointers are numbers, and registers hold bits.
template <class T, class V>
EMULATOR_INLINE T take(V value) {
    if constexpr (std::is_pointer<V>::value)
        return (T)(uintptr_t)value;
    else if constexpr (std::is_floating_point<V>::value && std::is_floating_point<T>::value)
        return (T)value;
    else if constexpr (std::is_arithmetic<V>::value && !std::is_floating_point<V>::value && !std::is_floating_point<T>::value)
        return (T)value;
    else if constexpr (sizeof(V) == sizeof(T))
        return bits<T>(value);
    else if constexpr (std::is_floating_point<T>::value)
        return bits<T>((std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>)value);
    else
        return (T)value;
}
// Puts a result into a variable or register of whatever type, as bits.
template <class T, class V>
EMULATOR_INLINE void give(T& to, V value) {
    if constexpr (std::is_same<T, bool>::value)
        to = (bool)value;
    else
        to = take<T>(value);
}
template <class V>
EMULATOR_INLINE uint32_t word(V value) {
    return take<uint32_t>(value);
}

// ---- loads and stores
template <char KIND, int BYTES>
struct element {
    using type =
        std::conditional_t<BYTES == 1, uint8_t,
                           std::conditional_t<BYTES == 2, uint16_t, std::conditional_t<BYTES == 4, uint32_t, uint64_t>>>;
    template <class V>
    static type of(V value) {
        if constexpr (sizeof(V) < sizeof(type) || std::is_pointer<V>::value || !std::is_floating_point<V>::value)
            return (type)value;
        else
            return bits<type>(value);
    }
};
template <int BYTES>
struct element<'f', BYTES> {
    using type = std::conditional_t<BYTES == 4, float, double>;
    template <class V>
    static type of(V value) {
        return take<type>(value);
    }
};
// The compiler would check an inlined copy as a plain access.
EMULATOR_UNCHECKED __attribute__((noinline)) inline void copy_unchecked(void* to, const void* from, unsigned bytes) {
    __builtin_memcpy(to, from, bytes);
}
enum class Strength { weak, strong, of_block };
EMULATOR_INLINE void load(void* to, const void* from, unsigned bytes, Strength strength) {
    if (strength != Strength::weak) {
        note_strong_read(from, bytes, strength == Strength::of_block);
        return copy_unchecked(to, from, bytes);
    }
    note_read(from, bytes);
    __builtin_memcpy(to, from, bytes);
}
EMULATOR_INLINE void store(void* to, const void* from, unsigned bytes, Strength strength) {
    if (strength != Strength::weak) {
        note_strong_write(to, bytes, strength == Strength::of_block);
        return copy_unchecked(to, from, bytes);
    }
    note_write(to, bytes);
    __builtin_memcpy(to, from, bytes);
}

// ---- asynchronous copies and barriers
template <class G>
EMULATOR_INLINE void copy_async(uint32_t to, G from, unsigned bytes, unsigned given) {
    async_copy(shared_pointer(to), (const void*)(uintptr_t)from, bytes, given);
}
template <class G>
EMULATOR_INLINE void bulk_load(uint32_t to, G from, unsigned bytes, uint32_t barrier) {
    ::emulator::bulk_load(shared_pointer(to), (const void*)(uintptr_t)from, bytes, barrier);
}
template <class G>
EMULATOR_INLINE void bulk_store(G to, uint32_t from, unsigned bytes) {
    ::emulator::bulk_store((void*)(uintptr_t)to, shared_pointer(from), bytes);
}
template <class M, int RANK>
EMULATOR_INLINE void tensor_load(uint32_t to, M map, const int (&at)[RANK], uint32_t barrier) {
    ::emulator::tensor_load(shared_pointer(to), (const void*)(uintptr_t)map, RANK, at, barrier);
}
template <class M, int RANK>
EMULATOR_INLINE void tensor_store(M map, const int (&at)[RANK], uint32_t from) {
    ::emulator::tensor_store((const void*)(uintptr_t)map, RANK, at, shared_pointer(from));
}
EMULATOR_INLINE void mbarrier_init(uint32_t barrier, unsigned count, int line) {
    ::emulator::mbarrier_init(barrier, count, line);
}
EMULATOR_INLINE void mbarrier_arrive(uint32_t barrier, unsigned count, unsigned bytes) {
    ::emulator::mbarrier_arrive(barrier, count, bytes);
}
EMULATOR_INLINE void bar(int id, int threads, bool wait, int line) {
    const dim3 size = block_dim();
    named_barrier(id, threads < 0 ? (int)(size.x * size.y * size.z) : threads, wait, line);
}

EMULATOR_INLINE int bar_count(int id, int threads, bool predicate, int line) {
    const dim3 size = block_dim();
    return named_barrier_count(id, threads < 0 ? (int)(size.x * size.y * size.z) : threads, predicate, line);
}

// The lane of `mask` that is elected, for which all of them wait.
EMULATOR_INLINE int elect(uint32_t mask, int line) {
    warp_exchange(mask, "", 0, WarpOp::elect, line);
    return __builtin_ctz(mask);
}

// shfl.sync: `clamp` holds the last lane of a segment, and in its upper bits the bits of a lane that name the segment. Where
// the source lies outside, `inside` is false, and a lane gets its own value.
struct Moved {
    uint32_t value;
    bool inside;
};
EMULATOR_INLINE Moved shuffled(uint32_t mask, uint32_t value, int source, bool inside, WarpOp op, int line) {
    return {::emulator::shuffle(mask, value, inside ? source : lane(), op, line), inside};
}
EMULATOR_INLINE int segment_begin(uint32_t clamp) { return lane() & int(clamp >> 8 & 31); }
EMULATOR_INLINE int segment_end(uint32_t clamp) { return segment_begin(clamp) | int(clamp & 31 & ~(clamp >> 8)); }
EMULATOR_INLINE Moved shuffle_up(uint32_t mask, uint32_t a, uint32_t b, uint32_t clamp, int line) {
    const int source = lane() - int(b & 31);
    return shuffled(mask, a, source, source >= segment_end(clamp), WarpOp::shuffle_up, line);  // here it is the first lane
}
EMULATOR_INLINE Moved shuffle_down(uint32_t mask, uint32_t a, uint32_t b, uint32_t clamp, int line) {
    const int source = lane() + int(b & 31);
    return shuffled(mask, a, source, source <= segment_end(clamp), WarpOp::shuffle_down, line);
}
EMULATOR_INLINE Moved shuffle_bfly(uint32_t mask, uint32_t a, uint32_t b, uint32_t clamp, int line) {
    const int source = lane() ^ int(b & 31);
    return shuffled(mask, a, source, source <= segment_end(clamp), WarpOp::shuffle_xor, line);
}
EMULATOR_INLINE Moved shuffle_idx(uint32_t mask, uint32_t a, uint32_t b, uint32_t clamp, int line) {
    const int source = segment_begin(clamp) | int(b & 31 & ~(clamp >> 8));
    return shuffled(mask, a, source, source <= segment_end(clamp), WarpOp::shuffle, line);
}

EMULATOR_INLINE unsigned warp_of_block() { return ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) / 32; }
EMULATOR_INLINE unsigned warps_of_block() { return (blockDim.x * blockDim.y * blockDim.z + 31) / 32; }

// ---- conversions and approximations
inline uint32_t to_tf32(float x) {
    const uint32_t u = bits<uint32_t>(x);
    return (u & 0x7f800000u) == 0x7f800000u ? u & 0xffffe000u : (u + 0x1000u) & 0xffffe000u;
}
inline uint32_t to_tf32_zero(float x) { return x != x ? 0x7fffffffu : bits<uint32_t>(x) & 0xffffe000u; }
inline uint32_t to_tf32_nearest(float x) {  // ties to even
    const uint32_t u = bits<uint32_t>(x);
    return x != x ? 0x7fffffffu : (u + 0xfffu + (u >> 13 & 1)) & 0xffffe000u;
}
inline float ex2(float x) { return exp2f(x); }
inline float lg2(float x) { return log2f(x); }
inline float rcp(float x) { return 1.0f / x; }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float sin(float x) { return sinf(x); }
inline float cos(float x) { return cosf(x); }
inline float tanh(float x) { return tanhf(x); }

// atom.add.noftz: each half on its own.
template <class Format, class V>
EMULATOR_INLINE V atomic_add(void* address, V value) {
    note_atomic(address, sizeof(V));
    return atomic_update((V*)address, [&](V old) EMULATOR_UNCHECKED -> V {
        return V(each<Format, sizeof(V) / 2>([](float x, float y) EMULATOR_UNCHECKED { return x + y; }, old, value));
    });
}

}  // namespace emulator::ptx
