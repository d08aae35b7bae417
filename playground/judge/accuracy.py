"""How exact a wrong output is, in classes: each permits more than the one before."""

from playground import tensors
from playground.judge.precision import LOWER

AS_PYTORCH, FLOAT32, WRONG = "as PyTorch", "float32", "wrong"
APPROXIMATE = (1e-3, 1e-2)  # of the spread
HALF = "half precision"  # the name of both, which the size of an error does not tell apart
CLASSES = (AS_PYTORCH, FLOAT32, *LOWER, *(f"approximate to {limit:g}" for limit in APPROXIMATE), WRONG)


def grade(references, outputs, permitted, skipped=()):
    """The class of `outputs`, which are not as exact as PyTorch; `references` are theirs.

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
    """Return a class as people read it: fp16 and bf16 are half precision."""
    return HALF if found in ("fp16", "bf16") else found


def _is_of_another_form(reference, value):
    return tensors.as_real(value).shape != reference.truth.shape
