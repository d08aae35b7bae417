"""alexnet_conv1, v4: the implicit matrix product on the tensor cores, its operands read from the image's rows where they lie.

Like v3, but a warp multiplies in TF32 with mma.sync, all weights stay in shared memory, and rows of the image pass by them in a
ring. PyTorch's precision setting is obeyed: TF32 where it permits that, else fp32 by three products.

Why it is faster
    v3 is bound by fp32 multiply-adds; mma.sync multiplies TF32 at six times that rate on an H200. A warp has 56 positions x 96
    channels of outputs in registers, so that 38 wavefronts of shared memory feed 42 instructions of 1024 multiply-adds. Sorting
    the rows of the image by their remainder modulo the stride turns stride 4 into stride 1 downwards; across, the 32 lanes of a
    load want tap t of position g, which is float 4g + t of the row: 32 neighbours, in 32 banks, at every tap. Each warp copies
    its share of the rows ahead (cp.async) and writes its own run of outputs while others multiply; no barrier of the block
    stands in that loop. What it costs: 11 bits of precision, as PyTorch's convolution has by default, and nearly all registers
    and shared memory of a multiprocessor for 8 warps.

    design, H200, ms                 predicted  measured  what was counted to bind it
    forward                          0.25       0.371     products 0.208 at mma.sync's 311 TFLOP/s; see Floor
    forward, strict: three products  0.70       1.05      products 0.63, instructions issued 0.42
    gradients of weight and bias     0.29       0.454     products 0.193, issued 0.185, shared memory 0.173
    the same, strict                 0.66       0.971     products 0.58
    Kernels by PyTorch's profiler, L2 flushed, from before every lane arrived at the ring's barriers for itself; the record has
    0.376, in a CUDA graph 0.367. By Nsight Compute the forward pass fills 52% of the products' pipe and 37% of the issue slots:
    with two warps a scheduler a third of the stalls are fixed waits behind an instruction, with nobody else to run, and writing
    outputs takes a sixth of the time, a third of that for instructions that were not in the cache, for the 2,200 of a warp's
    run are unrolled.
    Packing the weights anew in each call is in these: 157 KB, about 0.003, so that they are never stale. The gradient of the
    input is PyTorch's own convolution_backward, in the precision that PyTorch would use: a first layer has no need of it.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    With u = stride_h * q + phase it is, for each channel and phase, a product over taps (q, v) of rows of that phase: output
    row i reads its rows i + q. Taps along a row are taken in fours, 11 as 12; a place past the kernel has weight and x zero.
    102 fours of 3 channels are 408 of the inner size where 363 are taps.
    grad_weight[o,c,u,v] = sum over b,i,j of grad[b,o,i,j] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    is a product with positions as the inner size. 363 taps are 23 tiles of 16; positions of a row are taken in eights, 55 as
    56. Each block sums a part of the positions; then the parts are added in their order, fp32. grad_bias adds grad in fp32.

    Where PyTorch permits TF32 to convolutions (torch.backends.cudnn.conv.fp32_precision or allow_tf32, read in each call),
    operands are rounded to 11 bits and products are summed in fp32. Otherwise numbers are two TF32 values each, high and low,
    and the product is low * high + high * low + high * high, which leaves an error of 2^-22 a term. The tensor core cuts off
    what a sum does not hold, always towards zero; so strict sums begin anew with each stage and are added as fp32 numbers. An
    infinite x gives NaN in strict sums; in grad_weight it gives NaN, as a NaN does, also where it meets a position past a row's
    end.

Launches
    kernel           grid                                block  shared        work
    pack_weights     (packed weights / 256)              256    0             a thread a float, as the left operands lie
    convolve         multiprocessors                     256    223 (146) KB  a warp 56 positions x 96 (48) channels
    weight_gradient  multiprocessors                     256    167 (211) KB  a warp 48 taps x 96 (48) channels
    add_splits       (split's sums / 256)                256    0             a thread a weight or bias, of all blocks' sums
    general::*       (outputs / 256), (weights / 8)      256    0             see v1; a warp a weight's gradient

    In brackets: strict. Sizes are those of the original. A block of convolve takes 8 output rows at a time, with two phases of
    a channel in each of the ring's 3 places: 18 KB; one of weight_gradient takes 2 (4) output rows at a time, in two buffers.

Floor
    Forward: 154 MB in, 297 MB out, 0.106 ms on an H200; 54 GFLOP of TF32 are 0.129 at the 419 TFLOP/s of wgmma, 0.174 at
    mma.sync's 311. Counted for a multiprocessor, by the emulator and in the machine code (forward: 14 tiles of 8 output rows;
    gradients: 55 tiles of 2; 1.755 GHz):
                                  forward                          gradients
    mma.sync                      2,142 a row and warp, 0.208 ms   504 a tile and warp, 0.193 ms
    shared memory, wavefronts     2,450, 0.156                     690, 0.173
    instructions issued           8,600, 0.137                     2,950, 0.185
    12% of the inner size is padding, and 4% of the positions. Rows of 55 floats begin at any float; a lane's column is shifted
    so that stores begin with a sector: 10.5 million sectors are written, 9.3 at least.
    The rest of the prediction is what does not overlap: the start (weights and first rows, 0.006), warps of a scheduler that
    write or wait at once, the last tile.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size (below 2^30 rows and columns), bias or none. Compute capability 8.0 or later. The tensor cores serve
    all shapes whose weights for 16 output channels and whose rows fit into a block's shared memory: with 3 channels at stride
    4, kernels up to 28 x 28; the gradients want kernels of at most 384 taps besides. Less shared memory than Hopper's, or more
    weights, take fewer output channels a block. What does not fit goes through plain fp32 kernels in this file: right, but
    slow. Runs of 56 positions suit wide images; a row of 8 outputs takes the time of 56. Dilation, groups and padding modes
    other than the default raise, and so does anything else. Trains, and computes only the gradients that are asked for; second
    derivatives raise. Deterministic on a GPU; the gradients of another number of multiprocessors add in another order.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v4_tensor_core"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W.
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "alexnet_conv1 v4_tensor_core needs a GPU of compute capability 8.0 or later"
#endif

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int WARP = 32, WARPS = 8, THREADS = WARP * WARPS;
constexpr int MAX_SHARED_BYTES = 227 * 1024;  // of any device so far

// ---- geometry
// A warp computes a run of RUN positions of an output row. The columns of x that it reads are a row of PITCH floats in shared
// memory, from a column that is a multiple of 4, SHIFT before the run's first tap, so that 16 bytes can be copied at a time.
constexpr int RUN_TILES = 7, RUN = 8 * RUN_TILES;  // with 7 floats before it, two warps wide: see write_run
constexpr int SHIFT = (4 - PAD_W % 4) % 4;
constexpr int QUADS = ceil_div(KERNEL_W, 4);  // groups of 4 taps side by side: half of a step's inner size
constexpr int PITCH = round_up((RUN - 1) * STRIDE_W + 4 * QUADS + SHIFT, 4);
constexpr int TAPS = KERNEL_H * KERNEL_W;
constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * TAPS;

// Rows of x are sorted by their remainder modulo STRIDE_H, the phase: within a phase, the next output row reads the next row.
// A stage is what the ring holds at a time: a channel's rows of two phases, for WARPS output rows.
constexpr int PHASES = smaller(STRIDE_H, KERNEL_H), PAIR = smaller(PHASES, 2), STAGES = ceil_div(PHASES, PAIR);
constexpr int PLANE_ROWS = WARPS + ceil_div(KERNEL_H, STRIDE_H) - 1, PLANE = PLANE_ROWS * PITCH, STAGE = PAIR * PLANE;
__host__ __device__ constexpr int tap_rows(int phase) { return phase < KERNEL_H ? ceil_div(KERNEL_H - phase, STRIDE_H) : 0; }
__host__ __device__ constexpr int stage_rows(int stage) {
    return tap_rows(PAIR * stage) + (PAIR > 1 && PAIR * stage + 1 < PHASES ? tap_rows(PAIR * stage + 1) : 0);
}
// A step is one instruction's inner size, 8 taps: two quads. An odd quad is left alone in its step.
__host__ __device__ constexpr int stage_steps(int stage) { return ceil_div(stage_rows(stage) * QUADS, 2); }
__host__ __device__ constexpr int first_step(int stage) {
    int steps = 0;
    for (int before = 0; before < stage; ++before) steps += stage_steps(before);
    return steps;
}
constexpr int CHANNEL_STEPS = first_step(STAGES);
[[maybe_unused]] constexpr int UNROLLED_STEPS = CHANNEL_STEPS <= 32 ? 32 : 1;

// Output channels in tiles of 16. A block has TILES of them; blocks take turns with the groups that there are.
constexpr int OUT_TILES = ceil_div(OUT_CHANNELS, 16);
constexpr int evenly(int most) { return ceil_div(OUT_TILES, ceil_div(OUT_TILES, most)); }
__host__ __device__ constexpr int groups_of(int tiles) { return ceil_div(OUT_TILES, tiles); }
constexpr int MOST_TILES = evenly(6), HALF_TILES = ceil_div(MOST_TILES, 2), STRICT_TILES = evenly(3);

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
    bool aligned;  // rows of x begin at multiples of 16 bytes

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

// ---- weights as left operands: [group][channel][step][tile of 16 outputs][lane], a float4 each
__host__ __device__ constexpr int64_t packed_floats(int tiles) {
    return static_cast<int64_t>(groups_of(tiles)) * tiles * IN_CHANNELS * CHANNEL_STEPS * WARP * 4;
}

__global__ void __launch_bounds__(THREADS)
    pack_weights(const float* __restrict__ weight, float* __restrict__ packed, int tiles, bool strict) {
    const int64_t place = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const int element = place % 4, lane = place / 4 % WARP;
    const int64_t tile = place / (4 * WARP), line = tile / tiles;  // line: a step of a channel of a group
    const int channel = line / CHANNEL_STEPS % IN_CHANNELS, group = line / CHANNEL_STEPS / IN_CHANNELS;
    const int o = (group * tiles + static_cast<int>(tile % tiles)) * 16 + lane / 4 + element % 2 * 8;
    int step = line % CHANNEL_STEPS, stage = 0;
    for (; step >= stage_steps(stage); ++stage) step -= stage_steps(stage);
    const int quad = 2 * step + element / 2, row = quad / QUADS;  // of the stage
    const bool second = row >= tap_rows(PAIR * stage);
    const int u = PAIR * stage + second + (second ? row - tap_rows(PAIR * stage) : row) * STRIDE_H;
    const int v = quad % QUADS * 4 + lane % 4;
    const bool exists = group < groups_of(tiles) && o < OUT_CHANNELS && row < stage_rows(stage) && v < KERNEL_W;
    const float w = exists ? weight[(static_cast<int64_t>(o) * IN_CHANNELS + channel) * TAPS + u * KERNEL_W + v] : 0;
    if (place < packed_floats(tiles)) packed[place] = strict ? w : to_tf32(w);  // strict: split where they are used
}

// ---- forward
__host__ __device__ constexpr int64_t weight_bytes(int tiles) { return packed_floats(tiles) / groups_of(tiles) * 4; }
constexpr int64_t ring_bytes(int places) { return places * (STAGE * 4ll + 16); }
constexpr int64_t other_bytes(int tiles) { return weight_bytes(tiles) + WARPS * 8 * RUN * 4 + tiles * 16 * 4; }
// Copies run ahead of the products in a ring of 3; one of 2 is slower.
constexpr int RING = other_bytes(1) + ring_bytes(3) <= MAX_SHARED_BYTES ? 3 : 2;
constexpr int64_t forward_bytes(int tiles) { return other_bytes(tiles) + ring_bytes(RING); }

// Stages are counted over all tiles of a block; stage n is in place n % RING of the ring.
struct Ring {
    float* data;
    uint32_t barriers;  // full, then empty

    __device__ __forceinline__ float* at(unsigned n) const { return data + n % RING * STAGE; }
    __device__ __forceinline__ uint32_t full(unsigned n) const { return barriers + n % RING * 8; }
    __device__ __forceinline__ uint32_t empty(unsigned n) const { return full(n) + RING * 8; }
    __device__ __forceinline__ void wait_full(unsigned n) const { wait(full(n), n / RING & 1); }
    __device__ __forceinline__ void wait_empty(unsigned n) const { wait(empty(n), n / RING & 1 ^ 1); }
    __device__ __forceinline__ void release(unsigned n) const { arrive(empty(n)); }  // each lane for itself
};

// What is copied next: the stages of a block's tiles in their order. With the first tile come the weights.
struct Cursor {
    int64_t number;  // of the tile
    Tile tile;
    int next = 0;  // of its stages

    template <int TILES>
    __device__ __forceinline__ void copy(const float* __restrict__ x, const float4* __restrict__ packed, float4* weights,
                                         const Shape& shape, const Ring& ring, unsigned n) {
        if (number >= shape.tiles()) return;
        ring.wait_empty(n);
        const int channel = next / STAGES, stage = next % STAGES;
        if (number < gridDim.x / groups_of(TILES)) {  // the first
            const int first = (channel * CHANNEL_STEPS + first_step(stage)) * TILES * WARP + threadIdx.x % WARP;
            const float4* from = packed + blockIdx.x % groups_of(TILES) * (weight_bytes(TILES) / 16) + first;
#pragma unroll 1
            for (int line = threadIdx.x / WARP; line < stage_steps(stage) * TILES; line += WARPS)
                copy_16_bytes(shared_address(weights + first + line * WARP),
                              reinterpret_cast<const float*>(from + line * WARP), 16);
        }
        const float* plane = x + (tile.sample * IN_CHANNELS + channel) * shape.plane();
        const int top = tile.row * STRIDE_H - PAD_H + PAIR * stage, left = tile.column * STRIDE_W - PAD_W - SHIFT;
        copy_rows(shared_address(ring.at(n)), plane, shape, PAIR * PLANE_ROWS, left, [&](int row) {
            return row < PLANE_ROWS ? top + row * STRIDE_H : top + 1 + (row - PLANE_ROWS) * STRIDE_H;
        });
        arrive_after_copies(ring.full(n));
        if (++next < IN_CHANNELS * STAGES) return;
        next = 0, number += gridDim.x / groups_of(TILES);
        if (number < shape.tiles()) tile.set(shape, number);
    }
};

// Where a quad of taps of a stage lies, from the first row that the warp reads.
template <int STAGE_NUMBER>
__device__ __forceinline__ constexpr int quad_offset(int quad) {
    constexpr int FIRST = tap_rows(PAIR * STAGE_NUMBER);
    const int row = quad / QUADS;
    return (row < FIRST ? row * PITCH : PLANE + (row - FIRST) * PITCH) + quad % QUADS * 4;
}

// A right operand of a step: lane (g, t) has tap t of the half's quad at position g of tile i of the run. Taps are shifts: the
// 32 lanes of a load read x around g * STRIDE_W + t, at stride 4 the 32 banks. A place beyond the kernel's width is some other
// position's tap; it is zero here, or an infinite x would meet the zero weight there.
template <int STAGE_NUMBER>
__device__ __forceinline__ float load_tap(const float* x, int step, int half, int i) {
    constexpr int LAST = stage_rows(STAGE_NUMBER) * QUADS - 1;
    const int quad = smaller(2 * step + half, LAST);
    const float tap = x[quad_offset<STAGE_NUMBER>(quad) + i * 8 * STRIDE_W];
    const bool partial = KERNEL_W % 4 && quad % QUADS == QUADS - 1;
    return 2 * step + half > LAST || partial && threadIdx.x % 4 >= KERNEL_W % 4 ? 0 : tap;
}

template <int TILES>
using Sums = float[TILES][RUN_TILES][4];  // [element: position 2t, 2t + 1 of output g, then of g + 8]

// Adds the products of a stage's taps to the sums: x from the first row and column that the lane reads, weights from the
// stage's first step.
template <int STAGE_NUMBER, int TILES, bool STRICT>
__device__ __forceinline__ void multiply_stage(const float* x, const float4* weights, Sums<TILES>& sums) {
    if constexpr (!STRICT) {
#pragma unroll (UNROLLED_STEPS)
        for (int step = 0; step < stage_steps(STAGE_NUMBER); ++step) {
            float b[RUN_TILES][2];
#pragma unroll
            for (int i = 0; i < 2 * RUN_TILES; ++i)
                b[i / 2][i % 2] = to_tf32(load_tap<STAGE_NUMBER>(x, step, i % 2, i / 2));
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                const float4 a = weights[(step * TILES + m) * WARP];
#pragma unroll
                for (int i = 0; i < RUN_TILES; ++i) multiply(sums[m][i], a, b[i][0], b[i][1]);
            }
        }
    } else {
        // The tensor core cuts off what a sum does not hold, always towards zero: so a stage is summed from zero, and the sums
        // of stages are added as fp32 numbers are.
        Sums<TILES> part = {};
#pragma unroll 1
        for (int step = 0; step < stage_steps(STAGE_NUMBER); ++step) {
            float4 a_high[TILES], a_low[TILES];
#pragma unroll
            for (int m = 0; m < TILES; ++m) split(weights[(step * TILES + m) * WARP], a_high[m], a_low[m]);
#pragma unroll
            for (int i = 0; i < RUN_TILES; ++i) {
                const Split b0 = split(load_tap<STAGE_NUMBER>(x, step, 0, i));
                const Split b1 = split(load_tap<STAGE_NUMBER>(x, step, 1, i));
#pragma unroll
                for (int m = 0; m < TILES; ++m) multiply_strictly(part[m][i], a_high[m], a_low[m], b0, b1);
            }
        }
#pragma unroll
        for (int i = 0; i < TILES * RUN_TILES * 4; ++i)
            sums[i / (RUN_TILES * 4)][i / 4 % RUN_TILES][i % 4] += part[i / (RUN_TILES * 4)][i / 4 % RUN_TILES][i % 4];
    }
}

// Writes a warp's run of each output channel. Through shared memory, 8 channels at a time: lanes then write neighbouring
// floats, shifted so that only the first and the last of the 32-byte sectors that they write are incomplete.
template <int TILES>
__device__ __forceinline__ void write_run(const Sums<TILES>& sums, const float* bias, float* staging, float* __restrict__ out,
                                          int64_t out_plane, int channels, int columns) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
        const int m = i / 2, half = i % 2;
        const float b = bias[8 * i + g];
        __syncwarp();  // the channels before have been read
#pragma unroll
        for (int k = 0; k < RUN_TILES; ++k)
            *reinterpret_cast<float2*>(staging + g * RUN + 8 * k + 2 * t) =
                make_float2(sums[m][k][2 * half] + b, sums[m][k][2 * half + 1] + b);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 8; ++k, out += out_plane) {
            const bool exists = OUT_CHANNELS % (16 * TILES) == 0 || 8 * i + k < channels;
            const int shift = reinterpret_cast<uintptr_t>(out) / 4 % 8, column = lane - shift;
            float* const to = out + lane - shift;
            if (exists && column >= 0 && column < columns) to[0] = staging[k * RUN + column];
            if (exists && column + WARP < columns) to[WARP] = staging[k * RUN + column + WARP];
        }
    }
}

template <int NUMBER, class Visit>
__device__ __forceinline__ void for_stages(const Visit& visit) {
    if constexpr (NUMBER < STAGES) {
        visit(std::integral_constant<int, NUMBER>());
        for_stages<NUMBER + 1>(visit);
    }
}

template <int TILES, bool STRICT>
__global__ void __launch_bounds__(THREADS, 1)
    convolve(const Shape shape, const float* __restrict__ x, const float4* __restrict__ packed,
             const float* __restrict__ bias, float* __restrict__ out) {
    extern __shared__ __align__(128) char memory[];
    float4* const weights = reinterpret_cast<float4*>(memory);
    float* const ring_data = reinterpret_cast<float*>(memory + weight_bytes(TILES));
    float* const staging = ring_data + RING * STAGE + threadIdx.x / WARP * (8 * RUN);
    float* const biases = ring_data + RING * STAGE + WARPS * 8 * RUN;
    const Ring ring = {ring_data, shared_address(biases + TILES * 16)};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int group = blockIdx.x % groups_of(TILES), first_channel = group * TILES * 16;
    if (threadIdx.x == 0)
        for (int i = 0; i < RING; ++i) barrier_init(ring.full(i), THREADS), barrier_init(ring.empty(i), THREADS);
    if (threadIdx.x < TILES * 16) {
        const int o = first_channel + threadIdx.x;
        biases[threadIdx.x] = bias && o < OUT_CHANNELS ? bias[o] : 0;
    }
    __syncthreads();

    Cursor cursor;
    cursor.number = blockIdx.x / groups_of(TILES);
    cursor.tile.set(shape, cursor.number);
    const auto copy_next = [&](unsigned n) { cursor.copy<TILES>(x, packed, weights, shape, ring, n); };
#pragma unroll 1
    for (int i = 0; i < RING - 1; ++i) copy_next(i);

    unsigned n = 0;  // of the stage that is multiplied
    for (int64_t number = blockIdx.x / groups_of(TILES); number < shape.tiles(); number += gridDim.x / groups_of(TILES)) {
        Tile tile;
        tile.set(shape, number);
        const int row = tile.row + warp;
        Sums<TILES> sums;
#pragma unroll
        for (int i = 0; i < TILES * RUN_TILES * 4; ++i) sums[i / (RUN_TILES * 4)][i / 4 % RUN_TILES][i % 4] = 0;
#pragma unroll 1
        for (int channel = 0; channel < IN_CHANNELS; ++channel)
            for_stages<0>([&](auto stage) {
                constexpr int NUMBER = decltype(stage)::value;
                ring.wait_full(n);
                if (row < shape.out_h)
                    multiply_stage<NUMBER, TILES, STRICT>(
                        ring.at(n) + warp * PITCH + lane / 4 * STRIDE_W + lane % 4 + SHIFT,
                        weights + (channel * CHANNEL_STEPS + first_step(NUMBER)) * TILES * WARP + lane, sums);
                ring.release(n);
                copy_next(n + RING - 1);
                ++n;
            });
        if (row < shape.out_h)
            write_run<TILES>(sums, biases, staging,
                             out + (tile.sample * OUT_CHANNELS + first_channel) * shape.out_plane() +
                                 static_cast<int64_t>(row) * shape.out_w + tile.column,
                             shape.out_plane(), smaller(TILES * 16, OUT_CHANNELS - first_channel),
                             smaller(RUN, shape.out_w - tile.column));
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
    const int64_t sample = place / shape.out_plane() / OUT_CHANNELS;
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
    out[place] = bias ? sum + bias[o] : sum;
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
    return s;
}

static int64_t blocks_of(int64_t threads) { return (threads + THREADS - 1) / THREADS; }

// How many tiles of 16 output channels a block takes: as many as its device has shared memory for; 0 where not one fits.
int forward_tiles(bool strict) {
    const int available = Device().shared_bytes;
    for (const int tiles : {strict ? STRICT_TILES : MOST_TILES, strict ? 1 : HALF_TILES, 1})
        if (forward_bytes(tiles) <= available) return tiles;
    return 0;
}
int64_t packed_weights(int tiles) { return packed_floats(tiles); }

template <int TILES, bool STRICT>
static cudaError_t launch_tiles(const Shape& shape, const float* x, const float* packed, const float* bias, float* out,
                                cudaStream_t stream) {
    if constexpr (forward_bytes(TILES) > MAX_SHARED_BYTES) {
        return cudaErrorNotSupported;  // no device has so much
    } else {
        const int bytes = forward_bytes(TILES), groups = groups_of(TILES);
        const auto convolution = convolve<TILES, STRICT>;
        const cudaError_t error = cudaFuncSetAttribute(convolution, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
        const int64_t most = Device().multiprocessors > groups ? Device().multiprocessors / groups : 1, tiles = shape.tiles();
        convolution<<<(tiles < most ? tiles : most) * groups, THREADS, bytes, stream>>>(
            shape, x, reinterpret_cast<const float4*>(packed), bias, out);
        return cudaSuccess;
    }
}

// out (batch, OUT_CHANNELS, out_h, out_w); `packed` has packed_weights(tiles) floats, 0 of them where tiles is 0; bias may be
// null.
cudaError_t launch_convolve(const float* x, const float* weight, const float* bias, float* packed, float* out, int tiles,
                            bool strict, int64_t batch, int height, int width, cudaStream_t stream) {
    const Shape shape = make_shape(x, batch, height, width, WARPS);
    if (tiles == 0) {
        general::convolve<<<blocks_of(batch * OUT_CHANNELS * shape.out_h * shape.out_w), THREADS, 0, stream>>>(shape, x, weight,
                                                                                                              bias, out);
        return cudaSuccess;
    }
    pack_weights<<<blocks_of(packed_floats(tiles)), THREADS, 0, stream>>>(weight, packed, tiles, strict);
    const auto launch = strict ? (tiles == STRICT_TILES ? launch_tiles<STRICT_TILES, true> : launch_tiles<1, true>)
                        : tiles == MOST_TILES ? launch_tiles<MOST_TILES, false>
                        : tiles == HALF_TILES ? launch_tiles<HALF_TILES, false>
                                              : launch_tiles<1, false>;
    return launch(shape, x, packed, bias, out, stream);
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

int forward_tiles(bool strict);
int64_t packed_weights(int tiles);
int64_t gradient_terms(bool strict, int64_t batch, int height, int width);
cudaError_t launch_convolve(const float*, const float*, const float*, float*, float*, int, bool, int64_t, int, int,
                            cudaStream_t);
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
        int capability = 0;
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, x.get_device()));
        TORCH_CHECK(capability >= 8, message("alexnet_conv1 v4: expected a GPU of compute capability 8.0 or later, got ",
                                             capability, ".x; v1_direct runs on any"));
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
    const int tiles = forward_tiles(strict);
    check_blocks(tiles ? packed_weights(tiles) : out.numel());
    at::Tensor packed = call.empty({tiles ? packed_weights(tiles) : 0});
    C10_CUDA_CHECK(launch_convolve(call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(),
                                   bias.defined() ? bias.const_data_ptr<float>() : nullptr, pointer_to(packed),
                                   pointer_to(out), tiles, strict, call.batch, call.height, call.width, call.stream));
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
        return build(*self.sources, **constants)

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
