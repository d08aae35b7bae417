"""One sweep of shapes: every variant at sizes, layers and constants that the judge does not ask for, outputs and gradients.

Kernel, pool and stride sizes are built in, so each new set of them costs a build; everything else is free. CUDA variants run in
check mode, which finds nothing, at the sizes at which the judge tries them, and at those where their kernels take other ways.
"""

from pathlib import Path

import apart
import project_variants
import pytest
import torch
from right import assert_trains_right, gradients, load_variant, make, where

import cuda_emulator as emulator
from playground import catalog
from playground.judge.precision import forbid_tf32

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
CUDA_SHAPES = [
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
NOT_TAKEN = {"layer": (5, 100, (3, 5), (1, 2), (1, 0)), "batch_size": 2, "height": 9, "width": 31}


def has_strict_kernels(variant):
    """Whether it launches other kernels where PyTorch forbids TF32."""
    return "STRICT" in variant.path.read_text()


def judge(model, variant, mode, precisions, limit, settings):
    """In a process of its own: the variant is right in each precision, and its kernels have run."""
    with where(variant, mode):
        if limit:
            load_variant(variant.path).ModelNew.shared_limit_kb = limit
        original, new, x = make(model, variant, **settings)
        for precision in precisions:
            if precision == "fp32":
                forbid_tf32()
            assert_trains_right(original, new, x, precision)
        assert bool(emulator.launches()) == (settings != NOT_TAKEN), "no kernel has run, or PyTorch was to compute"


def cuda_cases():
    """Every CUDA variant at the judge's sizes, in fast mode and strict precision in the full tier; then CUDA_SHAPES."""
    for param in project_variants.variants("cuda"):
        model, variant = param.values
        settings = catalog.SETTINGS["emulator"][model.name]
        first, *others = ("tf32", "fp32") if has_strict_kernels(variant) else ("fp32",)
        yield pytest.param(model, variant, "check", [first], None, settings, id=f"{param.id}: check")
        fast = [first, *others]
        yield pytest.param(model, variant, "fast", fast, None, settings, id=f"{param.id}: fast", marks=pytest.mark.full)
    for name, variants, limit, settings in CUDA_SHAPES:
        model = catalog.find_model(name)
        for each in variants:
            words = ", ".join(f"{key} {value}" for key, value in settings.items())
            given = model, catalog.find_variant(model, each), "check", ["tf32", "fp32"], limit, settings
            yield pytest.param(*given, id=f"{name}/{each}: {limit} KB, {words}", marks=pytest.mark.full)


@pytest.mark.parametrize("model, variant, mode, precisions, limit, settings", [*cuda_cases()])
def test_cuda(model, variant, mode, precisions, limit, settings):
    apart.run(judge, model, variant, mode, precisions, limit, settings)


@pytest.mark.full
@pytest.mark.parametrize("name", ["v4_tensor_core", *LAYERS])
def test_a_layer_that_the_kernels_do_not_take(name):
    model = catalog.find_model("alexnet_conv1")
    apart.run(judge, model, catalog.find_variant(model, name), "fast", ["fp32"], None, NOT_TAKEN)


@pytest.mark.full
@pytest.mark.parametrize(
    "model, variant, settings",
    [
        pytest.param(*param.values, settings, id=f"{param.id}: {name}")
        for param in project_variants.variants("cpu")
        for name, settings in SHAPES[param.values[0].name].items()
    ],
)
def test_cpu(model, variant, settings):
    assert_trains_right(*make(model, variant, **settings))


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
