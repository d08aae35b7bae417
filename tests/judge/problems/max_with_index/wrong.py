"""The indices count from the other end.

Verdict: fail: output 1 is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        values, indices = torch.max(x, dim=self.dim)
        return values, x.shape[self.dim] - 1 - indices
