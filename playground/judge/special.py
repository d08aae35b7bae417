"""Probes that cannot be compared element by element: a NaN or an infinity in one sample."""

import copy
import dataclasses

import torch

from playground.judge.tolerance import Reference


class Contained:
    """A Reference of the outputs that the special value does not reach.

    What it reaches, in float64 or in eager PyTorch, is not compared: sound algorithms, such as Winograd's, spread a NaN over a
    tile, and some of cuDNN's over other samples. `note` says whether the
    last result compared was finite where the original's is not, `leaked` whether it was not where nothing is reached.
    """

    def __init__(self, reached, reference, not_finite):
        self._reached = reached
        self._reference = reference
        self._not_finite = not_finite
        self.truth, self.is_blunt = reference.truth, reference.is_blunt
        self.allowed, self.eager_error = reference.allowed, reference.eager_error
        self.is_finite = reference.is_finite
        self.note, self.leaked = None, False

    def permitting(self, *more):
        """As Reference.permitting."""
        wider = copy.copy(self)
        wider._reference = self._reference.permitting(*(result.masked_fill(self._reached, 0) for result in more))
        wider.allowed = wider._reference.allowed
        return wider

    def accepting(self, limit):
        """As Reference.accepting."""
        wider = copy.copy(self)
        wider._reference = self._reference.accepting(limit)
        wider.allowed = wider._reference.allowed
        return wider

    def compare(self, name, actual):
        """A Comparison, as Reference.compare gives it."""
        if actual is None or actual.shape != self._reached.shape:
            return self._reference.compare(name, actual)
        lost = (self._not_finite & torch.isfinite(actual)).sum().item()
        self.note = f"finite in {lost} elements where the original is not" if lost else None
        spread = (~self._reached & ~torch.isfinite(actual)).sum().item()  # elsewhere the original is finite
        compared = self._reference.compare(name, actual.masked_fill(self._reached, 0))
        self.leaked = bool(spread)
        if spread:
            complaint = f"{name} is NaN or infinite in {spread} elements that the special value cannot reach"
            return dataclasses.replace(compared, complaint=complaint)
        return compared


def references(truth, clean, eager, permitted, inputs):
    """A list of Contained, from the Outcomes with and without the special value."""
    batch = next((value.shape[0] for value in inputs if isinstance(value, torch.Tensor) and value.dim()), None)
    made = []
    for i, (true, untouched, in_eager) in enumerate(zip(truth.outputs, clean.outputs, eager.outputs, strict=True)):
        reached = (true != untouched) | ~torch.isfinite(true) | ~torch.isfinite(in_eager)
        if true.dim() and true.shape[0] == batch:  # the rest of a sample that it reaches is not looked at
            rows = reached.reshape(batch, -1).any(1)
            rows[-1] = True
            reached = rows.view(-1, *[1] * (true.dim() - 1)).expand_as(true)
        allowed = [outcome.outputs[i].masked_fill(reached, 0) for outcome in permitted]
        reference = Reference(true.masked_fill(reached, 0), in_eager.masked_fill(reached, 0), *allowed)
        made.append(Contained(reached, reference, ~torch.isfinite(true) & ~torch.isfinite(in_eager)))
    return made


def unusable(references):
    """Why nothing can be learned from references of the outputs; None where something can."""
    if any(reference.is_blunt for reference in references):
        return "rounding, or chance, moves the original's own result too much"
    if all(reference.truth.numel() == 0 for reference in references):
        return "the original's output is empty"
    if not any(torch.isfinite(reference.truth).any() for reference in references):
        return "the original's result is not finite"
    return None
