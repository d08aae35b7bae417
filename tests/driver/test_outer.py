"""What follows from the outer clock's rounds, and how it bounds what the inner one claims."""

import contextlib
import sys
import time
import types

import psutil
import pytest
import torch

from playground.driver import outer
from playground.judge.tolerance import Reference
from playground.record import Interval, Outer, Timing
from playground.serial import dump, load
from playground.stopwatch.outer import Unshareable
from playground.worker import WorkerFailure, WorkerProcess
from playground.worker.outer_referee import Drawn

CHANGING_OVER = 0.3  # milliseconds that every call takes besides
RESOLUTION = outer.RESOLUTION_MS["cuda"]


def rounds(variant, eager, count=12, control=None):
    """The rounds of calls that take so long, each 1% longer than the one before it."""
    sides = {outer.VARIANT: variant, outer.EAGER: eager, outer.CONTROL: control or eager, outer.NULL: 0.0}
    slower = [1 + 0.01 * (i % 3) for i in range(count)]
    return {name: [[CHANGING_OVER + took * each] * 3 for each in slower] for name, took in sides.items()}


def conclude(given):
    return dump(outer.conclude(given, RESOLUTION))


def outer_of(seen):
    known = dict.fromkeys(("ratio", "low", "high", "ms", "eager_ms", "null_ms", "control", "rounds"), 1)
    return load(Outer, known | seen)


def bounded(timing, seen, allowed=None):
    """The timing as JSON after outer.bounded, at CUDA's resolution."""
    return dump(outer.bounded(load(Timing, timing), outer_of(seen), "cuda", allowed and Interval(**allowed)))


def withheld(timing, *reasons):
    return dump(outer.withheld(load(Timing, timing), *reasons))


def test_what_changing_over_takes_is_no_part_of_a_call():
    found = conclude(rounds(variant=0.5, eager=5.0))
    assert found["ratio"] == pytest.approx(10) and found["ms"] == pytest.approx(0.505)
    assert found["low"] <= 10 < found["high"] < 11
    assert found["null_ms"] == pytest.approx(CHANGING_OVER) and found["control"] == pytest.approx(1)


def test_a_call_below_the_resolution_counts_as_that_long():
    found = conclude(rounds(variant=0.2 * RESOLUTION, eager=1.0))
    assert found["ratio"] == pytest.approx(1.01 / RESOLUTION) and found["high"] == pytest.approx(1.02 / RESOLUTION)


def test_what_slows_a_whole_round_cancels():
    slower = [1, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]
    sides = {outer.VARIANT: 0.5, outer.EAGER: 1.5, outer.CONTROL: 1.5, outer.NULL: 0.0}
    found = conclude({name: [[CHANGING_OVER * each + took] for each in slower] for name, took in sides.items()})
    assert found["low"] == pytest.approx(3) and found["high"] == pytest.approx(1.5 / (0.5 - RESOLUTION))


def test_a_call_that_is_lost_in_the_noise_claims_nothing():
    noise = [-0.02, 0.01, -0.03, 0.02, -0.01, -0.02, 0.01, -0.02]
    sides = {outer.VARIANT: noise, outer.EAGER: [each - 0.001 for each in noise], outer.NULL: [0.0] * len(noise)}
    found = conclude({name: [[CHANGING_OVER + each] for each in took] for name, took in sides.items()})
    assert found["ratio"] == found["low"] == found["eager_ms"] == found["ms"] == 0
    claimed = timings(280.0)
    claimed = bounded(claimed, found)
    assert claimed["speedup"] == {} and claimed["outcome"]["verdict"] == "not measured"


def test_an_eager_call_near_the_resolution_is_no_loss_of_whoever_is_faster():
    found = conclude(rounds(variant=0.3 * RESOLUTION, eager=0.9 * RESOLUTION))
    claimed, slow = timings(3.0), timings(0.5)
    claimed = bounded(claimed, found)
    told = "eager PyTorch's call takes 0.0091 ms, too short for the outer clock, which counts 0.01 ms as the least"
    assert claimed["outcome"]["reason"] == told
    slow = bounded(slow, found)
    assert slow["outcome"]["verdict"] == "loss" and slow["speedup"]["eager"]["ratio"] == 0.5


def test_rounds_without_a_usable_call_do_not_count():
    given = rounds(variant=0.5, eager=5.0, count=9)
    for index in range(3):
        given[outer.VARIANT][index] = []
    assert conclude(given)["rounds"] == 6
    given[outer.VARIANT][3] = []
    with pytest.raises(WorkerFailure, match="only 5 of"):
        conclude(given)


def timings(ratio, verdict="win"):
    over = {"ratio": ratio, "low": 0.95 * ratio, "high": 1.05 * ratio}
    return {
        "speedup": {"eager": dict(over), "compile": {name: value / 2 for name, value in over.items()}},
        "outcome": {
            "verdict": verdict,
            "against": "compile",
            "precise": False,
            **{name: value / 2 for name, value in over.items()},
        },
        "time_ms": {"median": 1.0, "p20": 0.9, "p80": 1.1},
        "peak_mib": None,
        "notes": [],
    }


SEEN = {"ratio": 1.0, "low": 0.95, "high": 1.1, "eager_ms": 1.0, "ms": 1.0}


def test_a_claim_beyond_the_outer_interval_gives_way_to_it_for_every_baseline():
    forged = timings(280.0)
    forged = bounded(forged, SEEN)
    assert forged["speedup"]["eager"] == pytest.approx({key: SEEN[key] for key in ("ratio", "low", "high")})
    assert forged["speedup"]["compile"]["ratio"] == forged["outcome"]["ratio"] == pytest.approx(0.5)
    assert forged["time_ms"]["median"] == pytest.approx(280)
    assert forged["outcome"]["verdict"] == "loss" and "1x as fast as eager PyTorch, 1.1x at most" in forged["notes"][0]


def test_a_claim_within_it_is_no_surer_than_both_clocks():
    claimed = timings(3.0)
    claimed = bounded(claimed, {"ratio": 2.9, "low": 2.5, "high": 3.01, "eager_ms": 1.0})
    assert claimed["speedup"]["eager"] == pytest.approx({"ratio": 3.0, "low": 2.5, "high": 3.15})
    assert claimed["speedup"]["compile"]["low"] == pytest.approx(1.25) and not claimed["notes"]
    wide = timings(6.0)
    wide = bounded(wide, {"ratio": 3.0, "low": 2.8, "high": 12.0, "eager_ms": 1.0})
    assert wide["speedup"]["eager"] == pytest.approx({"ratio": 1.05 * 3.0, "low": 2.8, "high": 6.3})
    lucky = timings(280.0)
    lucky = bounded(lucky, {"ratio": 1.05, "low": 1.04, "high": 1.06, "eager_ms": 1.0}, {"low": 0.93, "high": 1.07})
    assert lucky["speedup"]["eager"] == pytest.approx({"ratio": 1.05, "low": 1.04 / 1.07, "high": 1.06 / 0.93})
    sure = timings(3.0)
    sure = bounded(sure, {"ratio": 2.99, "low": 2.98, "high": 3.01, "eager_ms": 1.0})
    assert sure["outcome"]["ratio"] == 1.5 and sure["speedup"] == timings(3.0)["speedup"] and not sure["notes"]


def test_what_was_not_measured_stays_so():
    unknown = timings(280.0)
    unknown["outcome"] |= {"verdict": "not measured", "reason": "noise", "ratio": None, "low": None, "high": None}
    unknown = bounded(unknown, SEEN)
    assert unknown["outcome"]["verdict"] == "not measured" and unknown["outcome"]["ratio"] is None


def test_without_an_outer_clock_nothing_is_claimed():
    forged = timings(280.0)
    forged = withheld(forged, "not timed by the outer clock: inputs of torch.qint8")
    assert forged["speedup"] == {} and forged["outcome"]["ratio"] is None
    assert forged["outcome"]["verdict"] == "not measured" and forged["outcome"]["reason"].endswith("inputs of torch.qint8")
    assert forged["time_ms"] is None
    forged = timings(280.0)
    forged = withheld(forged, "too noisy", outer_of({"ms": 280.0}), "cuda")
    assert forged["time_ms"] == dict.fromkeys(("median", "p20", "p80"), 280.0)


def test_an_interval_with_room_for_anything_is_withheld():
    claimed = timings(1.9)
    claimed = bounded(claimed, {"ratio": 1.8, "low": 1.0, "high": 2.5, "eager_ms": 1.0, "ms": 1.0})
    assert claimed["outcome"]["verdict"] == "not measured" and claimed["speedup"] == {}
    assert claimed["time_ms"]["median"] == pytest.approx(1.9 / (1.05 * 1.8))  # which both clocks have seen
    assert claimed["outcome"]["reason"].startswith("too noisy: anything from 0.5")


@pytest.mark.parametrize("said", [{}, {"pid": 1}, {"pid": True, "address": 4096}, {"pid": 1, "address": 1 << 70}])
def test_a_process_that_does_not_say_where_its_inputs_are(said):
    player = types.SimpleNamespace(ask=lambda what, **arguments: said)
    with pytest.raises(WorkerFailure, match="does not say where its inputs are"):
        outer._OnCpu(None, None).join(player, {})


@pytest.mark.parametrize(("factor", "is_right"), [(1 + 1e-6, True), (0.0, False), (0.5, False)])
def test_a_reference_of_zeros_leaves_the_scale_to_the_call_s_own_result(factor, is_right):
    """As behind a relu, whose outputs on the check's inputs were all zero."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    problem = types.SimpleNamespace(get_inputs=lambda: [torch.ones(5, 4)])
    zeros = Reference(torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, 3))
    model[0].bias.data.fill_(2.0)
    drawn = Drawn(problem, model, "forward", torch.device("cpu"), {"output 0": zeros}, lambda *_: SUSPECTED)
    with torch.no_grad():
        result = factor * model(torch.ones(5, 4))
    assert drawn.complaint([result]) == (None if is_right else SUSPECTED)


SUSPECTED = "the whole check is asked"


def drawn_of(forward, get_inputs, step="forward"):
    """Drawn of a model with this forward, without references."""
    model = torch.nn.Module()
    model.forward = forward
    device, problem = torch.device("cpu"), types.SimpleNamespace(get_inputs=get_inputs)
    return Drawn(problem, model, step, device, {}, lambda *_: SUSPECTED)


def test_a_gradient_of_few_elements_that_are_not_zero_is_not_zero():
    drawn = drawn_of(lambda x: x.amax(1), lambda: [torch.randn(64, 4096)], "weights_and_input")
    output, gradient = drawn._computed()
    drawn._references["input0"] = Reference(gradient.double(), gradient)
    near_ties = gradient.clone()
    near_ties[:4] = near_ties[:4].roll(1, 1)
    assert not drawn._differ([output, gradient], [output, gradient])
    assert not drawn._differ([output, near_ties], [output, gradient])
    assert drawn._differ([output, torch.zeros_like(gradient)], [output, gradient])
    gradient[1:] = 0  # a single element is left: as few as may always be moved
    assert drawn._differ([output, torch.zeros_like(gradient)], [output, gradient])


def test_an_output_that_rounding_may_turn_round_is_looked_at_as_a_whole():
    """Where a sign is a near tie, the largest error that is allowed is larger than any."""
    drawn = drawn_of(torch.sign, lambda: [torch.randn(64, 4096)])
    (right,) = drawn._computed()
    turned, kept = right.clone(), torch.sign(torch.randn(64, 4096))
    turned[0, :6] *= -1
    drawn._references["output 0"] = Reference(right.double(), turned)
    assert drawn.complaint([turned]) is None
    drawn._references["output 0"] = Reference(right.double(), right)  # which has met no near tie
    few = torch.where(torch.arange(right.numel()).view_as(right) < 5, -right, right)
    drawn._elements, drawn._near_ties = right.numel(), 0
    assert drawn._differ([turned], [right]) and not drawn._differ([few], [right])
    assert drawn._differ([few], [right])  # as many again, of no more elements
    drawn._references["output 0"] = Reference(right.double(), turned)
    drawn.pack(torch.zeros(drawn.layout.bytes, dtype=torch.uint8))
    assert drawn.complaint([kept]) == SUSPECTED


def test_a_result_that_changes_or_cannot_be_told_from_another():
    drawn = drawn_of(torch.sign, lambda: [torch.rand(8, 8) + 1])
    (right,) = drawn._computed()
    drawn._references["output 0"] = Reference(right.double(), right)
    pick = torch.tensor([3, 9])
    assert drawn.complaint([right], [(torch.zeros(2), pick)]) == "a result is another one once it was taken"
    assert drawn.complaint([right], [(right.take(pick), pick)]) is None
    drawn.pack(torch.zeros(drawn.layout.bytes, dtype=torch.uint8))
    with pytest.raises(Unshareable, match="cannot be told from that of other inputs"):
        drawn.complaint([right])


def test_a_gradient_that_is_zero_in_mathematics_is_not_looked_at_as_a_whole():
    """It is rounding alone, and another one in each call."""
    drawn = drawn_of(lambda x: (x - x.mean()).sum(), lambda: [torch.randn(64, 64)], "weights_and_input")
    output, gradient = drawn._computed()
    noise = [1e-7 * torch.randn_like(gradient) for _ in range(3)]
    drawn._references["input0"] = Reference(torch.zeros_like(gradient, dtype=torch.float64), *noise[:2])
    assert drawn._references["input0"].is_zero
    assert not drawn._differ([output, noise[1]], [output, noise[2]])


def test_the_whole_check_is_asked_about_a_few_calls():
    drawn = drawn_of(torch.tanh, lambda: [torch.randn(64, 64)])
    (right,) = drawn._computed()
    drawn._references["output 0"] = Reference(right.double(), right)
    for _ in range(8):
        assert drawn.complaint([right + 1]) == SUSPECTED
        drawn.pack(torch.zeros(drawn.layout.bytes, dtype=torch.uint8))
    with pytest.raises(Unshareable, match="too many"):
        drawn.complaint([right + 1])


OF_THE_FILE = torch.ones(3)


class Keeps(torch.nn.Module):
    """Gives a constant, its own parameter or a new tensor, beside its result."""

    def __init__(self, constant):
        super().__init__()
        self.kept = torch.nn.Parameter(torch.ones(3))
        self.constant = constant

    def forward(self, x):
        return 2 * x, self.constant(self)


@pytest.mark.parametrize(
    "constant, spoils",
    [
        (lambda model: torch.ones(3), True),
        (lambda model: OF_THE_FILE, False),
        (lambda model: model.kept, False),
        (lambda model: model.kept.t(), False),
    ],
)
def test_results_are_overwritten_where_the_original_gives_them_away(constant, spoils):
    problem = types.SimpleNamespace(get_inputs=lambda: [torch.randn(8, 8)])
    model = Keeps(constant)
    drawn = Drawn(problem, model, "forward", torch.device("cpu"), {}, lambda *_: SUSPECTED)
    assert drawn._may_spoil == spoils and torch.equal(model.kept, OF_THE_FILE) and OF_THE_FILE.sum() == 3
    right = drawn._computed()
    drawn._references = {f"output {i}": Reference(value.double(), value.detach()) for i, value in enumerate(right)}
    for _ in range(4):
        assert drawn.complaint(right) is None
        drawn.pack(torch.zeros(drawn.layout.bytes, dtype=torch.uint8))
        right = drawn._computed()
    assert drawn.spoils == spoils
    kept = [right[0] * (1 + 1e-7), torch.full((3,), torch.nan)]
    if spoils:
        with pytest.raises(Unshareable, match="overwritten"):
            drawn.complaint(kept)
    else:
        assert drawn.complaint(kept) == SUSPECTED


def test_results_have_the_original_types_and_an_element_memory_of_its_own():
    drawn = drawn_of(lambda x: x.unsqueeze(1).repeat(1, 3, 1), lambda: [torch.randn(2, 5)])
    (right,) = drawn._computed()
    drawn.require_form([right])
    for wrong, match in (
        (right[:1], "shapes"),
        (right.half(), "types"),
        (right[:, :1].expand(-1, 3, -1), "share memory"),
    ):
        with pytest.raises(Unshareable, match=match):
            drawn.require_form([wrong])


def test_no_content_is_met_twice():
    contents = [0.0, *range(8), 3.0]  # the first is for the layout
    drawn = drawn_of(lambda x: 2 * x, lambda: [torch.tensor([contents.pop(0), 1.0])])
    block = torch.zeros(drawn.layout.bytes, dtype=torch.uint8)
    for _ in range(8):
        drawn.pack(block)
    with pytest.raises(Unshareable, match="few different contents"):
        drawn.pack(block)


def test_the_sampled_places_are_others_in_each_call():
    """Although the original, the problem and the judge set torch's generator to a number that everybody knows."""

    def forward(x):
        torch.manual_seed(0)
        return 2 * x

    found = []
    for _ in range(2):  # nor does a process's number tell them
        drawn = drawn_of(forward, lambda: [torch.randn(64, 256)])
        for _ in range(3):
            drawn.pack(torch.zeros(drawn.layout.bytes, dtype=torch.uint8))
            drawn._computed()
            found.append(tuple(drawn.picks()[0].tolist()))
    assert len(set(found)) == 6 and all(len(set(each)) > 2000 for each in found)


@contextlib.contextmanager
def goes_on_in_the_turn_of_eager():
    with pytest.raises(WorkerFailure, match=r"its own processes go on while they are to stand still"):
        yield


CHILDS = {  # what happens to a child of the judged file in another's turn -> what comes of it
    "stands still": (lambda child: None, contextlib.nullcontext),
    "goes on": (lambda child: child.resume(), goes_on_in_the_turn_of_eager),
    "works and ends": (lambda child: (child.resume(), time.sleep(0.1), child.kill()), goes_on_in_the_turn_of_eager),
}


@pytest.mark.parametrize("happens", CHILDS)
def test_a_file_whose_child_goes_on_in_anothers_turn_claims_nothing(tiny_problem, tmp_path, happens):
    busy = f"import signal, subprocess\nsubprocess.Popen([{sys.executable!r}, '-c', 'while True: pass'])\n"
    busy += "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # nothing is left of one that ends
    (tmp_path / "solution.py").write_text(busy + tiny_problem.read_text().replace("class Model(", "class ModelNew("))
    original = {"problem": str(tiny_problem), "settings": {}, "place": "cpu", "seed": 0, "weights": None}
    eager, referee = types.SimpleNamespace(name=outer.EAGER, worker=None), types.SimpleNamespace(worker=None)
    does, ends = CHILDS[happens]
    with WorkerProcess("candidate", 60) as judged:
        judged.ask("load", **original, variant=str(tmp_path / "solution.py"))
        (child,) = psutil.Process(judged.pid).children()
        with ends(), outer._turn(eager, judged, referee):
            does(child)
            time.sleep(0.1)
