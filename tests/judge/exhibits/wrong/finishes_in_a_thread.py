"""A thread computes the result after forward has returned, so that nobody's clock sees it.

Verdict: fail: (on fresh inputs: |new content in the same memory: )?the output is
Needs: a process of its own
"""

import threading
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x):
        batch, _, height, width = x.shape
        out = torch.zeros(batch, self.conv.out_channels, (height - 2) // 2, (width - 2) // 2, device=x.device)

        def work():
            time.sleep(0.05)
            with torch.no_grad():
                out.copy_(F.avg_pool2d(torch.sigmoid(self.conv(x)), 2))

        threading.Thread(target=work, daemon=True).start()
        return out
