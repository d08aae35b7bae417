"""alexnet_conv1, v5: implicit GEMM by Hopper's wgmma, on rows of scaled fp16 in shared memory.

Why it is faster
    wgmma reads both operands from shared memory and reaches 767 TFLOP/s; v4's mma.sync, fed from registers, 622. x lies there
    in v4's units, 4 columns of 2 rows: a core matrix of wgmma's left operand is 8 of them, and another tap is another address.
    TF32 needs no conversion, but its products take 0.18 ms. Each of two consumer warpgroups has its own tiles and producer
    warpgroup: one writes while the other multiplies. H200: 0.200 ms, v4 0.214. Bound by issue and waits, not products.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    A tile of x is fp16 times a power of two, and so are an output's weights. x is off by at most 2^-11 of itself, as in TF32,
    or 2^-35 of the tile's largest; a weight by 2^-11 of itself or 2^-38 of its output's largest. Strict (PyTorch forbids TF32):
    x and weights are high + low, three products (fp16x3); an infinite weight may give NaN, since low parts of x have both
    signs. A tile that reads a NaN or an infinity in x is computed in plain fp32. 16-bit types have no scales.

Launches
    convolve: one block of 512 threads per SM, 219 KiB (strict: 218); persistent and warp-specialized: two producer warpgroups
    (x to fp16), two consumer warpgroups (wgmma, bulk copies out). First pack_weights: 128 threads per output channel.

Floor
    H200: 451 MB, 0.103 ms at 4.39 TB/s (16-bit: half). 54 GFLOP, 0.070 ms at 767 TFLOP/s; with tiles' padding 0.090.

Takes
    float32, float16 or bfloat16 CUDA tensors (batch, in_channels, height, width) on compute capability 9.0. PyTorch computes
    the backward pass and, with a warning, what make_plan refuses: strides other than 4 across and even down, and what shared
    memory is too small for: many weights; strict, images 247 to 250 or over 286 columns wide. MIT; copy it.
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

NAME = "alexnet_conv1_v5_hopper"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs INPUT, ELEMENT, STRICT, IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W.
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
// position: an output's index in its channel. unit: 16 bytes of fp16, 4 columns of 2 rows of x, in the order shown.
// Neighbouring positions, at stride 4, read neighbouring units: the units of 8 positions are a core matrix of wgmma's operand,
// and another tap is another address. Pairs of rows are sorted by their remainder modulo PHASES into planes: within a plane the
// next output row reads the next row. high, low: an fp16 value and, strict, the residual of its rounding.
//
//     order in   row 2r      | 0  1 | 4  5 |        plane 0 (or 1), `pitch` units wide, at stride 4:
//     a unit:    row 2r + 1  | 2  3 | 6  7 |            | row pair 0 (or 1)  | row pair 2 (or 3)  | row pair 4 (or 5) | ..
//
// What a block keeps in shared memory, from the top; bytes at the original's size. Strict: the same with 48 outputs, 2 stages.
//
//     weights  82,944   [high, low][channel][unit][output], 16 B       a bulk copy fills it once; wgmma's right operand
//     staging  37,632   [consumer][3][8 channels][196 elements]        a consumer fills it, its bulk copies empty it
//     the rest    848   scales, biases: all threads, at first; largest: between a producer's warps; the weights' mbarrier
//     stages  102,400   [consumer][4]: [high, low][plane][row][unit],  a producer fills one (full mbarrier), its consumer's
//                       StageInfo, mbarriers: full, empty              wgmma reads it: the left operand (empty mbarrier)
// Named barriers: 1 and 2 of a consumer's threads, for staging; 3 and 4 of a producer's, for `largest`.
constexpr int WARP = 32, WARPGROUP = 128, MAX_SHARED_BYTES = 227 * 1024;
constexpr bool FITS_UNITS = STRIDE_W == 4 && STRIDE_H % 2 == 0;  // or PyTorch computes
constexpr int TAPS = KERNEL_H * KERNEL_W, UNIT_BYTES = 16, QUADS = ceil_div(KERNEL_W, 4);  // QUADS: units across the kernel
constexpr int PHASES = ceil_div(STRIDE_H, 2), TAP_PAIRS = ceil_div(KERNEL_H, 2);
constexpr int PLANES = smaller(PHASES, TAP_PAIRS), TAP_ROWS = ceil_div(TAP_PAIRS, PHASES);
// A position reads UNITS of a channel: [plane][row][quad]. A step is the inner size of one wgmma, two of them.
constexpr int UNITS = PLANES * TAP_ROWS * QUADS, STEPS = ceil_div(UNITS, 2);

// TILE_M: a tile's units in the left operand: of 181 positions at the original's size, and of the gaps between image rows.
constexpr int CONSUMERS = 2, THREADS = 2 * CONSUMERS * WARPGROUP, M_TILES = 3, TILE_M = 64 * M_TILES;
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 184;  // launched with 128; 256 x 72 + 256 x 184 = all 65,536
constexpr int MOST_OUTS = 96, FEW_OUTS = 48;                      // of a block; strict: FEW_OUTS, whose weights have two parts
// Elements, of 8 channels. + PER_16: a row begins up to PER_16 - 1 late (shift), and rows are whole 16 bytes.
constexpr int STAGING_BUFFERS = 3, STAGING_ROW = TILE_M + PER_16, STAGING = 8 * STAGING_ROW;
// A batch: 8 row pairs (16-bit: 16) x 128 column pairs in a producer's registers; a warp has every fourth row pair. A stage
// here: two (one).
constexpr int PRODUCER_WARPS = WARPGROUP / WARP, BATCH_PAIRS = 8 / sizeof(Input), BATCH_PASSES = 4;
float2 pair_of(float);
__half2 pair_of(__half);
#if DIGITS == 8
__nv_bfloat162 pair_of(__nv_bfloat16);
#endif
using Pair = decltype(pair_of(Input()));           // two columns
using Batch = Pair[BATCH_PAIRS][BATCH_PASSES][2];  // [row pair][column pair][row]

// Units of a group's weights; strict: of high and low parts.
__host__ __device__ constexpr int64_t weight_units(int outs) {
    return static_cast<int64_t>(STRICT ? 2 : 1) * IN_CHANNELS * STEPS * 2 * outs;
}
template <int OUTS>
struct Shared {  // the stages lie behind it
    uint4 weights[weight_units(OUTS)];
    Element staging[CONSUMERS][STAGING_BUFFERS][STAGING];
    float unscales[OUTS], biases[OUTS];
    uint32_t largest[CONSUMERS][2][PRODUCER_WARPS];
    alignas(16) uint64_t weights_full;
};
// What a consumer has to know of a stage.
struct StageInfo {
    int exponent;           // x was scaled by 2^exponent
    int is_first, is_last;  // channel of an attempt at the tile: the first one drops the sums of the attempt before
    int not_finite;         // the tile reads a NaN or an infinity: its outputs are computed without the tensor core (SCALED)
};
constexpr int STAGE_MORE = sizeof(StageInfo) + 2 * 8;  // bytes behind the units of a stage: this, and its two mbarriers

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
DEVICE void st_shared(uint32_t at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }
template <class T>
DEVICE void st_shared(uint32_t at, T v) {  // of 16 bits
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(reinterpret_cast<const uint16_t&>(v)) : "memory");
}
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
#define REGISTERS_24 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define REGISTERS_48 REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
// d (64 x 48) = or += a (64 x 16) * b (16 x 48), fp16 or bf16, both in shared memory.
DEVICE void wgmma_m64n48k16(float (&d)[24], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (DIGITS == 8)
        asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %26, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {" REGISTERS_24 "}, "
                     "%24, %25, accumulate, 1, 1, 0, 0;\n}"
                     : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16) : "l"(a), "l"(b), "r"(accumulate));
    else
        asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %26, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" REGISTERS_24 "}, "
                     "%24, %25, accumulate, 1, 1, 0, 0;\n}"
                     : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16) : "l"(a), "l"(b), "r"(accumulate));
}
// d (64 x 96) = or += a (64 x 16) * b (16 x 96), fp16 or bf16, both in shared memory.
DEVICE void wgmma_m64n96k16(float (&d)[48], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (DIGITS == 8)
        asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %50, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" REGISTERS_48 "}, "
                     "%48, %49, accumulate, 1, 1, 0, 0;\n}"
                     : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40)
                     : "l"(a), "l"(b), "r"(accumulate));
    else
        asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %50, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" REGISTERS_48 "}, "
                     "%48, %49, accumulate, 1, 1, 0, 0;\n}"
                     : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40)
                     : "l"(a), "l"(b), "r"(accumulate));
}
// Describes an operand in shared memory without swizzle, made of core matrices of 8 rows x 16 bytes. Core matrices adjacent in
// the rows are 128 bytes apart, those adjacent in k `k_stride` units. Units have at most 14 bits, as their fields do.
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

// ---- elements, operands and powers of two
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
constexpr float LARGEST_FP16 = 65504, LARGEST_POWER = 0x1p127f;
constexpr uint32_t INFINITE = 0x7f800000u;  // magnitudes are ordered as their bits are
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
// The residual of rounding to fp16; none of an infinity.
DEVICE float residual(float x) { return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x)); }
DEVICE uint32_t residual_pair(float2 v, float scale) { return operand_pair(residual(v.x * scale), residual(v.y * scale)); }
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(float largest, int target) {
    return smaller(target + 126 - static_cast<int>(__float_as_uint(largest) >> 23), 126);  // largest < 2^((bits >> 23) - 126)
}

// ---- a call, and the static tile scheduler
// A line is output positions that are contiguous in memory: a whole channel, or a row of it where the image is so wide that a
// stage would be too large. A tile is at most TILE_M of a line. Neighbouring tiles overlap by 3 positions, so that each
// channel's part of the output can begin 16-byte aligned. A stage holds a channel's rows for a tile: `rows` rows of each plane,
// `pitch` units in each, of which `columns` begin at a position.
struct Plan {
    int height, width, out_h, out_w;
    bool paired;                             // rows of x begin at multiples of a Pair, and so do pairs of columns that exist
    bool by_rows;                            // lines are rows
    int columns, pitch, rows;                // of a stage
    int lines, step, outs, stages, blocks;   // lines: of a sample; step: from tile to tile; blocks: of a group of outputs
    int64_t line_size, tiles_per_line, all_tiles;
    const Input* __restrict__ x;
    const Element *__restrict__ weight, *__restrict__ bias;  // bias: or null
    Element* __restrict__ out;

    __host__ DEVICE int part_bytes() const { return PLANES * rows * pitch * UNIT_BYTES; }  // of a stage's high, or low, parts
    __host__ DEVICE int stage_bytes() const { return (STRICT ? 2 : 1) * part_bytes(); }
    __host__ DEVICE int groups() const { return ceil_div(OUT_CHANNELS, outs); }
    DEVICE int64_t x_size() const { return static_cast<int64_t>(height) * width; }  // of a channel
    DEVICE int64_t out_size() const { return static_cast<int64_t>(out_h) * out_w; }
    // Blocks and their consumers take tiles in turn: this one, and then each CONSUMERS * blocks later.
    DEVICE int64_t first_tile(int consumer) const { return blockIdx.x / groups() + static_cast<int64_t>(consumer) * blocks; }
};

struct Tile {
    int64_t sample, first;        // first: its first position
    int size, row, left, column;  // size: to the next tile's first, without the overlap; row, left: the stage's first output
                                  // row and column; column: the first position's column in the stage
    bool is_first, is_last;       // of its line

    DEVICE Tile(const Plan& plan, int64_t number) {
        const int64_t line = number / plan.tiles_per_line, in_line = number - line * plan.tiles_per_line;
        const int64_t begin = in_line * plan.step;
        sample = line / plan.lines;
        is_first = in_line == 0, is_last = in_line + 1 == plan.tiles_per_line;
        size = (is_last ? plan.line_size : begin + plan.step) - begin;
        row = plan.by_rows ? line - sample * plan.lines : begin / plan.out_w;
        left = plan.by_rows ? begin : 0;
        column = plan.by_rows ? 0 : begin - static_cast<int64_t>(row) * plan.out_w;
        first = plan.by_rows ? static_cast<int64_t>(row) * plan.out_w + begin : begin;
    }
};

// A tile's output in one channel: positions [first, last), counted from the tile's first; of floats they begin 16-byte aligned
// unless the line begins there. [whole_first, whole_last) of them go out by a bulk copy, in whole 16 bytes. Up to PER_16 - 1
// are before and after. 16-bit tiles do not overlap: their 7 more positions would need an 18th tile at the original's size.
constexpr int OVERLAP = SCALED ? PER_16 - 1 : 0;
struct ChannelRange {
    Element* out;                                     // the tile's first position
    int shift, first, last, whole_first, whole_last;  // shift: of that position, in elements from 16 bytes

    DEVICE ChannelRange(Element* channel, const Tile& tile) {
        out = channel + tile.first;
        shift = misalignment(out);
        first = !OVERLAP || tile.is_first ? 0 : (PER_16 - shift) % PER_16;
        last = !OVERLAP || tile.is_last ? tile.size : tile.size + (PER_16 - misalignment(out + tile.size)) % PER_16;
        whole_first = smaller(first + (PER_16 - (shift + first) % PER_16) % PER_16, last);
        whole_last = larger(last - (shift + last) % PER_16, whole_first);
    }
    static DEVICE int misalignment(const Element* p) { return reinterpret_cast<uintptr_t>(p) / sizeof(Element) % PER_16; }
};

// The pipeline of one consumer and its producer, at a stage and its parity. All 128 threads of a warpgroup arrive.
struct Pipeline {
    char* const first;  // of its stages, each `data_bytes` and STAGE_MORE
    const int data_bytes, stages;
    char* data = first;
    int stage = 0;
    uint32_t parity = 0;

    DEVICE uint32_t address() const { return shared_address(data); }
    DEVICE StageInfo& info() const { return *reinterpret_cast<StageInfo*>(data + data_bytes); }
    DEVICE uint32_t full() const { return shared_address(data) + data_bytes + sizeof(StageInfo); }
    DEVICE uint32_t empty() const { return full() + 8; }
    DEVICE void advance() {
        data += data_bytes + STAGE_MORE;
        if (++stage == stages) stage = 0, data = first, parity ^= 1;
    }
};

// Where a producer is in a tile: a channel, and the first row pair and column pair of a batch.
struct Cursor {
    const Input* sample;       // of x
    int row, left, row_pairs;  // as the tile has them; row pairs that its products read
    int channel = 0, row_pair = 0, column_pair = 0;

    DEVICE Cursor(const Plan& plan, const Tile& tile) : row(tile.row), left(tile.left) {
        sample = plan.x + tile.sample * IN_CHANNELS * plan.x_size();
        row_pairs = ((tile.column + TILE_M - 1 + QUADS - 1) / plan.pitch + TAP_ROWS) * PLANES;
    }
    // Moves to the next batch; returns whether it lies in the next stage.
    DEVICE bool next(const Plan& plan) {
        column_pair += WARP * BATCH_PASSES;
        if (column_pair < 2 * plan.pitch) return false;
        column_pair = 0, row_pair += PRODUCER_WARPS * BATCH_PAIRS;
        if (row_pair < row_pairs) return false;
        row_pair = 0, ++channel;
        return true;
    }
};

// ---- the kernel: what a block does, and then the parts of it
template <int OUTS>
struct Block {
    const Plan& plan;
    Shared<OUTS>& shared;

    // Warpgroups 0 and 1 consume, 2 and 3 produce for them. The weights come while the first tiles are on their way.
    DEVICE void run(const uint4* __restrict__ packed) const {
        const int group = blockIdx.x % plan.groups();
        if (threadIdx.x == 0) {
            const uint32_t weights_full = shared_address(&shared.weights_full);
            mbarrier_init(weights_full, 1);
            for (int consumer = 0; consumer < CONSUMERS; ++consumer)
                for (Pipeline each = pipeline_of(consumer); each.parity == 0; each.advance())
                    mbarrier_init(each.full(), WARPGROUP), mbarrier_init(each.empty(), WARPGROUP);
            fence_mbarrier_init();
            mbarrier_arrive_expect_tx(weights_full, sizeof(shared.weights));
            const uint4* const from = packed + group * weight_units(OUTS);
            cp_async_bulk_load(shared_address(shared.weights), from, sizeof(shared.weights), weights_full);
        }
        if (threadIdx.x < OUTS) {
            const int o = group * OUTS + threadIdx.x;
            const uint4* const after_weights = packed + plan.groups() * weight_units(OUTS);
            shared.unscales[threadIdx.x] = reinterpret_cast<const float*>(after_weights)[o];
            shared.biases[threadIdx.x] = plan.bias && o < OUT_CHANNELS ? to_float(plan.bias[o]) : 0;
        }
        __syncthreads();
        const int warpgroup = uniform(static_cast<int>(threadIdx.x / WARPGROUP));
        if (warpgroup >= CONSUMERS) {
            warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
            plan.paired ? produce<true>(warpgroup - CONSUMERS) : produce<false>(warpgroup - CONSUMERS);
        } else {
            warpgroup_reg_alloc<CONSUMER_REGISTERS>();
            consume(warpgroup);
        }
    }
    DEVICE Pipeline pipeline_of(int consumer) const {
        const int bytes = plan.stage_bytes();
        return {reinterpret_cast<char*>(&shared + 1) + consumer * plan.stages * (bytes + STAGE_MORE), bytes, plan.stages};
    }

    // A producer warpgroup: for each tile of its consumer, for each channel, fills a stage, batch by batch. A tile's power of
    // two comes from its first batch that is not all zeros, with room for values 31 times as large. Where a later batch needs
    // more, the tile begins again in the stage that it has reached: is_first tells the consumer to drop its sums. A thread's 16
    // (32) loads of a batch are all in flight at once, before the wait for an empty stage; full stages hide their latency.
    template <bool PAIRED>
    DEVICE void produce(int consumer) const {
        constexpr int FIRST_TARGET = 11, NO_EXPONENT = 1000;
        Pipeline pipeline = pipeline_of(consumer);
        int64_t number = plan.first_tile(consumer);
        if (number >= plan.all_tiles) return;
        Cursor at(plan, {plan, number});
        Batch values;
        load_batch<PAIRED>(at, values);
        int exponent = NO_EXPONENT, slot = 0;
        bool not_finite = false;
        UNROLL_1 while (true) {
            if constexpr (SCALED) {
                const uint32_t largest = largest_of_batch(values, shared.largest[consumer][slot], consumer);
                slot ^= 1;
                if (largest >= INFINITE) not_finite = true;
                else if (!not_finite && largest > 0) {
                    const bool begins = exponent == NO_EXPONENT;
                    if (begins || __uint_as_float(largest) * power_of_2(exponent) > LARGEST_FP16) {
                        exponent = scale_exponent(__uint_as_float(largest), FIRST_TARGET);
                        if (!begins) {
                            at.channel = 0, at.row_pair = 0, at.column_pair = 0;
                            load_batch<PAIRED>(at, values);
                            continue;
                        }
                    }
                }
            }
            // Returns at once where a tile that began again has the stage already.
            if (at.row_pair == 0 && at.column_pair == 0) mbarrier_try_wait(pipeline.empty(), pipeline.parity ^ 1);
            const int used_exponent = exponent == NO_EXPONENT ? 0 : exponent;
            store_batch(pipeline.address(), at, SCALED ? power_of_2(used_exponent) : 1, values);
            if (at.next(plan)) {  // at.channel is the next one
                const bool is_last = at.channel == IN_CHANNELS;
                if (threadIdx.x % WARPGROUP == 0) pipeline.info() = {used_exponent, at.channel == 1, is_last, not_finite};
                fence_proxy_async();
                mbarrier_arrive(pipeline.full());
                pipeline.advance();
                if (is_last) {
                    number += CONSUMERS * plan.blocks;
                    if (number >= plan.all_tiles) break;
                    at = Cursor(plan, {plan, number}), exponent = NO_EXPONENT, not_finite = false;
                }
            }
            load_batch<PAIRED>(at, values);
        }
    }

    // A consumer warpgroup: for each of its tiles, multiplies stage by stage, then writes the outputs.
    DEVICE void consume(int consumer) const {
        const int first_weight = shared_address(&shared) / UNIT_BYTES;
        Pipeline pipeline = pipeline_of(consumer);
        mbarrier_try_wait(shared_address(&shared.weights_full), 0);
        UNROLL_1 for (int64_t number = plan.first_tile(consumer); number < plan.all_tiles; number += CONSUMERS * plan.blocks) {
            const Tile tile(plan, number);
            float sums[M_TILES][OUTS / 2];
            StageInfo info;
            int channel = 0;
            UNROLL_1 do {
                mbarrier_try_wait(pipeline.full(), pipeline.parity);
                info = pipeline.info();
                if (info.is_first) channel = 0;
                const int x = uniform(static_cast<int>(pipeline.address() / UNIT_BYTES) + tile.column);
                const int weights = first_weight + channel * STEPS * 2 * OUTS;
                if constexpr (!STRICT) {
                    multiply_stage(x, weights, !info.is_first, sums);
                    wgmma_commit_group();
                    wgmma_wait_group<0>();
                    mbarrier_arrive(pipeline.empty());
                } else {
                    // The tensor core rounds sums towards zero, always: so each stage begins at zero, small terms first.
                    const int low_x = plan.part_bytes() / UNIT_BYTES, low_weights = IN_CHANNELS * STEPS * 2 * OUTS;
                    UNROLL for (int m = 0; m < M_TILES; ++m) {
                        float part[1][OUTS / 2];
                        UNROLL_1 for (int k = 0; k < 3; ++k)  // low * high, high * low, high * high
                            multiply_stage(x + 64 * m + (k ? 0 : low_x), weights + (k == 1 ? low_weights : 0), k, part);
                        wgmma_commit_group();
                        wgmma_wait_group<0>();
                        if (m == M_TILES - 1) mbarrier_arrive(pipeline.empty());
                        UNROLL for (int i = 0; i < OUTS / 2; ++i) sums[m][i] = part[0][i] + (info.is_first ? 0 : sums[m][i]);
                    }
                }
                pipeline.advance(), ++channel;
            } while (!info.is_last);
            if (SCALED ? info.not_finite : reads_not_finite(sums, consumer)) write_fp32_tile(tile);
            else write_tile(sums, tile, info.exponent, consumer);
        }
        cp_async_bulk_wait();
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
            right_exists[k] = in_stage && column + 1 < width;
        }
        UNROLL for (int i = 0; i < BATCH_PAIRS; ++i) {
            // pair -> plane pair % PLANES, row pair / PLANES; where PLANES < PHASES, pairs that no tap reads are skipped.
            const int pair = at.row_pair + i * PRODUCER_WARPS + warp;
            const int h = top + (PLANES == PHASES ? 2 * pair : pair / PLANES * STRIDE_H + 2 * (pair % PLANES));
            const Input* row = at.sample + at.channel * plan.x_size() + left + static_cast<int64_t>(h) * plan.width;
            UNROLL for (int r = 0; r < 2; ++r, row += plan.width) {
                const bool exists = pair < at.row_pairs && static_cast<unsigned>(h + r) < static_cast<unsigned>(plan.height);
                UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
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

    // The bits of the largest magnitude in the batch of all four warps. One barrier is enough, since calls alternate two slots.
    static DEVICE uint32_t largest_of_batch(const Batch& values, uint32_t (&of_warps)[PRODUCER_WARPS], int consumer) {
        int largest_positive = 0;  // numbers of one sign are ordered as their bits are
        uint32_t largest_negative = 0;
        UNROLL for (int i = 0; i < BATCH_PAIRS * BATCH_PASSES * 2; ++i) {
            const Pair v = values[i / (2 * BATCH_PASSES)][i / 2 % BATCH_PASSES][i % 2];
            const uint32_t x = __float_as_uint(to_float(v.x)), y = __float_as_uint(to_float(v.y));
            largest_positive = larger(largest_positive, larger(static_cast<int>(x), static_cast<int>(y)));
            largest_negative = larger(largest_negative, larger(x, y));
        }
        uint32_t largest = warp_max(larger(static_cast<uint32_t>(largest_positive), largest_negative & 0x7fffffffu));
        if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP % PRODUCER_WARPS] = largest;
        bar_sync(1 + CONSUMERS + consumer, WARPGROUP);
        UNROLL for (int warp = 0; warp < PRODUCER_WARPS; ++warp) largest = larger(largest, of_warps[warp]);
        return largest;
    }

    // Stores half a unit, two columns of two rows, for each row pair and column pair; strict: the low parts, too. By predicate:
    // an `if` around the stores makes the strict kernel longer.
    DEVICE void store_batch(uint32_t stage, const Cursor& at, float scale, const Batch& values) const {
        constexpr int PAIR_BYTES = UNIT_BYTES / 2;
        const int warp = threadIdx.x / WARP % PRODUCER_WARPS, first_pair = at.column_pair + threadIdx.x % WARP;
        UNROLL for (int i = 0; i < BATCH_PAIRS; ++i) {
            const int pair = at.row_pair + i * PRODUCER_WARPS + warp;
            const int row = pair % PLANES * plan.rows + pair / PLANES;  // of all planes
            UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
                const uint32_t to = stage + row * plan.pitch * UNIT_BYTES + first_pair * PAIR_BYTES + WARP * k * PAIR_BYTES;
                const bool exists = pair < at.row_pairs && first_pair + WARP * k < 2 * plan.pitch;
                const Pair upper = values[i][k][0], lower = values[i][k][1];
                st_shared_v2_u32_if(exists, to, operand_pair(upper, scale), operand_pair(lower, scale));
                if constexpr (STRICT) {
                    const uint32_t low_upper = residual_pair(make_float2(to_float(upper.x), to_float(upper.y)), scale);
                    const uint32_t low_lower = residual_pair(make_float2(to_float(lower.x), to_float(lower.y)), scale);
                    st_shared_v2_u32_if(exists, to + plan.part_bytes(), low_upper, low_lower);
                }
            }
        }
    }

    // ---- a consumer's parts: wgmma, and outputs through shared memory to device memory
    // sums += (or, where `accumulate` is 0, =) the products of a stage's taps, at TILES x 64 units. `x` and `weights` count
    // units of shared memory, x from the tile's first position on. An odd last unit is read twice, then with zero weights.
    template <int TILES>
    DEVICE void multiply_stage(int x, int weights, int accumulate, float(&sums)[TILES][OUTS / 2]) const {
        const int pitch = plan.pitch, plane = plan.rows * pitch;
        wgmma_fence();
        const auto offset_of = [&](int unit) {
            return unit / (QUADS * TAP_ROWS) * plane + unit / QUADS % TAP_ROWS * pitch + unit % QUADS;
        };
#pragma unroll (STEPS <= 16 ? STEPS : 1)
        for (int step = 0; step < STEPS; ++step) {
            const int first = offset_of(2 * step), second = offset_of(smaller(2 * step + 1, UNITS - 1));
            UNROLL for (int m = 0; m < TILES; ++m) {
                const uint64_t a = descriptor(x + 64 * m + first, second - first);
                const uint64_t b = descriptor(weights + 2 * step * OUTS, OUTS);
                if constexpr (OUTS == 96) wgmma_m64n96k16(sums[m], a, b, accumulate || step > 0);
                else wgmma_m64n48k16(sums[m], a, b, accumulate || step > 0);
            }
        }
    }

    // Whether the tile reads a NaN or an infinity: then all channels' sums at a position are none, by zero weights, too.
    DEVICE bool reads_not_finite(const float (&sums)[M_TILES][OUTS / 2], int consumer) const {
        uint32_t found = 0;
        UNROLL for (int m = 0; m < M_TILES; ++m)
            UNROLL for (int row = 0; row < 2; ++row) found |= !(fabsf(sums[m][2 * row]) < INFINITY);
        uint32_t(&of_warps)[PRODUCER_WARPS] = shared.largest[consumer][0];
        found = warp_max(found);
        bar_sync(1 + consumer, WARPGROUP);  // the tile before has been asked for
        if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP % PRODUCER_WARPS] = found;
        bar_sync(1 + consumer, WARPGROUP);
        UNROLL for (int warp = 0; warp < PRODUCER_WARPS; ++warp) found |= of_warps[warp];
        return found;
    }

    // Writes a tile's outputs through staging, 8 channels at a time: a channel's positions lie there as they will lie in device
    // memory. Two channels of each 8 go out by a warp: one lane issues the bulk copies, six lanes (14) a channel write what
    // is around them. A buffer is written while the copies of the two before may still read theirs.
    DEVICE void write_tile(const float(&sums)[M_TILES][OUTS / 2], const Tile& tile, int exponent, int consumer) const {
        const int first_channel = blockIdx.x % plan.groups() * OUTS, channels = smaller(OUTS, OUT_CHANNELS - first_channel);
        Element* const staging = shared.staging[consumer][0];
        const int64_t out_size = plan.out_size();
        Element* const out = plan.out + (tile.sample * OUT_CHANNELS + first_channel) * out_size;
        const int warp = uniform(static_cast<int>(threadIdx.x / WARP % 4));
        const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        // wgmma leaves a lane columns 8j + 2t and 8j + 2t + 1 (channels) of rows g and g + 8 of a warp's 16 (units). Here are
        // their offsets in the tile, in bytes. Gaps between image rows go to the end, past all outputs, so no store is tested.
        int offsets[M_TILES][2];
        UNROLL for (int i = 0; i < 2 * M_TILES; ++i) {
            const int unit = tile.column + i / 2 * 64 + warp * 16 + g + i % 2 * 8, row = unit / plan.pitch;
            const int column = unit - row * plan.pitch, gap = row * (plan.pitch - plan.columns) + column - plan.columns;
            const bool is_output = column < plan.columns;
            offsets[i / 2][i % 2] = (is_output ? row * plan.columns + column - tile.column : TILE_M - 1 - gap) * ELEMENT_BYTES;
        }
        const uint32_t first_staged = shared_address(staging);
        const ChannelRange lane_ranges[2] = {{out + 2 * t * out_size, tile}, {out + (2 * t + 1) * out_size, tile}};
        const uint32_t lane_row = first_staged + (2 * t * STAGING_ROW + lane_ranges[0].shift) * ELEMENT_BYTES;
        const uint32_t next_row = first_staged + ((2 * t + 1) * STAGING_ROW + lane_ranges[1].shift) * ELEMENT_BYTES;
        // The bulk copies of the warp's two channels.
        Element* const out_begin = reinterpret_cast<Element*>(uniform(reinterpret_cast<uint64_t>(out + tile.first)));
        int whole_first[2], whole_bytes[2], whole_from[2];
        UNROLL for (int r = 0; r < 2; ++r) {
            const ChannelRange range(out + (2 * warp + r) * out_size, tile);
            whole_first[r] = uniform(range.whole_first);
            whole_bytes[r] = uniform((range.whole_last - range.whole_first) * ELEMENT_BYTES);
            whole_from[r] = uniform(static_cast<int>(first_staged) +
                                    ((2 * warp + r) * STAGING_ROW + range.shift + range.whole_first) * ELEMENT_BYTES);
        }
        // Around the bulk copies: lanes 0 to 5 and 16 to 21 (0 to 13 and 16 to 29) have a position each, where it exists.
        constexpr int AROUND = PER_16 - 1;
        const int single_row = 2 * warp + lane / 16, k = lane % 16;
        const ChannelRange mine(out + single_row * out_size, tile);
        const int single = k < AROUND ? mine.first + k : mine.whole_last + k - AROUND;
        const int single_staged = single_row * STAGING_ROW + mine.shift + single;
        const bool has_single = k < 2 * AROUND && single < (k < AROUND ? mine.whole_first : mine.last);

        // In two factors, since 2^-exponent times unscale may overflow; both are finite, so sums of 0 stay 0.
        const float half_unscale = power_of_2(-exponent / 2), other_half = power_of_2(-exponent - -exponent / 2);
        static_assert(OUTS / 8 % STAGING_BUFFERS == 0);  // each tile begins with buffer 0
        UNROLL for (int j = 0; j < OUTS / 8; ++j) {
            const int buffer = j % STAGING_BUFFERS * STAGING;
            const float2 bias = *reinterpret_cast<const float2*>(shared.biases + 8 * j + 2 * t);
            float factor_x, factor_y;
            if constexpr (SCALED) {
                const float2 unscale = *reinterpret_cast<const float2*>(shared.unscales + 8 * j + 2 * t);
                factor_x = fminf(half_unscale * unscale.x, LARGEST_POWER);
                factor_y = fminf(half_unscale * unscale.y, LARGEST_POWER);
            }
            UNROLL for (int i = 0; i < 2 * M_TILES; ++i) {
                const float* two = sums[i / 2] + 4 * j + i % 2 * 2;
                const int offset = offsets[i / 2][i % 2] + buffer * ELEMENT_BYTES;
                const float x = SCALED ? fmaf(two[0] * factor_x, other_half, bias.x) : two[0] + bias.x;
                const float y = SCALED ? fmaf(two[1] * factor_y, other_half, bias.y) : two[1] + bias.y;
                st_shared(lane_row + offset, from_float(x));
                st_shared(next_row + offset, from_float(y));
            }
            fence_proxy_async();
            if (lane == 0) cp_async_bulk_wait_read<STAGING_BUFFERS - 2>();  // then the buffer of the next 8 is free
            bar_sync(1 + consumer, WARPGROUP);
            if (lane == 0) {
                UNROLL for (int r = 0; r < 2; ++r) {
                    if (8 * j + 2 * warp + r >= channels || whole_bytes[r] <= 0) continue;
                    Element* const to = out_begin + (8 * j + 2 * warp + r) * out_size + whole_first[r];
                    cp_async_bulk_store(to, whole_from[r] + buffer * ELEMENT_BYTES, whole_bytes[r]);
                }
                cp_async_bulk_commit();
            }
            if (has_single && 8 * j + single_row < channels)
                out_begin[(8 * j + single_row) * out_size + single] = staging[buffer + single_staged];
        }
    }

    // A tile that reads a NaN or an infinity, by a warpgroup, in plain fp32, from x and the weights as they are.
    DEVICE void write_fp32_tile(const Tile& tile) const {
        const int first_channel = blockIdx.x % plan.groups() * OUTS;
        UNROLL_1 for (int o = first_channel; o < smaller(first_channel + OUTS, OUT_CHANNELS); ++o) {
            const ChannelRange range(plan.out + (tile.sample * OUT_CHANNELS + o) * plan.out_size(), tile);
            UNROLL_1 for (int k = range.first + threadIdx.x % WARPGROUP; k < range.last; k += WARPGROUP) {
                const int64_t position = tile.first + k;
                const int i = position / plan.out_w, j = position - static_cast<int64_t>(i) * plan.out_w;
                float sum = 0;
                UNROLL_1 for (int tap = 0; tap < IN_CHANNELS * TAPS; ++tap) {
                    const int h = i * STRIDE_H - PAD_H + tap % TAPS / KERNEL_W, w = j * STRIDE_W - PAD_W + tap % KERNEL_W;
                    const Input* row = plan.x + ((tile.sample * IN_CHANNELS + tap / TAPS) * plan.height + h) * plan.width;
                    const bool inside = h >= 0 && h < plan.height && w >= 0 && w < plan.width;
                    const Element* const weight = plan.weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS + tap;
                    if (inside) sum += to_float(from_float(to_float(row[w]))) * to_float(*weight);
                }
                range.out[k] = from_float(plan.bias ? sum + to_float(plan.bias[o]) : sum);
            }
        }
    }
};

template <int OUTS>
__global__ void __launch_bounds__(THREADS, 1) convolve(const Plan plan, const uint4* __restrict__ packed) {
    extern __shared__ __align__(128) char memory[];
    if constexpr (FITS_UNITS && sizeof(Shared<OUTS>) <= MAX_SHARED_BYTES)  // or it is left empty, and never launched
        Block<OUTS>{plan, *reinterpret_cast<Shared<OUTS>*>(memory)}.run(packed);
}

// ---- weights, for each group of outputs as in shared memory; then what undoes their scales. One block per output channel.
constexpr int WEIGHT_TARGET = 14, MOST_WEIGHT_EXPONENT = 62;  // MOST_WEIGHT_EXPONENT: so that two scales' product can be undone

DEVICE uint4 operands(const float (&w)[8]) {
    return make_uint4(operand_pair(w[0], w[1]), operand_pair(w[2], w[3]), operand_pair(w[4], w[5]), operand_pair(w[6], w[7]));
}
__global__ void __launch_bounds__(WARPGROUP)
    pack_weights(const Element* __restrict__ weight, uint4* __restrict__ packed, int outs) {
    __shared__ uint32_t warp_largest[WARPGROUP / WARP];
    const int o = blockIdx.x, group = o / outs, groups = ceil_div(OUT_CHANNELS, outs);
    const Element* const mine = weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS;
    uint32_t largest = 0;
    if (o < OUT_CHANNELS)
        for (int i = threadIdx.x; i < IN_CHANNELS * TAPS; i += WARPGROUP) {
            const float magnitude = fabsf(to_float(mine[i]));
            largest = larger(largest, __float_as_uint(magnitude < INFINITY ? magnitude : 0));
        }
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
    for (int warp = 0; warp < WARPGROUP / WARP; ++warp) largest = larger(largest, warp_largest[warp]);
    const int scaled = smaller(scale_exponent(__uint_as_float(largest), WEIGHT_TARGET), MOST_WEIGHT_EXPONENT);
    const int exponent = SCALED ? scaled : 0;
    const int64_t part = static_cast<int64_t>(IN_CHANNELS) * STEPS * 2 * outs;
    for (int i = threadIdx.x; i < IN_CHANNELS * STEPS * 2; i += WARPGROUP) {
        const int channel = i / (2 * STEPS), unit = i % (2 * STEPS);
        const int top = (unit / QUADS % TAP_ROWS * PHASES + unit / (QUADS * TAP_ROWS)) * 2, left = unit % QUADS * 4;
        float w[8];
        UNROLL for (int e = 0; e < 8; ++e) {
            const int u = top + e / 2 % 2, v = left + e / 4 * 2 + e % 2;
            const bool exists = o < OUT_CHANNELS && unit < UNITS && u < KERNEL_H && v < KERNEL_W;
            w[e] = exists ? to_float(mine[channel * TAPS + u * KERNEL_W + v]) * power_of_2(exponent) : 0;
        }
        uint4* const to = packed + group * weight_units(outs) + static_cast<int64_t>(i) * outs + o % outs;
        to[0] = operands(w);
        if constexpr (STRICT) {
            UNROLL for (int e = 0; e < 8; ++e) w[e] = residual(w[e]);
            to[part] = operands(w);
        }
    }
    float* const unscales = reinterpret_cast<float*>(packed + groups * weight_units(outs));
    if (threadIdx.x == 0) unscales[o] = power_of_2(-exponent);
}

// ---- launches
constexpr int LARGEST_OUTS = STRICT || OUT_CHANNELS <= FEW_OUTS ? FEW_OUTS : MOST_OUTS;

// The bytes of shared memory, and how in `plan`; 0 where the strides, or weights and two stages, do not fit.
static int make_plan(Plan& plan, int64_t batch, int64_t height, int64_t width, int device) {
    constexpr int MOST_STAGES = 4, WIDEST = 4096;  // WIDEST: so that stage_bytes fits an int
    if (!FITS_UNITS) return 0;
    int sm_count, shared_bytes;
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    plan.height = height, plan.out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1;
    plan.width = width, plan.out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
    for (const int outs : {LARGEST_OUTS, FEW_OUTS}) {
        const int64_t fixed_bytes = outs == FEW_OUTS ? sizeof(Shared<FEW_OUTS>) : sizeof(Shared<LARGEST_OUTS>);
        for (const bool by_rows : {false, true}) {
            if (fixed_bytes > shared_bytes || (!by_rows && plan.out_w > WIDEST)) continue;
            plan.outs = outs, plan.by_rows = by_rows;
            plan.columns = by_rows ? TILE_M : plan.out_w, plan.pitch = plan.columns + QUADS - 1;
            plan.lines = by_rows ? plan.out_h : 1;
            plan.line_size = by_rows ? plan.out_w : static_cast<int64_t>(plan.out_h) * plan.out_w;
            // A tile that begins with a row's last column reads the most rows and holds the fewest positions.
            const int column = by_rows ? 0 : plan.columns - 1, units = column + TILE_M;
            plan.rows = (units + QUADS - 2) / plan.pitch + TAP_ROWS;
            const int fewest = units / plan.pitch * plan.columns + smaller(units % plan.pitch, plan.columns) - column;
            plan.step = fewest - OVERLAP;
            plan.tiles_per_line = plan.line_size <= fewest ? 1 : 1 + (plan.line_size - fewest + plan.step - 1) / plan.step;
            plan.all_tiles = batch * plan.lines * plan.tiles_per_line;
            plan.blocks = smaller<int64_t>(plan.all_tiles, larger(sm_count / plan.groups(), 1));
            for (plan.stages = MOST_STAGES; plan.stages >= 2; --plan.stages) {
                const int64_t stage_bytes = plan.stage_bytes() + STAGE_MORE;
                const int64_t bytes = fixed_bytes + CONSUMERS * plan.stages * stage_bytes;
                if (bytes <= shared_bytes) return bytes;
            }
        }
    }
    return 0;
}

// The floats of the weights as pack_weights leaves them, and what undoes their scales; 0: what the kernel does not take.
extern "C" int64_t count_packed(int64_t batch, int64_t height, int64_t width, int64_t device) {
    Plan plan;
    if (!make_plan(plan, batch, height, width, device)) return 0;
    return plan.groups() * (weight_units(plan.outs) * (UNIT_BYTES / 4) + plan.outs);
}

// out (batch, OUT_CHANNELS, out_h, out_w); `packed` has count_packed() floats; bias may be null.
extern "C" int launch_convolve(const Input* x, const Element* weight, const Element* bias, float* packed, Element* out,
                               int64_t batch, int64_t height, int64_t width, int64_t device, cudaStream_t stream) {
    Plan plan;
    const int bytes = make_plan(plan, batch, height, width, device);
    if (!bytes) return cudaErrorNotSupported;
    plan.x = x, plan.weight = weight, plan.bias = bias, plan.out = out;
    plan.paired = width % 2 == 0 && PAD_W % 2 == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(Pair) == 0;
    uint4* const units = reinterpret_cast<uint4*>(packed);
    pack_weights<<<plan.groups() * plan.outs, WARPGROUP, 0, stream>>>(weight, units, plan.outs);
    const auto kernel = plan.outs == FEW_OUTS ? convolve<FEW_OUTS> : convolve<LARGEST_OUTS>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<plan.blocks * plan.groups(), THREADS, bytes, stream>>>(plan, units);
    return cudaGetLastError();
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
HOPPER = "-gencode=arch=compute_90a,code=sm_90a"  # load_inline would build for 9.0, which lacks wgmma
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
    if x.is_cuda and capability(x.device) != (9, 0):
        raise RuntimeError("expected a GPU of compute capability 9.0 (Hopper); v4_tensor_core runs on 8.0 and later")
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = weight.new_empty(batch, out_channels, room_h // stride_h + 1, room_w // stride_w + 1)
    if not out.numel():
        return out
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W", "PAD_H", "PAD_W"
    macros = dict(zip(names, (*weight.shape, *stride, *padding), strict=True))
    strict = dtype == torch.float32 and is_strict()
    library = kernels(HOPPER, INPUT=ELEMENTS[x.dtype], ELEMENT=ELEMENTS[dtype], STRICT=int(strict), **macros)
    numbers = batch, height, width, x.device.index or 0
    floats = count(library.count_packed, *numbers)
    if not floats:
        limits = "a stride of 4 across and an even one down, weights for 48 outputs and two stages in shared memory"
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
        return torch.ops.alexnet_conv1_v5_hopper.forward(*operands)
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
