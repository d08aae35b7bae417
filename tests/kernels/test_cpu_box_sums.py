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
    forward = getattr(torch.ops, new.namespace()).forward
    weight, bias = new.conv.weight.detach(), new.conv.bias.detach()
    for message, call in {
        r"a window of \[2, 2\] .* does not fit": lambda: forward(x, weight, bias, 2),
        r"a window of \[4\] .* does not fit": lambda: forward(x, weight, bias, [4]),
        "expected bias as": lambda: forward(x, weight, bias[1:], 4),
        "expected weight as .* got torch.float64": lambda: forward(x, weight.double(), bias, 4),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("frozen", [(), ("x",), ("conv.weight",), ("conv.bias",), ("conv.weight", "conv.bias")], ids=str)
def test_second_derivatives(frozen):
    """Those of the original, by whatever path they lead back."""
    found = []
    for model, x in zip(make(SHAPES["odd"])[:3:2], (make(SHAPES["odd"])[3],) * 2, strict=True):
        x = x.to(next(model.parameters()).dtype).clone()
        leaves = {"x": x.requires_grad_(), **dict(model.named_parameters())}
        for name in frozen:
            leaves.pop(name).requires_grad_(False)
        out, second = model(x), []
        for first in leaves.values():
            (gradient,) = torch.autograd.grad(out.sum(), first, create_graph=True)
            total = gradient.square().sum() + out.sum()
            second += torch.autograd.grad(total, list(leaves.values()), retain_graph=True)
        found.append(second)
    for exact, new in zip(*found, strict=True):
        torch.testing.assert_close(new.double(), exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())
