"""Processes with all that they have started: stopped, continued, ended."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from playground.judge.failure import GOES_ON
from playground.machine.load import family, standing

CPUCLOCK_SCHED = 2  # posix-timers.h: of the clock of another process, all of its threads together

SETTLE_SECONDS, LOOK_SECONDS = 2.0, 1e-3  # until stopped processes stand still; between looks

END_SECONDS = 10.0  # in which killed processes end, one that frees a GPU's memory, too


class Stopped:
    """Processes that stand still, with all that they started."""

    def __init__(self, processes: Iterable[Any]) -> None:
        self._processes = processes
        self.family = families(processes, standing)

    def stop(self) -> None:
        """Stop those that are known, at once."""
        send(self.family, signal.SIGSTOP)

    def has_grown(self) -> bool:
        """Stop all that they have started since. Returns whether there was any."""
        known = set(self.family)
        while new := families(self._processes, standing) - self.family:
            send(new, signal.SIGSTOP)
            self.family |= new
        return self.family != known

    def used(self) -> dict[int, float]:
        """Return {pid: milliseconds of processor time} of those that are known, all threads together."""
        found = {}
        for pid in self.family:
            with contextlib.suppress(OSError):  # it has ended
                found[pid] = time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED) * 1e3
        return found

    def since(self, before: dict[int, float]) -> float:
        """Return the milliseconds that they have used since `used` gave this. Raises OSError where one ended."""
        now = self.used()
        if before.keys() - now.keys():
            raise OSError(GOES_ON)
        return sum(used - before.get(pid, used) for pid, used in now.items())

    def is_still(self) -> bool:
        """Return whether each thread known is stopped, by a debugger perhaps not all, or has ended."""
        for pid in self.family:
            for file in Path(f"/proc/{pid}/task").glob("*/stat"):
                with contextlib.suppress(OSError):
                    if file.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                        return False
        return True

    def settled(self) -> dict[int, float]:
        """Return what `used` does once they stand still. Raises OSError where they do not within SETTLE_SECONDS."""
        latest = time.monotonic() + SETTLE_SECONDS
        while not self.is_still():
            if time.monotonic() > latest:
                raise OSError(GOES_ON)
            time.sleep(LOOK_SECONDS)
        return self.used()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Raise OSError where they do not stand still meanwhile: a timer's SIGCONT, say, has them go on, and stop again."""
        stood = self.settled()
        yield
        if self.has_grown():
            raise OSError(f"{GOES_ON}: they started another")
        if ran := self.since(stood):
            raise OSError(f"{GOES_ON}: they used {ran:.3g} ms of processor time")

    def go_on(self) -> None:
        """Have all of them go on."""
        send(self.family, signal.SIGCONT)


@contextlib.contextmanager
def end_awaited(pid: int) -> Iterator[None]:
    """Wait, when the block is left, until a process has ended: a sandbox's first does so when all others there have."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # an older system, or it has ended
        yield
        return
    try:
        yield
        select.select([descriptor], [], [], END_SECONDS)
    finally:
        os.close(descriptor)


def kill_family(process: Any) -> None:
    """End a Popen or Forked that has a session of its own, and everything it started."""
    send(families([process]), signal.SIGKILL)
    process.wait()


def families(processes: Iterable[Any], but: Collection[int] = ()) -> set[int]:
    """The process ids of Popens that have sessions of their own, and of everything in their trees and sessions."""
    alive = {process.pid for process in processes if process.returncode is None}  # a number may be another's afterwards
    return family(alive, {process.pid for process in processes}, but)


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
