"""alexnet_conv1, v1: direct convolution, one thread an output element.

The plain start of the ladder: a line by line translation of the definition. Nothing is staged, padded or rearranged.

Why it is slow
    Each multiply-add takes two loads, and no thread uses a loaded value again: 2 FLOPs for 8 bytes. The caches serve them, so
    it is not memory bound; the load path from the L1 cache to the registers binds. Adjacent threads take adjacent positions,
    but at stride 4 a warp's 32 inputs lie in four cache lines, and the weight in a fifth: 5 cycles for 32 multiply-adds. An
    H200 needs 17 ms for the 843 million such steps, so counted; measured are 18.2 (eager 2.08).

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    with x taken as zero outside the image. Evaluated as written, in float32, in the order c, u, v, the bias last.

Launches
    kernel   grid                    block  shared  work of a thread
    conv2d   (all outputs / 256,)    256    0       one output: in_channels * kernel_h * kernel_w multiply-adds

Floor
    154 MB in, 297 MB out, 54 GFLOP: compute bound without tensor cores; with TF32's, bytes take about as long.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), batch 0 included; any channels, kernel, stride, padding, bias or
    none. Dilation, groups and other padding modes raise, as does anything else. The gradient is PyTorch's. Deterministic.
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
    const int j = index % out_w;
    const int i = index / out_w % out_h;
    const int o = index / out_w / out_h % out_channels;
    const int64_t b = index / out_w / out_h / out_channels;

    const int top = i * stride_h - pad_h, left = j * stride_w - pad_w;  // of the window; negative inside the padding
    float sum = 0.0f;
    for (int c = 0; c < in_channels; ++c) {
        const Element* image = x + (b * in_channels + c) * height * width;
        const Element* filter = weight + ((int64_t)o * in_channels + c) * kernel_h * kernel_w;
        for (int u = 0; u < kernel_h; ++u)
            for (int v = 0; v < kernel_w; ++v) {
                const int h = top + u, w = left + v;
                const bool inside = h >= 0 && h < height && w >= 0 && w < width;
                if (inside) sum += image[(int64_t)h * width + w] * filter[u * kernel_w + v];
            }
    }
    out[index] = bias ? sum + bias[o] : sum;
}

extern "C" int launch_conv2d(const Element* x, const Element* weight, const Element* bias, Element* out, int64_t outputs,
                             int64_t in_channels, int64_t height, int64_t width, int64_t out_channels, int64_t out_h,
                             int64_t out_w, int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w,
                             int64_t pad_h, int64_t pad_w, cudaStream_t stream) {
    conv2d<<<(outputs + THREADS - 1) / THREADS, THREADS, 0, stream>>>(x, weight, bias, out, outputs, in_channels, height, width,
                                                                     out_channels, out_h, out_w, kernel_h, kernel_w, stride_h,
                                                                     stride_w, pad_h, pad_w);
    return cudaGetLastError();
}
"""


def conv2d(kernels, x, weight, bias, stride, padding):
    check(kernels, "x", x, x, (*x.shape[:1], *weight.shape[1:2], *x.shape[-2:]))
    check(kernels, "weight", weight, x, (*weight.shape[:1], *x.shape[1:2], *weight.shape[-2:]))
    if bias is not None:
        check(kernels, "bias", bias, x, weight.shape[:1])
    image, kernel = x.shape[2:], weight.shape[2:]
    room = [size + 2 * pad - taps for size, pad, taps in zip(image, padding, kernel, strict=False)]
    if not len(stride) == len(padding) == 2 or min(*stride, *kernel) < 1 or min(*padding, *room) < 0:
        raise RuntimeError(f"{NAME}: {[*kernel]} taps at strides {stride} do not fit into {[*image]} padded by {padding}")
    out = x.new_empty(x.shape[0], weight.shape[0], *[size // step + 1 for size, step in zip(room, stride, strict=True)])
    if out.numel():
        x, weight, bias = x.contiguous(), weight.contiguous(), bias if bias is None else bias.contiguous()
        sizes = *x.shape[1:], *out.shape[1:], *kernel, *stride, *padding
        launch(kernels.launch_conv2d, x, weight, bias, out, out.numel(), *sizes)
    return out


def original(x, weight, bias, stride, padding):
    """The gradient is PyTorch's, which computes the output again, 297 MB. training_tensor_core has its own."""
    return nn.functional.conv2d(x, weight, bias, stride, padding)


class ModelNew(nn.Module):
    # Bound here, so that another variant in the same notebook cannot replace them.
    schema = "forward(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor"
    sources = NAME, CUDA, schema, conv2d, original

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        return build(*self.sources)

    def operands(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        return x, conv.weight, conv.bias, conv.stride, conv.padding

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
