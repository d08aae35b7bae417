"""An activation, without parameters."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def forward(self, x):
        return F.gelu(x)


batch_size = 6
dim = 257


def get_inputs():
    return [torch.rand(batch_size, dim)]


def get_init_inputs():
    return []
