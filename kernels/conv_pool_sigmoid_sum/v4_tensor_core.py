"""conv_pool_sigmoid_sum, v4: the product of weights and box sums on the tensor cores, in one pass over the input.

Like v3, but warps stream the image through registers: box sums are computed where the tensor cores take them from, and in the
forward pass never pass through shared memory. The gradients of the parameters come out of the same pass.

Why it is faster
    v3 spends its time on fp32 multiply-adds, and on carrying box sums through shared memory between two barriers of its block.
    mma.sync multiplies TF32 at six times that rate on an H200, and its operands lie in the lanes in such a way that a lane can
    make its own: two windows side by side, two channels, all places in the kernel. So a warp needs no other. It has a strip of
    16 windows to itself, keeps the strip's rows in a ring in shared memory, sums two rows of windows at a time, asks for the
    next eight rows of pixels with cp.async, and multiplies while they come. No barrier stands in that loop. The steps of all
    samples are split evenly over the multiprocessors, in the middle of a sample if need be, so any batch fills the GPU.
    What it costs: a warp uses nearly all registers that a thread can have, so only eight share a multiprocessor, and shapes
    whose sums do not fit in registers take v3's kernels, whose text this file repeats.

Mathematics
    That of v3. Weights, with 1/p^2 and -log2(e) in them, and box sums are split into two TF32 values each, high and low, and
    the product is high * low + low * high + high * high, which leaves an error of 2^-21 a term. Box sums of 11 bits alone would
    not do: where pixels are alike, their sum is p times as large as what differs, and its rounding errs p times as much as TF32
    permits a convolution, which rounds pixels. With gradients of the parameters, where PyTorch permits TF32 to convolutions
    (torch.backends.cudnn.conv.fp32_precision or allow_tf32, read in each call, so also in a compiled model), box sums and
    delta are rounded to 11 bits nevertheless: the errors, independent of one another, average out over the windows. Sums are
    fp32 always. An infinite input gives NaN where a sum of split values meets it.
    Box sums share additions along a row: a sum of p pixels is the end of one run of p and the beginning of the next.
    Forward alone and forward with gradients add in different orders, so their results differ in the last bits.

Launches
    kernel           grid                                   block    shared        work of a warp
    stream_windows   a block a multiprocessor               8 warps  206 (182) KB  a strip of 16 windows, 2 (1) rows at a time
    add_part_sums    (samples)                              32       0             the sums of a sample's parts
    add_parts        (samples x parameters / 128)           128      0             the same for gradients; a thread a parameter
    weighted_sum, input_grad and all kernels of the path for other shapes: see v3

    In brackets: with gradients of the parameters. Shared memory is that of the original's size; where a device has less, fewer
    warps share a block. Weights take 37 KB of it, each warp's ring 22 (13) KB.

Floor
    Forward: 604 MB in, 0.139 ms on an H200. What the kernel asks of a multiprocessor besides, counted in its machine code (0.54
    ns a cycle), for 279 steps of 2 x 16 windows and, with gradients, 553 of 16:
                                  forward                      forward, strict      with gradients of the parameters
    mma.sync                      288 a step, 0.070 ms         432, 0.105           216, 0.104
    shared memory, wavefronts     700 a step, 0.105 ms         700, 0.105           640, 0.19
    instructions issued           1,900 a step, 0.072 ms       2,050, 0.078         1,700, 0.127
    exponentials, reciprocals     128 a step, 0.039 ms         128, 0.039           64, 0.039
    Wavefronts are half for weights (each load of a weight serves 32 windows, or 16), and a third for pixels. Nothing exceeds
    the memory's time but the wavefronts with gradients; two warps for each scheduler do not hide all of it behind another.
    Predicted: 0.19 ms; strict, which every call without gradients is, 0.21; with gradients 0.25. Measured: 0.248 without
    gradients, 18% more than counted; a training step 0.319 in a CUDA graph, 0.487 with the CPU's part. The input's gradient
    takes v3's kernels and time.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel and pool size that the
    original takes; compute capability 8.0 or later. The tensor cores serve up to 8 input channels, kernels of up to 9 places
    and windows of up to about 8 x 8 (what fits a ring), any image and any number of output channels; rows that are not
    aligned to 16 bytes are copied in pieces of 4. Everything else goes through v3's kernels. Gradients of the parameters take
    batch x parameters floats. Anything else raises before a launch. Trains, and computes only the gradients that are asked
    for; second derivatives raise. Deterministic on a GPU; another number of multiprocessors adds in another order.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv_pool_sigmoid_sum_v4_tensor_core"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

// A term is one c, r, s: input channel, row and column of the kernel. Box sums of a tile of windows are a matrix with a row
// of TILE floats for each term; its product with the weights is computed with a thread for each 8 windows x N columns.
constexpr int TILE = 128, TILE_COLUMNS = 32, TILE_ROWS = TILE / TILE_COLUMNS;
constexpr int COLUMN_LANES = 8, WINDOW_LANES = THREADS / COLUMN_LANES, WINDOWS = TILE / WINDOW_LANES;
static_assert(TILE == THREADS, "where tiles are filled, a thread has a window");

// Output channels in groups of equal size, at most 64.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 64), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUTS = ceil_div(OUT_BLOCK, COLUMN_LANES);  // of a thread

// What is in shared memory at a time is a slice of the terms. Slices divide evenly, so they need no bounds. Column sums lie
// by remainder, first all columns that are 0 modulo POOL_W, then all that are 1, and so on: neighbouring threads read them
// POOL_W apart. RUN, the place of a remainder, is padded so that a warp that writes hits all banks, too.
constexpr int MAX_TERMS = 27, COLUMN_SUM_FLOATS = 4096;
constexpr int SLICE_S = largest_divisor(KERNEL_W, MAX_TERMS);
constexpr int TILE_WIDTH = TILE_COLUMNS * POOL_W + SLICE_S - 1;
constexpr int padded_run() {
    int run = ceil_div(TILE_WIDTH, POOL_W);
    while (POOL_W > 1 && POOL_W < WARP && run % WARP != ceil_div(WARP, POOL_W)) ++run;
    return run;
}
constexpr int RUN = padded_run(), TILE_PITCH = POOL_W * RUN;
constexpr bool STAGED = TILE_ROWS * TILE_PITCH <= COLUMN_SUM_FLOATS;  // not so for large windows: see box_sums
constexpr int MAX_COLUMN_SUMS = STAGED ? COLUMN_SUM_FLOATS / (TILE_ROWS * TILE_PITCH) : MAX_TERMS;
constexpr int SLICE_R = largest_divisor(KERNEL_H, smaller(MAX_TERMS / SLICE_S, MAX_COLUMN_SUMS));
constexpr int SLICE_C = largest_divisor(IN_CHANNELS, smaller(MAX_TERMS / (SLICE_R * SLICE_S), MAX_COLUMN_SUMS / SLICE_R));
constexpr int TERMS = SLICE_C * SLICE_R * SLICE_S;
constexpr int ALL_TERMS = IN_CHANNELS * KERNEL_H * KERNEL_W, SLICES = ALL_TERMS / TERMS;

__device__ __forceinline__ int stored_column(int w) { return w % POOL_W * RUN + w / POOL_W; }

// ex2.approx: relative error 2^-22.5.
__device__ __forceinline__ float fast_exp2(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

// rcp.approx: within 1 ulp.
__device__ __forceinline__ float fast_reciprocal(float v) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
    return reciprocal;
}

// Weights and bias carry the factor -log2(e), so that the product's result v is an exponent: sigmoid = 1 / (1 + 2^v).
constexpr float MINUS_LOG2_E = -1.44269504f, WINDOW_SCALE = 1.0f / (POOL_H * POOL_W);
__device__ __forceinline__ float sigmoid_of_exponent(float v) { return fast_reciprocal(1.0f + fast_exp2(v)); }

// The sum of `value` over the block, valid in thread 0. The order of additions is fixed, so the bits are too.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[WARPS];
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = value;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < WARPS; ++warp) value += warp_sums[warp];
    return value;
}

// x (batch, IN_CHANNELS, height, width), and the windows that fit into it.
struct Image {
    const float* x;
    int batch, height, width, rows, columns;
    Image(const float* x, int batch, int height, int width)
        : x(x), batch(batch), height(height), width(width), rows((height - KERNEL_H + 1) / POOL_H),
          columns((width - KERNEL_W + 1) / POOL_W) {}
    __host__ __device__ int tiles_across() const { return ceil_div(columns, TILE_COLUMNS); }
    __host__ __device__ int64_t tiles() const { return (int64_t)ceil_div(rows, TILE_ROWS) * tiles_across(); }
    __host__ __device__ int64_t windows() const { return (int64_t)rows * columns; }
};

// A tile of a sample, and this thread's window of it where a thread has one.
struct Tile {
    int top, left, row, column;  // first window, and the thread's
    bool exists;                 // false past the edge of the image
    __device__ Tile(const Image& image, int64_t tile) {
        top = tile / image.tiles_across() * TILE_ROWS, left = tile % image.tiles_across() * TILE_COLUMNS;
        row = top + threadIdx.x / TILE_COLUMNS, column = left + threadIdx.x % TILE_COLUMNS;
        exists = row < image.rows && column < image.columns;
    }
};

// Where a slice of the terms begins.
struct Slice {
    int c, r, s;
    __device__ explicit Slice(int slice) {
        constexpr int ACROSS = KERNEL_W / SLICE_S, DOWN = KERNEL_H / SLICE_R;
        s = slice % ACROSS * SLICE_S, r = slice / ACROSS % DOWN * SLICE_R, c = slice / (ACROSS * DOWN) * SLICE_C;
    }
    __device__ int64_t term(int k) const {  // the number of its k-th term among all terms
        return ((int64_t)(c + k / (SLICE_R * SLICE_S)) * KERNEL_H + r + k / SLICE_S % SLICE_R) * KERNEL_W + s + k % SLICE_S;
    }
};

// boxes[term][window] = the sum of x over the window, shifted by the term's place in the kernel; 0 where no window exists.
// First sums down the columns, one for each pixel column and r, shared by all s; then along the rows.
// A barrier is inside; the caller needs one more before it reads the boxes.
template <int ROWS, int PITCH>
__device__ __forceinline__ void box_sums(const Image& image, int sample, const Tile& tile, const Slice& slice,
                                         float (&boxes)[ROWS][PITCH]) {
    const int64_t plane = (int64_t)image.height * image.width;
    const float* corner = image.x + ((int64_t)sample * IN_CHANNELS + slice.c) * plane +
                          ((int64_t)tile.top * POOL_H + slice.r) * image.width + (int64_t)tile.left * POOL_W + slice.s;
    __shared__ float column_sums[STAGED ? SLICE_C * SLICE_R : 1][TILE_ROWS][STAGED ? TILE_PITCH : 1];
    if constexpr (STAGED) {
        const int valid_width = image.width - tile.left * POOL_W - slice.s;
        for (int k = threadIdx.x; k < SLICE_C * TILE_ROWS * TILE_WIDTH; k += THREADS) {
            const int w = k % TILE_WIDTH, row = k / TILE_WIDTH % TILE_ROWS, c = k / TILE_WIDTH / TILE_ROWS;
            const bool inside = w < valid_width && tile.top + row < image.rows;
            const float* column = corner + c * plane + (int64_t)row * POOL_H * image.width + w;
            float pixel[SLICE_R + POOL_H - 1];
#pragma unroll
            for (int u = 0; u < SLICE_R + POOL_H - 1; ++u) pixel[u] = inside ? column[(int64_t)u * image.width] : 0.0f;
#pragma unroll
            for (int r = 0; r < SLICE_R; ++r) {
                float sum = pixel[r];
#pragma unroll
                for (int u = 1; u < POOL_H; ++u) sum += pixel[r + u];
                column_sums[c * SLICE_R + r][row][stored_column(w)] = sum;
            }
        }
    }
    __syncthreads();  // column sums are complete, and the caller's last use of the boxes is over
    if constexpr (STAGED) {
        for (int k = 0; k < SLICE_C * SLICE_R; ++k) {
            const float* sums = &column_sums[k][tile.row - tile.top][tile.column - tile.left];
            float value[SLICE_S + POOL_W - 1];
#pragma unroll
            for (int v = 0; v < SLICE_S + POOL_W - 1; ++v) value[v] = sums[stored_column(v)];
#pragma unroll
            for (int s = 0; s < SLICE_S; ++s) {
                float sum = value[s];
#pragma unroll
                for (int v = 1; v < POOL_W; ++v) sum += value[s + v];
                boxes[k * SLICE_S + s][threadIdx.x] = tile.exists ? sum : 0.0f;
            }
        }
    } else {
        // Column sums of large windows do not fit. Each box is then summed by itself, row by row.
        const int64_t offset = (int64_t)(tile.row - tile.top) * POOL_H * image.width + (tile.column - tile.left) * POOL_W;
        for (int k = 0; k < TERMS; ++k) {
            const int c = k / (SLICE_R * SLICE_S), r = k / SLICE_S % SLICE_R, s = k % SLICE_S;
            float sum = 0.0f;
            for (int u = 0; tile.exists && u < POOL_H; ++u) {
                const float* row = corner + c * plane + offset + (int64_t)(r + u) * image.width + s;
                float sum_of_row = 0.0f;
                for (int v = 0; v < POOL_W; ++v) sum_of_row += row[v];
                sum += sum_of_row;
            }
            boxes[k][threadIdx.x] = sum;
        }
    }
}

// The windows and columns of a thread lie in runs of 4 where that lets it read 16 bytes at a time.
__device__ __forceinline__ int window_of_thread(int m) {
    return m / 4 * (TILE / 2) + threadIdx.x / COLUMN_LANES * 4 + m % 4;
}
template <int N>
__device__ __forceinline__ int column_of_thread(int n) {
    const int lane = threadIdx.x % COLUMN_LANES;
    return N % 4 == 0 ? n / 4 * 4 * COLUMN_LANES + lane * 4 + n % 4 : n * COLUMN_LANES + lane;
}
// The rows of a matrix with so many columns are 4 longer than a multiple of 8, so that they begin in different banks.
__host__ __device__ constexpr int padded_columns(int columns) { return round_up(columns, COLUMN_LANES) + 4; }

// sums[m][n] += sum over k of a[k][window m] * b[k][column n], for the windows and columns of this thread.
template <int K, int PITCH, int N>
__device__ __forceinline__ void multiply(const float (&a)[K][TILE], const float (&b)[K][PITCH], float (&sums)[WINDOWS][N]) {
#pragma unroll 6
    for (int k = 0; k < K; ++k) {
        float left[WINDOWS], right[N];
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m) left[m] = a[k][window_of_thread(m)];
#pragma unroll
        for (int n = 0; n < N; ++n) right[n] = b[k][column_of_thread<N>(n)];
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) sums[m][n] += left[m] * right[n];
    }
}

// One tile of windows in OUT_BLOCK output channels. Writes the sum of the block's sigmoids to partial_sums[block] unless that
// is null, and, with DELTA, the sigmoids' derivatives to delta (batch, OUT_CHANNELS, rows, columns).
template <bool DELTA>
__global__ void __launch_bounds__(THREADS, 4)
    sum_sigmoids(Image image, const float* __restrict__ weight, const float* __restrict__ bias,
                 float* __restrict__ partial_sums, float* __restrict__ delta) {
    __shared__ alignas(16) float boxes[TERMS][TILE];
    __shared__ alignas(16) float weights[TERMS][padded_columns(OUT_BLOCK)];
    const int first_out = blockIdx.x % OUT_GROUPS * OUT_BLOCK, sample = blockIdx.x / OUT_GROUPS / image.tiles();
    const Tile tile(image, blockIdx.x / OUT_GROUPS % image.tiles());

    float exponent[WINDOWS][OUTS];
#pragma unroll
    for (int n = 0; n < OUTS; ++n) {
        const int out = first_out + column_of_thread<OUTS>(n);
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m) exponent[m][n] = out < OUT_CHANNELS ? MINUS_LOG2_E * bias[out] : 0.0f;
    }
#pragma unroll 1
    for (int slice_index = 0; slice_index < SLICES; ++slice_index) {
        const Slice slice(slice_index);
        box_sums(image, sample, tile, slice, boxes);
        for (int k = threadIdx.x; k < TERMS * OUTS * COLUMN_LANES; k += THREADS) {
            const int term = k % TERMS, out = k / TERMS;
            const bool exists = out < OUT_BLOCK && first_out + out < OUT_CHANNELS;
            const int64_t source = (int64_t)(first_out + out) * ALL_TERMS + slice.term(term);
            weights[term][out] = exists ? MINUS_LOG2_E * WINDOW_SCALE * weight[source] : 0.0f;
        }
        __syncthreads();
        multiply(boxes, weights, exponent);
    }

    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < WINDOWS; ++m) {
        const int row = tile.top + window_of_thread(m) / TILE_COLUMNS, column = tile.left + window_of_thread(m) % TILE_COLUMNS;
#pragma unroll
        for (int n = 0; n < OUTS; ++n) {
            const int in_block = column_of_thread<OUTS>(n), out = first_out + in_block;
            if (row >= image.rows || column >= image.columns || in_block >= OUT_BLOCK || out >= OUT_CHANNELS) continue;
            const float s = sigmoid_of_exponent(exponent[m][n]);
            sum += s;
            if (DELTA)
                delta[((int64_t)sample * OUT_CHANNELS + out) * image.windows() + (int64_t)row * image.columns + column] =
                    s * (1.0f - s);
        }
    }
    if (partial_sums == nullptr) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial_sums[blockIdx.x] = sum;
}

// Gradients of a sample's output by the parameters: delta times box sums, summed over windows. The bias is the weight of one
// more term, whose boxes are sums of ones. A block has a slice of the terms, a group of output channels, and of the sample's
// tiles every splits-th; its sums go to terms (batch, splits, OUT_CHANNELS * ALL_TERMS weights, then OUT_CHANNELS biases).
constexpr int OUT_STEP = 32, OUT_STEPS = ceil_div(OUT_BLOCK, OUT_STEP);  // as many channels of delta are in shared memory
constexpr int TERM_LANES = 4, OUT_LANES = WARP / TERM_LANES;
constexpr int THREAD_TERMS = ceil_div(TERMS + 1, TERM_LANES), THREAD_OUTS = OUT_STEP / OUT_LANES;
constexpr int PADDED_TERMS = THREAD_TERMS * TERM_LANES, PADDED_TILE = TILE + 4;  // + 4: other banks for each row

__global__ void __launch_bounds__(THREADS, 4)
    parameter_terms(Image image, const float* __restrict__ delta, float* __restrict__ terms, int splits) {
    __shared__ alignas(16) float boxes[PADDED_TERMS][PADDED_TILE];
    __shared__ alignas(16) float deltas[OUT_STEP][PADDED_TILE];
    const Slice slice(blockIdx.x % SLICES);
    const int first_out = blockIdx.x / SLICES % OUT_GROUPS * OUT_BLOCK;
    const int split = blockIdx.x / SLICES / OUT_GROUPS % splits, sample = blockIdx.x / SLICES / OUT_GROUPS / splits;
    const int warp = threadIdx.x / WARP, out_lane = threadIdx.x % OUT_LANES, term_lane = threadIdx.x % WARP / OUT_LANES;

    for (int k = TERMS; k < PADDED_TERMS; ++k) boxes[k][threadIdx.x] = k == TERMS ? POOL_H * POOL_W : 0.0f;
    float sums[OUT_STEPS][THREAD_OUTS][THREAD_TERMS] = {};
    for (int64_t index = split; index < image.tiles(); index += splits) {
        const Tile tile(image, index);
        box_sums(image, sample, tile, slice, boxes);
#pragma unroll
        for (int step = 0; step < OUT_STEPS; ++step) {
            if (step > 0) __syncthreads();  // the last step's deltas have been read
            for (int k = 0; k < OUT_STEP; ++k) {
                const int in_block = step * OUT_STEP + k, out = first_out + in_block;
                const bool exists = tile.exists && in_block < OUT_BLOCK && out < OUT_CHANNELS;
                const int64_t source =
                    ((int64_t)sample * OUT_CHANNELS + out) * image.windows() + (int64_t)tile.row * image.columns + tile.column;
                deltas[k][threadIdx.x] = exists ? delta[source] : 0.0f;
            }
            __syncthreads();
#pragma unroll 2
            for (int window = 4 * warp; window < TILE; window += 4 * WARPS) {  // each warp has every fourth run of 4 windows
                float left[THREAD_OUTS][4], right[THREAD_TERMS][4];
#pragma unroll
                for (int v = 0; v < 4; ++v) {
#pragma unroll
                    for (int m = 0; m < THREAD_OUTS; ++m) left[m][v] = deltas[m * OUT_LANES + out_lane][window + v];
#pragma unroll
                    for (int n = 0; n < THREAD_TERMS; ++n) right[n][v] = boxes[n * TERM_LANES + term_lane][window + v];
                }
#pragma unroll
                for (int m = 0; m < THREAD_OUTS; ++m)
#pragma unroll
                    for (int n = 0; n < THREAD_TERMS; ++n)
#pragma unroll
                        for (int v = 0; v < 4; ++v) sums[step][m][n] += left[m][v] * right[n][v];
            }
        }
    }

    // Add the warps' sums, in their order.
    constexpr int STEP_SUMS = OUT_STEP * PADDED_TERMS;
    static_assert(WARPS * STEP_SUMS <= OUT_STEP * PADDED_TILE, "they lie where the deltas were");
    float* warp_sums = &deltas[0][0];
    float* result = terms + ((int64_t)sample * splits + split) * OUT_CHANNELS * (ALL_TERMS + 1);
#pragma unroll
    for (int step = 0; step < OUT_STEPS; ++step) {
        __syncthreads();
#pragma unroll
        for (int m = 0; m < THREAD_OUTS; ++m)
#pragma unroll
            for (int n = 0; n < THREAD_TERMS; ++n)
                warp_sums[warp * STEP_SUMS + (m * OUT_LANES + out_lane) * PADDED_TERMS + n * TERM_LANES + term_lane] =
                    sums[step][m][n];
        __syncthreads();
        for (int k = threadIdx.x; k < STEP_SUMS; k += THREADS) {
            const int term = k % PADDED_TERMS, in_block = step * OUT_STEP + k / PADDED_TERMS, out = first_out + in_block;
            float sum = 0.0f;
            for (int other = 0; other < WARPS; ++other) sum += warp_sums[other * STEP_SUMS + k];
            if (in_block >= OUT_BLOCK || out >= OUT_CHANNELS) continue;
            if (term < TERMS) result[(int64_t)out * ALL_TERMS + slice.term(term)] = sum * WINDOW_SCALE;
            if (term == TERMS && blockIdx.x % SLICES == 0) result[(int64_t)OUT_CHANNELS * ALL_TERMS + out] = sum * WINDOW_SCALE;
        }
    }
}

// For each group: sums[k] = sum over n < count of factors[n] * terms[n][k], k < size; factors are 1 where the pointer is null.
// sums (groups, head) has the first `head` of them, tail (groups, size - head) the others.
constexpr int SUM_COLUMNS = 32, SUM_ROWS = 8;

__global__ void __launch_bounds__(SUM_COLUMNS * SUM_ROWS)
    weighted_sum(const float* __restrict__ factors, const float* __restrict__ terms, float* __restrict__ sums,
                 float* __restrict__ tail, int64_t count, int64_t size, int64_t head) {
    __shared__ float row_sums[SUM_ROWS][SUM_COLUMNS];
    const int64_t blocks = (size + SUM_COLUMNS - 1) / SUM_COLUMNS, group = blockIdx.x / blocks;
    const int row = threadIdx.x / SUM_COLUMNS, column = threadIdx.x % SUM_COLUMNS;
    const int64_t k = blockIdx.x % blocks * SUM_COLUMNS + column;
    float sum = 0.0f;
    if (k < size) {
#pragma unroll 4
        for (int64_t n = row; n < count; n += SUM_ROWS) {
            const float term = terms[(group * count + n) * size + k];
            sum += factors ? factors[n] * term : term;
        }
    }
    row_sums[row][column] = sum;
    __syncthreads();
    if (row > 0 || k >= size) return;
    for (int other = 1; other < SUM_ROWS; ++other) sum += row_sums[other][column];
    if (k < head) sums[group * head + k] = sum;
    else tail[group * (size - head) + k - head] = sum;
}

// grad_x. A pixel gets from each term the gradient of one box sum, that of the window which holds the pixel when shifted by
// the term. A block computes the gradients of box sums for GRAD_ROWS x GRAD_COLUMNS windows in a slice of the terms, and then
// the pixels that need no others: those of fewer windows, by a halo above and to the left.
constexpr int GRAD_COLUMNS = 16, GRAD_ROWS = TILE / GRAD_COLUMNS, GRAD_MAX_TERMS = 40, GRAD_OUTS = 16;
constexpr int GRAD_S = largest_divisor(KERNEL_W, smaller(GRAD_MAX_TERMS, (GRAD_COLUMNS / 2 - 1) * POOL_W + 1));
constexpr int GRAD_R = largest_divisor(KERNEL_H, smaller(GRAD_MAX_TERMS / GRAD_S, (GRAD_ROWS / 2 - 1) * POOL_H + 1));
constexpr int GRAD_C = largest_divisor(IN_CHANNELS, GRAD_MAX_TERMS / (GRAD_R * GRAD_S));
constexpr int GRAD_TERMS = GRAD_C * GRAD_R * GRAD_S, GRAD_THREAD_TERMS = ceil_div(GRAD_TERMS, COLUMN_LANES);
constexpr int halo(int slice, int kernel, int pool) { return ceil_div(slice - 1, pool) + (slice < kernel); }
constexpr int PIXEL_ROWS = (GRAD_ROWS - halo(GRAD_R, KERNEL_H, POOL_H)) * POOL_H;
constexpr int PIXEL_COLUMNS = (GRAD_COLUMNS - halo(GRAD_S, KERNEL_W, POOL_W)) * POOL_W;

__host__ __device__ int64_t pixel_tiles(const Image& image) {
    return (int64_t)ceil_div(image.height, PIXEL_ROWS) * ceil_div(image.width, PIXEL_COLUMNS);
}

__global__ void __launch_bounds__(THREADS, 4)
    input_grad(Image image, const float* __restrict__ grad_out, const float* __restrict__ delta,
               const float* __restrict__ weight, float* __restrict__ grad_x) {
    __shared__ alignas(16) float deltas[GRAD_OUTS][TILE];
    __shared__ alignas(16) float weights[GRAD_OUTS][padded_columns(GRAD_TERMS)];
    __shared__ alignas(16) float boxes[GRAD_THREAD_TERMS * COLUMN_LANES][TILE];
    const int64_t tiles = pixel_tiles(image), tile = blockIdx.x % tiles;
    const int across = ceil_div(image.width, PIXEL_COLUMNS);
    const int cell_row = tile / across * (PIXEL_ROWS / POOL_H), cell_column = tile % across * (PIXEL_COLUMNS / POOL_W);
    const int c0 = blockIdx.x / tiles % (IN_CHANNELS / GRAD_C) * GRAD_C, sample = blockIdx.x / tiles / (IN_CHANNELS / GRAD_C);
    const float scale = grad_out[sample] * WINDOW_SCALE;

#pragma unroll 1
    for (int r0 = 0; r0 < KERNEL_H; r0 += GRAD_R)
#pragma unroll 1
    for (int s0 = 0; s0 < KERNEL_W; s0 += GRAD_S) {
        const int top = cell_row - ceil_div(r0 + GRAD_R - 1, POOL_H), left = cell_column - ceil_div(s0 + GRAD_S - 1, POOL_W);
        const int row = top + threadIdx.x / GRAD_COLUMNS, column = left + threadIdx.x % GRAD_COLUMNS;
        const bool exists = row >= 0 && row < image.rows && column >= 0 && column < image.columns;
        float sums[WINDOWS][GRAD_THREAD_TERMS] = {};
#pragma unroll 1
        for (int first_out = 0; first_out < OUT_CHANNELS; first_out += GRAD_OUTS) {
#pragma unroll 4
            for (int o = 0; o < GRAD_OUTS; ++o) {
                const int64_t source = ((int64_t)sample * OUT_CHANNELS + first_out + o) * image.windows() +
                                       (int64_t)row * image.columns + column;
                deltas[o][threadIdx.x] = exists && first_out + o < OUT_CHANNELS ? delta[source] : 0.0f;
            }
            for (int k = threadIdx.x; k < GRAD_OUTS * GRAD_THREAD_TERMS * COLUMN_LANES; k += THREADS) {
                const int term = k % (GRAD_THREAD_TERMS * COLUMN_LANES), o = k / (GRAD_THREAD_TERMS * COLUMN_LANES);
                const int c = c0 + term / (GRAD_R * GRAD_S), r = r0 + term / GRAD_S % GRAD_R, s = s0 + term % GRAD_S;
                const int64_t source = (((int64_t)(first_out + o) * IN_CHANNELS + c) * KERNEL_H + r) * KERNEL_W + s;
                weights[o][term] = term < GRAD_TERMS && first_out + o < OUT_CHANNELS ? weight[source] : 0.0f;
            }
            __syncthreads();
            multiply(deltas, weights, sums);
            __syncthreads();  // what was read may be overwritten
        }
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m)
#pragma unroll
            for (int n = 0; n < GRAD_THREAD_TERMS; ++n)
                boxes[column_of_thread<GRAD_THREAD_TERMS>(n)][window_of_thread(m)] = sums[m][n];
        __syncthreads();  // the next slice writes its boxes behind the barriers of its products
        for (int k = threadIdx.x; k < GRAD_C * PIXEL_ROWS * PIXEL_COLUMNS; k += THREADS) {
            const int w = k % PIXEL_COLUMNS, h = k / PIXEL_COLUMNS % PIXEL_ROWS, c = k / PIXEL_COLUMNS / PIXEL_ROWS;
            if (cell_row * POOL_H + h >= image.height || cell_column * POOL_W + w >= image.width) continue;
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < GRAD_R; ++r)
#pragma unroll
                for (int s = 0; s < GRAD_S; ++s) {
                    const int y = (h - r0 - r + (cell_row - top) * POOL_H) / POOL_H;
                    const int z = (w - s0 - s + (cell_column - left) * POOL_W) / POOL_W;
                    sum += boxes[(c * GRAD_R + r) * GRAD_S + s][y * GRAD_COLUMNS + z];
                }
            float* pixel = grad_x + (((int64_t)sample * IN_CHANNELS + c0 + c) * image.height + cell_row * POOL_H + h) *
                                        image.width + cell_column * POOL_W + w;
            *pixel = (r0 == 0 && s0 == 0 ? 0.0f : *pixel) + scale * sum;
        }
    }
}

// Each sample's tiles are split over enough blocks to fill a GPU. It depends on the shapes alone, and with it the order of
// additions.
int64_t parameter_splits(int batch, int height, int width) {
    const int64_t tiles = Image(nullptr, batch, height, width).tiles(), blocks = (int64_t)batch * OUT_GROUPS * SLICES;
    const int64_t splits = (2000 + blocks - 1) / blocks;
    return splits < tiles ? splits : tiles;
}

int64_t sigmoid_blocks(int batch, int height, int width) {
    return batch * Image(nullptr, batch, height, width).tiles() * OUT_GROUPS;
}
int64_t parameter_blocks(int batch, int height, int width) {
    return batch * parameter_splits(batch, height, width) * OUT_GROUPS * SLICES;
}
int64_t input_grad_blocks(int batch, int height, int width) {
    return batch * pixel_tiles(Image(nullptr, batch, height, width)) * (IN_CHANNELS / GRAD_C);
}
int64_t weighted_sum_blocks(int64_t groups, int64_t size) { return groups * ((size + SUM_COLUMNS - 1) / SUM_COLUMNS); }

void launch_sum_sigmoids(const float* x, const float* weight, const float* bias, float* partial_sums, float* delta, int batch,
                         int height, int width, cudaStream_t stream) {
    const auto kernel = delta ? sum_sigmoids<true> : sum_sigmoids<false>;
    kernel<<<sigmoid_blocks(batch, height, width), THREADS, 0, stream>>>(Image(x, batch, height, width), weight, bias,
                                                                         partial_sums, delta);
}

void launch_parameter_terms(const float* x, const float* delta, float* terms, int batch, int height, int width,
                            cudaStream_t stream) {
    parameter_terms<<<parameter_blocks(batch, height, width), THREADS, 0, stream>>>(
        Image(x, batch, height, width), delta, terms, parameter_splits(batch, height, width));
}

void launch_weighted_sum(const float* factors, const float* terms, float* sums, float* tail, int64_t groups, int64_t count,
                         int64_t size, int64_t head, cudaStream_t stream) {
    weighted_sum<<<weighted_sum_blocks(groups, size), SUM_COLUMNS * SUM_ROWS, 0, stream>>>(factors, terms, sums, tail, count,
                                                                                         size, head);
}

void launch_input_grad(const float* grad_out, const float* delta, const float* weight, float* grad_x, int batch, int height,
                       int width, cudaStream_t stream) {
    input_grad<<<input_grad_blocks(batch, height, width), THREADS, 0, stream>>>(Image(nullptr, batch, height, width), grad_out,
                                                                               delta, weight, grad_x);
}

// ---------------------------------------------------------------------------------------------------------------------------
// The tensor-core path. What is above serves the shapes that it does not take, and the input's gradient.
//
// A warp works alone: it streams a strip of STRIP windows down the image through a ring of rows of its own in shared memory,
// computes box sums in registers, where they already are what mma.sync takes as its right operand, multiplies them with the
// weights, and asks for the next rows before it does. Warps meet only where weights are laid out and where a sample ends.
//
// Of a product of 16 output channels x 8 windows over 8 input channels, lane 4 * g + t holds window group g, input channels
// t and t + 4 of the box sums, and of the result channels g and g + 8, window groups 2 * t and 2 * t + 1. A group is two
// windows side by side, the right operands of two products.
constexpr int CHANNELS = 8, STRIP = 16, KERNEL = KERNEL_H * KERNEL_W, OUT_TILES = ceil_div(OUT_BLOCK, 16);
constexpr int PIECES = ceil_div(STRIP * POOL_W + KERNEL_W - 1, 4);  // of 16 bytes, in a row of a channel of a strip
constexpr int padded_row() {  // in floats: rows of neighbouring channels begin 16 bytes apart, modulo the 128 of all banks
    int row = 4 * PIECES;
    while (row % WARP != 4) row += 4;
    return row;
}
constexpr int ROW = padded_row(), MAX_STREAM_WARPS = 8;

// ROWS rows of windows at a time share each load of a weight. With gradients of the parameters, a warp's registers hold a
// gradient for every parameter, and one row is what fits beside them.
template <bool TRAIN>
struct Stream {
    static constexpr int ROWS = !TRAIN && 2 * POOL_H + KERNEL_H - 1 <= 12 ? 2 : 1;
    static constexpr int RING = ROWS * POOL_H + KERNEL_H - 1;  // rows
    static constexpr int RING_FLOATS = RING * CHANNELS * ROW, STAGE_FLOATS = TRAIN ? KERNEL * CHANNELS * STRIP : 0;
    static constexpr int SUMS = OUT_TILES * 16 * (KERNEL * CHANNELS + 1);  // of the parameters, padded
    static constexpr int NEEDED = RING_FLOATS + STAGE_FLOATS + (TRAIN ? OUT_TILES * 2 * WARP : 0);
    static constexpr int WARP_FLOATS = round_up(TRAIN && SUMS > NEEDED ? SUMS : NEEDED, 4);
};
constexpr int WEIGHT_FLOATS = KERNEL * OUT_TILES * 2 * WARP * 4, BIAS_FLOATS = OUT_TILES * 16;
constexpr bool STREAMED = IN_CHANNELS <= CHANNELS && KERNEL <= 9 && Stream<true>::RING_FLOATS <= 12288;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// Copies 16 bytes, or writes that many zeros where `bytes` is 0; then `from` is not read.
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const float* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same with 4 bytes, for images whose rows are not aligned.
__device__ __forceinline__ void copy_4_bytes(uint32_t to, const float* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(to), "l"(from), "r"(bytes) : "memory");
}

// Waits for all of this thread's copies.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }

// To the nearest TF32 value (10 bits behind the point); NaN stays NaN.
__device__ __forceinline__ uint32_t round_to_tf32(float v) {
    uint32_t rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
    return rounded;
}

// sums (16 x 8) += a (16 x 8) * b (8 x 8) in TF32. The unit ignores the low 13 bits of its operands.
__device__ __forceinline__ void multiply_tf32(float (&sums)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A float as the TF32 value that the unit sees of it, and what is missing.
struct Split {
    uint32_t high, low;
    __device__ __forceinline__ explicit Split(float v) {
        high = __float_as_uint(v) & 0xffffe000u;
        low = __float_as_uint(v - __uint_as_float(high));
    }
};

// sums[w][k] = the sum of POOL values from in[w * POOL + k] on. A sum is the end of one run of POOL values and the beginning
// of the next, so neighbouring sums share additions.
template <int POOL, int SHIFTS, int COUNT>
__device__ __forceinline__ void running_sums(const float (&in)[COUNT * POOL + SHIFTS - 1], float (&sums)[COUNT][SHIFTS]) {
    constexpr int LENGTH = COUNT * POOL + SHIFTS - 1;
    float beginning[LENGTH], end[LENGTH];
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) beginning[i] = i % POOL == 0 ? in[i] : beginning[i > 0 ? i - 1 : 0] + in[i];
#pragma unroll
    for (int i = LENGTH - 1; i >= 0; --i)
        end[i] = i % POOL == POOL - 1 || i == LENGTH - 1 ? in[i] : in[i] + end[i < LENGTH - 1 ? i + 1 : i];
#pragma unroll
    for (int w = 0; w < COUNT; ++w)
#pragma unroll
        for (int k = 0; k < SHIFTS; ++k) {
            const int first = w * POOL + k;
            sums[w][k] = first % POOL == 0 ? end[first] : end[first] + beginning[first + POOL - 1];
        }
}

// Steps of all samples, ROWS rows of windows each, are split evenly over `blocks` blocks; a block's range may cover parts of
// several samples. Part `block` of sample `sample` has the number block + sample: no two parts share it.
struct Ranges {
    int total, steps, blocks;  // steps of all samples, and of one
    __host__ __device__ Ranges(const Image& image, int rows, int blocks)
        : total(image.batch * ceil_div(image.rows, rows)), steps(ceil_div(image.rows, rows)), blocks(blocks) {}
    __device__ int begin(int64_t block) const { return block * total / blocks; }
    __device__ int block_of(int64_t step) const {
        int block = step * blocks / total;
        while (begin(block + 1) <= step) ++block;
        return block;
    }
};

// A warp's way through its block's range, in shared memory, because registers are scarce; lane 0 moves it on. A part of a
// sample is `count` steps from `first` on, in all strips. They are cut into bands, so that there are enough units (a strip of a
// band) for all warps; neighbouring warps have neighbouring strips, and each part begins with the warp whose turn it is.
struct Walk {
    int position, range_end, warp, warps, turn;
    int sample, first, count, strips, bands;
    int unit, strip, step, end, slot, last_strip, last_step;  // slot: of the ring, where the step's first row is
    bool more, fresh;  // fresh: the first step of a unit, of which the ring has nothing

    __device__ __forceinline__ void begin(int range_begin, int end_of_range, int this_warp, int all_warps) {
        position = range_begin, range_end = end_of_range, warp = this_warp, warps = all_warps, turn = 0;
        strip = step = 0;
    }
    __device__ __forceinline__ void begin_part(const Image& image, int steps_of_sample) {
        more = position < range_end;
        if (!more) return;
        sample = position / steps_of_sample, first = position % steps_of_sample;
        count = min(steps_of_sample - first, range_end - position);
        position += count;
        strips = ceil_div(image.columns, STRIP), bands = warps;
        while (bands % 2 == 0 && strips * (bands / 2) % warps == 0) bands /= 2;
        bands = min(bands, count);
        unit = (warp + warps - turn) % warps - warps;
        turn = (turn + strips * bands) % warps;
        end = 0, slot = 0;
    }
    __device__ __forceinline__ void advance(int new_rows, int ring) {
        last_strip = strip, last_step = step;
        slot = slot + new_rows < ring ? slot + new_rows : slot + new_rows - ring;
        fresh = ++step >= end;
        if (!fresh) return;
        unit += warps;
        more = unit < strips * bands;
        const int64_t band = unit / strips;
        strip = unit % strips;
        step = first + (int)(band * count / bands), end = first + (int)((band + 1) * count / bands);
    }
    // Of the whole warp: whether there is more. By way of lane 0, so that the compiler knows that the warp stays together.
    __device__ __forceinline__ bool goes_on() const {
        __syncwarp();
        return __shfl_sync(0xffffffffu, more, 0);
    }
};

// Asks for the rows of x that a step needs and the ring does not have. Row r of the step goes to slot walk.slot + r, modulo
// RING. Rows, columns and channels that do not exist become zeros.
template <int ROWS, int RING>
__device__ __forceinline__ void fetch(const Image& image, const Walk& walk, uint32_t ring, bool aligned) {
    const int lane = threadIdx.x % WARP, left = walk.strip * STRIP * POOL_W, top = walk.step * ROWS * POOL_H;
    const int64_t plane = (int64_t)image.height * image.width;
    const float* corner = image.x + (int64_t)walk.sample * IN_CHANNELS * plane + (int64_t)top * image.width + left;
    const int first_row = walk.fresh ? 0 : KERNEL_H - 1;
    if (aligned) {  // 8 lanes copy 128 neighbouring bytes of a channel
        const int channel = lane / 8, piece = lane % 8;
        const float* source = corner + channel * plane + (int64_t)first_row * image.width + 4 * piece;
#pragma unroll 2
        for (int r = first_row; r < RING; ++r, source += image.width) {
            const int slot = walk.slot + r < RING ? walk.slot + r : walk.slot + r - RING;
            const uint32_t target = ring + ((slot * CHANNELS + channel) * ROW + 4 * piece) * 4;
#pragma unroll
            for (int c = 0; c < CHANNELS; c += 4)
#pragma unroll
                for (int p = 0; p < PIECES; p += 8) {
                    const bool exists =
                        top + r < image.height && left + 4 * (piece + p) < image.width && channel + c < IN_CHANNELS;
                    if (piece + p < PIECES)
                        copy_16_bytes(target + (c * ROW + 4 * p) * 4, source + c * plane + 4 * p, exists ? 16 : 0);
                }
        }
    } else {
#pragma unroll 1
        for (int r = first_row; r < RING; ++r) {
            const int slot = walk.slot + r < RING ? walk.slot + r : walk.slot + r - RING;
#pragma unroll 1
            for (int c = 0; c < CHANNELS; ++c)
#pragma unroll 1
                for (int w = lane; w < 4 * PIECES; w += WARP) {
                    const bool exists = top + r < image.height && left + w < image.width && c < IN_CHANNELS;
                    copy_4_bytes(ring + ((slot * CHANNELS + c) * ROW + w) * 4,
                                 corner + c * plane + (int64_t)r * image.width + w, exists ? 4 : 0);
                }
        }
    }
}

// The window group of a column of the product. In this order, lanes that read at the same time read from all banks.
__device__ __forceinline__ int group_of(int column) { return (column & 4) | (column & 1) << 1 | (column >> 1 & 1); }

// boxes[row][k][window][half]: this lane's box sums for place k in the kernel, window 0 or 1 of its group, and channel t or
// t + 4. Each row of pixels is summed along the row for each window and column of the kernel, and added to all boxes it is in.
template <int ROWS, int RING>
__device__ __forceinline__ void lane_boxes(const float* ring, int first_slot, float (&boxes)[ROWS][KERNEL][2][2]) {
    constexpr int LENGTH = 2 * POOL_W + KERNEL_W - 1;
    const int lane = threadIdx.x % WARP;
    ring += lane % 4 * ROW + group_of(lane / 4) * 2 * POOL_W;
    int slot = first_slot;
#pragma unroll
    for (int y = 0; y < RING; ++y) {
        const float* source = ring + slot * CHANNELS * ROW;
        slot = slot + 1 < RING ? slot + 1 : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float pixel[LENGTH], sums[2][KERNEL_W];
            if constexpr (POOL_W % 2 == 0) {
#pragma unroll
                for (int v = 0; v < LENGTH; v += 4) {
                    const float4 four = *reinterpret_cast<const float4*>(source + half * 4 * ROW + v);
                    pixel[v] = four.x;
                    if (v + 1 < LENGTH) pixel[v + 1] = four.y;
                    if (v + 2 < LENGTH) pixel[v + 2] = four.z;
                    if (v + 3 < LENGTH) pixel[v + 3] = four.w;
                }
            } else {
#pragma unroll
                for (int v = 0; v < LENGTH; ++v) pixel[v] = source[half * 4 * ROW + v];
            }
            running_sums<POOL_W, KERNEL_W, 2>(pixel, sums);
#pragma unroll
            for (int row = 0; row < ROWS; ++row)
#pragma unroll
                for (int k = 0; k < KERNEL; ++k)
#pragma unroll
                    for (int window = 0; window < 2; ++window) {
                        const int u = y - row * POOL_H - k / KERNEL_W;  // the pixel row's place in the box
                        float& box = boxes[row][k][window][half];
                        if (u == 0) box = sums[window][k % KERNEL_W];
                        if (u > 0 && u < POOL_H) box += sums[window][k % KERNEL_W];
                    }
        }
    }
}

// Weights as left operands, hi + lo TF32, in the order in which lanes read them: for each place in the kernel, tile of 16
// output channels, and part, 4 words of each lane.
__device__ __forceinline__ void lay_out_weights(const float* __restrict__ weight, int first_out, uint32_t* weights) {
    for (int k = threadIdx.x; k < KERNEL * OUT_TILES * WARP * 4; k += blockDim.x) {
        const int word = k % 4, lane = k / 4 % WARP, tile = k / (4 * WARP) % OUT_TILES, place = k / (4 * WARP * OUT_TILES);
        const int in_block = tile * 16 + lane / 4 + word % 2 * 8, out = first_out + in_block, c = lane % 4 + word / 2 * 4;
        const bool exists = in_block < OUT_BLOCK && out < OUT_CHANNELS && c < IN_CHANNELS;
        const float w = exists ? MINUS_LOG2_E * WINDOW_SCALE * weight[(out * IN_CHANNELS + c) * KERNEL + place] : 0.0f;
        const uint32_t high = round_to_tf32(w);
        uint32_t* target = weights + ((place * OUT_TILES + tile) * 2 * WARP + lane) * 4 + word;
        target[0] = high;
        target[4 * WARP] = round_to_tf32(w - __uint_as_float(high));
    }
}

// With gradients of the parameters, a step's box sums also lie in shared memory, the stage: their sums are over windows, which
// are in other lanes. It has a row of STRIP for each place in the kernel and channel, in which a column of the product has two
// windows side by side. Every other two rows are rotated by half a row: all ways to write and read it then hit all banks.
__device__ __forceinline__ int staged(int row, int k) { return row * STRIP + (k + row / 2 % 2 * (STRIP / 2)) % STRIP; }

// exponent[tile][row][window] = the product of each tile of weights with the box sums, and the biases.
// STRICT: products of fp32 as three of TF32. Otherwise the box sums are TF32 values already. With TRAIN, which is for one row
// of windows, they are read from the stage, and need no registers.
template <int ROWS, bool STRICT, bool TRAIN>
__device__ __forceinline__ void weigh(const uint32_t* weights, const float* bias_exponents,
                                      const float (&boxes)[ROWS][KERNEL][2][2], const float* stage,
                                      float (&exponent)[OUT_TILES][ROWS][2][4]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int tile = 0; tile < OUT_TILES; ++tile) {
        const float* source = bias_exponents + tile * 16 + lane / 4;
        const float low = source[0], high = source[8];
#pragma unroll
        for (int n = 0; n < ROWS * 2; ++n) {
            float(&sums)[4] = exponent[tile][n / 2][n % 2];
            sums[0] = sums[1] = low, sums[2] = sums[3] = high;
        }
    }
#pragma unroll
    for (int k = 0; k < KERNEL; ++k) {
        float box[ROWS * 2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if constexpr (TRAIN) {
                const float* source = stage + staged(k * CHANNELS + lane % 4 + half * 4, lane / 4 * 2);
                box[0][half] = source[0], box[1][half] = source[1];
            } else {
#pragma unroll
                for (int n = 0; n < ROWS * 2; ++n) box[n][half] = boxes[n / 2][k][n % 2][half];
            }
#pragma unroll
        for (int tile = 0; tile < OUT_TILES; ++tile) {
            const uint4* source = reinterpret_cast<const uint4*>(weights) + (k * OUT_TILES + tile) * 2 * WARP + lane;
            const uint4 high = source[0], low = source[WARP];
            // One part of all products after the other: a product that waits for the last one's sums waits less.
#pragma unroll
            for (int part = 0; part < (STRICT ? 3 : 2); ++part)
#pragma unroll
                for (int n = 0; n < ROWS * 2; ++n) {
                    float(&sums)[4] = exponent[tile][n / 2][n % 2];
                    if (STRICT) {
                        const Split first(box[n][0]), second(box[n][1]);
                        if (part == 0) multiply_tf32(sums, high, first.low, second.low);
                        else multiply_tf32(sums, part == 1 ? low : high, first.high, second.high);
                    } else {
                        multiply_tf32(sums, part == 0 ? low : high, __float_as_uint(box[n][0]), __float_as_uint(box[n][1]));
                    }
                }
        }
    }
}

// The sum of the sigmoids of a step. Their derivatives take the place of the exponents; what does not exist is 0.
template <int ROWS>
__device__ __forceinline__ float take_sigmoids(const Image& image, int strip, int step, int first_out,
                                               float (&exponent)[OUT_TILES][ROWS][2][4]) {
    const int lane = threadIdx.x % WARP;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < ROWS * 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = step * ROWS + n / 2, column = strip * STRIP + group_of(lane % 4 * 2 + i) * 2 + n % 2;
            const bool exists = row < image.rows && column < image.columns;
#pragma unroll
            for (int m = 0; m < OUT_TILES * 2; ++m) {
                const int in_block = m * 8 + lane / 4;
                const bool out_exists = OUT_BLOCK % 16 == 0 && OUT_CHANNELS % OUT_BLOCK == 0 ||
                                        in_block < OUT_BLOCK && first_out + in_block < OUT_CHANNELS;
                float& value = exponent[m / 2][n / 2][n % 2][m % 2 * 2 + i];
                const float s = exists && out_exists ? sigmoid_of_exponent(value) : 0.0f;
                sum += s;
                value = s - s * s;
            }
        }
    return sum;
}

// gradients[tile][k] += delta times the box sums, summed over the windows of a step; bias_sums, of which each lane has a
// column, alike with ones. The result of the product above is the left operand of this one, where columns 2 * t and 2 * t + 1
// count as t and t + 4: a sum over windows takes them in any order.
template <bool STRICT>
__device__ __forceinline__ void add_gradients(const float* stage, float (&delta)[OUT_TILES][1][2][4], float* bias_sums,
                                              float (&gradients)[OUT_TILES][KERNEL][4]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < OUT_TILES * 2; ++m) {
        float(&d)[2][4] = delta[m / 2][0];
        bias_sums[m * WARP + lane] += (d[0][m % 2 * 2] + d[0][m % 2 * 2 + 1]) + (d[1][m % 2 * 2] + d[1][m % 2 * 2 + 1]);
    }
    if (!STRICT)
#pragma unroll
        for (int k = 0; k < OUT_TILES * 8; ++k)
            delta[k / 8][0][k / 4 % 2][k % 4] = __uint_as_float(round_to_tf32(delta[k / 8][0][k / 4 % 2][k % 4]));
#pragma unroll
    for (int k = 0; k < KERNEL; ++k) {
        const float4 four = *reinterpret_cast<const float4*>(stage + staged(k * CHANNELS + lane / 4, lane % 4 * 4));
        const float box[2][2] = {{four.x, four.z}, {four.y, four.w}};
#pragma unroll
        for (int window = 0; window < 2; ++window)
#pragma unroll
            for (int tile = 0; tile < OUT_TILES; ++tile) {
                const float(&d)[4] = delta[tile][0][window];
                float(&sums)[4] = gradients[tile][k];
                if (STRICT) {
                    const Split first(box[window][0]), second(box[window][1]), d0(d[0]), d1(d[1]), d2(d[2]), d3(d[3]);
                    const uint4 high = make_uint4(d0.high, d2.high, d1.high, d3.high);
                    multiply_tf32(sums, make_uint4(d0.low, d2.low, d1.low, d3.low), first.high, second.high);
                    multiply_tf32(sums, high, first.low, second.low);
                    multiply_tf32(sums, high, first.high, second.high);
                } else {
                    const uint4 left = make_uint4(__float_as_uint(d[0]), __float_as_uint(d[2]), __float_as_uint(d[1]),
                                                  __float_as_uint(d[3]));
                    multiply_tf32(sums, left, __float_as_uint(box[window][0]), __float_as_uint(box[window][1]));
                }
            }
    }
}

// Puts a warp's gradients where its ring was, in the order of the lanes' registers: weights, then biases.
constexpr int WEIGHT_SUMS = OUT_TILES * KERNEL * 4 * WARP;

__device__ __forceinline__ void put_gradients(float* sums, const float (&gradients)[OUT_TILES][KERNEL][4],
                                              const float* bias_sums) {
    const int lane = threadIdx.x % WARP;
    float totals[OUT_TILES * 2];
#pragma unroll
    for (int m = 0; m < OUT_TILES * 2; ++m) {
        totals[m] = bias_sums[m * WARP + lane];
        totals[m] += __shfl_xor_sync(0xffffffffu, totals[m], 1);
        totals[m] += __shfl_xor_sync(0xffffffffu, totals[m], 2);
    }
    __syncwarp();  // all have read the last rows, the stage and the biases' sums
#pragma unroll
    for (int k = 0; k < OUT_TILES * KERNEL * 4; ++k)
        sums[k * WARP + lane] = gradients[k / (4 * KERNEL)][k / 4 % KERNEL][k % 4];
#pragma unroll
    for (int m = 0; m < OUT_TILES * 2; ++m)
        if (lane % 4 == 0) sums[WEIGHT_SUMS + m * 8 + lane / 4] = totals[m];
}

// Adds what the warps have put, in their order, and writes it as the parameters lie in a sample's gradients.
__device__ __forceinline__ void write_gradients(const float* sums, int pitch, int first_out, float* __restrict__ target) {
#pragma unroll 1
    for (int k = threadIdx.x; k < WEIGHT_SUMS + OUT_TILES * 16; k += blockDim.x) {
        const bool is_bias = k >= WEIGHT_SUMS;
        const int lane = k % WARP, word = k / WARP % 4, place = k / (4 * WARP) % KERNEL, tile = k / (4 * WARP * KERNEL);
        const int in_block = is_bias ? k - WEIGHT_SUMS : tile * 16 + lane / 4 + word / 2 * 8, out = first_out + in_block;
        const int c = lane % 4 * 2 + word % 2;
        if (in_block >= OUT_BLOCK || out >= OUT_CHANNELS || !is_bias && c >= IN_CHANNELS) continue;
        float total = 0.0f;
        for (int warp = 0; warp < blockDim.x / WARP; ++warp) total += sums[warp * pitch + k];
        if (is_bias) target[OUT_CHANNELS * ALL_TERMS + out] = total;
        else target[(out * IN_CHANNELS + c) * KERNEL + place] = total * WINDOW_SCALE;
    }
}

// For each part of a sample that falls to a block: the sum of each warp's sigmoids to out_terms[part][group][warp], and, with
// TRAIN, the gradients of the parameters to grad_terms[part].
template <bool TRAIN, bool STRICT>
__global__ void __launch_bounds__(MAX_STREAM_WARPS * WARP, 1)
    stream_windows(Image image, const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ out_terms,
                   float* __restrict__ grad_terms, bool aligned) {
    using Size = Stream<TRAIN>;
    constexpr int ROWS = Size::ROWS, RING = Size::RING;
    extern __shared__ float4 memory[];
    uint32_t* weights = reinterpret_cast<uint32_t*>(memory);
    float* bias_exponents = reinterpret_cast<float*>(weights + WEIGHT_FLOATS);
    float* warp_memory = bias_exponents + BIAS_FLOATS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int out_group = blockIdx.x % OUT_GROUPS, block = blockIdx.x / OUT_GROUPS, first_out = out_group * OUT_BLOCK;
    float* ring = warp_memory + warp * Size::WARP_FLOATS;
    float *stage = ring + Size::RING_FLOATS, *bias_sums = stage + Size::STAGE_FLOATS;

    lay_out_weights(weight, first_out, weights);
    for (int k = threadIdx.x; k < BIAS_FLOATS; k += blockDim.x)
        bias_exponents[k] = k < OUT_BLOCK && first_out + k < OUT_CHANNELS ? MINUS_LOG2_E * bias[first_out + k] : 0.0f;
    __syncthreads();

    __shared__ Walk walks[MAX_STREAM_WARPS];
    Walk& walk = walks[warp];
    const Ranges ranges(image, ROWS, gridDim.x / OUT_GROUPS);
    if (lane == 0) walk.begin(ranges.begin(block), ranges.begin(block + 1), warp, blockDim.x / WARP);
#pragma unroll 1
    while (true) {
        if (lane == 0) walk.begin_part(image, ranges.steps);
        if (!walk.goes_on()) break;
        float sum = 0.0f, gradients[OUT_TILES][KERNEL][4] = {};
        for (int m = 0; TRAIN && m < OUT_TILES * 2; ++m) bias_sums[m * WARP + lane] = 0.0f;
        // While a step is multiplied, the rows of the next are on their way. The first pass only asks for rows.
        bool loaded = false;
#pragma unroll 1
        do {
            float boxes[ROWS][KERNEL][2][2];
            if (loaded) {
                wait_for_copies();
                __syncwarp();  // all lanes' copies are there
                lane_boxes<ROWS, RING>(ring, walk.slot, boxes);
                if (!STRICT)
#pragma unroll
                    for (int k = 0; k < ROWS * KERNEL * 4; ++k) {
                        float& box = boxes[k / (KERNEL * 4)][k / 4 % KERNEL][k / 2 % 2][k % 2];
                        box = __uint_as_float(round_to_tf32(box));
                    }
                if (TRAIN)
#pragma unroll
                    for (int k = 0; k < KERNEL; ++k)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float* target = stage + staged(k * CHANNELS + lane % 4 + half * 4, lane / 4 * 2);
                            *reinterpret_cast<float2*>(target) = make_float2(boxes[0][k][0][half], boxes[0][k][1][half]);
                        }
            }
            __syncwarp();  // the rows and the walk have been read, and the stage is written
            if (lane == 0) walk.advance(ROWS * POOL_H, RING);
            const bool more = walk.goes_on();
            if (more) fetch<ROWS, RING>(image, walk, shared_address(ring), aligned);
            if (loaded) {
                float exponent[OUT_TILES][ROWS][2][4];
                weigh<ROWS, STRICT, TRAIN>(weights, bias_exponents, boxes, stage, exponent);
                sum += take_sigmoids(image, walk.last_strip, walk.last_step, first_out, exponent);
                if constexpr (TRAIN) add_gradients<STRICT>(stage, exponent, bias_sums, gradients);
            }
            loaded = more;
        } while (loaded);

        const int64_t part = (int64_t)block + walk.sample;
        for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
        if (lane == 0) out_terms[(part * OUT_GROUPS + out_group) * (blockDim.x / WARP) + warp] = sum;
        if constexpr (TRAIN) {
            put_gradients(ring, gradients, bias_sums);
            __syncthreads();
            write_gradients(warp_memory, Size::WARP_FLOATS, first_out, grad_terms + part * OUT_CHANNELS * (ALL_TERMS + 1));
            __syncthreads();  // the sums have been read, and the rings may be filled
        }
        __syncwarp();  // the walk has been read
    }
}

// sums[sample][k] = the sum over the parts of a sample of terms[part][k], k < size. One thread a sum.
__global__ void __launch_bounds__(THREADS)
    add_parts(Image image, const float* __restrict__ terms, float* __restrict__ sums, int rows, int blocks, int size) {
    const Ranges ranges(image, rows, blocks);
    const int64_t chunks = (size + THREADS - 1) / THREADS, sample = blockIdx.x / chunks;
    const int64_t k = blockIdx.x % chunks * THREADS + threadIdx.x;
    if (k >= size) return;
    const int first = ranges.block_of(sample * ranges.steps), last = ranges.block_of((sample + 1) * ranges.steps - 1);
    float sum = 0.0f;
    for (int block = first; block <= last; ++block) sum += terms[(block + sample) * size + k];
    sums[sample * size + k] = sum;
}

// sums[sample] = the sum over the parts of a sample of `size` terms each. One warp a sample.
__global__ void __launch_bounds__(WARP)
    add_part_sums(Image image, const float* __restrict__ terms, float* __restrict__ sums, int rows, int blocks, int size) {
    const Ranges ranges(image, rows, blocks);
    const int64_t sample = blockIdx.x;
    const int first = ranges.block_of(sample * ranges.steps), last = ranges.block_of((sample + 1) * ranges.steps - 1);
    float sum = 0.0f;
    for (int64_t k = threadIdx.x; k < (int64_t)(last - first + 1) * size; k += WARP) sum += terms[(first + sample) * size + k];
    for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x == 0) sums[sample] = sum;
}

bool streamed() { return STREAMED; }

// How a device runs stream_windows: as many warps as its shared memory takes rings for, and a block on each multiprocessor
// for all groups of output channels together.
struct Launch {
    int warps, blocks, rows, bytes;
    explicit Launch(bool train, int batch, int height, int width) {
        int device, processors, limit;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        const int common = (WEIGHT_FLOATS + BIAS_FLOATS) * 4;
        const int each = (train ? Stream<true>::WARP_FLOATS : Stream<false>::WARP_FLOATS) * 4;
        warps = smaller(MAX_STREAM_WARPS, (limit - common - (int)sizeof(Walk) * MAX_STREAM_WARPS) / each);
        bytes = common + warps * each;
        rows = train ? Stream<true>::ROWS : Stream<false>::ROWS;
        const int64_t steps = (int64_t)batch * ceil_div(Image(nullptr, batch, height, width).rows, rows);
        const int most = processors > OUT_GROUPS ? processors / OUT_GROUPS : 1;
        blocks = steps < most ? steps : most;
    }
};

// 0 warps where the device's shared memory is too small.
int64_t stream_parts(bool train, int batch, int height, int width) {
    return Launch(train, batch, height, width).blocks + batch;
}
int64_t stream_warps(bool train, int batch, int height, int width) { return Launch(train, batch, height, width).warps; }

template <bool TRAIN, bool STRICT>
void launch_stream(const float* x, const float* weight, const float* bias, float* out_terms, float* grad_terms, float* out,
                   float* grads, int batch, int height, int width, cudaStream_t stream) {
    if constexpr (STREAMED) {
        const Launch launch(TRAIN, batch, height, width);
        const Image image(x, batch, height, width);
        const bool aligned = width % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
        const auto kernel = stream_windows<TRAIN, STRICT>;
        if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.bytes) != cudaSuccess) return;
        kernel<<<launch.blocks * OUT_GROUPS, launch.warps * WARP, launch.bytes, stream>>>(image, weight, bias, out_terms,
                                                                                       grad_terms, aligned);
        add_part_sums<<<batch, WARP, 0, stream>>>(image, out_terms, out, launch.rows, launch.blocks, OUT_GROUPS * launch.warps);
        if (TRAIN) {
            const int64_t size = (int64_t)OUT_CHANNELS * (ALL_TERMS + 1);
            add_parts<<<batch * ((size + THREADS - 1) / THREADS), THREADS, 0, stream>>>(image, grad_terms, grads, launch.rows,
                                                                                       launch.blocks, size);
        }
    }
}

void launch_stream_windows(const float* x, const float* weight, const float* bias, float* out_terms, float* grad_terms,
                           float* out, float* grads, bool strict, int batch, int height, int width, cudaStream_t stream) {
    const auto launch = grads ? (strict ? launch_stream<true, true> : launch_stream<true, false>)
                              : (strict ? launch_stream<false, true> : launch_stream<false, false>);
    launch(x, weight, bias, out_terms, grad_terms, out, grads, batch, height, width, stream);
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

int64_t parameter_splits(int batch, int height, int width);
int64_t sigmoid_blocks(int batch, int height, int width);
int64_t parameter_blocks(int batch, int height, int width);
int64_t input_grad_blocks(int batch, int height, int width);
int64_t weighted_sum_blocks(int64_t groups, int64_t size);
void launch_sum_sigmoids(const float*, const float*, const float*, float*, float*, int, int, int, cudaStream_t);
void launch_parameter_terms(const float*, const float*, float*, int, int, int, cudaStream_t);
void launch_weighted_sum(const float*, const float*, float*, float*, int64_t, int64_t, int64_t, int64_t, cudaStream_t);
void launch_input_grad(const float*, const float*, const float*, float*, int, int, int, cudaStream_t);
bool streamed();
int64_t stream_warps(bool train, int batch, int height, int width);
int64_t stream_parts(bool train, int batch, int height, int width);
void launch_stream_windows(const float*, const float*, const float*, float*, float*, float*, float*, bool, int, int, int,
                           cudaStream_t);

constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * KERNEL_H * KERNEL_W, PARAMETERS = WEIGHTS + OUT_CHANNELS;
constexpr int64_t OUT_GROUPS = (OUT_CHANNELS + 63) / 64;  // as in the kernels

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits,
                message("conv_pool_sigmoid_sum: expected ", name, " as a float32 CUDA tensor of shape ", shape,
                        " (-1: any), got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device()));
}

static void check_blocks(int64_t blocks) {
    TORCH_CHECK(blocks < (1ll << 31),
                message("conv_pool_sigmoid_sum: the batch needs ", blocks, " blocks, more than a grid has"));
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(),
                message("conv_pool_sigmoid_sum: expected all on ", expected.device(), ", got ", name, " on ", tensor.device()));
}

// The arguments of all passes over the input, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    int64_t batch, height, width;
    at::Tensor x, weight, bias;
    c10::cuda::CUDAGuard guard;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& bias_in, at::IntArrayRef pool)
        : guard(checked(x_in, weight_in, bias_in, pool)) {
        x = x_in.contiguous(), weight = weight_in.contiguous(), bias = bias_in.contiguous();
        batch = x.size(0), height = x.size(2), width = x.size(3);
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef pool) {
        check("x", x, {-1, IN_CHANNELS, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
        check("bias", bias, {OUT_CHANNELS});
        check_device(x, "weight", weight);
        check_device(x, "bias", bias);
        TORCH_CHECK(pool == at::IntArrayRef({POOL_H, POOL_W}),
                    message("conv_pool_sigmoid_sum: built for a pooling window of ", POOL_H, " x ", POOL_W, ", called with ",
                            pool));
        TORCH_CHECK(x.size(2) >= KERNEL_H + POOL_H - 1 && x.size(3) >= KERNEL_W + POOL_W - 1,
                    message("conv_pool_sigmoid_sum: an image of ", x.size(2), " x ", x.size(3),
                            " is too small for a kernel of ", KERNEL_H, " x ", KERNEL_W, " and a pooling window of ", POOL_H,
                            " x ", POOL_W));
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }

    at::Tensor empty_delta() const {
        return empty({batch, OUT_CHANNELS, (height - KERNEL_H + 1) / POOL_H, (width - KERNEL_W + 1) / POOL_W});
    }

    // Writes each sample's output to `out` and the sigmoids' derivatives to `delta`, where these are not null.
    void sum_sigmoids(const at::Tensor* out, const at::Tensor* delta) const {
        const int64_t blocks = sigmoid_blocks(batch, height, width);
        check_blocks(blocks);
        at::Tensor partial_sums;
        if (out) partial_sums = empty({blocks});
        launch_sum_sigmoids(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), bias.const_data_ptr<float>(),
                            out ? partial_sums.mutable_data_ptr<float>() : nullptr,
                            delta ? delta->mutable_data_ptr<float>() : nullptr, batch, height, width,
                            c10::cuda::getCurrentCUDAStream());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
        if (out) sum_groups(partial_sums, *out, batch, blocks / batch, 1);
    }

    // Whether the tensor-core path takes these shapes on this device.
    bool is_streamed(bool train) const {
        return streamed() && batch * height < (1ll << 31) && stream_warps(train, batch, height, width) > 0;
    }

    // Writes each sample's output to `out` and, where it is not null, its gradients of the parameters to `grads`. The precision
    // is that which PyTorch's own convolution would use now.
    void stream_windows(const at::Tensor& out, const at::Tensor* grads) const {
        const bool strict = !grads || !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
        const int64_t parts = stream_parts(grads, batch, height, width), warps = stream_warps(grads, batch, height, width);
        at::Tensor out_terms = empty({parts, OUT_GROUPS, warps}), grad_terms;
        if (grads) grad_terms = empty({parts, PARAMETERS}), check_blocks(weighted_sum_blocks(batch, PARAMETERS));
        launch_stream_windows(x.const_data_ptr<float>(), weight.const_data_ptr<float>(), bias.const_data_ptr<float>(),
                              out_terms.mutable_data_ptr<float>(), grads ? grad_terms.mutable_data_ptr<float>() : nullptr,
                              out.mutable_data_ptr<float>(), grads ? grads->mutable_data_ptr<float>() : nullptr, strict, batch,
                              height, width, c10::cuda::getCurrentCUDAStream());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
    }

    // sums (groups, size) of terms (groups, count, size).
    static void sum_groups(const at::Tensor& terms, const at::Tensor& sums, int64_t groups, int64_t count, int64_t size) {
        check_blocks(weighted_sum_blocks(groups, size));
        launch_weighted_sum(nullptr, terms.const_data_ptr<float>(), sums.mutable_data_ptr<float>(), nullptr, groups, count,
                            size, size, c10::cuda::getCurrentCUDAStream());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
};

at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef pool) {
    const Call call(x, weight, bias, pool);
    at::Tensor out = call.empty({call.batch});
    if (call.batch == 0) return out;
    if (call.is_streamed(false)) call.stream_windows(out, nullptr);
    else call.sum_sigmoids(&out, nullptr);
    return out;
}

std::tuple<at::Tensor, at::Tensor> forward_with_parameter_grads(const at::Tensor& x, const at::Tensor& weight,
                                                                const at::Tensor& bias, at::IntArrayRef pool) {
    const Call call(x, weight, bias, pool);
    at::Tensor out = call.empty({call.batch}), grads = call.empty({call.batch, PARAMETERS});
    if (call.batch == 0) return {out, grads};
    if (call.is_streamed(true)) {
        call.stream_windows(out, &grads);
        return {out, grads};
    }
    const at::Tensor delta = call.empty_delta();
    call.sum_sigmoids(&out, &delta);

    check_blocks(parameter_blocks(call.batch, call.height, call.width));
    const int64_t splits = parameter_splits(call.batch, call.height, call.width);
    at::Tensor terms = splits > 1 ? call.empty({call.batch, splits, PARAMETERS}) : grads;
    launch_parameter_terms(call.x.const_data_ptr<float>(), delta.const_data_ptr<float>(), terms.mutable_data_ptr<float>(),
                           call.batch, call.height, call.width, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (splits > 1) Call::sum_groups(terms, grads, call.batch, splits, PARAMETERS);
    return {out, grads};
}

at::Tensor input_grad(const at::Tensor& grad_out_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      at::IntArrayRef pool) {
    const Call call(x, weight, bias, pool);
    check("grad_out", grad_out_in, {call.batch});
    check_device(x, "grad_out", grad_out_in);
    const at::Tensor grad_out = grad_out_in.contiguous();
    at::Tensor grad_x = call.empty(x.sizes());
    if (call.batch == 0) return grad_x;
    const at::Tensor delta = call.empty_delta();
    call.sum_sigmoids(nullptr, &delta);

    check_blocks(input_grad_blocks(call.batch, call.height, call.width));
    launch_input_grad(grad_out.const_data_ptr<float>(), delta.const_data_ptr<float>(), call.weight.const_data_ptr<float>(),
                      grad_x.mutable_data_ptr<float>(), call.batch, call.height, call.width,
                      c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_x;
}

// Gradients of weight and bias, which give their shapes: the samples' gradients, weighted by grad_out. `x` is for autograd,
// which has to know that they depend on it, to refuse second derivatives.
std::tuple<at::Tensor, at::Tensor> weighted_sum(const at::Tensor& grad_out_in, const at::Tensor& grads_in,
                                                const at::Tensor& weight, const at::Tensor& bias,
                                                const std::optional<at::Tensor>& x) {
    check("grads", grads_in, {-1, PARAMETERS});
    check("grad_out", grad_out_in, {grads_in.size(0)});
    check_device(grads_in, "grad_out", grad_out_in);
    check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
    check("bias", bias, {OUT_CHANNELS});
    const c10::cuda::CUDAGuard guard(grads_in.device());
    const at::Tensor grad_out = grad_out_in.contiguous(), grads = grads_in.contiguous();
    at::Tensor grad_weight = at::empty(weight.sizes(), grads.options()), grad_bias = at::empty(bias.sizes(), grads.options());
    check_blocks(weighted_sum_blocks(1, PARAMETERS));
    launch_weighted_sum(grad_out.const_data_ptr<float>(), grads.const_data_ptr<float>(), grad_weight.mutable_data_ptr<float>(),
                        grad_bias.mutable_data_ptr<float>(), 1, grads.size(0), PARAMETERS, WEIGHTS,
                        c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {grad_weight, grad_bias};
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("forward_with_parameter_grads(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> (Tensor, Tensor)",
          {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad_out, Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("weighted_sum(Tensor grad_out, Tensor grads, Tensor weight, Tensor bias, Tensor? x) -> (Tensor, Tensor)",
          {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("forward", &forward);
    m.impl("forward_with_parameter_grads", &forward_with_parameter_grads);
    m.impl("input_grad", &input_grad);
    m.impl("weighted_sum", &weighted_sum);
}
"""


def register(namespace):
    """Shapes for torch.compile, and autograd."""
    operators = getattr(torch.ops, namespace)

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, bias, pool):
        return x.new_empty(x.shape[0])

    @torch.library.register_fake(f"{namespace}::forward_with_parameter_grads")
    def forward_with_parameter_grads(x, weight, bias, pool):
        return x.new_empty(x.shape[0]), x.new_empty(x.shape[0], weight.numel() + bias.numel())

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad_out, x, weight, bias, pool):
        return x.new_empty(x.shape)

    @torch.library.register_fake(f"{namespace}::weighted_sum")
    def weighted_sum(grad_out, grads, weight, bias, x):
        return weight.new_empty(weight.shape), bias.new_empty(bias.shape)

    def save(ctx, inputs, output):
        x, weight, bias, ctx.pool = inputs
        ctx.save_for_backward(x, weight, bias)

    def backward(ctx, grad_out):
        x, weight, bias = ctx.saved_tensors
        if any(ctx.needs_input_grad[1:3]):
            raise RuntimeError(f"{namespace}: forward has no gradients of parameters; call forward_with_parameter_grads")
        return operators.input_grad(grad_out, x, weight, bias, ctx.pool), None, None, None

    def save_parameter_grads(ctx, inputs, output):
        x, weight, bias, ctx.pool = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None, weight, bias, output[1])
        ctx.mark_non_differentiable(output[1])

    def backward_with_parameter_grads(ctx, grad_out, _):
        x, weight, bias, grads = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = operators.input_grad(grad_out, x, weight, bias, ctx.pool) if needs_x else None
        grad_weight, grad_bias = operators.weighted_sum(grad_out, grads, weight, bias, x)
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    torch.library.register_autograd(f"{namespace}::forward", backward, setup_context=save)
    torch.library.register_autograd(
        f"{namespace}::forward_with_parameter_grads", backward_with_parameter_grads, setup_context=save_parameter_grads
    )
    for name in ("input_grad", "weighted_sum"):
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
        weight, bias, pool = self.conv.weight, self.conv.bias, self.avg_pool.kernel_size
        if torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad):
            return operators.forward_with_parameter_grads(x, weight, bias, pool)[0]
        return operators.forward(x, weight, bias, pool)


def main():
    if not torch.cuda.is_available():
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew(8, 64, 3, 4).cuda()
    x = torch.randn(128, 8, 384, 384, device="cuda")

    def plain(x):
        return torch.sigmoid(model.avg_pool(model.conv(x))).sum(dim=(1, 2, 3))

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
        error = ((model(x) - plain(x)).abs().max() / plain(x).std()).item()
        print(f"{NAME}: differs from PyTorch by {error:.1e} of the outputs' spread;", end=" ")
        print(f"{milliseconds(model):.3f} ms, PyTorch {milliseconds(plain):.3f} ms")


if __name__ == "__main__":
    main()
