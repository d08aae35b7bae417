"""Where compute-sanitizer is, and one run of the target under it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from playground import untrusted
from playground.catalog import ROOT
from playground.judge.failure import remove
from playground.machine import requirements
from playground.worker.process import kill_family

NAME = "compute-sanitizer"
REMEDY = "it is part of the CUDA toolkit (https://developer.nvidia.com/cuda-downloads; conda install -c nvidia "
REMEDY += "cuda-sanitizer-api): put the folder that holds it on PATH, or name the toolkit in CUDA_HOME"
MADE = os.O_WRONLY | os.O_CREAT
MOST = 1 << 28  # bytes of a file that is read
TARGET = (sys.executable, "-m", "playground.nvidia.target")
_TAG = re.compile(r"^========= *")  # before what compute-sanitizer itself says
_NO_WORDS = re.compile(r"SUMMARY|COMPUTE-SANITIZER$")


def find():
    """Return the path of compute-sanitizer: on PATH or in the toolkit that CUDA_HOME names; None without one."""
    home = requirements.named_home()
    folders = [os.environ.get("PATH"), *(Path(home) / folder for folder in ("bin", NAME) if home)]
    return next((path for folder in folders if folder and (path := shutil.which(NAME, path=str(folder)))), None)


def missing():
    """Return a requirements.Missing where this machine lacks compute-sanitizer, else None."""
    return None if find() else requirements.Missing(f"no {NAME} on this machine", REMEDY)


class Run(contextlib.AbstractContextManager):
    """One run of the target, as a context manager: leaving it ends the target and all that it started.

    `request` is what target.py takes; its "limit", in seconds, holds for this run. `under` is the command line of the watching
    program, `environment` is added to this process's, and files in `folder` begin with `name`.
    """

    def __init__(self, name, request, folder, under=(), environment=None):
        self.name = name
        self.timed_out = False
        self._folder = untrusted.Folder(folder)
        request_file, self._reply, self._log, self._output = map(self._file, ("request", "reply", "log", "output"))
        for earlier in (request_file, self._reply, self._log, self._output):  # another variant's
            remove(earlier.held)
        with os.fdopen(untrusted.opened(request_file.held, MADE), "w") as file:
            json.dump(request, file)
        watched = [*under, "--log-file", str(self._log.path)] if under else []
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._deadline = time.monotonic() + request["limit"]
        with os.fdopen(untrusted.opened(self._output.held, MADE), "wb") as output:
            self._process = subprocess.Popen(
                [*watched, *TARGET, str(request_file.path), str(self._reply.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                start_new_session=True,
            )

    def __exit__(self, *exception):
        kill_family(self._process)

    def _file(self, what):
        return self._folder.file(f"{self.name}.{what}")

    def wait(self):
        """Wait until it has ended, or its time limit is over, which sets `timed_out`."""
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.timed_out = True

    def reply(self):
        """Return what the target wrote at its end; None where it did not come so far."""
        try:
            return json.loads(untrusted.read(self._reply.held, MOST))
        except (OSError, untrusted.Refused, ValueError, RecursionError):
            return None

    def log(self):
        """Return what the tool wrote, as far as it is a file that can be read."""
        return _text(self._log)

    def said(self):
        """Return the log, and what the target and the tool printed."""
        return f"{self.log()}\n{_text(self._output)}"

    def last_words(self):
        """Return one line on why it ended early."""
        lines = [line for line in self.said().splitlines() if line.strip("= ") and not _NO_WORDS.search(line)]
        telling = [line for line in lines if re.search(r"error|unable|not supported", line, re.I)]
        return _TAG.sub("", (telling or lines[-1:] or ["it printed nothing"])[0])[:300]


def _text(file):
    try:
        return untrusted.read(file.held, MOST).decode(errors="replace")
    except (OSError, untrusted.Refused):
        return ""
