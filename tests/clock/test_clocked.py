"""A step under the stopwatch, in the process that runs it: of a known duration, and one that tampers with the clock."""

import contextlib
import statistics
import threading
import time
from types import SimpleNamespace

import torch

from playground import tensors
from playground.clock.clocked import Clocked

SIDE = VARIANT, FORWARD = "variant", "forward"


class Step:
    """A workload that sleeps; it keeps the seeds of its contents."""

    def __init__(self, seconds=0.0, result=None):
        self.seconds = seconds
        self.result = result
        self.seeds = []

    def fresh(self, seed):
        self.seeds.append(seed)
        return seed

    def __call__(self, content):
        time.sleep(self.seconds)
        return torch.full((2,), float(content)) if self.result is None else self.result

    def names(self, content):
        return None


class Timed(Clocked):
    """A step under the clock; what `start` prepares takes 30 ms a call."""

    def __init__(self, step):
        self._hold_clock(torch.device("cpu"))
        self.workloads[VARIANT, FORWARD] = step

    def _circumstances(self, side):
        return contextlib.nullcontext()

    def _subject(self, side):
        problem = SimpleNamespace(get_inputs=lambda: [torch.ones(2)])
        return problem, lambda x: time.sleep(0.03) or x, None, None


def test_a_step_of_100_milliseconds():
    found = Timed(Step(0.1)).time(*SIDE, range(7))
    assert min(found["samples_ms"]) >= 100
    assert statistics.median(found["samples_ms"]) < 150
    assert found["late"] == [False] * 7


def result_of(under_clock, folder):
    under_clock.result(*SIDE, folder / "outputs")
    return tensors.load_results(folder / "outputs", 1 << 20).outputs[0]


def test_a_call_for_each_seed_on_content_of_its_own(tmp_path):
    step = Step()
    under_clock = Timed(step)
    assert len(under_clock.time(*SIDE, [5, 7, 6])["samples_ms"]) == 3
    assert step.seeds == [5, 7, 6]
    assert torch.equal(result_of(under_clock, tmp_path), torch.tensor([6.0, 6.0]))
    under_clock.start(*SIDE, [1])
    assert under_clock._result is None


def test_the_flush_and_the_content_are_not_part_of_the_time():
    """They take milliseconds; a step that does nothing takes none."""
    step = Step()
    step.fresh = lambda seed: time.sleep(0.1) or seed
    assert statistics.median(Timed(step).time(*SIDE, range(7))["samples_ms"]) < 50


def test_repeat_calls_as_often_as_it_is_told_on_what_is_held():
    step, seen = Step(), []
    under_clock = Timed(step)
    under_clock.hold(*SIDE, [1, 2])
    step.__class__ = type("Counting", (Step,), {"__call__": lambda self, content: seen.append(content)})
    under_clock.repeat(*SIDE, 5)
    assert seen == [1, 2, 1, 2, 1]


def test_start_says_how_long_a_call_takes_with_all_around_it():
    assert Timed(Step()).start(*SIDE, [1, 2, 3])["milliseconds"] >= 30


def test_what_a_thread_writes_later_is_not_in_the_result(tmp_path):
    result = torch.zeros(3)

    def later():
        time.sleep(0.3)
        result.fill_(1.0)

    class Lazy(Step):
        def __call__(self, content):
            threading.Thread(target=later).start()
            return result

    under_clock = Timed(Lazy())
    under_clock.time(*SIDE, [1])
    time.sleep(0.6)
    assert result.sum() == 3
    assert result_of(under_clock, tmp_path).sum() == 0
