"""The outer clock, from the driver's side: whose turn it is, and what a speed-up can be at most.

The inner clock is precise, and belongs to the process that is timed: a file written to deceive can forge it. The outer one is
the referee's. It sees all that a call takes from the moment when its inputs become readable to the moment when its result is
taken, and what the two processes need to take turns on the GPU. Calls without any work (`NULL`) say how much that is.
"""

import contextlib
import secrets
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from playground.stopwatch import statistics
from playground.worker import WorkerFailure, standstill

ROUNDS = 12
CALLS, SETTLING = 4, 1  # of a turn; of these, calls that do not count
# What a call without work lacks besides: on one NVIDIA H200 calls of 0.010, 0.36 and 11.2 ms came out 0.006, 0.005 and 0.007 ms
# longer than by the inner clock.
RESOLUTION_MS = 0.010
VARIANT, EAGER, CONTROL, NULL = "variant", "eager", "control", "null"


class TimedWrong(Exception):
    """A result that the outer clock took is wrong; the text is the complaint."""


class Player:
    """A side under the outer clock: `worker` answers `request`s ("candidate" or "baselines") as `side`."""

    def __init__(self, name, worker, role, side, page):
        self.name, self.worker, self.page = name, worker, page
        self._role, self._side = role, side

    def ask(self, what, limit, **arguments):
        """Ask the side's process."""
        return self.worker.ask(f"{self._role}.{what}", limit, side=self._side, mode="forward", **arguments)


def measure(truth, players, declared, limit):
    """Return {"ratio", "low", "high", "ms", "eager_ms", "null_ms", "control", "rounds"}: variant over eager PyTorch.

    `players` are {name: Player} of VARIANT, EAGER and, where it runs, CONTROL. `high` is None where the variant's calls are
    too short to say how fast they can be. Raises TimedWrong, and WorkerFailure where nothing can be measured.
    """
    rounds = {name: [] for name in (*players, NULL)}
    with contextlib.ExitStack() as joined, ThreadPoolExecutor(1) as pool:
        joined.callback(truth.outer, "close")
        for player in players.values():
            shared = truth.outer("open", side=player.name, page=str(player.page))
            player.ask("join_outer", limit, shared=shared, page=str(player.page))
            joined.callback(_leave, player, limit)
        for _ in range(ROUNDS):
            for name in secrets.SystemRandom().sample(list(rounds), len(rounds)):
                player = players[EAGER if name == NULL else name]
                with standstill({player.worker, truth.worker}):
                    served = pool.submit(player.ask, "serve_outer", limit, calls=CALLS, seconds=limit, null=name == NULL)
                    try:
                        given = {"calls": CALLS, "compares": name == VARIANT, "declared": declared, "seconds": limit}
                        calls = truth.outer("time", side=player.name, **given)["calls"]
                    finally:
                        served.result()
                if complaint := next((call["complaint"] for call in calls if call["complaint"]), None):
                    raise TimedWrong(complaint)
                rounds[name].append([call["milliseconds"] for call in calls[SETTLING:] if call["milliseconds"] is not None])
    return conclude(rounds)


def conclude(rounds):
    """Return what `measure` does, of {side: [[milliseconds, ...] of each round]}. Raises WorkerFailure for too few rounds."""
    whole = [each for each in zip(*rounds.values(), strict=True) if all(each)]
    if len(whole) < statistics.ROUNDS_FOR_AN_INTERVAL:
        raise WorkerFailure(f"only {len(whole)} of {ROUNDS} rounds of the outer clock could be used")
    medians = {name: np.array([np.median(each[i]) for each in whole]) for i, name in enumerate(rounds)}
    variant, eager = (medians[name] - medians[NULL] for name in (VARIANT, EAGER))
    shortest, _ = statistics.median_interval(variant)
    _, longest = statistics.median_interval(eager)
    least = shortest - RESOLUTION_MS
    usual, slow = float(np.median(variant)), statistics.median_interval(variant)[1]
    return {
        "ratio": float(np.median(eager)) / usual if usual > RESOLUTION_MS else None,
        "low": max(0.0, statistics.median_interval(eager)[0]) / max(slow, RESOLUTION_MS),
        "high": longest / least if least > 0 else None,
        "ms": usual,
        "eager_ms": float(np.median(eager)),
        "null_ms": float(np.median(medians[NULL])),
        "control": float(np.median(eager / (medians[CONTROL] - medians[NULL]))) if CONTROL in medians else None,
        "rounds": len(whole),
    }


def bounded(timings, outer):
    """Bring timings down to what the outer clock allows, where they claim more over eager PyTorch; a note is added then."""
    inner = (timings["speedup"] or {}).get("eager")
    if not (inner and outer["high"] and inner["ratio"] > outer["high"]):
        return
    factor = outer["high"] / inner["ratio"]
    timings["notes"].append(
        f"by the outer clock it is {outer['high']:.3g}x as fast as eager PyTorch at most, by its own process's "
        f"{inner['ratio']:.3g}x: the former counts"
    )
    ratios = [*timings["speedup"].values(), *filter(None, [timings["outcome"]])]
    for ratio in ratios:
        ratio.update({key: ratio[key] * factor for key in ("ratio", "low", "high") if ratio.get(key) is not None})
    if timings["outcome"] and timings["outcome"]["ratio"] is not None:
        timings["outcome"]["verdict"] = statistics.verdict(timings["outcome"])


def _leave(player, limit):
    with contextlib.suppress(WorkerFailure):
        player.ask("leave_outer", limit)
