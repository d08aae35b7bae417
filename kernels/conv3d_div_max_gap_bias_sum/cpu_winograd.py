"""conv3d_div_max_gap_bias_sum on the CPU: Winograd in three dimensions, with everything behind the convolution in the cache.

The convolution is computed in tiles of 2 x 4 x 4 positions: Winograd's F(2,3) along depth, F(4,3) along height and width.
Division, max pooling, average, bias and sum follow before anything is written; so do the sums of the weights' gradient.

Why it is faster
    PyTorch writes the convolution, 27.6 MB at batch 8, and passes over it twice more; its backward pass multiplies mostly
    zeros, since of a window only the maximum has a gradient. Here a window costs 36 products a pair of channels instead of 216.
    Vectors hold 16 tiles beside each other: a row of x is sorted by its column in the tile once, and after that no transform,
    product, maximum or sum moves a lane. Products of 4 output channels x 4 vectors stay in 16 registers. Gradients add up the 3
    x 3 x 3 x 8 inputs (or weights) at each maximum, an eighth of the dense way. What it costs: transforms that are a third of
    the arithmetic, and a second-level cache that holds 0.6 MB a thread.

Mathematics
    F(4,3), in one dimension, with the points 0, +-3/4, +-3/2 and infinity: y = A^T [(G w) * (B^T x)], where x has 6 values, w
    has 3, y has 4 and * is elementwise. Rows of B^T are coefficients of products of (t - point), rows of A^T powers of points,
    divided by |point|. The coefficients of B^T are exact in float32; G w is computed in float64, again in each call.
    F(2,3): B^T x = (x0 - x2, x1 + x2, x2 - x1, x3 - x1), A^T m = (m0 + (m1 + m2), (m1 - m2) + m3). Products are summed over
    input channels before A; half of A's additions along depth disappear in them, since they accumulate on m1 + m2 and m1 - m2.
    max(a / divisor) = max(sign * a) / |divisor|; average(max(conv + b)) = average(max(conv)) + b
    d out / d w = gradient / (windows * divisor) * sum over windows of the patch of x at the maximum
    Error of a value of the convolution, root mean square in units of the values' deviation: 5.4e-7, eager PyTorch 2.6e-7. Where
    the two largest of a window are nearer to each other than that, the window is computed again directly, and so is an input
    that is not finite or has values beyond 1e19: NaN, infinity and ties come out as in PyTorch. Risk: a value that is far
    larger than all around it leaves its rounding error in the 2 x 4 x 4 positions of its tiles. In training, inputs that are
    alike everywhere (an image of one colour) make all windows unclear, and the direct way slow.

Loops
    loop               over                                        where
    threads            blocks of 8 x 32 windows of all samples     at::parallel_for; a block has all depths
    transform_plane    input channels, new depths                  vectors of tiles; to a circular buffer of 4 depths, L2
    transform_depth    36 slices (points along height and width)   8 KB, L1
    multiply           4 output channels, depth points, channels   16 sums in registers, then A along depth
    fold_rows, _columns  6 slices; then all                        A along height, width; maximum, sum
    add_patches        rows of windows, output channels            27 x 8 sums in 18 registers
    scatter            rows of windows, output channels            27 x 8 weights in 18 registers, added in L1

Floor
    At batch 8: 16.8 MB read, and 0.88 GFLOP by F(2,3) in three dimensions: compute bound. The ladder's page has the times.

Takes
    float32 CPU tensors (batch, in_channels, depth, height, width), batch 0 included; any channels, kernel, bias shape and
    sum_dim that the original takes; pool_size an int or three; a divisor whose size is a normal float32. Anything else raises.
    Winograd is for kernel 3 and pool 2; others are computed directly, fused in the same way. Trains; second derivatives raise.
    Deterministic. An infinite input makes no other window's gradient NaN, as PyTorch's zeros do. Needs GCC or Clang.
"""

import functools
import hashlib
import math
import os
import shutil
import sys
import threading
import time

import torch
import torch.nn as nn

NAME = "conv3d_div_max_gap_bias_sum_cpu_winograd"

CPP = r"""
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

// The widest vectors of the machine. A tile of the product, OUTS output channels x ROWS vectors, stays in its registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, ROWS = 4;
#else
constexpr int LANES = 4, ROWS = 2;
#endif
constexpr int OUTS = 4;
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define UNROLL _Pragma("GCC unroll 16")
constexpr int OCT = 8;  // channels that lie beside each other where gradients are taken
typedef float oct __attribute__((vector_size(OCT * 4), aligned(4), may_alias));

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Winograd's algorithm is for the model's own kernel and pool; all others are computed directly.
constexpr bool WINOGRAD = KERNEL_D == 3 && KERNEL_H == 3 && KERNEL_W == 3 && POOL_D == 2 && POOL_H == 2 && POOL_W == 2;
constexpr int TILE = 4, POINTS = 6, SLICES = POINTS * POINTS, DEPTHS = 4;  // F(4,3) along rows and columns, F(2,3) along depth
// A unit of work is WINDOW_ROWS x WINDOW_COLUMNS windows at all depths. Winograd's lanes are tiles beside each other.
constexpr int WINDOW_ROWS = 2 * ROWS, WINDOW_COLUMNS = 2 * LANES, WINDOWS = WINDOW_ROWS * WINDOW_COLUMNS;
constexpr int TILE_INPUTS = TILE * ROWS + 2;  // input rows of a unit's tiles
constexpr int POOL = POOL_D * POOL_H * POOL_W, TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
constexpr int WINDOW_DEPTH = POOL_D + KERNEL_D - 1;  // depths of the input that one window needs
constexpr int REGION_ROWS = WINDOW_ROWS * POOL_H + KERNEL_H - 1, REGION_COLUMNS = WINDOW_COLUMNS * POOL_W + KERNEL_W - 1;
typedef std::conditional_t<(POOL <= 256), uint8_t, int32_t> Argmax;  // a window's, in the order of the scan

struct Shape {
    int64_t batch, channels, depth, height, width, outputs;            // of x, and out_channels
    int64_t slabs() const { return (depth - KERNEL_D + 1) / POOL_D; }  // windows along each dimension
    int64_t rows() const { return (height - KERNEL_H + 1) / POOL_H; }
    int64_t columns() const { return (width - KERNEL_W + 1) / POOL_W; }
    int64_t windows() const { return slabs() * rows() * columns(); }
    int64_t blocks() const { return (rows() + WINDOW_ROWS - 1) / WINDOW_ROWS; }
    int64_t chunks() const { return (columns() + WINDOW_COLUMNS - 1) / WINDOW_COLUMNS; }
    int64_t sample_units() const { return blocks() * chunks(); }
    int64_t plane() const { return height * width; }
    int64_t octs() const { return round_up(channels, OCT) / OCT; }
    int64_t groups() const { return round_up(outputs, OUTS) / OUTS; }
    int64_t padded_outputs() const { return round_up(outputs, LANES); }
    int64_t patch_floats() const { return octs() * TAPS * OCT; }  // [oct][tap][channel of it]
    int64_t transformed_floats() const { return DEPTHS * SLICES * channels * groups() * OUTS; }
    int64_t packed_floats() const { return padded_outputs() * channels * TAPS; }
    int64_t region_floats() const { return octs() * (2 * WINDOW_DEPTH - 1) * REGION_ROWS * REGION_COLUMNS * OCT; }
};

// What all threads read, and where they write; `patches` and `argmax` are null where no gradient needs them.
struct Job {
    Shape shape;
    bool tame;  // the weights are far from float32's limit
    const float* x;
    const float* transformed;  // weights: transform_weights
    const float* packed;       // weights: pack
    const float* tolerance;    // how far apart two values must be, over the largest input, to be told apart by Winograd's
    float* sums;               // [unit][outputs]: of the maxima
    float* patches;            // [unit][outputs][patch_floats]: sums of the input around the maxima
    Argmax* argmax;             // [batch][outputs][slab][row][column]
};

// A thread's memory.
struct Workspace {
    vec* planes;      // [point w][point h][channel][depth % 4][ROWS]: the input, transformed along rows and columns
    vec* slice;       // [point d][channel][ROWS]
    vec* products;    // [point h][group][2][OUTS][ROWS]: transformed back along depth
    vec* folded;      // [point w][group][2][4][OUTS][ROWS]: and along rows
    vec* totals;      // [outputs], and behind them lanes of outputs
    float* region;    // [oct][slot][REGION_ROWS][REGION_COLUMNS][OCT]: the input with channels innermost
    int32_t* argmax;  // [outputs][WINDOWS]

    static int64_t floats(Shape s) { return Workspace(nullptr, s).end; }
    Workspace(float* memory, Shape s) {
        auto take = [&](auto*& pointer, int64_t count) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + end);
            end += round_up(count, 16);
        };
        const int64_t row = WINOGRAD ? ROWS * LANES : 0, outputs = s.groups() * OUTS;
        take(planes, SLICES * s.channels * DEPTHS * row);
        take(slice, DEPTHS * s.channels * row);
        take(products, POINTS * 2 * outputs * row);
        take(folded, POINTS * 8 * outputs * row);
        take(totals, outputs * LANES + s.padded_outputs());
        take(region, s.region_floats() + LANES);
        take(argmax, s.padded_outputs() * WINDOWS);
    }
    int64_t end = 0;
};

// The part of a sample that a unit is about.
struct Part {
    int64_t sample, row, column, rows, columns;  // its first window, and how many windows there are
    Part(int64_t unit, Shape s) {
        sample = unit / s.sample_units();
        row = unit % s.sample_units() / s.chunks() * WINDOW_ROWS;
        column = unit % s.chunks() * WINDOW_COLUMNS;
        rows = std::min<int64_t>(WINDOW_ROWS, s.rows() - row);
        columns = std::min<int64_t>(WINDOW_COLUMNS, s.columns() - column);
    }
    int64_t corner(Shape s) const {  // of the first window's input, in x
        return sample * s.channels * s.depth * s.plane() + row * POOL_H * s.width + column * POOL_W;
    }
};

// Where a window of a part stands among its argmax indices: windows that share no input follow each other.
constexpr int64_t argmax_index(int64_t row, int64_t column) { return row * WINDOW_COLUMNS + column % 2 * LANES + column / 2; }

inline vec load(const float* from) { return *(const unaligned_vec*)from; }
inline vec larger(vec a, vec b) { return a > b ? a : b; }
inline vec smaller(vec a, vec b) { return a < b ? a : b; }

// Lane k of the result is lane first + step * k of a, which b follows.
template <int FIRST, int STEP>
inline vec pick(vec a, vec b) {
#ifdef __clang__
    return [&]<int... K>(std::integer_sequence<int, K...>) {
        return __builtin_shufflevector(a, b, (FIRST + STEP * K)...);
    }(std::make_integer_sequence<int, LANES>());
#else
    ivec lanes;
    for (int k = 0; k < LANES; ++k) lanes[k] = FIRST + STEP * k;
    return __builtin_shuffle(a, b, lanes);
#endif
}

// a0 b0 a1 b1 ... of the lanes from FIRST on.
template <int FIRST>
inline vec zip(vec a, vec b) {
#ifdef __clang__
    return [&]<int... K>(std::integer_sequence<int, K...>) {
        return __builtin_shufflevector(a, b, (FIRST + K / 2 + K % 2 * LANES)...);
    }(std::make_integer_sequence<int, LANES>());
#else
    ivec lanes;
    for (int k = 0; k < LANES; ++k) lanes[k] = FIRST + k / 2 + k % 2 * LANES;
    return __builtin_shuffle(a, b, lanes);
#endif
}

// F(4,3) with the points 0, +-P, +-Q and infinity, whose coefficients are exact in float32.
constexpr float P = 0.75f, Q = 1.5f;

template <class T>
inline void input_transform(const T (&x)[POINTS], T (&v)[POINTS]) {
    const T a = x[4] - Q * Q * x[2], b = x[3] - Q * Q * x[1], c = x[4] - P * P * x[2], d = x[3] - P * P * x[1];
    v[0] = P * P * Q * Q * x[0] + (x[4] - (P * P + Q * Q) * x[2]);
    v[1] = a + P * b;
    v[2] = a - P * b;
    v[3] = c + Q * d;
    v[4] = c - Q * d;
    v[5] = P * P * Q * Q * x[1] + (x[5] - (P * P + Q * Q) * x[3]);
}

template <class T>
inline void output_transform(const T (&m)[POINTS], T (&y)[TILE]) {
    const T s = m[1] + m[2], t = m[1] - m[2], u = m[3] + m[4], v = m[3] - m[4];
    y[0] = m[0] + 1 / P * s + 1 / Q * u;
    y[1] = t + v;
    y[2] = P * s + Q * u;
    y[3] = m[5] + P * P * t + Q * Q * v;
}

// weight (outputs, channels, 3, 3, 3) * sign -> [point w][point h][group][point d][channel][OUTS], in float64 until the end.
// Points d are in the order 1, 2, 0, 3, in which they are multiplied.
void transform_weights(const float* weight, float* transformed, float sign, Shape s) {
    constexpr double G2[DEPTHS][3] = {{0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {1, 0, 0}, {0, 0, 1}};
    double G4[POINTS][3] = {{}, {}, {}, {}, {}, {0, 0, 1}};
    const double points[] = {0, P, -P, Q, -Q};
    for (int i = 0; i < 5; ++i) {
        double scale = i ? 1 / std::abs(points[i]) : 1;  // output_transform divides by |point|
        for (int j = 0; j < 5; ++j) scale *= i == j ? 1 : points[i] - points[j];
        for (int k = 0; k < 3; ++k) G4[i][k] = (k == 2 ? points[i] * points[i] : k == 1 ? points[i] : 1) / scale;
    }
    for (int64_t o = 0; o < s.groups() * OUTS; ++o)
        for (int64_t c = 0; c < s.channels; ++c) {
            double w[3][3][3] = {}, along_w[3][3][POINTS], along_h[3][POINTS][POINTS];
            if (o < s.outputs)
                for (int i = 0; i < 27; ++i) w[i / 9][i / 3 % 3][i % 3] = sign * weight[(o * s.channels + c) * 27 + i];
            for (int i = 0; i < 3; ++i)
                for (int j = 0; j < 3; ++j)
                    for (int p = 0; p < POINTS; ++p)
                        along_w[i][j][p] = G4[p][0] * w[i][j][0] + G4[p][1] * w[i][j][1] + G4[p][2] * w[i][j][2];
            for (int i = 0; i < 3; ++i)
                for (int q = 0; q < POINTS; ++q)
                    for (int p = 0; p < POINTS; ++p)
                        along_h[i][q][p] =
                            G4[q][0] * along_w[i][0][p] + G4[q][1] * along_w[i][1][p] + G4[q][2] * along_w[i][2][p];
            for (int p = 0; p < POINTS; ++p)
                for (int q = 0; q < POINTS; ++q)
                    for (int d = 0; d < DEPTHS; ++d)
                        transformed[((((p * POINTS + q) * s.groups() + o / OUTS) * DEPTHS + d) * s.channels + c) * OUTS +
                                    o % OUTS] =
                            G2[d][0] * along_h[0][q][p] + G2[d][1] * along_h[1][q][p] + G2[d][2] * along_h[2][q][p];
        }
}

// weight (outputs, channels, taps) * sign -> [outputs / LANES][channel][tap][LANES].
void pack(const float* weight, float* packed, float sign, Shape s) {
    const int64_t inner = s.channels * TAPS;
    for (int64_t o = 0; o < s.padded_outputs(); ++o)
        for (int64_t k = 0; k < inner; ++k)
            packed[(o / LANES * inner + k) * LANES + o % LANES] = o < s.outputs ? sign * weight[o * inner + k] : 0.0f;
}

// What is seen of the input on the way: a sum of squares, which is finite if all is, and the largest value.
struct Seen {
    vec squares = {}, peak = {};
    bool finite() const {
        float sum = 0;
        for (int k = 0; k < LANES; ++k) sum += squares[k];
        return sum <= std::numeric_limits<float>::max();
    }
    float largest() const {
        float value = 0;
        for (int k = 0; k < LANES; ++k) value = std::max(value, peak[k]);
        return value;
    }
};

// The input transform along a row of x, of which `valid` columns exist: LANES tiles of 4 columns.
template <bool TRAIN>
inline void transform_row(const float* row, int64_t valid, vec (&v)[POINTS], Seen& seen) {
    alignas(64) float copy[TILE * LANES];
    vec next[2] = {};  // the two columns behind the last tile
    for (int k = 0; k < 2; ++k)
        if (TILE * LANES + k < valid) next[k][0] = row[TILE * LANES + k];
    if (valid < TILE * LANES) {
        std::copy_n(row, valid, copy);
        std::fill(copy + valid, copy + TILE * LANES, 0.0f);
        row = copy;
    }
    const vec in[] = {load(row), load(row + LANES), load(row + 2 * LANES), load(row + 3 * LANES)};
    const vec even[] = {pick<0, 2>(in[0], in[1]), pick<0, 2>(in[2], in[3])};
    const vec odd[] = {pick<1, 2>(in[0], in[1]), pick<1, 2>(in[2], in[3])};
    vec x[POINTS] = {pick<0, 2>(even[0], even[1]), pick<0, 2>(odd[0], odd[1]), pick<1, 2>(even[0], even[1]),
                     pick<1, 2>(odd[0], odd[1])};
    for (int k = 0; k < 2; ++k) x[4 + k] = pick<1, 1>(x[k], next[k]);
    input_transform(x, v);
    seen.squares += v[0] * v[0];  // of x[0], x[2], x[4], and of the others
    seen.squares += v[5] * v[5];
    if (TRAIN)
        for (int k = 0; k < POINTS; ++k) seen.peak = larger(seen.peak, (vec)((ivec)x[k] & 0x7fffffff));
}

// The input transform along rows and columns of one depth of a channel, of which `rows` rows exist; t: [slice], `stride` apart.
// A missing row may stand for anything: only outputs that are in no window depend on it.
template <bool TRAIN>
inline void transform_plane(const float* plane, int64_t width, int64_t rows, int64_t valid, vec* t, int64_t stride,
                            Seen& seen) {
    vec w[TILE_INPUTS][POINTS];
    for (int64_t r = 0; r < TILE_INPUTS; ++r) transform_row<TRAIN>(plane + std::min(r, rows - 1) * width, valid, w[r], seen);
    for (int p = 0; p < POINTS; ++p)
        for (int r = 0; r < ROWS; ++r) {
            vec x[POINTS], v[POINTS];
            for (int i = 0; i < POINTS; ++i) x[i] = w[TILE * r + i][p];
            input_transform(x, v);
            for (int q = 0; q < POINTS; ++q) t[(p * POINTS + q) * stride + r] = v[q];
        }
}

// The last part of the input transform, along depth, of one slice: F(2,3), whose points are in the order 1, 2, 0, 3.
__attribute__((noinline)) void transform_depth(const vec* t, vec* v, int64_t channels, int64_t first) {
    const int64_t point = channels * ROWS;
    const vec* x[DEPTHS];
    for (int d = 0; d < DEPTHS; ++d) x[d] = t + (first + d) % DEPTHS * ROWS;
    for (int64_t c = 0; c < channels; ++c, v += ROWS)
        for (int r = 0; r < ROWS; ++r) {
            const int64_t i = c * DEPTHS * ROWS + r;
            v[r] = x[1][i] + x[2][i];
            v[point + r] = x[2][i] - x[1][i];
            v[2 * point + r] = x[0][i] - x[2][i];
            v[3 * point + r] = x[3][i] - x[1][i];
        }
}

__attribute__((always_inline)) inline void accumulate(vec (&acc)[OUTS][ROWS], const vec* v, const float* u, int64_t channels) {
    for (int64_t c = 0; c < channels; ++c, v += ROWS, u += OUTS) {
        vec in[ROWS];
        UNROLL for (int r = 0; r < ROWS; ++r) in[r] = v[r];
        UNROLL for (int o = 0; o < OUTS; ++o)
            UNROLL for (int r = 0; r < ROWS; ++r) acc[o][r] += in[r] * u[o];
    }
}

// The products of one slice, for OUTS output channels, and the output transform along depth, y0 = m0 + (m1 + m2) and
// y1 = (m1 - m2) + m3, whose last terms are accumulated on the sums. z: [2][OUTS][ROWS]. Between two points what waits stays in
// memory: GCC would keep it in registers, and spill.
__attribute__((noinline)) void multiply(const vec* v, const float* u, int64_t channels, vec* z) {
    vec acc[OUTS][ROWS];
    vec *z0 = z, *z1 = z + OUTS * ROWS;
    const int64_t point_v = channels * ROWS, point_u = channels * OUTS;
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) acc[i / ROWS][i % ROWS] = vec{};
    accumulate(acc, v, u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) z0[i] = acc[i / ROWS][i % ROWS], acc[i / ROWS][i % ROWS] = vec{};
    asm("" ::: "memory");
    accumulate(acc, v + point_v, u + point_u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) {
        const vec m1 = z0[i];
        z1[i] = m1 - acc[i / ROWS][i % ROWS];
        acc[i / ROWS][i % ROWS] += m1;
    }
    asm("" ::: "memory");
    accumulate(acc, v + 2 * point_v, u + 2 * point_u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) z0[i] = acc[i / ROWS][i % ROWS], acc[i / ROWS][i % ROWS] = z1[i];
    accumulate(acc, v + 3 * point_v, u + 3 * point_u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) z1[i] = acc[i / ROWS][i % ROWS];
}

// The output transform along rows: products -> folded, of one point w.
__attribute__((noinline)) void fold_rows(const vec* products, vec* folded, int64_t groups) {
    constexpr int REGISTER_TILE = OUTS * ROWS;
    for (int64_t g = 0; g < groups * 2; ++g)
        for (int i = 0; i < REGISTER_TILE; ++i) {
            vec m[POINTS], y[TILE];
            for (int q = 0; q < POINTS; ++q) m[q] = products[(q * groups * 2 + g) * REGISTER_TILE + i];
            output_transform(m, y);
            for (int h = 0; h < TILE; ++h) folded[(g * TILE + h) * REGISTER_TILE + i] = y[h];
        }
}

// The running maximum of a window. With TRAIN also the second largest, and the first position of the largest.
template <bool TRAIN>
struct Best {
    vec value, second;
    ivec position;
    void start(vec first) {
        value = first;
        second = vec{} - std::numeric_limits<float>::infinity();
        position = ivec{};
    }
    void take(vec next, int where) {
        if (TRAIN) {
            second = larger(second, smaller(value, next));
            position = next > value ? ivec{} + where : position;
        }
        value = larger(value, next);
    }
};

// The output transform along columns, and pooling. Adds to totals; with TRAIN gives argmax indices, -1 where the two largest
// values of a window are nearer to each other than `tolerance`, and says whether there are any. exists: the lanes of either
// column.
template <bool TRAIN>
__attribute__((noinline)) bool fold_columns(const vec* folded, vec* totals, int32_t* argmax, const float* tolerance, float peak,
                                            const ivec (&exists)[2], int64_t rows, int64_t groups) {
    const int64_t point = groups * 2 * TILE * OUTS * ROWS;
    ivec unclear = {};
    for (int64_t o = 0; o < groups * OUTS; ++o) {
        const vec* from = folded + o / OUTS * 2 * TILE * OUTS * ROWS + o % OUTS * ROWS;
        vec total = {};
        for (int64_t row = 0; row < rows; ++row) {
            Best<TRAIN> best[2];
            UNROLL for (int k = 0; k < 4; ++k) {  // depth and row in the window
                vec m[POINTS], y[TILE];
                for (int p = 0; p < POINTS; ++p)
                    m[p] = from[p * point + (k / 2 * TILE + row % 2 * 2 + k % 2) * OUTS * ROWS + row / 2];
                output_transform(m, y);
                UNROLL for (int w = 0; w < 2; ++w) {
                    k == 0 ? best[w].start(y[2 * w]) : best[w].take(y[2 * w], 2 * k);
                    best[w].take(y[2 * w + 1], 2 * k + 1);
                }
            }
            for (int w = 0; w < 2; ++w) {
                total += (vec)((ivec)best[w].value & exists[w]);
                if (TRAIN) {
                    const ivec near = best[w].value - best[w].second <= vec{} + tolerance[o] * peak;
                    *(ivec*)(argmax + o * WINDOWS + row * WINDOW_COLUMNS + w * LANES) = best[w].position | near;
                    unclear |= near & exists[w];
                }
            }
        }
        totals[o] += total;
    }
    int32_t any = 0;
    if (TRAIN)
        for (int k = 0; k < LANES; ++k) any |= unclear[k];
    return any;
}

// COUNT windows beside each other, directly, for LANES output channels: their maxima as PyTorch finds them, the last NaN or
// else the first of the largest. Every position is computed in the same way, so equal patches give equal values.
template <int COUNT>
__attribute__((noinline)) void direct_windows(const float* corner, const float* packed, Shape s, vec* best, ivec* position) {
    for (int t = 0; t < COUNT; ++t) {
        best[t] = vec{} - std::numeric_limits<float>::infinity();
        position[t] = ivec{};
    }
    for (int p = 0; p < POOL; ++p) {
        const float* x = corner + (p / (POOL_H * POOL_W) * s.height + p / POOL_W % POOL_H) * s.width + p % POOL_W;
        const float* w = packed;
        vec acc[COUNT] = {};
        for (int64_t c = 0; c < s.channels; ++c)
            for (int d = 0; d < KERNEL_D; ++d)
                for (int h = 0; h < KERNEL_H; ++h) {
                    const float* row = x + ((c * s.depth + d) * s.height + h) * s.width;
                    for (int k = 0; k < KERNEL_W; ++k, w += LANES) {
                        const vec weight = load(w);
                        UNROLL for (int t = 0; t < COUNT; ++t) acc[t] += weight * row[t * POOL_W + k];
                    }
                }
        for (int t = 0; t < COUNT; ++t) {
            const ivec take = (acc[t] > best[t]) | (acc[t] != acc[t]);
            best[t] = take ? acc[t] : best[t];
            position[t] = take ? ivec{} + p : position[t];
        }
    }
}

// The direct way for COUNT windows of a row from `column` on: adds to totals, in lanes of output channels, and gives argmax
// indices.
template <int COUNT>
void direct_row(const Job& job, const float* corner, int64_t row, int64_t column, vec* totals, int32_t* argmax) {
    const Shape& s = job.shape;
    const float* first = corner + row * POOL_H * s.width + column * POOL_W;
    for (int64_t o = 0; o < s.padded_outputs(); o += LANES) {
        vec best[COUNT];
        ivec position[COUNT];
        direct_windows<COUNT>(first, job.packed + o * s.channels * TAPS, s, best, position);
        for (int t = 0; t < COUNT; ++t) {
            totals[o / LANES] += best[t];
            for (int k = 0; k < LANES && o + k < s.outputs; ++k)
                argmax[(o + k) * WINDOWS + argmax_index(row, column + t)] = position[t][k];
        }
    }
}

// Brings depths first to end of x into the region, with channels innermost. Depth d is in slot d % WINDOW_DEPTH and once more
// WINDOW_DEPTH slots later, so that the depths of any window follow each other.
void load_region(const Job& job, const Part& part, int64_t first, int64_t end, float* region) {
    const Shape& s = job.shape;
    const int64_t rows = std::min<int64_t>(REGION_ROWS, s.height - part.row * POOL_H);
    const int64_t columns = std::min<int64_t>(REGION_COLUMNS, s.width - part.column * POOL_W);
    constexpr int64_t SLOTS = 2 * WINDOW_DEPTH - 1, SLOT = REGION_ROWS * REGION_COLUMNS * OCT;
    for (int64_t g = 0; g < s.octs(); ++g)
        for (int64_t d = first; d < end; ++d) {
            float* slot = region + (g * SLOTS + d % WINDOW_DEPTH) * SLOT;
            const int64_t channels = std::min<int64_t>(OCT, s.channels - g * OCT), channel = s.depth * s.plane();
            for (int64_t r = 0; r < rows; ++r) {
                const float* from = job.x + part.corner(s) + g * OCT * channel + d * s.plane() + r * s.width;
                float* to = slot + r * REGION_COLUMNS * OCT;
                int64_t w = 0;
                for (; w + LANES <= columns; w += LANES) {
                    vec a[OCT] = {}, b[OCT];
                    for (int64_t c = 0; c < channels; ++c) a[c] = load(from + c * channel + w);
                    for (int stage = 0; stage < 3; ++stage) {
                        for (int c = 0; c < 4; ++c) {
                            b[2 * c] = zip<0>(a[c], a[c + 4]);
                            b[2 * c + 1] = zip<LANES / 2>(a[c], a[c + 4]);
                        }
                        std::copy_n(b, OCT, a);
                    }
                    for (int c = 0; c < OCT; ++c) *(unaligned_vec*)(to + w * OCT + c * LANES) = a[c];
                }
                for (; w < columns; ++w)
                    for (int c = 0; c < OCT; ++c) to[w * OCT + c] = c < channels ? from[c * channel + w] : 0.0f;
            }
            if (d % WINDOW_DEPTH + WINDOW_DEPTH < SLOTS) std::copy_n(slot, SLOT, slot + WINDOW_DEPTH * SLOT);
        }
}

// Distance in the region from a window's corner to the corner of the patch at a position.
constexpr int64_t patch_offset(int64_t position) {
    return ((position / (POOL_H * POOL_W) * REGION_ROWS + position / POOL_W % POOL_H) * REGION_COLUMNS + position % POOL_W) *
           OCT;
}

constexpr auto PATCH_OFFSETS = [] {
    std::array<int32_t, POOL> offsets{};
    for (int p = 0; p < POOL; ++p) offsets[p] = patch_offset(p);
    return offsets;
}();

// Kernel depths whose taps are summed at the same time, as many as registers hold.
constexpr int PASS = LANES == 16 && TAPS <= 32 ? KERNEL_D : 1, PASS_ROWS = PASS * KERNEL_H;
// A tap row has PAIRS vectors of two taps, where vectors are that wide, and SINGLES of one.
constexpr int PAIRS = LANES == 16 ? KERNEL_W / 2 : 0, SINGLES = KERNEL_W - 2 * PAIRS;

constexpr int64_t tap_row(int64_t row) {  // distance in the region between a patch's corner and one of its rows
    return (row / KERNEL_H * REGION_ROWS + row % KERNEL_H) * REGION_COLUMNS * OCT;
}

// sums[tap][OCT] += the patches of a row of windows at their maxima, PASS kernel depths.
__attribute__((noinline)) void add_patches(const float* region, int64_t columns, const int32_t* argmax, float* sums) {
    vec pairs[PASS_ROWS][PAIRS + 1] = {};
    oct singles[PASS_ROWS][SINGLES + 1] = {};
    for (int64_t w = 0; w < columns; ++w) {
        const float* patch = region + w * POOL_W * OCT + PATCH_OFFSETS[argmax[argmax_index(0, w)]];
        UNROLL for (int i = 0; i < PASS_ROWS; ++i) {
            UNROLL for (int k = 0; k < PAIRS; ++k) pairs[i][k] += load(patch + tap_row(i) + 2 * k * OCT);
            UNROLL for (int k = 0; k < SINGLES; ++k) singles[i][k] += *(const oct*)(patch + tap_row(i) + (2 * PAIRS + k) * OCT);
        }
    }
    for (int i = 0; i < PASS_ROWS; ++i) {
        float* to = sums + i * KERNEL_W * OCT;
        for (int k = 0; k < PAIRS; ++k) *(unaligned_vec*)(to + 2 * k * OCT) += pairs[i][k];
        for (int k = 0; k < SINGLES; ++k) *(oct*)(to + (2 * PAIRS + k) * OCT) += singles[i][k];
    }
}

// Where the maxima of a slab of windows are is known: what gradients need of it.
void keep_for_gradients(const Job& job, const Part& part, int64_t unit, int64_t slab, Workspace& work) {
    const Shape& s = job.shape;
    if (job.patches) {
        constexpr int64_t SLOT = REGION_ROWS * REGION_COLUMNS * OCT;
        load_region(job, part, slab ? (slab - 1) * POOL_D + WINDOW_DEPTH : 0, slab * POOL_D + WINDOW_DEPTH, work.region);
        for (int64_t row = 0; row < part.rows; ++row)
            for (int64_t g = 0; g < s.octs(); ++g)
                for (int64_t o = 0; o < s.outputs; ++o)
                    for (int d = 0; d < KERNEL_D; d += PASS)
                        add_patches(work.region + (g * (2 * WINDOW_DEPTH - 1) + slab * POOL_D % WINDOW_DEPTH + d) * SLOT +
                                        row * POOL_H * REGION_COLUMNS * OCT,
                                    part.columns, work.argmax + o * WINDOWS + argmax_index(row, 0),
                                    job.patches + (unit * s.outputs + o) * s.patch_floats() +
                                        (g * TAPS + d * KERNEL_H * KERNEL_W) * OCT);
    }
    if (job.argmax)
        for (int64_t o = 0; o < s.outputs; ++o)
            for (int64_t row = 0; row < part.rows; ++row) {
                Argmax* to =
                    job.argmax + (((part.sample * s.outputs + o) * s.slabs() + slab) * s.rows() + part.row + row) * s.columns();
                for (int64_t w = 0; w < part.columns; ++w)
                    to[part.column + w] = work.argmax[o * WINDOWS + argmax_index(row, w)];
            }
}

// Where two of a window's largest values are so near to each other that Winograd's rounding could decide, the direct way does.
void settle(const Job& job, const Part& part, const float* corner, Workspace& work) {
    const Shape& s = job.shape;
    for (int64_t row = 0; row < part.rows; ++row)
        for (int64_t w = 0; w < part.columns; ++w) {
            bool unclear = false;
            for (int64_t o = 0; o < s.outputs; ++o) unclear |= work.argmax[o * WINDOWS + argmax_index(row, w)] < 0;
            if (unclear) direct_row<1>(job, corner, row, w, work.totals + s.groups() * OUTS, work.argmax);
        }
}

// Fetches into the second-level cache what transform_plane will read: rows begin to end of all channels' `depths` depths.
inline void prefetch(const float* corner, int64_t begin, int64_t end, int64_t depths, Shape s) {
    for (int64_t i = begin; i < end; ++i) {
        const float* row =
            corner + (i / TILE_INPUTS / depths * s.depth + i / TILE_INPUTS % depths) * s.plane() + i % TILE_INPUTS * s.width;
        for (int w = 0; w < TILE * LANES; w += 16) __builtin_prefetch(row + w, 0, 2);
    }
}

// The sums of a unit's maxima, and what gradients need, by Winograd's algorithm. False if the input is not finite, or nearly
// so: sums and differences of it would not give what the convolution gives.
template <bool TRAIN>
bool winograd_unit(const Job& job, int64_t unit, Workspace& work) {
    const Shape& s = job.shape;
    const Part part(unit, s);
    const float* corner = job.x + part.corner(s);
    const int64_t stride = s.channels * DEPTHS * ROWS, groups = s.groups();
    ivec exists[2];
    for (int k = 0; k < WINDOW_COLUMNS; ++k) exists[k % 2][k / 2] = k < part.columns ? -1 : 0;
    std::fill_n(work.totals, groups * OUTS, vec{});
    Seen seen;
    for (int64_t slab = 0; slab < s.slabs(); ++slab) {
        for (int64_t c = 0; c < s.channels; ++c)
            for (int64_t d = slab ? 2 * slab + 2 : 0; d < 2 * slab + 4; ++d)
                transform_plane<TRAIN>(corner + (c * s.depth + d) * s.plane(), s.width, s.height - part.row * 2,
                                       s.width - part.column * 2, work.planes + (c * DEPTHS + d % DEPTHS) * ROWS, stride, seen);
        if (!seen.finite()) return false;
        // While this slab is computed, what comes next is fetched: two more depths, or the next unit below.
        const bool last = slab + 1 == s.slabs();
        const float* next = last ? corner + TILE * ROWS * s.width : corner + (2 * slab + 4) * s.plane();
        const int64_t depths = last ? DEPTHS : 2, lines = depths * s.channels * TILE_INPUTS;
        const float* u = job.transformed;
        for (int i = 0; i < SLICES; ++i) {
            prefetch(next, lines * i / SLICES, lines * (i + 1) / SLICES, depths, s);
            transform_depth(work.planes + i * stride, work.slice, s.channels, 2 * slab);
            for (int64_t g = 0; g < groups; ++g, u += DEPTHS * s.channels * OUTS)
                multiply(work.slice, u, s.channels, work.products + (i % POINTS * groups + g) * 2 * OUTS * ROWS);
            if (i % POINTS == POINTS - 1)
                fold_rows(work.products, work.folded + i / POINTS * groups * 2 * TILE * OUTS * ROWS, groups);
        }
        const bool unclear = fold_columns<TRAIN>(work.folded, work.totals, work.argmax, job.tolerance, seen.largest(), exists,
                                                 part.rows, groups);
        if (TRAIN) {
            if (unclear) settle(job, part, corner + 2 * slab * s.plane(), work);
            keep_for_gradients(job, part, unit, slab, work);
        }
    }
    for (int64_t o = 0; o < s.outputs; ++o) {
        float sum = 0;
        for (int k = 0; k < LANES; ++k) sum += work.totals[o][k];
        job.sums[unit * s.outputs + o] = sum;
    }
    return true;
}

// The same directly, for any kernel, pool and values.
template <bool TRAIN>
void direct_unit(const Job& job, int64_t unit, Workspace& work) {
    const Shape& s = job.shape;
    const Part part(unit, s);
    constexpr int COUNT = 8;
    float* sums = job.sums + unit * s.outputs;
    std::fill_n(sums, s.outputs, 0.0f);
    for (int64_t slab = 0; slab < s.slabs(); ++slab) {
        const float* corner = job.x + part.corner(s) + slab * POOL_D * s.plane();
        for (int64_t row = 0; row < part.rows; ++row) {
            std::fill_n(work.totals, s.padded_outputs() / LANES, vec{});
            int64_t w = 0;
            for (; w + COUNT <= part.columns; w += COUNT) direct_row<COUNT>(job, corner, row, w, work.totals, work.argmax);
            for (; w < part.columns; ++w) direct_row<1>(job, corner, row, w, work.totals, work.argmax);
            for (int64_t o = 0; o < s.outputs; ++o) sums[o] += work.totals[o / LANES][o % LANES];
        }
        if (TRAIN) keep_for_gradients(job, part, unit, slab, work);
    }
}

template <bool TRAIN>
void compute_unit(const Job& job, int64_t unit, Workspace& work) {
    const int64_t patches = job.shape.outputs * job.shape.patch_floats();
    if (job.patches) std::fill_n(job.patches + unit * patches, patches, 0.0f);
    if (WINOGRAD && job.tame && winograd_unit<TRAIN>(job, unit, work)) return;
    if (job.patches) std::fill_n(job.patches + unit * patches, patches, 0.0f);
    direct_unit<TRAIN>(job, unit, work);
}

// The gradient of x. A unit owns the rows and columns of its windows' first inputs; windows before them reach into it, too.
constexpr int BEFORE_H = (POOL_H + KERNEL_H - 2) / POOL_H, BEFORE_W = (POOL_W + KERNEL_W - 2) / POOL_W;
constexpr int GRAD_ROWS = (WINDOW_ROWS + BEFORE_H + 1) * POOL_H + KERNEL_H - 1;
constexpr int GRAD_COLUMNS = (int)round_up((WINDOW_COLUMNS + BEFORE_W + 1) * POOL_W + KERNEL_W - 1, LANES);
constexpr int64_t GRAD_PLANE = GRAD_ROWS * GRAD_COLUMNS * OCT;

constexpr auto GRAD_OFFSETS = [] {  // from a window's corner to the corner of the patch at a position
    std::array<int32_t, POOL> offsets{};
    for (int p = 0; p < POOL; ++p)
        offsets[p] = ((p / (POOL_H * POOL_W) * GRAD_ROWS + p / POOL_W % POOL_H) * GRAD_COLUMNS + p % POOL_W) * OCT;
    return offsets;
}();

// Adds the weights `taps` [tap][OCT], PASS kernel depths, to the patches of a row of windows. Every second window comes first:
// what was just stored cannot be loaded again at once by a vector that begins elsewhere.
__attribute__((noinline)) void scatter(float* planes, int64_t columns, const Argmax* argmax, const float* taps) {
    vec pairs[PASS_ROWS][PAIRS + 1];
    oct singles[PASS_ROWS][SINGLES + 1];
    for (int i = 0; i < PASS_ROWS; ++i) {
        for (int k = 0; k < PAIRS; ++k) pairs[i][k] = load(taps + (i * KERNEL_W + 2 * k) * OCT);
        for (int k = 0; k < SINGLES; ++k) singles[i][k] = *(const oct*)(taps + (i * KERNEL_W + 2 * PAIRS + k) * OCT);
    }
    for (int parity = 0; parity < 2; ++parity)
        for (int64_t w = parity; w < columns; w += 2) {
            float* patch = planes + w * POOL_W * OCT + GRAD_OFFSETS[argmax[w]];
            UNROLL for (int i = 0; i < PASS_ROWS; ++i) {
                float* to = patch + (i / KERNEL_H * GRAD_ROWS + i % KERNEL_H) * GRAD_COLUMNS * OCT;
                UNROLL for (int k = 0; k < PAIRS; ++k) *(unaligned_vec*)(to + 2 * k * OCT) += pairs[i][k];
                UNROLL for (int k = 0; k < SINGLES; ++k) *(oct*)(to + (2 * PAIRS + k) * OCT) += singles[i][k];
            }
        }
}

struct GradJob {
    Shape shape;
    const float* taps;    // [batch][oct][outputs][tap][OCT]: weights times the gradient of a window's maximum
    const Argmax* argmax;  // as in Job
    float* grad_x;
};

// One depth of the gradient, `rows` x `columns` from `from` on, with channels innermost, to grad_x, with channels apart.
void store_depth(const float* from, float* to, int64_t rows, int64_t columns, int64_t channels, Shape s) {
    const int64_t channel = s.depth * s.plane();
    for (int64_t r = 0; r < rows; ++r, from += GRAD_COLUMNS * OCT, to += s.width) {
        int64_t w = 0;
        for (; w + LANES <= columns; w += LANES) {
            vec a[OCT], b[OCT];
            for (int c = 0; c < OCT; ++c) a[c] = load(from + w * OCT + c * LANES);
            for (int stage = 0; stage < 3; ++stage) {
                for (int c = 0; c < 4; ++c) {
                    b[c] = pick<0, 2>(a[2 * c], a[2 * c + 1]);
                    b[c + 4] = pick<1, 2>(a[2 * c], a[2 * c + 1]);
                }
                std::copy_n(b, OCT, a);
            }
            for (int64_t c = 0; c < channels; ++c) *(unaligned_vec*)(to + c * channel + w) = a[c];
        }
        for (; w < columns; ++w)
            for (int64_t c = 0; c < channels; ++c) to[c * channel + w] = from[w * OCT + c];
    }
}

// The gradient of a unit's part of x. planes: [WINDOW_DEPTH][GRAD_ROWS][GRAD_COLUMNS][OCT], of the slab that is added.
void input_gradient_unit(const GradJob& job, int64_t unit, float* planes) {
    const Shape& s = job.shape;
    const Part part(unit, s);
    const int64_t row = std::max<int64_t>(0, part.row - BEFORE_H), rows = part.row + part.rows - row;
    const int64_t column = std::max<int64_t>(0, part.column - BEFORE_W), columns = part.column + part.columns - column;
    const int64_t top = part.row * POOL_H, left = part.column * POOL_W;
    const int64_t bottom = part.row + part.rows < s.rows() ? top + WINDOW_ROWS * POOL_H : s.height;
    const int64_t right = part.column + part.columns < s.columns() ? left + WINDOW_COLUMNS * POOL_W : s.width;
    const float* owned = planes + ((top - row * POOL_H) * GRAD_COLUMNS + left - column * POOL_W) * OCT;
    for (int64_t g = 0; g < s.octs(); ++g) {
        const int64_t channels = std::min<int64_t>(OCT, s.channels - g * OCT);
        float* to = job.grad_x + (part.sample * s.channels + g * OCT) * s.depth * s.plane() + top * s.width + left;
        std::fill_n(planes, WINDOW_DEPTH * GRAD_PLANE, 0.0f);
        for (int64_t slab = 0; slab < s.slabs(); ++slab) {
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t o = 0; o < s.outputs; ++o)
                    for (int d = 0; d < KERNEL_D; d += PASS)
                        scatter(
                            planes + d * GRAD_PLANE + r * POOL_H * GRAD_COLUMNS * OCT, columns,
                            job.argmax +
                                (((part.sample * s.outputs + o) * s.slabs() + slab) * s.rows() + row + r) * s.columns() +
                                column,
                            job.taps + (((part.sample * s.octs() + g) * s.outputs + o) * TAPS + d * KERNEL_H * KERNEL_W) * OCT);
            // The first POOL_D depths are done. The last slab leaves all that there are, and zeros behind them.
            const int64_t done = slab + 1 < s.slabs() ? POOL_D : s.depth - slab * POOL_D;
            for (int64_t d = 0; d < done; ++d) {
                if (d == WINDOW_DEPTH) std::fill_n(planes, GRAD_PLANE, 0.0f);
                store_depth(owned + (d < WINDOW_DEPTH ? d : 0) * GRAD_PLANE, to + (slab * POOL_D + d) * s.plane(), bottom - top,
                            right - left, channels, s);
            }
            std::copy(planes + POOL_D * GRAD_PLANE, planes + WINDOW_DEPTH * GRAD_PLANE, planes);
            std::fill_n(planes + (KERNEL_D - 1) * GRAD_PLANE, POOL_D * GRAD_PLANE, 0.0f);
        }
    }
}
"""

BINDING = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

// Messages are put together without streams: those crash in a library that is linked with a libstdc++ of its own.
static std::string text(const char* value) { return value; }
static std::string text(at::ScalarType value) { return c10::toString(value); }
static std::string text(const c10::Device& value) { return value.str(); }
template <class T>
static std::enable_if_t<std::is_arithmetic_v<T>, std::string> text(T value) {
    return std::to_string(value);
}
static std::string text(at::IntArrayRef values) {
    std::string list;
    for (const int64_t value : values) list += (list.empty() ? "[" : ", ") + std::to_string(value);
    return list.empty() ? "[]" : list + "]";
}
template <class... Parts>
static std::string message(const Parts&... parts) {
    return (text(parts) + ...);
}

// Memory that begins with a cache line; what is in it is not defined.
class Memory {
    struct alignas(64) CacheLine {
        float values[16];
    };
    std::unique_ptr<CacheLine[]> lines_;

  public:
    explicit Memory(int64_t floats) : lines_(new CacheLine[round_up(floats, 16) / 16 + 1]) {}
    float* data() { return lines_[0].values; }
};

constexpr at::ScalarType ARGMAX = sizeof(Argmax) == 1 ? at::kByte : at::kInt;

static void check_float(const char* what, const at::Tensor& t) {
    TORCH_CHECK(
        t.is_cpu() && t.scalar_type() == at::kFloat,
        message("conv_pool: expected ", what, " to be a float32 CPU tensor, got ", t.scalar_type(), " on ", t.device()));
}

static void check_divisor(double divisor) {
    TORCH_CHECK(
        std::abs(divisor) >= std::numeric_limits<float>::min() && std::abs(divisor) <= std::numeric_limits<float>::max(),
        message("conv_pool: expected a divisor whose size is a normal float32, got ", divisor));
}

static Shape checked_shape(at::IntArrayRef x, at::IntArrayRef weight) {
    TORCH_CHECK(x.size() == 5, message("conv_pool: expected x of 5 dimensions, got ", x.size()));
    TORCH_CHECK(weight.size() == 5 && weight[0] > 0 && weight[1] == x[1] && weight[2] == KERNEL_D && weight[3] == KERNEL_H &&
                    weight[4] == KERNEL_W,
                message("conv_pool: expected a weight of (outputs, ", x[1], ", ", KERNEL_D, ", ", KERNEL_H, ", ", KERNEL_W,
                        "), got ", weight));
    TORCH_CHECK(x[2] >= KERNEL_D + POOL_D - 1 && x[3] >= KERNEL_H + POOL_H - 1 && x[4] >= KERNEL_W + POOL_W - 1,
                message("conv_pool: a window of ", POOL_D, " x ", POOL_H, " x ", POOL_W, " behind a kernel of ", KERNEL_D,
                        " x ", KERNEL_H, " x ", KERNEL_W, " does not fit into ", x[2], " x ", x[3], " x ", x[4]));
    return {x[0], x[1], x[2], x[3], x[4], weight[0]};
}

// tolerance[o], see Job, and whether the weights are so small that no sum in Winograd's algorithm can overflow where the
// input's squares do not.
static bool measure_weights(const float* weight, float* tolerance, Shape s) {
    double all = 0;
    for (int64_t o = 0; o < s.outputs; ++o) {
        double squares = 0;
        for (int64_t i = 0; i < s.channels * TAPS; ++i) {
            const double value = weight[o * s.channels * TAPS + i];
            squares += value * value;
            all += std::abs(value);
        }
        tolerance[o] = std::sqrt(squares) / (1 << 18);
    }
    return all < 1e15;
}

// {sums over windows of the maxima of sign * convolution [unit][outputs], patches, argmax}.
template <bool TRAIN>
static std::vector<float> sums_of_maxima(const at::Tensor& x, const at::Tensor& weight, double divisor, Shape s, float* patches,
                                         Argmax* argmax) {
    const float sign = divisor < 0 ? -1.0f : 1.0f, *w = weight.const_data_ptr<float>();
    Memory transformed(WINOGRAD ? s.transformed_floats() : 0), packed(s.packed_floats()), tolerance(s.groups() * OUTS);
    std::fill_n(tolerance.data(), s.groups() * OUTS, 0.0f);
    const bool tame = measure_weights(w, tolerance.data(), s);
    if (WINOGRAD && tame) transform_weights(w, transformed.data(), sign, s);
    pack(w, packed.data(), sign, s);
    const int64_t units = s.batch * s.sample_units();
    std::vector<float> sums(units * s.outputs);
    const Job job{s,       tame,  x.const_data_ptr<float>(), transformed.data(), packed.data(), tolerance.data(), sums.data(),
                  patches, argmax};
    at::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
        Memory memory(Workspace::floats(s));
        Workspace work(memory.data(), s);
        for (int64_t unit = begin; unit < end; ++unit) compute_unit<TRAIN>(job, unit, work);
    });
    return sums;
}

// The output: averages (batch, outputs, 1, 1, 1), or with a bias, one value a channel, their sum with it (batch, 1, 1, 1).
static at::Tensor finish(const std::vector<float>& sums, const at::Tensor& conv_bias_in, double divisor,
                         const std::optional<at::Tensor>& bias_in, Shape s) {
    const at::Tensor conv_bias = conv_bias_in.contiguous(), bias = bias_in ? bias_in->contiguous() : at::Tensor();
    at::Tensor out = bias_in ? at::empty({s.batch, 1, 1, 1}, conv_bias.options())
                             : at::empty({s.batch, s.outputs, 1, 1, 1}, conv_bias.options());
    float* to = out.mutable_data_ptr<float>();
    for (int64_t b = 0; b < s.batch; ++b) {
        double total = 0;
        for (int64_t o = 0; o < s.outputs; ++o) {
            double sum = 0;
            for (int64_t i = 0; i < s.sample_units(); ++i) sum += sums[(b * s.sample_units() + i) * s.outputs + o];
            const double sign = divisor < 0 ? -1 : 1;
            const double average = (sum / s.windows() + sign * conv_bias.const_data_ptr<float>()[o]) / std::abs(divisor);
            if (bias_in)
                total += average + bias.const_data_ptr<float>()[o];
            else
                to[b * s.outputs + o] = average;
        }
        if (bias_in) to[b] = total;
    }
    return out;
}

static Shape check_all(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias, double divisor,
                       const std::optional<at::Tensor>& bias) {
    check_float("x", x);
    check_float("the weight", weight);
    check_float("the convolution's bias", conv_bias);
    if (bias) check_float("the bias", *bias);
    const Shape s = checked_shape(x.sizes(), weight.sizes());
    for (const at::Tensor& b : {conv_bias, bias.value_or(conv_bias)})
        TORCH_CHECK(b.dim() == 1 && b.size(0) == s.outputs,
                    message("conv_pool: expected a bias of [", s.outputs, "], got ", b.sizes()));
    check_divisor(divisor);
    return s;
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& conv_bias, double divisor,
                   const std::optional<at::Tensor>& bias) {
    const Shape s = check_all(x, weight, conv_bias, divisor, bias);
    return finish(sums_of_maxima<false>(x.contiguous(), weight.contiguous(), divisor, s, nullptr, nullptr), conv_bias, divisor,
                  bias, s);
}

// Also, where wanted, sums of the patches of x that gave the maxima (batch, outputs, channels, kernel), and the argmax indices
// (batch, outputs, slabs, rows, columns); empty where not.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_with_grads(const at::Tensor& x, const at::Tensor& weight,
                                                                  const at::Tensor& conv_bias, double divisor,
                                                                  const std::optional<at::Tensor>& bias, at::IntArrayRef pool,
                                                                  bool for_weight, bool for_input) {
    const Shape s = check_all(x, weight, conv_bias, divisor, bias);
    TORCH_CHECK(pool == at::IntArrayRef({POOL_D, POOL_H, POOL_W}),
                message("conv_pool: built for a pool of ", POOL_D, " x ", POOL_H, " x ", POOL_W, ", got ", pool));
    at::Tensor patches = for_weight ? at::empty({s.batch, s.outputs, s.channels, KERNEL_D, KERNEL_H, KERNEL_W}, x.options())
                                    : at::empty({0}, x.options());
    at::Tensor argmax = for_input
                            ? at::empty({s.batch, s.outputs, s.slabs(), s.rows(), s.columns()}, x.options().dtype(ARGMAX))
                            : at::empty({0}, x.options().dtype(ARGMAX));
    const int64_t size = s.outputs * s.patch_floats();
    Memory unit_patches(for_weight ? s.batch * s.sample_units() * size : 0);
    const std::vector<float> sums =
        sums_of_maxima<true>(x.contiguous(), weight.contiguous(), divisor, s, for_weight ? unit_patches.data() : nullptr,
                             for_input ? argmax.mutable_data_ptr<Argmax>() : nullptr);
    float* to = for_weight ? patches.mutable_data_ptr<float>() : nullptr;
    if (for_weight)
        at::parallel_for(0, s.batch * s.outputs, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                for (int64_t c = 0; c < s.channels; ++c)
                    for (int64_t tap = 0; tap < TAPS; ++tap) {
                        const float* from = unit_patches.data() + i / s.outputs * s.sample_units() * size +
                                            i % s.outputs * s.patch_floats() + (c / OCT * TAPS + tap) * OCT + c % OCT;
                        double sum = 0;
                        for (int64_t unit = 0; unit < s.sample_units(); ++unit) sum += from[unit * size];
                        to[(i * s.channels + c) * TAPS + tap] = sum;
                    }
        });
    return {finish(sums, conv_bias, divisor, bias, s), patches, argmax};
}

// grad has one value a sample, or one an output channel of it; -> that of each window's maximum, (batch, outputs).
static std::vector<double> window_grads(const at::Tensor& grad_in, int64_t batch, int64_t outputs, int64_t windows,
                                        double divisor) {
    check_float("the gradient", grad_in);
    TORCH_CHECK(grad_in.numel() == batch || grad_in.numel() == batch * outputs,
                message("conv_pool: expected ", batch, " or ", batch * outputs, " gradients, got ", grad_in.sizes()));
    const at::Tensor grad = grad_in.contiguous();
    const bool by_sample = grad.numel() == batch;
    std::vector<double> result(batch * outputs);
    for (int64_t i = 0; i < batch * outputs; ++i)
        result[i] = grad.const_data_ptr<float>()[by_sample ? i / outputs : i] / divisor / windows;
    return result;
}

// The weight tells the sizes. It and x, if that has gradients, tell autograd on what the result depends.
at::Tensor weight_grad(const at::Tensor& grad, const std::optional<at::Tensor>& /*x*/, const at::Tensor& patches_in,
                       const at::Tensor& weight, double divisor, int64_t windows) {
    check_float("the weight", weight);
    check_float("the patches", patches_in);
    TORCH_CHECK(windows > 0, message("conv_pool: expected the number of a channel's windows, got ", windows));
    TORCH_CHECK(patches_in.dim() == weight.dim() + 1 && patches_in.sizes().slice(1) == weight.sizes() && weight.size(0) > 0,
                message("conv_pool: expected patches of (batch, ", weight.sizes(), "), got ", patches_in.sizes()));
    const at::Tensor patches = patches_in.contiguous();
    const int64_t batch = patches.size(0), outputs = patches.size(1);
    const std::vector<double> grads = window_grads(grad, batch, outputs, windows, divisor);
    at::Tensor out = at::empty(weight.sizes(), patches.options());
    const int64_t inner = out.numel() / outputs;
    for (int64_t i = 0; i < out.numel(); ++i) {
        double sum = 0;
        for (int64_t b = 0; b < batch; ++b)
            sum += grads[b * outputs + i / inner] * patches.const_data_ptr<float>()[b * out.numel() + i];
        out.mutable_data_ptr<float>()[i] = sum;
    }
    return out;
}

at::Tensor input_grad(const at::Tensor& grad, const at::Tensor& argmax_in, const at::Tensor& weight_in, double divisor,
                      at::IntArrayRef sizes) {
    check_float("the weight", weight_in);
    const Shape s = checked_shape(sizes, weight_in.sizes());
    const std::array<int64_t, 5> values = {s.batch, s.outputs, s.slabs(), s.rows(), s.columns()};
    const at::IntArrayRef shape = values;
    TORCH_CHECK(argmax_in.is_cpu() && argmax_in.scalar_type() == ARGMAX && argmax_in.sizes() == shape,
                message("conv_pool: expected the argmax indices, ", ARGMAX, " of shape ", shape, " on the CPU, got ",
                        argmax_in.scalar_type(), " of shape ", argmax_in.sizes(), " on ", argmax_in.device()));
    const at::Tensor argmax = argmax_in.contiguous(), weight = weight_in.contiguous();
    const std::vector<double> grads = window_grads(grad, s.batch, s.outputs, s.windows(), divisor);
    std::vector<float> taps(s.batch * s.outputs * s.patch_floats());
    for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t o = 0; o < s.outputs; ++o)
            for (int64_t c = 0; c < s.channels; ++c)
                for (int64_t tap = 0; tap < TAPS; ++tap)
                    taps[(((b * s.octs() + c / OCT) * s.outputs + o) * TAPS + tap) * OCT + c % OCT] =
                        grads[b * s.outputs + o] * weight.const_data_ptr<float>()[(o * s.channels + c) * TAPS + tap];
    at::Tensor out = at::empty(sizes, weight.options());
    const GradJob job{s, taps.data(), argmax.const_data_ptr<Argmax>(), out.mutable_data_ptr<float>()};
    at::parallel_for(0, s.batch * s.sample_units(), 1, [&](int64_t begin, int64_t end) {
        Memory planes(WINDOW_DEPTH * GRAD_PLANE + LANES);
        for (int64_t unit = begin; unit < end; ++unit) input_gradient_unit(job, unit, planes.data());
    });
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor conv_bias, float divisor, Tensor? bias) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def(
        "forward_with_grads(Tensor x, Tensor weight, Tensor conv_bias, float divisor, Tensor? bias, int[] pool, "
        "bool for_weight, bool for_input) -> (Tensor, Tensor, Tensor)",
        {at::Tag::pt2_compliant_tag});
    m.def("weight_grad(Tensor grad, Tensor? x, Tensor patches, Tensor weight, float divisor, int windows) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad, Tensor argmax, Tensor weight, float divisor, int[] sizes) -> Tensor",
          {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("forward", &forward);
    m.impl("forward_with_grads", &forward_with_grads);
    m.impl("weight_grad", &weight_grad);
    m.impl("input_grad", &input_grad);
}
"""


def register(namespace):
    """Shapes for torch.compile, and what has no derivative."""

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, conv_bias, divisor, bias):
        return x.new_empty(x.shape[0], 1, 1, 1) if bias is not None else x.new_empty(x.shape[0], weight.shape[0], 1, 1, 1)

    @torch.library.register_fake(f"{namespace}::forward_with_grads")
    def forward_with_grads(x, weight, conv_bias, divisor, bias, pool, for_weight, for_input):
        windows = [(n - k + 1) // p for n, k, p in zip(x.shape[2:], weight.shape[2:], pool, strict=True)]
        patches = x.new_empty(x.shape[0], *weight.shape) if for_weight else x.new_empty(0)
        argmax_type = torch.uint8 if math.prod(pool) <= 256 else torch.int32
        argmax = x.new_empty((x.shape[0], weight.shape[0], *windows) if for_input else (0,), dtype=argmax_type)
        return forward(x, weight, conv_bias, divisor, bias), patches, argmax

    @torch.library.register_fake(f"{namespace}::weight_grad")
    def weight_grad(grad, x, patches, weight, divisor, windows):
        return weight.new_empty(weight.shape)

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad, argmax, weight, divisor, sizes):
        return weight.new_empty(sizes)

    def save(ctx, inputs, output):
        raise NotImplementedError(f"{namespace}: the operators of forward have no gradients; Training has")

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    for name in ("forward", "forward_with_grads"):
        torch.library.register_autograd(f"{namespace}::{name}", refuse, setup_context=save)
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


class Training(torch.autograd.Function):
    """One forward and backward pass; computes what the gradients that are asked for need, and no other."""

    @staticmethod
    def forward(ctx, x, weight, conv_bias, bias, divisor, pool, namespace):
        for_input, for_weight = ctx.needs_input_grad[:2]
        operators = getattr(torch.ops, namespace)
        out, patches, argmax = operators.forward_with_grads(x, weight, conv_bias, divisor, bias, pool, for_weight, for_input)
        ctx.save_for_backward(x if for_input else None, weight, patches, argmax)
        ctx.sizes, ctx.divisor, ctx.namespace = x.shape, divisor, namespace
        windows = [(n - k + 1) // p for n, k, p in zip(x.shape[2:], weight.shape[2:], pool, strict=True)]
        ctx.windows = math.prod(windows)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, patches, argmax = ctx.saved_tensors
        for_input, for_weight, for_conv_bias, for_bias = ctx.needs_input_grad[:4]
        operators = getattr(torch.ops, ctx.namespace)
        grad_x = operators.input_grad(grad, argmax, weight, ctx.divisor, ctx.sizes) if for_input else None
        grad_weight = operators.weight_grad(grad, x, patches, weight, ctx.divisor, ctx.windows) if for_weight else None
        # (batch, outputs, 1, 1, 1), or one value for all outputs of a sample
        channels = grad.sum(0).reshape(-1) if grad.dim() == 5 else grad.sum().repeat(len(weight))
        grad_conv_bias = channels / ctx.divisor if for_conv_bias else None
        return grad_x, grad_weight, grad_conv_bias, channels if for_bias else None, None, None, None


class ModelNew(nn.Module):
    differentiable = Training
    sources = NAME, CPP + BINDING, None, register  # bound here, so that no other variant in a notebook replaces them
    cflags = "-march=native", "-fopenmp"

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
        self.sums_channels = sum_dim in (1, -4, (1,), (-4,), [1], [-4]) and one_each_channel

    @torch.compiler.assume_constant_result
    def namespace(self):
        sizes = {f"KERNEL_{d}": size for d, size in zip("DHW", self.conv.kernel_size, strict=True)}
        sizes |= {f"POOL_{d}": size for d, size in zip("DHW", self.pool_size, strict=True)}
        return build(*self.sources, cflags=self.cflags, **sizes)

    def forward(self, x):
        namespace, conv = self.namespace(), self.conv
        bias = self.bias.expand(1, conv.out_channels, 1, 1, 1).flatten() if self.sums_channels else None
        inputs = x, conv.weight, conv.bias, bias
        if torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs):
            out = self.differentiable.apply(*inputs, self.divisor, self.pool_size, namespace)
        else:
            out = getattr(torch.ops, namespace).forward(x, conv.weight, conv.bias, self.divisor, bias)
        return out if self.sums_channels else torch.sum(out + self.bias, dim=self.sum_dim)


def main():
    torch.manual_seed(0)
    model = ModelNew(8, 16, (3, 3, 3), 2.0, (2, 2, 2), (16, 1, 1, 1), 1)
    x = torch.randn(8, 8, 16, 64, 64)

    def plain(x):
        pooled = nn.functional.max_pool3d(model.conv(x) / model.divisor, model.pool_size)
        return torch.sum(nn.functional.adaptive_avg_pool3d(pooled, 1) + model.bias, dim=model.sum_dim)

    def milliseconds(function):
        start = time.perf_counter()
        function(x)
        return (time.perf_counter() - start) * 1e3

    with torch.no_grad():
        model.double()
        exact = plain(x.double())
        model.float()
        error, limit = ((model(x) - exact).abs().max() / exact.std()).item(), 1e-3
        verdict = "right" if error <= limit else "wrong"
        print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict};", end=" ")
        if verdict == "wrong":
            print("not timed")
        else:
            times = torch.tensor([(milliseconds(model), milliseconds(plain)) for _ in range(10)])  # they take turns
            ours, theirs = times.median(dim=0).values.tolist()
            print(f"{ours:.2f} ms, PyTorch {theirs:.2f} ms (medians of 10)")


if __name__ == "__main__":
    main()
