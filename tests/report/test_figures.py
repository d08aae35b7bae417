import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import make_passed, read_result

from playground.record import UNCHECKED, Check
from playground.report import figures
from playground.report import text as written
from playground.serial import dump, load

positive = st.floats(min_value=1e-300, max_value=1e300)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.142, "0.142"), (11.3, "11.3"), (206, "206"), (7, "7.00"), (9.996, "10.0"), (99.96, "100"), (0.9996, "1.00")],
        *[(12345, "12300"), (999_499, "999000"), (999_500, "1.00e6"), (1.2e-5, "1.20e-5"), (0.000123, "0.000123"), (0, "0")],
        *[(None, "-"), (math.nan, "-"), (math.inf, "-")],
    ],
)
def test_significant(value, text):
    assert written.significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.1e-5, "1.10e-5"), (0.5, "5.00e-1"), (18.24, "18.2"), (206.3, "206"), (0.0, "0"), (None, "-"), (math.nan, "-")],
)
def test_scientific(value, text):
    assert written.scientific(value) == text


@given(positive)
def test_numbers_have_three_significant_digits_and_the_right_value(value):
    for text in (written.significant(value), written.scientific(value)):
        assert abs(float(text) - value) <= 0.00501 * value
        digits = re.sub(r"e.*|\.", "", text).lstrip("0")
        assert len(digits) == 3 or (float(text) >= 1000 and set(digits[3:]) == {"0"})
        assert len(text) <= 9


@given(st.text())
def test_one_line_is_one_printable_line(text):
    line = written.one_line(text)
    assert line.isprintable()
    assert written.one_line(line) == line


def test_gradient_verdict():
    fine = {"max_error": 1.0, "allowed": 1.0, "eager_error": 1.0, "complaint": None}
    wrong, not_a_number = fine | {"complaint": "off by 1.1"}, fine | {"max_error": None}
    for gradients, verdict in [
        (None, "-"),
        ({}, "none"),
        ({"unsupported": "no backward"}, "none"),
        ({"unsupported": fine}, "ok"),  # a parameter of that name
        ({"a": fine, "b": fine}, "ok"),
        ({"a": fine, "b": wrong}, "fail"),
        ({"a": not_a_number}, "fail"),
    ]:
        assert figures.gradient_verdict(load(Check, {**dump(UNCHECKED), "gradients": gradients})) == verdict


def test_constants_of_a_model_are_read_without_running_it(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nbatch_size = 128\nheight, width = 384, 192\nkernel_size = (3, 3, 3)\ndivisor = -2.0\n"
        "bias_shape = (out, 1)\nraise SystemExit('run')\ndef f():\n    inner = 1\n"
    )
    expected = {"batch_size": 128, "height": 384, "width": 192, "kernel_size": (3, 3, 3), "divisor": -2.0}
    assert figures.model_constants(model) == expected
    model.write_text("def broken(:")
    assert figures.model_constants(model) == {}
    assert figures.model_constants(tmp_path / "absent.py") == {}


def test_size_note(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "pool.py").write_text("batch_size = 128\npool = (2, 2)\n")

    def note(settings, model="pool"):
        made = make_passed(model, "v1") | {"shape": {"inputs": [], "settings": settings}}
        return figures.size_note(read_result(made), tmp_path)

    assert note({"batch_size": 4}) == "batch 4 instead of 128"
    assert note({"batch_size": 4, "pool": [3, 3]}) == "batch 4 instead of 128, pool [3, 3] instead of [2, 2]"
    assert note({"batch_size": 128, "pool": [2, 2]}) == ""
    assert note({}) == ""
    assert note({"batch_size": 4}, model="elsewhere") == "batch 4"


@pytest.mark.parametrize(
    ("verdict", "ratio", "note"),
    [("tie", 1.18, ["no difference, since 1.18x is anything from 0.944x to 1.42x"]), ("tie", 1.005, []), ("win", 1.18, [])],
)
def test_a_tie_that_does_not_look_like_one(verdict, ratio, note):
    outcome = {"verdict": verdict, "against": "eager", "ratio": ratio, "low": 0.8 * ratio, "high": 1.2 * ratio}
    result = read_result(make_passed("m", "v1") | {"outcome": outcome, "control": None, "training": None})
    assert list(figures.timing_notes(result, brief=True)) == note
    assert list(figures.timing_notes(result)) == [], "who sees the intervals need not be told"
