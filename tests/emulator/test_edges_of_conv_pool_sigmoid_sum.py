"""conv_pool_sigmoid_sum under the emulator, at what the judge's inputs do not reach.

Infinities that meet, wrong arguments of operators, and derivatives that no variant has: second ones, and forward-mode ones.
"""

import apart
import pytest

from playground import catalog

pytestmark = pytest.mark.full

MODEL = catalog.find_model("conv_pool_sigmoid_sum")
VARIANTS = [variant.name for variant in catalog.variants(MODEL) if variant.backend == "cuda"]

START = f"""{apart.ASSERTIONS}
import copy
import sys
import cuda_emulator as emulator
from playground import catalog

model = catalog.find_model("conv_pool_sigmoid_sum")
path = catalog.find_variant(model, sys.argv[1]).path
"""

# Where two infinities lie (channel, row, column), in the first sample: in the same box sum or in two of the same window, in the
# fresh rows of a pooled row or in those that it shares with the next one.
INFINITIES = """
SIZES = 3, 5, 3, 4
PLACES = {
    "one box": ((0, 1, 17), (0, 2, 18)),
    "two boxes": ((1, 4, 40), (1, 9, 45)),
    "two channels": ((0, 4, 8), (2, 7, 9)),
    "shared rows": ((2, 5, 20), (2, 4, 21)),
    "right edge": ((1, 6, 90), (1, 7, 91)),
}
original = catalog.load_problem(model.path).Model(*SIZES)
with emulator.install(mode="fast", source_file=str(path), time_limit=120), torch.no_grad():
    new = catalog.load_variant(path).ModelNew(*SIZES)
    new.load_state_dict(original.state_dict())
    for name, places in PLACES.items():
        for signs in (1, 1), (1, -1):
            x = torch.randn(2, 3, 18, 96)
            for place, sign in zip(places, signs, strict=True):
                x[0][place] = sign * float("inf")
            expected, got = original(x), new(x)
            assert expected[0].isnan(), "this case asks for nothing"
            assert got[0].isnan(), f"{name}, signs {signs}: {got[0]} where PyTorch has nan"
            torch.testing.assert_close(got[1], expected[1], rtol=2e-3, atol=0)
    assert emulator.launches(), "the variant has run no kernel"
"""

REFUSALS = """
SIZES = 8, 64, 3, 4
with emulator.install(mode="fast", source_file=str(path), time_limit=120):
    new = catalog.load_variant(path).ModelNew(*SIZES)
    operators = getattr(torch.ops, new.namespace())
    x, weight, bias, grad_out = torch.randn(2, 8, 18, 96), new.conv.weight.detach(), new.conv.bias.detach(), torch.randn(2)
    if sys.argv[1] == "v1_fused_tail":
        y = torch.randn(2, 64, 16, 94)
        refused("a pooling window of [4] does not fit", lambda: operators.fused_tail(y, [4]))
        refused("expected a float32 gradient of shape [2]", lambda: operators.tail_grad(torch.randn(3), y, [4, 4]))
        refused("expected a float32 gradient of shape [2]", lambda: operators.tail_grad(grad_out.double(), y, [4, 4]))
        assert operators.tail_grad(grad_out, y, [4, 4]).shape == y.shape
    elif sys.argv[1] == "v2_single_kernel":
        delta = operators.window_grad(grad_out, x, weight, bias, [4, 4])
        for kernel, pool in ([3, 3], [4]), ([3], [4, 4]), ([3, 3], [4, 4, 4]):
            refused("built for", lambda: operators.fused_conv_avg_sigmoid_sum(x, weight, bias, kernel, pool))
        refused("built for", lambda: operators.window_grad(grad_out, x, weight, bias, [4]))
        refused("expected grad_out", lambda: operators.window_grad(grad_out[:1], x, weight, bias, [4, 4]))
        refused("expected delta", lambda: operators.input_grad(delta[:1], x, weight))
        refused("expected delta", lambda: operators.weight_grad(delta.double(), x, weight))
        refused("expected weight", lambda: operators.weight_grad(delta, x, weight[:5]))
        assert operators.input_grad(delta, x, weight).shape == x.shape
    else:
        for pool in [4], [4, 4, 4], [4, 5]:
            refused("built for", lambda: operators.forward(x, weight, bias, pool))
    if sys.argv[1] == "v5_hopper":
        for parts in -1, 3:
            refused("cannot be kept", lambda: operators.forward_with_parameter_grads(x, weight, bias, [4, 4], parts))
        for parts in 1, 2:
            out, grads, deltas = operators.forward_with_parameter_grads(x, weight, bias, [4, 4], parts)
            given = grad_out, grads, x, weight, bias
            assert deltas.shape == (2 * parts, 4, 96 * 64)
            for wrong in deltas[:1], deltas[:, :3], deltas[..., :64], deltas[:0, :3], deltas[None], deltas.float():
                refused("expected deltas of this x's forward pass", lambda: operators.all_grads(*given, wrong, [4, 4]))
            kept, again = (operators.all_grads(*given, some, [4, 4])[0] for some in (deltas, deltas[:0]))
            torch.testing.assert_close(kept, again, rtol=0, atol=(2e-3 if parts == 1 else 2e-6) * kept.abs().max().item())
        # Deltas that were kept where TF32 was permitted do not serve where it is forbidden: the gradient is computed again.
        deltas = operators.forward_with_parameter_grads(x, weight, bias, [4, 4], 1)[2]
        torch.backends.cudnn.allow_tf32 = False
        assert torch.equal(operators.all_grads(*given, deltas, [4, 4])[0], again)
    if sys.argv[1] == "v4_tensor_core":
        out, grads, deltas = operators.forward_with_parameter_grads(x, weight, bias, [4, 4], True)
        given = grad_out, x, weight, bias
        assert deltas.shape == (2, 4 * 2 * 1024)
        for wrong in deltas[:1], deltas[:, :64], deltas[None], deltas.float():
            refused("expected deltas of this x's forward pass", lambda: operators.input_grad(*given, wrong, [4, 4]))
        kept, again = (operators.input_grad(*given, some, [4, 4]) for some in (deltas, deltas[:0]))
        assert torch.equal(kept, again)
"""


NO_SUCH_DERIVATIVES = """
FROZEN = (), ("x",), ("conv.weight",), ("conv.bias",), ("conv.weight", "conv.bias")

SIZES = 3, 5, 3, 4
with emulator.install(mode="fast", source_file=str(path), time_limit=120):
    new = catalog.load_variant(path).ModelNew(*SIZES)
    for frozen in FROZEN:
        x = torch.randn(2, 3, 18, 32, requires_grad=True)
        new.requires_grad_(True)
        leaves = {"x": x, **dict(new.named_parameters())}
        for name in frozen:
            leaves.pop(name).requires_grad_(False)
        for first in leaves.values():
            out = new(x)
            (gradient,) = torch.autograd.grad(out.sum(), first, create_graph=True)
            loss = gradient.square().sum() + out.sum()  # the second term's derivative alone would look like an answer
            for second in leaves.values():
                refused("derivative", lambda: torch.autograd.grad(loss, second, retain_graph=True))
    if sys.argv[1] == "v5_hopper":  # of operators whose autograd is Python PyTorch drops tangents without a word
        new.requires_grad_(True)
        x = torch.randn(2, 3, 18, 32)
        with torch.autograd.forward_ad.dual_level():
            refused("forward-mode", lambda: new(torch.autograd.forward_ad.make_dual(x, x)))
        assert new(x).shape == (2,)
"""


# v4 chooses its launches for the shared memory of a block: that of an A100, and of a GeForce RTX. The image is wider than the
# tile of the input's gradient, and its rows are not aligned.
SHARED_LIMITS = """
SIZES = 3, 5, 3, 4
original = catalog.load_problem(model.path).Model(*SIZES)

def gradients(module, x, outer):
    given = x.clone().requires_grad_()
    return torch.autograd.grad(module(given), [given, *module.parameters()], outer)

with emulator.install(mode="check", source_file=str(path), time_limit=120):
    x, outer = torch.randn(2, 3, 23, 421), torch.tensor([0.5, -2])
    exact = gradients(copy.deepcopy(original).double(), x.double(), outer.double())
    for limit in map(int, sys.argv[2:]):
        variant = catalog.load_variant(path)
        variant.ModelNew.shared_limit_kb = limit
        new = variant.ModelNew(*SIZES)
        new.load_state_dict(original.state_dict())
        for strict in False, True:
            torch.backends.cudnn.allow_tf32 = not strict
            for got, right in zip(gradients(new, x, outer), exact, strict=True):
                assert (got - right).abs().max() <= (1e-5 if strict else 2e-3) * right.abs().max(), (limit, strict)
"""


# 36,000 terms of one sign, whose sum tensor cores would round towards zero each time.
LONG_SUMS = """
SIZES = 8, 64, 3, 4
torch.backends.cudnn.allow_tf32 = False
original = catalog.load_problem(model.path).Model(*SIZES)
with emulator.install(mode="fast", source_file=str(path), time_limit=120):
    new = catalog.load_variant(path).ModelNew(*SIZES)
    new.load_state_dict(original.state_dict())
    x = torch.rand(1, 8, 384, 384)
    new(x).sum().backward()
exact = original.double()
exact(x.double()).sum().backward()
off = (new.conv.weight.grad - exact.conv.weight.grad).abs().max() / exact.conv.weight.grad.abs().max()
assert off < 5e-7, off
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_infinities_that_meet(variant):
    apart.run(START + INFINITIES, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_wrong_arguments_of_an_operator(variant):
    apart.run(START + REFUSALS, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_derivatives_that_it_has_not(variant):
    apart.run(START + NO_SUCH_DERIVATIVES, variant)


def test_limits_of_shared_memory():
    apart.run(START + SHARED_LIMITS, "v4_tensor_core", "163", "99")


@pytest.mark.parametrize("variant", ["v4_tensor_core", "v5_hopper"])
def test_long_sums_in_strict_precision(variant):
    apart.run(START + LONG_SUMS, variant)
