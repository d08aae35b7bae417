"""--html as a user types it."""

import os
import subprocess
import sys

from reading import Page

from playground.catalog import ROOT


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)


def test_a_run_leaves_a_page(tiny_problem, write_forward, tmp_path):
    right = str(write_forward("page_right", "return torch.tanh(self.linear(x))").path)
    wrong = str(write_forward("page_wrong", "return no_such_name(self.linear(x))").path)
    file = tmp_path / "page.html"
    command = ["compare.py", "--model", str(tiny_problem), "--variant", right, wrong, "--device", "cpu", "--quick"]
    done = run(*command, "--html", str(file))
    assert done.returncode == 1, done.stderr
    made = Page(file.read_text(encoding="utf-8"))
    assert "page_right" in made.text and "page_wrong" in made.text
    assert "return torch.tanh(self.linear(x))" in made.text, "the source"
    assert "no_such_name" in made.text and "▲ line" in made.text, "what went wrong, at its line"
    assert any(tag == "svg" for tag, _ in made.tags)
    assert "under the ceilings measured in this run" in " ".join(made.text.split())


def test_where_it_cannot_be_written_nothing_is_run(tiny_problem, tmp_path):
    done = run("compare.py", "--model", str(tiny_problem), "--html", str(tmp_path / "nowhere" / "page.html"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr and "build" not in done.stderr
