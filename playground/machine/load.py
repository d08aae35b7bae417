"""How much of the processors other processes take while something is timed, as the operating system counts it."""

import contextlib
import time

import psutil

BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # of psutil.cpu_times; "steal" is for other virtual machines


class OtherLoad:
    """What all processes but one and its descendants use of the processors during the blocks under `watched()`.

    A system whose counters stand still (some sandboxes) counts as one on which nothing else runs.
    """

    def __init__(self, pid):
        self._pid = pid
        self._wall = self._taken = 0.0

    @contextlib.contextmanager
    def watched(self):
        own, busy, began = _family_seconds(self._pid), _busy_seconds(), time.perf_counter()
        yield
        self._wall += time.perf_counter() - began
        self._taken += _busy_seconds() - busy - (_family_seconds(self._pid) - own)

    @property
    def cores(self):
        """How many processors the others kept busy on average, counters of 10 ms permitting."""
        return max(0.0, self._taken / self._wall) if self._wall else 0.0

    @property
    def share(self):
        """`cores` as a share of all there are."""
        return min(1.0, self.cores / psutil.cpu_count())


def _busy_seconds():
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in BUSY)


def _family_seconds(pid):
    """Processor time of a process, of its descendants, and of those that have ended; 0 if it is gone."""
    seconds = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
