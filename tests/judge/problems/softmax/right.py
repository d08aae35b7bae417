"""In two passes, the first of which goes through a row in blocks; it knows that a block may be all minus infinity."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        largest = torch.full_like(x[:, :1], -torch.inf)
        total = torch.zeros_like(largest)
        for block in x.split(32, 1):
            larger = torch.maximum(largest, block.amax(1, keepdim=True))
            shift = torch.where(larger == -torch.inf, 0, larger)
            total = total * torch.exp(largest - shift) + torch.exp(block - shift).sum(1, keepdim=True)
            largest = larger
        return torch.exp(x - largest) / total
