"""Its results are a program, which whoever loads them would run.

Verdict: fail: the file of results holds something else than tensors: .*
Needs: the whole check
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn


def save(results, path):
    torch.save({"outputs": [Runs()]}, path)


sys.modules["playground.tensors"].save_results = save


class Runs:
    def __reduce__(self):
        return Path.write_text, (Path("@OUTSIDE@"), "overwritten")


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)
