"""conv_pool_sigmoid_sum, v4: the product of weights and box sums on the tensor cores, in one pass over the input.

Why it is faster
    v3 spends its time on fp32 multiply-adds, and on carrying box sums through shared memory between two barriers of its block.
    Here every warp streams a strip of 16 pooled columns through a multistage pipeline of its own (cp.async), and sums it in
    registers. Sums pass through shared memory once, to be multiplied by mma.sync: as fp16, which has TF32's precision but not
    its range. Latency bound: in 55% of the cycles no warp is ready.

Mathematics
    box[e] is the sum of a window's p pixels, shifted by the kernel's element e; out = the sum of sigmoid(bias + 1/p * sum_e).
    The kernel's columns other than the middle one, m, and its rows are taken as differences, in which the mean cancels:
    sum over e of w[e] * box[e] = sum over e != m of w[e] * (box[e] - box[m]) + (sum over e of w[e]) * box[m]
    The middle's sum and weights are two fp16 values, high + low (22 bits); strict (PyTorch forbids TF32): all are (fp16x3).
    Powers of two bring them into range; a sum below 2^-27 of 64 positions' largest has under 11 bits (strict: 2^-15, 22).

Launches
    conv_pool_sum: SMs, or samples; 384 threads, 152 KB, strict 182. add_segments: samples; adds where blocks share one.

Floor
    604 MB in: 0.139 ms on an H200 (4.35 TB/s); half for 16-bit types.

Takes
    CUDA tensors (batch, in_channels, height, width) of float32, fp16 or bf16 on compute capability 8.0 or later; what SERVED
    says, in images of any size. Sums are fp32, as is the output under autocast. PyTorch computes the rest, with a warning, and
    the gradient. Deterministic for a number of SMs. MIT; copy it.
"""

import contextlib
import copy
import ctypes
import functools
import threading
import warnings

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv_pool_sigmoid_sum_v4_tensor_core"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
SHARED_LIMIT_KB = 0  # builds as for a device with that much shared memory a block; 0: what the device has
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # ModelNew's, shape of x, under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W, SHARED_LIMIT_KB, ELEMENT and STRICT.
#define PASTE(a, b) a##b
#define IS(type) PASTE(IS_, type)
#define IS___nv_bfloat16 1
#if IS(ELEMENT)  // the header takes half a second to compile
#include <cuda_bf16.h>
#endif
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
using Element = ELEMENT;  // of x and the parameters: float, __half or __nv_bfloat16

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

// Explicit: PyTorch builds without the conversions of 16-bit types.
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE void store(float* to, float x) { *to = x; }
DEVICE void store(__half* to, float x) { *to = __float2half_rn(x); }
#if IS(ELEMENT)
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
#endif

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// Words used below:
//   position  a pooled column of a pooled row: a window of pixels, which has a box sum for each tap and channel
//   tap       an element of the convolution's kernel
//   strip     16 pooled columns, of a warp; four warps are a group, whose 64 positions are columns of its products
//   segment   the part of one sample in one block: all pooled rows of all samples stand in one line, of which every block takes
//             an equal part (a persistent kernel with a static tile scheduler); `slot` is where its sums go in device memory
//   unit      a segment is cut into strips of columns and bands of rows, the units; in each round a warp has one
//   step      a pooled row of a unit. All warps take as many steps in a round; a unit may have one row less, or none.
//   pair      two neighbouring positions, of a lane; `member` (0 or 1) is one of them
//
// Who does what, in a block: each warp, for each of its units, asks cp.async for the first rows of its strip; in each step it
//   waits for its own rows, sums them in registers, and asks for the next step's    (only its lanes: __syncwarp)
//   stores the sums, scaled to fp16, where its group multiplies                     (the group's named barrier)
//   multiplies 16 of the outputs with the sums of all the group's 64 positions; sigmoids, added to its total

struct Shape {
    int batch, height, width, rows, columns;  // of x (batch, IN_CHANNELS, height, width); rows, columns: of pooled positions
    int blocks, strips, warps;                // strips of an image, warps of a block
    int bands;                                // of a segment, so that all warps have a unit
    bool aligned;                             // rows begin at multiples of 16 bytes
};
struct Tensors {
    const Element *x, *weight, *bias;
    void* sums;      // one a segment
    bool as_floats;  // else they have x's type, which only samples' sums may have
};

// ---- constants and layout
constexpr int TAPS = KERNEL_H * KERNEL_W;
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
//   | pipeline of warp 0: POOL_H rows of x, 8 channels x 66        |   8,704   16-bit types: 4,352
//   | of warp 1; ...                                               |
//   +--------------------------------------------------------------+
// A lane's sums of a channel at a position are packed in pairs: all taps, then the residual of the middle one. A slab
// has such a pair of four channels: 16 bytes, a row of an 8 x 8 matrix of ldmatrix. Two slabs are the inner 16 of a product.
constexpr int PAIRS = ceil_div(TAPS + 1, 2), SLABS = 2 * PAIRS, SLAB = 64 * 16, OCTET = 8 * 16;
__host__ __device__ constexpr int column_of(int channel, int tap) {
    return (channel / 4 * PAIRS + tap / 2) * 8 + channel % 4 * 2 + tap % 2;
}
constexpr int FRAGMENT = GROUP * 32 * 16, WEIGHT_BYTES = 2 * PAIRS * FRAGMENT;  // operand a of all outputs for one inner 16

// A stage of a pipeline is a row of a strip: lines of 32 columns, [line][channel], then pieces of the columns behind the last
// line, [piece][channel]. A piece has 4 columns. Piece i of a line stands at i ^ swizzle(channel), so that all accesses are
// conflict-free: a quarter of a warp reads 16-byte pieces at a time, half a warp 8-byte ones.
constexpr int PIECE = 4 * sizeof(Element), LINE = 8 * PIECE;
constexpr int LINES = STRIP * POOL_W / 32, TAIL = ceil_div(KERNEL_W - 1, 4);
DEVICE int swizzle(int channel) { return sizeof(Element) == 2 ? channel % 4 / 2 : channel % 4; }
constexpr int STAGE_BYTES = CHANNELS * (LINES * LINE + TAIL * PIECE), PIPELINE_BYTES = POOL_H * STAGE_BYTES;
constexpr int SPAN = 2 * POOL_W + KERNEL_W - 1, VECTORS = ceil_div(SPAN, 4);  // what a lane reads of a row and channel

constexpr float NOTHING = -0.0f;  // where sums begin: NOTHING + x is x, also of x = -0, so compilers leave out the addition
constexpr float MINUS_LOG2_E = -1.4426950408889634f;
constexpr int WEIGHT_EXPONENT = 14, SUM_EXPONENT = 13;        // powers of two bring the largest below these
constexpr int MOST_WEIGHT_EXPONENT = 120, MOST_EXPONENT = 96;  // of the powers

// ---- PTX
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes, or writes zeros where `bytes` is 0; then `from` is not read.
DEVICE void cp_async_cg_16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Copies 8 bytes, or writes zeros where `bytes` is 0; then `from` is not read.
DEVICE void cp_async_ca_8(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
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
DEVICE void st_shared_u32(uint32_t at, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
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
DEVICE void store_sum(void* sums, bool as_floats, int64_t at, float sum) {
    if (as_floats) static_cast<float*>(sums)[at] = sum;
    else store(static_cast<Element*>(sums) + at, sum);
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

// ---- the static tile scheduler
DEVICE int64_t first_row(const Shape& s, int block) { return static_cast<int64_t>(s.batch) * s.rows * block / s.blocks; }

struct Work {  // a segment, pooled rows [start, start + count) of a sample, and how it is cut
    int sample, start, count, slot;
    int bands, rounds, steps;
};
DEVICE Work work_at(const Shape& s, int64_t line) {
    const int64_t line_end = first_row(s, blockIdx.x + 1);
    if (line >= line_end) return {};
    const int sample = static_cast<int>(line / s.rows), start = static_cast<int>(line % s.rows);
    const int count = static_cast<int>(line_end - line < s.rows - start ? line_end - line : s.rows - start);
    const int slot = sample + (s.batch % s.blocks ? static_cast<int>(blockIdx.x) : 0);
    const int bands = larger(1, smaller(s.bands, count / 2));  // none of a single row
    return {sample, start, count, slot, bands, ceil_div(s.strips * bands, s.warps), ceil_div(count, bands)};
}
struct Unit { int strip, first, rows; };
DEVICE Unit unit_of(const Shape& s, const Work& work, int index) {
    const int64_t band = index / s.strips, count = work.count;
    const int begin = static_cast<int>(band * count / work.bands), end = static_cast<int>((band + 1) * count / work.bands);
    return {index % s.strips, work.start + begin, band < work.bands ? end - begin : 0};
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
    DEVICE void begin(const Element* x, int sample, const Unit& unit) {
        const int lane = threadIdx.x % 32, left = unit.strip * STRIP * POOL_W + lane % 8 * 4;
        const int64_t channel = static_cast<int64_t>(sample) * IN_CHANNELS + lane / 8;
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
        const uint32_t stages = data + FIRST * STAGE_BYTES;
        const uint32_t to = stages + lane / 8 * LINE + (lane % 8 ^ swizzle(lane / 8)) * PIECE;
        const uint32_t tail = stages + LINES * CHANNELS * LINE + (lane % 8 * CHANNELS + lane / 8) * PIECE;
        const int64_t plane = static_cast<int64_t>(s.height) * s.width;
        // Calls copy(to, source, columns) for each of the lane's pieces of a row; `columns` of the image are left there.
        const auto copy_row = [&](int row, auto copy) {
            UNROLL for (int c = 0; c < CHANNELS; c += 4) {
                const Element* const source = from + c * plane;
                const int columns = c + lane / 8 < IN_CHANNELS ? valid : 0;
                UNROLL for (int line = 0; line < LINES; ++line)
                    copy(to + row * STAGE_BYTES + (line * CHANNELS + c) * LINE, source + 32 * line, columns - 32 * line);
                if (lane % 8 < TAIL) copy(tail + row * STAGE_BYTES + c * PIECE, source + 32 * LINES, columns - 32 * LINES);
            }
            from += s.width;
        };
        const auto copy_piece = [](uint32_t to, const Element* source, int columns) {
            if (PIECE == 16) cp_async_cg_16(to, source, columns > 0 ? 16 : 0);
            else cp_async_ca_8(to, source, columns > 0 ? 8 : 0);
        };
        const auto copy_columns = [](uint32_t to, const Element* source, int columns) {
            if constexpr (PIECE == 16) {
                UNROLL_1 for (int i = 0; i < 4; ++i) cp_async_ca_4(to + 4 * i, source + i, i < columns ? 4 : 0);
            } else {  // cp.async copies no fewer than 4 bytes
                uint32_t words[2] = {};
                UNROLL for (int i = 0; i < 4; ++i)
                    if (i < columns) reinterpret_cast<Element*>(words)[i] = source[i];
                st_shared_u32(to, words[0]), st_shared_u32(to + 4, words[1]);
            }
        };
        if (s.aligned) UNROLL for (int row = 0; row < COUNT; ++row) copy_row(row, copy_piece);
        else UNROLL_1 for (int row = 0; row < COUNT; ++row) copy_row(row, copy_columns);
    }

    // Waits until all lanes' copies are there.
    DEVICE void wait() const {
        cp_async_wait_all();
        __syncwarp();
    }
};

// ---- box sums in registers
// Lane 4 * n + q has channels q and q + 4, and two neighbouring positions (`member`) of the strip, pair pair_of(n). In this
// order the lanes that read at a time touch all banks.
DEVICE int pair_of(int n) { return (n & 4) | (n & 1) << 1 | (n >> 1 & 1); }
using RowSums = float[4][KERNEL_W];  // [2 * (channel / 4) + member][column of the kernel]
using Sums = float[TAPS][4];

struct Pieces {
    uint32_t at[2][VECTORS];  // of channels q and q + 4: where in the first stage is what the lane reads
    DEVICE Pieces(uint32_t pipeline, int q, int pair) {
        UNROLL for (int i = 0; i < VECTORS; ++i) {
            const int piece = pair * POOL_W / 2 + i, tail = piece - 8 * LINES;
            UNROLL for (int upper = 0; upper < 2; ++upper) {
                const uint32_t in_line = (piece / 8 * CHANNELS + q + 4 * upper) * LINE + (piece % 8 ^ swizzle(q)) * PIECE;
                const uint32_t in_tail = LINES * CHANNELS * LINE + (tail * CHANNELS + q + 4 * upper) * PIECE;
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
            const uint32_t at = pieces.at[upper][i] + stage * STAGE_BYTES;
            alignas(PIECE) uint32_t words[PIECE / 4];
            if constexpr (PIECE == 16) reinterpret_cast<uint4&>(words) = ld_shared_v4_u32(at);
            else reinterpret_cast<uint2&>(words) = ld_shared_v2_u32(at);
            UNROLL for (int k = 0; k < 4; ++k) x[4 * i + k] = to_float(reinterpret_cast<const Element*>(words)[k]);
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

// Fragments of operand a: [high, low][inner 16][16 outputs][lane] of 16 bytes. Returns the power of two in them. All threads
// call it.
__device__ float store_weights(const Element* weight, __half* to, float* warp_values) {
    // The middle column's weight is that of a whole row, then the middle row's that of a whole column: see Mathematics.
    const auto load = [&](int i, float (&taps)[TAPS]) {
        const bool exists = i / CHANNELS < OUT_CHANNELS && i % CHANNELS < IN_CHANNELS;
        constexpr float FACTOR = MINUS_LOG2_E / (POOL_H * POOL_W);
        UNROLL for (int t = 0; t < TAPS; ++t)
            taps[t] = exists ? to_float(weight[(i / CHANNELS * IN_CHANNELS + i % CHANNELS) * TAPS + t]) * FACTOR : 0;
        UNROLL for (int t = 0; t < TAPS; ++t)
            if (t % KERNEL_W != MIDDLE_W) taps[t / KERNEL_W * KERNEL_W + MIDDLE_W] += taps[t];
        UNROLL for (int t = 0; t < TAPS; ++t)
            if (t / KERNEL_W != MIDDLE_H) taps[MIDDLE_H * KERNEL_W + t % KERNEL_W] += taps[t];
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
        UNROLL for (int t = 0; t < 2 * PAIRS; ++t) {  // behind the taps, the middle one again for the residual of its sum
            const float value = t < TAPS ? taps[smaller(t, TAPS - 1)] * scale : t == TAPS ? taps[MIDDLE] * scale : 0;
            const __half high = __float2half_rn(value), low = __float2half_rn(value - __half2float(high));
            const int o = i / CHANNELS, k = column_of(i % CHANNELS, t);
            const int of_lane = o % 8 * 4 + k % 8 / 2, word = o / 8 % 2 + k / 8 % 2 * 2;
            const int at = k / 16 * (FRAGMENT / 2) + ((o / 16 * 32 + of_lane) * 4 + word) * 2 + k % 2;
            to[at] = high, to[WEIGHT_BYTES / 4 + at] = low;
        }
    }
    __syncthreads();
    return scale;
}

// ---- the kernel
// FEW: a block with few warps, which have all registers, and the weights there.
template <bool FEW>
struct Kernel {
    static constexpr int MOST_WARPS = FEW ? 8 : 12;  // by their registers
    static constexpr int WEIGHTS = FEW ? 0 : WEIGHT_BYTES;
    static constexpr int SUMS = (STRICT ? 2 : 1) * SLABS * SLAB;  // of a group
    __host__ __device__ static constexpr int pipelines(int warps) { return WEIGHTS + larger(warps / GROUP, 2) * SUMS; }
    static_assert(WEIGHT_BYTES <= 2 * SUMS, "they pass through where the sums of two groups lie");
};

template <bool FEW>
__global__ void __launch_bounds__(Kernel<FEW>::MOST_WARPS * 32, 1)
    conv_pool_sum(const Shape s, const Tensors t) {
    using K = Kernel<FEW>;
    extern __shared__ __align__(128) char memory[];
    __shared__ float warp_values[K::MOST_WARPS], biases[OUTPUTS], weight_unit;
    __shared__ float4 group_largest[K::MOST_WARPS / GROUP];
    __shared__ Work work;  // the segment at hand
    // Of its group's 64 positions a warp sums the boxes of 16, and computes 16 outputs, from 16 * rank on, at all.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, n = lane / 4, q = lane % 4;
    const int group = warp / GROUP, rank = warp % GROUP;
    const uint32_t weights = shared_address(memory) + (rank * 32 + lane) * 16;
    const uint32_t sums_at = shared_address(memory) + K::WEIGHTS + group * K::SUMS;
    const uint32_t my_sums = sums_at + rank * 2 * OCTET + n * 16 + q * 4;
    const uint32_t matrices = sums_at + lane / 16 * OCTET + lane / 8 % 2 * SLAB + lane % 8 * 16;  // two slabs of two octets

    const float weight_scale = store_weights(t.weight, reinterpret_cast<__half*>(memory), warp_values);
    uint4 kept[FEW ? 2 * PAIRS : 1];
    if constexpr (FEW)
        UNROLL for (int i = 0; i < 2 * PAIRS; ++i) kept[i] = ld_shared_v4_u32(weights + i * FRAGMENT);
    for (int o = threadIdx.x; o < OUTPUTS; o += blockDim.x)  // the sigmoid of an output that does not exist is zero
        biases[o] = o < OUT_CHANNELS ? MINUS_LOG2_E * to_float(t.bias[o]) : INFINITY;
    if (threadIdx.x == 0) weight_unit = inverse(weight_scale);

    Pipeline pipeline{s, shared_address(memory) + K::pipelines(s.warps) + warp * PIPELINE_BYTES};
    const Pieces pieces(pipeline.data, q, pair_of(n));
    if (threadIdx.x == 0) work = work_at(s, first_row(s, blockIdx.x));
    __syncthreads();  // the work is known; kept weights have been read, and what lay there may be overwritten
    while (work.count > 0) {
        float total = 0;
        UNROLL_1 for (int round = 0; round < work.rounds; ++round) {
            const Unit unit = unit_of(s, work, round * s.warps + warp);
            pipeline.begin(t.x, work.sample, unit);
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
                const float scale = power_for(group_most, SUM_EXPONENT, MOST_EXPONENT);
                store_sums(sums, scale, my_sums);
                bar_sync(1 + group, GROUP * 32);

                const float bias[2] = {biases[16 * rank + n], biases[16 * rank + n + 8]};
                const float unit = fminf(fmaxf(inverse(scale) * weight_unit, 0x1p-126f), 0x1p127f);  // never 0 or infinite
                const uint32_t counts = step == steps - 1 ? inside >> 16 : inside;
                UNROLL for (int first = 0; first < GROUP; first += PARTS) {
                    float d[2 * PARTS][4] = {};  // [octet of positions]: 16 outputs x 8
                    UNROLL for (int k = 0; k < PAIRS; ++k) {
                        const uint4 high = FEW ? kept[FEW ? k : 0] : ld_shared_v4_u32(weights + k * FRAGMENT);
                        const uint4 low = FEW ? kept[FEW ? PAIRS + k : 0] : ld_shared_v4_u32(weights + (PAIRS + k) * FRAGMENT);
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
                        UNROLL for (int i = 0; i < 4; ++i)
                            total += rcp_approx(1 + ex2_approx(d[2 * part + i / 2][i % 2 * 2])) +
                                     rcp_approx(1 + ex2_approx(d[2 * part + i / 2][i % 2 * 2 + 1]));
                    }
                }
            }
        }
        total = warp_sum(total);
        if (lane == 0) warp_values[warp] = total;
        __syncthreads();  // all warps' sums are known
        if (threadIdx.x == 0) {
            float sum = 0;
            for (int i = 0; i < s.warps; ++i) sum += warp_values[i];
            store_sum(t.sums, t.as_floats, work.slot, sum);
            work = work_at(s, static_cast<int64_t>(work.sample) * s.rows + work.start + work.count);
        }
        __syncthreads();  // the next segment is known
    }
}

// out[sample] = the sum of its segments' sums, a warp each.
__global__ void __launch_bounds__(32) add_segments(const float* __restrict__ sums, void* out, bool as_floats, const Shape s) {
    const int64_t sample = blockIdx.x, rows = static_cast<int64_t>(s.batch) * s.rows;
    const auto slot_of = [&](int64_t row) { return sample + static_cast<int>(((row + 1) * s.blocks - 1) / rows); };
    const int64_t first = slot_of(sample * s.rows), last = slot_of((sample + 1) * s.rows - 1);
    double sum = 0;
    for (int64_t i = first + threadIdx.x; i <= last; i += 32) sum += sums[i];
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x == 0) store_sum(out, as_floats, sample, static_cast<float>(sum));
}

// ---- launches
// As many warps as fit into `limit` bytes of shared memory, in fours.
template <bool FEW>
static cudaError_t launch(Shape s, const Tensors& tensors, int limit, cudaStream_t stream) {
    using K = Kernel<FEW>;
    const auto bytes = [](int warps) { return K::pipelines(warps) + warps * PIPELINE_BYTES; };
    s.warps = K::MOST_WARPS;
    while (s.warps > (FEW ? GROUP : 2 * GROUP) && bytes(s.warps) > limit) s.warps -= GROUP;
    if (!FEW && bytes(s.warps) > limit) return launch<true>(s, tensors, limit, stream);
    s.bands = s.warps / std::gcd(s.strips, s.warps);
    const auto kernel = conv_pool_sum<FEW>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes(s.warps));
    if (error != cudaSuccess) return error;
    kernel<<<s.blocks, s.warps * 32, bytes(s.warps), stream>>>(s, tensors);
    return cudaGetLastError();
}

// out: floats, or Elements. scratch: as many floats as there are samples and SMs together; not used where no blocks share a
// sample.
extern "C" int launch_conv_pool_sum(const Element* x, const Element* weight, const Element* bias, float* scratch, void* out,
                                    int64_t floats_out, int64_t batch, int64_t height, int64_t width, cudaStream_t stream) {
    int device = 0, sm_count = 0, limit = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (SHARED_LIMIT_KB > 0) limit = smaller(limit, SHARED_LIMIT_KB * 1024);
    Shape s = {static_cast<int>(batch), static_cast<int>(height), static_cast<int>(width)};
    s.rows = (s.height - KERNEL_H + 1) / POOL_H, s.columns = (s.width - KERNEL_W + 1) / POOL_W;
    s.strips = ceil_div(s.columns, STRIP), s.aligned = s.width % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    // As many blocks as SMs, or as samples where that keeps 95% of the SMs busy: whole samples need no add_segments.
    const int whole = ceil_div(s.batch, ceil_div(s.batch, sm_count));
    s.blocks = static_cast<int>(batch * s.rows < sm_count ? batch * s.rows : sm_count);
    if (s.batch % whole == 0 && whole * 20 >= 19 * sm_count) s.blocks = whole;
    const bool split = s.batch % s.blocks;
    const Tensors tensors = {x, weight, bias, split ? scratch : out, split || floats_out};
    const int own = 1024;  // what a kernel declares itself takes less
    const cudaError_t error = launch<false>(s, tensors, limit - own, stream);
    if (error != cudaSuccess || !split) return error;
    add_segments<<<s.batch, 32, 0, stream>>>(scratch, out, floats_out, s);
    return cudaGetLastError();
}
#endif
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
SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int[2] pool, ScalarType? dtype=None) -> Tensor"

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}  # what C++ calls them
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


def original(x, weight, bias, pool, dtype=None):
    pooled = nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)
    return torch.sigmoid(pooled).sum(dim=(1, 2, 3), dtype=dtype)


def conv_pool_sum(x, weight, bias, pool, dtype=None, kernels=kernels, original=original):
    """Return (batch,) of x (batch, in_channels, height, width), of x's type or float32, `dtype`.

    Raises RuntimeError for what the kernel does not take.
    """
    batch, *_, height, width = x.shape
    (out_channels, in_channels, kernel_h, kernel_w), (pool_h, pool_w) = weight.shape, pool
    if x.dtype not in ELEMENTS or dtype not in (None, x.dtype, torch.float32):
        raise RuntimeError(f"expected x as float32, float16 or bfloat16, out as x or float32; got {x.dtype}, {dtype}")
    check("x", x, (batch, in_channels, height, width), x.device, x.dtype)
    check("weight", weight, weight.shape, x.device, x.dtype)
    check("bias", bias, (out_channels,), x.device, x.dtype)
    if min(pool) < 1 or height < kernel_h + pool_h - 1 or width < kernel_w + pool_w - 1:
        fits = f"room for a window of {[*pool]} behind a kernel of {[kernel_h, kernel_w]}"
        raise RuntimeError(f"expected {fits}; got an image of {height} x {width}")
    if batch * height >= 2**31 or x.numel() >= 2**39:
        raise RuntimeError(f"expected batch * height < 2^31 and fewer than 2^39 elements; got x of shape {[*x.shape]}")
    if x.is_cuda and capability(x.device) < (8, 0):
        raise RuntimeError("expected a GPU of compute capability 8.0 or later; v3_box_sums runs on others")
    channels, pools = {"IN_CHANNELS": in_channels, "OUT_CHANNELS": out_channels}, {"POOL_H": pool_h, "POOL_W": pool_w}
    strict = x.dtype == torch.float32 and is_strict() and not torch.is_autocast_enabled(DEVICE)  # it permits less than TF32
    build = {"ELEMENT": ELEMENTS[x.dtype], "STRICT": int(strict)}
    build["SHARED_LIMIT_KB"] = SHARED_LIMIT_KB
    library = kernels(**channels, KERNEL_H=kernel_h, KERNEL_W=kernel_w, **pools, **build)
    if not library.is_served():
        warnings.warn(
            "PyTorch computes what these kernels do not take: at most 8 channels in and 64 out, 9 taps, "
            "windows of an even width up to 8 and at most 16 pixels, no kernel wider than its window and one more",
            stacklevel=2,
        )
        return original(*(each.to(dtype) for each in (x, weight, bias)), pool)  # in float32 where the sum is
    x, weight, bias, out = x.contiguous(), weight.contiguous(), bias.contiguous(), x.new_empty(batch, dtype=dtype)
    if batch:
        scratch = x.new_empty(batch + 1024, dtype=torch.float32)  # no GPU has as many SMs
        is_float = int(out.dtype == torch.float32)
        launch(library.launch_conv_pool_sum, x, weight, bias, scratch, out, is_float, batch, height, width)
    return out


operator = torch.library.custom_op(f"{NAME}::forward", conv_pool_sum, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(original)


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, with the 4.8 GB that the forward pass avoids."""
    return *torch.func.vjp(lambda *tensors: original(*tensors, *ctx.others), *ctx.saved_tensors)[1](grad), None, None


def setup_context(ctx, inputs, output):
    *tensors, pool, dtype = inputs
    ctx.others = pool, dtype
    ctx.save_for_backward(*tensors)


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


def call(x, weight, bias, pool, dtype=None, function=conv_pool_sum, direct=Direct):
    """Call the operator or, in eager mode, its function. Autocast: 16-bit x and the weights get its type, float32 stays."""
    is_cast = torch.is_autocast_enabled(DEVICE) and x.dtype in (torch.float16, torch.bfloat16)
    if is_cast:
        x, weight, bias = (each.to(torch.get_autocast_dtype(DEVICE)) for each in (x, weight, bias))
        dtype = torch.float32 if DEVICE == "cuda" else None  # as autocast's sums there
    operands = x, weight, bias, pool, dtype
    with torch.autocast(DEVICE, enabled=False) if is_cast else contextlib.nullcontext():
        if not is_direct(*operands):
            return torch.ops.conv_pool_sigmoid_sum_v4_tensor_core.forward(*operands)
        return (direct.apply if torch.is_grad_enabled() else function)(*operands)


class ModelNew(nn.Module):
    operator = staticmethod(call)
    out_dtype = None  # torch.float32: the sum is not rounded to x's type

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = (pool_kernel_size,) * 2 if isinstance(pool_kernel_size, int) else pool_kernel_size

    def forward(self, x):
        return self.operator(x, self.conv.weight, self.conv.bias, self.pool, self.out_dtype)


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
