"""By logarithms' elder sister: each product from the one before."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        columns = list(x.unbind(self.dim))
        for i in range(1, len(columns)):
            columns[i] = columns[i - 1] * columns[i]
        return torch.stack(columns, self.dim)
