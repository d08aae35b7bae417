import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import SHELL, USERS_FOLDER

from playground.catalog import ROOT

LIMIT = 300  # seconds a block
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")


class Reader:
    """Follows pages, block by block, in a copy of the checkout: a command may write what the next one needs."""

    def __init__(self, folder):
        self.checkout = folder / "checkout"
        shutil.copytree(ROOT, self.checkout, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name in ("python", "python3"):  # those of the environment that the pages have the reader activate
            program = self._programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
            program.chmod(0o755)
        self.stderr = ""  # of the last block

    def follow(self, step):
        """Run a block, and compare what it prints with the blocks of its output."""
        command = self._command(step.block)
        path = os.pathsep.join([str(self._programs), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "COLUMNS": "400", "DEBUGINFOD_URLS": ""}  # no line is folded
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, cwd=self.checkout, env=environment, capture_output=True, text=True, timeout=LIMIT)
        self.stderr = done.stderr
        assert done.returncode == step.block.status, done.stdout + done.stderr
        for output in step.outputs:
            assert_printed(output.text.replace(USERS_FOLDER, str(self.checkout)), done.stdout)

    def _command(self, block):
        if block.language in SHELL:
            return ["bash", "-euo", "pipefail", "-c", block.text]
        if block.language == "python":
            program = self.checkout / "block.py"
            program.write_text(block.text)
            return [sys.executable, str(program)]
        return self._gdb(block.text)

    def _gdb(self, commands):
        """gdb on the program that the block before has named, as --debug does."""
        if not shutil.which("gdb"):
            pytest.skip("gdb is not installed")
        recipe = next(line for line in self.stderr.splitlines() if line.strip().startswith("gdb "))
        words = shlex.split(recipe)
        typed = ["set breakpoint pending on", *commands.splitlines(), "kill"]
        return ["gdb", "-q", "-batch", *(word for line in typed for word in ("-ex", line)), *words[words.index("--args") :]]


def assert_printed(expected, printed):
    """However it is folded; `...` stands for anything."""
    pieces = [re.escape(" ".join(piece.split())) for piece in expected.split("...")]
    assert re.search(".*".join(pieces), " ".join(printed.split())), printed


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")
    return Reader(Path(tmp_path_factory.mktemp("reader")))
