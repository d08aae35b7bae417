// Operations among the lanes of a warp.
#pragma once
#include <emulator/runtime_api.h>
#include <string.h>

#define EMULATOR_LINE int line = __builtin_LINE()

namespace emulator {

#ifdef EMULATOR_CHECKED
EMULATOR_INLINE int lane() { return lane_index(); }
#else
EMULATOR_INLINE int lane() { return current->lane; }
#endif

template <class T>
EMULATOR_UNCHECKED inline T shuffle(unsigned mask, T value, int source, WarpOp op, int line) {
    static_assert(sizeof(T) <= ROW, "a shuffle moves at most 64 bytes");
    const char* rows = warp_exchange(mask, &value, sizeof(T), op, line);
#ifdef EMULATOR_CHECKED
    shuffle_source(mask, source, line);
#endif
    T result;
    memcpy(&result, rows + source * ROW, sizeof(T));
    return result;
}

EMULATOR_UNCHECKED inline unsigned vote(unsigned mask, int predicate, WarpOp op, int line) {
    const char bit = predicate != 0;
    return *(const unsigned*)warp_compute(
        mask, &bit, 1, op,
        [](unsigned mask, const char* rows, char* results) EMULATOR_UNCHECKED {
            unsigned ballot = 0;
            for (int lane = 0; lane < 32; ++lane)
                if (mask >> lane & 1) ballot |= unsigned(rows[lane * ROW]) << lane;
            for (int lane = 0; lane < 32; ++lane) memcpy(results + lane * ROW, &ballot, 4);
        },
        line);
}

}  // namespace emulator

template <class T>
EMULATOR_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_LINE) {
    const int lane = ::emulator::lane(), segment = lane & ~(width - 1);
    return ::emulator::shuffle(mask, value, segment + (source & (width - 1)), ::emulator::WarpOp::shuffle, line);
}
template <class T>
EMULATOR_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_LINE) {
    const int lane = ::emulator::lane(), source = (lane & (width - 1)) + (int)delta;
    return ::emulator::shuffle(mask, value, source < width ? lane + (int)delta : lane, ::emulator::WarpOp::shuffle_down, line);
}
template <class T>
EMULATOR_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_LINE) {
    const int lane = ::emulator::lane(), source = (lane & (width - 1)) - (int)delta;
    return ::emulator::shuffle(mask, value, source >= 0 ? lane - (int)delta : lane, ::emulator::WarpOp::shuffle_up, line);
}
template <class T>
EMULATOR_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_LINE) {
    // A lane of an earlier segment may be read, one of a later segment not.
    const int lane = ::emulator::lane(), source = lane ^ bits, end = (lane & ~(width - 1)) + width;
    return ::emulator::shuffle(mask, value, source < end ? source : lane, ::emulator::WarpOp::shuffle_xor, line);
}

EMULATOR_INLINE void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_LINE) {
    ::emulator::warp_exchange(mask, "", 0, ::emulator::WarpOp::sync, line);
}
EMULATOR_INLINE unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_LINE) {
    return ::emulator::vote(mask, predicate, ::emulator::WarpOp::ballot, line);
}
EMULATOR_INLINE int __any_sync(unsigned mask, int predicate, EMULATOR_LINE) {
    return ::emulator::vote(mask, predicate, ::emulator::WarpOp::any, line) != 0;
}
EMULATOR_INLINE int __all_sync(unsigned mask, int predicate, EMULATOR_LINE) {
    return ::emulator::vote(mask, !predicate, ::emulator::WarpOp::all, line) == 0;
}
// CUDA promises little of it: here it is every lane that comes to this line before something else is needed to go on.
EMULATOR_INLINE unsigned __activemask(EMULATOR_LINE) { return ::emulator::active_mask(line); }

template <class T>
EMULATOR_UNCHECKED inline unsigned __match_any_sync(unsigned mask, T value, EMULATOR_LINE) {
    return *(const unsigned*)::emulator::warp_compute(
        mask, &value, sizeof(T), ::emulator::WarpOp::match,
        [](unsigned mask, const char* rows, char* results) EMULATOR_UNCHECKED {
            for (int lane = 0; lane < 32; ++lane) {
                unsigned same = 0;
                for (int other = 0; other < 32; ++other)
                    if (mask >> other & 1 && !memcmp(rows + lane * ::emulator::ROW, rows + other * ::emulator::ROW, sizeof(T)))
                        same |= 1u << other;
                memcpy(results + lane * ::emulator::ROW, &same, 4);
            }
        },
        line);
}
template <class T>
EMULATOR_INLINE unsigned __match_all_sync(unsigned mask, T value, int* predicate, EMULATOR_LINE) {
    const unsigned same = __match_any_sync(mask, value, line);
    *predicate = same == mask;
    return *predicate ? mask : 0;
}

namespace emulator {
template <class T, class Combine>
EMULATOR_UNCHECKED inline T reduce(unsigned mask, T value, Combine, int line) {
    return *(const T*)warp_compute(
        mask, &value, sizeof(T), WarpOp::reduce,
        [](unsigned mask, const char* rows, char* results) EMULATOR_UNCHECKED {
            T total{};
            bool first = true;
            for (int lane = 0; lane < 32; ++lane) {
                if (!(mask >> lane & 1)) continue;
                T value;
                memcpy(&value, rows + lane * ROW, sizeof(T));
                total = first ? value : Combine::apply(total, value);
                first = false;
            }
            for (int lane = 0; lane < 32; ++lane) memcpy(results + lane * ROW, &total, sizeof(T));
        },
        line);
}
}  // namespace emulator

#define EMULATOR_REDUCE(NAME, EXPRESSION)                                             \
    namespace emulator {                                                              \
    struct Reduce_##NAME {                                                            \
        template <class T>                                                            \
        EMULATOR_UNCHECKED static T apply(T a, T b) {                                 \
            return EXPRESSION;                                                        \
        }                                                                             \
    };                                                                                \
    }                                                                                 \
    template <class T>                                                                \
    EMULATOR_INLINE T __reduce_##NAME##_sync(unsigned mask, T value, EMULATOR_LINE) { \
        return ::emulator::reduce(mask, value, ::emulator::Reduce_##NAME{}, line);    \
    }
EMULATOR_REDUCE(add, a + b)
EMULATOR_REDUCE(min, b < a ? b : a)
EMULATOR_REDUCE(max, a < b ? b : a)
EMULATOR_REDUCE(and, (a & b))
EMULATOR_REDUCE(or, a | b)
EMULATOR_REDUCE(xor, a ^ b)
#undef EMULATOR_REDUCE
