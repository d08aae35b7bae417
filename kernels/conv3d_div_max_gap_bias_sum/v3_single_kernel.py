"""conv3d_div_max_gap_bias_sum, v3: the convolution, too; one kernel from the input to one number a sample.

Like v2, but a thread computes the convolution at all positions of one pooling window, keeps their maximum in registers, and
only sums leave the chip: the convolution's output is never written.

Why it is faster
    v2 waits for 441 MB that the convolution has just written. Here only the input is read. A thread has 8 positions x 8
    channels of sums in registers: 16 loads of the input and 6 of weights feed 192 multiply-adds. What it costs: fp32 where
    PyTorch uses tensor cores. Predicted 1.25 ms on an H200, measured 1.55 (v2 1.98, eager 2.34).

Mathematics
    out[b] = sum over o of ((1/N * sum over k of max over window k of y[b,o,.] + sign(d) * conv_bias[o]) / |d| + bias[o])
    y: the convolution with weights * sign(d), without its bias: exact, since floating point is symmetric in sign.
    A position's value is one chain of fused multiply-adds, so equal inputs give equal bits. Maximum and divisor as in v2.

Launches
    kernel         grid                                              block  shared  work of a thread
    conv_max_mean  (samples x windows / 128 x groups of 8 channels)  128    7 KB    a window in 8 channels

Floor
    47.6 GFLOP in fp32, 0.93 ms at the 51 TFLOP/s that an H200 reaches: compute bound. 269 MB in are 0.06 ms.

Takes
    What the original takes, in float32 on CUDA, a channel below 2^31 pixels; any size, in slices of the weights. `sum_dim` and
    `bias` as in v1. Anything else raises. The gradient is PyTorch's. Deterministic.
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

NAME = "conv3d_div_max_gap_bias_sum_v3_single_kernel"
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's
SCHEMA = "forward(Tensor x, Tensor weight, Tensor conv_bias, Tensor bias, float divisor, int[3] pool) -> Tensor"

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

using Element = float;  // of x and the parameters

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

constexpr int64_t POSITIONS = (int64_t)POOL_D * POOL_H * POOL_W;  // of a window

// Output channels in groups of equal size, at most 8: as many accumulators as a thread has.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 8), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUT_PITCH = round_up(OUT_BLOCK, 4);  // of a tap's weights in shared memory, for 16-byte reads

// A thread works on a part of its window at a time: at most 8 positions that follow each other in the order of the scan.
constexpr int PART_W = largest_divisor(POOL_W, 8);
constexpr int PART_H = PART_W == POOL_W ? largest_divisor(POOL_H, 8 / PART_W) : 1;
constexpr int PART_D = PART_H == POOL_H && PART_W == POOL_W ? largest_divisor(POOL_D, 8 / (PART_W * PART_H)) : 1;
constexpr int PART = PART_D * PART_H * PART_W;

// What a block holds in shared memory at a time is a slice of the weights: of the input channels c and of the kernel's elements
// r, s, t. Slices divide evenly, so they need no bounds. At common sizes all weights of 8 output channels are one slice.
constexpr int WEIGHT_FLOATS = 2304;
constexpr int SLICE_T = largest_divisor(KERNEL_W, 16);  // a row of the input is in registers, too
constexpr int SLICE_S = largest_divisor(KERNEL_H, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T));
constexpr int SLICE_R = largest_divisor(KERNEL_D, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T * SLICE_S));
constexpr int SLICE_C = largest_divisor(IN_CHANNELS, WEIGHT_FLOATS / (OUT_PITCH * SLICE_T * SLICE_S * SLICE_R));

__device__ float warp_sum(float value) {  // in lane 0
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

// The sums of values[k] over the block, for each k, returned in thread k. The order of additions is fixed, so the bits are
// too.
template <int N>
__device__ float block_sums(const float (&values)[N]) {
    static_assert(N <= THREADS, "a thread for each sum");
    __shared__ float warp_sums[N][WARPS];
    UNROLL for (int k = 0; k < N; ++k) {
        const float sum = warp_sum(values[k]);
        if (threadIdx.x % WARP == 0) warp_sums[k][threadIdx.x / WARP] = sum;
    }
    __syncthreads();
    float sum = 0.0f;
    if (threadIdx.x < N)
        for (int warp = 0; warp < WARPS; ++warp) sum += warp_sums[threadIdx.x][warp];
    return sum;
}

// x (batch, IN_CHANNELS, depth, height, width), and how many whole windows fit into it. A channel has less than 2^31 pixels.
struct Volume {
    const Element* x;
    int64_t batch;
    int depth, height, width, slabs, rows, columns;
    Volume(const Element* x, int64_t batch, int depth, int height, int width)
        : x(x), batch(batch), depth(depth), height(height), width(width), slabs((depth - KERNEL_D + 1) / POOL_D),
          rows((height - KERNEL_H + 1) / POOL_H), columns((width - KERNEL_W + 1) / POOL_W) {}
    __host__ __device__ unsigned windows() const { return slabs * rows * columns; }
    __host__ __device__ unsigned chunks() const { return (windows() + THREADS - 1) / THREADS; }  // of windows
    // Offset of channel c's pixel at (d, h, w).
    __device__ int64_t at(int64_t sample, int c, int d, int h, int w) const {
        return (((sample * IN_CHANNELS + c) * depth + d) * height + h) * width + w;
    }
};

// The divisor, and what is done about its sign.
struct Division {
    float divisor;
    __device__ float sign() const { return copysignf(1.0f, divisor); }
    __device__ float average(float sum, unsigned windows, float conv_bias) const {
        return (sum / windows + sign() * conv_bias) / fabsf(divisor);
    }
};

// A window's maximum in each of OUT_BLOCK channels. All threads of the block call it; those without a window get nothing.
__device__ __forceinline__ void convolve_window(const Volume& volume, const Element* __restrict__ weight, float sign,
                                                int64_t sample, unsigned window, int first_out, float (&maxima)[OUT_BLOCK]) {
    __shared__ alignas(16) float weights[SLICE_C][SLICE_R][SLICE_S][SLICE_T][OUT_PITCH];
    const bool exists = window < volume.windows();
    const int column = window % volume.columns, row = window / volume.columns % volume.rows;
    const int slab = window / volume.columns / volume.rows;
    UNROLL for (int o = 0; o < OUT_BLOCK; ++o) maxima[o] = -INFINITY;

    // Loops of one nest are not indented.
    UNROLL_1 for (int first = 0; first < POSITIONS; first += PART) {
        const int d = slab * POOL_D + first / (POOL_H * POOL_W), h = row * POOL_H + first / POOL_W % POOL_H;
        const int w = column * POOL_W + first % POOL_W;
        float sums[OUT_BLOCK][PART_D][PART_H][PART_W] = {};
        UNROLL_1 for (int c0 = 0; c0 < IN_CHANNELS; c0 += SLICE_C)
        UNROLL_1 for (int r0 = 0; r0 < KERNEL_D; r0 += SLICE_R)
        UNROLL_1 for (int s0 = 0; s0 < KERNEL_H; s0 += SLICE_S)
        UNROLL_1 for (int t0 = 0; t0 < KERNEL_W; t0 += SLICE_T) {
            __syncthreads();  // the slice before has been read
            UNROLL_1 for (int k = threadIdx.x; k < SLICE_C * SLICE_R * SLICE_S * SLICE_T * OUT_PITCH; k += THREADS) {
                const int o = k % OUT_PITCH, t = k / OUT_PITCH % SLICE_T, s = k / OUT_PITCH / SLICE_T % SLICE_S;
                const int r = k / OUT_PITCH / SLICE_T / SLICE_S % SLICE_R, c = k / OUT_PITCH / SLICE_T / SLICE_S / SLICE_R;
                const int64_t channel = (int64_t)(first_out + o) * IN_CHANNELS + c0 + c;
                const int64_t from = ((channel * KERNEL_D + r0 + r) * KERNEL_H + s0 + s) * KERNEL_W + t0 + t;
                weights[c][r][s][t][o] = o < OUT_BLOCK && first_out + o < OUT_CHANNELS ? sign * weight[from] : 0.0f;
            }
            __syncthreads();
            if (exists)
            UNROLL_1 for (int c = 0; c < SLICE_C; ++c)
            UNROLL_1 for (int r = 0; r < SLICE_R; ++r)
            UNROLL_1 for (int s = 0; s < SLICE_S; ++s) {
                const Element* corner = volume.x + volume.at(sample, c0 + c, d + r0 + r, h + s0 + s, w + t0);
                float values[PART_D][PART_H][PART_W + SLICE_T - 1];
                UNROLL for (int u = 0; u < PART_D; ++u)
                UNROLL for (int v = 0; v < PART_H; ++v)
                UNROLL for (int i = 0; i < PART_W + SLICE_T - 1; ++i)
                    values[u][v][i] = corner[((int64_t)u * volume.height + v) * volume.width + i];
                UNROLL for (int t = 0; t < SLICE_T; ++t)
                UNROLL for (int o = 0; o < OUT_BLOCK; ++o)
                UNROLL for (int i = 0; i < PART; ++i) {
                    const int u = i / (PART_H * PART_W), v = i / PART_W % PART_H;
                    sums[o][u][v][i % PART_W] += weights[c][r][s][t][o] * values[u][v][i % PART_W + t];
                }
            }
        }
        UNROLL for (int o = 0; o < OUT_BLOCK; ++o)
        UNROLL for (int i = 0; i < PART; ++i) {  // the maximum, as PyTorch finds it: a NaN wins
            const float value = sums[o][i / (PART_H * PART_W)][i / PART_W % PART_H][i % PART_W];
            if (value > maxima[o] || value != value) maxima[o] = value;
        }
    }
}

// A sample's result from the sums of its blocks, (chunks, OUT_CHANNELS in groups): the average of each channel to
// out (batch, OUT_CHANNELS), or, with a bias of `biases` values, the sum of all to out (batch,).
__device__ void finish_sample(const Volume& volume, const float* partial_sums, const Element* __restrict__ conv_bias,
                              const Element* __restrict__ bias, int biases, Division division, int64_t sample, float* out) {
    __shared__ float warp_totals[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float total = 0.0f;
    for (int o = warp; o < OUT_CHANNELS; o += WARPS) {
        float sum = 0.0f;
        for (unsigned chunk = lane; chunk < volume.chunks(); chunk += WARP)
            sum += partial_sums[((sample * volume.chunks() + chunk) * OUT_GROUPS + o / OUT_BLOCK) * OUT_BLOCK + o % OUT_BLOCK];
        const float average = division.average(warp_sum(sum), volume.windows(), conv_bias[o]);
        if (bias) total += average + bias[biases == 1 ? 0 : o];
        else if (lane == 0) out[sample * OUT_CHANNELS + o] = average;
    }
    if (!bias) return;
    if (lane == 0) warp_totals[warp] = total;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int other = 1; other < WARPS; ++other) total += warp_totals[other];
    out[sample] = total;
}

// `partial_sums` (blocks, OUT_BLOCK), `arrivals` a zero for each sample.
__global__ void __launch_bounds__(THREADS, 4)
    conv_max_mean(Volume volume, const Element* __restrict__ weight, const Element* __restrict__ conv_bias,
                  const Element* __restrict__ bias, int biases, Division division, float* partial_sums, unsigned* arrivals,
                  float* __restrict__ out) {
    const int first_out = blockIdx.x % OUT_GROUPS * OUT_BLOCK;
    const int64_t sample = blockIdx.x / OUT_GROUPS / volume.chunks();
    const unsigned window = blockIdx.x / OUT_GROUPS % volume.chunks() * THREADS + threadIdx.x;
    float maxima[OUT_BLOCK];
    convolve_window(volume, weight, division.sign(), sample, window, first_out, maxima);
    UNROLL for (int o = 0; o < OUT_BLOCK; ++o)
        if (window >= volume.windows() || first_out + o >= OUT_CHANNELS) maxima[o] = 0.0f;
    const float sum = block_sums(maxima);
    if (threadIdx.x < OUT_BLOCK) partial_sums[(int64_t)blockIdx.x * OUT_BLOCK + threadIdx.x] = sum;
    __syncthreads();
    // The first fence makes this block's sums visible before its arrival; the last block's second one, the others' sums to it.
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrivals + sample, 1u) == volume.chunks() * OUT_GROUPS - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    finish_sample(volume, partial_sums, conv_bias, bias, biases, division, sample, out);
}

extern "C" int64_t count_blocks(int64_t batch, int64_t depth, int64_t height, int64_t width) {
    return batch * Volume(nullptr, batch, depth, height, width).chunks() * OUT_GROUPS;
}

// scratch: OUT_BLOCK floats a block, at most 8; arrivals: a zero for each sample. With `biases`, 1 or OUT_CHANNELS, `out` is
// (batch,), without (batch, OUT_CHANNELS).
extern "C" int launch_conv_max_mean(const Element* x, const Element* weight, const Element* conv_bias, const Element* bias,
                                    float* scratch, unsigned* arrivals, float* out, double divisor, int64_t biases,
                                    int64_t batch, int64_t depth, int64_t height, int64_t width, cudaStream_t stream) {
    conv_max_mean<<<count_blocks(batch, depth, height, width), THREADS, 0, stream>>>(
        Volume(x, batch, depth, height, width), weight, conv_bias, biases ? bias : nullptr, biases,
        Division{static_cast<float>(divisor)}, scratch, arrivals, out);
    return cudaGetLastError();
}
"""


@functools.lru_cache(maxsize=1024)
def sizes(kernels, x, weight, conv_bias, bias, *pool):
    """Return the output's shape, the floats of scratch, biases and the sizes of x. Raises RuntimeError for bad input."""
    shape, outs, kernel = x[0], kernels.OUT_CHANNELS, (kernels.KERNEL_D, kernels.KERNEL_H, kernels.KERNEL_W)
    check(kernels, "x", x, x, (*shape[:1], kernels.IN_CHANNELS, *shape[-3:]))
    check(kernels, "weight", weight, x, (outs, kernels.IN_CHANNELS, *kernel))
    check(kernels, "conv_bias", conv_bias, x, (outs,))
    check(kernels, "bias", bias, x, bias[0] if bias[0].numel() in (0, 1, outs) else (outs,))
    fits = all(size >= k + p - 1 for size, k, p in zip(shape[2:], kernel, pool, strict=False))
    if pool != (kernels.POOL_D, kernels.POOL_H, kernels.POOL_W) or not fits:
        raise RuntimeError(f"{NAME}: a window of {list(pool)} behind a kernel of {kernel} does not fit into {list(shape[2:])}")
    if shape[2:].numel() >= 2**31:
        raise RuntimeError(f"{NAME}: expected less than 2^31 pixels a channel, got x of shape {list(shape)}")
    numbers = bias[0].numel(), shape[0], *shape[2:]
    blocks = kernels.count_blocks(*numbers[1:]) if shape[0] else 0
    if blocks >= 2**31:
        raise RuntimeError(f"{NAME}: the batch needs {blocks} blocks, more than a grid has")
    return (shape[0], *([] if numbers[0] else [outs]), 1, 1, 1), 8 * blocks, numbers


def conv_max_mean(kernels, x, weight, conv_bias, bias, divisor, pool, sizes=sizes):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, outputs, 1, 1, 1)."""
    shape, floats, numbers = sizes(kernels, kind(x), kind(weight), kind(conv_bias), kind(bias), *pool)
    x, weight, conv_bias, bias = x.contiguous(), weight.contiguous(), conv_bias.contiguous(), bias.contiguous()
    out = x.new_empty(shape)
    if shape[0]:
        scratch, arrivals = x.new_empty(floats), x.new_zeros(shape[0], dtype=torch.int32)
        launch(kernels.launch_conv_max_mean, x, weight, conv_bias, bias, scratch, arrivals, out, divisor, *numbers)
    return out


def original(x, weight, conv_bias, bias, divisor, pool):
    """The gradient is PyTorch's: it takes several times the 441 MB that the forward pass avoids; training_tensor_core 14 MB."""
    y = nn.functional.max_pool3d(nn.functional.conv3d(x, weight, conv_bias) / divisor, pool)
    averages = y.mean(dim=(2, 3, 4), keepdim=True)
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, SCHEMA, conv_max_mean, original

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
        conv = self._modules["conv"]
        names = "IN_CHANNELS", "OUT_CHANNELS", "KERNEL_D", "KERNEL_H", "KERNEL_W", "POOL_D", "POOL_H", "POOL_W"
        values = conv.in_channels, conv.out_channels, *conv.kernel_size, *self.pool_size
        return build(*self.sources, **dict(zip(names, values, strict=True)))

    def operands(self, x):
        conv = self._modules["conv"]  # self.conv takes nn.Module half a microsecond
        bias = self.bias if self.sums_channels else self.bias.new_empty(0)
        return x, conv.weight, conv.bias, bias, self.divisor, self.pool_size

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
