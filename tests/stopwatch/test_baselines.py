"""The original as PyTorch runs it best; nothing of it stays behind."""

import pytest
import torch
import torch.nn as nn

from playground.stopwatch.baselines import BASELINES, names_for, prepared

FLAGS = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul


def precisions():
    return [flag.fp32_precision for flag in FLAGS]


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 5, 2), nn.Flatten(), nn.LazyLinear(2))


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 9)


@pytest.mark.parametrize("name", [name for name, baseline in BASELINES.items() if not baseline.compiled])
def test_it_computes_the_same(model, x, name):
    with torch.no_grad():
        expected = model(x)
        with prepared(model, BASELINES[name]) as (prepared_model, _):
            torch.testing.assert_close(prepared_model(x), expected)


@pytest.mark.parametrize("name", BASELINES)
def test_the_model_is_not_changed(model, x, name):
    model(x)
    before = {key: (value.clone(), value.stride(), value.data_ptr()) for key, value in model.state_dict().items()}
    modules = list(model.modules())
    with prepared(model, BASELINES[name]):
        pass
    for key, value in model.state_dict().items():
        content, stride, address = before[key]
        assert torch.equal(value, content) and value.stride() == stride and value.data_ptr() == address
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert not hasattr(model, "_orig_mod")


def test_eager_is_the_model_itself(model):
    with prepared(model, BASELINES["eager"]) as (prepared_model, memory_format):
        assert prepared_model is model and memory_format is None


def test_channels_last_converts_the_weights_beforehand(model, x):
    model(x)
    with prepared(model, BASELINES["channels_last"]) as (converted, memory_format):
        assert memory_format == "channels_last"
        assert converted[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert converted[2].weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert converted[4].weight.is_contiguous()


def test_compiled_is_a_compiled_copy(model, x):
    model(x)
    with prepared(model, BASELINES["compile"]) as (compiled, memory_format):
        assert memory_format is None
        assert isinstance(compiled, torch._dynamo.OptimizedModule)
        assert compiled._orig_mod is not model
        assert torch.equal(compiled._orig_mod[0].weight, model[0].weight)


@pytest.mark.parametrize("name", BASELINES)
def test_strict_forbids_tf32_and_the_flags_come_back(model, x, name):
    model(x)
    before = precisions()
    with prepared(model, BASELINES[name]):
        assert precisions() == (["ieee"] * 3 if BASELINES[name].strict else before)
    assert precisions() == before


@pytest.mark.parametrize("name", ["eager", "eager_fp32"])
@pytest.mark.parametrize("at_first", ["tf32", "ieee", "none"])
def test_the_flags_come_back_after_an_exception(model, name, at_first):
    original = precisions()
    try:
        for flag in FLAGS:
            flag.fp32_precision = at_first
        before = precisions()
        with pytest.raises(ZeroDivisionError), prepared(model, BASELINES[name]):
            raise ZeroDivisionError
        assert precisions() == before
    finally:
        for flag, precision in zip(FLAGS, original, strict=True):
            flag.fp32_precision = precision


@pytest.mark.parametrize(
    "place, mode, quick, names",
    [
        ("cpu", "forward", True, ["eager", "channels_last"]),
        ("cpu", "forward", False, ["eager", "channels_last", "compile"]),
        ("cpu", "weights", True, ["eager"]),
        ("cpu", "weights_and_input", False, ["eager", "compile"]),
        ("cuda", "forward", True, ["eager", "channels_last", "eager_fp32"]),
        ("cuda", "forward", False, ["eager", "channels_last", "compile", "eager_fp32", "compile_fp32"]),
        ("cuda", "weights", False, ["eager", "compile", "eager_fp32", "compile_fp32"]),
    ],
)
def test_names(place, mode, quick, names):
    assert names_for(place, mode, quick) == names
