"""Adds in an order that changes, and does not say so.

Verdict: forward only: run to run: bits differ from run to run, and it does not say deterministic = False
Caveat: not-deterministic
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2) + self.calls % 2 * 1e-7
