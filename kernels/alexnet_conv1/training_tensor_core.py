"""alexnet_conv1, training on the tensor cores: v4's forward pass, and the gradients of weights and bias by the same units.

Why it is faster
    PyTorch's gradient of the weights reads x and grad as images of NHWC, after copies. Here a unit's 8 taps at 8 positions,
    transposed by ldmatrix, are a quarter of operand a as they lie, and a tile's im2col is written nowhere. All 12 warps load,
    scale and convert a tile, then all multiply it, while the next one is on its way to their registers: with 4 producer warps
    the other 8 would wait. Issue bound: converting takes as long as multiplying.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    grad_weight[o,c,u,v] = sum over b,i,j of grad[b,o,i,j] * x[b, c, i*stride_h - pad_h + u, j*4 - pad_w + v]
    grad_bias[o] = sum over b,i,j of grad[b,o,i,j], in fp32
    Each channel of a tile of x and each tile of grad are scaled by a power of two; sums are rescaled where it changes. Strict:
    fp16x3, sums begin again with each tile. NaN and infinities give NaN at the taps that meet them.

Launches
    convolve: a block of 384 threads an SM, tiles of 256 positions x 96 (strict 48) outputs; pack_weights before it;
    weight_gradient: a block of 384 threads an SM, 46 KB (strict 91), tiles of 128 positions, 363 taps x 48 outputs;
    add_splits: a block of 256 threads for 128 sums, over all splits of the batch.

Floor
    Of the gradient 154 MB of x and 297 MB of grad in, 0.106 ms on an H200; 66 GFLOP, padded: 0.107 at 622 TFLOP/s.

Takes
    float32 CUDA tensors (batch, in_channels, height, width); any channels, kernel, stride, zero padding, bias or none,
    on compute capability 8.0 or later; PyTorch computes what visit_forward does not serve, the input's gradient and second
    ones. Deterministic for a number of SMs. MIT; copy it.
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

NAME = "alexnet_conv1_training_tensor_core"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
SHARED_LIMIT_KB = 0  # builds as for a device with that much shared memory a block; 0: what the device has
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, SHARED_LIMIT_KB.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

using Element = float;  // of all tensors

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
template <class T>
__host__ DEVICE constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
__host__ DEVICE constexpr T larger(T a, T b) { return a > b ? a : b; }

// ---- constants and layout
// A unit is 16 bytes of fp16 values: 4 columns of 2 rows of x, columns 0 and 1 of both rows first. Output positions side by
// side read units side by side, so a row of ldmatrix's 8 x 8 matrix is a position's unit, and another tap is another address.
// Row pairs are sorted by their remainder modulo PHASES into planes: within a plane the next output row reads the next row.
//
// What a block of convolve keeps in shared memory; bytes at the original's size, strict in brackets:
//
//     weights  82,944 (82,944)          [high, low][channel][unit][output], 16 B     consumers fill it once, by cp.async
//     staging  17,408 (9,216)           8 channels of each consumer warp's outputs   a warp writes it, and out from it
//     scales   768 (384)                what undoes the weights' scales; biases      ends at FIXED_BYTES
//     stages   4 x 14,592 (4 x 29,184)  [high, low][plane][row][unit], 16 B          producers fill one (full mbarrier),
//     others   112                      mbarriers, exponents, warps' largest         consumers empty it (empty mbarrier)
constexpr bool FITS_UNITS = STRIDE_W == 4 && STRIDE_H % 2 == 0;
constexpr int TAPS = KERNEL_H * KERNEL_W, QUADS = ceil_div(KERNEL_W, 4);  // QUADS: units across the kernel
constexpr int PHASES = larger(STRIDE_H / 2, 1), TAP_PAIRS = ceil_div(KERNEL_H, 2);
constexpr int PLANES = smaller(PHASES, TAP_PAIRS), TAP_ROWS = ceil_div(TAP_PAIRS, PHASES);
// A position reads UNITS of a channel, [row][column][plane]. A step is one instruction's inner size, two of them.
constexpr int UNITS = PLANES * TAP_ROWS * QUADS, STEPS = ceil_div(UNITS, 2), UNIT_BYTES = 16;

// A block: consumer warps multiply and write, producer warps load, scale and convert. One block an SM has all its registers.
constexpr int WARP = 32, CONSUMER_WARPS = 8, PRODUCER_WARPS = 4;
constexpr int CONSUMERS = CONSUMER_WARPS * WARP, PRODUCERS = PRODUCER_WARPS * WARP, THREADS = CONSUMERS + PRODUCERS;

// ---- PTX
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Returns once the phase of this parity is complete.
DEVICE void mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
// Copies 16 bytes, or writes zeros where `bytes` is 0; then `from` is not read.
DEVICE void cp_async_cg_16(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Waits for all cp.async of this thread.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void st_shared_v2_u32_if(bool exists, uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0;\n@exists st.shared.v2.u32 [%0], {%1, %2};\n}"
                 ::"r"(address), "r"(a), "r"(b), "r"(static_cast<uint32_t>(exists)) : "memory");
}
// Four matrices of 8 rows x 16 bytes: lane 8 * i + r has the address of row r of matrix i. Lane 4 * n + q gets elements 2 * q
// and 2 * q + 1 of row n.
DEVICE uint4 ldmatrix_m8n8_x4(uint32_t row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
    return v;
}
// As ldmatrix_m8n8_x4, transposed: lane 4 * n + q gets elements 2 * q and 2 * q + 1 of column n.
DEVICE uint4 ldmatrix_m8n8_x4_trans(uint32_t row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
    return v;
}
DEVICE uint32_t ld_shared_u32(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
DEVICE void st_shared_u32(uint32_t at, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
// d (16 x 8) += a (16 x 16) * b (16 x 8), fp16 with fp32 sums. Lane 4 * n + q has columns 2 * q and 2 * q + 1 of d, rows n and
// n + 8.
DEVICE void mma_m16n8k16_f32_f16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// d += a * b; STRICT: error-compensated, by residuals, too (low), small terms first. b: four words, of two products.
template <bool STRICT>
DEVICE void multiply(float (&d)[4], const uint4& a, const uint4& a_low, const uint4& b, const uint4& b_low, bool second) {
    if (STRICT) {
        mma_m16n8k16_f32_f16(d, a_low, second ? b.z : b.x, second ? b.w : b.y);
        mma_m16n8k16_f32_f16(d, a, second ? b_low.z : b_low.x, second ? b_low.w : b_low.y);
    }
    mma_m16n8k16_f32_f16(d, a, second ? b.z : b.x, second ? b.w : b.y);
}
DEVICE uint32_t fp16_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// The residual of two values' rounding to fp16, as fp16; NaN of an infinity.
DEVICE uint32_t fp16_residual(float a, float b) {
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

// ---- the static tile scheduler: blocks take tiles in turn
struct Shape {
    int64_t batch;
    int height, width, out_h, out_w;
    bool paired;  // rows of x begin at multiples of 8 bytes, and so do pairs of columns that exist

    __host__ DEVICE int64_t x_size() const { return static_cast<int64_t>(height) * width; }  // of a channel
    __host__ DEVICE int64_t out_size() const { return static_cast<int64_t>(out_h) * out_w; }
};

// A line is output positions that lie side by side in memory: a whole channel, or a row of it where the image is so
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
    int sample, first;      // of the tile's positions: in the channel
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

// The pipeline between producers and consumers, at a stage and its parity. All threads of a side arrive.
struct Pipeline {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    int* exponents;           // of a stage: x was scaled by 2^exponent
    uint32_t* warp_largest;   // [2][PRODUCER_WARPS]
    int stage_bytes, stages, stage = 0;
    uint32_t parity = 0;

    static __host__ int64_t bytes(int stage_bytes, int stages) {
        return static_cast<int64_t>(stages) * (stage_bytes + 16 + 4) + 2 * PRODUCER_WARPS * 4;
    }
    DEVICE Pipeline(char* memory, int stage_bytes, int stages) : stage_bytes(stage_bytes), stages(stages) {
        data = shared_address(memory), memory += stages * stage_bytes;
        barriers = shared_address(memory), memory += stages * 16;
        exponents = reinterpret_cast<int*>(memory);
        warp_largest = reinterpret_cast<uint32_t*>(exponents + stages);
    }
    DEVICE uint32_t full() const { return barriers + stage * 8; }
    DEVICE uint32_t empty() const { return barriers + (stages + stage) * 8; }
    DEVICE uint32_t address() const { return data + stage * stage_bytes; }
    DEVICE int& exponent() const { return exponents[stage]; }
    DEVICE void advance() { if (++stage == stages) stage = 0, parity ^= 1; }
};

// ---- loading: from device memory through registers to shared memory
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
    const Element* x;  // their first column, of row 0
    int top, left;

    DEVICE Rows(const Shape& shape, const Tile& tile, const Element* all, int channel) {
        top = tile.row * STRIDE_H - PAD_H, left = tile.left * STRIDE_W - PAD_W;
        x = all + (static_cast<int64_t>(tile.sample) * IN_CHANNELS + channel) * shape.x_size() + left;
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
            const Element* row = rows.x + static_cast<int64_t>(h) * shape.width + 2 * first;
            UNROLL for (int r = 0; r < 2; ++r, row += shape.width) {
                const bool row_exists =
                    pair < plan.row_pairs() && static_cast<unsigned>(h + r) < static_cast<unsigned>(shape.height);
                const Element* from = row;
                UNROLL for (int c = 0; c < CHANNELS; ++c, from += shape.x_size())
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
    // fp16 values of v * scale; STRICT: their residuals, too, `low` bytes behind.
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
                st_shared_v2_u32_if(exists, address, fp16_pair(a, b), fp16_pair(c, d));
                if (STRICT) st_shared_v2_u32_if(exists, address + low, fp16_residual(a, b), fp16_residual(c, d));
            }
        }
    }
};

// ---- the forward pass: positions x taps times taps x outputs
// Each consumer warp has M_TILES x 16 positions and WARP_OUTS outputs.
template <int OUTS_, int M_TILES_, bool STRICT_>
struct Forward {
    static constexpr bool FITS = FITS_UNITS;
    static constexpr int OUTS = OUTS_, M_TILES = M_TILES_;
    static constexpr bool STRICT = STRICT_;
    static constexpr int WARP_OUTS = smaller(OUTS, 48), N_TILES = WARP_OUTS / 8, WARPS_ACROSS = OUTS / WARP_OUTS;
    static constexpr int WARP_POSITIONS = 16 * M_TILES, POSITIONS = WARP_POSITIONS * CONSUMER_WARPS / WARPS_ACROSS;
    static constexpr int GROUPS = ceil_div(OUT_CHANNELS, OUTS), PARTS = STRICT ? 2 : 1, BLOCKS_A_TILE = GROUPS, MOST_STAGES = 4;
    static constexpr int PAIRS = POSITIONS > 256 ? 5 : 4;  // of a producer's batch
    static constexpr int CHANNEL_BYTES = STEPS * 2 * OUTS * UNIT_BYTES;
    static constexpr int64_t WEIGHT_BYTES = static_cast<int64_t>(PARTS) * IN_CHANNELS * CHANNEL_BYTES;
    // A warp's outputs on their way out: 8 channels. The pitch avoids bank conflicts.
    static constexpr int STAGING_ROW = WARP_POSITIONS + 4, STAGING_BYTES = CONSUMER_WARPS * 8 * STAGING_ROW * 4;
    static constexpr int64_t FIXED_BYTES = WEIGHT_BYTES + STAGING_BYTES + 2 * OUTS * 4;
    static constexpr int64_t PACKED_FLOATS = GROUPS * (WEIGHT_BYTES / 4 + OUTS);  // then what undoes their scales
    static __host__ int64_t bytes(const Plan& plan) {
        return FIXED_BYTES + Pipeline::bytes(PARTS * plan.x_bytes(), plan.stages);
    }
};

struct Tensors {
    const Element *__restrict__ x, *__restrict__ weight, *__restrict__ bias;  // bias: or null
    Element* __restrict__ out;
};

// A block an output channel: scales its weights by a power of two and packs them. A factor of two scales must not be too small.
constexpr int WEIGHT_TARGET = 14, MOST_WEIGHT_EXPONENT = 62, PACK_THREADS = 128;
template <class F>
__global__ void __launch_bounds__(PACK_THREADS) pack_weights(const Element* __restrict__ weight, uint4* __restrict__ packed) {
    __shared__ uint32_t warp_largest[PACK_THREADS / WARP];
    constexpr int PART = IN_CHANNELS * STEPS * 2 * F::OUTS;
    const int o = blockIdx.x, group = o / F::OUTS;
    const Element* const mine = weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS;
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
            to[PART] = make_uint4(fp16_residual(w[0], w[1]), fp16_residual(w[2], w[3]), fp16_residual(w[4], w[5]),
                                  fp16_residual(w[6], w[7]));
    }
    float* const unscales = reinterpret_cast<float*>(packed + static_cast<int64_t>(F::GROUPS) * F::PARTS * PART);
    if (threadIdx.x == 0) unscales[o] = power_of_2(-exponent);
}

// Producers load a channel's rows for a tile, find their scale, convert and store them. The next batch is asked for as soon as
// one is stored. Where rows take more than a batch, each batch is loaded twice: for the scale, and to be stored.
constexpr int NOT_FINITE = -1000;  // instead of a tile's exponent: x holds a NaN or an infinity
template <class F>
DEVICE void produce(const Shape& shape, const Plan& plan, Pipeline& pipeline, const Element* x) {
    using RowBatch = Batch<1, F::PAIRS, PRODUCER_WARPS>;
    const bool whole = RowBatch::is_whole(plan);
    const int warp = threadIdx.x / WARP % PRODUCER_WARPS;
    int number = blockIdx.x / F::GROUPS, channel = 0, first_pair = 0, first_column = 0, exponent = MOST_EXPONENT, slot = 0;
    bool storing = whole;
    uint32_t key = 0;
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
            bar_sync(1, PRODUCERS);
            UNROLL for (int i = 0; i < PRODUCER_WARPS; ++i) key = larger(key, keys[i]);
            exponent = smaller(exponent, key / 2 < INFINITE ? plane_exponent(key / 2) : NOT_FINITE);
            key = 0;
            mbarrier_test_wait(pipeline.empty(), pipeline.parity ^ 1);
        }
        if (storing)
            batch.template store<F::STRICT>(0, pipeline.address(), plan.x_bytes(), plan, first_pair, first_column,
                                            power_of_2(exponent));
        if (is_last && storing) {
            if (threadIdx.x == CONSUMERS) pipeline.exponent() = exponent;
            mbarrier_arrive(pipeline.full());
            pipeline.advance();
            rows.x += shape.x_size();
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
#pragma unroll (F::STRICT || STEPS > 16 ? 1 : STEPS)
    for (int step = 0; step < STEPS; ++step) {
        const int here = unit_offset(plan, 2 * step), to_second = unit_offset(plan, 2 * step + 1) - here;
        const uint32_t offset = (here + (second ? to_second : 0)) * UNIT_BYTES;
        uint4 a[F::PARTS][F::M_TILES], b[F::PARTS][F::N_TILES / 2 + F::N_TILES % 2];
        UNROLL for (int part = 0; part < F::PARTS; ++part) {
            UNROLL for (int m = 0; m < F::M_TILES; ++m) a[part][m] = ldmatrix_m8n8_x4(x[m] + part * plan.x_bytes() + offset);
            UNROLL for (int j = 0; j < F::N_TILES; j += 2)
                b[part][j / 2] = ldmatrix_m8n8_x4(weights + part * (F::WEIGHT_BYTES / 2) +
                                                  (step * 2 * F::OUTS + smaller(8 * j, F::WARP_OUTS - 16)) * UNIT_BYTES);
        }
        UNROLL for (int m = 0; m < F::M_TILES; ++m)
            UNROLL for (int j = 0; j < F::N_TILES; ++j)
                multiply<F::STRICT>(F::STRICT ? parts[F::STRICT ? m : 0][j] : sums[m][j], a[0][m], a[F::PARTS - 1][m],
                                    b[0][j / 2], b[F::PARTS - 1][j / 2], j == F::N_TILES - 1 || j % 2);
    }
    // The tensor core cuts off what a sum does not hold, always towards zero: so strict sums begin again with each channel and
    // are added as fp32 numbers.
    if constexpr (F::STRICT)
        UNROLL for (int i = 0; i < F::M_TILES * F::N_TILES * 4; ++i)
            sums[i / (4 * F::N_TILES)][i / 4 % F::N_TILES][i % 4] += parts[i / (4 * F::N_TILES)][i / 4 % F::N_TILES][i % 4];
}

// Writes a warp's outputs, `count` positions from `out` on. Through staging, 8 channels at a time, so that stores are
// coalesced. scales: what undoes the weights' scales, then the biases.
template <class F>
DEVICE void write_outputs(const float (&sums)[F::M_TILES][F::N_TILES][4], int exponent, const float* scales, float* staging,
                          Element* __restrict__ out, int64_t out_size, int channels, int count) {
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
        UNROLL for (int row = 0; row < 8; ++row, out += out_size)
            UNROLL for (int i = lane; i < F::WARP_POSITIONS; i += WARP)
                if (8 * j + row < channels && i < count) out[i] = staging[row * F::STAGING_ROW + i];
    }
}

// An output in plain fp32: with the tensor core, zero weights would spread a NaN or an infinity.
DEVICE float fp32_output(const Shape& shape, const Tensors& tensors, int64_t sample, int o, int64_t position) {
    const int i = static_cast<int>(position / shape.out_w);
    const int j = static_cast<int>(position - static_cast<int64_t>(i) * shape.out_w);
    const int top = i * STRIDE_H - PAD_H, left = j * STRIDE_W - PAD_W;
    float sum = 0;
    UNROLL_1 for (int c = 0; c < IN_CHANNELS; ++c) {
        const Element* plane = tensors.x + (sample * IN_CHANNELS + c) * shape.x_size();
        const Element* taps = tensors.weight + (static_cast<int64_t>(o) * IN_CHANNELS + c) * TAPS;
        UNROLL_1 for (int k = 0; k < TAPS; ++k) {
            const int h = top + k / KERNEL_W, w = left + k % KERNEL_W;
            const bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
            if (inside) sum += plane[static_cast<int64_t>(h) * shape.width + w] * taps[k];
        }
    }
    return tensors.bias ? sum + tensors.bias[o] : sum;
}

template <class F>
DEVICE void consume(const Shape& shape, const Plan& plan, const Tensors& tensors, Pipeline& pipeline, const char* weights,
                    const float* scales, float* staging) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_out = warp % F::WARPS_ACROSS * F::WARP_OUTS;
    const int first_channel = blockIdx.x % F::GROUPS * F::OUTS + first_out;
    staging += warp * 8 * F::STAGING_ROW, scales += first_out;
    const uint32_t first_weight =
        shared_address(weights) + (lane / 8 % 2 * F::OUTS + first_out + lane / 16 * 8 + lane % 8) * UNIT_BYTES;
    UNROLL_1 for (int number = blockIdx.x / F::GROUPS; number < plan.tiles; number += plan.blocks) {
        const Tile tile(plan, number);
        const int first_position = warp / F::WARPS_ACROSS * F::WARP_POSITIONS;
        uint32_t units[F::M_TILES];
        UNROLL for (int m = 0; m < F::M_TILES; ++m)
            units[m] = tile.unit(plan, first_position + 16 * m + lane % 16) * UNIT_BYTES;
        float sums[F::M_TILES][F::N_TILES][4] = {};
        int exponent = 0;
        UNROLL_1 for (int channel = 0; channel < IN_CHANNELS; ++channel) {
            mbarrier_test_wait(pipeline.full(), pipeline.parity);
            const int change = pipeline.exponent() - exponent;
            exponent += change;
            if (channel > 0 && change != 0)
                UNROLL for (int i = 0; i < F::M_TILES * F::N_TILES * 4; ++i) {
                    float& sum = sums[i / (4 * F::N_TILES)][i / 4 % F::N_TILES][i % 4];
                    sum = scaled(sum, change);
                }
            uint32_t x[F::M_TILES];
            UNROLL for (int m = 0; m < F::M_TILES; ++m) x[m] = pipeline.address() + units[m];
            multiply_stage<F>(x, first_weight + channel * F::CHANNEL_BYTES, plan, sums);
            mbarrier_arrive(pipeline.empty());
            pipeline.advance();
        }
        const int count = smaller(tile.count - first_position, F::WARP_POSITIONS);
        const int channels = smaller(F::WARP_OUTS, OUT_CHANNELS - first_channel);
        const int64_t plane = static_cast<int64_t>(tile.sample) * OUT_CHANNELS + first_channel;
        const int position = tile.first + first_position;
        Element* const out = tensors.out + plane * shape.out_size() + position;
        if (exponent != NOT_FINITE) {
            write_outputs<F>(sums, exponent, scales, staging, out, shape.out_size(), channels, count);
        } else {
            UNROLL_1 for (int i = lane; i < count * channels; i += WARP)
                out[i / count * shape.out_size() + i % count] =
                    fp32_output(shape, tensors, tile.sample, first_channel + i / count, position + i % count);
        }
    }
}

template <class F>
__global__ void __launch_bounds__(THREADS, 1)
    convolve(const Shape shape, const Plan plan, const Tensors tensors, const uint4* __restrict__ packed) {
    extern __shared__ __align__(128) char memory[];
    Pipeline pipeline(memory + F::FIXED_BYTES, F::PARTS * plan.x_bytes(), plan.stages);
    float* const staging = reinterpret_cast<float*>(memory + F::WEIGHT_BYTES);
    float* const scales = staging + F::STAGING_BYTES / 4;
    if (threadIdx.x == 0)
        for (Pipeline each = pipeline; each.stage < plan.stages; ++each.stage)
            mbarrier_init(each.full(), PRODUCERS), mbarrier_init(each.empty(), CONSUMERS);
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        produce<F>(shape, plan, pipeline, tensors.x);
    } else {
        const int group = blockIdx.x % F::GROUPS;
        constexpr int WEIGHT_UNITS = F::WEIGHT_BYTES / UNIT_BYTES;
        const uint4* const units = packed + static_cast<int64_t>(group) * WEIGHT_UNITS;
        for (int i = threadIdx.x; i < WEIGHT_UNITS; i += CONSUMERS)
            cp_async_cg_16(shared_address(memory) + i * UNIT_BYTES, units + i, 16);
        const float* const unscales = reinterpret_cast<const float*>(packed + static_cast<int64_t>(F::GROUPS) * WEIGHT_UNITS);
        for (int i = threadIdx.x; i < F::OUTS; i += CONSUMERS) {
            const int o = group * F::OUTS + i;
            scales[i] = unscales[o];
            scales[F::OUTS + i] = tensors.bias && o < OUT_CHANNELS ? tensors.bias[o] : 0;
        }
        cp_async_wait_all();
        bar_sync(2, CONSUMERS);
        consume<F>(shape, plan, tensors, pipeline, memory, scales, staging);
    }
}

// ---- the gradient of the weights: x (taps x positions) times grad (positions x outputs), summed over all positions
// A unit's 8 taps at 8 positions, transposed by ldmatrix, are a quarter of a left operand. A tile of positions is in shared
// memory at a time. While it is multiplied, the next one is on its way to registers of all warps.
template <bool STRICT_>
struct Gradient {
    static constexpr bool STRICT = STRICT_;
    static constexpr int PARTS = STRICT ? 2 : 1, POSITIONS = 128, WARPS = THREADS / WARP;
    // What a block keeps in shared memory; bytes at the original's size, strict in brackets:
    //   | keys, exponents, a unit for each tap: 464 | [high, low]( x [channel][plane][row][unit]: 32,832 (2 x 32,832) |
    //   | grad [output][position]: 13,056 (2 x 13,056) ) | each position's unit: 512 |
    // A warp has every sixth tile of 16 taps, and half of the block's outputs.
    static constexpr int OUTS = 48, WARPS_ACROSS = 2, WARPS_DOWN = WARPS / WARPS_ACROSS, WARP_OUTS = OUTS / WARPS_ACROSS;
    static constexpr int GROUPS = ceil_div(OUT_CHANNELS, OUTS), N_TILES = WARP_OUTS / 8;
    static constexpr int MOST_TILES = 5 * WARPS_DOWN, MOST_CHUNK = smaller(3, MOST_TILES / STEPS);  // as registers permit
    static constexpr bool FITS = FITS_UNITS && MOST_CHUNK > 0;
    static constexpr int CHUNKS = ceil_div(IN_CHANNELS, larger(MOST_CHUNK, 1)), CHUNK = ceil_div(IN_CHANNELS, CHUNKS);
    static constexpr int BLOCKS_A_TILE = CHUNKS * GROUPS, MOST_STAGES = 1;
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
    DEVICE void load(const Shape& shape, const Plan& plan, const GradientPart& part, const Tile& tile, const Element* x,
                     const Element* grad) {
        const int lane = threadIdx.x % WARP;
        const int64_t plane = static_cast<int64_t>(tile.sample) * OUT_CHANNELS + part.first_out + output(0);
        const Element* from = grad + plane * shape.out_size() + tile.first + 2 * lane;
        UNROLL for (int i = 0; i < OUTS; ++i, from += G::WARPS * shape.out_size()) {
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
    weight_gradient(const Shape shape, const Plan plan, const Element* __restrict__ x, const Element* __restrict__ grad,
                    float* __restrict__ terms) {
    extern __shared__ __align__(128) char memory[];
    uint32_t* const keys = reinterpret_cast<uint32_t*>(memory);                           // [grad, channels][warp]
    int* const exponents = reinterpret_cast<int*>(keys + (G::CHUNK + 1) * G::WARPS);      // of sums, of each channel
    int* const changes = exponents + G::CHUNK;                                            // since the tile before
    int* const tap_units = changes + G::CHUNK;  // from a position's first unit, in bytes; the lowest bits are the channel
    const uint32_t stage = shared_address(memory + G::KEYS_BYTES);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, low = G::low_bytes(plan);
    constexpr int PARTS = G::BLOCKS_A_TILE;
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
                st_shared_u32(address, fp16_pair(v.x * grad_scale, v.y * grad_scale));
                if (G::STRICT) st_shared_u32(address + low, fp16_residual(v.x * grad_scale, v.y * grad_scale));
                bias_sums[i] += v.x + v.y;
            }
        if (threadIdx.x < G::POSITIONS) st_shared_u32(units + threadIdx.x * 4, tile.unit(plan, threadIdx.x) * UNIT_BYTES);
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
            uint32_t next_unit = ld_shared_u32(lane_unit);
            UNROLL_1 for (int first = 0; first < tile.count; first += 16) {
                const uint32_t unit = next_unit;
                next_unit = ld_shared_u32(lane_unit + smaller(first + 16, G::POSITIONS - 16) * 4);
                uint4 b[G::PARTS][2];  // of outputs 0 to 15 and 8 to 23
                UNROLL for (int i = 0; i < 2 * G::PARTS; ++i)
                    b[i / 2][i % 2] = ldmatrix_m8n8_x4(lane_grad + i / 2 * low + i % 2 * 8 * G::GRAD_ROW + first * 2);
                UNROLL for (int m = group; m < smaller(group + AT_ONCE, G::M_TILES); ++m) {
                    uint4 a[G::PARTS];
                    UNROLL for (int p = 0; p < G::PARTS; ++p) a[p] = ldmatrix_m8n8_x4_trans(taps[m] + unit + p * low);
                    if ((m + 1) * G::WARPS_DOWN > G::CHUNK * STEPS && m * G::WARPS_DOWN + down >= G::CHUNK * STEPS) break;
                    UNROLL for (int j = 0; j < G::N_TILES; ++j)
                        multiply<G::STRICT>(G::STRICT ? parts[m - group][j] : sums[m][j], a[0], a[G::PARTS - 1],
                                            b[0][j / 2], b[G::PARTS - 1][j / 2], j > 0);
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
    add_splits(const float* __restrict__ terms, Element* __restrict__ grad_weight,
               Element* __restrict__ grad_bias, int splits) {
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

// ---- launches
static Shape make_shape(const Element* x, int64_t batch, int64_t height, int64_t width) {
    Shape s;
    s.batch = batch, s.height = height, s.width = width;
    s.out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1, s.out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
    s.paired = width % 2 == 0 && PAD_W % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 8 == 0;
    return s;
}

// Calls visit(F(), plan) if that kernel takes the shape: if weights and a pipeline of `least_stages` or more fit into the
// device's shared memory. Whole channels are lines where they fit. Returns whether it does; there is no other predicate.
template <class F, class Visit>  // Forward or Gradient
static bool visit_kernel(const Shape& shape, int device, int least_stages, const Visit& visit) {
    int sm_count, shared_bytes;
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (SHARED_LIMIT_KB) shared_bytes = smaller(shared_bytes, SHARED_LIMIT_KB * 1024);
    if constexpr (F::FITS)
        for (const bool by_rows : {false, true})
            for (int stages = F::MOST_STAGES; stages >= least_stages; --stages) {
                const int columns = by_rows ? F::POSITIONS : shape.out_w, pitch = columns + QUADS - 1;
                const int64_t line = by_rows ? shape.out_w : shape.out_size(), lines = by_rows ? shape.out_h : 1;
                const int64_t of_line = (line + F::POSITIONS - 1) / F::POSITIONS, tiles = shape.batch * lines * of_line;
                if (pitch > 1 << 14 || line > 1 << 30 || tiles > 1 << 30) continue;
                const int rows = (by_rows ? 0 : (columns - 1 + F::POSITIONS - 1) / columns) + TAP_ROWS;
                Plan plan = {by_rows, F::POSITIONS, columns, pitch, rows, stages};
                plan.line = line, plan.lines = lines, plan.tiles_of_line = of_line, plan.tiles = tiles;
                plan.blocks = smaller(plan.tiles, larger(sm_count / F::BLOCKS_A_TILE, 1));
                if (F::bytes(plan) <= shared_bytes) return visit(F(), plan), true;
            }
    return false;
}

// The fastest kernel that takes the shape.
template <class Visit>
static bool visit_forward(const Shape& shape, int device, bool strict, const Visit& visit) {
    const auto takes = [&](auto kernel, int least) { return visit_kernel<decltype(kernel)>(shape, device, least, visit); };
    if (strict) return takes(Forward<48, 2, true>(), 2) || takes(Forward<24, 2, true>(), 1);
    if (OUT_CHANNELS > 48 && takes(Forward<96, 4, false>(), 2)) return true;
    return takes(Forward<48, 3, false>(), 2) || takes(Forward<24, 2, false>(), 1);
}

// The floats that the packed weights take; 0: what no kernel takes.
extern "C" int64_t count_packed(int64_t strict, int64_t batch, int64_t height, int64_t width, int64_t device) {
    int64_t floats = 0;
    visit_forward(make_shape(nullptr, batch, height, width), device, strict,
                  [&](auto kernel, const Plan&) { floats = decltype(kernel)::PACKED_FLOATS; });
    return floats;
}

// out (batch, OUT_CHANNELS, out_h, out_w); `packed` has count_packed() floats; bias may be null.
extern "C" int launch_convolve(const Element* x, const Element* weight, const Element* bias, float* packed, Element* out,
                               int64_t strict, int64_t batch, int64_t height, int64_t width, int64_t device,
                               cudaStream_t stream) {
    const Shape shape = make_shape(x, batch, height, width);
    const Tensors tensors = {x, weight, bias, out};
    cudaError_t error = cudaErrorNotSupported;
    visit_forward(shape, device, strict, [&](auto kernel, const Plan& plan) {
        using F = decltype(kernel);
        uint4* const units = reinterpret_cast<uint4*>(packed);
        const auto pack = pack_weights<F>;
        pack<<<F::GROUPS * F::OUTS, PACK_THREADS, 0, stream>>>(weight, units);
        const auto convolution = convolve<F>;
        const int bytes = static_cast<int>(F::bytes(plan));
        error = cudaFuncSetAttribute(convolution, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error == cudaSuccess)
            convolution<<<plan.blocks * F::GROUPS, THREADS, bytes, stream>>>(shape, plan, tensors, units);
    });
    return error == cudaSuccess ? cudaGetLastError() : error;
}

// How the gradients are shared: `plan.blocks` splits of the tiles, each of CHUNKS * GROUPS blocks, so that all SMs have one.
// The order of additions depends on it.
template <class Visit>
static bool visit_gradient(const Shape& shape, int device, bool strict, const Visit& visit) {
    if (strict) return visit_kernel<Gradient<true>>(shape, device, 1, visit);
    return visit_kernel<Gradient<false>>(shape, device, 1, visit);
}

// The floats between the gradient's kernels; 0: what they do not take.
extern "C" int64_t count_terms(int64_t strict, int64_t batch, int64_t height, int64_t width, int64_t device) {
    int64_t floats = 0;
    visit_gradient(make_shape(nullptr, batch, height, width), device, strict,
                   [&](auto kernel, const Plan& plan) { floats = plan.blocks * decltype(kernel)::FLOATS; });
    return floats;
}

// `terms` has count_terms() floats; grad_bias may be null.
extern "C" int launch_gradient(const Element* x, const Element* grad, float* terms, Element* grad_weight, Element* grad_bias,
                               int64_t strict, int64_t batch, int64_t height, int64_t width, int64_t device,
                               cudaStream_t stream) {
    const Shape shape = make_shape(x, batch, height, width);
    cudaError_t error = cudaErrorNotSupported;
    visit_gradient(shape, device, strict, [&](auto kernel, const Plan& plan) {
        using G = decltype(kernel);
        const auto gradient = weight_gradient<G>;
        const auto add = add_splits<G>;
        const int bytes = static_cast<int>(G::bytes(plan));
        error = cudaFuncSetAttribute(gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return;
        gradient<<<plan.blocks * G::BLOCKS_A_TILE, THREADS, bytes, stream>>>(shape, plan, x, grad, terms);
        add<<<ceil_div(G::FLOATS, SUM_TERMS), SUM_THREADS, 0, stream>>>(terms, grad_weight, grad_bias, plan.blocks);
    });
    return error == cudaSuccess ? cudaGetLastError() : error;
}
"""


# ---- The same text in all files, down to the next such line; python -m playground.command.shared_text writes it.
BUILDING = threading.Lock()  # the first calls of a model's replicas may come from several threads at once


@functools.cache
def kernels(*flags, name=NAME, text=CUDA, **macros):  # name and text of this file, whatever a notebook's next one calls so
    """Compile the text with these flags and macros, once a machine, and return the library."""
    flags = ["-O3", "-lineinfo", *flags, *(f"-D{key}={value}" for key, value in macros.items())]
    name = "_".join(map(str, [name, *macros.values()]))
    options = {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}  # before, torch's headers come along
    with BUILDING:
        return ctypes.CDLL(load_inline(name, "", text, extra_cuda_cflags=flags, is_python_module=False, **options))


def launch(function, *arguments):
    """Call a C function: tensors as pointers, None as null, ints as int64_t, floats; then the stream of the first's device."""
    if not function.argtypes:
        function.argtypes = [ctypes.c_double if isinstance(each, float) else ctypes.c_int64 for each in (*arguments, 0)]
    values = [each.data_ptr() if isinstance(each, torch.Tensor) else each or 0 for each in arguments]
    with torch.cuda.device(index := arguments[0].get_device()):  # -1: the CPU, under the emulator
        stream = torch.cuda.current_stream(index).cuda_stream if index >= 0 else 0
        if code := function(*values, stream):
            raise RuntimeError(f"{function.__name__}: CUDA error {code}")


def check(name, tensor, shape, device, dtype=torch.float32):
    """Raise RuntimeError unless a tensor is of this type and shape, on this device."""
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device != device:
        found = f"{tensor.dtype} of shape {[*tensor.shape]} on {tensor.device}"
        raise RuntimeError(f"expected {name} as {dtype} of shape {[*shape]} on {device}; got {found}")


# ---- What is this file's own.
SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor"
GRADIENT = (
    "(Tensor grad, Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, int needs) -> (Tensor, Tensor, Tensor)"
)
capability = functools.cache(torch.cuda.get_device_capability)


def is_direct(*operands):
    """Return whether only autograd looks on: nothing traces, casts or transforms; and data are on the first one's device."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(DEVICE) or torch.overrides.has_torch_function(operands):
        return False
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    try:
        return tensors[0].device.type == DEVICE and all(each.data_ptr() or not each.numel() for each in tensors)
    except RuntimeError:  # torch.func's tensors have no data
        return False


def is_strict():
    """Return whether PyTorch's settings forbid TF32 in convolutions."""
    conv = getattr(torch.backends.cudnn, "conv", None)  # from PyTorch 2.9 on
    return conv.fp32_precision != "tf32" if conv else not torch.backends.cudnn.allow_tf32


def count(function, *numbers):
    """Call a C function of int64_t that returns one."""
    if not function.argtypes:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(numbers)
    return function(*numbers)


def library_for(weight, stride, padding, kernels=kernels):
    """Return the library for these sizes."""
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W", "PAD_H", "PAD_W"
    return kernels(**dict(zip(names, (*weight.shape, *stride, *padding), strict=True)), SHARED_LIMIT_KB=SHARED_LIMIT_KB)


def original(x, weight, bias=None, stride=1, padding=0):
    return nn.functional.conv2d(x, weight, bias, stride, padding)


def convolve(x, weight, bias, stride, padding, library_for=library_for, original=original):
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
    if max(height, width) >= 2**30:
        raise RuntimeError(f"expected an image of fewer than 2^30 rows and columns; got {height} x {width}")
    if x.is_cuda and capability(x.device) < (8, 0):
        raise RuntimeError("expected a GPU of compute capability 8.0 or later; v1_direct runs on any")
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(batch, out_channels, room_h // stride_h + 1, room_w // stride_w + 1)
    if not out.numel():
        return out
    library, numbers = library_for(weight, stride, padding), (is_strict(), batch, height, width, x.device.index or 0)
    floats = count(library.count_packed, *numbers)
    if not floats or not count(library.count_terms, *numbers):
        limits = "a stride of 4 across and an even one down, weights for 24 outputs and a stage in shared memory"
        warnings.warn(f"PyTorch computes what these kernels do not take: {limits}", stacklevel=2)
    if not floats:
        return original(x, weight, bias, stride, padding)
    launch(library.launch_convolve, x, weight, bias, x.new_empty(floats), out, *numbers)
    return out


operator = torch.library.custom_op(f"{NAME}::forward", convolve, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(original)


def gradient(grad, x, weight, bias, stride, padding, needs, library_for=library_for):
    """Return the gradients of x (needs & 1), which is PyTorch's, weight and bias (needs & 2); else empty tensors."""
    check("grad", grad, grad.shape, x.device)
    grad, x, (batch, _, height, width) = grad.contiguous(), x.contiguous(), x.shape
    of_x, of_weight, of_bias = (grad.new_empty(0) for _ in range(3))
    library, numbers = library_for(weight, stride, padding), (is_strict(), batch, height, width, x.device.index or 0)
    if needs & 1:
        of_x = nn.grad.conv2d_input(x.shape, weight, grad, stride, padding)
    if needs & 2 and grad.numel() and (terms := count(library.count_terms, *numbers)):
        of_weight, of_bias = weight.new_empty(weight.shape), of_bias if bias is None else bias.new_empty(bias.shape)
        launch(library.launch_gradient, x, grad, x.new_empty(terms), of_weight, None if bias is None else of_bias, *numbers)
    elif needs & 2:
        of_weight = nn.grad.conv2d_weight(x, weight.shape, grad, stride, padding)
        of_bias = of_bias if bias is None else grad.sum((0, 2, 3))
    return of_x, of_weight, of_bias


def gradients(grad, x, weight, bias, stride, padding, needs):
    bits = (x, 1), (weight, 2), (bias, 2 if bias is not None else 0)
    return tuple(each.new_empty(each.shape) if needs & bit else grad.new_empty(0) for each, bit in bits)


of_gradients = torch.library.custom_op(f"{NAME}::gradient", gradient, mutates_args=(), device_types=DEVICE, schema=GRADIENT)
of_gradients.register_fake(gradients)


def backward(ctx, grad, original=original, gradient=gradient):
    """The gradient; that of a gradient (create_graph) is PyTorch's."""
    (x, weight, bias), wanted = ctx.saved_tensors, ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():
        tensors = [each for each in ctx.saved_tensors if each is not None]  # a bias may be missing
        found = torch.func.vjp(lambda *tensors: original(*tensors, **ctx.numbers), *tensors)[1](grad)
        return *found, *[None] * (5 - len(found))
    function = gradient if is_direct(grad, x, weight, bias) else torch.ops.alexnet_conv1_training_tensor_core.gradient
    found = function(grad, x, weight, bias, *ctx.numbers.values(), wanted[0] + 2 * any(wanted[1:]))
    return *[each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)], None, None


def setup_context(ctx, inputs, output):
    *tensors, stride, padding = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = {"stride": stride, "padding": padding}


operator.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    operator.register_autocast(DEVICE, torch.float32)


class Direct(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which takes longer than all else on the host."""

    backward = staticmethod(backward)

    @staticmethod
    def forward(ctx, *operands, function=convolve, setup_context=setup_context):
        output = function(*operands)
        setup_context(ctx, operands, output)
        return output


def call(*operands, direct=Direct):
    return (direct.apply if is_direct(*operands) else torch.ops.alexnet_conv1_training_tensor_core.forward)(*operands)


class ModelNew(nn.Module):
    operator = staticmethod(call)

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
