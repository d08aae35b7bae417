"""conv3d_div_max_gap_bias_sum, v3: the convolution, too; one kernel from the input to one number a sample.

Like v2, but the convolution moves into the kernel. A thread computes the convolution at all positions of one pooling window,
keeps their maximum in registers, and only sums leave the chip: the convolution's output is never written.

Why it is faster
    v2's tail waits for 441 MB that the convolution has just written, and a training step moves them several times. Here only
    the input is read, and each value that comes from memory is used for 27 taps and 8 output channels at once. Arithmetic in
    plain fp32 is the bound now: a thread has 8 positions x 8 channels of sums in registers, so that 16 loads of the input and 6
    of weights feed 192 multiply-adds. Training keeps the argmax index of each window and channel, one byte (14 MB instead of
    the convolution's output), and the gradients touch nothing else. What it costs: strict fp32 where PyTorch's convolution uses
    tensor cores (v4 does), and a build for each kernel and pool size. Predicted 1.25 ms on an H200, measured 1.55 (eager 2.34).

Mathematics
    out[b] = sum over o of ((1/N * sum over k of max over window k of y[b,o,.] + conv_bias[o]) / d + bias[o]), y the convolution
    without its bias, which moves behind the maximum, as the division does. For d < 0 weights and conv_bias enter negated, and
    the division is by |d|: exact, since floating point is symmetric in sign. d = 0, infinity and what is no normal float32 are
    refused. A position's value is one chain of fused multiply-adds over channels and taps, so values of equal inputs are equal
    bits. Two values that only become equal by bias or division: the original sends the gradient to the first, this variant to
    the larger. The maximum is PyTorch's: a window is scanned depth, height, width; a value replaces the maximum if it is larger
    or NaN.
    grad_w[o,c,t]  = 1/(N*d) * sum over b,k of grad[b,o] * x[b,c, argmax(b,o,k) + t]         grad: of the averages
    grad_x[b,c,p]  = 1/(N*d) * sum over o,t of grad[b,o] * w[o,c,t] where p - t is the argmax of its window
    A NaN in x reaches those gradients of weights that use it; PyTorch's, which multiplies by zeros, more of them. For a
    `sum_dim` other than 1 and -4, or a bias that has not one value or one a channel, the kernel writes averages, and PyTorch
    does the rest.

Launches
    kernel          grid                                              block  shared  work of a thread
    conv_max_mean   (samples x windows / 128 x groups of 8 channels)  128    7 KB    a window in 8 channels
    parameter_grad  (splits x out x in channels x slices of taps)     128    0.4 KB  every 128th window, all taps of a slice
    add_splits      (weights / 128)                                   128    0       one weight
    input_grad      (samples x pixels / 128 x groups of 8 channels)   128    4 KB    a pixel in 8 channels
    Blocks of one sample meet in an integer counter, which PyTorch fills with zeros before each launch: the last block to arrive
    adds all sums in a fixed order, so the bits never change.

Floor
    Forward: 47.6 GFLOP in plain fp32, 0.93 ms at the 51 TFLOP/s that an H200 reaches; 269 MB in are 0.06 ms. Compute bound.
    Each gradient: 6 GFLOP, because seven of eight positions have none, and 14 MB of argmax indices.

Takes
    float32 CUDA tensors (batch, in_channels, depth, height, width), batch 0 included, a channel below 2^31 pixels; any
    channels, kernel, bias shape and sum_dim that the original takes; pool_size an int or three; a divisor as said above, an int
    or float. Any size fits, in slices; few huge windows are slow. Anything else raises before a launch. Trains, and computes
    only the gradients that are asked for; second derivatives raise. Deterministic.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv3d_div_max_gap_bias_sum_v3_single_kernel"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <type_traits>

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

// A window's argmax index: the position of its maximum in the order of the scan.
constexpr int64_t TAPS = (int64_t)KERNEL_D * KERNEL_H * KERNEL_W, POSITIONS = (int64_t)POOL_D * POOL_H * POOL_W;
using Argmax = std::conditional_t<POSITIONS <= 256, uint8_t, int32_t>;

// Output channels in groups of equal size, at most 8: as many accumulators as a thread has.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 8), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUT_PITCH = round_up(OUT_BLOCK, 4);  // of a tap's weights in shared memory, for 16-byte reads

// A thread works on a part of its window at a time: at most 8 positions that follow each other in the order of the scan.
constexpr int PART_W = largest_divisor(POOL_W, 8);
constexpr int PART_H = PART_W == POOL_W ? largest_divisor(POOL_H, 8 / PART_W) : 1;
constexpr int PART_D = PART_H == POOL_H && PART_W == POOL_W ? largest_divisor(POOL_D, 8 / (PART_W * PART_H)) : 1;
constexpr int PART = PART_D * PART_H * PART_W;

// What a block holds in shared memory at a time is a slice of the weights: of the input channels c and of the kernel's elements
// r, s, t. Slices divide evenly, so they need no bounds. At common sizes all weights of 8 output channels are one slice.
constexpr int WEIGHT_FLOATS = 2304;
constexpr int SLICE_T = largest_divisor(KERNEL_W, 16);  // a row of the input is in registers, too
constexpr int SLICE_S = largest_divisor(KERNEL_H, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T));
constexpr int SLICE_R = largest_divisor(KERNEL_D, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T * SLICE_S));
constexpr int SLICE_C = largest_divisor(IN_CHANNELS, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T * SLICE_S * SLICE_R));

__device__ float warp_sum(float value) {  // in lane 0
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

// The sums of values[k] over the block, for each k, returned in thread k. The order of additions is fixed, so the bits are
// too. The caller puts a barrier between two calls.
template <int N>
__device__ float block_sums(const float (&values)[N]) {
    static_assert(N <= THREADS, "a thread for each sum");
    __shared__ float warp_sums[N][WARPS];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const float sum = warp_sum(values[k]);
        if (threadIdx.x % WARP == 0) warp_sums[k][threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < N)
        for (int warp = 0; warp < WARPS; ++warp) sum += warp_sums[threadIdx.x][warp];
    return sum;
}

// x (batch, IN_CHANNELS, depth, height, width), and how many whole windows fit into it. A channel has less than 2^31 pixels.
struct Volume {
    const float* x;
    int64_t batch;
    int depth, height, width, slabs, rows, columns;
    Volume(const float* x, int64_t batch, int depth, int height, int width)
        : x(x), batch(batch), depth(depth), height(height), width(width), slabs((depth - KERNEL_D + 1) / POOL_D),
          rows((height - KERNEL_H + 1) / POOL_H), columns((width - KERNEL_W + 1) / POOL_W) {}
    __host__ __device__ unsigned windows() const { return slabs * rows * columns; }
    __host__ __device__ unsigned pixels() const { return depth * height * width; }
    __host__ __device__ unsigned chunks() const { return (windows() + THREADS - 1) / THREADS; }        // of windows
    __host__ __device__ unsigned pixel_chunks() const { return (pixels() + THREADS - 1) / THREADS; }
    // Offset of channel c's pixel at (d, h, w).
    __device__ int64_t at(int64_t sample, int c, int d, int h, int w) const {
        return (((sample * IN_CHANNELS + c) * depth + d) * height + h) * width + w;
    }
};

// The divisor, and what is done about its sign.
struct Division {
    float divisor;
    __device__ float sign() const { return copysignf(1.0f, divisor); }
    __device__ float average(float sum, unsigned windows, float conv_bias) const {
        return (sum / windows + sign() * conv_bias) / fabsf(divisor);
    }
};

struct Peak {
    float value;
    int position;
};

// The maximum, as PyTorch finds it: the last NaN, else the first of the largest.
__device__ __forceinline__ void scan(Peak& peak, float value, int position) {
    if (value > peak.value || value != value) peak = {value, position};
}

// A window's maximum in each of OUT_BLOCK channels. All threads of the block call it; those without a window get nothing.
__device__ __forceinline__ void convolve_window(const Volume& volume, const float* __restrict__ weight, float sign,
                                                int64_t sample, unsigned window, int first_out, Peak (&peaks)[OUT_BLOCK]) {
    __shared__ alignas(16) float weights[SLICE_C][SLICE_R][SLICE_S][SLICE_T][OUT_PITCH];
    const bool exists = window < volume.windows();
    const int column = window % volume.columns, row = window / volume.columns % volume.rows;
    const int slab = window / volume.columns / volume.rows;
#pragma unroll
    for (int o = 0; o < OUT_BLOCK; ++o) peaks[o] = {-INFINITY, 0};

    // Loops of one nest are not indented.
#pragma unroll 1
    for (int first = 0; first < POSITIONS; first += PART) {
        const int d = slab * POOL_D + first / (POOL_H * POOL_W), h = row * POOL_H + first / POOL_W % POOL_H;
        const int w = column * POOL_W + first % POOL_W;
        float sums[OUT_BLOCK][PART_D][PART_H][PART_W] = {};
#pragma unroll 1
        for (int c0 = 0; c0 < IN_CHANNELS; c0 += SLICE_C)
#pragma unroll 1
        for (int r0 = 0; r0 < KERNEL_D; r0 += SLICE_R)
#pragma unroll 1
        for (int s0 = 0; s0 < KERNEL_H; s0 += SLICE_S)
#pragma unroll 1
        for (int t0 = 0; t0 < KERNEL_W; t0 += SLICE_T) {
            __syncthreads();  // the slice before has been read
#pragma unroll 1
            for (int k = threadIdx.x; k < SLICE_C * SLICE_R * SLICE_S * SLICE_T * OUT_PITCH; k += THREADS) {
                const int o = k % OUT_PITCH, t = k / OUT_PITCH % SLICE_T, s = k / OUT_PITCH / SLICE_T % SLICE_S;
                const int r = k / OUT_PITCH / SLICE_T / SLICE_S % SLICE_R, c = k / OUT_PITCH / SLICE_T / SLICE_S / SLICE_R;
                const int64_t channel = (int64_t)(first_out + o) * IN_CHANNELS + c0 + c;
                const int64_t from = ((channel * KERNEL_D + r0 + r) * KERNEL_H + s0 + s) * KERNEL_W + t0 + t;
                weights[c][r][s][t][o] = o < OUT_BLOCK && first_out + o < OUT_CHANNELS ? sign * weight[from] : 0.0f;
            }
            __syncthreads();
            if (exists)
#pragma unroll 1
            for (int c = 0; c < SLICE_C; ++c)
#pragma unroll 1
            for (int r = 0; r < SLICE_R; ++r)
#pragma unroll 1
            for (int s = 0; s < SLICE_S; ++s) {
                const float* corner = volume.x + volume.at(sample, c0 + c, d + r0 + r, h + s0 + s, w + t0);
                float values[PART_D][PART_H][PART_W + SLICE_T - 1];
#pragma unroll
                for (int u = 0; u < PART_D; ++u)
#pragma unroll
                for (int v = 0; v < PART_H; ++v)
#pragma unroll
                for (int i = 0; i < PART_W + SLICE_T - 1; ++i)
                    values[u][v][i] = corner[((int64_t)u * volume.height + v) * volume.width + i];
#pragma unroll
                for (int t = 0; t < SLICE_T; ++t)
#pragma unroll
                for (int o = 0; o < OUT_BLOCK; ++o)
#pragma unroll
                for (int i = 0; i < PART; ++i) {
                    const int u = i / (PART_H * PART_W), v = i / PART_W % PART_H;
                    sums[o][u][v][i % PART_W] += weights[c][r][s][t][o] * values[u][v][i % PART_W + t];
                }
            }
        }
#pragma unroll
        for (int o = 0; o < OUT_BLOCK; ++o)
#pragma unroll
        for (int i = 0; i < PART; ++i)
            scan(peaks[o], sums[o][i / (PART_H * PART_W)][i / PART_W % PART_H][i % PART_W], first + i);
    }
}

// A sample's result from the sums of its blocks, (chunks, OUT_CHANNELS in groups): the average of each channel to
// out (batch, OUT_CHANNELS), or, with a bias of `biases` values, the sum of all to out (batch,).
__device__ void finish_sample(const Volume& volume, const float* partial_sums, const float* __restrict__ conv_bias,
                              const float* __restrict__ bias, int biases, Division division, int64_t sample, float* out) {
    __shared__ float warp_totals[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float total = 0.0f;
    for (int o = warp; o < OUT_CHANNELS; o += WARPS) {
        float sum = 0.0f;
        for (unsigned chunk = lane; chunk < volume.chunks(); chunk += WARP)
            sum += partial_sums[((sample * volume.chunks() + chunk) * OUT_GROUPS + o / OUT_BLOCK) * OUT_BLOCK + o % OUT_BLOCK];
        const float average = division.average(warp_sum(sum), volume.windows(), conv_bias[o]);
        if (bias) total += average + bias[biases == 1 ? 0 : o];
        else if (lane == 0) out[sample * OUT_CHANNELS + o] = average;
    }
    if (!bias) return;
    if (lane == 0) warp_totals[warp] = total;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int other = 1; other < WARPS; ++other) total += warp_totals[other];
    out[sample] = total;
}

// `partial_sums` (blocks, OUT_BLOCK), `arrivals` a zero for each sample. With KEEP_ARGMAX the indices go to
// argmax (batch, OUT_CHANNELS, windows).
template <bool KEEP_ARGMAX>
__global__ void __launch_bounds__(THREADS, 4)
    conv_max_mean(Volume volume, const float* __restrict__ weight, const float* __restrict__ conv_bias,
                  const float* __restrict__ bias, int biases, Division division, float* partial_sums, unsigned* arrivals,
                  float* __restrict__ out, Argmax* __restrict__ argmax) {
    const int first_out = blockIdx.x % OUT_GROUPS * OUT_BLOCK;
    const int64_t sample = blockIdx.x / OUT_GROUPS / volume.chunks();
    const unsigned window = blockIdx.x / OUT_GROUPS % volume.chunks() * THREADS + threadIdx.x;
    Peak peaks[OUT_BLOCK];
    convolve_window(volume, weight, division.sign(), sample, window, first_out, peaks);

    float maxima[OUT_BLOCK];
#pragma unroll
    for (int o = 0; o < OUT_BLOCK; ++o) {
        const bool exists = window < volume.windows() && first_out + o < OUT_CHANNELS;
        maxima[o] = exists ? peaks[o].value : 0.0f;
        if (KEEP_ARGMAX && exists)
            argmax[(sample * OUT_CHANNELS + first_out + o) * volume.windows() + window] =
                static_cast<Argmax>(peaks[o].position);
    }
    const float sum = block_sums(maxima);
    if (threadIdx.x < OUT_BLOCK) partial_sums[(int64_t)blockIdx.x * OUT_BLOCK + threadIdx.x] = sum;
    __syncthreads();
    // The first fence makes this block's sums visible before its arrival; the last block's second one, the others' sums to it.
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrivals + sample, 1u) == volume.chunks() * OUT_GROUPS - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    finish_sample(volume, partial_sums, conv_bias, bias, biases, division, sample, out);
}

// Gradients of the averages: one a sample, or one a channel of it.
struct Upstream {
    const float* grad;
    bool by_sample;
    __device__ float at(int64_t sample, int o) const { return grad[by_sample ? sample : sample * OUT_CHANNELS + o]; }
};

// A slice of the taps has a sum each in a thread's registers.
constexpr int GRAD_T = largest_divisor(KERNEL_W, 32), GRAD_S = largest_divisor(KERNEL_H, 32 / GRAD_T);
constexpr int GRAD_R = largest_divisor(KERNEL_D, 32 / (GRAD_T * GRAD_S)), GRAD_TAPS = GRAD_T * GRAD_S * GRAD_R;
constexpr int64_t GRAD_SLICES = TAPS / GRAD_TAPS, WEIGHTS = OUT_CHANNELS * IN_CHANNELS * TAPS;

// terms (splits, OUT_CHANNELS, IN_CHANNELS, TAPS); split k has the samples k, k + splits, ...
__global__ void __launch_bounds__(THREADS)
    parameter_grad(Volume volume, const Argmax* __restrict__ argmax, Upstream upstream, float* __restrict__ terms, int splits) {
    const int slice = blockIdx.x % GRAD_SLICES, c = blockIdx.x / GRAD_SLICES % IN_CHANNELS;
    const int o = blockIdx.x / GRAD_SLICES / IN_CHANNELS % OUT_CHANNELS;
    const int64_t split = blockIdx.x / GRAD_SLICES / IN_CHANNELS / OUT_CHANNELS;
    const int t0 = slice % (KERNEL_W / GRAD_T) * GRAD_T, s0 = slice / (KERNEL_W / GRAD_T) % (KERNEL_H / GRAD_S) * GRAD_S;
    const int r0 = slice / (KERNEL_W / GRAD_T) / (KERNEL_H / GRAD_S) * GRAD_R;
    float sums[GRAD_TAPS] = {};
    for (int64_t sample = split; sample < volume.batch; sample += splits) {
        const float factor = upstream.at(sample, o);
        const Argmax* from = argmax + (sample * OUT_CHANNELS + o) * volume.windows();
#pragma unroll 2
        for (unsigned window = threadIdx.x; window < volume.windows(); window += THREADS) {
            const int position = from[window];
            const int d = window / volume.columns / volume.rows * POOL_D + position / (POOL_H * POOL_W);
            const int h = window / volume.columns % volume.rows * POOL_H + position / POOL_W % POOL_H;
            const int w = window % volume.columns * POOL_W + position % POOL_W;
            const float* corner = volume.x + volume.at(sample, c, d + r0, h + s0, w + t0);
#pragma unroll
            for (int k = 0; k < GRAD_TAPS; ++k) {
                const int r = k / (GRAD_S * GRAD_T), s = k / GRAD_T % GRAD_S, t = k % GRAD_T;
                sums[k] += factor * corner[((int64_t)r * volume.height + s) * volume.width + t];
            }
        }
    }
    const float sum = block_sums(sums);
    if (threadIdx.x >= GRAD_TAPS) return;
    const int r = threadIdx.x / (GRAD_S * GRAD_T), s = threadIdx.x / GRAD_T % GRAD_S, t = threadIdx.x % GRAD_T;
    const int64_t tap = ((int64_t)(r0 + r) * KERNEL_H + s0 + s) * KERNEL_W + t0 + t;
    terms[split * WEIGHTS + ((int64_t)o * IN_CHANNELS + c) * TAPS + tap] = sum;
}

// grad_weight = scale * sum over splits of terms[split]
__global__ void __launch_bounds__(THREADS)
    add_splits(const float* __restrict__ terms, float* __restrict__ grad_weight, int splits, float scale) {
    const int64_t element = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (element >= WEIGHTS) return;
    float sum = 0.0f;
    for (int64_t split = 0; split < splits; ++split) sum += terms[split * WEIGHTS + element];
    grad_weight[element] = scale * sum;
}

// grad_x, gathered: every pixel asks, for each tap and output channel, whether the position that it reached through it was its
// window's maximum. A thread has a pixel in IN_BLOCK channels, so an answer serves all of them.
constexpr int IN_GROUPS = ceil_div(IN_CHANNELS, 8), IN_BLOCK = ceil_div(IN_CHANNELS, IN_GROUPS);
constexpr int OUT_SLICE = 128;  // output channels whose weights are in shared memory at a time

__global__ void __launch_bounds__(THREADS)
    input_grad(Volume volume, const float* __restrict__ weight, const Argmax* __restrict__ argmax, Upstream upstream,
               float scale, float* __restrict__ grad_x) {
    __shared__ alignas(16) float weights[OUT_SLICE][round_up(IN_BLOCK, 4)];
    const unsigned chunks = volume.pixel_chunks(), pixel = blockIdx.x % chunks * THREADS + threadIdx.x;
    const int first_channel = blockIdx.x / chunks % IN_GROUPS * IN_BLOCK;
    const int64_t sample = blockIdx.x / chunks / IN_GROUPS, windows = volume.windows();
    const int x = pixel % volume.width, y = pixel / volume.width % volume.height, z = pixel / volume.width / volume.height;
    float sums[IN_BLOCK] = {};
#pragma unroll 1
    for (int r = 0; r < KERNEL_D; ++r)
#pragma unroll 1
    for (int s = 0; s < KERNEL_H; ++s)
#pragma unroll 1
    for (int t = 0; t < KERNEL_W; ++t) {
        const int d = z - r, h = y - s, w = x - t;  // the convolution's position
        const bool exists = d >= 0 && d / POOL_D < volume.slabs && h >= 0 && h / POOL_H < volume.rows && w >= 0 &&
                            w / POOL_W < volume.columns;
        const int position = (d % POOL_D * POOL_H + h % POOL_H) * POOL_W + w % POOL_W;
        const int window = (d / POOL_D * volume.rows + h / POOL_H) * volume.columns + w / POOL_W;
        const Argmax* from = argmax + sample * OUT_CHANNELS * windows + (exists ? window : 0);
        const int64_t tap = ((int64_t)r * KERNEL_H + s) * KERNEL_W + t;
#pragma unroll 1
        for (int first_out = 0; first_out < OUT_CHANNELS; first_out += OUT_SLICE) {
            const int outs = smaller(OUT_SLICE, OUT_CHANNELS - first_out);
            __syncthreads();  // the weights before have been read
            for (int k = threadIdx.x; k < outs * IN_BLOCK; k += THREADS) {
                const int o = first_out + k / IN_BLOCK, c = first_channel + k % IN_BLOCK;
                weights[k / IN_BLOCK][k % IN_BLOCK] =
                    c < IN_CHANNELS ? upstream.at(sample, o) * weight[((int64_t)o * IN_CHANNELS + c) * TAPS + tap] : 0.0f;
            }
            __syncthreads();
#pragma unroll 4
            for (int o = 0; o < outs; ++o) {
                const bool is_maximum = exists && from[(first_out + o) * windows] == position;
#pragma unroll
                for (int c = 0; c < IN_BLOCK; ++c)
                    if (is_maximum) sums[c] += weights[o][c];
            }
        }
    }
    if (pixel >= volume.pixels()) return;
#pragma unroll
    for (int c = 0; c < IN_BLOCK; ++c)
        if (first_channel + c < IN_CHANNELS)
            grad_x[(sample * IN_CHANNELS + first_channel + c) * volume.pixels() + pixel] = scale * sums[c];
}

// How many blocks the launches below take, and how much memory between them.
int64_t forward_blocks(int64_t batch, int depth, int height, int width) {
    return batch * Volume(nullptr, batch, depth, height, width).chunks() * OUT_GROUPS;
}
int64_t forward_sums(int64_t blocks) { return blocks * OUT_BLOCK; }
int64_t parameter_blocks(int splits) { return GRAD_SLICES * IN_CHANNELS * OUT_CHANNELS * splits; }
int64_t input_blocks(int64_t batch, int depth, int height, int width) {
    return batch * IN_GROUPS * Volume(nullptr, batch, depth, height, width).pixel_chunks();
}
// Splits of the batch for 2000 blocks or so. It depends on the shapes alone, and with it the order of additions.
int parameter_splits(int64_t batch) {
    const int64_t wanted = (2000 + parameter_blocks(1) - 1) / parameter_blocks(1);
    return static_cast<int>(wanted < batch ? wanted : batch);
}

// out (batch,) with a bias of 1 or OUT_CHANNELS values, (batch, OUT_CHANNELS) where it is null; `argmax` may be null.
void launch_forward(const float* x, const float* weight, const float* conv_bias, const float* bias, int biases, double divisor,
                    float* partial_sums, unsigned* arrivals, float* out, void* argmax, int64_t batch, int depth, int height,
                    int width, cudaStream_t stream) {
    const auto kernel = argmax ? conv_max_mean<true> : conv_max_mean<false>;
    kernel<<<forward_blocks(batch, depth, height, width), THREADS, 0, stream>>>(
        Volume(x, batch, depth, height, width), weight, conv_bias, bias, biases, Division{static_cast<float>(divisor)},
        partial_sums, arrivals, out, static_cast<Argmax*>(argmax));
}

static float gradient_scale(const Volume& volume, double divisor) {
    return static_cast<float>(1.0 / (volume.windows() * divisor));
}

void launch_parameter_grad(const float* x, const void* argmax, const float* grad, bool by_sample, double divisor, float* terms,
                           float* grad_weight, int64_t batch, int depth, int height, int width, cudaStream_t stream) {
    const Volume volume(x, batch, depth, height, width);
    const int splits = parameter_splits(batch);
    if (splits > 0)
        parameter_grad<<<parameter_blocks(splits), THREADS, 0, stream>>>(volume, static_cast<const Argmax*>(argmax),
                                                                        Upstream{grad, by_sample}, terms, splits);
    add_splits<<<(WEIGHTS + THREADS - 1) / THREADS, THREADS, 0, stream>>>(terms, grad_weight, splits,
                                                                         gradient_scale(volume, divisor));
}

void launch_input_grad(const float* weight, const void* argmax, const float* grad, bool by_sample, double divisor,
                       float* grad_x, int64_t batch, int depth, int height, int width, cudaStream_t stream) {
    const Volume volume(nullptr, batch, depth, height, width);
    input_grad<<<input_blocks(batch, depth, height, width), THREADS, 0, stream>>>(
        volume, weight, static_cast<const Argmax*>(argmax), Upstream{grad, by_sample}, gradient_scale(volume, divisor), grad_x);
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

int64_t forward_blocks(int64_t batch, int depth, int height, int width);
int64_t forward_sums(int64_t blocks);
int64_t parameter_blocks(int splits);
int64_t input_blocks(int64_t batch, int depth, int height, int width);
int parameter_splits(int64_t batch);
void launch_forward(const float*, const float*, const float*, const float*, int, double, float*, unsigned*, float*, void*,
                    int64_t, int, int, int, cudaStream_t);
void launch_parameter_grad(const float*, const void*, const float*, bool, double, float*, float*, int64_t, int, int, int,
                           cudaStream_t);
void launch_input_grad(const float*, const void*, const float*, bool, double, float*, int64_t, int, int, int, cudaStream_t);

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits,
                message("conv3d_div_max_gap_bias_sum: expected ", name, " as a float32 CUDA tensor of shape ", shape,
                        " (-1: any), got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device()));
}

static void check_blocks(int64_t blocks) {
    TORCH_CHECK(blocks < (1ll << 31),
                message("conv3d_div_max_gap_bias_sum: the batch needs ", blocks, " blocks, more than a grid has"));
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(), message("conv3d_div_max_gap_bias_sum: expected all on ",
                                                              expected.device(), ", got ", name, " on ", tensor.device()));
}

// The input and weight of a pass, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    int64_t batch, depth, height, width, slabs, rows, columns;
    at::Tensor x, weight;
    c10::cuda::CUDAGuard guard;
    cudaStream_t stream;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, at::IntArrayRef pool) : guard(checked(x_in, weight_in, pool)) {
        x = x_in.contiguous(), weight = weight_in.contiguous();
        batch = x.size(0), depth = x.size(2), height = x.size(3), width = x.size(4);
        slabs = (depth - KERNEL_D + 1) / POOL_D, rows = (height - KERNEL_H + 1) / POOL_H;
        columns = (width - KERNEL_W + 1) / POOL_W;
        stream = c10::cuda::getCurrentCUDAStream();
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef pool) {
        check("x", x, {-1, IN_CHANNELS, -1, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W});
        check_device(x, "weight", weight);
        TORCH_CHECK(pool == at::IntArrayRef({POOL_D, POOL_H, POOL_W}),
                    message("conv3d_div_max_gap_bias_sum: built for a pooling window of ", POOL_D, " x ", POOL_H, " x ", POOL_W,
                            ", called with ", pool));
        TORCH_CHECK(x.size(2) >= KERNEL_D + POOL_D - 1 && x.size(3) >= KERNEL_H + POOL_H - 1 &&
                        x.size(4) >= KERNEL_W + POOL_W - 1,
                    message("conv3d_div_max_gap_bias_sum: a volume of ", x.size(2), " x ", x.size(3), " x ", x.size(4),
                            " is too small for a kernel of ", KERNEL_D, " x ", KERNEL_H, " x ", KERNEL_W,
                            " and a pooling window of ", POOL_D, " x ", POOL_H, " x ", POOL_W));
        TORCH_CHECK(x.size(2) * x.size(3) * x.size(4) < (1ll << 31),
                    message("conv3d_div_max_gap_bias_sum: expected less than 2^31 pixels a channel, got sizes ", x.sizes()));
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }

    // A byte for each window and channel, or four where a window has more than 256 positions.
    static constexpr at::ScalarType ARGMAX = int64_t(POOL_D) * POOL_H * POOL_W <= 256 ? at::kByte : at::kInt;
    at::Tensor empty_argmax(bool keep) const {
        return at::empty({keep ? batch : 0, OUT_CHANNELS, slabs, rows, columns}, x.options().dtype(ARGMAX));
    }

    at::Tensor checked_argmax(const at::Tensor& argmax) const {
        const std::array<int64_t, 5> values = {batch, OUT_CHANNELS, slabs, rows, columns};
        const at::IntArrayRef shape = values;
        TORCH_CHECK(argmax.scalar_type() == ARGMAX && argmax.sizes() == shape,
                    message("conv3d_div_max_gap_bias_sum: expected the argmax indices of x, ", ARGMAX, " of shape ",
                            shape, ", got ", argmax.scalar_type(), " of shape ", argmax.sizes()));
        check_device(x, "argmax", argmax);
        return argmax.contiguous();
    }

    at::Tensor checked_grad(const at::Tensor& grad) const {
        TORCH_CHECK(grad.scalar_type() == at::kFloat && (grad.numel() == batch || grad.numel() == batch * OUT_CHANNELS),
                    message("conv3d_div_max_gap_bias_sum: expected ", batch, " or ", batch * OUT_CHANNELS,
                            " float32 gradients, got ", grad.scalar_type(), " ", grad.sizes()));
        check_device(x, "grad", grad);
        return grad.contiguous();
    }
};

// The sum of each sample (batch, 1, 1, 1), or, without a bias, the average of each channel (batch, OUT_CHANNELS, 1, 1, 1).
// If `keep`, also the argmax indices, which the gradients need.
std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias_in,
                                           const std::optional<at::Tensor>& bias_in, double divisor, at::IntArrayRef pool,
                                           bool keep) {
    const Call call(x, weight, pool);
    check("conv_bias", conv_bias_in, {OUT_CHANNELS});
    check_device(x, "conv_bias", conv_bias_in);
    at::Tensor bias;
    if (bias_in) {
        TORCH_CHECK(bias_in->scalar_type() == at::kFloat && (bias_in->numel() == 1 || bias_in->numel() == OUT_CHANNELS),
                    message("conv3d_div_max_gap_bias_sum: expected a float32 bias of 1 or ", OUT_CHANNELS, " values, got ",
                            bias_in->scalar_type(), " ", bias_in->sizes()));
        check_device(x, "bias", *bias_in);
        bias = bias_in->contiguous();
    }
    const at::Tensor conv_bias = conv_bias_in.contiguous(), argmax = call.empty_argmax(keep);
    at::Tensor out = bias_in ? call.empty({call.batch, 1, 1, 1}) : call.empty({call.batch, OUT_CHANNELS, 1, 1, 1});
    if (call.batch == 0) return {out, argmax};
    const int64_t blocks = forward_blocks(call.batch, call.depth, call.height, call.width);
    check_blocks(blocks);
    at::Tensor partial_sums = call.empty({forward_sums(blocks)});
    at::Tensor arrivals = at::zeros({call.batch}, out.options().dtype(at::kInt));
    launch_forward(call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(), conv_bias.const_data_ptr<float>(),
                   bias_in ? bias.const_data_ptr<float>() : nullptr, bias_in ? bias.numel() : 0, divisor,
                   partial_sums.mutable_data_ptr<float>(), reinterpret_cast<unsigned*>(arrivals.mutable_data_ptr<int>()),
                   out.mutable_data_ptr<float>(), keep ? argmax.mutable_data_ptr() : nullptr, call.batch, call.depth,
                   call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {out, argmax};
}

at::Tensor weight_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& argmax_in,
                       double divisor, at::IntArrayRef pool) {
    const Call call(x, weight, pool);
    const at::Tensor grad = call.checked_grad(grad_in), argmax = call.checked_argmax(argmax_in);
    const int splits = parameter_splits(call.batch);
    check_blocks(parameter_blocks(splits));
    at::Tensor grad_weight = call.empty(weight.sizes()), terms = call.empty({splits, weight.numel()});
    launch_parameter_grad(call.x.const_data_ptr<float>(), argmax.const_data_ptr(), grad.const_data_ptr<float>(),
                          grad.numel() == call.batch, divisor, terms.mutable_data_ptr<float>(),
                          grad_weight.mutable_data_ptr<float>(), call.batch, call.depth, call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_weight;
}

at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& argmax_in,
                      double divisor, at::IntArrayRef pool) {
    const Call call(x, weight, pool);
    const at::Tensor grad = call.checked_grad(grad_in), argmax = call.checked_argmax(argmax_in);
    at::Tensor grad_x = call.empty(x.sizes());
    if (call.batch == 0) return grad_x;
    check_blocks(input_blocks(call.batch, call.depth, call.height, call.width));
    launch_input_grad(call.weight.const_data_ptr<float>(), argmax.const_data_ptr(), grad.const_data_ptr<float>(),
                      grad.numel() == call.batch, divisor, grad_x.mutable_data_ptr<float>(), call.batch, call.depth,
                      call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_x;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor conv_bias, Tensor? bias, float divisor, int[3] pool, bool keep) -> "
          "(Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor argmax, float divisor, int[3] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad, Tensor x, Tensor weight, Tensor argmax, float divisor, int[3] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("forward", &forward);
    m.impl("weight_grad", &weight_grad);
    m.impl("input_grad", &input_grad);
}
"""


def register(namespace):
    """Shapes for torch.compile, and autograd."""
    operators = getattr(torch.ops, namespace)

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, conv_bias, bias, divisor, pool, keep):
        batch, outs, sizes = x.shape[0], weight.shape[0], zip(x.shape[2:], weight.shape[2:], pool, strict=True)
        windows = [(size - kernel + 1) // window for size, kernel, window in sizes]
        argmax_type = torch.uint8 if pool[0] * pool[1] * pool[2] <= 256 else torch.int32
        out = x.new_empty(batch, outs, 1, 1, 1) if bias is None else x.new_empty(batch, 1, 1, 1)
        return out, x.new_empty(batch if keep else 0, outs, *windows, dtype=argmax_type)

    @torch.library.register_fake(f"{namespace}::weight_grad")
    def weight_grad(grad, x, weight, argmax, divisor, pool):
        return weight.new_empty(weight.shape)

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad, x, weight, argmax, divisor, pool):
        return x.new_empty(x.shape)

    def save(ctx, inputs, output):
        x, weight, _, bias, ctx.divisor, ctx.pool, keep = inputs
        if not keep:
            raise RuntimeError(f"{namespace}: forward has gradients only with keep=True")
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, grad_out, _):
        x, weight, argmax = ctx.saved_tensors
        needs_x, needs_weight, needs_conv_bias, needs_bias = ctx.needs_input_grad[:4]
        arguments = grad_out, x, weight, argmax, ctx.divisor, ctx.pool
        grad_x = operators.input_grad(*arguments) if needs_x else None
        grad_weight = operators.weight_grad(*arguments) if needs_weight else None
        by_channel = grad_out.sum(0).reshape(-1).expand(weight.shape[0])  # of the averages
        grad_conv_bias = by_channel / ctx.divisor if needs_conv_bias else None
        grad_bias = by_channel.view(-1, ctx.bias_shape.numel()).sum(0).view(ctx.bias_shape) if needs_bias else None
        return grad_x, grad_weight, grad_conv_bias, grad_bias, None, None, None

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    torch.library.register_autograd(f"{namespace}::forward", backward, setup_context=save)
    for name in ("weight_grad", "input_grad"):
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
        return build(*self.sources, **channels, **kernel, **pool)

    def forward(self, x):
        operators = getattr(torch.ops, self.namespace())
        weight, conv_bias, bias = self.conv.weight, self.conv.bias, self.bias if self.sums_channels else None
        trains = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (x, weight, conv_bias, bias)
        )
        out, _ = operators.forward(x, weight, conv_bias, bias, self.divisor, self.pool_size, trains)
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
