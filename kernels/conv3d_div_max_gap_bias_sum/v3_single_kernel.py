"""conv3d_div_max_gap_bias_sum, v3: the convolution, too; one kernel from the input to one number a sample.

A thread computes the convolution at all positions of a pooling window and keeps their maximum in a register. Only sums leave
the chip. A sample's last block, by an atomic counter, adds its blocks' sums in fixed order.

Why it is faster
    v2 waits for 441 MB that the convolution has just written. Here only the input is read. A thread's 64 sums, 8 positions x 8
    channels, are in registers: per kernel row 16 loads of x and 6 of weights feed 192 multiply-adds. What it costs: fp32,
    where PyTorch uses tensor cores. Predicted 1.25 ms on an H200, measured 1.55 (v2 1.98, eager 2.34).

Mathematics
    out[b] = sum over o of ((1/N * sum over k of max over window k of y[b,o,.] + sign(d) * conv_bias[o]) / |d| + bias[o])
    d is the divisor, a normal float32; N the number of windows k; y the convolution with weights * sign(d), which is exact, and
    without its bias. A position's value is one chain of fused multiply-adds, so equal inputs give equal bits. A NaN makes its
    window's maximum NaN.

Launches
    kernel         grid                                              block  shared  work of a thread
    conv_max_mean  (samples x windows / 128 x groups of 8 channels)  128    7 KB    a window in 8 channels

Floor
    47.6 GFLOP in fp32, 0.93 ms at the 51 TFLOP/s that an H200 reaches: compute bound. 269 MB in are 0.06 ms.

Takes
    What the original takes, in float32, fp16 or bf16 on CUDA, a channel below 2^31 pixels. The sum has the bias's type: x's, or
    float32, as under autocast. The kernel adds one value, or one a channel, and sums over channels; for another `bias` or
    `sum_dim` it gives averages, and PyTorch adds. Anything else raises. The gradient is PyTorch's. Deterministic. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv3d_div_max_gap_bias_sum_v3_single_kernel"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), (128, 8, 16, 64, 64), (4, 8, 6, 12, 20), 2e-2  # see main; limit: TF32's

CUDA = r"""
// Needs ELEMENT, and IN_CHANNELS, OUT_CHANNELS, KERNEL_D, KERNEL_H, KERNEL_W, POOL_D, POOL_H, POOL_W: loops are unrolled.
#define DIGITS_float 24
#define DIGITS___half 11
#define DIGITS___nv_bfloat16 8
#define PASTE(a, b) a##b
#define DIGITS_OF(type) PASTE(DIGITS_, type)
#define DIGITS DIGITS_OF(ELEMENT)  // of an element's significand
#if DIGITS == 11  // headers take half a second to compile
#include <cuda_fp16.h>
#elif DIGITS == 8
#include <cuda_bf16.h>
#endif
#include <cuda_runtime.h>
#include <cmath>
#include <cstdint>

using Element = ELEMENT;  // of x and the parameters: float, __half or __nv_bfloat16

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

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ void store(float* to, float x) { *to = x; }
#if DIGITS == 11
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void store(__half* to, float x) { *to = __float2half_rn(x); }
#elif DIGITS == 8
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
#endif
// Of `bias` and `out`, which hold floats or elements.
__device__ __forceinline__ float load_at(const void* from, int64_t i, bool floats) {
    return floats ? static_cast<const float*>(from)[i] : to_float(static_cast<const Element*>(from)[i]);
}
__device__ __forceinline__ void store_at(void* to, int64_t i, bool floats, float x) {
    floats ? store(static_cast<float*>(to) + i, x) : store(static_cast<Element*>(to) + i, x);
}

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
                weights[c][r][s][t][o] = o < OUT_BLOCK && first_out + o < OUT_CHANNELS ? sign * to_float(weight[from]) : 0.0f;
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
                    values[u][v][i] = to_float(corner[((int64_t)u * volume.height + v) * volume.width + i]);
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
                              const void* bias, int biases, Division division, int64_t sample, void* out, bool floats) {
    __shared__ float warp_totals[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float total = 0.0f;
    for (int o = warp; o < OUT_CHANNELS; o += WARPS) {
        float sum = 0.0f;
        for (unsigned chunk = lane; chunk < volume.chunks(); chunk += WARP)
            sum += partial_sums[((sample * volume.chunks() + chunk) * OUT_GROUPS + o / OUT_BLOCK) * OUT_BLOCK + o % OUT_BLOCK];
        const float average = division.average(warp_sum(sum), volume.windows(), to_float(conv_bias[o]));
        if (bias) total += average + load_at(bias, biases == 1 ? 0 : o, floats);
        else if (lane == 0) store_at(out, sample * OUT_CHANNELS + o, floats, average);
    }
    if (!bias) return;
    if (lane == 0) warp_totals[warp] = total;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int other = 1; other < WARPS; ++other) total += warp_totals[other];
    store_at(out, sample, floats, total);
}

// `partial_sums` (blocks, OUT_BLOCK), `arrivals` a zero for each sample.
__global__ void __launch_bounds__(THREADS, 4)
    conv_max_mean(Volume volume, const Element* __restrict__ weight, const Element* __restrict__ conv_bias, const void* bias,
                  int biases, Division division, float* partial_sums, unsigned* arrivals, void* out, bool floats) {
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
    finish_sample(volume, partial_sums, conv_bias, bias, biases, division, sample, out, floats);
}

extern "C" int64_t count_blocks(int64_t batch, int64_t depth, int64_t height, int64_t width) {
    return batch * Volume(nullptr, batch, depth, height, width).chunks() * OUT_GROUPS;
}

// scratch: OUT_BLOCK floats a block, at most 8; arrivals: a zero for each sample. With `biases`, 1 or OUT_CHANNELS, `out` is
// (batch,), without (batch, OUT_CHANNELS). bias, out: floats or elements.
extern "C" int launch_conv_max_mean(const Element* x, const Element* weight, const Element* conv_bias, const void* bias,
                                    float* scratch, unsigned* arrivals, void* out, double divisor, int64_t biases,
                                    int64_t floats, int64_t batch, int64_t depth, int64_t height, int64_t width,
                                    cudaStream_t stream) {
    conv_max_mean<<<count_blocks(batch, depth, height, width), THREADS, 0, stream>>>(
        Volume(x, batch, depth, height, width), weight, conv_bias, biases ? bias : nullptr, biases,
        Division{static_cast<float>(divisor)}, scratch, arrivals, out, floats != 0);
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
SCHEMA = "(Tensor x, Tensor weight, Tensor conv_bias, Tensor bias, float divisor, int[3] pool) -> Tensor"
ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def count(function, *numbers):
    """Call a C function of int64_t that returns one."""
    if not function.argtypes:
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(numbers)
    return function(*numbers)


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv_max_mean(x, weight, conv_bias, bias, divisor, pool, kernels=kernels):
    """Return each sample's sum (batch, 1, 1, 1); for an empty bias the averages (batch, outputs, 1, 1, 1), of x's type.

    The bias, and so the sum, has x's type or float32.
    """
    (batch, *_, depth, height, width), (out_channels, in_channels, *kernel) = x.shape, weight.shape
    if x.dtype not in ELEMENTS:
        raise RuntimeError(f"expected x as one of {', '.join(map(str, ELEMENTS))}; got {x.dtype}")
    check("x", x, (batch, in_channels, depth, height, width), x.device, x.dtype)
    check("weight", weight, (out_channels, in_channels, *kernel[-3:]), x.device, x.dtype)
    check("conv_bias", conv_bias, (out_channels,), x.device, x.dtype)
    of_sum = torch.float32 if bias.dtype == torch.float32 else x.dtype
    check("bias", bias, bias.shape if bias.numel() in (0, 1, out_channels) else (out_channels,), x.device, of_sum)
    if min(pool) < 1 or any(size < k + p - 1 for size, k, p in zip((depth, height, width), kernel, pool, strict=True)):
        fits = f"room for a window of {[*pool]} behind a kernel of {kernel}"
        raise RuntimeError(f"expected {fits}; got a volume of {[depth, height, width]}")
    if depth * height * width >= 2**31:
        raise RuntimeError(f"expected fewer than 2^31 pixels a channel; got x of shape {[*x.shape]}")
    names = "OUT_CHANNELS", "IN_CHANNELS", "KERNEL_D", "KERNEL_H", "KERNEL_W", "POOL_D", "POOL_H", "POOL_W"
    library = kernels(**dict(zip(names, (*weight.shape, *pool), strict=True)), ELEMENT=ELEMENTS[x.dtype])
    x, weight, conv_bias, bias = x.contiguous(), weight.contiguous(), conv_bias.contiguous(), bias.contiguous()
    out = x.new_empty(batch, 1, 1, 1, dtype=of_sum) if bias.numel() else x.new_empty(batch, out_channels, 1, 1, 1)
    if batch:
        numbers = batch, depth, height, width
        blocks = count(library.count_blocks, *numbers)
        if blocks >= 2**31:
            raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got one of {blocks}")
        scratch = x.new_empty(8 * blocks, dtype=torch.float32), x.new_zeros(batch, dtype=torch.int32)
        given = x, weight, conv_bias, bias, *scratch, out
        launch(library.launch_conv_max_mean, *given, float(divisor), bias.numel(), out.dtype == torch.float32, *numbers)
    return out


@conv_max_mean.register_fake
def original(x, weight, conv_bias, bias, divisor, pool):
    y = nn.functional.max_pool3d(nn.functional.conv3d(x, weight, conv_bias) / divisor, pool)
    averages = y.mean(dim=(2, 3, 4), keepdim=True)
    return (averages + bias.view(-1, 1, 1, 1)).sum(dim=1) if bias.numel() else averages


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, which takes several times the 441 MB that the forward pass avoids."""
    found = torch.func.vjp(lambda *tensors: original(*tensors, ctx.divisor, ctx.pool), *ctx.saved_tensors)[1](grad)
    return *found, None, None


def setup_context(ctx, inputs, output):
    *tensors, ctx.divisor, ctx.pool = inputs
    ctx.save_for_backward(*tensors)


conv_max_mean.register_autograd(backward, setup_context=setup_context)


def call(x, weight, conv_bias, bias, *rest):
    """Call the operator. Autocast: 16-bit x and the weights get its type, float32 stays; the sum is float32, as PyTorch's."""
    function = torch.ops.conv3d_div_max_gap_bias_sum_v3_single_kernel.forward
    if not torch.is_autocast_enabled(DEVICE):
        return function(x, weight, conv_bias, bias, *rest)
    with torch.autocast(DEVICE, enabled=False):
        dtype = torch.get_autocast_dtype(DEVICE) if x.element_size() == 2 else x.dtype
        return function(*(each.to(dtype) for each in (x, weight, conv_bias)), bias.float(), *rest)


class ModelNew(nn.Module):
    operator = staticmethod(call)
    out_dtype = None  # torch.float32: the sum is not rounded to x's type

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

    def forward(self, x):
        bias = self.bias if self.out_dtype is None else self.bias.to(self.out_dtype)
        of_kernel = bias if self.sums_channels else self.bias.new_empty(0)
        out = self.operator(x, self.conv.weight, self.conv.bias, of_kernel, self.divisor, self.pool_size)
        return out if self.sums_channels else torch.sum(out + bias, dim=self.sum_dim)


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
