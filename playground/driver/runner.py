"""One run: build everything side by side, then check and time each variant in a process of its own.

What runs under the emulator is never timed, so it is built and checked in one go, beside the other builds.
"""

import contextlib
import functools
import os
import secrets
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from playground import catalog
from playground.driver.race import CORES_FOR_A_GPU, Patience, Rejected
from playground.driver.timing import Measured, Stopwatch
from playground.driver.verdict import give, give_doubt, give_examination, give_failure, judge
from playground.machine import ptxas
from playground.machine.builds import builds_at_once
from playground.nvidia.sanitizer import examine, small_case
from playground.worker import UNTIMED, Spare, WorkerFailure, WorkerProcess, kill_all
from playground.worker.truth import Truth


@dataclass(frozen=True)
class Task:
    """A variant of a model, and the place where it runs: "cuda", "cpu" or "emulator".

    `point` are those of its settings in which the run's other tasks differ.
    """

    model: catalog.Model
    variant: catalog.Variant
    place: str
    settings: dict = field(default_factory=dict)
    point: dict = field(default_factory=dict)

    @property
    def group(self):
        """What shares an original: the same truth and the same baselines."""
        return self.model.path, self.place, repr(sorted(self.settings.items()))

    def names(self, what=None):
        """(model, variant) as progress shows them; `what` stands in the place of the variant."""
        point = [f"{name}={value}" for name, value in self.point.items()]
        return self.model.name, ", ".join([what or self.variant.name, *point])


@dataclass(frozen=True)
class Options:
    """`training` times training steps too; `seconds` is the budget of one timing; `time_limit` that of one request.

    `max_autotune` adds torch.compile's max-autotune to the baselines.

    `debug` has the emulator build without optimisation. `strict` forbids TF32 in every process. `sanitize` has NVIDIA's
    compute-sanitizer look at what runs on a GPU. `ptxas` has nvcc say what registers and memory kernels take.
    """

    quick: bool = False
    training: bool = False
    time_limit: float = 300.0
    debug: bool = False
    strict: bool = False
    max_autotune: bool = False
    sanitize: bool = False
    ptxas: bool = False

    @property
    def seconds(self):
        return 1.0 if self.quick else 3.0

    @property
    def patience(self):
        """Seconds that a run waits for a machine that is busy, all its timings together. The tests, which are busy, do not."""
        return float(os.environ.get("PLAYGROUND_PATIENCE") or (10.0 if self.quick else 30.0))

    def sanitizes(self, task):
        """Whether compute-sanitizer is to look at the task, which it also does where the first call failed."""
        return self.sanitize and task.place == "cuda"


class Runner:
    """Runs tasks and gives the list of results of the JSON document."""

    def __init__(self, options, progress):
        self._options = options
        self._progress = progress
        self.seed = secrets.randbits(31)  # of the models' weights and of what is timed; every worker is told it
        self.probe_seed = secrets.randbits(31)  # of what is judged, which no variant can foresee: the referee alone is told it
        self.measured = Measured(Patience(options.patience))
        self._spare = Spare()
        self._shared = []  # benches of emulated variants
        self._waiting = 0  # tasks that are still to be judged in a process of their own
        self._bench = None

    def run(self, tasks, keep=lambda results: None):
        """One result a task, in their order. Failures of a variant are its verdict; nothing of it is raised.

        One model comes after the other. `keep` is called with all that have a verdict whenever there is a new one.
        """
        results = [blank_result(task) for task in tasks]
        finishing = threading.Lock()

        def finish(task, result):
            with finishing:
                self._progress.done(*task.names(), result["verdict"])
                result["phases"] = self._progress.phases(*task.names())
                keep([result for result in results if result["verdict"]])

        self._progress.expect(len(tasks))
        models = {}
        for task, result in zip(tasks, results, strict=True):
            models.setdefault(task.model.path, []).append((task, result))
        ahead = any(task.place == "cuda" for task in tasks)
        self._waiting = sum(task.place != "emulator" for task in tasks)
        builders = max(1, builds_at_once() - (CORES_FOR_A_GPU if ahead else 0))
        try:
            with _Builders(builders) as pool:
                for number, pairs in enumerate(models.values()):
                    if number == 0 or not ahead:
                        for each in models.values() if ahead else [pairs]:
                            self._begin_builds(pool, each, finish)
                    self._finish_model(pool, pairs, finish)
        except BaseException:
            kill_all()
            raise
        finally:
            self.close()
        return results

    def _begin_builds(self, pool, pairs, finish):
        """Have the pool build a model's variants; those that are emulated are checked as well."""
        groups = {}
        for task, _ in pairs:
            if task.place == "emulator":
                groups.setdefault(task.group, []).append(task)
        shared = {
            group: _SharedBench(functools.partial(self._bench_for, emulated[0]), len(emulated))
            for group, emulated in groups.items()
        }
        self._shared += shared.values()
        for task, result in _in_building_order(pairs):
            if task.place == "emulator":
                pool.begin(result, functools.partial(self._build_and_check, shared[task.group], task, result, finish))
            else:
                pool.begin(result, functools.partial(self.build, task, result))

    def _finish_model(self, pool, pairs, finish):
        """Judge and time a model's variants. While one is timed on a GPU others are built; on the CPU nothing else may run."""
        for task, result in sorted(pairs, key=lambda pair: pair[0].place == "cpu"):
            if task.place == "cpu":
                pool.wait_for_all()
            elif task.place == "cuda":
                self._prepare_bench(task)
            pool.wait_for(result)
            if task.place != "emulator":
                if result["verdict"] is None or self._options.sanitizes(task):
                    self.check_and_time(task, result)
                finish(task, result)

    def close(self):
        """End what the variants of the last model shared, and what waits for the next."""
        self._close_bench()
        for shared in self._shared:
            shared.close()
        self._shared = []
        self._spare.close()
        self._spare = Spare()

    def _close_bench(self):
        if self._bench:
            self._bench.close()
            self._bench = None

    def _build_and_check(self, shared, task, result, finish):
        with shared as bench:
            bench.check_and_time(task, result, build=True)
        finish(task, result)

    def build(self, task, result):
        """Build the variant once, so that what is timed later finds it built. Sets the verdict when that fails."""
        self._progress.started("build", *task.names())
        try:
            with WorkerProcess(UNTIMED) as worker:
                load_candidate(worker, self.original(task), task, self._options, None)
                self.build_in(worker, task, result)
        except WorkerFailure as failure:
            give_failure(result, failure)
        self._progress.finished("build", *task.names(), result["verdict"] or "built")

    def build_in(self, worker, task, result):
        """Build the variant that `worker` has loaded. Raises WorkerFailure."""
        try:
            built = worker.ask("candidate.build", self._options.time_limit, seed=self.seed)
            result["build_seconds"], result["built"] = built["seconds"], built["built"]
        finally:
            if self._options.ptxas and task.variant.backend == "cuda":
                result["ptxas"] = self._ptxas(worker)

    def _ptxas(self, worker):
        """What ptxas says of the texts that a worker's variant has handed to load_inline."""
        try:
            code = worker.ask("candidate.device_code", self._options.time_limit)
        except WorkerFailure:
            return {"unknown": "its process ended before it could be asked for its text"}
        texts = [ptxas.DeviceCode(each["text"], tuple(each["flags"])) for each in code["texts"]]
        return ptxas.describe(texts, code["capability"])

    def check_and_time(self, task, result):
        """Judge a variant that is built, and time it if it is right. Tasks of one group in a row share a bench."""
        self._prepare_bench(task)
        self._bench.check_and_time(task, result)

    def _prepare_bench(self, task):
        if self._bench is None or self._bench.group != task.group:
            self._close_bench()
            self._bench = self._bench_for(task)

    def worker_for(self, task):
        """The process in which a variant is judged and timed. While it is, the next one starts."""
        if task.place == "emulator":
            return WorkerProcess(UNTIMED)
        worker = self._spare.take()
        self._waiting -= 1
        if self._waiting > 0:
            self._spare.start()
        return worker

    def _bench_for(self, task):
        return Bench(task, self.original(task), self._options, self._progress, self)

    def original(self, task):
        """How a worker makes the original of a task."""
        return {
            "problem": str(task.model.path),
            "settings": task.settings,
            "place": task.place,
            "seed": self.seed,
            "strict": self._options.strict,
        }


class Bench:
    """What the variants of one model share at one place and size: the truth, the baselines, and the stopwatch.

    `original` are the arguments with which a worker makes the original; `run` is the Runner. Threads may share a bench as
    long as nothing is timed.
    """

    def __init__(self, task, original, options, progress, run):
        self.group = task.group
        self._options = options
        self._progress = progress
        self._run = run
        self._unusable = None
        self._description = {}
        self._open = contextlib.ExitStack()
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="playground-", dir=_roomy_folder())))
        self._truth = Truth(original, folder, run.probe_seed, options.time_limit)
        self._open.callback(self._truth.close)
        self._original = original | {"weights": self._truth.weights}
        self._stopwatch = Stopwatch(task, self._original, self._truth, options, progress, run.measured)
        self._open.callback(self._stopwatch.close)
        try:
            progress.started("truth", *task.names("float64"))
            self._description = self._truth.prepare()
            progress.finished("truth", *task.names("float64"), "ready")
            # A GPU and its host can do that beside the check of the first variant.
            warming = ThreadPoolExecutor(max_workers=1)
            self._open.callback(warming.shutdown)
            self._warmed = warming.submit(self._stopwatch.warm_up if task.place == "cuda" else lambda: None)
        except WorkerFailure as failure:
            self._unusable = failure
            progress.finished("truth", *task.names("float64"), "error")
        except BaseException:
            self.close()
            raise

    def check_and_time(self, task, result, build=False):
        """Set the verdict of one of the group's variants, and its times where it passes. `build`: it has not been built yet."""
        if self._unusable:
            return give(result, "error", f"the original does not run: {self._unusable}", self._unusable.details)
        try:
            if not build:
                self._describe(task, result)
            if self._options.sanitizes(task):
                self._sanitize(task, result)
            if result["verdict"]:
                return
            with self._run.worker_for(task) as worker:
                self._check(worker, task, result, build)
                if result["verdict"] is None:
                    give_doubt(result)
                if result["verdict"] is None:
                    result["verdict"] = "pass"
                    if task.place != "emulator":
                        self._warmed.result()
                        self._time(worker, task, result)
        except WorkerFailure as failure:
            give_failure(result, failure)

    def _describe(self, task, result):
        """Say at what precision and size the variant is judged; of one that cannot be built, nothing is said."""
        result["precision"] = self._description["precision"]
        result["shape"] = {"inputs": self._description["inputs"], "settings": task.settings}

    def _sanitize(self, task, result):
        names = task.names()
        self._progress.started("sanitize", *names)
        limit = self._options.time_limit
        with small_case(task.model, self._run.original(task), self._run.probe_seed, limit) as (original, probes, folder):
            load = candidate_arguments(original, task, self._options, original["weights"])
            examination = examine(load, probes, folder, limit)
        give_examination(result, examination)
        self._progress.finished("sanitize", *names, examination.outcome)

    def _check(self, worker, task, result, build):
        names = task.names()
        self._progress.started("build" if build else "check", *names)
        loaded = load_candidate(worker, self._original, task, self._options, self._truth.weights)
        result["variant_precision"] = loaded["precision"]
        if build:
            self._run.build_in(worker, task, result)
            self._progress.finished("build", *names, "built")
            self._describe(task, result)
            self._progress.started("check", *names)
        judge(worker, self._truth, result, self._options.time_limit)
        self._progress.finished("check", *names, result["verdict"] or "pass")

    def _time(self, worker, task, result):
        names = task.names()
        self._progress.started("time", *names)
        try:
            result.update(self._stopwatch.time(worker, result))
            outcome = f"{result['time_ms']['median']:.3g} ms"
        except Rejected as rejection:
            give(result, "fail", str(rejection))
            outcome = "fail"
        self._progress.finished("time", *names, outcome)

    def close(self):
        self._open.close()


class _SharedBench:
    """A bench for `uses` uses by several threads: `make()` gives it for the first, and it is closed after the last."""

    def __init__(self, make, uses):
        self._make = make
        self._uses_left = uses
        self._bench = None
        self._lock = threading.Lock()

    def __enter__(self):
        with self._lock:
            self._bench = self._bench or self._make()
            return self._bench

    def __exit__(self, *exception):
        with self._lock:
            self._uses_left -= 1
            if not self._uses_left:
                self.close()

    def close(self):
        """Safe to call twice."""
        if self._bench:
            self._bench.close()


class _Builders:
    """Makes calls side by side, at most so many at once: compilers do not disturb one another. What one raises ends all."""

    def __init__(self, most):
        self._pool = ThreadPoolExecutor(max_workers=most)
        self._calls = {}

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind:
            kill_all()
        self._pool.shutdown(cancel_futures=True)

    def begin(self, key, call):
        """`wait_for(key)` waits for it. The key is told from others by being the same object."""
        self._calls[id(key)] = self._pool.submit(call)

    def wait_for(self, key):
        self._calls[id(key)].result()

    def wait_for_all(self):
        for call in self._calls.values():
            call.result()


def _in_building_order(pairs):
    """The longest file first, or the last of all to be built would leave the other processors idle; then the shortest, which
    is soon to be seen; then the rest."""
    ordered = sorted(pairs, key=lambda pair: -pair[0].variant.path.stat().st_size)
    return ordered[:1] + ordered[:0:-1][:1] + ordered[1:-1] if len(ordered) > 2 else ordered


def load_candidate(worker, original, task, options, weights):
    """Have a worker load the task's variant. Raises WorkerFailure."""
    return worker.ask("candidate.load", options.time_limit, **candidate_arguments(original, task, options, weights))


def candidate_arguments(original, task, options, weights):
    """The arguments of candidate.load."""
    return original | {"variant": str(task.variant.path), "weights": weights, "debug": options.debug}


def blank_result(task):
    """What is known of a task before anything ran; "verdict" is None."""
    return {
        "model": task.model.name,
        "variant": task.variant.name,
        "backend": task.variant.backend,
        "ran_on": task.place,
        "verdict": None,
        "reason": None,
        "details": "",
        "source_sha256": catalog.sha256(task.variant.path),
        "code_sha256": catalog.code_sha256(task.variant.path),
        "kernels_sha256": catalog.kernels_sha256(task.variant.path),
        "model_sha256": catalog.sha256(task.model.path),
        "shape": {"inputs": [], "settings": task.settings},
        "precision": None,
        "variant_precision": None,
        "check": None,
        "build_seconds": None,
        "built": False,
        "ptxas": None,
        "time_ms": None,
        "peak_mib": None,
        "floor_ms": None,
        "floor_bound": None,
        "work": None,
        "ceilings": None,
        "speedup": None,
        "baselines_ms": {},
        "baselines_unavailable": {},
        "outcome": None,
        "control": None,
        "rounds": None,
        "calls": None,
        "rechecked": None,
        "back_to_back_ms": None,
        "clocks": None,
        "notes": [],
        "graphed": None,
        "training": None,
        "findings": [],
        "sanitizer": None,
        "phases": {},
    }


def _roomy_folder():
    """Where tensors are exchanged: memory where there is plenty of it, the disk otherwise."""
    shared_memory = Path("/dev/shm")
    enough = 8 << 30
    if shared_memory.is_dir() and os.access(shared_memory, os.W_OK) and shutil.disk_usage(shared_memory).free > enough:
        return str(shared_memory)
    return None
