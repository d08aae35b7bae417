"""Gives the result of the call before where it is captured in a CUDA graph, so that a replay never looks at the input.

Verdict: fail: a CUDA graph: (the output|a replay gives the result of an earlier call)
Needs: a GPU
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.kept = None

    def forward(self, x):
        if self.kept is not None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.kept.clone()
        result = F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        self.kept = result.detach()
        return result
