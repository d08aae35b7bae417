"""The timed side of the outer clock: N calls, each on its own inputs, whose results are all copied to the referee's memory.

What it says of itself is believed of nobody but for the inner clock's figure.
"""

from collections.abc import Iterable
from typing import Any

import torch

from playground import tensors
from playground.clock.memory import DONE, RELEASE, Gpu, Host, Unshareable, placed
from playground.clock.workload import Graphed, Workload


class Side:
    """A workload, N calls of which are a turn, in a memory, by a clock of this process."""

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
