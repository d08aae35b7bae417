"""The table of verdicts, or of a suite's pairs, sorted and filtered by style sheet: rows have `--by-<key>` and classes."""

from playground.judge.classes import named as accuracy_named
from playground.record import VERDICTS
from playground.report import figures, suite, suite_table
from playground.report.page.variant import without_folders
from playground.report.text import NOTHING, significant, with_unit

ORDERS = {"run": "as run", "verdict": "verdict", "time": "time"}
OF_VERDICTS = {"speedup": "speed-up", "share": "of the floor"}
OF_PAIRS = {"eager": "over eager", suite.FASTEST: "over the fastest"}


def of_verdicts(members, models):
    """Return {"orders", "filters"}. `models` are {class of a model's rows: its name}."""
    results = [result for result, _ in members]
    ratios = [ratio and ratio.ratio for _, ratio in map(figures.headline, results)]
    _place(members, speedup=ratios, share=[figures.share_of_floor(result) for result in results])
    filters = {"Model": models, "On": {f"on-{each['place']}": each["place"] for _, each in members}, **_by_verdict(members)}
    return {"orders": ORDERS | OF_VERDICTS, "filters": {name: each for name, each in filters.items() if len(each) > 1}}


def of_pairs(members, summary):
    """Return {"orders", "filters"} and, of what all pairs come to, "heads", "table" and "remarks"."""
    over = [suite.speedups(result) for result, _ in members]
    _place(members, **{name: [each[name].ratio if name in each else None for each in over] for name in OF_PAIRS})
    for (result, shown), ratios in zip(members, over, strict=True):
        shown |= _pair(result, shown["reason"], ratios)
    rows = suite_table.summary_rows(summary)
    return {
        **{"orders": ORDERS | OF_PAIRS, "filters": _by_verdict(members), "remarks": list(suite_table.remarks(summary))},
        **{"heads": list(rows[0]), "table": [list(row.values()) for row in rows]},
    }


def _by_verdict(members):
    return {"Verdict": {class_of(result): result.verdict for result, _ in members}}


def class_of(result):
    """Return the class by which the filter of verdicts finds a row."""
    return f"is-{result.verdict.replace(' ', '-')}"


def _place(members, **falling):
    """Add "places": {order: number}. `falling` begin with the greatest; what has no figure comes last."""
    keys = {
        "run": range(len(members)),
        "verdict": [VERDICTS.index(result.verdict) for result, _ in members],
        "time": [result.median_ms for result, _ in members],
        **{order: [value and -value for value in values] for order, values in falling.items()},
    }
    for order, values in keys.items():
        ranked = sorted(range(len(members)), key=lambda index, of=values: (of[index] is None, of[index] or 0, index))
        for place, index in enumerate(ranked):
            members[index][1].setdefault("places", {})[order] = place


def _pair(result, reason, ratios):
    over = {name: figures.labelled(with_unit(each.ratio, "x"), result) for name, each in ratios.items()}
    over |= {name: over[name] + figures.proof(result, name) for name in over if name == "eager"}
    caveats = {each.tag: f"{each.tag}: {without_folders(each.text)}" for each in result.caveats}
    said = [None if suite.is_correct(result, "forward") else reason, *caveats.values(), figures.why_no_speedup(result)]
    cells = {"ms": significant(result.median_ms)}
    cells |= {title: over.get(name, NOTHING) for name, title in OF_PAIRS.items()}
    cells["accuracy"] = accuracy_named(suite.accuracy_class(result) or NOTHING)
    return {"pair": suite_table.named(result), "cells": cells, "said": list(filter(None, said))}
