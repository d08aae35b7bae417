"""conv3d_div_max_gap_bias_sum, v1: everything behind the pooling in one kernel.

Why it is faster
    Division, global average, bias and sum, four kernels in PyTorch, are one that reads the pooled tensor once and writes one
    number a sample. PyTorch reads and writes the convolution's 441 MB only to divide them; division by a positive number
    commutes with max and average, so here it happens once a sample. PyTorch's convolution stays, and its pooling, which reads
    441 MB and writes 110 MB of indices for a backward pass. Measured on an H200: 2.12 ms, eager 2.35, as counting bytes says.

Mathematics
    out[b] = 1/(N*d) * sum over o,k of max over window k of y[b,o,.]  +  sum over o of bias[o]     N: whole windows of a channel
    For d < 0, y / d = (-y) / |d|: the convolution is run with negated weights and bias, which is exact. d = 0, infinity and
    what is no normal float32 do not commute with max: refused. The sum before the division may overflow float32.

Launches
    kernel       grid                                    block  shared  work of a thread
    fused_tail   (batch,), for averages (batch*channels,) 1024  128 B   every 1024th pooled value of its sample (channel)

Floor
    Memory bound: convolution 441 MB out; pooling 441 MB in, 165 MB out; this kernel 55 MB in.

Takes
    What the original takes, in float32 on CUDA; for other `sum_dim` or `bias` than one value, or one a channel, summed over
    channels, PyTorch sums the kernel's averages. Anything else raises. The gradient is PyTorch's. Deterministic. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv3d_div_max_gap_bias_sum_v1_fused_tail"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's

CUDA = r"""
#include <cuda_runtime.h>
#include <cstdint>

using Element = float;  // of the pooled tensor and the bias

constexpr int WARP = 32, THREADS = WARP * WARP;

__device__ float warp_sum(float value) {  // in lane 0. The order of additions is fixed, so the bits are too.
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

// pooled (groups, size) and bias (channels,) -> out (groups,) = sum of pooled / windows / divisor + sum of bias.
// A group is a sample, or, with channels = 0 and no bias, one channel of it. One block a group.
__global__ void __launch_bounds__(THREADS, 1) fused_tail(const Element* __restrict__ pooled, const Element* __restrict__ bias,
                                                      float* __restrict__ out, int64_t size, int channels, float windows,
                                                      float divisor) {
    __shared__ float warp_sums[WARP];
    const Element* group = pooled + blockIdx.x * size;
    float sum = 0.0f;
    // Unrolled so that eight loads of a thread are in flight at once: one block an SM has no more threads.
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < size; i += THREADS) sum += group[i];
    sum = sum / windows / divisor;
    for (int channel = threadIdx.x; channel < channels; channel += THREADS) sum += bias[channel];
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    sum = warp_sum(warp_sums[threadIdx.x]);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" int launch_fused_tail(const Element* pooled, const Element* bias, float* out, int64_t groups, int64_t size,
                                 int64_t channels, int64_t windows, double divisor, cudaStream_t stream) {
    fused_tail<<<groups, THREADS, 0, stream>>>(pooled, bias, out, size, channels, windows, divisor);
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
SCHEMA = "(Tensor pooled, Tensor bias, float divisor) -> Tensor"


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def fused_tail(pooled, bias, divisor, kernels=kernels):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, channels, 1, 1, 1), divided."""
    (batch, channels), windows = pooled.shape[:2], pooled.shape[2:].numel()
    check("the pooled tensor", pooled, (batch, channels, *pooled.shape[-3:]), pooled.device)
    check("bias", bias, (channels if bias.numel() else 0,), pooled.device)
    if not channels * windows:
        raise RuntimeError(f"expected a channel and a window to average; got sizes {[*pooled.shape]}")
    pooled, bias = pooled.contiguous(), bias.contiguous()
    if bias.numel():
        out, numbers = pooled.new_empty(batch, 1, 1, 1), (batch, channels * windows, channels, windows)
    else:
        out, numbers = pooled.new_empty(batch, channels, 1, 1, 1), (batch * channels, windows, 0, windows)
    if batch:
        launch(kernels().launch_fused_tail, pooled, bias, out, *numbers, float(divisor))
    return out


@fused_tail.register_fake
def original(pooled, bias, divisor):
    averages = pooled.mean(dim=(2, 3, 4), keepdim=True) / divisor
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, and the pooling's takes the convolution's 441 MB."""
    found = torch.func.vjp(lambda *tensors: original(*tensors, ctx.divisor), *ctx.saved_tensors)[1](grad)
    return *found, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.divisor = inputs
    ctx.save_for_backward(*tensors)


fused_tail.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    fused_tail.register_autocast(DEVICE, torch.float32)


class ModelNew(nn.Module):
    @staticmethod
    def operator(*operands):
        return torch.ops.conv3d_div_max_gap_bias_sum_v1_fused_tail.forward(*operands)

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        limits = torch.finfo(torch.float32)
        if not isinstance(divisor, (int, float)) or not limits.tiny <= abs(divisor) <= limits.max:  # NaN fails it, too
            wanted = f"a number whose size is a normal float32, {limits.tiny} to {limits.max}"
            raise ValueError(f"divisor: expected {wanted}, got {divisor!r}; by others, max(conv) / d is not max(conv / d)")
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor, self.sum_dim = divisor, sum_dim
        self.max_pool = nn.MaxPool3d(pool_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        one_each_channel = (1,) * (5 - self.bias.dim()) + self.bias.shape in ((1, 1, 1, 1, 1), (1, out_channels, 1, 1, 1))
        self.sums_channels = one_each_channel and sum_dim in (1, -4, (1,), (-4,), [1], [-4])  # else the kernel gives averages

    def forward(self, x):
        # For a negative divisor y / divisor = (-y) / |divisor|, and the negative of a convolution is exact.
        y = nn.functional.conv3d(x, -self.conv.weight, -self.conv.bias) if self.divisor < 0 else self.conv(x)
        bias = self.bias.expand(1, y.shape[1], 1, 1, 1).flatten() if self.sums_channels else self.bias.new_empty(0)
        out = self.operator(self.max_pool(y), bias, abs(self.divisor))
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
