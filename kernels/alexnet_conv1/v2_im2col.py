"""alexnet_conv1, v2: the textbook way, im2col and a matrix product.

Like v1, but the windows are first written out as the columns of a matrix. Then the convolution is a matrix product: tiles in
shared memory, a small tile of sums in each thread's registers.

Why it is faster
    v1 loads two values for each multiply-add. Here a thread has 6 channels x 8 positions of sums in registers: 14 values from
    shared memory feed 48 multiply-adds, and each value comes from memory once a block. The price: each pixel is written for
    every window that holds it, 7.3 times at stride 4. The matrix, 1.12 GB, is written and read in chunks of at most 256 MB.
    Predicted for an H200: 0.35 ms for im2col, 1.7 for the product; measured: 0.39 and 2.29 (v1 18.2, eager 2.08).

Mathematics
    columns[term][position] = x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v], zero outside the image
    out[o][position]        = bias[o] + sum over terms of weight[o][term] * columns[term][position]
    Strict fp32, one chain of multiply-adds in the order of the terms, the bias last.

Launches (for each chunk: 184,832 positions at the original's size, so 5 of them)
    im2col     (positions / 256 x c x u)  256 threads  0        one row of a window: kernel_w values
    multiply   (tiles of 96 x 128)        256 threads  14.5 KB  6 channels x 8 positions

Floor
    154 MB in, 297 MB out, 2.25 GB for the matrix: 0.63 ms at 4.26 TB/s. 54 GFLOP in plain fp32: 0.91 ms.

Takes
    What v1 takes, channels below 2^31 pixels with their padding. The gradient is PyTorch's. Deterministic.
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

NAME = "alexnet_conv1_v2_im2col"
EXAMPLE = (), (256, 3, 224, 224), (2, 3, 67, 63), 2e-2  # of ModelNew, x, x under the emulator, limit: TF32's

CUDA = r"""
// Needs IN_CHANNELS, OUT_CHANNELS, KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W: divisions by them are multiplications.
#include <cuda_runtime.h>
#include <cstdint>

#define UNROLL _Pragma("unroll")

using Element = float;  // of all tensors

constexpr int THREADS = 256;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A term is one c, u, v: input channel, row and column of the kernel.
constexpr int TERMS = IN_CHANNELS * KERNEL_H * KERNEL_W;

// Consecutive positions (b, i, j), which may begin and end in the middle of a sample, and the sizes of the images they are in.
struct Chunk {
    int count, height, width, pad_h, pad_w, out_h, out_w;
    int64_t first_sample;
    unsigned first_in_sample;  // of the first sample's positions
    __device__ unsigned plane() const { return (unsigned)out_h * out_w; }
};

// columns (TERMS, chunk.count). Adjacent threads have adjacent positions, so their stores are coalesced.
__global__ void __launch_bounds__(THREADS)
    im2col(Chunk chunk, const Element* __restrict__ x, Element* __restrict__ columns) {
    const int blocks = ceil_div(chunk.count, THREADS), k = blockIdx.x % blocks * THREADS + threadIdx.x;
    const int u = blockIdx.x / blocks % KERNEL_H, c = blockIdx.x / blocks / KERNEL_H;
    if (k >= chunk.count) return;
    const unsigned from_first = chunk.first_in_sample + k, in_sample = from_first % chunk.plane();
    const int64_t sample = chunk.first_sample + from_first / chunk.plane();
    const int h = (int)(in_sample / chunk.out_w) * STRIDE_H - chunk.pad_h + u;
    const int left = (int)(in_sample % chunk.out_w) * STRIDE_W - chunk.pad_w;
    const Element* row = x + ((sample * IN_CHANNELS + c) * chunk.height + h) * chunk.width;
    Element* column = columns + (int64_t)(c * KERNEL_H + u) * KERNEL_W * chunk.count + k;
    const bool row_exists = h >= 0 && h < chunk.height;
    UNROLL for (int v = 0; v < KERNEL_W; ++v) {
        const int w = left + v;
        column[(int64_t)v * chunk.count] = row_exists && w >= 0 && w < chunk.width ? row[w] : 0.0f;
    }
}

// A block computes a tile of TILE_M channels x TILE_N positions, its 16 x 16 threads ROWS x COLUMNS each, from DEPTH terms at a
// time. Tiles divide the channels evenly, as far as 16 threads can.
constexpr int LANES = 16, DEPTH = 16, COLUMNS = 8, TILE_N = LANES * COLUMNS;
constexpr int ROWS = ceil_div(ceil_div(OUT_CHANNELS, ceil_div(OUT_CHANNELS, 6 * LANES)), LANES), TILE_M = ROWS * LANES;
constexpr int TILES_M = ceil_div(OUT_CHANNELS, TILE_M);
static_assert(LANES * LANES == THREADS && DEPTH * LANES == THREADS);

// A thread's columns lie in two runs of 4: it reads 16 bytes at a time, and its neighbours the 16 beside them: conflict-free.
__device__ __forceinline__ int column_of_thread(int n) { return n / 4 * 4 * LANES + threadIdx.x % LANES * 4 + n % 4; }

// out = weight (OUT_CHANNELS, TERMS) * columns (TERMS, chunk.count) + bias, which may be null.
__global__ void __launch_bounds__(THREADS, 2)
    multiply(Chunk chunk, const Element* __restrict__ weight, const Element* __restrict__ columns,
             const Element* __restrict__ bias, Element* __restrict__ out) {
    // Rows are 4 longer than they need be, which avoids bank conflicts.
    __shared__ alignas(16) float left[DEPTH][TILE_M + 4];
    __shared__ alignas(16) float right[DEPTH][TILE_N + 4];
    const int m0 = blockIdx.x % TILES_M * TILE_M, n0 = blockIdx.x / TILES_M * TILE_N;
    const int first_row = threadIdx.x / LANES * ROWS;

    float sums[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < TERMS; k0 += DEPTH) {
        UNROLL for (int load = 0; load < ROWS; ++load) {
            const int index = load * THREADS + threadIdx.x, k = index % DEPTH, m = index / DEPTH;
            const bool exists = m0 + m < OUT_CHANNELS && k0 + k < TERMS;
            left[k][m] = exists ? weight[(int64_t)(m0 + m) * TERMS + k0 + k] : 0.0f;
        }
        UNROLL for (int load = 0; load < COLUMNS; ++load) {
            const int index = load * THREADS + threadIdx.x, k = index / TILE_N, n = index % TILE_N;
            const bool exists = n0 + n < chunk.count && k0 + k < TERMS;
            right[k][n] = exists ? columns[(int64_t)(k0 + k) * chunk.count + n0 + n] : 0.0f;
        }
        __syncthreads();
        UNROLL for (int k = 0; k < DEPTH; ++k) {
            float a[ROWS], b[COLUMNS];
            UNROLL for (int m = 0; m < ROWS; ++m) a[m] = left[k][first_row + m];
            UNROLL for (int n = 0; n < COLUMNS; ++n) b[n] = right[k][column_of_thread(n)];
            UNROLL for (int m = 0; m < ROWS; ++m)
                UNROLL for (int n = 0; n < COLUMNS; ++n) sums[m][n] += a[m] * b[n];
        }
        __syncthreads();  // what was read may be overwritten
    }
    UNROLL for (int n = 0; n < COLUMNS; ++n) {
        const int column = n0 + column_of_thread(n);
        if (column >= chunk.count) continue;
        const unsigned from_first = chunk.first_in_sample + column, in_sample = from_first % chunk.plane();
        const int64_t sample = chunk.first_sample + from_first / chunk.plane();
        Element* to = out + sample * OUT_CHANNELS * chunk.plane() + in_sample;
        UNROLL for (int m = 0; m < ROWS; ++m) {
            const int o = m0 + first_row + m;
            if (o < OUT_CHANNELS) to[(int64_t)o * chunk.plane()] = bias ? sums[m][n] + bias[o] : sums[m][n];
        }
    }
}

// A chunk has as many positions as 256 MB have room for, in whole tiles.
constexpr int64_t FIT = (256 << 20) / sizeof(Element) / TERMS / TILE_N * TILE_N, MOST_POSITIONS = FIT > 0 ? FIT : TILE_N;
static int64_t chunk_positions(int64_t left) { return left < MOST_POSITIONS ? left : MOST_POSITIONS; }
extern "C" int64_t count_scratch(int64_t positions) { return chunk_positions(positions) * TERMS; }

// scratch: count_scratch(positions of the batch) elements
extern "C" int launch_conv2d(const Element* x, const Element* weight, const Element* bias, Element* scratch, Element* out,
                             int64_t batch, int64_t height, int64_t width, int64_t pad_h, int64_t pad_w, int64_t out_h,
                             int64_t out_w, cudaStream_t stream) {
    const int64_t plane = out_h * out_w, positions = batch * plane;
    Chunk chunk = {0, (int)height, (int)width, (int)pad_h, (int)pad_w, (int)out_h, (int)out_w};
    for (int64_t first = 0; first < positions; first += chunk.count) {
        chunk.count = chunk_positions(positions - first);
        chunk.first_sample = first / plane, chunk.first_in_sample = first % plane;
        const int64_t rows = (int64_t)ceil_div(chunk.count, THREADS) * IN_CHANNELS * KERNEL_H;
        im2col<<<rows, THREADS, 0, stream>>>(chunk, x, scratch);
        multiply<<<TILES_M * ceil_div(chunk.count, TILE_N), THREADS, 0, stream>>>(chunk, weight, scratch, bias, out);
    }
    return cudaGetLastError();
}
"""


@functools.lru_cache(maxsize=1024)
def sizes(kernels, x, weight, bias, stride, padding):
    """Return the output's shape, floats of scratch, numbers. Raises RuntimeError for kinds of tensors that do not fit."""
    outs, built = kernels.OUT_CHANNELS, (kernels.STRIDE_H, kernels.STRIDE_W)
    check(kernels, "x", x, x, (*x[0][:1], kernels.IN_CHANNELS, *x[0][-2:]))
    check(kernels, "weight", weight, x, (outs, kernels.IN_CHANNELS, kernels.KERNEL_H, kernels.KERNEL_W))
    if bias:
        check(kernels, "bias", bias, x, (outs,))
    batch, _, *image = x[0]
    room = [size + 2 * pad - taps for size, pad, taps in zip(image, padding, weight[0][2:], strict=False)]
    if stride != built or len(padding) != 2 or min(*padding, *room) < 0:
        got = f"{image} padded by {[*padding]}, strides {[*stride]}"
        raise RuntimeError(f"{NAME}: a kernel of {[*weight[0][2:]]} at strides {[*built]} does not fit {got}")
    if (image[0] + 2 * padding[0]) * (image[1] + 2 * padding[1]) >= 2**31:
        raise RuntimeError(f"{NAME}: expected less than 2^31 pixels a channel, got {image} padded by {[*padding]}")
    shape = batch, outs, *[size // step + 1 for size, step in zip(room, stride, strict=True)]
    return shape, kernels.count_scratch(batch * shape[2] * shape[3]), (batch, *image, *padding, *shape[2:])


def conv2d(kernels, x, weight, bias, stride, padding, sizes=sizes):
    kinds = kind(x), kind(weight), None if bias is None else kind(bias)
    shape, floats, numbers = sizes(kernels, *kinds, tuple(stride), tuple(padding))
    x, weight, bias, out = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), x.new_empty(shape)
    if out.numel():
        launch(kernels.launch_conv2d, x, weight, bias, x.new_empty(floats), out, *numbers)
    return out


def original(x, weight, bias, stride, padding):
    """The gradient is PyTorch's, which computes the output again, 297 MB. training_tensor_core has its own."""
    return nn.functional.conv2d(x, weight, bias, stride, padding)


class ModelNew(nn.Module):
    # Bound here, as `sizes` is above, so that another variant in the same notebook cannot replace them.
    schema = "forward(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding) -> Tensor"
    sources = NAME, CUDA, schema, conv2d, original

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    def namespace(self):
        conv = self._modules["conv1"]
        names = "IN_CHANNELS", "OUT_CHANNELS", "KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W"
        values = conv.in_channels, conv.out_channels, *conv.kernel_size, *conv.stride
        return build(*self.sources, **dict(zip(names, values, strict=True)))

    def operands(self, x):
        conv = self._modules["conv1"]  # self.conv1 takes nn.Module half a microsecond
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        return x, conv.weight, conv.bias, conv.stride, conv.padding

    def forward(self, x):
        operands = self.operands(x)
        return getattr(torch.ops, self.namespace()).forward(*operands)


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
