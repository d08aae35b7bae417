"""Adds only what is not zero: of anything but triangular matrices it would be no product."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, a, b):
        rows = [a[i : i + 1, : i + 1] @ b[: i + 1] for i in range(a.shape[0])]
        return torch.tril(torch.cat(rows))
