"""A race: who is timed, round by round, and which of the rounds count. Disturbed ones do not.

A round asks every side, in random order, for a small batch of calls: the variants of a model that are ready, their baselines,
and the control. Where other processes had the processors or the GPU meanwhile, another one is played while there is patience.
"""

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from playground.clock import GRAPHED, SETTLING_CALLS, WARM_UP_CALLS, statistics
from playground.judge.failure import WorkerFailure
from playground.machine.load import OtherLoad, Others, usable_processors
from playground.record import Ceilings, Clocks, Ratio
from playground.untrusted import new_seed

if TYPE_CHECKING:
    from playground.worker.replies import Started

MIN_ROUNDS, MAX_ROUNDS = 9, 200
FIRST_LOOK = statistics.ROUNDS_FOR_AN_INTERVAL  # rounds after which those that are far from the fastest are timed enough
FAR = 1.1  # times as slow as the slowest baseline whose ratio matters
ROUNDS_BETWEEN_LOOKS = 3
BATCH_MS = {"cpu": 60, "cuda": 30}  # about what one side is asked to do at a time, all around the calls included
MAX_CALLS = 10  # of a batch, on average 1.5 times as many

# What others may take of the processors in a round that counts. A kernel on the CPU has a thread on each of them and waits for
# the last; what a GPU is given to do needs one, and one for the driver.
BUSY_CORES, BUSY_SHARE = 0.25, 0.02
CORES_FOR_A_GPU = 2
# The flush before each call of a trusted side is always the same work. On a GPU that nobody else uses it varies by 3%. Of
# several processes on a GPU each has it for a while, in which a flush takes as long as ever, but not many flushes in a row.
SLOW_FLUSH, SLOW_FLUSHES = 1.25, 0.2
SPREAD = 2.0  # p80 over p20 of the original's own calls: beyond it they were disturbed, whoever did it
CONTROL_OFF = 0.05  # how far the original may be from itself
GRAPHED_BELOW_MS = 1.0  # where the host's part of a step can be longer than the GPU's
# On a GPU a process draws what its launches take when it starts; docs/how_times_are_taken.md has the figures.
LAUNCHES_DIFFER, LAUNCHES_DIFFER_BELOW_MS, LAUNCHES_DIFFER_MS, GRAPHS_DIFFER_MS = 0.09, 0.1, 0.0025, 0.0003
LEAST_MS = 1e-6  # what a clock's nanosecond is: a file that claims no time at all has a ratio, too
PAUSE = 0.2  # seconds after a round that was disturbed
WRONG_WHEN_TIMED = "is right when it is checked and wrong when it is timed: "
STANDING_CHANGED = "while it was timed, the processors or the priority of another process were changed"


class Rejected(Exception):
    """What was timed is not what was checked, or the times are not true; the text is the reason."""


class BaselineFailed(Exception):
    """A baseline, or the control, ran at first and then did not; its process is gone. The arguments are its name, and why."""


class Side:
    """One that is timed, in a process that `ask(request, **arguments)` reaches: `is_trusted` if no judged file is loaded there.

    A round is the milliseconds of its calls.
    """

    def __init__(self, name: str, mode: str, place: str, ask: Callable[..., Any], is_trusted: bool = True) -> None:
        self.name, self.mode, self.is_trusted = name, mode, is_trusted
        self.rounds, self.disturbed = list[list[float]](), list[list[float]]()  # those that count, and that do not
        self.late = list[bool]()  # for each call, whether the device was busy on other streams after the current one
        self.flushes, self.launches = list[float](), list[float]()  # milliseconds of those of the last round, of each call's
        self._settling_calls, self._batch_ms = SETTLING_CALLS[place], BATCH_MS[place]
        self._ask = ask

    def start(self) -> "Started":
        """Warm the side up. Return the reply, which `resume` takes where it is already warm."""
        started = self.ask("start", seeds=[new_seed() for _ in range(WARM_UP_CALLS)])
        self.resume(started)
        return started

    def resume(self, started: "Started") -> None:
        per_call = max(started.milliseconds, 1e-3) if math.isfinite(started.milliseconds) else self._batch_ms
        self._calls = max(1, min(MAX_CALLS, round(self._batch_ms / per_call)))
        self.peak_mib, self.started_ms = started.peak_mib, started.milliseconds

    def play(self, last_seed: int) -> None:
        """Play one round: a number of calls that cannot be foreseen, the last of them on the content of `last_seed`."""
        calls = self._settling_calls + self._calls + secrets.randbelow(self._calls + 1)
        seeds = [new_seed() for _ in range(calls - 1)] + [last_seed]
        answer = self.ask("time", seeds=seeds)
        samples, that_count = answer.samples_ms, slice(self._settling_calls, None)
        if len(samples) != calls or not all(math.isfinite(sample) and sample >= 0 for sample in samples):
            raise Rejected(f"its process was asked to time {calls} calls and answered {str(samples)[:80]}")
        self.rounds.append([max(sample, LEAST_MS) for sample in samples[that_count]])
        self.late += answer.late[that_count]
        self.flushes = answer.flush_ms[that_count] if self.is_trusted else []
        self.launches += answer.launch_ms[that_count] if self.is_trusted else []

    def ask(self, request: str, **arguments: Any) -> Any:
        return self._ask(request, side=self.name, mode=self.mode, **arguments)

    @property
    def samples(self) -> list[float]:
        return [sample for samples in self.rounds for sample in samples]

    @property
    def median(self) -> float:
        return statistics.summarise(self.samples).median

    @property
    def launch_ms(self) -> float:
        """Return what the host takes to launch a call, of a trusted side; 0 of another."""
        return statistics.summarise(self.launches or [0.0]).median

    def back_to_back(self, count: int, held: int = 2) -> float:
        """Return milliseconds a call by the driver's own clock, of `count` calls with nothing between them."""
        self.ask("hold", seeds=[new_seed() for _ in range(held)])
        began = time.perf_counter()
        self.ask("repeat", count=count)
        return (time.perf_counter() - began) * 1e3 / count


@dataclass
class Patience:
    """Seconds that a run, or one timing of it, still waits for a machine that is busy; the latter's are the run's, too."""

    seconds: float
    whole: "Patience | None" = None

    def spend(self, seconds: float) -> None:
        for each in filter(None, (self, self.whole)):
            each.seconds = max(0.0, each.seconds - seconds)


@dataclass
class Measured:
    """What all timings of a run share."""

    patience: Patience
    ceilings: dict[str, Ceilings] = field(default_factory=dict)  # by place
    flush_ms: float = math.inf  # the least that was seen of a GPU's

    def is_disturbed(self, flushes: Sequence[float]) -> bool:
        """Return whether too many of these flushes of a round took too long, in milliseconds."""
        if not flushes:
            return False
        self.flush_ms = min(self.flush_ms, statistics.summarise(flushes).p20)
        slow = sum(flush > SLOW_FLUSH * self.flush_ms for flush in flushes)
        return slow > SLOW_FLUSHES * len(flushes)


@dataclass(eq=False)
class Race:
    """A variant beside its baselines and the control, in rounds that it may share with others; see `play`."""

    place: str
    variant: Side
    others: Sequence[Side]  # the baselines
    control_side: Side | None  # the original in a process like the variant's, if it runs
    pids: Sequence[int]  # of their processes, and the driver's
    measured: Measured
    rivals: Callable[[], list[Side]]  # the baselines whose ratios matter
    paused: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # in it the variant's processes stand still
    short_of_memory: str | None = None
    enough: float = statistics.PRECISE  # how near to a ratio the ends of its interval are when no more rounds are played
    played: int = 0
    rechecked: int = 0
    failure: WorkerFailure | Rejected | None = None  # with which the variant left
    clocks: Sequence[Clocks | None] = ()  # before and after

    def __post_init__(self) -> None:
        self.everybody = [self.variant, *self.others, *filter(None, [self.control_side])]
        self.wanted = self.everybody  # the Sides that are to play on
        self.reference = next((side for side in self.others if side.name == "eager"), None)
        self.control_side = self.control_side if self.reference else None
        self._others = Others(*self.pids)
        self._left: int | None = None  # rounds, once it is known how many
        self.plan([], 0, lambda seed: None)

    def plan(self, secret: Sequence[int], rechecks: int, recheck: Callable[[int], None]) -> None:
        """Have results of `rechecks` rounds among the first MIN_ROUNDS rechecked, by `recheck(seed)`, with seeds from `secret`.

        Of more rounds so is one of the last few, which look like the others: a variant could wait until the first are over.
        """
        self._secret, self._recheck = list(secret), recheck
        self._recheck_in = set(secrets.SystemRandom().sample(range(MIN_ROUNDS), rechecks))

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self._left == 0

    def play_variant(self, watched: AbstractContextManager[Any]) -> None:
        """Play the variant's part of a round; what it fails by is its `failure`."""
        secret = self._secret.pop() if self.played in self._recheck_in else None
        try:
            with watched:
                self.variant.play(new_seed() if secret is None else secret)
            if secret is not None:
                self._recheck(secret)
                self.rechecked += 1
        except (WorkerFailure, Rejected) as failure:
            self.failure = failure

    def look(self, given_up: bool, out_of_time: bool) -> None:
        """Decide who plays on after a round, and for how long. `given_up`: it was disturbed, and patience is spent."""
        rounds = len(self.variant.rounds)
        if self._left is not None:
            self._left -= 1
        elif rounds < MIN_ROUNDS:
            if rounds == FIRST_LOOK:  # who is near may turn out to matter after a few more rounds
                far = FAR * max((side.median for side in self.rivals()), default=math.inf)
                matter = self._those_that_matter()
                self.wanted = [side for side in self.everybody if side in matter or side.median <= far]
            self._left = 0 if given_up and self.played >= MIN_ROUNDS else None
        elif (rounds - MIN_ROUNDS) % ROUNDS_BETWEEN_LOOKS == 0:
            matter = self._those_that_matter()
            self.wanted = [side for side in self.wanted if side in matter]
            ratios = [statistics.paired_ratio(side.rounds, self.variant.rounds) for side in self.rivals()]
            precise = all(statistics.is_precise(ratio, self.enough) for ratio in ratios)
            if given_up or out_of_time or self.played >= MAX_ROUNDS or precise:
                self._left = 0 if self.played == MIN_ROUNDS else ROUNDS_BETWEEN_LOOKS
                self._recheck_in.add(self.played + secrets.randbelow(ROUNDS_BETWEEN_LOOKS))

    def is_shared(self) -> bool:
        """Return whether another process works on the GPU at present."""
        if self.place != "cuda" or not self.reference or self.measured.flush_ms == math.inf:
            return False
        took = self.reference.ask("flush_in_a_row", flush_ms=self.measured.flush_ms)["milliseconds"]
        return took > SLOW_FLUSH * self.measured.flush_ms

    def _those_that_matter(self) -> list[Side | None]:
        return [self.variant, *self.rivals(), self.control_side, self.control_side and self.reference]

    def control(self) -> Ratio | None:
        """Return how much longer the original takes as a baseline than in a process like a variant's; None without either."""
        pair = self.reference, self.control_side
        return statistics.paired_ratio(pair[0].rounds, pair[1].rounds) if pair[0] and pair[1] else None

    def luck(self) -> float:
        """Return the share by which two processes that run the same code may differ, whatever their control says."""
        fastest = min(side.median for side in self.everybody)
        if self.place != "cuda" or fastest >= GRAPHED_BELOW_MS:
            return 0.0
        if self.variant.mode.startswith(GRAPHED):
            return GRAPHS_DIFFER_MS / fastest
        return LAUNCHES_DIFFER if fastest < LAUNCHES_DIFFER_BELOW_MS else LAUNCHES_DIFFER_MS / fastest

    def disturbance(self) -> str | None:
        """Return what disturbed it so much that nothing can be said of the variant, or None."""
        too_few = len(self.variant.rounds) < MIN_ROUNDS
        for side in self.everybody:  # where there are too few others to show anything, those count after all
            side.rounds += side.disturbed if too_few else []
            side.disturbed = []
        seen = ["other processes used what is timed"] if too_few else []
        for side in filter(None, (self.reference, self.control_side)):
            spread = statistics.summarise(side.samples)
            if spread.p80 > SPREAD * spread.p20:
                seen.append(f"the original took {spread.p20:.3g} to {spread.p80:.3g} ms")
        ratio = self.control()
        if ratio and abs(ratio.ratio - 1) > max(CONTROL_OFF, self.luck()) and statistics.verdict(ratio) != "tie":
            seen.append(f"the original against itself came out at {ratio.ratio:.3g}x")
        if not seen:
            return None
        return f"the machine is busy ({'; '.join(self._others.busiest(most_cores_for_others(self.place)) or seen[:1])})"


def play(races: Sequence[Race], seconds: float, patience: Patience) -> None:
    """Play rounds of races that differ in their variants alone, until of each the ratios that matter are precise.

    After `seconds` for each variant it is over, disturbed rounds not counted: those are paid from `patience`. A variant that
    fails leaves; a Side that is not wanted any more does not come back. Raises BaselineFailed.
    """
    going, running, spent = list(races), list(dict.fromkeys(side for race in races for side in race.everybody)), 0.0
    while going:
        began = time.monotonic()
        disturbed = _play_round(going, running)
        if disturbed:
            patience.spend(time.monotonic() - began)
        elif going[0].played > 1:
            spent += time.monotonic() - began
        for race in going:
            if not race.failure:
                race.look(disturbed and not patience.seconds, spent > seconds * len(races))
        going = [race for race in going if not race.is_over]
        running = [side for side in running if any(side in race.wanted for race in going)]


def _play_round(races: Sequence[Race], running: Sequence[Side]) -> bool:
    """Play one round of the Sides that run. Return whether it was disturbed, and does not count."""
    place, measured, load = races[0].place, races[0].measured, OtherLoad(*races[0].pids)
    try:
        for side in secrets.SystemRandom().sample(running, len(running)):
            name = side.name
            with contextlib.ExitStack() as paused:
                for race in races:
                    if side is not race.variant:
                        paused.enter_context(race.paused())
                if own := next((race for race in races if side is race.variant), None):
                    own.play_variant(load.watched())
                    continue
                with load.watched():
                    side.play(new_seed())
        for race in races:
            race.played += 1
        disturbed, name = load.cores > most_cores_for_others(place), "eager"
        if place == "cuda":
            disturbed |= measured.is_disturbed([ms for side in running for ms in side.flushes]) or races[0].is_shared()
    except WorkerFailure as failure:
        raise BaselineFailed(name, str(failure)) from failure
    if disturbed:
        failed = [race.variant for race in races if race.failure]
        for side in running:
            if side not in failed:
                side.disturbed.append(side.rounds.pop())
        time.sleep(PAUSE)
    return disturbed


def standing(pids: Iterable[int]) -> dict[int, Any]:
    """Return {pid: (its processors, its priority)} of processes. Raises WorkerFailure where one has ended."""
    try:
        processes = map(psutil.Process, pids)
        return {each.pid: (each.cpu_affinity() if hasattr(each, "cpu_affinity") else None, each.nice()) for each in processes}
    except psutil.NoSuchProcess as gone:
        raise WorkerFailure(f"process {gone.pid}, which took part in the timing, has ended") from None


def most_cores_for_others(place: str) -> float:
    """Return how many processors other processes may keep busy while a round is played that counts."""
    there = len(usable_processors())
    return max(BUSY_CORES, there - CORES_FOR_A_GPU if place == "cuda" else BUSY_SHARE * there)
