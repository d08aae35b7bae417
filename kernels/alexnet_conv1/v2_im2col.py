"""alexnet_conv1, v2: the textbook way, im2col and a matrix product.

The windows are first written out as the columns of a matrix. Then the convolution is a matrix product: tiles in
shared memory, a small tile of sums in each thread's registers.

Why it is faster
    v1 loads two values for each multiply-add. Here a thread has 6 channels x 8 positions of sums in registers: 14 values from
    shared memory feed 48 multiply-adds, and each value comes from memory once a block. The price: each pixel is written for
    every window that holds it, 7.3 times at stride 4. The matrix, 1.12 GB, is written and read in chunks of at most 256 MB.
    Predicted for an H200: 0.35 ms for im2col, 1.7 for the product; measured: 0.39 and 2.29 (v1 18.2, eager 2.08).

Mathematics
    columns[term][position] = x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v], zero outside the image
    out[o][position]        = bias[o] + sum over terms of weight[o][term] * columns[term][position]
    Strict fp32, one chain of multiply-adds in the order of the terms, the bias last.

Launches (for each chunk: 184,832 positions at the original's size, so 5 of them)
    im2col     (positions / 256 x c x u)  256 threads  0        one row of a window: kernel_w values
    multiply   (tiles of 96 x 128)        256 threads  14.5 KB  6 channels x 8 positions

Floor
    154 MB in, 297 MB out, 2.25 GB for the matrix: 0.63 ms at 4.26 TB/s. 54 GFLOP in plain fp32: 0.91 ms.

Takes
    float32 CUDA tensors (batch, in_channels, height, width); any channels, kernel, stride, zero padding, bias or none,
    channels below 2^31 pixels with their padding. Anything else raises. The gradient is PyTorch's. Deterministic. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "alexnet_conv1_v2_im2col"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W: divisions by them are multiplications.
#include <cuda_runtime.h>
#include <cstdint>

#define UNROLL _Pragma("unroll")

using Element = float;  // of all tensors

constexpr int THREADS = 256;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A term is one c, u, v: input channel, row and column of the kernel.
constexpr int TERMS = IN_CHANNELS * KERNEL_H * KERNEL_W;

// Consecutive positions (b, i, j), which may begin and end in the middle of a sample, and the sizes of the images they are in.
struct Chunk {
    int count, height, width, pad_h, pad_w, out_h, out_w;
    int64_t first_sample;
    unsigned first_in_sample;  // of the first sample's positions
    __device__ unsigned plane() const { return (unsigned)out_h * out_w; }
};

// columns (TERMS, chunk.count). Adjacent threads have adjacent positions, so their stores are coalesced.
__global__ void __launch_bounds__(THREADS)
    im2col(Chunk chunk, const Element* __restrict__ x, Element* __restrict__ columns) {
    const int blocks = ceil_div(chunk.count, THREADS), k = blockIdx.x % blocks * THREADS + threadIdx.x;
    const int u = blockIdx.x / blocks % KERNEL_H, c = blockIdx.x / blocks / KERNEL_H;
    if (k >= chunk.count) return;
    const unsigned from_first = chunk.first_in_sample + k, in_sample = from_first % chunk.plane();
    const int64_t sample = chunk.first_sample + from_first / chunk.plane();
    const int h = (int)(in_sample / chunk.out_w) * STRIDE_H - chunk.pad_h + u;
    const int left = (int)(in_sample % chunk.out_w) * STRIDE_W - chunk.pad_w;
    const Element* row = x + ((sample * IN_CHANNELS + c) * chunk.height + h) * chunk.width;
    Element* column = columns + (int64_t)(c * KERNEL_H + u) * KERNEL_W * chunk.count + k;
    const bool row_exists = h >= 0 && h < chunk.height;
    UNROLL for (int v = 0; v < KERNEL_W; ++v) {
        const int w = left + v;
        column[(int64_t)v * chunk.count] = row_exists && w >= 0 && w < chunk.width ? row[w] : 0.0f;
    }
}

// A block computes a tile of TILE_M channels x TILE_N positions, its 16 x 16 threads ROWS x COLUMNS each, from DEPTH terms at a
// time. Tiles divide the channels evenly, as far as 16 threads can.
constexpr int LANES = 16, DEPTH = 16, COLUMNS = 8, TILE_N = LANES * COLUMNS;
constexpr int ROWS = ceil_div(ceil_div(OUT_CHANNELS, ceil_div(OUT_CHANNELS, 6 * LANES)), LANES), TILE_M = ROWS * LANES;
constexpr int TILES_M = ceil_div(OUT_CHANNELS, TILE_M);
static_assert(LANES * LANES == THREADS && DEPTH * LANES == THREADS);

// A thread's columns lie in two runs of 4: it reads 16 bytes at a time, and its neighbours the 16 beside them: conflict-free.
__device__ __forceinline__ int column_of_thread(int n) { return n / 4 * 4 * LANES + threadIdx.x % LANES * 4 + n % 4; }

// out = weight (OUT_CHANNELS, TERMS) * columns (TERMS, chunk.count) + bias, which may be null.
__global__ void __launch_bounds__(THREADS, 2)
    multiply(Chunk chunk, const Element* __restrict__ weight, const Element* __restrict__ columns,
             const Element* __restrict__ bias, Element* __restrict__ out) {
    // Rows are 4 longer than they need be, which avoids bank conflicts.
    __shared__ alignas(16) float left[DEPTH][TILE_M + 4];
    __shared__ alignas(16) float right[DEPTH][TILE_N + 4];
    const int m0 = blockIdx.x % TILES_M * TILE_M, n0 = blockIdx.x / TILES_M * TILE_N;
    const int first_row = threadIdx.x / LANES * ROWS;

    float sums[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < TERMS; k0 += DEPTH) {
        UNROLL for (int load = 0; load < ROWS; ++load) {
            const int index = load * THREADS + threadIdx.x, k = index % DEPTH, m = index / DEPTH;
            const bool exists = m0 + m < OUT_CHANNELS && k0 + k < TERMS;
            left[k][m] = exists ? weight[(int64_t)(m0 + m) * TERMS + k0 + k] : 0.0f;
        }
        UNROLL for (int load = 0; load < COLUMNS; ++load) {
            const int index = load * THREADS + threadIdx.x, k = index / TILE_N, n = index % TILE_N;
            const bool exists = n0 + n < chunk.count && k0 + k < TERMS;
            right[k][n] = exists ? columns[(int64_t)(k0 + k) * chunk.count + n0 + n] : 0.0f;
        }
        __syncthreads();
        UNROLL for (int k = 0; k < DEPTH; ++k) {
            float a[ROWS], b[COLUMNS];
            UNROLL for (int m = 0; m < ROWS; ++m) a[m] = left[k][first_row + m];
            UNROLL for (int n = 0; n < COLUMNS; ++n) b[n] = right[k][column_of_thread(n)];
            UNROLL for (int m = 0; m < ROWS; ++m)
                UNROLL for (int n = 0; n < COLUMNS; ++n) sums[m][n] += a[m] * b[n];
        }
        __syncthreads();  // what was read may be overwritten
    }
    UNROLL for (int n = 0; n < COLUMNS; ++n) {
        const int column = n0 + column_of_thread(n);
        if (column >= chunk.count) continue;
        const unsigned from_first = chunk.first_in_sample + column, in_sample = from_first % chunk.plane();
        const int64_t sample = chunk.first_sample + from_first / chunk.plane();
        Element* to = out + sample * OUT_CHANNELS * chunk.plane() + in_sample;
        UNROLL for (int m = 0; m < ROWS; ++m) {
            const int o = m0 + first_row + m;
            if (o < OUT_CHANNELS) to[(int64_t)o * chunk.plane()] = bias ? sums[m][n] + bias[o] : sums[m][n];
        }
    }
}

// A chunk has as many positions as 256 MB have room for, in whole tiles.
constexpr int64_t FIT = (256 << 20) / sizeof(Element) / TERMS / TILE_N * TILE_N, MOST_POSITIONS = FIT > 0 ? FIT : TILE_N;
static int64_t chunk_positions(int64_t left) { return left < MOST_POSITIONS ? left : MOST_POSITIONS; }
extern "C" int64_t count_scratch(int64_t positions) { return chunk_positions(positions) * TERMS; }

// scratch: count_scratch(positions of the batch) elements
extern "C" int launch_conv2d(const Element* x, const Element* weight, const Element* bias, Element* scratch, Element* out,
                             int64_t batch, int64_t height, int64_t width, int64_t pad_h, int64_t pad_w, int64_t out_h,
                             int64_t out_w, cudaStream_t stream) {
    const int64_t plane = out_h * out_w, positions = batch * plane;
    Chunk chunk = {0, (int)height, (int)width, (int)pad_h, (int)pad_w, (int)out_h, (int)out_w};
    for (int64_t first = 0; first < positions; first += chunk.count) {
        chunk.count = chunk_positions(positions - first);
        chunk.first_sample = first / plane, chunk.first_in_sample = first % plane;
        const int64_t rows = (int64_t)ceil_div(chunk.count, THREADS) * IN_CHANNELS * KERNEL_H;
        im2col<<<rows, THREADS, 0, stream>>>(chunk, x, scratch);
        multiply<<<TILES_M * ceil_div(chunk.count, TILE_N), THREADS, 0, stream>>>(chunk, weight, scratch, bias, out);
    }
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


def count(function, *numbers):
    """Call a C function of int64_t that returns one."""
    if not function.argtypes:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(numbers)
    return function(*numbers)


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv2d(x, weight, bias, stride, padding, kernels=kernels):
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
    if (height + 2 * pad_h) * (width + 2 * pad_w) >= 2**31:
        raise RuntimeError(f"expected fewer than 2^31 pixels a channel; got {height} x {width} padded by {[*padding]}")
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W"
    library = kernels(**dict(zip(names, (*weight.shape, *stride), strict=True)))
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(batch, out_channels, room_h // stride_h + 1, room_w // stride_w + 1)
    if out.numel():
        scratch = x.new_empty(count(library.count_scratch, batch * out.shape[2] * out.shape[3]))
        launch(library.launch_conv2d, x, weight, bias, scratch, out, batch, height, width, *padding, *out.shape[2:])
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
if torch.__version__ >= "2.7":
    conv2d.register_autocast(DEVICE, torch.float32)


class ModelNew(nn.Module):
    @staticmethod
    def operator(*operands):
        return torch.ops.alexnet_conv1_v2_im2col.forward(*operands)

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
