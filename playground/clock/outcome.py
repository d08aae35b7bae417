"""What follows from the times of a variant and of all beside it: against whom it counts, and how it comes out."""

from collections.abc import Sequence

from playground.clock import statistics
from playground.clock.baselines import peers
from playground.clock.race import Side
from playground.record import NOT_MEASURED, Interval, Outcome, Result, Timing
from playground.serial import values

SETS = {"benchmark": "sets-cudnn-benchmark", "tf32": "sets-tf32"}  # setting of a baseline -> caveat of a variant
LAUNCHES_BIND = 0.8  # of eager PyTorch's time: where the host takes as long to launch it, the GPU waits for the host


def outcome(
    variant: Side, others: Sequence[Side], result: Result, control: Interval | None, disturbance: str | None = None
) -> Outcome | None:
    """Return the Outcome of a variant beside the others; None without baselines.

    It is over the fastest baseline that is at least as precise as the variant, by the interval that the control allows. After a
    disturbance, or if the interval has room for a win and for a loss, it is "not measured", with the reason.
    """
    if not (fastest := rivals(others, result)):
        return None
    first, *faster = fastest
    measured = statistics.paired_ratio(first.rounds, variant.rounds)
    ratio = statistics.widened(measured, control)
    if not disturbance and statistics.says_nothing(ratio):
        disturbance = statistics.too_noisy(ratio)
    if disturbance:
        return Outcome(verdict=NOT_MEASURED, reason=disturbance)
    return Outcome(
        verdict=statistics.verdict(ratio),
        against=first.name,
        **values(ratio),
        precise=statistics.is_precise(measured),
        any_precision=faster[0].name if faster else None,
    )


def rivals(others: Sequence[Side], result: Result) -> list[Side]:
    """Return the fastest baseline at least as precise as the variant and, where that is another one, the fastest of all: TF32
    may be among them, fp16 only where the variant declares so little.
    """
    names, settings = [side.name for side in others], settings_of(result)
    precision = result.variant_precision or result.precision
    precise_enough = peers(names, precision, settings)
    usual = {each for own in ((), settings) for each in peers(names, "tf32" if precision == "fp32" else precision, own)}
    ranked = sorted((side for side in others if side.name in usual), key=lambda side: side.median)
    best = next((side for side in ranked if side.name in precise_enough), None)
    return [side for side in dict.fromkeys([best, *ranked[:1]]) if side]


def settings_of(result: Result) -> tuple[str, ...]:
    """Return names of baselines.SETTINGS: what the variant has set for its process, so that its baselines must have it, too."""
    return tuple(name for name, tag in SETS.items() if tag in tags(result))


def tags(result: Result) -> set[str]:
    """Return those of a result's caveats."""
    return {caveat.tag for caveat in result.caveats}


def is_measured(timing: Timing) -> bool:
    """Return whether there is a ratio over the baseline that counts."""
    return timing.outcome is not None and timing.outcome.measured is not None


def launches_bind(timing: Timing) -> bool:
    """Return whether eager PyTorch takes about as long as the host needs to launch it."""
    eager = timing.baselines_ms.get("eager")
    return bool(eager and timing.launch_ms and timing.launch_ms > LAUNCHES_BIND * eager.median > 0)
