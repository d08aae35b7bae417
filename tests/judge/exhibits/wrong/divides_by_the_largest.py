"""Divides each sample by its largest magnitude and multiplies again: a sample of zeros is divided by zero.

Verdict: forward only: with an infinity in one sample and only zeros in another: the output is NaN or infinite in
Caveat: nan
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        largest = x.detach().abs().amax((1, 2, 3), keepdim=True)
        scaled = F.conv2d(x / largest, self.conv.weight) * largest
        return F.avg_pool2d(torch.sigmoid(scaled + self.conv.bias[:, None, None]), 2)
