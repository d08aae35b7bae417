"""Takes one element of each window instead of pooling it.

Verdict: fail: .*off by .* of its spread
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return torch.sigmoid(self.conv(x))[:, :, ::2, ::2].contiguous()
