"""The ways in which PyTorch itself can run the original, each with the flags and the conversion it needs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Baseline:
    """One of these ways; with PyTorch's defaults where nothing else is said."""

    compiled: str | None = None  # torch.compile's mode
    channels_last: bool = False
    strict: bool = False  # TF32 is forbidden in convolutions and matrix products
    dtype: str | None = None  # to which model and inputs are converted: lower than that of a variant which declares none
    settings: tuple[str, ...] = ()  # names of SETTINGS: what a variant has set for itself


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


def named(name: str) -> Baseline:
    """Return the Baseline of a name of BASELINES, or of one with settings behind it, such as "eager+benchmark"."""
    usual, *settings = name.split("+")
    return replace(BASELINES[usual], settings=tuple(settings))


def under(settings: Sequence[str], names: list[str]) -> list[str]:
    """Return what to time beside a variant that has set these: eager, and all under the same but strict ones beside TF32."""
    if not settings:
        return names
    fitting = [name for name in names if not (named(name).strict and "tf32" in settings)]
    return [names[0], *("+".join([name, *settings]) for name in fitting)]


def names_for(place: str, mode: str, quick: bool, max_autotune: bool, strict: bool) -> list[str]:
    """Return the baselines worth timing: channels_last, strict ones and fp16 beside a forward pass, few when in a hurry.

    `strict` says that TF32 is forbidden to all. Of a training step strict baselines take up to 20 times as long as the others.
    """
    wanted = {"channels_last": not mode.startswith("weights"), "compile": not quick, "compile_max": max_autotune}
    names = ["eager", *(name for name, is_wanted in wanted.items() if is_wanted)]
    if place == "cuda" and mode == "forward" and not strict:
        names += [f"{name}_fp32" for name in names] + ([] if quick else ["compile_fp16"])
    return names


def distinct(names: Iterable[str], has_layouts: bool, uses_tf32: bool) -> list[str]:
    """Return the names but for those that run the very code of another one.

    Those are channels_last where nothing has 4 or 5 dimensions (`has_layouts`), and strict ones where nothing may use TF32.
    """
    known = {name: named(name) for name in names}
    laid_out = {name for name, each in known.items() if each.channels_last and not each.dtype}
    return [name for name, each in known.items() if (has_layouts or name not in laid_out) and (uses_tf32 or not each.strict)]


def peers(names: Iterable[str], precision: str | float | None, settings: Sequence[str] = ()) -> list[str]:
    """Return the baselines, under a variant's settings, at least as precise as it: of one in "fp32" the strict ones, or all in
    float32 where none is (nothing uses TF32); in fp16 only of one that declares a lower precision, too.
    """
    alike = [name for name in names if named(name).settings == tuple(settings)]
    if precision not in ("fp32", "tf32"):
        return alike
    alike = [name for name in alike if named(name).dtype is None]
    strict = [name for name in alike if named(name).strict]
    return strict if strict and precision == "fp32" else alike
