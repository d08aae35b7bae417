"""The ways in which PyTorch itself can run the original, each with the flags and the conversion it needs."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Baseline:
    """`strict` forbids TF32 in convolutions and matrix products; otherwise PyTorch's defaults hold.

    `compiled` is torch.compile's mode, None for a baseline that is not compiled. Model and inputs are converted to `dtype`,
    a name of torch's, beforehand where there is one: a lower precision than that of any variant which declares none.
    `settings` are names of SETTINGS: what a variant has set for itself, so that this is timed under the same.
    """

    compiled: str | None = None
    channels_last: bool = False
    strict: bool = False
    dtype: str | None = None
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
BASELINES["compile_fp16"] = Baseline(compiled="default", channels_last=True, dtype="float16")
SETTINGS = ("benchmark", "tf32")  # what a variant may set for the whole process, see prepared.FLAGS


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
