"""Runs half of the batch on a stream of its own, which waits and is waited for.

Verdict: pass
Needs: a GPU
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def part(self, x):
        return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)

    def forward(self, x):
        if torch.is_grad_enabled() or len(x) < 2:
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        current, half = torch.cuda.current_stream(), len(x) // 2
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            first = self.part(x[:half])
        second = self.part(x[half:])
        current.wait_stream(self.stream)
        first.record_stream(current)
        return torch.cat([first, second])
