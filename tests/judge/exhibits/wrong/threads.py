"""Takes the number of threads for its own.

Verdict: fail: changes the number of threads
Needs: a process of its own
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
