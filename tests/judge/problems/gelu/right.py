"""By its definition."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.erf(x * 2**-0.5))
