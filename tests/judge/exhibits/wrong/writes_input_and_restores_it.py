r"""Uses its input as scratch memory and puts the content back.

Verdict: fail: writes to input 0 \(its version counter
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
        with torch.no_grad():
            kept = x.clone()
            x.zero_()
            x.copy_(kept)
        return y
