"""Medians, quantiles, and the interval of a ratio."""

import numpy as np
import pytest

from playground.stopwatch.statistics import ratio, summarise


def test_summary_by_hand():
    assert summarise([11, 1, 2, 10, 3, 9, 4, 8, 5, 7, 6]) == {"median": 6, "p20": 3, "p80": 9}
    assert summarise([2.5]) == {"median": 2.5, "p20": 2.5, "p80": 2.5}


def test_an_outlier_moves_nothing():
    assert summarise([1.0] * 10 + [1000.0]) == {"median": 1, "p20": 1, "p80": 1}


def test_samples_without_noise_have_an_interval_without_width():
    assert ratio([3.0] * 10, [1.5] * 7) == {"ratio": 2.0, "low": 2.0, "high": 2.0}
    assert ratio([1.0] * 10, [2.0] * 10)["ratio"] == 0.5


def samples(seed, median, count=50):
    return (median * np.random.default_rng(seed).lognormal(0, 0.1, count)).tolist()


def test_the_same_samples_give_the_same_interval():
    assert ratio(samples(1, 3), samples(2, 1)) == ratio(samples(1, 3), samples(2, 1))


def test_more_samples_narrow_the_interval():
    few, many = (ratio(samples(1, 3, count), samples(2, 1, count)) for count in (10, 1000))
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 4


@pytest.mark.parametrize("true_ratio", [1.0, 1.7, 0.4])
def test_the_interval_contains_the_truth_in_about_19_of_20_cases(true_ratio):
    intervals = [ratio(samples(2 * i, true_ratio), samples(2 * i + 1, 1)) for i in range(200)]
    covered = sum(found["low"] <= true_ratio <= found["high"] for found in intervals)
    assert 180 <= covered <= 200
    assert all(found["low"] <= found["ratio"] <= found["high"] for found in intervals)
