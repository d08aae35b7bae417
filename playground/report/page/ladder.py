"""The ladder as a picture: PyTorch and the variants as bars whose length is their speed, with the floor at the end.

A bar's length is floor / time, on a linear scale from 0: twice as long is twice as fast. On a linear scale of milliseconds the
slowest rung would leave the fast ones no length at all. Where there is no floor, the fastest stands for it.
"""

import statistics

from playground.report.figures import (
    BEYOND_FLOOR,
    FORWARD,
    GRAPH,
    baseline_medians,
    baseline_name,
    fastest_baseline,
    headline,
    labelled,
    ordered_baselines,
    timed_modes,
    with_unit,
)

BASELINE, VARIANT, GRAPHED = "baseline", "variant", "graphed"  # kinds of rows, and classes of the style sheet


def pictures(members, brief=False):
    """A picture for forward and for each training mode of (result, what is shown of it) at one place and size.

    `brief`: of forward alone, without CUDA graphs, and of PyTorch only eager and the fastest.
    """
    titles = dict.fromkeys(title for result, _ in members for title in timed_modes(result) if GRAPH not in title)
    made = (_picture(members, title, brief) for title in ([FORWARD] if brief else titles))
    return [each for each in made if each]


def _picture(members, title, brief):
    """None where nothing has a time. `floor_at` and a row's `length` are percentages of the scale."""
    timings = [(result, shown, timed_modes(result).get(title) or {}) for result, shown in members]
    medians = baseline_medians([each for _, _, each in timings])
    fastest = fastest_baseline(medians)
    floors = [each["floor_ms"] for _, _, each in timings if each.get("floor_ms")]
    rows = [_baseline(name, medians) for name in _chosen(medians, brief)]
    for result, shown, each in timings:
        if each.get("time_ms") or title == FORWARD:
            rows.append(_variant(result, shown, each, fastest))
        if not brief and (graphed := each.get("graphed") or {}).get("time_ms"):
            rows.append({**_variant(result, None, graphed, fastest), "name": "... in a CUDA graph", "kind": GRAPHED})
    times = [row["ms"] for row in rows if row["ms"]]
    if not times:
        return None
    floor = statistics.median(floors) if floors else None
    for row in rows:
        row["share"] = (row.pop("floor_ms", None) or floor or min(times)) / row["ms"] if row["ms"] else None
        row["time"] = with_unit(row["ms"], " ms")
    longest = max([1.0, *(row["share"] for row in rows if row["ms"])])
    for row in rows:
        row["length"] = f"{100 * row['share'] / longest:.2f}" if row["ms"] else None
        row["remark"] = BEYOND_FLOOR if floor and row["ms"] and row["share"] > 1 else ""
    return {
        "title": title,
        "floor": with_unit(floor, " ms"),
        "has_floor": floor is not None,
        "floor_at": f"{100 / longest:.2f}",
        "rows": rows,
    }


def _chosen(medians, brief):
    fastest = fastest_baseline(medians)
    return [name for name in ordered_baselines(medians) if not brief or name in ("eager", fastest)]


def _baseline(name, medians):
    shown = f"PyTorch {baseline_name(name).removeprefix('torch.')}"
    fastest = "fastest" if name == fastest_baseline(medians) else ""
    return {"name": shown, "id": None, "kind": BASELINE, "ms": medians[name], "ratio": "", "over": fastest, "why": None}


def _variant(result, shown, timings, fastest):
    """`over` is told where that is another baseline than the `fastest`; `why` is the Mark of a variant that has no time."""
    best, ratio = headline(timings)
    time = (timings.get("time_ms") or {}).get("median")
    return {
        "name": result["variant"],
        "id": shown and shown["id"],
        "kind": VARIANT,
        "ms": time,
        "floor_ms": timings.get("floor_ms"),
        "ratio": labelled(with_unit(ratio["ratio"], "x"), result) if ratio else "",
        "over": f"over {baseline_name(best)}" if ratio and best != fastest else "",
        "why": None if time else shown and shown["verdict"],
    }
