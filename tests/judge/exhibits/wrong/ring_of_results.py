r"""Returns one of many buffers, each of which comes back in time.

Verdict: fail: an earlier output: the call after \d+ others overwrites what an earlier one returned
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

BUFFERS = 37


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.rings, self.calls = {}, 0

    def forward(self, x):
        result = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        if result.requires_grad or torch.compiler.is_compiling():
            return result
        key = result.shape, result.dtype
        ring = self.rings.setdefault(key, [torch.empty_like(result) for _ in range(BUFFERS)])
        self.calls += 1
        return ring[self.calls % BUFFERS].copy_(result)
