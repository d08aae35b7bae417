"""A batch norm behind a linear layer: in eval mode it uses the statistics that it has kept in training."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.norm = norm = nn.BatchNorm1d(out_features)
        self.normed = lambda x: norm(self.linear(x))  # a copy's function has to use the copy's layers

    def forward(self, x):
        return self.normed(x)


batch_size = 12
in_features, out_features = 9, 7


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
