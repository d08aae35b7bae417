"""Where a wrong result is wrong, and what relates it to the right one. Random errors have no relation."""

import math

import pytest
import torch
import torch.nn.functional as F

from playground.judge.diagnosis import diagnose

ALLOWED = 2e-6


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MATRIX, IMAGES = drawn(70, 90), drawn(2, 3, 12, 14)


def edited(edit, right=MATRIX):
    actual = right.clone()
    edit(actual)
    return actual


def framed(a):
    a[..., 0, :] = a[..., -1, :] = 0
    a[..., :, 0] = a[..., :, -1] = 0


def cut(a):
    a[:, 80:] = 0
    a[64:] = 0


# name -> (wrong result, right one, what is said)
PLACES = {
    "the last block": (
        edited(lambda a: a[64:, 80:].zero_()),
        MATRIX,
        "wrong only in rows 64-69, columns 80-89 (0, as if never computed); first wrong [64, 80]: 0 instead of -1.95",
    ),
    "rows and columns": (edited(cut), MATRIX, "right only in rows 0-63, columns 0-79 (elsewhere 0, as if never computed)"),
    "every k-th column": (edited(lambda a: a[:, 3::4].add_(drawn(70, 22))), MATRIX, "wrong only in every 4th column from 3"),
    "the last values": (edited(lambda a: a.view(-1)[-137:].zero_()), MATRIX, "wrong only in the last 137 values in memory (0"),
    "every k-th value": (
        edited(lambda a: a.view(-1)[::32].add_(drawn(197))),
        MATRIX,
        "wrong only in every 32nd value in memory from 0",
    ),
    "a row": (edited(lambda a: a[5].fill_(math.nan)), MATRIX, "wrong only in row 5 (nan, as if never computed)"),
    "a border": (edited(framed, IMAGES), IMAGES, "wrong only in the border of each image, 1 wide (0, as if never computed)"),
    "a sample": (edited(lambda a: a[1:].zero_(), IMAGES), IMAGES, "wrong only in sample 1 (the last) (0"),
    "a channel": (
        edited(lambda a: a[:, 1].mul_(3), IMAGES),
        IMAGES,
        "wrong only in channel 1; each of these is 3 times the right one; first wrong [0, 1, 0, 0]",
    ),
    "some": (
        edited(lambda a: a.view(-1)[:3500:500].add_(torch.tensor([1, 0, 0, 1, 0, 1, 0]))),
        MATRIX,
        "wrong in 3 of 6300 values (0.048%), scattered",
    ),
}
RELATIONS = {
    "n - 1": (MATRIX * math.sqrt(89 / 90), MATRIX, "every value is 0.9944 times the right one, sqrt((n - 1) / n) for n = 90"),
    "a sum": (MATRIX * 90, MATRIX, "every value is 90 times the right one, as if 90 values were summed and not averaged"),
    "a scale": (MATRIX * 8, MATRIX, "every value is 8 times the right one, the square root of 64, as if a scale"),
    "a factor": (MATRIX * 1.1, MATRIX, "every value is 1.1 times the right one;"),
    "sign": (-MATRIX, MATRIX, "every value has the wrong sign"),
    "offset": (MATRIX - 0.25, MATRIX, "every value is the right one - 0.25"),
    "a line": (1.2 * MATRIX + 3, MATRIX, "every value is 1.2 times the right one + 3"),
    "transposed": (MATRIX.t().reshape(70, 90), MATRIX, "rows and columns are swapped"),
    "square": (MATRIX[:70, :70].t(), MATRIX[:70, :70], "rows and columns are swapped"),
    "channels last": (IMAGES.permute(0, 2, 1, 3).reshape(IMAGES.shape), IMAGES, "channels and rows are swapped"),
    "shifted": (MATRIX.roll(1, 1), MATRIX, "column i holds what belongs to column i - 1"),
    "reversed": (MATRIX.flip(0), MATRIX, "the rows are in reverse order"),
    "one sample": (
        IMAGES[:1].expand(IMAGES.shape),
        IMAGES,
        "wrong only in sample 1 (the last); every sample holds what belongs to the first",
    ),
    "another order": (MATRIX[torch.randperm(70)], MATRIX, "these are the right values in another order"),
    "a bias": (MATRIX + drawn(90, seed=2), MATRIX, "each column is off by a constant of its own"),
    "a normalisation": (MATRIX * drawn(70, 1, seed=2).abs(), MATRIX, "each row is multiplied by a factor of its own"),
    "relu": (MATRIX, MATRIX.relu(), "right once relu is applied, as if that were left out"),
    "sigmoid twice": (MATRIX.sigmoid().sigmoid(), MATRIX.sigmoid(), "every value is sigmoid of the right one"),
    "gelu": (F.gelu(MATRIX, approximate="tanh"), F.gelu(MATRIX), "GELU by tanh in the place of erf"),
    "fast gelu": (MATRIX * torch.sigmoid(1.702 * MATRIX), F.gelu(MATRIX), "GELU by sigmoid(1.702 x) in the place of erf"),
}


@pytest.mark.parametrize("name", [*PLACES, *RELATIONS])
def test_a_mistake_is_named(name):
    actual, right, said = (PLACES | RELATIONS)[name]
    found = diagnose(actual.float(), right, ALLOWED, [(70, 64)])
    assert found.sentence.startswith(said), found.sentence
    assert bool(found.how) == (name in RELATIONS or name == "a channel")
    assert ": " in found.first and found.first.startswith("first wrong [")


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("right", [MATRIX, IMAGES, MATRIX.sigmoid(), drawn(40), MATRIX.relu()], ids=range(5))
def test_random_errors_have_no_cause(size, right):
    error = size * drawn(*right.shape, seed=3)
    for actual in (right + error, right * (1 + error), torch.where(error > size, right + error, right)):
        found = diagnose(actual, right, ALLOWED, [(70, 64)])
        assert found.how is None, found.how
    half = right.half().double()
    assert diagnose(half, right, ALLOWED).how is None


def test_what_is_right_has_no_diagnosis_and_what_is_uniform_no_cause():
    assert diagnose(MATRIX.float(), MATRIX, ALLOWED) is None
    assert diagnose(torch.ones(64, 64), torch.full((64, 64), 2.0), ALLOWED).how is None
    assert (
        diagnose(torch.tensor(1.0), torch.tensor(2.0), ALLOWED).sentence
        == "wrong everywhere (1); first wrong [0]: 1 instead of 2"
    )


def test_the_picture_is_dark_where_it_is_wrong():
    *_, last = diagnose(PLACES["the last block"][0], MATRIX, ALLOWED).picture
    assert set(last[1:40]) == {" "} and last[44:49] == "█████"
    assert diagnose(2 * MATRIX, MATRIX, ALLOWED).picture == ()


def test_values_that_differ_little_are_shown_apart():
    assert diagnose(MATRIX + 1e-4, MATRIX, ALLOWED).first == "first wrong [0, 0]: -0.31119 instead of -0.31129"
