"""By sorting."""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        ordered, indices = x.sort(dim=self.dim, descending=True, stable=True)
        return ordered.select(self.dim, 0), indices.select(self.dim, 0)
