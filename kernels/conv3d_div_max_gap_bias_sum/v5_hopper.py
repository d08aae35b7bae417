"""conv3d_div_max_gap_bias_sum, v5: TMA brings x, each value becomes fp16 once, and consumer warps read it by ldmatrix.

Why it is faster
    v3 is bound by fp32 multiply-adds; mma.sync multiplies fp16 at 12 times their rate on an H200. fp16 has TF32's 11 bits, and
    a power of two for each block's part of a sample gives it the range. It is a persistent, warp-specialized kernel: TMA fills
    stages of fp32, four producer warps scale and pack each value once, a column's 8 channels side by side, and eight consumer
    warps multiply two taps at a time: 32 matrices loaded by ldmatrix feed 112 products. Compared with v4, TMA keeps 64 KiB of x
    under way, planes of x stay in registers from slab to slab, and all SMs have equal parts of the rows.

Mathematics
    out[b] = sum over o of ((mean over N windows of max of y[b,o]) + conv_bias[o]) / d + bias[o], y: convolved without a bias
    A segment, a block's part of a sample, is scaled by a power of two that brings its first stage to between 2^10 and 2^11; if
    a later value is too large for fp16 then, the segment is attempted again, with the power that brings the largest to between
    2^14 and 2^15. So x is off by at most 2^-11 of itself, as in TF32, or by 2^-35 of the segment's largest value, whichever is
    more; weights by 2^-38 of their largest. Scaled products add up to less than 2^38. NaN and infinities count in no scale; a
    NaN in x makes gradients of weights NaN, though not always those that are NaN in PyTorch.
    Strict (where PyTorch forbids TF32 to convolutions, read in each call), error-compensated: x and weights are two fp16 values
    each, high + low, and a product is low * high + high * low + high * high. The tensor core truncates its sums; so each
    plane's begin at zero, and are added as fp32 numbers. All positions of a window add in the same order, so equal inputs give
    equal bits, and ties go to the first as in PyTorch. With hot[o,k] = 1 where position k is its window's maximum in output o:
    grad_w[o,c,t] = 1/(N*d) * sum over b of grad[b,o] * (sum over k of hot[b,o,k] * x[b,c,k + t])
    grad_x[b,c,p] = 1/(N*d) * sum over o,t of hot[b,o,p - t] * (grad[b,o] * w[o,c,t])

Launches
    kernel                  grid                     block  shared  work of a warp
    stream_max_mean         SMs, or samples          384    207 KiB 8 windows x 16 outputs at a time, or 1024 values
    stream_weight_gradient  SMs, or samples          384    207 KiB 8 windows x 16 outputs x 216 weights, or 1024 values
    input_gradient          SMs                      384    7 KiB   2 x 2 x 16 pixels x 8 channels at a time
    finish_samples          samples                  32     0       adds a sample's segments, where blocks share samples
    add_segments            samples x weights / 128  128    0       the same for gradients
    weighted_sum            weights / 32             256    1 KiB   the batch's gradient of 32 weights

Floor
    Forward, x (128, 8, 16, 64, 64), 16 outputs: 269 MB in, 0.062 ms on an H200 (4.34 TB/s measured); 47.6 GFLOP
    at the 622 TFLOP/s of mma.sync, 0.077. Each gradient is as large a product again; the input's also writes 269 MB.

Takes
    float32 CUDA tensors (batch, in_channels, depth, height, width), batch 0 included, a channel below 2^31 pixels, on compute
    capability 9.0; any channels, kernel, bias shape and sum_dim that the original takes; pool_size an int or three; a divisor
    whose size is a normal float32. Fast: up to 8 channels in and 16 out, a kernel of 3 x 3 x 3, windows of 2 x 2 x 2; x whose
    rows are no multiple of 16 bytes is copied first (v4 needs no copy). Plain kernels do other shapes and strict gradients:
    right, but slow; v3 serves such shapes better, v4 the strict gradient of x; the ladder has figures. Anything else raises
    before a launch. Trains, and computes only the gradients that are asked for; second and forward-mode derivatives raise.
    What torch.compile compiled for training raises once the precision is another. Deterministic on a GPU; another number of
    SMs adds in another order.
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

INTERFACE = r"""
// Both sources begin with this. Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W.
#include <cuda_runtime.h>
#include <cstdint>
#include <type_traits>

// What the tensor-core kernels take; all else goes through the plain kernels. Python asks the operator is_fast.
#define FAST                                                                                                               \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 16 && KERNEL_D == 3 && KERNEL_H == 3 && KERNEL_W == 3 && POOL_D == 2 &&           \
     POOL_H == 2 && POOL_W == 2)

constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W, POSITIONS = POOL_D * POOL_H * POOL_W;
constexpr int WEIGHTS = OUT_CHANNELS * IN_CHANNELS * TAPS;
constexpr int PITCH = OUT_CHANNELS < 16 ? 16 : OUT_CHANNELS;  // of a window's argmax indices, and of a segment's sums
using Argmax = std::conditional_t<POSITIONS <= 256, uint8_t, int32_t>;

// A slab is a layer of windows along depth. Where a sample's slabs are too many for shared memory, or its columns for a band,
// the sample is cut into images. All rows of windows of all images stand in one line, and each block of the persistent kernels
// takes an equal part of it. A segment is the part of one image in one block.
struct Shape {
    int64_t batch;
    int depth, height, width, slabs, rows, columns;  // of x, and of its windows; a channel has less than 2^31 pixels
    int slab_parts, image_slabs, column_parts, image_columns, blocks;

    __host__ __device__ int64_t images() const { return batch * slab_parts * column_parts; }
    __host__ __device__ int64_t first_row(int64_t block) const { return images() * rows * block / blocks; }
    __host__ __device__ int image_planes() const { return 2 * image_slabs + 2; }
    // Whether each image is one segment; its slot among all segments is then its own number.
    __host__ __device__ bool whole_images() const { return images() % blocks == 0; }
    __host__ __device__ unsigned windows() const { return static_cast<unsigned>(slabs) * rows * columns; }
};

struct Problem {
    Shape shape;
    const float *x, *weight;  // x: for TMA, in rows of a multiple of 16 bytes
    double divisor;
    bool strict;
    cudaStream_t stream;
    int64_t segments, largest_grid;  // rows of PITCH sums that the forward pass needs, or 0; blocks that a launch may take

    float gradient_scale() const { return static_cast<float>(1 / (static_cast<double>(shape.windows()) * divisor)); }
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
    __host__ __device__ float at(int64_t sample, int o) const { return grad[by_sample ? sample : sample * OUT_CHANNELS + o]; }
};

void plan(Problem&);  // sets how the work is cut, for a batch that is not empty
// argmax may be null. gradients (batch, WEIGHTS) may be null, too; segment_gradients (segments, WEIGHTS) come with them, and
// both kinds of segment_* are null where a sample is a segment.
cudaError_t launch_forward(const Problem&, const Result&, float* segment_sums, Argmax* argmax, float* segment_gradients,
                           float* gradients);
void launch_gradients_from_argmax(const Problem&, const Argmax*, float* gradients);
void launch_weighted_sum(const Problem&, const Upstream&, const float* gradients, float* grad_weight);
void launch_input_gradient(const Problem&, const Upstream&, const Argmax*, float* grad_x);
"""

CUDA = r"""
#include <cuda.h>
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
// The average of output o, from the sum of its maxima.
DEVICE float average_of(const Result& result, float sum, int o) {
    return (sum / result.windows + copysignf(1, result.divisor) * result.conv_bias[o]) / fabsf(result.divisor);
}

#if FAST

// ---- geometry
// A window of 2 x 2 x 2 positions reads 4 x 4 x 4 pixels. A tile is 8 windows side by side in 16 outputs. A band is two rows of
// x, in all planes and channels of an image: a row of windows reads two bands.
constexpr int CHANNELS = 8, OUTPUTS = 16, TILE_WINDOWS = 8;  // of the tensor core's operands; what does not exist is zero
constexpr int SIDE = 4, COLUMNS = 64, PIECES = COLUMNS / 4;  // of x: a window's pixels in each direction, a row's columns
constexpr int WHOLE_WINDOWS = (COLUMNS - 2) / 2;             // that fit into COLUMNS
constexpr int PART_WINDOWS = WHOLE_WINDOWS / 2 * 2;          // parts of longer rows begin 16-byte aligned

// ---- who works: a warp-specialized, persistent kernel, one block an SM
// TMA loads x into stages. Producer warps scale a stage and store it as fp16 into a band; consumer warps multiply.
constexpr int CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
// Registers: setmaxnreg gives 256 consumer threads 200 and 128 producer threads 104 (strict with argmax indices: 208 and 88),
// 64,512 of the SM's 65,536.
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;
constexpr int STAGES = 2, STAGE_PLANES = 8;  // at most; the stages of a band are equally large
constexpr int BANDS = 4;                     // so that consumer warps may be a row apart
constexpr int ATTEMPTS = BANDS / 2 + 1;      // that may be under way: each has two bands at least

// ---- shared memory of a block, for the original's size
//   0         32        64       96       128      160      192       205.5  206.5       207 KiB
//   | stage 0 | stage 1 | band 0 | band 1 | band 2 | band 3 | weights | sums | Scales, mbarriers |
//     |                   |                                   [high, low][tap][lane]; or a gradient's sums
//     |                   fp16: plane 0: row 0: columns 0 2 4 .. 62, then 1 3 5 .. 63, 8 channels each; row 1; plane 1 ..
//     fp32, as TMA writes it: [channel][plane][row][column], in half of the planes
// The pixels of one column in 8 windows are 8 rows of 16 bytes side by side: a matrix for ldmatrix, free of bank conflicts.
// Strict: a band has the high parts of all planes, then the low parts, and a sample is two images, of 4 and 3 slabs: 215 KiB.
constexpr int ROW_BYTES = COLUMNS * 4;                                                // of a stage
constexpr int COLUMN_BYTES = CHANNELS * 2, ODD_COLUMNS = COLUMNS / 2 * COLUMN_BYTES;  // of a band, and so are the next two
constexpr int BAND_ROW_BYTES = 2 * ODD_COLUMNS, PLANE_BYTES = 2 * BAND_ROW_BYTES;
constexpr int TAP_BYTES = WARP * 8, OPERAND_BYTES = TAPS * TAP_BYTES;  // of the weights

struct Scales {
    float producer_largest[2][PRODUCER_WARPS];  // [at the start, at the end of an attempt]
    int exponents[ATTEMPTS];                    // of the powers of two that the last attempts scaled x by; or REJECTED
    float weight_largest[CONSUMER_WARPS];
};

struct Layout {
    int stage_planes, stage_bytes, band_bytes, bands, operands, sums, scales, barriers, bytes;

    __host__ DEVICE Layout(const Shape& shape, bool strict) {
        const int planes = shape.image_planes(), stages_of_band = ceil_div(planes, STAGE_PLANES);
        stage_planes = ceil_div(planes, stages_of_band), stage_bytes = CHANNELS * stage_planes * 2 * ROW_BYTES;
        band_bytes = (strict ? 2 : 1) * planes * PLANE_BYTES;
        bands = STAGES * stage_bytes, operands = bands + BANDS * band_bytes;
        sums = operands + 2 * OPERAND_BYTES;  // [turn][warp][output]
        scales = sums + 2 * CONSUMER_WARPS * OUTPUTS * 4, barriers = scales + ceil_div(sizeof(Scales), 8) * 8;
        bytes = barriers + (2 * BANDS + STAGES) * 8;
    }
};

// ---- PTX
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void tma_load_5d(uint32_t to, const CUtensorMap& map, int column, int row, int plane, int channel, int sample,
                        uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(channel), "r"(sample), "r"(barrier) : "memory");
}
// Named barriers: 1 is the producers', 2 the consumers', and in input_gradient that of all threads.
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
template <int REGISTERS>
DEVICE void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
DEVICE float4 ld_shared_v4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}
DEVICE uint2 ld_shared_v2(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}
DEVICE void st_shared_v4(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
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
DEVICE float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// value * 2^exponent for an exponent of -252 to 254, which may be beyond a float's when two scales are undone at once.
struct PowerOf2 {
    float half, other_half;
    DEVICE explicit PowerOf2(int exponent)
        : half(power_of_2(exponent / 2)), other_half(power_of_2(exponent - exponent / 2)) {}
    DEVICE float times(float value) const { return value * half * other_half; }
};
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}
// The largest finite magnitude.
template <int N>
DEVICE float largest_finite(const float (&v)[N]) {
    float largest = 0;
    UNROLL for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(v[i]));
    if (largest == INFINITY) {
        largest = 0;
        UNROLL for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(v[i]) == INFINITY ? 0 : fabsf(v[i]));
    }
    return largest;
}
DEVICE float warp_largest(float v) {
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}
// The largest of the weights, for the first COUNT threads of the block; `by_warp` has an element for each of their warps.
template <int COUNT>
__device__ float largest_weight(const float* __restrict__ weight, float* by_warp) {
    float mine[ceil_div(WEIGHTS, COUNT)];
    UNROLL for (int k = 0; k < ceil_div(WEIGHTS, COUNT); ++k) {
        const int i = threadIdx.x + k * COUNT;
        mine[k] = i < WEIGHTS ? weight[i] : 0;
    }
    float largest = warp_largest(largest_finite(mine));
    if (threadIdx.x % WARP == 0) by_warp[threadIdx.x / WARP] = largest;
    bar_sync(2, COUNT);
    for (int warp = 0; warp < COUNT / WARP; ++warp) largest = fmaxf(largest, by_warp[warp]);
    return largest;
}

// ==================================================================================================== forward
// ---- the work, and the way of a band
struct Segment {
    int64_t sample, slot;                                           // slot: among all segments
    int first_slab, slabs, first_column, columns, first_row, rows;  // of windows

    // The part that begins at `line` of a block's line that ends at `end`.
    DEVICE void set(const Shape& s, int64_t line, int64_t end) {
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
    DEVICE int bands() const { return rows + 1; }
    // The argmax indices of a window, as words, among those of the batch.
    DEVICE int64_t first_word(const Shape& s, int slab, int row, int column) const {
        const int64_t row_words = static_cast<int64_t>(s.columns) * 4, slab_words = s.rows * row_words;
        return (sample * s.slabs + first_slab + slab) * slab_words + (first_row + row) * row_words +
               (first_column + column) * 4;
    }
};

// Two multistage pipelines. Stages: TMA's bytes complete a phase of a stage's mbarrier `loaded`; a barrier of the producers
// releases the stage. Bands: band n, counted over all segments and attempts, is in stage n % BANDS. Producers wait for its
// empty mbarrier and arrive at its full one, consumers the other way round. Every lane arrives for itself.
struct Pipeline {
    Layout layout;
    uint32_t bands, barriers, stages, loaded;  // shared addresses; barriers: full, then empty
    Scales* scales;

    DEVICE Pipeline(const Shape& shape, bool strict, char* memory) : layout(shape, strict) {
        stages = shared_address(memory), bands = stages + layout.bands;
        barriers = stages + layout.barriers, loaded = barriers + 2 * BANDS * 8;
        scales = reinterpret_cast<Scales*>(memory + layout.scales);
        if (threadIdx.x == 0) {
            for (int i = 0; i < BANDS; ++i) mbarrier_init(full(i), PRODUCERS), mbarrier_init(empty(i), CONSUMERS);
            for (int i = 0; i < STAGES; ++i) mbarrier_init(loaded + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
    DEVICE uint32_t band(unsigned n) const { return bands + n % BANDS * layout.band_bytes; }
    DEVICE uint32_t full(unsigned n) const { return barriers + n % BANDS * 8; }
    DEVICE uint32_t empty(unsigned n) const { return full(n) + BANDS * 8; }
    DEVICE void producer_acquire(unsigned n) const { mbarrier_wait(empty(n), n / BANDS & 1 ^ 1); }
    DEVICE void producer_commit(unsigned n) const { mbarrier_arrive(full(n)); }
    DEVICE void consumer_wait(unsigned n) const { mbarrier_wait(full(n), n / BANDS & 1); }
    DEVICE void consumer_release(unsigned n) const { mbarrier_arrive(empty(n)); }
};

// ---- producers
// fp16 has TF32's 11 bits, but not its range: so a segment's values are scaled by a power of two. It is taken from the
// segment's first stage, with room for values 31 times as large. If there are larger ones, the segment is attempted a second
// time, with the power that its largest value calls for.
constexpr int FIRST_TARGET = 11, LAST_TARGET = 15, REJECTED = 1000;
constexpr float LARGEST_FP16 = 65504;

// The largest of all producers' values. Two calls with one `when` have another barrier between them.
DEVICE float largest_of_producers(float mine, int when, Scales* scales) {
    mine = warp_largest(mine);
    if (threadIdx.x % WARP == 0) scales->producer_largest[when][(threadIdx.x - CONSUMERS) / WARP] = mine;
    bar_sync(1, PRODUCERS);
    UNROLL for (int warp = 0; warp < PRODUCER_WARPS; ++warp) mine = fmaxf(mine, scales->producer_largest[when][warp]);
    return mine;
}

// Four columns of a row, in all channels.
using Piece = float[CHANNELS * 4];
DEVICE void load_piece(uint32_t from, int channel_bytes, Piece& v) {
    UNROLL for (int c = 0; c < CHANNELS; ++c) {
        const float4 four = ld_shared_v4(from + c * channel_bytes);
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
        st_shared_v4(first + odd * ODD_COLUMNS, turned ? b : a);
        st_shared_v4(second + odd * ODD_COLUMNS, turned ? a : b);
    }
}

// All segments of the block. A thread has one piece of every 8th row of a stage; the first one also issues the TMA loads.
template <bool STRICT>
DEVICE void produce(const CUtensorMap& x, const Shape& shape, const Pipeline& pipeline) {
    const Layout& layout = pipeline.layout;
    Scales* const scales = pipeline.scales;
    const int thread = threadIdx.x - CONSUMERS, piece = thread % PIECES;
    const int channel_bytes = layout.stage_planes * 2 * ROW_BYTES;
    const int64_t end = shape.first_row(blockIdx.x + 1);
    unsigned first_band = 0, first_stage = 0, attempt = 0;  // bands and stages are counted over all attempts
    Segment segment;
    for (int64_t line = shape.first_row(blockIdx.x); line < end; line += segment.rows) {
        segment.set(shape, line, end);
        const int planes = 2 * segment.slabs + 2, band_stages = ceil_div(planes, layout.stage_planes);
        const int count = segment.bands() * band_stages;
        const auto load_stage = [&](int k) {
            const unsigned stage = (first_stage + k) % STAGES;
            const uint32_t loaded = pipeline.loaded + 8 * stage;
            mbarrier_arrive_expect_tx(loaded, layout.stage_bytes);
            const uint32_t to = pipeline.stages + stage * layout.stage_bytes;
            const int column = 2 * segment.first_column, row = 2 * (segment.first_row + k / band_stages);
            const int plane = 2 * segment.first_slab + k % band_stages * layout.stage_planes;
            tma_load_5d(to, x, column, row, plane, 0, static_cast<int>(segment.sample), loaded);
        };
        int exponent = 0;
        bool exact = false, accepted = false;
        while (!accepted) {
            if (thread == 0)
                for (int k = 0; k < smaller(STAGES, count); ++k) load_stage(k);
            float largest = 0;
            int k = 0;
            UNROLL_1 for (int i = 0; i < segment.bands(); ++i) {
                const unsigned band = first_band + i;
                UNROLL_1 for (int first_plane = 0; first_plane < planes; first_plane += layout.stage_planes, ++k) {
                    const unsigned n = first_stage + k;
                    const uint32_t from = pipeline.stages + n % STAGES * layout.stage_bytes + piece * 16;
                    const int lines = 2 * smaller(layout.stage_planes, planes - first_plane);
                    mbarrier_wait(pipeline.loaded + n % STAGES * 8, n / STAGES & 1);
                    if (k == 0 && !exact) {
                        UNROLL_1 for (int j = thread / PIECES; j < lines; j += PRODUCERS / PIECES) {
                            Piece v;
                            load_piece(from + j * ROW_BYTES, channel_bytes, v);
                            largest = fmaxf(largest, largest_finite(v));
                        }
                        exponent = scale_exponent(largest_of_producers(largest, 0, scales), FIRST_TARGET);
                    }
                    if (first_plane == 0) pipeline.producer_acquire(band);
                    const float scale = power_of_2(exponent);
                    const uint32_t to = pipeline.band(band) + first_plane * PLANE_BYTES;
                    UNROLL_1 for (int j = thread / PIECES; j < lines; j += PRODUCERS / PIECES) {
                        Piece v;
                        load_piece(from + j * ROW_BYTES, channel_bytes, v);
                        largest = fmaxf(largest, largest_finite(v));
                        UNROLL for (int e = 0; e < 4 * CHANNELS; ++e) v[e] *= scale;
                        store_piece(to + j * BAND_ROW_BYTES, piece, v);
                        if (STRICT) {
                            UNROLL for (int e = 0; e < 4 * CHANNELS; ++e) v[e] = fp16_rest(v[e]);
                            store_piece(to + layout.band_bytes / 2 + j * BAND_ROW_BYTES, piece, v);
                        }
                    }
                    bar_sync(1, PRODUCERS);  // all have read the stage
                    if (thread == 0 && k + STAGES < count) load_stage(k + STAGES);
                }
                if (k == count) {  // consumers read the exponent behind the last band's mbarrier
                    largest = largest_of_producers(largest, 1, scales);
                    accepted = exact || largest * power_of_2(exponent) <= LARGEST_FP16;
                    if (thread == 0) scales->exponents[attempt % ATTEMPTS] = accepted ? exponent : REJECTED;
                    exponent = scale_exponent(largest, LAST_TARGET);
                }
                pipeline.producer_commit(band);
            }
            first_band += segment.bands(), first_stage += count, ++attempt;
            exact = true;
        }
    }
}

// ---- consumers
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
    bool waits = true;  // for the row's bands
    UNROLL_1 for (int row = 0; row < segment.rows;) {
        const unsigned band = first_band + row;
        if (waits) pipeline.consumer_wait(band), pipeline.consumer_wait(band + 1);
        waits = unit.row > row;
        if (unit.row > row) {
            pipeline.consumer_release(band);
            ++row;
            continue;
        }
        const uint32_t bands[2] = {pipeline.band(band), pipeline.band(band + 1)};
        visit(unit, bands);
        unit.set(segment, row, unit.number + CONSUMER_WARPS);
    }
    pipeline.consumer_release(first_band + segment.rows);
}

// Where in a plane the row of 16 bytes lies that the lane names when a warp loads column `column` of 8 windows.
DEVICE uint32_t matrix_row(int lane, int first_window, int column) {
    const int pair = (first_window + lane % 8 + column / 2) % (COLUMNS / 2);  // beyond the row: of no window
    return column % 2 * ODD_COLUMNS + pair * COLUMN_BYTES;
}

// weight[o][c][tap] as left operands, [tap][lane], scaled, and what rounding leaves of them; returns the exponent of the power
// of two that scales them. The consumers call it.
__device__ int store_weights(const float* __restrict__ weight, float sign, uint2* high, uint2* low, Scales* scales) {
    const float largest = largest_weight<CONSUMERS>(weight, scales->weight_largest);
    const int exponent = scale_exponent(largest, 14);
    const float scale = sign * power_of_2(exponent);
    UNROLL for (int i = threadIdx.x; i < TAPS * WARP; i += CONSUMERS) {
        const int g = i % WARP / 4, t = i % 4, tap = i / WARP;
        const auto scaled = [&](int o, int c) {
            return o < OUT_CHANNELS && c < IN_CHANNELS ? scale * weight[(o * IN_CHANNELS + c) * TAPS + tap] : 0;
        };
        const float w[4] = {scaled(g, 2 * t), scaled(g, 2 * t + 1), scaled(g + 8, 2 * t), scaled(g + 8, 2 * t + 1)};
        high[i] = make_uint2(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]));
        low[i] = make_uint2(fp16_pair(fp16_rest(w[0]), fp16_rest(w[1])), fp16_pair(fp16_rest(w[2]), fp16_rest(w[3])));
    }
    return exponent;
}

// A plane of 8 windows: [row][column 0, 2, 1, 3], channels 2t and 2t + 1 of window g. A product takes two neighbouring
// registers: taps 0 and 2 of a row need no moves, neither for a window's even positions nor for its odd ones.
using Plane = uint32_t[SIDE][SIDE];
DEVICE int column_of_matrix(int matrix) { return matrix % 2 * 2 + matrix / 2; }  // and the other way round
DEVICE void load_plane(const uint32_t (&bands)[2], uint32_t offset, Plane& x) {
    UNROLL for (int row = 0; row < SIDE; ++row) ldmatrix_x4(bands[row / 2] + row % 2 * BAND_ROW_BYTES + offset, x[row]);
}
DEVICE void copy_plane(const Plane& from, Plane& to) {
    UNROLL for (int row = 0; row < SIDE; ++row)
        UNROLL for (int i = 0; i < SIDE; ++i) to[row][i] = from[row][i];
}

// Nine taps of a plane of the kernel: the pairs 0 2, 3 5, 6 8 and 1 7, and the middle one. Positions of a window are numbered
// d, h, w in binary.
constexpr int PLANE_TAPS = 9, PAIRS = 4, MIDDLE = 4;
DEVICE constexpr int first_of_pair(int pair) { return pair < 3 ? 3 * pair : 1; }
DEVICE constexpr int second_of_pair(int pair) { return pair < 3 ? 3 * pair + 2 : 7; }
DEVICE uint32_t operand(const Plane& x, int position, int tap) {
    const int row = position / 2 % 2 + tap / 3, column = position % 2 + tap % 3;
    return x[row][column_of_matrix(column)];
}

using Sums = float[8][4];  // [position][element: window 2t, 2t + 1 of output g, then of g + 8]
DEVICE void clear(Sums& sums) {
    UNROLL for (int i = 0; i < 8; ++i)
        UNROLL for (int element = 0; element < 4; ++element) sums[i][element] = 0;
}

// The pairs of plane r of the kernel: `x` are the planes that positions 0 to 3 and 4 to 7 meet with it.
DEVICE void add_pairs(Sums& sums, const uint2 (&weights)[TAPS], int r, const Plane& x, const Plane& next_x) {
    UNROLL for (int pair = 0; pair < PAIRS; ++pair)
        UNROLL for (int i = 0; i < 8; ++i) {
            const int tap = first_of_pair(pair), second = second_of_pair(pair);
            const Plane& plane = i < 4 ? x : next_x;
            mma_m16n8k16(sums[i], weights[r * PLANE_TAPS + tap], weights[r * PLANE_TAPS + second], operand(plane, i, tap),
                         operand(plane, i, second));
        }
}
// The middle taps of the kernel's first two planes make a pair, that of the third stands alone.
DEVICE void add_middle_pair(Sums& sums, const uint2 (&weights)[TAPS], const Plane& first, const Plane& second,
                            const Plane& third) {
    UNROLL for (int i = 0; i < 8; ++i)
        mma_m16n8k16(sums[i], weights[MIDDLE], weights[PLANE_TAPS + MIDDLE], operand(i < 4 ? first : second, i, MIDDLE),
                     operand(i < 4 ? second : third, i, MIDDLE));
}
DEVICE void add_last_middle(Sums& sums, const uint2 (&weights)[TAPS], const Plane& x, const Plane& next_x) {
    UNROLL for (int i = 0; i < 8; ++i)
        mma_m16n8k8(sums[i], weights[2 * PLANE_TAPS + MIDDLE], operand(i < 4 ? x : next_x, i, MIDDLE));
}

// visit(sums) for each slab of a unit, in order. A slab's planes 2 and 3 are the next one's planes 0 and 1 and stay in
// registers. All positions add in the same order; eight are summed at a time.
template <class Visit>
DEVICE void convolve(const uint2 (&weights)[TAPS], const uint32_t (&bands)[2], uint32_t offset, int first_slab, int end,
                     Visit visit) {
    offset += 2 * first_slab * PLANE_BYTES;
    Plane first, second, third, fourth;
    load_plane(bands, offset, first);
    load_plane(bands, offset + PLANE_BYTES, second);
    UNROLL_1 for (int slab = first_slab; slab < end; ++slab) {
        offset += 2 * PLANE_BYTES;
        load_plane(bands, offset, third);
        Sums sums;
        clear(sums);
        add_pairs(sums, weights, 0, first, second);
        add_middle_pair(sums, weights, first, second, third);
        load_plane(bands, offset + PLANE_BYTES, fourth);
        add_pairs(sums, weights, 1, second, third);
        add_pairs(sums, weights, 2, third, fourth);
        add_last_middle(sums, weights, third, fourth);
        visit(sums);
        copy_plane(third, first);
        copy_plane(fourth, second);
    }
}

// The same, error-compensated: low * high + high * low + high * high. The tensor core truncates its sums, so each plane's begin
// at zero and are added as fp32 numbers. The small ones are kept apart, and do not count where x is infinite: the low part of a
// weight may have the other sign.
template <class Visit>
DEVICE void convolve_strictly(uint32_t weights, const uint32_t (&bands)[2], int lower, uint32_t offset, int first_slab, int end,
                              Visit visit) {
    UNROLL_1 for (int slab = first_slab; slab < end; ++slab) {
        Sums sums, small;
        clear(sums);
        clear(small);
        uint32_t here = offset + 2 * slab * PLANE_BYTES, plane_weights = weights;
        Plane high, low, next_high, next_low;  // those that positions 0 to 3 and 4 to 7 meet with plane r of the kernel
        load_plane(bands, here, next_high);
        load_plane(bands, here + lower, next_low);
        UNROLL_1 for (int r = 0; r < 3; ++r) {
            copy_plane(next_high, high);
            copy_plane(next_low, low);
            here += PLANE_BYTES;
            load_plane(bands, here, next_high);
            load_plane(bands, here + lower, next_low);
            Sums part;
            clear(part);
            const auto add = [&](Sums& to, int pair, uint2 w, uint2 next_w, const Plane& x, const Plane& next_x) {
                UNROLL for (int i = 0; i < 8; ++i) {
                    const Plane& plane = i < 4 ? x : next_x;
                    mma_m16n8k16(to[i], w, next_w, operand(plane, i, first_of_pair(pair)),
                                 operand(plane, i, second_of_pair(pair)));
                }
            };
            UNROLL for (int pair = 0; pair < PAIRS; ++pair) {
                const uint32_t at = plane_weights + first_of_pair(pair) * TAP_BYTES;
                const uint32_t next = plane_weights + second_of_pair(pair) * TAP_BYTES;
                const uint2 w = ld_shared_v2(at), next_w = ld_shared_v2(next);
                add(small, pair, ld_shared_v2(at + OPERAND_BYTES), ld_shared_v2(next + OPERAND_BYTES), high, next_high);
                add(part, pair, w, next_w, high, next_high);
                add(small, pair, w, next_w, low, next_low);
            }
            const uint32_t middle = plane_weights + MIDDLE * TAP_BYTES;
            const uint2 w = ld_shared_v2(middle), low_w = ld_shared_v2(middle + OPERAND_BYTES);
            UNROLL for (int i = 0; i < 8; ++i) {
                const uint32_t x = operand(i < 4 ? high : next_high, i, MIDDLE);
                mma_m16n8k16(small[i], low_w, w, x, operand(i < 4 ? low : next_low, i, MIDDLE));
                mma_m16n8k8(part[i], w, x);
            }
            plane_weights += PLANE_TAPS * TAP_BYTES;
            UNROLL for (int i = 0; i < 8; ++i)
                UNROLL for (int element = 0; element < 4; ++element) sums[i][element] += part[i][element];
        }
        UNROLL for (int i = 0; i < 8; ++i)
            UNROLL for (int element = 0; element < 4; ++element) sums[i][element] += finite_or_zero(small[i][element]);
        visit(sums);
    }
}

struct Maximum {
    float value;
    uint32_t index;  // a bit: 1 << position
};

// A lane's four maxima as PyTorch finds them: the last NaN, else the first of the largest. INDICES, or values alone. Neighbours
// meet in pairs, then pairs, then fours: of equal ones the first goes on.
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
    UNROLL for (int i = 0; i < 8; ++i)  // perhaps one of them is a NaN
        UNROLL for (int element = 0; element < 4; ++element)
            if (sums[i][element] != sums[i][element]) maxima[element].index = 1u << i;
}

// A window's argmax indices are 16 bytes with a bit in each: output o in byte o / 4 of word o % 4. Two lanes have parts of the
// same words and exchange them.
DEVICE uint32_t argmax_word(int g, const uint32_t (&indices)[4]) {
    const bool upper = g >= 4;
    const int to_bytes = upper ? 0x4101 : 0x1410;  // 1 and 3, or 0 and 2; the second byte of an index is zero
    const uint32_t even = __byte_perm(indices[0], indices[2], to_bytes), odd = __byte_perm(indices[1], indices[3], to_bytes);
    return (upper ? odd : even) | __shfl_xor_sync(0xffffffffu, upper ? even : odd, 16);
}

// A warp writes a sample's result; lane o has the sum of output o's maxima.
DEVICE void write_result(const Result& result, int64_t sample, float sum) {
    const int o = threadIdx.x % WARP;
    float average = 0;
    if (o < OUT_CHANNELS) average = average_of(result, sum, o);
    if (!result.bias) {
        if (o < OUT_CHANNELS) result.out[sample * OUT_CHANNELS + o] = average;
        return;
    }
    if (o < OUT_CHANNELS) average += result.bias[result.biases == 1 ? 0 : o];
    average = warp_sum(average);
    if (o == 0) result.out[sample] = average;
}

// ---- the kernel
struct Tensors {
    const float *x, *weight;
    float *segment_sums, *segment_gradients;  // (segments, PITCH or WEIGHTS); the first is null where a sample is a segment
    uint32_t* argmax;                         // (batch, slabs, rows, columns, 4), or null
};

// A block takes its part of all rows of windows, segment by segment. Four producer warps fill the bands with fp16. Each of
// eight consumer warps convolves its units, 8 windows x 16 outputs at a time, keeps the sums of their maxima in registers, and
// writes the argmax indices (INDICES). The weights are in 54 registers of each consumer thread; strict ones are read from
// shared memory. At a segment's end the first consumer warp adds the warps' sums.
template <bool STRICT, bool INDICES>
__global__ void __launch_bounds__(THREADS, 1)
    stream_max_mean(const __grid_constant__ CUtensorMap x, const Shape shape, const Tensors tensors, const Result result) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Segment segments[2];  // this one and the next of the consumers; in no registers, which are short
    const Pipeline pipeline(shape, STRICT, memory);
    uint2* const operands = reinterpret_cast<uint2*>(memory + pipeline.layout.operands);
    float* const warp_sums = reinterpret_cast<float*>(memory + pipeline.layout.sums);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    if (warp >= CONSUMER_WARPS) {
        warpgroup_reg_dealloc<STRICT && INDICES ? 88 : 104>();
        produce<STRICT>(x, shape, pipeline);
        return;
    }
    warpgroup_reg_alloc<STRICT && INDICES ? 208 : 200>();
    const int weight_exponent =
        store_weights(tensors.weight, copysignf(1, result.divisor), operands, operands + TAPS * WARP, pipeline.scales);
    const int64_t end = shape.first_row(blockIdx.x + 1);
    int64_t line = shape.first_row(blockIdx.x);
    if (threadIdx.x == 0) segments[0].set(shape, line, end);
    bar_sync(2, CONSUMERS);
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const uint32_t stored_weights = shared_address(operands) + lane * 8;
    uint2 weights[TAPS];
    if (!STRICT) UNROLL for (int tap = 0; tap < TAPS; ++tap) weights[tap] = ld_shared_v2(stored_weights + tap * TAP_BYTES);
    unsigned first_band = 0, attempt = 0;
    for (int turn = 0; line < end; turn ^= 1) {
        const Segment& segment = segments[turn];
        line += segment.rows;
        if (threadIdx.x == 0 && line < end) segments[turn ^ 1].set(shape, line, end);
        float totals[2];  // of outputs g and g + 8
        int exponent;
        do {
            totals[0] = totals[1] = 0;
            for_units(segment, pipeline, first_band, [&](const Unit& unit, const uint32_t(&bands)[2]) {
                const int column = unit.first_window + 2 * t, word_column = column + g / 4;
                const bool exist[2] = {column < segment.columns, column + 1 < segment.columns};
                const bool writes = word_column < segment.columns;
                const int64_t slab_words = shape.rows * (static_cast<int64_t>(shape.columns) * 4);
                uint32_t* word = nullptr;
                if (INDICES)
                    word = tensors.argmax + segment.first_word(shape, unit.first_slab, unit.row, word_column) + g % 4;
                const auto take_maxima = [&](const Sums& sums) {
                    Maximum maxima[4];
                    find_maxima<INDICES>(sums, maxima);
                    uint32_t indices[4];
                    UNROLL for (int i = 0; i < 4; ++i) {
                        totals[i / 2] += exist[i % 2] ? maxima[i].value : 0;
                        indices[i] = exist[i % 2] ? maxima[i].index : 0;
                    }
                    if constexpr (INDICES) {
                        const uint32_t all = argmax_word(g, indices);
                        if (writes) *word = all;
                        word += slab_words;
                    }
                };
                const uint32_t offset = matrix_row(lane, unit.first_window, column_of_matrix(lane / 8));
                if constexpr (STRICT)
                    convolve_strictly(stored_weights, bands, pipeline.layout.band_bytes / 2, offset, unit.first_slab, unit.end,
                                      take_maxima);
                else
                    convolve(weights, bands, offset, unit.first_slab, unit.end, take_maxima);
            });
            first_band += segment.bands();
            exponent = pipeline.scales->exponents[attempt++ % ATTEMPTS];
        } while (exponent == REJECTED);
        UNROLL for (int i = 0; i < 2; ++i) {
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 1);
            totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 2);
            if (t == 0) warp_sums[(turn * CONSUMER_WARPS + warp) * OUTPUTS + g + 8 * i] = totals[i];
        }
        // These sums are there, those before have been read, and so has the segment; the next one is set.
        bar_sync(2, CONSUMERS);
        if (warp == 0) {
            float sum = 0;
            if (lane < OUTPUTS)
                for (int other = 0; other < CONSUMER_WARPS; ++other)
                    sum += warp_sums[(turn * CONSUMER_WARPS + other) * OUTPUTS + lane];
            sum = PowerOf2(-exponent - weight_exponent).times(sum);
            if (!tensors.segment_sums) write_result(result, segment.sample, sum);
            else if (lane < OUTPUTS) tensors.segment_sums[segment.slot * OUTPUTS + lane] = sum;
            __syncwarp();  // lane 0 may write over the segment
        }
    }
}

// Calls visit(slot) for each segment of a sample, in order.
template <class Visit>
DEVICE void for_segments(const Shape& s, int64_t sample, Visit visit) {
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

// A warp adds the segments of a sample, in order.
__global__ void __launch_bounds__(WARP)
    finish_samples(const float* __restrict__ segment_sums, const Shape shape, const Result result) {
    float sum = 0;
    if (threadIdx.x < OUTPUTS)
        for_segments(shape, blockIdx.x, [&](int64_t slot) { sum += segment_sums[slot * OUTPUTS + threadIdx.x]; });
    write_result(result, blockIdx.x, sum);
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

// The sum of the consumer warps' gradients, in their order, as the weights lie in memory.
DEVICE void write_gradient(const Gradient& gradient, int lane, int warp, float* sums, float* __restrict__ to) {
    UNROLL_1 for (int turn = 0; turn < CONSUMER_WARPS; ++turn) {
        if (turn == warp)
            UNROLL for (int i = 0; i < TAPS * 4; ++i) {
                float& sum = sums[i * WARP + lane];
                sum = turn ? sum + gradient[i / 4][i % 4] : gradient[i / 4][i % 4];
            }
        bar_sync(2, CONSUMERS);
    }
    for (int i = threadIdx.x; i < WEIGHTS; i += CONSUMERS) {
        const int tap = i % TAPS, c = i / TAPS % IN_CHANNELS, o = i / TAPS / IN_CHANNELS;
        // [tap][element][lane]; for channel c of output o
        to[i] = sums[(tap * 4 + o / 8 * 2 + c % 2) * WARP + o % 8 * 4 + c / 2];
    }
    bar_sync(2, CONSUMERS);  // the sums have been read
}

// gradients (segments, WEIGHTS). Blocks, producers and units are those of the forward pass, behind which it runs; a consumer
// warp multiplies 8 windows x 16 outputs with the 64 pixels of each window.
__global__ void __launch_bounds__(THREADS, 1)
    stream_weight_gradient(const __grid_constant__ CUtensorMap x, const Shape shape, const uint32_t* __restrict__ argmax,
                           float* __restrict__ gradients) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Segment segment;
    const Pipeline pipeline(shape, false, memory);
    float* const sums = reinterpret_cast<float*>(memory + pipeline.layout.operands);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
    if (warp >= CONSUMER_WARPS) {
        warpgroup_reg_dealloc<104>();
        produce<false>(x, shape, pipeline);
        return;
    }
    warpgroup_reg_alloc<200>();
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    unsigned attempt = 0, first_band = 0;
    for (int64_t line = shape.first_row(blockIdx.x); line < shape.first_row(blockIdx.x + 1);) {
        if (threadIdx.x == 0) segment.set(shape, line, shape.first_row(blockIdx.x + 1));
        bar_sync(2, CONSUMERS);
        Gradient gradient;
        int exponent;
        do {
            UNROLL for (int i = 0; i < TAPS * 4; ++i) gradient[i / 4][i % 4] = 0;
            // The words of windows 2t and 2t + 1 with outputs g and g + 8. The next slab's are under way, and so are those of
            // the next unit's first slab.
            const int64_t slab_words = shape.rows * (static_cast<int64_t>(shape.columns) * 4);
            const uint32_t* from = argmax;
            bool exist[2] = {};
            uint32_t words[2];
            const auto load = [&] { words[0] = exist[0] ? from[0] : 0, words[1] = exist[1] ? from[4] : 0; };
            const auto load_first = [&](const Unit& unit) {
                const int column = unit.first_window + 2 * t;
                const bool some = unit.row < segment.rows && unit.first_slab < unit.end;
                exist[0] = some && column < segment.columns, exist[1] = some && column + 1 < segment.columns;
                from = argmax + segment.first_word(shape, unit.first_slab, unit.row, column) + g % 4;
                load();
            };
            Unit next;
            next.set(segment, 0, warp);
            load_first(next);
            for_units(segment, pipeline, first_band, [&](const Unit& unit, const uint32_t(&bands)[2]) {
                next.set(segment, unit.row, unit.number + CONSUMER_WARPS);
                if (unit.first_slab == unit.end) load_first(next);
                uint32_t offset = matrix_row(lane, unit.first_window, lane / 8) + 2 * unit.first_slab * PLANE_BYTES;
                UNROLL_1 for (int slab = unit.first_slab; slab < unit.end; ++slab) {
                    // Bytes of both words, for output g and for g + 8.
                    const int byte = g / 4;
                    const uint32_t left = words[0] >> 8 * byte & 0x00ff00ff, right = words[1] >> 8 * byte & 0x00ff00ff;
                    const uint32_t bytes[2] = {__byte_perm(left, right, 0x5410), __byte_perm(left, right, 0x7632)};
                    uint2 hot[8];
                    UNROLL for (int i = 0; i < 8; ++i) hot[i] = make_uint2(one_hot(bytes[0], i), one_hot(bytes[1], i));
                    if (slab + 1 < unit.end) from += slab_words, load();
                    else load_first(next);
                    UNROLL for (int plane = 0; plane < SIDE; ++plane)
                        UNROLL for (int row = 0; row < SIDE; ++row) {
                            uint32_t columns[SIDE];
                            const uint32_t in_plane = bands[row / 2] + row % 2 * BAND_ROW_BYTES + offset;
                            ldmatrix_x4_trans(in_plane + plane * PLANE_BYTES, columns);
                            UNROLL for (int dh = 0; dh < 4; ++dh) {  // a position's depth and height in its window
                                const int r = plane - dh / 2, s = row - dh % 2;  // the kernel's plane and row that meet x
                                if (r < 0 || r > 2 || s < 0 || s > 2) continue;
                                UNROLL for (int k = 0; k < 3; ++k)
                                    mma_m16n8k16(gradient[9 * r + 3 * s + k], hot[2 * dh], hot[2 * dh + 1], columns[k],
                                                 columns[k + 1]);
                            }
                        }
                    offset += 2 * PLANE_BYTES;
                }
            });
            first_band += segment.bands();
            exponent = pipeline.scales->exponents[attempt++ % ATTEMPTS];
        } while (exponent == REJECTED);
        const float scale = power_of_2(-exponent);
        UNROLL for (int i = 0; i < TAPS * 4; ++i) gradient[i / 4][i % 4] *= scale;
        write_gradient(gradient, lane, warp, sums, gradients + segment.slot * WEIGHTS);
        line += segment.rows;
        bar_sync(2, CONSUMERS);  // the segment has been read
    }
}

// gradients (batch, WEIGHTS): a sample's segments, in order.
constexpr int SUM_THREADS = 128, WEIGHT_BLOCKS = ceil_div(WEIGHTS, SUM_THREADS);
__global__ void __launch_bounds__(SUM_THREADS)
    add_segments(const float* __restrict__ segment_gradients, float* __restrict__ gradients, const Shape shape) {
    const int64_t sample = blockIdx.x / WEIGHT_BLOCKS;
    const int i = blockIdx.x % WEIGHT_BLOCKS * SUM_THREADS + threadIdx.x;
    if (i >= WEIGHTS) return;
    float sum = 0;
    for_segments(shape, sample, [&](int64_t slot) { sum += segment_gradients[slot * WEIGHTS + i]; });
    gradients[sample * WEIGHTS + i] = sum;
}

// The gradient of the input: one-hot argmax indices (16 pixels x 16 outputs) times weights (16 outputs x 8 channels).
// A warp has the pixels of 8 windows' columns in two planes and two rows, [plane][row]: even columns are rows 0 to 7 of the
// product, odd ones rows 8 to 15. All lie within reach of the windows at and before them in each direction. The product's inner
// index takes outputs as a lane has them: t, t + 4, t + 8, t + 12. The weights are in registers, multiplied by the upstream
// gradient whenever the sample changes. PAIRED: two neighbours of a row are written at once.
constexpr int INPUT_WARPS = 12, INPUT_THREADS = INPUT_WARPS * WARP;
template <bool PAIRED>
__global__ void __launch_bounds__(INPUT_THREADS, 1)
    input_gradient(const uint32_t* __restrict__ argmax, const float* __restrict__ weight, const Upstream upstream,
                   const Shape shape, const float scale, float* __restrict__ grad_x) {
    __shared__ uint2 weights[TAPS][WARP];  // as right operands
    __shared__ float warp_values[INPUT_WARPS];
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int slab_pairs = ceil_div(shape.depth, 2), row_pairs = ceil_div(shape.height, 2), groups = ceil_div(shape.width, 16);
    const int64_t lines = shape.batch * slab_pairs, plane_floats = static_cast<int64_t>(shape.height) * shape.width;
    const int64_t channel_floats = shape.depth * plane_floats;
    const int row_words = shape.columns * 4, slab_words = shape.rows * row_words;  // a sample's are below 2^30
    // Weights times upstream gradients are below 2^14.
    const int weight_exponent = scale_exponent(largest_weight<INPUT_THREADS>(weight, warp_values), 7);
    const bool channels[2] = {2 * t < IN_CHANNELS, 2 * t + 1 < IN_CHANNELS};
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
            for (int i = threadIdx.x; i < TAPS * WARP; i += INPUT_THREADS) {
                const int c = i % WARP / 4, tap = i / WARP;
                const auto scaled = [&](int o) {
                    if (o >= OUT_CHANNELS || c >= IN_CHANNELS) return 0.0f;
                    const float w = weight[(o * IN_CHANNELS + c) * TAPS + tap] * power_of_2(weight_exponent);
                    return upstream.at(sample, o) * power_of_2(exponent) * w;
                };
                const int o = i % 4;
                weights[tap][i % WARP] =
                    make_uint2(fp16_pair(scaled(o), scaled(o + 4)), fp16_pair(scaled(o + 8), scaled(o + 12)));
            }
            __syncthreads();
            UNROLL for (int tap = 0; tap < TAPS; ++tap) b[tap] = weights[tap][lane];
            last_sample = sample;
        }
        const uint32_t* const sample_words = argmax + sample * shape.slabs * slab_words;
        const bool slabs[2] = {slab < shape.slabs, slab > 0 && slab <= shape.slabs};  // this one, and the one before
        // The words of the windows that the pixels are in: [slab][row][column], this one and the one before.
        uint32_t words[2][2][2];
        const auto load = [&](int row, int column) {
            const int at = slab * slab_words + row * row_words + column * 4 + t;
            const bool rows[2] = {row < shape.rows, row > 0 && row <= shape.rows};
            const bool columns[2] = {column < shape.columns, column > 0 && column <= shape.columns};
#pragma unroll  // as a line, which the emulator follows, too: it counts the eight loads as nvcc issues them
            for (int i = 0; i < 8; ++i) {
                const int d = i / 4, h = i / 2 % 2, w = i % 2;
                const bool exists = slabs[d] && rows[h] && columns[w];
                words[d][h][w] = exists ? sample_words[at - d * slab_words - h * row_words - w * 4] : 0;
            }
        };
        int row = threadIdx.x / WARP / groups, group = threadIdx.x / WARP % groups;
        if (row < row_pairs) load(row, group * 8 + g);
        UNROLL_1 while (row < row_pairs) {
            const int column = group * 8 + g;
            float* const corner = grad_x + (sample * IN_CHANNELS + 2 * t) * channel_floats +
                                  (2 * slab * plane_floats + 2 * row * static_cast<int64_t>(shape.width) + 2 * column);
            const bool in_row = 2 * column < shape.width, in_plane[2] = {in_row, in_row && 2 * row + 1 < shape.height};
            uint32_t here[2][2][2];
            UNROLL for (int i = 0; i < 8; ++i) here[i / 4][i / 2 % 2][i % 2] = words[i / 4][i / 2 % 2][i % 2];
            for (group += INPUT_WARPS; group >= groups; group -= groups) ++row;
            if (row < row_pairs) load(row, group * 8 + g);  // for the next turn
            float sums[2][2][4] = {};                       // [d][h][the left pixel in two channels, then the right one]
            UNROLL for (int before_d = 0; before_d < 2; ++before_d)
                UNROLL for (int before_h = 0; before_h < 2; ++before_h) {
                    uint2 bytes[2];  // of outputs t and t + 4, t + 8 and t + 12, for this window and the one before
                    UNROLL for (int before = 0; before < 2; ++before) {
                        const uint32_t word = here[before_d][before_h][before];
                        bytes[before] = make_uint2(__byte_perm(word, 0, 0x4140), __byte_perm(word, 0, 0x4342));
                    }
                    UNROLL for (int d = 0; d < 2; ++d)
                        UNROLL for (int h = 0; h < 2; ++h) {
                            uint2 hot[2][2];  // [this window or the one before][w]
                            UNROLL for (int i = 0; i < 4; ++i) {
                                const int position = 4 * d + 2 * h + i % 2;
                                hot[i / 2][i % 2] =
                                    make_uint2(one_hot(bytes[i / 2].x, position), one_hot(bytes[i / 2].y, position));
                            }
                            UNROLL for (int k = 0; k < 3; ++k)
                                UNROLL for (int zy = 0; zy < 4; ++zy) {
                                    const int r = 2 * before_d + zy / 2 - d, s = 2 * before_h + zy % 2 - h;
                                    if (r < 0 || r > 2 || s < 0 || s > 2) continue;
                                    const uint2 even = hot[(k + 1) / 2][k % 2], odd = hot[k / 2][1 - k % 2];
                                    const uint2 w = b[9 * r + 3 * s + k];
                                    mma_m16n8k16(sums[zy / 2][zy % 2], make_uint2(even.x, odd.x), make_uint2(even.y, odd.y),
                                                 w.x, w.y);
                                }
                        }
                }
            UNROLL for (int i = 0; i < 8; ++i) {
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

#endif  // FAST

// grad_weight = scale * the samples' gradients, weighted by `upstream`. A thread adds every SUM_ROWS-th sample of a weight.
constexpr int SUM_COLUMNS = 32, SUM_ROWS = 8;
__global__ void __launch_bounds__(SUM_COLUMNS * SUM_ROWS)
    weighted_sum(const float* __restrict__ gradients, const Upstream upstream, int64_t batch, float scale,
                 float* __restrict__ grad_weight) {
    __shared__ float row_sums[SUM_ROWS][SUM_COLUMNS];
    const int row = threadIdx.x / SUM_COLUMNS, column = threadIdx.x % SUM_COLUMNS, k = blockIdx.x * SUM_COLUMNS + column;
    float sum = 0;
    if (k < WEIGHTS)
        _Pragma("unroll 8") for (int64_t sample = row; sample < batch; sample += SUM_ROWS)
            sum += upstream.at(sample, k / (IN_CHANNELS * TAPS)) * gradients[sample * WEIGHTS + k];
    row_sums[row][column] = sum;
    __syncthreads();
    if (row > 0 || k >= WEIGHTS) return;
    for (int other = 1; other < SUM_ROWS; ++other) sum += row_sums[other][column];
    grad_weight[k] = scale * sum;
}

// ==================================================================================================== all other shapes
// Right, but slow: plain loops in fp32, also for strict gradients of the shapes above. Argmax indices are (batch, slabs, rows,
// columns, PITCH); those of the tensor-core kernels are bits in an order of their own.
DEVICE int64_t argmax_at(int64_t window, int o) { return window * PITCH + (FAST ? o % 4 * 4 + o / 4 : o); }
DEVICE int position_of(Argmax argmax) { return FAST ? __ffs(argmax) - 1 : argmax; }
DEVICE int64_t pixel(const Shape& shape, int64_t sample, int c, int z, int y, int x) {
    return (((sample * IN_CHANNELS + c) * shape.depth + z) * shape.height + y) * shape.width + x;
}
// The pixel of channel 0 where a position of a window begins to read.
DEVICE int64_t corner(const Shape& shape, int64_t sample, unsigned window, int position) {
    const int slab = window / shape.columns / shape.rows, row = window / shape.columns % shape.rows;
    const int d = position / (POOL_H * POOL_W), h = position / POOL_W % POOL_H, w = position % POOL_W;
    return pixel(shape, sample, 0, slab * POOL_D + d, row * POOL_H + h, window % shape.columns * POOL_W + w);
}
__host__ __device__ int64_t chunks_of(const Shape& shape) { return (shape.windows() + WARP - 1) / WARP; }

#if !FAST
// A lane for a window, a warp for 32 windows of a sample in OUTS outputs. PART positions at a time have sums in registers.
// sums (batch, chunks, PITCH); argmax may be null.
constexpr int OUTS = smaller(8, OUT_CHANNELS), OUT_GROUPS = ceil_div(OUT_CHANNELS, OUTS), PART = smaller(8, POSITIONS);
__global__ void __launch_bounds__(WARP)
    plain_forward(const Shape shape, const float* __restrict__ x, const float* __restrict__ weight, const float sign,
                  float* __restrict__ sums, Argmax* __restrict__ argmax) {
    const int64_t chunk = blockIdx.x / OUT_GROUPS, sample = chunk / chunks_of(shape);
    const unsigned window = chunk % chunks_of(shape) * WARP + threadIdx.x;
    const int first_out = blockIdx.x % OUT_GROUPS * OUTS;
    const bool exists = window < shape.windows();
    float best[OUTS];
    int best_position[OUTS] = {};
    UNROLL for (int o = 0; o < OUTS; ++o) best[o] = -INFINITY;
    for (int first = 0; first < POSITIONS; first += PART) {
        const auto position = [&](int i) { return smaller(first + i, POSITIONS - 1); };  // the last one again wins nothing
        const float* from[PART];
        UNROLL for (int i = 0; i < PART; ++i) from[i] = x + corner(shape, sample, exists ? window : 0, position(i));
        float values[OUTS][PART] = {};
        for (int k = 0; k < IN_CHANNELS * TAPS; ++k) {
            const int c = k / TAPS, r = k % TAPS / (KERNEL_H * KERNEL_W), s = k / KERNEL_W % KERNEL_H, t = k % KERNEL_W;
            float pixels[PART];
            UNROLL for (int i = 0; i < PART; ++i) pixels[i] = from[i][pixel(shape, 0, c, r, s, t)];
            UNROLL for (int o = 0; o < OUTS; ++o) {
                const float w = sign * weight[smaller(first_out + o, OUT_CHANNELS - 1) * (IN_CHANNELS * TAPS) + k];
                UNROLL for (int i = 0; i < PART; ++i) values[o][i] += w * pixels[i];
            }
        }
        UNROLL for (int o = 0; o < OUTS; ++o)
            UNROLL for (int i = 0; i < PART; ++i)
                if (values[o][i] > best[o] || values[o][i] != values[o][i])
                    best[o] = values[o][i], best_position[o] = position(i);
    }
    UNROLL for (int o = 0; o < OUTS; ++o) {
        const float sum = warp_sum(exists ? best[o] : 0);
        if (first_out + o >= OUT_CHANNELS) continue;
        if (threadIdx.x == 0) sums[chunk * PITCH + first_out + o] = sum;
        const int64_t at = argmax_at(sample * shape.windows() + window, first_out + o);
        if (argmax && exists) argmax[at] = best_position[o];
    }
}

// A warp adds the chunks of a sample, a lane those of every 32nd output.
__global__ void __launch_bounds__(WARP)
    plain_finish(const float* __restrict__ sums, const int64_t chunks, const Result result) {
    float total = 0;
    for (int o = threadIdx.x; o < OUT_CHANNELS; o += WARP) {
        float sum = 0;
        for (int64_t chunk = blockIdx.x * chunks; chunk < (blockIdx.x + 1) * chunks; ++chunk) sum += sums[chunk * PITCH + o];
        const float average = average_of(result, sum, o);
        if (result.bias) total += average + result.bias[result.biases == 1 ? 0 : o];
        else result.out[blockIdx.x * static_cast<int64_t>(OUT_CHANNELS) + o] = average;
    }
    total = warp_sum(total);
    if (result.bias && threadIdx.x == 0) result.out[blockIdx.x] = total;
}
#endif

// gradients (batch, WEIGHTS): a warp for a group of taps, in a channel and output of a sample; a lane has every 32nd window.
constexpr int GROUP = (KERNEL_H * KERNEL_W <= 32 ? KERNEL_H : 1) * KERNEL_W, TAP_GROUPS = WEIGHTS / GROUP;
__global__ void __launch_bounds__(WARP)
    plain_weight_gradient(const Shape shape, const float* __restrict__ x, const Argmax* __restrict__ argmax,
                          float* __restrict__ gradients) {
    const int64_t sample = blockIdx.x / TAP_GROUPS;
    const int k = blockIdx.x % TAP_GROUPS * GROUP, tap = k % TAPS, c = k / TAPS % IN_CHANNELS, o = k / TAPS / IN_CHANNELS;
    const int r = tap / (KERNEL_H * KERNEL_W), s = tap / KERNEL_W % KERNEL_H;
    float sums[GROUP] = {};
    for (unsigned window = threadIdx.x; window < shape.windows(); window += WARP) {
        const int position = position_of(argmax[argmax_at(sample * shape.windows() + window, o)]);
        const float* const from = x + corner(shape, sample, window, position) + pixel(shape, 0, c, r, s, 0);
        UNROLL for (int i = 0; i < GROUP; ++i) sums[i] += from[pixel(shape, 0, 0, 0, i / KERNEL_W, i % KERNEL_W)];
    }
    UNROLL for (int i = 0; i < GROUP; ++i) {
        const float sum = warp_sum(sums[i]);
        if (threadIdx.x == 0) gradients[sample * WEIGHTS + k + i] = sum;
    }
}

// A thread for a pixel in INS channels: it asks whether the positions that it reached were the maxima of their windows.
constexpr int PIXEL_THREADS = 256, INS = smaller(8, IN_CHANNELS), IN_GROUPS = ceil_div(IN_CHANNELS, INS);
__global__ void __launch_bounds__(PIXEL_THREADS)
    plain_input_gradient(const Shape shape, const float* __restrict__ weight, const Argmax* __restrict__ argmax,
                         const Upstream upstream, const float scale, float* __restrict__ grad_x) {
    const int64_t i = blockIdx.x / IN_GROUPS * static_cast<int64_t>(PIXEL_THREADS) + threadIdx.x;
    const int64_t sample = i / shape.width / shape.height / shape.depth;
    if (sample >= shape.batch) return;
    const int x = i % shape.width, y = i / shape.width % shape.height, z = i / shape.width / shape.height % shape.depth;
    const int first_channel = blockIdx.x % IN_GROUPS * INS;
    float sums[INS] = {};
    for (int tap = 0; tap < TAPS; ++tap) {
        const int d = z - tap / (KERNEL_H * KERNEL_W), h = y - tap / KERNEL_W % KERNEL_H, w = x - tap % KERNEL_W;
        const int slab = d / POOL_D, row = h / POOL_H, column = w / POOL_W;
        if (d < 0 || slab >= shape.slabs || h < 0 || row >= shape.rows || w < 0 || column >= shape.columns) continue;
        const int64_t window = ((sample * shape.slabs + slab) * shape.rows + row) * shape.columns + column;
        const int position = (d % POOL_D * POOL_H + h % POOL_H) * POOL_W + w % POOL_W;
        for (int o = 0; o < OUT_CHANNELS; ++o) {
            if (position_of(argmax[argmax_at(window, o)]) != position) continue;
            const float* const weights = weight + o * IN_CHANNELS * TAPS + tap;
            UNROLL for (int c = 0; c < INS; ++c)
                sums[c] += upstream.at(sample, o) * weights[smaller(first_channel + c, IN_CHANNELS - 1) * TAPS];
        }
    }
    UNROLL for (int c = 0; c < INS; ++c)
        if (first_channel + c < IN_CHANNELS) grad_x[pixel(shape, sample, first_channel + c, z, y, x)] = scale * sums[c];
}

// ==================================================================================================== launchers
static int64_t pixel_blocks(const Shape& s) {
    const int64_t pixels = s.batch * s.depth * s.height * s.width;
    return (pixels + PIXEL_THREADS - 1) / PIXEL_THREADS * IN_GROUPS;
}

#if FAST

static int attribute(cudaDeviceAttr name) {
    int device, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, name, device);
    return value;
}

// As many slabs an image as shared memory takes, in equal parts; and as many blocks as SMs, or as samples where that keeps at
// least 95% of the SMs busy: whole samples need no second pass over their segments' sums.
void plan(Problem& problem) {
    Shape& s = problem.shape;
    const int sm_count = attribute(cudaDevAttrMultiProcessorCount);
    const int limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    s.image_slabs = s.slabs;
    while (s.image_slabs > 1 && Layout(s, problem.strict).bytes > limit) --s.image_slabs;
    s.slab_parts = ceil_div(s.slabs, s.image_slabs), s.image_slabs = ceil_div(s.slabs, s.slab_parts);
    s.image_columns = s.columns <= WHOLE_WINDOWS ? s.columns : PART_WINDOWS;
    s.column_parts = ceil_div(s.columns, s.image_columns);
    const int64_t images = s.images(), waves = (images + sm_count - 1) / sm_count;
    const int64_t whole = (images + waves - 1) / waves;
    const bool busy = whole * 20 >= 19 * static_cast<int64_t>(sm_count);
    if (images == s.batch && images % whole == 0 && busy) s.blocks = whole;
    else s.blocks = images * s.rows < sm_count ? images * s.rows : sm_count;
    problem.segments = !s.whole_images() ? images + s.blocks : images == s.batch ? 0 : images;
    problem.largest_grid = s.batch * TAP_GROUPS + pixel_blocks(s);
}

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
static cudaError_t encode_map(const Problem& problem, const Layout& layout, CUtensorMap* map) {
    static const Encode encode = find_encode();
    if (!encode) return cudaErrorNotSupported;
    const Shape& s = problem.shape;
    const cuuint64_t width = s.width, height = s.height, depth = s.depth, batch = s.batch;
    const cuuint64_t sizes[5] = {width, height, depth, IN_CHANNELS, batch}, row_bytes = (width + 3) / 4 * 16;
    const cuuint64_t strides[4] = {row_bytes, row_bytes * height, row_bytes * height * depth,
                                   row_bytes * height * depth * IN_CHANNELS};
    const cuuint32_t box[5] = {COLUMNS, 2, static_cast<cuuint32_t>(layout.stage_planes), CHANNELS, 1};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<float*>(problem.x), sizes, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t launch_forward(const Problem& problem, const Result& result, float* segment_sums, Argmax* argmax,
                           float* segment_gradients, float* gradients) {
    const Shape& shape = problem.shape;
    const Layout layout(shape, problem.strict);
    const cudaStream_t stream = problem.stream;
    const Tensors tensors = {problem.x, problem.weight, segment_sums, segment_gradients ? segment_gradients : gradients,
                             reinterpret_cast<uint32_t*>(argmax)};
    const auto kernel = problem.strict ? (argmax ? stream_max_mean<true, true> : stream_max_mean<true, false>)
                                       : (argmax ? stream_max_mean<false, true> : stream_max_mean<false, false>);
    constexpr auto LIMIT = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(kernel, LIMIT, layout.bytes);
    if (error == cudaSuccess && gradients) error = cudaFuncSetAttribute(stream_weight_gradient, LIMIT, layout.bytes);
    if (error == cudaSuccess) error = encode_map(problem, layout, &map);
    if (error != cudaSuccess) return error;
    kernel<<<shape.blocks, THREADS, layout.bytes, stream>>>(map, shape, tensors, result);
    if (gradients)
        stream_weight_gradient<<<shape.blocks, THREADS, layout.bytes, stream>>>(map, shape, tensors.argmax,
                                                                                tensors.segment_gradients);
    if (segment_sums) finish_samples<<<shape.batch, WARP, 0, stream>>>(segment_sums, shape, result);
    if (segment_gradients)
        add_segments<<<shape.batch * WEIGHT_BLOCKS, SUM_THREADS, 0, stream>>>(segment_gradients, gradients, shape);
    return cudaSuccess;
}

#else

void plan(Problem& problem) {
    const Shape& s = problem.shape;
    problem.segments = s.batch * chunks_of(s);
    problem.largest_grid = s.batch * TAP_GROUPS + problem.segments * OUT_GROUPS + pixel_blocks(s);
}

cudaError_t launch_forward(const Problem& problem, const Result& result, float* segment_sums, Argmax* argmax, float*, float*) {
    const Shape& shape = problem.shape;
    plain_forward<<<problem.segments * OUT_GROUPS, WARP, 0, problem.stream>>>(
        shape, problem.x, problem.weight, copysignf(1, result.divisor), segment_sums, argmax);
    plain_finish<<<shape.batch, WARP, 0, problem.stream>>>(segment_sums, chunks_of(shape), result);
    return cudaSuccess;
}

#endif

void launch_gradients_from_argmax(const Problem& problem, const Argmax* argmax, float* gradients) {
    plain_weight_gradient<<<problem.shape.batch * TAP_GROUPS, WARP, 0, problem.stream>>>(problem.shape, problem.x, argmax,
                                                                                         gradients);
}

void launch_weighted_sum(const Problem& problem, const Upstream& upstream, const float* gradients, float* grad_weight) {
    weighted_sum<<<ceil_div(WEIGHTS, SUM_COLUMNS), SUM_COLUMNS * SUM_ROWS, 0, problem.stream>>>(
        gradients, upstream, problem.shape.batch, problem.gradient_scale(), grad_weight);
}

void launch_input_gradient(const Problem& problem, const Upstream& upstream, const Argmax* argmax, float* grad_x) {
    const Shape& shape = problem.shape;
#if FAST
    if (!problem.strict) {
        const int64_t lines = shape.batch * ceil_div(shape.depth, 2);
        const int sm_count = attribute(cudaDevAttrMultiProcessorCount);
        const bool paired = shape.width % 2 == 0 && reinterpret_cast<uintptr_t>(grad_x) % 8 == 0;
        const auto kernel = paired ? input_gradient<true> : input_gradient<false>;
        kernel<<<lines < sm_count ? lines : sm_count, INPUT_THREADS, 0, problem.stream>>>(
            reinterpret_cast<const uint32_t*>(argmax), problem.weight, upstream, shape, problem.gradient_scale(), grad_x);
        return;
    }
#endif
    plain_input_gradient<<<pixel_blocks(shape), PIXEL_THREADS, 0, problem.stream>>>(shape, problem.weight, argmax, upstream,
                                                                                    problem.gradient_scale(), grad_x);
}
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/version.h>

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

enum Reader { PLAIN, TMA };  // of x: TMA needs rows that begin at multiples of 16 bytes

// The input and weight of a pass, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    c10::cuda::CUDAGuard guard;
    at::Tensor x, weight;
    Problem problem;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, double divisor, at::IntArrayRef pool, bool strict, Reader reader)
        : guard(checked(x_in, weight_in, pool)), x(reader == TMA ? in_aligned_rows(x_in) : x_in.contiguous()),
          weight(weight_in.contiguous()), problem() {
        Shape& shape = problem.shape;
        shape.batch = x_in.size(0), shape.depth = x_in.size(2), shape.height = x_in.size(3), shape.width = x_in.size(4);
        shape.slabs = (shape.depth - KERNEL_D + 1) / POOL_D, shape.rows = (shape.height - KERNEL_H + 1) / POOL_H;
        shape.columns = (shape.width - KERNEL_W + 1) / POOL_W;
        problem.x = x.const_data_ptr<float>(), problem.weight = weight.const_data_ptr<float>();
        problem.divisor = divisor, problem.strict = strict, problem.stream = c10::cuda::getCurrentCUDAStream();
        int major = 0, minor = 0;
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device()));
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, x.get_device()));
        CHECK(major == 9 && minor == 0, "v5 expects a GPU of compute capability 9.0 (Hopper), got ", major, ".", minor,
              "; v4_tensor_core runs on 8.0 and later");
        if (shape.batch > 0) plan(problem);
        CHECK(problem.largest_grid < 1ll << 31, "the batch needs ", problem.largest_grid, " blocks, more than a grid has");
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

    // x, copied where its rows are no multiple of 16 bytes: into longer ones, whose ends are never read.
    static at::Tensor in_aligned_rows(const at::Tensor& x) {
        std::vector<int64_t> sizes = x.sizes().vec();
        if (sizes[4] % 4 == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0) return x.contiguous();
        sizes[4] = (sizes[4] + 3) / 4 * 4;
        at::Tensor rows = at::empty(sizes, x.options());
        rows.narrow(4, 0, x.size(4)).copy_(x);
        return rows;
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }

    static constexpr at::ScalarType ARGMAX = sizeof(Argmax) == 1 ? at::kByte : at::kInt;
    at::Tensor empty_argmax(bool keep) const {
        const Shape& s = problem.shape;
        return at::empty({keep ? s.batch : 0, s.slabs, s.rows, s.columns, PITCH}, x.options().dtype(ARGMAX));
    }
    at::Tensor checked_argmax(const at::Tensor& argmax) const {
        const Shape& s = problem.shape;
        const std::array<int64_t, 5> shape = {s.batch, s.slabs, s.rows, s.columns, PITCH};
        CHECK(argmax.scalar_type() == ARGMAX && argmax.sizes() == shape, "expected the argmax indices of x, ", ARGMAX,
              " of shape ", shape, ", got ", argmax.scalar_type(), " of shape ", argmax.sizes());
        check_device(x, "argmax", argmax);
        return argmax.contiguous();
    }
    at::Tensor checked_grad(const at::Tensor& grad) const {
        const int64_t batch = problem.shape.batch, all = batch * OUT_CHANNELS;
        CHECK(grad.scalar_type() == at::kFloat && (grad.numel() == batch || grad.numel() == all), "expected ", batch, " or ",
              all, " float32 gradients, got ", grad.scalar_type(), " ", grad.sizes());
        check_device(x, "grad", grad);
        return grad.contiguous();
    }
    Upstream upstream(const at::Tensor& grad) const {
        return {grad.const_data_ptr<float>(), grad.numel() == problem.shape.batch};
    }
};

static float* pointer(const at::Tensor& tensor) { return tensor.numel() ? tensor.mutable_data_ptr<float>() : nullptr; }
static Argmax* indices(const at::Tensor& tensor) {
    return tensor.numel() ? static_cast<Argmax*>(tensor.mutable_data_ptr()) : nullptr;
}

// The sum of each sample (batch, 1, 1, 1), or, without a bias, the average of each channel (batch, OUT_CHANNELS, 1, 1, 1).
// `argmax` and `gradients` are written where they are not empty; gradients need argmax, and are not strict.
static at::Tensor run_forward(const Call& call, const at::Tensor& conv_bias_in, const std::optional<at::Tensor>& bias_in,
                              const at::Tensor& argmax, const at::Tensor& gradients) {
    const Shape& shape = call.problem.shape;
    check("conv_bias", conv_bias_in, {OUT_CHANNELS});
    check_device(call.x, "conv_bias", conv_bias_in);
    const at::Tensor conv_bias = conv_bias_in.contiguous();
    at::Tensor bias, out = bias_in ? call.empty({shape.batch, 1, 1, 1}) : call.empty({shape.batch, OUT_CHANNELS, 1, 1, 1});
    if (bias_in) {
        CHECK(bias_in->scalar_type() == at::kFloat && (bias_in->numel() == 1 || bias_in->numel() == OUT_CHANNELS),
              "expected a float32 bias of 1 or ", OUT_CHANNELS, " values, got ", bias_in->scalar_type(), " ", bias_in->sizes());
        check_device(call.x, "bias", *bias_in);
        bias = bias_in->contiguous();
    }
    if (shape.batch == 0) return out;
    const int64_t segments = call.problem.segments;
    const at::Tensor segment_sums = call.empty({segments, PITCH});
    const at::Tensor segment_gradients = call.empty({gradients.numel() ? segments : 0, WEIGHTS});
    const Result result = {conv_bias.const_data_ptr<float>(), bias_in ? bias.const_data_ptr<float>() : nullptr,
                           bias_in ? static_cast<int>(bias.numel()) : 0, static_cast<float>(call.problem.divisor),
                           static_cast<float>(shape.windows()), out.mutable_data_ptr<float>()};
    C10_CUDA_CHECK(launch_forward(call.problem, result, pointer(segment_sums), indices(argmax), pointer(segment_gradients),
                                  pointer(gradients)));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

bool is_fast() { return FAST; }

// `strict` is for the autograd below. Without gradients nothing depends on it: PyTorch's setting at the call decides.
at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias,
                   const std::optional<at::Tensor>& bias, double divisor, at::IntArrayRef pool, bool /*strict*/) {
    const Call call(x, weight, divisor, pool, is_strict(), FAST ? TMA : PLAIN);
    return run_forward(call, conv_bias, bias, call.empty_argmax(false), call.empty({0, WEIGHTS}));
}

// Also each sample's gradients of the weights (batch, WEIGHTS), or none where these follow from the argmax indices; and these
// indices, or none where no gradient needs them. A compiled model's backward pass has the precision that it was compiled for.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_for_training(const at::Tensor& x, const at::Tensor& weight,
                                                                    const at::Tensor& conv_bias,
                                                                    const std::optional<at::Tensor>& bias, double divisor,
                                                                    at::IntArrayRef pool, bool for_x, bool for_weight,
                                                                    bool strict) {
    CHECK(strict == is_strict(), "called or compiled for ", strict ? "strict float32" : "TF32",
          " convolutions, but torch.backends.cudnn.conv.fp32_precision now ", strict ? "permits TF32" : "forbids it",
          "; after torch.compiler.reset() a model is compiled again");
    const Call call(x, weight, divisor, pool, strict, FAST ? TMA : PLAIN);
    const bool at_once = FAST && !strict && for_weight, keep = for_x || (for_weight && !at_once);
    at::Tensor gradients = call.empty({at_once ? call.problem.shape.batch : 0, WEIGHTS}), argmax = call.empty_argmax(keep);
    at::Tensor out = run_forward(call, conv_bias, bias, at_once && !keep ? call.empty_argmax(true) : argmax, gradients);
    return {out, gradients, argmax};
}

at::Tensor weight_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& gradients_in,
                       const at::Tensor& argmax, double divisor, at::IntArrayRef pool, bool strict) {
    const Call call(x, weight, divisor, pool, strict, PLAIN);
    const at::Tensor grad = call.checked_grad(grad_in);
    const int64_t batch = call.problem.shape.batch;
    const bool at_once = FAST && !strict;
    check("gradients", gradients_in, {at_once ? batch : 0, WEIGHTS});
    check_device(call.x, "gradients", gradients_in);
    at::Tensor gradients = gradients_in.contiguous(), grad_weight = call.empty(weight.sizes());
    if (batch == 0) return grad_weight.zero_();
    if (!at_once) {
        gradients = call.empty({batch, WEIGHTS});
        launch_gradients_from_argmax(call.problem, indices(call.checked_argmax(argmax)), pointer(gradients));
        C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    launch_weighted_sum(call.problem, call.upstream(grad), pointer(gradients), pointer(grad_weight));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_weight;
}

at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& argmax_in,
                      double divisor, at::IntArrayRef pool, bool strict) {
    const Call call(x, weight, divisor, pool, strict, PLAIN);
    const at::Tensor grad = call.checked_grad(grad_in), argmax = call.checked_argmax(argmax_in);
    at::Tensor grad_x = call.empty(x.sizes());
    if (call.problem.shape.batch == 0) return grad_x;
    launch_input_gradient(call.problem, call.upstream(grad), indices(argmax), pointer(grad_x));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_x;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("is_fast() -> bool", &is_fast);
    m.def("forward(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool, bool strict) -> "
          "Tensor", {at::Tag::pt2_compliant_tag});
    m.def("forward_for_training(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool, "
          "bool for_x, bool for_weight, bool strict) -> (Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor gradients, Tensor argmax, float divisor, int[3] pool, "
          "bool strict) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad, Tensor x, Tensor weight, Tensor argmax, float divisor, int[3] pool, bool strict) -> Tensor",
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
        const auto [out, gradients, argmax] = CALL(forward_for_training, x, weight, conv_bias, bias, divisor, pool,
                                                   x.requires_grad(), weight.requires_grad(), strict);
        context->save_for_backward({x, weight, gradients, argmax});
        context->saved_data["divisor"] = divisor;
        context->saved_data["strict"] = strict;
        context->saved_data["bias shape"] = bias ? bias->sizes().vec() : std::vector<int64_t>();
        context->saved_data["has bias"] = bias.has_value();
        return out;
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& outer) {
        const auto saved = context->get_saved_variables();
        const at::Tensor &grad = outer[0], &x = saved[0], &weight = saved[1], &gradients = saved[2], &argmax = saved[3];
        const double divisor = context->saved_data["divisor"].toDouble();
        const bool strict = context->saved_data["strict"].toBool();
        constexpr std::array<int64_t, 3> pool = {POOL_D, POOL_H, POOL_W};
        const bool needs_bias = context->saved_data["has bias"].toBool() && context->needs_input_grad(3);
        at::Tensor grad_x, grad_weight, grad_conv_bias, grad_bias;
        if (context->needs_input_grad(0)) grad_x = CALL(input_grad, grad, x, weight, argmax, divisor, pool, strict);
        if (context->needs_input_grad(1))
            grad_weight = CALL(weight_grad, grad, x, weight, gradients, argmax, divisor, pool, strict);
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
                                  const std::optional<at::Tensor>& bias, double divisor, at::IntArrayRef pool, bool strict) {
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
    is_fast = getattr(torch.ops, namespace).is_fast()

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, conv_bias, bias, divisor, pool, strict):
        return x.new_empty(x.shape[0], 1, 1, 1) if bias is not None else x.new_empty(x.shape[0], weight.shape[0], 1, 1, 1)

    @torch.library.register_fake(f"{namespace}::forward_for_training")
    def forward_for_training(x, weight, conv_bias, bias, divisor, pool, for_x, for_weight, strict):
        (batch, _, *size), (outs, _, *kernel) = x.shape, weight.shape
        windows = [(s - k + 1) // p for s, k, p in zip(size, kernel, pool, strict=True)]
        at_once = is_fast and not strict and for_weight
        keep = for_x or (for_weight and not at_once)
        kind = torch.uint8 if pool[0] * pool[1] * pool[2] <= 256 else torch.int32
        argmax = x.new_empty(batch if keep else 0, *windows, max(16, outs), dtype=kind)
        out = forward(x, weight, conv_bias, bias, divisor, pool, strict)
        return out, x.new_empty(batch if at_once else 0, weight.numel()), argmax

    for name, like in ("input_grad", 1), ("weight_grad", 2):  # which argument the gradient looks like
        fake = lambda *arguments, like=like: arguments[like].new_empty(arguments[like].shape)  # noqa: E731
        torch.library.register_fake(f"{namespace}::{name}", fake)


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
    # Bound here, so that another variant in the same notebook cannot replace them.
    sources = NAME, INTERFACE + BINDING, INTERFACE + CUDA, register

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
        if not hasattr(torch.backends.cudnn, "conv"):  # before PyTorch 2.9
            return not torch.backends.cudnn.allow_tf32
        return torch.backends.cudnn.conv.fp32_precision != "tf32"

    def forward(self, x):
        bias = self.bias if self.sums_channels else None
        operators = getattr(torch.ops, self.namespace())
        weight, conv_bias, strict = self.conv.weight, self.conv.bias, self.is_strict()
        out = operators.forward(x, weight, conv_bias, bias, self.divisor, self.pool_size, strict)
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
