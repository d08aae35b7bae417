"""How far from float64 a result may be.

Errors are deviations in units of the *spread* of the true values: a sum of half a million sigmoids is large whatever the kernel
does. Two are taken, the largest and the root mean square: where rounding sends a maximum's gradient to another element, the
largest says nothing.

Allowed is, for each, twice the largest of
- the error of eager PyTorch on the same inputs,
- the error that the stated precision mode permits: of the float64 model on operands rounded to TF32, and of the float32 model
  with everything off by a few more units in the last place (see precision.py),
- a few units in the last place of the largest value in float32, which no float32 result can avoid.

A gradient may also go where a decision that is as near as rounding sends it: if it is off by more than is allowed, the
decisions are looked for (Oracle.decisions), and twice what they move is taken from the error of each element. In a few elements
two decisions may cancel, of which a right result has one.

So is the number to which rounding to steps (integers, fp8) takes a value near a tie (Oracle.ties), or where permitted results
differ in a few elements: those may be off by as much, the others not at all.

A value that is zero in mathematics, such as the gradient of a bias in front of a batch norm, has no spread; its scale is the
size of the terms that cancel in it, which follows from what the perturbations do to it. Small values beside large ones are
compared with themselves, too: `lost` finds those that are off by a tenth, and by many times what any permitted result is off
there. Where half of the spread or more is allowed, only errors below a twentieth of it pass, from float64 or from eager
PyTorch.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from playground.judge.classes import deviations, two_digits
from playground.judge.precision import Perturbed
from playground.tensors import as_real, in_steps

SLACK = 2.0
ZERO = 1e-3  # of float32's error: what is smaller is zero in mathematics
BLUNT = 0.5  # of the spread: what allows more than this cannot tell right from wrong
NEAR = 0.05  # of the spread: an error, or a distance from eager, that is right where what is allowed cannot tell
UNITS_IN_THE_LAST_PLACE = 4
BLOCK = 1 << 22  # elements that are compared at a time: of some problems all would be many gigabytes
CANCELLED = 1e-3  # of all elements: in so many two near decisions may cancel
SMOOTHLY = 1e-4  # of the furthest that decisions move: what follows them not quite smoothly goes so far without any
SELDOM = 1e-2  # of all elements in steps, or one: where rounding moves more that are near no tie, it may move any
DIGIT = 0.1  # of a small value: one that is off by more has no right digit
BEYOND = 30.0  # times the largest error of the permitted results in that element, of which there are a few
MANY = 1e-3  # of all elements, and no fewer than SOME: so many small values have to be lost
SOME = 16
TINY = 1e-30  # smaller values, or others on the way to them, may be flushed to zero
FLOAT32_EPSILON = torch.finfo(torch.float32).eps
SPECIAL_VALUES = {"NaN": torch.isnan, "inf": torch.isposinf, "-inf": torch.isneginf}


@dataclass(frozen=True)
class Comparison:
    """One tensor compared with float64; errors are in units of its spread. `complaint` is None when it is right.

    `decided`: it is right for near decisions alone, whose part is not in `max_error`. `unjudged`: the original's own result
    moves by as much. Of special.Contained, `swallowed` says where it is finite and the original's is not, `leaked` that the
    opposite is.
    """

    max_error: float | None
    allowed: float | None
    eager_error: float | None
    complaint: str | None
    permitted_error: float | None = None
    decided: bool = False
    unjudged: bool = False
    swallowed: str | None = None
    leaked: bool = False


class Reference:
    """A true tensor in float64, with what eager PyTorch makes of it and what is allowed.

    `permitted` are results that the precision mode may give. `spread` is the standard deviation of the finite elements, and of
    `others`, results for further inputs; where they do not vary, their largest magnitude; where they are zero but for rounding,
    the size of the terms that cancel; or else 1. Elements that overflow in eager alone count as not finite. `decisions()`,
    called when the tensor would be wrong without, gives how far near decisions move each element. Of complex tensors `float64`
    has the two parts along a last dimension.
    """

    def __init__(
        self,
        reference: Tensor,
        eager: Tensor,
        *permitted: Tensor,
        others: Sequence[Tensor] = (),
        decisions: Callable[[], Tensor] | None = None,
    ) -> None:
        self._shape, self.dtype, self.is_in_steps = reference.shape, eager.dtype, in_steps(reference)
        reference, eager, *results = map(as_real, (reference, eager, *permitted))
        self.float64 = reference
        self.others = others = [as_real(other) for other in others]
        self._decisions = decisions
        self._eager = eager if not torch.isfinite(eager).all() else None  # where its NaN and infinities have to be
        self._blunt_eager = None
        self.is_finite = self._eager is None and bool(torch.isfinite(reference).all())
        self._excused = torch.zeros_like(reference, dtype=torch.bool)
        self._comparable = torch.isfinite(reference) & torch.isfinite(eager)
        self.is_nowhere_finite = reference.numel() > 0 and not self._comparable.any().item()
        finite = reference if self._comparable.all() else reference[self._comparable]
        finite = finite.flatten() if reference.is_floating_point() else reference.new_empty(0)
        magnitude = max(-finite.min().item(), finite.max().item()) if finite.numel() else 0.0
        deviation = _deviation(finite, others)
        self.spread = 1.0
        deviations = [self._errors(result) for result in (eager, *results)]
        noise = max(rms for _, rms in deviations)
        self.is_zero = reference.is_floating_point() and magnitude < ZERO * noise
        if self.is_zero:
            self.spread = noise / (Perturbed.UNITS * FLOAT32_EPSILON)
        else:
            self.spread = (deviation if deviation > 1e-12 * magnitude else magnitude) or 1.0
        errors = [(largest / self.spread, rms / self.spread) for largest, rms in deviations]
        self.eager_error, self._eager_rms = errors[0]
        last_place = UNITS_IN_THE_LAST_PLACE * FLOAT32_EPSILON * magnitude / self.spread
        self.allowed, self.allowed_rms = SLACK * max(self.eager_error, last_place), SLACK * max(self._eager_rms, last_place)
        self.permitted_error = 0.0
        self._moved = self._moved_seldom(eager, *results)
        if self._moved is not None:  # where rounding decides few, it decides those alone
            self.allowed, self.allowed_rms = SLACK * last_place, SLACK * last_place
        self._permit(errors[1:] if self._moved is None else [])
        if self.is_blunt:
            self._blunt_eager = eager
        self._small: Any = None  # where they are, as a mask, and how far permitted results are off there
        if results and self.dtype.is_floating_point and not (self.is_blunt or self.is_zero):
            self._find_small(eager, *results)

    def _moved_seldom(self, *results: Tensor) -> Tensor | None:
        """Return how far results and ties move each element of what is in steps; None where results move many others."""
        if not self.is_in_steps:
            return None
        moved = torch.zeros((), dtype=torch.float64)
        for result in results:
            if (result != self.float64).any():
                moved = torch.maximum(moved, (result.double() - self.float64.double()).abs().nan_to_num(0.0, 0.0))
        few = max(1, SELDOM * self.float64.numel())
        if moved.count_nonzero() > few and self._decisions:
            tied = self._decisions().double()
            return torch.maximum(moved, tied) if (moved > tied).sum() <= few else None
        return moved if moved.count_nonzero() <= few else None

    def _find_small(self, *results: Tensor) -> None:
        """Find the values of which all digits may be wrong within what is allowed, if they are many."""
        size = self.float64.abs()
        least = max(TINY, torch.finfo(self.dtype).tiny)
        small = self._comparable & (size > least) & (DIGIT * size < self.allowed * self.spread)
        if self._are_many(small.sum().item()):
            self._small, self._small_errors = small, torch.zeros((), dtype=torch.float64)
            self._permit_small(results)

    def _permit_small(self, results: Sequence[Tensor]) -> None:
        if self._small is None:
            return
        for result in results:
            error = (result[self._small].double() - self.float64[self._small]).abs().nan_to_num(nan=math.inf)
            self._small_errors = torch.maximum(self._small_errors, error)

    def _are_many(self, count: float) -> bool:
        return count >= max(SOME, MANY * self.float64.numel())

    def lost(self, actual: Tensor) -> tuple[float, float, float] | None:
        """Return (share of all, value given, true value) of lost small values, of the largest; None where few are."""
        if self._small is None:
            return None
        true = self.float64[self._small]
        given = as_real(actual)[self._small.to(actual.device)].cpu().double()
        wrong = (given - true).abs() > torch.maximum(DIGIT * true.abs(), BEYOND * self._small_errors)
        if not self._are_many(count := wrong.sum().item()):
            return None
        largest = torch.where(wrong, true.abs(), 0.0).argmax()
        return count / self.float64.numel(), given[largest].item(), true[largest].item()

    def permitting(self, *more: Tensor) -> Self:
        """Return this Reference where a variant's own precision permits these results as well, and overflows where they do."""
        wider = copy.copy(self)
        results = [as_real(result) for result in more]
        for result in results:
            wider._excused = wider._excused | (torch.isfinite(self.float64) & ~torch.isfinite(result))
        wider._comparable = self._comparable & ~wider._excused
        wider._permit([wider._errors(result) for result in results])
        wider._permit_small(results)
        return wider

    def accepting(self, limit: float) -> Self:
        """Return this Reference where errors up to `limit`, of its spread, were accepted."""
        wider = copy.copy(self)
        wider.allowed, wider.allowed_rms = max(self.allowed, limit), max(self.allowed_rms, limit)
        return wider

    def beside(self, reference: Tensor, eager: Tensor, decisions: Callable[[], Tensor] | None = None) -> "Reference":
        """Return a Reference for other inputs of the same distribution, which allows twice what this one does, at least."""
        other = Reference(reference, eager, others=[self.float64, *self.others], decisions=decisions)
        other.allowed = max(other.allowed, SLACK * self.allowed)
        other.allowed_rms = max(other.allowed_rms, SLACK * self.allowed_rms)
        return other

    def _permit(self, errors: list[tuple[float, float]]) -> None:
        self.permitted_error = max(self.permitted_error, *(largest for largest, _ in errors), 0.0)
        self.allowed = max(self.allowed, SLACK * self.permitted_error)
        self.allowed_rms = max(self.allowed_rms, *(SLACK * rms for _, rms in errors), 0.0)
        self.is_blunt = self.allowed_rms >= BLUNT and self.float64.numel() > 0

    def _errors(self, actual: Tensor) -> tuple[float, float]:
        """(largest, root mean square) deviation over the spread, where both references are finite."""
        if self.float64.numel() == 0:
            return 0.0, 0.0
        largest, squares = torch.zeros(2, dtype=torch.float64)
        for value, *others in zip(*map(_blocks, (actual, self.float64, self._comparable)), strict=True):
            reference, comparable = (each.to(value.device) for each in others)
            difference = torch.where(comparable, _difference(value, reference), 0.0)
            largest = torch.maximum(largest, torch.linalg.vector_norm(difference, torch.inf).cpu())  # NaN stays NaN
            squares = squares + torch.linalg.vector_norm(difference).square().cpu()
        return largest.item() / self.spread, (squares / self.float64.numel()).sqrt().item() / self.spread

    def compare(self, name: str, actual: Tensor | None) -> Comparison:
        """Return a Comparison. `actual`, on any device, is None where the variant gave nothing; `name` begins the complaint."""
        max_error, complaint, decided, unjudged = None, self._wrong_form(name, actual), False, False
        if actual is not None and complaint is None:
            actual = as_real(actual)
            complaint = self._wrongly_special(name, actual)
        if actual is not None and complaint is None:
            max_error, complaint = self._too_far(name, actual)
            if complaint and (self._decisions or self._moved is not None) and (self.is_in_steps or not self.is_blunt):
                moved = self._decisions() if self._decisions else torch.zeros(())
                moved = moved if self._moved is None else torch.maximum(moved.double(), self._moved)
                max_error, complaint = self._too_far(name, self._undecided(actual.cpu(), moved))
                decided = complaint is None
            unjudged = complaint is not None and self.is_blunt
        return Comparison(max_error, self.allowed, self.eager_error, complaint, self.permitted_error, decided, unjudged)

    def _undecided(self, actual: Tensor, moved: Tensor) -> Tensor:
        """It, each element nearer to float64 by as much as near decisions may have moved it, and not beyond.

        A few that are still too far off, where two decisions may cancel, may have moved by the root mean square of all that are
        moved.
        """
        difference, moved = _difference(actual, self.float64), moved.double()
        if self.is_in_steps:
            return torch.where(difference.abs() <= moved, self.float64, actual)
        rest = (difference.abs() - SLACK * moved).clamp(min=0)
        too_far = rest > self.allowed * self.spread
        if 0 < too_far.sum() <= max(1, CANCELLED * rest.numel()):
            is_moved = moved > SMOOTHLY * moved.max()
            usual = moved[is_moved].square().mean().sqrt()
            further = (difference.abs() - SLACK * torch.maximum(moved, usual)).clamp(min=0)
            rest = torch.where(too_far & is_moved, further, rest)
        return self.float64 + difference.sign() * rest

    def takes(self, values: Tensor) -> bool:
        """Return whether these values, of any type, would be right; complex ones have their parts in a last dimension."""
        if values.shape != self.float64.shape or self._wrongly_special("", values):
            return False
        return self._too_far("", values)[1] is None

    def _too_far(self, name: str, actual: Tensor) -> tuple[float, str | None]:
        """(largest error, what to say of it or None)."""
        max_error, rms_error = self._errors(actual)
        complaint = None
        if self.is_blunt:
            # Or it gives what the original gives, whose own result is as far from float64.
            eager = self._blunt_eager
            is_near = eager is not None and largest_difference(actual, eager) <= NEAR * self.spread
            if not (max_error <= NEAR or is_near):
                complaint = f"{name} cannot be judged: rounding or chance alone moves it by {deviations(self.allowed_rms)}"
                complaint += f", and it is off by {two_digits(max_error)}"
        elif not max_error <= self.allowed and not self.float64.is_floating_point():
            pairs = zip(*map(_blocks, (actual, self.float64)), strict=True)
            count = sum((value.cpu() != true).sum().item() for value, true in pairs)
            complaint = f"{name} is off by up to {max_error:g} in {count} of {actual.numel()} whole numbers"
            complaint += f"; allowed are {self.allowed:g}" if self.allowed else ""
        elif not max_error <= self.allowed:
            complaint = f"{name} is off by {self._far(max_error)} (allowed {two_digits(self.allowed)})"
        elif not rms_error <= self.allowed_rms:
            complaint = f"{name} is off by {self._far(rms_error)} (RMS, allowed {two_digits(self.allowed_rms)})"
        return max_error, complaint

    def _far(self, error: float) -> str:
        return f"{two_digits(error)} of the terms that cancel in it" if self.is_zero else deviations(error)

    def _wrong_form(self, name: str, actual: Tensor | None) -> str | None:
        if actual is None:
            return f"{name} is missing"
        if actual.shape != self._shape:
            return f"{name} has the shape {tuple(actual.shape)} instead of {tuple(self._shape)}"
        if actual.dtype != self.dtype:
            return f"{name} has the type {actual.dtype} instead of {self.dtype}"
        return None

    def _is_right_beyond(self, actual: Tensor) -> Tensor:
        """Where it is as float64 has it, within what is allowed, though the original, in 16 bits, overflows on its way."""
        if not self.dtype.is_floating_point or self.dtype.itemsize != 2:
            return torch.zeros_like(self._excused)
        true = self.float64
        near = (actual.double() - true).abs() <= self.allowed * self.spread + torch.finfo(self.dtype).eps * true.abs()
        return torch.isfinite(actual) & torch.isfinite(true) & (true.abs() <= torch.finfo(self.dtype).max) & near

    def _wrongly_special(self, name: str, actual: Tensor) -> str | None:
        """What is wrong with its NaN and infinities, which must stand where eager has them and nowhere else."""
        if self._eager is None and all(torch.isfinite(block).all() for block in _blocks(actual)):
            return None
        actual = actual.cpu()
        for what, test in SPECIAL_VALUES.items():
            found = test(actual) & ~self._excused
            expected = torch.zeros_like(found) if self._eager is None else test(self._eager) & ~self._excused
            if too_many := (found & ~expected).sum().item():
                return f"{name} is {what} in {too_many} of {actual.numel()} elements where the original is not"
            if too_few := (expected & ~found & ~self._is_right_beyond(actual)).sum().item():
                return f"{name} is not {what} in {too_few} of {actual.numel()} elements where the original is"
        return None


def _deviation(finite: Tensor, others: Sequence[Tensor]) -> float:
    if finite.numel() == 0:
        return 0.0
    parts = [finite.double(), *(other[torch.isfinite(other)].double() for other in others)]
    return (torch.cat([part.flatten() for part in parts]) if others else parts[0]).std(correction=0).item()


def _difference(actual: Tensor, true: Tensor) -> Tensor:
    """Of two tensors, in float64; of whole numbers that differ one at least, beyond 2^53 too."""
    difference = actual.double() - true.double()
    return difference if true.is_floating_point() else torch.where((actual != true) & (difference == 0), 1.0, difference)


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).split(BLOCK)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return that of two tensors of one form, in their units; infinite where only one has a NaN, or another infinity."""
    largest = 0.0
    for value, other in zip(*map(_blocks, map(as_real, (actual, expected))), strict=True):
        other = other.to(value.device)
        same = (value == other) | (torch.isnan(value) & torch.isnan(other))
        difference = torch.where(same, 0.0, (value.double() - other.double()).abs())
        largest = max(largest, torch.nan_to_num(difference, nan=math.inf).max().item())
    return largest


def wrong(complaint: str | None) -> Comparison:
    """Return a Comparison for what cannot even be compared."""
    return Comparison(None, None, None, complaint)


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the first with a complaint, else the one nearest to what is allowed."""
    return max(comparisons, key=lambda c: (bool(c.complaint), not c.complaint and (c.max_error or 0.0) / (c.allowed or 1.0)))
