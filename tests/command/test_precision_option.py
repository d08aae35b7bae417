"""--precision strict: TF32 is forbidden in every process of a run."""

import pytest

from playground import catalog
from playground.command import main
from playground.driver.runner import Options, Runner, Task
from playground.report.progress import Progress

WANTS_STRICT = """
settings = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
if any(setting.fp32_precision != "ieee" for setting in settings):
    raise RuntimeError("TF32 is permitted")
return torch.tanh(self.linear(x))
"""


@pytest.mark.parametrize(
    "arguments, strict", [([], False), (["--precision", "default"], False), (["--precision", "strict"], True)]
)
@pytest.mark.parametrize("command, model", [("run_all", "--models"), ("compare", "--model")])
def test_both_commands_take_it(command, model, arguments, strict, monkeypatch):
    monkeypatch.setattr(main, "_run", lambda given, tasks, show: main._options(given))
    assert getattr(main, command)([model, "alexnet_conv1", *arguments]).strict is strict


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False])
def test_variants_see_it(tiny_problem, write_forward, strict):
    """What every process does then is in tests/judge/test_declared_precision.py."""
    task = Task(catalog.find_model(tiny_problem), write_forward("wants_strict", WANTS_STRICT), "emulator")
    with Progress() as progress:
        (result,) = Runner(Options(strict=strict), progress).run([task])
    expected = ("pass", None, "fp32") if strict else ("error", "RuntimeError: TF32 is permitted", result["precision"])
    assert (result["verdict"], result["reason"], result["precision"]) == expected
