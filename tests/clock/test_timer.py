"""The clock, on steps of a known duration and a known size, and on steps that tamper with it."""

import collections
import multiprocessing
import sys

import pytest
import torch

from playground.clock.timer import (
    CYCLES_PER_MS,
    HEAD_START_MS,
    CpuClock,
    CudaClock,
    clock_for,
)
from playground.machine.peak_memory import _resident_kib, peak_memory

CPU = torch.device("cpu")


class SimulatedGpu(CudaClock):
    """The clock of a device and a host that are simulated, in ms; `lag` is what the host takes to see that an event is over."""

    class Event:
        def __init__(self, enable_timing):
            self.at = None

    def __init__(self, lag=0.005, launch=0.001, old_driver=False):
        self.host, self.streams, self.lag, self.launch = 0.0, {"current": 0.0, "other": 0.0}, lag, launch
        self._all_streams = None if old_driver else self
        self._event, self._elapsed = self.Event, lambda start, end: end.at - start.at
        self._record = lambda event, stream: setattr(event, "at", self.start("current", 0.0))
        self._current_stream = lambda: "current"
        self._sleep = lambda cycles: self.start("current", cycles / CYCLES_PER_MS)
        self.wait = lambda: self._until(max(self.streams.values()))
        self._now = lambda: self.host * 1e6
        self._launches_ms = collections.deque([0.0], maxlen=10)

    def start(self, stream, milliseconds):
        """When the work that is launched on a stream is over."""
        self.host += self.launch
        self.streams[stream] = max(self.host, self.streams[stream]) + milliseconds
        return self.streams[stream]

    def wait_for(self, event):
        self.streams = {stream: max(event.at, at) for stream, at in self.streams.items()}

    def awaited_by(self, stream):
        self.streams[stream] = max(self.streams.values())

    def _until(self, at):
        self.host = max(self.host + self.lag / 10, at + self.lag if at > self.host else 0.0)


@pytest.mark.parametrize("lag", [0.005, 0.02, 0.09], ids=["quick", "usual", "busy"])
@pytest.mark.parametrize("old_driver", [False, True])
def test_work_on_another_stream_counts_and_a_slow_host_does_not(lag, old_driver):
    gpu = SimulatedGpu(lag, old_driver=old_driver)
    milliseconds, late, _ = gpu.time(lambda: gpu.start("current", 0.05))
    assert milliseconds == pytest.approx(0.05, abs=0.01) and not late
    milliseconds, late, _ = gpu.time(lambda: (gpu.start("current", 0.05), gpu.start("other", 2.0)))
    most = HEAD_START_MS if old_driver else 0.0  # of it is over before the first event
    assert 1.99 - most < milliseconds < 2.01 + lag and late


def test_work_on_another_stream_does_not_begin_before_the_first_event():
    gpu = SimulatedGpu()
    milliseconds, late, _ = gpu.time(lambda: (gpu.start("current", 0.05), gpu.start("other", 0.2)))
    assert milliseconds == pytest.approx(0.2, abs=0.01) and late


def test_a_host_that_launches_slowly_is_waited_for():
    gpu = SimulatedGpu()
    step = lambda: [gpu.start("current", 0.001) for _ in range(8)]  # noqa: E731
    gpu.launch = 0.06
    first, second = gpu.time(step)[0], gpu.time(step)[0]
    assert first > 0.2 and second == pytest.approx(0.008, abs=1e-6)
    gpu.launch = 1.0
    assert [gpu.time(step)[0] > 6 for _ in range(2)] == [True, True], "not for ever"


def test_clocks_of_devices():
    assert isinstance(clock_for("cpu"), CpuClock)


MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_what_is_freed_is_kept():
    """Otherwise a large tensor's pages come from the kernel in each call, or in some, as the heap happens to lie."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        lazy, kept, peak = pool.apply(_mib_held_after_freeing_64)
    assert lazy < 8
    assert kept == pytest.approx(64, abs=8)
    assert peak == pytest.approx(64, abs=8)


def _mib_held_after_freeing_64():
    """(before memory is kept, when it is, the peak of a call that takes memory that was kept)."""

    def held():
        torch.ones(1000).sum()
        before = _resident_kib("VmRSS")
        torch.ones(64 * MIB // 4).sum()
        return (_resident_kib("VmRSS") - before) / 2**10

    lazy = held()
    CpuClock().keep_memory()
    kept = held()
    for _ in range(3):
        _, peak = peak_memory(lambda: torch.ones(64 * MIB // 4).sum(), CPU)
    return lazy, kept, peak


@linux
def test_peak_memory_is_what_a_call_adds_at_most():
    """Of what is kept, of what was freed before the end, and beside what was there before."""
    result, kept = peak_memory(lambda: torch.ones(200 * MIB // 4), CPU)
    total, freed = peak_memory(lambda: torch.ones(64 * MIB // 4).sum().item(), CPU)
    assert (kept, freed) == (pytest.approx(200, abs=8), pytest.approx(64, abs=8))
    assert (result.numel(), total) == (200 * MIB // 4, 64 * MIB // 4)
    assert peak_memory(lambda: torch.ones(1000), CPU)[1] < 8


def test_where_the_peak_cannot_be_measured_there_is_none(monkeypatch):
    class Unreadable:
        def __init__(self, path):
            pass

        def write_text(self, text):
            raise PermissionError

    monkeypatch.setattr("playground.machine.peak_memory.Path", Unreadable)
    assert peak_memory(lambda: 5, CPU) == (5, None)


def test_a_peak_that_comes_out_below_what_was_there_is_nothing(monkeypatch):
    kib = {"VmRSS": 2048, "VmHWM": 1024}
    monkeypatch.setattr("playground.machine.peak_memory._resident_kib", kib.get)
    assert peak_memory(lambda: 5, CPU) == (5, 0)
