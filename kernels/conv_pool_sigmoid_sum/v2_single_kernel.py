"""conv_pool_sigmoid_sum, v2: convolution, pooling, sigmoid and sum in one kernel.

Like v1, but the convolution moves into the kernel, so the 4.8 GB tensor is never written: a thread computes the
convolution at every position of a pooling window, keeps the window's average in registers, and only sums leave the chip.

Why it is faster
    v1 is memory bound: the convolution writes 4.8 GB and the tail reads them, while the input is 0.6 GB. Here the input is
    copied to shared memory tile by tile, and everything between it and the answer lives in registers: arithmetic in plain fp32
    is the bound now. A thread works on 16 output channels at once, so that one input value from shared memory feeds 16
    multiply-adds, and one weight the whole window. What it costs: a kernel that must be built for its channels, kernel and pool
    size, and the tensor cores stay unused. Predicted 3 to 3.5 ms on an H200, measured 6.3 (eager 11.2): copying tiles, with its
    index arithmetic and barriers, is not hidden behind the multiply-adds, which run at 40% of their peak.

Mathematics
    pooled[b,o,i,j] = bias[o] + 1/p^2 * sum over u,v < p, c,r,s of w[o,c,r,s] * x[b,c, p*i+u+r, p*j+v+s]
    out[b]          = sum over o,i,j of sigmoid(pooled)
    The original with the average written out; the bias is added after averaging. Strict fp32 throughout, also where PyTorch's
    settings permit TF32. sigmoid uses __expf, whose error of 2 + 1.17 |v| ulp is damped by s * (1 - s): it errs by less than
    2e-7. Backward recomputes `pooled`, and writes only the gradient of the values inside a window, which all have the same:
    delta[b,o,i,j]  = grad_out[b] * s * (1 - s) / p^2,  s = sigmoid(pooled)
    grad_w[o,c,r,s] = sum over b,i,j of delta * (sum over u,v of x[b,c, p*i+u+r, p*j+v+s]);    grad_bias: the same with x = 1
    grad_x[b,c,h,w] = sum over o,r,s of w[o,c,r,s] * delta[b,o, (h-r)/p, (w-s)/p], where such a window exists

Launches
    kernel           grid                                       block  shared  work of a thread
    conv_pool_sum    (samples x tiles x groups of 16 channels)  256    36 KB   a window in 16 channels; a tile is 32 x 8 windows
    window_grad      the same                                   256    36 KB   the same, for delta
    parameter_grad   (weights / 16 x splits of the batch)       256    0.5 KB  every 256th window, for a weight in 16 channels
    add_splits       (weights / 256)                            256    0       one weight
    input_grad       (samples x tiles of 128 x 8 pixels)        256    4 KB    4 pixels in 8 channels
    Shared memory at the original's size. Blocks of one sample meet in an integer counter, which PyTorch fills with zeros before
    each launch: the last block to arrive adds all sums in a fixed order, so the bits never change.

Floor
    Forward: 170 GFLOP in plain fp32, 2.5 ms at an H200's peak (67 TFLOP/s at 1.98 GHz); 604 MB in are 0.14 ms. Compute bound.
    Backward: 170 GFLOP for delta, 170 for grad_x, 11 for grad_w and 5 for its windows' sums; delta takes 296 MB.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel and pool size that the
    original takes. What does not fit into shared memory is cut into slices, so any size fits; but a window is one thread's
    work: few, huge windows are slow. Anything else raises before a launch. Trains, and computes only the gradients that are
    asked for; second derivatives raise. Deterministic.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv_pool_sigmoid_sum_v2_single_kernel"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

constexpr int WARP = 32, THREADS = 256, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

// Output channels in groups of equal size, at most 16: as many accumulators as a thread has.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 16), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUT_PITCH = round_up(OUT_BLOCK, 4);  // of a row of weights in shared memory, for 16-byte reads

// What a block holds in shared memory at a time is a slice of the channels, of the kernel and of each window. Slices divide
// evenly, so they need no bounds. At common sizes the kernel and the window are one slice.
constexpr int WEIGHT_FLOATS = 2304, TILE_FLOATS = 9216;  // together under the 48 KB that every device has
constexpr int SLICE_S = largest_divisor(KERNEL_W, WEIGHT_FLOATS / OUT_PITCH);
constexpr int SLICE_R = largest_divisor(KERNEL_H, WEIGHT_FLOATS / (OUT_PITCH * SLICE_S));
constexpr int SLICE_V = largest_divisor(POOL_W, TILE_FLOATS / 2 / SLICE_R - SLICE_S + 1);  // half: see tile_pitch
constexpr int SLICE_U = largest_divisor(POOL_H, TILE_FLOATS / 2 / (SLICE_V + SLICE_S - 1) - SLICE_R + 1);

// Adjacent threads have adjacent windows, so they read the tile POOL_W columns apart. To avoid bank conflicts,
// columns are stored by remainder: first all that are 0 modulo POOL_W, then all that are 1, and so on.
constexpr int tile_height(int windows) { return (windows - 1) * POOL_H + SLICE_U + SLICE_R - 1; }
constexpr int tile_width(int windows) { return (windows - 1) * POOL_W + SLICE_V + SLICE_S - 1; }
constexpr int tile_pitch(int windows) {  // padded to whole runs of equal remainder: less than twice the width
    return smaller(POOL_W, tile_width(windows)) * ceil_div(tile_width(windows), POOL_W);
}
constexpr int tile_columns() {
    int windows = WARP;
    while (windows > 1 && tile_height(1) * tile_pitch(windows) > TILE_FLOATS) windows /= 2;
    return windows;
}
constexpr int TILE_COLUMNS = tile_columns();  // windows side by side in a tile
constexpr int tile_rows() {
    int windows = WARPS;
    while (windows > 1 && tile_height(windows) * tile_pitch(TILE_COLUMNS) > TILE_FLOATS) windows /= 2;
    return windows;
}
constexpr int TILE_ROWS = tile_rows();
constexpr int HEIGHT = tile_height(TILE_ROWS), WIDTH = tile_width(TILE_COLUMNS), PITCH = tile_pitch(TILE_COLUMNS);
constexpr int SLICE_C = largest_divisor(
    IN_CHANNELS, smaller(TILE_FLOATS / (HEIGHT * PITCH), WEIGHT_FLOATS / (OUT_PITCH * SLICE_R * SLICE_S)));

__device__ __forceinline__ int stored_column(int column) {
    return column % POOL_W * ceil_div(WIDTH, POOL_W) + column / POOL_W;
}

// Unrolling is limited, so that large kernels and windows do not take minutes to compile.
constexpr bool SMALL_ROW = SLICE_S * SLICE_V <= 128;
constexpr int UNROLL_S = SMALL_ROW ? SLICE_S : 1, UNROLL_V = SMALL_ROW ? SLICE_V : 4;
constexpr int UNROLL_U = SLICE_S * SLICE_V * SLICE_U <= 64 ? SLICE_U : 1;
constexpr int UNROLL_POOL = POOL_H * POOL_W <= 64 ? 8 : 1;

__device__ float sigmoid(float v) { return 1.0f / (1.0f + __expf(-v)); }

// The sums of values[k] over the block, for each k, returned in thread k. The order of additions is fixed, so the bits are
// too. The caller puts a barrier between two calls.
template <int N>
__device__ float block_sums(const float (&values)[N]) {
    static_assert(N <= THREADS, "a thread for each sum");
    __shared__ float warp_sums[N][WARPS];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        float sum = values[k];
        for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
        if (threadIdx.x % WARP == 0) warp_sums[k][threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < N)
        for (int warp = 0; warp < WARPS; ++warp) sum += warp_sums[threadIdx.x][warp];
    return sum;
}

// The part of the work that falls to a block, and to a thread of it.
struct Part {
    int sample;
    int first_channel;          // of OUT_BLOCK output channels
    int tile_row, tile_column;  // the first window of the tile
    int row, column;            // this thread's window
    bool exists;                // false past the edge of the image, and for threads that have no window in a small tile
};

__host__ __device__ int64_t blocks_a_sample(int rows, int columns) {
    return (int64_t)OUT_GROUPS * ceil_div(rows, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS);
}

// Blocks that read the same input are neighbours in the grid, and meet in the L2 cache.
__device__ Part part_of_thread(int rows, int columns) {
    Part part;
    part.sample = blockIdx.x / blocks_a_sample(rows, columns);
    const int64_t block = blockIdx.x % blocks_a_sample(rows, columns), tile = block / OUT_GROUPS;
    const int tiles_across = ceil_div(columns, TILE_COLUMNS), y = threadIdx.x / TILE_COLUMNS;
    part.first_channel = block % OUT_GROUPS * OUT_BLOCK;
    part.tile_row = tile / tiles_across * TILE_ROWS;
    part.tile_column = tile % tiles_across * TILE_COLUMNS;
    part.row = part.tile_row + y;
    part.column = part.tile_column + threadIdx.x % TILE_COLUMNS;
    part.exists = y < TILE_ROWS && part.row < rows && part.column < columns;
    return part;
}

// The convolution (without bias) of one window, summed over the window, in OUT_BLOCK output channels.
__device__ __forceinline__ void convolve_window(const float* __restrict__ x, const float* __restrict__ weight, int height,
                                                int width, const Part& part, float (&total)[OUT_BLOCK]) {
    __shared__ float tile[SLICE_C][HEIGHT][PITCH];
    __shared__ alignas(16) float weights[SLICE_C][SLICE_R][SLICE_S][OUT_PITCH];
    const int y = threadIdx.x / TILE_COLUMNS, across = threadIdx.x % TILE_COLUMNS;
#pragma unroll
    for (int o = 0; o < OUT_BLOCK; ++o) total[o] = 0.0f;

    // c: input channel; r, s: row and column of the kernel; u, v: of the window. c0, r0, s0, u0, v0: where the slice begins.
    // Loops of one nest are not indented.
#pragma unroll 1
    for (int c0 = 0; c0 < IN_CHANNELS; c0 += SLICE_C)
#pragma unroll 1
    for (int r0 = 0; r0 < KERNEL_H; r0 += SLICE_R)
#pragma unroll 1
    for (int s0 = 0; s0 < KERNEL_W; s0 += SLICE_S)
#pragma unroll 1
    for (int u0 = 0; u0 < POOL_H; u0 += SLICE_U)
#pragma unroll 1
    for (int v0 = 0; v0 < POOL_W; v0 += SLICE_V) {
        const int top = part.tile_row * POOL_H + u0 + r0, left = part.tile_column * POOL_W + v0 + s0;
        const int64_t plane = (int64_t)height * width;
        const float* corner = x + ((int64_t)part.sample * IN_CHANNELS + c0) * plane + (int64_t)top * width + left;
#pragma unroll 2
        for (int k = threadIdx.x; k < SLICE_C * HEIGHT * WIDTH; k += THREADS) {
            const int c = k / WIDTH / HEIGHT, h = k / WIDTH % HEIGHT, w = k % WIDTH;
            const bool inside = top + h < height && left + w < width;
            tile[c][h][stored_column(w)] = inside ? corner[c * plane + (int64_t)h * width + w] : 0.0f;
        }
#pragma unroll 1
        for (int k = threadIdx.x; k < SLICE_C * SLICE_R * SLICE_S * OUT_BLOCK; k += THREADS) {
            const int o = k % OUT_BLOCK, s = k / OUT_BLOCK % SLICE_S, r = k / OUT_BLOCK / SLICE_S % SLICE_R;
            const int c = k / OUT_BLOCK / SLICE_S / SLICE_R;
            const int64_t channel = (int64_t)(part.first_channel + o) * IN_CHANNELS + c0 + c;
            weights[c][r][s][o] = part.first_channel + o < OUT_CHANNELS
                                      ? weight[(channel * KERNEL_H + r0 + r) * KERNEL_W + s0 + s] : 0.0f;
        }
        __syncthreads();
        if (part.exists) {
            float sum[OUT_BLOCK] = {};
#pragma unroll 1
            for (int c = 0; c < SLICE_C; ++c)
#pragma unroll 1
            for (int r = 0; r < SLICE_R; ++r)
#pragma unroll (UNROLL_S)
            for (int s = 0; s < SLICE_S; ++s)
#pragma unroll (UNROLL_U)
            for (int u = 0; u < SLICE_U; ++u)
#pragma unroll (UNROLL_V)
            for (int v = 0; v < SLICE_V; ++v) {
                const float value = tile[c][y * POOL_H + u + r][stored_column(v + s) + across];
#pragma unroll
                for (int o = 0; o < OUT_BLOCK; ++o) sum[o] += value * weights[c][r][s][o];
            }
#pragma unroll
            for (int o = 0; o < OUT_BLOCK; ++o) total[o] += sum[o];
        }
        __syncthreads();  // the slice has been read; the next may overwrite it
    }
}

// Registers are bounded for an occupancy of three blocks an SM: while one waits for its tile, the others compute.
constexpr int RESIDENT_BLOCKS = 3;

// x (batch, IN_CHANNELS, height, width) -> out (batch,). `partial_sums` (blocks), `arrivals` a zero for each sample.
__global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    conv_pool_sum(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                  float* partial_sums, unsigned* arrivals, float* __restrict__ out, int height, int width, int rows,
                  int columns) {
    const Part part = part_of_thread(rows, columns);
    float total[OUT_BLOCK], sum[1] = {0.0f};
    convolve_window(x, weight, height, width, part, total);
#pragma unroll
    for (int o = 0; o < OUT_BLOCK; ++o)
        if (part.exists && part.first_channel + o < OUT_CHANNELS)
            sum[0] += sigmoid(total[o] * (1.0f / (POOL_H * POOL_W)) + bias[part.first_channel + o]);
    sum[0] = block_sums(sum);

    // The fence makes this block's sum visible before its arrival; the last block's fence, the others' sums to itself.
    const int64_t blocks = blocks_a_sample(rows, columns);
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial_sums[blockIdx.x] = sum[0];
        __threadfence();
        last = atomicAdd(arrivals + part.sample, 1u) == blocks - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    sum[0] = 0.0f;
    for (int64_t k = threadIdx.x; k < blocks; k += THREADS) sum[0] += partial_sums[part.sample * blocks + k];
    sum[0] = block_sums(sum);
    if (threadIdx.x == 0) out[part.sample] = sum[0];
}

// delta (batch, OUT_CHANNELS, rows, columns): the gradient of each of the convolution's values in a window.
__global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    window_grad(const float* __restrict__ grad_out, const float* __restrict__ x, const float* __restrict__ weight,
                const float* __restrict__ bias, float* __restrict__ delta, int height, int width, int rows, int columns) {
    const Part part = part_of_thread(rows, columns);
    float total[OUT_BLOCK];
    convolve_window(x, weight, height, width, part, total);
    if (!part.exists) return;
    const float scale = grad_out[part.sample] * (1.0f / (POOL_H * POOL_W));
#pragma unroll
    for (int o = 0; o < OUT_BLOCK; ++o) {
        const int channel = part.first_channel + o;
        if (channel >= OUT_CHANNELS) return;
        const float s = sigmoid(total[o] * (1.0f / (POOL_H * POOL_W)) + bias[channel]);
        const int64_t row = ((int64_t)part.sample * OUT_CHANNELS + channel) * rows + part.row;
        delta[row * columns + part.column] = scale * s * (1.0f - s);
    }
}

// Gradients of the parameters. An output channel has `WEIGHTS` weights and, as one more, the bias: the weight of an input
// that is 1 everywhere. This computes `count` of them from `first`, into partial_sums (splits, OUT_CHANNELS, count); split k
// has the samples k, k + splits, ...
constexpr int WEIGHTS = IN_CHANNELS * KERNEL_H * KERNEL_W;

__global__ void __launch_bounds__(THREADS)
    parameter_grad(const float* __restrict__ delta, const float* __restrict__ x, float* __restrict__ partial_sums, int batch,
                   int height, int width, int rows, int columns, int first, int count, int splits) {
    const int parameter = blockIdx.x % count;
    const int first_channel = blockIdx.x / count % OUT_GROUPS * OUT_BLOCK, split = blockIdx.x / count / OUT_GROUPS;
    const int s = (first + parameter) % KERNEL_W, r = (first + parameter) / KERNEL_W % KERNEL_H;
    const int c = (first + parameter) / (KERNEL_H * KERNEL_W);
    const int64_t windows = (int64_t)rows * columns;
    float sum[OUT_BLOCK] = {};
    for (int64_t sample = split; sample < batch; sample += splits)
        for (int64_t window = threadIdx.x; window < windows; window += THREADS) {
            float input = POOL_H * POOL_W;
            if (first + parameter < WEIGHTS) {
                const int64_t h = window / columns * POOL_H + r, w = window % columns * POOL_W + s;
                const float* corner = x + ((sample * IN_CHANNELS + c) * height + h) * width + w;
                input = 0.0f;
#pragma unroll (UNROLL_POOL)
                for (int u = 0; u < POOL_H; ++u)
#pragma unroll (UNROLL_POOL)
                    for (int v = 0; v < POOL_W; ++v) input += corner[(int64_t)u * width + v];
            }
#pragma unroll
            for (int o = 0; o < OUT_BLOCK; ++o)
                if (first_channel + o < OUT_CHANNELS)
                    sum[o] += delta[(sample * OUT_CHANNELS + first_channel + o) * windows + window] * input;
        }
    const float sum_of_block = block_sums(sum);
    const int channel = first_channel + threadIdx.x;
    if (threadIdx.x < OUT_BLOCK && channel < OUT_CHANNELS)
        partial_sums[((int64_t)split * OUT_CHANNELS + channel) * count + parameter] = sum_of_block;
}

__global__ void add_splits(const float* __restrict__ partial_sums, float* __restrict__ sums, int64_t size, int splits) {
    const int64_t k = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (k >= size) return;
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += partial_sums[split * size + k];
    sums[k] = sum;
}

// grad_x, gathered: every pixel asks each kernel element which window it reached through it. A thread has PIXELS pixels of a
// row, WARP apart, in IN_BLOCK channels, so that a weight is read once for PIXELS products and a delta once for IN_BLOCK.
constexpr int PIXELS = 4, OUT_SLICE = 128;  // output channels whose weights are in shared memory at a time
constexpr int IN_GROUPS = ceil_div(IN_CHANNELS, 8), IN_BLOCK = ceil_div(IN_CHANNELS, IN_GROUPS);

__host__ __device__ int64_t input_tiles(int height, int width) {
    return (int64_t)ceil_div(height, WARPS) * ceil_div(width, WARP * PIXELS);
}

__global__ void __launch_bounds__(THREADS)
    input_grad(const float* __restrict__ delta, const float* __restrict__ weight, float* __restrict__ grad_x, int height,
               int width, int rows, int columns) {
    __shared__ alignas(16) float weights[OUT_SLICE][round_up(IN_BLOCK, 4)];
    const int tiles_across = ceil_div(width, WARP * PIXELS);
    const int64_t tiles = input_tiles(height, width), tile = blockIdx.x % tiles;
    const int first_channel = blockIdx.x / tiles % IN_GROUPS * IN_BLOCK;
    const int64_t sample = blockIdx.x / tiles / IN_GROUPS, windows = (int64_t)rows * columns;
    const int h = tile / tiles_across * WARPS + threadIdx.x / WARP;
    const int w = tile % tiles_across * (WARP * PIXELS) + threadIdx.x % WARP;
    float sum[PIXELS][IN_BLOCK] = {};

    for (int r = 0; r < KERNEL_H; ++r)
        for (int s = 0; s < KERNEL_W; ++s) {
            float sum_here[PIXELS][IN_BLOCK] = {};  // of this kernel element alone: shorter chains of additions err less
            const float* source[PIXELS];
            bool exists[PIXELS];
            const int row = (h - r) / POOL_H;
#pragma unroll
            for (int k = 0; k < PIXELS; ++k) {
                const int column = (w + k * WARP - s) / POOL_W;
                exists[k] = h >= r && row < rows && w + k * WARP >= s && column < columns;
                source[k] = delta + sample * OUT_CHANNELS * windows + (exists[k] ? (int64_t)row * columns + column : 0);
            }
            for (int first_out = 0; first_out < OUT_CHANNELS; first_out += OUT_SLICE) {
                const int outs = min(OUT_SLICE, OUT_CHANNELS - first_out);
                for (int k = threadIdx.x; k < outs * IN_BLOCK; k += THREADS) {
                    const int o = k / IN_BLOCK, c = k % IN_BLOCK;
                    const int64_t channel = (int64_t)(first_out + o) * IN_CHANNELS + first_channel + c;
                    weights[o][c] =
                        first_channel + c < IN_CHANNELS ? weight[(channel * KERNEL_H + r) * KERNEL_W + s] : 0.0f;
                }
                __syncthreads();
#pragma unroll 4
                for (int o = 0; o < outs; ++o)
#pragma unroll
                    for (int k = 0; k < PIXELS; ++k) {
                        const float value = exists[k] ? *source[k] : 0.0f;
                        source[k] += windows;
#pragma unroll
                        for (int c = 0; c < IN_BLOCK; ++c) sum_here[k][c] += value * weights[o][c];
                    }
                __syncthreads();  // the weights have been read; the next may overwrite them
            }
#pragma unroll
            for (int k = 0; k < PIXELS; ++k)
#pragma unroll
                for (int c = 0; c < IN_BLOCK; ++c) sum[k][c] += sum_here[k][c];
        }
#pragma unroll
    for (int k = 0; k < PIXELS; ++k)
#pragma unroll
        for (int c = 0; c < IN_BLOCK; ++c)
            if (h < height && w + k * WARP < width && first_channel + c < IN_CHANNELS)
                grad_x[((sample * IN_CHANNELS + first_channel + c) * height + h) * width + w + k * WARP] = sum[k][c];
}

// Enough splits of the batch for 2000 blocks or so. It depends on the shapes alone, and with it the order of additions.
int parameter_grad_splits(int batch, int count) {
    return smaller(batch, ceil_div(2000, smaller(2000, count) * smaller(2000, OUT_GROUPS)));
}

int64_t parameter_grad_blocks(int count, int splits) { return (int64_t)count * OUT_GROUPS * splits; }
int64_t input_grad_blocks(int batch, int height, int width) { return batch * IN_GROUPS * input_tiles(height, width); }

void launch_conv_pool_sum(const float* x, const float* weight, const float* bias, float* partial_sums, unsigned* arrivals,
                          float* out, int batch, int height, int width, int rows, int columns, cudaStream_t stream) {
    conv_pool_sum<<<batch * blocks_a_sample(rows, columns), THREADS, 0, stream>>>(x, weight, bias, partial_sums, arrivals, out,
                                                                                 height, width, rows, columns);
}

void launch_window_grad(const float* grad_out, const float* x, const float* weight, const float* bias, float* delta, int batch,
                        int height, int width, int rows, int columns, cudaStream_t stream) {
    window_grad<<<batch * blocks_a_sample(rows, columns), THREADS, 0, stream>>>(grad_out, x, weight, bias, delta, height,
                                                                               width, rows, columns);
}

void launch_parameter_grad(const float* delta, const float* x, float* partial_sums, float* gradient, int batch, int height,
                           int width, int rows, int columns, int first, int count, int splits, cudaStream_t stream) {
    if (splits > 0)
        parameter_grad<<<parameter_grad_blocks(count, splits), THREADS, 0, stream>>>(delta, x, partial_sums, batch, height,
                                                                                    width, rows, columns, first, count, splits);
    const int64_t size = (int64_t)OUT_CHANNELS * count;
    add_splits<<<(size + THREADS - 1) / THREADS, THREADS, 0, stream>>>(partial_sums, gradient, size, splits);
}

void launch_input_grad(const float* delta, const float* weight, float* grad_x, int batch, int height, int width, int rows,
                       int columns, cudaStream_t stream) {
    input_grad<<<input_grad_blocks(batch, height, width), THREADS, 0, stream>>>(delta, weight, grad_x, height, width, rows,
                                                                               columns);
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

#include <string>

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

int64_t blocks_a_sample(int rows, int columns);
int parameter_grad_splits(int batch, int count);
int64_t parameter_grad_blocks(int count, int splits);
int64_t input_grad_blocks(int batch, int height, int width);
void launch_conv_pool_sum(const float*, const float*, const float*, float*, unsigned*, float*, int, int, int, int, int,
                          cudaStream_t);
void launch_window_grad(const float*, const float*, const float*, const float*, float*, int, int, int, int, int, cudaStream_t);
void launch_parameter_grad(const float*, const float*, float*, float*, int, int, int, int, int, int, int, int, cudaStream_t);
void launch_input_grad(const float*, const float*, float*, int, int, int, int, int, cudaStream_t);

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits,
                message("fused_conv_avg_sigmoid_sum: expected ", name, " as a float32 CUDA tensor of shape ", shape,
                        " (-1: any), got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device()));
}

static void check_blocks(int64_t blocks) {
    TORCH_CHECK(blocks < (1ll << 31),
                message("fused_conv_avg_sigmoid_sum: the batch needs ", blocks, " blocks, more than a grid has"));
}

// An input and the windows that fit into it; what does not fit the constants of this build raises.
struct Image {
    int64_t batch, height, width, rows, columns;
    explicit Image(const at::Tensor& x) {
        check("x", x, {-1, IN_CHANNELS, -1, -1});
        batch = x.size(0), height = x.size(2), width = x.size(3);
        TORCH_CHECK(height >= KERNEL_H + POOL_H - 1 && width >= KERNEL_W + POOL_W - 1,
                    message("fused_conv_avg_sigmoid_sum: an image of ", height, " x ", width,
                            " is too small for a kernel of ", KERNEL_H, " x ", KERNEL_W, " and a pooling window of ", POOL_H,
                            " x ", POOL_W));
        rows = (height - KERNEL_H + 1) / POOL_H, columns = (width - KERNEL_W + 1) / POOL_W;
    }
};

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(), message("fused_conv_avg_sigmoid_sum: expected all on ",
                                                              expected.device(), ", got ", name, " on ", tensor.device()));
}

static void check_weight(const at::Tensor& x, const at::Tensor& weight) {
    check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
    check_device(x, "weight", weight);
}

static void check_parameters(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    check_weight(x, weight);
    check("bias", bias, {OUT_CHANNELS});
    check_device(x, "bias", bias);
}

static void check_delta(const at::Tensor& x, const Image& image, const at::Tensor& delta) {
    check("delta", delta, {image.batch, OUT_CHANNELS, image.rows, image.columns});
    check_device(x, "delta", delta);
}

at::Tensor fused_conv_avg_sigmoid_sum(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& bias_in,
                                      at::IntArrayRef kernel_size, at::IntArrayRef pool_kernel_size) {
    TORCH_CHECK(kernel_size == at::IntArrayRef({KERNEL_H, KERNEL_W}) && pool_kernel_size == at::IntArrayRef({POOL_H, POOL_W}),
                message("fused_conv_avg_sigmoid_sum: built for a kernel of ", KERNEL_H, " x ", KERNEL_W,
                        " and a pooling window of ", POOL_H, " x ", POOL_W, ", called with ", kernel_size, " and ",
                        pool_kernel_size));
    const Image image(x_in);
    check_parameters(x_in, weight_in, bias_in);
    const c10::cuda::CUDAGuard guard(x_in.device());
    const at::Tensor x = x_in.contiguous(), weight = weight_in.contiguous(), bias = bias_in.contiguous();
    at::Tensor out = at::empty({image.batch}, x.options());
    if (out.numel() == 0) return out;
    const int64_t blocks = image.batch * blocks_a_sample(image.rows, image.columns);
    check_blocks(blocks);
    at::Tensor partial_sums = at::empty({blocks}, x.options());
    at::Tensor arrivals = at::zeros({image.batch}, x.options().dtype(at::kInt));
    launch_conv_pool_sum(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), bias.const_data_ptr<float>(),
                         partial_sums.mutable_data_ptr<float>(), reinterpret_cast<unsigned*>(arrivals.mutable_data_ptr<int>()),
                         out.mutable_data_ptr<float>(), image.batch, image.height, image.width, image.rows, image.columns,
                         c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

at::Tensor window_grad(const at::Tensor& grad_out_in, const at::Tensor& x_in, const at::Tensor& weight_in,
                       const at::Tensor& bias_in, at::IntArrayRef pool_kernel_size) {
    TORCH_CHECK(pool_kernel_size == at::IntArrayRef({POOL_H, POOL_W}),
                message("window_grad: built for a pooling window of ", POOL_H, " x ", POOL_W, ", called with ",
                        pool_kernel_size));
    const Image image(x_in);
    check("grad_out", grad_out_in, {image.batch});
    check_device(x_in, "grad_out", grad_out_in);
    check_parameters(x_in, weight_in, bias_in);
    const c10::cuda::CUDAGuard guard(x_in.device());
    const at::Tensor grad_out = grad_out_in.contiguous(), x = x_in.contiguous(), weight = weight_in.contiguous(),
                     bias = bias_in.contiguous();
    at::Tensor delta = at::empty({image.batch, OUT_CHANNELS, image.rows, image.columns}, x.options());
    if (delta.numel() == 0) return delta;
    check_blocks(image.batch * blocks_a_sample(image.rows, image.columns));
    launch_window_grad(grad_out.const_data_ptr<float>(), x.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                       bias.const_data_ptr<float>(), delta.mutable_data_ptr<float>(), image.batch, image.height, image.width,
                       image.rows, image.columns, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return delta;
}

at::Tensor input_grad(const at::Tensor& delta_in, const at::Tensor& x, const at::Tensor& weight_in) {
    const Image image(x);
    check_delta(x, image, delta_in);
    check_weight(x, weight_in);
    const c10::cuda::CUDAGuard guard(x.device());
    const at::Tensor delta = delta_in.contiguous(), weight = weight_in.contiguous();
    at::Tensor grad_x = at::empty(x.sizes(), x.options());
    if (grad_x.numel() == 0) return grad_x;
    check_blocks(input_grad_blocks(image.batch, image.height, image.width));
    launch_input_grad(delta.const_data_ptr<float>(), weight.const_data_ptr<float>(), grad_x.mutable_data_ptr<float>(),
                      image.batch, image.height, image.width, image.rows, image.columns, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_x;
}

// The gradients of `count` of each output channel's parameters, from `first`: weights and then the bias, which needs no x.
static at::Tensor parameter_grad(const at::Tensor& delta, const float* x, int64_t height, int64_t width, int64_t first,
                                 int64_t count, at::IntArrayRef shape) {
    const int splits = parameter_grad_splits(delta.size(0), count);
    check_blocks(parameter_grad_blocks(count, splits));
    at::Tensor partial_sums = at::empty({splits, OUT_CHANNELS, count}, delta.options());
    at::Tensor gradient = at::empty(shape, delta.options());
    launch_parameter_grad(delta.const_data_ptr<float>(), x, partial_sums.mutable_data_ptr<float>(),
                          gradient.mutable_data_ptr<float>(), delta.size(0), height, width, delta.size(2), delta.size(3),
                          first, count, splits, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return gradient;
}

constexpr int64_t WEIGHTS = (int64_t)IN_CHANNELS * KERNEL_H * KERNEL_W;

at::Tensor weight_grad(const at::Tensor& delta, const at::Tensor& x_in, const at::Tensor& weight) {
    const Image image(x_in);
    check_delta(x_in, image, delta);
    check_weight(x_in, weight);
    const c10::cuda::CUDAGuard guard(x_in.device());
    const at::Tensor x = x_in.contiguous();
    return parameter_grad(delta.contiguous(), x.const_data_ptr<float>(), image.height, image.width, 0, WEIGHTS, weight.sizes());
}

at::Tensor bias_grad(const at::Tensor& delta) {
    check("delta", delta, {-1, OUT_CHANNELS, -1, -1});
    const c10::cuda::CUDAGuard guard(delta.device());
    return parameter_grad(delta.contiguous(), nullptr, 0, 0, WEIGHTS, 1, {OUT_CHANNELS});
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("fused_conv_avg_sigmoid_sum(Tensor x, Tensor weight, Tensor bias, int[2] kernel_size, int[2] pool_kernel_size) -> "
          "Tensor", {at::Tag::pt2_compliant_tag});
    m.def("window_grad(Tensor grad_out, Tensor x, Tensor weight, Tensor bias, int[2] pool_kernel_size) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor delta, Tensor x, Tensor weight) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("weight_grad(Tensor delta, Tensor x, Tensor weight) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("bias_grad(Tensor delta) -> Tensor", {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("fused_conv_avg_sigmoid_sum", &fused_conv_avg_sigmoid_sum);
    m.impl("window_grad", &window_grad);
    m.impl("input_grad", &input_grad);
    m.impl("weight_grad", &weight_grad);
    m.impl("bias_grad", &bias_grad);
}
"""


def register(namespace):
    """Shapes for torch.compile, and autograd."""
    operators = getattr(torch.ops, namespace)

    @torch.library.register_fake(f"{namespace}::fused_conv_avg_sigmoid_sum")
    def fused_conv_avg_sigmoid_sum(x, weight, bias, kernel_size, pool_kernel_size):
        return x.new_empty(x.shape[0])

    @torch.library.register_fake(f"{namespace}::window_grad")
    def window_grad(grad_out, x, weight, bias, pool_kernel_size):
        rows = (x.shape[2] - weight.shape[2] + 1) // pool_kernel_size[0]
        columns = (x.shape[3] - weight.shape[3] + 1) // pool_kernel_size[1]
        return x.new_empty(x.shape[0], weight.shape[0], rows, columns)

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(delta, x, weight):
        return x.new_empty(x.shape)

    @torch.library.register_fake(f"{namespace}::weight_grad")
    def weight_grad(delta, x, weight):
        return weight.new_empty(weight.shape)

    @torch.library.register_fake(f"{namespace}::bias_grad")
    def bias_grad(delta):
        return delta.new_empty(delta.shape[1])

    def save(ctx, inputs, output):
        x, weight, bias, _, ctx.pool_kernel_size = inputs
        ctx.save_for_backward(x, weight, bias)

    def backward(ctx, grad_out):
        x, weight, bias = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        delta = operators.window_grad(grad_out, x, weight, bias, ctx.pool_kernel_size)
        grad_x = operators.input_grad(delta, x, weight) if needs_x else None
        grad_weight = operators.weight_grad(delta, x, weight) if needs_weight else None
        grad_bias = operators.bias_grad(delta) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    torch.library.register_autograd(f"{namespace}::fused_conv_avg_sigmoid_sum", backward, setup_context=save)
    for name in ("window_grad", "input_grad", "weight_grad", "bias_grad"):
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

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    @torch.compiler.assume_constant_result
    def namespace(self):
        kernel_h, kernel_w = self.conv.kernel_size
        pool = self.avg_pool.kernel_size
        pool_h, pool_w = (pool, pool) if isinstance(pool, int) else pool
        channels = {"IN_CHANNELS": self.conv.in_channels, "OUT_CHANNELS": self.conv.out_channels}
        return build(*self.sources, **channels, KERNEL_H=kernel_h, KERNEL_W=kernel_w, POOL_H=pool_h, POOL_W=pool_w)

    def forward(self, x):
        operators = getattr(torch.ops, self.namespace())
        return operators.fused_conv_avg_sigmoid_sum(
            x, self.conv.weight, self.conv.bias, self.conv.kernel_size, self.avg_pool.kernel_size
        )


def main():
    from torch.utils import benchmark, cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew(8, 64, 3, 4).to("cpu" if emulated else "cuda")
    x = torch.randn(3, 8, 45, 64) if emulated else torch.randn(128, 8, 384, 384, device="cuda")

    def plain(x):
        return torch.sigmoid(model.avg_pool(model.conv(x))).sum(dim=(1, 2, 3))

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
