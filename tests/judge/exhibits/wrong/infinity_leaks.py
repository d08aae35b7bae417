"""Subtracts the largest input and adds it again: an infinity spoils every sample.

Verdict: forward only: with an infinity in one sample and only zeros in another: .*where the original is finite
Caveat: nan
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        top = x.nan_to_num(posinf=math.inf).max()
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2) + (top - top)
