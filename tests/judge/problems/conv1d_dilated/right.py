"""One product for each element of the kernel."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, dilation):
        super().__init__()
        self.conv1d = nn.Conv1d(in_channels, out_channels, kernel_size, stride=stride, dilation=dilation)
        self.stride, self.dilation = stride, dilation

    def forward(self, x):
        weight = self.conv1d.weight
        last = x.shape[2] - self.dilation * (weight.shape[2] - 1)
        taps = [x[:, :, k * self.dilation :][:, :, : last : self.stride] for k in range(weight.shape[2])]
        return sum(torch.einsum("oc,ncl->nol", weight[:, :, k], tap) for k, tap in enumerate(taps)) + self.conv1d.bias[:, None]
