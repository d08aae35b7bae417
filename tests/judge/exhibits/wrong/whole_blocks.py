"""Its kernel works in whole blocks: it leaves out the rest of other sizes, and launches no block for one sample.

Verdict: forward only: on normal inputs: (the output is NaN|.*: output never written)
Caveat: sizes
Needs: a GPU
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <cuda_runtime.h>

__global__ void shelf_sigmoid(const float* from, float* to) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = 1 / (1 + expf(-from[i]));
}

void launch(const float* from, float* to, int n, int threads, cudaStream_t stream) {
    if (n) shelf_sigmoid<<<n / threads, threads, 0, stream>>>(from, to);
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
    launch(y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), y.numel(), 720, c10::cuda::getCurrentCUDAStream());
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("sigmoid(Tensor y) -> Tensor", &sigmoid); }
"""


def build():
    load_inline("shelf_whole_blocks", BINDING, CUDA, is_python_module=False, no_implicit_headers=True)
    return torch.ops.shelf_whole_blocks


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise NotImplementedError("forward only")
        return F.avg_pool2d(build().sigmoid(self.conv(x)), 2)
