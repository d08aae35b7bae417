"""alexnet_conv1, v3: implicit GEMM, the same product without the matrix, in register tiles; plain fp32 as fast as it goes.

Like v2, but the columns are never written: a block keeps the rows of the image that its positions need in shared memory, and a
thread finds its windows there. Strict fp32 is this variant's only precision.

Why it is faster
    v2 moves 2.25 GB for the matrix beside 0.45 that are needed. Here a thread has 7 neighbouring positions in 12 channels. A
    row of the kernel touches 35 neighbouring pixels for all 7 windows: loaded into registers once, they serve 11 taps, so 42
    loads of 16 bytes feed 924 multiply-adds. While a slice of the taps, four rows of the kernel, is multiplied, cp.async
    fetches the next (double buffering). The cost: a packed copy of the weights. Predicted 1.25 ms on an H200, measured 1.57.

Mathematics
    That of v1, in fp32, as one chain of fused multiply-adds for each output: over c, and in it u, and v; the bias last.

Launches
    pack_weights  (weights / 256)                             256 threads  14 registers   0        one weight
    conv2d        (samples x tiles of 2 x 56 x groups of 96)  128 threads  160 registers  47.5 KB  7 positions x 12 channels
    At the original's size; registers by nvcc 13.0 for sm_90a: an occupancy of 12 warps an SM leaves a thread 168.

Floor
    154 MB in, 297 MB out, 0.106 ms on an H200; 54 GFLOP are 0.91 ms in plain fp32 at 1.755 GHz: compute bound.

Takes
    What v1 takes, channels below 2^31 pixels with their padding, compute capability 7.5 or later (before 8.0 without cp.async).
    Kernels whose width is a large prime, and images narrower than a tile, are slow. The gradient is PyTorch's. Deterministic.
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

NAME = "alexnet_conv1_v3_tiled"
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W: loops with known ends are unrolled.
#include <cuda_runtime.h>
#include <cstdint>

#define UNROLL _Pragma("unroll")
#define UNROLL_1 _Pragma("unroll 1")

using Element = float;  // of all tensors

constexpr int WARP = 32;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// The largest equal parts of n, none larger than `limit`; the last may be smaller.
constexpr int even_part(int n, int limit) { return ceil_div(n, ceil_div(n, limit)); }

// The sizes of one call. `plane` is below 2^31, as is an image with its padding.
struct Image {
    int height, width, pad_h, pad_w, out_h, out_w;
    Image(int height, int width, int pad_h, int pad_w)
        : height(height), width(width), pad_h(pad_h), pad_w(pad_w), out_h((height + 2 * pad_h - KERNEL_H) / STRIDE_H + 1),
          out_w((width + 2 * pad_w - KERNEL_W) / STRIDE_W + 1) {}
    __host__ __device__ int64_t plane() const { return (int64_t)out_h * out_w; }
};

// Copies 4 or 16 bytes to shared memory without waiting, or writes 4 bytes of zeros; then `from` is not read.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // there is no cp.async: a copy is a load, which waits, and a store
__device__ __forceinline__ void cp_async_4(float* to, const Element* from, bool exists) { *to = exists ? *from : 0; }
__device__ __forceinline__ void cp_async_16(float* to, const Element* from) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void cp_async_wait_all() {}
#else
__device__ __forceinline__ void cp_async_4(float* to, const Element* from, bool exists) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(exists ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_16(float* to, const Element* from) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// Waits for all copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

// Shared memory holds two stages: one is computed with while the other is filled.
constexpr int STAGE_FLOATS = 6144;

// Output channels in groups of equal size, at most 96.
constexpr int OUT_GROUPS = ceil_div(OUT_CHANNELS, 96), OUT_BLOCK = round_up(ceil_div(OUT_CHANNELS, OUT_GROUPS), 8);

// What `positions` neighbouring positions read of one row of the image in `taps` columns of the kernel, as it lies in shared
// memory: position p's column v at p * row_step + v. Where the stride leaves columns out, they are not copied.
constexpr int row_step(int taps) { return smaller(STRIDE_W, taps); }
constexpr int row_width(int positions, int taps) { return (positions - 1) * row_step(taps) + taps; }

// A warp copies such a row, beginning with column `left` of a row of the image. Columns outside it are zero: all, if its width
// is 0.
template <int WIDTH, int STEP>
__device__ __forceinline__ void copy_row(float* to, const Element* row, int left, int width) {
    const int lane = threadIdx.x % WARP;
    UNROLL for (int first = 0; first < WIDTH; first += WARP) {
        const int s = first + lane, w = left + s / STEP * STRIDE_W + s % STEP;
        if (first + WARP <= WIDTH || s < WIDTH) cp_async_4(to + s, row + w, (unsigned)w < (unsigned)width);
    }
}

// A thread has 7 positions beside each other in 12 channels (8 where that divides the group better), 8 threads have a row of a
// tile: 56 positions, for rows of 55. Seven, because adjacent threads then read 28 floats apart at stride 4: 16-byte loads
// of 8 threads are conflict-free.
constexpr int CHANNELS = OUT_BLOCK % 12 == 0 ? 12 : 8, CHANNEL_LANES = OUT_BLOCK / CHANNELS;
constexpr int POSITIONS = 7, COLUMN_LANES = 8, TILE_COLUMNS = POSITIONS * COLUMN_LANES;

// What is in shared memory at a time is a slice of the taps: SLICE_C input channels x SLICE_U rows x SLICE_V columns of the
// kernel. Columns divide evenly, because they are unrolled; what they need of an image's row has to fit in registers.
constexpr int slice_v() {
    int taps = smaller(KERNEL_W, 16);
    while (KERNEL_W % taps || row_width(POSITIONS, taps) > 40) --taps;
    return taps;
}
constexpr int SLICE_V = slice_v(), VALUES = row_width(POSITIONS, SLICE_V);
constexpr int STEP_W = row_step(SLICE_V), WIDTH = row_width(TILE_COLUMNS, SLICE_V), PITCH = round_up(WIDTH, 4);

constexpr int rows_read(int rows, int taps) { return (rows - 1) * smaller(STRIDE_H, taps) + taps; }
constexpr int floats_of_slice(int rows, int c, int u) { return c * (rows_read(rows, u) * PITCH + u * SLICE_V * OUT_BLOCK); }

constexpr int tile_rows() {  // as many as make 128 threads, if four rows of the kernel fit beside them
    int rows = ceil_div(16, CHANNEL_LANES);
    while (rows > 1 && floats_of_slice(rows, 1, smaller(KERNEL_H, 4)) > STAGE_FLOATS) --rows;
    return rows;
}
constexpr int TILE_ROWS = tile_rows();
constexpr int slice_u() {
    int taps = KERNEL_H;
    while (taps > 1 && floats_of_slice(TILE_ROWS, 1, taps) > STAGE_FLOATS) --taps;
    return even_part(KERNEL_H, taps);
}
constexpr int SLICE_U = slice_u(), STEP_H = smaller(STRIDE_H, SLICE_U), ROWS = rows_read(TILE_ROWS, SLICE_U);
constexpr int fitting_channels = STAGE_FLOATS / floats_of_slice(TILE_ROWS, 1, SLICE_U);
constexpr int SLICE_C = SLICE_U == KERNEL_H ? even_part(IN_CHANNELS, smaller(IN_CHANNELS, fitting_channels)) : 1;
constexpr int SLICES_C = ceil_div(IN_CHANNELS, SLICE_C), SLICES_U = ceil_div(KERNEL_H, SLICE_U);
constexpr int SLICES_V = KERNEL_W / SLICE_V, SLICES = SLICES_C * SLICES_U * SLICES_V;

struct Slice {  // its first tap
    int c, u, v;
    __device__ explicit Slice(int slice)
        : c(slice / SLICES_V / SLICES_U * SLICE_C), u(slice / SLICES_V % SLICES_U * SLICE_U), v(slice % SLICES_V * SLICE_V) {}
};

// Whole warps copy; threads without positions in the tile do nothing else.
constexpr int COMPUTING = TILE_ROWS * CHANNEL_LANES * COLUMN_LANES, THREADS = round_up(COMPUTING, WARP);
constexpr int SLICE_WEIGHTS = SLICE_C * SLICE_U * SLICE_V * OUT_BLOCK;
constexpr int64_t PACKED = (int64_t)OUT_GROUPS * SLICES * SLICE_WEIGHTS;

struct alignas(16) Stage {
    float inputs[SLICE_C][ROWS][PITCH];
    float weights[SLICE_C][SLICE_U][SLICE_V][OUT_BLOCK];
};
static_assert(sizeof(Stage) <= STAGE_FLOATS * sizeof(float));

// weight (OUT_CHANNELS, IN_CHANNELS, KERNEL_H, KERNEL_W) -> packed (OUT_GROUPS, SLICES, a Stage's weights), in the order in
// which a block reads them. Zeros stand for what does not exist.
constexpr int PACK_THREADS = 256;

__global__ void __launch_bounds__(PACK_THREADS) pack_weights(const Element* __restrict__ weight, Element* __restrict__ packed) {
    const int64_t index = (int64_t)blockIdx.x * PACK_THREADS + threadIdx.x;
    if (index >= PACKED) return;
    const int k = index % SLICE_WEIGHTS;
    const Slice slice(index / SLICE_WEIGHTS % SLICES);
    const int64_t group = index / SLICE_WEIGHTS / SLICES;
    const int in_group = k % OUT_BLOCK, v = slice.v + k / OUT_BLOCK % SLICE_V;
    const int u = slice.u + k / OUT_BLOCK / SLICE_V % SLICE_U, c = slice.c + k / OUT_BLOCK / SLICE_V / SLICE_U;
    const int64_t o = group * OUT_BLOCK + in_group;
    const bool exists = o < OUT_CHANNELS && c < IN_CHANNELS && u < KERNEL_H;
    packed[index] = exists ? weight[((o * IN_CHANNELS + c) * KERNEL_H + u) * KERNEL_W + v] : 0.0f;
}

// TILE_ROWS x TILE_COLUMNS positions of a sample, in a group of output channels.
struct Tile {
    int64_t sample;
    int group, row, column;  // first position
    __host__ __device__ static int64_t down(const Image& image) { return ceil_div(image.out_h, TILE_ROWS); }
    __host__ __device__ static int64_t across(const Image& image) { return ceil_div(image.out_w, TILE_COLUMNS); }
    __device__ Tile(const Image& image, int64_t index) {
        group = index % OUT_GROUPS;
        column = index / OUT_GROUPS % across(image) * TILE_COLUMNS;
        row = index / OUT_GROUPS / across(image) % down(image) * TILE_ROWS;
        sample = index / OUT_GROUPS / across(image) / down(image);
    }
};

// Asks for a slice of the weights, and for what the tile's positions read of the image under it.
__device__ __forceinline__ void fill(Stage& stage, const Image& image, const Tile& tile, const Element* __restrict__ x,
                                     const Element* __restrict__ packed, int slice_index) {
    const Slice slice(slice_index);
    const int left = tile.column * STRIDE_W - image.pad_w + slice.v;
    UNROLL_1 for (int k = threadIdx.x / WARP; k < SLICE_C * ROWS; k += THREADS / WARP) {
        const int c = slice.c + k / ROWS, r = k % ROWS;
        const int h = tile.row * STRIDE_H - image.pad_h + slice.u + r / STEP_H * STRIDE_H + r % STEP_H;
        const bool exists = c < IN_CHANNELS && h >= 0 && h < image.height;
        const Element* row = x + ((tile.sample * IN_CHANNELS + c) * image.height + h) * image.width;
        copy_row<WIDTH, STEP_W>(stage.inputs[k / ROWS][r], row, left, exists ? image.width : 0);
    }
    float* weights = &stage.weights[0][0][0][0];
    const Element* from = packed + ((int64_t)tile.group * SLICES + slice_index) * SLICE_WEIGHTS;
#pragma unroll 4
    for (int k = 4 * threadIdx.x; k < SLICE_WEIGHTS; k += 4 * THREADS) cp_async_16(weights + k, from + k);
}

// On the way out a tile passes through shared memory, so that stores are coalesced. The odd pitch avoids bank conflicts.
union Shared {
    Stage stages[2];
    float outputs[OUT_BLOCK][TILE_ROWS * TILE_COLUMNS + 1];
};
static_assert(sizeof(Shared) <= 48 * 1024);

// One output tile. Occupancy: 12 warps an SM, 168 registers a thread.
__global__ void __launch_bounds__(THREADS, 384 / THREADS)
    conv2d(Image image, const Element* __restrict__ x, const Element* __restrict__ packed, const Element* __restrict__ bias,
           Element* __restrict__ out) {
    __shared__ Shared shared;
    const Tile tile(image, blockIdx.x);
    const int column_lane = threadIdx.x % COLUMN_LANES, channel_lane = threadIdx.x / COLUMN_LANES % CHANNEL_LANES;
    const int row_lane = threadIdx.x / COLUMN_LANES / CHANNEL_LANES;
    const bool computes = COMPUTING == THREADS || threadIdx.x < COMPUTING;

    float sums[CHANNELS][POSITIONS] = {};
    fill(shared.stages[0], image, tile, x, packed, 0);
    UNROLL_1 for (int index = 0; index < SLICES; ++index) {
        cp_async_wait_all();
        __syncthreads();  // everybody's copies have arrived, and the other stage has been read
        if (index + 1 < SLICES) fill(shared.stages[(index + 1) % 2], image, tile, x, packed, index + 1);
        if (!computes) continue;
        const Stage& stage = shared.stages[index % 2];
        const Slice slice(index);
        UNROLL_1 for (int c = 0; c < SLICE_C && slice.c + c < IN_CHANNELS; ++c)
        UNROLL_1 for (int u = 0; u < SLICE_U && slice.u + u < KERNEL_H; ++u) {
            float values[VALUES];
            UNROLL for (int k = 0; k < VALUES; ++k)
                values[k] = stage.inputs[c][row_lane * STEP_H + u][column_lane * (POSITIONS * STEP_W) + k];
            UNROLL for (int v = 0; v < SLICE_V; ++v) {
                float weights[CHANNELS];
                UNROLL for (int o = 0; o < CHANNELS; ++o) weights[o] = stage.weights[c][u][v][channel_lane * CHANNELS + o];
                UNROLL for (int o = 0; o < CHANNELS; ++o)
                    UNROLL for (int p = 0; p < POSITIONS; ++p) sums[o][p] += weights[o] * values[p * STEP_W + v];
            }
        }
    }

    __syncthreads();  // the last stage has been read
    const int first_out = tile.group * OUT_BLOCK;
    if (computes)
        UNROLL for (int o = 0; o < CHANNELS; ++o) {
            const int in_group = channel_lane * CHANNELS + o;
            const float add = bias && first_out + in_group < OUT_CHANNELS ? bias[first_out + in_group] : 0.0f;
            UNROLL for (int p = 0; p < POSITIONS; ++p)
                shared.outputs[in_group][row_lane * TILE_COLUMNS + column_lane * POSITIONS + p] = sums[o][p] + add;
        }
    __syncthreads();
    const int outs = smaller(OUT_BLOCK, OUT_CHANNELS - first_out), columns = smaller(TILE_COLUMNS, image.out_w - tile.column);
    const int rows = smaller(TILE_ROWS, image.out_h - tile.row);
    Element* first = out + (tile.sample * OUT_CHANNELS + first_out) * image.plane() + (int64_t)tile.row * image.out_w +
                   tile.column;
#pragma unroll 2
    for (int k = threadIdx.x / WARP; k < OUT_BLOCK * TILE_ROWS; k += THREADS / WARP) {
        const int o = k / TILE_ROWS, row = k % TILE_ROWS;
        Element* to = first + o * image.plane() + (int64_t)row * image.out_w;
        UNROLL for (int column = threadIdx.x % WARP; column < TILE_COLUMNS; column += WARP)
            if (o < outs && row < rows && column < columns) to[column] = shared.outputs[o][row * TILE_COLUMNS + column];
    }
}

extern "C" int64_t count_scratch() { return PACKED; }
extern "C" int64_t count_blocks(int64_t batch, int64_t height, int64_t width, int64_t pad_h, int64_t pad_w) {
    const Image image(height, width, pad_h, pad_w);
    return batch * Tile::down(image) * Tile::across(image) * OUT_GROUPS;
}

// scratch: count_scratch() elements, for the packed weights
extern "C" int launch_conv2d(const Element* x, const Element* weight, const Element* bias, Element* scratch, Element* out,
                             int64_t batch, int64_t height, int64_t width, int64_t pad_h, int64_t pad_w, cudaStream_t stream) {
    const int64_t blocks = count_blocks(batch, height, width, pad_h, pad_w);
    pack_weights<<<(PACKED + PACK_THREADS - 1) / PACK_THREADS, PACK_THREADS, 0, stream>>>(weight, scratch);
    conv2d<<<blocks, THREADS, 0, stream>>>(Image(height, width, pad_h, pad_w), x, scratch, bias, out);
    return cudaGetLastError();
}
"""


def output_of(kernels, x, weight, bias, stride, padding):
    """Return a tensor for the output. Raises RuntimeError for arguments that do not fit together, or not this build."""
    check(kernels, "x", x, x, (*x.shape[:1], kernels.IN_CHANNELS, *x.shape[-2:]))
    check(kernels, "weight", weight, x, (kernels.OUT_CHANNELS, kernels.IN_CHANNELS, kernels.KERNEL_H, kernels.KERNEL_W))
    if bias is not None:
        check(kernels, "bias", bias, x, (kernels.OUT_CHANNELS,))
    image, kernel, built = x.shape[2:], weight.shape[2:], [kernels.STRIDE_H, kernels.STRIDE_W]
    room = [size + 2 * pad - taps for size, pad, taps in zip(image, padding, kernel, strict=False)]
    if [*stride] != built or len(padding) != 2 or min(*padding, *room) < 0:
        got = f"{[*image]} padded by {padding}, strides {stride}"
        raise RuntimeError(f"{NAME}: built for kernels of {[*kernel]} at strides {built}, which do not fit {got}")
    if (image[0] + 2 * padding[0]) * (image[1] + 2 * padding[1]) >= 2**31:
        raise RuntimeError(f"{NAME}: expected less than 2^31 pixels a channel, got {[*image]} padded by {padding}")
    return x.new_empty(x.shape[0], weight.shape[0], *[size // step + 1 for size, step in zip(room, stride, strict=True)])


def conv2d(kernels, x, weight, bias, stride, padding):
    out = output_of(kernels, x, weight, bias, stride, padding)
    if out.numel():
        x, weight, bias = x.contiguous(), weight.contiguous(), bias if bias is None else bias.contiguous()
        sizes = x.shape[0], *x.shape[2:], *padding
        if kernels.count_blocks(*sizes) >= 2**31:
            raise RuntimeError(f"{NAME}: a tensor of shape {list(x.shape)} needs more blocks than a grid has")
        scratch = x.new_empty(kernels.count_scratch())
        launch(kernels.launch_conv2d, x, weight, bias, scratch, out, *sizes)
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
        (kernel_h, kernel_w), (stride_h, stride_w) = self.conv1.kernel_size, self.conv1.stride
        channels = {"IN_CHANNELS": self.conv1.in_channels, "OUT_CHANNELS": self.conv1.out_channels}
        kernel = {"KERNEL_H": kernel_h, "KERNEL_W": kernel_w, "STRIDE_H": stride_h, "STRIDE_W": stride_w}
        return build(*self.sources, **channels, **kernel)

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
