"""Weight and bias in one matrix, as a product with rows of the input and a one needs them. From the same seed it is right.

Verdict: forward only: ModelNew's parameters differ from the original's: it lacks conv.weight; lacks conv.bias; has matrix
Caveat: weights-by-seed
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        conv = nn.Conv2d(in_channels, out_channels, 3)
        self.matrix = nn.Parameter(torch.cat([conv.weight.detach().flatten(1), conv.bias.detach()[:, None]], 1))

    def forward(self, x):
        rows = F.pad(F.unfold(x, 3), (0, 0, 0, 1), value=1.0)
        height, width = x.shape[-2] - 2, x.shape[-1] - 2
        return F.avg_pool2d(torch.sigmoid((self.matrix @ rows).unflatten(2, (height, width))), 2)
