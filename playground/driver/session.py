"""What the variants of one model share: where each is judged, in its processes, and timed beside the same baselines."""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from playground import catalog
from playground.clock.race import Rejected
from playground.driver.preparations import told
from playground.driver.task import Options, Task
from playground.driver.timing import Stopwatch
from playground.judge.evaluation import Judged, judge
from playground.judge.verdict import UNJUDGED, doubted, ended, failed, found, with_shapes
from playground.machine import build_locks
from playground.nvidia.sanitizer import examine, small_case
from playground.record import ERROR, FAIL, NOT_MEASURED, NOT_TIMED, TIMED, Result, compose
from playground.report.progress import Progress
from playground.subject import Examination, Shape, Subject
from playground.worker import UNTIMED, WorkerFailure, WorkerProcess, sandbox, submit
from playground.worker.referee_client import RefereeClient
from playground.worker.replies import Loaded

if TYPE_CHECKING:
    from playground.driver.runner import Runner

S = TypeVar("S", bound=Subject)
GATHERING = 15.0  # seconds in which a variant that could be timed waits for others of its model


class Session:
    """What the variants of one model share at one place and size: reference, baselines, stopwatch. Threads may share it."""

    def __init__(self, task: Task, original: dict[str, Any], options: Options, progress: Progress, run: "Runner") -> None:
        self._options, self._progress, self._run = options, progress, run
        self._unusable, self._description = None, {}
        self._warming = threading.Lock()
        self._judged, self._judging = threading.Condition(), 0  # how many are being judged
        self._warmed: Future[None] | None = None
        self._open = contextlib.ExitStack()
        memory = self._open.enter_context(contextlib.ExitStack())  # is given back when the processes have ended
        turn = contextlib.ExitStack()
        if task.place != "emulator":
            turn.enter_context(run.in_turn)
        try:
            folder = run.folder(task.group)
            self._open.callback(shutil.rmtree, folder, ignore_errors=True)
            self._referee = RefereeClient(original, folder, run.probe_seed, options.time_limit)
            self._open.callback(self._referee.close)
            self._original = original | {"weights": self._referee.weights}
            room = run.new_room(task, []) if options.isolates(task) and task.place != "emulator" else None
            if room:
                self._open.callback(room.close)
            self._stopwatch = Stopwatch(task, self._original, self._referee, options, progress, run.measured, room)
            self._open.callback(self._stopwatch.close)
            enough, share, is_ample = run.room_for_judgement(task, self._referee.size_up)
            memory.enter_context(enough)
            turn.close()
            # Until PyTorch is imported there seconds pass: meanwhile the reference is computed.
            run.start_ahead(task)
            # Of a suite's pairs many are wrong, and the others keep the device busy: what is not right needs no baselines.
            are_sure = options.times(task) and not (task.pair and run.are_beside)
            if are_sure:
                self._stopwatch.start_processes()
            progress.started("truth", *task.names("float64"))
            self._description = self._referee.load(share)
            self._original["varied"] = self._description["varied"]  # the stopwatch has the same arguments
            self._original["float_outputs"] = bool(self._description["float_outputs"])
            self._beside = beside = ThreadPoolExecutor(max_workers=2)
            self._open.callback(beside.shutdown)
            self._open.callback(self._stopwatch.give_up)  # where nothing was right, what is to be timed beside it is in vain
            self._prepared = prepared = submit(beside, self._referee.prepare)
            if not is_ample or options.max_autotune:  # what is chosen by timing is not chosen beside the reference
                prepared.result()
            if are_sure:
                self._warm_up()
            prepared.result()
            progress.finished("truth", *task.names("float64"), "ready")
        except WorkerFailure as failure:
            self._unusable = with_shapes(failure, self._referee)
            progress.finished("truth", *task.names("float64"), "error")
        except BaseException:
            self.close()
            raise
        finally:
            turn.close()

    def check_and_time(self, task: Task, subject: Subject, build: bool = False) -> Result:
        """Return the Result of one of the group's variants, timed where it can be; `build`: it has not been built yet.

        `subject` is what its build told, a Result where that failed, which compute-sanitizer may explain.
        """
        known = subject if isinstance(subject, Result) else UNJUDGED
        if self._unusable:
            why = named_failure(task.model, self._unusable)
            why = why if why.startswith("internal limit: ") else f"the original does not run: {why}"
            is_of_original = not self._unusable.is_of_machine and self._unusable.role != "compiler"
            reason = why if is_of_original else str(self._unusable)
            return compose(subject, ended(known, ERROR, reason, self._unusable.details))
        if not build:
            subject = self._described(task, subject)
        if self._options.sanitizes(task):
            try:
                examination = self._sanitize(task)
            except WorkerFailure as failure:
                return compose(subject, failed(known, failure))
            subject = replace(subject, sanitizer=examination)
            known = found(known, examination.findings) if examination.findings else known
        if isinstance(subject, Result) or known.findings:
            return compose(subject, known)
        return self._judge_and_time(task, subject, build)

    def _judge_and_time(self, task: Task, subject: Subject, build: bool) -> Result:
        with contextlib.ExitStack() as workers:
            if build:
                workers.enter_context(told(functools.partial(self._progress.said, "build", *task.names())))
            with self._counted(), self._run.judge_slot, self._run.processors.judgement():
                worker = workers.enter_context(self._run.worker_for(task))
                subject, judged = self._judge(workers, worker, task, subject, build)
            result = doubted(compose(subject, judged.judgment, replace(NOT_TIMED, peak_mib=judged.peak_mib)))
            if result.verdict in TIMED and self._options.times(task):
                result = self._time(judged.worker, task, result)
            return replace(result, printed=worker.printed())

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._judged:
            self._judging += 1
        try:
            yield
        finally:
            with self._judged:
                self._judging -= 1
                self._judged.notify_all()

    def _await_others(self) -> None:
        """Wait until nobody else is being judged here, who could be timed in the same race, and no longer than GATHERING."""
        until = time.monotonic() + GATHERING
        with self._judged:
            while self._judging and time.monotonic() < until:
                self._judged.wait(until - time.monotonic())

    def _warm_up(self) -> Future[None]:
        with self._warming:
            if self._warmed is None:
                self._warmed = submit(self._beside, self._stopwatch.warm_up, self._prepared)
            return self._warmed

    def _described(self, task: Task, subject: S) -> S:
        about = self._description
        shape = Shape(inputs=about["inputs"], settings=task.settings)
        return replace(subject, precision=about["precision"], shape=shape, unvaried=about["unvaried"])

    def _sanitize(self, task: Task) -> Examination:
        names, limit = task.names(), self._options.time_limit
        self._progress.started("sanitize", *names)
        with small_case(task.model, self._run.original(task), self._run.probe_seed, limit) as (original, probes, folder):
            load = candidate_arguments(original, task, self._options, original["weights"])
            examination = examine(load, probes, folder, limit)
        self._progress.finished("sanitize", *names, examination.outcome)
        return examination

    def _judge(
        self, workers: contextlib.ExitStack, worker: WorkerProcess, task: Task, subject: Subject, build: bool
    ) -> tuple[Subject, Judged]:
        names = task.names()

        def load(worker: WorkerProcess) -> Loaded:
            return load_candidate(worker, self._original, task, self._options, self._referee.weights)

        def renew() -> WorkerProcess:
            environment = UNTIMED if task.place == "emulator" else None
            another = workers.enter_context(WorkerProcess("candidate", limit, environment, room=self._run.room(task)))
            load(another)
            if task.place == "emulator":  # whether its memory is a file's "cuda" shows in the first call
                another.ask("build", seed=self._run.seed)
            return another

        def tell(complaint: str | None) -> None:
            self._progress.said("check", *names, f"as before, {complaint}" if complaint else f"right on '{task.first}' now")

        limit, accept = self._options.time_limit, self._options.accept
        judged = Judged(UNJUDGED, None, worker, None)
        try:
            self._progress.started("build" if build else "check", *names)
            loaded = load(worker)
            declared: dict[str, Any] = {"weights": loaded.weights, "weights_differ": loaded.difference}
            subject = replace(subject, variant_precision=loaded.precision, **declared)
            if build:
                subject, failure = self._run.build_in(worker, task, subject)
                if failure:
                    raise failure
                self._progress.finished("build", *names, "built")
                subject = self._described(task, subject)
                self._progress.started("check", *names)
            borrowed = catalog.borrowed_names(task.variant.path, task.model.path)
            file, first = task.variant.path, task.first
            judged = judge(worker, self._referee, task.place, loaded, file, renew, accept, first, tell, borrowed)
            if task.place == "emulator" and not judged.failure:
                subject = replace(subject, accepted_races=judged.worker.ask("accepted_races").lines)
        except WorkerFailure as failure:
            judgment = failed(judged.judgment, with_shapes(failure, self._referee))
            judged = judged._replace(judgment=judgment, failure=failure)
        if not judged.failure:
            self._progress.finished("check", *names, judged.judgment.verdict)
        return subject, judged

    def _time(self, worker: WorkerProcess, task: Task, result: Result) -> Result:
        names = task.names()
        try:
            self._warm_up().result()
            entry = self._stopwatch.enter(worker, result)
            self._await_others()
            self._progress.started("time", *names)
            timed = self._stopwatch.time(entry)
        except Rejected as rejection:
            self._progress.finished("time", *names, FAIL)
            return ended(result, FAIL, str(rejection))
        except WorkerFailure as failure:
            return failed(result, with_shapes(failure, self._referee))
        timed = replace(timed, speedup_proof=self._options.proof(task))
        self._progress.finished("time", *names, f"{timed.time_ms.median:.3g} ms" if timed.time_ms else NOT_MEASURED)
        return compose(result, timed)

    def close(self) -> None:
        self._open.close()


class SharedSession(contextlib.AbstractContextManager["SharedSession"]):
    """A session for `uses` uses, each a block under `with`, in several threads; the last one closes it."""

    def __init__(self, make: Callable[[], Session], uses: int) -> None:
        self._make, self._uses_left = make, uses
        self._session: Session | None = None
        self._lock = threading.Lock()

    def session(self) -> Session:
        """Return the session, which is made when it is first asked for."""
        with self._lock:
            self._session = self._session or self._make()
            return self._session

    def __exit__(self, *exception: Any) -> None:
        with self._lock:
            self._uses_left -= 1
            if not self._uses_left:
                self.close()

    def close(self) -> None:
        """Close the session. Safe to call twice."""
        if self._session:
            self._session.close()


def named_failure(model: catalog.Model, failure: WorkerFailure) -> str:
    """Return why an original does not run, behind the line, where that is known, in its file or in another that it uses."""
    if re.match(r"/.*?:\d+: |internal limit: ", str(failure)):
        return str(failure)
    place = re.match(r"(/.*?:\d+): ", failure.details)
    return f"{place[1] if place else model.path}: {failure}"


def load_candidate(
    worker: WorkerProcess, original: dict[str, Any], task: Task, options: Options, weights: str | None
) -> Loaded:
    """Have a worker load the task's variant. Raises WorkerFailure."""
    arguments = candidate_arguments(original, task, options, weights, worker.room)
    return worker.ask("load", **arguments)


def candidate_arguments(
    original: dict[str, Any], task: Task, options: Options, weights: str | None, room: sandbox.Room | None = None
) -> dict[str, Any]:
    """Return the arguments of candidate.load, with the file's content: what runs is what was hashed. Raises WorkerFailure."""
    builds, path = None, task.variant.path
    content = path.read_bytes() if os.access(path, os.R_OK) else None
    if content is not None and hashlib.sha256(content).hexdigest() != task.hashes["source_sha256"]:
        raise WorkerFailure(f"{path} has changed since this run read it; expected the same file to its end: run again")
    if not task.variant.is_catalogued:
        builds = options.builds or f"{build_locks.JUDGED}/{str(task.hashes['source_sha256'])[:16]}"
    builds = str(room.builds) if room else builds
    borrowed, text = catalog.borrowed_names(path, task.model.path), content and content.decode("latin-1")
    given = {"variant": str(path), "content": text, "borrowed": borrowed, "weights": weights}
    return original | given | {"debug": options.debug, "builds": builds}
