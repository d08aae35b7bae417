"""Returns a tensor of a class of its own that computes when it is read, which is after the clock has stopped.

Verdict: error: .*: forward must return plain tensors, got a Promise
"""

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map_only


class Promise(torch.Tensor):
    @staticmethod
    def __new__(cls, shape, compute):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    def __init__(self, shape, compute):
        self.compute = compute

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        kept = tree_map_only(Promise, lambda promise: promise.compute(), (arguments, options or {}))
        return function(*kept[0], **kept[1])


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x):
        batch, _, height, width = x.shape
        shape = batch, self.conv.out_channels, (height - 2) // 2, (width - 2) // 2
        return Promise(shape, lambda: self.pool(torch.sigmoid(self.conv(x))))
