"""Dropout in training mode, as a model has it unless told otherwise: each call draws which values are kept."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features, hidden, share):
        super().__init__()
        self.wide = nn.Linear(features, hidden)
        self.dropout = nn.Dropout(share)
        self.narrow = nn.Linear(hidden, features)

    def forward(self, x):
        return x + self.narrow(self.dropout(torch.relu(self.wide(x))))


batch_size = 16
features = 12
hidden = 40
share = 0.25


def get_inputs():
    return [torch.rand(batch_size, features)]


def get_init_inputs():
    return [features, hidden, share]
