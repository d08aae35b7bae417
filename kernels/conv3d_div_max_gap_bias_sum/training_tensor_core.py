"""conv3d_div_max_gap_bias_sum, training on the tensor cores: 16 bytes a window are all that backward needs beside the input.

The forward pass also keeps the argmax index of each window and channel, and the gradients are products with a
one-hot matrix of these.

Why it is faster
    PyTorch's gradient writes and reads tensors of the convolution's 441 MB. Here 14 MB of argmax indices are kept, a bit in a
    byte each; operand a is made of them in registers, by one comparison. The weights' gradient streams x as the forward pass.

Mathematics
    out[b] = sum over o of ((1/N * sum over k of max over window k of y[b,o,.] + sign(d) * conv_bias[o]) / |d| + bias[o])
    y: the convolution with weights * sign(d), without its bias; N windows a channel. With hot[o,k] = 1 where position k is its
    window's maximum in output o: grad_w[o,c,t] = 1/(N*d) * sum over b,k of grad[b,o] * hot[b,o,k] * x[b,c,k + t] grad_x[b,c,p]
    = 1/(N*d) * sum over o,t of hot[b,o,p - t] * (grad[b,o] * w[o,c,t]) Strict: weights are high + low for grad_x; grad_w is
    added in fp32. The NaNs that one in x makes may differ from PyTorch's.

Launches
    conv_max_mean    samples x parts    384 threads   97 KB, strict 206    v4's, a word of argmax indices a lane and tile
    weight_gradient  samples x parts    384           97 KB                8 windows x 16 outputs x 216 weights a consumer warp
    input_gradient   SMs                384           7 KB                 2 x 2 x 16 pixels x 8 channels a warp at a time

Floor
    Each gradient is as large a product as the forward pass (0.077 ms on an H200); the input's also writes 269 MB, 0.062 ms.

Takes
    float32 CUDA tensors, a channel below 2^31 pixels, on compute capability 8.0 or later; what SERVED says: up to 8 channels in
    and 16 out, a kernel of 3, windows of 2. PyTorch computes the rest, and the gradient of a gradient. Deterministic for a
    number of SMs. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading
import warnings

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv3d_div_max_gap_bias_sum_training_tensor_core"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
SHARED_LIMIT_KB = 0  # builds as for a device with that much shared memory a block; 0: what the device has
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W and SHARED_LIMIT_KB.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

// What the kernels are made for, in volumes of any size.
#define SERVED (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D == 3 && KERNEL_H == 3 && KERNEL_W == 3 && POOL_D == 2 && \
                POOL_H == 2 && POOL_W == 2)
extern "C" int64_t is_served() { return SERVED; }

#if SERVED
using Element = float;  // of x and the parameters
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// ---- words
// A window of 2 x 2 x 2 positions reads 4 x 4 x 4 pixels. A tile is 8 windows side by side in 16 outputs. A slab is a layer of
// windows along depth. Where a sample's slabs do not fit into shared memory, or its columns into a band, it is cut along these;
// and along its rows, where samples are too few to fill all SMs. A block has one part of one sample: a segment. A band is two
// rows of x, in all planes of a segment: a row of windows reads two bands. A segment is scaled by a power of two that its first
// values suggest, and attempted again if one overflows fp16.
constexpr int WARP = 32, STAGES = 3, CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;
constexpr int CHANNELS = 8, OUTPUTS = 16, TILE_WINDOWS = 8;  // of the tensor core's operands; what does not exist is zero
constexpr int SIDE = 4, COLUMNS = 64, PIECES = COLUMNS / 4;  // of x: a window's pixels in each direction, a row's columns
constexpr int LINES = PRODUCERS / PIECES;                    // rows of a band that the producers load at a time
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, WEIGHTS = TAPS * IN_CHANNELS * OUT_CHANNELS;

// ---- shared memory of a block, for the original's size
//   0        32       64       96 KB                          strict: 0        64       128      192     206 KB
//   | band n | n + 1  | n + 2  | Shared                               | band n | n + 1  | n + 2  | weights | Shared
//             |
//             plane 0: row 0: columns 0 2 4 .. 62, then 1 3 5 .. 63, 8 channels of fp16 each; row 1; plane 1 ..
//             strict: the high parts of all planes, then the low parts; weights: [high, low][tap][lane]
// The pixels of one column in 8 windows are 8 rows of 16 bytes side by side: a matrix for ldmatrix, free of bank conflicts.
//
//             filled by                                         emptied by
//   a band    4 producer warps, from registers: `full`          8 consumer warps: `empty`; all threads arrive
//   weights   8 consumer warps, once: in the last band, from    nobody
//             where registers take them; strict: in their place
constexpr int COLUMN_BYTES = CHANNELS * 2, ODD_COLUMNS = COLUMNS / 2 * COLUMN_BYTES, ROW_BYTES = 2 * ODD_COLUMNS;
constexpr int PLANE_BYTES = 2 * ROW_BYTES, TAP_BYTES = WARP * 8, WEIGHT_BYTES = TAPS * TAP_BYTES;  // of high or low parts

struct Shared {
    uint64_t full[STAGES], empty[STAGES];      // mbarriers
    float producer_largest[2][PRODUCER_WARPS]; // [at the start, at the end of an attempt]
    int exponents[2];                          // of the power of two that an attempt scaled x by; or REJECTED
    float weight_largest[CONSUMER_WARPS];
    float sums[CONSUMER_WARPS][OUTPUTS];
    DEVICE int exponent_after(int bands_of_all, int bands) const { return exponents[bands_of_all > bands]; }
};

struct Problem {
    int64_t batch;
    int depth, height, width, slabs, rows, columns;  // of x, and of its windows; a channel has less than 2^31 pixels
    bool strict;
    int slab_parts, part_slabs, column_parts, part_columns, row_parts, part_rows, parts, band_bytes, dynamic_bytes;
    const Element *x, *weight, *conv_bias, *bias;
    float* out;  // (batch,), without `bias` (batch, OUT_CHANNELS)
    float divisor;
    int biases;  // 1, OUT_CHANNELS or 0
    int64_t gradients;  // parts that the weights' gradient is summed in: rows of WEIGHTS values
    __host__ __device__ int64_t windows() const { return static_cast<int64_t>(slabs) * rows * columns; }
};

// Gradients of the averages: one a sample, or one a channel of it.
struct Upstream {
    const float* grad;
    bool by_sample;
    float scale;  // 1 / (windows * divisor)
    __host__ __device__ float at(int64_t sample, int o) const { return grad[by_sample ? sample : sample * OUT_CHANNELS + o]; }
};

// ---- PTX
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Returns once the phase of this parity is complete.
DEVICE void mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
DEVICE void st_shared_v4_u32(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint2 ld_shared_v2_u32(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
// Four matrices of 8 rows x 16 bytes: lane 8 * i + r has the address of row r of matrix i. Lane 4 * n + q gets elements 2 * q
// and 2 * q + 1 of row n.
DEVICE uint4 ldmatrix_m8n8_x4(uint32_t row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
    return v;
}
// As ldmatrix_m8n8_x4, transposed: lane 4 * n + q gets elements 2 * q and 2 * q + 1 of column n.
DEVICE uint4 ldmatrix_m8n8_x4_trans(uint32_t row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
    return v;
}
// d (16 x 8) += a (16 x 8) * b (8 x 8), fp16 with fp32 sums. Lane 4 * n + q has columns 2 * q and 2 * q + 1 of d, rows n and
// n + 8; elements 2 * q and 2 * q + 1 of rows n and n + 8 of a, and of column n of b.
DEVICE void mma_m16n8k8_f32_f16(float (&d)[4], uint2 a, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(b));
}
// d (16 x 8) += a (16 x 16) * b (16 x 8), fp16 with fp32 sums. Lane 4 * n + q has columns 2 * q and 2 * q + 1 of d, rows n and
// n + 8.
DEVICE void mma_m16n8k16_f32_f16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEVICE float max_nan(float a, float b) {  // fmaxf ignores NaN
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
// The products of two taps at once.
DEVICE void mma_pair(float (&d)[4], uint2 a, uint2 next_a, uint32_t b, uint32_t next_b) {
    mma_m16n8k16_f32_f16(d, make_uint4(a.x, a.y, next_a.x, next_a.y), b, next_b);
}

// ---- fp16 values and powers of two
DEVICE uint32_t fp16_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// The residual of rounding x to fp16; none of an infinity.
DEVICE float fp16_residual(float x) { return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x)); }
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}
DEVICE float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
DEVICE float warp_sum(float v) {  // in all lanes
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}
// The largest of the values of WARPS whole warps, which all call it. Two calls with one array need a barrier between them.
template <int WARPS>
DEVICE float largest_of_warps(float v, float (&by_warp)[WARPS], int warp, int barrier) {
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    if (threadIdx.x % WARP == 0) by_warp[warp] = v;
    bar_sync(barrier, WARPS * WARP);
    for (int other = 0; other < WARPS; ++other) v = fmaxf(v, by_warp[other]);
    return v;
}
// The largest finite weight, for the first WARPS warps of the block.
template <int WARPS>
DEVICE float largest_weight(const Element* __restrict__ weight, float (&by_warp)[WARPS], int barrier) {
    float largest = 0;
    for (int i = threadIdx.x; i < WEIGHTS; i += WARPS * WARP) largest = fmaxf(largest, fabsf(finite_or_zero(weight[i])));
    return largest_of_warps(largest, by_warp, threadIdx.x / WARP, barrier);
}

// ---- the work
struct Segment {
    int64_t sample;
    int first_slab, slabs, first_column, columns, first_row, rows;  // of windows

    DEVICE void set(const Problem& problem) {
        const int part = blockIdx.x / problem.batch, batch = problem.batch;
        sample = blockIdx.x - static_cast<int64_t>(part) * batch;
        first_slab = part / problem.row_parts / problem.column_parts * problem.part_slabs;
        first_column = part / problem.row_parts % problem.column_parts * problem.part_columns;
        first_row = part % problem.row_parts * problem.part_rows;
        slabs = smaller(problem.part_slabs, problem.slabs - first_slab);
        columns = smaller(problem.part_columns, problem.columns - first_column);
        rows = smaller(problem.part_rows, problem.rows - first_row);
    }
    // Among all windows of the batch.
    DEVICE int64_t window(const Problem& problem, int slab, int row, int column) const {
        const int64_t line = (sample * problem.slabs + first_slab + slab) * problem.rows + first_row + row;
        return line * problem.columns + first_column + column;
    }
    DEVICE int bands() const { return rows + 1; }
    // Bands are counted over both attempts.
    DEVICE int row_of_band(int n) const { return n < bands() ? n : n - bands(); }
};

// Band n, counted over all attempts, is in stage n % STAGES. Producers wait for its empty barrier and arrive at its full one;
// consumers the other way round. The last stage is not empty at first: consumers keep the weights there, and arrive once more.
struct Pipeline {
    uint32_t data, full, empty;  // shared addresses
    int band_bytes;

    DEVICE Pipeline(char* memory, Shared& shared, int band_bytes)
        : data(shared_address(memory)), full(shared_address(shared.full)), empty(shared_address(shared.empty)),
          band_bytes(band_bytes) {
        if (threadIdx.x == 0)
            for (int i = 0; i < STAGES; ++i)
                mbarrier_init(full + 8 * i, PRODUCERS), mbarrier_init(empty + 8 * i, CONSUMERS);
        __syncthreads();
    }
    DEVICE uint32_t band(unsigned n) const { return data + n % STAGES * band_bytes; }
    DEVICE void producer_acquire(unsigned n) const { mbarrier_test_wait(empty + n % STAGES * 8, (n + 1) / STAGES & 1 ^ 1); }
    DEVICE void producer_commit(unsigned n) const { mbarrier_arrive(full + n % STAGES * 8); }
    DEVICE void consumer_wait(unsigned n) const { mbarrier_test_wait(full + n % STAGES * 8, n / STAGES & 1); }
    DEVICE void consumer_release(unsigned n) const { mbarrier_arrive(empty + n % STAGES * 8); }
};

// ---- consumers
// A warp's tile: tiles are numbered along columns, then slabs, then rows of windows.
struct Tile {
    int group, slab;  // a slab beyond the segment's is of a later row
    DEVICE Tile next(const Segment& segment, int tiles) const {
        const int groups = ceil_div(segment.columns, TILE_WINDOWS);
        Tile tile = {group + tiles, slab};
        for (; tile.group >= groups; tile.group -= groups) ++tile.slab;
        return tile;
    }
    DEVICE static Tile first(const Segment& segment) { return Tile{0, 0}.next(segment, threadIdx.x / WARP); }
    DEVICE int first_window() const { return group * TILE_WINDOWS; }
};

// Calls visit(tile, its two bands) for the warp's tiles, every CONSUMER_WARPS-th, and releases the stages. Warps may be a row
// apart. n counts the bands. Producers arrive in their order: where a row's second one is full, the first is, too.
template <class Visit>
DEVICE void for_tiles(const Segment& segment, const Pipeline& pipeline, unsigned& n, Visit visit) {
    Tile tile = Tile::first(segment);
    UNROLL_1 for (const unsigned end = n + segment.rows; n != end; ++n) {
        pipeline.consumer_wait(n + 1);
        UNROLL_1 for (; tile.slab < segment.slabs; tile = tile.next(segment, CONSUMER_WARPS))
            visit(tile, pipeline.band(n), pipeline.band(n + 1));
        tile.slab -= segment.slabs;
        pipeline.consumer_release(n);
    }
    pipeline.consumer_release(n++);
}

// Where in a band the row of 16 bytes lies that the lane names when a warp loads column `column` of a tile's windows.
DEVICE uint32_t matrix_row(int lane, const Tile& tile, int column) {
    const int pair = (tile.first_window() + lane % 8 + column / 2) % (COLUMNS / 2);  // beyond the row: of no window
    return 2 * tile.slab * PLANE_BYTES + column % 2 * ODD_COLUMNS + pair * COLUMN_BYTES;
}

// weight[o][c][tap] as left operands, [tap][lane], scaled, and what rounding leaves of them; the consumers call it.
__device__ void store_weights(const Element* __restrict__ weight, float scale, uint2* high, uint2* low) {
    for (int i = threadIdx.x; i < TAPS * WARP; i += CONSUMERS) {
        const int g = i % WARP / 4, t = i % 4, tap = i / WARP;
        const auto scaled = [&](int o, int c) {
            return o < OUT_CHANNELS && c < IN_CHANNELS ? scale * weight[(o * IN_CHANNELS + c) * TAPS + tap] : 0;
        };
        float w[4] = {scaled(g, 2 * t), scaled(g, 2 * t + 1), scaled(g + 8, 2 * t), scaled(g + 8, 2 * t + 1)};
        high[i] = make_uint2(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]));
        if (!low) continue;
        UNROLL for (float& each : w) each = fp16_residual(each);
        low[i] = make_uint2(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]));
    }
}

// A plane of 8 windows: [row][column], channels 2t and 2t + 1 of window g. Two taps at once take neighbouring registers. As
// ldmatrix loads columns 0 2 1 3, taps 0 and 2 of a row need no moves, at a window's even and odd positions.
using Plane = uint32_t[SIDE][SIDE];
DEVICE void load_plane(uint32_t band, uint32_t next_band, Plane& x) {
    UNROLL for (int row = 0; row < SIDE; ++row) {
        const uint4 v = ldmatrix_m8n8_x4((row < 2 ? band : next_band) + row % 2 * ROW_BYTES);
        x[row][0] = v.x, x[row][2] = v.y, x[row][1] = v.z, x[row][3] = v.w;
    }
}

// Nine taps of a plane of the kernel: the pairs 0 2, 3 5, 6 8 and 1 7, and the middle one. Positions of a window are numbered
// d, h, w in binary; hw is 0 to 3.
constexpr int PLANE_TAPS = 9, PAIRS = 4, MIDDLE = 4;
DEVICE constexpr int first_of_pair(int pair) { return pair < 3 ? 3 * pair : 1; }
DEVICE constexpr int second_of_pair(int pair) { return pair < 3 ? 3 * pair + 2 : 7; }
DEVICE uint32_t pixels(const Plane& x, int hw, int tap) { return x[hw / 2 + tap / 3][hw % 2 + tap % 3]; }

using Sums = float[8][4];  // [position][element: window 2t, 2t + 1 of output g, then of g + 8]

template <int STRIDE>  // of weights: from tap to tap
DEVICE void add_pair(float (*sums)[4], const uint2* w, const Plane& x, int tap, int next_tap) {
    UNROLL for (int hw = 0; hw < 4; ++hw)
        mma_pair(sums[hw], w[tap * STRIDE], w[next_tap * STRIDE], pixels(x, hw, tap), pixels(x, hw, next_tap));
}

// The convolution of a tile, a plane of x at a time. Plane p meets plane r = p - d of the kernel at positions of depth d. All
// positions add in the same order, so equal inputs give equal bits.
DEVICE void convolve(const uint2 (&weights)[TAPS], uint32_t band, uint32_t next_band, Sums& sums) {
    uint32_t middle[4] = {};  // of the plane before: its middle tap waits for this plane's, to make a pair
    UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = 0;
    UNROLL for (int p = 0; p < SIDE; ++p) {
        Plane x;
        load_plane(band + p * PLANE_BYTES, next_band + p * PLANE_BYTES, x);
        UNROLL for (int d = 0; d < 2; ++d) {
            const int r = p - d;
            if (r < 0 || r > 2) continue;
            const uint2* const w = weights + r * PLANE_TAPS;
            UNROLL for (int hw = 0; hw < 4 && r == 1; ++hw)
                mma_pair(sums[4 * d + hw], weights[MIDDLE], w[MIDDLE], middle[hw], pixels(x, hw, MIDDLE));
            UNROLL for (int pair = 0; pair < PAIRS; ++pair)
                add_pair<1>(sums + 4 * d, w, x, first_of_pair(pair), second_of_pair(pair));
            UNROLL for (int hw = 0; hw < 4 && r == 2; ++hw)
                mma_m16n8k8_f32_f16(sums[4 * d + hw], w[MIDDLE], pixels(x, hw, MIDDLE));
        }
        UNROLL for (int hw = 0; hw < 4; ++hw) middle[hw] = pixels(x, hw, MIDDLE);
    }
}

// The same, error-compensated: low * high + high * low + high * high. The tensor core truncates its sums, so each plane's begin
// at zero and are added as fp32 numbers. The small ones are kept apart, and do not count where x is infinite: the low part of a
// weight may have the other sign.
DEVICE void convolve_strictly(const uint2* weights, uint32_t band, uint32_t next_band, int lower, Sums& sums) {
    Sums small;
    UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = small[i / 4][i % 4] = 0;
    UNROLL_1 for (int p = 0; p < SIDE; ++p) {
        Plane high, low;
        load_plane(band + p * PLANE_BYTES, next_band + p * PLANE_BYTES, high);
        load_plane(band + lower + p * PLANE_BYTES, next_band + lower + p * PLANE_BYTES, low);
        UNROLL for (int d = 0; d < 2; ++d) {
            if (p < d || p > d + 2) continue;
            const uint2 *const high_w = weights + (p - d) * PLANE_TAPS * WARP, *const low_w = high_w + TAPS * WARP;
            float part[4][4] = {};
            UNROLL for (int pair = 0; pair < PAIRS; ++pair) {
                add_pair<WARP>(small + 4 * d, low_w, high, first_of_pair(pair), second_of_pair(pair));
                add_pair<WARP>(part, high_w, high, first_of_pair(pair), second_of_pair(pair));
                add_pair<WARP>(small + 4 * d, high_w, low, first_of_pair(pair), second_of_pair(pair));
            }
            const uint2 w = high_w[MIDDLE * WARP], small_w = low_w[MIDDLE * WARP];
            UNROLL for (int hw = 0; hw < 4; ++hw) {
                mma_pair(small[4 * d + hw], small_w, w, pixels(high, hw, MIDDLE), pixels(low, hw, MIDDLE));
                mma_m16n8k8_f32_f16(part[hw], w, pixels(high, hw, MIDDLE));
            }
            UNROLL for (int i = 0; i < 16; ++i) sums[4 * d + i / 4][i % 4] += part[i / 4][i % 4];
        }
    }
    UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += finite_or_zero(small[i / 4][i % 4]);
}

struct Maximum {
    float value;
    uint32_t index;  // a bit: 1 << position
};

// A lane's four maxima as PyTorch finds them: the last NaN, else the first of the largest. Neighbours meet in pairs, then
// pairs, then fours: of equal ones the first goes on.
template <bool INDICES>
DEVICE void find_maxima(const Sums& sums, Maximum (&maxima)[4]) {
    UNROLL for (int element = 0; element < 4; ++element) {
        Maximum best[8];
        UNROLL for (int i = 0; i < 8; ++i) best[i] = {sums[i][element], 1u << i};
        UNROLL for (int step = 1; step < 8; step *= 2)
            UNROLL for (int i = 0; i < 8; i += 2 * step) {
                const Maximum next = best[i + step];
                if (INDICES) best[i].index = next.value > best[i].value ? next.index : best[i].index;
                best[i].value = max_nan(best[i].value, next.value);
            }
        maxima[element] = best[0];
    }
    if (!INDICES) return;
    const float total = (maxima[0].value + maxima[1].value) + (maxima[2].value + maxima[3].value);
    if (total == total) return;
    UNROLL for (int i = 0; i < 32; ++i)  // perhaps one of them is a NaN
        if (sums[i / 4][i % 4] != sums[i / 4][i % 4]) maxima[i % 4].index = 1u << i / 4;
}

// A window's argmax indices are 16 bytes with a bit in each: output o in byte o / 4 of word o % 4. Two lanes have parts of the
// same words and exchange them.
DEVICE uint32_t argmax_word(int g, const uint32_t (&indices)[4]) {
    const bool upper = g >= 4;
    const int to_bytes = upper ? 0x4101 : 0x1410;  // 1 and 3, or 0 and 2; the second byte of an index is zero
    const uint32_t even = __byte_perm(indices[0], indices[2], to_bytes), odd = __byte_perm(indices[1], indices[3], to_bytes);
    return (upper ? odd : even) | __shfl_xor_sync(0xffffffffu, upper ? even : odd, 16);
}

// A warp writes a sample's result: with a bias the sum over outputs, else the average of each. Lane o has output o's sum.
DEVICE void write_result(const Problem& p, int64_t sample, float sum) {
    const int o = threadIdx.x % WARP;
    float average = 0;
    if (o < OUT_CHANNELS) {
        average = (sum / p.windows() + copysignf(1, p.divisor) * p.conv_bias[o]) / fabsf(p.divisor);
        if (!p.biases) p.out[sample * OUT_CHANNELS + o] = average;
        else average += p.bias[p.biases == 1 ? 0 : o];
    }
    average = warp_sum(average);
    if (p.biases && o == 0) p.out[sample] = average;
}

// ---- the kernel: producer warps, then consumer warps
constexpr int FIRST_TARGET = 11, LAST_TARGET = 15, REJECTED = 1000;  // the first leaves room for values 31 times as large

using Piece = float[CHANNELS * 4];  // four columns of a row, in all channels
DEVICE float largest_finite(float largest, const Piece& v) {
    float all = largest;
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) all = fmaxf(all, fabsf(v[i]));
    if (all < INFINITY) return all;
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) largest = fmaxf(largest, fabsf(finite_or_zero(v[i])));
    return largest;
}
DEVICE void load_piece(const Element* __restrict__ from, int64_t channel_floats, int exist, bool aligned, Piece& v) {
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) v[i] = 0;
    if (aligned && exist > 0)
        UNROLL for (int c = 0; c < IN_CHANNELS; ++c) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(from + c * channel_floats));
            v[4 * c] = four.x, v[4 * c + 1] = four.y, v[4 * c + 2] = four.z, v[4 * c + 3] = four.w;
        }
    if (!aligned)
        UNROLL for (int i = 0; i < IN_CHANNELS * 4; ++i)
            if (i % 4 < exist) v[i] = __ldg(from + i / 4 * channel_floats + i % 4);
}

// A piece goes to its row as fp16, a column's channels side by side. Every other group of four lanes swaps its two pairs of
// columns, so that a quarter-warp's stores touch all banks.
DEVICE void store_piece(uint32_t row, int piece, const Piece& v) {
    uint4 columns[4];
    UNROLL for (int k = 0; k < 4; ++k)
        columns[k] = make_uint4(fp16_pair(v[k], v[4 + k]), fp16_pair(v[8 + k], v[12 + k]), fp16_pair(v[16 + k], v[20 + k]),
                                fp16_pair(v[24 + k], v[28 + k]));
    const bool turned = piece / 4 % 2;
    const uint32_t first = row + (2 * piece + turned) * COLUMN_BYTES, second = row + (2 * piece + !turned) * COLUMN_BYTES;
    UNROLL for (int odd = 0; odd < 2; ++odd) {
        const uint4 a = columns[odd], b = columns[2 + odd];
        st_shared_v4_u32(first + odd * ODD_COLUMNS, turned ? b : a);
        st_shared_v4_u32(second + odd * ODD_COLUMNS, turned ? a : b);
    }
}

template <bool STRICT>
DEVICE void produce(const Problem& problem, const Segment& segment, const Pipeline& pipeline, Shared& shared, int thread) {
    const int piece = thread % PIECES, first_line = thread / PIECES, lines = 2 * (2 * segment.slabs + 2);  // of a band
    const int64_t plane_floats = static_cast<int64_t>(problem.height) * problem.width;
    const int left = 2 * segment.first_column + 4 * piece, exist = problem.width - left;
    const bool aligned = problem.width % 4 == 0 && reinterpret_cast<uintptr_t>(problem.x) % 16 == 0;
    const Element* const from = problem.x + left + 2 * segment.first_row * static_cast<int64_t>(problem.width) +
                              (segment.sample * IN_CHANNELS * problem.depth + 2 * segment.first_slab) * plane_floats;
    Piece v;
    const auto load = [&](int band, int line) {  // line: plane and row in a band
        load_piece(from + line / 2 * plane_floats + (2 * band + line % 2) * static_cast<int64_t>(problem.width),
                   problem.depth * plane_floats, exist, aligned, v);
    };
    load(0, first_line);
    const float first_largest = largest_of_warps(largest_finite(0, v), shared.producer_largest[0], thread / WARP, 1);
    int exponent = scale_exponent(first_largest, FIRST_TARGET), band = 0;
    bool exact = false;
    float largest = 0;
    UNROLL_1 for (unsigned n = 0; band < segment.bands(); ++n) {
        const int next_band = band + 1 < segment.bands() ? band + 1 : 0;  // the first again, in case of a second attempt
        pipeline.producer_acquire(n);
        UNROLL_1 for (int line = first_line; line < lines; line += LINES) {
            const uint32_t to = pipeline.band(n) + line * ROW_BYTES;
            largest = largest_finite(largest, v);
            UNROLL for (int i = 0; i < CHANNELS * 4; ++i) v[i] *= power_of_2(exponent);
            store_piece(to, piece, v);
            if (STRICT) {
                UNROLL for (int i = 0; i < CHANNELS * 4; ++i) v[i] = fp16_residual(v[i]);
                store_piece(to + pipeline.band_bytes / 2, piece, v);
            }
            // The next piece is under way while the pipeline is full.
            const bool in_band = line + LINES < lines;
            load(in_band ? band : next_band, in_band ? line + LINES : first_line);
        }
        if (++band == segment.bands()) {  // consumers read the exponent behind the last band's barrier
            largest = largest_of_warps(largest, shared.producer_largest[1], thread / WARP, 1);
            const bool accepted = exact || largest * power_of_2(exponent) <= 65504;  // fp16's largest
            if (thread == 0) shared.exponents[exact] = accepted ? exponent : REJECTED;
            exponent = scale_exponent(largest, LAST_TARGET);
            if (!accepted) exact = true, band = 0;
        }
        pipeline.producer_commit(n);
    }
}

// `part_sums` (parts, batch, OUTPUTS) where a sample has several, else null; `argmax` (batch, slabs, rows, columns, 4).
template <bool STRICT, bool INDICES>
__global__ void __launch_bounds__(THREADS, 1)
    conv_max_mean(const Problem problem, float* __restrict__ part_sums, uint32_t* __restrict__ argmax) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared shared;
    __shared__ Segment segment;  // in no registers, which are short
    if (threadIdx.x == 0) segment.set(problem);
    const Pipeline pipeline(memory, shared, problem.band_bytes);
    if (threadIdx.x >= CONSUMERS) return produce<STRICT>(problem, segment, pipeline, shared, threadIdx.x - CONSUMERS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int weight_exponent = scale_exponent(largest_weight<CONSUMER_WARPS>(problem.weight, shared.weight_largest, 2), 14);
    uint2* const stored = reinterpret_cast<uint2*>(memory + (STRICT ? STAGES : STAGES - 1) * pipeline.band_bytes);
    store_weights(problem.weight, copysignf(power_of_2(weight_exponent), problem.divisor), stored,
                  STRICT ? stored + TAPS * WARP : nullptr);
    bar_sync(2, CONSUMERS);
    uint2 weights[TAPS];
    if (!STRICT) UNROLL for (int tap = 0; tap < TAPS; ++tap) weights[tap] = stored[tap * WARP + lane];
    pipeline.consumer_release(STAGES - 1);

    float totals[2];  // of outputs g and g + 8
    unsigned n = 0;
    do {
        totals[0] = totals[1] = 0;
        for_tiles(segment, pipeline, n, [&](const Tile& tile, uint32_t band, uint32_t next_band) {
            const uint32_t offset = matrix_row(lane, tile, lane / 8 % 2 * 2 + lane / 16);
            Sums sums;
            if constexpr (STRICT)
                convolve_strictly(stored + lane, band + offset, next_band + offset, pipeline.band_bytes / 2, sums);
            else
                convolve(weights, band + offset, next_band + offset, sums);
            Maximum maxima[4];
            find_maxima<INDICES>(sums, maxima);
            uint32_t indices[4];
            UNROLL for (int i = 0; i < 4; ++i) {
                const bool exists = tile.first_window() + 2 * t + i % 2 < segment.columns;
                totals[i / 2] += exists ? maxima[i].value : 0;
                indices[i] = maxima[i].index;
            }
            if constexpr (INDICES) {
                const uint32_t word = argmax_word(g, indices);
                const int column = tile.first_window() + 2 * t + g / 4;
                if (column < segment.columns)
                    argmax[segment.window(problem, tile.slab, segment.row_of_band(n), column) * 4 + g % 4] = word;
            }
        });
    } while (shared.exponent_after(n, segment.bands()) == REJECTED);
    UNROLL for (int i = 0; i < 2; ++i) {
        totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 1);
        totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 2);
        if (t == 0) shared.sums[warp][g + 8 * i] = totals[i];
    }
    bar_sync(2, CONSUMERS);
    if (warp > 0) return;
    float sum = 0;
    if (lane < OUTPUTS)
        for (int other = 0; other < CONSUMER_WARPS; ++other) sum += shared.sums[other][lane];
    sum = ldexpf(sum, -shared.exponent_after(n, segment.bands()) - weight_exponent);
    if (!part_sums) write_result(problem, segment.sample, sum);
    else if (lane < OUTPUTS) part_sums[static_cast<int64_t>(blockIdx.x) * OUTPUTS + lane] = sum;
}

// A warp adds the parts of a sample, in order.
__global__ void __launch_bounds__(WARP) finish_samples(const float* __restrict__ sums, const Problem problem) {
    float sum = 0;
    for (int part = 0; part < problem.parts; ++part)
        if (threadIdx.x < OUTPUTS) sum += sums[(static_cast<int64_t>(part) * gridDim.x + blockIdx.x) * OUTPUTS + threadIdx.x];
    write_result(problem, blockIdx.x, sum);
}

// ---- gradients
// The gradient of the weights: one-hot argmax indices (16 outputs x 8 windows, two positions) times x (8 windows x 8 channels),
// for each tap and position of a window. The sums of all taps stay in registers.
using Gradient = float[TAPS][4];  // [element: channel 2t, 2t + 1 of output g, then of g + 8]

// Whether the lower byte of each of the two 16-bit words in `bytes` is 1 << i: two fp16 values, 1 or 0. Words are compared as
// the subnormal fp16 values that they are.
DEVICE uint32_t one_hot(uint32_t bytes, int i) {
    const uint32_t hot = 0x00010001u << i;
    const __half2 equal = __heq2(*reinterpret_cast<const __half2*>(&bytes), *reinterpret_cast<const __half2*>(&hot));
    return *reinterpret_cast<const uint32_t*>(&equal);
}

// gradients (parts, batch, WEIGHTS): a segment's, weighted by the gradient of its sample's averages.
__global__ void __launch_bounds__(THREADS, 1)
    weight_gradient(const Problem problem, const uint32_t* __restrict__ argmax, const Upstream upstream,
                    float* __restrict__ gradients) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared shared;
    __shared__ Segment segment;
    if (threadIdx.x == 0) segment.set(problem);
    const Pipeline pipeline(memory, shared, problem.band_bytes);
    if (threadIdx.x >= CONSUMERS) return produce<false>(problem, segment, pipeline, shared, threadIdx.x - CONSUMERS);
    pipeline.consumer_release(STAGES - 1);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    Gradient gradient;
    unsigned n = 0;
    do {
        UNROLL for (int i = 0; i < TAPS * 4; ++i) gradient[i / 4][i % 4] = 0;
        uint32_t words[2];  // of a tile's windows 2t and 2t + 1, with outputs g and g + 8; the next tile's are under way
        const auto load = [&](Tile tile, int row) {
            for (; tile.slab >= segment.slabs; tile.slab -= segment.slabs) ++row;
            const int column = tile.first_window() + 2 * t;
            const uint32_t* const from = argmax + segment.window(problem, tile.slab, row, column) * 4 + g % 4;
            UNROLL for (int i = 0; i < 2; ++i)
                words[i] = row < segment.rows && column + i < segment.columns ? __ldg(from + 4 * i) : 0;
        };
        load(Tile::first(segment), 0);
        for_tiles(segment, pipeline, n, [&](const Tile& tile, uint32_t band, uint32_t next_band) {
            // Bytes of both words, for output g and for g + 8.
            const int byte = g / 4;
            const uint32_t left = words[0] >> 8 * byte & 0x00ff00ff, right = words[1] >> 8 * byte & 0x00ff00ff;
            const uint32_t bytes[2] = {__byte_perm(left, right, 0x5410), __byte_perm(left, right, 0x7632)};
            uint2 hot[8];
            UNROLL for (int i = 0; i < 8; ++i) hot[i] = make_uint2(one_hot(bytes[0], i), one_hot(bytes[1], i));
            load(tile.next(segment, CONSUMER_WARPS), segment.row_of_band(n));
            const uint32_t offset = matrix_row(lane, tile, lane / 8);
            UNROLL for (int plane = 0; plane < SIDE; ++plane)
                UNROLL for (int i = 0; i < SIDE; ++i) {
                    if (plane % 2 == 0 && i % 2 == 0) __syncwarp();
                    const uint32_t row = (i < 2 ? band : next_band) + i % 2 * ROW_BYTES + offset + plane * PLANE_BYTES;
                    const uint4 v = ldmatrix_m8n8_x4_trans(row);
                    const uint32_t columns[SIDE] = {v.x, v.y, v.z, v.w};
                    UNROLL for (int dh = 0; dh < 4; ++dh) {
                        const int r = plane - dh / 2, s = i - dh % 2;
                        if (r < 0 || r > 2 || s < 0 || s > 2) continue;
                        UNROLL for (int k = 0; k < 3; ++k)
                            mma_pair(gradient[9 * r + 3 * s + k], hot[2 * dh], hot[2 * dh + 1], columns[k], columns[k + 1]);
                    }
                }
        });
    } while (shared.exponent_after(n, segment.bands()) == REJECTED);

    // The sum of the warps' gradients, in their order, where the pipeline was.
    float* const sums = reinterpret_cast<float*>(memory);
    UNROLL_1 for (int turn = 0; turn < CONSUMER_WARPS; ++turn) {
        bar_sync(2, CONSUMERS);
        if (turn == warp)
            UNROLL for (int i = 0; i < TAPS * 4; ++i) {
                float& sum = sums[i * WARP + lane];
                sum = turn ? sum + gradient[i / 4][i % 4] : gradient[i / 4][i % 4];
            }
    }
    bar_sync(2, CONSUMERS);
    const int exponent = shared.exponent_after(n, segment.bands());
    for (int i = threadIdx.x; i < WEIGHTS; i += CONSUMERS) {
        const int tap = i % TAPS, c = i / TAPS % IN_CHANNELS, o = i / TAPS / IN_CHANNELS;
        const float sum = sums[(tap * 4 + o / 8 * 2 + c % 2) * WARP + o % 8 * 4 + c / 2] * power_of_2(-exponent);
        gradients[blockIdx.x * WEIGHTS + i] = upstream.at(segment.sample, o) * sum;
    }
}

// The gradient of the input: one-hot argmax indices (16 pixels x 16 outputs) times weights (16 outputs x 8 channels).
// A warp has the pixels of 8 windows' columns in two planes and two rows, [plane][row]: even columns are rows 0 to 7 of the
// product, odd ones rows 8 to 15. All lie within reach of the windows at and before them in each direction. The product's inner
// index takes outputs as a lane has them: t, t + 4, t + 8, t + 12.
// PAIRED: two neighbours of a row are written at once. STRICT: weights are high + low, and sums begin at zero four times.
template <bool STRICT, bool PAIRED, int WARPS>
__global__ void __launch_bounds__(WARPS * WARP, 1)
    input_gradient(const Problem problem, const uint32_t* __restrict__ argmax, const Upstream upstream,
                   float* __restrict__ grad_x) {
    __shared__ uint2 weights[STRICT ? 2 : 1][TAPS][WARP];  // [high, low] as right operands
    __shared__ float warp_values[WARPS];
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int slab_pairs = ceil_div(problem.depth, 2), row_pairs = ceil_div(problem.height, 2);
    const int groups = ceil_div(problem.width, 16);
    const int64_t lines = problem.batch * slab_pairs, plane_floats = static_cast<int64_t>(problem.height) * problem.width;
    const int64_t channel_floats = problem.depth * plane_floats;
    const int row_words = problem.columns * 4, slab_words = problem.rows * row_words;  // a sample's are below 2^30
    // Weights times upstream gradients are below 2^14.
    const int weight_exponent = scale_exponent(largest_weight<WARPS>(problem.weight, warp_values, 1), 7);
    const uint32_t stored = shared_address(&weights[0][0][lane]);
    const bool channels[2] = {2 * t < IN_CHANNELS, 2 * t + 1 < IN_CHANNELS};
    uint2 b[TAPS];
    int exponent = 0;
    int64_t last_sample = -1;
    for (int64_t line = lines * blockIdx.x / gridDim.x; line < lines * (blockIdx.x + 1) / gridDim.x; ++line) {
        const int64_t sample = line / slab_pairs;
        const int slab = line % slab_pairs;
        if (sample != last_sample) {
            float largest = 0;
            for (int o = 0; o < OUT_CHANNELS; ++o) largest = fmaxf(largest, fabsf(finite_or_zero(upstream.at(sample, o))));
            exponent = scale_exponent(largest, 7);
            __syncthreads();  // the last sample's weights have been read
            for (int i = threadIdx.x; i < TAPS * WARP; i += WARPS * WARP) {
                const int c = i % WARP / 4, tap = i / WARP;
                const auto scaled = [&](int o) {
                    if (o >= OUT_CHANNELS || c >= IN_CHANNELS) return 0.0f;
                    const float w = problem.weight[(o * IN_CHANNELS + c) * TAPS + tap] * power_of_2(weight_exponent);
                    return upstream.at(sample, o) * power_of_2(exponent) * w;
                };
                const float w[4] = {scaled(i % 4), scaled(i % 4 + 4), scaled(i % 4 + 8), scaled(i % 4 + 12)};
                weights[0][tap][i % WARP] = make_uint2(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]));
                if (STRICT)
                    weights[STRICT][tap][i % WARP] =
                        make_uint2(fp16_pair(fp16_residual(w[0]), fp16_residual(w[1])),
                                   fp16_pair(fp16_residual(w[2]), fp16_residual(w[3])));
            }
            __syncthreads();
            if (!STRICT) UNROLL for (int tap = 0; tap < TAPS; ++tap) b[tap] = weights[0][tap][lane];
            last_sample = sample;
        }
        const float unscale = upstream.scale * power_of_2((-exponent - weight_exponent) / 2);
        const float other_unscale = power_of_2(-exponent - weight_exponent - (-exponent - weight_exponent) / 2);
        const uint32_t* const sample_words = argmax + sample * problem.slabs * slab_words;
        const bool slabs[2] = {slab < problem.slabs, slab > 0 && slab <= problem.slabs};  // this one, and the one before
        // The words of the windows that the pixels are in: [slab][row][column], this one and the one before.
        uint32_t words[8];
        const auto load = [&](int row, int column) {
            const int at = slab * slab_words + row * row_words + column * 4 + t;
            const bool rows[2] = {row < problem.rows, row > 0 && row <= problem.rows};
            const bool columns[2] = {column < problem.columns, column > 0 && column <= problem.columns};
            UNROLL for (int i = 0; i < 8; ++i) {
                const int d = i / 4, h = i / 2 % 2, w = i % 2;
                const bool exists = slabs[d] && rows[h] && columns[w];
                words[i] = exists ? sample_words[at - d * slab_words - h * row_words - w * 4] : 0;
            }
        };
        int row = threadIdx.x / WARP / groups, group = threadIdx.x / WARP % groups;
        if (row < row_pairs) load(row, group * 8 + g);
        UNROLL_1 while (row < row_pairs) {
            const int column = group * 8 + g;
            float* const corner = grad_x + (sample * IN_CHANNELS + 2 * t) * channel_floats +
                                  (2 * slab * plane_floats + 2 * row * static_cast<int64_t>(problem.width) + 2 * column);
            const bool in_row = 2 * column < problem.width, in_plane[2] = {in_row, in_row && 2 * row + 1 < problem.height};
            uint32_t here[8];
            UNROLL for (int i = 0; i < 8; ++i) here[i] = words[i];
            for (group += WARPS; group >= groups; group -= groups) ++row;
            if (row < row_pairs) load(row, group * 8 + g);  // for the next turn
            float sums[4][4] = {}, part[4][4] = {};  // [d, h][column of the left pixel in two channels, then of the right one]
            UNROLL for (int dh = 0; dh < 4; ++dh) {  // windows at and before the pixels, along depth and height
                uint2 bytes[2];  // of outputs t and t + 4, t + 8 and t + 12, for this window and the one before
                UNROLL for (int before = 0; before < 2; ++before) {
                    const uint32_t word = here[2 * dh + before];
                    bytes[before] = make_uint2(__byte_perm(word, 0, 0x4140), __byte_perm(word, 0, 0x4342));
                }
                UNROLL for (int position = 0; position < 4; ++position) {
                    uint2 hot[2][2];  // [this window or the one before][w]
                    UNROLL for (int i = 0; i < 4; ++i)
                        hot[i / 2][i % 2] = make_uint2(one_hot(bytes[i / 2].x, 2 * position + i % 2),
                                                       one_hot(bytes[i / 2].y, 2 * position + i % 2));
                    UNROLL for (int k = 0; k < 3; ++k)
                        UNROLL for (int zy = 0; zy < 4; ++zy) {
                            const int r = dh / 2 * 2 + zy / 2 - position / 2, s = dh % 2 * 2 + zy % 2 - position % 2;
                            if (r < 0 || r > 2 || s < 0 || s > 2) continue;
                            const int tap = 9 * r + 3 * s + k;
                            const uint2 even = hot[(k + 1) / 2][k % 2], odd = hot[k / 2][1 - k % 2];
                            const uint2 a = {even.x, odd.x}, next_a = {even.y, odd.y};
                            const uint2 w = STRICT ? ld_shared_v2_u32(stored + tap * TAP_BYTES) : b[tap];
                            mma_pair(STRICT ? part[zy] : sums[zy], a, next_a, w.x, w.y);
                            if (!STRICT) continue;
                            const uint2 low = ld_shared_v2_u32(stored + WEIGHT_BYTES + tap * TAP_BYTES);
                            mma_pair(part[zy], a, next_a, low.x, low.y);
                        }
                }
                UNROLL for (int i = 0; i < 16 && STRICT; ++i)
                    sums[i / 4][i % 4] += part[i / 4][i % 4], part[i / 4][i % 4] = 0;
            }
            UNROLL for (int i = 0; i < 8; ++i) {
                const int d = i / 4, h = i / 2 % 2, c = i % 2;
                if (!(in_plane[h] && channels[c] && 2 * slab + d < problem.depth)) continue;
                float* const to = corner + c * channel_floats + d * plane_floats + h * problem.width;
                const float left = sums[i / 2][c] * other_unscale * unscale;
                const float right = sums[i / 2][2 + c] * other_unscale * unscale;
                if (PAIRED) __stcs(reinterpret_cast<float2*>(to), make_float2(left, right));
                else to[0] = left;
                if (!PAIRED && 2 * column + 1 < problem.width) to[1] = right;
            }
        }
    }
}

// grad_weight = scale * the sum of the parts' gradients. A thread adds every SUM_ROWS-th part of a weight.
constexpr int SUM_COLUMNS = 32, SUM_ROWS = 8;
__global__ void __launch_bounds__(SUM_COLUMNS * SUM_ROWS)
    add_gradients(const float* __restrict__ gradients, int64_t parts, float scale, float* __restrict__ grad_weight) {
    __shared__ float row_sums[SUM_ROWS][SUM_COLUMNS];
    const int row = threadIdx.x / SUM_COLUMNS, column = threadIdx.x % SUM_COLUMNS;
    const int64_t k = blockIdx.x * static_cast<int64_t>(SUM_COLUMNS) + column;
    float sum = 0;
    if (k < WEIGHTS)
        _Pragma("unroll 8") for (int64_t part = row; part < parts; part += SUM_ROWS) sum += gradients[part * WEIGHTS + k];
    row_sums[row][column] = sum;
    __syncthreads();
    if (row > 0 || k >= WEIGHTS) return;
    for (int other = 1; other < SUM_ROWS; ++other) sum += row_sums[other][column];
    grad_weight[k] = scale * sum;
}

// The gradient of the weights in fp32 (strict), gradients (splits, WEIGHTS): a warp for a plane of the kernel, in a channel and
// an output, and for every splits-th sample.
constexpr int GROUPS = WEIGHTS / PLANE_TAPS;
__global__ void __launch_bounds__(WARP)
    weight_gradient_fp32(const Problem p, const uint8_t* __restrict__ argmax, const Upstream upstream,
                         float* __restrict__ gradients) {
    const int64_t splits = p.gradients, group = blockIdx.x / splits, windows = p.windows();
    const int r = group % 3, c = group / 3 % IN_CHANNELS, o = group / 3 / IN_CHANNELS, lane = threadIdx.x;
    float sums[PLANE_TAPS] = {};
    for (int64_t sample = blockIdx.x % splits; sample < p.batch; sample += splits)
        for (int64_t window = lane; window < windows; window += WARP) {
            const int position = __ffs(argmax[(sample * windows + window) * OUTPUTS + o % 4 * 4 + o / 4]) - 1;
            const int z = window / p.columns / p.rows * 2 + position / 4 + r;
            const int y = window / p.columns % p.rows * 2 + position / 2 % 2, x = window % p.columns * 2 + position % 2;
            const Element* const from = p.x + (((sample * IN_CHANNELS + c) * p.depth + z) * p.height + y) * p.width + x;
            UNROLL for (int k = 0; k < PLANE_TAPS; ++k)
                sums[k] += upstream.at(sample, o) * from[static_cast<int64_t>(k / 3) * p.width + k % 3];
        }
    UNROLL for (int k = 0; k < PLANE_TAPS; ++k) {
        const float sum = warp_sum(sums[k]);
        if (lane == 0) gradients[blockIdx.x % splits * WEIGHTS + group * PLANE_TAPS + k] = sum;
    }
}

// ---- launches
// The problem, cut into parts for that device.
static Problem planned(int64_t batch, int depth, int height, int width, bool strict, int device) {
    Problem p = {batch, depth, height, width, (depth - 2) / 2, (height - 2) / 2, (width - 2) / 2, strict};
    int limit = 0, sm_count = 0;
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    if (SHARED_LIMIT_KB > 0) limit = smaller(limit, SHARED_LIMIT_KB * 1024);
    p.parts = 1;
    do {  // as many slabs a segment as shared memory takes, in equal parts
        p.part_slabs = ceil_div(p.slabs, p.parts), p.slab_parts = ceil_div(p.slabs, p.part_slabs);
        p.band_bytes = (p.strict ? 2 : 1) * (2 * p.part_slabs + 2) * PLANE_BYTES;
        p.dynamic_bytes = STAGES * p.band_bytes + (p.strict ? 2 * WEIGHT_BYTES : 0);
    } while (p.dynamic_bytes + static_cast<int>(sizeof(Shared)) > limit && p.parts++ < p.slabs);
    p.part_columns = p.columns < COLUMNS / 2 ? p.columns : COLUMNS / 2 - 2;  // even: parts begin 16-byte aligned
    p.column_parts = ceil_div(p.columns, p.part_columns);
    const int64_t images = p.batch * p.slab_parts * p.column_parts, most_parts = 6 + 2 * sm_count / images;
    int64_t least = INT64_MAX;
    for (int parts = 1; parts <= most_parts && parts <= p.rows; ++parts) {
        const int rows = ceil_div(p.rows, parts), row_parts = ceil_div(p.rows, rows);
        const int64_t waves = (images * row_parts + sm_count - 1) / sm_count;
        if (waves * (rows + 2) >= least) continue;  // what a block does before its first row takes as long as two rows
        least = waves * (rows + 2), p.part_rows = rows, p.row_parts = row_parts;
    }
    p.parts = p.slab_parts * p.column_parts * p.row_parts;
    const int64_t splits = ceil_div(8000, GROUPS);  // for 8000 warps
    p.gradients = strict ? (splits < batch ? splits : batch) : batch * p.parts;
    return p;
}

extern "C" int64_t count_blocks(int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t strict, int64_t device) {
    return batch * planned(batch, depth, height, width, strict, device).parts;
}

extern "C" int64_t count_gradients(int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t strict,
                                   int64_t device) {
    return planned(batch, depth, height, width, strict, device).gradients;
}

// argmax (batch, slabs, rows, columns, OUTPUTS bytes) may be null. scratch: OUTPUTS floats a block.
extern "C" int launch_conv_max_mean(const Element* x, const Element* weight, const Element* conv_bias, const Element* bias,
                                    float* scratch, float* out, uint32_t* argmax, double divisor, int64_t biases,
                                    int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t strict,
                                    int64_t device, cudaStream_t stream) {
    Problem p = planned(batch, depth, height, width, strict, device);
    p.x = x, p.weight = weight, p.conv_bias = conv_bias, p.bias = bias, p.out = out, p.divisor = divisor, p.biases = biases;
    const auto kernel = strict ? (argmax ? conv_max_mean<true, true> : conv_max_mean<true, false>)
                               : (argmax ? conv_max_mean<false, true> : conv_max_mean<false, false>);
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.dynamic_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<batch * p.parts, THREADS, p.dynamic_bytes, stream>>>(p, p.parts > 1 ? scratch : nullptr, argmax);
    if (p.parts > 1) finish_samples<<<batch, WARP, 0, stream>>>(scratch, p);
    return cudaGetLastError();
}

// grad (batch,), or with `by_channel` (batch, OUT_CHANNELS), of the averages. scratch: WEIGHTS floats each of count_gradients.
extern "C" int launch_weight_gradient(const Element* x, const uint32_t* argmax, const float* grad, float* scratch,
                                      float* grad_weight, double divisor, int64_t by_channel, int64_t batch, int64_t depth,
                                      int64_t height, int64_t width, int64_t strict, int64_t device, cudaStream_t stream) {
    Problem p = planned(batch, depth, height, width, strict, device);
    p.x = x;
    const Upstream upstream = {grad, !by_channel, static_cast<float>(1 / (p.windows() * divisor))};
    if (strict) {
        const auto bytes = reinterpret_cast<const uint8_t*>(argmax);
        weight_gradient_fp32<<<GROUPS * p.gradients, WARP, 0, stream>>>(p, bytes, upstream, scratch);
    } else {
        constexpr auto LIMIT = cudaFuncAttributeMaxDynamicSharedMemorySize;
        const cudaError_t error = cudaFuncSetAttribute(weight_gradient, LIMIT, p.dynamic_bytes);
        if (error != cudaSuccess) return error;
        weight_gradient<<<p.gradients, THREADS, p.dynamic_bytes, stream>>>(p, argmax, upstream, scratch);
    }
    add_gradients<<<ceil_div(WEIGHTS, SUM_COLUMNS), SUM_COLUMNS * SUM_ROWS, 0, stream>>>(scratch, p.gradients, upstream.scale,
                                                                                        grad_weight);
    return cudaGetLastError();
}

extern "C" int launch_input_gradient(const Element* weight, const uint32_t* argmax, const float* grad, Element* grad_x,
                                     double divisor, int64_t by_channel, int64_t batch, int64_t depth, int64_t height,
                                     int64_t width, int64_t strict, int64_t device, cudaStream_t stream) {
    int sm_count = 0;
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    Problem p = planned(batch, depth, height, width, strict, device);
    p.weight = weight;
    const Upstream upstream = {grad, !by_channel, static_cast<float>(1 / (p.windows() * divisor))};
    const int64_t lines = batch * ceil_div(depth, 2);
    const bool paired = width % 2 == 0 && reinterpret_cast<uintptr_t>(grad_x) % 8 == 0;
    const auto kernel = strict ? (paired ? input_gradient<true, true, 8> : input_gradient<true, false, 8>)
                               : (paired ? input_gradient<false, true, 12> : input_gradient<false, false, 12>);
    kernel<<<lines < sm_count ? lines : sm_count, (strict ? 8 : 12) * WARP, 0, stream>>>(p, argmax, upstream, grad_x);
    return cudaGetLastError();
}
#endif  // SERVED
"""


# ---- The same text in all files, down to the next such line; python -m playground.command.shared_text writes it.
BUILDING = threading.Lock()  # the first calls of a model's replicas may come from several threads at once


@functools.cache
def kernels(*flags, name=NAME, text=CUDA, **macros):  # name and text of this file, whatever a notebook's next one calls so
    """Compile the text with these flags and macros, once a machine, and return the library."""
    flags = ["-O3", "-lineinfo", *flags, *(f"-D{key}={value}" for key, value in macros.items())]
    name = "_".join(map(str, [name, *macros.values()]))
    options = {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}  # before, torch's headers come along
    with BUILDING:
        return ctypes.CDLL(load_inline(name, "", text, extra_cuda_cflags=flags, is_python_module=False, **options))


def launch(function, *arguments):
    """Call a C function: tensors as pointers, None as null, ints as int64_t, floats; then the stream of the first's device."""
    if not function.argtypes:
        function.argtypes = [ctypes.c_double if isinstance(each, float) else ctypes.c_int64 for each in (*arguments, 0)]
    values = [each.data_ptr() if isinstance(each, torch.Tensor) else each or 0 for each in arguments]
    with torch.cuda.device(index := arguments[0].get_device()):  # -1: the CPU, under the emulator
        stream = torch.cuda.current_stream(index).cuda_stream if index >= 0 else 0
        if code := function(*values, stream):
            raise RuntimeError(f"{function.__name__}: CUDA error {code}")


def check(name, tensor, shape, device, dtype=torch.float32):
    """Raise RuntimeError unless a tensor is of this type and shape, on this device."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        found = f"{tensor.dtype} of shape {[*tensor.shape]} on {tensor.device}"
        raise RuntimeError(f"expected {name} as {dtype} of shape {[*shape]} on {device}; got {found}")


# ---- What is this file's own.
SCHEMA = "(Tensor x, Tensor weight, Tensor conv_bias, Tensor bias, float divisor, int[3] pool, int needs) -> (Tensor, Tensor)"
INPUTS = "Tensor grad, Tensor x, Tensor weight, Tensor conv_bias, Tensor bias, float divisor, int[3] pool"
GRADIENT = f"({INPUTS}, Tensor argmax, int needs) -> (Tensor, Tensor, Tensor, Tensor)"
capability = functools.cache(torch.cuda.get_device_capability)


def is_direct(*operands):
    """Return whether only autograd looks on: nothing traces, casts or transforms; and data are on the first one's device."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(DEVICE) or torch.overrides.has_torch_function(operands):
        return False
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    try:
        return tensors[0].device.type == DEVICE and all(each.data_ptr() or not each.numel() for each in tensors)
    except RuntimeError:  # torch.func's tensors have no data
        return False


def is_strict():
    """Return whether PyTorch's settings forbid TF32 in convolutions."""
    conv = getattr(torch.backends.cudnn, "conv", None)  # from PyTorch 2.9 on
    return conv.fp32_precision != "tf32" if conv else not torch.backends.cudnn.allow_tf32


def count(function, *numbers):
    """Call a C function of int64_t that returns one."""
    if not function.argtypes:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(numbers)
    return function(*numbers)


def library_for(weight, pool, kernels=kernels):
    """Return the library for these sizes, which may be torch.compile's symbols."""
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_D", "KERNEL_H", "KERNEL_W", "POOL_D", "POOL_H", "POOL_W"
    return kernels(**dict(zip(names, map(int, (*weight.shape, *pool)), strict=True)), SHARED_LIMIT_KB=SHARED_LIMIT_KB)


def original(x, weight, conv_bias, bias, divisor, pool):
    y = nn.functional.max_pool3d(nn.functional.conv3d(x, weight, conv_bias) / divisor, pool)
    averages = y.mean(dim=(2, 3, 4), keepdim=True)
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


def saved(x, weight, conv_bias, bias, divisor, pool, needs, library_for=library_for):
    """Return room for the output and the argmax indices, which are empty where no gradient is wanted, or by PyTorch."""
    windows, served = [(size - 2) // 2 for size in x.shape[2:]], needs and library_for(weight, pool).is_served()
    argmax = x.new_empty((x.shape[0], *windows, 16) if served else 0, dtype=torch.uint8)
    return x.new_empty((x.shape[0], *([] if bias.numel() else weight.shape[:1]), 1, 1, 1)), argmax


def conv_max_mean(x, weight, conv_bias, bias, divisor, pool, needs, library_for=library_for, saved=saved, original=original):
    """Return the output and what the gradients of x (needs & 1) and of the parameters (needs & 2) take: see `saved`."""
    (batch, *_, depth, height, width), (out_channels, in_channels, *kernel) = x.shape, weight.shape
    check("x", x, (batch, in_channels, depth, height, width), x.device)
    check("weight", weight, (out_channels, in_channels, *kernel[-3:]), x.device)
    check("conv_bias", conv_bias, (out_channels,), x.device)
    check("bias", bias, bias.shape if bias.numel() in (0, 1, out_channels) else (out_channels,), x.device)
    if min(pool) < 1 or any(size < k + p - 1 for size, k, p in zip((depth, height, width), kernel, pool, strict=True)):
        fits = f"room for a window of {[*pool]} behind a kernel of {kernel}"
        raise RuntimeError(f"expected {fits}; got a volume of {[depth, height, width]}")
    if depth * height * width >= 2**31:
        raise RuntimeError(f"expected fewer than 2^31 pixels a channel; got x of shape {[*x.shape]}")
    if x.is_cuda and capability(x.device) < (8, 0):
        raise RuntimeError("expected a GPU of compute capability 8.0 or later; v3_single_kernel runs on others")
    library, (out, argmax) = library_for(weight, pool), saved(x, weight, conv_bias, bias, divisor, pool, needs)
    if not library.is_served():
        limits = "at most 8 channels in and 16 out, a kernel of 3 x 3 x 3 and windows of 2 x 2 x 2"
        warnings.warn(f"PyTorch computes what these kernels do not take: {limits}", stacklevel=2)
        return original(x, weight, conv_bias, bias, divisor, pool), argmax
    x, weight, conv_bias, bias = x.contiguous(), weight.contiguous(), conv_bias.contiguous(), bias.contiguous()
    if batch:
        numbers = batch, depth, height, width, is_strict(), x.device.index or 0
        blocks = count(library.count_blocks, *numbers)
        if blocks >= 2**31:
            raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got one of {blocks}")
        given = x, weight, conv_bias, bias, x.new_empty(16 * blocks), out, argmax if needs else None
        launch(library.launch_conv_max_mean, *given, float(divisor), bias.numel(), *numbers)
    return out, argmax


operator = torch.library.custom_op(f"{NAME}::forward", conv_max_mean, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(saved)


def gradient(grad, x, weight, conv_bias, bias, divisor, pool, argmax, needs, library_for=library_for):
    """Return the gradients of x (needs & 1) and of the parameters (needs & 2); empty tensors where they are not needed."""
    library, numbers = library_for(weight, pool), (len(x), *x.shape[2:], is_strict(), x.device.index or 0)
    grad, x, weight, rest = grad.contiguous(), x.contiguous(), weight.contiguous(), (not bias.numel(), *numbers)
    found = [each.new_empty(each.shape if needs & bit else 0) for each, bit in ((x, 1), (weight, 2), (conv_bias, 2), (bias, 2))]
    if found[0].numel():
        launch(library.launch_input_gradient, weight, argmax, grad, found[0], float(divisor), *rest)
    if needs & 2:
        scratch = x.new_empty(count(library.count_gradients, *numbers) * weight.numel())
        launch(library.launch_weight_gradient, x, argmax, grad, scratch, found[1], float(divisor), *rest)
        of_averages = grad.sum(0).reshape(-1).expand(len(weight))
        found[2] = of_averages / divisor
        if bias.numel():
            found[3] = of_averages.reshape(-1, bias.numel()).sum(0).view(bias.shape)
    return tuple(found)


def gradients(grad, x, weight, conv_bias, bias, divisor, pool, argmax, needs):
    found = (x, 1), (weight, 2), (conv_bias, 2), (bias, 2)
    return tuple(each.new_empty(each.shape if needs & bit else 0) for each, bit in found)


of_gradients = torch.library.custom_op(f"{NAME}::gradient", gradient, mutates_args=(), device_types=DEVICE, schema=GRADIENT)
of_gradients.register_fake(gradients)


def backward(ctx, grad, *_, original=original, gradient=gradient):
    """The gradient; PyTorch's, which takes several times 441 MB, where kernels do not serve, and that of a gradient."""
    *tensors, argmax = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:4]
    needs = wanted[0] + 2 * any(wanted[1:])
    if torch.is_grad_enabled() or needs & ~ctx.needs or not len(argmax):
        found = torch.func.vjp(lambda *tensors: original(*tensors, ctx.divisor, ctx.pool), *tensors)[1](grad)
        return *found, None, None, None
    function = gradient if is_direct(grad, *tensors) else torch.ops.conv3d_div_max_gap_bias_sum_training_tensor_core.gradient
    found = function(grad, *tensors, ctx.divisor, ctx.pool, argmax, needs)
    return *[each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)], None, None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.divisor, ctx.pool, ctx.needs = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


operator.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    operator.register_autocast(DEVICE, torch.float32)


class Direct(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which takes longer than all else on the host."""

    backward = staticmethod(backward)

    @staticmethod
    def forward(ctx, *operands, function=conv_max_mean, setup_context=setup_context):
        output = function(*operands)
        setup_context(ctx, operands, output)
        return output


def call(x, *operands, direct=Direct):
    needs = x.requires_grad + 2 * any(each.requires_grad for each in operands[:3]) if torch.is_grad_enabled() else 0
    function = direct.apply if is_direct(x, *operands) else torch.ops.conv3d_div_max_gap_bias_sum_training_tensor_core.forward
    return function(x, *operands, needs)[0]


class ModelNew(nn.Module):
    operator = staticmethod(call)

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        limits = torch.finfo(torch.float32)
        if not isinstance(divisor, (int, float)) or not limits.tiny <= abs(divisor) <= limits.max:  # NaN fails it, too
            wanted = f"a number whose size is a normal float32, {limits.tiny} to {limits.max}"
            raise ValueError(f"divisor: expected {wanted}, got {divisor!r}; by others, max(conv) / d is not max(conv / d)")
        self.pool_size = (pool_size,) * 3 if isinstance(pool_size, int) else tuple(pool_size)
        if len(self.pool_size) != 3 or min(self.pool_size) < 1:
            raise ValueError(f"pool_size: expected a positive int or three of them, got {pool_size!r}")
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor, self.sum_dim = divisor, sum_dim
        self.bias = nn.Parameter(torch.randn(bias_shape))
        one_each_channel = (1,) * (5 - self.bias.dim()) + self.bias.shape in ((1, 1, 1, 1, 1), (1, out_channels, 1, 1, 1))
        self.sums_channels = one_each_channel and sum_dim in (1, -4, (1,), (-4,), [1], [-4])  # else the kernel gives averages

    def forward(self, x):
        bias = self.bias if self.sums_channels else self.bias.new_empty(0)
        out = self.operator(x, self.conv.weight, self.conv.bias, bias, self.divisor, self.pool_size)
        return out if self.sums_channels else torch.sum(out + self.bias, dim=self.sum_dim)


@torch.no_grad()
def main():
    emulated, (arguments, shape, small, limit) = hasattr(load_inline, "emulates_cuda"), EXAMPLE
    torch.manual_seed(0)
    ours = ModelNew(*arguments).to(DEVICE)
    theirs, x = copy.deepcopy(ours), torch.randn(small if emulated else shape, device=DEVICE)
    theirs.operator = original  # the same module, by PyTorch
    exact = torch.cat([theirs.double()(part.double()) for part in x.split(16)])
    error, calls = ((ours(x) - exact).abs().max() / exact.std()).item(), () if emulated else (ours, theirs.float())
    times = [f"{1e3 * Timer('f(x)', globals={'f': f, 'x': x}).timeit(20).mean:.3f} ms" for f in calls]
    right, took = "right" if error <= limit else "wrong", ", PyTorch ".join(times) or "emulated"
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:g}: {right}; {took}")


if __name__ == "__main__":
    main()
