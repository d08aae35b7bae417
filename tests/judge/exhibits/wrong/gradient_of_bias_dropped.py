"""Forgets the gradient of the bias.

Verdict: forward only: the gradient of conv.bias is
Caveat: no-gradient
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = F.conv2d(x, self.conv.weight, self.conv.bias.detach())
        return F.avg_pool2d(torch.sigmoid(y), 2)
