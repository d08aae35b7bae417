"""A backward that takes mean and variance for constants: only the gradients are wrong.

Verdict: forward only: the gradient of conv.(weight|bias) is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x):
        y = self.conv(x)
        norm = self.norm
        if not self.training:
            return torch.relu(norm(y))
        variance, mean = torch.var_mean(y.detach(), (0, 2, 3), correction=0)
        with torch.no_grad():
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * y[:, 0].numel() / (y[:, 0].numel() - 1), norm.momentum)
        scale = norm.weight * (variance + norm.eps).rsqrt()
        y = (y - mean[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]
        return torch.relu(y)
