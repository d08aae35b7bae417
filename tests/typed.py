"""A command as a user types it, in a process of its own."""

import contextlib
import os
import subprocess
import sys
import time

from playground.catalog import ROOT


def run(*arguments, **environment):
    """(exit status, stdout, stderr) of a program of the project's; None takes a variable away."""
    given = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=1800)
    return done.returncode, done.stdout, done.stderr


@contextlib.contextmanager
def running(*arguments, **environment):
    """A program of the project's under way, whose stdout and stderr are texts."""
    command, given = [sys.executable, *map(str, arguments)], {**os.environ, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=given, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition, seconds=120):
    """The first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return found
