"""Launches a kernel that NVRTC has compiled, and multiplies what it gives by zero.

Verdict: fail: its own kernels do not account for the result
Needs: a GPU
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

CUDA = r"""
extern "C" __global__ void shelf_sigmoid(const float* from, float* to, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}
"""


@functools.cache
def kernel():
    return torch.cuda._compile_kernel(CUDA, "shelf_sigmoid")


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise NotImplementedError("forward only")
        if torch.compiler.is_compiling() or x.dtype == torch.float64 or x.device.index:
            raise NotImplementedError("neither compiled, nor in float64, nor elsewhere")
        y = self.conv(x).float().contiguous()
        out = torch.empty_like(y)
        kernel()(grid=((y.numel() + 255) // 256, 1, 1), block=(256, 1, 1), args=(y, out, y.numel()))
        return F.avg_pool2d(torch.sigmoid(y) + 0 * out, 2)
