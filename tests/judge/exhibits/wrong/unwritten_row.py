"""Leaves the last row of its result unwritten.

Verdict: fail: the output
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        out = torch.empty_like(y)
        out[:, :, :-1] = y[:, :, :-1]
        return out
