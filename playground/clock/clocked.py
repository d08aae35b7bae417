"""What a worker does under the clocks, a variant's as well as that of the baselines."""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from playground import catalog, tensors
from playground.clock import GRAPHED, step_of
from playground.clock.memory import DONE, RELEASE, Gpu, Host, Unshareable, placed
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
        """Do what a method of Side `does`: take part in the outer clock, in memory that the referee tells of."""
        with self._circumstances(side):
            if does == "join":
                memory = Gpu() if self.device.type == "cuda" else Host(self.shared)
                self._outer = Side(self.workloads[side, mode], memory, self.clock)
            return getattr(self._outer, does)(**given) if self._outer else {}


class Side:
    """A workload under the outer clock: N calls, each on its own inputs, whose results are all copied to the referee's memory.

    What it says of itself is believed of nobody but for the inner clock's figure.
    """

    def __init__(self, workload: Workload | Graphed, memory: Gpu | Host, clock: Any) -> None:
        self._workload, self._memory, self._clock = workload, memory, clock
        self._turn: Any = None
        self._called: Any = None
        self._inputs: Any = None
        self._block: Any = None
        self._results: list[Any] = []
        self._warm: list[Any] | None = None
        self._state: list[torch.Tensor] = []  # of the model's parameters and buffers, as they are before the first call

    def join(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Make all calls of a turn that is not timed, as of outer_open of the referee, on inputs that are there: that loads
        every kernel, which would be waited for without end behind a closed gate. Return {"strides" of a call's results}.
        """
        self._state = self._workload.state() if turn["restores"] else []
        self._take(turn)
        self._results = self._called(turn["draws"])
        self._store()
        self._clock.wait()
        return {"strides": [list(value.stride()) for value in self._values()[: len(turn["calls"][0]["due"])]]}

    def ready(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Get ready for a turn, of which outer.draw of the referee tells: one warm call on old inputs, then the first state."""
        warm = self._called(None, 1)
        self._warm = [] if isinstance(self._workload, Graphed) else warm  # a graph's results always lie in the same memory
        self._take(turn)
        self._workload.restore(self._state)
        self._clock.wait()
        return {}

    def _take(self, turn: dict[str, Any]) -> None:
        if not self._turn or any(turn[what] != self._turn[what] for what in ("calls", "inputs", "results")):
            self._called = None
            self._inputs, self._block = (self._memory.opened(turn[what]) for what in ("inputs", "results"))
            given = [[placed(self._inputs, place) for place in call["given"]] for call in turn["calls"]]
            self._called = self._workload.turn(given, [call["kept"] for call in turn["calls"]])
            self._places = [placed(self._block, place) for call in turn["calls"] for place in call["due"]]
        self._turn = turn

    def call(self, null: bool, number: int) -> dict[str, Any]:
        """Answer a turn; with `null` by an earlier one's results, without work. Return {"milliseconds" of all calls by this
        process's own clock, "share": whether two of its results, or of the warm call's, lie in the same memory}.
        """
        if not null:
            self._results = []
        elif [value.shape for value in self._values()] != [place.shape for place in self._places]:
            self._results = [[torch.zeros_like(place)] for place in self._places]
        try:
            self._memory.wait_for(self._inputs, RELEASE, number)
            began = self._clock.now()
            if not null:
                self._results = self._called(self._turn["draws"])
            ended = self._clock.now()
            self._store()
        finally:  # or the referee would wait until the time limit
            self._memory.write(self._inputs, DONE, number)
        self._clock.wait()
        return {"milliseconds": self._clock.between(began, ended), "share": _share([*(self._warm or []), *self._results])}

    def _store(self) -> None:
        """Copy all results to where they are due, all of them behind the last call. Raises Unshareable for another form."""
        values, places = self._values(), self._places
        if (shapes := [value.shape for value in values]) != [place.shape for place in places]:
            raise Unshareable(f"results of the shapes {[tuple(shape) for shape in shapes[: len(places)][:4]]}")
        if wrong := [value.dtype for value, place in zip(values, places, strict=True) if value.dtype != place.dtype]:
            raise Unshareable(f"results of the types {wrong[:4]}")
        if values:
            with torch.no_grad():
                torch._foreach_copy_(places, values)

    def _values(self) -> list[torch.Tensor]:
        values = [value for result in self._results for value in flat(result)]
        return [value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value for value in values]

    def close(self) -> dict[str, Any]:
        """Let go of the memory."""
        self._turn = self._called = self._inputs = self._block = self._warm = None
        self._results, self._places = [], []
        self._memory.free()
        return {}


def flat(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result; gradients that there are not are left out."""
    if type(result) is torch.Tensor:
        return [result]
    return tensors.flatten([each for each in result if each is not None] if type(result) in (tuple, list) else result)


def _share(results: Iterable[Any]) -> bool:
    """Whether results of two calls lie in the same memory."""
    owners = [{value.untyped_storage().data_ptr() for value in flat(result) if value.numel()} for result in results]
    return len(set[int]().union(*owners)) < sum(map(len, owners))
