"""compare.py --lint: problem sets alone, without solutions."""

import re
import sys
import time
from pathlib import Path

import cuda_emulator
from playground import catalog, definitions, gpu_mode, suite
from playground.command import files
from playground.machine import environment, requirements
from playground.report import lint
from playground.report.layout import INDENT, make_console, print_folded
from playground.report.output import Output
from playground.report.text import one_line
from playground.untrusted import new_seed
from playground.worker import UNTIMED, WorkerFailure, WorkerProcess

ELEMENTS = {False: 1 << 20, True: 1 << 18}  # of a problem's inputs, with --quick
SECONDS = {False: 15.0, True: 0.0}  # for mutants


def run(given):
    """Examine the problems that --lint names: a line each, a table at the end, and JSON."""
    if missing := requirements.missing_for("cpu"):
        raise catalog.Impossible(str(missing))
    problems = named(given.lint)
    console, found = make_console(sys.stderr if given.json == files.STDOUT else None), []
    output = Output("--json", given.json) if given.json and given.json != files.STDOUT else None
    precision, seed = given.options.half, new_seed()
    about = {"environment": {"torch": cuda_emulator.torch_version().__version__, "cpu": environment.cpu_name()}}
    about |= {"precision": precision or "fp32", "seed": seed, "quick": given.quick}
    try:
        if output:
            output.claim()
        for name, path, tests in problems:
            found.append({"problem": name} | _examined(path, tests, precision, seed, given))
            print_folded(console, lint.line(found[-1]), hanging=INDENT)
    finally:
        if found:
            lint.show(found, console)
        if output and found:
            output.write(lambda path: lint.write(found, about, path))
        if output:
            output.release()
    if given.json == files.STDOUT:
        lint.write(found, about, Path("/dev/stdout"))


def named(path):
    """Return [(name, file or what is wrong with it, settings of its tests)] of the problems in a file or folder."""
    if path.is_file():
        return [(path.stem, catalog.find_model(str(path)).path, [{}])]
    if not path.is_dir():
        raise catalog.CatalogError(f"--lint {path}: there is no such file or folder")
    if gpu_mode.problems(path):
        return gpu_mode.alone(path)
    if definitions.problems(path):
        pairs = definitions.read(path, None).pairs
        return list({pair.problem_name: (pair.problem_name, pair.problem, [pair.settings]) for pair in pairs}.values())
    known = suite.problems_in(path)
    if not known:
        raise catalog.CatalogError(f"--lint {path}: no problem such as level1/3_Name.py is in there")
    return [(f"level{level}/{file.stem}", file, [{}]) for (level, _), file in sorted(known.items())]


def _examined(path, tests, precision, seed, given):
    began, nothing = time.monotonic(), {"settings": {}, "passes": [], "notes": [], "mutants": None}
    how = {"elements": ELEMENTS[given.quick], "seconds": SECONDS[given.quick], "with_mutants": not given.quick}
    if isinstance(path, catalog.CatalogError):
        return nothing | {"error": one_line(str(path)), "seconds": 0.0}
    how |= {"path": str(path), "precision": precision, "seed": seed}
    with WorkerProcess("referee", given.time_limit, UNTIMED) as worker:
        try:
            found = worker.ask("lint", settings=tests[0], **how) | {"error": None}
            mutants = found["mutants"] or {"passed": [], "untried": 0}
            for settings in tests[1:]:
                if only := found["passes"] + mutants["passed"]:
                    told = worker.ask("lint", settings=settings, only=only, **how)
                    found["passes"] = told["passes"]
                    if given.quick:
                        continue
                    mutants["passed"] = told["mutants"]["passed"]
                    mutants["untried"] += told["mutants"]["untried"]
        except WorkerFailure as failure:
            where = re.match(r".+:\d+(?=: in )", failure.details or "")
            found = nothing | {"error": one_line(f"{f'{where[0]}: ' if where else ''}{failure}")}
    return found | {"seconds": time.monotonic() - began}
