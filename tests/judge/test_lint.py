"""--lint: which wrong answers the tests of problems let pass, on problems whose answer is known."""

import json
import shutil

import pytest

from playground.catalog import CatalogError
from playground.judge import lint
from playground.report import lint as report

PROBLEM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {layer} = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return {forward}

batch_size = {batch}
dim = {dim}

def get_inputs():
    {top}
    return [{inputs}]

def get_init_inputs():
    return []
"""


@pytest.fixture
def examined(tmp_path):
    """examined(forward, inputs, ...) -> what lint.examine finds in a problem."""

    def examine(
        forward,
        inputs="torch.rand(batch_size, dim)",
        batch=6,
        dim=8,
        elements=1 << 12,
        seconds=60.0,
        top="pass",
        layer="self.weight",
        **how,
    ):
        file = tmp_path / "problem.py"
        file.write_text(PROBLEM.format(forward=forward, inputs=inputs, batch=batch, dim=dim, top=top, layer=layer))
        how = {"precision": None, "with_mutants": False} | how
        return lint.examine(file, {}, how["precision"], elements, seconds, 7, how["with_mutants"])

    return examine


def test_outputs_below_the_tolerance_let_zeros_pass(examined):
    found = examined("torch.softmax(x, 1)", dim=1 << 15, batch=2, elements=1 << 17)
    assert found["settings"] == {} and found["largest"] < 1e-4
    assert {"zeros", "a constant", "the result of another draw"} <= set(found["passes"])
    assert {"zeros", "a constant"}.isdisjoint(examined("torch.softmax(x, 1)")["passes"]), "outputs of 0.1 are compared"


def test_what_the_own_size_alone_shows_is_expected_from_smaller_ones(examined):
    found = examined("x / x.norm()", batch=1 << 12, dim=1 << 14)
    assert found["elements"] <= 1 << 12 and found["own_elements"] == 1 << 26
    assert found["expected_largest"] == pytest.approx(3**0.5 / 2**13, rel=0.2), "uniform in 0 to 1, over its norm"
    assert found["largest"] > 1e-4 > found["expected_largest"] / 3
    smaller = examined("x / x.norm()", batch=1 << 15, dim=1 << 14)
    assert smaller["passes"][0] == "zeros (expected at the own size)"


def test_lower_precision_passes_the_wider_tolerance_alone(examined):
    assert {"bf16", "fp16"}.isdisjoint(examined("x * 3.3")["passes"])
    assert {"bf16", "fp16"} <= set(examined("x * 1e-3")["passes"])
    found = examined("x * 1e-3", precision="bf16")
    assert found["passes"] == ["zeros", "a constant", "the result of another draw"], "which is the problem's own precision"


def test_an_operator_that_does_nothing_to_these_inputs_can_be_skipped(examined):
    found = examined("torch.relu(x)", with_mutants=True)["mutants"]
    assert "relu: skipped" in found["passed"] and found["untried"] == 0
    found = examined("torch.relu(x - 0.5)", with_mutants=True)["mutants"]
    assert found["passed"] == [] and found["counted"] >= 5
    assert examined("torch.relu(x)", with_mutants=True, seconds=0.0)["mutants"]["untried"] > 5


def test_the_operator_that_is_skipped_is_the_one_that_is_named(examined):
    layer = "self.register_buffer('limit', torch.ones(())); self.weight"
    found = examined("torch.relu(x) - 3 * self.limit", with_mutants=True, layer=layer)["mutants"]
    assert [name for name in found["passed"] if "skipped" in name] == ["relu: skipped"]


def test_what_the_inputs_always_have_in_common_may_be_used(examined):
    symmetric = "(lambda a: a + a.T)(torch.rand(8, 8))"
    found = examined("x @ x.tanh()", inputs=symmetric, with_mutants=True)["mutants"]
    assert not any("transposed" in name for name in found["passed"])
    found = examined("torch.triu(x)", inputs="torch.rand(8, 8).triu()", with_mutants=True)["mutants"]
    assert "triu: skipped" not in found["passed"]


@pytest.mark.parametrize(
    "given, note",
    [
        ({"forward": "x * 2", "inputs": "torch.arange(8.0).expand(batch_size, 8)"}, "the inputs never vary"),
        ({"forward": "x * 0 + 1"}, "outputs say nothing: all are equal"),
        ({"forward": "x / 0"}, "outputs are not finite"),
        ({"forward": "torch.dropout(x, 0.5, True)"}, "the reference draws random numbers"),
        ({"forward": "x + __import__('time').perf_counter() % 1"}, "the reference is not deterministic"),
        ({"forward": "x * 2"}, "too small to time"),
    ],
)
def test_what_else_is_wrong_with_a_problem(examined, given, note):
    assert any(each.startswith(note) for each in examined(**given)["notes"])


def test_a_sound_problem_has_none_of_it(examined):
    found = examined("torch.tanh(3 * x - 1)", batch=1 << 12, dim=1 << 12)
    assert (found["notes"], found["passes"]) == ([], []) and found["floor_us"] > 5


def test_a_problem_that_stays_too_large_is_an_internal_limit(examined, monkeypatch):
    monkeypatch.setattr(lint, "MOST", 100)
    with pytest.raises(CatalogError, match="internal limit"):
        examined("x * 2", inputs="torch.rand(batch_size, 4096)", batch=2)


def test_a_size_that_fails_without_shapes_is_not_taken(examined):
    """The model asks for values, so that it does not run on shapes."""
    whole = "x * 2 if x.sum().item() < 1e9 and x.shape[0] == 64 else x.none()"
    found = examined(whole, batch=64, dim=32, elements=256)
    assert (found["settings"], found["elements"]) == ({}, 2048)


def test_sizes_that_belong_together_are_halved_together(examined):
    found = examined(
        "x * 2", inputs="torch.rand(batch_size, dim) + torch.rand(2 * batch_size // 2, dim // 1)", batch=64, dim=512
    )
    assert found["elements"] <= 1 << 12


@pytest.mark.parametrize("most, settings", [(1 << 8, {"batch_size": 16, "dim": 16}), (1 << 20, {"batch_size": 8})])
def test_weights_shrink_where_they_are_many_and_can(tmp_path, monkeypatch, most, settings):
    monkeypatch.setattr(lint, "WEIGHTS", most)
    monkeypatch.setattr(lint, "WIDTH", 1)
    text = PROBLEM.format(
        forward="x @ self.weight", batch=64, dim=32, top="pass", layer="self.weight", inputs="torch.rand(batch_size, dim)"
    )
    text = text.replace("__init__(self)", "__init__(self, dim)").replace("torch.ones(8)", "torch.ones(dim, dim)")
    (tmp_path / "a.py").write_text(text.replace("return []", "return [dim]"))
    assert lint.shrink(tmp_path / "a.py", {}, 256) == settings
    (tmp_path / "b.py").write_text(text.replace("return []", "return [32]"))
    assert lint.shrink(tmp_path / "b.py", {}, 256) == {"batch_size": 8}, "the weights stay"


def test_lower_is_lower_than_the_problems_own_precision(examined):
    found = examined("x * 1e-3", inputs="torch.rand(batch_size, dim).half()")["passes"]
    assert "bf16" in found and "fp16" not in found


def test_what_passes_one_test_of_a_problem_and_fails_another_does_not_pass(tmp_path, compare):
    shutil.copytree("examples/gpu_mode", tmp_path / "p")
    reference = tmp_path / "p" / "reference.py"
    text = reference.read_text()
    for columns, passes in [("columns > 0", True), ("columns == 33", False)]:
        own = f"\n\ndef check_implementation(data, output):\n    columns = output.shape[1]\n    return {columns}, 'no'\n"
        reference.write_text(text + own)
        status, _, err = compare("--lint", tmp_path / "p", "--quick", "--json", tmp_path / "a.json")
        assert status == 0, err
        (found,) = json.loads((tmp_path / "a.json").read_text())["lint"]
        assert ("zeros" in found["passes"]) is passes


def test_a_check_of_the_problems_own_is_asked(tmp_path, compare):
    status, out, err = compare("--lint", "examples/gpu_mode", "--quick", "--json", tmp_path / "a.json")
    assert status == 0, err
    (found,) = json.loads((tmp_path / "a.json").read_text())["lint"]
    assert found["error"] is None and "zeros" not in found["passes"] and found["problem"] in out


def test_a_folder_is_a_line_each_and_a_table(tmp_path, compare):
    (tmp_path / "level1").mkdir()
    texts = {"1_Small": {"forward": "x * 1e-6"}, "2_Broken": {"forward": "x.none()"}, "3_Right": {"forward": "torch.tanh(x)"}}
    for name, given in texts.items():
        text = PROBLEM.format(
            **{"inputs": "torch.rand(batch_size, dim)", "batch": 4, "dim": 8, "top": "pass", "layer": "self.weight"} | given
        )
        (tmp_path / "level1" / f"{name}.py").write_text(text)
    status, out, err = compare("--lint", tmp_path, "--quick", "--json", tmp_path / "a.json")
    assert status == 0, err
    out = " ".join(out.split())
    assert "level1/1_Small: lets pass zeros, a constant, the result of another draw, bf16, fp16" in out
    assert "2_Broken.py:11: AttributeError" in out and "cannot be examined 1" in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["counts"] == report.counts(found["lint"]) and found["counts"]["zeros passes"] == 1
    assert compare("--lint", tmp_path / "none")[0] == 2
    assert compare("--lint", tmp_path, "--variant", "x")[0] == 2
