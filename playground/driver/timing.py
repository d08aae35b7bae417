"""How fast is a variant, from the driver's side: which process is asked to call how often, and what follows from the answers.

What the variant's process says of itself is compared with the driver's own clock, and some of its timed results with the
float64 reference. docs/how_times_are_taken.md is the long form.
"""

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from playground.clock import GRAPHED, MODES, outer, race, statistics, step_of
from playground.clock.outcome import is_measured, launches_bind, outcome, rivals, settings_of, tags
from playground.clock.race import BaselineFailed, Measured, Patience, Race, Rejected, Side, standing
from playground.driver.floor import Floor
from playground.driver.originals import Originals
from playground.driver.task import Options, Task
from playground.judge.failure import remove
from playground.judge.verdict import permitted_to
from playground.machine import clocks
from playground.machine.load import OtherLoad
from playground.record import MINE, Interval, Outer, Ratio, Result, Timed, Timing, Unavailable, Unsupported
from playground.report.figures import baseline_name
from playground.report.progress import Progress
from playground.report.text import grouped
from playground.serial import values
from playground.untrusted import File, new_seed
from playground.worker import WorkerFailure, WorkerProcess, sandbox, submit
from playground.worker.referee_client import RefereeClient

RECHECKS = {"forward": 2, "weights": 1, "weights_and_input": 1}  # in the first rounds
LAUNCHES_COUNT_BELOW_MS = 5.0  # a baseline that takes longer is not captured, unless launches bind: the host is ahead
# Beside 14 compiling processors, two left free, calls of 20 us to 0.3 ms took as long as alone on one NVIDIA H200 (control
# 0.996 to 1.000); calls that wait for their launches did not (0.74 to 1.1).
LAUNCHES_AHEAD_FROM_MS = 0.1
IN_A_GRAPH = "it is launch bound, and launches take longer in one process than in another: the speed-up is a CUDA graph's"
# Caveats of what a graph cannot hold. The default stream's launches run while it is captured: its replay would do nothing.
NO_GRAPH = {"no-graph", "default-stream"}
TRIES = 2  # of a timing that something disturbed

HIDDEN_SHARE, HIDDEN_MS = 0.5, {"cpu": 0.05, "cuda": 0.1}  # beyond both a variant's own times are not believed
TRY_MS, PAUSES = 100, (0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6)  # of own_clock: a try, and seconds before each further one
EXPLAINED_BY_HOST_MS = {"cpu": 0.0, "cuda": 1.0}
OFTEN = 0.2  # of the calls: beyond it, work on other streams is told
LATE_NOTE = "after the current stream was done the device was busy on other streams: all of it is counted"
SHARED = "the machine is busy (another process works on the GPU)"
BUSY = (
    "the machine is busy (other processes used {:.0%} of the cores while the clocks were compared: {:.3g} and {:.3g} ms a call)"
)


@dataclass(eq=False)
class Entry:
    """A right variant that is to be timed, which `worker` has loaded."""

    worker: WorkerProcess
    result: Result
    modes: dict[str, Timing] = field(default_factory=dict)  # by step
    failure: WorkerFailure | Rejected | None = None  # why there are none
    not_graphed: str | None = None  # why a step could not be timed under a CUDA graph

    def fail(self, failure: WorkerFailure | Rejected, mode: str) -> None:
        """Keep why a mode could not be timed: under a CUDA graph that costs the step its graph only, unless it is deceit."""
        step = step_of(mode)
        if mode == step or isinstance(failure, Rejected):
            self.failure = failure
        else:
            self.not_graphed = f"not tried after that of another mode had failed: {failure}"
            self.modes[step] = replace(self.modes[step], graphed=Unavailable(str(failure)))


class Stopwatch:
    """Times the variants of one model at one size; `original` and `room` are those of Originals.

    Threads may share it: who times first times all that have entered, and the others find that done.
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
        self._task, self._referee, self._options, self._measured = task, referee, options, measured
        self._originals = Originals(task, original, referee, options, progress, room)
        self._floor = Floor(task, self._originals, measured)
        self.give_up, self.close = self._originals.give_up, self._originals.close
        self._secret_seeds: dict[str, list[int]] = {}
        self._controls: dict[str, list[Ratio]] = {}  # by mode, of undisturbed timings
        # Baselines and control have graphs of one mode at a time: a second thread's would end those that are being timed.
        self._in_use = threading.Lock()
        self._entering, self._entered = threading.Lock(), list[Entry]()

    @property
    def _is_trusted(self) -> bool:
        """Whether the file is one of the project's or of a trusted author, whose times nobody forges."""
        return self._task.variant.is_catalogued or self._options.trust == MINE

    def start_processes(self) -> None:
        """Start the processes of baselines and control, before there is anything that they could load."""
        self._originals.baselines.start()
        self._originals.control.start()

    def warm_up(self, prepared: Future[Any]) -> None:
        """Start what the first timing compares with: the baselines and, once the future `prepared` is done, the control.

        What finds no memory is tried again in the timing, when fewer processes need some.
        """

        def start_control() -> None:
            prepared.result()
            self._originals.start_control("forward")
            with contextlib.suppress(WorkerFailure):  # then the timing asks again
                self._secrets("forward")
                if self._task.place == "cuda" and not self._task.pair:  # of a pair's calls most take too long for a graph
                    self._secrets(f"{GRAPHED}forward")

        with self._in_use, ThreadPoolExecutor(1) as beside:
            control = submit(beside, start_control)
            self._originals.start_baselines("forward")
            if not self._originals.are_given_up:
                self._floor.count("forward")
            control.result()
            if "floor" in self._originals.forget_what_found_no_memory("forward"):
                self._floor.forget("forward")

    def enter(self, worker: WorkerProcess, result: Result) -> Entry:
        """Return the entry of a variant: who times next times it, too."""
        with self._entering:
            self._entered.append(Entry(worker, result))
            return self._entered[-1]

    def time(self, entry: Entry) -> Timed:
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

    def _time_together(self, entries: Sequence[Entry]) -> None:
        """Time the modes of all entries: those that have the same baselines in one race."""
        training = {id(entry): _training_modes(entry.result) if self._options.training else [] for entry in entries}
        for step in MODES:
            timed = [entry for entry in entries if step == "forward" or step in training[id(entry)]]
            for alike in grouped(timed, lambda entry: settings_of(entry.result)).values():
                self._time_mode([entry for entry in alike if not entry.failure], step)
        if self._task.place == "cuda":
            self._with_graphs([each for each in entries if not NO_GRAPH & tags(each.result)])

    def _with_graphs(self, entries: Sequence[Entry]) -> None:
        """Time steps in which launches count under a CUDA graph, too: at last, since none is tried after one that fails."""
        for step in MODES:
            short = [each for each in entries if not each.failure and step in each.modes and _is_short(each.modes[step])]
            for entry in short:
                if entry.not_graphed:
                    entry.modes[step] = replace(entry.modes[step], graphed=Unavailable(entry.not_graphed))
            short = [entry for entry in short if not entry.not_graphed]
            alike = grouped(short, lambda entry, step=step: (settings_of(entry.result), _slow(entry.modes[step])))
            for (_, slow), together in alike.items():
                self._time_mode(together, GRAPHED + step, slow)

    def _time_mode(self, entries: Sequence[Entry], mode: str, not_graphed: Sequence[str] = ()) -> None:
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
                    self._originals.do_without_control(reason)
                else:
                    self._originals.unavailable[mode][name] = reason
                continue
            tries -= 1
            left = [entry for entry in left if self._is_disturbed(entry, races, mode, not_graphed, tries and patience.seconds)]
            if left:
                patience.spend(time.monotonic() - began)
                del self._secret_seeds[mode]  # the variants have met them

    def _is_disturbed(
        self, entry: Entry, races: dict[Entry, Race], mode: str, not_graphed: Sequence[str], may_try_again: float
    ) -> bool:
        """Conclude what an entry's race says. Return whether it was disturbed, and may be run again instead."""
        if entry.failure or entry not in races:
            return False
        raced, step = races[entry], step_of(mode)
        before = entry.modes[step] if mode != step else None
        try:
            if raced.failure:
                raise raced.failure
            disturbance = raced.disturbance()
            if disturbance and may_try_again:
                return True
            control = raced.control() or (before.control if before else None)
            timing = self._conclude(entry, mode, raced, control, disturbance)
            timing = self._time_outside(entry, mode, timing, raced)
            entry.modes[step] = _graphed(before, timing, not_graphed) if before else timing
        except (Rejected, WorkerFailure) as failure:
            entry.fail(failure, mode)
        return False

    def _race(self, entries: Sequence[Entry], mode: str, not_graphed: Sequence[str], patience: Patience) -> dict[Entry, Race]:
        """Run a race of the entries. Return the Race of each that could start; raises BaselineFailed."""
        place, originals, variants = self._task.place, self._originals, dict[Entry, Side]()
        for entry in entries:
            side = Side(outer.VARIANT, mode, place, entry.worker.ask, is_trusted=False)
            try:
                with self._standing_still(each for each in entries if each is not entry):
                    side.start()
                variants[entry] = side
            except (Rejected, WorkerFailure) as failure:
                entry.fail(failure, mode)
        if not variants:
            return {}
        with self._standing_still(variants):
            others = originals.start_baselines(mode, not_graphed, settings_of(next(iter(variants)).result))
            control = originals.start_control(mode, not_graphed)
            short = originals.short_of_memory(others)
        workers, own = [entry.worker for entry in variants], [os.getpid(), *(each.pid for each in originals.workers)]
        secrets, sample = self._secrets(mode), clocks.sample if place == "cuda" else lambda: None
        started = [each.started_ms for each in [*variants.values(), *others]]
        with originals.alone(workers, beside_compilers=min(started) >= LAUNCHES_AHEAD_FROM_MS):
            races, pids, trusted = {}, [*own, *(each.pid for each in workers)], [*own, self._referee.worker.pid]
            for entry, side in variants.items():
                paused, matter = self._pausing(entry.worker), functools.partial(rivals, others, entry.result)
                enough = statistics.PRECISE if self._is_trusted else statistics.ROUGH
                made = Race(place, side, others, control, pids, self._measured, matter, paused, short, enough)
                races[entry] = made
                outputs = self._referee.answers(entry.worker).file(f"timed-{entry.worker.pid}")
                made.plan(secrets, RECHECKS[step_of(mode)], functools.partial(self._recheck, side, entry.result, mode, outputs))
            before, stood = sample(), standing(trusted)
            race.play(list(races.values()), self._options.seconds, patience)
            after, changed = sample(), stood != standing(trusted)
        for made in races.values():
            made.clocks = before, after
            made.failure = Rejected(race.STANDING_CHANGED) if changed else made.failure
        return races

    @contextlib.contextmanager
    def _standing_still(self, entries: Iterable[Entry]) -> Iterator[None]:
        """While it lasts, the processes of these variants stand still, but for the project's own files'."""
        with contextlib.ExitStack() as paused:
            for entry in entries:
                paused.enter_context(self._pausing(entry.worker)())
            yield

    def _pausing(self, worker: WorkerProcess) -> Callable[[], AbstractContextManager[Any]]:
        """What the variant's processes stand still under; those of the project's own files need not."""
        return contextlib.nullcontext if self._task.variant.is_catalogued else worker.stopped

    def _secrets(self, mode: str) -> list[int]:
        """Seeds whose results the referee knows, for all variants: RECHECKS, and one for the last rounds.

        All are prepared before the first round: a pause would announce them.
        """
        if mode not in self._secret_seeds:
            seeds = [new_seed() for _ in range(RECHECKS[step_of(mode)] + 1)]
            for seed in seeds:
                if self._originals.are_given_up:
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
                raise Rejected(f"{race.WRONG_WHEN_TIMED}{comparison['complaint']}")

    def _conclude(self, entry: Entry, mode: str, raced: Race, control: Ratio | None, disturbance: str | None) -> Timing:
        """The Timing that follows from a race."""
        variant, others, eager, result = raced.variant, raced.others, raced.reference, entry.result
        if not control:
            why = self._originals.control_fails or "eager PyTorch, which it is compared with, does not run"
            disturbance = f"there is no control: {why}"
        disturbance = result.unvaried or raced.short_of_memory or disturbance
        notes = clocks.notes(*raced.clocks)
        if sum(variant.late) > OFTEN * len(variant.late):
            notes.append(LATE_NOTE)
        back_to_back, doubt, told = self._by_own_clock(entry.worker, raced)
        disturbance, notes = disturbance or doubt, notes + told
        if control and not disturbance:
            self._controls.setdefault(mode, []).append(control)
        allowed = self._allowed(mode, raced)
        floor_ms, bound, work = self._floor.of(mode, result.precision)  # before what is unavailable is told: the floor may be
        if complaint := self._floor.impossible(variant.median, work):
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
            baselines_unavailable=dict(self._originals.unavailable.get(mode, {})),
            outcome=outcome(variant, others, result, allowed, disturbance),
            control=control,
            rounds=len(variant.rounds),
            calls=len(variant.samples),
            rechecked=raced.rechecked,
            back_to_back_ms=back_to_back,
            launch_ms=eager.launch_ms if eager else None,
            clocks=clocks.record(*raced.clocks),
            notes=notes,
            floor_ms=floor_ms,
            floor_bound=bound,
            work=work,
        )

    def _allowed(self, mode: str, raced: Race) -> Interval | None:
        """The interval of a ratio of 1, by all controls of the mode so far; None where it has had none."""
        return statistics.spanning(self._controls[mode], raced.luck()) if mode in self._controls else None

    def _by_own_clock(self, worker: WorkerProcess, raced: Race) -> tuple[float, str | None, list[str]]:
        """(milliseconds of a variant's call back to back, why nothing can be said of it or None, notes).

        Raises Rejected where its own times cannot be true, and no other process explains that.
        """
        place, variant, eager, load, host = self._task.place, raced.variant, raced.reference, OtherLoad(worker.pid), 0.0
        claimed, notes = variant.median, list[str]()
        with self._originals.alone([worker]):
            if eager and place == "cuda":  # what a call costs the host besides
                with self._pausing(worker)():
                    host = max(0.0, own_clock(eager, eager.median, math.inf) - eager.median)
            limit = (1 + HIDDEN_SHARE) * claimed + HIDDEN_MS[place] + 2 * host
            seen = own_clock(variant, claimed, limit, load)
        if seen <= limit:
            return seen, None, []
        with self._originals.alone():
            if raced.is_shared():
                return seen, SHARED, []
        if seen > limit + EXPLAINED_BY_HOST_MS[place]:
            # Kernels on the CPU have a thread on each processor and wait for the last: another process on any lets them stand
            # still. Those on a GPU are started by one thread, which finds its processor taken as often as any is.
            taken = min(1.0, load.cores) if place == "cpu" else load.share
            if seen * (1 - taken) > limit + EXPLAINED_BY_HOST_MS[place]:
                raise Rejected(f"its process reports {claimed:.3g} ms a call, but the driver's clock sees {seen:.3g} ms")
            return seen, BUSY.format(load.share, claimed, seen), []
        if place == "cuda":
            variant.rounds[:] = [[sample + seen - claimed for sample in samples] for samples in variant.rounds]
            notes = [
                f"a call takes {seen:.3g} ms back to back, {claimed:.3g} ms on the device alone: the time back to back counts"
            ]
        return seen, None, notes

    def _time_outside(self, entry: Entry, mode: str, timing: Timing, raced: Race) -> Timing:
        """The timing of a mode within the bounds that the outer clock gives it; without those nothing is claimed."""
        if self._is_trusted or not timing.speedup:
            return timing
        of, eager = self._originals, raced.reference
        pairs = (raced.variant, entry.worker), (eager, of.baselines.worker), (raced.control_side, of.control.worker)
        ran = [(side, process) for side, process in pairs if side and process]
        players = {side.name: outer.Player(side.name, side.mode, process, side.median, side.launch_ms) for side, process in ran}
        claims = "eager" not in timing.speedup or timing.speedup["eager"].high > 1
        allowed, place = self._allowed(mode, raced), self._task.place

        def suffices(seen: Outer) -> bool:
            """Whether further rounds would change nothing of what is claimed."""
            if claims and not statistics.is_precise(seen):
                return False
            return not is_measured(timing) or is_measured(outer.bounded(timing, seen, place, allowed))

        try:
            if not eager or outer.EAGER not in players:
                raise WorkerFailure("eager PyTorch's process has ended")
            with of.alone([entry.worker]):
                given = permitted_to(entry.result), max(outer.SECONDS, self._options.seconds), suffices
                seen = outer.measure(self._referee, players, place, *given)
            least = outer.RESOLUTION_MS[place] / (seen.calls or 1)
            if complaint := self._floor.impossible(seen.ms + least, timing.work):
                raise WorkerFailure(f"it sees {complaint}")
        except WorkerFailure as failure:
            reason, kind = str(failure), "Unshareable: "
            if failure.role in ("referee", "baselines") and not reason.startswith(kind):
                reason = f"the judge's own process ({failure.role}): {reason}"
            return outer.withheld(timing, f"not timed by the outer clock: {reason.removeprefix(kind)}")
        return outer.bounded(timing, seen, place, allowed)


def _is_short(eager: Timing) -> bool:
    """Whether launches count in a step."""
    medians = [each.median for each in filter(None, [eager.time_ms, *eager.baselines_ms.values()])]
    return min(medians) < race.GRAPHED_BELOW_MS or launches_bind(eager)


def _slow(eager: Timing) -> tuple[str, ...]:
    """The baselines that take too long for a CUDA graph to matter."""
    if launches_bind(eager):
        return ()
    return tuple(name for name, each in eager.baselines_ms.items() if each.median > LAUNCHES_COUNT_BELOW_MS)


def _graphed(eager: Timing, graphed: Timing, slow: Sequence[str]) -> Timing:
    """The Timing of a step, `eager`, with that under a CUDA graph; a note says so where the usual baseline is missing there."""
    if launches_bind(eager) and not is_measured(eager) and is_measured(graphed):
        ratios = {name: getattr(graphed, name) for name in ("outcome", "speedup", "measured", "proved")}
        eager = replace(eager, notes=[*eager.notes, IN_A_GRAPH], **ratios)
    notes, (usual, against) = graphed.notes, (each.outcome and each.outcome.against for each in (eager, graphed))
    if usual in graphed.baselines_unavailable:
        instead = f"the ratio is over {baseline_name(against)}" if against else "there is no ratio"
        notes = [*notes, f"{baseline_name(usual)}, the fastest without a graph, could not be timed in one: {instead}"]
    return replace(eager, graphed=replace(graphed, not_graphed=list(slow), notes=notes))


def own_clock(side: Side, claimed: float, limit: float, load: OtherLoad | None = None) -> float:
    """Return milliseconds a call back to back: the first measurement within the limit, or the least of several after pauses, in
    case other programs took the processors; `load` watches them.
    """

    def measured(count: int) -> float:
        with load.watched() if load else contextlib.nullcontext():
            return side.back_to_back(count)

    seen = measured(3)
    count = max(3, min(1000, round(TRY_MS / max(seen, 0.01)), round(10 * TRY_MS / max(claimed, 0.01))))
    for pause in PAUSES if limit < math.inf else (0.0,):
        if seen <= limit < math.inf:
            break
        time.sleep(pause)
        seen = min(seen, measured(count))
    return seen


def _training_modes(result: Result) -> list[str]:
    """The modes of which the check has compared gradients, and found them right and the file's own work."""
    gradients = result.checked.gradients
    if tags(result) & {"no-gradient", "wrong-gradient", "gradient"} or not gradients or isinstance(gradients, Unsupported):
        return []
    of_inputs = [name.startswith("input") for name in gradients]
    return ["weights"] * (not all(of_inputs)) + ["weights_and_input"] * any(of_inputs)
