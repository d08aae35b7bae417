"""Variants under DistributedDataParallel, on the CPU over gloo."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from playground import catalog, data_parallel
from playground.data_parallel import WAYS, share_of_allowed

pytestmark = pytest.mark.full

# Its result for a sample depends on the other samples, so that parts of a batch give other gradients than the whole.
MIXES_SAMPLES = "return torch.tanh(self.linear(x - x.mean(0)))"
TRAINED = [(model, variant) for model in catalog.models() for variant in catalog.variants(model) if variant.backend == "cpu"]


def torchrun(ranks, *arguments, file):
    """(exit status, {variant: row}, stderr)."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, "-m", "playground.data_parallel", "--device", "cpu", *arguments, "--json", str(file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))}
    done = subprocess.run(command, cwd=catalog.ROOT, env=environment, capture_output=True, text=True, timeout=400)
    rows = json.loads(file.read_text())["results"] if file.exists() else []
    return done.returncode, {row["variant"]: row for row in rows}, done.stderr


def test_the_projects_variants_on_two_ranks(tmp_path):
    status, rows, err = torchrun(2, file=tmp_path / "out.json")
    assert status == 0, err
    assert set(rows) == {variant.name for _, variant in TRAINED}
    for row in rows.values():
        assert row["verdict"] == "pass", row["reason"]
        assert set(row["errors"]) == set(WAYS) - {"in a CUDA graph"} and all(
            0 <= share <= 1 for share in row["errors"].values()
        )


@pytest.fixture(scope="module")
def tiny(tiny_problem, write_forward, tmp_path_factory):
    """Three ranks, whose parts of the five samples differ in size, on a right variant and on one that is none."""
    right = write_forward("plain", "return torch.tanh(self.linear(x))")
    wrong = write_forward("mixes_samples", MIXES_SAMPLES)
    names = ["--model", str(tiny_problem), "--variant", str(right.path), str(wrong.path)]
    return torchrun(3, *names, "--set", "batch_size=7", file=tmp_path_factory.mktemp("tiny") / "out.json")


def test_unequal_parts(tiny):
    assert tiny[1]["plain"]["verdict"] == "pass", tiny[2]


def test_a_variant_whose_samples_depend_on_one_another(tiny):
    status, rows, _ = tiny
    assert status == 1
    assert rows["mixes_samples"]["verdict"] == "fail" and "one process with the whole batch" in rows["mixes_samples"]["reason"]


RAISING = {
    "raises_everywhere": ("raise ValueError('never')", "ValueError: never"),
    "raises_on_one_rank": ("if os.environ['RANK'] == '1': raise ValueError('not me')", "on rank 1: ValueError: not me"),
    # The parts of the five samples are three and two, and of these the halves two, one, one and one.
    "raises_for_two": ("if len(x) == 2: raise ValueError('two')", "on rank 1: ValueError: two"),
    "ends_the_process": ("raise SystemExit(3)", "the file called sys.exit(3)"),
    "refuses_on_one_rank": ("if os.environ['RANK'] == '1': raise NotImplementedError('no training')", "on rank 1: no training"),
}


def test_a_variant_that_raises_ends_neither_the_others_nor_any_rank(tiny_problem, write_forward, write_variant, tmp_path):
    right = "return torch.tanh(self.linear(x))"
    raising = [write_forward(name, f"import os\n{body}\n{right}") for name, (body, _) in RAISING.items()]
    variants = [*raising, write_variant("is_no_python", "def (\n"), write_forward("right", right)]
    paths = [str(variant.path) for variant in variants]
    status, rows, err = torchrun(2, "--model", str(tiny_problem), "--variant", *paths, file=tmp_path / "out.json")
    assert status == 1 and "playground/data_parallel.py" not in err, "a rank ended with a traceback"
    assert {name: rows[name]["reason"] for name in RAISING} == {name: reason for name, (_, reason) in RAISING.items()}
    assert rows["is_no_python"]["reason"].startswith("SyntaxError in line 1")
    verdicts = dict.fromkeys(rows, "error") | {"refuses_on_one_rank": "skipped", "right": "pass"}
    assert {name: row["verdict"] for name, row in rows.items()} == verdicts
    assert list(rows["raises_for_two"]["errors"]) == [], "the first way was not done"


SOME_PARAMETERS = """
import torch
import torch.nn as nn

class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained, self.frozen, self.unused = nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        {more}

    def forward(self, x):
        return torch.tanh(self.frozen({forward})), x[:, 0]

def get_inputs():
    return [torch.rand(6, 8)]

def get_init_inputs():
    return []
"""


@pytest.fixture
def examined(tmp_path, write_variant, monkeypatch):
    """examined(more=..., forward=...) -> the row of a variant; `more` stands in the model as well."""
    monkeypatch.setattr(data_parallel, "WAYS", ("as it is", "accumulated", "in a CUDA graph"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def examine(more="pass", forward="self.trained(x)"):
        path = tmp_path / "problem.py"
        path.write_text(SOME_PARAMETERS.format(name="Model", more=more, forward="self.trained(x)"))
        given = data_parallel._arguments(["--device", "cpu"])
        case = data_parallel._case(catalog.Model("problem", path), given, torch.device("cpu"))
        variant = write_variant("some_parameters", SOME_PARAMETERS.format(name="ModelNew", more=more, forward=forward))
        return data_parallel._examine(case, variant)

    yield examine
    torch.distributed.destroy_process_group()


def test_parameters_that_get_no_gradient_are_not_compared(examined):
    row = examined()
    assert (row["verdict"], row["reason"]) == ("pass", None)
    assert set(row["errors"]) == {"as it is", "accumulated"}


def test_a_model_without_a_trained_parameter(examined):
    row = examined(more="self.requires_grad_(False)")
    assert (row["verdict"], row["reason"]) == ("skipped", "no parameter of the original gets a gradient")


def test_a_variant_that_gives_no_gradient_to_what_the_original_trains(examined):
    row = examined(forward="nn.functional.linear(x, self.trained.weight, self.trained.bias.detach())")
    assert (row["verdict"], row["reason"]) == ("fail", "by itself it gives no gradient to trained.bias")


@pytest.mark.parametrize(
    ("difference", "share"), [([0.0, -0.5], 0.25), ([0.0, 0.0], 0.0), ([math.nan, 0.0], math.inf), ([math.inf, 0.0], math.inf)]
)
def test_a_gradient_that_is_no_number_is_not_within_what_is_allowed(difference, share):
    assert share_of_allowed(torch.tensor(difference), 2.0) == share


def test_where_nothing_may_differ():
    assert share_of_allowed(torch.zeros(2), 0.0) == 0
    assert share_of_allowed(torch.ones(2), 0.0) == math.inf


def test_without_torchrun():
    done = subprocess.run([sys.executable, "-m", "playground.data_parallel"], cwd=catalog.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "torchrun" in done.stderr
