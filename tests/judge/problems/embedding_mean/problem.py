"""Word vectors, averaged over the words that a mask leaves: integers and truth values as inputs."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, words, features):
        super().__init__()
        self.table = nn.Embedding(words, features)

    def forward(self, indices, mask):
        vectors = self.table(indices) * mask[:, :, None]
        return vectors.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


batch_size = 6
length = 9
words, features = 30, 8


def get_inputs():
    return [torch.randint(0, words, (batch_size, length)), torch.rand(batch_size, length) < 0.7]


def get_init_inputs():
    return [words, features]
