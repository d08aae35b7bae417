"""compare.py --explain VARIANT, --diff, --new and --against, as a user types them: exit status, stdout and stderr."""

import copy
import json
import math
import re

import pytest

from playground import catalog
from playground.command import main
from playground.driver import race, timing
from playground.report import document

RECORD = catalog.ROOT / "results" / "nvidia-h200.json"


def test_list(compare, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    status, out, err = compare("--list")
    assert (status, err) == (0, "")
    assert "\nalexnet_conv1: AlexNet's first convolution: 96 filters of 11x11 at stride 4.\n" in out
    assert re.search(r"^  v1_direct +direct convolution, one thread an output element\.$", out, re.MULTILINE)
    every = [each for model in catalog.models() for each in (model, *catalog.variants(model))]
    assert len(out.splitlines()) == len(every), "a line each"
    assert main.run_all(["--list", "--models", "alexnet_conv1"]) == 0
    assert capsys.readouterr().out == out[out.index("alexnet_conv1: ") :].partition("conv_pool")[0].partition("conv3d")[0]


def test_explain(compare, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = compare("--model", "alexnet_conv1", "--explain", "v1_direct")
    assert (status, err) == (0, "")
    assert out.startswith("alexnet_conv1, v1: direct convolution") and "\nMathematics\n" in out
    assert max(map(len, out.splitlines())) <= 80 and not re.search(r" $", out, re.MULTILINE)
    for names in (["alexnet_conv1/v1_direct"], ["v1_direct"], [str(catalog.KERNELS / "alexnet_conv1" / "v1_direct.py")]):
        assert compare("--explain", *names) == (0, out, "")


def test_explain_without_a_name_still_runs(compare):
    """It is then a flag of a run, which needs a model."""
    status, out, err = compare("--explain")
    assert (status, out) == (2, "") and "required: --model" in err
    status, out, err = compare("--model", "alexnet_conv1", "--variant", "v9", "--explain")
    assert (status, out) == (2, "") and "no variant of alexnet_conv1 is called 'v9'" in err


def test_diff(compare):
    status, out, err = compare("--model", "conv_pool_sigmoid_sum", "--diff", "v1_fused_tail", "v2_single_kernel")
    assert (status, err) == (0, "")
    assert "new      ceil_div" in out and "conv_pool_sum (kernel)" in out
    assert re.search(r"^\+__global__ void __launch_bounds__\(THREADS, \w+\)$", out, re.MULTILINE)
    assert "\x1b" not in out
    assert compare("--diff", "conv_pool_sigmoid_sum/v1_fused_tail", "v2_single_kernel") == (0, out, "")


def test_against_a_document_that_is_none(compare, tmp_path):
    content = json.loads(RECORD.read_text())
    del content["results"][0]["verdict"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    status, out, err = compare("--model", "alexnet_conv1", "--against", str(tmp_path / "old.json"))
    assert (status, out) == (2, "")
    assert re.fullmatch(r"--against \S+old\.json: results\[0\] .*: 'verdict' is missing\n", err)


@pytest.mark.full
def test_against_an_earlier_run(tiny_problem, write_forward, tmp_path, monkeypatch, capsys):
    """A real run, against itself with its old times made half as long. The machine counts as quiet, whatever else runs."""
    monkeypatch.setattr(race, "most_cores_for_others", lambda place: math.inf)
    monkeypatch.setattr(race, "SPREAD", math.inf)
    monkeypatch.setattr(race, "CONTROL_OFF", math.inf)
    monkeypatch.setattr(timing.statistics, "OPEN", math.inf)
    monkeypatch.setenv("COLUMNS", "100")
    variant = write_forward("honest", "return torch.tanh(self.linear(x))")

    def run(*arguments):
        assert main.compare(["--model", str(tiny_problem), "--variant", str(variant.path), "--quick", *arguments]) == 0
        return capsys.readouterr().out

    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert "Against" not in run("--json", str(old))
    content = document.read(old)
    (result,) = content["results"]
    for spread in (result["time_ms"], *result["baselines_ms"].values()):
        spread.update({key: value / 1000 for key, value in spread.items()})
    for ratio in result["speedup"].values():
        ratio.update({key: value * 1000 for key, value in ratio.items()})
    document.write(copy.deepcopy(content), old)
    out = run("--against", str(old), "--json", str(new))
    assert "honest" in out and "slower" in out and "though the file is the same as then" in " ".join(out.split())
    assert out.rstrip().endswith("Against old.json: 1 slower")
    (row,) = document.read(new)["results"][0]["against"]
    assert row["verdict"] == "slower" and row["same_source"] is True
    assert document.read(new)["against"]["counts"]["slower"] == 1
