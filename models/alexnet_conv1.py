"""AlexNet's first convolution: 96 filters of 11x11 at stride 4.

KernelBench level 1, problem 50, in KernelBench's format.
"""

import torch
import torch.nn as nn


class Model(nn.Module):
    """Maps (batch, 3, height, width) to (batch, 96, out_height, out_width); num_classes is not used."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=3, out_channels=96, kernel_size=11, stride=4, padding=2)

    def forward(self, x):
        return self.conv1(x)


batch_size = 256
height, width = 224, 224
num_classes = 1000


def get_inputs():
    return [torch.rand(batch_size, 3, height, width)]


def get_init_inputs():
    return [num_classes]
