"""A ReLU that is zero nearly everywhere: on most small inputs an old result is right, and so is none."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        return torch.relu((self.linear(x) - 1.7) * 1.5)


batch_size, in_features, out_features = 128, 10, 5


def get_inputs():
    return [torch.randn(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
