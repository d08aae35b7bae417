"""How times are taken: what is timed, by which of two clocks, in whose turn, and what follows from it.

The inner clock (timer, clocked, race) is the timed process's own; the outer one (outer, referee, memory) belongs to processes
that no judged file runs in. docs/how_times_are_taken.md has both.
"""

MODES = ("forward", "weights", "weights_and_input")  # the steps of a model that are timed
GRAPHED = "graphed "  # before the name of a mode: the same step in a CUDA graph
WARM_UP_CALLS = 3
# Calls before those of a batch that count: after another process had the GPU, caches of code and of addresses are cold.
SETTLING_CALLS = {"cpu": 0, "cuda": 1}


def step_of(mode: str) -> str:
    """Return the one of MODES whose step is timed in `mode`, which may be in a CUDA graph."""
    return mode.removeprefix(GRAPHED)
