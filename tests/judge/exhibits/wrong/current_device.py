"""Launches on the current device, whichever one the tensors are on.

Verdict: forward only: a second device: .
Needs: two GPUs
Caveat: second-device
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
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

void launch(const float*, float*, int, int, cudaStream_t);

at::Tensor sigmoid(const at::Tensor& given) {
    const at::Tensor y = given.contiguous();
    at::Tensor out = at::empty_like(y);
    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 256, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("sigmoid(Tensor y) -> Tensor", &sigmoid); }
"""


def build():
    load_inline("shelf_current_device", BINDING, CUDA, is_python_module=False, no_implicit_headers=True)
    return torch.ops.shelf_current_device


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise NotImplementedError("forward only")
        return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)
