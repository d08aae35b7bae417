"""alexnet_conv1, cpu: direct convolution with a register tile of output positions by output channels.

Like the original, but the whole convolution is one pass of C++ over the output's rows. There is no unfolded copy of the
input: a thread pads the input rows under a few output rows and reads every window from there.

Why it is fast
    A core multiplies at its full rate only when each value loaded into a register serves many multiplications. Here an
    accumulator is a vector of output channels at one position, and 14 positions by 2 vectors stay in registers during the
    whole sum (AVX-512): 2 loads of weights and 14 broadcasts of inputs feed 28 fused multiply-adds, and the loads hide
    behind them. The weights are packed so that they are read in order, 46 KB at a time, from the second-level cache; the
    padded rows need no test in the loop. What it costs: the copy into the padded rows, and a transposed store of each
    finished tile, because the layout wants positions innermost. Measured on two AVX-512 cores at batch 16, medians of 40
    interleaved calls that reuse mapped memory: 17.6 ms, PyTorch (oneDNN) 17.1 ms. The transposed store makes the difference.

Mathematics
    out[b,o,i,j] = bias[o] + sum over c,u,v of weight[o,c,u,v] * x[b, c, i*stride_h - pad_h + u, j*stride_w - pad_w + v]
    with x taken as zero outside the image. Evaluated as written: every output is one float32 sum in the order c, u, v,
    to which the bias is added last, computed by one thread, so the bits do not depend on the number of threads.

Loops (from the outermost in)
    over                    how                           what it keeps
    batch x output rows     at::parallel_for              a range of rows for each thread
    rows, by 8              serial                        band: the padded input rows under 8 output rows
    channels, by 32         serial                        panel: the weights of 32 channels, channel innermost
    rows of the band        serial                        the same panel
    positions, by 14        serial                        tile: 14 positions x 32 channels of accumulators, in registers
    c, u, v                 serial                        one row of the panel
    positions x channels    unrolled, vectors of 16       the loaded weights; AVX: vectors of 8, tile 6 x 16; else of 4, 6 x 8

Floor
    A sample at the original's size: 0.60 MB in, 1.16 MB out, 211 MFLOP; arithmetic binds. The tile rounds 55 positions up
    to 56, and channels up to a multiple of 32.

Takes
    float32 CPU tensors (batch, in_channels, height, width) of any strides, batch 0 included; any channels, kernel, stride,
    padding and image size, bias or none. Dilation, groups and padding modes other than the default raise, and so does
    anything else. Forward only: a gradient raises. Deterministic. Needs a C++ compiler with GCC's vector extensions.
"""

import functools
import hashlib
import os
import shutil
import sys

import torch
import torch.nn as nn

NAME = "alexnet_conv1_cpu_register_tile"

CPP = r"""
#include <algorithm>
#include <cstdint>
#include <vector>

// Accumulators, one row of the panel and a broadcast input must fit into the vector registers: 32 with AVX-512, else 16.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, POSITIONS = 14;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2, POSITIONS = 6;
#else
constexpr int LANES = 4, VECTORS = 2, POSITIONS = 6;
#endif
constexpr int CHANNELS = LANES * VECTORS;
constexpr int ROWS = 8;  // output rows that share a band

// A vector register; it may be loaded from any float.
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(alignof(float)), may_alias));

struct Sizes {
    int64_t batch, in_channels, height, width, out_channels, out_h, out_w, kernel_h, kernel_w, stride_h, pad_h, pad_w;

    int64_t terms() const { return in_channels * kernel_h * kernel_w; }
    int64_t band_height(int64_t rows) const { return (rows - 1) * stride_h + kernel_h; }
    // As wide as the last tile of a row reads, positions beyond out_w included.
    int64_t band_pitch() const {
        return ((out_w + POSITIONS - 1) / POSITIONS * POSITIONS - 1) * STRIDE_W + kernel_w;
    }
    int64_t panels() const { return (out_channels + CHANNELS - 1) / CHANNELS; }
    int64_t panel_size() const { return (1 + terms()) * CHANNELS; }
};

// weight (out_channels, in_channels, kernel_h, kernel_w) -> panels: the biases of CHANNELS channels, then their weights with
// the channel innermost. Channels beyond the last are zero.
void pack_panels(const Sizes& size, const float* weight, const float* bias, float* panels) {
    const int64_t terms = size.terms();
    for (int64_t panel = 0; panel < size.panels(); ++panel, panels += size.panel_size())
        for (int lane = 0; lane < CHANNELS; ++lane) {
            const int64_t o = panel * CHANNELS + lane;
            const bool inside = o < size.out_channels;
            panels[lane] = inside && bias ? bias[o] : 0.0f;
            for (int64_t k = 0; k < terms; ++k) panels[(1 + k) * CHANNELS + lane] = inside ? weight[o * terms + k] : 0.0f;
        }
}

// sample (in_channels, height, width) -> band (in_channels, height, pitch): the padded input rows from `top` on.
static void fill_band(const Sizes& size, const float* sample, int64_t top, int64_t height, float* band) {
    const int64_t pitch = size.band_pitch();
    const int64_t left = std::min(size.pad_w, pitch), copied = std::min(size.width, pitch - left);
    for (int64_t c = 0; c < size.in_channels; ++c)
        for (int64_t h = top; h < top + height; ++h, band += pitch) {
            if (h < 0 || h >= size.height) {
                std::fill_n(band, pitch, 0.0f);
                continue;
            }
            std::fill_n(band, left, 0.0f);
            std::copy_n(sample + (c * size.height + h) * size.width, copied, band + left);
            std::fill(band + left + copied, band + pitch, 0.0f);
        }
}

// tile (POSITIONS, CHANNELS) = the outputs at POSITIONS neighbouring positions; `window` is the first one's in the band.
static void compute_tile(const Sizes& size, const float* window, int64_t band_height, const float* panel, float* tile) {
    const int64_t kernel_h = size.kernel_h, kernel_w = size.kernel_w, pitch = size.band_pitch();
    const Vector* biases = (const Vector*)panel;
    Vector sums[POSITIONS][VECTORS];
#pragma GCC unroll 16
    for (int p = 0; p < POSITIONS; ++p)
#pragma GCC unroll 16
        for (int n = 0; n < VECTORS; ++n) sums[p][n] = Vector{};
    panel += CHANNELS;
    for (int64_t c = 0; c < size.in_channels; ++c, window += band_height * pitch)
        for (int64_t u = 0; u < kernel_h; ++u)
            for (int64_t v = 0; v < kernel_w; ++v, panel += CHANNELS)
#pragma GCC unroll 16
                for (int p = 0; p < POSITIONS; ++p)
#pragma GCC unroll 16
                    for (int n = 0; n < VECTORS; ++n)
                        sums[p][n] += window[u * pitch + v + p * STRIDE_W] * ((const Vector*)panel)[n];
#pragma GCC unroll 16
    for (int p = 0; p < POSITIONS; ++p)
#pragma GCC unroll 16
        for (int n = 0; n < VECTORS; ++n) ((Vector*)tile)[p * VECTORS + n] = sums[p][n] + biases[n];
}

// out (channels, positions), a row every `plane` elements = the tile transposed.
static void store_tile(const float* tile, int64_t channels, int64_t positions, int64_t plane, float* out) {
    for (int64_t channel = 0; channel < channels; ++channel)
        for (int64_t p = 0; p < positions; ++p) out[channel * plane + p] = tile[p * CHANNELS + channel];
}

// The output rows [first, last) of batch * out_h, all channels of each.
void convolve_rows(const Sizes& size, const float* x, const float* panels, float* out, int64_t first, int64_t last) {
    const int64_t pitch = size.band_pitch(), plane = size.out_h * size.out_w;
    std::vector<float> band(size.in_channels * size.band_height(ROWS) * pitch);
    float tile[POSITIONS * CHANNELS];
    for (int64_t row = first, rows; row < last; row += rows) {
        const int64_t b = row / size.out_h, i = row % size.out_h;
        rows = std::min({int64_t(ROWS), size.out_h - i, last - row});
        const float* sample = x + b * size.in_channels * size.height * size.width;
        const int64_t top = i * size.stride_h - size.pad_h, height = size.band_height(rows);
        fill_band(size, sample, top, height, band.data());
        for (int64_t o = 0; o < size.out_channels; o += CHANNELS)
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t j = 0; j < size.out_w; j += POSITIONS) {
                    compute_tile(size, band.data() + r * size.stride_h * pitch + j * STRIDE_W, height,
                                 panels + o / CHANNELS * size.panel_size(), tile);
                    store_tile(tile, std::min<int64_t>(CHANNELS, size.out_channels - o),
                               std::min<int64_t>(POSITIONS, size.out_w - j), plane,
                               out + (b * size.out_channels + o) * plane + (i + r) * size.out_w + j);
                }
    }
}
"""

BINDING = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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

static void check(const char* name, const at::Tensor& tensor, int64_t dim) {
    TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == at::kFloat && tensor.dim() == dim,
                message("conv2d: expected ", name, " to be a ", dim, "-d float32 CPU tensor, got a ", tensor.dim(), "-d ",
                        tensor.scalar_type(), " tensor on ", tensor.device()));
}

at::Tensor conv2d(const at::Tensor& x_in, const at::Tensor& weight_in, const std::optional<at::Tensor>& bias_in,
                  at::IntArrayRef stride, at::IntArrayRef padding) {
    check("x", x_in, 4);
    check("weight", weight_in, 4);
    if (bias_in) check("bias", *bias_in, 1);
    TORCH_CHECK(x_in.size(1) == weight_in.size(1),
                message("conv2d: the weight takes ", weight_in.size(1), " channels, x has ", x_in.size(1)));
    TORCH_CHECK(!bias_in || bias_in->size(0) == weight_in.size(0),
                message("conv2d: expected ", weight_in.size(0), " biases, got ", bias_in->size(0)));
    TORCH_CHECK(stride.size() == 2 && padding.size() == 2 && stride[0] > 0 && stride[1] == STRIDE_W && padding[0] >= 0 &&
                    padding[1] >= 0,
                message("conv2d: built for a stride of ", STRIDE_W, " along the width and no negative padding, got stride ",
                        stride, " and padding ", padding));
    const at::Tensor x = x_in.contiguous(), weight = weight_in.contiguous();
    const at::Tensor bias = bias_in ? bias_in->contiguous() : at::Tensor();

    Sizes size{x.size(0), x.size(1), x.size(2), x.size(3), weight.size(0)};
    size.kernel_h = weight.size(2), size.kernel_w = weight.size(3);
    size.stride_h = stride[0], size.pad_h = padding[0], size.pad_w = padding[1];
    const int64_t room_h = size.height + 2 * size.pad_h - size.kernel_h, room_w = size.width + 2 * size.pad_w - size.kernel_w;
    TORCH_CHECK(size.kernel_h > 0 && size.kernel_w > 0 && room_h >= 0 && room_w >= 0,
                message("conv2d: a kernel of ", size.kernel_h, " x ", size.kernel_w, " does not fit into an image of ",
                        size.height, " x ", size.width, " padded by ", padding));
    size.out_h = room_h / size.stride_h + 1, size.out_w = room_w / STRIDE_W + 1;

    at::Tensor out = at::empty({size.batch, size.out_channels, size.out_h, size.out_w}, x.options());
    if (out.numel() == 0) return out;
    at::Tensor panels = at::empty({size.panels(), size.panel_size()}, x.options());
    float *panel_data = panels.mutable_data_ptr<float>(), *out_data = out.mutable_data_ptr<float>();
    const float *x_data = x.const_data_ptr<float>(), *bias_data = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
    pack_panels(size, weight.const_data_ptr<float>(), bias_data, panel_data);
    // Fewer rows than this are not worth a second thread.
    const int64_t grain = 1 + (1 << 20) / (weight.numel() * size.out_w + 1);
    at::parallel_for(0, size.batch * size.out_h, grain, [&](int64_t first, int64_t last) {
        convolve_rows(size, x_data, panel_data, out_data, first, last);
    });
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


@functools.lru_cache(maxsize=None)
def build(name, binding, cuda, register, cflags=(), cuda_cflags=(), **constants):
    """Compile and load the sources, once a machine, and return the namespace of their operators in torch.ops.

    The namespace is `name` and a hash of all that the binary depends on: an edit gives a new library and new operators
    beside the old ones, so an edited notebook cell can simply be run again. `cuda` is None where there is none;
    `constants` become #defines on top of both sources. Raises what torch.utils.cpp_extension.load_inline raises when the
    compiler is missing or refuses the text.
    """
    from torch.utils import cpp_extension

    def fingerprint(code):  # of a function: all but the place where it was written
        return code.co_code, code.co_names, [fingerprint(c) if hasattr(c, "co_code") else c for c in code.co_consts]

    defines = "".join(f"#define {key} {value}\n" for key, value in sorted(constants.items()))
    devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else []
    machine = devices, os.environ.get("TORCH_CUDA_ARCH_LIST"), torch.backends.cpu.get_cpu_capability()
    versions = torch.__version__, torch.version.cuda, sys.version_info
    everything = binding, cuda, defines, fingerprint(register.__code__), cflags, cuda_cflags, machine, versions
    namespace = f"{name}_{hashlib.sha256(repr(everything).encode()).hexdigest()[:10]}"

    operators = getattr(torch.ops, namespace)
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
                no_implicit_headers=True,
            )
        except BaseException:  # an interrupted or failed build would count as done when the same text is run again
            cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(namespace, None)
            raise
        register(namespace)
        operators.registered = True
    return namespace


class ModelNew(nn.Module):
    # Bound here, so that another variant in the same notebook cannot replace them.
    sources = NAME, CPP + BINDING, None, register

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    @torch.compiler.assume_constant_result
    def namespace(self):
        # -fopenmp lets at::parallel_for use the threads of PyTorch's own OpenMP runtime; no other one is linked.
        return build(*self.sources, cflags=("-march=native", "-fopenmp"), STRIDE_W=self.conv1.stride[1])

    def forward(self, x):
        conv = self.conv1
        if conv.dilation != (1, 1) or conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"{self.sources[0]}: expected no dilation, one group and zero padding in numbers, got {conv}")
        operators = getattr(torch.ops, self.namespace())
        return operators.conv2d(x, conv.weight, conv.bias, conv.stride, conv.padding)


def main():
    import time

    torch.manual_seed(0)
    model = ModelNew()
    x = torch.randn(16, 3, 224, 224)

    def milliseconds(function):
        start = time.perf_counter()
        function(x)
        return 1e3 * (time.perf_counter() - start)

    with torch.no_grad():
        exact = model.double().conv1(x.double())
        model.float()
        error = ((model(x) - exact).abs().max() / exact.std()).item()
        times = torch.tensor([[milliseconds(model), milliseconds(model.conv1)] for _ in range(20)])  # interleaved
        mine, plain = times.median(dim=0).values.tolist()
        print(f"{NAME}: differs from float64 by {error:.1e} of the outputs' spread; {mine:.2f} ms, PyTorch {plain:.2f} ms")


if __name__ == "__main__":
    main()
