"""Takes the model's own sizes, and says so when it gets others.

Verdict: pass
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if x.shape != (6, 2, 12, 14):
            raise ValueError(f"expected (6, 2, 12, 14), got {tuple(x.shape)}")
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
