"""How exact a wrong output is, in classes, each of which permits more than the one before, and what its error looks like."""

import math

import torch

from playground import tensors
from playground.judge.precision import LOWER

AS_PYTORCH, FLOAT32, WRONG = "as PyTorch", "float32", "wrong"
APPROXIMATE = (1e-3, 1e-2)  # of the spread
# What the size of an error does not tell apart: TF32 has the bits of fp16, but for the range.
ALIKE_IN_SIZE = {"tf32": "TF32 or fp16", "fp16": "half precision", "bf16": "half precision"}
CLASSES = (AS_PYTORCH, FLOAT32, *LOWER, *(f"approximate to {limit:g}" for limit in APPROXIMATE), WRONG)
OPERANDS = "it is what operands in"
NAMES = {"tf32": "TF32", "fp16": "fp16", "bf16": "bf16"}
NEAR, ALIKE = 0.5, 1.5  # of the distance from float64; precisions within this factor of the nearest cannot be told apart


def grade(references, outputs, permitted, skipped=()):
    """Return the class of `outputs`, which are not as exact as PyTorch; `references` are theirs.

    `permitted(name)` gives Outcomes of "float32" in other orders of adding, or of a lower precision. Classes in `skipped` are
    those that the original has itself.
    """
    if len(outputs) != len(references) or any(_is_of_another_form(*pair) for pair in zip(references, outputs, strict=True)):
        return WRONG
    for name in (FLOAT32, *LOWER):
        if name in skipped:
            continue
        outcomes = permitted(name)
        wider = [each.permitting(*(outcome.outputs[i] for outcome in outcomes)) for i, each in enumerate(references)]
        if not any(each.compare("", value).complaint for each, value in zip(wider, outputs, strict=True)):
            return name
    for limit in APPROXIMATE:
        wider = [each.accepting(limit) for each in references]
        if not any(each.compare("", value).complaint for each, value in zip(wider, outputs, strict=True)):
            return f"approximate to {limit:g}"
    return WRONG


def named(found):
    """Return a class as people read it."""
    return ALIKE_IN_SIZE.get(found, found)


def _is_of_another_form(reference, value):
    return tensors.as_real(value).shape != reference.truth.shape


def likely_precision(truth, actual, lowered):
    """Return the remark that a result is what operands in a lower precision give, such as bf16; None where it is not.

    `lowered` is {precision: [results in float64 with operands, or everything, rounded to it]}. A result that is much nearer to
    one of them than to float64 was computed in that precision.
    """
    finite = torch.isfinite(truth) & torch.isfinite(actual)

    def rms(difference):
        return torch.where(finite, difference, 0.0).square().mean().sqrt().item()

    if not truth.is_floating_point() or not finite.any() or not (error := rms(actual.double() - truth)):
        return None
    distances = {name: [rms(actual.double() - each.double()) / error for each in results] for name, results in lowered.items()}
    near = {name: min(filter(math.isfinite, each), default=math.inf) for name, each in distances.items()}
    nearest = min(near.values())
    if nearest >= NEAR:
        return None
    return f"{OPERANDS} {' or '.join(NAMES[name] for name, distance in near.items() if distance <= ALIKE * nearest)} give"
