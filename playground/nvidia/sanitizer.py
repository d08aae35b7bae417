"""compute-sanitizer on a variant: four tools, each on one training step of it at a reduced size."""

import contextlib
import tempfile
from pathlib import Path

from playground.judge.text import Text
from playground.nvidia import control, sanitizer_reports
from playground.nvidia.tool import Run, find
from playground.subject import NOTHING_TO_DO, Examination
from playground.worker.referee_client import RefereeClient

PADDING = 4096  # bytes behind each allocation in which every access is out of bounds: next to it may lie another one
UNFILTERED_LIMIT = 10_000  # reports; the kernels of others count among them

# Tool -> its own options. They and those of `command` are in NVIDIA's manual since its release 2023
# (https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer).
TOOLS = {
    "memcheck": ("--padding", str(PADDING), "--report-api-errors", "no"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": ("--print-limit", str(UNFILTERED_LIMIT)),
    "synccheck": (),
}
# initcheck must see every kernel: a tensor that a PyTorch kernel wrote would count as never written.
FILTERED = ("memcheck", "racecheck", "synccheck")
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or all tensors would lie in one large allocation, which has no bounds


@contextlib.contextmanager
def small_case(model, original, seed, limit):
    """Yield (arguments of Candidate.load but for the variant, files of inputs to try in turn, a folder).

    A model has the emulator's size, unless `original`, the arguments of referee.load, asks for another. Raises WorkerFailure
    where the original does not run.
    """
    original = original | {"settings": original["settings"] or model.settings("emulator")}
    with tempfile.TemporaryDirectory(prefix="playground-") as name:
        referee = RefereeClient(original, Path(name), seed, limit)
        try:
            referee.load()
            referee.prepare()
            names = [probe for probe in ("normal", "scaled") if not referee.prepared(probe)["unusable"]]  # the smaller first
            yield original | {"weights": referee.weights}, list(map(referee.inputs, names)), Path(name)
        finally:
            referee.close()


def examine(load, probes, folder, limit):
    """Return an Examination of a variant, within `limit` seconds a tool; `probes` are files of inputs to try in turn."""
    found = Examination(settings=load.get("settings", {}))
    for inputs in probes:  # without a tool: it builds, and tells what the variant takes
        request = {"load": load, "inputs": str(inputs), "tool": None, "limit": limit}
        with Run("no tool", request, folder, environment=ENVIRONMENT) as plain:
            plain.wait()
        reply = plain.reply()
        if not (reply and reply["refused"]):
            break
    text = Text(load["variant"])
    kernels = set(reply["kernels"] if reply else ()) | text.cuda_kernels | text.triton_kernels
    found.kernels = sorted(kernels)
    if reply and reply["refused"]:
        found.problem = f"it refuses all inputs: {reply['refused']}"
    elif not kernels:
        found.notes.append(NOTHING_TO_DO)
    else:
        _run_tools(found, request, kernels, folder)
    return found


def _run_tools(found, request, kernels, folder):
    program, file = find(), request["load"]["variant"]
    watched = kernels | {control.kernel_of(tool) for tool in TOOLS}
    with contextlib.ExitStack() as stack:
        given = [(tool, request | {"tool": tool}, folder, command(program, tool, watched), ENVIRONMENT) for tool in TOOLS]
        for run in (runs := [stack.enter_context(Run(*each)) for each in given]):
            run.wait()
    for run in runs:
        reply = run.reply()
        found.passes = max(found.passes, reply["passes"] if reply else [], key=len)
        try:
            log = sanitizer_reports.read(run.name, run.log())
        except sanitizer_reports.Unreadable as headline:
            found.problem = found.problem or f"{run.name} prints a report that cannot be understood: {headline}"
            continue
        own = [finding for finding in log.findings if finding.concerns(kernels, file)]
        controls = [finding for finding in log.findings if finding.concerns({control.kernel_of(run.name)}, "")]
        found.findings += [finding.describe(file) for finding in own]
        found.tools[run.name] = {"findings": len(own), "of_other_kernels": len(log.findings) - len(own) - len(controls)}
        found.notes += [f"{run.name}: {trouble}" for trouble in log.troubles]
        problem = None if own else _doubt(run, reply, log, controls)
        found.problem = found.problem or (problem and f"{run.name} {problem}")


def command(program, tool, kernels):
    """Return the command line of a tool, restricted to kernels whose mangled names hold one of `kernels` where it can."""
    # A kernel ends at its first mistake, but the program goes on, so that the next kernel is looked at too.
    options = ["--tool", tool, *TOOLS[tool], "--destroy-on-device-error", "kernel"]
    options += ["--target-processes", "application-only"]  # not compilers
    options += ["--launch-timeout", "120"]  # seconds until the target is there; importing torch takes its time
    options += ["--show-backtrace", "device", "--strip-paths", "no"]
    if tool in FILTERED:
        options += [each for name in sorted(kernels) for each in ("--kernel-name", f"kns={name}")]
    return [program, *options]


def _doubt(run, reply, log, controls):
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
