import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

template <typename scalar_t>
__global__ void swish_scale_kernel(const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> x,
                                   torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> y, scalar_t scale) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < x.size(1)) {
        const scalar_t v = x[blockIdx.y][column];
        y[blockIdx.y][column] = v / (1 + exp(-v)) * scale;
    }
}

torch::Tensor swish_scale_cuda(torch::Tensor x, double scale) {
    TORCH_CHECK(x.is_cuda(), "x must be a CUDA tensor");
    auto y = torch::empty_like(x);
    const dim3 blockDim(256);
    const dim3 gridDim((x.size(1) + blockDim.x - 1) / blockDim.x, x.size(0));
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "swish_scale_cuda", ([&] {
        swish_scale_kernel<scalar_t><<<gridDim, blockDim>>>(x.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                                            y.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
                                                            static_cast<scalar_t>(scale));
    }));
    return y * 1.0;
}
"""

cpp_source = "torch::Tensor swish_scale_cuda(torch::Tensor x, double scale);"

swish_scale = load_inline(
    name="stranger_swish_scale",
    cpp_sources=cpp_source,
    cuda_sources=source,
    functions=["swish_scale_cuda"],
    verbose=False,
    extra_cflags=[""],
    extra_ldflags=[""],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.swish_scale = swish_scale

    def forward(self, x):
        return self.swish_scale.swish_scale_cuda(x.contiguous(), 2.0)


def reference(x):
    return x * torch.sigmoid(x) * 2.0


def get_inputs():
    return [torch.randn(7, 300)]


BROKEN = ("if (column < x.size(1))", "if (column <= x.size(1))", "race between blocks")
