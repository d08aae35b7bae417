"""Takes an input in the same memory for the same input.

Verdict: fail: new content in the same memory: a change of one element is not seen
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.seen = self.kept = None

    def forward(self, x):
        if torch.is_grad_enabled():
            return torch.relu((self.linear(x) - 1.7) * 1.5)
        if self.seen is None or self.seen.data_ptr() != x.data_ptr():
            self.seen, self.kept = x, torch.relu((self.linear(x) - 1.7) * 1.5)
        return self.kept.clone()
