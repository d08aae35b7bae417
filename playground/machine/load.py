"""What other processes take of this machine while something is timed, as the operating system counts it."""

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import psutil

# Ids of the processes that this run has stopped while something is timed. They start and use nothing, so between two turns they
# are passed over: with 300 of them, reading all took most of a second, thirty times as long as the turn.
standing: set[int] = set()
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # of psutil.cpu_times; "steal" is for other virtual machines
LEAST_SHARE = 0.1  # of a processor: who uses less is not named


class OtherLoad:
    """What all processes but `pids` and their descendants use of the processors, under `watched()`; 0 if nothing counts it."""

    def __init__(self, *pids: int) -> None:
        self._own = _processes(family(pids, but=standing))
        self._processors = usable_processors()
        self._wall = self._taken = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        own, busy, began = self._own_seconds(), self._busy_seconds(), time.perf_counter()
        yield
        self._wall += time.perf_counter() - began
        self._taken += self._busy_seconds() - busy - (self._own_seconds() - own)

    @property
    def cores(self) -> float:
        """Return how many processors the others kept busy on average; the counters advance in steps of 10 ms."""
        return max(0.0, self._taken / self._wall) if self._wall else 0.0

    @property
    def share(self) -> float:
        """Return `cores` as a share of all there are."""
        return min(1.0, self.cores / len(self._processors))

    def _own_seconds(self) -> float:
        return sum(_seconds(process) for process in self._own)

    def _busy_seconds(self) -> float:
        times = psutil.cpu_times(percpu=True)
        return sum(getattr(times[i], kind, 0.0) for i in self._processors for kind in BUSY)


class Others:
    """Who they are: every process but those of `pids` and their descendants, from the moment this is made."""

    def __init__(self, *pids: int) -> None:
        self._own = family(pids, but=standing) | standing
        self._began = time.perf_counter()
        self._steal = _stolen()
        self._seconds = {process.pid: _seconds(process, children=False) for process in self._strangers()}

    def busiest(self, least_steal: float, most: int = 2) -> list[str]:
        """Return ['python3 train.py, pid 4242, used 0.98 cores'] above a tenth since then, and virtual machines' steal."""
        wall = time.perf_counter() - self._began
        used = []
        for process in self._strangers():
            with contextlib.suppress(psutil.Error):
                cores = (_seconds(process, children=False) - self._seconds.get(process.pid, 0.0)) / wall
                if cores >= LEAST_SHARE:  # 'python3 train.py': the program and its first argument, without folders
                    words = process.cmdline()[:2] or [process.name()]
                    called = " ".join(Path(word).name or word for word in words)[:60]
                    used.append((cores, f"{called}, pid {process.pid}, used {cores:.2f} cores"))
        steal = (_stolen() - self._steal) / wall
        if steal >= least_steal:
            used.append((steal, f"other virtual machines on the same host took {steal:.2f} cores"))
        return [text for _, text in sorted(used, reverse=True)[:most]]

    def _strangers(self) -> Iterator[psutil.Process]:
        return (process for process in psutil.process_iter() if process.pid not in self._own)


class Granted:
    """What a machine has granted a family of processes: `seconds`, but for those in which they only waited for a processor."""

    def __init__(self) -> None:
        self.seconds = 0.0
        # Of the last look: {thread: (nanoseconds on a processor, nanoseconds of waiting for one)}.
        self._tasks: dict[str, tuple[int, int]] | None = None

    def look(self, pids: Iterable[int], seconds: float) -> None:
        """Add the `seconds` since the last look, in which these processes were there. To be called again and again."""
        before, self._tasks = self._tasks, _scheduled(pids)
        if before is not None:
            pairs = [(own, before.get(task, (0, 0))) for task, own in self._tasks.items()]
            ran, waited = (1e-9 * sum(now[what] - then[what] for now, then in pairs) for what in (0, 1))
            seconds = min(seconds, max(ran, seconds - waited))
        self.seconds += seconds


def _scheduled(pids: Iterable[int]) -> dict[str, tuple[int, int]]:
    """{thread: (nanoseconds on a processor, nanoseconds of waiting for one)} of processes, where Linux tells."""
    found = {}
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # it has ended
                ran, waited, _ = map(int, file.read_text().split())
                found[file.parent.name] = ran, waited
    return found


def usable_processors() -> list[int]:
    """Return the processors that this process may run on, as places in psutil's list, which containers may shorten."""
    known = range(len(psutil.cpu_times(percpu=True)))
    return [i for i in known if i in os.sched_getaffinity(0)] or list(known)


def family(pids: Iterable[int], sessions: Collection[int] = (), but: Collection[int] = ()) -> set[int]:
    """Return the ids of these processes, of all that they started, and of all in these sessions; `but` are none of them."""
    found: set[int] = set(pids)
    children: dict[int, list[int]] = {}
    for pid, parent, session in _all_processes(but):
        children.setdefault(parent, []).append(pid)
        if session in sessions:
            found.add(pid)
    left = list(found)
    while left:
        new = [child for child in children.get(left.pop(), ()) if child not in found]
        found.update(new)
        left += new
    return found


def is_traced(pid: int) -> bool:
    """Return whether a debugger is attached to a process, where Linux tells."""
    with contextlib.suppress(OSError):
        return "\nTracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _all_processes(but: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (its id, its parent's, its session's) of each process but those, faster than by psutil."""
    for name in (entry.name for entry in os.scandir("/proc")):  # read without pathlib, which takes as long again
        if not name.isdecimal() or int(name) in but:
            continue
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            try:
                _, parent, _, session = os.read(file, 1024).rpartition(b")")[2].split(None, 4)[:4]
            finally:
                os.close(file)
            yield int(name), int(parent), int(session)


def _processes(pids: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def _seconds(process: psutil.Process, children: bool = True) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return times.user + times.system + (times.children_user + times.children_system if children else 0.0)
    return 0.0


def _stolen() -> float:
    return getattr(psutil.cpu_times(), "steal", 0.0)
