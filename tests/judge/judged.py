"""The check of variants without the rest of a run: one process loads one file after the other, one all originals."""

import contextlib
import os
import tempfile
import unittest.mock
from pathlib import Path

from playground.driver.verdict import give_failure, give_loaded, judge
from playground.worker import WorkerFailure, WorkerProcess, referee_client

SEED, PROBE_SEED, LIMIT = 20261120, 4711, 60


class Lasting:
    """A referee's process, which the next problem's client takes, too."""

    def __init__(self, worker):
        self.ask, self.pid = worker.ask, worker.pid

    def close(self):
        """Leave it to one_worker()."""


@contextlib.contextmanager
def one_worker():
    """A process for variants and one for referees, which have one thread, enough for what is tiny."""
    with (
        unittest.mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        WorkerProcess("candidate", LIMIT) as worker,
        WorkerProcess("referee", LIMIT) as referee,
        unittest.mock.patch.object(referee_client, "WorkerProcess", lambda *_: Lasting(referee)),
    ):
        yield worker


def judged(worker, problem, variants, settings=None, place="cpu", accept=None, precision=None):
    """A result (verdict, reason, check, ...) for each path of a variant, of the problem at a path. `worker` loads them all."""
    original = {"problem": str(problem), "settings": settings or {}, "place": place, "seed": SEED, "precision": precision}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        truth = referee_client.RefereeClient(original, Path(folder), PROBE_SEED, LIMIT)
        try:
            original["varied"] = truth.prepare()["varied"]
            for variant in variants:
                result = {"ran_on": place, "verdict": None, "reason": None, "check": None, "findings": [], "peak_mib": None}
                results.append(result)
                try:
                    loaded = worker.ask("load", **original, variant=str(variant), weights=truth.weights)
                    give_loaded(result, loaded)
                    judge(worker, truth, result, variant, accept=accept)
                except WorkerFailure as failure:
                    give_failure(result, failure)
        finally:
            truth.close()
    return results
