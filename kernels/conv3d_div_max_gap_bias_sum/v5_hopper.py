"""conv3d_div_max_gap_bias_sum, v5: Winograd's algorithm in a persistent, warp-specialized kernel, fed by TMA.

Why it is faster
    F(2, 3) along a row takes 4 products where v4 takes 6: 80 mma.sync for a slab's tile, not 112. Eight consumer warps make its
    terms, two planes a slab, by 32 additions of fp16 pairs, and keep them in registers for the next slab, as they keep weights.
    TMA loads fp32 up to two stages (64 KiB) ahead; four producer warps scale it and pack it as fp16, a column's 8 channels side
    by side. Blocks have equal parts of all rows of windows. On an H200 0.115 ms, without Winograd 0.130 (v4: 0.147).

Mathematics
    max((conv + b) / d) = (max(sign(d) conv) + sign(d) b) / |d|: the weights take the sign, the rest follows the mean. x and
    weights are rounded to TF32's 11 bits, in fp16 with powers of two: one for the weights, one for each segment of x (see
    words); their transforms are rounded again. Tiny weights are off by 2^-38 of the largest, tiny x by 2^-34 of its segment's.
    Segments with an infinity, and strict (TF32 forbidden: fp16x3), are computed tap by tap. bf16 x is scaled likewise, without
    loss; fp16 x is only transposed, and where a value is above 32752, half of fp16's largest, computed tap by tap.

Launches
    stream_max_mean  SMs at most  384 threads  209 KiB, strict 215  whole samples, if 95% of SMs stay busy; EXAMPLE: 128 blocks
    finish_samples   samples      32           0                    adds a sample's segments; EXAMPLE: only strict has several

Floor
    268 MB in, 0.061 ms on an H200 (4.39 TB/s); by F(2, 3) 31.7 GFLOP at mma.sync's 622 TFLOP/s, 0.051. No unit binds.

Takes
    float32, fp16 or bf16 CUDA tensors on compute capability 9.0, else RuntimeError; the bias, whose type the sum has, may be
    float32, as under autocast, which casts no such x. PyTorch computes what SERVED excludes, and warns. An empty batch launches
    nothing. For other bias_shape or sum_dim, torch.sum follows. x whose rows are no multiple of 16 bytes is copied first. The
    gradient is PyTorch's. Deterministic for a number of SMs. MIT; copy it.
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

NAME = "conv3d_div_max_gap_bias_sum_v5_hopper"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's

CUDA = r"""
// Needs ELEMENT, STRICT, IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W.
#define DIGITS_float 24
#define DIGITS___half 11
#define DIGITS___nv_bfloat16 8
#define PASTE(a, b) a##b
#define DIGITS_OF(type) PASTE(DIGITS_, type)
#define DIGITS DIGITS_OF(ELEMENT)  // of an element's significand
#include <cuda.h>
#if DIGITS == 8  // a header takes half a second to compile
#include <cuda_bf16.h>
#endif
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

// What the kernels are made for, in volumes of any size.
#define SERVED (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D == 3 && KERNEL_H == 3 && KERNEL_W == 3 && POOL_D == 2 && \
                POOL_H == 2 && POOL_W == 2)
extern "C" int64_t is_served() { return SERVED; }

#if SERVED
using Element = ELEMENT;  // of x and the parameters: float, __half or __nv_bfloat16
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

// ---- words
// A window of 2 x 2 x 2 positions reads 4 x 4 x 4 pixels. A tile is 8 windows side by side in 16 outputs. A slab is a layer of
// windows along depth. Where a sample's slabs are too many for shared memory, or its columns for a band, it is cut into images.
// A band is two rows of x, in all planes and channels of an image: a row of windows reads two bands. All rows of windows of all
// images stand in one line, of which each block takes an equal part. A segment is the part of one image in one block; it is
// scaled by a power of two that its first stage suggests (fp16 x is not), and attempted again if a sum of two values could
// overflow fp16, or if one is infinite. A piece is what a producer thread converts at once: a few columns of a row.
constexpr int WARP = 32, CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;
constexpr int CONSUMER_REGISTERS = 200, PRODUCER_REGISTERS = 104;  // 64,512 of the SM's 65,536
constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, WEIGHTS = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int CHANNELS = 8, OUTPUTS = 16, TILE_WINDOWS = 8;  // of the tensor core's operands; what does not exist is zero
constexpr int SIDE = 4, COLUMNS = 64;  // of x: a window's pixels in each direction, a row's columns
constexpr int PIECE_COLUMNS = DIGITS == 24 ? 4 : 2, PIECES = COLUMNS / PIECE_COLUMNS;
constexpr int PRODUCER_ROWS = PRODUCERS / PIECES;  // that the producers convert at once

// ---- shared memory of a block, for the original's size; 16-bit types have four stages of 16 KiB
//   0         32        64       96       128      160      192       207.8 KiB; apart from these, Shared: 1.3 KiB
//   | stage 0 | stage 1 | band 0 | band 1 | band 2 | band 3 | weights |
//     |                   |                                   [tap][lane], then Winograd's: [term][plane and row][lane]
//     |                   fp16: plane 0: row 0: columns 0 2 4 .. 62, then 1 3 5 .. 63, 8 channels each; row 1; plane 1 ..
//     fp32, as TMA writes it: [channel][plane][row][column], of 8 of the 16 planes
// The pixels of one column in 8 windows are 8 rows of 16 bytes side by side: a matrix for ldmatrix, free of bank conflicts.
// Strict: bands have the high parts of all planes, then the low parts; so have weights, without Winograd's; and a sample is two
// images, of 4 and 3 slabs: 215 KiB.
//
//                   filled by                                 emptied by
//   a stage         TMA, which one producer calls: `loaded`   4 producer warps: bar_sync 1, then TMA is called again
//   a band          4 producer warps, all arrive: `full`      8 consumer warps, all arrive: `empty`
//   an exponent     one producer: `full` of the last band     nobody: another takes its place ATTEMPTS later
//   weights         8 consumer warps, once: bar_sync 2        nobody
//   sums            consumer warps: bar_sync 2                consumer warp 0, until the next bar_sync 2; two take turns
constexpr int STAGES = 8 / sizeof(Element), STAGE_PLANES = 8;  // planes: at most; a band has equal stages
constexpr int BANDS = 4;                     // so that consumer warps may be a row apart
constexpr int ATTEMPTS = BANDS / 2 + 1;      // whose exponents may be unread: each has two bands or more
constexpr int STAGE_ROW_BYTES = COLUMNS * sizeof(Element);
constexpr int COLUMN_BYTES = CHANNELS * 2, ODD_COLUMNS = COLUMNS / 2 * COLUMN_BYTES;
constexpr int BAND_ROW_BYTES = 2 * ODD_COLUMNS, PLANE_BYTES = 2 * BAND_ROW_BYTES;
constexpr int TERMS = 4, ROW_TAPS = KERNEL_D * KERNEL_H, WINOGRAD = TERMS * ROW_TAPS;
constexpr int WEIGHT_BYTES = (TAPS + (STRICT ? TAPS : WINOGRAD)) * WARP * 8;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

struct Problem {
    int64_t batch;
    int depth, height, width, slabs, rows, columns;  // of x, and of its windows; a channel has less than 2^31 pixels
    int slab_parts, image_slabs, column_parts, image_columns, blocks;
    int stage_planes, stage_bytes, band_bytes, dynamic_bytes;  // of shared memory
    const Element *weight, *conv_bias;
    const void* bias;
    void* out;  // (batch,), without `bias` (batch, OUT_CHANNELS)
    float divisor, windows;
    int biases;   // 1, OUT_CHANNELS or 0
    bool floats;  // in bias and out; else elements

    __host__ __device__ int parts() const { return slab_parts * column_parts; }
    __host__ __device__ int64_t images() const { return batch * parts(); }
    __host__ __device__ int64_t first_line(int64_t block) const { return images() * rows * block / blocks; }
    bool sample_is_segment() const { return parts() == 1 && batch % blocks == 0; }
};

// The part of one image in [line, end) of the line of all rows; `end` is where the next block's part begins.
struct Segment {
    int image, sample;
    int first_slab, slabs, first_column, columns, first_row, rows;  // of windows

    DEVICE void set(const Problem& p, int64_t line, int64_t end) {
        image = line / p.rows, sample = image / p.parts();
        const int part = image % p.parts();
        first_slab = part / p.column_parts * p.image_slabs, first_column = part % p.column_parts * p.image_columns;
        slabs = smaller(p.image_slabs, p.slabs - first_slab);
        columns = smaller(p.image_columns, p.columns - first_column);
        first_row = line - static_cast<int64_t>(image) * p.rows;
        rows = end - line < p.rows - first_row ? end - line : p.rows - first_row;
    }
    DEVICE int planes() const { return 2 * slabs + 2; }
    DEVICE int bands() const { return rows + 1; }
    DEVICE int row_units() const { return 2 * ceil_div(columns, TILE_WINDOWS); }
};

struct Shared {
    uint64_t loaded[STAGES], full[BANDS], empty[BANDS];  // mbarriers
    float producer_largest[3][PRODUCER_WARPS];           // [at the start, at the end of an attempt; 1 if any is infinite]
    int exponents[ATTEMPTS];                             // of the power of two that an attempt scaled x by; or REJECTED
    float weight_largest[2][CONSUMER_WARPS];             // [finite ones, all]
    int weight_exponent;                                 // of the power of two that scales the weights
    bool infinite_weights;
    float sums[2][CONSUMER_WARPS][OUTPUTS];  // of a segment's maxima; one is filled while the other is read
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
DEVICE uint32_t ld_shared_u32(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
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

// ---- elements, fp16 values and powers of two
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE void store(float* to, float x) { *to = x; }
DEVICE void store(__half* to, float x) { *to = __float2half_rn(x); }
#if DIGITS == 8
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
#endif
// Of `bias` and `out`, which hold floats or elements.
DEVICE float load_at(const void* from, int64_t i, bool floats) {
    return floats ? static_cast<const float*>(from)[i] : to_float(static_cast<const Element*>(from)[i]);
}
DEVICE void store_at(void* to, int64_t i, bool floats, float x) {
    floats ? store(static_cast<float*>(to) + i, x) : store(static_cast<Element*>(to) + i, x);
}
DEVICE uint32_t fp16_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// The residual of rounding x to fp16; none of an infinity.
DEVICE float fp16_residual(float x) { return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x)); }
DEVICE float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}
// The largest of the values of WARPS whole warps, which all call it. Two calls with one array need a barrier between them.
template <int WARPS>
DEVICE float largest_of_warps(float v, float (&by_warp)[WARPS], int warp, int barrier) {
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    if (threadIdx.x % WARP == 0) by_warp[warp] = v;
    bar_sync(barrier, WARPS * WARP);
    UNROLL for (int other = 0; other < WARPS; ++other) v = fmaxf(v, by_warp[other]);
    return v;
}

// ---- the pipelines
// Stages and bands are counted over all segments and attempts: number n is in place n % STAGES or n % BANDS. All threads call
// the constructor; later each one waits and arrives for itself.
struct Pipeline {
    const Problem& problem;
    Shared& shared;
    uint32_t stages, bands;  // shared addresses

    DEVICE Pipeline(const Problem& problem, Shared& shared, char* memory)
        : problem(problem), shared(shared), stages(shared_address(memory)), bands(stages + STAGES * problem.stage_bytes) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < BANDS; ++i) mbarrier_init(full(i), PRODUCERS), mbarrier_init(empty(i), CONSUMERS);
            for (int i = 0; i < STAGES; ++i) mbarrier_init(loaded(i), 1);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
    DEVICE uint32_t stage(unsigned n) const { return stages + n % STAGES * problem.stage_bytes; }
    DEVICE uint32_t loaded(unsigned n) const { return shared_address(&shared.loaded[n % STAGES]); }
    DEVICE void stage_wait(unsigned n) const { mbarrier_try_wait(loaded(n), n / STAGES & 1); }

    DEVICE uint32_t band(unsigned n) const { return bands + n % BANDS * problem.band_bytes; }
    DEVICE uint32_t full(unsigned n) const { return shared_address(&shared.full[n % BANDS]); }
    DEVICE uint32_t empty(unsigned n) const { return shared_address(&shared.empty[n % BANDS]); }
    DEVICE void producer_acquire(unsigned n) const { mbarrier_try_wait(empty(n), n / BANDS & 1 ^ 1); }  // passes at first
    DEVICE void producer_commit(unsigned n) const { mbarrier_arrive(full(n)); }
    DEVICE void consumer_wait(unsigned n) const { mbarrier_try_wait(full(n), n / BANDS & 1); }
    DEVICE void consumer_release(unsigned n) const { mbarrier_arrive(empty(n)); }
};

// ---- consumers: their way through the bands
using Bands = uint32_t[2];  // shared addresses of those that a row of windows reads

// A unit is a tile in half of the slabs of a row of windows; which half has the larger part changes from row to row. Calls
// visit(first window, slab, slabs_end, its two bands) for the warp's units, every CONSUMER_WARPS-th of all, and releases the
// bands. Warps may be a row apart: one waits for a row's second band once, and arrives when its next unit is in a later row.
// Producers arrive in the order of the bands, so the first one is full, too.
template <class Visit>
DEVICE void for_units(const Segment& segment, const Pipeline& pipeline, unsigned first_band, Visit visit) {
    int number = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);  // of the warp's next unit, counted from the row's first
    UNROLL_1 for (unsigned band = first_band; band != first_band + segment.rows; ++band) {
        pipeline.consumer_wait(band + 1);
        const Bands bands = {pipeline.band(band), pipeline.band(band + 1)};
        UNROLL_1 for (; number < segment.row_units(); number += CONSUMER_WARPS) {
            const int tiles = segment.row_units() / 2, middle = (segment.slabs + (band - first_band) % 2) / 2;
            const bool later = number >= tiles;
            visit((number - later * tiles) * TILE_WINDOWS, later ? middle : 0, later ? segment.slabs : middle, bands);
        }
        number -= segment.row_units();
        pipeline.consumer_release(band);
    }
    pipeline.consumer_release(first_band + segment.rows);
}

// ---- consumers: the products
// An implicit GEMM for each of a window's 8 positions: M = 16 outputs, N = 8 windows, K = 8 channels of 27 taps, two at a time.
// The consumers store weight[o][c][tap] as left operands. Winograd's would spread an infinity.
__device__ void store_weights(const Element* __restrict__ weight, float sign, uint2* stored, Shared& shared) {
    float largest = 0, of_all = 0;
    UNROLL for (int i = 0; i < WEIGHTS; i += CONSUMERS) {  // all loads at once; behind the end the last weight again
        const float size = fabsf(to_float(weight[smaller(i + threadIdx.x, WEIGHTS - 1)]));
        largest = fmaxf(largest, finite_or_zero(size)), of_all = fmaxf(of_all, size);
    }
    largest = largest_of_warps(largest, shared.weight_largest[0], threadIdx.x / WARP, 2);
    of_all = largest_of_warps(of_all, shared.weight_largest[1], threadIdx.x / WARP, 2);
    const int exponent = scale_exponent(largest, 14);
    if (threadIdx.x == 0) shared.weight_exponent = exponent, shared.infinite_weights = of_all == INFINITY;
    const float scale = sign * power_of_2(exponent);
    UNROLL for (int i = threadIdx.x; i < ROW_TAPS * WARP; i += CONSUMERS) {
        const int g = i % WARP / 4, t = i % 4, row = i / WARP;
        float w[TERMS + KERNEL_W][4];  // Winograd's, then those of the taps
        UNROLL for (int k = 0; k < 4; ++k) {
            const int o = g + k / 2 * 8, c = 2 * t + k % 2;
            const bool exists = o < OUT_CHANNELS && c < IN_CHANNELS;
            const Element* const taps = weight + (exists ? (o * IN_CHANNELS + c) * TAPS + row * KERNEL_W : 0);
            UNROLL for (int tap = 0; tap < KERNEL_W; ++tap) w[TERMS + tap][k] = exists ? scale * to_float(taps[tap]) : 0;
            const float left = w[TERMS][k], middle = w[TERMS + 1][k], right = w[TERMS + 2][k], sides = left + right;
            w[0][k] = left, w[1][k] = 0.5f * (sides + middle), w[2][k] = 0.5f * (sides - middle), w[3][k] = right;
        }
        const auto store = [&](int number, const float(&of)[4]) {
            stored[number * WARP + i % WARP] = make_uint2(fp16_pair(of[0], of[1]), fp16_pair(of[2], of[3]));
        };
        UNROLL for (int tap = 0; tap < KERNEL_W; ++tap) store(row * KERNEL_W + tap, w[TERMS + tap]);
        if (STRICT) {
            UNROLL for (int tap = 0; tap < KERNEL_W; ++tap) {
                UNROLL for (float& each : w[TERMS + tap]) each = fp16_residual(each);
                store(TAPS + row * KERNEL_W + tap, w[TERMS + tap]);
            }
        } else {
            UNROLL for (int term = 0; term < TERMS; ++term) store(TAPS + term * ROW_TAPS + row, w[term]);
        }
    }
}

// A plane of 8 windows: [row][column], channels 2t and 2t + 1 of window g, in lane 4g + t. Two taps at once take neighbouring
// registers. As ldmatrix loads columns 0 2 1 3, taps 0 and 2 of a row need no moves, at a window's even and odd positions.
struct Plane { uint32_t at[SIDE][SIDE]; };
DEVICE void load_plane(const Bands& bands, uint32_t offset, Plane& x) {
    UNROLL for (int row = 0; row < SIDE; ++row) {
        const uint4 v = ldmatrix_m8n8_x4(bands[row / 2] + row % 2 * BAND_ROW_BYTES + offset);
        x.at[row][0] = v.x, x.at[row][2] = v.y, x.at[row][1] = v.z, x.at[row][3] = v.w;
    }
}
// The offset in a plane of the 16 bytes, a column's 8 channels, whose address this lane gives to ldmatrix.
DEVICE uint32_t matrix_row(int lane, int first_window) {
    const int column = lane / 8 % 2 * 2 + lane / 16;
    const int pair = (first_window + lane % 8 + column / 2) % (COLUMNS / 2);  // beyond the row: of no window
    return column % 2 * ODD_COLUMNS + pair * COLUMN_BYTES;
}

// Nine taps of a plane of the kernel: the pairs 0 2, 3 5, 6 8 and 1 7, and the middle one. Positions of a window are numbered
// d, h, w in binary. x: planes, from the one that position 0 meets with tap 0; taps go on from plane to plane.
constexpr int PLANE_TAPS = 9, PAIRS = 4, MIDDLE = 4;
DEVICE constexpr int first_of_pair(int pair) { return pair < 3 ? 3 * pair : 1; }
DEVICE constexpr int second_of_pair(int pair) { return pair < 3 ? 3 * pair + 2 : 7; }
DEVICE uint32_t pixels(const Plane* x, int position, int tap) {
    return x[position / 4 + tap / PLANE_TAPS].at[position / 2 % 2 + tap / 3 % 3][position % 2 + tap % 3];
}

using Sums = float[8][4];  // [position][element: window 2t, 2t + 1 of output g, then of g + 8]
DEVICE void add_pair(Sums& sums, const uint2* w, const Plane* x, int tap, int next_tap) {
    UNROLL for (int i = 0; i < 8; ++i)
        mma_pair(sums[i], w[tap * WARP], w[next_tap * WARP], pixels(x, i, tap), pixels(x, i, next_tap));
}
// The maximum of a window in an output, one of a lane's four, as PyTorch finds it: a NaN wins.
DEVICE float maximum(const Sums& sums, int element) {
    const auto larger = [&](int i, int j) { return max_nan(sums[i][element], sums[j][element]); };
    return max_nan(max_nan(larger(0, 1), larger(2, 3)), max_nan(larger(4, 5), larger(6, 7)));
}

// visit(sums) for a unit's slabs, slab to end, tap by tap. Strict: the tensor core truncates its sums, so each plane's begin at
// zero and are added as fp32 numbers. Error-compensated, low * high + high * low + high * high. The small sums are kept apart,
// and do not count where x is infinite: the low part of a weight may have the other sign.
template <class Visit>
DEVICE void convolve_direct(const uint2* weights, const Bands& bands, int lower, uint32_t at, int slab, int end, Visit visit) {
    UNROLL_1 for (; slab < end; ++slab) {
        Sums sums = {}, small = {};
        uint32_t here = at + 2 * slab * PLANE_BYTES;
        const uint2 *high_w = weights, *low_w = weights + TAPS * WARP;
        Plane high[2], low[2];  // those that positions 0 to 3 and 4 to 7 meet with plane r of the kernel
        load_plane(bands, here, high[1]);
        if (STRICT) load_plane(bands, here + lower, low[1]);
        UNROLL_1 for (int r = 0; r < 3; ++r, high_w += PLANE_TAPS * WARP, low_w += PLANE_TAPS * WARP) {
            high[0] = high[1];
            if (STRICT) low[0] = low[1];
            here += PLANE_BYTES;
            load_plane(bands, here, high[1]);
            if (STRICT) load_plane(bands, here + lower, low[1]);
            Sums of_plane = {}, &part = STRICT ? of_plane : sums;
            UNROLL for (int pair = 0; pair < PAIRS; ++pair) {
                if (STRICT) add_pair(small, low_w, high, first_of_pair(pair), second_of_pair(pair));
                add_pair(part, high_w, high, first_of_pair(pair), second_of_pair(pair));
                if (STRICT) add_pair(small, high_w, low, first_of_pair(pair), second_of_pair(pair));
            }
            const uint2 w = high_w[MIDDLE * WARP];
            UNROLL for (int i = 0; i < 8; ++i) {
                if (STRICT) mma_pair(small[i], low_w[MIDDLE * WARP], w, pixels(high, i, MIDDLE), pixels(low, i, MIDDLE));
                mma_m16n8k8_f32_f16(part[i], w, pixels(high, i, MIDDLE));
            }
            if (STRICT) UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += part[i / 4][i % 4];
        }
        if (STRICT) UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += finite_or_zero(small[i / 4][i % 4]);
        visit(sums);
    }
}

// Winograd's F(2, 3) along a row takes a plane of 8 windows as terms: of each row c0 - c2, c1 + c2, c2 - c1 and c3 - c1 of a
// window's four columns, channels 2t and 2t + 1 of window g in lane 4g + t. x is rounded to fp16 before, and its terms again.
struct Terms { uint32_t at[TERMS][SIDE]; };
DEVICE uint32_t fp16x2_add(uint32_t a, uint32_t b) {
    const __half2 sum = __hadd2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(sum);
}
DEVICE uint32_t fp16x2_sub(uint32_t a, uint32_t b) {
    const __half2 sum = __hsub2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const uint32_t&>(sum);
}
DEVICE void load_terms(const Bands& bands, uint32_t offset, Terms& x) {
    UNROLL for (int row = 0; row < SIDE; ++row) {
        const uint4 v = ldmatrix_m8n8_x4(bands[row / 2] + row % 2 * BAND_ROW_BYTES + offset);  // columns 0 2 1 3
        x.at[0][row] = fp16x2_sub(v.x, v.y), x.at[1][row] = fp16x2_add(v.z, v.y);
        x.at[2][row] = fp16x2_sub(v.y, v.z), x.at[3][row] = fp16x2_sub(v.w, v.z);
    }
}

using Half = float[4][4];  // of sums: [position in depth and height][element]
// The products of two terms, all nine taps of the kernel's planes and rows, mostly in pairs: eight chains side by side.
template <int TERM, int OTHER>
DEVICE void add_terms(Half& sums, Half& others, const uint2 (&w)[WINOGRAD], const Terms* x) {
    const auto add = [&](int term, Half& d, int tap, int next) {  // both, or where they are the same only one
        UNROLL for (int i = 0; i < 4; ++i) {
            const auto pixels = [&](int tap) { return x[i / 2 + tap / 3].at[term][i % 2 + tap % 3]; };
            const uint2 &a = w[term * ROW_TAPS + tap], &next_a = w[term * ROW_TAPS + next];
            if (tap == next) mma_m16n8k8_f32_f16(d[i], a, pixels(tap));
            else mma_pair(d[i], a, next_a, pixels(tap), pixels(next));
        }
    };
    constexpr int ORDER[5][2] = {{0, 2}, {3, 5}, {6, 8}, {1, 7}, {4, 4}};
    UNROLL for (int k = 0; k < 5; ++k) add(TERM, sums, ORDER[k][0], ORDER[k][1]), add(OTHER, others, ORDER[k][0], ORDER[k][1]);
}

// visit(sums) for a unit's slabs, slab to end, in order. A slab's planes 2 and 3 are the next one's planes 0 and 1 and stay in
// registers. The two positions of a window in a row are P + Q + T0 w0 and P - Q + T3 w2, where P and Q are the products of T1
// and T2, and all sums are over channels, planes and rows.
template <class Visit>
DEVICE void convolve(const uint2 (&weights)[WINOGRAD], const Bands& bands, uint32_t offset, int slab, int end, Visit visit) {
    offset += 2 * slab * PLANE_BYTES;
    Terms x[4];
    load_terms(bands, offset, x[0]);
    load_terms(bands, offset + PLANE_BYTES, x[1]);
    UNROLL_1 for (; slab < end; ++slab) {
        offset += 2 * PLANE_BYTES;
        load_terms(bands, offset, x[2]);
        load_terms(bands, offset + PLANE_BYTES, x[3]);
        Sums sums = {};  // of the left positions, then of the right ones
        Half &left = reinterpret_cast<Half&>(sums[0]), &right = reinterpret_cast<Half&>(sums[4]);
        add_terms<1, 2>(left, right, weights, x);
        UNROLL for (int i = 0; i < 16; ++i) {
            const float p = left[i / 4][i % 4], q = right[i / 4][i % 4];
            left[i / 4][i % 4] = p + q, right[i / 4][i % 4] = p - q;
        }
        add_terms<0, 3>(left, right, weights, x);
        visit(sums);
        x[0] = x[2], x[1] = x[3];
    }
}

// A warp writes a sample's result: with a bias the sum over outputs, else the average of each. Lane o has output o's sum.
DEVICE void write_result(const Problem& p, int64_t sample, float sum) {
    const int o = threadIdx.x % WARP;
    float average = 0;
    if (o < OUT_CHANNELS) {
        average = (sum / p.windows + copysignf(1, p.divisor) * to_float(p.conv_bias[o])) / fabsf(p.divisor);
        if (!p.biases) store_at(p.out, sample * OUT_CHANNELS + o, p.floats, average);
        else average += load_at(p.bias, p.biases == 1 ? 0 : o, p.floats);
    }
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) average += __shfl_xor_sync(0xffffffffu, average, offset);
    if (p.biases && o == 0) store_at(p.out, sample, p.floats, average);
}

// ---- the kernel: producer warps, then consumer warps
constexpr int FIRST_TARGET = 10, LAST_TARGET = 14;  // the first leaves room for values 31 times as large, both for a sum of two
constexpr int REJECTED = 1000, INFINITE = 2000;     // an attempt that is made again; the second one, tap by tap
constexpr bool SCALED = DIGITS != 11;               // fp16 x is taken as it is; if sums of two could overflow, tap by tap

// A piece as fp16, a column's channels side by side.
struct Packed { uint4 columns[PIECE_COLUMNS]; };
#if DIGITS == 24
using Piece = float[CHANNELS * 4];  // four columns of a row, in all channels
DEVICE void load_piece(uint32_t from, int channel_bytes, Piece& v) {
    UNROLL for (int c = 0; c < CHANNELS; ++c) {
        const float4 four = ld_shared_v4_f32(from + c * channel_bytes);
        v[4 * c] = four.x, v[4 * c + 1] = four.y, v[4 * c + 2] = four.z, v[4 * c + 3] = four.w;
    }
}
DEVICE float largest_finite(const Piece& v, bool& infinite) {
    float parts[4] = {}, finite = 0;  // four chains side by side
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) parts[i % 4] = fmaxf(parts[i % 4], fabsf(v[i]));
    const float all = fmaxf(fmaxf(parts[0], parts[1]), fmaxf(parts[2], parts[3]));
    if (all < INFINITY) return all;  // a NaN goes its way: every position that reads it has it in a term
    infinite = true;
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) finite = fmaxf(finite, fabsf(finite_or_zero(v[i])));
    return finite;
}
DEVICE void scale_piece(Piece& v, int exponent) { UNROLL for (float& each : v) each *= power_of_2(exponent); }
DEVICE Packed packed(const Piece& v) {
    Packed p;
    UNROLL for (int k = 0; k < 4; ++k)
        p.columns[k] = make_uint4(fp16_pair(v[k], v[4 + k]), fp16_pair(v[8 + k], v[12 + k]), fp16_pair(v[16 + k], v[20 + k]),
                                  fp16_pair(v[24 + k], v[28 + k]));
    return p;
}
// Every other group of four lanes swaps its two pairs of columns, so that a quarter-warp's stores touch all banks.
DEVICE void store_packed(uint32_t row, int piece, const Packed& p) {
    const bool turned = piece / 4 % 2;
    const uint32_t first = row + (2 * piece + turned) * COLUMN_BYTES, second = row + (2 * piece + !turned) * COLUMN_BYTES;
    UNROLL for (int odd = 0; odd < 2; ++odd) {
        const uint4 a = p.columns[odd], b = p.columns[2 + odd];
        st_shared_v4_u32(first + odd * ODD_COLUMNS, turned ? b : a);
        st_shared_v4_u32(second + odd * ODD_COLUMNS, turned ? a : b);
    }
}

#else
using Piece = uint32_t[CHANNELS];  // pairs of columns of a row, in all channels
#if DIGITS == 11
using Pair = __half2;
#else
using Pair = __nv_bfloat162;
#endif
DEVICE Pair as_pair(uint32_t v) { return reinterpret_cast<const Pair&>(v); }
DEVICE uint32_t bits(const Pair& v) { return reinterpret_cast<const uint32_t&>(v); }
DEVICE float low_float(uint32_t v) { return to_float(as_pair(v).x); }
DEVICE float high_float(uint32_t v) { return to_float(as_pair(v).y); }
DEVICE void load_piece(uint32_t from, int channel_bytes, Piece& v) {
    UNROLL for (int c = 0; c < CHANNELS; ++c) v[c] = ld_shared_u32(from + c * channel_bytes);
}
DEVICE float largest_finite(const Piece& v, bool& infinite) {
    uint32_t parts[2] = {};  // two chains side by side
    UNROLL for (int i = 0; i < CHANNELS; ++i) parts[i % 2] = bits(__hmax2(as_pair(parts[i % 2]), as_pair(v[i] & 0x7fff7fffu)));
    const uint32_t both = bits(__hmax2(as_pair(parts[0]), as_pair(parts[1])));
    const float all = fmaxf(low_float(both), high_float(both));
    if (all < INFINITY) return all;
    infinite = true;
    float finite = 0;
    UNROLL for (uint32_t each : v)
        finite = fmaxf(finite, fmaxf(fabsf(finite_or_zero(low_float(each))), fabsf(finite_or_zero(high_float(each)))));
    return finite;
}
#if DIGITS == 11  // never scaled
DEVICE void scale_piece(Piece&, int) {}
DEVICE uint32_t lows(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
DEVICE uint32_t highs(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
#else
DEVICE void scale_piece(Piece& v, int exponent) {
    const Pair scale = __float2bfloat162_rn(power_of_2(exponent));
    UNROLL for (uint32_t& each : v) each = bits(__hmul2(as_pair(each), scale));
}
DEVICE uint32_t lows(uint32_t a, uint32_t b) { return fp16_pair(low_float(a), low_float(b)); }
DEVICE uint32_t highs(uint32_t a, uint32_t b) { return fp16_pair(high_float(a), high_float(b)); }
#endif
DEVICE Packed packed(const Piece& v) {
    return {make_uint4(lows(v[0], v[1]), lows(v[2], v[3]), lows(v[4], v[5]), lows(v[6], v[7])),
            make_uint4(highs(v[0], v[1]), highs(v[2], v[3]), highs(v[4], v[5]), highs(v[6], v[7]))};
}
DEVICE void store_packed(uint32_t row, int piece, const Packed& p) {
    UNROLL for (int odd = 0; odd < 2; ++odd) st_shared_v4_u32(row + piece * COLUMN_BYTES + odd * ODD_COLUMNS, p.columns[odd]);
}
#endif

// All segments of the block. A thread has one piece of every 8th row of a stage; the first one also issues the TMA loads.
DEVICE void produce(const CUtensorMap& x, const Problem& problem, const Pipeline& pipeline, Shared& shared) {
    const int thread = threadIdx.x - CONSUMERS, piece = thread % PIECES;
    const int channel_bytes = problem.stage_planes * 2 * STAGE_ROW_BYTES;
    const int64_t end = problem.first_line(blockIdx.x + 1);
    unsigned first_band = 0, first_stage = 0, attempt = 0;
    Segment segment;
    for (int64_t line = problem.first_line(blockIdx.x); line < end; line += segment.rows) {
        segment.set(problem, line, end);
        const int band_stages = ceil_div(segment.planes(), problem.stage_planes), count = segment.bands() * band_stages;
        const auto load_stage = [&](int k) {
            const unsigned n = first_stage + k;
            const int column = 2 * segment.first_column, row = 2 * (segment.first_row + k / band_stages);
            const int plane = 2 * segment.first_slab + k % band_stages * problem.stage_planes;
            mbarrier_arrive_expect_tx(pipeline.loaded(n), problem.stage_bytes);
            tma_load_5d(pipeline.stage(n), x, column, row, plane, 0, segment.sample, pipeline.loaded(n));
        };
        int exponent = 0;
        for (bool exact = false, accepted = false; !accepted; exact = true) {  // exact: by all values, not the first stage
            if (thread == 0)
                for (int k = 0; k < smaller(STAGES, count); ++k) load_stage(k);
            float largest = 0;
            bool infinite = false;
            int k = 0;
            UNROLL_1 for (int i = 0; i < segment.bands(); ++i) {
                const unsigned band = first_band + i;
                UNROLL_1 for (int plane = 0; plane < segment.planes(); plane += problem.stage_planes, ++k) {
                    const uint32_t from = pipeline.stage(first_stage + k) + piece * PIECE_COLUMNS * sizeof(Element);
                    const int rows = 2 * smaller(problem.stage_planes, segment.planes() - plane), first_row = thread / PIECES;
                    Piece v;
                    pipeline.stage_wait(first_stage + k);
                    if (SCALED && k == 0 && !exact) {
                        UNROLL_1 for (int row = first_row; row < rows; row += PRODUCER_ROWS) {
                            load_piece(from + row * STAGE_ROW_BYTES, channel_bytes, v);
                            largest = fmaxf(largest, largest_finite(v, infinite));
                        }
                        const float of_all = largest_of_warps(largest, shared.producer_largest[0], thread / WARP, 1);
                        exponent = scale_exponent(of_all, FIRST_TARGET);
                    }
                    if (plane == 0) pipeline.producer_acquire(band);
                    const uint32_t to = pipeline.band(band) + plane * PLANE_BYTES;
                    if (first_row < rows) load_piece(from + first_row * STAGE_ROW_BYTES, channel_bytes, v);
                    UNROLL_1 for (int row = first_row; row < rows; row += PRODUCER_ROWS) {
                        largest = fmaxf(largest, largest_finite(v, infinite));
                        scale_piece(v, exponent);
                        uint32_t to_row = to + row * BAND_ROW_BYTES;
#if STRICT
                        store_packed(to_row, piece, packed(v));
                        UNROLL for (float& each : v) each = fp16_residual(each);
                        to_row += problem.band_bytes / 2;
#endif
                        const Packed last = packed(v);  // the next piece is on its way while this one is stored
                        const int next = row + PRODUCER_ROWS;
                        if (next < rows) load_piece(from + next * STAGE_ROW_BYTES, channel_bytes, v);
                        store_packed(to_row, piece, last);
                    }
                    bar_sync(1, PRODUCERS);  // all have read the stage
                    if (thread == 0 && k + STAGES < count) load_stage(k + STAGES);
                }
                if (k == count) {  // consumers read the exponent behind the last band's mbarrier
                    largest = largest_of_warps(largest, shared.producer_largest[1], thread / WARP, 1);
                    const bool direct = largest_of_warps(infinite, shared.producer_largest[2], thread / WARP, 1) > 0;
                    accepted = exact || (!direct && largest * power_of_2(exponent) <= 32752);  // half of fp16's largest
                    const int rejected = direct || !SCALED ? INFINITE : REJECTED;
                    if (thread == 0) shared.exponents[attempt % ATTEMPTS] = accepted ? exponent : rejected;
                    if (SCALED) exponent = scale_exponent(largest, LAST_TARGET);
                }
                pipeline.producer_commit(band);
            }
            first_band += segment.bands(), first_stage += count, ++attempt;
        }
    }
}

// A consumer warp keeps its units' sums of maxima in registers; unless strict, the weights, too, 72 a thread. At a segment's
// end the first one adds the warps' sums: to segment_sums (segments, OUTPUTS), null where each sample is a segment.
__global__ void __launch_bounds__(THREADS, 1)
    stream_max_mean(const __grid_constant__ CUtensorMap x, const Problem problem, float* __restrict__ segment_sums) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared shared;
    const Pipeline pipeline(problem, shared, memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    if (warp >= CONSUMER_WARPS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        return produce(x, problem, pipeline, shared);
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    uint2* const stored = reinterpret_cast<uint2*>(memory + STAGES * problem.stage_bytes + BANDS * problem.band_bytes);
    store_weights(problem.weight, copysignf(1, problem.divisor), stored, shared);
    const int64_t end = problem.first_line(blockIdx.x + 1);
    bar_sync(2, CONSUMERS);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    uint2 weights[WINOGRAD];
    if (!STRICT) UNROLL for (int i = 0; i < WINOGRAD; ++i) weights[i] = stored[(TAPS + i) * WARP + lane];
    unsigned first_band = 0, attempt = 0, turn = 0;
    Segment segment;
    for (int64_t line = problem.first_line(blockIdx.x); line < end; line += segment.rows, turn ^= 1) {
        segment.set(problem, line, end);
        float totals[2];  // of outputs g and g + 8
        bool direct = STRICT || shared.infinite_weights;
        int exponent;
        do {
            totals[0] = totals[1] = 0;
            for_units(segment, pipeline, first_band, [&](int window, int slab, int slabs_end, const Bands& bands) {
                const bool exist[2] = {window + 2 * t < segment.columns, window + 2 * t + 1 < segment.columns};
                const auto take_maxima = [&](const Sums& sums) {
                    const float maxima[4] = {maximum(sums, 0), maximum(sums, 1), maximum(sums, 2), maximum(sums, 3)};
                    UNROLL for (int i = 0; i < 4; ++i) totals[i / 2] += exist[i % 2] ? maxima[i] : 0;
                };
                const uint32_t offset = matrix_row(lane, window);
                if (STRICT || direct)
                    convolve_direct(stored + lane, bands, problem.band_bytes / 2, offset, slab, slabs_end, take_maxima);
                else
                    convolve(weights, bands, offset, slab, slabs_end, take_maxima);
            });
            first_band += segment.bands();
            exponent = shared.exponents[attempt++ % ATTEMPTS];
            direct |= exponent == INFINITE;
        } while (exponent >= REJECTED);
        UNROLL for (int i = 0; i < 2; ++i) {
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 1);
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 2);
            if (t == 0) shared.sums[turn][warp][g + 8 * i] = totals[i];
        }
        // sums[turn] are written, sums[turn ^ 1] were read.
        bar_sync(2, CONSUMERS);
        if (warp > 0) continue;
        float sum = 0;
        if (lane < OUTPUTS)
            for (int other = 0; other < CONSUMER_WARPS; ++other) sum += shared.sums[turn][other][lane];
        sum = ldexpf(sum, -exponent - shared.weight_exponent);
        if (!segment_sums) write_result(problem, segment.sample, sum);
        else if (lane < OUTPUTS) segment_sums[static_cast<int64_t>(segment.image + blockIdx.x) * OUTPUTS + lane] = sum;
    }
}

// A warp adds the segments of a sample, in order. A segment's slot is image + block: to the next segment's, one or both grow.
__global__ void __launch_bounds__(WARP) finish_samples(const float* __restrict__ segment_sums, const Problem p) {
    float sum = 0;
    const int64_t all = p.images() * p.rows, first_image = static_cast<int64_t>(blockIdx.x) * p.parts();
    for (int64_t image = first_image; image < first_image + p.parts(); ++image) {
        const auto block_of = [&](int64_t line) { return ((line + 1) * p.blocks - 1) / all; };
        for (int64_t block = block_of(image * p.rows); block <= block_of((image + 1) * p.rows - 1); ++block)
            if (threadIdx.x < OUTPUTS) sum += segment_sums[(image + block) * OUTPUTS + threadIdx.x];
    }
    write_result(p, blockIdx.x, sum);
}

// ---- launches
// As many slabs an image as shared memory takes, in equal parts; and as many blocks as SMs, or as samples where that keeps at
// least 95% of the SMs busy: whole samples need no second pass over their segments' sums.
static Problem planned(int64_t batch, int depth, int height, int width, int device) {
    Problem p = {batch, depth, height, width, (depth - 2) / 2, (height - 2) / 2, (width - 2) / 2};
    int limit = 0, sm_count = 0;
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    int parts = 0;
    do {
        p.image_slabs = ceil_div(p.slabs, ++parts), p.slab_parts = ceil_div(p.slabs, p.image_slabs);
        const int planes = 2 * p.image_slabs + 2;
        p.stage_planes = ceil_div(planes, ceil_div(planes, STAGE_PLANES));
        p.stage_bytes = CHANNELS * p.stage_planes * 2 * STAGE_ROW_BYTES;
        p.band_bytes = (STRICT ? 2 : 1) * planes * PLANE_BYTES;
        p.dynamic_bytes = STAGES * p.stage_bytes + BANDS * p.band_bytes + WEIGHT_BYTES;
    } while (p.image_slabs > 1 && p.dynamic_bytes + static_cast<int>(sizeof(Shared)) > limit);
    p.image_columns = p.columns < COLUMNS / 2 ? p.columns : COLUMNS / 2 - 2;  // even, as v4's loads of 16 bytes need it
    p.column_parts = ceil_div(p.columns, p.image_columns);
    const int64_t images = p.images(), waves = (images + sm_count - 1) / sm_count, whole_blocks = (images + waves - 1) / waves;
    if (images == p.batch && images % whole_blocks == 0 && whole_blocks * 20 >= 19 * sm_count) p.blocks = whole_blocks;
    else p.blocks = images * p.rows < sm_count ? images * p.rows : sm_count;
    return p;
}
// How many segments' sums scratch is to have room for.
extern "C" int64_t count_segments(int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t device) {
    const Problem p = planned(batch, depth, height, width, device);
    return p.sample_is_segment() ? 0 : p.images() + p.blocks;
}

// A tensor map of x, in boxes of a stage. What lies outside of x, and channels that do not exist, become zeros. The driver
// needs a context in this thread, which may be autograd's: a call of the runtime must come first.
static cudaError_t encode_map(const Element* x, const Problem& p, CUtensorMap* map) {
    static const auto encode = [] {  // the driver's function, without linking the driver; null if it has none
        void* function = nullptr;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault);
#else
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault);
#endif
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t width = p.width, height = p.height, depth = p.depth, batch = p.batch;
    const cuuint64_t row_bytes = (width * sizeof(Element) + 15) / 16 * 16;
    const cuuint64_t sizes[5] = {width, height, depth, IN_CHANNELS, batch}, channel_bytes = row_bytes * height * depth;
    const cuuint64_t strides[4] = {row_bytes, row_bytes * height, channel_bytes, channel_bytes * IN_CHANNELS};
    const cuuint32_t box[5] = {COLUMNS, 2, static_cast<cuuint32_t>(p.stage_planes), CHANNELS, 1}, steps[5] = {1, 1, 1, 1, 1};
    constexpr auto TYPE = DIGITS == 24   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                          : DIGITS == 11 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult result = encode(map, TYPE, 5, const_cast<Element*>(x), sizes, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// x: rows of a multiple of 16 bytes. bias, out: floats or elements. scratch: OUTPUTS floats a segment.
extern "C" int launch_stream_max_mean(const Element* x, const Element* weight, const Element* conv_bias, const void* bias,
                                      float* scratch, void* out, double divisor, int64_t biases, int64_t floats,
                                      int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t device,
                                      cudaStream_t stream) {
    Problem p = planned(batch, depth, height, width, device);
    p.weight = weight, p.conv_bias = conv_bias, p.bias = bias, p.out = out, p.divisor = divisor, p.biases = biases;
    p.floats = floats;
    p.windows = 1.0 * p.slabs * p.rows * p.columns;
    float* const segment_sums = p.sample_is_segment() ? nullptr : scratch;
    const auto kernel = stream_max_mean;
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.dynamic_bytes);
    if (error == cudaSuccess) error = encode_map(x, p, &map);
    if (error != cudaSuccess) return error;
    kernel<<<p.blocks, THREADS, p.dynamic_bytes, stream>>>(map, p, segment_sums);
    if (segment_sums) finish_samples<<<batch, WARP, 0, stream>>>(segment_sums, p);
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
SCHEMA = "(Tensor x, Tensor weight, Tensor conv_bias, Tensor bias, float divisor, int[3] pool, bool tf32=False) -> Tensor"
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
HOPPER = "-gencode=arch=compute_90a,code=sm_90a"  # load_inline would build for 9.0, which lacks wgmma
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


def original(x, weight, conv_bias, bias, divisor, pool, tf32=False):
    y = nn.functional.max_pool3d(nn.functional.conv3d(x, weight, conv_bias) / divisor, pool)
    averages = y.mean(dim=(2, 3, 4), keepdim=True)
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


def stream_max_mean(x, weight, conv_bias, bias, divisor, pool, tf32=False, kernels=kernels, original=original):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, outputs, 1, 1, 1), of x's type.

    The bias, and so the sum, has x's type or float32. tf32 permits TF32 whatever PyTorch's settings.
    """
    (batch, *_, depth, height, width), (out_channels, in_channels, *kernel) = x.shape, weight.shape
    if x.dtype not in ELEMENTS:
        raise RuntimeError(f"expected x as one of {', '.join(map(str, ELEMENTS))}; got {x.dtype}")
    check("x", x, (batch, in_channels, depth, height, width), x.device, x.dtype)
    check("weight", weight, (out_channels, in_channels, *kernel[-3:]), x.device, x.dtype)
    check("conv_bias", conv_bias, (out_channels,), x.device, x.dtype)
    of_sum = torch.float32 if bias.dtype == torch.float32 else x.dtype
    check("bias", bias, bias.shape if bias.numel() in (0, 1, out_channels) else (out_channels,), x.device, of_sum)
    if min(pool) < 1 or any(size < k + p - 1 for size, k, p in zip((depth, height, width), kernel, pool, strict=True)):
        fits = f"room for a window of {[*pool]} behind a kernel of {kernel}"
        raise RuntimeError(f"expected {fits}; got a volume of {[depth, height, width]}")
    if depth * height * width >= 2**31:
        raise RuntimeError(f"expected fewer than 2^31 pixels a channel; got x of shape {[*x.shape]}")
    if x.is_cuda and capability(x.device) != (9, 0):
        raise RuntimeError("expected a GPU of compute capability 9.0 (Hopper); v4_tensor_core runs on 8.0 and later")
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_D", "KERNEL_H", "KERNEL_W", "POOL_D", "POOL_H", "POOL_W"
    strict = int(x.dtype == torch.float32 and is_strict() and not tf32)
    sizes = dict(zip(names, (*weight.shape, *pool), strict=True))
    library = kernels(HOPPER, **sizes, ELEMENT=ELEMENTS[x.dtype], STRICT=strict)
    if not library.is_served():
        limits = "at most 8 channels in and 16 out, a kernel of 3 x 3 x 3 and windows of 2 x 2 x 2"
        warnings.warn(f"PyTorch computes what these kernels do not take: {limits}", stacklevel=2)
        operands = (each.to(of_sum) for each in (x, weight, conv_bias))  # in float32 where the sum is
        return original(*operands, bias, divisor, pool)
    weight, conv_bias, bias = weight.contiguous(), conv_bias.contiguous(), bias.contiguous()
    out = x.new_empty(batch, 1, 1, 1, dtype=of_sum) if bias.numel() else x.new_empty(batch, out_channels, 1, 1, 1)
    if batch:
        vector = 16 // x.element_size()
        if width % vector or x.data_ptr() % 16:  # TMA needs rows of a multiple of 16 bytes; what is added is never read
            rows = x.new_empty(*x.shape[:-1], -(-width // vector) * vector)[..., :width].copy_(x)
        else:
            rows = x.contiguous()
        numbers = batch, depth, height, width, x.device.index or 0
        scratch = x.new_empty(16 * count(library.count_segments, *numbers), dtype=torch.float32)  # 16: OUTPUTS
        given = rows, weight, conv_bias, bias, scratch, out
        launch(library.launch_stream_max_mean, *given, float(divisor), bias.numel(), out.dtype == torch.float32, *numbers)
    return out


operator = torch.library.custom_op(f"{NAME}::forward", stream_max_mean, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(original)


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, which takes several times the 441 MB that the forward pass avoids."""
    found = torch.func.vjp(lambda *tensors: original(*tensors, ctx.divisor, ctx.pool), *ctx.saved_tensors)[1](grad)
    return *found, None, None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.divisor, ctx.pool, _ = inputs
    ctx.save_for_backward(*tensors)


operator.register_autograd(backward, setup_context=setup_context)


class Direct(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which takes longer than all else on the host."""

    backward = staticmethod(backward)

    @staticmethod
    def forward(ctx, *operands, function=stream_max_mean, setup_context=setup_context):
        output = function(*operands)
        setup_context(ctx, operands, output)
        return output


def call(x, weight, conv_bias, bias, divisor, pool, function=stream_max_mean, direct=Direct):
    """Call the operator or, in eager mode, its function.

    Autocast: 16-bit x and the weights get its type, float32 stays and permits TF32; the sum is float32, as PyTorch's.
    """
    is_cast = torch.is_autocast_enabled(DEVICE)
    if is_cast:
        dtype = torch.get_autocast_dtype(DEVICE) if x.element_size() == 2 else x.dtype
        x, weight, conv_bias, bias = *(each.to(dtype) for each in (x, weight, conv_bias)), bias.float()
    operands = x, weight, conv_bias, bias, divisor, pool, is_cast
    with torch.autocast(DEVICE, enabled=False) if is_cast else contextlib.nullcontext():
        if not is_direct(*operands):
            return torch.ops.conv3d_div_max_gap_bias_sum_v5_hopper.forward(*operands)
        return (direct.apply if torch.is_grad_enabled() else function)(*operands)


class ModelNew(nn.Module):
    operator = staticmethod(call)
    out_dtype = None  # torch.float32: the sum is not rounded to x's type

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
        bias = self.bias if self.out_dtype is None else self.bias.to(self.out_dtype)
        of_kernel = bias if self.sums_channels else self.bias.new_empty(0)
        out = self.operator(x, self.conv.weight, self.conv.bias, of_kernel, self.divisor, self.pool_size)
        return out if self.sums_channels else torch.sum(out + bias, dim=self.sum_dim)


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
