"""conv_pool_sigmoid_sum, v5: the copy engine streams the input once past Hopper's asynchronous tensor cores.

In this text v4 is the first v4, with TF32 operands (see the ladder). Nothing waits for memory here: one warp has the copy
engine (TMA) keep a ring of input rows full, and twelve others turn rows into box sums in registers, which are the left operand
of wgmma as they are. Training costs no second look at the input.

Why it is faster
    v4 moves the input with the same threads that compute, and its tensor-core instruction (mma.sync) reads the weights from
    shared memory anew for every 16 positions. Here copying is one instruction for 26 KB, so that 160 KB are always under way to
    each multiprocessor; four warps share each read of the weights (wgmma, 64 positions); and a lane's box sums of 2 positions
    and 2 channels are its part of the left operand, so sums pass through no memory. What is left is what the hardware can
    stream. What it costs: compute capability 9.0 and no other; lines of 32 columns, or v3's kernels take over.

    design, H200, forward in ms                                    predicted  measured  what bound it
    weights' upper part alone, TF32                                0.142      0.147
    upper and lower parts, NaN-safe rounding in 3 instructions     0.145      0.152     issue slots: 834 of a warp a step
    rounding by an integer addition, no additions of zero          0.143      0.143     memory: 88% of peak (loads: 0.137)
    differences from the middle tap, for accuracy                  0.145      0.146     memory
    strict fp32, three products                                    0.157      0.155     tensor cores 50%, memory 80%
    training, gradient's operands as TF32 in shared memory         0.160      0.186     shared memory: 86% of its cycles
    training, operands as scaled halves                            0.158      0.176     latency of a step's chain
    training, outputs x positions, sums stored once; see below     0.160      0.153     91% of the floor
    the same, next row's sums while the tensor core multiplies     0.156      0.169     not examined
    input gradient, each lane stores its float4                    0.20       0.274     half-written sectors, latency
    input gradient, halves on the tensor core, rows stored by TMA  0.19       0.208     memory (its writes alone: 0.154)
    step with it, sum over samples behind it instead of a launch   0.406      0.406     memory (0.413 before)

    The record has 0.149 for the forward pass and 0.163 for the strict one. In a CUDA graph a training step takes 0.160
    (PyTorch's best is 20.6), with the input gradient 0.406 (30.0); without one 0.209 and 0.407. Autograd in Python takes the
    host longer than the kernels take the GPU. So it is C++ here: side by side, on two H200s, a step took 0.220 and 0.172 ms
    instead of 0.289 and 0.208, at the cost of 8 s more of a compiler. The input gradient's rows stored by one copy instead of
    six: 0.206 for 0.207, dropped. Moving what both forward kernels do at their start into functions gave other registers: 0.148
    and, for the training kernel of that time, 0.196 instead of 0.146 and 0.193 side by side; dropped.

    Training multiplies the other way round, outputs x positions. Box sums then lie in shared memory once, and are the right
    operand of both products; and a lane's delta are its part of the second one's left operand, as they come out of the
    sigmoid. By count, for 64 positions, before and now: shared memory 616 and 480 cycles (and 576 for the input), tensor cores
    768 and 480, issue slots of each of four warps 960 and 750, barriers of a group two and one. Operands take 44 KB less, so
    the ring has six stages, as in the forward pass, instead of four.

Mathematics
    v3's: pooled = bias + w * box, with box sums of the input in place of the convolution's pixels, and
    d out[b] / d w = 1/p^2 * sum over positions of delta * box,  delta = s * (1 - s),  s = sigmoid(pooled)
    The product is wgmma in TF32 (11 bits). Weights, whose rounding would err the same way at every position, are two TF32
    numbers, upper and lower part: w = h + l. Box sums are rounded, which errs at random. But a sum of alike pixels is p times
    as large as what differs in it, and would lose p times as much as a rounded pixel. So all taps but the middle one, m, are
    taken as differences from it, and its sum keeps its lower part, too:
    sum over taps of w[t] * box[t] = sum over t != m of w[t] * (box[t] - box[m]) + (sum over t of w[t]) * box[m]
    Where PyTorch's settings forbid TF32 in convolutions, all have a lower part, and the product is
    l * box_h + h * box_l + h * box_h: what is left out is of the order of 2^-24. The sigmoid is v3's.
    Error against float64, in units of the outputs' spread, weights 8 times as large as usual: 8.5e-6, strict 3.5e-6, eager
    strict 1.1e-6. Gradients in the recorded run, whose inputs are drawn anew each time: of the weights 3.4e-4 of the spread
    (eager with TF32 5.7e-3), of the input 2.3e-3 (4.2e-3) at most at one element, from deltas of 11 bits, as TF32 convolutions
    have. NaN in x gives NaN, and so does an infinity that more than one tap of a window sees.

    Training takes both products in halves, which have TF32's 11 bits but not its range: the same differences and parts as
    above, and for the gradient
    sum of delta * box[t] = sum of delta * (box[t] - box[m]) + sum of delta * box[m]
    Weights are scaled by a power of two that brings the largest below 2^14; delta, at most 1/4, by 2^17; differences and
    middle sums by one that begins at 2^96. When one of them overflows, it becomes what brings the largest of the four warps'
    step below 2^13, what has been summed shrinks with it, and the step's sums are packed again. So any finite input is right
    (what is smaller than 2^-26 of the largest before it in its segment has fewer bits), and the bits depend on nothing but the
    input. A delta below 5e-10 has fewer bits, too, and one below 2e-13 none: where the average is below -21 or -29. It shows
    where all windows of a gradient are so; with TF32 forbidden v3's kernels keep it.

    For the input's gradient the forward pass keeps delta (148 MB), and
    grad_box = w^T * delta, w as two halves with a power of two that brings the largest weight below 2^14;
    grad_x[h,w] = grad_out/p^2 * sum of grad_box over the boxes that hold (h,w), rows first, then columns.

Where to read
    The forward pass is conv_pool_sum, 75 lines: `produce` (one thread and the copy engine) keeps a ring of stages full, BoxSums
    turns their rows into box sums in registers, `multiply` gives these to wgmma, `sigmoids` and `write_sum` end it. Training is
    conv_pool_gradients with struct Gradient; input_gradient is a kernel of its own. `namespace general` holds v3's kernels.

Launches
    kernel               grid                         block  shared  work of a thread
    conv_pool_sum        multiprocessors, or samples  512    193 KB  2 positions x 2 channels of a pooled row at a time
    conv_pool_gradients  the same                     512    210 KB  the same, and 40 elements of 64 x 80 weight gradients
    add_segments         batch x size / 128           128    0       adds a sample's segments, where blocks share samples
    weighted_sum         (parameters / 32)            256    1 KB    v3's, where the input's gradient is not asked for
    input_gradient       multiprocessors, or samples  384    216 KB  2 positions x 2 channels of every row of their windows
                         and (parameters / 128)                      a third of a parameter's samples

    Of the first two kernels' registers the twelve warps that compute have 160 each (setmaxnreg), the others 24; nothing spills.
    All pooled rows of the batch stand in one line, and every block takes an equal part of it: any batch keeps all
    multiprocessors busy. A block's part of a sample, a segment, goes through it as two streams, its upper and lower half:
    2 x 96 positions are three groups of 64. The original's 128 samples take 128 blocks, one each, and no add_segments.

Floor
    Forward: 604 MB in, 0.139 ms on an H200 at 4.35 TB/s; 10.6 GFLOP twice, 0.06 ms of TF32. Memory binds. Weights' gradient:
    the same bytes, 0.139. With the input's gradient also 604 MB out, and delta out and in: 1.5 GB, 0.35 ms.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) on a GPU of compute capability 9.0, batch 0 included; any channels,
    kernel and pool size that the original takes. The tensor-core kernels are for at most 8 channels in and 64 out, at most 9
    taps, a kernel at most one larger than the window, windows of an even width up to 8 and at most 16 pixels, and images whose
    width is a multiple of 32; for all else v3's kernels are in this file, too, also for strict gradients, and for the input's
    gradient of images wider than 96 windows. Anything else raises before a launch. Trains, and computes only the gradients that
    are asked for; second derivatives raise, and so do forward-mode ones. Deterministic.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv_pool_sigmoid_sum_v5_hopper"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W. What the tensor-core kernels are made for; all else goes
// through the general kernels at the end.
#define FITS_TENSOR_CORES                                                                                                      \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 64 && KERNEL_H * KERNEL_W <= 9 && KERNEL_H <= POOL_H + 1 && KERNEL_W <= POOL_W + 1 && \
     POOL_W % 2 == 0 && POOL_W <= 8 && POOL_H * POOL_W <= 16)

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

#if FITS_TENSOR_CORES

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- geometry
constexpr int TAPS = KERNEL_H * KERNEL_W, WEIGHTS = IN_CHANNELS * TAPS, PARAMETERS = OUT_CHANNELS * (WEIGHTS + 1);
constexpr int OVERLAP = KERNEL_H - 1;      // rows that a pooled row's boxes share with the next one's
constexpr int FRESH = POOL_H - OVERLAP;    // rows that belong to one pooled row alone
constexpr int CHANNELS = 8, OUTPUTS = 64;  // of the tensor core's tiles; missing ones are zeros
constexpr int WARP_POSITIONS = 16, TILE_WARPS = 6, TILE_POSITIONS = TILE_WARPS * WARP_POSITIONS;
constexpr int STREAMS = 2, CONSUMER_WARPS = STREAMS * TILE_WARPS, CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int GROUPS = CONSUMER_WARPS / 4, THREADS = CONSUMERS + 128;

// ---- shared memory: a ring of stages, weights, operands of the gradient's product, and what is left
constexpr int LINE = 128;                                                         // bytes; a row of a tensor-map box
constexpr int BLOCKS = ceil_div(TILE_POSITIONS * POOL_W + KERNEL_W - 1, 32) | 1;  // lines a row and channel; odd, so that the
                                                                                  // swizzle differs from channel to channel
constexpr int ROW_BYTES = CHANNELS * BLOCKS * LINE;
constexpr int STAGE_ROWS = OVERLAP % 2 == 0 && FRESH % 2 == 0 && 8 * ROW_BYTES <= 128 * 1024 ? 2 : 1,
              STAGE_BYTES = STAGE_ROWS * ROW_BYTES;
constexpr int WEIGHT_BYTES = TAPS * CHANNELS * OUTPUTS * 4;  // of the upper parts, and again of the lower ones
constexpr int CORE = 128, SLAB = 8 * CORE;                   // a core matrix, 8 rows x 16 bytes; 64 rows x 8 columns of halves
constexpr int INNER_SLABS = 2 * ceil_div(1 + TAPS, 2), HALF_WEIGHT_BYTES = INNER_SLABS * SLAB;
constexpr int SUM_COLUMNS = 80, SUMS_BYTES = SLAB + SUM_COLUMNS / 8 * SLAB;
constexpr int ONES = SUM_COLUMNS - 8;  // this column's product is the gradient of the bias

template <bool TRAINING>
struct Shared {
    static constexpr int WEIGHTS = 2 * (TRAINING ? HALF_WEIGHT_BYTES : WEIGHT_BYTES), SUMS = TRAINING ? GROUPS * SUMS_BYTES : 0;
    static constexpr int REST = OUTPUTS * 4 + 16 * 4 + (32 + GROUPS) * 8;  // biases, a float a warp, barriers
    static constexpr int LIMIT = 227 * 1024, FREE = LIMIT - WEIGHTS - SUMS - REST;
    static constexpr int STAGES = FREE / STAGE_BYTES / STREAMS * STREAMS < 16 ? FREE / STAGE_BYTES / STREAMS * STREAMS : 16;
    static constexpr int WEIGHT_AT = STAGES * STAGE_BYTES, SUMS_AT = WEIGHT_AT + WEIGHTS;
    static constexpr int REST_AT = SUMS_AT + SUMS, BYTES = REST_AT + REST;
    static_assert(STAGES >= 4, "the ring holds what a stream reads for one pooled row");
};

// ---- instructions
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, int block, int channel, int row, int sample,
                                         uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::
            "r"(to),
        "l"(&map), "r"(0), "r"(block), "r"(channel), "r"(row), "r"(sample), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
__device__ __forceinline__ void named_barrier(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// As named_barrier; returns whether any thread's value is true.
__device__ __forceinline__ bool named_barrier_or(int name, int threads, bool value) {
    uint32_t any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %3, 0;\nbar.red.or.pred any, %1, %2, mine;\nselp.u32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(name), "r"(threads), "r"(static_cast<uint32_t>(value))
        : "memory");
    return any;
}
__device__ __forceinline__ float4 load4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
__device__ __forceinline__ float2 load2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
// Four matrices of 8 rows x 16 bytes; lane 8 * i + r has the address of row r of matrix i.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t* words) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
__device__ __forceinline__ void store4(uint32_t address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// The lower halves of a and b, or the upper ones.
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
__device__ __forceinline__ float to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}
// The same for all but NaN, in one instruction instead of three: the tensor core ignores the lower 13 bits. The NaN that
// arithmetic makes (0x7fffffff) overflows to a zero.
__device__ __forceinline__ float to_tf32_if_number(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define EIGHT(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d (64 positions x 64 outputs) = or += a (64 x 8, in registers) * b (8 x 64, in shared memory).
__device__ __forceinline__ void mma_positions(float (&d)[32], const float (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, "
        "%26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, accumulate, 1, 1;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "l"(b), "r"(accumulate));
}

// d (64 outputs x 64 positions) = or += a (64 x 16) * b (16 x 64), halves in shared memory.
__device__ __forceinline__ void mma_outputs(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, "
        "%26, %27, %28, %29, %30, %31}, %32, %33, accumulate, 1, 1, 0, 0;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
        : "l"(a), "l"(b), "r"(accumulate));
}

// d (64 outputs x 80 sums) += a (64 x 16 positions, in registers) * b (16 positions x 80, rows contiguous), halves.
__device__ __forceinline__ void mma_gradient(float (&d)[40], const uint32_t* a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), EIGHT(d, 32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Descriptors of a matrix without swizzle, made of core matrices of 8 rows x 16 bytes: distances of those adjacent in k, and of
// those adjacent in the rows. Addresses have 18 bits, so an offset never carries beyond its field.
template <int ADJACENT_K, int ADJACENT_ROWS>
struct Operand {
    uint32_t first;

    __device__ __forceinline__ explicit Operand(uint32_t address) : first(address >> 4 | ADJACENT_K >> 4 << 16) {}
    __device__ __forceinline__ uint64_t at(int offset) const {
        return static_cast<uint64_t>(ADJACENT_ROWS >> 4) << 32 | (first + (offset >> 4));
    }
};

// ---- the work, and who does it
// All pooled rows of all samples, and of all column tiles of each, stand in one line. A block takes an equal part of it; a
// segment is the part of one image (a column tile of a sample) in one block, and its two halves are the block's two streams.
struct Shape {
    int batch, height, width, rows, columns, tiles, blocks;  // rows, columns: of pooled positions
};
__device__ __forceinline__ int64_t images(const Shape& s) { return static_cast<int64_t>(s.batch) * s.tiles; }
__device__ __forceinline__ int64_t first_row(const Shape& s, int block) { return images(s) * s.rows * block / s.blocks; }

struct Segment {
    int sample, tile, slot;
    int start, count;  // pooled rows

    __device__ __forceinline__ int steps() const { return (count + 1) / 2; }
    __device__ __forceinline__ int first(int stream) const { return start + stream * steps(); }  // of a stream
    __device__ __forceinline__ int rows(int stream) const { return stream ? count / 2 : steps(); }
};

// The block's segments, one after another: `line` is the row at which the next one begins.
__device__ __forceinline__ Segment segment_at(const Shape& s, int64_t line, int64_t end) {
    const int64_t image = line / s.rows;
    Segment segment;
    segment.sample = static_cast<int>(image / s.tiles);
    segment.tile = static_cast<int>(image % s.tiles);
    segment.slot = static_cast<int>(image) + (images(s) % s.blocks ? blockIdx.x : 0);
    segment.start = static_cast<int>(line - image * s.rows);
    segment.count = end - line < s.rows - segment.start ? static_cast<int>(end - line) : s.rows - segment.start;
    return segment;
}

template <int STAGES>
struct Ring {
    uint32_t data, full, empty;  // shared addresses
    int stage;
    uint32_t parity = 0;

    __device__ __forceinline__ Ring(uint32_t data, uint32_t barriers, int stream)
        : data(data), full(barriers), empty(barriers + 8 * STAGES), stage(stream) {}
    __device__ __forceinline__ uint32_t address() const { return data + stage * STAGE_BYTES; }
    __device__ __forceinline__ void advance() {
        stage += STREAMS;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// One thread keeps the ring full: rows of both streams in the order in which they are consumed.
template <int STAGES>
__device__ void produce(const CUtensorMap& x, const Shape& shape, uint32_t data, uint32_t barriers) {
    Ring<STAGES> rings[STREAMS] = {{data, barriers, 0}, {data, barriers, 1}};
    const int64_t end = first_row(shape, blockIdx.x + 1);
    for (int64_t line = first_row(shape, blockIdx.x); line < end;) {
        const Segment segment = segment_at(shape, line, end);
        line += segment.count;
        const int rows = segment.steps() * POOL_H + OVERLAP;
        for (int row = 0; row < rows; row += STAGE_ROWS)
#pragma unroll
            for (int stream = 0; stream < STREAMS; ++stream) {
                Ring<STAGES>& ring = rings[stream];
                wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
                expect_bytes(ring.full + 8 * ring.stage, STAGE_BYTES);
                const bool needed = segment.rows(stream) && row < segment.rows(stream) * POOL_H + OVERLAP;
                // Below the image the copy engine writes zeros and reads nothing.
                const int y = needed ? segment.first(stream) * POOL_H + row : shape.height;
                load_box(ring.address(), x, segment.tile * TILE_WARPS * WARP_POSITIONS * POOL_W / 32, 0, y, segment.sample,
                         ring.full + 8 * ring.stage);
                ring.advance();
            }
    }
}

// ---- box sums in registers
// A lane has two neighbouring positions (`member`) and two channels: q and q + 4, with q = lane % 4. What it needs of a row
// begins 16-byte aligned. Lines are swizzled: 16-byte chunk i of a line stands at i ^ (line % 8).
constexpr int SPAN = 2 * POOL_W + KERNEL_W - 1, CHUNKS = ceil_div(SPAN, 4);

struct Lane {
    int lane, q, pair, warp, stream;  // pair: of positions in the warp's 16; warp: in the tile
    uint32_t chunk[CHUNKS];           // offsets in a row, for channel q

    __device__ __forceinline__ explicit Lane(int consumer_warp)
        : lane(threadIdx.x % 32), q(lane % 4), warp(consumer_warp % TILE_WARPS), stream(consumer_warp / TILE_WARPS) {
        // Neighbouring pairs are spread so that the quarter-warps of a 16-byte load touch all banks.
        pair = pair_of(lane / 4);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            const int column = (warp * WARP_POSITIONS + 2 * pair) * POOL_W + 4 * i, line = q * BLOCKS + column / 32;
            chunk[i] = line * LINE + ((column / 4 % 8 ^ line % 8) << 4);
        }
    }
    __device__ __forceinline__ static int pair_of(int n) { return (n & 4) | (n & 1) << 1 | (n >> 1 & 1); }
    __device__ __forceinline__ int position(int member) const { return warp * WARP_POSITIONS + 2 * pair + member; }
};

using RowSums = float[2][KERNEL_W];  // [member][offset]: sums of POOL_W values of a row
using Sums = float[TAPS][4];         // [tap][2 * half + member]: fragments of the product's left operand

// Values between the first and the last offset's windows are common to all; a window adds some on the left and on the right.
// `half` 1 is channel q + 4: as many lines further as are 4 modulo 8, which turns one bit of the swizzle.
__device__ __forceinline__ void sum_row(uint32_t row, const uint32_t (&chunk)[CHUNKS], int half, RowSums& sums) {
    static_assert(BLOCKS % 2 == 1 && ROW_BYTES % 1024 == 0, "4 * BLOCKS is 4 modulo 8; rows begin where the swizzle does");
    float x[4 * CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const uint32_t address = half ? ((row + chunk[i]) ^ 64) + 4 * BLOCKS * LINE : row + chunk[i];
        if (SPAN - 4 * i > 2) {
            const float4 v = load4(address);
            x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
        } else {
            const float2 v = load2(address);
            x[4 * i] = v.x, x[4 * i + 1] = v.y;
        }
    }
#pragma unroll
    for (int member = 0; member < 2; ++member) {
        const float* v = x + member * POOL_W;
        float left[KERNEL_W], right[KERNEL_W], common = POOL_W >= KERNEL_W ? v[KERNEL_W - 1] : 0;
#pragma unroll
        for (int i = KERNEL_W; i < POOL_W; ++i) common += v[i];
#pragma unroll
        for (int e = KERNEL_W - 2; e >= 0; --e) left[e] = e == KERNEL_W - 2 ? v[e] : v[e] + left[e + 1];
#pragma unroll
        for (int e = 1; e < KERNEL_W; ++e) right[e] = e == 1 ? v[POOL_W] : right[e - 1] + v[POOL_W + e - 1];
#pragma unroll
        for (int e = 0; e < KERNEL_W; ++e) {
            float sum = common;
            if (e < KERNEL_W - 1) sum = POOL_W >= KERNEL_W ? left[e] + sum : left[e];
            if (e > 0) sum = POOL_W >= KERNEL_W || e < KERNEL_W - 1 ? sum + right[e] : right[e];
            sums[member][e] = sum;
        }
    }
}

template <int STAGES>
struct BoxSums {
    Sums sums;                     // of the pooled row at hand
    RowSums pending[KERNEL_H][2];  // of the next one: [first row of the kernel][half], what its first rows have given
    Ring<STAGES> ring;
    const Lane& lane;
    float touched;                       // a sum that needs all that was read of the stage at hand
    bool wild, next_wild = false;        // NaN or infinity among what was read for the pooled row at hand, and for the next one

    __device__ __forceinline__ BoxSums(const Ring<STAGES>& ring, const Lane& lane) : ring(ring), lane(lane) {}

    __device__ __forceinline__ uint32_t enter(int row) {
        if (row % STAGE_ROWS == 0) {
            wait(ring.full + 8 * ring.stage, ring.parity);
        }
        return ring.address() + row % STAGE_ROWS * ROW_BYTES;
    }
    __device__ __forceinline__ void touch(int row, int half, const RowSums& sum) {
        const float all = sum[0][0] + sum[1][0] + sum[1][KERNEL_W - 1];
        touched = row % STAGE_ROWS == 0 && half == 0 ? all : touched + all;
    }

    // Gives the stage back. The copy engine may then overwrite it, also while a load that was issued before is still under way.
    // So the lane that arrives is chosen by the values themselves: it cannot be known before they are there.
    __device__ __forceinline__ void leave(int row) {
        if (row % STAGE_ROWS != STAGE_ROWS - 1) return;
        const bool is_wild = !(fabsf(touched) < INFINITY);
        wild |= is_wild;
        next_wild |= is_wild;
        const uint32_t odd = __ballot_sync(~0u, __float_as_uint(touched) & 1);
        __syncwarp();
        if (lane.lane == (odd ? __ffs(odd) - 1 : 0)) arrive(ring.empty + 8 * ring.stage);
        ring.advance();
    }

    // The rows that belong to this pooled row alone complete what is pending.
    __device__ __forceinline__ void fresh_rows() {
        wild = next_wild;
        RowSums total[2] = {};
#pragma unroll
        for (int row = 0; row < FRESH; ++row) {
            const uint32_t address = enter(row);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                RowSums sum;
                sum_row(address, lane.chunk, half, sum);
                touch(row, half, sum);
#pragma unroll
                for (int i = 0; i < 2 * KERNEL_W; ++i)
                    total[half][i % 2][i / 2] = row ? total[half][i % 2][i / 2] + sum[i % 2][i / 2] : sum[i % 2][i / 2];
            }
            leave(row);
        }
#pragma unroll
        for (int d = 0; d < KERNEL_H; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < 2 * KERNEL_W; ++i) {
                    const float all = total[half][i % 2][i / 2];
                    sums[d * KERNEL_W + i / 2][2 * half + i % 2] = d < OVERLAP ? pending[d][half][i % 2][i / 2] + all : all;
                }
    }

    // The rows that this pooled row shares with the next one.
    __device__ __forceinline__ void shared_rows() {
        next_wild = false;
#pragma unroll
        for (int row = 0; row < OVERLAP; ++row) {
            const uint32_t address = enter(row);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                RowSums sum;
                sum_row(address, lane.chunk, half, sum);
                touch(row, half, sum);
#pragma unroll
                for (int d = 0; d < KERNEL_H; ++d)
#pragma unroll
                    for (int i = 0; i < 2 * KERNEL_W; ++i) {
                        const float value = sum[i % 2][i / 2];
                        float& next = pending[d][half][i % 2][i / 2];
                        if (d > row)
                            sums[d * KERNEL_W + i / 2][2 * half + i % 2] += value;
                        else
                            next = d == row ? value : next + value;
                    }
            }
            leave(row);
        }
    }
};

// ---- the product, the sigmoid and the sum
constexpr float MINUS_LOG2_E = -1.4426950408889634f;
constexpr float DELTA_SCALE = 131072;  // 2^17: as a half, sigmoid' has 11 bits down to 5e-10

__device__ __forceinline__ float scaled_weight(const float* weight, int i) {
    return weight[i] * (MINUS_LOG2_E / (POOL_H * POOL_W));
}

// The product takes the sums of all taps but the middle one as differences from it, which are small where neighbouring pixels
// are alike, and so lose less to rounding; the middle one's weight is then the sum of all.
constexpr int MIDDLE = TAPS / 2;

__device__ __forceinline__ float product_weight(const float* weight, int o, int c, int tap) {
    float w = 0;
#pragma unroll
    for (int t = 0; o < OUT_CHANNELS && c < IN_CHANNELS && t < TAPS; ++t)
        if (t == tap || tap == MIDDLE) w += scaled_weight(weight, (o * IN_CHANNELS + c) * TAPS + t);
    return w;
}

// weight[o][c][tap] as right operands of one product a tap: 8 x 4 core matrices, those adjacent in k OUTPUTS * 16 bytes apart.
__device__ void store_weights(const float* weight, char* to) {
    for (int i = threadIdx.x; i < TAPS * CHANNELS * OUTPUTS; i += CONSUMERS) {
        const int o = i % OUTPUTS, c = i / OUTPUTS % CHANNELS, tap = i / (OUTPUTS * CHANNELS);
        const float w = product_weight(weight, o, c, tap), high = to_tf32(w);
        const int at = tap * OUTPUTS * 32 + c / 4 * OUTPUTS * 16 + o / 8 * 128 + o % 8 * 16 + c % 4 * 4;
        *reinterpret_cast<float*>(to + at) = high;
        *reinterpret_cast<float*>(to + WEIGHT_BYTES + at) = to_tf32(w - high);
    }
}

// Two products, or three where the sums have a lower part: the middle tap's always, all in strict mode. Small terms come first.
template <bool STRICT>
__device__ __forceinline__ void multiply(float (&d)[32], const Sums& high, const Sums& low,
                                         const Operand<OUTPUTS * 16, 128>& weights) {
    constexpr int TAP = OUTPUTS * 32;
    mma_fence();
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) mma_positions(d, high[tap], weights.at(WEIGHT_BYTES + tap * TAP), tap > 0);
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
        if (STRICT || tap == MIDDLE) mma_positions(d, low[tap], weights.at(tap * TAP), 1);
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) mma_positions(d, high[tap], weights.at(tap * TAP), 1);
    mma_commit();
}

// d becomes the sigmoids of the pooled values. `biases` are scaled like the weights.
__device__ __forceinline__ void sigmoids(float (&d)[32], uint32_t biases) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 bias = load2(biases + 32 * i);
#pragma unroll
        for (int k = 0; k < 4; ++k) d[4 * i + k] = reciprocal(1 + power_of_2(d[4 * i + k] + (k % 2 ? bias.y : bias.x)));
    }
}

__device__ __forceinline__ uint32_t half_pair(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
}

// ---- the forward pass
struct Tensors {
    const float *weight, *bias;
    float *partial_sums, *gradients;  // one, and PARAMETERS, a segment
    uint4* deltas;
};

template <int STAGES>
__device__ __forceinline__ void init_ring(uint32_t barriers) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(barriers + 8 * i, 1);
        barrier_init(barriers + 8 * (STAGES + i), TILE_WARPS);
    }
}

// What lies beyond the image's last window may be anything, and must not count.
__device__ __forceinline__ void clear_outside(Sums& sums, const bool (&inside)[2]) {
#pragma unroll
    for (int i = 0; i < 4 * TAPS; ++i) sums[i / 4][i % 4] = inside[i % 2] ? sums[i / 4][i % 4] : 0;
}

// Writes the sum of all consumers' values. The next call needs a barrier before it.
__device__ __forceinline__ void write_sum(float value, float* warp_sums, float* to) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    named_barrier(1, CONSUMERS);
    if (threadIdx.x == 0) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < CONSUMER_WARPS; ++i) sum += warp_sums[i];
        *to = sum;
    }
}

template <bool STRICT>
__global__ void __launch_bounds__(THREADS, 1)
    conv_pool_sum(const __grid_constant__ CUtensorMap x, const Shape shape, const Tensors t) {
    using Memory = Shared<false>;
    constexpr int STAGES = Memory::STAGES;
    extern __shared__ __align__(1024) char memory[];
    float* const biases = reinterpret_cast<float*>(memory + Memory::REST_AT);
    float* const warp_sums = biases + OUTPUTS;
    const uint32_t data = shared_address(memory), barriers = shared_address(warp_sums + 16);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        init_ring<STAGES>(barriers);
        barrier_init_fence();
    }
    __syncthreads();
    if (warp >= CONSUMER_WARPS) {
        give_registers<24>();
        if (threadIdx.x == CONSUMERS) produce<STAGES>(x, shape, data, barriers);
        return;
    }
    take_registers<160>();
    store_weights(t.weight, memory + Memory::WEIGHT_AT);
    for (int o = threadIdx.x; o < OUTPUTS; o += CONSUMERS)  // the sigmoid of an output that does not exist is zero
        biases[o] = o < OUT_CHANNELS ? MINUS_LOG2_E * t.bias[o] : INFINITY;
    async_proxy_fence();
    named_barrier(1, CONSUMERS);

    const Lane lane(warp);
    BoxSums<STAGES> box(Ring<STAGES>(data, barriers, lane.stream), lane);
    const int64_t end = first_row(shape, blockIdx.x + 1);
    for (int64_t line = first_row(shape, blockIdx.x); line < end;) {
        const Segment segment = segment_at(shape, line, end);
        line += segment.count;
        const int count = segment.rows(lane.stream);
        const int columns = shape.columns - segment.tile * TILE_POSITIONS;
        const bool whole = (lane.warp + 1) * WARP_POSITIONS <= columns;  // the warp has no position beyond the image
        const bool inside[2] = {lane.position(0) < columns, lane.position(1) < columns};
        float total = 0;
        box.shared_rows();
#pragma unroll 1
        for (int step = 0; step < segment.steps(); ++step) {
            box.fresh_rows();
            box.shared_rows();
            if (!whole) clear_outside(box.sums, inside);
            Sums high, low;
#pragma unroll
            for (int i = 0; i < 4 * TAPS; ++i) {
                float& sum = box.sums[i / 4][i % 4];
                if (i / 4 != MIDDLE) sum -= box.sums[MIDDLE][i % 4];
                high[i / 4][i % 4] = to_tf32_if_number(sum);
            }
            if (!whole || __any_sync(~0u, box.wild)) {
#pragma unroll
                for (int i = 0; i < 4 * TAPS; ++i) high[i / 4][i % 4] = to_tf32(box.sums[i / 4][i % 4]);
            }
#pragma unroll
            for (int i = 0; i < 4 * TAPS; ++i)
                if (STRICT || i / 4 == MIDDLE) {
                    // The tensor core ignores the lower bits of `high`; here they have to be cleared.
                    const float upper = __uint_as_float(__float_as_uint(high[i / 4][i % 4]) & 0xffffe000u);
                    low[i / 4][i % 4] = to_tf32_if_number(box.sums[i / 4][i % 4] - upper);
                }
            float d[32];
            multiply<STRICT>(d, high, low, Operand<OUTPUTS * 16, 128>(shared_address(memory) + Memory::WEIGHT_AT));
            mma_wait<0>();
            sigmoids(d, shared_address(biases) + 8 * lane.q);
            if (!whole || step >= count) {
#pragma unroll
                for (int i = 0; i < 32; ++i) d[i] = step < count && inside[i / 2 % 2] ? d[i] : 0;
            }
#pragma unroll
            for (int i = 0; i < 32; ++i) total += d[i];
        }
        named_barrier(1, CONSUMERS);  // the last segment's sums have been read
        write_sum(total, warp_sums, t.partial_sums + segment.slot);
    }
}

// ---- the forward pass with the gradients of weights and bias, a group of four warps and their 64 positions at a time
// exponents (64 outputs x 64 positions) = weights * sums, and gradients (64 outputs x 80) += delta * sums: the sums lie in
// shared memory once, and are the right operand of both products, transposed in the second. A lane's part of the first
// product's result is its part of the second one's left operand, so delta passes through no memory.
// All are halves, which have TF32's precision but not its range. So the weights carry a power of two, and the sums another,
// which shrinks, with what has been summed so far, when a sum overflows. It starts larger than most will need.
constexpr int WEIGHT_EXPONENT = 14, SUM_EXPONENT = 13;  // the powers of two bring the largest below these
constexpr int LARGEST_SHIFT = 96, LARGEST_WEIGHT_SHIFT = 120;
constexpr float FIRST_SCALE = 0x1p96f;

// The power of two that brings `largest` just below 2^exponent; at most 2^limit.
__device__ __forceinline__ float scale_to(float largest, int exponent, int limit) {
    const int shift = exponent + 126 - static_cast<int>(__float_as_uint(largest) >> 23);  // largest < 2^(its exponent - 126)
    return __uint_as_float(static_cast<uint32_t>((shift < limit ? shift : limit) + 127) << 23);
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, offset));
    return v;
}

// Columns of a tap: channel 0, 4, 1, 5, ..., since a lane has channels q and q + 4.
__device__ __forceinline__ int column_of(int channel) { return channel % 4 * 2 + channel / 4; }

// Where an element of a matrix with 64 rows is, from its first byte: slabs of 8 columns, each of 8 core matrices.
__device__ __forceinline__ int half_at(int row, int slab, int column) {
    return slab * SLAB + row / 8 * CORE + row % 8 * 16 + column * 2;
}

// The weights as left operands, upper and lower parts; returns their power of two. The inner index is that of the sums' slabs:
// the middle tap's lower parts, then the taps.
__device__ float store_half_weights(const float* weight, float* warp_largest, char* to) {
    constexpr int COUNT = ceil_div(TAPS * CHANNELS * OUTPUTS, CONSUMERS);
    float w[COUNT], largest = 0;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const int i = threadIdx.x + k * CONSUMERS;
        w[k] = i < TAPS * CHANNELS * OUTPUTS
                   ? product_weight(weight, i % OUTPUTS, i / OUTPUTS % CHANNELS, i / (OUTPUTS * CHANNELS))
                   : 0;
        largest = fmaxf(largest, fabsf(w[k]));
    }
    for (int i = threadIdx.x; i < 2 * HALF_WEIGHT_BYTES / 16; i += CONSUMERS)
        reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
    named_barrier(1, CONSUMERS);
    for (int i = 0; i < CONSUMER_WARPS; ++i) largest = fmaxf(largest, warp_largest[i]);
    const float scale = scale_to(largest, WEIGHT_EXPONENT, LARGEST_WEIGHT_SHIFT);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        const int i = threadIdx.x + k * CONSUMERS, o = i % OUTPUTS, c = i / OUTPUTS % CHANNELS, tap = i / (OUTPUTS * CHANNELS);
        if (i >= TAPS * CHANNELS * OUTPUTS) break;
        const float scaled = w[k] * scale;
        const __half high = __float2half_rn(scaled), low = __float2half_rn(scaled - __half2float(high));
        *reinterpret_cast<__half*>(to + half_at(o, 1 + tap, column_of(c))) = high;
        *reinterpret_cast<__half*>(to + HALF_WEIGHT_BYTES + half_at(o, 1 + tap, column_of(c))) = low;
        if (tap == MIDDLE) *reinterpret_cast<__half*>(to + half_at(o, 0, column_of(c))) = high;
    }
    return scale;
}

// A group's four warps.
struct Gradient {
    float values[40];                   // this lane's part of 64 outputs x (8 columns a tap, and a column of ones)
    float scale, unit;                  // of the sums; what takes both powers of two out of the first product
    float weight_unit;                  // takes out that of the weights
    uint32_t mine;                      // where this lane's row of the first four matrices of sums is
    Operand<SLAB, CORE> weights, sums;  // sums: [position][column], slabs of 8 columns, the middle tap's lower parts first
    Operand<CORE, SLAB> transposed;     // the same without the lower parts
    int barrier;
    uint32_t unread, parity = 0;  // an mbarrier at which each warp arrives when its products have read the sums
    float* warp_largest;

    __device__ __forceinline__ Gradient(uint32_t weights, uint32_t sums, uint32_t unread, float* warp_largest,
                                        float weight_scale, const Lane& lane, int group)
        : weight_unit(1 / weight_scale), weights(weights), sums(sums), transposed(sums + SLAB), barrier(2 + group),
          unread(unread), warp_largest(warp_largest) {
        mine = sums + lane.lane / 16 * SLAB + (threadIdx.x / 32 % 4 * 2 + lane.lane / 8 % 2) * CORE + lane.lane % 8 * 16;
    }

    // The unit is finite and not zero, so that of what overflows here or is too small to matter no NaN comes.
    __device__ __forceinline__ void set_scale(float to) {
        scale = to;
        unit = fminf(fmaxf(1 / scale * weight_unit, 0x1p-126f), 0x1p127f);
    }

    __device__ __forceinline__ void clear() {
        set_scale(FIRST_SCALE);
#pragma unroll
        for (int i = 0; i < 40; ++i) values[i] = 0;
    }

    // Pairs of halves, of the lane's two channels: [slab][member]. Returns whether one is not finite.
    __device__ __forceinline__ bool pack(const Sums& from, uint32_t (&words)[2 * INNER_SLABS]) const {
        const __half2 zero = __floats2half2_rn(0, 0);
        __half2 checks[3] = {zero, zero, zero};  // sums of products with zero, which are NaN for what is not finite
        float middle[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) middle[i] = from[MIDDLE][i] * scale;
#pragma unroll
        for (int i = 2 + 2 * TAPS; i < 2 * INNER_SLABS; ++i) words[i] = 0;
#pragma unroll
        for (int i = 0; i < 2 * TAPS; ++i) {
            const int tap = i / 2, member = i % 2;
            const float a = tap == MIDDLE ? middle[member] : fmaf(from[tap][member], scale, -middle[member]);
            const float b = tap == MIDDLE ? middle[2 + member] : fmaf(from[tap][2 + member], scale, -middle[2 + member]);
            const __half2 pair = __floats2half2_rn(a, b);
            words[2 + i] = *reinterpret_cast<const uint32_t*>(&pair);
            if (tap == MIDDLE) words[member] = half_pair(a - __low2float(pair), b - __high2float(pair));
            checks[i % 3] = __hfma2(pair, zero, checks[i % 3]);
        }
        const __half2 check = __hadd2(__hadd2(checks[0], checks[1]), checks[2]);
        return *reinterpret_cast<const uint32_t*>(&check) & 0x7fff7fff;
    }

    __device__ __forceinline__ void store(const uint32_t (&words)[2 * INNER_SLABS]) const {
#pragma unroll
        for (int i = 0; i < INNER_SLABS / 2; ++i) store_matrices(mine + i * 2 * SLAB, words + 4 * i);
        async_proxy_fence();
    }

    // Halves hold the group's sums with the new scale, but for those that are no numbers.
    __device__ void shrink(const Sums& from) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < 4 * TAPS; ++i) {
            const float sum = fabsf(i / 4 == MIDDLE ? from[MIDDLE][i % 4] : from[i / 4][i % 4] - from[MIDDLE][i % 4]);
            if (sum < INFINITY) largest = fmaxf(largest, sum);
        }
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32 % 4] = largest;
        named_barrier(barrier, 128);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, warp_largest[i]);
        const float smaller = fminf(scale, scale_to(largest, SUM_EXPONENT, LARGEST_SHIFT));
#pragma unroll
        for (int i = 0; i < 36; ++i) values[i] *= smaller / scale;
        set_scale(smaller);
    }

    // Waits for this warp's part of the last step's products.
    __device__ __forceinline__ void finish(const Lane& lane) const {
        mma_wait<0>();
        __syncwarp();
        if (lane.lane == 0) arrive(unread);
    }

    // Once all have read the last step's sums. The barrier lets all multiply, and asks whether a sum overflowed.
    __device__ __forceinline__ void store_sums(const Sums& from) {
        uint32_t words[2 * INNER_SLABS];
        const bool overflow = pack(from, words);
        wait(unread, parity);
        parity ^= 1;
        store(words);
        if (named_barrier_or(barrier, 128, overflow)) {
            shrink(from);
            pack(from, words);
            store(words);
            named_barrier(barrier, 128);
        }
    }

    // Small terms first.
    __device__ __forceinline__ void multiply_weights(float (&d)[32]) const {
        mma_fence();
#pragma unroll
        for (int k = 0; k < INNER_SLABS; k += 2)
            mma_outputs(d, weights.at(HALF_WEIGHT_BYTES + k * SLAB), sums.at(k * SLAB), k > 0);
#pragma unroll
        for (int k = 0; k < INNER_SLABS; k += 2) mma_outputs(d, weights.at(k * SLAB), sums.at(k * SLAB), 1);
        mma_commit();
        mma_wait<0>();
    }

    __device__ __forceinline__ void multiply_deltas(const uint32_t (&deltas)[16]) {
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) mma_gradient(values, deltas + 4 * k, transposed.at(k * 2 * CORE));
        mma_commit();
    }
};

// The sums' columns that no tap fills: one of ones, and zeros.
__device__ void store_constant_columns(char* sums) {
    for (int i = threadIdx.x % 128; i < (SUM_COLUMNS / 8 - TAPS) * SLAB / 2; i += 128)
        reinterpret_cast<__half*>(sums + (1 + TAPS) * SLAB)[i] =
            __float2half_rn(i / (SLAB / 2) == ONES / 8 - TAPS && i % 8 == 0 ? 1 : 0);
}

// The segment's gradients, from the accumulators of all groups, which are added in `scratch` one after another.
__device__ void write_gradients(const Gradient& gradient, float* scratch, const Lane& lane, const Tensors& t, int slot) {
    static_assert(OUTPUTS * SUM_COLUMNS * 4 <= GROUPS * SUMS_BYTES, "they lie where the sums were");
    const int row = threadIdx.x / 32 % 4 * 16 + lane.lane / 4;
#pragma unroll 1
    for (int group = 0; group < GROUPS; ++group) {
        if (static_cast<int>(threadIdx.x) / 128 == group)
#pragma unroll
            for (int i = 0; i < 40; ++i) {
                float& sum = scratch[(row + i / 2 % 2 * 8) * SUM_COLUMNS + i / 4 * 8 + 2 * lane.q + i % 2];
                const float value =
                    gradient.values[i] * (1 / DELTA_SCALE) * (i < 36 ? 1 / gradient.scale / (POOL_H * POOL_W) : 1);
                sum = group ? sum + value : value;
            }
        named_barrier(1, CONSUMERS);
    }
    for (int i = threadIdx.x; i < PARAMETERS; i += CONSUMERS) {
        const bool is_weight = i < OUT_CHANNELS * WEIGHTS;
        const int o = is_weight ? i / WEIGHTS : i - OUT_CHANNELS * WEIGHTS, tap = i % TAPS;
        const int column = column_of(i % WEIGHTS / TAPS);
        const float* const sums = scratch + o * SUM_COLUMNS;
        float sum = sums[is_weight ? 8 * tap + column : ONES];
        if (is_weight && tap != MIDDLE) sum += sums[8 * MIDDLE + column];
        t.gradients[static_cast<int64_t>(slot) * PARAMETERS + i] = sum;
    }
}

template <bool SAVING>
__global__ void __launch_bounds__(THREADS, 1)
    conv_pool_gradients(const __grid_constant__ CUtensorMap x, const Shape shape, const Tensors t) {
    using Memory = Shared<true>;
    constexpr int STAGES = Memory::STAGES;
    extern __shared__ __align__(1024) char memory[];
    float* const warp_largest = reinterpret_cast<float*>(memory + Memory::REST_AT);
    float* const warp_sums = warp_largest + OUTPUTS;
    const uint32_t data = shared_address(memory), barriers = shared_address(warp_sums + 16), unread = barriers + 32 * 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
        init_ring<STAGES>(barriers);
        for (int i = 0; i < GROUPS; ++i) barrier_init(unread + 8 * i, 4);
        barrier_init_fence();
    }
    __syncthreads();
    if (warp >= CONSUMER_WARPS) {
        give_registers<24>();
        if (threadIdx.x == CONSUMERS) produce<STAGES>(x, shape, data, barriers);
        return;
    }
    take_registers<160>();
    const float weight_scale = store_half_weights(t.weight, warp_largest, memory + Memory::WEIGHT_AT);
    async_proxy_fence();
    named_barrier(1, CONSUMERS);

    const Lane lane(warp);
    const int group = warp / 4, rank = warp % 4;
    float bias[2];  // of the lane's two outputs; the sigmoid of one that does not exist is zero
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int o = 16 * rank + lane.lane / 4 + 8 * i;
        bias[i] = o < OUT_CHANNELS ? MINUS_LOG2_E * t.bias[o] : INFINITY;
    }
    Gradient gradient(data + Memory::WEIGHT_AT, data + Memory::SUMS_AT + group * SUMS_BYTES, unread + 8 * group,
                      warp_largest + 4 * group, weight_scale, lane, group);
    BoxSums<STAGES> box(Ring<STAGES>(data, barriers, lane.stream), lane);
    const int64_t end = first_row(shape, blockIdx.x + 1);
    for (int64_t line = first_row(shape, blockIdx.x); line < end;) {
        const Segment segment = segment_at(shape, line, end);
        line += segment.count;
        const int64_t image = static_cast<int64_t>(segment.sample) * shape.tiles + segment.tile;
        const int columns = shape.columns - segment.tile * TILE_POSITIONS;
        const bool whole = (lane.warp + 1) * WARP_POSITIONS <= columns;  // the warp has no position beyond the image
        const bool inside[2] = {lane.position(0) < columns, lane.position(1) < columns};
        // Bits of the group's four warps: which have positions beyond the image, and which are in the second stream. And bits
        // of the lane's 16 columns of exponents, of each warp two of either member: which are inside.
        uint32_t partial = 0, second = 0, columns_inside = 0;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int other = 4 * group + part, first = other % TILE_WARPS * WARP_POSITIONS;
            partial |= static_cast<uint32_t>(first + WARP_POSITIONS > columns) << part;
            second |= static_cast<uint32_t>(other / TILE_WARPS) << part;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                columns_inside |= static_cast<uint32_t>(first + 2 * Lane::pair_of(2 * lane.q + i % 2) + i / 2 < columns)
                                  << (4 * part + i);
        }
        // In vectors; MOST_KEPT_ROWS of the binding keeps them below 2^32.
        uint32_t saved = ((image * shape.rows + segment.start) * TILE_WARPS + 4 * group) * 128 + rank * 32 + lane.lane;
        float total = 0;
        gradient.clear();
        store_constant_columns(memory + Memory::SUMS_AT + group * SUMS_BYTES);
        box.shared_rows();
#pragma unroll 1
        for (int step = 0; step < segment.steps(); ++step) {
            box.fresh_rows();
            gradient.finish(lane);
            box.shared_rows();
            if (!whole) clear_outside(box.sums, inside);
            gradient.store_sums(box.sums);
            float d[32];
            gradient.multiply_weights(d);
#pragma unroll
            for (int i = 0; i < 32; ++i) d[i] = fmaf(d[i], gradient.unit, bias[i / 2 % 2]);
            const uint32_t ended = step < segment.rows(1) ? 0 : second;
            if (partial | ended) {
                // What does not count gets a sigmoid of zero.
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    if ((partial | ended) >> part & 1)
#pragma unroll
                        for (int i = 0; i < 8; ++i) {
                            const bool counts = columns_inside >> (4 * part + i / 4 * 2 + i % 2) & ~(ended >> part) & 1;
                            d[8 * part + i] = counts ? d[8 * part + i] : INFINITY;
                        }
            }
            uint32_t deltas[16];
            float sums[2];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float a = reciprocal(1 + power_of_2(d[2 * i])), b = reciprocal(1 + power_of_2(d[2 * i + 1]));
                sums[0] = i ? sums[0] + a : a;
                sums[1] = i ? sums[1] + b : b;
                deltas[i] = half_pair(a * fmaf(-a, DELTA_SCALE, DELTA_SCALE), b * fmaf(-b, DELTA_SCALE, DELTA_SCALE));
            }
            total += sums[0] + sums[1];
            gradient.multiply_deltas(deltas);
            if (SAVING) {
                // Pairs of outputs, 8 apart: at both members of a pair of positions, then at those of the next pair.
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const uint32_t* w = deltas + 4 * part;
                    const uint32_t rows_below = second >> part & 1 ? (segment.steps() - 1) * TILE_WARPS * 128 : 0;
                    if (!(ended >> part & 1))
                        t.deltas[saved + part * 128 + rows_below] =
                            make_uint4(lower_halves(w[0], w[1]), lower_halves(w[2], w[3]), upper_halves(w[0], w[1]),
                                       upper_halves(w[2], w[3]));
                }
                saved += TILE_WARPS * 128;
            }
        }
        mma_wait<0>();
        named_barrier(1, CONSUMERS);  // all have multiplied, and the last segment's sums have been read
        write_gradients(gradient, reinterpret_cast<float*>(memory + Memory::SUMS_AT), lane, t, segment.slot);
        write_sum(total, warp_sums, t.partial_sums + segment.slot);  // its barrier: the gradients have been read
    }
}

// ---- sums over segments
// Which block has a row of the line of all images' pooled rows.
__device__ __forceinline__ int block_of(const Shape& s, int64_t row) {
    return static_cast<int>(((row + 1) * s.blocks - 1) / (images(s) * s.rows));
}
// Calls visit(slot) for each segment of an image, in order.
template <class Visit>
__device__ __forceinline__ void for_segments(const Shape& s, int64_t image, Visit visit) {
    if (images(s) % s.blocks == 0) return visit(image);
    const int last = block_of(s, (image + 1) * s.rows - 1);
    for (int block = block_of(s, image * s.rows); block <= last; ++block) visit(image + block);
}

// sums (batch, size): a sample's segments, in order.
__global__ void add_segments(const float* __restrict__ partial_sums, float* __restrict__ sums, int size, const Shape shape) {
    const int64_t at = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (at >= static_cast<int64_t>(shape.batch) * size) return;
    const int64_t sample = at / size, i = at % size;
    float sum = 0;
    for (int tile = 0; tile < shape.tiles; ++tile)
        for_segments(shape, sample * shape.tiles + tile, [&](int64_t slot) { sum += partial_sums[slot * size + i]; });
    sums[at] = sum;
}

// ---- the input's gradient
constexpr int COLUMNS = 9 * CHANNELS, COLUMN_BYTES = COLUMNS * OUTPUTS * 2;

// d (64 positions x 72: taps x channels) = or += a (64 x 16 outputs, in registers) * b (16 x 72, in shared memory), halves.
__device__ __forceinline__ void mma_input(float (&d)[36], uint4 a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %41, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
        "%25, "
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35}, {%36, %37, %38, %39}, %40, accumulate, 1, 1, 0;\n}"
        : EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int block, int channel, int row, int sample) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map), "r"(0),
                 "r"(channel), "r"(block), "r"(row), "r"(sample), "r"(from)
                 : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The factor that lets halves hold the largest weight, and what rounding leaves of it.
__device__ float weight_scale(const float* weight, float* warp_largest) {
    float largest = 0;
    for (int i = threadIdx.x; i < OUT_CHANNELS * WEIGHTS; i += CONSUMERS) largest = fmaxf(largest, fabsf(weight[i]));
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) warp_largest[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < CONSUMER_WARPS; ++i) largest = fmaxf(largest, warp_largest[i]);
    return scale_to(largest, WEIGHT_EXPONENT, LARGEST_WEIGHT_SHIFT);
}

// weight[o][c][tap] as right operands: 72 columns (tap, channel), k is the output, in the order in which deltas were saved: of
// each 16 outputs 0, 8, 1, 9, ...
__device__ void store_transposed_weights(const float* weight, float scale, char* to) {
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

// A tap's sums add to every value of its box, so a row of x gets those of the taps at or above it, and what the pooled row
// before has left for it; columns likewise. Rows from OVERLAP on all get the same, as do columns from EDGE on.
constexpr int EDGE = KERNEL_W - 1, EDGES = EDGE > 0 ? EDGE : 1, EXCHANGED = KERNEL_H * 2 * EDGES;

// A warp's rows of x on their way out: lines of 32 columns, swizzled like those of the input; [row][32 columns][channel].
constexpr int OUT_BLOCKS = WARP_POSITIONS * POOL_W / 32, OUT_BYTES = POOL_H * OUT_BLOCKS * CHANNELS * LINE;
constexpr int INPUT_GRADIENT_BYTES = 2 * CONSUMER_WARPS * OUT_BYTES + 2 * COLUMN_BYTES;

// Gradients of the parameters, from each sample's. The input's gradient leaves some multiprocessors idle, or ends on some
// earlier, so blocks behind its own do this.
struct ParameterSums {
    const float* samples;  // (batch, PARAMETERS)
    float *weight, *bias;
};
constexpr int SUM_WIDTH = 128, SUM_PARTS = CONSUMERS / SUM_WIDTH, SUM_BLOCKS = ceil_div(PARAMETERS, SUM_WIDTH);

__device__ void sum_parameters(const ParameterSums& sums, const float* grad_out, int batch, int block, float* part_sums) {
    const int part = threadIdx.x / SUM_WIDTH, i = block * SUM_WIDTH + threadIdx.x % SUM_WIDTH;
    float sum = 0;
    if (i < PARAMETERS)
#pragma unroll 8
        for (int sample = part; sample < batch; sample += SUM_PARTS)
            sum += grad_out[sample] * sums.samples[static_cast<int64_t>(sample) * PARAMETERS + i];
    part_sums[threadIdx.x] = sum;
    __syncthreads();
    if (part > 0 || i >= PARAMETERS) return;
#pragma unroll
    for (int other = 1; other < SUM_PARTS; ++other) sum += part_sums[other * SUM_WIDTH + threadIdx.x];
    constexpr int ALL_WEIGHTS = OUT_CHANNELS * WEIGHTS;
    if (i < ALL_WEIGHTS) sums.weight[i] = sum;
    else sums.bias[i - ALL_WEIGHTS] = sum;
}

__global__ void __launch_bounds__(CONSUMERS, 1)
    input_gradient(const __grid_constant__ CUtensorMap grad_x, const uint4* __restrict__ deltas,
                   const float* __restrict__ weight, const float* __restrict__ grad_out, const ParameterSums parameters,
                   const Shape shape) {
    extern __shared__ __align__(1024) char memory[];
    if (static_cast<int>(blockIdx.x) >= shape.blocks)
        return sum_parameters(parameters, grad_out, shape.batch, blockIdx.x - shape.blocks, reinterpret_cast<float*>(memory));
    __shared__ float exchange[2][STREAMS][1 + TILE_WARPS][4][EXCHANGED];  // the first of a stream stays zero
    __shared__ float warp_largest[CONSUMER_WARPS];
    char* const weights = memory + 2 * CONSUMER_WARPS * OUT_BYTES;
    for (int i = threadIdx.x; i < 2 * STREAMS * 4 * EXCHANGED; i += CONSUMERS)
        exchange[i / (STREAMS * 4 * EXCHANGED)][i / (4 * EXCHANGED) % STREAMS][0][i / EXCHANGED % 4][i % EXCHANGED] = 0;
    const float weight_power = weight_scale(weight, warp_largest);
    store_transposed_weights(weight, weight_power, weights);
    async_proxy_fence();
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const Lane lane(warp);
    const Operand<COLUMNS * 16, 128> right(shared_address(weights));
    constexpr int ROW = TILE_WARPS * 128;
    const int left_pair = lane.pair - 1, left_n = (left_pair & 4) | (left_pair & 1) << 1 | (left_pair >> 1 & 1);
    const int left_lane = (left_n & 7) * 4 + lane.q;
    const uint32_t outgoing = shared_address(memory) + 2 * warp * OUT_BYTES;
    const int64_t end = first_row(shape, blockIdx.x + 1);
    int parity = 0;
    for (int64_t line = first_row(shape, blockIdx.x); line < end;) {
        const Segment segment = segment_at(shape, line, end);
        line += segment.count;
        const int first = segment.first(lane.stream), last = first + segment.rows(lane.stream);  // pooled rows [first, last)
        const bool writes_below = last == shape.rows && first < last;
        const float scale = grad_out[segment.sample] / (DELTA_SCALE * POOL_H * POOL_W) / weight_power;
        // The row before the first is for its part in the first; the image's last stream writes what lies below its windows.
        const int below = ceil_div(shape.height, POOL_H) - shape.rows;
        const int steps = 1 + segment.steps() + (segment.start + segment.count == shape.rows ? below : 0);
        // A vector has two pairs of outputs at two neighbouring lanes' positions.
        const int64_t image_row = static_cast<int64_t>(segment.sample) * shape.rows + first - 1;
        const uint2* from =
            reinterpret_cast<const uint2*>(deltas + image_row * ROW + lane.warp * 128) + lane.q * 8 + lane.lane / 4;
        uint4 next[4];  // the operands of the next step
        const auto load = [&](int row) {
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const bool exists = row >= 0 && row < last;
                const uint2 none = make_uint2(0, 0), a = exists ? __ldcs(from + 64 * v) : none,
                            b = exists ? __ldcs(from + 64 * v + 32) : none;
                next[v] = make_uint4(a.x, a.y, b.x, b.y);
            }
            from += 2 * ROW;
        };
        load(first < last ? first - 1 : -1);
        float carry[OVERLAP > 0 ? OVERLAP : 1][KERNEL_W][4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            const int row = first - 1 + step;
            float d[36];
            uint4 a[4];
#pragma unroll
            for (int v = 0; v < 4; ++v) a[v] = next[v];
            load(row + 1);
            mma_fence();
#pragma unroll
            for (int v = 0; v < 4; ++v) mma_input(d, a[v], right.at(COLUMN_BYTES + v * COLUMNS * 32), v > 0);
#pragma unroll
            for (int v = 0; v < 4; ++v) mma_input(d, a[v], right.at(v * COLUMNS * 32), 1);
            mma_commit();
            mma_wait<0>();
            // rows[y][e]: what row y of x gets through column e of the kernel; [2 * member + channel].
            float rows[KERNEL_H][KERNEL_W][4];
#pragma unroll
            for (int e = 0; e < KERNEL_W; ++e)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int tap = e; tap < TAPS; tap += KERNEL_W) d[4 * tap + i] *= scale;
                    float above = d[4 * e + i];
#pragma unroll
                    for (int y = 0; y < KERNEL_H; ++y) {
                        if (y > 0) above += d[4 * (y * KERNEL_W + e) + i];
                        rows[y][e][i] = y < OVERLAP ? above + carry[y][e][i] : above;
                    }
                    float later = 0;
#pragma unroll
                    for (int y = OVERLAP - 1; y >= 0; --y) {
                        const float tap = d[4 * ((y + 1) * KERNEL_W + e) + i];
                        carry[y][e][i] = later = y == OVERLAP - 1 ? tap : later + tap;
                    }
                }
            // What the next position's columns get: [row][2 * member + channel][column].
            float edge[KERNEL_H][4][EDGES];
#pragma unroll
            for (int y = 0; y < KERNEL_H; ++y)
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int z = EDGE - 1; z >= 0; --z)
                        edge[y][i][z] = z == EDGE - 1 ? rows[y][z + 1][i] : rows[y][z + 1][i] + edge[y][i][z + 1];
            float* const mine = exchange[parity][lane.stream][1 + lane.warp][lane.q];
            if (lane.pair == 7)
#pragma unroll
                for (int i = 0; i < KERNEL_H * 2 * EDGE; ++i) mine[i] = edge[i / (2 * EDGES)][2 + i / EDGES % 2][i % EDGES];
            if (lane.lane == 0) store_wait_read<1>();  // the rows of two steps ago have left their place
            named_barrier(2 + lane.stream, 32 * TILE_WARPS);
            float from_left[KERNEL_H][2][EDGES];  // [row][channel][column], by the position on the left of the lane's first
#pragma unroll
            for (int i = 0; i < KERNEL_H * 2 * EDGE; ++i)
                from_left[i / (2 * EDGES)][i / EDGES % 2][i % EDGES] =
                    __shfl_sync(~0u, edge[i / (2 * EDGES)][2 + i / EDGES % 2][i % EDGES], left_lane);
            if (lane.pair == 0) {
                const float* const left = exchange[parity][lane.stream][lane.warp][lane.q];
#pragma unroll
                for (int i = 0; i < KERNEL_H * 2 * EDGE; ++i) from_left[i / (2 * EDGES)][i / EDGES % 2][i % EDGES] = left[i];
            }
            const uint32_t to = outgoing + parity * OUT_BYTES;
            parity ^= 1;
#pragma unroll
            for (int y = 0; y < KERNEL_H; ++y)
#pragma unroll
                for (int channel = 0; channel < 2; ++channel) {
                    float v[2 * POOL_W];
#pragma unroll
                    for (int member = 0; member < 2; ++member)
#pragma unroll
                        for (int z = 0; z < POOL_W; ++z) {
                            const float own = rows[y][z < KERNEL_W ? z : 0][2 * member + channel];
                            v[member * POOL_W + z] = z == 0         ? own
                                                     : z < KERNEL_W ? v[member * POOL_W + z - 1] + own
                                                                    : v[member * POOL_W + z - 1];
                        }
#pragma unroll
                    for (int z = 0; z < EDGE; ++z) {
                        v[z] += from_left[y][channel][z];
                        v[POOL_W + z] += edge[y][channel][z];
                    }
                    // Odd lanes' vectors go the other way round, so that a quarter-warp's stores touch all banks.
                    const int c = 2 * lane.q + channel, copies = y == KERNEL_H - 1 ? FRESH : 1;
#pragma unroll
                    for (int i = 0; i < POOL_W / 2; ++i) {
                        const int turn = lane.lane / 4 % 2 ? POOL_W / 2 - 1 - i : i, column = 2 * lane.pair * POOL_W + 4 * turn;
                        float4 vector;
                        float* const e = &vector.x;
#pragma unroll
                        for (int k = 0; k < 4; ++k) e[k] = lane.lane / 4 % 2 ? v[4 * (POOL_W / 2 - 1 - i) + k] : v[4 * i + k];
                        const uint32_t at = (column / 32 * CHANNELS + c) * LINE + ((column / 4 % 8 ^ c) << 4);
#pragma unroll
                        for (int copy = 0; copy < copies; ++copy)
                            store4(to + (y + copy) * OUT_BLOCKS * CHANNELS * LINE + at, vector);
                    }
                }
            async_proxy_fence();
            __syncwarp();
            if (lane.lane == 0) {
                if (row >= first && (row < last || writes_below))
                    store_box(grad_x, to, lane.warp * OUT_BLOCKS, 0, row * POOL_H, segment.sample);
                store_commit();
            }
        }
    }
    if (lane.lane == 0) store_wait();
}

// ---- launchers
// As many blocks as multiprocessors, or as images where that keeps at least 95% of the multiprocessors busy: whole images need
// no second pass over their segments' sums.
static int count_blocks(int64_t images, int rows, int multiprocessors) {
    const int64_t waves = (images + multiprocessors - 1) / multiprocessors, whole = (images + waves - 1) / waves;
    if (images % whole == 0 && whole * 20 >= 19 * static_cast<int64_t>(multiprocessors)) return static_cast<int>(whole);
    return static_cast<int>(images * rows < multiprocessors ? images * rows : multiprocessors);
}

static Shape make_shape(int64_t batch, int64_t height, int64_t width, int multiprocessors) {
    Shape shape;
    shape.batch = static_cast<int>(batch), shape.height = static_cast<int>(height), shape.width = static_cast<int>(width);
    shape.rows = (shape.height - KERNEL_H + 1) / POOL_H, shape.columns = (shape.width - KERNEL_W + 1) / POOL_W;
    shape.tiles = ceil_div(shape.columns, TILE_POSITIONS);
    shape.blocks = count_blocks(batch * shape.tiles, shape.rows, multiprocessors);
    return shape;
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's cuTensorMapEncodeTiled, without linking the driver; null if it has none.
static Encode find_encode() {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(encode) : nullptr;
}

// A tensor map of x, or of its gradient, as lines of 32 columns. On the way in the lines of a row and channel are neighbours in
// shared memory, on the way out those of the channels. The driver needs a context in this thread, which may be autograd's: a
// call of the runtime must come first.
static cudaError_t describe(const float* x, const Shape& s, bool outgoing, CUtensorMap* map) {
    static const Encode encode = find_encode();
    if (!encode) return cudaErrorNotSupported;
    struct Dimension {
        cuuint64_t size, stride;
        cuuint32_t box;
    };
    const cuuint64_t width = s.width, height = s.height, plane = width * height * 4, lines = width / 32;
    const Dimension line = {lines, LINE, static_cast<cuuint32_t>(outgoing ? OUT_BLOCKS : BLOCKS)};
    const Dimension channel = {IN_CHANNELS, plane, CHANNELS};
    const Dimension row = {height, width * 4, static_cast<cuuint32_t>(outgoing ? POOL_H : STAGE_ROWS)};
    const Dimension sample = {static_cast<cuuint64_t>(s.batch), plane * IN_CHANNELS, 1};
    const Dimension& second = outgoing ? channel : line;
    const Dimension& third = outgoing ? line : channel;
    const cuuint64_t sizes[5] = {32, second.size, third.size, row.size, sample.size};
    const cuuint64_t strides[4] = {second.stride, third.stride, row.stride, sample.stride};
    const cuuint32_t box[5] = {32, second.box, third.box, row.box, 1}, steps[5] = {1, 1, 1, 1, 1};
    const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<float*>(x), sizes, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

static cudaError_t launch(void (*kernel)(const CUtensorMap, const Shape, const Tensors), int bytes, const float* x,
                          const Shape& shape, const Tensors& tensors, cudaStream_t stream) {
    CUtensorMap map;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error == cudaSuccess) error = describe(x, shape, false, &map);
    if (error == cudaSuccess) kernel<<<shape.blocks, THREADS, bytes, stream>>>(map, shape, tensors);
    return error;
}

static void launch_add_segments(const float* partial_sums, float* sums, int size, const Shape& shape, cudaStream_t stream) {
    const int64_t count = static_cast<int64_t>(shape.batch) * size;
    add_segments<<<static_cast<unsigned>((count + 127) / 128), 128, 0, stream>>>(partial_sums, sums, size, shape);
}

// How many partial sums conv_pool_sum writes; 0 where a sample has one, which goes to its place at once.
int64_t count_partial_sums(int64_t batch, int64_t height, int64_t width, int multiprocessors) {
    const Shape shape = make_shape(batch, height, width, multiprocessors);
    const int64_t images = batch * shape.tiles;
    return images % shape.blocks ? images + shape.blocks : shape.tiles > 1 ? images : 0;
}

// `gradients` (batch, PARAMETERS) and `deltas` may be null; partial_* are null where count_partial_sums is 0.
cudaError_t launch_conv_pool_sum(const float* x, const float* weight, const float* bias, float* partial_sums,
                                 float* partial_gradients, float* out, float* gradients, void* deltas, bool strict,
                                 int64_t batch, int64_t height, int64_t width, int multiprocessors, cudaStream_t stream) {
    const Shape shape = make_shape(batch, height, width, multiprocessors);
    const Tensors tensors = {weight, bias, partial_sums ? partial_sums : out, partial_gradients ? partial_gradients : gradients,
                             static_cast<uint4*>(deltas)};
    const auto kernel = deltas      ? conv_pool_gradients<true>
                        : gradients ? conv_pool_gradients<false>
                        : strict    ? conv_pool_sum<true>
                                    : conv_pool_sum<false>;
    const int bytes = gradients ? Shared<true>::BYTES : Shared<false>::BYTES;
    const cudaError_t error = launch(kernel, bytes, x, shape, tensors, stream);
    if (error == cudaSuccess && partial_sums) launch_add_segments(partial_sums, out, 1, shape, stream);
    if (error == cudaSuccess && partial_gradients) launch_add_segments(partial_gradients, gradients, PARAMETERS, shape, stream);
    return error;
}

// Also those of the parameters, from each sample's, `grads` (batch, PARAMETERS).
cudaError_t launch_input_gradient(const void* deltas, const float* weight, const float* grad_out, const float* grads,
                                  float* grad_x, float* grad_weight, float* grad_bias, int64_t batch, int64_t height,
                                  int64_t width, int multiprocessors, cudaStream_t stream) {
    const Shape shape = make_shape(batch, height, width, multiprocessors);
    CUtensorMap map;
    cudaError_t error =
        cudaFuncSetAttribute(input_gradient, cudaFuncAttributeMaxDynamicSharedMemorySize, INPUT_GRADIENT_BYTES);
    if (error == cudaSuccess) error = describe(grad_x, shape, true, &map);
    if (error == cudaSuccess)
        input_gradient<<<shape.blocks + SUM_BLOCKS, CONSUMERS, INPUT_GRADIENT_BYTES, stream>>>(
            map, static_cast<const uint4*>(deltas), weight, grad_out, ParameterSums{grads, grad_weight, grad_bias}, shape);
    return error;
}

#else  // nobody calls these

int64_t count_partial_sums(int64_t, int64_t, int64_t, int) { return 0; }
cudaError_t launch_conv_pool_sum(const float*, const float*, const float*, float*, float*, float*, float*, void*, bool, int64_t,
                                 int64_t, int64_t, int, cudaStream_t) {
    return cudaErrorNotSupported;
}
cudaError_t launch_input_gradient(const void*, const float*, const float*, const float*, float*, float*, float*, int64_t,
                                  int64_t, int64_t, int, cudaStream_t) {
    return cudaErrorNotSupported;
}

#endif

// ---- v3's kernels, in plain fp32, for what does not fit: other channels, kernels, windows and widths, and strict training
namespace general {
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

// A term is one c, r, s: input channel, row and column of the kernel. Box sums of a tile of windows are a matrix with a row
// of TILE floats for each term; its product with the weights is computed with a thread for each 8 windows x N columns.
constexpr int TILE = 128, TILE_COLUMNS = 32, TILE_ROWS = TILE / TILE_COLUMNS;
constexpr int COLUMN_LANES = 8, WINDOW_LANES = THREADS / COLUMN_LANES, WINDOWS = TILE / WINDOW_LANES;
static_assert(TILE == THREADS, "where tiles are filled, a thread has a window");

// Output channels in groups of equal size, at most 64.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 64), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUTS = ceil_div(OUT_BLOCK, COLUMN_LANES);  // of a thread

// What is in shared memory at a time is a slice of the terms. Slices divide evenly, so they need no bounds. Column sums lie
// by remainder, first all columns that are 0 modulo POOL_W, then all that are 1, and so on: neighbouring threads read them
// POOL_W apart. RUN, the place of a remainder, is padded so that a warp that writes hits all banks, too.
constexpr int MAX_TERMS = 27, COLUMN_SUM_FLOATS = 4096;
constexpr int SLICE_S = largest_divisor(KERNEL_W, MAX_TERMS);
constexpr int TILE_WIDTH = TILE_COLUMNS * POOL_W + SLICE_S - 1;
constexpr int padded_run() {
    int run = ceil_div(TILE_WIDTH, POOL_W);
    while (POOL_W > 1 && POOL_W < WARP && run % WARP != ceil_div(WARP, POOL_W)) ++run;
    return run;
}
constexpr int RUN = padded_run(), TILE_PITCH = POOL_W * RUN;
constexpr bool STAGED = TILE_ROWS * TILE_PITCH <= COLUMN_SUM_FLOATS;  // not so for large windows: see box_sums
constexpr int MAX_COLUMN_SUMS = STAGED ? COLUMN_SUM_FLOATS / (TILE_ROWS * TILE_PITCH) : MAX_TERMS;
constexpr int SLICE_R = largest_divisor(KERNEL_H, smaller(MAX_TERMS / SLICE_S, MAX_COLUMN_SUMS));
constexpr int SLICE_C = largest_divisor(IN_CHANNELS, smaller(MAX_TERMS / (SLICE_R * SLICE_S), MAX_COLUMN_SUMS / SLICE_R));
constexpr int TERMS = SLICE_C * SLICE_R * SLICE_S;
constexpr int ALL_TERMS = IN_CHANNELS * KERNEL_H * KERNEL_W, SLICES = ALL_TERMS / TERMS;

__device__ __forceinline__ int stored_column(int w) { return w % POOL_W * RUN + w / POOL_W; }

// ex2.approx: relative error 2^-22.5.
__device__ __forceinline__ float fast_exp2(float v) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}

// rcp.approx: within 1 ulp.
__device__ __forceinline__ float fast_reciprocal(float v) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
    return reciprocal;
}

// Weights and bias carry the factor -log2(e), so that the product's result v is an exponent: sigmoid = 1 / (1 + 2^v).
constexpr float MINUS_LOG2_E = -1.44269504f, WINDOW_SCALE = 1.0f / (POOL_H * POOL_W);
__device__ __forceinline__ float sigmoid_of_exponent(float v) { return fast_reciprocal(1.0f + fast_exp2(v)); }

// The sum of `value` over the block, valid in thread 0. The order of additions is fixed, so the bits are too.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[WARPS];
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = value;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < WARPS; ++warp) value += warp_sums[warp];
    return value;
}

// x (batch, IN_CHANNELS, height, width), and the windows that fit into it.
struct Image {
    const float* x;
    int batch, height, width, rows, columns;
    Image(const float* x, int batch, int height, int width)
        : x(x), batch(batch), height(height), width(width), rows((height - KERNEL_H + 1) / POOL_H),
          columns((width - KERNEL_W + 1) / POOL_W) {}
    __host__ __device__ int tiles_across() const { return ceil_div(columns, TILE_COLUMNS); }
    __host__ __device__ int64_t tiles() const { return (int64_t)ceil_div(rows, TILE_ROWS) * tiles_across(); }
    __host__ __device__ int64_t windows() const { return (int64_t)rows * columns; }
};

// A tile of a sample, and this thread's window of it where a thread has one.
struct Tile {
    int top, left, row, column;  // first window, and the thread's
    bool exists;                 // false past the edge of the image
    __device__ Tile(const Image& image, int64_t tile) {
        top = tile / image.tiles_across() * TILE_ROWS, left = tile % image.tiles_across() * TILE_COLUMNS;
        row = top + threadIdx.x / TILE_COLUMNS, column = left + threadIdx.x % TILE_COLUMNS;
        exists = row < image.rows && column < image.columns;
    }
};

// Where a slice of the terms begins.
struct Slice {
    int c, r, s;
    __device__ explicit Slice(int slice) {
        constexpr int ACROSS = KERNEL_W / SLICE_S, DOWN = KERNEL_H / SLICE_R;
        s = slice % ACROSS * SLICE_S, r = slice / ACROSS % DOWN * SLICE_R, c = slice / (ACROSS * DOWN) * SLICE_C;
    }
    __device__ int64_t term(int k) const {  // the number of its k-th term among all terms
        return ((int64_t)(c + k / (SLICE_R * SLICE_S)) * KERNEL_H + r + k / SLICE_S % SLICE_R) * KERNEL_W + s + k % SLICE_S;
    }
};

// boxes[term][window] = the sum of x over the window, shifted by the term's place in the kernel; 0 where no window exists.
// First sums down the columns, one for each pixel column and r, shared by all s; then along the rows.
// A barrier is inside; the caller needs one more before it reads the boxes.
template <int ROWS, int PITCH>
__device__ __forceinline__ void box_sums(const Image& image, int sample, const Tile& tile, const Slice& slice,
                                         float (&boxes)[ROWS][PITCH]) {
    const int64_t plane = (int64_t)image.height * image.width;
    const float* corner = image.x + ((int64_t)sample * IN_CHANNELS + slice.c) * plane +
                          ((int64_t)tile.top * POOL_H + slice.r) * image.width + (int64_t)tile.left * POOL_W + slice.s;
    __shared__ float column_sums[STAGED ? SLICE_C * SLICE_R : 1][TILE_ROWS][STAGED ? TILE_PITCH : 1];
    if constexpr (STAGED) {
        const int valid_width = image.width - tile.left * POOL_W - slice.s;
        for (int k = threadIdx.x; k < SLICE_C * TILE_ROWS * TILE_WIDTH; k += THREADS) {
            const int w = k % TILE_WIDTH, row = k / TILE_WIDTH % TILE_ROWS, c = k / TILE_WIDTH / TILE_ROWS;
            const bool inside = w < valid_width && tile.top + row < image.rows;
            const float* column = corner + c * plane + (int64_t)row * POOL_H * image.width + w;
            float pixel[SLICE_R + POOL_H - 1];
#pragma unroll
            for (int u = 0; u < SLICE_R + POOL_H - 1; ++u) pixel[u] = inside ? column[(int64_t)u * image.width] : 0.0f;
#pragma unroll
            for (int r = 0; r < SLICE_R; ++r) {
                float sum = pixel[r];
#pragma unroll
                for (int u = 1; u < POOL_H; ++u) sum += pixel[r + u];
                column_sums[c * SLICE_R + r][row][stored_column(w)] = sum;
            }
        }
    }
    __syncthreads();  // column sums are complete, and the caller's last use of the boxes is over
    if constexpr (STAGED) {
        for (int k = 0; k < SLICE_C * SLICE_R; ++k) {
            const float* sums = &column_sums[k][tile.row - tile.top][tile.column - tile.left];
            float value[SLICE_S + POOL_W - 1];
#pragma unroll
            for (int v = 0; v < SLICE_S + POOL_W - 1; ++v) value[v] = sums[stored_column(v)];
#pragma unroll
            for (int s = 0; s < SLICE_S; ++s) {
                float sum = value[s];
#pragma unroll
                for (int v = 1; v < POOL_W; ++v) sum += value[s + v];
                boxes[k * SLICE_S + s][threadIdx.x] = tile.exists ? sum : 0.0f;
            }
        }
    } else {
        // Column sums of large windows do not fit. Each box is then summed by itself, row by row.
        const int64_t offset = (int64_t)(tile.row - tile.top) * POOL_H * image.width + (tile.column - tile.left) * POOL_W;
        for (int k = 0; k < TERMS; ++k) {
            const int c = k / (SLICE_R * SLICE_S), r = k / SLICE_S % SLICE_R, s = k % SLICE_S;
            float sum = 0.0f;
            for (int u = 0; tile.exists && u < POOL_H; ++u) {
                const float* row = corner + c * plane + offset + (int64_t)(r + u) * image.width + s;
                float sum_of_row = 0.0f;
                for (int v = 0; v < POOL_W; ++v) sum_of_row += row[v];
                sum += sum_of_row;
            }
            boxes[k][threadIdx.x] = sum;
        }
    }
}

// The windows and columns of a thread lie in runs of 4 where that lets it read 16 bytes at a time.
__device__ __forceinline__ int window_of_thread(int m) {
    return m / 4 * (TILE / 2) + threadIdx.x / COLUMN_LANES * 4 + m % 4;
}
template <int N>
__device__ __forceinline__ int column_of_thread(int n) {
    const int lane = threadIdx.x % COLUMN_LANES;
    return N % 4 == 0 ? n / 4 * 4 * COLUMN_LANES + lane * 4 + n % 4 : n * COLUMN_LANES + lane;
}
// The rows of a matrix with so many columns are 4 longer than a multiple of 8, so that they begin in different banks.
__host__ __device__ constexpr int padded_columns(int columns) { return round_up(columns, COLUMN_LANES) + 4; }

// sums[m][n] += sum over k of a[k][window m] * b[k][column n], for the windows and columns of this thread.
template <int K, int PITCH, int N>
__device__ __forceinline__ void multiply(const float (&a)[K][TILE], const float (&b)[K][PITCH], float (&sums)[WINDOWS][N]) {
#pragma unroll 6
    for (int k = 0; k < K; ++k) {
        float left[WINDOWS], right[N];
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m) left[m] = a[k][window_of_thread(m)];
#pragma unroll
        for (int n = 0; n < N; ++n) right[n] = b[k][column_of_thread<N>(n)];
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) sums[m][n] += left[m] * right[n];
    }
}

// One tile of windows in OUT_BLOCK output channels. Writes the sum of the block's sigmoids to partial_sums[block] unless that
// is null, and, with DELTA, the sigmoids' derivatives to delta (batch, OUT_CHANNELS, rows, columns).
template <bool DELTA>
__global__ void __launch_bounds__(THREADS, 4)
    sum_sigmoids(Image image, const float* __restrict__ weight, const float* __restrict__ bias,
                 float* __restrict__ partial_sums, float* __restrict__ delta) {
    __shared__ alignas(16) float boxes[TERMS][TILE];
    __shared__ alignas(16) float weights[TERMS][padded_columns(OUT_BLOCK)];
    const int first_out = blockIdx.x % OUT_GROUPS * OUT_BLOCK, sample = blockIdx.x / OUT_GROUPS / image.tiles();
    const Tile tile(image, blockIdx.x / OUT_GROUPS % image.tiles());

    float exponent[WINDOWS][OUTS];
#pragma unroll
    for (int n = 0; n < OUTS; ++n) {
        const int out = first_out + column_of_thread<OUTS>(n);
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m) exponent[m][n] = out < OUT_CHANNELS ? MINUS_LOG2_E * bias[out] : 0.0f;
    }
#pragma unroll 1
    for (int slice_index = 0; slice_index < SLICES; ++slice_index) {
        const Slice slice(slice_index);
        box_sums(image, sample, tile, slice, boxes);
        for (int k = threadIdx.x; k < TERMS * OUTS * COLUMN_LANES; k += THREADS) {
            const int term = k % TERMS, out = k / TERMS;
            const bool exists = out < OUT_BLOCK && first_out + out < OUT_CHANNELS;
            const int64_t source = (int64_t)(first_out + out) * ALL_TERMS + slice.term(term);
            weights[term][out] = exists ? MINUS_LOG2_E * WINDOW_SCALE * weight[source] : 0.0f;
        }
        __syncthreads();
        multiply(boxes, weights, exponent);
    }

    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < WINDOWS; ++m) {
        const int row = tile.top + window_of_thread(m) / TILE_COLUMNS, column = tile.left + window_of_thread(m) % TILE_COLUMNS;
#pragma unroll
        for (int n = 0; n < OUTS; ++n) {
            const int in_block = column_of_thread<OUTS>(n), out = first_out + in_block;
            if (row >= image.rows || column >= image.columns || in_block >= OUT_BLOCK || out >= OUT_CHANNELS) continue;
            const float s = sigmoid_of_exponent(exponent[m][n]);
            sum += s;
            if (DELTA)
                delta[((int64_t)sample * OUT_CHANNELS + out) * image.windows() + (int64_t)row * image.columns + column] =
                    s * (1.0f - s);
        }
    }
    if (partial_sums == nullptr) return;
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial_sums[blockIdx.x] = sum;
}

// Gradients of a sample's output by the parameters: delta times box sums, summed over windows. The bias is the weight of one
// more term, whose boxes are sums of ones. A block has a slice of the terms, a group of output channels, and of the sample's
// tiles every splits-th; its sums go to terms (batch, splits, OUT_CHANNELS * ALL_TERMS weights, then OUT_CHANNELS biases).
constexpr int OUT_STEP = 32, OUT_STEPS = ceil_div(OUT_BLOCK, OUT_STEP);  // as many channels of delta are in shared memory
constexpr int TERM_LANES = 4, OUT_LANES = WARP / TERM_LANES;
constexpr int THREAD_TERMS = ceil_div(TERMS + 1, TERM_LANES), THREAD_OUTS = OUT_STEP / OUT_LANES;
constexpr int PADDED_TERMS = THREAD_TERMS * TERM_LANES, PADDED_TILE = TILE + 4;  // + 4: other banks for each row

__global__ void __launch_bounds__(THREADS, 4)
    parameter_terms(Image image, const float* __restrict__ delta, float* __restrict__ terms, int splits) {
    __shared__ alignas(16) float boxes[PADDED_TERMS][PADDED_TILE];
    __shared__ alignas(16) float deltas[OUT_STEP][PADDED_TILE];
    const Slice slice(blockIdx.x % SLICES);
    const int first_out = blockIdx.x / SLICES % OUT_GROUPS * OUT_BLOCK;
    const int split = blockIdx.x / SLICES / OUT_GROUPS % splits, sample = blockIdx.x / SLICES / OUT_GROUPS / splits;
    const int warp = threadIdx.x / WARP, out_lane = threadIdx.x % OUT_LANES, term_lane = threadIdx.x % WARP / OUT_LANES;

    for (int k = TERMS; k < PADDED_TERMS; ++k) boxes[k][threadIdx.x] = k == TERMS ? POOL_H * POOL_W : 0.0f;
    float sums[OUT_STEPS][THREAD_OUTS][THREAD_TERMS] = {};
    for (int64_t index = split; index < image.tiles(); index += splits) {
        const Tile tile(image, index);
        box_sums(image, sample, tile, slice, boxes);
#pragma unroll
        for (int step = 0; step < OUT_STEPS; ++step) {
            if (step > 0) __syncthreads();  // the last step's deltas have been read
            for (int k = 0; k < OUT_STEP; ++k) {
                const int in_block = step * OUT_STEP + k, out = first_out + in_block;
                const bool exists = tile.exists && in_block < OUT_BLOCK && out < OUT_CHANNELS;
                const int64_t source =
                    ((int64_t)sample * OUT_CHANNELS + out) * image.windows() + (int64_t)tile.row * image.columns + tile.column;
                deltas[k][threadIdx.x] = exists ? delta[source] : 0.0f;
            }
            __syncthreads();
#pragma unroll 2
            for (int window = 4 * warp; window < TILE; window += 4 * WARPS) {  // each warp has every fourth run of 4 windows
                float left[THREAD_OUTS][4], right[THREAD_TERMS][4];
#pragma unroll
                for (int v = 0; v < 4; ++v) {
#pragma unroll
                    for (int m = 0; m < THREAD_OUTS; ++m) left[m][v] = deltas[m * OUT_LANES + out_lane][window + v];
#pragma unroll
                    for (int n = 0; n < THREAD_TERMS; ++n) right[n][v] = boxes[n * TERM_LANES + term_lane][window + v];
                }
#pragma unroll
                for (int m = 0; m < THREAD_OUTS; ++m)
#pragma unroll
                    for (int n = 0; n < THREAD_TERMS; ++n)
#pragma unroll
                        for (int v = 0; v < 4; ++v) sums[step][m][n] += left[m][v] * right[n][v];
            }
        }
    }

    // Add the warps' sums, in their order.
    constexpr int STEP_SUMS = OUT_STEP * PADDED_TERMS;
    static_assert(WARPS * STEP_SUMS <= OUT_STEP * PADDED_TILE, "they lie where the deltas were");
    float* warp_sums = &deltas[0][0];
    float* result = terms + ((int64_t)sample * splits + split) * OUT_CHANNELS * (ALL_TERMS + 1);
#pragma unroll
    for (int step = 0; step < OUT_STEPS; ++step) {
        __syncthreads();
#pragma unroll
        for (int m = 0; m < THREAD_OUTS; ++m)
#pragma unroll
            for (int n = 0; n < THREAD_TERMS; ++n)
                warp_sums[warp * STEP_SUMS + (m * OUT_LANES + out_lane) * PADDED_TERMS + n * TERM_LANES + term_lane] =
                    sums[step][m][n];
        __syncthreads();
        for (int k = threadIdx.x; k < STEP_SUMS; k += THREADS) {
            const int term = k % PADDED_TERMS, in_block = step * OUT_STEP + k / PADDED_TERMS, out = first_out + in_block;
            float sum = 0.0f;
            for (int other = 0; other < WARPS; ++other) sum += warp_sums[other * STEP_SUMS + k];
            if (in_block >= OUT_BLOCK || out >= OUT_CHANNELS) continue;
            if (term < TERMS) result[(int64_t)out * ALL_TERMS + slice.term(term)] = sum * WINDOW_SCALE;
            if (term == TERMS && blockIdx.x % SLICES == 0) result[(int64_t)OUT_CHANNELS * ALL_TERMS + out] = sum * WINDOW_SCALE;
        }
    }
}

// For each group: sums[k] = sum over n < count of factors[n] * terms[n][k], k < size; factors are 1 where the pointer is null.
// sums (groups, head) has the first `head` of them, tail (groups, size - head) the others.
constexpr int SUM_COLUMNS = 32, SUM_ROWS = 8;

__global__ void __launch_bounds__(SUM_COLUMNS * SUM_ROWS)
    weighted_sum(const float* __restrict__ factors, const float* __restrict__ terms, float* __restrict__ sums,
                 float* __restrict__ tail, int64_t count, int64_t size, int64_t head) {
    __shared__ float row_sums[SUM_ROWS][SUM_COLUMNS];
    const int64_t blocks = (size + SUM_COLUMNS - 1) / SUM_COLUMNS, group = blockIdx.x / blocks;
    const int row = threadIdx.x / SUM_COLUMNS, column = threadIdx.x % SUM_COLUMNS;
    const int64_t k = blockIdx.x % blocks * SUM_COLUMNS + column;
    float sum = 0.0f;
    if (k < size) {
#pragma unroll 4
        for (int64_t n = row; n < count; n += SUM_ROWS) {
            const float term = terms[(group * count + n) * size + k];
            sum += factors ? factors[n] * term : term;
        }
    }
    row_sums[row][column] = sum;
    __syncthreads();
    if (row > 0 || k >= size) return;
    for (int other = 1; other < SUM_ROWS; ++other) sum += row_sums[other][column];
    if (k < head) sums[group * head + k] = sum;
    else tail[group * (size - head) + k - head] = sum;
}

// grad_x. A pixel gets from each term the gradient of one box sum, that of the window which holds the pixel when shifted by
// the term. A block computes the gradients of box sums for GRAD_ROWS x GRAD_COLUMNS windows in a slice of the terms, and then
// the pixels that need no others: those of fewer windows, by a halo above and to the left.
constexpr int GRAD_COLUMNS = 16, GRAD_ROWS = TILE / GRAD_COLUMNS, GRAD_MAX_TERMS = 40, GRAD_OUTS = 16;
constexpr int GRAD_S = largest_divisor(KERNEL_W, smaller(GRAD_MAX_TERMS, (GRAD_COLUMNS / 2 - 1) * POOL_W + 1));
constexpr int GRAD_R = largest_divisor(KERNEL_H, smaller(GRAD_MAX_TERMS / GRAD_S, (GRAD_ROWS / 2 - 1) * POOL_H + 1));
constexpr int GRAD_C = largest_divisor(IN_CHANNELS, GRAD_MAX_TERMS / (GRAD_R * GRAD_S));
constexpr int GRAD_TERMS = GRAD_C * GRAD_R * GRAD_S, GRAD_THREAD_TERMS = ceil_div(GRAD_TERMS, COLUMN_LANES);
constexpr int halo(int slice, int kernel, int pool) { return ceil_div(slice - 1, pool) + (slice < kernel); }
constexpr int PIXEL_ROWS = (GRAD_ROWS - halo(GRAD_R, KERNEL_H, POOL_H)) * POOL_H;
constexpr int PIXEL_COLUMNS = (GRAD_COLUMNS - halo(GRAD_S, KERNEL_W, POOL_W)) * POOL_W;

__host__ __device__ int64_t pixel_tiles(const Image& image) {
    return (int64_t)ceil_div(image.height, PIXEL_ROWS) * ceil_div(image.width, PIXEL_COLUMNS);
}

__global__ void __launch_bounds__(THREADS, 4)
    input_grad(Image image, const float* __restrict__ grad_out, const float* __restrict__ delta,
               const float* __restrict__ weight, float* __restrict__ grad_x) {
    __shared__ alignas(16) float deltas[GRAD_OUTS][TILE];
    __shared__ alignas(16) float weights[GRAD_OUTS][padded_columns(GRAD_TERMS)];
    __shared__ alignas(16) float boxes[GRAD_THREAD_TERMS * COLUMN_LANES][TILE];
    const int64_t tiles = pixel_tiles(image), tile = blockIdx.x % tiles;
    const int across = ceil_div(image.width, PIXEL_COLUMNS);
    const int cell_row = tile / across * (PIXEL_ROWS / POOL_H), cell_column = tile % across * (PIXEL_COLUMNS / POOL_W);
    const int c0 = blockIdx.x / tiles % (IN_CHANNELS / GRAD_C) * GRAD_C, sample = blockIdx.x / tiles / (IN_CHANNELS / GRAD_C);
    const float scale = grad_out[sample] * WINDOW_SCALE;

#pragma unroll 1
    for (int r0 = 0; r0 < KERNEL_H; r0 += GRAD_R)
#pragma unroll 1
    for (int s0 = 0; s0 < KERNEL_W; s0 += GRAD_S) {
        const int top = cell_row - ceil_div(r0 + GRAD_R - 1, POOL_H), left = cell_column - ceil_div(s0 + GRAD_S - 1, POOL_W);
        const int row = top + threadIdx.x / GRAD_COLUMNS, column = left + threadIdx.x % GRAD_COLUMNS;
        const bool exists = row >= 0 && row < image.rows && column >= 0 && column < image.columns;
        float sums[WINDOWS][GRAD_THREAD_TERMS] = {};
#pragma unroll 1
        for (int first_out = 0; first_out < OUT_CHANNELS; first_out += GRAD_OUTS) {
#pragma unroll 4
            for (int o = 0; o < GRAD_OUTS; ++o) {
                const int64_t source = ((int64_t)sample * OUT_CHANNELS + first_out + o) * image.windows() +
                                       (int64_t)row * image.columns + column;
                deltas[o][threadIdx.x] = exists && first_out + o < OUT_CHANNELS ? delta[source] : 0.0f;
            }
            for (int k = threadIdx.x; k < GRAD_OUTS * GRAD_THREAD_TERMS * COLUMN_LANES; k += THREADS) {
                const int term = k % (GRAD_THREAD_TERMS * COLUMN_LANES), o = k / (GRAD_THREAD_TERMS * COLUMN_LANES);
                const int c = c0 + term / (GRAD_R * GRAD_S), r = r0 + term / GRAD_S % GRAD_R, s = s0 + term % GRAD_S;
                const int64_t source = (((int64_t)(first_out + o) * IN_CHANNELS + c) * KERNEL_H + r) * KERNEL_W + s;
                weights[o][term] = term < GRAD_TERMS && first_out + o < OUT_CHANNELS ? weight[source] : 0.0f;
            }
            __syncthreads();
            multiply(deltas, weights, sums);
            __syncthreads();  // what was read may be overwritten
        }
#pragma unroll
        for (int m = 0; m < WINDOWS; ++m)
#pragma unroll
            for (int n = 0; n < GRAD_THREAD_TERMS; ++n)
                boxes[column_of_thread<GRAD_THREAD_TERMS>(n)][window_of_thread(m)] = sums[m][n];
        __syncthreads();  // the next slice writes its boxes behind the barriers of its products
        for (int k = threadIdx.x; k < GRAD_C * PIXEL_ROWS * PIXEL_COLUMNS; k += THREADS) {
            const int w = k % PIXEL_COLUMNS, h = k / PIXEL_COLUMNS % PIXEL_ROWS, c = k / PIXEL_COLUMNS / PIXEL_ROWS;
            if (cell_row * POOL_H + h >= image.height || cell_column * POOL_W + w >= image.width) continue;
            float sum = 0.0f;
#pragma unroll
            for (int r = 0; r < GRAD_R; ++r)
#pragma unroll
                for (int s = 0; s < GRAD_S; ++s) {
                    const int y = (h - r0 - r + (cell_row - top) * POOL_H) / POOL_H;
                    const int z = (w - s0 - s + (cell_column - left) * POOL_W) / POOL_W;
                    sum += boxes[(c * GRAD_R + r) * GRAD_S + s][y * GRAD_COLUMNS + z];
                }
            float* pixel = grad_x + (((int64_t)sample * IN_CHANNELS + c0 + c) * image.height + cell_row * POOL_H + h) *
                                        image.width + cell_column * POOL_W + w;
            *pixel = (r0 == 0 && s0 == 0 ? 0.0f : *pixel) + scale * sum;
        }
    }
}

// Each sample's tiles are split over enough blocks to fill a GPU. It depends on the shapes alone, and with it the order of
// additions.
int64_t parameter_splits(int batch, int height, int width) {
    const int64_t tiles = Image(nullptr, batch, height, width).tiles(), blocks = (int64_t)batch * OUT_GROUPS * SLICES;
    const int64_t splits = (2000 + blocks - 1) / blocks;
    return splits < tiles ? splits : tiles;
}

int64_t sigmoid_blocks(int batch, int height, int width) {
    return batch * Image(nullptr, batch, height, width).tiles() * OUT_GROUPS;
}
int64_t parameter_blocks(int batch, int height, int width) {
    return batch * parameter_splits(batch, height, width) * OUT_GROUPS * SLICES;
}
int64_t input_grad_blocks(int batch, int height, int width) {
    return batch * pixel_tiles(Image(nullptr, batch, height, width)) * (IN_CHANNELS / GRAD_C);
}
int64_t weighted_sum_blocks(int64_t groups, int64_t size) { return groups * ((size + SUM_COLUMNS - 1) / SUM_COLUMNS); }

void launch_sum_sigmoids(const float* x, const float* weight, const float* bias, float* partial_sums, float* delta, int batch,
                         int height, int width, cudaStream_t stream) {
    const auto kernel = delta ? sum_sigmoids<true> : sum_sigmoids<false>;
    kernel<<<sigmoid_blocks(batch, height, width), THREADS, 0, stream>>>(Image(x, batch, height, width), weight, bias,
                                                                         partial_sums, delta);
}

void launch_parameter_terms(const float* x, const float* delta, float* terms, int batch, int height, int width,
                            cudaStream_t stream) {
    parameter_terms<<<parameter_blocks(batch, height, width), THREADS, 0, stream>>>(
        Image(x, batch, height, width), delta, terms, parameter_splits(batch, height, width));
}

void launch_weighted_sum(const float* factors, const float* terms, float* sums, float* tail, int64_t groups, int64_t count,
                         int64_t size, int64_t head, cudaStream_t stream) {
    weighted_sum<<<weighted_sum_blocks(groups, size), SUM_COLUMNS * SUM_ROWS, 0, stream>>>(factors, terms, sums, tail, count,
                                                                                         size, head);
}

void launch_input_grad(const float* grad_out, const float* delta, const float* weight, float* grad_x, int batch, int height,
                       int width, cudaStream_t stream) {
    input_grad<<<input_grad_blocks(batch, height, width), THREADS, 0, stream>>>(Image(nullptr, batch, height, width), grad_out,
                                                                               delta, weight, grad_x);
}
}  // namespace general
"""

BINDING = r"""
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

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

namespace general {
int64_t parameter_splits(int batch, int height, int width);
int64_t sigmoid_blocks(int batch, int height, int width);
int64_t parameter_blocks(int batch, int height, int width);
int64_t input_grad_blocks(int batch, int height, int width);
int64_t weighted_sum_blocks(int64_t groups, int64_t size);
void launch_sum_sigmoids(const float*, const float*, const float*, float*, float*, int, int, int, cudaStream_t);
void launch_parameter_terms(const float*, const float*, float*, int, int, int, cudaStream_t);
void launch_weighted_sum(const float*, const float*, float*, float*, int64_t, int64_t, int64_t, int64_t, cudaStream_t);
void launch_input_grad(const float*, const float*, const float*, float*, int, int, int, cudaStream_t);
}  // namespace general
int64_t count_partial_sums(int64_t, int64_t, int64_t, int);
cudaError_t launch_conv_pool_sum(const float*, const float*, const float*, float*, float*, float*, float*, void*, bool, int64_t,
                                 int64_t, int64_t, int, cudaStream_t);
cudaError_t launch_input_gradient(const void*, const float*, const float*, const float*, float*, float*, float*, int64_t,
                                  int64_t, int64_t, int, cudaStream_t);

constexpr int64_t WEIGHTS = (int64_t)OUT_CHANNELS * IN_CHANNELS * KERNEL_H * KERNEL_W, PARAMETERS = WEIGHTS + OUT_CHANNELS;
constexpr int64_t TILE_POSITIONS = 96, OUTPUTS = 64;  // of the tensor-core kernels
// Kernels count the vectors of kept deltas, eight values each, in 32 bits.
constexpr int64_t MOST_KEPT_ROWS = (int64_t{1} << 32) / (TILE_POSITIONS * OUTPUTS / 8);
#define FITS_TENSOR_CORES                                                                                                      \
    (IN_CHANNELS <= 8 && OUT_CHANNELS <= 64 && KERNEL_H * KERNEL_W <= 9 && KERNEL_H <= POOL_H + 1 && KERNEL_W <= POOL_W + 1 && \
     POOL_W % 2 == 0 && POOL_W <= 8 && POOL_H * POOL_W <= 16)

static void check(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {  // -1 in `shape`: any size
    bool fits = tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == (int64_t)shape.size();
    for (size_t k = 0; fits && k < shape.size(); ++k) fits = shape[k] < 0 || tensor.size(k) == shape[k];
    TORCH_CHECK(fits,
                message("conv_pool_sigmoid_sum: expected ", name, " as a float32 CUDA tensor of shape ", shape,
                        " (-1: any), got ", tensor.scalar_type(), " of shape ", tensor.sizes(), " on ", tensor.device()));
}

static void check_blocks(int64_t blocks) {
    TORCH_CHECK(blocks < (1ll << 31),
                message("conv_pool_sigmoid_sum: the batch needs ", blocks, " blocks, more than a grid has"));
}

static void check_device(const at::Tensor& expected, const char* name, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device() == expected.device(),
                message("conv_pool_sigmoid_sum: expected all on ", expected.device(), ", got ", name, " on ", tensor.device()));
}

// The arguments of all passes over the input, checked, as the kernels take them. The guard holds while this lives.
struct Call {
    int64_t batch, height, width;
    at::Tensor x, weight, bias;
    c10::cuda::CUDAGuard guard;
    int multiprocessors;
    cudaStream_t stream;

    Call(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& bias_in, at::IntArrayRef pool)
        : guard(checked(x_in, weight_in, bias_in, pool)) {
        x = x_in.contiguous(), weight = weight_in.contiguous(), bias = bias_in.contiguous();
        batch = x.size(0), height = x.size(2), width = x.size(3);
        if (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16) x = x.clone();  // the copy engine reads 16 bytes at a time
        stream = c10::cuda::getCurrentCUDAStream();
        int capability = 0;
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, x.get_device()));
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, x.get_device()));
        TORCH_CHECK(capability == 9,
                    message("conv_pool_sigmoid_sum v5: expected a GPU of compute capability 9 (Hopper), got ", capability,
                            "; v4_tensor_core runs on 8.0 and later"));
    }

    // Whether the tensor-core kernels take this image; their stages are lines of 32 columns.
    bool fits() const { return FITS_TENSOR_CORES && width % 32 == 0; }
    int64_t columns() const { return (width - KERNEL_W + 1) / POOL_W; }
    // What the gradient of the input needs is kept for images that one tile of windows spans; otherwise it is computed again.
    at::Tensor empty_deltas(bool keep) const {
        const bool kept = keep && fits() && columns() <= TILE_POSITIONS && batch * pooled_rows() <= MOST_KEPT_ROWS;
        return at::empty({batch, kept ? pooled_rows() : 0, TILE_POSITIONS * OUTPUTS}, x.options().dtype(at::kHalf));
    }
    int64_t pooled_rows() const { return (height - KERNEL_H + 1) / POOL_H; }

    void check_deltas(const at::Tensor& deltas) const {
        TORCH_CHECK(deltas.scalar_type() == at::kHalf && deltas.device() == x.device() && deltas.dim() == 3 &&
                        deltas.size(0) == batch && (deltas.size(1) == 0 || deltas.size(1) == pooled_rows()) &&
                        deltas.size(2) == TILE_POSITIONS * OUTPUTS,
                    message("conv_pool_sigmoid_sum: expected deltas of this x's forward pass, float16 of shape (", batch, ", ",
                            pooled_rows(), " or 0, ", TILE_POSITIONS * OUTPUTS, ") on ", x.device(), "; got ",
                            deltas.scalar_type(), " of shape ", deltas.sizes(), " on ", deltas.device()));
    }

    static c10::Device checked(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef pool) {
        check("x", x, {-1, IN_CHANNELS, -1, -1});
        check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
        check("bias", bias, {OUT_CHANNELS});
        check_device(x, "weight", weight);
        check_device(x, "bias", bias);
        TORCH_CHECK(pool == at::IntArrayRef({POOL_H, POOL_W}),
                    message("conv_pool_sigmoid_sum: built for a pooling window of ", POOL_H, " x ", POOL_W, ", called with ",
                            pool));
        TORCH_CHECK(x.size(2) >= KERNEL_H + POOL_H - 1 && x.size(3) >= KERNEL_W + POOL_W - 1,
                    message("conv_pool_sigmoid_sum: an image of ", x.size(2), " x ", x.size(3),
                            " is too small for a kernel of ", KERNEL_H, " x ", KERNEL_W, " and a pooling window of ", POOL_H,
                            " x ", POOL_W));
        return x.device();
    }

    at::Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, x.options()); }

};

namespace general {

static void add_groups(const at::Tensor& terms, const at::Tensor& sums, int64_t groups, int64_t count, int64_t size,
                       cudaStream_t stream) {
    check_blocks(weighted_sum_blocks(groups, size));
    launch_weighted_sum(nullptr, terms.const_data_ptr<float>(), sums.mutable_data_ptr<float>(), nullptr, groups, count, size,
                        size, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Writes each sample's output to `out` and the sigmoids' derivatives to `delta`, where these are not null.
static void sum_sigmoids(const Call& call, const at::Tensor* out, const at::Tensor* delta) {
    const int64_t blocks = sigmoid_blocks(call.batch, call.height, call.width);
    check_blocks(blocks);
    at::Tensor partial_sums;
    if (out) partial_sums = call.empty({blocks});
    launch_sum_sigmoids(call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(), call.bias.const_data_ptr<float>(),
                        out ? partial_sums.mutable_data_ptr<float>() : nullptr,
                        delta ? delta->mutable_data_ptr<float>() : nullptr, call.batch, call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (out) add_groups(partial_sums, *out, call.batch, blocks / call.batch, 1, call.stream);
}

static at::Tensor empty_delta(const Call& call) {
    return call.empty({call.batch, OUT_CHANNELS, (call.height - KERNEL_H + 1) / POOL_H, call.columns()});
}

static void forward_with_parameter_grads(const Call& call, const at::Tensor& out, const at::Tensor& grads) {
    const at::Tensor delta = empty_delta(call);
    sum_sigmoids(call, &out, &delta);
    check_blocks(parameter_blocks(call.batch, call.height, call.width));
    const int64_t splits = parameter_splits(call.batch, call.height, call.width);
    at::Tensor terms = splits > 1 ? call.empty({call.batch, splits, PARAMETERS}) : grads;
    launch_parameter_terms(call.x.const_data_ptr<float>(), delta.const_data_ptr<float>(), terms.mutable_data_ptr<float>(),
                           call.batch, call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (splits > 1) add_groups(terms, grads, call.batch, splits, PARAMETERS, call.stream);
}

static void input_grad(const Call& call, const at::Tensor& grad_out, const at::Tensor& grad_x) {
    const at::Tensor delta = empty_delta(call);
    sum_sigmoids(call, nullptr, &delta);
    check_blocks(input_grad_blocks(call.batch, call.height, call.width));
    launch_input_grad(grad_out.const_data_ptr<float>(), delta.const_data_ptr<float>(), call.weight.const_data_ptr<float>(),
                      grad_x.mutable_data_ptr<float>(), call.batch, call.height, call.width, call.stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace general

// PyTorch's setting for convolutions, as its own read it at each call.
static bool is_strict() { return !at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

// `grads` and `deltas` are written where they are not null.
static void tensor_core_forward(const Call& call, bool strict, const at::Tensor& out, const at::Tensor* grads,
                                const at::Tensor* deltas) {
    const int64_t partial = count_partial_sums(call.batch, call.height, call.width, call.multiprocessors);
    at::Tensor partial_sums = call.empty({partial}), partial_grads = call.empty({grads ? partial : 0, PARAMETERS});
    C10_CUDA_CHECK(launch_conv_pool_sum(
        call.x.const_data_ptr<float>(), call.weight.const_data_ptr<float>(), call.bias.const_data_ptr<float>(),
        partial ? partial_sums.mutable_data_ptr<float>() : nullptr,
        partial && grads ? partial_grads.mutable_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>(),
        grads ? grads->mutable_data_ptr<float>() : nullptr, deltas ? deltas->mutable_data_ptr() : nullptr, strict, call.batch,
        call.height, call.width, call.multiprocessors, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef pool) {
    const Call call(x, weight, bias, pool);
    at::Tensor out = call.empty({call.batch});
    if (call.batch == 0) return out;
    if (call.fits())
        tensor_core_forward(call, is_strict(), out, nullptr, nullptr);
    else
        general::sum_sigmoids(call, &out, nullptr);
    return out;
}

// Also each sample's gradients of the parameters, and, if `keep`, what the gradient of x needs. Strict gradients are the
// general kernels' work: the tensor cores' are products of numbers with 11 bits.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_with_parameter_grads(const at::Tensor& x, const at::Tensor& weight,
                                                                            const at::Tensor& bias, at::IntArrayRef pool,
                                                                            bool keep) {
    const Call call(x, weight, bias, pool);
    at::Tensor out = call.empty({call.batch}), grads = call.empty({call.batch, PARAMETERS}), deltas = call.empty_deltas(keep);
    if (call.batch == 0) return {out, grads, deltas};
    const bool kept = deltas.numel() > 0;
    if (call.fits() && (kept || !is_strict())) tensor_core_forward(call, false, out, &grads, kept ? &deltas : nullptr);
    if (!call.fits() || is_strict()) general::forward_with_parameter_grads(call, out, grads);
    return {out, grads, deltas};
}

// Gradients of weight and bias, which give their shapes: the samples' gradients, weighted by grad_out. `x` is for autograd,
// which has to know that they depend on it, to refuse second derivatives.
std::tuple<at::Tensor, at::Tensor> weighted_sum(const at::Tensor& grad_out_in, const at::Tensor& grads_in,
                                                const at::Tensor& weight, const at::Tensor& bias,
                                                const std::optional<at::Tensor>& x) {
    check("grads", grads_in, {-1, PARAMETERS});
    check("grad_out", grad_out_in, {grads_in.size(0)});
    check_device(grads_in, "grad_out", grad_out_in);
    check("weight", weight, {OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W});
    check("bias", bias, {OUT_CHANNELS});
    const c10::cuda::CUDAGuard guard(grads_in.device());
    const at::Tensor grad_out = grad_out_in.contiguous(), grads = grads_in.contiguous();
    at::Tensor grad_weight = at::empty(weight.sizes(), grads.options()), grad_bias = at::empty(bias.sizes(), grads.options());
    check_blocks(general::weighted_sum_blocks(1, PARAMETERS));
    general::launch_weighted_sum(grad_out.const_data_ptr<float>(), grads.const_data_ptr<float>(),
                                 grad_weight.mutable_data_ptr<float>(), grad_bias.mutable_data_ptr<float>(), 1, grads.size(0),
                                 PARAMETERS, WEIGHTS, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {grad_weight, grad_bias};
}

// Gradients of x, weight and bias. `grads` and `deltas` are what forward_with_parameter_grads gave.
std::tuple<at::Tensor, at::Tensor, at::Tensor> all_grads(const at::Tensor& grad_out_in, const at::Tensor& grads_in,
                                                         const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                                         const at::Tensor& deltas, at::IntArrayRef pool) {
    const Call call(x, weight, bias, pool);
    check("grad_out", grad_out_in, {call.batch});
    check("grads", grads_in, {call.batch, PARAMETERS});
    check_device(x, "grad_out", grad_out_in);
    check_device(x, "grads", grads_in);
    call.check_deltas(deltas);
    const at::Tensor grad_out = grad_out_in.contiguous(), grads = grads_in.contiguous();
    at::Tensor grad_x = call.empty(x.sizes());
    if (call.batch == 0 || deltas.numel() == 0 || is_strict()) {
        if (call.batch > 0) general::input_grad(call, grad_out, grad_x);
        auto [grad_weight, grad_bias] = weighted_sum(grad_out, grads, weight, bias, x);
        return {grad_x, grad_weight, grad_bias};
    }
    at::Tensor grad_weight = call.empty(weight.sizes()), grad_bias = call.empty(bias.sizes());
    const at::Tensor kept = deltas.contiguous();
    C10_CUDA_CHECK(launch_input_gradient(kept.const_data_ptr(), call.weight.const_data_ptr<float>(),
                                         grad_out.const_data_ptr<float>(), grads.const_data_ptr<float>(),
                                         grad_x.mutable_data_ptr<float>(), grad_weight.mutable_data_ptr<float>(),
                                         grad_bias.mutable_data_ptr<float>(), call.batch, call.height, call.width,
                                         call.multiprocessors, call.stream));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {grad_x, grad_weight, grad_bias};
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("forward(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("forward_with_parameter_grads(Tensor x, Tensor weight, Tensor bias, int[2] pool, bool keep) -> "
          "(Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("all_grads(Tensor grad_out, Tensor grads, Tensor x, Tensor weight, Tensor bias, Tensor deltas, int[2] pool) -> "
          "(Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
    m.def("weighted_sum(Tensor grad_out, Tensor grads, Tensor weight, Tensor bias, Tensor? x) -> (Tensor, Tensor)",
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
                              const at::Tensor& bias, at::IntArrayRef pool) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        const bool keep = x.requires_grad();
        const auto results = CALL(forward_with_parameter_grads, x, weight, bias, pool, keep);
        context->save_for_backward({keep ? x : at::Tensor(), weight, bias, std::get<1>(results), std::get<2>(results)});
        return std::get<0>(results);
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& grad_outs) {
        const auto saved = context->get_saved_variables();
        const at::Tensor &grad_out = grad_outs[0], &x = saved[0], &weight = saved[1], &bias = saved[2], &grads = saved[3];
        at::Tensor grad_x, grad_weight, grad_bias;
        if (context->needs_input_grad(0))
            std::tie(grad_x, grad_weight, grad_bias) =
                CALL(all_grads, grad_out, grads, x, weight, bias, saved[4], at::IntArrayRef({POOL_H, POOL_W}));
        else
            std::tie(grad_weight, grad_bias) =
                CALL(weighted_sum, grad_out, grads, weight, bias, x.defined() ? std::optional(x) : std::nullopt);
        if (!context->needs_input_grad(1)) grad_weight = at::Tensor();
        if (!context->needs_input_grad(2)) grad_bias = at::Tensor();
        return {grad_x, grad_weight, grad_bias, at::Tensor()};
    }
};

at::Tensor differentiable_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                  at::IntArrayRef pool) {
    for (const at::Tensor& tensor : {x, weight, bias})
        TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(0).defined(),
                                    "conv_pool_sigmoid_sum: forward-mode derivatives (tangents) are not implemented");
    if (at::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad() || bias.requires_grad()))
        return Training::apply(x, weight, bias, pool);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return CALL(forward, x, weight, bias, pool);
}

}  // namespace

TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, Autograd, m) {
    m.impl("forward", &differentiable_forward);
    for (const char* name : {"forward_with_parameter_grads", "all_grads", "weighted_sum"})  // these raise in a backward pass
        m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

// Registered for every device, so that a tensor on the wrong one meets the checks above and their message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("forward", &forward);
    m.impl("forward_with_parameter_grads", &forward_with_parameter_grads);
    m.impl("all_grads", &all_grads);
    m.impl("weighted_sum", &weighted_sum);
}
"""


def register(namespace):
    """Shapes, for torch.compile."""

    @torch.library.register_fake(f"{namespace}::forward")
    def forward(x, weight, bias, pool):
        return x.new_empty(x.shape[0])

    @torch.library.register_fake(f"{namespace}::forward_with_parameter_grads")
    def forward_with_parameter_grads(x, weight, bias, pool, keep):
        (batch, channels, height, width), (outputs, _, kernel_h, kernel_w), (pool_h, pool_w) = x.shape, weight.shape, pool
        fits = channels <= 8 and outputs <= 64 and kernel_h * kernel_w <= 9 and pool_h * pool_w <= 16
        fits = fits and kernel_h <= pool_h + 1 and kernel_w <= pool_w + 1 and pool_w % 2 == 0 and pool_w <= 8
        rows = (height - kernel_h + 1) // pool_h
        kept = keep and fits and width % 32 == 0 and (width - kernel_w + 1) // pool_w <= 96 and batch * rows * 768 <= 2**32
        rows = rows if kept else 0
        grads = x.new_empty(batch, weight.numel() + bias.numel())
        return x.new_empty(batch), grads, x.new_empty(batch, rows, 96 * 64, dtype=torch.float16)

    @torch.library.register_fake(f"{namespace}::all_grads")
    def all_grads(grad_out, grads, x, weight, bias, deltas, pool):
        return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape)

    @torch.library.register_fake(f"{namespace}::weighted_sum")
    def weighted_sum(grad_out, grads, weight, bias, x):
        return weight.new_empty(weight.shape), bias.new_empty(bias.shape)


BUILDING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once


@functools.lru_cache(maxsize=None)
def build(name, binding, cuda, register, cflags=(), cuda_cflags=(), **constants):
    """Compile and load the sources, once a machine, and return the namespace of their operators in torch.ops.

    The namespace is `name` and a hash of all that the binary depends on: an edit gives a new library and new operators
    beside the old ones, so an edited notebook cell can simply be run again. `cuda` is None where there is none;
    `constants` become #defines on top of both sources. Raises what torch.utils.cpp_extension.load_inline raises when the
    compiler is missing or refuses the text.
    """
    from torch.utils import cpp_extension

    def fingerprint(code):  # of a function: all but the place where it was written
        return code.co_code, code.co_names, [fingerprint(c) if hasattr(c, "co_code") else c for c in code.co_consts]

    defines = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items()))
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability()
    versions = torch.__version__, torch.version.cuda, sys.version_info
    everything = binding, cuda, defines, fingerprint(register.__code__), cflags, cuda_cflags, machine, versions
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"

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
                    no_implicit_headers=True,
                )
            except BaseException:  # an interrupted or failed build would count as done when the same text is run again
                cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(namespace, None)
                raise
            register(namespace)
            operators.registered = True
    return namespace


class ModelNew(nn.Module):
    sources = NAME, BINDING, CUDA, register  # bound here, so that another variant in the same notebook cannot replace them

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    @torch.compiler.assume_constant_result
    def namespace(self):
        kernel_h, kernel_w = self.conv.kernel_size
        pool = self.avg_pool.kernel_size
        pool_h, pool_w = (pool, pool) if isinstance(pool, int) else pool
        channels = {"IN_CHANNELS": self.conv.in_channels, "OUT_CHANNELS": self.conv.out_channels}
        hopper = ("-gencode=arch=compute_90a,code=sm_90a",)  # load_inline would build for 9.0, which lacks wgmma
        sizes = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, "POOL_H": pool_h, "POOL_W": pool_w}
        return build(*self.sources, cuda_cflags=hopper, **channels, **sizes)

    def forward(self, x):
        operators = getattr(torch.ops, self.namespace())
        return operators.forward(x, self.conv.weight, self.conv.bias, self.avg_pool.kernel_size)


def main():
    from torch.utils import cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew(8, 64, 3, 4).to("cpu" if emulated else "cuda")
    x = torch.randn(3, 8, 45, 64) if emulated else torch.randn(128, 8, 384, 384, device="cuda")

    def plain(x):
        return torch.sigmoid(model.avg_pool(model.conv(x))).sum(dim=(1, 2, 3))

    def milliseconds(function, repeats=20):
        function(x)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            function(x)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeats

    with torch.no_grad():
        error = ((model(x) - plain(x)).abs().max() / plain(x).std()).item()
        print(f"{NAME}: differs from PyTorch by {error:.1e} of the outputs' spread;", end=" ")
        if emulated:
            print("ran under the emulator, which tells no times")
        else:
            print(f"{milliseconds(model):.3f} ms, PyTorch {milliseconds(plain):.3f} ms")


if __name__ == "__main__":
    main()
