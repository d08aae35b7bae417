"""A function in a process of its own, as libraries of one mode and a variant's operators need it."""

import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path

from playground import catalog

LAST = "the last line was reached\n"

# Forked from a process that has imported what takes two seconds, and done nothing else.
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["torch._dynamo"])


def run(function, *arguments):
    """Call a module's function there; whatever it raises fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        process = server.Process(target=call, args=(function, arguments, printed), daemon=True)
        process.start()
        process.join()
        told = printed.read_text(errors="replace")
    assert process.exitcode == 0, told[-3000:]
    assert told.endswith(LAST), told


def call(function, arguments, printed):
    """In the process: call the function, with all that it prints in the file `printed`."""
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(catalog.ROOT)
    warnings.simplefilter("ignore")
    function(*arguments)
    print(LAST, end="", flush=True)
