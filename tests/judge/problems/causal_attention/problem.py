"""Attention in which no position sees a later one; three inputs."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


batch_size = 2
heads, length, features = 3, 10, 8


def get_inputs():
    return [torch.rand(batch_size, heads, length, features) for _ in range(3)]


def get_init_inputs():
    return []
