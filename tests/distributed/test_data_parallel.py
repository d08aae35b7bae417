"""Variants under DistributedDataParallel, on the CPU over gloo."""

import json
import os
import subprocess
import sys

import pytest

from playground import catalog
from playground.data_parallel import WAYS

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
        assert set(row["errors"]) == set(WAYS) and all(0 <= share <= 1 for share in row["errors"].values())


@pytest.fixture(scope="module")
def tiny(tiny_problem, write_forward, tmp_path_factory):
    """Three ranks, whose parts of the five samples differ in size, on a right variant and on one that is none."""
    right = write_forward("plain", "return torch.tanh(self.linear(x))")
    wrong = write_forward("mixes_samples", MIXES_SAMPLES)
    names = ["--model", str(tiny_problem), "--variant", str(right.path), str(wrong.path), "--time"]
    return data_parallel(3, *names, "--set", "batch_size=7", file=tmp_path_factory.mktemp("tiny") / "out.json")


def test_unequal_parts(tiny):
    assert tiny[1]["plain"]["verdict"] == "pass", tiny[2]
    assert tiny[1]["plain"]["step_ms"] > 0 and tiny[1]["plain"]["alone_ms"] > 0


def test_a_variant_whose_samples_depend_on_one_another(tiny):
    status, rows, _ = tiny
    assert status == 1
    assert rows["mixes_samples"]["verdict"] == "fail" and "one process with the whole batch" in rows["mixes_samples"]["reason"]


def test_without_torchrun():
    done = subprocess.run([sys.executable, "-m", "playground.data_parallel"], cwd=catalog.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "torchrun" in done.stderr
