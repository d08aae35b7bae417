"""What the two commands print when they are done: run_all's table, and compare.py's view of each variant."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from playground.report import against, checks
from playground.report.figures import (
    FORWARD,
    NOTHING,
    TALLY,
    TIMED,
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
    precisions,
    printable,
    raised_at,
    scientific,
    share_of_floor,
    significant,
    size_note,
    span,
    standards,
    timed_modes,
    timing_notes,
    under_graphs,
    why_not_measured,
    why_not_pass,
    with_unit,
)
from playground.report.layout import GAP, INDENT, fitted, print_folded, print_indented, print_prose, print_rows, verdict

CHECKED = ("variant", "ran on", "verdict", "gradients", "error", "eager's", "build s")  # of what was not timed
SUMMARY_WORDS = CHECKED[:4]
TIMES = ("", "median\nms", "p20-p80\nms", "speed-up", "interval", "peak\nMiB")
SHOWN_LINES = 20  # of what a variant printed
SHOWN_DETAILS = 8  # lines, without --verbose
GRADIENTS = ("gradient of", "", "error", "eager's", "allowed")


class _View:
    def __init__(self, console):
        self._console = console
        self._printed = set()
        self._machine_is_printed = False

    def _print_machine(self, document):
        if not self._machine_is_printed:
            print_folded(self._console, machine(document["environment"]), style="dim")
            if line := isolation(document["environment"]):
                print_folded(self._console, line, style="dim")
            self._machine_is_printed = True


class Summary(_View):
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
            self._print_machine(document)
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
        self._print_machine(document)
        console, results = self._console, document["results"]
        against.show(document, console)
        console.print()
        if any(result["ran_on"] == "emulator" for result in results):
            print_folded(console, "On the emulator variants are checked on small shapes and not timed.")
        for (place, device), (mean, models) in geometric_means(results).items():
            what = f"Geometric mean over {models} model{'s' if models > 1 else ''} on {device or place}"
            print_folded(console, f"{what}, the best variant of each against its best baseline: {with_unit(mean, 'x')}")
        print_folded(console, _tally(results))


def _model_table(console, model, results):
    """What was only checked needs fewer columns than what was timed."""
    parts = [Text(one_line(_with_sizes(model, results)), style="bold")]
    checked = [result for result in results if result["ran_on"] == "emulator"]
    timed = [result for result in results if result["ran_on"] != "emulator"]
    rows = [{name: cell for name, cell in _summary_row(each).items() if name in CHECKED} for each in checked]
    parts += [fitted(each, console.width, SUMMARY_WORDS) for each in (rows, list(map(_summary_row, timed))) if each]
    return Group(*parts)


class Details(_View):
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
        self._print_machine(document)
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
        self._print_machine(document)
        against.show(document, self._console)


def _by_model(results):
    """{model: results}, the model with the device's name where there were several."""
    models = {}
    for device, of_device in by_device(results).items():
        for result in of_device:
            models.setdefault(on_device(result["model"], device), []).append(result)
    return models


def _ran_on(result):
    if result["ran_on"] is None:
        return NOTHING
    return one_line(", ".join(filter(None, (result["ran_on"], precisions(result)))))


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
    return {
        "variant": Text(one_line(result["variant"])),
        "ran on": Text(_ran_on(result)),
        "verdict": verdict(result["verdict"]),
        "gradients": verdict(gradient_verdict(check)),
        "error": Text(scientific(check.get("max_error"))),
        "eager's": Text(scientific(check.get("eager_error"))),
        "median ms": Text(significant(time.get("median"))),
        "build s": Text(significant(result["build_seconds"])),
        "speed-up": _ratio(ratio, label(result)),
        "over": Text(one_line(baseline_name(best)) if best else NOTHING),
        "of floor": Text(with_unit(share and 100 * share, "%")),
        "outcome": verdict(outcome_verdict(result)),
    }


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
        print_folded(console, _not_measured(name, reason), INDENT, hanging=INDENT)


def _grouped(pairs):
    """{value: [names that have it]} of (name, value) pairs."""
    groups = {}
    for name, value in pairs:
        groups.setdefault(value, []).append(name)
    return groups


def _not_measured(name, reason):
    return f"baseline {baseline_name(name)} not measured: {reason}"


def _tally(results):
    counts = {word: sum(result["verdict"] == word for result in results) for word in TALLY}
    return ", ".join(f"{count} {TALLY[word]}" for word, count in counts.items() if count) or "No variants."


def _print_details(console, result, verbose):
    name = Text(one_line(result["variant"]), style="bold").append(" ")
    print_folded(console, name.append_text(verdict(result["verdict"])))
    facts = Table.grid(padding=(0, GAP, 0, 0))
    facts.add_column(overflow="fold", style="dim")
    facts.add_column(overflow="fold")
    for what, text in _facts(result):
        facts.add_row(what, Text(one_line(text)))
    print_indented(console, facts)
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
    if gradients and gradients_unsupported(gradients) is None:
        print_rows(console, _gradient_rows(gradients), GRADIENTS[:2])
    if result["time_ms"]:
        print_rows(console, _time_rows(result), TIMES[:1])


def _printed_lines(result):
    """The different lines that the variant printed (each check calls it again), at most SHOWN_LINES."""
    lines = [line for line in dict.fromkeys((result.get("printed") or "").splitlines()) if line.strip()]
    shown = [printable(line) for line in lines[:SHOWN_LINES]]
    return [*shown, f"({len(lines) - SHOWN_LINES} more lines)"] if len(lines) > SHOWN_LINES else shown


def _print_checks(console, check):
    """Every probe, every check of the behaviour, every kernel."""
    kernels = [(launches, microseconds, name) for name, launches, microseconds in checks.explained_kernels(check)]
    tables = (
        (("probe", "", "error", "eager's", "allowed", ""), checks.explained_probes(check)),
        (("behaviour", "", ""), checks.explained_behaviour(check)),
        (("launches", "us", "kernel on the GPU"), kernels),
    )
    for heads, rows in tables:
        print_prose(console, heads, [[verdict(one_line(cell)) for cell in row] for row in rows])


def _facts(result):
    """(label, text) of everything about a result that is not a table."""
    check = result["check"] or {}
    share = share_of_floor(result)
    gradients = check.get("gradients")
    if result["reason"] and (result["verdict"] not in TIMED or not result.get("caveats")):
        yield "reason", result["reason"]
    yield from standards(result)
    for finding in result.get("findings") or []:
        if finding != result["reason"]:
            yield "finding", finding
    if races := result.get("accepted_races"):
        lines = ", ".join(f"line {line} ({count} times)" for line, count in races.items())
        yield "races", f"accepted, since the text calls them benign: {lines}"
    yield "ran on", _ran_on(result)
    inputs = (result.get("shape") or {}).get("inputs")
    if inputs:
        sizes = ", ".join(str(tuple(each)) if isinstance(each, (list, tuple)) else str(each) for each in inputs)
        note = size_note(result)
        yield "inputs", f"{sizes}: {note}" if note else sizes
    if check:
        errors = [scientific(check.get(key)) for key in ("max_error", "eager_error", "allowed")]
        yield "error", "{}; eager's {}; {}allowed {}".format(*errors[:2], _permitted(result), errors[2])
        if found := result.get("accuracy"):
            error, limit = scientific(found["error"]), scientific(found["limit"])
            yield "accuracy", f"{found['class']}: off by {error} of the spread; as PyTorch is up to {limit}"
        unsupported = gradients_unsupported(gradients)
        if unsupported is not None:
            yield "gradients", f"none: {unsupported}"
        else:
            yield "gradients", "not checked" if gradients is None else gradient_verdict(check)
        for way in check.get("reference") or []:
            yield "reference", way
        if check.get("domain"):
            yield "domain", f"kept by every probe: {'; '.join(check['domain'])}"
        if check.get("mutants_rejected"):
            yield "mutants", mutants(result).removeprefix("mutants ")
    yield from checks.lines(result["check"])
    yield from checks.sanitizer(result.get("sanitizer"))
    if result["build_seconds"] is not None:
        yield "build", with_unit(result["build_seconds"], " s") + ("" if result["built"] else ", from the cache")
    if result["floor_ms"] is not None:
        reached = f"; {with_unit(100 * share, '%')} of it reached" if share else ""
        yield "floor", f"{with_unit(result['floor_ms'], ' ms')}, bound by {result['floor_bound']}{reached}"
    for title, timings in _modes(result).items():
        if timings.get("outcome"):
            labelled = f", {label(result, 'in ')}" if label(result) else ""
            yield "timing", f"{title}{labelled}: {_outcome(timings)}"
    if result.get("clocks"):
        before, after = result["clocks"]["before"], result["clocks"]["after"]
        yield "SM clock", f"{before['sm_mhz']} MHz before, {after['sm_mhz']} after, of {after['max_sm_mhz']}"
    for note in timing_notes(result):
        yield "note", note
    for title, timings in timed_modes(result).items():
        for name, reason in (timings.get("baselines_unavailable") or {}).items():
            yield "note", ("" if title == FORWARD else f"{title}: ") + _not_measured(name, reason)


def _permitted(result):
    """'tf32 permits 1.16e-3; ', the error that the stated precision allows to any algorithm."""
    permitted = result["check"].get("permitted_error")
    precision = result.get("variant_precision") or result.get("precision")
    return f"{one_line(precision)} permits {scientific(permitted)}; " if permitted is not None and precision else ""


def _gradient_rows(gradients):
    rows = []
    for name, check in gradients.items():
        errors = [scientific(check[key]) for key in ("max_error", "eager_error", "allowed")]
        cells = [Text(one_line(name)), verdict("ok" if is_within(check) else "fail"), *map(Text, errors)]
        rows.append(dict(zip(GRADIENTS, cells, strict=True)))
    return rows


def _modes(result):
    """{title: timings} of all that was timed."""
    return {title: timings for title, timings in timed_modes(result).items() if timings.get("time_ms")}


def _outcome(timings):
    """'win over torch.compile, 2.30x (2.29x-2.31x), 9 rounds, 41 calls, 12.3% of the floor'."""
    if why := why_not_measured(timings):
        return f"speed-up not measured: {one_line(why)}"
    outcome, share = timings["outcome"], share_of_floor(timings)
    parts = [f"{outcome['verdict']} over" if outcome["verdict"] == "win" else f"{outcome['verdict']} against"]
    parts[0] += f" {baseline_name(outcome['against'])}"
    parts.append(f"{with_unit(outcome['ratio'], 'x')} ({span(outcome['low'], outcome['high'], 'x')})")
    parts.append(f"{timings['rounds']} rounds, {timings['calls']} calls")
    parts += [f"{with_unit(100 * share, '%')} of the floor"] if share else []
    return ", ".join(parts)


def _time_rows(result):
    """Forward and the training modes: the variant's own time, then each baseline's and the speed-up over it."""
    rows = []
    for title, timings in _modes(result).items():
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
