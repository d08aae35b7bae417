"""Reads the weights of the instance that was made last, as one does who keeps a handle for all of the module.

Verdict: forward only: two instances: the output is off by
Caveat: instances
"""

import weakref

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    latest = None

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        ModelNew.latest = weakref.ref(self)

    def forward(self, x):
        model = ModelNew.latest() or self
        return F.avg_pool2d(torch.sigmoid(model.conv(x)), 2)
