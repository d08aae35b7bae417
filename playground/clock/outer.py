"""The outer clock, from the driver's side: whose turn it is, and what a speed-up can be at most.

It sees all that N calls take from the moment when their inputs become readable to the moment when all of their results were
taken. Turns without any work (`NULL`) say how much of that is the way there and back. docs/how_times_are_taken.md has the
protocol.
"""

import contextlib
import functools
import math
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from playground.clock import GRAPHED, statistics
from playground.clock.race import STANDING_CHANGED, WRONG_WHEN_TIMED, Rejected, standing
from playground.judge.failure import WorkerFailure
from playground.machine.load import is_traced
from playground.record import UNPROVED, Interval, Outcome, Outer, Ratio, Spread, Timing, scaled
from playground.serial import is_number, values
from playground.untrusted import held_at

if TYPE_CHECKING:
    from playground.worker import WorkerProcess
    from playground.worker.referee_client import RefereeClient

FEWEST_ROUNDS, ROUNDS, MOST_ROUNDS = 9, 40, 60  # the last with those that cannot be used
SECONDS = 3.2  # of rounds: with what is prepared, a timing takes 4 s at most
TURN_MS, SLOWEST = {"cuda": 15, "cpu": 80}, 3  # of eager PyTorch's calls, about; times as long the judged side's take at most
USUAL_CALLS, SHORT_TURN_MS = 64, 1.0  # no more than so many, unless those take less
# For a GPU's host to queue a turn's calls, each in so long, or in what eager PyTorch's takes it. It is the same for all sides:
# one that said when to begin could queue more of them before.
HEAD_START_MS, LONGEST_HEAD_START_MS, OF_A_CALL_MS = 2.0, 25.0, 0.1
RESOLUTION_MS = {"cuda": 0.010, "cpu": 0.1}  # of a turn: what one without work may lack besides
QUICK = 0.25  # of the turns of a trusted side, this share is quicker than what counts
RESAMPLED = 1000
AGREED = 1.05  # times the outer ratio: an inner one that is beyond, and within the interval, may be forged
SHARED = "its results are in an earlier call's memory"
VARIANT, EAGER, CONTROL, NULL = "variant", "eager", "control", "null"


class Player(NamedTuple):
    """A race.Side under the outer clock, the process in which it runs, and what its calls take by the inner clock."""

    name: str
    mode: str
    worker: "WorkerProcess"
    call_ms: float
    launch_ms: float = 0.0

    def ask(self, does: str, **given: Any) -> Any:
        """Have the side's process do something of clock.clocked's Side."""
        return self.worker.ask("outer", side=self.name, mode=self.mode, does=does, **given)


class Turn(NamedTuple):
    """Milliseconds of a turn by the outer clock, None where it was disturbed, and of its calls by the process's own."""

    outer: float | None
    inner: float


def calls_of_a_turn(place: str, call_ms: float, judged_ms: float) -> int:
    """Return how many calls a turn has where one of eager PyTorch, and one of the judged side, take so long."""
    usual = max(min(USUAL_CALLS, int(TURN_MS[place] / call_ms)), int(SHORT_TURN_MS / call_ms))
    return max(1, min(usual, int(SLOWEST * TURN_MS[place] / max(judged_ms, call_ms))))


def measure(
    referee: "RefereeClient",
    players: dict[str, Player],
    place: str,
    declared: str | float | None,
    seconds: float,
    suffices: Callable[[Outer], bool] = statistics.is_precise,
) -> Outer:
    """Return the Outer of the variant over eager PyTorch, of players {name: Player}: VARIANT, EAGER and, maybe, CONTROL.

    After `seconds`, or once what is known `suffices`, no more rounds follow than have to; `declared` is what is permitted to
    the variant. Raises Rejected, and WorkerFailure where nothing can be measured.
    """
    (_, mode, judged, judged_ms, _), eager = players[VARIANT], players[EAGER]
    calls = calls_of_a_turn(place, eager.call_ms, judged_ms)
    launches = (1 if mode.startswith(GRAPHED) else calls) * max(OF_A_CALL_MS, eager.launch_ms)
    head_start = min(LONGEST_HEAD_START_MS, max(HEAD_START_MS, launches))
    turn_of = functools.partial(_turn_on_gpu, head_start) if place == "cuda" else _turn_on_cpu
    rounds: dict[str, list[Turn]] = {name: [] for name in (*players, NULL)}
    shares, began = dict[str, bool](), time.monotonic()

    def are_enough(used: int) -> bool:
        if used < FEWEST_ROUNDS:
            return False
        is_late = used >= ROUNDS or time.monotonic() - began > seconds
        return is_late or suffices(conclude(rounds, RESOLUTION_MS[place], calls))

    trusted = [*(player.worker.pid for player in players.values() if player.worker is not judged), referee.worker.pid]
    stood = standing(trusted)
    with contextlib.ExitStack() as joined:
        joined.callback(_in_the_end, referee.ask, "outer_close")
        for player in players.values():
            opened = {"side": player.name, "shared": str(held_at(player.worker.shared)), "mode": mode, "declared": declared}
            turn = referee.ask("outer_open", calls=calls, **opened)
            calls = len(turn["calls"])
            joined.callback(_in_the_end, player.ask, "close")
            joins = player.ask("join", turn=turn)
            referee.ask("outer.arrange", side=player.name, strides=joins.get("strides"))
        while not are_enough(len(_whole(rounds))) and len(rounds[NULL]) < MOST_ROUNDS:
            first, *_, last = in_turn = secrets.SystemRandom().sample(list(rounds), len(rounds))
            for name in in_turn:
                player = players[EAGER if name == NULL else name]
                took, told, found = turn_of(referee, judged, player, name == NULL, name == first, name == last)
                if standing(trusted) != stood:
                    raise Rejected(STANDING_CHANGED)
                shares[name] = told["share"]
                if found["complaint"] and told["share"] and found["is_last_right"]:
                    raise WorkerFailure(SHARED)
                if found["complaint"]:
                    raise Rejected(f"{WRONG_WHEN_TIMED}{found['complaint']}")
                rounds[name].append(Turn(took, told["milliseconds"]))
            if shares[VARIANT] and not shares[EAGER]:
                raise WorkerFailure(SHARED)
    return conclude(rounds, RESOLUTION_MS[place], calls)


def _in_the_end(ask: Callable[[str], Any], what: str) -> None:
    with contextlib.suppress(WorkerFailure):  # or it would be told in the place of what came before
        ask(what)


@contextlib.contextmanager
def _turn(player: Player, judged: "WorkerProcess", referee: "RefereeClient") -> Iterator[None]:
    """Have a judged file's processes stand still in the turn of another side. Raises WorkerFailure where they go on, or where
    a debugger may slow the others down.
    """
    if any(is_traced(worker.pid) for worker in {player.worker, referee.worker} - {judged}):
        raise WorkerFailure(f"a debugger is at the process of {player.name}, or at the referee's")
    if player.worker is judged:
        yield
        return
    try:
        with judged.stopped() as stopped, stopped.still():
            yield
    except OSError as error:
        raise WorkerFailure(f"its own {error}, in the turn of {player.name}") from None


def _turn_on_gpu(
    head_start_ms: float, referee: "RefereeClient", judged: "WorkerProcess", player: Player, null: bool, first: bool, last: bool
) -> Any:
    """Return (milliseconds of a turn, what its process says, what the referee does), which has the clock.

    The look at who else uses the GPU before a turn is the one behind the turn before it, too: a round counts only if all of
    them find nobody.
    """
    seconds, compares = player.worker.limit / 2, player.name == VARIANT  # before its limit ends the referee it gives up
    with _turn(player, judged, referee), ThreadPoolExecutor(1) as beside:
        turn = referee.ask("outer.draw", side=player.name, anew=compares)
        player.ask("ready", turn=turn)
        at_once = referee.ask("outer.await_quiet", seconds=seconds)["at_once"]
        called = beside.submit(player.ask, "call", null=null, number=turn["number"])
        time.sleep(head_start_ms / 1e3)
        try:
            found = referee.ask("outer.time", side=player.name, compares=compares, looks=last, seconds=seconds)
        finally:
            told = called.result()
    return found["milliseconds"] if at_once or first else None, _believable(told), found


def _turn_on_cpu(referee: "RefereeClient", judged: "WorkerProcess", player: Player, null: bool, *_: bool) -> Any:
    """Return the same of a turn on the CPU, from when the process, which stood still, goes on until it is stopped."""
    compares = player.name == VARIANT
    turn = referee.ask("outer.draw", side=player.name, anew=compares)
    with _turn(player, judged, referee):
        player.ask("ready", turn=turn)
        try:
            with player.worker.stopped() as process:
                with process.still():
                    referee.ask("outer.release")
                began = time.perf_counter()
                process.go_on()
                told = player.ask("call", null=null, number=0)
                process.stop()
                milliseconds = (time.perf_counter() - began) * 1e3
                at_stop = process.used()
                if process.has_grown() or not process.is_still():  # whoever goes on may still be at work
                    process.settled()
                    milliseconds = (time.perf_counter() - began) * 1e3
                with process.still():
                    found = referee.ask("outer.take", compares=compares)
                ran = process.since(at_stop)  # what was worked behind the stop counts
        except OSError as error:
            raise WorkerFailure(f"its own {error}" if compares else f"{player.name}: {error}") from None
    return milliseconds + ran, _believable(told), found


def _believable(told: dict[str, Any]) -> dict[str, Any]:
    match told:
        case {"milliseconds": took, "share": bool()} if is_number(took) and math.isfinite(took):
            return told
    raise WorkerFailure("answers a turn of the outer clock with something that is no time")


def _whole(rounds: dict[str, list[Turn]]) -> list[tuple[Turn, ...]]:
    """The rounds in which no side was disturbed: [a Turn of each side]."""
    return [each for each in zip(*rounds.values(), strict=True) if all(turn.outer is not None for turn in each)]


def conclude(rounds: dict[str, list[Turn]], resolution: float, calls: int) -> Outer:
    """Return what `measure` does, of the turns of each side. Raises WorkerFailure for too few rounds.

    Ratios are those of medians: so equal work comes out as 1 on a noisy machine, too. Against work that comes up in few turns,
    and turns of the trusted side that are slowed down, the judged side counts by its mean at the interval's lower end, the
    trusted one by its lower quartile. The interval is that of rounds drawn with replacement (Efron, the bootstrap). No turn is
    known better than to `resolution`, in milliseconds: of one that is shorter the interval's upper end says nothing.
    """
    import numpy as np  # where nothing is timed, it is not imported

    whole = _whole(rounds)
    if len(whole) < FEWEST_ROUNDS:
        raise WorkerFailure(f"only {len(whole)} of {len(rounds[NULL])} rounds of the outer clock could be used")
    outer, inner = (np.array([[getattr(turn, of) for turn in each] for each in whole]) for of in ("outer", "inner"))
    sides = list(rounds)
    drawn = np.random.default_rng(len(whole)).integers(len(whole), size=(RESAMPLED, len(whole)))

    def of(took: np.ndarray, name: str, statistic: Callable[..., Any] = np.median) -> np.ndarray:
        """What a side takes a turn, of the rounds as they are, then of those drawn; a row of `took` is a round."""
        column = took[:, sides.index(name)]
        return np.array([statistic(column), *statistic(column[drawn], axis=1)])

    def over(eager: np.ndarray, side: np.ndarray, least: float = resolution) -> np.ndarray:
        return np.maximum(0.0, eager) / np.maximum(least, side)

    quick = functools.partial(np.quantile, q=QUICK)
    null = of(outer, NULL)
    took = {name: of(outer, name) - null for name in sides if name != NULL}
    ratio = over(took[EAGER], took[VARIANT])
    at_most = over(np.maximum(0.0, took[EAGER]) + resolution, took[VARIANT] - resolution, resolution / 10)
    at_least = over(of(outer, EAGER, quick) - of(outer, NULL, quick), of(outer, VARIANT, np.mean) - of(outer, NULL, quick))
    own = {name: np.maximum(of(inner, name), resolution / 1e3) for name in (VARIANT, EAGER)}
    warm = own[EAGER] / own[VARIANT]
    low, high = np.quantile(warm[1:], [0.025, 0.975])
    return Outer(
        ratio=float(ratio[0]),
        low=min(float(ratio[0]), float(np.quantile(at_least[1:], 0.025))),
        high=max(float(at_most[0]), float(np.quantile(at_most[1:], 0.975))),
        ms=max(0.0, float(took[VARIANT][0]) / calls),
        eager_ms=max(0.0, float(took[EAGER][0]) / calls),
        null_ms=float(null[0]),
        control=float(over(took[EAGER], took[CONTROL])[0]) if CONTROL in took else None,
        rounds=len(whole),
        calls=calls,
        warm=Ratio(ratio=float(warm[0]), low=float(min(warm[0], low)), high=float(max(warm[0], high))),
    )


def bounded(timing: Timing, outer: Outer, place: str, allowed: Interval | None = None) -> Timing:
    """Return the timing with what both clocks agree on over eager PyTorch, and over each other baseline in proportion.

    It is the inner clock's figure of the outer one's turns. Where that lies beyond the outer interval, which its control and
    those `allowed` widen, the outer one counts, and a note says so. Otherwise the interval begins where that of the outer clock
    does, if that is lower, and a ratio above 1 and beyond the outer one counts as AGREED times that.
    """
    cold = timing.ratios.get("eager")
    if outer.control:  # of the same turns
        own_control = Interval(low=outer.control, high=outer.control)
        allowed = statistics.spanning([own_control, *filter(None, [allowed])], 0.0)
    own = Ratio(ratio=outer.ratio, low=outer.low, high=outer.high)
    seen, inner = statistics.widened(own, allowed), statistics.widened(outer.warm or own, allowed)
    timing = replace(timing, outer=outer, proved=seen)
    if not cold or not timing.time_ms:
        return timing
    is_beyond = inner.ratio > seen.high

    def agreed(ratio: Ratio) -> Ratio:
        over = ratio.ratio / cold.ratio  # eager PyTorch's time over that baseline's
        own, warm = scaled(seen, over), scaled(inner, over) if ratio == cold else scaled(ratio, inner.ratio / cold.ratio)
        if is_beyond:
            return own
        return replace(warm, ratio=min(warm.ratio, max(1.0, AGREED * own.ratio)), low=min(warm.low, own.low))

    speedup = {name: agreed(ratio) for name, ratio in timing.ratios.items()}
    told = (
        f"the outer clock says {seen.ratio:.3g}x over eager PyTorch, {seen.high:.3g}x at most, its own process "
        f"{inner.ratio:.3g}x: the outer clock counts"
    )
    timing = replace(timing, speedup=speedup, time_ms=_seen(timing, outer, place), notes=timing.notes + [told] * is_beyond)
    if not timing.outcome or not timing.outcome.measured:
        return timing
    ratio = agreed(timing.outcome.measured)
    if statistics.says_nothing(ratio):
        return withheld(timing, statistics.too_noisy(ratio), outer, place)
    precise = timing.outcome.precise and statistics.is_precise(ratio)
    outcome = replace(timing.outcome, **values(ratio), verdict=statistics.verdict(ratio), precise=precise)
    return replace(timing, outcome=outcome)


def withheld(timing: Timing, reason: str, outer: Outer | None = None, place: str = "") -> Timing:
    """Return the timing without what it claims, and without its times where the outer clock has not seen the call."""
    unproved = timing.outcome and Outcome(verdict=UNPROVED, reason=reason)
    return replace(timing, speedup={}, outcome=unproved, time_ms=_seen(timing, outer, place) if outer else None)


def _seen(timing: Timing, outer: Outer, place: str) -> Spread:
    """What a call takes by its own process's clock, unless that is less than the outer one has seen: then that."""
    if timing.time_ms and timing.time_ms.median >= outer.ms - RESOLUTION_MS[place] / (outer.calls or 1):
        return timing.time_ms
    return Spread(median=outer.ms, p20=outer.ms, p80=outer.ms)
