"""What one timed call does: its content is fresh and follows from a seed, and it differentiates what its mode says."""

import contextlib
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn

from playground.clock import MODES
from playground.clock.workload import Graphed, Workload, fresh_inputs, upstream_for

CPU = torch.device("cpu")


class Recorder(nn.Module):
    """A linear model with a frozen parameter, which keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.seen = []
        self.grad_modes = []

    def forward(self, x, indices):
        self.seen.append(x)
        self.grad_modes.append(torch.is_grad_enabled())
        return {"y": self.linear(x)[indices] * self.frozen, "largest": x.argmax()}


def problem(*shape):
    return SimpleNamespace(get_inputs=lambda: [torch.rand(*shape), torch.tensor([0, 1])])


def workload(model, mode, shape=(2, 4), memory_format=None, dtype=None):
    return Workload(problem(*shape), model, mode, CPU, memory_format, dtype)


@pytest.fixture
def model():
    return Recorder()


@pytest.mark.parametrize("mode", MODES)
def test_content_follows_the_seed(model, mode):
    made = workload(model, mode)
    first, same, other = (made.fresh(seed) for seed in (3, 3, 4))
    assert torch.equal(first.inputs[0], same.inputs[0]) and not torch.equal(first.inputs[0], other.inputs[0])
    for a, b, c in zip(first.upstream, same.upstream, other.upstream, strict=True):
        assert (a is b is c is None) or (torch.equal(a, b) and not torch.equal(a, c))


def test_every_generator_is_seeded():
    def get_inputs():
        return [torch.tensor(np.random.rand(3)), torch.full((1,), random.random()), torch.rand(2)]

    first, same, other = (fresh_inputs(SimpleNamespace(get_inputs=get_inputs), seed, CPU) for seed in (1, 1, 2))
    for a, b, c in zip(first, same, other, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_inputs_that_cannot_be_made_on_the_device_are_moved_there():
    def get_inputs():
        return [torch.rand(3) + torch.ones(3, device="cpu"), 0.5]

    x, factor = fresh_inputs(SimpleNamespace(get_inputs=get_inputs), 1, torch.device("meta"))
    assert x.device.type == "meta" and factor == 0.5


def test_upstream_is_for_floats():
    first, none, third = upstream_for([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(5).double()], 1, CPU)
    assert none is None and first.shape == (2, 3) and third.dtype == torch.float64


def test_forward_runs_without_gradients(model):
    made = workload(model, "forward")
    outputs = made(content := made.fresh(1))
    assert not outputs["y"].requires_grad
    assert model.grad_modes == [False]
    assert torch.is_grad_enabled()
    assert made.names(content) is None


def test_weights_differentiates_the_parameters_that_train(model):
    made = workload(model, "weights")
    gradients = made(content := made.fresh(1))
    assert [tuple(g.shape) for g in gradients] == [(3, 4), (3,)]
    assert made.names(content) == ["linear.weight", "linear.bias"]
    assert not model.seen[-1].requires_grad


def test_weights_and_input_differentiates_the_float_inputs_as_well(model):
    made = workload(model, "weights_and_input")
    weight, bias, of_x = made(content := made.fresh(1))
    assert made.names(content) == ["linear.weight", "linear.bias", "input0"]
    upstream = content.upstream[1]  # of "y", which comes behind "largest" in the order of the keys
    upstream = upstream if upstream is not None else content.upstream[0]
    torch.testing.assert_close(of_x, upstream @ model.linear.weight.detach())
    torch.testing.assert_close(weight, upstream.T @ content.inputs[0].detach())
    torch.testing.assert_close(bias, upstream.sum(0))


def test_nothing_is_accumulated(model):
    made = workload(model, "weights_and_input")
    first, again = (made(made.fresh(seed)) for seed in (1, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(p.grad is None for p in model.parameters()) and all(x.grad is None for x in model.seen)


@pytest.mark.parametrize(
    "shape, layout", [((2, 3, 4, 4), torch.channels_last), ((2, 3, 2, 4, 4), torch.channels_last_3d), ((2, 4), None)]
)
def test_inputs_are_converted_beforehand(model, shape, layout):
    x, indices = workload(model, "forward", shape, "channels_last", torch.float16).fresh(1).inputs
    assert x.is_contiguous(memory_format=layout or torch.contiguous_format)
    assert x.dtype is torch.float16 and indices.dtype is torch.int64


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))

    def forward(self, x, indices):
        return x * self.used


def test_a_parameter_without_gradient_is_none():
    made = workload(Unused(), "weights")
    used, unused = made(made.fresh(1))
    assert used.shape == (4,) and unused is None


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph where there is no GPU: what is captured runs at once, and a replay runs nothing."""

    def replay(self):
        pass


@pytest.fixture
def fake_cuda(monkeypatch):
    @contextlib.contextmanager
    def capturing(graph):
        try:
            yield
        except Exception as exception:
            raise RuntimeError("the end of a failed capture") from exception

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_gets_new_content_in_its_own_memory(fake_cuda, model, mode):
    graphed, plain = Graphed(workload(model, mode), 3), workload(model, mode)
    captured_on = model.seen[-1]
    before = captured_on.clone()
    content, expected = graphed.fresh(4), plain.fresh(4)
    assert content.inputs[0] is captured_on and not torch.equal(captured_on, before)
    assert captured_on.requires_grad == (mode == "weights_and_input")
    for mine, value in zip(content.inputs + content.upstream, expected.inputs + expected.upstream, strict=True):
        assert (mine is value is None) or torch.equal(mine, value)
    assert graphed.names(content) == plain.names(expected)
    assert graphed(content) is graphed(content)


def test_a_capture_that_fails_gives_its_own_reason(fake_cuda, model, monkeypatch):
    seen = workload(model, "weights")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: setattr(model, "linear", None))
    with pytest.raises(TypeError, match="NoneType"):
        Graphed(seen, 1)


def test_a_graph_cannot_follow_inputs_that_are_no_tensors(fake_cuda):
    factors = iter(range(10))
    changing = SimpleNamespace(get_inputs=lambda: [torch.rand(2, 4), next(factors)])
    graphed = Graphed(Workload(changing, lambda x, factor: x * factor, "forward", CPU), 1)
    with pytest.raises(ValueError, match="get_inputs gave 0, which the graph keeps, and now gives 1"):
        graphed.fresh(2)
