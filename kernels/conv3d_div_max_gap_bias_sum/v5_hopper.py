"""conv3d_div_max_gap_bias_sum, v5: TMA brings x, a persistent kernel, planes of x stay in registers.

Why it is faster
    It is persistent and warp-specialized: blocks have equal parts of the rows of windows. TMA loads fp32 up to two stages
    (64 KiB) ahead, four producer warps scale and pack it as fp16, a column's 8 channels side by side, and eight consumer warps
    keep planes of x in registers from slab to slab (not strict): 32 matrices loaded by ldmatrix feed 112 products. mma.sync,
    since wgmma, by count, would read weights for every 64 positions. Measured on an H200: 0.133 ms (v4 0.144).

Mathematics
    max((conv + b) / d) = (max(sign(d) conv) + sign(d) b) / |d|: the weights take the sign, the rest follows the mean. x and
    weights are rounded to TF32's 11 bits, in fp16 with a power of two for each segment, a block's part of an image (a sample,
    or what fits of it), taken from its first stage; one that overflows fp16 is attempted again. Tiny weights are off by 2^-38
    of the largest. Strict (no TF32): fp16x3, high and low parts. Positions that see equal pixels have equal sums.

Launches
    stream_max_mean  SMs, or fewer  384 threads  207 KiB, strict 215  fewer: whole samples each, if 95% of SMs stay busy
    finish_samples   samples        32           0                    adds a sample's segments, unless each sample is one

Floor
    268 MB in, 0.061 ms on an H200 (4.39 TB/s); 47.6 GFLOP at the 622 TFLOP/s of mma.sync, 0.077. What binds: registers permit
    two consumer warps a scheduler; one issues a product every 8 or 9 cycles at best. Their pipe is busy 59% of the time.

Takes
    float32 on compute capability 9.0, else RuntimeError; what SERVED excludes, PyTorch computes, with a warning. x that is not
    in rows of 16 bytes is copied first. The gradient is PyTorch's. Deterministic for a number of SMs.
"""

import ctypes
import functools
import hashlib
import inspect
import math
import os
import re
import shutil
import sys
import threading
import warnings

import torch
import torch.nn as nn

NAME = "conv3d_div_max_gap_bias_sum_v5_hopper"
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W.
#include <cuda.h>
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

// ---- words
// A window of 2 x 2 x 2 positions reads 4 x 4 x 4 pixels. A tile is 8 windows side by side in 16 outputs. A slab is a layer of
// windows along depth. Where a sample's slabs are too many for shared memory, or its columns for a band, it is cut into images.
// A band is two rows of x, in all planes and channels of an image: a row of windows reads two bands. All rows of windows of all
// images stand in one line, of which each block takes an equal part. A segment is the part of one image in one block; it is
// scaled by a power of two that its first stage suggests, and attempted again if a value overflows fp16.
constexpr int WARP = 32, CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;
constexpr int CONSUMER_REGISTERS = 200, PRODUCER_REGISTERS = 104;  // 64,512 of the SM's 65,536
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, WEIGHTS = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int CHANNELS = 8, OUTPUTS = 16, TILE_WINDOWS = 8;  // of the tensor core's operands; what does not exist is zero
constexpr int SIDE = 4, COLUMNS = 64, PIECES = COLUMNS / 4;  // of x: a window's pixels in each direction, a row's columns
constexpr int WHOLE_WINDOWS = (COLUMNS - 2) / 2;             // that fit into COLUMNS
constexpr int PART_WINDOWS = WHOLE_WINDOWS / 2 * 2;          // parts of longer rows begin 16-byte aligned

// ---- shared memory of a block, for the original's size
//   0         32        64       96       128      160      192       205.5  207 KiB
//   | stage 0 | stage 1 | band 0 | band 1 | band 2 | band 3 | weights | Shared |
//     |                   |                                   [high, low][tap][lane]
//     |                   fp16: plane 0: row 0: columns 0 2 4 .. 62, then 1 3 5 .. 63, 8 channels each; row 1; plane 1 ..
//     fp32, as TMA writes it: [channel][plane][row][column], in half of the planes
// The pixels of one column in 8 windows are 8 rows of 16 bytes side by side: a matrix for ldmatrix, free of bank conflicts.
// Strict: a band has the high parts of all planes, then the low parts, and a sample is two images, of 4 and 3 slabs: 215 KiB.
//
//             filled by                                 emptied by
//   a stage   TMA, which one producer calls; `loaded`   4 producer warps: bar_sync 1, then TMA is called again
//   a band    4 producer warps, all arrive: `full`      8 consumer warps, all arrive: `empty`
//   weights   8 consumer warps, once: bar_sync 2        nobody
constexpr int STAGES = 2, STAGE_PLANES = 8;  // at most; the stages of a band are equally large
constexpr int BANDS = 4;                     // so that consumer warps may be a row apart
constexpr int ATTEMPTS = BANDS / 2 + 1;      // at a segment that may be under way: each has two bands at least
constexpr int STAGE_ROW_BYTES = COLUMNS * 4, COLUMN_BYTES = CHANNELS * 2, ODD_COLUMNS = COLUMNS / 2 * COLUMN_BYTES;
constexpr int BAND_ROW_BYTES = 2 * ODD_COLUMNS, PLANE_BYTES = 2 * BAND_ROW_BYTES;
constexpr int TAP_BYTES = WARP * 8, OPERAND_BYTES = TAPS * TAP_BYTES;  // of the weights

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

struct Shape {
    int64_t batch;
    int depth, height, width, slabs, rows, columns;  // of x, and of its windows; a channel has less than 2^31 pixels
    int slab_parts, image_slabs, column_parts, image_columns, blocks;
    int stage_planes, stage_bytes, band_bytes, dynamic_bytes;  // of shared memory

    __host__ __device__ int parts() const { return slab_parts * column_parts; }
    __host__ __device__ int64_t images() const { return batch * parts(); }
    __host__ __device__ int64_t first_row(int64_t block) const { return images() * rows * block / blocks; }
    bool sample_is_segment() const { return parts() == 1 && batch % blocks == 0; }
};

// The part of one image that begins at `line` of the line of all rows, of which a block's part ends at `end`.
struct Segment {
    int64_t image, sample;
    int first_slab, slabs, first_column, columns, first_row, rows;  // of windows

    DEVICE void set(const Shape& s, int64_t line, int64_t end) {
        image = line / s.rows, sample = image / s.parts();
        const int part = image % s.parts();
        first_slab = part / s.column_parts * s.image_slabs, first_column = part % s.column_parts * s.image_columns;
        slabs = smaller(s.image_slabs, s.slabs - first_slab);
        columns = smaller(s.image_columns, s.columns - first_column);
        first_row = line - image * s.rows;
        rows = end - line < s.rows - first_row ? end - line : s.rows - first_row;
    }
    DEVICE int planes() const { return 2 * slabs + 2; }
    DEVICE int bands() const { return rows + 1; }
};

struct Shared {
    uint64_t loaded[STAGES], full[BANDS], empty[BANDS];  // mbarriers
    float producer_largest[2][PRODUCER_WARPS];           // [at the start, at the end of an attempt]
    int exponents[ATTEMPTS];                             // of the power of two that an attempt scaled x by; or REJECTED
    float weight_largest[CONSUMER_WARPS];
    float sums[2][CONSUMER_WARPS][OUTPUTS];  // of a segment's maxima; one is filled while the other is read
    Segment segments[2];                     // this one and the next of the consumers; in no registers, which are short
};

// What a sample's sums become: with a bias the sum over all outputs, else the average of each.
struct Result {
    const Element *conv_bias, *bias;
    int biases;  // 1 or OUT_CHANNELS
    float divisor, windows;
    float* out;
};

// ---- PTX
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What this thread initialised becomes visible to TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns once the phase of this parity is complete. The hardware may suspend the thread meanwhile; from 9.0 on.
DEVICE void mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}
// Copies a box of a tensor map to shared memory, and counts its bytes on the mbarrier. Coordinates begin with the innermost.
DEVICE void tma_load_5d(uint32_t to, const CUtensorMap& map, int i0, int i1, int i2, int i3, int i4, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to), "l"(&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4),
                 "r"(barrier)
                 : "memory");
}
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
template <int REGISTERS>
DEVICE void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
DEVICE float4 ld_shared_v4_f32(uint32_t at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
DEVICE uint2 ld_shared_v2_u32(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
DEVICE void st_shared_v4_u32(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Four matrices of 8 rows x 16 bytes: lane 8 * i + r has the address of row r of matrix i. Lane 4 * n + q gets elements 2 * q
// and 2 * q + 1 of row n.
DEVICE uint4 ldmatrix_m8n8_x4(uint32_t row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
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
DEVICE float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// value * 2^exponent for an exponent of -252 to 254, which may be beyond a float's when two scales are undone at once.
DEVICE float times_power_of_2(float value, int exponent) {
    return value * power_of_2(exponent / 2) * power_of_2(exponent - exponent / 2);
}
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}
template <int N>
DEVICE float largest_finite(const float (&v)[N]) {
    float largest = 0;
    UNROLL for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(v[i]));
    if (largest < INFINITY) return largest;
    largest = 0;
    UNROLL for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(finite_or_zero(v[i])));
    return largest;
}
// The largest of the values of WARPS whole warps, which all call it; `by_warp` has an element for each of them.
template <int WARPS>
DEVICE float largest_of_warps(float v, float* by_warp, int warp, int barrier) {
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    if (threadIdx.x % WARP == 0) by_warp[warp] = v;
    bar_sync(barrier, WARPS * WARP);
    UNROLL for (int other = 0; other < WARPS; ++other) v = fmaxf(v, by_warp[other]);
    return v;
}

// ---- the pipelines
// Stages and bands are counted over all segments and attempts: number n is in place n % STAGES or n % BANDS. Each thread waits
// and arrives for itself.
struct Pipeline {
    const Shape& shape;
    Shared& shared;
    uint32_t stages, bands;  // shared addresses

    DEVICE Pipeline(const Shape& shape, Shared& shared, char* memory)
        : shape(shape), shared(shared), stages(shared_address(memory)), bands(stages + STAGES * shape.stage_bytes) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < BANDS; ++i) mbarrier_init(full(i), PRODUCERS), mbarrier_init(empty(i), CONSUMERS);
            for (int i = 0; i < STAGES; ++i) mbarrier_init(loaded(i), 1);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
    DEVICE uint32_t stage(unsigned n) const { return stages + n % STAGES * shape.stage_bytes; }
    DEVICE uint32_t loaded(unsigned n) const { return shared_address(&shared.loaded[n % STAGES]); }
    DEVICE void stage_wait(unsigned n) const { mbarrier_try_wait(loaded(n), n / STAGES & 1); }

    DEVICE uint32_t band(unsigned n) const { return bands + n % BANDS * shape.band_bytes; }
    DEVICE uint32_t full(unsigned n) const { return shared_address(&shared.full[n % BANDS]); }
    DEVICE uint32_t empty(unsigned n) const { return shared_address(&shared.empty[n % BANDS]); }
    DEVICE void producer_acquire(unsigned n) const { mbarrier_try_wait(empty(n), n / BANDS & 1 ^ 1); }
    DEVICE void producer_commit(unsigned n) const { mbarrier_arrive(full(n)); }
    DEVICE void consumer_wait(unsigned n) const { mbarrier_try_wait(full(n), n / BANDS & 1); }
    DEVICE void consumer_release(unsigned n) const { mbarrier_arrive(empty(n)); }
};

// ---- producers
// fp16 has TF32's 11 bits, but not its range: so a segment's values are scaled by a power of two. It is taken from the
// segment's first stage, with room for values 31 times as large. If there are larger ones, the segment is attempted a second
// time, with the power that its largest value calls for.
constexpr int FIRST_TARGET = 11, LAST_TARGET = 15, REJECTED = 1000;
constexpr float LARGEST_FP16 = 65504;

using Piece = float[CHANNELS * 4];  // four columns of a row, in all channels
DEVICE void load_piece(uint32_t from, int channel_bytes, Piece& v) {
    UNROLL for (int c = 0; c < CHANNELS; ++c) {
        const float4 four = ld_shared_v4_f32(from + c * channel_bytes);
        v[4 * c] = four.x, v[4 * c + 1] = four.y, v[4 * c + 2] = four.z, v[4 * c + 3] = four.w;
    }
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

// All segments of the block. A thread has one piece of every 8th row of a stage; the first one also issues the TMA loads.
template <bool STRICT>
DEVICE void produce(const CUtensorMap& x, const Shape& shape, const Pipeline& pipeline, Shared& shared) {
    const int thread = threadIdx.x - CONSUMERS, piece = thread % PIECES;
    const int channel_bytes = shape.stage_planes * 2 * STAGE_ROW_BYTES;
    const auto largest_of_all = [&](float mine, int when) {  // two calls with one `when` have another barrier between them
        return largest_of_warps<PRODUCER_WARPS>(mine, shared.producer_largest[when], thread / WARP, 1);
    };
    const int64_t end = shape.first_row(blockIdx.x + 1);
    unsigned first_band = 0, first_stage = 0, attempt = 0;
    Segment segment;
    for (int64_t line = shape.first_row(blockIdx.x); line < end; line += segment.rows) {
        segment.set(shape, line, end);
        const int band_stages = ceil_div(segment.planes(), shape.stage_planes), count = segment.bands() * band_stages;
        const auto load_stage = [&](int k) {
            const unsigned n = first_stage + k;
            const int column = 2 * segment.first_column, row = 2 * (segment.first_row + k / band_stages);
            const int plane = 2 * segment.first_slab + k % band_stages * shape.stage_planes;
            mbarrier_arrive_expect_tx(pipeline.loaded(n), shape.stage_bytes);
            tma_load_5d(pipeline.stage(n), x, column, row, plane, 0, static_cast<int>(segment.sample), pipeline.loaded(n));
        };
        int exponent = 0;
        for (bool exact = false, accepted = false; !accepted; exact = true) {
            if (thread == 0)
                for (int k = 0; k < smaller(STAGES, count); ++k) load_stage(k);
            float largest = 0;
            int k = 0;
            UNROLL_1 for (int i = 0; i < segment.bands(); ++i) {
                const unsigned band = first_band + i;
                UNROLL_1 for (int plane = 0; plane < segment.planes(); plane += shape.stage_planes, ++k) {
                    const uint32_t from = pipeline.stage(first_stage + k) + piece * 16;
                    const int rows = 2 * smaller(shape.stage_planes, segment.planes() - plane);
                    Piece v;
                    const auto load_row = [&](int row) {
                        load_piece(from + row * STAGE_ROW_BYTES, channel_bytes, v);
                        largest = fmaxf(largest, largest_finite(v));
                    };
                    pipeline.stage_wait(first_stage + k);
                    if (k == 0 && !exact) {
                        UNROLL_1 for (int row = thread / PIECES; row < rows; row += PRODUCERS / PIECES) load_row(row);
                        exponent = scale_exponent(largest_of_all(largest, 0), FIRST_TARGET);
                    }
                    if (plane == 0) pipeline.producer_acquire(band);
                    const uint32_t to = pipeline.band(band) + plane * PLANE_BYTES;
                    UNROLL_1 for (int row = thread / PIECES; row < rows; row += PRODUCERS / PIECES) {
                        load_row(row);
                        UNROLL for (int e = 0; e < 4 * CHANNELS; ++e) v[e] *= power_of_2(exponent);
                        store_piece(to + row * BAND_ROW_BYTES, piece, v);
                        if (STRICT) {
                            UNROLL for (int e = 0; e < 4 * CHANNELS; ++e) v[e] = fp16_residual(v[e]);
                            store_piece(to + shape.band_bytes / 2 + row * BAND_ROW_BYTES, piece, v);
                        }
                    }
                    bar_sync(1, PRODUCERS);  // all have read the stage
                    if (thread == 0 && k + STAGES < count) load_stage(k + STAGES);
                }
                if (k == count) {  // consumers read the exponent behind the last band's mbarrier
                    largest = largest_of_all(largest, 1);
                    accepted = exact || largest * power_of_2(exponent) <= LARGEST_FP16;
                    if (thread == 0) shared.exponents[attempt % ATTEMPTS] = accepted ? exponent : REJECTED;
                    exponent = scale_exponent(largest, LAST_TARGET);
                }
                pipeline.producer_commit(band);
            }
            first_band += segment.bands(), first_stage += count, ++attempt;
        }
    }
}

// ---- consumers: their way through the bands
// A warp's unit: a tile in half of the slabs of a row of windows; which half has the larger part changes from row to row.
struct Unit {
    int row, number, first_window, first_slab, end;

    // Unit `its_number`, counted from the first one of `its_row`. Its row may be past the segment's last.
    DEVICE void set(const Segment& segment, int its_row, int its_number) {
        const int groups = ceil_div(segment.columns, TILE_WINDOWS);
        row = its_row, number = its_number;
        while (number >= 2 * groups) ++row, number -= 2 * groups;
        const bool upper = number >= groups;
        const int middle = (segment.slabs + row % 2) / 2;
        first_window = (upper ? number - groups : number) * TILE_WINDOWS;
        first_slab = upper ? middle : 0, end = upper ? segment.slabs : middle;
    }
};

// Calls visit(unit, its two bands) for the warp's units, every CONSUMER_WARPS-th, and releases the bands. Warps may be a row
// apart: a warp waits for the bands of a row once, and arrives when its next unit is in a later row.
template <class Visit>
DEVICE void for_units(const Segment& segment, const Pipeline& pipeline, unsigned first_band, Visit visit) {
    Unit unit;
    unit.set(segment, 0, threadIdx.x / WARP);
    UNROLL_1 for (int row = 0; row < segment.rows; ++row) {
        const unsigned band = first_band + row;
        pipeline.consumer_wait(band), pipeline.consumer_wait(band + 1);
        const uint32_t bands[2] = {pipeline.band(band), pipeline.band(band + 1)};
        UNROLL_1 for (; unit.row == row; unit.set(segment, row, unit.number + CONSUMER_WARPS)) visit(unit, bands);
        pipeline.consumer_release(band);
    }
    pipeline.consumer_release(first_band + segment.rows);
}

// ---- consumers: the products
// weight[o][c][tap] as left operands, [tap][lane], scaled, and what rounding leaves of them; returns the exponent of the power
// of two that scales them. The consumers call it.
__device__ int store_weights(const Element* __restrict__ weight, float sign, uint2* high, uint2* low, float* by_warp) {
    float mine[ceil_div(WEIGHTS, CONSUMERS)];
    UNROLL for (int k = 0; k < ceil_div(WEIGHTS, CONSUMERS); ++k) {
        const int i = threadIdx.x + k * CONSUMERS;
        mine[k] = i < WEIGHTS ? weight[i] : 0;
    }
    const float largest = largest_of_warps<CONSUMER_WARPS>(largest_finite(mine), by_warp, threadIdx.x / WARP, 2);
    const int exponent = scale_exponent(largest, 14);
    const float scale = sign * power_of_2(exponent);
    UNROLL for (int i = threadIdx.x; i < TAPS * WARP; i += CONSUMERS) {
        const int g = i % WARP / 4, t = i % 4, tap = i / WARP;
        const auto scaled = [&](int o, int c) {
            return o < OUT_CHANNELS && c < IN_CHANNELS ? scale * weight[(o * IN_CHANNELS + c) * TAPS + tap] : 0;
        };
        const float w[4] = {scaled(g, 2 * t), scaled(g, 2 * t + 1), scaled(g + 8, 2 * t), scaled(g + 8, 2 * t + 1)};
        high[i] = make_uint2(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]));
        low[i] = make_uint2(fp16_pair(fp16_residual(w[0]), fp16_residual(w[1])),
                            fp16_pair(fp16_residual(w[2]), fp16_residual(w[3])));
    }
    return exponent;
}

// A plane of 8 windows: [row][column 0, 2, 1, 3], channels 2t and 2t + 1 of window g, in lane 4g + t. A product takes two
// neighbouring registers: taps 0 and 2 of a row need no moves, neither for a window's even positions nor for its odd ones.
struct Plane {
    uint32_t at[SIDE][SIDE];
};
DEVICE int column_of_matrix(int matrix) { return matrix % 2 * 2 + matrix / 2; }  // and the other way round
DEVICE void load_plane(const uint32_t (&bands)[2], uint32_t offset, Plane& x) {
    UNROLL for (int row = 0; row < SIDE; ++row) {
        const uint4 v = ldmatrix_m8n8_x4(bands[row / 2] + row % 2 * BAND_ROW_BYTES + offset);
        x.at[row][0] = v.x, x.at[row][1] = v.y, x.at[row][2] = v.z, x.at[row][3] = v.w;
    }
}
// Where in a plane the row of 16 bytes lies that a lane names in load_plane.
DEVICE uint32_t matrix_row(int lane, int first_window) {
    const int column = column_of_matrix(lane / 8);
    const int pair = (first_window + lane % 8 + column / 2) % (COLUMNS / 2);  // beyond the row: of no window
    return column % 2 * ODD_COLUMNS + pair * COLUMN_BYTES;
}

// Nine taps of a plane of the kernel: the pairs 0 2, 3 5, 6 8 and 1 7, and the middle one. Positions of a window are numbered
// d, h, w in binary; those of depth 0 meet one plane of x with a plane of the kernel, those of depth 1 the next one.
constexpr int PLANE_TAPS = 9, PAIRS = 4, MIDDLE = 4;
DEVICE constexpr int first_of_pair(int pair) { return pair < 3 ? 3 * pair : 1; }
DEVICE constexpr int second_of_pair(int pair) { return pair < 3 ? 3 * pair + 2 : 7; }
DEVICE uint32_t operand(const Plane& x, const Plane& next_x, int position, int tap) {
    const int row = position / 2 % 2 + tap / 3, column = position % 2 + tap % 3;
    return (position < 4 ? x : next_x).at[row][column_of_matrix(column)];
}

using Sums = float[8][4];  // [position][element: window 2t, 2t + 1 of output g, then of g + 8]
DEVICE void add_pair(Sums& sums, int pair, uint2 w, uint2 next_w, const Plane& x, const Plane& next_x) {
    UNROLL for (int i = 0; i < 8; ++i)
        mma_pair(sums[i], w, next_w, operand(x, next_x, i, first_of_pair(pair)), operand(x, next_x, i, second_of_pair(pair)));
}

// visit(sums) for each slab of a unit, in order. A slab's planes 2 and 3 are the next one's planes 0 and 1 and stay in
// registers. All positions add in the same order; eight are summed at a time. The middle taps of the kernel's first two planes
// make a pair, that of the third stands alone.
template <class Visit>
DEVICE void convolve(const uint2 (&weights)[TAPS], const uint32_t (&bands)[2], uint32_t offset, const Unit& unit, Visit visit) {
    offset += 2 * unit.first_slab * PLANE_BYTES;
    Plane x[4];
    load_plane(bands, offset, x[0]);
    load_plane(bands, offset + PLANE_BYTES, x[1]);
    UNROLL_1 for (int slab = unit.first_slab; slab < unit.end; ++slab) {
        offset += 2 * PLANE_BYTES;
        load_plane(bands, offset, x[2]);
        Sums sums = {};
        UNROLL for (int r = 0; r < 3; ++r) {
            const uint2* const w = weights + r * PLANE_TAPS;
            UNROLL for (int i = 0; i < 8 && r == 1; ++i)
                mma_pair(sums[i], weights[MIDDLE], w[MIDDLE], operand(x[0], x[1], i, MIDDLE), operand(x[1], x[2], i, MIDDLE));
            if (r == 1) load_plane(bands, offset + PLANE_BYTES, x[3]);
            UNROLL for (int pair = 0; pair < PAIRS; ++pair)
                add_pair(sums, pair, w[first_of_pair(pair)], w[second_of_pair(pair)], x[r], x[r + 1]);
        }
        UNROLL for (int i = 0; i < 8; ++i)
            mma_m16n8k8_f32_f16(sums[i], weights[2 * PLANE_TAPS + MIDDLE], operand(x[2], x[3], i, MIDDLE));
        visit(sums);
        x[0] = x[2], x[1] = x[3];
    }
}

// The same, error-compensated: low * high + high * low + high * high. The tensor core truncates its sums, so each plane's begin
// at zero and are added as fp32 numbers. The small ones are kept apart, and do not count where x is infinite: the low part of a
// weight may have the other sign.
template <class Visit>
DEVICE void convolve_strictly(uint32_t weights, const uint32_t (&bands)[2], int lower, uint32_t offset, const Unit& unit,
                              Visit visit) {
    UNROLL_1 for (int slab = unit.first_slab; slab < unit.end; ++slab) {
        Sums sums = {}, small = {};
        uint32_t here = offset + 2 * slab * PLANE_BYTES, plane_weights = weights;
        Plane high, low, next_high, next_low;  // those that positions 0 to 3 and 4 to 7 meet with plane r of the kernel
        load_plane(bands, here, next_high);
        load_plane(bands, here + lower, next_low);
        UNROLL_1 for (int r = 0; r < 3; ++r, plane_weights += PLANE_TAPS * TAP_BYTES) {
            const auto high_w = [&](int tap) { return ld_shared_v2_u32(plane_weights + tap * TAP_BYTES); };
            const auto low_w = [&](int tap) { return ld_shared_v2_u32(plane_weights + tap * TAP_BYTES + OPERAND_BYTES); };
            high = next_high, low = next_low;
            here += PLANE_BYTES;
            load_plane(bands, here, next_high);
            load_plane(bands, here + lower, next_low);
            Sums part = {};
            UNROLL for (int pair = 0; pair < PAIRS; ++pair) {
                const int tap = first_of_pair(pair), second = second_of_pair(pair);
                const uint2 w = high_w(tap), next_w = high_w(second), small_w = low_w(tap), next_small_w = low_w(second);
                add_pair(small, pair, small_w, next_small_w, high, next_high);
                add_pair(part, pair, w, next_w, high, next_high);
                add_pair(small, pair, w, next_w, low, next_low);
            }
            const uint2 w = high_w(MIDDLE), small_w = low_w(MIDDLE);
            UNROLL for (int i = 0; i < 8; ++i) {
                const uint32_t x = operand(high, next_high, i, MIDDLE);
                mma_pair(small[i], small_w, w, x, operand(low, next_low, i, MIDDLE));
                mma_m16n8k8_f32_f16(part[i], w, x);
            }
            UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += part[i / 4][i % 4];
        }
        UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += finite_or_zero(small[i / 4][i % 4]);
        visit(sums);
    }
}

// A lane's four maxima as PyTorch finds them: a NaN wins.
DEVICE void find_maxima(const Sums& sums, float (&maxima)[4]) {
    UNROLL for (int element = 0; element < 4; ++element) {
        float best[8];
        UNROLL for (int i = 0; i < 8; ++i) best[i] = sums[i][element];
        UNROLL for (int step = 1; step < 8; step *= 2)
            UNROLL for (int i = 0; i < 8; i += 2 * step) best[i] = max_nan(best[i], best[i + step]);
        maxima[element] = best[0];
    }
}

// A warp writes a sample's result; lane o has the sum of output o's maxima.
DEVICE void write_result(const Result& result, int64_t sample, float sum) {
    const int o = threadIdx.x % WARP;
    float average = 0;
    if (o < OUT_CHANNELS) {
        average = (sum / result.windows + copysignf(1, result.divisor) * result.conv_bias[o]) / fabsf(result.divisor);
        if (!result.bias) result.out[sample * OUT_CHANNELS + o] = average;
        else average += result.bias[result.biases == 1 ? 0 : o];
    }
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) average += __shfl_xor_sync(0xffffffffu, average, offset);
    if (result.bias && o == 0) result.out[sample] = average;
}

// ---- the kernel
// Each of eight consumer warps convolves its units, 8 windows x 16 outputs at a time, and keeps the sums of their maxima in
// registers, as well as the weights, 54 a thread; strict ones are read from shared memory. At a segment's end the first
// consumer warp adds the warps' sums: to segment_sums (segments, OUTPUTS), null where a sample is a segment.
template <bool STRICT>
__global__ void __launch_bounds__(THREADS, 1)
    stream_max_mean(const __grid_constant__ CUtensorMap x, const Shape shape, const Element* __restrict__ weight,
                    float* __restrict__ segment_sums, const Result result) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared shared;
    const Pipeline pipeline(shape, shared, memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    if (warp >= CONSUMER_WARPS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        produce<STRICT>(x, shape, pipeline, shared);
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    uint2* const operands = reinterpret_cast<uint2*>(memory + STAGES * shape.stage_bytes + BANDS * shape.band_bytes);
    const int weight_exponent =
        store_weights(weight, copysignf(1, result.divisor), operands, operands + TAPS * WARP, shared.weight_largest);
    const int64_t end = shape.first_row(blockIdx.x + 1);
    int64_t line = shape.first_row(blockIdx.x);
    if (threadIdx.x == 0) shared.segments[0].set(shape, line, end);
    bar_sync(2, CONSUMERS);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const uint32_t stored_weights = shared_address(operands) + lane * 8;
    uint2 weights[TAPS];
    if (!STRICT) UNROLL for (int tap = 0; tap < TAPS; ++tap) weights[tap] = ld_shared_v2_u32(stored_weights + tap * TAP_BYTES);
    unsigned first_band = 0, attempt = 0;
    for (int turn = 0; line < end; turn ^= 1) {
        const Segment& segment = shared.segments[turn];
        line += segment.rows;
        if (threadIdx.x == 0 && line < end) shared.segments[turn ^ 1].set(shape, line, end);
        float totals[2];  // of outputs g and g + 8
        int exponent;
        do {
            totals[0] = totals[1] = 0;
            for_units(segment, pipeline, first_band, [&](const Unit& unit, const uint32_t(&bands)[2]) {
                const int column = unit.first_window + 2 * t;
                const bool exist[2] = {column < segment.columns, column + 1 < segment.columns};
                const auto take_maxima = [&](const Sums& sums) {
                    float maxima[4];
                    find_maxima(sums, maxima);
                    UNROLL for (int i = 0; i < 4; ++i) totals[i / 2] += exist[i % 2] ? maxima[i] : 0;
                };
                const uint32_t offset = matrix_row(lane, unit.first_window);
                if constexpr (STRICT)
                    convolve_strictly(stored_weights, bands, shape.band_bytes / 2, offset, unit, take_maxima);
                else
                    convolve(weights, bands, offset, unit, take_maxima);
            });
            first_band += segment.bands();
            exponent = shared.exponents[attempt++ % ATTEMPTS];
        } while (exponent == REJECTED);
        UNROLL for (int i = 0; i < 2; ++i) {
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 1);
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 2);
            if (t == 0) shared.sums[turn][warp][g + 8 * i] = totals[i];
        }
        // These sums are there, those before have been read, and so has the segment; the next one is set.
        bar_sync(2, CONSUMERS);
        if (warp > 0) continue;
        float sum = 0;
        if (lane < OUTPUTS)
            for (int other = 0; other < CONSUMER_WARPS; ++other) sum += shared.sums[turn][other][lane];
        sum = times_power_of_2(sum, -exponent - weight_exponent);
        if (!segment_sums) write_result(result, segment.sample, sum);
        else if (lane < OUTPUTS) segment_sums[(segment.image + blockIdx.x) * OUTPUTS + lane] = sum;
        __syncwarp();  // lane 0 may write over the segment
    }
}

// A warp adds the segments of a sample, in order. That of an image in a block has slot image + block.
__global__ void __launch_bounds__(WARP)
    finish_samples(const float* __restrict__ segment_sums, const Shape s, const Result result) {
    float sum = 0;
    const int64_t all = s.images() * s.rows, first_image = static_cast<int64_t>(blockIdx.x) * s.parts();
    for (int64_t image = first_image; image < first_image + s.parts(); ++image) {
        const auto block_of = [&](int64_t line) { return ((line + 1) * s.blocks - 1) / all; };
        for (int64_t block = block_of(image * s.rows); block <= block_of((image + 1) * s.rows - 1); ++block)
            if (threadIdx.x < OUTPUTS) sum += segment_sums[(image + block) * OUTPUTS + threadIdx.x];
    }
    write_result(result, blockIdx.x, sum);
}

// ---- launches
// As many slabs an image as shared memory takes, in equal parts; and as many blocks as SMs, or as samples where that keeps at
// least 95% of the SMs busy: whole samples need no second pass over their segments' sums.
static Shape planned(int64_t batch, int depth, int height, int width, bool strict, int device) {
    Shape s = {batch, depth, height, width, (depth - 2) / 2, (height - 2) / 2, (width - 2) / 2};
    int limit = 0, sm_count = 0;
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    int parts = 0;
    do {
        s.image_slabs = ceil_div(s.slabs, ++parts), s.slab_parts = ceil_div(s.slabs, s.image_slabs);
        const int planes = 2 * s.image_slabs + 2;
        s.stage_planes = ceil_div(planes, ceil_div(planes, STAGE_PLANES));
        s.stage_bytes = CHANNELS * s.stage_planes * 2 * STAGE_ROW_BYTES;
        s.band_bytes = (strict ? 2 : 1) * planes * PLANE_BYTES;
        s.dynamic_bytes = STAGES * s.stage_bytes + BANDS * s.band_bytes + 2 * OPERAND_BYTES;
    } while (s.image_slabs > 1 && s.dynamic_bytes + static_cast<int>(sizeof(Shared)) > limit);
    s.image_columns = s.columns <= WHOLE_WINDOWS ? s.columns : PART_WINDOWS;
    s.column_parts = ceil_div(s.columns, s.image_columns);
    const int64_t images = s.images(), waves = (images + sm_count - 1) / sm_count, whole = (images + waves - 1) / waves;
    const bool busy = whole * 20 >= 19 * static_cast<int64_t>(sm_count);
    if (images == s.batch && images % whole == 0 && busy) s.blocks = whole;
    else s.blocks = images * s.rows < sm_count ? images * s.rows : sm_count;
    return s;
}
// Sums of segments that scratch has room for.
extern "C" int64_t count_segments(int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t strict, int64_t device) {
    const Shape s = planned(batch, depth, height, width, strict, device);
    return s.sample_is_segment() ? 0 : s.images() + s.blocks;
}

// The driver's cuTensorMapEncodeTiled, without linking the driver; null if it has none.
using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static Encode find_encode() {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(encode) : nullptr;
}

// A tensor map of x, in boxes of a stage. What lies outside of x, and channels that do not exist, become zeros. The driver
// needs a context in this thread, which may be autograd's: a call of the runtime must come first.
static cudaError_t encode_map(const Element* x, const Shape& s, CUtensorMap* map) {
    static const Encode encode = find_encode();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t width = s.width, height = s.height, depth = s.depth, batch = s.batch, row_bytes = (width + 3) / 4 * 16;
    const cuuint64_t sizes[5] = {width, height, depth, IN_CHANNELS, batch}, channel_bytes = row_bytes * height * depth;
    const cuuint64_t strides[4] = {row_bytes, row_bytes * height, channel_bytes, channel_bytes * IN_CHANNELS};
    const cuuint32_t box[5] = {COLUMNS, 2, static_cast<cuuint32_t>(s.stage_planes), CHANNELS, 1}, steps[5] = {1, 1, 1, 1, 1};
    const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<Element*>(x), sizes, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// x: in rows of a multiple of 16 bytes. scratch: OUTPUTS floats a segment. Without a bias `out` is (batch, OUT_CHANNELS), else
// (batch,).
extern "C" int launch_stream_max_mean(const Element* x, const Element* weight, const Element* conv_bias, const Element* bias,
                                      float* scratch, float* out, double divisor, int64_t biases, int64_t batch, int64_t depth,
                                      int64_t height, int64_t width, int64_t strict, cudaStream_t stream) {
    int device = 0;
    cudaGetDevice(&device);
    const Shape shape = planned(batch, depth, height, width, strict, device);
    const auto windows = static_cast<float>(static_cast<int64_t>(shape.slabs) * shape.rows * shape.columns);
    const Result result = {conv_bias, biases ? bias : nullptr, static_cast<int>(biases), static_cast<float>(divisor), windows,
                           out};
    float* const segment_sums = shape.sample_is_segment() ? nullptr : scratch;
    const auto kernel = strict ? stream_max_mean<true> : stream_max_mean<false>;
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.dynamic_bytes);
    if (error == cudaSuccess) error = encode_map(x, shape, &map);
    if (error != cudaSuccess) return error;
    kernel<<<shape.blocks, THREADS, shape.dynamic_bytes, stream>>>(map, shape, weight, segment_sums, result);
    if (segment_sums) finish_samples<<<batch, WARP, 0, stream>>>(segment_sums, shape, result);
    return cudaGetLastError();
}
#endif  // SERVED
"""


def is_strict():
    """Return whether PyTorch's settings forbid TF32 in convolutions."""
    precision_of = getattr(torch._C, "_get_fp32_precision_getter", None)  # from PyTorch 2.9 on
    return precision_of("cuda", "conv") != "tf32" if precision_of else not torch.backends.cudnn.allow_tf32


@functools.lru_cache(maxsize=1024)
def sizes(kernels, x, weight, conv_bias, bias, strict, *pool):
    """Return the output's shape, scratch's floats and sizes; None where PyTorch computes. Raises RuntimeError for bad input."""
    shape, outs, kernel = x[0], kernels.OUT_CHANNELS, (kernels.KERNEL_D, kernels.KERNEL_H, kernels.KERNEL_W)
    check(kernels, "x", x, x, (*shape[:1], kernels.IN_CHANNELS, *shape[-3:]))
    check(kernels, "weight", weight, x, (outs, kernels.IN_CHANNELS, *kernel))
    check(kernels, "conv_bias", conv_bias, x, (outs,))
    check(kernels, "bias", bias, x, bias[0] if bias[0].numel() in (0, 1, outs) else (outs,))
    fits = all(size >= k + p - 1 for size, k, p in zip(shape[2:], kernel, pool, strict=False))
    if pool != (kernels.POOL_D, kernels.POOL_H, kernels.POOL_W) or not fits:
        raise RuntimeError(f"{NAME}: a window of {list(pool)} behind a kernel of {kernel} does not fit into {list(shape[2:])}")
    if math.prod(shape[2:]) >= 2**31:
        raise RuntimeError(f"{NAME}: expected less than 2^31 pixels a channel, got x of shape {list(shape)}")
    if x[2].type == "cuda" and torch.cuda.get_device_capability(x[2]) != (9, 0):
        raise RuntimeError(f"{NAME}: expected a GPU of compute capability 9.0 (Hopper); v4_tensor_core runs on 8.0 and later")
    if not kernels.is_served():
        limits = "at most 8 channels in and 16 out, a kernel of 3 x 3 x 3 and windows of 2 x 2 x 2"
        warn(f"{NAME}: PyTorch computes what these kernels do not take: {limits}")
        return None
    numbers = bias[0].numel(), shape[0], *shape[2:], strict
    segments = kernels.count_segments(*numbers[1:], x[2].index or 0) if shape[0] else 0
    return (shape[0], *([] if numbers[0] else [outs]), 1, 1, 1), 16 * segments, numbers


def stream_max_mean(kernels, x, weight, conv_bias, bias, divisor, pool, sizes=sizes):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, outputs, 1, 1, 1)."""
    found = sizes(kernels, kind(x), kind(weight), kind(conv_bias), kind(bias), is_strict(), *pool)
    if found is None:
        return kernels.original(x, weight, conv_bias, bias, divisor, pool)
    x, weight, conv_bias, bias = in_aligned_rows(x), weight.contiguous(), conv_bias.contiguous(), bias.contiguous()
    shape, floats, numbers = found
    scratch, out = x.new_empty(floats), x.new_empty(shape)
    if shape[0]:
        launch(kernels.launch_stream_max_mean, x, weight, conv_bias, bias, scratch, out, divisor, *numbers)
    return out


def in_aligned_rows(x):
    """Return x contiguous; copied into rows of a multiple of 16 bytes, whose ends are never read, where it has others."""
    width = x.shape[-1]
    if width % 4 == 0 and x.data_ptr() % 16 == 0:
        return x.contiguous()
    rows = x.new_empty(*x.shape[:-1], -(-width // 4) * 4)
    rows[..., :width] = x
    return rows


def original(x, weight, conv_bias, bias, divisor, pool):
    """The gradient is PyTorch's: it takes several times the 441 MB that the forward pass avoids; training_tensor_core 14."""
    y = nn.functional.max_pool3d(nn.functional.conv3d(x, weight, conv_bias) / divisor, pool)
    averages = y.mean(dim=(2, 3, 4), keepdim=True)
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


SCHEMA = "forward(Tensor x, Tensor weight, Tensor conv_bias, Tensor bias, float divisor, int[3] pool) -> Tensor"


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, SCHEMA, stream_max_mean, original

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

    @torch.compiler.assume_constant_result
    def namespace(self):
        conv = self._modules["conv"]
        channels = {"IN_CHANNELS": conv.in_channels, "OUT_CHANNELS": conv.out_channels}
        kernel = {f"KERNEL_{axis}": size for axis, size in zip("DHW", conv.kernel_size, strict=True)}
        pool = {f"POOL_{axis}": size for axis, size in zip("DHW", self.pool_size, strict=True)}
        hopper = ("-gencode=arch=compute_90a,code=sm_90a",)  # load_inline would build for 9.0, which lacks setmaxnreg
        return build(*self.sources, flags=hopper, **channels, **kernel, **pool)

    def operands(self, x):
        conv = self._modules["conv"]  # self.conv takes nn.Module half a microsecond
        bias = self.bias if self.sums_channels else self.bias.new_empty(0)
        return x, conv.weight, conv.bias, bias, self.divisor, self.pool_size

    def forward(self, x):
        out = getattr(torch.ops, self.namespace()).forward(*self.operands(x))
        return out if self.sums_channels else torch.sum(out + self.bias, dim=self.sum_dim)


# ---- From here on all files have the same text; python -m playground.command.shared_text writes it.
LOADING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once
KEY, KEYS = torch._C.DispatchKey, torch._C.DispatchKeySet
NUMBER = getattr(KEYS, "raw_repr", repr)  # PyTorch 2.4 has neither this nor the next function
NEED_GRAD = getattr(torch._C, "_any_requires_grad", lambda *given: any(getattr(each, "requires_grad", False) for each in given))
PLAIN = {NUMBER(KEYS(KEY.CPU) | KEYS(KEY.AutogradCPU)), NUMBER(KEYS(KEY.CUDA) | KEYS(KEY.AutogradCUDA))}


@functools.lru_cache(maxsize=None)
def build(name, text, schema, forward, original, fused=(), flags=(), **constants):
    """Compile `text` (CUDA, or C++) once a machine; return the namespace of an operator, which an edit changes.

    forward(kernels, *arguments), tensors first, calls the text's functions; original(*arguments) computes it by PyTorch.
    """
    if torch.__version__ < "2.4":
        raise RuntimeError(f"{name}: needs PyTorch 2.4 or later, this is {torch.__version__}")

    def fingerprint(part):  # of a function or its code: all but the place where it was written
        if inspect.isfunction(part := inspect.unwrap(part)):
            return fingerprint(part.__code__), [fingerprint(each) for each in part.__defaults__ or ()]
        return (part.co_code, part.co_names, [fingerprint(each) for each in part.co_consts]) if inspect.iscode(part) else part

    text = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items())) + text
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if "<<<" in text else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability(), torch.__version__
    everything = text, schema, flags, machine, [fingerprint(each) for each in (forward, original, *fused)]
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"
    operators = getattr(torch.ops, namespace)
    with LOADING:
        if not getattr(operators, "registered", None):
            kernels = load(namespace, text, flags, constants)
            vars(kernels).update({each.__name__: each for each in (original, *fused)})
            operators.registered = register(operators, schema, kernels, forward, original, *fused)
    return namespace


def load(name, text, flags, constants):
    """Return the library of a text. Its functions know how many tensors they take, first, and whether a stream, last."""
    from torch.utils import cpp_extension

    options = {"cpp_sources": text, "extra_cflags": ["-O3", *flags]}
    if is_cuda := "<<<" in text:
        options = {"cpp_sources": "", "cuda_sources": text, "extra_cuda_cflags": ["-O3", "-lineinfo", *flags]}
    if torch.__version__ >= "2.8":  # before, torch's headers come along
        options["no_implicit_headers"] = True
    if not shutil.which("ninja"):  # in a virtual environment that is not activated
        os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # or an interrupted build would count as done
    path = cpp_extension.load_inline(name, is_python_module=False, **options)  # None before PyTorch 2.5
    kernels = ctypes.CDLL(path or os.path.join(cpp_extension._get_build_directory(name, False), name + cpp_extension.LIB_EXT))
    vars(kernels).update(constants)
    kernels.device = "cuda" if is_cuda and not getattr(cpp_extension.load_inline, "emulates_cuda", False) else "cpu"
    numbers = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "int": ctypes.c_int}  # all else is a pointer
    for result, symbol, parameters in re.findall(r'extern "C" (\w+) (\w+)\(([^)]*)\)', text):
        if function := getattr(kernels, symbol, None):  # the text may leave it out for these constants
            types = [each.split()[0] for each in parameters.split(",") if each]
            function.restype, function.argtypes = numbers[result], [numbers.get(each, ctypes.c_void_p) for each in types]
            function.tensors, function.has_stream = parameters.count("*"), "cudaStream_t" in types
    return kernels


def register(operators, schema, kernels, forward, original, fuse=None, *fused):
    """Define the operator, for every device, so that forward checks the tensors. Without `fuse` its gradient is PyTorch's."""
    name, tensors = f"{operators.name}::forward", schema.count("Tensor") - 1
    library, forward = torch.library.Library(operators.name, "DEF"), functools.partial(forward, kernels)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys, *arguments):
            warn(f"{operators.name[:-11]}: {original.__doc__}")
            ctx.save_for_backward(*arguments[:tensors])
            ctx.others = arguments[tensors:]
            return below_autograd(operators.forward, forward, keys, *arguments)

        @staticmethod
        def backward(ctx, grad):
            keeps_graph, needs = torch.is_grad_enabled(), ctx.needs_input_grad[1:]
            with torch.enable_grad():
                # Views: the gradients are partial ones, also where an argument depends on another.
                given = [each if each is None else each.view_as(each) for each in ctx.saved_tensors[:tensors]]
                wanted = [each for each, needed in zip(given, needs, strict=False) if needed]
                found = iter(torch.autograd.grad(original(*given, *ctx.others), wanted, grad, create_graph=keeps_graph))
            return None, *[next(found) if needed else None for needed in needs]

    def autograd(keys, *arguments):
        # Gradient refuses the tangents that arguments may have within forward_ad.dual_level(); below it they would be dropped.
        if torch.autograd.forward_ad._current_level >= 0 or (torch.is_grad_enabled() and NEED_GRAD(*arguments)):
            return Gradient.apply(keys, *arguments)
        return below_autograd(operators.forward, forward, keys, *arguments)

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("forward", forward, "CompositeExplicitAutograd")
    library.impl("forward", autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(name, original, lib=library)
    for device in ("cuda", "cpu") if torch.__version__ >= "2.6" else ():  # in autocast, too, operands are float32
        torch.library.register_autocast(name, device, torch.float32, lib=library)
    if fuse:
        Gradient = fuse(library, schema, kernels, Gradient, *fused)
    return library


def below_autograd(operator, function, keys, *arguments):
    """Call an operator from its autograd kernel, or its function at once where the dispatcher would do no more."""
    if NUMBER(keys) in PLAIN:
        return function(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator.default.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def kind(tensor):
    """Return what checks and sizes depend on. A function of kinds is cached: it would take as long as the rest of a call."""
    return tensor.shape, tensor.dtype, tensor.device


def check(kernels, name, tensor, place, shape):
    """Raise RuntimeError unless a tensor of this kind is float32, of this shape, and beside `place`, where the kernels run."""
    found, dtype, device = tensor
    if dtype is not torch.float32 or found != shape or device != place[2] or device.type != kernels.device:
        wanted = f"a float32 {kernels.device.upper()} tensor of shape {list(shape)}, on one device with all others"
        raise RuntimeError(f"{NAME}: expected {name} as {wanted}; got {dtype} of shape {list(found)} on {device}")


def launch(function, *arguments):
    """Call a function of `kernels`, tensors or None first, on the first one's device and its current stream."""
    first, stream = arguments[0], 0
    if first.is_cuda:
        if (device := first.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(function, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
    pointers = [None if each is None else each.data_ptr() for each in arguments[: function.tensors]]
    if code := function(*pointers, *arguments[function.tensors :], *(stream,) * function.has_stream):
        words = f"CUDA error: {torch.cuda.CudaError(code)}" if first.is_cuda else f"error {code}"
        raise RuntimeError(f"{function.__name__}: {words}")


@functools.lru_cache(maxsize=None)
def warn(text):
    """Warn once a process, at the line that called into this file, not at one of PyTorch's."""
    files = [each.filename for each in inspect.stack(0)]
    level = len(files) - files[::-1].index(files[0])  # behind the outermost of this file
    while level < len(files) - 1 and files[level].startswith(os.path.dirname(torch.__file__)):
        level += 1
    warnings.warn(text, stacklevel=level + 1)


def main():
    from torch.utils import benchmark, cpp_extension

    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)  # by the playground: on the CPU, so a small input
    device = "cpu" if emulated or "_cpu_" in NAME else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    arguments, shape, small, limit = EXAMPLE
    model, x = ModelNew(*arguments).to(device).requires_grad_(False), torch.randn(small if emulated else shape, device=device)
    found, exact = model(x), torch.cat([original(*model.double().operands(part.double())) for part in x.split(16)])
    error = ((found - exact).abs().max() / exact.std()).item()
    names = {"model": model.float(), "x": x, "original": original}
    calls = () if emulated else ("model(x)", "original(*model.operands(x))")
    times = [f"{1e3 * benchmark.Timer(call, globals=names).timeit(20).mean:.3f} ms" for call in calls]
    how_fast = ", PyTorch ".join(times) or f"under the emulator, not timed, on an input of {tuple(x.shape)}"
    verdict = "right" if error <= limit else "wrong"
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict}; {how_fast}")


if __name__ == "__main__":
    main()
