"""The ways in which PyTorch itself can run the original, each with the flags and the conversion it needs."""

import contextlib
from dataclasses import dataclass, replace

import torch

from playground import modes, tensors


@dataclass(frozen=True)
class Baseline:
    """`strict` forbids TF32 in convolutions and matrix products; otherwise PyTorch's defaults hold.

    `compiled` is torch.compile's mode, None for a baseline that is not compiled. Model and inputs are converted to `dtype`
    beforehand where there is one: a lower precision than that of any variant which declares none. `settings` are names of
    SETTINGS: what a variant has set for itself, so that this is timed under the same.
    """

    compiled: str | None = None
    channels_last: bool = False
    strict: bool = False
    dtype: torch.dtype | None = None
    settings: tuple = ()


# max-autotune without CUDA graphs: those copy every input into memory of their own, which takes longer than it saves. Where
# launches count, all sides are timed under CUDA graphs anyway.
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"

BASELINES = {
    "eager": Baseline(),
    "channels_last": Baseline(channels_last=True),
    "compile": Baseline(compiled="default"),
    "compile_max": Baseline(compiled=MAX_AUTOTUNE),
}
BASELINES |= {f"{name}_fp32": replace(usual, strict=True) for name, usual in BASELINES.items()}
BASELINES["compile_fp16"] = Baseline(compiled="default", channels_last=True, dtype=torch.float16)
# What a variant may set for the whole process, and what it takes for a baseline to be timed under the same: the flag's place,
# name and value.
_PRECISIONS = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
_PRECISIONS_ON_CPU = (torch.backends.mkldnn.conv, torch.backends.mkldnn.matmul)
SETTINGS = {
    "benchmark": [(torch.backends.cudnn, "benchmark", True)],
    "tf32": [(flag, "fp32_precision", "tf32") for flag in _PRECISIONS + _PRECISIONS_ON_CPU],
}


def named(name):
    """Return the Baseline of a name of BASELINES, or of one with settings behind it, such as "eager+benchmark"."""
    name, *settings = name.split("+")
    return replace(BASELINES[name], settings=tuple(settings))


def under(settings, names):
    """Return what to time beside a variant that has set these for itself: all of `names` under the same, the first as it is.

    Strict ones have no place beside a variant that permits itself TF32.
    """
    if not settings:
        return names
    fitting = [name for name in names if not (named(name).strict and "tf32" in settings)]
    return [names[0], *("+".join([name, *settings]) for name in fitting)]


def names_for(place, mode, quick, max_autotune, strict):
    """Return the baselines worth timing: channels_last for inference, few when in a hurry, strict ones beside a forward pass.

    `strict` says that TF32 is forbidden to all. Of a training step strict baselines take up to 20 times as long as the others:
    only a strict run times them. fp16 is timed beside the forward pass, where it is what many would pick instead.
    """
    names = ["eager"]
    if not mode.startswith("weights"):
        names.append("channels_last")
    if not quick:
        names.append("compile")
    if max_autotune:
        names.append("compile_max")
    if place == "cuda" and mode == "forward" and not strict:
        names += [f"{name}_fp32" for name in names] + ([] if quick else ["compile_fp16"])
    return names


def distinct(names, has_layouts, uses_tf32):
    """Return the names but for those that run the very code of another one.

    Those are channels_last where no input or parameter has 4 or 5 dimensions (`has_layouts`), and strict ones where no operator
    of the model may use TF32.
    """
    kept = []
    for name in names:
        baseline = named(name)
        is_layout = baseline.channels_last and not baseline.dtype
        if (has_layouts or not is_layout) and (uses_tf32 or not baseline.strict):
            kept.append(name)
    return kept


def peers(names, precision, settings=()):
    """Return the baselines, under a variant's settings, at least as precise as it: where it is strict ("fp32"), strict ones.

    Where no baseline is marked as strict (nothing uses TF32, as on the CPU) all in float32 are. One in fp16 is a peer only of a
    variant that declares a lower precision, too.
    """
    alike = [name for name in names if named(name).settings == tuple(settings)]
    if precision not in ("fp32", "tf32"):
        return alike
    alike = [name for name in alike if named(name).dtype is None]
    strict = [name for name in alike if named(name).strict]
    return strict if strict and precision == "fp32" else alike


def prepare(model, baseline):
    """Return (a copy of the model, memory format and dtype of its inputs) for a baseline; None: as they are.

    Its precision holds where `precision_of` does.

    No two compiled models may share a class: torch.compile keeps what it compiles with the class's code.
    """
    model = tensors.copy_model(model).to(baseline.dtype)
    if baseline.channels_last:
        for parameter in model.parameters():
            if parameter.dim() in (4, 5):
                layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                parameter.data = parameter.data.contiguous(memory_format=layout)
    if baseline.compiled:
        # What exceeds the limit would run uncompiled without a word.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        model = torch.compile(model, mode=baseline.compiled)
    return model, "channels_last" if baseline.channels_last else None, baseline.dtype


@contextlib.contextmanager
def precision_of(baseline):
    """Put the baseline's settings in force; TF32 is forbidden where it is strict."""
    flags = [flag for name in baseline.settings for flag in SETTINGS[name]]
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
