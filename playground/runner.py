"""One run: build everything side by side, then check and time each variant in a process of its own."""

import contextlib
import itertools
import os
import secrets
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from playground import catalog
from playground.stopwatch import baselines, statistics
from playground.worker import WorkerFailure, WorkerProcess, kill_all

PROBES = ("own", "scaled")


@dataclass(frozen=True)
class Task:
    """A variant of a model, and the place where it runs: "cuda", "cpu" or "emulator"."""

    model: catalog.Model
    variant: catalog.Variant
    place: str
    settings: dict = field(default_factory=dict)

    @property
    def group(self):
        """What shares an original: the same truth and the same baselines."""
        return self.model.path, self.place, repr(sorted(self.settings.items()))


@dataclass(frozen=True)
class Options:
    """`training` times training steps too; `seconds` is the budget of one timing; `time_limit` that of one request."""

    quick: bool = False
    training: bool = False
    time_limit: float = 300.0

    @property
    def seconds(self):
        return 0.5 if self.quick else 2.0


class Runner:
    """Runs tasks and gives the list of results of the JSON document."""

    def __init__(self, options, progress):
        self._options = options
        self._progress = progress
        self.seed = secrets.randbits(31)  # inputs that no file can foresee

    def run(self, tasks):
        """One result a task, in their order. Failures of a variant are its verdict; nothing of it is raised."""
        results = {id(task): _blank_result(task) for task in tasks}
        try:
            self._build_all(tasks, results)
            for _, group in itertools.groupby(tasks, key=lambda task: task.group):
                built = [task for task in group if results[id(task)]["verdict"] is None]
                if built:
                    self._run_group(built, results)
        except BaseException:
            kill_all()
            raise
        return [results[id(task)] for task in tasks]

    def _build_all(self, tasks, results):
        """Side by side: compilers do not disturb one another, and nothing is being timed yet."""
        with ThreadPoolExecutor(max_workers=min(4, max(1, (os.cpu_count() or 1) // 2))) as pool:
            builds = [pool.submit(self._build, task, results[id(task)]) for task in tasks]
            try:
                for build in builds:
                    build.result()
            except BaseException:
                for build in builds:
                    build.cancel()
                kill_all()
                raise

    def _build(self, task, result):
        self._progress.started("build", task.model.name, task.variant.name)
        try:
            with WorkerProcess() as worker:
                self._load_candidate(worker, task, None)
                built = worker.ask("candidate.build", self._options.time_limit, seed=self.seed)
            result["build_seconds"], result["built"] = built["seconds"], built["built"]
        except WorkerFailure as failure:
            _give_failure(result, failure)
        self._progress.finished("build", task.model.name, task.variant.name, result["verdict"] or "built")

    def _run_group(self, tasks, results):
        """Tasks of one model, place and size."""
        first = tasks[0]
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="playground-", dir=_roomy_folder())))
            original = _Original(first, folder, self.seed, self._options, self._progress)
            stack.callback(original.close)
            try:
                description = original.prepare()
            except WorkerFailure as failure:
                for task in tasks:
                    _give(results[id(task)], "error", f"the original does not run: {failure}", failure.details)
                return
            for task in tasks:
                result = results[id(task)]
                result["precision"] = description["precision"]
                result["shape"] = {"inputs": description["inputs"], "settings": task.settings}
                try:
                    with WorkerProcess() as worker:
                        self._check_and_time(worker, task, original, result)
                except WorkerFailure as failure:
                    _give_failure(result, failure)

    def _check_and_time(self, worker, task, original, result):
        names = task.model.name, task.variant.name
        self._progress.started("check", *names)
        self._load_candidate(worker, task, original.weights)
        for probe in PROBES:
            self._check(worker, probe, original, result)
            if result["verdict"]:
                break
        self._progress.finished("check", *names, result["verdict"] or "pass")
        if result["verdict"]:
            return
        result["verdict"] = "pass"
        if task.place != "emulator":
            self._progress.started("time", *names)
            self._time(worker, task, original, result)
            self._progress.finished("time", *names, f"{result['time_ms']['median']:.3g} ms")

    def _load_candidate(self, worker, task, weights):
        worker.ask(
            "candidate.load",
            self._options.time_limit,
            problem=str(task.model.path),
            variant=str(task.variant.path),
            settings=task.settings,
            place=task.place,
            weights=weights,
            seed=self.seed,
        )

    def _check(self, worker, probe, original, result):
        """Outputs on one probe, and gradients where it has any. Sets the verdict when something is wrong."""
        limit, outputs = self._options.time_limit, str(original.folder / "outputs")
        ran = worker.ask("candidate.run", limit, inputs=original.inputs(probe), outputs=outputs, poison=probe != "own")
        result["peak_mib"] = ran["peak_mib"]
        compared = original.compare("outputs", probe, outputs)
        check = result["check"] = _worse(result["check"], compared)
        if compared["complaint"]:
            return _give(result, "fail", compared["complaint"])
        if not original.differentiable(probe):
            return None
        answer = worker.ask("candidate.differentiate", limit, inputs=original.inputs(probe), outputs=outputs)
        if answer["unsupported"]:
            check["gradients"] = {"unsupported": answer["unsupported"]}
            return None
        check["gradients"] = original.compare("gradients", probe, outputs)
        in_training = original.compare("outputs", probe, outputs)
        for comparison in [*check["gradients"].values(), in_training]:
            if comparison["complaint"]:
                return _give(result, "fail", comparison["complaint"])
        return None

    def _time(self, worker, task, original, result):
        def measure(mode):
            limit = self._options.time_limit
            return worker.ask("candidate.time", limit, mode=mode, seed=self.seed, seconds=self._options.seconds)

        result.update(_timed(measure("forward"), original.timed("forward"), original.unavailable))
        floor = original.floor(task.model.name)
        if floor:
            result["floor_ms"], result["floor_bound"] = floor["milliseconds"], floor["bound"]
        else:
            result["baselines_unavailable"]["floor"] = original.unavailable["floor"]
        gradients = result["check"]["gradients"]
        if self._options.training and gradients and "unsupported" not in gradients:
            modes = ["weights"] if any(not name.startswith("input") for name in gradients) else []
            modes += ["weights_and_input"] if any(name.startswith("input") for name in gradients) else []
            result["training"] = {m: _timed(measure(m), original.timed(m), original.unavailable) for m in modes}


class _Original:
    """The referee and the baselines of one model at one size, started when they are first needed."""

    def __init__(self, task, folder, seed, options, progress):
        self.folder = folder
        self.weights = str(folder / "weights")
        self.unavailable = {}
        self._task = task
        self._seed = seed
        self._options = options
        self._progress = progress
        self._referee = WorkerProcess()
        self._baselines = None
        self._differentiable = {}
        self._samples = {}
        self._floor = None
        self._precision = None

    def prepare(self):
        """Truth on every probe. Returns {"inputs", "precision"}. Raises WorkerFailure."""
        self._progress.started("truth", self._task.model.name, "float64")
        description = self._referee.ask("referee.load", self._options.time_limit, **self._arguments())
        self._precision = description["precision"]
        for i, probe in enumerate(PROBES):
            prepared = self._referee.ask(
                "referee.prepare", self._options.time_limit, probe=probe, seed=self._seed + 1 + i, inputs=self.inputs(probe)
            )
            self._differentiable[probe] = prepared["differentiable"]
        self._progress.finished("truth", self._task.model.name, "float64", "ready")
        return description

    def inputs(self, probe):
        return str(self.folder / f"inputs-{probe}")

    def differentiable(self, probe):
        return self._differentiable[probe]

    def compare(self, what, probe, file):
        """`what` is "outputs" or "gradients"."""
        arguments = {"probe": probe, what: file}
        return self._referee.ask(f"referee.compare_{what}", self._options.time_limit, **arguments)

    def timed(self, mode):
        """{baseline: reply of Baselines.time}; a baseline that does not run is put into `unavailable` with its reason."""
        if mode not in self._samples:
            self._samples[mode] = {}
            for name in baselines.names_for(self._task.place, mode, self._options.quick):
                self._time_baseline(name, mode)
        return self._samples[mode]

    def _time_baseline(self, name, mode):
        self._progress.started("time", self._task.model.name, baselines.BASELINES[name].label)
        arguments = {"baseline": name, "mode": mode, "seed": self._seed, "seconds": self._options.seconds}
        try:
            reply = self._samples[mode][name] = self._ask_baselines("baselines.time", **arguments)
            outcome = f"{statistics.summarise(reply['samples_ms'])['median']:.3g} ms"
        except WorkerFailure as failure:
            self.unavailable[name] = outcome = str(failure)
        self._progress.finished("time", self._task.model.name, baselines.BASELINES[name].label, outcome)

    def floor(self, name):
        """{"milliseconds", "bound"}, or None where it cannot be counted."""
        if self._floor is None:
            try:
                arguments = {"name": name, "seed": self._seed, "precision": self._precision}
                self._floor = self._ask_baselines("baselines.floor", **arguments)
            except WorkerFailure as failure:
                self.unavailable["floor"] = str(failure)
                self._floor = {}
        return self._floor

    def _ask_baselines(self, what, **arguments):
        """Ask the process of the baselines; a new one when the last one died."""
        if self._baselines is None:
            self._baselines = WorkerProcess()
            self._baselines.ask("baselines.load", self._options.time_limit, **self._arguments())
        try:
            return self._baselines.ask(what, self._options.time_limit, **arguments)
        except WorkerFailure:
            self._baselines.close()
            self._baselines = None
            raise

    def _arguments(self):
        return {
            "problem": str(self._task.model.path),
            "settings": self._task.settings,
            "place": self._task.place,
            "weights": self.weights,
            "seed": self._seed,
        }

    def close(self):
        self._referee.close()
        if self._baselines:
            self._baselines.close()


def _blank_result(task):
    return {
        "model": task.model.name,
        "variant": task.variant.name,
        "backend": task.variant.backend,
        "ran_on": task.place,
        "verdict": None,
        "reason": None,
        "details": "",
        "source_sha256": catalog.sha256(task.variant.path),
        "model_sha256": catalog.sha256(task.model.path),
        "shape": {"inputs": [], "settings": task.settings},
        "precision": None,
        "check": None,
        "build_seconds": None,
        "built": False,
        "time_ms": None,
        "peak_mib": None,
        "floor_ms": None,
        "floor_bound": None,
        "speedup": None,
        "baselines_ms": {},
        "baselines_unavailable": {},
        "training": None,
        "findings": [],
    }


def _give(result, verdict, reason, details=""):
    result.update(verdict=verdict, reason=reason, details=details)


def _give_failure(result, failure):
    """A variant that ends a request without a result has an error; one in which the emulator finds a mistake has failed."""
    if failure.is_finding:
        result["findings"].append(str(failure))
        _give(result, "fail", str(failure))
    else:
        _give(result, "error", str(failure), failure.details)


def _worse(check, comparison):
    """The check with a further comparison of outputs: the probe nearest to (or furthest over) what is allowed counts."""
    new = {key: comparison[key] for key in ("max_error", "allowed", "eager_error")}
    new |= {"gradients": None, "mutants_rejected": None}
    if check is None or comparison["complaint"]:
        return new

    def share(errors):
        return errors["max_error"] / errors["allowed"] if errors["allowed"] else errors["max_error"]

    return new if share(new) >= share(check) else check


def _timed(own, others, unavailable):
    """The timing keys of a result, from raw samples."""
    return {
        "time_ms": statistics.summarise(own["samples_ms"]),
        "peak_mib": own["peak_mib"],
        "speedup": {name: statistics.ratio(other["samples_ms"], own["samples_ms"]) for name, other in others.items()},
        "baselines_ms": {name: statistics.summarise(other["samples_ms"]) for name, other in others.items()},
        "baselines_unavailable": dict(unavailable),
    }


def _roomy_folder():
    """Where tensors are exchanged: memory where there is plenty of it, the disk otherwise."""
    shared_memory = Path("/dev/shm")
    enough = 8 << 30
    if shared_memory.is_dir() and os.access(shared_memory, os.W_OK) and shutil.disk_usage(shared_memory).free > enough:
        return str(shared_memory)
    return None
