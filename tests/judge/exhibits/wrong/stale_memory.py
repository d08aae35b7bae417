"""Returns memory that it never writes, where an earlier result may still be lying.

Verdict: fail: the output
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return torch.empty(len(x), 3, (x.shape[2] - 2) // 2, (x.shape[3] - 2) // 2)
