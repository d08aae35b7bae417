"""Which precision an error looks like."""

import pytest
import torch

from playground.judge.accuracy import likely_precision
from playground.judge.precision import LOWER

A, B = (torch.randn(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
LOWERED = {name: [lower(A) @ lower(B)] for name, lower in LOWER.items()}


@pytest.mark.parametrize("name, word", [("fp16", "TF32 or fp16"), ("tf32", "TF32 or fp16"), ("bf16", "bf16")])
def test_operands_in_a_lower_precision(name, word):
    actual = (LOWER[name](A).float() @ LOWER[name](B).float()).float()
    assert likely_precision(A @ B, actual, LOWERED) == f"it is what operands in {word} give"


def test_fp16_is_told_from_tf32_where_its_range_ends():
    a = 1e-6 * A
    lowered = {name: [lower(a) @ lower(B)] for name, lower in LOWER.items()}
    assert likely_precision(a @ B, (a.half().float() @ B.half().float()), lowered) == "it is what operands in fp16 give"


def test_the_size_of_the_error_alone():
    truth = A @ B
    deviation = (LOWERED["bf16"][0] - truth).flip(0)
    assert likely_precision(truth, (truth + deviation).float(), LOWERED) == "an error of this size is that of bf16"


def test_a_mistake_in_a_few_elements_is_no_rounding():
    """However large it is in the mean; nor is one that leaves many elements right."""
    truth = A @ B
    size = (LOWERED["bf16"][0] - truth).square().mean().sqrt().item()
    few, half = torch.zeros_like(truth), torch.zeros_like(truth)
    few[0, :4], half[::2] = size * 20, size * 2**0.5
    for deviation in few, half:
        assert 0.5 < deviation.square().mean().sqrt().item() / size < 2
        assert likely_precision(truth, (truth + deviation).float(), LOWERED) is None


@pytest.mark.parametrize("factor", [1.5, 1 + 1e-6])
def test_another_error_is_given_no_name(factor):
    truth = A @ B
    assert likely_precision(truth, (factor * truth), LOWERED) is None


def test_what_has_no_error_to_compare():
    integers = torch.tensor([1, 2])
    assert likely_precision(integers, integers + 1, {"fp16": [integers]}) is None
    truth = torch.full((3,), float("nan"), dtype=torch.float64)
    assert likely_precision(truth, truth, {"fp16": [truth]}) is None
