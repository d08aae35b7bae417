"""alexnet_conv1, v4: implicit GEMM on the tensor cores, on scaled fp16 operands; producer warps load and convert beside it.

Why it is faster
    v3 is bound by fp32 multiply-adds. Here a warp multiplies with mma.sync: fp16 has TF32's 11 bits at twice TF32's rate; a
    power of two for each tile restores the range. Four columns of two rows of x are 16 bytes of fp16, and neighbouring
    outputs, at stride 4, read neighbouring pieces: a row of ldmatrix's matrix is a position's piece, another tap is another
    address, and im2col is written nowhere. The kernel is persistent and warp-specialized: producer warps fill a multistage
    pipeline, so that consumer warps issue little but ldmatrix and mma. Tensor bound.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    Taps come in units of 2 rows and 4 columns: 11 x 11 as 12 x 12, the rest zeros. Each channel of a tile of x and each
    output channel's weights are scaled by a power of two: x is off by at most 2^-11 of itself, as in TF32, or by 2^-36 of the
    tile's largest. Strict (PyTorch forbids TF32): operands are two fp16 values each (fp16x3), which leaves 2^-22. A tile that
    reads a NaN or an infinity is computed in plain fp32. An infinite weight gives NaN in strict sums. 16-bit: no scales.

Launches
    convolve: a block of 384 threads an SM, 156 KB (strict 205), tiles of 256 positions x 96 (48) outputs. Where a block has
    99 KB: 90 KB (78), 384 (256) positions x 48 (24) outputs. pack_weights: a block of 128 threads an output channel.

Floor
    451 MB, 0.106 ms on an H200, in 16-bit types half. 66 GFLOP, padded: 0.107 at the 622 TFLOP/s that mma.sync reaches.

Takes
    float32, float16 or bfloat16 CUDA tensors (batch, in_channels, height, width); any channels, kernel, stride, padding, bias
    or none, on compute capability 8.0 or later; PyTorch computes what Choice does not take. The gradient is PyTorch's.
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

NAME = "alexnet_conv1_v4_tensor_core"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
SHARED_LIMIT_KB = 0  # builds as for a device with that much shared memory a block; 0: what the device has
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs INPUT, ELEMENT, STRICT, IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
// SHARED_LIMIT_KB.
#define DIGITS_float 24
#define DIGITS___half 11
#define DIGITS___nv_bfloat16 8
#define PASTE(a, b) a##b
#define DIGITS_OF(type) PASTE(DIGITS_, type)
#define DIGITS DIGITS_OF(ELEMENT)  // of an element's significand
#if DIGITS == 8                    // a header takes half a second to compile
#include <cuda_bf16.h>
#endif
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

using Element = ELEMENT;  // of weights, bias and outputs: float, __half or __nv_bfloat16
using Input = INPUT;      // of x: Element; or float, which is rounded to Element while it is loaded (autocast)
constexpr bool SCALED = DIGITS == 24;  // floats become fp16 times a power of two; 16-bit values are multiplied as they are
constexpr int ELEMENT_BYTES = sizeof(Element), PER_16 = 16 / ELEMENT_BYTES;  // PER_16: elements in 16 bytes

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
template <class T>
__host__ DEVICE constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
__host__ DEVICE constexpr T larger(T a, T b) { return a > b ? a : b; }

// ---- constants and layout
// A unit is 16 bytes of fp16 values: 4 columns of 2 rows of x, columns 0 and 1 of both rows first. Output positions side by
// side read units side by side, so a row of ldmatrix's 8 x 8 matrix is a position's unit, and another tap is another address.
// Row pairs are sorted by their remainder modulo PHASES into planes: within a plane the next output row reads the next row.
//
// What a block keeps in shared memory; bytes at the original's size, strict in brackets:
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
// d (16 x 8) += a (16 x 16) * b (16 x 8), fp16 or bf16 with fp32 sums. Lane 4 * n + q has columns 2 * q and 2 * q + 1 of d,
// rows n and n + 8.
DEVICE void mma_m16n8k16(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    if constexpr (DIGITS == 8)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// ---- elements and operands
// Explicit: PyTorch builds without the conversions of 16-bit types.
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(__half x) { return __half2float(x); }
#if DIGITS == 8
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE Element from_float(float x) { return __float2bfloat16_rn(x); }
#elif DIGITS == 11
DEVICE Element from_float(float x) { return __float2half_rn(x); }
#else
DEVICE Element from_float(float x) { return x; }
#endif
float2 pair_of(float);
__half2 pair_of(__half);
#if DIGITS == 8
__nv_bfloat162 pair_of(__nv_bfloat16);
#endif
using Pair = decltype(pair_of(Input()));  // two columns
DEVICE uint32_t operand_pair(float a, float b) {  // as the tensor core reads it
#if DIGITS == 8
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
#else
    const __half2 pair = __floats2half2_rn(a, b);
#endif
    return *reinterpret_cast<const uint32_t*>(&pair);
}
DEVICE uint32_t operand_pair(float2 v, float scale) { return operand_pair(v.x * scale, v.y * scale); }
template <class Pair>
DEVICE uint32_t operand_pair(const Pair& v, float) { return *reinterpret_cast<const uint32_t*>(&v); }  // of 16-bit values
// The residual of two values' rounding to fp16, as fp16; NaN of an infinity.
DEVICE uint32_t residual_pair(float a, float b) {
    const float2 rounded = __half22float2(__floats2half2_rn(a, b));
    return operand_pair(a - rounded.x, b - rounded.y);
}
DEVICE uint32_t warp_max(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }

// ---- powers of two
constexpr float LARGEST_POWER = 0x1p127f;
constexpr uint32_t INFINITE = 0x7f800000u;  // magnitudes are ordered as their bits are
constexpr int MOST_EXPONENT = 124;
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(uint32_t largest, int target) {
    return smaller(target + 126 - static_cast<int>(largest >> 23), MOST_EXPONENT);  // largest < 2^((largest >> 23) - 126)
}

// ---- a call, and the static tile scheduler: blocks take tiles in turn
struct Shape {
    int64_t batch;
    int height, width, out_h, out_w;
    bool paired;  // rows of x begin at multiples of two values, and so do pairs of columns that exist

    DEVICE int64_t x_size() const { return static_cast<int64_t>(height) * width; }  // of a channel
    __host__ DEVICE int64_t out_size() const { return static_cast<int64_t>(out_h) * out_w; }
};

// A line is output positions that lie side by side in memory: a whole channel, or a row of it where the image is so
// wide that a stage would be too large. A tile is at most `positions` of a line. A stage holds `rows` rows of each plane,
// `pitch` units in each, of which `columns` begin at a position.
struct Plan : Shape {
    bool by_rows;
    int positions, columns, pitch, rows, stages, blocks;  // blocks: that share the tiles
    int line, lines, tiles_of_line, tiles;                // positions; lines of a sample; tiles of the whole batch
    const Input* __restrict__ x;
    const Element *__restrict__ weight, *__restrict__ bias;  // bias: or null
    Element* __restrict__ out;

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

// The pipeline between producers and consumers, at a stage and its parity. All threads of a side arrive.
struct Pipeline {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    int* exponents;           // of a stage: x was scaled by 2^exponent
    uint32_t* warp_largest;   // [2][PRODUCER_WARPS]
    int stage_bytes, stages, stage = 0;
    uint32_t parity = 0;

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

// ---- the kernel: what a block does, and then the parts of it
// Each consumer warp has M_TILES x 16 positions and WARP_OUTS outputs.
template <int OUTS_, int M_TILES>
struct Forward {
    static constexpr int OUTS = OUTS_, WARP_OUTS = smaller(OUTS, 48), N_TILES = WARP_OUTS / 8, WARPS_ACROSS = OUTS / WARP_OUTS;
    static constexpr int WARP_POSITIONS = 16 * M_TILES, POSITIONS = WARP_POSITIONS * CONSUMER_WARPS / WARPS_ACROSS;
    static constexpr int GROUPS = ceil_div(OUT_CHANNELS, OUTS), PARTS = STRICT ? 2 : 1;
    static constexpr int CHANNEL_BYTES = STEPS * 2 * OUTS * UNIT_BYTES;
    static constexpr int64_t WEIGHT_BYTES = static_cast<int64_t>(PARTS) * IN_CHANNELS * CHANNEL_BYTES;
    // A warp's outputs on their way out: 8 channels. The pitch avoids bank conflicts.
    static constexpr int STAGING_ROW = WARP_POSITIONS + PER_16;
    static constexpr int STAGING_BYTES = CONSUMER_WARPS * 8 * STAGING_ROW * ELEMENT_BYTES;
    static constexpr int64_t FIXED_BYTES = WEIGHT_BYTES + STAGING_BYTES + 2 * OUTS * 4;
    static constexpr int64_t PACKED_FLOATS = GROUPS * (WEIGHT_BYTES / 4 + OUTS);  // then what undoes their scales
    static __host__ int64_t bytes(const Plan& plan) {  // with stages' mbarriers and exponents, and warps' largest
        return FIXED_BYTES + plan.stages * (static_cast<int64_t>(PARTS) * plan.x_bytes() + 16 + 4) + 2 * PRODUCER_WARPS * 4;
    }
    // A batch is in the producers' registers: PAIRS x PRODUCER_WARPS row pairs x 128 column pairs.
    static constexpr int PAIRS = POSITIONS > 256 ? 5 : 4, PASSES = 4;
    static constexpr int ROW_PAIRS = PAIRS * PRODUCER_WARPS, COLUMN_PAIRS = WARP * PASSES;
    using Batch = Pair[PAIRS][PASSES][2];  // [row pair][column pair][row]
    using Sums = float[M_TILES][N_TILES][4];

    const Plan& plan;
    char* const memory;

    DEVICE void run(const uint4* __restrict__ packed) const {
        Pipeline pipeline(memory + FIXED_BYTES, PARTS * plan.x_bytes(), plan.stages);
        if (threadIdx.x == 0)
            for (Pipeline each = pipeline; each.stage < plan.stages; ++each.stage)
                mbarrier_init(each.full(), PRODUCERS), mbarrier_init(each.empty(), CONSUMERS);
        __syncthreads();
        if (threadIdx.x >= CONSUMERS) return produce(pipeline);
        const int group = blockIdx.x % GROUPS;
        constexpr int WEIGHT_UNITS = WEIGHT_BYTES / UNIT_BYTES;
        const uint4* const units = packed + static_cast<int64_t>(group) * WEIGHT_UNITS;
        for (int i = threadIdx.x; i < WEIGHT_UNITS; i += CONSUMERS)
            cp_async_cg_16(shared_address(memory) + i * UNIT_BYTES, units + i, 16);
        const float* const unscales = reinterpret_cast<const float*>(packed + static_cast<int64_t>(GROUPS) * WEIGHT_UNITS);
        float* const scales = reinterpret_cast<float*>(memory + WEIGHT_BYTES + STAGING_BYTES);
        for (int i = threadIdx.x; i < OUTS; i += CONSUMERS) {
            const int o = group * OUTS + i;
            scales[i] = unscales[o];
            scales[OUTS + i] = plan.bias && o < OUT_CHANNELS ? to_float(plan.bias[o]) : 0;
        }
        cp_async_wait_all();
        bar_sync(2, CONSUMERS);
        consume(pipeline);
    }

    // Producers load a channel's rows for a tile, find their scale, convert and store them. The next batch is asked for as soon
    // as one is stored. Where rows take more than a batch, each batch is loaded twice: for the scale, and to be stored.
    static constexpr int NOT_FINITE = -1000;  // instead of a tile's exponent: x holds a NaN or an infinity
    static constexpr int FIRST_EXPONENT = SCALED ? MOST_EXPONENT : 0;  // 16-bit types: always
    DEVICE void produce(Pipeline& pipeline) const {
        const bool whole = plan.row_pairs() <= ROW_PAIRS && 2 * plan.pitch <= COLUMN_PAIRS;  // a batch holds all rows
        int number = blockIdx.x / GROUPS, channel = 0, first_pair = 0, first_column = 0, exponent = FIRST_EXPONENT, slot = 0;
        bool storing = whole || !SCALED;
        uint32_t key = 0;
        Rows rows(plan, number);
        Batch values;
        load_batch(rows, 0, 0, values);
        UNROLL_1 while (number < plan.tiles) {
            const bool is_last =  // of the rows' batches
                first_column + COLUMN_PAIRS >= 2 * plan.pitch && first_pair + ROW_PAIRS >= plan.row_pairs();
            if (SCALED && (whole || !storing)) key = larger(key, largest_of_batch(values));
            if (!SCALED) {
                if (first_pair == 0 && first_column == 0) mbarrier_test_wait(pipeline.empty(), pipeline.parity ^ 1);
            } else if (is_last && (whole || !storing)) {
                uint32_t* const keys = pipeline.warp_largest + slot * PRODUCER_WARPS;
                slot ^= 1;  // two slots take turns: one barrier is enough
                if (threadIdx.x % WARP == 0) keys[threadIdx.x / WARP % PRODUCER_WARPS] = key;
                bar_sync(1, PRODUCERS);
                UNROLL for (int i = 0; i < PRODUCER_WARPS; ++i) key = larger(key, keys[i]);
                // Of multiples of 4, so that neighbouring planes mostly have the same.
                exponent = smaller(exponent, key / 2 < INFINITE ? scale_exponent(key / 2, 15) & ~3 : NOT_FINITE);
                key = 0;
                mbarrier_test_wait(pipeline.empty(), pipeline.parity ^ 1);
            }
            if (storing) store_batch(pipeline.address(), first_pair, first_column, SCALED ? power_of_2(exponent) : 1, values);
            if (is_last && storing) {
                if (threadIdx.x == CONSUMERS) pipeline.exponent() = exponent;
                mbarrier_arrive(pipeline.full());
                pipeline.advance();
                rows.x += plan.x_size();
                if (++channel == IN_CHANNELS) {
                    channel = 0, number += plan.blocks, exponent = FIRST_EXPONENT;
                    if (number < plan.tiles) rows = Rows(plan, number);
                }
            }
            if (is_last) storing = whole || !SCALED || !storing;
            first_column += COLUMN_PAIRS;
            if (first_column >= 2 * plan.pitch) first_column = 0, first_pair += ROW_PAIRS;
            if (is_last) first_pair = 0;
            if (number < plan.tiles) load_batch(rows, first_pair, first_column, values);
        }
    }

    // Consumers, for each tile: rescale their sums where a channel's scale is another, multiply, and at last write the outputs.
    DEVICE void consume(Pipeline& pipeline) const {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const int first_out = warp % WARPS_ACROSS * WARP_OUTS, first_channel = blockIdx.x % GROUPS * OUTS + first_out;
        const uint32_t first_weight =
            shared_address(memory) + (lane / 8 % 2 * OUTS + first_out + lane / 16 * 8 + lane % 8) * UNIT_BYTES;
        Element* const staging = reinterpret_cast<Element*>(memory + WEIGHT_BYTES) + warp * 8 * STAGING_ROW;
        const float* const scales = reinterpret_cast<const float*>(memory + WEIGHT_BYTES + STAGING_BYTES) + first_out;
        UNROLL_1 for (int number = blockIdx.x / GROUPS; number < plan.tiles; number += plan.blocks) {
            const Tile tile(plan, number);
            const int first_position = warp / WARPS_ACROSS * WARP_POSITIONS;
            uint32_t units[M_TILES];
            UNROLL for (int m = 0; m < M_TILES; ++m)
                units[m] = tile.unit(plan, first_position + 16 * m + lane % 16) * UNIT_BYTES;
            Sums sums = {};
            int exponent = 0;
            UNROLL_1 for (int channel = 0; channel < IN_CHANNELS; ++channel) {
                mbarrier_test_wait(pipeline.full(), pipeline.parity);
                const int change = SCALED ? pipeline.exponent() - exponent : 0;
                exponent += change;
                if (channel > 0 && change != 0)
                    UNROLL for (int i = 0; i < M_TILES * N_TILES * 4; ++i) {
                        float& sum = sums[i / (4 * N_TILES)][i / 4 % N_TILES][i % 4];
                        sum = sum * power_of_2(change / 2) * power_of_2(change - change / 2);  // for -252 to 254
                    }
                uint32_t x[M_TILES];
                UNROLL for (int m = 0; m < M_TILES; ++m) x[m] = pipeline.address() + units[m];
                multiply_stage(x, first_weight + channel * CHANNEL_BYTES, sums);
                mbarrier_arrive(pipeline.empty());
                pipeline.advance();
            }
            if (!SCALED && reads_not_finite(sums)) exponent = NOT_FINITE;
            const int count = smaller(tile.count - first_position, WARP_POSITIONS), position = tile.first + first_position;
            const int channels = smaller(WARP_OUTS, OUT_CHANNELS - first_channel);
            const int64_t plane = static_cast<int64_t>(tile.sample) * OUT_CHANNELS + first_channel;
            Element* const out = plan.out + plane * plan.out_size() + position;
            if (exponent != NOT_FINITE) write_outputs(sums, exponent, scales, staging, out, channels, count);
            else
                UNROLL_1 for (int i = lane; i < count * channels; i += WARP)
                    out[i / count * plan.out_size() + i % count] =
                        fp32_output(tile.sample, first_channel + i / count, position + i % count);
        }
    }

    // ---- the producers' parts: from device memory through registers to a stage
    struct Rows {  // of a tile in a channel of x
        const Input* x;  // their first column, of row 0
        int top, left;

        DEVICE Rows(const Plan& plan, int number) {
            const Tile tile(plan, number);
            top = tile.row * STRIDE_H - PAD_H, left = tile.left * STRIDE_W - PAD_W;
            x = plan.x + static_cast<int64_t>(tile.sample) * IN_CHANNELS * plan.x_size() + left;
        }
    };
    DEVICE void load_batch(const Rows& rows, int pair, int column, Batch& values) const {
        plan.paired ? load_if<true>(rows, pair, column, values) : load_if<false>(rows, pair, column, values);
    }
    // Coalesced loads. PAIRED: rows begin at multiples of 8 bytes, and pairs of columns exist as a whole or not at all.
    template <bool PAIRED>
    DEVICE void load_if(const Rows& rows, int first_pair, int first_column, Batch& values) const {
        const int column_pair = first_column + threadIdx.x % WARP;
        bool left_exists[PASSES], right_exists[PASSES];  // of a pair of columns
        UNROLL for (int k = 0; k < PASSES; ++k) {
            const bool in_stage = column_pair + WARP * k < 2 * plan.pitch;
            const unsigned column = rows.left + 2 * (column_pair + WARP * k), width = plan.width;  // less than 0 is very large
            left_exists[k] = in_stage && column < width;
            right_exists[k] = PAIRED ? left_exists[k] : in_stage && column + 1 < width;
        }
        UNROLL for (int i = 0; i < PAIRS; ++i) {
            const int pair = first_pair + i * PRODUCER_WARPS + threadIdx.x / WARP % PRODUCER_WARPS;
            const int h = rows.top + (PLANES == PHASES ? 2 * pair : pair / PLANES * STRIDE_H + pair % PLANES * 2);
            const Input* row = rows.x + static_cast<int64_t>(h) * plan.width + 2 * column_pair;
            UNROLL for (int r = 0; r < 2; ++r, row += plan.width) {
                const bool exists =
                    pair < plan.row_pairs() && static_cast<unsigned>(h + r) < static_cast<unsigned>(plan.height);
                UNROLL for (int k = 0; k < PASSES; ++k) {
                    Pair& v = values[i][k][r];
                    v = Pair{};
                    const Input* const from = row + 2 * WARP * k;
                    if (PAIRED && exists && left_exists[k]) v = __ldg(reinterpret_cast<const Pair*>(from));
                    if (!PAIRED && exists && left_exists[k]) v.x = __ldg(from);
                    if (!PAIRED && exists && right_exists[k]) v.y = __ldg(from + 1);
                }
            }
        }
    }

    // The warp's largest magnitude: twice its bits, which drops the sign; magnitudes are in that order.
    static DEVICE uint32_t largest_of_batch(const Batch& values) {
        uint32_t key = 0;
        UNROLL for (int i = 0; i < PAIRS * PASSES * 2; ++i) {
            const Pair v = values[i / (2 * PASSES)][i / 2 % PASSES][i % 2];
            key = larger(key, larger(2 * __float_as_uint(to_float(v.x)), 2 * __float_as_uint(to_float(v.y))));
        }
        return warp_max(key);
    }

    // Stores half a unit for each row pair and column pair: fp16 values of v * scale; STRICT: their residuals, too.
    DEVICE void store_batch(uint32_t stage, int first_pair, int first_column, float scale, const Batch& values) const {
        const int column_pair = first_column + threadIdx.x % WARP;
        UNROLL for (int i = 0; i < PAIRS; ++i) {
            const int pair = first_pair + i * PRODUCER_WARPS + threadIdx.x / WARP % PRODUCER_WARPS;
            const int row = pair % PLANES * plan.rows + pair / PLANES;
            const uint32_t first = stage + row * plan.pitch * UNIT_BYTES + column_pair * (UNIT_BYTES / 2);
            UNROLL for (int k = 0; k < PASSES; ++k) {
                const uint32_t to = first + WARP * k * (UNIT_BYTES / 2);
                const bool exists = pair < plan.row_pairs() && column_pair + WARP * k < 2 * plan.pitch;
                const Pair upper = values[i][k][0], lower = values[i][k][1];
                st_shared_v2_u32_if(exists, to, operand_pair(upper, scale), operand_pair(lower, scale));
                if constexpr (STRICT) {
                    const float a = to_float(upper.x) * scale, b = to_float(upper.y) * scale;
                    const float c = to_float(lower.x) * scale, d = to_float(lower.y) * scale;
                    st_shared_v2_u32_if(exists, to + plan.x_bytes(), residual_pair(a, b), residual_pair(c, d));
                }
            }
        }
    }

    // ---- the consumers' parts
    // sums += the products of a channel's taps. x: the address of the lane's first unit, of each 16 positions; weights: the
    // address of the first that the lane loads. Strict (error-compensated): small terms first; the tensor core cuts off what a
    // sum does not hold, always towards zero: so sums begin again with each channel and are added as fp32 numbers.
    DEVICE void multiply_stage(const uint32_t (&x)[M_TILES], uint32_t weights, Sums& sums) const {
        const bool second = threadIdx.x % WARP >= 16;  // of a step's units
        float parts[STRICT ? M_TILES : 1][N_TILES][4] = {};
        constexpr int UNROLLED = STRICT || STEPS > 16 ? 1 : STEPS;
#pragma unroll UNROLLED
        for (int step = 0; step < STEPS; ++step) {
            const int here = unit_offset(plan, 2 * step), to_second = unit_offset(plan, 2 * step + 1) - here;
            const uint32_t offset = (here + (second ? to_second : 0)) * UNIT_BYTES;
            uint4 a[PARTS][M_TILES], b[PARTS][N_TILES / 2 + N_TILES % 2];
            UNROLL for (int part = 0; part < PARTS; ++part) {
                UNROLL for (int m = 0; m < M_TILES; ++m) a[part][m] = ldmatrix_m8n8_x4(x[m] + part * plan.x_bytes() + offset);
                UNROLL for (int j = 0; j < N_TILES; j += 2)
                    b[part][j / 2] = ldmatrix_m8n8_x4(weights + part * (WEIGHT_BYTES / 2) +
                                                      (step * 2 * OUTS + smaller(8 * j, WARP_OUTS - 16)) * UNIT_BYTES);
            }
            UNROLL for (int m = 0; m < M_TILES; ++m)
                UNROLL for (int j = 0; j < N_TILES; ++j) {
                    float(&d)[4] = STRICT ? parts[STRICT ? m : 0][j] : sums[m][j];
                    const bool odd = j == N_TILES - 1 || j % 2;  // of the two in four words
                    const uint4 high = b[0][j / 2], low = b[PARTS - 1][j / 2];
                    if (STRICT) mma_m16n8k16(d, a[PARTS - 1][m], odd ? high.z : high.x, odd ? high.w : high.y);
                    if (STRICT) mma_m16n8k16(d, a[0][m], odd ? low.z : low.x, odd ? low.w : low.y);
                    mma_m16n8k16(d, a[0][m], odd ? high.z : high.x, odd ? high.w : high.y);
                }
        }
        if constexpr (STRICT)
            UNROLL for (int i = 0; i < M_TILES * N_TILES * 4; ++i)
                sums[i / (4 * N_TILES)][i / 4 % N_TILES][i % 4] += parts[i / (4 * N_TILES)][i / 4 % N_TILES][i % 4];
    }

    // Whether the warp's positions read a NaN or an infinity: then all channels' sums are none, by zero weights, too.
    static DEVICE bool reads_not_finite(const Sums& sums) {
        uint32_t found = 0;
        UNROLL for (int m = 0; m < M_TILES; ++m)
            UNROLL for (int row = 0; row < 2; ++row) found |= !(fabsf(sums[m][0][2 * row]) < INFINITY);
        return warp_max(found);
    }

    // Writes a warp's outputs, `count` positions from `out` on. Through staging, 8 channels at a time, so that stores are
    // coalesced.
    DEVICE void write_outputs(const Sums& sums, int exponent, const float* scales, Element* staging, Element* __restrict__ out,
                              int channels, int count) const {
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        const float half_unscale = power_of_2(-exponent / 2), other_half = power_of_2(-exponent - -exponent / 2);
        UNROLL for (int j = 0; j < N_TILES; ++j) {
            const float2 unscale = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * t);
            const float2 bias = *reinterpret_cast<const float2*>(scales + OUTS + 8 * j + 2 * t);
            const float factor_x = fminf(half_unscale * unscale.x, LARGEST_POWER);
            const float factor_y = fminf(half_unscale * unscale.y, LARGEST_POWER);
            __syncwarp();  // the channels before have been read
            Element* const to = staging + 2 * t * STAGING_ROW + g;
            UNROLL for (int i = 0; i < 2 * M_TILES; ++i) {
                const float* const two = sums[i / 2][j] + i % 2 * 2;
                const float x = SCALED ? fmaf(two[0] * factor_x, other_half, bias.x) : two[0] + bias.x;
                to[8 * i] = from_float(x);
                const float y = SCALED ? fmaf(two[1] * factor_y, other_half, bias.y) : two[1] + bias.y;
                to[8 * i + STAGING_ROW] = from_float(y);
            }
            __syncwarp();
            UNROLL for (int row = 0; row < 8; ++row, out += plan.out_size())
                UNROLL for (int i = lane; i < WARP_POSITIONS; i += WARP)
                    if (8 * j + row < channels && i < count) out[i] = staging[row * STAGING_ROW + i];
        }
    }

    // An output in plain fp32: with the tensor core, zero weights would spread a NaN or an infinity.
    DEVICE Element fp32_output(int64_t sample, int o, int position) const {
        const int top = position / plan.out_w * STRIDE_H - PAD_H, left = position % plan.out_w * STRIDE_W - PAD_W;
        float sum = 0;
        UNROLL_1 for (int tap = 0; tap < IN_CHANNELS * TAPS; ++tap) {
            const int h = top + tap % TAPS / KERNEL_W, w = left + tap % KERNEL_W;
            const Input* row = plan.x + ((sample * IN_CHANNELS + tap / TAPS) * plan.height + h) * plan.width;
            const bool inside = h >= 0 && h < plan.height && w >= 0 && w < plan.width;
            const Element* const weight = plan.weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS + tap;
            if (inside) sum += to_float(from_float(to_float(row[w]))) * to_float(*weight);
        }
        return from_float(plan.bias ? sum + to_float(plan.bias[o]) : sum);
    }
};

template <class F>
__global__ void __launch_bounds__(THREADS, 1) convolve(const Plan plan, const uint4* __restrict__ packed) {
    extern __shared__ __align__(128) char memory[];
    F{plan, memory}.run(packed);
}

// Weights as they lie in shared memory, [group of outputs][high, low][channel][unit][output], then what undoes their scales.
// A block an output channel: it finds the largest weight, and scales, converts and packs.
constexpr int WEIGHT_TARGET = 14, MOST_WEIGHT_EXPONENT = 62, PACK_THREADS = 128;  // so that two scales' product can be undone
template <class F>
__global__ void __launch_bounds__(PACK_THREADS) pack_weights(const Element* __restrict__ weight, uint4* __restrict__ packed) {
    __shared__ uint32_t warp_largest[PACK_THREADS / WARP];
    constexpr int PART = IN_CHANNELS * STEPS * 2 * F::OUTS;
    const int o = blockIdx.x, group = o / F::OUTS;
    const Element* const mine = weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS;
    uint32_t largest = 0;
    if (o < OUT_CHANNELS)
        for (int i = threadIdx.x; i < IN_CHANNELS * TAPS; i += PACK_THREADS) {
            const uint32_t magnitude = __float_as_uint(to_float(mine[i])) & 0x7fffffffu;
            if (magnitude < INFINITE) largest = larger(largest, magnitude);
        }
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (int warp = 0; warp < PACK_THREADS / WARP; ++warp) largest = larger(largest, warp_largest[warp]);
    const int exponent = SCALED ? smaller(scale_exponent(largest, WEIGHT_TARGET), MOST_WEIGHT_EXPONENT) : 0;
    for (int i = threadIdx.x; i < IN_CHANNELS * STEPS * 2; i += PACK_THREADS) {
        const int unit = i % (2 * STEPS);
        float w[8];
        UNROLL for (int e = 0; e < 8; ++e) {  // element e of a unit is the tap (u, v)
            const int u = (unit / PLANES / QUADS * PHASES + unit % PLANES) * 2 + e / 2 % 2;
            const int v = unit / PLANES % QUADS * 4 + e / 4 * 2 + e % 2;
            const bool exists = o < OUT_CHANNELS && unit < UNITS && u < KERNEL_H && v < KERNEL_W;
            const Element* const tap = mine + i / (2 * STEPS) * TAPS + u * KERNEL_W + v;
            w[e] = exists ? to_float(*tap) * power_of_2(exponent) : 0;
        }
        uint4* const to = packed + static_cast<int64_t>(group) * F::PARTS * PART + i * F::OUTS + o % F::OUTS;
        to[0] = make_uint4(operand_pair(w[0], w[1]), operand_pair(w[2], w[3]), operand_pair(w[4], w[5]),
                           operand_pair(w[6], w[7]));
        if (F::PARTS > 1)
            to[PART] = make_uint4(residual_pair(w[0], w[1]), residual_pair(w[2], w[3]), residual_pair(w[4], w[5]),
                                  residual_pair(w[6], w[7]));
    }
    float* const unscales = reinterpret_cast<float*>(packed + static_cast<int64_t>(F::GROUPS) * F::PARTS * PART);
    if (threadIdx.x == 0) unscales[o] = power_of_2(-exponent);
}

// ---- launches
template <class F>
static cudaError_t launch(const Plan& plan, uint4* packed, cudaStream_t stream) {
    pack_weights<F><<<F::GROUPS * F::OUTS, PACK_THREADS, 0, stream>>>(plan.weight, packed);
    const int bytes = static_cast<int>(F::bytes(plan));
    const cudaError_t error = cudaFuncSetAttribute(convolve<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    convolve<F><<<plan.blocks * F::GROUPS, THREADS, bytes, stream>>>(plan, packed);
    return cudaGetLastError();
}

// The fastest kernel that takes a call.
struct Choice {
    Plan plan = {};
    int64_t packed_floats = 0;  // of the weights; 0: no kernel takes it
    cudaError_t (*launch)(const Plan&, uint4*, cudaStream_t) = nullptr;

    Choice(int64_t batch, int64_t height, int64_t width, int device) {
        plan.batch = batch;
        plan.height = height, plan.out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1;
        plan.width = width, plan.out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
        if constexpr (STRICT) takes<Forward<48, 2>>(device, 2) || takes<Forward<24, 2>>(device, 1);
        else if (OUT_CHANNELS <= 48 || !takes<Forward<96, 4>>(device, 2))
            takes<Forward<48, 3>>(device, 2) || takes<Forward<24, 2>>(device, 1);
    }

    // The one predicate of what a kernel takes: whether weights and a pipeline of `least_stages` or more fit into the device's
    // shared memory. Whole channels are lines where they fit.
    template <class F>
    bool takes(int device, int least_stages) {
        int sm_count, shared_bytes;
        cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        if (SHARED_LIMIT_KB) shared_bytes = smaller(shared_bytes, SHARED_LIMIT_KB * 1024);
        if constexpr (FITS_UNITS)
            for (const bool by_rows : {false, true}) {
                plan.by_rows = by_rows, plan.positions = F::POSITIONS;
                plan.columns = by_rows ? F::POSITIONS : plan.out_w, plan.pitch = plan.columns + QUADS - 1;
                plan.rows = (by_rows ? 0 : (plan.columns - 1 + F::POSITIONS - 1) / plan.columns) + TAP_ROWS;
                const int64_t line = by_rows ? plan.out_w : plan.out_size(), lines = by_rows ? plan.out_h : 1;
                const int64_t of_line = (line + F::POSITIONS - 1) / F::POSITIONS, tiles = plan.batch * lines * of_line;
                if (plan.pitch > 1 << 14 || line > 1 << 30 || tiles > 1 << 30) continue;
                plan.line = line, plan.lines = lines, plan.tiles_of_line = of_line, plan.tiles = tiles;
                plan.blocks = smaller(plan.tiles, larger(sm_count / F::GROUPS, 1));
                packed_floats = F::PACKED_FLOATS, launch = ::launch<F>;
                for (plan.stages = 4; plan.stages >= least_stages; --plan.stages)
                    if (F::bytes(plan) <= shared_bytes) return true;
            }
        packed_floats = 0;
        return false;
    }
};

// The floats that the packed weights take; 0: what no kernel takes.
extern "C" int64_t count_packed(int64_t batch, int64_t height, int64_t width, int64_t device) {
    return Choice(batch, height, width, device).packed_floats;
}

// out (batch, OUT_CHANNELS, out_h, out_w); `packed` has count_packed() floats; bias may be null.
extern "C" int launch_convolve(const Input* x, const Element* weight, const Element* bias, float* packed, Element* out,
                               int64_t batch, int64_t height, int64_t width, int64_t device, cudaStream_t stream) {
    Choice choice(batch, height, width, device);
    if (!choice.packed_floats) return cudaErrorNotSupported;
    choice.plan.x = x, choice.plan.weight = weight, choice.plan.bias = bias, choice.plan.out = out;
    choice.plan.paired = width % 2 == 0 && PAD_W % 2 == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(Pair) == 0;
    return choice.launch(choice.plan, reinterpret_cast<uint4*>(packed), stream);
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
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
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


def original(x, weight, bias=None, stride=1, padding=0):
    return nn.functional.conv2d(x.to(weight.dtype), weight, bias, stride, padding)


def convolve(x, weight, bias, stride, padding, kernels=kernels, original=original):
    """Return the convolution's output, of the weights' type. Raises RuntimeError for what the kernel does not take."""
    (batch, *_, height, width), (out_channels, in_channels, kernel_h, kernel_w) = x.shape, weight.shape
    (stride_h, stride_w), (pad_h, pad_w) = stride, padding
    if x.dtype not in ELEMENTS:
        raise RuntimeError(f"expected x as float32, float16 or bfloat16; got {x.dtype}")
    dtype = weight.dtype if x.dtype == torch.float32 and weight.dtype in ELEMENTS else x.dtype  # they differ under autocast
    check("x", x, (batch, in_channels, height, width), x.device, x.dtype)
    check("weight", weight, weight.shape, x.device, dtype)
    if bias is not None:
        check("bias", bias, (out_channels,), x.device, dtype)
    room_h, room_w = height + 2 * pad_h - kernel_h, width + 2 * pad_w - kernel_w
    if min(*stride, kernel_h, kernel_w) < 1 or min(*padding, room_h, room_w) < 0:
        fits = f"a kernel of {[kernel_h, kernel_w]}, strides {[*stride]} and padding {[*padding]}"
        raise RuntimeError(f"expected {fits} to fit; got an image of {height} x {width}")
    if max(height, width) >= 2**30:
        raise RuntimeError(f"expected an image of fewer than 2^30 rows and columns; got {height} x {width}")
    if x.is_cuda and capability(x.device) < (8, 0):
        raise RuntimeError("expected a GPU of compute capability 8.0 or later; v1_direct runs on any")
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = weight.new_empty(batch, out_channels, room_h // stride_h + 1, room_w // stride_w + 1)
    if not out.numel():
        return out
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W", "PAD_H", "PAD_W"
    macros = dict(zip(names, (*weight.shape, *stride, *padding), strict=True), SHARED_LIMIT_KB=SHARED_LIMIT_KB)
    strict = dtype == torch.float32 and is_strict()
    library = kernels(INPUT=ELEMENTS[x.dtype], ELEMENT=ELEMENTS[dtype], STRICT=int(strict), **macros)
    numbers = batch, height, width, x.device.index or 0
    floats = count(library.count_packed, *numbers)
    if not floats:
        limits = "a stride of 4 across and an even one down, weights for 24 outputs and a stage in shared memory"
        warnings.warn(f"PyTorch computes what these kernels do not take: {limits}", stacklevel=2)
        return original(x, weight, bias, stride, padding)
    packed = x.new_empty(floats, dtype=torch.float32)
    launch(library.launch_convolve, x, weight, bias, packed, out, *numbers)
    return out


operator = torch.library.custom_op(f"{NAME}::forward", convolve, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(original)


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the output again, 297 MB."""
    tensors = [each for each in ctx.saved_tensors if each is not None]  # a bias may be missing
    found = torch.func.vjp(lambda *tensors: original(*tensors, **ctx.numbers), *tensors)[1](grad)
    return *found, *[None] * (5 - len(found))


def setup_context(ctx, inputs, output):
    *tensors, stride, padding = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = {"stride": stride, "padding": padding}


operator.register_autograd(backward, setup_context=setup_context)


class Direct(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which takes longer than all else on the host."""

    backward = staticmethod(backward)

    @staticmethod
    def forward(ctx, *operands, function=convolve, setup_context=setup_context):
        output = function(*operands)
        setup_context(ctx, operands, output)
        return output


def call(x, weight, bias, *numbers, function=convolve, direct=Direct):
    """Call the operator or, in eager mode, its function. Autocast: in its type; a float32 x is rounded while it is loaded."""
    if torch.is_autocast_enabled(DEVICE):
        dtype = torch.get_autocast_dtype(DEVICE)
        x = x.to(dtype) if x.dtype.itemsize == 2 else x
        weight, bias = weight.to(dtype), bias if bias is None else bias.to(dtype)
    else:
        check("x", x, x.shape, x.device, weight.dtype)
    operands = x, weight, bias, *numbers
    if not is_direct(*operands):
        return torch.ops.alexnet_conv1_v4_tensor_core.forward(*operands)
    return (direct.apply if torch.is_grad_enabled() else function)(*operands)


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
