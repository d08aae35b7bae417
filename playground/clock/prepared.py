"""The original made ready to be run as a baseline says."""

import contextlib

import torch

from playground import modes, tensors

# What a variant may set for the whole process, and what it takes for a baseline to be timed under the same: the flag's place,
# name and value.
_PRECISIONS = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
_PRECISIONS_ON_CPU = (torch.backends.mkldnn.conv, torch.backends.mkldnn.matmul)
FLAGS = {
    "benchmark": [(torch.backends.cudnn, "benchmark", True)],
    "tf32": [(flag, "fp32_precision", "tf32") for flag in _PRECISIONS + _PRECISIONS_ON_CPU],
}


def prepare(model, baseline):
    """Return (a copy of the model, memory format and dtype of its inputs) for a baseline; None: as they are.

    Its precision holds where `precision_of` does.

    No two compiled models may share a class: torch.compile keeps what it compiles with the class's code.
    """
    dtype = baseline.dtype and getattr(torch, baseline.dtype)
    model = tensors.copy_model(model).to(dtype)
    if baseline.channels_last:
        for parameter in model.parameters():
            if parameter.dim() in (4, 5):
                layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                parameter.data = parameter.data.contiguous(memory_format=layout)
    if baseline.compiled:
        # What exceeds the limit would run uncompiled without a word.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        model = torch.compile(model, mode=baseline.compiled)
    return model, "channels_last" if baseline.channels_last else None, dtype


@contextlib.contextmanager
def precision_of(baseline):
    """Put the baseline's settings in force; TF32 is forbidden where it is strict."""
    flags = [flag for name in baseline.settings for flag in FLAGS[name]]
    flags += [(flag, "fp32_precision", "ieee") for flag in _PRECISIONS if baseline.strict]
    before = [(place, name, getattr(place, name)) for place, name, _ in flags]
    try:
        _set(flags)
        yield
    finally:
        _set(before[::-1])


def _set(flags):
    for place, name, value in flags:
        if name != "fp32_precision":
            setattr(place, name, value)
    modes.set_fp32_precision({place: value for place, name, value in flags if name == "fp32_precision"})
