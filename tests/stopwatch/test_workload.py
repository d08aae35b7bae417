"""What one timed call does: its inputs are fresh, and it differentiates what its mode says."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from playground.stopwatch.workload import INPUT_SETS, MODES, Workload, input_sets

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


def sets(*shape, seed=0):
    problem = SimpleNamespace(get_inputs=lambda: [torch.rand(*shape), torch.tensor([0, 1])])
    return input_sets(problem, CPU, seed)


@pytest.fixture
def model():
    return Recorder()


@pytest.mark.parametrize("mode", MODES)
def test_no_call_sees_the_content_of_the_call_before(model, mode):
    workload = Workload(model, sets(2, 4), mode)
    for _ in range(2 * INPUT_SETS):
        workload()
    assert all(not torch.equal(a, b) for a, b in zip(model.seen, model.seen[1:], strict=False))
    assert len({x.data_ptr() for x in model.seen}) == INPUT_SETS > 2


def test_content_follows_the_seed(model):
    for seed in (3, 3, 4):
        Workload(model, sets(2, 4, seed=seed), "forward")()
    first, same, other = model.seen
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_forward_runs_without_gradients(model):
    outputs = Workload(model, sets(2, 4), "forward")()
    assert not outputs["y"].requires_grad
    assert model.grad_modes == [False]
    assert torch.is_grad_enabled()


def test_weights_differentiates_the_parameters_that_train(model):
    gradients = Workload(model, sets(2, 4), "weights")()
    assert [tuple(g.shape) for g in gradients] == [(3, 4), (3,)]
    assert not model.seen[0].requires_grad


def test_weights_and_input_differentiates_the_float_inputs_as_well(model):
    gradients = Workload(model, sets(2, 4), "weights_and_input")()
    assert [tuple(g.shape) for g in gradients] == [(3, 4), (3,), (2, 4)]
    x = model.seen[0]
    assert x.requires_grad and x.is_leaf
    weight, bias, of_x = gradients
    upstream = of_x @ torch.linalg.pinv(model.linear.weight.detach())
    torch.testing.assert_close(weight, upstream.T @ x.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(bias, upstream.sum(0), rtol=1e-3, atol=1e-4)


def test_nothing_is_accumulated(model):
    workload = Workload(model, sets(2, 4), "weights_and_input")
    first = workload()
    for _ in range(INPUT_SETS - 1):
        workload()
    again = workload()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "the same input set, the same gradients"
    assert all(p.grad is None for p in model.parameters()) and all(x.grad is None for x in model.seen)


def test_modes_share_the_inputs_and_leave_them_as_they_are(model):
    """The sets are made once a process; what one mode does to its own views of them does not show in the next."""
    inputs = sets(2, 4)
    before = [x.clone() for x, _ in inputs]
    for mode in ("weights_and_input", "forward", "weights"):
        Workload(model, inputs, mode)()
    assert [x.requires_grad for x in model.seen] == [True, False, False]
    assert len({x.data_ptr() for x in model.seen}) == 1
    assert not any(x.requires_grad for x, _ in inputs)
    assert all(torch.equal(x, old) for (x, _), old in zip(inputs, before, strict=True))


@pytest.mark.parametrize(
    "shape, layout", [((2, 3, 4, 4), torch.channels_last), ((2, 3, 2, 4, 4), torch.channels_last_3d), ((2, 4), None)]
)
@pytest.mark.parametrize("mode", MODES)
def test_inputs_are_converted_beforehand(model, shape, layout, mode):
    Workload(model, sets(*shape), mode, memory_format="channels_last")()
    (x,) = model.seen
    assert x.is_contiguous(memory_format=layout or torch.contiguous_format)
    assert x.requires_grad == (mode == "weights_and_input") and x.is_leaf


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))

    def forward(self, x, indices):
        return x * self.used


def test_a_parameter_without_gradient_is_none():
    used, unused = Workload(Unused(), sets(2, 4), "weights")()
    assert used.shape == (4,) and unused is None
