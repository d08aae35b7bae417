"""alexnet_conv1, v5: warpgroups multiply scaled halves where they lie; producers load, scale and convert beside them.

Like v4, but the forward pass's products are wgmma's, on halves: twice the rate of TF32, both operands from shared memory.
Warpgroups of their own prepare x, and outputs leave by bulk copies.

Why it is faster
    v4's eight warps load, convert, multiply and write in turn, and mma.sync keeps the tensor cores busy for half of the time. A
    half has TF32's 11 bits, if not its range, and wgmma multiplies it at twice the rate. Four columns of two rows of x are 16
    bytes of halves, and neighbouring outputs, at stride 4, read neighbouring pieces: so rows as they lie are wgmma's operand,
    and a tap is an address. Two warpgroups multiply, each at a tile of its own, so that one writes while the other multiplies;
    each has a warpgroup that fills its ring. What it costs: a scale that follows the data, 83 KB of weights in shared memory,
    and compute capability 9.0.

    design, H200, ms                 predicted  measured  v4     what was counted to bind it
    forward                          0.15       0.198     0.371  bytes 0.106; shared memory 0.100; products 0.073
    forward, strict: three products  0.35       0.497     1.05   shared memory 0.31; products 0.219
    training step, weights           0.60       0.65             v4's gradient, 0.450
    Measured on the way, forward and strict: 0.245 and 0.583 with one warpgroup of producers for both rings (0.226 without the
    stores, 0.200 without the loads); 0.230 and 0.535 with one for each (0.201 with neither loads nor stores): instructions
    around products, loads and copies bind, not memory. Stores of 4 bytes, as v4's, take 0.255 where bulk copies take 0.245;
    asking for rows ahead with L2 prefetches made it slower, 0.246 instead of 0.230. Then those instructions were cut: an
    epilogue without branches, descriptors and bulk copies from uniform registers, half of the address arithmetic, 0.195 and
    0.494. (Kernels by PyTorch's profiler, L2 flushed; packing the weights adds 0.003.)
    Gradients of weight and bias are v4's kernels. The same product on halves, x as left operand by ldmatrix and wgmma, took
    0.515 where v4's takes 0.440; x was loaded and converted twice in it, but what bound it was not found out. The gradient of
    the input is PyTorch's own convolution_backward, as in v4.

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
    and the sums of grad_bias are v4's, with its precision: TF32, or two TF32 values and three products.

Launches
    kernel           grid                                block  shared        work
    pack_weights     (output channels)                   128    0             a block a channel: its scale, and halves
    convolve         multiprocessors                     512    219 (218) KB  a warpgroup 192 positions x 96 (48) channels
    weight_gradient  multiprocessors                     256    167 (211) KB  a warp 48 taps x 96 (48) channels
    add_splits       (split's sums / 256)                256    0             a thread a weight or bias, of all blocks' sums
    general::*       (outputs / 256), (weights / 8)      256    0             see v1; a warp a weight's gradient

    In brackets: strict. Sizes are those of the original. A stage of convolve is a channel's rows for a span, 12 KB as halves
    (strict: 25), with 4 (2) in each ring. Outputs go out through 3 buffers of 8 channels for each warpgroup, 6 KB each.

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
    between their rows. Gradients: see v4. Dilation, groups and padding modes other than the default raise, and so does anything
    else. Trains, and computes only the gradients that are asked for; second derivatives raise. Deterministic on a GPU; the
    gradients of another number of multiprocessors add in another order.
"""

import functools
import hashlib
import os
import shutil
import sys

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

// ---- geometry of the gradients
// A warp works on a run of RUN positions of an output row. The columns of x that it reads are a row of PITCH floats in shared
// memory, from a column that is a multiple of 4, SHIFT before the run's first tap, so that 16 bytes can be copied at a time.
constexpr int RUN_TILES = 7, RUN = 8 * RUN_TILES;
constexpr int SHIFT = (4 - PAD_W % 4) % 4;
constexpr int QUADS = ceil_div(KERNEL_W, 4);  // groups of 4 taps side by side
constexpr int PITCH = round_up((RUN - 1) * STRIDE_W + 4 * QUADS + SHIFT, 4);
constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * TAPS;

// Output channels in tiles of 16. A block has TILES of them; blocks take turns with the groups that there are.
constexpr int OUT_TILES = ceil_div(OUT_CHANNELS, 16);
constexpr int evenly(int most) { return ceil_div(OUT_TILES, ceil_div(OUT_TILES, most)); }
__host__ __device__ constexpr int groups_of(int tiles) { return ceil_div(OUT_TILES, tiles); }
constexpr int MOST_TILES = evenly(6), STRICT_TILES = evenly(3);

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
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const float* from, int bytes) {  // the rest becomes zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_4_bytes(uint32_t to, const float* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
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
// d += a * b by three products, small terms first.
__device__ __forceinline__ void multiply_strictly(float (&d)[4], float4 a_high, float4 a_low, Split b0, Split b1) {
    multiply(d, a_low, b0.high, b1.high);
    multiply(d, a_high, b0.low, b1.low);
    multiply(d, a_high, b0.high, b1.high);
}
__device__ __forceinline__ float4 to_tf32(float4 v) {
    return make_float4(to_tf32(v.x), to_tf32(v.y), to_tf32(v.z), to_tf32(v.w));
}
__device__ __forceinline__ void split(float4 v, float4& high, float4& low) {
    const Split x = split(v.x), y = split(v.y), z = split(v.z), w = split(v.w);
    high = make_float4(x.high, y.high, z.high, w.high), low = make_float4(x.low, y.low, z.low, w.low);
}

// ---- the work, and who does it
// A tile is `rows` output rows of a sample, a run of each. Tiles are numbered; runs change first, samples last.
struct Shape {
    int64_t batch;
    int height, width, out_h, out_w;
    int rows, row_blocks, runs;
    bool aligned, paired;  // rows of x begin at multiples of 16 bytes; of 8, and so do pairs of columns that exist

    __host__ __device__ int64_t tiles() const { return batch * row_blocks * runs; }
    __device__ __forceinline__ int64_t plane() const { return static_cast<int64_t>(height) * width; }
    __device__ __forceinline__ int64_t out_plane() const { return static_cast<int64_t>(out_h) * out_w; }
};

struct Tile {
    int64_t sample;
    int row, column;  // its first position

    __device__ __forceinline__ void set(const Shape& shape, int64_t number) {
        const int64_t block = number / shape.runs;
        sample = block / shape.row_blocks;
        row = static_cast<int>(block - sample * shape.row_blocks) * shape.rows;
        column = static_cast<int>(number - block * shape.runs) * RUN;
    }
};

// Asks for rows of a plane of x, PITCH columns of each from `left` on, and for zeros where there is none. Row i of them is row
// h_of(i) of the plane; warps take turns with rows. Pieces are 4 columns, which exist as a whole or not at all where rows are
// aligned, or single floats.
template <int FLOATS, class RowOf>
__device__ __forceinline__ void copy_pieces(uint32_t to, const float* __restrict__ plane, const Shape& shape, int rows,
                                            int left, RowOf h_of) {
    const int first = threadIdx.x % WARP * FLOATS;  // column
#pragma unroll 1
    for (int row = threadIdx.x / WARP; row < rows; row += WARPS) {
        const int h = h_of(row);
        const bool row_exists = h >= 0 && h < shape.height;
        const float* from = plane + static_cast<int64_t>(h) * shape.width + left + first;
        const uint32_t address = to + (row * PITCH + first) * 4;
#pragma unroll (2)
        for (int column = 0; column < PITCH; column += WARP * FLOATS) {
            if (first + column >= PITCH) break;
            const int w = left + first + column;
            const bool exists = row_exists && w >= 0 && w < shape.width;
            if (FLOATS == 4) copy_16_bytes(address + 4 * column, exists ? from + column : plane, exists ? 16 : 0);
            else copy_4_bytes(address + 4 * column, exists ? from + column : plane, exists ? 4 : 0);
        }
    }
}
template <class RowOf>
__device__ __forceinline__ void copy_rows(uint32_t to, const float* __restrict__ plane, const Shape& shape, int rows, int left,
                                          RowOf h_of) {
    if (shape.aligned) copy_pieces<4>(to, plane, shape, rows, left, h_of);
    else copy_pieces<1>(to, plane, shape, rows, left, h_of);
}

// ---- an output in plain fp32
namespace general {

__device__ __forceinline__ float output(const Shape& shape, const float* __restrict__ x, const float* __restrict__ weight,
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

}  // namespace general

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
    __device__ __forceinline__ void arrive_full(const Turn& turn) const {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(full(turn.place));
    }
    __device__ __forceinline__ void arrive_empty(const Turn& turn) const {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(empty(turn.place));
    }
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
            range.out[position] = general::output(shape, tensors.x, tensors.weight, tensors.bias, span.sample, o, i, j);
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
                barrier_init(ring.full(place), PRODUCER_WARPS), barrier_init(ring.empty(place), WARPGROUP / WARP);
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

// ---- the gradient of the weights: x (16 taps x 8 positions) times grad (8 positions x 8 outputs), summed over all positions.
// All taps of a chunk of channels are a matrix's rows, in tiles of 16; each warp has GRAD_TILES of them, and all outputs of the
// block. A sum takes positions in any order: inner index t is position 2t, and t + 4 is position 2t + 1.
constexpr int MOST_GRAD_TILES = 3, MOST_GRAD_TAPS = MOST_GRAD_TILES * 16 * WARPS;
constexpr bool TAPS_FIT = TAPS <= MOST_GRAD_TAPS;
constexpr int MOST_CHUNK = TAPS_FIT ? MOST_GRAD_TAPS / TAPS : 1;
constexpr int CHUNKS = ceil_div(IN_CHANNELS, MOST_CHUNK), CHUNK = ceil_div(IN_CHANNELS, CHUNKS);
constexpr int GRAD_TAPS = CHUNK * TAPS, GRAD_TILES = ceil_div(GRAD_TAPS, 16 * WARPS);
// The order of a chunk's taps: those in whole groups of 8 along the rows of the kernel first, then the rest of all rows. The 8
// taps that a load reads then mostly lie in different banks.
constexpr int WHOLE = KERNEL_W / 8 * 8, REST = KERNEL_W - WHOLE;
__device__ __forceinline__ int ordered_tap(int place, int taps) {  // its number in the chunk's (channels, KERNEL_H, KERNEL_W)
    const int in_whole = taps / KERNEL_W * WHOLE, rest = place - in_whole;
    if (WHOLE > 0 && place < in_whole) return place / (WHOLE > 0 ? WHOLE : 1) * KERNEL_W + place % (WHOLE > 0 ? WHOLE : 1);
    return REST > 0 ? rest / (REST > 0 ? REST : 1) * KERNEL_W + WHOLE + rest % (REST > 0 ? REST : 1) : 0;
}
constexpr int MOST_GRAD_ROWS = 4;  // of outputs in a tile

__host__ __device__ constexpr int grad_x_rows(int rows) { return (rows - 1) * STRIDE_H + KERNEL_H; }
__host__ __device__ constexpr int grad_floats(int tiles, int rows) { return rows * tiles * 16 * RUN; }
constexpr int64_t gradient_bytes(int tiles, int rows) {  // two tiles' data
    return 8 * (grad_floats(tiles, rows) + static_cast<int64_t>(CHUNK) * grad_x_rows(rows) * PITCH);
}

// What a block of the gradient works on.
struct Part {
    int first_out, first_channel;
    const float *x, *grad;

    // Asks for a tile's positions of grad, [row][output][position], zeros where there is none; and for what they meet in x,
    // [channel][row][column].
    template <int TILES>
    __device__ __forceinline__ void copy(float* to, const Shape& shape, int64_t number) const {
        Tile tile;
        tile.set(shape, number);
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const int columns = smaller(RUN, shape.out_w - tile.column), outs = smaller(TILES * 16, OUT_CHANNELS - first_out);
#pragma unroll 1
        for (int row = 0; row < shape.rows; ++row)
#pragma unroll
            for (int first = 0; first < RUN; first += WARP) {
                const int column = first + lane;
                if (column >= RUN) break;
                const bool exists = tile.row + row < shape.out_h && column < columns;  // else some address, and 0 bytes of it
                const float* from = grad + (tile.sample * OUT_CHANNELS + first_out) * shape.out_plane() +
                                    static_cast<int64_t>(tile.row + (exists ? row : 0)) * shape.out_w + tile.column +
                                    (exists ? column : 0) + warp * shape.out_plane();
                const uint32_t address = shared_address(to + (row * TILES * 16 + warp) * RUN + column);
#pragma unroll
                for (int o = 0; o < TILES * 16; o += WARPS, from += WARPS * shape.out_plane()) {
                    const bool output_exists = OUT_CHANNELS % (TILES * 16) == 0 || warp + o < outs;
                    copy_4_bytes(address + o * RUN * 4, output_exists ? from : grad, exists && output_exists ? 4 : 0);
                }
            }
        to += grad_floats(TILES, shape.rows);
        const int rows = grad_x_rows(shape.rows), channels = smaller(CHUNK, IN_CHANNELS - first_channel);
        const int top = tile.row * STRIDE_H - PAD_H, left = tile.column * STRIDE_W - PAD_W - SHIFT;
        const float* planes = x + (tile.sample * IN_CHANNELS + first_channel) * shape.plane();
#pragma unroll 1
        for (int c = 0; c < channels; ++c)
            copy_rows(shared_address(to + c * rows * PITCH), planes + c * shape.plane(), shape, rows, left,
                      [&](int row) { return top + row; });
    }
};

// For the bias: 16 threads add a run of grad, each 4 positions, in one output of each tile.
template <int TILES>
__device__ __forceinline__ void add_bias(const float* grad, int rows, float (&sums)[TILES]) {
    const int output = threadIdx.x / 16, quad = threadIdx.x % 16;
#pragma unroll 1
    for (int row = 0; row < rows; ++row)
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            if (4 * quad >= RUN) continue;
            const float4 v = *reinterpret_cast<const float4*>(grad + ((row * TILES + m) * 16 + output) * RUN + 4 * quad);
            sums[m] += (v.x + v.y) + (v.z + v.w);
        }
}
static_assert(THREADS == 16 * 16, "a tile has 16 outputs");

// The sums of a split are written as they lie in registers: [group of outputs][chunk of channels][tile of taps][8
// outputs][warp][lane], a float4 each; then come those of the biases.
__host__ __device__ constexpr int64_t part_floats(int tiles) { return 2ll * tiles * GRAD_TILES * THREADS * 4; }
__host__ __device__ constexpr int64_t split_floats(int tiles) {
    return groups_of(tiles) * CHUNKS * part_floats(tiles) + round_up(OUT_CHANNELS, 4);
}

template <int TILES, bool STRICT>
__global__ void __launch_bounds__(THREADS, 1)
    weight_gradient(const Shape shape, const float* __restrict__ x, const float* __restrict__ grad,
                    float* __restrict__ terms) {
    extern __shared__ __align__(128) char memory[];
    float* const data = reinterpret_cast<float*>(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    constexpr int PARTS = groups_of(TILES) * CHUNKS;
    const int first_out = blockIdx.x % groups_of(TILES) * TILES * 16, chunk = blockIdx.x / groups_of(TILES) % CHUNKS;
    const int64_t number_of_split = blockIdx.x / PARTS, splits = gridDim.x / PARTS;  // of the positions
    const int64_t first = shape.tiles() * number_of_split / splits, last = shape.tiles() * (number_of_split + 1) / splits;
    const Part part = {first_out, chunk * CHUNK, x, grad};
    const int rows = grad_x_rows(shape.rows), buffer = grad_floats(TILES, shape.rows) + CHUNK * rows * PITCH;
    const int taps = smaller(CHUNK, IN_CHANNELS - chunk * CHUNK) * TAPS;

    int offsets[2 * GRAD_TILES];  // where x meets the lane's taps, g and g + 8 of each tile, at position 2t
#pragma unroll
    for (int i = 0; i < 2 * GRAD_TILES; ++i) {
        const int place = (warp * GRAD_TILES * 2 + i) * 8 + g;
        const int tap = place < taps ? ordered_tap(place, taps) : 0;  // or any; that row is not used
        offsets[i] = (tap / TAPS * rows + tap % TAPS / KERNEL_W) * PITCH + tap % KERNEL_W + SHIFT + 2 * t * STRIDE_W;
    }
    float sums[GRAD_TILES][2 * TILES][4], bias_sums[TILES] = {};
#pragma unroll
    for (int i = 0; i < GRAD_TILES * 2 * TILES * 4; ++i) sums[i / (8 * TILES)][i / 4 % (2 * TILES)][i % 4] = 0;
    if (first < last) part.copy<TILES>(data, shape, first);
    commit_copies();
#pragma unroll 1
    for (int64_t number = first; number < last; ++number) {
        const int here = static_cast<int>(number - first) % 2 * buffer;
        if (number + 1 < last) part.copy<TILES>(data + (buffer - here), shape, number + 1);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        float tile_sums[STRICT ? GRAD_TILES : 1][2 * TILES][4] = {};  // strict: see multiply_stage
#pragma unroll 1
        for (int row = 0; row < shape.rows; ++row) {
            const float* x_row = data + here + grad_floats(TILES, shape.rows) + row * STRIDE_H * PITCH;
            const float* grad_row = data + here + (row * TILES * 16 + g) * RUN + 2 * t;
#pragma unroll 1
            for (int step = 0; step < RUN_TILES; ++step) {
                float4 a[GRAD_TILES], a_low[GRAD_TILES];
#pragma unroll
                for (int i = 0; i < GRAD_TILES; ++i) {
                    const float *upper = x_row + offsets[2 * i] + 8 * step * STRIDE_W;
                    const float *lower = x_row + offsets[2 * i + 1] + 8 * step * STRIDE_W;
                    a[i] = make_float4(upper[0], lower[0], upper[STRIDE_W], lower[STRIDE_W]);
                    if constexpr (STRICT) split(a[i], a[i], a_low[i]);
                    else a[i] = to_tf32(a[i]);
                }
#pragma unroll
                for (int j = 0; j < 2 * TILES; ++j) {
                    const float2 v = *reinterpret_cast<const float2*>(grad_row + 8 * j * RUN + 8 * step);
                    if constexpr (STRICT) {
                        const Split b0 = split(v.x), b1 = split(v.y);
#pragma unroll
                        for (int i = 0; i < GRAD_TILES; ++i) multiply_strictly(tile_sums[i][j], a[i], a_low[i], b0, b1);
                    } else {
                        const float b[2] = {to_tf32(v.x), to_tf32(v.y)};
#pragma unroll
                        for (int i = 0; i < GRAD_TILES; ++i) multiply(sums[i][j], a[i], b[0], b[1]);
                    }
                }
            }
        }
        if constexpr (STRICT)
#pragma unroll
            for (int i = 0; i < GRAD_TILES * 2 * TILES * 4; ++i)
                sums[i / (8 * TILES)][i / 4 % (2 * TILES)][i % 4] += tile_sums[i / (8 * TILES)][i / 4 % (2 * TILES)][i % 4];
        add_bias<TILES>(data + here, shape.rows, bias_sums);
        __syncthreads();  // the buffer has been read
    }

    terms += number_of_split * split_floats(TILES);
    float4* const part_terms = reinterpret_cast<float4*>(terms + blockIdx.x % PARTS * part_floats(TILES)) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < GRAD_TILES * 2 * TILES; ++i) {
        const float(&tile)[4] = sums[i / (2 * TILES)][i % (2 * TILES)];
        part_terms[i * THREADS] = make_float4(tile[0], tile[1], tile[2], tile[3]);
    }
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) bias_sums[m] += __shfl_xor_sync(0xffffffffu, bias_sums[m], offset);
        const int o = first_out + m * 16 + threadIdx.x / 16;
        if (chunk == 0 && threadIdx.x % 16 == 0 && o < OUT_CHANNELS) terms[PARTS * part_floats(TILES) + o] = bias_sums[m];
    }
}

// Adds the splits' terms in their order, and puts the sums where they belong. Either gradient may be null.
__global__ void __launch_bounds__(THREADS)
    add_splits(const float* __restrict__ terms, float* __restrict__ grad_weight, float* __restrict__ grad_bias, int64_t splits,
               int tiles) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x, size = split_floats(tiles);
    const int64_t of_bias = place - (size - round_up(OUT_CHANNELS, 4));
    if (of_bias >= OUT_CHANNELS) return;
    float sum = 0;
#pragma unroll 16
    for (int64_t split = 0; split < splits; ++split) sum += terms[split * size + place];
    if (of_bias >= 0) {
        if (grad_bias) grad_bias[of_bias] = sum;
        return;
    }
    const int element = place % 4, lane = place / 4 % WARP, warp = place / (4 * WARP) % WARPS;
    const int64_t tile = place / (4 * THREADS), part = tile / (2 * tiles * GRAD_TILES);
    const int tap_tile = tile / (2 * tiles) % GRAD_TILES, group = part % groups_of(tiles), chunk = part / groups_of(tiles);
    const int o = group * tiles * 16 + static_cast<int>(tile % (2 * tiles)) * 8 + lane % 4 * 2 + element % 2;
    const int row = (warp * GRAD_TILES + tap_tile) * 16 + lane / 4 + element / 2 * 8;
    const int taps = smaller(CHUNK, IN_CHANNELS - chunk * CHUNK) * TAPS;
    if (grad_weight && o < OUT_CHANNELS && row < taps)
        grad_weight[(static_cast<int64_t>(o) * IN_CHANNELS + chunk * CHUNK) * TAPS + ordered_tap(row, taps)] = sum;
}

// ---- plain kernels in fp32, for shapes whose weights or rows do not fit into shared memory
namespace general {

// A thread an output, as in v1.
__global__ void __launch_bounds__(THREADS)
    convolve(const Shape shape, const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
             float* __restrict__ out) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (place >= shape.batch * OUT_CHANNELS * shape.out_plane()) return;
    const int j = place % shape.out_w, i = place / shape.out_w % shape.out_h;
    const int o = place / shape.out_plane() % OUT_CHANNELS;
    out[place] = output(shape, x, weight, bias, place / shape.out_plane() / OUT_CHANNELS, o, i, j);
}

// A warp a weight, then one a bias. Either gradient may be null.
__global__ void __launch_bounds__(THREADS)
    parameter_gradients(const Shape shape, const float* __restrict__ x, const float* __restrict__ grad,
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

}  // namespace general

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

static Shape make_shape(const float* x, int64_t batch, int height, int width, int rows) {
    Shape s;
    s.batch = batch, s.height = height, s.width = width, s.rows = rows;
    s.out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1, s.out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
    s.row_blocks = ceil_div(s.out_h, rows), s.runs = ceil_div(s.out_w, RUN);
    s.aligned = width % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
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
    const Plan plan = make_plan(make_shape(nullptr, batch, height, width, WARPS), strict);
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
    const Shape shape = make_shape(x, batch, height, width, WARPS);
    if (!packed) {
        general::convolve<<<blocks_of(batch * OUT_CHANNELS * shape.out_h * shape.out_w), THREADS, 0, stream>>>(shape, x, weight,
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

// The gradient's part in a block: tiles of 16 output channels and rows of a tile of positions; 0 where not one fits.
struct GradientPlan {
    int tiles, rows;
    explicit GradientPlan(bool strict) {
        const int available = Device().shared_bytes;
        for (const int candidate : {strict ? STRICT_TILES : MOST_TILES, STRICT_TILES})
            for (rows = MOST_GRAD_ROWS; rows > 0; --rows) {
                tiles = candidate;
                if (TAPS_FIT && gradient_bytes(tiles, rows) <= available) return;
            }
        tiles = 0;
    }
    int64_t parts() const { return groups_of(tiles) * CHUNKS; }
    Shape shape(const float* x, int64_t batch, int height, int width) const {
        return make_shape(x, batch, height, width, rows);
    }
    // Splits of the positions, so that every multiprocessor has a block; the order of additions depends on them.
    int64_t splits(const Shape& shape) const {
        const int64_t most = (Device().multiprocessors + parts() - 1) / parts();
        return shape.tiles() < most ? shape.tiles() : most;
    }
};

// The floats between the kernels; none where the plain kernel is used.
int64_t gradient_terms(bool strict, int64_t batch, int height, int width) {
    const GradientPlan plan(strict);
    return plan.tiles ? plan.splits(plan.shape(nullptr, batch, height, width)) * split_floats(plan.tiles) : 0;
}

template <int TILES, bool STRICT>
static cudaError_t launch_gradient_tiles(const GradientPlan& plan, const Shape& shape, const float* x, const float* grad,
                                         float* terms, cudaStream_t stream) {
    if constexpr (!TAPS_FIT || gradient_bytes(TILES, 1) > MAX_SHARED_BYTES) {
        return cudaErrorNotSupported;
    } else {
        const int bytes = gradient_bytes(TILES, plan.rows);
        const auto gradient = weight_gradient<TILES, STRICT>;
        const cudaError_t error = cudaFuncSetAttribute(gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
        gradient<<<plan.parts() * plan.splits(shape), THREADS, bytes, stream>>>(shape, x, grad, terms);
        return cudaSuccess;
    }
}

// grad_weight and grad_bias may be null; `terms` has gradient_terms floats.
cudaError_t launch_parameter_gradients(const float* x, const float* grad, float* terms, float* grad_weight, float* grad_bias,
                                       bool strict, int64_t batch, int height, int width, cudaStream_t stream) {
    const GradientPlan plan(strict);
    if (plan.tiles == 0) {
        general::parameter_gradients<<<(WEIGHTS + OUT_CHANNELS + WARPS - 1) / WARPS, THREADS, 0, stream>>>(
            make_shape(x, batch, height, width, WARPS), x, grad, grad_weight, grad_bias);
        return cudaSuccess;
    }
    const Shape shape = plan.shape(x, batch, height, width);
    const auto launch = strict                     ? launch_gradient_tiles<STRICT_TILES, true>
                        : plan.tiles == MOST_TILES ? launch_gradient_tiles<MOST_TILES, false>
                                                   : launch_gradient_tiles<STRICT_TILES, false>;
    const cudaError_t error = launch(plan, shape, x, grad, terms, stream);
    if (error == cudaSuccess)
        add_splits<<<blocks_of(split_floats(plan.tiles)), THREADS, 0, stream>>>(terms, grad_weight, grad_bias,
                                                                               plan.splits(shape), plan.tiles);
    return error;
}
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
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

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("conv2d", &conv2d);
    m.impl("parameter_grads", &parameter_grads);
    m.impl("input_grad", &input_grad);
}
"""


def register(namespace):
    """Shapes for torch.compile, and autograd."""
    operators = getattr(torch.ops, namespace)

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

    def save(ctx, inputs, output):
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, *wanted = ctx.needs_input_grad[:3]
        geometry = x, weight, ctx.stride, ctx.padding
        grad_x = operators.input_grad(grad, *geometry) if needs_x else None
        grad_weight, grad_bias = operators.parameter_grads(grad, *geometry, wanted) if any(wanted) else (None, None)
        return grad_x, grad_weight if wanted[0] else None, grad_bias if wanted[1] else None, None, None

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    torch.library.register_autograd(f"{namespace}::conv2d", backward, setup_context=save)
    for name in ("parameter_grads", "input_grad"):
        torch.library.register_autograd(f"{namespace}::{name}", refuse)


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
    if not torch.cuda.is_available():
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew().cuda()
    x = torch.randn(256, 3, 224, 224, device="cuda")

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
        print(f"{milliseconds(model):.3f} ms, PyTorch {milliseconds(model.conv1):.3f} ms")


if __name__ == "__main__":
    main()
