// The groups that kernels use most: the block, tiles and other lanes of a warp, what runs together, and the grid.
#pragma once
#include <cuda_runtime.h>

namespace cooperative_groups {

namespace details {
EMULATOR_INLINE unsigned lanes_before() { return (1u << ::emulator::lane()) - 1; }
// The lane of `mask` that has so many others of it before it.
EMULATOR_INLINE int lane_of_rank(unsigned mask, unsigned rank) {
    for (; rank; --rank) mask &= mask - 1;
    return __builtin_ctz(mask);
}
// The bits of `lanes` moved together: bit r for the lane of rank r in `mask`.
EMULATOR_INLINE unsigned by_rank(unsigned mask, unsigned lanes) {
    unsigned packed = 0;
    for (unsigned rank = 0; mask; ++rank, mask &= mask - 1) packed |= (lanes >> __builtin_ctz(mask) & 1) << rank;
    return packed;
}
}  // namespace details

// Any group of a block: lanes of a warp, or all threads of the block.
class thread_group {
 public:
    // In parentheses no macro of that name, which may stand in front of this header, is meant.
    void sync(int line = __builtin_LINE()) const { mask_ ? __syncwarp(mask_, line) : (__syncthreads)(line); }
    unsigned size() const { return mask_ ? (unsigned)__popc(mask_) : blockDim.x * blockDim.y * blockDim.z; }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const {
        if (mask_) return (unsigned)__popc(mask_ & details::lanes_before());
        return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    }

 protected:
    explicit thread_group(unsigned mask) : mask_(mask) {}
    unsigned mask_;  // 0: the block
    friend thread_group tiled_partition(const thread_group& parent, unsigned size);
};
// Runs of `size` lanes, of the block or of a group whose lanes follow one another.
EMULATOR_INLINE thread_group tiled_partition(const thread_group&, unsigned size) {
    return thread_group(size < 32 ? ((1u << size) - 1) << ::emulator::lane() / size * size : ~0u);
}

class thread_block : public thread_group {
 public:
    thread_block() : thread_group(0) {}
    static dim3 group_index() { return blockIdx; }
    static dim3 thread_index() { return threadIdx; }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
EMULATOR_INLINE thread_block this_thread_block() { return {}; }
// Shared memory with which GPUs before compute capability 8.0 exchange values in tiles of several warps; nothing is here.
template <unsigned MAX_BLOCK_SIZE = 1024>
struct block_tile_memory {
    unsigned long long of_each_warp[MAX_BLOCK_SIZE / 32];
};
template <unsigned MAX_BLOCK_SIZE>
EMULATOR_INLINE thread_block this_thread_block(block_tile_memory<MAX_BLOCK_SIZE>&) {
    return {};
}

// The blocks of a cluster; a block that was launched without one is alone in it.
class cluster_group {
 public:
    static void sync(int line = __builtin_LINE()) { ::emulator::cluster_arrive(line), ::emulator::cluster_wait(line); }
    static void barrier_arrive(int line = __builtin_LINE()) { ::emulator::cluster_arrive(line); }
    static void barrier_wait(int line = __builtin_LINE()) { ::emulator::cluster_wait(line); }
    static unsigned block_rank() { return ::emulator::cluster_rank(); }
    static unsigned num_blocks() { return ::emulator::cluster_blocks(); }
    static dim3 dim_blocks() { return ::emulator::cluster_dim(); }
    static unsigned thread_rank() { return block_rank() * this_thread_block().size() + this_thread_block().thread_rank(); }
    static unsigned num_threads() { return num_blocks() * this_thread_block().size(); }
    static unsigned size() { return num_threads(); }
    template <class T>
    static T* map_shared_rank(T* pointer, int rank) {
        return (T*)::emulator::cluster_pointer(pointer, (unsigned)rank);
    }
};
EMULATOR_INLINE cluster_group this_cluster() { return {}; }

// All blocks of a cooperative launch.
class grid_group {
 public:
    void sync(int line = __builtin_LINE()) const { ::emulator::grid_barrier(line); }
    bool is_valid() const { return true; }
    unsigned long long block_rank() const {
        return ((unsigned long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    }
    unsigned long long num_blocks() const { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z; }
    unsigned long long thread_rank() const {
        return block_rank() * this_thread_block().size() + this_thread_block().thread_rank();
    }
    unsigned long long num_threads() const { return num_blocks() * this_thread_block().size(); }
    unsigned long long size() const { return num_threads(); }
    dim3 group_dim() const { return gridDim; }
    dim3 dim_blocks() const { return gridDim; }
};
EMULATOR_INLINE grid_group this_grid() { return {}; }

// Lanes of a warp that exchange values, numbered by their rank in the group.
class lane_group : public thread_group {
 public:
    template <class T>
    T shfl(T v, unsigned rank, int line = __builtin_LINE()) const {
        return __shfl_sync(mask_, v, details::lane_of_rank(mask_, rank % size()), 32, line);
    }
    // Beyond the first or the last of the group, a lane gets its own value.
    template <class T>
    T shfl_up(T v, unsigned delta, int line = __builtin_LINE()) const {
        const unsigned rank = thread_rank();
        return shfl(v, rank >= delta ? rank - delta : rank, line);
    }
    template <class T>
    T shfl_down(T v, unsigned delta, int line = __builtin_LINE()) const {
        const unsigned rank = thread_rank();
        return shfl(v, rank + delta < size() ? rank + delta : rank, line);
    }
    int any(int p, int line = __builtin_LINE()) const { return __any_sync(mask_, p, line); }
    int all(int p, int line = __builtin_LINE()) const { return __all_sync(mask_, p, line); }
    unsigned ballot(int p, int line = __builtin_LINE()) const { return details::by_rank(mask_, __ballot_sync(mask_, p, line)); }
    template <class T>
    unsigned match_any(T v, int line = __builtin_LINE()) const {
        return details::by_rank(mask_, __match_any_sync(mask_, v, line));
    }
    template <class T>
    unsigned match_all(T v, int& all, int line = __builtin_LINE()) const {
        return details::by_rank(mask_, __match_all_sync(mask_, v, &all, line));
    }
    // The lanes of the warp, not their ranks.
    template <class T>
    unsigned lanes_with(T v, int line) const {
        return __match_any_sync(mask_, v, line);
    }

 protected:
    using thread_group::thread_group;
};

namespace details {
// Lanes `first`, first + 1, ... of a warp.
template <unsigned SIZE>
class tile_of_lanes : public lane_group {
 public:
    tile_of_lanes() : lane_group(SIZE == 32 ? ~0u : ((1u << SIZE % 32) - 1) << ::emulator::lane() / SIZE * SIZE) {}
    unsigned thread_rank() const { return (unsigned)::emulator::lane() % SIZE; }
    template <class T>
    T shfl(T v, int rank, int line = __builtin_LINE()) const {
        return __shfl_sync(mask_, v, rank, SIZE, line);
    }
    template <class T>
    T shfl_down(T v, unsigned delta, int line = __builtin_LINE()) const {
        return __shfl_down_sync(mask_, v, delta, SIZE, line);
    }
    template <class T>
    T shfl_up(T v, unsigned delta, int line = __builtin_LINE()) const {
        return __shfl_up_sync(mask_, v, delta, SIZE, line);
    }
    template <class T>
    T shfl_xor(T v, int bits, int line = __builtin_LINE()) const {
        return __shfl_xor_sync(mask_, v, bits, SIZE, line);
    }
};

// Several warps of the block that follow one another.
template <unsigned SIZE>
class tile_of_warps {
 public:
    unsigned thread_rank() const { return this_thread_block().thread_rank() % SIZE; }
    void sync(int line = __builtin_LINE()) const { ::emulator::tile_barrier(number(), SIZE, line); }
    template <class T>
    T shfl(T v, unsigned rank, int line = __builtin_LINE()) const {
        static_assert(sizeof(T) <= ::emulator::ROW, "values of up to 64 bytes are supported");
        T result;
        const int from = number() * SIZE + rank % SIZE;
        ::emulator::tile_exchange(number(), SIZE, &v, from, &result, sizeof(T), line);
        return result;
    }
    int any(int p, int line = __builtin_LINE()) const {
        return combined(p != 0, [](int a, int b) { return a | b; }, line);
    }
    int all(int p, int line = __builtin_LINE()) const {
        return combined(p != 0, [](int a, int b) { return a & b; }, line);
    }
    // Of all threads of the tile.
    template <class T, class F>
    T combined(T v, F combine, int line) const {
        for (unsigned bits = SIZE / 2; bits; bits /= 2) v = combine(v, shfl(v, thread_rank() ^ bits, line));
        return v;
    }

 private:
    int number() const { return this_thread_block().thread_rank() / SIZE; }
};

template <bool IN_A_WARP, unsigned SIZE>
struct tile {
    using type = tile_of_lanes<SIZE>;
};
template <unsigned SIZE>
struct tile<false, SIZE> {
    using type = tile_of_warps<SIZE>;
};
template <class Parent>
struct parent {
    static unsigned size() { return this_thread_block().size(); }
};
}  // namespace details

template <unsigned SIZE, class Parent = void>
class thread_block_tile : public details::tile<(SIZE <= 32), SIZE>::type {
 public:
    static_assert(SIZE <= 512 && (SIZE & (SIZE - 1)) == 0, "a tile has a power of two of threads, up to 512");
    thread_block_tile() = default;
    template <class Other>
    thread_block_tile(const thread_block_tile<SIZE, Other>&) {}
    static constexpr unsigned size() { return SIZE; }
    static constexpr unsigned num_threads() { return SIZE; }
    unsigned meta_group_rank() const { return this_thread_block().thread_rank() % details::parent<Parent>::size() / SIZE; }
    unsigned meta_group_size() const { return (details::parent<Parent>::size() + SIZE - 1) / SIZE; }
};
template <unsigned SIZE, class Parent>
struct details::parent<thread_block_tile<SIZE, Parent>> {
    static unsigned size() { return SIZE; }
};
template <unsigned SIZE, class Group>
EMULATOR_INLINE thread_block_tile<SIZE, Group> tiled_partition(const Group&) {
    return {};
}

// The lanes that are together somewhere, or some of a group's.
class coalesced_group : public lane_group {
 public:
    explicit coalesced_group(unsigned mask) : lane_group(mask) {}
};
EMULATOR_INLINE coalesced_group coalesced_threads(int line = __builtin_LINE()) {
    return coalesced_group(::emulator::active_mask(line));
}
template <class Group, class Label>
EMULATOR_INLINE coalesced_group labeled_partition(const Group& group, Label label, int line = __builtin_LINE()) {
    return coalesced_group(group.lanes_with(label, line));
}
template <class Group>
EMULATOR_INLINE coalesced_group binary_partition(const Group& group, bool label, int line = __builtin_LINE()) {
    return labeled_partition(group, (int)label, line);
}

template <class Group>
EMULATOR_INLINE void sync(const Group& group, int line = __builtin_LINE()) {
    group.sync(line);
}

EMULATOR_INLINE coalesced_group this_thread() { return coalesced_group(1u << ::emulator::lane()); }

// One thread of the group calls the function; with _broadcast the others get what it returns.
template <class Group, class F, class... Arguments>
void invoke_one(const Group& group, F function, Arguments&&... arguments) {
    if (group.thread_rank() == 0) function(static_cast<Arguments&&>(arguments)...);
}
template <class Group, class F, class... Arguments>
auto invoke_one_broadcast(const Group& group, F function, Arguments&&... arguments) {
    decltype(function(static_cast<Arguments&&>(arguments)...)) result{};
    if (group.thread_rank() == 0) result = function(static_cast<Arguments&&>(arguments)...);
    return group.shfl(result, 0);
}

// ---- reductions and scans
#define EMULATOR_FUNCTION(NAME, EXPRESSION)                 \
    template <class T>                                      \
    struct NAME {                                           \
        T operator()(T a, T b) const { return EXPRESSION; } \
    };
EMULATOR_FUNCTION(plus, a + b)
EMULATOR_FUNCTION(greater, a > b ? a : b)
EMULATOR_FUNCTION(less, a < b ? a : b)
EMULATOR_FUNCTION(bit_and, (T)(a & b))
EMULATOR_FUNCTION(bit_or, (T)(a | b))
EMULATOR_FUNCTION(bit_xor, (T)(a ^ b))
#undef EMULATOR_FUNCTION

template <unsigned SIZE, class T, class F>
T reduce(const details::tile_of_lanes<SIZE>& tile, T v, F combine, int line = __builtin_LINE()) {
    for (int bits = SIZE / 2; bits; bits /= 2) v = combine(v, tile.shfl_xor(v, bits, line));
    return v;
}
template <unsigned SIZE, class T, class F>
T reduce(const details::tile_of_warps<SIZE>& tile, T v, F combine, int line = __builtin_LINE()) {
    return tile.combined(v, combine, line);
}
template <class T, class F>
T reduce(const coalesced_group& group, T v, F combine, int line = __builtin_LINE()) {
    T total = group.shfl(v, 0, line);
    for (unsigned rank = 1; rank < group.size(); ++rank) total = combine(total, group.shfl(v, rank, line));
    return total;
}
template <class Group, class T, class F>
T inclusive_scan(const Group& group, T v, F combine, int line = __builtin_LINE()) {
    for (unsigned delta = 1; delta < group.size(); delta *= 2) {
        const T before = group.shfl_up(v, delta, line);
        if (group.thread_rank() >= delta) v = combine(before, v);
    }
    return v;
}
template <class Group, class T>
T inclusive_scan(const Group& group, T v, int line = __builtin_LINE()) {
    return inclusive_scan(group, v, plus<T>(), line);
}
// The first of the group gets a T().
template <class Group, class T, class F>
T exclusive_scan(const Group& group, T v, F combine, int line = __builtin_LINE()) {
    const T before = group.shfl_up(inclusive_scan(group, v, combine, line), 1, line);
    return group.thread_rank() ? before : T();
}
template <class Group, class T>
T exclusive_scan(const Group& group, T v, int line = __builtin_LINE()) {
    return exclusive_scan(group, v, plus<T>(), line);
}

}  // namespace cooperative_groups
