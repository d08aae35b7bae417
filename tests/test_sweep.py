"""Grids of a model's constants, and where a variant starts to win."""

import pytest

from playground import sweep
from playground.catalog import CatalogError

AXES = {"batch_size": (1, 8, 64), "pool_size": ((2, 2, 2), (1, 2, 2))}


def point(batch_size, ratio, pool_size=(2, 2, 2), verdict=None):
    """A result of one variant; tuples are lists, as JSON has them."""
    verdict = verdict or ("win" if ratio > 1.01 else "loss" if ratio < 0.99 else "tie")
    settings = {"batch_size": batch_size, "pool_size": list(pool_size)}
    return {"shape": {"settings": settings}, "outcome": {"verdict": verdict, "ratio": ratio}}


def test_values_are_literals():
    assert sweep.parse(["batch_size=1,8", "pool_size=(2, 2, 2),(1,2,2)", "eps=1e-3"]) == {
        "batch_size": (1, 8),
        "pool_size": ((2, 2, 2), (1, 2, 2)),
        "eps": (1e-3,),
    }
    assert sweep.parse(["batch_size=8,1,8"]) == {"batch_size": (8, 1)}, "a value is measured once"
    assert sweep.parse([]) == {}


@pytest.mark.parametrize("text", ["batch_size", "batch_size=", "batch_size=1,,2", "batch_size=many", "=1,2", "a b=1"])
def test_what_is_no_sweep_is_refused(text):
    with pytest.raises(CatalogError, match="--sweep"):
        sweep.parse([text])


def test_a_grid_has_every_combination():
    points = sweep.grid({"a": (1, 2), "b": (3, 4)})
    assert points == [{"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4}]
    assert sweep.grid({}) == [{}]


def test_lines_run_along_one_axis():
    results = [point(b, 1.0, pool) for pool in AXES["pool_size"] for b in (64, 1, 8)]
    lines = sweep.lines_along(results, AXES, "batch_size")
    assert [others for others, _ in lines] == [{"pool_size": (2, 2, 2)}, {"pool_size": (1, 2, 2)}]
    assert [r["shape"]["settings"]["batch_size"] for r in lines[0][1]] == [1, 8, 64]
    across = sweep.lines_along(results, AXES, "pool_size")
    assert [others for others, _ in across] == [{"batch_size": 1}, {"batch_size": 8}, {"batch_size": 64}]
    assert [tuple(r["shape"]["settings"]["pool_size"]) for r in across[0][1]] == list(AXES["pool_size"]), "in the order given"


def test_the_crossover_is_where_the_ratio_is_one():
    (found,) = sweep.crossovers([point(1, 0.5), point(4, 0.25), point(16, 4.0)], AXES, "batch_size")
    assert (found.starts, found.before, found.after) == (True, 4, 16)
    assert found.at == pytest.approx(8)
    (found,) = sweep.crossovers([point(1, 2.0), point(8, 1.5), point(64, 0.9)], AXES, "batch_size")
    assert (found.starts, found.before, found.after) == (False, 8, 64) and 8 < found.at < 64


def test_a_crossover_into_a_tie_has_no_place_of_its_own():
    (found,) = sweep.crossovers([point(1, 1.2), point(8, 1.005)], AXES, "batch_size")
    assert (found.starts, found.at) == (False, None)


def test_no_crossover():
    assert sweep.crossovers([point(1, 2.0), point(8, 3.0)], AXES, "batch_size") == []
    assert sweep.crossovers([point(1, 0.5)], AXES, "batch_size") == []


@pytest.mark.parametrize(
    "reason, refused",
    [
        ("ValueError: batches up to 1000", True),
        ("RuntimeError: kernel 7 is larger than the image", True),
        ("NotImplementedError: dilation", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("crashed (SIGSEGV)", False),
        ("no answer within the time limit of 300 s", False),
        ("out of memory: CUDA out of memory", False),
        ("AttributeError: 'ModelNew' object has no attribute 'conv'", False),
    ],
)
def test_a_refusal_is_an_exception_on_purpose(reason, refused):
    assert sweep.is_refusal({"verdict": "error", "reason": reason}) is refused
    assert not sweep.is_refusal({"verdict": "fail", "reason": reason})
