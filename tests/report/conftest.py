"""Documents as the driver makes them: one of a run on a GPU, one of a run on a machine without."""

import pytest
from made import UNTIMED, document_of, make_passed, not_passed


@pytest.fixture
def gpu_document():
    """Three models on a GPU, everything of full size; one variant fails, one ends in an error."""
    unsupported = make_passed("alexnet_conv1", "v1_direct", 20.456, (256, 3, 224, 224), {"batch_size": 256})
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
    return document_of(
        make_passed("conv_pool_sigmoid_sum", "v1_fused_tail", 7.0, settings={"batch_size": 128}),
        make_passed("conv_pool_sigmoid_sum", "v2_single_kernel"),
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
            'build: kernel.cu(12): error: identifier "wodth" is undefined',
            model=video,
            variant="v2_fused_pool",
            inputs=(128, 8, 16, 64, 64),
        ),
        unsupported,
    )


@pytest.fixture
def cpu_document():
    """A machine without a GPU: CUDA variants are skipped, CPU variants ran at smaller sizes."""
    small = make_passed("conv_pool_sigmoid_sum", "cpu_box_sums", 9.87, (4, 8, 384, 384), {"batch_size": 4}, "cpu")
    small.update(floor_ms=None, floor_bound=None, precision="fp32", training=None, peak_mib=None)
    reason = "no CUDA GPU in this machine; run it on one, or with --device emulator"
    skipped = [
        not_passed("skipped", reason, model="conv_pool_sigmoid_sum", variant=variant)
        for variant in ("v1_fused_tail", "v2_single_kernel")
    ]
    for result in skipped:
        result.update(ran_on=None, shape={"inputs": [], "settings": {}})
    emulated = make_passed(
        "conv_pool_sigmoid_sum", "v3_tiled", 1.0, (2, 8, 26, 27), {"batch_size": 2, "height": 26, "width": 27}, "emulator"
    )
    emulated.update(UNTIMED, floor_ms=None, floor_bound=None)
    return {
        "schema": 1,
        "environment": {"date": "2026-11-21", "gpu": None, "cpu": "AMD EPYC 9654", "torch": "2.13.0+cpu", "cuda": None},
        "results": [*skipped, emulated, small],
    }


@pytest.fixture(params=["gpu", "cpu"])
def document(request):
    return request.getfixturevalue(f"{request.param}_document")
