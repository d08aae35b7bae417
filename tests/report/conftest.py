"""Documents as the driver makes them: one of a run on a GPU, one of a run on a machine without."""

import pytest

RATIOS = {"eager": 79.6, "channels_last": 64.3, "compile": 49.37, "eager_fp32": 79.6, "compile_fp32": 50.2}
EAGER_MS = 11.3


def spread(median):
    return {"median": median, "p20": 0.99 * median, "p80": 1.02 * median}


def timings(median, peak_mib, scale=1.0):
    """What is known of forward, or of a training mode. The best baseline is torch.compile."""
    best = scale * RATIOS["compile"]
    return {
        "outcome": {
            "verdict": "win" if best > 1 else "loss",
            "against": "compile",
            **{"ratio": best, "low": 0.99 * best, "high": 1.01 * best},
            "precise": True,
            "any_precision": None,
            "reason": None,
        },
        "control": {"ratio": 1.0, "low": 0.99, "high": 1.01},
        **{"rounds": 9, "calls": 41, "rechecked": 2, "back_to_back_ms": 0.9 * median},
        "clocks": None,
        "notes": [],
        "time_ms": spread(median),
        "peak_mib": peak_mib,
        **{"speedup_proof": None, "outer": None},
        "speedup": {
            name: {"ratio": scale * ratio, "low": 0.99 * scale * ratio, "high": 1.01 * scale * ratio}
            for name, ratio in RATIOS.items()
        },
        "baselines_ms": {name: spread(scale * ratio * median) for name, ratio in RATIOS.items()},
    }


def error(max_error, allowed=2.4e-5, eager_error=1.2e-5):
    return {"max_error": max_error, "allowed": allowed, "eager_error": eager_error}


def passed(model, variant, median=0.142, inputs=(128, 8, 384, 384), settings=None, ran_on="cuda"):
    return {
        "model": model,
        "variant": variant,
        "backend": "cpu" if variant.startswith("cpu_") else "cuda",
        "ran_on": ran_on,
        "precision": "tf32",
        "variant_precision": None,
        "shape": {"inputs": [list(inputs)], "settings": settings or {}},
        "verdict": "pass",
        "reason": None,
        "details": "",
        "standard": "drop-in",
        "standards": {name: {"verdict": "pass", "reasons": []} for name in ("forward", "drop_in")},
        "caveats": [],
        "accuracy": {"class": "as PyTorch", "error": 1.1e-5, "limit": 2.4e-5},
        "weights": "by name",
        "weights_differ": None,
        "printed": "",
        "accepted_races": {},
        "findings": [],
        "source_sha256": "0" * 64,
        "check": {
            **error(1.1e-5),
            "gradients": {"conv.weight": error(3.21e-6), "conv.bias": error(0.0), "input0": error(2.2e-5)},
            "mutants_rejected": None,
        },
        "build_seconds": 6.7,
        "built": True,
        **timings(median, 613.25),
        "baselines_unavailable": {},
        "floor_ms": 0.139,
        "floor_bound": "memory",
        "graphed": None,
        **{"ptxas": None, "work": None, "ceilings": None},
        "training": {"weights": timings(4.567, 1230.0, scale=0.11), "weights_and_input": timings(5.1, 2400.0, scale=0.1)},
    }


def not_passed(verdict, reason, **changes):
    result = passed(**changes)
    result.update(verdict=verdict, reason=reason, time_ms=None, speedup=None, baselines_ms={}, training=None, peak_mib=None)
    result.update(outcome=None, rounds=None, calls=None, rechecked=None, back_to_back_ms=None)
    if verdict == "fail":
        result["check"].update(max_error=0.123456, gradients={"conv.weight": error(0.5), "conv.bias": error(None)})
    else:
        result.update(check=None, build_seconds=None, built=False, floor_ms=None, floor_bound=None)
    return result


def environment():
    return {
        "date": "2026-11-20T12:34:56+00:00",
        "gpu": "NVIDIA H200",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "driver": "580.95.05",
    }


@pytest.fixture
def gpu_document():
    """Three models on a GPU, everything of full size; one variant fails, one ends in an error."""
    unsupported = passed("alexnet_conv1", "v1_direct", 20.456, (256, 3, 224, 224), {"batch_size": 256})
    unsupported["check"]["gradients"] = {"unsupported": "v1_direct has no backward"}
    unsupported["training"] = None
    unsupported["built"] = False
    unsupported["build_seconds"] = 0.3
    unsupported["precision"] = "fp32"
    del unsupported["speedup"]["compile"], unsupported["baselines_ms"]["compile"]
    unsupported["baselines_unavailable"] = {"compile": "torch.compile: no working C++ compiler was found"}
    for ratio in unsupported["speedup"].values():
        ratio.update({key: value / 400 for key, value in ratio.items()})
    eager = unsupported["speedup"]["channels_last"]
    unsupported["outcome"].update(eager, verdict="loss", against="channels_last")
    video = "conv3d_div_max_gap_bias_sum"
    return {
        "schema": 1,
        "environment": environment(),
        "results": [
            passed("conv_pool_sigmoid_sum", "v1_fused_tail", 7.0, settings={"batch_size": 128}),
            passed("conv_pool_sigmoid_sum", "v2_single_kernel"),
            not_passed(
                "fail",
                "output: error 0.123 is more than the allowed 2.40e-05 on normal inputs, worst at sample 3; the gradient of "
                "conv.bias is not a number",
                model=video,
                variant="v1_fused_tail",
                inputs=(128, 8, 16, 64, 64),
            ),
            not_passed(
                "error",
                "build: kernel.cu(12): error: identifier \"wodth\" is undefined",
                model=video,
                variant="v2_fused_pool",
                inputs=(128, 8, 16, 64, 64),
            ),
            unsupported,
        ],
    }  # fmt: skip


@pytest.fixture
def cpu_document():
    """A machine without a GPU: CUDA variants are skipped, CPU variants ran at smaller sizes."""
    small = passed("conv_pool_sigmoid_sum", "cpu_box_sums", 9.87, (4, 8, 384, 384), {"batch_size": 4}, "cpu")
    small.update(floor_ms=None, floor_bound=None, precision="fp32", training=None, peak_mib=None)
    reason = "no CUDA GPU in this machine; run it on one, or with --device emulator"
    skipped = [
        not_passed("skipped", reason, model="conv_pool_sigmoid_sum", variant=variant)
        for variant in ("v1_fused_tail", "v2_single_kernel")
    ]
    for result in skipped:
        result.update(ran_on=None, shape=None)
    emulated = passed(
        "conv_pool_sigmoid_sum", "v3_tiled", 1.0, (2, 8, 26, 27), {"batch_size": 2, "height": 26, "width": 27}, "emulator"
    )
    emulated.update(outcome=None, rounds=None, calls=None, rechecked=None, back_to_back_ms=None)
    emulated.update(time_ms=None, speedup=None, baselines_ms={}, training=None, floor_ms=None, floor_bound=None, peak_mib=None)
    return {
        "schema": 1,
        "environment": {"date": "2026-11-21", "gpu": None, "cpu": "AMD EPYC 9654", "torch": "2.13.0+cpu", "cuda": None},
        "results": [*skipped, emulated, small],
    }


@pytest.fixture(params=["gpu", "cpu"])
def document(request):
    return request.getfixturevalue(f"{request.param}_document")


@pytest.fixture
def make_passed():
    return passed


@pytest.fixture
def make_environment():
    return environment
