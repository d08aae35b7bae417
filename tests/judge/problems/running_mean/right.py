"""In another order: the sum of all samples so far grows by the new one."""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, mean, count, x):
        total = mean * count[:, None] + x
        count += 1
        mean.copy_(total / count[:, None])
        return total
