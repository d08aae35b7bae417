"""alexnet_conv1, v3: implicit GEMM, the same product without the matrix, in register tiles; plain fp32 as fast as it goes.

Why it is faster
    v2 moves 2.25 GB for the matrix beside 0.45 that are needed. Here a block keeps the image's rows in shared memory; a thread
    has 7 neighbouring positions in 12 channels. A row of the kernel touches 35 pixels for all 7 windows: loaded into registers
    once, they serve 11 taps: 42 loads of 16 bytes feed 924 multiply-adds. Meanwhile cp.async fetches the next four rows of the
    kernel (double buffering). The cost: a packed copy of the weights. Predicted 1.25 ms on an H200, measured 1.57.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    Strict fp32: one chain of fused multiply-adds for each output, over c, u and v; the bias last. 16-bit types, too.

Launches
    pack_weights  (weights / 256)                             256 threads  14 registers   0        one weight
    conv2d        (samples x tiles of 2 x 56 x groups of 96)  128 threads  160 registers  47.5 KB  7 positions x 12 channels

Floor
    154 MB in, 297 MB out, 0.106 ms on an H200, half in 16 bits; 54 GFLOP are 0.91 ms in plain fp32 at 1.755 GHz: compute bound.

Takes
    float32, float16 or bfloat16 CUDA tensors (batch, in_channels, height, width); any channels, kernel, stride, padding, bias
    or none, channels below 2^31 pixels with their padding, compute capability 7.5 or later (before 8.0 without cp.async).
    Kernels whose width is a large prime, and images narrower than a tile, are slow. The gradient is PyTorch's. Deterministic.
    MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "alexnet_conv1_v3_tiled"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs ELEMENT, IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W: loops with known ends are unrolled.
#define DIGITS_float 24
#define DIGITS___half 11
#define DIGITS___nv_bfloat16 8
#define PASTE(a, b) a##b
#define DIGITS_OF(type) PASTE(DIGITS_, type)
#define DIGITS DIGITS_OF(ELEMENT)  // of an element's significand
#if DIGITS == 8                    // a header takes half a second to compile
#include <cuda_bf16.h>
#elif DIGITS == 11
#include <cuda_fp16.h>
#endif
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <cstdint>

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

using Element = ELEMENT;  // of all tensors: float, __half or __nv_bfloat16; in shared memory they are floats
// Explicit: PyTorch builds without the conversions of 16-bit types.
#if DIGITS == 24
DEVICE float to_float(float x) { return x; }
DEVICE float from_float(float x) { return x; }
#elif DIGITS == 11
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE __half from_float(float x) { return __float2half_rn(x); }
#else
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
#endif

constexpr int WARP = 32, PACK_THREADS = 256, STAGE_FLOATS = 6144;  // of two stages: one is filled, one is computed with

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// The largest equal parts of n, none larger than `limit`; the last may be smaller.
constexpr int even_part(int n, int limit) { return ceil_div(n, ceil_div(n, limit)); }

// The sizes of one call. A channel of the image with its padding, and so one of the output, is below 2^31.
struct Image {
    int height, width, pad_h, pad_w, out_h, out_w;
};

DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// Copies 4 bytes, or writes a zero where `bytes` is 0; then `from` is not read.
DEVICE void cp_async_ca_4(uint32_t to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Copies a value, or writes a zero, without waiting. With CUDA's own __pipeline_memcpy_async the compiler branches.
DEVICE void async_copy(float* to, const Element* from, bool exists) {
#if DIGITS < 24 || defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // no cp.async: it does not convert, and is there from 8.0 on
    *to = exists ? to_float(*from) : 0;
#else
    cp_async_ca_4(shared_address(to), from, exists ? 4 : 0);
#endif
}
// Waits for all copies of this thread.
DEVICE void async_copy_wait_all() { __pipeline_commit(), __pipeline_wait_prior(0); }

// Output channels in groups of equal size, at most 96.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 96), OUT_BLOCK = round_up(ceil_div(OUT_CHANNELS, OUT_GROUPS), 8);

// The extent of what neighbouring positions read in `taps` columns (or rows) of the kernel, as it lies in shared memory:
// position p's column v at p * smaller(stride, taps) + v. Where the stride leaves columns out, they are not copied.
constexpr int reach(int positions, int taps, int stride) { return (positions - 1) * smaller(stride, taps) + taps; }

// A thread has 7 positions beside each other in 12 channels (8 where that divides the group better), 8 threads have a row of a
// tile: 56 positions, for rows of 55. Seven, because adjacent threads then read 28 floats apart at stride 4: 16-byte loads
// of 8 threads are conflict-free.
constexpr int CHANNELS = OUT_BLOCK % 12 == 0 ? 12 : 8, CHANNEL_LANES = OUT_BLOCK / CHANNELS;
constexpr int POSITIONS = 7, COLUMN_LANES = 8, TILE_COLUMNS = POSITIONS * COLUMN_LANES;

// What is in shared memory at a time is a slice of the taps: SLICE_C input channels x SLICE_U rows x SLICE_V columns of the
// kernel. Columns divide evenly, because they are unrolled; what they need of an image's row has to fit in registers.
constexpr int slice_v() {
    int taps = smaller(KERNEL_W, 16);
    while (KERNEL_W % taps || reach(POSITIONS, taps, STRIDE_W) > 40) --taps;
    return taps;
}
constexpr int SLICE_V = slice_v(), STEP_W = smaller(STRIDE_W, SLICE_V), VALUES = reach(POSITIONS, SLICE_V, STRIDE_W);
constexpr int WIDTH = reach(TILE_COLUMNS, SLICE_V, STRIDE_W), PITCH = round_up(WIDTH, 4);

constexpr int channel_floats(int rows, int u) { return reach(rows, u, STRIDE_H) * PITCH + u * SLICE_V * OUT_BLOCK; }
constexpr int tile_rows() {  // as many as make 128 threads, if four rows of the kernel fit beside them
    int rows = ceil_div(16, CHANNEL_LANES);
    while (rows > 1 && channel_floats(rows, smaller(KERNEL_H, 4)) > STAGE_FLOATS) --rows;
    return rows;
}
constexpr int TILE_ROWS = tile_rows();
constexpr int slice_u() {
    int taps = KERNEL_H;
    while (taps > 1 && channel_floats(TILE_ROWS, taps) > STAGE_FLOATS) --taps;
    return even_part(KERNEL_H, taps);
}
constexpr int SLICE_U = slice_u(), STEP_H = smaller(STRIDE_H, SLICE_U), ROWS = reach(TILE_ROWS, SLICE_U, STRIDE_H);
constexpr int SLICE_C = SLICE_U == KERNEL_H ? even_part(IN_CHANNELS, STAGE_FLOATS / channel_floats(TILE_ROWS, SLICE_U)) : 1;
constexpr int SLICES_C = ceil_div(IN_CHANNELS, SLICE_C), SLICES_U = ceil_div(KERNEL_H, SLICE_U);
constexpr int SLICES_V = KERNEL_W / SLICE_V, SLICES = SLICES_C * SLICES_U * SLICES_V;

struct Slice {  // its first tap
    int c, u, v;
    __device__ explicit Slice(int slice)
        : c(slice / SLICES_V / SLICES_U * SLICE_C), u(slice / SLICES_V % SLICES_U * SLICE_U), v(slice % SLICES_V * SLICE_V) {}
};

// Whole warps copy; threads without positions in the tile do nothing else.
constexpr int COMPUTING = TILE_ROWS * CHANNEL_LANES * COLUMN_LANES, THREADS = round_up(COMPUTING, WARP);
constexpr int SLICE_WEIGHTS = SLICE_C * SLICE_U * SLICE_V * OUT_BLOCK;
constexpr int64_t PACKED = (int64_t)OUT_GROUPS * SLICES * SLICE_WEIGHTS;

struct alignas(16) Stage {
    float inputs[SLICE_C][ROWS][PITCH];
    float weights[SLICE_C][SLICE_U][SLICE_V][OUT_BLOCK];
};
static_assert(sizeof(Stage) <= STAGE_FLOATS * sizeof(float));

// weight (OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W) -> packed (OUT_GROUPS, SLICES, a Stage's weights), in the order in
// which a block reads them. Zeros stand for what does not exist.
__global__ void __launch_bounds__(PACK_THREADS) pack_weights(const Element* __restrict__ weight, float* __restrict__ packed) {
    const int64_t index = (int64_t)blockIdx.x * PACK_THREADS + threadIdx.x;
    if (index >= PACKED) return;
    const int k = index % SLICE_WEIGHTS;
    const Slice slice(index / SLICE_WEIGHTS % SLICES);
    const int v = slice.v + k / OUT_BLOCK % SLICE_V, u = slice.u + k / OUT_BLOCK / SLICE_V % SLICE_U;
    const int c = slice.c + k / OUT_BLOCK / SLICE_V / SLICE_U;
    const int64_t o = index / SLICE_WEIGHTS / SLICES * OUT_BLOCK + k % OUT_BLOCK;
    const bool exists = o < OUT_CHANNELS && c < IN_CHANNELS && u < KERNEL_H;
    packed[index] = exists ? to_float(weight[((o * IN_CHANNELS + c) * KERNEL_H + u) * KERNEL_W + v]) : 0.0f;
}

// TILE_ROWS x TILE_COLUMNS positions of a sample, in a group of output channels.
struct Tile {
    int64_t sample;
    int group, row, column;  // first position
    __device__ Tile(const Image& image, int64_t index) {
        group = index % OUT_GROUPS;
        const int64_t across = ceil_div(image.out_w, TILE_COLUMNS);
        column = index / OUT_GROUPS % across * TILE_COLUMNS;
        const int64_t down = ceil_div(image.out_h, TILE_ROWS);
        row = index / OUT_GROUPS / across % down * TILE_ROWS;
        sample = index / OUT_GROUPS / across / down;
    }
};

// Asks for a slice of the weights, and for what the tile's positions read of the image under it: a warp for each row. Columns
// outside the image are zero.
DEVICE void fill(Stage& stage, const Image& image, const Tile& tile, const Element* __restrict__ x,
                 const float* __restrict__ packed, int slice_index) {
    const Slice slice(slice_index);
    const int left = tile.column * STRIDE_W - image.pad_w + slice.v;
    UNROLL_1 for (int k = threadIdx.x / WARP; k < SLICE_C * ROWS; k += THREADS / WARP) {
        const int c = slice.c + k / ROWS, r = k % ROWS;
        const int h = tile.row * STRIDE_H - image.pad_h + slice.u + r / STEP_H * STRIDE_H + r % STEP_H;
        const int width = c < IN_CHANNELS && h >= 0 && h < image.height ? image.width : 0;
        const Element* row = x + ((tile.sample * IN_CHANNELS + c) * image.height + h) * image.width;
        UNROLL for (int first = 0; first < WIDTH; first += WARP) {
            const int s = first + threadIdx.x % WARP, w = left + s / STEP_W * STRIDE_W + s % STEP_W;
            if (first + WARP <= WIDTH || s < WIDTH)
                async_copy(&stage.inputs[k / ROWS][r][s], row + w, (unsigned)w < (unsigned)width);
        }
    }
    float* weights = &stage.weights[0][0][0][0];
    const float* from = packed + ((int64_t)tile.group * SLICES + slice_index) * SLICE_WEIGHTS;
#pragma unroll 4
    for (int k = 4 * threadIdx.x; k < SLICE_WEIGHTS; k += 4 * THREADS) __pipeline_memcpy_async(weights + k, from + k, 16);
}

// On the way out a tile passes through shared memory, so that stores are coalesced. The odd pitch avoids bank conflicts.
union Shared {
    Stage stages[2];
    float outputs[OUT_BLOCK][TILE_ROWS * TILE_COLUMNS + 1];
};
static_assert(sizeof(Shared) <= 48 * 1024);

// One output tile. Occupancy: 12 warps an SM, 168 registers a thread.
__global__ void __launch_bounds__(THREADS, 384 / THREADS)
    conv2d(Image image, const Element* __restrict__ x, const float* __restrict__ packed, const Element* __restrict__ bias,
           Element* __restrict__ out) {
    __shared__ Shared shared;
    const Tile tile(image, blockIdx.x);
    const int column_lane = threadIdx.x % COLUMN_LANES, channel_lane = threadIdx.x / COLUMN_LANES % CHANNEL_LANES;
    const int row_lane = threadIdx.x / COLUMN_LANES / CHANNEL_LANES;
    const bool computes = COMPUTING == THREADS || threadIdx.x < COMPUTING;

    float sums[CHANNELS][POSITIONS] = {};
    fill(shared.stages[0], image, tile, x, packed, 0);
    UNROLL_1 for (int index = 0; index < SLICES; ++index) {
        async_copy_wait_all();
        __syncthreads();  // everybody's copies have arrived, and the other stage has been read
        if (index + 1 < SLICES) fill(shared.stages[(index + 1) % 2], image, tile, x, packed, index + 1);
        if (!computes) continue;
        const Stage& stage = shared.stages[index % 2];
        const Slice slice(index);
        UNROLL_1 for (int c = 0; c < SLICE_C && slice.c + c < IN_CHANNELS; ++c)
        UNROLL_1 for (int u = 0; u < SLICE_U && slice.u + u < KERNEL_H; ++u) {
            float values[VALUES];
            UNROLL for (int k = 0; k < VALUES; ++k)
                values[k] = stage.inputs[c][row_lane * STEP_H + u][column_lane * (POSITIONS * STEP_W) + k];
            UNROLL for (int v = 0; v < SLICE_V; ++v) {
                float weights[CHANNELS];
                UNROLL for (int o = 0; o < CHANNELS; ++o) weights[o] = stage.weights[c][u][v][channel_lane * CHANNELS + o];
                UNROLL for (int o = 0; o < CHANNELS; ++o)
                    UNROLL for (int p = 0; p < POSITIONS; ++p) sums[o][p] += weights[o] * values[p * STEP_W + v];
            }
        }
    }

    __syncthreads();  // the last stage has been read
    const int first_out = tile.group * OUT_BLOCK;
    if (computes)
        UNROLL for (int o = 0; o < CHANNELS; ++o) {
            const int in_group = channel_lane * CHANNELS + o;
            const bool has_bias = bias && first_out + in_group < OUT_CHANNELS;
            const float add = has_bias ? to_float(bias[first_out + in_group]) : 0.0f;
            UNROLL for (int p = 0; p < POSITIONS; ++p)
                shared.outputs[in_group][row_lane * TILE_COLUMNS + column_lane * POSITIONS + p] = sums[o][p] + add;
        }
    __syncthreads();
    const int outs = smaller(OUT_BLOCK, OUT_CHANNELS - first_out), columns = smaller(TILE_COLUMNS, image.out_w - tile.column);
    const int rows = smaller(TILE_ROWS, image.out_h - tile.row);
    const int64_t plane = (int64_t)image.out_h * image.out_w;
    Element* first = out + (tile.sample * OUT_CHANNELS + first_out) * plane + (int64_t)tile.row * image.out_w + tile.column;
#pragma unroll 2
    for (int k = threadIdx.x / WARP; k < OUT_BLOCK * TILE_ROWS; k += THREADS / WARP) {
        const int o = k / TILE_ROWS, row = k % TILE_ROWS;
        Element* to = first + o * plane + (int64_t)row * image.out_w;
        UNROLL for (int column = threadIdx.x % WARP; column < TILE_COLUMNS; column += WARP)
            if (o < outs && row < rows && column < columns)
                to[column] = from_float(shared.outputs[o][row * TILE_COLUMNS + column]);
    }
}

extern "C" int64_t count_scratch() { return PACKED; }
extern "C" int64_t count_blocks(int64_t batch, int64_t out_h, int64_t out_w) {
    return batch * ceil_div(out_h, TILE_ROWS) * ceil_div(out_w, TILE_COLUMNS) * OUT_GROUPS;
}

// scratch: count_scratch() floats, for the packed weights
extern "C" int launch_conv2d(const Element* x, const Element* weight, const Element* bias, float* scratch, Element* out,
                             int64_t blocks, int64_t height, int64_t width, int64_t pad_h, int64_t pad_w, int64_t out_h,
                             int64_t out_w, cudaStream_t stream) {
    const Image image = {(int)height, (int)width, (int)pad_h, (int)pad_w, (int)out_h, (int)out_w};
    pack_weights<<<(PACKED + PACK_THREADS - 1) / PACK_THREADS, PACK_THREADS, 0, stream>>>(weight, scratch);
    conv2d<<<blocks, THREADS, 0, stream>>>(image, x, scratch, bias, out);
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
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def count(function, *numbers):
    """Call a C function of int64_t that returns one."""
    if not function.argtypes:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(numbers)
    return function(*numbers)


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv2d(x, weight, bias, stride, padding, kernels=kernels):
    """Return the convolution's output, of x's type. Raises RuntimeError for what the kernel does not take."""
    (batch, *_, height, width), (out_channels, in_channels, kernel_h, kernel_w) = x.shape, weight.shape
    (stride_h, stride_w), (pad_h, pad_w) = stride, padding
    if x.dtype not in ELEMENTS:
        raise RuntimeError(f"expected x as float32, float16 or bfloat16; got {x.dtype}")
    check("x", x, (batch, in_channels, height, width), x.device, x.dtype)
    check("weight", weight, weight.shape, x.device, x.dtype)
    if bias is not None:
        check("bias", bias, (out_channels,), x.device, x.dtype)
    room_h, room_w = height + 2 * pad_h - kernel_h, width + 2 * pad_w - kernel_w
    if min(*stride, kernel_h, kernel_w) < 1 or min(*padding, room_h, room_w) < 0:
        fits = f"a kernel of {[kernel_h, kernel_w]}, strides {[*stride]} and padding {[*padding]}"
        raise RuntimeError(f"expected {fits} to fit; got an image of {height} x {width}")
    if (height + 2 * pad_h) * (width + 2 * pad_w) >= 2**31:
        raise RuntimeError(f"expected fewer than 2^31 pixels a channel; got {height} x {width} padded by {[*padding]}")
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W"
    library = kernels(ELEMENT=ELEMENTS[x.dtype], **dict(zip(names, (*weight.shape, *stride), strict=True)))
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(batch, out_channels, room_h // stride_h + 1, room_w // stride_w + 1)
    if out.numel():
        blocks = count(library.count_blocks, batch, *out.shape[2:])
        scratch = x.new_empty(count(library.count_scratch), dtype=torch.float32)
        if blocks >= 2**31:
            raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got one of {blocks}")
        launch(library.launch_conv2d, x, weight, bias, scratch, out, blocks, height, width, *padding, *out.shape[2:])
    return out


@conv2d.register_fake
def original(x, weight, bias=None, stride=1, padding=0):
    return nn.functional.conv2d(x, weight, bias, stride, padding)


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the output again, 297 MB."""
    tensors = [each for each in ctx.saved_tensors if each is not None]  # a bias may be missing
    found = torch.func.vjp(lambda *tensors: original(*tensors, **ctx.numbers), *tensors)[1](grad)
    return *found, *[None] * (5 - len(found))


def setup_context(ctx, inputs, output):
    *tensors, stride, padding = inputs
    ctx.save_for_backward(*tensors)
    ctx.numbers = {"stride": stride, "padding": padding}


conv2d.register_autograd(backward, setup_context=setup_context)


class ModelNew(nn.Module):
    @staticmethod
    def operator(x, weight, bias, *numbers):
        if torch.is_autocast_enabled(DEVICE):
            dtype = torch.get_autocast_dtype(DEVICE)
            x, weight, bias = (t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, weight, bias))
        return torch.ops.alexnet_conv1_v3_tiled.forward(x, weight, bias, *numbers)

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
