"""A recurrent layer that gives every step and the last state: two outputs, and two inputs."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.gru = nn.GRU(input_size, hidden_size)

    def forward(self, x, h0):
        return self.gru(x, h0)


length = 3
batch_size = 3
input_size, hidden_size = 4, 5


def get_inputs():
    return [torch.rand(length, batch_size, input_size), torch.rand(1, batch_size, hidden_size)]


def get_init_inputs():
    return [input_size, hidden_size]
