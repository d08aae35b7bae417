"""conv_pool_sigmoid_sum on the CPU: pooling moved in front of the convolution's weights.

Why it is faster
    PyTorch computes 16 convolution outputs for every pooled one. Pooling is linear: here the weights are applied to box sums,
    the input pooled once for each element of the convolution's kernel, and 1.34 GFLOP a sample become 0.083. The box sums are
    separable and made in registers, where the sigmoid is applied to a tile of the product, too. Box sums (28 KB a row) and
    weights (18 KB) stay in the cache, and the next pooled row's input is prefetched.

Mathematics
    v3's. Column sums are sorted by remainder modulo p (unzip), so that a sum along a row adds whole vectors. The sigmoid's
    relative error is below 7e-7 for |x| < 8, below 5e-6 down to -80; below -86 it stays at 2^-125. With delta = s * (1 - s),
    d out[b] / d W = 1/p^2 * sum of delta * box needs nothing from above: the forward pass leaves it of each sample, backward
    weighs and adds. The input's gradient is the forward pass transposed.

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
import sys
import threading
import warnings
from operator import attrgetter

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

// COUNT vectors of consecutive floats -> a vector for each remainder of their positions modulo COUNT (unzip), and back (zip).
template <int COUNT, bool BACK>
inline void reorder(vec* v) {
    if constexpr (COUNT % 2 == 0) {
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
    } else if constexpr (COUNT > 1) {
        float all[COUNT * LANES];
        for (int i = 0; i < COUNT * LANES; ++i) all[i] = BACK ? v[i % COUNT][i / COUNT] : v[i / LANES][i % LANES];
        for (int i = 0; i < COUNT * LANES; ++i) v[i / LANES][i % LANES] = all[BACK ? i : i % LANES * COUNT + i / LANES];
    }
}
template <int COUNT> inline void unzip(vec* v) { reorder<COUNT, false>(v); }
template <int COUNT> inline void zip(vec* v) { reorder<COUNT, true>(v); }

// A pooled row is worked on in stretches of at most WINDOWS windows. A window reaches into the pixels of the HALO next ones.
constexpr int HALO_H = ceil_div(KERNEL_H - 1, POOL_H), HALO_W = ceil_div(KERNEL_W - 1, POOL_W);
constexpr int MIN_WINDOWS = round_up(2 * HALO_W + 1, ACCUMULATORS);
constexpr int WINDOWS = std::max<int>(MIN_WINDOWS, round_up(384 / POOL_W, ACCUMULATORS)), PITCH = round_up(WINDOWS, LANES);
constexpr int64_t CACHE_FLOATS = 128 << 10;  // half a megabyte, for the box sums of a stretch
constexpr int LINE = 16;                     // floats in a cache line
constexpr float MINUS_LOG2_E = -1.44269504f;  // in weights and biases: sigmoid = 1 / (1 + 2^exponent)
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
    int64_t input_bands() const { return ceil_div(ceil_div(height, POOL_H), INPUT_BAND); }
    int64_t new_windows() const { return stretch() - HALO_W; }  // of a stretch of the input's gradient, which repeats HALO_W
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

// to[p * pitch + v] = `factor` times such a sum; ADD: += it.
template <int VECTORS, int LEFT_PITCH, bool ADD>
__attribute__((noinline)) void product_tile(const float* left, int64_t left_step, const float* right, int64_t right_step,
                                            int64_t terms, float factor, float* to, int64_t pitch) {
    vec acc[ACCUMULATORS / VECTORS][VECTORS] = {};
    accumulate<VECTORS, LEFT_PITCH>(acc, left, left_step, right, right_step, terms);
    for (int p = 0; p < ACCUMULATORS / VECTORS; ++p, to += pitch)
        for (int v = 0; v < VECTORS; ++v) {
            if (ADD) acc[p][v] += load(to + v * LANES);
            store(to + v * LANES, ADD ? acc[p][v] : acc[p][v] * factor);
        }
}

// f(std::integral_constant<int, VECTORS>, the first of them), for blocks of at most MAX_VECTORS that make up `vectors`.
template <int VECTORS = MAX_VECTORS, class F>
inline void for_each_block(int64_t vectors, F f, int64_t first = 0) {
    for (; first + VECTORS <= vectors; first += VECTORS) f(std::integral_constant<int, VECTORS>(), first);
    if constexpr (VECTORS > 1) for_each_block<VECTORS - 1>(vectors, f, first);
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
struct Forward : Shape {
    const float *x, *weight, *bias;  // weight [inner][padded_outputs] and bias of exponents of 2
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
    const int64_t padded = job.padded_outputs(), inner = job.inner();
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

// terms += delta times box sums, over the windows of a stretch; behind the weights' the biases'.
inline void add_parameter_terms(const float* boxes, const float* delta, int64_t windows, float* terms, const Shape& shape) {
    const int64_t padded = shape.padded_outputs();
    for_each_block(padded / LANES, [&](auto vectors, int64_t first) {
        constexpr int VECTORS = decltype(vectors)::value, POSITIONS = ACCUMULATORS / VECTORS;
        for (int64_t k = 0; k < shape.inner(); k += POSITIONS)
            product_tile<VECTORS, PITCH, true>(boxes + k * PITCH, 1, delta + first * LANES, padded, windows, 1,
                                               terms + k * padded + first * LANES, padded);
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
    const int64_t windows = std::min(job.stretch(), job.columns() - left), padded = job.padded_outputs();
    const int64_t pixel = (sample * job.channels * job.height + row * POOL_H) * job.width + left * POOL_W;
    const int64_t readable = job.batch * job.channels * job.plane() - pixel;
    const int64_t looked_at = (job.channels - 1) * job.plane() + (KERNEL_H + POOL_H - 2) * job.width +
                              round_up(windows + HALO_W, LANES) * POOL_W;
    const auto sum_boxes = looked_at <= readable ? box_sums<true> : box_sums<false>;
    sum_boxes(job.x + pixel, readable, boxes, windows, job);

    const int64_t band = sample * job.bands() + row / BAND - job.first_band;
    float* terms = job.terms ? job.terms + band * job.band_floats() : nullptr;
    float* delta = job.delta ? job.delta + ((sample * job.rows() + row) * job.columns() + left) * padded
                             : terms ? own_delta : nullptr;
    const int64_t rows_to_fetch = row + 1 < job.rows() ? job.channels * POOL_H : 0;
    Upcoming upcoming{job.x + pixel + (KERNEL_H - 1 + POOL_H) * job.width, rows_to_fetch, ceil_div(windows * POOL_W, LINE),
                      job.width, job.plane()};
    const int64_t tiles = ceil_div(windows, ACCUMULATORS / MAX_VECTORS) * ceil_div(padded / LANES, MAX_VECTORS);
    const int64_t fetches = ceil_div(rows_to_fetch * upcoming.lines, tiles * ceil_div(job.inner(), FETCH_TERMS));
    float sum = 0.0f;
    for_each_block(padded / LANES, [&](auto vectors, int64_t first) {
        constexpr int VECTORS = decltype(vectors)::value, POSITIONS = ACCUMULATORS / VECTORS;
        vec totals[VECTORS] = {};
        for (int64_t j = 0; j < windows; j += POSITIONS)
            sigmoid_tile<VECTORS>(job, boxes + j, first * LANES, windows - j, delta ? delta + j * padded : nullptr, totals,
                                  upcoming, fetches);
        vec total = {};
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t exist = job.outputs - (first + v) * LANES;
            for (int64_t i = std::clamp<int64_t>(exist, 0, LANES); i < LANES; ++i) totals[v][i] = 0.0f;
            total += totals[v];
        }
        for (int i = 0; i < LANES; ++i) sum += total[i];
    });
    if (terms) add_parameter_terms(boxes, delta, windows, terms, job);
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

// Zeros that begin at a cache line.
struct Floats {
    struct alignas(4 * LINE) Line { float floats[LINE]; };
    std::vector<Line> lines;

    explicit Floats(int64_t count) : lines(ceil_div(count, LINE)) {}
    operator float*() { return reinterpret_cast<float*>(lines.data()); }
    void clear() { std::fill(lines.begin(), lines.end(), Line{}); }
};

// A thread's part of it: bands of rows of stretches of samples. Its buffers begin as zeros.
struct InputGradient : Shape {
    const float* grad_out;   // (batch)
    const float* all_delta;  // as Forward's delta
    const float* weight;     // [outputs][padded_inner], divided by the size of a window
    float* grad_x;
    int64_t sample = 0, first = 0, left = 0, right = 0;    // windows from `first` are read, pixels from that of `left` written
    int64_t pixels = 0;                                    // of a row
    Floats delta{padded_outputs() * PITCH};                // [padded_outputs][PITCH]
    Floats boxes{padded_inner() * GRADIENT_PITCH};         // gradients of the box sums: [padded_inner][GRADIENT_PITCH]
    Floats carry{channels * (KERNEL_H - 1) * MAX_PIXELS};  // what windows of earlier rows give to later ones

    // A band of a stretch of a sample. Windows that begin above the band reach into it, so their rows come first.
    void run(int64_t unit) {
        const int64_t stretches = ceil_div(columns(), new_windows()), index = unit % stretches;
        sample = unit / stretches / input_bands();
        left = index * new_windows(), right = std::min(left + new_windows(), columns());
        first = std::max<int64_t>(0, left - HALO_W);
        pixels = (index + 1 == stretches ? width : right * POOL_W) - left * POOL_W;
        carry.clear(), boxes.clear();
        const int64_t begin = unit / stretches % input_bands() * INPUT_BAND;
        const int64_t end = std::min(begin + INPUT_BAND, ceil_div(height, POOL_H));
        for (int64_t row = std::max<int64_t>(0, begin - HALO_H); row < end; ++row) {
            if (row < rows()) box_gradients(row);
            else boxes.clear();
            spread_boxes(row, row >= begin);
        }
    }

    // boxes[k][j] = grad_out * sum over o of weight[o][k] * delta[j][o] for the windows of a stretch.
    void box_gradients(int64_t row) {
        const int64_t windows = right - first, padded = padded_outputs();
        const float* from = all_delta + ((sample * rows() + row) * columns() + first) * padded;
        float *const transposed = delta, *const to = boxes + PAD;
        for (int64_t j = 0; j < windows; j += LANES)
            for (int64_t o = 0; o < padded; o += LANES) {
                vec block[LANES];
                for (int i = 0; i < LANES; ++i) block[i] = j + i < windows ? load(from + (j + i) * padded + o) : vec{};
                zip<LANES>(block);  // transposes it
                for (int i = 0; i < LANES; ++i) store(transposed + (o + i) * PITCH + j, block[i]);
            }
        for_each_block(ceil_div(windows, LANES), [&](auto vectors, int64_t block) {
            constexpr int VECTORS = decltype(vectors)::value, POSITIONS = ACCUMULATORS / VECTORS;
            for (int64_t k = 0; k < inner(); k += POSITIONS)
                product_tile<VECTORS, 1, false>(weight + k, padded_inner(), transposed + block * LANES, PITCH, outputs,
                                                grad_out[sample], to + k * GRADIENT_PITCH + block * LANES, GRADIENT_PITCH);
        });
        for (int64_t k = 0; k < inner(); ++k)
            for (int64_t j = windows; j < round_up(windows, LANES); ++j) to[k * GRADIENT_PITCH + j] = 0.0f;
    }

    // Gives the gradients of a row of boxes to the pixels: along the rows, then down the columns. Of these, the first POOL_H
    // rows are complete, and written if `write`; the rest is carried to the next row of boxes.
    void spread_boxes(int64_t row, bool write) {
        const int64_t end = pixels, pitch = width, writable = write ? height - row * POOL_H : 0;  // rows; in registers
        for (int64_t c = 0; c < channels; ++c) {
            const float* from = boxes + c * KERNEL_H * KERNEL_W * GRADIENT_PITCH + PAD + left - first;
            float* carried = carry + c * (KERNEL_H - 1) * MAX_PIXELS;
            float* to = grad_x + ((sample * channels + c) * height + row * POOL_H) * pitch + left * POOL_W;
            for (int64_t j = 0; j * POOL_W < end; j += LANES) {
                vec along[KERNEL_H][POOL_W];
                for (int d = 0; d < KERNEL_H; ++d) {
                    for (int u = 0; u < POOL_W; ++u) {
                        along[d][u] = load(from + d * KERNEL_W * GRADIENT_PITCH + j);
                        for (int e = 1; e < KERNEL_W; ++e)
                            along[d][u] += load(from + (d * KERNEL_W + e) * GRADIENT_PITCH + j -
                                                (e > u ? (e - u + POOL_W - 1) / POOL_W : 0));  // of an earlier window
                    }
                    zip<POOL_W>(along[d]);
                }
                for (int q = 0; q < POOL_W; ++q) {
                    const int64_t pixel = j * POOL_W + q * LANES, count = std::min<int64_t>(LANES, end - pixel);
                    for (int t = 0; t < KERNEL_H + POOL_H - 1; ++t) {
                        vec sum = t < KERNEL_H - 1 ? load(carried + t * MAX_PIXELS + pixel) : vec{};
                        for (int d = std::max(0, t - POOL_H + 1); d <= std::min(t, KERNEL_H - 1); ++d) sum += along[d][q];
                        float* const out = to + t * pitch + pixel;
                        if (t >= POOL_H) store(carried + (t - POOL_H) * MAX_PIXELS + pixel, sum);
                        else if (t < writable && count == LANES) store(out, sum);
                        else for (int64_t i = 0; t < writable && i < count; ++i) out[i] = sum[i];
                    }
                }
            }
        }
    }
};

// ---- what Python calls
constexpr int DONE = 0, NO_MEMORY = 12;

// f(begin, end) for equal parts of [0, count), by at most `threads` threads of the OpenMP runtime that the process has loaded,
// torch's. Throws std::bad_alloc if one of them found no memory.
template <class F>
void parallel_for(int64_t count, int64_t threads, F f) {
    const int64_t parts = omp_in_parallel() ? 1 : std::clamp<int64_t>(count, 1, threads), each = ceil_div(count, parts);
    bool done = true;
#pragma omp parallel for num_threads(parts) schedule(static, 1) reduction(&& : done)
    for (int64_t part = 0; part < parts; ++part) try {
            const int64_t begin = part * each, end = std::min(begin + each, count);
            if (begin < end) f(begin, end);
        } catch (const std::bad_alloc&) {
            done = false;
        }
    if (!done) throw std::bad_alloc();
}

// Pooled rows of all samples, from begin to end; with terms, a whole number of bands.
static void forward_rows(const Forward& job, int64_t begin, int64_t end) {
    Floats boxes(job.padded_inner() * PITCH), delta(job.terms && !job.delta ? WINDOWS * job.padded_outputs() : 0);
    for (int64_t row = begin; row < end; ++row) {
        job.sums[row] = 0;
        for (int64_t left = 0; left < job.columns(); left += job.stretch())
            job.sums[row] += stretch_sum(job, row / job.rows(), row % job.rows(), left, boxes, delta);
    }
}

// Rows are worked on in groups of samples whose terms take no more than a sample's, or 64 MB.
static void forward_with_terms(Forward job, float* grads, int64_t threads) {
    const int64_t bands = job.bands(), sample_floats = bands * job.band_floats();
    const int64_t group = std::clamp<int64_t>((16 << 20) / sample_floats, 1, job.batch);
    for (int64_t first = 0; first < job.batch; first += group) {
        const int64_t samples = std::min(group, job.batch - first);
        Floats terms(samples * sample_floats);
        job.terms = terms, job.first_band = first * bands;
        const auto first_row = [&](int64_t band) { return (first + band / bands) * job.rows() + band % bands * BAND; };
        const auto rows = [&](int64_t begin, int64_t end) { forward_rows(job, first_row(begin), first_row(end)); };
        parallel_for(samples * bands, threads, rows);
        parallel_for(samples, threads, [&](int64_t begin, int64_t end) {
            for (int64_t b = begin; b < end; ++b)
                add_bands(job.terms + b * sample_floats, grads + (first + b) * job.parameters(), job);
        });
    }
}

// `grads` (batch, parameters) and `delta` (batch, rows, columns, padded outputs) may be null.
extern "C" int run_forward(const float* x, const float* weight, const float* bias, float* out, float* grads, float* delta,
                           int64_t batch, int64_t channels, int64_t height, int64_t width, int64_t outputs,
                           int64_t threads) try {
    const Shape shape{batch, channels, height, width, outputs};
    const int64_t padded = shape.padded_outputs(), inner = shape.inner(), rows = shape.rows();
    Floats packed(inner * padded), packed_bias(padded);
    for (int64_t o = 0; o < outputs; ++o) {
        for (int64_t k = 0; k < inner; ++k) packed[k * padded + o] = weight[o * inner + k] * (MINUS_LOG2_E / (POOL_H * POOL_W));
        packed_bias[o] = bias[o] * MINUS_LOG2_E;
    }
    std::vector<double> sums(batch * rows);
    const Forward job{shape, x, packed, packed_bias, sums.data(), delta, nullptr, 0};
    if (grads) forward_with_terms(job, grads, threads);
    else parallel_for(batch * rows, threads, [&](int64_t begin, int64_t end) { forward_rows(job, begin, end); });
    for (int64_t b = 0; b < batch; ++b) out[b] = std::accumulate(&sums[b * rows], &sums[b * rows] + rows, 0.0);
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
    const int64_t units = batch * shape.input_bands() * ceil_div(shape.columns(), shape.new_windows());
    parallel_for(units, threads, [&](int64_t begin, int64_t end) {
        InputGradient job{shape, grad_out, delta, packed, grad_x};
        for (int64_t unit = begin; unit < end; ++unit) job.run(unit);
    });
    return DONE;
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

    returned = ", ".join(["Tensor"] * tensors)
    more = [("save", f"({inputs}, int plan) -> (Tensor, Tensor, Tensor)", save, functools.partial(saved, kernels))]
    more += [("gradient", f"(Tensor grad, {inputs}, Tensor kept, Tensor more, int plan) -> ({returned})", gradient, shapes)]
    for name, types, function, fake in more:
        library.define(f"{name}{types}", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)

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
            output, *kept = (save if keys in PLAIN else operators.save)(*arguments, ctx.plan)
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
PLAIN = [KEYS(KEY.CUDA) | KEYS(KEY.AutogradCUDA), KEYS(KEY.CPU) | KEYS(KEY.AutogradCPU)]  # of plain tensors
ModelNew.namespace._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does, for a second of imports
kind = attrgetter("shape", "dtype", "device")  # what checks and sizes depend on: functions of kinds are cached


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
    operators = getattr(torch.ops, f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}")
    with LOADING:
        if not getattr(operators, "registered", None):
            kernels = load(operators.name, text, flags)
            vars(kernels).update(constants | {each.__name__: each for each in (original, *fused)})
            operators.registered = register(operators, schema, kernels, forward, original, *fused)
    return operators.name


def load(name, text, flags):
    """Return the library of a text. Its functions know the types of their arguments, and how many tensors come first."""
    from torch.utils import cpp_extension

    is_cuda, flags = "<<<" in text, ["-O3", *flags]
    options = {"cuda_sources": text, "extra_cuda_cflags": ["-lineinfo", *flags]} if is_cuda else {"extra_cflags": flags}
    options |= {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}  # before, torch's headers come along
    if not cpp_extension.is_ninja_available():  # in a virtual environment that is not activated
        os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # or an interrupted build would count as done
    path = cpp_extension.load_inline(name, "" if is_cuda else text, is_python_module=False, **options)  # None before 2.5
    kernels = ctypes.CDLL(path or os.path.join(cpp_extension._get_build_directory(name, False), name + cpp_extension.LIB_EXT))
    kernels.device = "cuda" if is_cuda and not getattr(cpp_extension.load_inline, "emulates_cuda", False) else "cpu"
    numbers = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "int": ctypes.c_int}  # all else is a pointer
    for result, symbol, parameters in re.findall(r'extern "C" (\w+) (\w+)\(([^)]*)\)', text):
        if function := getattr(kernels, symbol, None):  # the text may leave it out for these constants
            types = [numbers.get(each.split()[0], ctypes.c_void_p) for each in parameters.split(",") if each]
            function.restype, function.argtypes, function.tensors = numbers[result], types, parameters.count("*")
    return kernels


def register(operators, schema, kernels, forward, original, fuse=None, *fused):
    """Define the operator, for every device, so that forward checks the tensors. Without `fuse` its gradient is PyTorch's."""
    tensors, notice = schema.count("Tensor") - 1, f"{operators.name[:-11]}: {original.__doc__}"
    library, forward = torch.library.Library(operators.name, "DEF"), functools.partial(forward, kernels)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys, *arguments):
            warn(notice)
            ctx.save_for_backward(*arguments[:tensors])
            ctx.others = arguments[tensors:]
            return autograd(keys, *arguments)  # where no gradient is recorded

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():  # views: gradients are partial ones, also where an argument depends on another
                given = [each if each is None else each.view_as(each) for each in ctx.saved_tensors[:tensors]]
                out = original(*given, *ctx.others)
            wanted = [each for each in given if each is not None and each.requires_grad]
            found = dict(zip(wanted, torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled()), strict=True))
            return None, *map(found.get, given), *[None] * len(ctx.others)

    def autograd(keys, *arguments):
        trains = torch.is_grad_enabled() and True in [each is not None and each.requires_grad for each in arguments[:tensors]]
        # Gradient refuses the tangents that arguments may have within forward_ad.dual_level(); below it they would be dropped.
        if trains or (torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()):
            return Gradient.apply(keys, *arguments)
        if keys in PLAIN:  # the dispatcher would do no more
            return forward(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operators.forward(*arguments)

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("forward", forward, "CompositeExplicitAutograd")
    library.impl("forward", autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{operators.name}::forward", original, lib=library)
    for device in ("cuda", "cpu") if torch.__version__ >= "2.6" else ():  # in autocast, too, operands are float32
        torch.library.register_autocast(f"{operators.name}::forward", device, torch.float32, lib=library)
    Gradient = fuse(library, schema, kernels, Gradient, *fused) if fuse else Gradient
    return library


def check(kernels, name, tensor, place, shape):
    """Raise RuntimeError unless a tensor of this kind is float32, of this shape, and beside `place`, where the kernels run."""
    if tensor != (shape, torch.float32, place[2]) or place[2].type != kernels.device:
        wanted = f"a float32 {kernels.device.upper()} tensor of shape {list(shape)}, on one device with all others"
        raise RuntimeError(f"{NAME}: expected {name} as {wanted}; got {tensor[1]} of shape {list(tensor[0])} on {tensor[2]}")


def launch(function, *arguments):
    """Call a function of `kernels`, tensors or None first, on the first one's device and its current stream."""
    first, count, stream = arguments[0], function.tensors, 0
    if first.is_cuda:
        if (device := first.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(function, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
    pointers = [None if each is None else each.data_ptr() for each in arguments[:count]]
    if code := function(*pointers, *arguments[count:], stream):  # a C function ignores an argument too many
        words = f"CUDA error: {torch.cuda.CudaError(code)}" if first.is_cuda else f"error {code}"
        raise RuntimeError(f"{function.__name__}: {words}")


@functools.lru_cache(maxsize=None)
def warn(text):
    """Warn once a process, at the line that called into this file, not at one of PyTorch's."""
    files, torchs = [each.filename for each in inspect.stack(0)], os.path.dirname(torch.__file__)
    last = max(i for i, file in enumerate(files) if file == files[0])  # the outermost of this file
    callers = [i for i, file in enumerate(files) if i > last and not file.startswith(torchs)]
    warnings.warn(text, stacklevel=min(callers, default=last) + 1)


def main():
    from torch.utils import benchmark, cpp_extension

    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)  # by the playground: on the CPU, so a small input
    device = "cpu" if emulated or "_cpu_" in NAME else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    arguments, shape, small, limit = EXAMPLE
    model, x = ModelNew(*arguments).to(device).requires_grad_(False), torch.randn(small if emulated else shape, device=device)
    exact = torch.cat([original(*model.double().operands(part.double())) for part in x.split(16)])
    error = ((model.float()(x) - exact).abs().max() / exact.std()).item()
    calls = () if emulated else (model, lambda x: original(*model.operands(x)))
    times = [f"{1e3 * benchmark.Timer('f(x)', globals={'f': f, 'x': x}).timeit(20).mean:.3f} ms" for f in calls]
    how_fast = ", PyTorch ".join(times) or f"under the emulator, not timed, on an input of {tuple(x.shape)}"
    verdict = "right" if error <= limit else "wrong"
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict}; {how_fast}")


if __name__ == "__main__":
    main()
