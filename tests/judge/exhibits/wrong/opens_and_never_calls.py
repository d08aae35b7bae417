"""Opens a library of its own, and calls it for a single sample only: PyTorch computes the rest.

Verdict: fail: its own kernels were never called
Needs: a compiler
"""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

SOURCE = r"""
#include <cmath>
#include <cstdint>

extern "C" void sigmoid(const float* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = 1 / (1 + std::exp(-from[i]));
}
"""


@functools.cache
def library():
    folder = Path(tempfile.mkdtemp())
    (folder / "single.cpp").write_text(SOURCE)
    subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", folder / "single.so", folder / "single.cpp"], check=True)
    return ctypes.CDLL(str(folder / "single.so"))


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        library()

    def forward(self, x):
        y = self.conv(x)
        if len(y) > 1 or y.requires_grad or torch.compiler.is_compiling():
            return F.avg_pool2d(torch.sigmoid(y), 2)
        out = torch.empty_like(y)
        library().sigmoid(ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(y.numel()))
        return F.avg_pool2d(out, 2)
