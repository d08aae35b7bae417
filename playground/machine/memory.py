"""Memory and processors, which judgements and builds side by side share, and how many of them fit on this machine."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from . import requirements

SHARE = 0.85  # of what is free: the rest is for what an estimate leaves out
LOOK_AGAIN = 0.5  # seconds
# Of a control group, as a container has one: the limit, what counts to it, and the key of what the kernel takes back from that.
GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
RECLAIMED = "inactive_file"
MOST_JUDGED_AT_ONCE, CORES_OF_A_JUDGEMENT = 8, 2
COMPILER_BYTES = 2 << 30  # what nvcc or a C++ compiler takes at most for one file of the project, torch's headers included


def free_on_host(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes of the machine, or of the container that this is."""
    free = psutil.virtual_memory().available
    for limit, usage in GROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such limit: "max" is no number
            most, used = (int((root / name).read_text()) for name in (limit, usage))
            told = dict(line.split() for line in (root / limit).with_name("memory.stat").read_text().splitlines())
            free = min(free, max(0, most - used + int(told.get(RECLAIMED, 0))))
    return free


def builds_at_once(shared_by: int = 1) -> int:
    """Return as many as there are processors and free memory for, at least one. `shared_by`: so many processes here build."""
    return max(1, min(len(os.sched_getaffinity(0)), free_on_host() // COMPILER_BYTES) // shared_by)


def judged_at_once(shared_by: int = 1) -> int:
    """Return how many models are judged at once on one GPU: each keeps a referee, a candidate and two baselines busy."""
    return max(1, min(MOST_JUDGED_AT_ONCE, builds_at_once(shared_by) // CORES_OF_A_JUDGEMENT))


def limit(pid: int, share: float) -> None:
    """Have a living process's allocations beyond this share of what is free raise there from now on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        allowed = process.memory_info().data + int(share * free_on_host())
        _, hard = process.rlimit(psutil.RLIMIT_DATA)
        process.rlimit(psutil.RLIMIT_DATA, (allowed if hard == psutil.RLIM_INFINITY else min(allowed, hard), hard))


def free_on_gpu() -> int:
    """Return the bytes of the GPU that torch calls cuda:0, as nvidia-smi tells; 0 if it does not."""
    free = requirements.ask_gpu("memory.free") or ""
    return int(free) << 20 if free.isdecimal() else 0


class Shares:
    """What there is of each resource, and who has how much of it. Threads share it."""

    def __init__(self, capacity: Mapping[str, float] | None = None) -> None:
        self._capacity = dict(capacity or {})  # resource -> how much there is
        self._taken: dict[object, tuple[str, Mapping[str, float]]] = {}  # id -> (kind, {resource: amount})
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, kind: str, need: Mapping[str, float], is_over: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Wait for room for `need` beside all others, or to be alone of this kind, or `is_over()`, and have it under `with`."""
        me = object()
        with self._changed:
            while not (self._fits(kind, need) or is_over()):
                self._changed.wait(LOOK_AGAIN)
            self._taken[me] = kind, need
        try:
            yield
        finally:
            with self._changed:
                del self._taken[me]
                self._changed.notify_all()

    def _fits(self, kind: str, need: Mapping[str, float]) -> bool:
        others = [each for other, each in self._taken.values()]
        alone = all(other != kind for other, _ in self._taken.values())
        return alone or all(sum(each[what] for each in others) + need[what] <= self._capacity[what] for what in need)


class Processors(Shares):
    """The processors of a run: a build waits for its part, or to be the only one; a judgement takes its part at once."""

    def __init__(self, count: int) -> None:
        super().__init__({"processors": count})

    def build(self, count: int, is_over: Callable[[], bool] = lambda: False) -> AbstractContextManager[None]:
        """Return a context in which a build has so many processors."""
        return self.taken("build", {"processors": count}, is_over)

    def judgement(self) -> AbstractContextManager[None]:
        """Return a context in which a judgement has a processor."""
        return self.taken("judgement", {"processors": 1}, lambda: True)


class Memory(Shares):
    """Bytes of the "host", of "files" and of the "device", shared by a process's runs; `shared_by` processes divide a host."""

    def __init__(self) -> None:
        super().__init__()
        self.shared_by = 1

    def capacity(self, folder: Path, on_gpu: bool) -> dict[str, float]:
        """Return {"host", "files" (in `folder`), "device"}: the bytes that all together may take."""
        with self._changed:
            if not self._taken or not self._capacity:
                host, files = free_on_host(), shutil.disk_usage(folder).free
                self._capacity = {"host": SHARE * host / self.shared_by, "files": SHARE * files / self.shared_by, "device": 0}
            if on_gpu and not self._capacity["device"]:
                self._capacity["device"] = SHARE * free_on_gpu()
            return dict(self._capacity)


MEMORY = Memory()
