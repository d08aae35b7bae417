"""alexnet_conv1, v1: direct convolution, one thread an output element.

Why it is slow
    A multiply-add takes two loads, and no thread uses a loaded value again: 2 FLOPs for 8 bytes. The caches serve them, so the
    load path from the L1 cache to the registers binds: at stride 4 a warp's 32 inputs lie in four cache lines, the weight in a
    fifth, 5 cycles for 32 multiply-adds. An H200 needs 17 ms for the 843 million such steps; measured are 18.2 (eager 2.08).

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    with x taken as zero outside the image. Evaluated as written, in float32, in the order c, u, v, the bias last: nothing is
    staged, padded or rearranged.

Launches
    conv2d: a block of 256 threads, one output each: in_channels * kernel_h * kernel_w multiply-adds

Floor
    154 MB in, 297 MB out, 54 GFLOP: compute bound without tensor cores; with TF32's, bytes take about as long.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel, stride, padding, bias or
    none. Dilation, groups and other padding modes raise, as does anything else. The gradient is PyTorch's. Deterministic.
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

NAME = "alexnet_conv1_v1_direct"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
#include <cuda_runtime.h>
#include <cstdint>

using Element = float;  // of all tensors

constexpr int THREADS = 256;

// x (batch, in_channels, height, width), weight (out_channels, in_channels, kernel_h, kernel_w), bias (out_channels) or null
// -> out (batch, out_channels, out_h, out_w). One thread an element of out.
__global__ void conv2d(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ bias,
                       Element* __restrict__ out, int64_t outputs, int in_channels, int height, int width, int out_channels,
                       int out_h, int out_w, int kernel_h, int kernel_w, int stride_h, int stride_w, int pad_h, int pad_w) {
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= outputs) return;
    const int j = index % out_w, i = index / out_w % out_h, o = index / out_w / out_h % out_channels;
    const int64_t b = index / out_w / out_h / out_channels;
    const int top = i * stride_h - pad_h, left = j * stride_w - pad_w;  // of the window; negative inside the padding
    float sum = 0.0f;
    for (int c = 0; c < in_channels; ++c) {
        const Element* image = x + (b * in_channels + c) * height * width;
        const Element* filter = weight + ((int64_t)o * in_channels + c) * kernel_h * kernel_w;
        for (int u = 0; u < kernel_h; ++u)
            for (int v = 0; v < kernel_w; ++v) {
                const int h = top + u, w = left + v;
                if (h >= 0 && h < height && w >= 0 && w < width)
                    sum += image[(int64_t)h * width + w] * filter[u * kernel_w + v];
            }
    }
    out[index] = bias ? sum + bias[o] : sum;
}

extern "C" int launch_conv2d(const Element* x, const Element* weight, const Element* bias, Element* out, int64_t outputs,
                             int in_channels, int height, int width, int out_channels, int out_h, int out_w, int kernel_h,
                             int kernel_w, int stride_h, int stride_w, int pad_h, int pad_w, cudaStream_t stream) {
    conv2d<<<(outputs + THREADS - 1) / THREADS, THREADS, 0, stream>>>(
        x, weight, bias, out, outputs, in_channels, height, width, out_channels, out_h, out_w, kernel_h, kernel_w, stride_h,
        stride_w, pad_h, pad_w);
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
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(batch, out_channels, room_h // stride_h + 1, room_w // stride_w + 1)
    if out.numel():
        numbers = in_channels, height, width, *out.shape[1:], kernel_h, kernel_w, *stride, *padding
        launch(kernels().launch_conv2d, x, weight, bias, out, out.numel(), *numbers)
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
        return torch.ops.alexnet_conv1_v1_direct.forward(*operands)

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
