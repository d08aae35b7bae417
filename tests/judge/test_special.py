"""A NaN or an infinity may spoil its own sample, and no other; but not where the original computes each element alone."""

import pytest
import torch

from playground.judge import special
from playground.judge.tolerance import Reference
from playground.tensors import Results

X = torch.arange(12.0).reshape(4, 3)
NAN, INF = float("nan"), float("inf")


def affine(x):
    return 2 * x + 1


def clamped(x):
    return x.clamp(2, 6)


def softmax(x):
    return x.softmax(1)


def leaks(x):
    """As cuDNN, which multiplies neighbours by zero in some transposed convolutions: a copy leaks as well."""
    y = affine(x)
    y[1] += 0 * x[-1, 1]
    return y


def made(model, special_value=NAN, in_eager=None, first=None):
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


def filled(actual, where, value=NAN):
    """A result with another value in some places."""
    changed = actual.clone()
    changed[where] = value
    return changed


def pairs(x):
    """Sums of some elements of a sample: one of minus infinity less minus infinity, one of the rest."""
    return torch.stack([x[:, 0] - x[:, 1], x[:, 2]], 1)


LEAKS = "1 elements where the original is finite"
LOST = "loses NaN or infinity in 1 element"
# What holds -> (the original, what `made` takes besides, what a kernel makes of the original's result, what is complained of,
# what is noted).
CASES = {
    "the original is right": (affine, {}, torch.clone, None, None),
    "with an infinity, too": (affine, {"special_value": INF}, torch.clone, None, None),
    "a leak into another sample": (affine, {}, lambda y: filled(y, (0, 0)), LEAKS, None),
    "another sample must be right": (affine, {}, lambda y: filled(y, (0, 0), 2), "off by", None),
    "a NaN that is lost is a note": (affine, {}, lambda y: y.nan_to_num(0), None, LOST),
    "the shape counts": (affine, {}, lambda y: y[:2], "shape", None),
    "the type counts": (affine, {}, torch.Tensor.double, "type", None),
    "the rest of the sample may be spoiled": (lambda x: x + x.roll(1, 1), {}, lambda y: filled(y, -1), None, None),
    "where an element is computed alone": (clamped, {"special_value": INF}, torch.clone, None, None),
    "its place is compared": (clamped, {"special_value": INF}, lambda y: torch.where(y == 6, 7, y), "off by", None),
    "its place must be finite": (clamped, {"special_value": INF}, lambda y: filled(y, (-1, 1), INF), LEAKS, None),
    "what cuDNN leaks": (affine, {"in_eager": leaks}, torch.clone, None, None),
    "what it does not leak": (affine, {"in_eager": leaks}, lambda y: filled(y, (0, 0)), LEAKS, None),
    "many special values": (softmax, {"first": [-INF] * 2}, torch.clone, None, None),
    "a sample of them spoiled": (softmax, {"first": [-INF] * 2}, lambda y: filled(y, 0), "3 elements where the original", None),
    "sums may spoil such a sample": (pairs, {"first": [-INF] * 2}, lambda y: filled(y, 0), None, None),
    "a maximum of them": (lambda x: x.amax(1), {"first": [-INF] * 3}, torch.clone, None, None),
    "one from a finite number": (lambda x: x.amax(1), {"first": [-INF] * 3}, lambda y: y.clamp(min=-1e30), None, LOST),
    "samples that mix": (lambda x: x - x.mean(0), {}, torch.clone, None, None),
    "no batch": (lambda x: x.sum(0), {}, torch.clone, None, None),
    "a leak without a batch": (lambda x: x.sum(0), {}, lambda y: filled(y, 0), LEAKS, None),
}


@pytest.mark.parametrize("model, given, change, complaint, note", CASES.values(), ids=CASES.keys())
def test_special_values(model, given, change, complaint, note):
    reference, eager = made(model, **given)
    compared = reference.compare("y", change(eager))
    assert complaint in compared.complaint if complaint else compared.complaint is None
    assert compared.swallowed == note


def test_what_can_teach_nothing():
    reference, _ = made(affine)
    assert special.unusable([reference]) is None
    truth = X.double()
    assert "chance" in special.unusable([Reference(truth, X.flip(0))])
    assert "not finite" in special.unusable([Reference(truth * NAN, X * NAN)])
    assert "empty" in special.unusable([Reference(truth[:0], X[:0])])
