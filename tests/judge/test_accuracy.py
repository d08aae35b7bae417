"""How exact a result is, in classes: plain float32 in any usual order of adding is one, and not a wrong one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from judged import judged_texts, referee_of

from playground import tensors
from playground.judge import accuracy, classes, reordered
from playground.judge.oracle import Oracle
from playground.judge.precision import cut_to_tf32
from playground.judge.probes import Probe
from playground.judge.tolerance import Reference

CPU = torch.device("cpu")


class Sum(torch.nn.Module):
    def forward(self, x):
        return x.sum(1)


def in_sequence(terms):
    """Sums of rows, one term after another in float32."""
    return torch.from_numpy(np.add.accumulate(terms.numpy(), axis=1)[:, -1].copy())


def by_threads(terms, threads):
    """Each thread adds every so many-th term, one after another; then their sums."""
    return in_sequence(torch.stack([in_sequence(terms[:, k::threads]) for k in range(min(threads, terms.shape[1]))], 1))


ORDERS = {
    "from the last": lambda terms: in_sequence(terms.flip(1)),
    "from the middle": lambda terms: in_sequence(terms.roll(terms.shape[1] // 2, 1)),
    "by 32 threads": lambda terms: by_threads(terms, 32),
    "by 7 threads": lambda terms: by_threads(terms, 7),
}


def graded(terms, *results):
    """[(class of a result, whether eager PyTorch's limit permits it), ...] of results for the sums of rows."""
    probe, oracle = Probe("own", [terms]), Oracle(Sum(), CPU)
    truth, eager = oracle.reference(probe).outputs[0], oracle.eager(probe).outputs[0]
    permitted = [outcome.outputs[0] for outcome in oracle.permitted(probe, "fp32")]
    reference = Reference(truth, eager, *permitted)
    outcomes = {"float32": oracle.reordered(probe)} | {name: oracle.lowered(probe, name) for name in ("tf32", "fp16", "bf16")}
    permits = [reference.compare("it", each).complaint is None for each in results]
    return [
        (accuracy.grade([reference], [each], outcomes.get), permitted) for each, permitted in zip(results, permits, strict=True)
    ]


@pytest.mark.parametrize("count", [16, 256, 4096, 65536, pytest.param(1_000_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_a_sum_in_any_usual_order_is_float32(count, kind):
    torch.manual_seed(count)
    rows = 8 if count > 65536 else 64
    terms = torch.rand(rows, count) if kind == "uniform" else torch.randn(rows, count)
    found = [each for each, _ in graded(terms, *(add(terms) for add in ORDERS.values()))]
    assert dict(zip(ORDERS, found, strict=True)) == dict.fromkeys(ORDERS, classes.FLOAT32)


@pytest.mark.parametrize("count", [256, 65536])
def test_a_sum_that_is_less_exact_is_not(count):
    terms = torch.rand(64, count)
    results = terms.bfloat16().float().sum(1), terms[:, 1:].sum(1), terms.sum(1).roll(1, 0)
    rounded, without_one, of_other_rows = [found for found, _ in graded(terms, *results)]
    assert rounded in ("fp16", "bf16")
    assert without_one == classes.WRONG or count > 256
    assert of_other_rows == classes.WRONG


def test_one_after_another_is_beyond_what_pytorch_itself_does():
    """Or the class would be none of its own."""
    terms = torch.rand(64, 65536)
    one_after_another, (_, permitted) = graded(terms, in_sequence(terms), terms.sum(1))
    assert one_after_another == (classes.FLOAT32, False)
    assert permitted


NORMS = {
    "layer norm": lambda x: F.layer_norm(x, (64,)),
    "group norm": lambda x: F.group_norm(x, 4),
    "instance norm": F.instance_norm,
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_terms_of_a_norm_are_added_in_the_order(norm):
    """In one pass, the mean of the squares less the square of the mean, little is left beside a large mean."""
    x = 1000 + torch.randn(8, 16, 64)
    true = norm(x.double())
    errors = {}
    for order in reordered.ORDERS:
        with reordered.Reordered(order):
            errors[order] = (norm(x) - true).abs().max().item()
    assert errors["in one pass"] > 20 * errors["one after another"] > 0


def test_classes_in_their_order():
    """Operands in TF32 are off by 1e-3 here, and the spread is 0.58."""
    truth = torch.linspace(-1, 1, 100, dtype=torch.float64)
    reference = Reference(truth, truth.float())

    def grade(*outputs, skipped=()):
        permitted = lambda name: [tensors.Results([truth + 1e-3 * (name == "tf32")])]  # noqa: E731
        return accuracy.grade([reference], [each.float() for each in outputs], permitted, skipped)

    assert grade(truth) == classes.FLOAT32
    assert grade(truth + 1e-3) == grade(truth, skipped=(classes.FLOAT32,)) == "tf32"
    assert grade(truth + 3e-3) == "approximate to 0.01"
    assert grade(1.5 * truth) == grade() == grade(truth[:50]) == grade(truth, truth) == classes.WRONG


@pytest.fixture
def court(worker, tmp_path):
    """court(problem, variant, accept) -> the result; both are texts without their imports."""

    return lambda problem, variant, accept=None: judged_texts(worker, tmp_path, problem, variant, accept=accept)[0]


INSTANCE_NORM = """
class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.InstanceNorm2d(channels)

    def forward(self, x):
        return self.norm(x)

batch_size, channels, side = 2, 4, 256

def get_inputs():
    return [torch.rand(batch_size, channels, side, side)]
"""
IN_SEQUENCE = """import numpy as np

class ModelNew(nn.Module):
    def __init__(self, channels):
        super().__init__()

    def forward(self, x):
        if x.requires_grad:
            raise NotImplementedError("forward only")
        rows = x.flatten(0, 1).flatten(1)
        def mean(terms):
            total = np.add.accumulate(terms.cpu().numpy(), axis=1)[:, -1:].copy()
            return torch.from_numpy(total) / terms.shape[1]
        middle = mean(rows)
        spread = mean((rows - middle) ** 2)
        return ((rows - middle) / torch.sqrt(spread + 1e-5)).view(x.shape)
"""


def test_a_norm_that_adds_65536_floats_one_after_another_meets_forward(court):
    result = court(INSTANCE_NORM, IN_SEQUENCE)
    assert (result["verdict"], result["accuracy"]["class"]) == ("forward only", "float32"), result["reason"]
    (caveat,) = [caveat for caveat in result["caveats"] if caveat["tag"] == "accuracy"]
    assert "is off by" in caveat["text"] and "(allowed " in caveat["text"]
    assert result["accuracy"]["error"] > result["accuracy"]["limit"]


GELU = """
class Model(nn.Module):
    def forward(self, x):
        return F.gelu(x)

batch_size, features = 16, 64

def get_inputs():
    return [torch.randn(batch_size, features)]
"""
TANH_GELU = """
class ModelNew(nn.Module):
    def forward(self, x):
        return F.gelu(x, approximate="tanh")
"""


def test_an_approximation_fails_with_its_class(court):
    result = court(GELU, TANH_GELU)
    assert result["verdict"] == "fail"
    assert result["accuracy"]["class"] in classes.CLASSES[2:-1]
    assert "; GELU by tanh in the place of erf; first wrong" in result["reason"] and "(accuracy: " not in result["reason"]
    assert {found["verdict"] for found in result["standards"].values()} == {"fail"}


def test_an_approximation_that_is_accepted_is_forward_only_and_labelled(court):
    result = court(GELU, TANH_GELU, accept=1e-3)
    assert result["verdict"] == "forward only", result["reason"]
    assert result["accuracy"]["accepted"] == 1e-3
    assert "accuracy" in [caveat["tag"] for caveat in result["caveats"]]


def test_more_than_is_accepted_fails(court):
    assert court(GELU, TANH_GELU, accept=1e-5)["verdict"] == "fail"


FAINT = """
class Model(nn.Module):
    def forward(self, x):
        return x + 0.002 * torch.sin(8 * x)

batch_size, features = 16, 64

def get_inputs():
    return [torch.randn(batch_size, features)]
"""
ONLY_X = """
class ModelNew(nn.Module):
    def forward(self, x):
        return x + 0
"""


def test_what_hides_a_mutant_is_not_accepted(court):
    """Within 1e-2 of the spread the sine may be left out: an error of that size says nothing there."""
    result = court(FAINT, ONLY_X, accept=1e-2)
    assert result["verdict"] == "fail"
    assert "accepting it would accept" in result["reason"]


CONVOLUTION = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(16, 24, 3)

    def forward(self, x):
        return self.conv(x)

def get_inputs():
    return [torch.randn(4, 16, 20, 20)]
"""


def gradients_at(tmp_path, problem, place, name):
    """(x, upstream, the model, its gradients of both, the class of a changed gradient of that name) of a problem's text."""
    referee, inputs, file = referee_of(tmp_path, problem, place), str(tmp_path / "inputs"), str(tmp_path / "gradients")
    referee.prepare("scaled", "own", 3, inputs)
    given = tensors.load(inputs)
    model = tensors.copy_model(referee.model)

    def of(x, upstream):
        return tensors.gradients(model, [x], [upstream], given["wanted_inputs"])

    def class_of(x, upstream, change=lambda gradients: None):
        outputs, gradients = of(x, upstream)
        change(gradients)
        tensors.save_results(tensors.Results(outputs, gradients), file)
        found = referee.compare_gradients("scaled", file)[name]
        assert bool(found["complaint"]) == (found["class"] == classes.WRONG)
        return found["class"]

    return *given["inputs"], *given["upstream"], of, class_of


@pytest.mark.parametrize("place, permitted", [("emulator", classes.AS_PYTORCH), ("cpu", classes.WRONG)])
def test_gradients_have_classes(tmp_path, place, permitted):
    """TF32's, whichever way operands are rounded, is PyTorch's where that may use it; a planted mistake never is."""
    x, upstream, gradients_of, class_of = gradients_at(tmp_path, CONVOLUTION, place, "conv.weight")
    cut = cut_to_tf32(x), cut_to_tf32(upstream)
    assert class_of(x, upstream) is None
    assert class_of(*cut) == permitted

    def without_a_tap(gradients):
        gradients["conv.weight"][:, :, 1, 1] = 0

    def without_a_sample(gradients):
        _, others = gradients_of(x[1:], upstream[1:])
        gradients["conv.weight"].copy_(others["conv.weight"])

    def a_hundredth_larger(gradients):
        gradients["conv.weight"] *= 1.01

    for mistake in without_a_tap, without_a_sample, a_hundredth_larger:
        assert class_of(x, upstream, mistake) == class_of(*cut, mistake) == classes.WRONG


SCALE = CONVOLUTION.replace("self.conv = torch.nn.Conv2d(16, 24, 3)", "self.weight = torch.nn.Parameter(torch.ones(1))")
SCALE = SCALE.replace("self.conv(x)", "(self.weight * x).sum(1)").replace("randn(4, 16, 20, 20)", "rand(2, 1_000_000)")


def test_a_gradient_in_another_order_of_adding_is_float32(tmp_path):
    """One thread that adds a million terms one after another."""
    x, upstream, _, class_of = gradients_at(tmp_path, SCALE, "cpu", "weight")
    in_turn = in_sequence((x * upstream[:, None]).reshape(1, -1))
    assert class_of(x, upstream, lambda gradients: gradients.update(weight=in_turn)) == classes.FLOAT32


BELL = """
class Model(nn.Module):
    def forward(self, x):
        return torch.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 2)
def get_inputs():
    return [4 * torch.randn(48, 24)]
def get_init_inputs():
    return []
"""
NEW = """
class ModelNew(nn.Module):
    def forward(self, x):
        {}
"""
# Distances one term after another, and by |x|^2 + |y|^2 - 2xy, which rounds otherwise; exponentials of parts.
KEEP_SMALL = [
    "return torch.exp(-(sum((x[:, None, k] - x[None, :, k]) ** 2 for k in range(x.shape[1]))) / 2)",
    "s = (x * x).sum(1); return torch.exp(-(s[:, None] + s[None] - 2 * x @ x.T).clamp(min=0) / 2)",
    "return torch.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 8) ** 4",
]
LOSE_SMALL = [
    "y = torch.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 2); return torch.where(y < 1e-6, 0 * y, y)",
    "y = torch.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 2); return (1 + y) - 1",
]


def test_small_values_in_another_formula_are_right_and_lost_ones_a_caveat(worker, tmp_path):
    solutions = [NEW.format(body) for body in (*KEEP_SMALL, *LOSE_SMALL)]
    results = judged_texts(worker, tmp_path, BELL, *solutions)
    tags = [[each["tag"] for each in result["caveats"]] for result in results]
    assert not any("small-values" in each for each in tags[: len(KEEP_SMALL)]), tags
    assert all("small-values" in each for each in tags[len(KEEP_SMALL) :]), tags
    assert [result["verdict"] for result in results[len(KEEP_SMALL) :]] == ["forward only"] * len(LOSE_SMALL)
