"""The table of verdicts, whose rows can be sorted and filtered without a script.

Every row knows its place in each order as a number, `--by-<key>`, and has a class for each filter it passes. The style sheet
takes the order, and hides the rows, whose radio buttons are on.
"""

from playground.report import checks, contract, figures
from playground.report.text import NOTHING, scientific, with_unit

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
SIGNS = {GOOD: "✓", BAD: "✗", UNKNOWN: "–"}
STATES = {"pass": GOOD, "ok": GOOD, "faster": GOOD, "fail": BAD, "error": BAD, "slower": BAD}
MOSTLY = 0.5  # of the GPU's time, for a variant's own kernels to be called its work
ORDERS = {"run": "as run", "verdict": "verdict", "time": "time", "speedup": "speed-up", "share": "of the floor"}


def mark(word, state=None):
    """Return how something went, in a sign, a word and a colour, any of which would do.

    Without a `state` the word is a verdict, an outcome such as 'faster in fp16', or 'ok' and 'fail'.
    """
    state = state or STATES.get(word.split(" ")[0], UNKNOWN)
    return {"state": state, "sign": SIGNS[state], "text": "not run" if word == NOTHING else word}


def errors(check):
    """Return an error beside PyTorch's and what is allowed, as texts, and whether it is within."""
    own, eager, allowed = (check.get(key) for key in ("max_error", "eager_error", "allowed"))
    if check.get("complaint"):
        within = mark("wrong", BAD)
    elif allowed is None:
        within = mark("not compared")
    else:
        within = mark("within", GOOD) if figures.is_within(check) else mark("beyond", BAD)
    of_eager = with_unit(own / eager if own is not None and eager else None, "x")
    texts = {"own": scientific(own), "eager": scientific(eager), "of_eager": of_eager, "allowed": scientific(allowed)}
    return texts | {"mark": within}


def shown(sections, places):
    """Return {"rows", "orders", "filters"}. `sections` are those of the page's models; `places` name where a result ran."""
    rows = []
    members = [(section, *each) for section in sections for each in section["members"]]
    results = [result for _, result, _ in members]
    for section, result, variant in members:
        place = places.get(result["ran_on"], "nowhere")
        classes = f"{section['id']} on-{place} {class_of(result)}"
        sizes = figures.size_note(result)
        rows.append(_row(result, variant) | {"model": section, "place": place, "sizes": sizes, "classes": classes})
    ratios = [(figures.headline(result)[1] or {}).get("ratio") for result in results]
    set_places(rows, results, speedup=ratios, share=[figures.share_of_floor(result) for result in results])
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
    return f"is-{result['verdict'].replace(' ', '-')}"


def set_places(rows, results, **falling):
    """Give each row its "places": {order: number}. `falling` begin with the greatest; what has no figure comes last."""
    keys = {
        "run": range(len(results)),
        "verdict": [contract.VERDICTS.index(result["verdict"]) for result in results],
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
    check, texts = result["check"] or {}, figures.texts(result)
    work, told = check.get("work") or {"note": "not looked at"}, check.get("mutants_rejected")
    share = work.get("own_share")
    own = work["note"] or ("called" if share is None else with_unit(100 * share, "%"))
    return {
        "variant": variant,
        "verdict": mark(result["verdict"]),
        "reason": "" if figures.meets(result) else variant["reason"],
        "checks": {
            "outputs": _entries(check.get("probes")),
            "gradients": _gradients(check),
            "behaviour": _entries(check.get("behaviour")),
            "own kernels": mark(own, UNKNOWN if work["note"] or (share is not None and share < MOSTLY) else GOOD),
            "mutants rejected": mark(told or "not counted", GOOD if told and not check.get("mutants_survived") else UNKNOWN),
        },
        "build": with_unit(result["build_seconds"], " s"),
        "cached": result["build_seconds"] is not None and not result["built"],
        "time": with_unit((result["time_ms"] or {}).get("median"), " ms"),
        "speedup": texts["speed-up"],
        "over": "" if texts["over"] == NOTHING else texts["over"],
        "share": texts["of floor"],
        "outcome": mark(texts["outcome"]),
    }


def _entries(entries):
    """How many probes, or checks of the behaviour, came out right."""
    found = checks.sorted_out(entries or {})
    if found["wrong"]:
        return mark(f"wrong: {', '.join(found['wrong'])}", BAD)
    if noted := [name for name in entries or () if name in (*found["noted"], *found[checks.REFUSED])]:
        return mark(f"{len(found['right'])} right, noted: {', '.join(noted)}")
    return mark(f"{len(found['right'])} right", GOOD) if found["right"] else mark("not run")


def _gradients(check):
    word = figures.gradient_verdict(check)
    if word in (NOTHING, "none"):
        return mark("not checked" if word == NOTHING else "forward only")
    wrong = [name for name, found in check["gradients"].items() if not figures.is_within(found)]
    return mark(f"wrong: {', '.join(wrong)}", BAD) if wrong else mark(f"{len(check['gradients'])} right", GOOD)
