"""Answers in the driver's place, without what an answer must have.

Verdict: error: its reply to candidate.run lacks 'peak_mib'
Needs: a process of its own
"""

import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        os.write(int(sys.argv[2]), b'{"result": {"seconds": 1.0, "built": false}}\n')
        return y
