"""What a worker does under the clocks, a variant's as well as that of the baselines."""

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from playground import catalog, tensors
from playground.clock import GRAPHED, step_of
from playground.clock.memory import Gpu, Host
from playground.clock.side import Side
from playground.clock.timer import clock_for
from playground.clock.workload import Graphed, Workload
from playground.judge import domain
from playground.machine.peak_memory import peak_memory


class Clocked:
    """Requests about a `side` (a baseline's name, or "variant") in a `mode`: one of MODES, GRAPHED or not.

    `shared` is the descriptor of the memory that the process was born with, which the worker sets. A subclass calls `_take`
    before it loads any file.
    """

    shared: int
    _circumstances: Callable[[str], AbstractContextManager[Any]]  # in which a side runs
    _subject: Callable[[str], tuple[Any, ...]]  # of a side (problem, model, memory format and dtype of its inputs)

    def _take(
        self,
        problem: str,
        settings: dict[str, Any],
        place: str,
        seed: int,
        strict: bool = False,
        precision: str | None = None,
        varied: bool = False,
        float_outputs: bool = False,
    ) -> None:
        """Know the original: a problem's file, the constants that are replaced there, where it runs, the seed of its weights.

        `place` is "cuda", "cpu" or "emulator", `precision` that of weights and inputs, one of HALF; `varied`: see judge.domain.
        It is left to the subclass that TF32 is forbidden (`strict`), and that a variant's outputs are float32.
        """
        self._hold_clock(torch.device(tensors.PLACES[place]))
        self.path, self.settings, self.seed = problem, settings, seed
        self.strict, self.precision, self.varied, self.float_outputs = strict, precision, varied, float_outputs

    def _problem(self) -> Any:
        """The problem's module, a new one each time: so what torch.compile keeps with a class belongs to one baseline."""
        problem = tensors.in_precision(catalog.load_problem(self.path, self.settings), self.precision)
        if self.varied:
            domain.vary(problem)
        return problem

    def _hold_clock(self, device: torch.device) -> None:
        self.device, self.clock = device, clock_for(device)
        self.workloads: dict[tuple[str, str], Any] = {}  # by side and mode
        self._outer: Side | None = None
        self._forget()

    def _forget(self) -> None:
        """Let go of contents and results."""
        self._content: Any = None  # of the last timed call
        self._result: Any = None
        self._held: list[Any] = []

    def start(self, side: str, mode: str, seeds: Sequence[int]) -> dict[str, Any]:
        """Prepare the side, and call it once for each seed, to warm up. A graph keeps the memory of its whole step, so those of
        other modes are given up. Return {"milliseconds": of making content, flushing and calling, "peak_mib"}.
        """
        self.clock.keep_memory()
        self._forget()
        for other in [key for key in self.workloads if key[1].startswith(GRAPHED) and key[1] != mode]:
            del self.workloads[other]
        with self._circumstances(side):
            problem, model, *inputs_as = self._subject(side)
            plain = Workload(problem, model, step_of(mode), self.device, *inputs_as)
            workload = Graphed(plain, seeds[0]) if mode.startswith(GRAPHED) else plain
            self.workloads[side, mode] = workload
            for seed in seeds:
                began = time.perf_counter()
                content = workload.fresh(seed)
                self.clock.flush()
                _, peak_mib = peak_memory(functools.partial(workload, content), self.device)
                self.clock.wait()
                milliseconds = (time.perf_counter() - began) * 1e3
        return {"milliseconds": milliseconds, "peak_mib": peak_mib}

    def time(self, side: str, mode: str, seeds: Sequence[int]) -> dict[str, Any]:
        """Time one call for each seed, on content that follows from it, and keep the last one's result.

        Return the fields of worker.replies.Times; see clock.timer's clocks. The first SETTLING_CALLS are for settling.
        """
        self._forget()
        workload, calls = self.workloads[side, mode], []
        with self._circumstances(side):
            for seed in seeds:
                self._result = None
                self._content = content = workload.fresh(seed)
                self.clock.flush()
                milliseconds, is_late, self._result = self.clock.time(functools.partial(workload, content))
                tensors.require_plain(self._result)
                calls.append((milliseconds, is_late, self.clock.flush_ms, self.clock.launch_ms))
        return dict(zip(("samples_ms", "late", "flush_ms", "launch_ms"), map(list, zip(*calls, strict=True)), strict=True))

    def result(self, side: str, mode: str, outputs: Path | str) -> dict[str, Any]:
        """Write what the last timed call gave, its outputs or its gradients, to the file `outputs`."""
        names = self.workloads[side, mode].names(self._content)
        gradients = {} if names is None else dict(zip(names, self._result, strict=True))
        tensors.save_results(tensors.Results(tensors.flatten(self._result) if names is None else [], gradients), outputs)
        return {}

    def hold(self, side: str, mode: str, seeds: Sequence[int]) -> dict[str, Any]:
        """Make contents for `repeat`."""
        self._held = [self.workloads[side, mode].fresh(seed) for seed in seeds]
        self.clock.wait()
        return {}

    def repeat(self, side: str, mode: str, count: int) -> dict[str, Any]:
        """Call `count` times back to back on the contents that are held, with no clock in this process."""
        with self._circumstances(side):
            for call in range(count):
                self.workloads[side, mode](self._held[call % len(self._held)])
            self.clock.wait()
        return {}

    def outer(self, side: str, mode: str, does: str, **given: Any) -> dict[str, Any]:
        """Do what a method of clock.side's Side `does`: take part in the outer clock, in memory that the referee tells of."""
        with self._circumstances(side):
            if does == "join":
                memory = Gpu() if self.device.type == "cuda" else Host(self.shared)
                self._outer = Side(self.workloads[side, mode], memory, self.clock)
            return getattr(self._outer, does)(**given) if self._outer else {}
