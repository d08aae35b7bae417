"""What the threads of a run share."""

import threading
from concurrent.futures import ThreadPoolExecutor

from playground.runner import _SharedBench


class Bench:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_a_bench_is_made_for_the_first_and_closed_after_the_last():
    made, together = [], threading.Barrier(3)

    def make():
        made.append(Bench())
        return made[-1]

    shared = _SharedBench(make, 3)
    assert not made

    def use(_):
        with shared as bench:
            together.wait()
            return bench, bench.closed

    with ThreadPoolExecutor(3) as pool:
        used = list(pool.map(use, range(3)))
    assert used == [(made[0], 0)] * 3
    assert made[0].closed == 1


def test_what_was_never_used_is_closed_all_the_same():
    made = []
    shared = _SharedBench(lambda: made.append(Bench()) or made[-1], 2)
    shared.close()
    assert not made
    with shared:
        pass
    shared.close()
    assert made[0].closed == 1
