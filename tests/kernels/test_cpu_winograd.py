"""conv3d_div_max_gap_bias_sum/cpu_winograd: its gradients at any size, its autograd, and builds for other CPUs than this."""

import functools
from pathlib import Path

import pytest
import torch

from playground import catalog, tensors
from playground.judge.oracle import Oracle
from playground.judge.probes import Probe, with_upstream
from playground.worker.referee import _references

VARIANT = catalog.KERNELS / "conv3d_div_max_gap_bias_sum" / "cpu_winograd.py"
ORIGINAL = catalog.MODELS / "conv3d_div_max_gap_bias_sum.py"

# What differs from batch 3 of 8 x 7 x 11 x 13; other kernels and pools PyTorch computes.
SETTINGS = {
    "small": {},
    "several blocks and chunks": {"batch_size": 2, "depth": 8, "height": 41, "width": 150},
    "odd": {"in_channels": 5, "out_channels": 7, "depth": 9, "height": 15, "width": 19},
    "one window": {"in_channels": 1, "out_channels": 1, "depth": 4, "height": 4, "width": 4},
    "many channels": {"in_channels": 19, "out_channels": 70, "batch_size": 2},
    "negative divisor": {"divisor": -3.0},
    "sum over the batch": {"sum_dim": 0},
    "sum over all, a wide bias": {"sum_dim": None, "bias_shape": (16, 1, 2, 3)},
    "one bias": {"bias_shape": (1,)},
    "odd windows": {"pool_size": (1, 3, 3), "height": 40, "width": 121},
    "kernel not cubic": {"kernel_size": (2, 5, 3), "pool_size": (1, 3, 2), "height": 20, "divisor": -1.5},
    "1 x 1 x 1": {"kernel_size": 1, "pool_size": 1, "in_channels": 3},
    "a window of more than 256": {"kernel_size": 2, "pool_size": 7, "depth": 15, "height": 16, "width": 10},
}
OTHERS = {"pool_size": (1, 3, 3)}
TARGETS = {"x86-64": "sse2", "haswell": "avx2"}  # -march, and the flag of /proc/cpuinfo that such a build needs to run


@functools.cache
def load(march=None):
    """The variant's module; one that builds for `march` in place of this machine."""
    module = catalog.load_variant(VARIANT)
    if march:
        module.ModelNew.flags = f"-march={march}", "-fopenmp"
    return module


def make(march=None, **settings):
    """(original, variant) with the same weights, and a normal input of which every sample has its own size."""
    small = {"batch_size": 3, "depth": 7, "height": 11, "width": 13}
    problem = catalog.load_problem(ORIGINAL, small | settings)
    torch.manual_seed(0)
    original = problem.Model(*problem.get_init_inputs())
    new = load(march).ModelNew(*problem.get_init_inputs())
    new.load_state_dict(original.state_dict())
    x = torch.randn(problem.batch_size, problem.in_channels, problem.depth, problem.height, problem.width)
    return original, new, x * torch.linspace(0.5, 2.0, len(x)).view(-1, 1, 1, 1, 1)


def gradients(model, x, grad_out=None):
    """[of x, of each parameter]; of the sum of the outputs, unless told otherwise."""
    x = x.detach().requires_grad_()
    out = model(x)
    return torch.autograd.grad(out, [x, *model.parameters()], torch.ones_like(out) if grad_out is None else grad_out)


def assert_right(original, new, x):
    """Output and gradients, under upstream gradients that differ, are as near to float64 as the judge wants them."""
    with torch.no_grad():
        probe = with_upstream(Probe("normal", [x]), [original(x)], seed=5)
    oracle = Oracle(original, torch.device("cpu"))
    truth, eager, permitted = oracle.truth(probe), oracle.eager(probe), oracle.permitted(probe, "fp32")
    (out,), found = tensors.gradients(new, probe.inputs, probe.upstream, probe.wanted_inputs)
    assert found.keys() == truth.gradients.keys()
    (of_output,), references = _references(truth, eager, permitted, decisions=lambda: oracle.decisions(probe, truth))
    compared = {"the output": (of_output, out.detach())}
    compared |= {name: (reference, found[name]) for name, reference in references.items()}
    for name, (reference, actual) in compared.items():
        if reference.is_blunt:  # it varies by less than it is rounded
            torch.testing.assert_close(actual.double(), reference.truth, rtol=1e-5, atol=0)
        else:
            complaint = reference.compare(name, actual).complaint
            assert complaint is None, complaint


@pytest.mark.full
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_gradients(settings):
    assert_right(*make(**settings))


@pytest.mark.full
@pytest.mark.parametrize("march", TARGETS)
def test_other_cpus(march):
    if TARGETS[march] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {TARGETS[march]}")
    for name in ("several blocks and chunks", "odd", "negative divisor"):
        assert_right(*make(march, **SETTINGS[name]))
    original, new, x = make(march)
    x[0, 0, 0, 0, 0], x[1, 0, 3, 3, 3] = torch.nan, torch.inf
    with torch.no_grad():
        torch.testing.assert_close(new(x), original(x), equal_nan=True)
    assert torch.equal(gradients(new, torch.ones_like(x))[0] != 0, gradients(original, torch.ones_like(x))[0] != 0)


@pytest.mark.parametrize("settings", [{}, OTHERS], ids=["Winograd", "PyTorch"])
def test_of_equal_values_the_first_gets_the_gradient(settings):
    """Equal patches (one colour, stripes), and whole numbers, whose convolutions are exact: all places as in PyTorch.

    Different patches whose values are equal in mathematics only are no such case: eager and float64 differ there, too.
    """
    original, new, x = make(**settings, height=23, width=37)
    torch.manual_seed(1)
    colours = torch.tensor([0.1, 0.7, 0.3])[torch.randint(3, (len(x), 1, 1, 1, 1))].expand(x.shape)
    striped = torch.tensor([0.1, 0.7])[torch.arange(x.shape[3]) // 5 % 2].view(-1, 1).expand(x.shape)

    def assert_same(content):
        torch.testing.assert_close(gradients(new, content)[0], gradients(original, content)[0], rtol=1e-4, atol=1e-6)

    for content in (colours, striped, torch.zeros_like(x)):
        assert_same(content)
    whole = {name: torch.randint(-1, 2, value.shape).float() for name, value in original.conv.named_parameters()}
    for model in (original, new):
        model.conv.load_state_dict(whole)  # with a bias that is no whole number, eager's values depend on when it is added
    assert_same(torch.randint(-1, 2, x.shape).float())


@pytest.mark.parametrize("settings", [{}, OTHERS], ids=["Winograd", "PyTorch"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_special_values(settings, value):
    """Outputs as PyTorch's, and gradients of x at the same places: of a window's NaNs, the last."""
    original, new, x = make(**settings)
    x[1, 2, 3, 4, 5] = x[2, 0, 0, 0, 0] = value
    with torch.no_grad():
        torch.testing.assert_close(new(x), original(x), equal_nan=True)
    expected, actual = gradients(original, x)[0], gradients(new, x)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_a_value_far_larger_than_all_others():
    """It leaves Winograd's rounding in its tiles, and there the direct way decides where gradients go."""
    original, new, x = make(height=23, width=37)
    x[1, 2, 3, 8, 20] = 1e5
    expected, actual = gradients(original, x)[0], gradients(new, x)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("column", [63, 64, 65])
def test_a_large_value_in_the_columns_that_two_stretches_read(column):
    """Tiles are worked on in stretches of 64 columns, whose last one reads two columns more."""
    original, new, x = make(height=23, width=80)
    x[1, 2, 3, 8, column] = 1e7
    expected, actual = gradients(original, x)[0], gradients(new, x)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"sum_dim": 0}, OTHERS], ids=["averages", "PyTorch"])
def test_only_what_is_asked_for(settings):
    _, new, x = make(**settings)
    leaves = [x.requires_grad_(), *new.parameters()]
    whole = torch.autograd.grad(new(x).sum(), leaves)
    for wanted in ({0}, {1}, {2}, {3}, {0, 2}, {1, 3}):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in wanted)
            leaf.grad = None
        new(x).sum().backward()
        for i, leaf in enumerate(leaves):
            assert (leaf.grad is not None) == (i in wanted)
            assert leaf.grad is None or torch.equal(leaf.grad, whole[i])


@pytest.mark.full
def test_compiled_training_of_averages():
    torch._dynamo.reset()
    _, new, x = make(sum_dim=0)
    compiled = torch.compile(new, fullgraph=True)
    for content in (x, x[:2]):
        for expected, actual in zip(gradients(new, content), gradients(compiled, content), strict=True):
            assert torch.equal(actual, expected)


def test_strides():
    """Gradients have the bits of those of a contiguous input and upstream gradient."""
    _, new, x = make()
    upstream = torch.linspace(-1, 1, len(x)).view(-1, 1, 1, 1)
    expected = gradients(new, x, upstream)
    last = x.to(memory_format=torch.channels_last_3d)
    strided = torch.stack([upstream, upstream], 1)[:, 0]
    for actual, wanted in zip(gradients(new, last, strided), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_a_divisor_that_does_not_commute_is_refused():
    for divisor in (0, float("nan"), float("inf"), 1e-40):
        with pytest.raises(ValueError, match="divisor"):
            load().ModelNew(8, 16, 3, divisor, 2, (16, 1, 1, 1), 1)
