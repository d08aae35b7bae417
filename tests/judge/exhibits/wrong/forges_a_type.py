"""Answers in the driver's place, with a number where there must be a dict.

Verdict: error: its reply to candidate.run has 'complaints' = '0'
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
        os.write(int(sys.argv[2]), b'{"result": {"peak_mib": 0, "complaints": 0, "refused": null}}\n')
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
