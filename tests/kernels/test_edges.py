"""What PyTorch asks of a variant's operators besides results, and what the judge's inputs do not reach.

Wrong arguments, gradients of what is asked for, second derivatives, vmap, replicas, a precision that changes, infinities that
meet. CUDA variants run in the emulator's fast mode, each test of one in a process of its own.
"""

import copy
import inspect
import itertools
from types import SimpleNamespace

import apart
import project_variants
import pytest
import torch
from right import FORMS, Recorder, gradients, load_variant, namespace_of, where
from torch.autograd import forward_ad

import cuda_emulator as emulator
from playground import catalog, tensors
from playground.judge.precision import forbid_tf32

PARAMS = project_variants.variants()
FUSED = [param for param in PARAMS if "::gradient" in project_variants.text_of(param.values[1])]  # gradients of their own
TRAINED = [param for param in PARAMS if param in FUSED or param.values[1].backend == "cpu"]
# These keep nothing of a precision for their gradient, which is of the backward pass's precision, as PyTorch's.
KEEP_NOTHING = {"alexnet_conv1/training_tensor_core", "conv3d_div_max_gap_bias_sum/training_tensor_core"}
NARROW = [p for p in PARAMS if "ELEMENT" in project_variants.text_of(p.values[1])]  # take 16-bit types
STRICT = [p for p in PARAMS if "STRICT" in project_variants.text_of(p.values[1]) and p.id not in KEEP_NOTHING]


def every(function, params=PARAMS, model=None, backend=None):
    """The test of each of these variants, of one model or backend if given; those that are emulated are of the full tier."""
    chosen = [p for p in params if model in (None, p.values[0].name) and backend in (None, p.values[1].backend)]
    full = [[pytest.mark.full] if p.values[1].backend == "cuda" else [] for p in chosen]
    marked = [pytest.param(*p.values, id=p.id, marks=marks) for p, marks in zip(chosen, full, strict=True)]

    @pytest.mark.parametrize("model, variant", marked)
    def test(model, variant):
        apart.run(function, model, variant)

    return test


def made(model, variant, seed=0, **settings):
    """(original, variant, input) at the size at which the emulator counts."""
    problem = catalog.load_problem(model.path, catalog.SETTINGS["counted"][model.name] | settings)
    kinds = problem.Model, load_variant(variant.path).ModelNew
    return *(tensors.make_model(problem, kind, seed) for kind in kinds), tensors.make_inputs(problem, seed)[0]


def refused(what, call):
    with pytest.raises((RuntimeError, ValueError), match=what):  # NotImplementedError is a RuntimeError
        call()


def agree(found, expected, tolerance):
    """Each differs by no more than this share of the largest element."""
    for got, right in zip(found, expected, strict=True):
        assert got.shape == right.shape and (got - right).abs().max() <= tolerance * right.abs().max()


def same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def uneven(out):
    """An upstream gradient that is not the same for all samples."""
    return torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)


def wrong_arguments(model, variant):
    """Of an operator: a tensor or a list that is not as the model gives it is refused in words, or computed as PyTorch does."""
    with where(variant):
        _, new, x = made(model, variant)
        new.requires_grad_(False)  # where no gradient is to be recorded, some call no operator
        original = load_variant(variant.path).original
        with Recorder(namespace_of(new)) as recorder:
            new(x)
        ((operator, (given, _)),) = recorder.calls.items()
        taken = len(inspect.signature(original).parameters)
        count = 0
        for k, value in enumerate(given):
            if isinstance(value, torch.Tensor):
                others = [value.double(), value.to(torch.bfloat16), value[None], value[0], value[:-1], value[..., :-1]]
            elif isinstance(value, list):
                others = [[], value[:1], value * 2, [-1] * len(value), [0] * len(value), [each + 1 for each in value]]
            else:
                continue
            for other in others:
                arguments = [*given[:k], other, *given[k + 1 :]]
                try:
                    found = operator(*arguments)
                except (RuntimeError, ValueError) as error:
                    assert str(error) and "internal" not in str(error).lower(), error
                    count += 1
                else:
                    found = found[0] if isinstance(found, tuple) else found
                    torch.testing.assert_close(found, original(*arguments[:taken]), rtol=2e-3, atol=2e-3, msg=f"{k}: {other}")
        assert count >= 4 * sum(isinstance(value, torch.Tensor) for value in given) - 1


test_wrong_arguments_of_an_operator = every(wrong_arguments)


def training(model, variant):
    for settings in FORMS.get(model.name, [{}]) if variant.backend == "cpu" else [{}]:
        trained_with(settings, model, variant)


def trained_with(settings, model, variant):
    with where(variant):
        _, new, x = made(model, variant, **settings)
        parameters = dict(new.named_parameters())

        def found(wanted, run=new, of_input=True, **more):
            given = x.clone().requires_grad_(of_input)
            out = run(given)
            leaves = [given if name == "x" else parameters[name] for name in wanted]
            return dict(zip(wanted, torch.autograd.grad(out, leaves, uneven(out), **more), strict=True))

        def alike(some, whole):  # on a GPU other kernels may compute a gradient that is wanted by itself
            agree(some.values(), [whole[name] for name in some], 0 if variant.backend == "cpu" else 2e-3)

        everything = found(["x", *parameters])
        for wanted in [*([name] for name in everything), [*everything][::2], [*everything][1::2]]:
            alike(found(wanted), everything)
        of_parameters = found(list(parameters), of_input=False)
        alike(of_parameters, everything)
        new.requires_grad_(False)
        alike(found(["x"]), everything)
        assert not new(x).requires_grad
        new.requires_grad_(True)

        compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
        for expected, of_input in ((everything, True), (of_parameters, False)):
            same(found(list(expected), compiled, of_input).values(), expected.values())
        torch.compiler.reset()
        compiled = torch.compile(new, fullgraph=True, backend="aot_eager", dynamic=True)  # sizes are symbols
        for count in (1, len(x)):
            each = [torch.autograd.grad(run(x[:count]).sum(), list(parameters.values())) for run in (compiled, new)]
            same(*each)
        with torch.no_grad():
            without = new(x)
            assert not without.requires_grad and torch.equal(compiled(x), without)
            assert not new(x.clone().requires_grad_()).requires_grad
        with torch.inference_mode():
            assert torch.equal(new(x), without)

        new.zero_grad()
        out = new(x).square().sum()
        out.backward(retain_graph=True)
        once = {name: value.grad.clone() for name, value in parameters.items()}
        out.backward()  # adds
        alike({name: value.grad for name, value in parameters.items()}, {name: 2 * value for name, value in once.items()})
        refused("a second time", out.backward)


test_gradients_of_what_is_asked_for = every(training, TRAINED)


def second_derivatives(model, variant):
    """By each pair of leaves; also where the loss depends on the second in another way, too, which must not hide this one."""
    forbid_tf32()
    with where(variant):
        original, new, x = made(model, variant)

        def second(module, of):
            given = x.to(next(module.parameters()).dtype).clone().requires_grad_()
            out = module(given)
            leaves = {"outer": uneven(out).requires_grad_(), "x": given} | dict(module.named_parameters())
            (slope,) = torch.autograd.grad(out, leaves[of], leaves["outer"], create_graph=True)
            alone = slope.square().sum()
            for loss in alone, alone + (out * leaves["outer"]).sum():
                found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
                for each, leaf in zip(found, leaves.values(), strict=True):
                    yield torch.zeros_like(leaf) if each is None else each

        original.double()
        for of in ("x", *dict(new.named_parameters())):
            agree([each.double() for each in second(new, of)], second(original, of), 1e-4)


test_second_derivatives = every(second_derivatives)


def other_ways(model, variant):
    """Tangents are refused where a gradient is recorded, by v4, v5 and training also where no tensor wants one (elsewhere
    custom_op drops them); vmap, batched gradients, replicas."""
    forbid_tf32()
    with where(variant):
        original, new, x = made(model, variant)

        def tangent(module, of):
            values = dict(module.named_parameters(), x=x)
            with forward_ad.dual_level():
                values[of] = forward_ad.make_dual(values[of].detach(), torch.ones_like(values[of]))
                return forward_ad.unpack_dual(torch.func.functional_call(module, values, (values.pop("x"),))).tangent

        for of in ("x", *dict(new.named_parameters())):
            if variant.name == "cpu_winograd" and of == "bias":  # which PyTorch adds, behind the operator
                same([tangent(new, of)], [tangent(original, of)])
            else:
                refused("forward mode AD", lambda of=of: tangent(new, of))
        if "class Direct(" in project_variants.text_of(variant):
            new.requires_grad_(False)
            refused("forward mode AD", lambda: tangent(new, "x"))
            new.requires_grad_(True)
        refused("functorch", lambda: torch.func.grad(lambda given: new(given).sum())(x))

        given = torch.stack([x, 2 * x]).requires_grad_()
        found, expected = torch.func.vmap(new)(given), torch.stack([new(one) for one in given])
        assert torch.equal(found, expected)
        with torch.no_grad():
            assert torch.equal(torch.func.vmap(new)(given), expected)
        leaves = [given, *new.parameters()]
        agree(*(torch.autograd.grad(each.sum(), leaves) for each in (found, expected)), 1e-4)

        given = x.clone().requires_grad_()
        out, leaves = new(given), [given, *new.parameters()]
        outer = torch.randn(3, *out.shape)
        together = torch.autograd.grad(out, leaves, outer, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in outer]
        agree(together, map(torch.stack, zip(*alone, strict=True)), 1e-5)

        # As torch.nn.DataParallel makes them: what was a parameter is a tensor that autograd computed.
        replica = new._replicate_for_data_parallel()
        for name, child in new.named_children():
            setattr(replica, name, child._replicate_for_data_parallel())
        for name, parameter in new.named_parameters():
            owner, _, last = name.rpartition(".")
            setattr(replica.get_submodule(owner), last, 1 * parameter)
        out = replica(given)
        agree(torch.autograd.grad(out, leaves, outer[0]), alone[0], 1e-5)


test_tangents_vmap_batched_gradients_and_replicas = every(other_ways)


def changing_precision(model, variant):
    """Between a forward pass and its backward, and behind torch.compile: what is of one precision serves no other."""
    convolutions = torch.backends.cudnn.conv
    with where(variant):
        _, new, x = made(model, variant)

        def trained(run, then=None):
            given = x.clone().requires_grad_()
            out = run(given)
            convolutions.fp32_precision = then or convolutions.fp32_precision
            return torch.autograd.grad(out, [given, *new.parameters()], uneven(out))

        def forward(run):
            with torch.no_grad():
                return run(x)

        eager, compiled = {}, torch.compile(new, fullgraph=True, backend="aot_eager")
        for precision in "tf32", "ieee":
            convolutions.fp32_precision = precision
            eager[precision] = trained(new), forward(new)
        assert not torch.equal(eager["tf32"][1], eager["ieee"][1])
        for precision, other in ("tf32", "ieee"), ("ieee", "tf32"):
            torch.compiler.reset()
            convolutions.fp32_precision = precision
            same(trained(compiled), eager[precision][0])
            same(trained(compiled, other), eager[precision][0])
            same(trained(new), eager[other][0])
            convolutions.fp32_precision = precision
            same([forward(compiled)], [eager[precision][1]])
            same(trained(new, other), eager[precision][0])
            same([forward(compiled)], [eager[other][1]])  # computes, as nothing of it depends on what was
            torch.compiler.reset()
            same(trained(compiled), eager[other][0])


test_a_precision_that_changes = every(changing_precision, STRICT)


def together():
    """The operators of all models and constants in one process; in the second turn every library is loaded and was called."""
    forbid_tf32()  # a maximum that TF32 finds elsewhere takes its gradient along
    constants = {  # another build of the same file
        "conv_pool_sigmoid_sum": {"in_channels": 3, "out_channels": 10},
        "conv3d_div_max_gap_bias_sum": {"in_channels": 4, "out_channels": 8, "bias_shape": (8, 1, 1, 1)},
        "alexnet_conv1": {},
    }
    with emulator.install(mode="fast", time_limit=60):
        found = []
        for model in catalog.models():
            for settings in ({}, constants[model.name]):
                found.append((model.name, *made(model, catalog.find_variant(model, "v5_hopper"), **settings)))
        for turn in range(2):
            for name, original, new, x in found:
                new.load_state_dict(original.state_dict())
                outer = uneven(original(x))
                exact = gradients(copy.deepcopy(original).double(), x.double() + turn, outer.double())
                for got, right in zip(gradients(new, x + turn, outer), exact, strict=True):
                    assert (got - right).abs().max() <= 1e-4 * right.abs().max(), (turn, name)


@pytest.mark.full
def test_all_in_one_process():
    apart.run(together)


def layer_in_16_bits(model, variant):
    """fp16 and bf16, and under autocast, at sizes with odd and even rows, with NaN, infinities and zero weights."""
    with where(variant):
        for width, dtype in ((63, torch.float16), (64, torch.float16), (63, torch.bfloat16), (64, torch.bfloat16)):
            original, new, x = made(model, variant, batch_size=2, height=40, width=width)
            exact, limit = copy.deepcopy(original.to(dtype)).double(), 2 * torch.finfo(dtype).eps
            x = x.to(dtype)

            def agrees(out, x, exact=exact, limit=limit, dtype=dtype):
                assert out.dtype == dtype
                torch.testing.assert_close(out.double(), exact(x.double()), rtol=limit, atol=limit, equal_nan=True)

            with torch.no_grad():
                with torch.autocast("cpu", dtype):
                    agrees(new(x), x)
                    agrees(new(x.float()), x)
                new.to(dtype)
                for value in (0, torch.inf, -torch.inf, torch.nan):
                    given = x.clone()
                    given[1, 2, 39, 61] = given[0, 0, 0, 0] = value
                    agrees(new(given), given)
            same(gradients(new, x), gradients(original, x))
            with torch.autocast("cpu", dtype):
                found = gradients(new.float(), x.float())
            assert [each.dtype for each in found] == [torch.float32] * 3
            with torch.no_grad():
                for each in exact, new.to(dtype):
                    each.conv1.weight.zero_()
                agrees(new(x), x)
            refused("expected x as", lambda new=new, x=x: new(x.double()))


test_a_layer_in_16_bits = every(layer_in_16_bits, NARROW, model="alexnet_conv1")


def sums_in_16_bits(model, variant):
    """fp16 and bf16, also what is not finite, and zero weights: in the type, as a float32 sum, and under autocast."""
    with where(variant):
        sizes = {"height": 41}, {"in_channels": 5, "out_channels": 7, "height": 43, "width": 70}
        for settings, dtype in itertools.product(sizes, (torch.float16, torch.bfloat16)):
            original, new, x = made(model, variant, batch_size=2, **settings)
            original.to(dtype).float()  # weights that the type holds
            new.load_state_dict(original.state_dict())
            exact, (theirs, narrow) = copy.deepcopy(original).double(), (copy.deepcopy(m).to(dtype) for m in (original, new))
            same(gradients(narrow, x.to(dtype)), gradients(theirs, x.to(dtype)))

            def agrees(given, dtype=dtype, new=new, exact=exact, narrow=narrow):
                narrow.out_dtype = torch.float32
                in_float32, narrow.out_dtype = narrow(given), None
                assert in_float32.dtype == torch.float32
                expected = exact(given.double())
                reached = given.isinf().any((1, 2, 3)) & in_float32.isnan()  # v4 makes NaN of an infinity
                torch.testing.assert_close(
                    in_float32.double(), expected.masked_fill(reached, torch.nan), rtol=1e-5, atol=0, equal_nan=True
                )
                torch.testing.assert_close(narrow(given), in_float32.to(dtype), rtol=0, atol=0, equal_nan=True)
                with torch.autocast("cpu", dtype):  # whose sums keep their type
                    torch.testing.assert_close(new(given), in_float32.to(dtype), rtol=0, atol=0, equal_nan=True)

            with torch.no_grad():
                for value in (0, torch.inf, -torch.inf, torch.nan):
                    given = x.to(dtype)
                    given[-1, 2, 7, 9] = given[0, 0, 0, 0] = value
                    agrees(given)
                with torch.autocast("cpu", dtype):
                    torch.testing.assert_close(new(x).double(), exact(x.double()), rtol=1e-4, atol=0)
                for each in exact, narrow, new:
                    each.conv.weight.zero_()
                agrees(x.to(dtype))
        refused("expected x as float32", lambda: new.double()(x.double()))


test_sums_in_16_bits = every(sums_in_16_bits, NARROW, model="conv_pool_sigmoid_sum")


# Where two infinities lie (channel, row, column), in the first sample: in the same box sum or in two of the same window, in the
# fresh rows of a pooled row or in those that it shares with the next one.
INFINITIES = {
    "one box": ((0, 1, 17), (0, 2, 18)),
    "two boxes": ((1, 4, 40), (1, 9, 45)),
    "two channels": ((0, 4, 8), (2, 7, 9)),
    "shared rows": ((2, 5, 20), (2, 4, 21)),
    "right edge": ((1, 6, 60), (1, 7, 61)),
}


def infinities(model, variant):
    with where(variant), torch.no_grad():
        original, new, x = made(model, variant, batch_size=2, height=18)
        for name, places in INFINITIES.items():
            for signs in (1, 1), (1, -1):
                given = torch.randn_like(x)
                for place, sign in zip(places, signs, strict=True):
                    given[0][place] = sign * float("inf")
                expected, got = original(given), new(given)
                assert expected[0].isnan(), "this case asks for nothing"
                assert got[0].isnan(), f"{name}, signs {signs}: {got[0]} where PyTorch has nan"
                torch.testing.assert_close(got[1], expected[1], rtol=2e-3, atol=0)


test_infinities_that_meet = every(infinities, model="conv_pool_sigmoid_sum")


def long_sums(model, variant):
    """36,000 terms of one sign, whose sum tensor cores would round towards zero each time."""
    forbid_tf32()
    with where(variant):
        original, new, _ = made(model, variant)
        x = torch.rand(1, 8, 384, 384)
        found, exact = gradients(new, x), gradients(original.double(), x.double())
    agree(found[1:2], exact[1:2], 5e-7)


test_long_sums_in_strict_precision = every(long_sums, FUSED, model="conv_pool_sigmoid_sum", backend="cuda")


def magnitudes(model, variant):
    """A large input and small weights, and the other way round, whose products are of the usual size."""
    with where(variant):
        _, new, x = made(model, variant)
        weight, kept = new.conv.weight, new.conv.weight.detach().clone()

        def run(of_x, of_weight, of_grad):
            with torch.no_grad():
                weight.copy_(kept * of_weight)
            given = (x * of_x).requires_grad_()
            out = new(given)
            return SimpleNamespace(out=out, grads=torch.autograd.grad(out, [given, weight], uneven(out) * of_grad))

        big, small = 2.0**108, 2.0**-108
        expected = run(1, 1, 1)
        for of_x, of_weight in (big, small), (small, big):
            for of_grad in 1, big, small:
                found = run(of_x, of_weight, of_grad)
                agree([found.out], [expected.out], 1e-6)
                for got, right, factor in zip(found.grads, expected.grads, (of_weight, of_x), strict=True):
                    if of_grad != factor:  # else the gradient is beyond a float32
                        agree([got], [right * factor * of_grad], 1e-6)


test_magnitudes_that_cancel = every(magnitudes, model="conv3d_div_max_gap_bias_sum")


ODD = {"in_channels": 5, "out_channels": 7, "bias_shape": (7, 1, 1, 1), "depth": 6, "height": 9, "width": 77, "divisor": -3.0}


def narrow_types(model, variant):
    """fp16 and bf16, also what is not finite and what is almost not: in the type, and under autocast, whose sum is float32."""
    with where(variant):
        for settings, dtype in itertools.product(({}, ODD, {"sum_dim": 0}), (torch.float16, torch.bfloat16)):
            original, new, x = made(model, variant, **settings)
            original.to(dtype).float()  # weights that the type holds
            new.load_state_dict(original.state_dict())
            exact, (theirs, narrow) = copy.deepcopy(original).double(), (copy.deepcopy(m).to(dtype) for m in (original, new))
            same(gradients(narrow, x.to(dtype)), gradients(theirs, x.to(dtype)))
            rounding = 2 * torch.finfo(dtype).eps
            near = 1e-3 if new.sums_channels else rounding

            def agree_with(expected, found, tolerance):
                torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)

            with torch.no_grad():
                for value in (0, 65504, torch.inf, -torch.inf, torch.nan):
                    given = x.to(dtype)
                    given[-1, 0, 1, 2, 3] = value
                    found, expected = narrow(given), exact(given.double())
                    assert found.dtype == dtype
                    agree_with(expected, found, rounding)
                    with torch.autocast("cpu", dtype):
                        found = new(given)
                        assert found.dtype == original(given).dtype == torch.float32
                    agree_with(expected, found, near)
                with torch.autocast("cpu", dtype):
                    agree_with(exact(x.double()), new(x), 2e-3)
                for each in narrow, exact:
                    each.conv.weight.zero_()
                agree_with(exact(x.double()), narrow(x.to(dtype)), rounding)
            with torch.autocast("cpu", dtype):
                kinds = [each.dtype for each in gradients(new, x.to(dtype))]
            assert kinds == [dtype, torch.float32, torch.float32, torch.float32]
        refused("one of torch.float32, torch.float16", lambda: new.double()(x.double()))


test_narrow_types = every(narrow_types, NARROW, model="conv3d_div_max_gap_bias_sum")
