"""alexnet_conv1, cpu: stride 4 taken apart into stride 1, where Winograd's algorithm saves half of the multiplications.

Like the original, but the 11 x 11 kernel at stride 4 becomes 16 kernels of 3 x 3 and less at stride 1 (a polyphase
decomposition), and 2 x 2 outputs are computed from transformed inputs and weights: Winograd's F(2, 3).

Why it is faster
    PyTorch (oneDNN) runs the direct convolution near the cores' peak. What is left is to multiply less: an output takes 169
    multiplications instead of 363. The transforms, which only add, take a fifth of the time: an input tile serves 96 channels.
    Products run in tiles of 14 positions x 2 registers: 16 loads feed 28 fused multiply-adds (AVX-512). Compute bound.

Mathematics
    Along one direction, with u = 4a + r:  out[i] = sum over r < 4 of sum over a of w[4a + r] * x[4(i + a) + r]
    Each phase r is a convolution of every fourth input at stride 1, with 3 taps (r < 3) or 2 (r = 3): a "piece". F(2, n) is
    y = A^T [(G w) * (B^T d)], * elementwise, by the points 0, 1, -1 and infinity; 2 taps need no -1. All pieces share A^T, so
    their products are summed before it: 15 products for 2 outputs instead of 22, in two directions 225 for 4 instead of 484.
    An output beside a far larger input loses digits. What comes out not finite is computed again by the definition.

Loops
    blocks of 56 tiles (parallel): transform_input; groups of 32 channels, 16 points, strips of 14 tiles: multiply; finish_strip

Floor
    A sample: 0.60 MB in, 1.16 MB out, 102 MFLOP after the rewrite: 0.66 ms on a core of 153.5 GFLOP/s (directly 1.37).

Takes
    float32 CPU tensors (batch, in_channels, height, width); any channels, kernel, stride, zero padding, bias or none. The
    gradient is PyTorch's. Bits do not depend on the number of threads. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "alexnet_conv1_cpu_polyphase_winograd"
DEVICE = "cpu"
EXAMPLE = (), (16, 3, 224, 224), (), 1e-3  # of ModelNew, x, none under the emulator, limit

CPP = r"""
// Needs IN_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <new>
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
bool all(Lanes lanes) {
    bool every = true;
    for (int i = 0; i < LANES; ++i) every = every && lanes[i];
    return every;
}

constexpr int64_t ceil_div(int64_t n, int64_t parts) { return (n + parts - 1) / parts; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }

constexpr int TILE = 2, POINTS = TILE + 2;  // TILE x TILE outputs at once; larger tiles are faster, but err too much

// x (batch, IN_CHANNELS, height, width), out (batch, out_channels, out_h, out_w). Tiles of one row, up to MAX_TILES of them
// beside each other, are a strip; strips are numbered over the whole batch.
struct Sizes {
    int64_t batch, height, width, out_channels, pad_h, pad_w, out_h, out_w;
    int64_t tile_rows = ceil_div(out_h, TILE), tile_columns = ceil_div(out_w, TILE);
    int64_t strips_a_row = ceil_div(tile_columns, MAX_TILES), strip_tiles = ceil_div(tile_columns, strips_a_row);
    int64_t strips = batch * tile_rows * strips_a_row, strips_a_block = BLOCK_TILES / strip_tiles;

    int64_t plane() const { return out_h * out_w; }
    int64_t groups() const { return ceil_div(out_channels, CHANNELS); }
    int64_t vectors() const { return groups() * VECTORS; }
    int64_t channels_from(int64_t o) const { return std::max<int64_t>(0, std::min<int64_t>(LANES, out_channels - o)); }
};

// Memory that begins at a cache line.
class Floats {
    static constexpr std::align_val_t LINE{64};
    float* const floats_;

public:
    explicit Floats(int64_t count, bool zero = false) : floats_((float*)operator new(count * sizeof(float), LINE)) {
        if (zero) std::fill_n(floats_, count, 0.0f);
    }
    ~Floats() { operator delete(floats_, LINE); }
    Floats(const Floats&) = delete;
    operator float*() const { return floats_; }
};

// ---- Shuffles
// Two rows of a square, DISTANCE apart, exchange blocks of DISTANCE lanes: where a lane of the first, or second, is from.
template <int DISTANCE, bool SECOND>
constexpr int source(int lane) {
    if (lane & DISTANCE) return LANES + lane - (SECOND ? 0 : DISTANCE);
    return lane + (SECOND ? DISTANCE : 0);
}
template <int DISTANCE, bool SECOND, int... LANE>
INLINE Register exchange(Register a, Register b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, source<DISTANCE, SECOND>(LANE)...);
#else
    return __builtin_shuffle(a, b, Lanes{source<DISTANCE, SECOND>(LANE)...});
#endif
}
constexpr std::make_integer_sequence<int, LANES> EVERY_LANE{};
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
NOINLINE void transpose_square(const float* in, int64_t in_pitch, float* out, int64_t out_pitch) {
    Register square[LANES];
    UNROLL for (int i = 0; i < LANES; ++i) square[i] = load(in + i * in_pitch);
    transpose<LANES / 2>(square);
    UNROLL for (int i = 0; i < LANES; ++i) store(out + i * out_pitch, square[i]);
}

// in (rows, columns) -> out (columns, rows). The last squares overlap their neighbours.
void copy_transposed(const float* in, int64_t in_pitch, int64_t rows, int64_t columns, float* out, int64_t out_pitch) {
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
void pack_taps(const Sizes& size, const float* weight, float* packed) {
    std::fill_n(packed, size.vectors() * TAPS * LANES, 0.0f);
    for (int64_t o = 0; o < size.out_channels; o += LANES)
        copy_transposed(weight + o * TAPS, TAPS, size.channels_from(o), TAPS, packed + o * TAPS, LANES);
}

// The outputs at (i, j) of a sample for the LANES channels of `taps` (TAPS, LANES), in the order of the definition.
Register convolve_directly(const Sizes& size, const float* sample, const float* taps, int64_t i, int64_t j) {
    Register sum{};
    for (int c = 0; c < IN_CHANNELS; ++c, sample += size.height * size.width)
        for (int u = 0; u < KERNEL_H; ++u)
            for (int v = 0; v < KERNEL_W; ++v, taps += LANES) {
                const int64_t h = i * STRIDE_H - size.pad_h + u, w = j * STRIDE_W - size.pad_w + v;
                const bool inside = h >= 0 && h < size.height && w >= 0 && w < size.width;
                sum += (inside ? sample[h * size.width + w] : 0.0f) * load(taps);
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
void with_constant(int taps, F function) {
    if (taps == 3) return function(std::integral_constant<int, 3>{});
    if (taps == 2) return function(std::integral_constant<int, 2>{});
    function(std::integral_constant<int, 1>{});
}

// ---- Winograd's minimal filtering by the points 0, 1, -1 and infinity
// F(TILE, N) for a piece of N taps: the matrices of input (B^T) and taps (G), one row for each of its N + 1 points, the first N
// and infinity; and that of outputs (A^T), the same for all pieces.
template <int N>
constexpr float INPUT_MATRIX[N + 1][N + 1] = {};
template <>
constexpr float INPUT_MATRIX<1>[2][2] = {{1, 0}, {0, 1}};
template <>
constexpr float INPUT_MATRIX<2>[3][3] = {{-1, 1, 0}, {0, 1, 0}, {0, -1, 1}};
template <>
constexpr float INPUT_MATRIX<3>[4][4] = {{-1, 0, 1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, -1, 0, 1}};
template <int N>
constexpr double TAP_MATRIX[N + 1][N] = {};
template <>
constexpr double TAP_MATRIX<1>[2][1] = {{1}, {1}};
template <>
constexpr double TAP_MATRIX<2>[3][2] = {{-1, 0}, {1, 1}, {0, 1}};
template <>
constexpr double TAP_MATRIX<3>[4][3] = {{-1, 0, 0}, {0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {0, 0, 1}};
constexpr float OUTPUT_MATRIX[TILE][POINTS] = {{1, 1, 1, 0}, {0, 1, -1, 1}};
// The index among all POINTS of the i-th of a piece of that many taps.
constexpr int point_of(int i, int taps) { return i < taps ? i : POINTS - 1; }

// out = matrix * in; the compiler unrolls it and leaves out the zeros of a constant matrix.
template <int OUT, int IN>
INLINE void apply(const float (&matrix)[OUT][IN], const Register (&in)[IN], Register (&out)[OUT]) {
    UNROLL for (int i = 0; i < OUT; ++i) {
        Register sum{};
        bool first = true;
        UNROLL for (int j = IN - 1; j >= 0; --j) {
            if (matrix[i][j] == 0) continue;
            sum = first ? in[j] * matrix[i][j] : sum + in[j] * matrix[i][j];
            first = false;
        }
        out[i] = sum;
    }
}

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
        while (n < pieces.count && (point == POINTS - 1 || point < pieces.list[n].taps)) ++n;
        return n;
    }
    constexpr int index(int i, int l, int c, int h, int w) const {
        return before[i][l] + (c * rows[i] + h) * columns[l] + w;
    }
};
constexpr Terms TERMS{};

struct Strip {
    int64_t sample, row, column, tiles;  // its first output is at (row, column)
    int64_t rows, columns;               // of outputs, without those beyond the image

    Strip(const Sizes& size, int64_t index) {
        const int64_t first = index % size.strips_a_row * size.strip_tiles;
        tiles = std::min(size.strip_tiles, size.tile_columns - first);
        row = index / size.strips_a_row % size.tile_rows * TILE, column = first * TILE;
        sample = index / size.strips_a_row / size.tile_rows;
        rows = std::min<int64_t>(TILE, size.out_h - row);
        columns = std::min(tiles * TILE, size.out_w - column);
    }
};

// ---- Weights
// The transform of a pair of pieces: taps (KERNEL_H, KERNEL_W, LANES) -> points (terms, CHANNELS).
template <int H, int W>
NOINLINE void transform_pieces(const float* taps, int c, int h, int w, float* points) {
    const float* first = taps + (ROWS.list[h].offset * KERNEL_W + COLUMNS.list[w].offset) * LANES;
    for (int i = 0; i <= H; ++i) {
        Double half[W];
        for (int b = 0; b < W; ++b) {
            half[b] = Double{};
            for (int a = 0; a < H; ++a)
                half[b] += TAP_MATRIX<H>[i][a] *
                           __builtin_convertvector(load(first + (a * STRIDE_H * KERNEL_W + b * STRIDE_W) * LANES), Double);
        }
        for (int l = 0; l <= W; ++l) {
            Double sum{};
            for (int b = 0; b < W; ++b) sum += TAP_MATRIX<W>[l][b] * half[b];
            store(points + TERMS.index(point_of(i, H), point_of(l, W), c, h, w) * CHANNELS,
                  __builtin_convertvector(sum, Register));
        }
    }
}

// taps (vectors, TAPS, LANES) -> points (groups, terms, CHANNELS), of one register of channels.
void transform_taps(const float* taps, int64_t vector, float* points) {
    taps += vector * TAPS * LANES, points += (vector / VECTORS * TERMS.total * VECTORS + vector % VECTORS) * LANES;
    for (int c = 0; c < IN_CHANNELS; ++c, taps += KERNEL_H * KERNEL_W * LANES)
        for (int h = 0; h < ROWS.count; ++h)
            for (int w = 0; w < COLUMNS.count; ++w)
                with_constant(ROWS.list[h].taps, [&](auto H) {
                    with_constant(COLUMNS.list[w].taps, [&](auto W) { transform_pieces<H, W>(taps, c, h, w, points); });
                });
}

// ---- Input
// A strip's input is worked on in rows of WIDTH columns, then in PERIOD_W lines of every PERIOD_W-th column: lane t of a
// line belongs to tile t. Rows and lines are as long as the longest strip's.
constexpr int reach() {
    int end = 0;
    for (const Piece& piece : COLUMNS.list) end = std::max(end, piece.offset + (TILE + piece.taps - 2) * STRIDE_W);
    return end;
}
constexpr int PERIOD_W = TILE * STRIDE_W;  // columns from a tile's input to the next one's
constexpr int SHIFT = reach() / PERIOD_W;  // tiles to the right that a tile's input reaches into
constexpr int LINE_TILES = int(round_up(MAX_TILES + SHIFT, LANES)), LINE = LINE_TILES + LANES;
constexpr int LINES = std::max(PERIOD_W, LANES);  // the last ones are none of a period's, but make a square
constexpr int WIDTH = LINE_TILES * PERIOD_W, ROW = WIDTH + LANES;

struct InputSpace {
    Floats rows{POINTS * ROW, true}, zeros{ROW, true}, lines{POINTS * LINES * LINE, true};  // lines (POINTS, LINES, LINE)
};

// Where a strip's rows lie in the image: they begin at column `start`, and [left, right) of them are inside.
struct Window {
    int64_t start, left, right;

    Window(const Sizes& size, const Strip& strip) {
        start = strip.column * STRIDE_W - size.pad_w;
        left = std::min<int64_t>(std::max<int64_t>(0, -start), WIDTH);
        right = std::max(left, std::min<int64_t>(WIDTH, size.width - start));
    }
};

// sums (N + 1, ROW) = the transform along the height of N + 1 rows of the image.
template <int N>
NOINLINE void transform_rows(const float* const* rows, const Window& window, float* sums) {
    Register in[N + 1], out[N + 1];
    int64_t w = window.left;
    for (; w + LANES <= window.right; w += LANES) {
        UNROLL for (int j = 0; j <= N; ++j) in[j] = load(rows[j] + w);
        apply(INPUT_MATRIX<N>, in, out);
        UNROLL for (int i = 0; i <= N; ++i) store(sums + i * ROW + w, out[i]);
    }
    for (; w < window.right; ++w)
        for (int i = 0; i <= N; ++i) {
            float sum = 0;
            for (int j = N; j >= 0; --j)
                if (INPUT_MATRIX<N>[i][j] != 0) sum += INPUT_MATRIX<N>[i][j] * rows[j][w];
            sums[i * ROW + w] = sum;
        }
}

// One register of tiles: the transform along the width for pieces W and following; values[l] is where point l is for piece 0.
template <int W>
NOINLINE void transform_columns(const float* lines, float* const* values) {
    constexpr Piece piece = COLUMNS.list[W];
    Register in[piece.taps + 1], out[piece.taps + 1];
    UNROLL for (int j = 0; j <= piece.taps; ++j) {
        const int column = piece.offset + j * STRIDE_W;
        in[j] = load(lines + column % PERIOD_W * LINE + column / PERIOD_W);
    }
    apply(INPUT_MATRIX<piece.taps>, in, out);
    UNROLL for (int l = 0; l <= piece.taps; ++l) store(values[point_of(l, piece.taps)] + W * LANES, out[l]);
    if constexpr (W + 1 < COLUMNS.count) transform_columns<W + 1>(lines, values);
}

// values (terms, LANES) = the transformed input of a strip, a lane for each tile. What later lanes hold is of no use.
void transform_input(const Sizes& size, const float* x, const Strip& strip, float* values, const InputSpace& space) {
    const Window window(size, strip);
    for (int i = 0; i < POINTS; ++i) {
        std::fill_n(space.rows + i * ROW, window.left, 0.0f);
        std::fill_n(space.rows + i * ROW + window.right, WIDTH - window.right, 0.0f);
    }
    const float* plane = x + strip.sample * IN_CHANNELS * size.height * size.width;
    for (int c = 0; c < IN_CHANNELS; ++c, plane += size.height * size.width)
        for (int h = 0; h < ROWS.count; ++h) {
            const int count = ROWS.list[h].taps + 1;
            const float* rows[POINTS];
            for (int j = 0; j < count; ++j) {
                const int64_t row = (strip.row + j) * STRIDE_H + ROWS.list[h].offset - size.pad_h;
                rows[j] = row < 0 || row >= size.height ? space.zeros : plane + row * size.width + window.start;
            }
            with_constant(ROWS.list[h].taps, [&](auto N) { transform_rows<N>(rows, window, space.rows); });
            for (int i = 0; i < count; ++i)
                copy_transposed(space.rows + i * ROW, PERIOD_W, LINE_TILES, LINES, space.lines + i * LINES * LINE, LINE);
            for (int i = 0; i < count; ++i) {
                float* first[POINTS];
                for (int l = 0; l < POINTS; ++l)
                    first[l] = values + TERMS.index(point_of(i, count - 1), l, c, h, 0) * LANES;
                transform_columns<0>(space.lines + i * LINES * LINE, first);
            }
        }
}

// ---- Forward
struct ForwardArguments {
    const float *x, *taps, *points, *bias;  // packed: taps (vectors, TAPS, LANES), points (groups, terms, CHANNELS)
    float* out;
};

// product (N tiles, CHANNELS) = the sums over the terms of values (terms, LANES of tiles) times points (terms, CHANNELS).
template <int N>
NOINLINE void multiply(const float* values, const float* points, int64_t terms, float* product) {
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
Multiply multiply_for(int64_t tiles) {
    if (tiles > MAX_TILES * 3 / 4) return multiply<MAX_TILES>;
    if (tiles > MAX_TILES / 2) return multiply<MAX_TILES * 3 / 4>;
    if (tiles > MAX_TILES / 4) return multiply<MAX_TILES / 2>;
    return multiply<std::max(1, MAX_TILES / 4)>;
}

// One register of channels of a tile: product (POINTS, POINTS, MAX_TILES, CHANNELS) at its index -> outputs (TILE, TILE),
// LANES floats each, rows `pitch` floats apart. Returns 0, or NaN in the lanes of which something is not finite.
INLINE Register transform_output(const float* product, Register bias, float* outputs, int64_t pitch) {
    Register half[POINTS][TILE];
    UNROLL for (int l = 0; l < POINTS; ++l) {
        Register in[POINTS];
        UNROLL for (int i = 0; i < POINTS; ++i) in[i] = load(product + (i * POINTS + l) * MAX_TILES * CHANNELS);
        apply(OUTPUT_MATRIX, in, half[l]);
    }
    Register check{};
    UNROLL for (int r = 0; r < TILE; ++r) {
        Register in[POINTS], out[TILE];
        UNROLL for (int l = 0; l < POINTS; ++l) in[l] = half[l][r];
        apply(OUTPUT_MATRIX, in, out);
        UNROLL for (int s = 0; s < TILE; ++s) {
            store(outputs + r * pitch + s * LANES, out[s] + bias);
            check += (out[s] + bias) * 0.0f;
        }
    }
    return check;
}

struct ForwardSpace {
    Floats values, products, outputs{TILE * TILE * MAX_TILES * LANES};
    InputSpace input;
    explicit ForwardSpace(const Sizes& size)
        : values(size.strips_a_block * TERMS.total * LANES),
          products(size.strips_a_block * POINTS * POINTS * MAX_TILES * CHANNELS) {}
};

// Outputs (rows, columns of the strip) that came out not finite, once more, as the definition says.
NOINLINE void repair_outputs(const Sizes& size, const ForwardArguments& arguments, const Strip& strip, int64_t o,
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
void finish_strip(const Sizes& size, const ForwardArguments& arguments, const Strip& strip, int64_t o, const float* product,
                  float* outputs) {
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

void forward_block(const Sizes& size, const ForwardArguments& arguments, int64_t block, const ForwardSpace& space) {
    const int64_t first = block * size.strips_a_block, count = std::min(size.strips_a_block, size.strips - first);
    for (int64_t s = 0; s < count; ++s)
        transform_input(size, arguments.x, Strip(size, first + s), space.values + s * TERMS.total * LANES, space.input);
    const Multiply multiply_strip = multiply_for(size.strip_tiles);
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
            finish_strip(size, arguments, Strip(size, first + s), group * CHANNELS,
                         space.products + s * POINTS * POINTS * PRODUCT, space.outputs);
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

constexpr int NO_MEMORY = 12;

}  // namespace

// bias may be null
extern "C" int run_forward(const float* x, const float* weight, const float* bias, float* out, int64_t batch, int64_t height,
                           int64_t width, int64_t out_channels, int64_t pad_h, int64_t pad_w, int64_t out_h, int64_t out_w,
                           int64_t threads) try {
    const Sizes size{batch, height, width, out_channels, pad_h, pad_w, out_h, out_w};
    const Floats taps(size.vectors() * TAPS * LANES), points(size.groups() * TERMS.total * CHANNELS);
    const Floats biases(size.vectors() * LANES, true);
    pack_taps(size, weight, taps);
    if (bias) std::copy_n(bias, out_channels, static_cast<float*>(biases));
    parallel_for(size.vectors(), threads, [&](int64_t begin, int64_t end) {
        for (int64_t vector = begin; vector < end; ++vector) transform_taps(taps, vector, points);
    });
    const bool done = parallel_for(ceil_div(size.strips, size.strips_a_block), threads, [&](int64_t begin, int64_t end) {
        const ForwardSpace space(size);
        for (int64_t block = begin; block < end; ++block) forward_block(size, {x, taps, points, biases, out}, block, space);
    });
    return done ? 0 : NO_MEMORY;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
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
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor"


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv2d(x, weight, bias, stride, padding, kernels=kernels):
    """Return the convolution's output. Raises RuntimeError for what the kernel does not take."""
    (batch, *_, height, width), (out_channels, in_channels, kernel_h, kernel_w) = x.shape, weight.shape
    (stride_h, stride_w), (pad_h, pad_w) = stride, padding
    check("x", x, (batch, in_channels, height, width), x.device)
    check("weight", weight, weight.shape, x.device)
    if bias is not None:
        check("bias", bias, (out_channels,), x.device)
    room_h, room_w = height + 2 * pad_h - kernel_h, width + 2 * pad_w - kernel_w
    if min(*stride, kernel_h, kernel_w) < 1 or min(*padding, room_h, room_w) < 0:
        fits = f"a kernel of {[kernel_h, kernel_w]}, strides {[*stride]} and padding {[*padding]}"
        raise RuntimeError(f"expected {fits} to fit; got an image of {height} x {width}")
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(batch, out_channels, room_h // stride_h + 1, room_w // stride_w + 1)
    if out.numel():
        sizes = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, "STRIDE_H": stride_h, "STRIDE_W": stride_w}
        numbers = batch, height, width, out_channels, *padding, *out.shape[2:], torch.get_num_threads()
        launch(kernels(IN_CHANNELS=in_channels, **sizes).run_forward, x, weight, bias, out, *numbers)
    return out


@conv2d.register_fake
def original(x, weight, bias=None, stride=1, padding=0):
    return nn.functional.conv2d(x, weight, bias, stride, padding)


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the output again."""
    tensors = [each for each in ctx.saved_tensors if each is not None]  # a bias may be missing
    found = torch.func.vjp(lambda *tensors: original(*tensors, **ctx.numbers), *tensors)[1](grad)
    return *found, *[None] * (5 - len(found))


def setup_context(ctx, inputs, output):
    *tensors, stride, padding = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = {"stride": stride, "padding": padding}


conv2d.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    conv2d.register_autocast(DEVICE, torch.float32)


class ModelNew(nn.Module):
    @staticmethod
    def operator(*operands):
        return torch.ops.alexnet_conv1_cpu_polyphase_winograd.forward(*operands)

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    def forward(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"expected no dilation, one group and zero padding in numbers, got {conv}")
        return self.operator(x, conv.weight, conv.bias, conv.stride, conv.padding)


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
