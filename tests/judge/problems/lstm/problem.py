"""A recurrent layer and a linear one on its last step."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.lstm = nn.LSTM(input_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        steps, _ = self.lstm(x)
        return self.head(steps[:, -1])


batch_size = 3
length = 3
input_size, hidden_size, output_size = 5, 6, 4


def get_inputs():
    return [torch.rand(batch_size, length, input_size)]


def get_init_inputs():
    return [input_size, hidden_size, output_size]
