"""How exact a wrong output is, in classes, each of which permits more than the one before, and whose error it has."""

import math

import torch

from playground import tensors
from playground.judge.precision import LOWER

AS_PYTORCH, FLOAT32, WRONG = "as PyTorch", "float32", "wrong"
APPROXIMATE = (1e-3, 1e-2)  # of the spread
HALF = "half precision"  # the name of both, which the size of an error does not tell apart
CLASSES = (AS_PYTORCH, FLOAT32, *LOWER, *(f"approximate to {limit:g}" for limit in APPROXIMATE), WRONG)
OPERANDS = "it is what operands in"
NAMES = {"tf32": "TF32", "fp16": "fp16", "bf16": "bf16"}
ALIKE = 1.5  # precisions within this factor of the nearest one's distance cannot be told apart


def grade(references, outputs, permitted, skipped=()):
    """Return the class of `outputs`, which are not as exact as PyTorch; `references` are theirs.

    `permitted(name)` gives Outcomes of "float32" in other orders of adding, or of a lower precision. Classes in `skipped` are
    those that the original has itself.
    """
    if [tensors.as_real(value).shape for value in outputs] != [reference.float64.shape for reference in references]:
        return WRONG

    def is_right(wider):
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


def named(found):
    """Return a class as people read it: fp16 and bf16 are half precision."""
    return HALF if found in ("fp16", "bf16") else found


def likely_precision(reference, actual, lowered):
    """Return a remark on an error, such as "it is what operands in bf16 give"; None where it is that of no precision.

    `lowered` is {precision: [results in float64 with operands, or everything, rounded to it]}. A result that is nearer to one
    of them than to float64 was computed in that precision. What an error's size alone says is the class.
    """
    finite = torch.isfinite(reference) & torch.isfinite(actual)
    if not reference.is_floating_point() or not finite.any():
        return None

    def rms(difference):
        return torch.where(finite, difference, 0.0).square().mean().sqrt().item()

    error, distances = rms(actual.double() - reference), {}
    for name, results in lowered.items():
        apart = [result for result in results if 0 < rms(result.double() - reference) < math.inf]
        distances[name] = min((rms(actual.double() - result.double()) for result in apart), default=math.inf)
    nearest = min(distances.values(), default=math.inf)
    if not nearest < error / 2:
        return None
    return f"{OPERANDS} {' or '.join(NAMES[name] for name, value in distances.items() if value <= ALIKE * nearest)} give"


def names_one(complaint):
    """Return whether a complaint has a remark on the precision already."""
    return OPERANDS in complaint
