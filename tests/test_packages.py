"""A Python without the packages gets one line, not a traceback."""

import pytest
from typed import run

from playground import catalog, packages


@pytest.mark.parametrize("command", ["run_all.py", "compare.py"])
def test_a_python_without_packages(command):
    status, out, err = run("-S", command, "--help")
    assert (status, out) == (2, "") and err.startswith("no torch, numpy, rich, pygments, psutil, filelock in ")
    assert "-m pip install -r requirements.txt" in err and err.count("\n") == 1


def test_what_is_needed_is_what_is_required():
    required = (catalog.ROOT / "requirements.txt").read_text().lower()
    assert all(f"\n{name}==" in required for name in packages.NEEDED)
