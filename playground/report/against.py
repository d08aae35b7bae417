"""Is a run faster or slower than an earlier one? Two documents compared row by row.

A row has two ratios above 1 where the new run is faster: old time over new, from old p20 / new p80 to old p80 / new p20, and
new speed-up over old, end by end, over one baseline of both. The interval holds both; all of it more than MARGIN from 1 is a
difference. Contradictions, and runs not made alike, are not comparable.
"""

import dataclasses
import functools

from playground.clock.statistics import TIE
from playground.record import NOT_TIMED, SKIPPED, TIMED, VERDICTS, Comparison, Ratio
from playground.report.document import has_changed
from playground.report.figures import BASELINES, baseline_name, inputs_text, listed, size_note, timed_modes
from playground.report.layout import INDENT, fitted, print_folded, print_indented, verdict
from playground.report.text import NOTHING, one_line, significant, span, with_unit
from playground.run_record import Against

MARGIN = 2 * TIE  # what two processes that run the very same code can differ by, once for each run
FASTER, SAME, SLOWER, NOT_COMPARABLE = OUTCOMES = ("faster", "same", "slower", "not comparable")

# What must be the same in both environments, with its name for people, by where a variant ran.
CONDITIONS = {
    "cuda": {"gpu": "GPU", "driver": "driver", "torch": "torch", "cuda": "CUDA"},
    "cpu": {"cpu": "CPU", "torch": "torch", "threads": "threads", "usable_logical_cores": "usable cores"},
}
NAMES = ("variant", "timed", "verdict", "then ms", "now ms", "ratio", "interval")


def compare(document, earlier, name):
    """Return `document` with a record.Against, and in each result Comparisons: with the document `earlier`, called `name`."""
    environments = [each.environment for each in (document, earlier)]
    results, regressions = [], []
    for result in document.results:
        # The same variant's, that on the same kind of device and at the same sizes first.
        same = [old for old in earlier.results if _named(old) == _named(result)]
        old = max(same, key=lambda old: (old.ran_on == result.ran_on, _sizes(old) == _sizes(result)), default=None)
        results.append(dataclasses.replace(result, against=list(_rows(result, old, *environments))))
        regressions += _regressions(results[-1], old)
    verdicts = [row.verdict for result in results for row in result.against]
    here = set(map(_named, results))
    gone = [each for each in dict.fromkeys(map(_named, earlier.results)) if each not in here]
    counts, date = {word: verdicts.count(word) for word in OUTCOMES}, earlier.environment.date
    about = Against(file=name, date=date, margin=MARGIN, counts=counts, not_in_this_run=gone, regressions=regressions)
    return dataclasses.replace(document, against=about, results=results)


def _regressions(new, old):
    point = f" ({size})" if (size := size_note(new)) else ""
    is_alike = old and old.verdict in TIMED and (old.ran_on, _sizes(old)) == (new.ran_on, _sizes(new))
    if is_alike and new.verdict != SKIPPED and VERDICTS.index(new.verdict) > VERDICTS.index(old.verdict):
        yield f"{_named(new)}{point}: {old.verdict} then, {new.verdict} now"
    for row in new.against:
        if row.verdict == SLOWER:
            yield f"{_named(new)}{point}: {row.timed} slower: {significant(row.old_ms)} ms then, {significant(row.new_ms)} now"


def is_comparable(document):
    """Return whether a compared document says anything: False where all times of both runs could not be compared."""
    rows = [row for result in document.results for row in result.against or ()]
    timed = [row for row in rows if row.old_ms is not None and row.new_ms is not None]
    return not timed or any(row.verdict != NOT_COMPARABLE for row in timed)


def _named(result):
    return f"{result.model}/{result.variant}"


def _rows(new, old, here, there):
    now = {title: timings for title, timings in timed_modes(new).items() if timings.time_ms}
    if not now:
        verdicts = f": {old.verdict} then, {new.verdict} now" if old else f", where its verdict is {new.verdict}"
        yield _row("forward", None, None, f"not timed in this run{verdicts}", None)
    reason = "; ".join(_differences(new, old, here, there)) if old else "not in the earlier run"
    for title, timings in now.items():
        yield _row(title, timings, old and timed_modes(old).get(title), reason, not has_changed(old, new) if old else None)


def _differences(new, old, here, there):
    if not old.time_ms:
        yield f"not timed in the earlier run, where its verdict was {old.verdict}"
        return
    if new.ran_on != old.ran_on:
        yield f"ran on {old.ran_on} then, on {new.ran_on} now"
        return
    pairs = [(name, _condition(there, key), _condition(here, key)) for key, name in CONDITIONS[new.ran_on].items()]
    if _sizes(new) != _sizes(old):
        pairs.append(("sizes:", *(size_note(each) or inputs_text(each) or "unknown" for each in (old, new))))
    for key in ("precision", "variant_precision"):
        pairs.append((key.replace("_", " of the "), getattr(old, key), getattr(new, key)))
    yield from (one_line(f"{name} {then} then, {now} now") for name, then, now in pairs if then != now)
    if len({new.model_sha256, old.model_sha256} - {None}) > 1:
        yield "stale: the model's file has changed since"


def _condition(environment, key):
    return getattr(environment, key, None) or getattr(environment.cpu_details, key, None) or "unknown"


def _sizes(result):
    return listed(result.shape.inputs), {name: listed(value) for name, value in result.shape.settings.items()}


def _row(title, new, old, reason, same_source):
    """`new` and `old` are the mode's timings, None where there are none; `reason` says why they cannot be compared, if so."""
    new, old = new or NOT_TIMED, old or NOT_TIMED
    row = functools.partial(
        Comparison, timed=title, old_ms=old.median_ms, new_ms=new.median_ms, same_source=same_source, verdict=NOT_COMPARABLE
    )
    if reason or not old.time_ms:
        return row(reason=reason or "not timed in the earlier run")
    baseline = next((name for name in BASELINES if name in new.ratios and name in old.ratios), None)
    if not baseline:
        return row(reason="no baseline was timed in both runs, so nothing tells how the machine was then and now")
    try:
        time = _quotient(old.time_ms, new.time_ms, "median", "p20", "p80")
        speedup = _quotient(new.ratios[baseline], old.ratios[baseline], "ratio", "low", "high")
    except ZeroDivisionError:
        return row(reason="a time or a speed-up of 0")
    row = functools.partial(row, time=time, speedup=speedup, baseline=baseline)
    sides = [FASTER if each.low > 1 + MARGIN else SLOWER if each.high < 1 - MARGIN else SAME for each in (time, speedup)]
    if set(sides) == {FASTER, SLOWER}:
        claims = f"the times say {sides[0]}, the speed-up over {baseline_name(baseline)} says {sides[1]}"
        return row(reason=f"{claims}: the machine was in another state")
    return row(reason=None, verdict=sides[0] if sides[0] == sides[1] else SAME)


def _quotient(above, below, middle, low, high):
    pairs = {"ratio": (middle, middle), "low": (low, high), "high": (high, low)}
    return Ratio(**{name: getattr(above, over) / getattr(below, under) for name, (over, under) in pairs.items()})


def show(document, console):
    """Print how a document compares with an earlier one; nothing where it was not compared."""
    about = document.against
    if not about:
        return
    names = list(map(_named, document.results))
    rows, reasons = {}, {}
    for result, name in zip(document.results, names, strict=True):
        point = size_note(result) if names.count(name) > 1 else ""  # of a sweep, in which a variant comes more than once
        for row in result.against:
            rows.setdefault(result.model, []).append(_cells(result, row, point))
            doubtful = row.verdict != SAME and row.same_source
            if reason := row.reason or (f"{row.verdict}, though the file is the same as then" if doubtful else None):
                reasons.setdefault(reason, {})[name] = None
    console.print()
    print_folded(console, f"Against {about.file} of {about.date[:10]}", style="bold")
    for model, of_model in rows.items():
        console.print()
        print_folded(console, model, INDENT, style="bold")
        print_indented(console, fitted(of_model, console.width - INDENT, NAMES[:3]))
    console.print()
    for reason, variants in reasons.items():
        print_folded(console, f"{', '.join(variants)}: {reason}", hanging=INDENT)
    rule = f"The interval holds that of the times and that of the speed-ups. Same: it reaches within {MARGIN:.0%} of 1."
    print_folded(console, rule, style="dim")
    for line in about.regressions:
        print_folded(console, f"regression: {line}", hanging=INDENT, style="red")
    counted = ", ".join(f"{count} {word}" for word, count in about.counts.items() if count) or "nothing to compare"
    gone = about.not_in_this_run
    print_folded(console, f"Against {about.file}: {counted}" + (f"; not in this run: {', '.join(gone)}" if gone else ""))


def _cells(result, row, point):
    texts = [significant(row.old_ms), significant(row.new_ms), NOTHING, NOTHING]
    if row.verdict != NOT_COMPARABLE:
        both = row.time, row.speedup
        ends = min(each.low for each in both), max(each.high for each in both)
        texts[2:] = with_unit(row.time.ratio, "x"), span(*ends)
    variant = one_line(f"{result.variant}: {point}" if point else result.variant)
    return dict(zip(NAMES, [variant, row.timed, verdict(row.verdict), *texts], strict=True))
