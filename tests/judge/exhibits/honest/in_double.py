"""Computes in more precision than it must.

Verdict: pass
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = F.conv2d(x.double(), self.conv.weight.double(), self.conv.bias.double())
        return F.avg_pool2d(torch.sigmoid(y), 2).to(x.dtype)
