"""Rounds its operands to TF32 where float32 is asked for, to be compared with a baseline that may not.

Verdict: fail: .*off by .*; it is what operands in TF32( or fp16)? give
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def rounded(x):
    nearest = ((x.detach().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return x + (nearest - x.detach())


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = F.conv2d(rounded(x), rounded(self.conv.weight), self.conv.bias)
        return F.avg_pool2d(torch.sigmoid(y), 2)
