"""alexnet_conv1, v2: the textbook way, im2col and a matrix product.

Like v1, but the windows are first written out as the columns of a matrix. Then the convolution is one matrix product, and a
matrix product is what everybody knows how to compute: tiles in shared memory, a small tile of sums in each thread's registers.

Why it is faster
    v1 loads two values for each multiply-add. Here a thread has 6 channels x 8 positions of sums in registers, so 14 values
    from shared memory feed 48 multiply-adds, and each value comes from memory once a block. Reading a window costs nothing in
    the product, because padding, strides and edges were dealt with when the matrix was written. That is the price as well: each
    pixel is written for every window that holds it, 7.3 times at stride 4, and the matrix, 1.12 GB at the original's size, is
    written and read once, in chunks that fit into 256 MB of scratch memory. v3 writes none of it. Predicted for an H200: 0.35
    ms for im2col and 1.7 for the product, of whose instructions three in four are multiply-adds; measured: 0.39 and 2.29,
    because two blocks an SM do not hide loads and barriers from each other; together 2.77 (v1 18.2, eager 2.08, strict 2.71).

Mathematics
    A term is one c, u, v: an input channel, a row and a column of the kernel. A position is one b, i, j.
    columns[term][position] = x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v], zero outside the image
    out[o][position]        = bias[o] + sum over terms of weight[o][term] * columns[term][position]
    The gradients are products with the same matrix, and its adjoint:
    grad_weight[o][term]    = sum over positions of grad[o][position] * columns[term][position]
    grad_bias[o]            = the same for one term more, whose row of the matrix is all ones
    grad_columns[term][position] = sum over o of weight[o][term] * grad[o][position]
    grad_x[b,c,h,w]         = sum of grad_columns over all terms and positions that hold this pixel (col2im): each pixel
                              gathers its own, so that no two threads add to one address
    Strict fp32; an output is one chain of multiply-adds in the order of the terms, the bias last: 363 err as PyTorch's do.

Launches (for each chunk)
    kernel              grid                          block  registers  shared   work of a thread
    im2col              (positions / 256 x c x u)     256    32         0        one row of a window: kernel_w values
    multiply, forward   (tiles of 96 x 128)           256    128        14.5 KB  6 channels x 8 positions
    multiply, weights   (tiles of 96 x 128 x splits)  256    127        14.5 KB  6 channels x 8 terms
    add_splits          (parameters / 256)            256    31         0        one weight or bias; once, after all chunks
    multiply, columns   (tiles of 96 x 128)           256    128        14.5 KB  6 terms x 8 positions
    col2im              (pixels / 256)                256    48         0        one pixel: up to 9 terms
    Registers by nvcc 13.0 for sm_90a. A chunk is 184,832 positions at the original's size, so there are 5.

Floor
    Forward: 154 MB in, 297 MB out, and 2.25 GB for the matrix: 0.63 ms at 4.26 TB/s. Then 54 GFLOP in plain fp32: 0.91 ms.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size, bias or none; an image's channel, with its padding, below 2^31 pixels. Dilation, groups and other
    padding modes raise, and so does anything else. Trains, and computes only the gradients that are asked for (weight and bias
    together); second derivatives raise. Deterministic: chunks and splits depend on the sizes alone.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v2_im2col"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W: divisions by them are multiplications.
#include <cuda_runtime.h>
#include <cstdint>

constexpr int THREADS = 256;
constexpr int64_t SCRATCH_BYTES = 256 << 20;  // for the matrix of a chunk

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// A term is one c, u, v: input channel, row and column of the kernel.
constexpr int TERMS = IN_CHANNELS * KERNEL_H * KERNEL_W;

// Consecutive positions (b, i, j), which may begin and end in the middle of a sample, and the sizes of the images they are in.
struct Chunk {
    int count, height, width, pad_h, pad_w, out_h, out_w;
    int64_t first_sample;
    unsigned first_in_sample;  // of the first sample's positions

    Chunk(int64_t first, int count, int height, int width, int pad_h, int pad_w)
        : count(count), height(height), width(width), pad_h(pad_h), pad_w(pad_w),
          out_h((height + 2 * pad_h - KERNEL_H) / STRIDE_H + 1), out_w((width + 2 * pad_w - KERNEL_W) / STRIDE_W + 1),
          first_sample(first / plane()), first_in_sample(first % plane()) {}
    __host__ __device__ unsigned plane() const { return (unsigned)out_h * out_w; }
};

// The k-th position of a chunk.
struct Position {
    int64_t sample;
    unsigned in_sample;
    __device__ Position(const Chunk& chunk, int k) {
        const unsigned from_first = chunk.first_in_sample + k;
        sample = chunk.first_sample + from_first / chunk.plane(), in_sample = from_first % chunk.plane();
    }
    // Its index in a tensor (batch, OUT_CHANNELS, out_h, out_w).
    __device__ int64_t at(const Chunk& chunk, int o) const { return (sample * OUT_CHANNELS + o) * chunk.plane() + in_sample; }
};

// columns (TERMS, chunk.count). Adjacent threads have adjacent positions, so their stores are coalesced.
__global__ void __launch_bounds__(THREADS)
    im2col(Chunk chunk, const float* __restrict__ x, float* __restrict__ columns) {
    const int blocks = ceil_div(chunk.count, THREADS), k = blockIdx.x % blocks * THREADS + threadIdx.x;
    const int u = blockIdx.x / blocks % KERNEL_H, c = blockIdx.x / blocks / KERNEL_H;
    if (k >= chunk.count) return;
    const Position position(chunk, k);
    const int h = (int)(position.in_sample / chunk.out_w) * STRIDE_H - chunk.pad_h + u;
    const int left = (int)(position.in_sample % chunk.out_w) * STRIDE_W - chunk.pad_w;
    const float* row = x + ((position.sample * IN_CHANNELS + c) * chunk.height + h) * chunk.width;
    float* column = columns + (int64_t)(c * KERNEL_H + u) * KERNEL_W * chunk.count + k;
    const bool row_exists = h >= 0 && h < chunk.height;
#pragma unroll
    for (int v = 0; v < KERNEL_W; ++v) {
        const int w = left + v;
        column[(int64_t)v * chunk.count] = row_exists && w >= 0 && w < chunk.width ? row[w] : 0.0f;
    }
}

// The adjoint of im2col: what the chunk's columns give to the pixels of its samples. A sample that began in the chunk before
// has been given something already.
__global__ void __launch_bounds__(THREADS)
    col2im(Chunk chunk, const float* __restrict__ columns, float* __restrict__ grad_x, int64_t pixels) {
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (index >= pixels) return;
    const int w = index % chunk.width, h = index / chunk.width % chunk.height;
    const int c = index / chunk.width / chunk.height % IN_CHANNELS;
    const int64_t sample = index / chunk.width / chunk.height / IN_CHANNELS;  // of the chunk's
    const int64_t first_k = sample * chunk.plane() - chunk.first_in_sample;   // the sample's first position in the chunk
    float sum = 0.0f;
    // Of the kernel's rows, those at which a position reaches this pixel; likewise its columns.
    for (int u = (h + chunk.pad_h) % STRIDE_H; u < KERNEL_H; u += STRIDE_H)
        for (int v = (w + chunk.pad_w) % STRIDE_W; v < KERNEL_W; v += STRIDE_W) {
            const int down = h + chunk.pad_h - u, right = w + chunk.pad_w - v, i = down / STRIDE_H, j = right / STRIDE_W;
            const int64_t k = first_k + (int64_t)i * chunk.out_w + j;
            const bool exists = down >= 0 && i < chunk.out_h && right >= 0 && j < chunk.out_w && k >= 0 && k < chunk.count;
            if (exists) sum += columns[((int64_t)(c * KERNEL_H + u) * KERNEL_W + v) * chunk.count + k];
        }
    float* pixel = grad_x + chunk.first_sample * IN_CHANNELS * chunk.height * chunk.width + index;
    *pixel = first_k >= 0 ? sum : *pixel + sum;
}

// The three products, sum over k < depth of left(m, k) * right(k, n) for m < M and n < width. LEFT_ALONG_K and RIGHT_ALONG_K
// say along which index a matrix is contiguous: threads load along it, coalesced. A result goes to column(n) + m * pitch.

struct ForwardProduct {
    static constexpr int M = OUT_CHANNELS;
    static constexpr bool LEFT_ALONG_K = true, RIGHT_ALONG_K = false;
    Chunk chunk;
    const float *weight, *columns, *bias;
    float* out;

    __device__ int depth() const { return TERMS; }
    __host__ __device__ int width() const { return chunk.count; }
    __device__ float left(int m, int k) const { return weight[(int64_t)m * TERMS + k]; }
    __device__ float right(int k, int n) const { return columns[(int64_t)k * chunk.count + n]; }
    __device__ float* column(int split, int n) const { return out + Position(chunk, n).at(chunk, 0); }
    __device__ int64_t pitch() const { return chunk.plane(); }
    __device__ void store(float* to, int m, float sum) const { *to = bias ? sum + bias[m] : sum; }
};

// The last of its columns is the bias's. sums (splits, OUT_CHANNELS, TERMS + 1)
struct WeightProduct {
    static constexpr int M = OUT_CHANNELS;
    static constexpr bool LEFT_ALONG_K = true, RIGHT_ALONG_K = true;
    Chunk chunk;
    const float *grad, *columns;
    float* sums;
    bool is_first_chunk;

    __device__ int depth() const { return chunk.count; }
    __host__ __device__ int width() const { return TERMS + 1; }
    __device__ float left(int m, int k) const { return grad[Position(chunk, k).at(chunk, m)]; }
    __device__ float right(int k, int n) const { return n < TERMS ? columns[(int64_t)n * chunk.count + k] : 1.0f; }
    __device__ float* column(int split, int n) const { return sums + (int64_t)split * OUT_CHANNELS * (TERMS + 1) + n; }
    __device__ int64_t pitch() const { return TERMS + 1; }
    __device__ void store(float* to, int m, float sum) const { *to = is_first_chunk ? sum : *to + sum; }
};

struct ColumnProduct {
    static constexpr int M = TERMS;
    static constexpr bool LEFT_ALONG_K = false, RIGHT_ALONG_K = false;
    Chunk chunk;
    const float *weight, *grad;
    float* columns;

    __device__ int depth() const { return OUT_CHANNELS; }
    __host__ __device__ int width() const { return chunk.count; }
    __device__ float left(int m, int k) const { return weight[(int64_t)k * TERMS + m]; }
    __device__ float right(int k, int n) const { return grad[Position(chunk, n).at(chunk, k)]; }
    __device__ float* column(int split, int n) const { return columns + n; }
    __device__ int64_t pitch() const { return chunk.count; }
    __device__ void store(float* to, int m, float sum) const { *to = sum; }
};

// A block computes a tile of TILE_M x TILE_N sums, its 16 x 16 threads ROWS x COLUMNS each, from DEPTH values of k at a time.
// Tiles divide M evenly, as far as 16 threads can.
constexpr int LANES = 16, DEPTH = 16, COLUMNS = 8, TILE_N = LANES * COLUMNS;
__host__ __device__ constexpr int rows_of_thread(int m) { return ceil_div(ceil_div(m, ceil_div(m, 6 * LANES)), LANES); }
__host__ __device__ constexpr int tile_rows(int m) { return rows_of_thread(m) * LANES; }
static_assert(LANES * LANES == THREADS);

// tile[k][m] = value(m, k). Rows of the tile are 4 longer than they need be, which avoids bank conflicts.
template <bool ALONG_K, int SIZE, class Value>
__device__ __forceinline__ void load_tile(float (&tile)[DEPTH][SIZE + 4], Value value) {
    static_assert(DEPTH * SIZE % THREADS == 0);
#pragma unroll
    for (int load = 0; load < DEPTH * SIZE / THREADS; ++load) {
        const int index = load * THREADS + threadIdx.x;
        const int k = ALONG_K ? index % DEPTH : index / SIZE, m = ALONG_K ? index / DEPTH : index % SIZE;
        tile[k][m] = value(m, k);
    }
}

// A thread's columns lie in two runs of 4: it reads 16 bytes at a time, and its neighbours the 16 beside them: conflict-free.
__device__ __forceinline__ int column_of_thread(int n) { return n / 4 * 4 * LANES + threadIdx.x % LANES * 4 + n % 4; }

// Split number s sums over k from s * split_depth on.
template <class Product>
__global__ void __launch_bounds__(THREADS, 2) multiply(const Product product, int split_depth) {
    constexpr int ROWS = rows_of_thread(Product::M), TILE_M = tile_rows(Product::M), TILES_M = ceil_div(Product::M, TILE_M);
    __shared__ alignas(16) float left[DEPTH][TILE_M + 4];
    __shared__ alignas(16) float right[DEPTH][TILE_N + 4];
    const int tiles_n = ceil_div(product.width(), TILE_N);
    const int m0 = blockIdx.x % TILES_M * TILE_M, n0 = blockIdx.x / TILES_M % tiles_n * TILE_N;
    const int split = blockIdx.x / TILES_M / tiles_n, first_k = split * split_depth;
    const int last_k = product.depth() - first_k < split_depth ? product.depth() : first_k + split_depth;  // exclusive
    const int first_row = threadIdx.x / LANES * ROWS;

    float sums[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int k0 = first_k; k0 < last_k; k0 += DEPTH) {
        load_tile<Product::LEFT_ALONG_K, TILE_M>(left, [&](int m, int k) {
            return m0 + m < Product::M && k0 + k < last_k ? product.left(m0 + m, k0 + k) : 0.0f;
        });
        load_tile<Product::RIGHT_ALONG_K, TILE_N>(right, [&](int n, int k) {
            return n0 + n < product.width() && k0 + k < last_k ? product.right(k0 + k, n0 + n) : 0.0f;
        });
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float a[ROWS], b[COLUMNS];
#pragma unroll
            for (int m = 0; m < ROWS; ++m) a[m] = left[k][first_row + m];
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) b[n] = right[k][column_of_thread(n)];
#pragma unroll
            for (int m = 0; m < ROWS; ++m)
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) sums[m][n] += a[m] * b[n];
        }
        __syncthreads();  // what was read may be overwritten
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const int column = n0 + column_of_thread(n);
        if (column >= product.width()) continue;
        float* to = product.column(split, column);
#pragma unroll
        for (int m = 0; m < ROWS; ++m) {
            const int row = m0 + first_row + m;
            if (row < Product::M) product.store(to + row * product.pitch(), row, sums[m][n]);
        }
    }
}

// The sums of all splits, in their order: grad_weight (OUT_CHANNELS, TERMS), grad_bias (OUT_CHANNELS).
__global__ void __launch_bounds__(THREADS)
    add_splits(const float* __restrict__ sums, float* __restrict__ grad_weight, float* __restrict__ grad_bias, int splits) {
    constexpr int64_t SUMS = (int64_t)OUT_CHANNELS * (TERMS + 1);
    const int64_t index = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (index >= SUMS) return;
    const int64_t o = index / (TERMS + 1), term = index % (TERMS + 1);
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += sums[split * SUMS + index];
    if (term < TERMS) grad_weight[o * TERMS + term] = sum;
    else grad_bias[o] = sum;
}

// ---- Sizes of what the caller allocates, and launches

// As many positions as scratch memory has room for, in whole tiles; no more than there are.
static int chunk_positions(int64_t positions) {
    const int64_t room = SCRATCH_BYTES / sizeof(float) / TERMS / TILE_N * TILE_N, fits = room > 0 ? room : TILE_N;
    return static_cast<int>(fits < positions ? fits : positions);
}
int64_t column_floats(int64_t positions) { return (int64_t)chunk_positions(positions) * TERMS; }

// Enough for 264 blocks or so, two on each SM of a large GPU. It depends on the layer alone, and with it the order
// of additions.
static int weight_splits() {
    return ceil_div(264, ceil_div(OUT_CHANNELS, tile_rows(OUT_CHANNELS)) * ceil_div(TERMS + 1, TILE_N));
}
int64_t weight_sum_floats() { return (int64_t)weight_splits() * OUT_CHANNELS * (TERMS + 1); }

// Calls function(chunk) for each chunk of the batch.
template <class Function>
static void for_each_chunk(int64_t batch, int height, int width, int pad_h, int pad_w, Function function) {
    const int64_t positions = batch * Chunk(0, 0, height, width, pad_h, pad_w).plane(), step = chunk_positions(positions);
    for (int64_t first = 0; first < positions; first += step) {
        const int64_t left = positions - first;
        function(Chunk(first, static_cast<int>(left < step ? left : step), height, width, pad_h, pad_w));
    }
}

static void launch_im2col(const Chunk& chunk, const float* x, float* columns, cudaStream_t stream) {
    const int64_t blocks = (int64_t)ceil_div(chunk.count, THREADS) * IN_CHANNELS * KERNEL_H;
    im2col<<<blocks, THREADS, 0, stream>>>(chunk, x, columns);
}

template <class Product>
static void launch_multiply(const Product& product, int splits, int split_depth, cudaStream_t stream) {
    const int64_t tiles = (int64_t)ceil_div(Product::M, tile_rows(Product::M)) * ceil_div(product.width(), TILE_N);
    multiply<<<tiles * splits, THREADS, 0, stream>>>(product, split_depth);
}

// `columns` is scratch memory. `bias` may be null.
void launch_forward(const float* x, const float* weight, const float* bias, float* columns, float* out, int64_t batch,
                    int height, int width, int pad_h, int pad_w, cudaStream_t stream) {
    for_each_chunk(batch, height, width, pad_h, pad_w, [&](const Chunk& chunk) {
        launch_im2col(chunk, x, columns, stream);
        launch_multiply(ForwardProduct{chunk, weight, columns, bias, out}, 1, TERMS, stream);
    });
}

// `columns` and `sums` are scratch memory.
void launch_parameter_grads(const float* grad, const float* x, float* columns, float* sums, float* grad_weight,
                            float* grad_bias, int64_t batch, int height, int width, int pad_h, int pad_w,
                            cudaStream_t stream) {
    const int splits = weight_splits();
    for_each_chunk(batch, height, width, pad_h, pad_w, [&](const Chunk& chunk) {
        const bool is_first = chunk.first_sample == 0 && chunk.first_in_sample == 0;
        const int split_depth = round_up(ceil_div(chunk.count, splits), DEPTH);
        launch_im2col(chunk, x, columns, stream);
        launch_multiply(WeightProduct{chunk, grad, columns, sums, is_first}, splits, split_depth, stream);
    });
    const int64_t count = (int64_t)OUT_CHANNELS * (TERMS + 1);
    add_splits<<<(count + THREADS - 1) / THREADS, THREADS, 0, stream>>>(sums, grad_weight, grad_bias, splits);
}

// `columns` is scratch memory.
void launch_input_grad(const float* grad, const float* weight, float* columns, float* grad_x, int64_t batch, int height,
                       int width, int pad_h, int pad_w, cudaStream_t stream) {
    for_each_chunk(batch, height, width, pad_h, pad_w, [&](const Chunk& chunk) {
        launch_multiply(ColumnProduct{chunk, weight, grad, columns}, 1, OUT_CHANNELS, stream);
        const int64_t samples = ((int64_t)chunk.first_in_sample + chunk.count - 1) / chunk.plane() + 1;
        const int64_t pixels = samples * IN_CHANNELS * chunk.height * chunk.width;
        col2im<<<(pixels + THREADS - 1) / THREADS, THREADS, 0, stream>>>(chunk, columns, grad_x, pixels);
    });
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

int64_t column_floats(int64_t positions);
int64_t weight_sum_floats();
void launch_forward(const float*, const float*, const float*, float*, float*, int64_t, int, int, int, int, cudaStream_t);
void launch_parameter_grads(const float*, const float*, float*, float*, float*, float*, int64_t, int, int, int, int,
                            cudaStream_t);
void launch_input_grad(const float*, const float*, float*, float*, int64_t, int, int, int, int, cudaStream_t);

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
    at::Tensor columns = call.empty({column_floats(call.batch * call.out_h * call.out_w)});
    launch_forward(x.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                   bias_in ? bias.const_data_ptr<float>() : nullptr, columns.mutable_data_ptr<float>(),
                   out.mutable_data_ptr<float>(), call.batch, call.height, call.width, call.pad_h, call.pad_w, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

// The gradients of weight and bias. One product computes both.
std::tuple<at::Tensor, at::Tensor> parameter_grads(const at::Tensor& grad_in, const at::Tensor& x_in, const at::Tensor& weight,
                                                   at::IntArrayRef stride, at::IntArrayRef padding) {
    const Call call(x_in, weight, stride, padding);
    const at::Tensor grad = call.checked_grad(x_in, grad_in), x = x_in.contiguous();
    if (call.batch == 0) return {call.zeros(weight.sizes()), call.zeros({OUT_CHANNELS})};
    at::Tensor grad_weight = call.empty(weight.sizes()), grad_bias = call.empty({OUT_CHANNELS});
    at::Tensor columns = call.empty({column_floats(call.batch * call.out_h * call.out_w)});
    at::Tensor sums = call.empty({weight_sum_floats()});
    launch_parameter_grads(grad.const_data_ptr<float>(), x.const_data_ptr<float>(), columns.mutable_data_ptr<float>(),
                           sums.mutable_data_ptr<float>(), grad_weight.mutable_data_ptr<float>(),
                           grad_bias.mutable_data_ptr<float>(), call.batch, call.height, call.width, call.pad_h, call.pad_w,
                           call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {grad_weight, grad_bias};
}

at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight_in, at::IntArrayRef stride,
                      at::IntArrayRef padding) {
    const Call call(x, weight_in, stride, padding);
    const at::Tensor grad = call.checked_grad(x, grad_in), weight = weight_in.contiguous();
    at::Tensor grad_x = call.empty(x.sizes());
    if (grad_x.numel() == 0) return grad_x;
    at::Tensor columns = call.empty({column_floats(call.batch * call.out_h * call.out_w)});
    launch_input_grad(grad.const_data_ptr<float>(), weight.const_data_ptr<float>(), columns.mutable_data_ptr<float>(),
                      grad_x.mutable_data_ptr<float>(), call.batch, call.height, call.width, call.pad_h, call.pad_w,
                      call.stream);
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
