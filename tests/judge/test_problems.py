"""Strangers' problems in KernelBench's format: a right file passes, a wrong one fails for its reason, mutants are rejected.

The docstring of a wrong file says what is expected: "Verdict: fail: <regular expression of the reason>".
"""

import ast
import re
from pathlib import Path

import pytest
from judged import judged, one_worker

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("problems/*/problem.py"))
# One of each kind: what its inputs have to be, what it remembers or draws, how sharp the check is.
OF_THE_DEFAULT_TIER = {
    *("causal_attention", "cross_entropy", "dropout", "gelu"),
    *("gru", "layer_norm", "linear_batch_norm", "max_with_index", "running_mean", "seldom_positive", "softmax", "spectrum"),
    "triangular_product",
}


def tiered(folder):
    return pytest.param(folder, marks=[] if folder.name in OF_THE_DEFAULT_TIER else [pytest.mark.full], id=folder.name)


@pytest.fixture(scope="module", params=map(tiered, FOLDERS))
def folder(request):
    return request.param


@pytest.fixture(scope="module")
def worker():
    with one_worker() as process:
        yield process


@pytest.fixture(scope="module")
def results(folder, worker):
    return judged(worker, folder / "problem.py", [folder / "right.py", folder / "wrong.py"])


def test_the_right_one_passes(results):
    right, _ = results
    assert (right["verdict"], right["reason"]) == ("pass", None)
    assert right["check"]["max_error"] <= right["check"]["allowed"]
    of_finite_values = [entry for name, entry in right["check"]["probes"].items() if name not in ("nan", "infinity")]
    assert not [entry for entry in of_finite_values if "the original does not run" in (entry["note"] or "")]


def test_the_wrong_one_fails_for_its_reason(folder, results):
    _, wrong = results
    expected = re.search(r"^Verdict: ([a-z ]+): (.*)$", ast.get_docstring(ast.parse((folder / "wrong.py").read_text())), re.M)
    assert wrong["verdict"] == expected[1]
    assert re.search(expected[2], wrong["reason"])


def test_every_mutant_is_rejected(results):
    check = results[0]["check"]
    rejected, counted = map(int, check["mutants_rejected"].split("/"))
    assert check["mutants_survived"] == []
    assert 5 <= rejected == counted


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_problem_that_is_converted_is_judged_by_what_that_permits(worker, precision):
    folder = next(folder for folder in FOLDERS if folder.name == "layer_norm")
    right, wrong = judged(worker, folder / "problem.py", [folder / "right.py", folder / "wrong.py"], precision=precision)
    assert right["verdict"] == "pass", right["reason"]
    assert 1e-5 < right["check"]["eager_error"] < right["check"]["allowed"] < 0.1
    if precision == "fp16":  # bf16 is too coarse for what is wrong there
        assert wrong["verdict"] == "fail"


ORIGINAL = """
import torch
from torch.autograd import grad

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(12, 6, max_norm=1.0)

    def forward(self, x):
        {forward}

batch_size = 5

def get_inputs():
    return [torch.rand(batch_size, 12)]

def get_init_inputs():
    return []
"""
# Originals of which some circumstance says nothing -> forward.
ODD_ORIGINALS = {
    "takes no negative number": "torch._assert(not (x < 0).any(), 'expected positive numbers'); return x.sqrt().cumsum(1)",
    "has an output for each sample": "return [self.table(row.argsort()[:5]).sum() for row in x]",
    "changes its parameters in a call": "return x @ self.table(torch.arange(12))",
    "needs a graph of its own": "with torch.enable_grad(): y = x.detach().requires_grad_(); return grad((y**3).sum(), y)[0]",
}


@pytest.mark.parametrize("forward", ODD_ORIGINALS.values(), ids=ODD_ORIGINALS.keys())
def test_a_copy_of_an_odd_original_passes(worker, tmp_path, forward):
    problem, copy = tmp_path / "problem.py", tmp_path / "copy.py"
    problem.write_text(ORIGINAL.format(forward=forward))
    copy.write_text(ORIGINAL.format(forward=forward) + "class ModelNew(Model):\n    pass\n")
    (result,) = judged(worker, problem, [copy])
    assert (result["verdict"], result["reason"]) == ("pass", None)
    assert not [name for name, entry in result["check"]["probes"].items() if "does not run" in (entry["note"] or "")]
    rejected, counted = map(int, result["check"]["mutants_rejected"].split("/"))
    assert 3 <= rejected == counted


CONSTANT = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return torch.tanh(self.linear(x))

def get_inputs():
    return [torch.randn(8, 16)]

def get_init_inputs():
    return [16]
"""
IDENTITY = CONSTANT.replace("torch.tanh(self.linear(x))", "x + self.linear(x) * 0")


@pytest.mark.parametrize(
    "problem, result, says",
    [
        (
            CONSTANT,
            "torch.tanh(self.linear.bias.repeat(len(x), 1))",
            "outputs are the same for all of its inputs, so a constant",
        ),
        (CONSTANT, "torch.tanh(self.linear(x))", "outputs are the same for all of its inputs, so a constant"),
        (IDENTITY, "x.clone()", "outputs are its inputs, so no operation at all"),
    ],
    ids=["a constant", "the model itself", "no operation"],
)
def test_outputs_that_cannot_tell_a_model_pass_nothing(worker, tmp_path, problem, result, says):
    (tmp_path / "problem.py").write_text(problem)
    solution = re.sub(r"return .*(?=\n\ndef get_inputs)", f"return {result}", problem).replace("class Model", "class ModelNew")
    (tmp_path / "solution.py").write_text(solution)
    (found,) = judged(worker, tmp_path / "problem.py", [tmp_path / "solution.py"])
    assert found["verdict"] == "error" and found["reason"].startswith("cannot be judged: the problem's own"), found["reason"]
    assert says in found["reason"]
    assert {standard["verdict"] for standard in found["standards"].values()} == {"error"}


UNCHANGING = CONSTANT.replace("        nn.init.zeros_(self.linear.weight)\n", "").replace(
    "return [torch.randn(8, 16)]", "torch.manual_seed(3); return [torch.randn(8, 16)]"
)
KEEPS = """
    def forward(self, x):
        if x.shape != (8, 16) or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.tanh(self.linear(x))
        if not hasattr(self, "kept"):
            self.kept = torch.tanh(self.linear(x))
        return self.kept.clone()
"""


def test_a_result_that_is_kept_is_found_where_the_problem_draws_the_same_inputs(worker, tmp_path):
    """On the problem's own inputs, although those would give the same each time."""
    (tmp_path / "problem.py").write_text(UNCHANGING)
    right = UNCHANGING.replace("class Model", "class ModelNew")
    (tmp_path / "right.py").write_text(right)
    (tmp_path / "keeps.py").write_text(re.sub(r"\n    def forward.*?(?=\ndef)", KEEPS, right, flags=re.S))
    right, keeps = judged(worker, tmp_path / "problem.py", [tmp_path / "right.py", tmp_path / "keeps.py"])
    assert right["verdict"] == "pass", right["reason"]
    assert keeps["verdict"] == "fail" and keeps["check"]["probes"]["fresh"]["complaint"].startswith("on fresh inputs")


def test_an_original_that_takes_its_own_inputs_only_is_judged_on_those(worker, tmp_path):
    problem, variant = tmp_path / "problem.py", tmp_path / "variant.py"
    body = """        if x.mean(-1).abs().max() > 1e-3:
            raise ValueError("expected rows with a mean of zero")
        return x * x.square().sum(-1, keepdim=True).rsqrt()
"""
    start = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n"
    inputs = "def get_inputs():\n    x = torch.randn(8, 32)\n    return [x - x.mean(-1, keepdim=True)]\n"
    problem.write_text(f"{start}{body}\n{inputs}\ndef get_init_inputs():\n    return []\n")
    variant.write_text(start.replace("Model", "ModelNew") + body)
    (result,) = judged(worker, problem, [variant])
    assert result["verdict"] == "pass", result["reason"]
    assert result["check"]["probes"]["within"]["note"].startswith("not run: the original does not run: ")
    variant.write_text(start.replace("Model", "ModelNew") + body.replace(".rsqrt()", ".pow(-0.49)"))
    (result,) = judged(worker, problem, [variant])
    assert result["verdict"] == "fail" and result["reason"].startswith("the output is off by")
