"""What follows from the complaints about a variant: two standards, one verdict, and every caveat."""

import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from playground import untrusted
from playground.judge.checks import DROP_IN, FORWARD
from playground.judge.evaluation import Evaluation
from playground.judge.failure import JUDGE_BROKE
from playground.judge.verdict import UNJUDGED, Complaint, conclude, ended, permitted_to, with_shapes
from playground.record import Accuracy, compose
from playground.report import figures
from playground.subject import Subject
from playground.worker import WorkerFailure
from playground.worker.replies import Loaded, TriedOut

LOADED = Loaded(precision=None, weights="by name", difference=None)


SUBJECT = Subject(model="m", variant="mine", backend="cpu", ran_on="cpu", source_sha256=None, build_seconds=None, built=False)


def concluded(*complaints):
    return conclude(UNJUDGED, complaints)


def by_standard(judgment):
    return {"forward": judgment.standards.forward.verdict, "drop_in": judgment.standards.drop_in.verdict}


def result_of(verdict, accuracy=None, **known):
    """A result with a verdict; `accuracy` are its fields."""
    found = accuracy and Accuracy(error=None, limit=None, **accuracy)
    return replace(compose(SUBJECT, UNJUDGED), verdict=verdict, accuracy=found, **known)


DROP_IN_ALONE, FATAL = Complaint("sizes", "at odd sizes: wrong", DROP_IN, 7), Complaint("remembers", "an old result", FORWARD)
UNDECIDED = [
    Complaint("not-judged", f"{what} cannot be judged", costs) for what, costs in (("a gradient", None), ("it", FORWARD))
]


@pytest.mark.parametrize(
    "complaints, verdict, reasons, forward, drop_in",
    [
        ([], "pass", [], "pass", "pass"),
        ([DROP_IN_ALONE], "forward only", ["at odd sizes: wrong"], "pass", "fail"),
        ([DROP_IN_ALONE, FATAL], "fail", ["an old result", "at odd sizes: wrong"], "fail", "fail"),
        (UNDECIDED[:1], "pass", [], "pass", "pass"),
        (UNDECIDED[1:], "error", ["it cannot be judged"], "error", "error"),  # a copy of the original is never a fail
    ],
)
def test_what_a_complaint_costs(complaints, verdict, reasons, forward, drop_in):
    result = concluded(*complaints)
    assert (result.verdict, result.reason) == (verdict, reasons[0] if reasons else None)
    assert by_standard(result) == {"forward": forward, "drop_in": drop_in}
    assert result.standards.drop_in.reasons == reasons
    assert list(map(asdict, result.caveats)) == [asdict(each) for each in complaints if each.costs != FORWARD], "none is hidden"


def test_a_caveat_names_the_line_of_the_file():
    result = compose(SUBJECT, concluded(DROP_IN_ALONE))
    assert figures.why_not_pass(result) == ["sizes: mine.py:7: at odd sizes: wrong"]


def test_a_wrong_gradient_is_the_first_of_the_caveats():
    tags = ("sizes", "default-stream", "wrong-gradient", "nan")
    result = concluded(*(Complaint(tag, f"about {tag}", DROP_IN) for tag in tags))
    assert [caveat.tag for caveat in result.caveats] == ["wrong-gradient", "sizes", "default-stream", "nan"]
    assert result.reason == "about wrong-gradient"


def test_one_caveat_stands_for_all_of_its_kind():
    result = concluded(*(Complaint("values", f"on {what}", DROP_IN) for what in ("a ramp", "small inputs", "large inputs")))
    assert [caveat.text for caveat in result.caveats] == ["on a ramp (and in 2 more checks)"]


def test_a_time_limit_names_the_constants_of_a_smaller_size():
    late = WorkerFailure("in block 1 of 4096: make it smaller with --set, or raise --time-limit", role="candidate")
    told = with_shapes(late, SimpleNamespace(smaller={"N": 64, "M": 8}))
    assert str(told) == "in block 1 of 4096: make it smaller with --set N=64 M=8, or raise --time-limit"
    assert told.role == "candidate" and with_shapes(late, SimpleNamespace(smaller={})) is late


def test_what_ends_everything_is_said_under_both_standards():
    assert by_standard(ended(concluded(), "error", "does not compile")) == {"forward": "error", "drop_in": "error"}


def test_what_is_permitted_beyond_the_limit():
    assert permitted_to(result_of("pass", {"kind": "as PyTorch"})) is None
    assert permitted_to(result_of("pass", {"kind": "float32"})) == "float32"
    assert permitted_to(result_of("pass", {"kind": "fp16", "accepted": 1e-3})) == 1e-3
    assert permitted_to(result_of("pass", {"kind": "fp16"}, variant_precision="fp16")) == "fp16"


def test_the_label_beside_a_speed_up():
    def label(verdict, **more):
        return figures.label(result_of(verdict, **more))

    assert label("pass") == ""
    assert label("forward only") == "forward only"
    assert label("forward only", variant_precision="fp16") == "fp16, forward only"
    assert label("forward only", accuracy={"kind": "fp16", "accepted": 1e-3}) == "accurate to 0.001, forward only"


def test_which_results_meet_what_was_asked():
    assert figures.meets(result_of("pass", standard="drop-in"))
    assert figures.meets(result_of("forward only", standard="forward"))
    assert not figures.meets(result_of("forward only", standard="drop-in"))
    assert not figures.meets(result_of("forward only")), "a record of an earlier version knows drop-in alone"
    assert not figures.meets(result_of("fail", standard="forward"))


NOWHERE = SimpleNamespace(file=lambda name: untrusted.File(Path("nowhere", name), Path("nowhere", name)))


@pytest.mark.parametrize("reason, is_a_caveat", [("KeyError: 'x'", True), (f"{JUDGE_BROKE}KeyError: 'x'", False)])
def test_what_breaks_in_the_judge_is_no_caveat(reason, is_a_caveat):
    worker = SimpleNamespace(pid=0)
    truth = SimpleNamespace(answers=lambda worker: NOWHERE)
    case = Evaluation(worker, truth, "cpu", LOADED, file=None, renew=lambda: "another", accept=None)

    def breaks():
        raise WorkerFailure(reason)

    with contextlib.nullcontext() if is_a_caveat else pytest.raises(WorkerFailure, match="internal error"):
        assert not case._survive("values", "on a ramp", breaks)
    assert bool(case.complaints) == is_a_caveat


@pytest.fixture
def tried_in_a_graph():
    """tried_in_a_graph(note, stale, *tags): the Evaluation after a graph's trial, and the worker that is asked then."""

    def run(note, stale, *tags, unjudged=False):
        done = TriedOut(of="second" if stale else None, complaint=None, note=note)
        worker = SimpleNamespace(pid=0, ask=lambda *_, **__: done)
        truth = SimpleNamespace(
            answers=lambda worker: NOWHERE,
            side_effects=[],
            inputs=lambda probe: "",
            compare=lambda what, probe, *_, **__: {"complaint": "off" if probe == "ramp" else None, "unjudged": unjudged},
        )
        case = Evaluation(worker, truth, "cuda", LOADED, file=None, renew=lambda: "another", accept=None)
        case.complaints = [Complaint(tag, "seen", "drop-in") for tag in tags]
        case._try_out("a CUDA graph", {"first": "normal", "second": "ramp"})
        return [each.tag for each in case.complaints if each.text != "seen"], case.worker is not worker

    return run


def test_a_stale_replay_remembers_unless_no_graph_can_hold_its_launches(tried_in_a_graph):
    assert tried_in_a_graph(None, True) == (["remembers"], False)
    assert tried_in_a_graph(None, True, "default-stream") == ([], False), "that caveat says it already"


def test_what_nobody_can_judge_is_no_fault_of_a_graph(tried_in_a_graph):
    assert tried_in_a_graph(None, True, unjudged=True) == (["not-judged"], False)


def test_a_process_in_which_a_capture_failed_is_not_timed(tried_in_a_graph):
    """torch's generator draws other numbers there: a right variant was wrong on the content of a timed call."""
    assert tried_in_a_graph("raises AcceleratorError: operation failed during capture", False) == ([], True)
    assert tried_in_a_graph("not run: only CUDA has graphs", False) == ([], False)
