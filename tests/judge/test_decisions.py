"""Of two values of a window that are as near as rounding the gradient may go to either; of others only to the larger."""

import pytest
import torch
import torch.nn as nn

from playground import tensors
from playground.judge.oracle import Oracle
from playground.judge.precision import LOWER
from playground.judge.probes import Probe, with_upstream
from playground.judge.references import references_of

CPU = torch.device("cpu")
PAIRS = 20_000


class Pooled(nn.Module):
    """(batch, n) -> (batch, n / 2): the larger of each two of x * weight; `decide(values)` is what is compared."""

    def __init__(self, decide):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 2 * PAIRS))
        self._decide = decide

    def forward(self, x):
        values = (x * self.weight).view(len(x), -1, 2)
        places = self._decide(values.detach()).argmax(-1, keepdim=True)
        return values.gather(-1, places).squeeze(-1)


@pytest.fixture(scope="module")
def judged():
    """(probe, references of the gradients, the same without decisions). The values of pair 1 of sample 0 are nearly equal."""
    torch.manual_seed(0)
    original = Pooled(lambda values: values)
    x = torch.randn(3, 2 * PAIRS)
    larger = x[0, 2:4] * original.weight[2:4]
    x[0, 2] = larger[1] * (1 - 2e-7) / original.weight[2]
    with torch.no_grad():
        probe = with_upstream(Probe("normal", [x]), [original(x)], seed=1)
    oracle = Oracle(original, CPU)
    truth, eager = oracle.reference(probe), oracle.eager(probe)
    decisions = oracle.decisions(probe, truth)
    blind = references_of(truth, eager, [eager])[1]
    return probe, references_of(truth, eager, [eager], decisions=lambda: decisions)[1], blind


def complaints(judged, decide):
    """(with decisions, without): what is said of the gradients of a kernel that compares what `decide` gives."""
    probe, *both = judged
    _, found = tensors.gradients(Pooled(decide), probe.inputs, probe.upstream, probe.wanted_inputs)
    return tuple([r.compare(name, found[name]).complaint for name, r in references.items()] for references in both)


def the_other_of(row, pair):
    """Compares rightly but for one pair, which it takes the wrong way round."""

    def decide(values):
        values = values.clone()
        values[row, pair] = -values[row, pair]
        return values

    return decide


def test_the_original_is_right(judged):
    assert complaints(judged, lambda values: values) == ([None, None], [None, None])


def test_either_of_two_near_values_is_right(judged):
    with_decisions, without = complaints(judged, the_other_of(0, 1))
    assert with_decisions == [None, None]
    assert all("off by" in complaint for complaint in without)


@pytest.mark.parametrize("row, pair", [(0, 0), (1, 1), (2, PAIRS - 1)])
def test_the_smaller_of_two_clear_values_is_wrong(judged, row, pair):
    with_decisions, _ = complaints(judged, the_other_of(row, pair))
    assert any("off by" in complaint for complaint in with_decisions if complaint)


@pytest.mark.parametrize("precision", LOWER)
def test_a_maximum_over_values_of_a_lower_precision_is_wrong(judged, precision):
    with_decisions, _ = complaints(judged, LOWER[precision])
    assert all("off by" in complaint for complaint in with_decisions)
