"""Ends its process where the width is odd, as a kernel that leaves its memory may.

Verdict: forward only: at odd sizes: crashed .SIGSEGV
Caveat: sizes
Needs: a process of its own
"""

import os
import signal

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        if x.shape[3] % 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
