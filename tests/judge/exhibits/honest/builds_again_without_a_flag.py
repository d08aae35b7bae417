"""A build fails on a flag of another compiler; the next one, without it, is what runs.

Verdict: pass
Needs: a compiler
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>

at::Tensor sigmoid(const at::Tensor& given) {
    const at::Tensor y = given.contiguous();
    at::Tensor out = at::empty_like(y);
    const float* from = y.const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for (int64_t i = 0; i < y.numel(); ++i) to[i] = 1 / (1 + std::exp(-from[i]));
    return out;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("sigmoid(Tensor y) -> Tensor", &sigmoid); }
"""


def build():
    load_inline("shelf_sigmoid", SOURCE, is_python_module=False, no_implicit_headers=True)
    return torch.ops.shelf_sigmoid


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.ops = None

    def forward(self, x):
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            raise NotImplementedError("forward only")
        if self.ops is None:
            try:
                flags = ["-fno-such-flag-anywhere"]
                load_inline("shelf_flagged", SOURCE, is_python_module=False, no_implicit_headers=True, extra_cflags=flags)
            except (RuntimeError, OSError):  # the second time torch looks for a library that it never built
                self.ops = build()
        return F.avg_pool2d(self.ops.sigmoid(self.conv(x)), 2)
