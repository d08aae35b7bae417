"""Tables for people, on a terminal or in a pipe.

Nothing is ever cut off: what does not fit is folded. All drawing is ASCII, and styles vanish where there is no terminal.
"""

import sys

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from playground.report.figures import (
    NOTHING,
    TRAINING,
    baseline_name,
    best_baseline,
    gradient_verdict,
    gradients_unsupported,
    is_within,
    machine,
    one_line,
    ordered_baselines,
    printable,
    scientific,
    share_of_floor,
    significant,
    size_note,
    span,
    with_unit,
)

MIN_WIDTH = 80
GAP = 2  # between columns
INDENT = 2
MIN_NAME_WIDTH = 16

STYLES = {"pass": "green", "ok": "green", "fail": "bold red", "error": "bold red", "skipped": "yellow", "none": "yellow"}

# Columns of the summary. Where they do not fit side by side, those of a group stand below one another.
COLUMNS = (
    ("variant", "ran on"),
    ("verdict", "gradients"),
    ("error", "eager's"),
    ("build s",),
    ("median ms",),
    ("speed-up", "over"),
    ("of floor",),
)

RULE_BELOW_HEAD = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def make_console(file=None):
    """A console on `file` (stdout), as wide as the terminal or as COLUMNS says, but at least 80 columns wide."""
    file = file or sys.stdout
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="backslashreplace")  # a name that the encoding lacks must not end the run
    console = Console(file=file)
    console.width = max(MIN_WIDTH, console.width)
    return console


def summary(document, console):
    """run_all's table: one row a variant, grouped by model."""
    _print(console, machine(document["environment"]), style="dim")
    models = _by_model(document["results"])
    rows = {model: [_summary_row(result) for result in results] for model, results in models.items()}
    layout = _Layout([row for group in rows.values() for row in group], console.width)
    for model, results in models.items():
        console.print()
        _print(console, _with_sizes(model, results), style="bold")
        table = layout.table()
        for row in rows[model]:
            table.add_row(*layout.cells(row))
        console.print(table)
        _print_remarks(console, results)
    console.print()
    if any(result["ran_on"] == "emulator" for result in document["results"]):
        _print(console, "On the emulator variants are checked on small shapes and not timed.")
    _print(console, _tally(document["results"]))


def details(document, console):
    """compare.py's view: everything known about each variant."""
    _print(console, machine(document["environment"]), style="dim")
    for model, results in _by_model(document["results"]).items():
        console.print()
        _print(console, model, style="bold")
        for result in results:
            console.print()
            _print_details(console, result)


def _by_model(results):
    models = {}
    for result in results:
        models.setdefault(result["model"], []).append(result)
    return models


def _print(console, text, indent=0, style=""):
    """Text that may come from a stranger's file: never markup, never highlighted, folded where it must be."""
    line = text if isinstance(text, Text) else Text(one_line(text), style=style)
    line.overflow = "fold"
    console.print(Padding(line, (0, 0, 0, indent), expand=False) if indent else line, highlight=False)


def _print_indented(console, table):
    console.print(Padding(table, (0, 0, 0, INDENT), expand=False))


def _verdict(word):
    return Text(word, style=STYLES.get(word, ""))


def _ran_on(result):
    if result["ran_on"] is None:
        return NOTHING
    return one_line(", ".join(filter(None, (result["ran_on"], result.get("precision")))))


def _with_sizes(model, results):
    """The model's name, with the sizes when they are the same ones, not the original's, for all its results."""
    notes = {size_note(result) for result in results if result.get("shape")}
    note = notes.pop() if len(notes) == 1 else ""
    return f"{model}: {note}" if note else model


def _summary_row(result):
    check = result["check"] or {}
    time = result["time_ms"] or {}
    best = best_baseline(result["speedup"])
    ratio = result["speedup"][best] if best else None
    share = share_of_floor(result)
    return (
        (Text(one_line(result["variant"])), Text(_ran_on(result))),
        (_verdict(result["verdict"]), _verdict(gradient_verdict(check))),
        (Text(scientific(check.get("max_error"))), Text(scientific(check.get("eager_error")))),
        (Text(significant(result["build_seconds"])),),
        (Text(significant(time.get("median"))),),
        (_ratio(ratio), Text(one_line(baseline_name(best)) if best else NOTHING)),
        (Text(with_unit(share and 100 * share, "%")),),
    )


def _ratio(ratio):
    """A speed-up: green or red where its whole interval is on one side of 1."""
    if ratio is None:
        return Text(NOTHING)
    style = "green" if ratio["low"] > 1 else "red" if ratio["high"] < 1 else ""
    return Text(with_unit(ratio["ratio"], "x"), style=style)


class _Layout:
    """The summary's columns, equally wide for all models: side by side if that fits `width`, else two lines a variant."""

    def __init__(self, rows, width):
        self.stacked = False
        self.heads = self.cells([[Text(name) for name in group] for group in COLUMNS])
        widths = _natural_widths([self.heads, *map(self.cells, rows)])
        if _total(widths) > width:
            self.stacked = True
            names = [[name.replace(" ", "\n")] if len(rest) == 0 else [name, *rest] for name, *rest in COLUMNS]
            self.heads = self.cells([[Text(name) for name in group] for group in names])
            widths = _natural_widths([self.heads, *map(self.cells, rows)])
        self.widths = _fit(widths, width)

    def cells(self, row):
        return [Text("\n").join(group) for group in row] if self.stacked else [cell for group in row for cell in group]

    def table(self):
        return _table(self.heads, self.widths, words=2 if self.stacked else 4)


def _natural_widths(lines):
    """How wide each column must be so that nothing is folded."""
    columns = zip(*lines, strict=True)
    return [max(cell_len(line) for cell in column for line in str(cell).split("\n")) for column in columns]


def _total(widths):
    return sum(widths) + GAP * (len(widths) - 1)


def _fit(widths, width):
    """Narrows the first column, that of names, so that the numbers keep their room."""
    excess = max(0, _total(widths) - width)
    return [max(widths[0] - excess, min(widths[0], MIN_NAME_WIDTH)), *widths[1:]]


def _table(heads, widths, words):
    """An empty table; the first `words` columns hold words, the others numbers."""
    table = Table(box=RULE_BELOW_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="dim")
    for index, (head, width) in enumerate(zip(heads, widths, strict=True)):
        table.add_column(head, width=width, justify="left" if index < words else "right", overflow="fold")
    return table


def _print_table(console, heads, rows, words):
    table = _table(heads, _fit(_natural_widths([heads, *rows]), console.width - INDENT), words)
    for row in rows:
        table.add_row(*row)
    console.print()
    _print_indented(console, table)


def _print_remarks(console, results):
    """Below a model's table: why a variant is no pass, sizes where they differ between variants, baselines that are missing."""
    reasons = _grouped((result["variant"], (result["verdict"], result["reason"])) for result in results)
    for (verdict, reason), variants in reasons.items():
        if verdict != "pass":
            line = Text(one_line(", ".join(variants)) + " ").append_text(_verdict(verdict)).append(f": {one_line(reason)}")
            _print(console, line, indent=INDENT)
    notes = _grouped((result["variant"], size_note(result)) for result in results if result.get("shape"))
    if len(notes) > 1:
        for note, variants in notes.items():
            _print(console, f"{', '.join(variants)}: {note or 'sizes of the original'}", indent=INDENT)
    missing = {item for result in results for item in (result.get("baselines_unavailable") or {}).items()}
    for name, reason in sorted(missing):
        _print(console, _not_measured(name, reason), indent=INDENT)


def _grouped(pairs):
    """{value: [names that have it]} of (name, value) pairs."""
    groups = {}
    for name, value in pairs:
        groups.setdefault(value, []).append(name)
    return groups


def _not_measured(name, reason):
    return f"baseline {baseline_name(name)} not measured: {reason}"


def _tally(results):
    counts = {word: sum(result["verdict"] == word for result in results) for word in ("pass", "fail", "error", "skipped")}
    names = {"pass": "passed", "fail": "failed", "error": "ended in an error", "skipped": "skipped"}
    return ", ".join(f"{count} {names[word]}" for word, count in counts.items() if count) or "No variants."


def _print_details(console, result):
    name = Text(one_line(result["variant"]), style="bold").append(" ")
    _print(console, name.append_text(_verdict(result["verdict"])))
    facts = Table.grid(padding=(0, GAP, 0, 0))
    facts.add_column(overflow="fold", style="dim")
    facts.add_column(overflow="fold")
    for label, text in _facts(result):
        facts.add_row(label, Text(one_line(text)))
    _print_indented(console, facts)
    for line in (result.get("details") or "").splitlines():
        _print(console, Text(printable(line)), indent=2 * INDENT)
    gradients = (result["check"] or {}).get("gradients")
    if gradients and gradients_unsupported(gradients) is None:
        _print_table(console, ("gradient of", "", "error", "eager's", "allowed"), _gradient_rows(gradients), words=2)
    if result["time_ms"]:
        heads = ("", "median\nms", "p20-p80\nms", "speed-up", "interval", "peak\nMiB")
        _print_table(console, heads, _time_rows(result), words=1)


def _facts(result):
    """(label, text) of everything about a result that is not a table."""
    check = result["check"] or {}
    share = share_of_floor(result)
    gradients = check.get("gradients")
    if result["reason"]:
        yield "reason", result["reason"]
    for finding in result.get("findings") or []:
        if finding != result["reason"]:
            yield "finding", finding
    yield "ran on", _ran_on(result)
    inputs = (result.get("shape") or {}).get("inputs")
    if inputs:
        sizes = ", ".join(str(tuple(each)) if isinstance(each, (list, tuple)) else str(each) for each in inputs)
        note = size_note(result)
        yield "inputs", f"{sizes}: {note}" if note else sizes
    if check:
        errors = [scientific(check.get(key)) for key in ("max_error", "eager_error", "allowed")]
        yield "error", "{}; eager's {}; allowed {}".format(*errors)
        unsupported = gradients_unsupported(gradients)
        if unsupported is not None:
            yield "gradients", f"none: {unsupported}"
        else:
            yield "gradients", "not checked" if gradients is None else gradient_verdict(check)
        if check.get("mutants_rejected"):
            yield "mutants", f"{check['mutants_rejected']} rejected"
    if result["build_seconds"] is not None:
        yield "build", with_unit(result["build_seconds"], " s") + ("" if result["built"] else ", from the cache")
    if result["floor_ms"] is not None:
        reached = f"; {with_unit(100 * share, '%')} of it reached" if share else ""
        yield "floor", f"{with_unit(result['floor_ms'], ' ms')}, bound by {result['floor_bound']}{reached}"
    for name, reason in (result.get("baselines_unavailable") or {}).items():
        yield "note", _not_measured(name, reason)
    for mode, timings in (result["training"] or {}).items():
        for name, reason in ((timings or {}).get("baselines_unavailable") or {}).items():
            yield "note", f"{TRAINING.get(mode, mode)}: {_not_measured(name, reason)}"


def _gradient_rows(gradients):
    rows = []
    for name, check in gradients.items():
        errors = [scientific(check[key]) for key in ("max_error", "eager_error", "allowed")]
        rows.append((Text(one_line(name)), _verdict("ok" if is_within(check) else "fail"), *errors))
    return rows


def _time_rows(result):
    """Forward and the training modes: the variant's own time, then each baseline's and the speed-up over it."""
    rows = []
    modes = {"forward": result}
    modes.update((TRAINING.get(mode, mode), timings) for mode, timings in (result["training"] or {}).items())
    for title, timings in modes.items():
        if timings is None or timings["time_ms"] is None:
            continue
        if rows:
            rows.append([""] * len(rows[0]))
        own = timings["time_ms"]
        title = Text(one_line(title), style="bold")
        rows.append((title, significant(own["median"]), span(own["p20"], own["p80"]), "", "", significant(timings["peak_mib"])))
        speedup, baselines = timings["speedup"] or {}, timings.get("baselines_ms") or {}
        for name in ordered_baselines({**baselines, **speedup}):
            spread, ratio = baselines.get(name), speedup.get(name)
            rows.append(
                (
                    Text("  " + one_line(baseline_name(name))),
                    significant(spread and spread["median"]),
                    span(spread["p20"], spread["p80"]) if spread else NOTHING,
                    _ratio(ratio),
                    span(ratio["low"], ratio["high"], "x") if ratio else NOTHING,
                    "",
                )
            )
    return rows
