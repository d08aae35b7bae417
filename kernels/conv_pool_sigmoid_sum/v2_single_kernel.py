"""conv_pool_sigmoid_sum, v2: convolution, pooling, sigmoid and sum in one kernel.

Why it is faster
    v1 is memory bound: the convolution's 4.8 GB are written and read, the input is 0.6 GB. Here only sums leave the chip. Tiles
    of the input are copied to shared memory, and a thread computes a pooling window in 16 output channels at once, one input
    value for 16 multiply-adds. The bound is plain fp32 arithmetic; the tensor cores stay unused. Predicted 3 to 3.5 ms on an
    H200, measured 6.3 (eager 11.2): copying tiles, with its index arithmetic and barriers, is not hidden behind the
    multiply-adds, at 40% of their peak.

Mathematics
    pooled[b,o,i,j] = bias[o] + 1/p^2 * sum over u,v < p, c,r,s of w[o,c,r,s] * x[b,c, p*i+u+r, p*j+v+s]
    out[b]          = sum over o,i,j of sigmoid(pooled), strict fp32; the error of __expf is damped by s * (1 - s): below 2e-7

Launches
    conv_pool_sum: a block of 256 threads and 36 KB a sample, tile of 32 x 8 windows and group of 16 channels

Floor
    170 GFLOP in plain fp32, 2.5 ms at an H200's peak (67 TFLOP/s at 1.98 GHz); 604 MB in are 0.14 ms. Compute bound.

Takes
    float32 CUDA tensors (batch, in_channels, height, width), any sizes that the original takes, in slices that fit into shared
    memory; few, huge windows are slow. Anything else raises before a launch. The gradient is PyTorch's. Deterministic.
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

NAME = "conv_pool_sigmoid_sum_v2_single_kernel"
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

using Element = float;  // of x and the parameters

constexpr int WARP = 32, THREADS = 256, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int clamp(int n, int low, int high) { return n < low ? low : smaller(n, high); }
constexpr int largest_divisor(int n, int limit) {
    int divisor = smaller(n, limit);
    while (n % divisor) --divisor;
    return divisor;
}

// Output channels in groups of equal size, at most 16: as many accumulators as a thread has.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 16), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUT_PITCH = ceil_div(OUT_BLOCK, 4) * 4;  // of a row of weights in shared memory, for 16-byte reads

// What a block holds in shared memory at a time is a slice of the channels, of the kernel and of each window. Slices divide
// evenly, so they need no bounds. At common sizes the kernel and the window are one slice.
constexpr int WEIGHT_FLOATS = 2304, TILE_FLOATS = 9216;  // together under the 48 KB that every device has
constexpr int SLICE_S = largest_divisor(KERNEL_W, WEIGHT_FLOATS / OUT_PITCH);
constexpr int SLICE_R = largest_divisor(KERNEL_H, WEIGHT_FLOATS / (OUT_PITCH * SLICE_S));
constexpr int SLICE_V = largest_divisor(POOL_W, TILE_FLOATS / 2 / SLICE_R - SLICE_S + 1);  // half: PITCH < 2 * WIDTH
constexpr int SLICE_U = largest_divisor(POOL_H, TILE_FLOATS / 2 / (SLICE_V + SLICE_S - 1) - SLICE_R + 1);
constexpr int TALL = SLICE_U + SLICE_R - 1, WIDE = SLICE_V + SLICE_S - 1;  // what a window's thread reads of a tile

// A tile has as many columns and rows of windows as fit. Adjacent threads have adjacent windows, so they read it POOL_W columns
// apart. To avoid bank conflicts, columns are stored by their remainder modulo POOL_W: first all of 0, then of 1, and so on.
constexpr int TILE_COLUMNS = clamp(TILE_FLOATS / TALL / POOL_W - ceil_div(WIDE, POOL_W) + 1, 1, WARP);
constexpr int WIDTH = (TILE_COLUMNS - 1) * POOL_W + WIDE, RUN = ceil_div(WIDTH, POOL_W), PITCH = smaller(POOL_W, WIDTH) * RUN;
constexpr int TILE_ROWS = clamp((TILE_FLOATS / PITCH - TALL) / POOL_H + 1, 1, WARPS), HEIGHT = (TILE_ROWS - 1) * POOL_H + TALL;
constexpr int SLICE_C = largest_divisor(
    IN_CHANNELS, smaller(TILE_FLOATS / (HEIGHT * PITCH), WEIGHT_FLOATS / (OUT_PITCH * SLICE_R * SLICE_S)));

__device__ int stored_column(int column) { return column % POOL_W * RUN + column / POOL_W; }

// Unrolling is limited, so that large kernels and windows do not take minutes to compile.
constexpr int UNROLL_S = SLICE_S * SLICE_V <= 128 ? SLICE_S : 1, UNROLL_V = SLICE_S * SLICE_V <= 128 ? SLICE_V : 4;
constexpr int UNROLL_U = SLICE_S * SLICE_V * SLICE_U <= 64 ? SLICE_U : 1;

// The sum of `value` over the block, valid in thread 0. The order of additions is fixed, so the bits are too.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[WARPS];
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = value;
    __syncthreads();
    value = 0.0f;
    for (int warp = 0; warp < WARPS; ++warp) value += warp_sums[warp];
    return value;
}

// An image of x, and the windows that fit into it.
struct Image {
    int height, width, rows = (height - KERNEL_H + 1) / POOL_H, columns = (width - KERNEL_W + 1) / POOL_W;
    __host__ __device__ int64_t blocks() const {
        return (int64_t)OUT_GROUPS * ceil_div(rows, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS);
    }
};

// x (batch, IN_CHANNELS, height, width) -> out (batch,). `partial_sums` has a float a block, then a zero word a sample.
// Registers are bounded for an occupancy of three blocks an SM: while one waits for its tile, the others compute.
__global__ void __launch_bounds__(THREADS, 3)
    conv_pool_sum(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ bias,
                  float* partial_sums, float* __restrict__ out, Image image) {
    __shared__ float tile[SLICE_C][HEIGHT][PITCH];
    __shared__ alignas(16) float weights[SLICE_C][SLICE_R][SLICE_S][OUT_PITCH];
    // The block's tile and OUT_BLOCK output channels. Blocks that read the same input are neighbours, and meet in the L2 cache.
    const int sample = blockIdx.x / image.blocks(), tiles_across = ceil_div(image.columns, TILE_COLUMNS);
    const int64_t block = blockIdx.x % image.blocks(), index = block / OUT_GROUPS, plane = (int64_t)image.height * image.width;
    const int first_channel = block % OUT_GROUPS * OUT_BLOCK;
    const int tile_row = index / tiles_across * TILE_ROWS, tile_column = index % tiles_across * TILE_COLUMNS;
    // The thread's window in the tile, unless it is past the edge of the image, or beyond a small tile.
    const int y = threadIdx.x / TILE_COLUMNS, across = threadIdx.x % TILE_COLUMNS;
    const bool exists = y < TILE_ROWS && tile_row + y < image.rows && tile_column + across < image.columns;
    float total[OUT_BLOCK] = {};  // the convolution (without bias), summed over the window

    // c: input channel; r, s: row and column of the kernel; u, v: of the window. c0, r0, s0, u0, v0: where the slice begins.
    // Loops of one nest are not indented.
    UNROLL_1 for (int c0 = 0; c0 < IN_CHANNELS; c0 += SLICE_C)
    UNROLL_1 for (int r0 = 0; r0 < KERNEL_H; r0 += SLICE_R)
    UNROLL_1 for (int s0 = 0; s0 < KERNEL_W; s0 += SLICE_S)
    UNROLL_1 for (int u0 = 0; u0 < POOL_H; u0 += SLICE_U)
    UNROLL_1 for (int v0 = 0; v0 < POOL_W; v0 += SLICE_V) {
        const int top = tile_row * POOL_H + u0 + r0, left = tile_column * POOL_W + v0 + s0;
        const Element* corner = x + ((int64_t)sample * IN_CHANNELS + c0) * plane + (int64_t)top * image.width + left;
#pragma unroll 2
        for (int k = threadIdx.x; k < SLICE_C * HEIGHT * WIDTH; k += THREADS) {
            const int c = k / WIDTH / HEIGHT, h = k / WIDTH % HEIGHT, w = k % WIDTH;
            const bool inside = top + h < image.height && left + w < image.width;
            tile[c][h][stored_column(w)] = inside ? corner[c * plane + (int64_t)h * image.width + w] : 0.0f;
        }
        UNROLL_1 for (int k = threadIdx.x; k < SLICE_C * SLICE_R * SLICE_S * OUT_BLOCK; k += THREADS) {
            const int o = k % OUT_BLOCK, s = k / OUT_BLOCK % SLICE_S, r = k / OUT_BLOCK / SLICE_S % SLICE_R;
            const int c = k / OUT_BLOCK / SLICE_S / SLICE_R, channel = smaller(first_channel + o, OUT_CHANNELS - 1);
            weights[c][r][s][o] = weight[(((int64_t)channel * IN_CHANNELS + c0 + c) * KERNEL_H + r0 + r) * KERNEL_W + s0 + s];
        }
        __syncthreads();
        if (exists) {
            float sum[OUT_BLOCK] = {};
            UNROLL_1 for (int c = 0; c < SLICE_C; ++c)
            UNROLL_1 for (int r = 0; r < SLICE_R; ++r)
            _Pragma("unroll (UNROLL_S)") for (int s = 0; s < SLICE_S; ++s)
            _Pragma("unroll (UNROLL_U)") for (int u = 0; u < SLICE_U; ++u)
            _Pragma("unroll (UNROLL_V)") for (int v = 0; v < SLICE_V; ++v) {
                const float value = tile[c][y * POOL_H + u + r][stored_column(v + s) + across];
                UNROLL for (int o = 0; o < OUT_BLOCK; ++o) sum[o] += value * weights[c][r][s][o];
            }
            UNROLL for (int o = 0; o < OUT_BLOCK; ++o) total[o] += sum[o];
        }
        __syncthreads();  // the slice has been read; the next may overwrite it
    }
    float sum = 0.0f;
    UNROLL for (int o = 0; o < OUT_BLOCK; ++o)
        if (exists && first_channel + o < OUT_CHANNELS)
            sum += 1.0f / (1.0f + __expf(-(total[o] * (1.0f / (POOL_H * POOL_W)) + bias[first_channel + o])));
    sum = block_sum(sum);

    // The fence makes this block's sum visible before its arrival; the last block's fence, the others' sums to itself.
    bool last = false;
    if (threadIdx.x == 0) {
        partial_sums[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(reinterpret_cast<unsigned*>(partial_sums + gridDim.x) + sample, 1u) == image.blocks() - 1;
        __threadfence();
    }
    if (!__syncthreads_or(last)) return;
    sum = 0.0f;
    for (int64_t k = threadIdx.x; k < image.blocks(); k += THREADS) sum += partial_sums[sample * image.blocks() + k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[sample] = sum;
}

extern "C" int64_t count_blocks(int64_t batch, int64_t height, int64_t width) {
    return batch * Image{static_cast<int>(height), static_cast<int>(width)}.blocks();
}

// scratch: `partial_sums`
extern "C" int launch_conv_pool_sum(const Element* x, const Element* weight, const Element* bias, float* scratch, float* out,
                                    int64_t batch, int64_t height, int64_t width, cudaStream_t stream) {
    const Image image = {static_cast<int>(height), static_cast<int>(width)};
    const int64_t blocks = batch * image.blocks();
    cudaMemsetAsync(scratch + blocks, 0, batch * sizeof(unsigned), stream);
    conv_pool_sum<<<blocks, THREADS, 0, stream>>>(x, weight, bias, scratch, out, image);
    return cudaGetLastError();
}
"""


@functools.lru_cache(maxsize=1024)
def sizes(kernels, x, weight, bias, *pool):
    """Return batch, height, width and the floats of scratch. Raises RuntimeError for what the kernel does not take."""
    shape, kernel, window = x[0], (kernels.KERNEL_H, kernels.KERNEL_W), (kernels.POOL_H, kernels.POOL_W)
    check(kernels, "x", x, x, (*shape[:1], kernels.IN_CHANNELS, *shape[-2:]))
    check(kernels, "weight", weight, x, (kernels.OUT_CHANNELS, kernels.IN_CHANNELS, *kernel))
    check(kernels, "bias", bias, x, (kernels.OUT_CHANNELS,))
    batch, _, height, width = shape
    if pool != window or height < kernel[0] + pool[0] - 1 or width < kernel[1] + pool[1] - 1:
        raise RuntimeError(f"{NAME}: a window of {[*pool]} behind a kernel of {kernel} does not fit into {height} x {width}")
    if (blocks := kernels.count_blocks(batch, height, width)) >= 2**31:
        raise RuntimeError(f"{NAME}: the batch needs {blocks} blocks, more than a grid has")
    return batch, height, width, blocks + batch


def conv_pool_sum(kernels, x, weight, bias, pool, sizes=sizes):
    batch, height, width, floats = sizes(kernels, kind(x), kind(weight), kind(bias), *pool)
    x, weight, bias, out = x.contiguous(), weight.contiguous(), bias.contiguous(), x.new_empty(batch)
    if batch:
        launch(kernels.launch_conv_pool_sum, x, weight, bias, x.new_empty(floats), out, batch, height, width)
    return out


def original(x, weight, bias, pool):
    """The gradient is PyTorch's: it takes the tensor that the forward pass avoids, 4.8 GB. training_tensor_core has its own."""
    return torch.sigmoid(nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)).sum(dim=(1, 2, 3))


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, "forward(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor", conv_pool_sum, original

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.avg_pool = nn.AvgPool2d(pool_kernel_size)

    def namespace(self):
        conv, pool = self._modules["conv"], self._modules["avg_pool"].kernel_size
        (kernel_h, kernel_w), (pool_h, pool_w) = conv.kernel_size, (pool, pool) if isinstance(pool, int) else pool
        sizes = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, "POOL_H": pool_h, "POOL_W": pool_w}
        return build(*self.sources, IN_CHANNELS=conv.in_channels, OUT_CHANNELS=conv.out_channels, **sizes)

    def operands(self, x):
        conv, pool = self._modules["conv"], self._modules["avg_pool"]  # self.conv takes nn.Module half a microsecond
        return x, conv.weight, conv.bias, pool.kernel_size

    def forward(self, x):
        return getattr(torch.ops, self.namespace()).forward(*self.operands(x))


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
