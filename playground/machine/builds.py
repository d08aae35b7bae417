"""How many compilers a machine bears side by side."""

import os

import psutil

COMPILER_BYTES = 2 << 30  # what nvcc or a C++ compiler takes at most for one file of the project, torch's headers included


def builds_at_once(shared_by=1):
    """As many as there are processors and free memory for, at least one. `shared_by`: so many processes of this host build."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = psutil.virtual_memory().available // COMPILER_BYTES
    return max(1, min(usable, fitting) // shared_by)
