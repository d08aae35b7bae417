"""Puts its result into the input's memory.

Verdict: fail: returns the memory of input 0
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
        out = x.flatten()[: y.numel()].view(y.shape)
        out.data.copy_(y)
        return out
