"""What the page shows of a suite: what all pairs come to, and a table of them that can be sorted without a script.

Every row knows its place in each order as a number, `--by-<key>`; the style sheet takes the one whose radio button is on.
"""

from playground.report import document, suite, suite_table
from playground.report.figures import NOTHING, labelled, significant, why_not_measured, with_unit
from playground.report.page import marks

ORDERS = {"run": "as run", "verdict": "verdict", "time": "time", "eager": "over eager", "fastest": "over the fastest"}
VERDICT_ORDER = {word: place for place, word in enumerate(document.VERDICTS)}


def shown(report, sections):
    """What the template needs; None of a document that is no suite's. `sections` are those of the page's models."""
    summary = report.get("suite")
    if not summary:
        return None
    variants = {id(member["result"]): member for section in sections for member in section["members"]}
    results = report["results"]
    orders = {
        "run": list(range(len(results))),
        "verdict": _places(VERDICT_ORDER.get(result["verdict"], len(VERDICT_ORDER)) for result in results),
        "time": _places((result["time_ms"] or {}).get("median") for result in results),
        **{key: _places(_slowness(result, key) for result in results) for key in ("eager", suite.FASTEST)},
    }
    rows = [_row(result, variants[id(result)]["shown"]) for result in results]
    for number, row in enumerate(rows):
        row["places"] = {key: places[number] for key, places in orders.items()}
    table = suite_table.summary_rows(summary)
    return {
        "heads": list(table[0]),
        "table": [[cell.plain for cell in row.values()] for row in table],
        "remarks": list(suite_table.remarks(summary)),
        "orders": ORDERS,
        "rows": rows,
    }


def _places(keys):
    """The place of each when sorted by its key; what has none comes last."""
    keys = list(keys)
    ordered = sorted(range(len(keys)), key=lambda index: (keys[index] is None, keys[index] or 0, index))
    places = dict(zip(ordered, range(len(keys)), strict=True))
    return [places[index] for index in range(len(keys))]


def _slowness(result, name):
    """The greatest speed-up comes first."""
    ratio = suite.speedups(result).get(name) if result["time_ms"] else None
    return ratio and -ratio["ratio"]


def _ratio(ratio, result):
    return labelled(with_unit(ratio["ratio"], "x"), result) if ratio else NOTHING


def _row(result, variant):
    over = suite.speedups(result) if result["time_ms"] else {}
    said = [] if result["verdict"] in suite.MEETS["forward"] else [result["reason"]]
    said += [f"{each['tag']}: {each['text']}" for each in result.get("caveats") or []]
    if result["time_ms"] and (why := why_not_measured(result)):
        said.append(f"speed-up not measured: {why}")
    return {
        "id": variant["id"],
        "name": suite_table.named(result),
        "verdict": marks.of(result["verdict"]),
        "time": significant((result["time_ms"] or {}).get("median")),
        **{key: _ratio(over.get(key), result) for key in ("eager", suite.FASTEST)},
        "accuracy": suite.accuracy_class(result) or NOTHING,
        "said": said,
    }
