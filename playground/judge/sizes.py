"""The same model at other sizes, through the constants of its file.

A constant is free when another value changes what get_inputs gives, leaves get_init_inputs as it is, and the original still
runs.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from playground import catalog, tensors
from playground.judge import domain

BATCH_NAMES = ("batch_size", "batch", "batchsize", "num_samples", "bs", "b", "n")
REDUCED_BATCH = 3
REDUCED_ELEMENTS = {"cuda": 1 << 21, "cpu": 1 << 16, "emulator": 1 << 13}  # of all inputs together
ODD_STEP = 3


class Sizes:
    """`runs(problem)` says whether the original runs. `settings` are those of the own size, `precision` is all problems'."""

    def __init__(
        self, path: Path, settings: dict[str, Any], place: str, runs: Callable[[Any], bool], precision: str | None = None
    ) -> None:
        self._device = tensors.PLACES[place]
        self._precision, self._path, self._settings, self._runs = precision, path, settings, runs
        self._budget = REDUCED_ELEMENTS[place]
        self._varies = False
        self._problems: dict[str, Any] = {"own": self._loaded(settings)}
        self._init_inputs = self._drawn_init_inputs(self._problems["own"])
        self._names = catalog.constants(path)
        self._changes: dict[Any, dict[str, Any]] = {self._problems["own"]: {}}  # problem -> how it was made
        self._shapes = functools.cache(self._drawn_shapes)

    def problem(self, size: str) -> Any:
        """Return the problem's module at "own", "reduced", "batch 1" or "odd" size; None where it has no constants for that."""
        if size not in self._problems:
            self._problems[size] = {"reduced": self._reduced, "batch 1": self._of_one, "odd": self._odd}[size]()
        return self._problems[size]

    def settings(self, size: str) -> dict[str, Any]:
        """Return the constants that `problem(size)` changes, with their values there."""
        return self._changes[self.problem(size)]

    def vary(self) -> str | None:
        """Have all problems, also those to come, give varied contents: see domain.vary. Returns why one cannot, or None."""
        self._varies = True
        return next(filter(None, map(domain.vary, filter(None, self._problems.values()))), None)

    def _loaded(self, settings: dict[str, Any]) -> Any:
        loaded = tensors.in_precision(catalog.load_problem(self._path, settings), self._precision)
        if self._varies:
            domain.vary(loaded)
        return loaded

    def _reduced(self) -> Any:
        """A batch of 3, and the largest other constants halved until the inputs are small."""
        batch, problem = self._batch_name, self._problems["own"]
        if batch and getattr(problem, batch) > REDUCED_BATCH:
            problem = self._changed(problem, batch, REDUCED_BATCH) or problem
        stuck = {batch}
        while self._elements(problem) > self._budget:
            sizes = {name: value for name, value in self._constants(problem).items() if name not in stuck and value > 1}
            if not sizes:
                break
            largest = max(sizes, key=sizes.__getitem__)
            halved = self._changed(problem, largest, sizes[largest] // 2)
            if halved is None:
                stuck.add(largest)
            problem = halved or problem
        return problem

    def _of_one(self) -> Any:
        return self._changed(self.problem("reduced"), self._batch_name, 1) if self._batch_name else None

    def _odd(self) -> Any:
        """Every free constant but the batch a little smaller than at the reduced size: odd where that is even, or even."""
        problem = reduced = self.problem("reduced")
        step = ODD_STEP
        for name, value in self._constants(reduced).items():
            other = value - step
            if name != self._batch_name and other > 0 and (smaller := self._changed(problem, name, other)):
                problem = smaller
                step += 2  # so that constants that are equal differ
        return None if problem is reduced else problem

    @functools.cached_property
    def _batch_name(self) -> str:
        """The free constant of a usual name that is the first dimension of an input, and no other of it; "" without one."""
        own = self._problems["own"]
        firsts = [shape[0] for shape in self._shapes(own) if isinstance(shape, tuple) and shape]
        likely = [name for name, value in self._constants(own).items() if value > 1 and value in firsts]
        named = [name for usual in BATCH_NAMES for name in likely if name.lower() == usual]
        return next((name for name in named if any(self._is_batch(name, size) for size in (1, 2))), "")

    def _is_batch(self, name: str, size: int) -> bool:
        own = self._problems["own"]
        value, changed = getattr(own, name), self._changed(own, name, size)
        if changed is None:
            return False
        pairs = zip(self._shapes(own), self._shapes(changed), strict=True)
        sides = [zip(a, b, strict=True) for a, b in pairs if isinstance(a, tuple) and isinstance(b, tuple)]
        return all(sum(a == value != b for a, b in each) < 2 for each in sides)

    def _changed(self, problem: Any, name: str, value: int) -> Any:
        """The problem with another value of a constant, where that is free; None elsewhere."""
        changes = {**self._changes[problem], name: value}
        try:  # an untrusted file may raise anything at a size that makes no sense to it
            changed = self._loaded({**self._settings, **changes})
            same_weights = self._drawn_init_inputs(changed) == self._init_inputs
            if not same_weights or self._shapes(changed) == self._shapes(problem) or not self._runs(changed):
                return None
        except Exception:
            return None
        self._changes[changed] = changes
        return changed

    @staticmethod
    def _drawn_init_inputs(problem: Any) -> str:
        """As text: there may be random tensors among them."""
        torch.manual_seed(0)
        return repr(problem.get_init_inputs())

    def _constants(self, problem: Any) -> dict[str, int]:
        """{name: value} of the integers that the file assigns at its top level."""
        found = {name: getattr(problem, name, None) for name in self._names}
        return {name: value for name, value in found.items() if type(value) is int}

    def _drawn_shapes(self, problem: Any) -> list[tuple[int, ...] | str]:
        inputs = tensors.made_on(self._device, problem.get_inputs)
        return [tuple(v.shape) if isinstance(v, torch.Tensor) else repr(v) for v in inputs]

    def _elements(self, problem: Any) -> int:
        return sum(math.prod(shape) for shape in self._shapes(problem) if isinstance(shape, tuple))
