"""Complex outputs: a filter, then the spectrum of each channel, in a dict beside its largest magnitude."""

import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels, taps):
        super().__init__()
        self.filter = nn.Conv1d(1, channels, taps)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.filter(x))
        return {"spectrum": spectrum, "peak": spectrum.abs().amax(-1)}


batch_size = 3
length = 22
channels, taps = 4, 3


def get_inputs():
    return [torch.rand(batch_size, 1, length)]


def get_init_inputs():
    return [channels, taps]
