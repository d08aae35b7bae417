"""What the two commands print when they are done: run_all's table, and compare.py's view of each variant."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from playground.report import against, checks, facts
from playground.report.figures import (
    NOTHING,
    OF_OUTPUTS,
    TALLY,
    baseline_name,
    by_device,
    geometric_means,
    gradient_verdict,
    gradients_unsupported,
    headline,
    is_within,
    isolation,
    label,
    machine,
    mutants,
    on_device,
    one_line,
    ordered_baselines,
    outcome_verdict,
    peak_memory,
    printable,
    raised_at,
    scientific,
    share_of_floor,
    significant,
    size_note,
    span,
    timing_notes,
    under_graphs,
    why_not_pass,
    with_unit,
)
from playground.report.layout import GAP, INDENT, fitted, print_folded, print_indented, print_prose, print_rows, verdict

SUMMARY_WORDS = ("variant", "ran on", "verdict", "gradients")
CHECKED = (*SUMMARY_WORDS, "error", "PyTorch's", "build s")  # of what was not timed
SUMMARY = (*CHECKED[:-1], "median ms", "build s", "speed-up", "over", "of floor", "outcome")
TIMES = ("", "median\nms", "p20-p80\nms", "speed-up", "interval", "peak\nMiB")
SHOWN_LINES = 20  # of what a variant printed
SHOWN_DETAILS = 8  # lines, without --verbose
GRADIENTS = ("gradient of", "", "error", "PyTorch's", "allowed")


class View:
    """What all views of a run print first, and once: the machine."""

    def __init__(self, console):
        self._console = console
        self._printed = set()
        self._machine_is_printed = False

    def print_machine(self, document):
        if not self._machine_is_printed:
            print_folded(self._console, machine(document["environment"]), style="dim")
            if line := isolation(document["environment"]):
                print_folded(self._console, line, style="dim")
            self._machine_is_printed = True


class Summary(View):
    """run_all's tables: a row a variant, a table a model, each printed as soon as all its `expected` results are known.

    `expected` is {model: how many results}. `update` is called with the document so far whenever there is a new result, `end`
    once with the whole.
    """

    def __init__(self, console, expected):
        super().__init__(console)
        self._expected = expected

    def update(self, document):
        """Print what is complete now. Returns what can be drawn of the rest, for as long as it is not."""
        models = _by_model(document["results"])
        done = {model for model, results in models.items() if len(results) >= self._expected.get(results[0]["model"], 0)}
        for model in [model for model in models if model in done - self._printed]:
            self.print_machine(document)
            self._console.print()
            self._console.print(_model_table(self._console, model, models[model]))
            _print_remarks(self._console, models[model])
            self._printed.add(model)
        rest = [_model_table(self._console, model, results) for model, results in models.items() if model not in done]
        return Group(*rest) if rest else None

    def end(self, document):
        """Print what has not been printed, and what concerns all models."""
        self._expected = {}
        self.update(document)
        self.print_machine(document)
        console, results = self._console, document["results"]
        against.show(document, console)
        console.print()
        if any(result["ran_on"] == "emulator" for result in results):
            print_folded(console, "On the emulator variants are checked on small shapes and not timed.")
        for (place, device), (mean, models) in geometric_means(results).items():
            what = f"Geometric mean over {models} model{'s' if models > 1 else ''} on {device or place}"
            print_folded(console, f"{what}, the best variant of each against its best baseline: {with_unit(mean, 'x')}")
        if count := sum(checks.refuses_double(result["check"]) for result in results):
            print_folded(console, f"{count} of {len(results)} raise after double(), as they may.", style="dim")
        print_folded(console, _tally(results))


def _model_table(console, model, results):
    """What was only checked needs fewer columns than what was timed."""
    parts = [Text(one_line(_with_sizes(model, results)), style="bold")]
    checked = [result for result in results if result["ran_on"] == "emulator"]
    timed = [result for result in results if result["ran_on"] != "emulator"]
    rows = [{name: cell for name, cell in _summary_row(each).items() if name in CHECKED} for each in checked]
    parts += [fitted(each, console.width, SUMMARY_WORDS) for each in (rows, list(map(_summary_row, timed))) if each]
    return Group(*parts)


class Details(View):
    """compare.py's view: everything known about each variant, as soon as it is. With `checks` also what every check found.

    With `verbose` also all of a compiler's output or a traceback.

    `update` and `end` are called as Summary's are.
    """

    def __init__(self, console, expected=None, checks=False, verbose=False):
        super().__init__(console)
        self._checks = checks
        self._verbose = verbose
        self._model = None

    def update(self, document):
        for model, results in _by_model(document["results"]).items():
            for result in results:
                key = model, result["variant"], result["ran_on"], str((result.get("shape") or {}).get("settings"))
                if key not in self._printed:
                    self._printed.add(key)
                    self._print(document, model, result)

    def _print(self, document, model, result):
        self.print_machine(document)
        if model != self._model:
            self._console.print()
            print_folded(self._console, model, style="bold")
            self._model = model
        self._console.print()
        _print_details(self._console, result, self._verbose)
        if self._checks:
            _print_checks(self._console, result["check"])

    def end(self, document):
        self.update(document)
        self.print_machine(document)
        against.show(document, self._console)


def _by_model(results):
    """{model: results}, the model with the device's name where there were several."""
    models = {}
    for device, of_device in by_device(results).items():
        for result in of_device:
            models.setdefault(on_device(result["model"], device), []).append(result)
    return models


def _with_sizes(model, results):
    """The model's name, with the sizes when they are the same ones, not the original's, for all its results."""
    notes = {size_note(result) for result in results if result.get("shape")}
    note = notes.pop() if len(notes) == 1 else ""
    return f"{model}: {note}" if note else model


def _summary_row(result):
    check = result["check"] or {}
    time = result["time_ms"] or {}
    best, ratio = headline(result)
    share = share_of_floor(result)
    cells = (
        Text(one_line(result["variant"])),
        Text(facts.ran_on(result)),
        verdict(result["verdict"]),
        verdict(gradient_verdict(check)),
        Text(scientific(check.get("max_error"))),
        Text(scientific(check.get("eager_error"))),
        Text(significant(time.get("median"))),
        Text(significant(result["build_seconds"])),
        _ratio(ratio, label(result)),
        Text(one_line(baseline_name(best)) if best else NOTHING),
        Text(with_unit(share and 100 * share, "%")),
        verdict(outcome_verdict(result)),
    )
    return dict(zip(SUMMARY, cells, strict=True))


def _ratio(ratio, label=None):
    """A speed-up: green or red where its interval is on one side of 1; one with a label is no win without it."""
    if ratio is None:
        return Text(NOTHING)
    if label:
        return Text(f"{with_unit(ratio['ratio'], 'x')} {one_line(label)}")
    style = "green" if ratio["low"] > 1 else "red" if ratio["high"] < 1 else ""
    return Text(with_unit(ratio["ratio"], "x"), style=style)


def _print_remarks(console, results):
    """Below a model's table: why a variant is no pass, sizes where they differ between variants, baselines that are missing."""
    whys = (
        (result["variant"], (result["verdict"], why + raised_at(result))) for result in results for why in why_not_pass(result)
    )
    for (word, reason), variants in _grouped(whys).items():
        if word != "pass":
            line = Text(one_line(", ".join(variants)) + " ").append_text(verdict(word)).append(f": {one_line(reason)}")
            print_folded(console, line, INDENT, hanging=INDENT)
    for result in results:
        for line in _printed_lines(result)[:1]:
            print_folded(console, f"{one_line(result['variant'])} printed: {line}", INDENT, hanging=INDENT)
    remarks = [_grouped((result["variant"], mutants(result)) for result in results)]
    remarks.append(_grouped((result["variant"], checks.refusals(result["check"])) for result in results))
    remarks.append(_grouped((result["variant"], under_graphs(result)) for result in results))
    remarks.append(_grouped((result["variant"], note) for result in results for note in timing_notes(result, brief=True)))
    notes = _grouped((result["variant"], size_note(result)) for result in results if result.get("shape"))
    if len(notes) > 1:
        remarks.append({note or "sizes of the original": variants for note, variants in notes.items()})
    for note, variants in [item for group in remarks for item in group.items() if item[0]]:
        who = f"all {len(results)} variants" if len(variants) == len(results) > 1 else ", ".join(variants)
        print_folded(console, f"{who}: {note}", INDENT, hanging=INDENT)
    missing = {item for result in results for item in (result.get("baselines_unavailable") or {}).items()}
    for name, reason in sorted(missing):
        print_folded(console, facts.not_measured(name, reason), INDENT, hanging=INDENT)


def _grouped(pairs):
    """{value: [names that have it]} of (name, value) pairs."""
    groups = {}
    for name, value in pairs:
        groups.setdefault(value, []).append(name)
    return groups


def _tally(results):
    counts = {word: sum(result["verdict"] == word for result in results) for word in TALLY}
    return ", ".join(f"{count} {TALLY[word]}" for word, count in counts.items() if count) or "No variants."


def _print_details(console, result, verbose):
    name = Text(one_line(result["variant"]), style="bold").append(" ")
    lacks = f": {facts.lacks(result)}" if result["verdict"] == "forward only" else ""
    print_folded(console, name.append_text(verdict(result["verdict"])).append(lacks))
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(overflow="fold", style="dim")
    table.add_column(overflow="fold")
    for what, text in facts.of(result):
        table.add_row(what, Text(one_line(text)))
    print_indented(console, table)
    lines = (result.get("details") or "").splitlines()
    lines = lines[1:] if lines and one_line(lines[0]) == one_line(result["reason"] or "") else lines
    shown = lines if verbose or len(lines) <= SHOWN_DETAILS + 1 else lines[:SHOWN_DETAILS]
    for line in shown:
        print_folded(console, Text(printable(line)), indent=2 * INDENT)
    if len(shown) < len(lines):
        print_folded(console, f"({len(lines) - len(shown)} more lines: --verbose)", indent=2 * INDENT, style="dim")
    if not result.get("details"):  # else they end with it
        for line in _printed_lines(result):
            print_folded(console, Text(f"printed: {line}", style="dim"), indent=2 * INDENT)
    gradients = (result["check"] or {}).get("gradients")
    if gradients and OF_OUTPUTS not in gradients and gradients_unsupported(gradients) is None:
        print_rows(console, _gradient_rows(gradients), GRADIENTS[:2])
    if result["time_ms"]:
        print_rows(console, time_rows(result), TIMES[:1])


def _printed_lines(result):
    """The different lines that the variant printed (each check calls it again), at most SHOWN_LINES."""
    lines = [line for line in dict.fromkeys((result.get("printed") or "").splitlines()) if line.strip()]
    shown = [printable(line) for line in lines[:SHOWN_LINES]]
    return [*shown, f"({len(lines) - SHOWN_LINES} more lines)"] if len(lines) > SHOWN_LINES else shown


def _print_checks(console, check):
    """Every probe, every check of the behaviour, every kernel."""
    kernels = [(launches, microseconds, name) for name, launches, microseconds in checks.explained_kernels(check)]
    tables = (
        (("probe", "", "error", "PyTorch's", "allowed", ""), checks.explained_probes(check)),
        (("behaviour", "", ""), checks.explained_behaviour(check)),
        (("launches", "us", "kernel on the GPU"), kernels),
    )
    for heads, rows in tables:
        print_prose(console, heads, [[verdict(one_line(cell)) for cell in row] for row in rows])


def _gradient_rows(gradients):
    rows = []
    for name, check in gradients.items():
        errors = [scientific(check[key]) for key in ("max_error", "eager_error", "allowed")]
        cells = [Text(one_line(name)), verdict("ok" if is_within(check) else "fail"), *map(Text, errors)]
        rows.append(dict(zip(GRADIENTS, cells, strict=True)))
    return rows


def time_rows(result):
    """Forward and the training modes: the variant's own time, then each baseline's and the speed-up over it."""
    rows = []
    for title, timings in facts.timed(result).items():
        if rows:
            rows.append([Text()] * len(TIMES))
        own = timings["time_ms"]
        name = Text(one_line(title), style="bold")
        rows.append([name, *_spread(own), Text(), Text(), Text(peak_memory(title, timings))])
        speedup, baselines = timings["speedup"] or {}, timings.get("baselines_ms") or {}
        without_graph = timings.get("not_graphed") or []
        for name in ordered_baselines({**baselines, **speedup}):
            ratio = speedup.get(name)
            label = Text("  " + one_line(baseline_name(name)) + (" (no graph)" if name in without_graph else ""))
            interval = Text(span(ratio["low"], ratio["high"], "x") if ratio else NOTHING)
            rows.append([label, *_spread(baselines.get(name)), _ratio(ratio), interval, Text()])
    return [dict(zip(TIMES, row, strict=True)) for row in rows]


def _spread(spread):
    """The cells of a median, and of what lies between the 20th and the 80th percentile."""
    if not spread:
        return Text(NOTHING), Text(NOTHING)
    return Text(significant(spread["median"])), Text(span(spread["p20"], spread["p80"]))
