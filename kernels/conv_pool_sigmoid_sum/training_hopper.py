"""conv_pool_sigmoid_sum, training on Hopper: a persistent, warp-specialized kernel leaves all that backward needs.

Why it is faster
    v5's pipeline of TMA and wgmma: a step for the weights is a third faster than training_tensor_core's on an H200, on an H100
    6% in a CUDA graph, and slower without. Three consumer warpgroups turn rows into box sums in registers, stored once, operand
    b of two products: weights * sums, whose sigmoid gives delta as operand a of the other, delta * sums, the weights' gradient.
    Backward streams the deltas, 148 MB (strict 296). What it costs: fp16 has TF32's 11 bits but not its range, so operands
    carry powers of two. For inference v5 is faster.

Mathematics
    z[o] = bias[o] + 1/p * sum over channels c and taps t of w[o,c,t] * box[c,t], s = sigmoid(z), out[b] = sum of s. box[c,t] is
    the sum of a window's p pixels, shifted by tap t.
    delta = s * (1 - s): d out / d w[o,c,t] = 1/p * sum over positions of delta[o] * box[c,t]
    grad_box[c,t] = sum over o of w[o,c,t] * delta[o],  grad_x[c,h,w] = grad_out/p * sum of grad_box over boxes that hold (h,w)
    Scales: weights below 2^14, always split; delta 2^17, fewer bits below 2^-31 (strict: 2^-20), none below 2^-42; box sums
    2^96, in a segment lowered as needed, fewer bits below 2^-26 (2^-15) of the segment's largest so far. Strict: fp16x3.

Launches
    conv_pool_gradients, a block per SM of 512 threads and 210 KiB (strict 191); add_segments where blocks share samples
    input_gradient, blocks + 37 of 384 and 215 KiB: the last 37 do weighted_sum's work, which alone serves the parameters

Floor
    x in, 0.140 ms at 4.32 TB/s; with grad_x and the deltas 1.5 GB, 0.35 ms.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) on compute capability 9.x; what is_served says, with x's gradient
    at most 96 windows wide. PyTorch computes the rest, and the gradient of a gradient. MIT; copy it.
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

NAME = "conv_pool_sigmoid_sum_training_hopper"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # ModelNew's, shape of x, under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H and POOL_W.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <utility>

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define DEVICE __device__ __forceinline__

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What the kernel is made for; TMA brings lines of 32 columns.
#define SERVED                                                           \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 64 && KERNEL_H * KERNEL_W <= 9 && \
     KERNEL_H <= POOL_H + 1 && KERNEL_W <= POOL_W + 1 && POOL_W % 2 == 0 && POOL_W <= 8 && POOL_H * POOL_W <= 16)
extern "C" int64_t is_served(int64_t width) { return SERVED && width % 32 == 0; }

#if SERVED
using Element = float;  // of x and the parameters

constexpr int TAPS = KERNEL_H * KERNEL_W, TERMS = IN_CHANNELS * TAPS;
constexpr int WEIGHTS = OUT_CHANNELS * TERMS, PARAMETERS = WEIGHTS + OUT_CHANNELS;

// Words used below:
//   tap       an element of the convolution's kernel
//   position  a pooled column of a pooled row: a window, which has a box sum for each tap and channel
//   tile      96 pooled columns; a sample tile: those of one sample, all pooled rows. A step takes two of its rows, one a half
//   work row  a pooled row in the line of all sample tiles' rows, of which each block takes an equal part
//   segment   the part of one sample tile in one block; `slot` is where its sums go in device memory
//   half      0 or 1, row_half: the upper or the lower half of a segment's rows, and the six consumer warps that go down it
//   channel   0 or 1: of a lane's two, q and q + 4
//   pair      two neighbouring positions; `element` (0 or 1) is one of them
//   part      a warp's 16 positions of its warpgroup's 64; its rank is the warp's number in the warpgroup
//
// Who does what, in a block of conv_pool_gradients: one producer thread, as in v5, fills stages with rows of both halves by TMA
// when they are empty. Each of twelve consumer warps, a pooled row a step: waits until a stage is full, sums its rows in
// registers, gives it back; stores the sums as fp16 once its warpgroup has multiplied the last ones; then the warpgroup
// multiplies weights * sums, and delta, the sigmoid's derivative, * sums: the gradients, which stay in registers.

struct Shape {
    int batch, height, width, rows, columns;  // rows, columns: of pooled positions
    int tiles, blocks;                        // tiles of a sample; blocks of the persistent kernels
};

// ---- constants and layout
// As in v5, the other taps' box sums are taken as differences from this one's, in fp32, in which the pixels' mean cancels. Its
// own sum keeps the mean, and is therefore split, high + low, as the weights are.
constexpr int MIDDLE = TAPS / 2;
constexpr int OVERLAP = KERNEL_H - 1, FRESH = POOL_H - OVERLAP;  // rows that a pooled row shares with the next, and its own
// Channels of a tile: columns of a slab (below), two of a lane. Missing channels and outputs are zeros.
constexpr int CHANNELS = 8, OUTPUTS = 64, TILE_POSITIONS = 96;
constexpr int WARP_POSITIONS = 16, TILE_WARPS = TILE_POSITIONS / WARP_POSITIONS;
// A pooled row is six warps of 16 positions; two rows, one of each half, make three warpgroups. Number 1 has warps of both, so
// halves take equally many steps. A half's rows are consecutive: a lane carries in registers what one shares with the next.
constexpr int ROW_HALVES = 2, CONSUMER_WARPS = ROW_HALVES * TILE_WARPS, CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int GROUPS = CONSUMER_WARPS / 4, THREADS = CONSUMERS + 128;  // three consumer warpgroups, one producer warpgroup
// Of a thread, by setmaxnreg: 384 x 160 + 128 x 24 = 64,512 of the SM's 65,536; all are launched with 128.
constexpr int CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 24;
static_assert(CONSUMERS * CONSUMER_REGISTERS + 128 * PRODUCER_REGISTERS <= 65536, "or setmaxnreg waits forever");

// What a block of conv_pool_gradients keeps in shared memory; bytes for 8 channels, a 3 x 3 kernel and a 4 x 4 window.
//                                                      strict
//   +---------------------------------------+ 0
//   | stages of the pipeline, halves 0, 1, 0| 6 x 26,624 4 x 26,624  TMA fills, the six warps of a half empty
//   +---------------------------------------+ WEIGHTS_AT
//   | weights: high parts, low parts, fp16  | 20,480     20,480      written once by all consumers
//   +---------------------------------------+ SUMS_AT
//   | box sums of warpgroups 0, 1, 2, fp16  | 33,792     67,584      written and read by a warpgroup each step
//   +---------------------------------------+ REST_AT
//   | largest values, a float a warp, mbarriers
//   +---------------------------------------+
constexpr int LINE = 128, LINE_FLOATS = LINE / 4;  // innermost extent of a TMA box: 128 bytes
constexpr int CHUNK_BYTES = 16;                    // what the swizzle moves: chunk i of line l stands at i ^ (l % 8)
// Lines of a row and channel; an odd number, so that the swizzle differs from channel to channel.
constexpr int LINES = ceil_div(TILE_POSITIONS * POOL_W + KERNEL_W - 1, LINE_FLOATS) | 1, ROW_BYTES = CHANNELS * LINES * LINE;
static_assert(WARP_POSITIONS * POOL_W % LINE_FLOATS == 0, "tiles, and warps' parts of them, begin where a line does");
constexpr int STAGE_ROWS = OVERLAP % 2 == 0 && FRESH % 2 == 0 && 8 * ROW_BYTES <= 128 * 1024 ? 2 : 1,
              STAGE_BYTES = STAGE_ROWS * ROW_BYTES;

// fp16 operands are made of core matrices, 8 rows x 16 bytes. A slab is 64 rows x 8 columns: a tap's channels. The sums of a
// warpgroup have a row for each of its 64 positions, and these slabs: what rounding leaves of the middle tap (strict: zeros,
// since low parts have slabs of their own), the taps, and constants (see ONES).
constexpr int CORE = 128, SLAB = 8 * CORE;
constexpr int INNER_SLABS = 2 * ceil_div(1 + TAPS, 2), FP16_BYTES = INNER_SLABS * SLAB;  // of the first product
constexpr int SUM_COLUMNS = 80, SUMS_BYTES = SLAB + SUM_COLUMNS / 8 * SLAB;              // of the second product
constexpr int ONES = SUM_COLUMNS - 8;  // these columns' products are the gradient of the bias, each of 8 positions

constexpr int MAX_STAGES = 16, PIPELINE_BARRIERS = 2 * MAX_STAGES;  // full and empty
constexpr int WARP_SUMS = 16;                                       // floats, one a consumer warp
enum NamedBarrier { ALL_CONSUMERS = 1, FIRST_GROUP = 2, FIRST_HALF = 2 };  // + warpgroup; + half, in input_gradient

template <bool STRICT>
struct Shared {
    static constexpr int WEIGHTS = 2 * FP16_BYTES;
    static constexpr int GROUP_SUMS = (STRICT ? 2 : 1) * SUMS_BYTES, SUMS = GROUPS * GROUP_SUMS;
    static constexpr int REST = OUTPUTS * 4 + WARP_SUMS * 4 + (PIPELINE_BARRIERS + GROUPS) * 8;  // largest, sums, mbarriers
    static constexpr int FITTING = (227 * 1024 - WEIGHTS - SUMS - REST) / STAGE_BYTES / ROW_HALVES * ROW_HALVES;
    static constexpr int STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES;
    static constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES, SUMS_AT = WEIGHTS_AT + WEIGHTS;
    static constexpr int REST_AT = SUMS_AT + SUMS, BYTES = REST_AT + REST;
    static_assert(STAGES >= 2 * ROW_HALVES, "each half's pipeline is double-buffered at least");
};

constexpr float NOTHING = -0.0f;  // where sums begin: NOTHING + x is x, also of x = -0, so compilers leave out the addition
constexpr float MINUS_LOG2_E = -1.4426950408889634f;           // in weights and biases: sigmoid = 1 / (1 + 2^exponent)
constexpr float WEIGHT_FACTOR = MINUS_LOG2_E / (POOL_H * POOL_W);  // and the average's divisor
constexpr float DELTA_SCALE = 131072;                          // 2^17: as fp16, delta has 11 bits down to 5e-10
constexpr float FIRST_SCALE = 0x1p96f;                         // of the sums; larger than most will need
constexpr int WEIGHT_EXPONENT = 14, SUM_EXPONENT = 13;         // a power of two brings the largest below 2^these
constexpr int STRICT_STEPS = 4;  // after which sums go on in fp32: tensor cores round towards zero, which would add up
constexpr int MOST_WEIGHT_EXPONENT = 120, MOST_EXPONENT = 96;  // of that power

// ---- PTX
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What this thread initialised becomes visible to TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Returns once the phase of this parity is complete. The hardware may suspend the thread meanwhile; from 9.0 on.
DEVICE void mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
// As bar_sync; returns whether any thread's value is true.
DEVICE bool bar_red_or(int name, int threads, bool value) {
    uint32_t any;
    asm volatile("{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %3, 0;\n"
                 "bar.red.or.pred any, %1, %2, mine;\nselp.u32 %0, 1, 0, any;\n}"
                 : "=r"(any) : "r"(name), "r"(threads), "r"(static_cast<uint32_t>(value)) : "memory");
    return any;
}
template <int REGISTERS>
DEVICE void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// What this thread wrote to shared memory becomes visible to wgmma and TMA.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Copies a box of a tensor map to shared memory, and counts its bytes on the mbarrier. Coordinates begin with the innermost.
DEVICE void tma_load_5d(uint32_t to, const CUtensorMap& map, int i0, int i1, int i2, int i3, int i4, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to), "l"(&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4),
                 "r"(barrier)
                 : "memory");
}
// Copies shared memory to a box of a tensor map, as part of this thread's bulk group.
DEVICE void tma_store_5d(const CUtensorMap& map, uint32_t from, int i0, int i1, int i2, int i3, int i4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
                 "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4), "r"(from)
                 : "memory");
}
DEVICE void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns when all but the last PENDING of this thread's bulk groups have read their sources.
template <int PENDING>
DEVICE void cp_async_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
// Returns when all stores of this thread's bulk groups are done.
DEVICE void cp_async_bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The next kernel in the stream, where it is launched with programmatic stream serialization, may start once all blocks have
// called this, or ended.
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// Returns when the kernel before has ended and its writes are visible.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE float4 ld_shared_v4_f32(uint32_t at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
DEVICE float2 ld_shared_v2_f32(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}
DEVICE void st_shared_v4_f32(uint32_t at, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Four matrices of 8 rows x 16 bytes: lane 8 * i + r has the address of row r of matrix i.
DEVICE void stmatrix_m8n8_x4(uint32_t row, const uint32_t* words) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
DEVICE float ex2_approx(float v) {  // relative error 2^-22.5
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
DEVICE float rcp_approx(float v) {  // within 1 ulp
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
    return reciprocal;
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

// d (64 x 64) = or += a (64 x 16) * b (16 x 64), fp16, both in shared memory.
DEVICE void wgmma_m64n64k16_f16(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" REGISTERS_32 "}, %32, %33, "
                 "accumulate, 1, 1, 0, 0;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
                 : "l"(a), "l"(b), "r"(accumulate));
}
// d (64 x 80) += a (64 x 16, in registers) * b (16 x 80, in shared memory, transposed), fp16.
DEVICE void wgmma_m64n80k16_f16(float (&d)[40], const uint32_t* a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" REGISTERS_32
                 ", %32, %33, %34, %35, %36, %37, %38, %39}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d (64 x 72) = or += a (64 x 16, in registers) * b (16 x 72, in shared memory), fp16.
DEVICE void wgmma_m64n72k16_f16(float (&d)[36], uint4 a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %41, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 {" REGISTERS_32
                 ", %32, %33, %34, %35}, {%36, %37, %38, %39}, %40, accumulate, 1, 1, 0;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));
}

// wgmma's descriptor of an operand in shared memory without swizzle: bytes between core matrices that are adjacent in k, and
// between those adjacent in the rows. Addresses have 18 bits, so an offset never carries beyond its field.
template <int ADJACENT_K, int ADJACENT_ROWS>
struct Operand {
    uint32_t word;  // the lower one

    DEVICE explicit Operand(uint32_t address) : word(address >> 4 | ADJACENT_K >> 4 << 16) {}
    DEVICE uint64_t at(int offset) const { return static_cast<uint64_t>(ADJACENT_ROWS >> 4) << 32 | (word + (offset >> 4)); }
};

// ---- numbers
// Two floats as fp16, the first one in the lower bits, and what rounding leaves of them.
DEVICE uint32_t fp16_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
DEVICE uint32_t fp16_rest(float a, float b, uint32_t pair) {
    const __half2 high = *reinterpret_cast<const __half2*>(&pair);
    return fp16_pair(a - __low2float(high), b - __high2float(high));
}
// The lower fp16 values of a and b, or the upper ones.
DEVICE uint32_t lower_values(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
DEVICE uint32_t upper_values(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

DEVICE float warp_sum(float v) {
    UNROLL for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}
DEVICE float warp_max(float v) {
    UNROLL for (int offset = 16; offset; offset /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, offset));
    return v;
}
// The power of two that brings `largest` just below 2^exponent; at most 2^most.
DEVICE float power_for(float largest, int exponent, int most) {
    const int power = exponent + 126 - static_cast<int>(__float_as_uint(largest) >> 23);  // largest < 2^(its exponent - 126)
    return __uint_as_float(static_cast<uint32_t>((power < most ? power : most) + 127) << 23);
}

// ---- the static tile scheduler
__host__ DEVICE int64_t sample_tiles(const Shape& s) { return static_cast<int64_t>(s.batch) * s.tiles; }
__host__ DEVICE bool blocks_share_tiles(const Shape& s) { return sample_tiles(s) % s.blocks; }

struct Segment {
    int sample, tile, slot;
    int start, count;  // pooled rows

    DEVICE int steps() const { return (count + 1) / 2; }
    DEVICE int first_row(int row_half) const { return start + row_half * steps(); }
    DEVICE int rows(int row_half) const { return row_half ? count / 2 : steps(); }
};

// The block's segments, one after another: `work_row` is where the next one begins.
struct Scheduler {
    const Shape& s;
    const int64_t end = first_work_row(blockIdx.x + 1);
    int64_t work_row = first_work_row(blockIdx.x);

    DEVICE int64_t first_work_row(int block) const { return sample_tiles(s) * s.rows * block / s.blocks; }
    DEVICE bool has_next() const { return work_row < end; }
    DEVICE Segment next() {
        const int64_t sample_tile = work_row / s.rows;
        const int sample = static_cast<int>(sample_tile / s.tiles), tile = static_cast<int>(sample_tile % s.tiles);
        const int slot = static_cast<int>(sample_tile) + (blocks_share_tiles(s) ? blockIdx.x : 0);  // unique: see v5
        const int start = static_cast<int>(work_row - sample_tile * s.rows);
        const int count = end - work_row < s.rows - start ? static_cast<int>(end - work_row) : s.rows - start;
        work_row += count;
        return {sample, tile, slot, start, count};
    }
};

// ---- the multistage pipeline
// Even stages are half 0's, odd ones half 1's. A stage's full mbarrier completes when TMA has written its bytes, its empty
// mbarrier when all warps of its half have read them. A half's state is its stage and the parity of that stage's phase.
template <int STAGES>
struct Pipeline {
    const uint32_t data, barriers;  // shared addresses: of the stages; of their full, then of their empty mbarriers
    int stage;
    uint32_t parity = 0;

    DEVICE static void init(uint32_t barriers) {
        for (int i = 0; i < STAGES; ++i)
            mbarrier_init(barriers + 8 * i, 1), mbarrier_init(barriers + 8 * (STAGES + i), TILE_WARPS);
    }
    DEVICE uint32_t address() const { return data + stage * STAGE_BYTES; }
    DEVICE uint32_t full_barrier() const { return barriers + 8 * stage; }
    DEVICE uint32_t empty_barrier() const { return barriers + 8 * (STAGES + stage); }
    DEVICE void advance() {
        stage += ROW_HALVES;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// The producer asks TMA for the rows of both halves in the order in which they are consumed. A fresh mbarrier counts its
// previous phase, of parity 1, as complete, so the first pass over the stages does not wait.
template <int STAGES>
__device__ void produce(const CUtensorMap& x, const Shape& shape, uint32_t data, uint32_t barriers) {
    Pipeline<STAGES> pipelines[ROW_HALVES] = {{data, barriers, 0}, {data, barriers, 1}};
    for (Scheduler scheduler{shape}; scheduler.has_next();) {
        const Segment segment = scheduler.next();
        const int rows = segment.steps() * POOL_H + OVERLAP;
        for (int row = 0; row < rows; row += STAGE_ROWS)
            UNROLL for (int row_half = 0; row_half < ROW_HALVES; ++row_half) {
                Pipeline<STAGES>& pipeline = pipelines[row_half];
                mbarrier_try_wait(pipeline.empty_barrier(), pipeline.parity ^ 1);
                mbarrier_arrive_expect_tx(pipeline.full_barrier(), STAGE_BYTES);
                const bool needed = segment.rows(row_half) && row < segment.rows(row_half) * POOL_H + OVERLAP;
                // A half without this row gets zeros (TMA reads nothing below the image): warpgroup 1 has warps of both halves.
                const int y = needed ? segment.first_row(row_half) * POOL_H + row : shape.height;
                const int line = segment.tile * TILE_POSITIONS * POOL_W / LINE_FLOATS;
                tma_load_5d(pipeline.address(), x, 0, line, 0, y, segment.sample, pipeline.full_barrier());
                pipeline.advance();
            }
    }
}

// ---- box sums in registers
constexpr int SPAN = 2 * POOL_W + KERNEL_W - 1, CHUNKS = ceil_div(SPAN, 4);  // floats that a lane reads of a row, in 16 bytes

struct Lane {
    const int lane = threadIdx.x % 32, q = lane % 4, warp, row_half, pair = pair_of(lane / 4);  // warp: in the tile
    uint32_t chunk[CHUNKS];  // offsets in a row, for channel q

    DEVICE explicit Lane(int consumer_warp) : warp(consumer_warp % TILE_WARPS), row_half(consumer_warp / TILE_WARPS) {
        UNROLL for (int i = 0; i < CHUNKS; ++i) {
            const int column = (warp * WARP_POSITIONS + 2 * pair) * POOL_W + 4 * i, line = q * LINES + column / LINE_FLOATS;
            chunk[i] = line * LINE + ((column / 4 % 8 ^ line % 8) << 4);
        }
    }
    // 16-byte loads are conflict-free where POOL_W is 4 and KERNEL_W up to 3 (else 2-way): a quarter-warp has all q and two n.
    // LINES is odd, so the swizzles of the q differ modulo 4. The two lower bits of n are swapped, so both pairs are 2 apart,
    // which is 4 chunks. Eight lanes so read all eight chunks of a line, which are all banks.
    DEVICE static int pair_of(int n) { return (n & 4) | (n & 1) << 1 | (n >> 1 & 1); }
    DEVICE int position(int element) const { return warp * WARP_POSITIONS + 2 * pair + element; }
};

using Sums = float[TAPS][4];         // [tap][2 * channel + element]: fragments of wgmma's operand a
using RowSums = float[KERNEL_W][4];  // [column of the kernel], likewise: sums of POOL_W values of a row

// `common` is in the windows of all columns of the kernel; the window of one adds left[column] and right[column].
// Channel q + 4 is 4 * LINES lines further, 4 modulo 8: the swizzle moves its chunks by a further 4.
DEVICE void sum_row(uint32_t row, const uint32_t (&chunk)[CHUNKS], int channel, RowSums& sums) {
    static_assert(LINES % 2 == 1 && ROW_BYTES % 1024 == 0, "4 * LINES is 4 modulo 8; rows begin where the swizzle does");
    alignas(16) float x[4 * CHUNKS];
    UNROLL for (int i = 0; i < CHUNKS; ++i) {
        const uint32_t at = channel ? ((row + chunk[i]) ^ 4 * CHUNK_BYTES) + 4 * LINES * LINE : row + chunk[i];
        if (SPAN - 4 * i > 2) reinterpret_cast<float4&>(x[4 * i]) = ld_shared_v4_f32(at);
        else reinterpret_cast<float2&>(x[4 * i]) = ld_shared_v2_f32(at);
    }
    UNROLL for (int element = 0; element < 2; ++element) {
        const float* v = x + element * POOL_W;
        float common = NOTHING, left[KERNEL_W], right[KERNEL_W];
        left[KERNEL_W - 1] = right[0] = NOTHING;
        UNROLL for (int i = KERNEL_W - 1; i < POOL_W; ++i) common += v[i];
        UNROLL for (int column = KERNEL_W - 2; column >= 0; --column) left[column] = v[column] + left[column + 1];
        UNROLL for (int column = 1; column < KERNEL_W; ++column) right[column] = right[column - 1] + v[POOL_W + column - 1];
        UNROLL for (int column = 0; column < KERNEL_W; ++column)
            sums[column][2 * channel + element] = left[column] + common + right[column];
    }
}

template <int STAGES>
struct BoxSums {
    Pipeline<STAGES> pipeline;
    const Lane& lane;
    Sums sums, pending;  // of the pooled row at hand; of the next one, from its first rows (of the last kernel row: unused)

    // Sums the next ROWS rows; use(row, channel, sums) takes a channel's. Waits until TMA has filled a stage, and gives it back
    // once its rows have been read. As in v5, the values themselves choose the lane that arrives: it cannot be known before all
    // loads have returned, and TMA's write (of the async proxy) comes after them. __syncwarp puts other lanes' loads before it.
    template <int ROWS, typename Use>
    DEVICE void for_rows(Use use) {
        float stage_sum;  // has as terms all values that were read of the stage
        UNROLL for (int row = 0; row < ROWS; ++row) {
            if (row % STAGE_ROWS == 0) mbarrier_try_wait(pipeline.full_barrier(), pipeline.parity);
            const uint32_t address = pipeline.address() + row % STAGE_ROWS * ROW_BYTES;
            UNROLL for (int channel = 0; channel < 2; ++channel) {
                RowSums sum;
                sum_row(address, lane.chunk, channel, sum);
                const float row_sum = sum[0][2 * channel] + sum[0][2 * channel + 1] + sum[KERNEL_W - 1][2 * channel + 1];
                stage_sum = row % STAGE_ROWS == 0 && channel == 0 ? row_sum : stage_sum + row_sum;
                use(row, channel, sum);
            }
            if (row % STAGE_ROWS != STAGE_ROWS - 1) continue;
            const uint32_t odd_lanes = __ballot_sync(~0u, __float_as_uint(stage_sum) & 1);
            __syncwarp();
            if (lane.lane == (odd_lanes ? __ffs(odd_lanes) - 1 : 0)) mbarrier_arrive(pipeline.empty_barrier());
            pipeline.advance();
        }
    }

    // The rows that belong to this pooled row alone complete what is pending.
    DEVICE void fresh_rows() {
        RowSums total = {};
        for_rows<FRESH>([&](int row, int channel, const RowSums& sum) {
            UNROLL for (int column = 0; column < KERNEL_W; ++column)
                UNROLL for (int i = 2 * channel; i < 2 * channel + 2; ++i)
                    total[column][i] = row ? total[column][i] + sum[column][i] : sum[column][i];
        });
        UNROLL for (int row = 0; row < KERNEL_H; ++row)
            UNROLL for (int channel = 0; channel < 2; ++channel)
                UNROLL for (int tap = row * KERNEL_W; tap < (row + 1) * KERNEL_W; ++tap)
                    UNROLL for (int i = 2 * channel; i < 2 * channel + 2; ++i)
                        sums[tap][i] = (tap < OVERLAP * KERNEL_W ? pending[tap][i] : NOTHING) + total[tap % KERNEL_W][i];
    }

    // The rows shared with the next pooled row. Of the first call, above a half's first fresh rows, only `pending` counts.
    DEVICE void overlap_rows() {
        for_rows<OVERLAP>([&](int row, int channel, const RowSums& sum) {
            UNROLL for (int tap = 0; tap < TAPS; ++tap)
                UNROLL for (int i = 2 * channel; i < 2 * channel + 2; ++i) {
                    const float value = sum[tap % KERNEL_W][i];
                    if (tap / KERNEL_W > row) sums[tap][i] += value;
                    else pending[tap][i] = tap / KERNEL_W == row ? value : pending[tap][i] + value;
                }
        });
    }
};

// ---- the forward pass
struct Tensors {
    const Element *weight, *bias;
    float *partial_sums, *gradients;  // one, and PARAMETERS, a segment
    uint4 *deltas, *low_deltas;       // null where they are not asked for
};

// The power of two that lets fp16 hold the largest of all consumers' values.
__device__ float scale_of(float largest, float* warp_largest) {
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
    bar_sync(ALL_CONSUMERS, CONSUMERS);
    for (int i = 0; i < CONSUMER_WARPS; ++i) largest = fmaxf(largest, warp_largest[i]);
    return power_for(largest, WEIGHT_EXPONENT, MOST_WEIGHT_EXPONENT);
}

// The weight of a tap's differences from the middle one; the middle one's is then the sum of all.
DEVICE float product_weight(const Element* weight, int o, int c, int tap) {
    float w = 0;
    UNROLL for (int t = 0; o < OUT_CHANNELS && c < IN_CHANNELS && t < TAPS; ++t)
        if (t == tap || tap == MIDDLE) w += weight[(o * IN_CHANNELS + c) * TAPS + t] * WEIGHT_FACTOR;
    return w;
}

// A warpgroup computes
//   exponents (64 outputs x 64 positions) = weights * sums      and      gradients (64 outputs x 80) += delta * sums
// so box sums lie in shared memory once and are operand b of both, transposed in the second. A lane's part of the first
// product's result is its part of the second one's operand a: delta passes through no memory. All are scaled fp16 values; where
// STRICT, all are two, high and low part, and the products are l * h + h * l + h * h.

// Vectors of eight fp16 values: the deltas of a batch whose samples are one tile each.
__host__ DEVICE int64_t vectors_of_deltas(const Shape& s) {
    return static_cast<int64_t>(s.batch) * s.rows * (TILE_POSITIONS * OUTPUTS / 8);
}

// Columns of a tap: channel 0, 4, 1, 5, ..., since a lane has channels q and q + 4.
DEVICE int column_of(int channel) { return channel % 4 * 2 + channel / 4; }
// Where an element of a matrix with 64 rows is, from its first byte.
DEVICE int byte_of(int row, int slab, int column) { return slab * SLAB + row / 8 * CORE + row % 8 * 16 + column * 2; }

// The weights as operand a, high and low parts; returns their power of two. The inner index is that of the sums' slabs: what
// rounding leaves of the middle tap (in strict mode nothing: the sums' low parts have it), then the taps.
template <bool STRICT>
__device__ float store_fp16_weights(const Element* weight, float* warp_largest, char* to) {
    constexpr int ALL = TAPS * CHANNELS * OUTPUTS, COUNT = ceil_div(ALL, CONSUMERS);
    float w[COUNT], largest = 0;
    UNROLL for (int k = 0; k < COUNT; ++k) {
        const int i = threadIdx.x + k * CONSUMERS;
        w[k] = i < ALL ? product_weight(weight, i % OUTPUTS, i / OUTPUTS % CHANNELS, i / (OUTPUTS * CHANNELS)) : 0;
        largest = fmaxf(largest, fabsf(w[k]));
    }
    for (int i = threadIdx.x; i < 2 * FP16_BYTES / 16; i += CONSUMERS) reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    const float scale = scale_of(largest, warp_largest);
    UNROLL for (int k = 0; k < COUNT; ++k) {
        const int i = threadIdx.x + k * CONSUMERS, o = i % OUTPUTS, c = i / OUTPUTS % CHANNELS, tap = i / (OUTPUTS * CHANNELS);
        if (i >= ALL) break;
        const float scaled = w[k] * scale;
        const __half high = __float2half_rn(scaled), low = __float2half_rn(scaled - __half2float(high));
        *reinterpret_cast<__half*>(to + byte_of(o, 1 + tap, column_of(c))) = high;
        *reinterpret_cast<__half*>(to + FP16_BYTES + byte_of(o, 1 + tap, column_of(c))) = low;
        if (!STRICT && tap == MIDDLE) *reinterpret_cast<__half*>(to + byte_of(o, 0, column_of(c))) = high;
    }
    return scale;
}

// A warpgroup's products. `scale` is the sums' power of two. When a sum overflows, it becomes what brings the step's largest
// sum below 2^SUM_EXPONENT; what has been summed shrinks with it, and the step's sums are packed again.
template <bool STRICT>
struct Gradient {
    float values[40];                   // this lane's part of 64 outputs x (8 columns a tap, and a column of ones)
    float scale, unit;                  // of the sums; what takes both powers of two out of the exponents
    float weight_unit;                  // takes out that of the weights
    uint32_t mine;                      // where this lane's row of the first four matrices of sums is
    Operand<SLAB, CORE> weights, sums;  // sums: [position][column], slabs of 8 columns; low parts SUMS_BYTES behind
    Operand<CORE, SLAB> transposed;     // the same without the first slab
    int barrier;
    uint32_t sums_empty, parity = 0;    // an mbarrier at which each warp arrives when its products have read the sums
    float* warp_largest;

    DEVICE Gradient(uint32_t weights, uint32_t sums, uint32_t sums_empty, float* warp_largest, float weight_scale,
                    const Lane& lane, int group)
        : weight_unit(1 / weight_scale), weights(weights), sums(sums), transposed(sums + SLAB), barrier(FIRST_GROUP + group),
          sums_empty(sums_empty), warp_largest(warp_largest) {
        mine = sums + lane.lane / 16 * SLAB + (threadIdx.x / 32 % 4 * 2 + lane.lane / 8 % 2) * CORE + lane.lane % 8 * 16;
    }

    // The unit is finite and not zero: an infinite or a vanishing sum must not make NaN.
    DEVICE void set_scale(float to) {
        scale = to;
        unit = fminf(fmaxf(1 / scale * weight_unit, 0x1p-126f), 0x1p127f);
    }
    DEVICE void clear() {
        set_scale(FIRST_SCALE);
        UNROLL for (int i = 0; i < 40; ++i) values[i] = 0;
    }

    // Of a tap at one of the lane's positions, in its two channels: the scaled difference from the middle tap, or the middle
    // one's sum.
    DEVICE float2 scaled(const Sums& from, int tap, int element) const {
        const float a = from[MIDDLE][element] * scale, b = from[MIDDLE][2 + element] * scale;
        if (tap == MIDDLE) return make_float2(a, b);
        return make_float2(fmaf(from[tap][element], scale, -a), fmaf(from[tap][2 + element], scale, -b));
    }

    // Words of two fp16 values: [slab][element]. Returns whether one is not finite.
    DEVICE bool pack(const Sums& from, uint32_t (&words)[2 * INNER_SLABS]) const {
        const __half2 zero = __floats2half2_rn(0, 0);
        __half2 checks[3] = {zero, zero, zero};  // sums of products with zero, which are NaN for what is not finite
        UNROLL for (int i = 2 + 2 * TAPS; i < 2 * INNER_SLABS; ++i) words[i] = 0;
        UNROLL for (int tap = 0; tap < TAPS; ++tap)
            UNROLL for (int element = 0; element < 2; ++element) {
                const int i = 2 * tap + element;
                const float2 v = scaled(from, tap, element);
                const __half2 pair = __floats2half2_rn(v.x, v.y);
                words[2 + i] = *reinterpret_cast<const uint32_t*>(&pair);
                if (tap == MIDDLE) words[element] = fp16_rest(v.x, v.y, words[2 + i]);
                checks[i % 3] = __hfma2(pair, zero, checks[i % 3]);
            }
        const __half2 check = __hadd2(__hadd2(checks[0], checks[1]), checks[2]);
        return *reinterpret_cast<const uint32_t*>(&check) & 0x7fff7fff;
    }
    DEVICE void store(const uint32_t (&words)[2 * INNER_SLABS]) const {
        UNROLL for (int i = 0; i < INNER_SLABS / 2; ++i) stmatrix_m8n8_x4(mine + i * 2 * SLAB, words + 4 * i);
        fence_proxy_async();
    }

    // High and low parts, two slabs at a time, since registers do not suffice for all words.
    DEVICE void store_parts(const Sums& from) const {
        UNROLL for (int slab = 0; slab < INNER_SLABS; slab += 2) {
            uint32_t high[4] = {}, low[4] = {};
            UNROLL for (int i = 0; i < 4; ++i) {
                const int tap = slab + i / 2 - 1, element = i % 2;
                if (tap < 0 || tap >= TAPS) continue;
                const float2 v = scaled(from, tap, element);
                high[i] = fp16_pair(v.x, v.y), low[i] = fp16_rest(v.x, v.y, high[i]);
            }
            stmatrix_m8n8_x4(mine + slab * SLAB, high);
            stmatrix_m8n8_x4(mine + SUMS_BYTES + slab * SLAB, low);
        }
        fence_proxy_async();
    }

    // fp16 holds the group's sums with the new scale, all but NaN and infinities.
    __device__ void shrink(const Sums& from) {
        float largest = 0;
        UNROLL for (int i = 0; i < 4 * TAPS; ++i) {
            const float sum = fabsf(i / 4 == MIDDLE ? from[MIDDLE][i % 4] : from[i / 4][i % 4] - from[MIDDLE][i % 4]);
            if (sum < INFINITY) largest = fmaxf(largest, sum);
        }
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32 % 4] = largest;
        bar_sync(barrier, 128);
        UNROLL for (int i = 0; i < 4; ++i) largest = fmaxf(largest, warp_largest[i]);
        const float smaller = fminf(scale, power_for(largest, SUM_EXPONENT, MOST_EXPONENT));
        UNROLL for (int i = 0; i < 36; ++i) values[i] *= smaller / scale;
        set_scale(smaller);
    }

    // Waits for this warp's part of the last step's products, and tells the group.
    DEVICE void finish() const {
        wgmma_wait_group<0>();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(sums_empty);
    }

    // Once all have read the last step's sums. The barrier lets all multiply, and asks whether a sum overflowed. In strict mode
    // the scale is chosen before: registers do not suffice to keep the sums until it is known what overflows.
    DEVICE void store_sums(const Sums& from) {
        uint32_t words[2 * INNER_SLABS];
        bool overflow = false;
        if (STRICT) shrink(from);
        else overflow = pack(from, words);
        mbarrier_try_wait(sums_empty, parity);
        parity ^= 1;
        if (STRICT) {
            store_parts(from);
            return bar_sync(barrier, 128);
        }
        store(words);
        if (bar_red_or(barrier, 128, overflow)) {
            shrink(from);
            pack(from, words);
            store(words);
            bar_sync(barrier, 128);
        }
    }
    // Small terms first.
    DEVICE void multiply_weights(float (&d)[32]) const {
        wgmma_fence();
        UNROLL for (int k = 0; k < INNER_SLABS; k += 2)
            wgmma_m64n64k16_f16(d, weights.at(FP16_BYTES + k * SLAB), sums.at(k * SLAB), k > 0);
        UNROLL for (int k = 0; STRICT && k < INNER_SLABS; k += 2)
            wgmma_m64n64k16_f16(d, weights.at(k * SLAB), sums.at(SUMS_BYTES + k * SLAB), 1);
        UNROLL for (int k = 0; k < INNER_SLABS; k += 2) wgmma_m64n64k16_f16(d, weights.at(k * SLAB), sums.at(k * SLAB), 1);
        wgmma_commit_group();
        wgmma_wait_group<0>();
    }

    // Read by the tensor cores until finish().
    DEVICE void multiply_deltas(const uint32_t (&high)[16], const uint32_t (&low)[16]) {
        wgmma_fence();
        UNROLL for (int k = 0; STRICT && k < 4; ++k) {
            wgmma_m64n80k16_f16(values, low + 4 * k, transposed.at(k * 2 * CORE));
            wgmma_m64n80k16_f16(values, high + 4 * k, transposed.at(SUMS_BYTES + k * 2 * CORE));
        }
        UNROLL for (int k = 0; k < 4; ++k) wgmma_m64n80k16_f16(values, high + 4 * k, transposed.at(k * 2 * CORE));
        wgmma_commit_group();
    }
};

// The sums' columns that no tap fills: zeros, but for ONE in eight of them, each at 8 of the 64 positions: tensor cores round
// towards zero, which shows less in eight short sums than in one.
template <int ONE>
__device__ void store_constant_columns(char* sums) {
    for (int i = threadIdx.x % 128; i < (SUM_COLUMNS / 8 - TAPS) * SLAB / 2; i += 128) {
        const int slab = i / (SLAB / 2), position = i % (SLAB / 2) / 8, column = i % 8;
        reinterpret_cast<__half*>(sums + (1 + TAPS) * SLAB)[i] =
            __float2half_rn(slab == ONES / 8 - TAPS && column == position / 8 ? ONE : 0);
    }
}

// The segment's gradients, from the accumulators of all groups, which are added in `scratch` one after another. `more` come on
// top of what was written before.
template <bool STRICT>
__device__ void write_gradients(const Gradient<STRICT>& gradient, float* scratch, const Lane& lane, const Tensors& t,
                                int slot, bool more) {
    static_assert(OUTPUTS * SUM_COLUMNS * 4 <= GROUPS * SUMS_BYTES, "they lie where the sums were");
    const int first_row = threadIdx.x / 32 % 4 * 16 + lane.lane / 4;
    UNROLL_1 for (int group = 0; group < GROUPS; ++group) {
        if (static_cast<int>(threadIdx.x) / 128 == group)
            UNROLL for (int i = 0; i < 40; ++i) {
                const int row = first_row + i / 2 % 2 * 8, column = i / 4 * 8 + 2 * lane.q + i % 2;  // as wgmma leaves them
                float& sum = scratch[row * SUM_COLUMNS + column];
                const float value =
                    gradient.values[i] * (1 / DELTA_SCALE) * (i < 36 ? 1 / gradient.scale / (POOL_H * POOL_W) : 1);
                sum = group ? sum + value : value;
            }
        bar_sync(ALL_CONSUMERS, CONSUMERS);
    }
    for (int i = threadIdx.x; i < PARAMETERS; i += CONSUMERS) {
        const bool is_weight = i < WEIGHTS;
        const int o = is_weight ? i / TERMS : i - WEIGHTS, tap = i % TAPS;
        const int column = column_of(i % TERMS / TAPS);
        const float* const sums = scratch + o * SUM_COLUMNS;
        float sum = sums[is_weight ? 8 * tap + column : ONES];
        if (is_weight && tap != MIDDLE) sum += sums[8 * MIDDLE + column];
        UNROLL for (int k = 1; !is_weight && k < 8; ++k) sum += sums[ONES + k];
        float& gradient_sum = t.gradients[static_cast<int64_t>(slot) * PARAMETERS + i];
        gradient_sum = more ? gradient_sum + sum : sum;
    }
}

// As conv_pool_sum, and each segment's gradients of weights and bias; SAVING: also all delta, for the gradient of x. A consumer
// warp sums the boxes of 16 positions (`part` rank of its warpgroup's 64), and computes 16 outputs, from 16 * rank on, at all
// 64. Registers keep the gradients. A warpgroup's warps wait for one another twice a step: mbarrier `sums_empty` before they
// overwrite the sums, a named barrier before they multiply.
template <bool STRICT, bool SAVING>
__global__ void __launch_bounds__(THREADS, 1)
    conv_pool_gradients(const __grid_constant__ CUtensorMap x, const Shape shape, const Tensors t) {
    using Memory = Shared<STRICT>;
    constexpr int STAGES = Memory::STAGES;
    extern __shared__ __align__(1024) char memory[];
    float* const warp_largest = reinterpret_cast<float*>(memory + Memory::REST_AT);
    float* const warp_sums = warp_largest + OUTPUTS;
    const uint32_t data = shared_address(memory), barriers = shared_address(warp_sums + WARP_SUMS);
    const uint32_t sums_empty = barriers + 8 * PIPELINE_BARRIERS;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        Pipeline<STAGES>::init(barriers);
        for (int i = 0; i < GROUPS; ++i) mbarrier_init(sums_empty + 8 * i, 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warp >= CONSUMER_WARPS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) produce<STAGES>(x, shape, data, barriers);
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const float weight_scale = store_fp16_weights<STRICT>(t.weight, warp_largest, memory + Memory::WEIGHTS_AT);
    fence_proxy_async();
    bar_sync(ALL_CONSUMERS, CONSUMERS);

    const Lane lane(warp);
    const int group = warp / 4, rank = warp % 4;
    float bias[2];  // of the lane's two outputs; the sigmoid of one that does not exist is zero
    UNROLL for (int i = 0; i < 2; ++i) {
        const int o = 16 * rank + lane.lane / 4 + 8 * i;
        bias[i] = o < OUT_CHANNELS ? MINUS_LOG2_E * t.bias[o] : INFINITY;
    }
    Gradient<STRICT> gradient(data + Memory::WEIGHTS_AT, data + Memory::SUMS_AT + group * Memory::GROUP_SUMS,
                              sums_empty + 8 * group, warp_largest + 4 * group, weight_scale, lane, group);
    BoxSums<STAGES> box = {{data, barriers, lane.row_half}, lane};
    for (Scheduler scheduler{shape}; scheduler.has_next();) {
        const Segment segment = scheduler.next();
        const int64_t sample_tile = static_cast<int64_t>(segment.sample) * shape.tiles + segment.tile;
        const int columns = shape.columns - segment.tile * TILE_POSITIONS;
        const bool whole = (lane.warp + 1) * WARP_POSITIONS <= columns;
        const bool inside[2] = {lane.position(0) < columns, lane.position(1) < columns};
        // Bits of the group's four parts: which have positions beyond the image, and which are of half 1. And bits
        // of the lane's 16 columns of exponents, of each part two of either element: which are inside.
        uint32_t partial = 0, second = 0, columns_inside = 0;
        UNROLL for (int part = 0; part < 4; ++part) {
            const int other = 4 * group + part, first = other % TILE_WARPS * WARP_POSITIONS;
            partial |= static_cast<uint32_t>(first + WARP_POSITIONS > columns) << part;
            second |= static_cast<uint32_t>(other / TILE_WARPS) << part;
            UNROLL for (int i = 0; i < 4; ++i)
                columns_inside |= static_cast<uint32_t>(first + 2 * Lane::pair_of(2 * lane.q + i % 2) + i / 2 < columns)
                                  << (4 * part + i);
        }
        // In vectors: [pooled row][warp of the tile][16 outputs][lane]; MOST_KEPT_ROWS of the binding keeps them below 2^32.
        uint32_t saved = ((sample_tile * shape.rows + segment.start) * TILE_WARPS + 4 * group) * 128 + rank * 32 + lane.lane;
        float total = 0;
        const auto clear = [&] {
            gradient.clear();
            store_constant_columns<1>(memory + Memory::SUMS_AT + group * Memory::GROUP_SUMS);
            if (STRICT) store_constant_columns<0>(memory + Memory::SUMS_AT + group * Memory::GROUP_SUMS + SUMS_BYTES);
        };
        const auto write = [&](bool more) {
            bar_sync(ALL_CONSUMERS, CONSUMERS);  // all have multiplied, and the last segment's sums have been read
            write_gradients(gradient, reinterpret_cast<float*>(memory + Memory::SUMS_AT), lane, t, segment.slot, more);
        };
        clear();
        box.overlap_rows();
        UNROLL_1 for (int step = 0; step < segment.steps(); ++step) {
            box.fresh_rows();
            gradient.finish();
            box.overlap_rows();
            if (!whole)  // what lies beyond the image's last window may be anything, and must not count
                UNROLL for (int i = 0; i < 4 * TAPS; ++i) box.sums[i / 4][i % 4] = inside[i % 2] ? box.sums[i / 4][i % 4] : 0;
            gradient.store_sums(box.sums);
            float d[32];
            gradient.multiply_weights(d);
            UNROLL for (int i = 0; i < 32; ++i) d[i] = fmaf(d[i], gradient.unit, bias[i / 2 % 2]);
            const uint32_t ended = step < segment.rows(1) ? 0 : second;
            if (partial | ended)  // what does not count gets a sigmoid of zero
                UNROLL for (int part = 0; part < 4; ++part)
                    if ((partial | ended) >> part & 1)
                        UNROLL for (int i = 0; i < 8; ++i) {
                            const bool counts = columns_inside >> (4 * part + i / 4 * 2 + i % 2) & ~(ended >> part) & 1;
                            d[8 * part + i] = counts ? d[8 * part + i] : INFINITY;
                        }
            uint32_t deltas[16], low[16];
            float sum_a = NOTHING, sum_b = NOTHING;
            UNROLL for (int i = 0; i < 16; ++i) {
                const float a = rcp_approx(1 + ex2_approx(d[2 * i])), b = rcp_approx(1 + ex2_approx(d[2 * i + 1]));
                sum_a += a, sum_b += b;
                const float delta_a = a * fmaf(-a, DELTA_SCALE, DELTA_SCALE), delta_b = b * fmaf(-b, DELTA_SCALE, DELTA_SCALE);
                deltas[i] = fp16_pair(delta_a, delta_b);
                if (STRICT) low[i] = fp16_rest(delta_a, delta_b, deltas[i]);
            }
            total += sum_a + sum_b;
            gradient.multiply_deltas(deltas, low);
            if (STRICT) wgmma_wait_group<0>();  // registers do not suffice to keep the deltas any longer
            if (SAVING && (!STRICT || t.deltas)) {  // strict training has one kernel
                // Pairs of outputs, 8 apart: at both members of a pair of positions, then at those of the next pair.
                const auto save = [&](uint4* to, const uint32_t(&from)[16]) {
                    UNROLL for (int part = 0; part < 4; ++part) {
                        const uint32_t* w = from + 4 * part;
                        const uint32_t rows_below = second >> part & 1 ? (segment.steps() - 1) * TILE_WARPS * 128 : 0;
                        if (!(ended >> part & 1))
                            to[saved + part * 128 + rows_below] =
                                make_uint4(lower_values(w[0], w[1]), lower_values(w[2], w[3]), upper_values(w[0], w[1]),
                                           upper_values(w[2], w[3]));
                    }
                };
                save(t.deltas, deltas);
                if (STRICT && t.low_deltas) save(t.low_deltas, low);
                saved += TILE_WARPS * 128;
            }
            if (STRICT && step % STRICT_STEPS == STRICT_STEPS - 1) {
                write(step >= STRICT_STEPS);
                bar_sync(ALL_CONSUMERS, CONSUMERS);  // all have read what lies where the sums were
                clear();
            }
        }
        wgmma_wait_group<0>();
        write(STRICT && segment.steps() >= STRICT_STEPS);
        total = warp_sum(total);
        if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = total;
        bar_sync(ALL_CONSUMERS, CONSUMERS);  // and the gradients have been read
        if (threadIdx.x == 0) {
            float sum = 0;
            UNROLL for (int i = 0; i < CONSUMER_WARPS; ++i) sum += warp_sums[i];
            t.partial_sums[segment.slot] = sum;
        }
    }
}

// ---- sums over segments
// sums (batch, size): a sample's segments. PARTS threads share a sum; each has every PARTS-th segment of a sample tile.
// Launched early, it divides integers while the partial sums are being written, then waits for them. They are not __restrict__:
// the compiler might take them for constants and load them before the wait.
template <int PARTS>
__global__ void add_segments(const float* partial_sums, float* sums, int size, const Shape shape) {
    const int64_t thread = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, at = thread / PARTS;
    if (at >= static_cast<int64_t>(shape.batch) * size) return;
    const int64_t sample = at / size, i = at % size;
    const bool cut = blocks_share_tiles(shape);
    const auto block_of = [&](int64_t work_row) {  // the last one whose first_work_row is <= work_row
        return static_cast<int>(((work_row + 1) * shape.blocks - 1) / (sample_tiles(shape) * shape.rows));
    };
    float sum = 0;
    for (int64_t sample_tile = sample * shape.tiles; sample_tile < (sample + 1) * shape.tiles; ++sample_tile) {
        const int64_t first = sample_tile + (cut ? block_of(sample_tile * shape.rows) : 0);
        const int64_t last = sample_tile + (cut ? block_of((sample_tile + 1) * shape.rows - 1) : 0);
        griddepcontrol_wait();
        for (int64_t slot = first + thread % PARTS; slot <= last; slot += PARTS) sum += partial_sums[slot * size + i];
    }
    if (PARTS > 1) sum = warp_sum(sum);
    if (thread % PARTS == 0) sums[at] = sum;
}
// ---- gradients of weights and bias: the sum over samples of grad_out times each sample's gradients
struct ParameterSums {
    const float* samples;  // (batch, PARAMETERS)
    float *weight, *bias;
};

// A block of WIDTH * PARTS threads has WIDTH sums; a thread has every PARTS-th sample of one.
template <int WIDTH, int PARTS>
__device__ void sum_parameters(const ParameterSums& sums, const float* grad_out, int batch, int block, double* part_sums) {
    const int part = threadIdx.x / WIDTH, i = block * WIDTH + threadIdx.x % WIDTH;
    double sum = 0;
    if (i < PARAMETERS)
#pragma unroll 8
        for (int sample = part; sample < batch; sample += PARTS)
            sum += static_cast<double>(grad_out[sample]) * sums.samples[static_cast<int64_t>(sample) * PARAMETERS + i];
    part_sums[threadIdx.x] = sum;
    __syncthreads();
    if (part > 0 || i >= PARAMETERS) return;
    UNROLL for (int other = 1; other < PARTS; ++other) sum += part_sums[other * WIDTH + threadIdx.x];
    if (i < WEIGHTS) sums.weight[i] = static_cast<float>(sum);
    else sums.bias[i - WEIGHTS] = static_cast<float>(sum);
}

constexpr int SUM_WIDTH = 32, SUM_PARTS = 8;
__global__ void __launch_bounds__(SUM_WIDTH * SUM_PARTS)
    weighted_sum(const ParameterSums sums, const float* __restrict__ grad_out, int batch) {
    __shared__ double part_sums[SUM_WIDTH * SUM_PARTS];
    sum_parameters<SUM_WIDTH, SUM_PARTS>(sums, grad_out, batch, blockIdx.x, part_sums);
}

// ---- the gradient of x
// grad_box (64 positions x 72) = delta * weights, in registers; then rows, then columns of x add up the boxes that hold them.
constexpr int COLUMNS = 9 * CHANNELS, COLUMN_BYTES = COLUMNS * OUTPUTS * 2;  // of the transposed weights: 9 taps x channels
constexpr int EDGE = KERNEL_W - 1, EDGES = EDGE > 0 ? EDGE : 1;              // columns that a position shares with the next
constexpr int EXCHANGED = KERNEL_H * 2 * EDGES;                              // [row][channel][column], from warp to warp

// Shared memory: for each warp two buffers of rows of x on their way out, [row][32 columns][channel], lines swizzled like those
// of the input; then the weights, high and low parts.
constexpr int OUT_LINES = WARP_POSITIONS * POOL_W / LINE_FLOATS, OUT_BYTES = POOL_H * OUT_LINES * CHANNELS * LINE;
constexpr int TRANSPOSED_AT = 2 * CONSUMER_WARPS * OUT_BYTES, INPUT_GRADIENT_BYTES = TRANSPOSED_AT + 2 * COLUMN_BYTES;

// Blocks behind its own add up the parameters' gradients: 128 samples of one tile take 128 blocks, and leave 4 of 132 SMs free.
constexpr int TAIL_WIDTH = 128, TAIL_PARTS = CONSUMERS / TAIL_WIDTH, TAIL_BLOCKS = ceil_div(PARAMETERS, TAIL_WIDTH);

// weight[o][c][tap] as operand b: 72 columns (tap, channel); k is the output, in the order in which deltas were saved: of each
// 16 outputs 0, 8, 1, 9, ...
__device__ void store_transposed_weights(const Element* weight, float scale, char* to) {
    for (int i = threadIdx.x; i < COLUMNS * OUTPUTS; i += CONSUMERS) {
        const int o = i % OUTPUTS, column = i / OUTPUTS, tap = column / CHANNELS, c = column % CHANNELS;
        const bool exists = o < OUT_CHANNELS && c < IN_CHANNELS && tap < TAPS;
        const float w = exists ? weight[(o * IN_CHANNELS + c) * TAPS + tap] * scale : 0;
        const __half high = __float2half_rn(w);
        const int k = o / 16 * 16 + o % 8 * 2 + o / 8 % 2;
        const int at = k / 8 * COLUMNS * 16 + column / 8 * 128 + column % 8 * 16 + k % 8 * 2;
        *reinterpret_cast<__half*>(to + at) = high;
        *reinterpret_cast<__half*>(to + COLUMN_BYTES + at) = __float2half_rn(w - __half2float(high));
    }
}

// A persistent block goes through its segments as the forward pass does; a warp has 16 positions of its half, a step is one of
// their pooled rows. The deltas of the next step are loaded while this one's are multiplied. A tap's sums add to every value of
// its box: rows of x get those of the taps at or above them, and what the pooled row before has left (`carry`); columns
// likewise, from the position on the left (`edge`), by shuffles, and between warps through `exchange`. TMA stores the rows.
template <bool STRICT>
__global__ void __launch_bounds__(CONSUMERS, 1)
    input_gradient(const __grid_constant__ CUtensorMap grad_x, const uint4* __restrict__ deltas,
                   const Element* __restrict__ weight, const float* __restrict__ grad_out, const ParameterSums parameters,
                   const Shape shape) {
    extern __shared__ __align__(1024) char memory[];
    if (static_cast<int>(blockIdx.x) >= shape.blocks)
        return sum_parameters<TAIL_WIDTH, TAIL_PARTS>(parameters, grad_out, shape.batch, blockIdx.x - shape.blocks,
                                                      reinterpret_cast<double*>(memory));
    __shared__ float exchange[2][ROW_HALVES][1 + TILE_WARPS][4][EXCHANGED];  // [parity][channel][warp][q]; warp 0 stays zero
    __shared__ float warp_largest[CONSUMER_WARPS];
    char* const weights = memory + TRANSPOSED_AT;
    for (int i = threadIdx.x; i < 2 * ROW_HALVES * 4 * EXCHANGED; i += CONSUMERS) {
        const int parity = i / (ROW_HALVES * 4 * EXCHANGED), row_half = i / (4 * EXCHANGED) % ROW_HALVES, q = i / EXCHANGED % 4;
        exchange[parity][row_half][0][q][i % EXCHANGED] = 0;
    }
    float largest = 0;
    for (int i = threadIdx.x; i < WEIGHTS; i += CONSUMERS) largest = fmaxf(largest, fabsf(weight[i]));
    const float weight_power = scale_of(largest, warp_largest);
    store_transposed_weights(weight, weight_power, weights);
    fence_proxy_async();
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const Lane lane(warp);
    const Operand<COLUMNS * 16, CORE> right(shared_address(weights));
    constexpr int ROW = TILE_WARPS * 128;  // vectors
    const int left_lane = (Lane::pair_of(lane.pair - 1) & 7) * 4 + lane.q;  // has the pair of positions on the left
    const uint32_t outgoing = shared_address(memory) + 2 * warp * OUT_BYTES;
    int parity = 0;
    for (Scheduler scheduler{shape}; scheduler.has_next();) {
        const Segment segment = scheduler.next();
        // Pooled rows [first, last).
        const int first = segment.first_row(lane.row_half), last = first + segment.rows(lane.row_half);
        const bool writes_below = last == shape.rows && first < last;
        const float scale = grad_out[segment.sample] / (DELTA_SCALE * POOL_H * POOL_W) / weight_power;
        // A half begins one row above its first, which needs that row's carry; the half with the image's last pooled row also
        // writes what lies below its windows.
        const int below = ceil_div(shape.height, POOL_H) - shape.rows;
        const int steps = 1 + segment.steps() + (segment.start + segment.count == shape.rows ? below : 0);
        // A vector has two pairs of outputs at two neighbouring lanes' positions.
        const int64_t image_row = static_cast<int64_t>(segment.sample) * shape.rows + first - 1;
        const uint2* from =
            reinterpret_cast<const uint2*>(deltas + image_row * ROW + lane.warp * 128) + lane.q * 8 + lane.lane / 4;
        uint4 next[4], next_low[4];  // operands a of the next step
        const auto load = [&](int row) {
            const bool exists = row >= 0 && row < last;
            const auto load_part = [&](const uint2* from, uint4(&to)[4]) {
                UNROLL for (int v = 0; v < 4; ++v) {
                    const uint2 none = make_uint2(0, 0), a = exists ? __ldcs(from + 64 * v) : none,
                                b = exists ? __ldcs(from + 64 * v + 32) : none;
                    to[v] = make_uint4(a.x, a.y, b.x, b.y);
                }
            };
            load_part(from, next);
            if (STRICT) load_part(from + 2 * vectors_of_deltas(shape), next_low);
            from += 2 * ROW;
        };
        load(first < last ? first - 1 : -1);
        float carry[OVERLAP > 0 ? OVERLAP : 1][KERNEL_W][4] = {};
        UNROLL_1 for (int step = 0; step < steps; ++step) {
            const int row = first - 1 + step;
            float d[36];
            uint4 a[4], low[4];
            UNROLL for (int v = 0; v < 4; ++v) a[v] = next[v];
            if (STRICT) UNROLL for (int v = 0; v < 4; ++v) low[v] = next_low[v];
            load(row + 1);
            wgmma_fence();
            UNROLL for (int v = 0; v < 4; ++v) wgmma_m64n72k16_f16(d, a[v], right.at(COLUMN_BYTES + v * COLUMNS * 32), v > 0);
            UNROLL for (int v = 0; STRICT && v < 4; ++v) wgmma_m64n72k16_f16(d, low[v], right.at(v * COLUMNS * 32), 1);
            UNROLL for (int v = 0; v < 4; ++v) wgmma_m64n72k16_f16(d, a[v], right.at(v * COLUMNS * 32), 1);
            wgmma_commit_group();
            wgmma_wait_group<0>();
            // rows[y][e]: what row y of x gets through column e of the kernel; [2 * element + channel].
            float rows[KERNEL_H][KERNEL_W][4];
            UNROLL for (int e = 0; e < KERNEL_W; ++e)
                UNROLL for (int i = 0; i < 4; ++i) {
                    UNROLL for (int tap = e; tap < TAPS; tap += KERNEL_W) d[4 * tap + i] *= scale;
                    float above = NOTHING, later = NOTHING;
                    UNROLL for (int y = 0; y < KERNEL_H; ++y) {
                        above += d[4 * (y * KERNEL_W + e) + i];
                        rows[y][e][i] = above + (y < OVERLAP ? carry[y][e][i] : NOTHING);
                    }
                    UNROLL for (int y = OVERLAP - 1; y >= 0; --y) carry[y][e][i] = later += d[4 * ((y + 1) * KERNEL_W + e) + i];
                }
            // What the next position's columns get.
            float edge[KERNEL_H][4][EDGES];  // [row][2 * element + channel][column]
            UNROLL for (int y = 0; y < KERNEL_H; ++y)
                UNROLL for (int i = 0; i < 4; ++i)
                    UNROLL for (int z = EDGE - 1; z >= 0; --z)
                        edge[y][i][z] = rows[y][z + 1][i] + (z == EDGE - 1 ? NOTHING : edge[y][i][z + 1]);
            float from_left[KERNEL_H][2][EDGES];  // [row][channel][column]: of the position on the left of the lane's first
            // Calls visit(row, channel, column, index among those EXCHANGED) for each.
            const auto for_edges = [&](auto visit) {
                UNROLL for (int y = 0; y < KERNEL_H; ++y)
                    UNROLL for (int channel = 0; channel < 2; ++channel)
                        UNROLL for (int z = 0; z < EDGE; ++z) visit(y, channel, z, (y * 2 + channel) * EDGES + z);
            };
            float* const mine = exchange[parity][lane.row_half][1 + lane.warp][lane.q];
            if (lane.pair == 7) for_edges([&](int y, int channel, int z, int i) { mine[i] = edge[y][2 + channel][z]; });
            if (lane.lane == 0) cp_async_bulk_wait_read<1>();  // the rows of two steps ago have left their buffer
            bar_sync(FIRST_HALF + lane.row_half, 32 * TILE_WARPS);
            for_edges([&](int y, int channel, int z, int) {
                from_left[y][channel][z] = __shfl_sync(~0u, edge[y][2 + channel][z], left_lane);
            });
            if (lane.pair == 0) {
                const float* const left = exchange[parity][lane.row_half][lane.warp][lane.q];
                for_edges([&](int y, int channel, int z, int i) { from_left[y][channel][z] = left[i]; });
            }
            const uint32_t to = outgoing + parity * OUT_BYTES;
            parity ^= 1;
            UNROLL for (int y = 0; y < KERNEL_H; ++y)
                UNROLL for (int channel = 0; channel < 2; ++channel) {
                    float v[2 * POOL_W];
                    UNROLL for (int element = 0; element < 2; ++element)
                        UNROLL for (int z = 0; z < POOL_W; ++z) {
                            const float own = rows[y][z < KERNEL_W ? z : 0][2 * element + channel];
                            const int at = element * POOL_W + z;
                            v[at] = z == 0 ? own : z < KERNEL_W ? v[at - 1] + own : v[at - 1];
                        }
                    UNROLL for (int z = 0; z < EDGE; ++z) {
                        v[z] += from_left[y][channel][z];
                        v[POOL_W + z] += edge[y][channel][z];
                    }
                    // Odd lanes' vectors go the other way round, so that a quarter-warp's stores touch all banks.
                    const int c = 2 * lane.q + channel, copies = y == KERNEL_H - 1 ? FRESH : 1;
                    UNROLL for (int i = 0; i < POOL_W / 2; ++i) {
                        const int turn = lane.lane / 4 % 2 ? POOL_W / 2 - 1 - i : i, column = 2 * lane.pair * POOL_W + 4 * turn;
                        const int turned = 4 * (POOL_W / 2 - 1 - i);
                        float4 vector;
                        float* const e = &vector.x;
                        UNROLL for (int k = 0; k < 4; ++k) e[k] = lane.lane / 4 % 2 ? v[turned + k] : v[4 * i + k];
                        const uint32_t at = (column / LINE_FLOATS * CHANNELS + c) * LINE + ((column / 4 % 8 ^ c) << 4);
                        UNROLL for (int copy = 0; copy < copies; ++copy)
                            st_shared_v4_f32(to + (y + copy) * OUT_LINES * CHANNELS * LINE + at, vector);
                    }
                }
            fence_proxy_async();
            __syncwarp();
            if (lane.lane == 0) {
                if (row >= first && (row < last || writes_below))
                    tma_store_5d(grad_x, to, 0, 0, lane.warp * OUT_LINES, row * POOL_H, segment.sample);
                cp_async_bulk_commit();
            }
        }
    }
    if (lane.lane == 0) cp_async_bulk_wait();
}

// ---- launches
static Shape make_shape(int64_t batch, int64_t height, int64_t width) {
    int device = 0, sm_count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
    Shape s = {static_cast<int>(batch), static_cast<int>(height), static_cast<int>(width)};
    s.rows = (s.height - KERNEL_H + 1) / POOL_H, s.columns = (s.width - KERNEL_W + 1) / POOL_W;
    s.tiles = ceil_div(s.columns, TILE_POSITIONS);
    // One block per SM; or fewer, on at least 19 of 20 SMs, if a sample tile then has equally many blocks, or a block equally
    // many sample tiles. The latter need no add_segments where a sample has one tile.
    const int64_t tiles = sample_tiles(s), most = tiles * s.rows < sm_count ? tiles * s.rows : sm_count;
    const int64_t tiles_a_block = (tiles + sm_count - 1) / sm_count, whole = tiles % tiles_a_block ? 0 : tiles / tiles_a_block;
    const int64_t even = tiles <= sm_count ? sm_count / tiles * tiles : whole;
    s.blocks = static_cast<int>(even <= most && even * 20 >= 19 * sm_count ? even : most);
    return s;
}

// The slots of segments' sums; 0 where a sample has one segment, which is its sum.
static int64_t count_slots(const Shape& s) {
    return blocks_share_tiles(s) ? sample_tiles(s) + s.blocks : s.tiles > 1 ? sample_tiles(s) : 0;
}
// Floats of scratch.
extern "C" int64_t count_scratch(int64_t batch, int64_t height, int64_t width) {
    return count_slots(make_shape(batch, height, width)) * (1 + PARAMETERS);
}

// The driver's cuTensorMapEncodeTiled, without linking the driver; null if it has none.
using Encode = decltype(&cuTensorMapEncodeTiled);
static Encode find_encode() {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found);
#endif
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(encode) : nullptr;
}

// A tensor map of x, or of its gradient, as lines of 32 columns. On the way in the lines of a row and channel are neighbours in
// shared memory, on the way out those of the channels. The driver needs a context in this thread, which may be autograd's: a
// call of the runtime must come first.
static cudaError_t make_tensor_map(const Element* x, const Shape& s, bool outgoing, CUtensorMap* map) {
    static const Encode encode = find_encode();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t width = s.width, height = s.height, plane = width * height * 4;
    cuuint64_t sizes[5] = {LINE_FLOATS, width / LINE_FLOATS, IN_CHANNELS, height, static_cast<cuuint64_t>(s.batch)};
    cuuint64_t strides[4] = {LINE, plane, width * 4, plane * IN_CHANNELS};
    cuuint32_t box[5] = {LINE_FLOATS, LINES, CHANNELS, STAGE_ROWS, 1}, steps[5] = {1, 1, 1, 1, 1};
    if (outgoing) {
        box[1] = OUT_LINES, box[3] = POOL_H;
        std::swap(sizes[1], sizes[2]), std::swap(strides[0], strides[1]), std::swap(box[1], box[2]);
    }
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<Element*>(x), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// By programmatic dependent launch, so its start overlaps the kernel before it.
template <int PARTS>
static cudaError_t launch_add_segments(const float* partial_sums, float* sums, int size, const Shape& s, cudaStream_t stream) {
    const int64_t threads = static_cast<int64_t>(s.batch) * size * PARTS;
    cudaLaunchAttribute early = {cudaLaunchAttributeProgrammaticStreamSerialization};
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config = {dim3(static_cast<unsigned>((threads + 127) / 128)), dim3(128), 0, stream, &early, 1};
    return cudaLaunchKernelEx(&config, add_segments<PARTS>, partial_sums, sums, size, s);
}

// `deltas` may be null; strict ones have their low parts behind them.
extern "C" int launch_forward(const Element* x, const Element* weight, const Element* bias, float* scratch, float* out,
                              float* gradients, uint4* deltas, int64_t batch, int64_t height, int64_t width, int64_t strict,
                              cudaStream_t stream) {
    const Shape s = make_shape(batch, height, width);
    const int64_t slots = count_slots(s);
    float* const partial_sums = scratch + slots * PARAMETERS;  // behind the partial gradients
    const Tensors tensors = {weight, bias, slots ? partial_sums : out, slots ? scratch : gradients, deltas,
                             strict && deltas ? deltas + vectors_of_deltas(s) : nullptr};
    const auto kernel = strict   ? conv_pool_gradients<true, true>
                        : deltas ? conv_pool_gradients<false, true> : conv_pool_gradients<false, false>;
    const int bytes = strict ? Shared<true>::BYTES : Shared<false>::BYTES;
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) error = make_tensor_map(x, s, false, &map);
    if (error != cudaSuccess) return error;
    kernel<<<s.blocks, THREADS, bytes, stream>>>(map, s, tensors);
    error = cudaGetLastError();
    if (error == cudaSuccess && slots) error = launch_add_segments<32>(partial_sums, out, 1, s, stream);
    if (error == cudaSuccess && slots) error = launch_add_segments<1>(scratch, gradients, PARAMETERS, s, stream);
    return error;
}

// All gradients, those of the parameters from each sample's.
extern "C" int launch_gradients(const uint4* deltas, const Element* weight, const float* grad_out, const float* gradients,
                                Element* grad_x, float* grad_weight, float* grad_bias, int64_t batch, int64_t height,
                                int64_t width, int64_t strict, cudaStream_t stream) {
    const Shape s = make_shape(batch, height, width);
    const auto kernel = strict ? input_gradient<true> : input_gradient<false>;
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, INPUT_GRADIENT_BYTES);
    if (error == cudaSuccess) error = make_tensor_map(grad_x, s, true, &map);
    if (error != cudaSuccess) return error;
    kernel<<<s.blocks + TAIL_BLOCKS, CONSUMERS, INPUT_GRADIENT_BYTES, stream>>>(
        map, deltas, weight, grad_out, ParameterSums{gradients, grad_weight, grad_bias}, s);
    return cudaGetLastError();
}

extern "C" int launch_parameter_gradient(const float* grad_out, const float* gradients, float* grad_weight, float* grad_bias,
                                         int64_t batch, cudaStream_t stream) {
    weighted_sum<<<ceil_div(PARAMETERS, SUM_WIDTH), SUM_WIDTH * SUM_PARTS, 0, stream>>>(
        ParameterSums{gradients, grad_weight, grad_bias}, grad_out, static_cast<int>(batch));
    return cudaGetLastError();
}
#endif  // SERVED
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
SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int[2] pool, int needs) -> (Tensor, Tensor, Tensor)"
GRADIENT = "(Tensor grad, Tensor x, Tensor weight, Tensor bias, int[2] pool, Tensor grads, Tensor deltas, int needs)"
GRADIENT += " -> (Tensor, Tensor, Tensor)"

HOPPER = "-gencode=arch=compute_90a,code=sm_90a"  # load_inline would build for 9.0, which lacks wgmma
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


def library_for(weight, pool, kernels=kernels):
    """Return the library for these sizes, which may be torch.compile's symbols."""
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_H", "KERNEL_W", "POOL_H", "POOL_W"
    return kernels(HOPPER, **dict(zip(names, map(int, (*weight.shape, *pool)), strict=True)))


def original(x, weight, bias, pool):
    return torch.sigmoid(nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)).sum(dim=(1, 2, 3))


def saved(x, weight, bias, pool, needs, library_for=library_for):
    """Return room for the output, each sample's gradients of the parameters, and deltas (needs & 1; strict: low parts behind).

    The latter two are empty where PyTorch computes: deltas are kept of one tile, counted in 32 bits.
    """
    batch, rows, columns = len(x), *((x.shape[i] - weight.shape[i] + 1) // pool[i - 2] for i in (2, 3))
    served = needs and library_for(weight, pool).is_served(ctypes.c_int64(int(x.shape[3])))
    served = served and not (needs & 1 and (columns > 96 or batch * rows > 2**32 // (96 * 64 // 8)))
    deltas = x.new_empty((1 + is_strict()) * batch if served and needs & 1 else 0, rows, 96 * 64, dtype=torch.float16)
    return x.new_empty(batch), x.new_empty(batch if served else 0, weight.numel() + bias.numel()), deltas


def conv_pool_sum(x, weight, bias, pool, needs, library_for=library_for, saved=saved, original=original):
    """Return the output and what the gradients of x (needs & 1) and of the parameters (needs & 2) take: see `saved`."""
    batch, *_, height, width = x.shape
    (out_channels, in_channels, kernel_h, kernel_w), (pool_h, pool_w) = weight.shape, pool
    check("x", x, (batch, in_channels, height, width), x.device)
    check("weight", weight, weight.shape, x.device)
    check("bias", bias, (out_channels,), x.device)
    if min(pool) < 1 or height < kernel_h + pool_h - 1 or width < kernel_w + pool_w - 1:
        fits = f"room for a window of {[*pool]} behind a kernel of {[kernel_h, kernel_w]}"
        raise RuntimeError(f"expected {fits}; got an image of {height} x {width}")
    if batch * (weight.numel() + 65) >= 2**33 or x.numel() >= 2**39:
        raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got x of shape {[*x.shape]}")
    if x.is_cuda and capability(x.device)[0] != 9:
        raise RuntimeError("expected a GPU of compute capability 9 (Hopper); training_tensor_core runs on 8.0 and later")
    library, (out, grads, deltas) = library_for(weight, pool), saved(x, weight, bias, pool, needs)
    if not library.is_served(ctypes.c_int64(width)):
        warnings.warn(
            "PyTorch computes what these kernels do not take: widths of 32 * n, at most 8 channels in and 64 out, "
            "9 taps, windows of an even width up to 8 and 16 pixels, kernels up to one wider than the window",
            stacklevel=2,
        )
        return original(x, weight, bias, pool), grads, deltas
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    if batch:
        x = x.clone() if x.data_ptr() % 16 else x  # TMA reads 16 bytes at a time
        scratch = x.new_empty(count(library.count_scratch, batch, height, width))
        kept = grads if len(grads) else x.new_empty(batch, grads.shape[1]), deltas if len(deltas) else None
        launch(library.launch_forward, x, weight, bias, scratch, out, *kept, batch, height, width, is_strict())
    return out, grads, deltas


operator = torch.library.custom_op(f"{NAME}::forward", conv_pool_sum, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(saved)


def gradient(grad, x, weight, bias, pool, grads, deltas, needs, library_for=library_for):
    """Return the gradients of x (needs & 1), weight and bias (needs & 2); empty tensors where they are not needed."""
    grad, weight, (batch, _, height, width) = grad.contiguous(), weight.contiguous(), x.shape
    found = [each.new_empty(each.shape) for each in (x if needs & 1 else x[:0], weight, bias)]
    library, strict = library_for(weight, pool), len(deltas) > batch
    if needs & 1:
        launch(library.launch_gradients, deltas, weight, grad, grads, *found, batch, height, width, strict)
    else:
        launch(library.launch_parameter_gradient, grad, grads, *found[1:], batch)
    return tuple(each if needs & bit else each.new_empty(0) for each, bit in zip(found, (1, 2, 2), strict=True))


def gradients(grad, x, weight, bias, pool, grads, deltas, needs):
    return tuple(each.new_empty(each.shape if needs & bit else 0) for each, bit in ((x, 1), (weight, 2), (bias, 2)))


of_gradients = torch.library.custom_op(f"{NAME}::gradient", gradient, mutates_args=(), device_types=DEVICE, schema=GRADIENT)
of_gradients.register_fake(gradients)


def backward(ctx, grad, *_, original=original, gradient=gradient):
    """The gradient; PyTorch's, with the 4.8 GB that this file avoids, where kernels do not serve, and that of a gradient."""
    *tensors, grads, deltas = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    needs = wanted[0] + 2 * any(wanted[1:])
    if torch.is_grad_enabled() or needs & ~ctx.needs or not len(grads):
        return *torch.func.vjp(lambda *tensors: original(*tensors, ctx.pool), *tensors)[1](grad), None, None
    function = gradient if is_direct(grad, *tensors) else torch.ops.conv_pool_sigmoid_sum_training_hopper.gradient
    found = function(grad, *tensors, ctx.pool, grads, deltas, needs)
    return *[each if is_wanted else None for each, is_wanted in zip(found, wanted, strict=True)], None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.pool, ctx.needs = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


operator.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    operator.register_autocast(DEVICE, torch.float32)


class Direct(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which takes longer than all else on the host."""

    backward = staticmethod(backward)

    @staticmethod
    def forward(ctx, *operands, function=conv_pool_sum, setup_context=setup_context):
        output = function(*operands)
        setup_context(ctx, operands, output)
        return output


def call(x, weight, bias, pool, direct=Direct):
    needs = x.requires_grad + 2 * (weight.requires_grad or bias.requires_grad) if torch.is_grad_enabled() else 0
    function = direct.apply if is_direct(x, weight, bias) else torch.ops.conv_pool_sigmoid_sum_training_hopper.forward
    return function(x, weight, bias, pool, needs)[0]


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
