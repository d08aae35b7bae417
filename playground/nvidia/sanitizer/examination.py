"""The tools' verdict on one variant."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from playground.catalog import ROOT
from playground.judge import work
from playground.nvidia.sanitizer import control, reports
from playground.nvidia.sanitizer.command import ENVIRONMENT, TOOLS, command, find
from playground.worker.process import kill_family

TARGET = (sys.executable, "-m", "playground.nvidia.sanitizer.target")
NOTHING_TO_DO = "no kernel of its own to look at"


@dataclass
class Examination:
    """What the tools found: `findings`, one line each; `problem`, why their silence would prove nothing; `notes`.

    `passes` are those that were run ("forward", "backward"), `tools` says of each how many reports concern the variant's
    kernels and how many others it made, `kernels` are the names it went by, `settings` the model's constants that were changed.
    """

    findings: list = field(default_factory=list)
    problem: str | None = None
    notes: list = field(default_factory=list)
    passes: list = field(default_factory=list)
    tools: dict = field(default_factory=dict)
    kernels: list = field(default_factory=list)
    settings: dict = field(default_factory=dict)

    @property
    def outcome(self):
        """A few words."""
        if self.findings:
            return "fail"
        return f"error: {self.problem}" if self.problem else "nothing found" if self.tools else NOTHING_TO_DO

    def as_dict(self):
        return asdict(self)


def examine(load, probes, folder, limit):
    """An Examination of a variant. A tool, or the first run without one, may take `limit` seconds.

    `load` are the arguments of Candidate.load; `probes` the files of inputs to try in turn until the variant takes one;
    `folder` is for files. Raises KeyboardInterrupt and the like with nothing left running.
    """
    variant = Path(load["variant"])
    found = Examination(settings=load.get("settings", {}))
    for inputs in probes:  # without a tool: it builds, and tells what the variant takes
        request = {"load": load, "inputs": str(inputs), "tool": None, "limit": limit}
        with _Run("no tool", request, folder) as plain:
            plain.wait(time.monotonic() + limit)
        reply = plain.reply()
        if not (reply and reply["refused"]):
            break
    text = work.Text(variant)
    kernels = set(reply["kernels"] if reply else ()) | text.cuda_kernels | text.triton_kernels
    found.kernels = sorted(kernels)
    if reply and reply["refused"]:
        found.problem = f"it refuses all inputs: {reply['refused']}"
    elif not kernels:
        found.notes.append(NOTHING_TO_DO)
    else:
        _run_tools(found, request, kernels, folder, limit)
    return found


def _run_tools(found, request, kernels, folder, limit):
    """All tools side by side."""
    program, deadline = find(), time.monotonic() + limit
    watched = sorted(kernels) + [control.kernel_of(tool) for tool in TOOLS]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(_Run(tool, request | {"tool": tool}, folder, program, watched)) for tool in TOOLS]
        for run in runs:
            run.wait(deadline)
    file = request["load"]["variant"]
    for run in runs:
        reply = run.reply()
        found.passes = max(found.passes, reply["passes"] if reply else [], key=len)
        try:
            log = reports.read(run.tool, run.log())
        except reports.Unreadable as headline:
            found.problem = found.problem or f"{run.tool} prints a report that cannot be understood: {headline}"
            continue
        own = [finding for finding in log.findings if finding.concerns(kernels, file)]
        controls = [finding for finding in log.findings if finding.concerns({control.kernel_of(run.tool)}, "")]
        found.findings += [finding.describe(file) for finding in own]
        found.tools[run.tool] = {"findings": len(own), "of_other_kernels": len(log.findings) - len(own) - len(controls)}
        found.notes += [f"{run.tool}: {trouble}" for trouble in log.troubles]
        problem = None if own else _doubt(run, reply, log, controls)
        found.problem = found.problem or (problem and f"{run.tool} {problem}")


def _doubt(run, reply, log, controls):
    """Why it proves nothing that a tool found nothing; None where it proves something."""
    if run.timed_out:
        return "did not end within the time limit"
    if not log.is_complete or reply is None:
        return f"does not work on this machine: {run.last_words()}"
    if internal := next((trouble for trouble in log.troubles if trouble.startswith("Internal")), None):
        return f"did not look at everything: {internal}"
    if reply["error"] or reply["refused"]:
        return f"made the variant fail: {reply['error'] or reply['refused']}"
    if not controls:
        return "did not find the mistake that was made for it to find"
    return None


class _Run:
    """One run of the target, under a tool where `program` names compute-sanitizer. Leaving its context ends it."""

    def __init__(self, tool, request, folder, program=None, kernels=()):
        self.tool = tool
        self.timed_out = False
        files = (Path(folder) / f"{tool}.{what}" for what in ("request", "reply", "log", "output"))
        request_file, self._reply, self._log, self._output = files
        self._reply.unlink(missing_ok=True)  # of another variant
        self._log.unlink(missing_ok=True)
        request_file.write_text(json.dumps(request))
        line = [*TARGET, str(request_file), str(self._reply)]
        if program:
            line = command(program, tool, kernels, self._log, line)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        kill_family(self._process)

    def wait(self, deadline):
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.timed_out = True

    def reply(self):
        """What the target wrote at its end; None where it did not come so far."""
        try:
            return json.loads(self._reply.read_text())
        except (OSError, ValueError):
            return None

    def log(self):
        """The text of compute-sanitizer."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def last_words(self):
        """One line on why it ended early."""
        lines = [line.removeprefix(reports.PREFIX).strip() for line in self.log().splitlines()]
        lines += self._output.read_text(errors="replace").splitlines()
        lines = [line for line in lines if line.strip() and line != "COMPUTE-SANITIZER" and "SUMMARY" not in line]
        telling = [line for line in lines if re.search(r"error|unable|not supported", line, re.I)]
        return (telling or lines[-1:] or ["it printed nothing"])[0][:300]
