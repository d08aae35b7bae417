"""python -m playground.nvidia.sanitizer as a user types it: exit status, and what it says where nothing can be examined."""

import contextlib

import pytest

from playground.nvidia.sanitizer import __main__ as command
from playground.nvidia.sanitizer.examination import Examination

BROKEN_PROBLEM = """
class Model:
    def __init__(self):
        raise ValueError("there are no weights")
def get_inputs():
    return []
def get_init_inputs():
    return []
"""


@pytest.fixture
def sanitize(tiny_problem, write_forward, monkeypatch, capsys):
    """sanitize(*arguments, model=...) -> (status, stdout, stderr), as on a machine that has all it needs."""
    variant = write_forward("plain", "return torch.tanh(self.linear(x))")
    monkeypatch.setattr(command, "missing", lambda: None)
    monkeypatch.setattr(command.requirements, "missing_for", lambda backend: None)

    def run(*arguments, model=tiny_problem):
        status = command.main(["--model", str(model), "--variant", str(variant.path), *arguments])
        return status, *capsys.readouterr()

    return run


def test_an_unknown_constant_is_one_line(sanitize):
    complaint = "--set: tiny has no constant called depth; it has: batch_size, features, outputs\n"
    assert sanitize("--set", "depth=3") == (2, "", complaint)


def test_an_original_that_fails_is_one_line(sanitize, tmp_path):
    """On a machine without a GPU it fails already where that is missing."""
    problem = tmp_path / "broken.py"
    problem.write_text(BROKEN_PROBLEM)
    status, out, err = sanitize(model=problem)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("the original does not run: ")


@pytest.mark.parametrize(
    "found, status",
    [
        (Examination(tools={"memcheck": {}}), 0),
        (Examination(notes=["no kernel of its own to look at"]), 0),
        (Examination(findings=["v1.py:3: out of bounds"]), 1),
        (Examination(problem="memcheck does not work on this machine: Aborted"), 1),
    ],
    ids=["nothing found", "no kernels", "a finding", "a problem"],
)
def test_the_exit_status(sanitize, monkeypatch, tmp_path, found, status):
    case = contextlib.nullcontext(({}, [], tmp_path))
    monkeypatch.setattr(command, "small_case", lambda *arguments: case)
    monkeypatch.setattr(command, "examine", lambda *arguments: found)
    told, out, err = sanitize()
    assert (told, err) == (status, "") and f"== plain: {found.outcome}, " in out
