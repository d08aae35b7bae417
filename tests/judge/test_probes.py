"""Inputs that make a model's outputs vary."""

from types import SimpleNamespace

import pytest
import torch

from playground import catalog, tensors
from playground.judge import checks, probes
from playground.worker.referee import Referee


def problem(*make):
    return SimpleNamespace(get_inputs=lambda: [function() for function in make])


UNIFORM = problem(lambda: torch.rand(64, 50, 100))


def test_own_is_what_the_problem_gives():
    probe = probes.own(UNIFORM, 3)
    torch.manual_seed(3)
    assert torch.equal(probe.inputs[0], torch.rand(64, 50, 100))
    assert probe.upstream is None and probe.wanted_inputs == ()


@pytest.mark.parametrize("make", [probes.own, probes.scaled])
def test_content_follows_the_seed(make):
    (first,), (same,), (other,) = (make(UNIFORM, seed).inputs for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_content_follows_the_seed_where_the_problem_sets_one_of_its_own():
    """Or everybody would know it."""
    seeded = problem(lambda: torch.manual_seed(42) and torch.rand(64, 50))
    (first,), (other,) = (probes.scaled(seeded, seed).inputs for seed in (1, 2))
    assert not torch.equal(first, other)


def test_scaled_gives_each_sample_a_scale_and_an_offset_of_its_own():
    (x,) = probes.scaled(UNIFORM, 0).inputs
    assert x.shape == (64, 50, 100) and x.dtype == torch.float32
    samples = x.reshape(64, -1)
    scales, offsets = samples.std(dim=1), samples.mean(dim=1)
    assert scales.min() > 0.24 and scales.max() < 4.1
    assert scales.max() / scales.min() > 8
    assert (offsets.abs() < 1 + 0.25).all()
    assert offsets.max() - offsets.min() > 1
    assert x.min() < 0 < x.max()


def test_scaled_leaves_integers_and_what_is_no_tensor():
    indices = torch.tensor([[1, 2], [3, 4]])
    mask = torch.tensor([True, False])
    x, found, where, number = probes.scaled(
        problem(lambda: torch.rand(2, 3), lambda: indices, lambda: mask, lambda: 0.5), 0
    ).inputs
    assert not ((x >= 0) & (x < 1)).all()
    assert torch.equal(found, indices) and torch.equal(where, mask) and number == 0.5


def test_upstream_where_an_output_and_an_input_can_have_a_gradient():
    probe = probes.scaled(problem(lambda: torch.rand(2, 3), lambda: torch.tensor([1, 2]), lambda: torch.rand(2)), 0)
    outputs = [torch.rand(2, 5), torch.tensor([1, 0]), torch.rand(())]
    with_upstream = probes.with_upstream(probe, outputs, 7)
    first, second, third = with_upstream.upstream
    assert first.shape == (2, 5) and second is None and third.shape == ()
    assert first.min() < 0, "normal values, so that signs show"
    assert with_upstream.wanted_inputs == (0, 2)
    assert all(a is b for a, b in zip(with_upstream.inputs, probe.inputs, strict=True))
    assert not any(tensors.differentiable(value) and value.requires_grad for value in probe.inputs)


def test_an_impulse_is_one_element_a_sample_of_the_first_float_input():
    indices, x, other = probes.impulse(
        problem(lambda: torch.tensor([1, 2]), lambda: torch.rand(5, 3, 4), lambda: torch.rand(5)), 0
    ).inputs
    assert (x.reshape(5, -1) != 0).sum(1).tolist() == [1] * 5
    assert len({int(sample.argmax()) for sample in x.reshape(5, -1)}) > 1
    assert (other != 0).all() and indices.tolist() == [1, 2]


def test_a_ramp_rises_along_each_sample():
    (x,) = probes.ramp(UNIFORM, 0).inputs
    assert (x.reshape(64, -1).diff(dim=1) > 0).all()
    assert x[:, 0, 0].std() > 0.1


@pytest.mark.parametrize("make, magnitude", [(probes.large, 1e5), (probes.small, 1e-3)])
def test_magnitudes(make, magnitude):
    (x,) = make(UNIFORM, 0).inputs
    assert 0.3 * magnitude < x.std() < 3 * magnitude


def test_the_last_sample_of_large_values_is_negative():
    (x,) = probes.large(UNIFORM, 0).inputs
    assert (x[-1] < 0).all() and all((sample > 0).any() for sample in x[:-1])


@pytest.mark.parametrize("make, test", [(probes.nan, torch.isnan), (probes.infinity, torch.isposinf)])
def test_one_special_value_in_the_last_sample(make, test):
    probe = make(UNIFORM, 0)
    (x,), (clean,) = probe.inputs, probe.clean
    assert test(x).sum() == 1 and test(x[-1]).sum() == 1
    assert torch.isfinite(clean).all() and (x != clean)[1:].sum() == 1


def test_minus_infinity_in_the_first_of_three_samples_and_zeros_in_the_second():
    for make, share in ((probes.nan, 0.5), (probes.infinity, 1.0)):
        (x,) = make(UNIFORM, 0).inputs
        assert torch.isneginf(x).sum() == share * x[0].numel() and torch.isneginf(x[0, 0]).all()
    assert x[1].abs().max() == 0 and probes.infinity(UNIFORM, 0).clean[0][1].abs().max() == 0
    (x,) = probes.infinity(problem(lambda: torch.rand(2, 5)), 0).inputs
    assert (~torch.isfinite(x)).sum() == 1 and (x != 0).all(), "one of two samples stays as it is"


@pytest.mark.parametrize("name", checks.PROBE_NAMES)
@pytest.mark.parametrize(
    "shape, dtype",
    [*(((), torch.float32), ((0, 3), torch.float32), ((1,), torch.float32)), ((2, 3), torch.float64), ((2, 3), torch.float16)],
)
def test_every_probe_keeps_shapes_and_types(name, shape, dtype):
    given = problem(lambda: torch.ones(shape, dtype=dtype), lambda: torch.tensor([1, 2]), lambda: 0.5)
    made = probes.make(name, given, 0, {"w": torch.ones(2)})
    assert made.name == name
    assert made.inputs[0].shape == shape and made.inputs[0].dtype == dtype
    assert made.inputs[1].tolist() == [1, 2] and made.inputs[2] == 0.5


def test_a_step_changes_the_weights_in_place():
    model = torch.nn.Linear(3, 2)
    before, address, version = model.weight.clone(), model.weight.data_ptr(), model.weight._version
    probe = probes.make("step", UNIFORM, 0, dict(model.named_parameters()))
    probes.take_step(model, probe.step)
    torch.testing.assert_close(model.weight, before - probe.step["weight"])
    assert model.weight.data_ptr() == address and model.weight._version > version and model.weight.grad is None
    assert (model.weight - before).abs().mean() > 0.3 * before.abs().mean()


def test_a_weight_that_no_optimiser_sees():
    with pytest.raises(TypeError, match="weight is no parameter of Module"):
        probes.take_step(torch.nn.Module(), {"weight": torch.ones(2)})


def test_weights_eight_times_as_large():
    model = torch.nn.Linear(3, 2)
    expected = 8 * model.weight.detach()
    probes.take_step(model, probes.make("weights", UNIFORM, 0, dict(model.named_parameters())).step)
    torch.testing.assert_close(model.weight.detach(), expected)


def test_a_probe_at_its_own_size_is_the_same_probe():
    assert checks.size_of("ramp") == "reduced" and checks.size_of("ramp" + checks.AT_OWN_SIZE) == "own"
    a, b = (probes.make(name, UNIFORM, 3, {}) for name in ("ramp", "ramp" + checks.AT_OWN_SIZE))
    assert torch.equal(a.inputs[0], b.inputs[0])


@pytest.mark.parametrize("model", catalog.models(), ids=lambda model: model.name)
def test_autocast_can_be_judged_for_our_models(model, tmp_path):
    """With these weights. With others the 16-bit sum of thousands of sigmoids can be too coarse, and the result says so."""
    referee = Referee()
    referee.load(str(model.path), catalog.SETTINGS["emulator"][model.name], "cpu", tmp_path / "weights", 1)
    for seed in range(3):
        assert referee.prepare("autocast", "reduced", seed, tmp_path / "inputs")["unusable"] is None
        (reference,) = referee.references["autocast"][0]
        wrong = reference.float64.roll(1, 0).float()
        assert reference.compare("", reference.float64.float()).complaint is None and reference.compare("", wrong).complaint
