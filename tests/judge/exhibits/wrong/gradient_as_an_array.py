r"""Its backward reads the gradient as if it were contiguous, as kernels do that take its address.

Verdict: forward only: on normal inputs, with another forward pass before the backward, .*: the gradient of conv.\w+ is
Caveat: wrong-gradient
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.shape = y.shape
        return F.avg_pool2d(y, 2)

    @staticmethod
    def backward(ctx, upstream):
        upstream = upstream.as_strided(upstream.shape, torch.empty(upstream.shape, device="meta").stride())
        rows, columns = ctx.shape[2] // 2 * 2, ctx.shape[3] // 2 * 2
        gradient = upstream.new_zeros(ctx.shape)
        gradient[..., :rows, :columns] = upstream.repeat_interleave(2, 2).repeat_interleave(2, 3) / 4
        return gradient


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return Pooled.apply(torch.sigmoid(self.conv(x)))
