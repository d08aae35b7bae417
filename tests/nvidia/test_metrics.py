"""Nsight Compute's CSV: a sample that was written by hand, and one that was measured (see samples/README.md)."""

from pathlib import Path

import pytest

from playground.nvidia import metrics

SAMPLES = Path(__file__).parent / "samples"
SAMPLE = (SAMPLES / "sample_raw.csv").read_text()
MEASURED = (SAMPLES / "ncu_2025_3.csv").read_text()


@pytest.fixture
def kernels():
    return {kernel["kernel"]: kernel for kernel in metrics.kernels(metrics.launches(SAMPLE))}


def test_launches_in_their_order_and_units():
    launches = metrics.launches(SAMPLE)
    assert [metrics.base_name(launch["kernel"]) for launch in launches] == ["sum_sigmoids", "weighted_sum", "sum_sigmoids"]
    assert [launch[metrics.TIME] for launch in launches] == [600.0, 10.0, 200.0], "microseconds, from nanoseconds"
    assert set(launches[0]) == {"kernel", *metrics.ALL}


def test_what_is_not_there_is_none():
    launches = metrics.launches(SAMPLE)
    assert launches[0][metrics.STALL.format("gmma")] is None, "n/a"
    assert launches[1][metrics.PER_REQUEST["device memory written"][1]] is None, "an empty place"
    assert launches[0][metrics.STALL.format("wait")] is None, "a column that is missing"


def test_launches_of_a_kernel_are_one(kernels):
    found = kernels["sum_sigmoids<1>"]
    assert (found["launches"], found["microseconds"], found["registers"]) == (2, 800.0, 124)
    assert found["shares"]["dram"] == pytest.approx((20.5 * 600 + 40.5 * 200) / 800), "weighted by time"
    assert found["shares"]["occupancy_limit"] == 25.0
    assert found["per_request"] == {
        "device memory read": 6.0,
        "device memory written": 1.0,
        "shared memory read": 3.0,
        "shared memory written": 2.0,
    }


def test_stalls_are_shares_of_the_warps_time(kernels):
    assert kernels["sum_sigmoids<1>"]["stalls"] == {"long_scoreboard": 0.5, "barrier": 0.25}
    assert list(kernels["weighted_sum"]["stalls"].items()) == [("long_scoreboard", 0.9)]
    assert kernels["weighted_sum"]["per_request"] == {}, "no request, or none known"


def test_what_was_measured_on_a_gpu():
    launches = metrics.launches(MEASURED)
    assert all(launch[metric] is not None for launch in launches for metric in metrics.ALL), "this GPU knows all of them"
    products, sums = metrics.kernels(launches)
    assert (products["kernel"], sums["kernel"]) == ("stream_windows<0, 1>", "add_part_sums")
    assert (products["launches"], products["microseconds"], products["registers"]) == (1, 248.512, 238)
    shares = {"dram": 52.48, "matrix": 42.26, "issue": 37.89, "occupancy": 12.24, "occupancy_limit": 12.5}
    assert products["shares"] == pytest.approx(shares)
    assert list(products["stalls"])[:2] == ["wait", "math_pipe_throttle"] and sum(products["stalls"].values()) < 1
    assert products["per_request"]["shared memory written"] == pytest.approx(1.033, abs=1e-3)


@pytest.mark.parametrize(
    "name, short",
    [
        ("void fused_tail<(int)1024>(const float *, float *, int)", "fused_tail<1024>"),
        ("void general::sum<2, true>(float *)", "sum<2, true>"),
        ("void (anonymous namespace)::copy<unsigned int>(const T1 *, T1 *, long)", "copy<unsigned int>"),
        ("triton_kernel", "triton_kernel"),
    ],
)
def test_names(name, short):
    assert metrics.short_name(name) == short


@pytest.mark.parametrize("text", ["", "==ERROR== nothing", '"ID"\n', '"ID","Process ID"\n"","x"\n"0","1"\n'])
def test_no_table(text):
    assert metrics.launches(text) == []
