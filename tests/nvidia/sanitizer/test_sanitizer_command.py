"""The command line of each tool, and the program that is not there."""

import pytest

from playground.nvidia.sanitizer import command
from playground.nvidia.sanitizer.command import TOOLS


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A folder with something that is called compute-sanitizer; none is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "toolkit" / "bin" / "compute-sanitizer"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_it_is_found_on_path_and_in_the_toolkit(program, monkeypatch):
    assert command.find() is None
    monkeypatch.setenv("CUDA_HOME", str(program.parents[1]))
    assert command.find() == str(program) and command.missing() is None
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(program.parent))
    assert command.find() == str(program)


def test_what_is_missing_is_one_line_that_says_how_to_get_it(program):
    text = str(command.missing())
    assert text.startswith("no compute-sanitizer on this machine: ") and "\n" not in text
    assert "cuda-downloads" in text and "PATH" in text


@pytest.mark.parametrize("tool", TOOLS)
def test_the_command_line(tool):
    line = command.command("/bin/cs", tool, {"b", "a"}, "/tmp/log", ["python", "-m", "target", "--tool"])
    own, target = line[:-4], line[-4:]
    assert own[:3] == ["/bin/cs", "--tool", tool] and target == ["python", "-m", "target", "--tool"]
    assert own[own.index("--log-file") + 1] == "/tmp/log"
    filters = [own[i + 1] for i, each in enumerate(own) if each == "--kernel-name"]
    # initcheck has to see what PyTorch's kernels write.
    assert filters == ([] if tool == "initcheck" else ["kns=a", "kns=b"])
    assert own[own.index("--target-processes") + 1] == "application-only"
