"""Code in a process of its own, as libraries of one mode and a variant's operators need it."""

import subprocess
import sys

from playground import catalog

# For the beginning of such a code.
ASSERTIONS = """
import torch

def refused(what, call):
    try:
        call()
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        assert what in str(error), error
    else:
        raise AssertionError(f"nothing was raised: {what}")

def agree(got, expected, tolerance=2e-3):
    assert got.shape == expected.shape and (got - expected).abs().max() <= tolerance * expected.abs().max()
"""


def run(code, *arguments):
    """Runs the code to its end; `arguments` are its sys.argv[1:]. Whatever it raises fails the test."""
    last = "the last line was reached"
    command = [sys.executable, "-W", "ignore", "-c", f"{code}\nprint({last!r})", *map(str, arguments)]
    done = subprocess.run(command, cwd=catalog.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith(f"{last}\n"), done.stdout
