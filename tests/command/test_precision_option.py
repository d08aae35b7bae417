"""--precision strict: TF32 is forbidden in every process of a run."""

import json

import pytest

from playground.command import main

WANTS_STRICT = """
settings = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
if any(setting.fp32_precision != "ieee" for setting in settings):
    raise RuntimeError("TF32 is permitted")
return torch.tanh(self.linear(x))
"""


@pytest.mark.parametrize("precision", ["default", "strict"])
@pytest.mark.parametrize("command, model", [("run_all", "--models"), ("compare", "--model")])
def test_both_commands_take_it(command, model, precision, monkeypatch):
    monkeypatch.setattr(main, "_run", lambda given, tasks, show: given.options)
    assert getattr(main, command)([model, "alexnet_conv1", "--precision", precision]).strict is (precision == "strict")


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False])
def test_variants_see_it(tiny_problem, write_forward, compare, tmp_path, strict):
    """What every process does then is in tests/judge/test_declared_precision.py."""
    variant, file = write_forward("wants_strict", WANTS_STRICT).path, tmp_path / "out.json"
    options = ["--precision", "strict" if strict else "default", "--device", "emulator", "--check-only", "--json", file]
    status, _, err = compare("--model", tiny_problem, "--variant", variant, *options)
    (result,) = json.loads(file.read_text())["results"]
    expected = ("pass", None, "fp32") if strict else ("error", "RuntimeError: TF32 is permitted", result["precision"])
    assert (result["verdict"], result["reason"], result["precision"]) == expected and status == (not strict), err
