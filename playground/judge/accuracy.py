"""How exact a wrong output is, in classes, each of which permits more than the one before, and what its error looks like."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from playground import tensors
from playground.judge.classes import APPROXIMATE, FLOAT32, OPERANDS, SIZE_OF, WRONG
from playground.judge.precision import LOWER
from playground.judge.tolerance import Reference
from playground.tensors import Results

NAMES = {"tf32": "TF32", "fp16": "fp16", "bf16": "bf16"}
ALIKE = 1.5  # precisions whose errors are within this factor of the nearest one's cannot be told apart
SIZE = 3.0  # an error within this factor of a precision's own could be that precision's
QUANTILES = (0.25, 0.5, 0.75)  # of the errors of single elements
SPREAD = 10.0  # the factor within which a precision's own have them: a mistake leaves most elements right, or a few far off
MOST = 1 << 20  # elements whose quantiles are taken: more would take long


def grade(
    references: Sequence[Reference],
    outputs: Sequence[torch.Tensor],
    permitted: Callable[[str], Sequence[Results]],
    skipped: Collection[str] = (),
) -> str:
    """Return the class of `outputs`; `permitted(name)` gives Outcomes of float32 or a lower precision."""
    if [tensors.as_real(value).shape for value in outputs] != [reference.float64.shape for reference in references]:
        return WRONG

    def is_right(wider: Iterable[Reference]) -> bool:
        return not any(each.compare("", value).complaint for each, value in zip(wider, outputs, strict=True))

    for name in (FLOAT32, *LOWER):
        if name in skipped:
            continue
        outcomes = permitted(name)
        if is_right(each.permitting(*(outcome.outputs[i] for outcome in outcomes)) for i, each in enumerate(references)):
            return name
    for limit in APPROXIMATE:
        if is_right(each.accepting(limit) for each in references):
            return f"approximate to {limit:g}"
    return WRONG


def likely_precision(
    reference: torch.Tensor, actual: torch.Tensor, lowered: Mapping[str, Sequence[torch.Tensor]]
) -> str | None:
    """Return a remark such as "its error is that of operands in bf16", from {precision: results rounded to it}, or None."""
    finite = torch.isfinite(reference) & torch.isfinite(actual)
    if not reference.is_floating_point() or not finite.any():
        return None

    def rms(difference: torch.Tensor) -> float:
        return torch.where(finite, difference, 0.0).square().mean().sqrt().item()

    error = rms(actual.double() - reference)
    distance: dict[str, float] = {}
    ratio: dict[str, float] = {}
    for name, result in ((name, each.double()) for name, results in lowered.items() for each in results):
        own = rms(result - reference)
        if 0 < own < math.inf and error > 0:
            nearness, factor = rms(actual.double() - result) / error, max(error / own, own / error)
            distance[name] = min(nearness, distance.get(name, nearness))
            if factor < SIZE and _is_alike((actual.double() - reference)[finite], (result - reference)[finite]):
                ratio[name] = min(factor, ratio.get(name, factor))
    if distance and min(distance.values()) < 0.5:
        return f"{OPERANDS} {_names(distance)} give"
    if ratio:
        return f"{SIZE_OF} {_names(ratio)}"
    return None


def _is_alike(errors: torch.Tensor, others: torch.Tensor) -> bool:
    profiles = []
    for each in errors, others:
        each = each.abs().flatten()
        each = each[torch.linspace(0, len(each) - 1, min(len(each), MOST), dtype=torch.float64).long()]
        profiles.append(torch.quantile(each, each.new_tensor(QUANTILES)))
    found, expected = profiles
    return bool(((found <= SPREAD * expected) & (expected <= SPREAD * found)).all())


def _names(measure: Mapping[str, float]) -> str:
    nearest = min(measure.values())
    return " or ".join(NAMES[name] for name, value in measure.items() if value <= ALIKE * nearest)
