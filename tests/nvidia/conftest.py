"""What stands in for NVIDIA's programs: there is no GPU here."""

import sys

import pytest


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, text) -> the file of a program of that name in Python, in a folder of its own that is all of PATH."""

    def write(name, text):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        return program

    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return write


@pytest.fixture
def target(tmp_path, monkeypatch):
    """target(text) has a program in Python stand in for the target; it finds the Paths `request` and `reply`."""

    def write(text):
        file = tmp_path / "target.py"
        file.write_text(f"import json, sys\nfrom pathlib import Path\nrequest, reply = map(Path, sys.argv[1:])\n{text}")
        monkeypatch.setattr("playground.nvidia.tool.TARGET", (sys.executable, str(file)))

    return write
