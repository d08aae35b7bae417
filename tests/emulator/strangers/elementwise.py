import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void swish_scale_kernel(const float* __restrict__ x, float* __restrict__ y, float scale, int size) {
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (idx < size) {
        float v = x[idx];
        y[idx] = v / (1.0f + expf(-v)) * scale;
    }
}

torch::Tensor swish_scale_cuda(torch::Tensor x, double scale) {
    TORCH_CHECK(x.is_cuda(), "x must be a CUDA tensor");
    auto y = torch::empty_like(x);
    int size = x.numel();
    const int block_size = 256;
    const int num_blocks = (size + block_size - 1) / block_size;
    swish_scale_kernel<<<num_blocks, block_size>>>(x.data_ptr<float>(), y.data_ptr<float>(), (float)scale, size);
    return y;
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


BROKEN = ("if (idx < size)", "if (idx <= size)", "global memory out of bounds")
