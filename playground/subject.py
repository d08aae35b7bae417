"""What is judged, and what is known of it before: a part of the record (record.py)."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from playground.serial import OMITTED, Amount, Count, Rule, Text

NOTHING_TO_DO = "no kernel of its own to look at"  # of compute-sanitizer

IS_DIGEST = Rule("64 hexadecimal digits", lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)))
Digest = Annotated[str, IS_DIGEST]

Place = Literal["cuda", "cpu", "emulator"]

HALF = ("fp16", "bf16")  # the precisions to which a whole problem can be converted

StandardName = Literal["forward", "drop-in"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shapes of the inputs, or what stands for one that is no tensor, and the constants that were set."""

    inputs: list[Any] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of the sizes that a problem lists, and how its benchmarks, so many, are ranked."""

    kind: Literal["test", "benchmark"]
    name: str
    ranking: str
    benchmarks: int


@dataclass(frozen=True, kw_only=True)
class PairFacts:
    """A pair of a suite: KernelBench's numbers, its origin, the claimed speed-up, and a definition's `workload`."""

    problem: str
    solution: str
    level: int | None = None
    problem_id: int | None = None
    sample_id: int | None = None
    origin: str | None = None
    claimed_speedup: float | None = field(default=None, metadata=OMITTED)
    case: Case | None = field(default=None, metadata=OMITTED)
    workload: dict[str, Any] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a cubin; memory in bytes. `shared` is what is declared statically, what a launch adds is not in it."""

    name: Text
    registers: Count
    stack: Count
    spill_stores: Count
    spill_loads: Count
    shared: Count


@dataclass(frozen=True)
class Unknown:
    """Why ptxas could not be asked."""

    unknown: Text


@dataclass
class Examination:
    """What compute-sanitizer found: `findings`, one line each; `problem`, why its silence would prove nothing; `notes`.

    `passes` are those that were run ("forward", "backward"), `tools` says of each how many reports concern the variant's
    kernels and how many others it made, `kernels` are the names it went by, `settings` the model's constants that were changed.
    """

    findings: list[str] = field(default_factory=list)
    problem: str | None = None
    notes: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    tools: dict[str, dict[str, int]] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """Return the outcome in a few words."""
        if self.findings:
            return "fail"
        return f"error: {self.problem}" if self.problem else "nothing found" if self.tools else NOTHING_TO_DO


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a pair of a cluster's was judged, and the two seeds there."""

    name: str | None
    host: str
    worker: str
    seed: int
    probe_seed: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is judged, and what is known of it before: its files, its build, its precision and size.

    `built` says whether it was built in this run, `printed` what it printed, `phases` the seconds of each. `accepted_races` are
    those that the text calls benign: {line: how often}. `unvaried` says why its times would mean nothing.
    """

    model: Text
    variant: Text
    backend: Literal["cuda", "cpu"] | None
    ran_on: Place | None
    precision: Text | None = None
    variant_precision: Text | None = None
    shape: Shape = field(default_factory=Shape)
    standard: StandardName | None = None
    weights: Literal["by name", "by seed"] | None = None
    weights_differ: str | None = None
    printed: str = ""
    accepted_races: dict[str, Count] = field(default_factory=dict)
    source_sha256: Digest | None
    code_sha256: Digest | None = None
    kernels_sha256: Digest | None = None
    model_sha256: Digest | None = None
    build_seconds: Amount | None
    built: bool
    ptxas: dict[str, list[Kernel]] | Unknown | None = None
    sanitizer: Examination | None = None
    pair: PairFacts | None = None
    phases: dict[str, Amount] = field(default_factory=dict)
    unvaried: str | None = None
    device: Device | None = field(default=None, metadata=OMITTED)
