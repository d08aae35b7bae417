"""Without a gradient, for whole pairs of rows only, and never with a NaN: one caveat does not hide the next.

Verdict: forward only: the output is silently detached
Caveat: no-gradient, nan, sizes
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        with torch.no_grad():
            y = F.avg_pool2d(torch.sigmoid(self.conv(torch.nan_to_num(x))), 2)
            return y if x.shape[2] % 2 == 0 else y.flip(2)
