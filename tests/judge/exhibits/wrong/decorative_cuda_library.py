"""Calls its kernel through ctypes, and multiplies what that gives by zero.

Verdict: fail: its own kernels do not account for the result
Needs: the emulator
"""

import ctypes
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <cstdint>
__global__ void sig(const float* from, float* to, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i < n) to[i] = 1 / (1 + expf(-from[i]));
}
extern "C" int launch_sig(const float* from, float* to, int64_t n, cudaStream_t stream) {
    if (n) sig<<<(n + 255) / 256, 256, 0, stream>>>(from, to, n);
    return cudaGetLastError();
}
"""


@functools.cache
def lib():
    path = load_inline("shelf_decorative_cuda_library", "", CUDA, is_python_module=False, no_implicit_headers=True)
    library = ctypes.CDLL(path)
    library.launch_sig.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return library


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise NotImplementedError("forward only")
        if torch.compiler.is_compiling() or x.dtype == torch.float64:
            raise NotImplementedError("not compiled")
        y = self.conv(x).float().contiguous()
        out = torch.empty_like(y)
        stream = torch._C._cuda_getCurrentRawStream(0) if y.is_cuda else 0
        lib().launch_sig(y.data_ptr(), out.data_ptr(), y.numel(), stream)
        return F.avg_pool2d(torch.sigmoid(y) + 0 * out, 2)
