"""conv_pool_sigmoid_sum, v1: everything behind the convolution in one kernel.

Like the original, but average pooling, sigmoid and the sum, three kernels and two intermediate tensors in PyTorch, are
one kernel that reads the convolution's output once and writes one number a sample. PyTorch's convolution stays.

Why it is faster
    At the original's size the convolution's output is 4.8 GB. PyTorch reads it to pool it, then writes and reads two tensors of
    the pooled size. Here each value is read once, and everything after it lives in registers. The convolution still writes the
    4.8 GB. Predicted 8.3 ms on an H200, measured 11.1 (eager 11.2): the steps behind the convolution were never the problem.

Mathematics
    pooled[b,o,i,j] = 1/p^2 * sum over u,v < p of y[b,o, p*i+u, p*j+v]        out[b] = sum over o,i,j of sigmoid(pooled)
    Rows and columns that fill no window are dropped. A sample is summed in float32 by 1024 threads and a tree.

Launches
    kernel        grid        block  shared  work of a thread
    fused_tail    (batch,)    1024   128 B   every 1024th window of its sample

Floor
    4.8 GB written by the convolution and read by the tail, 128 floats out: memory bound.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel and pool size that the
    original takes. Anything else raises before a launch. The gradient is PyTorch's. Deterministic.
"""

import ctypes
import functools
import hashlib
import inspect
import os
import re
import shutil
import sys
import threading
import warnings

import torch
import torch.nn as nn

NAME = "conv_pool_sigmoid_sum_v1_fused_tail"
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
#include <cuda_runtime.h>
#include <cstdint>

using Element = float;  // of y

constexpr int WARP = 32, THREADS = 1024;

__device__ float sigmoid(float v) { return 1.0f / (1.0f + __expf(-v)); }

// Average of the pool_h x pool_w window whose top left element is `corner`; `width` is the pitch of a row.
__device__ float window_average(const Element* corner, int width, int pool_h, int pool_w) {
    float sum = 0.0f;
    for (int u = 0; u < pool_h; ++u)
        for (int v = 0; v < pool_w; ++v) sum += corner[(int64_t)u * width + v];
    return sum / (pool_h * pool_w);
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
        sum += sigmoid(window_average(sample + top * width + left, width, pool_h, pool_w));
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" int launch_fused_tail(const Element* y, float* out, int64_t batch, int64_t channels, int64_t height, int64_t width,
                                 int64_t pool_h, int64_t pool_w, cudaStream_t stream) {
    fused_tail<<<batch, THREADS, 0, stream>>>(y, out, channels, height, width, pool_h, pool_w);
    return cudaGetLastError();
}
"""


@functools.lru_cache(maxsize=1024)
def sizes(kernels, y, *pool):
    """Return the launch's sizes. Raises RuntimeError for what the kernel does not take."""
    check(kernels, "y", y, y, (*y[0][:2], *y[0][-2:]))
    batch, channels, height, width = y[0]
    if not (0 < pool[0] <= height and 0 < pool[1] <= width):
        raise RuntimeError(f"{NAME}: a pooling window of {[*pool]} does not fit into an image of {height} x {width}")
    return batch, channels, height, width, *pool


def fused_tail(kernels, y, pool, sizes=sizes):
    found = sizes(kernels, kind(y), *pool)
    y, out = y.contiguous(), y.new_empty(y.shape[0])
    if y.shape[0]:
        launch(kernels.launch_fused_tail, y, out, *found)
    return out


def original(y, pool):
    """The gradient is PyTorch's. It takes pooled tensors and one like the convolution's output; v2 and later avoid that one."""
    return torch.sigmoid(nn.functional.avg_pool2d(y, pool)).sum(dim=(1, 2, 3))


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, "forward(Tensor y, int[2] pool) -> Tensor", fused_tail, original

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    @torch.compiler.assume_constant_result
    def namespace(self):
        return build(*self.sources)

    def operands(self, x):
        return self._modules["conv"](x), self._modules["avg_pool"].kernel_size  # self.conv takes half a microsecond

    def forward(self, x):
        return getattr(torch.ops, self.namespace()).forward(*self.operands(x))


# ---- From here on all files have the same text; python -m playground.command.shared_text writes it.
LOADING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once
KEY, KEYS = torch._C.DispatchKey, torch._C.DispatchKeySet
NUMBER = getattr(KEYS, "raw_repr", repr)  # PyTorch 2.4 has neither this nor the next function
NEED_GRAD = getattr(torch._C, "_any_requires_grad", lambda *given: any(getattr(each, "requires_grad", False) for each in given))
PLAIN = {NUMBER(KEYS(KEY.CPU) | KEYS(KEY.AutogradCPU)), NUMBER(KEYS(KEY.CUDA) | KEYS(KEY.AutogradCUDA))}


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
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"
    operators = getattr(torch.ops, namespace)
    with LOADING:
        if not getattr(operators, "registered", None):
            kernels = load(namespace, text, flags, constants)
            vars(kernels).update({each.__name__: each for each in (original, *fused)})
            operators.registered = register(operators, schema, kernels, forward, original, *fused)
    return namespace


def load(name, text, flags, constants):
    """Return the library of a text. Its functions know how many tensors they take, first, and whether a stream, last."""
    from torch.utils import cpp_extension

    options = {"cpp_sources": text, "extra_cflags": ["-O3", *flags]}
    if is_cuda := "<<<" in text:
        options = {"cpp_sources": "", "cuda_sources": text, "extra_cuda_cflags": ["-O3", "-lineinfo", *flags]}
    if torch.__version__ >= "2.8":  # before, torch's headers come along
        options["no_implicit_headers"] = True
    if not shutil.which("ninja"):  # in a virtual environment that is not activated
        os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)  # or an interrupted build would count as done
    path = cpp_extension.load_inline(name, is_python_module=False, **options)  # None before PyTorch 2.5
    kernels = ctypes.CDLL(path or os.path.join(cpp_extension._get_build_directory(name, False), name + cpp_extension.LIB_EXT))
    vars(kernels).update(constants)
    kernels.device = "cuda" if is_cuda and not getattr(cpp_extension.load_inline, "emulates_cuda", False) else "cpu"
    numbers = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "int": ctypes.c_int}  # all else is a pointer
    for result, symbol, parameters in re.findall(r'extern "C" (\w+) (\w+)\(([^)]*)\)', text):
        if function := getattr(kernels, symbol, None):  # the text may leave it out for these constants
            types = [each.split()[0] for each in parameters.split(",") if each]
            function.restype, function.argtypes = numbers[result], [numbers.get(each, ctypes.c_void_p) for each in types]
            function.tensors, function.has_stream = parameters.count("*"), "cudaStream_t" in types
    return kernels


def register(operators, schema, kernels, forward, original, fuse=None, *fused):
    """Define the operator, for every device, so that forward checks the tensors. Without `fuse` its gradient is PyTorch's."""
    name, tensors = f"{operators.name}::forward", schema.count("Tensor") - 1
    library, forward = torch.library.Library(operators.name, "DEF"), functools.partial(forward, kernels)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys, *arguments):
            warn(f"{operators.name[:-11]}: {original.__doc__}")
            ctx.save_for_backward(*arguments[:tensors])
            ctx.others = arguments[tensors:]
            return below_autograd(operators.forward, forward, keys, *arguments)

        @staticmethod
        def backward(ctx, grad):
            keeps_graph, needs = torch.is_grad_enabled(), ctx.needs_input_grad[1:]
            with torch.enable_grad():
                # Views: the gradients are partial ones, also where an argument depends on another.
                given = [each if each is None else each.view_as(each) for each in ctx.saved_tensors[:tensors]]
                wanted = [each for each, needed in zip(given, needs, strict=False) if needed]
                found = iter(torch.autograd.grad(original(*given, *ctx.others), wanted, grad, create_graph=keeps_graph))
            return None, *[next(found) if needed else None for needed in needs]

    def autograd(keys, *arguments):
        # Gradient refuses the tangents that arguments may have within forward_ad.dual_level(); below it they would be dropped.
        if torch.autograd.forward_ad._current_level >= 0 or (torch.is_grad_enabled() and NEED_GRAD(*arguments)):
            return Gradient.apply(keys, *arguments)
        return below_autograd(operators.forward, forward, keys, *arguments)

    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("forward", forward, "CompositeExplicitAutograd")
    library.impl("forward", autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(name, original, lib=library)
    for device in ("cuda", "cpu") if torch.__version__ >= "2.6" else ():  # in autocast, too, operands are float32
        torch.library.register_autocast(name, device, torch.float32, lib=library)
    if fuse:
        Gradient = fuse(library, schema, kernels, Gradient, *fused)
    return library


def below_autograd(operator, function, keys, *arguments):
    """Call an operator from its autograd kernel, or its function at once where the dispatcher would do no more."""
    if NUMBER(keys) in PLAIN:
        return function(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator.default.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


def kind(tensor):
    """Return what checks and sizes depend on. A function of kinds is cached: it would take as long as the rest of a call."""
    return tensor.shape, tensor.dtype, tensor.device


def check(kernels, name, tensor, place, shape):
    """Raise RuntimeError unless a tensor of this kind is float32, of this shape, and beside `place`, where the kernels run."""
    found, dtype, device = tensor
    if dtype is not torch.float32 or found != shape or device != place[2] or device.type != kernels.device:
        wanted = f"a float32 {kernels.device.upper()} tensor of shape {list(shape)}, on one device with all others"
        raise RuntimeError(f"{NAME}: expected {name} as {wanted}; got {dtype} of shape {list(found)} on {device}")


def launch(function, *arguments):
    """Call a function of `kernels`, tensors or None first, on the first one's device and its current stream."""
    first, stream = arguments[0], 0
    if first.is_cuda:
        if (device := first.get_device()) != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return launch(function, *arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)
    pointers = [None if each is None else each.data_ptr() for each in arguments[: function.tensors]]
    if code := function(*pointers, *arguments[function.tensors :], *(stream,) * function.has_stream):
        words = f"CUDA error: {torch.cuda.CudaError(code)}" if first.is_cuda else f"error {code}"
        raise RuntimeError(f"{function.__name__}: {words}")


@functools.lru_cache(maxsize=None)
def warn(text):
    """Warn once a process, at the line that called into this file, not at one of PyTorch's."""
    files = [each.filename for each in inspect.stack(0)]
    level = len(files) - files[::-1].index(files[0])  # behind the outermost of this file
    while level < len(files) - 1 and files[level].startswith(os.path.dirname(torch.__file__)):
        level += 1
    warnings.warn(text, stacklevel=level + 1)


def main():
    from torch.utils import benchmark, cpp_extension

    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)  # by the playground: on the CPU, so a small input
    device = "cpu" if emulated or "_cpu_" in NAME else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    arguments, shape, small, limit = EXAMPLE
    model, x = ModelNew(*arguments).to(device).requires_grad_(False), torch.randn(small if emulated else shape, device=device)
    found, exact = model(x), torch.cat([original(*model.double().operands(part.double())) for part in x.split(16)])
    error = ((found - exact).abs().max() / exact.std()).item()
    names = {"model": model.float(), "x": x, "original": original}
    calls = () if emulated else ("model(x)", "original(*model.operands(x))")
    times = [f"{1e3 * benchmark.Timer(call, globals=names).timeit(20).mean:.3f} ms" for call in calls]
    how_fast = ", PyTorch ".join(times) or f"under the emulator, not timed, on an input of {tuple(x.shape)}"
    verdict = "right" if error <= limit else "wrong"
    print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict}; {how_fast}")


if __name__ == "__main__":
    main()
