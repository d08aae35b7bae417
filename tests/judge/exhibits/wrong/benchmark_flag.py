"""Sets cudnn.benchmark when it is imported, also for the baselines of a careless harness.

Verdict: forward only: changes torch.backends.cudnn.benchmark from False to True when it is loaded
Needs: a process of its own
Caveat: sets-cudnn-benchmark
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.backends.cudnn.benchmark = True


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
