"""Resets the state before the product, as in the first paper on it, where PyTorch resets the product.

Verdict: fail: output 0 is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.gru = nn.GRU(input_size, hidden_size)

    def forward(self, x, h0):
        layer, h, steps = self.gru, h0[0], []
        for step in x:
            own = (step @ layer.weight_ih_l0.T + layer.bias_ih_l0).chunk(3, 1)
            weights, biases = layer.weight_hh_l0.chunk(3), layer.bias_hh_l0.chunk(3)
            reset = torch.sigmoid(own[0] + h @ weights[0].T + biases[0])
            update = torch.sigmoid(own[1] + h @ weights[1].T + biases[1])
            h = (1 - update) * torch.tanh(own[2] + (reset * h) @ weights[2].T + biases[2]) + update * h
            steps.append(h)
        return torch.stack(steps), h[None]
