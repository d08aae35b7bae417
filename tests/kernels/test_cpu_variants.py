"""The CPU variants: what the judge finds of them, and what it does not ask about values, layouts and wrong arguments.

test_shapes.py has sizes and constants, test_edges.py gradients of what is asked for.
"""

import re

import project_variants
import pytest
import torch
from right import FORMS, OTHERS, TINY, Recorder, assert_right, gradients, load_variant, make, namespace_of

from playground.driver.runner import Runner
from playground.driver.task import Options, Task
from playground.report.progress import Progress

ALL = pytest.mark.parametrize("model, variant", project_variants.variants("cpu"))


def only(name):
    """The CPU variants of the model of that name."""
    return pytest.mark.parametrize("model, variant", [p for p in project_variants.variants("cpu") if p.values[0].name == name])


@only("alexnet_conv1")
@pytest.mark.parametrize("option", [{"dilation": 2}, {"groups": 3}, {"padding_mode": "reflect"}, {"padding": "valid"}], ids=str)
def test_a_layer_it_cannot_compute_is_refused(model, variant, option):
    _, new, x = make(model, variant)
    new.conv1 = torch.nn.Conv2d(**{"in_channels": 3, "out_channels": 6, "kernel_size": 5, "stride": 4} | option)
    with pytest.raises((ValueError, RuntimeError), match="expected"):
        new(x)


@pytest.mark.full
@ALL
def test_the_judge_finds_nothing(model, variant):
    """Large and small values, weights that change, results in memory of their own, torch.compile without a graph break, ..."""
    tasks = [Task(model, variant, "cpu", TINY[model.name] | form) for form in FORMS.get(model.name, [{}])[:2]]
    with Progress() as progress:
        for result in Runner(Options(check_only=True), progress).run(tasks):
            assert (result.verdict, result.reason) == ("pass", None)
            raised = {name for name, each in result.check.behaviour.items() if (each.note or "").startswith("raises")}
            assert raised == {"double()"}


def places(x):
    """One element of every sample but the first: the first of all, the last of all, and one in the middle."""
    yield 1, (0,) * (x.dim() - 1)
    yield 2, (-1,) * (x.dim() - 1)
    yield 3, tuple(size // 2 for size in x.shape[1:])


@ALL
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite(model, variant, value):
    """At the far edge the floor rule of pooling drops what no whole window holds, and a NaN there with it."""
    for grown in range(3):
        sizes = {name: size + grown for name, size in TINY[model.name].items() if name != "batch_size"}
        original, new, x = make(model, variant, batch_size=4, **sizes)
        for sample, place in places(x):
            x[sample][place] = value
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
    upstream = torch.linspace(-1, 2, expected.numel()).view(expected.shape)
    strided = torch.stack([upstream, upstream], 1)[:, 0]
    of_last = gradients(new, layouts["channels last"], strided)
    assert all(map(torch.equal, of_last, gradients(new, x, upstream))), "gradients"
    with torch.no_grad():
        for module in new.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
                module.to(memory_format=channels_last)
        assert torch.equal(new(x), expected), "weights in channels last"


# Sizes at which the threads share the work.
SHARED_WORK = {
    "conv_pool_sigmoid_sum": {"out_channels": 20, "height": 100, "width": 500},
    "conv3d_div_max_gap_bias_sum": {"batch_size": 5, "height": 41, "width": 150},
    "alexnet_conv1": {"batch_size": 20, "height": 67, "width": 80},
}


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
def test_a_changed_weight_is_noticed(model, variant):
    _, new, x = make(model, variant)
    out = new(x.requires_grad_())
    with torch.no_grad():
        weight_of(new).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@ALL
def test_gradients_of_an_empty_batch(model, variant):
    original, new, x = make(model, variant, batch_size=0)
    assert new(x).shape == original(x).shape
    for gradient, of in zip(gradients(new, x), [x, *new.parameters()], strict=True):
        assert gradient.shape == of.shape and not gradient.any()


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
        f"(room|to fit).*{too_narrow}": x[..., :too_narrow],
    }
    with torch.no_grad():
        for message, wrong in refused.items():
            with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
                new(wrong)
        with pytest.raises(RuntimeError, match=r"[dD]ouble|float64"):
            new.double()(x)


@only("conv3d_div_max_gap_bias_sum")
@pytest.mark.parametrize("divisor", [0, 0.0, float("nan"), float("inf"), 1e-40])
def test_a_divisor_that_does_not_divide_is_refused(model, variant, divisor):
    with pytest.raises((ValueError, RuntimeError), match="divisor"):
        load_variant(variant.path).ModelNew(8, 16, 3, divisor, 2, (16, 1, 1, 1), 1)


def registered(namespace):
    """The operators of a namespace, as namespace::name."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return {name for name in names if name.startswith(f"{namespace}::")}


@ALL
def test_opcheck(model, variant):
    """Every operator, on the arguments that the model gives it, contiguous and not, and on an empty batch."""
    checked = set()
    for settings in ({"batch_size": 0}, *FORMS.get(model.name, [{}])[:2]):
        _, new, x = make(model, variant, **settings)
        with torch.no_grad(), Recorder(namespace_of(new)) as recorder:
            new(x)
            new(x.transpose(-1, -2).contiguous().transpose(-1, -2))
            with torch.enable_grad():
                torch.autograd.grad(new(x.requires_grad_()).sum(), [x, *new.parameters()])
        for operator, (args, kwargs) in recorder.calls.items():
            args = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
            torch.library.opcheck(operator, args, kwargs)
            checked.add(operator._schema.name)
    assert checked == registered(namespace_of(new))


@pytest.mark.full
@ALL
def test_compiled_training(model, variant):
    """By inductor; what does not depend on the backend is in test_edges.py."""
    for settings in FORMS.get(model.name, [{}])[:2]:
        torch._dynamo.reset()
        _, new, x = make(model, variant, **settings)
        compiled = torch.compile(new, fullgraph=True)
        for content in (x, x[:2]):
            assert all(map(torch.equal, gradients(compiled, content), gradients(new, content)))


@pytest.mark.full
@only("conv_pool_sigmoid_sum")
@pytest.mark.parametrize("march", [None, "x86-64"])
def test_the_sigmoids_error(model, variant, march):
    """What the docstring states; the input is such that the product is exact."""
    new = load_variant(variant.path, march).ModelNew(1, 1, 1, 1)
    with torch.no_grad():
        new.conv.weight.fill_(1.0)
        new.conv.bias.zero_()
        for limit, allowed in ((8.0, 7e-7), (80.0, 5e-6)):
            x = torch.linspace(-limit, limit, 200_001)
            exact = torch.sigmoid(x.double())
            assert ((new(x.view(-1, 1, 1, 1)) - exact).abs() / exact).max() < allowed
        extremes = torch.tensor([-1e30, -200.0, 200.0, 1e30, -torch.inf, torch.inf, torch.nan])
        found = new(extremes.view(-1, 1, 1, 1))
    torch.testing.assert_close(found, torch.sigmoid(extremes), atol=3e-38, rtol=0, equal_nan=True)


@only("alexnet_conv1")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_belongs(model, variant, value):
    """In the input it reaches some taps, in the upstream gradient one sample of the input; float64 says which."""
    original, new, x = make(model, variant, batch_size=2)
    upstream = torch.randn_like(original(x))
    x[0, 1, 20, 30] = value
    upstream[1, 5, 4, 6] = value
    exact = gradients(original.double(), x.double(), upstream.double())
    for truth, actual in zip(exact, gradients(new, x, upstream), strict=True):
        assert torch.equal(torch.isfinite(truth), torch.isfinite(actual))
        assert torch.isfinite(truth).any()


@only("conv3d_div_max_gap_bias_sum")
@pytest.mark.parametrize("settings", [{}, OTHERS], ids=["Winograd", "PyTorch"])
def test_of_equal_values_the_first_gets_the_gradient(model, variant, settings):
    """Equal patches (one colour, stripes), and whole numbers, whose convolutions are exact: all places as in PyTorch.

    Different patches whose values are equal in mathematics only are no such case: eager and float64 differ there, too.
    """
    original, new, x = make(model, variant, **settings, height=23, width=37)
    torch.manual_seed(1)
    colours = torch.tensor([0.1, 0.7, 0.3])[torch.randint(3, (len(x), 1, 1, 1, 1))].expand(x.shape)
    striped = torch.tensor([0.1, 0.7])[torch.arange(x.shape[3]) // 5 % 2].view(-1, 1).expand(x.shape)

    def assert_same(content):
        torch.testing.assert_close(gradients(new, content)[0], gradients(original, content)[0], rtol=1e-4, atol=1e-6)

    for content in (colours, striped, torch.zeros_like(x)):
        assert_same(content)
    whole = {name: torch.randint(-1, 2, value.shape).float() for name, value in original.conv.named_parameters()}
    for model in (original, new):
        model.conv.load_state_dict(whole)  # with a bias that is no whole number, eager's values depend on when it is added
    assert_same(torch.randint(-1, 2, x.shape).float())


PLACES, FAR = [(1, 2, 3, 4, 5), (2, 0, 0, 0, 0)], {"height": 23}


@only("conv3d_div_max_gap_bias_sum")
@pytest.mark.parametrize(
    "settings, places, value",
    [
        *((form, PLACES, value) for form in ({}, OTHERS) for value in (torch.nan, torch.inf, -torch.inf, 1e30)),
        *(
            (FAR | {"width": width}, [(1, 2, 3, 8, column)], value)
            for width, column, value in ((37, 20, 1e5), (80, 63, 1e7), (80, 64, 1e7), (80, 65, 1e7))
        ),
    ],
)
def test_special_and_far_larger_values(model, variant, settings, places, value):
    """Outputs as PyTorch's, and gradients of x at the same places: of a window's NaNs, the last.

    A value far larger than all others leaves Winograd's rounding in its tiles, and there the direct way decides where gradients
    go. Tiles are worked on in stretches of 64 columns, whose last one reads two columns more.
    """
    original, new, x = make(model, variant, **settings)
    for place in places:
        x[place] = value
    with torch.no_grad():
        torch.testing.assert_close(new(x), original(x), equal_nan=True)
    expected, actual = gradients(original, x)[0], gradients(new, x)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
