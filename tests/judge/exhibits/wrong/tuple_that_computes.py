"""Returns a tuple of a class of its own that computes once somebody goes through it, which is after the clock has stopped.

Verdict: error: .*: forward must return plain tuples, lists and dicts, got a Later, a tuple with its own __iter__
"""

import torch
import torch.nn as nn


class Later(tuple):
    def __iter__(self):
        (compute,) = super().__iter__()
        return iter([compute()])


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x):
        return Later([lambda: self.pool(torch.sigmoid(self.conv(x)))])
