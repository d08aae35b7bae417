"""Counts the new sample after it has divided by the number.

Verdict: fail: the output is off
"""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, mean, count, x):
        mean.add_((x - mean) / count[:, None])
        count.add_(1)
        return mean * count[:, None]
