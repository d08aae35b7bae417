"""Is a run faster or slower than an earlier one? Two documents compared row by row, and what is said about it.

Two runs differ by more than their kernels: clocks, temperature and whatever else runs make the same code take another time. So
times alone prove nothing, and neither do speed-ups alone, since a baseline, too, can have a bad day. A row is faster or slower
where both say so, beyond what either run leaves open:

- The times: old over new. The interval goes from old p20 / new p80 to old p80 / new p20, what single calls of each run take.
- The speed-ups over one baseline that took turns with the variant in both runs, eager where there is one: new over old, so that
  what slows a whole run cancels. The interval is one 95% interval divided by the other, end by end.
- Beyond means more than MARGIN from 1: twice what two processes that run the very same code can differ by, once for each run.

Where the two contradict each other, or the runs were not made alike (device, driver, versions, threads, sizes, precision), the
row is not comparable, and says why.
"""

from rich.text import Text

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
from playground.report.layout import INDENT, Layout, print_folded, print_indented, verdict
from playground.stopwatch.statistics import TIE

MARGIN = 2 * TIE
FASTER, SAME, SLOWER, NOT_COMPARABLE = "faster", "same", "slower", "not comparable"
VERDICTS = (FASTER, SAME, SLOWER, NOT_COMPARABLE)

# What must be the same in both environments, with its name for people, by where a variant ran.
CONDITIONS = {
    "cuda": {("gpu",): "GPU", ("driver",): "driver", ("torch",): "torch", ("cuda",): "CUDA"},
    "cpu": {("cpu",): "CPU", ("torch",): "torch", ("cpu_details", "threads"): "threads"},
}
CONDITIONS["cpu"][("cpu_details", "usable_logical_cores")] = "usable cores"

NAMES = ("variant", "timed", "verdict", "then ms", "now ms", "by time", "range", "by speed-up", "its range")
PLANS = (
    tuple((name,) for name in NAMES),
    (("variant", "timed"), ("verdict",), ("then ms", "now ms"), ("by time", "range"), ("by speed-up", "its range")),
    (("variant", "timed"), ("verdict", "then ms", "now ms"), ("by time", "range"), ("by speed-up", "its range")),
)
WORDS = NAMES[:3]


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
    rows = [row for result in results for row in result["against"]]
    here = {(result["model"], result["variant"]) for result in results}
    there = dict.fromkeys((old["model"], old["variant"]) for old in earlier["results"])
    gone = ["/".join(each) for each in there if each not in here]
    about = {
        "file": name,
        "date": earlier["environment"]["date"],
        "margin": MARGIN,
        "counts": {word: sum(row["verdict"] == word for row in rows) for word in VERDICTS},
        "not_in_this_run": gone,
    }
    return document | {"against": about, "results": results}


def _same_variant(result, earlier):
    """The earlier result of the same variant, the one on the same kind of device and at the same sizes first; or None."""
    same = [old for old in earlier if (old["model"], old["variant"]) == (result["model"], result["variant"])]
    likeness = [(old["ran_on"] == result["ran_on"], _sizes(old) == _sizes(result)) for old in same]
    return same[likeness.index(max(likeness))] if same else None


def _rows(new, old, environments):
    """One row for each mode that was timed now; one that says why where none was, or where nothing can be compared."""
    if not new["time_ms"]:
        return [_row("forward", reason="not timed in this run")]
    if old is None:
        return [_row("forward", new=new, reason="not in the earlier run")]
    if not old["time_ms"]:
        return [_row("forward", new=new, reason=f"not timed in the earlier run, where its verdict was {old['verdict']}")]
    reason = "; ".join(_differences(new, old, *environments))
    then = timed_modes(old)
    now = {title: timings for title, timings in timed_modes(new).items() if timings.get("time_ms")}
    same_source = {"same_source": new["source_sha256"] == old["source_sha256"]}
    return [_compare_mode(title, timings, then.get(title), reason) | same_source for title, timings in now.items()]


def _differences(new, old, here, there):
    """What was not the same in the two runs, apart from the variant."""
    if new["ran_on"] != old["ran_on"]:
        yield f"ran on {old['ran_on']} then, on {new['ran_on']} now"
        return
    for keys, name in CONDITIONS[new["ran_on"]].items():
        now, then = _at(here, keys), _at(there, keys)
        if now != then:
            yield one_line(f"{name} {then or 'unknown'} then, {now or 'unknown'} now")
    if _sizes(new) != _sizes(old):
        yield f"sizes: {size_note(old) or _inputs(old)} then, {size_note(new) or _inputs(new)} now"
    for key in ("precision", "variant_precision"):
        if new.get(key) != old.get(key):
            yield f"{key.replace('_', ' of the ')} {old.get(key)} then, {new.get(key)} now"


def _at(environment, keys):
    for key in keys:
        environment = (environment or {}).get(key)
    return environment


def _sizes(result):
    shape = result.get("shape") or {}
    return listed(shape.get("inputs")), {name: listed(value) for name, value in (shape.get("settings") or {}).items()}


def _inputs(result):
    inputs = (result.get("shape") or {}).get("inputs") or []
    return ", ".join("x".join(map(str, each)) if isinstance(each, list) else str(each) for each in inputs) or "unknown"


def _compare_mode(title, new, old, reason):
    if not (old or {}).get("time_ms"):
        return _row(title, new=new, reason=reason or "not timed in the earlier run")
    shared = [name for name in BASELINES if name in (new["speedup"] or {}) and name in (old["speedup"] or {})]
    if not reason and not shared:
        reason = "no baseline was timed in both runs, so nothing tells whether the machine was in the same state"
    if reason:
        return _row(title, new=new, old=old, reason=reason)
    baseline = shared[0]
    try:
        time = _quotient(old["time_ms"], new["time_ms"], "median", "p20", "p80")
        speedup = _quotient(new["speedup"][baseline], old["speedup"][baseline], "ratio", "low", "high")
    except ZeroDivisionError:
        return _row(title, new=new, old=old, reason="a time or a speed-up of 0")
    word, reason = judge(time, speedup, baseline)
    return _row(title, word, reason, new, old) | {"time": time, "speedup": speedup, "baseline": baseline}


def _quotient(above, below, middle, low, high):
    ends = {"low": above[low] / below[high], "high": above[high] / below[low]}
    return {"ratio": above[middle] / below[middle], **ends}


def judge(time, speedup, baseline):
    """(verdict, reason) of the two ratios of a row; the reason is None but for what is not comparable."""
    words = {_side(time), _side(speedup)}
    if words == {FASTER, SLOWER}:
        claims = f"the times say {_side(time)}, the speed-up over {baseline_name(baseline)} says {_side(speedup)}"
        return NOT_COMPARABLE, f"{claims}: the machine was in another state"
    return (SAME if SAME in words else words.pop()), None


def _side(ratio):
    if ratio["low"] > 1 + MARGIN:
        return FASTER
    return SLOWER if ratio["high"] < 1 - MARGIN else SAME


def _row(title, word=NOT_COMPARABLE, reason=None, new=None, old=None):
    medians = {"old_ms": old and old["time_ms"]["median"], "new_ms": new and new["time_ms"]["median"]}
    unknown = {"time": None, "speedup": None, "baseline": None, "same_source": None}
    return {"timed": title, "verdict": word, "reason": reason, **medians, **unknown}


def show(document, console):
    """Print how a document compares with an earlier one; nothing where it was not compared."""
    about = document.get("against")
    if not about:
        return
    names = [(result["model"], result["variant"]) for result in document["results"]]
    rows = []
    for result, name in zip(document["results"], names, strict=True):
        point = size_note(result) if names.count(name) > 1 else ""  # of a sweep, in which a variant comes more than once
        rows += [(result, row, _cells(result, row, point)) for row in result["against"]]
    layout = Layout(PLANS, [cells for _, _, cells in rows], console.width - INDENT, WORDS)
    console.print()
    print_folded(console, f"Against {about['file']} of {about['date'][:10]}", style="bold")
    for model in dict.fromkeys(result["model"] for result, _, _ in rows):
        mine = [row for row in rows if row[0]["model"] == model]
        console.print()
        print_folded(console, model, INDENT, style="bold")
        table = layout.table()
        for _, _, cells in mine:
            table.add_row(*layout.cells(cells))
        print_indented(console, table)
        _show_reasons(console, mine)
    console.print()
    baselines = {baseline_name(row["baseline"]) for _, row, _ in rows if row["baseline"]}
    if baselines:
        rule = (
            "Faster or slower: both ratios, of the times (from p20 to p80 of single calls) and of the speed-ups over "
            f"{', '.join(sorted(baselines))} (95% intervals, divided), lie in their whole range more than {MARGIN:.0%} from 1."
        )
        print_folded(console, rule, style="dim")
    counted = ", ".join(f"{count} {word}" for word, count in about["counts"].items() if count) or "nothing to compare"
    gone = about["not_in_this_run"]
    print_folded(console, f"Against {about['file']}: {counted}" + (f"; not in this run: {', '.join(gone)}" if gone else ""))


def _cells(result, row, point):
    time, speedup = row["time"], row["speedup"]
    texts = [significant(row["old_ms"]), significant(row["new_ms"])]
    for ratio in (time, speedup):
        texts += [with_unit(ratio["ratio"], "x"), span(ratio["low"], ratio["high"])] if ratio else [NOTHING, NOTHING]
    variant = one_line(f"{result['variant']}: {point}" if point else result["variant"])
    named = [Text(variant), Text(row["timed"]), verdict(row["verdict"])]
    return dict(zip(NAMES, [*named, *map(Text, texts)], strict=True))


def _show_reasons(console, rows):
    said = {}
    for result, row, _ in rows:
        if row["reason"]:
            said.setdefault(row["reason"], []).append(result["variant"])
        elif row["verdict"] != SAME and row["same_source"]:
            said.setdefault(f"{row['verdict']}, though the file is the same as then", []).append(result["variant"])
    for reason, variants in said.items():
        print_folded(console, f"{', '.join(dict.fromkeys(variants))}: {reason}", INDENT, hanging=INDENT)
