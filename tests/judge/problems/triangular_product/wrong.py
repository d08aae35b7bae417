"""Leaves the diagonal of the first matrix out.

Verdict: fail: the output is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, a, b):
        return torch.tril(torch.tril(a, -1) @ b)
