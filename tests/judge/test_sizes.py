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
    """sizes(text) -> Sizes of a problem's file with the model above."""

    def make(text, settings=None):
        path = tmp_path / "problem.py"
        path.write_text(LAYERS + text)
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
    found = sizes(
        "batch_size = 64\nlength = 4096\nfeatures = 16\n"
        "def get_inputs(): return [torch.rand(batch_size, length, features)]\n"
        "def get_init_inputs(): return [features]\n"
    )
    reduced = shape(found, "reduced")
    assert reduced[0] == REDUCED_BATCH and reduced[2] == 16
    assert reduced[1] in (512, 1024) and torch.Size(reduced).numel() <= REDUCED_ELEMENTS["cpu"]
    assert shape(found, "batch 1") == (1, *reduced[1:])
    odd = shape(found, "odd")
    assert odd[1] % 2 == 1 and odd[1] < reduced[1] and odd[2] == 16
    assert (found.problem("batch 1").batch_size, found.problem("batch 1").length) == (1, reduced[1])


@pytest.mark.parametrize("name", ["batch", "N", "B", "batch_size", "bs"])
def test_usual_names_of_the_batch(sizes, name):
    found = sizes(f"{name} = 8\ndef get_inputs(): return [torch.rand({name}, 5)]\ndef get_init_inputs(): return [5]\n")
    assert shape(found, "batch 1") == (1, 5)


def test_what_follows_from_a_constant_follows(sizes):
    found = sizes("N = 8\nrows = N * 2\ndef get_inputs(): return [torch.rand(N, rows, 5)]\ndef get_init_inputs(): return [5]\n")
    assert shape(found, "batch 1") == (1, 2, 5)


def test_a_constant_of_the_weights_is_no_batch(sizes):
    found = sizes("N = 8\ndef get_inputs(): return [torch.rand(N, N)]\ndef get_init_inputs(): return [N]\n")
    assert shape(found, "reduced") == (8, 8)
    assert found.problem("batch 1") is None and found.problem("odd") is None


def test_a_file_without_constants(sizes):
    found = sizes("def get_inputs(): return [torch.rand(4, 5)]\ndef get_init_inputs(): return [5]\n")
    assert shape(found, "reduced") == (4, 5)
    assert found.problem("batch 1") is None and found.problem("odd") is None


def test_a_size_at_which_the_original_does_not_run(sizes):
    found = sizes(
        "batch = 4\nextra = 5\ndef get_inputs(): return [torch.rand(batch, extra)]\ndef get_init_inputs(): return [5]\n"
    )
    assert found.problem("odd") is None, "only inputs of 5 features fit the weights"
    assert shape(found, "batch 1") == (1, 5)


def test_settings_of_the_user_stay(sizes):
    text = "batch = 4\nlength = 9\ndef get_inputs(): return [torch.rand(batch, length, 5)]\ndef get_init_inputs(): return [5]\n"
    found = sizes(text, {"length": 21})
    assert shape(found, "own") == (4, 21, 5)
    assert shape(found, "batch 1") == (1, 21, 5)


def test_a_constant_that_is_both_dimensions_of_a_square_is_no_batch(sizes):
    found = sizes("N = 64\ndef get_inputs(): return [torch.rand(N, N, 5)]\ndef get_init_inputs(): return [5]\n")
    assert shape(found, "batch 1") is None
    assert shape(found, "reduced") == (64, 64, 5) and shape(found, "odd") == (61, 61, 5)


def test_sizes_that_are_odd_are_made_even(sizes):
    found = sizes("H, W = 31, 16\ndef get_inputs(): return [torch.rand(2, H, W, 5)]\ndef get_init_inputs(): return [5]\n")
    assert shape(found, "odd") == (2, 28, 11, 5)
