"""Where the commands begin: packages are imported behind what must work without them or before they are there."""

import contextlib
import errno
import os
import sys

from playground import packages
from playground.command import signals

COMMANDS = {"run": "run_all", "compare": "compare"}  # of kernel-playground
HELP = """usage: kernel-playground [compare] --model PROBLEM --variant SOLUTION [options]
       kernel-playground run [options]

compare  judge and time solutions of one problem (compare.py)
run      judge and time every variant of every model (run_all.py)

Each has a --help of its own."""


def enter(command, arguments=None):
    """Run "run_all" or "compare" with the arguments (those of the command line). Returns the exit status."""
    signals.end_at_once()
    if "_ARGCOMPLETE" in os.environ:
        _complete(command)
    packages.require()
    from playground.command import options

    given = options.parse(command, arguments)
    if given.does in (options.ALL, *options.EVERYWHERE) and not given.cluster:
        from playground.worker import UNTIMED, prepare

        prepare(UNTIMED)  # PyTorch is imported there while this process looks at what was asked for
    from playground.command import main

    try:
        return main.run(given)
    except OSError as complaint:
        if complaint.errno != errno.ENAMETOOLONG:  # no file has the name that was given
            raise
        print(complaint, file=sys.stderr)
        return 2


def _complete(command):
    """Answer the shell that asks what may follow, where argcomplete is installed; that ends the program."""
    from playground.command import options

    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete({"run_all": options.run_all_parser, "compare": options.compare_parser}[command]())


def program():
    """Run `kernel-playground run` or `kernel-playground [compare]`, where pip has installed them. Returns the exit status."""
    name, *rest = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name.startswith("-"):
        return enter("compare", sys.argv[1:])
    if name not in COMMANDS:
        print("kernel-playground takes `run` or `compare`, then their options: kernel-playground --help", file=sys.stderr)
        return 2
    return enter(COMMANDS[name], rest)
