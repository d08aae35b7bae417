"""The CPU variants on their own: right at any size, and clear about what they do not take.

"Right" is the judge's: as near to float64 as eager PyTorch is, with NaN and infinity where eager has them.
Kernel, pool and stride sizes are built in, so each new set of them costs a build; everything else is free.
"""

import copy
import functools
import re

import project_variants
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from playground import catalog, tensors
from playground.judge.tolerance import Reference

TINY = {
    "conv_pool_sigmoid_sum": {"batch_size": 3, "height": 23, "width": 31},
    "conv3d_div_max_gap_bias_sum": {"batch_size": 3, "depth": 7, "height": 11, "width": 13},
    "alexnet_conv1": {"batch_size": 3, "height": 35, "width": 50},
}

SHAPES = {
    "conv_pool_sigmoid_sum": {
        "odd": {"in_channels": 5, "out_channels": 7, "height": 41, "width": 29},
        "one window": {"batch_size": 1, "in_channels": 1, "out_channels": 1, "height": 6, "width": 6},
        "empty batch": {"batch_size": 0},
        "more samples": {"batch_size": 300, "height": 11, "width": 15},
        "more channels": {"in_channels": 35, "out_channels": 200},
        "larger images": {"batch_size": 1, "height": 401, "width": 1603},
        "tall": {"height": 300, "width": 6},
        "wide": {"height": 6, "width": 2000},
        "kernel and window not square": {"kernel_size": (5, 2), "pool_kernel_size": (2, 7)},
        "1 x 1": {"kernel_size": 1, "pool_kernel_size": 1, "out_channels": 17},
        "the window is the image": {"kernel_size": 4, "pool_kernel_size": 20, "height": 23, "width": 23},
    },
    "conv3d_div_max_gap_bias_sum": {
        "odd": {"in_channels": 5, "out_channels": 7, "depth": 9, "height": 15, "width": 19},
        "one window": {"batch_size": 1, "in_channels": 1, "out_channels": 1, "depth": 4, "height": 4, "width": 4},
        "empty batch": {"batch_size": 0},
        "more samples": {"batch_size": 150, "depth": 5, "height": 6, "width": 7},
        "more channels": {"in_channels": 19, "out_channels": 70},
        "larger images": {"batch_size": 1, "depth": 19, "height": 71, "width": 203},
        "negative divisor": {"divisor": -3.0},
        "integer divisor": {"divisor": -2},
        "small divisor": {"divisor": 1e-3},
        "odd windows": {"pool_size": (1, 3, 3), "width": 200},
        "kernel not cubic": {"kernel_size": (2, 5, 3), "pool_size": (1, 3, 2), "height": 20, "divisor": -1.5},
        "1 x 1 x 1": {"kernel_size": 1, "pool_size": 1},
    },
    "alexnet_conv1": {
        "odd": {"height": 61, "width": 83},
        "one window": {"batch_size": 1, "height": 7, "width": 7},
        "empty batch": {"batch_size": 0},
        "more samples": {"batch_size": 300, "height": 19, "width": 23},
        "larger images": {"batch_size": 1, "height": 483, "width": 641},
        "tall": {"height": 900, "width": 8},
        "wide": {"height": 8, "width": 900},
    },
}

# Other layers in the place of conv1; only the stride along the width is built in.
LAYERS = {
    "other channels, no bias": {"in_channels": 5, "out_channels": 33, "kernel_size": 3, "stride": 4, "bias": False},
    "nothing square": {"in_channels": 3, "out_channels": 16, "kernel_size": (4, 7), "stride": (3, 4), "padding": (0, 6)},
    "more padding than kernel": {"in_channels": 2, "out_channels": 3, "kernel_size": 2, "stride": 4, "padding": 9},
    "dense": {"in_channels": 4, "out_channels": 40, "kernel_size": 3, "stride": 1, "padding": 1},
}

ALL = pytest.mark.parametrize("model, variant", project_variants.variants("cpu"))
load_variant = functools.cache(catalog.load_variant)


def only(name):
    """The CPU variants of the model of that name."""
    return pytest.mark.parametrize("model, variant", [p for p in project_variants.variants("cpu") if p.values[0].name == name])


def with_settings(table):
    """Every CPU variant with every entry of the table of its model."""
    return pytest.mark.parametrize(
        "model, variant, settings",
        [
            pytest.param(*param.values, settings, id=f"{param.id}: {name}")
            for param in project_variants.variants("cpu")
            for name, settings in table[param.values[0].name].items()
        ],
    )


def make(model, variant, **settings):
    """(original, variant) with the same weights, and an input of which every sample has a size of its own."""
    problem = catalog.load_problem(model.path, TINY[model.name] | settings)
    original = tensors.make_model(problem, problem.Model, seed=0)
    new = load_variant(variant.path).ModelNew(*problem.get_init_inputs())
    new.load_state_dict(original.state_dict())
    (x,) = tensors.make_inputs(problem, seed=1)
    scale = torch.linspace(0.5, 2.0, len(x)).view(-1, *[1] * (x.dim() - 1))
    return original, new, torch.randn(x.shape) * scale


def assert_right(original, new, x):
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(x.double())
        reference, actual = Reference(exact, original(x)), new(x)
    if reference.is_blunt:  # the outputs vary by less than they are rounded
        torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=0)
    else:
        complaint = reference.compare("the output", actual).complaint
        assert complaint is None, complaint


@pytest.mark.full
@with_settings(SHAPES)
def test_shapes(model, variant, settings):
    assert_right(*make(model, variant, **settings))


@only("conv3d_div_max_gap_bias_sum")
@pytest.mark.parametrize("sum_dim", [1, -4, (1,), [1], 0, 2, -1, (1, 2), (0, 1), (1, 2, 3, 4), None, ()], ids=str)
def test_sum_dim(model, variant, sum_dim):
    assert_right(*make(model, variant, sum_dim=sum_dim, out_channels=5))


@only("conv3d_div_max_gap_bias_sum")
@pytest.mark.parametrize("sum_dim", [1, 0])
@pytest.mark.parametrize(
    "bias_shape",
    [(5, 1, 1, 1), (1, 5, 1, 1, 1), (1,), (1, 1, 1, 1), (4,), (2, 3, 4), (3, 1, 1, 1, 1), (3, 5, 1, 1, 2)],
    ids=str,
)
def test_bias_shape(model, variant, bias_shape, sum_dim):
    assert_right(*make(model, variant, bias_shape=bias_shape, out_channels=5, sum_dim=sum_dim))


@only("conv3d_div_max_gap_bias_sum")
def test_one_channel_and_a_wider_bias(model, variant):
    """A bias of (5, 1, 1, 1) makes five channels of one; there is one output channel, so it is not one value a channel."""
    assert_right(*make(model, variant, bias_shape=(5, 1, 1, 1), out_channels=1))


@pytest.mark.full
@only("alexnet_conv1")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_layer_is_asked(model, variant, layer):
    original, new, x = make(model, variant)
    original.conv1 = torch.nn.Conv2d(**layer)
    new.conv1 = copy.deepcopy(original.conv1)
    assert_right(original, new, torch.randn(2, layer["in_channels"], *x.shape[2:]))


@only("alexnet_conv1")
@pytest.mark.parametrize("option", [{"dilation": 2}, {"groups": 3}, {"padding_mode": "reflect"}, {"padding": "valid"}], ids=str)
def test_a_layer_it_cannot_compute_is_refused(model, variant, option):
    _, new, x = make(model, variant)
    new.conv1 = torch.nn.Conv2d(**{"in_channels": 3, "out_channels": 6, "kernel_size": 5, "stride": 4} | option)
    with pytest.raises((ValueError, RuntimeError), match="expected"):
        new(x)


@ALL
@pytest.mark.parametrize("scale", [1e4, 1.0, 1e-3, 1e-6, 0.0])
def test_large_and_small_values(model, variant, scale):
    original, new, x = make(model, variant)
    assert_right(original, new, x * scale)


def places(x):
    """One element of every sample but the first: the first of all, the last of all, and one in the middle."""
    yield 1, (0,) * (x.dim() - 1)
    yield 2, (-1,) * (x.dim() - 1)
    yield 3, tuple(size // 2 for size in x.shape[1:])


@ALL
def test_nan(model, variant):
    """At the far edge the floor rule of pooling drops what no whole window holds, and a NaN there with it."""
    for grown in range(3):
        sizes = {name: size + grown for name, size in TINY[model.name].items() if name != "batch_size"}
        original, new, x = make(model, variant, batch_size=4, **sizes)
        for sample, place in places(x):
            x[sample][place] = torch.nan
        assert_right(original, new, x)


@pytest.mark.full
@only("conv3d_div_max_gap_bias_sum")
def test_nan_beside_odd_windows(model, variant):
    """Windows of 3 end inside a tile of 2: what lies beside them must not reach them."""
    for grown in range(4):
        original, new, x = make(model, variant, batch_size=2, pool_size=(1, 3, 3), height=11 + grown, width=11 + grown)
        x[1, :, :, -1, :] = x[1, :, :, :, -1] = torch.nan
        assert_right(original, new, x)


@ALL
def test_infinity(model, variant):
    original, new, x = make(model, variant, batch_size=4)
    for sample, place in places(x):
        x[sample][place] = torch.inf * (-1) ** sample
    assert_right(original, new, x)


@ALL
def test_strides(model, variant):
    """Whatever the layout, the result has the bits of the contiguous one, and the input stays as it was."""
    _, new, x = make(model, variant)
    channels_last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1])
    layouts = {
        "channels last": x.to(memory_format=channels_last),
        "transposed": x.transpose(-1, -2).contiguous().transpose(-1, -2),
        "every second column": wide[..., ::2],
        "expanded": x[:1].expand(x.shape),
        "reversed batch": x.flip(0)[1:],
        "off by one float": torch.randn(x.numel() + 1)[1:].view(x.shape),
    }
    with torch.no_grad():
        for name, layout in layouts.items():
            before = layout.clone()
            assert torch.equal(new(layout), new(layout.contiguous().clone())), name
            assert torch.equal(layout, before), name
        expected = new(x)
        for module in new.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
                module.to(memory_format=channels_last)
        assert torch.equal(new(x), expected), "weights in channels last"


@ALL
def test_the_result_is_new_memory(model, variant):
    _, new, x = make(model, variant)
    with torch.no_grad():
        first = new(x)
        kept = first.clone()
        second = new(2 * x)
    assert first.data_ptr() != second.data_ptr()
    assert first.is_contiguous() and torch.equal(first, kept) and not torch.equal(first, second)


# Sizes at which the threads share the work.
SHARED_WORK = {
    "conv_pool_sigmoid_sum": {"out_channels": 20, "height": 100, "width": 500},
    "conv3d_div_max_gap_bias_sum": {"batch_size": 5, "height": 41, "width": 150},
    "alexnet_conv1": {"batch_size": 20, "height": 67, "width": 80},
}


def gradients(new, x, **more):
    """Of x and of each parameter; upstream each output has a gradient of its own."""
    x = x.detach().requires_grad_()
    out = new(x)
    upstream = torch.linspace(-1, 2, out.numel()).view(out.shape)
    return torch.autograd.grad(out, [x, *new.parameters()], upstream, **more)


def weight_of(new):
    """Of the convolution."""
    return next(parameter for name, parameter in new.named_parameters() if name.endswith("weight"))


@ALL
def test_same_bits_whatever_the_number_of_threads(model, variant):
    _, new, x = make(model, variant, **SHARED_WORK[model.name])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                results.append([new(x)])
            results[-1] += gradients(new, x)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@ALL
def test_training_gives_the_bits_of_inference(model, variant):
    _, new, x = make(model, variant)
    with torch.no_grad():
        expected = new(x)
        assert not new(x.requires_grad_()).requires_grad
    assert torch.equal(new(x).detach(), expected)
    new.requires_grad_(False)
    assert not new(x.detach()).requires_grad


@ALL
def test_only_gradients_that_are_asked_for_and_they_accumulate(model, variant):
    _, new, x = make(model, variant)
    leaves = [x.requires_grad_(), *new.parameters()]
    whole = torch.autograd.grad(new(x).sum(), leaves)
    for wanted in ({0}, {1}, {2}, {0, 2}, set(range(len(leaves)))):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in wanted)
            leaf.grad = None
        out = new(x).sum()
        out.backward(retain_graph=True)
        for i, leaf in enumerate(leaves):
            assert torch.equal(leaf.grad, whole[i]) if i in wanted else leaf.grad is None
    out.backward()
    for leaf, once in zip(leaves, whole, strict=True):
        assert torch.equal(leaf.grad, 2 * once)


@ALL
def test_a_changed_weight_is_noticed(model, variant):
    _, new, x = make(model, variant)
    out = new(x.requires_grad_())
    with torch.no_grad():
        weight_of(new).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@ALL
@pytest.mark.parametrize("of", ["x", "weight"])
@pytest.mark.parametrize("variable_upstream", [False, True])
def test_second_derivatives_are_right(model, variant, of, variable_upstream):
    original, new, x = make(model, variant)

    def first(model):
        wanted = x.requires_grad_() if of == "x" else weight_of(model)
        out = model(x)
        upstream = torch.ones_like(out, requires_grad=variable_upstream)
        return wanted, torch.autograd.grad(out, wanted, upstream, create_graph=True)[0]

    expected, found = (
        torch.autograd.grad(gradient.square().sum(), wanted, allow_unused=True)[0]
        for wanted, gradient in map(first, (original, new))
    )
    if expected is None:  # the gradient of a linear function does not depend on its argument
        assert found is None
        return
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@ALL
def test_gradients_of_an_empty_batch(model, variant):
    _, new, x = make(model, variant, batch_size=0)
    for gradient, of in zip(gradients(new, x), [x, *new.parameters()], strict=True):
        assert gradient.shape == of.shape and not gradient.any()


@ALL
def test_weights_are_read_anew_in_each_call(model, variant):
    original, new, x = make(model, variant)
    assert_right(original, new, x)
    with torch.no_grad():
        for changed in (original, new):
            torch.manual_seed(5)
            for parameter in changed.parameters():
                parameter.normal_(std=0.1)
    assert_right(original, new, x)


@ALL
def test_wrong_tensors_are_refused(model, variant):
    """The message says what came."""
    _, new, x = make(model, variant)
    too_narrow = {"conv_pool_sigmoid_sum": 5, "conv3d_div_max_gap_bias_sum": 3, "alexnet_conv1": 6}[model.name]
    refused = {
        "[dD]ouble|float64": x.double(),
        "Half|float16": x.half(),
        "Long|int64": x.long(),
        f"{x.dim() - 1}|{re.escape(str(list(x[0].shape)))}": x[0],
        f"{x.dim() + 1}|{re.escape(str(list(x[None].shape)))}": x[None],
        f"{x.shape[1] - 1}": x[:, 1:],
        f"does not fit .*{too_narrow}": x[..., :too_narrow],
    }
    with torch.no_grad():
        for message, wrong in refused.items():
            with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
                new(wrong)
        with pytest.raises(RuntimeError, match=r"[dD]ouble|float64"):
            new.double()(x)


@only("conv3d_div_max_gap_bias_sum")
@pytest.mark.parametrize("divisor", [0, 0.0, float("nan")])
def test_a_divisor_that_does_not_divide_is_refused(model, variant, divisor):
    with pytest.raises((ValueError, RuntimeError), match="divisor"):
        load_variant(variant.path).ModelNew(8, 16, 3, divisor, 2, (16, 1, 1, 1), 1)


class Recorder(TorchDispatchMode):
    """{operator: arguments of its last call} of one namespace."""

    def __init__(self, namespace):
        super().__init__()
        self.namespace = namespace
        self.calls = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == self.namespace:
            self.calls[operator] = args, kwargs or {}
        return operator(*args, **kwargs or {})


def registered(namespace):
    """The operators of a namespace, as namespace::name."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return {name for name in names if name.startswith(f"{namespace}::")}


@ALL
def test_opcheck(model, variant):
    """Every operator, on the arguments that the model gives it, contiguous and not, and on an empty batch."""
    forms = [{}, {"batch_size": 0}]
    if model.name == "conv3d_div_max_gap_bias_sum":
        forms.append({"sum_dim": 0})  # takes another operator
    checked = set()
    for settings in forms:
        _, new, x = make(model, variant, **settings)
        with torch.no_grad(), Recorder(new.namespace()) as recorder:
            new(x)
            new(x.transpose(-1, -2).contiguous().transpose(-1, -2))
            with torch.enable_grad():
                torch.autograd.grad(new(x.requires_grad_()).sum(), [x, *new.parameters()])
        for operator, (args, kwargs) in recorder.calls.items():
            args = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
            torch.library.opcheck(operator, args, kwargs)
            checked.add(operator._schema.name)
    assert checked == registered(new.namespace())


@ALL
def test_compile(model, variant):
    """Without a graph break, and without a recompilation that gives other bits."""
    torch._dynamo.reset()
    _, new, x = make(model, variant)
    compiled = torch.compile(new, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), new(x))
        assert torch.equal(compiled(x[:2]), new(x[:2]))


@ALL
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_training(model, variant, backend):
    torch._dynamo.reset()
    _, new, x = make(model, variant)
    compiled = torch.compile(new, fullgraph=True, backend=backend)
    assert all(map(torch.equal, gradients(compiled, x), gradients(new, x)))
