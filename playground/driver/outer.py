"""The outer clock, from the driver's side: whose turn it is, and what a speed-up can be at most.

The inner clock is precise, and belongs to the process that is timed: a file written to deceive can forge it. The outer one
belongs to processes that no judged file runs in. It sees all that a call takes from the moment when its inputs become readable
to the moment when its result is taken. Calls without any work (`NULL`) say how much of that is the way there and back.
docs/how_times_are_taken.md has the protocol.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from playground.driver.race import WRONG_WHEN_TIMED, Rejected
from playground.record import NOT_MEASURED, Interval, Outcome, Outer, Ratio, Spread, Timing, scaled
from playground.serial import values
from playground.stopwatch import statistics
from playground.stopwatch.outer import ADDRESSES, Unshareable, extent_of, placed
from playground.stopwatch.timer import CPU_FLUSH_BYTES
from playground.untrusted import File
from playground.worker import WorkerFailure, WorkerProcess, pause_others
from playground.worker.outer_referee import spoil
from playground.worker.process import GOES_ON, Stopped
from playground.worker.referee_client import RefereeClient

FEWEST_ROUNDS, ROUNDS, MOST_ROUNDS = statistics.ROUNDS_FOR_AN_INTERVAL, 20, 40  # the last with those that cannot be used
SECONDS = 3.0  # for a speed-up that is claimed; one that is not takes the fewest rounds
ENOUGH = 0.05  # an interval whose ends are this near to the ratio needs no further rounds
SETTLING = 1  # calls of a turn that do not count
FEWEST_CALLS, MOST_CALLS = 2, {"cuda": 11, "cpu": 8}  # of a turn, besides
TURN_MS = {"cuda": 20, "cpu": 80}  # about what the calls of a turn take
# Of a turn's calls, each of which is right. Threads that go on may wait a time slice for one another on one processor, so that
# on two cores calls of 6.2 ms took 6.1 to 37.
USUAL: dict[str, Callable[[Any], Any]] = {"cuda": np.median, "cpu": np.min}
# What a call without work lacks besides. On one NVIDIA H200 calls of 0.010, 0.36 and 11.2 ms came out 0.006, 0.005 and 0.007 ms
# longer than by the inner clock. On a CPU it is the time in which a process that is told to stop may go on.
RESOLUTION_MS = {"cuda": 0.010, "cpu": 0.1}
AGREED = 1.05  # times the outer ratio: an inner one that is beyond, and within the interval, may be forged
TOO_SHORT = 2  # times the resolution: what eager PyTorch takes less than
TOO_SHORT_TOLD = "eager PyTorch's call takes {:.2g} ms, too short for the outer clock, which counts {:g} ms as the least"
VARIANT, EAGER, CONTROL, NULL = "variant", "eager", "control", "null"
MOST_STANDING_MS = 2.0  # of processor time, while another side has its turn
MOST_RESULTS = 4  # times the bytes of the original's results: what a side says of its own is not read beyond


class Player(NamedTuple):
    """A race.Side under the outer clock, and the process in which it runs. By the file `page` the two sides talk."""

    name: str
    mode: str
    worker: WorkerProcess
    page: File

    def ask(self, what: str, **arguments: Any) -> Any:
        """Ask the side's process."""
        return self.worker.ask(what, side=self.name, mode=self.mode, **arguments)


def measure(
    referee: RefereeClient, players: dict[str, Player], place: str, step: str, declared: str | float | None, seconds: float
) -> Outer:
    """Return the Outer of the variant over eager PyTorch.

    `players` are {name: Player} of VARIANT, EAGER and, where it runs, CONTROL; `step` one of workload.MODES. After `seconds`,
    or once the interval is narrow ENOUGH, there are no more rounds than have to be. Raises Rejected, and WorkerFailure where
    nothing can be measured.
    """
    resolution, usual = RESOLUTION_MS[place], USUAL[place]
    kinds: dict[str, type[_OnGpu] | type[_OnCpu]] = {"cuda": _OnGpu, "cpu": _OnCpu}
    clock = kinds[place](referee, players[VARIANT].worker)
    rounds: dict[str, list[list[float]]] = {name: [] for name in (*players, NULL)}
    counts, is_known = dict.fromkeys(rounds, FEWEST_CALLS), False
    began = time.monotonic()

    def are_enough(used: int) -> bool:
        if not FEWEST_ROUNDS <= used < ROUNDS or time.monotonic() - began > seconds:
            return used >= FEWEST_ROUNDS
        found = conclude(rounds, resolution, usual)
        return (1 - ENOUGH) * found.ratio <= found.low and found.high <= (1 + ENOUGH) * found.ratio

    with contextlib.ExitStack() as joined:
        joined.callback(referee.ask, "outer_close")
        for player in players.values():
            joined.callback(_leave, player)
            opened = {"side": player.name, "page": str(player.page.held), "step": step, "declared": declared}
            clock.join(player, referee.ask("outer_open", **opened))
        while not are_enough(len(_whole(rounds))) and len(rounds[NULL]) < MOST_ROUNDS:
            for name in secrets.SystemRandom().sample(list(rounds), len(rounds)):
                player = players[EAGER if name == NULL else name]
                calls = clock.turn(player, SETTLING + counts[name], is_null=name == NULL)
                if complaint := next((call["complaint"] for call in calls if call["complaint"]), None):
                    raise Rejected(f"{WRONG_WHEN_TIMED}{complaint}")
                rounds[name].append([call["milliseconds"] for call in calls[SETTLING:] if call["milliseconds"] is not None])
            if not is_known and _whole(rounds):  # the first that can be used says how many calls fit
                fit = {name: TURN_MS[place] / min(played[-1]) for name, played in rounds.items()}
                counts |= {name: round(min(MOST_CALLS[place], max(FEWEST_CALLS, each))) for name, each in fit.items()}
                rounds, is_known = {name: [] for name in rounds}, True
    return conclude(rounds, resolution, usual)


@contextlib.contextmanager
def _turn(player: Player, judged: WorkerProcess, referee: RefereeClient) -> Iterator[None]:
    """Have all but a side's process and the referee's stand still. Raises WorkerFailure where a judged file's go on."""
    with pause_others({player.worker, judged, referee.worker}), contextlib.ExitStack() as standing:
        if player.worker is judged:
            yield
            return
        stopped = standing.enter_context(judged.stopped())
        try:
            stood = stopped.settled()
            yield
            ran = stopped.since(stood)
        except OSError as error:
            raise WorkerFailure(f"its own {error}") from None
        if (has_grown := stopped.has_grown()) or ran > MOST_STANDING_MS:
            did = "started another" if has_grown else f"used {ran:.3g} ms of processor time"
            raise WorkerFailure(f"its own {GOES_ON}: in the turn of {player.name} they {did}")


def _leave(player: Player) -> None:
    with contextlib.suppress(WorkerFailure):
        player.ask("leave_outer")


class _OnGpu:
    """The referee releases inputs, takes results and has the clock; see worker/outer_referee.py."""

    def __init__(self, referee: RefereeClient, judged: WorkerProcess) -> None:
        self._referee, self._judged = referee, judged

    def join(self, player: Player, shared: dict[str, Any]) -> None:
        """Have a side take part."""
        player.ask("join_outer", shared=shared, page=str(player.page.path))

    def turn(self, player: Player, calls: int, is_null: bool) -> list[dict[str, Any]]:
        """Return [{"milliseconds", "complaint"}, ...] of a turn's calls."""
        given = {"calls": calls, "seconds": player.worker.limit}
        with _turn(player, self._judged, self._referee), ThreadPoolExecutor(1) as beside:
            self._referee.ask("outer.await_quiet", seconds=given["seconds"])
            served = beside.submit(player.ask, "call_outer", null=is_null, **given)
            try:
                return self._referee.ask("outer.time", side=player.name, compares=player.name == VARIANT, **given)["calls"]
            finally:
                served.result()


class _OnCpu:
    """The driver writes inputs into the memory of a process that stands still, lets it go on, and stops it at its reply.

    The clock runs from the one to the other. The results are read from the memory of the process that stands still again.
    """

    def __init__(self, referee: RefereeClient, judged: WorkerProcess) -> None:
        self._referee, self._judged = referee, judged
        self._blocks: dict[str, tuple[int, int]] = {}  # side -> the address of its inputs
        self._dirty = np.empty(CPU_FLUSH_BYTES, np.uint8)

    def join(self, player: Player, shared: dict[str, Any]) -> None:
        """Have a side take part."""
        self._shared = shared
        joined = player.ask("join_outer", shared={key: shared.get(key) for key in ("places", "bytes")}, page=None)
        if not all(type(joined.get(key)) is int and 0 < joined[key] < ADDRESSES for key in ("pid", "address")):
            raise WorkerFailure("its process does not say where its inputs are")
        self._blocks[player.name] = joined["pid"], joined["address"]

    def turn(self, player: Player, calls: int, is_null: bool) -> list[dict[str, Any]]:
        """Return [{"milliseconds", "complaint"}, ...] of a turn's calls: between them, too, its process stands still."""
        pid, address = self._blocks[player.name]
        with _turn(player, self._judged, self._referee):
            try:
                with player.worker.stopped(pid) as process:
                    return [self._call(player, process, address, is_null) for _ in range(calls)]
            except (Unshareable, OSError) as error:
                raise WorkerFailure(f"{error}" if player.name == VARIANT else f"{player.name}: {error}") from None

    def _call(self, player: Player, process: Stopped, address: int, is_null: bool) -> dict[str, Any]:
        drawn = self._referee.ask("outer.draw")
        compares = player.name == VARIANT and not is_null
        stood = process.settled()
        process.write(address, self._shared["inputs"])
        self._dirty.fill(0)
        if process.has_grown():
            raise Unshareable(f"{GOES_ON}: they started another")
        ran = process.since(stood)
        began = time.perf_counter()
        process.go_on()
        reply = player.ask("call_outer", null=is_null, draws=drawn["draws"])
        process.stop()
        milliseconds = (time.perf_counter() - began) * 1e3
        at_stop = process.used()
        if compares and not self._shared["returns_inputs"]:  # a view of them is no result
            process.write(address, "/dev/zero", Path(self._shared["inputs"]).stat().st_size)
        places = self._read(process, reply.get("results"))
        if process.has_grown() or not process.is_still():  # whoever goes on may still be at work
            process.settled()
            milliseconds = (time.perf_counter() - began) * 1e3
        ran += process.since(at_stop)
        found = self._referee.ask("outer.compare", places=places) if compares else {"complaint": None, "spoils": False}
        if found["spoils"]:
            for place in reply["results"]:
                block = bytearray(process.read(place["address"], extent_of(place)))
                if block:
                    spoil([placed(torch.frombuffer(block, dtype=torch.uint8), place | {"offset": 0})])
                    process.put(place["address"], block)
        # What was worked before the release, or behind the stop, counts.
        return {"milliseconds": milliseconds + ran, "complaint": found["complaint"]}

    def _read(self, process: Stopped, places: Any) -> list[dict[str, Any]]:
        """Write the results that are at these places to the file of results. Returns their places there."""
        if not (isinstance(places, list) and all(isinstance(place, dict) for place in places)):
            raise Unshareable("its process does not say where its results are")
        most, found, at = MOST_RESULTS * self._shared["bytes"], [], 0
        with Path(self._shared["results"]).open("wb") as file:
            for place in places:
                count = extent_of(place)
                if at + count > most:
                    raise Unshareable(f"results of more than {most} bytes")
                file.write(process.read(place["address"], count))
                file.write(bytes(-count % 64))
                found.append({key: place[key] for key in ("dtype", "shape", "stride")} | {"offset": at})
                at += count + -count % 64
        return found


def _whole(rounds: dict[str, list[list[float]]]) -> list[Any]:
    """The rounds in which every side had a call that counts: [([milliseconds, ...] of each side), ...]."""
    return [each for each in zip(*rounds.values(), strict=True) if all(each)]


def conclude(rounds: dict[str, list[list[float]]], resolution: float, usual_of: Callable[[Any], Any] = np.median) -> Outer:
    """Return what `measure` does, of {side: [[milliseconds, ...] of each round]}. Raises WorkerFailure for too few rounds.

    `usual_of` gives what stands for a turn's calls. Nothing is taken to be faster than `resolution`, in milliseconds: a call
    that is has a bound that may be too low for it.
    """
    whole = _whole(rounds)
    if len(whole) < statistics.ROUNDS_FOR_AN_INTERVAL:
        raise WorkerFailure(f"only {len(whole)} of {len(rounds[NULL])} rounds of the outer clock could be used")
    medians = {name: np.array([usual_of(each[i]) for each in whole]) for i, name in enumerate(rounds)}
    variant, eager = (medians[name] - medians[NULL] for name in (VARIANT, EAGER))
    # Of each round, whose turns are near one another: what slows all of them cancels.
    ratios = np.maximum(0.0, eager) / np.maximum(resolution, variant)
    at_most = np.maximum(resolution, eager) / np.maximum(resolution, variant - resolution)
    control = eager / np.maximum(resolution, medians[CONTROL] - medians[NULL]) if CONTROL in medians else None
    return Outer(
        ratio=float(np.median(ratios)),
        low=statistics.median_interval(ratios)[0],
        high=statistics.median_interval(at_most)[1],
        ms=max(0.0, float(np.median(variant))),
        eager_ms=max(0.0, float(np.median(eager))),
        null_ms=float(np.median(medians[NULL])),
        control=None if control is None else max(0.0, float(np.median(control))),
        rounds=len(whole),
    )


def bounded(timing: Timing, outer: Outer, place: str, allowed: Interval | None = None) -> Timing:
    """Return the timing with what both clocks agree on over eager PyTorch, and over each other baseline in proportion.

    Where the inner ratio lies beyond the outer interval, which is as wide as the control `allowed` makes it, the outer one
    counts, and a note says so. Otherwise the interval begins where that of the outer clock does, if that is lower, and a ratio
    above 1 and beyond the outer one counts as AGREED times that. An eager call near the resolution proves no loss.
    """
    inner = timing.ratios.get("eager")
    seen = statistics.widened(Ratio(ratio=outer.ratio, low=outer.low, high=outer.high), allowed)
    timing = replace(timing, outer=outer, proved=seen)
    if not inner or not timing.time_ms:
        return timing
    is_beyond = inner.ratio > seen.high
    if is_beyond and outer.eager_ms < TOO_SHORT * RESOLUTION_MS[place] and statistics.verdict(seen) != "win":
        return withheld(timing, TOO_SHORT_TOLD.format(outer.eager_ms, RESOLUTION_MS[place]), outer, place)

    def agreed(ratio: Ratio) -> Ratio:
        own = scaled(seen, ratio.ratio / inner.ratio)  # eager PyTorch's time over that baseline's
        if is_beyond:
            return own
        return replace(ratio, ratio=min(ratio.ratio, max(1.0, AGREED * own.ratio)), low=min(ratio.low, own.low))

    speedup = {name: agreed(ratio) for name, ratio in timing.ratios.items()}
    slower = inner.ratio / speedup["eager"].ratio
    spread = Spread(**{name: slower * value for name, value in values(timing.time_ms).items()})
    told = (
        f"by the outer clock it is {seen.ratio:.3g}x as fast as eager PyTorch, {seen.high:.3g}x at most, "
        f"by its own process's {inner.ratio:.3g}x: the former counts"
    )
    timing = replace(timing, speedup=speedup, time_ms=spread, notes=timing.notes + [told] * is_beyond)
    if not timing.outcome or not timing.outcome.measured:
        return timing
    ratio = agreed(timing.outcome.measured)
    if statistics.says_nothing(ratio):
        return withheld(timing, statistics.too_noisy(ratio), outer, place)
    precise = timing.outcome.precise and statistics.is_precise(ratio)
    outcome = replace(timing.outcome, **values(ratio), verdict=statistics.verdict(ratio), precise=precise)
    return replace(timing, outcome=outcome)


def withheld(timing: Timing, reason: str, outer: Outer | None = None, place: str = "") -> Timing:
    """Return the timing without what it claims: only the judged process has seen how fast it is, or all is too noisy.

    The times go, too, unless the outer clock has seen the call: then they are no shorter than its own.
    """
    spread = timing.time_ms
    if not outer:
        spread = None
    elif not spread or spread.median < outer.ms - RESOLUTION_MS[place]:
        spread = Spread(median=outer.ms, p20=outer.ms, p80=outer.ms)
    return replace(timing, speedup={}, outcome=timing.outcome and not_measured(reason), time_ms=spread)


def not_measured(reason: str) -> Outcome:
    """Return the Outcome of a speed-up that is withheld."""
    return Outcome(verdict=NOT_MEASURED, reason=reason)
