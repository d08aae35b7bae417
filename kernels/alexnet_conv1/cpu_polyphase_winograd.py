"""alexnet_conv1, cpu: stride 4 taken apart into stride 1, where Winograd's algorithm saves half of the multiplications.

Like the original, but the 11 x 11 kernel at stride 4 becomes 16 kernels of 3 x 3 and less at stride 1 (a polyphase
decomposition), and 2 x 2 outputs are computed from transformed inputs and weights. Forward and both gradients all go that way.

Why it is faster
    PyTorch (oneDNN) runs the direct convolution near the cores' peak, and so would any direct kernel: a register tile of 14
    positions x 32 channels only drew level with it. What is left is to multiply less. Each output takes 169 multiplications
    instead of 363; the transforms, which only add, took a fifth of the time, because each input tile serves 96 channels and
    each channel's tile 48 terms. The products run in tiles of 14 positions x 2 registers: 16 loads feed 28 fused multiply-adds
    (AVX-512). What it costs: a transformed copy of the weights in each call, and a block's transforms, which fit into a core's
    second-level cache.

Mathematics
    Along one direction, with u = 4a + r:  out[i] = sum over r < 4 of sum over a of w[4a + r] * x[4(i + a) + r]
    For each phase r that is a convolution of every fourth input at stride 1, with 3 taps (r < 3) or 2 (r = 3): a "piece". F(2,
    n) computes 2 outputs of n taps from n + 1 inputs: y = A^T [(G w) * (B^T d)], * elementwise. Its matrices follow from the
    points 0, 1, -1 and infinity at which polynomials are evaluated; 2 taps need no -1. All pieces share A^T, so their products
    are summed before it: 4 + 4 + 4 + 3 = 15 products for 2 outputs instead of 22, in two directions 225 for 4 outputs instead
    of 484. Other strides and kernels are taken apart in the same way, into pieces of at most 3 taps. Gradients are the adjoint
    of the same product: of the weights G^T [(B^T d) * (A g)], summed over all tiles before G^T; of the input B [(G w) * (A g)].
    That of the bias is a plain sum. Risk: B^T and A^T add and subtract inputs of equal size. An output beside a far larger
    input, in the same tile, loses digits. NaN and infinities spread over a tile: whatever comes out not finite is computed
    again by the definition; a tensor full of them is slow.

Loops (forward; the gradients' are alike)
    over                    how                           what it keeps
    blocks of strips        at::parallel_for              56 tiles of the batch; a strip is up to 14 tiles of a row
    input channels, pieces  transform_input               B^T along the height, lines of every 8th column, B^T along the width
    channels, by 32         serial                        panel: the transformed weights of 32 channels
    16 points               serial                        inner size 48, 36 or 27
    strips, terms           multiply                      14 tiles x 32 channels of accumulators, in registers
    strips, tiles           finish_strip                  A^T of 16 products, then squares of outputs transposed

Floor
    A sample at the original's size: 0.60 MB in, 1.16 MB out; 211 MFLOP directly, 102 MFLOP after the rewrite: compute bound.
    One core (Cascade Lake, 2.4 GHz, AVX-512: 153.5 GFLOP/s) takes at least 1.37 ms directly, 0.66 after the rewrite.

Takes
    float32 CPU tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size, bias or none. Dilation, groups and other padding modes raise, and so does anything else. Gradients
    of weight, bias and input, those that are asked for; second derivatives raise. The bits do not depend on the number of
    threads. Needs GCC or Clang.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_cpu_polyphase_winograd"

CPP = r"""
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

// A name that only this library sees: the loader would share the tables of builds with other constants in the same process.
namespace {

// A register holds LANES floats. A product accumulates MAX_TILES tiles, or MAX_TERMS terms, by VECTORS registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, MAX_TILES = 14, MAX_TERMS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2, MAX_TILES = 7, MAX_TERMS = 6;
#else
constexpr int LANES = 4, VECTORS = 4, MAX_TILES = 3, MAX_TERMS = 3;
#endif
constexpr int CHANNELS = LANES * VECTORS;  // a group of output channels
constexpr int BLOCK_TILES = 56;            // tiles whose transforms fit into a core's second-level cache
constexpr int TAPS = IN_CHANNELS * KERNEL_H * KERNEL_W;

typedef float Register __attribute__((vector_size(LANES * sizeof(float))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));
typedef double Double __attribute__((vector_size(LANES * sizeof(double))));
typedef int32_t Lanes __attribute__((vector_size(LANES * sizeof(float))));

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // inlined, GCC would unroll the callers' loops too, and compile for half a minute

INLINE Register load(const float* from) { return *(const Unaligned*)from; }
INLINE void store(float* to, Register value) { *(Unaligned*)to = value; }
INLINE Lanes is_finite(Register value) { return value * 0.0f == 0.0f; }
static bool all(Lanes lanes) {
    bool every = true;
    for (int i = 0; i < LANES; ++i) every = every && lanes[i];
    return every;
}

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// x (batch, IN_CHANNELS, height, width), out (batch, out_channels, out_h, out_w).
struct Sizes {
    int64_t batch, height, width, out_channels, out_h, out_w, pad_h, pad_w;

    int64_t plane() const { return out_h * out_w; }
    int64_t groups() const { return (out_channels + CHANNELS - 1) / CHANNELS; }
    int64_t vectors() const { return groups() * VECTORS; }
    int64_t channels_from(int64_t o) const { return std::max<int64_t>(0, std::min<int64_t>(LANES, out_channels - o)); }
};

// Hands out parts of a workspace, each at the start of a cache line.
struct Space {
    float* next;
    float* take(int64_t floats) {
        float* const part = next;
        next += round_up(floats, 16);
        return part;
    }
};

// ---- Shuffles

// Lanes of a and, counted on, of b, in another order.
template <int... FROM>
INLINE Register shuffle(Register a, Register b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, FROM...);
#else
    return __builtin_shuffle(a, b, Lanes{FROM...});
#endif
}
constexpr std::make_integer_sequence<int, LANES> EVERY_LANE{};
template <int FIRST, int... LANE>
INLINE Register every_second(Register a, Register b, std::integer_sequence<int, LANE...>) {
    return shuffle<2 * LANE + FIRST...>(a, b);
}
template <int... LANE>
INLINE Register first_lanes(Register value, int64_t count, std::integer_sequence<int, LANE...>) {
    return Lanes{LANE...} < int32_t(std::min<int64_t>(count, LANES)) ? value : Register{};
}

// Two rows of a square, DISTANCE apart, exchange blocks of DISTANCE lanes: where a lane of the first, or second, is from.
template <int DISTANCE, bool SECOND>
constexpr int source(int lane) {
    if (lane & DISTANCE) return LANES + lane - (SECOND ? 0 : DISTANCE);
    return lane + (SECOND ? DISTANCE : 0);
}
template <int DISTANCE, bool SECOND, int... LANE>
INLINE Register exchange(Register a, Register b, std::integer_sequence<int, LANE...>) {
    return shuffle<source<DISTANCE, SECOND>(LANE)...>(a, b);
}
template <int DISTANCE>
INLINE void transpose(Register (&square)[LANES]) {
    UNROLL for (int i = 0; i < LANES; ++i)
        if (!(i & DISTANCE)) {
            const Register a = square[i], b = square[i + DISTANCE];
            square[i] = exchange<DISTANCE, false>(a, b, EVERY_LANE);
            square[i + DISTANCE] = exchange<DISTANCE, true>(a, b, EVERY_LANE);
        }
    if constexpr (DISTANCE > 1) transpose<DISTANCE / 2>(square);
}
static NOINLINE void transpose_square(const float* in, int64_t in_pitch, float* out, int64_t out_pitch) {
    Register square[LANES];
    UNROLL for (int i = 0; i < LANES; ++i) square[i] = load(in + i * in_pitch);
    transpose<LANES / 2>(square);
    UNROLL for (int i = 0; i < LANES; ++i) store(out + i * out_pitch, square[i]);
}

// in (rows, columns) -> out (columns, rows). The last squares overlap their neighbours.
static void copy_transposed(const float* in, int64_t in_pitch, int64_t rows, int64_t columns, float* out, int64_t out_pitch) {
    if (rows < LANES || columns < LANES) {
        for (int64_t c = 0; c < columns; ++c)
            for (int64_t r = 0; r < rows; ++r) out[c * out_pitch + r] = in[r * in_pitch + c];
        return;
    }
    for (int64_t row = 0; row < rows; row += LANES)
        for (int64_t column = 0; column < columns; column += LANES) {
            const int64_t r = std::min(row, rows - LANES), c = std::min(column, columns - LANES);
            transpose_square(in + r * in_pitch + c, in_pitch, out + c * out_pitch + r, out_pitch);
        }
}

// ---- The kernel as it is, for what is not finite

// weight (out_channels, TAPS) -> packed (vectors, TAPS, LANES), channels beyond the last zero.
static void pack_taps(const Sizes& size, const float* weight, float* packed) {
    std::fill_n(packed, size.vectors() * TAPS * LANES, 0.0f);
    for (int64_t o = 0; o < size.out_channels; o += LANES)
        copy_transposed(weight + o * TAPS, TAPS, size.channels_from(o), TAPS, packed + o * TAPS, LANES);
}

static float padded(const Sizes& size, const float* plane, int64_t h, int64_t w) {
    return h < 0 || h >= size.height || w < 0 || w >= size.width ? 0.0f : plane[h * size.width + w];
}

// The outputs at (i, j) of a sample for the LANES channels of `taps` (TAPS, LANES), in the order of the definition.
static Register convolve_directly(const Sizes& size, const float* sample, const float* taps, int64_t i, int64_t j) {
    Register sum{};
    for (int c = 0; c < IN_CHANNELS; ++c, sample += size.height * size.width)
        for (int u = 0; u < KERNEL_H; ++u)
            for (int v = 0; v < KERNEL_W; ++v, taps += LANES)
                sum += padded(size, sample, i * STRIDE_H - size.pad_h + u, j * STRIDE_W - size.pad_w + v) * load(taps);
    return sum;
}

// One tap's gradient for LANES channels: tap (c, u, v); slopes (plane, LANES) are a sample's gradients.
static Register weigh_directly(const Sizes& size, const float* sample, const float* slopes, int64_t tap) {
    const int64_t c = tap / (KERNEL_H * KERNEL_W), u = tap / KERNEL_W % KERNEL_H, v = tap % KERNEL_W;
    const float* plane = sample + c * size.height * size.width;
    Register sum{};
    for (int64_t i = 0; i < size.out_h; ++i)
        for (int64_t j = 0; j < size.out_w; ++j, slopes += LANES)
            sum += padded(size, plane, i * STRIDE_H - size.pad_h + u, j * STRIDE_W - size.pad_w + v) * load(slopes);
    return sum;
}

// The gradient of one element of the input; weight (out_channels, TAPS), slopes (out_channels, plane) are a sample's gradients.
static float slope_directly(const Sizes& size, const float* weight, const float* slopes, int64_t c, int64_t h, int64_t w) {
    float sum = 0;
    for (int64_t o = 0; o < size.out_channels; ++o, slopes += size.plane(), weight += TAPS)
        for (int u = 0; u < KERNEL_H; ++u)
            for (int v = 0; v < KERNEL_W; ++v) {
                const int64_t down = h + size.pad_h - u, right = w + size.pad_w - v;
                if (down < 0 || down % STRIDE_H || down / STRIDE_H >= size.out_h) continue;
                if (right < 0 || right % STRIDE_W || right / STRIDE_W >= size.out_w) continue;
                sum += weight[(c * KERNEL_H + u) * KERNEL_W + v] * slopes[down / STRIDE_H * size.out_w + right / STRIDE_W];
            }
    return sum;
}

// ---- The kernel in pieces

// Up to three taps of the kernel in one direction, a stride apart: for those taps the stride is 1.
struct Piece {
    int offset, taps;
};
template <int KERNEL, int STRIDE>
struct Pieces {
    Piece list[KERNEL] = {};  // the longest first
    int count = 0;

    constexpr Pieces() {
        for (int taps = 3; taps > 0; --taps)
            for (int phase = 0; phase < STRIDE && phase < KERNEL; ++phase)
                for (int offset = phase; offset < KERNEL; offset += 3 * STRIDE)
                    if (std::min(3, (KERNEL - offset + STRIDE - 1) / STRIDE) == taps) list[count++] = {offset, taps};
    }
};
constexpr Pieces<KERNEL_H, STRIDE_H> ROWS{};
constexpr Pieces<KERNEL_W, STRIDE_W> COLUMNS{};

template <class F>
static void with_constant(int taps, F function) {
    if (taps == 3) return function(std::integral_constant<int, 3>{});
    if (taps == 2) return function(std::integral_constant<int, 2>{});
    function(std::integral_constant<int, 1>{});
}

// ---- Small matrices of constants

template <int OUT, int IN>
struct Matrix {
    float at[OUT][IN] = {};

    constexpr Matrix<IN, OUT> transposed() const {
        Matrix<IN, OUT> result;
        for (int i = 0; i < OUT; ++i)
            for (int j = 0; j < IN; ++j) result.at[j][i] = at[i][j];
        return result;
    }
};

// out = matrix * in; the compiler unrolls it and leaves out the zeros of a constant matrix.
template <int OUT, int IN>
INLINE void apply(const Matrix<OUT, IN>& matrix, const Register (&in)[IN], Register (&out)[OUT]) {
    UNROLL for (int i = 0; i < OUT; ++i) {
        Register sum{};
        bool first = true;
        UNROLL for (int j = IN - 1; j >= 0; --j) {
            if (matrix.at[i][j] == 0) continue;
            sum = first ? in[j] * matrix.at[i][j] : sum + in[j] * matrix.at[i][j];
            first = false;
        }
        out[i] = sum;
    }
}

struct ForwardArguments {
    const float *x, *taps, *points, *bias;  // packed: taps (vectors, TAPS, LANES), points (groups, terms, CHANNELS)
    float* out;
};

// ---- Winograd's minimal filtering: TILE x TILE outputs at once

constexpr double FINITE_POINTS[] = {0, 1, -1, 0.5, -2};  // TILE = 2 takes the first three, 4 all; infinity is the last point

template <int TILE>
struct Winograd {
    static constexpr int POINTS = TILE + 2;
    static constexpr int PERIOD_W = TILE * STRIDE_W;  // columns from a tile's input to the next one's

    // F(TILE, N) for a piece of N taps: the matrices of input (B^T) and taps (G), one row for each of its COUNT points.
    template <int N>
    struct Transform {
        static constexpr int COUNT = TILE + N - 1;
        Matrix<COUNT, COUNT> input;
        double taps[COUNT][N] = {};

        constexpr Transform() {
            for (int i = 0; i < COUNT; ++i) {
                double polynomial[COUNT] = {1}, scale = 1;  // the product of (z - point) over the other finite points
                for (int j = 0; j < COUNT - 1; ++j) {
                    if (j == i) continue;
                    for (int d = COUNT - 1; d >= 0; --d)
                        polynomial[d] = (d ? polynomial[d - 1] : 0) - FINITE_POINTS[j] * polynomial[d];
                    if (i < COUNT - 1) scale *= FINITE_POINTS[i] - FINITE_POINTS[j];
                }
                for (int d = 0; d < COUNT; ++d) input.at[i][d] = float(polynomial[d]);
                double power = 1 / scale;
                for (int t = 0; t < N; ++t) {
                    taps[i][t] = i < COUNT - 1 ? power : t == N - 1;
                    power *= FINITE_POINTS[i < COUNT - 1 ? i : 0];
                }
            }
        }
        static constexpr int point(int i) { return i < COUNT - 1 ? i : POINTS - 1; }  // its index among all POINTS
    };
    template <int N>
    static constexpr Transform<N> TRANSFORM{};
    template <int N>
    static constexpr Matrix<TILE + N - 1, TILE + N - 1> INPUT_ADJOINT = TRANSFORM<N>.input.transposed();

    // A^T: from the points to the outputs of a tile, the same for all pieces.
    static constexpr Matrix<TILE, POINTS> output_transform() {
        Matrix<TILE, POINTS> result;
        for (int p = 0; p < POINTS - 1; ++p) {
            double power = 1;
            for (int r = 0; r < TILE; ++r, power *= FINITE_POINTS[p]) result.at[r][p] = float(power);
        }
        result.at[TILE - 1][POINTS - 1] = 1;
        return result;
    }
    static constexpr Matrix<TILE, POINTS> OUTPUT = output_transform();
    static constexpr Matrix<POINTS, TILE> OUTPUT_ADJOINT = OUTPUT.transposed();

    // The products at point (i, l) have a term for each input channel and each pair of pieces that have the point.
    struct Terms {
        int rows[POINTS] = {}, columns[POINTS] = {};  // how many pieces have a point; they are the first ones
        int count[POINTS][POINTS] = {}, before[POINTS][POINTS] = {}, total = 0;

        constexpr Terms() {
            for (int p = 0; p < POINTS; ++p) rows[p] = pieces_with(ROWS, p), columns[p] = pieces_with(COLUMNS, p);
            for (int i = 0; i < POINTS; ++i)
                for (int l = 0; l < POINTS; ++l) {
                    before[i][l] = total;
                    total += count[i][l] = IN_CHANNELS * rows[i] * columns[l];
                }
        }
        template <class P>
        static constexpr int pieces_with(const P& pieces, int point) {
            int n = 0;
            while (n < pieces.count && (point == POINTS - 1 || point < TILE + pieces.list[n].taps - 2)) ++n;
            return n;
        }
        constexpr int index(int i, int l, int c, int h, int w) const {
            return before[i][l] + (c * rows[i] + h) * columns[l] + w;
        }
    };
    static constexpr Terms TERMS{};

    // Tiles of one row, up to MAX_TILES of them beside each other, are a strip; strips are numbered over the whole batch.
    struct Plan {
        int64_t tile_rows, tile_columns, strips_a_row, strip_tiles, strips, strips_a_block, blocks;

        explicit Plan(const Sizes& size) {
            tile_rows = (size.out_h + TILE - 1) / TILE, tile_columns = (size.out_w + TILE - 1) / TILE;
            strips_a_row = (tile_columns + MAX_TILES - 1) / MAX_TILES;
            strip_tiles = (tile_columns + strips_a_row - 1) / strips_a_row;
            strips = size.batch * tile_rows * strips_a_row;
            strips_a_block = BLOCK_TILES / strip_tiles;
            blocks = (strips + strips_a_block - 1) / strips_a_block;
        }
    };
    struct Strip {
        int64_t sample, row, column, tiles;  // its first output is at (row, column)
        int64_t rows, columns;               // of outputs, without those beyond the image

        Strip(const Sizes& size, const Plan& plan, int64_t index) {
            const int64_t first = index % plan.strips_a_row * plan.strip_tiles;
            tiles = std::min(plan.strip_tiles, plan.tile_columns - first);
            row = index / plan.strips_a_row % plan.tile_rows * TILE, column = first * TILE;
            sample = index / plan.strips_a_row / plan.tile_rows;
            rows = std::min<int64_t>(TILE, size.out_h - row);
            columns = std::min(tiles * TILE, size.out_w - column);
        }
    };

    // ---- Weights

    // The transform of a pair of pieces: taps (KERNEL_H, KERNEL_W, LANES) -> points (terms, CHANNELS).
    template <int H, int W>
    static NOINLINE void transform_pieces(const float* taps, int c, int h, int w, float* points) {
        const float* first = taps + (ROWS.list[h].offset * KERNEL_W + COLUMNS.list[w].offset) * LANES;
        for (int i = 0; i < Transform<H>::COUNT; ++i) {
            Double half[W];
            for (int b = 0; b < W; ++b) {
                half[b] = Double{};
                for (int a = 0; a < H; ++a)
                    half[b] += TRANSFORM<H>.taps[i][a] *
                               __builtin_convertvector(load(first + (a * STRIDE_H * KERNEL_W + b * STRIDE_W) * LANES), Double);
            }
            for (int l = 0; l < Transform<W>::COUNT; ++l) {
                Double sum{};
                for (int b = 0; b < W; ++b) sum += TRANSFORM<W>.taps[l][b] * half[b];
                store(points + TERMS.index(Transform<H>::point(i), Transform<W>::point(l), c, h, w) * CHANNELS,
                      __builtin_convertvector(sum, Register));
            }
        }
    }

    // The adjoint: sums (terms, CHANNELS) -> taps (KERNEL_H, KERNEL_W, LANES).
    template <int H, int W>
    static NOINLINE void gather_pieces(const float* sums, int c, int h, int w, float* taps) {
        float* first = taps + (ROWS.list[h].offset * KERNEL_W + COLUMNS.list[w].offset) * LANES;
        Register gathered[H][W] = {};
        for (int i = 0; i < Transform<H>::COUNT; ++i) {
            Register half[W] = {};
            for (int l = 0; l < Transform<W>::COUNT; ++l)
                for (int b = 0; b < W; ++b)
                    half[b] += float(TRANSFORM<W>.taps[l][b]) *
                               load(sums + TERMS.index(Transform<H>::point(i), Transform<W>::point(l), c, h, w) * CHANNELS);
            for (int a = 0; a < H; ++a)
                for (int b = 0; b < W; ++b) gathered[a][b] += float(TRANSFORM<H>.taps[i][a]) * half[b];
        }
        for (int a = 0; a < H; ++a)
            for (int b = 0; b < W; ++b) store(first + (a * STRIDE_H * KERNEL_W + b * STRIDE_W) * LANES, gathered[a][b]);
    }

    template <class F>
    static void for_all_pieces(F function) {
        for (int c = 0; c < IN_CHANNELS; ++c)
            for (int h = 0; h < ROWS.count; ++h)
                for (int w = 0; w < COLUMNS.count; ++w)
                    with_constant(ROWS.list[h].taps, [&](auto H) {
                        with_constant(COLUMNS.list[w].taps, [&](auto W) { function(H, W, c, h, w); });
                    });
    }

    // taps (vectors, TAPS, LANES) -> points (groups, terms, CHANNELS), of one register of channels.
    static void transform_taps(const float* taps, int64_t vector, float* points) {
        taps += vector * TAPS * LANES, points += (vector / VECTORS * TERMS.total * VECTORS + vector % VECTORS) * LANES;
        for_all_pieces([&](auto H, auto W, int c, int h, int w) {
            transform_pieces<H, W>(taps + c * KERNEL_H * KERNEL_W * LANES, c, h, w, points);
        });
    }
    static void gather_taps(const float* sums, int64_t vector, float* taps) {
        taps += vector * TAPS * LANES, sums += (vector / VECTORS * TERMS.total * VECTORS + vector % VECTORS) * LANES;
        for_all_pieces([&](auto H, auto W, int c, int h, int w) {
            gather_pieces<H, W>(sums, c, h, w, taps + c * KERNEL_H * KERNEL_W * LANES);
        });
    }

    // ---- Input

    // A strip's input is worked on in rows of WIDTH columns, then in PERIOD_W lines of every PERIOD_W-th column: lane t of a
    // line belongs to tile t. Rows and lines are as long as the longest strip's.
    static constexpr int reach() {
        int end = 0;
        for (const Piece& piece : COLUMNS.list) end = std::max(end, piece.offset + (TILE + piece.taps - 2) * STRIDE_W);
        return end;
    }
    static constexpr int SHIFT = reach() / PERIOD_W;  // tiles to the right that a tile's input reaches into
    static constexpr int LINE_TILES = int(round_up(MAX_TILES + SHIFT, LANES)), LINE = LINE_TILES + LANES;
    static constexpr int LINES = std::max(PERIOD_W, LANES);  // the last ones are none of a period's, but make a square
    static constexpr int WIDTH = LINE_TILES * PERIOD_W, ROW = WIDTH + LANES;

    struct InputSpace {
        float *rows, *zeros, *lines;  // (POINTS, ROW), (ROW,), (POINTS, LINES, LINE)

        explicit InputSpace(Space& space)
            : rows(space.take(POINTS * ROW)), zeros(space.take(ROW)), lines(space.take(POINTS * LINES * LINE)) {
            std::fill_n(rows, POINTS * ROW, 0.0f), std::fill_n(zeros, ROW, 0.0f);
            std::fill_n(lines, POINTS * LINES * LINE, 0.0f);
        }
        static constexpr int64_t floats() { return (POINTS + 1) * ROW + POINTS * LINES * LINE + 48; }
    };

    // Where a strip's rows lie in the image: they begin at column `start`, and [left, right) of them are inside.
    struct Window {
        int64_t start, left, right;

        Window(const Sizes& size, const Strip& strip) {
            start = strip.column * STRIDE_W - size.pad_w;
            left = std::min<int64_t>(std::max<int64_t>(0, -start), WIDTH);
            right = std::max(left, std::min<int64_t>(WIDTH, size.width - start));
        }
        static int64_t row(const Sizes& size, const Strip& strip, int offset, int j) {
            return (strip.row + j) * STRIDE_H + offset - size.pad_h;
        }
    };

    // sums (COUNT, ROW) = the transform along the height of COUNT rows of the image.
    template <int N>
    static NOINLINE void transform_rows(const float* const* rows, const Window& window, float* sums) {
        constexpr int COUNT = Transform<N>::COUNT;
        Register in[COUNT], out[COUNT];
        int64_t w = window.left;
        for (; w + LANES <= window.right; w += LANES) {
            UNROLL for (int j = 0; j < COUNT; ++j) in[j] = load(rows[j] + w);
            apply(TRANSFORM<N>.input, in, out);
            UNROLL for (int i = 0; i < COUNT; ++i) store(sums + i * ROW + w, out[i]);
        }
        for (; w < window.right; ++w)
            for (int i = 0; i < COUNT; ++i) {
                float sum = 0;
                for (int j = COUNT - 1; j >= 0; --j)
                    if (TRANSFORM<N>.input.at[i][j] != 0) sum += TRANSFORM<N>.input.at[i][j] * rows[j][w];
                sums[i * ROW + w] = sum;
            }
    }

    // One register of tiles: the transform along the width for piece W; values[l] is where point l is for piece 0.
    template <int W>
    static NOINLINE void transform_columns(const float* lines, float* const* values) {
        constexpr Piece piece = COLUMNS.list[W];
        constexpr int COUNT = Transform<piece.taps>::COUNT;
        Register in[COUNT], out[COUNT];
        UNROLL for (int j = 0; j < COUNT; ++j) {
            const int column = piece.offset + j * STRIDE_W;
            in[j] = load(lines + column % PERIOD_W * LINE + column / PERIOD_W);
        }
        apply(TRANSFORM<piece.taps>.input, in, out);
        UNROLL for (int l = 0; l < COUNT; ++l) store(values[Transform<piece.taps>::point(l)] + W * LANES, out[l]);
    }
    static constexpr std::make_integer_sequence<int, COLUMNS.count> EACH_COLUMN{};
    template <int... W>
    static void transform_all_columns(const float* lines, float* const* values, std::integer_sequence<int, W...>) {
        (transform_columns<W>(lines, values), ...);
    }

    // values (terms, LANES) = the transformed input of a strip, a lane for each tile. What later lanes hold is of no use.
    static void transform_input(const Sizes& size, const float* x, const Strip& strip, float* values, const InputSpace& space) {
        const Window window(size, strip);
        for (int i = 0; i < POINTS; ++i) {
            std::fill_n(space.rows + i * ROW, window.left, 0.0f);
            std::fill_n(space.rows + i * ROW + window.right, WIDTH - window.right, 0.0f);
        }
        const float* plane = x + strip.sample * IN_CHANNELS * size.height * size.width;
        for (int c = 0; c < IN_CHANNELS; ++c, plane += size.height * size.width)
            for (int h = 0; h < ROWS.count; ++h) {
                const int count = TILE + ROWS.list[h].taps - 1;
                const float* rows[POINTS];
                for (int j = 0; j < count; ++j) {
                    const int64_t row = Window::row(size, strip, ROWS.list[h].offset, j);
                    rows[j] = row < 0 || row >= size.height ? space.zeros : plane + row * size.width + window.start;
                }
                with_constant(ROWS.list[h].taps, [&](auto N) { transform_rows<N>(rows, window, space.rows); });
                for (int i = 0; i < count; ++i)
                    copy_transposed(space.rows + i * ROW, PERIOD_W, LINE_TILES, LINES, space.lines + i * LINES * LINE, LINE);
                for (int i = 0; i < count; ++i) {
                    const int point = i < count - 1 ? i : POINTS - 1;
                    float* first[POINTS];
                    for (int l = 0; l < POINTS; ++l) first[l] = values + TERMS.index(point, l, c, h, 0) * LANES;
                    transform_all_columns(space.lines + i * LINES * LINE, first, EACH_COLUMN);
                }
            }
    }

    // The transformed input of `count` strips from `first` on.
    static void transform_inputs(const Sizes& size, const Plan& plan, const float* x, int64_t first, int64_t count,
                                 float* values, const InputSpace& space) {
        for (int64_t s = 0; s < count; ++s)
            transform_input(size, x, Strip(size, plan, first + s), values + s * TERMS.total * LANES, space);
    }

    // ---- Forward

    // product (N tiles, CHANNELS) = the sums over the terms of values (terms, LANES of tiles) times points (terms, CHANNELS).
    template <int N>
    static NOINLINE void multiply(const float* values, const float* points, int64_t terms, float* product) {
        Register sums[N][VECTORS];
        UNROLL for (int t = 0; t < N; ++t)
            UNROLL for (int n = 0; n < VECTORS; ++n) sums[t][n] = Register{};
        for (int64_t k = 0; k < terms; ++k, values += LANES, points += CHANNELS) {
            __builtin_prefetch(values + 8 * LANES);
            UNROLL for (int n = 0; n < VECTORS; ++n) __builtin_prefetch(points + 8 * CHANNELS + n * LANES);
            UNROLL for (int t = 0; t < N; ++t)
                UNROLL for (int n = 0; n < VECTORS; ++n) sums[t][n] += values[t] * load(points + n * LANES);
        }
        UNROLL for (int t = 0; t < N; ++t)
            UNROLL for (int n = 0; n < VECTORS; ++n) store(product + (t * VECTORS + n) * LANES, sums[t][n]);
    }
    typedef void (*Multiply)(const float*, const float*, int64_t, float*);
    static Multiply multiply_for(int64_t tiles) {
        if (tiles > MAX_TILES * 3 / 4) return multiply<MAX_TILES>;
        if (tiles > MAX_TILES / 2) return multiply<MAX_TILES * 3 / 4>;
        if (tiles > MAX_TILES / 4) return multiply<MAX_TILES / 2>;
        return multiply<std::max(1, MAX_TILES / 4)>;
    }

    // One register of channels of a tile: product (POINTS, POINTS, MAX_TILES, CHANNELS) at its index -> outputs (TILE, TILE),
    // LANES floats each, rows `pitch` floats apart. Returns 0, or NaN in the lanes of which something is not finite.
    static INLINE Register transform_output(const float* product, Register bias, float* outputs, int64_t pitch) {
        Register half[POINTS][TILE];
        UNROLL for (int l = 0; l < POINTS; ++l) {
            Register in[POINTS];
            UNROLL for (int i = 0; i < POINTS; ++i) in[i] = load(product + (i * POINTS + l) * MAX_TILES * CHANNELS);
            apply(OUTPUT, in, half[l]);
        }
        Register check{};
        UNROLL for (int r = 0; r < TILE; ++r) {
            Register in[POINTS], out[TILE];
            UNROLL for (int l = 0; l < POINTS; ++l) in[l] = half[l][r];
            apply(OUTPUT, in, out);
            UNROLL for (int s = 0; s < TILE; ++s) {
                store(outputs + r * pitch + s * LANES, out[s] + bias);
                check += (out[s] + bias) * 0.0f;
            }
        }
        return check;
    }

    struct ForwardSpace {
        float *values, *products, *outputs;
        InputSpace input;
        ForwardSpace(const Plan& plan, Space space)
            : values(space.take(plan.strips_a_block * TERMS.total * LANES)),
              products(space.take(plan.strips_a_block * POINTS * POINTS * MAX_TILES * CHANNELS)),
              outputs(space.take(TILE * TILE * MAX_TILES * LANES)), input(space) {}
        static int64_t floats(const Plan& plan) {
            return plan.strips_a_block * (TERMS.total * LANES + POINTS * POINTS * MAX_TILES * CHANNELS) +
                   TILE * TILE * MAX_TILES * LANES + InputSpace::floats() + 48;
        }
    };

    // Outputs (rows, columns of the strip) that came out not finite, once more, as the definition says.
    static NOINLINE void repair_outputs(const Sizes& size, const ForwardArguments& arguments, const Strip& strip, int64_t o,
                                        float* outputs, int64_t pitch) {
        const float* sample = arguments.x + strip.sample * IN_CHANNELS * size.height * size.width;
        for (int64_t r = 0; r < strip.rows; ++r)
            for (int64_t s = 0; s < strip.columns; ++s) {
                float* to = outputs + r * pitch + s * LANES;
                const Lanes finite = is_finite(load(to));
                if (all(finite)) continue;
                const float* taps = arguments.taps + o * TAPS;
                const Register sum = convolve_directly(size, sample, taps, strip.row + r, strip.column + s);
                store(to, finite ? load(to) : sum + load(arguments.bias + o));
            }
    }

    // Writes one strip of out, for the group that begins with channel o.
    static void finish_strip(const Sizes& size, const ForwardArguments& arguments, const Strip& strip, int64_t o,
                             const float* product, float* outputs) {
        const int64_t pitch = strip.tiles * TILE * LANES;
        for (int n = 0; n < VECTORS; ++n, o += LANES, product += LANES) {
            const int64_t channels = size.channels_from(o);
            if (channels == 0) return;
            Register check{};
            for (int64_t t = 0; t < strip.tiles; ++t)
                check += transform_output(product + t * CHANNELS, load(arguments.bias + o), outputs + t * TILE * LANES, pitch);
            if (!all(is_finite(check))) repair_outputs(size, arguments, strip, o, outputs, pitch);
            float* out = arguments.out + (strip.sample * size.out_channels + o) * size.plane() + strip.column;
            for (int64_t r = 0; r < strip.rows; ++r)
                copy_transposed(outputs + r * pitch, LANES, strip.columns, channels, out + (strip.row + r) * size.out_w,
                                size.plane());
        }
    }

    static void forward_block(const Sizes& size, const Plan& plan, const ForwardArguments& arguments, int64_t block,
                              const ForwardSpace& space) {
        const int64_t first = block * plan.strips_a_block, count = std::min(plan.strips_a_block, plan.strips - first);
        transform_inputs(size, plan, arguments.x, first, count, space.values, space.input);
        const Multiply multiply_strip = multiply_for(plan.strip_tiles);
        constexpr int64_t PRODUCT = MAX_TILES * CHANNELS;
        for (int64_t group = 0; group < size.groups(); ++group) {
            for (int p = 0; p < POINTS * POINTS; ++p)
                for (int64_t s = 0; s < count; ++s) {
                    const int64_t before = TERMS.before[p / POINTS][p % POINTS];
                    multiply_strip(space.values + (s * TERMS.total + before) * LANES,
                                   arguments.points + (group * TERMS.total + before) * CHANNELS,
                                   TERMS.count[p / POINTS][p % POINTS], space.products + (s * POINTS * POINTS + p) * PRODUCT);
                }
            for (int64_t s = 0; s < count; ++s)
                finish_strip(size, arguments, Strip(size, plan, first + s), group * CHANNELS,
                             space.products + s * POINTS * POINTS * PRODUCT, space.outputs);
        }
    }

    // ---- The weights' gradient

    // One register of channels of a tile: gradients (TILE, TILE), rows `row_pitch` floats apart -> slopes (POINTS, POINTS),
    // `pitch` floats apart.
    static INLINE void transform_gradient(const float* gradients, int64_t row_pitch, float* slopes, int64_t pitch) {
        Register half[TILE][POINTS];
        UNROLL for (int s = 0; s < TILE; ++s) {
            Register in[TILE];
            UNROLL for (int r = 0; r < TILE; ++r) in[r] = load(gradients + r * row_pitch + s * LANES);
            apply(OUTPUT_ADJOINT, in, half[s]);
        }
        UNROLL for (int i = 0; i < POINTS; ++i) {
            Register in[TILE], out[POINTS];
            UNROLL for (int s = 0; s < TILE; ++s) in[s] = half[s][i];
            apply(OUTPUT_ADJOINT, in, out);
            UNROLL for (int l = 0; l < POINTS; ++l) store(slopes + (i * POINTS + l) * pitch, out[l]);
        }
    }

    // A strip of grad (batch, out_channels, out_h, out_w), LANES channels from o on -> gradients (TILE, tiles * TILE, LANES),
    // zero beyond the image and beyond the last channel.
    static void load_gradient(const Sizes& size, const float* grad, const Strip& strip, int64_t o, float* gradients) {
        const int64_t pitch = strip.tiles * TILE * LANES, channels = size.channels_from(o);
        if (strip.rows < TILE || strip.columns < strip.tiles * TILE || channels < LANES)
            std::fill_n(gradients, TILE * pitch, 0.0f);
        grad += (strip.sample * size.out_channels + o) * size.plane() + strip.row * size.out_w + strip.column;
        for (int64_t r = 0; r < strip.rows; ++r)
            copy_transposed(grad + r * size.out_w, size.plane(), channels, strip.columns, gradients + r * pitch, LANES);
    }

    // sums (N, CHANNELS) += over `outer` x `inner` positions, values (N rows, `pitch` floats apart; the positions of each outer
    // one `step` floats from those before) times vectors (outer, inner, CHANNELS).
    struct Values {
        const float* at;
        int64_t pitch, step;
    };
    template <int N>
    static NOINLINE void accumulate(Values values, const float* vectors, int64_t outer, int64_t inner, float* sums) {
        Register total[N][VECTORS];
        UNROLL for (int k = 0; k < N; ++k)
            UNROLL for (int n = 0; n < VECTORS; ++n) total[k][n] = load(sums + (k * VECTORS + n) * LANES);
        for (int64_t s = 0; s < outer; ++s, values.at += values.step)
            for (int64_t t = 0; t < inner; ++t, vectors += CHANNELS)
                UNROLL for (int k = 0; k < N; ++k)
                    UNROLL for (int n = 0; n < VECTORS; ++n)
                        total[k][n] += values.at[k * values.pitch + t] * load(vectors + n * LANES);
        UNROLL for (int k = 0; k < N; ++k)
            UNROLL for (int n = 0; n < VECTORS; ++n) store(sums + (k * VECTORS + n) * LANES, total[k][n]);
    }
    static void accumulate_terms(Values values, const float* vectors, int64_t outer, int64_t inner, int64_t terms,
                                 float* sums) {
        for (int64_t done; terms > 0; terms -= done, values.at += done * values.pitch, sums += done * CHANNELS) {
            constexpr int FEW = MAX_TERMS / 3;
            if (terms >= MAX_TERMS)
                accumulate<MAX_TERMS>(values, vectors, outer, inner, sums), done = MAX_TERMS;
            else if (terms >= FEW)
                accumulate<FEW>(values, vectors, outer, inner, sums), done = FEW;
            else
                accumulate<1>(values, vectors, outer, inner, sums), done = 1;
        }
    }

    struct WeightSpace {
        float *values, *slopes, *gradients, *sums;  // sums (groups, terms, CHANNELS)
        InputSpace input;
        WeightSpace(const Sizes& size, const Plan& plan, Space space)
            : values(space.take(plan.strips_a_block * TERMS.total * LANES)),
              slopes(space.take(plan.strips_a_block * POINTS * POINTS * plan.strip_tiles * CHANNELS)),
              gradients(space.take(TILE * TILE * MAX_TILES * LANES)),
              sums(space.take(size.groups() * TERMS.total * CHANNELS)), input(space) {}
        static int64_t floats(const Sizes& size, const Plan& plan) {
            return plan.strips_a_block * (TERMS.total * LANES + POINTS * POINTS * plan.strip_tiles * CHANNELS) +
                   TILE * TILE * MAX_TILES * LANES + size.groups() * TERMS.total * CHANNELS + InputSpace::floats() + 64;
        }
    };

    // slopes (POINTS, POINTS, strips, tiles, CHANNELS), from a strip's first tile on = its transformed gradients for the group
    // that begins with channel o; `pitch` floats lie between points.
    static void transform_strip(const Sizes& size, const Plan& plan, const float* grad, const Strip& strip, int64_t o,
                                float* gradients, float* slopes, int64_t pitch) {
        for (int n = 0; n < VECTORS; ++n, slopes += LANES) {
            load_gradient(size, grad, strip, o + n * LANES, gradients);
            for (int64_t t = 0; t < strip.tiles; ++t)
                transform_gradient(gradients + t * TILE * LANES, strip.tiles * TILE * LANES, slopes + t * CHANNELS, pitch);
            for (int64_t t = strip.tiles; t < plan.strip_tiles; ++t)
                for (int p = 0; p < POINTS * POINTS; ++p) store(slopes + t * CHANNELS + p * pitch, Register{});
        }
    }

    // Adds a block's part to space.sums.
    static void weight_block(const Sizes& size, const Plan& plan, const float* x, const float* grad, int64_t block,
                             const WeightSpace& space) {
        const int64_t first = block * plan.strips_a_block, count = std::min(plan.strips_a_block, plan.strips - first);
        const int64_t strip_floats = plan.strip_tiles * CHANNELS, pitch = count * strip_floats;
        transform_inputs(size, plan, x, first, count, space.values, space.input);
        for (int64_t group = 0; group < size.groups(); ++group) {
            for (int64_t s = 0; s < count; ++s)
                transform_strip(size, plan, grad, Strip(size, plan, first + s), group * CHANNELS, space.gradients,
                                space.slopes + s * strip_floats, pitch);
            for (int p = 0; p < POINTS * POINTS; ++p) {
                const int64_t before = TERMS.before[p / POINTS][p % POINTS];
                accumulate_terms({space.values + before * LANES, LANES, TERMS.total * LANES}, space.slopes + p * pitch, count,
                                 plan.strip_tiles, TERMS.count[p / POINTS][p % POINTS],
                                 space.sums + (group * TERMS.total + before) * CHANNELS);
            }
        }
    }

    // taps (vectors, TAPS, LANES) = the gradient over the blocks [first, last).
    static void weight_chunk(const Sizes& size, const Plan& plan, const float* x, const float* grad, int64_t first,
                             int64_t last, const WeightSpace& space, float* taps) {
        std::fill_n(space.sums, size.groups() * TERMS.total * CHANNELS, 0.0f);
        for (int64_t block = first; block < last; ++block) weight_block(size, plan, x, grad, block, space);
        for (int64_t vector = 0; vector < size.vectors(); ++vector) gather_taps(space.sums, vector, taps);
    }

    // ---- The input's gradient: a lane of a register is a tile, and VECTORS strips are worked on at once

    struct InputGradSpace {
        float *slopes, *sums;  // (POINTS, POINTS, groups * CHANNELS, VECTORS, LANES) and (terms, VECTORS, LANES)
        InputSpace input;
        InputGradSpace(const Sizes& size, Space space)
            : slopes(space.take(POINTS * POINTS * size.groups() * CHANNELS * CHANNELS)),
              sums(space.take(TERMS.total * CHANNELS)), input(space) {
            std::fill_n(slopes, POINTS * POINTS * size.groups() * CHANNELS * CHANNELS, 0.0f);
        }
        static int64_t floats(const Sizes& size) {
            return POINTS * POINTS * size.groups() * CHANNELS * CHANNELS + TERMS.total * CHANNELS + InputSpace::floats() + 64;
        }
    };

    // line[s] = column s of each tile, of a row of outputs that has `columns` of them; zero beyond. The tensor ends at `end`.
    static INLINE void load_tiles(const float* row, int64_t columns, const float* end, Register (&line)[TILE]) {
        static_assert(TILE == 2, "takes every second lane");
        float copy[2 * LANES] = {};
        if (end - row < 2 * LANES) row = (const float*)std::copy_n(row, columns, copy) - columns;
        const Register left = first_lanes(load(row), columns, EVERY_LANE);
        const Register right = first_lanes(load(row + LANES), columns - LANES, EVERY_LANE);
        line[0] = every_second<0>(left, right, EVERY_LANE), line[1] = every_second<1>(left, right, EVERY_LANE);
    }

    // The transformed gradients of one channel of a strip -> slopes (POINTS, POINTS), `pitch` floats apart.
    static void transform_plane(const Sizes& size, const float* plane, const float* end, const Strip& strip, float* slopes,
                                int64_t pitch) {
        Register half[TILE][POINTS], rows[TILE][TILE] = {};
        for (int64_t r = 0; r < strip.rows; ++r)
            load_tiles(plane + (strip.row + r) * size.out_w + strip.column, strip.columns, end, rows[r]);
        UNROLL for (int s = 0; s < TILE; ++s) {
            Register in[TILE];
            UNROLL for (int r = 0; r < TILE; ++r) in[r] = rows[r][s];
            apply(OUTPUT_ADJOINT, in, half[s]);
        }
        UNROLL for (int i = 0; i < POINTS; ++i) {
            Register in[TILE], out[POINTS];
            UNROLL for (int s = 0; s < TILE; ++s) in[s] = half[s][i];
            apply(OUTPUT_ADJOINT, in, out);
            UNROLL for (int l = 0; l < POINTS; ++l) store(slopes + (i * POINTS + l) * pitch, out[l]);
        }
    }

    // Adds a register of tiles, values[l] at point l for piece 0, to the lines of the input's columns.
    template <int W>
    static NOINLINE void scatter_columns(const float* const* values, float* lines) {
        constexpr Piece piece = COLUMNS.list[W];
        constexpr int COUNT = Transform<piece.taps>::COUNT;
        Register in[COUNT], out[COUNT];
        UNROLL for (int l = 0; l < COUNT; ++l) in[l] = load(values[Transform<piece.taps>::point(l)] + W * CHANNELS);
        apply(INPUT_ADJOINT<piece.taps>, in, out);
        UNROLL for (int j = 0; j < COUNT; ++j) {
            const int column = piece.offset + j * STRIDE_W;
            float* const line = lines + column % PERIOD_W * LINE + column / PERIOD_W;
            store(line, load(line) + out[j]);
        }
    }
    template <int... W>
    static void scatter_all_columns(const float* const* values, float* lines, std::integer_sequence<int, W...>) {
        (scatter_columns<W>(values, lines), ...);
    }

    // Adds sums (COUNT, ROW) to rows of the image's gradient; a null row is outside.
    template <int N>
    static NOINLINE void scatter_rows(const float* sums, const Window& window, float* const* rows) {
        constexpr int COUNT = Transform<N>::COUNT;
        Register in[COUNT], out[COUNT];
        int64_t w = window.left;
        for (; w + LANES <= window.right; w += LANES) {
            UNROLL for (int i = 0; i < COUNT; ++i) in[i] = load(sums + i * ROW + w);
            apply(INPUT_ADJOINT<N>, in, out);
            UNROLL for (int j = 0; j < COUNT; ++j)
                if (rows[j]) store(rows[j] + w, load(rows[j] + w) + out[j]);
        }
        for (; w < window.right; ++w)
            for (int j = 0; j < COUNT; ++j)
                for (int i = 0; i < COUNT; ++i)
                    if (rows[j]) rows[j][w] += INPUT_ADJOINT<N>.at[j][i] * sums[i * ROW + w];
    }

    // Adds what a strip's tiles, sums (terms, VECTORS, LANES), give to the gradient of a sample's planes.
    static void scatter_strip(const Sizes& size, const Strip& strip, const float* sums, float* plane, const InputSpace& space) {
        const Window window(size, strip);
        for (int c = 0; c < IN_CHANNELS; ++c, plane += size.height * size.width)
            for (int h = 0; h < ROWS.count; ++h) {
                const int count = TILE + ROWS.list[h].taps - 1;
                std::fill_n(space.lines, count * LINES * LINE, 0.0f);
                for (int i = 0; i < count; ++i) {
                    const int point = i < count - 1 ? i : POINTS - 1;
                    const float* first[POINTS];
                    for (int l = 0; l < POINTS; ++l) first[l] = sums + TERMS.index(point, l, c, h, 0) * CHANNELS;
                    scatter_all_columns(first, space.lines + i * LINES * LINE, EACH_COLUMN);
                }
                for (int i = 0; i < count; ++i)  // a line beyond the period is overwritten by the next tile's first
                    copy_transposed(space.lines + i * LINES * LINE, LINE, LINES, LINE_TILES, space.rows + i * ROW, PERIOD_W);
                float* rows[POINTS];
                for (int j = 0; j < count; ++j) {
                    const int64_t row = Window::row(size, strip, ROWS.list[h].offset, j);
                    rows[j] = row < 0 || row >= size.height ? nullptr : plane + row * size.width + window.start;
                }
                with_constant(ROWS.list[h].taps, [&](auto N) { scatter_rows<N>(space.rows, window, rows); });
            }
    }

    // sample (IN_CHANNELS, height, width) = the gradient of sample b of the input; points (groups, terms, CHANNELS).
    static void input_grad_sample(const Sizes& size, const Plan& plan, const float* grad, const float* points, int64_t b,
                                  float* sample, const InputGradSpace& space) {
        const int64_t strips = plan.tile_rows * plan.strips_a_row, pitch = size.groups() * CHANNELS * CHANNELS;
        const float* end = grad + size.batch * size.out_channels * size.plane();
        std::fill_n(sample, IN_CHANNELS * size.height * size.width, 0.0f);
        for (int64_t first = 0; first < strips; first += VECTORS) {
            const int64_t count = std::min<int64_t>(VECTORS, strips - first);
            for (int64_t s = 0; s < count; ++s) {
                const Strip strip(size, plan, first + s);
                for (int64_t o = 0; o < size.out_channels; ++o)
                    transform_plane(size, grad + (b * size.out_channels + o) * size.plane(), end, strip,
                                    space.slopes + o * CHANNELS + s * LANES, pitch);
            }
            std::fill_n(space.sums, TERMS.total * CHANNELS, 0.0f);
            for (int p = 0; p < POINTS * POINTS; ++p) {
                const int64_t before = TERMS.before[p / POINTS][p % POINTS];
                accumulate_terms({points + before * CHANNELS, CHANNELS, TERMS.total * CHANNELS}, space.slopes + p * pitch,
                                 size.groups(), CHANNELS, TERMS.count[p / POINTS][p % POINTS], space.sums + before * CHANNELS);
            }
            for (int64_t s = 0; s < count; ++s)
                scatter_strip(size, Strip(size, plan, first + s), space.sums + s * LANES, sample, space.input);
        }
    }
};

// Taps (TAPS, LANES) of the weights' gradient, channels from o on, that came out not finite, once more by the definition.
static void repair_taps(const Sizes& size, const float* x, const float* grad, int64_t o, float* taps, float* slopes) {
    Lanes finite[TAPS];
    bool whole = true;
    for (int64_t tap = 0; tap < TAPS; ++tap) whole &= all(finite[tap] = is_finite(load(taps + tap * LANES)));
    if (whole) return;
    for (int64_t tap = 0; tap < TAPS; ++tap) store(taps + tap * LANES, finite[tap] ? load(taps + tap * LANES) : Register{});
    std::fill_n(slopes, size.plane() * LANES, 0.0f);
    for (int64_t b = 0; b < size.batch; ++b) {
        copy_transposed(grad + (b * size.out_channels + o) * size.plane(), size.plane(), size.channels_from(o), size.plane(),
                        slopes, LANES);
        for (int64_t tap = 0; tap < TAPS; ++tap) {
            if (all(finite[tap])) continue;
            const Register sum = weigh_directly(size, x + b * IN_CHANNELS * size.height * size.width, slopes, tap);
            store(taps + tap * LANES, load(taps + tap * LANES) + (finite[tap] ? Register{} : sum));
        }
    }
}

// Elements of the gradient of a sample of the input that came out not finite, once more by the definition.
static void repair_sample(const Sizes& size, const float* weight, const float* slopes, float* sample) {
    float* element = sample;
    for (int64_t c = 0; c < IN_CHANNELS; ++c)
        for (int64_t h = 0; h < size.height; ++h)
            for (int64_t w = 0; w < size.width; ++w, ++element)
                if (!(*element * 0.0f == 0.0f)) *element = slope_directly(size, weight, slopes, c, h, w);
}

// sum (TAPS, LANES) = the parts, `pitch` floats apart, in their order.
static void add_parts(const float* parts, int64_t pitch, int64_t count, float* sum) {
    std::fill_n(sum, TAPS * LANES, 0.0f);
    for (int64_t part = 0; part < count; ++part, parts += pitch)
        for (int64_t i = 0; i < TAPS * LANES; i += LANES) store(sum + i, load(sum + i) + load(parts + i));
}

}  // namespace
"""

BINDING = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
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

typedef Winograd<2> F2;  // larger tiles are faster, but their error does not pass: see the docstring

static void check(const char* name, const at::Tensor& tensor, int64_t dim) {
    TORCH_CHECK(tensor.defined(), message("conv2d: expected ", name, " to be a tensor, got None"));
    TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.dim() == dim,
                message("conv2d: expected ", name, " to be a ", dim, "-d float32 CPU tensor, got a ", tensor.dim(), "-d ",
                        tensor.scalar_type(), " tensor on ", tensor.device()));
}

// The sizes of a convolution; what does not fit the constants of this build raises.
static Sizes sizes_of(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding) {
    check("x", x, 4);
    check("weight", weight, 4);
    TORCH_CHECK(x.size(1) == weight.size(1),
                message("conv2d: the weight takes ", weight.size(1), " channels, x has ", x.size(1)));
    const int64_t built_kernel[] = {IN_CHANNELS, KERNEL_H, KERNEL_W}, built_stride[] = {STRIDE_H, STRIDE_W};
    TORCH_CHECK(weight.sizes().slice(1) == built_kernel && stride == built_stride && padding.size() == 2 && padding[0] >= 0 &&
                    padding[1] >= 0,
                message("conv2d: expected a weight of (outputs, ", IN_CHANNELS, ", ", KERNEL_H, ", ", KERNEL_W,
                        "), a stride of ", at::IntArrayRef(built_stride), " and two paddings, none negative, got ",
                        weight.sizes(), ", ", stride, " and ", padding));
    Sizes size{};
    size.batch = x.size(0), size.height = x.size(2), size.width = x.size(3), size.out_channels = weight.size(0);
    size.pad_h = padding[0], size.pad_w = padding[1];
    const int64_t room_h = size.height + 2 * size.pad_h - KERNEL_H, room_w = size.width + 2 * size.pad_w - KERNEL_W;
    TORCH_CHECK(room_h >= 0 && room_w >= 0,
                message("conv2d: a kernel of ", KERNEL_H, " x ", KERNEL_W, " does not fit into an image of ", size.height,
                        " x ", size.width, " padded by ", padding));
    size.out_h = room_h / STRIDE_H + 1, size.out_w = room_w / STRIDE_W + 1;
    return size;
}

static void check_gradient(const at::Tensor& grad, const Sizes& size) {
    check("the gradient", grad, 4);
    const int64_t expected[] = {size.batch, size.out_channels, size.out_h, size.out_w};
    TORCH_CHECK(grad.sizes() == expected,
                message("conv2d: expected a gradient of ", at::IntArrayRef(expected), ", got ", grad.sizes()));
}

// A workspace.
static at::Tensor floats(int64_t count) { return at::empty({count}, at::kFloat); }
static Space space_in(const at::Tensor& workspace) { return {workspace.mutable_data_ptr<float>()}; }

namespace {

// The taps of a contiguous weight, and their transforms.
struct Weights {
    at::Tensor taps, points;

    Weights(const Sizes& size, const at::Tensor& weight)
        : taps(floats(size.vectors() * TAPS * LANES)), points(floats(size.groups() * F2::TERMS.total * CHANNELS)) {
        float *taps_data = taps.mutable_data_ptr<float>(), *points_data = points.mutable_data_ptr<float>();
        pack_taps(size, weight.const_data_ptr<float>(), taps_data);
        at::parallel_for(0, size.vectors(), 1, [&](int64_t first, int64_t last) {
            for (int64_t vector = first; vector < last; ++vector) F2::transform_taps(taps_data, vector, points_data);
        });
    }
};

}  // namespace

static at::Tensor conv2d(const at::Tensor& x_in, const at::Tensor& weight, const std::optional<at::Tensor>& bias_in,
                  at::IntArrayRef stride, at::IntArrayRef padding) {
    const Sizes size = sizes_of(x_in, weight, stride, padding);
    if (bias_in) check("bias", *bias_in, 1);
    TORCH_CHECK(!bias_in || bias_in->size(0) == size.out_channels,
                message("conv2d: expected ", size.out_channels, " biases, got ", bias_in->size(0)));
    at::Tensor out = at::empty({size.batch, size.out_channels, size.out_h, size.out_w}, x_in.options());
    if (out.numel() == 0) return out;
    const at::Tensor x = x_in.contiguous();
    const Weights weights(size, weight.contiguous());
    const at::Tensor bias = floats(size.vectors() * LANES).zero_();
    if (bias_in) bias.slice(0, 0, size.out_channels).copy_(*bias_in);
    const ForwardArguments arguments{x.const_data_ptr<float>(), weights.taps.const_data_ptr<float>(),
                                     weights.points.const_data_ptr<float>(), bias.const_data_ptr<float>(),
                                     out.mutable_data_ptr<float>()};
    const F2::Plan plan(size);
    at::parallel_for(0, plan.blocks, 1, [&](int64_t first, int64_t last) {
        const at::Tensor workspace = floats(F2::ForwardSpace::floats(plan));
        const F2::ForwardSpace space(plan, space_in(workspace));
        for (int64_t block = first; block < last; ++block) F2::forward_block(size, plan, arguments, block, space);
    });
    return out;
}

// The sum of a plane of grad, in an order of its own.
static float sum_of(const float* values, int64_t count) {
    Register sums{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += load(values + i);
    float sum = 0;
    for (; i < count; ++i) sum += values[i];
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    return sum;
}

static at::Tensor bias_gradient(const Sizes& size, const at::Tensor& grad) {
    at::Tensor gradient = at::empty({size.out_channels}, grad.options());
    const float* from = grad.const_data_ptr<float>();
    float* to = gradient.mutable_data_ptr<float>();
    at::parallel_for(0, size.out_channels, 1, [&](int64_t first, int64_t last) {
        for (int64_t o = first; o < last; ++o) {
            double sum = 0;
            for (int64_t b = 0; b < size.batch; ++b)
                sum += sum_of(from + (b * size.out_channels + o) * size.plane(), size.plane());
            to[o] = float(sum);
        }
    });
    return gradient;
}

// Chunks of blocks, each with sums of its own: how many there are depends on the sizes alone, and so do the results' bits.
constexpr int64_t MIN_CHUNK_BLOCKS = 4, MAX_CHUNKS = 64;

static at::Tensor weight_gradient(const Sizes& size, const at::Tensor& grad, const at::Tensor& x, at::IntArrayRef shape) {
    at::Tensor gradient = at::empty(shape, x.options());
    const F2::Plan plan(size);
    const int64_t chunk_blocks = std::max(MIN_CHUNK_BLOCKS, (plan.blocks + MAX_CHUNKS - 1) / MAX_CHUNKS);
    const int64_t chunks = (plan.blocks + chunk_blocks - 1) / chunk_blocks, part = size.vectors() * TAPS * LANES;
    const at::Tensor parts = floats(chunks * part);
    const float *x_data = x.const_data_ptr<float>(), *grad_data = grad.const_data_ptr<float>();
    float *part_data = parts.mutable_data_ptr<float>(), *to = gradient.mutable_data_ptr<float>();
    at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
        const at::Tensor workspace = floats(F2::WeightSpace::floats(size, plan));
        const F2::WeightSpace space(size, plan, space_in(workspace));
        for (int64_t chunk = first; chunk < last; ++chunk)
            F2::weight_chunk(size, plan, x_data, grad_data, chunk * chunk_blocks,
                                std::min(plan.blocks, (chunk + 1) * chunk_blocks), space, part_data + chunk * part);
    });
    at::parallel_for(0, size.vectors(), 1, [&](int64_t first, int64_t last) {
        const at::Tensor sums = floats(TAPS * LANES), slopes = floats(size.plane() * LANES);
        float* sum = sums.mutable_data_ptr<float>();
        for (int64_t vector = first; vector < last; ++vector) {
            const int64_t o = vector * LANES, channels = size.channels_from(o);
            if (channels == 0) return;
            add_parts(part_data + vector * TAPS * LANES, part, chunks, sum);
            repair_taps(size, x_data, grad_data, o, sum, slopes.mutable_data_ptr<float>());
            copy_transposed(sum, LANES, TAPS, channels, to + o * TAPS, TAPS);
        }
    });
    return gradient;
}

// The gradients of weight and bias, of those that are wanted; the other is an empty tensor.
static std::tuple<at::Tensor, at::Tensor> parameter_grads(const at::Tensor& grad_in, const at::Tensor& x,
                                                          const at::Tensor& weight, at::IntArrayRef stride,
                                                          at::IntArrayRef padding, std::array<bool, 2> wanted) {
    const Sizes size = sizes_of(x, weight, stride, padding);
    check_gradient(grad_in, size);
    const at::Tensor grad = grad_in.contiguous();
    return {wanted[0] ? weight_gradient(size, grad, x.contiguous(), weight.sizes()) : at::empty({0}, x.options()),
            wanted[1] ? bias_gradient(size, grad) : at::empty({0}, x.options())};
}

static at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight_in,
                             at::IntArrayRef stride, at::IntArrayRef padding) {
    const Sizes size = sizes_of(x, weight_in, stride, padding);
    check_gradient(grad_in, size);
    at::Tensor gradient = at::empty(x.sizes(), x.options());
    const at::Tensor grad = grad_in.contiguous(), weight = weight_in.contiguous();
    const Weights weights(size, weight);
    const float *grad_data = grad.const_data_ptr<float>(), *weight_data = weight.const_data_ptr<float>(),
                *points = weights.points.const_data_ptr<float>();
    float* to = gradient.mutable_data_ptr<float>();
    const F2::Plan plan(size);
    at::parallel_for(0, size.batch, 1, [&](int64_t first, int64_t last) {
        const at::Tensor workspace = floats(F2::InputGradSpace::floats(size));
        const F2::InputGradSpace space(size, space_in(workspace));
        for (int64_t b = first; b < last; ++b) {
            float* sample = to + b * IN_CHANNELS * size.height * size.width;
            F2::input_grad_sample(size, plan, grad_data, points, b, sample, space);
            repair_sample(size, weight_data, grad_data + b * size.out_channels * size.plane(), sample);
        }
    });
    return gradient;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("conv2d(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor",
          {at::Tag::pt2_compliant_tag});
    m.def("parameter_grads(Tensor grad, Tensor x, Tensor weight, int[2] stride, int[2] padding, bool[2] wanted) -> "
          "(Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
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
    def parameter_grads(grad, x, weight, stride, padding, wanted):
        return x.new_empty(weight.shape if wanted[0] else 0), x.new_empty(weight.shape[0] if wanted[1] else 0)

    @torch.library.register_fake(f"{namespace}::input_grad")
    def input_grad(grad, x, weight, stride, padding):
        return x.new_empty(x.shape)

    def save(ctx, inputs, output):
        x, weight, _, ctx.stride, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, *wanted = ctx.needs_input_grad[:3]
        geometry = x, weight, ctx.stride, ctx.padding
        grad_x = operators.input_grad(grad, *geometry) if needs_x else None
        grad_weight, grad_bias = operators.parameter_grads(grad, *geometry, wanted) if any(wanted) else (None, None)
        return grad_x, grad_weight if wanted[0] else None, grad_bias if wanted[1] else None, None, None

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
    # Bound here, so that another variant in the same notebook cannot replace them.
    sources = NAME, CPP + BINDING, None, register
    # -fopenmp lets at::parallel_for use the threads of PyTorch's own OpenMP runtime; no other one is linked.
    cflags = ("-march=native", "-fopenmp")

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        (kernel_h, kernel_w), (stride_h, stride_w) = self.conv1.kernel_size, self.conv1.stride
        constants = {"IN_CHANNELS": self.conv1.in_channels, "KERNEL_H": kernel_h, "KERNEL_W": kernel_w}
        return build(*self.sources, cflags=self.cflags, **constants, STRIDE_H=stride_h, STRIDE_W=stride_w)

    def forward(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        operators = getattr(torch.ops, self.namespace())
        return operators.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def main():
    import time

    torch.manual_seed(0)
    model = ModelNew()
    x = torch.randn(16, 3, 224, 224)
    plain = model.conv1

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
            times = torch.tensor([(milliseconds(model), milliseconds(plain)) for _ in range(20)])  # they take turns
            ours, theirs = times.median(dim=0).values.tolist()
            print(f"{ours:.2f} ms, PyTorch {theirs:.2f} ms (medians of 20)")


if __name__ == "__main__":
    main()
