"""What other processes use of the processors: with counters that say what the test wants, and this process's own."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from playground.machine import load
from playground.machine.load import OtherLoad

BURN = "import time\nwhile time.process_time() < 0.2: pass\n{then}"


@pytest.fixture
def counters(monkeypatch):
    """counters(seconds, system=..., own=...): one block of that many seconds, in which all and one process used so much."""

    def pass_by(watched, seconds, own, **kinds):
        busy = iter([SimpleNamespace(user=5.0), SimpleNamespace(**{"user": 5.0, "idle": 99.0} | kinds)])
        mine, now = iter([1.0, 1.0 + own]), iter([0.0, seconds])
        monkeypatch.setattr(load, "psutil", SimpleNamespace(cpu_times=lambda: next(busy), cpu_count=lambda: 4))
        monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: next(now)))
        monkeypatch.setattr(load, "_family_seconds", lambda pid: next(mine))
        with watched.watched():
            pass

    return pass_by


def test_what_others_use(counters):
    watched = OtherLoad(1)
    assert (watched.cores, watched.share) == (0.0, 0.0)
    counters(watched, 2.0, own=1.5, user=6.5, system=0.5)
    assert watched.cores == pytest.approx(0.25) and watched.share == pytest.approx(0.0625)
    counters(watched, 1.0, own=0.0, user=5.0, nice=1.0, steal=1.0)  # blocks add up
    assert watched.cores == pytest.approx(2.5 / 3)


@pytest.mark.parametrize("user", [5.0, 5.9])
def test_counters_that_stand_still_or_lag_show_no_load(counters, user):
    watched = OtherLoad(1)
    counters(watched, 1.0, own=1.0, user=user)
    assert (watched.cores, watched.share) == (0.0, 0.0)


@pytest.mark.parametrize("then", ["", "time.sleep(60)"], ids=["ended", "running"])
def test_the_time_of_descendants_is_the_process_own(then):
    before = load._family_seconds(os.getpid())
    command = [sys.executable, "-c", BURN.format(then="print(flush=True);" + then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            if not then:
                child.wait()
            assert load._family_seconds(os.getpid()) - before >= 0.15  # the counters go in steps of 10 ms
        finally:
            child.kill()


def test_a_process_that_is_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert load._family_seconds(child.pid) == 0.0
