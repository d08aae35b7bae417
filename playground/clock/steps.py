"""Which steps of a model are timed, by name."""

MODES = ("forward", "weights", "weights_and_input")
GRAPHED = "graphed "  # before the name of a mode: the same step in a CUDA graph
WARM_UP_CALLS = 3
# Calls before those of a batch that count: after another process had the GPU, caches of code and of addresses are cold.
SETTLING_CALLS = {"cpu": 0, "cuda": 1}


def step_of(mode):
    """Return the one of MODES whose step is timed in `mode`, which may be in a CUDA graph."""
    return mode.removeprefix(GRAPHED)
