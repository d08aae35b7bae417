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
"""

import ctypes
import functools
import hashlib
import inspect
import os
import re
import sys
import threading
import warnings
from operator import attrgetter

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v1_direct"
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


@functools.lru_cache(maxsize=1024)
def sizes(kernels, x, weight, bias, stride, padding):
    """Return the output's shape, and all numbers. Raises RuntimeError for tensors of these kinds that do not fit together."""
    check(kernels, "x", x, x, (*x[0][:1], *weight[0][1:2], *x[0][-2:]))
    check(kernels, "weight", weight, x, (*weight[0][:1], *x[0][1:2], *weight[0][-2:]))
    if bias:
        check(kernels, "bias", bias, x, weight[0][:1])
    batch, channels, *image = x[0]
    outs, _, *kernel = weight[0]
    room = [size + 2 * pad - taps for size, pad, taps in zip(image, padding, kernel, strict=False)]
    if not len(stride) == len(padding) == 2 or min(*stride, *kernel) < 1 or min(*padding, *room) < 0:
        raise RuntimeError(f"{NAME}: a kernel of {kernel} does not fit {image} padded by {[*padding]}, strides {[*stride]}")
    shape = batch, outs, *[size // step + 1 for size, step in zip(room, stride, strict=True)]
    return shape, (channels, *image, *shape[1:], *kernel, *stride, *padding)


def conv2d(kernels, x, weight, bias, stride, padding, sizes=sizes):
    kinds = kind(x), kind(weight), None if bias is None else kind(bias)
    shape, numbers = sizes(kernels, *kinds, tuple(stride), tuple(padding))
    x, weight, bias, out = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), x.new_empty(shape)
    if out.numel():
        launch(kernels.launch_conv2d, x, weight, bias, out, out.numel(), *numbers)
    return out


def original(x, weight, bias, stride, padding):
    """The gradient is PyTorch's, which computes the output again, 297 MB. training_tensor_core has its own."""
    return nn.functional.conv2d(x, weight, bias, stride, padding)


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    schema = "forward(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor"
    sources = NAME, CUDA, schema, conv2d, original

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    def namespace(self):
        return build(*self.sources)

    def operands(self, x):
        conv = self._modules["conv1"]  # self.conv1 takes nn.Module half a microsecond
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        return x, conv.weight, conv.bias, conv.stride, conv.padding

    def forward(self, x):
        operands = self.operands(x)
        return getattr(torch.ops, self.namespace()).forward(*operands)


# ---- From here on all files have the same text; python -m playground.command.shared_text writes it.
LOADING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once
KEY, KEYS = torch._C.DispatchKey, torch._C.DispatchKeySet
PLAIN = [KEYS(KEY.CUDA) | KEYS(KEY.AutogradCUDA), KEYS(KEY.CPU) | KEYS(KEY.AutogradCPU)]  # of plain tensors
ModelNew.namespace._dynamo_marked_constant = True  # as torch.compiler.assume_constant_result does, for a second of imports
kind = attrgetter("shape", "dtype", "device")  # what checks and sizes depend on: functions of kinds are cached


@functools.lru_cache(maxsize=None)
def build(name, text, schema, forward, original, fused=(), flags=(), **constants):
    """Compile `text` (CUDA, or C++) once a machine; return the namespace of an operator, which an edit changes.

    forward(kernels, *arguments), tensors first, calls the text's functions; original(*arguments) computes it by PyTorch.
    """
    if torch.__version__ < "2.4":
        raise RuntimeError(f"{name}: needs PyTorch 2.4 or later, this is {torch.__version__}")

    def fingerprint(part):  # of a function or its code: all but the place where it was written
        if inspect.isfunction(part := inspect.unwrap(part)):
            return fingerprint(part.__code__), [fingerprint(each) for each in part.__defaults__ or ()]
        return (part.co_code, part.co_names, [fingerprint(each) for each in part.co_consts]) if inspect.iscode(part) else part

    text = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items())) + text
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if "<<<" in text else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability(), torch.__version__
    everything = text, schema, flags, machine, [fingerprint(each) for each in (forward, original, *fused)]
    operators = getattr(torch.ops, f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}")
    with LOADING:
        if not getattr(operators, "registered", None):
            kernels = load(operators.name, text, flags)
            vars(kernels).update(constants | {each.__name__: each for each in (original, *fused)})
            operators.registered = register(operators, schema, kernels, forward, original, *fused)
    return operators.name


def load(name, text, flags):
    """Return the library of a text. Its functions know the types of their arguments, and how many tensors come first."""
    from torch.utils import cpp_extension

    is_cuda, flags = "<<<" in text, ["-O3", *flags]
    options = {"cuda_sources": text, "extra_cuda_cflags": ["-lineinfo", *flags]} if is_cuda else {"extra_cflags": flags}
    options |= {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}  # before, torch's headers come along
    if not cpp_extension.is_ninja_available():  # in a virtual environment that is not activated
        os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # or an interrupted build would count as done
    path = cpp_extension.load_inline(name, "" if is_cuda else text, is_python_module=False, **options)  # None before 2.5
    kernels = ctypes.CDLL(path or os.path.join(cpp_extension._get_build_directory(name, False), name + cpp_extension.LIB_EXT))
    kernels.device = "cuda" if is_cuda and not getattr(cpp_extension.load_inline, "emulates_cuda", False) else "cpu"
    numbers = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "int": ctypes.c_int}  # all else is a pointer
    for result, symbol, parameters in re.findall(r'extern "C" (\w+) (\w+)\(([^)]*)\)', text):
        if function := getattr(kernels, symbol, None):  # the text may leave it out for these constants
            types = [numbers.get(each.split()[0], ctypes.c_void_p) for each in parameters.split(",") if each]
            function.restype, function.argtypes, function.tensors = numbers[result], types, parameters.count("*")
    return kernels


def register(operators, schema, kernels, forward, original, fuse=None, *fused):
    """Define the operator, for every device, so that forward checks the tensors. Without `fuse` its gradient is PyTorch's."""
    tensors, notice = schema.count("Tensor") - 1, f"{operators.name[:-11]}: {original.__doc__}"
    library, forward = torch.library.Library(operators.name, "DEF"), functools.partial(forward, kernels)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys, *arguments):
            warn(notice)
            ctx.save_for_backward(*arguments[:tensors])
            ctx.others = arguments[tensors:]
            return autograd(keys, *arguments)  # where no gradient is recorded

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():  # views: gradients are partial ones, also where an argument depends on another
                given = [each if each is None else each.view_as(each) for each in ctx.saved_tensors[:tensors]]
                out = original(*given, *ctx.others)
            wanted = [each for each in given if each is not None and each.requires_grad]
            found = dict(zip(wanted, torch.autograd.grad(out, wanted, grad, create_graph=torch.is_grad_enabled()), strict=True))
            return None, *map(found.get, given), *[None] * len(ctx.others)

    def autograd(keys, *arguments):
        trains = torch.is_grad_enabled() and True in [each is not None and each.requires_grad for each in arguments[:tensors]]
        # Gradient refuses the tangents that arguments may have within forward_ad.dual_level(); below it they would be dropped.
        if trains or (torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()):
            return Gradient.apply(keys, *arguments)
        if keys in PLAIN:  # the dispatcher would do no more
            return forward(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operators.forward(*arguments)

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("forward", forward, "CompositeExplicitAutograd")
    library.impl("forward", autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{operators.name}::forward", original, lib=library)
    for device in ("cuda", "cpu") if torch.__version__ >= "2.6" else ():  # in autocast, too, operands are float32
        torch.library.register_autocast(f"{operators.name}::forward", device, torch.float32, lib=library)
    Gradient = fuse(library, schema, kernels, Gradient, *fused) if fuse else Gradient
    return library


def check(kernels, name, tensor, place, shape):
    """Raise RuntimeError unless a tensor of this kind is float32, of this shape, and beside `place`, where the kernels run."""
    if tensor != (shape, torch.float32, place[2]) or place[2].type != kernels.device:
        wanted = f"a float32 {kernels.device.upper()} tensor of shape {list(shape)}, on one device with all others"
        raise RuntimeError(f"{NAME}: expected {name} as {wanted}; got {tensor[1]} of shape {list(tensor[0])} on {tensor[2]}")


def launch(function, *arguments):
    """Call a function of `kernels`, tensors or None first, on the first one's device and its current stream."""
    first, count, stream = arguments[0], function.tensors, 0
    if first.is_cuda:
        if (device := first.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(function, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
    pointers = [None if each is None else each.data_ptr() for each in arguments[:count]]
    if code := function(*pointers, *arguments[count:], stream):  # a C function ignores an argument too many
        words = f"CUDA error: {torch.cuda.CudaError(code)}" if first.is_cuda else f"error {code}"
        raise RuntimeError(f"{function.__name__}: {words}")


@functools.lru_cache(maxsize=None)
def warn(text):
    """Warn once a process, at the line that called into this file, not at one of PyTorch's."""
    files, torchs = [each.filename for each in inspect.stack(0)], os.path.dirname(torch.__file__)
    last = max(i for i, file in enumerate(files) if file == files[0])  # the outermost of this file
    callers = [i for i, file in enumerate(files) if i > last and not file.startswith(torchs)]
    warnings.warn(text, stacklevel=min(callers, default=last) + 1)


def main():
    from torch.utils import benchmark, cpp_extension

    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)  # by the playground: on the CPU, so a small input
    device = "cpu" if emulated or "_cpu_" in NAME else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    arguments, shape, small, limit = EXAMPLE
    model, x = ModelNew(*arguments).to(device).requires_grad_(False), torch.randn(small if emulated else shape, device=device)
    exact = torch.cat([original(*model.double().operands(part.double())) for part in x.split(16)])
    error = ((model.float()(x) - exact).abs().max() / exact.std()).item()
    calls = () if emulated else (model, lambda x: original(*model.operands(x)))
    times = [f"{1e3 * benchmark.Timer('f(x)', globals={'f': f, 'x': x}).timeit(20).mean:.3f} ms" for f in calls]
    how_fast = ", PyTorch ".join(times) or f"under the emulator, not timed, on an input of {tuple(x.shape)}"
    verdict = "right" if error <= limit else "wrong"
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict}; {how_fast}")


if __name__ == "__main__":
    main()
