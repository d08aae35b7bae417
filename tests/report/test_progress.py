import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time

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


def start(then, stderr, **options):
    environment = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR")}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", SCRIPT.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        stdin=subprocess.DEVNULL,
        env=environment | {"TERM": "xterm-256color", "COLUMNS": "80"},
        **options,
    )


def read_until_closed(descriptor, seen=b"", until=None, seconds=60):
    end = time.monotonic() + seconds
    while (until is None or until not in seen) and time.monotonic() < end:
        if not select.select([descriptor], [], [], 0.1)[0]:
            continue
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # the other side of the terminal has been closed
            break
        if not chunk:
            break
        seen += chunk
    return seen


def on_terminal(then, interrupt_after=None):
    """Runs SCRIPT with stderr on a pseudo-terminal and stdout in a pipe: what came out of both, and the exit status."""
    controller, terminal = pty.openpty()
    process = start(then, terminal)
    os.close(terminal)
    try:
        errors = b""
        if interrupt_after:
            errors = read_until_closed(controller, until=interrupt_after)
            process.send_signal(signal.SIGINT)
        errors = read_until_closed(controller, errors)
        output = process.stdout.read()
        return output, errors, process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(controller)


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


def test_many_threads():
    def calls(progress):
        def work(index):
            progress.started("build", "pool", f"v{index}")
            progress.finished("build", "pool", f"v{index}", "pass")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lines = plain(calls).splitlines()
    assert len(lines) == 32
    for index in range(16):
        assert sum(line.startswith(f"build pool/v{index}: pass, ") for line in lines) == 1


def test_on_a_terminal_it_is_live_and_stdout_is_untouched():
    output, errors, status = on_terminal(WARN)
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
def test_it_closes_cleanly(then, interrupt_after, output_ends):
    output, errors, status = on_terminal(then, interrupt_after)
    assert status != 0
    assert output.endswith(output_ends)
    assert errors.rindex(SHOW_CURSOR) > errors.rindex(HIDE_CURSOR)
    if "Runtime" in then:
        assert b"RuntimeError: broken" in errors


@pytest.mark.parametrize("has_stderr", [True, False])
def test_a_stderr_that_is_closed_does_not_break_stdout(has_stderr):
    """A pipe that nobody reads, or none from the beginning."""
    if has_stderr:
        process = start("progress.finished('build', 'pool', 'v2', 'pass')", subprocess.PIPE)
        process.stderr.close()
    else:
        process = start("pass", None, preexec_fn=lambda: os.close(2))
    with process.stdout:
        output = process.stdout.read()
    assert process.wait(60) == 0
    assert output == b"table begins\ntable goes on\ntable ends\n"


def test_variants_are_counted_and_what_failed_is_closed():
    def calls(progress):
        progress.expect(2)
        progress.started("check", "pool", "v1")
        progress.finished("check", "pool", "v1", "pass")
        progress.done("pool", "v1", "pass")
        progress.started("check", "pool", "v2")
        progress.done("pool", "v2", "error")  # its process died

    text = re.sub(r", \S+ s$", ", T s", plain(calls), flags=re.MULTILINE)
    assert text.splitlines() == [
        "check pool/v1 ...",
        "check pool/v1: pass, T s",
        "1 of 2 variants done, about 10 s left",
        "check pool/v2 ...",
        "check pool/v2: error, T s",
        "2 of 2 variants done",
    ]


def test_the_same_stage_of_the_same_variant_twice_at_once():
    """As in a sweep, whose points are built side by side."""

    def calls(progress):
        for _ in range(2):
            progress.started("build", "pool", "v1")
        for _ in range(2):
            progress.finished("build", "pool", "v1", "built")

    lines = plain(calls).splitlines()
    assert len(lines) == 4 and all(re.fullmatch(r"build pool/v1: built, \S+ s", line) for line in lines[2:])
