"""A product with a triangle of ones."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, mask):
        triangle = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu()
        return (x * mask) @ triangle
