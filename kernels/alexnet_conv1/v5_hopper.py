"""alexnet_conv1, v5: implicit GEMM by Hopper's wgmma, on rows of scaled fp16 in shared memory.

A warp-specialized, persistent kernel. Producer warpgroups load x into registers, scale, convert and store it to multistage
pipelines; consumer warpgroups multiply, and write by bulk copies from shared memory. TMA loads all weights there, once.

Why it is faster
    v4's operands reach mma.sync through registers, at 622 of wgmma's 767 TFLOP/s. wgmma reads both operands from shared memory,
    64 positions x 96 outputs x 2 units at a time. v4's units, 4 columns of 2 rows of x, are wgmma's operand as they are, and
    the next units' taps are another address. Two consumer warpgroups have a tile each (192 positions): one can write while the
    other multiplies. Each has a producer warpgroup. The kernel is issue bound: by the instructions around products and copies.

Mathematics
    v4's: x is fp16 by a tile's power of two, from its first batch that is not all zeros; where a later one overflows, the tile
    begins again. x is off by at most 2^-11 of itself, as in TF32, or 2^-35 of the tile's largest; a weight by 2^-11 of itself
    or 2^-38 of its output's. Strict (no TF32; fp16x3): low * high + high * low + high * high, summed anew for each channel,
    since the tensor core cuts sums. Where x has a NaN or infinity, tiles, and a consumer's between two such, are plain fp32.

Launches
    convolve: a block of 512 threads an SM, 219 KiB (strict 218). Before it, each call: pack_weights, 128 an output channel.

Floor
    154 MB in and 297 MB out take an H200 0.103 ms at 4.39 TB/s; 54 GFLOP 0.070 at 767 TFLOP/s of fp16 (in whole tiles: 0.090).

Takes
    What v1 takes, on 9.0, or it raises. With a warning, PyTorch: gradients, and what make_plan refuses (strict: wide images).
"""

import ctypes
import functools
import hashlib
import inspect
import math
import os
import re
import shutil
import sys
import threading
import warnings

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v5_hopper"
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

using Element = float;  // of all tensors

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
template <class T>
__host__ DEVICE T larger(T a, T b) { return a > b ? a : b; }

// ---- constants and layout
// position: an output's place in its channel's plane. unit: 16 bytes of fp16, 4 columns of 2 rows of x, in the order shown.
// Neighbouring positions, at stride 4, read neighbouring units: the units of 8 positions are a core matrix of wgmma's operand,
// and another tap is another address. Pairs of rows are sorted by their remainder modulo PHASES into planes: within a plane the
// next output row reads the next row. high, low: an fp16 value and, strict, the residual of its rounding.
//
//     a unit:    row 2r      | 0  1 | 4  5 |        a plane, `pitch` units wide, at stride 4:
//                row 2r + 1  | 2  3 | 6  7 |            | row pair 0 (or 1)  | row pair 2 (or 3)  | row pair 4 (or 5) | ..
//
// What a block keeps in shared memory, from the top; bytes at the original's size. Strict: the same with 48 outputs, 2 stages.
//
//     weights  82,944   [high, low][channel][unit][output], 16 B       TMA fills it once; wgmma's right operand
//     stages  102,144   [consumer][4][high, low][plane][row][unit]     a producer fills one (full mbarrier), its consumer's
//                                                                      wgmma reads it: the left operand (empty mbarrier)
//     staging  37,632   [consumer][3][8 channels][196 floats]          a consumer fills it, its bulk copies empty it
//     the rest  1,096   scales, biases: all threads, at first; StageInfo [consumer][4]: with its stage; largest:
//                       [consumer][2][4], between a producer's warps; mbarriers: the weights', [consumer][full, empty][4]
// Named barriers: 1 and 2 of a consumer's threads, for staging; 3 and 4 of a producer's, for `largest`.
constexpr int WARP = 32, WARPGROUP = 128, MAX_SHARED_BYTES = 227 * 1024;
constexpr int TAPS = KERNEL_H * KERNEL_W, UNIT_BYTES = 16, QUADS = ceil_div(KERNEL_W, 4);  // QUADS: units across the kernel
constexpr int PHASES = ceil_div(STRIDE_H, 2), TAP_PAIRS = ceil_div(KERNEL_H, 2);
constexpr int PLANES = smaller(PHASES, TAP_PAIRS), TAP_ROWS = ceil_div(TAP_PAIRS, PHASES);
// A position reads UNITS of a channel: [plane][row][quad]. A step is the inner size of one wgmma, two of them.
constexpr int UNITS = PLANES * TAP_ROWS * QUADS, STEPS = ceil_div(UNITS, 2);
[[maybe_unused]] constexpr int UNROLLED_STEPS = STEPS <= 16 ? STEPS : 1;

// Each consumer warpgroup has M_TILES x 64 positions at a time, and a producer warpgroup of its own.
constexpr int CONSUMERS = 2, THREADS = 2 * CONSUMERS * WARPGROUP, M_TILES = 3, POSITIONS = 64 * M_TILES;
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 184;  // launched with 128; 256 x 72 + 256 x 184 = all 65,536
constexpr int MOST_OUTS = 96, FEW_OUTS = 48;                      // of a block; strict: FEW_OUTS, whose weights have two parts
constexpr int STAGING_BUFFERS = 3, STAGING_ROW = POSITIONS + 4, STAGING = 8 * STAGING_ROW;  // floats: 8 channels
// A producer has a batch in registers while it stores the one before: 8 row pairs x 128 column pairs, of which a warp has every
// fourth row pair.
constexpr int PRODUCER_WARPS = WARPGROUP / WARP, BATCH_PAIRS = 2, BATCH_PASSES = 4;
using Batch = float2[BATCH_PAIRS][BATCH_PASSES][2];  // [row pair][column pair][row]: two columns

__host__ __device__ constexpr int64_t weight_units(int outs) { return static_cast<int64_t>(IN_CHANNELS) * STEPS * 2 * outs; }
// What is known without the image's size; convolve<outs, strict> is compiled where this holds.
constexpr bool weights_fit(int outs, bool strict) {
    return STRIDE_W == 4 && STRIDE_H % 2 == 0 && (strict ? 2 : 1) * weight_units(outs) * UNIT_BYTES <= MAX_SHARED_BYTES;
}

// ---- PTX
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns once the phase of this parity is complete. The hardware may suspend the thread meanwhile; from 9.0 on.
DEVICE void mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}
// What this thread initialised becomes visible to TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// What this thread wrote to shared memory becomes visible to wgmma and TMA.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
// Copies bytes, a multiple of 16, to shared memory, and counts them on the mbarrier.
DEVICE void cp_async_bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
// Copies bytes, a multiple of 16, from shared memory, as part of this thread's bulk group.
DEVICE void cp_async_bulk_store(void* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns when all stores of this thread's bulk groups are done.
DEVICE void cp_async_bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Returns when all but the last PENDING of this thread's bulk groups have read their sources.
template <int PENDING>
DEVICE void cp_async_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
template <int REGISTERS>
DEVICE void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
DEVICE void st_shared_f32(uint32_t at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
DEVICE void st_shared_v2_u32_if(bool exists, uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0;\n@exists st.shared.v2.u32 [%0], {%1, %2};\n}"
                 ::"r"(address), "r"(a), "r"(b), "r"(static_cast<uint32_t>(exists)) : "memory");
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait_group() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define REGISTERS_32                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
// d (64 x 48) = or += a (64 x 16) * b (16 x 48), fp16, both in shared memory.
DEVICE void wgmma_m64n48k16_f16(float (&d)[24], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %26, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
                 "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, accumulate, 1, 1, 0, 0;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16) : "l"(a), "l"(b), "r"(accumulate));
}
// d (64 x 96) = or += a (64 x 16) * b (16 x 96), fp16, both in shared memory.
DEVICE void wgmma_m64n96k16_f16(float (&d)[48], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" REGISTERS_32
                 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
                 "%48, %49, accumulate, 1, 1, 0, 0;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40)
                 : "l"(a), "l"(b), "r"(accumulate));
}
// Describes an operand in shared memory without swizzle, made of core matrices of 8 rows x 16 bytes. Core matrices adjacent in
// the rows are 128 bytes apart, those adjacent in k `k_stride` units. `unit` has at most 18 bits, so fields never overflow.
DEVICE uint64_t descriptor(int unit, int k_stride) {
    return static_cast<uint64_t>(128 / UNIT_BYTES) << 32 | static_cast<uint32_t>(unit + (k_stride << 16));
}

DEVICE uint32_t warp_max(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }
// v, the same in all lanes, in a form that tells the compiler so: descriptors and bulk copies then use uniform registers.
DEVICE int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }
DEVICE uint64_t uniform(uint64_t v) {
    const uint32_t upper = uniform(static_cast<int>(v >> 32)), lower = uniform(static_cast<int>(v));
    return static_cast<uint64_t>(upper) << 32 | lower;
}

// ---- fp16 values and powers of two
constexpr float LARGEST_FP16 = 65504, LARGEST_POWER = 0x1p127f;
constexpr uint32_t INFINITE = 0x7f800000u;  // magnitudes are ordered as their bits are
DEVICE uint32_t fp16_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// The residual of rounding to fp16; none of an infinity.
DEVICE float fp16_residual(float x) { return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x)); }
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}

// ---- the sizes of a call, and the static tile scheduler
// A line is output positions that are contiguous in memory: a channel's whole plane, or a row of it where the image is so wide
// that a stage would be too large. A tile is at most POSITIONS of a line. Neighbouring tiles overlap by OVERLAP positions, so
// that each channel's part of the output can begin 16-byte aligned. A stage holds a channel's rows for a tile: `rows` rows of
// each plane, `pitch` units in each, of which `columns` begin at a position.
constexpr int OVERLAP = 3;

struct Plan {
    int height, width, out_h, out_w;
    bool paired;                             // rows of x begin at multiples of 8 bytes, and so do pairs of columns that exist
    bool by_rows;                            // lines are rows
    int columns, pitch, rows;                // of a stage
    int lines, step, outs, stages, blocks;   // lines: of a sample; step: from tile to tile; blocks: of a group of outputs
    int64_t line, tiles_of_line, all_tiles;  // line: its positions

    __host__ DEVICE int stage_bytes(bool strict) const { return (strict ? 2 : 1) * PLANES * rows * pitch * UNIT_BYTES; }
    __host__ DEVICE int groups() const { return ceil_div(OUT_CHANNELS, outs); }
    DEVICE int64_t plane() const { return static_cast<int64_t>(height) * width; }
    DEVICE int64_t out_plane() const { return static_cast<int64_t>(out_h) * out_w; }
    // Blocks and their consumers take tiles in turn. `ordinal` counts a consumer's own.
    DEVICE int64_t tile_number(int ordinal, int consumer) const {
        return blockIdx.x / groups() + (static_cast<int64_t>(ordinal) * CONSUMERS + consumer) * blocks;
    }
};

struct Tile {
    int64_t sample, first;        // first: its first position
    int size, row, left, column;  // row, left: of the output, the stage's first; column: the first position's, in the stage
    bool is_first, is_last;       // of its line

    DEVICE Tile(const Plan& plan, int64_t number) {
        const int64_t line = number / plan.tiles_of_line, of_line = number - line * plan.tiles_of_line;
        const int64_t begin = of_line * plan.step;
        sample = line / plan.lines;
        is_first = of_line == 0, is_last = of_line + 1 == plan.tiles_of_line;
        size = static_cast<int>((is_last ? plan.line : begin + plan.step) - begin);
        row = static_cast<int>(plan.by_rows ? line - sample * plan.lines : begin / plan.out_w);
        left = plan.by_rows ? static_cast<int>(begin) : 0;
        column = plan.by_rows ? 0 : static_cast<int>(begin - static_cast<int64_t>(row) * plan.out_w);
        first = plan.by_rows ? static_cast<int64_t>(row) * plan.out_w + begin : begin;
    }
};

// A tile's output in one channel: positions [first, last), counted from the tile's first, begin 16-byte aligned unless the line
// begins there. [whole_first, whole_last) of them go out by a bulk copy, in whole 16 bytes. Up to three are before and after.
struct ChannelRange {
    Element* out;  // the tile's first position
    int shift;     // of that position, in floats from 16 bytes
    int first, last, whole_first, whole_last;

    DEVICE ChannelRange(Element* plane, const Tile& tile) {
        out = plane + tile.first;
        shift = misalignment(out);
        first = tile.is_first ? 0 : (4 - shift) % 4;
        last = tile.is_last ? tile.size : tile.size + (4 - misalignment(out + tile.size)) % 4;
        whole_first = smaller(first + (4 - (shift + first) % 4) % 4, last);
        whole_last = larger(last - (shift + last) % 4, whole_first);
    }
    static DEVICE int misalignment(const Element* p) { return reinterpret_cast<uintptr_t>(p) / 4 % 4; }
    // The position outside of the bulk copy that one of 6 threads writes, where it exists.
    DEVICE int single(int thread) const { return thread < 3 ? first + thread : whole_last + thread - 3; }
    DEVICE bool has_single(int thread) const { return thread < 6 && single(thread) < (thread < 3 ? whole_first : last); }
};

// A unit's number among those that a position reads, and element e of it as the tap (u, v).
struct Unit {
    int number;
    DEVICE int plane() const { return number / (QUADS * TAP_ROWS); }
    DEVICE int row() const { return number / QUADS % TAP_ROWS; }
    DEVICE int quad() const { return number % QUADS; }
    DEVICE int u(int e) const { return 2 * (row() * PHASES + plane()) + e / 2 % 2; }
    DEVICE int v(int e) const { return quad() * 4 + e / 4 * 2 + e % 2; }
};

// What a consumer has to know of a stage.
struct StageInfo {
    int exponent;           // x was scaled by 2^exponent
    int is_first, is_last;  // channel of an attempt at the tile: the first one drops the sums of the attempt before
    int not_finite;         // the tile reads a NaN or an infinity: its outputs are computed without the tensor core
};

// Offsets of what a block keeps in shared memory; see the drawing above.
struct SharedLayout {
    int stages, staging, scales, infos, largest, barriers;
    int64_t bytes;

    __host__ DEVICE SharedLayout(const Plan& plan, bool strict) {
        const int64_t weight_bytes = (strict ? 2 : 1) * weight_units(plan.outs) * UNIT_BYTES;
        const int64_t stage_bytes = static_cast<int64_t>(CONSUMERS) * plan.stages * plan.stage_bytes(strict);
        const int64_t before_scales = weight_bytes + stage_bytes + CONSUMERS * STAGING_BUFFERS * STAGING * 4;
        stages = weight_bytes, staging = weight_bytes + stage_bytes, scales = before_scales;
        infos = scales + 2 * plan.outs * 4;
        largest = infos + CONSUMERS * plan.stages * static_cast<int>(sizeof(StageInfo));
        barriers = largest + CONSUMERS * 2 * PRODUCER_WARPS * 4;
        bytes = before_scales + (barriers - scales) + (2 * CONSUMERS * plan.stages + 1) * 8;
    }
};

// The pipeline of one consumer and its producer, and where a warpgroup is in it: a stage, and its mbarriers' parity. A producer
// waits until a stage is empty, fills it and arrives at its full mbarrier; a consumer the other way round. Each lane arrives
// for itself.
struct Pipeline {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    StageInfo* infos;
    int stage_bytes, stages, stage = 0;
    uint32_t parity = 0;

    DEVICE Pipeline(char* memory, const SharedLayout& layout, const Plan& plan, bool strict, int consumer) {
        stage_bytes = plan.stage_bytes(strict), stages = plan.stages;
        data = shared_address(memory + layout.stages) + consumer * stages * stage_bytes;
        infos = reinterpret_cast<StageInfo*>(memory + layout.infos) + consumer * stages;
        barriers = shared_address(memory + layout.barriers) + 8 + consumer * stages * 16;
    }
    DEVICE uint32_t address() const { return data + stage * stage_bytes; }
    DEVICE StageInfo& info() const { return infos[stage]; }
    DEVICE uint32_t full() const { return barriers + stage * 8; }
    DEVICE uint32_t empty() const { return barriers + (stages + stage) * 8; }
    DEVICE void consumer_wait() const { mbarrier_try_wait(full(), parity); }
    DEVICE void consumer_release() const { mbarrier_arrive(empty()); }
    DEVICE void producer_acquire() const { mbarrier_try_wait(empty(), parity ^ 1); }
    DEVICE void producer_commit() const { mbarrier_arrive(full()); }
    DEVICE void advance() { if (++stage == stages) stage = 0, parity ^= 1; }
};

// Where a producer is: a tile, a channel of it, and the first row pair and column pair of a batch.
struct Cursor {
    const Element* sample;     // of x
    int row, left, row_pairs;  // as the tile has them; row pairs that its products read
    int ordinal = 0;           // of the tile among the producer's own
    int channel, row_pair, column_pair;

    // False where there is no such tile.
    DEVICE bool begin_tile(const Element* x, const Plan& plan, int consumer) {
        const int64_t number = plan.tile_number(ordinal, consumer);
        if (number >= plan.all_tiles) return false;
        const Tile tile(plan, number);
        sample = x + tile.sample * IN_CHANNELS * plan.plane();
        row = tile.row, left = tile.left;
        row_pairs = ((tile.column + POSITIONS - 1 + QUADS - 1) / plan.pitch + TAP_ROWS) * PLANES;
        begin_attempt();
        return true;
    }
    DEVICE void begin_attempt() { channel = 0, row_pair = 0, column_pair = 0; }
    DEVICE bool begins_stage() const { return row_pair == 0 && column_pair == 0; }
    // To the next batch; whether that is in another stage.
    DEVICE bool next(const Plan& plan) {
        column_pair += WARP * BATCH_PASSES;
        if (column_pair < 2 * plan.pitch) return false;
        column_pair = 0, row_pair += PRODUCER_WARPS * BATCH_PAIRS;
        if (row_pair < row_pairs) return false;
        row_pair = 0, ++channel;
        return true;
    }
};

struct Tensors {
    const Element* __restrict__ x;
    const Element* __restrict__ weight;
    const Element* __restrict__ bias;  // or null
    Element* __restrict__ out;
};

// ---- the kernel: what a block does, and then the parts of it
template <int OUTS, bool STRICT>
struct Block {
    const Plan& plan;
    const Tensors& tensors;
    char* const memory;
    const SharedLayout layout;

    // All weights of a group of outputs stay in shared memory; TMA loads them while the first tiles are on their way. Of the
    // four warpgroups 0 and 1 consume, 2 and 3 produce for them; registers go from producers to consumers.
    DEVICE void run(const uint4* __restrict__ packed) const {
        const int groups = plan.groups(), group = blockIdx.x % groups;
        const uint32_t weights_full = shared_address(memory + layout.barriers);
        if (threadIdx.x == 0) {
            mbarrier_init(weights_full, 1);
            for (int consumer = 0; consumer < CONSUMERS; ++consumer)
                for (Pipeline each = pipeline_of(consumer); each.stage < plan.stages; ++each.stage)
                    mbarrier_init(each.full(), WARPGROUP), mbarrier_init(each.empty(), WARPGROUP);
            fence_mbarrier_init();
            constexpr int PARTS = (STRICT ? 2 : 1) * IN_CHANNELS, BYTES = STEPS * 2 * OUTS * UNIT_BYTES;
            mbarrier_arrive_expect_tx(weights_full, PARTS * BYTES);
            for (int part = 0; part < PARTS; ++part)
                cp_async_bulk_load(shared_address(memory) + part * BYTES,
                                   packed + (static_cast<int64_t>(group) * PARTS + part) * (BYTES / UNIT_BYTES), BYTES,
                                   weights_full);
        }
        const float* const unscales = reinterpret_cast<const float*>(packed + groups * (STRICT ? 2 : 1) * weight_units(OUTS));
        if (threadIdx.x < OUTS) {
            const int o = group * OUTS + threadIdx.x;
            float* const scales = reinterpret_cast<float*>(memory + layout.scales);
            scales[threadIdx.x] = unscales[o];
            scales[OUTS + threadIdx.x] = tensors.bias && o < OUT_CHANNELS ? tensors.bias[o] : 0;
        }
        __syncthreads();
        const int warpgroup = uniform(static_cast<int>(threadIdx.x / WARPGROUP));
        if (warpgroup >= CONSUMERS) {
            warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
            if (plan.paired) produce<true>(warpgroup - CONSUMERS);
            else produce<false>(warpgroup - CONSUMERS);
        } else {
            warpgroup_reg_alloc<CONSUMER_REGISTERS>();
            consume(warpgroup);
        }
    }
    DEVICE Pipeline pipeline_of(int consumer) const { return {memory, layout, plan, STRICT, consumer}; }

    // A producer warpgroup: for each tile of its consumer, for each channel, fills a stage, batch by batch. The first batch of
    // the stage waits until the stage is empty; the last one publishes its StageInfo and arrives.
    // fp16 has TF32's 11 bits, but not its range: so a tile's values are scaled by a power of two, from the tile's first batch
    // that is not all zeros, with room for values 31 times as large. Where a later batch needs more, the tile begins again in
    // the stage that it has reached: is_first tells the consumer to drop its sums.
    template <bool PAIRED>
    DEVICE void produce(int consumer) const {
        constexpr int FIRST_TARGET = 11, NO_EXPONENT = 1000;
        Pipeline pipeline = pipeline_of(consumer);
        Cursor at;
        if (!at.begin_tile(tensors.x, plan, consumer)) return;
        Batch values;
        load_batch<PAIRED>(at, values);
        int exponent = NO_EXPONENT, slot = 0;
        bool not_finite = false;
        UNROLL_1 while (true) {
            const uint32_t largest = largest_of_batch(values, consumer, slot);
            slot ^= 1;
            if (largest >= INFINITE) {
                not_finite = true;
            } else if (!not_finite && largest > 0) {
                const bool begins = exponent == NO_EXPONENT;
                if (begins || __uint_as_float(largest) * power_of_2(exponent) > LARGEST_FP16) {
                    exponent = scale_exponent(__uint_as_float(largest), FIRST_TARGET);
                    if (!begins) {
                        at.begin_attempt();
                        load_batch<PAIRED>(at, values);
                        continue;
                    }
                }
            }
            if (at.begins_stage()) pipeline.producer_acquire();
            const int used_exponent = exponent == NO_EXPONENT ? 0 : exponent;
            store_batch(pipeline.address(), at, power_of_2(used_exponent), values);
            if (at.next(plan)) {
                const bool is_last = at.channel == IN_CHANNELS;
                if (threadIdx.x % WARPGROUP == 0) pipeline.info() = {used_exponent, at.channel == 1, is_last, not_finite};
                fence_proxy_async();
                pipeline.producer_commit();
                pipeline.advance();
                if (is_last) {
                    ++at.ordinal;
                    if (!at.begin_tile(tensors.x, plan, consumer)) break;
                    exponent = NO_EXPONENT, not_finite = false;
                }
            }
            load_batch<PAIRED>(at, values);
        }
    }

    // A consumer warpgroup: for each of its tiles, waits for a channel's stage, multiplies, and releases the stage; after the
    // last channel it writes the outputs. Sums of 192 positions x OUTS are in registers. Tiles that are not finite come at the
    // end.
    DEVICE void consume(int consumer) const {
        const int first_channel = blockIdx.x % plan.groups() * OUTS, first_weight = shared_address(memory) / UNIT_BYTES;
        Pipeline pipeline = pipeline_of(consumer);
        int first_fp32 = 1 << 30, last_fp32 = -1;  // ordinals
        mbarrier_try_wait(shared_address(memory + layout.barriers), 0);  // the weights
        UNROLL_1 for (int ordinal = 0; plan.tile_number(ordinal, consumer) < plan.all_tiles; ++ordinal) {
            const Tile tile(plan, plan.tile_number(ordinal, consumer));
            float sums[M_TILES][OUTS / 2];
            StageInfo info;
            int channel = 0;
            UNROLL_1 do {
                pipeline.consumer_wait();
                info = pipeline.info();
                if (info.is_first) channel = 0;
                const int x = uniform(static_cast<int>(pipeline.address() / UNIT_BYTES) + tile.column);
                const int weights = first_weight + channel * STEPS * 2 * OUTS;
                if constexpr (!STRICT) {
                    wgmma_fence();
                    multiply_stage(x, weights, !info.is_first, sums);
                    wgmma_commit_group();
                    wgmma_wait_group<0>();
                    pipeline.consumer_release();
                } else {
                    // The tensor core cuts off what a sum does not hold, always towards zero: so a stage is summed from zero,
                    // small terms first, and the sums of stages are added as fp32 numbers are.
                    const int low_x = plan.stage_bytes(false) / UNIT_BYTES, low_weights = static_cast<int>(weight_units(OUTS));
                    UNROLL for (int m = 0; m < M_TILES; ++m) {
                        float part[1][OUTS / 2];
                        UNROLL_1 for (int k = 0; k < 3; ++k) {  // low * high, high * low, high * high
                            wgmma_fence();
                            multiply_stage(x + 64 * m + (k == 0 ? low_x : 0), weights + (k == 1 ? low_weights : 0), k > 0,
                                           part);
                        }
                        wgmma_commit_group();
                        wgmma_wait_group<0>();
                        if (m == M_TILES - 1) pipeline.consumer_release();
                        UNROLL for (int i = 0; i < OUTS / 2; ++i) sums[m][i] = part[0][i] + (info.is_first ? 0 : sums[m][i]);
                    }
                }
                pipeline.advance(), ++channel;
            } while (!info.is_last);
            if (info.not_finite) last_fp32 = ordinal, first_fp32 = smaller(first_fp32, ordinal);
            else write_tile(sums, tile, info.exponent, first_channel, consumer);
        }
        cp_async_bulk_wait();
        bar_sync(1 + consumer, WARPGROUP);  // tiles between two such are written again
        UNROLL_1 for (int k = first_fp32; k <= last_fp32; ++k) write_fp32_tile(plan.tile_number(k, consumer));
    }

    // ---- a producer's parts: from device memory through registers to a stage
    // Coalesced loads. PAIRED: rows begin at multiples of 8 bytes, and pairs of columns exist as a whole or not at all.
    template <bool PAIRED>
    DEVICE void load_batch(const Cursor& at, Batch& values) const {
        const int warp = threadIdx.x / WARP % PRODUCER_WARPS, first_pair = at.column_pair + threadIdx.x % WARP;
        const int top = at.row * STRIDE_H - PAD_H, left = at.left * STRIDE_W - PAD_W + 2 * first_pair;
        bool left_exists[BATCH_PASSES], right_exists[BATCH_PASSES];  // of a pair of columns
        UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
            const bool in_stage = first_pair + WARP * k < 2 * plan.pitch;
            const unsigned column = left + 2 * WARP * k, width = plan.width;  // less than 0 is very large
            left_exists[k] = in_stage && column < width;
            right_exists[k] = PAIRED ? left_exists[k] : in_stage && column + 1 < width;
        }
        UNROLL for (int i = 0; i < BATCH_PAIRS; ++i) {
            // Pairs of one row of all planes come before those of the next.
            const int pair = at.row_pair + i * PRODUCER_WARPS + warp;
            const int h = top + (PLANES == PHASES ? 2 * pair : pair / PLANES * STRIDE_H + 2 * (pair % PLANES));
            const Element* row = at.sample + at.channel * plan.plane() + left + static_cast<int64_t>(h) * plan.width;
            UNROLL for (int r = 0; r < 2; ++r, row += plan.width) {
                const bool exists = pair < at.row_pairs && static_cast<unsigned>(h + r) < static_cast<unsigned>(plan.height);
                UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
                    float2& v = values[i][k][r];
                    v = make_float2(0, 0);
                    const Element* const from = row + 2 * WARP * k;
                    if (PAIRED && exists && left_exists[k]) v = __ldg(reinterpret_cast<const float2*>(from));
                    if (!PAIRED && exists && left_exists[k]) v.x = __ldg(from);
                    if (!PAIRED && exists && right_exists[k]) v.y = __ldg(from + 1);
                }
            }
        }
    }

    // The bits of the largest magnitude in the batch of all four warps. One barrier is enough, since calls alternate two slots.
    DEVICE uint32_t largest_of_batch(const Batch& values, int consumer, int slot) const {
        uint32_t* const slots = reinterpret_cast<uint32_t*>(memory + layout.largest);
        uint32_t* const of_warps = slots + (consumer * 2 + slot) * PRODUCER_WARPS;
        int largest_positive = 0;  // numbers of one sign are ordered as their bits are
        uint32_t largest_negative = 0;
        UNROLL for (int i = 0; i < BATCH_PAIRS * BATCH_PASSES * 2; ++i) {
            const float2 v = values[i / (2 * BATCH_PASSES)][i / 2 % BATCH_PASSES][i % 2];
            const uint32_t x = __float_as_uint(v.x), y = __float_as_uint(v.y);
            largest_positive = larger(largest_positive, larger(static_cast<int>(x), static_cast<int>(y)));
            largest_negative = larger(largest_negative, larger(x, y));
        }
        uint32_t largest = warp_max(larger(static_cast<uint32_t>(largest_positive), largest_negative & 0x7fffffffu));
        if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP % PRODUCER_WARPS] = largest;
        bar_sync(1 + CONSUMERS + consumer, WARPGROUP);
        UNROLL for (int warp = 0; warp < PRODUCER_WARPS; ++warp) largest = larger(largest, of_warps[warp]);
        return largest;
    }

    // Stores half a unit, two columns of two rows, for each row pair and column pair; strict: the low parts, too.
    DEVICE void store_batch(uint32_t stage, const Cursor& at, float scale, const Batch& values) const {
        constexpr int PAIR_BYTES = UNIT_BYTES / 2;
        const int warp = threadIdx.x / WARP % PRODUCER_WARPS, first_pair = at.column_pair + threadIdx.x % WARP;
        UNROLL for (int i = 0; i < BATCH_PAIRS; ++i) {
            const int pair = at.row_pair + i * PRODUCER_WARPS + warp;
            const int row = pair % PLANES * plan.rows + pair / PLANES;  // of all planes
            UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
                const uint32_t to = stage + row * plan.pitch * UNIT_BYTES + first_pair * PAIR_BYTES + WARP * k * PAIR_BYTES;
                const bool exists = pair < at.row_pairs && first_pair + WARP * k < 2 * plan.pitch;
                const float2 upper = values[i][k][0], lower = values[i][k][1];
                const float a = upper.x * scale, b = upper.y * scale, c = lower.x * scale, d = lower.y * scale;
                st_shared_v2_u32_if(exists, to, fp16_pair(a, b), fp16_pair(c, d));
                if (STRICT)
                    st_shared_v2_u32_if(exists, to + plan.stage_bytes(false), fp16_pair(fp16_residual(a), fp16_residual(b)),
                                        fp16_pair(fp16_residual(c), fp16_residual(d)));
            }
        }
    }

    // ---- a consumer's parts: wgmma, and outputs through shared memory to device memory
    // sums += (or, where `accumulate` is 0, =) the products of a stage's taps, at TILES x 64 positions. `x` and `weights` count
    // units of shared memory, x from the tile's first position on.
    template <int TILES>
    DEVICE void multiply_stage(int x, int weights, int accumulate, float(&sums)[TILES][OUTS / 2]) const {
        const int pitch = plan.pitch, plane = plan.rows * pitch;
        const auto offset_of = [&](const Unit& unit) { return unit.plane() * plane + unit.row() * pitch + unit.quad(); };
#pragma unroll (UNROLLED_STEPS)
        for (int step = 0; step < STEPS; ++step) {
            const int first = offset_of({2 * step}), second = offset_of({smaller(2 * step + 1, UNITS - 1)});
            UNROLL for (int m = 0; m < TILES; ++m) {
                const uint64_t a = descriptor(x + 64 * m + first, second - first);
                const uint64_t b = descriptor(weights + 2 * step * OUTS, OUTS);
                if constexpr (OUTS == 96) wgmma_m64n96k16_f16(sums[m], a, b, accumulate || step > 0);
                else wgmma_m64n48k16_f16(sums[m], a, b, accumulate || step > 0);
            }
        }
    }

    // Writes a tile's outputs through staging, 8 channels at a time: a channel's positions lie there as they will lie in device
    // memory. Two channels of each 8 go out by a warp: one lane issues the bulk copies, six lanes a channel write what is
    // around them. A buffer is written while the copies of the one before still read theirs.
    DEVICE void write_tile(const float(&sums)[M_TILES][OUTS / 2], const Tile& tile, int exponent, int first_channel,
                           int consumer) const {
        const int channels = smaller(OUTS, OUT_CHANNELS - first_channel);
        const float* const scales = reinterpret_cast<const float*>(memory + layout.scales);
        float* const staging = reinterpret_cast<float*>(memory + layout.staging) + consumer * STAGING_BUFFERS * STAGING;
        const int64_t out_plane = plan.out_plane();
        Element* const out = tensors.out + (tile.sample * OUT_CHANNELS + first_channel) * out_plane;
        const int warp = uniform(static_cast<int>(threadIdx.x / WARP % 4));
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        // wgmma leaves a lane columns 8j + 2t and 8j + 2t + 1 (channels) of rows g and g + 8 of a warp's 16 (positions). Here
        // are their offsets in the tile, in bytes; what is computed in vain, between the rows, goes to the end.
        int offsets[M_TILES][2];
        UNROLL for (int i = 0; i < 2 * M_TILES; ++i) {
            const int unit = tile.column + i / 2 * 64 + warp * 16 + g + i % 2 * 8, row = unit / plan.pitch;
            const int column = unit - row * plan.pitch, in_vain = row * (plan.pitch - plan.columns) + column - plan.columns;
            const bool is_output = column < plan.columns;
            offsets[i / 2][i % 2] = (is_output ? row * plan.columns + column - tile.column : POSITIONS - 1 - in_vain) * 4;
        }
        const uint32_t first_staged = shared_address(staging);
        const ChannelRange lane_ranges[2] = {{out + 2 * t * out_plane, tile}, {out + (2 * t + 1) * out_plane, tile}};
        const uint32_t lane_row = first_staged + (2 * t * STAGING_ROW + lane_ranges[0].shift) * 4;
        const uint32_t next_row = first_staged + ((2 * t + 1) * STAGING_ROW + lane_ranges[1].shift) * 4;
        // The bulk copies of the warp's two channels.
        Element* const out_begin = reinterpret_cast<Element*>(uniform(reinterpret_cast<uint64_t>(out + tile.first)));
        int whole_first[2], whole_bytes[2], whole_from[2];
        UNROLL for (int r = 0; r < 2; ++r) {
            const ChannelRange range(out + (2 * warp + r) * out_plane, tile);
            whole_first[r] = uniform(range.whole_first), whole_bytes[r] = uniform((range.whole_last - range.whole_first) * 4);
            whole_from[r] = uniform(static_cast<int>(first_staged) +
                                    ((2 * warp + r) * STAGING_ROW + range.shift + range.whole_first) * 4);
        }
        // The lane's single position.
        const int single_row = 2 * warp + lane / 16;
        const ChannelRange mine(out + single_row * out_plane, tile);
        const int single = mine.single(lane % 16), single_staged = single_row * STAGING_ROW + mine.shift + single;
        const bool has_single = mine.has_single(lane % 16);

        const float half_unscale = power_of_2(-exponent / 2), other_half = power_of_2(-exponent - -exponent / 2);
        UNROLL for (int j = 0; j < OUTS / 8; ++j) {
            const int buffer = j % STAGING_BUFFERS * STAGING;
            const float2 unscale = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * t);
            const float2 bias = *reinterpret_cast<const float2*>(scales + OUTS + 8 * j + 2 * t);
            const float factor_x = fminf(half_unscale * unscale.x, LARGEST_POWER);
            const float factor_y = fminf(half_unscale * unscale.y, LARGEST_POWER);
            UNROLL for (int i = 0; i < 2 * M_TILES; ++i) {
                const float* pair = sums[i / 2] + 4 * j + i % 2 * 2;
                const int offset = offsets[i / 2][i % 2] + buffer * 4;
                st_shared_f32(lane_row + offset, fmaf(pair[0] * factor_x, other_half, bias.x));
                st_shared_f32(next_row + offset, fmaf(pair[1] * factor_y, other_half, bias.y));
            }
            fence_proxy_async();
            if (lane == 0) cp_async_bulk_wait_read<STAGING_BUFFERS - 2>();  // then the buffer of the next 8 is free
            bar_sync(1 + consumer, WARPGROUP);
            if (lane == 0) {
                UNROLL for (int r = 0; r < 2; ++r) {
                    const int channel = 8 * j + 2 * warp + r;
                    if (channel < channels && whole_bytes[r] > 0)
                        cp_async_bulk_store(out_begin + channel * out_plane + whole_first[r], whole_from[r] + buffer * 4,
                                            whole_bytes[r]);
                }
                cp_async_bulk_commit();
            }
            if (has_single && 8 * j + single_row < channels)
                out_begin[(8 * j + single_row) * out_plane + single] = staging[buffer + single_staged];
        }
    }

    // A tile that reads a NaN or an infinity, by a warpgroup, in plain fp32, from x and the weights as they are.
    DEVICE void write_fp32_tile(int64_t number) const {
        const Tile tile(plan, number);
        const int group = blockIdx.x % plan.groups();
        UNROLL_1 for (int o = group * OUTS; o < smaller((group + 1) * OUTS, OUT_CHANNELS); ++o) {
            const ChannelRange range(tensors.out + (tile.sample * OUT_CHANNELS + o) * plan.out_plane(), tile);
            UNROLL_1 for (int k = range.first + threadIdx.x % WARPGROUP; k < range.last; k += WARPGROUP) {
                const int i = static_cast<int>((tile.first + k) / plan.out_w);
                const int j = static_cast<int>(tile.first + k - static_cast<int64_t>(i) * plan.out_w);
                float sum = 0;
                UNROLL_1 for (int tap = 0; tap < IN_CHANNELS * TAPS; ++tap) {
                    const int h = i * STRIDE_H - PAD_H + tap % TAPS / KERNEL_W, w = j * STRIDE_W - PAD_W + tap % KERNEL_W;
                    const Element* row = tensors.x + ((tile.sample * IN_CHANNELS + tap / TAPS) * plan.height + h) * plan.width;
                    const bool inside = h >= 0 && h < plan.height && w >= 0 && w < plan.width;
                    if (inside) sum += row[w] * tensors.weight[static_cast<int64_t>(o) * IN_CHANNELS * TAPS + tap];
                }
                range.out[k] = tensors.bias ? sum + tensors.bias[o] : sum;
            }
        }
    }
};

template <int OUTS, bool STRICT>
__global__ void __launch_bounds__(THREADS, 1)
    convolve(const Plan plan, const Tensors tensors, const uint4* __restrict__ packed) {
    extern __shared__ __align__(128) char memory[];
    Block<OUTS, STRICT>{plan, tensors, memory, {plan, STRICT}}.run(packed);
}

// ---- weights as right operands: [group of outputs][high, low][channel][unit][output], 16 bytes each; then what undoes their
// scales. A block an output channel: it finds the largest weight, and scales, converts and packs.
constexpr int WEIGHT_TARGET = 14, MOST_WEIGHT_EXPONENT = 62;  // so that the product of two scales can be undone

__global__ void __launch_bounds__(WARPGROUP)
    pack_weights(const Element* __restrict__ weight, uint4* __restrict__ packed, int outs, bool strict) {
    __shared__ uint32_t warp_largest[WARPGROUP / WARP];
    const int o = blockIdx.x, group = o / outs, groups = ceil_div(OUT_CHANNELS, outs);
    const Element* const mine = weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS;
    uint32_t largest = 0;
    if (o < OUT_CHANNELS)
        for (int i = threadIdx.x; i < IN_CHANNELS * TAPS; i += WARPGROUP)
            largest = larger(largest, __float_as_uint(fabsf(mine[i]) < INFINITY ? fabsf(mine[i]) : 0));
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (int warp = 0; warp < WARPGROUP / WARP; ++warp) largest = larger(largest, warp_largest[warp]);
    const int exponent = smaller(scale_exponent(__uint_as_float(largest), WEIGHT_TARGET), MOST_WEIGHT_EXPONENT);
    const int64_t part = weight_units(outs);
    for (int i = threadIdx.x; i < IN_CHANNELS * STEPS * 2; i += WARPGROUP) {
        const int channel = i / (2 * STEPS);
        const Unit unit{i % (2 * STEPS)};
        float w[8];
        UNROLL for (int e = 0; e < 8; ++e) {
            const int u = unit.u(e), v = unit.v(e);
            const bool exists = o < OUT_CHANNELS && unit.number < UNITS && u < KERNEL_H && v < KERNEL_W;
            w[e] = exists ? mine[channel * TAPS + u * KERNEL_W + v] * power_of_2(exponent) : 0;
        }
        uint4* const to = packed + group * (strict ? 2 : 1) * part + static_cast<int64_t>(i) * outs + o % outs;
        to[0] = make_uint4(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]), fp16_pair(w[4], w[5]), fp16_pair(w[6], w[7]));
        if (!strict) continue;
        UNROLL for (int e = 0; e < 8; ++e) w[e] = fp16_residual(w[e]);
        to[part] = make_uint4(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]), fp16_pair(w[4], w[5]), fp16_pair(w[6], w[7]));
    }
    float* const unscales = reinterpret_cast<float*>(packed + groups * (strict ? 2 : 1) * part);
    if (threadIdx.x == 0) unscales[o] = power_of_2(-exponent);
}

// ---- launches
// The one predicate of what the kernel takes: whether weights and a pipeline of two stages or more fit into the device's shared
// memory; `plan` is how. Whole planes are lines where they can be.
static bool make_plan(Plan& plan, bool strict, const Element* x, int64_t batch, int64_t height, int64_t width, int device) {
    constexpr int MOST_STAGES = 4, WIDEST = 4096;  // WIDEST: outputs of a row whose planes are lines
    int sm_count, shared_bytes;
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    plan.height = height, plan.out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1;
    plan.width = width, plan.out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
    plan.paired = width % 2 == 0 && PAD_W % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 8 == 0;
    for (const int outs : {strict || OUT_CHANNELS <= FEW_OUTS ? FEW_OUTS : MOST_OUTS, FEW_OUTS})
        for (const bool by_rows : {false, true}) {
            if (!weights_fit(outs, strict) || (!by_rows && plan.out_w > WIDEST)) continue;
            plan.outs = outs, plan.by_rows = by_rows;
            plan.columns = by_rows ? POSITIONS : plan.out_w, plan.pitch = plan.columns + QUADS - 1;
            plan.rows = ((by_rows ? 0 : plan.columns - 1) + POSITIONS - 1 + QUADS - 1) / plan.pitch + TAP_ROWS;
            plan.lines = by_rows ? plan.out_h : 1;
            plan.line = by_rows ? plan.out_w : static_cast<int64_t>(plan.out_h) * plan.out_w;
            int fewest = POSITIONS;  // that a tile holds, from whichever column it begins
            for (int first = larger(plan.columns - POSITIONS, 0); !by_rows && first < plan.columns; ++first) {
                const int units = first + POSITIONS, whole_rows = units / plan.pitch, rest = units % plan.pitch;
                fewest = smaller(fewest, whole_rows * plan.columns + smaller(rest, plan.columns) - first);
            }
            plan.step = fewest - OVERLAP;
            plan.tiles_of_line = plan.line <= fewest ? 1 : 1 + (plan.line - fewest + plan.step - 1) / plan.step;
            plan.all_tiles = batch * plan.lines * plan.tiles_of_line;
            const int blocks = larger(sm_count / plan.groups(), 1);
            plan.blocks = plan.all_tiles < blocks ? static_cast<int>(plan.all_tiles) : blocks;
            for (plan.stages = MOST_STAGES; plan.stages >= 2; --plan.stages)
                if (SharedLayout(plan, strict).bytes <= shared_bytes) return true;
        }
    return false;
}

// The floats of the weights as pack_weights leaves them, and what undoes their scales; 0: what the kernel does not take.
extern "C" int64_t count_packed(int64_t strict, int64_t batch, int64_t height, int64_t width, int64_t device) {
    Plan plan;
    if (!make_plan(plan, strict, nullptr, batch, height, width, device)) return 0;
    return plan.groups() * ((strict ? 2 : 1) * weight_units(plan.outs) * (UNIT_BYTES / 4) + plan.outs);
}

template <int OUTS, bool STRICT>
static cudaError_t launch(const Plan& plan, const Tensors& tensors, uint4* packed, cudaStream_t stream) {
    if constexpr (weights_fit(OUTS, STRICT)) {
        pack_weights<<<plan.groups() * OUTS, WARPGROUP, 0, stream>>>(tensors.weight, packed, OUTS, STRICT);
        const int bytes = static_cast<int>(SharedLayout(plan, STRICT).bytes);
        const auto convolution = convolve<OUTS, STRICT>;
        const cudaError_t error = cudaFuncSetAttribute(convolution, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error != cudaSuccess) return error;
        convolution<<<plan.blocks * plan.groups(), THREADS, bytes, stream>>>(plan, tensors, packed);
        return cudaGetLastError();
    }
    return cudaErrorNotSupported;
}

// out (batch, OUT_CHANNELS, out_h, out_w); `packed` has count_packed() floats; bias may be null.
extern "C" int launch_convolve(const Element* x, const Element* weight, const Element* bias, float* packed, Element* out,
                               int64_t strict, int64_t batch, int64_t height, int64_t width, cudaStream_t stream) {
    int device = 0;
    cudaGetDevice(&device);
    Plan plan;
    if (!make_plan(plan, strict, x, batch, height, width, device)) return cudaErrorNotSupported;
    const auto run = strict                   ? launch<FEW_OUTS, true>
                     : plan.outs == MOST_OUTS ? launch<MOST_OUTS, false>
                                              : launch<FEW_OUTS, false>;
    return run(plan, {x, weight, bias, out}, reinterpret_cast<uint4*>(packed), stream);
}
"""


def is_strict():
    """Return whether PyTorch's settings forbid TF32 in convolutions."""
    precision_of = getattr(torch._C, "_get_fp32_precision_getter", None)  # from PyTorch 2.9 on
    return precision_of("cuda", "conv") != "tf32" if precision_of else not torch.backends.cudnn.allow_tf32


@functools.lru_cache(maxsize=1024)
def sizes(kernels, x, weight, bias, stride, padding, strict):
    """Return the output's shape, the floats of scratch (0: PyTorch computes) and numbers. Raises RuntimeError for bad input."""
    outs, built = kernels.OUT_CHANNELS, (kernels.STRIDE_H, kernels.STRIDE_W, kernels.PAD_H, kernels.PAD_W)
    check(kernels, "x", x, x, (*x[0][:1], kernels.IN_CHANNELS, *x[0][-2:]))
    check(kernels, "weight", weight, x, (outs, kernels.IN_CHANNELS, kernels.KERNEL_H, kernels.KERNEL_W))
    if bias:
        check(kernels, "bias", bias, x, (outs,))
    batch, _, *image = x[0]
    room = [size + 2 * pad - taps for size, pad, taps in zip(image, padding, weight[0][2:], strict=False)]
    if (*stride, *padding) != built or len(padding) != 2 or min(room) < 0 or max(image) >= 2**30:
        got = f"{image}, {[*stride]} and {[*padding]}"
        raise RuntimeError(f"{NAME}: a kernel of {[*weight[0][2:]]} with strides and padding of {[*built]} does not fit {got}")
    if x[2].type == "cuda" and torch.cuda.get_device_capability(x[2]) != (9, 0):
        raise RuntimeError(f"{NAME}: expected a GPU of compute capability 9.0 (Hopper); v4_tensor_core runs on 8.0 and later")
    shape = batch, outs, *[size // step + 1 for size, step in zip(room, stride, strict=True)]
    numbers = strict, batch, *image
    floats = kernels.count_packed(*numbers, x[2].index or 0) if math.prod(shape) else 1
    if not floats:
        limits = "a stride of 4 across and an even one down, weights for 48 outputs and two stages in shared memory"
        warn(f"{NAME}: PyTorch computes what these kernels do not take: {limits}")
    return shape, floats, numbers


def convolve(kernels, x, weight, bias, stride, padding, sizes=sizes):
    kinds = kind(x), kind(weight), None if bias is None else kind(bias)
    shape, floats, numbers = sizes(kernels, *kinds, tuple(stride), tuple(padding), is_strict())
    if not floats:
        return kernels.original(x, weight, bias, stride, padding)
    x, weight, bias, out = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), x.new_empty(shape)
    if out.numel():
        launch(kernels.launch_convolve, x, weight, bias, x.new_empty(floats), out, *numbers)
    return out


def original(x, weight, bias, stride, padding):
    """The gradient is PyTorch's, which computes the output again, 297 MB. training_tensor_core has its own."""
    return nn.functional.conv2d(x, weight, bias, stride, padding)


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    schema = "forward(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor"
    sources = NAME, CUDA, schema, convolve, original

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        conv = self._modules["conv1"]
        constants = {"IN_CHANNELS": conv.in_channels, "OUT_CHANNELS": conv.out_channels}
        for name, values in (("KERNEL", conv.kernel_size), ("STRIDE", conv.stride), ("PAD", conv.padding)):
            constants |= {f"{name}_{axis}": value for axis, value in zip("HW", values, strict=True)}
        hopper = ("-gencode=arch=compute_90a,code=sm_90a",)  # load_inline would build for 9.0, which lacks wgmma
        return build(*self.sources, flags=hopper, **constants)

    def operands(self, x):
        conv = self._modules["conv1"]  # self.conv1 takes nn.Module half a microsecond
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        return x, conv.weight, conv.bias, conv.stride, conv.padding

    def forward(self, x):
        operands = self.operands(x)
        return getattr(torch.ops, self.namespace()).forward(*operands)


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
