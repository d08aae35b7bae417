"""conv_pool_sigmoid_sum, v1: everything behind the convolution in one kernel.

Why it is faster
    The convolution's output, y, is 4.8 GB. PyTorch reads it to pool it, then writes and reads two tensors of the pooled size.
    Here one kernel reads y once; averages and sigmoids stay in registers. PyTorch still computes y. Predicted 8.3 ms on an
    H200, measured 11.1 (eager 11.2). By the profiler PyTorch's convolution and the pass that adds its bias take 77% of it:
    the steps behind them were never the problem.

Mathematics
    pooled[b,o,i,j] = 1/p^2 * sum over u,v < p of y[b,o, p*i+u, p*j+v]        out[b] = sum over o,i,j of sigmoid(pooled)
    Rows and columns at the edge that fill no p x p window are dropped. Sums are float32.

Launches
    kernel      grid       block  shared  work of a thread
    fused_tail  (batch,)   1024   128 B   every 1024th window of its sample; small batches leave SMs idle

Floor
    fused_tail reads y's 4.8 GB: 1.1 ms at an H200's 4.39 TB/s; 128 floats go out: memory bound.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel and pool size that
    PyTorch takes. Anything else raises. PyTorch computes the gradient. Deterministic. PyTorch 2.6 or later. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv_pool_sigmoid_sum_v1_fused_tail"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
#include <cuda_runtime.h>
#include <cstdint>

using Element = float;  // of y

constexpr int WARP = 32, THREADS = 1024;  // as many warps as a warp has lanes

// The sum of a warp's values, valid in its first lane. The order of additions is fixed, so the bits are too.
__device__ float warp_sum(float value) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

// y (batch, channels, height, width) -> out (batch,): the sum of sigmoid(average) over all whole windows of a sample.
__global__ void __launch_bounds__(THREADS) fused_tail(const Element* __restrict__ y, float* __restrict__ out, int channels,
                                                      int height, int width, int pool_h, int pool_w) {
    const int rows = height / pool_h, columns = width / pool_w;
    const Element* sample = y + (int64_t)blockIdx.x * channels * height * width;
    float sum = 0.0f;
    // Coalesced: adjacent threads take adjacent windows of a row.
    for (int64_t window = threadIdx.x; window < (int64_t)channels * rows * columns; window += THREADS) {
        const int left = window % columns * pool_w;
        const int64_t row = window / columns;  // over all channels
        const int64_t top = row / rows * height + row % rows * pool_h;
        const Element* corner = sample + top * width + left;
        float total = 0.0f;
        for (int u = 0; u < pool_h; ++u)
            for (int v = 0; v < pool_w; ++v) total += corner[(int64_t)u * width + v];
        sum += 1.0f / (1.0f + __expf(-total / (pool_h * pool_w)));
    }
    __shared__ float warp_sums[WARP];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x < WARP) sum = warp_sum(warp_sums[threadIdx.x]);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" int launch_fused_tail(const Element* y, float* out, int64_t batch, int64_t channels, int64_t height, int64_t width,
                                 int64_t pool_h, int64_t pool_w, cudaStream_t stream) {
    fused_tail<<<batch, THREADS, 0, stream>>>(y, out, channels, height, width, pool_h, pool_w);
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
SCHEMA = "(Tensor y, int[2] pool) -> Tensor"


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def fused_tail(y, pool, kernels=kernels):
    """Return (batch,) of y (batch, channels, height, width). Raises RuntimeError for what the kernel does not take."""
    (batch, channels, height, width), (pool_h, pool_w) = (*y.shape[:2], *y.shape[-2:]), pool
    check("y", y, (batch, channels, height, width), y.device)
    if not (0 < pool_h <= height and 0 < pool_w <= width):
        raise RuntimeError(f"expected a pooling window that fits into an image of {height} x {width}; got {[*pool]}")
    y, out = y.contiguous(), y.new_empty(batch)
    if batch:
        launch(kernels().launch_fused_tail, y, out, batch, channels, height, width, pool_h, pool_w)
    return out


@fused_tail.register_fake
def original(y, pool):
    return torch.sigmoid(nn.functional.avg_pool2d(y, pool)).sum(dim=(1, 2, 3))


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again."""
    return *torch.func.vjp(lambda y: original(y, ctx.pool), *ctx.saved_tensors)[1](grad), None


def setup_context(ctx, inputs, output):
    *tensors, ctx.pool = inputs
    ctx.save_for_backward(*tensors)


fused_tail.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    fused_tail.register_autocast(DEVICE, torch.float32)


class ModelNew(nn.Module):
    @staticmethod
    def operator(*operands):
        return torch.ops.conv_pool_sigmoid_sum_v1_fused_tail.forward(*operands)

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = pool_kernel_size

    def forward(self, x):
        return self.operator(self.conv(x), self.pool)


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
