"""The inner sum in blocks of 32."""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, a, b):
        return sum(left @ right for left, right in zip(a.split(32, 1), b.split(32, 0), strict=True))
