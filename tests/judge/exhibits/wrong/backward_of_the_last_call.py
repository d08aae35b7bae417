"""Keeps what its backward needs where the next call overwrites it: wrong in a network that calls the layer twice.

Verdict: forward only: on normal inputs, with another forward pass before the backward, .*: the gradient of conv.weight is off
Caveat: wrong-gradient
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        Sigmoid.last = torch.sigmoid(y)
        return Sigmoid.last.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Sigmoid.last * (1 - Sigmoid.last)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(Sigmoid.apply(self.conv(x)), 2)
