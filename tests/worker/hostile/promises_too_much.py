"""Its results say that they are larger than any memory.

Verdict: fail: the file of results holds something else than tensors: .*
Needs: the whole check
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn as nn


def save(results, path):
    header = json.dumps({"detached": False, "tensors": [["output 0", "torch.float32", [1 << 40, 1 << 20]]]}).encode()
    Path(path).write_bytes(len(header).to_bytes(8, "little") + header)


sys.modules["playground.tensors"].save_results = save


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)
