"""Medians, quantiles, and ratios with an interval."""

import math
from collections.abc import Sequence
from typing import Literal

from playground.record import Interval, Outer, Ratio, Spread

Rounds = Sequence[Sequence[float]]  # milliseconds of the calls of each round

ROUNDS_FOR_AN_INTERVAL = 6  # with fewer values no two of them enclose the median with 95%
PRECISE = 0.02  # an interval whose ends are this near to the ratio needs no further rounds
ROUGH = 0.05  # or this near where the outer clock is asked, too, whose turns count
OPEN = 1.25  # a tie that may be this much of a win, or of a loss, says nothing
TIE = 0.01  # two processes that run the very same code can differ by as much, whatever the interval says


def summarise(samples_ms: Sequence[float]) -> Spread:
    """Return the Spread of times in milliseconds."""
    import numpy as np  # where nothing is timed, it is not imported

    p20, median, p80 = map(float, np.percentile(samples_ms, [20, 50, 80]))
    return Spread(median=median, p20=p20, p80=p80)


def paired_ratio(baseline_rounds: Rounds, candidate_rounds: Rounds) -> Ratio:
    """Return how much longer the baseline takes than the candidate: the median of the rounds' ratios, with `median_interval`.

    Round i of one side was taken beside round i of the other, and only as many as both have are used. A round's ratio is that
    of its two medians, so that what slows both sides (a clock that drops) cancels.
    """
    import numpy as np

    ratios = [np.median(b) / np.median(c) for b, c in zip(baseline_rounds, candidate_rounds, strict=False)]
    low, high = median_interval(ratios)
    return Ratio(ratio=float(np.median(ratios)), low=low, high=high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the two values between which the median lies with at least 95%. Raises ValueError for too few values.

    The k-th smallest and the k-th largest of n enclose it unless fewer than k fall on one side, which has the probability
    2 P(Binomial(n, 1/2) < k); k is the largest for which that is at most 5% (David and Nagaraja, Order Statistics, 7.1).
    """
    if len(values) < ROUNDS_FOR_AN_INTERVAL:
        raise ValueError(f"an interval needs {ROUNDS_FOR_AN_INTERVAL} values, got {len(values)}")
    n, k, below = len(values), 0, 0.0
    while 2 * (below + math.comb(n, k) / 2**n) <= 0.05:
        below += math.comb(n, k) / 2**n
        k += 1
    ordered = sorted(values)
    return float(ordered[k - 1]), float(ordered[n - k])


def is_precise(ratio: Ratio | Outer, within: float = PRECISE) -> bool:
    """Return whether both ends of the interval are within such a share of the ratio."""
    return ratio.high <= (1 + within) * ratio.ratio and ratio.low >= (1 - within) * ratio.ratio


def spanning(controls: Sequence[Interval], luck: float) -> Interval:
    """Return the interval of several controls, each near 1 by chance, maybe; from 1 - luck to 1 + luck at least."""
    return Interval(low=min(1 - luck, *(each.low for each in controls)), high=max(1 + luck, *(each.high for each in controls)))


def widened(ratio: Ratio, control: Interval | None) -> Ratio:
    """Return the ratio with the interval that a control allows: one that reaches up to 1.03 says that it may be 3% too high."""
    if control is None:
        return ratio
    return Ratio(ratio=ratio.ratio, low=ratio.low / max(1.0, control.high), high=ratio.high / min(1.0, control.low))


def verdict(ratio: Interval) -> Literal["win", "tie", "loss"]:
    """Return "win", "loss", or "tie" where the interval reaches into 1 +- TIE."""
    if ratio.low > 1 + TIE:
        return "win"
    return "loss" if ratio.high < 1 - TIE else "tie"


def says_nothing(ratio: Interval) -> bool:
    """Return whether the interval has room for no difference and for a large one, too."""
    return verdict(ratio) == "tie" and (ratio.low <= 0 or max(ratio.high, 1 / ratio.low) > OPEN)


def too_noisy(ratio: Interval) -> str:
    """Return the reason why such a ratio is withheld."""
    return f"too noisy: anything from {ratio.low:.3g}x to {ratio.high:.3g}x"
