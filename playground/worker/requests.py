"""What a worker can be asked: the names and their functions."""

import contextlib
import functools

import torch

from playground.worker.baselines import Baselines
from playground.worker.candidate import Candidate
from playground.worker.referee import Referee

# Requests after which memory stays where it is.
BETWEEN_CALLS = ("time", "join_outer", "call_outer", "await_quiet")


def answerer():
    """Return a function (name, arguments) -> result, with the objects behind it. It raises what the request raises."""
    roles = {"candidate": Candidate(), "referee": Referee(), "baselines": Baselines()}

    def answer(name, arguments):
        role, *path = name.split(".")
        try:
            return functools.reduce(getattr, path, roles[role])(**arguments)
        finally:
            with contextlib.suppress(RuntimeError):  # after a fault nothing can be given back
                free, total = torch.cuda.mem_get_info() if torch.cuda.is_initialized() else (0, 0)
                if total and (path[-1] not in BETWEEN_CALLS or free < total / 2):
                    torch.cuda.empty_cache()  # what torch's allocator keeps, another worker needs now

    return answer
