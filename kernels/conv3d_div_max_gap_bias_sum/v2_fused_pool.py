"""conv3d_div_max_gap_bias_sum, v2: everything behind the convolution in one kernel.

Like v1, but the kernel also does the max pooling: it reads the convolution's output and writes one number a sample. PyTorch's
convolution stays.

Why it is faster
    v1's pooling reads 441 MB and writes 55 MB of maxima and 110 MB of indices, and v1's tail reads the maxima again. Here each
    value is read once, and its window's maximum lives in a register until it is added to a sum. Reads are coalesced: adjacent
    threads take adjacent windows, two floats at once. What it costs: a build for each pool size. The convolution's 441 MB bound
    the gain. Measured on an H200: 1.98 ms (v1 2.12, eager 2.35).

Mathematics
    v1's. The maximum is PyTorch's: a window is scanned from -infinity; a value replaces the maximum if it is larger or NaN.

Launches
    kernel       grid                                    block  shared  work of a thread
    fused_pool   (batch,), for averages (batch*channels,) 1024  128 B   every 1024th window of its sample (channel)

Floor
    Memory bound: 441 MB written by the convolution and read once by this kernel.

Takes
    What the original takes, in float32 on CUDA, a sample of the convolution's output below 2^31 values; `sum_dim` and `bias` as
    in v1. Anything else raises. The gradient is PyTorch's. Deterministic.
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

NAME = "conv3d_div_max_gap_bias_sum_v2_fused_pool"
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


@functools.lru_cache(maxsize=1024)
def sizes(kernels, y, bias, *pool):
    """Return the output's shape; groups, their channels and these' sizes. Raises RuntimeError for bad input."""
    check(kernels, "the convolution's output", y, y, (*y[0][:2], *y[0][-3:]))
    batch, channels, *of_channel = y[0]
    if pool != (kernels.POOL_D, kernels.POOL_H, kernels.POOL_W) or any(map(int.__gt__, pool, of_channel)):
        raise RuntimeError(f"{NAME}: a pooling window of {list(pool)} does not fit into a volume of {of_channel}")
    if not 0 < y[0][1:].numel() < 2**31:
        raise RuntimeError(f"{NAME}: expected a channel and less than 2^31 values a sample, got sizes {list(y[0])}")
    if not bias[0].numel():
        return (batch, channels, 1, 1, 1), (batch * channels, 1, *of_channel)
    check(kernels, "bias", bias, y, (channels,))
    return (batch, 1, 1, 1), (batch, channels, *of_channel)


def fused_pool(kernels, y, bias, divisor, pool, sizes=sizes):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, channels, 1, 1, 1), divided."""
    shape, numbers = sizes(kernels, kind(y), kind(bias), *pool)
    y, bias, out = y.contiguous(), bias.contiguous(), y.new_empty(shape)
    if shape[0]:
        launch(kernels.launch_fused_pool, y, bias, out, *numbers, divisor)
    return out


def original(y, bias, divisor, pool):
    """The gradient is PyTorch's: it takes several times the convolution's 441 MB; training_tensor_core keeps 14 MB."""
    averages = nn.functional.max_pool3d(y / divisor, pool).mean(dim=(2, 3, 4), keepdim=True)
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, "forward(Tensor y, Tensor bias, float divisor, int[3] pool) -> Tensor", fused_pool, original

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

    def namespace(self):
        return build(*self.sources, **dict(zip(("POOL_D", "POOL_H", "POOL_W"), self.pool_size, strict=True)))

    def operands(self, x):
        # For a negative divisor y / divisor = (-y) / |divisor|, and the negative of a convolution is exact.
        y = nn.functional.conv3d(x, -self.conv.weight, -self.conv.bias) if self.divisor < 0 else self.conv(x)
        bias = self.bias.expand(1, y.shape[1], 1, 1, 1).flatten() if self.sums_channels else self.bias.new_empty(0)
        return y, bias, abs(self.divisor), self.pool_size

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
