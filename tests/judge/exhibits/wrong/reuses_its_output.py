"""Has one output buffer, and returns it from every call.

Verdict: fail: an earlier output: a later call overwrites what an earlier one returned
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.out = None

    def forward(self, x):
        y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        if torch.is_grad_enabled():
            return y
        if self.out is None or self.out.shape != y.shape:
            self.out = torch.empty_like(y)
        return self.out.copy_(y)
