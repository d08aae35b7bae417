"""How many compilers run at once."""

from types import SimpleNamespace

import psutil
import pytest

from playground.machine import memory

GIB = 1 << 30


@pytest.mark.parametrize(
    "processors, free, shared_by, expected",
    [
        (16, 128 * GIB, 1, 16),  # as many as processors
        (16, 7 * GIB, 1, 3),  # as memory has room for
        (32, 31 * GIB, 2, 7),  # the half of what the host bears
        (2, 1 * GIB, 1, 1),
        (2, 64 * GIB, 4, 1),  # a rank always builds
    ],
)
def test_processors_and_memory_bound_it(monkeypatch, processors, free, shared_by, expected):
    monkeypatch.setattr(memory.os, "sched_getaffinity", lambda pid: set(range(processors)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert memory.builds_at_once(shared_by) == expected
