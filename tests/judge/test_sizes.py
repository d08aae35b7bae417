"""Other sizes of a model, found without knowing what its constants mean."""

import pytest
import torch

from playground import catalog, tensors
from playground.judge.sizes import REDUCED_BATCH, REDUCED_ELEMENTS, Sizes

LAYERS = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, 3)

    def forward(self, x, *others):
        return self.linear(x)
"""


@pytest.fixture
def sizes(tmp_path):
    """sizes(constants, shape, init=5, settings=None) -> Sizes of a problem's file with the model above, all given as text."""

    def make(constants, shape, init=5, settings=None):
        path = tmp_path / "problem.py"
        inputs = f"def get_inputs(): return [torch.rand({shape})]\ndef get_init_inputs(): return [{init}]\n"
        path.write_text(f"{LAYERS}{constants}\n{inputs}")
        own = catalog.load_problem(path, settings)
        model = tensors.make_model(own, own.Model, 0)

        def runs(problem):
            model(*problem.get_inputs())
            return True

        return Sizes(path, settings or {}, "cpu", runs)

    return make


def shape(sizes, size):
    problem = sizes.problem(size)
    return problem and tuple(problem.get_inputs()[0].shape)


def test_batch_and_length_are_free_and_features_are_not(sizes):
    found = sizes("batch_size = 64\nlength = 4096\nfeatures = 16", "batch_size, length, features", "features")
    reduced = shape(found, "reduced")
    assert reduced[0] == REDUCED_BATCH and reduced[2] == 16
    assert reduced[1] in (512, 1024) and torch.Size(reduced).numel() <= REDUCED_ELEMENTS["cpu"]
    assert shape(found, "batch 1") == (1, *reduced[1:])
    odd = shape(found, "odd")
    assert odd[1] % 2 == 1 and odd[1] < reduced[1] and odd[2] == 16
    assert (found.problem("batch 1").batch_size, found.problem("batch 1").length) == (1, reduced[1])


# What holds -> (constants, shape of the input, what the model is made with, shapes that are found).
FOUND = {
    **{f"{n} is a batch": (f"{n} = 8", f"{n}, 5", 5, {"batch 1": (1, 5)}) for n in ("batch", "N", "B", "batch_size", "bs")},
    "what follows from a constant follows": ("N = 8\nrows = N * 2", "N, rows, 5", 5, {"batch 1": (1, 2, 5)}),
    "a constant of the weights is no batch": ("N = 8", "N, N", "N", {"reduced": (8, 8), "batch 1": None, "odd": None}),
    "without constants": ("", "4, 5", 5, {"reduced": (4, 5), "batch 1": None, "odd": None}),
    "only inputs of 5 features fit": ("batch = 4\nextra = 5", "batch, extra", 5, {"odd": None, "batch 1": (1, 5)}),
    "a square has no batch": ("N = 64", "N, N, 5", 5, {"batch 1": None, "reduced": (64, 64, 5), "odd": (61, 61, 5)}),
    "odd sizes are made even": ("H, W = 31, 16", "2, H, W, 5", 5, {"odd": (2, 28, 11, 5)}),
}


@pytest.mark.parametrize("constants, given, init, expected", FOUND.values(), ids=FOUND.keys())
def test_shapes(sizes, constants, given, init, expected):
    found = sizes(constants, given, init)
    assert {size: shape(found, size) for size in expected} == expected


def test_settings_of_the_user_stay(sizes):
    found = sizes("batch = 4\nlength = 9", "batch, length, 5", settings={"length": 21})
    assert shape(found, "own") == (4, 21, 5)
    assert shape(found, "batch 1") == (1, 21, 5)
