"""The ways in which PyTorch itself can run the original, each with the flags and the conversion it needs."""

import contextlib
import copy
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Baseline:
    """`strict` forbids TF32 in convolutions and matrix products; otherwise PyTorch's defaults hold."""

    label: str
    compiled: bool = False
    channels_last: bool = False
    strict: bool = False


BASELINES = {
    "eager": Baseline("eager"),
    "channels_last": Baseline("channels_last", channels_last=True),
    "compile": Baseline("torch.compile", compiled=True),
    "eager_fp32": Baseline("eager, strict fp32", strict=True),
    "compile_fp32": Baseline("torch.compile, strict fp32", compiled=True, strict=True),
}


def names_for(place, mode, quick):
    """The baselines worth timing: strict ones only where TF32 exists, channels_last for inference, few when in a hurry."""
    names = ["eager"]
    if mode == "forward":
        names.append("channels_last")
    if not quick:
        names.append("compile")
    if place == "cuda":
        names.append("eager_fp32")
        if not quick:
            names.append("compile_fp32")
    return names


@contextlib.contextmanager
def prepared(model, baseline):
    """(model, memory format of its inputs) for a baseline, with its precision flags set until the context is left.

    The model itself is not changed: channels_last and torch.compile get a copy.
    """
    with _precision(baseline.strict):
        if baseline.channels_last:
            model = copy.deepcopy(model)
            for parameter in model.parameters():
                if parameter.dim() in (4, 5):
                    layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                    parameter.data = parameter.data.contiguous(memory_format=layout)
        if baseline.compiled:
            torch.compiler.reset()
            model = torch.compile(copy.deepcopy(model))
        yield model, "channels_last" if baseline.channels_last else None


@contextlib.contextmanager
def _precision(strict):
    """Forbid TF32 where `strict`, by the flags of torch 2.9 and later; the older ones cannot be read back beside them."""
    flags = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before = [flag.fp32_precision for flag in flags]
    try:
        if strict:
            for flag in flags:
                flag.fp32_precision = "ieee"
        yield
    finally:
        for flag, precision in zip(flags, before, strict=True):
            flag.fp32_precision = precision
