"""The files that options name: claimed before a run, written at its end."""

import sys
from pathlib import Path

from playground.report import ci, document, page, suite, sweep_plot, trace
from playground.report.output import Output

STDOUT = Path("-")


def claim(outputs, given, stack):
    """Put {option: Output} of files to write into `outputs`, ours until the stack is left. Raises Impossible."""
    named = {"--json": given.json, "--html": given.html, "--plot": given.plot}
    named |= {"--junit": given.junit, "--sarif": given.sarif, "--eval-results": given.eval_results, "--trace": given.trace}
    for option, path in named.items():
        if path and (option, path) != ("--json", STDOUT):
            outputs[option] = Output(option, path)
            stack.callback(outputs[option].release)
            outputs[option].claim()


def write_document(report, path):
    if path != STDOUT:
        return document.write(report, path)
    sys.stdout.write(document.as_text(report))
    return sys.stdout.flush()


def write_files(outputs, tasks, report, axes):
    """Write the files that options asked for besides the JSON document."""
    if plot := outputs.get("--plot"):
        plot.write(lambda path: sweep_plot.write(report, axes, path))
    if results := outputs.get("--eval-results"):
        results.write(lambda path: suite.write_eval_results(report, path))
    if traces := outputs.get("--trace"):
        traces.write(lambda path: trace.write(report, path))
    for option in {"--eval-results", "--trace"} & outputs.keys():
        if why := suite.left_out(report):
            print(f"{option} leaves out {why}", file=sys.stderr)
    paths = {(task.model.name, task.variant.name): task.variant.path for task in tasks}
    for option, write in {"--junit": ci.write_junit, "--sarif": ci.write_sarif}.items():
        if file := outputs.get(option):
            file.write(lambda path, write=write: write(ci.cases(report, paths, axes), path))
    if html := outputs.get("--html"):
        known = [page.Files(task.model.path, task.variant.path, (task.model.name, task.variant.name)) for task in tasks]
        html.write(lambda path: document.write_whole(path, page.render(report, known)))
