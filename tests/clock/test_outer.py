"""What follows from the outer clock's turns, how it bounds what the inner one claims, and both of its sides.

A GPU is simulated: the code of both sides is real, gates and memory are this process's own, and a stream does at once what it
is given, so that a call behind a closed gate waits for it.
"""

import contextlib
import itertools
import os
import sys
import threading
import time
import types

import numpy as np
import psutil
import pytest
import torch

from playground.clock import outer
from playground.clock.clocked import Side
from playground.clock.memory import DONE, HEADER, Unshareable, laid_out, placed
from playground.clock.outer import Turn
from playground.clock.referee import Drawn, OnGpu
from playground.clock.workload import Workload
from playground.judge.tolerance import Reference
from playground.record import Interval, Outer, Timing
from playground.serial import dump, load
from playground.tensors import copy_model
from playground.worker import WorkerFailure, WorkerProcess

CHANGING_OVER = 0.3  # milliseconds that every turn takes besides
RESOLUTION = outer.RESOLUTION_MS["cuda"]
CALLS = 32
CPU = torch.device("cpu")


def rounds(variant, eager, count=12, control=None, inner=None):
    """The rounds of turns of CALLS calls that take so long, each up to 2% longer than the one before it."""
    sides = {outer.VARIANT: variant, outer.EAGER: eager, outer.CONTROL: control or eager, outer.NULL: 0.0}
    slower = [1 + 0.01 * (i % 3) for i in range(count)]
    own = sides | {outer.VARIANT: inner or variant}
    return {n: [Turn(CHANGING_OVER + CALLS * t * each, CALLS * own[n] * each) for each in slower] for n, t in sides.items()}


def conclude(given):
    return dump(outer.conclude(given, RESOLUTION, CALLS))


def outer_of(seen):
    known = dict.fromkeys(("ratio", "low", "high", "ms", "eager_ms", "null_ms", "control", "rounds", "calls"), 1)
    return load(Outer, known | seen)


def bounded(timing, seen, allowed=None):
    """The timing as JSON after outer.bounded, at CUDA's resolution, whose own clock says the same of warm calls."""
    seen = {"warm": timing["speedup"]["eager"]} | seen
    return dump(outer.bounded(load(Timing, timing), outer_of(seen), "cuda", allowed and Interval(**allowed)))


def withheld(timing, *reasons):
    return dump(outer.withheld(load(Timing, timing), *reasons))


def test_what_changing_over_takes_is_no_part_of_a_call():
    found = conclude(rounds(variant=0.02, eager=0.2))
    assert found["ratio"] == pytest.approx(10, rel=0.01) and found["ms"] == pytest.approx(0.0202)
    assert found["low"] <= 10 and found["ratio"] < found["high"] < 10.3 and found["calls"] == CALLS
    assert found["null_ms"] == pytest.approx(CHANGING_OVER) and found["control"] == pytest.approx(1)
    assert found["warm"]["ratio"] == pytest.approx(10, rel=0.01)


def test_a_turn_below_the_resolution_counts_as_that_long():
    found = conclude(rounds(variant=0.2 * RESOLUTION / CALLS, eager=1.0))
    assert found["low"] <= found["ratio"] == pytest.approx(CALLS / RESOLUTION, rel=0.02)


def test_equal_work_is_equal_and_proved_is_what_slow_turns_leave():
    """Slow turns of the judged side lower what is proved, those of the trusted one do not raise it."""
    given = rounds(variant=0.1, eager=0.1)
    for name in (outer.VARIANT, outer.EAGER):
        given[name][::3] = [Turn(turn.outer + CALLS * 0.1, turn.inner) for turn in given[name][::3]]
    found = conclude(given)
    assert found["ratio"] == pytest.approx(1, rel=0.02) and found["low"] < 0.7
    given[outer.VARIANT] = rounds(variant=0.1, eager=0.1)[outer.VARIANT]
    given[outer.EAGER][1::3] = given[outer.EAGER][::3]  # two thirds of them are slowed down
    found = conclude(given)
    assert found["ratio"] == pytest.approx(2, rel=0.02) and found["low"] < 1.02


def test_what_a_turn_of_work_that_is_spread_takes_is_in_the_interval():
    luck = np.random.default_rng(1)
    inside = 0
    for _ in range(40):
        given = {
            name: [Turn(0.3 + t * luck.normal(1, 0.03), t) for _ in range(12)]
            for name, t in ((outer.VARIANT, 3.0), (outer.EAGER, 6.0), (outer.NULL, 0.0))
        }
        found = conclude(given)
        inside += found["low"] <= 2 <= found["high"]
    assert inside >= 30


def test_a_call_that_is_lost_in_the_noise_claims_nothing():
    noise = [-0.02, 0.01, -0.03, 0.02, -0.01, -0.02, 0.01, -0.02, 0.0]
    sides = {outer.VARIANT: noise, outer.EAGER: [each - 0.02 for each in noise], outer.NULL: [0.0] * len(noise)}
    found = conclude({name: [Turn(CHANGING_OVER + each, 0.001) for each in took] for name, took in sides.items()})
    assert found["ratio"] == found["low"] == found["eager_ms"] == found["ms"] == 0
    claimed = bounded(timings(280.0), found | {"warm": timings(280.0)["speedup"]["eager"]})
    assert claimed["speedup"] == {} and claimed["outcome"]["verdict"] == "not proved"


def test_turns_that_are_near_the_resolution_are_no_loss_of_whoever_is_faster():
    took = {outer.VARIANT: 0.3 * RESOLUTION, outer.EAGER: 0.9 * RESOLUTION, outer.NULL: 0.0}
    found = conclude({name: [Turn(CHANGING_OVER + each, each) for _ in range(9)] for name, each in took.items()})
    assert found["high"] > 3
    claimed, slow = bounded(timings(3.0), found), bounded(timings(0.5), conclude(rounds(variant=0.1, eager=0.05)))
    assert claimed["outcome"]["verdict"] == "not proved" and slow["outcome"]["verdict"] == "loss"


def test_disturbed_turns_do_not_count():
    given = rounds(variant=0.5, eager=5.0, count=12)
    for index in range(3):
        given[outer.VARIANT][index] = Turn(None, 1.0)
    assert conclude(given)["rounds"] == 9
    given[outer.EAGER][3] = Turn(None, 1.0)
    with pytest.raises(WorkerFailure, match="only 8 of"):
        conclude(given)


def test_what_counts_is_warm_as_the_outer_clock_is():
    claimed = timings(3.0)
    warm = {"ratio": 2.5, "low": 2.4, "high": 2.6}
    found = bounded(claimed, {"ratio": 2.48, "low": 2.45, "high": 2.52, "eager_ms": 1.0, "warm": warm})
    assert found["speedup"]["eager"] == pytest.approx(warm) and found["outcome"]["ratio"] == pytest.approx(1.25)
    assert found["time_ms"]["median"] == 1.0 and not found["notes"]
    forged = bounded(claimed, {"ratio": 1.0, "low": 0.99, "high": 1.01, "eager_ms": 2.5, "ms": 2.5, "warm": warm})
    assert forged["speedup"]["eager"] == pytest.approx({"ratio": 1.0, "low": 0.99, "high": 1.01})
    assert forged["time_ms"]["median"] == pytest.approx(2.5) and "2.5x: the outer clock counts" in forged["notes"][0]


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
    forged = bounded(forged, SEEN | {"ms": 280.0})
    assert forged["speedup"]["eager"] == pytest.approx({key: SEEN[key] for key in ("ratio", "low", "high")})
    assert forged["speedup"]["compile"]["ratio"] == forged["outcome"]["ratio"] == pytest.approx(0.5)
    assert forged["time_ms"]["median"] == pytest.approx(280)
    assert forged["outcome"]["verdict"] == "loss" and "says 1x over eager PyTorch, 1.1x at most" in forged["notes"][0]


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
    assert forged["outcome"]["verdict"] == "not proved" and forged["outcome"]["reason"].endswith("inputs of torch.qint8")
    assert forged["time_ms"] is None
    forged = timings(280.0)
    forged = withheld(forged, "too noisy", outer_of({"ms": 280.0}), "cuda")
    assert forged["time_ms"] == dict.fromkeys(("median", "p20", "p80"), 280.0)


def test_an_interval_with_room_for_anything_is_withheld():
    claimed = timings(1.9)
    claimed = bounded(claimed, {"ratio": 1.8, "low": 1.0, "high": 2.5, "eager_ms": 1.0, "ms": 1.0})
    assert claimed["outcome"]["verdict"] == "not proved" and claimed["speedup"] == {}
    assert claimed["time_ms"]["median"] == 1.0  # which both clocks have seen
    assert claimed["outcome"]["reason"].startswith("too noisy: anything from 0.5")


def drawn_of(forward, get_inputs, step="forward", references=None, calls=1, model=None):
    """Drawn of a model with this forward; the whole check says SUSPECTED of whatever it is asked about."""
    model = model or torch.nn.Module()
    if forward:
        model.forward = forward
    workload = Workload(types.SimpleNamespace(get_inputs=get_inputs), model, step, CPU)
    return Drawn(workload, references or {}, lambda *_: SUSPECTED, calls)


SUSPECTED = "the whole check is asked"


def right_of(drawn):
    """([(Call, inputs)] of a turn of one, PyTorch's results)."""
    made = drawn.draw()
    return made, drawn._right(*made[0])


def refer(drawn, *values):
    drawn._references |= {name: Reference(value.double(), value) for name, value in zip(drawn._names, values, strict=False)}


@pytest.mark.parametrize(("factor", "is_right"), [(1 + 1e-6, True), (0.0, False), (0.5, False)])
def test_a_reference_of_zeros_leaves_the_scale_to_the_call_s_own_result(factor, is_right):
    """As behind a relu, whose outputs on the check's inputs were all zero."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    zeros = Reference(torch.zeros(5, 3, dtype=torch.float64), torch.zeros(5, 3))
    model[0].bias.data.fill_(2.0)
    drawn = drawn_of(None, lambda: [torch.ones(5, 4)], references={"output 0": zeros}, model=model)
    made, (right,) = right_of(drawn)
    assert drawn.complaint(made, [[factor * right.detach()]]) == ((None, True) if is_right else (SUSPECTED, False))


def test_a_gradient_of_few_elements_that_are_not_zero_is_not_zero():
    drawn = drawn_of(lambda x: x.amax(1), lambda: [torch.randn(512, 512)], "weights_and_input")
    _, (output, gradient) = right_of(drawn)
    refer(drawn, output, gradient)
    drawn._references = {"input0": drawn._references["input0"]}
    near_ties, smallest = gradient.clone(), gradient.abs().amax(1).argsort()[:3]  # three large ones are beyond the norm's limit
    near_ties[smallest] = near_ties[smallest].roll(1, 1)
    assert not drawn._differ([output, gradient], [output, gradient])
    assert not drawn._differ([output, near_ties], [output, gradient])
    assert drawn._differ([output, torch.zeros_like(gradient)], [output, gradient])
    quarter = gradient.clone()
    quarter[:128] = 0
    assert drawn._differ([output, quarter], [output, gradient])
    gradient[1:] = 0  # a single element is left
    assert drawn._differ([output, torch.zeros_like(gradient)], [output, gradient])
    assert drawn._differ([output, 1.001 * gradient], [output, gradient])  # as of a sum that is estimated by a sample


def test_a_missing_quarter_of_a_gradient_without_zeros_is_found():
    drawn = drawn_of(lambda x: (x**2).sum(1), lambda: [torch.randn(64, 64)], "weights_and_input")
    _, (output, gradient) = right_of(drawn)
    refer(drawn, output, gradient)
    for rows in range(1, 17):
        missing = gradient.clone()
        missing[:rows] = 0
        assert drawn._differ([output, missing], [output, gradient])


def test_an_output_that_rounding_may_turn_round_is_looked_at_as_a_whole():
    """Where a sign is a near tie, the largest error that is allowed is larger than any."""
    drawn = drawn_of(torch.sign, lambda: [torch.randn(64, 4096)])
    made, (right,) = right_of(drawn)
    turned, kept = right.clone(), torch.sign(torch.randn(64, 4096))
    turned[0, :6] *= -1
    drawn._references["output 0"] = Reference(right.double(), turned)
    assert drawn.complaint(made, [[turned]]) == (None, True)
    drawn._references["output 0"] = Reference(right.double(), right)  # which has met no near tie
    few = torch.where(torch.arange(right.numel()).view_as(right) < 5, -right, right)
    drawn._elements, drawn._near_ties = right.numel(), 0
    assert drawn._differ([turned], [right]) and not drawn._differ([few], [right])
    assert drawn._differ([few], [right])  # as many again, of no more elements
    drawn._references["output 0"] = Reference(right.double(), turned)
    assert drawn.complaint(drawn.draw(), [[kept]]) == (SUSPECTED, False)


def test_a_result_that_cannot_be_told_from_another():
    drawn = drawn_of(torch.sign, lambda: [torch.rand(8, 8) + 1], calls=2)
    made = drawn.draw()
    right = [drawn._right(*each) for each in made]
    refer(drawn, *right[0])
    with pytest.raises(Unshareable, match="cannot be told from that of other inputs"):
        drawn.complaint(made, right)


def test_a_gradient_that_is_zero_in_mathematics_is_not_looked_at_as_a_whole():
    """It is rounding alone, and another one in each call."""
    drawn = drawn_of(lambda x: (x - x.mean()).sum(), lambda: [torch.randn(64, 64)], "weights_and_input")
    _, (output, gradient) = right_of(drawn)
    noise = [1e-7 * torch.randn_like(gradient) for _ in range(3)]
    drawn._references["input0"] = Reference(torch.zeros_like(gradient, dtype=torch.float64), *noise[:2])
    assert drawn._references["input0"].is_zero
    assert not drawn._differ([output, noise[1]], [output, noise[2]])


def test_the_whole_check_is_asked_about_a_few_calls():
    drawn = drawn_of(torch.tanh, lambda: [torch.randn(64, 64)])
    refer(drawn, *right_of(drawn)[1])
    for _ in range(8):
        made, (right,) = right_of(drawn)
        assert drawn.complaint(made, [[right + 1]]) == (SUSPECTED, False)
    made, (right,) = right_of(drawn)
    with pytest.raises(Unshareable, match="too many"):
        drawn.complaint(made, [[right + 1]])


def test_no_content_is_met_twice():
    contents = [0.0, *range(8), 3.0]  # the first is for the form
    drawn = drawn_of(lambda x: 2 * x, lambda: [torch.tensor([contents.pop(0), 1.0])])
    for _ in range(8):
        drawn.draw()
    with pytest.raises(Unshareable, match="few different inputs"):
        drawn.draw()


def test_a_model_that_draws_has_a_seed_of_its_own_in_each_call():
    """And one whose calls change its state is called as often, and in the same order, as on the timed side."""
    drawn = drawn_of(lambda x: x + torch.randn_like(x), lambda: [torch.randn(64)], calls=3)
    made = drawn.draw()
    assert drawn.draws and not drawn.restores and len({call.draws for call, _ in made}) == 3
    norm = torch.nn.BatchNorm1d(3)
    drawn = drawn_of(None, lambda: [torch.randn(5, 3)], model=norm, calls=3)
    assert drawn.restores and not drawn.draws
    assert not drawn_of(torch.tanh, lambda: [torch.randn(64)]).restores


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool, torch.bfloat16])
def test_where_tensors_of_any_type_lie(dtype):
    given = torch.randn(6, 4).to(dtype) if dtype.is_complex else (4 * torch.rand(6, 4)).to(dtype)
    places, end = laid_out([given.t(), 3, given[:, :2]], HEADER)
    assert places[1] is None and places[0]["offset"] == HEADER and end % 512 == 0
    block = torch.zeros(end, dtype=torch.uint8)
    for place, value in ((places[0], given.t()), (places[2], given[:, :2])):
        there = placed(block, place)
        torch._foreach_copy_([there], [value])
        assert there.stride() == value.stride() or not value.is_contiguous()
        assert torch.equal(*(each.contiguous().view(torch.uint8) for each in (there, value)))


# A simulated GPU.


class Device:
    """Memory and gates of this process, in the place of clock.memory.Gpu."""

    def __init__(self):
        self.blocks = {}

    def allocate(self, count):
        self.blocks[len(self.blocks)] = block = torch.zeros(count, dtype=torch.uint8)
        return block, {"handle": len(self.blocks) - 1, "bytes": count}

    def opened(self, told):
        return self.blocks[told["handle"]][: told["bytes"]]

    def write(self, block, gate, value):
        block[gate : gate + 4].view(torch.int32).fill_(value)

    def wait_for(self, block, gate, value):
        latest = time.monotonic() + 20
        while block[gate : gate + 4].view(torch.int32).item() < value:
            assert time.monotonic() < latest, "the gate stays closed"
            time.sleep(1e-4)

    elsewhere = contextlib.nullcontext

    def free(self):
        pass


class Quiet:
    """A CudaClock on whose GPU nobody else works."""

    class Event(float):
        def query(self):
            return True

    flush_ms = 1.0

    def now(self):
        return self.Event(time.process_time())  # which other programs do not change

    def between(self, began, ended):
        return (ended - began) * 1e3

    def flush(self):
        pass

    wait = flush

    def flush_in_a_row(self, flush_ms):
        return 1.0


class Shared(Quiet):
    """One on which somebody works at one of so many looks."""

    def __init__(self, which, of):
        self._which, self._of, self._looks = which, of, -3  # so many OnGpu makes at first

    def flush_in_a_row(self, flush_ms):
        self._looks += 1
        return 2.0 if self._looks > 0 and self._looks % self._of == self._which else 1.0


class Process:
    """A worker of the simulated device: its Side is in this process, and stands still whenever it is asked to."""

    limit, shared, pid = 20, 0, os.getpid()

    def __init__(self, model, problem, step, device, kind=Side):
        self._side = kind(Workload(problem, model, step, CPU), device, Quiet())

    def ask(self, request, side, mode, does, **given):
        assert request == "outer"
        try:
            return getattr(self._side, does)(**given)
        except (Unshareable, RuntimeError) as error:
            raise WorkerFailure(str(error)) from None

    @contextlib.contextmanager
    def stopped(self):
        yield types.SimpleNamespace(still=contextlib.nullcontext)


class Referee:
    """A referee of the simulated device."""

    worker = Process  # which has its number

    def __init__(self, drawn, device, clock=None):
        self.outer = OnGpu(drawn, device, clock or Quiet())

    def ask(self, what, **given):
        if what == "outer_close":
            return self.outer.close()
        if what == "outer_open":
            return self.outer.open(given["side"])
        try:
            return getattr(self.outer, what.removeprefix("outer."))(**given)
        except Unshareable as error:
            raise WorkerFailure(str(error)) from None


class Work(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.calls, self.does = 0, forward

    def forward(self, *given):
        self.calls += 1
        return self.does(self, *given)


def inputs_of_a_matrix():
    return [torch.randn(8, 16)]


def measured(
    forward, does=None, step="forward", get_inputs=inputs_of_a_matrix, kind=Side, calls_ms=1.0, model=None, clock=None
):
    """What outer.measure gives of a file whose forward(model, ...) is so, where the original's is `does`, or the same."""
    torch.manual_seed(7)
    original, device = model or Work(does or forward), Device()
    problem = types.SimpleNamespace(get_inputs=get_inputs)
    drawn = Drawn(
        Workload(problem, copy_model(original), step, CPU), {}, lambda *_: SUSPECTED, int(outer.TURN_MS["cuda"] / calls_ms)
    )
    refer(drawn, *right_of(drawn)[1])
    referee, players = Referee(drawn, device, clock), {}
    for name, own in ((outer.VARIANT, forward), (outer.EAGER, does or forward)):
        torch.manual_seed(7)
        made = Work(own) if model is None else type(model)(16)
        made.load_state_dict(original.state_dict())
        process = Process(made, problem, step, device, kind if name == outer.VARIANT else Side)
        players[name] = outer.Player(name, step, process, calls_ms if name == outer.EAGER else 0.0)
    return dump(outer.measure(referee, players, "cuda", None, 0))


def right(model, x):
    return torch.tanh(model.linear(x))


def test_a_turn_of_many_calls_from_both_sides():
    found = measured(right)
    assert found["calls"] == 15 and found["rounds"] >= outer.FEWEST_ROUNDS and found["warm"]["ratio"] > 0
    assert measured(right, calls_ms=12.0)["calls"] == 1


def test_how_many_calls_a_turn_has():
    of = outer.calls_of_a_turn
    assert [of("cuda", ms, ms) for ms in (0.004, 0.1, 1.0, 15.0, 80.0)] == [250, 64, 15, 1, 1]
    assert [of("cuda", 0.1, ms) for ms in (0.5, 9.0, 90.0)] == [64, 5, 1]


def test_a_round_in_which_another_process_comes_does_not_count(monkeypatch):
    """There are three sides, and four looks a round: one before each turn, which is made again, and one behind the last."""
    monkeypatch.setattr(outer, "MOST_ROUNDS", outer.FEWEST_ROUNDS)
    assert measured(right, clock=Shared(1, of=5))["rounds"] == outer.FEWEST_ROUNDS, "it was there before the round"
    for between in (Shared(2, of=5), Shared(3, of=5), Shared(0, of=4)):
        with pytest.raises(WorkerFailure, match="only 0 of 9 rounds"):
            measured(right, clock=between)


@pytest.mark.parametrize("step", ["weights", "weights_and_input"])
def test_a_training_step(step):
    assert measured(right, step=step)["rounds"] >= outer.FEWEST_ROUNDS

    def half(model, x):
        return torch.tanh(model.linear(x.detach()) if x.requires_grad else model.linear(x)) + 0 * x.sum()

    if step == "weights_and_input":
        with pytest.raises(outer.Rejected, match=SUSPECTED):
            measured(half, right, step)


def test_what_changes_from_draw_to_draw_is_timed():
    """Numbers and shapes, and the state of the model itself."""
    count = itertools.count(3)

    def numbers():
        return [torch.randn(8, 16), 1 + torch.rand(()).item(), None]

    def shapes():
        return [torch.randn(next(count) % 5 + 3, 16)]

    assert measured(lambda model, x, a, nothing: a * right(model, x), get_inputs=numbers)["rounds"]
    assert measured(right, get_inputs=shapes)["rounds"]
    with pytest.raises(outer.Rejected):  # the number of the first call alone
        measured(
            lambda model, x, a, nothing: 1.5 * right(model, x), lambda model, x, a, n: a * right(model, x), get_inputs=numbers
        )


def test_a_state_that_calls_change_is_that_of_the_same_calls():
    def counts(model, x):
        model.linear.bias.data.add_(0.01)
        return right(model, x)

    assert measured(counts)["rounds"] >= outer.FEWEST_ROUNDS


def test_a_model_that_draws_random_numbers_is_timed():
    def draws(model, x):
        return right(model, x) + torch.randn_like(x)

    assert measured(draws)["rounds"] >= outer.FEWEST_ROUNDS
    with pytest.raises(outer.Rejected):
        measured(lambda model, x: right(model, x), draws)


class WritesTheGate(Side):
    """Says that it is done before it has begun, and opens the gate itself."""

    def call(self, null, number):
        self._memory.write(self._inputs, DONE, number)
        self._memory.write(self._inputs, 0, number)
        return super().call(null, number)


class WritesEarly(Side):
    """Writes what it gave before into the place of results while the gate is closed, and does no work behind it."""

    def call(self, null, number):
        for place in self._places:
            place.fill_(0.5)
        self._memory.wait_for(self._inputs, 0, number)
        self._memory.write(self._inputs, DONE, number)
        return {"milliseconds": 0.001, "share": False}


class WritesLate(Side):
    """Has its results copied by a thread that goes on behind its answer."""

    def _store(self):
        if self._warm is None:
            return super()._store()
        self._thread = threading.Timer(0.05, super()._store)
        return self._thread.start()

    def close(self):
        self._thread.join()
        return super().close()


class SwapsNeighbours(Side):
    """Gives each call its neighbour's result."""

    def _store(self):
        self._results = self._results[1:] + self._results[:1]
        super()._store()


class ChangesItsInputs(Side):
    """Has what it is given be what it was given before."""

    def call(self, null, number):
        before = self._inputs[HEADER:].clone()
        self._memory.wait_for(self._inputs, 0, number)
        self._inputs[HEADER:] = before
        return super().call(null, number)


class ClaimsNoTime(Side):
    """Says that its calls took no time at all."""

    def call(self, null, number):
        return super().call(null, number) | {"milliseconds": 1e-9}


class SaysNonsense(Side):
    def call(self, null, number):
        return super().call(null, number) | {"milliseconds": float("nan")}


@pytest.mark.parametrize("kind", [WritesTheGate, WritesEarly, WritesLate, SwapsNeighbours, ChangesItsInputs])
def test_results_that_are_not_there_when_the_turn_ends_are_wrong(kind):
    with pytest.raises(outer.Rejected, match=SUSPECTED):
        measured(right, kind=kind)


def test_what_a_side_says_of_its_own_time_is_bounded_by_the_outer_one():
    found = measured(right, kind=ClaimsNoTime)
    assert found["warm"]["ratio"] > 100 > found["ratio"]
    seen = {"low": 0.99 * found["ratio"], "high": 1.01 * found["ratio"], "eager_ms": 1.0}  # on a quiet machine
    claimed = bounded(timings(280.0), {"ratio": found["ratio"], "warm": found["warm"]} | seen)
    assert claimed["speedup"]["eager"]["ratio"] == found["ratio"]
    with pytest.raises(WorkerFailure, match="something that is no time"):
        measured(right, kind=SaysNonsense)


def test_a_file_that_fails_in_a_turn_is_not_waited_for():
    def breaks(model, x):
        if model.calls > 20:
            raise RuntimeError("enough")
        return right(model, x)

    with pytest.raises(WorkerFailure, match="enough"):
        measured(breaks, right)


def test_what_comes_of_a_turn_that_never_ends_is_not_said_by_what_is_cleared_up_behind_it(monkeypatch):
    def breaks(model, x):
        if model.calls > 20:
            raise RuntimeError("no answer within the time limit")
        return right(model, x)

    def gone(self):
        raise WorkerFailure("crashed (SIGKILL)", role="referee")

    monkeypatch.setattr(OnGpu, "close", gone)
    with pytest.raises(WorkerFailure, match="no answer within the time limit"):
        measured(breaks, right)


def test_results_in_the_same_memory_are_nobody_s():
    kept = torch.empty(8, 16)

    def keeps(model, x):
        return kept.copy_(right(model, x))

    for calls_ms in (1.0, 12.0):
        with torch.no_grad(), pytest.raises(WorkerFailure, match="in an earlier call's memory"):
            measured(keeps, right, calls_ms=calls_ms)


def test_a_constant_of_the_original_s_is_one_of_the_file_s_too():
    assert measured(lambda model, x: (right(model, x), model.linear.bias))["rounds"] >= outer.FEWEST_ROUNDS


@pytest.mark.parametrize("wrong", [lambda x: x[:1], lambda x: x.double()])
def test_results_have_the_original_form(wrong):
    with pytest.raises(WorkerFailure, match=r"results of the (shapes|types)"):
        measured(lambda model, x: wrong(right(model, x)), right)


@contextlib.contextmanager
def goes_on_in_the_turn_of_eager():
    with pytest.raises(WorkerFailure, match=r"its own processes ran on while they had to be stopped"):
        yield


CHILDS = {  # what happens to a child of the judged file in another's turn -> what comes of it
    "stands still": (lambda child: None, contextlib.nullcontext),
    "goes on": (lambda child: child.resume(), goes_on_in_the_turn_of_eager),
    "goes on, and stands still again": (lambda child: (child.resume(), child.suspend()), goes_on_in_the_turn_of_eager),
    "works and ends": (lambda child: (child.resume(), time.sleep(0.1), child.kill()), goes_on_in_the_turn_of_eager),
}


@pytest.mark.parametrize("happens", CHILDS)
def test_a_file_whose_child_goes_on_in_anothers_turn_claims_nothing(tiny_problem, tmp_path, happens):
    busy = f"import signal, subprocess\nsubprocess.Popen([{sys.executable!r}, '-c', 'while True: pass'])\n"
    busy += "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"  # nothing is left of one that ends
    (tmp_path / "solution.py").write_text(busy + tiny_problem.read_text().replace("class Model(", "class ModelNew("))
    original = {"problem": str(tiny_problem), "settings": {}, "place": "cpu", "seed": 0, "weights": None}
    eager = outer.Player(outer.EAGER, "forward", Process(torch.nn.Linear(1, 1), None, "forward", None), 1.0)
    referee = types.SimpleNamespace(worker=Process)
    does, ends = CHILDS[happens]
    with WorkerProcess("candidate", 60) as judged:
        judged.ask("load", **original, variant=str(tmp_path / "solution.py"))
        (child,) = psutil.Process(judged.pid).children()
        with ends(), outer._turn(eager, judged, referee):
            does(child)
            time.sleep(0.1)
