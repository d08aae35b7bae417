"""Divides by all elements instead of by the samples.

Verdict: fail: the output is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, predictions, targets):
        return (torch.special.xlogy(targets, targets) - targets * torch.log(predictions)).mean()
