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
import os
import re
import shutil
import sys
import threading
import warnings

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
constexpr int64_t SCRATCH_BYTES = 256 << 20;  // for the matrix of a chunk

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A term is one c, u, v: input channel, row and column of the kernel.
constexpr int TERMS = IN_CHANNELS * KERNEL_H * KERNEL_W;

// Consecutive positions (b, i, j), which may begin and end in the middle of a sample, and the sizes of the images they are in.
struct Chunk {
    int count, height, width, pad_h, pad_w, out_h, out_w;
    int64_t first_sample;
    unsigned first_in_sample;  // of the first sample's positions

    Chunk(int64_t first, int count, int height, int width, int pad_h, int pad_w)
        : count(count), height(height), width(width), pad_h(pad_h), pad_w(pad_w),
          out_h((height + 2 * pad_h - KERNEL_H) / STRIDE_H + 1), out_w((width + 2 * pad_w - KERNEL_W) / STRIDE_W + 1),
          first_sample(first / plane()), first_in_sample(first % plane()) {}
    __host__ __device__ unsigned plane() const { return (unsigned)out_h * out_w; }
};

// The k-th position of a chunk.
struct Position {
    int64_t sample;
    unsigned in_sample;
    __device__ Position(const Chunk& chunk, int k) {
        const unsigned from_first = chunk.first_in_sample + k;
        sample = chunk.first_sample + from_first / chunk.plane(), in_sample = from_first % chunk.plane();
    }
    // Its index in a tensor (batch, OUT_CHANNELS, out_h, out_w).
    __device__ int64_t at(const Chunk& chunk, int o) const { return (sample * OUT_CHANNELS + o) * chunk.plane() + in_sample; }
};

// columns (TERMS, chunk.count). Adjacent threads have adjacent positions, so their stores are coalesced.
__global__ void __launch_bounds__(THREADS)
    im2col(Chunk chunk, const Element* __restrict__ x, Element* __restrict__ columns) {
    const int blocks = ceil_div(chunk.count, THREADS), k = blockIdx.x % blocks * THREADS + threadIdx.x;
    const int u = blockIdx.x / blocks % KERNEL_H, c = blockIdx.x / blocks / KERNEL_H;
    if (k >= chunk.count) return;
    const Position position(chunk, k);
    const int h = (int)(position.in_sample / chunk.out_w) * STRIDE_H - chunk.pad_h + u;
    const int left = (int)(position.in_sample % chunk.out_w) * STRIDE_W - chunk.pad_w;
    const Element* row = x + ((position.sample * IN_CHANNELS + c) * chunk.height + h) * chunk.width;
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
static_assert(LANES * LANES == THREADS);

// tile[k][m] = value(m, k). Rows of the tile are 4 longer than they need be, which avoids bank conflicts.
template <bool ALONG_K, int SIZE, class Value>
__device__ __forceinline__ void load_tile(float (&tile)[DEPTH][SIZE + 4], Value value) {
    static_assert(DEPTH * SIZE % THREADS == 0);
    UNROLL for (int load = 0; load < DEPTH * SIZE / THREADS; ++load) {
        const int index = load * THREADS + threadIdx.x;
        const int k = ALONG_K ? index % DEPTH : index / SIZE, m = ALONG_K ? index / DEPTH : index % SIZE;
        tile[k][m] = value(m, k);
    }
}

// A thread's columns lie in two runs of 4: it reads 16 bytes at a time, and its neighbours the 16 beside them: conflict-free.
__device__ __forceinline__ int column_of_thread(int n) { return n / 4 * 4 * LANES + threadIdx.x % LANES * 4 + n % 4; }

// out = weight (OUT_CHANNELS, TERMS) * columns (TERMS, chunk.count) + bias, which may be null.
__global__ void __launch_bounds__(THREADS, 2)
    multiply(Chunk chunk, const Element* __restrict__ weight, const Element* __restrict__ columns,
             const Element* __restrict__ bias, Element* __restrict__ out) {
    __shared__ alignas(16) float left[DEPTH][TILE_M + 4];
    __shared__ alignas(16) float right[DEPTH][TILE_N + 4];
    const int m0 = blockIdx.x % TILES_M * TILE_M, n0 = blockIdx.x / TILES_M * TILE_N;
    const int first_row = threadIdx.x / LANES * ROWS;

    float sums[ROWS][COLUMNS] = {};
#pragma unroll 1
    for (int k0 = 0; k0 < TERMS; k0 += DEPTH) {
        load_tile<true, TILE_M>(left, [&](int m, int k) {
            return m0 + m < OUT_CHANNELS && k0 + k < TERMS ? weight[(int64_t)(m0 + m) * TERMS + k0 + k] : 0.0f;
        });
        load_tile<false, TILE_N>(right, [&](int n, int k) {
            return n0 + n < chunk.count && k0 + k < TERMS ? columns[(int64_t)(k0 + k) * chunk.count + n0 + n] : 0.0f;
        });
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
        Element* to = out + Position(chunk, column).at(chunk, 0);
        UNROLL for (int m = 0; m < ROWS; ++m) {
            const int o = m0 + first_row + m;
            if (o < OUT_CHANNELS) to[(int64_t)o * chunk.plane()] = bias ? sums[m][n] + bias[o] : sums[m][n];
        }
    }
}

// As many positions as scratch memory has room for, in whole tiles; no more than there are.
static int chunk_positions(int64_t positions) {
    const int64_t room = SCRATCH_BYTES / sizeof(Element) / TERMS / TILE_N * TILE_N, fits = room > 0 ? room : TILE_N;
    return static_cast<int>(fits < positions ? fits : positions);
}
extern "C" int64_t count_scratch(int64_t positions) { return (int64_t)chunk_positions(positions) * TERMS; }

// scratch: count_scratch(positions of the batch) elements
extern "C" int launch_conv2d(const Element* x, const Element* weight, const Element* bias, Element* scratch, Element* out,
                             int64_t batch, int64_t height, int64_t width, int64_t pad_h, int64_t pad_w, cudaStream_t stream) {
    const int64_t positions = batch * Chunk(0, 0, height, width, pad_h, pad_w).plane(), step = chunk_positions(positions);
    for (int64_t first = 0; first < positions; first += step) {
        const int count = first + step < positions ? step : positions - first;
        const Chunk chunk(first, count, height, width, pad_h, pad_w);
        const int64_t rows = (int64_t)ceil_div(chunk.count, THREADS) * IN_CHANNELS * KERNEL_H;
        im2col<<<rows, THREADS, 0, stream>>>(chunk, x, scratch);
        multiply<<<TILES_M * ceil_div(chunk.count, TILE_N), THREADS, 0, stream>>>(chunk, weight, scratch, bias, out);
    }
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
        scratch = x.new_empty(kernels.count_scratch(out.numel() // out.shape[1]))
        launch(kernels.launch_conv2d, x, weight, bias, scratch, out, x.shape[0], *x.shape[2:], *padding)
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
