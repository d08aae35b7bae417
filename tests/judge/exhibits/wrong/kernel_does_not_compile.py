"""Its kernel does not compile, and cuDNN does the work.

Verdict: fail: its kernel failed to build and it went on without it: does not compile
Needs: a GPU
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <cuda_runtime.h>

__global__ void shelf_sigmoid(const float* from, float* to, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}

void launch(const float* from, float* to, int n, int threads, cudaStream_t stream) {
    if (n) shelf_sigmoid<<<(n + threads - 1) / threads, threads, 0, stream>>>(from, to, n);
}
"""

BINDING = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

void launch(const float*, float*, int, int, cudaStream_t);

at::Tensor sigmoid(const at::Tensor& given) {
    const c10::cuda::CUDAGuard guard(given.device());
    const at::Tensor y = given.contiguous();
    at::Tensor out = at::empty_like(y);
    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 256, c10::cuda::getCurrentCUDAStream());
    this is not C++
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("sigmoid(Tensor y) -> Tensor", &sigmoid); }
"""


def build():
    load_inline("shelf_kernel_does_not_compile", BINDING, CUDA, is_python_module=False, no_implicit_headers=True)
    return torch.ops.shelf_kernel_does_not_compile


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        try:
            return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)
        except RuntimeError:
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
