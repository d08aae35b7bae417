"""A problem in KernelBench's format: what is to be computed, and on which inputs."""

import torch
from torch import nn


class Model(nn.Module):
    """Softmax over each row."""

    def forward(self, x):
        return torch.softmax(x, dim=1)


batch_size = 64
features = 1000


def get_inputs():
    """Return the arguments of `forward`."""
    return [torch.randn(batch_size, features)]


def get_init_inputs():
    """Return the arguments of the constructor."""
    return []
