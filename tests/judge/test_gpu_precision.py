"""Which precision the original of a problem is judged in, on a GPU that has TF32."""

import pytest
import torch
from problems import pairs

from playground import catalog
from playground.worker import WorkerProcess

HAS_TF32 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = pytest.mark.skipif(not HAS_TF32, reason="needs a GPU of compute capability 8.0 or later")


def described(problem, tmp_path, strict):
    with WorkerProcess("referee", 120) as referee:
        arguments = {"problem": str(problem), "settings": {}, "place": "cuda", "seed": 1, "strict": strict}
        return referee.ask("load", **arguments, weights=str(tmp_path / "weights"))["precision"]


@pytest.mark.parametrize(
    "name, precision",
    [
        *(("conv1d_dilated", "tf32"), ("conv_transpose3d", "tf32"), ("lstm", "tf32"), ("gru", "tf32")),
        *(("matmul", "fp32"), ("causal_attention", "fp32"), ("gelu", "fp32")),
    ],
)
def test_pytorch_permits_tf32_to_convolutions_and_recurrences_and_not_to_products(name, precision, tmp_path):
    assert described(pairs.folder() / name / "problem.py", tmp_path, strict=False) == precision


@pytest.mark.parametrize("name", ["conv1d_dilated", "lstm"])
def test_strict(name, tmp_path):
    assert described(pairs.folder() / name / "problem.py", tmp_path, strict=True) == "fp32"


def test_our_models_are_tf32(tmp_path):
    assert described(catalog.find_model("alexnet_conv1").path, tmp_path, strict=False) == "tf32"
