"""What a run is asked for: tasks, and the options that all of them share."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from playground import catalog
from playground.record import MINE, NOBODY, TRUST
from playground.subject import HALF, PairFacts, Shape, StandardName, Subject
from playground.worker import sandbox

TRUSTED = "by a trusted author"
NOT_PROVED = "not proved against deceit"  # outside of a sandbox a judged file's code can reach the outer clock's processes, too
MOST_ACCEPTED = 0.01  # of an output's spread: beyond it, wrong is no matter of accuracy
# Option -> what it may be; the first is the command line's default.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "device": ("auto", "cuda", "cpu", "emulator"),
    "standard": (None, "drop-in", "forward"),
    "precision": ("default", "strict", *HALF),
    "sandbox": sandbox.MODES,
    "trust": TRUST,
}
PATIENCE_FOR_A_PAIR = 3.0  # seconds, of a whole run, which would have used up a short run's at its beginning


@dataclass(frozen=True)
class Task:
    """A variant of a model, and the place where it runs: "cuda", "cpu" or "emulator".

    `point` holds settings in which tasks differ, `standard` the one to meet, `pair` what the document says of a suite's pair,
    `settled` the (verdict, reason) of a task that cannot run, `first` the probe on which the variant failed before.
    """

    model: catalog.Model
    variant: catalog.Variant
    place: Any  # a record.Place; None for one that is settled
    settings: dict[str, Any] = field(default_factory=dict)
    point: dict[str, Any] = field(default_factory=dict)
    standard: StandardName = "drop-in"
    pair: PairFacts | None = None
    settled: tuple[Literal["error", "skipped"], str] | None = None
    first: str | None = None
    timed: bool = True

    @functools.cached_property
    def hashes(self) -> dict[str, str | None]:
        """Return the hashes of the two files, as the result has them, read once; None where one cannot be read."""
        of_variant = {"source": catalog.sha256, "code": catalog.code_sha256, "kernels": catalog.kernels_sha256}
        files = {f"{what}_sha256": (hashed, self.variant.path) for what, hashed in of_variant.items()}
        files["model_sha256"] = catalog.sha256, self.model.path
        return {key: hashed(path) if os.access(path, os.R_OK) else None for key, (hashed, path) in files.items()}

    @property
    def group(self) -> tuple[Any, ...]:
        """Return the key of tasks that share an original: its reference and its baselines."""
        return self.model.path, self.place, repr(sorted(self.settings.items()))

    @property
    def subject(self) -> Subject:
        """Return what is known of the task before anything ran."""
        of = {"model": self.model.name, "variant": self.variant.name, "backend": self.variant.backend, "ran_on": self.place}
        known: dict[str, Any] = of | {"build_seconds": None, "built": False, **self.hashes}
        return Subject(**known, shape=Shape(settings=self.settings), standard=self.standard, pair=self.pair)

    def names(self, what: str | None = None) -> tuple[str, str]:
        """Return (model, variant) as progress shows them; `what` stands in the place of the variant."""
        point = [f"{name}={value}" for name, value in self.point.items()]
        return self.model.name, ", ".join([what or self.variant.name, *point])


@dataclass(frozen=True)
class Options:
    """The options of a run, of either command and of the API. Raises ValueError for a value that an option does not have.

    `device` "auto" is the GPU where there is one; `standard` None: see plan.standard_of. `training` times training steps, too,
    `check_only` nothing; `time_limit` is the seconds of one request to a process. `max_autotune` adds that to the baselines,
    `sanitize` compute-sanitizer, `ptxas` what kernels take. `debug` has the emulator build without optimisation. `precision` is
    "strict", which forbids TF32, or that of models and inputs; `accept` the error, in the output's spread, that may be timed.
    `builds` is the folder of extensions of files that are not the project's; None: one for each. `sandbox` "auto" is for these
    where it can be had, "require" for everything. `trust` MINE is for the inner clock alone, NOBODY for the outer one, too.
    """

    device: str = "auto"
    standard: StandardName | None = None
    quick: bool = False
    training: bool = False
    time_limit: float = 300.0
    debug: bool = False
    max_autotune: bool = False
    sanitize: bool = False
    ptxas: bool = False
    accept: float | None = None
    builds: str | None = None
    precision: str = "default"
    check_only: bool = False
    sandbox: str = "off"
    trust: str = NOBODY

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")
        if self.accept is not None and not 0 < self.accept <= MOST_ACCEPTED:
            raise ValueError(f"accept is {self.accept!r}, expected standard deviations, at most {MOST_ACCEPTED:g}")

    @property
    def strict(self) -> bool:
        """Return whether TF32 is forbidden."""
        return self.precision == "strict"

    @property
    def half(self) -> str | None:
        """Return the precision of HALF to which models and inputs are converted; None where they stay as they are."""
        return self.precision if self.precision in HALF else None

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the options that stand in the document: a run is resumed with the same ones alone."""
        always = {name: getattr(self, name) for name in ("quick", "training", "strict", "max_autotune", "sanitize", "trust")}
        later = {"accept": self.accept, "precision": self.half, "check_only": self.check_only}
        return always | {name: value for name, value in later.items() if value}

    @property
    def seconds(self) -> float:
        """Return the budget of one timing."""
        return 1.0 if self.quick else 3.0

    def patience(self, tasks: Sequence[Task]) -> float:
        """Return the seconds that all timings of a run wait for a busy machine. The tests, which are busy, do not wait."""
        pairs = sum(task.pair is not None for task in tasks)
        return float(os.environ.get("PLAYGROUND_PATIENCE") or (10.0 if self.quick else 30.0) + PATIENCE_FOR_A_PAIR * pairs)

    def times(self, task: Task) -> bool:
        """Return whether the task is timed where it is right."""
        return task.timed and task.place != "emulator" and not self.check_only

    def isolates(self, task: Task) -> bool:
        """Return whether the task's processes run in a sandbox. What compute-sanitizer looks at does not."""
        return self.isolation([task]).startswith("on")

    def proof(self, task: Task) -> str | None:
        """Return what proves the task's speed-ups where no clock beyond its file's reach does; None where one does."""
        if task.variant.is_catalogued:
            return None
        if self.trust == MINE:
            return TRUSTED
        return None if self.isolates(task) else NOT_PROVED

    def isolation(self, tasks: Sequence[Task]) -> str:
        """Return 'on (bubblewrap 0.8.0)' where one of the tasks has a sandbox, or 'off (...)', with the reason."""
        if self.sandbox == "off":
            return "off (--sandbox off)"
        if all(self.sandbox == "auto" and task.variant.is_catalogued for task in tasks):
            return "off (all files are the project's)"
        if self.sanitize:
            return "off (compute-sanitizer runs files outside of it)"
        try:
            return f"on ({sandbox.version()})"
        except sandbox.Missing as missing:
            if self.sandbox == "require":
                raise
            return f"off ({missing})"

    def sanitizes(self, task: Task) -> bool:
        """Return whether compute-sanitizer is to look at the task, which it also does where the first call failed."""
        return self.sanitize and task.place == "cuda"
