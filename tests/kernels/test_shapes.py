"""One sweep of shapes: every variant at sizes, layers and constants that the judge does not ask for, outputs and gradients.

Kernel, pool and stride sizes are built in, so each new set of them costs a build; everything else is free. CUDA variants run in
check mode, which finds nothing, at the sizes at which the judge tries them, and at those where their kernels take other ways.
At the judge's sizes every stage of every pipeline is filled again: a mistake in how it is given back shows only then.
"""

import collections
import re
from pathlib import Path

import apart
import project_variants
import pytest
import torch
from right import assert_trains_right, gradients, load_variant, make, where

import cuda_emulator as emulator
from cuda_emulator import runtime
from playground import catalog
from playground.judge.precision import forbid_tf32

SUM_DIMS = (1, -4, (1,), [1], 0, 2, -1, (1, 2), (0, 1), (1, 2, 3, 4), None, ())
BIAS_SHAPES = (5, 1, 1, 1), (1, 5, 1, 1, 1), (1,), (1, 1, 1, 1), (4,), (2, 3, 4), (3, 1, 1, 1, 1), (3, 5, 1, 1, 2)
SHAPES = {
    "conv_pool_sigmoid_sum": {
        "odd": {"in_channels": 5, "out_channels": 7, "height": 41, "width": 29},
        "one window": {"batch_size": 1, "in_channels": 1, "out_channels": 1, "height": 6, "width": 6},
        "more samples": {"batch_size": 300, "height": 11, "width": 15},
        "more channels": {"in_channels": 35, "out_channels": 200},
        "larger images": {"batch_size": 1, "height": 401, "width": 1603},
        "tall": {"height": 300, "width": 6},
        "wide": {"height": 6, "width": 2000},
        "wide: several stretches": {"batch_size": 2, "in_channels": 3, "out_channels": 18, "height": 14, "width": 1603},
        "so many channels that stretches are short": {"batch_size": 1, "in_channels": 700, "height": 10, "width": 301},
        "kernel much larger than the window": {"kernel_size": (4, 7), "pool_kernel_size": (1, 2), "width": 900},
        "kernel and window not square": {"kernel_size": (5, 2), "pool_kernel_size": (2, 7)},
        "1 x 1": {"kernel_size": 1, "pool_kernel_size": 1, "out_channels": 17},
        "the window is the image": {"kernel_size": 4, "pool_kernel_size": 20, "height": 23, "width": 23},
    },
    "conv3d_div_max_gap_bias_sum": {
        "odd": {"in_channels": 5, "out_channels": 7, "depth": 9, "height": 15, "width": 19},
        "one window": {"batch_size": 1, "in_channels": 1, "out_channels": 1, "depth": 4, "height": 4, "width": 4},
        "more samples": {"batch_size": 150, "depth": 5, "height": 6, "width": 7},
        "more channels": {"in_channels": 19, "out_channels": 70},
        "larger images": {"batch_size": 1, "depth": 19, "height": 71, "width": 203},
        "negative divisor": {"divisor": -3.0},
        "integer divisor": {"divisor": -2},
        "small divisor": {"divisor": 1e-3},
        "odd windows": {"pool_size": (1, 3, 3), "width": 200},
        "kernel not cubic": {"kernel_size": (2, 5, 3), "pool_size": (1, 3, 2), "height": 20, "divisor": -1.5},
        "1 x 1 x 1": {"kernel_size": 1, "pool_size": 1},
        "several blocks and chunks": {"batch_size": 2, "depth": 8, "height": 41, "width": 150},
        "sum over the batch": {"sum_dim": 0},
        "sum over all, a wide bias": {"sum_dim": None, "bias_shape": (16, 1, 2, 3)},
        "one bias": {"bias_shape": (1,)},
        "a window of more than 256": {"kernel_size": 2, "pool_size": 7, "depth": 15, "height": 16, "width": 10},
        # A bias of (5, 1, 1, 1) makes five channels of one; there is one output channel, so it is not one value a channel.
        "a bias wider than the channels": {"bias_shape": (5, 1, 1, 1), "out_channels": 1},
        **{f"sum_dim {dim}": {"sum_dim": dim, "out_channels": 5} for dim in SUM_DIMS},
        **{
            f"bias {shape}, sum_dim {dim}": {"bias_shape": shape, "out_channels": 5, "sum_dim": dim}
            for shape in BIAS_SHAPES
            for dim in (1, 0)
        },
    },
    "alexnet_conv1": {
        "odd": {"height": 61, "width": 83},
        "one window": {"batch_size": 1, "height": 7, "width": 7},
        "more samples": {"batch_size": 300, "height": 19, "width": 23},
        "larger images": {"batch_size": 1, "height": 483, "width": 641},
        "tall": {"height": 900, "width": 8},
        "wide": {"height": 8, "width": 900},
        "several strips": {"batch_size": 2, "height": 19, "width": 300},
        # Other layers in the place of conv1; only the stride along the width is built in.
        "other channels, no bias": {"layer": (5, 33, 3, 4), "bias": False},
        "nothing square": {"layer": (5, 33, (4, 7), (3, 2), (0, 6)), "bias": False},
        "long strides": {"layer": (3, 16, (4, 7), (3, 4), (0, 6))},
        "more padding than kernel": {"layer": (2, 3, 2, 4, 9)},
        "dense": {"layer": (4, 40, 3, 1, 1)},
    },
}
OF_THE_DEFAULT_TIER = re.compile("odd|a bias.*|bias .*|sum_dim .*")  # nothing more is built for them
# Builds for a CPU with shorter vectors, or none but those that every x86-64 has: -march, and the flag of /proc/cpuinfo.
TARGETS = {"x86-64": "sse2", "haswell": "avx2"}
ON_OTHER_CPUS = {
    "conv_pool_sigmoid_sum": ("odd", "more channels", "wide: several stretches"),
    "conv3d_div_max_gap_bias_sum": ("odd", "several blocks and chunks", "negative divisor"),
    "alexnet_conv1": ("odd", "several strips"),
}

# (model, variants, KB of shared memory that a block may have, settings) of CUDA variants. In the place of conv1: a group of
# outputs that is not full, and channels in several chunks; a stride longer than the kernel, and nothing square; 400 taps. With
# the 163 KB of an A100 and the 99 of a GeForce RTX 30, 40 or 50, v4 and training_tensor_core have other stages and parts.
LAYERS = ("v5_hopper", "training_tensor_core")
LIMITED = ("v4_tensor_core", "training_tensor_core")
ONE_LAYER = {"layer": (5, 100, (3, 5), (2, 4), (1, 0)), "batch_size": 2, "height": 9, "width": 131}
NOT_TAKEN = {"layer": (5, 100, (3, 5), (1, 2), (1, 0)), "batch_size": 2, "height": 9, "width": 31}
CUDA_SHAPES = [
    ("alexnet_conv1", ("v4_tensor_core", *LAYERS), None, NOT_TAKEN),
    ("alexnet_conv1", LAYERS, None, ONE_LAYER),
    ("alexnet_conv1", LAYERS, None, {"layer": (2, 7, (2, 3), (6, 4), (0, 1)), "batch_size": 3, "height": 14, "width": 40}),
    ("alexnet_conv1", LAYERS, None, {"layer": (1, 3, (20, 20), (4, 4), (2, 2)), "batch_size": 1, "height": 40, "width": 44}),
    *(("alexnet_conv1", LIMITED, kb, {"batch_size": 1, "height": 67, "width": 63}) for kb in (163, 99)),
    *(
        ("conv_pool_sigmoid_sum", LIMITED, kb, {"batch_size": 2, "in_channels": 3, "out_channels": 5, "width": 421})
        for kb in (163, 99)
    ),
    *(
        ("conv3d_div_max_gap_bias_sum", LIMITED, kb, {"batch_size": 2, "depth": 16, "height": 8, "width": 16})
        for kb in (None, 163, 99)
    ),
]
# What a kernel fills once by design, its packed weights: (variant, kernel, kind) and how many places.
ONCE = {("alexnet_conv1/v4_tensor_core", "convolve", "cp.async"): None, ("alexnet_conv1/v5_hopper", "convolve", "mbarrier"): 1}


def is_pipelined(variant):
    """Whether it is a kernel of the ladder with a pipeline."""
    return variant.name[0] == "v" and any(each in variant.path.read_text() for each in ("cp.async", "mbarrier.init"))


def has_strict_kernels(variant):
    """Whether it launches other kernels where PyTorch forbids TF32."""
    return "STRICT" in variant.path.read_text()


def judge(model, variant, precisions, limit, settings):
    """In a process of its own: the variant is right in each precision, and its kernels have run."""
    counts_rounds = is_pipelined(variant) and settings == catalog.SETTINGS["emulator"][model.name]
    with where(variant, "check"):
        if limit:
            load_variant(variant.path).SHARED_LIMIT_KB = limit
        original, new, x = make(model, variant, **settings)
        for precision in precisions:
            if precision == "fp32":
                forbid_tf32()
            assert_trains_right(original, new, x, precision)
            if counts_rounds:
                with torch.no_grad():
                    new(x)
        assert bool(emulator.launches()) == (settings != NOT_TAKEN), "no kernel has run, or PyTorch was to compute"
        if counts_rounds:
            assert_each_stage_has_two_rounds(f"{model.name}/{variant.name}")


def assert_each_stage_has_two_rounds(name):
    """Of all launches so far in this process."""
    rounds, once = runtime.rounds(), collections.defaultdict(collections.Counter)
    assert rounds
    for kernel, places in rounds.items():
        for (kind, _), count in places.items():
            once[name, kernel.split("<")[0], kind][kernel] += count < 2
    for place, by_kernel in once.items():
        assert not by_kernel.total() or place in ONCE, f"used once: {place}, {by_kernel}"
        assert all(count in (0, ONCE.get(place) or count) for count in by_kernel.values()), by_kernel


def cuda_cases():
    """Every CUDA variant at the judge's sizes, in the full tier in strict precision, too; then CUDA_SHAPES."""
    for param in project_variants.variants("cuda"):
        model, variant = param.values
        settings = catalog.SETTINGS["emulator"][model.name]
        yield pytest.param(model, variant, ["tf32" if has_strict_kernels(variant) else "fp32"], None, settings, id=param.id)
        if has_strict_kernels(variant):
            strict = [model, variant, ["tf32", "fp32"], None, settings]
            yield pytest.param(*strict, id=f"{param.id}: strict", marks=pytest.mark.full)
    for name, variants, limit, settings in CUDA_SHAPES:
        model = catalog.find_model(name)
        for each in variants:
            words = ", ".join(f"{key} {value}" for key, value in settings.items())
            given = model, catalog.find_variant(model, each), ["tf32", "fp32"], limit, settings
            yield pytest.param(*given, id=f"{name}/{each}: {limit} KB, {words}", marks=pytest.mark.full)


@pytest.mark.parametrize("model, variant, precisions, limit, settings", [*cuda_cases()])
def test_cuda(model, variant, precisions, limit, settings):
    apart.run(judge, model, variant, precisions, limit, settings)


def cpu_cases():
    for param in project_variants.variants("cpu"):
        for name, settings in SHAPES[param.values[0].name].items():
            marks = [] if OF_THE_DEFAULT_TIER.fullmatch(name) else [pytest.mark.full]
            yield pytest.param(*param.values, settings, id=f"{param.id}: {name}", marks=marks)


@pytest.mark.parametrize("model, variant, settings", [*cpu_cases()])
def test_cpu(model, variant, settings):
    """And training gives the bits of inference."""
    original, new, x = make(model, variant, **settings)
    assert_trains_right(original, new, x)
    with torch.no_grad():
        inference = new(x)
        assert not new(x.requires_grad_()).requires_grad
    assert torch.equal(new(x).detach(), inference)
    new.requires_grad_(False)
    assert not new(x.detach()).requires_grad


@pytest.mark.full
@pytest.mark.parametrize("model, variant", project_variants.variants("cpu"))
@pytest.mark.parametrize("march", TARGETS)
def test_other_cpus(model, variant, march):
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or TARGETS[march] not in cpuinfo.read_text().split():
        pytest.skip(f"this CPU has no {TARGETS[march]}")
    for name in ON_OTHER_CPUS[model.name]:
        assert_trains_right(*make(model, variant, march, **SHAPES[model.name][name]))
    original, new, x = make(model, variant, march)
    x[(0,) * x.dim()], x[(1, 0, *[3] * (x.dim() - 2))] = torch.nan, torch.inf
    with torch.no_grad():
        torch.testing.assert_close(new(x), original(x), equal_nan=True)
    if model.name == "conv3d_div_max_gap_bias_sum":  # of equal values, the first gets the gradient
        ones = torch.ones_like(x)
        assert torch.equal(gradients(new, ones)[0] != 0, gradients(original, ones)[0] != 0)
