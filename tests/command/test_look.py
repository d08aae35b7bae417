"""compare.py --list, --explain VARIANT and --diff, as a user types them: exit status, stdout and stderr."""

import re

from playground import catalog
from playground.command import main


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
    assert "new      ceil_div" in out and "sum_sigmoids (kernel)" in " ".join(out.split())
    assert re.search(r"^\+__global__ void __launch_bounds__\(THREADS, \w+\)$", out, re.MULTILINE)
    assert "\x1b" not in out
    assert compare("--diff", "conv_pool_sigmoid_sum/v1_fused_tail", "v2_single_kernel") == (0, out, "")
