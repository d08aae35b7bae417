"""Rounding to TF32, bit by bit, and which operators see rounded operands."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F

from playground.judge.precision import (
    FAMILIES,
    Families,
    Nudged,
    Perturbed,
    RoundedOperands,
    RoundedResults,
    round_to_tf32,
    tf32_families,
)
from playground.judge.tolerance import Reference
from tests.kernels import apart

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
    """In float64 it is rounded to the same value and stays float64."""
    assert round_to_tf32(from_bits(bits)).view(torch.int32).item() & 0xFFFFFFFF == expected
    rounded = round_to_tf32(from_bits(bits).double())
    assert rounded.dtype == torch.float64
    assert torch.equal(rounded, from_bits(expected).double())


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFF800FFF, 0x7FFFFFFF])
def test_nan_stays_nan(bits):
    assert torch.isnan(round_to_tf32(from_bits(bits))).all()


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
    assert not torch.allclose(result, function(*operands, *others), rtol=1e-7, atol=1e-7), (
        "it must show, and nothing is rounded any more"
    )


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


def test_perturbed_results_are_a_few_units_off_and_repeatable():
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    linear = torch.nn.Linear(8, 3)

    def run(seed, dtype=torch.float32):
        with torch.no_grad(), Perturbed(seed, dtype):
            return torch.tanh(linear(x)).double()

    with torch.no_grad():
        exact = torch.tanh(linear.double()(x.double()))
    linear.float()
    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    assert 1 < (run(1) - exact).abs().max() / torch.finfo(torch.float32).eps < 100
    assert 1 < (run(1, torch.bfloat16) - exact).abs().max() / torch.finfo(torch.bfloat16).eps < 100


def test_every_element_is_perturbed_by_itself():
    ones = torch.ones(5_000_000)
    with Perturbed(3):
        deviation = (ones * 1 - 1) / (Perturbed.UNITS * torch.finfo(torch.float32).eps)
    assert torch.equal(deviation.abs().round(), ones)
    assert abs(deviation.sum().item()) < 6 * 5_000_000**0.5
    assert (deviation[1:] * deviation[:-1]).mean().abs() < 0.01


SUMS = {
    "sum": lambda x, ones: x.sum(),
    "mean": lambda x, ones: x.mean(),
    "over a dimension": lambda x, ones: x.view(1, 3).sum(1),
    "mean of a dimension": lambda x, ones: x.view(1, 3).mean(1),
    "running": lambda x, ones: x.cumsum(0)[-1],
    "dot": lambda x, ones: x @ ones,
    "matrix and vector": lambda x, ones: x.view(1, 3) @ ones,
    "added": lambda x, ones: torch.addmv(x[:1], x[1:].view(1, 2), ones[1:]),
}


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS.keys())
def test_the_terms_of_a_sum_are_perturbed_and_not_only_the_little_that_is_left(add):
    x, ones, errors = torch.tensor([1000.0, -1000.0, 1e-3]), torch.ones(3), []
    for seed in range(6):
        with Perturbed(seed):
            errors.append((add(x, ones) / add(torch.tensor([0, 0, 1.0]), ones) - 1e-3).abs().max().item())
    assert 5e-5 < max(errors) < 5e-3


@pytest.mark.parametrize("samples", [3, 32])
def test_another_order_of_adding_is_right_where_terms_cancel(samples):
    """The gradient of a bias of channels that are added up: all its elements are one and the same sum."""
    wrong = 0
    for seed in range(100):
        torch.manual_seed(seed)
        bias, upstream = torch.zeros(16, requires_grad=True), torch.randn(samples)

        results = []
        for mode in (contextlib.nullcontext(), Perturbed(0), Perturbed(1)):
            with mode:
                results += torch.autograd.grad((torch.zeros(samples, 16) + bias).sum(1), bias, upstream)
        reference = Reference(upstream.double().sum().expand(16), *results)
        for order in (upstream, upstream.flip(0), upstream[torch.randperm(samples)]):
            added = functools.reduce(torch.add, order)
            wrong += reference.compare("the gradient", added.expand(16)).complaint is not None
    assert wrong == 0


def test_a_large_expanded_tensor_takes_no_more_room():
    x = torch.rand(3, 1).expand(3, 1 << 40)
    perturbed = Perturbed(1)._perturbed(x)
    assert perturbed.shape == x.shape and perturbed.stride() == x.stride() and (perturbed[:, 0] != x[:, 0]).all()
    whole = torch.ones(5_000_000).as_strided((1, 5_000_000), (0, 1))
    assert (Perturbed(1)._perturbed(whole) != whole).all()


def test_a_sparse_operand_is_perturbed():
    x = torch.eye(3).to_sparse()
    with Perturbed(1):
        product = torch.sparse.mm(x, torch.eye(3))
    assert not torch.equal(product, torch.eye(3))
    torch.testing.assert_close(product, torch.eye(3))


def test_the_opposite_of_a_nudge_cancels_in_the_sum():
    """What is left is the square of a unit."""
    x = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    runs = []
    for units in (24, -24):
        with Nudged(5, units):
            runs.append(torch.tanh(3 * x))
    exact = torch.tanh(3 * x)
    assert all(1e-7 < (run - exact).abs().max() < 1e-5 for run in runs)
    assert (runs[0] + runs[1] - 2 * exact).abs().max() < 1e-10


def test_a_nudge_is_for_float64_and_a_perturbation_for_float32():
    x = torch.rand(100)
    with Nudged(5, 24):
        assert torch.equal(x * 1, x) and not torch.equal(x.double() * 1, x.double())
    with Perturbed(5):
        assert torch.equal(x.double() * 1, x.double()) and not torch.equal(x * 1, x)


def test_perturbed_gradients():
    x = torch.rand(6, requires_grad=True)
    with Perturbed(1):
        (gradient,) = torch.autograd.grad((x * x).sum(), x)
    assert not torch.equal(gradient, 2 * x)
    torch.testing.assert_close(gradient, 2 * x, rtol=1e-5, atol=0)


# name -> (layer, input, the family of its products)
LAYERS = {
    "conv": (torch.nn.Conv1d(3, 4, 3), (2, 3, 8), "convolution"),
    "linear": (torch.nn.Linear(8, 3), (4, 8), "product"),
    "lstm": (torch.nn.LSTM(4, 5), (3, 2, 4), "recurrence"),
    "gru": (torch.nn.GRU(4, 5, num_layers=2), (3, 2, 4), "recurrence"),
    "rnn": (torch.nn.RNN(4, 5), (3, 2, 4), "recurrence"),
    "attention": (torch.nn.MultiheadAttention(8, 2), (5, 2, 8), "product"),
    "encoder": (torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), (2, 5, 8), "product"),
}


def forward_and_backward(layer, x):
    x = x.clone().requires_grad_()
    result = layer(x, x, x) if isinstance(layer, torch.nn.MultiheadAttention) else layer(x)
    result = result if isinstance(result, torch.Tensor) else result[0]
    upstream = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return result, torch.autograd.grad(result, [x, *(p for p in layer.parameters())], upstream)


@pytest.mark.parametrize("layer, shape, family", LAYERS.values(), ids=LAYERS.keys())
def test_each_family_is_rounded_where_it_is_permitted(layer, shape, family):
    layer, x = copy.deepcopy(layer).double(), torch.randn(shape, dtype=torch.float64)
    exact, gradients = forward_and_backward(layer, x)
    for permitted in FAMILIES:
        with RoundedOperands({permitted}):
            result, rounded = forward_and_backward(layer, x)
        same = [torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(rounded, gradients, strict=True)]
        if permitted == family:
            assert not torch.allclose(result, exact, rtol=1e-7, atol=1e-7)
            assert not all(same)
        else:
            assert torch.allclose(result, exact, rtol=1e-12, atol=1e-12)
            assert all(same)


def test_without_gradients_attention_is_taken_apart_too():
    layer, x = copy.deepcopy(LAYERS["encoder"][0]).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        exact = layer(x)
        with RoundedOperands({"product"}):
            rounded = layer(x)
    assert 1e-6 < (rounded - exact).abs().max() < 1e-2


def test_a_linear_layer_behind_a_recurrent_one_is_no_recurrence():
    lstm, linear = torch.nn.LSTM(4, 5).double(), torch.nn.Linear(5, 3).double()
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    upstream = torch.randn(3, 2, 3, dtype=torch.float64)
    with RoundedOperands({"product"}):
        hidden = lstm(x)[0]
        (weight,) = torch.autograd.grad(linear(hidden), linear.weight, upstream, retain_graph=True)
    assert torch.equal(hidden, lstm(x)[0])
    expected = round_to_tf32(upstream.flatten(0, 1)).T @ round_to_tf32(hidden.flatten(0, 1))
    torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["conv", "linear", "attention"])
def test_families_that_a_model_uses(name):
    layer, shape, family = LAYERS[name]
    with Families() as families, torch.no_grad():
        x = torch.randn(shape)
        layer(x, x, x) if name == "attention" else layer(x)
    assert families.found & set(FAMILIES) == {family}


def test_no_tf32_on_the_cpu():
    assert tf32_families(torch.device("cpu")) == frozenset()


def test_forbidding_tf32_sets_every_family_and_the_older_flags_can_be_read():
    """As many originals do, to set cuDNN's for a while: PyTorch raises where the flags of both kinds differ."""
    script = """
import torch
from playground import modes
from playground.judge import precision
from playground.clock import baselines, prepared

def older():
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()

def of_families():
    return {setting.fp32_precision for setting in precision.FAMILIES.values()}

usual, without = (True, False, "highest"), (False, False, "highest")
assert older() == usual
with precision.without_tf32(torch.device("cuda")):
    assert (older(), of_families()) == (without, {"ieee"})
for name, expected in (("eager_fp32", without), ("eager+tf32", (True, True, "high"))):
    with prepared.precision_of(baselines.named(name)):
        assert older() == expected
assert older() == usual
modes.set_fp32_precision({torch.backends.cuda.matmul: "tf32"})
precision.forbid_tf32()
assert (older(), of_families()) == (without, {"ieee"})
"""
    apart.run(script)


@pytest.mark.parametrize("name, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounded_results_are_kept_in_that_precision(name, dtype):
    x = torch.randn(4, 8, dtype=torch.float64)
    with RoundedResults(name):
        result = torch.exp(x).sum(1)
    by_hand = torch.exp(x).to(dtype).double().sum(1).to(dtype).double()
    assert torch.equal(result, by_hand)
