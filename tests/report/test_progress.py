import io
import os
import re
import shlex
import signal
import subprocess
import sys

import pexpect
import pytest
from rich.console import Console

from playground.report.progress import Progress

WARN = "print('a warning', file=sys.stderr)"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"

SCRIPT = """
import sys, time
from playground.report.progress import Progress
print("table begins", flush=True)
with Progress() as progress:
    progress.started("build", "pool", "v1")
    progress.started("build", "pool", "[red]v2[/nonsense]")
    print("table goes on", flush=True)
    time.sleep(0.3)
    progress.finished("build", "pool", "v1", "pass")
    {then}
print("table ends")
"""


def on_terminal(then, stdout, interrupt_after=None):
    """Runs SCRIPT with stderr on a terminal and stdout in a file: what came out of both, and the exit status."""
    program = shlex.join([sys.executable, "-u", "-c", SCRIPT.format(then=then)])
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80"}
    child = pexpect.spawn("/bin/sh", ["-c", f"exec {program} > {stdout}"], env=environment, timeout=60)
    errors = b""
    if interrupt_after:
        child.expect_exact(interrupt_after)
        errors = child.before + child.after
        child.kill(signal.SIGINT)
    errors += child.read()
    return stdout.read_bytes(), errors, child.wait()


def plain(progress_calls):
    file = io.StringIO()
    with Progress(Console(file=file, width=80)) as progress:
        progress_calls(progress)
    return file.getvalue()


def test_in_a_pipe_each_event_is_a_line():
    def calls(progress):
        progress.started("measure", "ceilings")
        progress.finished("measure", "ceilings")
        progress.started("build", "pool", "v1")
        progress.finished("build", "pool", "v1", "pass")
        progress.finished("check", "pool", "v1", "fail: wrong\nby [red]0.5[/nonsense]\x1b[2J")

    text = re.sub(r", \S+ s$", ", T s", plain(calls), flags=re.MULTILINE)
    assert text.splitlines() == [
        "measure ceilings ...",
        "measure ceilings: done, T s",
        "build pool/v1 ...",
        "build pool/v1: pass, T s",
        "check pool/v1: fail: wrong by [red]0.5[/nonsense] [2J",
    ]


def test_on_a_terminal_it_is_live_and_stdout_is_untouched(tmp_path):
    output, errors, status = on_terminal(WARN, tmp_path / "stdout")
    assert status == 0
    assert output == b"table begins\ntable goes on\ntable ends\n"
    assert HIDE_CURSOR in errors
    assert errors.rindex(SHOW_CURSOR) > errors.rindex(HIDE_CURSOR)
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", errors.decode())
    assert "build pool/[red]v2[/nonsense]" in text
    assert re.search(r"build pool/v1: pass, \S+ s", text)
    assert "a warning" in text


@pytest.mark.parametrize(
    ("then", "interrupt_after", "output_ends"),
    [
        # a signal that comes just before a sleep is heeded after it only, so: many short ones
        (f"{WARN}; [time.sleep(0.1) for _ in range(600)]", b"a warning", b"table goes on\n"),
        ("raise SystemExit(3)", None, b"table goes on\n"),
        ("raise RuntimeError('broken')", None, b"table goes on\n"),
    ],
)
def test_it_closes_cleanly(tmp_path, then, interrupt_after, output_ends):
    output, errors, status = on_terminal(then, tmp_path / "stdout", interrupt_after)
    assert status != 0
    assert output.endswith(output_ends)
    assert errors.rindex(SHOW_CURSOR) > errors.rindex(HIDE_CURSOR)
    if "Runtime" in then:
        assert b"RuntimeError: broken" in errors


@pytest.mark.parametrize("has_stderr", [True, False])
def test_a_stderr_that_is_closed_does_not_break_stdout(has_stderr):
    """A pipe that nobody reads, or none from the beginning."""
    then = "progress.finished('build', 'pool', 'v2', 'pass')" if has_stderr else "pass"
    streams = {"stderr": subprocess.PIPE} if has_stderr else {"preexec_fn": lambda: os.close(2)}
    command = [sys.executable, "-u", "-c", SCRIPT.format(then=then)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, **streams)
    if has_stderr:
        process.stderr.close()
    with process.stdout:
        output = process.stdout.read()
    assert process.wait(60) == 0
    assert output == b"table begins\ntable goes on\ntable ends\n"


def test_variants_are_counted_and_what_failed_is_closed():
    def calls(progress):
        progress.expect(3)
        progress.started("check", "pool", "v1")
        progress.finished("check", "pool", "v1", "pass")
        progress.done("pool", "v1", "pass")
        progress.started("check", "pool", "v2")
        progress.done("pool", "v2", "error")  # its process died
        progress.done("pool", "v3", "pass")

    text = re.sub(r", \S+ s$", ", T s", plain(calls), flags=re.MULTILINE)
    assert text.splitlines() == [
        "check pool/v1 ...",
        "check pool/v1: pass, T s",
        "1 of 3 variants done",
        "check pool/v2 ...",
        "check pool/v2: error, T s",
        "2 of 3 variants done, about 10 s left",
        "3 of 3 variants done",
    ]
