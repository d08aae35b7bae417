"""Variants under DistributedDataParallel, on the CPU over gloo."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from playground import catalog
from playground.data_parallel import WAYS, share_of_allowed

# Its result for a sample depends on the other samples, so that parts of a batch give other gradients than the whole.
MIXES_SAMPLES = "return torch.tanh(self.linear(x - x.mean(0)))"
TRAINED = [(model, variant) for model in catalog.models() for variant in catalog.variants(model) if variant.backend == "cpu"]


def data_parallel(ranks, *arguments, file):
    """(exit status, {variant: row}, stderr)."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, "-m", "playground.data_parallel", "--device", "cpu", *arguments, "--json", str(file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))}
    done = subprocess.run(command, cwd=catalog.ROOT, env=environment, capture_output=True, text=True, timeout=400)
    rows = json.loads(file.read_text())["results"] if file.exists() else []
    return done.returncode, {row["variant"]: row for row in rows}, done.stderr


def test_the_projects_variants_on_two_ranks(tmp_path):
    status, rows, err = data_parallel(2, file=tmp_path / "out.json")
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
    names = ["--model", str(tiny_problem), "--variant", str(right.path), str(wrong.path), "--time"]
    return data_parallel(3, *names, "--set", "batch_size=7", file=tmp_path_factory.mktemp("tiny") / "out.json")


def test_unequal_parts(tiny):
    assert tiny[1]["plain"]["verdict"] == "pass", tiny[2]


def test_a_step_is_timed(tiny):
    row = tiny[1]["plain"]
    assert row["step_ms"] > 0 and row["alone_ms"] > 0
    assert row["samples"] == 7
    assert row["samples_per_second"] == pytest.approx(3 * 7 * 1000 / row["step_ms"])
    assert row["efficiency"] == pytest.approx(row["alone_ms"] / row["step_ms"])


def test_a_variant_whose_samples_depend_on_one_another(tiny):
    status, rows, _ = tiny
    assert status == 1
    assert rows["mixes_samples"]["verdict"] == "fail" and "one process with the whole batch" in rows["mixes_samples"]["reason"]


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
