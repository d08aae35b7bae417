"""Batches of positive definite matrices, of which others have no decomposition."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return torch.linalg.cholesky(x)


batch_size = 6
size = 16


def get_inputs():
    x = torch.randn(batch_size, size, size)
    return [x @ x.mT + torch.eye(size)]


def get_init_inputs():
    return []
