"""Turns the caller's input into one that wants a gradient.

Verdict: fail: changes requires_grad of input 0
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(self.conv(x if x.requires_grad else x.requires_grad_())), 2)
