"""Every variant has its original's parameters: the same names, in the same order, with the same bits after the same seed."""

import inspect

import project_variants
import pytest
import torch

from playground import catalog, tensors

pytestmark = pytest.mark.parametrize("model, variant", project_variants.variants())


@pytest.fixture
def pair(model, variant):
    """(original, variant), both built after the same seed."""
    problem = catalog.load_problem(model.path)
    new = catalog.load_variant(variant.path).ModelNew
    return tensors.make_model(problem, problem.Model, seed=3), tensors.make_model(problem, new, seed=3)


def test_same_seed_same_weights(pair):
    original, new = (model.state_dict() for model in pair)
    assert list(new) == list(original)
    assert all(torch.equal(new[name], original[name]) for name in original)


def test_parameters_ask_for_gradients(pair):
    original, new = ({name: p.requires_grad for name, p in model.named_parameters()} for model in pair)
    assert new == original


def test_signatures(pair):
    for method in ("__init__", "forward"):
        original, new = (inspect.signature(getattr(type(model), method)) for model in pair)
        assert str(new) == str(original), method
