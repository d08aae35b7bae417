"""conv3d_div_max_gap_bias_sum on the CPU: Winograd in three dimensions, with everything behind the convolution in the cache.

The convolution is computed in tiles of 2 x 4 x 4 positions: Winograd's F(2,3) along depth, F(4,3) along height and width.
Division, maximum and average follow before anything is written; so do the sums of the weights' gradient.

Why it is faster
    PyTorch writes the convolution, 27.6 MB at batch 8, and passes over it twice more; its backward pass multiplies mostly
    zeros. Here a window costs 36 products a pair of channels instead of 216. Vectors hold adjacent tiles; nothing moves a lane.

Mathematics
    F(4,3), points 0, +-3/4, +-3/2, infinity, and F(2,3): y = A^T [(G w) * (B^T x)]. B^T is exact in float32, G w is computed in
    float64. A value of the convolution errs by 5.4e-7 of their deviation (PyTorch 2.6e-7). Where a window's two largest are
    nearer to each other, it is computed again directly; so are NaN, infinity and values beyond 1e19: as in PyTorch. Risk: a
    value far larger than all around it leaves its rounding error in its tile. Training is slow where images have one colour.

Loops
    threads: blocks of 8 x 32 windows of all samples, at all depths. transform_plane, transform_depth; multiply: 4 outputs;
    fold_rows, fold_columns: A, maximum, sum. add_patches, scatter: 27 x 8 sums or weights in 18 registers.

Floor
    At batch 8: 16.8 MB read, and 0.88 GFLOP by F(2,3) in three dimensions: compute bound.

Takes
    What the original takes, in float32 on the CPU; PyTorch computes other kernels and pools, with a warning, and the gradient
    of a gradient. Anything else raises. Deterministic. AVX-512, AVX or any other: -march=native. Needs GCC or Clang.
    MIT; copy it.
"""

import copy
import ctypes
import functools
import threading
import warnings

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv3d_div_max_gap_bias_sum_cpu_winograd"
DEVICE = "cpu"
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (8, 8, 16, 64, 64), (4, 8, 6, 12, 20), 1e-3  # of ModelNew, x, x emulated, limit

CPP = r"""
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

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

constexpr int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

// What this is made for: a kernel of 3 x 3 x 3 and windows of 2 x 2 x 2 positions, of which each reads 4 x 4 x 4 pixels.
constexpr int KERNEL = 3, PLANE_TAPS = 9, TAPS = 27, POSITIONS = 8, WINDOW_DEPTH = 4;
constexpr int TILE = 4, POINTS = 6, SLICES = POINTS * POINTS, DEPTHS = 4;  // F(4,3) along rows and columns, F(2,3) along depth
// A unit of work is WINDOW_ROWS x WINDOW_COLUMNS windows at all depths. Winograd's lanes are tiles beside each other.
constexpr int WINDOW_ROWS = 2 * ROWS, WINDOW_COLUMNS = 2 * LANES, WINDOWS = WINDOW_ROWS * WINDOW_COLUMNS;
constexpr int TILE_INPUTS = TILE * ROWS + 2;  // input rows of a unit's tiles
// Planes [WINDOW_DEPTH][OCT_ROWS][OCT_COLUMNS][OCT] with channels innermost: what a unit's windows read of x, or add to its
// gradient, where the windows before the unit's reach into it.
constexpr int OCT_ROWS = (WINDOW_ROWS + 2) * 2 + 2, OCT_COLUMNS = (int)round_up((WINDOW_COLUMNS + 2) * 2 + 2, LANES);
constexpr int64_t OCT_ROW = OCT_COLUMNS * OCT, OCT_PLANE = OCT_ROWS * OCT_ROW, OCT_PLANES = WINDOW_DEPTH * OCT_PLANE;

struct Shape {
    int64_t batch, channels, depth, height, width, outputs;  // of x, and out_channels
    int64_t slabs() const { return (depth - 2) / 2; }        // windows along each dimension
    int64_t rows() const { return (height - 2) / 2; }
    int64_t columns() const { return (width - 2) / 2; }
    int64_t windows() const { return slabs() * rows() * columns(); }
    int64_t chunks() const { return ceil_div(columns(), WINDOW_COLUMNS); }
    int64_t sample_units() const { return ceil_div(rows(), WINDOW_ROWS) * chunks(); }
    int64_t plane() const { return height * width; }
    int64_t octs() const { return ceil_div(channels, OCT); }
    int64_t groups() const { return ceil_div(outputs, OUTS); }
    int64_t padded_outputs() const { return round_up(outputs, LANES); }
    int64_t patch_floats() const { return octs() * TAPS * OCT; }
    // Of the first of a row of windows among a batch's argmax indices [batch][outputs][slab][row][column].
    int64_t argmax_row(int64_t sample, int64_t o, int64_t slab, int64_t row) const {
        return (((sample * outputs + o) * slabs() + slab) * rows() + row) * columns();
    }
};

// What all threads read, and where they write; `patches` and `argmax` are null where no gradient needs them.
struct Job : Shape {
    bool tame;  // the weights are far from float32's limit
    const float* x;
    const float* transformed;  // weights: transform_weights
    const float* packed;       // weights: pack
    const float* tolerance;    // how far apart two values must be, over the largest input, to be told apart by Winograd's
    float* sums;               // [unit][outputs]: of the maxima
    float* patches;            // [unit][outputs][patch_floats]: sums of the input around the maxima
    uint8_t* argmax;           // see argmax_row: positions in the order of the scan
};

// A thread's memory, in one block: arrays that begin at the same offset in a page would be in each other's way.
struct Workspace {
    vec* planes;      // [point w][point h][channel][depth % 4][ROWS]: the input, transformed along rows and columns
    vec* slice;       // [point d][channel][ROWS]
    vec* products;    // [point h][group][2][OUTS][ROWS]: transformed back along depth
    vec* folded;      // [point w][group][2][4][OUTS][ROWS]: and along rows
    vec* totals;      // [outputs]: of the maxima, in lanes of windows
    float* region;    // [oct][OCT_PLANES]: the input with channels innermost
    int32_t* argmax;  // [outputs][WINDOWS], see argmax_index; below zero where it is not clear
    std::unique_ptr<vec[]> memory;

    explicit Workspace(Shape s) {
        const int64_t row = s.channels * ROWS, outputs = s.groups() * OUTS, padded = s.padded_outputs();
        const int64_t sizes[] = {SLICES * DEPTHS * row, DEPTHS * row, POINTS * 2 * outputs * ROWS, POINTS * 8 * outputs * ROWS,
                                 padded, s.octs() * OCT_PLANES / LANES, padded * WINDOWS / LANES};
        memory.reset(new vec[std::accumulate(std::begin(sizes), std::end(sizes), int64_t{0})]);
        planes = memory.get(), slice = planes + sizes[0], products = slice + sizes[1], folded = products + sizes[2];
        totals = folded + sizes[3], region = (float*)(totals + sizes[4]), argmax = (int32_t*)(totals + sizes[4] + sizes[5]);
    }
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
        return sample * s.channels * s.depth * s.plane() + 2 * (row * s.width + column);
    }
};

// Where a window of a part stands among its argmax indices: windows that share no input follow each other.
constexpr int64_t argmax_index(int64_t row, int64_t column) { return row * WINDOW_COLUMNS + column % 2 * LANES + column / 2; }

inline vec load(const float* from) { return *(const unaligned_vec*)from; }
inline vec larger(vec a, vec b) { return a > b ? a : b; }
inline vec smaller(vec a, vec b) { return a < b ? a : b; }
inline float add_lanes(vec v) {
    float sum = 0;
    for (int k = 0; k < LANES; ++k) sum += v[k];
    return sum;
}

// Lane i of the result is lane from(i) of a and b put end to end.
template <class From, int... I>
inline vec shuffle(vec a, vec b, From from, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, from(I)...);
#else
    return __builtin_shuffle(a, b, ivec{from(I)...});
#endif
}
#define LANES_FROM(a, b, index) shuffle(a, b, [](int i) constexpr { return index; }, std::make_integer_sequence<int, LANES>())

// COUNT vectors of consecutive floats -> a vector for each remainder of their positions modulo COUNT (unzip), and back (zip).
template <int COUNT, bool BACK>
inline void reorder(vec* v) {
    if constexpr (COUNT > 1) {
        vec even[COUNT / 2], odd[COUNT / 2];
        for (int i = 0; i < COUNT / 2; ++i) {
            even[i] = BACK ? v[2 * i] : LANES_FROM(v[2 * i], v[2 * i + 1], 2 * i);
            odd[i] = BACK ? v[2 * i + 1] : LANES_FROM(v[2 * i], v[2 * i + 1], 2 * i + 1);
        }
        reorder<COUNT / 2, BACK>(even), reorder<COUNT / 2, BACK>(odd);
        for (int i = 0; i < COUNT / 2; ++i) {
            v[2 * i] = BACK ? LANES_FROM(even[i], odd[i], i % 2 * LANES + i / 2) : even[i];
            v[2 * i + 1] = BACK ? LANES_FROM(even[i], odd[i], i % 2 * LANES + (i + LANES) / 2) : odd[i];
        }
    }
}
template <int COUNT> inline void unzip(vec* v) { reorder<COUNT, false>(v); }
template <int COUNT> inline void zip(vec* v) { reorder<COUNT, true>(v); }

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

// out[j][n] = sum over k of g[n][k] * in[k][j]: the first axis is transformed, and becomes the last.
template <int N>
inline void transform_axis(const double (&g)[N][KERNEL], const double* in, double* out, int rest) {
    for (int j = 0; j < rest; ++j)
        for (int n = 0; n < N; ++n) out[j * N + n] = g[n][0] * in[j] + g[n][1] * in[rest + j] + g[n][2] * in[2 * rest + j];
}

// weight (outputs, channels, 3, 3, 3) -> [point w][point h][group][point d][channel][OUTS], in float64 until the end.
// Points d are in the order 1, 2, 0, 3, in which they are multiplied.
void transform_weights(const float* weight, float* transformed, Shape s) {
    constexpr double G2[DEPTHS][KERNEL] = {{0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {1, 0, 0}, {0, 0, 1}};
    // A point's difference to all others, over the point, by which output_transform divides.
    constexpr double p = 2 * P * (P * P - Q * Q), q = 2 * Q * (Q * Q - P * P), zero = P * P * Q * Q;
    constexpr double G4[POINTS][KERNEL] = {{1 / zero, 0, 0},         {1 / p, P / p, P * P / p}, {1 / p, -P / p, P * P / p},
                                           {1 / q, Q / q, Q * Q / q}, {1 / q, -Q / q, Q * Q / q}, {0, 0, 1}};
    for (int64_t o = 0; o < s.groups() * OUTS; ++o)
        for (int64_t c = 0; c < s.channels; ++c) {
            // [d][h][w], [h][w][point d], [w][point d][point h], [point d][point h][point w]
            double w[TAPS] = {}, along_d[PLANE_TAPS * DEPTHS], along_h[KERNEL * DEPTHS * POINTS], all[DEPTHS * SLICES];
            for (int i = 0; i < TAPS && o < s.outputs; ++i) w[i] = weight[(o * s.channels + c) * TAPS + i];
            transform_axis(G2, w, along_d, PLANE_TAPS);
            transform_axis(G4, along_d, along_h, KERNEL * DEPTHS);
            transform_axis(G4, along_h, all, DEPTHS * POINTS);
            for (int i = 0; i < DEPTHS * SLICES; ++i) {
                const int d = i / SLICES, q = i / POINTS % POINTS, p = i % POINTS;
                const int64_t at = (((p * POINTS + q) * s.groups() + o / OUTS) * DEPTHS + d) * s.channels + c;
                transformed[at * OUTS + o % OUTS] = all[i];
            }
        }
}

// weight (outputs, channels, taps) -> packed [outputs / LANES][channel][tap][LANES]; and tolerance[o], see Job. Returns
// whether the weights are so small that no sum in Winograd's algorithm can overflow where the input's squares do not.
bool pack(const float* weight, float* packed, float* tolerance, Shape s) {
    const int64_t inner = s.channels * TAPS;
    double all = 0;
    for (int64_t o = 0; o < s.padded_outputs(); ++o) {
        double squares = 0;
        for (int64_t k = 0; k < inner; ++k) {
            const double value = o < s.outputs ? weight[o * inner + k] : 0;
            packed[(o / LANES * inner + k) * LANES + o % LANES] = value;
            squares += value * value, all += std::abs(value);
        }
        tolerance[o] = std::sqrt(squares) / (1 << 18);
    }
    return all < 1e15;
}

// What is seen of the input on the way: a sum of squares, which is finite if all is, and the largest value.
struct Seen {
    vec squares = {}, peak = {};
    bool finite() const { return add_lanes(squares) <= std::numeric_limits<float>::max(); }
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
    vec x[POINTS];
    for (int k = 0; k < TILE; ++k) x[k] = load(row + k * LANES);
    unzip<TILE>(x);
    for (int k = 0; k < 2; ++k) x[TILE + k] = LANES_FROM(x[k], next[k], i + 1);
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

__attribute__((always_inline)) inline void accumulate(vec (&acc)[OUTS * ROWS], const vec* v, const float* u, int64_t channels) {
    for (int64_t c = 0; c < channels; ++c, v += ROWS, u += OUTS) {
        vec in[ROWS];
        UNROLL for (int r = 0; r < ROWS; ++r) in[r] = v[r];
        UNROLL for (int o = 0; o < OUTS; ++o)
            UNROLL for (int r = 0; r < ROWS; ++r) acc[o * ROWS + r] += in[r] * u[o];
    }
}

// The products of one slice, for OUTS output channels, and the output transform along depth, y0 = m0 + (m1 + m2) and
// y1 = (m1 - m2) + m3, whose last terms are accumulated on the sums. z: [2][OUTS][ROWS]. Between two points what waits stays in
// memory: GCC would keep it in registers, and spill.
__attribute__((noinline)) void multiply(const vec* v, const float* u, int64_t channels, vec* z) {
    vec acc[OUTS * ROWS] = {}, *z0 = z, *z1 = z + OUTS * ROWS;
    const int64_t point_v = channels * ROWS, point_u = channels * OUTS;
    accumulate(acc, v, u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) z0[i] = acc[i], acc[i] = vec{};
    asm("" ::: "memory");
    accumulate(acc, v + point_v, u + point_u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) {
        const vec m1 = z0[i];
        z1[i] = m1 - acc[i], acc[i] += m1;
    }
    asm("" ::: "memory");
    accumulate(acc, v + 2 * point_v, u + 2 * point_u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) z0[i] = acc[i], acc[i] = z1[i];
    accumulate(acc, v + 3 * point_v, u + 3 * point_u, channels);
    UNROLL for (int i = 0; i < OUTS * ROWS; ++i) z1[i] = acc[i];
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
    vec value, second = vec{} - std::numeric_limits<float>::infinity();
    ivec position = {};
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
                    if (k == 0) best[w].value = y[2 * w];
                    else best[w].take(y[2 * w], 2 * k);
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

// A window directly, for LANES output channels: its maximum as PyTorch finds it, the last NaN or else the first of the largest.
// Every position is computed in the same way, so equal patches give equal values.
__attribute__((noinline)) void direct_window(const float* corner, const float* packed, Shape s, vec& best, ivec& position) {
    int64_t offsets[POSITIONS];
    for (int p = 0; p < POSITIONS; ++p) offsets[p] = (p / 4 * s.height + p / 2 % 2) * s.width + p % 2;
    vec values[POSITIONS] = {};
    for (int64_t c = 0; c < s.channels; ++c)
        for (int tap = 0; tap < TAPS; ++tap, packed += LANES) {
            const float* x = corner + ((c * s.depth + tap / 9) * s.height + tap / 3 % 3) * s.width + tap % 3;
            const vec weight = load(packed);
            UNROLL for (int p = 0; p < POSITIONS; ++p) values[p] += weight * x[offsets[p]];
        }
    best = vec{} - std::numeric_limits<float>::infinity();
    position = ivec{};
    for (int p = 0; p < POSITIONS; ++p) {
        const ivec take = (values[p] > best) | (values[p] != values[p]);
        best = take ? values[p] : best;
        position = take ? ivec{} + p : position;
    }
}

// The direct way for a slab of windows: for all, whose maxima it adds to totals, or for those where two of the largest values
// are so near to each other that Winograd's rounding could decide. Gives argmax indices.
void compute_directly(const Job& s, const Part& part, const float* corner, bool all, Workspace& work) {
    for (int64_t row = 0; row < part.rows; ++row)
        for (int64_t w = 0; w < part.columns; ++w) {
            bool wanted = all;
            for (int64_t o = 0; o < s.outputs; ++o) wanted |= work.argmax[o * WINDOWS + argmax_index(row, w)] < 0;
            for (int64_t o = 0; wanted && o < s.padded_outputs(); o += LANES) {
                vec best;
                ivec position;
                direct_window(corner + 2 * (row * s.width + w), s.packed + o * s.channels * TAPS, s, best, position);
                for (int k = 0; k < LANES; ++k) {
                    if (all) work.totals[o + k][0] += best[k];
                    work.argmax[(o + k) * WINDOWS + argmax_index(row, w)] = position[k];
                }
            }
        }
}

// ---- the sums of the patches at the maxima
// Brings the depths of a slab's windows of x into the region, with channels innermost; the first two are there, but for slab 0.
void load_region(const Job& s, const Part& part, int64_t slab, float* region) {
    const int64_t rows = std::min<int64_t>(WINDOW_ROWS * 2 + 2, s.height - part.row * 2), channel = s.depth * s.plane();
    const int64_t columns = std::min<int64_t>(WINDOW_COLUMNS * 2 + 2, s.width - part.column * 2);
    for (int64_t g = 0; g < s.octs(); ++g, region += OCT_PLANES) {
        const int64_t channels = std::min<int64_t>(OCT, s.channels - g * OCT);
        if (slab) std::copy_n(region + 2 * OCT_PLANE, 2 * OCT_PLANE, region);
        for (int64_t d = slab ? 2 : 0; d < WINDOW_DEPTH; ++d)
            for (int64_t r = 0; r < rows; ++r) {
                const float* from = s.x + part.corner(s) + g * OCT * channel + (slab * 2 + d) * s.plane() + r * s.width;
                float* to = region + d * OCT_PLANE + r * OCT_ROW;
                int64_t w = 0;
                for (; w + LANES <= columns; w += LANES) {
                    vec v[OCT] = {};
                    for (int64_t c = 0; c < channels; ++c) v[c] = load(from + c * channel + w);
                    zip<OCT>(v);
                    for (int c = 0; c < OCT; ++c) *(unaligned_vec*)(to + w * OCT + c * LANES) = v[c];
                }
                for (; w < columns; ++w)
                    for (int c = 0; c < OCT; ++c) to[w * OCT + c] = c < channels ? from[c * channel + w] : 0.0f;
            }
    }
}

// From a window's corner in these planes to the patches at its positions.
constexpr int64_t PATCHES[POSITIONS] = {0,         OCT,             OCT_ROW,             OCT_ROW + OCT,
                                        OCT_PLANE, OCT_PLANE + OCT, OCT_PLANE + OCT_ROW, OCT_PLANE + OCT_ROW + OCT};

// Kernel depths whose taps are summed at the same time, as many as registers hold. A row of taps has PAIRS vectors of two taps,
// where vectors are that wide, and SINGLES of one.
constexpr int PASS = LANES == 16 ? KERNEL : 1, PASS_ROWS = PASS * KERNEL;
constexpr int PAIRS = LANES == 16 ? 1 : 0, SINGLES = KERNEL - 2 * PAIRS;

// sums[tap][OCT] += the patches of a row of windows at their maxima, PASS kernel depths.
__attribute__((noinline)) void add_patches(const float* region, int64_t columns, const int32_t* argmax, float* sums) {
    vec pairs[PASS_ROWS][PAIRS + 1] = {};
    oct singles[PASS_ROWS][SINGLES] = {};
    for (int64_t w = 0; w < columns; ++w) {
        const float* patch = region + w * 2 * OCT + PATCHES[argmax[argmax_index(0, w)]];
        UNROLL for (int i = 0; i < PASS_ROWS; ++i) {
            const float* from = patch + i / KERNEL * OCT_PLANE + i % KERNEL * OCT_ROW;
            UNROLL for (int k = 0; k < PAIRS; ++k) pairs[i][k] += load(from + 2 * k * OCT);
            UNROLL for (int k = 0; k < SINGLES; ++k) singles[i][k] += *(const oct*)(from + (2 * PAIRS + k) * OCT);
        }
    }
    for (int i = 0; i < PASS_ROWS; ++i, sums += KERNEL * OCT) {
        for (int k = 0; k < PAIRS; ++k) *(unaligned_vec*)(sums + 2 * k * OCT) += pairs[i][k];
        for (int k = 0; k < SINGLES; ++k) *(oct*)(sums + (2 * PAIRS + k) * OCT) += singles[i][k];
    }
}

// Where the maxima of a slab of windows are is known: what gradients need of it.
void keep_for_gradients(const Job& s, const Part& part, int64_t unit, int64_t slab, Workspace& work) {
    if (s.patches) load_region(s, part, slab, work.region);
    for (int64_t row = 0; row < part.rows; ++row)
        for (int64_t o = 0; o < s.outputs; ++o) {
            const int32_t* argmax = work.argmax + o * WINDOWS + argmax_index(row, 0);
            for (int64_t i = 0; s.patches && i < s.octs() * KERNEL; i += PASS) {
                const int64_t plane = i / KERNEL * WINDOW_DEPTH + i % KERNEL;
                add_patches(work.region + plane * OCT_PLANE + row * 2 * OCT_ROW, part.columns, argmax,
                            s.patches + (unit * s.outputs + o) * s.patch_floats() + i * PLANE_TAPS * OCT);
            }
            if (!s.argmax) continue;
            uint8_t* to = s.argmax + s.argmax_row(part.sample, o, slab, part.row + row) + part.column;
            for (int64_t w = 0; w < part.columns; ++w) to[w] = argmax[argmax_index(0, w)];
        }
}

// ---- a unit
// Fetches into the second-level cache what transform_plane will read: rows begin to end of all channels' `depths` depths.
inline void prefetch(const float* corner, int64_t begin, int64_t end, int64_t depths, Shape s) {
    for (int64_t i = begin; i < end; ++i) {
        const float* row =
            corner + (i / TILE_INPUTS / depths * s.depth + i / TILE_INPUTS % depths) * s.plane() + i % TILE_INPUTS * s.width;
        for (int w = 0; w < TILE * LANES; w += 16) __builtin_prefetch(row + w, 0, 2);
    }
}

// The sums of a unit's maxima, and what gradients need. From the first slab on whose input is not finite, or nearly so, it is
// computed directly: sums and differences would not give what the convolution gives.
template <bool TRAIN>
void compute_unit(const Job& s, int64_t unit, Workspace& work) {
    const Part part(unit, s);
    const float* corner = s.x + part.corner(s);
    const int64_t stride = s.channels * DEPTHS * ROWS, groups = s.groups();
    ivec exists[2];
    for (int k = 0; k < WINDOW_COLUMNS; ++k) exists[k % 2][k / 2] = k < part.columns ? -1 : 0;
    std::fill_n(work.totals, s.padded_outputs(), vec{});
    Seen seen;
    for (int64_t slab = 0; slab < s.slabs(); ++slab) {
        for (int64_t c = 0; c < s.channels; ++c)
            for (int64_t d = slab ? 2 * slab + 2 : 0; d < 2 * slab + 4; ++d)
                transform_plane<TRAIN>(corner + (c * s.depth + d) * s.plane(), s.width, s.height - part.row * 2,
                                       s.width - part.column * 2, work.planes + (c * DEPTHS + d % DEPTHS) * ROWS, stride, seen);
        const bool directly = !s.tame || !seen.finite();
        // While this slab is computed, what comes next is fetched: two more depths, or the next unit below.
        const bool last = slab + 1 == s.slabs();
        const float* next = last ? corner + TILE * ROWS * s.width : corner + (2 * slab + 4) * s.plane();
        const int64_t depths = last ? DEPTHS : 2, lines = depths * s.channels * TILE_INPUTS;
        const float* u = s.transformed;
        for (int i = 0; i < SLICES && !directly; ++i) {
            prefetch(next, lines * i / SLICES, lines * (i + 1) / SLICES, depths, s);
            transform_depth(work.planes + i * stride, work.slice, s.channels, 2 * slab);
            for (int64_t g = 0; g < groups; ++g, u += DEPTHS * s.channels * OUTS)
                multiply(work.slice, u, s.channels, work.products + (i % POINTS * groups + g) * 2 * OUTS * ROWS);
            if (i % POINTS == POINTS - 1)
                fold_rows(work.products, work.folded + i / POINTS * groups * 2 * TILE * OUTS * ROWS, groups);
        }
        const bool unclear = !directly && fold_columns<TRAIN>(work.folded, work.totals, work.argmax, s.tolerance,
                                                              seen.largest(), exists, part.rows, groups);
        if (directly || unclear) compute_directly(s, part, corner + 2 * slab * s.plane(), directly, work);
        if (TRAIN) keep_for_gradients(s, part, unit, slab, work);
    }
    for (int64_t o = 0; o < s.outputs; ++o)
        s.sums[unit * s.outputs + o] = add_lanes(work.totals[o]);
}

// ---- the gradient of x
// Adds the weights `taps` [tap][OCT], PASS kernel depths, to the patches of a row of windows. Every second window comes first:
// what was just stored cannot be loaded again at once by a vector that begins elsewhere.
__attribute__((noinline)) void scatter(float* planes, int64_t columns, const uint8_t* argmax, const float* taps) {
    vec pairs[PASS_ROWS][PAIRS + 1];
    oct singles[PASS_ROWS][SINGLES];
    for (int i = 0; i < PASS_ROWS; ++i, taps += KERNEL * OCT) {
        for (int k = 0; k < PAIRS; ++k) pairs[i][k] = load(taps + 2 * k * OCT);
        for (int k = 0; k < SINGLES; ++k) singles[i][k] = *(const oct*)(taps + (2 * PAIRS + k) * OCT);
    }
    for (int parity = 0; parity < 2; ++parity)
        for (int64_t w = parity; w < columns; w += 2) {
            float* patch = planes + w * 2 * OCT + PATCHES[argmax[w]];
            UNROLL for (int i = 0; i < PASS_ROWS; ++i) {
                float* to = patch + i / KERNEL * OCT_PLANE + i % KERNEL * OCT_ROW;
                UNROLL for (int k = 0; k < PAIRS; ++k) *(unaligned_vec*)(to + 2 * k * OCT) += pairs[i][k];
                UNROLL for (int k = 0; k < SINGLES; ++k) *(oct*)(to + (2 * PAIRS + k) * OCT) += singles[i][k];
            }
        }
}

// One depth of the gradient, `rows` x `columns` from `from` on, with channels innermost, to grad_x, with channels apart.
void store_depth(const float* from, float* to, int64_t rows, int64_t columns, int64_t channels, Shape s) {
    const int64_t channel = s.depth * s.plane();
    for (int64_t r = 0; r < rows; ++r, from += OCT_ROW, to += s.width) {
        int64_t w = 0;
        for (; w + LANES <= columns; w += LANES) {
            vec v[OCT];
            for (int c = 0; c < OCT; ++c) v[c] = load(from + w * OCT + c * LANES);
            unzip<OCT>(v);
            for (int64_t c = 0; c < channels; ++c) *(unaligned_vec*)(to + c * channel + w) = v[c];
        }
        for (; w < columns; ++w)
            for (int64_t c = 0; c < channels; ++c) to[c * channel + w] = from[w * OCT + c];
    }
}

// The gradient of a unit's part of x: the rows and columns of its windows' first inputs. planes: [OCT_PLANES], of the slab that
// is added. taps: [batch][oct][outputs][tap][OCT], weights times the gradient of a window's maximum.
void input_gradient_unit(Shape s, const float* taps, const uint8_t* argmax, float* grad_x, int64_t unit, float* planes) {
    const Part part(unit, s);
    const int64_t row = std::max<int64_t>(0, part.row - 1), rows = part.row + part.rows - row;
    const int64_t column = std::max<int64_t>(0, part.column - 1), columns = part.column + part.columns - column;
    const int64_t bottom = part.row + part.rows < s.rows() ? part.row * 2 + WINDOW_ROWS * 2 : s.height;
    const int64_t right = part.column + part.columns < s.columns() ? part.column * 2 + WINDOW_COLUMNS * 2 : s.width;
    const float* owned = planes + 2 * ((part.row - row) * OCT_ROW + (part.column - column) * OCT);
    for (int64_t g = 0; g < s.octs(); ++g) {
        float* to = grad_x + part.corner(s) + g * OCT * s.depth * s.plane();
        std::fill_n(planes, OCT_PLANES, 0.0f);
        for (int64_t slab = 0; slab < s.slabs(); ++slab) {
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t o = 0; o < s.outputs; ++o)
                    for (int d = 0; d < KERNEL; d += PASS)
                        scatter(planes + d * OCT_PLANE + r * 2 * OCT_ROW, columns,
                                argmax + s.argmax_row(part.sample, o, slab, row + r) + column,
                                taps + (((part.sample * s.octs() + g) * s.outputs + o) * TAPS + d * PLANE_TAPS) * OCT);
            // The first two depths are done. The last slab leaves all that there are, and zeros behind them.
            const int64_t done = slab + 1 < s.slabs() ? 2 : s.depth - slab * 2;
            for (int64_t d = 0; d < done; ++d) {
                if (d == WINDOW_DEPTH) std::fill_n(planes, OCT_PLANE, 0.0f);
                store_depth(owned + d % WINDOW_DEPTH * OCT_PLANE, to + (slab * 2 + d) * s.plane(), bottom - part.row * 2,
                            right - part.column * 2, std::min<int64_t>(OCT, s.channels - g * OCT), s);
            }
            std::copy_n(planes + 2 * OCT_PLANE, 2 * OCT_PLANE, planes);
            std::fill_n(planes + 2 * OCT_PLANE, 2 * OCT_PLANE, 0.0f);
        }
    }
}

// ---- what Python calls
constexpr int DONE = 0, NO_MEMORY = 12;

// f(begin, end) for equal parts of [0, count), by at most `threads` threads of the OpenMP runtime that the process has loaded,
// torch's.
template <class F>
int parallel_for(int64_t count, int64_t threads, F f) {
    const int64_t parts = omp_in_parallel() ? 1 : std::clamp<int64_t>(count, 1, threads), each = ceil_div(count, parts);
    int error = DONE;
#pragma omp parallel for num_threads(parts) schedule(static, 1) reduction(max : error)
    for (int64_t part = 0; part < parts; ++part) try {
            const int64_t begin = part * each, end = std::min(begin + each, count);
            if (begin < end) f(begin, end);
        } catch (const std::bad_alloc&) {
            error = NO_MEMORY;
        }
    return error;
}

// out (batch, outputs) = the averages. For training `patches` [unit][outputs][oct][tap][OCT], zeros, to which the patches of x
// are added that gave the maxima, and `argmax` (batch, outputs, slabs, rows, columns); either may be null.
extern "C" int run_forward(const float* x, const float* weight, const float* conv_bias, float* out, float* patches,
                           uint8_t* argmax, double divisor, int64_t batch, int64_t channels, int64_t depth, int64_t height,
                           int64_t width, int64_t outputs, int64_t threads) try {
    const Shape s{batch, channels, depth, height, width, outputs};
    std::vector<float> transformed(DEPTHS * SLICES * channels * s.groups() * OUTS), tolerance(s.padded_outputs());
    std::vector<float> packed(s.padded_outputs() * channels * TAPS), sums(batch * s.sample_units() * outputs);
    const bool tame = pack(weight, packed.data(), tolerance.data(), s);
    if (tame) transform_weights(weight, transformed.data(), s);
    const Job job{s, tame, x, transformed.data(), packed.data(), tolerance.data(), sums.data(), patches, argmax};
    const int error = parallel_for(batch * s.sample_units(), threads, [&](int64_t begin, int64_t end) {
        Workspace work(s);
        for (int64_t unit = begin; unit < end; ++unit)
            patches || argmax ? compute_unit<true>(job, unit, work) : compute_unit<false>(job, unit, work);
    });
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = 0;
            for (int64_t i = 0; i < s.sample_units(); ++i) sum += sums[(b * s.sample_units() + i) * outputs + o];
            out[b * outputs + o] = (sum / s.windows() + conv_bias[o]) / divisor;
        }
    return error;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

extern "C" int run_input_gradient(const float* taps, const uint8_t* argmax, float* grad_x, int64_t batch, int64_t channels,
                                  int64_t depth, int64_t height, int64_t width, int64_t outputs, int64_t threads) {
    const Shape s{batch, channels, depth, height, width, outputs};
    return parallel_for(batch * s.sample_units(), threads, [&](int64_t begin, int64_t end) {
        std::vector<float> planes(OCT_PLANES + LANES);
        for (int64_t unit = begin; unit < end; ++unit) input_gradient_unit(s, taps, argmax, grad_x, unit, planes.data());
    });
}
extern "C" int64_t count_units(int64_t height, int64_t width) { return Shape{1, 1, 4, height, width, 1}.sample_units(); }
"""


# ---- The same text in all files, down to the next such line; python -m playground.command.shared_text writes it.
BUILDING = threading.Lock()  # the first calls of a model's replicas may come from several threads at once


@functools.cache
def kernels(*flags, name=NAME, text=CPP, **macros):  # name and text of this file, whatever a notebook's next one calls so
    """Compile the text with these flags and macros, once a machine, and return the library."""
    flags = ["-O3", "-march=native", "-fopenmp", *flags, *(f"-D{key}={value}" for key, value in macros.items())]
    name = "_".join(map(str, [name, *macros.values()]))
    options = {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}  # before, torch's headers come along
    with BUILDING:
        return ctypes.CDLL(load_inline(name, text, extra_cflags=flags, is_python_module=False, **options))


def launch(function, *arguments):
    """Call a C function: tensors as pointers, None as null, ints as int64_t, floats."""
    if not function.argtypes:
        function.argtypes = [ctypes.c_double if isinstance(each, float) else ctypes.c_int64 for each in arguments]
    if code := function(*[each.data_ptr() if isinstance(each, torch.Tensor) else each or 0 for each in arguments]):
        raise RuntimeError(f"{function.__name__}: error {code}")


def check(name, tensor, shape, device, dtype=torch.float32):
    """Raise RuntimeError unless a tensor is of this type and shape, on this device."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        found = f"{tensor.dtype} of shape {[*tensor.shape]} on {tensor.device}"
        raise RuntimeError(f"expected {name} as {dtype} of shape {[*shape]} on {device}; got {found}")


# ---- What is this file's own.
SCHEMA = "(Tensor x, Tensor weight, Tensor conv_bias, float divisor, int[3] pool, int needs) -> (Tensor, Tensor, Tensor)"
INPUTS = "Tensor grad, Tensor x, Tensor weight, Tensor conv_bias, float divisor, int[3] pool"
GRADIENT = f"({INPUTS}, Tensor patches, Tensor argmax, int needs) -> (Tensor, Tensor, Tensor)"


def is_served(weight, pool):
    return (*weight.shape[2:], *pool) == (3, 3, 3, 2, 2, 2)


def count(function, *numbers):
    """Call a C function of int64_t that returns one."""
    if not function.argtypes:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(numbers)
    return function(*numbers)


def original(x, weight, conv_bias, divisor, pool):
    maxima = nn.functional.max_pool3d(nn.functional.conv3d(x, weight, conv_bias) / divisor, pool)
    return maxima.mean(dim=(2, 3, 4), keepdim=True)


def saved(x, weight, conv_bias, divisor, pool, needs, is_served=is_served):
    """Return room for the output, sums of the patches at the maxima (needs & 2), and the argmax indices; empty: PyTorch's."""
    batch, outs, windows = x.shape[0], weight.shape[0], [(size - 2) // 2 for size in x.shape[2:]]
    needs = needs if is_served(weight, pool) else 0
    argmax = x.new_empty((batch, outs, *windows) if needs & 1 else 0, dtype=torch.uint8)
    patches = x.new_empty((batch, outs, (weight.shape[1] + 7) // 8, 27, 8) if needs & 2 else 0)
    return x.new_empty(batch, outs, 1, 1, 1), patches, argmax


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv_max_mean(
    x, weight, conv_bias, divisor, pool, needs, kernels=kernels, saved=saved, is_served=is_served, original=original
):
    """Return the output and what the gradients of x (needs & 1) and of the parameters (needs & 2) take: see `saved`."""
    (batch, *_, depth, height, width), (out_channels, in_channels, *kernel) = x.shape, weight.shape
    check("x", x, (batch, in_channels, depth, height, width), x.device)
    check("weight", weight, (out_channels, in_channels, *kernel[-3:]), x.device)
    check("conv_bias", conv_bias, (out_channels,), x.device)
    if min(pool) < 1 or any(size < k + p - 1 for size, k, p in zip((depth, height, width), kernel, pool, strict=True)):
        fits = f"room for a window of {[*pool]} behind a kernel of {kernel}"
        raise RuntimeError(f"expected {fits}; got a volume of {[depth, height, width]}")
    out, patches, argmax = saved(x, weight, conv_bias, divisor, pool, needs)
    if not is_served(weight, pool):
        limits = "a kernel other than 3 x 3 x 3, windows other than 2 x 2 x 2"
        warnings.warn(f"PyTorch computes what this does not take: {limits}", stacklevel=2)
        return original(x, weight, conv_bias, divisor, pool), patches, argmax
    of_units = x.new_zeros(batch, count(kernels().count_units, height, width), *patches.shape[1:]) if needs & 2 else None
    if batch:
        parameters = (weight, conv_bias) if divisor > 0 else (-weight, -conv_bias)  # the largest of these is what counts
        given = x.contiguous(), *[each.contiguous() for each in parameters], out, of_units, argmax if needs & 1 else None
        numbers = *x.shape, out_channels, torch.get_num_threads()
        launch(kernels().run_forward, *given, float(abs(divisor)), *numbers)
    return out, patches.copy_(of_units.sum(1, dtype=torch.float64)) if needs & 2 else patches, argmax


conv_max_mean.register_fake(saved)


@torch.library.custom_op(f"{NAME}::gradient", mutates_args=(), device_types=DEVICE, schema=GRADIENT)
def gradient(grad, x, weight, conv_bias, divisor, pool, patches, argmax, needs, kernels=kernels):
    """Return the gradients of x (needs & 1) and of the parameters (needs & 2); empty tensors where they are not needed."""
    (outs, channels, *_), windows = weight.shape, torch.Size((size - 2) // 2 for size in x.shape[2:]).numel()
    of_averages = grad.double().flatten(1)
    of_maxima = of_averages / divisor / windows
    found = [each.new_empty(each.shape if needs & bit else 0) for each, bit in ((x, 1), (weight, 2), (conv_bias, 2))]
    if found[0].numel():
        octs = nn.functional.pad(weight.flatten(2), (0, 0, 0, -channels % 8)).view(outs, -1, 8, 27)
        taps = of_maxima.view(-1, 1, outs, 1, 1) * octs.permute(1, 0, 3, 2)
        numbers = *x.shape, outs, torch.get_num_threads()
        launch(kernels().run_input_gradient, taps.float().contiguous(), argmax, found[0], *numbers)
    if needs & 2:
        summed = (of_maxima.view(-1, outs, 1, 1, 1) * patches).sum(0).transpose(2, 3)  # outputs, octs, 8, taps
        found[1].copy_(summed.reshape(outs, -1, 27)[:, :channels].reshape(weight.shape))
        found[2].copy_(of_averages.sum(0) / divisor)
    return tuple(found)


@gradient.register_fake
def gradients(grad, x, weight, conv_bias, divisor, pool, patches, argmax, needs):
    found = (x, 1), (weight, 2), (conv_bias, 2)
    return tuple(each.new_empty(each.shape if needs & bit else 0) for each, bit in found)


def backward(ctx, grad, *_, original=original, is_served=is_served):
    """The gradient; PyTorch's, which takes several times 27.6 MB, where kernels do not serve, and that of a gradient."""
    *tensors, patches, argmax = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    needs = wanted[0] + 2 * any(wanted[1:])
    if torch.is_grad_enabled() or needs & ~ctx.needs or not is_served(tensors[1], ctx.pool):
        found = torch.func.vjp(lambda *tensors: original(*tensors, ctx.divisor, ctx.pool), *tensors)[1](grad)
        return *found, None, None, None
    found = torch.ops.conv3d_div_max_gap_bias_sum_cpu_winograd.gradient(
        grad, *tensors, ctx.divisor, ctx.pool, patches, argmax, needs
    )
    return *[each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)], None, None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.divisor, ctx.pool, ctx.needs = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


conv_max_mean.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    conv_max_mean.register_autocast(DEVICE, torch.float32)


def call(x, weight, conv_bias, divisor, pool):
    needs = x.requires_grad + 2 * (weight.requires_grad or conv_bias.requires_grad) if torch.is_grad_enabled() else 0
    return torch.ops.conv3d_div_max_gap_bias_sum_cpu_winograd.forward(x, weight, conv_bias, divisor, pool, needs)[0]


class ModelNew(nn.Module):
    operator = staticmethod(call)

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        limits = torch.finfo(torch.float32)
        if not isinstance(divisor, (int, float)) or not limits.tiny <= abs(divisor) <= limits.max:  # NaN fails it, too
            wanted = f"a number whose size is a normal float32, {limits.tiny} to {limits.max}"
            raise ValueError(f"divisor: expected {wanted}, got {divisor!r}; by others, max(conv) / d is not max(conv / d)")
        self.pool_size = (pool_size,) * 3 if isinstance(pool_size, int) else tuple(pool_size)
        if len(self.pool_size) != 3 or min(self.pool_size) < 1:
            raise ValueError(f"pool_size: expected a positive int or three of them, got {pool_size!r}")
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor, self.sum_dim = divisor, sum_dim
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        averages = self.operator(x, self.conv.weight, self.conv.bias, self.divisor, self.pool_size)
        return torch.sum(averages + self.bias, dim=self.sum_dim)


@torch.no_grad()
def main():
    emulated, (arguments, shape, small, limit) = hasattr(load_inline, "emulates_cuda"), EXAMPLE
    torch.manual_seed(0)
    ours = ModelNew(*arguments).to(DEVICE)
    theirs, x = copy.deepcopy(ours), torch.randn(small if emulated else shape, device=DEVICE)
    theirs.operator = original  # the same module, by PyTorch
    exact = torch.cat([theirs.double()(part.double()) for part in x.split(16)])
    error, calls = ((ours(x) - exact).abs().max() / exact.std()).item(), () if emulated else (ours, theirs.float())
    times = [f"{1e3 * Timer('f(x)', globals={'f': f, 'x': x}).timeit(20).mean:.3f} ms" for f in calls]
    right, took = "right" if error <= limit else "wrong", ", PyTorch ".join(times) or "emulated"
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:g}: {right}; {took}")


if __name__ == "__main__":
    main()
