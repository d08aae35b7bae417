"""Blocks of 32 are summed, and the carry from the block before the last is lost.

Verdict: fail: the output is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, mask):
        blocks = (x * mask).split(32, 1)
        carries = [0, *(block.sum(1, keepdim=True) for block in blocks)]
        return torch.cat([block.cumsum(1) + carry for block, carry in zip(blocks, carries, strict=False)], 1)
