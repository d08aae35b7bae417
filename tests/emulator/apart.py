"""Code in a process of its own, as libraries of one mode and a variant's operators need it."""

import multiprocessing
import os
import sys
import tempfile
import warnings
from pathlib import Path

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
LAST = "the last line was reached\n"

# Forked from a process that has imported what takes two seconds, and done nothing else.
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["torch._dynamo"])


def run(code, *arguments):
    """Runs the code to its end; `arguments` are its sys.argv[1:]. Whatever it raises fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        process = server.Process(target=execute, args=(code, [*map(str, arguments)], printed), daemon=True)
        process.start()
        process.join()
        told = printed.read_text(errors="replace")
    assert process.exitcode == 0, told[-3000:]
    assert told.endswith(LAST), told


def execute(code, arguments, printed):
    """In the process: run the code, with all that it prints in the file `printed`."""
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(catalog.ROOT)
    sys.argv = ["-c", *arguments]
    warnings.simplefilter("ignore")
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    print(LAST, end="", flush=True)
