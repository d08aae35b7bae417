"""conv3d_div_max_gap_bias_sum, v2: everything behind the convolution in one kernel.

Like v1, but the kernel also does the max pooling: it reads the convolution's output and writes one number a sample. The
pooled tensor and the pooling's indices are never written. PyTorch's convolution stays.

Why it is faster
    v1's pooling reads 441 MB and writes 55 MB of maxima and 110 MB of indices, and v1's tail reads the maxima again. Here
    each value of the convolution's output is read once, and its window's maximum lives in a register until it is added
    to a sum. Adjacent threads take adjacent windows and read two floats at once, so a warp's reads are coalesced.
    Training saves only the convolution's output: backward finds each window's argmax again from
    the values, which must be resident anyway, instead of from 110 MB of indices. What it costs: the pool size is fixed
    when the kernel is built, and the convolution still writes those 441 MB, which bounds the gain. Measured on one H200:
    1.98 ms (v1 2.12, eager 2.35).

Mathematics
    As v1:  out[b] = 1/(N*d) * sum over o,k of max over window k of y[b,o,.]  +  sum over o of bias[o],  N whole windows a
    channel (floor rule). The division moves behind max and average, which is right for d > 0, also after rounding, since
    rounding keeps order. For d < 0, y / d = (-y) / |d|: the convolution is run with negated weights and bias, which gives
    exactly -y because floating point is symmetric in sign. d = 0 and d = infinity do not commute with max (0/0 and
    infinity/infinity are NaN, and a NaN wins every max): they are refused, as is a d that is not a normal float32.
    Two values of a window that differ by a rounding error may become equal by the division; the original then sends the
    gradient to the first of the two, this variant to the larger. The sum is taken before the division, so it overflows
    where undivided values come near float32's limit.

    The maximum is PyTorch's: a window is scanned depth, height, width from -infinity; a value replaces the maximum if it is
    larger or NaN. So NaN passes through, and of equal values the first is the argmax. Backward:
    d out[b] / d y[b,o,i] = 1/(N*d) where i is its window's argmax, otherwise 0; values in no whole window get 0.

    As in v1 the sum is the kernel's when `sum_dim` is 1 or -4 and `bias` has one value, or one a channel; otherwise the same
    kernel gives the averages of each (sample, channel), and PyTorch adds the bias and sums those few numbers.

Launches
    kernel                  grid                         block  shared  work of a thread
    fused_pool              (batch,)                     1024   128 B   every 1024th window of its sample
    fused_pool (averages)   (batch*channels,)            1024   128 B   every 1024th window of its channel
    pool_grad               (batch * ceil(windows/256),) 256    0       one window, the incomplete ones at the edges included

Floor
    Memory bound. Forward: 441 MB written by the convolution and read once by the tail, 128 floats out. Backward: 441 MB
    read, 441 MB written. What remains is the convolution and its backward.

Takes
    float32 CUDA tensors (batch, in_channels, depth, height, width), batch 0 included, a sample of the convolution's output
    below 2^31 values; any channels, kernel, bias shape and sum_dim that the original takes; pool_size an int or three; a
    divisor as said above, an int or float. Anything else raises. Trains; second derivatives raise. Deterministic.
"""

import functools
import hashlib
import os
import shutil
import sys
import threading

import torch
import torch.nn as nn

NAME = "conv3d_div_max_gap_bias_sum_v2_fused_pool"

CUDA = r"""
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

// POOL_D, POOL_H and POOL_W, the window's sizes, are defined by the build.

constexpr int WARP = 32;

// Neighbouring floats that are loaded and stored by one instruction; their address is a multiple of their size.
template <int FLOATS>
struct alignas(FLOATS * sizeof(float)) Pack {
    float lane[FLOATS];
};

struct Peak {
    float value;
    int index;  // in the window, in the order of the scan
};

// The maximum of the window that starts at `corner`, as PyTorch finds it: the last NaN, else the first of the largest.
template <int FLOATS>
__device__ Peak window_max(const float* corner, int height, int width) {
    Peak peak = {-INFINITY, 0};
    for (int u = 0; u < POOL_D; ++u)
        for (int v = 0; v < POOL_H; ++v)
            for (int w = 0; w < POOL_W; w += FLOATS) {
                const float* next = corner + ((int64_t)u * height + v) * width + w;
                const Pack<FLOATS> pack = *reinterpret_cast<const Pack<FLOATS>*>(next);
                for (int i = 0; i < FLOATS; ++i) {
                    const float value = pack.lane[i];
                    if (value > peak.value || value != value) peak = {value, (u * POOL_H + v) * POOL_W + w + i};
                }
            }
    return peak;
}

// The sum of `value` over the block, valid in thread 0. The order of additions is fixed, so the bits are too.
template <int THREADS>
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
template <int THREADS, int FLOATS>
__global__ void __launch_bounds__(THREADS, 1) fused_pool(const float* __restrict__ y, const float* __restrict__ bias,
                                                      float* __restrict__ out, int channels, int depth, int height, int width,
                                                      float divisor) {
    const unsigned slabs = depth / POOL_D, rows = height / POOL_H, columns = width / POOL_W;
    const unsigned windows = channels * slabs * rows * columns;
    const float* group = y + (int64_t)blockIdx.x * channels * depth * height * width;
    float sum = 0.0f;
    // Adjacent threads take adjacent windows: coalesced. Unrolled so that the loads of two windows are in flight at
    // once, as one block an SM has no more threads; hence also the second launch bound, which grants a thread the
    // registers, and the 64-bit counter, which cannot wrap round.
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < windows; i += THREADS) {
        const unsigned window = i;  // a 32-bit division is far cheaper
        const unsigned left = window % columns * POOL_W;
        const unsigned row = window / columns;  // over all slabs of all channels
        const unsigned slab = row / rows;       // over all channels
        const unsigned front = slab / slabs * depth + slab % slabs * POOL_D;
        const unsigned top = front * height + row % rows * POOL_H;
        sum += window_max<FLOATS>(group + top * width + left, height, width).value;
    }
    sum = sum / (slabs * rows * columns) / divisor;
    if (bias)
        for (int channel = threadIdx.x; channel < channels; channel += THREADS) sum += bias[channel];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// grad_y of fused_pool. grad_out has one value a sample or, if not `by_sample`, one a channel of it. One thread a window; the
// windows cut off by the floor rule get zeros, so all of grad_y is written. A sample has `blocks` blocks and < 2^31 values.
template <int THREADS, int FLOATS>
__global__ void __launch_bounds__(THREADS) pool_grad(const float* __restrict__ grad_out, const float* __restrict__ y,
                                                     float* __restrict__ grad_y, unsigned blocks, bool by_sample, int channels,
                                                     int depth, int height, int width, float divisor) {
    const unsigned slabs = (depth + POOL_D - 1) / POOL_D;
    const unsigned rows = (height + POOL_H - 1) / POOL_H, columns = (width + POOL_W - 1) / POOL_W;
    const unsigned sample = blockIdx.x / blocks;
    const unsigned window = blockIdx.x % blocks * THREADS + threadIdx.x;
    if (window >= channels * slabs * rows * columns) return;
    const int left = window % columns * POOL_W;
    const int top = window / columns % rows * POOL_H;
    const int front = window / columns / rows % slabs * POOL_D;
    const int64_t plane = (int64_t)sample * channels + window / columns / rows / slabs;
    const int64_t corner = ((plane * depth + front) * height + top) * width + left;

    int argmax = -1;  // no value's index
    float gradient = 0.0f;
    if (front + POOL_D <= depth && top + POOL_H <= height && left + POOL_W <= width) {
        const int whole = (depth / POOL_D) * (height / POOL_H) * (width / POOL_W);
        argmax = window_max<FLOATS>(y + corner, height, width).index;
        gradient = grad_out[by_sample ? sample : plane] / whole / divisor;
    }
    for (int u = 0; u < POOL_D && front + u < depth; ++u)
        for (int v = 0; v < POOL_H && top + v < height; ++v)
            for (int w = 0; w < POOL_W && left + w < width; w += FLOATS) {
                Pack<FLOATS> pack;
                for (int i = 0; i < FLOATS; ++i) pack.lane[i] = (u * POOL_H + v) * POOL_W + w + i == argmax ? gradient : 0.0f;
                *reinterpret_cast<Pack<FLOATS>*>(grad_y + corner + ((int64_t)u * height + v) * width + w) = pack;
            }
}

// Do all windows start on 8 bytes in every row, so that two floats can be read at once?
static bool paired(const float* y, int width) {
    return POOL_W % 2 == 0 && width % 2 == 0 && reinterpret_cast<uintptr_t>(y) % 8 == 0;
}

void launch_fused_pool(const float* y, const float* bias, float* out, int64_t groups, int channels, int depth, int height,
                       int width, double divisor, cudaStream_t stream) {
    constexpr int THREADS = 1024;
    if (paired(y, width))
        fused_pool<THREADS, 2><<<groups, THREADS, 0, stream>>>(y, bias, out, channels, depth, height, width, divisor);
    else
        fused_pool<THREADS, 1><<<groups, THREADS, 0, stream>>>(y, bias, out, channels, depth, height, width, divisor);
}

void launch_pool_grad(const float* grad_out, const float* y, float* grad_y, int64_t batch, bool by_sample, int channels,
                      int depth, int height, int width, double divisor, cudaStream_t stream) {
    constexpr int THREADS = 256;
    const int64_t windows = (int64_t)channels * ((depth + POOL_D - 1) / POOL_D) * ((height + POOL_H - 1) / POOL_H) *
                            ((width + POOL_W - 1) / POOL_W);
    const unsigned blocks = (windows + THREADS - 1) / THREADS;
    if (paired(y, width))
        pool_grad<THREADS, 2><<<batch * blocks, THREADS, 0, stream>>>(grad_out, y, grad_y, blocks, by_sample, channels, depth,
                                                                      height, width, divisor);
    else
        pool_grad<THREADS, 1><<<batch * blocks, THREADS, 0, stream>>>(grad_out, y, grad_y, blocks, by_sample, channels, depth,
                                                                      height, width, divisor);
}
"""

BINDING = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
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

void launch_fused_pool(const float*, const float*, float*, int64_t, int, int, int, int, double, cudaStream_t);
void launch_pool_grad(const float*, const float*, float*, int64_t, bool, int, int, int, int, double, cudaStream_t);

static void check(const at::Tensor& y) {
    TORCH_CHECK(y.is_cuda() && y.scalar_type() == at::kFloat && y.dim() == 5,
                message("fused_pool: expected a 5-d float32 CUDA tensor, got a ", y.dim(), "-d ", y.scalar_type(),
                        " tensor on ", y.device()));
    TORCH_CHECK(POOL_D <= y.size(2) && POOL_H <= y.size(3) && POOL_W <= y.size(4),
                message("fused_pool: a pooling window of ", POOL_D, " x ", POOL_H, " x ", POOL_W,
                        " does not fit into a volume of ", y.size(2), " x ", y.size(3), " x ", y.size(4)));
    TORCH_CHECK(y.size(1) > 0, message("fused_pool: expected at least one channel, got sizes ", y.sizes()));
    TORCH_CHECK(y.size(1) * y.size(2) * y.size(3) * y.size(4) < (int64_t(1) << 31),
                message("fused_pool: expected less than 2^31 values a sample, got sizes ", y.sizes()));
}

// (batch, channels, depth, height, width) -> (batch, 1, 1, 1), the sum of each sample.
at::Tensor fused_pool(const at::Tensor& y_in, const at::Tensor& bias_in, double divisor) {
    check(y_in);
    TORCH_CHECK(bias_in.device() == y_in.device() && bias_in.scalar_type() == at::kFloat && bias_in.dim() == 1 &&
                    bias_in.size(0) == y_in.size(1),
                message("fused_pool: expected a float32 bias of sizes [", y_in.size(1), "] on ", y_in.device(), ", got ",
                        bias_in.scalar_type(), " ", bias_in.sizes(), " on ", bias_in.device()));
    const c10::cuda::CUDAGuard guard(y_in.device());
    const at::Tensor y = y_in.contiguous(), bias = bias_in.contiguous();
    at::Tensor out = at::empty({y.size(0), 1, 1, 1}, y.options());
    if (out.numel() == 0) return out;
    launch_fused_pool(y.const_data_ptr<float>(), bias.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.size(0),
                      y.size(1), y.size(2), y.size(3), y.size(4), divisor, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

// (batch, channels, depth, height, width) -> (batch, channels, 1, 1, 1), the average of each channel, divided.
at::Tensor averages(const at::Tensor& y_in, double divisor) {
    check(y_in);
    const c10::cuda::CUDAGuard guard(y_in.device());
    const at::Tensor y = y_in.contiguous();
    at::Tensor out = at::empty({y.size(0), y.size(1), 1, 1, 1}, y.options());
    if (out.numel() == 0) return out;
    launch_fused_pool(y.const_data_ptr<float>(), nullptr, out.mutable_data_ptr<float>(), y.size(0) * y.size(1), 1, y.size(2),
                      y.size(3), y.size(4), divisor, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

// The gradient of y for both: grad_out has one value a sample, or one a channel of it.
at::Tensor pool_grad(const at::Tensor& grad_out_in, const at::Tensor& y_in, double divisor) {
    check(y_in);
    const int64_t batch = y_in.size(0), channels = y_in.size(1);
    TORCH_CHECK(grad_out_in.device() == y_in.device() && grad_out_in.scalar_type() == at::kFloat &&
                    (grad_out_in.numel() == batch || grad_out_in.numel() == batch * channels),
                message("pool_grad: expected ", batch, " or ", batch * channels, " float32 gradients on ", y_in.device(),
                        ", got ", grad_out_in.scalar_type(), " ", grad_out_in.sizes(), " on ", grad_out_in.device()));
    const c10::cuda::CUDAGuard guard(y_in.device());
    const at::Tensor y = y_in.contiguous(), grad_out = grad_out_in.contiguous();
    at::Tensor grad_y = at::empty_like(y);
    if (grad_y.numel() == 0) return grad_y;
    launch_pool_grad(grad_out.const_data_ptr<float>(), y.const_data_ptr<float>(), grad_y.mutable_data_ptr<float>(), batch,
                     grad_out.numel() == batch, channels, y.size(2), y.size(3), y.size(4), divisor,
                     c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return grad_y;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) {
    m.def("fused_pool(Tensor y, Tensor bias, float divisor) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("averages(Tensor y, float divisor) -> Tensor", {at::Tag::pt2_compliant_tag});
    m.def("pool_grad(Tensor grad_out, Tensor y, float divisor) -> Tensor", {at::Tag::pt2_compliant_tag});
}

// Registered for every device, so that a tensor on the wrong one meets the check above and its message.
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) {
    m.impl("fused_pool", &fused_pool);
    m.impl("averages", &averages);
    m.impl("pool_grad", &pool_grad);
}
"""


def register(namespace):
    """Shapes for torch.compile, and autograd."""
    operators = getattr(torch.ops, namespace)

    @torch.library.register_fake(f"{namespace}::fused_pool")
    def fused_pool(y, bias, divisor):
        return y.new_empty(y.shape[0], 1, 1, 1)

    @torch.library.register_fake(f"{namespace}::averages")
    def averages(y, divisor):
        return y.new_empty(*y.shape[:2], 1, 1, 1)

    @torch.library.register_fake(f"{namespace}::pool_grad")
    def pool_grad(grad_out, y, divisor):
        return torch.empty_like(y, memory_format=torch.contiguous_format)

    def save(ctx, inputs, output):
        y, ctx.divisor = inputs[0], inputs[-1]
        ctx.save_for_backward(y)

    def averages_backward(ctx, grad_out):
        (y,) = ctx.saved_tensors
        return operators.pool_grad(grad_out, y, ctx.divisor), None

    def fused_pool_backward(ctx, grad_out):
        (y,) = ctx.saved_tensors
        grad_y = operators.pool_grad(grad_out, y, ctx.divisor) if ctx.needs_input_grad[0] else None
        return grad_y, grad_out.sum().expand(y.shape[1]), None

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{namespace}: second derivatives are not implemented")

    torch.library.register_autograd(f"{namespace}::fused_pool", fused_pool_backward, setup_context=save)
    torch.library.register_autograd(f"{namespace}::averages", averages_backward, setup_context=save)
    torch.library.register_autograd(f"{namespace}::pool_grad", refuse)
    # autocast's convolution gives 16-bit numbers; cpu: under the emulator. Before PyTorch 2.6 they are refused.
    for device in ("cuda", "cpu") if hasattr(torch.library, "register_autocast") else ():
        for name in ("fused_pool", "averages"):
            torch.library.register_autocast(f"{namespace}::{name}", device, torch.float32)


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

    def __init__(self, in_channels, out_channels, kernel_size, divisor, pool_size, bias_shape, sum_dim):
        super().__init__()
        limits = torch.finfo(torch.float32)
        if not isinstance(divisor, (int, float)) or not limits.tiny <= abs(divisor) <= limits.max:  # NaN fails it, too
            raise ValueError(
                f"divisor: expected a number whose size is a normal float32, {limits.tiny} to {limits.max}, got {divisor!r}; "
                "the division is moved behind the max, and max(conv) / 0 is not max(conv / 0), nor is it for infinity"
            )
        self.pool_size = (pool_size,) * 3 if isinstance(pool_size, int) else tuple(pool_size)
        if len(self.pool_size) != 3 or min(self.pool_size) < 1:
            raise ValueError(f"pool_size: expected a positive int or three of them, got {pool_size!r}")
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor = divisor
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.sum_dim = sum_dim
        one_each_channel = (1,) * (5 - self.bias.dim()) + self.bias.shape in ((1, 1, 1, 1, 1), (1, out_channels, 1, 1, 1))
        over_channels = sum_dim in (1, -4, (1,), (-4,), [1], [-4])
        self.sums_channels = over_channels and one_each_channel  # decides which operator serves; see Mathematics

    @torch.compiler.assume_constant_result
    def namespace(self):
        pool_d, pool_h, pool_w = self.pool_size
        return build(*self.sources, POOL_D=pool_d, POOL_H=pool_h, POOL_W=pool_w)

    def forward(self, x):
        operators = getattr(torch.ops, self.namespace())
        # For a negative divisor y / divisor = (-y) / |divisor|, and the negative of a convolution is exact.
        y = nn.functional.conv3d(x, -self.conv.weight, -self.conv.bias) if self.divisor < 0 else self.conv(x)
        if self.sums_channels:
            bias = self.bias.expand(1, y.shape[1], 1, 1, 1).flatten()
            return operators.fused_pool(y, bias, abs(self.divisor))
        return torch.sum(operators.averages(y, abs(self.divisor)) + self.bias, dim=self.sum_dim)


def main():
    from torch.utils import benchmark, cpp_extension

    # Where the playground's emulator stands in for the compiler, the kernel runs on CPU tensors; small ones, as it takes long.
    emulated = getattr(cpp_extension.load_inline, "emulates_cuda", False)
    if not (emulated or torch.cuda.is_available()):
        return print(f"{NAME}: needs an NVIDIA GPU and a CUDA build of PyTorch; {torch.__version__} finds none here.")
    torch.manual_seed(0)
    model = ModelNew(8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1).to("cpu" if emulated else "cuda")
    x = torch.randn(4, 8, 6, 12, 20) if emulated else torch.randn(128, 8, 16, 64, 64, device="cuda")

    def plain(x):
        pooled = nn.functional.max_pool3d(model.conv(x) / model.divisor, model.pool_size)
        return (pooled.mean(dim=(2, 3, 4), keepdim=True) + model.bias).sum(dim=1)

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
