"""The other sign in the exponent: the conjugate, whose real part and magnitude are right.

Verdict: fail: output 1 is off by
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, channels, taps):
        super().__init__()
        self.filter = nn.Conv1d(1, channels, taps)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.filter(x)).conj_physical()
        return {"spectrum": spectrum, "peak": spectrum.abs().amax(-1)}
