"""The two commands, from arguments to exit status: 0 all that ran passed, 1 something failed, 2 it could not be run."""

import collections
import contextlib
import dataclasses
import functools
import operator
import sys
from pathlib import Path

from playground import catalog, definitions, gpu_mode, suite, sweep
from playground.catalog import Impossible
from playground.command import files, lint, look, needs, signals
from playground.command.options import ALL, MODEL, parse
from playground.driver import plan
from playground.driver.measurement import measure
from playground.driver.watch import Watch
from playground.judge.failure import is_of_machine
from playground.machine import requirements
from playground.report import against, page, suite_table, sweep_plot, sweep_table, terminal, watch_screen
from playground.report import suite as suite_report
from playground.report.figures import meets
from playground.report.layout import make_console
from playground.report.output import Output
from playground.report.progress import Progress

PASSED, FAILED, IMPOSSIBLE = 0, 1, 2  # 130 and the like: see signals.py


def run_all(arguments=None):
    """Judge everything, in one table. Returns the exit status."""
    return run(parse("run_all", arguments))


def compare(arguments=None):
    """Judge one model in depth or many pairs, or look at a variant. Returns the exit status."""
    return run(parse("compare", arguments))


def run(given):
    """Do what a command line asks for, as options.parse returns it. Returns the exit status."""
    if extra := EXTRAS.get(given.does):
        return _status(lambda: extra(given))
    of_folder = given.model if given.does == MODEL and Path(given.model).is_dir() else None
    if given.does == "--suite" or (of_folder and (gpu_mode.problems(of_folder) or definitions.problems(of_folder))):
        return _run_suite(given)
    if given.does == ALL:
        return _run(given, lambda _: _all_tasks(given), terminal.Summary)
    if given.does == "--watch":
        return _status(lambda: _watch(given))
    view = functools.partial(terminal.Details, checks=given.explain is not None, verbose=given.verbose)
    return _run(given, lambda _: _tasks_of_model(given), view)


# What to do instead of judging and timing.
EXTRAS = {
    "--lint": lint.run,
    "--list": lambda given: look.list_all(given.models.split(",") if given.models else [given.model] if given.model else None),
    "--new": lambda given: look.create(*given.new),
    "--copy": lambda given: look.copy(given.copy),
    "--diff": look.diff,
    "--explain": look.explain,
}


def _all_tasks(given):
    names = [model.name for model in catalog.models()] if given.models is None else given.models.split(",")
    chosen = list(dict.fromkeys(catalog.find_model(name) for name in names))
    points = {model: _points(given, model, {}) for model in chosen}
    planned = [plan.of_variants(model, catalog.variants(model), points[model], given.options) for model in chosen]
    return [task for of_model in planned for task in of_model]


def _tasks_of_model(given):
    model = catalog.find_model(given.model)
    named = dict.fromkeys(catalog.find_variant(model, name) for name in given.variant or ())
    chosen = list(named) or catalog.variants(model)
    if not chosen:
        raise catalog.CatalogError(f"{model.name} has no variants here; name a solution file with --variant FILE")
    return plan.of_variants(model, chosen, _points(given, model, catalog.parse_settings(given.set)), given.options)


def _run_suite(given):
    pairs = suite.Suite(())

    def tasks(ask):
        nonlocal pairs
        lacks_gpu = bool(ask(requirements.missing_for, "cuda")) if given.device == "auto" else None
        pairs = _read_pairs(given, has_gpu=given.device == "cuda" or lacks_gpu is False)
        if given.trace and not all(pair.workload for pair in pairs.pairs):
            raise Impossible("--trace writes FlashInfer-Bench's traces, for problems that are definitions with workloads")
        if given.eval_results:
            needs.require_eval_results(given.eval_results, pairs)
        return plan.of_suite(pairs, given.options, lacks_gpu)

    def add(report):
        return dataclasses.replace(report, suite=suite_report.summarise(report, pairs.unsolved))

    return _run(given, tasks, suite_table.Pairs, add)


def _read_pairs(given, has_gpu):
    """The suite.Suite that --suite names, or a folder of problems in another format as --model. Raises CatalogError."""
    folder = given.suite or Path(given.model)
    if not given.suite and given.sweep:
        raise catalog.CatalogError(f"--sweep does not go with {given.model}, whose files list the sizes")
    if folder.is_dir() and definitions.problems(folder):
        if given.set:
            raise catalog.CatalogError(f"--set does not go with {folder}, whose workloads are the sizes")
        return definitions.read(folder, given.solutions if given.suite else given.variant)
    if not given.suite:
        return gpu_mode.read(given.model, given.variant, has_gpu, catalog.parse_settings(given.set))
    if gpu_mode.problems(given.suite):
        return gpu_mode.read(given.suite, given.solutions, has_gpu)
    return suite.read(given.suite, given.solutions)


def _status(action, kept=lambda: None):
    """Return the exit status of what `action()` does; `kept()` is the file that --resume can go on from, if there is one."""
    signals.heed()
    try:
        return action() or PASSED
    except Impossible as complaint:
        print(complaint, file=sys.stderr)
        return IMPOSSIBLE
    except signals.Interrupted as interrupt:
        with contextlib.suppress(OSError):  # if anybody listens
            print(f"interrupted; --resume {kept()} goes on" if kept() else "interrupted", file=sys.stderr)
        return interrupt.status


def _watch(given):
    def tasks(_):
        return _tasks_of_model(given)

    chosen, *_ = _prepared(given, tasks)
    _require_originals(given, chosen)
    with Progress() as progress:
        screen = watch_screen.Screen(make_console())
        Watch(lambda: _chosen(given, tasks, operator.call), given.options, progress, screen).run()


def _points(given, model, settings):
    """The settings at which a model is measured: those given, at every point of the sweep. Raises CatalogError."""
    axes = sweep.parse(given.sweep)
    for option, names in (("--set", settings), ("--sweep", axes)):
        catalog.require_constants(model.path, f"{option}: {model.name}", names)
    if both := sorted(settings.keys() & axes.keys()):
        raise catalog.CatalogError(f"--set and --sweep both name {', '.join(both)}: leave out one of them")
    return [settings | point for point in sweep.grid(axes)]


def _run(given, make_tasks, view, add=lambda report: report):
    """`view(console, expected)` prints results as they come: see terminal.Summary. `add` completes the finished document."""
    outputs = {}

    def action():
        with contextlib.ExitStack() as claimed:
            files.claim(outputs, given, claimed)
            cluster = claimed.enter_context(needs.connected(given)) if given.cluster else None
            return _measured(given, make_tasks, view, add, outputs, cluster)

    kept = outputs.get
    return _status(action, lambda: kept("--json") and kept("--json").path.is_file() and kept("--json").path)


def _measured(given, make_tasks, view, add, outputs, cluster):
    tasks, axes, compared = _prepared(given, make_tasks, cluster)
    console = make_console(sys.stderr if given.json == files.STDOUT else None)
    expected = collections.Counter(task.model.name for task in tasks)
    shown = sweep_table.Sweep(console, axes) if axes else view(console, expected)

    def finish(report):
        return compared(add(report))

    def end(report):
        shown.end(report)
        if given.json == files.STDOUT:
            Output("--json", files.STDOUT).write(functools.partial(files.write_document, report))

    try:
        how = finish, shown.update, cluster, functools.partial(_require_originals, given, tasks)
        report = measure(tasks, given.options, outputs.get("--json"), given.resume, *how)
    except signals.Interrupted:
        if shown.latest:
            report = finish(shown.latest)
            with contextlib.suppress(OSError):  # the terminal may be gone
                end(report)
            files.write_files(outputs, tasks, report, axes)
        raise
    end(report)
    files.write_files(outputs, tasks, report, axes)
    lacks_room = any(is_of_machine(result.reason) for result in report.results)
    if lacks_room or any(output.is_elsewhere for output in outputs.values()):
        return IMPOSSIBLE
    if given.fail_on_regression and not against.is_comparable(report):
        print(f"--fail-on-regression: no time can be compared with {given.against}; the reasons are above", file=sys.stderr)
        return IMPOSSIBLE
    regressed = given.fail_on_regression and report.against.regressions
    unmet = [result for result in report.results if not meets(result) and result.verdict != "skipped"]
    # In a sweep a variant may refuse a shape.
    has_passed = report.environment.complete and all(axes and sweep.is_refusal(result) for result in unmet)
    return PASSED if has_passed and not regressed else FAILED


def _prepared(given, make_tasks, cluster=None):
    """(tasks, axes of the sweep, what adds a comparison). What would be in vain raises Impossible."""
    ask = cluster.ask if cluster else operator.call
    if missing := ask(requirements.missing_for, "cuda" if given.device == "cuda" else "cpu"):
        raise Impossible(str(missing))
    axes = sweep.parse(given.sweep)
    earlier = needs.earlier("--against", given.against)

    def compared(finished):
        return against.compare(finished, earlier, given.against.name) if earlier else finished

    if given.fail_on_regression and not earlier:
        raise Impossible("--fail-on-regression compares with an earlier run: name its JSON with --against FILE")
    needs.earlier("--resume", given.resume)
    if given.plot and not axes:
        raise Impossible("--plot draws a sweep: name what is to be swept with --sweep NAME=V1,V2,...")
    if missing := (given.plot and sweep_plot.missing(given.plot)) or (given.html and page.missing()):
        raise Impossible(missing)
    tasks = _chosen(given, make_tasks, ask)
    if not tasks:
        raise Impossible(f"none of these variants runs on --device {given.device}")
    if given.debug:
        needs.tell_how_to_step(tasks, given.device)
    if given.sandbox == "require":
        needs.require_sandbox(given, ask)
    if missing := ask(needs.missing_folder, {task.place for task in tasks if not task.settled}):
        raise Impossible(str(missing))
    if not cluster:  # whose workers do it themselves
        needs.clear_locks()
    return tasks, axes, compared


def _require_originals(given, tasks):
    if not given.suite:  # there a faulty problem costs its own pairs alone
        plan.require_originals(tasks, given.options)


def _chosen(given, make_tasks, ask):
    """The tasks, or those of them that failed in an earlier run. `ask` calls a function on the machine that judges."""
    tasks = make_tasks(ask)
    if given.sanitize:
        needs.require_sanitizer(tasks, given.device, ask)
    if not given.failed or not tasks:
        return tasks
    if failed := plan.failed(tasks, needs.earlier("--failed", given.failed).results):
        return failed
    raise Impossible(f"--failed {given.failed}: nothing that was asked for failed there")
