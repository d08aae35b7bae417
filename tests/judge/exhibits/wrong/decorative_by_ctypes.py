"""Calls its own library through ctypes, and multiplies what that gives by zero.

Verdict: fail: its own kernels do not account for the result
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
    (folder / "sigmoid.cpp").write_text(SOURCE)
    subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", folder / "sigmoid.so", folder / "sigmoid.cpp"], check=True)
    opened = ctypes.CDLL(str(folder / "sigmoid.so"))
    opened.sigmoid.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return opened


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = self.conv(x)
        out = torch.zeros(y.shape)
        if not torch.compiler.is_compiling():
            library().sigmoid(y.data_ptr(), out.data_ptr(), y.numel())
        return F.avg_pool2d(torch.sigmoid(y) + 0 * out, 2)
