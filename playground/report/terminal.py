"""What the two commands print when they are done: run_all's table, and compare.py's view of each variant."""

import operator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from playground.report import against, facts, figures
from playground.report.layout import GAP, INDENT, fitted, print_folded, print_indented, print_prose, print_rows, verdict
from playground.report.text import NOTHING, grouped, one_line, printable, scientific, significant, span, with_unit

WORDS = ("variant", "ran on", "verdict", "gradients")
ERRORS = ("max error", "PyTorch's")
CHECKED = (*WORDS, *ERRORS, "build s")  # of what was not timed
TIMED = (*WORDS, *ERRORS, "median ms", "build s", "speed-up", "over", "of floor", "outcome")
TIMES = ("", "median\nms", "p20-p80\nms", "speed-up", "interval", "peak\nMiB")
SHOWN_LINES = 20  # of what a variant printed
FEW_RESULTS = 3  # of one model, which need no table besides
SHOWN_DETAILS = 8  # lines, without --verbose
GRADIENTS = ("gradient of", "", "max error", "PyTorch's", "allowed")
MODEL = operator.attrgetter("model")


class View:
    """A run's results on a console, `expected` to be {model: how many}. `latest` is the document that was shown last."""

    def __init__(self, console, expected=None):
        self._console = console
        self._expected = expected or {}
        self._printed = set()
        self._machine_is_printed = False
        self.latest = None

    def update(self, document):
        """Show the document so far, whenever there is a new result. Returns what can be drawn until it is complete, or None."""
        self.latest = document
        return self.show(document)

    def end(self, document):
        """Show the whole document, once."""
        self.update(document)
        self.print_machine(document)
        self.conclude(document)
        against.show(document, self._console)

    def show(self, document):
        """Print what is new, and return what can be drawn of the rest."""

    def conclude(self, document):
        """Print what concerns all results."""

    def print_machine(self, document):
        """Print where it was measured: once, and first."""
        if not self._machine_is_printed:
            print_folded(self._console, figures.machine(document.environment), style="dim")
            if line := figures.isolation(document.environment):
                print_folded(self._console, line, style="dim")
            self._machine_is_printed = True

    def unprinted(self, results):
        """Yield those of the results that it has not yielded before."""
        for result in results:
            names = result.model, result.variant, result.ran_on, result.source_sha256
            key = *names, str(result.shape.settings)
            if key not in self._printed:
                self._printed.add(key)
                yield result


class Summary(View):
    """run_all's tables, one a model, each printed as soon as all its results are known."""

    def show(self, document):
        models = grouped(document.results, MODEL)
        done = {model for model, results in models.items() if len(results) >= self._expected.get(results[0].model, 0)}
        for model in [model for model in models if model in done - self._printed]:
            self.print_machine(document)
            self._console.print()
            self._console.print(_model_table(self._console, model, models[model]))
            _print_remarks(self._console, models[model])
            self._printed.add(model)
        rest = [_model_table(self._console, model, results) for model, results in models.items() if model not in done]
        return Group(*rest) if rest else None

    def end(self, document):
        self._expected = {}
        super().end(document)
        console, results = self._console, document.results
        console.print()
        if any(result.ran_on == "emulator" for result in results):
            print_folded(console, "On the emulator variants are checked on small shapes and not timed.")
        for place, (mean, models) in figures.geometric_means(results).items():
            what = f"Geometric mean over {models} model{'s' if models > 1 else ''} on {place}"
            print_folded(console, f"{what}, the best variant of each against its best baseline: {with_unit(mean, 'x')}")
        if count := sum(facts.DOUBLE in facts.refused(result.checked) for result in results):
            print_folded(console, f"{count} of {len(results)} raise after double() (allowed).", style="dim")
        print_folded(console, ", ".join(figures.tally(results).values()) or "No variants.")


def _model_table(console, model, results):
    """What was only checked needs fewer columns than what was timed."""
    notes = {figures.size_note(result) for result in results}
    note = notes.pop() if len(notes) == 1 else ""  # else each has its own below the table
    parts = [Text(one_line(f"{model}: {note}" if note else model), style="bold")]
    for names, is_emulated in ((CHECKED, True), (TIMED, False)):
        rows = [_row(each, names) for each in results if (each.ran_on == "emulator") == is_emulated]
        parts += [fitted(rows, console.width, WORDS)] if rows else []
    return Group(*parts)


def _row(result, names):
    row = {"variant": one_line(result.variant), "ran on": facts.ran_on(result), **figures.texts(result)}
    words = {"verdict": result.verdict, "gradients": figures.gradient_verdict(result.checked), "outcome": row["outcome"]}
    row |= {name: verdict(word) for name, word in words.items()}
    best, ratio = figures.headline(result)
    if not figures.label(result):
        row["speed-up"] = _ratio(ratio).append(figures.proof(result, best) if ratio else "", "")
    return {name: row[name] for name in names}


class Details(View):
    """compare.py's view of each variant as soon as it is known, with what `checks` found and `verbose` details on request."""

    def __init__(self, console, expected=None, checks=False, verbose=False):
        super().__init__(console, expected)
        self._checks, self._verbose = checks, verbose
        self._model = None

    def conclude(self, document):
        """Print what many variants came to in one table, in the order in which they were given."""
        for model, results in grouped(document.results, MODEL).items():
            if len(results) > FEW_RESULTS:
                self._console.print()
                self._console.print(_model_table(self._console, model, results))

    def show(self, document):
        for model, results in grouped(document.results, MODEL).items():
            for result in self.unprinted(results):
                self.print_machine(document)
                if model != self._model:
                    self._console.print()
                    print_folded(self._console, model, style="bold")
                    self._model = model
                self._console.print()
                _print_details(self._console, result, self._verbose)
                if self._checks:
                    for heads, rows in facts.tables(result.checked):
                        print_prose(self._console, heads, [[verdict(one_line(cell)) for cell in row] for row in rows])


def _ratio(ratio):
    if ratio is None:
        return Text(NOTHING)
    return Text(with_unit(ratio.ratio, "x"), "green" if ratio.low > 1 else "red" if ratio.high < 1 else "")


def _print_remarks(console, results):
    """Below a model's table: why a variant is no pass, sizes where they differ between variants, baselines that are missing."""

    def told(line):
        print_folded(console, line, INDENT, hanging=INDENT)

    def variants_with(what):
        """(value, [variants that have it]) of what `what(result)` yields."""
        pairs = [(value, result.variant) for result in results for value in what(result)]
        return [(value, [variant for _, variant in own]) for value, own in grouped(pairs, lambda pair: pair[0]).items()]

    def refusals(result):
        if names := [name for name in facts.refused(result.checked) if name != facts.DOUBLE]:
            yield f"refuses {', '.join(names)}"

    sizes = variants_with(lambda each: [figures.size_note(each) or "sizes of the original"])
    whys = variants_with(lambda each: [(each.verdict, figures.placed(each, why)) for why in figures.why_not_pass(each)])
    for (word, reason), variants in whys:
        told(Text(one_line(", ".join(variants)) + " ").append_text(verdict(word)).append(f": {one_line(reason)}"))
    for result in results:
        for line in _printed_lines(result)[:1]:
            told(f"{one_line(result.variant)} printed: {line}")
    for note, variants in [
        *variants_with(lambda each: [figures.mutants(each)]),
        *variants_with(refusals),
        *variants_with(lambda each: [figures.under_graphs(each)]),
        *variants_with(lambda each: figures.timing_notes(each, brief=True)),
        *(sizes if len(sizes) > 1 else ()),
    ]:
        if note:
            told(f"{f'all {len(results)} variants' if len(variants) == len(results) > 1 else ', '.join(variants)}: {note}")
    for name, reason in sorted({item for each in results for item in each.baselines_unavailable.items()}):
        told(facts.not_measured(name, reason))


def _print_details(console, result, verbose):
    name = Text(one_line(result.variant), style="bold").append(" ")
    lacks = f": {facts.lacks(result)}" if result.verdict == "forward only" else ""
    print_folded(console, name.append_text(verdict(result.verdict)).append(lacks))
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(overflow="fold", style="dim")
    table.add_column(overflow="fold")
    for what, text in facts.of(result):
        table.add_row(what, Text(one_line(text)))
    print_indented(console, table)
    lines = [printable(line) for line in result.details.splitlines()]
    lines = lines[1:] if lines and one_line(lines[0]) == one_line(result.reason or "") else lines
    more = 0 if verbose or len(lines) <= SHOWN_DETAILS + 1 else len(lines) - SHOWN_DETAILS
    lines = lines[: len(lines) - more] + [f"({more} more lines: --verbose)"] * bool(more)
    if not result.details:  # else they end with it
        lines = [f"printed: {line}" for line in _printed_lines(result)]
    for line in lines:
        print_folded(console, Text(line), 2 * INDENT)
    if figures.gradient_verdict(result.checked) in ("ok", "fail"):
        checks = result.checked.gradients.items()
        told = [(name, verdict("ok" if each.is_within else "fail"), each) for name, each in checks]
        cells = [(*two, *map(scientific, (each.max_error, each.eager_error, each.allowed))) for *two, each in told]
        print_rows(console, [dict(zip(GRADIENTS, row, strict=True)) for row in cells], GRADIENTS[:2])
    print_rows(console, time_rows(result), TIMES[:1])


def _printed_lines(result):
    lines = [line for line in dict.fromkeys(result.printed.splitlines()) if line.strip()]
    shown = [printable(line) for line in lines[:SHOWN_LINES]]
    return [*shown, f"({len(lines) - SHOWN_LINES} more lines)"] if len(lines) > SHOWN_LINES else shown


def time_rows(result):
    """Return a row for forward and each training mode, then one for each baseline, with the speed-up over it."""
    rows = []
    for title, timings in figures.timed_modes(result).items():
        if not timings.time_ms:
            continue
        rows += [[""] * len(TIMES)] * bool(rows)
        head = Text(one_line(title), style="bold")
        # On top of what was in use; a CUDA graph took its memory when it was captured.
        peak = NOTHING if title.endswith(figures.GRAPH) else significant(timings.peak_mib)
        rows.append([head, *_spread(timings.time_ms), "", "", peak])
        speedup, baselines = timings.ratios, timings.baselines_ms
        for name in figures.ordered_baselines({**baselines, **speedup}):
            ratio = speedup.get(name)
            named = f"  {one_line(figures.baseline_name(name))}{' (no graph)' * (name in (timings.not_graphed or []))}"
            ends = span(ratio.low, ratio.high, "x") if ratio else NOTHING
            text = _ratio(ratio).append(figures.proof(timings, name) if ratio else "", "")
            rows.append([named, *_spread(baselines.get(name)), text, ends, ""])
    return [dict(zip(TIMES, row, strict=True)) for row in rows]


def _spread(spread):
    return (significant(spread.median), span(spread.p20, spread.p80)) if spread else (NOTHING, NOTHING)
