"""What the page shows of a suite: what all pairs come to, and a table of them, sorted and filtered as that of verdicts is."""

from playground.judge.accuracy import named as accuracy_named
from playground.report import suite, suite_table
from playground.report.figures import labelled, why_not_measured
from playground.report.page import verdicts
from playground.report.page.variant import without_folders
from playground.report.text import NOTHING, significant, with_unit

ORDERS = {"run": "as run", "verdict": "verdict", "time": "time", "eager": "over eager", "fastest": "over the fastest"}


def shown(report, sections):
    """Return what the template needs; None of a document that is no suite's. `sections` are those of the page's models."""
    summary = report.get("suite")
    if not summary:
        return None
    variants = {id(result): variant for section in sections for result, variant in section["members"]}
    results = report["results"]
    rows = [_row(result, variants[id(result)]) for result in results]
    over = [suite.speedups(result) for result in results]
    verdicts.set_places(rows, results, **{n: [each.get(n, {}).get("ratio") for each in over] for n in ("eager", suite.FASTEST)})
    table = suite_table.summary_rows(summary)
    return {
        **{"heads": list(table[0]), "table": [[cell.plain for cell in row.values()] for row in table]},
        **{"remarks": list(suite_table.remarks(summary)), "rows": rows},
        **{"orders": ORDERS, "filters": verdicts.verdict_filter(results)},
    }


def _row(result, variant):
    over = {name: labelled(with_unit(each["ratio"], "x"), result) for name, each in suite.speedups(result).items()}
    caveats = {each["tag"]: f"{each['tag']}: {without_folders(each['text'])}" for each in result.get("caveats") or []}
    why = result["time_ms"] and why_not_measured(result)
    # The caveat that explains a wrong output best comes first.
    wrong = [] if suite.is_correct(result, "forward") else [caveats.pop(suite_table.BY_SEED, None), variant["reason"]]
    said = [*wrong, *caveats.values(), f"speed-up not measured: {why}" if why else None]
    return {
        "id": variant["id"],
        "name": suite_table.named(result),
        "classes": verdicts.class_of(result),
        "verdict": verdicts.mark(result["verdict"]),
        "cells": {
            "ms": significant((result["time_ms"] or {}).get("median")),
            "over eager": over.get("eager", NOTHING),
            "over the fastest": over.get(suite.FASTEST, NOTHING),
            "accuracy": accuracy_named(suite.accuracy_class(result) or NOTHING),
        },
        "said": list(filter(None, said)),
    }
