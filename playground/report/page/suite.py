"""What the page shows of a suite: what all pairs come to, and a table of them, sorted and filtered as that of verdicts is."""

from playground.judge.accuracy import named as accuracy_named
from playground.report import suite, suite_table
from playground.report.figures import NOTHING, labelled, significant, why_not_measured, with_unit
from playground.report.page import verdicts
from playground.report.page.variant import without_folders

ORDERS = {"run": "as run", "verdict": "verdict", "time": "time", "eager": "over eager", "fastest": "over the fastest"}


def shown(report, sections):
    """What the template needs; None of a document that is no suite's. `sections` are those of the page's models."""
    summary = report.get("suite")
    if not summary:
        return None
    variants = {id(member["result"]): member for section in sections for member in section["members"]}
    results = report["results"]
    rows = [_row(result, variants[id(result)]["shown"]) | {"classes": verdicts.class_of(result)} for result in results]
    verdicts.set_places(
        rows,
        run=range(len(results)),
        verdict=verdicts.severity(results),
        time=[(result["time_ms"] or {}).get("median") for result in results],
        **{key: [_speedup(result, key) for result in results] for key in ("eager", suite.FASTEST)},
    )
    table = suite_table.summary_rows(summary)
    return {
        "heads": list(table[0]),
        "table": [[cell.plain for cell in row.values()] for row in table],
        "remarks": list(suite_table.remarks(summary)),
        "orders": ORDERS,
        "filters": [verdicts.verdict_filter(results)],
        "rows": rows,
    }


def _speedup(result, name):
    ratio = suite.speedups(result).get(name) if result["time_ms"] else None
    return ratio and ratio["ratio"]


def _ratio(ratio, result):
    return labelled(with_unit(ratio["ratio"], "x"), result) if ratio else NOTHING


def _row(result, variant):
    over = suite.speedups(result) if result["time_ms"] else {}
    said = [] if result["verdict"] in suite.MEETS["forward"] else [variant["reason"]]
    caveats = {each["tag"]: f"{each['tag']}: {without_folders(each['text'])}" for each in result.get("caveats") or []}
    said = [*([caveats.pop(suite_table.BY_SEED)] if said and suite_table.BY_SEED in caveats else []), *said, *caveats.values()]
    if result["time_ms"] and (why := why_not_measured(result)):
        said.append(f"speed-up not measured: {why}")
    return {
        "id": variant["id"],
        "name": suite_table.named(result),
        "verdict": verdicts.mark(result["verdict"]),
        "cells": {
            "ms": significant((result["time_ms"] or {}).get("median")),
            "over eager": _ratio(over.get("eager"), result),
            "over the fastest": _ratio(over.get(suite.FASTEST), result),
            "accuracy": accuracy_named(suite.accuracy_class(result) or NOTHING),
        },
        "said": said,
    }
