"""Probes that cannot be compared element by element: NaN and infinities in some samples."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from playground.judge.tolerance import Comparison, Reference
from playground.tensors import Results, differentiable


class Contained(Reference):
    """A Reference of the outputs that no special value reaches, in float64 or in eager PyTorch; see also `_reached`."""

    def __init__(self, reached: Tensor, reference: Tensor, eager: Tensor, permitted: Sequence[Tensor]) -> None:
        self._reached = reached
        self._not_finite = ~torch.isfinite(reference) & ~torch.isfinite(eager)
        super().__init__(*(each.masked_fill(reached, 0) for each in (reference, eager, *permitted)))

    def permitting(self, *more: Tensor) -> "Contained":
        """Return what Reference.permitting does."""
        return super().permitting(*(result.masked_fill(self._reached, 0) for result in more))

    def compare(self, name: str, actual: Tensor | None) -> Comparison:
        """Return a Comparison, as Reference.compare gives it."""
        if actual is None or actual.shape != self._reached.shape:
            return super().compare(name, actual)
        actual = actual.cpu()
        compared = super().compare(name, actual.masked_fill(self._reached, 0))
        if lost := (self._not_finite & torch.isfinite(actual)).sum().item():
            compared = replace(compared, swallowed=f"loses NaN or infinity in {lost} element{'s' * (lost > 1)}")
        if spread := (~self._reached & ~torch.isfinite(actual)).sum().item():
            complaint = f"{name} is NaN or infinite in {spread} elements where the original is finite"
            compared = replace(compared, complaint=complaint, leaked=True)
        return compared


def references(
    reference: Results, clean: Results, eager: Results, permitted: Sequence[Results], inputs: list[Tensor]
) -> list[Contained]:
    """Return a list of Contained, from the Outcomes with and without the special values."""
    special = next((~torch.isfinite(v) for v in inputs if differentiable(v) and not torch.isfinite(v).all()), None)
    made = []
    for i, (true, untouched, in_eager) in enumerate(zip(reference.outputs, clean.outputs, eager.outputs, strict=True)):
        finite = torch.isfinite(true) & torch.isfinite(in_eager)
        reached = (true != untouched) | ~finite
        if special is not None:
            reached = _reached(reached, finite, special.to(true.device), is_number=true.is_floating_point())
        made.append(Contained(reached, true, in_eager, [outcome.outputs[i] for outcome in permitted]))
    return made


def _reached(changed: Tensor, finite: Tensor, special: Tensor, is_number: bool) -> Tensor:
    """Which elements of an output are not compared. The special values, where `special` is, change the `changed` ones.

    As a rule all of a sample that one is in or reaches. But what is finite in the original is compared where it computes
    numbers from those in their own place alone, or where all of a sample of many special values is finite.
    """
    if is_number and changed.shape == special.shape and not (changed & ~special).any():
        return ~finite
    if not (changed.dim() and special.dim()) or len(changed) != len(special):
        return changed
    of_samples = [each.reshape(len(each), -1) for each in (changed, finite, special)]
    is_changed, is_finite, held = of_samples[0].any(1), of_samples[1].all(1), of_samples[2].sum(1)
    skipped = (is_changed | (held > 0)) & ~(is_number & is_finite & (held > 1))
    return skipped.view(-1, *[1] * (changed.dim() - 1)).expand_as(changed)


def unusable(references: Sequence[Reference]) -> str | None:
    """Return why nothing can be learned from references of the outputs; None where something can."""
    if any(reference.is_blunt for reference in references):
        return "rounding, or chance, moves the original's own result too much"
    if all(reference.float64.numel() == 0 for reference in references):
        return "the original's output is empty"
    is_finite = any(torch.isfinite(reference.float64).any() for reference in references)
    return None if is_finite else "the original's result is not finite"
