"""A Python without the packages gets one line, not a traceback."""

import subprocess
import sys

import pytest

from playground import catalog, packages


@pytest.mark.parametrize("command", ["run_all.py", "compare.py"])
def test_a_python_without_packages(command):
    done = subprocess.run([sys.executable, "-S", command, "--help"], cwd=catalog.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("no torch, numpy, rich, pygments, psutil, filelock in ")
    assert "-m pip install -r requirements.txt" in done.stderr and done.stderr.count("\n") == 1


def test_what_is_needed_is_what_is_required():
    required = (catalog.ROOT / "requirements.txt").read_text().lower()
    assert all(f"\n{name}==" in required for name in packages.NEEDED)
