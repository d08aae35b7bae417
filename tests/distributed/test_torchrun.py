"""The commands under torchrun, without a GPU: ranks share the work, one of them dies, and a run goes on where it ended."""

import json
import os
import re
import subprocess
import sys

import pytest

from playground.catalog import ROOT
from playground.report import document

# Kills the process of its rank that does the work, in the second call of a process: the first is that of the build.
KILLS = """
import os, signal
if not hasattr(self, "called"):
    self.called = 0
self.called += 1
if self.called == 2 and {condition}:
    os.kill(os.getppid(), signal.SIGKILL)
return torch.tanh(self.linear(x))
"""


@pytest.fixture(scope="module")
def torchrun(tiny_problem):
    """torchrun(ranks, variants, *arguments) -> (exit status, stdout, stderr) of compare.py on them."""

    def run(ranks, variants, *arguments):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        files = [str(variant.path) for variant in variants]
        command = [*launcher, "compare.py", "--model", str(tiny_problem), "--quick", "--variant", *files, *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(scope="module")
def right(write_forward):
    return [write_forward(f"right_{name}", "return torch.tanh(self.linear(x))") for name in "ab"]


@pytest.fixture(scope="module")
def shared(torchrun, right, tmp_path_factory):
    """(exit status, stdout, stderr, file) of two ranks with two variants."""
    file = tmp_path_factory.mktemp("shared") / "out.json"
    return *torchrun(2, right, "--json", file), file


def test_ranks_share_the_work(shared):
    status, out, err, file = shared
    assert status == 0, err
    report = document.read(file)
    assert [result["verdict"] for result in report["results"]] == ["pass", "pass"]
    assert {result["device"]["rank"] for result in report["results"]} <= {0, 1}
    assert [each["rank"] for each in report["environment"]["ranks"]] == [0, 1]
    assert report["environment"]["lost_ranks"] == [] and report["environment"]["complete"]
    assert len({each["probe_seed"] for each in report["environment"]["ranks"]}) == 2
    for name in ("right_a", "right_b"):
        assert out.count(f"{name} pass") == 1, "one table"
        assert len(re.findall(rf"\[rank \d\] build tiny/{name}: ", err)) == 1, "a build happens once a host"


def test_timed_on_all_threads(shared):
    """torchrun sets OMP_NUM_THREADS to 1; what is timed must not see that."""
    assert json.loads(shared[3].read_text())["environment"]["cpu_details"]["threads"] > 1 or os.cpu_count() == 1


def test_the_task_of_a_rank_that_dies_is_taken_by_another(torchrun, right, write_forward, tmp_path):
    condition = f"not os.path.exists({str(tmp_path / 'killed')!r}) and not os.mkdir({str(tmp_path / 'killed')!r})"
    once = write_forward("kills_once", KILLS.format(condition=condition))
    status, _, err = torchrun(3, [once, right[0]], "--json", tmp_path / "out.json")
    assert status == 1, err
    assert re.search(r"rank \d ended \(SIGKILL\); the others go on", err)
    report = document.read(tmp_path / "out.json")
    assert {result["variant"]: result["verdict"] for result in report["results"]} == {"kills_once": "pass", "right_a": "pass"}
    (lost,) = report["environment"]["lost_ranks"]
    assert report["results"][0]["device"]["rank"] != lost


def test_a_task_that_ends_every_rank_is_reported_and_the_run_has_the_rest(torchrun, right, write_forward, tmp_path):
    always = write_forward("kills_always", KILLS.format(condition="True"))
    status, out, err = torchrun(3, [always, right[0]], "--json", tmp_path / "out.json")
    assert status == 1, err
    results = {result["variant"]: result for result in document.read(tmp_path / "out.json")["results"]}
    assert results["right_a"]["verdict"] == "pass"
    assert results["kills_always"]["verdict"] == "error"
    assert "each rank that took it ended before it was done" in results["kills_always"]["reason"]
    assert "each rank that took it ended" in " ".join(out.split())


def test_a_run_resumes_where_it_ended(shared, torchrun, right, tmp_path):
    report = json.loads(shared[3].read_text())
    report["results"] = report["results"][:1]
    (tmp_path / "part.json").write_text(json.dumps(report))
    status, _, err = torchrun(1, right, "--resume", tmp_path / "part.json", "--json", tmp_path / "whole.json")
    assert status == 0, err
    assert "right_a" not in err and "build tiny/right_b" in err
    whole = document.read(tmp_path / "whole.json")
    assert whole["results"][0] == report["results"][0] and whole["results"][1]["verdict"] == "pass"
