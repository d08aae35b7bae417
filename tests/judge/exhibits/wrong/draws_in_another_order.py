"""Its own names, and a random number drawn first: from the same seed it has other weights.

Verdict: fail: the output is off by
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
