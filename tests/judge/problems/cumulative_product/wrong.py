"""Starts with the second factor.

Verdict: fail: the output is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return torch.cumprod(torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1), dim=self.dim)
