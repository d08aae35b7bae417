"""What other processes use of the processors: with counters that say what the test wants, and this process's own."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from playground.machine import load
from playground.machine.load import Granted, OtherLoad, Others

BURN = "import time\nwhile time.process_time() < 0.2: pass\n{then}"


@pytest.fixture
def counters(monkeypatch):
    """counters(watched, seconds, own=..., system=...): a block of that many seconds on the two processors that count of three.

    All processes used so much of each kind in it, those that are watched `own` of it.
    """

    def pass_by(watched, seconds, own, **kinds):
        idle = SimpleNamespace(user=5.0, idle=0.0)
        busy = SimpleNamespace(**{"user": 5.0, "idle": 99.0} | kinds)
        elsewhere = SimpleNamespace(user=1e6)
        all_times, mine, now = iter([idle, busy]), iter([1.0, 1.0 + own]), iter([0.0, seconds])
        monkeypatch.setattr(watched, "_processors", [0, 2])
        monkeypatch.setattr(watched, "_own_seconds", lambda: next(mine))
        fake = SimpleNamespace(cpu_times=lambda percpu: [next(all_times), elsewhere, idle])
        monkeypatch.setattr(load, "psutil", fake)
        monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: next(now)))
        with watched.watched():
            pass
        monkeypatch.undo()

    return pass_by


def test_what_others_use(counters):
    watched = OtherLoad()
    assert (watched.cores, watched.share) == (0.0, 0.0)
    counters(watched, 2.0, own=1.5, user=6.5, system=0.5)
    assert watched.cores == pytest.approx(0.25)
    assert watched.share == pytest.approx(0.25 / len(load.usable_processors()))
    counters(watched, 1.0, own=0.0, user=5.0, nice=1.0, steal=1.0)  # blocks add up
    assert watched.cores == pytest.approx(2.5 / 3)


@pytest.mark.parametrize("user", [5.0, 5.9])
def test_counters_that_stand_still_or_lag_show_no_load(counters, user):
    watched = OtherLoad()
    counters(watched, 1.0, own=1.0, user=user)
    assert (watched.cores, watched.share) == (0.0, 0.0)


@pytest.mark.parametrize("then", ["", "time.sleep(60)"], ids=["ended", "running"])
def test_the_time_of_descendants_is_the_process_own(then):
    before = OtherLoad(os.getpid())._own_seconds()
    command = [sys.executable, "-c", BURN.format(then="print(flush=True);" + then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            if not then:
                child.wait()
            family = OtherLoad(os.getpid(), child.pid)
            assert 0.15 <= family._own_seconds() - before < 0.35  # once each; the counters go in steps of 10 ms
        finally:
            child.kill()


def test_a_process_that_is_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert OtherLoad(child.pid)._own_seconds() == 0.0


def test_who_was_busy():
    others = Others(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            time.sleep(0.5)
            found = others.busiest(0.1, most=9)
            own = Others(child.pid)
            time.sleep(0.3)
            assert not any(f"pid {child.pid}," in line for line in own.busiest(0.1, most=9))
        finally:
            child.kill()
    (line,) = [line for line in found if f"pid {child.pid}," in line]
    assert line.startswith(f"{Path(sys.executable).name} -c, pid ") and line.endswith(" cores")


@pytest.mark.parametrize(
    "ran, waited, granted",
    [
        ([2.0], [0.0], 2.0),
        ([0.1], [1.9], 0.1),  # others had the processor
        ([0.0], [0.0], 2.0),  # it slept
        ([2.0, 2.0, 0.0], [0.0, 0.0, 2.0], 2.0),  # its own threads had it
        ([0.5, 0.5], [0.2, 0.2], 1.6),
    ],
)
def test_seconds_in_which_a_process_is_starved_do_not_count(monkeypatch, ran, waited, granted):
    looks = [{}, {thread: (int(a * 1e9), int(b * 1e9)) for thread, (a, b) in enumerate(zip(ran, waited, strict=True))}]
    monkeypatch.setattr(load, "_scheduled", lambda pids: looks.pop(0))
    counted = Granted()
    counted.look([1], 3.0)
    assert counted.seconds == 3.0  # of the time before the first look nothing is known
    counted.look([1], 2.0)
    assert counted.seconds == pytest.approx(3.0 + granted)
