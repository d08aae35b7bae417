"""alexnet_conv1, v4: implicit GEMM on the tensor cores, on scaled fp16 operands; producer warps load and convert beside it.

Like v3, rows of the image pass by the weights in shared memory, but a warp multiplies with mma.sync and the kernels are
warp-specialized. PyTorch's precision setting is obeyed: TF32's precision where it permits that, else fp32's (fp16x3).

Why it is faster
    v3 is bound by fp32 multiply-adds. An fp16 value has TF32's 11 bits, if not its range, and mma.sync multiplies it at twelve
    times that rate on an H200; a power of two for each tile of x restores the range. Four columns of two rows of x are 16 bytes
    of fp16, and neighbouring outputs, at stride 4, read neighbouring pieces: so a row of ldmatrix's matrix is a position's
    piece, another tap is another address, and im2col is written nowhere. In the forward pass four producer warps load, scale,
    convert and store ahead in a multistage pipeline, so that eight consumer warps issue little but ldmatrix and mma.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*4 - pad_w + v]
    grad_weight[o,c,u,v] = sum over b,i,j of grad[b,o,i,j] * x[b, c, i*stride_h - pad_h + u, j*4 - pad_w + v]
    Taps are taken in units of 2 rows and 4 columns, 11 x 11 as 12 x 12, where weights are zero. Each channel of a tile of x,
    each tile of grad and each output channel's weights are scaled by a power of two to below 2^15 (2^14). So x and grad are off
    by at most 2^-11 of themselves, as in TF32, or by 2^-36 of the tile's largest; sums are rescaled where the power changes.
    Strict (3xTF32's scheme): operands are two fp16 values each, which leaves 2^-22; the product is low * high + high * low +
    high * high. The tensor core cuts off what a sum does not hold, so strict sums begin again with each channel or tile.
    NaN and infinities count in no scale. A forward tile that reads one is computed in plain fp32: zero weights would spread it.
    In grad_weight they give NaN at the taps that meet them. An infinite weight gives NaN in strict sums.

Launches
    kernel           grid                        block  shared, KB  work of a block
    pack_weights     output channels             128    0           a channel: its scale, and fp16 weights
    convolve         SMs                         384    156 (205)   tiles of 256 positions x 96 (48) outputs
    ... at 163 KB    SMs                         384    156 (147)   the same
    ... at 99 KB     SMs                         384    90 (78)     tiles of 384 (256) positions x 48 (24) outputs
    weight_gradient  SMs                         384    46 (91)     tiles of 128 positions; 363 taps x 48 outputs
    add_splits       sums of a block / 128       256    4           adds the blocks' sums
    plain_*          outputs / 256, weights / 8  256    0           what the others do not take

Floor
    Forward: 154 MB in, 297 MB out, 0.106 ms on an H200. Padded to units, 66 GFLOP: 0.107 at the 622 TFLOP/s that mma.sync
    reaches in fp16. Shared memory, 1.2 wavefronts an mma: 0.085. The gradient has the same bytes and products.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size (below 2^30 rows and columns), bias or none. Compute capability 8.0 or later. The fast kernels (see
    make_plan) serve a stride of 4 across and an even one down, where weights for 24 output channels and a stage fit into
    shared memory. Others go through plain fp32 kernels, right but slow: v3_tiled serves them better. Dilation, groups and other
    padding modes raise, and so does anything else. Trains, and computes only the gradients that are asked for; the input's is
    PyTorch's own. Second derivatives raise. Deterministic; the gradients of another number of SMs add in another order.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v4_tensor_core"
SHARED_LIMIT_KB = None  # of a block, below what the device has: 163 is an A100, 99 a 3090, 4090 or 5090

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, SHARED_LIMIT_KB.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "alexnet_conv1 v4_tensor_core needs a GPU of compute capability 8.0 or later"
#endif
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
template <class T>
__host__ DEVICE constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
__host__ DEVICE constexpr T larger(T a, T b) { return a > b ? a : b; }

constexpr int TAPS = KERNEL_H * KERNEL_W, QUADS = ceil_div(KERNEL_W, 4);  // groups of 4 taps side by side
constexpr int64_t WEIGHTS = static_cast<int64_t>(OUT_CHANNELS) * IN_CHANNELS * TAPS;

// ---- layout
// A unit is 16 bytes of fp16 values: 4 columns of 2 rows of x, columns 0 and 1 of both rows first. Output positions side by
// side read units side by side, so a row of ldmatrix's 8 x 8 matrix is a position's unit, and another tap is another address.
// Row pairs are sorted by their remainder modulo PHASES into planes: within a plane the next output row reads the next row.
//
// convolve:        | weights [high, low][channel][unit][output] | a warp's outputs on their way out | scales, biases |
//                  | stage 0 [high, low][plane][row][unit] | stage 1 | .. | mbarriers, exponents, keys |
// weight_gradient: | keys, exponents, taps | [high, low]( x [channel][plane][row][unit] | grad [output][position] ) | units |
constexpr bool FITS_UNITS = STRIDE_W == 4 && STRIDE_H % 2 == 0;
constexpr int PHASES = larger(STRIDE_H / 2, 1), TAP_PAIRS = ceil_div(KERNEL_H, 2);
constexpr int PLANES = smaller(PHASES, TAP_PAIRS), TAP_ROWS = ceil_div(TAP_PAIRS, PHASES);
// A position reads UNITS of a channel, [row][column][plane]. A step is one instruction's inner size, two of them.
constexpr int UNITS = PLANES * TAP_ROWS * QUADS, STEPS = ceil_div(UNITS, 2), UNIT_BYTES = 16;
[[maybe_unused]] constexpr int UNROLLED_STEPS = STEPS <= 16 ? STEPS : 1;

// A block: consumer warps multiply and write, producer warps load, scale and convert. One block an SM has all its registers.
constexpr int WARP = 32, CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;

// ---- instructions
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void named_barrier(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
DEVICE void cp_async_16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE uint32_t ld_shared(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
DEVICE void st_shared(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
DEVICE void st_shared_v2_if(bool exists, uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0;\n@exists st.shared.v2.u32 [%0], {%1, %2};\n}"
                 ::"r"(address), "r"(a), "r"(b), "r"(static_cast<uint32_t>(exists)) : "memory");
}
// Four 8 x 8 matrices of fp16 values. Lane 8i + r gives the address of row r of matrix i, 16 bytes. With g = lane / 4 and
// t = lane % 4 a lane gets elements 2t and 2t + 1 of row g of each; transposed: of column g.
DEVICE void ldmatrix_x4(uint32_t (&v)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(row) : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t (&v)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(row) : "memory");
}
// d (16 x 8) += a (16 x 16) * b (16 x 8). a: rows g and g + 8 of columns 2t, 2t + 1, then of columns 2t + 8, 2t + 9;
// b: rows 2t, 2t + 1 of column g, then rows 2t + 8, 2t + 9; d: columns 2t, 2t + 1 of row g, then of row g + 8.
DEVICE void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a * b; STRICT: error-compensated, three products of high and low parts, small terms first.
template <bool STRICT>
DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&a_low)[4], const uint32_t* b,
                     const uint32_t* b_low) {
    if (STRICT) mma_m16n8k16_f16(d, a_low, b[0], b[1]), mma_m16n8k16_f16(d, a, b_low[0], b_low[1]);
    mma_m16n8k16_f16(d, a, b[0], b[1]);
}
DEVICE uint32_t fp16_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// What rounding to fp16 leaves of two values, as fp16; NaN of an infinity.
DEVICE uint32_t fp16_rest(float a, float b) {
    const float2 rounded = __half22float2(__floats2half2_rn(a, b));
    return fp16_pair(a - rounded.x, b - rounded.y);
}
DEVICE uint32_t warp_max(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }

// ---- powers of two
constexpr float LARGEST_POWER = 0x1p127f;
constexpr uint32_t INFINITE = 0x7f800000u;  // magnitudes are ordered as their bits are
constexpr int MOST_EXPONENT = 124;
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// v * 2^exponent, for exponents of -252 to 254.
DEVICE float scaled(float v, int exponent) { return v * power_of_2(exponent / 2) * power_of_2(exponent - exponent / 2); }
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(uint32_t largest, int target) {
    return smaller(target + 126 - static_cast<int>(largest >> 23), MOST_EXPONENT);  // largest < 2^((largest >> 23) - 126)
}
// For values of x and grad: multiples of 4, so that neighbouring planes mostly have the same.
DEVICE int plane_exponent(uint32_t largest) { return scale_exponent(largest, 15) & ~3; }

// ---- the work
struct Shape {
    int64_t batch;
    int height, width, out_h, out_w;
    bool paired;  // rows of x begin at multiples of 8 bytes, and so do pairs of columns that exist

    __host__ DEVICE int64_t plane() const { return static_cast<int64_t>(height) * width; }
    __host__ DEVICE int64_t out_plane() const { return static_cast<int64_t>(out_h) * out_w; }
};

// A line is output positions that lie side by side in memory: a channel's whole plane, or a row of it where the image is so
// wide that a stage would be too large. A tile is at most `positions` of a line. A stage holds `rows` rows of each plane,
// `pitch` units in each, of which `columns` begin at a position.
struct Plan {
    bool by_rows;
    int positions, columns, pitch, rows, stages, blocks;  // blocks: that share the tiles
    int line, lines, tiles_of_line, tiles;                // positions; lines of a sample; tiles of the whole batch

    __host__ DEVICE int row_pairs() const { return PLANES * rows; }
    __host__ DEVICE int x_bytes() const { return row_pairs() * pitch * UNIT_BYTES; }
};

struct Tile {
    int sample, first;      // of the tile's positions: in the plane of outputs
    int row, left, column;  // of the output: the stage's first; and the first position's column in the stage
    int count;

    DEVICE Tile(const Plan& plan, int number) {
        const int in_order = number / plan.tiles_of_line, begin = (number - in_order * plan.tiles_of_line) * plan.positions;
        sample = plan.by_rows ? in_order / plan.lines : in_order;
        row = plan.by_rows ? in_order - sample * plan.lines : begin / plan.columns;
        left = plan.by_rows ? begin : 0, column = plan.by_rows ? 0 : begin - row * plan.columns;
        first = plan.by_rows ? row * plan.line + begin : begin;
        count = smaller(plan.positions, plan.line - begin);
    }
    // The unit of plane 0 at which position i begins; where there is none, the last one's.
    DEVICE int unit(const Plan& plan, int i) const {
        const int from_row = column + smaller(i, count - 1), down = from_row / plan.columns;
        return down * plan.pitch + from_row - down * plan.columns;
    }
};

// From a position's first unit to another of those that it reads.
DEVICE int unit_offset(const Plan& plan, int unit) {
    unit = smaller(unit, UNITS - 1);  // weights of one more are zeros
    return unit % PLANES * (plan.rows * plan.pitch) + unit / PLANES / QUADS * plan.pitch + unit / PLANES % QUADS;
}
// Element e of a unit is the tap (u, v).
struct Tap {
    int u, v;
    bool exists;
    DEVICE Tap(int unit, int e) {
        u = (unit / PLANES / QUADS * PHASES + unit % PLANES) * 2 + e / 2 % 2, v = unit / PLANES % QUADS * 4 + e / 4 * 2 + e % 2;
        exists = unit < UNITS && u < KERNEL_H && v < KERNEL_W;
    }
};

// A stage of the pipeline, and the parity of its barriers' phases.
struct PipelineState {
    int stage = 0;
    uint32_t parity = 0;

    DEVICE void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

struct Pipeline {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    int* exponents;          // of a stage: x was scaled by 2^exponent
    uint32_t* warp_largest;  // [2][PRODUCER_WARPS]
    int stage_bytes, stages;

    static __host__ DEVICE int64_t bytes(int stage_bytes, int stages) {
        return static_cast<int64_t>(stages) * (stage_bytes + 16 + 4) + 2 * PRODUCER_WARPS * 4;
    }
    DEVICE Pipeline(char* memory, int stage_bytes, int stages) : stage_bytes(stage_bytes), stages(stages) {
        data = shared_address(memory), memory += stages * stage_bytes;
        barriers = shared_address(memory), memory += stages * 16;
        exponents = reinterpret_cast<int*>(memory);
        warp_largest = reinterpret_cast<uint32_t*>(exponents + stages);
    }
    DEVICE uint32_t full(int stage) const { return barriers + stage * 8; }
    DEVICE uint32_t empty(int stage) const { return barriers + (stages + stage) * 8; }
    DEVICE void init() const {
        for (int stage = 0; stage < stages; ++stage)
            mbarrier_init(full(stage), PRODUCERS), mbarrier_init(empty(stage), CONSUMERS);
    }
    DEVICE uint32_t address(const PipelineState& state) const { return data + state.stage * stage_bytes; }
    DEVICE int& exponent(const PipelineState& state) const { return exponents[state.stage]; }
    DEVICE void consumer_wait(const PipelineState& state) const { mbarrier_wait(full(state.stage), state.parity); }
    DEVICE void producer_acquire(const PipelineState& state) const { mbarrier_wait(empty(state.stage), state.parity ^ 1); }
    // Each lane arrives for itself.
    DEVICE void producer_commit(const PipelineState& state) const { mbarrier_arrive(full(state.stage)); }
    DEVICE void consumer_release(const PipelineState& state) const { mbarrier_arrive(empty(state.stage)); }
};

// ---- producers: from device memory through registers to a stage
// Magnitudes in an order of unsigned integers: their bits, without the sign. FINITE: raised so that infinities and NaNs
// overflow to the smallest.
constexpr uint32_t RAISE = 0x01000000u;
template <bool FINITE>
DEVICE uint32_t larger_key(uint32_t key, float2 v) {
    const uint32_t a = 2 * __float_as_uint(v.x) + (FINITE ? RAISE : 0), b = 2 * __float_as_uint(v.y) + (FINITE ? RAISE : 0);
    return larger(key, larger(a, b));
}

// A tile's rows of a channel of x.
struct Rows {
    const float* x;  // their first column, of row 0
    int top, left;

    DEVICE Rows(const Shape& shape, const Tile& tile, const float* all, int channel) {
        top = tile.row * STRIDE_H - PAD_H, left = tile.left * STRIDE_W - PAD_W;
        x = all + (static_cast<int64_t>(tile.sample) * IN_CHANNELS + channel) * shape.plane() + left;
    }
};

// A batch is PAIRS x WARPS row pairs x 128 column pairs of CHANNELS, in the registers of WARPS warps.
template <int CHANNELS, int PAIRS, int WARPS>
struct Batch {
    static constexpr int PASSES = 4, SIZE = PAIRS * PASSES * 2, ROW_PAIRS = PAIRS * WARPS, COLUMN_PAIRS = WARP * PASSES;
    float2 values[CHANNELS][SIZE];  // [channel][row pair, column pair, row]

    // Whether a batch holds all rows.
    static DEVICE bool is_whole(const Plan& plan) { return plan.row_pairs() <= ROW_PAIRS && 2 * plan.pitch <= COLUMN_PAIRS; }
    DEVICE void load(const Shape& shape, const Plan& plan, const Rows& rows, int pair, int column, int channels) {
        if (shape.paired) load_if<true>(shape, plan, rows, pair, column, channels);
        else load_if<false>(shape, plan, rows, pair, column, channels);
    }
    // PAIRED: rows of x begin at multiples of 8 bytes, and pairs of columns exist as a whole or not at all.
    template <bool PAIRED>
    DEVICE void load_if(const Shape& shape, const Plan& plan, const Rows& rows, int first_pair, int first_column,
                        int channels) {
        const int first = first_column + threadIdx.x % WARP;
        bool left_exists[PASSES], right_exists[PASSES];  // of a pair of columns
        UNROLL for (int k = 0; k < PASSES; ++k) {
            const bool in_stage = first + WARP * k < 2 * plan.pitch;
            const unsigned column = rows.left + 2 * (first + WARP * k), width = shape.width;  // less than 0 is very large
            left_exists[k] = in_stage && column < width;
            right_exists[k] = PAIRED ? left_exists[k] : in_stage && column + 1 < width;
        }
        UNROLL for (int i = 0; i < PAIRS; ++i) {
            const int pair = first_pair + i * WARPS + threadIdx.x / WARP % WARPS;
            const int h = rows.top + (PLANES == PHASES ? 2 * pair : pair / PLANES * STRIDE_H + pair % PLANES * 2);
            const float* row = rows.x + static_cast<int64_t>(h) * shape.width + 2 * first;
            UNROLL for (int r = 0; r < 2; ++r, row += shape.width) {
                const bool row_exists =
                    pair < plan.row_pairs() && static_cast<unsigned>(h + r) < static_cast<unsigned>(shape.height);
                const float* from = row;
                UNROLL for (int c = 0; c < CHANNELS; ++c, from += shape.plane())
                    UNROLL for (int k = 0; k < PASSES; ++k) {
                        const bool exists = row_exists && (CHANNELS == 1 || c < channels);
                        float2& v = values[c][(i * PASSES + k) * 2 + r];
                        v = make_float2(0, 0);
                        if constexpr (PAIRED) {
                            if (exists && left_exists[k]) v = __ldg(reinterpret_cast<const float2*>(from + 2 * WARP * k));
                        } else {
                            if (exists && left_exists[k]) v.x = __ldg(from + 2 * WARP * k);
                            if (exists && right_exists[k]) v.y = __ldg(from + 2 * WARP * k + 1);
                        }
                    }
            }
        }
    }
    template <bool FINITE>
    DEVICE uint32_t largest(int channel) const {
        uint32_t key = 0;
        UNROLL for (int i = 0; i < SIZE; ++i) key = larger_key<FINITE>(key, values[channel][i]);
        return warp_max(key);
    }
    // fp16 values of v * scale; STRICT: what rounding leaves of it, too, `low` bytes behind.
    template <bool STRICT>
    DEVICE void store(int channel, uint32_t to_rows, int low, const Plan& plan, int first_pair, int first_column,
                      float scale) const {
        const int first = first_column + threadIdx.x % WARP;
        UNROLL for (int i = 0; i < PAIRS; ++i) {
            const int pair = first_pair + i * WARPS + threadIdx.x / WARP % WARPS;
            const int row = pair % PLANES * plan.rows + pair / PLANES;
            const uint32_t to = to_rows + row * plan.pitch * UNIT_BYTES + first * (UNIT_BYTES / 2);
            UNROLL for (int k = 0; k < PASSES; ++k) {
                const bool exists = pair < plan.row_pairs() && first + WARP * k < 2 * plan.pitch;
                const float2 *v = values[channel] + (i * PASSES + k) * 2, upper = v[0], lower = v[1];
                const float a = upper.x * scale, b = upper.y * scale, c = lower.x * scale, d = lower.y * scale;
                const uint32_t address = to + WARP * k * (UNIT_BYTES / 2);
                st_shared_v2_if(exists, address, fp16_pair(a, b), fp16_pair(c, d));
                if (STRICT) st_shared_v2_if(exists, address + low, fp16_rest(a, b), fp16_rest(c, d));
            }
        }
    }
};

// ---- forward: positions x taps times taps x outputs
// Each warp has M_TILES x 16 positions and WARP_OUTS outputs.
template <int OUTS_, int M_TILES_, bool STRICT_>
struct Forward {
    static constexpr int OUTS = OUTS_, M_TILES = M_TILES_;
    static constexpr bool STRICT = STRICT_;
    static constexpr int WARP_OUTS = smaller(OUTS, 48), N_TILES = WARP_OUTS / 8, WARPS_ACROSS = OUTS / WARP_OUTS;
    static constexpr int WARP_POSITIONS = 16 * M_TILES, POSITIONS = WARP_POSITIONS * CONSUMER_WARPS / WARPS_ACROSS;
    static constexpr int GROUPS = ceil_div(OUT_CHANNELS, OUTS), PARTS = STRICT ? 2 : 1;
    static constexpr int PAIRS = POSITIONS > 256 ? 5 : 4;  // of a producer's batch
    // Weights: [high, low][channel][unit][output], 16 bytes each.
    static constexpr int64_t WEIGHT_BYTES = static_cast<int64_t>(PARTS) * IN_CHANNELS * STEPS * 2 * OUTS * UNIT_BYTES;
    static constexpr int CHANNEL_BYTES = STEPS * 2 * OUTS * UNIT_BYTES;
    // A warp's outputs on their way out: 8 channels. The pitch avoids bank conflicts.
    static constexpr int STAGING_ROW = WARP_POSITIONS + 4, STAGING_BYTES = CONSUMER_WARPS * 8 * STAGING_ROW * 4;
    static constexpr int64_t FIXED_BYTES = WEIGHT_BYTES + STAGING_BYTES + 2 * OUTS * 4;
    static constexpr int64_t PACKED_FLOATS = GROUPS * (WEIGHT_BYTES / 4 + OUTS);  // then what undoes their scales
    static __host__ int64_t bytes(const Plan& plan) {
        return FIXED_BYTES + Pipeline::bytes(PARTS * plan.x_bytes(), plan.stages);
    }
};

struct Tensors {
    const float* __restrict__ x;
    const float* __restrict__ weight;
    const float* __restrict__ bias;  // or null
    float* __restrict__ out;
};

// A block an output channel: scales its weights by a power of two and packs them. A factor of two scales must not be too small.
constexpr int WEIGHT_TARGET = 14, MOST_WEIGHT_EXPONENT = 62, PACK_THREADS = 128;
template <class F>
__global__ void __launch_bounds__(PACK_THREADS) pack_weights(const float* __restrict__ weight, uint4* __restrict__ packed) {
    __shared__ uint32_t warp_largest[PACK_THREADS / WARP];
    constexpr int PART = IN_CHANNELS * STEPS * 2 * F::OUTS;
    const int o = blockIdx.x, group = o / F::OUTS;
    const float* const mine = weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS;
    uint32_t largest = 0;
    if (o < OUT_CHANNELS)
        for (int i = threadIdx.x; i < IN_CHANNELS * TAPS; i += PACK_THREADS) {
            const uint32_t magnitude = __float_as_uint(mine[i]) & 0x7fffffffu;
            if (magnitude < INFINITE) largest = larger(largest, magnitude);
        }
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (int warp = 0; warp < PACK_THREADS / WARP; ++warp) largest = larger(largest, warp_largest[warp]);
    const int exponent = smaller(scale_exponent(largest, WEIGHT_TARGET), MOST_WEIGHT_EXPONENT);
    for (int i = threadIdx.x; i < IN_CHANNELS * STEPS * 2; i += PACK_THREADS) {
        float w[8];
        UNROLL for (int e = 0; e < 8; ++e) {
            const Tap tap(i % (2 * STEPS), e);
            const bool exists = o < OUT_CHANNELS && tap.exists;
            w[e] = exists ? mine[i / (2 * STEPS) * TAPS + tap.u * KERNEL_W + tap.v] * power_of_2(exponent) : 0;
        }
        uint4* const to = packed + static_cast<int64_t>(group) * F::PARTS * PART + i * F::OUTS + o % F::OUTS;
        to[0] = make_uint4(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]), fp16_pair(w[4], w[5]), fp16_pair(w[6], w[7]));
        if (F::STRICT)
            to[PART] = make_uint4(fp16_rest(w[0], w[1]), fp16_rest(w[2], w[3]), fp16_rest(w[4], w[5]), fp16_rest(w[6], w[7]));
    }
    float* const unscales = reinterpret_cast<float*>(packed + static_cast<int64_t>(F::GROUPS) * F::PARTS * PART);
    if (threadIdx.x == 0) unscales[o] = power_of_2(-exponent);
}

// Producers load a channel's rows for a tile, find their scale, convert and store them. The next batch is asked for as soon as
// one is stored. Where rows take more than a batch, each batch is loaded twice: for the scale, and to be stored.
constexpr int PLAIN = -1000;  // instead of a tile's exponent: x holds a NaN or an infinity
template <class F>
DEVICE void produce(const Shape& shape, const Plan& plan, const Pipeline& pipeline, const float* x) {
    using RowBatch = Batch<1, F::PAIRS, PRODUCER_WARPS>;
    const bool whole = RowBatch::is_whole(plan);
    const int warp = threadIdx.x / WARP % PRODUCER_WARPS;
    int number = blockIdx.x / F::GROUPS, channel = 0, first_pair = 0, first_column = 0, exponent = MOST_EXPONENT, slot = 0;
    bool storing = whole;
    uint32_t key = 0;
    PipelineState state;
    Rows rows(shape, Tile(plan, number), x, 0);
    RowBatch batch;
    batch.load(shape, plan, rows, 0, 0, 1);
    UNROLL_1 while (number < plan.tiles) {
        const bool is_last = first_column + RowBatch::COLUMN_PAIRS >= 2 * plan.pitch &&  // of the rows' batches
                             first_pair + RowBatch::ROW_PAIRS >= plan.row_pairs();
        if (whole || !storing) key = larger(key, batch.template largest<false>(0));
        if (is_last && (whole || !storing)) {
            uint32_t* const keys = pipeline.warp_largest + slot * PRODUCER_WARPS;
            slot ^= 1;  // two slots take turns: one barrier is enough
            if (threadIdx.x % WARP == 0) keys[warp] = key;
            named_barrier(1, PRODUCERS);
            UNROLL for (int i = 0; i < PRODUCER_WARPS; ++i) key = larger(key, keys[i]);
            exponent = smaller(exponent, key / 2 < INFINITE ? plane_exponent(key / 2) : PLAIN);
            key = 0;
            pipeline.producer_acquire(state);
        }
        if (storing)
            batch.template store<F::STRICT>(0, pipeline.address(state), plan.x_bytes(), plan, first_pair, first_column,
                                            power_of_2(exponent));
        if (is_last && storing) {
            if (threadIdx.x == CONSUMERS) pipeline.exponent(state) = exponent;
            pipeline.producer_commit(state);
            state.advance(plan.stages);
            rows.x += shape.plane();
            if (++channel == IN_CHANNELS) {
                channel = 0, number += plan.blocks, exponent = MOST_EXPONENT;
                if (number < plan.tiles) rows = Rows(shape, Tile(plan, number), x, 0);
            }
        }
        if (is_last) storing = whole || !storing;
        first_column += RowBatch::COLUMN_PAIRS;
        if (first_column >= 2 * plan.pitch) first_column = 0, first_pair += RowBatch::ROW_PAIRS;
        if (is_last) first_pair = 0;
        if (number < plan.tiles) batch.load(shape, plan, rows, first_pair, first_column, 1);
    }
}

// sums += the products of a channel's taps. x: the address of the lane's first unit, of each 16 positions; weights: the address
// of the first that the lane loads.
template <class F>
DEVICE void multiply_stage(const uint32_t (&x)[F::M_TILES], uint32_t weights, const Plan& plan,
                           float (&sums)[F::M_TILES][F::N_TILES][4]) {
    const bool second = threadIdx.x % WARP >= 16;  // of a step's units
    float parts[F::STRICT ? F::M_TILES : 1][F::N_TILES][4] = {};
#pragma unroll (F::STRICT ? 1 : UNROLLED_STEPS)
    for (int step = 0; step < STEPS; ++step) {
        const int here = unit_offset(plan, 2 * step), to_second = unit_offset(plan, 2 * step + 1) - here;
        const uint32_t offset = (here + (second ? to_second : 0)) * UNIT_BYTES;
        uint32_t a[F::PARTS][F::M_TILES][4], b[F::PARTS][F::N_TILES / 2 + F::N_TILES % 2][4];
        UNROLL for (int part = 0; part < F::PARTS; ++part) {
            UNROLL for (int m = 0; m < F::M_TILES; ++m) ldmatrix_x4(a[part][m], x[m] + part * plan.x_bytes() + offset);
            UNROLL for (int j = 0; j < F::N_TILES; j += 2)
                ldmatrix_x4(b[part][j / 2], weights + part * (F::WEIGHT_BYTES / 2) +
                                                (step * 2 * F::OUTS + smaller(8 * j, F::WARP_OUTS - 16)) * UNIT_BYTES);
        }
        UNROLL for (int m = 0; m < F::M_TILES; ++m)
            UNROLL for (int j = 0; j < F::N_TILES; ++j) {
                const int of_pair = 2 * (j == F::N_TILES - 1 ? 1 : j % 2);
                multiply<F::STRICT>(F::STRICT ? parts[F::STRICT ? m : 0][j] : sums[m][j], a[0][m], a[F::PARTS - 1][m],
                                    b[0][j / 2] + of_pair, b[F::PARTS - 1][j / 2] + of_pair);
            }
    }
    // The tensor core cuts off what a sum does not hold, always towards zero: so strict sums begin again with each channel and
    // are added as fp32 numbers.
    if constexpr (F::STRICT)
        UNROLL for (int i = 0; i < F::M_TILES * F::N_TILES * 4; ++i)
            sums[i / (4 * F::N_TILES)][i / 4 % F::N_TILES][i % 4] += parts[i / (4 * F::N_TILES)][i / 4 % F::N_TILES][i % 4];
}

// Writes a warp's outputs, `count` positions from `out` on. Through shared memory, 8 channels at a time, so that stores are
// coalesced. The first rows of scales are what undoes the weights' scales, the second the biases.
template <class F>
DEVICE void write_outputs(const float (&sums)[F::M_TILES][F::N_TILES][4], int exponent, const float* scales, float* staging,
                          float* __restrict__ out, int64_t out_plane, int channels, int count) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const float half_unscale = power_of_2(-exponent / 2), other_half = power_of_2(-exponent - -exponent / 2);
    UNROLL for (int j = 0; j < F::N_TILES; ++j) {
        const float2 unscale = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * t);
        const float2 bias = *reinterpret_cast<const float2*>(scales + F::OUTS + 8 * j + 2 * t);
        const float factors[2] = {fminf(half_unscale * unscale.x, LARGEST_POWER),
                                  fminf(half_unscale * unscale.y, LARGEST_POWER)};
        __syncwarp();  // the channels before have been read
        float* const to = staging + 2 * t * F::STAGING_ROW + g;
        UNROLL for (int i = 0; i < 2 * F::M_TILES; ++i) {
            to[8 * i] = fmaf(sums[i / 2][j][i % 2 * 2] * factors[0], other_half, bias.x);
            to[8 * i + F::STAGING_ROW] = fmaf(sums[i / 2][j][i % 2 * 2 + 1] * factors[1], other_half, bias.y);
        }
        __syncwarp();
        UNROLL for (int row = 0; row < 8; ++row, out += out_plane) {
            UNROLL for (int i = lane; i < F::WARP_POSITIONS; i += WARP)
                if (8 * j + row < channels && i < count) out[i] = staging[row * F::STAGING_ROW + i];
        }
    }
}

// An output in plain fp32.
DEVICE float plain_output(const Shape& shape, const Tensors& tensors, int64_t sample, int o, int64_t position) {
    const int i = static_cast<int>(position / shape.out_w);
    const int j = static_cast<int>(position - static_cast<int64_t>(i) * shape.out_w);
    const int top = i * STRIDE_H - PAD_H, left = j * STRIDE_W - PAD_W;
    float sum = 0;
    UNROLL_1 for (int c = 0; c < IN_CHANNELS; ++c) {
        const float* plane = tensors.x + (sample * IN_CHANNELS + c) * shape.plane();
        const float* taps = tensors.weight + (static_cast<int64_t>(o) * IN_CHANNELS + c) * TAPS;
        UNROLL_1 for (int k = 0; k < TAPS; ++k) {
            const int h = top + k / KERNEL_W, w = left + k % KERNEL_W;
            const bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
            if (inside) sum += plane[static_cast<int64_t>(h) * shape.width + w] * taps[k];
        }
    }
    return tensors.bias ? sum + tensors.bias[o] : sum;
}

template <class F>
DEVICE void consume(const Shape& shape, const Plan& plan, const Tensors& tensors, const Pipeline& pipeline, const char* weights,
                    const float* scales, float* staging) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_out = warp % F::WARPS_ACROSS * F::WARP_OUTS;
    const int first_channel = blockIdx.x % F::GROUPS * F::OUTS + first_out;
    staging += warp * 8 * F::STAGING_ROW, scales += first_out;
    const uint32_t first_weight =
        shared_address(weights) + (lane / 8 % 2 * F::OUTS + first_out + lane / 16 * 8 + lane % 8) * UNIT_BYTES;
    PipelineState state;
    UNROLL_1 for (int number = blockIdx.x / F::GROUPS; number < plan.tiles; number += plan.blocks) {
        const Tile tile(plan, number);
        const int first_position = warp / F::WARPS_ACROSS * F::WARP_POSITIONS;
        uint32_t units[F::M_TILES];
        UNROLL for (int m = 0; m < F::M_TILES; ++m)
            units[m] = tile.unit(plan, first_position + 16 * m + lane % 16) * UNIT_BYTES;
        float sums[F::M_TILES][F::N_TILES][4] = {};
        int exponent = 0;
        UNROLL_1 for (int channel = 0; channel < IN_CHANNELS; ++channel) {
            pipeline.consumer_wait(state);
            const int change = pipeline.exponent(state) - exponent;
            exponent += change;
            if (channel > 0 && change != 0)
                UNROLL for (int i = 0; i < F::M_TILES * F::N_TILES * 4; ++i) {
                    float& sum = sums[i / (4 * F::N_TILES)][i / 4 % F::N_TILES][i % 4];
                    sum = scaled(sum, change);
                }
            uint32_t x[F::M_TILES];
            UNROLL for (int m = 0; m < F::M_TILES; ++m) x[m] = pipeline.address(state) + units[m];
            multiply_stage<F>(x, first_weight + channel * F::CHANNEL_BYTES, plan, sums);
            pipeline.consumer_release(state);
            state.advance(plan.stages);
        }
        const int count = smaller(tile.count - first_position, F::WARP_POSITIONS);
        const int channels = smaller(F::WARP_OUTS, OUT_CHANNELS - first_channel);
        const int64_t plane = static_cast<int64_t>(tile.sample) * OUT_CHANNELS + first_channel;
        const int position = tile.first + first_position;
        float* const out = tensors.out + plane * shape.out_plane() + position;
        if (exponent != PLAIN) {
            write_outputs<F>(sums, exponent, scales, staging, out, shape.out_plane(), channels, count);
        } else {  // zero weights would spread a NaN or an infinity
            UNROLL_1 for (int i = lane; i < count * channels; i += WARP)
                out[i / count * shape.out_plane() + i % count] =
                    plain_output(shape, tensors, tile.sample, first_channel + i / count, position + i % count);
        }
    }
}

template <class F>
__global__ void __launch_bounds__(THREADS, 1)
    convolve(const Shape shape, const Plan plan, const Tensors tensors, const uint4* __restrict__ packed) {
    extern __shared__ __align__(128) char memory[];
    const Pipeline pipeline(memory + F::FIXED_BYTES, F::PARTS * plan.x_bytes(), plan.stages);
    float* const staging = reinterpret_cast<float*>(memory + F::WEIGHT_BYTES);
    float* const scales = staging + F::STAGING_BYTES / 4;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        produce<F>(shape, plan, pipeline, tensors.x);
    } else {
        const int group = blockIdx.x % F::GROUPS;
        constexpr int WEIGHT_UNITS = F::WEIGHT_BYTES / UNIT_BYTES;
        for (int i = threadIdx.x; i < WEIGHT_UNITS; i += CONSUMERS)
            cp_async_16(shared_address(memory) + i * UNIT_BYTES, packed + static_cast<int64_t>(group) * WEIGHT_UNITS + i);
        const float* const unscales = reinterpret_cast<const float*>(packed + static_cast<int64_t>(F::GROUPS) * WEIGHT_UNITS);
        for (int i = threadIdx.x; i < F::OUTS; i += CONSUMERS) {
            const int o = group * F::OUTS + i;
            scales[i] = unscales[o];
            scales[F::OUTS + i] = tensors.bias && o < OUT_CHANNELS ? tensors.bias[o] : 0;
        }
        cp_async_wait_all();
        named_barrier(2, CONSUMERS);
        consume<F>(shape, plan, tensors, pipeline, memory, scales, staging);
    }
}


// ---- training: the gradient of the weights, x (taps x positions) times grad (positions x outputs), summed over all positions
// A unit's 8 taps at 8 positions, transposed by ldmatrix, are a quarter of a left operand. A tile of positions is in shared
// memory at a time. While it is multiplied, the next one is on its way to registers of all warps.
template <bool STRICT_>
struct Gradient {
    static constexpr bool STRICT = STRICT_;
    static constexpr int PARTS = STRICT ? 2 : 1, POSITIONS = 128, WARPS = THREADS / WARP;
    // A warp has every sixth tile of 16 taps, and half of the block's outputs.
    static constexpr int OUTS = 48, WARPS_ACROSS = 2, WARPS_DOWN = WARPS / WARPS_ACROSS, WARP_OUTS = OUTS / WARPS_ACROSS;
    static constexpr int GROUPS = ceil_div(OUT_CHANNELS, OUTS), N_TILES = WARP_OUTS / 8;
    static constexpr int MOST_TILES = 5 * WARPS_DOWN, MOST_CHUNK = smaller(3, MOST_TILES / STEPS);  // as registers permit
    static constexpr bool FITS = FITS_UNITS && MOST_CHUNK > 0;
    static constexpr int CHUNKS = ceil_div(IN_CHANNELS, larger(MOST_CHUNK, 1)), CHUNK = ceil_div(IN_CHANNELS, CHUNKS);
    static constexpr int M_TILES = FITS ? ceil_div(CHUNK * STEPS, WARPS_DOWN) : 1;
    static constexpr int GRAD_ROW = (POSITIONS + 8) * 2, GRAD_BYTES = OUTS * GRAD_ROW;  // bytes; no bank conflicts
    // A block's sums, as in registers: [chunk][group][tile of taps][8 outputs][thread], a float4 each; then the biases'.
    static constexpr int64_t PART_FLOATS = 4ll * M_TILES * N_TILES * THREADS;
    static constexpr int BIAS_FLOATS = GROUPS * OUTS;
    static constexpr int64_t FLOATS = CHUNKS * GROUPS * PART_FLOATS + BIAS_FLOATS;
    static constexpr int UNITS_OF_TAPS = 2 * M_TILES * WARPS_DOWN;  // two a tile of taps
    static constexpr int KEYS_BYTES = round_up((CHUNK + 1) * WARPS * 4 + 2 * CHUNK * 4 + UNITS_OF_TAPS * 4, 16);

    static __host__ DEVICE int low_bytes(const Plan& plan) { return CHUNK * plan.x_bytes() + GRAD_BYTES; }
    static __host__ int64_t bytes(const Plan& plan) {
        return KEYS_BYTES + static_cast<int64_t>(PARTS) * low_bytes(plan) + POSITIONS * 4;
    }
};

// What a block has: a group of outputs, a chunk of channels, and tiles [first, last).
struct GradientPart {
    int first_out, first_channel, channels, first, last;
};

// A thread's part of a tile on its way: rows of x, and of each of the warp's outputs of grad the positions 2 * lane and
// 2 * lane + 1, and those 64 further on.
template <class G>
struct GradientTile {
    using RowBatch = Batch<G::STRICT ? 1 : G::CHUNK, 1, G::WARPS>;
    static constexpr int OUTS = G::OUTS / G::WARPS, RUNS = G::POSITIONS / (2 * WARP);
    RowBatch rows;
    float2 grads[OUTS][RUNS];

    static DEVICE int output(int i) { return i * G::WARPS + threadIdx.x / WARP; }
    // Whether they hold all rows; strict sums leave too few registers.
    static DEVICE bool is_whole(const Plan& plan) { return !G::STRICT && RowBatch::is_whole(plan); }
    DEVICE void load(const Shape& shape, const Plan& plan, const GradientPart& part, const Tile& tile, const float* x,
                     const float* grad) {
        const int lane = threadIdx.x % WARP;
        const int64_t plane = static_cast<int64_t>(tile.sample) * OUT_CHANNELS + part.first_out + output(0);
        const float* from = grad + plane * shape.out_plane() + tile.first + 2 * lane;
        UNROLL for (int i = 0; i < OUTS; ++i, from += G::WARPS * shape.out_plane()) {
            const bool exists = OUT_CHANNELS % G::OUTS == 0 || part.first_out + output(i) < OUT_CHANNELS;
            UNROLL for (int k = 0; k < RUNS; ++k) {
                const int position = 2 * (lane + WARP * k);
                grads[i][k].x = exists && position < tile.count ? __ldg(from + 2 * WARP * k) : 0;
                grads[i][k].y = exists && position + 1 < tile.count ? __ldg(from + 2 * WARP * k + 1) : 0;
            }
        }
        if (is_whole(plan)) rows.load(shape, plan, Rows(shape, tile, x, part.first_channel), 0, 0, part.channels);
    }
};

// Exponents of sums may fall without limit, but rise only so far above the lowest that old tiles' sums stay finite.
constexpr int MOST_RISE = 80, NO_EXPONENT = 1000;

template <class G>
__global__ void __launch_bounds__(THREADS, 1)
    weight_gradient(const Shape shape, const Plan plan, const float* __restrict__ x, const float* __restrict__ grad,
                    float* __restrict__ terms) {
    extern __shared__ __align__(128) char memory[];
    uint32_t* const keys = reinterpret_cast<uint32_t*>(memory);                           // [grad, channels][warp]
    int* const exponents = reinterpret_cast<int*>(keys + (G::CHUNK + 1) * G::WARPS);      // of sums, of each channel
    int* const changes = exponents + G::CHUNK;                                            // since the tile before
    int* const tap_units = changes + G::CHUNK;  // from a position's first unit, in bytes; the lowest bits are the channel
    const uint32_t stage = shared_address(memory + G::KEYS_BYTES);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, low = G::low_bytes(plan);
    constexpr int PARTS = G::CHUNKS * G::GROUPS;
    const int part_number = blockIdx.x % PARTS, first_channel = part_number / G::GROUPS * G::CHUNK;
    const int64_t split = blockIdx.x / PARTS;
    const GradientPart part = {part_number % G::GROUPS * G::OUTS, first_channel, smaller(G::CHUNK, IN_CHANNELS - first_channel),
                               static_cast<int>(plan.tiles * split / plan.blocks),
                               static_cast<int>(plan.tiles * (split + 1) / plan.blocks)};
    using Registers = GradientTile<G>;
    using RowBatch = Batch<1, 1, G::WARPS>;
    const bool whole = Registers::is_whole(plan);

    const auto publish = [&](int item, uint32_t key) {
        if (lane == 0) keys[item * G::WARPS + warp] = key;
    };
    const auto exponent_of = [&](int item) {
        const uint32_t key = warp_max(lane < G::WARPS ? keys[item * G::WARPS + lane] : 0);
        return plane_exponent((larger(key, RAISE) - RAISE) / 2);
    };
    // Visits all batches of a tile whose rows take more than one a channel.
    const auto visit_batches = [&](const Tile& tile, const auto& visit) {
        RowBatch batch;
        UNROLL_1 for (int c = 0; c < part.channels; ++c)
            UNROLL_1 for (int pair = 0; pair < plan.row_pairs(); pair += RowBatch::ROW_PAIRS)
                UNROLL_1 for (int column = 0; column < 2 * plan.pitch; column += RowBatch::COLUMN_PAIRS) {
                    batch.load(shape, plan, Rows(shape, tile, x, first_channel + c), pair, column, 1);
                    visit(batch, c, pair, column);
                }
    };

    float sums[G::M_TILES][G::N_TILES][4] = {}, bias_sums[Registers::OUTS] = {};
    int lowest = NO_EXPONENT;
    if (threadIdx.x < G::CHUNK) exponents[threadIdx.x] = 0;
    if (threadIdx.x < G::UNITS_OF_TAPS) {
        const int step = smaller<int>(threadIdx.x / 2, part.channels * STEPS - 1);  // of one too many, sums are not used
        tap_units[threadIdx.x] =
            step / STEPS * (plan.x_bytes() + 1) + unit_offset(plan, step % STEPS * 2 + threadIdx.x % 2) * UNIT_BYTES;
    }
    Registers next;
    Tile tile(plan, part.first);
    if (!G::STRICT) next.load(shape, plan, part, tile, x, grad);
    UNROLL_1 for (int number = part.first; number < part.last; ++number) {
        const Tile following(plan, smaller(number + 1, part.last - 1));
        if (G::STRICT) next.load(shape, plan, part, tile, x, grad);  // strict sums leave no registers for it before
        // The scales: of grad, and of each channel.
        uint32_t key = 0;
        UNROLL for (int i = 0; i < Registers::OUTS * Registers::RUNS; ++i)
            key = larger_key<true>(key, next.grads[i / Registers::RUNS][i % Registers::RUNS]);
        publish(0, warp_max(key));
        if (whole) {
            UNROLL for (int c = 0; c < G::CHUNK; ++c)
                if (c < part.channels) publish(1 + c, next.rows.template largest<true>(c));
        } else {
            uint32_t so_far = 0;
            visit_batches(tile, [&](RowBatch& batch, int c, int pair, int column) {
                so_far = larger(pair + column == 0 ? 0 : so_far, batch.template largest<true>(0));
                publish(1 + c, so_far);
            });
        }
        __syncthreads();  // scales are known, and the tile before has been multiplied
        const int grad_exponent = exponent_of(0), most = lowest + MOST_RISE - grad_exponent;
        float scales[G::CHUNK];
        UNROLL for (int c = 0; c < G::CHUNK; ++c) {
            if (c >= part.channels) break;
            const int exponent = smaller(exponent_of(1 + c), most), of_sums = exponent + grad_exponent;
            scales[c] = power_of_2(exponent), lowest = smaller(lowest, of_sums);
            if (threadIdx.x == 0) changes[c] = of_sums - exponents[c], exponents[c] = of_sums;
            if (whole) next.rows.template store<G::STRICT>(c, stage + c * plan.x_bytes(), low, plan, 0, 0, scales[c]);
        }
        if (!whole)
            visit_batches(tile, [&](RowBatch& batch, int c, int pair, int column) {
                float scale = scales[0];
                UNROLL for (int i = 1; i < G::CHUNK; ++i) scale = c == i ? scales[i] : scale;
                batch.template store<G::STRICT>(0, stage + c * plan.x_bytes(), low, plan, pair, column, scale);
            });
        const float grad_scale = power_of_2(grad_exponent);
        const uint32_t grad_rows = stage + G::CHUNK * plan.x_bytes(), units = stage + G::PARTS * low;
        UNROLL for (int i = 0; i < Registers::OUTS; ++i)
            UNROLL for (int k = 0; k < Registers::RUNS; ++k) {
                const float2 v = next.grads[i][k];
                const uint32_t address = grad_rows + Registers::output(i) * G::GRAD_ROW + (lane + k * WARP) * 4;
                st_shared(address, fp16_pair(v.x * grad_scale, v.y * grad_scale));
                if (G::STRICT) st_shared(address + low, fp16_rest(v.x * grad_scale, v.y * grad_scale));
                bias_sums[i] += v.x + v.y;
            }
        if (threadIdx.x < G::POSITIONS) st_shared(units + threadIdx.x * 4, tile.unit(plan, threadIdx.x) * UNIT_BYTES);
        __syncthreads();  // the tile is there
        if (!G::STRICT && number + 1 < part.last) next.load(shape, plan, part, following, x, grad);

        const int down = warp / G::WARPS_ACROSS;
        uint32_t taps[G::M_TILES];  // of each tile of taps, the lane's unit at the first position
        UNROLL for (int m = 0; m < G::M_TILES; ++m) {
            const int tap_unit = tap_units[(m * G::WARPS_DOWN + down) * 2 + lane / 8 % 2], channel = tap_unit % UNIT_BYTES;
            taps[m] = stage + tap_unit - channel;
            const int change = changes[channel];
            if (change != 0)
                UNROLL for (int i = 0; i < G::N_TILES * 4; ++i) sums[m][i / 4][i % 4] = scaled(sums[m][i / 4][i % 4], change);
        }
        const uint32_t lane_unit = units + (lane / 16 * 8 + lane % 8) * 4;
        const uint32_t lane_grad =
            grad_rows + (warp % G::WARPS_ACROSS * G::WARP_OUTS + lane / 16 * 8 + lane % 8) * G::GRAD_ROW + lane / 8 % 2 * 16;
        // Strict sums begin again with each tile, see multiply_stage; a thread has registers for those of some tiles of taps.
        constexpr int AT_ONCE = G::STRICT ? smaller(G::M_TILES, 3) : G::M_TILES;
        UNROLL for (int group = 0; group < G::M_TILES; group += AT_ONCE) {
            float parts[AT_ONCE][G::N_TILES][4] = {};
            uint32_t next_unit = ld_shared(lane_unit);
            UNROLL_1 for (int first = 0; first < tile.count; first += 16) {
                const uint32_t unit = next_unit;
                next_unit = ld_shared(lane_unit + smaller(first + 16, G::POSITIONS - 16) * 4);
                uint32_t b[G::PARTS][2][4];  // of outputs 0 to 15 and 8 to 23
                UNROLL for (int i = 0; i < 2 * G::PARTS; ++i)
                    ldmatrix_x4(b[i / 2][i % 2], lane_grad + i / 2 * low + i % 2 * 8 * G::GRAD_ROW + first * 2);
                UNROLL for (int m = group; m < smaller(group + AT_ONCE, G::M_TILES); ++m) {
                    uint32_t a[G::PARTS][4];
                    UNROLL for (int p = 0; p < G::PARTS; ++p) ldmatrix_x4_trans(a[p], taps[m] + unit + p * low);
                    if ((m + 1) * G::WARPS_DOWN > G::CHUNK * STEPS && m * G::WARPS_DOWN + down >= G::CHUNK * STEPS) break;
                    UNROLL for (int j = 0; j < G::N_TILES; ++j)
                        multiply<G::STRICT>(G::STRICT ? parts[m - group][j] : sums[m][j], a[0], a[G::PARTS - 1],
                                            b[0][j / 2] + (j + 1) / 2 * 2, b[G::PARTS - 1][j / 2] + (j + 1) / 2 * 2);
                }
            }
            if (G::STRICT)
                UNROLL for (int m = group; m < smaller(group + AT_ONCE, G::M_TILES); ++m)
                    UNROLL for (int i = 0; i < G::N_TILES * 4; ++i) sums[m][i / 4][i % 4] += parts[m - group][i / 4][i % 4];
        }
        tile = following;
    }

    terms += split * G::FLOATS;
    float4* const mine = reinterpret_cast<float4*>(terms + part_number * G::PART_FLOATS) + threadIdx.x;
    UNROLL for (int i = 0; i < G::M_TILES * G::N_TILES; ++i) {
        const int m = i / G::N_TILES;
        const int exponent = -exponents[tap_units[(m * G::WARPS_DOWN + warp / G::WARPS_ACROSS) * 2] % UNIT_BYTES];
        const float(&v)[4] = sums[m][i % G::N_TILES];
        mine[i * THREADS] =
            make_float4(scaled(v[0], exponent), scaled(v[1], exponent), scaled(v[2], exponent), scaled(v[3], exponent));
    }
    UNROLL for (int i = 0; i < Registers::OUTS; ++i) {
        float sum = bias_sums[i];
        UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (first_channel == 0 && lane == 0) terms[PARTS * G::PART_FLOATS + part.first_out + Registers::output(i)] = sum;
    }
}

// Adds the splits' terms in an order of its own, and puts the sums where they belong. Either gradient may be null. A warp adds
// every SUM_WARPS-th split, 4 terms a lane.
constexpr int SUM_WARPS = 8, SUM_THREADS = SUM_WARPS * WARP, SUM_TERMS = 4 * WARP;
template <class G>
__global__ void __launch_bounds__(SUM_THREADS)
    add_splits(const float* __restrict__ terms, float* __restrict__ grad_weight, float* __restrict__ grad_bias, int splits) {
    __shared__ float4 shares[SUM_WARPS][WARP];
    const int share = threadIdx.x / WARP, lane_of_4 = threadIdx.x % WARP;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * SUM_TERMS + lane_of_4 * 4;
    float4 sum = {};
    if (first < G::FLOATS)
#pragma unroll 8
        for (int split = share; split < splits; split += SUM_WARPS) {
            const float4 v = *reinterpret_cast<const float4*>(terms + split * G::FLOATS + first);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
    shares[share][lane_of_4] = sum;
    __syncthreads();
    const int64_t term = static_cast<int64_t>(blockIdx.x) * SUM_TERMS + threadIdx.x;
    if (threadIdx.x >= SUM_TERMS || term >= G::FLOATS) return;
    float total = 0;
    UNROLL for (int i = 0; i < SUM_WARPS; ++i) total += reinterpret_cast<const float*>(shares[i])[threadIdx.x];
    const int64_t of_bias = term - (G::FLOATS - G::BIAS_FLOATS);
    if (of_bias >= 0) {
        if (grad_bias && of_bias < OUT_CHANNELS) grad_bias[of_bias] = total;
        return;
    }
    const int element = term % 4, thread = term / 4 % THREADS, lane = thread % WARP, warp = thread / WARP;
    const int of_8 = term / (4 * THREADS) % G::N_TILES, m = term / (4 * THREADS) / G::N_TILES % G::M_TILES;
    const int part = term / G::PART_FLOATS, step = m * G::WARPS_DOWN + warp / G::WARPS_ACROSS;
    const int o = part % G::GROUPS * G::OUTS + warp % G::WARPS_ACROSS * G::WARP_OUTS + of_8 * 8 + lane % 4 * 2 + element % 2;
    const int channel = part / G::GROUPS * G::CHUNK + step / STEPS;
    const Tap tap(step % STEPS * 2 + element / 2, lane / 4);
    if (grad_weight && o < OUT_CHANNELS && step < G::CHUNK * STEPS && channel < IN_CHANNELS && tap.exists)
        grad_weight[(static_cast<int64_t>(o) * IN_CHANNELS + channel) * TAPS + tap.u * KERNEL_W + tap.v] = total;
}

// ---- plain kernels in fp32, for shapes that the others do not take: a thread an output; a warp a weight, then one a bias
constexpr int PLAIN_THREADS = 256;
__global__ void __launch_bounds__(PLAIN_THREADS) plain_convolve(const Shape shape, const Tensors tensors) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * PLAIN_THREADS + threadIdx.x, plane = shape.out_plane();
    if (index >= shape.batch * OUT_CHANNELS * plane) return;
    tensors.out[index] =
        plain_output(shape, tensors, index / plane / OUT_CHANNELS, index / plane % OUT_CHANNELS, index % plane);
}

// Either gradient may be null.
__global__ void __launch_bounds__(PLAIN_THREADS)
    plain_gradients(const Shape shape, const float* __restrict__ x, const float* __restrict__ grad,
                    float* __restrict__ grad_weight, float* __restrict__ grad_bias) {
    const int64_t index = (static_cast<int64_t>(blockIdx.x) * PLAIN_THREADS + threadIdx.x) / WARP;
    const bool of_bias = index >= WEIGHTS;
    if (index >= WEIGHTS + OUT_CHANNELS || !(of_bias ? grad_bias : grad_weight)) return;
    const int o = of_bias ? index - WEIGHTS : index / (IN_CHANNELS * TAPS);
    const int channel = of_bias ? 0 : index / TAPS % IN_CHANNELS, tap = of_bias ? 0 : index % TAPS;
    float sum = 0;
    UNROLL_1 for (int64_t sample = 0; sample < shape.batch; ++sample) {
        const float* of_sample = grad + (sample * OUT_CHANNELS + o) * shape.out_plane();
        const float* plane = x + (sample * IN_CHANNELS + channel) * shape.plane();
        float sum_of_sample = 0;
        UNROLL_1 for (int64_t k = threadIdx.x % WARP; k < shape.out_plane(); k += WARP) {
            const int h = static_cast<int>(k / shape.out_w) * STRIDE_H - PAD_H + tap / KERNEL_W;
            const int w = static_cast<int>(k % shape.out_w) * STRIDE_W - PAD_W + tap % KERNEL_W;
            const bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
            if (of_bias) sum_of_sample += of_sample[k];
            else if (inside) sum_of_sample += of_sample[k] * plane[static_cast<int64_t>(h) * shape.width + w];
        }
        sum += sum_of_sample;
    }
    UNROLL for (int offset = WARP / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % WARP == 0) (of_bias ? grad_bias[o] : grad_weight[index]) = sum;
}

// ---- launchers
struct Device {
    int sm_count, shared_bytes;
    Device() {
        int device;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        if (SHARED_LIMIT_KB) shared_bytes = smaller(shared_bytes, SHARED_LIMIT_KB * 1024);
    }
};

static Shape make_shape(const float* x, int64_t batch, int height, int width) {
    Shape s;
    s.batch = batch, s.height = height, s.width = width;
    s.out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1, s.out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
    s.paired = width % 2 == 0 && PAD_W % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 8 == 0;
    return s;
}

static unsigned blocks_of(int64_t threads, int of_block) { return static_cast<unsigned>((threads + of_block - 1) / of_block); }

// The one predicate of what a fast kernel takes: whether tiles and a pipeline of `most_stages` or fewer fit into the device's
// shared memory; `plan` is how. Whole planes are lines where they can be.
template <class Kernel>
static bool make_plan(Plan& plan, const Shape& shape, int most_stages, int least_stages, int groups) {
    if (!FITS_UNITS) return false;
    const Device device;
    for (const bool by_rows : {false, true})
        for (int stages = most_stages; stages >= least_stages; --stages) {
            const int columns = by_rows ? Kernel::POSITIONS : shape.out_w, pitch = columns + QUADS - 1;
            const int64_t line = by_rows ? shape.out_w : shape.out_plane(), lines = by_rows ? shape.out_h : 1;
            const int64_t of_line = (line + Kernel::POSITIONS - 1) / Kernel::POSITIONS, tiles = shape.batch * lines * of_line;
            if (pitch > 1 << 14 || line > 1 << 30 || tiles > 1 << 30) continue;
            const int rows = (by_rows ? 0 : (columns - 1 + Kernel::POSITIONS - 1) / columns) + TAP_ROWS;
            plan = {by_rows, Kernel::POSITIONS, columns, pitch, rows, stages};
            plan.line = line, plan.lines = lines, plan.tiles_of_line = of_line, plan.tiles = tiles;
            plan.blocks = smaller(plan.tiles, larger(device.sm_count / groups, 1));
            if (Kernel::bytes(plan) <= device.shared_bytes) return true;
        }
    return false;
}

// Calls visit(kernel, plan) for the fastest forward kernel that takes the shape; false where none does.
constexpr int FORWARD_STAGES = 4;
template <class Visit>
static bool visit_forward(const Shape& shape, bool strict, const Visit& visit) {
    const auto takes = [&](auto kernel, int least_stages) {
        Plan plan;
        const bool fits = make_plan<decltype(kernel)>(plan, shape, FORWARD_STAGES, least_stages, decltype(kernel)::GROUPS);
        if (fits) visit(kernel, plan);
        return fits;
    };
    if (strict) return takes(Forward<48, 2, true>(), 2) || takes(Forward<24, 2, true>(), 1);
    if (OUT_CHANNELS > 48 && takes(Forward<96, 4, false>(), 2)) return true;
    return takes(Forward<48, 3, false>(), 2) || takes(Forward<24, 2, false>(), 1);
}

// The floats that the packed weights take; 0 where the plain kernel is used.
int64_t packed_weights(bool strict, int64_t batch, int height, int width) {
    int64_t floats = 0;
    visit_forward(make_shape(nullptr, batch, height, width), strict,
                  [&](auto kernel, const Plan&) { floats = decltype(kernel)::PACKED_FLOATS; });
    return floats;
}

template <class Kernel>
static cudaError_t allow_shared(Kernel* kernel, int64_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// out (batch, OUT_CHANNELS, out_h, out_w); `packed` has packed_weights() floats; bias may be null.
cudaError_t launch_convolve(const float* x, const float* weight, const float* bias, float* packed, float* out, bool strict,
                            int64_t batch, int height, int width, cudaStream_t stream) {
    const Shape shape = make_shape(x, batch, height, width);
    const Tensors tensors = {x, weight, bias, out};
    cudaError_t error = cudaSuccess;
    const bool fast = visit_forward(shape, strict, [&](auto kernel, const Plan& plan) {
        using F = decltype(kernel);
        uint4* const units = reinterpret_cast<uint4*>(packed);
        const auto pack = pack_weights<F>;
        pack<<<F::GROUPS * F::OUTS, PACK_THREADS, 0, stream>>>(weight, units);
        const auto convolution = convolve<F>;
        error = allow_shared(convolution, F::bytes(plan));
        if (error == cudaSuccess)
            convolution<<<plan.blocks * F::GROUPS, THREADS, F::bytes(plan), stream>>>(shape, plan, tensors, units);
    });
    if (!fast)
        plain_convolve<<<blocks_of(batch * OUT_CHANNELS * shape.out_plane(), PLAIN_THREADS), PLAIN_THREADS, 0, stream>>>(shape,
                                                                                                                     tensors);
    return error;
}

// How the gradients are shared: `plan.blocks` splits of the tiles, each of CHUNKS * GROUPS blocks, so that all SMs have one.
// The order of additions depends on it.
template <class G>
static bool gradient_plan(Plan& plan, const Shape& shape) {
    return G::FITS && make_plan<G>(plan, shape, 1, 1, G::CHUNKS * G::GROUPS);
}

// The floats between the kernels; none where the plain kernel is used.
int64_t gradient_terms(bool strict, int64_t batch, int height, int width) {
    const Shape shape = make_shape(nullptr, batch, height, width);
    Plan plan;
    if (strict) return gradient_plan<Gradient<true>>(plan, shape) ? plan.blocks * Gradient<true>::FLOATS : 0;
    return gradient_plan<Gradient<false>>(plan, shape) ? plan.blocks * Gradient<false>::FLOATS : 0;
}

template <class G>
static cudaError_t launch_gradient(const Shape& shape, const float* x, const float* grad, float* terms, float* grad_weight,
                                   float* grad_bias, cudaStream_t stream) {
    Plan plan;
    if (!gradient_plan<G>(plan, shape)) {
        plain_gradients<<<blocks_of((WEIGHTS + OUT_CHANNELS) * WARP, PLAIN_THREADS), PLAIN_THREADS, 0, stream>>>(
            shape, x, grad, grad_weight, grad_bias);
        return cudaSuccess;
    }
    const auto gradient = weight_gradient<G>;
    const auto add = add_splits<G>;
    const cudaError_t error = allow_shared(gradient, G::bytes(plan));
    if (error != cudaSuccess) return error;
    gradient<<<plan.blocks * G::CHUNKS * G::GROUPS, THREADS, G::bytes(plan), stream>>>(shape, plan, x, grad, terms);
    add<<<blocks_of(G::FLOATS, SUM_TERMS), SUM_THREADS, 0, stream>>>(terms, grad_weight, grad_bias, plan.blocks);
    return cudaSuccess;
}

// grad_weight and grad_bias may be null; `terms` has gradient_terms floats.
cudaError_t launch_parameter_gradients(const float* x, const float* grad, float* terms, float* grad_weight, float* grad_bias,
                                       bool strict, int64_t batch, int height, int width, cudaStream_t stream) {
    const Shape shape = make_shape(x, batch, height, width);
    return (strict ? launch_gradient<Gradient<true>> : launch_gradient<Gradient<false>>)(shape, x, grad, terms, grad_weight,
                                                                                       grad_bias, stream);
}
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
#include <torch/version.h>

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

int64_t packed_weights(bool strict, int64_t batch, int height, int width);
int64_t gradient_terms(bool strict, int64_t batch, int height, int width);
cudaError_t launch_convolve(const float*, const float*, const float*, float*, float*, bool, int64_t, int, int, cudaStream_t);
cudaError_t launch_parameter_gradients(const float*, const float*, float*, float*, float*, bool, int64_t, int, int,
                                       cudaStream_t);

constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * KERNEL_H * KERNEL_W;

// PyTorch's setting for convolutions, read at each call, as PyTorch's do; one for all operations before PyTorch 2.9.
static bool is_strict() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
    return !at::globalContext().allowTF32CuDNN();
#elif TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 9
    return !at::globalContext().allowTF32CuDNN("conv");
#else
    return !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
#endif
}

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    TORCH_CHECK(tensor.defined(), message("alexnet_conv1: expected ", name, " to be a tensor, got None"));
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits, message("alexnet_conv1: expected ", name, " as a float32 CUDA tensor of shape ", shape,
                              " (-1: any), got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ",
                              tensor.device()));
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(), message("alexnet_conv1: expected all on ", expected.device(), ", got ",
                                                              name, " on ", tensor.device()));
}

static void check_blocks(int64_t threads) {
    TORCH_CHECK(threads / 256 < (1ll << 31) - 1, message("alexnet_conv1: ", threads, " threads are more than a grid has"));
}

// The input and weight of a pass, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    int64_t batch, height, width, out_h, out_w;
    at::Tensor x, weight;
    c10::cuda::CUDAGuard guard;
    cudaStream_t stream;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, at::IntArrayRef stride, at::IntArrayRef padding)
        : guard(checked(x_in, weight_in, stride, padding)) {
        x = x_in.contiguous(), weight = weight_in.contiguous();
        batch = x.size(0), height = x.size(2), width = x.size(3);
        out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1, out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
        stream = c10::cuda::getCurrentCUDAStream();
        int capability = 0;
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, x.get_device()));
        TORCH_CHECK(capability >= 8, message("alexnet_conv1 v4: expected a GPU of compute capability 8.0 or later, got ",
                                             capability, ".x; v1_direct runs on any"));
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding) {
        check("x", x, {-1, IN_CHANNELS, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
        check_device(x, "weight", weight);
        TORCH_CHECK(stride == at::IntArrayRef({STRIDE_H, STRIDE_W}) && padding == at::IntArrayRef({PAD_H, PAD_W}),
                    message("alexnet_conv1: built for stride ", at::IntArrayRef({STRIDE_H, STRIDE_W}), " and padding ",
                            at::IntArrayRef({PAD_H, PAD_W}), ", called with ", stride, " and ", padding));
        const int64_t height = x.size(2), width = x.size(3);
        TORCH_CHECK(height + 2 * PAD_H >= KERNEL_H && width + 2 * PAD_W >= KERNEL_W,
                    message("alexnet_conv1: a kernel of ", KERNEL_H, " x ", KERNEL_W, " does not fit into an image of ", height,
                            " x ", width, " padded by ", padding));
        TORCH_CHECK(height < (1ll << 30) && width < (1ll << 30),
                    message("alexnet_conv1: expected less than 2^30 rows and columns, got sizes ", x.sizes()));
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }
    std::array<int64_t, 4> out_sizes() const { return {batch, OUT_CHANNELS, out_h, out_w}; }
    at::Tensor checked_grad(const at::Tensor& grad) const {
        check("grad", grad, out_sizes());
        check_device(x, "grad", grad);
        return grad.contiguous();
    }
};

static float* pointer_to(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias_in,
                  at::IntArrayRef stride, at::IntArrayRef padding) {
    const Call call(x, weight, stride, padding);
    at::Tensor bias;
    if (bias_in) {
        check("bias", *bias_in, {OUT_CHANNELS});
        check_device(x, "bias", *bias_in);
        bias = bias_in->contiguous();
    }
    at::Tensor out = call.empty(call.out_sizes());
    if (out.numel() == 0) return out;
    const bool strict = is_strict();
    const int64_t floats = packed_weights(strict, call.batch, call.height, call.width);
    check_blocks(floats ? 0 : out.numel());
    at::Tensor packed = call.empty({floats});
    C10_CUDA_CHECK(launch_convolve(call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(),
                                   bias.defined() ? bias.const_data_ptr<float>() : nullptr, pointer_to(packed),
                                   pointer_to(out), strict, call.batch, call.height, call.width, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

// The gradients of weight and bias, of those that are wanted; the other is an empty tensor.
std::tuple<at::Tensor, at::Tensor> parameter_grads(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight,
                                                   at::IntArrayRef stride, at::IntArrayRef padding,
                                                   std::array<bool, 2> wanted) {
    const Call call(x, weight, stride, padding);
    const at::Tensor grad = call.checked_grad(grad_in);
    at::Tensor grad_weight, grad_bias, none = call.empty({0});
    if (wanted[0]) grad_weight = call.empty(weight.sizes());
    if (wanted[1]) grad_bias = call.empty({OUT_CHANNELS});
    const auto result = std::make_tuple(wanted[0] ? grad_weight : none, wanted[1] ? grad_bias : none);
    if (grad.numel() == 0) {
        if (wanted[0]) grad_weight.zero_();
        if (wanted[1]) grad_bias.zero_();
        return result;
    }
    const bool strict = is_strict();
    const int64_t floats = gradient_terms(strict, call.batch, call.height, call.width);
    check_blocks(floats ? 0 : 32 * (WEIGHTS + OUT_CHANNELS));
    at::Tensor terms = call.empty({floats});
    C10_CUDA_CHECK(launch_parameter_gradients(call.x.const_data_ptr<float>(), grad.const_data_ptr<float>(), pointer_to(terms),
                                              pointer_to(grad_weight), pointer_to(grad_bias), strict, call.batch, call.height,
                                              call.width, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return result;
}

// PyTorch's own: the gradient of images is rarely needed.
at::Tensor input_grad(const at::Tensor& grad_in, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
                      at::IntArrayRef padding) {
    const Call call(x, weight, stride, padding);
    const at::Tensor grad = call.checked_grad(grad_in);
    if (x.numel() == 0 || grad.numel() == 0) return call.empty(x.sizes()).zero_();
    return std::get<0>(at::convolution_backward(grad, call.x, call.weight, at::OptionalIntArrayRef(), stride, padding, {1, 1},
                                                false, {0, 0}, 1, {true, false, false}));
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
    sources = NAME, BINDING, CUDA, register  # bound here, so that another variant in the same notebook cannot replace them

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        conv = self.conv1
        constants = {"IN_CHANNELS": conv.in_channels, "OUT_CHANNELS": conv.out_channels}
        for name, values in (("KERNEL", conv.kernel_size), ("STRIDE", conv.stride), ("PAD", conv.padding)):
            constants |= {f"{name}_{axis}": value for axis, value in zip("HW", values, strict=True)}
        constants["SHARED_LIMIT_KB"] = SHARED_LIMIT_KB or 0
        return build(*self.sources, **constants)

    def forward(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        operators = getattr(torch.ops, self.namespace())
        return operators.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def main():
    from torch.utils import benchmark, cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew().to("cpu" if emulated else "cuda")
    x = torch.randn(2, 3, 67, 63) if emulated else torch.randn(256, 3, 224, 224, device="cuda")
    plain = model.conv1

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
