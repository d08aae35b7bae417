"""The original's results, in float64 (the reference), as PyTorch runs it (eager), and with operands rounded to a precision."""

import contextlib
import functools
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from playground import tensors
from playground.judge.behaviour import copies
from playground.judge.global_state import random_state
from playground.judge.precision import (
    FAMILIES,
    DrawnInFloat32,
    Families,
    Nudged,
    Perturbed,
    Promoted,
    RoundedOperands,
    RoundedResults,
    Wider,
    tf32_families,
    without_tf32,
)
from playground.judge.probes import Probe, in_eval
from playground.judge.reordered import ORDERS, Reordered
from playground.judge.sample import ALL, Sample
from playground.tensors import Results

PERTURBATIONS = 6
# What rounds the weights once moves all outputs of a sum together: they show one error, not many. Where a right result's error
# is drawn like the permitted ones', it is beyond twice the largest of 6 in 1.7% of draws, of 24 in 0.04% (normal, one output).
ROUNDINGS, OF_FEWER = 24, 1024  # results for each precision, where the outputs are fewer
LEAST_ROUNDINGS, SECONDS = 6, 20.0  # so many where all take longer: a recurrent network takes each of its steps alone
RESULTS = (None, 1, 2)  # seeds of the roundings of every result: the mean of a row is near a number of fp16 by chance
SHUFFLES = 8
DECISIONS = 4  # pairs of runs: a decision that none of them shows is less near than most kernels' rounding
NEARNESS = 24  # units in the last place of float32 by which values are nudged to find decisions
# Other ways to compute the reference than in float64, on the device, at once.
PROMOTED = "what the original makes for itself in float32 or less was made in float64"
IN_HOST_MEMORY = "computed in host memory, since it does not fit into the device's"
NO_HOST_MEMORY = re.compile("(?i)can('|no)t allocate memory|bad_alloc|could not create a (memory|primitive(?! descriptor))")
FEW = 64  # outputs: fewer show too little of what rounding, or another input, may do


Mutate = Callable[[Any], Any]  # of a model
Kept = Callable[[Tensor], Any]


class NotSeparable(Exception):
    """The model needs more memory than there is, and its samples depend on one another, so it cannot run in chunks."""


class Oracle:
    """The original on one device, in float32, where `emulated` for a GPU that has TF32; the `sample` of its results is kept."""

    def __init__(self, model: Any, device: torch.device, emulated: bool = False, sample: Sample = ALL) -> None:
        self._model, self._device, self._sample = model, device, sample
        self.tf32_families = tf32_families(device, emulated)
        self.ways: set[str] = set()  # PROMOTED, IN_HOST_MEMORY, where those were needed
        self._draws = False  # whether a call was seen to draw random numbers
        self.tries = ROUNDINGS  # at most, of results that are few

    def eager(self, probe: Probe, mutate: Mutate = lambda model: model, kept: Kept | None = None) -> Results:
        """Return the Results of a copy of the original, or of what `mutate` makes of it, as PyTorch runs it by default."""
        return self._run(mutate(tensors.copy_model(self._model)), self._given(probe), probe, kept=kept)

    def whole(self, probe: Probe) -> Results:
        """Return what `eager` does, all of it; a large result stays on the device where there is room."""
        if self._sample.is_part:
            with contextlib.suppress(torch.OutOfMemoryError):
                return self.eager(probe, kept=lambda value: value)
        return self.eager(probe, kept=tensors.on_host)

    def sampled(self, probe: Probe, outcome: Results) -> Results:
        """Return what is kept of the original's or a variant's Results that are whole."""
        return _with_each(outcome, functools.partial(self._sampled, probe))

    def _sampled(self, probe: Probe, value: Tensor) -> Tensor:
        return tensors.on_host(self._sample.of(value, probe.name))

    def reference(self, probe: Probe, mutate: Mutate | None = None) -> Results:
        """Return the Results in float64, the reference, or those of what `mutate` makes of the model."""
        return self._in_float64(probe, contextlib.nullcontext(), mutate)

    def rounded_operands(self, probe: Probe, to: str = "tf32", families: frozenset[str] = frozenset(FAMILIES)) -> list[Results]:
        """Return Results in float64 with rounded operands; several, in float32 but for the first, if outputs are few."""
        first = self._in_float64(probe, RoundedOperands(families, to))
        if sum(output.numel() for output in first.outputs) >= OF_FEWER:
            return [first]
        results, latest = [first], time.monotonic() + SECONDS
        while len(results) < self.tries and (len(results) < LEAST_ROUNDINGS or time.monotonic() < latest):
            with without_tf32(self._device):
                mode = RoundedOperands(families, to, len(results))
                results.append(self._perturbed(probe, mode, _on_host_if_few))
        return results

    def lowered(self, probe: Probe, precision: str) -> list[Results]:
        """Return what "tf32", "fp16" or "bf16" permits, in float64: operands of products, or else results, rounded to it."""
        operands = self.rounded_operands(probe, precision)
        if precision == "tf32":
            return operands
        return [*operands, *(self._in_float64(probe, RoundedResults(precision, seed)) for seed in RESULTS)]

    def permitted(self, probe: Probe, precision: str) -> list[Results]:
        """Return results that "tf32", strict "fp32", or a model all in "fp16" or "bf16" permits."""
        if precision in tensors.HALF:
            in_float32 = Oracle(tensors.copy_model(self._model).float(), self._device, sample=self._sample)
            wide = replace(probe, inputs=tensors.in_float32(probe.inputs))
            steps = in_float32.rounded_at_each_step(wide, PERTURBATIONS, tensors.HALF[precision])
            return [*self.lowered(probe, precision), *steps]
        if precision == "tf32":
            return [*self.rounded_operands(probe, families=self.tf32_families), *self.perturbed(probe, PERTURBATIONS // 3)]
        return self.perturbed(probe, PERTURBATIONS)

    def reordered(self, probe: Probe) -> list[Results]:
        """Return what float32 gives where sums are added in other orders than PyTorch's, for each (see reordered.py)."""
        found = [self._perturbed(probe, Reordered(order)) for order in ORDERS]
        more = range(SHUFFLES if is_few(found[0].outputs) else 0)
        return found + [self._perturbed(probe, Reordered(ORDERS[0], seed)) for seed in more]

    def perturbed(self, probe: Probe, count: int, **how: Any) -> list[Results]:
        """Return `count` results of the float32 model with everything off by a few units in the last place; see Perturbed."""
        return [self._perturbed(probe, Perturbed(seed, **how)) for seed in range(count)]

    def decisions(self, probe: Probe, reference: Results) -> dict[str, Tensor]:
        """Return {gradient: how far each of its elements goes elsewhere where values nearly as near as rounding change places}.

        In float64, everything is off by up to NEARNESS units in float32's last place in one run, and by the opposite in a
        second: what follows smoothly cancels in their sum, and what a decision moves remains. Gradients that are not finite go
        nowhere.
        """
        moved = {name: torch.zeros_like(gradient) for name, gradient in reference.gradients.items() if gradient is not None}
        for seed in range(DECISIONS):
            runs = [self._in_float64(probe, Nudged(seed, units)).gradients for units in (NEARNESS, -NEARNESS)]
            for name, largest in moved.items():
                jump = (runs[0][name] + runs[1][name] - 2 * reference.gradients[name]).abs()
                torch.maximum(largest, torch.nan_to_num(jump, nan=0.0, posinf=0.0), out=largest)
        return moved

    def ties(self, probe: Probe, reference: Results) -> list[Tensor | None]:
        """Return for each output how far nudges move each element by ties of its rounding; None for one without steps."""
        moved = [tensors.as_real(true).double() * 0 if tensors.in_steps(true) else None for true in reference.outputs]
        for seed in range(DECISIONS):
            for units in (NEARNESS, -NEARNESS):
                nudged = self._in_float64(probe, Nudged(seed, units, converts=False)).outputs
                for most, result, true in zip(moved, nudged, reference.outputs, strict=True):
                    if most is not None:
                        torch.maximum(most, (tensors.as_real(result).double() - tensors.as_real(true).double()).abs(), out=most)
        return moved

    def uses_wider(self, probe: Probe, dtype: torch.dtype) -> bool:
        """Return whether the model computes anything in more bytes than `dtype` has."""
        wider = Wider(dtype)
        with wider:
            self.eager(probe)
        return wider.found

    def rounded_at_each_step(self, probe: Probe, count: int, dtype: torch.dtype) -> list[Results]:
        """Return `count` results of the float32 model in which each step is off by all that rounding to `dtype` can do."""
        return self.perturbed(probe, count, dtype=dtype, units=0.5)

    def _perturbed(self, probe: Probe, mode: Any, kept: Kept | None = None) -> Results:
        inputs = self._given(probe)  # before the mode, which would perturb the copies
        with mode:
            return self._run(tensors.copy_model(self._model), inputs, probe, kept=kept)

    def _given(self, probe: Probe, in_double: bool = False) -> list[Any]:
        if self._device.type == "cuda":
            return probe.inputs
        is_copied = [in_double and tensors.differentiable(v) and v.dtype != torch.float64 for v in probe.inputs]
        return [v if copied else copies([v])[0] for v, copied in zip(probe.inputs, is_copied, strict=True)]

    def uses(self, probe: Probe) -> set[str]:
        """Return the families of operators (see precision.FAMILIES) that the model runs."""
        families = Families()
        with families:
            self.eager(probe)
        return {name for name in FAMILIES if name in families.found}

    def _in_float64(self, probe: Probe, mode: Any, mutate: Mutate | None = None) -> Results:
        """In another way where float64 on the device, at once, is none; `ways` says which."""
        model = _doubled(tensors.copy_model(self._model))
        model = mutate(model) if mutate else model
        inputs = self._given(probe, in_double=True)
        try:
            with mode, self._drawing(), Promoted() if PROMOTED in self.ways else contextlib.nullcontext():
                return self._run(model, inputs, probe, in_double=True)
        except (torch.OutOfMemoryError, NotSeparable):
            if self._device.type == "cpu":
                raise
            del model
            torch.cuda.empty_cache()
            if self._draws:  # the device's generator draws other numbers than the host's
                raise
            on_host = Oracle(tensors.copy_model(self._model).cpu(), torch.device("cpu"), sample=self._sample)
            outcome = on_host._in_float64(probe, mode, mutate)
            self.ways |= {IN_HOST_MEMORY} | on_host.ways
            return outcome
        except RuntimeError:
            if mutate or PROMOTED in self.ways:
                raise
        inputs = self._given(probe, in_double=True)
        with mode, self._drawing(), Promoted():
            outcome = self._run(model, inputs, probe, in_double=True)
        self.ways.add(PROMOTED)
        return outcome

    def _drawing(self) -> Any:
        return DrawnInFloat32() if self._draws else contextlib.nullcontext()

    def _run(self, model: Any, inputs: list[Any], probe: Probe, in_double: bool = False, kept: Kept | None = None) -> Results:
        """The whole batch at once where it fits, otherwise in chunks if its samples are separable. Raises NotSeparable."""
        kept = kept or functools.partial(self._sampled, probe)
        model = functools.partial(in_eval, model) if probe.evaluates else model
        batch = inputs[0].shape[0] if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() else 0
        chunk = batch
        while True:
            try:
                with _raising_alike():
                    if chunk == batch:
                        return self._once(model, inputs, probe.upstream, probe.wanted_inputs, in_double, kept)
                    return _with_each(self._in_chunks(model, inputs, probe, batch, chunk, in_double), kept)
            except torch.OutOfMemoryError as error:
                if chunk <= 1:
                    raise
                chunk, on_host = (chunk + 1) // 2, error.__cause__ is not None  # see _raising_alike
            if on_host:
                gc.collect()  # not before the exception is gone, whose frames hold what was computed
            torch.cuda.empty_cache()

    def _once(
        self,
        model: Any,
        inputs: list[Any],
        upstream: list[Any] | None,
        wanted_inputs: tuple[int, ...],
        in_double: bool,
        kept: Kept = tensors.on_host,
    ) -> Results:
        on_gpu = self._device.type == "cuda"
        inputs = [v.to(self._device, copy=on_gpu) if isinstance(v, Tensor) else v for v in inputs]  # it may change them
        if in_double:  # on the device: of some problems they are gigabytes
            inputs = [value.double() if tensors.differentiable(value) else value for value in inputs]
        tensors.seed_draws()
        seeded, form = random_state(), None
        if upstream is None:
            with torch.no_grad():
                result = model(*inputs)
            outputs, gradients, form = tensors.flatten(result), {}, tensors.form(result)
        else:
            outputs, gradients = tensors.gradients(model, inputs, upstream, wanted_inputs)
        self._draws |= random_state() != seeded
        return _with_each(Results(outputs, gradients, form=form), lambda value: kept(value.detach()))

    def _in_chunks(self, model: Any, inputs: list[Any], probe: Probe, batch: int, chunk: int, in_double: bool) -> Results:
        self._require_separable(inputs, batch)
        parts = []
        for start in range(0, batch, chunk):
            part = slice(start, start + chunk)
            upstream = probe.upstream and [g if g is None else g[part] for g in probe.upstream]
            parts.append(self._once(model, _rows(inputs, batch, part), upstream, probe.wanted_inputs, in_double))
        outputs = [torch.cat(pieces) for pieces in zip(*(p.outputs for p in parts), strict=True)]
        gradients = dict.fromkeys(parts[0].gradients)
        for name, first in parts[0].gradients.items():
            if first is not None:
                pieces = [p.gradients[name] for p in parts]
                gradients[name] = torch.cat(pieces) if name.startswith("input") else torch.stack(pieces).sum(0)
        return Results(outputs, gradients, form=parts[0].form)

    def _require_separable(self, inputs: list[Any], batch: int) -> None:
        """Of the original, whatever is run in its place. In float64, since libraries compute another batch in another order."""
        model = _doubled(tensors.copy_model(self._model))

        def outputs(part: slice) -> list[Tensor]:
            return self._once(model, _rows(inputs, batch, part), None, (), in_double=True).outputs

        why = "its samples depend on one another, so it cannot be computed in chunks; make the model smaller with --set"
        reason = NotSeparable(f"out of memory: the reference does not fit into this device's at once, and {why}")
        try:
            with _raising_alike():
                both, first, second = outputs(slice(0, 2)), outputs(slice(0, 1)), outputs(slice(1, 2))
        except torch.OutOfMemoryError:
            raise
        except Exception as exception:  # batch norm refuses a single sample, for example
            raise reason from exception
        for whole, a, b in zip(both, first, second, strict=True):
            apart = torch.cat([a, b]) if a.dim() else None
            if apart is None or apart.shape != whole.shape or not torch.allclose(apart, whole, equal_nan=True):
                raise reason


class FloatOutputs:
    """The oracle of a model in 16 bits with outputs in float32, gradients and outputs under autocast in `precision`."""

    def __init__(self, model: Any, device: torch.device, emulated: bool, sample: Sample, precision: str) -> None:
        self._own = Oracle(model, device, emulated, sample)
        self._wide = Oracle(tensors.copy_model(model).float(), device, emulated, sample)
        self._own.tries = self._wide.tries = LEAST_ROUNDINGS  # numbers of 16 bits are exact in TF32
        self._precision = precision

    def __getattr__(self, name: str) -> Any:  # in float64 both are the same
        return getattr(self._own, name)

    def _both(self, name: str, probe: Probe, *given: Any, of_gradients: Sequence[Any] = (), **named: Any) -> Any:
        if probe.autocast and name == "eager":
            return self._own.eager(probe, *given, **named)
        forward = replace(probe, inputs=tensors.in_float32(probe.inputs), upstream=None, wanted_inputs=())
        found = getattr(self._wide, name)(forward, *given, **named)
        self._own._draws |= self._wide._draws
        if probe.upstream is None:
            return found
        own = getattr(self._own, name)(probe, *(of_gradients or given), **named)
        if isinstance(found, Results):
            return replace(found, gradients=own.gradients)
        pairs = zip(range(max(len(found), len(own))), itertools.cycle(found), itertools.cycle(own))
        return [replace(outputs, gradients=gradients.gradients) for _, outputs, gradients in pairs]

    eager, whole = functools.partialmethod(_both, "eager"), functools.partialmethod(_both, "whole")
    lowered, reordered = functools.partialmethod(_both, "lowered"), functools.partialmethod(_both, "reordered")
    rounded_operands = functools.partialmethod(_both, "rounded_operands")
    rounded_at_each_step = functools.partialmethod(_both, "rounded_at_each_step")

    def permitted(self, probe: Probe, precision: str) -> list[Results]:
        """Return what Oracle.permitted does: outputs of this precision, gradients of the model's own."""
        return self._both("permitted", probe, precision, of_gradients=[self._precision])


@contextlib.contextmanager
def _raising_alike() -> Iterator[None]:
    """Host memory that is not to be had raises torch.OutOfMemoryError, too, and not an error of each library's own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or NO_HOST_MEMORY.search(str(error)):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


def gradients_of(outcomes: Sequence[Results], name: str) -> list[Tensor]:
    """Return the gradients of that name that the outcomes have."""
    return [outcome.gradients[name] for outcome in outcomes if outcome.gradients[name] is not None]


def _with_each(outcome: Results, change: Callable[[Tensor], Any]) -> Results:
    gradients = {name: None if value is None else change(value) for name, value in outcome.gradients.items()}
    return replace(outcome, outputs=[change(output) for output in outcome.outputs], gradients=gradients)


def _on_host_if_few(value: Tensor) -> Tensor | None:
    return tensors.on_host(value) if value.numel() < OF_FEWER else None


def is_few(outputs: list[Tensor]) -> bool:
    return sum(output.numel() for output in outputs) < FEW


def _doubled(model: Any) -> Any:
    """The model in float64, with the tensors that are mere attributes of its modules and that Module.double leaves out."""
    for module in model.double().modules():
        for name, value in vars(module).items():
            if tensors.differentiable(value):
                setattr(module, name, value.double())
    return model


def _rows(inputs: list[Any], batch: int, part: slice) -> list[Any]:
    return [v[part] if isinstance(v, Tensor) and v.dim() and v.shape[0] == batch else v for v in inputs]
