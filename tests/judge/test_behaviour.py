"""What a call does besides returning a result is seen; an honest module does none of it."""

import gc
from functools import partial

import pytest
import torch
import torch.nn as nn
from judged import referee_of
from torch.backends import cuda

from playground.judge import behaviour, global_state
from playground.judge.behaviour import SideEffects, StressTests
from playground.judge.checks import STRESS_TESTS

CPU = torch.device("cpu")
X = torch.arange(12.0).reshape(4, 3)
IN_FP16 = "torch.backends.cuda.matmul.allow_fp16_accumulation"


class Module(nn.Module):
    """A linear layer, around a function (module, x) -> output."""

    def __init__(self, function=lambda module, x: module.linear(x)):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.function = function
        self.calls = 0
        self.kept = None

    def forward(self, x):
        self.calls += 1
        return self.function(self, x)


def effects(function, *inputs):
    """Complaints about one call."""
    model, inputs = Module(function), list(inputs) or [X.clone()]
    with torch.no_grad():
        watched = SideEffects(model, inputs)
        return watched.complaints([model(*inputs)])


def sum_in_fp16(allowed):
    cuda.matmul.allow_fp16_accumulation = allowed


def test_an_honest_call():
    assert effects(lambda module, x: module.linear(x)) == {}


@pytest.mark.parametrize(
    "function, check, reason",
    [
        (lambda m, x: m.linear(x.data.copy_(x)) + x.zero_().sum(), "inputs unchanged", "changes input 0"),
        (lambda m, x: m.linear(x.add_(0)), "inputs unchanged", "writes to input 0 (its version counter went up)"),
        (lambda m, x: m.linear(x) * m.scale.mul_(2), "buffers unchanged", "changes scale"),
        (lambda m, x: x[1:].t(), "memory of its own", "returns the memory of input 0"),
        (lambda m, x: m.linear.weight, "memory of its own", "returns the memory of linear.weight"),
    ],
)
def test_a_call_that_does_more(function, check, reason):
    assert effects(function).get(check) == reason


@pytest.mark.parametrize(
    "name, change, other, usual",
    [
        ("the default dtype", torch.set_default_dtype, torch.float64, torch.float32),
        ("the default device", torch.set_default_device, "meta", None),
        ("the number of threads", torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
        ("the deterministic mode", torch.use_deterministic_algorithms, True, False),
        ("the grad mode", torch.set_grad_enabled, False, True),
        ("autocast's type on the CPU", partial(torch.set_autocast_dtype, "cpu"), torch.float16, torch.bfloat16),
        ("autocast's type on CUDA", partial(torch.set_autocast_dtype, "cuda"), torch.bfloat16, torch.float16),
        (IN_FP16, sum_in_fp16, True, False),
        ("cuDNN's attention", cuda.enable_cudnn_sdp, False, True),
        ("math attention", cuda.enable_math_sdp, False, True),
        ("reduced precision sums of math attention", cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
        ("Python's garbage collector", lambda on: gc.enable() if on else gc.disable(), False, True),
    ],
)
def test_flags_are_read_again(name, change, other, usual):
    before = global_state.flags()
    assert global_state.changed(before, global_state.flags()) is None
    try:
        change(other)
        assert global_state.changed(before, global_state.flags()).startswith(f"changes {name} from ")
    finally:
        change(usual)
    assert global_state.changed(before, global_state.flags()) is None


@pytest.mark.parametrize("afterwards", [False, True])
def test_a_flag_may_be_changed_during_a_call(afterwards):
    def sums_in_fp16(module, x):
        sum_in_fp16(True)
        y = module.linear(x)
        sum_in_fp16(afterwards)
        return y

    try:
        found = effects(sums_in_fp16)
    finally:
        sum_in_fp16(False)
    assert found == ({"global state": f"changes {IN_FP16} from False to True"} if afterwards else {})


@pytest.mark.parametrize("name", global_state.TIMERS_AND_CHECKS)
def test_a_replaced_timer_or_check(monkeypatch, name):
    before = global_state.flags()
    monkeypatch.setattr(name, lambda *_: 0.0)
    after = global_state.flags()
    monkeypatch.undo()  # before pytest asks for the time
    assert global_state.changed(before, after).startswith(f"replaces {name}")


def test_bits():
    nan = torch.tensor([float("nan"), 0.0])
    assert behaviour.same_bits(nan, nan.clone())
    assert not behaviour.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not behaviour.same_bits(torch.ones(2), torch.ones(3)) and not behaviour.same_bits(X, X.double())
    assert behaviour.same_bits(X.t(), X.t().contiguous()) and behaviour.same_bits(
        torch.ones(2, dtype=torch.bool), torch.ones(2).bool()
    )


def in_16_bits_unless_asked(module, x):
    return module.linear(x).to(module.out_dtype or torch.bfloat16)


def trial(name, function=lambda module, x: module.linear(x), declared=None):
    model = Module(function)
    model.out_dtype = torch.float32  # as the judge asks of what has it
    second = X.flip(0) + 0.5
    done = StressTests(model, [X.clone()], [second], CPU, declared).run(name)
    return done, {"first": model.linear(X).detach(), "second": model.linear(second).detach()}


@pytest.mark.parametrize("name", [check.name for check in STRESS_TESTS])
def test_an_honest_module(name):
    done, expected = trial(name, in_16_bits_unless_asked) if name == "out_dtype" else trial(name)
    assert done.complaint is None
    if done.outputs is None:
        assert done.note.startswith("not run: ")
    else:
        torch.testing.assert_close(done.outputs[0], expected[done.of])


def remembers_a_few_elements(module, x):
    key = x.data_ptr(), x[0, 0].item()
    if module.kept is None or module.kept[0] != key:
        module.kept = key, module.linear(x)
    return module.kept[1].clone()


def test_a_result_remembered_by_a_few_of_its_elements(monkeypatch):
    """Here never by the one that is changed."""
    monkeypatch.setattr(behaviour.secrets, "randbelow", lambda size: size - 1)
    done, _ = trial("new content in the same memory", remembers_a_few_elements)
    assert done.complaint == "one element was changed, and the result is the old one"


@pytest.mark.parametrize("ignores", [lambda x: x[:0].sum(), lambda x: x.sign().abs().sum(), lambda x: 1e-20 * x.sum()])
def test_an_element_that_changes_nothing(ignores):
    done, _ = trial("new content in the same memory", lambda module, x: module.linear(X) + ignores(x))
    assert done.complaint is None


def test_bits_that_differ_are_not_taken_for_a_memory():
    def now_and_then(module, x):
        return module.linear(X) + 1e-6 * (module.calls % 9 == 5)

    done, _ = trial("new content in the same memory", now_and_then)
    assert done.complaint is None


def remembers_the_tensor(module, x):
    key = x._version, module.linear.weight._version
    if module.kept is None or module.kept[0] is not x or module.kept[1] != key:
        module.kept = x, key, module.linear(x)
    return module.kept[2].clone()


def test_a_result_remembered_by_the_tensor_and_its_version():
    done, _ = trial("the same content in new memory", remembers_the_tensor)
    assert done.complaint.startswith("runs ")


def test_a_view_of_the_input_is_in_the_memory_of_the_caller():
    done, _ = trial("the same content in new memory", lambda module, x: x[:, :3])
    assert done.complaint is None


class WritesToSecond(nn.Module):
    """Returns the memory of its second input, as what is given the memory of its output."""

    def forward(self, x, output):
        return output.copy_(x + 1)


def test_memory_of_the_second_input_is_the_callers_too():
    done = StressTests(WritesToSecond(), [X, X + 1], [X + 2, X + 3], CPU).run("the same content in new memory")
    assert done.complaint is None


def test_an_output_that_is_overwritten_by_the_call_after_the_next():
    def two_buffers(module, x):
        module.kept = module.kept or [torch.empty(len(x), 3) for _ in range(2)]
        return module.kept[module.calls % 2].copy_(module.linear(x))

    done, _ = trial("an earlier output", two_buffers)
    assert done.complaint == "a later call overwrites what an earlier one returned"


def test_a_graph_that_breaks():
    with pytest.raises(torch._dynamo.exc.Unsupported):
        trial("torch.compile", lambda module, x: torch._dynamo.graph_break() or module.linear(x))


def test_a_state_kept_of_inference_mode_is_one_for_later_calls():
    """As of a recurrent network that writes over the state that it keeps."""

    def recurs(module, x):
        module.kept = torch.zeros(3) if module.kept is None else module.kept
        module.kept = module.linear(module.kept.copy_(x[0]))
        return module.kept.clone()

    module = Module(recurs)
    for name in ("inference_mode", "run to run"):
        assert StressTests(module, [X], [X], CPU).run(name).complaint is None


def test_a_call_that_gives_its_input_another_shape_can_be_tried_out():
    def reshapes(module, x):
        y = module.linear(x)
        x.unsqueeze_(0)
        return y

    assert StressTests(Module(reshapes), [X], [X + 1], CPU).run("new content in the same memory").of == "second"


def test_a_script_in_inference_mode():
    assert StressTests(torch.jit.script(torch.nn.Linear(X.shape[1], 3)), [X], [X], CPU).run("inference_mode").complaint is None


UNSTEADY = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return x + {change} * self.calls
def get_inputs():
    return [torch.rand(3, 4)]
"""


@pytest.mark.parametrize(
    "edits, side_effects",
    [
        ({"{change}": "0"}, []),
        ({"{change}": "1e-7"}, ["run to run", "state"]),
        # changed buffers excuse no changed weights
        (
            {"{change}": "0", "calls = 0": "calls = 0; self.norm = torch.nn.BatchNorm1d(4)", "x +": "self.norm(x) +"},
            ["buffers unchanged", "eval"],
        ),
    ],
)
def test_what_an_original_does_besides(edits, side_effects, tmp_path):
    text = UNSTEADY
    for old, new in edits.items():
        text = text.replace(old, new)
    assert referee_of(tmp_path, text).side_effects()["side_effects"] == side_effects


@pytest.mark.parametrize(
    "output, shares",
    [
        (torch.zeros(3, 1).expand(3, 4), True),
        (torch.zeros(8).as_strided((3, 4), (2, 1)), True),
        (torch.zeros(30).as_strided((2, 4), (4, 2)), True),
        (torch.zeros(30).as_strided((2, 3), (3, 2)), False),
        (torch.zeros(5, 4, 3, 2).to(memory_format=torch.channels_last), False),
        (torch.zeros(4, 8)[:, :5].t(), False),
        (torch.zeros(1).expand(1), False),
        (torch.zeros(0, 3).expand(0, 3), False),
    ],
)
def test_elements_that_share_memory(output, shares):
    model = torch.nn.Linear(2, 2)
    complaint = behaviour.SideEffects(model, []).complaints([output]).get("an element's own memory")
    assert (complaint or "").startswith("returns a tensor with elements that share memory") == shares


def test_double_of_what_has_no_floats_is_not_asked_for():
    class Floats(nn.Module):
        def forward(self, x):
            return x.float()

    found = StressTests(Floats(), [torch.arange(3)], [torch.arange(3)], CPU).run("double()")
    assert found == behaviour.Trial(note="not run: not all is in float32")
