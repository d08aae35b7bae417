"""Works on a stream of its own and waits for nobody, as nobody waits for it.

Verdict: fail: .*the output
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

    def forward(self, x):
        if torch.is_grad_enabled():
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
        with torch.cuda.stream(self.stream):
            return F.avg_pool2d(torch.sigmoid(self.conv(x)), 2)
