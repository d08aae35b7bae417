"""A NaN or an infinity may spoil its own sample, and no other; but not where the original computes each element alone."""

import pytest
import torch

from playground.judge import special
from playground.judge.tolerance import Reference
from playground.tensors import Results

X = torch.arange(12.0).reshape(4, 3)


def made(model, special_value=float("nan"), in_eager=None, first=None):
    """(reference of the output, the model's result) for inputs with a special value in the last sample.

    Eager PyTorch runs `in_eager` where that is given. `first` is what the first sample begins with.
    """
    with_special = X.clone()
    with_special[-1, 1] = special_value
    if first is not None:
        with_special[0, : len(first)] = torch.tensor(first)
    truth, clean = model(with_special.double()), model(X.double())
    eager = (in_eager or model)(with_special)
    (reference,) = special.references(*(Results([value], {}) for value in (truth, clean, eager)), [], [with_special])
    return reference, eager


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_original_itself_is_right(value):
    reference, eager = made(lambda x: 2 * x + 1, value)
    compared = reference.compare("y", eager)
    assert compared.complaint is None and compared.swallowed is None


def test_a_leak_into_another_sample():
    reference, eager = made(lambda x: 2 * x + 1)
    eager[0, 0] = float("nan")
    assert "1 elements where the original is finite" in reference.compare("y", eager).complaint


def test_a_leak_of_the_original_s_own():
    """cuDNN multiplies neighbours by zero in some transposed convolutions: a copy leaks as well."""

    def leaks(x):
        y = 2 * x + 1
        y[1] += 0 * x[-1, 1]
        return y

    reference, eager = made(lambda x: 2 * x + 1, in_eager=leaks)
    assert not torch.isfinite(eager[1]).any()
    assert reference.compare("y", eager).complaint is None
    eager[0, 0] = float("nan")
    assert "1 elements where the original is finite" in reference.compare("y", eager).complaint


def test_another_sample_must_be_right():
    reference, eager = made(lambda x: 2 * x + 1)
    eager[0, 0] += 1
    assert "off by" in reference.compare("y", eager).complaint


def test_the_rest_of_the_sample_may_be_spoiled_too():
    reference, eager = made(lambda x: x + x.roll(1, 1))
    eager[-1] = float("nan")
    assert reference.compare("y", eager).complaint is None


def test_the_rest_may_not_where_each_element_is_computed_alone():
    reference, eager = made(lambda x: x.clamp(2, 6), float("inf"))
    assert eager[-1, 1] == 6 and reference.compare("y", eager).complaint is None
    assert "off by" in reference.compare("y", torch.where(eager == 6, 7, eager)).complaint
    eager[-1, 1] = float("inf")
    assert "1 elements where the original is finite" in reference.compare("y", eager).complaint


MINUS_INFINITY = -float("inf")


def test_a_sample_of_many_special_values_where_the_original_is_finite():
    reference, eager = made(lambda x: x.softmax(1), first=[MINUS_INFINITY] * 2)
    assert eager[0].tolist() == [0, 0, 1] and reference.compare("y", eager).complaint is None
    eager[0] = float("nan")
    assert "3 elements where the original is finite" in reference.compare("y", eager).complaint


def test_a_maximum_that_starts_from_a_finite_number_is_a_note():
    reference, eager = made(lambda x: x.amax(1), first=[MINUS_INFINITY] * 3)
    compared = reference.compare("y", eager)
    assert compared.complaint is None and compared.swallowed is None
    compared = reference.compare("y", eager.clamp(min=-1e30))
    assert compared.complaint is None and compared.swallowed == "finite in 1 elements where the original's is NaN or infinite"


def test_sums_may_spoil_a_sample_of_many_special_values():
    reference, eager = made(lambda x: torch.stack([x[:, 0] - x[:, 1], x[:, 2]], 1), first=[MINUS_INFINITY] * 2)
    assert eager[0].isnan().tolist() == [True, False]
    eager[0] = float("nan")
    assert reference.compare("y", eager).complaint is None


def test_a_nan_that_is_lost_is_a_note():
    reference, eager = made(lambda x: 2 * x + 1)
    compared = reference.compare("y", eager.nan_to_num(0))
    assert compared.complaint is None and compared.swallowed == "finite in 1 elements where the original's is NaN or infinite"


def test_where_the_original_mixes_samples_nothing_is_asked():
    reference, eager = made(lambda x: x - x.mean(0))
    assert torch.isnan(eager[:, 1]).all()
    assert reference.compare("y", eager).complaint is None


def test_an_output_without_a_batch():
    reference, eager = made(lambda x: x.sum(0))
    assert reference.compare("y", eager).complaint is None
    eager[0] = float("nan")
    assert reference.compare("y", eager).complaint


def test_the_form_counts():
    reference, eager = made(lambda x: 2 * x + 1)
    assert "shape" in reference.compare("y", eager[:2]).complaint
    assert "type" in reference.compare("y", eager.double()).complaint


def test_what_can_teach_nothing():
    reference, _ = made(lambda x: 2 * x + 1)
    assert special.unusable([reference]) is None
    truth = X.double()
    assert "chance" in special.unusable([Reference(truth, X.flip(0))])
    assert "not finite" in special.unusable([Reference(truth * float("nan"), X * float("nan"))])
    assert "empty" in special.unusable([Reference(truth[:0], X[:0])])
