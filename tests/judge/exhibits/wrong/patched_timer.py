"""Replaces the clock.

Verdict: fail: replaces time.perf_counter
Needs: a process of its own
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F

real = time.perf_counter
time.perf_counter = lambda: real() / 10


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
