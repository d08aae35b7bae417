"""Asks a result of its own for a version counter, which it does not have in inference_mode.

Verdict: forward only: inference_mode: raises RuntimeError: Inference tensors do not track version counter
Caveat: inference-mode
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        y = self.conv(x)
        self.version = y._version
        return F.avg_pool2d(torch.sigmoid(y), 2)
