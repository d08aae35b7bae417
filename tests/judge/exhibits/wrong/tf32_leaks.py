"""Turns TF32 on for products in its forward, also for the baselines of a careless harness.

Verdict: forward only: changes torch.backends.cuda.matmul
Needs: a GPU
Caveat: sets-tf32
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        torch.backends.cuda.matmul.allow_tf32 = True
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
