"""Changes the default dtype.

Verdict: fail: changes the default dtype from torch.float32 to torch.float64
Needs: a process of its own
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
        torch.set_default_dtype(torch.float64)
        return y
