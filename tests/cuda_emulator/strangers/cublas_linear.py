"""A linear layer by cuBLAS, with PyTorch's own handle, and a kernel for the bias and the activation."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

__global__ void add_bias_and_clamp(float* y, const float* bias, int rows, int columns) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows * columns) y[i] = fmaxf(y[i] + bias[i % columns], 0.f);
}

torch::Tensor linear(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
    const int rows = x.size(0), inner = x.size(1), columns = weight.size(0);
    auto y = torch::empty({rows, columns}, x.options());
    const float one = 1.f, zero = 0.f;
    cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
    TORCH_CHECK(cublasSgemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, columns, rows, inner, &one, weight.data_ptr<float>(), inner,
                            x.data_ptr<float>(), inner, &zero, y.data_ptr<float>(), columns) == CUBLAS_STATUS_SUCCESS);
    add_bias_and_clamp<<<(rows * columns + 127) / 128, 128>>>(y.data_ptr<float>(), bias.data_ptr<float>(), rows, columns);
    return y;
}
"""
CPP = "torch::Tensor linear(torch::Tensor x, torch::Tensor weight, torch::Tensor bias);"
module = load_inline(name="cublas_linear", cpp_sources=CPP, cuda_sources=CUDA, functions=["linear"], extra_ldflags=["-lcublas"])


class ModelNew(nn.Module):
    def forward(self, x, weight, bias):
        return module.linear(x, weight, bias)


def get_inputs():
    return [torch.randn(7, 20), torch.randn(9, 20), torch.randn(9)]


def reference(x, weight, bias):
    return torch.relu(nn.functional.linear(x, weight, bias))


BROKEN = ("bias[i % columns]", "bias[i % (columns + 1)]", "global memory out of bounds")
