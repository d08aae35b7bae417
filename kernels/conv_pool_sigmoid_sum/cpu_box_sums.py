"""conv_pool_sigmoid_sum on the CPU: pooling moved in front of the convolution's weights.

Pooling is linear, so the input is pooled once for each element of the convolution's kernel, and the weights are applied to
those box sums. Training comes with the forward pass: it leaves each sample's gradients of the parameters, which backward weighs
and adds.

Why it is faster
    PyTorch computes 16 convolution outputs for every pooled one and then averages them. Here each pooled output costs as
    many multiplications as one convolution output: 1.34 GFLOP a sample become 0.083 at the original's size. The box sums
    are separable and made in registers; the product keeps a tile of output channels x windows in registers; the sigmoid is
    applied to that tile. Nothing but a float a row leaves the core, and what is in use fits into its cache: a row of box sums
    (28 KB) and the weights (18 KB). While a pooled row is multiplied, the next one's input is prefetched.

Mathematics
    pooled[o,i,j] = b[o] + sum over c,d,e of W[o,c,d,e]/p^2 * S[c,d,e,i,j];     out = sum of sigmoid(pooled)
    S[c,d,e,i,j]  = sum over u,v < p of x[c, p*i+u+d, p*j+v+e]       a box sum of x; the product's inner size is C * k * k
    S is summed down p rows first. These column sums are sorted by remainder modulo p (unzip), so that a sum along a row adds
    whole vectors. The terms that all k neighbouring sums share are added once (sliding_sums). Only the order of additions
    differs from the original. The sigmoid is 1 / (1 + 2^t), t = -log2(e) * pooled, the factor in the weights; 2^t is a
    polynomial of degree 5 (7.5e-8) times a power of 2; the reciprocal is a division, or with AVX-512 an estimate of 14 bits and
    one step of Newton's. Its relative error is below 7e-7 for |x| < 8 and below 5e-6 down to -80; below -86 it stays at 2^-125.
    A sample's output is one number, so its gradients do not need what comes from above:
    d out[b] / d W[o,c,d,e] = 1/p^2 sum over i,j of delta[b,o,i,j] * S[b,c,d,e,i,j],  delta = s * (1 - s),  s = sigmoid(pooled)
    grad_W = sum over b of grad_out[b] * d out[b] / d W. The input's gradient is the forward pass transposed:
    G[c,d,e,i,j]  = grad_out[b]/p^2 * sum over o of W[o,c,d,e] * delta[b,o,i,j]
    grad_x[c,h,w] = sum over d,e of G[c,d,e, (h-d)/p, (w-e)/p], where such a window exists: along the rows first, then down

Loops
    loop                over                                       where
    threads             pooled rows; bands of 8 with gradients     at::parallel_for; bands of 12 for the input's gradient
    box_sums            input channels, columns                    registers; a stretch of 96 windows (POOL_W = 4) to L1 and L2
    sigmoid_tile        channels, kernel rows, kernel columns      64 outputs x 6 windows in 24 vectors of 16 floats
    parameter_tile      windows of a stretch                       64 outputs x 6 weights in 24 vectors, added to the band's
    add_bands           bands of a sample, in order                one thread, as weighted_sum over samples in backward
    box_gradient_tile   output channels                            6 weights x 64 windows in 24 vectors, delta transposed
    spread_boxes        channels, pixels                           registers; what later rows need is carried in L2

Floor
    At batch 4: 18.9 MB read, 0.33 GFLOP and 2.3 million sigmoids: 1.0 ms at 19 GB/s and 1.4 at 245 GFLOP/s, which two Cascade
    Lake cores at 2.4 GHz reach: compute bound. The ladder's page says what is reached.

Takes
    float32 CPU tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel and pool size that the
    original takes. Anything else raises. Trains, and computes only the gradients that are asked for; second derivatives raise.
    The bits do not depend on the number of threads. AVX-512 (with DQ), AVX2 or any other: -march=native. Needs GCC or Clang.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading
import time

import torch
import torch.nn as nn

NAME = "conv_pool_sigmoid_sum_cpu_box_sums"

CPP = r"""
// Needs KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
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
inline void store_first(float* to, vec value, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = value[i];
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

struct ForwardWorkspace {  // of a thread; both begin as zeros
    float* boxes;          // [padded_inner][PITCH]
    float* delta;          // [WINDOWS][padded_outputs], where delta is not kept
};
inline int64_t boxes_floats(const Shape& shape) { return shape.padded_inner() * PITCH; }
inline int64_t delta_floats(const Shape& shape) { return WINDOWS * shape.padded_outputs(); }

// The sum of sigmoids of a stretch of a pooled row, in all output channels.
float stretch_sum(const Forward& job, int64_t sample, int64_t row, int64_t left, const ForwardWorkspace& workspace) {
    const Shape& shape = job.shape;
    const int64_t windows = std::min(shape.stretch(), shape.columns() - left), padded = shape.padded_outputs();
    const int64_t pixel = (sample * shape.channels * shape.height + row * POOL_H) * shape.width + left * POOL_W;
    const int64_t readable = shape.batch * shape.channels * shape.plane() - pixel;
    const int64_t looked_at = (shape.channels - 1) * shape.plane() + (KERNEL_H + POOL_H - 2) * shape.width +
                              round_up(windows + HALO_W, LANES) * POOL_W;
    if (looked_at <= readable)
        box_sums<true>(job.x + pixel, readable, workspace.boxes, windows, shape);
    else
        box_sums<false>(job.x + pixel, readable, workspace.boxes, windows, shape);

    float* terms = nullptr;
    if (job.terms) terms = job.terms + (sample * shape.bands() + row / BAND - job.first_band) * shape.band_floats();
    float* delta = job.delta ? job.delta + ((sample * shape.rows() + row) * shape.columns() + left) * padded
                             : terms ? workspace.delta : nullptr;
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
            sigmoid_tile<VECTORS>(job, workspace.boxes + j, first * LANES, windows - j, delta ? delta + j * padded : nullptr,
                                  totals, upcoming, fetches);
        vec total = {};
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t exist = shape.outputs - (first + v) * LANES;
            for (int64_t i = std::clamp<int64_t>(exist, 0, LANES); i < LANES; ++i) totals[v][i] = 0.0f;
            total += totals[v];
        }
        for (int i = 0; i < LANES; ++i) sum += total[i];
    });
    if (terms) add_parameter_terms(workspace.boxes, delta, windows, terms, shape);
    return sum;
}

// All of a pooled row; `index` counts the rows of all samples.
void forward_row(const Forward& job, int64_t index, const ForwardWorkspace& workspace) {
    job.sums[index] = 0;
    for (int64_t left = 0; left < job.shape.columns(); left += job.shape.stretch())
        job.sums[index] += stretch_sum(job, index / job.shape.rows(), index % job.shape.rows(), left, workspace);
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

struct Stretch {
    int64_t first, left, right;        // windows from `first` are read, pixels from that of `left` are written
    int64_t left_pixel, right_pixel;
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
                        if (count == LANES) store(grad_x + t * shape.width + pixel, sum);
                        else store_first(grad_x + t * shape.width + pixel, sum, count);
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
    Stretch stretch;
    stretch.left = index * job.stretch(), stretch.right = std::min(stretch.left + job.stretch(), shape.columns());
    stretch.first = std::max<int64_t>(0, stretch.left - HALO_W);
    stretch.left_pixel = stretch.left * POOL_W;
    stretch.right_pixel = index + 1 == job.stretches() ? shape.width : stretch.right * POOL_W;

    std::fill_n(workspace.carry, shape.channels * (KERNEL_H - 1) * MAX_PIXELS, 0.0f);
    std::fill_n(workspace.boxes, shape.padded_inner() * GRADIENT_PITCH, 0.0f);
    const int64_t begin = band * INPUT_BAND, end = std::min(begin + INPUT_BAND, job.block_rows());
    for (int64_t row = std::max<int64_t>(0, begin - HALO_H); row < end; ++row) {
        if (row < shape.rows()) box_gradients(job, sample, row, stretch, workspace);
        else std::fill_n(workspace.boxes, shape.padded_inner() * GRADIENT_PITCH, 0.0f);
        spread_boxes(job, sample, row, stretch, row >= begin, workspace);
    }
}
"""

BINDING = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

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

static void check(const char* name, const at::Tensor& tensor, int64_t dimensions) {
    TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == at::kFloat,
                message("conv_pool_sigmoid_sum: expected float32 CPU tensors, got ", name, " of ", tensor.scalar_type(), " on ",
                        tensor.device()));
    TORCH_CHECK(tensor.dim() == dimensions, message("conv_pool_sigmoid_sum: expected ", name, " of ", dimensions,
                                                    " dimensions, got ", tensor.dim()));
}

static void check_sizes(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes) {
    check(name, tensor, sizes.size());
    TORCH_CHECK(tensor.sizes() == sizes,
                message("conv_pool_sigmoid_sum: expected ", name, " of ", sizes, ", got ", tensor.sizes()));
}

static Shape checked_shape(at::IntArrayRef x, const at::Tensor& weight, at::IntArrayRef pool) {
    check("weight", weight, 4);
    TORCH_CHECK(x.size() == 4, message("conv_pool_sigmoid_sum: expected x of 4 dimensions, got ", x.size()));
    TORCH_CHECK(weight.size(1) == x[1] && weight.size(2) == KERNEL_H && weight.size(3) == KERNEL_W,
                message("conv_pool_sigmoid_sum: expected a weight of (outputs, ", x[1], ", ", KERNEL_H, ", ", KERNEL_W,
                        "), got ", weight.sizes()));
    TORCH_CHECK(pool == at::IntArrayRef({POOL_H, POOL_W}),
                message("conv_pool_sigmoid_sum: built for a pooling window of ", POOL_H, " x ", POOL_W, ", called with ",
                        pool));
    TORCH_CHECK(x[2] >= KERNEL_H + POOL_H - 1 && x[3] >= KERNEL_W + POOL_W - 1,
                message("conv_pool_sigmoid_sum: a window of ", POOL_H, " x ", POOL_W, " behind a kernel of ", KERNEL_H, " x ",
                        KERNEL_W, " does not fit into an image of ", x[2], " x ", x[3]));
    return {x[0], x[1], x[2], x[3], weight.size(0)};
}

// Zeros that begin at a cache line.
class Floats {
    struct alignas(4 * LINE) Line { float floats[LINE]; };
    std::vector<Line> lines_;
public:
    explicit Floats(int64_t count) : lines_(ceil_div(count, LINE)) {}
    operator float*() { return reinterpret_cast<float*>(lines_.data()); }
};

// Rows from begin to end; with terms, a whole number of bands.
static void forward_rows(const Forward& job, int64_t begin, int64_t end) {
    Floats boxes(boxes_floats(job.shape)), delta(job.terms && !job.delta ? delta_floats(job.shape) : 0);
    for (int64_t row = begin; row < end; ++row) forward_row(job, row, {boxes, delta});
}

// Rows are worked on in groups of samples whose terms take no more than a sample's, or 64 MB.
static void forward_with_terms(Forward job, float* grads) {
    const Shape& shape = job.shape;
    const int64_t sample_floats = shape.bands() * shape.band_floats();
    const int64_t group = std::clamp<int64_t>((16 << 20) / sample_floats, 1, std::max<int64_t>(1, shape.batch));
    for (int64_t first = 0; first < shape.batch; first += group) {
        const int64_t samples = std::min(group, shape.batch - first);
        Floats terms(samples * sample_floats);
        job.terms = terms, job.first_band = first * shape.bands();
        at::parallel_for(job.first_band, job.first_band + samples * shape.bands(), 1, [&](int64_t begin, int64_t end) {
            const auto first_row = [&](int64_t band) {
                return band / shape.bands() * shape.rows() + band % shape.bands() * BAND;
            };
            forward_rows(job, first_row(begin), first_row(end));
        });
        at::parallel_for(0, samples, 1, [&](int64_t begin, int64_t end) {
            for (int64_t b = begin; b < end; ++b)
                add_bands(job.terms + b * sample_floats, grads + (first + b) * shape.parameters(), shape);
        });
    }
}

// What forward and forward_with_grads have in common; grads and delta may be null.
static at::Tensor run_forward(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& bias_in,
                              at::IntArrayRef pool, at::Tensor* grads, at::Tensor* delta) {
    check("x", x_in, 4);
    const Shape shape = checked_shape(x_in.sizes(), weight_in, pool);
    check_sizes("bias", bias_in, {shape.outputs});
    const at::Tensor x = x_in.contiguous(), weight = weight_in.contiguous(), bias = bias_in.contiguous();
    at::Tensor out = at::empty({shape.batch}, x.options());
    if (grads) *grads = at::empty({shape.batch, shape.parameters()}, x.options());
    if (delta) *delta = at::empty({shape.batch, shape.rows(), shape.columns(), shape.padded_outputs()}, x.options());

    Floats packed(shape.inner() * shape.padded_outputs()), packed_bias(shape.padded_outputs());
    pack(weight.const_data_ptr<float>(), bias.const_data_ptr<float>(), packed, packed_bias, shape);
    std::vector<double> sums(shape.batch * shape.rows());
    Forward job{shape, x.const_data_ptr<float>(), packed, packed_bias, sums.data(),
                delta ? delta->mutable_data_ptr<float>() : nullptr, nullptr, 0};
    if (grads)
        forward_with_terms(job, grads->mutable_data_ptr<float>());
    else
        at::parallel_for(0, shape.batch * shape.rows(), 1, [&](int64_t begin, int64_t end) { forward_rows(job, begin, end); });

    float* result = out.mutable_data_ptr<float>();
    for (int64_t b = 0; b < shape.batch; ++b) {
        double sum = 0;
        for (int64_t row = 0; row < shape.rows(); ++row) sum += sums[b * shape.rows() + row];
        result[b] = sum;
    }
    return out;
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef pool) {
    return run_forward(x, weight, bias, pool, nullptr, nullptr);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_with_grads(const at::Tensor& x, const at::Tensor& weight,
                                                                  const at::Tensor& bias, at::IntArrayRef pool, bool parameters,
                                                                  bool input) {
    at::Tensor grads = at::empty({0}, weight.options()), delta = at::empty({0}, weight.options());
    const at::Tensor out = run_forward(x, weight, bias, pool, parameters ? &grads : nullptr, input ? &delta : nullptr);
    return {out, grads, delta};
}

// The gradient of x, from what forward_with_grads gave as delta. Of x only the sizes are read, of bias nothing: autograd has to
// know that delta depends on both, to refuse second derivatives.
at::Tensor input_grad(const at::Tensor& grad_out_in, const at::Tensor& delta_in, const at::Tensor& x,
                      const at::Tensor& weight_in, const at::Tensor& bias, at::IntArrayRef pool) {
    check("x", x, 4);
    const Shape shape = checked_shape(x.sizes(), weight_in, pool);
    check_sizes("bias", bias, {shape.outputs});
    check_sizes("grad_out", grad_out_in, {shape.batch});
    check_sizes("delta", delta_in, {shape.batch, shape.rows(), shape.columns(), shape.padded_outputs()});
    const at::Tensor grad_out = grad_out_in.contiguous(), delta = delta_in.contiguous(), weight = weight_in.contiguous();
    at::Tensor grad_x = at::empty(x.sizes(), delta.options());

    Floats packed(shape.outputs * shape.padded_inner());
    for (int64_t o = 0; o < shape.outputs; ++o)
        for (int64_t k = 0; k < shape.inner(); ++k)
            packed[o * shape.padded_inner() + k] = weight.const_data_ptr<float>()[o * shape.inner() + k] / (POOL_H * POOL_W);
    const InputGradient job{shape, grad_out.const_data_ptr<float>(), delta.const_data_ptr<float>(), packed,
                            grad_x.mutable_data_ptr<float>()};
    at::parallel_for(0, job.units(), 1, [&](int64_t begin, int64_t end) {
        Floats deltas(shape.padded_outputs() * PITCH), boxes(shape.padded_inner() * GRADIENT_PITCH),
            carry(shape.channels * (KERNEL_H - 1) * MAX_PIXELS);
        for (int64_t unit = begin; unit < end; ++unit) input_gradient_unit(job, unit, {deltas, boxes, carry});
    });
    return grad_x;
}

// Gradients of weight and bias, which give their shapes: the samples' gradients, weighted by grad_out. `x` is for autograd,
// which has to know that they depend on it, to refuse second derivatives.
std::tuple<at::Tensor, at::Tensor> parameter_grads(const at::Tensor& grad_out_in, const at::Tensor& grads_in,
                                                   const at::Tensor& weight, const at::Tensor& bias,
                                                   const std::optional<at::Tensor>& x) {
    check("weight", weight, 4);
    check_sizes("bias", bias, {weight.size(0)});
    check("grads", grads_in, 2);
    check_sizes("grad_out", grad_out_in, {grads_in.size(0)});
    check_sizes("grads", grads_in, {grads_in.size(0), weight.numel() + weight.size(0)});
    const at::Tensor grad_out = grad_out_in.contiguous(), grads = grads_in.contiguous();
    const at::Tensor grad_weight = at::empty(weight.sizes(), grads.options());
    const at::Tensor grad_bias = at::empty({weight.size(0)}, grads.options());
    const int64_t batch = grads.size(0), size = grads.size(1), weights = weight.numel();
    const float *factors = grad_out.const_data_ptr<float>(), *in = grads.const_data_ptr<float>();
    at::parallel_for(0, weights, 1024, [&](int64_t begin, int64_t end) {
        weighted_sum(factors, in, grad_weight.mutable_data_ptr<float>(), batch, size, begin, end);
    });
    weighted_sum(factors, in + weights, grad_bias.mutable_data_ptr<float>(), batch, size, 0, size - weights);
    return {grad_weight, grad_bias};
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("forward_with_grads(Tensor x, Tensor weight, Tensor bias, int[2] pool, bool parameters, bool input) -> "
          "(Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("input_grad(Tensor grad_out, Tensor delta, Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("parameter_grads(Tensor grad_out, Tensor grads, Tensor weight, Tensor bias, Tensor? x) -> (Tensor, Tensor)",
          {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("forward", &forward);
    m.impl("forward_with_grads", &forward_with_grads);
    m.impl("input_grad", &input_grad);
    m.impl("parameter_grads", &parameter_grads);
}
"""


def register(namespace):
    """Shapes for torch.compile, and autograd."""
    operators = getattr(torch.ops, namespace)

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, bias, pool):
        return x.new_empty(x.shape[0])

    @torch.library.register_fake(f"{namespace}::forward_with_grads")
    def forward_with_grads(x, weight, bias, pool, parameters, input):
        batch, outputs = x.shape[0], weight.shape[0]
        rows, columns = ((x.shape[i] - weight.shape[i] + 1) // pool[i - 2] for i in (2, 3))
        grads = x.new_empty((batch, weight.numel() + outputs) if parameters else 0)
        delta = x.new_empty((batch, rows, columns, -(-outputs // 16) * 16) if input else 0)
        return x.new_empty(batch), grads, delta

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad_out, delta, x, weight, bias, pool):
        return x.new_empty(x.shape)

    @torch.library.register_fake(f"{namespace}::parameter_grads")
    def parameter_grads(grad_out, grads, weight, bias, x):
        return weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])

    def save(ctx, inputs, output):
        x, weight, bias, ctx.pool, ctx.parameters, ctx.input = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None, weight, bias, output[1], output[2])
        ctx.mark_non_differentiable(output[1], output[2])

    def backward(ctx, grad_out, *_):
        x, weight, bias, grads, delta = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if (needs_x and not ctx.input) or ((needs_weight or needs_bias) and not ctx.parameters):
            raise RuntimeError(f"{namespace}: forward_with_grads was not asked for the gradients that are needed now")
        grad_x = operators.input_grad(grad_out, delta, x, weight, bias, ctx.pool) if needs_x else None
        grad_weight = grad_bias = None
        if needs_weight or needs_bias:
            grad_weight, grad_bias = operators.parameter_grads(grad_out, grads, weight, bias, x)
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None, None

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    def refuse_forward(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: forward has no gradients; call forward_with_grads")

    torch.library.register_autograd(f"{namespace}::forward", refuse_forward)
    torch.library.register_autograd(f"{namespace}::forward_with_grads", backward, setup_context=save)
    for name in ("input_grad", "parameter_grads"):
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
    sources = NAME, CPP + BINDING, None, register  # bound here, so that no other variant in a notebook replaces them

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    @torch.compiler.assume_constant_result
    def namespace(self):
        kernel_h, kernel_w = self.conv.kernel_size
        pool = self.avg_pool.kernel_size
        pool_h, pool_w = (pool, pool) if isinstance(pool, int) else pool
        sizes = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, "POOL_H": pool_h, "POOL_W": pool_w}
        return build(*self.sources, cflags=("-march=native", "-fopenmp"), **sizes)

    def forward(self, x):
        operators = getattr(torch.ops, self.namespace())
        weight, bias, pool = self.conv.weight, self.conv.bias, self.avg_pool.kernel_size
        parameters, input = weight.requires_grad or bias.requires_grad, x.requires_grad
        if torch.is_grad_enabled() and (parameters or input):
            return operators.forward_with_grads(x, weight, bias, pool, parameters, input)[0]
        return operators.forward(x, weight, bias, pool)


def main():
    torch.manual_seed(0)
    model = ModelNew(8, 64, 3, 4)
    x = torch.randn(4, 8, 384, 384)

    def plain(x):
        return torch.sigmoid(model.avg_pool(model.conv(x))).sum(dim=(1, 2, 3))

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
