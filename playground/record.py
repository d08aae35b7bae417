"""The result of a run as dataclasses: what the driver composes, what the reports read, and the form of the JSON document.

Times are in milliseconds (`_ms`) or seconds, memory is in MiB (`_mib`) or bytes, errors are shares of the outputs' standard
deviation. serial.py turns a record into JSON and back; `python -m playground.run_record` prints the form.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from playground.serial import OMITTED, Amount, Count, Text, dump, require, values
from playground.subject import Subject

PASS: Final = "pass"
FORWARD_ONLY: Final = "forward only"
FAIL: Final = "fail"
ERROR: Final = "error"
SKIPPED: Final = "skipped"
VERDICTS = (PASS, FORWARD_ONLY, FAIL, ERROR, SKIPPED)
MINE, NOBODY = TRUST = ("mine", "nobody")  # whose files the inner clock alone times: the caller's, or only the project's
TIMED = (PASS, FORWARD_ONLY)  # verdicts with which a variant is timed
STANDARDS = {"forward": "forward", "drop-in": "drop_in"}  # as --standard names them -> their keys
NOT_MEASURED: Final = "not measured"  # the verdict of an Outcome without a ratio, as the inner clock cannot tell
UNPROVED: Final = "not proved"  # or the outer one cannot


Verdict = Literal["pass", "forward only", "fail", "error", "skipped"]
Bound = Literal["memory", "compute"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Milliseconds: the median of all calls, and between which two values the middle 60% lie."""

    median: Amount
    p20: Amount
    p80: Amount

    def verify(self, where: str) -> None:
        require(self.p20 <= self.median <= self.p80, where, "p20 <= median <= p80", dump(self))


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Between `low` and `high` lies a ratio with 95%."""

    low: Amount
    high: Amount

    def verify(self, where: str) -> None:
        require(self.low <= self.high, where, "low <= high", dump(self))


@dataclass(frozen=True, kw_only=True)
class Ratio(Interval):
    """How many times as fast: the median over paired rounds, and its 95% interval."""

    ratio: Amount


def scaled(ratio: Ratio, factor: float) -> Ratio:
    """Return the ratio, and both ends of its interval, times a factor."""
    return Ratio(ratio=factor * ratio.ratio, low=factor * ratio.low, high=factor * ratio.high)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Over the fastest baseline that is at least as precise, `against`; "any_precision" is the fastest of all, if another.

    "not measured" and "not proved" have a `reason`, and no ratio. `precise` says whether more rounds would not have been worth
    their time.
    """

    verdict: Literal["win", "tie", "loss", "not measured", "not proved"]
    against: Text | None = None
    ratio: Amount | None = None
    low: Amount | None = None
    high: Amount | None = None
    precise: bool = False
    any_precision: Text | None = None
    reason: Text | None = None

    def verify(self, where: str) -> None:
        if self.verdict in (NOT_MEASURED, UNPROVED):
            return require(self.reason is not None, f"{where}.reason", "a text", None)
        for name in ("against", "ratio", "low", "high"):
            require(getattr(self, name) is not None, f"{where}.{name}", "a text" if name == "against" else "a number", None)
        return self.measured.verify(where) if self.measured else None

    @property
    def measured(self) -> Ratio | None:
        """Return the ratio with its interval; None where nothing was measured."""
        if self.ratio is None or self.low is None or self.high is None:
            return None
        return Ratio(ratio=self.ratio, low=self.low, high=self.high)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """What the outer clock says of the variant over eager PyTorch: see clock/outer.py.

    Of a call, in turns of so many `calls`; `null_ms` is of a turn without work. `warm` is what the inner clock says of these.
    """

    ratio: Amount
    low: Amount
    high: Amount
    ms: Amount
    eager_ms: Amount
    null_ms: Amount
    control: Amount | None
    rounds: Count
    calls: Count | None = None
    warm: Ratio | None = None


@dataclass(frozen=True)
class Work:
    """Bytes that one step moves, and floating-point operations (two a multiply-add) that it does."""

    bytes: Amount
    flops: Amount


@dataclass(frozen=True, kw_only=True)
class Works:
    """The Work of one step: the least of any way to compute it, PyTorch's as written, and what no right pass can avoid."""

    least: Work | None = None
    as_written: Work | None = None
    certain: Work | None = None


@dataclass(frozen=True)
class Ceilings:
    """Rates a second, each from the median time of several runs; None where the hardware has no TF32 or no fast fp16."""

    read_bytes_per_second: Amount
    copy_bytes_per_second: Amount
    fp32_flops: Amount
    tf32_flops: Amount | None = None
    fp16_flops: Amount | None = None  # summed in float32


@dataclass(frozen=True)
class Clocks:
    """SM clock and its maximum in MHz, temperature in degrees Celsius, and what slows the GPU down.

    `slowed_us` says for how many microseconds each cause has done so since the driver was loaded; None where it does not tell.
    """

    sm_mhz: int
    max_sm_mhz: int
    celsius: int
    slowdowns: tuple[str, ...]
    slowed_us: dict[str, int] | None = None


@dataclass(frozen=True)
class ClocksAround:
    """The GPU's clocks before and after a timing."""

    before: Clocks
    after: Clocks


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How fast a variant is in one mode, forward or a training step, beside its baselines; all None where it was not timed.

    `speedup` has the ratio over each baseline that counts: `measured` is what the inner clock says, `proved` what the outer one
    does over eager PyTorch, None where it was not asked (`--trust mine`, the project's own files) or could not tell. Where it
    was, `speedup` is of calls whose caches are warm, as its are, and `measured`, of cold ones, is not proved.
    `speedup_proof` says what proves the speed-up where no clock beyond the file's reach does. `control` is the ratio of the
    original to itself. `back_to_back_ms` is a call by the driver's own clock, `launch_ms` what the host takes to launch one.
    `rechecked` counts timed results that were compared with the reference. `graphed` is the same under a CUDA graph, in which
    the baselines `not_graphed` were too slow to be captured.
    """

    time_ms: Spread | None
    peak_mib: Amount | None
    floor_ms: Amount | None = None
    floor_bound: Bound | None = None
    work: Works | None = None
    speedup: dict[str, Ratio] | None
    measured: dict[str, Ratio] | None = None
    proved: Ratio | None = None
    speedup_proof: Text | None = None
    outer: Outer | None = None
    outcome: Outcome | None = None
    control: Ratio | None = None
    baselines_ms: dict[str, Spread] = field(default_factory=dict)
    baselines_unavailable: dict[str, Text] = field(default_factory=dict)
    rounds: Count | None = None
    calls: Count | None = None
    rechecked: Count | None = None
    back_to_back_ms: Amount | None = None
    launch_ms: Amount | None = None
    clocks: ClocksAround | None = None
    notes: list[str] = field(default_factory=list)
    not_graphed: list[str] | None = None
    graphed: "Timing | Unavailable | None" = None

    def verify(self, where: str) -> None:
        if self.floor_ms is not None:
            require(self.floor_bound is not None, f"{where}.floor_bound", "memory or compute", None)

    @property
    def median_ms(self) -> float | None:
        return self.time_ms.median if self.time_ms else None

    @property
    def ratios(self) -> dict[str, Ratio]:
        """Return the ratio over each baseline."""
        return self.speedup or {}

    def proved_over(self, baseline: str) -> Ratio | None:
        """Return what the outer clock says over a baseline: over eager PyTorch, times what the inner one says of the two."""
        inner = self.measured or {}
        if not self.proved or "eager" not in inner or baseline not in inner or not inner["eager"].ratio:
            return None
        return scaled(self.proved, inner[baseline].ratio / inner["eager"].ratio)

    @property
    def why_not_measured(self) -> str | None:
        """Return why there is no speed-up, such as 'the machine is busy (...)'; None where there is one, or no baseline."""
        return self.outcome.reason if self.outcome else None

    @property
    def in_a_graph(self) -> "Timing | None":
        """Return the timing under a CUDA graph; None where there is none."""
        return self.graphed if isinstance(self.graphed, Timing) else None


@dataclass(frozen=True)
class Unavailable:
    """Why there is no timing under a CUDA graph."""

    unavailable: Text


@dataclass(frozen=True, kw_only=True)
class Timed(Timing):
    """The forward pass, and each training mode by its name; `ceilings` are the machine's."""

    ceilings: Ceilings | None = None
    training: dict[str, Timing | None] | None = None


NOT_TIMED = Timed(time_ms=None, peak_mib=None, speedup=None)


@dataclass(frozen=True, kw_only=True)
class Standard:
    """The verdict under one of the two standards, and all reasons against it."""

    verdict: Literal["pass", "fail", "error", "skipped"] | None = None
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Standards:
    """The verdicts under both standards."""

    forward: Standard = field(default_factory=Standard)
    drop_in: Standard = field(default_factory=Standard)


@dataclass(frozen=True)
class Caveat:
    """What is to be known of a variant that is right: a stable tag, a sentence, the standard that it costs, a line."""

    tag: Text
    text: Text
    costs: Literal["drop-in"] | None = None
    line: Count | None = None


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The class of the outputs' accuracy, the error, the limit of "as PyTorch", the error that the caller accepts."""

    kind: Text = field(metadata={"key": "class"})
    error: Amount | None
    limit: Amount | None
    accepted: Amount | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """A largest error, what is allowed, what PyTorch's is, and what the stated precision permits to any algorithm."""

    max_error: Amount | None
    allowed: Amount | None
    eager_error: Amount | None
    permitted_error: Amount | None = None

    @property
    def is_within(self) -> bool:
        """Return whether the error is allowed; one that is no number is not."""
        return self.max_error is not None and self.allowed is not None and self.max_error <= self.allowed


@dataclass(frozen=True, kw_only=True)
class GradientErrors(Errors):
    """The errors of a gradient; `complaint` says what is wrong with it, by more than the largest error."""

    complaint: str | None = None

    @property
    def is_within(self) -> bool:
        return self.max_error is not None and not self.complaint


@dataclass(frozen=True)
class Unsupported:
    """Why there are no gradients."""

    unsupported: Text


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What came of a check: what is wrong, or a remark, such as why it was not made."""

    complaint: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Probe(Entry, Errors):
    """What came of a probe; the errors are None where it was not compared."""

    max_error: Amount | None = None
    allowed: Amount | None = None
    eager_error: Amount | None = None


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """A kernel on the GPU, how often it was launched and its microseconds in all."""

    name: str
    calls: Amount
    microseconds: Amount


@dataclass(frozen=True, kw_only=True)
class OwnWork:
    """What the variant has of its own: names of what it builds or opens, calls of it, and its share of the GPU's time.

    `writes` is how often other code than PyTorch's wrote memory, `reached` are the operators of PyTorch's that its functions
    call. `spoiled` says whether its kernels' results were changed, `note` why the kernels do not count.
    """

    builds: list[str]
    opened: list[str] = field(default_factory=list)
    means_to_build: bool
    triton: bool
    own_calls: Amount
    writes: Amount | None = None
    reached: list[str] = field(default_factory=list)
    spoiled: bool
    kernels: list[KernelTime]
    own_share: Amount | None
    note: str | None = None


@dataclass(frozen=True)
class OwnCheck:
    """What the problem's own check says of the outputs."""

    complaint: Text | None


@dataclass(frozen=True, kw_only=True)
class Check(Errors):
    """What was compared: the errors of the probe that is nearest to its limit, gradients, probes, behaviour, own work.

    `mutants_rejected` is "14/14": wrong versions of the original that the probes reject. `domain` are the conditions that every
    probe's inputs keep, `reference` how the float64 reference was computed.
    """

    gradients: dict[str, GradientErrors] | Unsupported | None
    mutants_rejected: Text | None = None
    mutants_survived: list[str] | None = field(default=None, metadata=OMITTED)
    probes: dict[str, Probe] = field(default_factory=dict)
    behaviour: dict[str, Entry] = field(default_factory=dict)
    work: OwnWork | None = None
    domain: list[str] = field(default_factory=list)
    reference: list[str] = field(default_factory=list)
    own_check: OwnCheck | None = field(default=None, metadata=OMITTED)


UNCHECKED = Check(max_error=None, allowed=None, eager_error=None, gradients=None)


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """The verdict and what it rests on. `reason` is the worst complaint, None with "pass"; `details` a traceback."""

    verdict: Verdict
    reason: Text | None
    details: str = ""
    standards: Standards | None = None
    caveats: list[Caveat] = field(default_factory=list)
    accuracy: Accuracy | None = None
    findings: list[str] = field(default_factory=list)
    check: Check | None

    @property
    def checked(self) -> Check:
        """Return the check, a blank one where nothing was compared."""
        return self.check or UNCHECKED


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A mode beside an earlier run: see report/against.py. `time` and `speedup` are above 1 where this run is faster."""

    timed: str
    verdict: Literal["faster", "same", "slower", "not comparable"]
    reason: str | None
    old_ms: Amount | None
    new_ms: Amount | None
    time: Ratio | None = None
    speedup: Ratio | None = None
    baseline: str | None = None
    same_source: bool | None


@dataclass(frozen=True, kw_only=True)
class Result(Timed, Judgment, Subject):
    """All that is known of one variant at one place and size."""

    against: list[Comparison] | None = field(default=None, metadata=OMITTED)

    def verify(self, where: str) -> None:
        """Require what depends on the verdict: what is wrong is never timed."""
        super().verify(where)
        if self.verdict in (*TIMED, FAIL):
            for name in ("backend", "ran_on", "source_sha256", "check"):
                expected = f"a value, since the verdict is {self.verdict}"
                require(getattr(self, name) is not None, f"{where}.{name}", expected, None)
        if self.verdict == PASS and self.check:
            gradients = self.check.gradients if isinstance(self.check.gradients, dict) else {}
            compared = {"": self.check, **{f".gradients.{name}": each for name, each in gradients.items()}}
            for of, errors in compared.items():
                for name in ("max_error", "allowed", "eager_error"):
                    require(getattr(errors, name) is not None, f"{where}.check{of}.{name}", "a number", None)
        elif self.verdict != PASS:
            require(self.reason is not None, f"{where}.reason", "a text", None)
        for name in ("time_ms", "speedup", "training") if self.verdict not in TIMED else ():
            value = getattr(self, name)
            require(value is None, f"{where}.{name}", f"null, since the verdict is {self.verdict}", dump(value))


def compose(subject: Subject, *parts: Judgment | Timing) -> Result:
    """Return the Result of what is known of a variant: later parts replace earlier ones."""
    known: dict[str, Any] = values(NOT_TIMED)
    for part in (subject, *parts):
        known |= values(part)
    return Result(**known)
