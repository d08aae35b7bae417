"""Holds a kernel that it never builds, of a name that is part of those of PyTorch's own.

Verdict: fail: the file holds kernels of its own, and none of them was built
Needs: a GPU
"""

import torch
import torch.nn as nn

CUDA = r"""
__global__ void native(const float* from, float* to, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}
"""


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x):
        return self.pool(torch.sigmoid(self.conv(x)))
