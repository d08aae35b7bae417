"""conv3d_div_max_gap_bias_sum, v4: an implicit GEMM on the tensor cores, in fp16 with TF32's precision.

The convolution is a product by mma.sync.

Why it is faster
    v3 is bound by fp32 multiply-adds; mma.sync multiplies fp16 at 12 times their rate on an H200. Warp-specialized: producer
    warps convert each value once, consumer warps load a column of 8 windows by ldmatrix and multiply two taps at a time. The 8
    positions of a window end in 8 registers of one lane: their maximum needs no exchange. Measured: 0.147 ms (v3 1.55).

Mathematics
    out[b] = sum over o of ((1/N * sum over k of max over window k of y[b,o,.] + sign(d) * conv_bias[o]) / |d| + bias[o])
    y: the convolution with weights * sign(d), without its bias; N windows a channel. fp16 has TF32's 11 bits; a power of two
    gives each segment, a block's part of a sample, the range, from its first values; if a later one overflows, the segment is
    attempted again, its largest between 2^14 and 2^15. x is off by at most 2^-11 of itself, as in TF32, or by 2^-35 of the
    segment's largest. NaN and infinities count in no scale. Strict (PyTorch forbids TF32; read in each call): fp16x3. Each
    plane's sums, which tensor cores truncate, begin at zero. fp16 and bf16 are multiplied as they are, without a scale.

Launches
    conv_max_mean    samples x parts    384 threads   97 KB, strict 206    a consumer warp: 8 windows x 16 outputs at a time
    finish_samples   samples            32            0                    adds a sample's parts, where there are several

Floor
    269 MB in, 0.062 ms on an H200 (16-bit types 0.031); 47.6 GFLOP at the 622 TFLOP/s of mma.sync, 0.077. No unit binds.

Takes
    float32, fp16 or bf16 CUDA tensors, a channel below 2^31 pixels, on compute capability 8.0 or later; the bias, whose type
    the sum has, may be float32, as under autocast, which casts no such x. What SERVED says: up to 8 channels in and 16 out, a
    kernel of 3, windows of 2. PyTorch computes the rest, with a warning. The gradient is PyTorch's. Deterministic for a number
    of SMs. MIT; copy it.
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

NAME = "conv3d_div_max_gap_bias_sum_v4_tensor_core"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
SHARED_LIMIT_KB = 0  # builds as for a device with that much shared memory a block; 0: what the device has
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's

CUDA = r"""
// Needs ELEMENT, STRICT, IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W, SHARED_LIMIT_KB.
#define DIGITS_float 24
#define DIGITS___half 11
#define DIGITS___nv_bfloat16 8
#define PASTE(a, b) a##b
#define DIGITS_OF(type) PASTE(DIGITS_, type)
#define DIGITS DIGITS_OF(ELEMENT)  // of an element's significand
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

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// ---- words
// A window of 2 x 2 x 2 positions reads 4 x 4 x 4 pixels. A tile is 8 windows side by side in 16 outputs. A slab is a layer of
// windows along depth. Where a sample's slabs do not fit into shared memory, or its columns into a band, it is cut along these;
// and along its rows, where samples are too few to fill all SMs. A block has one part of one sample: a segment. A band is two
// rows of x, in all planes of a segment: a row of windows reads two bands. A segment is scaled by a power of two that its first
// values suggest, and attempted again if one overflows fp16; 16-bit x and weights are multiplied as they are.
constexpr int WARP = 32, STAGES = 3, CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;
constexpr int CHANNELS = 8, OUTPUTS = 16, TILE_WINDOWS = 8;  // of the tensor core's operands; what does not exist is zero
constexpr int SIDE = 4, COLUMNS = 64;  // of x: a window's pixels in each direction, a row's columns
constexpr bool SCALED = DIGITS == 24;
constexpr int PIECE_COLUMNS = SCALED ? 4 : 2, PIECES = COLUMNS / PIECE_COLUMNS, LINES = PRODUCERS / PIECES;
constexpr int THREAD_LINES = SCALED ? 1 : 4, STEP = THREAD_LINES * LINES;  // rows of a band that the producers load at a time
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
constexpr int PLANE_BYTES = 2 * ROW_BYTES, WEIGHT_BYTES = TAPS * WARP * 8;  // of high or low parts

struct Shared {
    uint64_t full[STAGES], empty[STAGES];      // mbarriers
    float producer_largest[2][PRODUCER_WARPS]; // [at the start, at the end of an attempt]
    int exponents[2];                          // of the power of two that an attempt scaled x by; or REJECTED
    float weight_largest[CONSUMER_WARPS];
    float sums[CONSUMER_WARPS][OUTPUTS];
};

struct Problem {
    int64_t batch;
    int depth, height, width, slabs, rows, columns;  // of x, and of its windows; a channel has less than 2^31 pixels
    int slab_parts, part_slabs, column_parts, part_columns, row_parts, part_rows, parts, band_bytes, dynamic_bytes;
    const Element *x, *weight, *conv_bias;
    const void* bias;
    void* out;  // (batch,), without `bias` (batch, OUT_CHANNELS)
    float divisor, windows;
    int biases;   // 1, OUT_CHANNELS or 0
    bool floats;  // in bias and out; else elements
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
// As mma_m16n8k8_f32_f16, of bf16.
DEVICE void mma_m16n8k8_f32_bf16(float (&d)[4], uint2 a, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(b));
}
// As mma_m16n8k16_f32_f16, of bf16.
DEVICE void mma_m16n8k16_f32_bf16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEVICE float max_nan(float a, float b) {  // fmaxf ignores NaN
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}
// The products of a tap, and of two at once.
DEVICE void mma_one(float (&d)[4], uint2 a, uint32_t b) {
    if (DIGITS == 8) mma_m16n8k8_f32_bf16(d, a, b);
    else mma_m16n8k8_f32_f16(d, a, b);
}
DEVICE void mma_pair(float (&d)[4], uint2 a, uint2 next_a, uint32_t b, uint32_t next_b) {
    const uint4 both = make_uint4(a.x, a.y, next_a.x, next_a.y);
    if (DIGITS == 8) mma_m16n8k16_f32_bf16(d, both, b, next_b);
    else mma_m16n8k16_f32_f16(d, both, b, next_b);
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
// Two operands of a product: fp16, or bf16 where x is.
DEVICE uint32_t operand_pair(float a, float b) {
#if DIGITS == 8
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
#else
    return fp16_pair(a, b);
#endif
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
// The largest of the values of WARPS whole warps, which all call it. Two calls with one array need a barrier between them.
template <int WARPS>
DEVICE float largest_of_warps(float v, float (&by_warp)[WARPS], int warp, int barrier) {
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    if (threadIdx.x % WARP == 0) by_warp[warp] = v;
    bar_sync(barrier, WARPS * WARP);
    for (int other = 0; other < WARPS; ++other) v = fmaxf(v, by_warp[other]);
    return v;
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
    DEVICE int bands() const { return rows + 1; }
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
// Calls visit(first window and slab of a tile, its two bands) for the warp's tiles, every CONSUMER_WARPS-th along columns, then
// slabs, then rows of windows, and releases the stages. Warps may be a row apart. n counts the bands. Producers arrive in their
// order: where a row's second one is full, the first is, too.
template <class Visit>
DEVICE void for_tiles(const Segment& segment, const Pipeline& pipeline, unsigned& n, Visit visit) {
    const int groups = ceil_div(segment.columns, TILE_WINDOWS);
    int group = threadIdx.x / WARP, slab = 0;  // a slab beyond the segment's is of a later row
    UNROLL_1 for (const unsigned end = n + segment.rows; n != end; ++n, slab -= segment.slabs) {
        pipeline.consumer_wait(n + 1);
        UNROLL_1 for (;; group += CONSUMER_WARPS) {
            for (; group >= groups; group -= groups) ++slab;
            if (slab >= segment.slabs) break;
            visit(group * TILE_WINDOWS, slab, pipeline.band(n), pipeline.band(n + 1));
        }
        pipeline.consumer_release(n);
    }
    pipeline.consumer_release(n++);
}

// weight[o][c][tap] as left operands, [tap][lane], scaled, and what rounding leaves of them. Returns the exponent of the power
// of two that scales them. The consumers call it.
__device__ int store_weights(const Element* __restrict__ weight, float sign, uint2* high, uint2* low, Shared& shared) {
    float largest = 0;
    for (int i = threadIdx.x; i < WEIGHTS; i += CONSUMERS) largest = fmaxf(largest, fabsf(finite_or_zero(to_float(weight[i]))));
    const float of_all = largest_of_warps(largest, shared.weight_largest, threadIdx.x / WARP, 2);
    const int exponent = SCALED ? scale_exponent(of_all, 14) : 0;
    const float scale = sign * power_of_2(exponent);
    for (int i = threadIdx.x; i < TAPS * WARP; i += CONSUMERS) {
        const int g = i % WARP / 4, t = i % 4, tap = i / WARP;
        const auto scaled = [&](int o, int c) {
            return o < OUT_CHANNELS && c < IN_CHANNELS ? scale * to_float(weight[(o * IN_CHANNELS + c) * TAPS + tap]) : 0;
        };
        float w[4] = {scaled(g, 2 * t), scaled(g, 2 * t + 1), scaled(g + 8, 2 * t), scaled(g + 8, 2 * t + 1)};
        high[i] = make_uint2(operand_pair(w[0], w[1]), operand_pair(w[2], w[3]));
        if (!low) continue;
        UNROLL for (float& each : w) each = fp16_residual(each);
        low[i] = make_uint2(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]));
    }
    return exponent;
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
// Where in a band the row of 16 bytes lies that a lane names in load_plane.
DEVICE uint32_t matrix_row(int lane, int first_window, int slab) {
    const int column = lane / 8 % 2 * 2 + lane / 16;
    const int pair = (first_window + lane % 8 + column / 2) % (COLUMNS / 2);  // beyond the row: of no window
    return 2 * slab * PLANE_BYTES + column % 2 * ODD_COLUMNS + pair * COLUMN_BYTES;
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
                mma_one(sums[4 * d + hw], w[MIDDLE], pixels(x, hw, MIDDLE));
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
                mma_one(part[hw], w, pixels(high, hw, MIDDLE));
            }
            UNROLL for (int i = 0; i < 16; ++i) sums[4 * d + i / 4][i % 4] += part[i / 4][i % 4];
        }
    }
    UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] += finite_or_zero(small[i / 4][i % 4]);
}

// The maximum of a window in an output, one of a lane's four, as PyTorch finds it: a NaN wins.
DEVICE float maximum(const Sums& sums, int element) {
    const auto larger = [&](int i, int j) { return max_nan(sums[i][element], sums[j][element]); };
    return max_nan(max_nan(larger(0, 1), larger(2, 3)), max_nan(larger(4, 5), larger(6, 7)));
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
constexpr int REJECTED = 1000;

#if DIGITS == 24
constexpr int FIRST_TARGET = 11, LAST_TARGET = 15;  // the first leaves room for values 31 times as large
using Piece = float[CHANNELS * 4];  // four columns of a row, in all channels
DEVICE float largest_finite(float largest, const Piece& v) {
    float all = largest;
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) all = fmaxf(all, fabsf(v[i]));
    if (all < INFINITY) return all;
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) largest = fmaxf(largest, fabsf(finite_or_zero(v[i])));
    return largest;
}
DEVICE void load_piece(const Element* __restrict__ from, int64_t channel_elements, int exist, bool aligned, Piece& v) {
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) v[i] = 0;
    if (aligned && exist > 0)
        UNROLL for (int c = 0; c < IN_CHANNELS; ++c) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(from + c * channel_elements));
            v[4 * c] = four.x, v[4 * c + 1] = four.y, v[4 * c + 2] = four.z, v[4 * c + 3] = four.w;
        }
    if (!aligned)
        UNROLL for (int i = 0; i < IN_CHANNELS * 4; ++i)
            if (i % 4 < exist) v[i] = __ldg(from + i / 4 * channel_elements + i % 4);
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

#else
using Piece = uint32_t[CHANNELS];  // pairs of columns of a row, in all channels
DEVICE void load_piece(const Element* __restrict__ from, int64_t channel_elements, int exist, bool aligned, Piece& v) {
    UNROLL for (int c = 0; c < CHANNELS; ++c) v[c] = 0;
    if (aligned && exist > 0)
        UNROLL for (int c = 0; c < IN_CHANNELS; ++c)
            v[c] = __ldg(reinterpret_cast<const uint32_t*>(from + c * channel_elements));
    if (!aligned)
        UNROLL for (int i = 0; i < IN_CHANNELS * 2; ++i)
            if (i % 2 < exist) {
                const unsigned short* const bits = reinterpret_cast<const unsigned short*>(from + i / 2 * channel_elements);
                v[i / 2] |= static_cast<uint32_t>(__ldg(bits + i % 2)) << i % 2 * 16;
            }
}
// A piece goes to its row, a column's channels side by side.
DEVICE void store_piece(uint32_t row, int piece, const Piece& v) {
    UNROLL for (int odd = 0; odd < 2; ++odd) {
        const auto pair = [&](int c) { return __byte_perm(v[c], v[c + 1], odd ? 0x7632 : 0x5410); };
        const uint4 column = make_uint4(pair(0), pair(2), pair(4), pair(6));
        st_shared_v4_u32(row + piece * COLUMN_BYTES + odd * ODD_COLUMNS, column);
    }
}
#endif

DEVICE void produce(const Problem& problem, const Segment& segment, const Pipeline& pipeline, Shared& shared, int thread) {
    const int piece = thread % PIECES, first_line = thread / PIECES, lines = 2 * (2 * segment.slabs + 2);  // of a band
    const int64_t plane_elements = static_cast<int64_t>(problem.height) * problem.width;
    const int left = 2 * segment.first_column + PIECE_COLUMNS * piece, exist = problem.width - left;
    constexpr int VECTOR = PIECE_COLUMNS * sizeof(Element);
    const bool aligned = problem.width % PIECE_COLUMNS == 0 && reinterpret_cast<uintptr_t>(problem.x) % VECTOR == 0;
    const Element* const from = problem.x + left + 2 * segment.first_row * static_cast<int64_t>(problem.width) +
                              (segment.sample * IN_CHANNELS * problem.depth + 2 * segment.first_slab) * plane_elements;
    Piece v[THREAD_LINES];
    const auto load = [&](int band, int first) {  // line: plane and row in a band
        UNROLL for (int i = 0; i < THREAD_LINES; ++i) {
            const int line = first + i * LINES;
            if (THREAD_LINES > 1 && line >= lines) break;
            load_piece(from + line / 2 * plane_elements + (2 * band + line % 2) * static_cast<int64_t>(problem.width),
                       problem.depth * plane_elements, exist, aligned, v[i]);
        }
    };
    load(0, first_line);
    int band = 0;
#if DIGITS == 24
    const float first_largest = largest_of_warps(largest_finite(0, v[0]), shared.producer_largest[0], thread / WARP, 1);
    int exponent = scale_exponent(first_largest, FIRST_TARGET);
    bool exact = false;
    float largest = 0;
#endif
    UNROLL_1 for (unsigned n = 0; band < segment.bands(); ++n) {
        const int next_band = band + 1 < segment.bands() ? band + 1 : 0;  // the first again, in case of a second attempt
        pipeline.producer_acquire(n);
        UNROLL_1 for (int line = first_line; line < lines; line += STEP) {
            const uint32_t to = pipeline.band(n) + line * ROW_BYTES;
#if DIGITS == 24
            largest = largest_finite(largest, v[0]);
            UNROLL for (float& each : v[0]) each *= power_of_2(exponent);
            store_piece(to, piece, v[0]);
#if STRICT
            UNROLL for (float& each : v[0]) each = fp16_residual(each);
            store_piece(to + pipeline.band_bytes / 2, piece, v[0]);
#endif
#else
            UNROLL for (int i = 0; i < THREAD_LINES; ++i)
                if (line + i * LINES < lines) store_piece(to + i * LINES * ROW_BYTES, piece, v[i]);
#endif
            // The next piece is under way while the pipeline is full.
            const bool in_band = line + STEP < lines;
            load(in_band ? band : next_band, in_band ? line + STEP : first_line);
        }
        ++band;
#if DIGITS == 24
        if (band == segment.bands()) {  // consumers read the exponent behind the last band's barrier
            largest = largest_of_warps(largest, shared.producer_largest[1], thread / WARP, 1);
            const bool accepted = exact || largest * power_of_2(exponent) <= 65504;  // fp16's largest
            if (thread == 0) shared.exponents[exact] = accepted ? exponent : REJECTED;
            exponent = scale_exponent(largest, LAST_TARGET);
            if (!accepted) exact = true, band = 0;
        }
#endif
        pipeline.producer_commit(n);
    }
}

// `part_sums` (parts, batch, OUTPUTS) where a sample has several, else null.
__global__ void __launch_bounds__(THREADS, 1) conv_max_mean(const Problem problem, float* __restrict__ part_sums) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared shared;
    __shared__ Segment segment;  // in no registers, which are short
    if (threadIdx.x == 0) segment.set(problem);
    const Pipeline pipeline(memory, shared, problem.band_bytes);
    if (threadIdx.x >= CONSUMERS) return produce(problem, segment, pipeline, shared, threadIdx.x - CONSUMERS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    uint2* const stored = reinterpret_cast<uint2*>(memory + (STRICT ? STAGES : STAGES - 1) * pipeline.band_bytes);
    const int weight_exponent = store_weights(problem.weight, copysignf(1, problem.divisor), stored,
                                              STRICT ? stored + TAPS * WARP : nullptr, shared);
    bar_sync(2, CONSUMERS);
    uint2 weights[TAPS];
    if (!STRICT) UNROLL for (int tap = 0; tap < TAPS; ++tap) weights[tap] = stored[tap * WARP + lane];
    pipeline.consumer_release(STAGES - 1);

    float totals[2];  // of outputs g and g + 8
    unsigned n = 0;
    int exponent;
    do {
        totals[0] = totals[1] = 0;
        for_tiles(segment, pipeline, n, [&](int first_window, int slab, uint32_t band, uint32_t next_band) {
            const uint32_t offset = matrix_row(lane, first_window, slab);
            Sums sums;
            if constexpr (STRICT)
                convolve_strictly(stored + lane, band + offset, next_band + offset, pipeline.band_bytes / 2, sums);
            else
                convolve(weights, band + offset, next_band + offset, sums);
            const float maxima[4] = {maximum(sums, 0), maximum(sums, 1), maximum(sums, 2), maximum(sums, 3)};
            UNROLL for (int i = 0; i < 4; ++i)
                totals[i / 2] += first_window + 2 * t + i % 2 < segment.columns ? maxima[i] : 0;
        });
        exponent = SCALED ? shared.exponents[n > segment.bands()] : 0;
    } while (exponent == REJECTED);
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
    sum = ldexpf(sum, -exponent - weight_exponent);
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

// ---- launches
// The problem, cut into parts for that device.
static Problem planned(int64_t batch, int depth, int height, int width, int device) {
    Problem p = {batch, depth, height, width, (depth - 2) / 2, (height - 2) / 2, (width - 2) / 2};
    int limit = 0, sm_count = 0;
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    if (SHARED_LIMIT_KB > 0) limit = smaller(limit, SHARED_LIMIT_KB * 1024);
    p.parts = 1;
    do {  // as many slabs a segment as shared memory takes, in equal parts
        p.part_slabs = ceil_div(p.slabs, p.parts), p.slab_parts = ceil_div(p.slabs, p.part_slabs);
        p.band_bytes = (STRICT ? 2 : 1) * (2 * p.part_slabs + 2) * PLANE_BYTES;
        p.dynamic_bytes = STAGES * p.band_bytes + (STRICT ? 2 * WEIGHT_BYTES : 0);
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
    return p;
}

extern "C" int64_t count_blocks(int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t device) {
    return batch * planned(batch, depth, height, width, device).parts;
}

// bias, out: floats or elements. scratch: OUTPUTS floats a block.
extern "C" int launch_conv_max_mean(const Element* x, const Element* weight, const Element* conv_bias, const void* bias,
                                    float* scratch, void* out, double divisor, int64_t biases, int64_t floats,
                                    int64_t batch, int64_t depth, int64_t height, int64_t width, int64_t device,
                                    cudaStream_t stream) {
    Problem p = planned(batch, depth, height, width, device);
    p.x = x, p.weight = weight, p.conv_bias = conv_bias, p.bias = bias, p.out = out, p.divisor = divisor, p.biases = biases;
    p.floats = floats;
    p.windows = 1.0 * p.slabs * p.rows * p.columns;
    const auto kernel = conv_max_mean;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.dynamic_bytes);
    if (error != cudaSuccess) return error;
    kernel<<<batch * p.parts, THREADS, p.dynamic_bytes, stream>>>(p, p.parts > 1 ? scratch : nullptr);
    if (p.parts > 1) finish_samples<<<batch, WARP, 0, stream>>>(scratch, p);
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


def conv_max_mean(x, weight, conv_bias, bias, divisor, pool, tf32=False, kernels=kernels, original=original):
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
    if x.is_cuda and capability(x.device) < (8, 0):
        raise RuntimeError("expected a GPU of compute capability 8.0 or later; v3_single_kernel runs on others")
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_D", "KERNEL_H", "KERNEL_W", "POOL_D", "POOL_H", "POOL_W"
    strict = int(x.dtype == torch.float32 and is_strict() and not tf32)
    sizes = dict(zip(names, (*weight.shape, *pool), strict=True))
    library = kernels(**sizes, SHARED_LIMIT_KB=SHARED_LIMIT_KB, ELEMENT=ELEMENTS[x.dtype], STRICT=strict)
    if not library.is_served():
        limits = "at most 8 channels in and 16 out, a kernel of 3 x 3 x 3 and windows of 2 x 2 x 2"
        warnings.warn(f"PyTorch computes what these kernels do not take: {limits}", stacklevel=2)
        operands = (each.to(of_sum) for each in (x, weight, conv_bias))  # in float32 where the sum is
        return original(*operands, bias, divisor, pool)
    weight, conv_bias, bias = weight.contiguous(), conv_bias.contiguous(), bias.contiguous()
    out = x.new_empty(batch, 1, 1, 1, dtype=of_sum) if bias.numel() else x.new_empty(batch, out_channels, 1, 1, 1)
    if batch:
        numbers = batch, depth, height, width, x.device.index or 0
        blocks = count(library.count_blocks, *numbers)
        if blocks >= 2**31:
            raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got one of {blocks}")
        scratch = x.new_empty(16 * blocks, dtype=torch.float32)  # 16: OUTPUTS
        given = x.contiguous(), weight, conv_bias, bias, scratch, out
        launch(library.launch_conv_max_mean, *given, float(divisor), bias.numel(), out.dtype == torch.float32, *numbers)
    return out


operator = torch.library.custom_op(f"{NAME}::forward", conv_max_mean, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
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
    def forward(ctx, *operands, function=conv_max_mean, setup_context=setup_context):
        output = function(*operands)
        setup_context(ctx, operands, output)
        return output


def call(x, weight, conv_bias, bias, divisor, pool, function=conv_max_mean, direct=Direct):
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
            return torch.ops.conv3d_div_max_gap_bias_sum_v4_tensor_core.forward(*operands)
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
