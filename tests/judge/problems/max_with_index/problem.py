"""Two outputs of different types, and nothing to learn."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        values, indices = torch.max(x, dim=self.dim)
        return values, indices


batch_size = 5
height, width = 12, 14
dim = 1


def get_inputs():
    return [torch.rand(batch_size, height, width)]


def get_init_inputs():
    return [dim]
