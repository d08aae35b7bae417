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
    channels, PyTorch sums the kernel's averages. Anything else raises. The gradient is PyTorch's. Deterministic.
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

NAME = "conv3d_div_max_gap_bias_sum_v1_fused_tail"
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


@functools.lru_cache(maxsize=1024)
def sizes(kernels, pooled, bias):
    """Return the output's shape; groups, their size, biases and a channel's windows. Raises RuntimeError for bad input."""
    check(kernels, "the pooled tensor", pooled, pooled, (*pooled[0][:2], *pooled[0][-3:]))
    batch, channels, windows = *pooled[0][:2], pooled[0][2:].numel()
    if not channels * windows:
        raise RuntimeError(f"{NAME}: no average over an empty dimension, got sizes {list(pooled[0])}")
    if not bias[0].numel():
        return (batch, channels, 1, 1, 1), (batch * channels, windows, 0, windows)
    check(kernels, "bias", bias, pooled, (channels,))
    return (batch, 1, 1, 1), (batch, channels * windows, channels, windows)


def fused_tail(kernels, pooled, bias, divisor, sizes=sizes):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, channels, 1, 1, 1), divided."""
    shape, numbers = sizes(kernels, kind(pooled), kind(bias))
    pooled, bias, out = pooled.contiguous(), bias.contiguous(), pooled.new_empty(shape)
    if shape[0]:
        launch(kernels.launch_fused_tail, pooled, bias, out, *numbers, divisor)
    return out


def original(pooled, bias, divisor):
    """The gradient is PyTorch's. The pooling's takes the convolution's 441 MB again; training_tensor_core keeps 14 MB."""
    averages = pooled.mean(dim=(2, 3, 4), keepdim=True) / divisor
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, "forward(Tensor pooled, Tensor bias, float divisor) -> Tensor", fused_tail, original

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

    def namespace(self):
        return build(*self.sources)

    def operands(self, x):
        # For a negative divisor y / divisor = (-y) / |divisor|, and the negative of a convolution is exact.
        y = nn.functional.conv3d(x, -self.conv.weight, -self.conv.bias) if self.divisor < 0 else self.conv(x)
        bias = self.bias.expand(1, y.shape[1], 1, 1, 1).flatten() if self.sums_channels else self.bias.new_empty(0)
        return self.max_pool(y), bias, abs(self.divisor)

    def forward(self, x):
        out = getattr(torch.ops, self.namespace()).forward(*self.operands(x))
        return out if self.sums_channels else torch.sum(out + self.bias, dim=self.sum_dim)


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
