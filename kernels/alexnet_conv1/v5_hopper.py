"""alexnet_conv1, v5: implicit GEMM by Hopper's wgmma, on rows of scaled fp16 in shared memory.

Warp-specialized, persistent kernels: producer warpgroups load, scale and convert into a multistage pipeline, consumer
warpgroups multiply. PyTorch's precision setting is obeyed: TF32's precision where it permits that, else fp32's.

Why it is faster
    v4's operands reach mma.sync through registers, by ldmatrix, at 622 of wgmma's 767 TFLOP/s. wgmma reads both operands from
    shared memory, and one instruction multiplies 64 positions x 96 outputs. Four columns of two rows of x are 16 bytes of fp16,
    and neighbouring outputs, at stride 4, read neighbouring pieces: so rows of x are wgmma's operand as they are, and a tap is
    an address in a descriptor. Two consumer warpgroups have a tile each, so that one writes while the other multiplies; each
    has a producer warpgroup of its own. It is issue bound: by the instructions around products and copies.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*4 - pad_w + v]
    grad_weight[o,c,u,v] = sum over b,i,j of grad[b,o,i,j] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    Taps are taken in units of 2 rows and 4 columns, 11 x 11 as 12 x 12, where weights are zero. Each tile of x and each output
    channel's weights are scaled by a power of two. So x is off by at most 2^-11 of itself, as in TF32, or by 2^-35 of the
    tile's largest, whichever is more; weights by 2^-38 of the channel's largest, unless that is below 2^-48. Scaled products
    add up to less than 2^38, so fp32 holds them. The gradient takes TF32 values, unscaled; grad is that of out.
    Strict (3xTF32's scheme): operands are two values each, high and low, which leaves 2^-22; the product is low * high + high *
    low + high * high. The tensor core cuts off what a sum does not hold, so strict sums begin again with each channel or row.
    NaN and infinities count in no scale. A tile that reads one is computed in plain fp32, and so are those between two such:
    zero weights would spread it. An infinite weight gives NaN in strict sums.

Launches
    kernel           grid                        block  shared, KiB work, at the original's size (in brackets: strict)
    pack_weights     output channels             128    0           a block a channel: its scale, and fp16 weights
    convolve         SMs                         512    219 (218)   a warpgroup: tiles of 192 positions x 96 (48) outputs
    weight_gradient  SMs                         512    206 (207)   a warpgroup: 192 taps x 96 (48) outputs
    add_splits       sums of a block / 128       256    4           a block: 128 sums over all splits of the batch
    plain_*          outputs / 256, weights / 8  256    0           what the others do not take

Floor
    Forward, x (256, 3, 224, 224), 96 outputs of 11 x 11 taps at stride 4: 154 MB in and 297 MB out take an H200 0.104 ms at the
    4.34 TB/s that the run measured (data sheet: 4.8). 2 * 256 * 96 * 55^2 * 363 = 54 GFLOP take 0.070 ms at the 767 TFLOP/s of
    large fp16 products. With padding, wgmma's own cycles are 0.073 (strict: 0.219), those of shared memory 0.100 (0.31).

Takes
    float32 CUDA tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size (below 2^30 rows and columns), bias or none; compute capability 9.0. Forward, the fast path serves a
    stride of 4 across and an even one down where weights for 48 outputs and two stages fit into shared memory (make_plan): with
    3 channels, kernels up to 20 x 20. The gradient's serves any stride, and kernels of at most 384 taps whose rows fit twice
    (GRADIENT_FITS). Others go through plain fp32 kernels, right, but slow: v3_tiled serves them better. Dilation, groups and
    other padding modes raise, as does anything else. Trains, and computes only the gradients that are asked for; the input's is
    PyTorch's own. Second and forward-mode derivatives raise. Deterministic; the number of SMs sets the order of additions.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v5_hopper"

INTERFACE = r"""
// Both sources begin with this. Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W.
#include <cuda_runtime.h>
#include <cstdint>

constexpr int TAPS = KERNEL_H * KERNEL_W, PLAIN_THREADS = 256;  // of a block of a plain kernel
constexpr int64_t WEIGHTS = static_cast<int64_t>(OUT_CHANNELS) * IN_CHANNELS * TAPS;

struct Problem {
    const float *x, *weight;
    int64_t batch;
    int height, width, out_h, out_w;
    bool strict;  // TF32 is forbidden
    cudaStream_t stream;
};

// The floats that the kernels of a pass hand on to each other: packed weights, and the splits' terms of gradients. 0 where the
// fast path does not take the problem and a plain kernel runs: make_plan and GRADIENT_FITS decide.
int64_t packed_floats(const Problem&);
int64_t gradient_floats(const Problem&);

// out (batch, OUT_CHANNELS, out_h, out_w). bias, grad_weight and grad_bias may be null.
cudaError_t launch_convolve(const Problem&, const float* bias, float* packed, float* out);
cudaError_t launch_parameter_gradients(const Problem&, const float* grad, float* terms, float* grad_weight, float* grad_bias);
"""

CUDA = r"""
#include <cuda_fp16.h>
#include <cmath>
#include <initializer_list>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
template <class T>
__host__ DEVICE T larger(T a, T b) { return a > b ? a : b; }

// ---- constants and layout
// A unit is 16 bytes of fp16: 4 columns of 2 rows of x, in the order shown. Neighbouring output positions, at stride 4, read
// neighbouring units. So the units of 8 positions are a core matrix of wgmma's operand, and another tap is another address.
// Pairs of rows are sorted by their remainder modulo PHASES into planes: within a plane the next output row reads the next row.
//
//     a unit:    row 2r      | 0  1 | 4  5 |        a plane, `pitch` units wide, at stride 4:
//                row 2r + 1  | 2  3 | 6  7 |            | row pair 0 (or 1)  | row pair 2 (or 3)  | row pair 4 (or 5) | ..
//
// What a block of convolve keeps in shared memory, in bytes, at the original's size; strict: the same with 48 outputs.
//
//     0                  82,944                185,088                   222,720                                  223,816
//     | weights          | stages              | staging                 | scales, biases, StageInfo, largest,    |
//     | [high, low]      | [consumer][4 (2)]   | [consumer][3]           | mbarriers: weights, then [consumer]    |
//     | [channel][unit]  | [high, low][plane]  | [8 channels][196        | [full, empty][4 (2)]                   |
//     | [output] 16 B    | [row][unit] 16 B    | floats]                 |                                        |
constexpr int WARP = 32, WARPGROUP = 128, MAX_SHARED_BYTES = 227 * 1024;
constexpr bool FITS_UNITS = STRIDE_W == 4 && STRIDE_H % 2 == 0;
constexpr int UNIT_BYTES = 16, QUADS = ceil_div(KERNEL_W, 4);  // QUADS: units across the kernel
constexpr int PHASES = ceil_div(STRIDE_H, 2), TAP_PAIRS = ceil_div(KERNEL_H, 2);
constexpr int PLANES = smaller(PHASES, TAP_PAIRS), TAP_ROWS = ceil_div(TAP_PAIRS, PHASES);
// A position reads UNITS of a channel: [plane][row][quad]. A step is the inner size of one wgmma, two of them.
constexpr int UNITS = PLANES * TAP_ROWS * QUADS, STEPS = ceil_div(UNITS, 2);
[[maybe_unused]] constexpr int UNROLLED_STEPS = STEPS <= 16 ? STEPS : 1;

// Each consumer warpgroup has M_TILES x 64 positions at a time, and a producer warpgroup of its own.
constexpr int CONSUMERS = 2, FORWARD_THREADS = 2 * CONSUMERS * WARPGROUP;
constexpr int M_TILES = 3, POSITIONS = 64 * M_TILES;
constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 184;  // launched with 128; 256 x 72 + 256 x 184 = all 65,536
constexpr int MOST_OUTS = 96, FEW_OUTS = 48;                      // of a block; strict: FEW_OUTS, whose weights have two parts
constexpr int STAGING_BUFFERS = 3, STAGING_ROW = POSITIONS + 4, STAGING = 8 * STAGING_ROW;  // floats: 8 channels
__host__ __device__ constexpr int64_t weight_units(int outs) { return static_cast<int64_t>(IN_CHANNELS) * STEPS * 2 * outs; }

// ---- PTX
DEVICE uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }
DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void bar_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }
DEVICE void cp_async_bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void cp_async_bulk_store(float* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
DEVICE void cp_async_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void cp_async_bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
template <int PENDING>
DEVICE void cp_async_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
template <int REGISTERS>
DEVICE void warpgroup_reg_dealloc() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void warpgroup_reg_alloc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
DEVICE float ld_shared(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
DEVICE void st_shared(uint32_t address, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory"); }
DEVICE void st_shared_v2_if(bool exists, uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("{\n.reg .pred exists;\nsetp.ne.u32 exists, %3, 0;\n@exists st.shared.v2.u32 [%0], {%1, %2};\n}"
                 ::"r"(address), "r"(a), "r"(b), "r"(static_cast<uint32_t>(exists)) : "memory");
}
DEVICE float cvt_rna_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// d (64 x N) = a * b, or += where `accumulate` is not 0; N is 96 or 48. A warp has 16 rows of d. With g = lane / 4 and
// t = lane % 4 a lane has columns 8j + 2t and 8j + 2t + 1 of row g, then of row g + 8, for each j.
#define D24 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define D48 D24 ", %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
                "%45, %46, %47"
#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
// a (64 x 16) and b (16 x N): fp16 in shared memory, given by their descriptors.
DEVICE void wgmma_m64nNk16_f16(float(&d)[48], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" D48 "}, %48, %49, accumulate, 1, 1, 0, 0;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40)
                 : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_m64nNk16_f16(float(&d)[24], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %26, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {" D24 "}, %24, %25, accumulate, 1, 1, 0, 0;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16) : "l"(a), "l"(b), "r"(accumulate));
}
// a (64 x 8): TF32 in registers, rows g and g + 8 of column t, then of column t + 4; b (8 x N): TF32 in shared memory.
DEVICE void wgmma_m64nNk8_tf32(float(&d)[48], const float(&a)[4], uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %53, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k8.f32.tf32.tf32 {" D48 "}, {%48, %49, %50, %51}, %52, "
                 "accumulate, 1, 1;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32), EIGHT(d, 40)
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_m64nNk8_tf32(float(&d)[24], const float(&a)[4], uint64_t b, int accumulate) {
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %29, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n48k8.f32.tf32.tf32 {" D24 "}, {%24, %25, %26, %27}, %28, "
                 "accumulate, 1, 1;\n}"
                 : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16)
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "l"(b), "r"(accumulate));
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
// What rounding to fp16 leaves of x; nothing of an infinity.
DEVICE float fp16_rest(float x) { return fabsf(x) == INFINITY ? 0 : x - __half2float(__float2half_rn(x)); }
DEVICE float finite_or_zero(float x) { return fabsf(x) < INFINITY ? x : 0; }
DEVICE float power_of_2(int exponent) { return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23); }
// The exponent of the power of two that brings `largest` below 2^target, and not below half of that unless it is tiny.
DEVICE int scale_exponent(float largest, int target) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 126;  // largest < 2^exponent
    return smaller(target - exponent, 126);
}

// ==== forward: implicit GEMM, positions x taps times taps x outputs
// A line is output positions that are contiguous in memory: a channel's whole plane, or a row of it where the image is so wide
// that a stage would be too large. A tile is at most POSITIONS of a line. Neighbouring tiles overlap by OVERLAP positions, so
// that each channel's part of the output can begin 16-byte aligned. A stage holds a channel's rows for a tile: `rows` rows of
// each plane, `pitch` units in each, of which `columns` begin at a position.
constexpr int OVERLAP = 3;

struct Shape {
    int64_t batch;
    int height, width, out_h, out_w;
    int runs;     // of an output row: see the gradient
    bool paired;  // rows of x begin at multiples of 8 bytes, and so do pairs of columns that exist

    DEVICE int64_t plane() const { return static_cast<int64_t>(height) * width; }
    DEVICE int64_t out_plane() const { return static_cast<int64_t>(out_h) * out_w; }
    __host__ DEVICE int64_t row_runs() const { return batch * runs * out_h; }
};

struct Plan {
    bool by_rows;                            // lines are rows
    int positions, columns, pitch, rows;     // positions: of a tile, those between columns included
    int lines, step, outs, stages, blocks;   // lines: of a sample; step: from tile to tile; blocks: of a group of outputs
    int64_t line, tiles_of_line, all_tiles;  // line: its positions

    __host__ DEVICE int stage_bytes(bool strict) const { return (strict ? 2 : 1) * PLANES * rows * pitch * UNIT_BYTES; }
    __host__ DEVICE int groups() const { return ceil_div(OUT_CHANNELS, outs); }
};

// The static tile scheduler: blocks and their consumers take tiles in turn. `ordinal` counts a consumer's own.
DEVICE int64_t tile_number(const Plan& plan, int ordinal, int consumer) {
    return blockIdx.x / plan.groups() + (static_cast<int64_t>(ordinal) * CONSUMERS + consumer) * plan.blocks;
}

struct Tile {
    int64_t sample, line, begin, end;  // positions: of the line in its plane, of the tile in its line
    int row, left, column;             // of the output: the stage's first; and the first position's column in the stage
    bool is_first, is_last;            // of its line

    DEVICE void set(const Shape& shape, const Plan& plan, int64_t number) {
        const int64_t line_number = number / plan.tiles_of_line, of_line = number - line_number * plan.tiles_of_line;
        sample = line_number / plan.lines;
        begin = of_line * plan.step;
        is_first = of_line == 0, is_last = of_line + 1 == plan.tiles_of_line;
        end = is_last ? plan.line : begin + plan.step;
        if (plan.by_rows) {
            row = static_cast<int>(line_number - sample * plan.lines), left = static_cast<int>(begin), column = 0;
            line = static_cast<int64_t>(row) * shape.out_w;
        } else {
            row = static_cast<int>(begin / shape.out_w), left = 0;
            column = static_cast<int>(begin - static_cast<int64_t>(row) * shape.out_w);
            line = 0;
        }
    }
    // Rows of each plane that the products read.
    DEVICE int rows(const Plan& plan) const { return (column + plan.positions - 1 + QUADS - 1) / plan.pitch + TAP_ROWS; }
};

// What a consumer has to know of a stage.
struct StageInfo {
    int exponent;           // x was scaled by 2^exponent
    int is_first, is_last;  // channel of an attempt at the tile: the first one drops the sums of the attempt before
    int plain;              // the tile reads a NaN or an infinity: its outputs are computed without the tensor core
};

// Offsets of what a block keeps in shared memory; see the diagram above.
struct SharedLayout {
    int weights, stages, staging, scales, infos, largest, barriers;
    int64_t bytes;

    __host__ DEVICE SharedLayout(const Plan& plan, bool strict) {
        const int64_t weight_bytes = (strict ? 2 : 1) * weight_units(plan.outs) * UNIT_BYTES;
        const int64_t stage_bytes = static_cast<int64_t>(CONSUMERS) * plan.stages * plan.stage_bytes(strict);
        const int64_t staging_bytes = CONSUMERS * STAGING_BUFFERS * STAGING * 4;
        weights = 0, stages = weight_bytes, staging = weight_bytes + stage_bytes;
        scales = weight_bytes + stage_bytes + staging_bytes;
        infos = scales + 2 * plan.outs * 4;
        largest = infos + CONSUMERS * plan.stages * static_cast<int>(sizeof(StageInfo));
        barriers = largest + CONSUMERS * 2 * (WARPGROUP / WARP) * 4;
        bytes = weight_bytes + stage_bytes + staging_bytes + (barriers - scales) + (2 * CONSUMERS * plan.stages + 1) * 8;
    }
};

// Where a warpgroup is in its pipeline: a stage, and the parity of the phase that its mbarriers are in.
struct PipelineState {
    int stage = 0;
    uint32_t parity = 0;

    DEVICE void advance(int stages) { if (++stage == stages) stage = 0, parity ^= 1; }
};

// The pipeline of one consumer and its producer. A producer waits until a stage is empty, fills it and arrives at its full
// mbarrier; a consumer the other way round. Each lane arrives for itself.
struct Pipeline {
    uint32_t data, barriers;  // shared addresses; barriers: full, then empty
    StageInfo* infos;
    int stage_bytes, stages;

    DEVICE Pipeline(char* memory, const SharedLayout& layout, const Plan& plan, bool strict, int consumer) {
        stage_bytes = plan.stage_bytes(strict), stages = plan.stages;
        data = shared_address(memory + layout.stages) + consumer * stages * stage_bytes;
        infos = reinterpret_cast<StageInfo*>(memory + layout.infos) + consumer * stages;
        barriers = shared_address(memory + layout.barriers) + 8 + consumer * stages * 16;
    }
    DEVICE uint32_t address(const PipelineState& at) const { return data + at.stage * stage_bytes; }
    DEVICE uint32_t full(int stage) const { return barriers + stage * 8; }
    DEVICE uint32_t empty(int stage) const { return barriers + (stages + stage) * 8; }
    DEVICE void consumer_wait(const PipelineState& at) const { mbarrier_wait(full(at.stage), at.parity); }
    DEVICE void consumer_release(const PipelineState& at) const { mbarrier_arrive(empty(at.stage)); }
    DEVICE void producer_acquire(const PipelineState& at) const { mbarrier_wait(empty(at.stage), at.parity ^ 1); }
    DEVICE void producer_commit(const PipelineState& at) const { mbarrier_arrive(full(at.stage)); }
};

// ---- weights as right operands: [group of outputs][high, low][channel][unit][output], 16 bytes each; then what undoes their
// scales. A block an output channel: it finds the largest weight, and scales, converts and packs.
constexpr int WEIGHT_TARGET = 14, MOST_WEIGHT_EXPONENT = 62;  // so that the product of two scales can be undone

// A unit's number among those that a position reads, and element e of it as the tap (u, v).
struct Unit {
    int number;
    DEVICE int plane() const { return number / (QUADS * TAP_ROWS); }
    DEVICE int row() const { return number / QUADS % TAP_ROWS; }
    DEVICE int quad() const { return number % QUADS; }
    DEVICE int u(int e) const { return 2 * (row() * PHASES + plane()) + e / 2 % 2; }
    DEVICE int v(int e) const { return quad() * 4 + e / 4 * 2 + e % 2; }
};

__global__ void __launch_bounds__(WARPGROUP)
    pack_weights(const float* __restrict__ weight, uint4* __restrict__ packed, int outs, bool strict) {
    __shared__ uint32_t warp_largest[WARPGROUP / WARP];
    const int o = blockIdx.x, group = o / outs, groups = ceil_div(OUT_CHANNELS, outs);
    const float* const mine = weight + static_cast<int64_t>(o) * IN_CHANNELS * TAPS;
    uint32_t largest = 0;
    if (o < OUT_CHANNELS)
        for (int i = threadIdx.x; i < IN_CHANNELS * TAPS; i += WARPGROUP)
            largest = larger(largest, __float_as_uint(finite_or_zero(fabsf(mine[i]))));
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
#pragma unroll 8
        for (int e = 0; e < 8; ++e) {
            const int u = unit.u(e), v = unit.v(e);
            const bool exists = o < OUT_CHANNELS && unit.number < UNITS && u < KERNEL_H && v < KERNEL_W;
            w[e] = exists ? mine[channel * TAPS + u * KERNEL_W + v] * power_of_2(exponent) : 0;
        }
        uint4* const to = packed + group * (strict ? 2 : 1) * part + static_cast<int64_t>(i) * outs + o % outs;
        to[0] = make_uint4(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]), fp16_pair(w[4], w[5]), fp16_pair(w[6], w[7]));
        if (!strict) continue;
        UNROLL for (int e = 0; e < 8; ++e) w[e] = fp16_rest(w[e]);
        to[part] = make_uint4(fp16_pair(w[0], w[1]), fp16_pair(w[2], w[3]), fp16_pair(w[4], w[5]), fp16_pair(w[6], w[7]));
    }
    float* const unscales = reinterpret_cast<float*>(packed + groups * (strict ? 2 : 1) * part);
    if (threadIdx.x == 0) unscales[o] = power_of_2(-exponent);
}

// ---- the producer warpgroups: from device memory through registers to a stage
// A batch is in registers while the one before it is being stored: 8 row pairs x 128 column pairs, of which a warp has every
// fourth row pair. fp16 has TF32's 11 bits, but not its range: so a tile's values are scaled by a power of two. It is taken
// from the tile's first batch that is not all zeros, with room for values 31 times as large. Where a later batch needs more,
// the tile begins again, with the power that this batch calls for.
constexpr int PRODUCER_WARPS = WARPGROUP / WARP, BATCH_PAIRS = 2, BATCH_PASSES = 4;
constexpr int FIRST_TARGET = 11, NO_EXPONENT = 1000;
using Batch = float2[BATCH_PAIRS][BATCH_PASSES][2];  // [row pair][column pair][row]: two columns

// Where a producer is: a tile, a channel of it, and the first row pair and column pair of a batch.
struct Cursor {
    const float* sample;           // of x
    int row, left, row_pairs;      // as the tile has them; row pairs that its products read
    int ordinal;                   // of the tile among the producer's own
    int channel, row_pair, column_pair;

    // False where there is no such tile.
    DEVICE bool begin_tile(const float* x, const Shape& shape, const Plan& plan, int64_t number) {
        if (number >= plan.all_tiles) return false;
        Tile tile;
        tile.set(shape, plan, number);
        sample = x + tile.sample * IN_CHANNELS * shape.plane();
        row = tile.row, left = tile.left, row_pairs = tile.rows(plan) * PLANES;
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

// The first row of a pair: pairs of one row of all planes come before those of the next.
DEVICE int row_of_pair(int pair) { return PLANES == PHASES ? 2 * pair : pair / PLANES * STRIDE_H + 2 * (pair % PLANES); }

// PAIRED: rows of x begin at multiples of 8 bytes, and pairs of columns exist as a whole or not at all. Loads are coalesced.
template <bool PAIRED>
DEVICE void load_batch(const Shape& shape, const Plan& plan, const Cursor& at, Batch& values) {
    const int warp = threadIdx.x / WARP % PRODUCER_WARPS, lane = threadIdx.x % WARP;
    const int first_pair = at.column_pair + lane, w = at.left * STRIDE_W - PAD_W + 2 * first_pair;
    bool left_exists[BATCH_PASSES], right_exists[BATCH_PASSES];  // of a pair of columns
    UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
        const bool in_stage = first_pair + WARP * k < 2 * plan.pitch;
        const unsigned column = w + 2 * WARP * k, width = shape.width;  // less than 0 is very large
        left_exists[k] = in_stage && column < width;
        right_exists[k] = PAIRED ? left_exists[k] : in_stage && column + 1 < width;
    }
    const float* const plane = at.sample + at.channel * shape.plane() + w;
    const int top = at.row * STRIDE_H - PAD_H;
    UNROLL for (int i = 0; i < BATCH_PAIRS; ++i) {
        const int pair = at.row_pair + i * PRODUCER_WARPS + warp, h = top + row_of_pair(pair);
        const float* row = plane + static_cast<int64_t>(h) * shape.width;
        UNROLL for (int r = 0; r < 2; ++r, row += shape.width) {
            const bool row_exists = pair < at.row_pairs && static_cast<unsigned>(h + r) < static_cast<unsigned>(shape.height);
            UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
                float2& v = values[i][k][r];
                v = make_float2(0, 0);
                if constexpr (PAIRED) {
                    if (row_exists && left_exists[k]) v = __ldg(reinterpret_cast<const float2*>(row + 2 * WARP * k));
                } else {
                    if (row_exists && left_exists[k]) v.x = __ldg(row + 2 * WARP * k);
                    if (row_exists && right_exists[k]) v.y = __ldg(row + 2 * WARP * k + 1);
                }
            }
        }
    }
}

// The bits of the largest magnitude in the batch of all four warps. One barrier is enough, since calls alternate two slots.
DEVICE uint32_t largest_of_batch(const Batch& values, uint32_t* warp_largest, int slot, int barrier) {
    int largest_positive = 0;  // numbers of one sign are ordered as their bits are
    uint32_t largest_negative = 0;
    UNROLL for (int i = 0; i < BATCH_PAIRS * BATCH_PASSES * 2; ++i) {
        const int row_pair = i / (2 * BATCH_PASSES), column_pair = i / 2 % BATCH_PASSES, row = i % 2;
        const float2 v = values[row_pair][column_pair][row];
        const uint32_t x = __float_as_uint(v.x), y = __float_as_uint(v.y);
        largest_positive = larger(largest_positive, larger(static_cast<int>(x), static_cast<int>(y)));
        largest_negative = larger(largest_negative, larger(x, y));
    }
    uint32_t largest = larger(static_cast<uint32_t>(largest_positive), largest_negative & 0x7fffffffu);
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) warp_largest[slot * PRODUCER_WARPS + threadIdx.x / WARP % PRODUCER_WARPS] = largest;
    bar_sync(barrier, WARPGROUP);
    UNROLL for (int warp = 0; warp < PRODUCER_WARPS; ++warp)
        largest = larger(largest, warp_largest[slot * PRODUCER_WARPS + warp]);
    return largest;
}

// Stores half a unit, two columns of two rows, for each row pair and column pair; strict: the low parts, too.
template <bool STRICT>
DEVICE void store_batch(uint32_t stage, const Plan& plan, const Cursor& at, float scale, const Batch& values) {
    constexpr int PAIR_BYTES = UNIT_BYTES / 2;
    const int warp = threadIdx.x / WARP % PRODUCER_WARPS, lane = threadIdx.x % WARP;
    const int first_pair = at.column_pair + lane;
    UNROLL for (int i = 0; i < BATCH_PAIRS; ++i) {
        const int pair = at.row_pair + i * PRODUCER_WARPS + warp;
        const int row = pair % PLANES * plan.rows + pair / PLANES;  // of all planes
        const uint32_t to = stage + row * plan.pitch * UNIT_BYTES + first_pair * PAIR_BYTES;
        UNROLL for (int k = 0; k < BATCH_PASSES; ++k) {
            const bool exists = pair < at.row_pairs && first_pair + WARP * k < 2 * plan.pitch;
            float v[4];
            UNROLL for (int r = 0; r < 2; ++r) v[2 * r] = values[i][k][r].x * scale, v[2 * r + 1] = values[i][k][r].y * scale;
            st_shared_v2_if(exists, to + WARP * k * PAIR_BYTES, fp16_pair(v[0], v[1]), fp16_pair(v[2], v[3]));
            if (STRICT)
                st_shared_v2_if(exists, to + plan.stage_bytes(false) + WARP * k * PAIR_BYTES,
                                fp16_pair(fp16_rest(v[0]), fp16_rest(v[1])), fp16_pair(fp16_rest(v[2]), fp16_rest(v[3])));
        }
    }
}

// A producer warpgroup: for each tile of its consumer, for each channel, fills a stage, batch by batch. The first batch of the
// stage waits until the stage is empty; the last one publishes its StageInfo and arrives. A tile that begins again does so in
// the stage that it has reached: is_first tells the consumer to drop its sums.
template <bool STRICT, bool PAIRED>
DEVICE void produce(const float* __restrict__ x, const Shape& shape, const Plan& plan, char* memory, const SharedLayout& layout,
                    int consumer) {
    uint32_t* const warp_largest = reinterpret_cast<uint32_t*>(memory + layout.largest) + consumer * 2 * PRODUCER_WARPS;
    const Pipeline pipeline(memory, layout, plan, STRICT, consumer);
    PipelineState state;
    Cursor at;
    at.ordinal = 0;
    if (!at.begin_tile(x, shape, plan, tile_number(plan, 0, consumer))) return;
    Batch values;
    load_batch<PAIRED>(shape, plan, at, values);
    int exponent = NO_EXPONENT, slot = 0;
    bool plain = false;
    UNROLL_1 while (true) {
        const uint32_t largest = largest_of_batch(values, warp_largest, slot, 1 + CONSUMERS + consumer);
        slot ^= 1;
        if (largest >= INFINITE) {
            plain = true;
        } else if (!plain && largest > 0) {
            const bool begins = exponent == NO_EXPONENT;
            if (begins || __uint_as_float(largest) * power_of_2(exponent) > LARGEST_FP16) {
                exponent = scale_exponent(__uint_as_float(largest), FIRST_TARGET);
                if (!begins) {
                    at.begin_attempt();
                    load_batch<PAIRED>(shape, plan, at, values);
                    continue;
                }
            }
        }
        if (at.begins_stage()) pipeline.producer_acquire(state);
        const int used_exponent = exponent == NO_EXPONENT ? 0 : exponent;
        store_batch<STRICT>(pipeline.address(state), plan, at, power_of_2(used_exponent), values);
        if (at.next(plan)) {
            const bool is_last = at.channel == IN_CHANNELS;
            if (threadIdx.x % WARPGROUP == 0) {
                StageInfo& info = pipeline.infos[state.stage];
                info.exponent = used_exponent, info.is_first = at.channel == 1, info.is_last = is_last, info.plain = plain;
            }
            fence_proxy_async();
            pipeline.producer_commit(state);
            state.advance(plan.stages);
            if (is_last) {
                ++at.ordinal;
                if (!at.begin_tile(x, shape, plan, tile_number(plan, at.ordinal, consumer))) break;
                exponent = NO_EXPONENT, plain = false;
            }
        }
        load_batch<PAIRED>(shape, plan, at, values);
    }
}

// ---- the consumer warpgroups: wgmma, and outputs through shared memory to device memory
template <int OUTS>
using Sums = float[M_TILES][OUTS / 2];  // a lane's part of M_TILES x 64 positions x OUTS

// sums += (or, where `accumulate` is 0, =) the products of a stage's taps, at TILES x 64 positions. `x` and `weights` are in
// units of shared memory, x from the tile's first position on.
template <int TILES, int SUMS>
DEVICE void multiply_stage(int x, int weights, const Plan& plan, int accumulate, float(&sums)[TILES][SUMS]) {
    constexpr int OUTS = 2 * SUMS;
    const int pitch = plan.pitch, plane = plan.rows * pitch;
    const auto offset_of = [&](const Unit& unit) { return unit.plane() * plane + unit.row() * pitch + unit.quad(); };
#pragma unroll (UNROLLED_STEPS)
    for (int step = 0; step < STEPS; ++step) {
        const int first = offset_of({2 * step}), second = offset_of({smaller(2 * step + 1, UNITS - 1)});
        UNROLL for (int m = 0; m < TILES; ++m)
            wgmma_m64nNk16_f16(sums[m], descriptor(x + 64 * m + first, second - first),
                               descriptor(weights + 2 * step * OUTS, OUTS), accumulate || step > 0);
    }
}

// A tile's output in one channel: positions [first, last), counted from the tile's first, begin 16-byte aligned unless the line
// begins there. [whole_first, whole_last) of them go out by a bulk copy, in whole 16 bytes. Up to three are before and after.
struct ChannelRange {
    float* out;                   // the tile's first position
    int shift;                    // of that position, in floats from 16 bytes
    int first, last, whole_first, whole_last;

    DEVICE ChannelRange(float* plane, const Tile& tile) {
        out = plane + tile.line + tile.begin;
        const int size = static_cast<int>(tile.end - tile.begin);
        shift = misalignment(out);
        first = tile.is_first ? 0 : (4 - shift) % 4;
        last = tile.is_last ? size : size + (4 - misalignment(out + size)) % 4;
        whole_first = smaller(first + (4 - (shift + first) % 4) % 4, last);
        whole_last = larger(last - (shift + last) % 4, whole_first);
    }
    static DEVICE int misalignment(const float* p) { return reinterpret_cast<uintptr_t>(p) / 4 % 4; }
    // The position outside of the bulk copy that one of 6 threads writes, where it exists.
    DEVICE int single(int thread) const { return thread < 3 ? first + thread : whole_last + thread - 3; }
    DEVICE bool has_single(int thread) const {
        return thread < 3 ? single(thread) < whole_first : thread < 6 && single(thread) < last;
    }
};

// Writes a tile's outputs through shared memory, 8 channels at a time: a channel's positions lie there as they will lie in
// device memory. Two channels of each 8 go out by a warp: one lane issues the bulk copies, six lanes a channel write what is
// before and after. With STAGING_BUFFERS, a buffer is written while the copies of the one before still read theirs.
template <int OUTS>
DEVICE void write_tile(const Sums<OUTS>& sums, const Shape& shape, const Plan& plan, const Tile& tile, int exponent,
                       const float* scales, float* staging, float* __restrict__ out, int channels, int consumer) {
    const int warp = uniform(static_cast<int>(threadIdx.x / WARP % 4));
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int64_t out_plane = shape.out_plane();
    // Of the lane's positions in the tile, in bytes. What is computed in vain, between the rows, goes to the end.
    int offsets[M_TILES][2];
    UNROLL for (int i = 0; i < 2 * M_TILES; ++i) {
        const int m = i / 2, r = i % 2, unit = tile.column + m * 64 + warp * 16 + g + r * 8, row = unit / plan.pitch;
        const int column = unit - row * plan.pitch, in_vain = row * (plan.pitch - plan.columns) + column - plan.columns;
        const bool is_output = column < plan.columns;
        offsets[m][r] = (is_output ? row * plan.columns + column - tile.column : POSITIONS - 1 - in_vain) * 4;
    }
    const uint32_t first_staged = shared_address(staging);
    const ChannelRange lane_ranges[2] = {{out + 2 * t * out_plane, tile}, {out + (2 * t + 1) * out_plane, tile}};
    const uint32_t lane_row = first_staged + (2 * t * STAGING_ROW + lane_ranges[0].shift) * 4;
    const uint32_t next_row = first_staged + ((2 * t + 1) * STAGING_ROW + lane_ranges[1].shift) * 4;
    // The bulk copies of the warp's two channels.
    float* const out_begin = reinterpret_cast<float*>(uniform(reinterpret_cast<uint64_t>(out + tile.line + tile.begin)));
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
        UNROLL for (int m = 0; m < M_TILES; ++m)
            UNROLL for (int r = 0; r < 2; ++r) {
                const float* pair = sums[m] + 4 * j + 2 * r;
                const float left = fmaf(pair[0] * factor_x, other_half, bias.x);
                const float right = fmaf(pair[1] * factor_y, other_half, bias.y);
                st_shared(lane_row + offsets[m][r] + buffer * 4, left);
                st_shared(next_row + offsets[m][r] + buffer * 4, right);
            }
        fence_proxy_async();
        if (lane == 0) cp_async_bulk_wait_read<STAGING_BUFFERS - 2>();  // then the buffer of the next 8 is free
        bar_sync(consumer, WARPGROUP);
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

struct Tensors {
    const float* __restrict__ x;
    const float* __restrict__ weight;
    const float* __restrict__ bias;  // or null
    float* __restrict__ out;
};

// An output in plain fp32, from x and the weights as they are.
DEVICE float plain_output(const Shape& shape, const float* __restrict__ x, const float* __restrict__ weight,
                          const float* __restrict__ bias, int64_t sample, int o, int i, int j);

// A tile that reads a NaN or an infinity, without the tensor core, by a warpgroup.
DEVICE void write_plain_tile(const Shape& shape, const Plan& plan, int64_t number, const Tensors& tensors) {
    Tile tile;
    tile.set(shape, plan, number);
    const int group = blockIdx.x % plan.groups();
    UNROLL_1 for (int o = group * plan.outs; o < smaller((group + 1) * plan.outs, OUT_CHANNELS); ++o) {
        const ChannelRange range(tensors.out + (tile.sample * OUT_CHANNELS + o) * shape.out_plane(), tile);
        UNROLL_1 for (int position = range.first + threadIdx.x % WARPGROUP; position < range.last; position += WARPGROUP) {
            const int64_t in_plane = tile.line + tile.begin + position;
            const int i = static_cast<int>(in_plane / shape.out_w);
            const int j = static_cast<int>(in_plane - static_cast<int64_t>(i) * shape.out_w);
            range.out[position] = plain_output(shape, tensors.x, tensors.weight, tensors.bias, tile.sample, o, i, j);
        }
    }
}

// A consumer warpgroup: for each of its tiles, waits for a channel's stage, multiplies, and releases the stage; after the
// last channel it writes the outputs. Sums of 192 positions x OUTS are in registers. Plain tiles come at the end.
template <int OUTS, bool STRICT>
DEVICE void consume(const Shape& shape, const Plan& plan, char* memory, const SharedLayout& layout, const Tensors& tensors,
                    int consumer) {
    const int first_channel = blockIdx.x % plan.groups() * OUTS;
    const int channels = smaller(OUTS, OUT_CHANNELS - first_channel);
    float* const staging = reinterpret_cast<float*>(memory + layout.staging) + consumer * STAGING_BUFFERS * STAGING;
    const Pipeline pipeline(memory, layout, plan, STRICT, consumer);
    const int first_weight = shared_address(memory + layout.weights) / UNIT_BYTES;
    int first_plain = 1 << 30, last_plain = -1;  // ordinals
    PipelineState state;
    mbarrier_wait(shared_address(memory + layout.barriers), 0);  // the weights
    UNROLL_1 for (int ordinal = 0; tile_number(plan, ordinal, consumer) < plan.all_tiles; ++ordinal) {
        Tile tile;
        tile.set(shape, plan, tile_number(plan, ordinal, consumer));
        Sums<OUTS> sums;
        StageInfo info;
        int channel = 0;
        UNROLL_1 do {
            pipeline.consumer_wait(state);
            info = pipeline.infos[state.stage];
            if (info.is_first) channel = 0;
            const int x = uniform(static_cast<int>(pipeline.address(state) / UNIT_BYTES) + tile.column);
            const int weights = first_weight + channel * STEPS * 2 * OUTS;
            if constexpr (!STRICT) {
                wgmma_fence();
                multiply_stage(x, weights, plan, !info.is_first, sums);
                wgmma_commit();
                wgmma_wait();
                pipeline.consumer_release(state);
            } else {
                // The tensor core cuts off what a sum does not hold, always towards zero: so a stage is summed from zero, small
                // terms first, and the sums of stages are added as fp32 numbers are.
                const int low_x = plan.stage_bytes(false) / UNIT_BYTES, low_weights = static_cast<int>(weight_units(OUTS));
                UNROLL for (int m = 0; m < M_TILES; ++m) {
                    float part[1][OUTS / 2];
                    UNROLL_1 for (int k = 0; k < 3; ++k) {  // low * high, high * low, high * high
                        wgmma_fence();
                        multiply_stage(x + 64 * m + (k == 0 ? low_x : 0), weights + (k == 1 ? low_weights : 0), plan, k > 0,
                                       part);
                    }
                    wgmma_commit();
                    wgmma_wait();
                    if (m == M_TILES - 1) pipeline.consumer_release(state);
                    UNROLL for (int i = 0; i < OUTS / 2; ++i) sums[m][i] = part[0][i] + (info.is_first ? 0 : sums[m][i]);
                }
            }
            state.advance(plan.stages), ++channel;
        } while (!info.is_last);
        if (info.plain)
            last_plain = ordinal, first_plain = smaller(first_plain, ordinal);
        else
            write_tile<OUTS>(sums, shape, plan, tile, info.exponent, reinterpret_cast<const float*>(memory + layout.scales),
                             staging, tensors.out + (tile.sample * OUT_CHANNELS + first_channel) * shape.out_plane(), channels,
                             1 + consumer);
    }
    cp_async_bulk_wait();
    bar_sync(1 + consumer, WARPGROUP);  // tiles between two plain ones are written again
    UNROLL_1 for (int k = first_plain; k <= last_plain; ++k)
        write_plain_tile(shape, plan, tile_number(plan, k, consumer), tensors);
}

// A block: all weights of a group of outputs stay in shared memory; TMA loads them while the first tiles are on their way. Of
// its four warpgroups 0 and 1 consume, 2 and 3 produce for them; registers go from producers to consumers.
template <int OUTS, bool STRICT>
__global__ void __launch_bounds__(FORWARD_THREADS, 1)
    convolve(const Shape shape, const Plan plan, const Tensors tensors, const uint4* __restrict__ packed) {
    extern __shared__ __align__(128) char memory[];
    const SharedLayout layout(plan, STRICT);
    const int groups = plan.groups(), group = blockIdx.x % groups;
    const uint32_t weights_full = shared_address(memory + layout.barriers);
    if (threadIdx.x == 0) {
        mbarrier_init(weights_full, 1);
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            const Pipeline pipeline(memory, layout, plan, STRICT, consumer);
            for (int stage = 0; stage < plan.stages; ++stage)
                mbarrier_init(pipeline.full(stage), PRODUCER_WARPS * WARP), mbarrier_init(pipeline.empty(stage), WARPGROUP);
        }
        fence_mbarrier_init();
        constexpr int PARTS = (STRICT ? 2 : 1) * IN_CHANNELS, BYTES = STEPS * 2 * OUTS * UNIT_BYTES;
        mbarrier_arrive_expect_tx(weights_full, PARTS * BYTES);
        for (int part = 0; part < PARTS; ++part)
            cp_async_bulk_load(shared_address(memory + layout.weights) + part * BYTES,
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
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (warpgroup >= CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (shape.paired)
            produce<STRICT, true>(tensors.x, shape, plan, memory, layout, warpgroup - CONSUMERS);
        else
            produce<STRICT, false>(tensors.x, shape, plan, memory, layout, warpgroup - CONSUMERS);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume<OUTS, STRICT>(shape, plan, memory, layout, tensors, warpgroup);
    }
}

// ========================================================= training =========================================================
// The gradient of the weights: x (taps x positions) times grad (positions x outputs), summed over all positions; TF32 operands.
// The taps of a chunk of channels are the rows of a product, in tiles of 64. A lane loads its part of the left operand from
// rows of x as they are: its taps only shift where. The right operand is grad. Two consumer warpgroups have GRAD_TILES tiles
// each, and all outputs of the block; two producer warpgroups, together, load, round to TF32 and fill the pipeline.
//
// What a block of weight_gradient keeps in shared memory, in bytes, at the original's size:
//
//     0           64                                86,976                                                       211,116
//     | mbarriers | stages of grad [4][high, low]   | x [channel][44 rows][235 columns], a circular buffer of rows. A stage's |
//     | 4 x 2     | [14 x 4 positions][output] 16 B | 11 lie anywhere, and neighbouring stages share 7                        |
constexpr int GRAD_CONSUMERS = 2, GRAD_PRODUCERS = 2, GRAD_THREADS = (GRAD_CONSUMERS + GRAD_PRODUCERS) * WARPGROUP;
constexpr int GRAD_CONSUMER_LANES = GRAD_CONSUMERS * WARPGROUP, GRAD_PRODUCER_LANES = GRAD_PRODUCERS * WARPGROUP;
constexpr int GRAD_PRODUCER_WARPS = GRAD_PRODUCER_LANES / WARP;
constexpr int MOST_TAPS = 3 * 64 * GRAD_CONSUMERS;                          // a thread has registers for three tiles
constexpr int GRAD_OUTS = OUT_CHANNELS <= FEW_OUTS ? FEW_OUTS : MOST_OUTS;  // of a block; strict: FEW_OUTS

// A run is the positions of an output row that one stage holds: RUN_STEPS instructions' inner size. The inner index k of a step
// is position 2k, or 2(k - 4) + 1 from 4 on.
constexpr int RUN_STEPS = 7, RUN = 8 * RUN_STEPS, RUN_COLUMNS = (RUN - 1) * STRIDE_W + KERNEL_W;
// Lanes of a load read 8 taps side by side, in the order of the weights, at 4 positions, 2 * STRIDE_W apart. At a stride of 4
// that is free of bank conflicts where distances of rows and of channels are alike in number and in banks, modulo 8.
__host__ __device__ constexpr int alike(int least, int number) { return least + ((number - least) % 8 + 8) % 8; }
constexpr int PITCH = alike(RUN_COLUMNS, KERNEL_W);

// A stage of grad: [high, low][four positions][output], 16 bytes each. The 16 bytes between planes of four positions make the
// stores of a warp, 32 positions, free of bank conflicts.
__host__ __device__ constexpr int grad_plane(int outs) { return outs * 16 + 16; }
__host__ __device__ constexpr int grad_part(int outs) { return 2 * RUN_STEPS * grad_plane(outs); }
__host__ __device__ constexpr int buffer_rows(int stages) { return stages * KERNEL_H; }
__host__ __device__ constexpr int channel_pitch(int stages) { return alike(buffer_rows(stages) * PITCH, TAPS); }
__host__ __device__ constexpr int64_t gradient_bytes(bool strict, int outs, int channels, int stages) {
    return static_cast<int64_t>(stages) * (16 + (strict ? 2 : 1) * grad_part(outs)) +
           static_cast<int64_t>(channels) * channel_pitch(stages) * 4;
}

// The channels of a chunk: what a product's rows and two stages have room for; 0 where that is not one.
constexpr int most_chunk() {
    int channels = smaller(MOST_TAPS / TAPS, IN_CHANNELS);
    while (channels > 0 && (gradient_bytes(false, GRAD_OUTS, channels, 2) > MAX_SHARED_BYTES ||
                            gradient_bytes(true, FEW_OUTS, channels, 2) > MAX_SHARED_BYTES))
        --channels;
    return channels;
}
// The one predicate of what this kernel takes.
constexpr bool GRADIENT_FITS = most_chunk() > 0;
constexpr int CHUNKS = ceil_div(IN_CHANNELS, GRADIENT_FITS ? most_chunk() : 1), CHUNK = ceil_div(IN_CHANNELS, CHUNKS);
constexpr int GRAD_TILES = GRADIENT_FITS ? ceil_div(CHUNK * TAPS, 64 * GRAD_CONSUMERS) : 1;
constexpr int most_stages(bool strict, int outs) {
    int stages = 4;
    while (stages > 2 && gradient_bytes(strict, outs, CHUNK, stages) > MAX_SHARED_BYTES) --stages;
    return stages;
}
// Of the 16 rows of a tile that a warp has, the first one's tap, among those of the chunk.
template <class T>
__host__ __device__ constexpr T first_tap(int warp, T tile) {
    return ((warp / 4 * GRAD_TILES + tile) * 4 + warp % 4) * 16;
}

// A number as two TF32 values: high is rounded to 11 bits, as cvt.rna does it, but without its care for NaNs, which costs more
// instructions. Of low the tensor core drops the last bit, which errs up as often as down. Infinities and NaNs have NaN there.
struct Split {
    float high, low;
};
DEVICE Split split(float v) {
    const float high = __uint_as_float((__float_as_uint(v) + 0x1000u) & 0xffffe000u);
    return {high, v - high};
}

// What a stage holds: a run of an output row. Rows of a run's column follow each other, then runs, then samples. Where the row
// before it was in the stage before, the buffer still holds the rows of x that both read.
constexpr int FRESH_ROWS = smaller(STRIDE_H, KERNEL_H), SHARED_ROWS = KERNEL_H - FRESH_ROWS;
struct OutputRow {
    int64_t sample;
    int run, row;
    int x_row = 0;  // of the buffer of x: where its first row is
    bool follows = false;

    DEVICE OutputRow(const Shape& shape, int64_t number) {
        const int64_t column = number / shape.out_h;
        row = static_cast<int>(number - column * shape.out_h);
        sample = column / shape.runs, run = static_cast<int>(column - sample * shape.runs);
    }
    DEVICE void advance(const Shape& shape, int buffer_rows) {
        follows = ++row < shape.out_h;
        if (!follows) {
            row = 0;
            if (++run == shape.runs) run = 0, ++sample;
        }
        x_row += follows ? FRESH_ROWS : KERNEL_H;
        if (x_row >= buffer_rows) x_row -= buffer_rows;
    }
    DEVICE int columns(const Shape& shape) const { return smaller(RUN, shape.out_w - run * RUN); }
};

// What a block has: a group of outputs, a chunk of channels, and output rows [first, last) of the whole batch.
struct GradientPart {
    int first_out, first_channel, channels;
    int64_t first, last;
};

template <bool STRICT, int OUTS>
struct GradientMemory {
    static constexpr int STAGES = most_stages(STRICT, OUTS), ROWS = buffer_rows(STAGES), CHANNEL = channel_pitch(STAGES);
    static constexpr int STAGE_BYTES = (STRICT ? 2 : 1) * grad_part(OUTS);
    static constexpr int64_t BYTES = gradient_bytes(STRICT, OUTS, CHUNK, STAGES);
    uint32_t barriers, stages, rows;  // shared addresses

    DEVICE explicit GradientMemory(const char* memory)
        : barriers(shared_address(memory)), stages(barriers + STAGES * 16), rows(stages + STAGES * STAGE_BYTES) {}
    DEVICE uint32_t stage(const PipelineState& at) const { return stages + at.stage * STAGE_BYTES; }
    DEVICE uint32_t full(int stage) const { return barriers + stage * 16; }
    DEVICE uint32_t empty(int stage) const { return barriers + stage * 16 + 8; }
};

// ---- producers
// A column of x in an output row's window: its rows go to the circular buffer.
template <bool STRICT, class Memory>
struct WindowColumn {
    const float* x;  // row 0 of the first channel
    int top, x_row;
    bool exists;
    uint32_t buffer;

    DEVICE WindowColumn(const Memory& memory, const Shape& shape, const GradientPart& part, const OutputRow& at,
                        const float* all, int column) {
        const int w = at.run * RUN * STRIDE_W - PAD_W + column;
        x = all + (at.sample * IN_CHANNELS + part.first_channel) * shape.plane() + w;
        top = at.row * STRIDE_H - PAD_H, x_row = at.x_row;
        exists = column < RUN_COLUMNS && w >= 0 && w < shape.width;
        buffer = memory.rows + column * 4;
    }
    DEVICE float load(const Shape& shape, int channel, int row) const {
        const int h = top + row;
        const bool row_exists = h >= 0 && h < shape.height;
        return exists && row_exists ? x[channel * shape.plane() + static_cast<int64_t>(h) * shape.width] : 0;
    }
    DEVICE void store(int channel, int row, float v) const {
        const int buffer_row = x_row + row - (x_row + row >= Memory::ROWS ? Memory::ROWS : 0);
        st_shared(buffer + (channel * Memory::CHANNEL + buffer_row * PITCH) * 4, STRICT ? v : cvt_rna_tf32(v));
    }
    DEVICE void copy(const Shape& shape, int channel, int first, int last) const {
        constexpr int BATCH = 8;  // on their way at a time
        UNROLL_1 for (; first < last; first += BATCH) {
            float values[BATCH];
            UNROLL for (int i = 0; i < BATCH; ++i) values[i] = first + i < last ? load(shape, channel, first + i) : 0;
            UNROLL for (int i = 0; i < BATCH; ++i)
                if (first + i < last) store(channel, first + i, values[i]);
        }
    }
};

// The rows of x that a window does not share with the one before it, in a lane's first column and the first channels: they are
// asked for an output row ahead. A lane has every GRAD_PRODUCER_LANES-th column.
constexpr int MOST_AHEAD = 12, AHEAD_CHANNELS = smaller(MOST_AHEAD / FRESH_ROWS, CHUNK);
template <bool STRICT, class Memory>
struct RowsAhead {
    float values[AHEAD_CHANNELS > 0 ? AHEAD_CHANNELS : 1][FRESH_ROWS];

    static DEVICE int column() { return threadIdx.x % GRAD_PRODUCER_LANES; }
    DEVICE void load(const Memory& memory, const Shape& shape, const GradientPart& part, const OutputRow& at, const float* x) {
        const WindowColumn<STRICT, Memory> window(memory, shape, part, at, x, column());
        UNROLL for (int i = 0; i < AHEAD_CHANNELS * FRESH_ROWS; ++i) {
            const int channel = i / FRESH_ROWS, row = i % FRESH_ROWS;
            if (channel < part.channels) values[channel][row] = window.load(shape, channel, SHARED_ROWS + row);
        }
    }
    // These, and what else of the window is not in the buffer.
    DEVICE void store(const Memory& memory, const Shape& shape, const GradientPart& part, const OutputRow& at,
                      const float* x) const {
        if (column() < RUN_COLUMNS) {
            const WindowColumn<STRICT, Memory> window(memory, shape, part, at, x, column());
            UNROLL for (int i = 0; i < AHEAD_CHANNELS * FRESH_ROWS; ++i) {
                const int channel = i / FRESH_ROWS, row = i % FRESH_ROWS;
                if (channel < part.channels) window.store(channel, SHARED_ROWS + row, values[channel][row]);
            }
        }
        if (at.follows && part.channels <= AHEAD_CHANNELS && RUN_COLUMNS <= GRAD_PRODUCER_LANES) return;
        UNROLL_1 for (int k = column(); k < RUN_COLUMNS; k += GRAD_PRODUCER_LANES) {
            const WindowColumn<STRICT, Memory> window(memory, shape, part, at, x, k);
            UNROLL_1 for (int channel = 0; channel < part.channels; ++channel) {
                const bool ahead = k == column() && channel < AHEAD_CHANNELS;
                window.copy(shape, channel, at.follows ? SHARED_ROWS : 0, ahead ? SHARED_ROWS : KERNEL_H);
            }
        }
    }
};

// sums[i] over the lanes of a warp, where lane / (WARP / SIZE) is i. With each exchange lanes keep half of the sums they have.
template <int OFFSET, int SIZE>
DEVICE float add_lanes(const float (&sums)[SIZE]) {
    const bool upper = threadIdx.x & OFFSET;
    if constexpr (SIZE > 1) {
        float kept[SIZE / 2];
        UNROLL for (int i = 0; i < SIZE / 2; ++i) {
            const float given = upper ? sums[i] : sums[i + SIZE / 2];
            kept[i] = (upper ? sums[i + SIZE / 2] : sums[i]) + __shfl_xor_sync(0xffffffffu, given, OFFSET);
        }
        return add_lanes<OFFSET / 2>(kept);
    } else if constexpr (OFFSET > 0) {
        const float pair[1] = {sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], OFFSET)};
        return add_lanes<OFFSET / 2>(pair);
    } else {
        return sums[0];
    }
}

// Half of a run of grad: a lane has the positions `lane` and `lane` + 32, in each output that its warp has.
template <int OUTS>
struct GradBatch {
    static constexpr int SIZE = OUTS / (2 * GRAD_PRODUCER_WARPS);  // outputs of a warp
    float values[SIZE][2];

    static DEVICE int output(int batch, int i) {
        return (batch * SIZE + i) * GRAD_PRODUCER_WARPS + uniform(static_cast<int>(threadIdx.x / WARP % GRAD_PRODUCER_WARPS));
    }
    DEVICE void load(int batch, const Shape& shape, const GradientPart& part, const OutputRow& at,
                     const float* __restrict__ grad) {
        const int lane = threadIdx.x % WARP, columns = at.columns(shape);
        const float* from = grad + (at.sample * OUT_CHANNELS + part.first_out + output(batch, 0)) * shape.out_plane() +
                            static_cast<int64_t>(at.row) * shape.out_w + at.run * RUN + lane;
        UNROLL for (int i = 0; i < SIZE; ++i, from += GRAD_PRODUCER_WARPS * shape.out_plane()) {
            const bool exists = OUT_CHANNELS % OUTS == 0 || part.first_out + output(batch, i) < OUT_CHANNELS;
            values[i][0] = exists && lane < columns ? from[0] : 0;
            values[i][1] = exists && lane + WARP < columns ? from[WARP] : 0;
        }
    }
    // Position p is in step p / 8. There it has the inner index p % 8 / 2, or 4 more where p is odd.
    template <bool STRICT>
    DEVICE void store(int batch, uint32_t stage) const {
        const int lane = threadIdx.x % WARP, plane = lane / 8 * 2 + lane % 2, in_plane = lane % 8 / 2;
        const uint32_t to = stage + plane * grad_plane(OUTS) + output(batch, 0) * 16 + in_plane * 4;
        UNROLL for (int i = 0; i < SIZE; ++i) {
            const uint32_t address = to + i * GRAD_PRODUCER_WARPS * 16;
            store_value<STRICT>(address, values[i][0]);
            if (lane + WARP < RUN) store_value<STRICT>(address + WARP / 4 * grad_plane(OUTS), values[i][1]);
        }
    }
    template <bool STRICT>
    static DEVICE void store_value(uint32_t address, float v) {
        if constexpr (STRICT) {
            const Split parts = split(v);
            st_shared(address, parts.high), st_shared(address + grad_part(OUTS), parts.low);
        } else {
            st_shared(address, cvt_rna_tf32(v));
        }
    }

    // The sum over a warp's lanes of their values in output lane / SHARERS of the batch.
    static constexpr int POWER_OF_2 = SIZE <= 8 ? 8 : 16, SHARERS = WARP / POWER_OF_2;
    static_assert(SIZE <= POWER_OF_2, "a lane has one output in the end");
    DEVICE float sum_over_lanes() const {
        float sums[POWER_OF_2];
        UNROLL for (int i = 0; i < POWER_OF_2; ++i) sums[i] = i < SIZE ? values[i][0] + values[i][1] : 0;
        return add_lanes<WARP / 2>(sums);
    }
};

constexpr int BIAS_FLOATS = round_up(OUT_CHANNELS, 4);  // of a split's sums

// The producer warpgroups have an output row in registers. They wait until a stage is empty, fill it, add what is for the bias,
// and ask for the next row; then they arrive. No proxy fence here: it would wait for the loads that are on their way.
template <bool STRICT, int OUTS>
DEVICE void produce_gradient(const Shape& shape, const GradientPart& part, const GradientMemory<STRICT, OUTS>& memory,
                             const float* __restrict__ x, const float* __restrict__ grad, float* bias_terms) {
    using Memory = GradientMemory<STRICT, OUTS>;
    using Batch = GradBatch<OUTS>;
    Batch batches[2];
    RowsAhead<STRICT, Memory> rows;
    float bias_sums[2] = {};
    OutputRow at(shape, part.first);
    PipelineState state;
    rows.load(memory, shape, part, at, x);
    UNROLL for (int k = 0; k < 2; ++k) batches[k].load(k, shape, part, at, grad);
    UNROLL_1 for (int64_t left = part.last - part.first; left > 0; --left) {
        const uint32_t stage = memory.stage(state), full = memory.full(state.stage);
        mbarrier_wait(memory.empty(state.stage), state.parity ^ 1);  // so there is room for its rows of x, too
        rows.store(memory, shape, part, at, x);
        at.advance(shape, Memory::ROWS);
        if (left > 1) rows.load(memory, shape, part, at, x);
        UNROLL for (int k = 0; k < 2; ++k) {
            batches[k].template store<STRICT>(k, stage);
            bias_sums[k] += batches[k].sum_over_lanes();
            if (left > 1) batches[k].load(k, shape, part, at, grad);
        }
        mbarrier_arrive(full);
        state.advance(Memory::STAGES);
    }
    const int lane = threadIdx.x % WARP, of_batch = lane / Batch::SHARERS;
    UNROLL for (int batch = 0; batch < 2; ++batch) {
        const int o = part.first_out + Batch::output(batch, of_batch);
        if (part.first_channel == 0 && lane % Batch::SHARERS == 0 && of_batch < Batch::SIZE && o < BIAS_FLOATS)
            bias_terms[o] = bias_sums[batch];
    }
}

// ---- consumers
// A lane's part of a tile of the left operand, rows g and g + 8: what a step of positions meets at its taps. Producers have
// rounded it, unless STRICT.
template <bool STRICT>
struct TapTile {
    float high[4], low[STRICT ? 4 : 1];

    // `taps`: shared addresses of x at the two rows' taps and the lane's first position. `columns`: positions from the step's
    // first on that exist. Where there is none, grad is zero; but x may be infinite.
    DEVICE void load(const uint32_t* taps, int step, int columns) {
        UNROLL for (int i = 0; i < 4; ++i) {
            const int row = i % 2, odd = i / 2;
            float v = ld_shared(taps[row] + (8 * step + odd) * STRIDE_W * 4);
            if (columns < 8 && 2 * static_cast<int>(threadIdx.x % 4) + odd >= columns) v = 0;
            if constexpr (STRICT) {
                const Split parts = split(v);
                high[i] = parts.high, low[i] = parts.low;
            } else {
                high[i] = v;
            }
        }
    }
};

// The sums of a split are written as they are in registers: [group of outputs][chunk of channels][tile of a warpgroup][8
// outputs][thread], a float4 each; then come those of the biases.
__host__ __device__ constexpr int out_groups(int outs) { return ceil_div(OUT_CHANNELS, outs); }
__host__ __device__ constexpr int64_t part_floats(int outs) { return 4ll * GRAD_TILES * (outs / 8) * GRAD_CONSUMER_LANES; }
__host__ __device__ constexpr int64_t split_floats(int outs) {
    return out_groups(outs) * CHUNKS * part_floats(outs) + BIAS_FLOATS;
}

// The consumer warpgroups: for each output row, wait for its stage, load the left operand and multiply, step by step, and
// release the stage. A warpgroup's sums, GRAD_TILES x 64 taps x OUTS, are in registers. Strict sums begin again with each
// output row and are added as fp32 numbers: see consume.
template <bool STRICT, int OUTS>
DEVICE void consume_gradient(const Shape& shape, const GradientPart& part, const GradientMemory<STRICT, OUTS>& memory,
                             float* part_terms) {
    using Memory = GradientMemory<STRICT, OUTS>;
    constexpr int PLANE = grad_plane(OUTS) / UNIT_BYTES, LOW = grad_part(OUTS) / UNIT_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    uint32_t tap_rows[GRAD_TILES][2], first_taps[GRAD_TILES][2];  // bytes to a lane's taps: their rows, and from there
    UNROLL for (int i = 0; i < 2 * GRAD_TILES; ++i) {
        const int m = i / 2, r = i % 2, of_chunk = first_tap(warp, m) + r * 8 + g;
        const int tap = of_chunk < part.channels * TAPS ? of_chunk : 0;  // or any: that row's sums are not used
        const int channel = tap / TAPS, u = tap % TAPS / KERNEL_W, v = tap % KERNEL_W;
        tap_rows[m][r] = u * PITCH * 4;
        first_taps[m][r] = memory.rows + (channel * Memory::CHANNEL + v + 2 * t * STRIDE_W) * 4;
    }
    float sums[GRAD_TILES][OUTS / 2], row_sums[STRICT ? GRAD_TILES : 1][OUTS / 2];
    UNROLL for (int m = 0; m < GRAD_TILES; ++m)
        UNROLL for (int i = 0; i < OUTS / 2; ++i) sums[m][i] = 0;
    OutputRow at(shape, part.first);
    PipelineState state;
    UNROLL_1 for (int64_t number = part.first; number < part.last; ++number) {
        constexpr uint32_t BUFFER_BYTES = Memory::ROWS * PITCH * 4;
        uint32_t taps[GRAD_TILES][2];
        UNROLL for (int m = 0; m < GRAD_TILES; ++m)
            UNROLL for (int r = 0; r < 2; ++r) {
                const uint32_t row = at.x_row * PITCH * 4 + tap_rows[m][r];
                taps[m][r] = first_taps[m][r] + row - (row >= BUFFER_BYTES ? BUFFER_BYTES : 0);
            }
        const int columns = at.columns(shape), stage = uniform(static_cast<int>(memory.stage(state) / UNIT_BYTES));
        mbarrier_wait(memory.full(state.stage), state.parity);
        fence_proxy_async();  // here, since in a producer it would wait for what that has asked for
        UNROLL for (int step = 0; step < RUN_STEPS; ++step) {
            if (8 * step >= columns) break;
            const int planes = stage + 2 * step * PLANE;
            TapTile<STRICT> tiles[GRAD_TILES];
            UNROLL for (int m = 0; m < GRAD_TILES; ++m) tiles[m].load(taps[m], step, columns - 8 * step);
            wgmma_fence();
            UNROLL for (int m = 0; m < GRAD_TILES; ++m) {
                if constexpr (STRICT) {  // small terms first
                    wgmma_m64nNk8_tf32(row_sums[m], tiles[m].low, descriptor(planes, PLANE), step > 0);
                    wgmma_m64nNk8_tf32(row_sums[m], tiles[m].high, descriptor(planes + LOW, PLANE), 1);
                    wgmma_m64nNk8_tf32(row_sums[m], tiles[m].high, descriptor(planes, PLANE), 1);
                } else {
                    wgmma_m64nNk8_tf32(sums[m], tiles[m].high, descriptor(planes, PLANE), 1);
                }
            }
            wgmma_commit();
            wgmma_wait();
        }
        mbarrier_arrive(memory.empty(state.stage));
        if constexpr (STRICT)
            UNROLL for (int m = 0; m < GRAD_TILES; ++m)
                UNROLL for (int i = 0; i < OUTS / 2; ++i) sums[m][i] += row_sums[m][i];
        state.advance(Memory::STAGES);
        at.advance(shape, Memory::ROWS);
    }

    float4* terms = reinterpret_cast<float4*>(part_terms) + threadIdx.x;
    UNROLL for (int m = 0; m < GRAD_TILES; ++m)
        UNROLL for (int j = 0; j < OUTS / 8; ++j, terms += GRAD_CONSUMER_LANES) {
            const float* of_8 = sums[m] + 4 * j;
            *terms = make_float4(of_8[0], of_8[1], of_8[2], of_8[3]);
        }
}

// A block: a part of the gradient over a split of the output rows, which it writes to `terms`. Warpgroups 0 and 1 consume, 2
// and 3 produce.
template <bool STRICT, int OUTS>
__global__ void __launch_bounds__(GRAD_THREADS, 1)
    weight_gradient(const Shape shape, const float* __restrict__ x, const float* __restrict__ grad,
                    float* __restrict__ terms) {
    extern __shared__ __align__(128) char shared[];
    using Memory = GradientMemory<STRICT, OUTS>;
    const Memory memory(shared);
    constexpr int GROUPS = out_groups(OUTS), PARTS = GROUPS * CHUNKS;
    const int part_number = blockIdx.x % PARTS, chunk = part_number / GROUPS;
    const int64_t split = blockIdx.x / PARTS, splits = gridDim.x / PARTS;
    const GradientPart part = {part_number % GROUPS * OUTS, chunk * CHUNK, smaller(CHUNK, IN_CHANNELS - chunk * CHUNK),
                               shape.row_runs() * split / splits, shape.row_runs() * (split + 1) / splits};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Memory::STAGES; ++stage)
            mbarrier_init(memory.full(stage), GRAD_PRODUCER_LANES), mbarrier_init(memory.empty(stage), GRAD_CONSUMER_LANES);
        fence_mbarrier_init();
    }
    __syncthreads();
    terms += split * split_floats(OUTS);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (warpgroup >= GRAD_CONSUMERS) {
        warpgroup_reg_dealloc<STRICT ? 64 : 72>();  // a thread of each is launched with 128; strict sums take more
        produce_gradient(shape, part, memory, x, grad, terms + PARTS * part_floats(OUTS));
    } else {
        warpgroup_reg_alloc<STRICT ? 192 : 184>();
        consume_gradient(shape, part, memory, terms + part_number * part_floats(OUTS));
    }
}

// Adds the splits' terms, always in the same order, and puts the sums where they belong. Either gradient may be null. A block
// has SUM_TERMS of a split: each warp adds every SUM_WARPS-th split, 4 terms a lane; then a thread adds the warps' sums of one.
constexpr int SUM_WARPS = 8, SUM_TERMS = 4 * WARP;
__global__ void __launch_bounds__(SUM_WARPS * WARP)
    add_splits(const float* __restrict__ terms, float* __restrict__ grad_weight, float* __restrict__ grad_bias, int64_t splits,
               int outs) {
    __shared__ float4 shares[SUM_WARPS][WARP];
    const int share = threadIdx.x / WARP, of_4 = threadIdx.x % WARP;
    const int64_t size = split_floats(outs), first = (static_cast<int64_t>(blockIdx.x) * WARP + of_4) * 4;
    float4 sum = {};
    if (first < size)
#pragma unroll 8
        for (int64_t split = share; split < splits; split += SUM_WARPS) {
            const float4 v = *reinterpret_cast<const float4*>(terms + split * size + first);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
    shares[share][of_4] = sum;
    __syncthreads();
    const int64_t term = static_cast<int64_t>(blockIdx.x) * SUM_TERMS + threadIdx.x;
    if (threadIdx.x >= SUM_TERMS || term >= size) return;
    float total = 0;
    UNROLL for (int i = 0; i < SUM_WARPS; ++i) total += reinterpret_cast<const float*>(shares[i])[threadIdx.x];
    const int64_t of_bias = term - (size - BIAS_FLOATS);
    if (of_bias >= 0) {
        if (grad_bias && of_bias < OUT_CHANNELS) grad_bias[of_bias] = total;
        return;
    }
    // Which part, tile, 8 outputs, thread and element of its float4 the term comes from.
    const int element = term % 4, lane = term / 4 % WARP, warp = term / (4 * WARP) % (GRAD_CONSUMER_LANES / WARP);
    const int64_t of_8 = term / (4 * GRAD_CONSUMER_LANES), tile = of_8 / (outs / 8), part = tile / GRAD_TILES;
    const int group = part % out_groups(outs), chunk = part / out_groups(outs);
    const int o = group * outs + static_cast<int>(of_8 % (outs / 8)) * 8 + lane % 4 * 2 + element % 2;
    const int tap = first_tap(warp, tile % GRAD_TILES) + lane / 4 + element / 2 * 8;
    if (grad_weight && o < OUT_CHANNELS && tap < smaller(CHUNK, IN_CHANNELS - chunk * CHUNK) * TAPS)
        grad_weight[(static_cast<int64_t>(o) * IN_CHANNELS + chunk * CHUNK) * TAPS + tap] = total;
}

// ==================================================== the plain fallback ====================================================
// Plain fp32, strict or not, for shapes that the fast path does not take, and for tiles that read a NaN or an infinity.
DEVICE float plain_output(const Shape& shape, const float* __restrict__ x, const float* __restrict__ weight,
                          const float* __restrict__ bias, int64_t sample, int o, int i, int j) {
    const int top = i * STRIDE_H - PAD_H, left = j * STRIDE_W - PAD_W;
    float sum = 0;
    UNROLL_1 for (int c = 0; c < IN_CHANNELS; ++c) {
        const float* plane = x + (sample * IN_CHANNELS + c) * shape.plane();
        const float* taps = weight + (static_cast<int64_t>(o) * IN_CHANNELS + c) * TAPS;
        UNROLL_1 for (int k = 0; k < TAPS; ++k) {
            const int h = top + k / KERNEL_W, w = left + k % KERNEL_W;
            const bool inside = h >= 0 && h < shape.height && w >= 0 && w < shape.width;
            if (inside) sum += plane[static_cast<int64_t>(h) * shape.width + w] * taps[k];
        }
    }
    return bias ? sum + bias[o] : sum;
}

// A thread an output, as in v1.
__global__ void __launch_bounds__(PLAIN_THREADS)
    plain_convolve(const Shape shape, const float* __restrict__ x, const float* __restrict__ weight,
                   const float* __restrict__ bias, float* __restrict__ out) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * PLAIN_THREADS + threadIdx.x;
    if (index >= shape.batch * OUT_CHANNELS * shape.out_plane()) return;
    const int j = index % shape.out_w, i = index / shape.out_w % shape.out_h;
    const int o = index / shape.out_plane() % OUT_CHANNELS;
    out[index] = plain_output(shape, x, weight, bias, index / shape.out_plane() / OUT_CHANNELS, o, i, j);
}

// A warp a weight, then one a bias. Either gradient may be null.
__global__ void __launch_bounds__(PLAIN_THREADS)
    plain_gradients(const Shape shape, const float* __restrict__ x, const float* __restrict__ grad,
                    float* __restrict__ grad_weight, float* __restrict__ grad_bias) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (PLAIN_THREADS / WARP) + threadIdx.x / WARP;
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

// ======================================================== launchers =========================================================
struct Device {
    int sm_count, shared_bytes;
    Device() {
        int device;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
};

static Shape make_shape(const Problem& p) {
    Shape s;
    s.batch = p.batch, s.height = p.height, s.width = p.width, s.out_h = p.out_h, s.out_w = p.out_w;
    s.runs = ceil_div(s.out_w, RUN);
    s.paired = s.width % 2 == 0 && PAD_W % 2 == 0 && reinterpret_cast<uintptr_t>(p.x) % 8 == 0;
    return s;
}

static unsigned blocks_of(int64_t threads, int of_block) { return static_cast<unsigned>((threads + of_block - 1) / of_block); }

template <class Kernel>
static cudaError_t allow_shared(Kernel* kernel, int64_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// What is known of it without the image's size; convolve<outs, strict> is compiled where this holds.
constexpr bool weights_fit(int outs, bool strict) {
    return FITS_UNITS && (strict ? 2 : 1) * weight_units(outs) * UNIT_BYTES <= MAX_SHARED_BYTES;
}

// Lines and tiles of a plan.
static void set_tiles(Plan& plan, const Shape& shape, bool by_rows) {
    plan.by_rows = by_rows, plan.positions = POSITIONS;
    plan.columns = by_rows ? POSITIONS : shape.out_w, plan.pitch = plan.columns + QUADS - 1;
    plan.rows = ((by_rows ? 0 : plan.columns - 1) + POSITIONS - 1 + QUADS - 1) / plan.pitch + TAP_ROWS;
    plan.lines = by_rows ? shape.out_h : 1;
    plan.line = by_rows ? shape.out_w : static_cast<int64_t>(shape.out_h) * shape.out_w;
    int fewest = POSITIONS;  // that a tile holds, from whichever column it begins
    for (int first = larger(plan.columns - POSITIONS, 0); !by_rows && first < plan.columns; ++first) {
        const int units = first + POSITIONS, whole_rows = units / plan.pitch, rest = units % plan.pitch;
        fewest = smaller(fewest, whole_rows * plan.columns + smaller(rest, plan.columns) - first);
    }
    plan.step = fewest - OVERLAP;
    plan.tiles_of_line = plan.line <= fewest ? 1 : 1 + (plan.line - fewest + plan.step - 1) / plan.step;
    plan.all_tiles = shape.batch * plan.lines * plan.tiles_of_line;
}

// The one predicate of what the fast path takes forward: whether weights and a pipeline of two stages or more fit into the
// device's shared memory; `plan` is how. Whole planes are lines where they can be.
static bool make_plan(Plan& plan, const Shape& shape, bool strict) {
    constexpr int MOST_STAGES = 4, WIDEST = 4096;  // WIDEST: outputs of a row whose planes are lines
    const Device device;
    for (const int outs : {strict || OUT_CHANNELS <= FEW_OUTS ? FEW_OUTS : MOST_OUTS, FEW_OUTS})
        for (const bool by_rows : {false, true}) {
            if (!weights_fit(outs, strict) || (!by_rows && shape.out_w > WIDEST)) continue;
            plan.outs = outs;
            set_tiles(plan, shape, by_rows);
            const int blocks = larger(device.sm_count / plan.groups(), 1);
            plan.blocks = plan.all_tiles < blocks ? static_cast<int>(plan.all_tiles) : blocks;
            for (plan.stages = MOST_STAGES; plan.stages >= 2; --plan.stages)
                if (SharedLayout(plan, strict).bytes <= device.shared_bytes) return true;
        }
    return false;
}

// Weights as pack_weights leaves them, and what undoes their scales.
int64_t packed_floats(const Problem& p) {
    Plan plan;
    if (!make_plan(plan, make_shape(p), p.strict)) return 0;
    return plan.groups() * ((p.strict ? 2 : 1) * weight_units(plan.outs) * (UNIT_BYTES / 4) + plan.outs);
}

template <int OUTS, bool STRICT>
static cudaError_t launch_fast(const Shape& shape, const Plan& plan, const Tensors& tensors, const uint4* packed,
                               cudaStream_t stream) {
    if constexpr (!weights_fit(OUTS, STRICT)) {
        return cudaErrorNotSupported;
    } else {
        const int64_t bytes = SharedLayout(plan, STRICT).bytes;
        const auto convolution = convolve<OUTS, STRICT>;
        const cudaError_t error = allow_shared(convolution, bytes);
        if (error != cudaSuccess) return error;
        convolution<<<plan.blocks * plan.groups(), FORWARD_THREADS, bytes, stream>>>(shape, plan, tensors, packed);
        return cudaSuccess;
    }
}

cudaError_t launch_convolve(const Problem& p, const float* bias, float* packed, float* out) {
    const Shape shape = make_shape(p);
    Plan plan;
    if (!make_plan(plan, shape, p.strict)) {
        const int64_t outputs = p.batch * OUT_CHANNELS * p.out_h * p.out_w;
        plain_convolve<<<blocks_of(outputs, PLAIN_THREADS), PLAIN_THREADS, 0, p.stream>>>(shape, p.x, p.weight, bias, out);
        return cudaSuccess;
    }
    uint4* const units = reinterpret_cast<uint4*>(packed);
    pack_weights<<<plan.groups() * plan.outs, WARPGROUP, 0, p.stream>>>(p.weight, units, plan.outs, p.strict);
    const auto launch = p.strict                 ? launch_fast<FEW_OUTS, true>
                        : plan.outs == MOST_OUTS ? launch_fast<MOST_OUTS, false>
                                                 : launch_fast<FEW_OUTS, false>;
    return launch(shape, plan, Tensors{p.x, p.weight, bias, out}, units, p.stream);
}

// How a gradient is shared: parts of OUTS output channels and CHUNK input channels, and splits of the output rows, so that each
// SM has a block. The order of additions depends on them.
constexpr int grad_outs(bool strict) { return strict ? FEW_OUTS : GRAD_OUTS; }
constexpr int grad_parts(bool strict) { return out_groups(grad_outs(strict)) * CHUNKS; }
static int64_t grad_splits(bool strict, const Shape& shape) {
    const int64_t most = ceil_div(Device().sm_count, grad_parts(strict));
    return shape.row_runs() < most ? shape.row_runs() : most;
}

int64_t gradient_floats(const Problem& p) {
    return GRADIENT_FITS ? grad_splits(p.strict, make_shape(p)) * split_floats(grad_outs(p.strict)) : 0;
}

template <bool STRICT>
static cudaError_t launch_gradient(const Shape& shape, const Problem& p, const float* grad, float* terms, float* grad_weight,
                                   float* grad_bias) {
    if constexpr (!GRADIENT_FITS) {
        plain_gradients<<<blocks_of((WEIGHTS + OUT_CHANNELS) * WARP, PLAIN_THREADS), PLAIN_THREADS, 0, p.stream>>>(
            shape, p.x, grad, grad_weight, grad_bias);
    } else {
        constexpr int OUTS = grad_outs(STRICT);
        const int64_t splits = grad_splits(STRICT, shape), bytes = GradientMemory<STRICT, OUTS>::BYTES;
        const auto gradient = weight_gradient<STRICT, OUTS>;
        const cudaError_t error = allow_shared(gradient, bytes);
        if (error != cudaSuccess) return error;
        gradient<<<grad_parts(STRICT) * splits, GRAD_THREADS, bytes, p.stream>>>(shape, p.x, grad, terms);
        add_splits<<<blocks_of(split_floats(OUTS), SUM_TERMS), SUM_WARPS * WARP, 0, p.stream>>>(terms, grad_weight, grad_bias,
                                                                                               splits, OUTS);
    }
    return cudaSuccess;
}

cudaError_t launch_parameter_gradients(const Problem& p, const float* grad, float* terms, float* grad_weight,
                                       float* grad_bias) {
    return (p.strict ? launch_gradient<true> : launch_gradient<false>)(make_shape(p), p, grad, terms, grad_weight, grad_bias);
}
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
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
#define CHECK(condition, ...) TORCH_CHECK(condition, message("alexnet_conv1: ", __VA_ARGS__))

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
    CHECK(tensor.defined(), "expected ", name, " to be a tensor, got None");
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    CHECK(fits, "expected ", name, " as a float32 CUDA tensor of shape ", shape, " (-1: any), got ", tensor.scalar_type(),
          " of shape ", tensor.sizes(), " on ", tensor.device());
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    CHECK(tensor.device() == expected.device(), "expected all on ", expected.device(), ", got ", name, " on ", tensor.device());
}

static void check_blocks(int64_t plain_threads) {
    CHECK(plain_threads / PLAIN_THREADS < (1ll << 31) - 1, plain_threads, " threads are more than a grid has");
}

// The input and weight of a pass, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    at::Tensor x, weight;
    c10::cuda::CUDAGuard guard;
    Problem problem;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, at::IntArrayRef stride, at::IntArrayRef padding)
        : guard(checked(x_in, weight_in, stride, padding)) {
        x = x_in.contiguous(), weight = weight_in.contiguous();
        const int height = x.size(2), width = x.size(3);
        const int out_h = (height + 2 * PAD_H - KERNEL_H) / STRIDE_H + 1, out_w = (width + 2 * PAD_W - KERNEL_W) / STRIDE_W + 1;
        problem = {x.const_data_ptr<float>(), weight.const_data_ptr<float>(), x.size(0), height, width, out_h, out_w,
                   is_strict(), c10::cuda::getCurrentCUDAStream()};
        int major = 0, minor = 0;
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device()));
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, x.get_device()));
        TORCH_CHECK(major == 9 && minor == 0,
                    message("alexnet_conv1 v5: expected a GPU of compute capability 9.0 (Hopper), got ", major, ".", minor,
                            "; v4_tensor_core runs on 8.0 and later"));
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding) {
        check("x", x, {-1, IN_CHANNELS, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
        check_device(x, "weight", weight);
        CHECK(stride == at::IntArrayRef({STRIDE_H, STRIDE_W}) && padding == at::IntArrayRef({PAD_H, PAD_W}),
              "built for stride ", at::IntArrayRef({STRIDE_H, STRIDE_W}), " and padding ", at::IntArrayRef({PAD_H, PAD_W}),
              ", called with ", stride, " and ", padding);
        const int64_t height = x.size(2), width = x.size(3);
        CHECK(height + 2 * PAD_H >= KERNEL_H && width + 2 * PAD_W >= KERNEL_W, "a kernel of ", KERNEL_H, " x ", KERNEL_W,
              " does not fit into an image of ", height, " x ", width, " padded by ", padding);
        CHECK(height < (1ll << 30) && width < (1ll << 30), "expected less than 2^30 rows and columns, got sizes ", x.sizes());
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }
    std::array<int64_t, 4> out_sizes() const { return {problem.batch, OUT_CHANNELS, problem.out_h, problem.out_w}; }
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
    const int64_t floats = packed_floats(call.problem);
    check_blocks(floats ? 0 : out.numel());
    at::Tensor packed = call.empty({floats});
    C10_CUDA_CHECK(launch_convolve(call.problem, bias.defined() ? bias.const_data_ptr<float>() : nullptr, pointer_to(packed),
                                   pointer_to(out)));
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
    const int64_t floats = gradient_floats(call.problem);
    check_blocks(floats ? 0 : 32 * (WEIGHTS + OUT_CHANNELS));
    at::Tensor terms = call.empty({floats});
    C10_CUDA_CHECK(launch_parameter_gradients(call.problem, grad.const_data_ptr<float>(), pointer_to(terms),
                                              pointer_to(grad_weight), pointer_to(grad_bias)));
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

// Autograd, here since Python's would take the host longer than a step takes the GPU. Operators are called through PyTorch's
// dispatcher, where torch.compile sees them. The namespace has no name, or all libraries of the process would share CALL's
// handles: those of inline functions are unique in a process.
namespace {

const std::string LIBRARY = C10_STRINGIZE(TORCH_EXTENSION_NAME);
#define CALL(name, ...)                                                                                                    \
    [&] {                                                                                                                  \
        static const auto handle =                                                                                         \
            c10::Dispatcher::singleton().findSchemaOrThrow((LIBRARY + "::" #name).c_str(), "").typed<decltype(::name)>();  \
        return handle.call(__VA_ARGS__);                                                                                   \
    }()

struct Training : torch::autograd::Function<Training> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        context->save_for_backward({x, weight});
        context->saved_data["has_bias"] = bias.has_value();
        return CALL(conv2d, x, weight, bias, stride, padding);
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grads) {
        const auto saved = context->get_saved_variables();
        const at::Tensor &grad = grads[0], &x = saved[0], &weight = saved[1];
        constexpr std::array<int64_t, 2> stride = {STRIDE_H, STRIDE_W}, padding = {PAD_H, PAD_W};
        const bool has_bias = context->saved_data["has_bias"].toBool();
        const std::array<bool, 2> wanted = {context->needs_input_grad(1), has_bias && context->needs_input_grad(2)};
        at::Tensor grad_x, grad_weight, grad_bias;
        if (context->needs_input_grad(0)) grad_x = CALL(input_grad, grad, x, weight, stride, padding);
        if (wanted[0] || wanted[1])
            std::tie(grad_weight, grad_bias) = CALL(parameter_grads, grad, x, weight, stride, padding, wanted);
        if (!wanted[0]) grad_weight = at::Tensor();
        if (!wanted[1]) grad_bias = at::Tensor();
        return {grad_x, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
    }
};

at::Tensor differentiable_conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                 at::IntArrayRef stride, at::IntArrayRef padding) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !x._fw_grad(0).defined() && !weight._fw_grad(0).defined() && !(bias && bias->_fw_grad(0).defined()),
        "alexnet_conv1: forward-mode derivatives (tangents) are not implemented");
    if (at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad() || (bias && bias->requires_grad())))
        return Training::apply(x, weight, bias, stride, padding);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return CALL(conv2d, x, weight, bias, stride, padding);
}

}  // namespace

TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, Autograd, m) {
    m.impl("conv2d", &differentiable_conv2d);
    for (const char* name : {"parameter_grads", "input_grad"})  // these raise in a backward pass of their own
        m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("conv2d", &conv2d);
    m.impl("parameter_grads", &parameter_grads);
    m.impl("input_grad", &input_grad);
}
"""


def register(namespace):
    """Shapes, for torch.compile."""

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
    sources = NAME, INTERFACE + BINDING, INTERFACE + CUDA, register

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        conv = self.conv1
        constants = {"IN_CHANNELS": conv.in_channels, "OUT_CHANNELS": conv.out_channels}
        for name, values in (("KERNEL", conv.kernel_size), ("STRIDE", conv.stride), ("PAD", conv.padding)):
            constants |= {f"{name}_{axis}": value for axis, value in zip("HW", values, strict=True)}
        hopper = ("-gencode=arch=compute_90a,code=sm_90a",)  # load_inline would build for 9.0, which lacks wgmma
        return build(*self.sources, cuda_cflags=hopper, **constants)

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
