"""Medians, quantiles, and ratios with an interval."""

import numpy as np

RESAMPLES = 2000


def summarise(samples_ms):
    """{"median", "p20", "p80"} in milliseconds."""
    p20, median, p80 = np.percentile(samples_ms, [20, 50, 80])
    return {"median": float(median), "p20": float(p20), "p80": float(p80)}


def ratio(baseline_ms, candidate_ms):
    """{"ratio", "low", "high"}: baseline's median over the candidate's, with a 95% bootstrap interval (percentile method).

    Above 1 the candidate is faster. The resampling is seeded, so that the same samples give the same interval.
    """
    random = np.random.default_rng(0)

    def medians(samples):
        return np.median(random.choice(samples, (RESAMPLES, len(samples))), axis=1)

    low, high = np.percentile(medians(baseline_ms) / medians(candidate_ms), [2.5, 97.5])
    return {"ratio": float(np.median(baseline_ms) / np.median(candidate_ms)), "low": float(low), "high": float(high)}
