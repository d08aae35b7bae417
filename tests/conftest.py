"""What the tests share: the two tiers, a tiny problem, and variants of it written on the spot."""

import os
import signal
import subprocess
import textwrap

import pytest

# The tests run side by side: a thread that waits actively would take a processor from another test. OpenMP reads this when
# torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# They make one another busy, too, so that waiting for quiet would be in vain.
os.environ.setdefault("PLAYGROUND_PATIENCE", "0")

from playground import catalog

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


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full tier as well; see tests/README.md")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: of the full tier, which --full adds")


# The files that take longest, which begin: else one worker would end with them, and the other with nothing.
SLOWEST_FIRST = [
    *("test_exhibits", "test_load_inline", "test_process", "test_foreign_programs", "test_shapes"),
    *("test_timing", "test_problems", "test_deceit", "test_api", "test_cuda_texts", "test_oracle"),
    # In the full tier:
    *(f"test_checked_{model.name}" for model in catalog.models()),
    *("test_first_use", "test_edges", "test_commands", "test_notebook", "test_following_docs", "test_sandbox"),
]


def pytest_collection_modifyitems(config, items):
    """The full tier runs where --full asks for it, or where the command line names the test itself (FILE::TEST)."""
    items.sort(key=lambda item: (*SLOWEST_FIRST, item.path.stem).index(item.path.stem))
    if config.option.full or any("::" in argument for argument in config.args):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


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
    """write_forward(name, "return ...", top="") -> catalog.Variant of the tiny problem with that body of forward."""

    def write(name, body, top=""):
        return write_variant(name, top + TINY_SOLUTION.format(forward=body.strip().replace("\n", "\n        ")))

    return write


@pytest.fixture
def no_sandbox(monkeypatch):
    """This process finds no bubblewrap: in a sandbox each process of a judged file would import PyTorch by itself."""
    from playground.worker import sandbox

    def version():
        raise sandbox.Missing("not in this test")

    monkeypatch.setattr(sandbox, "version", version)


@pytest.fixture
def compare(capsys, no_sandbox):
    """compare("--explain", ...) -> (exit status, stdout, stderr) of a command, in this process."""
    from playground.command import main

    def run(*arguments, command=main.compare):
        try:
            status = command(list(map(str, arguments)))
        except SystemExit as stop:  # argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own that holds 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
