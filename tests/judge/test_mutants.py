"""Wrong versions that are made from a model itself: which there are, that each is wrong, and what the count of them says."""

import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_oracle import Fits

from playground import catalog, tensors
from playground.judge import mutants, probes
from playground.judge.calls import Call, Unfit
from playground.judge.checks import EVAL, PROBES
from playground.judge.mutations import MUTATIONS
from playground.judge.oracle import Oracle
from playground.judge.probes import Probe
from playground.judge.references import references_of
from playground.worker.referee import Referee

CPU = torch.device("cpu")


def x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


IMAGE, WEIGHT, BIAS = x(2, 4, 8, 8), x(6, 4, 3, 3), x(6)
ROWS, LABELS = x(5, 7), torch.tensor([1, 0, 3, 6, 2])
LSTM, GRU = nn.LSTM(4, 8), nn.GRU(4, 8, num_layers=2)
QUERY = x(2, 3, 6, 4)

# Calls to which, together, every mutation must apply. Each is run as it stands, under a mode that applies the mutation.
CALLS = {
    "convolution": [
        lambda: F.conv2d(IMAGE, WEIGHT, BIAS),
        lambda: F.conv2d(IMAGE, WEIGHT, BIAS, stride=2, padding=1),
        lambda: F.conv_transpose2d(IMAGE, x(4, 6, 3, 3), BIAS, stride=2),
        lambda: F.conv3d(x(1, 2, 4, 6, 6), x(3, 2, 2, 3, 3)),
        lambda: F.conv1d(x(2, 4, 9), x(6, 4, 3), groups=1),
    ],
    "linear": [lambda: F.linear(ROWS, x(7, 7), x(7)), lambda: F.linear(ROWS, x(3, 7))],
    "product": [lambda: x(5, 5) @ x(5, 5).exp(), lambda: torch.matmul(x(3, 4, 6), x(3, 6, 2))],
    "sum with a product": [lambda: torch.addmm(x(5, 5), x(5, 5).sin(), x(5, 5).exp())],
    "maximum pooling": [lambda: F.max_pool2d(IMAGE - 3, 2), lambda: nn.MaxPool1d(3, stride=2, padding=1)(x(2, 3, 9))],
    "average pooling": [lambda: F.avg_pool2d(IMAGE, 2), lambda: nn.AvgPool2d(3, stride=1, padding=1)(IMAGE)],
    "global pooling": [lambda: F.adaptive_avg_pool2d(IMAGE, 1), lambda: F.adaptive_max_pool2d(IMAGE, (2, 1))],
    "reduction": [
        lambda: IMAGE.sum((1, 2)),
        lambda: torch.mean(ROWS, dim=1, keepdim=True),
        lambda: torch.max(ROWS, 1)[0],
        lambda: x(4, 4).amin(0),
        lambda: torch.norm(ROWS, dim=1),
        lambda: ROWS.logsumexp(1),
    ],
    "scan": [lambda: torch.cumsum(x(4, 4), dim=1)],
    "softmax": [lambda: F.softmax(x(4, 4), dim=1), lambda: torch.log_softmax(ROWS, 1)],
    "batch norm": [lambda: F.batch_norm(IMAGE + 1, x(4), x(4).exp(), x(4), x(4), training=True)],
    "layer norm": [lambda: F.layer_norm(ROWS + 1, (7,), x(7), x(7))],
    "group norm": [lambda: F.group_norm(IMAGE, 2, x(4), x(4))],
    "instance norm": [lambda: F.instance_norm(IMAGE + 1, weight=x(4), bias=x(4).exp())],
    "rms norm": [lambda: F.rms_norm(ROWS, (7,), x(7))],
    "activation": [
        *(lambda f=f: f(8 * IMAGE) for f in (F.relu, torch.sigmoid, torch.tanh, F.gelu, F.silu, F.elu, F.softplus, F.mish)),
        *(lambda f=f: f(8 * IMAGE) for f in (F.leaky_relu, F.hardtanh, F.relu6, F.selu, F.hardswish, F.logsigmoid)),
        lambda: torch.clamp(IMAGE, min=-1, max=1),
    ],
    "addition": [lambda: ROWS + x(5, 7), lambda: ROWS + 3],
    "subtraction": [lambda: ROWS - x(5, 7).exp()],
    "multiplication": [lambda: ROWS * x(5, 7), lambda: 2 * ROWS],
    "division": [lambda: ROWS / 3],
    "embedding": [lambda: F.embedding(LABELS, x(7, 4))],
    "loss": [
        lambda: F.cross_entropy(ROWS, LABELS),
        lambda: F.smooth_l1_loss(ROWS, 3 * x(5, 7), reduction="sum"),
        lambda: F.kl_div(ROWS.log_softmax(1), x(5, 7).softmax(1), reduction="batchmean"),
    ],
    "recurrence": [lambda: LSTM(x(3, 2, 4))[0], lambda: GRU(x(3, 2, 4))[0]],
    "attention": [lambda: F.scaled_dot_product_attention(QUERY, QUERY.flip(2), QUERY.cos())],
    "concatenation": [lambda: torch.cat([ROWS, ROWS + 1], 1)],
    "other": [lambda: torch.exp(ROWS)],
}


def under(patches, function):
    with mutants.Patched(patches), torch.no_grad():
        return function()


def sites(function):
    with mutants.Patched({}) as recorder, torch.no_grad():
        function()
    return recorder.sites


def outcome(function, kind, mutation):
    """The result of the mutated call; None where the mutation does not apply to it."""
    number = max(i for i, site in enumerate(sites(function)) if site.kind == kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return under({number: mutation}, function)
        except (Unfit, RuntimeError):
            return None


@pytest.mark.parametrize("kind, title", [(kind, title) for kind, titles in MUTATIONS.items() for title in titles])
def test_every_mutation_is_wrong_somewhere(kind, title):
    results = [(function(), outcome(function, kind, MUTATIONS[kind][title])) for function in CALLS[kind]]
    made = [(right, wrong) for right, wrong in results if wrong is not None]
    assert made, "applies to none of the calls"
    assert any(right.shape != wrong.shape or not torch.allclose(right, wrong, rtol=1e-4, atol=1e-4) for right, wrong in made)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_without_a_patch_nothing_changes(kind):
    for function in CALLS[kind]:
        with torch.no_grad():  # as under(): oneDNN's LSTM has other bits where a gradient is wanted
            expected = function()
        assert torch.equal(under({}, function), expected)


def test_in_place_operators_work_in_place_unless_they_are_mutated():
    def function():
        y = ROWS.clone()
        y.mul_(2)
        y += 1
        return F.relu(y, inplace=True)

    assert torch.equal(under({}, function), (2 * ROWS + 1).relu())
    numbers = {site.label: i for i, site in enumerate(sites(function))}
    patched = under({numbers["relu"]: MUTATIONS["activation"]["dropped"]}, function)
    assert torch.equal(patched, 2 * ROWS + 1)


class Net(nn.Module):
    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._forward = forward

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def exam_of(model, *inputs, gradients=True):
    """An Exam of a probe with these inputs."""
    oracle = Oracle(model, CPU)
    probe = Probe("test", list(inputs))
    if gradients:
        probe = probes.with_upstream(probe, oracle.eager(probe).outputs, 1)
    references = references_of(oracle.reference(probe), oracle.eager(probe), oracle.permitted(probe, "fp32"))
    return mutants.Exam(lambda: probe, sum(value.numel() for value in inputs), oracle, *references)


def fresh_of(oracle, *inputs):
    probe = Probe("fresh", list(inputs))
    probe = probes.with_upstream(probe, oracle.eager(probe).outputs, 2)
    return [(probe, oracle.reference(probe))]


def scored(model, checked, varied, gradients=True):
    """(score, names of all mutants) of a check with the inputs `checked`; `varied` tell what differs."""
    torch.manual_seed(0)
    exams = [exam_of(model, inputs, gradients=gradients) for inputs in (checked, checked.flip(-1))]
    made = mutants.mutants_of(model, [varied], gradients)
    oracle = exams[0].oracle
    return mutants.score(made, exams, oracle, fresh_of(oracle, varied)), [mutant.name for mutant in made]


def test_one_that_the_check_cannot_tell_is_named():
    model = Net(lambda self, x: self.linear(F.relu(x)), linear=nn.Linear(6, 3))
    score, names = scored(model, x(9, 6).abs(), x(9, 6))
    assert "relu: dropped" in names
    assert {"relu: dropped", "relu: replaced by a look-alike"} <= set(score["survivors"])
    assert score["rejected"] == score["counted"] - len(score["survivors"])
    score, _ = scored(model, x(9, 6), x(9, 6) + 0.1)
    assert not score["survivors"] and score["rejected"] == score["counted"] > 8


def scored_where_full_size(monkeypatch, model, full):
    """The score of a check that sees no difference without ReLU at the small size; `full` are the inputs at full size."""
    torch.manual_seed(0)
    monkeypatch.setattr(mutants, "CHEAP", 9 * 6)
    small = x(3, 6)
    exams = [exam_of(model, small.abs()), exam_of(model, full)]
    made = [mutant for mutant in mutants.mutants_of(model, [small], True) if mutant.name == "relu: dropped"]
    return mutants.score(made, exams, exams[0].oracle, fresh_of(exams[0].oracle, small))


def test_a_mutant_is_run_in_chunks_where_the_full_size_does_not_fit(monkeypatch):
    model = Fits(Net(lambda self, x: self.linear(F.relu(x)), linear=nn.Linear(6, 3)), 5)
    assert scored_where_full_size(monkeypatch, model, x(11, 6)) == {"counted": 1, "rejected": 1, "survivors": []}
    assert scored_where_full_size(monkeypatch, model, x(11, 6).abs()) == {
        "counted": 1,
        "rejected": 0,
        "survivors": ["relu: dropped"],
    }


def test_a_mutant_that_crashes_at_full_size_alone_has_survived(monkeypatch):
    model = Net(lambda self, x: self.linear(F.relu(x)), linear=nn.Linear(6, 3))
    eager = Oracle.eager

    def crash(self, probe, *mutate):
        if mutate and probe.inputs[0].shape[0] == 11:
            raise RuntimeError("it needs more memory than the original")
        return eager(self, probe, *mutate)

    monkeypatch.setattr(Oracle, "eager", crash)
    assert scored_where_full_size(monkeypatch, model, x(11, 6)) == {"counted": 1, "rejected": 0, "survivors": ["relu: dropped"]}


def test_what_differs_nowhere_does_not_count():
    """ReLU and maximum pooling may change places, ReLU may be done twice, and a bias in front of a batch norm does nothing."""
    model = Net(
        lambda self, x: F.max_pool2d(F.relu(self.norm(self.conv(x))), 2), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)
    )
    image = x(4, 3, 9, 9)
    score, names = scored(model, image, x(4, 3, 9, 9) + 1)
    assert {"max_pool2d: done before relu", "relu: applied twice", "conv2d: bias dropped"} < set(names)
    assert not score["survivors"]
    assert 12 < score["rejected"] == score["counted"] <= mutants.MOST


def test_the_gradient_alone():
    model = Net(lambda self, x: F.max_pool2d(x, 2))
    blind, names = scored(model, x(3, 2, 8, 8), x(3, 2, 8, 8) + 1, gradients=False)
    seeing, _ = scored(model, x(3, 2, 8, 8), x(3, 2, 8, 8) + 1)
    assert not any("gradient" in name for name in names)
    assert seeing["counted"] == blind["counted"] + 1 and seeing["survivors"] == blind["survivors"] == []


def test_the_value_of_a_wrong_gradient_is_right():
    model = Net(lambda self, x: F.max_pool2d(x, 2))
    image = x(3, 2, 8, 8).requires_grad_()
    (mutant,) = [each for each in mutants.mutants_of(model, [image], True) if "gradient" in each.name]
    mutated = mutants.MutatedModel(model, mutant.make())
    assert torch.equal(mutated(image), model(image))
    (wrong,) = torch.autograd.grad(mutated(image).sum(), image)
    assert torch.allclose(wrong, torch.full_like(image, 0.25))


def test_a_stale_output_is_that_of_the_first_call_of_its_shape():
    model = Net(lambda self, x: 2 * x)
    mutant = next(each for each in mutants.mutants_of(model, [ROWS], False) if each.name == "output of an earlier call")
    mutated = mutants.MutatedModel(model, mutant.make())
    first = mutated(ROWS)
    assert torch.equal(first, 2 * ROWS)
    assert torch.equal(mutated(ROWS + 1), first)
    assert torch.equal(mutated(ROWS[:2] + 1), 2 * (ROWS[:2] + 1))


def test_collections_of_outputs_keep_their_form():
    model = Net(lambda self, x: {"a": x + 1, "b": (x * 2, 3)})
    for mutant in mutants.mutants_of(model, [ROWS], False)[:2]:  # of the whole
        result = mutants.MutatedModel(model, mutant.make())(ROWS)
        assert result["a"].shape == result["b"][0].shape == ROWS.shape and result["b"][1] == 3


def test_a_site_of_many_is_named_by_its_number():
    model = Net(lambda self, x: torch.sigmoid(self.a(torch.sigmoid(x))), a=nn.Linear(7, 7))
    names = [mutant.name for mutant in mutants.mutants_of(model, [ROWS], False)]
    assert "sigmoid: dropped (call 1 of sigmoid)" in names and "sigmoid: dropped (call 2 of sigmoid)" in names
    assert "linear: done before sigmoid" in names
    assert len(names) == len(set(names))


@pytest.fixture(scope="module", params=[model.name for model in catalog.models()])
def referee(request, tmp_path_factory):
    """One that has prepared every probe of a model of ours, at the emulator's size."""
    tmp_path = tmp_path_factory.mktemp("referee")
    made, model = Referee(), catalog.find_model(request.param)
    made.load(str(model.path), catalog.SETTINGS["emulator"][model.name], "cpu", tmp_path / "weights", 1)
    for i, check in enumerate(PROBES):
        made.prepare(check.name, check.size, 10 + i, tmp_path / "inputs")
    return made


def score_of(referee):
    """What the referee says of its model's mutants, on all probes but the blunt ones."""
    chosen = [name for name in referee.probes if name not in ("autocast", EVAL)]
    usable = [name for name in chosen if not any(reference.is_blunt for reference in referee.references[name][0])]
    return referee.mutants(usable, True, None, 3)


def test_the_check_of_our_models_rejects_all(referee):
    score = score_of(referee)
    assert not score["survivors"]
    assert 20 <= score["counted"] == score["rejected"]


def test_nothing_that_can_be_made_of_our_models_is_left_out(referee):
    made = mutants.mutants_of(referee.model, tensors.make_inputs(referee.problem, 1), True)
    assert len(made) < min(mutants.MOST, mutants.MOST_TRIED)


def test_calls_are_read_and_changed_by_name():
    call = Call(F.conv2d, (IMAGE, WEIGHT), {"bias": BIAS, "stride": 2})
    assert (call.kind, call.label, call.get("stride"), call.get("padding", 0)) == ("convolution", "conv2d", 2, 0)
    assert torch.equal(call.again(stride=1, weight=2 * WEIGHT), F.conv2d(IMAGE, 2 * WEIGHT, BIAS))
    assert torch.equal(call.as_it_is(), F.conv2d(IMAGE, WEIGHT, BIAS, 2))
