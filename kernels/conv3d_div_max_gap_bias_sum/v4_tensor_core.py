"""conv3d_div_max_gap_bias_sum, v4: the convolution on the tensor cores, the maximum in the registers that they leave.

Like v3, but 27 taps are 27 matrix products in TF32, and a copy of the input runs ahead of them. The gradients are matrix
products too: that of the weights comes out of the same pass over the input.

Why it is faster
    v3 is bound by fp32 multiply-adds; mma.sync multiplies TF32 at six times that rate on an H200. Its inner size is 8, which is
    the number of input channels, so a tap is one instruction: weights of 16 output channels on the left, 8 positions on the
    right. A lane holds neighbouring columns of x, and the operand of a tap to the side is another register that it has
    already: 64 loads feed 216 products. The 8 positions of a pooling window end in 8 registers of one lane, so the maximum
    needs no exchange. Rows of x pass through a ring in shared memory once (cp.async, two rows of all planes at a time), and
    warps take turns with tiles of 8 windows, without a barrier for the block. What it costs: 11 bits of precision, as PyTorch's
    convolution has by default; up to 8 channels in and 16 out, kernels up to 3 and windows of 2 x 2 x 2, or v3's kernels.

    design, H200, ms                                    predicted  measured  why
    forward                                             0.185      0.349     216 products a tile: 0.163 at 311 TFLOP/s
    forward, strict: three products                     0.53       0.865     648: 0.49; v3's rate would be 0.93
    forward with the weights' gradient                  0.36       0.745     432: 0.33; shared memory 440 of 690 cycles a tile
    input's gradient                                    0.21       0.368     216 products for 64 pixels, 0.19; writes 0.07
    training step, weights                              0.37       0.748     the sum over samples moves 2 MB
    training step, weights and input                    0.58       1.12
    Forward from the record; else measured with CUDA events, steps in a CUDA graph; eager takes 2.35, strict 4.27, with the
    gradients 7.6 and 25. All takes about twice what was counted. By Nsight Compute, products fill 44% of their pipe and
    instructions 44% of the issue slots: of 1,013 in a tile 216 are products, and 628 are the comparisons and moves that prepare
    their operands (rounding to TF32 takes several); with two warps a scheduler little else runs while they wait for each other.
    v5 rounds a value once, in a warp of its own.

Mathematics
    v3's. Where PyTorch permits TF32 to convolutions (torch.backends.cudnn.conv.fp32_precision or allow_tf32, read in each
    call), operands are rounded to 11 bits and products are summed in fp32. Otherwise numbers are two TF32 values each, high and
    low, and the product is low * high + high * low + high * high, which leaves an error of 2^-22 a term. The tensor core cuts
    off what a sum does not hold, always towards zero; so strict sums begin anew with each plane and are added as fp32 numbers.
    All positions add in the same order, so equal inputs give equal bits, and ties go to the first as in PyTorch.

    The gradient of the weights is a product, too. With hot[o,k] = 1 where position k is the maximum of its window in output
    o:   grad_w[o,c,t] of a sample = 1/(N*d) * sum over k of hot[o,k] * x[c, k + t],    backward weighs and adds the samples'.
    hot is exact, x has 11 bits, as in PyTorch's own TF32 gradient. And that of the input, from places, 16 bytes a window:
    grad_x[c,p] = 1/(N*d) * sum over o,t of hot[o, p - t] * (grad[o] * w[o,c,t])
    Strict gradients are v3's kernels' work. A NaN in x makes gradients of weights NaN. Which of them need not be PyTorch's
    choice: with TF32 also taps that meet it beyond a row's end, strictly none that meet it as zero times NaN only.

Launches
    kernel          grid                             block  shared  work of a warp
    conv_max_mean   multiprocessors, or samples      256    206 KB  8 windows x 16 outputs at a time
    finish_samples  (samples)                        32     0       adds a sample's segments, where blocks share samples
    add_segments    (samples x weights / 128)        128    0       the same for gradients
    weighted_sum    (weights / 32)                   256    1 KB    the batch's gradient of 32 weights
    input_gradient  multiprocessors                  256    14 KB   2 x 2 x 16 pixels x 8 channels at a time
    for other shapes and strict gradients: see v3

    The shared memory is that of the original's size, with gradients or strict 220 KB. All rows of windows of the batch stand in
    one line, and every block takes an equal part of it: any batch keeps all multiprocessors busy. A device with less shared
    memory takes fewer slabs (layers of windows along depth) of a sample at a time.

Floor
    Forward: 269 MB in, 0.062 ms on an H200; 47.6 GFLOP of TF32, 0.114 ms at the 418 TFLOP/s that wgmma reaches, 0.153 at
    mma.sync's 311. Arithmetic binds. Each gradient is as large a product again; the input's also writes 269 MB.

Takes
    float32 CUDA tensors (batch, in_channels, depth, height, width), batch 0 included, a channel below 2^31 pixels; any
    channels, kernel, bias shape and sum_dim that the original takes; pool_size an int or three; a divisor whose size is a
    normal float32; compute capability 8.0 or later. The tensor cores serve what is said above, at any width; everything else
    goes through v3's kernels, whose text is in this file. Gradients of the weights take batch x weights floats. Anything else
    raises before a launch. Trains, and computes only the gradients that are asked for; second derivatives raise. What
    torch.compile compiled for training raises once PyTorch's setting of the precision is another. Deterministic on a GPU;
    another number of multiprocessors adds in another order.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv3d_div_max_gap_bias_sum_v4_tensor_core"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W. What the tensor-core kernels are made
// for; all else goes through the general kernels at the end.
#define FITS_TENSOR_CORES                                                                                                      \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D <= 3 && KERNEL_H <= 3 && KERNEL_W <= 3 && POOL_D == 2 &&               \
     POOL_H == 2 && POOL_W == 2)

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
        "{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
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

// Bands are counted over all segments; band n is in place n % RING of the ring.
struct Ring {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    int band_bytes;

    __device__ __forceinline__ uint32_t address(unsigned n) const { return data + n % RING * band_bytes; }
    __device__ __forceinline__ uint32_t full(unsigned n) const { return barriers + n % RING * 8; }
    __device__ __forceinline__ uint32_t empty(unsigned n) const { return full(n) + RING * 8; }
    __device__ __forceinline__ void wait_full(unsigned n) const { wait(full(n), n / RING & 1); }
    __device__ __forceinline__ void wait_empty(unsigned n) const { wait(empty(n), n / RING & 1 ^ 1); }
    __device__ __forceinline__ void release(unsigned n) const {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(empty(n));
    }
};

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
struct Peak {
    float value;
    int place;  // in the window, in the order of the scan
};

// As PyTorch finds it: the last NaN, else the first of the largest. PLACES, or the value alone.
template <bool PLACES>
__device__ __forceinline__ Peak peak_of(const Sums& sums, int element) {
    const auto value = [&](int i) { return sums[i / 4][i / 2 % 2][i % 2][element]; };
    Peak peak = {value(0), 0};
    float total = value(0);
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        if (PLACES && value(i) > peak.value) peak.place = i;
        peak.value = fmaxf(peak.value, value(i));
        total += value(i);
    }
    if (total != total) {  // perhaps there is a NaN, which fmaxf ignores
        peak = {-INFINITY, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (value(i) > peak.value || value(i) != value(i)) peak = {value(i), i};
    }
    return peak;
}

// ---- the gradient of the weights: one-hot places of the maxima (16 outputs x 8 windows) times x (8 windows x 8 channels), for
// each tap and position of a window. The sums of all taps stay in registers.
using Gradient = float[TAPS][4];  // [element: channel 2t, 2t + 1 of output g, then of g + 8]

__device__ __forceinline__ void add_gradient(const Tile& tile, const Lane& lane, const int (&places)[4], Gradient& gradient) {
    // A sum over windows takes them in any order: inner index t is window 2t, and t + 4 is window 2t + 1.
    float4 one_hot[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const auto hot = [&](int element) { return places[element] == i ? 1.0f : 0.0f; };
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

// The sum of all warps' gradients, in their order, as the weights lie in memory.
__device__ __forceinline__ void write_gradient(const Gradient& gradient, const Lane& lane, int warp, float* sums,
                                               float* __restrict__ to) {
#pragma unroll 1
    for (int turn = 0; turn < WARPS; ++turn) {
        if (turn == warp)
#pragma unroll
            for (int i = 0; i < TAPS * 4; ++i) {
                float& sum = sums[i * WARP + lane.lane];
                sum = turn ? sum + gradient[i / 4][i % 4] : gradient[i / 4][i % 4];
            }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < WEIGHTS; i += THREADS) {
        const int tap = i % TAPS, c = i / TAPS % IN_CHANNELS, o = i / TAPS / IN_CHANNELS;
        to[i] = sums[(tap * 4 + o / 8 * 2 + c % 2) * WARP + o % 8 * 4 + c / 2];
    }
    __syncthreads();  // the sums have been read
}

// The places of a window's maxima are 16 bytes: as many words as lanes of a group, output o in byte o / 4 of word o % 4. Two
// lanes have parts of the same words and exchange them.
__device__ __forceinline__ uint32_t place_word(const Lane& lane, const int (&places)[4]) {
    const bool upper = lane.g >= 4;
    const int shift = upper ? 8 : 0;
    const uint32_t even = (places[0] | places[2] << 16) << shift, odd = (places[1] | places[3] << 16) << shift;
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
        for (int i = 0; i < RING; ++i) barrier_init(ring.full(i), THREADS), barrier_init(ring.empty(i), WARPS);
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
            int places[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool exists = tile.first_window + 2 * lane.t + i % 2 < segment.columns;
                const Peak peak = peak_of<TRAINING>(sums, i);
                totals[i / 2] += exists ? peak.value : 0;
                places[i] = exists ? peak.place : 8;
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
                           tensors.gradients + segment.slot * WEIGHTS);
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

// ---- the input's gradient: one-hot places (16 pixels x 8 outputs) times weights (8 outputs x 8 channels)
// A warp has the pixels of 8 windows' columns in two planes and two rows, [plane][row]: even columns are rows 0 to 7 of the
// product, odd ones rows 8 to 15. All lie within reach of the windows at and before them in each direction.
constexpr int GRADIENT_WARPS = 8, GRADIENT_THREADS = WARP * GRADIENT_WARPS;

// The places of 4 outputs as numbers of their own: lane t has outputs t, t + 4, t + 8 and t + 12.
__device__ __forceinline__ void unpack(uint32_t word, float (&codes)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = __uint_as_float(__byte_perm(word, 0x3f800000u, 0x7650 + i));
}
__device__ __forceinline__ float code_of(int place) { return __uint_as_float(0x3f800000u + place); }

__global__ void __launch_bounds__(GRADIENT_THREADS, 1)
    input_gradient(const uint32_t* __restrict__ places, const float* __restrict__ weight, const Upstream upstream,
                   const Shape shape, const float scale, float* __restrict__ grad_x, const bool paired) {
    __shared__ float weights[TAPS][2][2][WARP];  // as right operands: [tap][outputs 0 to 7, or 8 to 15][register][lane]
    const Lane lane;
    const int slab_pairs = ceil_div(shape.depth, 2), row_pairs = ceil_div(shape.height, 2), groups = ceil_div(shape.width, 16);
    const int64_t lines = shape.batch * slab_pairs, pixels = static_cast<int64_t>(shape.depth) * shape.height * shape.width;
    float b[TAPS][2][2];
    int64_t last_sample = -1;
    for (int64_t line = lines * blockIdx.x / gridDim.x; line < lines * (blockIdx.x + 1) / gridDim.x; ++line) {
        const int64_t sample = line / slab_pairs;
        const int slab = line % slab_pairs;
        if (sample != last_sample) {
            __syncthreads();  // the last sample's weights have been read
            for (int i = threadIdx.x; i < TAPS * 4 * WARP; i += GRADIENT_THREADS) {
                const int of_lane = i % WARP, o = of_lane % 4 + i / WARP % 2 * 4 + i / (2 * WARP) % 2 * 8, c = of_lane / 4;
                const bool exists = o < OUT_CHANNELS && c < IN_CHANNELS;
                weights[i / (4 * WARP)][i / (2 * WARP) % 2][i / WARP % 2][of_lane] =
                    exists ? to_tf32(upstream.at(sample, o) * weight[(o * IN_CHANNELS + c) * TAPS + i / (4 * WARP)]) : 0;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < TAPS * 4; ++i) b[i / 4][i / 2 % 2][i % 2] = weights[i / 4][i / 2 % 2][i % 2][lane.lane];
            last_sample = sample;
        }
#pragma unroll 1
        for (int number = threadIdx.x / WARP; number < row_pairs * groups; number += GRADIENT_WARPS) {
            const int row = number / groups, column = number % groups * 8 + lane.g;  // of windows
            float sums[2][2][4] = {};
#pragma unroll
            for (int before_d = 0; before_d < 2; ++before_d)
#pragma unroll
                for (int before_h = 0; before_h < 2; ++before_h) {
                    if (before_d && KERNEL_D < 2 || before_h && KERNEL_H < 2) continue;
                    const int from_slab = slab - before_d, from_row = row - before_h;
                    const bool inside = from_slab >= 0 && from_slab < shape.slabs && from_row >= 0 && from_row < shape.rows;
                    const int64_t from = (sample * shape.slabs + from_slab) * shape.rows + from_row;
                    float codes[2][4];  // of this window and of the one before
#pragma unroll
                    for (int before = 0; before < 2; ++before) {
                        const int c = column - before;
                        const bool exists = inside && c >= 0 && c < shape.columns;
                        unpack(exists ? places[(from * shape.columns + c) * 4 + lane.t] : 0xffffffffu, codes[before]);
                    }
#pragma unroll
                    for (int d = 0; d < 2; ++d)
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float hot[2][2][4];  // [this window or the one before][w][output]
#pragma unroll
                            for (int i = 0; i < 16; ++i) {
                                const float code = code_of(4 * d + 2 * h + i / 4 % 2);
                                hot[i / 8][i / 4 % 2][i % 4] = codes[i / 8][i % 4] == code ? 1 : 0;
                            }
#pragma unroll
                            for (int z = 0; z < 2; ++z)
#pragma unroll
                                for (int y = 0; y < 2; ++y) {
                                    const int r = 2 * before_d + z - d, s = 2 * before_h + y - h;
                                    if (r < 0 || r >= KERNEL_D || s < 0 || s >= KERNEL_H) continue;
#pragma unroll
                                    for (int t = 0; t < KERNEL_W; ++t)
#pragma unroll
                                        for (int half = 0; half < 2; ++half) {
                                            const float(&even)[4] = hot[(t + 1) / 2][t % 2];
                                            const float(&odd)[4] = hot[t / 2][1 - t % 2];
                                            const float(&w)[2] = b[(r * KERNEL_H + s) * KERNEL_W + t][half];
                                            const float4 a = make_float4(even[2 * half], odd[2 * half], even[2 * half + 1],
                                                                         odd[2 * half + 1]);
                                            multiply(sums[z][y], a, w[0], w[1]);
                                        }
                                }
                        }
                }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int z = 2 * slab + i / 4, y = 2 * row + i / 2 % 2, c = 2 * lane.t + i % 2;
                if (z >= shape.depth || y >= shape.height || c >= IN_CHANNELS || 2 * column >= shape.width) continue;
                float* to = grad_x + (sample * IN_CHANNELS + c) * pixels +
                            (static_cast<int64_t>(z) * shape.height + y) * shape.width + 2 * column;
                const float left = scale * sums[i / 4][i / 2 % 2][i % 2], right = scale * sums[i / 4][i / 2 % 2][2 + i % 2];
                if (paired) {
                    __stcs(reinterpret_cast<float2*>(to), make_float2(left, right));
                } else {
                    to[0] = left;
                    if (2 * column + 1 < shape.width) to[1] = right;
                }
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

// As many slabs an image as shared memory takes, in equal parts; and as many blocks as multiprocessors, or as images where that
// keeps at least 95% of the multiprocessors busy: whole images need no second pass over their segments' sums.
static Shape make_shape(int64_t batch, int depth, int height, int width) {
    const Device device;
    Shape s;
    s.batch = batch, s.depth = depth, s.height = height, s.width = width;
    s.slabs = (depth - KERNEL_D + 1) / 2, s.rows = (height - KERNEL_H + 1) / 2, s.columns = (width - KERNEL_W + 1) / 2;
    s.image_slabs = s.slabs;
    while (s.image_slabs > 1 && shared_bytes(s, true) > device.shared_bytes) --s.image_slabs;
    s.slab_parts = ceil_div(s.slabs, s.image_slabs), s.image_slabs = ceil_div(s.slabs, s.slab_parts);
    s.image_columns = s.columns <= WHOLE_WINDOWS ? s.columns : PART_WINDOWS;
    s.column_parts = ceil_div(s.columns, s.image_columns);
    const int64_t images = s.images(), waves = (images + device.multiprocessors - 1) / device.multiprocessors;
    const int64_t whole = (images + waves - 1) / waves;
    if (images % whole == 0 && whole * 20 >= 19 * static_cast<int64_t>(device.multiprocessors)) s.blocks = whole;
    else s.blocks = images * s.rows < device.multiprocessors ? images * s.rows : device.multiprocessors;
    return s;
}

// How many segments write partial sums; 0 where a sample is one, and its result goes to its place at once.
int64_t count_partial_sums(int64_t batch, int depth, int height, int width) {
    const Shape shape = make_shape(batch, depth, height, width);
    if (shape.whole_images()) return shape.images() == batch ? 0 : shape.images();
    return shape.images() + shape.blocks;
}

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
// and `places` may be null; partial_* are null where count_partial_sums is 0.
cudaError_t launch_conv_max_mean(const float* x, const float* weight, const float* conv_bias, const float* bias, int biases,
                                 double divisor, bool strict, float* partial_sums, float* partial_gradients, float* out,
                                 float* gradients, void* places, int64_t batch, int depth, int height, int width,
                                 cudaStream_t stream) {
    const Shape shape = make_shape(batch, depth, height, width);
    const float windows = static_cast<float>(static_cast<int64_t>(shape.slabs) * shape.rows * shape.columns);
    const Result result = {conv_bias, bias, biases, {static_cast<float>(divisor)}, windows, out};
    const Tensors tensors = {x, weight, partial_sums, partial_gradients ? partial_gradients : gradients,
                             static_cast<uint32_t*>(places)};
    const cudaError_t error = gradients ? launch<false, true>(shape, tensors, result, stream)
                              : strict  ? launch<true, false>(shape, tensors, result, stream)
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
    input_gradient<<<lines < multiprocessors ? lines : multiprocessors, GRADIENT_THREADS, 0, stream>>>(
        static_cast<const uint32_t*>(places), weight, Upstream{grad, by_sample}, shape, gradient_scale(shape, divisor), grad_x,
        paired);
}

#else  // nobody calls these

int64_t count_partial_sums(int64_t, int, int, int) { return 0; }
cudaError_t launch_conv_max_mean(const float*, const float*, const float*, const float*, int, double, bool, float*, float*,
                                 float*, float*, void*, int64_t, int, int, int, cudaStream_t) {
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
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

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
int64_t count_partial_sums(int64_t batch, int depth, int height, int width);
cudaError_t launch_conv_max_mean(const float*, const float*, const float*, const float*, int, double, bool, float*, float*,
                                 float*, float*, void*, int64_t, int, int, int, cudaStream_t);
void launch_weighted_sum(const float*, const float*, bool, double, float*, int64_t, int, int, int, cudaStream_t);
void launch_input_gradient(const void*, const float*, const float*, bool, double, float*, int64_t, int, int, int,
                           cudaStream_t);

constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int64_t OUTPUTS = 16;  // of the tensor-core kernels
#define FITS_TENSOR_CORES                                                                                                      \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D <= 3 && KERNEL_H <= 3 && KERNEL_W <= 3 && POOL_D == 2 &&               \
     POOL_H == 2 && POOL_W == 2)

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

// `grads` and `places` are written where they are not null; with `grads` the precision is TF32.
static void tensor_core_forward(const Call& call, const Output& output, bool strict, const at::Tensor* grads,
                                const at::Tensor* places) {
    check_blocks(call.batch * WEIGHTS);
    const int64_t segments = count_partial_sums(call.batch, call.depth, call.height, call.width);
    at::Tensor partial_sums = call.empty({segments, OUTPUTS}), partial_grads = call.empty({grads ? segments : 0, WEIGHTS});
    C10_CUDA_CHECK(launch_conv_max_mean(
        call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(), output.conv_bias.const_data_ptr<float>(),
        output.bias_pointer(), output.biases(), output.divisor, strict,
        segments ? partial_sums.mutable_data_ptr<float>() : nullptr,
        segments && grads ? partial_grads.mutable_data_ptr<float>() : nullptr, output.out.mutable_data_ptr<float>(),
        grads ? grads->mutable_data_ptr<float>() : nullptr, places ? places->mutable_data_ptr() : nullptr, call.batch,
        call.depth, call.height, call.width, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias,
                   const std::optional<at::Tensor>& bias, double divisor, at::IntArrayRef pool) {
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
    if (fits) tensor_core_forward(call, output, false, &grads, keep ? &places : nullptr);
    else general::forward(call, output, &places);
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
    m.def("forward(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("forward_for_training(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool, "
          "bool keep, bool strict) -> (Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor grads, Tensor places, float divisor, int[3] pool) -> "
          "Tensor", {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad, Tensor x, Tensor weight, Tensor places, float divisor, int[3] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
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
    """Shapes for torch.compile, and what has no derivative."""

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, conv_bias, bias, divisor, pool):
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
        out = forward(x, weight, conv_bias, bias, divisor, pool)
        return out, x.new_empty(batch if fits else 0, weight.numel()), places

    @torch.library.register_fake(f"{namespace}::weight_grad")
    def weight_grad(grad, x, weight, grads, places, divisor, pool):
        return weight.new_empty(weight.shape)

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad, x, weight, places, divisor, pool):
        return x.new_empty(x.shape)

    def save(ctx, inputs, output):
        raise NotImplementedError(f"{namespace}: this operator has no gradients; ModelNew's training pass has")

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    for name in ("forward", "forward_for_training"):
        torch.library.register_autograd(f"{namespace}::{name}", refuse, setup_context=save)
    for name in ("weight_grad", "input_grad"):
        torch.library.register_autograd(f"{namespace}::{name}", refuse)


class Training(torch.autograd.Function):
    """One forward and backward pass; torch.library.register_autograd would take longer on the CPU than the GPU needs."""

    @staticmethod
    def forward(ctx, x, weight, conv_bias, bias, divisor, pool, namespace, strict):
        operators = getattr(torch.ops, namespace)
        keep = ctx.needs_input_grad[0]
        out, grads, places = operators.forward_for_training(x, weight, conv_bias, bias, divisor, pool, keep, strict)
        ctx.save_for_backward(x, weight, grads, places)
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.divisor, ctx.pool, ctx.namespace = divisor, pool, namespace
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, grads, places = ctx.saved_tensors
        needs_x, needs_weight, needs_conv_bias, needs_bias = ctx.needs_input_grad[:4]
        operators = getattr(torch.ops, ctx.namespace)
        settings = ctx.divisor, ctx.pool
        grad_x = operators.input_grad(grad, x, weight, places, *settings) if needs_x else None
        grad_weight = operators.weight_grad(grad, x, weight, grads, places, *settings) if needs_weight else None
        grad_conv_bias = grad_bias = None
        if needs_conv_bias or needs_bias:
            by_channel = grad.sum(0).reshape(-1).expand(weight.shape[0])  # of the averages
            grad_conv_bias = by_channel / ctx.divisor if needs_conv_bias else None
            grad_bias = by_channel.view(-1, ctx.bias_shape.numel()).sum(0).view(ctx.bias_shape) if needs_bias else None
        return grad_x, grad_weight, grad_conv_bias, grad_bias, None, None, None, None


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
    differentiable = Training
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
        return build(*self.sources, **channels, **kernel, **pool)

    @staticmethod
    @torch.compiler.assume_constant_result  # a compiled model keeps it; the operators say when it is no longer so
    def is_strict():
        """Whether PyTorch forbids TF32 to convolutions now."""
        return torch.backends.cudnn.conv.fp32_precision != "tf32"

    def forward(self, x):
        namespace = self.namespace()
        weight, conv_bias, bias = self.conv.weight, self.conv.bias, self.bias if self.sums_channels else None
        arguments = x, weight, conv_bias, bias, self.divisor, self.pool_size
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in arguments):
            out = self.differentiable.apply(*arguments, namespace, self.is_strict())
        else:
            out = getattr(torch.ops, namespace).forward(*arguments)
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
