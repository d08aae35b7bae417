"""Is a run faster or slower than an earlier one? Two documents compared row by row, and what is said about it.

Two runs differ by more than their kernels: clocks, temperature and whatever else runs. Times alone prove nothing, and speed-ups
alone neither, since a baseline, too, can have a bad day. So a row has two ratios, above 1 where the new run is faster:

- old time over new. Its interval goes from old p20 / new p80 to old p80 / new p20.
- new speed-up over old, over one baseline of both runs, eager where there is one: what slows a whole run cancels. Its interval
  is one 95% interval divided by the other, end by end.

The interval shown holds both. A row is faster or slower where all of it is more than MARGIN from 1. Where the two ratios
contradict each other, or the runs were not made alike, the row is not comparable, and says why.
"""

from rich.text import Text

from playground.report.document import has_changed
from playground.report.figures import (
    BASELINES,
    NOTHING,
    baseline_name,
    listed,
    one_line,
    significant,
    size_note,
    span,
    timed_modes,
    with_unit,
)
from playground.report.layout import INDENT, fitted, print_folded, print_indented, verdict
from playground.stopwatch.statistics import TIE

MARGIN = 2 * TIE  # what two processes that run the very same code can differ by, once for each run
FASTER, SAME, SLOWER, NOT_COMPARABLE = "faster", "same", "slower", "not comparable"
VERDICTS = (FASTER, SAME, SLOWER, NOT_COMPARABLE)

# What must be the same in both environments, with its name for people, by where a variant ran.
CONDITIONS = {
    "cuda": {"gpu": "GPU", "driver": "driver", "torch": "torch", "cuda": "CUDA"},
    "cpu": {"cpu": "CPU", "torch": "torch", "threads": "threads", "usable_logical_cores": "usable cores"},
}
NAMES = ("variant", "timed", "verdict", "then ms", "now ms", "ratio", "interval")


def compare(document, earlier, name):
    """`document` with a key "against" in itself and in each result, on how it compares with the document `earlier`.

    The document's is {"file": name, "date", "margin", "counts": {verdict: number}, "not_in_this_run": ["model/variant"]}, a
    result's is a list of {"timed", "verdict", "reason", "old_ms", "new_ms", "time", "speedup", "baseline", "same_source"}, of
    which "time" and "speedup" are {"ratio", "low", "high"} or None, and above 1 where the new run is faster.
    """
    environments = document["environment"], earlier["environment"]
    results = [
        result | {"against": _rows(result, _same_variant(result, earlier["results"]), environments)}
        for result in document["results"]
    ]
    verdicts = [row["verdict"] for result in results for row in result["against"]]
    here = {(result["model"], result["variant"]) for result in results}
    there = dict.fromkeys((old["model"], old["variant"]) for old in earlier["results"])
    about = {
        "file": name,
        "date": earlier["environment"]["date"],
        "margin": MARGIN,
        "counts": {word: verdicts.count(word) for word in VERDICTS},
        "not_in_this_run": ["/".join(each) for each in there if each not in here],
    }
    return document | {"against": about, "results": results}


def _same_variant(result, earlier):
    """The earlier result of the same variant, the one on the same kind of device and at the same sizes first; or None."""
    same = [old for old in earlier if (old["model"], old["variant"]) == (result["model"], result["variant"])]
    return max(same, key=lambda old: (old["ran_on"] == result["ran_on"], _sizes(old) == _sizes(result)), default=None)


def _rows(new, old, environments):
    """One row for each mode that was timed now; one that says why where none was."""
    now = {title: timings for title, timings in timed_modes(new).items() if timings.get("time_ms")}
    if not now:
        verdicts = f": {old['verdict']} then, {new['verdict']} now" if old else f", where its verdict is {new['verdict']}"
        return [_row("forward", None, None, f"not timed in this run{verdicts}", None)]
    reason = "; ".join(_differences(new, old, *environments)) if old else "not in the earlier run"
    then = timed_modes(old) if old else {}
    same_source = not has_changed(old, new) if old else None
    return [_row(title, timings, then.get(title), reason, same_source) for title, timings in now.items()]


def _differences(new, old, here, there):
    """What was not the same in the two runs, apart from the variant; nothing where the rows can be compared."""
    if not old["time_ms"]:
        yield f"not timed in the earlier run, where its verdict was {old['verdict']}"
        return
    if new["ran_on"] != old["ran_on"]:
        yield f"ran on {old['ran_on']} then, on {new['ran_on']} now"
        return
    here, there = (environment | (environment.get("cpu_details") or {}) for environment in (here, there))
    for key, name in CONDITIONS[new["ran_on"]].items():
        now, then = here.get(key), there.get(key)
        if now != then:
            yield one_line(f"{name} {then or 'unknown'} then, {now or 'unknown'} now")
    if _sizes(new) != _sizes(old):
        yield f"sizes: {size_note(old) or _inputs(old)} then, {size_note(new) or _inputs(new)} now"
    for key in ("precision", "variant_precision"):
        if new.get(key) != old.get(key):
            yield f"{key.replace('_', ' of the ')} {old.get(key)} then, {new.get(key)} now"
    if len({new.get("model_sha256"), old.get("model_sha256")} - {None}) > 1:
        yield "stale: the model's file has changed since"


def _sizes(result):
    shape = result.get("shape") or {}
    return listed(shape.get("inputs")), {name: listed(value) for name, value in (shape.get("settings") or {}).items()}


def _inputs(result):
    inputs = (result.get("shape") or {}).get("inputs") or []
    return ", ".join("x".join(map(str, each)) if isinstance(each, list) else str(each) for each in inputs) or "unknown"


def _row(title, new, old, reason, same_source):
    """`new` and `old` are the mode's timings, None where there are none; `reason` says why they cannot be compared, if so."""
    old = old if (old or {}).get("time_ms") else None
    medians = {"old_ms": old and old["time_ms"]["median"], "new_ms": new and new["time_ms"]["median"]}
    row = {"timed": title, "verdict": NOT_COMPARABLE, "reason": reason or None, **medians}
    row |= {"time": None, "speedup": None, "baseline": None, "same_source": same_source}
    if reason or not old:
        return row | {"reason": reason or "not timed in the earlier run"}
    shared = [name for name in BASELINES if name in (new["speedup"] or {}) and name in (old["speedup"] or {})]
    if not shared:
        return row | {
            "reason": "no baseline was timed in both runs, so nothing tells whether the machine was in the same state"
        }
    try:
        time = _quotient(old["time_ms"], new["time_ms"], "median", "p20", "p80")
        speedup = _quotient(new["speedup"][shared[0]], old["speedup"][shared[0]], "ratio", "low", "high")
    except ZeroDivisionError:
        return row | {"reason": "a time or a speed-up of 0"}
    row |= {"time": time, "speedup": speedup, "baseline": shared[0]}
    sides = _side(time), _side(speedup)
    if set(sides) == {FASTER, SLOWER}:
        claims = f"the times say {sides[0]}, the speed-up over {baseline_name(shared[0])} says {sides[1]}"
        return row | {"reason": f"{claims}: the machine was in another state"}
    return row | {"verdict": sides[0] if sides[0] == sides[1] else SAME}


def _quotient(above, below, middle, low, high):
    ends = {"low": above[low] / below[high], "high": above[high] / below[low]}
    return {"ratio": above[middle] / below[middle], **ends}


def _side(ratio):
    if ratio["low"] > 1 + MARGIN:
        return FASTER
    return SLOWER if ratio["high"] < 1 - MARGIN else SAME


def show(document, console):
    """Print how a document compares with an earlier one; nothing where it was not compared."""
    about = document.get("against")
    if not about:
        return
    names = [(result["model"], result["variant"]) for result in document["results"]]
    rows, reasons = {}, {}
    for result, name in zip(document["results"], names, strict=True):
        point = size_note(result) if names.count(name) > 1 else ""  # of a sweep, in which a variant comes more than once
        for row in result["against"]:
            rows.setdefault(result["model"], []).append(_cells(result, row, point))
            if reason := row["reason"] or _doubt(row):
                reasons.setdefault(reason, {})["/".join(name)] = None
    console.print()
    print_folded(console, f"Against {about['file']} of {about['date'][:10]}", style="bold")
    for model, of_model in rows.items():
        console.print()
        print_folded(console, model, INDENT, style="bold")
        print_indented(console, fitted(of_model, console.width - INDENT, NAMES[:3]))
    console.print()
    for reason, variants in reasons.items():
        print_folded(console, f"{', '.join(variants)}: {reason}", hanging=INDENT)
    rule = f"The interval holds that of the times and that of the speed-ups. Same: it reaches within {MARGIN:.0%} of 1."
    print_folded(console, rule, style="dim")
    counted = ", ".join(f"{count} {word}" for word, count in about["counts"].items() if count) or "nothing to compare"
    gone = about["not_in_this_run"]
    print_folded(console, f"Against {about['file']}: {counted}" + (f"; not in this run: {', '.join(gone)}" if gone else ""))


def _doubt(row):
    return f"{row['verdict']}, though the file is the same as then" if row["verdict"] != SAME and row["same_source"] else None


def _cells(result, row, point):
    ratio, interval = NOTHING, NOTHING
    if row["verdict"] != NOT_COMPARABLE:
        both = row["time"], row["speedup"]
        ratio = with_unit(row["time"]["ratio"], "x")
        interval = span(min(each["low"] for each in both), max(each["high"] for each in both))
    texts = significant(row["old_ms"]), significant(row["new_ms"]), ratio, interval
    variant = one_line(f"{result['variant']}: {point}" if point else result["variant"])
    return dict(zip(NAMES, [Text(variant), Text(row["timed"]), verdict(row["verdict"]), *map(Text, texts)], strict=True))
