"""What compare.py says about probes, behaviour and work."""

from dataclasses import replace

from made import own_work

from playground.record import UNCHECKED, Check, Entry, Probe
from playground.report import facts
from playground.serial import load
from playground.subject import Examination

RIGHT = {"max_error": 1e-6, "allowed": 1e-5, "eager_error": 1e-6, "complaint": None, "note": None}
IDLE = dict.fromkeys(RIGHT) | {"note": "not run: the model's file has no constants for it"}
REFUSED = dict.fromkeys(RIGHT) | {"note": "refuses: ValueError: expected 4 samples"}
WRONG = RIGHT | {"complaint": "on a ramp: the output is off", "max_error": 1.0}
CHECK = {
    "probes": {"own": RIGHT, "odd sizes": IDLE, "batch 1": REFUSED, "ramp": WRONG, "nan": RIGHT | {"note": "finite in 1"}},
    "behaviour": {
        "inputs unchanged": {"complaint": None, "note": None},
        "torch.compile": {"complaint": None, "note": "raises Unsupported: graph break"},
        "a side stream": {"complaint": None, "note": "not run: only CUDA has streams"},
    },
    "work": own_work(own_calls=2, own_share=0.973, kernels=[{"name": "f", "calls": 2, "microseconds": 12.34}]),
}
CHECK = load(Check, {"max_error": None, "allowed": None, "eager_error": None, "gradients": None} | CHECK)


def test_a_few_lines():
    assert list(facts.of_check(CHECK)) == [
        ("probes", "2 right; wrong: ramp; not run: odd sizes; raises (allowed): batch 1"),
        ("note", "nan: finite in 1"),
        ("behaviour", "1 right; not run: a side stream; raises (allowed): torch.compile"),
        (
            "work",
            "2 calls of its own code in a forward pass, and the result depends on it; its kernels take 97.3% of the GPU's time",
        ),
    ]


def test_what_was_refused():
    assert facts.refused(CHECK) == ["batch 1", "torch.compile"]
    noted = Entry(note="bits differ, as the original's do")
    check = replace(UNCHECKED, probes={"own": load(Probe, RIGHT)}, behaviour={"run to run": noted})
    assert facts.refused(check) == facts.refused(UNCHECKED) == []


def test_explained():
    probes, behaviour, kernels = (rows for _, rows in facts.tables(CHECK))
    probes = {row[0]: row[1:] for row in probes}
    assert probes["own"] == ("ok", "1.00e-6", "1.00e-6", "1.00e-5", "on the first inputs that the problem draws")
    assert probes["odd sizes"][0] == "-" and probes["odd sizes"][-1].startswith("not run")
    assert probes["ramp"][0] == "fail" and probes["ramp"][-1] == "on a ramp: the output is off"
    assert [row[1] for row in behaviour] == ["ok", "-", "-"]
    assert kernels == [("2", "12.3", "f")]
    assert list(facts.tables(UNCHECKED)) == []


SILENT = Examination(
    **{
        "findings": [],
        "problem": None,
        "notes": ["synccheck: Warning: Detected overflow"],
        "passes": ["forward", "backward"],
        "kernels": ["fused_tail", "tail_grad"],
        "tools": {"memcheck": {"findings": 0, "of_other_kernels": 0}, "initcheck": {"findings": 0, "of_other_kernels": 12}},
    }
)


def test_the_sanitizer():
    found = dict(facts.sanitizer(SILENT))
    assert "no mistakes in fused_tail, tail_grad" in found["sanitizer"] and "synccheck" in found["note"]
    one = replace(SILENT, findings=["v.py:3: a race"], notes=[])
    assert "1 mistake in" in dict(facts.sanitizer(one))["sanitizer"]
    blind = replace(SILENT, problem="memcheck did not end within the time limit", notes=[])
    assert list(facts.sanitizer(blind)) == [("sanitizer", "memcheck did not end within the time limit")]
    assert list(facts.sanitizer(None)) == []
