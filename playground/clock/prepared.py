"""The original made ready to be run as a baseline says."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from playground import modes, tensors
from playground.clock.baselines import Baseline

# What a variant may set for the whole process, and what it takes for a baseline to be timed under the same: the flag's place,
# name and value.
_of: Any = torch.backends
_PRECISIONS = (_of.cudnn.conv, _of.cudnn.rnn, _of.cuda.matmul)
FLAGS: dict[str, list[tuple[Any, str, Any]]] = {
    "benchmark": [(_of.cudnn, "benchmark", True)],
    "tf32": [(flag, "fp32_precision", "tf32") for flag in (*_PRECISIONS, _of.mkldnn.conv, _of.mkldnn.matmul)],
}


def prepare(model: torch.nn.Module, baseline: Baseline) -> tuple[Any, str | None, torch.dtype | None]:
    """Return (a copy of the model, memory format and dtype of its inputs) for a baseline; None: as they are.

    Its precision holds where `precision_of` does. No two compiled models may share a class: torch.compile keeps what it
    compiles with the class's code.
    """
    dtype = getattr(torch, baseline.dtype) if baseline.dtype else None
    prepared: Any = tensors.copy_model(model).to(dtype)
    if baseline.channels_last:
        for parameter in prepared.parameters():
            if parameter.dim() in (4, 5):
                layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                parameter.data = parameter.data.contiguous(memory_format=layout)
    if baseline.compiled:
        # What exceeds the limit would run uncompiled without a word.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        prepared = torch.compile(prepared, mode=baseline.compiled)
    return prepared, "channels_last" if baseline.channels_last else None, dtype


@contextlib.contextmanager
def precision_of(baseline: Baseline) -> Iterator[None]:
    """Put the baseline's settings in force; TF32 is forbidden where it is strict."""
    flags = [flag for name in baseline.settings for flag in FLAGS[name]]
    flags += [(flag, "fp32_precision", "ieee") for flag in _PRECISIONS if baseline.strict]
    before = [(place, name, getattr(place, name)) for place, name, _ in flags]
    try:
        _set(flags)
        yield
    finally:
        _set(before[::-1])


def _set(flags: Sequence[tuple[Any, str, Any]]) -> None:
    for place, name, value in flags:
        if name != "fp32_precision":
            setattr(place, name, value)
    modes.set_fp32_precision({place: value for place, name, value in flags if name == "fp32_precision"})
