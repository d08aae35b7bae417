"""Returns the result of the first call again and again.

Verdict: fail: .*(off by|shape)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        return self.kept
