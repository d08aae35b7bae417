"""A reply of the wrong form is noticed, whatever the driver would have done with it."""

import math

import pytest

from playground.worker.replies import FORMS, malformed

RUN = {"peak_mib": 1.5, "complaints": {"inputs unchanged": "changes input 0"}, "refused": None, "form": "tensor"}
RUN |= {"handed_memory": None}


def test_replies_of_the_right_form():
    assert malformed("candidate.run", RUN) is None
    assert malformed("candidate.run", RUN | {"peak_mib": None, "complaints": {}, "more": 1}) is None
    assert malformed("referee.load", {}) is None, "no judged file runs there"


@pytest.mark.parametrize("key", list(RUN))
def test_a_key_that_is_missing(key):
    assert malformed("candidate.run", {k: v for k, v in RUN.items() if k != key}) == f"its reply to candidate.run lacks {key!r}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_mib": "much"},
        {"peak_mib": -1},
        {"peak_mib": 10**400},
        {"peak_mib": math.inf},
        {"complaints": []},
        {"complaints": {"a": 1}},
        {"refused": 0},
        {"complaints": None},
    ],
)
def test_a_value_of_another_type(wrong):
    (key,) = wrong
    assert f"has {key!r} =" in malformed("candidate.run", RUN | wrong)


def test_a_list_of_another_type():
    reply = {"builds": [], "opened": [], "means_to_build": False, "triton": False, "own_calls": 0, "spoiled": False}
    reply |= {"kernels": [{"name": "f", "calls": 1, "microseconds": 2}], "own_share": None}
    assert malformed("candidate.work", reply) is None
    assert malformed("candidate.work", reply | {"builds": [1]})
    assert malformed("candidate.work", reply | {"kernels": [{"name": "f"}]})
    assert malformed("candidate.work", reply | {"kernels": None})
    assert set(reply) == set(FORMS["candidate.work"])
