"""A library that it compiles itself gives the sigmoid; a function that was found once is called with addresses.

Verdict: pass
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

extern "C" int sigmoid(const float* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = 1 / (1 + std::exp(-from[i]));
    return 0;
}
"""


@functools.cache
def sigmoid():
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder, "sigmoid.cpp"), Path(folder, "sigmoid.so")
        text.write_text(SOURCE)
        subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-o", library, text], check=True)
        address = ctypes.cast(ctypes.CDLL(str(library)).sigmoid, ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise NotImplementedError("forward only")
        if torch.compiler.is_compiling() or x.dtype == torch.float64:
            raise NotImplementedError("neither compiled nor in float64")
        y = self.conv(x).float().contiguous()
        out = torch.empty_like(y)
        if sigmoid()(y.data_ptr(), out.data_ptr(), y.numel()):
            raise RuntimeError("sigmoid")
        return F.avg_pool2d(out, 2)
