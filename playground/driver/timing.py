"""How fast is a variant, from the driver's side: which process is asked to call how often, and what follows from the answers.

A variant and its baselines take turns in random order. What the variant's process says of itself is compared with the
driver's own clock, and some of its timed results with the float64 reference. docs/how_times_are_taken.md is the long form.
"""

import contextlib
import functools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from playground.clock import floors, outer, statistics
from playground.clock.baselines import distinct, names_for, peers, under
from playground.clock.race import (
    GRAPHED_BELOW_MS,
    STANDING_CHANGED,
    WRONG_WHEN_TIMED,
    BaselineFailed,
    Measured,
    Patience,
    Race,
    Rejected,
    Side,
    play,
    standing,
)
from playground.clock.steps import GRAPHED, step_of
from playground.driver.task import Options, Task
from playground.judge.evaluation import judge
from playground.judge.failure import remove
from playground.judge.verdict import permitted_to
from playground.machine import clocks
from playground.machine.load import OtherLoad
from playground.record import (
    MINE,
    NOT_MEASURED,
    Bound,
    Interval,
    Outcome,
    Outer,
    Ratio,
    Result,
    Timed,
    Timing,
    Unavailable,
    Unsupported,
    Works,
)
from playground.report.figures import baseline_name
from playground.report.progress import Progress
from playground.report.text import grouped
from playground.serial import values
from playground.untrusted import File, new_seed
from playground.worker import WorkerFailure, WorkerProcess, pause_others, sandbox, submit
from playground.worker.referee_client import RefereeClient
from playground.worker.replies import Started

SETS = {"benchmark": "sets-cudnn-benchmark", "tf32": "sets-tf32"}  # setting of a baseline -> caveat of a variant
RECHECKS = {"forward": 2, "weights": 1, "weights_and_input": 1}  # in the first rounds
# A baseline that takes longer is not captured, unless launches bind: the host is ahead of the GPU.
LAUNCHES_COUNT_BELOW_MS = 5.0
# Beside 14 compiling processors, two left free, calls of 20 us to 0.3 ms took as long as alone on one NVIDIA H200 (control
# 0.996 to 1.000); calls that wait for their launches did not (0.74 to 1.1).
LAUNCHES_AHEAD_FROM_MS = 0.1
LAUNCHES_BIND = 0.8  # of eager PyTorch's time: where the host takes as long to launch it, the GPU waits for the host
IN_A_GRAPH = "it is launch bound, and launches take longer in one process than in another: the speed-up is a CUDA graph's"
# Caveats of what a graph cannot hold. The default stream's launches run while it is captured: its replay would do nothing.
NO_GRAPH = {"no-graph", "default-stream"}
# Of GPU memory, or what eager PyTorch takes if that is less: where cuDNN finds less, it chooses other algorithms.
ROOM_MIB = 4096
TRIES = 2  # of a timing that something disturbed

# Beyond these a variant's own times are not believed; see `own_clock`.
HIDDEN_SHARE = 0.5
HIDDEN_MS = {"cpu": 0.05, "cuda": 0.1}
TRY_MS, SHORT_TRY_MS = 100, 5
PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds
SHORT_TRIES = 4  # after each of the pauses
EXPLAINED_BY_HOST_MS = {"cpu": 0.0, "cuda": 1.0}
OUT_OF_MEMORY = re.compile("OutOfMemoryError|out of memory", re.IGNORECASE)
OFTEN = 0.2  # of the calls: beyond it, work on other streams is told
LATE_NOTE = "after the current stream was done the device was busy on other streams: all of it is counted"

SHARED = "the machine is busy (another process works on the GPU)"


class _Original:
    """A process of `make()` in which the original is loaded, by `load(worker)`, when it is first asked for something.

    Where it fails it ends, and the next request begins with a new one.
    """

    def __init__(self, make: Callable[[], WorkerProcess], load: Callable[[WorkerProcess], Any]) -> None:
        self.worker: WorkerProcess | None = None
        self._is_loaded = False
        self._make, self._load = make, load
        self._started: dict[tuple[str, str], Started] = {}

    def start(self) -> None:
        """Start the process, before there is anything that it could load."""
        self._process()

    def _process(self) -> WorkerProcess:
        if self.worker and self.worker.has_ended:  # under the outer clock, say
            self.close()
        self.worker = self.worker or self._make()
        return self.worker

    def ask(self, request: str, **arguments: Any) -> Any:
        try:
            worker = self._process()
            if not self._is_loaded:
                self._load(worker)
                self._is_loaded = True
            return worker.ask(request, **arguments)
        except WorkerFailure:
            self.close()
            raise

    def resumes(self, side: Side) -> bool:
        """Return whether the process has run the side before, which is ready then."""
        self._process()
        if started := self._started.get((side.name, side.mode)):
            side.resume(started)
        return bool(started)

    def warm_up(self, side: Side) -> None:
        if not self.resumes(side):
            started = side.start()
            if not side.mode.startswith(GRAPHED):  # a worker keeps graphs of one mode only: each time one is captured
                self._started[side.name, side.mode] = started

    def close(self) -> None:
        if self.worker:
            self.worker.close()
        self.worker, self._is_loaded, self._started = None, False, {}


@dataclass(eq=False)
class Entry:
    """A right variant that is to be timed: `worker` has loaded it. `modes` are its Timings by step, `failure` why it has none,
    `not_graphed` why a step could not be timed under a CUDA graph.
    """

    worker: WorkerProcess
    result: Result
    modes: dict[str, Timing] = field(default_factory=dict)
    failure: WorkerFailure | Rejected | None = None
    not_graphed: str | None = None

    def fail(self, failure: WorkerFailure | Rejected, mode: str) -> None:
        """Keep why a mode could not be timed: under a CUDA graph that costs the step its graph only, unless it is deceit."""
        step = step_of(mode)
        if mode == step or isinstance(failure, Rejected):
            self.failure = failure
        else:
            self.not_graphed = str(failure)
            self.modes[step] = replace(self.modes[step], graphed=Unavailable(self.not_graphed))


class Stopwatch:
    """Times the variants of one model at one size. Its baselines run in a process that is started when it is first needed.
    Threads may share it: who times first times all that have entered, and the others find that done.

    `original` are the arguments of baselines.load. The control runs in the `room`, as variants do in theirs.
    """

    def __init__(
        self,
        task: Task,
        original: dict[str, Any],
        referee: RefereeClient,
        options: Options,
        progress: Progress,
        measured: Measured,
        room: sandbox.Room | None = None,
    ) -> None:
        self._task, self._original, self._referee, self._options = task, original, referee, options
        self._progress, self._measured = progress, measured
        limit, on_cpu = options.time_limit, task.place == "cpu"
        # What torch.compile makes for the CPU goes on beside a GPU's timings.
        self._baselines = _Original(lambda: WorkerProcess("baselines", limit, bears_a_gpu=on_cpu), self._load)
        self._control = _Original(lambda: WorkerProcess("candidate", limit, room=room), self._load_and_judge)
        self._control_fails: str | None = None  # why
        self._is_given_up = False
        self._unavailable: dict[str, dict[str, str]] = {}
        self._secret_seeds: dict[str, list[int]] = {}
        self._work: dict[str, Works | None] = {}
        self._controls: dict[str, list[Ratio]] = {}  # by mode, of undisturbed timings
        # Baselines and control have graphs of one mode at a time: a second thread's would end those that are being timed.
        self._in_use = threading.Lock()
        self._entering, self._entered = threading.Lock(), list[Entry]()

    def start_processes(self) -> None:
        """Start the processes of baselines and control, before there is anything that they could load."""
        self._baselines.start()
        self._control.start()

    def warm_up(self, prepared: Future[Any]) -> None:
        """Start what the first timing compares with, which it does otherwise: the baselines, and beside them the control.

        The control is judged, and what timed results are held to is computed, once the future `prepared` says that the referee
        is. What finds no memory is tried again in the timing, when fewer processes need some.
        """

        def start_control() -> None:
            prepared.result()
            self._start_control("forward", ())
            with contextlib.suppress(WorkerFailure):  # then the timing asks again
                self._secrets("forward")
                if self._task.place == "cuda" and not self._task.pair:  # of a pair's calls most take too long for a graph
                    self._secrets(f"{GRAPHED}forward")

        with self._in_use, ThreadPoolExecutor(1) as beside:
            control = submit(beside, start_control)
            self._start_baselines("forward", ())
            if not self._is_given_up:
                self._count_work("forward")
            control.result()
            unavailable = self._unavailable["forward"]
            for name in [name for name, why in unavailable.items() if OUT_OF_MEMORY.search(why)]:
                del unavailable[name]
                if name == "floor":
                    del self._work["forward"]
            if OUT_OF_MEMORY.search(self._control_fails or ""):
                self._control_fails = None

    def give_up(self) -> None:
        """End what `warm_up` has not finished: nobody needs it any more."""
        self._is_given_up = True
        for worker in self.workers:
            worker.kill()

    @property
    def workers(self) -> list[WorkerProcess]:
        """Return the processes that are timed beside the variant's."""
        return [each.worker for each in (self._baselines, self._control) if each.worker]

    def enter(self, worker: WorkerProcess, result: Result) -> "Entry":
        """Return the entry of a variant that `worker` has loaded and that is right: who times next times it, too."""
        entry = Entry(worker, result)
        with self._entering:
            self._entered.append(entry)
        return entry

    def time(self, entry: "Entry") -> Timed:
        """Return the Timed of an entry. Raises Rejected, WorkerFailure."""
        with self._in_use:
            with self._entering:
                entered, self._entered = self._entered, []
            self._time_together(entered)
        if entry.failure:
            raise entry.failure
        modes = dict(entry.modes)
        forward = values(modes.pop("forward"))
        return Timed(**forward, training={**modes} or None, ceilings=self._measured.ceilings.get(self._task.place))

    def _time_together(self, entries: Sequence["Entry"]) -> None:
        """Time the modes of all entries: those that have the same baselines in one race."""
        training = {id(entry): _training_modes(entry.result) if self._options.training else [] for entry in entries}
        for step in ("forward", "weights", "weights_and_input"):
            timed = [entry for entry in entries if step == "forward" or step in training[id(entry)]]
            for alike in grouped(timed, lambda entry: _settings(entry.result)).values():
                self._time_mode([entry for entry in alike if not entry.failure], step)
        if self._task.place == "cuda":
            self._with_graphs([each for each in entries if not each.failure and not NO_GRAPH & _tags(each.result)])

    def _time_outside(self, worker: WorkerProcess, result: Result, mode: str, timing: Timing, race: Race) -> Timing:
        """The timing of a mode within the bounds that the outer clock gives it; without those nothing is claimed.

        Skipped for the project's own files and those of a trusted author, whose times nobody forges.
        """
        if self._task.variant.is_catalogued or self._options.trust == MINE or not timing.speedup:
            return timing
        players = {}
        processes = worker, self._baselines.worker, self._control.worker
        for side, process in zip((race.variant, race.reference, race.control_side), processes, strict=True):
            if side and process:
                players[side.name] = outer.Player(side.name, side.mode, process)
        claims = "eager" not in timing.speedup or timing.speedup["eager"].high > 1
        allowed, place = self._allowed(mode, race), self._task.place

        def suffices(seen: Outer) -> bool:
            """Whether further rounds would change nothing of what is claimed."""
            if claims and not statistics.is_precise(seen):
                return False
            return not _is_measured(timing) or _is_measured(outer.bounded(timing, seen, place, allowed))

        try:
            if not race.reference or outer.EAGER not in players:
                raise WorkerFailure("eager PyTorch's process has ended")
            with self._alone([worker]):
                launch_ms = statistics.summarise(race.reference.launches).median
                seconds = max(outer.SECONDS, self._options.seconds)
                given = place, mode, permitted_to(result), seconds, race.reference.median, launch_ms, suffices
                seen = outer.measure(self._referee, players, *given)
            least = outer.RESOLUTION_MS[place] / (seen.calls or 1)
            if complaint := self._impossible(seen.ms + least, timing.work):
                raise WorkerFailure(f"it sees {complaint}")
        except WorkerFailure as failure:
            reason, kind = str(failure), "Unshareable: "
            if failure.role in ("referee", "baselines") and not reason.startswith(kind):
                reason = f"the judge's own process ({failure.role}): {reason}"
            return outer.withheld(timing, f"not timed by the outer clock: {reason.removeprefix(kind)}")
        return outer.bounded(timing, seen, place, allowed)

    def _with_graphs(self, entries: Sequence["Entry"]) -> None:
        """Time those steps of the entries where launches count under a CUDA graph, too.

        They come last, since a capture that fails may leave the process in a state of its own: none is tried after it.
        """
        for step in ("forward", "weights", "weights_and_input"):
            short: list[Entry] = []
            for entry in entries:
                timing = entry.modes.get(step)
                if entry.failure or not timing or not _is_short(timing):
                    continue
                if entry.not_graphed:
                    why = f"not tried after that of another mode had failed: {entry.not_graphed}"
                    entry.modes[step] = replace(timing, graphed=Unavailable(why))
                else:
                    short.append(entry)
            alike = grouped(short, lambda entry, step=step: (_settings(entry.result), _slow(entry.modes[step])))
            for (_, slow), together in alike.items():
                self._time_mode(together, GRAPHED + step, slow)

    def _time_mode(self, entries: Sequence["Entry"], mode: str, not_graphed: Sequence[str] = ()) -> None:
        """Time a mode of entries that have the same baselines, of which those in `not_graphed` run without a CUDA graph."""
        whole, tries, left = self._measured.patience, TRIES, list(entries)
        patience = Patience(min(self._options.patience([]), whole.seconds), whole)  # or one timing could use up a run's
        while left:
            began = time.monotonic()
            try:
                races = self._race(left, mode, not_graphed, patience)
            except BaselineFailed as failed:  # without it
                name, reason = failed.args
                if name == outer.CONTROL:
                    self._give_up_control(reason)
                else:
                    self._unavailable[mode][name] = reason
                continue
            tries -= 1
            left = [entry for entry in left if self._is_disturbed(entry, races, mode, not_graphed, tries and patience.seconds)]
            if left:
                patience.spend(time.monotonic() - began)
                del self._secret_seeds[mode]  # the variants have met them

    def _is_disturbed(
        self, entry: "Entry", races: dict["Entry", Race], mode: str, not_graphed: Sequence[str], may_try_again: float
    ) -> bool:
        """Conclude what an entry's race says. Return whether it was disturbed, and may be run again instead."""
        if entry.failure or entry not in races:
            return False
        race, step = races[entry], step_of(mode)
        before = entry.modes[step] if mode != step else None
        try:
            if race.failure:
                raise race.failure
            disturbance = race.disturbance()
            if disturbance and may_try_again:
                return True
            control = race.control() or (before.control if before else None)
            timing = self._conclude(entry.worker, entry.result, mode, race, control, disturbance)
            timing = self._time_outside(entry.worker, entry.result, mode, timing, race)
            entry.modes[step] = _graphed(before, timing, not_graphed) if before else timing
        except (Rejected, WorkerFailure) as failure:
            entry.fail(failure, mode)
        return False

    def _race(
        self, entries: Sequence["Entry"], mode: str, not_graphed: Sequence[str], patience: Patience
    ) -> dict["Entry", Race]:
        """Run a race of the entries. Return the Race of each that could start; raises BaselineFailed."""
        variants = {}
        for entry in entries:
            side = Side(outer.VARIANT, mode, self._task.place, entry.worker.ask, is_trusted=False)
            try:
                with self._standing_still(each.worker for each in entries if each is not entry):
                    side.start()
                variants[entry] = side
            except (Rejected, WorkerFailure) as failure:
                entry.fail(failure, mode)
        if not variants:
            return {}
        result = next(iter(variants)).result
        with self._standing_still(entry.worker for entry in variants):
            others = self._start_baselines(mode, not_graphed, _settings(result))
            control = self._start_control(mode, not_graphed)
            short = self._short_of_memory(others)
        workers = [entry.worker for entry in variants]
        pids = [os.getpid(), *(each.pid for each in [*workers, *self.workers])]
        secrets, sample = self._secrets(mode), clocks.sample if self._task.place == "cuda" else lambda: None
        started = [each.started_ms for each in [*variants.values(), *others]]
        with self._alone(workers, beside_compilers=min(started) >= LAUNCHES_AHEAD_FROM_MS):
            races = {}
            for entry, side in variants.items():
                rivals = functools.partial(_rivals, others, entry.result)
                paused = self._pausing(entry.worker)
                races[entry] = race = Race(self._task.place, side, others, control, pids, self._measured, rivals, paused)
                outputs = self._referee.answers(entry.worker).file(f"timed-{entry.worker.pid}")
                race.plan(secrets, RECHECKS[step_of(mode)], functools.partial(self._recheck, side, entry.result, mode, outputs))
                race.short_of_memory = short
            trusted = os.getpid(), self._referee.worker.pid, *(each.pid for each in self.workers)
            before, stood = sample(), standing(trusted)
            play(list(races.values()), self._options.seconds, patience)
            after, changed = sample(), stood != standing(trusted)
        for race in races.values():
            race.clocks = [before, after]
            if changed:
                race.failure = Rejected(STANDING_CHANGED)
        return races

    @contextlib.contextmanager
    def _standing_still(self, workers: Iterable[WorkerProcess]) -> Iterator[None]:
        """While it lasts, the processes of these variants stand still, but for the project's own files'."""
        with contextlib.ExitStack() as paused:
            for worker in workers:
                paused.enter_context(self._pausing(worker)())
            yield

    def _short_of_memory(self, others: Sequence[Side]) -> str | None:
        """Why PyTorch may be slower than it is, beside a variant's process that stands still; None where nothing says so."""
        eager = next((side for side in others if side.name == "eager"), None)
        if not eager or self._task.place != "cuda":
            return None
        free, needed = self._baselines.ask("free_memory")["mib"], min(ROOM_MIB, eager.peak_mib or 0.0)
        said = f"only {free:.3g} MiB of GPU memory are free beside it, PyTorch may need {needed:.3g}"
        return said if free < needed else None

    def _pausing(self, worker: WorkerProcess) -> Callable[[], AbstractContextManager[Any]]:
        """What the variant's processes stand still under; those of the project's own files need not."""
        return contextlib.nullcontext if self._task.variant.is_catalogued else worker.stopped

    @contextlib.contextmanager
    def _alone(self, workers: Sequence[WorkerProcess], beside_compilers: bool = False) -> Iterator[None]:
        """While it lasts, nothing else that this run has started runs: neither compilers nor what is judged meanwhile.

        Beside a GPU goes on what torch.compile makes for the CPU, which takes a minute and few processors; `beside_compilers`,
        also compilers of the project's own files.
        """
        timed = {*workers, self._referee.worker, *self.workers}
        with pause_others(timed, self._task.place == "cuda", beside_compilers), self._referee.reserved():
            yield

    def _conclude(
        self, worker: WorkerProcess, result: Result, mode: str, race: Race, control: Ratio | None, disturbance: str | None
    ) -> Timing:
        """The Timing that follows from a race."""
        variant, others, eager = race.variant, race.others, race.reference
        if not control:
            why = self._control_fails or "eager PyTorch, which it is compared with, does not run"
            disturbance = f"there is no control: {why}"
        disturbance = result.unvaried or race.short_of_memory or disturbance
        notes = clocks.notes(*race.clocks)
        if sum(variant.late) > OFTEN * len(variant.late):
            notes.append(LATE_NOTE)
        load = OtherLoad(worker.pid)
        with self._alone([worker]):
            back_to_back, limit = self._own_clock(variant, eager, load, self._pausing(worker))
        is_shared = False
        if back_to_back > limit:  # by whoever works on the GPU while the variant stands still: its own work excuses nothing
            with self._alone([]):
                is_shared = race.is_shared()
        if is_shared:
            disturbance = disturbance or SHARED
        else:
            notes += self._heed_own_clock(variant, back_to_back, limit, load)
        if control and not disturbance:
            self._controls.setdefault(mode, []).append(control)
        allowed = self._allowed(mode, race)
        floor_ms, bound, work = self._floor(result, step_of(mode))  # before what is unavailable is told: the floor may be
        if complaint := self._impossible(variant.median, work):
            raise Rejected(f"its process reports {complaint}")
        sides = [] if disturbance else others
        paired = {side.name: statistics.paired_ratio(side.rounds, variant.rounds) for side in sides}
        measured = {name: statistics.widened(ratio, allowed) for name, ratio in paired.items()}
        return Timing(
            time_ms=statistics.summarise(variant.samples),
            peak_mib=variant.peak_mib,
            speedup=measured,
            measured=measured,
            baselines_ms={side.name: statistics.summarise(side.samples) for side in others},
            baselines_unavailable=dict(self._unavailable.get(mode, {})),
            outcome=outcome(variant, others, result, allowed, disturbance),
            control=control,
            rounds=len(variant.rounds),
            calls=len(variant.samples),
            rechecked=race.rechecked,
            back_to_back_ms=back_to_back,
            launch_ms=statistics.summarise(eager.launches).median if eager else None,
            clocks=clocks.record(*race.clocks),
            notes=notes,
            floor_ms=floor_ms,
            floor_bound=bound,
            work=work,
        )

    def _allowed(self, mode: str, race: Race) -> Interval | None:
        """The interval of a ratio of 1, by all controls of the mode so far; None where it has had none."""
        return statistics.spanning(self._controls[mode], race.luck()) if mode in self._controls else None

    def _impossible(self, milliseconds: float, work: Works | None) -> str | None:
        """What is wrong with a time in which these bytes cannot have moved; None where nothing is."""
        if not work or not work.certain:
            return None
        rates, on_cpu = self._measured.ceilings[self._task.place], self._task.place == "cpu"
        fastest = max(rates.read_bytes_per_second, rates.copy_bytes_per_second)
        return floors.impossible(milliseconds, work.certain.bytes, fastest, on_cpu)

    def _secrets(self, mode: str) -> list[int]:
        """Seeds whose results the referee knows: the same for all variants, each of which meets them at a time of its own.

        One more than RECHECKS, for the last rounds. All are prepared before the first round: a pause would announce them.
        """
        if mode not in self._secret_seeds:
            seeds = [new_seed() for _ in range(RECHECKS[step_of(mode)] + 1)]
            for seed in seeds:
                if self._is_given_up:
                    return []
                self._referee.ask("prepare_timed", probe=f"timed {mode} {seed}", mode=step_of(mode), seed=seed)
            self._secret_seeds[mode] = seeds
        return self._secret_seeds[mode]

    def _recheck(self, variant: Side, result: Result, mode: str, outputs: File, seed: int) -> None:
        """Compare the last timed call's result, in an untrusted.File, with the float64 reference."""
        remove(outputs.held)
        variant.ask("result", outputs=str(outputs.path))
        what = "outputs" if step_of(mode) == "forward" else "gradients"
        compared = self._referee.compare(what, f"timed {mode} {seed}", str(outputs.held), permitted_to(result))
        for comparison in compared.values() if what == "gradients" else [compared]:
            if comparison["complaint"]:
                raise Rejected(f"{WRONG_WHEN_TIMED}{comparison['complaint']}")

    def _own_clock(
        self, variant: Side, eager: Side | None, load: OtherLoad, paused: Callable[[], AbstractContextManager[Any]]
    ) -> tuple[float, float]:
        """(milliseconds a call back to back, how many there may be by the variant's own times).

        `load` watches what runs besides the variant's process, which stands still under `paused()`.
        """
        place, claimed, host = self._task.place, variant.median, 0.0  # the last is what a call costs this process besides
        if eager and place == "cuda":
            with paused():
                host = max(0.0, own_clock(eager, eager.median, math.inf) - eager.median)
        limit = (1 + HIDDEN_SHARE) * claimed + HIDDEN_MS[place] + 2 * host
        return own_clock(variant, claimed, limit, load), limit

    def _heed_own_clock(self, variant: Side, seen: float, limit: float, load: OtherLoad) -> list[str]:
        """Notes. Raises Rejected where the variant's own times cannot be true; `seen` and the rest are of _own_clock."""
        place, claimed, notes = self._task.place, variant.median, []
        if seen > limit + EXPLAINED_BY_HOST_MS[place]:
            # Kernels on the CPU have a thread on each processor and wait for the last: another process on any lets them stand
            # still. Those on a GPU are started by one thread, which finds its processor taken as often as any is.
            taken = min(1.0, load.cores) if place == "cpu" else load.share
            if seen * (1 - taken) > limit + EXPLAINED_BY_HOST_MS[place]:
                raise Rejected(f"its process reports {claimed:.3g} ms a call, but the driver's clock sees {seen:.3g} ms")
            notes.append(
                f"the machine was busy: other processes used {load.share:.0%} of the cores while the clocks were compared, so "
                f"the {claimed:.3g} ms a call that its process reports may be true, or not: the driver's clock sees "
                f"{seen:.3g} ms; run again when it is quiet"
            )
        if seen > limit and place == "cuda":
            variant.rounds[:] = [[sample + seen - claimed for sample in samples] for samples in variant.rounds]
            notes.append(f"back to back a call takes {seen:.3g} ms, on the device alone {claimed:.3g} ms: the former counts")
        return notes

    def _start_baselines(self, mode: str, not_graphed: Sequence[str], settings: Sequence[str] = ()) -> list[Side]:
        """A Side for each baseline that runs, under the variant's settings, too; why the others do not is kept."""
        given, place, step = self._options, self._task.place, step_of(mode)
        unavailable = self._unavailable.setdefault(mode, dict(self._unavailable.get(step, {})))
        names = names_for(place, step, given.quick, given.max_autotune, given.strict or given.precision)
        names = under(settings, distinct(names, self._referee.has_layouts, self._referee.uses_tf32))
        while not self._is_given_up:  # one that fails takes the process of all with it
            modes = {name: step if name in not_graphed else mode for name in names if name not in unavailable}
            sides = [Side(name, own, place, self._baselines.ask) for name, own in modes.items()]
            if all(self._start_baseline(side, unavailable) for side in sides):
                return sides
        return []

    def _start_baseline(self, side: Side, unavailable: dict[str, str]) -> bool:
        """Whether it runs, or nobody needs it any more."""
        names = self._task.names(baseline_name(side.name))
        if self._is_given_up or self._baselines.resumes(side):
            return True
        self._progress.started("baseline", *names)
        try:
            self._baselines.warm_up(side)
        except WorkerFailure as failure:
            unavailable[side.name] = str(failure)
        outcome = "not needed" if self._is_given_up else unavailable.get(side.name, "ready")
        self._progress.finished("baseline", *names, outcome)
        return side.name not in unavailable or self._is_given_up

    def _start_control(self, mode: str, not_graphed: Sequence[str]) -> Side | None:
        """The Side of the original in a process that is started, loaded and judged as a variant's is; None where it fails.

        It runs as eager does: without a graph where that does.
        """
        side = Side(outer.CONTROL, step_of(mode) if "eager" in not_graphed else mode, self._task.place, self._control.ask)
        try:
            if not self._control_fails:
                self._control.warm_up(side)
        except WorkerFailure as failure:
            self._give_up_control(str(failure))
        return None if self._control_fails else side

    def _give_up_control(self, reason: str) -> None:
        """No control any more: where one process could not run the original, the next one will not."""
        self._control_fails = reason
        self._control.close()

    def _load(self, worker: WorkerProcess) -> None:
        worker.ask("load", **self._original)

    def _load_and_judge(self, worker: WorkerProcess) -> None:
        loaded = replace(worker.ask("load", variant=None, **self._original), precision=None, weights="by name")
        judged = judge(worker, self._referee, self._task.place, loaded, with_mutants=False)
        if judged.failure:
            raise judged.failure

    def _floor(self, result: Result, mode: str) -> tuple[float | None, Bound | None, Works | None]:
        """(milliseconds, what binds, Works); each None where it cannot be counted, with the reason in `_unavailable`."""
        place = self._task.place
        work = self._count_work(mode)
        if work and place not in self._measured.ceilings:
            with self._alone([]):
                ceilings = self._ask_for_floor(mode, "ceilings")
            if ceilings:
                self._measured.ceilings[place] = ceilings
            else:
                work = self._work[mode] = None
        if not work or not work.least:
            return None, None, None
        return *floors.floor(work.least, self._measured.ceilings[place], result.precision), work

    def _count_work(self, mode: str) -> Works | None:
        """What `baselines.work` says of a mode; None where it cannot be counted."""
        if mode not in self._work:
            self._work[mode] = self._ask_for_floor(mode, "work", name=self._task.model.catalogued_as, counted=mode)
        return self._work[mode]

    def _ask_for_floor(self, mode: str, request: str, **arguments: Any) -> Any:
        """A reply of the baselines; None where there is none, with the reason in `_unavailable`: their process went with it."""
        try:
            return self._baselines.ask(request, **arguments)
        except WorkerFailure as failure:
            self._unavailable.setdefault(mode, {})["floor"] = str(failure)
            return None

    def close(self) -> None:
        self._baselines.close()
        self._control.close()


def _is_short(eager: Timing) -> bool:
    """Whether launches count in a step."""
    medians = [each.median for each in filter(None, [eager.time_ms, *eager.baselines_ms.values()])]
    return min(medians) < GRAPHED_BELOW_MS or launches_bind(eager)


def _slow(eager: Timing) -> tuple[str, ...]:
    """The baselines that take too long for a CUDA graph to matter."""
    if launches_bind(eager):
        return ()
    return tuple(name for name, each in eager.baselines_ms.items() if each.median > LAUNCHES_COUNT_BELOW_MS)


def _graphed(eager: Timing, graphed: Timing, slow: Sequence[str]) -> Timing:
    """The Timing of a step, `eager`, with that under a CUDA graph."""
    if launches_bind(eager) and not _is_measured(eager) and _is_measured(graphed):
        notes = [*eager.notes, IN_A_GRAPH]
        ratios = {name: getattr(graphed, name) for name in ("outcome", "speedup", "measured", "proved")}
        eager = replace(eager, notes=notes, **ratios)
    notes = graphed.notes + graph_notes(eager, graphed)
    return replace(eager, graphed=replace(graphed, not_graphed=list(slow), notes=notes))


def launches_bind(timings: Timing) -> bool:
    """Return whether eager PyTorch takes about as long as the host needs to launch it."""
    eager = timings.baselines_ms.get("eager")
    return bool(eager and timings.launch_ms and timings.launch_ms > LAUNCHES_BIND * eager.median > 0)


def _is_measured(timings: Timing) -> bool:
    return timings.outcome is not None and timings.outcome.measured is not None


def graph_notes(eager: Timing, graphed: Timing) -> list[str]:
    """Return what to say about a step under a CUDA graph where the baseline that counts without one is missing."""
    usual, against = (timings.outcome and timings.outcome.against for timings in (eager, graphed))
    if usual not in graphed.baselines_unavailable:
        return []
    instead = f"the ratio is over {baseline_name(against)}" if against else "there is no ratio"
    return [f"{baseline_name(usual)}, the fastest without a graph, could not be timed in one: {instead}"]


def own_clock(side: Side, claimed: float, limit: float, load: OtherLoad | None = None) -> float:
    """Return milliseconds a call back to back: the first measurement that is within the limit, or the least of several.

    Those beyond the first few, in case other programs took the processors, come after pauses, and some are short enough to fit
    between two turns. `load` watches all of them.
    """

    def measured(count: int) -> float:
        with load.watched() if load else contextlib.nullcontext():
            return side.back_to_back(count)

    seen = measured(3)
    count = max(3, min(1000, round(TRY_MS / max(seen, 0.01)), round(10 * TRY_MS / max(claimed, 0.01))))
    tries = [(0.0, count)] * 3
    if limit < math.inf:
        short = max(3, min(count, round(SHORT_TRY_MS / max(seen, 0.01))))
        tries += [each for pause in PAUSES for each in ((pause, count), *[(0.0, short)] * SHORT_TRIES)]
    for pause, calls in tries:
        if seen <= limit < math.inf:
            break
        time.sleep(pause)
        seen = min(seen, measured(calls))
    return seen


def outcome(
    variant: Side, others: Sequence[Side], result: Result, control: Interval | None, disturbance: str | None = None
) -> Outcome | None:
    """Return the Outcome of a variant beside the others; None without baselines.

    The verdict is "win", "tie" or "loss" against the fastest baseline that is at least as precise as the variant, by the
    interval that the control allows; "any_precision" names the fastest of all, where that is another one. Where there was a
    disturbance, or the interval has room for a win and for a loss, the verdict is "not measured", with the reason, and there is
    no ratio.
    """
    rivals = _rivals(others, result)
    if not rivals:
        return None
    measured = statistics.paired_ratio(rivals[0].rounds, variant.rounds)
    ratio = statistics.widened(measured, control)
    verdict = statistics.verdict(ratio)
    if not disturbance and statistics.says_nothing(ratio):
        disturbance = statistics.too_noisy(ratio)
    if disturbance:
        return Outcome(verdict=NOT_MEASURED, reason=disturbance)
    return Outcome(
        verdict=verdict,
        against=rivals[0].name,
        **values(ratio),
        precise=statistics.is_precise(measured),
        any_precision=rivals[1].name if len(rivals) > 1 else None,
    )


def _rivals(others: Sequence[Side], result: Result) -> list[Side]:
    """The fastest baseline at least as precise as the variant and, where that is another one, the fastest of all.

    Of all in PyTorch's own precision, that is: TF32 may be among them, fp16 only where the variant declares so little.
    """
    names, settings = [side.name for side in others], _settings(result)
    precision = result.variant_precision or result.precision
    precise_enough = peers(names, precision, settings)
    usual = {each for own in ((), settings) for each in peers(names, "tf32" if precision == "fp32" else precision, own)}
    ranked = sorted((side for side in others if side.name in usual), key=lambda side: side.median)
    best = next((side for side in ranked if side.name in precise_enough), None)
    return [side for side in dict.fromkeys([best, *ranked[:1]]) if side]


def _settings(result: Result) -> tuple[str, ...]:
    """Names of baselines.SETTINGS: what the variant has set for its process, so that its baselines must have it, too."""
    return tuple(name for name, tag in SETS.items() if tag in _tags(result))


def _tags(result: Result) -> set[str]:
    """Those of a result's caveats."""
    return {caveat.tag for caveat in result.caveats}


def _training_modes(result: Result) -> list[str]:
    """The modes of which the check has compared gradients, and found them right and the file's own work."""
    gradients = result.checked.gradients
    if _tags(result) & {"no-gradient", "wrong-gradient", "gradient"} or not gradients or isinstance(gradients, Unsupported):
        return []
    of_inputs = [name.startswith("input") for name in gradients]
    return ["weights"] * (not all(of_inputs)) + ["weights_and_input"] * any(of_inputs)
