"""conv3d_div_max_gap_bias_sum, v4: an implicit GEMM on the tensor cores, in fp16 with TF32's precision.

Why it is faster
    v3 is bound by fp32 multiply-adds; mma.sync multiplies fp16 at 12 times their rate on an H200. fp16 has TF32's 11 bits, and
    a power of two for each block's part of a sample gives it the range. The kernel is warp-specialized: producer warps convert
    each value once, and consumer warps load a column of 8 windows by ldmatrix and multiply two taps at a time. The 8 positions
    of a pooling window end in 8 registers of one lane, so the maximum needs no exchange. The gradients are such products too,
    with a one-hot matrix of the argmax indices that the forward pass keeps, 16 bytes a window.

Mathematics
    v3's. A segment, a block's part of a sample, is scaled by a power of two that brings its first values to between 2^10 and
    2^11; if a later value is too large for fp16 then, the segment is attempted again, with the power that brings the largest to
    between 2^14 and 2^15. So x is off by at most 2^-11 of itself, as in TF32, or by 2^-35 of the segment's largest value,
    whichever is more. Weights are scaled by their largest. NaN and infinities count in no scale.
    Strict (where PyTorch forbids TF32 to convolutions, read in each call), error-compensated: x and weights are two fp16 values
    each, high + low, and a product is low * high + high * low + high * high. The tensor core truncates its sums; so each
    plane's begin at zero, and are added as fp32 numbers. All positions of a window add in the same order, so equal inputs give
    equal bits, and ties go to the first as in PyTorch. With hot[o,k] = 1 where position k is its window's maximum in output o:
    grad_w[o,c,t] = 1/(N*d) * sum over b,k of grad[b,o] * hot[b,o,k] * x[b,c,k + t]
    grad_x[b,c,p] = 1/(N*d) * sum over o,t of hot[b,o,p - t] * (grad[b,o] * w[o,c,t])
    A NaN in x makes gradients of weights NaN; which of them need not be PyTorch's choice.

Launches
    kernel           grid                         block  shared  work of a warp
    conv_max_mean    samples x parts              384    97 KB   8 windows x 16 outputs at a time, or 1024 values
    weight_gradient  samples x parts              384    97 KB   8 windows x 16 outputs x 216 weights, or 1024 values
    input_gradient   SMs                          384    7 KB    2 x 2 x 16 pixels x 8 channels at a time
    finish_samples   samples, if these have parts 32     0       adds a sample's parts
    add_gradients    weights / 32                 256    1 KB    adds all parts' gradients
    Strict takes 206 KB. Where a block has 163 KB at most, a sample's slabs become two parts, with 99 KB four.

Floor
    Forward: 269 MB in, 0.062 ms on an H200; 47.6 GFLOP at the 622 TFLOP/s of mma.sync, 0.077. Each gradient is as large a
    product again; the input's also writes 269 MB.

Takes
    float32 CUDA tensors (batch, in_channels, depth, height, width), batch 0 included, a channel below 2^31 pixels; any
    channels, kernel, bias shape and sum_dim that the original takes; pool_size an int or three; a divisor whose size is a
    normal float32; compute capability 8.0 or later. The tensor cores serve up to 8 channels in and 16 out, a kernel of 3 x 3 x
    3 and windows of 2 x 2 x 2. Other shapes go through plain kernels, right but slow: v3 serves them better. Strict gradients
    of weights are plain, too. Anything else raises before a launch. Trains, and computes only the gradients that are asked for;
    second derivatives raise. What torch.compile compiled for training raises once the precision is another. Deterministic on a
    GPU; another number of SMs adds in another order.
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

# Builds the kernels as if a block could have no more shared memory: 163 for an A100, 99 for an RTX 3090, 4090 or 5090.
SHARED_LIMIT_KB = None

INTERFACE = r"""
// Both sources begin with this. Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W.
#include <cuda_runtime.h>
#include <cstdint>
#include <type_traits>

// What the tensor-core kernels take; all else goes through the plain kernels.
#define FAST                                                                                                               \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D == 3 && KERNEL_H == 3 && KERNEL_W == 3 && POOL_D == 2 &&           \
     POOL_H == 2 && POOL_W == 2)

constexpr int64_t TAPS = int64_t(KERNEL_D) * KERNEL_H * KERNEL_W, POSITIONS = int64_t(POOL_D) * POOL_H * POOL_W;
constexpr int64_t WEIGHTS = TAPS * IN_CHANNELS * OUT_CHANNELS;
constexpr int PITCH = OUT_CHANNELS < 16 ? 16 : OUT_CHANNELS;  // of a window's argmax indices, and of a segment's sums
using Argmax = std::conditional_t<POSITIONS <= 256, uint8_t, int32_t>;

struct Problem {
    const float *x, *weight;
    int64_t batch;
    int depth, height, width, slabs, rows, columns;  // of x, and of its windows; a channel has less than 2^31 pixels
    bool strict;
    cudaStream_t stream;

    // Where a sample's slabs do not fit into shared memory, or its columns into a band, it is cut along these; and along its
    // rows, where samples are too few to fill all SMs. A block has one part of one sample: a segment.
    int slab_parts, part_slabs, column_parts, part_columns, row_parts, part_rows, parts, band_bytes, dynamic_bytes;
    int64_t sums, gradients;  // rows of PITCH sums that the forward pass needs, of WEIGHTS values that grad_weight needs
};

// What a sample's sums become: with a bias the sum over all outputs, else the average of each.
struct Result {
    const float *conv_bias, *bias;
    int biases;  // 1 or OUT_CHANNELS
    float divisor, windows;
    float* out;
};

// Gradients of the averages: one a sample, or one a channel of it.
struct Upstream {
    const float* grad;
    bool by_sample;
    float scale;  // 1 / (windows * divisor)
    __host__ __device__ float at(int64_t sample, int o) const { return grad[by_sample ? sample : sample * OUT_CHANNELS + o]; }
};

void plan(Problem&);  // sets what follows the stream
cudaError_t launch_forward(const Problem&, const Result&, float* sums, Argmax* argmax);  // argmax may be null
cudaError_t launch_weight_gradient(const Problem&, const Upstream&, const Argmax*, float* gradients, float* grad_weight);
cudaError_t launch_input_gradient(const Problem&, const Upstream&, const Argmax*, float* grad_x);
"""

CUDA = r"""
#include <cuda_fp16.h>
#include <cmath>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

constexpr int WARP = 32;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

DEVICE float warp_sum(float v) {  // in all lanes
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

// A warp writes a sample's result; sum_of(o) is the sum of output o's maxima.
template <class Sum>
DEVICE void write_result(const Result& result, int64_t sample, Sum sum_of) {
    float total = 0;
    for (int o = threadIdx.x % WARP; o < OUT_CHANNELS; o += WARP) {
        const float sign = copysignf(1, result.divisor);
        const float average = (sum_of(o) / result.windows + sign * result.conv_bias[o]) / fabsf(result.divisor);
        if (result.bias) total += average + result.bias[result.biases == 1 ? 0 : o];
        else result.out[sample * OUT_CHANNELS + o] = average;
    }
    if (!result.bias) return;
    total = warp_sum(total);
    if (threadIdx.x % WARP == 0) result.out[sample] = total;
}

// sums (parts, batch, PITCH): a warp adds the parts of a sample, in order.
__global__ void __launch_bounds__(WARP) finish_samples(const float* __restrict__ sums, int parts, const Result result) {
    write_result(result, blockIdx.x, [&](int o) {
        float sum = 0;
        for (int part = 0; part < parts; ++part) sum += sums[(static_cast<int64_t>(part) * gridDim.x + blockIdx.x) * PITCH + o];
        return sum;
    });
}

#if FAST

// ---- geometry
// A window of 2 x 2 x 2 positions reads 4 x 4 x 4 pixels. A tile is 8 windows side by side in 16 outputs. A slab is a layer of
// windows along depth. A band is two rows of x, in all planes of a segment: a row of windows reads two bands.
constexpr int CHANNELS = 8, OUTPUTS = 16, TILE_WINDOWS = 8;  // of the tensor core's operands; what does not exist is zero
constexpr int SIDE = 4, COLUMNS = 64, PIECES = COLUMNS / 4;  // of x: a window's pixels in each direction, a row's columns
constexpr int WHOLE_WINDOWS = (COLUMNS - 2) / 2;             // that fit into COLUMNS
constexpr int PART_WINDOWS = WHOLE_WINDOWS / 2 * 2;          // parts of longer rows begin 16-byte aligned

// ---- who works: a warp-specialized kernel
// Producer warps load x, scale it, and store it as fp16 into a multistage pipeline; consumer warps multiply.
constexpr int STAGES = 3, CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;
constexpr int LINES = PRODUCERS / PIECES;  // rows of a band that the producers load at a time

// ---- shared memory of a block, for the original's size
//   0        32       64       96 KB                          strict: 0        64       128      192     206 KB
//   | band n | n + 1  | n + 2  | Shared                               | band n | n + 1  | n + 2  | weights | Shared
//             |
//             plane 0: row 0: columns 0 2 4 .. 62, then 1 3 5 .. 63, 8 channels of fp16 each; row 1; plane 1 ..
//             strict: the high parts of all planes, then the low parts; weights: [high, low][tap][lane]
// The pixels of one column in 8 windows are 8 rows of 16 bytes side by side: a matrix for ldmatrix, free of bank conflicts.
constexpr int COLUMN_BYTES = CHANNELS * 2, ODD_COLUMNS = COLUMNS / 2 * COLUMN_BYTES, ROW_BYTES = 2 * ODD_COLUMNS;
constexpr int PLANE_BYTES = 2 * ROW_BYTES, TAP_BYTES = WARP * 8, OPERAND_BYTES = TAPS * TAP_BYTES;

struct Shared {
    uint64_t full[STAGES], empty[STAGES];      // mbarriers
    float producer_largest[2][PRODUCER_WARPS]; // [at the start, at the end of an attempt]
    int exponents[2];                          // of the power of two that an attempt scaled x by; or REJECTED
    int weight_exponent;                       // of the weights' power of two
    float weight_largest[CONSUMER_WARPS];
    float sums[CONSUMER_WARPS][OUTPUTS];
    DEVICE int exponent_after(int bands_of_all, int bands) const { return exponents[bands_of_all > bands]; }
};

// ---- PTX
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
DEVICE void st_shared_v4(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint2 ld_shared_v2(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
// Four 8 x 8 matrices; a lane gives the address of a row of 16 bytes. With g = lane / 4 and t = lane % 4 it gets elements 2t
// and 2t + 1 of row g of each; transposed: of column g.
DEVICE void ldmatrix_x4(uint32_t row, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t row, uint32_t (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row) : "memory");
}
// d (16 x 8) += a (16 x 8) * b (8 x 8): a has elements 2t and 2t + 1 of rows g and g + 8, b those of column g; d has columns 2t
// and 2t + 1 of row g, then of row g + 8.
DEVICE void mma_m16n8k8(float (&d)[4], uint2 a, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a.x), "r"(a.y), "r"(b));
}
// The same for two products at once.
DEVICE void mma_m16n8k16(float (&d)[4], uint2 a, uint2 next_a, uint32_t b, uint32_t next_b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(next_a.x), "r"(next_a.y), "r"(b), "r"(next_b));
}
DEVICE float max_nan(float a, float b) {  // fmaxf ignores NaN
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// ---- fp16 values and powers of two
DEVICE uint32_t fp16_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// What rounding to fp16 leaves of x; nothing of an infinity.
DEVICE float fp16_rest(float x) { return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x)); }
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
DEVICE float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
// The largest of the values of WARPS whole warps, which all call it; `by_warp` has an element for each of them.
template <int WARPS>
DEVICE float largest_of_warps(float v, float* by_warp, int warp, int barrier) {
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    if (threadIdx.x % WARP == 0) by_warp[warp] = v;
    bar_sync(barrier, WARPS * WARP);
    for (int other = 0; other < WARPS; ++other) v = fmaxf(v, by_warp[other]);
    return v;
}
// The largest finite weight, for the first WARPS warps of the block.
template <int WARPS>
DEVICE float largest_weight(const float* __restrict__ weight, float* by_warp, int barrier) {
    float largest = 0;
    for (int i = threadIdx.x; i < WEIGHTS; i += WARPS * WARP) largest = fmaxf(largest, fabsf(finite_or_zero(weight[i])));
    return largest_of_warps<WARPS>(largest, by_warp, threadIdx.x / WARP, barrier);
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
    DEVICE void producer_acquire(unsigned n) const { mbarrier_wait(empty + n % STAGES * 8, (n + 1) / STAGES & 1 ^ 1); }
    DEVICE void producer_commit(unsigned n) const { mbarrier_arrive(full + n % STAGES * 8); }
    DEVICE void consumer_wait(unsigned n) const { mbarrier_wait(full + n % STAGES * 8, n / STAGES & 1); }
    DEVICE void consumer_release(unsigned n) const { mbarrier_arrive(empty + n % STAGES * 8); }
};

// ---- producers
// fp16 has TF32's 11 bits, but not its range: so a segment's values are scaled by a power of two. It is taken from the first
// values that the producers load, with room for values 31 times as large. If there are larger ones, the segment is attempted a
// second time, with the power that its largest value calls for.
constexpr int FIRST_TARGET = 11, LAST_TARGET = 15, REJECTED = 1000;
constexpr float LARGEST_FP16 = 65504;

// Four columns of a row, in all channels.
using Piece = float[CHANNELS * 4];
DEVICE float largest_finite(float largest, const Piece& v) {
    float all = largest;
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) all = fmaxf(all, fabsf(v[i]));
    if (all < INFINITY) return all;
    UNROLL for (int i = 0; i < CHANNELS * 4; ++i) largest = fmaxf(largest, fabsf(finite_or_zero(v[i])));
    return largest;
}
DEVICE void load_piece(const float* __restrict__ from, int64_t channel_floats, int exist, bool aligned, Piece& v) {
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
        st_shared_v4(first + odd * ODD_COLUMNS, turned ? b : a);
        st_shared_v4(second + odd * ODD_COLUMNS, turned ? a : b);
    }
}

template <bool STRICT>
DEVICE void produce(const Problem& problem, const Segment& segment, const Pipeline& pipeline, Shared& shared, int thread) {
    const int piece = thread % PIECES, first_line = thread / PIECES, lines = 2 * (2 * segment.slabs + 2);  // of a band
    const int64_t plane_floats = static_cast<int64_t>(problem.height) * problem.width;
    const int left = 2 * segment.first_column + 4 * piece, exist = problem.width - left;
    const bool aligned = problem.width % 4 == 0 && reinterpret_cast<uintptr_t>(problem.x) % 16 == 0;
    const float* const from = problem.x + left + 2 * segment.first_row * static_cast<int64_t>(problem.width) +
                              (segment.sample * IN_CHANNELS * problem.depth + 2 * segment.first_slab) * plane_floats;
    Piece v;
    const auto load = [&](int band, int line) {  // line: plane and row in a band
        load_piece(from + line / 2 * plane_floats + (2 * band + line % 2) * static_cast<int64_t>(problem.width),
                   problem.depth * plane_floats, exist, aligned, v);
    };
    const auto largest_of_all = [&](float mine, int when) {
        return largest_of_warps<PRODUCER_WARPS>(mine, shared.producer_largest[when], thread / WARP, 1);
    };
    load(0, first_line);
    int exponent = scale_exponent(largest_of_all(largest_finite(0, v), 0), FIRST_TARGET), band = 0;
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
                UNROLL for (int i = 0; i < CHANNELS * 4; ++i) v[i] = fp16_rest(v[i]);
                store_piece(to + pipeline.band_bytes / 2, piece, v);
            }
            // The next piece is under way while the pipeline is full.
            const bool in_band = line + LINES < lines;
            load(in_band ? band : next_band, in_band ? line + LINES : first_line);
        }
        if (++band == segment.bands()) {  // consumers read the exponent behind the last band's barrier
            largest = largest_of_all(largest, 1);
            const bool accepted = exact || largest * power_of_2(exponent) <= LARGEST_FP16;
            if (thread == 0) shared.exponents[exact] = accepted ? exponent : REJECTED;
            exponent = scale_exponent(largest, LAST_TARGET);
            if (!accepted) exact = true, band = 0;
        }
        pipeline.producer_commit(n);
    }
}

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
// apart. n counts the bands.
template <class Visit>
DEVICE void for_tiles(const Segment& segment, const Pipeline& pipeline, unsigned& n, Visit visit) {
    Tile tile = Tile::first(segment);
    pipeline.consumer_wait(n);
    UNROLL_1 for (; segment.row_of_band(n) < segment.rows; ++n) {
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
__device__ void store_weights(const float* __restrict__ weight, float scale, uint2* high, uint2* low) {
    for (int i = threadIdx.x; i < TAPS * WARP; i += CONSUMERS) {
        const int g = i % WARP / 4, t = i % 4, tap = i / WARP;
        const auto scaled = [&](int o, int c) {
            return o < OUT_CHANNELS && c < IN_CHANNELS ? scale * weight[(o * IN_CHANNELS + c) * TAPS + tap] : 0;
        };
        const float w[4] = {scaled(g, 2 * t), scaled(g, 2 * t + 1), scaled(g + 8, 2 * t), scaled(g + 8, 2 * t + 1)};
        high[i] = make_uint2(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]));
        if (low) low[i] = make_uint2(fp16_pair(fp16_rest(w[0]), fp16_rest(w[1])), fp16_pair(fp16_rest(w[2]), fp16_rest(w[3])));
    }
}

// A plane of 8 windows: [row][column 0, 2, 1, 3], channels 2t and 2t + 1 of window g. A product takes two neighbouring
// registers: taps 0 and 2 of a row need no moves, neither for a window's even positions nor for its odd ones.
using Plane = uint32_t[SIDE][SIDE];
DEVICE int column_of_matrix(int matrix) { return matrix % 2 * 2 + matrix / 2; }  // and the other way round
DEVICE void load_plane(uint32_t band, uint32_t next_band, Plane& x) {
    UNROLL for (int row = 0; row < SIDE; ++row) ldmatrix_x4((row < 2 ? band : next_band) + row % 2 * ROW_BYTES, x[row]);
}

// Nine taps of a plane of the kernel: the pairs 0 2, 3 5, 6 8 and 1 7, and the middle one. Positions of a window are numbered
// d, h, w in binary; hw is 0 to 3.
constexpr int PLANE_TAPS = 9, PAIRS = 4, MIDDLE = 4;
DEVICE constexpr int first_of_pair(int pair) { return pair < 3 ? 3 * pair : 1; }
DEVICE constexpr int second_of_pair(int pair) { return pair < 3 ? 3 * pair + 2 : 7; }
DEVICE uint32_t operand(const Plane& x, int hw, int tap) { return x[hw / 2 + tap / 3][column_of_matrix(hw % 2 + tap % 3)]; }

using Sums = float[8][4];  // [position][element: window 2t, 2t + 1 of output g, then of g + 8]

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
                mma_m16n8k16(sums[4 * d + hw], weights[MIDDLE], w[MIDDLE], middle[hw], operand(x, hw, MIDDLE));
            UNROLL for (int pair = 0; pair < PAIRS; ++pair)
                UNROLL for (int hw = 0; hw < 4; ++hw)
                    mma_m16n8k16(sums[4 * d + hw], w[first_of_pair(pair)], w[second_of_pair(pair)],
                                 operand(x, hw, first_of_pair(pair)), operand(x, hw, second_of_pair(pair)));
            UNROLL for (int hw = 0; hw < 4 && r == 2; ++hw)
                mma_m16n8k8(sums[4 * d + hw], w[MIDDLE], operand(x, hw, MIDDLE));
        }
        UNROLL for (int hw = 0; hw < 4; ++hw) middle[hw] = operand(x, hw, MIDDLE);
    }
}

// The same, error-compensated: low * high + high * low + high * high. The tensor core truncates its sums, so each plane's begin
// at zero and are added as fp32 numbers. The small ones are kept apart, and do not count where x is infinite: the low part of a
// weight may have the other sign.
DEVICE void convolve_strictly(uint32_t weights, uint32_t band, uint32_t next_band, int lower, Sums& sums) {
    Sums small;
    UNROLL for (int i = 0; i < 32; ++i) sums[i / 4][i % 4] = small[i / 4][i % 4] = 0;
    UNROLL_1 for (int p = 0; p < SIDE; ++p) {
        Plane high, low;
        load_plane(band + p * PLANE_BYTES, next_band + p * PLANE_BYTES, high);
        load_plane(band + lower + p * PLANE_BYTES, next_band + lower + p * PLANE_BYTES, low);
        UNROLL for (int d = 0; d < 2; ++d) {
            if (p < d || p > d + 2) continue;
            const uint32_t at = weights + (p - d) * PLANE_TAPS * TAP_BYTES;
            float part[4][4] = {};
            UNROLL for (int pair = 0; pair < PAIRS; ++pair) {
                const int tap = first_of_pair(pair), second = second_of_pair(pair);
                const uint2 w = ld_shared_v2(at + tap * TAP_BYTES), next_w = ld_shared_v2(at + second * TAP_BYTES);
                const uint2 low_w = ld_shared_v2(at + OPERAND_BYTES + tap * TAP_BYTES);
                const uint2 next_low_w = ld_shared_v2(at + OPERAND_BYTES + second * TAP_BYTES);
                UNROLL for (int hw = 0; hw < 4; ++hw)
                    mma_m16n8k16(small[4 * d + hw], low_w, next_low_w, operand(high, hw, tap), operand(high, hw, second));
                UNROLL for (int hw = 0; hw < 4; ++hw)
                    mma_m16n8k16(part[hw], w, next_w, operand(high, hw, tap), operand(high, hw, second));
                UNROLL for (int hw = 0; hw < 4; ++hw)
                    mma_m16n8k16(small[4 * d + hw], w, next_w, operand(low, hw, tap), operand(low, hw, second));
            }
            const uint2 w = ld_shared_v2(at + MIDDLE * TAP_BYTES);
            const uint2 low_w = ld_shared_v2(at + OPERAND_BYTES + MIDDLE * TAP_BYTES);
            UNROLL for (int hw = 0; hw < 4; ++hw) {
                mma_m16n8k16(small[4 * d + hw], low_w, w, operand(high, hw, MIDDLE), operand(low, hw, MIDDLE));
                mma_m16n8k8(part[hw], w, operand(high, hw, MIDDLE));
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

// `part_sums` (parts, batch, PITCH) where a sample has several, else null; `argmax` (batch, slabs, rows, columns, 4).
template <bool STRICT, bool INDICES>
__global__ void __launch_bounds__(THREADS, 1)
    conv_max_mean(const Problem problem, const Result result, float* __restrict__ part_sums, uint32_t* __restrict__ argmax) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared shared;
    __shared__ Segment segment;  // in no registers, which are short
    if (threadIdx.x == 0) segment.set(problem);
    const Pipeline pipeline(memory, shared, problem.band_bytes);
    if (threadIdx.x >= CONSUMERS) {
        produce<STRICT>(problem, segment, pipeline, shared, threadIdx.x - CONSUMERS);
        return;
    }
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / WARP;
    const int weight_exponent = scale_exponent(largest_weight<CONSUMER_WARPS>(problem.weight, shared.weight_largest, 2), 14);
    if (threadIdx.x == 0) shared.weight_exponent = weight_exponent;
    uint2* const operands = reinterpret_cast<uint2*>(memory + (STRICT ? STAGES : STAGES - 1) * pipeline.band_bytes);
    store_weights(problem.weight, copysignf(power_of_2(weight_exponent), result.divisor), operands,
                  STRICT ? operands + TAPS * WARP : nullptr);
    bar_sync(2, CONSUMERS);
    const uint32_t stored_weights = shared_address(operands) + lane * 8;
    uint2 weights[TAPS];
    if (!STRICT) UNROLL for (int tap = 0; tap < TAPS; ++tap) weights[tap] = ld_shared_v2(stored_weights + tap * TAP_BYTES);
    pipeline.consumer_release(STAGES - 1);

    float totals[2];  // of outputs g and g + 8
    unsigned n = 0;
    do {
        totals[0] = totals[1] = 0;
        for_tiles(segment, pipeline, n, [&](const Tile& tile, uint32_t band, uint32_t next_band) {
            const uint32_t offset = matrix_row(lane, tile, column_of_matrix(lane / 8));
            Sums sums;
            if constexpr (STRICT)
                convolve_strictly(stored_weights, band + offset, next_band + offset, pipeline.band_bytes / 2, sums);
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
    const auto sum_of = [&](int o) {
        float sum = 0;
        for (int other = 0; other < CONSUMER_WARPS; ++other) sum += shared.sums[other][o];
        return times_power_of_2(sum, -shared.exponent_after(n, segment.bands()) - shared.weight_exponent);
    };
    if (!part_sums) write_result(result, segment.sample, sum_of);
    else if (lane < OUTPUTS) part_sums[static_cast<int64_t>(blockIdx.x) * PITCH + lane] = sum_of(lane);
}

// ==================================================================================================== training
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
    if (threadIdx.x >= CONSUMERS) {
        produce<false>(problem, segment, pipeline, shared, threadIdx.x - CONSUMERS);
        return;
    }
    pipeline.consumer_release(STAGES - 1);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int warp = threadIdx.x / WARP;
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
                    uint32_t columns[SIDE];
                    ldmatrix_x4_trans((i < 2 ? band : next_band) + i % 2 * ROW_BYTES + offset + plane * PLANE_BYTES, columns);
                    UNROLL for (int dh = 0; dh < 4; ++dh) {
                        const int r = plane - dh / 2, s = i - dh % 2;
                        if (r < 0 || r > 2 || s < 0 || s > 2) continue;
                        UNROLL for (int k = 0; k < 3; ++k)
                            mma_m16n8k16(gradient[9 * r + 3 * s + k], hot[2 * dh], hot[2 * dh + 1], columns[k], columns[k + 1]);
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
                        make_uint2(fp16_pair(fp16_rest(w[0]), fp16_rest(w[1])), fp16_pair(fp16_rest(w[2]), fp16_rest(w[3])));
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
                            const uint2 w = STRICT ? ld_shared_v2(stored + tap * TAP_BYTES) : b[tap];
                            mma_m16n8k16(STRICT ? part[zy] : sums[zy], a, next_a, w.x, w.y);
                            if (!STRICT) continue;
                            const uint2 low = ld_shared_v2(stored + OPERAND_BYTES + tap * TAP_BYTES);
                            mma_m16n8k16(part[zy], a, next_a, low.x, low.y);
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

#endif  // FAST

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

// ==================================================================================================== all other shapes
// Right, but slow: plain loops in fp32, also for the strict gradient of the weights of the shapes above. Argmax indices are
// (batch, slabs, rows, columns, PITCH); those of the tensor-core kernels are bits in an order of their own.
DEVICE int64_t argmax_at(int64_t window, int o) { return window * PITCH + (FAST ? o % 4 * 4 + o / 4 : o); }
DEVICE int position_of(Argmax argmax) { return FAST ? __ffs(argmax) - 1 : argmax; }
DEVICE int64_t pixel(const Problem& p, int64_t sample, int c, int z, int y, int x) {
    return (((sample * IN_CHANNELS + c) * p.depth + z) * p.height + y) * p.width + x;
}

// A warp for an output of a sample; a lane has every 32nd window. argmax may be null.
__global__ void __launch_bounds__(WARP)
    plain_forward(const Problem p, float sign, float* __restrict__ sums, Argmax* __restrict__ argmax) {
    const int64_t sample = blockIdx.x / OUT_CHANNELS, windows = static_cast<int64_t>(p.slabs) * p.rows * p.columns;
    const int o = blockIdx.x % OUT_CHANNELS, lane = threadIdx.x;
    float sum = 0;
    for (int64_t window = lane; window < windows; window += WARP) {
        const int d = window / p.columns / p.rows * POOL_D, h = window / p.columns % p.rows * POOL_H;
        const int w = window % p.columns * POOL_W;
        float best = -INFINITY;
        int best_position = 0;
        for (int position = 0; position < POSITIONS; ++position) {
            const int z = d + position / (POOL_H * POOL_W), y = h + position / POOL_W % POOL_H, x = w + position % POOL_W;
            float value = 0;
            for (int64_t k = 0; k < IN_CHANNELS * TAPS; ++k) {
                const int c = k / TAPS, r = k % TAPS / (KERNEL_H * KERNEL_W), s = k / KERNEL_W % KERNEL_H, t = k % KERNEL_W;
                value += sign * p.weight[o * IN_CHANNELS * TAPS + k] * p.x[pixel(p, sample, c, z + r, y + s, x + t)];
            }
            if (value > best || value != value) best = value, best_position = position;
        }
        sum += best;
        if (argmax) argmax[argmax_at(sample * windows + window, o)] = FAST ? 1 << best_position : best_position;
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[sample * PITCH + o] = sum;
}

// gradients (splits, WEIGHTS): a warp for a group of taps, in each channel and output, and for every splits-th sample.
// Each tap of a group has a sum in registers.
constexpr int GROUP_H = KERNEL_H * KERNEL_W <= 32 ? KERNEL_H : 1, GROUP = GROUP_H * KERNEL_W;
__global__ void __launch_bounds__(WARP)
    plain_weight_gradient(const Problem p, const Argmax* __restrict__ argmax, const Upstream upstream,
                          float* __restrict__ gradients) {
    const int64_t splits = p.gradients, group = blockIdx.x / splits, lane = threadIdx.x;
    const int64_t windows = static_cast<int64_t>(p.slabs) * p.rows * p.columns, channel = group * GROUP / TAPS;
    const int s = group * GROUP / KERNEL_W % KERNEL_H, r = group * GROUP / KERNEL_W / KERNEL_H % KERNEL_D;
    const int c = channel % IN_CHANNELS, o = channel / IN_CHANNELS;
    float sums[GROUP] = {};
    for (int64_t sample = blockIdx.x % splits; sample < p.batch; sample += splits)
        for (int64_t window = lane; window < windows; window += WARP) {
            const int position = position_of(argmax[argmax_at(sample * windows + window, o)]);
            const int z = window / p.columns / p.rows * POOL_D + position / (POOL_H * POOL_W) + r;
            const int y = window / p.columns % p.rows * POOL_H + position / POOL_W % POOL_H + s;
            const float* const from = p.x + pixel(p, sample, c, z, y, window % p.columns * POOL_W + position % POOL_W);
            UNROLL for (int k = 0; k < GROUP; ++k)
                sums[k] += upstream.at(sample, o) * from[static_cast<int64_t>(k / KERNEL_W) * p.width + k % KERNEL_W];
        }
    UNROLL for (int k = 0; k < GROUP; ++k) {
        const float sum = warp_sum(sums[k]);
        if (lane == 0) gradients[blockIdx.x % splits * WEIGHTS + group * GROUP + k] = sum;
    }
}

// A thread for a pixel in a channel: it asks whether the positions that it reached were the maxima of their windows.
constexpr int PIXEL_THREADS = 256;
__global__ void __launch_bounds__(PIXEL_THREADS)
    plain_input_gradient(const Problem p, const Argmax* __restrict__ argmax, const Upstream upstream,
                         float* __restrict__ grad_x) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(PIXEL_THREADS) + threadIdx.x;
    const int64_t channel = i / p.width / p.height / p.depth, sample = channel / IN_CHANNELS;
    if (sample >= p.batch) return;
    const int x = i % p.width, y = i / p.width % p.height, z = i / p.width / p.height % p.depth;
    float sum = 0;
    for (int64_t tap = 0; tap < TAPS; ++tap) {
        const int d = z - tap / (KERNEL_H * KERNEL_W), h = y - tap / KERNEL_W % KERNEL_H, w = x - tap % KERNEL_W;
        if (d < 0 || d / POOL_D >= p.slabs || h < 0 || h / POOL_H >= p.rows || w < 0 || w / POOL_W >= p.columns) continue;
        const int64_t window = ((sample * p.slabs + d / POOL_D) * p.rows + h / POOL_H) * p.columns + w / POOL_W;
        const int position = (d % POOL_D * POOL_H + h % POOL_H) * POOL_W + w % POOL_W;
        for (int o = 0; o < OUT_CHANNELS; ++o)
            if (position_of(argmax[argmax_at(window, o)]) == position)
                sum += upstream.at(sample, o) * p.weight[(o * IN_CHANNELS + channel % IN_CHANNELS) * TAPS + tap];
    }
    grad_x[i] = upstream.scale * sum;
}

// ==================================================================================================== launchers
static int attribute(cudaDeviceAttr name) {
    int device, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, name, device);
    return value;
}

void plan(Problem& p) {
    const int64_t splits = (8000 + WEIGHTS / GROUP - 1) / (WEIGHTS / GROUP);  // for 8000 plain warps
    p.parts = 1, p.sums = p.batch, p.gradients = splits < p.batch ? splits : p.batch;
#if FAST
    int limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
#ifdef SHARED_LIMIT_KB
    limit = smaller(limit, (SHARED_LIMIT_KB) * 1024);
#endif
    do {  // as many slabs a segment as shared memory takes, in equal parts
        p.part_slabs = ceil_div(p.slabs, p.parts), p.slab_parts = ceil_div(p.slabs, p.part_slabs);
        p.band_bytes = (p.strict ? 2 : 1) * (2 * p.part_slabs + 2) * PLANE_BYTES;
        p.dynamic_bytes = STAGES * p.band_bytes + (p.strict ? 2 * OPERAND_BYTES : 0);
    } while (p.dynamic_bytes + static_cast<int>(sizeof(Shared)) > limit && p.parts++ < p.slabs);
    p.part_columns = p.columns <= WHOLE_WINDOWS ? p.columns : PART_WINDOWS;
    p.column_parts = ceil_div(p.columns, p.part_columns);
    const int64_t images = p.batch * p.slab_parts * p.column_parts, sm_count = attribute(cudaDevAttrMultiProcessorCount);
    const int64_t most_parts = 6 + 2 * sm_count / images;
    int64_t least = INT64_MAX;
    for (int parts = 1; parts <= most_parts && parts <= p.rows; ++parts) {
        const int rows = ceil_div(p.rows, parts), row_parts = ceil_div(p.rows, rows);
        const int64_t waves = (images * row_parts + sm_count - 1) / sm_count;
        if (waves * (rows + 2) >= least) continue;  // what a block does before its first row takes as long as two rows
        least = waves * (rows + 2), p.part_rows = rows, p.row_parts = row_parts;
    }
    p.parts = p.slab_parts * p.column_parts * p.row_parts, p.sums = p.parts > 1 ? p.batch * p.parts : 0;
    if (!p.strict) p.gradients = p.batch * p.parts;
#endif
}

cudaError_t launch_forward(const Problem& problem, const Result& result, float* sums, Argmax* argmax) {
#if FAST
    const auto kernel = problem.strict ? (argmax ? conv_max_mean<true, true> : conv_max_mean<true, false>)
                                       : (argmax ? conv_max_mean<false, true> : conv_max_mean<false, false>);
    const int bytes = problem.dynamic_bytes;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<problem.batch * problem.parts, THREADS, bytes, problem.stream>>>(problem, result, sums,
                                                                              reinterpret_cast<uint32_t*>(argmax));
#else
    plain_forward<<<problem.batch * OUT_CHANNELS, WARP, 0, problem.stream>>>(
        problem, copysignf(1, result.divisor), sums, argmax);
#endif
    if (sums) finish_samples<<<problem.batch, WARP, 0, problem.stream>>>(sums, problem.parts, result);
    return cudaSuccess;
}

cudaError_t launch_weight_gradient(const Problem& problem, const Upstream& upstream, const Argmax* argmax, float* gradients,
                                   float* grad_weight) {
#if FAST
    if (!problem.strict) {
        const int bytes = problem.dynamic_bytes;
        const cudaError_t error = cudaFuncSetAttribute(weight_gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
        weight_gradient<<<problem.gradients, THREADS, bytes, problem.stream>>>(
            problem, reinterpret_cast<const uint32_t*>(argmax), upstream, gradients);
    }
#endif
    if (problem.strict || !FAST)
        plain_weight_gradient<<<WEIGHTS / GROUP * problem.gradients, WARP, 0, problem.stream>>>(
            problem, argmax, upstream, gradients);
    add_gradients<<<(WEIGHTS + SUM_COLUMNS - 1) / SUM_COLUMNS, SUM_COLUMNS * SUM_ROWS, 0, problem.stream>>>(
        gradients, problem.gradients, upstream.scale, grad_weight);
    return cudaSuccess;
}

cudaError_t launch_input_gradient(const Problem& problem, const Upstream& upstream, const Argmax* argmax, float* grad_x) {
#if FAST
    const int64_t lines = problem.batch * ceil_div(problem.depth, 2);
    const int sm_count = attribute(cudaDevAttrMultiProcessorCount);
    const bool paired = problem.width % 2 == 0 && reinterpret_cast<uintptr_t>(grad_x) % 8 == 0;
    const auto kernel = problem.strict ? (paired ? input_gradient<true, true, 8> : input_gradient<true, false, 8>)
                                       : (paired ? input_gradient<false, true, 12> : input_gradient<false, false, 12>);
    kernel<<<lines < sm_count ? lines : sm_count, (problem.strict ? 8 : 12) * WARP, 0, problem.stream>>>(
        problem, reinterpret_cast<const uint32_t*>(argmax), upstream, grad_x);
#else
    const int64_t pixels = problem.batch * IN_CHANNELS * problem.depth * problem.height * problem.width;
    plain_input_gradient<<<(pixels + PIXEL_THREADS - 1) / PIXEL_THREADS, PIXEL_THREADS, 0, problem.stream>>>(
        problem, argmax, upstream, grad_x);
#endif
    return cudaSuccess;
}
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
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
#define CHECK(condition, ...) TORCH_CHECK(condition, message("conv3d_div_max_gap_bias_sum: ", __VA_ARGS__))
template <class... Parts>
static std::string message(const Parts&... parts) { return (text(parts) + ...); }

// PyTorch's setting for convolutions, read at each call, as PyTorch's do; one for all operations before PyTorch 2.9.
static bool is_strict() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
    return !at::globalContext().allowTF32CuDNN();
#elif TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 9
    return !at::globalContext().allowTF32CuDNN("conv");
#else
    return !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
#endif
}

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    CHECK(fits, "expected ", name, " as a float32 CUDA tensor of shape ", shape, " (-1: any), got ", tensor.scalar_type(),
          " of shape ", tensor.sizes(), " on ", tensor.device());
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    CHECK(tensor.device() == expected.device(), "expected all on ", expected.device(), ", got ", name, " on ", tensor.device());
}

// The input and weight of a pass, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    c10::cuda::CUDAGuard guard;
    at::Tensor x, weight;
    Problem problem;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, at::IntArrayRef pool, bool strict)
        : guard(checked(x_in, weight_in, pool)), x(x_in.contiguous()), weight(weight_in.contiguous()) {
        const int depth = x.size(2), height = x.size(3), width = x.size(4);
        problem = {x.const_data_ptr<float>(), weight.const_data_ptr<float>(), x.size(0), depth, height, width,
                   (depth - KERNEL_D + 1) / POOL_D, (height - KERNEL_H + 1) / POOL_H, (width - KERNEL_W + 1) / POOL_W, strict,
                   c10::cuda::getCurrentCUDAStream()};
        if (problem.batch > 0) plan(problem);
        const int64_t blocks = std::max(problem.batch * OUT_CHANNELS, problem.sums);
        CHECK(blocks < (1ll << 31), "the batch needs ", blocks, " blocks, more than a grid has");
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef pool) {
        check("x", x, {-1, IN_CHANNELS, -1, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W});
        check_device(x, "weight", weight);
        CHECK(pool == at::IntArrayRef({POOL_D, POOL_H, POOL_W}), "built for a pooling window of ", POOL_D, " x ", POOL_H, " x ",
              POOL_W, ", called with ", pool);
        CHECK(x.size(2) >= KERNEL_D + POOL_D - 1 && x.size(3) >= KERNEL_H + POOL_H - 1 && x.size(4) >= KERNEL_W + POOL_W - 1,
              "a volume of ", x.size(2), " x ", x.size(3), " x ", x.size(4), " is too small for a kernel of ", KERNEL_D, " x ",
              KERNEL_H, " x ", KERNEL_W, " and a pooling window of ", POOL_D, " x ", POOL_H, " x ", POOL_W);
        CHECK(x.size(2) * x.size(3) * x.size(4) < 1ll << 31, "expected less than 2^31 pixels a channel, got sizes ", x.sizes());
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }
    int64_t windows() const { return int64_t(problem.slabs) * problem.rows * problem.columns; }

    static constexpr at::ScalarType ARGMAX = sizeof(Argmax) == 1 ? at::kByte : at::kInt;
    std::array<int64_t, 5> argmax_shape() const { return {problem.batch, problem.slabs, problem.rows, problem.columns, PITCH}; }
    at::Tensor checked_argmax(const at::Tensor& argmax) const {
        CHECK(argmax.scalar_type() == ARGMAX && argmax.sizes() == argmax_shape(), "expected the argmax indices of x, ", ARGMAX,
              " of shape ", argmax_shape(), ", got ", argmax.scalar_type(), " of shape ", argmax.sizes());
        check_device(x, "argmax", argmax);
        return argmax.contiguous();
    }
    at::Tensor checked_grad(const at::Tensor& grad) const {
        const int64_t batch = problem.batch, all = batch * OUT_CHANNELS;
        CHECK(grad.scalar_type() == at::kFloat && (grad.numel() == batch || grad.numel() == all), "expected ", batch, " or ",
              all, " float32 gradients, got ", grad.scalar_type(), " ", grad.sizes());
        check_device(x, "grad", grad);
        return grad.contiguous();
    }
    Upstream upstream(const at::Tensor& grad, double divisor) const {
        return {grad.const_data_ptr<float>(), grad.numel() == problem.batch, static_cast<float>(1 / (windows() * divisor))};
    }
};

// The sum of each sample (batch, 1, 1, 1), or, without a bias, the average of each channel (batch, OUT_CHANNELS, 1, 1, 1).
static at::Tensor run_forward(const Call& call, const at::Tensor& conv_bias_in, const std::optional<at::Tensor>& bias_in,
                              double divisor, Argmax* argmax) {
    const int64_t batch = call.problem.batch;
    check("conv_bias", conv_bias_in, {OUT_CHANNELS});
    check_device(call.x, "conv_bias", conv_bias_in);
    const at::Tensor conv_bias = conv_bias_in.contiguous();
    at::Tensor bias, out = bias_in ? call.empty({batch, 1, 1, 1}) : call.empty({batch, OUT_CHANNELS, 1, 1, 1});
    if (bias_in) {
        CHECK(bias_in->scalar_type() == at::kFloat && (bias_in->numel() == 1 || bias_in->numel() == OUT_CHANNELS),
              "expected a float32 bias of 1 or ", OUT_CHANNELS, " values, got ", bias_in->scalar_type(), " ", bias_in->sizes());
        check_device(call.x, "bias", *bias_in);
        bias = bias_in->contiguous();
    }
    if (batch == 0) return out;
    at::Tensor sums = call.empty({call.problem.sums, PITCH});
    const Result result = {conv_bias.const_data_ptr<float>(), bias_in ? bias.const_data_ptr<float>() : nullptr,
                           bias_in ? static_cast<int>(bias.numel()) : 0, static_cast<float>(divisor),
                           static_cast<float>(call.windows()), out.mutable_data_ptr<float>()};
    C10_CUDA_CHECK(launch_forward(call.problem, result, call.problem.sums ? sums.mutable_data_ptr<float>() : nullptr, argmax));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

// Nothing of it depends on what a compiled model was told of the precision: PyTorch's setting at the call decides.
at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias,
                   const std::optional<at::Tensor>& bias, double divisor, at::IntArrayRef pool) {
    return run_forward(Call(x, weight, pool, is_strict()), conv_bias, bias, divisor, nullptr);
}

// Also the argmax indices. A compiled model's backward pass has the precision that it was compiled for.
std::tuple<at::Tensor, at::Tensor> forward_for_training(const at::Tensor& x, const at::Tensor& weight,
                                                        const at::Tensor& conv_bias, const std::optional<at::Tensor>& bias,
                                                        double divisor, at::IntArrayRef pool, bool strict) {
    CHECK(strict == is_strict(), "called or compiled for ", strict ? "strict float32" : "TF32",
          " convolutions, but torch.backends.cudnn.conv.fp32_precision now ", strict ? "permits TF32" : "forbids it",
          "; after torch.compiler.reset() a model is compiled again");
    const Call call(x, weight, pool, strict);
    at::Tensor argmax = at::empty(call.argmax_shape(), call.x.options().dtype(Call::ARGMAX));
    at::Tensor out = run_forward(call, conv_bias, bias, divisor, static_cast<Argmax*>(argmax.mutable_data_ptr()));
    return {out, argmax};
}

at::Tensor weight_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& argmax_in,
                       double divisor, at::IntArrayRef pool, bool strict) {
    const Call call(x, weight, pool, strict);
    const at::Tensor grad = call.checked_grad(grad_in), argmax = call.checked_argmax(argmax_in);
    at::Tensor grad_weight = call.empty(weight.sizes()), gradients = call.empty({call.problem.gradients, WEIGHTS});
    if (call.problem.batch == 0) return grad_weight.zero_();
    const auto indices = static_cast<const Argmax*>(argmax.const_data_ptr());
    C10_CUDA_CHECK(launch_weight_gradient(call.problem, call.upstream(grad, divisor), indices,
                                          gradients.mutable_data_ptr<float>(), grad_weight.mutable_data_ptr<float>()));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_weight;
}

at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& argmax_in,
                      double divisor, at::IntArrayRef pool, bool strict) {
    const Call call(x, weight, pool, strict);
    const at::Tensor grad = call.checked_grad(grad_in), argmax = call.checked_argmax(argmax_in);
    at::Tensor grad_x = call.empty(x.sizes());
    if (call.problem.batch == 0) return grad_x;
    const auto indices = static_cast<const Argmax*>(argmax.const_data_ptr());
    const Upstream upstream = call.upstream(grad, divisor);
    C10_CUDA_CHECK(launch_input_gradient(call.problem, upstream, indices, grad_x.mutable_data_ptr<float>()));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_x;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("forward_for_training(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool, "
          "bool strict) -> (Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor argmax, float divisor, int[3] pool, bool strict) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad, Tensor x, Tensor weight, Tensor argmax, float divisor, int[3] pool, bool strict) -> Tensor",
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
    def forward_for_training(x, weight, conv_bias, bias, divisor, pool, strict):
        (batch, _, *size), (outs, _, *kernel) = x.shape, weight.shape
        windows = [(s - k + 1) // p for s, k, p in zip(size, kernel, pool, strict=True)]
        kind = torch.uint8 if pool[0] * pool[1] * pool[2] <= 256 else torch.int32
        argmax = x.new_empty(batch, *windows, max(16, outs), dtype=kind)
        return forward(x, weight, conv_bias, bias, divisor, pool), argmax

    for name, like in ("input_grad", 1), ("weight_grad", 2):  # which argument the gradient looks like
        fake = lambda *arguments, like=like: arguments[like].new_empty(arguments[like].shape)  # noqa: E731
        torch.library.register_fake(f"{namespace}::{name}", fake)

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
        out, argmax = operators.forward_for_training(x, weight, conv_bias, bias, divisor, pool, strict)
        ctx.save_for_backward(x, weight, argmax)
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.namespace, ctx.settings = namespace, (divisor, pool, strict)
        return out

    @staticmethod
    def backward(ctx, grad):
        operators, saved = getattr(torch.ops, ctx.namespace), ctx.saved_tensors
        needs_x, needs_weight, needs_conv_bias, needs_bias = ctx.needs_input_grad[:4]
        grad_x = operators.input_grad(grad, *saved, *ctx.settings) if needs_x else None
        grad_weight = operators.weight_grad(grad, *saved, *ctx.settings) if needs_weight else None
        grad_conv_bias = grad_bias = None
        if needs_conv_bias or needs_bias:
            by_channel = grad.sum(0).reshape(-1).expand(saved[1].shape[0])  # of the averages
            grad_conv_bias = by_channel / ctx.settings[0] if needs_conv_bias else None
            grad_bias = by_channel.view(-1, ctx.bias_shape.numel()).sum(0).view(ctx.bias_shape) if needs_bias else None
        return grad_x, grad_weight, grad_conv_bias, grad_bias, None, None, None, None


BUILDING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once


@functools.lru_cache(maxsize=None)
def build(name, binding, cuda, register, cflags=(), cuda_cflags=(), **constants):
    """Compile and load the sources, once a machine, and return the namespace of their operators in torch.ops.

    The namespace is `name` and a hash of all that the binary depends on: an edit gives a new library and new operators
    beside the old ones, so an edited notebook cell can simply be run again. `cuda` is None where there is none;
    `constants` become #defines on top of both sources. Raises what torch.utils.cpp_extension.load_inline raises when the
    compiler is missing or refuses the text, and RuntimeError before PyTorch 2.4.
    """
    from torch.utils import cpp_extension

    if torch.__version__ < "2.4":
        raise RuntimeError(f"{name}: needs PyTorch 2.4 or later, this is {torch.__version__}")

    def fingerprint(code):  # of a function: all but the place where it was written
        return code.co_code, code.co_names, [fingerprint(c) if hasattr(c, "co_code") else c for c in code.co_consts]

    defines = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items()))
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability()
    versions = torch.__version__, torch.version.cuda, sys.version_info
    everything = binding, cuda, defines, fingerprint(register.__code__), cflags, cuda_cflags, machine, versions
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"

    # Before PyTorch 2.8 all of its headers come along, which is slower; before 2.11 TORCH_LIBRARY does not expand a macro.
    narrow = {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}
    binding = binding if torch.__version__ >= "2.11" else binding.replace("TORCH_EXTENSION_NAME", namespace)

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
                    **narrow,
                )
            except BaseException:  # an interrupted or failed build would count as done when the same text is run again
                cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(namespace, None)
                raise
            register(namespace)
            operators.registered = True
    return namespace


class ModelNew(nn.Module):
    differentiable = Training
    # Bound here, so that another variant in the same notebook cannot replace them.
    sources = NAME, INTERFACE + BINDING, INTERFACE + CUDA, register
    shared_limit_kb = SHARED_LIMIT_KB

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
        limit = {"SHARED_LIMIT_KB": self.shared_limit_kb} if self.shared_limit_kb else {}
        return build(*self.sources, **channels, **kernel, **pool, **limit)

    @staticmethod
    @torch.compiler.assume_constant_result  # a compiled model keeps it; the operators say when it is no longer so
    def is_strict():
        """Whether PyTorch forbids TF32 to convolutions now."""
        if not hasattr(torch.backends.cudnn, "conv"):  # before PyTorch 2.9
            return not torch.backends.cudnn.allow_tf32
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
    from torch.utils import benchmark, cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew(8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1).to("cpu" if emulated else "cuda")
    x = torch.randn(4, 8, 6, 12, 20) if emulated else torch.randn(128, 8, 16, 64, 64, device="cuda")

    def plain(x):
        pooled = nn.functional.max_pool3d(model.conv(x) / model.divisor, model.pool_size)
        return (pooled.mean(dim=(2, 3, 4), keepdim=True) + model.bias).sum(dim=1)

    def milliseconds(function):  # of 20 calls in a row, on average
        return 1e3 * benchmark.Timer("function(x)", globals={"function": function, "x": x}).timeit(20).mean

    with torch.no_grad():
        model.double()
        exact = torch.cat([plain(part.double()) for part in x.split(16)])
        model.float()
        error, limit = ((model(x) - exact).abs().max() / exact.std()).item(), 2e-2  # TF32 is off by up to 9e-3
        verdict = "right" if error <= limit else "wrong"
        print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict};", end=" ")
        if emulated:
            print(f"under the emulator, which tells no times, on an input of {tuple(x.shape)}")
        elif verdict == "wrong":
            print("not timed")
        else:
            print(f"{milliseconds(model):.3f} ms, PyTorch {milliseconds(plain):.3f} ms")


if __name__ == "__main__":
    main()
