"""Solutions in KernelBench's usual style run as they are under check mode; broken copies of them are named for what they are.

Each runs in a process of its own: a module of one name is loaded once in a process.
"""

import subprocess
import sys
from pathlib import Path

import pytest

STRANGERS = sorted((Path(__file__).parent / "strangers").glob("*.py"))
ROOT = Path(__file__).parents[2]

RUN = """
import importlib.util, sys
import torch
from playground import emulator

with emulator.install(mode="check", time_limit=120):
    spec = importlib.util.spec_from_file_location("stranger", sys.argv[1])
    stranger = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stranger)
    torch.manual_seed(0)
    inputs = stranger.get_inputs()
    with torch.no_grad():
        torch.testing.assert_close(stranger.ModelNew()(*inputs), stranger.reference(*inputs), rtol=1e-4, atol=1e-5)
    assert emulator.launches()
"""


def run(path):
    return subprocess.run([sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.full
@pytest.mark.parametrize("path", STRANGERS, ids=lambda path: path.stem)
def test_right(path):
    result = run(path)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("path", STRANGERS, ids=lambda path: path.stem)
def test_broken(path, tmp_path):
    text = path.read_text()
    names = {}
    exec(text[text.index("BROKEN = ") :], names)
    old, new, kind = names["BROKEN"]
    code = text[: text.index("BROKEN = ")]
    assert code.count(old) == 1
    broken = tmp_path / path.name
    broken.write_text(code.replace(old, new))
    result = run(broken)
    last = result.stderr.strip().splitlines()[-1]
    assert f"{broken}:" in last and kind in last, result.stderr[-3000:]
