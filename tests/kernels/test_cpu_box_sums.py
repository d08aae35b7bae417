"""conv_pool_sigmoid_sum/cpu_box_sums: its gradients at any size, its autograd, and builds for other CPUs than this one."""

import copy
import functools
from pathlib import Path

import pytest
import torch

from playground import catalog
from playground.judge.tolerance import Reference

VARIANT = catalog.KERNELS / "conv_pool_sigmoid_sum" / "cpu_box_sums.py"

# (in_channels, out_channels, kernel, pool), which each cost a build where kernel and pool are new, and (batch, height, width).
MODEL = (8, 64, 3, 4)
SHAPES = {
    "the model's own, fewer rows": (MODEL, (2, 100, 384)),
    "odd": ((5, 7, 3, 4), (3, 41, 29)),
    "one window": ((1, 1, 3, 4), (1, 6, 6)),
    "many channels": ((35, 200, 3, 4), (2, 30, 37)),
    "more samples": ((2, 3, 3, 4), (150, 11, 15)),
    "wide: several stretches": ((3, 18, 3, 4), (2, 14, 1603)),
    "so many channels that stretches are short": ((700, 16, 3, 4), (1, 10, 301)),
    "kernel and window not square": ((3, 20, (5, 2), (2, 7)), (2, 40, 500)),
    "kernel much larger than the window": ((2, 5, (4, 7), (1, 2)), (2, 20, 900)),
    "1 x 1": ((3, 17, 1, 1), (2, 30, 500)),
}

TARGETS = {"x86-64": "sse2", "haswell": "avx2"}  # -march, and the flag of /proc/cpuinfo that such a build needs to run
CPUINFO = Path("/proc/cpuinfo")
CPU_FLAGS = CPUINFO.read_text().split() if CPUINFO.exists() else []


@functools.cache
def load(march=None):
    """The variant's module; one that builds for `march` in place of this machine."""
    module = catalog.load_variant(VARIANT)
    if march:
        native = module.build
        flags = ("-march=" + march, "-fopenmp")
        module.build = lambda *sources, cflags, **constants: native(*sources, cflags=flags, **constants)
    return module


def make(shape, march=None):
    """(original in float64, original, variant) with the same weights, and an input of which every sample has its own size."""
    sizes, (batch, height, width) = shape
    problem = catalog.load_problem(catalog.MODELS / "conv_pool_sigmoid_sum.py")
    torch.manual_seed(0)
    original = problem.Model(*sizes)
    new = load(march).ModelNew(*sizes)
    new.load_state_dict(original.state_dict())
    x = torch.randn(batch, sizes[0], height, width) * torch.linspace(0.5, 2.0, batch).view(-1, 1, 1, 1)
    return copy.deepcopy(original).double(), original, new, x


def gradients(model, x, grad_out):
    """[of x, of each parameter]."""
    x = x.to(next(model.parameters()).dtype).requires_grad_()
    wanted = [x, *model.parameters()]
    return torch.autograd.grad(model(x), wanted, grad_out.to(x.dtype))


def assert_right(exact, original, new, x):
    """Outputs and gradients are as near to float64 as eager PyTorch's."""
    grad_out = torch.linspace(-1.0, 2.0, len(x))
    outputs = [model(x.to(next(model.parameters()).dtype)).detach() for model in (exact, original, new)]
    torch.testing.assert_close(outputs[2].double(), outputs[0], rtol=1e-6, atol=0)
    found = [gradients(model, x, grad_out) for model in (exact, original, new)]
    for name, true, eager, actual in zip(("x", "weight", "bias"), *found, strict=True):
        complaint = Reference(true, eager).compare(f"the gradient of {name}", actual).complaint
        assert complaint is None, complaint


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients(shape):
    assert_right(*make(shape))


@pytest.mark.full
@pytest.mark.parametrize("march", TARGETS)
def test_other_cpus(march):
    if TARGETS[march] not in CPU_FLAGS:
        pytest.skip(f"this CPU has no {TARGETS[march]}")
    for name in ("the model's own, fewer rows", "odd", "many channels", "wide: several stretches"):
        assert_right(*make(SHAPES[name], march))
    _, original, new, x = make(SHAPES["odd"], march)
    x[0, 0, 0, 0], x[1, 0, 3, 3] = torch.nan, torch.inf
    with torch.no_grad():
        torch.testing.assert_close(new(x), original(x), equal_nan=True)


@pytest.mark.full
@pytest.mark.parametrize("march", [None, "x86-64"])
def test_the_sigmoids_error(march):
    """What the docstring states; the input is such that the product is exact."""
    module = load(march)
    new = module.ModelNew(1, 1, 1, 1)
    with torch.no_grad():
        new.conv.weight.fill_(1.0)
        new.conv.bias.zero_()
        for limit, allowed in ((8.0, 7e-7), (80.0, 5e-6)):
            x = torch.linspace(-limit, limit, 200_001)
            exact = torch.sigmoid(x.double())
            assert ((new(x.view(-1, 1, 1, 1)) - exact).abs() / exact).max() < allowed
        extremes = torch.tensor([-1e30, -200.0, 200.0, 1e30, -torch.inf, torch.inf, torch.nan])
        found = new(extremes.view(-1, 1, 1, 1))
    torch.testing.assert_close(found, torch.sigmoid(extremes), atol=3e-38, rtol=0, equal_nan=True)


def test_wrong_arguments_are_refused():
    _, _, new, x = make(SHAPES["odd"])
    operators = getattr(torch.ops, new.namespace())
    weight, bias = new.conv.weight.detach(), new.conv.bias.detach()
    _, grads, delta = operators.forward_with_grads(x, weight, bias, 4, True, True)
    grad_out = torch.ones(len(x))
    for message, call in {
        "pooling window of 4 x 4, called with": lambda: operators.forward(x, weight, bias, 2),
        "4 x 4, called with .4.$": lambda: operators.forward(x, weight, bias, [4]),
        "4 x 4, called with .4, 4, 4.": lambda: operators.forward(x, weight, bias, [4, 4, 4]),
        "expected bias of": lambda: operators.forward(x, weight, bias[1:], 4),
        "expected grad_out of": lambda: operators.parameter_grads(grad_out[1:], grads, weight, bias, None),
        "expected grads of": lambda: operators.parameter_grads(grad_out, grads[:, 1:], weight, bias, None),
        "expected delta of": lambda: operators.input_grad(grad_out, delta[:, 1:], x, weight, bias, 4),
        "Double": lambda: operators.input_grad(grad_out.double(), delta, x, weight, bias, 4),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("frozen", [(), ("x",), ("conv.weight",), ("conv.bias",), ("conv.weight", "conv.bias")], ids=str)
def test_second_derivatives_are_refused(frozen):
    """Also where only one path leads back; beside a loss that has a derivative, none may come out without its second part."""
    _, _, new, x = make(SHAPES["odd"])
    leaves = {"x": x.requires_grad_(), **dict(new.named_parameters())}
    for name in frozen:
        leaves.pop(name).requires_grad_(False)
    for first in leaves.values():
        out = new(x)
        (gradient,) = torch.autograd.grad(out.sum(), first, create_graph=True)
        for second in leaves.values():
            with pytest.raises(NotImplementedError, match="second derivatives are not implemented"):
                torch.autograd.grad(gradient.square().sum() + out.sum(), second, retain_graph=True)
