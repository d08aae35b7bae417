"""Where the commands begin: PyTorch is imported behind what must work without it or before it is there."""

import contextlib
import os
import sys

from playground import packages
from playground.command import signals

COMMANDS = {"run": "run_all", "compare": "compare"}  # of kernel-playground


def enter(command, arguments=None):
    """Run "run_all" or "compare" with the arguments (those of the command line). Returns the exit status."""
    signals.end_at_once()
    if "_ARGCOMPLETE" in os.environ:
        _complete(command)
    packages.require()
    from playground.command import main

    return getattr(main, command)(arguments)


def _complete(command):
    """Answer the shell that asks what may follow, where argcomplete is installed; that ends the program."""
    from playground.command import options

    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete({"run_all": options.run_all_parser, "compare": options.compare_parser}[command]())


def program():
    """Run `kernel-playground run` or `kernel-playground compare`, where pip has installed them. Returns the exit status."""
    name, *rest = sys.argv[1:] or [None]
    if name not in COMMANDS:
        print("kernel-playground takes `run` (run_all.py) or `compare` (compare.py), then their options", file=sys.stderr)
        return 2
    return enter(COMMANDS[name], rest)
