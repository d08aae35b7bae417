"""Its own names for the original's parameters, so no state_dict fits; from the same seed it has the same weights.

Verdict: forward only: ModelNew's parameters differ from the original's: it lacks conv.weight; lacks conv.bias; has weight
Caveat: weights-by-seed
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        conv = nn.Conv2d(in_channels, out_channels, 3)
        self.weight, self.bias = nn.Parameter(conv.weight.detach().clone()), nn.Parameter(conv.bias.detach().clone())

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(F.conv2d(x, self.weight, self.bias)), 2)
