"""What counts as right, for one tensor: errors in units of the spread, against what eager and the precision permit."""

import math

import pytest
import torch

from playground.judge import tolerance
from playground.judge.tolerance import FLOAT32_EPSILON, Comparison, Reference, largest_difference, worst, wrong

NAN, INF = math.nan, math.inf


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def reference(*truth):
    """Eager is the truth in float32."""
    return Reference(double(*truth), double(*truth).float())


@pytest.fixture
def many():
    """(truth, Reference) of 1000 normal values beside 1e4, so that their size says nothing."""
    truth = 1e4 + torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return truth, Reference(truth, truth.float())


@pytest.mark.parametrize(
    "truth, spread",
    [
        *(((1, 3, 1, 3), 1), ((1001, 1003, 1001, 1003), 1)),  # the standard deviation
        ((1, 3, NAN, INF, -INF), 1),  # of what is finite
        *(((-5,), 5), ((-5, -5, -5), 5), ((0, 0), 1), ((), 1), ((NAN,), 1)),  # and the size where nothing varies
    ],
)
def test_spread(truth, spread):
    assert reference(*truth).spread == spread


def test_error_is_measured_in_spreads():
    allowing = Reference(double(0, 20), torch.tensor([0.0, 25.0]))
    assert allowing.spread == 10
    assert allowing.eager_error == 0.5
    assert allowing.allowed == 1.0
    assert allowing.compare("y", torch.tensor([9.0, 20.0])).max_error == pytest.approx(0.9)


def test_allowed_is_twice_the_largest_of_three():
    truth = double(-1, 1)
    units = 2 * 4 * FLOAT32_EPSILON
    assert Reference(truth, truth.float()).allowed == pytest.approx(units)
    assert Reference(truth, torch.tensor([-1.25, 1])).allowed == pytest.approx(0.5)
    assert Reference(truth, truth.float(), double(-1, 1.5)).allowed == pytest.approx(1.0)
    assert Reference(truth, torch.tensor([-2.0, 1]), double(-1, 1.5)).allowed == pytest.approx(2.0)


def test_units_in_the_last_place_follow_the_size():
    """Near 1e4 float32 has steps of 1e-3: no result of that type is better, whatever the spread."""
    assert reference(1e4, 1e4 + 20).allowed == pytest.approx(2 * 4 * FLOAT32_EPSILON * (1e4 + 20) / 10)


def test_a_tiny_error_passes_and_a_wrong_constant_fails(many):
    truth, expected = many
    assert expected.compare("y", truth.float()).complaint is None
    assert expected.compare("y", (truth + 1e-3).float()).complaint is None
    constant = torch.full((1000,), 1e4)
    assert torch.allclose(constant, truth.float(), rtol=1e-3), "the usual check passes it"
    comparison = expected.compare("the output", constant)
    assert comparison.complaint.startswith("the output is off by") and "of its spread" in comparison.complaint
    assert comparison.max_error > 2 > 0.02 > comparison.allowed


@pytest.mark.parametrize("size", [1, 100])
def test_the_root_mean_square_catches_what_the_largest_error_does_not(size):
    """A maximum whose gradient rounding has sent elsewhere: one element of eager's is far off, and the rest is exact."""
    truth = size * torch.randn(10000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eager = truth.float()
    eager[123] += size
    expected = Reference(truth, eager)
    elsewhere = truth.float()
    elsewhere[456] -= size
    assert expected.compare("y", elsewhere).complaint is None
    everywhere = (truth + 0.1 * size).float()
    comparison = expected.compare("y", everywhere)
    assert comparison.max_error < comparison.allowed
    assert "(RMS)" in comparison.complaint


@pytest.mark.parametrize(
    "actual, complaint",
    [
        (None, "y is missing"),
        *((torch.ones(s), f"y has the shape {s} instead of (2,)") for s in ((2, 1), (1, 2), (3,), (0,), ())),
        *(
            (torch.ones(2).to(t), f"y has the type {t} instead of torch.float32")
            for t in (torch.float64, torch.half, torch.int)
        ),
    ],
)
def test_what_cannot_be_compared(actual, complaint):
    comparison = reference(1, 1).compare("y", actual)
    assert (comparison.complaint, comparison.max_error) == (complaint, None)


# truth, actual, what the complaint says
SPECIAL = [
    ((1, 2, 3), (1, NAN, 3), "y is NaN in 1 of 3 elements where the original is not"),
    ((1, NAN, 3), (1, 2, 3), "y is not NaN in 1 of 3 elements where the original is"),
    ((1, 2, 3), (INF, 2, -INF), "y is inf in 1 of 3 elements where the original is not"),
    ((1, INF, 3), (1, 2, 3), "y is not inf in 1 of 3 elements where the original is"),
    ((NAN, 2, 3), (1, NAN, 3), "y is NaN in 1 of 3 elements where the original is not"),
    ((INF, 2, 3), (NAN, 2, 3), "y is NaN in 1 of 3 elements where the original is not"),
    ((1, NAN, INF), (1, NAN, INF), None),
    ((NAN, NAN), (NAN, NAN), None),
    ((INF, 1, 2), (-INF, 1, 2), "y is not inf in 1 of 3 elements where the original is"),
    ((1, 2, 3), (1, 2, -INF), "y is -inf in 1 of 3 elements where the original is not"),
    ((1, NAN, 3), (1.5, NAN, 3), "y is off by"),
]


@pytest.mark.parametrize("truth, actual, complaint", SPECIAL)
def test_nan_and_infinity_stand_where_eager_has_them(truth, actual, complaint):
    found = reference(*truth).compare("y", torch.tensor(actual, dtype=torch.float32)).complaint
    assert found == complaint or (complaint and found and found.startswith(complaint))


def test_finite_is_what_neither_float64_nor_eager_leaves():
    assert reference(1, 2).is_finite
    assert not reference(1, NAN).is_finite
    assert not Reference(double(1, 2), torch.tensor([1.0, INF])).is_finite


def test_equal_special_values_differ_by_nothing():
    special = torch.tensor([INF, -INF, NAN, 1.0])
    assert largest_difference(special, special) == 0
    assert largest_difference(special, special + 0.5) == 0.5
    assert largest_difference(special, torch.ones(4)) == largest_difference(torch.ones(4), special) == INF


@pytest.mark.parametrize("overflow", [INF, NAN])
def test_what_overflows_in_float32_alone_permits_nothing_elsewhere(overflow):
    """float64 has room for what eager turns into infinity or NaN: no error can be measured there, and none is forgiven."""
    expected = Reference(double(1, 2, 1e300, 4), torch.tensor([1.0, 2.0, overflow, 4.0]))
    assert expected.allowed < 1e-5
    assert expected.compare("y", torch.tensor([1.0, 2.0, overflow, 4.0])).complaint is None
    assert "off by" in expected.compare("y", torch.tensor([1.0, 2.5, overflow, 4.0])).complaint
    assert "where the original" in expected.compare("y", torch.tensor([1.0, 2.0, 3.0, 4.0])).complaint


FULL, RANDOM = torch.full((100,), 0.5), torch.randn(1000, dtype=torch.float64)
# truth, what is right, what is wrong
UNUSUAL = {
    "a value that never varies": (FULL.double(), FULL, FULL + 1e-4),
    "zeros": (double(0, 0), torch.zeros(2), torch.tensor([0, 1e-6])),
    "one number": (torch.tensor(3.0, dtype=torch.float64), torch.tensor(3.0), torch.tensor(3.001)),
    "nothing": (torch.empty(0, 3, dtype=torch.float64), torch.empty(0, 3), torch.empty(3, 0)),
    "half precision, in its own": (RANDOM, RANDOM.half(), (1.01 * RANDOM).half()),
    **{
        f"exact {one.dtype}": (one, one, other)
        for one, other in (
            (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])),
            (torch.tensor(7, dtype=torch.int16), torch.tensor(8, dtype=torch.int16)),
            (torch.tensor([10**9, 0], dtype=torch.int32), torch.tensor([10**9 + 1, 0], dtype=torch.int32)),
            (torch.tensor([True, False]), torch.tensor([True, True])),
        )
    },
}


@pytest.mark.parametrize("truth, right, other", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_outputs(truth, right, other):
    expected = Reference(truth, right)
    assert expected.compare("y", right).complaint is None
    assert ("the shape (3, 0)" if len(other.shape) == 2 else "off by") in expected.compare("y", other).complaint


def test_worst_is_the_first_complaint_or_the_nearest_to_what_is_allowed():
    expected = reference(0, 2)
    near, far = expected.compare("y", torch.tensor([0, 2 + 1e-6])), expected.compare("y", torch.tensor([0.0, 2.0]))
    assert near.complaint is None and near.max_error > far.max_error
    assert worst([far, near, far]) == near
    assert worst([near, wrong("no such luck"), wrong("neither")]) == wrong("no such luck")
    strict, lax = (Comparison(error, allowed, 0.0, None) for error, allowed in ((0.01, 0.02), (0.1, 1.0)))
    assert worst([lax, strict]) == strict
    exact = Reference(torch.tensor([1]), torch.tensor([1])).compare("y", torch.tensor([1]))
    assert worst([exact]) == exact


def test_what_chance_or_rounding_moves_by_half_its_spread_cannot_be_judged():
    """Otherwise zeros would pass for a model with dropout."""
    truth = double(0, 1, 2, 3)
    random = Reference(truth, torch.tensor([2.0, 0.0, 3.0, 1.0]))
    assert random.is_blunt
    assert "cannot be judged" in random.compare("y", torch.zeros(4)).complaint
    assert not Reference(truth, truth.float()).is_blunt
    assert Reference(double(1), torch.tensor([2.0])).is_blunt and not Reference(double(), torch.empty(0)).is_blunt


def test_what_is_near_the_truth_is_right_where_what_is_allowed_cannot_tell():
    """One sample of a sum that hardly varies: TF32 permits more than the spread, a variant with better products errs less."""
    truth = double(0, 1, 2, 3)
    blunt = Reference(truth, truth.float(), torch.tensor([2.0, 0.0, 3.0, 1.0]))
    assert blunt.is_blunt
    assert blunt.compare("y", (truth + 0.05).float()).complaint is None
    assert "cannot be judged" in blunt.compare("y", (truth + 0.07).float()).complaint


def test_what_is_near_eager_is_right_where_eager_is_far_from_the_truth():
    """A copy of the original, of outputs that hardly vary."""
    truth = double(0, 1, 2, 3)
    eager = torch.tensor([0.6, 1.0, 2.6, 2.4])
    blunt = Reference(truth, eager)
    assert blunt.is_blunt
    assert blunt.compare("y", eager).complaint is None and not blunt.compare("y", eager).unjudged
    assert blunt.compare("y", eager + 0.05).complaint is None
    far, infinite = (blunt.compare("y", each) for each in (eager + 0.07, eager / 0))
    assert far.unjudged and "cannot be judged" in far.complaint
    assert not infinite.unjudged and "inf" in infinite.complaint


def noise(size, *shape):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def test_what_is_zero_in_mathematics_is_judged_by_the_terms_that_cancel():
    """float64 leaves 1e-17 of a bias's gradient in front of a batch norm, float32 1e-6, and a wrong backward gives 0.1."""
    truth, eager, perturbed = noise(1e-17, 64).double(), noise(2e-7, 64, 1).flatten(), noise(1e-6, 64, 1, 1).flatten()
    expected = Reference(truth, eager, perturbed)
    assert expected.is_zero and not expected.is_blunt
    assert 1 < expected.spread < 10, "perturbations of 3 units move it by 1e-6, so the terms are about 3"
    assert expected.compare("y", torch.zeros(64)).complaint is None
    assert expected.compare("y", noise(1e-6, 64)).complaint is None
    assert "of the terms that cancel in it" in expected.compare("y", noise(1e-4, 64)).complaint


def test_small_values_are_not_zero():
    truth = noise(1e-12, 64).double()
    expected = Reference(truth, truth.float(), truth.float() * (1 + 3 * FLOAT32_EPSILON))
    assert not expected.is_zero
    assert expected.compare("y", torch.zeros(64)).complaint


def test_a_lower_precision_permits_more_where_it_is_declared():
    truth = noise(1, 1000).double()
    strict = Reference(truth, truth.float())
    wider = strict.permitting(truth.bfloat16().double())
    assert strict.compare("y", truth.bfloat16().float()).complaint
    assert wider.compare("y", truth.bfloat16().float()).complaint is None
    assert wider.compare("y", 1.1 * truth.float()).complaint
    assert strict.allowed < 1e-5 < 1e-3 < wider.allowed, "the strict one is not changed"


def test_a_declared_precision_may_overflow_where_its_own_model_does():
    truth = double(1, 2, 1e5, 4)
    wider = Reference(truth, truth.float()).permitting(truth.half().double())
    assert wider.compare("y", torch.tensor([1.0, 2.0, INF, 4.0])).complaint is None
    assert "y is inf in 1 of 4" in wider.compare("y", torch.tensor([1.0, INF, INF, 4.0])).complaint
    assert "y is inf in 1 of 4" in Reference(truth, truth.float()).compare("y", torch.tensor([1.0, 2.0, INF, 4.0])).complaint


@pytest.fixture
def deciding():
    """(truth, Reference) where a near decision may move the first two of 1000 elements by 0.5, and nothing else."""
    truth = noise(1, 1000).double()
    moved = torch.zeros_like(truth)
    moved[:2] = 0.5
    return truth, Reference(truth, truth.float(), decisions=lambda: moved)


@pytest.mark.parametrize("step", [0.5, -0.5, 0.99])
def test_a_gradient_may_go_where_a_near_decision_sends_it(deciding, step):
    truth, expected = deciding
    sent = truth.float()
    sent[0], sent[1] = sent[0] + step, sent[1] - step
    compared = expected.compare("y", sent)
    assert compared.complaint is None and compared.decided
    assert compared.max_error <= compared.allowed
    assert not expected.compare("y", truth.float()).decided


@pytest.mark.parametrize("element, step", [(0, 1.01), (1, -1.1), (2, 0.01), (2, -0.5), (999, NAN)])
def test_a_near_decision_excuses_nothing_else(deciding, element, step):
    """Neither more than twice what it moves, nor an element that it does not move."""
    truth, expected = deciding
    sent = truth.float()
    sent[0] += 0.5
    sent[element] += step
    compared = expected.compare("y", sent)
    assert compared.complaint and not compared.decided


def test_an_error_everywhere_is_not_excused_by_decisions(deciding):
    truth, expected = deciding
    assert expected.compare("y", 1.001 * truth.float()).complaint.startswith("y is off by")


def test_where_two_decisions_cancel_one_of_them_may_change():
    """Only in a few elements, and no further than decisions move the others."""
    truth = noise(1, 1000).double()
    moved = torch.full_like(truth, 0.5)
    moved[7:9] = 1e-3
    expected = Reference(truth, truth.float(), decisions=lambda: moved)

    def off(*steps):
        sent = truth.float()
        for element, step in steps:
            sent[element] += step
        return expected.compare("y", sent)

    assert off((7, 0.9)).decided and not off((7, 0.9)).complaint
    assert off((7, 1.1)).complaint and off((7, 0.9), (8, 0.9)).complaint


def test_decisions_are_looked_for_only_where_they_are_needed():
    truth = noise(1, 1000).double()
    asked = []

    def decisions():
        asked.append(1)
        return torch.zeros_like(truth)

    expected = Reference(truth, truth.float(), decisions=decisions)
    assert expected.compare("y", truth.float()).complaint is None and not asked
    assert expected.compare("y", 2 * truth.float()).complaint and len(asked) == 1


def test_what_the_precision_permits_is_told():
    truth = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    reference = Reference(truth, truth.float(), truth + 0.01, truth - 0.002)
    compared = reference.compare("y", truth.float())
    assert compared.permitted_error == pytest.approx(0.01 / truth.std(correction=0).item())
    assert compared.allowed == pytest.approx(2 * compared.permitted_error) and compared.eager_error == 0
    wider = reference.permitting(truth + 0.1)
    assert wider.compare("y", truth.float()).permitted_error == pytest.approx(10 * compared.permitted_error)
    assert reference.compare("y", truth.float()).permitted_error == compared.permitted_error


def test_the_spread_of_few_outputs_is_taken_over_other_inputs_too():
    truth = double(1.0, 1.0 + 1e-6)
    assert Reference(truth, truth.float()).spread == pytest.approx(5e-7)
    assert Reference(truth, truth.float(), others=[torch.tensor([3.0, math.nan])]).spread == pytest.approx(0.9428, rel=1e-3)


@pytest.mark.parametrize("last", [0.0, 0.5, NAN, INF])
def test_blocks_make_no_difference(monkeypatch, last):
    torch.manual_seed(0)
    truth = torch.randn(5, 7, dtype=torch.float64)
    eager, permitted = (truth + 1e-6 * torch.randn(5, 7)).float(), truth + 1e-4 * torch.randn(5, 7)
    actual = (truth + 1e-4 * torch.randn(5, 7)).float()
    actual[-1, -1] += last

    def judged():
        reference = Reference(truth, eager, permitted)
        return reference, reference.compare("it", actual)

    whole, expected = judged()
    monkeypatch.setattr(tolerance, "BLOCK", 4)
    parted, found = judged()
    assert (found.complaint is None) == (expected.complaint is None) == (last == 0)
    assert (parted.spread, parted.eager_error, parted.allowed) == (whole.spread, whole.eager_error, whole.allowed)
    assert found.max_error == expected.max_error


def test_small_values_are_compared_with_themselves():
    """Values from 1e-12 to 1e3: what is allowed beside the large ones is more than most of them."""
    truth = torch.logspace(-12, 3, 3000, dtype=torch.float64)
    eager = truth.float()
    noise = 1 + 1e-6 * torch.randn(3000, generator=torch.Generator().manual_seed(1))
    exact = Reference(truth, eager, eager * noise)
    right, zeros, rough = eager * noise.flip(0), torch.where(truth > 1e-3, eager, 0), eager * 1.05
    assert all(exact.compare("it", each).complaint is None for each in (right, zeros))
    assert exact.lost(right) is None and exact.lost(torch.where(truth > 1e-3, eager, rough)) is None
    share, given, true = exact.lost(zeros)
    assert share == pytest.approx(0.6, abs=0.01) and given == 0 and true == pytest.approx(1e-3, rel=0.02)
    # Where a permitted result has no right digit either, none is asked for; a few lost values are chance.
    assert exact.permitting(eager - 1e-3).lost(zeros) is None
    few = eager.clone()
    few[:10] = 0
    assert exact.lost(few) is None
    # Neither have values that may be flushed to zero, nor those of usual outputs.
    assert Reference(1e-35 * truth, 1e-35 * eager, 1e-35 * eager).lost(torch.zeros(3000)) is None
    normal = torch.randn(3000, dtype=torch.float64)
    assert Reference(normal, normal.float(), normal.float()).lost(torch.zeros(3000)) is None
