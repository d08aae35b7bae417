"""Gives the input no gradient where the weights need none, as in fine-tuning.

Verdict: forward only: where no parameter needs a gradient, the gradient of input0 is missing; mend the backward
Caveat: wrong-gradient
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias)

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        of_x = nn.grad.conv2d_input(x.shape, weight, upstream)
        of_weight = nn.grad.conv2d_weight(x, weight.shape, upstream)
        return of_x if ctx.needs_input_grad[1] else None, of_weight, upstream.sum((0, 2, 3))


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(Convolution.apply(x, self.conv.weight, self.conv.bias)), 2)
