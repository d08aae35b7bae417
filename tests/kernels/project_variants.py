"""The project's variants as parameters of a test: one for each file, called model/variant."""

import ast

import pytest

from playground import catalog


def variants(backend=None):
    """pytest.param(model, variant) for every variant, or for those of one backend."""
    pairs = [(model, variant) for model in catalog.models() for variant in catalog.variants(model)]
    chosen = [pair for pair in pairs if backend in (None, pair[1].backend)]
    return [pytest.param(model, variant, id=f"{model.name}/{variant.name}") for model, variant in chosen]


def text_of(variant):
    return variant.path.read_text(encoding="utf-8")


def constant(variant, name):
    """The value of a module constant that is one literal, without running the file; None where there is none."""
    for statement in ast.parse(text_of(variant)).body:
        if isinstance(statement, ast.Assign) and [t.id for t in statement.targets if isinstance(t, ast.Name)] == [name]:
            return ast.literal_eval(statement.value)
    return None
