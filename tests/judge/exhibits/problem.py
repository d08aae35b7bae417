"""The model of the shelf: a convolution, a sigmoid, average pooling. In KernelBench's format, and small."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x):
        return self.pool(torch.sigmoid(self.conv(x)))


batch_size = 6
in_channels, out_channels = 2, 3
height, width = 12, 14


def get_inputs():
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs():
    return [in_channels, out_channels]
