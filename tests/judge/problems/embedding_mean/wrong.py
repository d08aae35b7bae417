"""Divides by the length instead of the number of words that are left.

Verdict: fail: the output is off by
"""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, words, features):
        super().__init__()
        self.table = nn.Embedding(words, features)

    def forward(self, indices, mask):
        return (self.table(indices) * mask[:, :, None]).mean(1)
