"""The ways in which PyTorch itself can run the original, each with the flags and the conversion it needs."""

import contextlib
import copy
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Baseline:
    """`strict` forbids TF32 in convolutions and matrix products; otherwise PyTorch's defaults hold.

    `compiled` is torch.compile's mode, None for a baseline that is not compiled.
    """

    compiled: str | None = None
    channels_last: bool = False
    strict: bool = False


# max-autotune without CUDA graphs: those copy every input into memory of their own, which takes longer than it saves. Where
# launches count, all sides are timed under CUDA graphs anyway.
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"

BASELINES = {
    "eager": Baseline(),
    "channels_last": Baseline(channels_last=True),
    "compile": Baseline(compiled="default"),
    "compile_max": Baseline(compiled=MAX_AUTOTUNE),
    "eager_fp32": Baseline(strict=True),
    "channels_last_fp32": Baseline(channels_last=True, strict=True),
    "compile_fp32": Baseline(compiled="default", strict=True),
    "compile_max_fp32": Baseline(compiled=MAX_AUTOTUNE, strict=True),
}


def names_for(place, mode, quick, max_autotune, strict):
    """The baselines worth timing: channels_last for inference, few when in a hurry, strict ones beside those of a forward pass.

    `strict` says that TF32 is forbidden to all. Of a training step strict baselines take up to 20 times as long as the others:
    only a strict run times them.
    """
    names = ["eager"]
    if not mode.startswith("weights"):
        names.append("channels_last")
    if not quick:
        names.append("compile")
    if max_autotune:
        names.append("compile_max")
    return names + [f"{name}_fp32" for name in names] if place == "cuda" and mode == "forward" and not strict else names


def peers(names, precision):
    """Those of the baselines that are at least as precise as a variant: where it is strict ("fp32"), only strict ones.

    Where no baseline is marked as strict (on the CPU, which has no TF32) all of them are.
    """
    strict = [name for name in names if BASELINES[name].strict]
    return strict if strict and precision == "fp32" else list(names)


def prepare(model, baseline):
    """(a copy of the model, memory format of its inputs) for a baseline. Its precision holds where `precision_of` does.

    No two compiled models may share a class: torch.compile keeps what it compiles with the class's code.
    """
    model = copy.deepcopy(model)
    if baseline.channels_last:
        for parameter in model.parameters():
            if parameter.dim() in (4, 5):
                layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                parameter.data = parameter.data.contiguous(memory_format=layout)
    if baseline.compiled:
        # What exceeds the limit would run uncompiled without a word.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        model = torch.compile(model, mode=baseline.compiled)
    return model, "channels_last" if baseline.channels_last else None


@contextlib.contextmanager
def precision_of(baseline):
    """Forbid TF32 where the baseline is strict, by the flags of torch 2.9 and later; older ones cannot be read beside them."""
    flags = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before = [flag.fp32_precision for flag in flags]
    try:
        if baseline.strict:
            for flag in flags:
                flag.fp32_precision = "ieee"
        yield
    finally:
        for flag, precision in zip(flags, before, strict=True):
            flag.fp32_precision = precision
