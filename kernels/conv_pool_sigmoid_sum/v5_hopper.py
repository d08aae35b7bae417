"""conv_pool_sigmoid_sum, v5: a persistent, warp-specialized kernel; single pass, TMA-fed wgmma.

Why it is faster
    v4's warps copy, sum and multiply in turn; in half of the cycles no warp is ready. Here one producer thread keeps a
    multistage pipeline full: a TMA instruction fills a stage of 26 KiB, and up to 6 are in flight. Three consumer warpgroups
    make box sums in registers, which are wgmma's operand a. Operand b, the weights, stays in shared memory: a warpgroup reads
    it once for its four warps. H200, batch 128: 0.148 ms, 93% of the floor, memory bound; batch 1 to 32: latency bound.

Mathematics
    out[sample] = sum of sigmoid(z[o]) over outputs o and windows. box[t] is the sum of a window's p pixels, shifted by
    the kernel's tap t; m is the middle tap. Differences from box[m] are free of the mean, so TF32 loses less:
    z[o] = bias[o] + 1/p * sum over channels of [sum over t != m of w[t] * (box[t] - box[m]) + (sum over t of w[t]) * box[m]]
    Products are TF32 (11 bits). Weights and box[m] are high + low, two TF32 numbers; strict (TF32 forbidden): all sums, too.

Launches
    conv_pool_sum: at most a block per SM, 512 threads, 193 KiB. add_segments, a warp per sample: if samples have several parts.

Floor
    604 MB at an H200's measured 4.39 TB/s: 0.138 ms (16-bit: 0.069). Products at 355 TFLOP/s, TF32: 19 (9 taps, low parts of
    9 weights and of box[m]), 0.06 ms; 16-bit 11 (only box[m] and its weight have low parts), 0.037.

Takes
    CUDA tensors (batch, in_channels, height, width) of float32, fp16 or bf16, any strides, on compute capability 9.x; others
    raise RuntimeError. Sums are fp32, as is the output under autocast; float32 x is never strict there. PyTorch computes the
    gradient and, with a warning, shapes that is_served refuses. Deterministic for a number of SMs. MIT; copy it.
"""

import contextlib
import copy
import ctypes
import functools
import threading
import warnings

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv_pool_sigmoid_sum_v5_hopper"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # ModelNew's, shape of x, under the emulator, limit: TF32's

CUDA = r"""
// Needs ELEMENT, STRICT, IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H and POOL_W.
#define PASTE(a, b) a##b
#define IS(type) PASTE(IS_, type)
#define IS_float 1
#if !IS(ELEMENT)  // the headers of 16-bit types take half a second to compile
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif
#include <cuda.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>
#include <type_traits>

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define DEVICE __device__ __forceinline__

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

using Element = ELEMENT;  // of x and the parameters: float, __half or __nv_bfloat16
// Explicit: PyTorch builds without the conversions of 16-bit types.
DEVICE float to_float(float x) { return x; }
DEVICE void store(float* to, float x) { *to = x; }
#if !IS(ELEMENT)
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE void store(__half* to, float x) { *to = __float2half_rn(x); }
DEVICE void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
#endif

// What the kernel is made for; TMA brings lines of 128 bytes.
#define SERVED                                                           \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 64 && KERNEL_H * KERNEL_W <= 9 && \
     KERNEL_H <= POOL_H + 1 && KERNEL_W <= POOL_W + 1 && POOL_W % 2 == 0 && POOL_W <= 8 && POOL_H * POOL_W <= 16)
constexpr int LINE = 128, LINE_ELEMENTS = LINE / sizeof(Element);
extern "C" int64_t is_served(int64_t width) { return SERVED && width % LINE_ELEMENTS == 0; }

#if SERVED
// Words used below:
//   tap       an element of the convolution's kernel
//   position  a pooled column of a pooled row: a window of pixels, which has a box sum for each tap and channel
//   tile      96 pooled columns; a sample tile: those of one sample, all pooled rows. A step takes two of its rows, one a half
//   work row  a pooled row in the line of all sample tiles' rows, of which each block takes an equal part
//   segment   the part of one sample tile in one block; `slot` is where its sum goes in device memory
//   half      0 or 1, row_half: the upper or the lower half of a segment's rows, and the six consumer warps that go down it
//   channel   0 or 1: of a lane's two, q and q + 4
//   pair      two neighbouring positions; `element` (0 or 1) is one of them
//
// Who does what, in a block:
//   one producer thread                                384 consumer threads, twelve warps of 16 positions
//     each segment:                                      once: weights, as TF32, and biases to shared memory
//       each stage of rows, of half 0 and 1 in turn:     each segment, each of the half's pooled rows:
//         waits until the stage is empty                   waits until a stage is full, sums its rows in registers,
//         TMA fills it; its bytes complete `full`          gives it back: a warp arrives at `empty`
//                                                          box sums * weights by wgmma, sigmoids, added to the total
//                                                        each segment: one total of all consumers, to its slot

struct Shape {
    int batch, height, width, rows, columns;  // rows, columns: of pooled positions
    int tiles, blocks;                        // tiles of a sample; blocks of the persistent kernel
};

// ---- constants and layout
// p = POOL_H * POOL_W independent pixels add up to p times their mean, but to sqrt(p) times their spread: rounded to TF32, a
// box sum loses sqrt(p) times as much of the signal as a pixel does. Differences from the middle tap's box, in fp32, are free
// of the mean, and small: that box overlaps the others most. Its own sum keeps the mean, and is split, high + low. So are the
// weights: a rounded weight errs alike at all positions, which the sum over positions does not average out. 16-bit weights are
// TF32 numbers, and need no low part: only their sum, the middle tap's weight, has one.
constexpr int TAPS = KERNEL_H * KERNEL_W, MIDDLE = TAPS / 2;
constexpr int OVERLAP = KERNEL_H - 1, FRESH = POOL_H - OVERLAP;  // rows that a pooled row shares with the next, and its own
// Channels of a tile: k of a TF32 wgmma, two of a lane. Missing channels and outputs are zeros.
// 16 channels would take two k steps a tap and twice the floats of a lane (see CONSUMER_REGISTERS), more than it has registers.
constexpr int CHANNELS = 8, OUTPUTS = 64, TILE_POSITIONS = 96;
constexpr int WARP_POSITIONS = 16, TILE_WARPS = TILE_POSITIONS / WARP_POSITIONS;
// A pooled row is six warps of 16 positions; two rows, one of each half, make three warpgroups. Number 1 has warps of both, so
// halves take equally many steps. A half's rows are consecutive: a lane carries in registers what one shares with the next.
constexpr int ROW_HALVES = 2, CONSUMER_WARPS = ROW_HALVES * TILE_WARPS, CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int THREADS = CONSUMERS + 128;  // three consumer warpgroups, one producer warpgroup
// Of a thread, by setmaxnreg: 384 x 160 + 128 x 24 = 64,512 of the SM's 65,536; all are launched with 128. While a lane
// multiplies, 96 floats are live: 24 pending, 36 + 4 of operand a, 32 accumulators; and addresses.
constexpr int CONSUMER_REGISTERS = 160, PRODUCER_REGISTERS = 24;
static_assert(CONSUMERS * CONSUMER_REGISTERS + 128 * PRODUCER_REGISTERS <= 65536, "or setmaxnreg waits forever");

// What a block keeps in shared memory; bytes for float, 8 channels, a 3 x 3 kernel and a 4 x 4 window (16-bit types: 14 stages
// of 14,336, and 20,480 of weights).
//   +-----------------------------------------------+ 0
//   | stages of the pipeline, of halves 0, 1, 0...  | 6 x 26,624    TMA fills a stage (full mbarrier), the six warps of its
//   |   a stage: STAGE_ROWS rows x CHANNELS x       |               half empty it (empty mbarrier)
//   |   LINES lines of 128 bytes, 128-byte swizzle  |
//   +-----------------------------------------------+ WEIGHTS_AT
//   | weights: high parts, then low parts, TF32     | 36,864        written once, ALL_CONSUMERS (named barrier), read by wgmma
//   +-----------------------------------------------+ REST_AT
//   | biases; a float a warp; full, empty mbarriers | 256 + 64 + 256
//   +-----------------------------------------------+ SHARED_BYTES
constexpr int CHUNK_BYTES = 16;  // what the swizzle moves: chunk i of line l (of a TMA box) stands at i ^ (l % 8)
// Lines of a row and channel; an odd number, so that the swizzle differs from channel to channel.
constexpr int LINES = ceil_div(TILE_POSITIONS * POOL_W + KERNEL_W - 1, LINE_ELEMENTS) | 1, ROW_BYTES = CHANNELS * LINES * LINE;
static_assert(TILE_POSITIONS * POOL_W % LINE_ELEMENTS == 0, "tiles begin where a line does");
// Two rows a stage where none then mixes fresh and shared rows, and where four such stages take at most 128 KiB.
constexpr int STAGE_ROWS = OVERLAP % 2 == 0 && FRESH % 2 == 0 && 8 * ROW_BYTES <= 128 * 1024 ? 2 : 1,
              STAGE_BYTES = STAGE_ROWS * ROW_BYTES;
constexpr int CORE = 128;                                                           // a core matrix: 8 rows x 16 bytes
constexpr bool EXACT = sizeof(Element) == 2;  // weights are TF32 numbers; the factor of all is then applied to their products
__host__ __device__ constexpr bool has_low(int tap) { return !EXACT || tap == MIDDLE; }
constexpr int TAP_BYTES = CHANNELS * OUTPUTS * 4, WEIGHT_BYTES = TAPS * TAP_BYTES;  // of the weights' high parts
constexpr int LOW_BYTES = EXACT ? TAP_BYTES : WEIGHT_BYTES;
__host__ __device__ constexpr int low_at(int tap) { return WEIGHT_BYTES + (EXACT ? 0 : tap * TAP_BYTES); }
constexpr int MAX_STAGES = 16, WARP_SUMS = 16, REST = (OUTPUTS + WARP_SUMS) * 4 + 2 * MAX_STAGES * 8;
// As many stages as fit into the 227 KiB of a block, equally many a half: bytes in flight hide the memory's latency.
constexpr int FITTING = (227 * 1024 - WEIGHT_BYTES - LOW_BYTES - REST) / STAGE_BYTES / ROW_HALVES * ROW_HALVES;
constexpr int STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES;
constexpr int WEIGHTS_AT = STAGES * STAGE_BYTES, REST_AT = WEIGHTS_AT + WEIGHT_BYTES + LOW_BYTES, SHARED_BYTES = REST_AT + REST;
static_assert(STAGES >= 2 * ROW_HALVES, "each half's pipeline is double-buffered at least");
constexpr int ALL_CONSUMERS = 1;  // a named barrier

constexpr float NOTHING = -0.0f;  // where sums begin: NOTHING + x is x, also of x = -0, so compilers leave out the addition
constexpr float MINUS_LOG2_E = -1.4426950408889634f;  // in weights and biases: sigmoid = 1 / (1 + 2^exponent)
constexpr float FACTOR = MINUS_LOG2_E / (POOL_H * POOL_W);  // of the weights: and the average's divisor

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
// The next kernel in the stream, where it is launched with programmatic stream serialization, may start once all blocks have
// called this, or ended.
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
// Returns when the kernel before has ended and its writes are visible.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE uint4 ld_shared_v4_u32(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
DEVICE uint2 ld_shared_v2_u32(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
DEVICE uint32_t ld_shared_u32(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
DEVICE float2 ld_shared_v2_f32(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
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
DEVICE float cvt_rna_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
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

// d (64 x 64) = or += a (64 x 8, in registers) * b (8 x 64, in shared memory), TF32.
DEVICE void wgmma_m64n64k8_tf32(float (&d)[32], const float (&a)[4], uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" REGISTERS_32 "}, {%32, %33, %34, %35}, %36, "
                 "accumulate, 1, 1;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "l"(b), "r"(accumulate));
}
// wgmma's descriptor of an operand in shared memory without swizzle: bytes between core matrices that are adjacent in k, and
// between those adjacent in the rows. Addresses have 18 bits, so an offset never carries beyond its field.
template <int ADJACENT_K, int ADJACENT_ROWS>
struct Operand {
    uint32_t word;  // the lower one

    DEVICE explicit Operand(uint32_t address) : word(address >> 4 | ADJACENT_K >> 4 << 16) {}
    DEVICE uint64_t at(int offset) const { return static_cast<uint64_t>(ADJACENT_ROWS >> 4) << 32 | (word + (offset >> 4)); }
};

DEVICE float warp_sum(float v) {
    UNROLL for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
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
        // Where blocks share sample tiles, tile or block grows from segment to segment, so no two have the same slot.
        const int slot = static_cast<int>(sample_tile) + (blocks_share_tiles(s) ? blockIdx.x : 0);
        const int start = static_cast<int>(work_row - sample_tile * s.rows);
        const int count = end - work_row < s.rows - start ? static_cast<int>(end - work_row) : s.rows - start;
        work_row += count;
        return {sample, tile, slot, start, count};
    }
};

// ---- the multistage pipeline
// Even stages are half 0's, odd ones half 1's. A stage's full mbarrier completes when TMA has written its bytes, its empty
// mbarrier when all six warps of its half have read them. A half's state is its stage and the parity of that stage's phase.
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

// The sums of segments, and of samples where the caller wants it, are floats; else samples' have x's type.
DEVICE void store_sum(void* sums, bool as_floats, int64_t at, float sum) {
    if (as_floats) static_cast<float*>(sums)[at] = sum;
    else store(static_cast<Element*>(sums) + at, sum);
}

// ---- a consumer thread
// Its registers have the box sums of 2 positions x 2 channels x all taps (36), what the next pooled row has so far (24), and
// 16 x 2 exponents: its part of the product that four warps (a warpgroup) share.
using Sums = float[TAPS][4];         // [tap][2 * channel + element]: fragments of wgmma's operand a
using RowSums = float[KERNEL_W][4];  // [column of the kernel], likewise: sums of POOL_W values of a row
// Elements that a lane reads of a row, in vectors of 16 bytes, or of 8 where pairs begin at multiples of that.
constexpr int SPAN = 2 * POOL_W + KERNEL_W - 1;
constexpr int VECTOR = (2 * POOL_W * sizeof(Element) % 16 ? 8 : 16) / sizeof(Element), VECTORS = ceil_div(SPAN, VECTOR);

struct Consumer {
    const int lane = threadIdx.x % 32, q = lane % 4, n = lane / 4;
    const int warp, row_half;  // warp: in the tile
    const int pair = sizeof(Element) == 2 ? (n & 1) << 2 | n >> 1 : (n & 4) | (n & 1) << 1 | (n >> 1 & 1);
    uint32_t vector[VECTORS];  // offsets in a row, for channel q
    Pipeline pipeline;
    Sums sums, pending;  // of the pooled row at hand; of the next one, from its first rows (of the last kernel row: unused)
    bool not_finite = false, next_not_finite = false;  // NaN or infinity was read for the pooled row at hand; for the next one

    // Lane 4 * n + q has channels q and q + 4 of a pair, whose elements are rows n and n + 8 of wgmma's operand a, and of d.
    // 16-byte loads are conflict-free where POOL_W is 4 and KERNEL_W up to 3 (else 2-way): a quarter-warp has all q and two n.
    // LINES is odd, so the swizzles of the q differ modulo 4. The two lower bits of n are swapped, so both pairs are 2 apart,
    // which is 4 chunks (16-bit types: rotated, 4 apart). Eight lanes so read all eight chunks of a line, which are all banks.
    DEVICE Consumer(uint32_t data, uint32_t barriers, int consumer_warp)
        : warp(consumer_warp % TILE_WARPS), row_half(consumer_warp / TILE_WARPS), pipeline{data, barriers, row_half} {
        UNROLL for (int i = 0; i < VECTORS; ++i) {
            const int column = position(0) * POOL_W + VECTOR * i, line = q * LINES + column / LINE_ELEMENTS;
            vector[i] = line * LINE + (column % LINE_ELEMENTS * sizeof(Element) ^ line % 8 * CHUNK_BYTES);
        }
    }
    DEVICE int position(int element) const { return warp * WARP_POSITIONS + 2 * pair + element; }

    // `common` is in the windows of all columns of the kernel; the window of one adds left[column] and right[column].
    // Channel q + 4 is 4 * LINES lines further, 4 modulo 8: the swizzle moves its chunks by a further 4.
    DEVICE void sum_row(uint32_t row, int channel, RowSums& sums) const {
        static_assert(LINES % 2 == 1 && ROW_BYTES % 1024 == 0, "4 * LINES is 4 modulo 8; rows begin where the swizzle does");
        float x[VECTOR * VECTORS];
        UNROLL for (int i = 0; i < VECTORS; ++i) {
            const uint32_t at = channel ? ((row + vector[i]) ^ 4 * CHUNK_BYTES) + 4 * LINES * LINE : row + vector[i];
            const int bytes = smaller(SPAN - VECTOR * i, VECTOR) * sizeof(Element);
            alignas(16) uint32_t words[4] = {};
            if (bytes > 8) reinterpret_cast<uint4&>(words) = ld_shared_v4_u32(at);
            else if (bytes > 4) reinterpret_cast<uint2&>(words) = ld_shared_v2_u32(at);
            else words[0] = ld_shared_u32(at);
            UNROLL for (int k = 0; k < VECTOR; ++k) x[VECTOR * i + k] = to_float(reinterpret_cast<const Element*>(words)[k]);
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

    // Sums the next ROWS rows; use(row, channel, sums) takes a channel's. Waits until TMA has filled a stage, and gives it back
    // once its rows have been read. TMA overwrites it through the async proxy, against which mbarrier.arrive orders no reads.
    // As a caution (no failure is known) the values choose the lane that arrives, which is not known before all loads have
    // returned. __syncwarp, unlike a ballot, puts the other lanes' loads before the arrive.
    template <int ROWS, typename Use>
    DEVICE void for_rows(Use use) {
        float stage_sum;  // has as terms all values that were read of the stage
        UNROLL for (int row = 0; row < ROWS; ++row) {
            if (row % STAGE_ROWS == 0) mbarrier_try_wait(pipeline.full_barrier(), pipeline.parity);
            const uint32_t address = pipeline.address() + row % STAGE_ROWS * ROW_BYTES;
            UNROLL for (int channel = 0; channel < 2; ++channel) {
                RowSums sum;
                sum_row(address, channel, sum);
                const float row_sum = sum[0][2 * channel] + sum[0][2 * channel + 1] + sum[KERNEL_W - 1][2 * channel + 1];
                stage_sum = row % STAGE_ROWS == 0 && channel == 0 ? row_sum : stage_sum + row_sum;
                use(row, channel, sum);
            }
            if (row % STAGE_ROWS != STAGE_ROWS - 1) continue;
            const bool stage_not_finite = !(fabsf(stage_sum) < INFINITY);
            not_finite |= stage_not_finite, next_not_finite |= stage_not_finite;
            const uint32_t odd_lanes = __ballot_sync(~0u, __float_as_uint(stage_sum) & 1);
            __syncwarp();
            if (lane == (odd_lanes ? __ffs(odd_lanes) - 1 : 0)) mbarrier_arrive(pipeline.empty_barrier());
            pipeline.advance();
        }
    }

    // The rows that belong to this pooled row alone complete what is pending.
    DEVICE void fresh_rows() {
        not_finite = next_not_finite;
        RowSums total = {};
        for_rows<FRESH>([&](int row, int channel, const RowSums& sum) {
            UNROLL for (int column = 0; column < KERNEL_W; ++column)
                UNROLL for (int i = 2 * channel; i < 2 * channel + 2; ++i)
                    total[column][i] = row ? total[column][i] + sum[column][i] : sum[column][i];
        });
        UNROLL for (int tap = 0; tap < TAPS; ++tap)
            UNROLL for (int i = 0; i < 4; ++i)
                sums[tap][i] = (tap < OVERLAP * KERNEL_W ? pending[tap][i] : NOTHING) + total[tap % KERNEL_W][i];
    }

    // The rows shared with the next pooled row. Of the first call, above a half's first fresh rows, only `pending` counts.
    DEVICE void overlap_rows() {
        next_not_finite = false;
        for_rows<OVERLAP>([&](int row, int channel, const RowSums& sum) {
            UNROLL for (int tap = 0; tap < TAPS; ++tap)
                UNROLL for (int i = 2 * channel; i < 2 * channel + 2; ++i) {
                    const float value = sum[tap % KERNEL_W][i];
                    if (tap / KERNEL_W > row) sums[tap][i] += value;
                    else pending[tap][i] = tap / KERNEL_W == row ? value : pending[tap][i] + value;
                }
        });
    }

    // weight[o][c][tap] as operand b, one product a tap, of core matrices of 8 outputs x 4 channels: 8 along n, CORE bytes
    // apart, by 2 along k, OUTPUTS * 16 bytes apart. A thread has all taps of a channel of an output, and loads all that it has
    // before it stores any: a small batch waits for the latency of these loads.
    __device__ static void store_weights(const Element* weight, char* to) {
        constexpr int ALL = OUTPUTS * CHANNELS, COUNT = ceil_div(ALL, CONSUMERS);
        float w[COUNT][TAPS];
        UNROLL for (int k = 0; k < COUNT; ++k) {
            const int i = threadIdx.x + k * CONSUMERS, o = i / CHANNELS, c = i % CHANNELS;
            const bool exists = o < OUT_CHANNELS && c < IN_CHANNELS;
            UNROLL for (int tap = 0; tap < TAPS; ++tap)
                w[k][tap] = exists ? to_float(weight[(o * IN_CHANNELS + c) * TAPS + tap]) * (EXACT ? 1 : FACTOR) : 0;
        }
        UNROLL for (int k = 0; k < COUNT; ++k) {
            const int i = threadIdx.x + k * CONSUMERS, o = i / CHANNELS, c = i % CHANNELS;
            if (i >= ALL) break;
            float all = 0;
            UNROLL for (int tap = 0; tap < TAPS; ++tap) all += w[k][tap];
            w[k][MIDDLE] = all;  // the others are the differences' weights
            UNROLL for (int tap = 0; tap < TAPS; ++tap) {
                const float high = cvt_rna_tf32(w[k][tap]);
                const int at = c / 4 * OUTPUTS * 16 + o / 8 * CORE + o % 8 * 16 + c % 4 * 4;
                *reinterpret_cast<float*>(to + tap * TAP_BYTES + at) = high;
                if (has_low(tap)) *reinterpret_cast<float*>(to + low_at(tap) + at) = cvt_rna_tf32(w[k][tap] - high);
            }
        }
    }

    // Adds half of TF32's last bit: the tensor core ignores the lower 13 bits, so it reads a rounded number. That is one
    // instruction, cvt.rna.tf32 is three. The NaN that arithmetic makes, 0x7fffffff, would become -0.
    DEVICE static float to_tf32_if_number(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }
    DEVICE static float tf32_bits(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }  // that it reads

    // d (64 positions x 64 outputs, exponents) = differences of sums * weights. One product is that of the high parts, others
    // those of a low part: of the weights, and of the middle tap's sums, in strict mode of all sums (3xTF32). Small terms come
    // first. Beyond the image's last window sums may be anything, and become zeros.
    DEVICE void multiply(float (&d)[32], uint32_t weights_at, bool whole, const bool (&inside)[2]) {
        if (!whole)
            UNROLL for (int i = 0; i < 4 * TAPS; ++i) sums[i / 4][i % 4] = inside[i % 2] ? sums[i / 4][i % 4] : 0;
        Sums high, low;
        UNROLL for (int tap = 0; tap < TAPS; ++tap)
            UNROLL for (int i = 0; i < 4; ++i) {
                if (tap != MIDDLE) sums[tap][i] -= sums[MIDDLE][i];
                high[tap][i] = to_tf32_if_number(sums[tap][i]);
            }
        if (!whole || __any_sync(~0u, not_finite))  // at the image's edge either way of rounding would do
            UNROLL for (int i = 0; i < 4 * TAPS; ++i) high[i / 4][i % 4] = cvt_rna_tf32(sums[i / 4][i % 4]);
        UNROLL for (int tap = 0; tap < TAPS; ++tap)
            UNROLL for (int i = 0; i < 4; ++i)
                if (STRICT || tap == MIDDLE) low[tap][i] = to_tf32_if_number(sums[tap][i] - tf32_bits(high[tap][i]));
        const Operand<OUTPUTS * 16, CORE> weights(weights_at);
        wgmma_fence();
        UNROLL for (int tap = 0; tap < TAPS; ++tap)
            if (has_low(tap)) wgmma_m64n64k8_tf32(d, high[tap], weights.at(low_at(tap)), !EXACT && tap > 0);
        UNROLL for (int tap = 0; tap < TAPS; ++tap)
            if (STRICT || tap == MIDDLE) wgmma_m64n64k8_tf32(d, low[tap], weights.at(tap * TAP_BYTES), 1);
        UNROLL for (int tap = 0; tap < TAPS; ++tap) wgmma_m64n64k8_tf32(d, high[tap], weights.at(tap * TAP_BYTES), 1);
        wgmma_commit_group();
        // Nothing of this warp overlaps its product: the next row's 36 sums, 12 totals and 12 loaded values would make 156
        // live floats. The other two consumer warps of its scheduler can sum boxes meanwhile.
        wgmma_wait_group<0>();
    }

    // d becomes the sigmoids. The lane has columns 8 * i + 2 * q and the next one: outputs, and their biases.
    DEVICE void sigmoids(float (&d)[32], uint32_t biases) const {
        UNROLL for (int i = 0; i < 8; ++i) {
            const float2 bias = ld_shared_v2_f32(biases + 8 * q + 32 * i);
            UNROLL for (int k = 0; k < 4; ++k)
                d[4 * i + k] = rcp_approx(1 + ex2_approx(d[4 * i + k] * (EXACT ? FACTOR : 1) + (k % 2 ? bias.y : bias.x)));
        }
    }
};

// ---- the kernel: producer and consumers
// The producer asks TMA for the rows of both halves in the order in which they are consumed. A fresh mbarrier counts its
// previous phase, of parity 1, as complete, so the first pass over the stages does not wait.
__device__ void produce(const CUtensorMap& x, const Shape& shape, uint32_t data, uint32_t barriers) {
    Pipeline pipelines[ROW_HALVES] = {{data, barriers, 0}, {data, barriers, 1}};
    for (Scheduler scheduler{shape}; scheduler.has_next();) {
        const Segment segment = scheduler.next();
        const int rows = segment.steps() * POOL_H + OVERLAP;
        for (int row = 0; row < rows; row += STAGE_ROWS)
            UNROLL for (int row_half = 0; row_half < ROW_HALVES; ++row_half) {
                Pipeline& pipeline = pipelines[row_half];
                mbarrier_try_wait(pipeline.empty_barrier(), pipeline.parity ^ 1);
                mbarrier_arrive_expect_tx(pipeline.full_barrier(), STAGE_BYTES);
                const bool needed = segment.rows(row_half) && row < segment.rows(row_half) * POOL_H + OVERLAP;
                // A half without this row gets zeros (TMA reads nothing below the image): warpgroup 1 has warps of both halves.
                const int y = needed ? segment.first_row(row_half) * POOL_H + row : shape.height;
                const int line = segment.tile * TILE_POSITIONS * POOL_W / LINE_ELEMENTS;
                tma_load_5d(pipeline.address(), x, 0, line, 0, y, segment.sample, pipeline.full_barrier());
                pipeline.advance();
            }
    }
}

__global__ void __launch_bounds__(THREADS, 1)
    conv_pool_sum(const __grid_constant__ CUtensorMap x, const Shape shape, const Element* weight, const Element* bias,
                  void* sums, bool as_floats) {
    extern __shared__ __align__(1024) char memory[];
    float* const biases = reinterpret_cast<float*>(memory + REST_AT);
    float* const warp_sums = biases + OUTPUTS;
    const uint32_t data = shared_address(memory), barriers = shared_address(warp_sums + WARP_SUMS);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    griddepcontrol_launch_dependents();  // add_segments may start
    if (threadIdx.x == 0) Pipeline::init(barriers), fence_mbarrier_init();
    __syncthreads();
    if (warp >= CONSUMER_WARPS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) produce(x, shape, data, barriers);
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    Consumer::store_weights(weight, memory + WEIGHTS_AT);
    for (int o = threadIdx.x; o < OUTPUTS; o += CONSUMERS)  // the sigmoid of an output that does not exist is zero
        biases[o] = o < OUT_CHANNELS ? MINUS_LOG2_E * to_float(bias[o]) : INFINITY;
    fence_proxy_async();
    bar_sync(ALL_CONSUMERS, CONSUMERS);

    Consumer consumer(data, barriers, warp);
    for (Scheduler scheduler{shape}; scheduler.has_next();) {
        const Segment segment = scheduler.next();
        const int rows = segment.rows(consumer.row_half), columns = shape.columns - segment.tile * TILE_POSITIONS;
        const bool whole = (consumer.warp + 1) * WARP_POSITIONS <= columns;  // no position of the warp is beyond the image
        const bool inside[2] = {consumer.position(0) < columns, consumer.position(1) < columns};
        float total = 0;
        consumer.overlap_rows();  // those above the first fresh ones
        UNROLL_1 for (int step = 0; step < segment.steps(); ++step) {
            consumer.fresh_rows();
            consumer.overlap_rows();
            float d[32];
            consumer.multiply(d, data + WEIGHTS_AT, whole, inside);
            consumer.sigmoids(d, shared_address(biases));
            if (!whole || step >= rows)  // half 1 may have a row less than half 0: its last sums are then of zeros
                UNROLL for (int i = 0; i < 32; ++i) d[i] = step < rows && inside[i / 2 % 2] ? d[i] : 0;
            UNROLL for (int i = 0; i < 32; ++i) total += d[i];
        }
        bar_sync(ALL_CONSUMERS, CONSUMERS);  // the last segment's sums have been read
        total = warp_sum(total);
        if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = total;
        bar_sync(ALL_CONSUMERS, CONSUMERS);
        if (threadIdx.x == 0) {
            float sum = 0;
            UNROLL for (int i = 0; i < CONSUMER_WARPS; ++i) sum += warp_sums[i];
            store_sum(sums, as_floats, segment.slot, sum);
        }
    }
}

// ---- sums over segments
// out[sample] = the sum of its segments' sums, by a warp. Launched early, it divides integers while the partial sums are being
// written, then waits for them. They are not __restrict__: the compiler might take them for constants and load them before.
__global__ void add_segments(const float* partial_sums, void* out, bool as_floats, const Shape s) {
    const int64_t sample = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / 32;
    if (sample >= s.batch) return;
    const bool cut = blocks_share_tiles(s);
    const auto block_of = [&](int64_t work_row) {  // the last one whose first_work_row is <= work_row
        return static_cast<int>(((work_row + 1) * s.blocks - 1) / (sample_tiles(s) * s.rows));
    };
    float sum = 0;
    for (int64_t tile = sample * s.tiles; tile < (sample + 1) * s.tiles; ++tile) {
        const int64_t first = tile + (cut ? block_of(tile * s.rows) : 0);
        const int64_t last = tile + (cut ? block_of((tile + 1) * s.rows - 1) : 0);
        griddepcontrol_wait();
        for (int64_t slot = first + threadIdx.x % 32; slot <= last; slot += 32) sum += partial_sums[slot];
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) store_sum(out, as_floats, sample, sum);
}

// ---- launches
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

// A tensor map of x as lines of 128 bytes; those of a row and channel are neighbours in shared memory. The driver needs a
// context in this thread: a call of the runtime must come first.
static cudaError_t make_tensor_map(const Element* x, const Shape& s, CUtensorMap* map) {
    static const Encode encode = find_encode();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t width = s.width, height = s.height, plane = width * height * sizeof(Element);
    const cuuint64_t sizes[5] = {LINE_ELEMENTS, width / LINE_ELEMENTS, IN_CHANNELS, height, static_cast<cuuint64_t>(s.batch)};
    const cuuint64_t strides[4] = {LINE, plane, width * sizeof(Element), plane * IN_CHANNELS};
    const cuuint32_t box[5] = {LINE_ELEMENTS, LINES, CHANNELS, STAGE_ROWS, 1}, steps[5] = {1, 1, 1, 1, 1};
    const auto type = std::is_same_v<Element, float> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return encode(map, type, 5, const_cast<Element*>(x), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// out: floats, or Elements. scratch: as many floats as there are sample tiles and SMs together, not used where each sample is
// one segment.
extern "C" int launch_conv_pool_sum(const Element* x, const Element* weight, const Element* bias, float* scratch, void* out,
                                    int64_t floats_out, int64_t batch, int64_t height, int64_t width, cudaStream_t stream) {
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
    const bool split = s.tiles > 1 || blocks_share_tiles(s);  // a sample has several segments
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(conv_pool_sum, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (error == cudaSuccess) error = make_tensor_map(x, s, &map);
    if (error != cudaSuccess) return error;
    void* const sums = split ? scratch : out;
    conv_pool_sum<<<s.blocks, THREADS, SHARED_BYTES, stream>>>(map, s, weight, bias, sums, split || floats_out);
    if (split) {
        cudaLaunchAttribute early = {cudaLaunchAttributeProgrammaticStreamSerialization};
        early.val.programmaticStreamSerializationAllowed = 1;
        const cudaLaunchConfig_t config = {dim3(ceil_div(s.batch, 4)), dim3(128), 0, stream, &early, 1};
        error = cudaLaunchKernelEx(&config, add_segments, static_cast<const float*>(scratch), out, floats_out != 0, s);
    }
    return error == cudaSuccess ? cudaGetLastError() : error;
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
SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int[2] pool, ScalarType? dtype=None) -> Tensor"

HOPPER = "-gencode=arch=compute_90a,code=sm_90a"  # load_inline would build for 9.0, which lacks wgmma
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}  # what C++ calls them
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


def original(x, weight, bias, pool, dtype=None):
    pooled = nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)
    return torch.sigmoid(pooled).sum(dim=(1, 2, 3), dtype=dtype)


def conv_pool_sum(x, weight, bias, pool, dtype=None, kernels=kernels, original=original):
    """Return (batch,) of x (batch, in_channels, height, width), of x's type or float32, `dtype`.

    Raises RuntimeError for what the kernel does not take.
    """
    batch, *_, height, width = x.shape
    (out_channels, in_channels, kernel_h, kernel_w), (pool_h, pool_w) = weight.shape, pool
    if x.dtype not in ELEMENTS or dtype not in (None, x.dtype, torch.float32):
        raise RuntimeError(f"expected x as float32, float16 or bfloat16, out as x or float32; got {x.dtype}, {dtype}")
    check("x", x, (batch, in_channels, height, width), x.device, x.dtype)
    check("weight", weight, weight.shape, x.device, x.dtype)
    check("bias", bias, (out_channels,), x.device, x.dtype)
    if min(pool) < 1 or height < kernel_h + pool_h - 1 or width < kernel_w + pool_w - 1:
        fits = f"room for a window of {[*pool]} behind a kernel of {[kernel_h, kernel_w]}"
        raise RuntimeError(f"expected {fits}; got an image of {height} x {width}")
    if batch * height >= 2**31 or x.numel() >= 2**39:
        raise RuntimeError(f"expected batch * height < 2^31 and fewer than 2^39 elements; got x of shape {[*x.shape]}")
    if x.is_cuda and capability(x.device)[0] != 9:
        raise RuntimeError("expected a GPU of compute capability 9 (Hopper); v4_tensor_core runs on 8.0 and later")
    channels, pools = {"IN_CHANNELS": in_channels, "OUT_CHANNELS": out_channels}, {"POOL_H": pool_h, "POOL_W": pool_w}
    strict = x.dtype == torch.float32 and is_strict() and not torch.is_autocast_enabled(DEVICE)  # which permits less than TF32
    build = {"ELEMENT": ELEMENTS[x.dtype], "STRICT": int(strict)}
    library = kernels(HOPPER, **channels, KERNEL_H=kernel_h, KERNEL_W=kernel_w, **pools, **build)
    if not library.is_served(ctypes.c_int64(width)):
        warnings.warn(
            "PyTorch computes what these kernels do not take: widths of 32 * n (16-bit: 64 * n), at most 8 channels in and "
            "64 out, 9 taps, windows of an even width up to 8 and 16 pixels, kernels up to one wider than the window",
            stacklevel=2,
        )
        return original(*(each.to(dtype) for each in (x, weight, bias)), pool)  # in float32 where the sum is
    x, weight, bias, out = x.contiguous(), weight.contiguous(), bias.contiguous(), x.new_empty(batch, dtype=dtype)
    if batch:
        x = x.clone() if x.data_ptr() % 16 else x  # TMA reads 16 bytes at a time
        # A float for each tile and each block; no GPU has 1024 SMs.
        scratch = x.new_empty(batch * (width // (96 * pool_w) + 1) + 1024, dtype=torch.float32)
        is_float = int(out.dtype == torch.float32)
        launch(library.launch_conv_pool_sum, x, weight, bias, scratch, out, is_float, batch, height, width)
    return out


operator = torch.library.custom_op(f"{NAME}::forward", conv_pool_sum, mutates_args=(), device_types=DEVICE, schema=SCHEMA)
operator.register_fake(original)


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, with the 4.8 GB that the forward pass avoids."""
    return *torch.func.vjp(lambda *tensors: original(*tensors, *ctx.others), *ctx.saved_tensors)[1](grad), None, None


def setup_context(ctx, inputs, output):
    *tensors, pool, dtype = inputs
    ctx.others = pool, dtype
    ctx.save_for_backward(*tensors)


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


def call(x, weight, bias, pool, dtype=None, function=conv_pool_sum, direct=Direct):
    """Call the operator or, in eager mode, its function. Autocast: 16-bit x and the weights get its type, float32 stays."""
    is_cast = torch.is_autocast_enabled(DEVICE) and x.dtype in (torch.float16, torch.bfloat16)
    if is_cast:
        x, weight, bias = (each.to(torch.get_autocast_dtype(DEVICE)) for each in (x, weight, bias))
        dtype = torch.float32 if DEVICE == "cuda" else None  # as autocast's sums there
    operands = x, weight, bias, pool, dtype
    with torch.autocast(DEVICE, enabled=False) if is_cast else contextlib.nullcontext():
        if not is_direct(*operands):
            return torch.ops.conv_pool_sigmoid_sum_v5_hopper.forward(*operands)
        return (direct.apply if torch.is_grad_enabled() else function)(*operands)


class ModelNew(nn.Module):
    operator = staticmethod(call)
    out_dtype = None  # torch.float32: the sum is not rounded to x's type

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = (pool_kernel_size,) * 2 if isinstance(pool_kernel_size, int) else pool_kernel_size

    def forward(self, x):
        return self.operator(x, self.conv.weight, self.conv.bias, self.pool, self.out_dtype)


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
