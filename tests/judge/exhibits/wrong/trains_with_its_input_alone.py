"""Computes without a gradient where the input needs none: as a network's first layer it would never be trained.

Verdict: forward only: where no input needs a gradient, no parameter gets one; mend the backward
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
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
