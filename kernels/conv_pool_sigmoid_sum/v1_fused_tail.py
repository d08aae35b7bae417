"""conv_pool_sigmoid_sum, v1: everything behind the convolution in one kernel. MIT; copy it.

Why it is faster
    At the original's size the convolution's output is 4.8 GB. PyTorch reads it to pool it, then writes and reads two tensors of
    the pooled size. Here one kernel reads each value once; average, sigmoid and sum live in registers. The convolution stays
    PyTorch's, and still writes the 4.8 GB. Predicted 8.3 ms on an H200, measured 11.1 (eager 11.2): the steps behind the
    convolution were never the problem.

Mathematics
    pooled[b,o,i,j] = 1/p^2 * sum over u,v < p of y[b,o, p*i+u, p*j+v]        out[b] = sum over o,i,j of sigmoid(pooled)
    Rows and columns that fill no window are dropped. A sample is summed in float32 by 1024 threads and a tree.

Launches
    kernel      grid       block  shared  work of a thread
    fused_tail  (batch,)   1024   128 B   every 1024th window of a sample

Floor
    4.8 GB written by the convolution and read by the tail, 128 floats out: memory bound.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel and pool size that the
    original takes. Anything else raises before a launch. The gradient is PyTorch's. Deterministic. PyTorch 2.6 or later.
"""

import ctypes
import functools
import hashlib
import os
import sys
import threading
import warnings

import torch
from torch import nn
from torch.autograd import forward_ad
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
warn = functools.cache(warnings.warn)  # once a process


@functools.cache
def build(name, text, *flags, **macros):
    """Compile the text with these macros, once a machine, and return the library. An edit or another macro makes another."""
    flags = ["-O3", "-lineinfo", *flags, *(f"-D{key}={value}" for key, value in macros.items())]
    name = f"{name}_{hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:10]}"
    os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)  # ninja's, where the environment is not activated
    options = {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}  # before, torch's headers come along
    with BUILDING:
        return ctypes.CDLL(load_inline(name, "", text, extra_cuda_cflags=flags, is_python_module=False, **options))


def launch(function, *arguments):
    """Call a C function: tensors as pointers, numbers as int64_t, then the current stream of the first tensor's device."""
    with torch.cuda.device_of(first := arguments[0]):
        stream = torch.cuda.current_stream().cuda_stream if first.is_cuda else 0
        values = [each if isinstance(each, int) else each.data_ptr() for each in arguments]
        if code := function(*map(ctypes.c_int64, [*values, stream])):
            raise RuntimeError(f"{function.__name__}: {torch.cuda.CudaError(code) if first.is_cuda else f'error {code}'}")


def check(name, tensor, shape, device):
    """Raise RuntimeError unless a tensor is float32, of this shape, on this device."""
    if tensor.dtype != torch.float32 or tensor.shape != shape or tensor.device != device:
        found = f"{tensor.dtype} of shape {[*tensor.shape]} on {tensor.device}"
        raise RuntimeError(f"expected {name} as torch.float32 of shape {[*shape]} on {device}; got {found}")


def check_tangents(operands):
    """Raise NotImplementedError for forward mode AD, whose tangents the operators would drop."""
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(operands[0]).primal is not operands[0]:  # in dual_level()
        tensors = [each for each in operands if isinstance(each, torch.Tensor)]
        if any(forward_ad.unpack_dual(each).tangent is not None for each in tensors):
            raise NotImplementedError("forward mode AD: the operators would drop the tangents")


def register(name, text, schema, forward, original):
    """Register the operators `forward`, and `train` with PyTorch's gradient; return torch.ops' namespace of that name."""
    operators, kernels, tensors = getattr(torch.ops, name), functools.partial(build, name, text), schema.count("Tensor") - 1
    for each in ("library", "forward", "train"):  # a file pasted again replaces them, also for models that were made before
        vars(operators).pop(each, None)
    operators.library = library = torch.library.Library(name, "DEF")

    def setup_context(ctx, inputs, output):
        warn(f"{name}: {original.__doc__}")
        ctx.save_for_backward(*inputs[:tensors])
        ctx.others = inputs[tensors:]

    def backward(ctx, grad):
        inputs, wanted = (*ctx.saved_tensors, *ctx.others), tuple(i for i, each in enumerate(ctx.needs_input_grad) if each)
        found = torch.func.grad(lambda *inputs: (original(*inputs) * grad).sum(), wanted)(*inputs)
        return tuple(dict(zip(wanted, found, strict=True)).get(i) for i in range(len(inputs)))

    def kernel(*arguments):
        try:
            return forward(kernels, *arguments)
        except NotImplementedError as limits:
            warn(f"{name}: PyTorch computes what these kernels do not take: {limits}")
            return original(*arguments)

    for operator in (f"{name}::forward", f"{name}::train"):
        torch.library.define(operator, schema, lib=library)
        torch.library.impl(operator, DEVICE, kernel, lib=library)
        torch.library.register_fake(operator, original, lib=library)
        for device in ("cuda", "cpu") if torch.__version__ >= "2.7" else ():
            torch.library.register_autocast(operator, device, torch.float32, lib=library)
    torch.library.register_autograd(operator, backward, setup_context=setup_context, lib=library)
    return operators


def call(operators, *operands):
    """Call `train` or, where no gradient is recorded, `forward`, which skips autograd: 8 us of the host's time."""
    check_tangents(operands)
    return (operators.train if torch.is_grad_enabled() else operators.forward)(*operands)


def main():
    emulated, (arguments, shape, small, limit) = hasattr(load_inline, "emulates_cuda"), EXAMPLE
    model, x = ModelNew(*arguments).to(DEVICE).requires_grad_(False), torch.randn(small if emulated else shape, device=DEVICE)
    exact = torch.cat([original(*model.double().operands(part.double())) for part in x.split(16)])
    error = ((model.float()(x) - exact).abs().max() / exact.std()).item()
    calls, right = () if emulated else (model, lambda x: original(*model.operands(x))), "right" if error <= limit else "wrong"
    took = ", PyTorch ".join(f"{1e3 * Timer('f(x)', globals={'f': f, 'x': x}).timeit(20).mean:.3f} ms" for f in calls)
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:g}: {right}; {took or 'emulated'}")


# ---- What is this file's own.
def fused_tail(kernels, y, pool):
    """Return (batch,) of y (batch, channels, height, width). Raises RuntimeError for what the kernel does not take."""
    batch, channels, height, width = *y.shape[:2], *y.shape[-2:]
    check("y", y, (batch, channels, height, width), y.device)
    window = 2 * pool if len(pool) == 1 else pool  # as AvgPool2d takes it
    if len(window) != 2 or not (0 < window[0] <= height and 0 < window[1] <= width):
        raise RuntimeError(f"expected a pooling window that fits into an image of {height} x {width}; got {[*pool]}")
    y, out = y.contiguous(), y.new_empty(batch)
    if batch:
        launch(kernels().launch_fused_tail, y, out, batch, channels, height, width, *window)
    return out


def original(y, pool):
    """The gradient is PyTorch's. It takes pooled tensors and one like the convolution's output; v2 and later avoid that one."""
    return torch.sigmoid(nn.functional.avg_pool2d(y, pool)).sum(dim=(1, 2, 3))


class ModelNew(nn.Module):
    operators = register(NAME, CUDA, "(Tensor y, int[2] pool) -> Tensor", fused_tail, original)

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = pool_kernel_size

    def operands(self, x):
        return self.conv(x), self.pool

    def forward(self, x):
        return call(self.operators, *self.operands(x))


if __name__ == "__main__":
    main()
