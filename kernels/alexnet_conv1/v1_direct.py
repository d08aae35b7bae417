"""alexnet_conv1, v1: direct convolution, one thread an output element.

The plain start of the ladder: a line by line translation of the definition. Nothing is staged, padded or rearranged.

Why it is slow
    Each multiply-add takes two loads, and its thread never uses a loaded value again: 2 FLOPs for 8 bytes. Every input is
    loaded for up to 9 windows in each of 96 channels, every weight for each position of each sample. The caches serve
    these loads, so it is not memory bound; the load path from the L1 cache to the registers binds. Adjacent threads take
    adjacent positions, but at stride 4 a warp's 32 inputs lie across 512 bytes: four cache lines for the inputs and one
    for the weight make 5 cycles of the load path for 32 multiply-adds. Of the roughly ten instructions around each
    of them (addresses, the test for padding, the loop) one does arithmetic: it is nearly issue bound, too.
    On an H200, 843 million such steps over 132 SMs at 1.9 GHz need 17 ms for the loads alone, so counted;
    measured are 18.2 ms for everything (eager 2.08).

What later steps change
    A tile of outputs in registers lets each load feed many multiply-adds; inputs and weights staged in shared memory
    are read from global memory once a block, and padded there once, without a test in the loop; tensor cores then do
    the products.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    with x taken as zero outside the image. Evaluated as written, in float32, in the order c, u, v, the bias last.

Launches
    kernel   grid                    block  shared  work of a thread
    conv2d   (all outputs / 256,)    256    0       one output: in_channels * kernel_h * kernel_w multiply-adds

Floor
    At the original's size 154 MB in, 297 MB out, 54 GFLOP. Without tensor cores compute bound; with them (TF32) arithmetic
    and bytes take about the same time.

Takes
    float32 CUDA tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size, bias or none. Dilation, groups and padding modes other than the default raise, and so does
    anything else. Forward only: a gradient raises. Deterministic.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "alexnet_conv1_v1_direct"

CUDA = r"""
#include <cuda_runtime.h>
#include <cstdint>

// x (batch, in_channels, height, width), weight (out_channels, in_channels, kernel_h, kernel_w), bias (out_channels) or null
// -> out (batch, out_channels, out_h, out_w). One thread an element of out.
__global__ void conv2d(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
                       float* __restrict__ out, int64_t outputs, int in_channels, int height, int width, int out_channels,
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
        const float* image = x + (b * in_channels + c) * height * width;
        const float* filter = weight + ((int64_t)o * in_channels + c) * kernel_h * kernel_w;
        for (int u = 0; u < kernel_h; ++u)
            for (int v = 0; v < kernel_w; ++v) {
                const int h = top + u, w = left + v;
                const bool inside = h >= 0 && h < height && w >= 0 && w < width;
                if (inside) sum += image[(int64_t)h * width + w] * filter[u * kernel_w + v];
            }
    }
    out[index] = bias ? sum + bias[o] : sum;
}

void launch_conv2d(const float* x, const float* weight, const float* bias, float* out, int64_t outputs, int in_channels,
                   int height, int width, int out_channels, int out_h, int out_w, int kernel_h, int kernel_w, int stride_h,
                   int stride_w, int pad_h, int pad_w, cudaStream_t stream) {
    constexpr int THREADS = 256;
    conv2d<<<(outputs + THREADS - 1) / THREADS, THREADS, 0, stream>>>(x, weight, bias, out, outputs, in_channels, height, width,
                                                                     out_channels, out_h, out_w, kernel_h, kernel_w, stride_h,
                                                                     stride_w, pad_h, pad_w);
}
"""

BINDING = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <string>

// Messages are put together without streams: those crash in a library that is linked with a libstdc++ of its own.
static std::string text(const char* value) { return value; }
static std::string text(at::ScalarType value) { return c10::toString(value); }
static std::string text(const c10::Device& value) { return value.str(); }
template <class T>
static std::enable_if_t<std::is_arithmetic_v<T>, std::string> text(T value) { return std::to_string(value); }
static std::string text(at::IntArrayRef values) {
    std::string list;
    for (const int64_t value : values) list += (list.empty() ? "[" : ", ") + std::to_string(value);
    return list.empty() ? "[]" : list + "]";
}
template <class... Parts>
static std::string message(const Parts&... parts) { return (text(parts) + ...); }

void launch_conv2d(const float*, const float*, const float*, float*, int64_t, int, int, int, int, int, int, int, int, int, int,
                   int, int, cudaStream_t);

static void check(const char* name, const at::Tensor& tensor, int64_t dim, const at::Tensor& x) {
    TORCH_CHECK(tensor.defined(), message("conv2d: expected ", name, " to be a tensor, got None"));
    TORCH_CHECK(tensor.is_cuda() && tensor.scalar_type() == at::kFloat && tensor.dim() == dim,
                message("conv2d: expected ", name, " to be a ", dim, "-d float32 CUDA tensor, got a ", tensor.dim(), "-d ",
                        tensor.scalar_type(), " tensor on ", tensor.device()));
    TORCH_CHECK(tensor.device() == x.device(),
                message("conv2d: x is on ", x.device(), ", ", name, " on ", tensor.device()));
}

at::Tensor conv2d(const at::Tensor& x_in, const at::Tensor& weight_in, const std::optional<at::Tensor>& bias_in,
                  at::IntArrayRef stride, at::IntArrayRef padding) {
    check("x", x_in, 4, x_in);
    check("weight", weight_in, 4, x_in);
    if (bias_in) check("bias", *bias_in, 1, x_in);
    const int64_t in_channels = x_in.size(1), height = x_in.size(2), width = x_in.size(3);
    const int64_t out_channels = weight_in.size(0), kernel_h = weight_in.size(2), kernel_w = weight_in.size(3);
    TORCH_CHECK(weight_in.size(1) == in_channels,
                message("conv2d: the weight takes ", weight_in.size(1), " channels, x has ", in_channels));
    TORCH_CHECK(!bias_in || bias_in->size(0) == out_channels,
                message("conv2d: expected ", out_channels, " biases, got ", bias_in->size(0)));
    TORCH_CHECK(stride.size() == 2 && padding.size() == 2 && stride[0] > 0 && stride[1] > 0 && padding[0] >= 0 &&
                    padding[1] >= 0,
                message("conv2d: expected two positive strides and two paddings, none negative, got ", stride, " and ",
                        padding));
    const int64_t room_h = height + 2 * padding[0] - kernel_h, room_w = width + 2 * padding[1] - kernel_w;
    TORCH_CHECK(kernel_h > 0 && kernel_w > 0 && room_h >= 0 && room_w >= 0,
                message("conv2d: a kernel of ", kernel_h, " x ", kernel_w, " does not fit into an image of ", height, " x ",
                        width, " padded by ", padding));
    const int64_t out_h = room_h / stride[0] + 1, out_w = room_w / stride[1] + 1;

    const c10::cuda::CUDAGuard guard(x_in.device());
    at::Tensor out = at::empty({x_in.size(0), out_channels, out_h, out_w}, x_in.options());
    if (out.numel() == 0) return out;
    const at::Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
    const at::Tensor bias = bias_in ? bias_in->contiguous() : at::Tensor();
    launch_conv2d(x.const_data_ptr<float>(), weight.const_data_ptr<float>(),
                  bias.defined() ? bias.const_data_ptr<float>() : nullptr, out.mutable_data_ptr<float>(), out.numel(),
                  in_channels, height, width, out_channels, out_h, out_w, kernel_h, kernel_w, stride[0], stride[1], padding[0],
                  padding[1], c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("conv2d(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor",
          {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the check above and its message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) { m.impl("conv2d", &conv2d); }
"""


def register(namespace):
    """Shapes for torch.compile, and a refusal of gradients."""

    @torch.library.register_fake(f"{namespace}::conv2d")
    def conv2d(x, weight, bias, stride, padding):
        out_channels, _, *kernel = weight.shape
        out_h, out_w = ((x.shape[2 + d] + 2 * padding[d] - kernel[d]) // stride[d] + 1 for d in (0, 1))
        return x.new_empty(x.shape[0], out_channels, out_h, out_w)

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: this variant computes forward only; call it under torch.no_grad()")

    torch.library.register_autograd(f"{namespace}::conv2d", refuse)


BUILDING = threading.RLock()  # the first calls of a model and of its replicas may come from several threads at once


@functools.lru_cache(maxsize=None)
def build(name, binding, cuda, register, cflags=(), cuda_cflags=(), **constants):
    """Compile and load the sources, once a machine, and return the namespace of their operators in torch.ops.

    The namespace is `name` and a hash of all that the binary depends on: an edit gives a new library and new operators
    beside the old ones, so an edited notebook cell can simply be run again. `cuda` is None where there is none;
    `constants` become #defines on top of both sources. Raises what torch.utils.cpp_extension.load_inline raises when the
    compiler is missing or refuses the text, and RuntimeError before PyTorch 2.4.
    """
    from torch.utils import cpp_extension

    if torch.__version__ < "2.4":
        raise RuntimeError(f"{name}: needs PyTorch 2.4 or later, this is {torch.__version__}")

    def fingerprint(code):  # of a function: all but the place where it was written
        return code.co_code, code.co_names, [fingerprint(c) if hasattr(c, "co_code") else c for c in code.co_consts]

    defines = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items()))
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability()
    versions = torch.__version__, torch.version.cuda, sys.version_info
    everything = binding, cuda, defines, fingerprint(register.__code__), cflags, cuda_cflags, machine, versions
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"

    # Before PyTorch 2.8 all of its headers come along, which is slower; before 2.11 TORCH_LIBRARY does not expand a macro.
    narrow = {"no_implicit_headers": True} if torch.__version__ >= "2.8" else {}
    binding = binding if torch.__version__ >= "2.11" else binding.replace("TORCH_EXTENSION_NAME", namespace)

    operators = getattr(torch.ops, namespace)
    with BUILDING:
        if not getattr(operators, "registered", False):
            if not shutil.which("ninja"):  # in a virtual environment that is not activated
                os.environ["PATH"] += os.pathsep + os.path.dirname(sys.executable)
            try:
                cpp_extension.load_inline(
                    namespace,
                    cpp_sources=defines + binding,
                    cuda_sources=defines + cuda if cuda else None,
                    extra_cflags=["-O3", *cflags],
                    extra_cuda_cflags=["-O3", "-lineinfo", *cuda_cflags],
                    is_python_module=False,
                    **narrow,
                )
            except BaseException:  # an interrupted or failed build would count as done when the same text is run again
                cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(namespace, None)
                raise
            register(namespace)
            operators.registered = True
    return namespace


class ModelNew(nn.Module):
    sources = NAME, BINDING, CUDA, register  # bound here, so that another variant in the same notebook cannot replace them

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        return build(*self.sources)

    def forward(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        operators = getattr(torch.ops, self.namespace())
        return operators.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def main():
    from torch.utils import benchmark, cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew().to("cpu" if emulated else "cuda")
    x = torch.randn(2, 3, 67, 63) if emulated else torch.randn(256, 3, 224, 224, device="cuda")
    plain = model.conv1

    def milliseconds(function):  # of 20 calls in a row, on average
        return 1e3 * benchmark.Timer("function(x)", globals={"function": function, "x": x}).timeit(20).mean

    with torch.no_grad():
        model.double()
        exact = torch.cat([plain(part.double()) for part in x.split(16)])
        model.float()
        error, limit = ((model(x) - exact).abs().max() / exact.std()).item(), 2e-2  # TF32 is off by up to 9e-3
        verdict = "right" if error <= limit else "wrong"
        print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread, limit {limit:.0e}: {verdict};", end=" ")
        if emulated:
            print(f"under the emulator, which tells no times, on an input of {tuple(x.shape)}")
        elif verdict == "wrong":
            print("not timed")
        else:
            print(f"{milliseconds(model):.3f} ms, PyTorch {milliseconds(plain):.3f} ms")


if __name__ == "__main__":
    main()
