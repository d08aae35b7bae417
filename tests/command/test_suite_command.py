"""compare.py --suite as a user types it: what breaks one pair leaves the others, and what is done is not done again."""

import json

import pytest
from typed import run

from playground.command import main
from playground.command.options import parse

EXITS = """
import os
os._exit(3)
class ModelNew: ...
"""


@pytest.fixture
def folders(tmp_path, tiny_problem, write_forward):
    """KernelBench's folders: a solution that is right, one that ends its process, and one of a problem that is not there."""
    right = write_forward("right", "return torch.tanh(self.linear(x))").path.read_text()
    (tmp_path / "KernelBench" / "level1").mkdir(parents=True)
    (tmp_path / "KernelBench" / "level1" / "3_Tiny.py").write_text(tiny_problem.read_text())
    (tmp_path / "run").mkdir()
    for name, text in {"problem_3_sample_0": right, "problem_3_sample_1": EXITS, "problem_4_sample_0": right}.items():
        (tmp_path / "run" / f"level_1_{name}_kernel.py").write_text(text)
    return ["--suite", str(tmp_path / "KernelBench"), "--solutions", str(tmp_path / "run")]


@pytest.mark.full  # tests/test_gpu_mode.py runs a suite in the default tier
def test_one_broken_pair_ends_nothing_and_a_resumed_run_judges_what_is_left(folders, tmp_path):
    files = ["--quick", "--json", str(tmp_path / "out.json"), "--eval-results", str(tmp_path / "eval_results.json")]
    status, out, err = run("compare.py", *folders, *files)
    assert status == 1, err
    document = json.loads((tmp_path / "out.json").read_text())
    right, ended, missing = document["results"]
    assert right["verdict"] == "pass" and right["time_ms"]["median"] > 0 and right["pair"]["problem_id"] == 3
    assert ended["verdict"] == "error" and "ended the process" in ended["reason"]
    assert missing["verdict"] == "error" and missing["reason"].endswith("has no problem 4 of level 1")
    assert document["suite"]["standards"]["forward"]["fast_0"] == pytest.approx(1 / 3)
    assert "1/3 error level1/4_, sample 0:" in out and "3 pairs: 1 pass, 2 error" in out
    found = json.loads((tmp_path / "eval_results.json").read_text())
    times = [] if right["outcome"]["verdict"] == "not measured" else [right["time_ms"]["median"]]  # then it is left out
    assert [entry["correctness"] for entry in found["3"]] == [True] * len(times) + [False]
    assert [entry["runtime"] for entry in found["3"]] == [*times, -1.0]

    status, out, err = run("compare.py", *folders, "--quick", "--resume", str(tmp_path / "out.json"))
    assert "sample_0" not in err and "build level1/3_Tiny/level_1_problem_3_sample_1_kernel" in err
    assert "3 pairs: 1 pass, 2 error" in out and status == 1


GPU_MODE = "examples/gpu_mode"


@pytest.mark.parametrize(
    "arguments, trust",
    [
        ("--model gelu --variant my_gelu.py", "mine"),
        ("--model gelu --variant my_gelu.py --trust nobody", "nobody"),
        ("--model gelu --watch", "mine"),
        (f"--model {GPU_MODE} --variant submission.py", "mine"),
        (f"--suite {GPU_MODE} --solutions theirs", "nobody"),
        ("--suite pairs.json", "nobody"),
        ("--suite pairs.json --cluster local", "nobody"),
        ("--suite pairs.json --trust mine", "mine"),
    ],
)
def test_whom_to_trust_follows_from_whose_files_a_command_names(arguments, trust):
    assert parse("compare", arguments.split()).options.trust == trust


@pytest.mark.parametrize(
    "pair, complaint",
    [
        ({}, "needs KernelBench's numbers, and"),
        ({"level": 1, "problem_id": 1}, "a file holds one level, and these are levels 1, 2: name it eval_{level}.json"),
    ],
)
def test_eval_results_that_cannot_be_written_are_refused_before_anything_runs(tmp_path, tiny_problem, capsys, pair, complaint):
    pair = {"problem": str(tiny_problem), "solution": str(tiny_problem)} | pair
    (tmp_path / "pairs.json").write_text(json.dumps([pair, pair | ({"level": 2} if "level" in pair else {})]))
    status = main.compare(["--suite", str(tmp_path / "pairs.json"), "--eval-results", str(tmp_path / "eval.json")])
    assert status == 2 and complaint in capsys.readouterr().err
