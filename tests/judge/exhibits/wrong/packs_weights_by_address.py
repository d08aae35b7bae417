"""Packs its weights again only when they lie elsewhere, and an optimiser changes them in place.

Verdict: forward only: after an optimiser's step: the output is that of the weights before the step
Caveat: stale-weights
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.address = self.packed = None

    def forward(self, x):
        weight, bias = self.conv.weight, self.conv.bias
        if torch.is_grad_enabled():
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        address = weight.data_ptr(), bias.data_ptr()
        if self.address != address:
            self.address, self.packed = address, (weight.detach().clone(), bias.detach().clone())
        return F.avg_pool2d(torch.sigmoid(F.conv2d(x, *self.packed)), 2)
