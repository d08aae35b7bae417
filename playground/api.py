"""Judge and time a solution from Python: a notebook, or a loop that writes kernels.

    from playground import compare

    found = compare("problem.py", text_of_a_solution)
    print(found.verdict, found.reason, found.speedups)

It is compare.py for one pair. Several threads may call at the same time: one is timed after the other.
"""

import functools
import inspect
import io
import tempfile
import threading
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType

from rich.console import Console

from playground import catalog
from playground.driver import plan
from playground.driver.runner import Runner
from playground.driver.task import Options, Task
from playground.machine import build_locks, requirements
from playground.record import ERROR, NOBODY, Caveat, Ratio
from playground.report import suite
from playground.report.figures import meets
from playground.report.progress import Progress
from playground.serial import dump
from playground.worker.sandbox import Missing, version

_ceilings = {}  # of this machine: measured once for all calls
_once = threading.Lock()


class CannotCompare(RuntimeError):
    """The machine cannot do what was asked; the text says what is missing and how to get it."""


@dataclass(frozen=True)
class Comparison:
    """What came of a solution.

    `verdict` is "pass", "forward only" (the caveats say what is missing), "fail", "error" (it did not run to the end) or
    "skipped" (not on that device); `is_right`: it meets the standard asked for. `reason` is one sentence, None with "pass";
    `details` may hold a compiler's output or a traceback. `accuracy` is its class, such as "as PyTorch"; `ran_on` is "cuda",
    "cpu" or "emulator", which times nothing. `milliseconds` and `baselines` are medians of a forward pass; `speedups` those
    over each baseline and the "fastest" as precise: empty where `not_measured` says why. `proved` is what the outer clock says
    over eager PyTorch, or None. `result` is all, as in the JSON.
    """

    verdict: str
    is_right: bool
    reason: str | None
    details: str
    caveats: tuple[Caveat, ...]
    accuracy: str | None
    ran_on: str | None
    milliseconds: float | None
    baselines: dict[str, float]
    speedups: dict[str, Ratio]
    proved: Ratio | None
    not_measured: str | None
    result: dict = field(repr=False)


def compare(
    problem: str | Path | ModuleType,
    solution: str | Path | ModuleType,
    *,
    settings: dict | None = None,
    device: str = "auto",
    standard: str | None = None,
    quick: bool = True,
    check_only: bool = False,
    training: bool = False,
    precision: str = "default",
    accept: float | None = None,
    time_limit: float = 300.0,
    sandbox: str = "auto",
    trust: str = NOBODY,
) -> Comparison:
    """Judge a solution of a problem, both in KernelBench's format, and time it if it is right.

    Either is a path, the name of one of the project's models or variants, the text of a file, or a module that has a file.
    `settings` are other values for constants of the problem, such as {"batch_size": 4}; `accept` is the error, at most 0.01 of
    the output's standard deviation, that may be timed; `quick` leaves out torch.compile; the others are compare.py's options.
    Processes that have imported PyTorch stay for the next call. Raises CatalogError for what stands for nothing or does not
    run, CannotCompare where the machine lacks what `device` needs, TypeError and ValueError for other arguments.
    """
    named = locals()
    options = Options(**{each.name: named[each.name] for each in fields(Options) if each.name in named})
    with _once:
        missing = _missing("cuda" if device == "cuda" else "cpu")
    if missing:
        raise CannotCompare(str(missing))
    if sandbox == "require":
        try:
            version()
        except Missing as missing:
            raise CannotCompare(f"sandbox='require': {missing}") from None
    with tempfile.TemporaryDirectory(prefix="playground-") as folder:
        model = catalog.find_model(_file(problem, Path(folder) / "problem.py"))
        catalog.require_constants(model.path, f"settings: {model.name}", settings or {})
        given = _file(solution, Path(folder) / "solution.py")
        variant = catalog.find_variant(model, given)
        is_text = variant.path.parent == Path(folder).resolve()
        options = replace(options, builds=str(Path(folder) / "builds") if is_text else None)
        return _told(_run(model, variant, settings or {}, options))


def _run(model, variant, settings, options):
    tasks = plan.of_variants(model, [variant], [settings], options)
    if not tasks:
        skipped = ("skipped", f"it does not run on device {options.device!r}")
        standard = plan.standard_of(variant, options)
        return plan.settled(Task(model, variant, None, settings, standard=standard, settled=skipped))
    with Progress(Console(file=io.StringIO(), quiet=True)) as progress:
        runner = Runner(options, progress)
        runner.measured.ceilings = _ceilings
        runner.begin(tasks)
        (result,) = runner.run(tasks)
    if result.verdict == ERROR:
        plan.require_originals(tasks, options)  # it may be the problem's fault
    return result


def _file(given, text_file):
    if isinstance(given, ModuleType):
        try:
            return str(Path(inspect.getfile(given)).resolve())
        except TypeError:
            raise TypeError(f"module {given.__name__!r} has no file: give its path, or its text") from None
    if not isinstance(given, (str, Path)):
        raise TypeError(f"expected a path, a name, the text of a file or a module, got {type(given).__name__}")
    if isinstance(given, str) and "\n" in given:
        text_file.write_text(given, encoding="utf-8")
        return str(text_file)
    return str(given)


def _told(result):
    same = {name: getattr(result, name) for name in ("verdict", "reason", "details", "ran_on", "proved")}
    same |= {"milliseconds": result.median_ms, "not_measured": result.why_not_measured, "caveats": tuple(result.caveats)}
    baselines = {name: spread.median for name, spread in result.baselines_ms.items()}
    found = {"is_right": meets(result), "accuracy": suite.accuracy_class(result), "speedups": suite.speedups(result)}
    return Comparison(**same, **found, baselines=baselines, result=dump(result))


@functools.cache
def _missing(backend):
    """Once a process: PATH and CUDA_HOME are set, and locks of builds that were killed are gone."""
    requirements.prepare_environment()
    build_locks.clear_stale_locks()
    return requirements.missing_for(backend)
