"""conv_pool_sigmoid_sum, v3: pooling moved in front of the weights, a sixteenth of the arithmetic.

Like v2, but the input is pooled once for each element of the convolution's kernel, and the product is taken with those box
sums. Training comes with the forward pass: it leaves each sample's gradients of the parameters, which backward weighs and adds.

Why it is faster
    v2 is compute bound: 16 convolution values for every pooled one, and then their average. Average and convolution are both
    linear, so they commute: a box sum of the input replaces 16 pixels, and 170 GFLOP become 10.6. Box sums are cheap because
    they are separable and shared: a sum down a column serves all columns of the kernel. What it costs: box sums pass through
    shared memory between two barriers, and each tile of windows reads its weights again. Predicted for an H200: 0.45 ms, from
    7,500 instructions of a thread in a tile, 4,600 of them multiply-adds. Measured: 0.65 (v2 6.3, eager 11.2).

Mathematics
    pooled[b,o,i,j]      = bias[o] + sum over c,r,s of w[o,c,r,s]/p^2 * box[b,c,r,s,i,j];   out[b] = sum of sigmoid(pooled)
    box[b,c,r,s,i,j]     = sum over u,v < p of x[b,c, p*i+u+r, p*j+v+s], summed down columns first, then along rows
    Only the order of additions changes; strict fp32 throughout. The sigmoid is 1 / (1 + 2^v) with the factor -log2(e) / p^2 in
    the weights, by the hardware's approximations (relative errors of 2^-22.5 and 2^-23): it errs by less than 2e-7.
    A sample's output is one number, so the gradients of that number do not need what comes from above:
    d out[b] / d w[o,c,r,s] = sum over i,j of delta * box / p^2,  delta[b,o,i,j] = s * (1 - s),  s = sigmoid(pooled)
    grad_w               = sum over b of grad_out[b] * d out[b] / d w;   the bias is the weight of a term whose box is p^2
    The input's gradient is the same product and the same sums transposed, from delta computed once more:
    grad_box[b,c,r,s,i,j] = grad_out[b]/p^2 * sum over o of w[o,c,r,s] * delta[b,o,i,j]
    grad_x[b,c,h,w]      = sum over r,s of grad_box[b,c,r,s, (h-r)/p, (w-s)/p], where such a window exists

Launches
    kernel           grid                                          block  shared  work of a thread
    sum_sigmoids     (samples x tiles x groups of 64 channels)     128    29 KB   8 windows of a 32 x 4 tile, 8 channels
    parameter_terms  (samples x splits x groups x term slices)     128    43 KB   every fourth 4 windows, 8 channels, 5 terms
    weighted_sum     (groups x sums / 32)                          256    1 KB    every 8th term of a sum
    input_grad       (samples x slices of channels x tiles)        128    31 KB   8 windows x 5 terms, then 52 pixels
    Shared memory at the original's size. Forward: sum_sigmoids, then weighted_sum for the tiles' sums. With gradients of the
    parameters delta is written, and parameter_terms reads it. Backward: weighted_sum; for the input sum_sigmoids and
    input_grad.

Floor
    Forward: 604 MB in, 0.14 ms on an H200; 10.6 GFLOP are 0.21 ms in plain fp32: compute bound. Gradients of the parameters:
    10.7 GFLOP more, and delta, 296 MB written and read. The input's: 21 GFLOP, 604 MB in and out, and delta again.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel and pool size that the
    original takes, in slices that fit into shared memory; windows more than 24 pixels wide are summed without column sums.
    Anything else raises before a launch. Trains, and computes only the gradients that are asked for; second derivatives raise.
    Deterministic.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv_pool_sigmoid_sum_v3_box_sums"

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
// by remainder, first all columns that are 0 modulo POOL_W, then all that are 1, and so on: adjacent threads read them
// POOL_W apart, conflict-free. RUN, the columns of a remainder, is padded so that a warp's stores are conflict-free, too.
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

__device__ __forceinline__ float ex2_approx(float v) {  // relative error 2^-22.5
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

__device__ __forceinline__ float rcp_approx(float v) {  // within 1 ulp
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
    return reciprocal;
}

// Weights and bias carry the factor -log2(e), so that the product's result v is an exponent: sigmoid = 1 / (1 + 2^v).
constexpr float MINUS_LOG2_E = -1.44269504f, WINDOW_SCALE = 1.0f / (POOL_H * POOL_W);
__device__ __forceinline__ float sigmoid_of_exponent(float v) { return rcp_approx(1.0f + ex2_approx(v)); }

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

// boxes[term][window] = the sum of x over the window, shifted by the term's position in the kernel; 0 where no window exists.
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
// The rows of a matrix with so many columns are 4 longer than a multiple of 8, which avoids bank conflicts.
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
constexpr int PADDED_TERMS = THREAD_TERMS * TERM_LANES, PADDED_TILE = TILE + 4;  // + 4: no bank conflicts

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
"""

BINDING = r"""
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

constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * KERNEL_H * KERNEL_W, PARAMETERS = WEIGHTS + OUT_CHANNELS;

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
    if (call.batch > 0) call.sum_sigmoids(&out, nullptr);
    return out;
}

std::tuple<at::Tensor, at::Tensor> forward_with_parameter_grads(const at::Tensor& x, const at::Tensor& weight,
                                                                const at::Tensor& bias, at::IntArrayRef pool) {
    const Call call(x, weight, bias, pool);
    at::Tensor out = call.empty({call.batch}), grads = call.empty({call.batch, PARAMETERS});
    if (call.batch == 0) return {out, grads};
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
        weight, bias, pool = self.conv.weight, self.conv.bias, self.avg_pool.kernel_size
        if torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad):
            return operators.forward_with_parameter_grads(x, weight, bias, pool)[0]
        return operators.forward(x, weight, bias, pool)


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
