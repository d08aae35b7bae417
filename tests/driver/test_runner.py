"""What the threads of a run share."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from playground import catalog
from playground.driver.runner import Options, Runner, Task, _SharedBench
from playground.report.progress import Progress


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


# Appends how its process waits between parallel loops to the file `seen`.
WRITES_POLICY = """
import os
with open({seen!r}, "a") as seen:
    print(os.environ.get("OMP_WAIT_POLICY"), file=seen)
return torch.tanh(self.linear(x))
"""


@pytest.mark.parametrize("place, policies", [("cpu", ["PASSIVE", "None"]), ("emulator", ["PASSIVE"])])
def test_only_a_process_that_is_timed_waits_actively(tmp_path, monkeypatch, tiny_problem, write_forward, place, policies):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    seen = tmp_path / "seen"
    variant = write_forward(f"writes_policy_{place}", WRITES_POLICY.format(seen=str(seen)))
    with Progress() as progress:
        (result,) = Runner(Options(quick=True), progress).run([Task(catalog.find_model(str(tiny_problem)), variant, place)])
    assert result["verdict"] == "pass", result["reason"]
    assert list(dict.fromkeys(seen.read_text().split())) == policies
