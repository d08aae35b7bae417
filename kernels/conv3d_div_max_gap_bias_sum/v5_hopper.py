"""conv3d_div_max_gap_bias_sum, v5: four warps turn the copy engine's stages into halves, eight multiply two taps at a time.

In this text v4 is the first v4, with TF32 operands (see the ladder). The products take halves here, which the tensor core
multiplies at twice the rate of TF32, and nothing is converted twice: x comes by the copy engine (TMA), is made into scaled
halves once, and is read as operands by ldmatrix.

Why it is faster
    v4 multiplies at TF32's rate, and its warps load and round each value again in every tile that it belongs to. A half has
    TF32's 11 bits, if not its range, and mma.sync multiplies 622 TFLOP/s of them against 311. So warps of their own scale and
    pack each value once, a column's 8 channels side by side; then 8 windows' columns are a matrix for ldmatrix, a product takes
    two taps, and 32 matrices feed 112 products. Taps 0 and 2 of a row are a pair: the registers that they meet are neighbours
    for even and for odd positions, and need not be moved. What it costs: a scale that follows the data, and compute capability
    9.0; other widths and kernels take v4's or v3's kernels. wgmma was counted, too: it reads the weights from shared memory
    again for every 64 positions, and that would bind as early as mma.sync's rate does.

    design, H200, ms                            predicted  measured  v4     why
    forward                                     0.093      0.129     0.345  108 products of 16 x 8 x 16 for 8 windows: 0.082
    forward, strict: three products             0.27       0.396     0.865  324: 0.245
    weights' gradient from places, by itself    0.10       0.136            108: 0.082; places are 14 MB
    forward with the weights' gradient          0.20       0.292     0.745
    input's gradient                            0.14       0.167     0.368  instructions 0.10; products 0.093; writes 0.065
    training step, weights                      0.20       0.292     0.749
    training step, weights and input            0.34       0.457     1.12
    Kernels by PyTorch's profiler, L2 flushed, and with the figures of Nsight Compute from before the converters began early;
    forward and steps by the project's stopwatch, the strict one and steps in a CUDA graph.

    Why it is not what was predicted, by Nsight Compute: in the forward pass a computing warp spends 80% of its time among the
    products, yet their pipe is busy for 59%. A warp issues one only every 8 or 9 cycles, so it takes two warps to fill a
    scheduler's pipe, and two are all that registers allow (54 of a thread's 200 are weights); when one finds maxima or waits
    for the slowest (8%), the other cannot make up for it. What was tried, ms: maxima as a tournament with max.NaN, and pointers
    to places made once for all slabs, where there had been chains of comparisons and 64-bit products, 0.151 to 0.137 (0.173 to
    0.158 with places); places asked for one unit ahead, 0.141 to 0.136; in the input's gradient, places one turn ahead and
    one-hot halves by a comparison instead of a mask and a product, 0.228 to 0.167; strict: small sums added once a slab, 0.439
    to 0.421, the ninth tap's two small products as one, 0.417, and all multiprocessors instead of as many as samples, for
    samples are cut anyway, 0.410; of each pair of taps positions 0 to 3 before 4 to 7, whose plane is still on its way, 0.398
    to 0.405 on another H200, dropped. Converters that begin while the weights are prepared, and computing warps that meet once
    a segment instead of three times: 0.137 to 0.134 and, strict, 0.411 to 0.401 in one run. finish_samples put in place early
    (programmatic dependent launch): no difference, dropped. A ring of four bands and two stages instead of three and three: no
    difference, but 0.139 to 0.136 in the weights' gradient. Two slabs unrolled, so that no registers are moved between them:
    0.138 to 0.140.

    Counted for a sample of the original's size, the work of one multiprocessor, in thousands of cycles at 1.755 GHz:
                                        forward  strict  weights' gradient
    tensor cores, at 622 TFLOP/s        143      429     143
    shared memory, 128 bytes in each    77       260     97
    instructions of each scheduler      75       290     85
    device memory, at 4.35 TB/s         108      122     114
    Shared memory in the forward pass: 16 copied in, 16 read and 8 written where it is converted, 36 read as matrices.
    Instructions: 216 for 8 windows' products and maxima (328 with their places), 126 for 1024 values converted.

Mathematics
    v3's. A segment, a block's part of a sample, is scaled by a power of two. It is taken from the segment's first stage, whose
    largest magnitude it brings to between 2^10 and 2^11. If a later value is too large for a half then, the segment is
    attempted again, with the power that brings the largest to between 2^14 and 2^15. So x is off by at most 2^-11 of itself, as
    in TF32, or by 2^-35 of the segment's largest value, whichever is more. The latter is more for values below 2^-24 of the
    largest, and fp32 loses those, too, wherever it adds both. Weights are scaled by their largest, with 2^-38 in place of
    2^-35. Scales leave the sums as powers of two. Scaled products add up to less than 2^38, so fp32 holds them. NaN and
    infinities stay what they are as halves, and count in no scale. The project's judge accepts it as TF32, on all its probes.

    Strict: x and weights are two halves each, high and low, which leaves 2^-22 of a number, or 2^-35 and 2^-38 of the largest.
    The product is low * high + high * low, and high * high, each plane summed from zero, for the tensor core truncates.
    All positions of a window add in the same order, so equal inputs give equal bits, and ties go to the first as in PyTorch.

    The gradient of the weights is v4's product, of the one-hot places of the maxima and x, but in a pass of its own: its sums
    and the forward pass's weights are more than a thread's registers. Places are 16 bytes a window, a bit in each. The input's
    gradient takes halves, too: one-hot places times (upstream * weight), 16 outputs a product. Strict gradients are v3's
    kernels' work. A NaN in x makes gradients of weights NaN. Which of them need not be PyTorch's choice: with TF32 also taps
    that meet it beyond a row's end, strictly none that meet it as zero times NaN only.

Where to read
    The forward pass is stream_max_mean: four warps run convert_segments, eight run for_units with convolve_halves and
    find_peaks; StreamMemory says what lies where. The gradients are stream_weight_gradient, which in training runs right behind
    the forward pass, and input_gradient. copy_band, convolve and conv_max_mean are v4's; `namespace general` holds v3's
    kernels.

Launches
    kernel                  grid                             block  shared  work of a warp
    stream_max_mean         multiprocessors, or samples      384    207 KB  8 windows x 16 outputs at a time, or 1024 values
    stream_weight_gradient  multiprocessors, or samples      384    207 KB  8 windows x 16 outputs x 216 weights, or 1024 values
    finish_samples          (samples)                        32     0       adds a sample's segments, where blocks share samples
    add_segments            (samples x weights / 128)        128    0       the same for gradients
    weighted_sum            (weights / 32)                   256    1 KB    the batch's gradient of 32 weights
    input_gradient          multiprocessors                  384    7 KB    2 x 2 x 16 pixels x 8 channels at a time
    for other widths and kernels: v4's conv_max_mean; for other shapes and strict gradients: v3's

    A stage is 2 rows of 8 planes, 32 KB; two are under way or being converted. Halves go to a ring of four bands of 2 rows and
    all planes. A warp has 8 windows in half of the slabs of a row; which half is the larger changes from row to row. The shared
    memory is that of the original's size. Strict takes 215 KB and a sample as two images of 4 and 3 slabs, for its bands are
    twice as large.

Floor
    Forward: 269 MB in, 0.062 ms on an H200; 47.6 GFLOP at the 767 TFLOP/s that halves reach in large products, 0.062 as well.
    mma.sync's 622 make it 0.077. Each gradient is as large a product again; the input's also writes 269 MB.

Takes
    float32 CUDA tensors (batch, in_channels, depth, height, width) on a GPU of compute capability 9.0, batch 0 included, a
    channel below 2^31 pixels; any channels, kernel, bias shape and sum_dim that the original takes; pool_size an int or three;
    a divisor whose size is a normal float32. The streaming kernels are for up to 8 channels in and 16 out, a kernel of 3 x 3 x
    3, windows of 2 x 2 x 2, a width that is a multiple of 4, and x at a multiple of 16 bytes. For kernels up to 3 and any width
    v4's kernels are in this file; for everything else, and strict gradients, v3's. Gradients of the weights take batch x
    weights floats, and 16 bytes a window while they are computed. Anything else raises before a launch. Trains, and computes
    only the gradients that are asked for; second and forward-mode derivatives raise. What torch.compile compiled for training
    raises once PyTorch's setting of the precision is another. Deterministic on a GPU; another number of multiprocessors adds in
    another order.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv3d_div_max_gap_bias_sum_v5_hopper"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W. What the tensor-core kernels are made
// for, v4's and among them those of this variant; all else goes through the general kernels at the end.
#define FITS_TENSOR_CORES                                                                                                      \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D <= 3 && KERNEL_H <= 3 && KERNEL_W <= 3 && POOL_D == 2 &&               \
     POOL_H == 2 && POOL_W == 2)
#define FITS_COPY_ENGINE (FITS_TENSOR_CORES && KERNEL_D == 3 && KERNEL_H == 3 && KERNEL_W == 3)

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <type_traits>

#if FITS_TENSOR_CORES

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// ---- geometry
// Whole rows of x pass by, two at a time: a band has two rows of all planes and channels of an image. A step computes one row
// of windows of all slabs from ROWS rows of x, which are in two bands. A step's tiles are 8 windows side by side, in one slab:
// 2 x 2 x 16 positions, in 16 output channels.
constexpr int WARP = 32, TAPS = KERNEL_D * KERNEL_H * KERNEL_W, WEIGHTS = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int CHANNELS = 8, OUTPUTS = 16, TILE_WINDOWS = 8;  // of the tensor core's tiles; what does not exist is zero
constexpr int PLANES = KERNEL_D + 1, ROWS = KERNEL_H + 1, SHIFTS = KERNEL_W + 1;  // of x that a window reads
constexpr int BANDS = KERNEL_H > 1 ? 2 : 1;                                      // that a step reads
constexpr int WARPS = 8, THREADS = WARP * WARPS;

// ---- shared memory: a ring of bands, weights, and sums
constexpr int RING = 3, COLUMNS = 64, ROW_BYTES = COLUMNS * 4, PLANE_BYTES = CHANNELS * ROW_BYTES;
constexpr int WEIGHT_BYTES = TAPS * WARP * 16;                              // as left operands; as many for the gradients
constexpr int REST_BYTES = WARPS * OUTPUTS * 4 + 2 * RING * 8 + 128;        // warps' sums, barriers, a segment
constexpr int WHOLE_WINDOWS = (COLUMNS - KERNEL_W + 1) / 2;                 // that fit into COLUMNS
constexpr int PART_WINDOWS = WHOLE_WINDOWS / 2 * 2;                         // parts of longer rows begin 16-byte aligned

// 16-byte pieces of a row are rotated by the channel, so that all ways to read them hit all banks.
__device__ __forceinline__ int swizzle(int channel) { return (channel & 1) << 2 | (channel & 2); }

// ---- instructions
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const float* from, int bytes) {  // the rest becomes zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_4_bytes(uint32_t to, const float* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ float4 load4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
__device__ __forceinline__ float2 load2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}
// d (16 x 8) += a (16 x 8) * b (8 x 8). With g = lane / 4 and t = lane % 4: a has rows g and g + 8 of column t, then of column
// t + 4; b has rows t and t + 4 of column g; d has columns 2t and 2t + 1 of row g, then of row g + 8.
__device__ __forceinline__ void multiply(float (&d)[4], float4 a, float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a.x)), "r"(__float_as_uint(a.y)), "r"(__float_as_uint(a.z)), "r"(__float_as_uint(a.w)),
                   "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// ---- the work, and who does it
// Where a sample's slabs or columns are too many for shared memory, it is cut into images. All rows of windows of all images
// stand in one line; a block takes an equal part of it. A segment is the part of one image in one block.
struct Shape {
    int64_t batch;
    int depth, height, width, slabs, rows, columns;  // of x, and of its windows
    int slab_parts, image_slabs, column_parts, image_columns, blocks;

    __host__ __device__ int64_t images() const { return batch * slab_parts * column_parts; }
    __host__ __device__ int64_t first_row(int64_t block) const { return images() * rows * block / blocks; }
    __host__ __device__ int image_planes() const { return 2 * image_slabs + KERNEL_D - 1; }
    // A segment's place among all: the image, where each has one segment.
    __host__ __device__ bool whole_images() const { return images() % blocks == 0; }
};

struct Segment {
    int64_t sample, slot;
    int first_slab, slabs, first_column, columns, first_row, rows;  // of windows

    // The part that begins at `line` of a block's line that ends at `end`.
    __device__ __forceinline__ void set(const Shape& s, int64_t line, int64_t end) {
        const int64_t image = line / s.rows;
        const int parts = s.slab_parts * s.column_parts, part = image % parts;
        sample = image / parts;
        slot = image + (s.whole_images() ? 0 : blockIdx.x);
        first_slab = part / s.column_parts * s.image_slabs, first_column = part % s.column_parts * s.image_columns;
        slabs = smaller(s.image_slabs, s.slabs - first_slab);
        columns = smaller(s.image_columns, s.columns - first_column);
        first_row = line - image * s.rows;
        rows = end - line < s.rows - first_row ? end - line : s.rows - first_row;
    }
    __device__ __forceinline__ int bands() const { return rows + BANDS - 1; }
};

// Bands are counted over all segments; band n is in place n % SIZE of the ring.
template <int SIZE>
struct RingOf {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    int band_bytes;

    __device__ __forceinline__ uint32_t address(unsigned n) const { return data + n % SIZE * band_bytes; }
    __device__ __forceinline__ uint32_t full(unsigned n) const { return barriers + n % SIZE * 8; }
    __device__ __forceinline__ uint32_t empty(unsigned n) const { return full(n) + SIZE * 8; }
    __device__ __forceinline__ void wait_full(unsigned n) const { wait(full(n), n / SIZE & 1); }
    __device__ __forceinline__ void wait_empty(unsigned n) const { wait(empty(n), n / SIZE & 1 ^ 1); }
    __device__ __forceinline__ void release(unsigned n) const { arrive(empty(n)); }  // each lane for itself
};
using Ring = RingOf<RING>;

// Asks for the warp's share of a band: every WARPS-th row of a plane.
__device__ __forceinline__ void copy_band(const float* __restrict__ x, const Shape& shape, const Segment& segment, int band,
                                          const Ring& ring, unsigned n, bool aligned) {
    const int lane = threadIdx.x % WARP, piece = lane % 16, planes = 2 * segment.slabs + KERNEL_D - 1;
    const int left = 2 * segment.first_column;
    const int64_t plane_floats = static_cast<int64_t>(shape.height) * shape.width;
    ring.wait_empty(n);
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < 2 * planes; i += WARPS) {
        const int plane = i / 2, row = 2 * (segment.first_row + band) + i % 2;
        const uint32_t to = ring.address(n) + (i % 2 * shape.image_planes() + plane) * PLANE_BYTES;
        const float* from = x + (segment.sample * IN_CHANNELS * shape.depth + 2 * segment.first_slab + plane) * plane_floats +
                            static_cast<int64_t>(row) * shape.width + left;
#pragma unroll
        for (int k = 0; k < CHANNELS / 2; ++k) {
            const int c = 2 * k + lane / 16;
            const uint32_t at = to + c * ROW_BYTES + ((piece ^ swizzle(c)) << 4);
            const float* source = from + c * shape.depth * plane_floats + 4 * piece;
            const int exist = c < IN_CHANNELS && row < shape.height ? shape.width - left - 4 * piece : 0;
            if (aligned) {
                copy_16_bytes(at, exist > 0 ? source : x, exist > 0 ? 16 : 0);
            } else {
#pragma unroll 1
                for (int w = 0; w < 4; ++w) copy_4_bytes(at + 4 * w, exist > w ? source + w : x, exist > w ? 4 : 0);
            }
        }
    }
    arrive_after_copies(ring.full(n));
}

// ---- a tile's convolution in registers
// Lane (g, t) has window g's columns of x, for channels t and t + 4: an operand for the even positions of the 8 windows, or for
// the odd ones, is the same registers for every tap that meets the same column.
struct Lane {
    int lane, g, t;
    __device__ __forceinline__ Lane() : lane(threadIdx.x % WARP), g(lane / 4), t(lane % 4) {}
};

struct Tile {
    uint32_t bands[BANDS];  // the slab's first plane in each
    int row_bytes;          // from the first row of a band to the second
    int first_window;       // in the image

    __device__ __forceinline__ uint32_t at(int plane, int row) const {
        return bands[row / 2] + row % 2 * row_bytes + plane * PLANE_BYTES;
    }
};

using Sums = float[2][2][2][4];  // [d][h][w of the window][element: window 2t, 2t + 1 of output g, then of g + 8]

// weight[o][c][tap] as left operands: [tap][lane]. Where `low` is not null, it gets what rounding leaves.
__device__ void store_weights(const float* __restrict__ weight, float sign, float* high, float* low) {
    for (int i = threadIdx.x; i < TAPS * WARP * 4; i += THREADS) {
        const int element = i % 4, lane = i / 4 % WARP, tap = i / (4 * WARP);
        const int o = lane / 4 + element % 2 * 8, c = lane % 4 + element / 2 * 4;
        const float w = o < OUT_CHANNELS && c < IN_CHANNELS ? sign * weight[(o * IN_CHANNELS + c) * TAPS + tap] : 0;
        high[i] = to_tf32(w);
        if (low) low[i] = to_tf32(w - high[i]);
    }
}

// The columns that a row's positions read: [column of the window][channel t or t + 4].
template <int COUNT>
__device__ __forceinline__ void load_columns(uint32_t row, const Tile& tile, const Lane& lane, float (&x)[COUNT][2]) {
    const int pair = tile.first_window + lane.g, next = (pair + 1) % (COLUMNS / 2);  // beyond the row: of no window
    const uint32_t here = (pair / 2 ^ swizzle(lane.t)) * 16 + pair % 2 * 8;
    const uint32_t there = (next / 2 ^ swizzle(lane.t)) * 16 + next % 2 * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t channel = row + (lane.t + 4 * half) * ROW_BYTES;
        const float2 v = load2(channel + here);
        x[0][half] = v.x, x[1][half] = v.y;
        if (COUNT > 2) {
            const float2 n = load2(channel + there);
            x[2 % COUNT][half] = n.x;
            if (COUNT > 3) x[3 % COUNT][half] = n.y;
        }
    }
}

// Weights in registers, or read from shared memory for each use where registers are needed for something else.
struct Resident {
    float4 values[TAPS];
    __device__ __forceinline__ explicit Resident(uint32_t weights) {
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) values[tap] = load4(weights + tap * WARP * 16);
    }
    __device__ __forceinline__ float4 operator[](int tap) const { return values[tap]; }
};
struct Stored {
    uint32_t weights;
    __device__ __forceinline__ explicit Stored(uint32_t weights) : weights(weights) {}
    __device__ __forceinline__ float4 operator[](int tap) const { return load4(weights + tap * WARP * 16); }
};

template <class Weights>
__device__ __forceinline__ void convolve(const Tile& tile, const Lane& lane, const Weights& weights, Sums& sums) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0;
    constexpr int UNROLLED = std::is_same_v<Weights, Resident> ? PLANES : 1;  // registers are short with stored weights
#pragma unroll (UNROLLED)
    for (int plane = 0; plane < PLANES; ++plane) {
        float x[ROWS][SHIFTS][2];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            load_columns(tile.at(plane, row), tile, lane, x[row]);
#pragma unroll
            for (int i = 0; i < 2 * SHIFTS; ++i) x[row][i / 2][i % 2] = to_tf32(x[row][i / 2][i % 2]);
        }
#pragma unroll
        for (int s = 0; s < KERNEL_H; ++s)
#pragma unroll
            for (int t = 0; t < KERNEL_W; ++t)
#pragma unroll
                for (int d = 0; d < 2; ++d) {
                    const int r = plane - d;
                    if (r < 0 || r >= KERNEL_D) continue;
                    const float4 a = weights[(r * KERNEL_H + s) * KERNEL_W + t];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float(&b)[2] = x[i / 2 + s][i % 2 + t];
                        multiply(sums[d][i / 2][i % 2], a, b[0], b[1]);
                    }
                }
    }
}

// The same with three products, low * high + high * low + high * high. The tensor core truncates its sums, so each plane's
// taps, small terms first, are summed from zero, and these sums are added as fp32 numbers are.
__device__ __forceinline__ void convolve_strictly(const Tile& tile, const Lane& lane, const Stored& weights,
                                                  const Stored& low_weights, Sums& sums) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0;
#pragma unroll 1
    for (int plane = 0; plane < PLANES; ++plane) {
        float high[ROWS][SHIFTS][2], low[ROWS][SHIFTS][2];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            load_columns(tile.at(plane, row), tile, lane, high[row]);
#pragma unroll
            for (int i = 0; i < 2 * SHIFTS; ++i) {
                const float v = high[row][i / 2][i % 2];
                high[row][i / 2][i % 2] = to_tf32(v);
                // An infinity has no lower part.
                low[row][i / 2][i % 2] = fabsf(v) == INFINITY ? 0 : to_tf32(v - high[row][i / 2][i % 2]);
            }
        }
#pragma unroll
        for (int d = 0; d < 2; ++d) {
            const int r = plane - d;
            if (r < 0 || r >= KERNEL_D) continue;
            float part[2][2][4] = {};
#pragma unroll
            for (int product = 0; product < 3; ++product)
#pragma unroll
                for (int st = 0; st < KERNEL_H * KERNEL_W; ++st) {
                    const int s = st / KERNEL_W, t = st % KERNEL_W, tap = r * KERNEL_H * KERNEL_W + st;
                    const float4 a = product == 0 ? low_weights[tap] : weights[tap];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float(&b)[2] = product == 1 ? low[i / 2 + s][i % 2 + t] : high[i / 2 + s][i % 2 + t];
                        multiply(part[i / 2][i % 2], a, b[0], b[1]);
                    }
                }
#pragma unroll
            for (int i = 0; i < 16; ++i) sums[d][i / 8][i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
        }
    }
}

// ---- the maximum
__device__ __forceinline__ float larger_or_nan(float a, float b) {  // fmaxf ignores NaN
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

struct Peak {
    float value;
    uint32_t place;  // a bit: 1 << position in the window, in the order of the scan
};

// The maxima of a lane's four windows' outputs as PyTorch finds them: the last NaN, else the first of the largest. PLACES, or
// values alone. Neighbours meet in pairs, then pairs, then fours: of equal ones the first goes on.
template <bool PLACES>
__device__ __forceinline__ void find_peaks(const Sums& sums, Peak (&peaks)[4]) {
    const auto value = [&](int i, int element) { return sums[i / 4][i / 2 % 2][i % 2][element]; };
#pragma unroll
    for (int element = 0; element < 4; ++element) {
        Peak best[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) best[i] = {value(i, element), 1u << i};
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
#pragma unroll
            for (int i = 0; i < 8; i += 2 * step) {
                const Peak next = best[i + step];
                if (PLACES) best[i].place = next.value > best[i].value ? next.place : best[i].place;
                best[i].value = larger_or_nan(best[i].value, next.value);
            }
        peaks[element] = best[0];
    }
    if (!PLACES) return;
    const float total = (peaks[0].value + peaks[1].value) + (peaks[2].value + peaks[3].value);
    if (total == total) return;
#pragma unroll
    for (int i = 0; i < 32; ++i)  // perhaps one of them is a NaN
        if (value(i / 4, i % 4) != value(i / 4, i % 4)) peaks[i % 4].place = 1u << i / 4;
}

// ---- the gradient of the weights: one-hot places of the maxima (16 outputs x 8 windows) times x (8 windows x 8 channels), for
// each tap and position of a window. The sums of all taps stay in registers.
using Gradient = float[TAPS][4];  // [element: channel 2t, 2t + 1 of output g, then of g + 8]

__device__ __forceinline__ void add_gradient(const Tile& tile, const Lane& lane, const uint32_t (&places)[4],
                                             Gradient& gradient) {
    // A sum over windows takes them in any order: inner index t is window 2t, and t + 4 is window 2t + 1.
    float4 one_hot[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const auto hot = [&](int element) { return places[element] & 1u << i ? 1.0f : 0.0f; };
        one_hot[i] = make_float4(hot(0), hot(2), hot(1), hot(3));
    }
    const int piece = tile.first_window / 2 + lane.t;
    const uint32_t channel = lane.g * ROW_BYTES, here = channel + (piece ^ swizzle(lane.g)) * 16;
    const uint32_t there = channel + (((piece + 1) ^ swizzle(lane.g)) & 15) * 16;
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float x[6] = {};  // columns of windows 2t and 2t + 1
            const float4 v = load4(tile.at(plane, row) + here);
            x[0] = to_tf32(v.x), x[1] = to_tf32(v.y), x[2] = to_tf32(v.z), x[3] = to_tf32(v.w);
            if (SHIFTS > 2 && piece + 1 < 16) {
                const float2 n = load2(tile.at(plane, row) + there);
                x[4] = to_tf32(n.x), x[5] = to_tf32(n.y);
            }
#pragma unroll
            for (int d = 0; d < 2; ++d)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int r = plane - d, s = row - h;
                    if (r < 0 || r >= KERNEL_D || s < 0 || s >= KERNEL_H) continue;
#pragma unroll
                    for (int w = 0; w < 2; ++w)
#pragma unroll
                        for (int t = 0; t < KERNEL_W; ++t)
                            multiply(gradient[(r * KERNEL_H + s) * KERNEL_W + t], one_hot[4 * d + 2 * h + w], x[w + t],
                                     x[w + t + 2]);
                }
        }
}

// The sum of all warps' gradients, in their order, as the weights lie in memory. `wait_for_all` is a barrier of these warps.
template <class Barrier>
__device__ __forceinline__ void write_gradient(const Gradient& gradient, const Lane& lane, int warp, float* sums,
                                               float* __restrict__ to, Barrier wait_for_all) {
#pragma unroll 1
    for (int turn = 0; turn < WARPS; ++turn) {
        if (turn == warp)
#pragma unroll
            for (int i = 0; i < TAPS * 4; ++i) {
                float& sum = sums[i * WARP + lane.lane];
                sum = turn ? sum + gradient[i / 4][i % 4] : gradient[i / 4][i % 4];
            }
        wait_for_all();
    }
    for (int i = threadIdx.x; i < WEIGHTS; i += THREADS) {
        const int tap = i % TAPS, c = i / TAPS % IN_CHANNELS, o = i / TAPS / IN_CHANNELS;
        to[i] = sums[(tap * 4 + o / 8 * 2 + c % 2) * WARP + o % 8 * 4 + c / 2];
    }
    wait_for_all();  // the sums have been read
}

// The places of a window's maxima are 16 bytes with a bit in each: as many words as lanes of a group, output o in byte o / 4 of
// word o % 4. Two lanes have parts of the same words and exchange them.
__device__ __forceinline__ uint32_t place_word(const Lane& lane, const uint32_t (&places)[4]) {
    const bool upper = lane.g >= 4;
    const int to_bytes = upper ? 0x4101 : 0x1410;  // 1 and 3, or 0 and 2; the second byte of a place is zero
    const uint32_t even = __byte_perm(places[0], places[2], to_bytes), odd = __byte_perm(places[1], places[3], to_bytes);
    return (upper ? odd : even) | __shfl_xor_sync(0xffffffffu, upper ? even : odd, 16);
}

// ---- results
struct Division {
    float divisor;
    __device__ __forceinline__ float sign() const { return copysignf(1, divisor); }
};

// What a sample's sums become: with a bias the sum over all outputs, else the average of each.
struct Result {
    const float *conv_bias, *bias;
    int biases;  // 1 or OUT_CHANNELS
    Division division;
    float windows;
    float* out;

    // For lane o of a warp, the sum of output o's maxima.
    __device__ __forceinline__ void write(int64_t sample, float sum) const {
        const int o = threadIdx.x % WARP;
        float average = 0;
        if (o < OUT_CHANNELS) average = (sum / windows + division.sign() * conv_bias[o]) / fabsf(division.divisor);
        if (!bias) {
            if (o < OUT_CHANNELS) out[sample * OUT_CHANNELS + o] = average;
            return;
        }
        if (o < OUT_CHANNELS) average += bias[biases == 1 ? 0 : o];
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) average += __shfl_xor_sync(0xffffffffu, average, offset);
        if (o == 0) out[sample] = average;
    }
};

struct Tensors {
    const float *x, *weight;
    float *partial_sums, *gradients;  // OUTPUTS and WEIGHTS for each segment; null where a sample is one, or does not train
    uint32_t* places;                 // (batch, slabs, rows, columns, 4), or null
};

template <bool STRICT, bool TRAINING>
__global__ void __launch_bounds__(THREADS, 1)
    conv_max_mean(const Shape shape, const Tensors tensors, const Result result, const bool aligned) {
    using Weights = std::conditional_t<TRAINING || STRICT, Stored, Resident>;
    extern __shared__ __align__(128) char memory[];
    char* const weights = memory + RING * 2 * shape.image_planes() * PLANE_BYTES;
    char* const second = weights + WEIGHT_BYTES;  // lower parts, or sums of gradients
    float* const warp_sums = reinterpret_cast<float*>(second + (STRICT || TRAINING ? WEIGHT_BYTES : 0));
    const int warp = threadIdx.x / WARP;
    const Ring ring = {shared_address(memory), shared_address(warp_sums + WARPS * OUTPUTS),
                       2 * shape.image_planes() * PLANE_BYTES};
    if (threadIdx.x == 0)
        for (int i = 0; i < RING; ++i) barrier_init(ring.full(i), THREADS), barrier_init(ring.empty(i), THREADS);
    store_weights(tensors.weight, result.division.sign(), reinterpret_cast<float*>(weights),
                  STRICT ? reinterpret_cast<float*>(second) : nullptr);
    __syncthreads();
    const Lane lane;
    const Weights left(shared_address(weights) + lane.lane * 16);
    __shared__ Segment segment;  // in no registers, which are short
    unsigned first_band = 0;     // of the segment
    for (int64_t line = shape.first_row(blockIdx.x); line < shape.first_row(blockIdx.x + 1);) {
        if (threadIdx.x == 0) segment.set(shape, line, shape.first_row(blockIdx.x + 1));
        __syncthreads();
        const int groups = ceil_div(segment.columns, TILE_WINDOWS), tiles = segment.slabs * groups;
        float totals[2] = {};  // of outputs g and g + 8
        Gradient gradient;
        if (TRAINING)
#pragma unroll
            for (int i = 0; i < TAPS * 4; ++i) gradient[i / 4][i % 4] = 0;
        // The warps take turns with the tiles of all steps, without a barrier between steps. Two bands are asked for at first,
        // another in each step: after its first tile, when all other warps have left the step before.
        int copied = 0, row = 0, number = warp;
        for (; copied < smaller(2, segment.bands()); ++copied)
            copy_band(tensors.x, shape, segment, copied, ring, first_band + copied, aligned);
        bool waits = true;  // for the step's bands
#pragma unroll 1
        while (row < segment.rows) {
            if (waits) {
                ring.wait_full(first_band + row);
                if (BANDS > 1) ring.wait_full(first_band + row + 1);
            }
            waits = number >= tiles;
            if (copied == row + 2 && copied < segment.bands() && (number >= tiles || number >= WARPS)) {
                copy_band(tensors.x, shape, segment, copied, ring, first_band + copied, aligned);
                ++copied;
            }
            if (number >= tiles) {
                ring.release(first_band + row);
                ++row, number -= tiles;
                continue;
            }
            const int slab = number / groups, group = number % groups;
            Tile tile;
            tile.row_bytes = ring.band_bytes / 2;
            tile.bands[0] = ring.address(first_band + row) + 2 * slab * PLANE_BYTES;
            if (BANDS > 1) tile.bands[BANDS - 1] = ring.address(first_band + row + 1) + 2 * slab * PLANE_BYTES;
            tile.first_window = group * TILE_WINDOWS;
            number += WARPS;

            Sums sums;
            if constexpr (STRICT) convolve_strictly(tile, lane, left, Stored(left.weights + WEIGHT_BYTES), sums);
            else convolve(tile, lane, left, sums);
            Peak peaks[4];
            find_peaks<TRAINING>(sums, peaks);
            uint32_t places[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool exists = tile.first_window + 2 * lane.t + i % 2 < segment.columns;
                totals[i / 2] += exists ? peaks[i].value : 0;
                places[i] = exists ? peaks[i].place : 0;
            }
            if constexpr (TRAINING) {
                if (tensors.places) {
                    const uint32_t word = place_word(lane, places);
                    const int column = tile.first_window + 2 * lane.t + lane.g / 4;
                    const int64_t window = ((segment.sample * shape.slabs + segment.first_slab + slab) * shape.rows +
                                            segment.first_row + row) * shape.columns + segment.first_column + column;
                    if (column < segment.columns) tensors.places[window * 4 + lane.g % 4] = word;
                }
                add_gradient(tile, lane, places, gradient);
            }
        }
        if (BANDS > 1) ring.release(first_band + row);
        first_band += segment.bands();
        if constexpr (TRAINING)
            write_gradient(gradient, lane, warp, reinterpret_cast<float*>(second),
                           tensors.gradients + segment.slot * WEIGHTS, [] { __syncthreads(); });
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 1);
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 2);
            if (lane.t == 0) warp_sums[warp * OUTPUTS + lane.g + 8 * i] = totals[i];
        }
        __syncthreads();
        if (warp == 0) {
            float sum = 0;
            if (lane.lane < OUTPUTS)
                for (int other = 0; other < WARPS; ++other) sum += warp_sums[other * OUTPUTS + lane.lane];
            if (!tensors.partial_sums) result.write(segment.sample, sum);
            else if (lane.lane < OUTPUTS) tensors.partial_sums[segment.slot * OUTPUTS + lane.lane] = sum;
        }
        line += segment.rows;
        __syncthreads();  // the sums and the segment have been read
    }
}

// ---- the forward pass and the weights' gradient on compute capability 9.0
// Four warps convert: the copy engine brings them x, some planes of a band at a time (a stage), and they put it into the ring
// as halves, a column's channels side by side. The other eight multiply, as before, but two taps at a time.
constexpr int CONVERTERS = 128, STREAM_THREADS = THREADS + CONVERTERS;
constexpr int STAGES = 2, STAGE_PLANES = 8;                            // at most; the stages of a band are equally large
constexpr int STREAM_RING = 4;                                         // so that warps may be a row apart
constexpr int ATTEMPTS = STREAM_RING / 2 + 1;  // that may be under way: each has two bands at least
constexpr int HALVES_ROW = COLUMNS * CHANNELS * 2, HALVES_PLANE = 2 * HALVES_ROW;
constexpr int TAP_BYTES = WARP * 8, LOWER_WEIGHTS = TAPS * TAP_BYTES;  // a tap's weights as halves, 4 for each lane

using StreamRing = RingOf<STREAM_RING>;

// What is known of a segment once all of it has been converted.
struct Scales {
    float warp_largest[2][CONVERTERS / WARP];
    int exponents[ATTEMPTS];  // of the powers of two that x was scaled by in the last attempts; or REJECTED
    float weight_largest[WARPS];
};

struct StreamMemory {
    int stage_planes, stage_bytes, band_bytes, ring, operands, sums, scales, barriers, bytes;

    __host__ __device__ __forceinline__ StreamMemory(const Shape& shape, bool strict) {
        const int planes = shape.image_planes(), stages = ceil_div(planes, STAGE_PLANES);
        stage_planes = ceil_div(planes, stages), stage_bytes = CHANNELS * stage_planes * 2 * ROW_BYTES;
        band_bytes = (strict ? 2 : 1) * planes * HALVES_PLANE;
        ring = STAGES * stage_bytes, operands = ring + STREAM_RING * band_bytes;
        sums = operands + 2 * LOWER_WEIGHTS;  // upper and lower weights, or a gradient's sums
        scales = sums + 2 * WARPS * OUTPUTS * 4, barriers = scales + ceil_div(sizeof(Scales), 8) * 8;
        bytes = barriers + (2 * STREAM_RING + STAGES) * 8;
    }
};

// ---- its instructions
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, int column, int row, int plane, int channel,
                                         int sample, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::
            "r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(channel), "r"(sample), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void named_barrier(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
__device__ __forceinline__ void store4(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ uint2 load_words(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
// Four 8 x 8 matrices of halves; a lane gives the address of a row of 16 bytes, and gets two of row g of each: 2t and 2t + 1.
// Transposed: two of column g.
__device__ __forceinline__ void load_matrices(uint32_t row, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t row, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(row)
                 : "memory");
}
// d (16 x 8) += a (16 x 8) * b (8 x 8), halves: a has elements 2t and 2t + 1 of rows g and g + 8, b those of column g.
__device__ __forceinline__ void multiply_halves(float (&d)[4], uint2 a, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(b));
}
// The same for two of them in one instruction.
__device__ __forceinline__ void multiply_halves(float (&d)[4], uint2 a, uint2 next_a, uint32_t b, uint32_t next_b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(next_a.x), "r"(next_a.y), "r"(b), "r"(next_b));
}
__device__ __forceinline__ uint32_t half_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// What rounding to a half leaves of x; nothing of an infinity.
__device__ __forceinline__ float half_rest(float x) {
    return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x));
}

__device__ __forceinline__ float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
// Whether each of two bytes, the lower ones of the halves of `bytes`, is 1 << i: two halves, 1 or 0. Bytes are compared as the
// subnormal halves that they are.
__device__ __forceinline__ uint32_t one_hot(uint32_t bytes, int i) {
    const uint32_t hot = 0x00010001u << i;
    const __half2 equal = __heq2(*reinterpret_cast<const __half2*>(&bytes), *reinterpret_cast<const __half2*>(&hot));
    return *reinterpret_cast<const uint32_t*>(&equal);
}

// ---- powers of two
__device__ __forceinline__ float power_of_2(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}
// value * 2^exponent for an exponent of -252 to 254, which may be beyond a float's when two scales are undone at once.
struct PowerOf2 {
    float half, other_half;
    __device__ __forceinline__ explicit PowerOf2(int exponent)
        : half(power_of_2(exponent / 2)), other_half(power_of_2(exponent - exponent / 2)) {}
    __device__ __forceinline__ float times(float value) const { return value * half * other_half; }
};
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
__device__ __forceinline__ int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}
// The largest finite magnitude.
template <int N>
__device__ __forceinline__ float largest_finite(const float (&v)[N]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(v[i]));
    if (largest == INFINITY) {
        largest = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(v[i]) == INFINITY ? 0 : fabsf(v[i]));
    }
    return largest;
}
__device__ __forceinline__ float warp_largest(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

// The largest of the weights. The first COUNT threads of the block come; `warp_values` is a place for each warp's.
template <int COUNT>
__device__ float largest_weight(const float* __restrict__ weight, float* warp_values) {
    float mine[ceil_div(WEIGHTS, COUNT)];
#pragma unroll
    for (int k = 0; k < ceil_div(WEIGHTS, COUNT); ++k) {
        const int i = threadIdx.x + k * COUNT;
        mine[k] = i < WEIGHTS ? weight[i] : 0;
    }
    float largest = warp_largest(largest_finite(mine));
    if (threadIdx.x % WARP == 0) warp_values[threadIdx.x / WARP] = largest;
    named_barrier(2, COUNT);
    for (int warp = 0; warp < COUNT / WARP; ++warp) largest = fmaxf(largest, warp_values[warp]);
    return largest;
}

// weight[o][c][tap] as left operands of halves, [tap][lane], and what rounding leaves of them; returns the exponent of the
// power of two that scales them. The computing warps come.
__device__ int store_halves(const float* __restrict__ weight, float sign, uint2* high, uint2* low, Scales* scales) {
    const float largest = largest_weight<THREADS>(weight, scales->weight_largest);
    const int exponent = scale_exponent(largest, 14);
    const float scale = sign * power_of_2(exponent);
#pragma unroll
    for (int i = threadIdx.x; i < TAPS * WARP; i += THREADS) {
        const int g = i % WARP / 4, t = i % 4, tap = i / WARP;
        const auto scaled = [&](int o, int c) {
            return o < OUT_CHANNELS && c < IN_CHANNELS ? scale * weight[(o * IN_CHANNELS + c) * TAPS + tap] : 0;
        };
        const float w[4] = {scaled(g, 2 * t), scaled(g, 2 * t + 1), scaled(g + 8, 2 * t), scaled(g + 8, 2 * t + 1)};
        high[i] = make_uint2(half_pair(w[0], w[1]), half_pair(w[2], w[3]));
        low[i] = make_uint2(half_pair(half_rest(w[0]), half_rest(w[1])), half_pair(half_rest(w[2]), half_rest(w[3])));
    }
    return exponent;
}

#if FITS_COPY_ENGINE

// ---- converting
constexpr int PIECES = COLUMNS / 4;
constexpr int ODD_COLUMNS = HALVES_ROW / 2, COLUMN_BYTES = CHANNELS * 2;  // of a row: the even columns, then the odd ones
constexpr int REJECTED = 1000;

// The largest of all converters' values. Two calls with one `slot` have another barrier between them.
__device__ __forceinline__ float converters_largest(float mine, int slot, Scales* scales) {
    mine = warp_largest(mine);
    if (threadIdx.x % WARP == 0) scales->warp_largest[slot][(threadIdx.x - THREADS) / WARP] = mine;
    named_barrier(1, CONVERTERS);
#pragma unroll
    for (int warp = 0; warp < CONVERTERS / WARP; ++warp) mine = fmaxf(mine, scales->warp_largest[slot][warp]);
    return mine;
}

// Four columns of a row, in all channels.
__device__ __forceinline__ void load_piece(uint32_t from, int channel_bytes, float (&v)[4 * CHANNELS]) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const float4 four = load4(from + c * channel_bytes);
        v[4 * c] = four.x, v[4 * c + 1] = four.y, v[4 * c + 2] = four.z, v[4 * c + 3] = four.w;
    }
}
// As halves to their places in a row of the ring. The order of the two pairs of columns is turned in every other group of four
// lanes, so that a quarter-warp's stores touch all banks.
__device__ __forceinline__ void store_piece(uint32_t row, int piece, const float (&v)[4 * CHANNELS]) {
    uint4 columns[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
        columns[k] = make_uint4(half_pair(v[k], v[4 + k]), half_pair(v[8 + k], v[12 + k]), half_pair(v[16 + k], v[20 + k]),
                                half_pair(v[24 + k], v[28 + k]));
    const bool turned = piece / 4 % 2;
    const uint32_t first = row + (2 * piece + turned) * COLUMN_BYTES, second = row + (2 * piece + !turned) * COLUMN_BYTES;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const uint4 a = columns[odd], b = columns[2 + odd];
        store4(first + odd * ODD_COLUMNS, turned ? b : a);
        store4(second + odd * ODD_COLUMNS, turned ? a : b);
    }
}

// The converters' part. Halves have TF32's 11 bits, but not its range: so a segment's values are scaled by a power of two. It
// is taken from the segment's first stage, with room for values 31 times as large. If there are larger ones, the segment is
// attempted a second time, with the power that its largest value calls for.
constexpr int FIRST_TARGET = 11, LAST_TARGET = 15;
constexpr float LARGEST_HALF = 65504;

template <bool STRICT>
__device__ __forceinline__ void convert_segments(const CUtensorMap& x, const Shape& shape, const StreamMemory& memory,
                                                 const StreamRing& ring, uint32_t stages, uint32_t filled, Scales* scales) {
    const int thread = threadIdx.x - THREADS, piece = thread % PIECES;
    const int channel_bytes = memory.stage_planes * 2 * ROW_BYTES;
    const int64_t end = shape.first_row(blockIdx.x + 1);
    unsigned first_band = 0, first_stage = 0, attempt = 0;  // bands and stages are counted over all attempts
    Segment segment;
    for (int64_t line = shape.first_row(blockIdx.x); line < end; line += segment.rows) {
        segment.set(shape, line, end);
        const int planes = 2 * segment.slabs + KERNEL_D - 1, band_stages = ceil_div(planes, memory.stage_planes);
        const int count = segment.bands() * band_stages;
        const auto ask_for = [&](int k) {
            const unsigned place = (first_stage + k) % STAGES;
            expect_bytes(filled + 8 * place, memory.stage_bytes);
            load_box(stages + place * memory.stage_bytes, x, 2 * segment.first_column,
                     2 * (segment.first_row + k / band_stages), 2 * segment.first_slab + k % band_stages * memory.stage_planes,
                     0, static_cast<int>(segment.sample), filled + 8 * place);
        };
        int exponent = 0;
        bool exact = false, accepted = false;
        while (!accepted) {
            if (thread == 0)
                for (int k = 0; k < smaller(STAGES, count); ++k) ask_for(k);
            float largest = 0;
            int k = 0;
#pragma unroll 1
            for (int i = 0; i < segment.bands(); ++i) {
                const unsigned band = first_band + i;
#pragma unroll 1
                for (int first_plane = 0; first_plane < planes; first_plane += memory.stage_planes, ++k) {
                    const unsigned n = first_stage + k;
                    const uint32_t from = stages + n % STAGES * memory.stage_bytes + piece * 16;
                    const int lines = 2 * smaller(memory.stage_planes, planes - first_plane);
                    wait(filled + n % STAGES * 8, n / STAGES & 1);
                    if (k == 0 && !exact) {
#pragma unroll 1
                        for (int j = thread / PIECES; j < lines; j += CONVERTERS / PIECES) {
                            float v[4 * CHANNELS];
                            load_piece(from + j * ROW_BYTES, channel_bytes, v);
                            largest = fmaxf(largest, largest_finite(v));
                        }
                        exponent = scale_exponent(converters_largest(largest, 0, scales), FIRST_TARGET);
                    }
                    if (first_plane == 0) ring.wait_empty(band);
                    const float scale = power_of_2(exponent);
                    const uint32_t to = ring.address(band) + first_plane * HALVES_PLANE;
#pragma unroll 1
                    for (int j = thread / PIECES; j < lines; j += CONVERTERS / PIECES) {
                        float v[4 * CHANNELS];
                        load_piece(from + j * ROW_BYTES, channel_bytes, v);
                        largest = fmaxf(largest, largest_finite(v));
#pragma unroll
                        for (int e = 0; e < 4 * CHANNELS; ++e) v[e] *= scale;
                        store_piece(to + j * HALVES_ROW, piece, v);
                        if (STRICT) {
#pragma unroll
                            for (int e = 0; e < 4 * CHANNELS; ++e) v[e] = half_rest(v[e]);
                            store_piece(to + memory.band_bytes / 2 + j * HALVES_ROW, piece, v);
                        }
                    }
                    named_barrier(1, CONVERTERS);  // all have read the stage
                    if (thread == 0 && k + STAGES < count) ask_for(k + STAGES);
                }
                if (k == count) {
                    largest = converters_largest(largest, 1, scales);
                    accepted = exact || largest * power_of_2(exponent) <= LARGEST_HALF;
                    if (thread == 0) scales->exponents[attempt % ATTEMPTS] = accepted ? exponent : REJECTED;
                    exponent = scale_exponent(largest, LAST_TARGET);
                }
                arrive(ring.full(band));
            }
            first_band += segment.bands(), first_stage += count, ++attempt;
            exact = true;
        }
    }
}

// ---- the computing warps' part
// 8 windows in half of the slabs of a row of windows; which half has the larger part changes from row to row.
struct Unit {
    int row, number, first_window, first_slab, end;

    // Unit `its_number`, counted from the first one of `its_row`. Its row may be past the segment's last.
    __device__ __forceinline__ void set(const Segment& segment, int its_row, int its_number) {
        const int groups = ceil_div(segment.columns, TILE_WINDOWS);
        row = its_row, number = its_number;
        while (number >= 2 * groups) ++row, number -= 2 * groups;
        const bool upper = number >= groups;
        const int middle = (segment.slabs + row % 2) / 2;
        first_window = (upper ? number - groups : number) * TILE_WINDOWS;
        first_slab = upper ? middle : 0, end = upper ? segment.slabs : middle;
    }
};

// The warp's units, every WARPS-th. Calls visit(unit, its two bands).
template <class Visit>
__device__ __forceinline__ void for_units(const Segment& segment, const StreamRing& ring, unsigned first_band, Visit visit) {
    Unit unit;
    unit.set(segment, 0, threadIdx.x / WARP);
    bool waits = true;  // for the row's bands
#pragma unroll 1
    for (int row = 0; row < segment.rows;) {
        const unsigned band = first_band + row;
        if (waits) ring.wait_full(band), ring.wait_full(band + 1);
        waits = unit.row > row;
        if (unit.row > row) {
            ring.release(band);
            ++row;
            continue;
        }
        const uint32_t bands[2] = {ring.address(band), ring.address(band + 1)};
        visit(unit, bands);
        unit.set(segment, row, unit.number + WARPS);
    }
    ring.release(first_band + segment.rows);
}

// The row of 16 bytes that the lane names when a warp loads column `column` of 8 windows.
__device__ __forceinline__ uint32_t matrix_row(int lane, int first_window, int column) {
    const int pair = (first_window + lane % 8 + column / 2) % (COLUMNS / 2);  // beyond the row: of no window
    return column % 2 * ODD_COLUMNS + pair * COLUMN_BYTES;
}

// x: 8 windows' rows and columns 0, 2, 1, 3, channels 2t and 2t + 1 of window g. A product takes two neighbouring registers, so
// what taps 0 and 2 of a row of the kernel meet need not be moved, neither for a window's even positions nor for its odd ones.
using Plane = uint32_t[ROWS][SHIFTS];
__device__ __forceinline__ int column_of_matrix(int matrix) { return matrix % 2 * 2 + matrix / 2; }  // and the other way round
__device__ __forceinline__ void load_plane(const uint32_t (&bands)[2], uint32_t offset, Plane& x) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) load_matrices(bands[row / 2] + row % 2 * HALVES_ROW + offset, x[row]);
}

// Nine taps of a plane of the kernel: the pairs 0 2, 3 5, 6 8 and 1 7, and 4, which is left over. Position i of a window is
// d, h, w in binary.
constexpr int PLANE_TAPS = KERNEL_H * KERNEL_W, PAIRS = PLANE_TAPS / 2, ODD_TAP = 4;
__device__ __forceinline__ int first_of_pair(int pair) { return pair < 3 ? 3 * pair : 1; }
__device__ __forceinline__ int second_of_pair(int pair) { return pair < 3 ? 3 * pair + 2 : 7; }

__device__ __forceinline__ uint32_t operand(const Plane& x, int i, int tap) {
    return x[i / 2 % 2 + tap / KERNEL_W][column_of_matrix(i % 2 + tap % KERNEL_W)];
}
// The pairs of plane r of the kernel: `x` are the planes that positions 0 to 3 and 4 to 7 meet with it.
__device__ __forceinline__ void add_pairs(Sums& sums, const uint2 (&weights)[TAPS], int r, const Plane& x,
                                          const Plane& next_x) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int tap = first_of_pair(pair), second = second_of_pair(pair);
            const Plane& plane = i < 4 ? x : next_x;
            multiply_halves(sums[i / 4][i / 2 % 2][i % 2], weights[r * PLANE_TAPS + tap], weights[r * PLANE_TAPS + second],
                            operand(plane, i, tap), operand(plane, i, second));
        }
}
// Those left over of the kernel's first two planes make a pair, that of the third stands alone.
__device__ __forceinline__ void add_odd_pair(Sums& sums, const uint2 (&weights)[TAPS], const Plane& first, const Plane& second,
                                             const Plane& third) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        multiply_halves(sums[i / 4][i / 2 % 2][i % 2], weights[ODD_TAP], weights[PLANE_TAPS + ODD_TAP],
                        operand(i < 4 ? first : second, i, ODD_TAP), operand(i < 4 ? second : third, i, ODD_TAP));
}
__device__ __forceinline__ void add_last(Sums& sums, const uint2 (&weights)[TAPS], const Plane& x, const Plane& next_x) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        multiply_halves(sums[i / 4][i / 2 % 2][i % 2], weights[2 * PLANE_TAPS + ODD_TAP],
                        operand(i < 4 ? x : next_x, i, ODD_TAP));
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0;
}

// visit(sums) for each slab of a unit, in order. A slab's planes 2 and 3 are the next one's planes 0 and 1 and stay in
// registers. The order of additions is the same for all positions, of which always eight are under way.
template <class Visit>
__device__ __forceinline__ void convolve_halves(const uint2 (&weights)[TAPS], const uint32_t (&bands)[2], uint32_t offset,
                                                int first_slab, int end, Visit visit) {
    offset += 2 * first_slab * HALVES_PLANE;
    Plane first, second, third, fourth;
    load_plane(bands, offset, first);
    load_plane(bands, offset + HALVES_PLANE, second);
#pragma unroll 1
    for (int slab = first_slab; slab < end; ++slab) {
        offset += 2 * HALVES_PLANE;
        load_plane(bands, offset, third);
        Sums sums;
        clear(sums);
        add_pairs(sums, weights, 0, first, second);
        add_odd_pair(sums, weights, first, second, third);
        load_plane(bands, offset + HALVES_PLANE, fourth);
        add_pairs(sums, weights, 1, second, third);
        add_pairs(sums, weights, 2, third, fourth);
        add_last(sums, weights, third, fourth);
        visit(sums);
#pragma unroll
        for (int i = 0; i < ROWS * SHIFTS; ++i) {
            first[i / SHIFTS][i % SHIFTS] = third[i / SHIFTS][i % SHIFTS];
            second[i / SHIFTS][i % SHIFTS] = fourth[i / SHIFTS][i % SHIFTS];
        }
    }
}

// The same with three products. As in v4 each plane's sums begin at zero, for the tensor core truncates. The small ones, low *
// high + high * low, are kept apart, over all planes; they do not count where x is infinite: a weight's lower part may have the
// other sign.
template <class Visit>
__device__ __forceinline__ void convolve_halves_strictly(uint32_t weights, const uint32_t (&bands)[2], int lower,
                                                         uint32_t offset, int first_slab, int end, Visit visit) {
#pragma unroll 1
    for (int slab = first_slab; slab < end; ++slab) {
        Sums sums;
        clear(sums);
        float small[8][4] = {};
        uint32_t here = offset + 2 * slab * HALVES_PLANE, tap_weights = weights;
        Plane high, low, next_high, next_low;  // those that positions 0 to 3 and 4 to 7 meet with plane r of the kernel
        load_plane(bands, here, next_high);
        load_plane(bands, here + lower, next_low);
#pragma unroll 1
        for (int r = 0; r < KERNEL_D; ++r) {
#pragma unroll
            for (int i = 0; i < ROWS * SHIFTS; ++i) {
                high[i / SHIFTS][i % SHIFTS] = next_high[i / SHIFTS][i % SHIFTS];
                low[i / SHIFTS][i % SHIFTS] = next_low[i / SHIFTS][i % SHIFTS];
            }
            here += HALVES_PLANE;
            load_plane(bands, here, next_high);
            load_plane(bands, here + lower, next_low);
            float part[8][4] = {};
            const auto add = [&](float(&to)[8][4], int pair, uint2 w, uint2 next_w, const Plane& x, const Plane& next_x) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const Plane& plane = i < 4 ? x : next_x;
                    multiply_halves(to[i], w, next_w, operand(plane, i, first_of_pair(pair)),
                                    operand(plane, i, second_of_pair(pair)));
                }
            };
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                const uint32_t at = tap_weights + first_of_pair(pair) * TAP_BYTES;
                const uint32_t next = tap_weights + second_of_pair(pair) * TAP_BYTES;
                const uint2 w = load_words(at), next_w = load_words(next);
                add(small, pair, load_words(at + LOWER_WEIGHTS), load_words(next + LOWER_WEIGHTS), high, next_high);
                add(part, pair, w, next_w, high, next_high);
                add(small, pair, w, next_w, low, next_low);
            }
            const uint32_t odd = tap_weights + ODD_TAP * TAP_BYTES;
            const uint2 w = load_words(odd), low_w = load_words(odd + LOWER_WEIGHTS);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t x = operand(i < 4 ? high : next_high, i, ODD_TAP);
                multiply_halves(small[i], low_w, w, x, operand(i < 4 ? low : next_low, i, ODD_TAP));
                multiply_halves(part[i], w, x);
            }
            tap_weights += PLANE_TAPS * TAP_BYTES;
#pragma unroll
            for (int i = 0; i < 32; ++i) sums[i / 16][i / 8 % 2][i / 4 % 2][i % 4] += part[i / 4][i % 4];
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) sums[i / 16][i / 8 % 2][i / 4 % 2][i % 4] += finite_or_zero(small[i / 4][i % 4]);
        visit(sums);
    }
}

// The block's threads in their parts: converters, which do not return from here, and computing warps.
struct Stream {
    StreamMemory memory;
    StreamRing ring;
    uint32_t stages, filled;
    Scales* scales;

    __device__ __forceinline__ Stream(const Shape& shape, bool strict, char* data) : memory(shape, strict) {
        const uint32_t address = shared_address(data);
        ring = {address + memory.ring, address + memory.barriers, memory.band_bytes};
        stages = address, filled = address + memory.barriers + 2 * STREAM_RING * 8;
        scales = reinterpret_cast<Scales*>(data + memory.scales);
        if (threadIdx.x == 0) {
            for (int i = 0; i < STREAM_RING; ++i)
                barrier_init(ring.full(i), CONVERTERS), barrier_init(ring.empty(i), THREADS);
            for (int i = 0; i < STAGES; ++i) barrier_init(filled + 8 * i, 1);
            barrier_init_fence();
        }
    }
};

template <bool STRICT, bool PLACES>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_max_mean(const __grid_constant__ CUtensorMap x, const Shape shape, const Tensors tensors, const Result result) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Segment segments[2];  // this one and the next of the computing warps; in no registers, which are short
    const Stream stream(shape, STRICT, memory);
    uint2* const operands = reinterpret_cast<uint2*>(memory + stream.memory.operands);
    float* const warp_sums = reinterpret_cast<float*>(memory + stream.memory.sums);
    __syncthreads();  // the barriers are there
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    if (warp >= WARPS) {
        give_registers<104>();
        convert_segments<STRICT>(x, shape, stream.memory, stream.ring, stream.stages, stream.filled, stream.scales);
        return;
    }
    take_registers<200>();
    const int weight_exponent =
        store_halves(tensors.weight, result.division.sign(), operands, operands + TAPS * WARP, stream.scales);
    const int64_t end = shape.first_row(blockIdx.x + 1);
    int64_t line = shape.first_row(blockIdx.x);
    if (threadIdx.x == 0) segments[0].set(shape, line, end);
    named_barrier(2, THREADS);
    const Lane lane;
    const uint32_t stored_weights = shared_address(operands) + lane.lane * 8;
    uint2 weights[TAPS];
    if (!STRICT)
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) weights[tap] = load_words(stored_weights + tap * TAP_BYTES);
    unsigned first_band = 0, attempt = 0;
    for (int turn = 0; line < end; turn ^= 1) {
        const Segment& segment = segments[turn];
        line += segment.rows;
        if (threadIdx.x == 0 && line < end) segments[turn ^ 1].set(shape, line, end);
        float totals[2];  // of outputs g and g + 8
        int exponent;
        do {
            totals[0] = totals[1] = 0;
            for_units(segment, stream.ring, first_band, [&](const Unit& unit, const uint32_t(&bands)[2]) {
                const int column = unit.first_window + 2 * lane.t, words_column = column + lane.g / 4;
                const bool exist[2] = {column < segment.columns, column + 1 < segment.columns};
                const bool writes = words_column < segment.columns;
                const int64_t row_words = static_cast<int64_t>(shape.columns) * 4, slab_words = shape.rows * row_words;
                uint32_t* word = nullptr;
                if (PLACES)
                    word = tensors.places + (segment.sample * shape.slabs + segment.first_slab + unit.first_slab) * slab_words +
                           (segment.first_row + unit.row) * row_words + (segment.first_column + words_column) * 4 + lane.g % 4;
                const auto take = [&](const Sums& sums) {
                    Peak peaks[4];
                    find_peaks<PLACES>(sums, peaks);
                    uint32_t places[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        totals[i / 2] += exist[i % 2] ? peaks[i].value : 0;
                        places[i] = exist[i % 2] ? peaks[i].place : 0;
                    }
                    if constexpr (PLACES) {
                        const uint32_t all = place_word(lane, places);
                        if (writes) *word = all;
                        word += slab_words;
                    }
                };
                const uint32_t offset = matrix_row(lane.lane, unit.first_window, column_of_matrix(lane.lane / 8));
                if constexpr (STRICT)
                    convolve_halves_strictly(stored_weights, bands, stream.memory.band_bytes / 2, offset, unit.first_slab,
                                             unit.end, take);
                else
                    convolve_halves(weights, bands, offset, unit.first_slab, unit.end, take);
            });
            first_band += segment.bands();
            exponent = stream.scales->exponents[attempt++ % ATTEMPTS];
        } while (exponent == REJECTED);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 1);
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 2);
            if (lane.t == 0) warp_sums[(turn * WARPS + warp) * OUTPUTS + lane.g + 8 * i] = totals[i];
        }
        // These sums are there, those before have been read, and so has the segment; the next one is set.
        named_barrier(2, THREADS);
        if (warp == 0) {
            float sum = 0;
            if (lane.lane < OUTPUTS)
                for (int other = 0; other < WARPS; ++other) sum += warp_sums[(turn * WARPS + other) * OUTPUTS + lane.lane];
            sum = PowerOf2(-exponent - weight_exponent).times(sum);
            if (!tensors.partial_sums) result.write(segment.sample, sum);
            else if (lane.lane < OUTPUTS) tensors.partial_sums[segment.slot * OUTPUTS + lane.lane] = sum;
            __syncwarp();  // lane 0 may write over the segment
        }
    }
}

// The gradient of the weights, from the places of the maxima: a product adds two positions of 8 windows.
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    stream_weight_gradient(const __grid_constant__ CUtensorMap x, const Shape shape, const uint32_t* __restrict__ places,
                           float* __restrict__ gradients) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Segment segment;
    const Stream stream(shape, false, memory);
    float* const sums = reinterpret_cast<float*>(memory + stream.memory.operands);
    __syncthreads();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    if (warp >= WARPS) {
        give_registers<104>();
        convert_segments<false>(x, shape, stream.memory, stream.ring, stream.stages, stream.filled, stream.scales);
        return;
    }
    take_registers<200>();
    const Lane lane;
    unsigned first_band = 0, attempt = 0;
    for (int64_t line = shape.first_row(blockIdx.x); line < shape.first_row(blockIdx.x + 1);) {
        if (threadIdx.x == 0) segment.set(shape, line, shape.first_row(blockIdx.x + 1));
        named_barrier(2, THREADS);
        Gradient gradient;
        int exponent;
        do {
#pragma unroll
            for (int i = 0; i < TAPS * 4; ++i) gradient[i / 4][i % 4] = 0;
            // The words of windows 2t and 2t + 1 with outputs g and g + 8. The next slab's are asked for in time, and so are
            // those of the next unit's first slab.
            const int64_t row_words = static_cast<int64_t>(shape.columns) * 4, slab_words = shape.rows * row_words;
            const uint32_t* from = places;
            bool exist[2] = {};
            uint32_t words[2];
            const auto load = [&] { words[0] = exist[0] ? from[0] : 0, words[1] = exist[1] ? from[4] : 0; };
            const auto load_first = [&](const Unit& unit) {
                const int column = unit.first_window + 2 * lane.t;
                const bool some = unit.row < segment.rows && unit.first_slab < unit.end;
                exist[0] = some && column < segment.columns, exist[1] = some && column + 1 < segment.columns;
                from = places + (segment.sample * shape.slabs + segment.first_slab + unit.first_slab) * slab_words +
                       (segment.first_row + unit.row) * row_words + (segment.first_column + column) * 4 + lane.g % 4;
                load();
            };
            Unit next;
            next.set(segment, 0, warp);
            load_first(next);
            for_units(segment, stream.ring, first_band, [&](const Unit& unit, const uint32_t(&bands)[2]) {
                next.set(segment, unit.row, unit.number + WARPS);
                if (unit.first_slab == unit.end) load_first(next);
                uint32_t offset = matrix_row(lane.lane, unit.first_window, lane.lane / 8) + 2 * unit.first_slab * HALVES_PLANE;
#pragma unroll 1
                for (int slab = unit.first_slab; slab < unit.end; ++slab) {
                    // Bytes of both words, for output g and for g + 8.
                    const int byte = lane.g / 4;
                    const uint32_t left = words[0] >> 8 * byte & 0x00ff00ff, right = words[1] >> 8 * byte & 0x00ff00ff;
                    const uint32_t bytes[2] = {__byte_perm(left, right, 0x5410), __byte_perm(left, right, 0x7632)};
                    uint2 hot[8];
#pragma unroll
                    for (int i = 0; i < 8; ++i) hot[i] = make_uint2(one_hot(bytes[0], i), one_hot(bytes[1], i));
                    if (slab + 1 < unit.end) from += slab_words, load();
                    else load_first(next);
#pragma unroll
                    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
                        for (int i = 0; i < ROWS; ++i) {
                            uint32_t columns[SHIFTS];
                            load_transposed(bands[i / 2] + i % 2 * HALVES_ROW + offset + plane * HALVES_PLANE, columns);
#pragma unroll
                            for (int position = 0; position < 4; ++position) {
                                const int r = plane - position / 2, s = i - position % 2;
                                if (r < 0 || r >= KERNEL_D || s < 0 || s >= KERNEL_H) continue;
#pragma unroll
                                for (int t = 0; t < KERNEL_W; ++t)
                                    multiply_halves(gradient[(r * KERNEL_H + s) * KERNEL_W + t], hot[2 * position],
                                                    hot[2 * position + 1], columns[t], columns[t + 1]);
                            }
                        }
                    offset += 2 * HALVES_PLANE;
                }
            });
            first_band += segment.bands();
            exponent = stream.scales->exponents[attempt++ % ATTEMPTS];
        } while (exponent == REJECTED);
        const float scale = power_of_2(-exponent);
#pragma unroll
        for (int i = 0; i < TAPS * 4; ++i) gradient[i / 4][i % 4] *= scale;
        write_gradient(gradient, lane, warp, sums, gradients + segment.slot * WEIGHTS, [] { named_barrier(2, THREADS); });
        line += segment.rows;
        named_barrier(2, THREADS);  // the segment has been read
    }
}

#endif  // FITS_COPY_ENGINE

// ---- sums over segments
// Calls visit(slot) for each segment of a sample, in order.
template <class Visit>
__device__ __forceinline__ void for_segments(const Shape& s, int64_t sample, Visit visit) {
    const int parts = s.slab_parts * s.column_parts;
    for (int64_t image = sample * parts; image < (sample + 1) * parts; ++image) {
        if (s.whole_images()) {
            visit(image);
            continue;
        }
        const int64_t all = s.images() * s.rows, first = (image * s.rows + 1) * s.blocks - 1;
        const int64_t last = (image + 1) * s.rows * s.blocks - 1;  // block b has the lines from all * b / blocks on
        for (int64_t block = first / all; block <= last / all; ++block) visit(image + block);
    }
}

// A sample for each warp.
__global__ void __launch_bounds__(WARP)
    finish_samples(const float* __restrict__ partial_sums, const Shape shape, const Result result) {
    float sum = 0;
    if (threadIdx.x < OUTPUTS)
        for_segments(shape, blockIdx.x, [&](int64_t slot) { sum += partial_sums[slot * OUTPUTS + threadIdx.x]; });
    result.write(blockIdx.x, sum);
}

// gradients (batch, WEIGHTS): a sample's segments, in order.
constexpr int SUM_THREADS = 128, WEIGHT_BLOCKS = ceil_div(WEIGHTS, SUM_THREADS);

__global__ void __launch_bounds__(SUM_THREADS)
    add_segments(const float* __restrict__ partial_gradients, float* __restrict__ gradients, const Shape shape) {
    const int64_t sample = blockIdx.x / WEIGHT_BLOCKS;
    const int place = blockIdx.x % WEIGHT_BLOCKS * SUM_THREADS + threadIdx.x;
    if (place >= WEIGHTS) return;
    float sum = 0;
    for_segments(shape, sample, [&](int64_t slot) { sum += partial_gradients[slot * WEIGHTS + place]; });
    gradients[sample * WEIGHTS + place] = sum;
}

// Gradients of the averages: one a sample, or one a channel of it.
struct Upstream {
    const float* grad;
    bool by_sample;
    __device__ __forceinline__ float at(int64_t sample, int o) const {
        return grad[by_sample ? sample : sample * OUT_CHANNELS + o];
    }
};

// grad_weight = scale * the samples' gradients, weighted by `upstream`.
constexpr int SUM_COLUMNS = 32, SUM_ROWS = 8;

__global__ void __launch_bounds__(SUM_COLUMNS * SUM_ROWS)
    weighted_sum(const float* __restrict__ gradients, const Upstream upstream, int64_t batch, float scale,
                 float* __restrict__ grad_weight) {
    __shared__ float row_sums[SUM_ROWS][SUM_COLUMNS];
    const int row = threadIdx.x / SUM_COLUMNS, column = threadIdx.x % SUM_COLUMNS, k = blockIdx.x * SUM_COLUMNS + column;
    float sum = 0;
    if (k < WEIGHTS)
#pragma unroll 8
        for (int64_t sample = row; sample < batch; sample += SUM_ROWS)
            sum += upstream.at(sample, k / (IN_CHANNELS * TAPS)) * gradients[sample * WEIGHTS + k];
    row_sums[row][column] = sum;
    __syncthreads();
    if (row > 0 || k >= WEIGHTS) return;
    for (int other = 1; other < SUM_ROWS; ++other) sum += row_sums[other][column];
    grad_weight[k] = scale * sum;
}

// ---- the input's gradient: one-hot places (16 pixels x 16 outputs) times weights (16 outputs x 8 channels), as halves
// A warp has the pixels of 8 windows' columns in two planes and two rows, [plane][row]: even columns are rows 0 to 7 of the
// product, odd ones rows 8 to 15. All lie within reach of the windows at and before them in each direction. The product's inner
// index takes outputs as a lane has them: t, t + 4, t + 8, t + 12.
constexpr int GRADIENT_WARPS = 12, GRADIENT_THREADS = WARP * GRADIENT_WARPS;

// PAIRED: two neighbours of a row are written at once.
template <bool PAIRED>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1)
    input_gradient(const uint32_t* __restrict__ places, const float* __restrict__ weight, const Upstream upstream,
                   const Shape shape, const float scale, float* __restrict__ grad_x) {
    __shared__ uint2 weights[TAPS][WARP];  // as right operands
    __shared__ float warp_values[GRADIENT_WARPS];
    const Lane lane;
    const int slab_pairs = ceil_div(shape.depth, 2), row_pairs = ceil_div(shape.height, 2), groups = ceil_div(shape.width, 16);
    const int64_t lines = shape.batch * slab_pairs, plane_floats = static_cast<int64_t>(shape.height) * shape.width;
    const int64_t channel_floats = shape.depth * plane_floats;
    const int row_words = shape.columns * 4, slab_words = shape.rows * row_words;  // a sample's are below 2^30
    // Weights times upstream gradients are below 2^14.
    const int weight_exponent = scale_exponent(largest_weight<GRADIENT_THREADS>(weight, warp_values), 7);
    const bool channels[2] = {2 * lane.t < IN_CHANNELS, 2 * lane.t + 1 < IN_CHANNELS};
    uint2 b[TAPS];
    PowerOf2 unscale(0);
    int64_t last_sample = -1;
    for (int64_t line = lines * blockIdx.x / gridDim.x; line < lines * (blockIdx.x + 1) / gridDim.x; ++line) {
        const int64_t sample = line / slab_pairs;
        const int slab = line % slab_pairs;
        if (sample != last_sample) {
            float largest = 0;
            for (int o = 0; o < OUT_CHANNELS; ++o) {
                const float pair[2] = {largest, upstream.at(sample, o)};
                largest = largest_finite(pair);
            }
            const int exponent = scale_exponent(largest, 7);
            unscale = PowerOf2(-exponent - weight_exponent);
            unscale.other_half *= scale;
            __syncthreads();  // the last sample's weights have been read
            for (int i = threadIdx.x; i < TAPS * WARP; i += GRADIENT_THREADS) {
                const int c = i % WARP / 4, tap = i / WARP;
                const auto scaled = [&](int o) {
                    if (o >= OUT_CHANNELS || c >= IN_CHANNELS) return 0.0f;
                    const float w = weight[(o * IN_CHANNELS + c) * TAPS + tap] * power_of_2(weight_exponent);
                    return upstream.at(sample, o) * power_of_2(exponent) * w;
                };
                const int o = i % 4;
                weights[tap][i % WARP] =
                    make_uint2(half_pair(scaled(o), scaled(o + 4)), half_pair(scaled(o + 8), scaled(o + 12)));
            }
            __syncthreads();
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) b[tap] = weights[tap][lane.lane];
            last_sample = sample;
        }
        const uint32_t* const sample_places = places + sample * shape.slabs * slab_words;
        const bool slabs[2] = {slab < shape.slabs, slab > 0 && slab <= shape.slabs};  // this one, and the one before
        // The words of the windows that the pixels are in: [slab][row][column], this one and the one before.
        uint32_t words[2][2][2];
        const auto load = [&](int row, int column) {
            const int at = slab * slab_words + row * row_words + column * 4 + lane.t;
            const bool rows[2] = {row < shape.rows, row > 0 && row <= shape.rows};
            const bool columns[2] = {column < shape.columns, column > 0 && column <= shape.columns};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int d = i / 4, h = i / 2 % 2, w = i % 2;
                words[d][h][w] =
                    slabs[d] && rows[h] && columns[w] ? sample_places[at - d * slab_words - h * row_words - w * 4] : 0;
            }
        };
        int row = threadIdx.x / WARP / groups, group = threadIdx.x / WARP % groups;
        if (row < row_pairs) load(row, group * 8 + lane.g);
#pragma unroll 1
        while (row < row_pairs) {
            const int column = group * 8 + lane.g;
            float* const corner = grad_x + (sample * IN_CHANNELS + 2 * lane.t) * channel_floats +
                                  (2 * slab * plane_floats + 2 * row * static_cast<int64_t>(shape.width) + 2 * column);
            const bool in_row = 2 * column < shape.width, in_plane[2] = {in_row, in_row && 2 * row + 1 < shape.height};
            uint32_t here[2][2][2];
#pragma unroll
            for (int i = 0; i < 8; ++i) here[i / 4][i / 2 % 2][i % 2] = words[i / 4][i / 2 % 2][i % 2];
            for (group += GRADIENT_WARPS; group >= groups; group -= groups) ++row;
            if (row < row_pairs) load(row, group * 8 + lane.g);  // for the next turn
            float sums[2][2][4] = {};
#pragma unroll
            for (int before_d = 0; before_d < 2; ++before_d)
#pragma unroll
                for (int before_h = 0; before_h < 2; ++before_h) {
                    if (before_d && KERNEL_D < 2 || before_h && KERNEL_H < 2) continue;
                    uint2 bytes[2];  // of outputs t and t + 4, t + 8 and t + 12, for this window and the one before
#pragma unroll
                    for (int before = 0; before < 2; ++before) {
                        const uint32_t word = here[before_d][before_h][before];
                        bytes[before] = make_uint2(__byte_perm(word, 0, 0x4140), __byte_perm(word, 0, 0x4342));
                    }
#pragma unroll
                    for (int d = 0; d < 2; ++d)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            uint2 hot[2][2];  // [this window or the one before][w]
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const int place = 4 * d + 2 * h + i % 2;
                                hot[i / 2][i % 2] = make_uint2(one_hot(bytes[i / 2].x, place), one_hot(bytes[i / 2].y, place));
                            }
#pragma unroll
                            for (int t = 0; t < KERNEL_W; ++t)
#pragma unroll
                                for (int zy = 0; zy < 4; ++zy) {
                                    const int r = 2 * before_d + zy / 2 - d, s = 2 * before_h + zy % 2 - h;
                                    if (r < 0 || r >= KERNEL_D || s < 0 || s >= KERNEL_H) continue;
                                    const uint2 even = hot[(t + 1) / 2][t % 2], odd = hot[t / 2][1 - t % 2];
                                    const uint2 w = b[(r * KERNEL_H + s) * KERNEL_W + t];
                                    multiply_halves(sums[zy / 2][zy % 2], make_uint2(even.x, odd.x), make_uint2(even.y, odd.y),
                                                    w.x, w.y);
                                }
                        }
                }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int d = i / 4, h = i / 2 % 2, c = i % 2;
                if (!(in_plane[h] && channels[c] && 2 * slab + d < shape.depth)) continue;
                float* const to = corner + c * channel_floats + d * plane_floats + h * shape.width;
                const float left = unscale.times(sums[d][h][c]);
                const float right = unscale.times(sums[d][h][2 + c]);
                if (PAIRED) __stcs(reinterpret_cast<float2*>(to), make_float2(left, right));
                else to[0] = left;
                if (!PAIRED && 2 * column + 1 < shape.width) to[1] = right;
            }
        }
    }
}

// ---- launchers
struct Device {
    int multiprocessors, shared_bytes;
    Device() {
        int device;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
};

static int shared_bytes(const Shape& shape, bool two_weights) {
    return RING * 2 * shape.image_planes() * PLANE_BYTES + (two_weights ? 2 : 1) * WEIGHT_BYTES + REST_BYTES;
}
static int needed_bytes(const Shape& shape, bool streams, bool strict) {
    return streams ? StreamMemory(shape, strict).bytes : shared_bytes(shape, true);
}

// As many slabs an image as shared memory takes, in equal parts; and as many blocks as multiprocessors, or as samples where
// that keeps at least 95% of the multiprocessors busy: whole samples need no second pass over their segments' sums.
static Shape make_shape(int64_t batch, int depth, int height, int width, bool streams = false, bool strict = false) {
    const Device device;
    Shape s;
    s.batch = batch, s.depth = depth, s.height = height, s.width = width;
    s.slabs = (depth - KERNEL_D + 1) / 2, s.rows = (height - KERNEL_H + 1) / 2, s.columns = (width - KERNEL_W + 1) / 2;
    s.image_slabs = s.slabs;
    while (s.image_slabs > 1 && needed_bytes(s, streams, strict) > device.shared_bytes) --s.image_slabs;
    s.slab_parts = ceil_div(s.slabs, s.image_slabs), s.image_slabs = ceil_div(s.slabs, s.slab_parts);
    s.image_columns = s.columns <= WHOLE_WINDOWS ? s.columns : PART_WINDOWS;
    s.column_parts = ceil_div(s.columns, s.image_columns);
    const int64_t images = s.images(), waves = (images + device.multiprocessors - 1) / device.multiprocessors;
    const int64_t whole = (images + waves - 1) / waves;
    const bool busy = whole * 20 >= 19 * static_cast<int64_t>(device.multiprocessors);
    if (images == batch && images % whole == 0 && busy) s.blocks = whole;
    else s.blocks = images * s.rows < device.multiprocessors ? images * s.rows : device.multiprocessors;
    return s;
}

// How many segments write partial sums; 0 where a sample is one, and its result goes to its place at once.
int64_t count_partial_sums(int64_t batch, int depth, int height, int width, bool streams, bool strict) {
    const Shape shape = make_shape(batch, depth, height, width, streams, strict);
    if (shape.whole_images()) return shape.images() == batch ? 0 : shape.images();
    return shape.images() + shape.blocks;
}

#if FITS_COPY_ENGINE

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's cuTensorMapEncodeTiled, without linking the driver; null if it has none.
static Encode find_encode() {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(encode) : nullptr;
}

// A tensor map of x, in boxes of a stage. What lies outside of x, and channels that do not exist, become zeros. The driver
// needs a context in this thread, which may be autograd's: a call of the runtime must come first.
static cudaError_t describe(const float* x, const Shape& s, const StreamMemory& memory, CUtensorMap* map) {
    static const Encode encode = find_encode();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t width = s.width, height = s.height, depth = s.depth, batch = s.batch;
    const cuuint64_t sizes[5] = {width, height, depth, IN_CHANNELS, batch};
    const cuuint64_t strides[4] = {width * 4, width * height * 4, width * height * depth * 4,
                                   width * height * depth * IN_CHANNELS * 4};
    const cuuint32_t box[5] = {COLUMNS, 2, static_cast<cuuint32_t>(memory.stage_planes), CHANNELS, 1};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<float*>(x), sizes, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <bool STRICT, bool PLACES>
static cudaError_t launch_stream(const Shape& shape, const Tensors& tensors, const Result& result, cudaStream_t stream) {
    const StreamMemory memory(shape, STRICT);
    const auto kernel = stream_max_mean<STRICT, PLACES>;
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory.bytes);
    if (error == cudaSuccess) error = describe(tensors.x, shape, memory, &map);
    if (error == cudaSuccess) kernel<<<shape.blocks, STREAM_THREADS, memory.bytes, stream>>>(map, shape, tensors, result);
    return error;
}

static cudaError_t launch_stream_gradient(const Shape& shape, const Tensors& tensors, cudaStream_t stream) {
    const StreamMemory memory(shape, false);
    CUtensorMap map;
    cudaError_t error =
        cudaFuncSetAttribute(stream_weight_gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, memory.bytes);
    if (error == cudaSuccess) error = describe(tensors.x, shape, memory, &map);
    if (error == cudaSuccess)
        stream_weight_gradient<<<shape.blocks, STREAM_THREADS, memory.bytes, stream>>>(map, shape, tensors.places,
                                                                                       tensors.gradients);
    return error;
}

static cudaError_t launch_streams(const Shape& shape, const Tensors& tensors, const Result& result, bool strict,
                                  cudaStream_t stream) {
    if (strict) return launch_stream<true, false>(shape, tensors, result, stream);
    if (!tensors.gradients) return launch_stream<false, false>(shape, tensors, result, stream);
    const cudaError_t error = launch_stream<false, true>(shape, tensors, result, stream);
    return error == cudaSuccess ? launch_stream_gradient(shape, tensors, stream) : error;
}

#else  // nobody calls it

static cudaError_t launch_streams(const Shape&, const Tensors&, const Result&, bool, cudaStream_t) {
    return cudaErrorNotSupported;
}

#endif

template <bool STRICT, bool TRAINING>
static cudaError_t launch(const Shape& shape, const Tensors& tensors, const Result& result, cudaStream_t stream) {
    const int bytes = shared_bytes(shape, STRICT || TRAINING);
    const auto kernel = conv_max_mean<STRICT, TRAINING>;
    const bool aligned = shape.width % 4 == 0 && reinterpret_cast<uintptr_t>(tensors.x) % 16 == 0;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) kernel<<<shape.blocks, THREADS, bytes, stream>>>(shape, tensors, result, aligned);
    return error;
}

// out (batch,) with a bias of 1 or OUT_CHANNELS values, (batch, OUT_CHANNELS) where it is null. `gradients` (batch, WEIGHTS)
// and `places` may be null, but gradients of streaming kernels need places; partial_* are null where count_partial_sums is 0.
cudaError_t launch_conv_max_mean(const float* x, const float* weight, const float* conv_bias, const float* bias, int biases,
                                 double divisor, bool streams, bool strict, float* partial_sums, float* partial_gradients,
                                 float* out, float* gradients, void* places, int64_t batch, int depth, int height, int width,
                                 cudaStream_t stream) {
    const Shape shape = make_shape(batch, depth, height, width, streams, strict);
    const float windows = static_cast<float>(static_cast<int64_t>(shape.slabs) * shape.rows * shape.columns);
    const Result result = {conv_bias, bias, biases, {static_cast<float>(divisor)}, windows, out};
    const Tensors tensors = {x, weight, partial_sums, partial_gradients ? partial_gradients : gradients,
                             static_cast<uint32_t*>(places)};
    const cudaError_t error = streams     ? launch_streams(shape, tensors, result, strict, stream)
                              : gradients ? launch<false, true>(shape, tensors, result, stream)
                              : strict    ? launch<true, false>(shape, tensors, result, stream)
                                          : launch<false, false>(shape, tensors, result, stream);
    if (error != cudaSuccess) return error;
    if (partial_sums) finish_samples<<<batch, WARP, 0, stream>>>(partial_sums, shape, result);
    if (partial_gradients)
        add_segments<<<batch * WEIGHT_BLOCKS, SUM_THREADS, 0, stream>>>(partial_gradients, gradients, shape);
    return cudaSuccess;
}

static float gradient_scale(const Shape& shape, double divisor) {
    return static_cast<float>(1 / (static_cast<double>(shape.slabs) * shape.rows * shape.columns * divisor));
}

void launch_weighted_sum(const float* gradients, const float* grad, bool by_sample, double divisor, float* grad_weight,
                         int64_t batch, int depth, int height, int width, cudaStream_t stream) {
    const Shape shape = make_shape(batch > 0 ? batch : 1, depth, height, width);
    weighted_sum<<<ceil_div(WEIGHTS, SUM_COLUMNS), SUM_COLUMNS * SUM_ROWS, 0, stream>>>(
        gradients, Upstream{grad, by_sample}, batch, gradient_scale(shape, divisor), grad_weight);
}

void launch_input_gradient(const void* places, const float* weight, const float* grad, bool by_sample, double divisor,
                           float* grad_x, int64_t batch, int depth, int height, int width, cudaStream_t stream) {
    const Shape shape = make_shape(batch, depth, height, width);
    const int64_t lines = batch * ceil_div(depth, 2);
    const int multiprocessors = Device().multiprocessors;
    const bool paired = width % 2 == 0 && reinterpret_cast<uintptr_t>(grad_x) % 8 == 0;
    const auto kernel = paired ? input_gradient<true> : input_gradient<false>;
    kernel<<<lines < multiprocessors ? lines : multiprocessors, GRADIENT_THREADS, 0, stream>>>(
        static_cast<const uint32_t*>(places), weight, Upstream{grad, by_sample}, shape, gradient_scale(shape, divisor), grad_x);
}

#else  // nobody calls these

int64_t count_partial_sums(int64_t, int, int, int, bool, bool) { return 0; }
cudaError_t launch_conv_max_mean(const float*, const float*, const float*, const float*, int, double, bool, bool, float*,
                                 float*, float*, float*, void*, int64_t, int, int, int, cudaStream_t) {
    return cudaErrorNotSupported;
}
void launch_weighted_sum(const float*, const float*, bool, double, float*, int64_t, int, int, int, cudaStream_t) {}
void launch_input_gradient(const void*, const float*, const float*, bool, double, float*, int64_t, int, int, int,
                           cudaStream_t) {}

#endif

// ---- v3's kernels, in plain fp32, for what does not fit: other channels, kernels and windows, and strict training
namespace general {
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <type_traits>

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

// The place of a window's maximum, in the order of the scan.
constexpr int64_t TAPS = (int64_t)KERNEL_D * KERNEL_H * KERNEL_W, POSITIONS = (int64_t)POOL_D * POOL_H * POOL_W;
using Place = std::conditional_t<POSITIONS <= 256, uint8_t, int32_t>;

// Output channels in groups of equal size, at most 8: as many accumulators as a thread has.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 8), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUT_PITCH = round_up(OUT_BLOCK, 4);  // of a tap's weights in shared memory, for 16-byte reads

// A thread works on a part of its window at a time: at most 8 positions that follow each other in the order of the scan.
constexpr int PART_W = largest_divisor(POOL_W, 8);
constexpr int PART_H = PART_W == POOL_W ? largest_divisor(POOL_H, 8 / PART_W) : 1;
constexpr int PART_D = PART_H == POOL_H && PART_W == POOL_W ? largest_divisor(POOL_D, 8 / (PART_W * PART_H)) : 1;
constexpr int PART = PART_D * PART_H * PART_W;

// What a block holds in shared memory at a time is a slice of the weights: of the input channels c and of the kernel's places
// r, s, t. Slices divide evenly, so they need no bounds. At common sizes all weights of 8 output channels are one slice.
constexpr int WEIGHT_FLOATS = 2304;
constexpr int SLICE_T = largest_divisor(KERNEL_W, 16);  // a row of the input is in registers, too
constexpr int SLICE_S = largest_divisor(KERNEL_H, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T));
constexpr int SLICE_R = largest_divisor(KERNEL_D, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T * SLICE_S));
constexpr int SLICE_C = largest_divisor(IN_CHANNELS, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T * SLICE_S * SLICE_R));

__device__ float warp_sum(float value) {  // in lane 0
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

// The sums of values[k] over the block, for each k, returned in thread k. The order of additions is fixed, so the bits are
// too. The caller puts a barrier between two calls.
template <int N>
__device__ float block_sums(const float (&values)[N]) {
    static_assert(N <= THREADS, "a thread for each sum");
    __shared__ float warp_sums[N][WARPS];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const float sum = warp_sum(values[k]);
        if (threadIdx.x % WARP == 0) warp_sums[k][threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < N)
        for (int warp = 0; warp < WARPS; ++warp) sum += warp_sums[threadIdx.x][warp];
    return sum;
}

// x (batch, IN_CHANNELS, depth, height, width), and how many whole windows fit into it. A channel has less than 2^31 pixels.
struct Volume {
    const float* x;
    int64_t batch;
    int depth, height, width, slabs, rows, columns;
    Volume(const float* x, int64_t batch, int depth, int height, int width)
        : x(x), batch(batch), depth(depth), height(height), width(width), slabs((depth - KERNEL_D + 1) / POOL_D),
          rows((height - KERNEL_H + 1) / POOL_H), columns((width - KERNEL_W + 1) / POOL_W) {}
    __host__ __device__ unsigned windows() const { return slabs * rows * columns; }
    __host__ __device__ unsigned pixels() const { return depth * height * width; }
    __host__ __device__ unsigned chunks() const { return (windows() + THREADS - 1) / THREADS; }        // of windows
    __host__ __device__ unsigned pixel_chunks() const { return (pixels() + THREADS - 1) / THREADS; }
    // Offset of channel c's pixel at (d, h, w).
    __device__ int64_t at(int64_t sample, int c, int d, int h, int w) const {
        return (((sample * IN_CHANNELS + c) * depth + d) * height + h) * width + w;
    }
};

// The divisor, and what is done about its sign.
struct Division {
    float divisor;
    __device__ float sign() const { return copysignf(1.0f, divisor); }
    __device__ float average(float sum, unsigned windows, float conv_bias) const {
        return (sum / windows + sign() * conv_bias) / fabsf(divisor);
    }
};

struct Peak {
    float value;
    int place;
};

// The maximum, as PyTorch finds it: the last NaN, else the first of the largest.
__device__ __forceinline__ void scan(Peak& peak, float value, int place) {
    if (value > peak.value || value != value) peak = {value, place};
}

// A window's maximum in each of OUT_BLOCK channels. All threads of the block call it; those without a window get nothing.
__device__ __forceinline__ void convolve_window(const Volume& volume, const float* __restrict__ weight, float sign,
                                                int64_t sample, unsigned window, int first_out, Peak (&peaks)[OUT_BLOCK]) {
    __shared__ alignas(16) float weights[SLICE_C][SLICE_R][SLICE_S][SLICE_T][OUT_PITCH];
    const bool exists = window < volume.windows();
    const int column = window % volume.columns, row = window / volume.columns % volume.rows;
    const int slab = window / volume.columns / volume.rows;
#pragma unroll
    for (int o = 0; o < OUT_BLOCK; ++o) peaks[o] = {-INFINITY, 0};

    // Loops of one nest are not indented.
#pragma unroll 1
    for (int first = 0; first < POSITIONS; first += PART) {
        const int d = slab * POOL_D + first / (POOL_H * POOL_W), h = row * POOL_H + first / POOL_W % POOL_H;
        const int w = column * POOL_W + first % POOL_W;
        float sums[OUT_BLOCK][PART_D][PART_H][PART_W] = {};
#pragma unroll 1
        for (int c0 = 0; c0 < IN_CHANNELS; c0 += SLICE_C)
#pragma unroll 1
        for (int r0 = 0; r0 < KERNEL_D; r0 += SLICE_R)
#pragma unroll 1
        for (int s0 = 0; s0 < KERNEL_H; s0 += SLICE_S)
#pragma unroll 1
        for (int t0 = 0; t0 < KERNEL_W; t0 += SLICE_T) {
            __syncthreads();  // the slice before has been read
#pragma unroll 1
            for (int k = threadIdx.x; k < SLICE_C * SLICE_R * SLICE_S * SLICE_T * OUT_PITCH; k += THREADS) {
                const int o = k % OUT_PITCH, t = k / OUT_PITCH % SLICE_T, s = k / OUT_PITCH / SLICE_T % SLICE_S;
                const int r = k / OUT_PITCH / SLICE_T / SLICE_S % SLICE_R, c = k / OUT_PITCH / SLICE_T / SLICE_S / SLICE_R;
                const int64_t channel = (int64_t)(first_out + o) * IN_CHANNELS + c0 + c;
                const int64_t from = ((channel * KERNEL_D + r0 + r) * KERNEL_H + s0 + s) * KERNEL_W + t0 + t;
                weights[c][r][s][t][o] = o < OUT_BLOCK && first_out + o < OUT_CHANNELS ? sign * weight[from] : 0.0f;
            }
            __syncthreads();
            if (exists)
#pragma unroll 1
            for (int c = 0; c < SLICE_C; ++c)
#pragma unroll 1
            for (int r = 0; r < SLICE_R; ++r)
#pragma unroll 1
            for (int s = 0; s < SLICE_S; ++s) {
                const float* corner = volume.x + volume.at(sample, c0 + c, d + r0 + r, h + s0 + s, w + t0);
                float values[PART_D][PART_H][PART_W + SLICE_T - 1];
#pragma unroll
                for (int u = 0; u < PART_D; ++u)
#pragma unroll
                for (int v = 0; v < PART_H; ++v)
#pragma unroll
                for (int i = 0; i < PART_W + SLICE_T - 1; ++i)
                    values[u][v][i] = corner[((int64_t)u * volume.height + v) * volume.width + i];
#pragma unroll
                for (int t = 0; t < SLICE_T; ++t)
#pragma unroll
                for (int o = 0; o < OUT_BLOCK; ++o)
#pragma unroll
                for (int i = 0; i < PART; ++i) {
                    const int u = i / (PART_H * PART_W), v = i / PART_W % PART_H;
                    sums[o][u][v][i % PART_W] += weights[c][r][s][t][o] * values[u][v][i % PART_W + t];
                }
            }
        }
#pragma unroll
        for (int o = 0; o < OUT_BLOCK; ++o)
#pragma unroll
        for (int i = 0; i < PART; ++i)
            scan(peaks[o], sums[o][i / (PART_H * PART_W)][i / PART_W % PART_H][i % PART_W], first + i);
    }
}

// A sample's result from the sums of its blocks, (chunks, OUT_CHANNELS in groups): the average of each channel to
// out (batch, OUT_CHANNELS), or, with a bias of `biases` values, the sum of all to out (batch,).
__device__ void finish_sample(const Volume& volume, const float* partial_sums, const float* __restrict__ conv_bias,
                              const float* __restrict__ bias, int biases, Division division, int64_t sample, float* out) {
    __shared__ float warp_totals[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float total = 0.0f;
    for (int o = warp; o < OUT_CHANNELS; o += WARPS) {
        float sum = 0.0f;
        for (unsigned chunk = lane; chunk < volume.chunks(); chunk += WARP)
            sum += partial_sums[((sample * volume.chunks() + chunk) * OUT_GROUPS + o / OUT_BLOCK) * OUT_BLOCK + o % OUT_BLOCK];
        const float average = division.average(warp_sum(sum), volume.windows(), conv_bias[o]);
        if (bias) total += average + bias[biases == 1 ? 0 : o];
        else if (lane == 0) out[sample * OUT_CHANNELS + o] = average;
    }
    if (!bias) return;
    if (lane == 0) warp_totals[warp] = total;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int other = 1; other < WARPS; ++other) total += warp_totals[other];
    out[sample] = total;
}

// `partial_sums` has OUT_BLOCK places for each block, `arrivals` a zero for each sample. With PLACES, those of the maxima go to
// places (batch, OUT_CHANNELS, windows).
template <bool PLACES>
__global__ void __launch_bounds__(THREADS, 4)
    conv_max_mean(Volume volume, const float* __restrict__ weight, const float* __restrict__ conv_bias,
                  const float* __restrict__ bias, int biases, Division division, float* partial_sums, unsigned* arrivals,
                  float* __restrict__ out, Place* __restrict__ places) {
    const int first_out = blockIdx.x % OUT_GROUPS * OUT_BLOCK;
    const int64_t sample = blockIdx.x / OUT_GROUPS / volume.chunks();
    const unsigned window = blockIdx.x / OUT_GROUPS % volume.chunks() * THREADS + threadIdx.x;
    Peak peaks[OUT_BLOCK];
    convolve_window(volume, weight, division.sign(), sample, window, first_out, peaks);

    float maxima[OUT_BLOCK];
#pragma unroll
    for (int o = 0; o < OUT_BLOCK; ++o) {
        const bool exists = window < volume.windows() && first_out + o < OUT_CHANNELS;
        maxima[o] = exists ? peaks[o].value : 0.0f;
        if (PLACES && exists)
            places[(sample * OUT_CHANNELS + first_out + o) * volume.windows() + window] = static_cast<Place>(peaks[o].place);
    }
    const float sum = block_sums(maxima);
    if (threadIdx.x < OUT_BLOCK) partial_sums[(int64_t)blockIdx.x * OUT_BLOCK + threadIdx.x] = sum;
    __syncthreads();
    // The first fence makes this block's sums visible before its arrival; the last block's second one, the others' sums to it.
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrivals + sample, 1u) == volume.chunks() * OUT_GROUPS - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    finish_sample(volume, partial_sums, conv_bias, bias, biases, division, sample, out);
}

// Gradients of the averages: one a sample, or one a channel of it.
struct Upstream {
    const float* grad;
    bool by_sample;
    __device__ float at(int64_t sample, int o) const { return grad[by_sample ? sample : sample * OUT_CHANNELS + o]; }
};

// A slice of the taps has a sum each in a thread's registers.
constexpr int GRAD_T = largest_divisor(KERNEL_W, 32), GRAD_S = largest_divisor(KERNEL_H, 32 / GRAD_T);
constexpr int GRAD_R = largest_divisor(KERNEL_D, 32 / (GRAD_T * GRAD_S)), GRAD_TAPS = GRAD_T * GRAD_S * GRAD_R;
constexpr int64_t GRAD_SLICES = TAPS / GRAD_TAPS, WEIGHTS = OUT_CHANNELS * IN_CHANNELS * TAPS;

// terms (splits, OUT_CHANNELS, IN_CHANNELS, TAPS); split k has the samples k, k + splits, ...
__global__ void __launch_bounds__(THREADS)
    parameter_grad(Volume volume, const Place* __restrict__ places, Upstream upstream, float* __restrict__ terms, int splits) {
    const int slice = blockIdx.x % GRAD_SLICES, c = blockIdx.x / GRAD_SLICES % IN_CHANNELS;
    const int o = blockIdx.x / GRAD_SLICES / IN_CHANNELS % OUT_CHANNELS;
    const int64_t split = blockIdx.x / GRAD_SLICES / IN_CHANNELS / OUT_CHANNELS;
    const int t0 = slice % (KERNEL_W / GRAD_T) * GRAD_T, s0 = slice / (KERNEL_W / GRAD_T) % (KERNEL_H / GRAD_S) * GRAD_S;
    const int r0 = slice / (KERNEL_W / GRAD_T) / (KERNEL_H / GRAD_S) * GRAD_R;
    float sums[GRAD_TAPS] = {};
    for (int64_t sample = split; sample < volume.batch; sample += splits) {
        const float factor = upstream.at(sample, o);
        const Place* from = places + (sample * OUT_CHANNELS + o) * volume.windows();
#pragma unroll 2
        for (unsigned window = threadIdx.x; window < volume.windows(); window += THREADS) {
            const int place = from[window];
            const int d = window / volume.columns / volume.rows * POOL_D + place / (POOL_H * POOL_W);
            const int h = window / volume.columns % volume.rows * POOL_H + place / POOL_W % POOL_H;
            const int w = window % volume.columns * POOL_W + place % POOL_W;
            const float* corner = volume.x + volume.at(sample, c, d + r0, h + s0, w + t0);
#pragma unroll
            for (int k = 0; k < GRAD_TAPS; ++k) {
                const int r = k / (GRAD_S * GRAD_T), s = k / GRAD_T % GRAD_S, t = k % GRAD_T;
                sums[k] += factor * corner[((int64_t)r * volume.height + s) * volume.width + t];
            }
        }
    }
    const float sum = block_sums(sums);
    if (threadIdx.x >= GRAD_TAPS) return;
    const int r = threadIdx.x / (GRAD_S * GRAD_T), s = threadIdx.x / GRAD_T % GRAD_S, t = threadIdx.x % GRAD_T;
    const int64_t tap = ((int64_t)(r0 + r) * KERNEL_H + s0 + s) * KERNEL_W + t0 + t;
    terms[split * WEIGHTS + ((int64_t)o * IN_CHANNELS + c) * TAPS + tap] = sum;
}

// grad_weight = scale * sum over splits of terms[split]
__global__ void __launch_bounds__(THREADS)
    add_splits(const float* __restrict__ terms, float* __restrict__ grad_weight, int splits, float scale) {
    const int64_t place = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (place >= WEIGHTS) return;
    float sum = 0.0f;
    for (int64_t split = 0; split < splits; ++split) sum += terms[split * WEIGHTS + place];
    grad_weight[place] = scale * sum;
}

// grad_x, gathered: every pixel asks, for each tap and output channel, whether the position that it reached through it was its
// window's maximum. A thread has a pixel in IN_BLOCK channels, so an answer serves all of them.
constexpr int IN_GROUPS = ceil_div(IN_CHANNELS, 8), IN_BLOCK = ceil_div(IN_CHANNELS, IN_GROUPS);
constexpr int OUT_SLICE = 128;  // output channels whose weights are in shared memory at a time

__global__ void __launch_bounds__(THREADS)
    input_grad(Volume volume, const float* __restrict__ weight, const Place* __restrict__ places, Upstream upstream,
               float scale, float* __restrict__ grad_x) {
    __shared__ alignas(16) float weights[OUT_SLICE][round_up(IN_BLOCK, 4)];
    const unsigned chunks = volume.pixel_chunks(), pixel = blockIdx.x % chunks * THREADS + threadIdx.x;
    const int first_channel = blockIdx.x / chunks % IN_GROUPS * IN_BLOCK;
    const int64_t sample = blockIdx.x / chunks / IN_GROUPS, windows = volume.windows();
    const int x = pixel % volume.width, y = pixel / volume.width % volume.height, z = pixel / volume.width / volume.height;
    float sums[IN_BLOCK] = {};
#pragma unroll 1
    for (int r = 0; r < KERNEL_D; ++r)
#pragma unroll 1
    for (int s = 0; s < KERNEL_H; ++s)
#pragma unroll 1
    for (int t = 0; t < KERNEL_W; ++t) {
        const int d = z - r, h = y - s, w = x - t;  // the convolution's position
        const bool exists = d >= 0 && d / POOL_D < volume.slabs && h >= 0 && h / POOL_H < volume.rows && w >= 0 &&
                            w / POOL_W < volume.columns;
        const int place = (d % POOL_D * POOL_H + h % POOL_H) * POOL_W + w % POOL_W;
        const int window = (d / POOL_D * volume.rows + h / POOL_H) * volume.columns + w / POOL_W;
        const Place* from = places + sample * OUT_CHANNELS * windows + (exists ? window : 0);
        const int64_t tap = ((int64_t)r * KERNEL_H + s) * KERNEL_W + t;
#pragma unroll 1
        for (int first_out = 0; first_out < OUT_CHANNELS; first_out += OUT_SLICE) {
            const int outs = smaller(OUT_SLICE, OUT_CHANNELS - first_out);
            __syncthreads();  // the weights before have been read
            for (int k = threadIdx.x; k < outs * IN_BLOCK; k += THREADS) {
                const int o = first_out + k / IN_BLOCK, c = first_channel + k % IN_BLOCK;
                weights[k / IN_BLOCK][k % IN_BLOCK] =
                    c < IN_CHANNELS ? upstream.at(sample, o) * weight[((int64_t)o * IN_CHANNELS + c) * TAPS + tap] : 0.0f;
            }
            __syncthreads();
#pragma unroll 4
            for (int o = 0; o < outs; ++o) {
                const bool is_maximum = exists && from[(first_out + o) * windows] == place;
#pragma unroll
                for (int c = 0; c < IN_BLOCK; ++c)
                    if (is_maximum) sums[c] += weights[o][c];
            }
        }
    }
    if (pixel >= volume.pixels()) return;
#pragma unroll
    for (int c = 0; c < IN_BLOCK; ++c)
        if (first_channel + c < IN_CHANNELS)
            grad_x[(sample * IN_CHANNELS + first_channel + c) * volume.pixels() + pixel] = scale * sums[c];
}

// How many blocks the launches below take, and how much memory between them.
int64_t forward_blocks(int64_t batch, int depth, int height, int width) {
    return batch * Volume(nullptr, batch, depth, height, width).chunks() * OUT_GROUPS;
}
int64_t forward_sums(int64_t blocks) { return blocks * OUT_BLOCK; }
int64_t parameter_blocks(int splits) { return GRAD_SLICES * IN_CHANNELS * OUT_CHANNELS * splits; }
int64_t input_blocks(int64_t batch, int depth, int height, int width) {
    return batch * IN_GROUPS * Volume(nullptr, batch, depth, height, width).pixel_chunks();
}
// Splits of the batch for 2000 blocks or so. It depends on the shapes alone, and with it the order of additions.
int parameter_splits(int64_t batch) {
    const int64_t wanted = (2000 + parameter_blocks(1) - 1) / parameter_blocks(1);
    return static_cast<int>(wanted < batch ? wanted : batch);
}

// out (batch,) with a bias of 1 or OUT_CHANNELS values, (batch, OUT_CHANNELS) where it is null; `places` may be null.
void launch_forward(const float* x, const float* weight, const float* conv_bias, const float* bias, int biases, double divisor,
                    float* partial_sums, unsigned* arrivals, float* out, void* places, int64_t batch, int depth, int height,
                    int width, cudaStream_t stream) {
    const auto kernel = places ? conv_max_mean<true> : conv_max_mean<false>;
    kernel<<<forward_blocks(batch, depth, height, width), THREADS, 0, stream>>>(
        Volume(x, batch, depth, height, width), weight, conv_bias, bias, biases, Division{static_cast<float>(divisor)},
        partial_sums, arrivals, out, static_cast<Place*>(places));
}

static float gradient_scale(const Volume& volume, double divisor) {
    return static_cast<float>(1.0 / (volume.windows() * divisor));
}

void launch_parameter_grad(const float* x, const void* places, const float* grad, bool by_sample, double divisor, float* terms,
                           float* grad_weight, int64_t batch, int depth, int height, int width, cudaStream_t stream) {
    const Volume volume(x, batch, depth, height, width);
    const int splits = parameter_splits(batch);
    if (splits > 0)
        parameter_grad<<<parameter_blocks(splits), THREADS, 0, stream>>>(volume, static_cast<const Place*>(places),
                                                                        Upstream{grad, by_sample}, terms, splits);
    add_splits<<<(WEIGHTS + THREADS - 1) / THREADS, THREADS, 0, stream>>>(terms, grad_weight, splits,
                                                                         gradient_scale(volume, divisor));
}

void launch_input_grad(const float* weight, const void* places, const float* grad, bool by_sample, double divisor,
                       float* grad_x, int64_t batch, int depth, int height, int width, cudaStream_t stream) {
    const Volume volume(nullptr, batch, depth, height, width);
    input_grad<<<input_blocks(batch, depth, height, width), THREADS, 0, stream>>>(
        volume, weight, static_cast<const Place*>(places), Upstream{grad, by_sample}, gradient_scale(volume, divisor), grad_x);
}
}  // namespace general
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

// Messages are put together without streams: those crash in a library that is linked with a libstdc++ of its own.
static std::string text(const char* value) { return value; }
static std::string text(at::ScalarType value) { return c10::toString(value); }
static std::string text(const c10::Device& value) { return value.str(); }
template <class T>
static std::enable_if_t<std::is_arithmetic_v<T>, std::string> text(T value) { return std::to_string(value); }
static std::string text(at::IntArrayRef values) {
    std::string list;
    for (const int64_t value : values) list += (list.empty() ? "[" : ", ") + std::to_string(value);
    return list.empty() ? "[]" : list + "]";
}
template <class... Parts>
static std::string message(const Parts&... parts) { return (text(parts) + ...); }

namespace general {
int64_t forward_blocks(int64_t batch, int depth, int height, int width);
int64_t forward_sums(int64_t blocks);
int64_t parameter_blocks(int splits);
int64_t input_blocks(int64_t batch, int depth, int height, int width);
int parameter_splits(int64_t batch);
void launch_forward(const float*, const float*, const float*, const float*, int, double, float*, unsigned*, float*, void*,
                    int64_t, int, int, int, cudaStream_t);
void launch_parameter_grad(const float*, const void*, const float*, bool, double, float*, float*, int64_t, int, int, int,
                           cudaStream_t);
void launch_input_grad(const float*, const void*, const float*, bool, double, float*, int64_t, int, int, int, cudaStream_t);
}  // namespace general
int64_t count_partial_sums(int64_t batch, int depth, int height, int width, bool streams, bool strict);
cudaError_t launch_conv_max_mean(const float*, const float*, const float*, const float*, int, double, bool, bool, float*,
                                 float*, float*, float*, void*, int64_t, int, int, int, cudaStream_t);
void launch_weighted_sum(const float*, const float*, bool, double, float*, int64_t, int, int, int, cudaStream_t);
void launch_input_gradient(const void*, const float*, const float*, bool, double, float*, int64_t, int, int, int,
                           cudaStream_t);

constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int64_t OUTPUTS = 16;  // of the tensor-core kernels
#define FITS_TENSOR_CORES                                                                                                      \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D <= 3 && KERNEL_H <= 3 && KERNEL_W <= 3 && POOL_D == 2 &&               \
     POOL_H == 2 && POOL_W == 2)
#define FITS_COPY_ENGINE (FITS_TENSOR_CORES && KERNEL_D == 3 && KERNEL_H == 3 && KERNEL_W == 3)

// PyTorch's setting for convolutions, as its own read it at each call.
static bool is_strict() { return !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

// What a caller was told of the setting decides on shapes, and a compiled model was told when it was compiled.
static void check_strict(bool strict) {
    if (strict == is_strict()) return;
    const char* were = strict ? "strict float32" : "TF32";
    const char* now = strict ? "permits TF32" : "forbids it";
    TORCH_CHECK(false, message("conv3d_div_max_gap_bias_sum: called or compiled for ", were,
                               " convolutions, but torch.backends.cudnn.conv.fp32_precision now ", now,
                               "; after torch.compiler.reset() a model is compiled anew"));
}

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits,
                message("conv3d_div_max_gap_bias_sum: expected ", name, " as a float32 CUDA tensor of shape ", shape,
                        " (-1: any), got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device()));
}

static void check_blocks(int64_t blocks) {
    TORCH_CHECK(blocks < (1ll << 31),
                message("conv3d_div_max_gap_bias_sum: the batch needs ", blocks, " blocks, more than a grid has"));
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(), message("conv3d_div_max_gap_bias_sum: expected all on ",
                                                              expected.device(), ", got ", name, " on ", tensor.device()));
}

// The input and weight of a pass, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    int64_t batch, depth, height, width, slabs, rows, columns;
    at::Tensor x, weight;
    c10::cuda::CUDAGuard guard;
    cudaStream_t stream;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, at::IntArrayRef pool) : guard(checked(x_in, weight_in, pool)) {
        x = x_in.contiguous(), weight = weight_in.contiguous();
        batch = x.size(0), depth = x.size(2), height = x.size(3), width = x.size(4);
        slabs = (depth - KERNEL_D + 1) / POOL_D, rows = (height - KERNEL_H + 1) / POOL_H;
        columns = (width - KERNEL_W + 1) / POOL_W;
        stream = c10::cuda::getCurrentCUDAStream();
        int major = 0, minor = 0;
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device()));
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, x.get_device()));
        TORCH_CHECK(major == 9 && minor == 0,
                    message("conv3d_div_max_gap_bias_sum v5: expected a GPU of compute capability 9.0 (Hopper), got ", major,
                            ".", minor, "; v4_tensor_core runs on 8.0 and later"));
    }

    // Whether the copy engine can fetch x, 16 bytes at a time, for the kernels that are made for it.
    bool streams() const {
        return FITS_COPY_ENGINE && width % 4 == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef pool) {
        check("x", x, {-1, IN_CHANNELS, -1, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W});
        check_device(x, "weight", weight);
        TORCH_CHECK(pool == at::IntArrayRef({POOL_D, POOL_H, POOL_W}),
                    message("conv3d_div_max_gap_bias_sum: built for a pooling window of ", POOL_D, " x ", POOL_H, " x ", POOL_W,
                            ", called with ", pool));
        TORCH_CHECK(x.size(2) >= KERNEL_D + POOL_D - 1 && x.size(3) >= KERNEL_H + POOL_H - 1 &&
                        x.size(4) >= KERNEL_W + POOL_W - 1,
                    message("conv3d_div_max_gap_bias_sum: a volume of ", x.size(2), " x ", x.size(3), " x ", x.size(4),
                            " is too small for a kernel of ", KERNEL_D, " x ", KERNEL_H, " x ", KERNEL_W,
                            " and a pooling window of ", POOL_D, " x ", POOL_H, " x ", POOL_W));
        TORCH_CHECK(x.size(2) * x.size(3) * x.size(4) < (1ll << 31),
                    message("conv3d_div_max_gap_bias_sum: expected less than 2^31 pixels a channel, got sizes ", x.sizes()));
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }

    // The places of the maxima, as the general kernels keep them: a byte for each channel and window, or four where a window
    // has more than 256 positions; and as the tensor-core kernels do, 16 bytes for each window.
    static constexpr at::ScalarType PLACE = int64_t(POOL_D) * POOL_H * POOL_W <= 256 ? at::kByte : at::kInt;
    at::Tensor general_places() const {
        return at::empty({batch, OUT_CHANNELS, slabs, rows, columns}, x.options().dtype(PLACE));
    }
    at::Tensor tensor_core_places(bool keep) const {
        return at::empty({keep ? batch : 0, slabs, rows, columns, 4, 4}, x.options().dtype(at::kByte));
    }

    at::Tensor checked_general_places(const at::Tensor& places) const {
        return checked_places(places, PLACE, {batch, OUT_CHANNELS, slabs, rows, columns});
    }
    at::Tensor checked_tensor_core_places(const at::Tensor& places) const {
        return checked_places(places, at::kByte, {batch, slabs, rows, columns, 4, 4});
    }
    at::Tensor checked_places(const at::Tensor& places, at::ScalarType type, at::IntArrayRef shape) const {
        TORCH_CHECK(places.scalar_type() == type && places.sizes() == shape,
                    message("conv3d_div_max_gap_bias_sum: expected the places of the forward pass of x, ", type, " of shape ",
                            shape, ", got ", places.scalar_type(), " of shape ", places.sizes()));
        check_device(x, "places", places);
        return places.contiguous();
    }

    at::Tensor checked_grad(const at::Tensor& grad) const {
        TORCH_CHECK(grad.scalar_type() == at::kFloat && (grad.numel() == batch || grad.numel() == batch * OUT_CHANNELS),
                    message("conv3d_div_max_gap_bias_sum: expected ", batch, " or ", batch * OUT_CHANNELS,
                            " float32 gradients, got ", grad.scalar_type(), " ", grad.sizes()));
        check_device(x, "grad", grad);
        return grad.contiguous();
    }
};

// The biases and the divisor of a forward pass, checked, and its output: the sum of each sample (batch, 1, 1, 1), or, without a
// bias, the average of each channel (batch, OUT_CHANNELS, 1, 1, 1).
struct Output {
    at::Tensor conv_bias, bias, out;
    double divisor;

    Output(const Call& call, const at::Tensor& conv_bias_in, const std::optional<at::Tensor>& bias_in, double divisor)
        : divisor(divisor) {
        check("conv_bias", conv_bias_in, {OUT_CHANNELS});
        check_device(call.x, "conv_bias", conv_bias_in);
        conv_bias = conv_bias_in.contiguous();
        out = bias_in ? call.empty({call.batch, 1, 1, 1}) : call.empty({call.batch, OUT_CHANNELS, 1, 1, 1});
        if (!bias_in) return;
        TORCH_CHECK(bias_in->scalar_type() == at::kFloat && (bias_in->numel() == 1 || bias_in->numel() == OUT_CHANNELS),
                    message("conv3d_div_max_gap_bias_sum: expected a float32 bias of 1 or ", OUT_CHANNELS, " values, got ",
                            bias_in->scalar_type(), " ", bias_in->sizes()));
        check_device(call.x, "bias", *bias_in);
        bias = bias_in->contiguous();
    }
    const float* bias_pointer() const { return bias.defined() ? bias.const_data_ptr<float>() : nullptr; }
    int biases() const { return bias.defined() ? bias.numel() : 0; }
};

namespace general {

// `places` may be null.
static void forward(const Call& call, const Output& output, const at::Tensor* places) {
    const int64_t blocks = forward_blocks(call.batch, call.depth, call.height, call.width);
    check_blocks(blocks);
    at::Tensor partial_sums = call.empty({forward_sums(blocks)});
    at::Tensor arrivals = at::zeros({call.batch}, call.x.options().dtype(at::kInt));
    launch_forward(call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(),
                   output.conv_bias.const_data_ptr<float>(), output.bias_pointer(), output.biases(), output.divisor,
                   partial_sums.mutable_data_ptr<float>(), reinterpret_cast<unsigned*>(arrivals.mutable_data_ptr<int>()),
                   output.out.mutable_data_ptr<float>(), places ? places->mutable_data_ptr() : nullptr, call.batch, call.depth,
                   call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

static void weight_grad(const Call& call, const at::Tensor& grad, const at::Tensor& places, double divisor,
                        const at::Tensor& grad_weight) {
    const int splits = parameter_splits(call.batch);
    check_blocks(parameter_blocks(splits));
    at::Tensor terms = call.empty({splits, WEIGHTS});
    launch_parameter_grad(call.x.const_data_ptr<float>(), places.const_data_ptr(), grad.const_data_ptr<float>(),
                          grad.numel() == call.batch, divisor, terms.mutable_data_ptr<float>(),
                          grad_weight.mutable_data_ptr<float>(), call.batch, call.depth, call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

static void input_grad(const Call& call, const at::Tensor& grad, const at::Tensor& places, double divisor,
                       const at::Tensor& grad_x) {
    check_blocks(input_blocks(call.batch, call.depth, call.height, call.width));
    launch_input_grad(call.weight.const_data_ptr<float>(), places.const_data_ptr(), grad.const_data_ptr<float>(),
                      grad.numel() == call.batch, divisor, grad_x.mutable_data_ptr<float>(), call.batch, call.depth,
                      call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace general

// `grads` and `places` are written where they are not null; with `grads` the precision is TF32, and streaming kernels need
// `places`.
static void tensor_core_forward(const Call& call, const Output& output, bool strict, const at::Tensor* grads,
                                const at::Tensor* places) {
    check_blocks(call.batch * WEIGHTS);
    const int64_t segments =
        count_partial_sums(call.batch, call.depth, call.height, call.width, call.streams(), strict);
    at::Tensor partial_sums = call.empty({segments, OUTPUTS}), partial_grads = call.empty({grads ? segments : 0, WEIGHTS});
    C10_CUDA_CHECK(launch_conv_max_mean(
        call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(), output.conv_bias.const_data_ptr<float>(),
        output.bias_pointer(), output.biases(), output.divisor, call.streams(), strict,
        segments ? partial_sums.mutable_data_ptr<float>() : nullptr,
        segments && grads ? partial_grads.mutable_data_ptr<float>() : nullptr, output.out.mutable_data_ptr<float>(),
        grads ? grads->mutable_data_ptr<float>() : nullptr, places ? places->mutable_data_ptr() : nullptr, call.batch,
        call.depth, call.height, call.width, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// `strict` is for the autograd below. Without gradients no shape follows from it, and PyTorch's setting at the call decides.
at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias,
                   const std::optional<at::Tensor>& bias, double divisor, at::IntArrayRef pool, bool /*strict*/) {
    const Call call(x, weight, pool);
    const Output output(call, conv_bias, bias, divisor);
    if (call.batch == 0) return output.out;
    if (FITS_TENSOR_CORES) tensor_core_forward(call, output, is_strict(), nullptr, nullptr);
    else general::forward(call, output, nullptr);
    return output.out;
}

// Also each sample's gradients of the weights (batch, weights), or none where these follow from the places of the maxima; and
// these places, where `keep` says so or the gradients need them.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_for_training(const at::Tensor& x, const at::Tensor& weight,
                                                                    const at::Tensor& conv_bias,
                                                                    const std::optional<at::Tensor>& bias, double divisor,
                                                                    at::IntArrayRef pool, bool keep, bool strict) {
    const Call call(x, weight, pool);
    const Output output(call, conv_bias, bias, divisor);
    check_strict(strict);
    const bool fits = FITS_TENSOR_CORES && !strict;
    at::Tensor grads = call.empty({fits ? call.batch : 0, WEIGHTS});
    at::Tensor places = fits ? call.tensor_core_places(keep) : call.general_places();
    if (call.batch == 0) return {output.out, grads, places};
    if (fits) {
        at::Tensor used = keep ? places : call.tensor_core_places(call.streams());
        tensor_core_forward(call, output, false, &grads, keep || call.streams() ? &used : nullptr);
    } else {
        general::forward(call, output, &places);
    }
    return {output.out, grads, places};
}

at::Tensor weight_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& grads_in,
                       const at::Tensor& places, double divisor, at::IntArrayRef pool) {
    const Call call(x, weight, pool);
    const at::Tensor grad = call.checked_grad(grad_in);
    const bool from_places = !FITS_TENSOR_CORES || (grads_in.dim() > 0 && grads_in.size(0) == 0);
    check("grads", grads_in, {from_places ? 0 : call.batch, WEIGHTS});
    check_device(call.x, "grads", grads_in);
    at::Tensor grad_weight = call.empty(weight.sizes());
    if (call.batch == 0) return grad_weight.zero_();
    if (from_places) {
        general::weight_grad(call, grad, call.checked_general_places(places), divisor, grad_weight);
        return grad_weight;
    }
    const at::Tensor grads = grads_in.contiguous();
    launch_weighted_sum(grads.const_data_ptr<float>(), grad.const_data_ptr<float>(), grad.numel() == call.batch, divisor,
                        grad_weight.mutable_data_ptr<float>(), call.batch, call.depth, call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_weight;
}

at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& places_in,
                      double divisor, at::IntArrayRef pool) {
    const Call call(x, weight, pool);
    const bool by_tensor_cores = FITS_TENSOR_CORES && places_in.dim() == 6;
    const at::Tensor grad = call.checked_grad(grad_in);
    const at::Tensor places =
        by_tensor_cores ? call.checked_tensor_core_places(places_in) : call.checked_general_places(places_in);
    at::Tensor grad_x = call.empty(x.sizes());
    if (call.batch == 0) return grad_x;
    if (!by_tensor_cores) {
        general::input_grad(call, grad, places, divisor, grad_x);
        return grad_x;
    }
    launch_input_gradient(places.const_data_ptr(), call.weight.const_data_ptr<float>(), grad.const_data_ptr<float>(),
                          grad.numel() == call.batch, divisor, grad_x.mutable_data_ptr<float>(), call.batch, call.depth,
                          call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_x;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool, bool strict) -> "
          "Tensor", {at::Tag::pt2_compliant_tag});
    m.def("forward_for_training(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool, "
          "bool keep, bool strict) -> (Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor grads, Tensor places, float divisor, int[3] pool) -> "
          "Tensor", {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad, Tensor x, Tensor weight, Tensor places, float divisor, int[3] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
}

// Autograd, here since Python's would take the host longer than a step takes the GPU. Operators are called through PyTorch's
// dispatcher, where torch.compile sees them. The namespace has no name, or all libraries of the process would share CALL's
// handles: those of inline functions are unique in a process.
namespace {

const std::string LIBRARY = C10_STRINGIZE(TORCH_EXTENSION_NAME);
#define CALL(name, ...)                                                                                                    \
    [&] {                                                                                                                  \
        static const auto handle =                                                                                         \
            c10::Dispatcher::singleton().findSchemaOrThrow((LIBRARY + "::" #name).c_str(), "").typed<decltype(::name)>();  \
        return handle.call(__VA_ARGS__);                                                                                   \
    }()

struct Training : torch::autograd::Function<Training> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                              const at::Tensor& conv_bias, const std::optional<at::Tensor>& bias, double divisor,
                              at::IntArrayRef pool, bool strict) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        const bool keep = x.requires_grad();
        const auto results = CALL(forward_for_training, x, weight, conv_bias, bias, divisor, pool, keep, strict);
        context->save_for_backward({x, weight, std::get<1>(results), std::get<2>(results)});
        context->saved_data["divisor"] = divisor;
        context->saved_data["bias shape"] = bias ? bias->sizes().vec() : std::vector<int64_t>();
        context->saved_data["has bias"] = bias.has_value();
        return std::get<0>(results);
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& outer) {
        const auto saved = context->get_saved_variables();
        const at::Tensor &grad = outer[0], &x = saved[0], &weight = saved[1], &grads = saved[2], &places = saved[3];
        const double divisor = context->saved_data["divisor"].toDouble();
        constexpr std::array<int64_t, 3> pool = {POOL_D, POOL_H, POOL_W};
        const bool needs_bias = context->saved_data["has bias"].toBool() && context->needs_input_grad(3);
        at::Tensor grad_x, grad_weight, grad_conv_bias, grad_bias;
        if (context->needs_input_grad(0)) grad_x = CALL(input_grad, grad, x, weight, places, divisor, pool);
        if (context->needs_input_grad(1)) grad_weight = CALL(weight_grad, grad, x, weight, grads, places, divisor, pool);
        if (context->needs_input_grad(2) || needs_bias) {
            const at::Tensor by_channel = grad.sum(0).reshape(-1).expand({OUT_CHANNELS});  // of the averages
            if (context->needs_input_grad(2)) grad_conv_bias = by_channel.div(divisor);
            if (needs_bias) {
                const auto shape = context->saved_data["bias shape"].toIntVector();
                const int64_t biases = std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<int64_t>());
                grad_bias = by_channel.view({-1, biases}).sum(0).view(shape);
            }
        }
        return {grad_x, grad_weight, grad_conv_bias, grad_bias, at::Tensor(), at::Tensor(), at::Tensor()};
    }
};

at::Tensor differentiable_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias,
                                  const std::optional<at::Tensor>& bias, double divisor, at::IntArrayRef pool,
                                  bool strict) {
    const auto has_tangent = [](const at::Tensor& tensor) { return tensor._fw_grad(0).defined(); };
    TORCH_CHECK_NOT_IMPLEMENTED(
        !(has_tangent(x) || has_tangent(weight) || has_tangent(conv_bias) || (bias && has_tangent(*bias))),
        LIBRARY + ": forward-mode derivatives (jvp) are not implemented");
    const bool wanted =
        x.requires_grad() || weight.requires_grad() || conv_bias.requires_grad() || (bias && bias->requires_grad());
    if (at::GradMode::is_enabled() && wanted) return Training::apply(x, weight, conv_bias, bias, divisor, pool, strict);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return CALL(forward, x, weight, conv_bias, bias, divisor, pool, strict);
}

}  // namespace

TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, Autograd, m) {
    m.impl("forward", &differentiable_forward);
    for (const char* name : {"forward_for_training", "weight_grad", "input_grad"})  // these raise in a backward pass
        m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("forward", &forward);
    m.impl("forward_for_training", &forward_for_training);
    m.impl("weight_grad", &weight_grad);
    m.impl("input_grad", &input_grad);
}
"""


def register(namespace):
    """Shapes, for torch.compile."""

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, conv_bias, bias, divisor, pool, strict):
        return x.new_empty(x.shape[0], 1, 1, 1) if bias is not None else x.new_empty(x.shape[0], weight.shape[0], 1, 1, 1)

    @torch.library.register_fake(f"{namespace}::forward_for_training")
    def forward_for_training(x, weight, conv_bias, bias, divisor, pool, keep, strict):
        (batch, channels, *size), (outs, _, *kernel) = x.shape, weight.shape
        windows = [(s - k + 1) // p for s, k, p in zip(size, kernel, pool, strict=True)]
        fits = channels <= 8 and outs <= 16 and max(kernel) <= 3 and list(pool) == [2, 2, 2] and not strict
        if fits:
            places = x.new_empty(batch if keep else 0, *windows, 4, 4, dtype=torch.uint8)
        else:
            kind = torch.uint8 if pool[0] * pool[1] * pool[2] <= 256 else torch.int32
            places = x.new_empty(batch, outs, *windows, dtype=kind)
        out = forward(x, weight, conv_bias, bias, divisor, pool, strict)
        return out, x.new_empty(batch if fits else 0, weight.numel()), places

    @torch.library.register_fake(f"{namespace}::weight_grad")
    def weight_grad(grad, x, weight, grads, places, divisor, pool):
        return weight.new_empty(weight.shape)

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad, x, weight, places, divisor, pool):
        return x.new_empty(x.shape)


BUILDING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once


@functools.lru_cache(maxsize=None)
def build(name, binding, cuda, register, cflags=(), cuda_cflags=(), **constants):
    """Compile and load the sources, once a machine, and return the namespace of their operators in torch.ops.

    The namespace is `name` and a hash of all that the binary depends on: an edit gives a new library and new operators
    beside the old ones, so an edited notebook cell can simply be run again. `cuda` is None where there is none;
    `constants` become #defines on top of both sources. Raises what torch.utils.cpp_extension.load_inline raises when the
    compiler is missing or refuses the text.
    """
    from torch.utils import cpp_extension

    def fingerprint(code):  # of a function: all but the place where it was written
        return code.co_code, code.co_names, [fingerprint(c) if hasattr(c, "co_code") else c for c in code.co_consts]

    defines = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items()))
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability()
    versions = torch.__version__, torch.version.cuda, sys.version_info
    everything = binding, cuda, defines, fingerprint(register.__code__), cflags, cuda_cflags, machine, versions
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"

    operators = getattr(torch.ops, namespace)
    with BUILDING:
        if not getattr(operators, "registered", False):
            if not shutil.which("ninja"):  # in a virtual environment that is not activated
                os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
            try:
                cpp_extension.load_inline(
                    namespace,
                    cpp_sources=defines + binding,
                    cuda_sources=defines + cuda if cuda else None,
                    extra_cflags=["-O3", *cflags],
                    extra_cuda_cflags=["-O3", "-lineinfo", *cuda_cflags],
                    is_python_module=False,
                    no_implicit_headers=True,
                )
            except BaseException:  # an interrupted or failed build would count as done when the same text is run again
                cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(namespace, None)
                raise
            register(namespace)
            operators.registered = True
    return namespace


class ModelNew(nn.Module):
    sources = NAME, BINDING, CUDA, register  # bound here, so that another variant in the same notebook cannot replace them

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        limits = torch.finfo(torch.float32)
        if not isinstance(divisor, (int, float)) or not limits.tiny <= abs(divisor) <= limits.max:  # NaN fails it, too
            raise ValueError(
                f"divisor: expected a number whose size is a normal float32, {limits.tiny} to {limits.max}, got {divisor!r}; "
                "the division is moved behind the max, and max(conv) / 0 is not max(conv / 0), nor is it for infinity"
            )
        self.pool_size = (pool_size,) * 3 if isinstance(pool_size, int) else tuple(pool_size)
        if len(self.pool_size) != 3 or min(self.pool_size) < 1:
            raise ValueError(f"pool_size: expected a positive int or three of them, got {pool_size!r}")
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor = divisor
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.sum_dim = sum_dim
        one_each_channel = (1,) * (5 - self.bias.dim()) + self.bias.shape in ((1, 1, 1, 1, 1), (1, out_channels, 1, 1, 1))
        over_channels = sum_dim in (1, -4, (1,), (-4,), [1], [-4])
        self.sums_channels = over_channels and one_each_channel  # decides what the kernel writes; see Mathematics

    @torch.compiler.assume_constant_result
    def namespace(self):
        channels = {"IN_CHANNELS": self.conv.in_channels, "OUT_CHANNELS": self.conv.out_channels}
        kernel = {f"KERNEL_{axis}": size for axis, size in zip("DHW", self.conv.kernel_size, strict=True)}
        pool = {f"POOL_{axis}": size for axis, size in zip("DHW", self.pool_size, strict=True)}
        hopper = ("-gencode=arch=compute_90a,code=sm_90a",)
        return build(*self.sources, cuda_cflags=hopper, **channels, **kernel, **pool)

    @staticmethod
    @torch.compiler.assume_constant_result  # a compiled model keeps it; the operators say when it is no longer so
    def is_strict():
        """Whether PyTorch forbids TF32 to convolutions now."""
        return torch.backends.cudnn.conv.fp32_precision != "tf32"

    def forward(self, x):
        bias = self.bias if self.sums_channels else None
        operators = getattr(torch.ops, self.namespace())
        weight, conv_bias, strict = self.conv.weight, self.conv.bias, self.is_strict()
        out = operators.forward(x, weight, conv_bias, bias, self.divisor, self.pool_size, strict)
        return out if self.sums_channels else torch.sum(out + self.bias, dim=self.sum_dim)


def main():
    from torch.utils import cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew(8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1).to("cpu" if emulated else "cuda")
    x = torch.randn(2, 8, 6, 12, 20) if emulated else torch.randn(128, 8, 16, 64, 64, device="cuda")

    def plain(x):
        pooled = nn.functional.max_pool3d(model.conv(x) / model.divisor, model.pool_size)
        return (pooled.mean(dim=(2, 3, 4), keepdim=True) + model.bias).sum(dim=1)

    def milliseconds(function, repeats=20):
        function(x)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            function(x)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats

    with torch.no_grad():
        error = ((model(x) - plain(x)).abs().max() / plain(x).std()).item()
        print(f"{NAME}: differs from PyTorch by {error:.1e} of the outputs' spread;", end=" ")
        if emulated:
            print("ran under the emulator, which tells no times")
        else:
            print(f"{milliseconds(model):.3f} ms, PyTorch {milliseconds(plain):.3f} ms")


if __name__ == "__main__":
    main()
