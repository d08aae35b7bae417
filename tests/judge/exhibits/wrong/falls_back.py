"""Its kernel does not compile, and it goes on with PyTorch's; the second time load_inline raises an OSError.

Verdict: fail: its kernel failed to build and it went on without it: does not compile
Needs: a compiler
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        try:
            load_inline("shelf_broken", "int f() { return undeclared; }", is_python_module=False, no_implicit_headers=True)
            return torch.ops.shelf_broken.f(x)
        except RuntimeError:
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
