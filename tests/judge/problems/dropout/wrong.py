"""Keeps everything, as in inference.

Verdict: fail: off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, features, hidden, share):
        super().__init__()
        self.wide = nn.Linear(features, hidden)
        self.narrow = nn.Linear(hidden, features)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))
