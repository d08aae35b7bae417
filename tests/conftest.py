"""What the tests share: their order, a tiny problem, and variants of it written on the spot."""

import os
import signal
import textwrap
from pathlib import Path

import pytest

# The tests run side by side: a thread that waits actively would take a processor from another test. OpenMP reads this when
# torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# They make one another busy, too, so that waiting for quiet would be in vain.
os.environ.setdefault("PLAYGROUND_PATIENCE", "0")

from playground import catalog

TESTS = Path(__file__).parent
# The files that take longest, longest first. Test processes that take one file after another begin with them: a long one that
# is begun last keeps one process busy when the others have nothing left.
LONGEST = (
    "emulator/test_recorded_counts.py",
    "emulator/test_checked_conv_pool_sigmoid_sum.py",
    "emulator/test_checked_alexnet_conv1.py",
    "emulator/test_checked_conv3d_div_max_gap_bias_sum.py",
    "kernels/test_notebook.py",
    "emulator/test_variants_fast.py",
    "emulator/test_strangers.py",
    "distributed/test_torchrun.py",
    "judge/test_wrong_kernels.py",
    "kernels/test_new_variant.py",
    "test_commands.py",
    "distributed/test_data_parallel.py",
)

TINY_PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x):
        return torch.tanh(self.linear(x))

batch_size = 5
features = 8
outputs = features // 2

def get_inputs():
    return [torch.rand(batch_size, features)]

def get_init_inputs():
    return [features, outputs]
"""

TINY_SOLUTION = """
import torch
import torch.nn as nn

class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x):
        {forward}
"""


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist's own order: the files with the most tests first


def pytest_collection_modifyitems(items):
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def interrupts_reach_what_tests_start():
    """pytest-xdist's workers ignore SIGINT, and a command that a test starts would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_problem(tmp_path_factory):
    """The path of a KernelBench-format problem that any machine runs in no time."""
    path = tmp_path_factory.mktemp("problem") / "tiny.py"
    path.write_text(TINY_PROBLEM)
    return path


@pytest.fixture(scope="session")
def write_variant(tmp_path_factory):
    """write_variant(name, text) -> catalog.Variant; the text is dedented."""
    folder = tmp_path_factory.mktemp("variants")

    def write(name, text):
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        return catalog.Variant(name, path, "cpu")

    return write


@pytest.fixture(scope="session")
def write_forward(write_variant):
    """write_forward(name, "return ...") -> catalog.Variant of the tiny problem with that body of forward."""

    def write(name, body):
        return write_variant(name, TINY_SOLUTION.format(forward=body.strip().replace("\n", "\n        ")))

    return write
