"""What draws of get_inputs have in common is learned, and every probe keeps it."""

import types

import pytest
import torch

from playground import tensors
from playground.judge import checks, domain, probes
from playground.judge.behaviour import same_bits

SIZE = 12


def problem(*makers):
    return types.SimpleNamespace(get_inputs=lambda: [make() for make in makers])


def square():
    return torch.rand(SIZE, SIZE)


def block_diagonal():
    return torch.block_diag(torch.randn(5, 5), torch.randn(7, 7))


def symmetric():
    x = torch.randn(3, SIZE, SIZE)
    return x + x.mT


def definite():
    x = symmetric().matrix_power(2) + torch.eye(SIZE)
    return x.tril() + x.tril(-1).mT


def one_hot():
    return torch.nn.functional.one_hot(torch.randint(SIZE, (6,)), SIZE).float()


# Maker -> (what is said of it, what holds for every probe that keeps it).
STRUCTURES = {
    "lower triangular": (lambda: square().tril(), "zeros that stay zeros", lambda x: torch.equal(x, x.tril())),
    "upper triangular": (lambda: square().triu(1), "zeros that stay zeros", lambda x: torch.equal(x, x.triu(1))),
    "block diagonal": (block_diagonal, "zeros that stay zeros", lambda x: not x[:5, 5:].any() and not x[5:, :5].any()),
    "symmetric": (symmetric, "symmetric", lambda x: torch.equal(x, x.mT)),
    "positive definite": (
        definite,
        "positive definite",
        lambda x: torch.equal(x, x.mT) and not torch.linalg.cholesky_ex(x.double()).info.any(),
    ),
    "sorted": (lambda: torch.randn(4, SIZE).sort(-1).values, "sorted", lambda x: bool((x.diff(dim=-1) >= 0).all())),
    "probabilities": (
        lambda: torch.randn(4, SIZE).softmax(-1),
        "probabilities",
        lambda x: bool((x >= 0).all()) and torch.allclose(x.sum(-1), torch.ones(4)),
    ),
    "probabilities of columns": (
        lambda: torch.randn(4, SIZE).softmax(0),
        "probabilities",
        lambda x: bool((x >= 0).all()) and torch.allclose(x.sum(0), torch.ones(SIZE)),
    ),
    "integers": (
        lambda: torch.randint(3, 9, (4, SIZE)).float(),
        "integers from 3 to 8",
        lambda x: set(x.flatten().tolist()) <= set(range(3, 9)),
    ),
    "one-hot": (one_hot, "one-hot", lambda x: torch.equal(x.sum(-1), torch.ones(6)) and x.max() == 1),
    "a mask": (
        lambda: torch.where(torch.rand(4, SIZE) < 0.5, 0.25, -1.5),
        "a mask of -1.5 and 0.25",
        lambda x: x.unique().tolist() == [-1.5, 0.25],
    ),
    "a constant": (
        lambda: torch.arange(SIZE) / 7.0,
        "the same in each draw",
        lambda x: torch.equal(x, torch.arange(SIZE) / 7.0),
    ),
}
FINITE = [name for name in checks.PROBE_NAMES if name not in ("nan", "infinity")]


@pytest.mark.parametrize("name", STRUCTURES)
def test_it_is_learned_and_kept(name):
    make, words, holds = STRUCTURES[name]
    given = problem(make)
    learned = domain.learn(given, 0)
    assert learned.texts == [f"input 0: {words}"]
    for probe in FINITE:
        if not learned.forbids(probe):
            assert holds(probes.make(probe, given, 7, {}, learned).inputs[0]), probe


def test_a_probe_with_structure_still_has_values_of_its_own():
    given = problem(lambda: square().tril())
    learned = domain.learn(given, 0)
    assert probes.make("large", given, 7, {}, learned).inputs[0].abs().max() > 1e4
    assert not torch.equal(*(probes.make(name, given, 7, {}, learned).inputs[0] for name in ("own", "scaled")))


@pytest.mark.parametrize("name", ["integers", "one-hot", "a mask", "a constant"])
def test_values_that_are_none_of_the_problems_are_not_run(name):
    learned = domain.learn(problem(STRUCTURES[name][0]), 0)
    assert "would leave the problem's domain" in learned.forbids("large")
    assert all(learned.forbids(probe) for probe in domain.OF_VALUES)
    assert not learned.forbids("normal"), "which is another draw, at another size"


@pytest.mark.parametrize("name", ["probabilities", "probabilities of columns"])
def test_values_that_are_no_probabilities_are_not_run(name):
    learned = domain.learn(problem(STRUCTURES[name][0]), 0)
    assert {probe for probe in checks.PROBE_NAMES if learned.forbids(probe)} == set(domain.NO_PROBABILITIES)


def test_what_remains_free_is_probed():
    learned = domain.learn(problem(square, STRUCTURES["a mask"][0]), 0)
    assert not any(map(learned.forbids, checks.PROBE_NAMES))
    behind = domain.learn(problem(STRUCTURES["a mask"][0], square), 0)
    assert behind.forbids("impulse") and not behind.forbids("large")


def test_inputs_that_are_equal_stay_equal():
    kept = square()
    given = types.SimpleNamespace(get_inputs=lambda: [x := torch.rand_like(kept), x])
    learned = domain.learn(given, 0)
    assert learned.texts == ["input 1: equal to input 0"]
    a, b = probes.make("scaled", given, 7, {}, learned).inputs
    assert torch.equal(a, b)


@pytest.mark.parametrize("make", [square, lambda: torch.randn(4, SIZE), lambda: torch.randn(4, SIZE).relu()])
def test_ordinary_inputs_have_none(make):
    learned = domain.learn(problem(make), 0)
    assert learned.texts == []
    assert not any(map(learned.forbids, checks.PROBE_NAMES))


def test_values_are_positive_where_that_is_asked_for():
    given = problem(square)
    learned = domain.learn(given, 0)
    assert learned.is_positive
    assert (probes.make("large", given, 7, {}, learned).inputs[0] < 0).any()
    assert (probes.make("large", given, 7, {}, learned, positive=True).inputs[0] >= 0).all()


def test_each_sample_within_covers_another_part_of_the_range():
    x = probes.make("within", problem(lambda: 3 + torch.rand(64, 100)), 7, {}).inputs[0]
    assert x.min() >= 3 and x.max() <= 4
    assert x.mean(1).std() > 5 * torch.rand(64, 100).mean(1).std()


def test_draws_of_different_forms_have_no_domain():
    sizes = iter(range(3, 9))
    assert domain.learn(types.SimpleNamespace(get_inputs=lambda: [torch.ones(next(sizes))]), 0).texts == []


def numbers(value):
    return value.flatten().sort().values


def alike(value, holds=lambda made: True):
    """The same numbers in another order, of which this holds."""
    return value, lambda made: torch.equal(numbers(made), numbers(value)) and holds(made)


FIXED = {
    "floats": alike(torch.rand(6, 8)),
    "ones": (torch.ones(6, 8), lambda value: bool(((value >= 0.75) & (value <= 1)).all())),
    "a triangle": alike(torch.rand(8, 8).tril() + torch.eye(8).tril(), lambda value: torch.equal(value, value.tril())),
    "symmetric": ((a := torch.rand(8, 8)) + a.T, lambda value: torch.equal(value, value.T)),
    "sorted": (torch.rand(6, 8).sort(-1).values, lambda value: bool((value.diff(dim=-1) >= 0).all()) and value.min() >= 0),
    "probabilities": (torch.rand(6, 8).softmax(-1), lambda value: torch.allclose(value.sum(-1), torch.ones(6))),
    "indices": alike(torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])),
}


@pytest.mark.parametrize("value, keeps", FIXED.values(), ids=FIXED.keys())
def test_what_is_the_same_in_each_draw_is_varied_within_its_domain(value, keeps):
    """Also where get_inputs sets a seed of its own; the same seed gives the same content."""

    def seeded():
        torch.manual_seed(1)
        return value.clone()

    given = problem(seeded)
    assert domain.is_unchanging(given, 0) and domain.vary(given) is None and not domain.is_unchanging(given, 0)
    first, second, again = (tensors.make_inputs(given, seed)[0] for seed in (5, 6, 5))
    assert torch.equal(first, again) and not torch.equal(first, second) and not torch.equal(first, value)
    assert first.dtype == value.dtype and first.shape == value.shape
    assert first.min() >= 0.7 * value.min() and first.max() <= 1.3 * value.max()
    assert keeps(first) and keeps(second)


@pytest.mark.parametrize(
    "value, why",
    [
        (torch.zeros(4, 4), "input 0: zeros"),
        (torch.ones(4, 4).tril(), "input 0: integers from 0 to 1"),
        (torch.tensor([0, 3, 3, 9]), "input 0: sorted integers"),
        (torch.tensor([5, 5, 5]), "input 0: one value everywhere"),
        (torch.ones(4, dtype=torch.bool), "input 0: neither floats nor integers"),
    ],
)
def test_what_cannot_be_varied_is_said(value, why):
    given = problem(value.clone)
    assert domain.vary(given) == f"get_inputs gives the same content each time, which cannot vary ({why})"
    assert torch.equal(tensors.make_inputs(given, 5)[0], value)


def test_inputs_that_are_equal_are_varied_alike():
    given = problem(lambda: torch.arange(12.0), lambda: torch.arange(12.0), lambda: torch.ones(3, dtype=torch.bool))
    assert domain.vary(given) is None
    a, b, mask = tensors.make_inputs(given, 5)
    assert torch.equal(a, b) and not torch.equal(a, torch.arange(12.0)) and mask.all()


def test_what_changes_is_left_alone():
    assert not domain.is_unchanging(problem(square), 0)
    assert not domain.is_unchanging(problem(square, lambda: torch.ones(3)), 0)


def test_floats_of_one_byte_stay_the_problems_own():
    """PyTorch neither draws nor rounds them."""
    narrow = problem(lambda: torch.rand(4, 8).to(torch.float8_e4m3fn))
    (own,) = tensors.make_inputs(narrow, 1)
    assert domain.learn(narrow, 0).texts == []
    for name in checks.PROBE_NAMES:
        (value,) = probes.make(name, narrow, 1, {}).inputs
        assert same_bits(value, own), name
