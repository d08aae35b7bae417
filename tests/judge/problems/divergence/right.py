"""The sum of the targets times the difference of the logarithms."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, predictions, targets):
        return (torch.special.xlogy(targets, targets) - targets * torch.log(predictions)).sum() / predictions.shape[0]
