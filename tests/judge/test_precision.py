"""Rounding to TF32, bit by bit, and which operators see rounded operands."""

import pytest
import torch
import torch.nn.functional as F

from playground.judge.precision import Perturbed, RoundedOperands, round_to_tf32

# bits of a float32 -> bits of the nearest TF32 value: 13 bits are dropped, 0x1000 is half of the last that stays
BITS = {
    "one": (0x3F800000, 0x3F800000),
    "below a tie": (0x3F800FFF, 0x3F800000),
    "a tie, even": (0x3F801000, 0x3F802000),
    "a tie, odd": (0x3F803000, 0x3F804000),
    "above a tie": (0x3F801001, 0x3F802000),
    "negative, below a tie": (0xBF800FFF, 0xBF800000),
    "negative, a tie": (0xBF801000, 0xBF802000),
    "carries into the exponent": (0x3FFFF000, 0x40000000),
    "zero": (0x00000000, 0x00000000),
    "negative zero": (0x80000000, 0x80000000),
    "smallest subnormal": (0x00000001, 0x00000000),
    "subnormal, a tie": (0x00001000, 0x00002000),
    "negative subnormal": (0x80000FFF, 0x80000000),
    "largest subnormal": (0x007FFFFF, 0x00800000),
    "largest number": (0x7F7FFFFF, 0x7F800000),
    "infinity": (0x7F800000, 0x7F800000),
    "negative infinity": (0xFF800000, 0xFF800000),
}


def from_bits(bits):
    """A float32 tensor of one element."""
    return torch.tensor([bits - (1 << 32) if bits >> 31 else bits], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("bits, expected", BITS.values(), ids=BITS.keys())
def test_bits(bits, expected):
    assert round_to_tf32(from_bits(bits)).view(torch.int32).item() & 0xFFFFFFFF == expected


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFF800FFF, 0x7FFFFFFF])
def test_nan_stays_nan(bits):
    assert torch.isnan(round_to_tf32(from_bits(bits))).all()


@pytest.mark.parametrize("bits, expected", BITS.values(), ids=BITS.keys())
def test_float64_is_rounded_to_the_same_value_and_stays_float64(bits, expected):
    rounded = round_to_tf32(from_bits(bits).double())
    assert rounded.dtype == torch.float64
    assert torch.equal(rounded, from_bits(expected).double())


def test_error_is_at_most_half_a_unit():
    x = torch.randn(10000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    relative = (round_to_tf32(x) - x).abs() / x.abs()
    assert 2**-12 < relative.max() <= 2**-11 * (1 + 2**-12)
    assert torch.equal(round_to_tf32(round_to_tf32(x)), round_to_tf32(x))


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# name -> (function, operands that are rounded, operands that are not)
PRODUCTS = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 3, 9), (4, 3, 3)], [(4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2), [(2, 3, 9, 8), (4, 3, 3, 3)], [(4,)]),
    "conv3d": (F.conv3d, [(2, 3, 5, 6, 7), (4, 3, 3, 3, 3)], [(4,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 5, 5), (3, 4, 3, 3)], [(4,)]),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=2), [(2, 4, 6, 6), (4, 2, 3, 3)], []),
    "linear": (F.linear, [(5, 8), (4, 8)], [(4,)]),
    "linear of three dimensions": (F.linear, [(2, 5, 8), (4, 8)], [(4,)]),
    "linear without bias": (F.linear, [(5, 8), (4, 8)], []),
    "matmul": (torch.matmul, [(5, 6), (6, 7)], []),
    "batched matmul": (torch.matmul, [(3, 5, 6), (3, 6, 7)], []),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(3, 5, 6), (3, 6, 7)], []),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b), [(3, 5, 6), (3, 6, 7)], [(3, 5, 7)]),
}


@pytest.mark.parametrize("function, rounded, exact", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_products_see_rounded_operands_forward_and_backward(function, rounded, exact):
    operands = [normal(*shape) for shape in rounded]
    others = [normal(*shape) for shape in exact]
    with RoundedOperands():
        result = function(*operands, *others)
        upstream = torch.randn_like(result)
        gradients = torch.autograd.grad(result, operands, upstream)
    by_hand = [round_to_tf32(operand.detach()).requires_grad_() for operand in operands]
    expected = function(*by_hand, *others)
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
    expected_gradients = torch.autograd.grad(expected, by_hand, round_to_tf32(upstream))
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(result, function(*operands, *others), rtol=1e-7, atol=1e-7), "the rounding must show"


OTHERS = {
    "sigmoid": torch.sigmoid,
    "sum": torch.sum,
    "product of elements": lambda x: x * x,
    "max pooling": lambda x: F.max_pool2d(x, 2),
    "average pooling": lambda x: F.avg_pool2d(x, 2),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS.keys())
def test_other_operators_are_exact(function):
    x = normal(2, 3, 8, 8)
    plain = function(x)
    upstream = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, x, upstream)
    with RoundedOperands():
        result = function(x)
        gradients = torch.autograd.grad(result, x, upstream)
    assert torch.equal(result, plain)
    assert torch.equal(gradients[0], expected[0])


def test_nothing_is_rounded_after_the_context_is_left():
    a, b = normal(5, 6), normal(6, 7)
    before = a @ b
    with RoundedOperands():
        a @ b
    assert torch.equal(a @ b, before)


def test_perturbed_results_are_a_few_units_off_and_repeatable():
    x = torch.rand(4, 8, dtype=torch.float64)
    linear = torch.nn.Linear(8, 3).double()
    with torch.no_grad():
        exact = torch.tanh(linear(x))
        with Perturbed(seed=1):
            first = torch.tanh(linear(x))
        with Perturbed(seed=1):
            again = torch.tanh(linear(x))
        with Perturbed(seed=2):
            other = torch.tanh(linear(x))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0 < (first - exact).abs().max() < 100 * torch.finfo(torch.float32).eps
