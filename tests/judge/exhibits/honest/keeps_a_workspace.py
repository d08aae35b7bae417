"""Has one scratch buffer for all calls, and a new output for each.

Verdict: pass
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.scratch = None

    def forward(self, x):
        if torch.is_grad_enabled():
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        y = self.conv(x)
        if self.scratch is None or self.scratch.shape != y.shape or self.scratch.dtype != y.dtype:
            self.scratch = torch.empty_like(y)
        torch.sigmoid(y, out=self.scratch)
        return F.avg_pool2d(self.scratch, 2)
