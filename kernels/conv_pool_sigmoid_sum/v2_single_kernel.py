"""conv_pool_sigmoid_sum, v2: convolution, pooling, sigmoid and sum in one kernel.

Why it is faster
    v1 is memory bound: the convolution's 4.8 GB are written and read, the input is 0.6 GB. Here only sums leave the chip. Tiles
    of the input are copied to shared memory, and a thread computes a pooling window in 16 output channels at once, one input
    value for 16 multiply-adds. The bound is plain fp32 arithmetic; the tensor cores stay unused. Predicted 3 to 3.5 ms on an
    H200, measured 6.3 (eager 11.2): copying tiles, with its index arithmetic and barriers, is not hidden behind the
    multiply-adds, at 40% of their peak.

Mathematics
    pooled[b,o,i,j] = bias[o] + 1/p^2 * sum over u,v < p, c,r,s of w[o,c,r,s] * x[b,c, p*i+u+r, p*j+v+s]
    out[b]          = sum over o,i,j of sigmoid(pooled), strict fp32; the error of __expf is damped by s * (1 - s): below 2e-7

Launches
    conv_pool_sum: a block of 256 threads and 36 KB a sample, tile of 32 x 8 windows and group of 16 channels

Floor
    170 GFLOP in plain fp32, 2.5 ms at an H200's peak (67 TFLOP/s at 1.98 GHz); 604 MB in are 0.14 ms. Compute bound.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), any sizes that the original takes, in slices that fit into shared
    memory; few, huge windows are slow. Anything else raises before a launch. The gradient is PyTorch's. Deterministic.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv_pool_sigmoid_sum_v2_single_kernel"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

using Element = float;  // of x and the parameters

constexpr int WARP = 32, THREADS = 256, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int clamp(int n, int low, int high) { return n < low ? low : smaller(n, high); }
constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

// Output channels in groups of equal size, at most 16: as many accumulators as a thread has.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 16), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUT_PITCH = ceil_div(OUT_BLOCK, 4) * 4;  // of a row of weights in shared memory, for 16-byte reads

// What a block holds in shared memory at a time is a slice of the channels, of the kernel and of each window. Slices divide
// evenly, so they need no bounds. At common sizes the kernel and the window are one slice.
constexpr int WEIGHT_FLOATS = 2304, TILE_FLOATS = 9216;  // together under the 48 KB that every device has
constexpr int SLICE_S = largest_divisor(KERNEL_W, WEIGHT_FLOATS / OUT_PITCH);
constexpr int SLICE_R = largest_divisor(KERNEL_H, WEIGHT_FLOATS / (OUT_PITCH * SLICE_S));
constexpr int SLICE_V = largest_divisor(POOL_W, TILE_FLOATS / 2 / SLICE_R - SLICE_S + 1);  // half: PITCH < 2 * WIDTH
constexpr int SLICE_U = largest_divisor(POOL_H, TILE_FLOATS / 2 / (SLICE_V + SLICE_S - 1) - SLICE_R + 1);
constexpr int TALL = SLICE_U + SLICE_R - 1, WIDE = SLICE_V + SLICE_S - 1;  // what a window's thread reads of a tile

// A tile has as many columns and rows of windows as fit. Adjacent threads have adjacent windows, so they read it POOL_W columns
// apart. To avoid bank conflicts, columns are stored by their remainder modulo POOL_W: first all of 0, then of 1, and so on.
constexpr int TILE_COLUMNS = clamp(TILE_FLOATS / TALL / POOL_W - ceil_div(WIDE, POOL_W) + 1, 1, WARP);
constexpr int WIDTH = (TILE_COLUMNS - 1) * POOL_W + WIDE, RUN = ceil_div(WIDTH, POOL_W), PITCH = smaller(POOL_W, WIDTH) * RUN;
constexpr int TILE_ROWS = clamp((TILE_FLOATS / PITCH - TALL) / POOL_H + 1, 1, WARPS), HEIGHT = (TILE_ROWS - 1) * POOL_H + TALL;
constexpr int SLICE_C = largest_divisor(
    IN_CHANNELS, smaller(TILE_FLOATS / (HEIGHT * PITCH), WEIGHT_FLOATS / (OUT_PITCH * SLICE_R * SLICE_S)));

__device__ int stored_column(int column) { return column % POOL_W * RUN + column / POOL_W; }

// Unrolling is limited, so that large kernels and windows do not take minutes to compile.
constexpr int UNROLL_S = SLICE_S * SLICE_V <= 128 ? SLICE_S : 1, UNROLL_V = SLICE_S * SLICE_V <= 128 ? SLICE_V : 4;
constexpr int UNROLL_U = SLICE_S * SLICE_V * SLICE_U <= 64 ? SLICE_U : 1;

// The sum of `value` over the block, valid in thread 0. The order of additions is fixed, so the bits are too.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[WARPS];
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = value;
    __syncthreads();
    value = 0.0f;
    for (int warp = 0; warp < WARPS; ++warp) value += warp_sums[warp];
    return value;
}

// An image of x, and the windows that fit into it.
struct Image {
    int height, width, rows = (height - KERNEL_H + 1) / POOL_H, columns = (width - KERNEL_W + 1) / POOL_W;
    __host__ __device__ int64_t blocks() const {
        return (int64_t)OUT_GROUPS * ceil_div(rows, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS);
    }
};

// x (batch, IN_CHANNELS, height, width) -> out (batch,). `partial_sums` has a float a block, then a zero word a sample.
// Registers are bounded for an occupancy of three blocks an SM: while one waits for its tile, the others compute.
__global__ void __launch_bounds__(THREADS, 3)
    conv_pool_sum(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ bias,
                  float* partial_sums, float* __restrict__ out, Image image) {
    __shared__ float tile[SLICE_C][HEIGHT][PITCH];
    __shared__ alignas(16) float weights[SLICE_C][SLICE_R][SLICE_S][OUT_PITCH];
    // The block's tile and OUT_BLOCK output channels. Blocks that read the same input are neighbours, and meet in the L2 cache.
    const int sample = blockIdx.x / image.blocks(), tiles_across = ceil_div(image.columns, TILE_COLUMNS);
    const int64_t block = blockIdx.x % image.blocks(), index = block / OUT_GROUPS, plane = (int64_t)image.height * image.width;
    const int first_channel = block % OUT_GROUPS * OUT_BLOCK;
    const int tile_row = index / tiles_across * TILE_ROWS, tile_column = index % tiles_across * TILE_COLUMNS;
    // The thread's window in the tile, unless it is past the edge of the image, or beyond a small tile.
    const int y = threadIdx.x / TILE_COLUMNS, across = threadIdx.x % TILE_COLUMNS;
    const bool exists = y < TILE_ROWS && tile_row + y < image.rows && tile_column + across < image.columns;
    float total[OUT_BLOCK] = {};  // the convolution (without bias), summed over the window

    // c: input channel; r, s: row and column of the kernel; u, v: of the window. c0, r0, s0, u0, v0: where the slice begins.
    // Loops of one nest are not indented.
    UNROLL_1 for (int c0 = 0; c0 < IN_CHANNELS; c0 += SLICE_C)
    UNROLL_1 for (int r0 = 0; r0 < KERNEL_H; r0 += SLICE_R)
    UNROLL_1 for (int s0 = 0; s0 < KERNEL_W; s0 += SLICE_S)
    UNROLL_1 for (int u0 = 0; u0 < POOL_H; u0 += SLICE_U)
    UNROLL_1 for (int v0 = 0; v0 < POOL_W; v0 += SLICE_V) {
        const int top = tile_row * POOL_H + u0 + r0, left = tile_column * POOL_W + v0 + s0;
        const Element* corner = x + ((int64_t)sample * IN_CHANNELS + c0) * plane + (int64_t)top * image.width + left;
#pragma unroll 2
        for (int k = threadIdx.x; k < SLICE_C * HEIGHT * WIDTH; k += THREADS) {
            const int c = k / WIDTH / HEIGHT, h = k / WIDTH % HEIGHT, w = k % WIDTH;
            const bool inside = top + h < image.height && left + w < image.width;
            tile[c][h][stored_column(w)] = inside ? corner[c * plane + (int64_t)h * image.width + w] : 0.0f;
        }
        UNROLL_1 for (int k = threadIdx.x; k < SLICE_C * SLICE_R * SLICE_S * OUT_BLOCK; k += THREADS) {
            const int o = k % OUT_BLOCK, s = k / OUT_BLOCK % SLICE_S, r = k / OUT_BLOCK / SLICE_S % SLICE_R;
            const int c = k / OUT_BLOCK / SLICE_S / SLICE_R, channel = smaller(first_channel + o, OUT_CHANNELS - 1);
            weights[c][r][s][o] = weight[(((int64_t)channel * IN_CHANNELS + c0 + c) * KERNEL_H + r0 + r) * KERNEL_W + s0 + s];
        }
        __syncthreads();
        if (exists) {
            float sum[OUT_BLOCK] = {};
            UNROLL_1 for (int c = 0; c < SLICE_C; ++c)
            UNROLL_1 for (int r = 0; r < SLICE_R; ++r)
            _Pragma("unroll (UNROLL_S)") for (int s = 0; s < SLICE_S; ++s)
            _Pragma("unroll (UNROLL_U)") for (int u = 0; u < SLICE_U; ++u)
            _Pragma("unroll (UNROLL_V)") for (int v = 0; v < SLICE_V; ++v) {
                const float value = tile[c][y * POOL_H + u + r][stored_column(v + s) + across];
                UNROLL for (int o = 0; o < OUT_BLOCK; ++o) sum[o] += value * weights[c][r][s][o];
            }
            UNROLL for (int o = 0; o < OUT_BLOCK; ++o) total[o] += sum[o];
        }
        __syncthreads();  // the slice has been read; the next may overwrite it
    }
    float sum = 0.0f;
    UNROLL for (int o = 0; o < OUT_BLOCK; ++o)
        if (exists && first_channel + o < OUT_CHANNELS)
            sum += 1.0f / (1.0f + __expf(-(total[o] * (1.0f / (POOL_H * POOL_W)) + bias[first_channel + o])));
    sum = block_sum(sum);

    // The fence makes this block's sum visible before its arrival; the last block's fence, the others' sums to itself.
    bool last = false;
    if (threadIdx.x == 0) {
        partial_sums[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(reinterpret_cast<unsigned*>(partial_sums + gridDim.x) + sample, 1u) == image.blocks() - 1;
        __threadfence();
    }
    if (!__syncthreads_or(last)) return;
    sum = 0.0f;
    for (int64_t k = threadIdx.x; k < image.blocks(); k += THREADS) sum += partial_sums[sample * image.blocks() + k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[sample] = sum;
}

extern "C" int64_t count_blocks(int64_t batch, int64_t height, int64_t width) {
    return batch * Image{static_cast<int>(height), static_cast<int>(width)}.blocks();
}

// scratch: `partial_sums`
extern "C" int launch_conv_pool_sum(const Element* x, const Element* weight, const Element* bias, float* scratch, float* out,
                                    int64_t batch, int64_t height, int64_t width, cudaStream_t stream) {
    const Image image = {static_cast<int>(height), static_cast<int>(width)};
    const int64_t blocks = batch * image.blocks();
    cudaMemsetAsync(scratch + blocks, 0, batch * sizeof(unsigned), stream);
    conv_pool_sum<<<blocks, THREADS, 0, stream>>>(x, weight, bias, scratch, out, image);
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
SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor"


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv_pool_sum(x, weight, bias, pool, kernels=kernels):
    """Return (batch,) of x (batch, in_channels, height, width). Raises RuntimeError for what the kernel does not take."""
    batch, *_, height, width = x.shape
    (out_channels, in_channels, kernel_h, kernel_w), (pool_h, pool_w) = weight.shape, pool
    check("x", x, (batch, in_channels, height, width), x.device)
    check("weight", weight, weight.shape, x.device)
    check("bias", bias, (out_channels,), x.device)
    if min(pool) < 1 or height < kernel_h + pool_h - 1 or width < kernel_w + pool_w - 1:
        fits = f"room for a window of {[*pool]} behind a kernel of {[kernel_h, kernel_w]}"
        raise RuntimeError(f"expected {fits}; got an image of {height} x {width}")
    channels, pools = {"IN_CHANNELS": in_channels, "OUT_CHANNELS": out_channels}, {"POOL_H": pool_h, "POOL_W": pool_w}
    library = kernels(**channels, KERNEL_H=kernel_h, KERNEL_W=kernel_w, **pools)
    library.count_blocks.restype = ctypes.c_int64
    blocks = library.count_blocks(*map(ctypes.c_int64, (batch, height, width)))
    if blocks >= 2**31:
        raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got one of {blocks}")
    x, weight, bias, out = x.contiguous(), weight.contiguous(), bias.contiguous(), x.new_empty(batch)
    if batch:
        launch(library.launch_conv_pool_sum, x, weight, bias, x.new_empty(blocks + batch), out, batch, height, width)
    return out


@conv_pool_sum.register_fake
def original(x, weight, bias, pool):
    return torch.sigmoid(nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)).sum(dim=(1, 2, 3))


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, with the 4.8 GB that the forward pass avoids."""
    return *torch.func.vjp(lambda *tensors: original(*tensors, ctx.pool), *ctx.saved_tensors)[1](grad), None


def setup_context(ctx, inputs, output):
    *tensors, ctx.pool = inputs
    ctx.save_for_backward(*tensors)


conv_pool_sum.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    conv_pool_sum.register_autocast(DEVICE, torch.float32)


class ModelNew(nn.Module):
    @staticmethod
    def operator(*operands):
        return torch.ops.conv_pool_sigmoid_sum_v2_single_kernel.forward(*operands)

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
