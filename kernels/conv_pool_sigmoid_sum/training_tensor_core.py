"""conv_pool_sigmoid_sum, training on the tensor cores: one pass over the input leaves all that backward needs.

Why it is faster
    Like v4, but box sums are operand b of two products: weights * sums, and delta * sums, the gradient of the weights.
    PyTorch's gradient writes and reads the convolution's output, 4.8 GB. A sample's output is one number, so the gradients of
    that number need nothing from above: the forward pass leaves them, and backward weighs and adds. Delta comes out of the
    sigmoid as operand a, and so passes through no memory; for the gradient of x it is kept as fp16 (148 MB, strict 296).

Mathematics
    z = bias + 1/p^2 * sum over channels and kernel elements of w * box, s = sigmoid(z), out[b] = sum of s. A box is the sum of
    a window's pixels, shifted by the element; all but the middle one's are taken as differences, in which the mean cancels.
    delta = s * (1 - s):  d out[b] / d w = 1/p^2 * sum over positions of delta * box
    grad_box = w^T * delta, scaled by grad_out / p^2; then rows and columns are added up, box sums transposed.
    Delta has the power 2^17, sums the smallest so far in the segment: a sum below 2^-27 of the segment's largest has fewer than
    11 bits (strict: below 2^-15, 22), and so has a delta below 2^-31. Strict (PyTorch forbids TF32): fp16x3 throughout.

Launches
    conv_pool_sum    SMs, or samples    384 threads   152 KB    a warp: 16 positions of a pooled row at a time
    input_gradient   the same           384           44 KB     a warp: 16 positions of every row of their windows
    sum_terms        sums / 32          256           1 KB      adds a sample's segments; gradients over the samples

Floor
    604 MB in, with the gradient of x also 604 MB out, deltas out and in: 0.35 ms on an H200 (4.35 TB/s).

Takes
    float32 CUDA tensors (batch, in_channels, height, width) on compute capability 8.0 or later; what SERVED says, in images of
    any size. PyTorch computes the rest, and the gradient of a gradient. Deterministic for a number of SMs. MIT; copy it.
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

NAME = "conv_pool_sigmoid_sum_training_tensor_core"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
SHARED_LIMIT_KB = 0  # builds as for a device with that much shared memory a block; 0: what the device has
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W and SHARED_LIMIT_KB.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <numeric>

// What the kernels are made for, in images of any size.
#define SERVED                                                           \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 64 && KERNEL_H * KERNEL_W <= 9 && \
     KERNEL_H <= POOL_H + 1 && KERNEL_W <= POOL_W + 1 && POOL_W % 2 == 0 && POOL_W <= 8 && POOL_H * POOL_W <= 16)
extern "C" int64_t is_served() { return SERVED; }

#if SERVED
using Element = float;  // of x and the parameters

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int TAPS = KERNEL_H * KERNEL_W, TERMS = IN_CHANNELS * TAPS;
constexpr int WEIGHTS = OUT_CHANNELS * TERMS, PARAMETERS = WEIGHTS + OUT_CHANNELS;

// Words used below:
//   position  a pooled column of a pooled row: a window of pixels, which has a box sum for each tap and channel
//   tap       an element of the convolution's kernel
//   strip     16 pooled columns, of a warp; four warps are a group, whose 64 positions are columns of its products
//   image     a sample, or in input_gradient a tile of one
//   segment   the part of one image in one block: all pooled rows of all images stand in one line, of which a block takes an
//             equal part (a persistent kernel with a static tile scheduler); `slot` is where its sums go in device memory
//   unit      a segment is cut into strips of columns and bands of rows, the units; in each round a warp has one
//   step      a pooled row of a unit. All warps take as many steps in a round; a unit may have one row less, or none.
//   pair      two neighbouring positions, of a lane; `member` (0 or 1) is one of them

struct Shape {
    int batch, height, width, rows, columns;  // of x (batch, IN_CHANNELS, height, width); rows, columns: of pooled positions
    int images, blocks, strips;  // strips: of 16 pooled columns
    int warps, bands;            // of a block of conv_pool_sum; of a segment, so that all warps have a unit
    bool aligned;                // rows begin at multiples of 16 bytes
};
struct Tensors {
    const Element *x, *weight, *bias;
    float *sums, *gradients;  // one, and PARAMETERS, a segment
    uint4* deltas;            // null where the gradient of x is not asked for
    bool low_deltas;          // their low parts are kept behind them
};

struct Segment {
    int image, start, count, slot;  // pooled rows [start, start + count)
};
DEVICE int64_t first_row(const Shape& s, int block) { return static_cast<int64_t>(s.images) * s.rows * block / s.blocks; }
DEVICE Segment segment_at(const Shape& s, int64_t line, int64_t end) {
    const int image = static_cast<int>(line / s.rows), start = static_cast<int>(line % s.rows);
    const int count = static_cast<int>(end - line < s.rows - start ? end - line : s.rows - start);
    return {image, start, count, image + (s.images % s.blocks ? static_cast<int>(blockIdx.x) : 0)};
}

// ---- constants and layout
constexpr int MIDDLE_H = KERNEL_H / 2, MIDDLE_W = KERNEL_W / 2, MIDDLE = MIDDLE_H * KERNEL_W + MIDDLE_W;
constexpr int OVERLAP = KERNEL_H - 1, FRESH = POOL_H - OVERLAP;  // rows that a pooled row shares with the next, and its own
constexpr int CHANNELS = 8, OUTPUTS = 64;  // of the products; missing ones are zeros
constexpr int STRIP = 16, GROUP = 4;       // positions (pooled columns) of a warp; warps of a group
constexpr int PARTS = 2;                   // warps' positions that a warp multiplies at a time, of a group's four

// What conv_pool_sum keeps in shared memory; bytes for 8 channels, a 3 x 3 kernel and a 4 x 4 window.
//   +--------------------------------------------------------------+
//   | weights, high and low parts, in the order of mma's operand a |  20,480   in registers if FEW
//   +--------------------------------------------------------------+
//   | box sums of group 0: SLABS slabs of 64 positions x 16 bytes; |  10,240   20,480 if STRICT: low parts, too
//   | of group 1; of group 2                                       |
//   +--------------------------------------------------------------+
//   | pipeline of warp 0: POOL_H rows of x, 8 channels x 66        |   8,704
//   | of warp 1; ...                                               |
//   +--------------------------------------------------------------+
// A lane's sums of a channel at a position are packed in pairs: all taps, then what rounding leaves of the middle one. A slab
// has such a pair of four channels: 16 bytes, a row of an 8 x 8 matrix of ldmatrix. Two slabs are the inner 16 of a product.
constexpr int PAIRS = ceil_div(TAPS + 1, 2), SLABS = 2 * PAIRS, SLAB = 64 * 16, OCTET = 8 * 16, COLUMNS = 8 * SLABS;
__host__ __device__ constexpr int column_of(int channel, int tap) {
    return (channel / 4 * PAIRS + tap / 2) * 8 + channel % 4 * 2 + tap % 2;
}
constexpr int FRAGMENT = GROUP * 32 * 16, WEIGHT_BYTES = 2 * PAIRS * FRAGMENT;  // operand a of all outputs for one inner 16

// A stage of a pipeline is a row of a strip: lines of 32 columns and 128 bytes, [line][channel], then the 16-byte pieces of the
// columns behind the last line, [piece][channel]. Swizzle: piece i of a line stands at i ^ (channel % 4), so that all accesses
// are conflict-free.
constexpr int LINES = STRIP * POOL_W / 32, TAIL = ceil_div(KERNEL_W - 1, 4), LINE = 128;
constexpr int STAGE_BYTES = CHANNELS * (LINES * LINE + TAIL * 16), PIPELINE_BYTES = POOL_H * STAGE_BYTES;
constexpr int SPAN = 2 * POOL_W + KERNEL_W - 1, VECTORS = ceil_div(SPAN, 4);  // what a lane reads of a row and channel

constexpr float NOTHING = -0.0f;  // where sums begin: NOTHING + x is x, also of x = -0, so compilers leave out the addition
constexpr float MINUS_LOG2_E = -1.4426950408889634f;
constexpr float DELTA_SCALE = 131072;                         // 2^17: delta, at most 1/4, as fp16
constexpr int WEIGHT_EXPONENT = 14, SUM_EXPONENT = 13;        // powers of two bring the largest below these
constexpr int MOST_WEIGHT_EXPONENT = 120, MOST_EXPONENT = 96;  // of the powers

// ---- PTX
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes, or writes zeros where `bytes` is 0; then `from` is not read.
DEVICE void cp_async_cg_16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Copies 4 bytes, or writes a zero where `bytes` is 0; then `from` is not read.
DEVICE void cp_async_ca_4(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Waits for all cp.async of this thread.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

DEVICE uint4 ld_shared_v4_u32(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
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
DEVICE void st_shared_u32(uint32_t at, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEVICE void st_shared_v4_f32(uint32_t at, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// d (16 x 8) += a (16 x 16) * b (16 x 8), fp16 with fp32 sums. Lane 4 * n + q has columns 2 * q and 2 * q + 1 of d, rows n and
// n + 8.
DEVICE void mma_m16n8k16_f32_f16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEVICE float ex2_approx(float v) {  // relative error 2^-22.5
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
DEVICE float rcp_approx(float v) {  // within 1 ulp
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
    return reciprocal;
}

// ---- numbers
// Two floats as fp16, the first one in the lower bits, and their residuals.
DEVICE uint32_t fp16_pair(float a, float b, float2& low) {
    const __half2 pair = __floats2half2_rn(a, b);
    low = make_float2(a - __low2float(pair), b - __high2float(pair));
    return *reinterpret_cast<const uint32_t*>(&pair);
}
DEVICE float warp_sum(float v) {
    UNROLL for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}
// Of floats that are not negative: their bits are in order.
DEVICE float warp_max(float v) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(v))); }
// The power of two that brings `largest` just below 2^exponent; at most 2^most.
DEVICE float power_for(float largest, int exponent, int most) {
    const int power = exponent + 126 - static_cast<int>(__float_as_uint(largest) >> 23);  // largest < 2^(its exponent - 126)
    return __uint_as_float(static_cast<uint32_t>(smaller(power, most) + 127) << 23);
}
DEVICE float inverse(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Gives the weights, multiplied by `factor`, changed by change(taps of an output and a channel), and scaled, to store(output,
// channel, tap, high, low). Returns the scale. All threads call it.
template <class Change, class Store>
DEVICE float split_weights(const Element* weight, float factor, float* warp_values, Change change, Store store) {
    const auto load = [&](int i, float (&taps)[TAPS]) {
        const bool exists = i / CHANNELS < OUT_CHANNELS && i % CHANNELS < IN_CHANNELS;
        UNROLL for (int t = 0; t < TAPS; ++t)
            taps[t] = exists ? weight[(i / CHANNELS * IN_CHANNELS + i % CHANNELS) * TAPS + t] * factor : 0;
        change(taps);
    };
    float largest = 0, taps[TAPS];
    for (int i = threadIdx.x; i < OUTPUTS * CHANNELS; i += blockDim.x) {
        load(i, taps);
        UNROLL for (int t = 0; t < TAPS; ++t) largest = fmaxf(largest, fabsf(taps[t]));
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) largest = fmaxf(largest, warp_values[i]);
    const float scale = power_for(largest, WEIGHT_EXPONENT, MOST_WEIGHT_EXPONENT);
    for (int i = threadIdx.x; i < OUTPUTS * CHANNELS; i += blockDim.x) {
        load(i, taps);
        UNROLL for (int t = 0; t < TAPS; ++t) {
            const __half high = __float2half_rn(taps[t] * scale);
            store(i / CHANNELS, i % CHANNELS, t, high, __float2half_rn(taps[t] * scale - __half2float(high)));
        }
    }
    __syncthreads();
    return scale;
}

// ---- how a segment is cut
struct Work {
    Segment segment;
    int bands, rounds, steps;
};
DEVICE Work work_at(const Shape& s, int64_t line) {
    const int64_t end = first_row(s, blockIdx.x + 1);
    if (line >= end) return {};
    const Segment segment = segment_at(s, line, end);
    const int bands = larger(1, smaller(s.bands, segment.count / 2));  // none of a single row
    return {segment, bands, ceil_div(s.strips * bands, s.warps), ceil_div(segment.count, bands)};
}
struct Unit { int strip, first, rows; };
DEVICE Unit unit_of(const Shape& s, const Work& work, int index) {
    const int64_t band = index / s.strips, count = work.segment.count;
    const int begin = static_cast<int>(band * count / work.bands), end = static_cast<int>((band + 1) * count / work.bands);
    return {index % s.strips, work.segment.start + begin, band < work.bands ? end - begin : 0};
}

// ---- a warp's multistage pipeline: POOL_H stages, a row of its strip each
// Stages [0, FRESH) have the rows that belong to one pooled row alone, the others those that it shares with the next one. Once
// the warp has summed them, it asks for the rows of the next step, which come while it multiplies.
struct Pipeline {
    const Shape& s;
    const uint32_t data;            // shared address
    const Element* from = nullptr;  // what this lane copies next: eight lanes have a channel
    int valid = 0;                  // columns of the image from the lane's first on

    // The warp has read all rows of the unit before.
    DEVICE void begin(const Element* x, int image, const Unit& unit) {
        const int lane = threadIdx.x % 32, left = unit.strip * STRIP * POOL_W + lane % 8 * 4;
        const int64_t channel = static_cast<int64_t>(image) * IN_CHANNELS + lane / 8;
        from = x + (channel * s.height + unit.first * POOL_H) * s.width + left;
        valid = s.width - left;
        copy_rows<FRESH, OVERLAP>(unit.rows > 0);
        copy_rows<0, FRESH>(unit.rows > 0);
    }

    // The warp has read these stages: asks for their next rows, if there are more. What the image lacks becomes zeros.
    template <int FIRST, int COUNT>
    DEVICE void copy_rows(bool more) {
        __syncwarp();
        if (!more) return;
        const int lane = threadIdx.x % 32;
        const uint32_t stages = data + FIRST * STAGE_BYTES, to = stages + lane / 8 * LINE + ((lane % 8 ^ lane / 8) << 4);
        const uint32_t tail = stages + LINES * CHANNELS * LINE + lane % 8 * CHANNELS * 16 + lane / 8 * 16;
        const int64_t plane = static_cast<int64_t>(s.height) * s.width;
        // Calls copy(to, source, columns) for each of the lane's pieces of a row; `columns` of the image are left there.
        const auto copy_row = [&](int row, auto copy) {
            UNROLL for (int c = 0; c < CHANNELS; c += 4) {
                const Element* const source = from + c * plane;
                const int columns = c + lane / 8 < IN_CHANNELS ? valid : 0;
                UNROLL for (int line = 0; line < LINES; ++line)
                    copy(to + row * STAGE_BYTES + (line * CHANNELS + c) * LINE, source + 32 * line, columns - 32 * line);
                if (lane % 8 < TAIL) copy(tail + row * STAGE_BYTES + c * 16, source + 32 * LINES, columns - 32 * LINES);
            }
            from += s.width;
        };
        const auto copy_16 = [](uint32_t to, const Element* source, int columns) {
            cp_async_cg_16(to, source, columns > 0 ? 16 : 0);
        };
        const auto copy_4 = [](uint32_t to, const Element* source, int columns) {
            UNROLL_1 for (int i = 0; i < 4; ++i) cp_async_ca_4(to + 4 * i, source + i, i < columns ? 4 : 0);
        };
        if (s.aligned) UNROLL for (int row = 0; row < COUNT; ++row) copy_row(row, copy_16);
        else UNROLL_1 for (int row = 0; row < COUNT; ++row) copy_row(row, copy_4);
    }

    // Waits until all lanes' copies are there.
    DEVICE void wait() const {
        cp_async_wait_all();
        __syncwarp();
    }
};

// ---- box sums in registers
// Lane 4 * n + q has channels q and q + 4, and two neighbouring positions (`member`) of the strip, pair pair_of(n). In this
// order the eight lanes that read 16 bytes at a time touch all banks.
DEVICE int pair_of(int n) { return (n & 4) | (n & 1) << 1 | (n >> 1 & 1); }
using RowSums = float[4][KERNEL_W];  // [2 * (channel / 4) + member][column of the kernel]
using Sums = float[TAPS][4];

struct Pieces {
    uint32_t at[2][VECTORS];  // of channels q and q + 4: where in the first stage is what the lane reads
    DEVICE Pieces(uint32_t pipeline, int q, int pair) {
        UNROLL for (int i = 0; i < VECTORS; ++i) {
            const int piece = pair * POOL_W / 2 + i, tail = piece - 8 * LINES;
            UNROLL for (int upper = 0; upper < 2; ++upper) {
                const uint32_t in_line = (piece / 8 * CHANNELS + q) * LINE + ((piece % 8 ^ q) << 4) + upper * 4 * LINE;
                const uint32_t in_tail = LINES * CHANNELS * LINE + tail * CHANNELS * 16 + q * 16 + upper * 4 * 16;
                at[upper][i] = pipeline + (7 * POOL_W / 2 + i < 8 * LINES || tail < 0 ? in_line : in_tail);
            }
        }
    }
};

// Sums of POOL_W values of a row: for the kernel's middle column, and for the others what differs from it.
DEVICE void sum_row(const Pieces& pieces, int stage, RowSums& sums) {
    UNROLL for (int upper = 0; upper < 2; ++upper) {
        float x[4 * VECTORS];
        UNROLL for (int i = 0; i < VECTORS; ++i) {
            const uint4 v = ld_shared_v4_u32(pieces.at[upper][i] + stage * STAGE_BYTES);
            x[4 * i] = __uint_as_float(v.x), x[4 * i + 1] = __uint_as_float(v.y);
            x[4 * i + 2] = __uint_as_float(v.z), x[4 * i + 3] = __uint_as_float(v.w);
        }
        UNROLL for (int member = 0; member < 2; ++member) {
            const float* const v = x + member * POOL_W;
            float(&to)[KERNEL_W] = sums[2 * upper + member];
            float middle = NOTHING, left = NOTHING, right = NOTHING;
            UNROLL for (int i = 0; i < POOL_W; ++i) to[MIDDLE_W] = middle += v[MIDDLE_W + i];
            UNROLL for (int e = MIDDLE_W - 1; e >= 0; --e) to[e] = left += v[e] - v[e + POOL_W];
            UNROLL for (int e = MIDDLE_W + 1; e < KERNEL_W; ++e) to[e] = right += v[e - 1 + POOL_W] - v[e - 1];
        }
    }
}

// The same down the columns: sums of POOL_H rows for the kernel's middle row, and for the others what differs from it. `above`
// are the rows that the pooled row shares with the one before; afterwards those that it shares with the next one.
using SharedRows = RowSums[larger(OVERLAP, 1)];
DEVICE void box_sums(Pipeline& pipeline, bool more, const Pieces& pieces, SharedRows& above, Sums& sums) {
    RowSums row;
    SharedRows below;
    UNROLL for (int i = 0; i < 4 * TAPS; ++i) sums[i / 4][i % 4] = NOTHING;
    const auto add_to_middle = [&](const RowSums& from) {
        UNROLL for (int i = 0; i < 4; ++i)
            UNROLL for (int e = 0; e < KERNEL_W; ++e) sums[MIDDLE_H * KERNEL_W + e][i] += from[i][e];
    };
    UNROLL for (int r = MIDDLE_H; r < OVERLAP; ++r) add_to_middle(above[r]);
    pipeline.wait();
    UNROLL for (int r = 0; r < FRESH; ++r) {
        sum_row(pieces, r, row);
        add_to_middle(row);
    }
    UNROLL for (int r = 0; r < OVERLAP; ++r) {
        sum_row(pieces, FRESH + r, below[r]);
        if (r < MIDDLE_H) add_to_middle(below[r]);
    }
    pipeline.copy_rows<0, POOL_H>(more);
    UNROLL for (int i = 0; i < 4; ++i)
        UNROLL for (int e = 0; e < KERNEL_W; ++e) {
            float up = NOTHING, down = NOTHING;
            UNROLL for (int r = MIDDLE_H - 1; r >= 0; --r) sums[r * KERNEL_W + e][i] = up += above[r][i][e] - below[r][i][e];
            UNROLL for (int r = MIDDLE_H; r < OVERLAP; ++r)
                sums[(r + 1) * KERNEL_W + e][i] = down += below[r][i][e] - above[r][i][e];
            UNROLL for (int r = 0; r < OVERLAP; ++r) above[r][i][e] = below[r][i][e];
        }
}

// Where a lane's sums of the strip go. The largest of the group gets just below 2^SUM_EXPONENT.
template <bool STRICT>
DEVICE void store_sums(const Sums& sums, float scale, uint32_t to) {
    UNROLL for (int i = 0; i < 4; ++i, to += i == 2 ? PAIRS * SLAB - OCTET : OCTET) {
        float rest = 0;
        UNROLL for (int k = 0; k < PAIRS; ++k) {
            const int pair = (k + MIDDLE / 2) % PAIRS, tap = 2 * pair;  // the middle tap comes first: its rest is a column, too
            const float a = tap < TAPS ? sums[smaller(tap, TAPS - 1)][i] * scale : rest;
            const float b = tap + 1 < TAPS ? sums[smaller(tap + 1, TAPS - 1)][i] * scale : tap + 1 == TAPS ? rest : 0;
            float2 low, none;
            st_shared_u32(to + pair * SLAB, fp16_pair(a, b, low));
            if (k == 0) rest = MIDDLE % 2 ? low.y : low.x;
            const uint32_t rests = fp16_pair(tap == MIDDLE ? 0 : low.x, tap + 1 == MIDDLE ? 0 : low.y, none);
            if (STRICT) st_shared_u32(to + (SLABS + pair) * SLAB, rests);
        }
    }
}

// Fragments of operand a: [high, low][inner 16][16 outputs][lane] of 16 bytes. Returns the power of two in them.
__device__ float store_weights(const Element* weight, __half* to, float* warp_values) {
    // The middle column's weight is that of a whole row, then the middle row's that of a whole column: see Mathematics.
    const auto change = [](float (&taps)[TAPS]) {
        UNROLL for (int t = 0; t < TAPS; ++t)
            if (t % KERNEL_W != MIDDLE_W) taps[t / KERNEL_W * KERNEL_W + MIDDLE_W] += taps[t];
        UNROLL for (int t = 0; t < TAPS; ++t)
            if (t / KERNEL_W != MIDDLE_H) taps[MIDDLE_H * KERNEL_W + t % KERNEL_W] += taps[t];
    };
    const auto store = [&](int o, int c, int tap, __half high, __half low) {
        const int k = column_of(c, tap), lane = o % 8 * 4 + k % 8 / 2, word = o / 8 % 2 + k / 8 % 2 * 2;
        const int at = k / 16 * (FRAGMENT / 2) + ((o / 16 * 32 + lane) * 4 + word) * 2 + k % 2;
        to[at] = high, to[WEIGHT_BYTES / 4 + at] = low;
    };
    return split_weights(weight, MINUS_LOG2_E / (POOL_H * POOL_W), warp_values, change,
                         [&](int o, int c, int tap, __half high, __half low) {
        store(o, c, tap, high, low);
        if (tap == MIDDLE) store(o, c, TAPS, high, low);  // what rounding leaves of its sum
        if (tap == MIDDLE && TAPS % 2 == 0) store(o, c, TAPS + 1, __half(), __half());
    });
}

// ---- the forward pass; with TRAINING also each segment's gradients of weights and bias
template <bool STRICT, bool TRAINING, bool FEW>
struct Kernel {
    static constexpr int MOST_WARPS = FEW || STRICT && TRAINING ? 8 : 12;  // by their registers
    static constexpr bool KEEPS_WEIGHTS = FEW && !(STRICT && TRAINING);  // in registers
    static constexpr int WEIGHTS = KEEPS_WEIGHTS ? 0 : WEIGHT_BYTES;
    static constexpr int SUMS = (STRICT ? 2 : 1) * SLABS * SLAB;  // of a group
    __host__ __device__ static constexpr int pipelines(int warps) { return WEIGHTS + larger(warps / GROUP, 2) * SUMS; }
    static_assert(OUTPUTS * COLUMNS * 4 <= 2 * SUMS && WEIGHT_BYTES <= 2 * SUMS, "they lie where the sums of two groups do");
};

// gradients (16 outputs x COLUMNS) += deltas (16 x 16 positions) * sums (16 x COLUMNS). Tensor cores round towards zero, which
// adds up over a segment: strict products start from zero, and fp32 additions follow.
template <bool STRICT>
DEVICE void multiply_deltas(float (&gradients)[SLABS][4], const uint4& high, const uint4& low, uint32_t sums) {
    UNROLL for (int slab = 0; slab < SLABS; slab += 2) {
        float products[2][4] = {};
        float(*const to)[4] = STRICT ? products : gradients + slab;
        const auto multiply = [&](const uint4& a, const uint4& b) {
            mma_m16n8k16_f32_f16(to[0], a, b.x, b.z);
            mma_m16n8k16_f32_f16(to[1], a, b.y, b.w);
        };
        const uint4 b = ldmatrix_m8n8_x4_trans(sums + slab * SLAB);
        if (STRICT) multiply(high, ldmatrix_m8n8_x4_trans(sums + (SLABS + slab) * SLAB)), multiply(low, b);
        multiply(high, b);
        UNROLL for (int i = 0; STRICT && i < 8; ++i) gradients[slab + i / 4][i % 4] += products[i / 4][i % 4];
    }
}

// Deltas as input_gradient takes them: pairs of outputs, 8 apart, at both members of a pair of positions, then of the next.
DEVICE uint4 paired_outputs(const uint4& w) {
    return make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.x, w.y, 0x7632),
                      __byte_perm(w.z, w.w, 0x7632));
}

// Back from differences to taps: `sums` (OUTPUTS x COLUMNS) has the gradients, added up over all groups.
DEVICE void write_gradients(const float* sums, const float* bias_sums, float* to) {
    for (int i = threadIdx.x; i < OUT_CHANNELS * IN_CHANNELS; i += blockDim.x) {
        const float* const from = sums + i / IN_CHANNELS * COLUMNS;
        float taps[TAPS];
        UNROLL for (int t = 0; t < TAPS; ++t) taps[t] = from[column_of(i % IN_CHANNELS, t)];
        taps[MIDDLE] += from[column_of(i % IN_CHANNELS, TAPS)];
        UNROLL for (int t = 0; t < TAPS; ++t)
            if (t / KERNEL_W != MIDDLE_H) taps[t] += taps[MIDDLE_H * KERNEL_W + t % KERNEL_W];
        UNROLL for (int t = 0; t < TAPS; ++t)
            if (t % KERNEL_W != MIDDLE_W) taps[t] += taps[t / KERNEL_W * KERNEL_W + MIDDLE_W];
        UNROLL for (int t = 0; t < TAPS; ++t) to[i * TAPS + t] = taps[t];
    }
    for (int o = threadIdx.x; o < OUT_CHANNELS; o += blockDim.x) to[WEIGHTS + o] = bias_sums[o];
}

template <bool STRICT, bool TRAINING, bool FEW>
__global__ void __launch_bounds__(Kernel<STRICT, TRAINING, FEW>::MOST_WARPS * 32, 1)
    conv_pool_sum(const Shape s, const Tensors t) {
    using K = Kernel<STRICT, TRAINING, FEW>;
    constexpr bool KEPT = K::KEEPS_WEIGHTS;
    extern __shared__ __align__(128) char memory[];
    __shared__ float warp_values[K::MOST_WARPS], biases[OUTPUTS], bias_sums[OUTPUTS], weight_unit;
    __shared__ float4 group_largest[K::MOST_WARPS / GROUP];
    __shared__ Work work;  // the segment at hand
    __shared__ uint32_t saved[2][K::MOST_WARPS];  // where a warp's part of the deltas goes, in this round and the one before
    // Of its group's 64 positions a warp sums the boxes of 16, and computes 16 outputs, from 16 * rank on, at all.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, n = lane / 4, q = lane % 4;
    const int group = warp / GROUP, rank = warp % GROUP;
    const uint32_t weights = shared_address(memory) + (rank * 32 + lane) * 16;
    const uint32_t sums_at = shared_address(memory) + K::WEIGHTS + group * K::SUMS;
    const uint32_t my_sums = sums_at + rank * 2 * OCTET + n * 16 + q * 4;
    const uint32_t matrices = sums_at + lane / 16 * OCTET + lane / 8 % 2 * SLAB + lane % 8 * 16;  // two slabs of two octets

    const float weight_scale = store_weights(t.weight, reinterpret_cast<__half*>(memory), warp_values);
    uint4 kept[KEPT ? 2 * PAIRS : 1];
    if constexpr (KEPT)
        UNROLL for (int i = 0; i < 2 * PAIRS; ++i) kept[i] = ld_shared_v4_u32(weights + i * FRAGMENT);
    for (int o = threadIdx.x; o < OUTPUTS; o += blockDim.x)  // the sigmoid of an output that does not exist is zero
        biases[o] = o < OUT_CHANNELS ? MINUS_LOG2_E * t.bias[o] : INFINITY;
    if (threadIdx.x == 0) weight_unit = inverse(weight_scale);

    Pipeline pipeline{s, shared_address(memory) + K::pipelines(s.warps) + warp * PIPELINE_BYTES};
    const Pieces pieces(pipeline.data, q, pair_of(n));
    if (threadIdx.x == 0) work = work_at(s, first_row(s, blockIdx.x));
    __syncthreads();  // the work is known; kept weights have been read, and what lay there may be overwritten
    while (work.segment.count > 0) {
        float total = 0, scale = __uint_as_float((MOST_EXPONENT + 127) << 23);
        float gradients[SLABS][4] = {}, bias_gradients[2] = {};
        UNROLL_1 for (int round = 0; round < work.rounds; ++round) {
            const Unit unit = unit_of(s, work, round * s.warps + warp);
            pipeline.begin(t.x, work.segment.image, unit);
            // Bits 4 * part + 2 * member + i: whether column 2 * q + i of the product with a part's (a warp's) positions is one
            // of the image; 16 bits further, whether in the last step, too, when some units have ended.
            const int steps = work.steps;
            uint32_t inside = 0;
            UNROLL for (int part = 0; part < GROUP; ++part) {
                const Unit other = unit_of(s, work, round * s.warps + GROUP * group + part);
                UNROLL for (int i = 0; i < 4; ++i) {
                    const int position = other.strip * STRIP + 2 * pair_of(2 * q + i % 2) + i / 2;
                    if (position < s.columns && other.rows > 0) inside |= 1u << (4 * part + i);
                    if (position < s.columns && other.rows == steps) inside |= 1u << (16 + 4 * part + i);
                }
            }
            if (lane == 0) saved[round % 2][warp] = ((work.segment.image * s.rows + unit.first) * s.strips + unit.strip) * 128u;
            const int columns = s.columns - unit.strip * STRIP;
            SharedRows above;
            pipeline.wait();
            if (unit.rows > 0)
                UNROLL for (int i = 0; i < OVERLAP; ++i) sum_row(pieces, FRESH + i, above[i]);
            pipeline.copy_rows<FRESH, OVERLAP>(unit.rows > 0);
            UNROLL_1 for (int step = 0; step < steps; ++step) {
                Sums sums = {};
                if (step < unit.rows) box_sums(pipeline, step + 1 < unit.rows, pieces, above, sums);
                if (columns < STRIP)  // what lies beyond the image's last window may be anything
                    UNROLL for (int i = 0; i < 4 * TAPS; ++i)
                        if (2 * pair_of(n) + i % 2 >= columns) sums[i / 4][i % 4] = 0;

                // One power of two for all sums of the group.
                float four[4] = {};
                UNROLL for (int i = 0; i < 4 * TAPS; ++i) four[i % 4] = fmaxf(four[i % 4], fabsf(sums[i / 4][i % 4]));
                float largest = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
                if (largest == INFINITY) {
                    largest = 0;
                    UNROLL for (int i = 0; i < 4 * TAPS; ++i)
                        if (fabsf(sums[i / 4][i % 4]) < INFINITY) largest = fmaxf(largest, fabsf(sums[i / 4][i % 4]));
                }
                largest = warp_max(largest);
                if (lane == 0) reinterpret_cast<float*>(group_largest)[warp] = largest;
                bar_sync(1 + group, GROUP * 32);  // all have read the last step's sums, and know the largest of this one's
                const float4 each = group_largest[group];
                const float group_most = fmaxf(fmaxf(each.x, each.y), fmaxf(each.z, each.w));
                const float fitting = power_for(group_most, SUM_EXPONENT, MOST_EXPONENT);
                if (TRAINING && fitting < scale)  // what has been summed shrinks, too
                    UNROLL for (int i = 0; i < 4 * SLABS; ++i) gradients[i / 4][i % 4] *= fitting * inverse(scale);
                scale = TRAINING ? fminf(scale, fitting) : fitting;
                store_sums<STRICT>(sums, scale, my_sums);
                bar_sync(1 + group, GROUP * 32);

                const float bias[2] = {biases[16 * rank + n], biases[16 * rank + n + 8]};
                const float unit = fminf(fmaxf(inverse(scale) * weight_unit, 0x1p-126f), 0x1p127f);  // never 0 or infinite
                const uint32_t counts = step == steps - 1 ? inside >> 16 : inside;
                float step_sums[2] = {};  // of deltas: one sum of a whole segment would be less exact
#pragma unroll (TRAINING ? 1 : GROUP)
                for (int first = 0; first < GROUP; first += PARTS) {
                    float d[2 * PARTS][4] = {};  // [octet of positions]: 16 outputs x 8
                    UNROLL for (int k = 0; k < PAIRS; ++k) {
                        const uint4 high = KEPT ? kept[KEPT ? k : 0] : ld_shared_v4_u32(weights + k * FRAGMENT);
                        const uint4 low =
                            KEPT ? kept[KEPT ? PAIRS + k : 0] : ld_shared_v4_u32(weights + (PAIRS + k) * FRAGMENT);
                        // Products that add to the same sums stand far apart; small ones come first.
                        const auto load = [&](int slab, int part) {
                            return ldmatrix_m8n8_x4(matrices + slab * SLAB + (first + part) * 2 * OCTET);
                        };
                        const auto multiply = [&](int part, const uint4& a, const uint4& b) {
                            mma_m16n8k16_f32_f16(d[2 * part], a, b.x, b.y);
                            mma_m16n8k16_f32_f16(d[2 * part + 1], a, b.z, b.w);
                        };
                        uint4 b[PARTS];
                        UNROLL for (int part = 0; part < PARTS; ++part) b[part] = load(2 * k, part);
                        if (STRICT)
                            UNROLL for (int part = 0; part < PARTS; ++part) multiply(part, high, load(SLABS + 2 * k, part));
                        UNROLL for (int part = 0; part < PARTS; ++part) multiply(part, low, b[part]);
                        UNROLL for (int part = 0; part < PARTS; ++part) multiply(part, high, b[part]);
                    }
                    UNROLL for (int i = 0; i < 8 * PARTS; ++i) d[i / 4][i % 4] = fmaf(d[i / 4][i % 4], unit, bias[i / 2 % 2]);
                    UNROLL for (int part = 0; part < PARTS; ++part) {
                        const uint32_t count = counts >> 4 * (first + part) & 15;
                        if (count != 15)
                            UNROLL for (int i = 0; i < 8; ++i)
                                if (!(count >> (i / 4 * 2 + i % 2) & 1)) d[2 * part + i / 4][i % 4] = INFINITY;
                        uint32_t high[4], low[4];  // deltas, as operand a
                        UNROLL for (int i = 0; i < 4; ++i) {
                            float sigmoids[2], delta[2];
                            UNROLL for (int j = 0; j < 2; ++j) {
                                sigmoids[j] = rcp_approx(1 + ex2_approx(d[2 * part + i / 2][i % 2 * 2 + j]));
                                delta[j] = sigmoids[j] * fmaf(-sigmoids[j], DELTA_SCALE, DELTA_SCALE);
                            }
                            total += sigmoids[0] + sigmoids[1];
                            if (TRAINING) step_sums[i % 2] += delta[0] + delta[1];
                            float2 rest, none;
                            high[i] = fp16_pair(delta[0], delta[1], rest), low[i] = fp16_pair(rest.x, rest.y, none);
                        }
                        if constexpr (TRAINING) {
                            const uint4 a = make_uint4(high[0], high[1], high[2], high[3]);
                            const uint4 a_low = make_uint4(low[0], low[1], low[2], low[3]);
                            multiply_deltas<STRICT>(gradients, a, a_low, matrices + (first + part) * 2 * OCTET);
                            if (t.deltas && __any_sync(~0u, count)) {
                                const uint32_t at = saved[round % 2][GROUP * group + first + part] + step * s.strips * 128u;
                                uint4* const to = t.deltas + (at + rank * 32 + lane);
                                *to = paired_outputs(a);
                                const int64_t all = static_cast<int64_t>(s.images) * s.rows * s.strips * 128;
                                if (STRICT && t.low_deltas) to[all] = paired_outputs(a_low);
                            }
                        }
                    }
                }
                UNROLL for (int i = 0; i < 2; ++i) bias_gradients[i] += step_sums[i];
            }
        }
        total = warp_sum(total);
        __syncthreads();  // all have read the last step's sums, and the last segment's
        if (lane == 0) warp_values[warp] = total;
        if constexpr (TRAINING) {
            float* const scratch = reinterpret_cast<float*>(memory + K::WEIGHTS);
            UNROLL_1 for (int turn = 0; turn < s.warps / GROUP; ++turn) {
                if (turn == group) {
                    const float unit = 1 / DELTA_SCALE / (POOL_H * POOL_W) * inverse(scale);
                    UNROLL for (int i = 0; i < 4 * SLABS; ++i) {
                        float& sum = scratch[(16 * rank + n + i / 2 % 2 * 8) * COLUMNS + i / 4 * 8 + 2 * q + i % 2];
                        sum = gradients[i / 4][i % 4] * unit + (turn ? sum : 0);
                    }
                    UNROLL for (int i = 0; i < 2; ++i) {
                        float& sum = bias_sums[16 * rank + n + 8 * i], value = bias_gradients[i];
                        value += __shfl_xor_sync(~0u, value, 1);
                        value += __shfl_xor_sync(~0u, value, 2);
                        if (q == 0) sum = value * (1 / DELTA_SCALE) + (turn ? sum : 0);
                    }
                }
                __syncthreads();
            }
            write_gradients(scratch, bias_sums, t.gradients + static_cast<int64_t>(work.segment.slot) * PARAMETERS);
        }
        __syncthreads();  // all have read the scratch, and all warps' sums are known
        if (threadIdx.x == 0) {
            float sum = 0;
            for (int i = 0; i < s.warps; ++i) sum += warp_values[i];
            t.sums[work.segment.slot] = sum;
            work = work_at(s, static_cast<int64_t>(work.segment.image) * s.rows + work.segment.start + work.segment.count);
        }
        __syncthreads();  // the next segment is known
    }
}

// ---- the gradient of x
// A block has GRADIENT_STRIPS strips of an image, its tile, in two streams of pooled rows. Wider images have several tiles; all
// but the first begin with the last strip of the one before, for what it leaves to its right neighbour.
constexpr int GRADIENT_STRIPS = 6, STREAM = 32 * GRADIENT_STRIPS;
constexpr int OUT_WIDTH = STRIP * POOL_W, OUT_PITCH = OUT_WIDTH + 4;
constexpr int EDGE = KERNEL_W - 1, EDGES = larger(EDGE, 1), EXCHANGED = KERNEL_H * 2 * EDGES;
constexpr int INPUT_WEIGHT_BYTES = 4 * TAPS * 32 * 16;
constexpr int INPUT_GRADIENT_BYTES = INPUT_WEIGHT_BYTES + 2 * GRADIENT_STRIPS * CHANNELS * OUT_PITCH * 4;
__host__ __device__ constexpr int gradient_streams(bool strict) { return strict ? 1 : 2; }  // by their registers

// Fragments of operand b: [16 outputs][tap][lane] of 16 bytes, high and low parts. The inner index is the output, in the order
// in which deltas were saved: of each 16 outputs 0, 8, 1, 9, ... Returns the power of two in them.
__device__ float store_transposed_weights(const Element* weight, __half* to, float* warp_values) {
    const auto store = [&](int o, int c, int tap, __half high, __half low) {
        const int k = o % 8 * 2 + o / 8 % 2, at = ((o / 16 * TAPS + tap) * 32 + c * 4 + k % 8 / 2) * 8 + k / 8 * 2 + k % 2;
        to[at] = high, to[at + 4] = low;
    };
    return split_weights(weight, 1, warp_values, [](float (&)[TAPS]) {}, store);
}

template <bool STRICT>
__global__ void __launch_bounds__(gradient_streams(STRICT) * STREAM, 1)
    input_gradient(const uint2* __restrict__ deltas, const Element* __restrict__ weight, const float* __restrict__ grad_out,
                   Element* __restrict__ grad_x, const Shape s) {
    constexpr int STREAMS = gradient_streams(STRICT);
    extern __shared__ __align__(128) char memory[];
    __shared__ float exchange[2][STREAMS][1 + GRADIENT_STRIPS][4][EXCHANGED];  // the first of a stream stays zero
    __shared__ float warp_values[STREAMS * GRADIENT_STRIPS];
    for (int i = threadIdx.x; i < 2 * STREAMS * 4 * EXCHANGED; i += blockDim.x)
        exchange[i / (STREAMS * 4 * EXCHANGED)][i / (4 * EXCHANGED) % STREAMS][0][i / EXCHANGED % 4][i % EXCHANGED] = 0;
    const float weight_scale = store_transposed_weights(weight, reinterpret_cast<__half*>(memory), warp_values);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, n = lane / 4, q = lane % 4;
    const int stream = warp / GRADIENT_STRIPS, own_strip = warp % GRADIENT_STRIPS, pair = pair_of(n);
    const uint32_t weights = shared_address(memory) + lane * 16;
    const uint32_t out = shared_address(memory) + INPUT_WEIGHT_BYTES + warp * CHANNELS * OUT_PITCH * 4;
    const int left_lane = pair_of((pair - 1) & 7) * 4 + q, tiles = s.images / s.batch;
    const int64_t end = first_row(s, blockIdx.x + 1), rest = static_cast<int64_t>(s.batch) * s.rows * s.strips * 256;
    int parity = 0;
    for (int64_t line = first_row(s, blockIdx.x); line < end;) {
        const Segment segment = segment_at(s, line, end);
        line += segment.count;
        const int sample = segment.image / tiles, tile = segment.image % tiles, half = ceil_div(segment.count, STREAMS);
        const int strip = tile * (GRADIENT_STRIPS - 1) + own_strip;
        const int first = segment.start + stream * half, last = smaller(first + half, segment.start + segment.count);
        const bool writes_below = last == s.rows && first < last, writes = tile == 0 || own_strip > 0;
        const float scale = grad_out[sample] / (DELTA_SCALE * POOL_H * POOL_W) / weight_scale;
        // The row before the first one gives its part of the first; the image's last stream writes what lies below its windows.
        const int below = segment.start + segment.count == s.rows ? ceil_div(s.height, POOL_H) - s.rows : 0;
        const uint2* from = deltas + (static_cast<int64_t>(sample) * s.rows * s.strips + strip) * 256 + q * 8 + n;
        const auto load = [&](int row, int64_t part, uint4 (&a)[4]) {
            const bool exists = first < last && row >= 0 && row < last && strip < s.strips;
            const uint2* const at = from + part + static_cast<int64_t>(row) * s.strips * 256;
            UNROLL for (int v = 0; v < 4; ++v) {
                const uint2 none = make_uint2(0, 0), k0 = exists ? __ldcs(at + 64 * v) : none,
                            k8 = exists ? __ldcs(at + 64 * v + 32) : none;
                a[v] = make_uint4(k0.x, k0.y, k8.x, k8.y);
            }
        };
        uint4 next[4], next_low[4];  // the operands of the next step
        load(first - 1, 0, next);
        if (STRICT) load(first - 1, rest, next_low);
        float carry[larger(OVERLAP, 1)][KERNEL_W][4] = {};
        UNROLL_1 for (int row = first - 1; row < first + half + below; ++row) {
            float d[TAPS][4] = {};
            UNROLL for (int v = 0; v < 4; ++v)
                UNROLL for (int y = 0; y < KERNEL_H; ++y) {
                    float(*const sums)[4] = d + y * KERNEL_W;
                    const uint32_t from_row = weights + (v * TAPS + y * KERNEL_W) * 32 * 16;
                    uint4 b[KERNEL_W];  // high and low parts
                    UNROLL for (int e = 0; e < KERNEL_W; ++e) b[e] = ld_shared_v4_u32(from_row + e * 32 * 16);
                    if (STRICT)
                        UNROLL for (int e = 0; e < KERNEL_W; ++e) mma_m16n8k16_f32_f16(sums[e], next_low[v], b[e].x, b[e].y);
                    UNROLL for (int e = 0; e < KERNEL_W; ++e) mma_m16n8k16_f32_f16(sums[e], next[v], b[e].z, b[e].w);
                    UNROLL for (int e = 0; e < KERNEL_W; ++e) mma_m16n8k16_f32_f16(sums[e], next[v], b[e].x, b[e].y);
                }
            load(row + 1, 0, next);
            if (STRICT) load(row + 1, rest, next_low);
            // rows[y][e]: what row y of x gets through column e of the kernel; [2 * member + channel].
            float rows[KERNEL_H][KERNEL_W][4];
            UNROLL for (int e = 0; e < KERNEL_W; ++e)
                UNROLL for (int i = 0; i < 4; ++i) {
                    UNROLL for (int tap = e; tap < TAPS; tap += KERNEL_W) d[tap][i] *= scale;
                    float above = NOTHING, later = NOTHING;
                    UNROLL for (int y = 0; y < KERNEL_H; ++y) {
                        above += d[y * KERNEL_W + e][i];
                        rows[y][e][i] = above + (y < OVERLAP ? carry[y][e][i] : NOTHING);
                    }
                    UNROLL for (int y = OVERLAP - 1; y >= 0; --y) carry[y][e][i] = later += d[(y + 1) * KERNEL_W + e][i];
                }
            // What the next position's columns get: [row][2 * member + channel][column].
            float edge[KERNEL_H][4][EDGES];
            UNROLL for (int y = 0; y < KERNEL_H; ++y)
                UNROLL for (int i = 0; i < 4; ++i)
                    UNROLL for (int z = EDGE - 1; z >= 0; --z)
                        edge[y][i][z] = rows[y][z + 1][i] + (z == EDGE - 1 ? NOTHING : edge[y][i][z + 1]);
            float* const mine = exchange[parity][stream][1 + own_strip][q];
            if (pair == 7)
                UNROLL for (int i = 0; i < KERNEL_H * 2 * EDGE; ++i)
                    mine[i] = edge[i / (2 * EDGES)][2 + i / EDGES % 2][i % EDGES];
            bar_sync(1 + stream, STREAM);
            float from_left[KERNEL_H][2][EDGES];  // [row][channel][column], by the position on the left of the lane's first
            UNROLL for (int i = 0; i < KERNEL_H * 2 * EDGE; ++i)
                from_left[i / (2 * EDGES)][i / EDGES % 2][i % EDGES] =
                    __shfl_sync(~0u, edge[i / (2 * EDGES)][2 + i / EDGES % 2][i % EDGES], left_lane);
            if (pair == 0) {
                const float* const left = exchange[parity][stream][own_strip][q];
                UNROLL for (int i = 0; i < KERNEL_H * 2 * EDGE; ++i)
                    from_left[i / (2 * EDGES)][i / EDGES % 2][i % EDGES] = left[i];
            }
            parity ^= 1;
            const bool written = writes && row >= first && (row < last || writes_below);
            UNROLL for (int y = 0; y < KERNEL_H; ++y) {
                UNROLL for (int channel = 0; channel < 2; ++channel) {
                    float v[2 * POOL_W];
                    UNROLL for (int member = 0; member < 2; ++member)
                        UNROLL for (int z = 0; z < POOL_W; ++z) {
                            const float own = rows[y][smaller(z, KERNEL_W - 1)][2 * member + channel];
                            const float before = v[member * POOL_W + larger(z - 1, 0)];
                            v[member * POOL_W + z] = z == 0 ? own : z < KERNEL_W ? before + own : before;
                        }
                    UNROLL for (int z = 0; z < EDGE; ++z) {
                        v[z] += from_left[y][channel][z];
                        v[POOL_W + z] += edge[y][channel][z];
                    }
                    // Odd lanes' vectors go the other way round, so that the phases of a store touch all banks.
                    UNROLL for (int i = 0; i < POOL_W / 2; ++i) {
                        const int turn = n % 2 ? POOL_W / 2 - 1 - i : i;
                        float e[4];
                        UNROLL for (int k = 0; k < 4; ++k) e[k] = n % 2 ? v[4 * (POOL_W / 2 - 1 - i) + k] : v[4 * i + k];
                        st_shared_v4_f32(out + ((2 * q + channel) * OUT_PITCH + 2 * pair * POOL_W + 4 * turn) * 4,
                                         make_float4(e[0], e[1], e[2], e[3]));
                    }
                }
                __syncwarp();
                // The warp's rows, 16 bytes a lane. The last one is that of all FRESH rows.
                const int copies = !written ? 0 : smaller(y == KERNEL_H - 1 ? FRESH : 1, s.height - row * POOL_H - y);
                UNROLL for (int i = lane; i < CHANNELS * OUT_WIDTH / 4; i += 32) {
                    const int c = i / (OUT_WIDTH / 4), column = i % (OUT_WIDTH / 4) * 4, at = strip * OUT_WIDTH + column;
                    const uint4 v = ld_shared_v4_u32(out + (c * OUT_PITCH + column) * 4);
                    if (at >= s.width || c >= IN_CHANNELS) continue;
                    const int64_t line = (static_cast<int64_t>(sample) * IN_CHANNELS + c) * s.height + row * POOL_H + y;
                    float* to = grad_x + line * s.width + at;
                    if (s.aligned) {
                        UNROLL for (int copy = 0; copy < larger(FRESH, 1); ++copy, to += s.width)
                            if (copy < copies) __stcs(reinterpret_cast<uint4*>(to), v);
                    } else {
                        UNROLL_1 for (int copy = 0; copy < copies; ++copy, to += s.width) {
                            to[0] = __uint_as_float(v.x);
                            if (at + 1 < s.width) to[1] = __uint_as_float(v.y);
                            if (at + 2 < s.width) to[2] = __uint_as_float(v.z);
                            if (at + 3 < s.width) to[3] = __uint_as_float(v.w);
                        }
                    }
                }
                __syncwarp();
            }
        }
    }
}
// ---- sums over segments, and over samples
DEVICE int block_of(const Shape& s, int64_t row) {  // which has a row of the line
    return static_cast<int>(((row + 1) * s.blocks - 1) / (static_cast<int64_t>(s.images) * s.rows));
}

// sums[image][k] = the sum of its segments' terms[slot][k]. With `factors` there is one sum, that of factors[i] * terms[i][k]
// over the images. The last `tail_size` of a sum go to `tail`.
constexpr int SUM_WIDTH = 32, SUM_PARTS = 8;
__global__ void __launch_bounds__(SUM_WIDTH * SUM_PARTS)
    sum_terms(const float* __restrict__ factors, const float* __restrict__ terms, float* __restrict__ sums,
              float* __restrict__ tail, int size, int tail_size, const Shape s) {
    __shared__ double part_sums[SUM_PARTS][SUM_WIDTH];
    const int chunks = ceil_div(size, SUM_WIDTH), part = threadIdx.x / SUM_WIDTH, lane = threadIdx.x % SUM_WIDTH;
    const int64_t image = blockIdx.x / chunks;
    const int k = blockIdx.x % chunks * SUM_WIDTH + lane;
    const int64_t first = factors ? 0 : image + block_of(s, image * s.rows);
    const int64_t last = factors ? s.images - 1 : image + block_of(s, (image + 1) * s.rows - 1);
    double sum = 0;
    if (k < size)
#pragma unroll 8
        for (int64_t i = first + part; i <= last; i += SUM_PARTS) sum += (factors ? factors[i] : 1.0) * terms[i * size + k];
    part_sums[part][lane] = sum;
    __syncthreads();
    if (part > 0 || k >= size) return;
    for (int other = 1; other < SUM_PARTS; ++other) sum += part_sums[other][lane];
    if (k < size - tail_size) sums[image * (size - tail_size) + k] = static_cast<float>(sum);
    else tail[k - (size - tail_size)] = static_cast<float>(sum);
}

// ---- launches
static int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, attribute, device);
    return value;
}

static Shape make_shape(int64_t batch, int64_t height, int64_t width, const void* x, int tiles) {
    const int sm_count = device_attribute(cudaDevAttrMultiProcessorCount);
    Shape s = {static_cast<int>(batch), static_cast<int>(height), static_cast<int>(width)};
    s.rows = (s.height - KERNEL_H + 1) / POOL_H, s.columns = (s.width - KERNEL_W + 1) / POOL_W;
    s.images = s.batch * tiles, s.strips = ceil_div(s.columns, STRIP);
    s.aligned = s.width % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    // As many blocks as SMs, or as images where that keeps 95% of the SMs busy: whole images need no second pass over their
    // segments' sums.
    const int64_t waves = (s.images + sm_count - 1) / sm_count, whole = (s.images + waves - 1) / waves;
    const int64_t rows = static_cast<int64_t>(s.images) * s.rows;
    s.blocks = static_cast<int>(rows < sm_count ? rows : sm_count);
    if (s.images % whole == 0 && whole * 20 >= 19 * static_cast<int64_t>(sm_count)) s.blocks = static_cast<int>(whole);
    return s;
}

static void launch_sum_terms(const float* factors, const float* terms, float* sums, float* tail, int size, int tail_size,
                             const Shape& s, cudaStream_t stream) {
    const dim3 blocks((factors ? 1u : s.images) * ceil_div(size, SUM_WIDTH));
    sum_terms<<<blocks, SUM_WIDTH * SUM_PARTS, 0, stream>>>(factors, terms, sums, tail, size, tail_size, s);
}

// As many warps as fit, in fours. FEW have all registers, and their weights there.
template <bool STRICT, bool TRAINING, bool FEW>
static cudaError_t launch(Shape s, const Tensors& tensors, int limit, cudaStream_t stream) {
    using K = Kernel<STRICT, TRAINING, FEW>;
    const auto bytes = [](int warps) { return K::pipelines(warps) + warps * PIPELINE_BYTES; };
    s.warps = K::MOST_WARPS;
    while (s.warps > (FEW ? GROUP : 2 * GROUP) && bytes(s.warps) > limit) s.warps -= GROUP;
    if (!FEW && bytes(s.warps) > limit) return launch<STRICT, TRAINING, true>(s, tensors, limit, stream);
    s.bands = s.warps / std::gcd(s.strips, s.warps);
    const auto kernel = conv_pool_sum<STRICT, TRAINING, FEW>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes(s.warps));
    if (error != cudaSuccess) return error;
    kernel<<<s.blocks, s.warps * 32, bytes(s.warps), stream>>>(s, tensors);
    return cudaGetLastError();
}

// Floats of scratch: the sums of all segments, where a sample has several.
extern "C" int64_t count_scratch(int64_t batch, int64_t height, int64_t width, int64_t training) {
    const Shape s = make_shape(batch, height, width, nullptr, 1);
    return s.images % s.blocks ? static_cast<int64_t>(s.images + s.blocks) * (training ? 1 + PARAMETERS : 1) : 0;
}

// `gradients` (batch, PARAMETERS) and `deltas` may be null; strict ones have their low parts behind them.
extern "C" int launch_forward(const Element* x, const Element* weight, const Element* bias, float* scratch, float* out,
                              float* gradients, void* deltas, int64_t batch, int64_t height, int64_t width, int64_t strict,
                              cudaStream_t stream) {
    const Shape s = make_shape(batch, height, width, x, 1);
    const bool split = s.images % s.blocks;
    float* const scratch_gradients = scratch + s.images + s.blocks;
    const Tensors tensors = {x, weight, bias, split ? scratch : out, split ? scratch_gradients : gradients,
                             static_cast<uint4*>(deltas), strict != 0};
    int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (SHARED_LIMIT_KB > 0) limit = smaller(limit, SHARED_LIMIT_KB * 1024);
    const auto run = gradients ? strict ? launch<true, true, true> : launch<false, true, false>
                     : strict ? launch<true, false, false> : launch<false, false, false>;
    const cudaError_t error = run(s, tensors, limit - 1024, stream);  // what a kernel declares itself takes less than 1 KB
    if (error != cudaSuccess || !split) return error;
    launch_sum_terms(nullptr, scratch, out, nullptr, 1, 0, s, stream);
    if (gradients) launch_sum_terms(nullptr, scratch_gradients, gradients, nullptr, PARAMETERS, 0, s, stream);
    return cudaGetLastError();
}

// Where not null: the gradient of x, and those of weight and bias, the samples' weighted by grad_out.
extern "C" int launch_gradients(const uint2* deltas, const Element* weight, const float* grad_out, const float* gradients,
                                Element* grad_x, float* grad_weight, float* grad_bias, int64_t batch, int64_t height,
                                int64_t width, int64_t strict, cudaStream_t stream) {
    if (grad_x) {
        const int bytes = INPUT_GRADIENT_BYTES, strips = ceil_div(width, OUT_WIDTH), more = GRADIENT_STRIPS - 1;
        const Shape s = make_shape(batch, height, width, grad_x, strips <= GRADIENT_STRIPS ? 1 : (strips - 2) / more + 1);
        const auto kernel = strict ? input_gradient<true> : input_gradient<false>;
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
        kernel<<<s.blocks, gradient_streams(strict) * STREAM, bytes, stream>>>(deltas, weight, grad_out, grad_x, s);
    }
    Shape s = {};
    s.images = static_cast<int>(batch);
    if (grad_weight) launch_sum_terms(grad_out, gradients, grad_weight, grad_bias, PARAMETERS, OUT_CHANNELS, s, stream);
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
SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int[2] pool, int needs) -> (Tensor, Tensor, Tensor)"
GRADIENT = "(Tensor grad, Tensor x, Tensor weight, Tensor bias, int[2] pool, Tensor grads, Tensor deltas, int needs)"
GRADIENT += " -> (Tensor, Tensor, Tensor)"

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
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_H", "KERNEL_W", "POOL_H", "POOL_W"
    return kernels(**dict(zip(names, map(int, (*weight.shape, *pool)), strict=True)), SHARED_LIMIT_KB=SHARED_LIMIT_KB)


def original(x, weight, bias, pool):
    return torch.sigmoid(nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)).sum(dim=(1, 2, 3))


def saved(x, weight, bias, pool, needs, library_for=library_for):
    """Return room for the output, each sample's gradients of the parameters, and deltas (needs & 1; strict: low parts behind).

    The latter two are empty where PyTorch computes. 32 bits count vectors of eight deltas.
    """
    batch, rows, columns = len(x), *((x.shape[i] - weight.shape[i] + 1) // pool[i - 2] for i in (2, 3))
    of_sample = rows * ((columns + 15) // 16) * 1024
    served = needs and library_for(weight, pool).is_served() and (not needs & 1 or batch * of_sample < 2**35)
    deltas = x.new_empty((1 + is_strict()) * batch if served and needs & 1 else 0, of_sample, dtype=torch.float16)
    return x.new_empty(batch), x.new_empty(batch if served else 0, weight.numel() + bias.numel()), deltas


def conv_pool_sum(x, weight, bias, pool, needs, library_for=library_for, saved=saved, original=original):
    """Return the output and what the gradients of x (needs & 1) and of the parameters (needs & 2) take: see `saved`."""
    batch, *_, height, width = x.shape
    (out_channels, in_channels, kernel_h, kernel_w), (pool_h, pool_w) = weight.shape, pool
    check("x", x, (batch, in_channels, height, width), x.device)
    check("weight", weight, weight.shape, x.device)
    check("bias", bias, (out_channels,), x.device)
    if min(pool) < 1 or height < kernel_h + pool_h - 1 or width < kernel_w + pool_w - 1:
        fits = f"room for a window of {[*pool]} behind a kernel of {[kernel_h, kernel_w]}"
        raise RuntimeError(f"expected {fits}; got an image of {height} x {width}")
    if batch * max(height, weight.numel() // 32 + 3) >= 2**31 or x.numel() >= 2**39:
        raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got x of shape {[*x.shape]}")
    if x.is_cuda and capability(x.device) < (8, 0):
        raise RuntimeError("expected a GPU of compute capability 8.0 or later; v3_box_sums runs on others")
    library, (out, grads, deltas) = library_for(weight, pool), saved(x, weight, bias, pool, needs)
    if not library.is_served():
        warnings.warn(
            "PyTorch computes what these kernels do not take: at most 8 channels in and 64 out, 9 taps, "
            "windows of an even width up to 8 and at most 16 pixels, no kernel wider than its window and one more",
            stacklevel=2,
        )
        return original(x, weight, bias, pool), grads, deltas
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    if batch:
        scratch = x.new_empty(count(library.count_scratch, batch, height, width, needs if len(grads) else 0))
        kept = grads if len(grads) else None, deltas if len(deltas) else None
        launch(library.launch_forward, x, weight, bias, scratch, out, *kept, batch, height, width, is_strict())
    return out, grads, deltas


operator = torch.library.custom_op(f"{NAME}::forward", conv_pool_sum, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(saved)


def gradient(grad, x, weight, bias, pool, grads, deltas, needs, library_for=library_for):
    """Return the gradients of x (needs & 1), weight and bias (needs & 2); empty tensors where they are not needed."""
    grad, weight, (batch, _, height, width) = grad.contiguous(), weight.contiguous(), x.shape
    found = [each.new_empty(each.shape if needs & bit else 0) for each, bit in ((x, 1), (weight, 2), (bias, 2))]
    to, strict = [each if each.numel() else None for each in found], len(deltas) > batch
    launch(library_for(weight, pool).launch_gradients, deltas, weight, grad, grads, *to, batch, height, width, strict)
    return tuple(found)


def gradients(grad, x, weight, bias, pool, grads, deltas, needs):
    return tuple(each.new_empty(each.shape if needs & bit else 0) for each, bit in ((x, 1), (weight, 2), (bias, 2)))


of_gradients = torch.library.custom_op(f"{NAME}::gradient", gradient, mutates_args=(), device_types=DEVICE, schema=GRADIENT)
of_gradients.register_fake(gradients)


def backward(ctx, grad, *_, original=original, gradient=gradient):
    """The gradient; PyTorch's, with the 4.8 GB that this file avoids, where kernels do not serve, and that of a gradient."""
    *tensors, grads, deltas = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    needs = wanted[0] + 2 * any(wanted[1:])
    if torch.is_grad_enabled() or needs & ~ctx.needs or not len(grads):
        return *torch.func.vjp(lambda *tensors: original(*tensors, ctx.pool), *tensors)[1](grad), None, None
    function = gradient if is_direct(grad, *tensors) else torch.ops.conv_pool_sigmoid_sum_training_tensor_core.gradient
    found = function(grad, *tensors, ctx.pool, grads, deltas, needs)
    return *[each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)], None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.pool, ctx.needs = inputs
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
    def forward(ctx, *operands, function=conv_pool_sum, setup_context=setup_context):
        output = function(*operands)
        setup_context(ctx, operands, output)
        return output


def call(x, weight, bias, pool, direct=Direct):
    needs = x.requires_grad + 2 * (weight.requires_grad or bias.requires_grad) if torch.is_grad_enabled() else 0
    function = direct.apply if is_direct(x, weight, bias) else torch.ops.conv_pool_sigmoid_sum_training_tensor_core.forward
    return function(x, weight, bias, pool, needs)[0]


class ModelNew(nn.Module):
    operator = staticmethod(call)

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = (pool_kernel_size,) * 2 if isinstance(pool_kernel_size, int) else pool_kernel_size

    def forward(self, x):
        return self.operator(x, self.conv.weight, self.conv.bias, self.pool)


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
