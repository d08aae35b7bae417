"""The two commands, from arguments to exit status: 0 all that ran passed, 1 something failed, 2 it could not be run."""

import collections
import contextlib
import functools
import importlib.util
import sys
from pathlib import Path

import cuda_emulator
from playground import catalog, suite, sweep
from playground.command import look, signals
from playground.command.options import HALF, beside, compare_parser, run_all_parser
from playground.driver import plan, runner
from playground.driver.measurement import CannotMeasure, here, measure
from playground.driver.runner import Options
from playground.driver.watch import Watch
from playground.emulator import step
from playground.machine import build_locks, requirements
from playground.nvidia import sanitizer
from playground.nvidia.profiler import ProfilerError
from playground.report import against, document, page, suite_table, sweep_plot, sweep_table, terminal, watch_screen
from playground.report import suite as suite_report
from playground.report.figures import meets
from playground.report.layout import make_console
from playground.report.output import CannotWrite, Output
from playground.report.progress import Progress
from playground.report.sweep_plot import CannotPlot
from playground.worker import sandbox
from playground.worker.failures import is_of_machine

PASSED, FAILED, IMPOSSIBLE = 0, 1, 2  # 130 and the like: see signals.py
STDOUT = Path("-")

# What each of those that judge and time nothing takes besides itself.
TAKES = {
    "--list": {"--list", "--model"},
    "--new": {"--new"},
    "--diff": {"--diff", "--model"},
    "--explain VARIANT": {"--explain", "--model"},
    "--profile": {"--profile", "--model", "--variant", "--set", "--device", "--time-limit"},
}


# What does not go with --suite, which has problems and solutions of its own.
NOT_WITH_SUITE = {
    "--model",
    "--variant",
    "--set",
    "--sweep",
    "--plot",
    "--debug",
    "--list",
    "--new",
    "--diff",
    "--explain",
    "--profile",
    "--watch",
}

ONLY_WITH_SUITE = {"--solutions", "--cluster", "--eval-results"}

# What does not go with --watch, which has no end at which files could be written.
NOT_WITH_WATCH = {"--json", "--html", "--resume", "--sweep", "--against", "--plot", "--debug", "--sanitize"}


class Impossible(Exception):
    """The machine cannot do what was asked; the text is the line that says what is missing and how to get it."""


def run_all(arguments=None):
    """Everything, one table. Returns the exit status."""
    given = run_all_parser().parse_args(arguments)
    if given.list:
        return _run_extra(lambda: look.list_all(given.models.split(",") if given.models else None))

    def tasks(_):
        names = [model.name for model in catalog.models()] if given.models is None else given.models.split(",")
        chosen = list(dict.fromkeys(catalog.find_model(name) for name in names))
        points = {model: _points(given, model, {}) for model in chosen}
        planned = [plan.of_variants(m, catalog.variants(m), given.device, points[m], given.standard) for m in chosen]
        return [task for of_model in planned for task in of_model]

    return _run(given, tasks, _options(given), terminal.Summary)


def compare(arguments=None):
    """One model in depth. Returns the exit status."""
    parser = compare_parser()
    given = parser.parse_args(arguments)
    if given.suite:
        return _compare_suite(parser, given)
    if lonely := [option for option in beside(parser, given, set()) if option in ONLY_WITH_SUITE]:
        parser.error(f"{', '.join(lonely)} goes with --suite")
    extra = _extra(parser, given)
    if extra:
        return _run_extra(extra)

    def tasks(ask):
        model = catalog.find_model(given.model)
        named = dict.fromkeys(catalog.find_variant(model, name) for name in given.variant or ())
        chosen = list(named) or catalog.variants(model)
        if not chosen:
            raise catalog.CatalogError(f"{model.name} has no variants here; name a solution file with --variant FILE")
        points = _points(given, model, catalog.parse_settings(given.set))
        planned = plan.of_variants(model, chosen, given.device, points, given.standard)
        if given.sanitize:
            _require_sanitizer(planned, given.device, ask)
        return planned

    if given.watch:
        if wrong := [option for option in beside(parser, given, set()) if option in NOT_WITH_WATCH]:
            parser.error(f"--watch shows each judgement on the screen and keeps none: leave out {', '.join(wrong)}")
        return _watch(given, tasks, _options(given))
    return _run(
        given,
        tasks,
        _options(given),
        functools.partial(terminal.Details, checks=given.explain is not None, verbose=given.verbose),
    )


def _options(given):
    return Options(
        quick=given.quick,
        training=given.training,
        sanitize=getattr(given, "sanitize", False),
        time_limit=given.time_limit,
        debug=given.debug,
        strict=given.precision == "strict",
        precision=given.precision if given.precision in HALF else None,
        max_autotune=given.max_autotune,
        ptxas=given.html is not None,
        accept=given.accept,
        check_only=given.check_only,
        sandbox=given.sandbox,
    )


def _compare_suite(parser, given):
    """Many pairs. Returns the exit status."""
    if wrong := [option for option in beside(parser, given, set()) if option in NOT_WITH_SUITE]:
        parser.error(f"--suite names its problems and solutions itself: leave out {', '.join(wrong)}")
    read = functools.cache(lambda: suite.read(given.suite, given.solutions))

    def tasks(ask):
        lacks_gpu = bool(ask(requirements.missing_for, "cuda")) if given.device == "auto" else None
        planned = plan.of_suite(read(), given.device, given.standard, lacks_gpu)
        if given.eval_results:
            _require_eval_results(given.eval_results, read())
        if given.sanitize:
            _require_sanitizer(planned, given.device, ask)
        return planned

    def add(report):
        return report | {"suite": suite_report.summarise(report, read().unsolved)}

    def view(console, expected):
        return suite_table.Pairs(console, sum(expected.values()))

    return _run(given, tasks, _options(given), view, add)


def _extra(parser, given):
    """What to do instead of judging and timing, as a function without arguments; None where that is what is asked for."""
    asked = {
        "--list": given.list,
        "--new": given.new,
        "--diff": given.diff,
        "--explain VARIANT": given.explain,
        "--profile": given.profile,
    }
    what = next((option for option, value in asked.items() if value), None)
    if what and (without := beside(parser, given, TAKES[what])):
        parser.error(f"{what} judges and times nothing: leave out {', '.join(without)}")
    if given.list:
        return lambda: look.list_all([given.model] if given.model else None)
    if given.new:
        return lambda: look.create(*given.new)
    if given.diff:
        return lambda: look.diff(*given.diff, given.model)
    if given.explain:
        return lambda: look.explain(given.explain, given.model)
    if not given.model:
        parser.error("the following arguments are required: --model")
    if given.profile:
        if given.device not in ("auto", "cuda"):
            parser.error(f"--profile measures on a GPU, not on --device {given.device}")
        return lambda: _profile(given)
    return None


def _profile(given):
    model = catalog.find_model(given.model)
    chosen = [catalog.find_variant(model, name) for name in given.variant] if given.variant else catalog.variants(model)
    settings = model.settings("cuda") | catalog.parse_settings(given.set)
    look.profile_variants(model, chosen, settings, given.time_limit)


def _run_extra(extra):
    signals.heed()
    try:
        extra()
    except catalog.CatalogError as complaint:
        print(complaint, file=sys.stderr)
        return IMPOSSIBLE
    except ProfilerError as complaint:
        print(complaint, file=sys.stderr)
        return IMPOSSIBLE if complaint.is_machine else FAILED
    except signals.Interrupted as interrupt:
        _say("interrupted")
        return interrupt.status
    return PASSED


def _watch(given, make_tasks, options):
    """Judge again and again. Returns the exit status."""
    signals.heed()
    try:
        _prepared(given, make_tasks, options)
        with Progress() as progress:
            Watch(lambda: _chosen(given, make_tasks, here), options, progress, watch_screen.Screen(make_console())).run()
    except (catalog.CatalogError, Impossible) as complaint:
        print(complaint, file=sys.stderr)
        return IMPOSSIBLE
    except signals.Interrupted as interrupt:
        _say("interrupted")
        return interrupt.status


def _points(given, model, settings):
    """The settings at which a model is measured: those given, at every point of the sweep. Raises CatalogError."""
    axes = sweep.parse(given.sweep)
    for option, names in (("--set", settings), ("--sweep", axes)):
        catalog.require_constants(model, option, names)
    if both := sorted(settings.keys() & axes.keys()):
        raise catalog.CatalogError(f"--set and --sweep both name {', '.join(both)}: leave out one of them")
    return [settings | point for point in sweep.grid(axes)]


def _run(given, make_tasks, options, view, add=lambda report: report):
    """`view(console, expected)` prints results as they come: see terminal.Summary. `add` completes the finished document."""
    signals.heed()
    outputs = {}
    try:
        with contextlib.ExitStack() as claimed:
            _claim(outputs, given, claimed)
            cluster = claimed.enter_context(_cluster(given)) if getattr(given, "cluster", None) else None
            return _measured(given, make_tasks, options, view, add, outputs, cluster)
    except (catalog.CatalogError, CannotMeasure, CannotPlot, CannotWrite, Impossible) as complaint:
        print(complaint, file=sys.stderr)
        return IMPOSSIBLE
    except signals.Interrupted as interrupt:
        kept = outputs.get("--json")
        _say(f"interrupted; --resume {kept.path} goes on" if kept and kept.path.is_file() else "interrupted")
        return interrupt.status


@contextlib.contextmanager
def _cluster(given):
    """Yield the Cluster that --cluster names. Raises Impossible where it cannot be had."""
    absent = [name for name in ("dask", "distributed") if importlib.util.find_spec(name) is None]
    if absent:
        raise Impossible(f"--cluster needs {' and '.join(absent)}: python -m pip install -r requirements-cluster.txt")
    from playground.driver import cluster  # its libraries are wanted here alone

    requirements.prepare_environment()
    try:
        with cluster.connected(given.cluster, side_by_side=not given.sanitize) as connection:
            yield connection
    except cluster.CannotReach as complaint:
        raise Impossible(str(complaint)) from None


def _measured(given, make_tasks, options, view, add, outputs, cluster):
    """Measure, show, and write the `outputs`. Returns the exit status."""
    tasks, axes, compared = _prepared(given, make_tasks, options, cluster)
    console = make_console(sys.stderr if given.json == STDOUT else None)
    expected = collections.Counter(task.model.name for task in tasks)
    shown = _Latest(_Sweep(axes, console) if axes else view(console, expected))

    def finish(report):
        return compared(add(report))

    try:
        report = measure(tasks, options, outputs.get("--json"), given.resume, finish, shown.update, cluster)
    except signals.Interrupted:
        if shown.report:
            report = finish(shown.report)
            with contextlib.suppress(OSError):  # the terminal may be gone
                _show_end(given, shown, report)
            _write_files(outputs, tasks, report, axes)
        raise
    _show_end(given, shown, report)
    _write_files(outputs, tasks, report, axes)
    if any(output.is_elsewhere for output in outputs.values()):
        return IMPOSSIBLE
    if any(is_of_machine(result["reason"]) for result in report["results"]):
        return IMPOSSIBLE
    return PASSED if _passed(report, axes) else FAILED


def _say(line):
    """To stderr, if anybody listens."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def _claim(outputs, given, stack):
    """Put {option: Output} of the files to write into `outputs`; until the stack is left no other run has them.

    Raises CannotWrite.
    """
    named = {"--json": given.json, "--html": given.html, "--plot": given.plot}
    named["--eval-results"] = getattr(given, "eval_results", None)
    for option, path in named.items():
        if path and (option, path) != ("--json", STDOUT):
            outputs[option] = Output(option, path)
            stack.callback(outputs[option].release)
            outputs[option].claim()


def _show_end(given, shown, report):
    shown.end(report)
    if given.json == STDOUT:
        Output("--json", STDOUT).write(functools.partial(_write_document, report))


def _write_document(report, path):
    if path != STDOUT:
        return document.write(report, path)
    sys.stdout.write(document.as_text(report))
    return sys.stdout.flush()


class _Latest:
    """A view, and the document that it was shown last: what there is when the run is interrupted."""

    def __init__(self, view):
        self._view = view
        self.report = None
        self.end = view.end

    def update(self, report):
        self.report = report
        return self._view.update(report)


class _Sweep:
    """Shows a sweep, which has no tables before its end."""

    def __init__(self, axes, console):
        self._axes = axes
        self._console = console

    def update(self, document):
        pass

    def end(self, document):
        sweep_table.show(document, self._axes, self._console)
        against.show(document, self._console)


def _prepared(given, make_tasks, options, cluster=None):
    """(tasks, axes of the sweep, what adds how a document compares with an earlier one).

    What would be in vain is not begun: raises Impossible, CatalogError and CannotPlot.
    """
    ask = cluster.ask if cluster else here
    requirements.prepare_environment()
    _require_device(given.device, ask)
    axes = sweep.parse(given.sweep)
    compared = _comparing_with(_earlier("--against", given.against), given.against)
    _earlier("--resume", given.resume)
    if given.plot:
        _require_plot(given, axes)
    if given.html and (missing := page.missing()):
        raise Impossible(missing)
    tasks = _chosen(given, make_tasks, ask)
    if not tasks:
        raise Impossible(f"none of these variants runs on --device {given.device}")
    if given.debug:
        _tell_how_to_step(tasks, given.device)
    if given.sandbox == "require":
        _require_sandbox(given, ask)
    if missing := ask(_missing_folder, {task.place for task in tasks if not task.settled}):
        raise Impossible(str(missing))
    if not cluster:  # whose workers do it themselves
        _clear_locks()
    if not getattr(given, "suite", None):  # there a faulty problem costs its own pairs alone
        plan.require_originals(tasks, options)
    return tasks, axes, compared


def _chosen(given, make_tasks, ask):
    """The tasks, or those of them that failed in an earlier run. `ask` calls a function on the machine that judges."""
    tasks = make_tasks(ask)
    if not given.failed or not tasks:
        return tasks
    if failed := plan.failed(tasks, _earlier("--failed", given.failed)["results"]):
        return failed
    raise Impossible(f"--failed {given.failed}: nothing that was asked for failed there")


def _write_files(outputs, tasks, report, axes):
    """What was asked for besides."""
    if plot := outputs.get("--plot"):
        plot.write(lambda path: sweep_plot.write(report, axes, path))
    if results := outputs.get("--eval-results"):
        results.write(lambda path: suite_report.write_eval_results(report, path))
    if html := outputs.get("--html"):
        known = [page.Files(task.model.path, task.variant.path, (task.model.name, task.variant.name)) for task in tasks]
        html.write(lambda path: document.write_whole(path, page.render(report, known)))


def _earlier(option, file):
    """The document in the file that an option names; None where none is named."""
    try:
        return document.read(file) if file else None
    except document.DocumentError as complaint:
        raise Impossible(f"{option} {complaint}") from None


def _comparing_with(earlier, file):
    """The function that adds to a document how it compares with an earlier one, where there is one."""
    return lambda finished: against.compare(finished, earlier, file.name) if earlier else finished


def _passed(report, axes):
    return report["environment"]["complete"] and not any(_is_wrong(result, axes) for result in report["results"])


def _is_wrong(result, axes):
    """In a sweep a variant may refuse a shape."""
    return not meets(result) and result["verdict"] != "skipped" and not (axes and sweep.is_refusal(result))


def _require_plot(given, axes):
    if not axes:
        raise Impossible("--plot draws a sweep: name what is to be swept with --sweep NAME=V1,V2,...")
    sweep_plot.require(given.plot)


def _require_eval_results(file, pairs):
    """KernelBench's format has its numbers for keys, and one file a level."""
    unnumbered = [pair.solution for pair in pairs.pairs if pair.level is None or pair.problem_id is None]
    if unnumbered:
        raise Impossible(
            f"--eval-results needs KernelBench's numbers, and {unnumbered[0]} has none: name it as in "
            "level_1_problem_3_sample_0_kernel.py, or write level and problem_id into the list"
        )
    if len(pairs.levels) > 1 and "{level}" not in file.name:
        levels = ", ".join(map(str, pairs.levels))
        raise Impossible(f"--eval-results: a file holds one level, and these are levels {levels}: name it eval_{{level}}.json")


def _require_device(device, ask):
    if missing := ask(requirements.missing_for, "cuda" if device == "cuda" else "cpu"):
        raise Impossible(str(missing))


def _require_sandbox(given, ask):
    if getattr(given, "sanitize", False):
        raise Impossible("--sandbox require: compute-sanitizer runs files outside of the sandbox: leave out --sanitize")
    try:
        ask(sandbox.version)
    except sandbox.Missing as missing:
        raise Impossible(f"--sandbox require: {missing}") from None


def _require_sanitizer(tasks, device, ask):
    if not any(task.place == "cuda" for task in tasks):
        missing = ask(requirements.missing_for, "cuda") if device == "auto" else None
        why = missing or f"with --device {device} none of these variants runs there"
        raise Impossible(f"--sanitize looks at kernels on a GPU, and {why} (the emulator finds such mistakes by itself)")
    if missing := ask(sanitizer.missing):
        raise Impossible(str(missing))


def _tell_how_to_step(tasks, device):
    emulated = [task for task in tasks if task.place == "emulator"]
    if not emulated:
        raise Impossible(
            f"--debug is for what runs under the emulator, and on --device {device} nothing does: add --device emulator"
        )
    for task in emulated:
        print(step.recipe(task.model, task.variant, task.settings) + "\n", file=sys.stderr)


def _missing_folder(places):
    """Of those that builds and temporary files go to: all of them would fail, each with a verdict that blames a variant."""
    emulator = ("the emulator's builds", cuda_emulator.CACHE_VARIABLE, cuda_emulator.cache_folder)
    folders = [emulator] if "emulator" in places else []
    if places - {"emulator"}:
        folders.append(("PyTorch's builds", "TORCH_EXTENSIONS_DIR", build_locks.extensions_root))
    return requirements.missing_folder(folders)


def _clear_locks():
    """A build that was killed leaves a lock on which the next one would wait for ever, or a folder that nobody needs."""
    cuda_emulator.sweep()
    runner.sweep()
    locks = build_locks.clear_stale_locks()
    for path in locks.cleared:
        print(f"removed a stale build lock whose builder is dead: {path}", file=sys.stderr)
    for lock in locks.held:
        print(f"build lock left in place: {lock}", file=sys.stderr)
