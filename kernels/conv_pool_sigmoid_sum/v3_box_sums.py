"""conv_pool_sigmoid_sum, v3: pooling moved in front of the weights, a sixteenth of the arithmetic.

Why it is faster
    v2 is compute bound: 16 convolution values for every pooled one, then their average. Both are linear, so they commute: the
    product is taken with box sums, the input pooled once for each element of the convolution's kernel. A box sum replaces 16
    pixels, so 170 GFLOP become 10.6. A sum down a column serves all columns of the kernel. Box sums pass through shared memory,
    between two barriers; each tile reads its weights again. H200: predicted 0.45 ms, measured 0.65 (v2 6.3, eager 11.2).

Mathematics
    pooled[b,o,i,j]  = bias[o] + sum over c,r,s of w[o,c,r,s]/p^2 * box[b,c,r,s,i,j];   out[b] = sum of sigmoid(pooled)
    box[b,c,r,s,i,j] = sum over u,v < p of x[b,c, p*i+u+r, p*j+v+s], summed down columns first, then along rows
    Strict fp32. The sigmoid is 1 / (1 + 2^v) with the factor -log2(e) / p^2 in the weights: it errs by less than 2e-7.

Launches
    sum_sigmoids: 128 threads and 29 KB a sample, tile of 32 x 4 windows and group of 64 channels. add_blocks: 128 a sample.

Floor
    604 MB in, 0.14 ms on an H200; 10.6 GFLOP are 0.21 ms in plain fp32: compute bound.

Takes
    float32 CUDA tensors, any sizes that the original takes. Anything else raises. The gradient is PyTorch's. Deterministic.
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

NAME = "conv_pool_sigmoid_sum_v3_box_sums"
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define DEVICE __device__ __forceinline__

using Element = float;  // of x and the parameters

constexpr int WARP = 32, THREADS = 128, WARPS = THREADS / WARP;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int largest_divisor(int n, int limit) { return limit >= n ? n : n % limit ? largest_divisor(n, limit - 1) : limit; }

// A window is a pooled position; a term is one c, r, s: input channel, row and column of the kernel. Box sums of a tile of
// windows are a matrix with a row of TILE floats for each term; its product with the weights is computed with a thread for each
// 8 windows x OUTS output channels.
constexpr int TILE = THREADS, TILE_COLUMNS = 32, TILE_ROWS = TILE / TILE_COLUMNS;  // to fill a tile, a thread has a window
constexpr int COLUMN_LANES = 8, WINDOW_LANES = THREADS / COLUMN_LANES, WINDOWS = TILE / WINDOW_LANES;

// Output channels in groups of equal size, at most 64.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 64), OUT_BLOCK = ceil_div(OUT_CHANNELS, OUT_GROUPS);
constexpr int OUTS = ceil_div(OUT_BLOCK, COLUMN_LANES);  // of a thread

// What is in shared memory at a time is a slice of the terms. Slices divide evenly, so they need no bounds. Column sums lie
// by remainder, first all columns that are 0 modulo POOL_W, then all that are 1, and so on: adjacent threads read them
// POOL_W apart, conflict-free. RUN, the columns of a remainder, is padded so that a warp's stores are conflict-free, too.
constexpr int MAX_TERMS = 27, COLUMN_SUM_FLOATS = 4096;
constexpr int SLICE_S = largest_divisor(KERNEL_W, MAX_TERMS);
constexpr int TILE_WIDTH = TILE_COLUMNS * POOL_W + SLICE_S - 1;
constexpr int LEAST_RUN = ceil_div(TILE_WIDTH, POOL_W), PADDING = (ceil_div(WARP, POOL_W) - LEAST_RUN % WARP + WARP) % WARP;
constexpr int RUN = LEAST_RUN + (POOL_W > 1 && POOL_W < WARP ? PADDING : 0), TILE_PITCH = POOL_W * RUN;
constexpr bool STAGED = TILE_ROWS * TILE_PITCH <= COLUMN_SUM_FLOATS;  // not so for large windows: see box_sums
constexpr int MAX_COLUMN_SUMS = STAGED ? COLUMN_SUM_FLOATS / (TILE_ROWS * TILE_PITCH) : MAX_TERMS;
constexpr int SLICE_R = largest_divisor(KERNEL_H, smaller(MAX_TERMS / SLICE_S, MAX_COLUMN_SUMS));
constexpr int SLICE_C = largest_divisor(IN_CHANNELS, smaller(MAX_TERMS / (SLICE_R * SLICE_S), MAX_COLUMN_SUMS / SLICE_R));
constexpr int TERMS = SLICE_C * SLICE_R * SLICE_S;
constexpr int ALL_TERMS = IN_CHANNELS * KERNEL_H * KERNEL_W, SLICES = ALL_TERMS / TERMS;

// What a block keeps in shared memory, a slice at a time; bytes for 8 channels, 64 outputs, a 3 x 3 kernel and a 4 x 4 window:
//   column_sums [c, r][row of windows][column]  15,360  filled by all threads, a column each; read by each window's thread
//   boxes       [term][window]                   9,216  filled by each window's thread; read by all, 8 windows a thread
//   weights     [term][output channel]           4,896  filled by all threads; read by all, 8 channels a thread

DEVICE int stored_column(int w) { return w % POOL_W * RUN + w / POOL_W; }

DEVICE float ex2_approx(float v) {  // relative error 2^-22.5
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(v));
    return power;
}
DEVICE float rcp_approx(float v) {  // within 1 ulp
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
    return reciprocal;
}

// Weights and bias carry the factor -log2(e), so that the product's result v is an exponent: sigmoid = 1 / (1 + 2^v).
constexpr float MINUS_LOG2_E = -1.44269504f, WINDOW_SCALE = 1.0f / (POOL_H * POOL_W);

// The sum of `value` over the block, valid in thread 0. The order of additions is fixed, so the bits are too.
__device__ float block_sum(float value) {
    __shared__ float warp_sums[WARPS];
    for (int offset = WARP / 2; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = value;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int warp = 1; warp < WARPS; ++warp) value += warp_sums[warp];
    return value;
}

// x (batch, IN_CHANNELS, height, width), and the windows that fit into it.
struct Image {
    const Element* x;
    int height, width, rows = (height - KERNEL_H + 1) / POOL_H, columns = (width - KERNEL_W + 1) / POOL_W;
    __host__ __device__ int tiles_across() const { return ceil_div(columns, TILE_COLUMNS); }
    __host__ __device__ int64_t tiles() const { return (int64_t)ceil_div(rows, TILE_ROWS) * tiles_across(); }
};

// A tile of a sample, and this thread's window of it where a thread has one.
struct Tile {
    const Image& image;
    const int64_t index;
    const int top = index / image.tiles_across() * TILE_ROWS, left = index % image.tiles_across() * TILE_COLUMNS;
    const int row = top + threadIdx.x / TILE_COLUMNS, column = left + threadIdx.x % TILE_COLUMNS;
    const bool exists = row < image.rows && column < image.columns;  // false past the edge of the image
};

// Where a slice of the terms begins.
struct Slice {
    static constexpr int ACROSS = KERNEL_W / SLICE_S, DOWN = KERNEL_H / SLICE_R;
    const int index;
    const int s = index % ACROSS * SLICE_S, r = index / ACROSS % DOWN * SLICE_R, c = index / (ACROSS * DOWN) * SLICE_C;
    __device__ int64_t term(int k) const {  // the number of its k-th term among all terms
        return ((int64_t)(c + k / (SLICE_R * SLICE_S)) * KERNEL_H + r + k / SLICE_S % SLICE_R) * KERNEL_W + s + k % SLICE_S;
    }
};

// boxes[term][window] = the sum of x over the window, shifted by the term's position in the kernel; 0 where no window exists.
// First sums down the columns, one for each pixel column and r, shared by all s; then along the rows.
// A barrier is inside; the caller needs one more before it reads the boxes.
template <int ROWS, int PITCH>
DEVICE void box_sums(const Image& image, int sample, const Tile& tile, const Slice& slice, float (&boxes)[ROWS][PITCH]) {
    const int64_t plane = (int64_t)image.height * image.width;
    const Element* corner = image.x + ((int64_t)sample * IN_CHANNELS + slice.c) * plane +
                          ((int64_t)tile.top * POOL_H + slice.r) * image.width + (int64_t)tile.left * POOL_W + slice.s;
    __shared__ float column_sums[STAGED ? SLICE_C * SLICE_R : 1][TILE_ROWS][STAGED ? TILE_PITCH : 1];
    if constexpr (STAGED) {
        const int valid_width = image.width - tile.left * POOL_W - slice.s;
        for (int k = threadIdx.x; k < SLICE_C * TILE_ROWS * TILE_WIDTH; k += THREADS) {
            const int w = k % TILE_WIDTH, row = k / TILE_WIDTH % TILE_ROWS, c = k / TILE_WIDTH / TILE_ROWS;
            const bool inside = w < valid_width && tile.top + row < image.rows;
            const Element* column = corner + c * plane + (int64_t)row * POOL_H * image.width + w;
            float pixel[SLICE_R + POOL_H - 1];
            UNROLL for (int u = 0; u < SLICE_R + POOL_H - 1; ++u) pixel[u] = inside ? column[(int64_t)u * image.width] : 0.0f;
            UNROLL for (int r = 0; r < SLICE_R; ++r) {
                float sum = pixel[r];
                UNROLL for (int u = 1; u < POOL_H; ++u) sum += pixel[r + u];
                column_sums[c * SLICE_R + r][row][stored_column(w)] = sum;
            }
        }
    }
    __syncthreads();  // column sums are complete, and the caller's last use of the boxes is over
    if constexpr (STAGED) {
        for (int k = 0; k < SLICE_C * SLICE_R; ++k) {
            const float* sums = &column_sums[k][tile.row - tile.top][tile.column - tile.left];
            float value[SLICE_S + POOL_W - 1];
            UNROLL for (int v = 0; v < SLICE_S + POOL_W - 1; ++v) value[v] = sums[stored_column(v)];
            UNROLL for (int s = 0; s < SLICE_S; ++s) {
                float sum = value[s];
                UNROLL for (int v = 1; v < POOL_W; ++v) sum += value[s + v];
                boxes[k * SLICE_S + s][threadIdx.x] = tile.exists ? sum : 0.0f;
            }
        }
    } else {
        // Column sums of large windows do not fit. Each box is then summed by itself, row by row.
        const int64_t offset = (int64_t)(tile.row - tile.top) * POOL_H * image.width + (tile.column - tile.left) * POOL_W;
        for (int k = 0; k < TERMS; ++k) {
            const int c = k / (SLICE_R * SLICE_S), r = k / SLICE_S % SLICE_R, s = k % SLICE_S;
            float sum = 0.0f;
            for (int u = 0; tile.exists && u < POOL_H; ++u) {
                const Element* row = corner + c * plane + offset + (int64_t)(r + u) * image.width + s;
                float sum_of_row = 0.0f;
                for (int v = 0; v < POOL_W; ++v) sum_of_row += row[v];
                sum += sum_of_row;
            }
            boxes[k][threadIdx.x] = sum;
        }
    }
}

// The windows and columns of a thread lie in runs of 4 where that lets it read 16 bytes at a time.
DEVICE int window_of_thread(int m) { return m / 4 * (TILE / 2) + threadIdx.x / COLUMN_LANES * 4 + m % 4; }
DEVICE int column_of_thread(int n) {
    const int lane = threadIdx.x % COLUMN_LANES;
    return OUTS % 4 == 0 ? n / 4 * 4 * COLUMN_LANES + lane * 4 + n % 4 : n * COLUMN_LANES + lane;
}
constexpr int OUT_PITCH = OUTS * COLUMN_LANES + 4;  // 4 longer than a multiple of 8: no bank conflicts

// sums[m][n] += sum over k of a[k][window m] * b[k][column n], for the windows and columns of this thread.
DEVICE void multiply(const float (&a)[TERMS][TILE], const float (&b)[TERMS][OUT_PITCH], float (&sums)[WINDOWS][OUTS]) {
#pragma unroll 6
    for (int k = 0; k < TERMS; ++k) {
        float left[WINDOWS], right[OUTS];
        UNROLL for (int m = 0; m < WINDOWS; ++m) left[m] = a[k][window_of_thread(m)];
        UNROLL for (int n = 0; n < OUTS; ++n) right[n] = b[k][column_of_thread(n)];
        UNROLL for (int m = 0; m < WINDOWS; ++m)
            UNROLL for (int n = 0; n < OUTS; ++n) sums[m][n] += left[m] * right[n];
    }
}

// One tile of windows in OUT_BLOCK output channels. Writes the sum of the block's sigmoids to partial_sums[block].
__global__ void __launch_bounds__(THREADS, 4)
    sum_sigmoids(Image image, const Element* __restrict__ weight, const Element* __restrict__ bias,
                 float* __restrict__ partial_sums) {
    __shared__ alignas(16) float boxes[TERMS][TILE];
    __shared__ alignas(16) float weights[TERMS][OUT_PITCH];
    const int first_out = blockIdx.x % OUT_GROUPS * OUT_BLOCK, sample = blockIdx.x / OUT_GROUPS / image.tiles();
    const Tile tile = {image, blockIdx.x / OUT_GROUPS % image.tiles()};

    float exponent[WINDOWS][OUTS];
    UNROLL for (int n = 0; n < OUTS; ++n) {
        const int out = first_out + column_of_thread(n);
        UNROLL for (int m = 0; m < WINDOWS; ++m) exponent[m][n] = out < OUT_CHANNELS ? MINUS_LOG2_E * bias[out] : 0.0f;
    }
    UNROLL_1 for (int i = 0; i < SLICES; ++i) {
        const Slice slice = {i};
        box_sums(image, sample, tile, slice, boxes);
        for (int k = threadIdx.x; k < TERMS * OUTS * COLUMN_LANES; k += THREADS) {
            const int term = k % TERMS, out = k / TERMS;
            const bool exists = out < OUT_BLOCK && first_out + out < OUT_CHANNELS;
            const int64_t source = (int64_t)(first_out + out) * ALL_TERMS + slice.term(term);
            weights[term][out] = exists ? MINUS_LOG2_E * WINDOW_SCALE * weight[source] : 0.0f;
        }
        __syncthreads();
        multiply(boxes, weights, exponent);
    }

    float sum = 0.0f;
    UNROLL for (int m = 0; m < WINDOWS; ++m) {
        const int row = tile.top + window_of_thread(m) / TILE_COLUMNS, column = tile.left + window_of_thread(m) % TILE_COLUMNS;
        UNROLL for (int n = 0; n < OUTS; ++n) {
            const int in_block = column_of_thread(n), out = first_out + in_block;
            if (row >= image.rows || column >= image.columns || in_block >= OUT_BLOCK || out >= OUT_CHANNELS) continue;
            sum += rcp_approx(1.0f + ex2_approx(exponent[m][n]));
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial_sums[blockIdx.x] = sum;
}

// out[sample] = the sum of its blocks' sums.
__global__ void __launch_bounds__(THREADS) add_blocks(const float* __restrict__ partial_sums, float* __restrict__ out,
                                                      int64_t blocks_a_sample) {
    float sum = 0.0f;
    for (int64_t k = threadIdx.x; k < blocks_a_sample; k += THREADS) sum += partial_sums[blockIdx.x * blocks_a_sample + k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

extern "C" int64_t count_blocks(int64_t batch, int64_t height, int64_t width) {
    return batch * Image{nullptr, static_cast<int>(height), static_cast<int>(width)}.tiles() * OUT_GROUPS;
}

// scratch: a float a block
extern "C" int launch_sum_sigmoids(const Element* x, const Element* weight, const Element* bias, float* scratch, float* out,
                                   int64_t batch, int64_t height, int64_t width, cudaStream_t stream) {
    const Image image = {x, static_cast<int>(height), static_cast<int>(width)};
    const int64_t blocks = image.tiles() * OUT_GROUPS;  // of a sample
    sum_sigmoids<<<batch * blocks, THREADS, 0, stream>>>(image, weight, bias, scratch);
    add_blocks<<<batch, THREADS, 0, stream>>>(scratch, out, blocks);
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
    return batch, height, width, blocks


def sum_sigmoids(kernels, x, weight, bias, pool, sizes=sizes):
    batch, height, width, floats = sizes(kernels, kind(x), kind(weight), kind(bias), *pool)
    x, weight, bias, out = x.contiguous(), weight.contiguous(), bias.contiguous(), x.new_empty(batch)
    if batch:
        launch(kernels.launch_sum_sigmoids, x, weight, bias, x.new_empty(floats), out, batch, height, width)
    return out


def original(x, weight, bias, pool):
    """The gradient is PyTorch's: it takes the tensor that the forward pass avoids, 4.8 GB. training_tensor_core has its own."""
    return torch.sigmoid(nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)).sum(dim=(1, 2, 3))


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    sources = NAME, CUDA, "forward(Tensor x, Tensor weight, Tensor bias, int[2] pool) -> Tensor", sum_sigmoids, original

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
