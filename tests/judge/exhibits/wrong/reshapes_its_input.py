"""Adds a dimension to the caller's input.

Verdict: fail: changes input 0
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        if not torch.is_grad_enabled():
            x.unsqueeze_(0)
        return y
