"""With mean and variance by hand."""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.norm = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        centred = x - x.mean((2, 3), keepdim=True)
        variance = centred.square().mean((2, 3), keepdim=True)
        return centred * (variance + self.norm.eps).rsqrt() * self.norm.weight + self.norm.bias
