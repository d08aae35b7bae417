"""alexnet_conv1, v3: implicit GEMM, the same product without the matrix, in register tiles; plain fp32 as fast as it goes.

Like v2, but the columns are never written: a block keeps the rows of the image that its positions need in shared memory, and a
thread finds its windows there. Strict fp32 is this variant's only precision.

Why it is faster
    v2 writes and reads a matrix in which each pixel stands 7.3 times, 2.25 GB beside 0.45 that are needed, and of the
    instructions of its product three in four are multiply-adds. Here a thread has 7 neighbouring positions in 12 channels. A
    row of the kernel touches 35 neighbouring pixels for all 7 windows: they are loaded into registers once and serve 11 taps,
    because a tap only shifts which register is meant. So 42 loads of 16 bytes feed 924 multiply-adds. While a slice of the taps
    (four rows of the kernel) is computed with, cp.async fetches the next (double buffering), with one barrier between. What it
    costs: a build for each kernel and stride, and a packed copy of the weights in each call. Predicted 1.25 ms on an H200,
    measured 1.57.

Mathematics
    That of v1, in fp32, as one chain of fused multiply-adds for each output: over c, and in it u, and v (in slices, where the
    kernel is large); the bias last. The chain's rounding grows with its length: 363 terms err as PyTorch's do.
    grad_weight[o,c,u,v] = sum over b,i,j of grad[b,o,i,j] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    grad_bias[o]         = sum over b,i,j of grad[b,o,i,j]
    grad_x[b,c,h,w]      = sum over t,s,o of weight[o, c, a + t*stride_h, b + s*stride_w] * grad[b, o, y - t, z - s]
                           for the pixel h = y*stride_h + a - pad_h, w = z*stride_w + b - pad_w
    In the last line the pixels are sorted by phase (a, b), a polyphase decomposition: those of one phase have the same taps,
    and for them the stride is 1. It is summed in slices of 16 channels. Positions past an edge are left out, not multiplied by
    zero, so an infinite or NaN pixel reaches the gradients that use it and no others.

Launches
    kernel          grid                                        block  registers  shared   work of a thread
    pack_weights    (weights / 256)                             256    14         0        one weight
    conv2d          (samples x tiles of 2 x 56 x groups of 96)  128    160        47.5 KB  7 positions x 12 channels
    parameter_grad  (splits x 3 input channels x groups of 96)  96     168        32.5 KB  11 taps x 12 channels
    add_splits      (parameters / 128)                          128    28         0        one weight or bias
    input_grad      (samples x 512 cells x 16 phases)           128    72         2.3 KB   4 cells of a phase x 3 channels
    At the original's size; registers by nvcc 13.0 for sm_90a. conv2d: an occupancy of 12 warps an SM leaves a thread 168
    registers.

Floor
    Forward: 154 MB in, 297 MB out, 0.106 ms on an H200; 54 GFLOP are 0.91 ms in plain fp32 at 1.755 GHz: compute bound. Each
    gradient has the same two numbers.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size, bias or none; an image's channel, with its padding, below 2^31 pixels; compute capability 7.5 or
    later (before 8.0 without cp.async). Any size fits, in slices; a kernel whose width is a large prime, or images much
    narrower than a tile, are slow. Dilation, groups and other padding modes raise, and so does anything else. Trains, and
    computes only the gradients that are asked for (weight and bias together); second derivatives raise. Deterministic.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v3_tiled"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

constexpr int WARP = 32;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// The largest equal parts of n, none larger than `limit`; the last may be smaller.
constexpr int even_part(int n, int limit) { return ceil_div(n, ceil_div(n, limit)); }

// The sizes of one call. `plane` is below 2^31, as is an image with its padding.
struct Image {
    int height, width, pad_h, pad_w, out_h, out_w;
    Image(int height, int width, int pad_h, int pad_w)
        : height(height), width(width), pad_h(pad_h), pad_w(pad_w), out_h((height + 2 * pad_h - KERNEL_H) / STRIDE_H + 1),
          out_w((width + 2 * pad_w - KERNEL_W) / STRIDE_W + 1) {}
    __host__ __device__ int64_t plane() const { return (int64_t)out_h * out_w; }
};

// Copies 4 or 16 bytes to shared memory without waiting, or writes 4 bytes of zeros; then `from` is not read.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // there is no cp.async: a copy is a load, which waits, and a store
__device__ __forceinline__ void cp_async_4(float* to, const float* from, bool exists) { *to = exists ? *from : 0; }
__device__ __forceinline__ void cp_async_16(float* to, const float* from) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void cp_async_wait_all() {}
#else
__device__ __forceinline__ void cp_async_4(float* to, const float* from, bool exists) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(exists ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_16(float* to, const float* from) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// Waits for all copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// Shared memory holds two stages: one is computed with while the other is filled.
constexpr int STAGE_FLOATS = 6144;

// Output channels in groups of equal size, at most 96.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 96), OUT_BLOCK = round_up(ceil_div(OUT_CHANNELS, OUT_GROUPS), 8);

// What `positions` neighbouring positions read of one row of the image in `taps` columns of the kernel, as it lies in shared
// memory: position p's column v at p * row_step + v. Where the stride leaves columns out, they are not copied.
constexpr int row_step(int taps) { return smaller(STRIDE_W, taps); }
constexpr int row_width(int positions, int taps) { return (positions - 1) * row_step(taps) + taps; }

// A warp copies such a row, beginning with column `left` of a row of the image. Columns outside it are zero: all, if its width
// is 0.
template <int WIDTH, int STEP>
__device__ __forceinline__ void copy_row(float* to, const float* row, int left, int width) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int first = 0; first < WIDTH; first += WARP) {
        const int s = first + lane, w = left + s / STEP * STRIDE_W + s % STEP;
        if (first + WARP <= WIDTH || s < WIDTH) cp_async_4(to + s, row + w, (unsigned)w < (unsigned)width);
    }
}

// ---- Forward

// A thread has 7 positions beside each other in 12 channels (8 where that divides the group better), 8 threads have a row of a
// tile: 56 positions, for rows of 55. Seven, because adjacent threads then read 28 floats apart at stride 4: 16-byte loads
// of 8 threads are conflict-free.
constexpr int CHANNELS = OUT_BLOCK % 12 == 0 ? 12 : 8, CHANNEL_LANES = OUT_BLOCK / CHANNELS;
constexpr int POSITIONS = 7, COLUMN_LANES = 8, TILE_COLUMNS = POSITIONS * COLUMN_LANES;

// What is in shared memory at a time is a slice of the taps: SLICE_C input channels x SLICE_U rows x SLICE_V columns of the
// kernel. Columns divide evenly, because they are unrolled; what they need of an image's row has to fit in registers.
constexpr int slice_v() {
    int taps = smaller(KERNEL_W, 16);
    while (KERNEL_W % taps || row_width(POSITIONS, taps) > 40) --taps;
    return taps;
}
constexpr int SLICE_V = slice_v(), VALUES = row_width(POSITIONS, SLICE_V);
constexpr int STEP_W = row_step(SLICE_V), WIDTH = row_width(TILE_COLUMNS, SLICE_V), PITCH = round_up(WIDTH, 4);

constexpr int rows_read(int rows, int taps) { return (rows - 1) * smaller(STRIDE_H, taps) + taps; }
constexpr int floats_of_slice(int rows, int c, int u) { return c * (rows_read(rows, u) * PITCH + u * SLICE_V * OUT_BLOCK); }

constexpr int tile_rows() {  // as many as make 128 threads, if four rows of the kernel fit beside them
    int rows = ceil_div(16, CHANNEL_LANES);
    while (rows > 1 && floats_of_slice(rows, 1, smaller(KERNEL_H, 4)) > STAGE_FLOATS) --rows;
    return rows;
}
constexpr int TILE_ROWS = tile_rows();
constexpr int slice_u() {
    int taps = KERNEL_H;
    while (taps > 1 && floats_of_slice(TILE_ROWS, 1, taps) > STAGE_FLOATS) --taps;
    return even_part(KERNEL_H, taps);
}
constexpr int SLICE_U = slice_u(), STEP_H = smaller(STRIDE_H, SLICE_U), ROWS = rows_read(TILE_ROWS, SLICE_U);
constexpr int fitting_channels = STAGE_FLOATS / floats_of_slice(TILE_ROWS, 1, SLICE_U);
constexpr int SLICE_C = SLICE_U == KERNEL_H ? even_part(IN_CHANNELS, smaller(IN_CHANNELS, fitting_channels)) : 1;
constexpr int SLICES_C = ceil_div(IN_CHANNELS, SLICE_C), SLICES_U = ceil_div(KERNEL_H, SLICE_U);
constexpr int SLICES_V = KERNEL_W / SLICE_V, SLICES = SLICES_C * SLICES_U * SLICES_V;

struct Slice {  // its first tap
    int c, u, v;
    __device__ explicit Slice(int slice)
        : c(slice / SLICES_V / SLICES_U * SLICE_C), u(slice / SLICES_V % SLICES_U * SLICE_U), v(slice % SLICES_V * SLICE_V) {}
};

// Whole warps copy; threads without positions in the tile do nothing else.
constexpr int COMPUTING = TILE_ROWS * CHANNEL_LANES * COLUMN_LANES, THREADS = round_up(COMPUTING, WARP);
constexpr int SLICE_WEIGHTS = SLICE_C * SLICE_U * SLICE_V * OUT_BLOCK;
constexpr int64_t PACKED = (int64_t)OUT_GROUPS * SLICES * SLICE_WEIGHTS;

struct alignas(16) Stage {
    float inputs[SLICE_C][ROWS][PITCH];
    float weights[SLICE_C][SLICE_U][SLICE_V][OUT_BLOCK];
};
static_assert(sizeof(Stage) <= STAGE_FLOATS * sizeof(float));

// weight (OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W) -> packed (OUT_GROUPS, SLICES, a Stage's weights), in the order in
// which a block reads them. Zeros stand for what does not exist.
constexpr int PACK_THREADS = 256;

__global__ void __launch_bounds__(PACK_THREADS) pack_weights(const float* __restrict__ weight, float* __restrict__ packed) {
    const int64_t index = (int64_t)blockIdx.x * PACK_THREADS + threadIdx.x;
    if (index >= PACKED) return;
    const int k = index % SLICE_WEIGHTS;
    const Slice slice(index / SLICE_WEIGHTS % SLICES);
    const int64_t group = index / SLICE_WEIGHTS / SLICES;
    const int in_group = k % OUT_BLOCK, v = slice.v + k / OUT_BLOCK % SLICE_V;
    const int u = slice.u + k / OUT_BLOCK / SLICE_V % SLICE_U, c = slice.c + k / OUT_BLOCK / SLICE_V / SLICE_U;
    const int64_t o = group * OUT_BLOCK + in_group;
    const bool exists = o < OUT_CHANNELS && c < IN_CHANNELS && u < KERNEL_H;
    packed[index] = exists ? weight[((o * IN_CHANNELS + c) * KERNEL_H + u) * KERNEL_W + v] : 0.0f;
}

// TILE_ROWS x TILE_COLUMNS positions of a sample, in a group of output channels.
struct Tile {
    int64_t sample;
    int group, row, column;  // first position
    __host__ __device__ static int64_t down(const Image& image) { return ceil_div(image.out_h, TILE_ROWS); }
    __host__ __device__ static int64_t across(const Image& image) { return ceil_div(image.out_w, TILE_COLUMNS); }
    __device__ Tile(const Image& image, int64_t index) {
        group = index % OUT_GROUPS;
        column = index / OUT_GROUPS % across(image) * TILE_COLUMNS;
        row = index / OUT_GROUPS / across(image) % down(image) * TILE_ROWS;
        sample = index / OUT_GROUPS / across(image) / down(image);
    }
};

// Asks for a slice of the weights, and for what the tile's positions read of the image under it.
__device__ __forceinline__ void fill(Stage& stage, const Image& image, const Tile& tile, const float* __restrict__ x,
                                     const float* __restrict__ packed, int slice_index) {
    const Slice slice(slice_index);
    const int left = tile.column * STRIDE_W - image.pad_w + slice.v;
#pragma unroll 1
    for (int k = threadIdx.x / WARP; k < SLICE_C * ROWS; k += THREADS / WARP) {
        const int c = slice.c + k / ROWS, r = k % ROWS;
        const int h = tile.row * STRIDE_H - image.pad_h + slice.u + r / STEP_H * STRIDE_H + r % STEP_H;
        const bool exists = c < IN_CHANNELS && h >= 0 && h < image.height;
        const float* row = x + ((tile.sample * IN_CHANNELS + c) * image.height + h) * image.width;
        copy_row<WIDTH, STEP_W>(stage.inputs[k / ROWS][r], row, left, exists ? image.width : 0);
    }
    float* weights = &stage.weights[0][0][0][0];
    const float* from = packed + ((int64_t)tile.group * SLICES + slice_index) * SLICE_WEIGHTS;
#pragma unroll 4
    for (int k = 4 * threadIdx.x; k < SLICE_WEIGHTS; k += 4 * THREADS) cp_async_16(weights + k, from + k);
}

// On the way out a tile passes through shared memory, so that stores are coalesced. The odd pitch avoids bank conflicts.
union Shared {
    Stage stages[2];
    float outputs[OUT_BLOCK][TILE_ROWS * TILE_COLUMNS + 1];
};
static_assert(sizeof(Shared) <= 48 * 1024);

// One output tile. Occupancy: 12 warps an SM, 168 registers a thread.
__global__ void __launch_bounds__(THREADS, 384 / THREADS)
    conv2d(Image image, const float* __restrict__ x, const float* __restrict__ packed, const float* __restrict__ bias,
           float* __restrict__ out) {
    __shared__ Shared shared;
    const Tile tile(image, blockIdx.x);
    const int column_lane = threadIdx.x % COLUMN_LANES, channel_lane = threadIdx.x / COLUMN_LANES % CHANNEL_LANES;
    const int row_lane = threadIdx.x / COLUMN_LANES / CHANNEL_LANES;
    const bool computes = COMPUTING == THREADS || threadIdx.x < COMPUTING;

    float sums[CHANNELS][POSITIONS] = {};
    fill(shared.stages[0], image, tile, x, packed, 0);
#pragma unroll 1
    for (int index = 0; index < SLICES; ++index) {
        cp_async_wait_all();
        __syncthreads();  // everybody's copies have arrived, and the other stage has been read
        if (index + 1 < SLICES) fill(shared.stages[(index + 1) % 2], image, tile, x, packed, index + 1);
        if (!computes) continue;
        const Stage& stage = shared.stages[index % 2];
        const Slice slice(index);
#pragma unroll 1
        for (int c = 0; c < SLICE_C && slice.c + c < IN_CHANNELS; ++c)
#pragma unroll 1
        for (int u = 0; u < SLICE_U && slice.u + u < KERNEL_H; ++u) {
            float values[VALUES];
#pragma unroll
            for (int k = 0; k < VALUES; ++k)
                values[k] = stage.inputs[c][row_lane * STEP_H + u][column_lane * (POSITIONS * STEP_W) + k];
#pragma unroll
            for (int v = 0; v < SLICE_V; ++v) {
                float weights[CHANNELS];
#pragma unroll
                for (int o = 0; o < CHANNELS; ++o) weights[o] = stage.weights[c][u][v][channel_lane * CHANNELS + o];
#pragma unroll
                for (int o = 0; o < CHANNELS; ++o)
#pragma unroll
                    for (int p = 0; p < POSITIONS; ++p) sums[o][p] += weights[o] * values[p * STEP_W + v];
            }
        }
    }

    __syncthreads();  // the last stage has been read
    const int first_out = tile.group * OUT_BLOCK;
    if (computes)
#pragma unroll
        for (int o = 0; o < CHANNELS; ++o) {
            const int in_group = channel_lane * CHANNELS + o;
            const float add = bias && first_out + in_group < OUT_CHANNELS ? bias[first_out + in_group] : 0.0f;
#pragma unroll
            for (int p = 0; p < POSITIONS; ++p)
                shared.outputs[in_group][row_lane * TILE_COLUMNS + column_lane * POSITIONS + p] = sums[o][p] + add;
        }
    __syncthreads();
    const int outs = smaller(OUT_BLOCK, OUT_CHANNELS - first_out), columns = smaller(TILE_COLUMNS, image.out_w - tile.column);
    const int rows = smaller(TILE_ROWS, image.out_h - tile.row);
    float* first = out + (tile.sample * OUT_CHANNELS + first_out) * image.plane() + (int64_t)tile.row * image.out_w +
                   tile.column;
#pragma unroll 2
    for (int k = threadIdx.x / WARP; k < OUT_BLOCK * TILE_ROWS; k += THREADS / WARP) {
        const int o = k / TILE_ROWS, row = k % TILE_ROWS;
        float* to = first + o * image.plane() + (int64_t)row * image.out_w;
#pragma unroll
        for (int column = threadIdx.x % WARP; column < TILE_COLUMNS; column += WARP)
            if (o < outs && row < rows && column < columns) to[column] = shared.outputs[o][row * TILE_COLUMNS + column];
    }
}

// ---- Gradients of weight and bias

// A pair is one c, u: input channel and row of the kernel. A thread has GRAD_V columns of one pair in 12 output channels (or
// 8), and a block as many pairs as make 96 threads: at the original's size those of one input channel. It goes through its
// split of the positions in pieces of GRAD_COLUMNS in a row.
constexpr int GRAD_COLUMNS = 28;
constexpr int grad_v() {
    int taps = smaller(KERNEL_W, 11);
    while (KERNEL_W % taps) --taps;
    return taps;
}
constexpr int GRAD_V = grad_v(), PAIRS = IN_CHANNELS * KERNEL_H;
constexpr int GRAD_CHANNELS = OUT_BLOCK % 12 == 0 ? 12 : 8, GRAD_LANES = OUT_BLOCK / GRAD_CHANNELS;
constexpr int GRAD_STEP = row_step(GRAD_V), GRAD_WIDTH = row_width(GRAD_COLUMNS, GRAD_V);
constexpr int GRAD_PITCH = GRAD_WIDTH + (12 - GRAD_WIDTH % 8) % 8;  // 4 modulo 8: conflict-free
constexpr int OUT_PITCH = OUT_BLOCK + 4;
constexpr int fitting_pairs = (STAGE_FLOATS - GRAD_COLUMNS * OUT_PITCH) / GRAD_PITCH;
constexpr int GRAD_PAIRS = even_part(PAIRS, smaller(PAIRS, smaller(fitting_pairs, 96 / GRAD_LANES)));
constexpr int GRAD_SLICES_V = KERNEL_W / GRAD_V, GRAD_SLICES = ceil_div(PAIRS, GRAD_PAIRS) * GRAD_SLICES_V;
constexpr int GRAD_COMPUTING = GRAD_PAIRS * GRAD_LANES;
constexpr int GRAD_THREADS = round_up(GRAD_COMPUTING < OUT_BLOCK ? OUT_BLOCK : GRAD_COMPUTING, WARP);  // one for each bias
constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * PAIRS * KERNEL_W, PARAMETERS = WEIGHTS + OUT_CHANNELS;
static_assert(fitting_pairs > 0);

struct alignas(16) GradStage {
    float inputs[GRAD_PAIRS][GRAD_PITCH];
    float grads[GRAD_COLUMNS][OUT_PITCH];
};

// A walk over pieces of rows: columns first, then rows, then samples.
struct Piece {
    int64_t sample;
    int row, column;
    __device__ Piece(const Image& image, int64_t line) : sample(line / image.out_h), row(line % image.out_h), column(0) {}
    __device__ void advance(const Image& image) {
        column += GRAD_COLUMNS;
        if (column >= image.out_w) column = 0, ++row;
        if (row == image.out_h) row = 0, ++sample;
    }
};

// Asks for what a piece's positions read of the image in `GRAD_PAIRS` pairs, and for their gradients in a group of channels.
__device__ __forceinline__ void fill(GradStage& stage, const Image& image, const Piece& piece, const float* __restrict__ x,
                                     const float* __restrict__ grad, int first_pair, int first_v, int first_out) {
    const int left = piece.column * STRIDE_W - image.pad_w + first_v;
#pragma unroll 1
    for (int k = threadIdx.x / WARP; k < GRAD_PAIRS; k += GRAD_THREADS / WARP) {
        const int pair = first_pair + k, c = pair / KERNEL_H, h = piece.row * STRIDE_H - image.pad_h + pair % KERNEL_H;
        const bool exists = pair < PAIRS && h >= 0 && h < image.height;
        const float* row = x + ((piece.sample * IN_CHANNELS + c) * image.height + h) * image.width;
        copy_row<GRAD_WIDTH, GRAD_STEP>(stage.inputs[k], row, left, exists ? image.width : 0);
    }
    // A warp copies a channel's gradients at a time; its last lanes have nothing to do.
    const int warp = threadIdx.x / WARP, column = threadIdx.x % WARP;
    if (column >= GRAD_COLUMNS) return;
    const float* from = grad + (piece.sample * OUT_CHANNELS + first_out + warp) * image.plane() +
                        (int64_t)piece.row * image.out_w + piece.column + column;
    const bool exists = piece.column + column < image.out_w;
#pragma unroll 4
    for (int o = warp; o < OUT_BLOCK; o += GRAD_THREADS / WARP, from += GRAD_THREADS / WARP * image.plane())
        cp_async_4(&stage.grads[column][o], from, exists && (OUT_CHANNELS % OUT_BLOCK == 0 || first_out + o < OUT_CHANNELS));
}

// A thread's channels in its group: runs of 4, each beside those of its neighbours.
__device__ __forceinline__ int channel_of_thread(int lane, int o) { return o / 4 * 4 * GRAD_LANES + lane * 4 + o % 4; }

// sums (splits, PARAMETERS): weights in their own order, then biases. A split has `lines` rows of positions.
__global__ void __launch_bounds__(GRAD_THREADS, 4)
    parameter_grad(Image image, const float* __restrict__ x, const float* __restrict__ grad, float* __restrict__ sums,
                   int64_t all_lines, int64_t lines) {
    __shared__ GradStage stages[2];
    const int slice = blockIdx.x % GRAD_SLICES, group = blockIdx.x / GRAD_SLICES % OUT_GROUPS;
    const int64_t split = blockIdx.x / GRAD_SLICES / OUT_GROUPS;
    const int first_v = slice % GRAD_SLICES_V * GRAD_V, first_pair = slice / GRAD_SLICES_V * GRAD_PAIRS;
    const int first_out = group * OUT_BLOCK;
    const int lane = threadIdx.x % GRAD_LANES, pair = threadIdx.x / GRAD_LANES;
    const int64_t first_line = split * lines, rest = all_lines - first_line;
    const int64_t pieces = (rest < lines ? rest : lines) * ceil_div(image.out_w, GRAD_COLUMNS);

    float weight_sums[GRAD_CHANNELS][GRAD_V] = {}, bias_sum = 0.0f;
    Piece next(image, first_line);
    int column = 0;  // of the piece that is computed
    fill(stages[0], image, next, x, grad, first_pair, first_v, first_out);
    next.advance(image);
#pragma unroll 1
    for (int64_t index = 0; index < pieces; ++index) {
        cp_async_wait_all();
        __syncthreads();  // everybody's copies have arrived, and the other stage has been read
        if (index + 1 < pieces) fill(stages[(index + 1) % 2], image, next, x, grad, first_pair, first_v, first_out);
        const GradStage& stage = stages[index % 2];
        const int columns = smaller(GRAD_COLUMNS, image.out_w - column);
        column = next.column;
        next.advance(image);
        if (GRAD_COMPUTING == GRAD_THREADS || threadIdx.x < GRAD_COMPUTING)
#pragma unroll 1
            for (int p = 0; p < columns; ++p) {
                float values[GRAD_V], grads[GRAD_CHANNELS];
#pragma unroll
                for (int v = 0; v < GRAD_V; ++v) values[v] = stage.inputs[pair][p * GRAD_STEP + v];
#pragma unroll
                for (int o = 0; o < GRAD_CHANNELS; ++o) grads[o] = stage.grads[p][channel_of_thread(lane, o)];
#pragma unroll
                for (int o = 0; o < GRAD_CHANNELS; ++o)
#pragma unroll
                    for (int v = 0; v < GRAD_V; ++v) weight_sums[o][v] += grads[o] * values[v];
            }
        if (slice == 0 && threadIdx.x < OUT_BLOCK)
#pragma unroll 2
            for (int p = 0; p < columns; ++p) bias_sum += stage.grads[p][threadIdx.x];
    }

    float* result = sums + split * PARAMETERS;
    if (threadIdx.x < GRAD_COMPUTING && first_pair + pair < PAIRS)
#pragma unroll
        for (int o = 0; o < GRAD_CHANNELS; ++o) {
            const int64_t out = first_out + channel_of_thread(lane, o);
            if (out >= OUT_CHANNELS) continue;
#pragma unroll
            for (int v = 0; v < GRAD_V; ++v)
                result[(out * PAIRS + first_pair + pair) * KERNEL_W + first_v + v] = weight_sums[o][v];
        }
    if (slice == 0 && threadIdx.x < OUT_BLOCK && first_out + threadIdx.x < OUT_CHANNELS)
        result[WEIGHTS + first_out + threadIdx.x] = bias_sum;
}

// The sums of all splits, in their order.
constexpr int ADD_THREADS = 128;

__global__ void __launch_bounds__(ADD_THREADS)
    add_splits(const float* __restrict__ sums, float* __restrict__ grad_weight, float* __restrict__ grad_bias, int64_t splits) {
    const int64_t index = (int64_t)blockIdx.x * ADD_THREADS + threadIdx.x;
    if (index >= PARAMETERS) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t split = 0; split < splits; ++split) sum += sums[split * PARAMETERS + index];
    if (index < WEIGHTS) grad_weight[index] = sum;
    else grad_bias[index - WEIGHTS] = sum;
}

// ---- Gradient of the input

// Pixels whose row and column, counted with the padding, leave the same remainders by the strides have the same taps: those
// with u % STRIDE_H and v % STRIDE_W equal to them. They are a phase, and for them alone the strides are 1: the cell (y, z) of
// phase (a, b) is the pixel y * STRIDE_H + a - pad_h, z * STRIDE_W + b - pad_w, and its tap (t, s) comes from the position
// (y - t, z - s). A thread has CELLS cells of a phase above each other, each in IN_BLOCK channels. A position that it loads
// serves all the cells and taps t that meet there.
constexpr int CELL_THREADS = 128, CELLS = 4;
constexpr int IN_GROUPS = ceil_div(IN_CHANNELS, 4), IN_BLOCK = ceil_div(IN_CHANNELS, IN_GROUPS);
constexpr int PHASES = STRIDE_H * STRIDE_W, TAPS_H = ceil_div(KERNEL_H, STRIDE_H), TAPS_W = ceil_div(KERNEL_W, STRIDE_W);
constexpr int SLICE_T = even_part(TAPS_H, smaller(TAPS_H, 3)), SLICE_S = even_part(TAPS_W, smaller(TAPS_W, 16));
constexpr int SLICE_OUTS = 16, WINDOW = CELLS + SLICE_T - 1;  // rows of positions that a thread's cells meet in a slice

struct Cells {
    int down, across;  // of a phase; the last ones may lie outside the image
    __host__ __device__ explicit Cells(const Image& image)
        : down(ceil_div(image.height + image.pad_h, STRIDE_H)), across(ceil_div(image.width + image.pad_w, STRIDE_W)) {}
    __host__ __device__ int64_t blocks() const {
        return ((int64_t)ceil_div(down, CELLS) * across + CELL_THREADS - 1) / CELL_THREADS;
    }
};

__global__ void __launch_bounds__(CELL_THREADS)
    input_grad(Image image, const float* __restrict__ weight, const float* __restrict__ grad, float* __restrict__ grad_x) {
    __shared__ alignas(16) float weights[SLICE_OUTS][SLICE_T][SLICE_S][round_up(IN_BLOCK, 4)];
    const Cells cells(image);
    const int a = blockIdx.x % PHASES / STRIDE_W, b = blockIdx.x % STRIDE_W;
    const int first_channel = blockIdx.x / PHASES % IN_GROUPS * IN_BLOCK;
    const int64_t thread = blockIdx.x / PHASES / IN_GROUPS % cells.blocks() * CELL_THREADS + threadIdx.x;
    const int64_t sample = blockIdx.x / PHASES / IN_GROUPS / cells.blocks();
    const int y = thread / cells.across * CELLS, z = thread % cells.across;  // the first cell

    float sums[CELLS][IN_BLOCK] = {};
#pragma unroll 1
    for (int first_out = 0; first_out < OUT_CHANNELS; first_out += SLICE_OUTS)
#pragma unroll 1
    for (int first_t = 0; first_t < TAPS_H; first_t += SLICE_T)
#pragma unroll 1
    for (int first_s = 0; first_s < TAPS_W; first_s += SLICE_S) {
        __syncthreads();  // the weights before have been read
        for (int k = threadIdx.x; k < SLICE_OUTS * SLICE_T * SLICE_S * IN_BLOCK; k += CELL_THREADS) {
            const int c = k % IN_BLOCK, s = k / IN_BLOCK % SLICE_S, t = k / IN_BLOCK / SLICE_S % SLICE_T;
            const int in_slice = k / IN_BLOCK / SLICE_S / SLICE_T, o = first_out + in_slice;
            const int u = a + (first_t + t) * STRIDE_H, v = b + (first_s + s) * STRIDE_W;
            const bool exists = o < OUT_CHANNELS && first_channel + c < IN_CHANNELS && u < KERNEL_H && v < KERNEL_W;
            const int64_t from = (((int64_t)o * IN_CHANNELS + first_channel + c) * KERNEL_H + u) * KERNEL_W + v;
            weights[in_slice][t][s][c] = exists ? weight[from] : 0.0f;
        }
        __syncthreads();
        float slice_sums[CELLS][IN_BLOCK] = {};  // summed by slices, whose sums are shorter and so more exact
        const float* from = grad + (sample * OUT_CHANNELS + first_out) * image.plane();
        const int outs = smaller(SLICE_OUTS, OUT_CHANNELS - first_out);
#pragma unroll 1
        for (int s = 0; s < SLICE_S && b + (first_s + s) * STRIDE_W < KERNEL_W; ++s) {
            bool exists[WINDOW];
            const float* position[WINDOW];
#pragma unroll
            for (int r = 0; r < WINDOW; ++r) {
                const int i = y - first_t - (SLICE_T - 1) + r, j = z - first_s - s;
                exists[r] = i >= 0 && i < image.out_h && j >= 0 && j < image.out_w;
                position[r] = from + (exists[r] ? i * image.out_w + j : 0);
            }
#pragma unroll 2
            for (int o = 0; o < outs; ++o) {
                float values[WINDOW];
#pragma unroll
                for (int r = 0; r < WINDOW; ++r) values[r] = *position[r], position[r] += image.plane();
#pragma unroll
                for (int t = 0; t < SLICE_T; ++t) {
                    if (a + (first_t + t) * STRIDE_H >= KERNEL_H) break;  // the phase has one tap less
                    float tap_weights[IN_BLOCK];
#pragma unroll
                    for (int c = 0; c < IN_BLOCK; ++c) tap_weights[c] = weights[o][t][s][c];
#pragma unroll
                    for (int n = 0; n < CELLS; ++n)
#pragma unroll
                        for (int c = 0; c < IN_BLOCK; ++c)
                            if (exists[n - t + SLICE_T - 1])
                                slice_sums[n][c] += tap_weights[c] * values[n - t + SLICE_T - 1];
                }
            }
        }
#pragma unroll
        for (int n = 0; n < CELLS; ++n)
#pragma unroll
            for (int c = 0; c < IN_BLOCK; ++c) sums[n][c] += slice_sums[n][c];
    }
    const int w = z * STRIDE_W + b - image.pad_w;
#pragma unroll
    for (int n = 0; n < CELLS; ++n) {
        const int h = (y + n) * STRIDE_H + a - image.pad_h;
        if (y + n >= cells.down || h < 0 || h >= image.height || w < 0 || w >= image.width) continue;
#pragma unroll
        for (int c = 0; c < IN_BLOCK; ++c)
            if (first_channel + c < IN_CHANNELS)
                grad_x[((sample * IN_CHANNELS + first_channel + c) * image.height + h) * image.width + w] = sums[n][c];
    }
}

// ---- What the caller allocates, how many blocks the launches take, and launches

int64_t packed_floats() { return PACKED; }
int64_t forward_blocks(int64_t batch, int height, int width, int pad_h, int pad_w) {
    const Image image(height, width, pad_h, pad_w);
    return batch * Tile::down(image) * Tile::across(image) * OUT_GROUPS;
}
int64_t input_blocks(int64_t batch, int height, int width, int pad_h, int pad_w) {
    return batch * Cells(Image(height, width, pad_h, pad_w)).blocks() * IN_GROUPS * PHASES;
}

// The rows of all positions are split over 528 blocks or so, four for each SM of a large GPU. It depends on the
// shapes alone, and with it the order of additions.
static int64_t lines_of_split(int64_t all_lines) {
    const int64_t splits = ceil_div(528, GRAD_SLICES * OUT_GROUPS);
    return (all_lines + splits - 1) / splits;
}
int64_t parameter_splits(int64_t batch, int height, int width, int pad_h, int pad_w) {
    const int64_t all_lines = batch * Image(height, width, pad_h, pad_w).out_h, lines = lines_of_split(all_lines);
    return (all_lines + lines - 1) / lines;
}
int64_t parameter_blocks(int64_t splits) { return splits * GRAD_SLICES * OUT_GROUPS; }
int64_t parameters() { return PARAMETERS; }

// `packed` is scratch memory. `bias` may be null.
void launch_forward(const float* x, const float* weight, const float* bias, float* packed, float* out, int64_t batch,
                    int height, int width, int pad_h, int pad_w, cudaStream_t stream) {
    pack_weights<<<(PACKED + PACK_THREADS - 1) / PACK_THREADS, PACK_THREADS, 0, stream>>>(weight, packed);
    conv2d<<<forward_blocks(batch, height, width, pad_h, pad_w), THREADS, 0, stream>>>(Image(height, width, pad_h, pad_w), x,
                                                                                     packed, bias, out);
}

// `sums` (splits, parameters) is scratch memory.
void launch_parameter_grads(const float* grad, const float* x, float* sums, float* grad_weight, float* grad_bias,
                            int64_t batch, int height, int width, int pad_h, int pad_w, cudaStream_t stream) {
    const Image image(height, width, pad_h, pad_w);
    const int64_t splits = parameter_splits(batch, height, width, pad_h, pad_w), all_lines = batch * image.out_h;
    parameter_grad<<<parameter_blocks(splits), GRAD_THREADS, 0, stream>>>(image, x, grad, sums, all_lines,
                                                                        lines_of_split(all_lines));
    add_splits<<<(PARAMETERS + ADD_THREADS - 1) / ADD_THREADS, ADD_THREADS, 0, stream>>>(sums, grad_weight, grad_bias, splits);
}

void launch_input_grad(const float* grad, const float* weight, float* grad_x, int64_t batch, int height, int width, int pad_h,
                       int pad_w, cudaStream_t stream) {
    input_grad<<<input_blocks(batch, height, width, pad_h, pad_w), CELL_THREADS, 0, stream>>>(
        Image(height, width, pad_h, pad_w), weight, grad, grad_x);
}
"""

BINDING = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
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

int64_t packed_floats();
int64_t parameters();
int64_t forward_blocks(int64_t batch, int height, int width, int pad_h, int pad_w);
int64_t input_blocks(int64_t batch, int height, int width, int pad_h, int pad_w);
int64_t parameter_splits(int64_t batch, int height, int width, int pad_h, int pad_w);
int64_t parameter_blocks(int64_t splits);
void launch_forward(const float*, const float*, const float*, float*, float*, int64_t, int, int, int, int, cudaStream_t);
void launch_parameter_grads(const float*, const float*, float*, float*, float*, int64_t, int, int, int, int, cudaStream_t);
void launch_input_grad(const float*, const float*, float*, int64_t, int, int, int, int, cudaStream_t);

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    TORCH_CHECK(tensor.defined(), message("conv2d: expected ", name, " to be a tensor, got None"));
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits, message("conv2d: expected ", name, " as a float32 CUDA tensor of shape ", shape, " (-1: any), got ",
                              tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device()));
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(),
                message("conv2d: expected all on ", expected.device(), ", got ", name, " on ", tensor.device()));
}

// The input and weight of a pass, checked, and the sizes that follow. The guard holds while this lives.
struct Call {
    int64_t batch, height, width, pad_h, pad_w, out_h, out_w;
    c10::cuda::CUDAGuard guard;
    cudaStream_t stream;
    at::TensorOptions options;

    Call(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding)
        : guard(checked(x, weight, stride, padding)), options(x.options()) {
        batch = x.size(0), height = x.size(2), width = x.size(3), pad_h = padding[0], pad_w = padding[1];
        const int64_t room_h = height + 2 * pad_h - KERNEL_H, room_w = width + 2 * pad_w - KERNEL_W;
        TORCH_CHECK(room_h >= 0 && room_w >= 0, message("conv2d: a kernel of ", KERNEL_H, " x ", KERNEL_W,
                                                        " does not fit into an image of ", height, " x ", width,
                                                        " padded by ", padding));
        const double padded_pixels = double(height + 2 * pad_h) * double(width + 2 * pad_w);
        TORCH_CHECK(padded_pixels < 2147483648.0, message("conv2d: expected less than 2^31 pixels a channel, got ", height,
                                                          " x ", width, " padded by ", padding));
        out_h = room_h / STRIDE_H + 1, out_w = room_w / STRIDE_W + 1;
        stream = c10::cuda::getCurrentCUDAStream();
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
                               at::IntArrayRef padding) {
        check("x", x, {-1, IN_CHANNELS, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
        check_device(x, "weight", weight);
        TORCH_CHECK(stride.size() == 2 && stride[0] == STRIDE_H && stride[1] == STRIDE_W,
                    message("conv2d: built for a stride of ", STRIDE_H, " x ", STRIDE_W, ", called with ", stride));
        TORCH_CHECK(padding.size() == 2 && padding[0] >= 0 && padding[1] >= 0,
                    message("conv2d: expected two paddings, none negative, got ", padding));
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, options); }
    at::Tensor zeros(at::IntArrayRef shape) const { return at::zeros(shape, options); }

    at::Tensor checked_grad(const at::Tensor& x, const at::Tensor& grad) const {
        check("grad", grad, {batch, OUT_CHANNELS, out_h, out_w});
        check_device(x, "grad", grad);
        return grad.contiguous();
    }
};

static void check_blocks(int64_t blocks) {
    TORCH_CHECK(blocks < (1ll << 31), message("conv2d: the batch needs ", blocks, " blocks, more than a grid has"));
}

at::Tensor conv2d(const at::Tensor& x_in, const at::Tensor& weight_in, const std::optional<at::Tensor>& bias_in,
                  at::IntArrayRef stride, at::IntArrayRef padding) {
    const Call call(x_in, weight_in, stride, padding);
    if (bias_in) {
        check("bias", *bias_in, {OUT_CHANNELS});
        check_device(x_in, "bias", *bias_in);
    }
    at::Tensor out = call.empty({call.batch, OUT_CHANNELS, call.out_h, call.out_w});
    if (call.batch == 0) return out;
    const at::Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
    const at::Tensor bias = bias_in ? bias_in->contiguous() : at::Tensor();
    check_blocks(forward_blocks(call.batch, call.height, call.width, call.pad_h, call.pad_w));
    at::Tensor packed = call.empty({packed_floats()});
    launch_forward(x.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                   bias_in ? bias.const_data_ptr<float>() : nullptr, packed.mutable_data_ptr<float>(),
                   out.mutable_data_ptr<float>(), call.batch, call.height, call.width, call.pad_h, call.pad_w, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

// The gradients of weight and bias. One kernel computes both.
std::tuple<at::Tensor, at::Tensor> parameter_grads(const at::Tensor& grad_in, const at::Tensor& x_in, const at::Tensor& weight,
                                                   at::IntArrayRef stride, at::IntArrayRef padding) {
    const Call call(x_in, weight, stride, padding);
    const at::Tensor grad = call.checked_grad(x_in, grad_in), x = x_in.contiguous();
    if (call.batch == 0) return {call.zeros(weight.sizes()), call.zeros({OUT_CHANNELS})};
    at::Tensor grad_weight = call.empty(weight.sizes()), grad_bias = call.empty({OUT_CHANNELS});
    const int64_t splits = parameter_splits(call.batch, call.height, call.width, call.pad_h, call.pad_w);
    check_blocks(parameter_blocks(splits));
    at::Tensor sums = call.empty({splits, parameters()});
    launch_parameter_grads(grad.const_data_ptr<float>(), x.const_data_ptr<float>(), sums.mutable_data_ptr<float>(),
                           grad_weight.mutable_data_ptr<float>(), grad_bias.mutable_data_ptr<float>(), call.batch, call.height,
                           call.width, call.pad_h, call.pad_w, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {grad_weight, grad_bias};
}

at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight_in, at::IntArrayRef stride,
                      at::IntArrayRef padding) {
    const Call call(x, weight_in, stride, padding);
    const at::Tensor grad = call.checked_grad(x, grad_in), weight = weight_in.contiguous();
    at::Tensor grad_x = call.empty(x.sizes());
    if (grad_x.numel() == 0) return grad_x;
    check_blocks(input_blocks(call.batch, call.height, call.width, call.pad_h, call.pad_w));
    launch_input_grad(grad.const_data_ptr<float>(), weight.const_data_ptr<float>(), grad_x.mutable_data_ptr<float>(),
                      call.batch, call.height, call.width, call.pad_h, call.pad_w, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_x;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("conv2d(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("parameter_grads(Tensor grad, Tensor x, Tensor weight, int[2] stride, int[2] padding) -> (Tensor, Tensor)",
          {at::Tag::pt2_compliant_tag});
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
    def parameter_grads(grad, x, weight, stride, padding):
        return weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad, x, weight, stride, padding):
        return x.new_empty(x.shape)

    def save(ctx, inputs, output):
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        arguments = grad, x, weight, ctx.stride, ctx.padding
        grad_x = operators.input_grad(*arguments) if needs_x else None
        grad_weight, grad_bias = operators.parameter_grads(*arguments) if needs_weight or needs_bias else (None, None)
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None

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
    sources = NAME, BINDING, CUDA, register  # bound here, so that another variant in the same notebook cannot replace them

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        (kernel_h, kernel_w), (stride_h, stride_w) = self.conv1.kernel_size, self.conv1.stride
        channels = {"IN_CHANNELS": self.conv1.in_channels, "OUT_CHANNELS": self.conv1.out_channels}
        kernel = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, "STRIDE_H": stride_h, "STRIDE_W": stride_w}
        return build(*self.sources, **channels, **kernel)

    def forward(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        operators = getattr(torch.ops, self.namespace())
        return operators.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def main():
    from torch.utils import benchmark, cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew().to("cpu" if emulated else "cuda")
    x = torch.randn(2, 3, 67, 63) if emulated else torch.randn(256, 3, 224, 224, device="cuda")
    plain = model.conv1

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
