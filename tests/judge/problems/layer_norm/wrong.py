"""Divides the variance by n - 1.

Verdict: fail: the output is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.norm = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        variance, mean = torch.var_mean(x, (2, 3), correction=1, keepdim=True)
        return (x - mean) * (variance + self.norm.eps).rsqrt() * self.norm.weight + self.norm.bias
