"""conv_pool_sigmoid_sum on the CPU: pooling moved in front of the convolution's weights.

Pooling is linear, so the weights are applied to box sums: the input, pooled once for each element of the convolution's kernel.
The forward pass leaves each sample's gradients of the parameters, which backward weighs and adds.

Why it is faster
    PyTorch computes 16 convolution outputs for every pooled one. Here each pooled output costs as many multiplications as one:
    1.34 GFLOP a sample become 0.083. The box sums are separable and made in registers; the sigmoid is applied to a tile of the
    product there. Box sums (28 KB a row) and weights (18 KB) stay in the cache, and the next pooled row's input is prefetched.

Mathematics
    v3's. Column sums are sorted by remainder modulo p (unzip), so that a sum along a row adds whole vectors. The sigmoid's
    relative error is below 7e-7 for |x| < 8, below 5e-6 down to -80; below -86 it stays at 2^-125. With delta = s * (1 - s),
    d out[b] / d W = 1/p^2 * sum of delta * box needs nothing from above; the input's gradient is the forward pass transposed.

Loops
    threads: pooled rows; bands of 8 with gradients, of 12 for the input's. sigmoid_tile: 64 outputs x 6 windows, 24 vectors.

Floor
    At batch 4: 18.9 MB, 0.33 GFLOP, 2.3 million sigmoids: 1.0 ms at 19 GB/s, 1.4 at 245 GFLOP/s (two Cascade Lake cores).

Takes
    float32 CPU tensors (batch, in_channels, height, width), any sizes that the original takes; others raise. The bits do not
    depend on the number of threads. AVX-512 (with DQ), AVX2 or any other: -march=native. Needs GCC or Clang.
"""

import ctypes
import functools
import hashlib
import inspect
import os
import re
import shutil
import sys
import threading
import warnings

import torch
import torch.nn as nn

NAME = "conv_pool_sigmoid_sum_cpu_box_sums"
EXAMPLE = (8, 64, 3, 4), (4, 8, 384, 384), (3, 8, 45, 64), 1e-3  # of ModelNew, x, x under the emulator, limit

CPP = r"""
// Needs KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

// The widest vectors of the machine, and how many of them fit into its registers as accumulators of a tile.
#if defined(__AVX512DQ__)
constexpr int LANES = 16, ACCUMULATORS = 24, MAX_VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, ACCUMULATORS = 12, MAX_VECTORS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, ACCUMULATORS = 24, MAX_VECTORS = 4;
#else
constexpr int LANES = 4, ACCUMULATORS = 12, MAX_VECTORS = 2;
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef float unaligned_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr int64_t ceil_div(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

inline vec load(const float* from) { return *(const unaligned_vec*)from; }
inline void store(float* to, vec value) { *(unaligned_vec*)to = value; }
inline vec load_first(const float* from, int64_t count) {
    vec value = {};
    for (int64_t i = 0; i < count; ++i) value[i] = from[i];
    return value;
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

// COUNT vectors of consecutive floats -> a vector for each remainder of their positions modulo COUNT, and back.
template <int COUNT>
inline void unzip(vec* v) {
    if constexpr (COUNT % 2 == 0) {
        vec even[COUNT / 2], odd[COUNT / 2];
        for (int i = 0; i < COUNT / 2; ++i) {
            even[i] = LANES_FROM(v[2 * i], v[2 * i + 1], 2 * i);
            odd[i] = LANES_FROM(v[2 * i], v[2 * i + 1], 2 * i + 1);
        }
        unzip<COUNT / 2>(even), unzip<COUNT / 2>(odd);
        for (int i = 0; i < COUNT / 2; ++i) v[2 * i] = even[i], v[2 * i + 1] = odd[i];
    } else if constexpr (COUNT > 1) {
        float all[COUNT * LANES];
        for (int i = 0; i < COUNT; ++i) store(all + i * LANES, v[i]);
        for (int i = 0; i < COUNT; ++i)
            for (int lane = 0; lane < LANES; ++lane) v[i][lane] = all[lane * COUNT + i];
    }
}
template <int COUNT>
inline void zip(vec* v) {
    if constexpr (COUNT % 2 == 0) {
        vec even[COUNT / 2], odd[COUNT / 2];
        for (int i = 0; i < COUNT / 2; ++i) even[i] = v[2 * i], odd[i] = v[2 * i + 1];
        zip<COUNT / 2>(even), zip<COUNT / 2>(odd);
        for (int i = 0; i < COUNT / 2; ++i) {
            v[2 * i] = LANES_FROM(even[i], odd[i], i % 2 * LANES + i / 2);
            v[2 * i + 1] = LANES_FROM(even[i], odd[i], i % 2 * LANES + (i + LANES) / 2);
        }
    } else if constexpr (COUNT > 1) {
        float all[COUNT * LANES];
        for (int i = 0; i < COUNT; ++i)
            for (int lane = 0; lane < LANES; ++lane) all[lane * COUNT + i] = v[i][lane];
        for (int i = 0; i < COUNT; ++i) v[i] = load(all + i * LANES);
    }
}

// A pooled row is worked on in stretches of at most WINDOWS windows. A window reaches into the pixels of the HALO next ones.
constexpr int HALO_H = ceil_div(KERNEL_H - 1, POOL_H), HALO_W = ceil_div(KERNEL_W - 1, POOL_W);
constexpr int MIN_WINDOWS = round_up(2 * HALO_W + 1, ACCUMULATORS);
constexpr int WINDOWS = std::max<int>(MIN_WINDOWS, round_up(384 / POOL_W, ACCUMULATORS)), PITCH = round_up(WINDOWS, LANES);
constexpr int64_t CACHE_FLOATS = 128 << 10;  // half a megabyte, for the box sums of a stretch
constexpr int LINE = 16;                     // floats in a cache line
constexpr int64_t BAND = 8;                  // pooled rows whose gradients of the parameters are summed together
constexpr int64_t INPUT_BAND = 12;           // rows of blocks of POOL_H pixels whose gradients are computed in sequence

struct Shape {
    int64_t batch, channels, height, width, outputs;  // of x, and out_channels
    int64_t rows() const { return (height - KERNEL_H + 1) / POOL_H; }
    int64_t columns() const { return (width - KERNEL_W + 1) / POOL_W; }
    int64_t plane() const { return height * width; }
    int64_t padded_outputs() const { return round_up(outputs, LINE); }
    int64_t inner() const { return channels * KERNEL_H * KERNEL_W; }
    int64_t padded_inner() const { return round_up(inner(), ACCUMULATORS); }
    int64_t parameters() const { return outputs * (inner() + 1); }
    int64_t bands() const { return ceil_div(rows(), BAND); }
    int64_t band_floats() const { return (padded_inner() + 1) * padded_outputs(); }
    int64_t stretch() const {  // windows at a time
        const int64_t fit = CACHE_FLOATS / std::max(padded_inner(), padded_outputs()) / ACCUMULATORS * ACCUMULATORS;
        return std::clamp<int64_t>(fit, MIN_WINDOWS, WINDOWS);
    }
};

// 2^f = sum of EXP2[n] * f^n with a relative error of 7.5e-8, for f in [0, 1] or [-1/2, 1/2]: what is faster to split off.
#if defined(__AVX512DQ__)
constexpr float EXP2[] = {0.99999994f, 0.69315308f, 0.24015361f, 5.5826318e-2f, 8.9893397e-3f, 1.8775767e-3f};
#else
constexpr float EXP2[] = {1.0000001f, 0.69314694f, 0.24022120f, 5.5507131e-2f, 9.6755410e-3f, 1.3276472e-3f};
#endif

// 1 / (1 + 2^t), of several vectors side by side, because each step waits for the one before. NaN stays NaN; beyond 125 the
// result stays at 2^-125.
template <int COUNT>
inline void sigmoids_of_exponents(vec (&t)[COUNT]) {
    vec f[COUNT], p[COUNT];  // 2^f, and t = f + an integer
#if defined(__AVX512DQ__)
    for (int i = 0; i < COUNT; ++i) t[i] = (vec)_mm512_min_ps(_mm512_set1_ps(125.0f), (__m512)t[i]);
    for (int i = 0; i < COUNT; ++i) f[i] = (vec)_mm512_reduce_ps((__m512)t[i], _MM_FROUND_TO_NEG_INF);
#else
    constexpr float ROUND = 12582912.0f + 127.0f;  // 1.5 * 2^23 + 127: adding it rounds to an integer, in the lowest bits
    vec rounded[COUNT];
    for (int i = 0; i < COUNT; ++i) t[i] = t[i] > 125.0f ? vec{} + 125.0f : t[i];  // so that NaN fails both comparisons
    for (int i = 0; i < COUNT; ++i) t[i] = t[i] < -125.0f ? vec{} - 125.0f : t[i];
    for (int i = 0; i < COUNT; ++i) rounded[i] = t[i] + ROUND;
    for (int i = 0; i < COUNT; ++i) f[i] = t[i] - (rounded[i] - ROUND);
#endif
    for (int i = 0; i < COUNT; ++i) p[i] = f[i] * EXP2[5] + EXP2[4];
    for (int n = 3; n >= 0; --n)
        for (int i = 0; i < COUNT; ++i) p[i] = p[i] * f[i] + EXP2[n];
#if defined(__AVX512DQ__)
    for (int i = 0; i < COUNT; ++i) p[i] = (vec)_mm512_scalef_ps((__m512)p[i], (__m512)t[i]) + 1.0f;
    for (int i = 0; i < COUNT; ++i) t[i] = (vec)_mm512_rcp14_ps((__m512)p[i]);
    for (int i = 0; i < COUNT; ++i) p[i] = 1.0f - p[i] * t[i];
    for (int i = 0; i < COUNT; ++i) t[i] = t[i] + t[i] * p[i];  // one step of Newton's
#else
    for (int i = 0; i < COUNT; ++i) p[i] = p[i] * (vec)((ivec)rounded[i] << 23) + 1.0f;
    for (int i = 0; i < COUNT; ++i) t[i] = 1.0f / p[i];
#endif
}

// weight (outputs, inner) -> packed [inner][padded_outputs], and bias alike, times the factors; zeros where there is none.
void pack(const float* weight, const float* bias, float* packed, float* packed_bias, Shape shape) {
    constexpr float MINUS_LOG2_E = -1.44269504f;  // so that the product's results are exponents of 2
    const int64_t padded = shape.padded_outputs(), inner = shape.inner();
    for (int64_t o = 0; o < shape.outputs; ++o) {
        for (int64_t k = 0; k < inner; ++k) packed[k * padded + o] = weight[o * inner + k] * (MINUS_LOG2_E / (POOL_H * POOL_W));
        packed_bias[o] = bias[o] * MINUS_LOG2_E;
    }
}

// sums[i] = in[i] + ... + in[i + WIDTH - 1]; what all have in common is added once.
template <int COUNT, int WIDTH>
inline void sliding_sums(const vec* in, vec* sums) {
    if constexpr (COUNT > WIDTH) {
        for (int i = 0; i < COUNT; ++i) {
            sums[i] = in[i];
            for (int n = 1; n < WIDTH; ++n) sums[i] += in[i + n];
        }
    } else {
        sums[COUNT - 1] = in[COUNT - 1];
        for (int n = COUNT; n < WIDTH; ++n) sums[COUNT - 1] += in[n];
        for (int i = COUNT - 2; i >= 0; --i) sums[i] = in[i] + sums[i + 1];
        vec behind = {};
        for (int i = 1; i < COUNT; ++i) {
            behind = i == 1 ? in[WIDTH] : behind + in[WIDTH + i - 1];
            sums[i] += behind;
        }
    }
}

// Column sums of a block of LANES windows, a vector for each remainder of the column modulo POOL_W, and of AHEAD blocks more.
constexpr int AHEAD = ceil_div((KERNEL_W + POOL_W - 2) / POOL_W, LANES);
typedef vec Phases[AHEAD + 1][POOL_W];

template <int COLUMN>
inline vec column_sums(const Phases& phases) {
    constexpr int BLOCK = COLUMN / POOL_W / LANES, SHIFT = COLUMN / POOL_W % LANES, PHASE = COLUMN % POOL_W;
    if constexpr (SHIFT == 0)
        return phases[BLOCK][PHASE];
    else
        return LANES_FROM(phases[BLOCK][PHASE], phases[BLOCK + 1][PHASE], i + SHIFT);
}

template <int... COLUMN>
inline void row_sums(const Phases& phases, float* boxes, std::integer_sequence<int, COLUMN...>) {
    const vec columns[] = {column_sums<COLUMN>(phases)...};
    vec sums[KERNEL_W];
    sliding_sums<KERNEL_W, POOL_W>(columns, sums);
    for (int e = 0; e < KERNEL_W; ++e) store(boxes + e * PITCH, sums[e]);
}

// boxes[c][d][e][j] = sum over u < POOL_H, v < POOL_W of x[c][d + u][POOL_W * j + e + v], for j < windows: first down the
// columns, then along the rows, all in registers. Of x, `readable` floats may be read; UNBOUNDED: more than are looked at.
// Behind the windows, up to a multiple of LANES, sums are of whatever pixels lie there.
template <bool UNBOUNDED>
__attribute__((noinline)) void box_sums(const float* x, int64_t readable, float* boxes, int64_t windows, const Shape& shape) {
    constexpr int TALL = KERNEL_H + POOL_H - 1;
    for (int64_t c = 0; c < shape.channels; ++c) {
        Phases phases[KERNEL_H] = {};
        for (int64_t j = 0; j < windows + AHEAD * LANES; j += LANES) {
            for (int d = 0; d < KERNEL_H; ++d)
                for (int a = 0; a < AHEAD; ++a)
                    for (int u = 0; u < POOL_W; ++u) phases[d][a][u] = phases[d][a + 1][u];
            if (j * POOL_W < windows * POOL_W + KERNEL_W - 1) {
                for (int q = 0; q < POOL_W; ++q) {
                    vec in[TALL], sums[KERNEL_H];
                    for (int u = 0; u < TALL; ++u) {
                        const int64_t at = c * shape.plane() + u * shape.width + j * POOL_W + q * LANES;
                        in[u] = UNBOUNDED ? load(x + at) : load_first(x + at, std::clamp<int64_t>(readable - at, 0, LANES));
                    }
                    sliding_sums<KERNEL_H, POOL_H>(in, sums);
                    for (int d = 0; d < KERNEL_H; ++d) phases[d][AHEAD][q] = sums[d];
                }
                for (int d = 0; d < KERNEL_H; ++d) unzip<POOL_W>(phases[d][AHEAD]);
            }
            if (j < AHEAD * LANES) continue;
            float* to = boxes + c * KERNEL_H * KERNEL_W * PITCH + j - AHEAD * LANES;
            for (int d = 0; d < KERNEL_H; ++d)
                row_sums(phases[d], to + d * KERNEL_W * PITCH, std::make_integer_sequence<int, KERNEL_W + POOL_W - 1>());
        }
    }
}

// The products. A tile is VECTORS vectors wide and as tall as there are accumulators; the best way to keep it in registers is a
// function that is not inlined.

// acc[p][v] += sum of left[p] * right[v] over `terms`, each of which lies a step behind the one before.
template <int VECTORS, int LEFT_PITCH>
inline void accumulate(vec (&acc)[ACCUMULATORS / VECTORS][VECTORS], const float* left, int64_t left_step, const float* right,
                       int64_t right_step, int64_t terms) {
    for (int64_t n = 0; n < terms; ++n, left += left_step, right += right_step) {
        vec r[VECTORS];
        for (int v = 0; v < VECTORS; ++v) r[v] = load(right + v * LANES);
        for (int p = 0; p < ACCUMULATORS / VECTORS; ++p)
            for (int v = 0; v < VECTORS; ++v) acc[p][v] += r[v] * left[p * LEFT_PITCH];
    }
}

// f(std::integral_constant<int, VECTORS>, the first of them), for blocks of at most MAX_VECTORS that make up `vectors`.
template <class F>
inline void for_each_block(int64_t vectors, F f) {
    for (int64_t first = 0; first < vectors; first += MAX_VECTORS) {
        const int64_t left = vectors - first;
        if constexpr (MAX_VECTORS == 4) {
            if (left >= 4) f(std::integral_constant<int, 4>(), first);
            if (left == 3) f(std::integral_constant<int, 3>(), first);
            if (left == 2) f(std::integral_constant<int, 2>(), first);
        } else if (left >= 2)
            f(std::integral_constant<int, 2>(), first);
        if (left == 1) f(std::integral_constant<int, 1>(), first);
    }
}

// The cache lines that the next pooled row is the first to read: fetched while this one is multiplied, a few at a time,
// since a core has only a dozen buffers for lines under way.
struct Upcoming {
    const float* row;  // of which `line` comes next
    int64_t rows, lines, width, plane, line = 0, u = 0;
    void fetch(int64_t count) {
        for (; count > 0 && rows > 0; --count) {
            __builtin_prefetch(row + line * LINE, 0, 2);
            if (++line < lines) continue;
            line = 0, --rows;
            row += ++u == POOL_H ? plane - (POOL_H - 1) * width : width;
            if (u == POOL_H) u = 0;
        }
    }
};

// What the threads of a forward pass share. Outputs that are not wanted are null.
struct Forward {
    Shape shape;
    const float *x, *weight, *bias;  // weight and bias as packed
    double* sums;                    // (batch, rows)
    float* delta;                    // s * (1 - s) of each sigmoid s: (batch, rows, columns, padded_outputs)
    float* terms;                    // gradients of the parameters: (bands, padded_inner weights and a bias, padded_outputs)
    int64_t first_band;              // of the batch, to which terms[0] belongs
};

constexpr int64_t FETCH_TERMS = 6;  // terms of a product from one fetch to the next

// Sigmoids of POSITIONS windows in VECTORS * LANES output channels: their sums to totals, and delta where it is not null.
template <int VECTORS>
__attribute__((noinline)) void sigmoid_tile(const Forward& job, const float* boxes, int64_t first_output, int64_t valid,
                                            float* delta, vec* totals, Upcoming& upcoming, int64_t fetches) {
    constexpr int POSITIONS = ACCUMULATORS / VECTORS;
    const int64_t padded = job.shape.padded_outputs(), inner = job.shape.inner();
    const float *weight = job.weight + first_output, *bias = job.bias + first_output;
    vec acc[POSITIONS][VECTORS];
    for (int p = 0; p < POSITIONS; ++p)
        for (int v = 0; v < VECTORS; ++v) acc[p][v] = load(bias + v * LANES);
    for (int64_t k = 0; k < inner; k += FETCH_TERMS) {
        upcoming.fetch(fetches);
        accumulate<VECTORS, 1>(acc, boxes + k * PITCH, PITCH, weight + k * padded, padded, std::min(FETCH_TERMS, inner - k));
    }
    for (int p = 0; p < POSITIONS; ++p)
        if (p < valid) {
            sigmoids_of_exponents(acc[p]);
            for (int v = 0; v < VECTORS; ++v) {
                const vec s = acc[p][v];
                totals[v] += s;
                if (delta) store(delta + p * padded + first_output + v * LANES, s - s * s);
            }
        }
}

// terms += delta times POSITIONS rows of box sums, over the windows.
template <int VECTORS>
__attribute__((noinline)) void parameter_tile(const float* boxes, const float* delta, int64_t windows, int64_t padded,
                                              float* terms) {
    constexpr int POSITIONS = ACCUMULATORS / VECTORS;
    vec acc[POSITIONS][VECTORS] = {};
    accumulate<VECTORS, PITCH>(acc, boxes, 1, delta, padded, windows);
    for (int p = 0; p < POSITIONS; ++p)
        for (int v = 0; v < VECTORS; ++v) {
            float* to = terms + p * padded + v * LANES;
            store(to, load(to) + acc[p][v]);
        }
}

inline void add_parameter_terms(const float* boxes, const float* delta, int64_t windows, float* terms, const Shape& shape) {
    const int64_t padded = shape.padded_outputs();
    for_each_block(padded / LANES, [&](auto vectors, int64_t first) {
        constexpr int VECTORS = decltype(vectors)::value, POSITIONS = ACCUMULATORS / VECTORS;
        for (int64_t k = 0; k < shape.inner(); k += POSITIONS)
            parameter_tile<VECTORS>(boxes + k * PITCH, delta + first * LANES, windows, padded,
                                    terms + k * padded + first * LANES);
    });
    float* bias_terms = terms + shape.padded_inner() * padded;
    for (int64_t o = 0; o < padded; o += LANES) {
        vec sum = {};
        for (int64_t j = 0; j < windows; ++j) sum += load(delta + j * padded + o);
        store(bias_terms + o, load(bias_terms + o) + sum);
    }
}

// The sum of sigmoids of a stretch of a pooled row, in all output channels. Of the thread, both zeros at first: `boxes`
// [padded_inner][PITCH], and where delta is not kept `own_delta` [WINDOWS][padded_outputs].
float stretch_sum(const Forward& job, int64_t sample, int64_t row, int64_t left, float* boxes, float* own_delta) {
    const Shape& shape = job.shape;
    const int64_t windows = std::min(shape.stretch(), shape.columns() - left), padded = shape.padded_outputs();
    const int64_t pixel = (sample * shape.channels * shape.height + row * POOL_H) * shape.width + left * POOL_W;
    const int64_t readable = shape.batch * shape.channels * shape.plane() - pixel;
    const int64_t looked_at = (shape.channels - 1) * shape.plane() + (KERNEL_H + POOL_H - 2) * shape.width +
                              round_up(windows + HALO_W, LANES) * POOL_W;
    const auto sum_boxes = looked_at <= readable ? box_sums<true> : box_sums<false>;
    sum_boxes(job.x + pixel, readable, boxes, windows, shape);

    const int64_t band = sample * shape.bands() + row / BAND - job.first_band;
    float* terms = job.terms ? job.terms + band * shape.band_floats() : nullptr;
    float* delta = job.delta ? job.delta + ((sample * shape.rows() + row) * shape.columns() + left) * padded
                             : terms ? own_delta : nullptr;
    const int64_t rows_to_fetch = row + 1 < shape.rows() ? shape.channels * POOL_H : 0;
    Upcoming upcoming{job.x + pixel + (KERNEL_H - 1 + POOL_H) * shape.width, rows_to_fetch, ceil_div(windows * POOL_W, LINE),
                      shape.width, shape.plane()};
    const int64_t tiles = ceil_div(windows, ACCUMULATORS / MAX_VECTORS) * ceil_div(padded / LANES, MAX_VECTORS);
    const int64_t fetches = ceil_div(rows_to_fetch * upcoming.lines, tiles * ceil_div(shape.inner(), FETCH_TERMS));
    float sum = 0.0f;
    for_each_block(padded / LANES, [&](auto vectors, int64_t first) {
        constexpr int VECTORS = decltype(vectors)::value, POSITIONS = ACCUMULATORS / VECTORS;
        vec totals[VECTORS] = {};
        for (int64_t j = 0; j < windows; j += POSITIONS)
            sigmoid_tile<VECTORS>(job, boxes + j, first * LANES, windows - j, delta ? delta + j * padded : nullptr, totals,
                                  upcoming, fetches);
        vec total = {};
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t exist = shape.outputs - (first + v) * LANES;
            for (int64_t i = std::clamp<int64_t>(exist, 0, LANES); i < LANES; ++i) totals[v][i] = 0.0f;
            total += totals[v];
        }
        for (int i = 0; i < LANES; ++i) sum += total[i];
    });
    if (terms) add_parameter_terms(boxes, delta, windows, terms, shape);
    return sum;
}

// grads (outputs * inner weights, then the biases) of a sample = the sum of the terms of its bands.
void add_bands(const float* terms, float* grads, const Shape& shape) {
    const int64_t padded = shape.padded_outputs(), inner = shape.inner();
    for (int64_t k = 0; k <= inner; ++k)
        for (int64_t o = 0; o < padded; o += LANES) {
            const float* from = terms + (k < inner ? k : shape.padded_inner()) * padded + o;
            vec sum = load(from);
            for (int64_t band = 1; band < shape.bands(); ++band) sum += load(from + band * shape.band_floats());
            for (int64_t i = 0; i < std::min<int64_t>(LANES, shape.outputs - o); ++i)
                grads[k < inner ? (o + i) * inner + k : shape.outputs * inner + o + i] =
                    k < inner ? sum[i] / (POOL_H * POOL_W) : sum[i];
        }
}

// out[i] = sum over b < batch of weights[b] * in[b][i], for i from begin to end, of rows of `size`.
void weighted_sum(const float* weights, const float* in, float* out, int64_t batch, int64_t size, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = 0.0f;
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = begin; i < end; ++i) out[i] += weights[b] * in[b * size + i];
}

// The input's gradient: the forward pass transposed. Windows of a stretch begin at PAD in rows of GRADIENT_PITCH floats, zeros
// around them, so that those beside the image's edges exist and add nothing.
constexpr int PAD = round_up(HALO_W, LANES), GRADIENT_PITCH = PAD + PITCH + round_up(HALO_W + 1, LANES) + LANES;
constexpr int64_t MAX_PIXELS = int64_t(GRADIENT_PITCH) * POOL_W;

struct InputGradient {
    Shape shape;
    const float* grad_out;  // (batch)
    const float* delta;     // as in Forward
    const float* weight;    // [outputs][padded_inner], divided by the size of a window
    float* grad_x;
    int64_t block_rows() const { return ceil_div(shape.height, POOL_H); }
    int64_t bands() const { return ceil_div(block_rows(), INPUT_BAND); }
    int64_t stretch() const { return shape.stretch() - HALO_W; }  // windows beyond those that it has from the one before
    int64_t stretches() const { return ceil_div(shape.columns(), stretch()); }
    int64_t units() const { return shape.batch * bands() * stretches(); }
};

struct InputGradientWorkspace {  // of a thread; all begin as zeros
    float* delta;                // [padded_outputs][PITCH]
    float* boxes;                // gradients of the box sums: [padded_inner][GRADIENT_PITCH]
    float* carry;                // what windows of earlier rows give to later ones: [channels][KERNEL_H - 1][MAX_PIXELS]
};

struct Stretch {  // windows from `first` are read, pixels from that of `left` are written
    int64_t first, left, right, left_pixel, right_pixel;
};

template <int VECTORS>
__attribute__((noinline)) void box_gradient_tile(const float* weight, int64_t padded_inner, const float* delta, int64_t outputs,
                                                 float grad_out, float* boxes) {
    constexpr int POSITIONS = ACCUMULATORS / VECTORS;
    vec acc[POSITIONS][VECTORS] = {};
    accumulate<VECTORS, 1>(acc, weight, padded_inner, delta, PITCH, outputs);
    for (int p = 0; p < POSITIONS; ++p)
        for (int v = 0; v < VECTORS; ++v) store(boxes + p * GRADIENT_PITCH + v * LANES, acc[p][v] * grad_out);
}

// boxes[k][j] = grad_out * sum over o of weight[o][k] * delta[j][o] for the windows of a stretch.
inline void box_gradients(const InputGradient& job, int64_t sample, int64_t row, const Stretch& stretch,
                          const InputGradientWorkspace& workspace) {
    const Shape& shape = job.shape;
    const int64_t windows = stretch.right - stretch.first, padded = shape.padded_outputs();
    const float* delta = job.delta + ((sample * shape.rows() + row) * shape.columns() + stretch.first) * padded;
    for (int64_t j = 0; j < windows; j += LANES)
        for (int64_t o = 0; o < padded; o += LANES) {
            vec block[LANES];
            for (int i = 0; i < LANES; ++i) block[i] = j + i < windows ? load(delta + (j + i) * padded + o) : vec{};
            zip<LANES>(block);  // transposes it
            for (int i = 0; i < LANES; ++i) store(workspace.delta + (o + i) * PITCH + j, block[i]);
        }
    for_each_block(ceil_div(windows, LANES), [&](auto vectors, int64_t first) {
        constexpr int VECTORS = decltype(vectors)::value, POSITIONS = ACCUMULATORS / VECTORS;
        for (int64_t k = 0; k < shape.inner(); k += POSITIONS)
            box_gradient_tile<VECTORS>(job.weight + k, shape.padded_inner(), workspace.delta + first * LANES, shape.outputs,
                                       job.grad_out[sample], workspace.boxes + k * GRADIENT_PITCH + PAD + first * LANES);
    });
    for (int64_t k = 0; k < shape.inner(); ++k)
        for (int64_t j = windows; j < round_up(windows, LANES); ++j) workspace.boxes[k * GRADIENT_PITCH + PAD + j] = 0.0f;
}

// Gives the gradients of a row of boxes to the pixels: along the rows, then down the columns. Of these, the first POOL_H rows
// are complete, and written if `write`; the rest is carried to the next row of boxes.
inline void spread_boxes(const InputGradient& job, int64_t sample, int64_t row, const Stretch& stretch, bool write,
                         const InputGradientWorkspace& workspace) {
    const Shape& shape = job.shape;
    const int64_t pixels = stretch.right_pixel - stretch.left_pixel;
    for (int64_t c = 0; c < shape.channels; ++c) {
        const float* boxes = workspace.boxes + c * KERNEL_H * KERNEL_W * GRADIENT_PITCH + PAD + stretch.left - stretch.first;
        float* carry = workspace.carry + c * (KERNEL_H - 1) * MAX_PIXELS;
        float* grad_x = job.grad_x + ((sample * shape.channels + c) * shape.height + row * POOL_H) * shape.width +
                        stretch.left_pixel;
        for (int64_t j = 0; j * POOL_W < pixels; j += LANES) {
            vec along[KERNEL_H][POOL_W];
            for (int d = 0; d < KERNEL_H; ++d) {
                for (int u = 0; u < POOL_W; ++u) {
                    along[d][u] = load(boxes + d * KERNEL_W * GRADIENT_PITCH + j);
                    for (int e = 1; e < KERNEL_W; ++e) {
                        const int earlier = e > u ? (e - u + POOL_W - 1) / POOL_W : 0;
                        along[d][u] += load(boxes + (d * KERNEL_W + e) * GRADIENT_PITCH + j - earlier);
                    }
                }
                zip<POOL_W>(along[d]);
            }
            for (int q = 0; q < POOL_W; ++q) {
                const int64_t pixel = j * POOL_W + q * LANES, count = std::min<int64_t>(LANES, pixels - pixel);
                for (int t = 0; t < KERNEL_H + POOL_H - 1; ++t) {
                    vec sum = t < KERNEL_H - 1 ? load(carry + t * MAX_PIXELS + pixel) : vec{};
                    for (int d = std::max(0, t - POOL_H + 1); d <= std::min(t, KERNEL_H - 1); ++d) sum += along[d][q];
                    if (t >= POOL_H)
                        store(carry + (t - POOL_H) * MAX_PIXELS + pixel, sum);
                    else if (write && row * POOL_H + t < shape.height) {
                        float* to = grad_x + t * shape.width + pixel;
                        if (count == LANES) store(to, sum);
                        else for (int64_t i = 0; i < count; ++i) to[i] = sum[i];
                    }
                }
            }
        }
    }
}

// A band of rows of a stretch of a sample. Windows that begin above the band reach into it, so their rows come first.
void input_gradient_unit(const InputGradient& job, int64_t unit, const InputGradientWorkspace& workspace) {
    const Shape& shape = job.shape;
    const int64_t index = unit % job.stretches(), band = unit / job.stretches() % job.bands();
    const int64_t sample = unit / job.stretches() / job.bands();
    const int64_t left = index * job.stretch(), right = std::min(left + job.stretch(), shape.columns());
    const int64_t right_pixel = index + 1 == job.stretches() ? shape.width : right * POOL_W;
    const Stretch stretch{std::max<int64_t>(0, left - HALO_W), left, right, left * POOL_W, right_pixel};

    std::fill_n(workspace.carry, shape.channels * (KERNEL_H - 1) * MAX_PIXELS, 0.0f);
    std::fill_n(workspace.boxes, shape.padded_inner() * GRADIENT_PITCH, 0.0f);
    const int64_t begin = band * INPUT_BAND, end = std::min(begin + INPUT_BAND, job.block_rows());
    for (int64_t row = std::max<int64_t>(0, begin - HALO_H); row < end; ++row) {
        if (row < shape.rows()) box_gradients(job, sample, row, stretch, workspace);
        else std::fill_n(workspace.boxes, shape.padded_inner() * GRADIENT_PITCH, 0.0f);
        spread_boxes(job, sample, row, stretch, row >= begin, workspace);
    }
}

// ---- what Python calls
// f(begin, end) for equal parts of [0, count), by at most `threads` threads of the OpenMP runtime that the process has loaded,
// torch's. Returns false if one of them found no memory.
template <class F>
bool parallel_for(int64_t count, int64_t threads, F f) {
    const int64_t parts = omp_in_parallel() ? 1 : std::clamp<int64_t>(count, 1, threads), each = ceil_div(count, parts);
    bool done = true;
#pragma omp parallel for num_threads(parts) schedule(static, 1) reduction(&& : done)
    for (int64_t part = 0; part < parts; ++part) try {
            const int64_t begin = part * each, end = std::min(begin + each, count);
            if (begin < end) f(begin, end);
        } catch (const std::bad_alloc&) {
            done = false;
        }
    return done;
}

constexpr int DONE = 0, NO_MEMORY = 12;

// Zeros that begin at a cache line.
class Floats {
    struct alignas(4 * LINE) Line { float floats[LINE]; };
    std::vector<Line> lines_;

public:
    explicit Floats(int64_t count) : lines_(ceil_div(count, LINE)) {}
    operator float*() { return reinterpret_cast<float*>(lines_.data()); }
};

// Pooled rows of all samples, from begin to end; with terms, a whole number of bands.
static void forward_rows(const Forward& job, int64_t begin, int64_t end) {
    const Shape& shape = job.shape;
    Floats boxes(shape.padded_inner() * PITCH), delta(job.terms && !job.delta ? WINDOWS * shape.padded_outputs() : 0);
    for (int64_t row = begin; row < end; ++row) {
        job.sums[row] = 0;
        for (int64_t left = 0; left < shape.columns(); left += shape.stretch())
            job.sums[row] += stretch_sum(job, row / shape.rows(), row % shape.rows(), left, boxes, delta);
    }
}

// Rows are worked on in groups of samples whose terms take no more than a sample's, or 64 MB.
static bool forward_with_terms(Forward job, float* grads, int64_t threads) {
    const Shape& shape = job.shape;
    const int64_t sample_floats = shape.bands() * shape.band_floats();
    const int64_t group = std::clamp<int64_t>((16 << 20) / sample_floats, 1, shape.batch);
    for (int64_t first = 0; first < shape.batch; first += group) {
        const int64_t samples = std::min(group, shape.batch - first);
        Floats terms(samples * sample_floats);
        job.terms = terms, job.first_band = first * shape.bands();
        const auto first_row = [&](int64_t band) {
            return (job.first_band + band) / shape.bands() * shape.rows() + (job.first_band + band) % shape.bands() * BAND;
        };
        const auto rows = [&](int64_t begin, int64_t end) { forward_rows(job, first_row(begin), first_row(end)); };
        if (!parallel_for(samples * shape.bands(), threads, rows)) return false;
        parallel_for(samples, threads, [&](int64_t begin, int64_t end) {
            for (int64_t b = begin; b < end; ++b)
                add_bands(job.terms + b * sample_floats, grads + (first + b) * shape.parameters(), shape);
        });
    }
    return true;
}

// `grads` (batch, parameters) and `delta` (batch, rows, columns, padded outputs) may be null.
extern "C" int run_forward(const float* x, const float* weight, const float* bias, float* out, float* grads, float* delta,
                           int64_t batch, int64_t channels, int64_t height, int64_t width, int64_t outputs,
                           int64_t threads) try {
    const Shape shape{batch, channels, height, width, outputs};
    Floats packed(shape.inner() * shape.padded_outputs()), packed_bias(shape.padded_outputs());
    pack(weight, bias, packed, packed_bias, shape);
    std::vector<double> sums(batch * shape.rows());
    const Forward job{shape, x, packed, packed_bias, sums.data(), delta, nullptr, 0};
    const auto run_rows = [&](int64_t begin, int64_t end) { forward_rows(job, begin, end); };
    const int64_t all = batch * shape.rows();
    if (!(grads ? forward_with_terms(job, grads, threads) : parallel_for(all, threads, run_rows))) return NO_MEMORY;
    for (int64_t b = 0; b < batch; ++b)
        out[b] = std::accumulate(&sums[b * shape.rows()], &sums[b * shape.rows()] + shape.rows(), 0.0);
    return DONE;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

extern "C" int run_input_gradient(const float* grad_out, const float* delta, const float* weight, float* grad_x, int64_t batch,
                                  int64_t channels, int64_t height, int64_t width, int64_t outputs, int64_t threads) try {
    const Shape shape{batch, channels, height, width, outputs};
    Floats packed(outputs * shape.padded_inner());
    for (int64_t o = 0; o < outputs; ++o)
        for (int64_t k = 0; k < shape.inner(); ++k)
            packed[o * shape.padded_inner() + k] = weight[o * shape.inner() + k] / (POOL_H * POOL_W);
    const InputGradient job{shape, grad_out, delta, packed, grad_x};
    const bool done = parallel_for(job.units(), threads, [&](int64_t begin, int64_t end) {
        Floats deltas(shape.padded_outputs() * PITCH), boxes(shape.padded_inner() * GRADIENT_PITCH),
            carry(shape.channels * (KERNEL_H - 1) * MAX_PIXELS);
        for (int64_t unit = begin; unit < end; ++unit) input_gradient_unit(job, unit, {deltas, boxes, carry});
    });
    return done ? DONE : NO_MEMORY;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// The gradients of `weights` weights, and of the rest of a sample's `size` parameters, the biases.
extern "C" int run_parameter_gradient(const float* grad_out, const float* grads, float* grad_weight, float* grad_bias,
                                      int64_t batch, int64_t size, int64_t weights, int64_t threads) {
    parallel_for(weights, std::min(threads, ceil_div(weights, 1024)), [&](int64_t begin, int64_t end) {
        weighted_sum(grad_out, grads, grad_weight, batch, size, begin, end);
    });
    weighted_sum(grad_out, grads + weights, grad_bias, batch, size, 0, size - weights);
    return DONE;
}
"""


@functools.lru_cache(maxsize=1024)
def sizes(kernels, x, weight, bias, *pool):
    """Return the launches' sizes. Raises RuntimeError for what the kernels do not take."""
    shape, kernel, outputs = x[0], (kernels.KERNEL_H, kernels.KERNEL_W), weight[0][:1]
    check(kernels, "x", x, x, (*shape[:2], *shape[-2:]))
    check(kernels, "weight", weight, x, (*outputs, shape[1], *kernel))
    check(kernels, "bias", bias, x, outputs)
    height, width = shape[2:]
    if pool != (kernels.POOL_H, kernels.POOL_W) or height < kernel[0] + pool[0] - 1 or width < kernel[1] + pool[1] - 1:
        raise RuntimeError(f"{NAME}: a window of {[*pool]} behind a kernel of {kernel} does not fit into {height} x {width}")
    return *shape, *outputs


def save(kernels, x, weight, bias, pool, plan, sizes=sizes):
    """Return the output, each sample's gradients of the parameters (plan & 2), and the sigmoids' derivatives (plan & 1)."""
    found = sizes(kernels, kind(x), kind(weight), kind(bias), *pool)
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    out, grads, delta = kernels.saved(kernels, x, weight, bias, pool, plan)
    if x.shape[0]:
        kept = grads if plan & 2 else None, delta if plan & 1 else None
        launch(kernels.run_forward, x, weight, bias, out, *kept, *found, torch.get_num_threads())
    return out, grads, delta


def saved(kernels, x, weight, bias, pool, plan):
    rows, columns = ((x.shape[i] - weight.shape[i] + 1) // pool[i - 2] for i in (2, 3))
    grads = x.new_empty((x.shape[0], weight.numel() + bias.numel()) if plan & 2 else 0)
    delta = x.new_empty((x.shape[0], rows, columns, -(-bias.numel() // 16) * 16) if plan & 1 else 0)  # padded_outputs
    return x.new_empty(x.shape[0]), grads, delta


def forward(kernels, x, weight, bias, pool):
    return kernels.save(kernels, x, weight, bias, pool, 0)[0]


def gradient(kernels, grad, x, weight, bias, pool, grads, delta, plan):
    grad, weight, threads = grad.contiguous(), weight.contiguous(), torch.get_num_threads()
    found = [each.new_empty(each.shape if plan & bit else 0) for each, bit in ((x, 1), (weight, 2), (bias, 2))]
    if found[0].numel():
        launch(kernels.run_input_gradient, grad, delta, weight, found[0], *x.shape, weight.shape[0], threads)
    if plan & 2:
        launch(kernels.run_parameter_gradient, grad, grads, *found[1:], x.shape[0], grads.shape[1], weight.numel(), threads)
    return tuple(found)


def plan(kernels, x, weight, bias, pool, needs):
    return needs


def original(x, weight, bias, pool):
    """The gradient of a gradient is PyTorch's."""
    return torch.sigmoid(nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)).sum(dim=(1, 2, 3))


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CPP, "forward(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor", forward, original
    fused = plan, save, saved, gradient

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    @torch.compiler.assume_constant_result
    def namespace(self):
        conv, pool = self._modules["conv"], self._modules["avg_pool"].kernel_size
        (kernel_h, kernel_w), (pool_h, pool_w) = conv.kernel_size, (pool, pool) if isinstance(pool, int) else pool
        sizes = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, "POOL_H": pool_h, "POOL_W": pool_w}
        return build(*self.sources, (fuse, *self.fused), ("-march=native", "-fopenmp"), **sizes)

    def operands(self, x):
        conv, pool = self._modules["conv"], self._modules["avg_pool"]  # self.conv takes nn.Module half a microsecond
        return x, conv.weight, conv.bias, pool.kernel_size

    def forward(self, x):
        return getattr(torch.ops, self.namespace()).forward(*self.operands(x))


# ---- A gradient of its own: the same text in all files that have one.
def fuse(library, schema, kernels, Gradient, plan, save, saved, gradient):
    """Give `forward` a gradient by two more operators. PyTorch's (Gradient) stays for the gradient of a gradient.

    plan(kernels, *arguments, needs) returns a number for the others, or None where PyTorch is to compute the gradient; in both
    numbers bit 1 stands for the gradient of the first argument, bit 2 for those of the other tensors.
    save(kernels, *arguments, plan) returns the output and two tensors, `saved` the same without values. gradient(kernels, grad,
    *arguments, *those two, plan) returns the gradients of the tensors among the arguments, empty ones where not needed.
    """
    operators, inputs = getattr(torch.ops, library.ns), schema[schema.index("(") + 1 : schema.index(")")]
    save, gradient, tensors = functools.partial(save, kernels), functools.partial(gradient, kernels), inputs.count("Tensor")

    def shapes(grad, *arguments):
        found = zip(arguments[:tensors], [1, *[2] * tensors], strict=False)
        return tuple(grad.new_empty(0 if each is None or not arguments[-1] & bit else each.shape) for each, bit in found)

    def define(name, schema, function, fake):
        library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)

    define("save", f"({inputs}, int plan) -> (Tensor, Tensor, Tensor)", save, functools.partial(saved, kernels))
    returned = ", ".join(["Tensor"] * tensors)
    define("gradient", f"(Tensor grad, {inputs}, Tensor kept, Tensor more, int plan) -> ({returned})", gradient, shapes)

    def needs_of(ctx):
        _, first, *others = ctx.needs_input_grad
        return first + 2 * any(others)

    class Fused(Gradient):
        @staticmethod
        def forward(ctx, keys, *arguments):
            try:
                ctx.plan = plan(kernels, *arguments, needs_of(ctx))
            except TypeError:  # sizes are torch.compile's symbols: what is compiled is for these numbers
                known = [each.new_empty([int(n) for n in each.shape]) if torch.is_tensor(each) else each for each in arguments]
                ctx.plan = plan(kernels, *known, needs_of(ctx))
            if ctx.plan is None:
                return Gradient.forward(ctx, keys, *arguments)
            output, *kept = below_autograd(operators.save, save, keys, *arguments, ctx.plan)
            ctx.save_for_backward(*arguments[:tensors], *kept)
            ctx.others = arguments[tensors:]
            return output

        @staticmethod
        def backward(ctx, grad):
            if ctx.plan is None or torch.is_grad_enabled():  # create_graph
                return Gradient.backward(ctx, grad)
            given, needs = ctx.saved_tensors, ctx.needs_input_grad[1 : 1 + tensors]
            found = operators.gradient(grad, *given[:tensors], *ctx.others, *given[tensors:], ctx.plan & ~3 | needs_of(ctx))
            found = [each if needed else None for each, needed in zip(found, needs, strict=True)]
            return None, *found, *[None] * len(ctx.others)

    return Fused


# ---- From here on all files have the same text; python -m playground.command.shared_text writes it.
LOADING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once
KEY, KEYS = torch._C.DispatchKey, torch._C.DispatchKeySet
NUMBER = getattr(KEYS, "raw_repr", repr)  # PyTorch 2.4 has neither this nor the next function
NEED_GRAD = getattr(torch._C, "_any_requires_grad", lambda *given: any(getattr(each, "requires_grad", False) for each in given))
PLAIN = {NUMBER(KEYS(KEY.CPU) | KEYS(KEY.AutogradCPU)), NUMBER(KEYS(KEY.CUDA) | KEYS(KEY.AutogradCUDA))}


@functools.lru_cache(maxsize=None)
def build(name, text, schema, forward, original, fused=(), flags=(), **constants):
    """Compile `text` (CUDA, or C++) once a machine; return the namespace of an operator, which an edit changes.

    forward(kernels, *arguments), tensors first, calls the text's functions; original(*arguments) computes it by PyTorch.
    """
    if torch.__version__ < "2.4":
        raise RuntimeError(f"{name}: needs PyTorch 2.4 or later, this is {torch.__version__}")

    def fingerprint(part):  # of a function or its code: all but the place where it was written
        if inspect.isfunction(part := inspect.unwrap(part)):
            return fingerprint(part.__code__), [fingerprint(each) for each in part.__defaults__ or ()]
        return (part.co_code, part.co_names, [fingerprint(each) for each in part.co_consts]) if inspect.iscode(part) else part

    text = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items())) + text
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if "<<<" in text else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability(), torch.__version__
    everything = text, schema, flags, machine, [fingerprint(each) for each in (forward, original, *fused)]
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"
    operators = getattr(torch.ops, namespace)
    with LOADING:
        if not getattr(operators, "registered", None):
            kernels = load(namespace, text, flags, constants)
            vars(kernels).update({each.__name__: each for each in (original, *fused)})
            operators.registered = register(operators, schema, kernels, forward, original, *fused)
    return namespace


def load(name, text, flags, constants):
    """Return the library of a text. Its functions know how many tensors they take, first, and whether a stream, last."""
    from torch.utils import cpp_extension

    options = {"cpp_sources": text, "extra_cflags": ["-O3", *flags]}
    if is_cuda := "<<<" in text:
        options = {"cpp_sources": "", "cuda_sources": text, "extra_cuda_cflags": ["-O3", "-lineinfo", *flags]}
    if torch.__version__ >= "2.8":  # before, torch's headers come along
        options["no_implicit_headers"] = True
    if not shutil.which("ninja"):  # in a virtual environment that is not activated
        os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # or an interrupted build would count as done
    path = cpp_extension.load_inline(name, is_python_module=False, **options)  # None before PyTorch 2.5
    kernels = ctypes.CDLL(path or os.path.join(cpp_extension._get_build_directory(name, False), name + cpp_extension.LIB_EXT))
    vars(kernels).update(constants)
    kernels.device = "cuda" if is_cuda and not getattr(cpp_extension.load_inline, "emulates_cuda", False) else "cpu"
    numbers = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "int": ctypes.c_int}  # all else is a pointer
    for result, symbol, parameters in re.findall(r'extern "C" (\w+) (\w+)\(([^)]*)\)', text):
        if function := getattr(kernels, symbol, None):  # the text may leave it out for these constants
            types = [each.split()[0] for each in parameters.split(",") if each]
            function.restype, function.argtypes = numbers[result], [numbers.get(each, ctypes.c_void_p) for each in types]
            function.tensors, function.has_stream = parameters.count("*"), "cudaStream_t" in types
    return kernels


def register(operators, schema, kernels, forward, original, fuse=None, *fused):
    """Define the operator, for every device, so that forward checks the tensors. Without `fuse` its gradient is PyTorch's."""
    name, tensors = f"{operators.name}::forward", schema.count("Tensor") - 1
    library, forward = torch.library.Library(operators.name, "DEF"), functools.partial(forward, kernels)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys, *arguments):
            warn(f"{operators.name[:-11]}: {original.__doc__}")
            ctx.save_for_backward(*arguments[:tensors])
            ctx.others = arguments[tensors:]
            return below_autograd(operators.forward, forward, keys, *arguments)

        @staticmethod
        def backward(ctx, grad):
            keeps_graph, needs = torch.is_grad_enabled(), ctx.needs_input_grad[1:]
            with torch.enable_grad():
                # Views: the gradients are partial ones, also where an argument depends on another.
                given = [each if each is None else each.view_as(each) for each in ctx.saved_tensors[:tensors]]
                wanted = [each for each, needed in zip(given, needs, strict=False) if needed]
                found = iter(torch.autograd.grad(original(*given, *ctx.others), wanted, grad, create_graph=keeps_graph))
            return None, *[next(found) if needed else None for needed in needs]

    def autograd(keys, *arguments):
        # Gradient refuses the tangents that arguments may have within forward_ad.dual_level(); below it they would be dropped.
        if torch.autograd.forward_ad._current_level >= 0 or (torch.is_grad_enabled() and NEED_GRAD(*arguments)):
            return Gradient.apply(keys, *arguments)
        return below_autograd(operators.forward, forward, keys, *arguments)

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("forward", forward, "CompositeExplicitAutograd")
    library.impl("forward", autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(name, original, lib=library)
    for device in ("cuda", "cpu") if torch.__version__ >= "2.6" else ():  # in autocast, too, operands are float32
        torch.library.register_autocast(name, device, torch.float32, lib=library)
    if fuse:
        Gradient = fuse(library, schema, kernels, Gradient, *fused)
    return library


def below_autograd(operator, function, keys, *arguments):
    """Call an operator from its autograd kernel, or its function at once where the dispatcher would do no more."""
    if NUMBER(keys) in PLAIN:
        return function(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator.default.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def kind(tensor):
    """Return what checks and sizes depend on. A function of kinds is cached: it would take as long as the rest of a call."""
    return tensor.shape, tensor.dtype, tensor.device


def check(kernels, name, tensor, place, shape):
    """Raise RuntimeError unless a tensor of this kind is float32, of this shape, and beside `place`, where the kernels run."""
    found, dtype, device = tensor
    if dtype is not torch.float32 or found != shape or device != place[2] or device.type != kernels.device:
        wanted = f"a float32 {kernels.device.upper()} tensor of shape {list(shape)}, on one device with all others"
        raise RuntimeError(f"{NAME}: expected {name} as {wanted}; got {dtype} of shape {list(found)} on {device}")


def launch(function, *arguments):
    """Call a function of `kernels`, tensors or None first, on the first one's device and its current stream."""
    first, stream = arguments[0], 0
    if first.is_cuda:
        if (device := first.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(function, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
    pointers = [None if each is None else each.data_ptr() for each in arguments[: function.tensors]]
    if code := function(*pointers, *arguments[function.tensors :], *(stream,) * function.has_stream):
        words = f"CUDA error: {torch.cuda.CudaError(code)}" if first.is_cuda else f"error {code}"
        raise RuntimeError(f"{function.__name__}: {words}")


@functools.lru_cache(maxsize=None)
def warn(text):
    """Warn once a process, at the line that called into this file, not at one of PyTorch's."""
    files = [each.filename for each in inspect.stack(0)]
    level = len(files) - files[::-1].index(files[0])  # behind the outermost of this file
    while level < len(files) - 1 and files[level].startswith(os.path.dirname(torch.__file__)):
        level += 1
    warnings.warn(text, stacklevel=level + 1)


def main():
    from torch.utils import benchmark, cpp_extension

    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)  # by the playground: on the CPU, so a small input
    device = "cpu" if emulated or "_cpu_" in NAME else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    arguments, shape, small, limit = EXAMPLE
    model, x = ModelNew(*arguments).to(device).requires_grad_(False), torch.randn(small if emulated else shape, device=device)
    found, exact = model(x), torch.cat([original(*model.double().operands(part.double())) for part in x.split(16)])
    error = ((found - exact).abs().max() / exact.std()).item()
    names = {"model": model.float(), "x": x, "original": original}
    calls = () if emulated else ("model(x)", "original(*model.operands(x))")
    times = [f"{1e3 * benchmark.Timer(call, globals=names).timeit(20).mean:.3f} ms" for call in calls]
    how_fast = ", PyTorch ".join(times) or f"under the emulator, not timed, on an input of {tuple(x.shape)}"
    verdict = "right" if error <= limit else "wrong"
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict}; {how_fast}")


if __name__ == "__main__":
    main()
