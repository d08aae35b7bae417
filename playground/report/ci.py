"""A document as files for continuous integration and editors: a case for each result, and what is wrong at its line."""

from pathlib import Path

from cuda_emulator import ci_files
from playground import sweep
from playground.record import ERROR, SKIPPED
from playground.report import document, figures
from playground.report.page.variant import findings_at_lines
from playground.report.text import one_line

TOOL = "kernel-playground"


def cases(report, files, axes=None):
    """Return a ci_files.Case for each result; `files` are {(model, variant): path}; with `axes` refusals are skipped."""
    return [_case(result, files.get((result.model, result.variant)), axes) for result in report.results]


def _case(result, file, axes):
    if figures.meets(result):
        outcome = ci_files.PASSED
    elif result.verdict == SKIPPED or (axes and sweep.is_refusal(result)):
        outcome = ci_files.SKIPPED
    else:
        outcome = ci_files.ERROR if result.verdict == ERROR else ci_files.FAILURE
    size = figures.size_note(result)
    return ci_files.Case(
        name=f"{result.variant}: {size}" if size else result.variant,
        group=result.model,
        outcome=outcome,
        message="; ".join(map(one_line, figures.why_not_pass(result))) if outcome != ci_files.PASSED else "",
        details=result.details,
        seconds=sum(result.phases.values()),
        notices=tuple(_notices(result, file, outcome)),
    )


def _notices(result, file, outcome):
    fails = outcome in (ci_files.ERROR, ci_files.FAILURE)
    level = "error" if fails else "note"
    if fails and result.verdict != "forward only":
        places = findings_at_lines(result, file) if file else []
        if not any(text == result.reason for _, text in places):
            places = [(None, result.reason), *places]
        yield from (ci_files.Notice(result.verdict, one_line(text), level, file, line) for line, text in places)
    for caveat in result.caveats:
        grave = ("error" if fails else "warning") if caveat.costs else "note"
        yield ci_files.Notice(caveat.tag, one_line(caveat.text), grave, file, caveat.line)


def write_junit(found, path):
    """Write the cases as JUnit's XML."""
    document.write_whole(path, ci_files.junit(TOOL, found))


def write_sarif(found, path):
    """Write the cases' notices as SARIF 2.1.0, with paths relative to the working folder."""
    document.write_whole(path, ci_files.sarif(TOOL, found, Path.cwd()))
