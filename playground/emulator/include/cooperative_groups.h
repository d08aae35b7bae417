// The groups that kernels use most: the block, tiles of a warp, what runs together, and the grid.
#pragma once
#include <cuda_runtime.h>

namespace cooperative_groups {

class thread_block {
 public:
    void sync(int line = __builtin_LINE()) const { __syncthreads(line); }
    unsigned thread_rank() const { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
    unsigned size() const { return blockDim.x * blockDim.y * blockDim.z; }
    unsigned num_threads() const { return size(); }
    dim3 group_index() const { return blockIdx; }
    dim3 thread_index() const { return threadIdx; }
    dim3 group_dim() const { return blockDim; }
};
EMULATOR_INLINE thread_block this_thread_block() { return {}; }

// Lanes `first`, first + 1, ... of a warp.
template <unsigned SIZE>
class thread_block_tile {
 public:
    static_assert(SIZE <= 32 && (SIZE & (SIZE - 1)) == 0, "tiles of more than a warp are not supported");
    thread_block_tile() : rank_(::emulator::lane() % SIZE), first_(::emulator::lane() - rank_) {}
    unsigned thread_rank() const { return rank_; }
    static constexpr unsigned size() { return SIZE; }
    static constexpr unsigned num_threads() { return SIZE; }
    unsigned meta_group_rank() const { return this_thread_block().thread_rank() / SIZE; }
    unsigned meta_group_size() const { return (this_thread_block().size() + SIZE - 1) / SIZE; }
    void sync(int line = __builtin_LINE()) const { __syncwarp(mask(), line); }
    template <class T>
    T shfl(T v, int source, int line = __builtin_LINE()) const {
        return __shfl_sync(mask(), v, source, SIZE, line);
    }
    template <class T>
    T shfl_down(T v, unsigned delta, int line = __builtin_LINE()) const {
        return __shfl_down_sync(mask(), v, delta, SIZE, line);
    }
    template <class T>
    T shfl_up(T v, unsigned delta, int line = __builtin_LINE()) const {
        return __shfl_up_sync(mask(), v, delta, SIZE, line);
    }
    template <class T>
    T shfl_xor(T v, int bits, int line = __builtin_LINE()) const {
        return __shfl_xor_sync(mask(), v, bits, SIZE, line);
    }
    int any(int p, int line = __builtin_LINE()) const { return __any_sync(mask(), p, line); }
    int all(int p, int line = __builtin_LINE()) const { return __all_sync(mask(), p, line); }
    unsigned ballot(int p, int line = __builtin_LINE()) const { return __ballot_sync(mask(), p, line) >> first_; }

 private:
    unsigned mask() const { return SIZE == 32 ? ~0u : ((1u << SIZE % 32) - 1) << first_; }
    unsigned rank_, first_;
};
template <unsigned SIZE, class Group>
EMULATOR_INLINE thread_block_tile<SIZE> tiled_partition(const Group&) {
    return {};
}

template <class T>
struct plus {
    T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct greater {
    T operator()(T a, T b) const { return a > b ? a : b; }
};
template <class T>
struct less {
    T operator()(T a, T b) const { return a < b ? a : b; }
};
template <unsigned SIZE, class T, class F>
T reduce(const thread_block_tile<SIZE>& tile, T v, F combine, int line = __builtin_LINE()) {
    for (int bits = SIZE / 2; bits; bits /= 2) v = combine(v, tile.shfl_xor(v, bits, line));
    return v;
}

}  // namespace cooperative_groups
