"""Judge and time a solution from Python: a notebook, or a loop that writes kernels.

    from playground import compare

    found = compare("problem.py", text_of_a_solution)
    print(found.verdict, found.reason, found.speedups)

It is compare.py for one pair: the same processes, checks and figures. A call may take a minute. Calls leave nothing behind, and
several threads may call at the same time: what is judged then shares the machine, and one is timed after the other.
"""

import functools
import inspect
import io
import tempfile
import threading
from dataclasses import dataclass, field, replace
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

    `verdict` is "pass" (a drop-in replacement), "forward only" (right on the problem's own inputs; the caveats say what is
    missing), "fail", "error" (it did not run to the end) or "skipped" (it does not run on that device). `is_right` says whether
    it meets the standard that was asked for.

    `reason` is one sentence, None with "pass"; `details` may hold a compiler's output or a traceback. `accuracy` is its class,
    such as "as PyTorch" or "float32"; None where it is not known. `ran_on` is "cuda", "cpu" or "emulator", which times nothing.

    `milliseconds` is the median of a forward pass; `baselines` are the medians of PyTorch's, and `speedups` those over each of
    them and over the "fastest" that is at least as precise. Where nothing is claimed `speedups` is empty, and `not_measured`
    says why. `proved` is what the outer clock says over eager PyTorch; None where it was not asked, or could not tell.

    `result` is all that is known, as in the JSON of compare.py.
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
    `settings` are other values for constants of the problem, such as {"batch_size": 4}. `device`, `standard`, `quick`,
    `check_only`, `training`, `precision`, `time_limit` (seconds for each step), `sandbox` and `trust` are those of compare.py;
    `quick` leaves out torch.compile, `check_only` times nothing. `accept` is the error, at most 0.01 of the output's standard
    deviation, with which a solution is timed all the same.

    What is wrong with the solution is in the Comparison. Processes that have imported PyTorch stay for the next call, and end
    with the caller's. Raises CatalogError for a path or a setting that stands for nothing and for a problem that does not run,
    CannotCompare where the machine lacks what `device` needs, TypeError and ValueError for other arguments.
    """
    options = Options(
        device=device,
        standard=standard,
        quick=quick,
        check_only=check_only,
        training=training,
        precision=precision,
        accept=accept,
        time_limit=time_limit,
        sandbox=sandbox,
        trust=trust,
    )
    _prepare(device)
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
    """A path or a name as text. What is the text of a file is written into `text_file`."""
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
    return Comparison(
        verdict=result.verdict,
        is_right=meets(result),
        reason=result.reason,
        details=result.details,
        caveats=tuple(result.caveats),
        accuracy=suite.accuracy_class(result),
        ran_on=result.ran_on,
        milliseconds=result.median_ms,
        baselines={name: spread.median for name, spread in result.baselines_ms.items()},
        speedups=suite.speedups(result),
        proved=result.proved,
        not_measured=result.why_not_measured,
        result=dump(result),
    )


def _prepare(device):
    """Raises CannotCompare where this machine lacks what the device needs."""
    with _once:
        missing = _missing("cuda" if device == "cuda" else "cpu")
    if missing:
        raise CannotCompare(str(missing))


@functools.cache
def _missing(backend):
    """Once a process: PATH and CUDA_HOME are set, and locks of builds that were killed are gone."""
    requirements.prepare_environment()
    build_locks.clear_stale_locks()
    return requirements.missing_for(backend)
