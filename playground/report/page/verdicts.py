"""The table of verdicts, whose rows can be sorted and filtered without a script.

Every row knows its place in each order as a number, `--by-<key>`, and has a class for each filter it passes. The style sheet
takes the order, and hides the rows, whose radio buttons are on.
"""

from dataclasses import dataclass

from playground.report import checks, document, figures
from playground.report.text import NOTHING, scientific, with_unit

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
SIGNS = {GOOD: "✓", BAD: "✗", UNKNOWN: "–"}
STATES = {"pass": GOOD, "ok": GOOD, "faster": GOOD, "fail": BAD, "error": BAD, "slower": BAD}
MOSTLY = 0.5  # of the GPU's time, for a variant's own kernels to be called its work
ORDERS = {"run": "as run", "verdict": "verdict", "time": "time", "speedup": "speed-up", "share": "of the floor"}
VERDICT_ORDER = {word: place for place, word in enumerate(document.VERDICTS)}


@dataclass(frozen=True)
class Mark:
    """How something went, in a sign, a word and a colour, any of which would do."""

    state: str
    text: str

    @property
    def sign(self):
        return SIGNS[self.state]


def mark(word):
    """Return the Mark of a verdict, an outcome such as 'faster in fp16', or 'ok' and 'fail'."""
    return Mark(STATES.get(word.split(" ")[0], UNKNOWN), "not run" if word == NOTHING else word)


def errors(check):
    """Return an error beside PyTorch's and what is allowed, as texts, and whether it is within."""
    own, eager, allowed = (check.get(key) for key in ("max_error", "eager_error", "allowed"))
    if check.get("complaint"):
        within = Mark(BAD, "wrong")
    elif allowed is None:
        within = Mark(UNKNOWN, "not compared")
    else:
        within = Mark(GOOD, "within") if figures.is_within(check) else Mark(BAD, "beyond")
    of_eager = with_unit(own / eager if own is not None and eager else None, "x")
    texts = {"own": scientific(own), "eager": scientific(eager), "of_eager": of_eager, "allowed": scientific(allowed)}
    return texts | {"mark": within}


def shown(sections, places):
    """Return {"rows", "orders", "filters"}. `sections` are those of the page's models; `places` name where a result ran."""
    members = [(section, member) for section in sections for member in section["members"]]
    results = [member["result"] for _, member in members]
    rows = []
    for section, member in members:
        result = member["result"]
        place = places.get(result["ran_on"], "nowhere")
        classes = f"{section['id']} on-{place} {class_of(result)}"
        of_row = {"model": section, "place": place, "sizes": figures.size_note(result), "classes": classes}
        rows.append(_row(result, member["shown"]) | of_row)
    share = [figures.share_of_floor(result) for result in results]
    set_places(rows, results, speedup=[(figures.headline(result)[1] or {}).get("ratio") for result in results], share=share)
    filters = {
        "Model": {section["id"]: section["name"] for section in sections},
        "On": {f"on-{row['place']}": row["place"] for row in rows},
        **verdict_filter(results),
    }
    return {"rows": rows, "orders": ORDERS, "filters": {name: each for name, each in filters.items() if len(each) > 1}}


def verdict_filter(results):
    """Return {"Verdict": {class of the rows: label}}."""
    return {"Verdict": {class_of(result): result["verdict"] for result in results}}


def class_of(result):
    """Return the class by which `verdict_filter` finds a row."""
    return f"is-{result['verdict'].replace(' ', '-') if result['verdict'] in VERDICT_ORDER else 'other'}"


def set_places(rows, results, **falling):
    """Give each row its "places": {order: number}. `falling` begin with the greatest; what has no figure comes last."""
    keys = {
        "run": range(len(results)),
        "verdict": [VERDICT_ORDER.get(result["verdict"], len(VERDICT_ORDER)) for result in results],
        "time": [(result["time_ms"] or {}).get("median") for result in results],
        **{order: [value and -value for value in values] for order, values in falling.items()},
    }
    for row in rows:
        row["places"] = {}
    for order, values in keys.items():
        ranked = sorted(range(len(rows)), key=lambda index, of=values: (of[index] is None, of[index] or 0, index))
        for place, index in enumerate(ranked):
            rows[index]["places"][order] = place


def _row(result, variant):
    check, (best, ratio), share = result["check"] or {}, figures.headline(result), figures.share_of_floor(result)
    return {
        "variant": variant,
        "verdict": mark(result["verdict"]),
        "reason": "" if figures.meets(result) else variant["reason"],
        "checks": [
            ("outputs", _entries(check, "probes")),
            ("gradients", _gradients(check)),
            ("behaviour", _entries(check, "behaviour")),
            ("own kernels", _work(check)),
            ("mutants rejected", _mutants(check)),
        ],
        "build": with_unit(result["build_seconds"], " s"),
        "cached": result["build_seconds"] is not None and not result["built"],
        "time": with_unit((result["time_ms"] or {}).get("median"), " ms"),
        "speedup": figures.labelled(with_unit(ratio["ratio"], "x"), result) if ratio else NOTHING,
        "over": figures.baseline_name(best) if ratio else "",
        "share": with_unit(share and 100 * share, "%"),
        "outcome": mark(figures.outcome_verdict(result)),
    }


def _entries(check, key):
    """How many probes, or checks of the behaviour, came out right."""
    found = checks.sorted_out(check.get(key) or {})
    if found["wrong"]:
        return Mark(BAD, f"wrong: {', '.join(found['wrong'])}")
    if found["noted"]:
        return Mark(UNKNOWN, f"{len(found['right'])} right, noted: {', '.join(found['noted'])}")
    return Mark(GOOD, f"{len(found['right'])} right") if found["right"] else Mark(UNKNOWN, "not run")


def _gradients(check):
    word = figures.gradient_verdict(check)
    if word in (NOTHING, "none"):
        return Mark(UNKNOWN, "not checked" if word == NOTHING else "forward only")
    wrong = [name for name, found in check["gradients"].items() if not figures.is_within(found)]
    return Mark(BAD, f"wrong: {', '.join(wrong)}") if wrong else Mark(GOOD, f"{len(check['gradients'])} right")


def _work(check):
    work = check.get("work")
    if not work or work.get("note"):
        return Mark(UNKNOWN, work["note"] if work else "not looked at")
    share = work.get("own_share")
    is_good = share is None or share >= MOSTLY
    return Mark(GOOD if is_good else UNKNOWN, "called" if share is None else with_unit(100 * share, "%"))


def _mutants(check):
    told = check.get("mutants_rejected")
    return Mark(UNKNOWN, "not counted") if not told else Mark(UNKNOWN if check.get("mutants_survived") else GOOD, told)
