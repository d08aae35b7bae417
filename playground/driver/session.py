"""What the variants of one model share: where each is judged, in its processes, and timed beside the same baselines."""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

from playground import catalog
from playground.driver.outer import NOT_MEASURED
from playground.driver.preparations import told
from playground.driver.race import Rejected
from playground.driver.timing import Stopwatch
from playground.driver.verdict import give, give_doubt, give_examination, give_failure, give_loaded, judge
from playground.machine import build_locks
from playground.nvidia.sanitizer import examine, small_case
from playground.report.figures import TIMED
from playground.worker import UNTIMED, WorkerFailure, WorkerProcess, submit
from playground.worker.referee_client import RefereeClient

# A finding of the emulator's.
UNWRITTEN = re.compile(
    r"(?P<place>.*?:\d+: )?(?P<rest>output never written: element \d+ of a result of shape (?P<shape>\(.*?\)).*)"
)
NOT_PROVED = "not proved against deceit"  # outside of a sandbox a judged file's code can reach the outer clock's processes, too


class Session:
    """What the variants of one model share at one place and size: the reference, the baselines, and the stopwatch.

    `original` are the arguments with which a worker makes the original; `run` is the Runner. Threads may share a session.
    """

    def __init__(self, task, original, options, progress, run):
        self._options = options
        self._progress = progress
        self._run = run
        self._unusable, self._description = None, {}
        self._warming, self._warmed = threading.Lock(), None
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
            self._unusable = failure
            progress.finished("truth", *task.names("float64"), "error")
        except BaseException:
            self.close()
            raise
        finally:
            turn.close()

    def check_and_time(self, task, result, build=False):
        """Set the verdict of one of the group's variants, and time it where it can be. `build`: it has not been built yet."""
        if self._unusable:
            why = f"the original does not run: {named_failure(task.model, self._unusable)}"
            return give(result, "error", str(self._unusable) if self._unusable.is_of_machine else why, self._unusable.details)
        try:
            if not build:
                self._describe(task, result)
            if self._options.sanitizes(task):
                self._sanitize(task, result)
            if result["verdict"]:
                return
            with contextlib.ExitStack() as workers:
                if build:
                    workers.enter_context(told(functools.partial(self._progress.said, "build", *task.names())))
                with self._run.judge_slot:
                    worker = self._check(workers, task, result, build)
                if result["verdict"] in TIMED:
                    give_doubt(result)
                if result["verdict"] in TIMED and self._options.times(task):
                    self._warm_up().result()
                    self._time(worker, task, result)
        except WorkerFailure as failure:
            give_failure(result, self._with_shapes(failure))

    def _warm_up(self):
        """The future of what a variant is timed beside, which is prepared once."""
        with self._warming:
            self._warmed = self._warmed or submit(self._beside, self._stopwatch.warm_up, self._prepared)
            return self._warmed

    def _with_shapes(self, failure):
        """The failure; where an element of a result was never written, and its shape is none of the original's, that first."""
        match = failure.is_finding and UNWRITTEN.match(str(failure))
        shapes = [tuple(shape) for shape in self._referee.prepared("own").get("shapes", [])] if match else []
        if not match or match["shape"] in map(str, shapes):
            return failure
        differ = f"a result has the shape {match['shape']}, and the original's {', '.join(map(str, shapes))}"
        return WorkerFailure(f"{match['place']}{differ}; {match['rest']}", failure.details, is_finding=True)

    def _describe(self, task, result):
        """Say at what precision and size the variant is judged; of one that cannot be built, nothing is said."""
        result["precision"] = self._description["precision"]
        result["shape"] = {"inputs": self._description["inputs"], "settings": task.settings}
        result["unvaried"] = self._description["unvaried"]

    def _sanitize(self, task, result):
        names, limit = task.names(), self._options.time_limit
        self._progress.started("sanitize", *names)
        with small_case(task.model, self._run.original(task), self._run.probe_seed, limit) as (original, probes, folder):
            load = candidate_arguments(original, task, self._options, original["weights"])
            examination = examine(load, probes, folder, limit)
        give_examination(result, examination)
        self._progress.finished("sanitize", *names, examination.outcome)

    def _check(self, workers, task, result, build):
        """Judge the variant; `workers` closes the processes that it takes, of which the last is returned."""
        names = task.names()
        worker = first = workers.enter_context(self._run.worker_for(task))
        workers.callback(lambda: result.update(printed=first.printed()))

        def load(worker):
            return load_candidate(worker, self._original, task, self._options, self._referee.weights)

        def renew():
            """A process in the place of one that a crash has left in a state of its own."""
            environment = UNTIMED if task.place == "emulator" else None
            another = workers.enter_context(WorkerProcess("candidate", limit, environment, room=self._run.room(task)))
            load(another)
            if task.place == "emulator":  # whether its memory is a file's "cuda" shows in the first call
                another.ask("build", seed=self._run.seed)
            return another

        def tell(complaint):
            """What the first probe, on which the variant failed before, says of it now."""
            self._progress.said("check", *names, f"as before, {complaint}" if complaint else f"right on '{task.first}' now")

        limit, accept = self._options.time_limit, self._options.accept
        self._progress.started("build" if build else "check", *names)
        give_loaded(result, load(worker))
        if build:
            self._run.build_in(worker, task, result)
            self._progress.finished("build", *names, "built")
            self._describe(task, result)
            self._progress.started("check", *names)
        borrowed = catalog.borrowed_names(task.variant.path, task.model.path)
        worker = judge(worker, self._referee, result, task.variant.path, renew, accept, task.first, tell, borrowed)
        if task.place == "emulator":
            result["accepted_races"] = worker.ask("accepted_races")["lines"]
        self._progress.finished("check", *names, result["verdict"])
        return worker

    def _time(self, worker, task, result):
        names = task.names()
        self._progress.started("time", *names)
        try:
            result.update(self._stopwatch.time(worker, result))
            if not (task.variant.is_catalogued or self._options.isolates(task)):
                result["speedup_proof"] = NOT_PROVED
            outcome = f"{result['time_ms']['median']:.3g} ms" if result["time_ms"] else NOT_MEASURED
        except Rejected as rejection:
            give(result, outcome := "fail", str(rejection))
        self._progress.finished("time", *names, outcome)

    def close(self):
        self._open.close()


class SharedSession:
    """A session for `uses` uses, each a block under `with`, in several threads; the last one closes it."""

    def __init__(self, make, uses):
        self._make = make
        self._uses_left = uses
        self._session = None
        self._lock = threading.Lock()

    def session(self):
        """Return the session, which is made when it is first asked for."""
        with self._lock:
            self._session = self._session or self._make()
            return self._session

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with self._lock:
            self._uses_left -= 1
            if not self._uses_left:
                self.close()

    def close(self):
        """Close the session. Safe to call twice."""
        if self._session:
            self._session.close()


def named_failure(model, failure):
    """Return why an original does not run, behind the line, where that is known, in its file or in another that it uses."""
    if re.match(r"/.*?:\d+: ", str(failure)):
        return str(failure)
    place = re.match(r"(/.*?:\d+): ", failure.details)
    return f"{place[1] if place else model.path}: {failure}"


def load_candidate(worker, original, task, options, weights):
    """Have a worker load the task's variant. Raises WorkerFailure."""
    arguments = candidate_arguments(original, task, options, weights, worker.room)
    return worker.ask("load", **arguments)


def candidate_arguments(original, task, options, weights, room=None):
    """Return the arguments of candidate.load, with the file's content: what runs is what was hashed. Raises WorkerFailure."""
    builds, path = None, task.variant.path
    content = path.read_bytes() if os.access(path, os.R_OK) else None
    if content is not None and hashlib.sha256(content).hexdigest() != task.hashes["source_sha256"]:
        raise WorkerFailure(f"{path} has changed since this run read it; expected the same file to its end: run again")
    if not task.variant.is_catalogued:
        builds = options.builds or f"{build_locks.JUDGED}/{task.hashes['source_sha256'][:16]}"
    builds = str(room.builds) if room else builds
    return original | {
        "variant": str(path),
        "content": content and content.decode("latin-1"),
        "borrowed": catalog.borrowed_names(path, task.model.path),
        "weights": weights,
        "debug": options.debug,
        "builds": builds,
    }
