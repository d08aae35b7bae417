"""Turns gradients off for everybody.

Verdict: fail: changes the grad mode from True to False when it is loaded
Needs: a process of its own
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_grad_enabled(False)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
