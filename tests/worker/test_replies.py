"""A reply of the wrong form is noticed, whatever the driver would have done with it."""

import math

import pytest

from playground.record import OwnWork
from playground.serial import DocumentError
from playground.worker.replies import Ran, read

RUN = {"peak_mib": 1.5, "complaints": {"inputs unchanged": "changes input 0"}, "refused": None, "form": "tensor"}
RUN |= {"handed_memory": None}


def test_replies_of_the_right_form():
    assert read("candidate.run", RUN) == Ran(**RUN)
    assert read("candidate.run", RUN | {"peak_mib": None, "complaints": {}, "more": 1}).peak_mib is None
    assert read("referee.load", {"any": 1}) == {"any": 1}, "no judged file runs there"


@pytest.mark.parametrize("key", list(RUN))
def test_a_key_that_is_missing(key):
    with pytest.raises(DocumentError, match=f"its reply to candidate.run: '{key}' is missing"):
        read("candidate.run", {k: v for k, v in RUN.items() if k != key})


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_mib": "much"},
        {"peak_mib": -1},
        {"peak_mib": 10**400},
        {"peak_mib": math.inf},
        {"peak_mib": math.nan},
        {"complaints": []},
        {"complaints": {"a": 1}},
        {"refused": 0},
        {"complaints": None},
    ],
)
def test_a_value_of_another_type(wrong):
    (key,) = wrong
    with pytest.raises(DocumentError, match=f"its reply to candidate.run.{key}.*: expected"):
        read("candidate.run", RUN | wrong)


def test_a_list_of_another_type():
    reply = {"builds": [], "opened": [], "means_to_build": False, "triton": False, "own_calls": 0, "spoiled": False}
    reply |= {"kernels": [{"name": "f", "calls": 1, "microseconds": 2}], "own_share": None}
    assert isinstance(read("candidate.work", reply), OwnWork)
    for wrong in ({"builds": [1]}, {"kernels": [{"name": "f"}]}, {"kernels": None}):
        with pytest.raises(DocumentError):
            read("candidate.work", reply | wrong)


@pytest.mark.parametrize(
    "samples, is_right", [([1.0, math.nan, math.inf, 2], True), (["1"], False), ([True], False), (1.0, False)]
)
def test_times_may_be_no_numbers_but_have_their_type(samples, is_right):
    reply = {"samples_ms": samples, "late": [False], "flush_ms": [], "launch_ms": []}
    if is_right:
        return read("candidate.time", reply)
    with pytest.raises(DocumentError, match="samples_ms"):
        read("candidate.time", reply)
