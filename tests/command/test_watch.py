"""--watch as a user has it: a command that runs on while files are saved; and --failed, which goes by an earlier run."""

import contextlib
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
from pexpect.popen_spawn import PopenSpawn
from typed import run

from playground import catalog
from playground.catalog import ROOT
from playground.driver import plan
from playground.driver.task import Task
from playground.record import UNCHECKED, Judgment, Probe, compose
from playground.subject import Shape

LIMIT = 120  # seconds for one judgement on a machine that does much else
END = "Ctrl-C ends"  # the last line of each screen


@pytest.fixture
def watch():
    """watch(*options, terminal=False) -> a command under way, as pexpect has it; outputs come together."""
    with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:

        def start(*options, terminal=False):
            command = [sys.executable, "compare.py", "--watch", "--check-only", *map(str, options)]
            how = {"cwd": ROOT, "timeout": LIMIT, "encoding": "utf-8"}
            child = pexpect.spawn(command[0], command[1:], **how) if terminal else PopenSpawn(command, **how)
            stack.callback(child.kill, signal.SIGKILL)
            return child

        yield start


def screen(watched, end=END):
    """The text of its next screen, or up to other words."""
    watched.expect_exact(end)
    return watched.before


def interrupt(watched):
    """(exit status, what was said after the last screen)."""
    watched.kill(signal.SIGINT)
    said = watched.read()
    return watched.wait(), said


@pytest.mark.full
def test_each_save_is_judged_and_compared_with_the_one_before(tiny_problem, write_forward, watch):
    """A save that ends a judgement is the one that counts; the reference is computed once, as long as the problem stays."""
    variant = write_forward("edited", "return torch.tanh(self.linear(x))").path
    right = variant.read_text()
    watched = watch("--model", tiny_problem, "--variant", variant)
    shown = screen(watched)
    assert re.search(r"tiny/edited  pass  in ", shown) and "watching edited.py, tiny.py" in shown
    assert shown.count("reference tiny/float64: ready") == 1

    variant.write_text(right.replace("tanh", "sigmoid"))
    shown = screen(watched)
    assert re.search(r"tiny/edited  pass -> fail  in ", shown) and "reason" in shown
    assert re.search(r"error +\S+ -> \S+", shown)

    variant.write_text(right.replace("return torch.tanh", f"__import__('time').sleep({LIMIT}); return torch.relu"))
    screen(watched, "build tiny/edited")
    variant.write_text(right)
    shown = screen(watched)
    assert re.search(r"tiny/edited  fail -> pass  in ", shown), "the first save was judged to its end"
    assert "right on 'own' now" in shown and "reference" not in shown

    status, said = interrupt(watched)
    assert status == 130 and said.splitlines()[-1].startswith("interrupted")


@pytest.mark.full
def test_a_problem_that_is_saved_has_a_reference_of_its_own(tiny_problem, write_forward, watch, tmp_path):
    """On a terminal, which is cleared before each screen."""
    problem = tmp_path / "own.py"
    problem.write_text(tiny_problem.read_text())
    variant = write_forward("kept", "return torch.tanh(self.linear(x))").path
    watched = watch("--model", problem, "--variant", variant, terminal=True)
    assert "pass" in screen(watched)
    problem.write_text("def (")
    assert "invalid syntax" in screen(watched)
    problem.write_text(tiny_problem.read_text().replace("torch.tanh", "torch.relu"))
    shown = screen(watched)
    assert "\x1b[H\x1b[2J" in shown or "\x1b[2J\x1b[H" in shown
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", shown)
    assert re.search(r"own/kept  (pass|error) -> fail", plain) and "reference own/float64: ready" in plain
    assert interrupt(watched)[0] == 130


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
        check = replace(UNCHECKED, probes={name: Probe(complaint=complaint) for name, complaint in probes})
        subject = replace(task(variant).subject, shape=Shape(settings={"size": size}), standard=standard)
        return compose(subject, Judgment(verdict=verdict, reason=None, check=check))

    def task(variant, **point):
        return Task(catalog.Model("m", Path("m.py")), catalog.Variant(variant, Path("v.py"), "cpu"), "cpu", point=point)

    rows = [row("a", "pass"), row("b", "forward only"), row("c", "forward only", "forward"), row("d", "skipped")]
    rows += [row("e", "pass", size=1), row("e", "fail", size=2, probes=[("own", None), ("nan", "wrong")])]
    tasks = [task(name) for name in "abcd"] + [task("e", size=size) for size in (1, 2, 3)]
    chosen = plan.failed(tasks, rows)
    assert [(each.variant.name, each.point, each.first) for each in chosen] == [("b", {}, None), ("e", {"size": 2}, "nan")]
