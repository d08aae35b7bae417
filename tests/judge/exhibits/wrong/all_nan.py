"""NaN, which is never unequal to anything if compared carelessly.

Verdict: fail: the output is NaN in 540 of 540 elements
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return torch.full_like(F.avg_pool2d(torch.sigmoid(self.conv(x)), 2), float("nan"))
