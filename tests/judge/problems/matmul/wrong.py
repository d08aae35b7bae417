"""Computes in bf16 without a word.

Verdict: fail: the output is off by .*bf16
"""

import torch.nn as nn


class ModelNew(nn.Module):
    def forward(self, a, b):
        return (a.bfloat16().float() @ b.bfloat16().float()).contiguous()
