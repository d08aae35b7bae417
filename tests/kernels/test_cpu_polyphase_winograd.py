"""alexnet_conv1/cpu_polyphase_winograd: outputs and gradients at any size, and builds for other CPUs than this one."""

import copy
import functools
import platform

import pytest
import torch

from playground import catalog
from playground.judge.tolerance import Reference

MODEL = next(model for model in catalog.models() if model.name == "alexnet_conv1")
VARIANT = next(variant for variant in catalog.variants(MODEL) if variant.name == "cpu_polyphase_winograd")
NATIVE = ("-march=native", "-fopenmp")
load_variant = functools.cache(catalog.load_variant)

# (batch, channels, height, width) with the layer in the place of conv1.
CASES = {
    "own layer": ((3, 3, 35, 50), {}),
    "several strips": ((2, 3, 19, 300), {}),
    "nothing square": (
        (2, 5, 17, 23),
        {"in_channels": 5, "out_channels": 33, "kernel_size": (4, 7), "stride": (3, 2), "padding": (0, 6), "bias": False},
    ),
    "dense": ((2, 4, 12, 13), {"in_channels": 4, "out_channels": 40, "kernel_size": 3, "stride": 1, "padding": 1}),
}


def layer(options):
    torch.manual_seed(0)
    own = {"in_channels": 3, "out_channels": 96, "kernel_size": 11, "stride": 4, "padding": 2}
    return torch.nn.Conv2d(**own | options)


def variant_of(conv, flags=NATIVE):
    new = load_variant(VARIANT.path).ModelNew()
    new.conv1, new.flags = copy.deepcopy(conv), flags
    return new


def gradients(module, x, upstream):
    """The output, and the gradients of input and parameters."""
    x = x.detach().clone().requires_grad_()
    output = module(x)
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], upstream.to(output.dtype))]


def assert_right(conv, new, x):
    upstream = torch.randn(conv(x).shape)
    exact = gradients(copy.deepcopy(conv).double(), x.double(), upstream)
    for truth, eager, actual in zip(exact, gradients(conv, x, upstream), gradients(new, x, upstream), strict=True):
        complaint = Reference(truth, eager).compare("the result", actual).complaint
        assert complaint is None, complaint


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    shape, options = CASES[case]
    conv = layer(options)
    assert_right(conv, variant_of(conv), torch.randn(shape))


@pytest.mark.full
@pytest.mark.parametrize("target, feature", [("haswell", "avx2"), ("x86-64", "sse2")])
def test_other_cpus(target, feature):
    """A build for a CPU with shorter vectors, or none but those that every one has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("a build for x86-64")
    if feature == "avx2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2")
    conv = layer({})
    assert_right(conv, variant_of(conv, (f"-march={target}", "-fopenmp")), torch.randn(3, 3, 35, 50))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_belongs(value):
    """In the input it reaches some taps, in the upstream gradient one sample of the input; float64 says which."""
    conv = layer({})
    new, x, upstream = variant_of(conv), torch.randn(2, 3, 35, 50), torch.randn(2, 96, 8, 11)
    x[0, 1, 20, 30] = value
    upstream[1, 5, 4, 6] = value
    exact = gradients(copy.deepcopy(conv).double(), x.double(), upstream)
    for truth, actual in zip(exact, gradients(new, x, upstream), strict=True):
        assert torch.equal(torch.isfinite(truth), torch.isfinite(actual))
        assert torch.isfinite(truth).any()
