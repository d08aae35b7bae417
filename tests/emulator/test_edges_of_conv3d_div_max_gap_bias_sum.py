"""conv3d_div_max_gap_bias_sum: what the judge does not try. A changed precision setting, wrong arguments, other derivatives.

CUDA variants run under the emulator; each test of one has a process of its own.
"""

import apart
import pytest

from playground import catalog

pytestmark = pytest.mark.full

MODEL = catalog.find_model("conv3d_div_max_gap_bias_sum")
VARIANTS = ["cpu_winograd", *(variant.name for variant in catalog.variants(MODEL) if variant.backend == "cuda")]
TENSOR_CORES = ["v4_tensor_core", "v5_hopper", "training_tensor_core"]

START = f"""{apart.ASSERTIONS}
import contextlib
import sys
import cuda_emulator as emulator
from playground import catalog, tensors

model, name = catalog.find_model("conv3d_div_max_gap_bias_sum"), sys.argv[1]
path = catalog.find_variant(model, name).path
on_cpu = name == "cpu_winograd"
where = contextlib.nullcontext() if on_cpu else emulator.install(mode="fast", source_file=str(path), time_limit=120)
kind = catalog.load_variant(path).ModelNew
problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"][model.name])
(x,) = tensors.make_inputs(problem, 0)
original, new = (tensors.make_model(problem, made, 0) for made in (problem.Model, kind))
"""

PRECISION = """
convolutions = torch.backends.cudnn.conv

def gradients(run, between=lambda: None):
    given = x.clone().requires_grad_()
    out = run(given)
    between()
    return torch.autograd.grad(out, [given, *new.parameters()], torch.linspace(0.5, 1.5, out.numel()).view(out.shape))

def forward(run):
    with torch.no_grad():
        return run(x)

def set_to(precision):
    convolutions.fp32_precision = precision

def same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

with where:
    eager, compiled = {}, torch.compile(new, fullgraph=True, backend="aot_eager")
    for precision in "tf32", "ieee":
        set_to(precision)
        eager[precision] = gradients(new), forward(new)
    assert not torch.equal(eager["tf32"][1], eager["ieee"][1])
    for precision, other, change in ("tf32", "ieee", "now forbids it"), ("ieee", "tf32", "now permits TF32"):
        torch.compiler.reset()
        set_to(precision)
        same(gradients(compiled), eager[precision][0])
        same(gradients(compiled, lambda: set_to(other)), eager[precision][0])
        same(gradients(new), eager[other][0])
        if name == "training_tensor_core":  # what it keeps is of the precision that it was compiled for
            refused(change, lambda: gradients(compiled))
        set_to(precision)
        same([forward(compiled)], [eager[precision][1]])
        same(gradients(new, lambda: set_to(other)), eager[precision][0])
        same([forward(compiled)], [eager[other][1]])  # computes, as nothing of it depends on what was
        torch.compiler.reset()
        same(gradients(compiled), eager[other][0])
"""

SECOND = """
def second(run, parameters, of, wanted):
    given = x.to(next(iter(parameters.values())).dtype).clone().requires_grad_()
    out = run(given)
    outer = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape).requires_grad_()
    leaves = dict(parameters, x=given, outer=outer)
    (slope,) = torch.autograd.grad(out, leaves[of], outer, create_graph=True)
    return torch.autograd.grad(slope.square().sum() + run(given).sum() + outer.sum(), leaves[wanted])[0]

x = x[:4]  # no window of these nearly ties
torch.backends.cudnn.conv.fp32_precision = "ieee"
with where:
    ours, theirs = dict(new.named_parameters()), dict(original.double().named_parameters())
    for of in "x", "conv.weight", "conv.bias", "bias":
        for wanted in "x", "conv.weight", "outer":
            agree(second(new, ours, of, wanted).double(), second(original, theirs, of, wanted), 1e-4)
"""

OTHER_WAYS = """
from torch.autograd import forward_ad

def with_tangent(of, trains):
    new.requires_grad_(trains)
    values = dict(new.named_parameters(), x=x)
    with forward_ad.dual_level():
        values[of] = forward_ad.make_dual(values[of].detach(), torch.ones_like(values[of]))
        return torch.func.functional_call(new, values, (values.pop("x"),))

with where:
    for trains in True, False:
        for of in "x", "conv.weight", "conv.bias", "bias":
            refused("forward mode AD", lambda: with_tangent(of, trains))
        refused("functorch", lambda: torch.func.jvp(new, (x,), (x,)))
    assert forward_ad.unpack_dual(new(x)).tangent is None
    new.requires_grad_(True)
    refused("functorch", lambda: torch.func.grad(lambda given: new(given).sum())(x))

    given = torch.stack([x, 2 * x]).requires_grad_()
    out, expected = torch.func.vmap(new)(given), torch.stack([new(one) for one in given])
    assert torch.equal(out, expected)
    leaves = [given, *new.parameters()]
    for got, right in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        agree(got, right, 1e-5)

    given = x.clone().requires_grad_()
    out, leaves = new(given), [given, *new.parameters()]
    outer = torch.randn(3, *out.shape)
    together = torch.autograd.grad(out, leaves, outer, is_grads_batched=True, retain_graph=True)
    apart = zip(*(torch.autograd.grad(out, leaves, one, retain_graph=True) for one in outer), strict=True)
    for got, right in zip(together, apart, strict=True):
        agree(got, torch.stack(right), 1e-5)
"""

REFUSALS = """
with where, torch.no_grad():
    forward = getattr(torch.ops, new.namespace()).forward
    weight, conv_bias, bias, pool = new.conv.weight, new.conv.bias, new.bias, [2, 2, 2]
    given = [x, weight, conv_bias, bias, 2.0, pool]
    first = "x"
    if name == "v1_fused_tail":
        given, first = [torch.randn(2, 16, 4, 4, 4), torch.ones(16), 2.0], "the pooled tensor"
        refused("no average over an empty dimension", lambda: forward(given[0][:, :, :, :0], given[1], 2.0))
    elif name == "v2_fused_pool":
        given, first = [original.conv(x), bias.flatten(), 2.0, pool], "the convolution's output"
    assert torch.isfinite(forward(*given)).all()
    for wrong in given[0][0], given[0].double(), given[0].to(torch.bfloat16):
        refused(f"expected {first} as a float32", lambda: forward(wrong, *given[1:]))
    if given[-1] is pool:
        for wrong in [], [2], [2, 2, 2, 2], *[[2, 2, 3]] * (not on_cpu):  # there PyTorch computes it
            refused("window of", lambda: forward(*given[:-1], wrong))
    for k, what in enumerate(["weight", "conv_bias", "bias"] if len(given) > 4 else ["bias"], start=1):
        short = given[k][:, :-1] if what == "weight" else given[k][:-1]
        for wrong in short, given[k].double(), given[k][None, :3]:
            refused(f"expected {what} as a float32", lambda: forward(*given[:k], wrong, *given[k + 1 :]))
"""

MAGNITUDES = """
def run(of_x, of_weight, of_grad):
    copy = tensors.make_model(problem, kind, 0)
    with torch.no_grad():
        copy.conv.weight.mul_(of_weight)
    given = (x * of_x).requires_grad_()
    out = copy(given)
    grad = torch.linspace(0.5, 1.5, out.numel()).view(out.shape) * of_grad
    return out, *torch.autograd.grad(out, [given, copy.conv.weight], grad)

with where:
    big, small = 2.0**108, 2.0**-108
    expected = run(1, 1, 1)
    for of_x, of_weight in (big, small), (small, big):
        for of_grad in 1, big, small:
            out, grad_x, grad_weight = run(of_x, of_weight, of_grad)
            agree(out, expected[0], 1e-6)
            if of_grad != of_weight:  # else the gradient is beyond a float32
                agree(grad_x, expected[1] * of_weight * of_grad, 1e-6)
            if of_grad != of_x:
                agree(grad_weight, expected[2] * of_x * of_grad, 1e-6)
"""

LIMITS = """
x = torch.randn(2, 8, 16, 8, 16)
original, sizes = problem.Model(8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1), {}

def run(model):
    given = x.clone().requires_grad_()
    out = model(given)
    return [out, *torch.autograd.grad(out.square().sum(), [given, *model.parameters()])]

with where:
    for limit in 0, 163, 99:
        kind = catalog.load_variant(path).ModelNew
        kind.shared_limit_kb = limit
        new = kind(8, 16, 3, 2.0, 2, (16, 1, 1, 1), 1)
        new.load_state_dict(original.state_dict())
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        for got, right in zip(run(new), run(original), strict=True):
            agree(got, right, 1e-5)
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        agree(run(new)[0], run(original)[0], 1e-3)
"""


@pytest.mark.parametrize("variant", TENSOR_CORES)
def test_precision_that_changes(variant):
    apart.run(START + PRECISION, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_second_derivatives(variant):
    apart.run(START + SECOND, variant)


@pytest.mark.parametrize("variant", ["v3_single_kernel", "training_tensor_core", "cpu_winograd"])
def test_tangents_vmap_and_batched_gradients(variant):
    apart.run(START + OTHER_WAYS, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_wrong_arguments_of_an_operator(variant):
    apart.run(START + REFUSALS, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_magnitudes_that_cancel(variant):
    apart.run(START + MAGNITUDES, variant)


@pytest.mark.parametrize("variant", ["v4_tensor_core", "training_tensor_core"])
def test_less_shared_memory(variant):
    """As on an A100, and as on an RTX 3090, 4090 or 5090: a strict sample becomes two and four parts."""
    apart.run(START.replace('mode="fast"', 'mode="check"') + LIMITS, variant)
