"""conv3d_div_max_gap_bias_sum on the CPU: Winograd in two dimensions, with everything behind the convolution in registers.

The convolution is computed in tiles of 2 x 2 places by Winograd's F(2, 3) along height and width; depth stays direct.
Division, max pooling, average, bias and sum follow before anything is written.

Why it is faster
    PyTorch writes the convolution, 27.6 MB at batch 8, and passes over it twice more. Here a tile's outputs go from the output
    transform into a running maximum that fits into the first-level cache, and one float a channel leaves a chunk of rows.
    A 3 x 3 kernel at 2 x 2 places costs 16 multiplications instead of 36, and the tile coincides with the pooling window.
    Vectors run over output channels, so sizes along the image are free, and the transforms, pooling and sums need no shuffles.
    Two depths share each broadcast of the input. It costs an input transform that moves 4 times the input through the
    second-level cache, and a transformed copy of the weights. Other kernel sizes are computed directly, fused in the same way.

Mathematics
    F(2, 3), in one dimension: (y0, y1) = A^T [(G w) * (B^T x)], where x has 4 values, w has 3, and * is elementwise:
    B^T x = (x0 - x2, x1 + x2, x2 - x1, x1 - x3)        G w = (w0, (w0 + w1 + w2)/2, (w0 - w1 + w2)/2, w2)
    A^T m = (m0 + m1 + m2, m1 - m2 - m3)                in two dimensions: A^T [(G w G^T) * (B^T x B)] A
    Products are summed over input channels and kernel depths before A. G w G^T is computed in float64, anew in each call.
    max(a / divisor) = max(sign * a) / |divisor|, and the bias of the convolution moves behind max and average:
    average(max(conv + b)) = average(max(conv)) + b. Averages are in float64 above a chunk of rows.
    Risk: the transforms add inputs of equal size, which costs about one bit of float32, and an infinite input gives NaN where
    the original may give an infinity. NaN in a window gives NaN, as in the original.

Loops
    loop               over                                        where
    threads            chunks of rows of windows of all samples    at::parallel_for
    chunk_sums         windows along depth                         the last depths' transforms in a ring, L2
    load_slices        input channels, new depths                  input transform; vectors along a row
    winograd_block     16 points, then 8 tiles beside each other   products of all points in 16 KB; then A^T m A and max
    point_product      input channels, kernel depths               2 depths x 8 tiles in 16 vectors of 16 output channels
    averages           chunks of a sample, in order, in float64    one thread, so the bits do not depend on the threads
    Vectors have 16, 8 or 4 floats, as the machine's are; while a depth is computed, the next one's input is fetched.

Floor
    At batch 8: 3.0 GFLOP directly, 1.3 GFLOP after the rewrite and 0.06 GFLOP of transforms; 16.8 MB read. At 200 GFLOP/s
    and 34 GB/s (two cores with AVX-512) 6.9 ms and 0.5 ms; arithmetic binds.
    Measured on two Zen 4 cores (AMD EPYC, AVX-512), torch 2.13.0, batch 8, medians of 15 interleaved calls: 10.6 ms; PyTorch
    76 ms, torch.compile 49 ms. On one of the cores: 19.6, 124 and 78 ms. With an allocator that keeps its memory (glibc's
    thresholds raised), so that PyTorch's large temporaries cost no page faults, the three are 9.1, 37 and 22 ms.

Takes
    float32 CPU tensors (batch, in_channels, depth, height, width), batch 0 included; any channels, kernel, pool, bias shape and
    sum_dim that the original takes; a divisor other than 0 and NaN. Anything else raises. For another sum_dim than the
    channels, or another bias shape, the last addition and sum, of batch * out_channels values, are PyTorch's. Forward only: a
    gradient raises NotImplementedError. Needs GCC or Clang.
"""

import functools
import hashlib
import os
import shutil
import sys
import time

import torch
import torch.nn as nn

NAME = "conv3d_div_max_gap_bias_sum_cpu_winograd"

CPP = r"""
#include <algorithm>
#include <cstdint>
#include <limits>

// The widest vectors of the machine, and how many of them a tile of the product takes of its registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, ACCUMULATORS = 16;
#elif defined(__AVX__)
constexpr int LANES = 8, ACCUMULATORS = 8;
#elif defined(__aarch64__)
constexpr int LANES = 4, ACCUMULATORS = 16;
#else
constexpr int LANES = 4, ACCUMULATORS = 8;
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A tile is what one step computes: by Winograd's F(2, 3) 2 x 2 places of the convolution where the kernel is 3 x 3, else one.
// DEPTHS tiles behind each other and BLOCK beside each other share the registers.
constexpr bool WINOGRAD = KERNEL_H == 3 && KERNEL_W == 3;
constexpr int TILE = WINOGRAD ? 2 : 1, POINTS = WINOGRAD ? 16 : KERNEL_H * KERNEL_W;
constexpr int DEPTHS = POOL_D % 2 ? 1 : 2, BLOCK = ACCUMULATORS / DEPTHS;
// A chunk is WINDOWS pooling windows of a row of windows; LINES lines of tiles cover its COLUMNS columns.
constexpr int WINDOWS = std::max(1, 64 / POOL_W), COLUMNS = WINDOWS * POOL_W;
// Winograd's transformed input lies in lines of LINE tiles, one cache line each; BLOCK divides LINE.
constexpr int LINE = 16, TILE_ROWS = (POOL_H + TILE - 1) / TILE, LINES = round_up(COLUMNS, TILE * LINE) / (TILE * LINE);
// Depths of the input that one window needs. The workspace is a ring of that many: depth d is in slot d % SLICES.
constexpr int SLICES = POOL_D + KERNEL_D - 1, ROWS = POOL_H + KERNEL_H - 1;
constexpr int INPUT_COLUMNS = LINES * LINE * TILE + KERNEL_W - 1;

struct Shape {
    int64_t batch, channels, depth, height, width, outputs;  // of x, and out_channels
    int64_t depths() const { return (depth - KERNEL_D + 1) / POOL_D; }  // windows along each dimension
    int64_t rows() const { return (height - KERNEL_H + 1) / POOL_H; }
    int64_t columns() const { return (width - KERNEL_W + 1) / POOL_W; }
    int64_t chunks() const { return (columns() + WINDOWS - 1) / WINDOWS; }
    int64_t units() const { return batch * rows() * chunks(); }  // what threads share: a chunk of a row of a sample, all depths
    int64_t padded_outputs() const { return round_up(outputs, LANES); }
    int64_t packed_floats() const { return POINTS * channels * KERNEL_D * padded_outputs(); }
    // Winograd: [tile row][point][line][channel][slot][LINE], points apart by an odd number of cache lines.
    int64_t line_floats() const { return channels * SLICES * LINE; }
    int64_t point_floats() const { return round_up(LINES * channels * SLICES, 2) * LINE + LINE; }
    // Direct: [channel][slot][row][column], the input as it is.
    int64_t workspace_floats() const {
        return WINOGRAD ? TILE_ROWS * POINTS * point_floats() : channels * SLICES * ROWS * INPUT_COLUMNS;
    }
};

// The larger one; NaN if either is, as in PyTorch's pooling.
inline vec nan_max(vec a, vec b) { return ((b > a) | (b != b)) ? b : a; }

// weight (outputs, channels, KERNEL_D, KERNEL_H, KERNEL_W) * sign -> packed [outputs / LANES][point][channel][KERNEL_D][LANES].
// A point is a place in the kernel, or in G w G^T, the transform of a 3 x 3 kernel.
void pack(const float* weight, float* packed, float sign, Shape shape) {
    constexpr double G[4][3] = {{1, 0, 0}, {0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {0, 0, 1}};
    const int64_t stride = shape.channels * KERNEL_D * LANES;
    for (int64_t o = 0; o < shape.padded_outputs(); ++o)
        for (int64_t k = 0; k < shape.channels * KERNEL_D; ++k) {
            const float* plane = weight + (o * shape.channels * KERNEL_D + k) * KERNEL_H * KERNEL_W;
            for (int p = 0; p < POINTS; ++p) {
                double value = 0;
                if (o < shape.outputs && !WINOGRAD) value = plane[p];
                if (o < shape.outputs && WINOGRAD)
                    for (int i = 0; i < 9; ++i) value += G[p / 4][i / 3] * G[p % 4][i % 3] * plane[i];
                packed[(o / LANES * POINTS + p) * stride + k * LANES + o % LANES] = sign * value;
            }
        }
}

// Winograd's input transform B^T x B of all tiles of a chunk, for one channel, depth and row of tiles: 4 rows of x, of which
// `valid` columns exist, to v[point][line][LINE]. A missing row may stand for anything: only tiles' lower rows depend on it.
inline void transform_input(const float* const* rows, int64_t valid, float* v, int64_t point_stride, int64_t line_stride) {
    alignas(64) float t[4][INPUT_COLUMNS];
    valid = std::min<int64_t>(valid, INPUT_COLUMNS);
    int64_t w = 0;
    for (; w + LANES <= valid; w += LANES) {
        vec x[4];
        for (int i = 0; i < 4; ++i) x[i] = *(const unaligned_vec*)(rows[i] + w);
        *(unaligned_vec*)(t[0] + w) = x[0] - x[2];
        *(unaligned_vec*)(t[1] + w) = x[1] + x[2];
        *(unaligned_vec*)(t[2] + w) = x[2] - x[1];
        *(unaligned_vec*)(t[3] + w) = x[1] - x[3];
    }
    for (; w < INPUT_COLUMNS; ++w) {
        float x[4];
        for (int i = 0; i < 4; ++i) x[i] = w < valid ? rows[i][w] : 0.0f;
        t[0][w] = x[0] - x[2];
        t[1][w] = x[1] + x[2];
        t[2][w] = x[2] - x[1];
        t[3][w] = x[1] - x[3];
    }
    for (int a = 0; a < 4; ++a)
        for (int line = 0; line < LINES; ++line) {
            const float* from = t[a] + line * LINE * 2;
            float* to = v + 4 * a * point_stride + line * line_stride;
            for (int i = 0; i < LINE; ++i) {
                to[i] = from[2 * i] - from[2 * i + 2];
                to[i + point_stride] = from[2 * i + 1] + from[2 * i + 2];
                to[i + 2 * point_stride] = from[2 * i + 2] - from[2 * i + 1];
                to[i + 3 * point_stride] = from[2 * i + 1] - from[2 * i + 3];
            }
        }
}

// acc[depth][tile] += sum over channels and kernel depths of weight (a vector of output channels) * v (one value a tile).
__attribute__((always_inline)) inline void accumulate(vec (&acc)[DEPTHS][BLOCK], const float* v, const int64_t* slots,
                                                      int64_t channel_stride, const float* weights, int64_t channels) {
    const float* slices[DEPTHS + KERNEL_D - 1];
    for (int s = 0; s < DEPTHS + KERNEL_D - 1; ++s) slices[s] = v + slots[s];
    for (int64_t c = 0; c < channels; ++c, weights += KERNEL_D * LANES) {
#pragma GCC unroll 16
        for (int s = 0; s < DEPTHS + KERNEL_D - 1; ++s) {
            asm("" : "+r"(slices[s]));  // opaque, or GCC gives each address below a register of its own
#pragma GCC unroll 16
            for (int t = 0; t < BLOCK; ++t)
#pragma GCC unroll 16
                for (int d = 0; d < DEPTHS; ++d)
                    if (s - d >= 0 && s - d < KERNEL_D)
                        acc[d][t] += *(const unaligned_vec*)(weights + (s - d) * LANES) * slices[s][t];
            slices[s] += channel_stride;
        }
    }
}

inline void clear(vec (&acc)[DEPTHS][BLOCK]) {
#pragma GCC unroll 2
    for (int d = 0; d < DEPTHS; ++d)
#pragma GCC unroll 16
        for (int t = 0; t < BLOCK; ++t) acc[d][t] = vec{};
}

// One point of the product for a block of tiles.
__attribute__((noinline)) void point_product(vec (*m)[BLOCK], const float* v, const int64_t* slots, const float* weights,
                                             int64_t channels) {
    vec acc[DEPTHS][BLOCK];
    clear(acc);
    accumulate(acc, v, slots, SLICES * LINE, weights, channels);
#pragma GCC unroll 2
    for (int d = 0; d < DEPTHS; ++d)
#pragma GCC unroll 16
        for (int t = 0; t < BLOCK; ++t) m[d][t] = acc[d][t];
}

// line: the running maxima of a chunk's windows. y: the convolution at `column`.
inline void pool(vec* line, int64_t column, vec y) { line[column / POOL_W] = nan_max(line[column / POOL_W], y); }

// The convolution of DEPTHS x BLOCK tiles by Winograd: product, output transform A^T m A, pooling.
inline void winograd_block(vec* line, const float* v, const int64_t* slots, const float* weights, int64_t first_column,
                           int64_t columns, bool second_row, Shape shape) {
    const int64_t point_weights = shape.channels * KERNEL_D * LANES;
    vec m[16][DEPTHS][BLOCK];
    for (int p = 0; p < 16; ++p)
        point_product(m[p], v + p * shape.point_floats(), slots, weights + p * point_weights, shape.channels);
    for (int d = 0; d < DEPTHS; ++d)
        for (int t = 0; t < BLOCK; ++t) {
            const int64_t column = first_column + 2 * t;
            if (column >= columns) break;
            vec half[2][4];
            for (int b = 0; b < 4; ++b) {
                const vec m1 = m[4 + b][d][t], m2 = m[8 + b][d][t];
                half[0][b] = m[b][d][t] + (m1 + m2);
                half[1][b] = (m1 - m2) - m[12 + b][d][t];
            }
            vec y[2][2];
            for (int a = 0; a < 2; ++a) {
                y[a][0] = half[a][0] + (half[a][1] + half[a][2]);
                y[a][1] = (half[a][1] - half[a][2]) - half[a][3];
            }
            if (second_row)
                for (int e = 0; e < 2; ++e) y[0][e] = nan_max(y[0][e], y[1][e]);
            if (POOL_W % 2 == 0) {  // both columns fall into one window
                pool(line, column, nan_max(y[0][0], y[0][1]));
            } else {
                pool(line, column, y[0][0]);
                if (column + 1 < columns) pool(line, column + 1, y[0][1]);
            }
        }
}

// The convolution of DEPTHS x BLOCK places, directly, and pooling.
__attribute__((noinline)) void direct_block(vec* line, const float* v, const int64_t* slots, const float* weights,
                                            int64_t first_column, int64_t columns, Shape shape) {
    vec acc[DEPTHS][BLOCK];
    clear(acc);
    for (int p = 0; p < POINTS; ++p)
        accumulate(acc, v + p / KERNEL_W * INPUT_COLUMNS + p % KERNEL_W, slots, SLICES * ROWS * INPUT_COLUMNS,
                   weights + p * shape.channels * KERNEL_D * LANES, shape.channels);
    for (int t = 0; t < BLOCK; ++t)
        if (first_column + t < columns)
            for (int d = 0; d < DEPTHS; ++d) pool(line, first_column + t, acc[d][t]);
}

// Brings depths first to end of x into their slots of the workspace, one channel after the other, because slots beside each
// other share cache lines. `corner` is the first place of the chunk at depth 0 of channel 0.
inline void load_slices(const float* corner, float* workspace, int64_t first, int64_t end, int64_t top, int64_t valid,
                        Shape shape) {
    for (int64_t c = 0; c < shape.channels; ++c)
        for (int64_t d = first; d < end; ++d) {
            const float* plane = corner + (c * shape.depth + d) * shape.height * shape.width;
            const int64_t slot = c * SLICES + d % SLICES;
            if (WINOGRAD)
                for (int r = 0; r < TILE_ROWS; ++r) {
                    const float* rows[4];
                    for (int64_t i = 0; i < 4; ++i) rows[i] = plane + std::min(2 * r + i, shape.height - 1 - top) * shape.width;
                    transform_input(rows, valid, workspace + r * POINTS * shape.point_floats() + slot * LINE,
                                    shape.point_floats(), shape.line_floats());
                }
            else
                for (int64_t r = 0; r < ROWS; ++r) {
                    float* row = workspace + (slot * ROWS + r) * INPUT_COLUMNS;
                    const int64_t count = std::min<int64_t>(valid, INPUT_COLUMNS);
                    std::copy_n(plane + r * shape.width, count, row);
                    std::fill(row + count, row + INPUT_COLUMNS, 0.0f);
                }
        }
}

// Fetches into the cache what load_slices will read of one channel of `depths` depths from `corner` on.
inline void prefetch(const float* corner, int64_t depths, int64_t columns, Shape shape) {
    for (int64_t d = 0; d < depths; ++d)
        for (int64_t r = 0; r < ROWS; ++r)
            for (int64_t w = 0; w < columns; w += LINE)
                __builtin_prefetch(corner + (d * shape.height + r) * shape.width + w);
}

// sums[o] = sum of max(convolution without bias) over a chunk of a row of windows, at all depths.
void chunk_sums(const float* x, const float* packed, float* workspace, float* sums, int64_t unit, Shape shape) {
    const int64_t chunk = unit % shape.chunks(), row = unit / shape.chunks() % shape.rows();
    const int64_t sample = unit / shape.chunks() / shape.rows();
    const int64_t windows = std::min<int64_t>(WINDOWS, shape.columns() - chunk * WINDOWS), columns = windows * POOL_W;
    const int64_t blocks = (columns + BLOCK * TILE - 1) / (BLOCK * TILE);
    const int64_t top = row * POOL_H, left = chunk * COLUMNS, plane = shape.height * shape.width;
    const float* corner = x + (sample * shape.channels * shape.depth * shape.height + top) * shape.width + left;
    std::fill_n(sums, shape.padded_outputs(), 0.0f);

    for (int64_t i = 0, loaded = 0; i < shape.depths(); ++i) {
        load_slices(corner, workspace, loaded, i * POOL_D + SLICES, top, shape.width - left, shape);
        loaded = i * POOL_D + SLICES;
        // While this depth is computed, what comes next is fetched, some channels before each block.
        const bool last = i + 1 == shape.depths();  // then the next row of windows is next
        const float* next = last ? corner + POOL_H * shape.width : corner + loaded * plane;
        const int64_t steps = shape.padded_outputs() / LANES * (POOL_D / DEPTHS) * TILE_ROWS * blocks;
        const int64_t share = (shape.channels + steps - 1) / steps;
        int64_t fetched = 0;
        for (int64_t o = 0; o < shape.padded_outputs(); o += LANES) {
            const float* weights = packed + o * POINTS * shape.channels * KERNEL_D;
            vec line[WINDOWS];
            std::fill_n(line, windows, vec{} - std::numeric_limits<float>::infinity());
            for (int64_t d = 0; d < POOL_D; d += DEPTHS) {
                int64_t slots[DEPTHS + KERNEL_D - 1];
                for (int s = 0; s < DEPTHS + KERNEL_D - 1; ++s)
                    slots[s] = (i * POOL_D + d + s) % SLICES * (WINOGRAD ? LINE : ROWS * INPUT_COLUMNS);
                for (int64_t r = 0; r < TILE_ROWS; ++r)
                    for (int64_t b = 0; b < blocks; ++b) {
                        for (const int64_t end = std::min(fetched + share, shape.channels); fetched < end; ++fetched)
                            prefetch(next + fetched * shape.depth * plane, last ? SLICES : POOL_D, columns, shape);
                        if (WINOGRAD)
                            winograd_block(line,
                                           workspace + r * POINTS * shape.point_floats() +
                                               b * BLOCK / LINE * shape.line_floats() + b * BLOCK % LINE,
                                           slots, weights, b * BLOCK * 2, columns, 2 * r + 1 < POOL_H, shape);
                        else
                            direct_block(line, workspace + r * INPUT_COLUMNS + b * BLOCK, slots, weights, b * BLOCK, columns,
                                         shape);
                    }
            }
            vec total = {};
            for (int64_t w = 0; w < windows; ++w) total += line[w];
            for (int k = 0; k < LANES; ++k) sums[o + k] += total[k];
        }
    }
}
"""

BINDING = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

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

struct alignas(64) CacheLine {
    float values[16];
};

// (batch, outputs) of averages, in float64, in an order that does not depend on the number of threads.
static std::vector<double> averages(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& conv_bias_in,
                                    double divisor) {
    for (const at::Tensor* t : {&x_in, &weight_in, &conv_bias_in})
        TORCH_CHECK(t->is_cpu() && t->scalar_type() == at::kFloat,
                    message("conv_pool_averages: expected float32 CPU tensors, got ", t->scalar_type(), " on ", t->device()));
    TORCH_CHECK(x_in.dim() == 5, message("conv_pool_averages: expected x of 5 dimensions, got ", x_in.dim()));
    TORCH_CHECK(weight_in.dim() == 5 && weight_in.size(1) == x_in.size(1) && weight_in.size(2) == KERNEL_D &&
                    weight_in.size(3) == KERNEL_H && weight_in.size(4) == KERNEL_W && conv_bias_in.dim() == 1 &&
                    conv_bias_in.size(0) == weight_in.size(0),
                message("conv_pool_averages: expected a weight of (outputs, ", x_in.size(1), ", ", KERNEL_D, ", ", KERNEL_H,
                        ", ", KERNEL_W, ") and a bias of (outputs,), got ", weight_in.sizes(), " and ",
                        conv_bias_in.sizes()));
    TORCH_CHECK(divisor != 0 && !std::isnan(divisor), message("conv_pool_averages: the divisor is ", divisor));
    const Shape shape{x_in.size(0), x_in.size(1), x_in.size(2), x_in.size(3), x_in.size(4), weight_in.size(0)};
    TORCH_CHECK(shape.depth >= KERNEL_D + POOL_D - 1 && shape.height >= KERNEL_H + POOL_H - 1 &&
                    shape.width >= KERNEL_W + POOL_W - 1,
                message("conv_pool_averages: a window of ", POOL_D, " x ", POOL_H, " x ", POOL_W, " behind a kernel of ",
                        KERNEL_D, " x ", KERNEL_H, " x ", KERNEL_W, " does not fit into ", shape.depth, " x ", shape.height,
                        " x ", shape.width));
    const at::Tensor x = x_in.contiguous(), weight = weight_in.contiguous(), conv_bias = conv_bias_in.contiguous();

    // max(a / divisor) = max(sign * a) / |divisor|
    const float sign = divisor < 0 ? -1.0f : 1.0f;
    const int64_t padded = shape.padded_outputs();
    std::vector<CacheLine> packed(round_up(shape.packed_floats(), 16) / 16);
    pack(weight.const_data_ptr<float>(), packed[0].values, sign, shape);
    std::vector<float> sums(shape.units() * padded);
    const float* data = x.const_data_ptr<float>();
    at::parallel_for(0, shape.units(), 1, [&](int64_t begin, int64_t end) {
        std::vector<CacheLine> workspace(round_up(shape.workspace_floats(), 16) / 16);
        for (int64_t unit = begin; unit < end; ++unit)
            chunk_sums(data, packed[0].values, workspace[0].values, sums.data() + unit * padded, unit, shape);
    });

    std::vector<double> result(shape.batch * shape.outputs);
    const int64_t units = shape.rows() * shape.chunks(), windows = shape.depths() * shape.rows() * shape.columns();
    for (int64_t b = 0; b < shape.batch; ++b)
        for (int64_t o = 0; o < shape.outputs; ++o) {
            double sum = 0;
            for (int64_t i = 0; i < units; ++i) sum += sums[(b * units + i) * padded + o];
            result[b * shape.outputs + o] = (sum / windows + sign * conv_bias.const_data_ptr<float>()[o]) / std::abs(divisor);
        }
    return result;
}

at::Tensor conv_pool_averages(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias, double divisor) {
    const std::vector<double> values = averages(x, weight, conv_bias, divisor);
    at::Tensor out = at::empty({x.size(0), weight.size(0), 1, 1, 1}, x.options());
    std::copy(values.begin(), values.end(), out.mutable_data_ptr<float>());
    return out;
}

at::Tensor conv_pool_sums(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias, double divisor,
                          const at::Tensor& bias_in) {
    TORCH_CHECK(bias_in.is_cpu() && bias_in.scalar_type() == at::kFloat && bias_in.numel() == weight.size(0),
                message("conv_pool_sums: expected a float32 CPU bias with one value for each of ", weight.size(0),
                        " output channels, got ", bias_in.sizes(), " ", bias_in.scalar_type(), " on ", bias_in.device()));
    const std::vector<double> values = averages(x, weight, conv_bias, divisor);
    const at::Tensor bias = bias_in.contiguous();
    at::Tensor out = at::empty({x.size(0), 1, 1, 1}, x.options());
    for (int64_t b = 0; b < x.size(0); ++b) {
        double sum = 0;
        for (int64_t o = 0; o < weight.size(0); ++o) sum += values[b * weight.size(0) + o] + bias.const_data_ptr<float>()[o];
        out.mutable_data_ptr<float>()[b] = sum;
    }
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("conv_pool_averages(Tensor x, Tensor weight, Tensor conv_bias, float divisor) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("conv_pool_sums(Tensor x, Tensor weight, Tensor conv_bias, float divisor, Tensor bias) -> Tensor",
          {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("conv_pool_averages", &conv_pool_averages);
    m.impl("conv_pool_sums", &conv_pool_sums);
}
"""


def register(namespace):
    """Shapes for torch.compile, and a clear word where a gradient is asked for."""

    @torch.library.register_fake(f"{namespace}::conv_pool_averages")
    def conv_pool_averages(x, weight, conv_bias, divisor):
        return x.new_empty(x.shape[0], weight.shape[0], 1, 1, 1)

    @torch.library.register_fake(f"{namespace}::conv_pool_sums")
    def conv_pool_sums(x, weight, conv_bias, divisor, bias):
        return x.new_empty(x.shape[0], 1, 1, 1)

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: this variant has no backward; use it under torch.no_grad()")

    torch.library.register_autograd(f"{namespace}::conv_pool_averages", refuse)
    torch.library.register_autograd(f"{namespace}::conv_pool_sums", refuse)


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
    sources = NAME, CPP + BINDING, None, register  # bound here, so that no other variant in a notebook replaces them

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        if divisor == 0 or divisor != divisor:
            raise ValueError(f"{self.sources[0]}: expected a divisor other than 0 and NaN, got {divisor}")
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor = divisor
        self.max_pool = nn.MaxPool3d(pool_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.sum_dim = sum_dim

    @torch.compiler.assume_constant_result
    def namespace(self):
        pool = self.max_pool.kernel_size
        pool = (pool,) * 3 if isinstance(pool, int) else pool
        sizes = {f"KERNEL_{d}": size for d, size in zip("DHW", self.conv.kernel_size, strict=True)}
        sizes |= {f"POOL_{d}": size for d, size in zip("DHW", pool, strict=True)}
        return build(*self.sources, cflags=("-march=native", "-fopenmp"), **sizes)

    def forward(self, x):
        operators = getattr(torch.ops, self.namespace())
        conv, dim = self.conv, self.sum_dim
        over_channels = dim in (1, -4) if isinstance(dim, int) else dim is not None and tuple(dim) in ((1,), (-4,))
        if over_channels and self.bias.shape == (conv.out_channels, 1, 1, 1):
            return operators.conv_pool_sums(x, conv.weight, conv.bias, self.divisor, self.bias)
        averages = operators.conv_pool_averages(x, conv.weight, conv.bias, self.divisor)
        return torch.sum(averages + self.bias, dim=dim)


def main():
    torch.manual_seed(0)
    model = ModelNew(8, 16, (3, 3, 3), 2.0, (2, 2, 2), (16, 1, 1, 1), 1)
    x = torch.randn(8, 8, 16, 64, 64)

    def plain(x):
        pooled = model.max_pool(model.conv(x) / model.divisor)
        return torch.sum(nn.functional.adaptive_avg_pool3d(pooled, 1) + model.bias, dim=model.sum_dim)

    def milliseconds(function):
        start = time.perf_counter()
        function(x)
        return (time.perf_counter() - start) * 1e3

    with torch.no_grad():
        error = ((model(x) - plain(x)).abs().max() / plain(x).std()).item()
        ours, theirs = zip(*[(milliseconds(model), milliseconds(plain)) for _ in range(10)], strict=True)
        print(f"{NAME}: differs from PyTorch by {error:.1e} of the outputs' spread;", end=" ")
        print(f"{sorted(ours)[5]:.3f} ms, PyTorch {sorted(theirs)[5]:.3f} ms (medians of 10)")


if __name__ == "__main__":
    main()
