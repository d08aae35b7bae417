"""Its backward scales the gradient that it is given in place: another user of that gradient gets it scaled.

Verdict: forward only: the backward pass changes the gradient of output 0; mend the backward
Caveat: wrong-gradient
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return 0.5 * y

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(0.5)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return Halved.apply(2 * F.avg_pool2d(torch.sigmoid(self.conv(x)), 2))
