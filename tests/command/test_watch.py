"""--watch as a user has it: a command that runs on while files are saved; and --failed, which goes by an earlier run."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typed import run

from playground import catalog
from playground.catalog import ROOT
from playground.driver import plan
from playground.driver.runner import Task

LIMIT = 120  # seconds for one judgement on a machine that does much else
END = "Ctrl-C ends"  # the last line of each screen


class Watched:
    """A command under way; `screen()` waits for its next screen and gives the text up to there."""

    def __init__(self, read, process):
        self._read = read
        self._process = process
        self._text = ""

    def screen(self):
        return self.until(END)

    def until(self, words):
        deadline = time.monotonic() + LIMIT
        while words not in self._text:
            assert time.monotonic() < deadline and self._process.poll() is None, self._text
            self._text += os.read(self._read, 1 << 16).decode()
        shown, self._text = self._text.split(words, 1)
        return shown

    def interrupt(self):
        """(exit status, what was said after the last screen)."""
        self._process.send_signal(signal.SIGINT)
        status = self._process.wait(LIMIT)
        with contextlib.suppress(OSError):  # of a terminal that nobody holds any more
            while more := os.read(self._read, 1 << 16).decode():
                self._text += more
        return status, self._text


@pytest.fixture
def watch():
    """watch(*options, terminal=False) -> Watched; outputs come together, from a pipe or a terminal."""
    with contextlib.ExitStack() as stack:

        def start(*options, terminal=False):
            read, write = pty.openpty() if terminal else os.pipe()
            command = [sys.executable, "compare.py", "--watch", "--check-only", *map(str, options)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=write, stderr=write, stdin=subprocess.DEVNULL)
            os.close(write)
            stack.callback(os.close, read)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return Watched(read, process)

        yield start


@pytest.mark.full
def test_each_save_is_judged_and_compared_with_the_one_before(tiny_problem, write_forward, watch):
    """A save that ends a judgement is the one that counts; the reference is computed once, as long as the problem stays."""
    variant = write_forward("edited", "return torch.tanh(self.linear(x))").path
    right = variant.read_text()
    watched = watch("--model", tiny_problem, "--variant", variant)
    shown = watched.screen()
    assert re.search(r"tiny/edited  pass  in ", shown) and "watching edited.py, tiny.py" in shown
    assert shown.count("reference tiny/float64: ready") == 1

    variant.write_text(right.replace("tanh", "sigmoid"))
    shown = watched.screen()
    assert re.search(r"tiny/edited  pass -> fail  in ", shown) and "reason" in shown
    assert re.search(r"error +\S+ -> \S+", shown)

    variant.write_text(right.replace("return torch.tanh", f"__import__('time').sleep({LIMIT}); return torch.relu"))
    watched.until("build tiny/edited")
    variant.write_text(right)
    shown = watched.screen()
    assert re.search(r"tiny/edited  fail -> pass  in ", shown), "the first save was judged to its end"
    assert "right on 'own' now" in shown and "reference" not in shown

    status, said = watched.interrupt()
    assert status == 130 and said.splitlines()[-1].startswith("interrupted")


@pytest.mark.full
def test_a_problem_that_is_saved_has_a_reference_of_its_own(tiny_problem, write_forward, watch, tmp_path):
    """On a terminal, which is cleared before each screen."""
    problem = tmp_path / "own.py"
    problem.write_text(tiny_problem.read_text())
    variant = write_forward("kept", "return torch.tanh(self.linear(x))").path
    watched = watch("--model", problem, "--variant", variant, terminal=True)
    assert "pass" in watched.screen()
    problem.write_text("def (")
    assert "invalid syntax" in watched.screen()
    problem.write_text(tiny_problem.read_text().replace("torch.tanh", "torch.relu"))
    shown = watched.screen()
    assert "\x1b[H\x1b[2J" in shown or "\x1b[2J\x1b[H" in shown
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", shown)
    assert re.search(r"own/kept  (pass|error) -> fail", plain) and "reference own/float64: ready" in plain
    assert watched.interrupt()[0] == 130


@pytest.mark.full
def test_what_failed_is_run_alone_and_untimed(tiny_problem, write_forward, tmp_path):
    """And its check begins with the input on which it failed."""
    variants = {"complete": "return torch.tanh(self.linear(x))", "clamps": "return torch.tanh(self.linear(x.clamp(-1, 1)))"}
    paths = {name: write_forward(name, body).path for name, body in variants.items()}
    file = tmp_path / "first.json"

    command = ["compare.py", "--model", tiny_problem, "--check-only", "--standard", "drop-in"]
    status, out, err = run(*command, "--variant", *paths.values(), "--json", file)
    results = {result["variant"]: result for result in json.loads(file.read_text())["results"]}
    assert status == 1 and results["complete"]["verdict"] == "pass", err
    assert results["clamps"]["verdict"] == "forward only" and all(each["time_ms"] is None for each in results.values())
    assert "baseline" not in err

    status, out, err = run(*command, "--variant", *paths.values(), "--failed", file)
    assert status == 1 and "clamps" in out and "complete" not in out
    assert "check tiny/clamps: as before, on normal inputs of another scale" in err
    status, out, err = run(*command, "--variant", paths["complete"], "--failed", file)
    assert (status, out) == (2, "") and "nothing that was asked for failed there" in err


def test_failed_goes_by_name_and_by_the_standard_asked_for():
    """Whatever the place; of a sweep only the points that failed. What the check begins with is a probe."""

    def row(variant, verdict, standard="drop-in", size=1, probes=()):
        check = {"probes": {name: {"complaint": complaint} for name, complaint in probes}}
        shape = {"settings": {"size": size}}
        return {"model": "m", "variant": variant, "verdict": verdict, "standard": standard, "shape": shape, "check": check}

    def task(variant, **point):
        return Task(catalog.Model("m", Path("m.py")), catalog.Variant(variant, Path("v.py"), "cpu"), "cpu", point=point)

    rows = [row("a", "pass"), row("b", "forward only"), row("c", "forward only", "forward"), row("d", "skipped")]
    rows += [row("e", "pass", size=1), row("e", "fail", size=2, probes=[("own", None), ("nan", "wrong")])]
    tasks = [task(name) for name in "abcd"] + [task("e", size=size) for size in (1, 2, 3)]
    chosen = plan.failed(tasks, rows)
    assert [(each.variant.name, each.point, each.first) for each in chosen] == [("b", {}, None), ("e", {"size": 2}, "nan")]
