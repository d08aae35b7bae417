"""Doubles the gradient of the input.

Verdict: forward only: the gradient of input0 is off
Caveat: wrong-gradient
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        x = 2 * x - x.detach()
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
