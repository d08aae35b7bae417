"""The two command lines, from arguments to exit status: 0 all that ran passed, 1 something failed, 2 it could not be run."""

import argparse
import signal
import sys
from pathlib import Path

from playground import catalog
from playground.machine import build_locks, environment, requirements
from playground.report import document, terminal
from playground.report.progress import Progress
from playground.runner import Options, Runner, Task

PASSED, FAILED, IMPOSSIBLE, INTERRUPTED = 0, 1, 2, 130
DEVICES = ("auto", "cuda", "cpu", "emulator")


class Impossible(Exception):
    """The machine cannot do what was asked; the text is the line that says what is missing and how to get it."""


def run_all(arguments=None):
    """Everything, one table. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="run_all.py", description="Judge and time every variant of every model.")
    parser.add_argument("--models", metavar="A,B", help="only these models, by name or path")
    parser.add_argument("--html", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    _add_common(parser)
    parser.add_argument("--quick", action="store_true", help="shorter timings, without torch.compile and training")
    given = parser.parse_args(arguments)

    def tasks():
        names = given.models.split(",") if given.models else [model.name for model in catalog.models()]
        chosen = [catalog.find_model(name) for name in names]
        return [task for model in chosen for task in plan(model, catalog.variants(model), given.device, {})]

    return _run(given, tasks, Options(given.quick, not given.quick, given.time_limit), terminal.summary)


def compare(arguments=None):
    """One model in depth. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="compare.py", description="Judge and time the variants of one model, in depth.")
    parser.add_argument(
        "--model", required=True, metavar="NAME_OR_PATH", help="a model's name, or a file in KernelBench's format"
    )
    parser.add_argument(
        "--variant", nargs="+", metavar="NAME_OR_PATH", help="only these variants, by name or path; default all"
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="change a constant of the model"
    )
    parser.add_argument("--grad", action="store_true", help="time training steps as well")
    _add_common(parser)
    given = parser.parse_args(arguments)

    def tasks():
        model = catalog.find_model(given.model)
        chosen = [catalog.find_variant(model, name) for name in given.variant] if given.variant else catalog.variants(model)
        if not chosen:
            raise catalog.CatalogError(f"{model.name} has no variants here; name a solution file with --variant FILE")
        return plan(model, chosen, given.device, catalog.parse_settings(given.set))

    return _run(given, tasks, Options(training=given.grad, time_limit=given.time_limit), terminal.details)


def _add_common(parser):
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to run; auto: the GPU where there is one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="SECONDS", help="for each step of a variant (default %(default)g)"
    )


def plan(model, variants, device, settings):
    """A task for each variant that `device` concerns. Settings given by the user win over the place's own."""
    tasks = []
    for variant in variants:
        place = _place(variant, device)
        if place:
            sizes = catalog.SETTINGS[place].get(model.name, {})
            tasks.append(Task(model, variant, place, {**sizes, **settings}))
    return sorted(tasks, key=lambda task: task.place != "cuda")


def _place(variant, device):
    """Where a variant runs; None when it is of no concern to the device."""
    if variant.backend == "cpu":
        return "cpu" if device in ("auto", "cpu") else None
    if device == "auto":
        return "emulator" if requirements.missing_for("cuda") else "cuda"
    return device if device in ("cuda", "emulator") else None


def _run(given, make_tasks, options, show):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    try:
        requirements.prepare_environment()
        _require_device(given.device)
        tasks = make_tasks()
        if not tasks:
            raise Impossible(f"none of these variants runs on --device {given.device}")
        _clear_locks()
        with Progress() as progress:
            runner = Runner(options, progress)
            results = runner.run(tasks)
    except (catalog.CatalogError, Impossible) as complaint:
        print(complaint, file=sys.stderr)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    report = {"schema": document.SCHEMA, "environment": environment.describe() | {"seed": runner.seed}, "results": results}
    show(report, terminal.make_console())
    if given.json:
        try:
            document.write(report, given.json)
        except OSError as complaint:
            print(f"--json {given.json}: {complaint.strerror}", file=sys.stderr)
            return IMPOSSIBLE
    return FAILED if any(result["verdict"] in ("fail", "error") for result in results) else PASSED


def _require_device(device):
    for backend in {"auto": ["cpu"], "cpu": ["cpu"], "cuda": ["cuda"], "emulator": ["cpu"]}[device]:
        missing = requirements.missing_for(backend)
        if missing:
            raise Impossible(str(missing))


def _clear_locks():
    """A build that was killed leaves a lock on which the next one would wait for ever."""
    locks = build_locks.clear_stale_locks()
    for path in locks.cleared:
        print(f"removed a stale build lock whose builder is dead: {path}", file=sys.stderr)
    for lock in locks.held:
        print(f"build lock left in place: {lock}", file=sys.stderr)
