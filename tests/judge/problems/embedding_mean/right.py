"""As a product with a matrix of counts."""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, words, features):
        super().__init__()
        self.table = nn.Embedding(words, features)

    def forward(self, indices, mask):
        counts = self.table.weight.new_zeros(indices.shape[0], self.table.num_embeddings)
        counts = counts.scatter_add(1, indices, mask.to(counts.dtype))
        return counts @ self.table.weight / counts.sum(1, keepdim=True).clamp(min=1)
