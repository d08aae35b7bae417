"""conv_pool_sigmoid_sum on the CPU: pooling moved in front of the convolution's weights.

Why it is faster
    PyTorch computes 16 convolution outputs for every pooled one. Pooling is linear: here the weights are applied to box sums,
    the input pooled once for each element of the convolution's kernel, and 1.34 GFLOP a sample become 0.083. The box sums are
    separable and made in registers, where the sigmoid is applied to a tile of the product, too. Box sums (28 KB a row) and
    weights (18 KB) stay in the cache, and the next pooled row's input is prefetched.

Mathematics
    box[b,c,r,s,i,j] = sum over u,v < p of x[b,c, p*i+u+r, p*j+v+s];   pooled = bias + sum over c,r,s of w/p^2 * box
    out[b] = sum over o,i,j of sigmoid(pooled). Column sums are sorted by remainder modulo p (unzip), so that a sum along a row
    adds whole vectors. The sigmoid's relative error is below 7e-7 for |x| < 8, below 5e-6 down to -80; below -86 it stays at
    2^-125. With delta = s * (1 - s), d out[b] / d W = 1/p^2 * sum of delta * box needs nothing from above: the forward pass
    leaves it of each sample, backward weighs and adds. The input's gradient is the forward pass transposed.

Loops
    threads: pooled rows; bands of 8 with gradients, of 12 for the input's. sigmoid_tile: 64 outputs x 6 windows, 24 vectors.

Floor
    At batch 4: 18.9 MB, 0.33 GFLOP, 2.3 million sigmoids: 1.0 ms at 19 GB/s, 1.4 at 245 GFLOP/s (two Cascade Lake cores).

Takes
    float32 CPU tensors (batch, in_channels, height, width), any sizes that the original takes; others raise. The bits do not
    depend on the number of threads. AVX-512 (with DQ), AVX2 or any other: -march=native. Needs GCC or Clang. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv_pool_sigmoid_sum_cpu_box_sums"
DEVICE = "cpu"
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
SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int[2] pool, int needs) -> (Tensor, Tensor, Tensor)"
GRADIENT = "(Tensor grad, Tensor x, Tensor weight, Tensor bias, int[2] pool, Tensor grads, Tensor delta, int needs)"


def original(x, weight, bias, pool):
    return torch.sigmoid(nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)).sum(dim=(1, 2, 3))


def saved(x, weight, bias, pool, needs):
    """Return room for the output, each sample's gradients of the parameters, and the sigmoids' derivatives."""
    rows, columns = ((x.shape[i] - weight.shape[i] + 1) // pool[i - 2] for i in (2, 3))
    grads = x.new_empty((x.shape[0], weight.numel() + bias.numel()) if needs & 2 else 0)
    delta = x.new_empty((x.shape[0], rows, columns, -(-bias.numel() // 16) * 16) if needs & 1 else 0)  # padded_outputs
    return x.new_empty(x.shape[0]), grads, delta


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv_pool_sum(x, weight, bias, pool, needs, kernels=kernels, saved=saved):
    """Return the output and what the gradients of x (needs & 1) and of the parameters (needs & 2) take: see `saved`."""
    batch, *_, height, width = x.shape
    (out_channels, in_channels, kernel_h, kernel_w), (pool_h, pool_w) = weight.shape, pool
    check("x", x, (batch, in_channels, height, width), x.device)
    check("weight", weight, weight.shape, x.device)
    check("bias", bias, (out_channels,), x.device)
    if min(pool) < 1 or height < kernel_h + pool_h - 1 or width < kernel_w + pool_w - 1:
        fits = f"room for a window of {[*pool]} behind a kernel of {[kernel_h, kernel_w]}"
        raise RuntimeError(f"expected {fits}; got an image of {height} x {width}")
    library = kernels(KERNEL_H=kernel_h, KERNEL_W=kernel_w, POOL_H=pool_h, POOL_W=pool_w)
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    out, grads, delta = saved(x, weight, bias, pool, needs)
    if batch:
        kept = grads if needs & 2 else None, delta if needs & 1 else None
        launch(library.run_forward, x, weight, bias, out, *kept, *x.shape, out_channels, torch.get_num_threads())
    return out, grads, delta


conv_pool_sum.register_fake(saved)


@torch.library.custom_op(
    f"{NAME}::gradient", mutates_args=(), device_types=DEVICE, schema=f"{GRADIENT} -> (Tensor, Tensor, Tensor)"
)
def gradient(grad, x, weight, bias, pool, grads, delta, needs, kernels=kernels):
    """Return the gradients of x (needs & 1), weight and bias (needs & 2); empty tensors where they are not needed."""
    (_, _, *kernel), grad, weight, threads = weight.shape, grad.contiguous(), weight.contiguous(), torch.get_num_threads()
    library = kernels(KERNEL_H=kernel[0], KERNEL_W=kernel[1], POOL_H=pool[0], POOL_W=pool[1])
    found = [each.new_empty(each.shape if needs & bit else 0) for each, bit in ((x, 1), (weight, 2), (bias, 2))]
    if found[0].numel():
        launch(library.run_input_gradient, grad, delta, weight, found[0], *x.shape, weight.shape[0], threads)
    if needs & 2:
        launch(library.run_parameter_gradient, grad, grads, *found[1:], x.shape[0], grads.shape[1], weight.numel(), threads)
    return tuple(found)


@gradient.register_fake
def gradients(grad, x, weight, bias, pool, grads, delta, needs):
    return tuple(each.new_empty(each.shape if needs & bit else 0) for each, bit in ((x, 1), (weight, 2), (bias, 2)))


def backward(ctx, grad, *_, original=original):
    """The gradient; that of a gradient (create_graph) is PyTorch's, with the 4.8 GB that this file avoids."""
    *tensors, grads, delta = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    needs = wanted[0] + 2 * any(wanted[1:])
    if torch.is_grad_enabled() or needs & ~ctx.needs:
        return *torch.func.vjp(lambda *tensors: original(*tensors, ctx.pool), *tensors)[1](grad), None, None
    found = torch.ops.conv_pool_sigmoid_sum_cpu_box_sums.gradient(grad, *tensors, ctx.pool, grads, delta, needs)
    return *[each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)], None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.pool, ctx.needs = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


conv_pool_sum.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    conv_pool_sum.register_autocast(DEVICE, torch.float32)


def call(x, weight, bias, pool):
    needs = x.requires_grad + 2 * (weight.requires_grad or bias.requires_grad) if torch.is_grad_enabled() else 0
    return torch.ops.conv_pool_sigmoid_sum_cpu_box_sums.forward(x, weight, bias, pool, needs)[0]


class ModelNew(nn.Module):
    operator = staticmethod(call)

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = (pool_kernel_size,) * 2 if isinstance(pool_kernel_size, int) else pool_kernel_size

    def forward(self, x):
        return self.operator(x, self.conv.weight, self.conv.bias, self.pool)


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
