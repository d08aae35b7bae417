"""The original as PyTorch runs it best; nothing of it stays behind."""

import contextlib

import pytest
import torch
import torch.nn as nn

from playground import modes
from playground.clock import prepared as preparing
from playground.clock.baselines import BASELINES, SETTINGS, distinct, named, names_for, peers, under
from playground.clock.prepared import precision_of, prepare
from playground.report.figures import BASELINES as SHOWN
from playground.report.figures import LOWER_PRECISION, baseline_name
from playground.report.figures import SETTINGS as SHOWN_SETTINGS

FLAGS = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul


def precisions():
    return [flag.fp32_precision for flag in FLAGS]


def test_each_is_shown_by_a_name_of_its_own():
    assert list(SHOWN) == list(BASELINES)
    assert len(set(SHOWN.values())) == len(SHOWN)
    assert list(SHOWN_SETTINGS) == list(SETTINGS) == list(preparing.FLAGS)
    assert baseline_name("compile+benchmark") == "torch.compile with cudnn.benchmark"
    assert [name for name, baseline in BASELINES.items() if baseline.dtype] == [LOWER_PRECISION]


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 5, 2), nn.Flatten(), nn.LazyLinear(2))


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 9)


@pytest.mark.parametrize("name", [name for name, baseline in BASELINES.items() if not baseline.compiled])
def test_it_computes_the_same(model, x, name):
    with torch.no_grad(), precision_of(BASELINES[name]):
        expected = model(x)
        prepared, *_ = prepare(model, BASELINES[name])
        torch.testing.assert_close(prepared(x), expected)


@pytest.mark.parametrize("name", BASELINES)
def test_the_model_is_not_changed(model, x, name):
    model(x)
    before = {key: (value.clone(), value.stride(), value.data_ptr()) for key, value in model.state_dict().items()}
    modules = list(model.modules())
    prepared, *_ = prepare(model, BASELINES[name])
    assert prepared is not model
    for key, value in model.state_dict().items():
        content, stride, address = before[key]
        assert torch.equal(value, content) and value.stride() == stride and value.data_ptr() == address
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert not hasattr(model, "_orig_mod")


def test_channels_last_converts_the_weights_beforehand(model, x):
    model(x)
    converted, memory_format, dtype = prepare(model, BASELINES["channels_last"])
    assert memory_format == "channels_last" and dtype is None
    assert converted[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert converted[2].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert converted[4].weight.is_contiguous()


def test_compiled_is_a_compiled_copy(model, x):
    model(x)
    compiled, memory_format, dtype = prepare(model, BASELINES["compile"])
    assert memory_format is None and dtype is None
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
    assert compiled._orig_mod is not model
    assert torch.equal(compiled._orig_mod[0].weight, model[0].weight)


def test_fp16_converts_the_model_beforehand(model, x):
    model(x)
    converted, memory_format, dtype = prepare(model, BASELINES["compile_fp16"])
    assert memory_format == "channels_last" and dtype is torch.float16
    assert isinstance(converted, torch._dynamo.OptimizedModule)
    assert all(parameter.dtype is torch.float16 for parameter in converted.parameters())
    assert converted._orig_mod[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.full
def test_what_torch_would_stop_compiling_is_an_error():
    """A frame that was compiled too often would run uncompiled, and be timed as if it were not."""

    compiled, *_ = prepare(nn.ReLU(), BASELINES["compile"])
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.ones(2))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            compiled(torch.ones(2, 2))


@pytest.fixture(params=["tf32", "ieee", "none"])
def set_before(request):
    before = {flag: flag.fp32_precision for flag in FLAGS}
    modes.set_fp32_precision(dict.fromkeys(FLAGS, request.param))
    yield
    modes.set_fp32_precision(before)


@pytest.mark.parametrize("name", [*BASELINES, "eager+benchmark+tf32"])
def test_its_flags_hold_while_it_runs_and_no_longer(set_before, name):
    """Whatever they were before, and after an exception, too."""
    before, baseline = precisions(), named(name)
    for error in None, ZeroDivisionError:
        with pytest.raises(error) if error else contextlib.nullcontext(), precision_of(baseline):
            assert precisions() == (["ieee"] * 3 if baseline.strict else ["tf32"] * 3 if "tf32" in name else before)
            assert torch.backends.cudnn.benchmark == ("benchmark" in name)
            if error:
                raise error
        assert (precisions(), torch.backends.cudnn.benchmark) == (before, False)


STRICT = ["eager_fp32", "channels_last_fp32", "compile_fp32"]


@pytest.mark.parametrize(
    "place, mode, quick, max_autotune, strict, names",
    [
        ("cpu", "forward", True, False, False, ["eager", "channels_last"]),
        ("cpu", "forward", False, False, False, ["eager", "channels_last", "compile"]),
        ("cpu", "forward", False, True, False, ["eager", "channels_last", "compile", "compile_max"]),
        ("cpu", "weights", True, False, False, ["eager"]),
        ("cpu", "weights_and_input", False, False, False, ["eager", "compile"]),
        ("cuda", "forward", True, False, False, ["eager", "channels_last", "eager_fp32", "channels_last_fp32"]),
        ("cuda", "forward", False, False, False, ["eager", "channels_last", "compile", *STRICT, "compile_fp16"]),
        ("cuda", "weights", False, False, False, ["eager", "compile"]),
        ("cuda", "weights", False, True, False, ["eager", "compile", "compile_max"]),
        ("cuda", "forward", False, False, True, ["eager", "channels_last", "compile"]),
    ],
)
def test_names(place, mode, quick, max_autotune, strict, names):
    assert names_for(place, mode, quick, max_autotune, strict) == names
    assert set(names) <= set(BASELINES)


def test_no_code_is_timed_twice():
    names = names_for("cuda", "forward", False, False, False)
    assert distinct(names, has_layouts=True, uses_tf32=True) == names
    assert distinct(names, has_layouts=False, uses_tf32=True) == [
        "eager",
        "compile",
        "eager_fp32",
        "compile_fp32",
        "compile_fp16",
    ]
    assert distinct(names, has_layouts=False, uses_tf32=False) == ["eager", "compile", "compile_fp16"]
    left = distinct(names, has_layouts=True, uses_tf32=False)
    assert left == ["eager", "channels_last", "compile", "compile_fp16"] and peers(left, "fp32") == left[:3]


def test_peers_are_at_least_as_precise():
    names = ["eager", "compile", "eager_fp32", "compile_fp32"]
    assert peers(names, "tf32") == names, "what is stricter and faster counts as well"
    assert peers(names, "fp16") == names
    assert peers(names, "fp32") == ["eager_fp32", "compile_fp32"]
    assert peers([*names, "compile_fp16"], "tf32") == names, "fp16 is no peer of what may use TF32"
    assert peers([*names, "compile_fp16"], "fp16") == [*names, "compile_fp16"]
    assert peers(["eager", "compile"], "fp32") == ["eager", "compile"], "where there is no TF32 all are strict"


def test_a_variant_that_sets_a_flag_is_timed_beside_what_has_it_set_too():
    usual = names_for("cuda", "forward", True, False, False)
    names = under(("benchmark",), usual)
    assert names == ["eager", *(f"{name}+benchmark" for name in usual)]
    assert peers(names, "fp32", ("benchmark",)) == ["eager_fp32+benchmark", "channels_last_fp32+benchmark"]
    assert peers(names, "fp32") == ["eager"], "without the flag, those that have it set do not count"
    assert under((), usual) == usual


def test_strict_baselines_are_no_match_for_a_variant_that_permits_itself_tf32():
    names = under(("tf32",), names_for("cuda", "forward", True, False, False))
    assert names == ["eager", "eager+tf32", "channels_last+tf32"]
    assert peers(names, "fp32", ("tf32",)) == ["eager+tf32", "channels_last+tf32"]
