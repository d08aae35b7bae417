"""How much a machine bears side by side: compilers, judgements on one GPU."""

import os

from playground.machine.memory import free_on_host

MOST_JUDGED_AT_ONCE, CORES_OF_A_JUDGEMENT = 8, 2
COMPILER_BYTES = 2 << 30  # what nvcc or a C++ compiler takes at most for one file of the project, torch's headers included


def builds_at_once(shared_by=1):
    """Return as many as there are processors and free memory for, at least one. `shared_by`: so many processes here build."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = free_on_host() // COMPILER_BYTES
    return max(1, min(usable, fitting) // shared_by)


def judged_at_once(shared_by=1):
    """Return how many models are judged at once on one GPU: each keeps a referee, a candidate and two baselines busy."""
    return max(1, min(MOST_JUDGED_AT_ONCE, builds_at_once(shared_by) // CORES_OF_A_JUDGEMENT))
