"""The product of two lower triangular matrices."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, a, b):
        return torch.tril(torch.matmul(a, b))


n = 24


def get_inputs():
    return [torch.tril(torch.rand(n, n)), torch.tril(torch.rand(n, n))]


def get_init_inputs():
    return []
