"""A convolution of the padded input with the flipped kernel."""

import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.ConvTranspose3d(in_channels, out_channels, kernel_size)

    def forward(self, x):
        weight = self.conv.weight
        return F.conv3d(x, weight.flip(2, 3, 4).transpose(0, 1), self.conv.bias, padding=weight.shape[2] - 1)
