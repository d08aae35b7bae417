"""The clock, on steps of a known duration and a known size."""

import statistics
import sys
import time

import pytest
import torch

from playground.stopwatch.timer import MAX_REPETITIONS, MIN_REPETITIONS, WARM_UP_CALLS, measure, peak_memory

CPU = torch.device("cpu")


class Step:
    """Sleeps, and counts its calls."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.calls = 0

    def __call__(self):
        self.calls += 1
        time.sleep(self.seconds)


def test_a_step_of_20_milliseconds():
    found = measure(Step(0.02), CPU, 0.5)
    assert min(found["samples_ms"]) >= 20
    assert statistics.median(found["samples_ms"]) < 30


def test_there_is_a_least_number_of_repetitions():
    step = Step(0.01)
    found = measure(step, CPU, 0)
    assert len(found["samples_ms"]) == MIN_REPETITIONS
    assert step.calls == WARM_UP_CALLS + MIN_REPETITIONS


def test_a_longer_budget_gives_more_repetitions():
    found = measure(Step(0), CPU, 2)
    assert MIN_REPETITIONS < len(found["samples_ms"]) <= MAX_REPETITIONS


def test_the_flush_is_not_part_of_the_time():
    """It takes milliseconds; a step that does nothing takes none."""
    assert statistics.median(measure(lambda: None, CPU, 0)["samples_ms"]) < 1


def test_an_exception_comes_through():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, CPU, 0)


MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("mib", [64, 200])
def test_peak_memory_of_an_allocation(mib):
    result, peak = peak_memory(lambda: torch.ones(mib * MIB // 4), CPU)
    assert result.numel() == mib * MIB // 4
    assert peak == pytest.approx(mib, abs=8)


@linux
def test_peak_memory_counts_what_was_freed_before_the_end():
    result, peak = peak_memory(lambda: torch.ones(64 * MIB // 4).sum().item(), CPU)
    assert result == 64 * MIB // 4
    assert peak == pytest.approx(64, abs=8)


@linux
def test_peak_memory_leaves_out_what_was_there_before():
    kept = torch.ones(128 * MIB // 4)
    _, peak = peak_memory(lambda: torch.ones(1000), CPU)
    assert peak < 8
    assert kept.sum() == kept.numel()


@linux
def test_measure_reports_the_peak_of_a_step():
    assert measure(lambda: torch.ones(64 * MIB // 4), CPU, 0)["peak_mib"] == pytest.approx(64, abs=8)


def test_where_the_peak_cannot_be_measured_there_is_none(monkeypatch):
    class Unreadable:
        def __init__(self, path):
            pass

        def write_text(self, text):
            raise PermissionError

    monkeypatch.setattr("playground.stopwatch.timer.Path", Unreadable)
    assert peak_memory(lambda: 5, CPU) == (5, None)
