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


def fused_tail(kernels, y, pool):
    check(kernels, "y", y, y, (*y.shape[:2], *y.shape[-2:]))
    batch, channels, height, width = y.shape
    if not (0 < pool[0] <= height and 0 < pool[1] <= width):
        raise RuntimeError(f"{NAME}: a pooling window of {pool} does not fit into an image of {height} x {width}")
    y, out = y.contiguous(), y.new_empty(batch)
    if batch:
        launch(kernels.launch_fused_tail, y, out, batch, channels, height, width, *pool)
    return out


def original(y, pool):
    """The gradient is PyTorch's. It takes pooled tensors and one like the convolution's output; v2 and later avoid that one."""
    return torch.sigmoid(nn.functional.avg_pool2d(y, pool)).sum(dim=(1, 2, 3))


class ModelNew(nn.Module):
    # Bound here, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, "forward(Tensor y, int[2] pool) -> Tensor", fused_tail, original

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    @torch.compiler.assume_constant_result
    def namespace(self):
        return build(*self.sources)

    def operands(self, x):
        return self.conv(x), self.avg_pool.kernel_size

    def forward(self, x):
        return getattr(torch.ops, self.namespace()).forward(*self.operands(x))


# ---- From here on all files have the same text; python -m playground.command.shared_text writes it.
LOADING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once


@functools.lru_cache(maxsize=None)
def build(name, text, schema, forward, original, fused=(), flags=(), **constants):
    """Compile `text` once a machine, and return the namespace in torch.ops of an operator, `forward`.

    `text` is CUDA, or C++ without a kernel; `constants` become #defines. forward(kernels, *arguments) computes what the schema
    says by the text's `extern "C"` functions, original(*arguments) the same by PyTorch, whose gradient it has without a `fused`
    one. An edit of any of these gives another namespace, so that a notebook's cell can be run again. Raises what load_inline
    raises, and RuntimeError before PyTorch 2.4.
    """
    from torch.utils import cpp_extension

    if torch.__version__ < "2.4":
        raise RuntimeError(f"{name}: needs PyTorch 2.4 or later, this is {torch.__version__}")

    def fingerprint(code):  # of a function: all but the place where it was written
        return code.co_code, code.co_names, [fingerprint(c) if hasattr(c, "co_code") else c for c in code.co_consts]

    text = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items())) + text
    is_cuda, load = "<<<" in text, cpp_extension.load_inline
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if is_cuda else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability()
    functions = [fingerprint(each.__code__) for each in (forward, original, *fused)]
    everything = text, schema, functions, flags, machine, torch.__version__, torch.version.cuda, sys.version_info
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"
    options = {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}  # before, torch's headers come along
    if is_cuda:
        options |= {"cpp_sources": "", "cuda_sources": text, "extra_cuda_cflags": ["-O3", "-lineinfo", *flags]}
    else:
        options |= {"cpp_sources": text, "extra_cflags": ["-O3", *flags]}

    operators = getattr(torch.ops, namespace)
    with LOADING:
        if not getattr(operators, "registered", None):
            if not shutil.which("ninja"):  # in a virtual environment that is not activated
                os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
            try:
                path = load(namespace, is_python_module=False, **options)
            except BaseException:  # an interrupted or failed build would count as done when the same text is run again
                cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(namespace, None)
                raise
            if not path:  # from some releases
                path = os.path.join(cpp_extension._get_build_directory(namespace, False), namespace + cpp_extension.LIB_EXT)
            kernels = ctypes.CDLL(path)
            device = "cuda" if is_cuda and not getattr(load, "emulates_cuda", False) else "cpu"
            vars(kernels).update(constants, device=device)
            types = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "int": ctypes.c_int}  # or else a pointer
            for result, function, parameters in re.findall(r'extern "C" (\w+) (\w+)\(([^)]*)\)', text):
                if hasattr(kernels, function):  # the text may leave it out for these constants
                    words = [re.match(r"\s*(\w+) \w", each) for each in parameters.split(",") if each]
                    getattr(kernels, function).argtypes = [types.get(word and word[1], ctypes.c_void_p) for word in words]
                    getattr(kernels, function).restype = types[result]
            operators.registered = register(namespace, schema, kernels, forward, original, fused)
    return namespace


def register(namespace, schema, kernels, forward, original, fused):
    """Define the operator for every device, whose tensors meet forward's checks; without `fused` its gradient is PyTorch's."""

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keys, *arguments):
            warn(f"{namespace[:-11]}: {original.__doc__}")
            ctx.others = [... if isinstance(each, torch.Tensor) else each for each in arguments]
            ctx.save_for_backward(*[each for each in arguments if isinstance(each, torch.Tensor)])
            return below_autograd(keys, *arguments)

        @staticmethod
        def backward(ctx, grad):
            again, needs = torch.is_grad_enabled(), ctx.needs_input_grad[1:]  # again: create_graph
            with torch.enable_grad():
                # Views, so that each gradient is a partial one where an argument depends on another.
                given = iter([each.view_as(each) if again else each.detach().requires_grad_() for each in ctx.saved_tensors])
                arguments = [next(given) if other is ... else other for other in ctx.others]
                wanted = [each for each, needed in zip(arguments, needs, strict=True) if needed]
                found = iter(torch.autograd.grad(original(*arguments), wanted, grad, create_graph=again))
            return None, *[next(found) if needed else None for needed in needs]

    def below_autograd(keys, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys, *arguments)

    def autograd(keys, *arguments):
        keys = keys & torch._C._after_autograd_keyset
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return Gradient.apply(keys, *arguments)
        if keys.highestPriorityTypeId() in backends:  # the dispatcher would do the same, and takes longer
            return forward(*arguments)
        return below_autograd(keys, *arguments)

    library, backends = torch.library.Library(namespace, "DEF"), (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    forward = functools.partial(forward, kernels)
    library.impl("forward", forward, "CompositeExplicitAutograd")
    library.impl("forward", autograd, "Autograd", with_keyset=True)
    operator = getattr(torch.ops, namespace).forward.default
    if fused:
        Gradient = fused[0](library, schema, kernels, Gradient, *fused[1:])
    torch.library.register_fake(f"{namespace}::forward", original, lib=library)
    for device in ("cuda", "cpu") if hasattr(torch.library, "register_autocast") else ():  # before PyTorch 2.6: refused
        torch.library.register_autocast(f"{namespace}::forward", device, torch.float32, lib=library)
    return library


def check(kernels, name, tensor, place, shape):
    """Raise RuntimeError unless a tensor is float32, of this shape, and beside `place`, where the kernels run."""
    is_there = (tensor.is_cuda if kernels.device == "cuda" else tensor.is_cpu) and tensor.get_device() == place.get_device()
    if not is_there or tensor.dtype is not torch.float32 or tensor.shape != shape:
        wanted = f"a float32 {kernels.device.upper()} tensor of shape {list(shape)}, on one device with all others"
        got = f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
        raise RuntimeError(f"{NAME}: expected {name} as {wanted}; got {got}")


def launch(function, *arguments):
    """Call a function of `kernels`, tensors for pointers, on the first one's device and its current stream."""
    place = arguments[0]
    arguments = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
    if not place.is_cuda:  # a function that takes no stream, or the emulator's, which has one
        code = function(*arguments, *[None] * (len(function.argtypes) - len(arguments)))
    elif place.get_device() == torch.cuda.current_device():
        code = function(*arguments, torch._C._cuda_getCurrentRawStream(place.get_device()))
    else:
        with torch.cuda.device(place.device):
            code = function(*arguments, torch._C._cuda_getCurrentRawStream(place.get_device()))
    if code:
        words = f"CUDA error: {torch.cuda.CudaError(code)}" if place.is_cuda else f"error {code}"
        raise RuntimeError(f"{function.__name__}: {words}")


@functools.lru_cache(maxsize=None)
def warn(text):
    """Warn once a process, at the line that called into this file, not at one of PyTorch's."""
    frame, files = sys._getframe(), []
    while frame:
        files, frame = [*files, frame.f_code.co_filename], frame.f_back
    level = len(files) - files[::-1].index(files[0])  # behind the outermost of this file
    while level < len(files) - 1 and files[level].startswith(os.path.dirname(torch.__file__)):
        level += 1
    warnings.warn(text, stacklevel=level + 1)


def main():
    from torch.utils import benchmark, cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated, on_cpu = getattr(cpp_extension.load_inline, "emulates_cuda", False), "_cpu_" in NAME
    if not (emulated or on_cpu or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    arguments, shape, small, limit = EXAMPLE
    device = "cpu" if emulated or on_cpu else "cuda"
    model, x = ModelNew(*arguments).to(device), torch.randn(small if emulated else shape, device=device)
    with torch.no_grad():
        model.double()
        exact = torch.cat([original(*model.operands(part.double())) for part in x.split(16)])
        model.float()
        error = ((model(x) - exact).abs().max() / exact.std()).item()
        verdict = "right" if error <= limit else "wrong"
        print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict};", end=" ")
        if emulated or verdict == "wrong":
            return print(f"not timed{f': under the emulator, on an input of {tuple(x.shape)}' if emulated else ''}")
        functions = model, lambda x: original(*model.operands(x))
        timers = [benchmark.Timer("function(x)", globals={"function": each, "x": x}) for each in functions]
        print("{:.3f} ms, PyTorch {:.3f} ms".format(*[1e3 * timer.timeit(20).mean for timer in timers]))


if __name__ == "__main__":
    main()
