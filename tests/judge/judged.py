"""The check of variants without the rest of a run: one process loads one file after the other, one all originals."""

import contextlib
import dataclasses
import os
import tempfile
import unittest.mock
from pathlib import Path

from problems import pairs

from playground import catalog
from playground.driver.task import Task
from playground.judge.evaluation import judge
from playground.judge.verdict import UNJUDGED, failed
from playground.record import compose
from playground.serial import dump
from playground.worker import WorkerFailure, WorkerProcess, referee_client
from playground.worker.referee import Referee

SEED, PROBE_SEED, LIMIT = 20261120, 4711, 60


class Lasting:
    """A referee's process, which the next problem's client takes, too."""

    def __init__(self, worker):
        self.ask, self.pid, self.has_ended = worker.ask, worker.pid, False

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


def referee_of(folder, text, place="cpu", **more):
    """A Referee that has loaded a problem's text, which leaves out what pairs.whole adds, and is written to the folder."""
    (folder / "problem.py").write_text(pairs.whole(text))
    made = Referee()
    made.load(str(folder / "problem.py"), {}, place, str(folder / "weights"), seed=1, **more)
    return made


@contextlib.contextmanager
def court(problem, place="cpu", settings=None, precision=None, seeds=(SEED, PROBE_SEED), builds=None):
    """judge(worker, path of a variant, accept=None) -> its result in JSON, of the problem at a path."""
    original = {"problem": str(problem), "settings": settings or {}, "place": place, "seed": seeds[0], "precision": precision}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        truth = referee_client.RefereeClient(original, Path(folder), seeds[1], LIMIT)
        started.callback(truth.close)
        about = truth.load()
        given = original | {"varied": about["varied"], "weights": truth.weights, "builds": builds}
        given["float_outputs"] = bool(about["float_outputs"])
        truth.prepare()

        def judge_one(worker, variant, accept=None):
            borrowed = catalog.borrowed_names(variant, problem)
            backend = "cpu" if place == "cpu" else "cuda"
            task = Task(catalog.find_model(problem), catalog.Variant(variant.stem, variant, backend), place)
            subject, judgment = task.subject, UNJUDGED

            def load(worker):
                return worker.ask("load", **given, variant=str(variant), borrowed=borrowed)

            def renew():
                another = started.enter_context(WorkerProcess("candidate", LIMIT))
                load(another)
                return another

            try:
                loaded = load(worker)
                subject = dataclasses.replace(subject, variant_precision=loaded.precision)
                judgment = judge(worker, truth, place, loaded, variant, renew, accept, borrowed=borrowed).judgment
            except WorkerFailure as failure:
                judgment = failed(judgment, failure)
            return dump(compose(subject, judgment))

        yield judge_one


def judged_texts(worker, folder, problem, *solutions, **more):
    """The result of each solution, a text without imports, of a problem whose text leaves out what pairs.whole adds."""
    files = [folder / "problem.py", *(folder / f"solution_{number}.py" for number in range(len(solutions)))]
    for file, text in zip(files, (pairs.whole(problem), *(pairs.IMPORTS + text for text in solutions)), strict=True):
        file.write_text(text)
    return judged(worker, *files[:1], files[1:], **more)


def judged(worker, problem, variants, accept=None, **more):
    """The result of each path of a variant. `worker` loads them all; `more` is the court's."""
    with court(problem, **more) as judge_one:
        return [judge_one(worker, variant, accept) for variant in variants]
