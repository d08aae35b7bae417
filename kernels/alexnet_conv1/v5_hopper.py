"""alexnet_conv1, v5: warpgroups multiply scaled halves where they lie; producers load, scale and convert beside them.

In this text v4 is the first v4, with TF32 operands (see the ladder). Products are wgmma's here: in the forward pass on halves,
twice the rate of TF32, both operands from shared memory; in the gradient of the weights on TF32, one operand from registers.
Warpgroups of their own prepare what these read.

Why it is faster
    v4's eight warps load, convert, multiply and write in turn, and mma.sync keeps the tensor cores busy for half of the time. A
    half has TF32's 11 bits, if not its range, and wgmma multiplies it at twice the rate. Four columns of two rows of x are 16
    bytes of halves, and neighbouring outputs, at stride 4, read neighbouring pieces: so rows as they lie are wgmma's operand,
    and a tap is an address. Two warpgroups multiply, each at a tile of its own, so that one writes while the other multiplies;
    each has a warpgroup that fills its ring. What it costs: a scale that follows the data, 83 KB of weights in shared memory,
    and compute capability 9.0.

    design, H200, ms                 predicted  measured  v4     what was counted to bind it
    forward                          0.15       0.197     0.371  bytes 0.106; shared memory 0.100; products 0.073
    forward, strict: three products  0.35       0.490     1.05   shared memory 0.31; products 0.219
    gradients of weight and bias     0.20       0.287     0.454  products 0.120, shared memory 0.116
    training step, weights           0.40       0.478            forward and gradients
    Forward and step by the project's stopwatch in a CUDA graph; the gradients by PyTorch's profiler, as all that follows, from
    before every lane arrived at the rings' barriers for itself.
    Measured on the way, forward and strict: 0.245 and 0.583 with one warpgroup of producers for both rings (0.226 without the
    stores, 0.200 without the loads); 0.230 and 0.535 with one for each (0.201 with neither loads nor stores): instructions
    around products, loads and copies bind, not memory. Stores of 4 bytes, as v4's, take 0.255 where bulk copies take 0.245;
    asking for rows ahead with L2 prefetches made it slower, 0.246 instead of 0.230. Then those instructions were cut: an
    epilogue without branches, descriptors and bulk copies from uniform registers, half of the address arithmetic, 0.195 and
    0.494. (Kernels by PyTorch's profiler, L2 flushed; packing the weights adds 0.003.)
    The gradient's way, its main kernel alone (adding the splits' sums comes on top): v4's mma.sync 0.440. A wgmma on halves, x
    by ldmatrix, 0.515: dropped. Three warpgroups that multiply TF32 and one that produces: 0.415, where producers alone took
    0.253 and products alone 0.179. Its producers had a proxy fence, which waits for what a thread has asked for from memory, so
    nothing was ever asked for ahead: the fence is the readers' now. Each value of x was rounded 8 times, once for each tap that
    reads it: now once. Two warpgroups that multiply and two that produce: 0.282, where producers alone take 0.197 and products
    alone 0.162; products hold up the others' issue. To wait for each tile's products by themselves: 0.280, no gain.
    Adding the splits' sums: 0.025 with a thread a sum, 0.005 with eight. The gradient of the input is PyTorch's own
    convolution_backward, as in v4.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*4 - pad_w + v]
    Taps are taken in units of 2 rows and 4 columns, 11 x 11 as 12 x 12: of 432 of the inner size 363 are taps, the rest have
    weight zero. Positions are numbered along the rows of units, 57 of them for 55 outputs; two are computed in vain.

    x is scaled by a power of two for each span (at most 192 positions), weights for each output channel; these leave the sums
    as powers of two. A span's is taken from the first rows that are not all zeros: their largest magnitude comes to between
    2^10 and 2^11. Where a later value does not fit into a half then, the span begins anew with what that value calls for. So x
    is off by at most 2^-11 of itself, as in TF32, or by 2^-35 of the span's largest, whichever is more; weights by 2^-38 of the
    channel's largest, unless that is below 2^-48. Scaled products add up to less than 2^38, so fp32 holds them.

    NaN and infinities count in no scale. Zero weights would spread them to outputs whose windows do not hold them, so a span
    that reads one is computed a second way, in plain fp32 from x and the weights as they are: right, but slow, and so are the
    spans that its warpgroup has between two such.

    Where PyTorch permits TF32 to convolutions (torch.backends.cudnn.conv.fp32_precision or allow_tf32, read in each call) this
    is all. Otherwise x and weights are two halves each, high and low, which leaves 2^-22 of a number; the product is low * high
    + high * low + high * high. The tensor core cuts off what a sum does not hold, always towards zero; so strict sums begin
    anew with each channel and are added as fp32 numbers. An infinite weight gives NaN in strict sums.

    grad_weight[o,c,u,v] = sum over b,i,j of grad[b,o,i,j] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    is a product of taps times positions and positions times outputs, with v4's precision: TF32, or two TF32 values and three
    products. Taps are rows of the left operand, and each meets x as it lies, shifted by the tap: so lanes load it from rows of
    x, 8 taps at 4 positions at a time, all in different banks at a stride of 4. Each block adds its part of the output rows;
    add_splits adds the blocks'. grad_bias is the sum of grad in fp32.

Where to read
    The forward pass is `convolve`: producers run `produce` (load_batch, store_batch), multipliers run multiply_spans
    (multiply_stage, write_span); make_plan cuts a shape into lines and spans. The weights' gradient is weight_gradient:
    produce_gradient and multiply_gradient. What begins with general:: is plain fp32, for shapes that do not fit and for spans
    that read a NaN or an infinity.

Launches
    kernel           grid                                block  shared        work
    pack_weights     (output channels)                   128    0             a block a channel: its scale, and halves
    convolve         multiprocessors                     512    219 (218) KB  a warpgroup 192 positions x 96 (48) channels
    weight_gradient  multiprocessors                     512    206 (207) KB  a warpgroup 192 taps x 96 (48) channels
    add_splits       (sums of a block / 128)             256    4 KB          a warp an eighth of the blocks, for 128 sums
    general::*       (outputs / 256), (weights / 8)      256    0             see v1; a warp a weight's gradient

    In brackets: strict. Sizes are those of the original. A stage of convolve is a channel's rows for a span, 12 KB as halves
    (strict: 25), with 4 (2) in each ring. Outputs go out through 3 buffers of 8 channels for each warpgroup, 6 KB each. A stage
    of weight_gradient is an output row: 96 channels of grad, 21 KB, and the 11 rows of x that it meets, in a ring of 44 that
    have room for four stages.

Floor
    Forward: 154 MB in, 297 MB out, 0.106 ms on an H200; 54 GFLOP at the 767 TFLOP/s that halves reach in large products, 0.070.
    Counted for a multiprocessor, in thousands of cycles at 1.755 GHz (33 spans; strict: 66):
                                  forward  strict
    products                      128      385
    shared memory, wavefronts     175      550
    of these: operands            107      449
    19% of the inner size is padding, and 8% of the positions. A channel's run in a span is 181 floats, and planes of 3025 begin
    at any float: spans overlap by 3 positions, so that runs begin where 16 bytes do, and 9.7 million sectors are written, 9.3
    at least.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) on a GPU of compute capability 9.0, of any strides, batch 0
    included; any channels, kernel, stride, padding and image size (below 2^30 rows and columns), bias or none. The warpgroups
    serve a stride of 4 across and an even one down, where the weights for 48 output channels and the rows fit into a block's
    shared memory: with 3 channels, kernels up to 20 x 20. What does not fit goes through plain fp32 kernels in this file:
    right, but slow. Rows of some hundred outputs and more are lines of their own, cut into spans; narrow images waste the units
    between their rows. The gradients' serve any stride, and kernels of at most 384 taps whose rows fit twice. Dilation, groups
    and padding modes other than the default raise, and so does anything else. Trains, and computes only the gradients that are
    asked for; second derivatives raise, and so do forward-mode ones. Deterministic on a GPU; the gradients of another number of
    multiprocessors add in another order.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v5_hopper"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <initializer_list>

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int WARP = 32, WARPS = 8, THREADS = WARP * WARPS;
constexpr int MAX_SHARED_BYTES = 227 * 1024;  // of any device so far

constexpr int TAPS = KERNEL_H * KERNEL_W, QUADS = ceil_div(KERNEL_W, 4);  // groups of 4 taps side by side
constexpr int64_t WEIGHTS = static_cast<int64_t>(OUT_CHANNELS) * IN_CHANNELS * TAPS;

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
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ float to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void bulk_store(float* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
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
__device__ __forceinline__ float load1(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void store1(uint32_t address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store2_if(bool exists, uint32_t address, uint32_t a, uint32_t b) {
    asm volatile(
        "{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0;\n@exists st.shared.v2.u32 [%0], {%1, %2};\n}" ::"r"(address), "r"(a),
        "r"(b), "r"(static_cast<uint32_t>(exists))
        : "memory");
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
// d (64 x 96 or 64 x 48) = or += a (64 x 16) * b (16 x 96 or 48), halves in shared memory, given by their descriptors. A warp
// has 16 rows of d, with g = lane / 4 and t = lane % 4: columns 8j + 2t and 8j + 2t + 1 of row g, then of row g + 8.
__device__ __forceinline__ void multiply(float(&d)[48], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, accumulate, 1, 1, 0, 0;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40)
        : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void multiply(float(&d)[24], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
        "%24, %25, accumulate, 1, 1, 0, 0;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16)
        : "l"(a), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ uint32_t half_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// What rounding to a half leaves of x; nothing of an infinity.
__device__ __forceinline__ float half_rest(float x) { return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x)); }
__device__ __forceinline__ float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
template <class T>
__host__ __device__ __forceinline__ T larger(T a, T b) {
    return a > b ? a : b;
}
__device__ __forceinline__ uint32_t warp_max(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }
// v, which is the same in all lanes, so that the compiler knows it: descriptors and bulk copies are asked for with registers of
// the warp.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }
__device__ __forceinline__ uint64_t uniform(uint64_t v) {
    const uint32_t upper = uniform(static_cast<int>(v >> 32)), lower = uniform(static_cast<int>(v));
    return static_cast<uint64_t>(upper) << 32 | lower;
}

// A number as two TF32 values: high is rounded to 11 bits, as cvt.rna does it, but without its care for NaNs, which costs more
// instructions. Of low the tensor core drops the last bit, which errs up as often as down. Infinities and NaNs have NaN there.
struct Split {
    float high, low;
};
__device__ __forceinline__ Split split(float v) {
    const float high = __uint_as_float((__float_as_uint(v) + 0x1000u) & 0xffffe000u);
    return {high, v - high};
}

// ---- the work
struct Shape {
    int64_t batch;
    int height, width, out_h, out_w;
    int runs;     // of an output row: see the gradient
    bool paired;  // rows of x begin at multiples of 8 bytes, and so do pairs of columns that exist

    __device__ __forceinline__ int64_t plane() const { return static_cast<int64_t>(height) * width; }
    __device__ __forceinline__ int64_t out_plane() const { return static_cast<int64_t>(out_h) * out_w; }
    __host__ __device__ __forceinline__ int64_t out_rows() const { return batch * runs * out_h; }  // runs of them
};

// ---- an output in plain fp32
__device__ __forceinline__ float plain_output(const Shape& shape, const float* __restrict__ x, const float* __restrict__ weight,
                                        const float* __restrict__ bias, int64_t sample, int o, int i, int j) {
    const int top = i * STRIDE_H - PAD_H, left = j * STRIDE_W - PAD_W;
    float sum = 0;
#pragma unroll 1
    for (int c = 0; c < IN_CHANNELS; ++c) {
        const float* plane = x + (sample * IN_CHANNELS + c) * shape.plane();
        const float* taps = weight + (static_cast<int64_t>(o) * IN_CHANNELS + c) * TAPS;
#pragma unroll 1
        for (int k = 0; k < TAPS; ++k) {
            const int h = top + k / KERNEL_W, w = left + k % KERNEL_W;
            const bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
            if (inside) sum += plane[static_cast<int64_t>(h) * shape.width + w] * taps[k];
        }
    }
    return bias ? sum + bias[o] : sum;
}

// ---- forward: positions x taps times taps x outputs, both as halves in shared memory
// A unit is 16 bytes of halves: 4 columns of 2 rows of x, columns 0 and 1 of both rows first. Output positions side by side
// read units side by side, so eight of them are a core matrix of wgmma as they lie, and another tap is another address. Row
// pairs are sorted by their remainder modulo PHASES into planes: within a plane the next output row reads the next row.
constexpr bool FITS_UNITS = STRIDE_W == 4 && STRIDE_H % 2 == 0;
constexpr int PHASES = ceil_div(STRIDE_H, 2), TAP_PAIRS = ceil_div(KERNEL_H, 2);
constexpr int PLANES = smaller(PHASES, TAP_PAIRS), TAP_ROWS = ceil_div(TAP_PAIRS, PHASES);
// A position's units in a channel: [plane][row][column]. A step is one instruction's inner size, two of them.
constexpr int UNITS = PLANES * TAP_ROWS * QUADS, STEPS = ceil_div(UNITS, 2), UNIT_BYTES = 16;
[[maybe_unused]] constexpr int UNROLLED_STEPS = STEPS <= 16 ? STEPS : 1;

// Two warpgroups multiply, each M_TILES x 64 positions at a time, and each has a warpgroup of producers.
constexpr int WARPGROUP = 128, MULTIPLIERS = 2, STREAM_THREADS = 2 * MULTIPLIERS * WARPGROUP;
constexpr int M_TILES = 3, POSITIONS = 64 * M_TILES;
constexpr int PRODUCER_REGISTERS = 72, MULTIPLIER_REGISTERS = 184;  // a thread of each has 128 as launched
constexpr int MOST_OUTS = 96, FEW_OUTS = 48;                        // of a block; strict takes as many weights for fewer

// A line is output positions that lie side by side in memory: a channel's whole plane, or a row of it where the image is so
// wide that a stage would be too large. A span is a tile's part of a line. Stages hold `rows` rows of each plane, `pitch` units
// in each, of which `columns` begin at a position. Spans overlap by the OVERLAP positions that let each channel's part of the
// output begin where 16 bytes do.
constexpr int OVERLAP = 3;
struct Plan {
    bool by_rows;
    int positions, columns, pitch, rows, lines, step, outs, places;  // positions: of a span, those between columns included
    int blocks;                                                      // that share the spans: of a group of outputs
    int64_t line, spans, all_spans;                                  // positions; spans of a line, and of the whole batch

    __host__ __device__ __forceinline__ int stage_bytes(bool strict) const {
        return (strict ? 2 : 1) * PLANES * rows * pitch * UNIT_BYTES;
    }
    __host__ __device__ __forceinline__ int groups() const { return ceil_div(OUT_CHANNELS, outs); }
};

struct Span {
    int64_t sample, line, begin, end;  // positions: of the line in its plane, of the span in its line
    int row, left, column;             // of the output: the stage's first; and the first position's column in the stage
    bool is_first, is_last;            // of its line

    __device__ __forceinline__ void set(const Shape& shape, const Plan& plan, int64_t number) {
        const int64_t in_order = number / plan.spans, k = number - in_order * plan.spans;
        sample = in_order / plan.lines;
        begin = k * plan.step;
        is_first = k == 0, is_last = k + 1 == plan.spans;
        end = is_last ? plan.line : begin + plan.step;
        if (plan.by_rows) {
            row = static_cast<int>(in_order - sample * plan.lines), left = static_cast<int>(begin), column = 0;
            line = static_cast<int64_t>(row) * shape.out_w;
        } else {
            row = static_cast<int>(begin / shape.out_w), left = 0;
            column = static_cast<int>(begin - static_cast<int64_t>(row) * shape.out_w);
            line = 0;
        }
    }
    // Rows of each plane that the products read.
    __device__ __forceinline__ int rows(const Plan& plan) const {
        return (column + plan.positions - 1 + QUADS - 1) / plan.pitch + TAP_ROWS;
    }
};

// The spans that a multiplier of a block has.
__device__ __forceinline__ int64_t span_number(const Plan& plan, int ordinal, int multiplier) {
    return blockIdx.x / plan.groups() + (static_cast<int64_t>(ordinal) * MULTIPLIERS + multiplier) * plan.blocks;
}

// ---- its shared memory: weights, a ring of stages for each multiplier, outputs on their way out, and small things
constexpr int STAGING_ROW = POSITIONS + 4, STAGING_ROWS = 8, STAGING = STAGING_ROWS * STAGING_ROW;  // floats
constexpr int STAGING_BUFFERS = 3;
__host__ __device__ constexpr int64_t weight_units(int outs) { return static_cast<int64_t>(IN_CHANNELS) * STEPS * 2 * outs; }

// What a multiplier has to know of a stage.
struct StageNote {
    int exponent;  // x was scaled by 2^exponent
    int is_first, is_last;
    int plain;  // the span has a NaN or an infinity: its outputs are to be computed without the tensor core
};

struct StreamMemory {
    int weights, stages, staging, scales, notes, largest, barriers;
    int64_t bytes;

    __host__ __device__ __forceinline__ StreamMemory(const Plan& plan, bool strict) {
        const int64_t weight_bytes = (strict ? 2 : 1) * weight_units(plan.outs) * UNIT_BYTES;
        const int64_t stage_bytes = static_cast<int64_t>(MULTIPLIERS) * plan.places * plan.stage_bytes(strict);
        const int64_t staging_bytes = MULTIPLIERS * STAGING_BUFFERS * STAGING * 4;
        weights = 0, stages = weight_bytes, staging = weight_bytes + stage_bytes;
        scales = weight_bytes + stage_bytes + staging_bytes;
        notes = scales + 2 * plan.outs * 4;
        largest = notes + MULTIPLIERS * plan.places * static_cast<int>(sizeof(StageNote));
        barriers = largest + MULTIPLIERS * 2 * (WARPGROUP / WARP) * 4;
        bytes = weight_bytes + stage_bytes + staging_bytes + (barriers - scales) + (2 * MULTIPLIERS * plan.places + 1) * 8;
    }
};

// A place in a ring, and the parity of the barriers' phases there.
struct Turn {
    int place = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int places) {
        if (++place == places) place = 0, parity ^= 1;
    }
};

// The ring of one multiplier.
struct Ring {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    StageNote* notes;
    int stage_bytes, places;

    __device__ __forceinline__ Ring(char* memory, const StreamMemory& at, const Plan& plan, bool strict, int multiplier) {
        stage_bytes = plan.stage_bytes(strict), places = plan.places;
        data = shared_address(memory + at.stages) + multiplier * places * stage_bytes;
        notes = reinterpret_cast<StageNote*>(memory + at.notes) + multiplier * places;
        barriers = shared_address(memory + at.barriers) + 8 + multiplier * places * 16;
    }
    __device__ __forceinline__ uint32_t address(const Turn& turn) const { return data + turn.place * stage_bytes; }
    __device__ __forceinline__ uint32_t full(int place) const { return barriers + place * 8; }
    __device__ __forceinline__ uint32_t empty(int place) const { return barriers + (places + place) * 8; }
    __device__ __forceinline__ void wait_full(const Turn& turn) const { wait(full(turn.place), turn.parity); }
    __device__ __forceinline__ void wait_empty(const Turn& turn) const { wait(empty(turn.place), turn.parity ^ 1); }
    // Each lane arrives for itself.
    __device__ __forceinline__ void arrive_full(const Turn& turn) const { arrive(full(turn.place)); }
    __device__ __forceinline__ void arrive_empty(const Turn& turn) const { arrive(empty(turn.place)); }
};

// ---- powers of two
constexpr float LARGEST_POWER = 0x1p127f;
__device__ __forceinline__ float power_of_2(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
__device__ __forceinline__ int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}

// ---- weights as right operands: [group of outputs][high, low][channel][unit][output], 16 bytes each; then what undoes their
// scales. A block an output channel.
constexpr int WEIGHT_TARGET = 14, MOST_WEIGHT_EXPONENT = 62;  // so that a factor of two scales cannot be too small
__host__ __device__ constexpr int64_t packed_floats(int outs, bool strict) {
    return ceil_div(OUT_CHANNELS, outs) * ((strict ? 2 : 1) * weight_units(outs) * (UNIT_BYTES / 4) + outs);
}

__global__ void __launch_bounds__(WARPGROUP)
    pack_weights(const float* __restrict__ weight, uint4* __restrict__ packed, int outs, bool strict) {
    __shared__ uint32_t warp_largest[WARPGROUP / WARP];
    const int o = blockIdx.x, group = o / outs, groups = ceil_div(OUT_CHANNELS, outs);
    const float* const mine = weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS;
    uint32_t largest = 0;  // magnitudes are ordered as their bits are
    if (o < OUT_CHANNELS)
        for (int i = threadIdx.x; i < IN_CHANNELS * TAPS; i += WARPGROUP)
            largest = larger(largest, __float_as_uint(finite_or_zero(fabsf(mine[i]))));
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (int warp = 0; warp < WARPGROUP / WARP; ++warp) largest = larger(largest, warp_largest[warp]);
    const int exponent = smaller(scale_exponent(__uint_as_float(largest), WEIGHT_TARGET), MOST_WEIGHT_EXPONENT);
    const int64_t part = weight_units(outs);
    for (int i = threadIdx.x; i < IN_CHANNELS * STEPS * 2; i += WARPGROUP) {
        const int channel = i / (2 * STEPS), unit = i % (2 * STEPS);
        const int pair = unit / QUADS % TAP_ROWS * PHASES + unit / (QUADS * TAP_ROWS);
        float w[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int u = 2 * pair + e / 2 % 2, v = unit % QUADS * 4 + e / 4 * 2 + e % 2;
            const bool exists = o < OUT_CHANNELS && unit < UNITS && u < KERNEL_H && v < KERNEL_W;
            w[e] = exists ? mine[channel * TAPS + u * KERNEL_W + v] * power_of_2(exponent) : 0;
        }
        uint4* const to = packed + group * (strict ? 2 : 1) * part + static_cast<int64_t>(i) * outs + o % outs;
        to[0] = make_uint4(half_pair(w[0], w[1]), half_pair(w[2], w[3]), half_pair(w[4], w[5]), half_pair(w[6], w[7]));
        if (!strict) continue;
#pragma unroll
        for (int e = 0; e < 8; ++e) w[e] = half_rest(w[e]);
        to[part] = make_uint4(half_pair(w[0], w[1]), half_pair(w[2], w[3]), half_pair(w[4], w[5]), half_pair(w[6], w[7]));
    }
    float* const unscales = reinterpret_cast<float*>(packed + groups * (strict ? 2 : 1) * part);
    if (threadIdx.x == 0) unscales[o] = power_of_2(-exponent);
}

// ---- producing
// Loads go ahead by a batch: 8 row pairs x 128 column pairs of a stage, of which a warp has every fourth row pair. Halves have
// TF32's 11 bits, but not its range: so a span's values are scaled by a power of two. It is taken from the span's first batch
// that is not all zeros, with room for values 31 times as large. Where a later batch needs more, the span begins anew.
constexpr int PRODUCER_WARPS = WARPGROUP / WARP, BATCH_PAIRS = 2, BATCH_PASSES = 4;
constexpr int FIRST_TARGET = 11, NO_EXPONENT = 1000;
constexpr float LARGEST_HALF = 65504;
constexpr uint32_t INFINITE = 0x7f800000u;

struct Source {
    const float* sample;                          // of x
    int row, left, row_pairs;                     // as a span has them; row pairs that its products read
    int ordinal, channel, row_pair, column_pair;  // of the span among those of the producers; of the batch, its first

    // Where there is such a span.
    __device__ __forceinline__ bool begin_span(const float* x, const Shape& shape, const Plan& plan, int64_t number) {
        if (number >= plan.all_spans) return false;
        Span span;
        span.set(shape, plan, number);
        sample = x + span.sample * IN_CHANNELS * shape.plane();
        row = span.row, left = span.left, row_pairs = span.rows(plan) * PLANES;
        begin_attempt();
        return true;
    }
    __device__ __forceinline__ void begin_attempt() { channel = 0, row_pair = 0, column_pair = 0; }
    __device__ __forceinline__ bool begins_stage() const { return row_pair == 0 && column_pair == 0; }
    // To the next batch; whether that is in another stage.
    __device__ __forceinline__ bool next(const Plan& plan) {
        column_pair += WARP * BATCH_PASSES;
        if (column_pair < 2 * plan.pitch) return false;
        column_pair = 0, row_pair += PRODUCER_WARPS * BATCH_PAIRS;
        if (row_pair < row_pairs) return false;
        row_pair = 0, ++channel;
        return true;
    }
};

using Batch = float2[BATCH_PAIRS][BATCH_PASSES][2];  // [..][..][row]

// The first row of a pair: pairs of one row of all planes come before those of the next.
__device__ __forceinline__ int row_of_pair(int pair) {
    return PLANES == PHASES ? 2 * pair : pair / PLANES * STRIDE_H + 2 * (pair % PLANES);
}

// PAIRED: rows of x begin at multiples of 8 bytes, and pairs of columns exist as a whole or not at all.
template <bool PAIRED>
__device__ __forceinline__ void load_batch(const Shape& shape, const Plan& plan, const Source& source, Batch& values) {
    const int warp = threadIdx.x / WARP % PRODUCER_WARPS, lane = threadIdx.x % WARP;
    const int first_pair = source.column_pair + lane, w = source.left * STRIDE_W - PAD_W + 2 * first_pair;
    bool left_exists[BATCH_PASSES], right_exists[BATCH_PASSES];  // of a pair of columns
#pragma unroll
    for (int k = 0; k < BATCH_PASSES; ++k) {
        const bool in_stage = first_pair + WARP * k < 2 * plan.pitch;
        const unsigned column = w + 2 * WARP * k, width = shape.width;  // less than 0 is very large
        left_exists[k] = in_stage && column < width;
        right_exists[k] = PAIRED ? left_exists[k] : in_stage && column + 1 < width;
    }
    const float* const plane = source.sample + source.channel * shape.plane() + w;
    const int top = source.row * STRIDE_H - PAD_H;
#pragma unroll
    for (int i = 0; i < BATCH_PAIRS; ++i) {
        const int pair = source.row_pair + i * PRODUCER_WARPS + warp, h = top + row_of_pair(pair);
        const float* row = plane + static_cast<int64_t>(h) * shape.width;
#pragma unroll
        for (int r = 0; r < 2; ++r, row += shape.width) {
            const bool row_exists =
                pair < source.row_pairs && static_cast<unsigned>(h + r) < static_cast<unsigned>(shape.height);
#pragma unroll
            for (int k = 0; k < BATCH_PASSES; ++k) {
                float2& v = values[i][k][r];
                v = make_float2(0, 0);
                if constexpr (PAIRED) {
                    if (row_exists && left_exists[k]) v = __ldg(reinterpret_cast<const float2*>(row + 2 * WARP * k));
                } else {
                    if (row_exists && left_exists[k]) v.x = __ldg(row + 2 * WARP * k);
                    if (row_exists && right_exists[k]) v.y = __ldg(row + 2 * WARP * k + 1);
                }
            }
        }
    }
}

// The bits of the batch's largest magnitude, of all producers: two calls with one `slot` have another one between them.
__device__ __forceinline__ uint32_t largest_of_batch(const Batch& values, uint32_t* warp_largest, int slot, int barrier) {
    int largest_positive = 0;  // numbers of one sign are ordered as their bits are
    uint32_t largest_negative = 0;
#pragma unroll
    for (int i = 0; i < BATCH_PAIRS * BATCH_PASSES * 2; ++i) {
        const float2 v = values[i / (2 * BATCH_PASSES)][i / 2 % BATCH_PASSES][i % 2];
        const uint32_t x = __float_as_uint(v.x), y = __float_as_uint(v.y);
        largest_positive = larger(largest_positive, larger(static_cast<int>(x), static_cast<int>(y)));
        largest_negative = larger(largest_negative, larger(x, y));
    }
    uint32_t largest = larger(static_cast<uint32_t>(largest_positive), largest_negative & 0x7fffffffu);
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) warp_largest[slot * PRODUCER_WARPS + threadIdx.x / WARP % PRODUCER_WARPS] = largest;
    named_barrier(barrier, WARPGROUP);
#pragma unroll
    for (int warp = 0; warp < PRODUCER_WARPS; ++warp) largest = larger(largest, warp_largest[slot * PRODUCER_WARPS + warp]);
    return largest;
}

template <bool STRICT>
__device__ __forceinline__ void store_batch(uint32_t stage, const Plan& plan, const Source& source, float scale,
                                            const Batch& values) {
    const int warp = threadIdx.x / WARP % PRODUCER_WARPS, lane = threadIdx.x % WARP;
    const int first_pair = source.column_pair + lane;
#pragma unroll
    for (int i = 0; i < BATCH_PAIRS; ++i) {
        const int pair = source.row_pair + i * PRODUCER_WARPS + warp;
        const int row = pair % PLANES * plan.rows + pair / PLANES;  // of all planes
        const uint32_t to = stage + row * plan.pitch * UNIT_BYTES + first_pair * (UNIT_BYTES / 2);
#pragma unroll
        for (int k = 0; k < BATCH_PASSES; ++k) {
            const bool exists = pair < source.row_pairs && first_pair + WARP * k < 2 * plan.pitch;
            float v[4];
#pragma unroll
            for (int r = 0; r < 2; ++r) v[2 * r] = values[i][k][r].x * scale, v[2 * r + 1] = values[i][k][r].y * scale;
            store2_if(exists, to + WARP * k * (UNIT_BYTES / 2), half_pair(v[0], v[1]), half_pair(v[2], v[3]));
            if (STRICT)
                store2_if(exists, to + plan.stage_bytes(false) + WARP * k * (UNIT_BYTES / 2),
                          half_pair(half_rest(v[0]), half_rest(v[1])), half_pair(half_rest(v[2]), half_rest(v[3])));
        }
    }
}

template <bool STRICT, bool PAIRED>
__device__ __forceinline__ void produce(const float* __restrict__ x, const Shape& shape, const Plan& plan, char* memory,
                                        const StreamMemory& at, int multiplier) {
    uint32_t* const warp_largest = reinterpret_cast<uint32_t*>(memory + at.largest) + multiplier * 2 * PRODUCER_WARPS;
    const Ring ring(memory, at, plan, STRICT, multiplier);
    Turn turn;
    Source source;
    source.ordinal = 0;
    if (!source.begin_span(x, shape, plan, span_number(plan, 0, multiplier))) return;
    Batch values;
    load_batch<PAIRED>(shape, plan, source, values);
    int exponent = NO_EXPONENT, slot = 0;
    bool plain = false;
#pragma unroll 1
    while (true) {
        const uint32_t largest = largest_of_batch(values, warp_largest, slot, 1 + MULTIPLIERS + multiplier);
        slot ^= 1;
        if (largest >= INFINITE) {
            plain = true;
        } else if (!plain && largest > 0) {
            const bool begins = exponent == NO_EXPONENT;
            if (begins || __uint_as_float(largest) * power_of_2(exponent) > LARGEST_HALF) {
                exponent = scale_exponent(__uint_as_float(largest), FIRST_TARGET);
                if (!begins) {
                    source.begin_attempt();
                    load_batch<PAIRED>(shape, plan, source, values);
                    continue;
                }
            }
        }
        if (source.begins_stage()) ring.wait_empty(turn);
        const int used_exponent = exponent == NO_EXPONENT ? 0 : exponent;
        store_batch<STRICT>(ring.address(turn), plan, source, power_of_2(used_exponent), values);
        if (source.next(plan)) {
            const bool is_last = source.channel == IN_CHANNELS;
            if (threadIdx.x % WARPGROUP == 0) {
                StageNote& note = ring.notes[turn.place];
                note.exponent = used_exponent, note.is_first = source.channel == 1, note.is_last = is_last, note.plain = plain;
            }
            async_proxy_fence();
            ring.arrive_full(turn);
            turn.advance(plan.places);
            if (is_last) {
                ++source.ordinal;
                if (!source.begin_span(x, shape, plan, span_number(plan, source.ordinal, multiplier))) break;
                exponent = NO_EXPONENT, plain = false;
            }
        }
        load_batch<PAIRED>(shape, plan, source, values);
    }
}

// ---- multiplying
// Descriptors of matrices without swizzle, made of core matrices of 8 rows x 16 bytes. Those adjacent in the rows are 128 bytes
// apart, those adjacent in k `adjacent_k` units. Addresses have 18 bits, so that offsets, in units, never leave their field.
__device__ __forceinline__ uint64_t descriptor(int unit, int adjacent_k) {
    return static_cast<uint64_t>(128 / UNIT_BYTES) << 32 | static_cast<uint32_t>(unit + (adjacent_k << 16));
}

template <int OUTS>
using Sums = float[M_TILES][OUTS / 2];

// sums (or, where `accumulate` is 0, zeros) += the products of a stage's taps, at TILES x 64 positions. `x` and `weights` are
// in units of shared memory, x from the first position on.
template <int TILES, int OUTS>
__device__ __forceinline__ void multiply_stage(int x, int weights, const Plan& plan, int accumulate,
                                               float(&sums)[TILES][OUTS]) {
    const int pitch = plan.pitch, plane = plan.rows * pitch;
    const auto unit_offset = [&](int unit) {
        return unit / (QUADS * TAP_ROWS) * plane + unit / QUADS % TAP_ROWS * pitch + unit % QUADS;
    };
#pragma unroll (UNROLLED_STEPS)
    for (int step = 0; step < STEPS; ++step) {
        const int first = unit_offset(2 * step), second = unit_offset(smaller(2 * step + 1, UNITS - 1));
#pragma unroll
        for (int m = 0; m < TILES; ++m)
            multiply(sums[m], descriptor(x + 64 * m + first, second - first),
                     descriptor(weights + 2 * step * (2 * OUTS), 2 * OUTS), accumulate || step > 0);
    }
}

// A span's output in one channel of those that a block has. Positions [first, last), counted from the span's first, begin where
// 16 bytes do unless the line begins there.
struct ChannelRange {
    float* out;              // the span's first position
    int shift, first, last;  // shift: of that position, in floats from 16 bytes

    __device__ __forceinline__ ChannelRange(float* plane, const Span& span) {
        out = plane + span.line + span.begin;
        const int size = static_cast<int>(span.end - span.begin);
        shift = misalignment(out);
        first = span.is_first ? 0 : (4 - shift) % 4;
        last = span.is_last ? size : size + (4 - misalignment(out + size)) % 4;
    }
    static __device__ __forceinline__ int misalignment(const float* p) { return reinterpret_cast<uintptr_t>(p) / 4 % 4; }
};

// The part of it that goes by a bulk copy, in whole 16 bytes: [whole_first, whole_last). Up to three positions are before and
// after, at the ends of a line.
struct ChannelParts {
    ChannelRange range;
    int whole_first, whole_last;

    __device__ __forceinline__ ChannelParts(float* plane, const Span& span) : range(plane, span) {
        whole_first = smaller(range.first + (4 - (range.shift + range.first) % 4) % 4, range.last);
        whole_last = larger(range.last - (range.shift + range.last) % 4, whole_first);
    }
    // The position that one of 6 threads writes, where it exists.
    __device__ __forceinline__ int single(int thread) const {
        return thread < 3 ? range.first + thread : whole_last + thread - 3;
    }
    __device__ __forceinline__ bool has_single(int thread) const {
        return thread < 3 ? single(thread) < whole_first : thread < 6 && single(thread) < range.last;
    }
};

// Writes the outputs of a span. Through shared memory, 8 channels at a time: a channel's positions lie there as they will lie
// in device memory, and go there by bulk copies of whole 16 bytes. Single floats remain at the ends of a line.
template <int OUTS>
__device__ __forceinline__ void write_span(const Sums<OUTS>& sums, const Shape& shape, const Plan& plan, const Span& span,
                                           int exponent, const float* scales, float* staging, float* __restrict__ out,
                                           int channels, int multiplier) {
    const int warp = uniform(static_cast<int>(threadIdx.x / WARP % 4));
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int64_t out_plane = shape.out_plane();
    // Of the lane's positions in the span, in bytes. What is computed in vain, between the rows, goes to the end.
    int places[2 * M_TILES];
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const int unit = span.column + i / 2 * 64 + warp * 16 + g + i % 2 * 8, row = unit / plan.pitch;
        const int column = unit - row * plan.pitch, in_vain = row * (plan.pitch - plan.columns) + column - plan.columns;
        places[i] = (column < plan.columns ? row * plan.columns + column - span.column : POSITIONS - 1 - in_vain) * 4;
    }
    const uint32_t first_staged = shared_address(staging);
    const ChannelRange lane_ranges[2] = {{out + 2 * t * out_plane, span}, {out + (2 * t + 1) * out_plane, span}};
    const uint32_t lane_row = first_staged + (2 * t * STAGING_ROW + lane_ranges[0].shift) * 4;
    const uint32_t next_row = first_staged + ((2 * t + 1) * STAGING_ROW + lane_ranges[1].shift) * 4;
    // Two channels of each 8 go out by a warp: one lane asks for the bulk copies, six write what is before and after those.
    float* const out_begin = reinterpret_cast<float*>(uniform(reinterpret_cast<uint64_t>(out + span.line + span.begin)));
    int whole_first[2], whole_bytes[2], whole_from[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const ChannelParts parts(out + (2 * warp + r) * out_plane, span);
        whole_first[r] = uniform(parts.whole_first), whole_bytes[r] = uniform((parts.whole_last - parts.whole_first) * 4);
        whole_from[r] = uniform(static_cast<int>(first_staged) +
                                ((2 * warp + r) * STAGING_ROW + parts.range.shift + parts.whole_first) * 4);
    }
    const int single_row = 2 * warp + lane / 16;
    const ChannelParts mine(out + single_row * out_plane, span);
    const int single = mine.single(lane % 16), single_place = single_row * STAGING_ROW + mine.range.shift + single;
    const bool has_single = mine.has_single(lane % 16);
    const float half_unscale = power_of_2(-exponent / 2), other_half = power_of_2(-exponent - -exponent / 2);
#pragma unroll
    for (int j = 0; j < OUTS / 8; ++j) {
        const int buffer = j % STAGING_BUFFERS * STAGING;
        const float2 unscale = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * t);
        const float2 bias = *reinterpret_cast<const float2*>(scales + OUTS + 8 * j + 2 * t);
        const float factor_x = fminf(half_unscale * unscale.x, LARGEST_POWER);
        const float factor_y = fminf(half_unscale * unscale.y, LARGEST_POWER);
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; ++i) {
            const float(&tile)[OUTS / 2] = sums[i / 2];
            const int first = 4 * j + i % 2 * 2;
            const float left = fmaf(tile[first] * factor_x, other_half, bias.x);
            const float right = fmaf(tile[first + 1] * factor_y, other_half, bias.y);
            store1(lane_row + places[i] + buffer * 4, left);
            store1(next_row + places[i] + buffer * 4, right);
        }
        async_proxy_fence();
        if (lane == 0) store_wait_read<STAGING_BUFFERS - 2>();  // then the buffer of the next 8 is free
        named_barrier(multiplier, WARPGROUP);
        if (lane == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int channel = 8 * j + 2 * warp + r;
                if (channel < channels && whole_bytes[r] > 0)
                    bulk_store(out_begin + channel * out_plane + whole_first[r], whole_from[r] + buffer * 4, whole_bytes[r]);
            }
            store_commit();
        }
        if (has_single && 8 * j + single_row < channels)
            out_begin[(8 * j + single_row) * out_plane + single] = staging[buffer + single_place];
    }
}

struct Tensors {
    const float* __restrict__ x;
    const float* __restrict__ weight;
    const float* __restrict__ bias;  // or null
    float* __restrict__ out;
};

// A span's outputs without the tensor core, from x and the weights as they are, by a warpgroup.
__device__ __forceinline__ void write_span_plainly(const Shape& shape, const Plan& plan, int64_t number,
                                                   const Tensors& tensors) {
    Span span;
    span.set(shape, plan, number);
    const int group = blockIdx.x % plan.groups();
#pragma unroll 1
    for (int o = group * plan.outs; o < smaller((group + 1) * plan.outs, OUT_CHANNELS); ++o) {
        const ChannelRange range(tensors.out + (span.sample * OUT_CHANNELS + o) * shape.out_plane(), span);
#pragma unroll 1
        for (int position = range.first + threadIdx.x % WARPGROUP; position < range.last; position += WARPGROUP) {
            const int64_t place = span.line + span.begin + position;
            const int i = static_cast<int>(place / shape.out_w),
                      j = static_cast<int>(place - static_cast<int64_t>(i) * shape.out_w);
            range.out[position] = plain_output(shape, tensors.x, tensors.weight, tensors.bias, span.sample, o, i, j);
        }
    }
}

template <int OUTS, bool STRICT>
__device__ __forceinline__ void multiply_spans(const Shape& shape, const Plan& plan, char* memory, const StreamMemory& at,
                                               const Tensors& tensors, int multiplier) {
    const int first_channel = blockIdx.x % plan.groups() * OUTS;
    const int channels = smaller(OUTS, OUT_CHANNELS - first_channel);
    float* const staging = reinterpret_cast<float*>(memory + at.staging) + multiplier * STAGING_BUFFERS * STAGING;
    const Ring ring(memory, at, plan, STRICT, multiplier);
    const int first_weight = shared_address(memory + at.weights) / UNIT_BYTES;
    int first_plain = 1 << 30, last_plain = -1;  // of the spans, in the order in which they come
    Turn turn;
    wait(shared_address(memory + at.barriers), 0);  // the weights
#pragma unroll 1
    for (int ordinal = 0; span_number(plan, ordinal, multiplier) < plan.all_spans; ++ordinal) {
        Span span;
        span.set(shape, plan, span_number(plan, ordinal, multiplier));
        Sums<OUTS> sums;
        StageNote note;
        int channel = 0;
#pragma unroll 1
        do {
            ring.wait_full(turn);
            note = ring.notes[turn.place];
            if (note.is_first) channel = 0;
            const int stage = uniform(static_cast<int>(ring.address(turn) / UNIT_BYTES) + span.column);
            const int weights = first_weight + channel * STEPS * 2 * OUTS;
            if constexpr (!STRICT) {
                mma_fence();
                multiply_stage(stage, weights, plan, !note.is_first, sums);
                mma_commit();
                mma_wait<0>();
                ring.arrive_empty(turn);
            } else {
                // The tensor core cuts off what a sum does not hold, always towards zero: so a stage is summed from zero, small
                // terms first, and the sums of stages are added as fp32 numbers are.
                const int low = plan.stage_bytes(false) / UNIT_BYTES, low_weights = static_cast<int>(weight_units(OUTS));
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    float part[1][OUTS / 2];
#pragma unroll 1
                    for (int k = 0; k < 3; ++k) {  // low * high, high * low, high * high
                        mma_fence();
                        multiply_stage(stage + 64 * m + (k == 0 ? low : 0), weights + (k == 1 ? low_weights : 0), plan, k > 0,
                                       part);
                    }
                    mma_commit();
                    mma_wait<0>();
                    if (m == M_TILES - 1) ring.arrive_empty(turn);
#pragma unroll
                    for (int i = 0; i < OUTS / 2; ++i) sums[m][i] = part[0][i] + (note.is_first ? 0 : sums[m][i]);
                }
            }
            turn.advance(plan.places), ++channel;
        } while (!note.is_last);
        if (note.plain)
            last_plain = ordinal, first_plain = smaller(first_plain, ordinal);
        else
            write_span<OUTS>(sums, shape, plan, span, note.exponent, reinterpret_cast<const float*>(memory + at.scales),
                             staging, tensors.out + (span.sample * OUT_CHANNELS + first_channel) * shape.out_plane(), channels,
                             1 + multiplier);
    }
    store_wait();
    named_barrier(1 + multiplier, WARPGROUP);  // spans between two plain ones are written again
#pragma unroll 1
    for (int k = first_plain; k <= last_plain; ++k) write_span_plainly(shape, plan, span_number(plan, k, multiplier), tensors);
}

template <int OUTS, bool STRICT>
__global__ void __launch_bounds__(STREAM_THREADS, 1)
    convolve(const Shape shape, const Plan plan, const Tensors tensors, const uint4* __restrict__ packed) {
    extern __shared__ __align__(128) char memory[];
    const StreamMemory at(plan, STRICT);
    const int groups = plan.groups(), group = blockIdx.x % groups;
    const uint32_t weights_here = shared_address(memory + at.barriers);
    if (threadIdx.x == 0) {
        barrier_init(weights_here, 1);
        for (int multiplier = 0; multiplier < MULTIPLIERS; ++multiplier) {
            const Ring ring(memory, at, plan, STRICT, multiplier);
            for (int place = 0; place < plan.places; ++place)
                barrier_init(ring.full(place), PRODUCER_WARPS * WARP), barrier_init(ring.empty(place), WARPGROUP);
        }
        barrier_init_fence();
        constexpr int PARTS = (STRICT ? 2 : 1) * IN_CHANNELS, BYTES = STEPS * 2 * OUTS * UNIT_BYTES;
        expect_bytes(weights_here, PARTS * BYTES);
        for (int part = 0; part < PARTS; ++part)
            bulk_load(shared_address(memory + at.weights) + part * BYTES,
                      packed + (static_cast<int64_t>(group) * PARTS + part) * (BYTES / UNIT_BYTES), BYTES, weights_here);
    }
    const float* const unscales = reinterpret_cast<const float*>(packed + groups * (STRICT ? 2 : 1) * weight_units(OUTS));
    if (threadIdx.x < OUTS) {
        const int o = group * OUTS + threadIdx.x;
        float* const scales = reinterpret_cast<float*>(memory + at.scales);
        scales[threadIdx.x] = unscales[o];
        scales[OUTS + threadIdx.x] = tensors.bias && o < OUT_CHANNELS ? tensors.bias[o] : 0;
    }
    __syncthreads();
    const int role = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (role >= MULTIPLIERS) {
        give_registers<PRODUCER_REGISTERS>();
        if (shape.paired)
            produce<STRICT, true>(tensors.x, shape, plan, memory, at, role - MULTIPLIERS);
        else
            produce<STRICT, false>(tensors.x, shape, plan, memory, at, role - MULTIPLIERS);
    } else {
        take_registers<MULTIPLIER_REGISTERS>();
        multiply_spans<OUTS, STRICT>(shape, plan, memory, at, tensors, role);
    }
}

// ---- the gradient of the weights: x (64 taps x 8 positions) times grad (8 positions x outputs), summed over all positions
// All taps of a chunk of channels are the rows of a product, in tiles of 64. Two warpgroups multiply: each has GRAD_TILES of
// them, and all outputs of the block. A lane's part of the left operand comes from rows of x as they are; the right operand is
// grad. Two more warpgroups round both to TF32 and fill the rings.
constexpr int GRAD_MULTIPLIERS = 2, GRAD_PRODUCERS = 2, GRAD_THREADS = (GRAD_MULTIPLIERS + GRAD_PRODUCERS) * WARPGROUP;
constexpr int GRAD_PRODUCER_WARPS = GRAD_PRODUCERS * WARPGROUP / WARP;
constexpr int MOST_TAPS = 3 * 64 * GRAD_MULTIPLIERS;                        // a thread has registers for three tiles
constexpr int GRAD_OUTS = OUT_CHANNELS <= FEW_OUTS ? FEW_OUTS : MOST_OUTS;  // of a block; strict: FEW_OUTS

// A run is the positions of an output row that one stage holds: RUN_STEPS instructions' inner size. The inner index k of a step
// is position 2k, or 2(k - 4) + 1 from 4 on.
constexpr int RUN_STEPS = 7, RUN = 8 * RUN_STEPS, RUN_COLUMNS = (RUN - 1) * STRIDE_W + KERNEL_W;
// Lanes of a load read 8 taps side by side, in the order of the weights, at 4 positions, 2 * STRIDE_W apart: at a stride of 4
// all lie in different banks where distances of rows and of channels are alike in number and in banks, modulo 8.
__host__ __device__ constexpr int alike(int least, int number) { return least + ((number - least) % 8 + 8) % 8; }
constexpr int PITCH = alike(RUN_COLUMNS, KERNEL_W);

// A stage of the gradient: [high, low][four positions][output], 16 bytes each, for an output row's run. With the bytes between
// planes the 32 positions that a warp stores lie in different banks.
__host__ __device__ constexpr int grad_plane(int outs) { return outs * 16 + 16; }
__host__ __device__ constexpr int grad_part(int outs) { return 2 * RUN_STEPS * grad_plane(outs); }
// Rows of x lie in a ring of their own, a stage's KERNEL_H rows anywhere in it: [channel][row][column].
__host__ __device__ constexpr int ring_rows(int stages) { return stages * KERNEL_H; }
__host__ __device__ constexpr int channel_pitch(int stages) { return alike(ring_rows(stages) * PITCH, TAPS); }
__host__ __device__ constexpr int64_t gradient_bytes(bool strict, int outs, int channels, int stages) {
    return static_cast<int64_t>(stages) * (16 + (strict ? 2 : 1) * grad_part(outs)) +
           static_cast<int64_t>(channels) * channel_pitch(stages) * 4;
}

// The channels of a chunk: what a product's rows and two stages have room for; 0 where that is not one.
constexpr int most_chunk() {
    int channels = smaller(MOST_TAPS / TAPS, IN_CHANNELS);
    while (channels > 0 && (gradient_bytes(false, GRAD_OUTS, channels, 2) > MAX_SHARED_BYTES ||
                            gradient_bytes(true, FEW_OUTS, channels, 2) > MAX_SHARED_BYTES))
        --channels;
    return channels;
}
constexpr bool GRADIENT_FITS = most_chunk() > 0;
constexpr int CHUNKS = ceil_div(IN_CHANNELS, GRADIENT_FITS ? most_chunk() : 1), CHUNK = ceil_div(IN_CHANNELS, CHUNKS);
constexpr int GRAD_TILES = GRADIENT_FITS ? ceil_div(CHUNK * TAPS, 64 * GRAD_MULTIPLIERS) : 1;
constexpr int most_stages(bool strict, int outs) {
    int stages = 4;
    while (stages > 2 && gradient_bytes(strict, outs, CHUNK, stages) > MAX_SHARED_BYTES) --stages;
    return stages;
}

// d (64 x 96 or 64 x 48) = or += a (64 x 8) * b (8 x 96 or 48), TF32: a from registers, b from shared memory. A warp has 16
// rows of a and d. With g = lane / 4 and t = lane % 4: a has rows g and g + 8 of column t, then of column t + 4; d: see above.
__device__ __forceinline__ void multiply(float(&d)[48], const float(&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "{%48, %49, %50, %51}, %52, accumulate, 1, 1;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40)
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void multiply(float(&d)[24], const float(&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
        "{%24, %25, %26, %27}, %28, accumulate, 1, 1;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16)
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "l"(b), "r"(accumulate));
}

// What a stage holds: an output row's run. Rows of a run's column follow each other, then runs, then samples; where the row
// before is at hand, so are those of its rows of x that this one reads again.
constexpr int FRESH_ROWS = smaller(STRIDE_H, KERNEL_H);
struct OutputRow {
    int64_t sample;
    int run, row;
    int x_row = 0;  // where its first row of x is in the ring
    bool follows = false;

    __device__ __forceinline__ OutputRow(const Shape& shape, int64_t number) {
        const int64_t column = number / shape.out_h;
        row = static_cast<int>(number - column * shape.out_h);
        sample = column / shape.runs, run = static_cast<int>(column - sample * shape.runs);
    }
    __device__ __forceinline__ void advance(const Shape& shape, int ring_rows) {
        follows = ++row < shape.out_h;
        if (!follows) {
            row = 0;
            if (++run == shape.runs) run = 0, ++sample;
        }
        x_row += follows ? FRESH_ROWS : KERNEL_H;
        if (x_row >= ring_rows) x_row -= ring_rows;
    }
    __device__ __forceinline__ int columns(const Shape& shape) const { return smaller(RUN, shape.out_w - run * RUN); }
};

// What a block has: a group of outputs, a chunk of channels, and output rows [first, last) of the whole batch.
struct GradientPart {
    int first_out, first_channel, channels;
    int64_t first, last;
};

// The shared memory of a block: barriers, stages of grad, the ring of rows of x.
template <bool STRICT, int OUTS>
struct GradientMemory {
    static constexpr int STAGES = most_stages(STRICT, OUTS), ROWS = ring_rows(STAGES), CHANNEL = channel_pitch(STAGES);
    static constexpr int STAGE_BYTES = (STRICT ? 2 : 1) * grad_part(OUTS);
    static constexpr int64_t BYTES = gradient_bytes(STRICT, OUTS, CHUNK, STAGES);
    uint32_t barriers, stages, rows;  // shared addresses

    __device__ __forceinline__ explicit GradientMemory(const char* memory)
        : barriers(shared_address(memory)), stages(barriers + STAGES * 16), rows(stages + STAGES * STAGE_BYTES) {}
    __device__ __forceinline__ uint32_t stage(const Turn& turn) const { return stages + turn.place * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t full(int place) const { return barriers + place * 16; }
    __device__ __forceinline__ uint32_t empty(int place) const { return barriers + place * 16 + 8; }
    __device__ __forceinline__ void release(const Turn& turn) const { arrive(empty(turn.place)); }
};

// A column of x in an output row's window.
template <bool STRICT, class Memory>
struct WindowColumn {
    const float* x;  // row 0 of the first channel
    int top, x_row;
    bool exists;
    uint32_t ring;

    __device__ __forceinline__ WindowColumn(const Memory& memory, const Shape& shape, const GradientPart& part,
                                            const OutputRow& at, const float* all, int column) {
        const int w = at.run * RUN * STRIDE_W - PAD_W + column;
        x = all + (at.sample * IN_CHANNELS + part.first_channel) * shape.plane() + w;
        top = at.row * STRIDE_H - PAD_H, x_row = at.x_row;
        exists = column < RUN_COLUMNS && w >= 0 && w < shape.width;
        ring = memory.rows + column * 4;
    }
    __device__ __forceinline__ float load(const Shape& shape, int channel, int row) const {
        const int h = top + row;
        const bool row_exists = h >= 0 && h < shape.height;
        return exists && row_exists ? x[channel * shape.plane() + static_cast<int64_t>(h) * shape.width] : 0;
    }
    __device__ __forceinline__ void store(int channel, int row, float v) const {
        const int place = x_row + row - (x_row + row >= Memory::ROWS ? Memory::ROWS : 0);
        store1(ring + (channel * Memory::CHANNEL + place * PITCH) * 4, STRICT ? v : to_tf32(v));
    }
    __device__ __forceinline__ void copy(const Shape& shape, int channel, int first, int last) const {
        constexpr int BATCH = 8;  // on their way at a time
#pragma unroll 1
        for (; first < last; first += BATCH) {
            float values[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) values[i] = first + i < last ? load(shape, channel, first + i) : 0;
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (first + i < last) store(channel, first + i, values[i]);
        }
    }
};

// The rows that a window does not share with the one before it, in a lane's first column and the first channels: they are
// asked for an output row ahead. A lane has every GRAD_PRODUCER_LANES-th column.
constexpr int GRAD_PRODUCER_LANES = GRAD_PRODUCERS * WARPGROUP, MOST_AHEAD = 12;
constexpr int SHARED_ROWS = KERNEL_H - FRESH_ROWS, AHEAD_CHANNELS = smaller(MOST_AHEAD / FRESH_ROWS, CHUNK);
template <bool STRICT, class Memory>
struct RowsAhead {
    float values[AHEAD_CHANNELS > 0 ? AHEAD_CHANNELS : 1][FRESH_ROWS];

    __device__ __forceinline__ static int column() { return threadIdx.x % GRAD_PRODUCER_LANES; }
    __device__ __forceinline__ void load(const Memory& memory, const Shape& shape, const GradientPart& part,
                                         const OutputRow& at, const float* x) {
        const WindowColumn<STRICT, Memory> window(memory, shape, part, at, x, column());
#pragma unroll
        for (int i = 0; i < AHEAD_CHANNELS * FRESH_ROWS; ++i)
            if (i / FRESH_ROWS < part.channels)
                values[i / FRESH_ROWS][i % FRESH_ROWS] = window.load(shape, i / FRESH_ROWS, SHARED_ROWS + i % FRESH_ROWS);
    }
    // These, and what else of the window is not in the ring.
    __device__ __forceinline__ void store(const Memory& memory, const Shape& shape, const GradientPart& part,
                                          const OutputRow& at, const float* x) const {
        if (column() < RUN_COLUMNS) {
            const WindowColumn<STRICT, Memory> window(memory, shape, part, at, x, column());
#pragma unroll
            for (int i = 0; i < AHEAD_CHANNELS * FRESH_ROWS; ++i)
                if (i / FRESH_ROWS < part.channels)
                    window.store(i / FRESH_ROWS, SHARED_ROWS + i % FRESH_ROWS, values[i / FRESH_ROWS][i % FRESH_ROWS]);
        }
        if (at.follows && part.channels <= AHEAD_CHANNELS && RUN_COLUMNS <= GRAD_PRODUCER_LANES) return;
#pragma unroll 1
        for (int k = column(); k < RUN_COLUMNS; k += GRAD_PRODUCER_LANES) {
            const WindowColumn<STRICT, Memory> window(memory, shape, part, at, x, k);
#pragma unroll 1
            for (int channel = 0; channel < part.channels; ++channel) {
                const bool ahead = k == column() && channel < AHEAD_CHANNELS;
                window.copy(shape, channel, at.follows ? SHARED_ROWS : 0, ahead ? SHARED_ROWS : KERNEL_H);
            }
        }
    }
};

// sums[i] over the lanes of a warp, where lane / (WARP / SIZE) is i. With each exchange lanes keep half of the sums they have.
template <int OFFSET, int SIZE>
__device__ __forceinline__ float add_lanes(const float (&sums)[SIZE]) {
    const bool upper = threadIdx.x & OFFSET;
    if constexpr (SIZE > 1) {
        float kept[SIZE / 2];
#pragma unroll
        for (int i = 0; i < SIZE / 2; ++i) {
            const float given = upper ? sums[i] : sums[i + SIZE / 2];
            kept[i] = (upper ? sums[i + SIZE / 2] : sums[i]) + __shfl_xor_sync(0xffffffffu, given, OFFSET);
        }
        return add_lanes<OFFSET / 2>(kept);
    } else if constexpr (OFFSET > 0) {
        const float pair[1] = {sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], OFFSET)};
        return add_lanes<OFFSET / 2>(pair);
    } else {
        return sums[0];
    }
}

// Of a row of grad a lane has the positions `lane` and `lane` + 32, in each of the outputs that its warp has.
template <int OUTS>
struct GradBatch {
    static constexpr int SIZE = OUTS / (2 * GRAD_PRODUCER_WARPS);  // outputs; a row's are two batches
    float values[SIZE][2];

    __device__ __forceinline__ static int output(int batch, int i) {
        return (batch * SIZE + i) * GRAD_PRODUCER_WARPS + uniform(static_cast<int>(threadIdx.x / WARP % GRAD_PRODUCER_WARPS));
    }
    __device__ __forceinline__ void load(int batch, const Shape& shape, const GradientPart& part, const OutputRow& at,
                                         const float* __restrict__ grad) {
        const int lane = threadIdx.x % WARP, columns = at.columns(shape);
        const float* from = grad + (at.sample * OUT_CHANNELS + part.first_out + output(batch, 0)) * shape.out_plane() +
                            static_cast<int64_t>(at.row) * shape.out_w + at.run * RUN + lane;
#pragma unroll
        for (int i = 0; i < SIZE; ++i, from += GRAD_PRODUCER_WARPS * shape.out_plane()) {
            const bool exists = OUT_CHANNELS % OUTS == 0 || part.first_out + output(batch, i) < OUT_CHANNELS;
            values[i][0] = exists && lane < columns ? from[0] : 0;
            values[i][1] = exists && lane + WARP < columns ? from[WARP] : 0;
        }
    }
    template <bool STRICT>
    __device__ __forceinline__ void store(int batch, uint32_t stage) const {
        const int lane = threadIdx.x % WARP;
        const uint32_t to = stage + (lane / 8 * 2 + lane % 2) * grad_plane(OUTS) + output(batch, 0) * 16 + lane % 8 / 2 * 4;
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (lane + k * WARP >= RUN) continue;
                const uint32_t address = to + k * (WARP / 4) * grad_plane(OUTS) + i * GRAD_PRODUCER_WARPS * 16;
                if constexpr (STRICT) {
                    const Split parts = split(values[i][k]);
                    store1(address, parts.high), store1(address + grad_part(OUTS), parts.low);
                } else {
                    store1(address, to_tf32(values[i][k]));
                }
            }
        }
    }

    // The sum over a warp's lanes of their values in output lane / SHARERS of the batch.
    static constexpr int POWER_OF_2 = SIZE <= 8 ? 8 : 16, SHARERS = WARP / POWER_OF_2;
    static_assert(SIZE <= POWER_OF_2, "a lane has one output in the end");
    __device__ __forceinline__ float sum_over_lanes() const {
        float sums[POWER_OF_2];
#pragma unroll
        for (int i = 0; i < POWER_OF_2; ++i) sums[i] = i < SIZE ? values[i][0] + values[i][1] : 0;
        return add_lanes<WARP / 2>(sums);
    }
};

constexpr int BIAS_FLOATS = round_up(OUT_CHANNELS, 4);  // of a split's sums

// What the producers do: they have an output row in registers, from which they fill a stage and add what is for the bias, and
// ask for the next in the meantime.
template <bool STRICT, int OUTS>
__device__ __forceinline__ void produce_gradient(const Shape& shape, const GradientPart& part,
                                                 const GradientMemory<STRICT, OUTS>& memory, const float* __restrict__ x,
                                                 const float* __restrict__ grad, float* bias_terms) {
    using Memory = GradientMemory<STRICT, OUTS>;
    using Batch = GradBatch<OUTS>;
    Batch batches[2];
    RowsAhead<STRICT, Memory> rows;
    float bias_sums[2] = {};
    OutputRow at(shape, part.first);
    Turn turn;
    rows.load(memory, shape, part, at, x);
#pragma unroll
    for (int k = 0; k < 2; ++k) batches[k].load(k, shape, part, at, grad);
#pragma unroll 1
    for (int64_t left = part.last - part.first; left > 0; --left) {
        const uint32_t stage = memory.stage(turn), full = memory.full(turn.place);
        wait(memory.empty(turn.place), turn.parity ^ 1);  // so the ring has room for a stage's rows, too
        rows.store(memory, shape, part, at, x);
        at.advance(shape, Memory::ROWS);
        if (left > 1) rows.load(memory, shape, part, at, x);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            batches[k].template store<STRICT>(k, stage);
            bias_sums[k] += batches[k].sum_over_lanes();
            if (left > 1) batches[k].load(k, shape, part, at, grad);
        }
        arrive(full);
        turn.advance(Memory::STAGES);
    }
    const int lane = threadIdx.x % WARP, of_batch = lane / Batch::SHARERS;
#pragma unroll
    for (int batch = 0; batch < 2; ++batch) {
        const int o = part.first_out + Batch::output(batch, of_batch);
        if (part.first_channel == 0 && lane % Batch::SHARERS == 0 && of_batch < Batch::SIZE && o < BIAS_FLOATS)
            bias_terms[o] = bias_sums[batch];
    }
}

// A lane's part of a tile of the left operand, rows g and g + 8: what a step of positions meets at its taps. Producers have
// rounded it, unless STRICT.
template <bool STRICT>
struct TapTile {
    float high[4], low[STRICT ? 4 : 1];

    // `columns`: positions from the step's first on that exist. Where there is none, grad is zero; but x may be infinite.
    __device__ __forceinline__ void load(const uint32_t* taps, int step, int columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int position = 8 * step + i / 2;  // from the lane's first
            float v = load1(taps[i % 2] + position * STRIDE_W * 4);
            if (columns < 8 && 2 * static_cast<int>(threadIdx.x % 4) + i / 2 >= columns) v = 0;
            if constexpr (STRICT) {
                const Split parts = split(v);
                high[i] = parts.high, low[i] = parts.low;
            } else {
                high[i] = v;
            }
        }
    }
};

// The sums of a split are written as they lie in registers: [group of outputs][chunk of channels][tile of a warpgroup][8
// outputs][thread], a float4 each; then come those of the biases.
constexpr int GRAD_LANES = GRAD_MULTIPLIERS * WARPGROUP;
__host__ __device__ constexpr int out_groups(int outs) { return ceil_div(OUT_CHANNELS, outs); }
__host__ __device__ constexpr int64_t part_floats(int outs) { return 4ll * GRAD_TILES * (outs / 8) * GRAD_LANES; }
__host__ __device__ constexpr int64_t split_floats(int outs) {
    return out_groups(outs) * CHUNKS * part_floats(outs) + BIAS_FLOATS;
}

// Strict sums begin anew with each output row and are added as fp32 numbers: see multiply_spans.
template <bool STRICT, int OUTS>
__device__ __forceinline__ void multiply_gradient(const Shape& shape, const GradientPart& part,
                                                  const GradientMemory<STRICT, OUTS>& memory, float* part_terms) {
    using Memory = GradientMemory<STRICT, OUTS>;
    constexpr int PLANE = grad_plane(OUTS) / UNIT_BYTES, LOW = grad_part(OUTS) / UNIT_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    uint32_t tap_rows[2 * GRAD_TILES], first_taps[2 * GRAD_TILES];  // bytes to a lane's taps: their rows, and from there
#pragma unroll
    for (int i = 0; i < 2 * GRAD_TILES; ++i) {
        const int place = ((warp / 4 * GRAD_TILES + i / 2) * 4 + warp % 4) * 16 + i % 2 * 8 + lane / 4;
        const int tap = place < part.channels * TAPS ? place : 0;  // or any: that row's sums are not used
        tap_rows[i] = tap % TAPS / KERNEL_W * PITCH * 4;
        first_taps[i] = memory.rows + (tap / TAPS * Memory::CHANNEL + tap % KERNEL_W + 2 * (lane % 4) * STRIDE_W) * 4;
    }
    float sums[GRAD_TILES][OUTS / 2], row_sums[STRICT ? GRAD_TILES : 1][OUTS / 2];
#pragma unroll
    for (int i = 0; i < GRAD_TILES * OUTS / 2; ++i) sums[i / (OUTS / 2)][i % (OUTS / 2)] = 0;
    OutputRow at(shape, part.first);
    Turn turn;
#pragma unroll 1
    for (int64_t number = part.first; number < part.last; ++number) {
        constexpr uint32_t RING_BYTES = Memory::ROWS * PITCH * 4;
        uint32_t taps[2 * GRAD_TILES];
#pragma unroll
        for (int i = 0; i < 2 * GRAD_TILES; ++i) {
            const uint32_t row = at.x_row * PITCH * 4 + tap_rows[i];
            taps[i] = first_taps[i] + row - (row >= RING_BYTES ? RING_BYTES : 0);
        }
        const int columns = at.columns(shape), stage = uniform(static_cast<int>(memory.stage(turn) / UNIT_BYTES));
        wait(memory.full(turn.place), turn.parity);
        async_proxy_fence();  // here, since in a producer it would wait for what that has asked for
#pragma unroll
        for (int step = 0; step < RUN_STEPS; ++step) {
            if (8 * step >= columns) break;
            const int planes = stage + 2 * step * PLANE;
            TapTile<STRICT> tiles[GRAD_TILES];
#pragma unroll
            for (int i = 0; i < GRAD_TILES; ++i) tiles[i].load(taps + 2 * i, step, columns - 8 * step);
            mma_fence();
#pragma unroll
            for (int i = 0; i < GRAD_TILES; ++i) {
                if constexpr (STRICT) {  // small terms first
                    multiply(row_sums[i], tiles[i].low, descriptor(planes, PLANE), step > 0);
                    multiply(row_sums[i], tiles[i].high, descriptor(planes + LOW, PLANE), 1);
                    multiply(row_sums[i], tiles[i].high, descriptor(planes, PLANE), 1);
                } else {
                    multiply(sums[i], tiles[i].high, descriptor(planes, PLANE), 1);
                }
            }
            mma_commit();
            mma_wait<0>();
        }
        memory.release(turn);
        if constexpr (STRICT) {
#pragma unroll
            for (int i = 0; i < GRAD_TILES * OUTS / 2; ++i)
                sums[i / (OUTS / 2)][i % (OUTS / 2)] += row_sums[i / (OUTS / 2)][i % (OUTS / 2)];
        }
        turn.advance(Memory::STAGES);
        at.advance(shape, Memory::ROWS);
    }

    float4* const terms = reinterpret_cast<float4*>(part_terms) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < GRAD_TILES * OUTS / 8; ++i) {
        const float* of_8 = sums[i / (OUTS / 8)] + i % (OUTS / 8) * 4;
        terms[i * GRAD_LANES] = make_float4(of_8[0], of_8[1], of_8[2], of_8[3]);
    }
}

template <bool STRICT, int OUTS>
__global__ void __launch_bounds__(GRAD_THREADS, 1)
    weight_gradient(const Shape shape, const float* __restrict__ x, const float* __restrict__ grad,
                    float* __restrict__ terms) {
    extern __shared__ __align__(128) char shared[];
    using Memory = GradientMemory<STRICT, OUTS>;
    const Memory memory(shared);
    constexpr int GROUPS = out_groups(OUTS), PARTS = GROUPS * CHUNKS;
    const int part_number = blockIdx.x % PARTS, chunk = part_number / GROUPS;
    const int64_t split = blockIdx.x / PARTS, splits = gridDim.x / PARTS;
    const GradientPart part = {part_number % GROUPS * OUTS, chunk * CHUNK, smaller(CHUNK, IN_CHANNELS - chunk * CHUNK),
                               shape.out_rows() * split / splits, shape.out_rows() * (split + 1) / splits};
    if (threadIdx.x == 0) {
        for (int place = 0; place < Memory::STAGES; ++place)
            barrier_init(memory.full(place), GRAD_PRODUCER_WARPS * WARP), barrier_init(memory.empty(place), GRAD_LANES);
        barrier_init_fence();
    }
    __syncthreads();
    terms += split * split_floats(OUTS);
    const int role = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (role >= GRAD_MULTIPLIERS) {
        give_registers<STRICT ? 64 : 72>();  // a thread of each has 128 as launched; strict sums take more
        produce_gradient(shape, part, memory, x, grad, terms + PARTS * part_floats(OUTS));
    } else {
        take_registers<STRICT ? 192 : 184>();
        multiply_gradient(shape, part, memory, terms + part_number * part_floats(OUTS));
    }
}

// Adds the splits' terms in an order of its own, and puts the sums where they belong. Either gradient may be null. A warp adds
// every SUM_SHARES-th split, 4 terms a lane.
constexpr int SUM_PLACES = WARP, SUM_SHARES = THREADS / WARP;
__global__ void __launch_bounds__(THREADS)
    add_splits(const float* __restrict__ terms, float* __restrict__ grad_weight, float* __restrict__ grad_bias, int64_t splits,
               int outs) {
    __shared__ float4 shares[SUM_SHARES][SUM_PLACES];
    const int share = threadIdx.x / SUM_PLACES, k = threadIdx.x % SUM_PLACES;
    const int64_t size = split_floats(outs), first = (static_cast<int64_t>(blockIdx.x) * SUM_PLACES + k) * 4;
    float4 sum = {};
    if (first < size)
#pragma unroll 8
        for (int64_t split = share; split < splits; split += SUM_SHARES) {
            const float4 v = *reinterpret_cast<const float4*>(terms + split * size + first);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
    shares[share][k] = sum;
    __syncthreads();
    const int64_t place = static_cast<int64_t>(blockIdx.x) * SUM_PLACES * 4 + threadIdx.x;
    if (threadIdx.x >= SUM_PLACES * 4 || place >= size) return;
    float total = 0;
#pragma unroll
    for (int i = 0; i < SUM_SHARES; ++i) total += reinterpret_cast<const float*>(shares[i])[threadIdx.x];
    const int64_t of_bias = place - (size - BIAS_FLOATS);
    if (of_bias >= 0) {
        if (grad_bias && of_bias < OUT_CHANNELS) grad_bias[of_bias] = total;
        return;
    }
    const int element = place % 4, lane = place / 4 % WARP, warp = place / (4 * WARP) % (GRAD_LANES / WARP);
    const int64_t of_8 = place / (4 * GRAD_LANES), tile = of_8 / (outs / 8), part = tile / GRAD_TILES;
    const int group = part % out_groups(outs), chunk = part / out_groups(outs);
    const int o = group * outs + static_cast<int>(of_8 % (outs / 8)) * 8 + lane % 4 * 2 + element % 2;
    const int tap = ((warp / 4 * GRAD_TILES + tile % GRAD_TILES) * 4 + warp % 4) * 16 + lane / 4 + element / 2 * 8;
    if (grad_weight && o < OUT_CHANNELS && tap < smaller(CHUNK, IN_CHANNELS - chunk * CHUNK) * TAPS)
        grad_weight[(static_cast<int64_t>(o) * IN_CHANNELS + chunk * CHUNK) * TAPS + tap] = total;
}

// ---- plain kernels in fp32, for shapes whose weights or rows do not fit into shared memory
// A thread an output, as in v1.
__global__ void __launch_bounds__(THREADS)
    plain_convolve(const Shape shape, const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             float* __restrict__ out) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (place >= shape.batch * OUT_CHANNELS * shape.out_plane()) return;
    const int j = place % shape.out_w, i = place / shape.out_w % shape.out_h;
    const int o = place / shape.out_plane() % OUT_CHANNELS;
    out[place] = plain_output(shape, x, weight, bias, place / shape.out_plane() / OUT_CHANNELS, o, i, j);
}

// A warp a weight, then one a bias. Either gradient may be null.
__global__ void __launch_bounds__(THREADS)
    plain_gradients(const Shape shape, const float* __restrict__ x, const float* __restrict__ grad,
                        float* __restrict__ grad_weight, float* __restrict__ grad_bias) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    const bool of_bias = place >= WEIGHTS;
    if (place >= WEIGHTS + OUT_CHANNELS || !(of_bias ? grad_bias : grad_weight)) return;
    const int o = of_bias ? place - WEIGHTS : place / (IN_CHANNELS * TAPS);
    const int channel = of_bias ? 0 : place / TAPS % IN_CHANNELS, tap = of_bias ? 0 : place % TAPS;
    float sum = 0;
#pragma unroll 1
    for (int64_t sample = 0; sample < shape.batch; ++sample) {
        const float* of_sample = grad + (sample * OUT_CHANNELS + o) * shape.out_plane();
        const float* plane = x + (sample * IN_CHANNELS + channel) * shape.plane();
        float sum_of_sample = 0;
#pragma unroll 1
        for (int64_t k = threadIdx.x % WARP; k < shape.out_plane(); k += WARP) {
            const int h = static_cast<int>(k / shape.out_w) * STRIDE_H - PAD_H + tap / KERNEL_W;
            const int w = static_cast<int>(k % shape.out_w) * STRIDE_W - PAD_W + tap % KERNEL_W;
            const bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
            if (of_bias) sum_of_sample += of_sample[k];
            else if (inside) sum_of_sample += of_sample[k] * plane[static_cast<int64_t>(h) * shape.width + w];
        }
        sum += sum_of_sample;
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % WARP == 0) (of_bias ? grad_bias[o] : grad_weight[place]) = sum;
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

static Shape make_shape(const float* x, int64_t batch, int height, int width) {
    Shape s;
    s.batch = batch, s.height = height, s.width = width;
    s.out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1, s.out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
    s.runs = ceil_div(s.out_w, RUN);
    s.paired = width % 2 == 0 && PAD_W % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 8 == 0;
    return s;
}

static int64_t blocks_of(int64_t threads) { return (threads + THREADS - 1) / THREADS; }

constexpr int MOST_PLACES = 4, WIDEST = 4096;  // of a ring; of outputs whose planes are lines

// Lines and spans of at most `positions`, of which neighbours share `overlap`.
static void set_spans(Plan& plan, const Shape& shape, bool by_rows, int positions, int overlap) {
    plan.by_rows = by_rows, plan.positions = positions;
    plan.columns = by_rows ? positions : shape.out_w, plan.pitch = plan.columns + QUADS - 1;
    plan.rows = ((by_rows ? 0 : plan.columns - 1) + positions - 1 + QUADS - 1) / plan.pitch + TAP_ROWS;
    plan.lines = by_rows ? shape.out_h : 1;
    plan.line = by_rows ? shape.out_w : static_cast<int64_t>(shape.out_h) * shape.out_w;
    int fewest = positions;  // that a span holds, from whichever column it begins
    for (int first = larger(plan.columns - positions, 0); !by_rows && first < plan.columns; ++first) {
        const int units = first + positions;
        fewest = smaller(fewest, units / plan.pitch * plan.columns + smaller(units % plan.pitch, plan.columns) - first);
    }
    plan.step = fewest - overlap;
    plan.spans = plan.line <= fewest ? 1 : 1 + (plan.line - fewest + plan.step - 1) / plan.step;
    plan.all_spans = shape.batch * plan.lines * plan.spans;
}

// Calls fits(plan) for whole planes as lines and for rows, with less and less places in the rings, until it returns true.
template <class Fits>
static bool find_spans(Plan& plan, const Shape& shape, int positions, int overlap, const Fits& fits) {
    for (const bool by_rows : {false, true}) {
        if (!by_rows && shape.out_w > WIDEST) continue;
        set_spans(plan, shape, by_rows, positions, overlap);
        for (plan.places = MOST_PLACES; plan.places >= 2; --plan.places)
            if (fits(plan)) return true;
    }
    return false;
}

static void share_spans(Plan& plan, int blocks) {
    plan.blocks = plan.all_spans < blocks ? static_cast<int>(plan.all_spans) : larger(blocks, 1);
}

// The forward pass's plan; with 0 outs where weights or stages do not fit into the device's shared memory.
static Plan make_plan(const Shape& shape, bool strict) {
    const Device device;
    for (const int outs : {strict || OUT_CHANNELS <= FEW_OUTS ? FEW_OUTS : MOST_OUTS, FEW_OUTS}) {
        Plan plan = {};
        plan.outs = outs;
        const auto fits = [&](const Plan& plan) { return StreamMemory(plan, strict).bytes <= device.shared_bytes; };
        if (!FITS_UNITS || !find_spans(plan, shape, POSITIONS, OVERLAP, fits)) continue;
        share_spans(plan, device.multiprocessors / plan.groups());
        return plan;
    }
    return {};
}

// The floats that the packed weights take; 0 where the plain kernel is used.
int64_t packed_weights(bool strict, int64_t batch, int height, int width) {
    const Plan plan = make_plan(make_shape(nullptr, batch, height, width), strict);
    return plan.outs ? packed_floats(plan.outs, strict) : 0;
}

template <int OUTS, bool STRICT>
static cudaError_t launch_stream(const Shape& shape, const Plan& plan, const Tensors& tensors, const uint4* packed,
                                 cudaStream_t stream) {
    if constexpr (!FITS_UNITS || (STRICT ? 2 : 1) * weight_units(OUTS) * UNIT_BYTES > MAX_SHARED_BYTES) {
        return cudaErrorNotSupported;
    } else {
        const int bytes = static_cast<int>(StreamMemory(plan, STRICT).bytes);
        const auto convolution = convolve<OUTS, STRICT>;
        const cudaError_t error = cudaFuncSetAttribute(convolution, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
        convolution<<<plan.blocks * plan.groups(), STREAM_THREADS, bytes, stream>>>(shape, plan, tensors, packed);
        return cudaSuccess;
    }
}

// out (batch, OUT_CHANNELS, out_h, out_w); `packed` has packed_weights() floats, or is null where that is 0; bias may be null.
cudaError_t launch_convolve(const float* x, const float* weight, const float* bias, float* packed, float* out, bool strict,
                            int64_t batch, int height, int width, cudaStream_t stream) {
    const Shape shape = make_shape(x, batch, height, width);
    if (!packed) {
        plain_convolve<<<blocks_of(batch * OUT_CHANNELS * shape.out_h * shape.out_w), THREADS, 0, stream>>>(shape, x, weight,
                                                                                                            bias, out);
        return cudaSuccess;
    }
    const Plan plan = make_plan(shape, strict);
    uint4* const units = reinterpret_cast<uint4*>(packed);
    pack_weights<<<plan.groups() * plan.outs, WARPGROUP, 0, stream>>>(weight, units, plan.outs, strict);
    const auto launch = strict                   ? launch_stream<FEW_OUTS, true>
                        : plan.outs == MOST_OUTS ? launch_stream<MOST_OUTS, false>
                                                 : launch_stream<FEW_OUTS, false>;
    return launch(shape, plan, Tensors{x, weight, bias, out}, units, stream);
}

// How a gradient is shared: OUTS output channels a block, and splits of the output rows, so that every multiprocessor has a
// block; the order of additions depends on them.
constexpr int grad_outs(bool strict) { return strict ? FEW_OUTS : GRAD_OUTS; }
static int64_t grad_parts(bool strict) { return out_groups(grad_outs(strict)) * CHUNKS; }
static int64_t grad_splits(bool strict, const Shape& shape) {
    const int64_t most = ceil_div(Device().multiprocessors, grad_parts(strict));
    return shape.out_rows() < most ? shape.out_rows() : most;
}

// The floats between the kernels; none where the plain kernel is used.
int64_t gradient_terms(bool strict, int64_t batch, int height, int width) {
    if (!GRADIENT_FITS) return 0;
    return grad_splits(strict, make_shape(nullptr, batch, height, width)) * split_floats(grad_outs(strict));
}

template <bool STRICT>
static cudaError_t launch_gradient(const Shape& shape, const float* x, const float* grad, float* terms, cudaStream_t stream) {
    if constexpr (!GRADIENT_FITS) {
        return cudaErrorNotSupported;
    } else {
        constexpr int OUTS = grad_outs(STRICT), BYTES = static_cast<int>(GradientMemory<STRICT, OUTS>::BYTES);
        const auto gradient = weight_gradient<STRICT, OUTS>;
        const cudaError_t error = cudaFuncSetAttribute(gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
        if (error != cudaSuccess) return error;
        gradient<<<grad_parts(STRICT) * grad_splits(STRICT, shape), GRAD_THREADS, BYTES, stream>>>(shape, x, grad, terms);
        return cudaSuccess;
    }
}

// grad_weight and grad_bias may be null; `terms` has gradient_terms floats.
cudaError_t launch_parameter_gradients(const float* x, const float* grad, float* terms, float* grad_weight, float* grad_bias,
                                       bool strict, int64_t batch, int height, int width, cudaStream_t stream) {
    const Shape shape = make_shape(x, batch, height, width);
    if (!GRADIENT_FITS) {
        plain_gradients<<<(WEIGHTS + OUT_CHANNELS + WARPS - 1) / WARPS, THREADS, 0, stream>>>(
            shape, x, grad, grad_weight, grad_bias);
        return cudaSuccess;
    }
    const int outs = grad_outs(strict);
    const cudaError_t error = (strict ? launch_gradient<true> : launch_gradient<false>)(shape, x, grad, terms, stream);
    if (error == cudaSuccess)
        add_splits<<<(split_floats(outs) + 4 * SUM_PLACES - 1) / (4 * SUM_PLACES), THREADS, 0, stream>>>(
            terms, grad_weight, grad_bias, grad_splits(strict, shape), outs);
    return error;
}
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

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
template <class... Parts>
static std::string message(const Parts&... parts) { return (text(parts) + ...); }

int64_t packed_weights(bool strict, int64_t batch, int height, int width);
int64_t gradient_terms(bool strict, int64_t batch, int height, int width);
cudaError_t launch_convolve(const float*, const float*, const float*, float*, float*, bool, int64_t, int, int, cudaStream_t);
cudaError_t launch_parameter_gradients(const float*, const float*, float*, float*, float*, bool, int64_t, int, int,
                                       cudaStream_t);

constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * KERNEL_H * KERNEL_W;

// PyTorch's setting for convolutions, as its own read it at each call.
static bool is_strict() { return !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    TORCH_CHECK(tensor.defined(), message("alexnet_conv1: expected ", name, " to be a tensor, got None"));
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits, message("alexnet_conv1: expected ", name, " as a float32 CUDA tensor of shape ", shape,
                              " (-1: any), got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ",
                              tensor.device()));
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(), message("alexnet_conv1: expected all on ", expected.device(), ", got ",
                                                              name, " on ", tensor.device()));
}

static void check_blocks(int64_t threads) {
    TORCH_CHECK(threads / 256 < (1ll << 31) - 1, message("alexnet_conv1: ", threads, " threads are more than a grid has"));
}

// The input and weight of a pass, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    int64_t batch, height, width, out_h, out_w;
    at::Tensor x, weight;
    c10::cuda::CUDAGuard guard;
    cudaStream_t stream;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, at::IntArrayRef stride, at::IntArrayRef padding)
        : guard(checked(x_in, weight_in, stride, padding)) {
        x = x_in.contiguous(), weight = weight_in.contiguous();
        batch = x.size(0), height = x.size(2), width = x.size(3);
        out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1, out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
        stream = c10::cuda::getCurrentCUDAStream();
        int major = 0, minor = 0;
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device()));
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, x.get_device()));
        TORCH_CHECK(major == 9 && minor == 0,
                    message("alexnet_conv1 v5: expected a GPU of compute capability 9.0 (Hopper), got ", major, ".", minor,
                            "; v4_tensor_core runs on 8.0 and later"));
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding) {
        check("x", x, {-1, IN_CHANNELS, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
        check_device(x, "weight", weight);
        TORCH_CHECK(stride == at::IntArrayRef({STRIDE_H, STRIDE_W}) && padding == at::IntArrayRef({PAD_H, PAD_W}),
                    message("alexnet_conv1: built for stride ", at::IntArrayRef({STRIDE_H, STRIDE_W}), " and padding ",
                            at::IntArrayRef({PAD_H, PAD_W}), ", called with ", stride, " and ", padding));
        const int64_t height = x.size(2), width = x.size(3);
        TORCH_CHECK(height + 2 * PAD_H >= KERNEL_H && width + 2 * PAD_W >= KERNEL_W,
                    message("alexnet_conv1: a kernel of ", KERNEL_H, " x ", KERNEL_W, " does not fit into an image of ", height,
                            " x ", width, " padded by ", padding));
        TORCH_CHECK(height < (1ll << 30) && width < (1ll << 30),
                    message("alexnet_conv1: expected less than 2^30 rows and columns, got sizes ", x.sizes()));
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }
    std::array<int64_t, 4> out_sizes() const { return {batch, OUT_CHANNELS, out_h, out_w}; }
    at::Tensor checked_grad(const at::Tensor& grad) const {
        check("grad", grad, out_sizes());
        check_device(x, "grad", grad);
        return grad.contiguous();
    }
};

static float* pointer_to(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias_in,
                  at::IntArrayRef stride, at::IntArrayRef padding) {
    const Call call(x, weight, stride, padding);
    at::Tensor bias;
    if (bias_in) {
        check("bias", *bias_in, {OUT_CHANNELS});
        check_device(x, "bias", *bias_in);
        bias = bias_in->contiguous();
    }
    at::Tensor out = call.empty(call.out_sizes());
    if (out.numel() == 0) return out;
    const bool strict = is_strict();
    const int64_t floats = packed_weights(strict, call.batch, call.height, call.width);
    check_blocks(floats ? 256ll * OUT_CHANNELS : out.numel());
    at::Tensor packed = call.empty({floats});
    C10_CUDA_CHECK(launch_convolve(call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(),
                                   bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                                   floats ? pointer_to(packed) : nullptr, pointer_to(out), strict, call.batch, call.height,
                                   call.width, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

// The gradients of weight and bias, of those that are wanted; the other is an empty tensor.
std::tuple<at::Tensor, at::Tensor> parameter_grads(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight,
                                                   at::IntArrayRef stride, at::IntArrayRef padding,
                                                   std::array<bool, 2> wanted) {
    const Call call(x, weight, stride, padding);
    const at::Tensor grad = call.checked_grad(grad_in);
    at::Tensor grad_weight, grad_bias, none = call.empty({0});
    if (wanted[0]) grad_weight = call.empty(weight.sizes());
    if (wanted[1]) grad_bias = call.empty({OUT_CHANNELS});
    const auto result = std::make_tuple(wanted[0] ? grad_weight : none, wanted[1] ? grad_bias : none);
    if (grad.numel() == 0) {
        if (wanted[0]) grad_weight.zero_();
        if (wanted[1]) grad_bias.zero_();
        return result;
    }
    const bool strict = is_strict();
    check_blocks(32 * (WEIGHTS + OUT_CHANNELS));
    at::Tensor terms = call.empty({gradient_terms(strict, call.batch, call.height, call.width)});
    C10_CUDA_CHECK(launch_parameter_gradients(call.x.const_data_ptr<float>(), grad.const_data_ptr<float>(), pointer_to(terms),
                                              pointer_to(grad_weight), pointer_to(grad_bias), strict, call.batch, call.height,
                                              call.width, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return result;
}

// PyTorch's own: nobody needs the gradient of images fast.
at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
                      at::IntArrayRef padding) {
    const Call call(x, weight, stride, padding);
    const at::Tensor grad = call.checked_grad(grad_in);
    if (x.numel() == 0 || grad.numel() == 0) return call.empty(x.sizes()).zero_();
    return std::get<0>(at::convolution_backward(grad, call.x, call.weight, at::OptionalIntArrayRef(), stride, padding, {1, 1},
                                                false, {0, 0}, 1, {true, false, false}));
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("conv2d(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("parameter_grads(Tensor grad, Tensor x, Tensor weight, int[2] stride, int[2] padding, bool[2] wanted) -> "
          "(Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad, Tensor x, Tensor weight, int[2] stride, int[2] padding) -> Tensor",
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
                              const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        context->save_for_backward({x, weight});
        context->saved_data["has_bias"] = bias.has_value();
        return CALL(conv2d, x, weight, bias, stride, padding);
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grads) {
        const auto saved = context->get_saved_variables();
        const at::Tensor &grad = grads[0], &x = saved[0], &weight = saved[1];
        constexpr std::array<int64_t, 2> stride = {STRIDE_H, STRIDE_W}, padding = {PAD_H, PAD_W};
        const bool has_bias = context->saved_data["has_bias"].toBool();
        const std::array<bool, 2> wanted = {context->needs_input_grad(1), has_bias && context->needs_input_grad(2)};
        at::Tensor grad_x, grad_weight, grad_bias;
        if (context->needs_input_grad(0)) grad_x = CALL(input_grad, grad, x, weight, stride, padding);
        if (wanted[0] || wanted[1])
            std::tie(grad_weight, grad_bias) = CALL(parameter_grads, grad, x, weight, stride, padding, wanted);
        if (!wanted[0]) grad_weight = at::Tensor();
        if (!wanted[1]) grad_bias = at::Tensor();
        return {grad_x, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
    }
};

at::Tensor differentiable_conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                 at::IntArrayRef stride, at::IntArrayRef padding) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !x._fw_grad(0).defined() && !weight._fw_grad(0).defined() && !(bias && bias->_fw_grad(0).defined()),
        "alexnet_conv1: forward-mode derivatives (tangents) are not implemented");
    if (at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad() || (bias && bias->requires_grad())))
        return Training::apply(x, weight, bias, stride, padding);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return CALL(conv2d, x, weight, bias, stride, padding);
}

}  // namespace

TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, Autograd, m) {
    m.impl("conv2d", &differentiable_conv2d);
    for (const char* name : {"parameter_grads", "input_grad"})  // these raise in a backward pass of their own
        m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("conv2d", &conv2d);
    m.impl("parameter_grads", &parameter_grads);
    m.impl("input_grad", &input_grad);
}
"""


def register(namespace):
    """Shapes, for torch.compile."""

    @torch.library.register_fake(f"{namespace}::conv2d")
    def conv2d(x, weight, bias, stride, padding):
        out_channels, _, *kernel = weight.shape
        out_h, out_w = ((x.shape[2 + d] + 2 * padding[d] - kernel[d]) // stride[d] + 1 for d in (0, 1))
        return x.new_empty(x.shape[0], out_channels, out_h, out_w)

    @torch.library.register_fake(f"{namespace}::parameter_grads")
    def parameter_grads(grad, x, weight, stride, padding, wanted):
        return x.new_empty(weight.shape if wanted[0] else 0), x.new_empty(weight.shape[0] if wanted[1] else 0)

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad, x, weight, stride, padding):
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

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        conv = self.conv1
        constants = {"IN_CHANNELS": conv.in_channels, "OUT_CHANNELS": conv.out_channels}
        for name, values in (("KERNEL", conv.kernel_size), ("STRIDE", conv.stride), ("PAD", conv.padding)):
            constants |= {f"{name}_{axis}": value for axis, value in zip("HW", values, strict=True)}
        hopper = ("-gencode=arch=compute_90a,code=sm_90a",)  # load_inline would build for 9.0, which lacks wgmma
        return build(*self.sources, cuda_cflags=hopper, **constants)

    def forward(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        operators = getattr(torch.ops, self.namespace())
        return operators.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def main():
    from torch.utils import cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew().to("cpu" if emulated else "cuda")
    x = torch.randn(2, 3, 67, 63) if emulated else torch.randn(256, 3, 224, 224, device="cuda")

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
        exact = model.double().conv1(x[:16].double())
        model.float()
        error = ((model(x[:16]) - exact).abs().max() / exact.std()).item()
        print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread;", end=" ")
        if emulated:
            print("ran under the emulator, which tells no times")
        else:
            print(f"{milliseconds(model):.3f} ms, PyTorch {milliseconds(model.conv1):.3f} ms")


if __name__ == "__main__":
    main()
