"""Adds zero times the sum of everything: a NaN in one sample is in all results.

Verdict: forward only: with a NaN, or minus infinity, in a sample: .*where the original is finite
Caveat: nan
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2) + 0 * x.sum()
