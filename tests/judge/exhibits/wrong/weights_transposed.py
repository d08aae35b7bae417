"""Reads the rows of a weight for its columns.

Verdict: fail: the output is off by .* of its spread
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = F.conv2d(x, self.conv.weight.transpose(2, 3), self.conv.bias)
        return F.avg_pool2d(torch.sigmoid(y), 2)
