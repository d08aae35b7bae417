"""What a judgement takes is known from shapes; where the host has too little, a sample of the results is compared."""

import pytest
import torch
from judged import referee_of
from torch import nn

from playground import tensors
from playground.judge import sizing
from playground.judge.footprint import GIB, Footprint
from playground.judge.oracle import Oracle
from playground.judge.probes import Drawing, Probe
from playground.judge.sample import ALL, LEAST, MOST, SMALL, Sample
from playground.worker.candidate import Candidate

BIG = 3 * SMALL + 5


class Problem:
    """As the module of a problem's file."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(20, 30)

        def forward(self, x):
            return torch.relu(self.linear(x)).sum(1)

    get_init_inputs = staticmethod(lambda: [])
    get_inputs = staticmethod(lambda: [torch.rand(7, 20)])


def test_it_is_measured_without_computing():
    found = sizing.measure(Problem)
    assert found == Footprint(inputs=7 * 20 * 4, parameters=(20 + 1) * 30 * 4, outputs=7 * 4, results=(2 * 7 * 30 + 7) * 4)


def test_gigabytes_are_not_made(monkeypatch):
    class Huge(Problem):
        class Model(nn.Module):
            def forward(self, x):
                return torch.sigmoid(x)

        get_inputs = staticmethod(lambda: [torch.rand(1 << 20, 1 << 20)])  # 4 TiB

    assert sizing.measure(Huge) == Footprint(inputs=4 << 40, parameters=0, outputs=4 << 40, results=4 << 40)


def test_a_model_that_needs_values_is_estimated():
    class Branches(Problem):
        class Model(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

    assert sizing.measure(Branches) == Footprint(560, 0, 560, 4 * 560)


def test_a_larger_problem_takes_more_and_a_sample_less():
    small, large = Footprint(GIB, 0, GIB, GIB), Footprint(6 * GIB, 0, 6 * GIB, 6 * GIB)
    for what in ("host", "files", "device"):
        assert small.of_judgement("cuda")[what] < large.of_judgement("cuda")[what]
    room = 110 * GIB
    share = large.share_for("cuda", room)
    assert small.share_for("cuda", room) == 1.0 and LEAST < share < MOST
    assert large.of_judgement("cuda", share)["host"] <= room < large.of_judgement("cuda")["host"]
    assert large.share_for("cuda", GIB) == LEAST
    assert small.share_for("cuda", room, GIB) == 1.0 and small.share_for("cuda", room, GIB // 4) == 0.25  # for time's sake
    assert large.share_for("cuda", GIB, 3 * GIB) == LEAST
    assert small.of_judgement("cpu")["device"] == 0


def test_a_sample_is_another_for_each_probe_and_has_the_end():
    numbers, sample = torch.arange(BIG), Sample(0.1, secret=7)
    drawn = sample.of(numbers, "own")
    assert drawn.unique().numel() == drawn.numel() and 0.1 <= drawn.numel() / BIG < 0.11
    assert drawn[-1] == BIG - 1 and torch.equal(drawn, sample.of(numbers, "own"))
    assert not torch.equal(drawn, sample.of(numbers, "fresh"))
    assert not torch.equal(drawn, Sample(0.1, secret=8).of(numbers, "own"))
    assert torch.equal(sample.of(numbers[:SMALL], "own"), numbers[:SMALL]) and ALL.of(numbers, "own") is numbers


def test_an_oracle_keeps_the_sample_of_all_that_it_computes():
    model, sample = nn.Sigmoid(), Sample(0.1, secret=1)
    probe = Probe("own", [torch.randn(BIG)], [torch.ones(BIG)], (0,))
    oracle, whole = Oracle(model, torch.device("cpu"), sample=sample), Oracle(model, torch.device("cpu"))
    for result, all_ in ((oracle.reference(probe), whole.reference(probe)), (oracle.eager(probe), oracle.whole(probe))):
        assert torch.equal(result.outputs[0], sample.of(all_.outputs[0], "own"))
        assert torch.equal(result.gradients["input0"], sample.of(all_.gradients["input0"], "own"))


PROBLEM = """
batch_size, dim = 4, 400001

class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(x)

def get_inputs():
    return [torch.rand(batch_size, dim)]
"""


def all_but(count):
    """Wrong in so many elements."""

    def forward(x):
        result = torch.tanh(x)
        result.view(-1)[1000 : 1000 + count] = 0
        return result

    return forward


@pytest.mark.parametrize(
    "forward, complaint",
    [
        (torch.tanh, None),
        (lambda x: x.half().tanh().float(), "standard deviations"),
        (all_but(1), "from eager PyTorch's"),  # which no sample of an element in 256 has but by chance
        (lambda x: torch.tanh(x).T, "output 0 has the shape (400001, 4) instead of (4, 400001)"),
    ],
)
def test_a_judgement_by_a_sample(tmp_path, forward, complaint):
    referee = referee_of(tmp_path, PROBLEM, share=LEAST, secret=2)
    inputs, outputs = str(tmp_path / "inputs"), str(tmp_path / "outputs")
    prepared = referee.prepare("own", "own", 3, inputs)
    (reference,), _ = referee.references["own"]
    assert reference.float64.numel() < 4 * 400001 * 2 * LEAST
    (given,) = Drawing(**tensors.load(inputs)["drawing"]).make(referee.problem, "cpu").inputs
    tensors.save_results(tensors.Results([forward(given)]), outputs)
    found = referee.compare_outputs("own", outputs, remark=False)
    assert (complaint in found["complaint"]) if complaint else found["complaint"] is None, found
    assert "was compared with float64" in prepared["ways"][0]


LARGER = PROBLEM.replace("400001", "401").replace("torch.tanh(x)", "torch.tanh(x)[..., None].repeat(1, 1, 2000)")
UNSEEDED = "import random\n" + LARGER.replace("[torch.rand", "[random.SystemRandom().random() * torch.rand")


def sides(tmp_path, text):
    """A referee that compares a part, and the original as a candidate."""
    referee, candidate = referee_of(tmp_path, text, share=LEAST, secret=2), Candidate()
    weights, problem = str(tmp_path / "weights"), str(tmp_path / "problem.py")
    candidate.load(None, weights, problem=problem, settings={}, place="cpu", seed=1)
    return referee, candidate


@pytest.mark.parametrize("probe, size", [("own", "own"), ("within", "own"), ("scaled", "own"), ("nan", "reduced")])
def test_what_is_compared_in_part_is_drawn_by_either_side(tmp_path, probe, size):
    referee, candidate = sides(tmp_path, LARGER)
    inputs, outputs = str(tmp_path / "inputs"), str(tmp_path / "outputs")
    prepared = referee.prepare(probe, size, 3, inputs)
    assert ("drawing" in tensors.load(inputs)) == (size == "own")
    candidate.run(inputs, outputs, poison=False, may_refuse=False)
    assert referee.compare_outputs(probe, outputs)["complaint"] is None
    if prepared["differentiable"]:
        candidate.differentiate(inputs, outputs)
        assert [each["complaint"] for each in referee.compare_gradients(probe, outputs).values()] == [None]
    assert prepared["differentiable"] == (probe == "scaled")
    assert referee.mutants([probe], prepared["differentiable"], None, seed=1)["counted"] > 0


def test_what_is_drawn_otherwise_a_second_time_goes_by_file(tmp_path):
    referee, candidate = sides(tmp_path, UNSEEDED)
    inputs, outputs = str(tmp_path / "inputs"), str(tmp_path / "outputs")
    referee.prepare("own", "own", 3, inputs)
    assert "drawing" not in tensors.load(inputs)
    candidate.run(inputs, outputs, poison=False, may_refuse=False)
    assert referee.compare_outputs("own", outputs)["complaint"] is None
