"""Every variant has its original's parameters: the same names, in the same order, with the same bits after the same seed."""

import inspect

import project_variants
import pytest
import torch

from playground import catalog, tensors


@pytest.mark.parametrize("model, variant", project_variants.variants())
def test_parameters_and_signatures(model, variant):
    problem = catalog.load_problem(model.path)
    kinds = problem.Model, catalog.load_variant(variant.path).ModelNew
    original, new = (tensors.make_model(problem, kind, seed=3) for kind in kinds)
    theirs, ours = original.state_dict(), new.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    trained = [{name: value.requires_grad for name, value in made.named_parameters()} for made in (original, new)]
    assert trained[0] == trained[1]
    for method in ("__init__", "forward"):
        theirs, ours = (str(inspect.signature(getattr(kind, method))) for kind in kinds)
        assert ours == theirs, method
