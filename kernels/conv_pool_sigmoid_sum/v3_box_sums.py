"""conv_pool_sigmoid_sum, v3: pooling moved in front of the weights, a sixteenth of the arithmetic.

Why it is faster
    v2 is compute bound: per window it computes 16 convolution values, only to average them. Both steps are linear, so they
    commute: here a weight multiplies a box sum, the sum of the window's 16 pixels, shifted by the weight's r, s. 170 GFLOP
    become 10.6. What costs now: box sums pass through shared memory between two barriers, and each block loads the weights
    again. H200: predicted 0.45 ms, measured 0.65 (v2 4.2, eager 11.2).

Mathematics
    pooled[b,o,i,j]  = bias[o] + sum over c,r,s of w[o,c,r,s]/p^2 * box[b,c,r,s,i,j];   out[b] = sum of sigmoid(pooled)
    box[b,c,r,s,i,j] = sum over u,v < p of x[b,c, p*i+u+r, p*j+v+s]: over u first, once for all s; then over v
    All in fp32. sigmoid = 1 / (1 + 2^t), off by less than 2e-7; t = -log2(e) * pooled: the factor is in weights and bias.

Launches
    sum_sigmoids: a block (128 threads, 29 KB) per sample, 32 x 4 windows and 64 outputs. add_blocks: a block per sample.

Floor
    10.6 GFLOP are 0.21 ms at the 51 TFLOP/s of fp32 that an H200 reaches; 604 MB in, 0.14 (16-bit: half). Compute bound.

Takes
    float32, fp16 or bf16 CUDA tensors, any sizes that PyTorch takes; others raise. Sums are fp32, as is the output under
    autocast. PyTorch computes the gradient. Deterministic. MIT; copy it.
"""

import copy
import ctypes
import functools
import threading

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.cpp_extension import load_inline

NAME = "conv_pool_sigmoid_sum_v3_box_sums"
DEVICE = "cpu" if hasattr(load_inline, "emulates_cuda") else "cuda"  # the playground's emulator runs on the CPU
EXAMPLE = (8, 64, 3, 4), (128, 8, 384, 384), (3, 8, 45, 64), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs ELEMENT, IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, POOL_H, POOL_W: loops with known ends are unrolled.
#define PASTE(a, b) a##b
#define IS(type) PASTE(IS_, type)
#define IS_float 1
#if !IS(ELEMENT)  // the headers of 16-bit types take half a second to compile
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif
#include <cuda_runtime.h>
#include <cstdint>

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")
#define DEVICE __device__ __forceinline__

using Element = ELEMENT;  // of x and the parameters: float, __half or __nv_bfloat16
// Explicit: PyTorch builds without the conversions of 16-bit types.
DEVICE float to_float(float x) { return x; }
DEVICE void store(float* to, float x) { *to = x; }
#if !IS(ELEMENT)
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
DEVICE void store(__half* to, float x) { *to = __float2half_rn(x); }
DEVICE void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
#endif

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
            UNROLL for (int u = 0; u < SLICE_R + POOL_H - 1; ++u)
                pixel[u] = inside ? to_float(column[(int64_t)u * image.width]) : 0.0f;
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
                for (int v = 0; v < POOL_W; ++v) sum_of_row += to_float(row[v]);
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
        UNROLL for (int m = 0; m < WINDOWS; ++m)
            exponent[m][n] = out < OUT_CHANNELS ? MINUS_LOG2_E * to_float(bias[out]) : 0.0f;
    }
    UNROLL_1 for (int i = 0; i < SLICES; ++i) {
        const Slice slice = {i};
        box_sums(image, sample, tile, slice, boxes);
        for (int k = threadIdx.x; k < TERMS * OUTS * COLUMN_LANES; k += THREADS) {
            const int term = k % TERMS, out = k / TERMS;
            const bool exists = out < OUT_BLOCK && first_out + out < OUT_CHANNELS;
            const int64_t source = (int64_t)(first_out + out) * ALL_TERMS + slice.term(term);
            weights[term][out] = exists ? MINUS_LOG2_E * WINDOW_SCALE * to_float(weight[source]) : 0.0f;
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

// out[sample] = the sum of its blocks' sums, a float or of x's type.
__global__ void __launch_bounds__(THREADS) add_blocks(const float* __restrict__ partial_sums, void* __restrict__ out,
                                                      bool as_floats, int64_t blocks_a_sample) {
    float sum = 0.0f;
    for (int64_t k = threadIdx.x; k < blocks_a_sample; k += THREADS) sum += partial_sums[blockIdx.x * blocks_a_sample + k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        if (as_floats) static_cast<float*>(out)[blockIdx.x] = sum;
        else store(static_cast<Element*>(out) + blockIdx.x, sum);
    }
}

extern "C" int64_t count_blocks(int64_t batch, int64_t height, int64_t width) {
    return batch * Image{nullptr, static_cast<int>(height), static_cast<int>(width)}.tiles() * OUT_GROUPS;
}

// scratch: a float a block
extern "C" int launch_sum_sigmoids(const Element* x, const Element* weight, const Element* bias, float* scratch, void* out,
                                   int64_t floats_out, int64_t batch, int64_t height, int64_t width, cudaStream_t stream) {
    const Image image = {x, static_cast<int>(height), static_cast<int>(width)};
    const int64_t blocks = image.tiles() * OUT_GROUPS;  // of a sample
    sum_sigmoids<<<batch * blocks, THREADS, 0, stream>>>(image, weight, bias, scratch);
    add_blocks<<<batch, THREADS, 0, stream>>>(scratch, out, floats_out, blocks);
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
SCHEMA = "(Tensor x, Tensor weight, Tensor bias, int[2] pool, ScalarType? dtype=None) -> Tensor"

ELEMENTS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}  # what C++ calls them


@torch.library.custom_op(f"{NAME}::forward", mutates_args=(), device_types=DEVICE, schema=SCHEMA)
def conv_pool_sum(x, weight, bias, pool, dtype=None, kernels=kernels):
    """Return (batch,) of x (batch, in_channels, height, width), of x's type or float32, `dtype`.

    Raises RuntimeError for what the kernel does not take.
    """
    batch, *_, height, width = x.shape
    (out_channels, in_channels, kernel_h, kernel_w), (pool_h, pool_w) = weight.shape, pool
    if x.dtype not in ELEMENTS or dtype not in (None, x.dtype, torch.float32):
        raise RuntimeError(f"expected x as float32, float16 or bfloat16, out as x or float32; got {x.dtype}, {dtype}")
    check("x", x, (batch, in_channels, height, width), x.device, x.dtype)
    check("weight", weight, weight.shape, x.device, x.dtype)
    check("bias", bias, (out_channels,), x.device, x.dtype)
    if min(pool) < 1 or height < kernel_h + pool_h - 1 or width < kernel_w + pool_w - 1:
        fits = f"room for a window of {[*pool]} behind a kernel of {[kernel_h, kernel_w]}"
        raise RuntimeError(f"expected {fits}; got an image of {height} x {width}")
    channels, pools = {"IN_CHANNELS": in_channels, "OUT_CHANNELS": out_channels}, {"POOL_H": pool_h, "POOL_W": pool_w}
    library = kernels(**channels, KERNEL_H=kernel_h, KERNEL_W=kernel_w, **pools, ELEMENT=ELEMENTS[x.dtype])
    library.count_blocks.restype = ctypes.c_int64
    blocks = library.count_blocks(*map(ctypes.c_int64, (batch, height, width)))
    if blocks >= 2**31:
        raise RuntimeError(f"expected a batch of fewer than 2^31 blocks; got one of {blocks}")
    x, weight, bias, out = x.contiguous(), weight.contiguous(), bias.contiguous(), x.new_empty(batch, dtype=dtype)
    if batch:
        scratch, is_float = x.new_empty(blocks, dtype=torch.float32), int(out.dtype == torch.float32)
        launch(library.launch_sum_sigmoids, x, weight, bias, scratch, out, is_float, batch, height, width)
    return out


@conv_pool_sum.register_fake
def original(x, weight, bias, pool, dtype=None):
    pooled = nn.functional.avg_pool2d(nn.functional.conv2d(x, weight, bias), pool)
    return torch.sigmoid(pooled).sum(dim=(1, 2, 3), dtype=dtype)


def backward(ctx, grad, original=original):
    """PyTorch's gradient: it computes the original again, with the 4.8 GB that the forward pass avoids."""
    return *torch.func.vjp(lambda *tensors: original(*tensors, *ctx.others), *ctx.saved_tensors)[1](grad), None, None


def setup_context(ctx, inputs, output):
    *tensors, pool, dtype = inputs
    ctx.others = pool, dtype
    ctx.save_for_backward(*tensors)


conv_pool_sum.register_autograd(backward, setup_context=setup_context)
if torch.__version__ >= "2.7":
    conv_pool_sum.register_autocast(DEVICE, torch.float32)


class ModelNew(nn.Module):
    out_dtype = None  # torch.float32: the sum is not rounded to x's type

    @staticmethod
    def operator(*operands):
        if torch.is_autocast_enabled(DEVICE) and operands[0].dtype in (torch.float16, torch.bfloat16):
            *tensors, pool, _ = operands
            tensors = [each.to(torch.get_autocast_dtype(DEVICE)) for each in tensors]
            with torch.autocast(DEVICE, enabled=False):
                return ModelNew.operator(*tensors, pool, torch.float32 if DEVICE == "cuda" else None)  # as its sums there
        return torch.ops.conv_pool_sigmoid_sum_v3_box_sums.forward(*operands)

    def __init__(self, in_channels, out_channels, kernel_size, pool_kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = (pool_kernel_size,) * 2 if isinstance(pool_kernel_size, int) else pool_kernel_size

    def forward(self, x):
        return self.operator(x, self.conv.weight, self.conv.bias, self.pool, self.out_dtype)


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
