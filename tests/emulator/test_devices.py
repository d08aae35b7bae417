"""A file that names the device "cuda" finds the emulated GPU's memory there, which is the CPU's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from playground.emulator import devices
from playground.worker import WorkerFailure, WorkerProcess


class NamesCuda(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).cuda()
        self.scale = torch.full((2,), 2.0, device="cuda")

    def forward(self, x):
        assert x.is_cuda, "on a GPU only"
        return self.linear(x.cuda()) * self.scale.to(torch.device("cuda", 0)) + torch.ones(2, device=torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a real device here")
def test_without_it_there_is_no_such_device():
    with pytest.raises((AssertionError, RuntimeError)):
        NamesCuda()


def test_a_model_that_names_it_is_made_and_runs():
    model = devices.emulated(NamesCuda)()
    x = torch.rand(4, 3)
    result = devices.emulated(model)(x)
    assert result.device.type == "cpu" and {value.device.type for value in model.parameters()} == {"cpu"}
    torch.testing.assert_close(result, model.linear(x) * 2 + 1)


def test_nothing_of_it_stays_behind():
    before = torch.nn.Module.cuda
    with pytest.raises(ZeroDivisionError):
        devices.emulated(lambda: 1 / 0)()
    assert torch.nn.Module.cuda is before
    assert not torch.rand(2).is_cuda


AT_LOADING = """
import torch
import torch.nn as nn

TWO = torch.full((1,), 2.0, device="cuda")


class ModelNew(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.one = torch.ones(1).cuda()

    def forward(self, x):
        return x.cuda() * TWO + self.one
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a real device here")
def test_a_file_under_the_emulator_may_put_tensors_there_as_it_is_loaded(tiny_problem, write_variant):
    original = {"problem": str(tiny_problem), "settings": {}, "place": "emulator", "weights": None, "seed": 0}
    variant = write_variant("at_loading", AT_LOADING)
    with WorkerProcess() as worker:
        worker.ask("candidate.load", 120, **original, variant=str(variant.path))
        worker.ask("candidate.build", 120, seed=0)
    with WorkerProcess() as worker, pytest.raises(WorkerFailure, match="CUDA"):
        worker.ask("candidate.load", 120, **original | {"place": "cpu"}, variant=str(variant.path))


INSTALLED = """
import sys
from types import ModuleType
from torch.utils import cpp_extension
from playground import emulator

original = cpp_extension.load_inline
sys.modules["imported_it"] = other = ModuleType("imported_it")
other.load_inline = original
emulator.install()
assert cpp_extension.load_inline is other.load_inline is not original
cpp_extension.load_inline = lambda *given: None  # somebody wraps it
emulator.uninstall()
assert cpp_extension.load_inline is other.load_inline is original
"""


def test_uninstalling_puts_load_inline_back_wherever_it_was_imported():
    done = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
