"""Medians, quantiles, and the interval of a ratio."""

import math

import numpy as np
import pytest

from playground.clock.statistics import (
    is_precise,
    median_interval,
    paired_ratio,
    says_nothing,
    spanning,
    summarise,
    too_noisy,
    verdict,
    widened,
)
from playground.record import Interval, Ratio, Spread


def test_summary_by_hand():
    assert summarise([11, 1, 2, 10, 3, 9, 4, 8, 5, 7, 6]) == Spread(median=6, p20=3, p80=9)
    assert summarise([2.5]) == Spread(median=2.5, p20=2.5, p80=2.5)


def test_an_outlier_moves_nothing():
    assert summarise([1.0] * 10 + [1000.0]) == Spread(median=1, p20=1, p80=1)


def test_samples_without_noise_have_an_interval_without_width():
    assert paired_ratio([[3.0, 3.0]] * 9, [[1.5]] * 9) == Ratio(ratio=2.0, low=2.0, high=2.0)


def test_ratio_by_hand():
    """Ratios of rounds 1, 2, ..., 9; of 9 values the second from either end enclose the median with 96%."""
    rounds = [[float(i), float(i), 100.0] for i in (3, 1, 2, 9, 8, 7, 4, 5, 6)]
    assert paired_ratio(rounds, [[1.0]] * 9) == Ratio(ratio=5.0, low=2.0, high=8.0)


def test_only_rounds_of_both_count():
    assert paired_ratio([[2.0]] * 6, [[1.0]] * 6 + [[7.0]] * 90).high == 2.0


@pytest.mark.parametrize("count, k", [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (100, 40)])
def test_interval_takes_the_tabulated_order_statistics(count, k):
    """The k of the sign test's 95% interval, from tables (Conover, Practical Nonparametric Statistics, table A3)."""
    assert median_interval(range(1, count + 1)) == (k, count + 1 - k)
    missed = 2 * sum(math.comb(count, i) for i in range(k)) / 2**count
    assert missed <= 0.05 < missed + 2 * math.comb(count, k) / 2**count


def test_too_few_values_for_an_interval():
    with pytest.raises(ValueError, match="needs 6 values, got 5"):
        median_interval([1.0] * 5)


def test_what_slows_both_sides_cancels():
    """A clock that drops to half in the middle: the times double, the ratio does not move."""
    pace = [1.0] * 6 + [2.0] * 6
    assert paired_ratio([[3 * p] for p in pace], [[2 * p] for p in pace]) == Ratio(ratio=1.5, low=1.5, high=1.5)


def rounds(random, median, count):
    return (median * random.lognormal(0, 0.05, (count, 3))).tolist()


def until_precise(random, true_ratio):
    """As the driver stops: looks at 9 rounds and after every third further one."""
    mine, others = [], []
    while True:
        more = 9 if not mine else 3
        mine += rounds(random, 1, more)
        others += rounds(random, true_ratio, more)
        found = paired_ratio(others, mine)
        if is_precise(found) or len(mine) >= 60:
            return found


def test_the_interval_contains_the_truth_in_about_19_of_20_cases():
    """Stopping when the interval is narrow costs some of the 95%; it must not cost more than 4 points."""
    true_ratio = 1.7
    intervals = [until_precise(np.random.default_rng(i), true_ratio) for i in range(400)]
    covered = sum(found.low <= true_ratio <= found.high for found in intervals)
    assert covered >= 0.91 * len(intervals)
    assert all(found.low <= found.ratio <= found.high for found in intervals)


@pytest.mark.parametrize(
    "low, high, word",
    [(1.02, 1.1, "win"), (0.9, 0.98, "loss"), (0.98, 1.03, "tie"), (1.005, 1.2, "tie"), (0.8, 0.995, "tie"), (0.5, 2.0, "tie")],
)
def test_verdict(low, high, word):
    assert verdict(Ratio(ratio=1.0, low=low, high=high)) == word


def test_precise_means_both_ends():
    assert is_precise(Ratio(ratio=2.0, low=1.97, high=2.03))
    assert not is_precise(Ratio(ratio=2.0, low=1.95, high=2.0))
    assert not is_precise(Ratio(ratio=2.0, low=2.0, high=2.05))


def test_controls_of_several_timings_allow_the_least_that_any_does():
    controls = [Ratio(ratio=1.0, low=0.97, high=1.01), Ratio(ratio=1.05, low=1.02, high=1.08)]
    assert spanning(controls, luck=0.05) == Interval(low=0.95, high=1.08)
    assert spanning(controls[:1], luck=0.05) == Interval(low=0.95, high=1.05)
    allowed = spanning(controls, luck=0.0)
    assert allowed == Interval(low=0.97, high=1.08)
    ratio = Ratio(ratio=1.06, low=1.05, high=1.07)
    assert verdict(widened(ratio, controls[0])) == "win"
    assert verdict(widened(ratio, allowed)) == "tie"


def test_a_ratio_is_only_as_narrow_as_the_control():
    ratio = Ratio(ratio=1.04, low=1.03, high=1.05)
    assert widened(ratio, Ratio(ratio=1.0, low=1.0, high=1.0)) == ratio
    wide = widened(ratio, Ratio(ratio=1.02, low=0.98, high=1.04))
    assert wide.ratio == 1.04 and wide.low == pytest.approx(1.03 / 1.04) and wide.high == pytest.approx(1.05 / 0.98)
    assert verdict(wide) == "tie"
    assert widened(ratio, None) == ratio


@pytest.mark.parametrize("low, high, nothing", [(0.97, 1.03, False), (0.97, 1.26, True), (0.79, 1.0, True), (1.02, 1.6, False)])
def test_an_interval_with_room_for_a_large_difference_and_for_none_says_nothing(low, high, nothing):
    assert says_nothing(Ratio(ratio=1.0, low=low, high=high)) == nothing


def test_why_a_ratio_is_withheld():
    assert too_noisy(Ratio(ratio=1.0, low=0.7432, high=1.489)) == "too noisy: anything from 0.743x to 1.49x"
