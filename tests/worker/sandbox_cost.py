"""What the sandbox costs: one file started, built, judged and timed with it and without it, side by side.

    python -m tests.worker.sandbox_cost [--pairs 5] [--turns 60]

The two take turns in random order, so that what else the machine does disturbs both. docs/what_a_pass_proves.md has the
figures.
"""

import argparse
import contextlib
import os
import random
import tempfile
import time

import numpy

from playground import catalog
from playground.driver.race import new_seed
from playground.driver.runner import Options, Runner, Task, blank_result
from playground.driver.session import load_candidate
from playground.driver.verdict import give_loaded, judge
from playground.machine import requirements
from playground.report.progress import Progress
from playground.worker import WorkerProcess
from playground.worker.referee_client import RefereeClient
from tests.judge.exhibits import cases

EXHIBITS = catalog.ROOT / "tests" / "judge" / "exhibits"
STAGES = ("start and load", "build", "check", "end")
CALLS = 20  # timed in a turn


class Side:
    """The file in a process, in a sandbox or not; `seconds` by stage."""

    def __init__(self, task, sandboxed):
        self.seconds = {}
        self.runner = Runner(Options(quick=True, sandbox="require" if sandboxed else "off"), Progress())
        self.task, self.result = task, blank_result(task)
        self.truth = RefereeClient(self.runner.original(task), self.runner.folder(task.group), self.runner.probe_seed, 300)
        self.truth.prepare()

    @contextlib.contextmanager
    def clocked(self, stage):
        began = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - began

    def begin(self, builds):
        os.environ["TORCH_EXTENSIONS_DIR"] = builds
        with self.clocked("start and load"):
            room = self.runner.room(self.task)
            self.worker = WorkerProcess(room=room)
            original = self.runner.original(self.task)
            give_loaded(self.result, load_candidate(self.worker, original, self.task, self.runner._options, self.truth.weights))

    def build(self):
        with self.clocked("build"):
            self.runner.build_in(self.worker, self.task, self.result)

    def check(self):
        with self.clocked("check"):
            judge(self.worker, self.truth, self.result, 300)
        assert self.result["verdict"] == "pass", self.result["reason"]
        self._ask("start")

    def turn(self):
        """The median of some timed calls, in milliseconds."""
        return numpy.median(self._ask("time")["samples_ms"])

    def _ask(self, request):
        return self.worker.ask(
            f"candidate.{request}", 300, side="variant", mode="forward", seeds=[new_seed() for _ in range(CALLS)]
        )

    def end(self):
        with self.clocked("end"):
            self.worker.close()
            self.runner.close_room(self.task)
        self.truth.close()
        self.runner.close()


def pair(task, turns):
    """({stage: seconds} without and with the sandbox, [ratio of a turn with it to one without])."""
    sides = [Side(task, sandboxed) for sandboxed in (False, True)]
    with tempfile.TemporaryDirectory() as builds:
        for stage in (lambda side: side.begin(builds), Side.build, Side.check):
            for side in random.sample(sides, 2):
                stage(side)
        taken = []
        for _ in range(turns):
            times = {side: side.turn() for side in random.sample(sides, 2)}
            taken.append([times[side] for side in sides])
        for side in random.sample(sides, 2):
            side.end()
    return [side.seconds for side in sides], taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=60, help="of timed calls, in each pair")
    given = parser.parse_args()
    requirements.prepare_environment()
    model = catalog.find_model(str(EXHIBITS / "problem.py"))
    task = Task(model, catalog.Variant("own_kernel", cases.folder() / "honest" / "own_kernel.py", "cpu"), "cpu")
    load = os.getloadavg()[0]
    pairs = [pair(task, given.turns) for _ in range(given.pairs)]
    print(f"load {load:.2g} before, {os.getloadavg()[0]:.2g} after; least of {given.pairs} pairs, seconds without and with")
    for stage in STAGES:
        without, with_it = (min(seconds[side][stage] for seconds, _ in pairs) for side in (0, 1))
        print(f"{stage:15} {without:8.3f} {with_it:8.3f} {with_it - without:+8.3f}")
    times = numpy.array([taken for _, turns in pairs for taken in turns])
    low, middle, high = numpy.percentile(times[:, 1] / times[:, 0], [25, 50, 75])
    without, with_it = numpy.percentile(times, 20, axis=0)
    print(f"{'timed call':15} {without:8.3g} {with_it:8.3g} ms, the 20th percentile of {len(times)} turns each")
    print(f"ratio of a turn with to one without {middle:.3f}, middle half {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
