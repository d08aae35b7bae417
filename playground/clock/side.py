"""The timed side of the outer clock: N calls, each on its own inputs, whose results are all copied to the referee's memory.

What it says of itself is believed of nobody but for the inner clock's figure.
"""

import torch

from playground import tensors
from playground.clock.memory import DONE, RELEASE, Unshareable, placed
from playground.clock.workload import Graphed


class Side:
    """A workload, N calls of which are a turn. `memory` is a Gpu or a Host."""

    def __init__(self, workload, memory):
        self._workload, self._memory = workload, memory
        self._turn = self._called = self._results = self._warm = None
        self._state = None  # of the model's parameters and buffers, as they are before the first call

    def join(self, turn):
        """Make all calls of a turn that is not timed, as of outer.open of the referee, on inputs that are there.

        That loads every kernel: behind a closed gate it would be waited for without end.
        """
        self._state = self._workload.state() if turn["restores"] else []
        self._take(turn)
        self._results = self._called(turn["draws"])
        self._store()
        self._memory.synchronize()
        return {}

    def ready(self, turn):
        """Get ready for a turn: one warm call on old inputs, then the model's state as it was at first.

        `turn` is what outer.draw of the referee says.
        """
        warm = self._called(None, 1)
        self._warm = [] if isinstance(self._workload, Graphed) else warm  # a graph's results always lie in the same memory
        self._take(turn)
        self._workload.restore(self._state)
        self._memory.synchronize()
        return {}

    def _take(self, turn):
        if not self._turn or any(turn[what] != self._turn[what] for what in ("calls", "inputs", "results")):
            self._called = None
            self._inputs, self._block = (self._memory.opened(turn[what]) for what in ("inputs", "results"))
            given = [[placed(self._inputs, place) for place in call["given"]] for call in turn["calls"]]
            self._called = self._workload.turn(given, [call["kept"] for call in turn["calls"]])
            self._places = [placed(self._block, place) for call in turn["calls"] for place in call["due"]]
            self._shapes, self._types = [place.shape for place in self._places], [place.dtype for place in self._places]
        self._turn = turn

    def call(self, null, number):
        """Answer a turn. Returns {"milliseconds" of all calls by this process's own clock, "share"}.

        The latter says whether two of its results, or of the warm call's, lie in the same memory. With `null` it does no work:
        an earlier turn's results are its answer.
        """
        if not null:
            self._results = None
        elif [value.shape for value in self._values()] != self._shapes:
            self._results = [[torch.zeros_like(place)] for place in self._places]
        try:
            self._memory.wait_for(self._inputs, RELEASE, number)
            began = self._memory.now()
            if not null:
                self._results = self._called(self._turn["draws"])
            ended = self._memory.now()
            self._store()
        finally:  # or the referee would wait until the time limit
            self._memory.write(self._inputs, DONE, number)
        self._memory.synchronize()
        return {"milliseconds": self._memory.between(began, ended), "share": _share([*self._warm, *self._results])}

    def _store(self):
        """Copy all results to where they are due, all of them behind the last call. Raises Unshareable for another form.

        The host's part of it is on the clock where calls are bound by their launches; a turn without work hides it.
        """
        values = self._values()
        if (shapes := [value.shape for value in values]) != self._shapes:
            raise Unshareable(f"results of the shapes {[tuple(shape) for shape in shapes[: len(self._places)][:4]]}")
        if (types := [value.dtype for value in values]) != self._types:
            wrong = [each for each, due in zip(types, self._types, strict=True) if each != due]
            raise Unshareable(f"results of the types {wrong[:4]}")
        if values:
            with torch.no_grad():
                torch._foreach_copy_(self._places, values)

    def _values(self):
        values = [value for result in self._results for value in flat(result)]
        return [value.resolve_conj().resolve_neg() if value.is_conj() or value.is_neg() else value for value in values]

    def close(self):
        """Let go of the memory."""
        self._turn = self._called = self._results = self._warm = self._places = self._inputs = self._block = None
        self._memory.free()


def flat(result):
    """Return the tensors of a result; gradients that there are not are left out."""
    if type(result) is torch.Tensor:
        return [result]
    return tensors.flatten([each for each in result if each is not None] if type(result) in (tuple, list) else result)


def _share(results):
    """Whether results of two calls lie in the same memory."""
    owners = [{value.untyped_storage().data_ptr() for value in flat(result) if value.numel()} for result in results]
    return len(set().union(*owners)) < sum(map(len, owners))
