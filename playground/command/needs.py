"""What a run needs before it begins: what would be in vain is refused, with a line on what is missing and how to get it."""

import contextlib
import importlib.util
import sys

import cuda_emulator
from playground.catalog import Impossible
from playground.driver import runner
from playground.emulator import step
from playground.machine import build_locks, requirements
from playground.nvidia import tool
from playground.report import document
from playground.serial import DocumentError
from playground.worker import sandbox


def require_eval_results(file, pairs):
    """Raise Impossible for pairs without KernelBench's numbers, or one file for several levels."""
    unnumbered = [pair.solution for pair in pairs.pairs if pair.level is None or pair.problem_id is None]
    if unnumbered:
        how = "name it as in level_1_problem_3_sample_0_kernel.py, or write level and problem_id into the list"
        raise Impossible(f"--eval-results needs KernelBench's numbers, and {unnumbered[0]} has none: {how}")
    if len(pairs.levels) > 1 and "{level}" not in file.name:
        levels = ", ".join(map(str, pairs.levels))
        raise Impossible(f"--eval-results: a file holds one level, and these are levels {levels}: name it eval_{{level}}.json")


def require_sandbox(given, ask):
    if given.sanitize:
        raise Impossible("--sandbox require: compute-sanitizer runs files outside of the sandbox: leave out --sanitize")
    try:
        ask(sandbox.version)
    except sandbox.Missing as missing:
        raise Impossible(f"--sandbox require: {missing}") from None


def require_sanitizer(tasks, device, ask):
    if not any(task.place == "cuda" for task in tasks):
        missing = ask(requirements.missing_for, "cuda") if device == "auto" else None
        why = missing or f"with --device {device} none of these variants runs there"
        raise Impossible(f"--sanitize looks at kernels on a GPU, and {why} (the emulator finds such mistakes by itself)")
    if missing := ask(tool.missing):
        raise Impossible(str(missing))


def tell_how_to_step(tasks, device):
    emulated = [task for task in tasks if task.place == "emulator"]
    if not emulated:
        why = f"on --device {device} nothing does: add --device emulator"
        raise Impossible(f"--debug is for what runs under the emulator, and {why}")
    for task in emulated:
        print(step.recipe(task.model, task.variant, task.settings) + "\n", file=sys.stderr)


def missing_folder(places):
    """Return the first folder of builds or temporary files that cannot be used: every variant would be blamed for it."""
    emulator = ("the emulator's builds", cuda_emulator.CACHE_VARIABLE, cuda_emulator.cache_folder)
    folders = [emulator] if "emulator" in places else []
    if places - {"emulator"}:
        folders.append(("PyTorch's builds", "TORCH_EXTENSIONS_DIR", build_locks.extensions_root))
    return requirements.missing_folder(folders)


def clear_locks():
    """Remove what builds that were killed have left: a lock on which the next one would wait for ever, folders."""
    locks = runner.sweep()
    for path in locks.cleared:
        print(f"removed a stale build lock whose builder is dead: {path}", file=sys.stderr)
    for path, reason in locks.held.items():
        print(f"build lock left in place: {path}: {reason}", file=sys.stderr)


def earlier(option, file):
    """Return the document in the file that an option names; None where none is named."""
    try:
        return document.read(file) if file else None
    except DocumentError as complaint:
        raise Impossible(f"{option} {complaint}") from None


@contextlib.contextmanager
def connected(given):
    """Yield the Cluster that --cluster names. Raises Impossible where it cannot be had."""
    absent = [name for name in ("dask", "distributed") if importlib.util.find_spec(name) is None]
    if absent:
        raise Impossible(f"--cluster needs {' and '.join(absent)}: python -m pip install {' '.join(absent)}")
    from playground.driver import cluster  # its libraries are wanted here alone

    requirements.prepare_environment()
    with cluster.connected(given.cluster, side_by_side=not given.sanitize) as connection:
        yield connection
