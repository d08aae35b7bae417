"""What a worker can be asked: the names and their functions."""

import contextlib

import torch

from playground.worker.baselines import Baselines
from playground.worker.candidate import Candidate
from playground.worker.clocked import memory_is_short
from playground.worker.referee import Referee

# Requests after which memory stays where it is.
BETWEEN_CALLS = ("time", "join_outer", "serve_outer", "call_outer", "outer_time", "outer_await_quiet")


def answerer():
    """Return a function (name, arguments) -> result, with the objects behind it. It raises what the request raises."""
    roles = {"candidate": Candidate(), "referee": Referee(), "baselines": Baselines()}

    def answer(name, arguments):
        role, method = name.split(".")
        try:
            return getattr(roles[role], method)(**arguments)
        finally:
            if method not in BETWEEN_CALLS or memory_is_short():  # between its timed calls a side keeps its memory
                _release_memory()

    return answer


def _release_memory():
    """Give back what torch's CUDA allocator keeps: another worker needs it now."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # after a fault nothing can be given back
            torch.cuda.empty_cache()
