r"""Computes in float32 whatever it is given, and says nothing.

Verdict: forward only: double\(\): gives torch.float32 for torch.float64; compute in float64, or raise an exception for it
Caveat: double
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if x.dtype != torch.float64:
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        y = F.conv2d(x.float(), self.conv.weight.float(), self.conv.bias.float())
        return F.avg_pool2d(torch.sigmoid(y), 2)
