"""conv3d_div_max_gap_bias_sum, v2: everything behind the convolution in one kernel.

The kernel also does the max pooling: it reads the convolution's output and writes one number a sample. The convolution is
PyTorch's.

Why it is faster
    v1's pooling reads 441 MB and writes 55 MB of maxima and 110 MB of indices, and v1's tail reads the maxima again. Here each
    value is read once, and its window's maximum lives in a register until it is added to a sum. Reads are coalesced: adjacent
    threads take adjacent windows, two floats at once. What it costs: a build for each pool size. The convolution's 441 MB bound
    the gain. Measured on an H200: 1.98 ms (v1 2.12, eager 2.35).

Mathematics
    out[b] = 1/(N*d) * sum over o,k of max over window k of y[b,o,.]  +  sum over o of bias[o]     N: whole windows of a channel
    For d < 0, y / d = (-y) / |d|: the convolution is run with negated weights and bias. The maximum is PyTorch's: a window is
    scanned from -infinity; a value replaces the maximum if it is larger or NaN.

Launches
    kernel       grid                                    block  shared  work of a thread
    fused_pool   (batch,), for averages (batch*channels,) 1024  128 B   every 1024th window of its sample (channel)

Floor
    Memory bound: 441 MB written by the convolution and read once by this kernel.

Takes
    What the original takes, in float32 on CUDA, a sample of the convolution's output below 2^31 values. The kernel adds one
    value, or one a channel, and sums over channels; for another `bias` or `sum_dim` it gives averages, and PyTorch adds.
    Anything else raises. The gradient is PyTorch's. Deterministic. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv3d_div_max_gap_bias_sum_v2_fused_pool"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's

CUDA = r"""
// Needs POOL_D, POOL_H and POOL_W, the window's sizes.
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

using Element = float;  // of y and the bias

constexpr int WARP = 32, THREADS = 1024;

// Adjacent values that are loaded by one instruction; their address is a multiple of their size.
template <int VALUES>
struct alignas(VALUES * sizeof(Element)) Pack {
    Element lane[VALUES];
};

// The maximum of the window that starts at `corner`, as PyTorch finds it: the last NaN, else the first of the largest.
template <int VALUES>
__device__ float window_max(const Element* corner, int height, int width) {
    float largest = -INFINITY;
    for (int u = 0; u < POOL_D; ++u)
        for (int v = 0; v < POOL_H; ++v)
            for (int w = 0; w < POOL_W; w += VALUES) {
                const Element* next = corner + ((int64_t)u * height + v) * width + w;
                const Pack<VALUES> pack = *reinterpret_cast<const Pack<VALUES>*>(next);
                for (const float value : pack.lane)
                    if (value > largest || value != value) largest = value;
            }
    return largest;
}

// The sum of `value` over the block, valid in thread 0. The order of additions is fixed, so the bits are too.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[THREADS / WARP];
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = value;
    __syncthreads();
    if (threadIdx.x < WARP) {
        value = threadIdx.x < THREADS / WARP ? warp_sums[threadIdx.x] : 0.0f;
        for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    }
    return value;
}

// y (groups, channels, depth, height, width) and bias (channels,) -> out (groups,): the sum of all whole windows' maxima
// / windows of a channel / divisor + the sum of bias, if there is one. A group is a sample, or, with channels = 1, one
// channel of it. One block a group. A group has less than 2^31 values, so 32 bits count its windows.
template <int VALUES>
__global__ void __launch_bounds__(THREADS, 1) fused_pool(const Element* __restrict__ y, const Element* __restrict__ bias,
                                                      float* __restrict__ out, int channels, int depth, int height, int width,
                                                      float divisor) {
    const unsigned slabs = depth / POOL_D, rows = height / POOL_H, columns = width / POOL_W;
    const unsigned windows = channels * slabs * rows * columns;
    const Element* group = y + (int64_t)blockIdx.x * channels * depth * height * width;
    float sum = 0.0f;
    // Coalesced: adjacent threads take adjacent windows. Unrolled so that the loads of two windows are in flight at once, as
    // one block an SM has no more threads; hence also the second launch bound, which grants a thread the registers, and the
    // 64-bit counter, which cannot wrap round.
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < windows; i += THREADS) {
        const unsigned window = i;  // a 32-bit division is far cheaper
        const unsigned left = window % columns * POOL_W;
        const unsigned row = window / columns;  // over all slabs of all channels
        const unsigned slab = row / rows;       // over all channels
        const unsigned front = slab / slabs * depth + slab % slabs * POOL_D;
        const unsigned top = front * height + row % rows * POOL_H;
        sum += window_max<VALUES>(group + top * width + left, height, width);
    }
    sum = sum / (slabs * rows * columns) / divisor;
    if (bias)
        for (int channel = threadIdx.x; channel < channels; channel += THREADS) sum += bias[channel];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// `bias` may be null.
extern "C" int launch_fused_pool(const Element* y, const Element* bias, float* out, int64_t groups, int64_t channels,
                                 int64_t depth, int64_t height, int64_t width, double divisor, cudaStream_t stream) {
    // Do all windows start at a multiple of two values in every row, so that two can be read at once?
    const bool paired = POOL_W % 2 == 0 && width % 2 == 0 && reinterpret_cast<uintptr_t>(y) % sizeof(Pack<2>) == 0;
    const auto kernel = paired ? fused_pool<2> : fused_pool<1>;
    kernel<<<groups, THREADS, 0, stream>>>(y, bias, out, channels, depth, height, width, divisor);
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
SCHEMA = "(Tensor y, Tensor bias, float divisor, int[3] pool) -> Tensor"


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def fused_pool(y, bias, divisor, pool, kernels=kernels):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, channels, 1, 1, 1), divided."""
    (batch, channels, *size), (pool_d, pool_h, pool_w) = y.shape, pool
    check("the convolution's output", y, (batch, channels, *size[-3:]), y.device)
    check("bias", bias, (channels if bias.numel() else 0,), y.device)
    if min(pool) < 1 or any(window > room for window, room in zip(pool, size, strict=False)):
        raise RuntimeError(f"expected a pooling window that fits into a volume of {size}; got {[*pool]}")
    if not 0 < y.shape[1:].numel() < 2**31:
        raise RuntimeError(f"expected a channel and fewer than 2^31 values a sample; got sizes {[*y.shape]}")
    y, bias = y.contiguous(), bias.contiguous()
    if bias.numel():
        out, numbers = y.new_empty(batch, 1, 1, 1), (batch, channels, *size)
    else:
        out, numbers = y.new_empty(batch, channels, 1, 1, 1), (batch * channels, 1, *size)
    if batch:
        library = kernels(POOL_D=pool_d, POOL_H=pool_h, POOL_W=pool_w)
        launch(library.launch_fused_pool, y, bias, out, *numbers, float(divisor))
    return out


@fused_pool.register_fake
def original(y, bias, divisor, pool):
    averages = nn.functional.max_pool3d(y / divisor, pool).mean(dim=(2, 3, 4), keepdim=True)
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, which takes several times the convolution's 441 MB."""
    found = torch.func.vjp(lambda *tensors: original(*tensors, ctx.divisor, ctx.pool), *ctx.saved_tensors)[1](grad)
    return *found, None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.divisor, ctx.pool = inputs
    ctx.save_for_backward(*tensors)


fused_pool.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    fused_pool.register_autocast(DEVICE, torch.float32)


class ModelNew(nn.Module):
    @staticmethod
    def operator(*operands):
        return torch.ops.conv3d_div_max_gap_bias_sum_v2_fused_pool.forward(*operands)

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        limits = torch.finfo(torch.float32)
        if not isinstance(divisor, (int, float)) or not limits.tiny <= abs(divisor) <= limits.max:  # NaN fails it, too
            wanted = f"a number whose size is a normal float32, {limits.tiny} to {limits.max}"
            raise ValueError(f"divisor: expected {wanted}, got {divisor!r}; by others, max(conv) / d is not max(conv / d)")
        self.pool_size = (pool_size,) * 3 if isinstance(pool_size, int) else tuple(pool_size)
        if len(self.pool_size) != 3 or min(self.pool_size) < 1:
            raise ValueError(f"pool_size: expected a positive int or three of them, got {pool_size!r}")
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor, self.sum_dim = divisor, sum_dim
        self.bias = nn.Parameter(torch.randn(bias_shape))
        one_each_channel = (1,) * (5 - self.bias.dim()) + self.bias.shape in ((1, 1, 1, 1, 1), (1, out_channels, 1, 1, 1))
        self.sums_channels = one_each_channel and sum_dim in (1, -4, (1,), (-4,), [1], [-4])  # else the kernel gives averages

    def forward(self, x):
        # For a negative divisor y / divisor = (-y) / |divisor|, and the negative of a convolution is exact.
        y = nn.functional.conv3d(x, -self.conv.weight, -self.conv.bias) if self.divisor < 0 else self.conv(x)
        bias = self.bias.expand(1, y.shape[1], 1, 1, 1).flatten() if self.sums_channels else self.bias.new_empty(0)
        out = self.operator(y, bias, abs(self.divisor), self.pool_size)
        return out if self.sums_channels else torch.sum(out + self.bias, dim=self.sum_dim)


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
