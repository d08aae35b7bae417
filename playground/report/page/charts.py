"""Which bars and points the results of one model, or of one place, give."""

from playground.report.figures import FORWARD, GRAPH, baseline_medians, baseline_name, one_line, ordered_baselines, timed_modes
from playground.report.page import bars, roofline


def bar_charts(results, name):
    """[(title, <svg>)]: one chart for forward and for each training mode, of results that share model, place and size."""
    charts = []
    titles = dict.fromkeys(title for result in results for title in timed_modes(result) if GRAPH not in title)
    for number, title in enumerate(titles):
        timings = [(result, timed_modes(result).get(title)) for result in results]
        floor = next((each["floor_ms"] for _, each in timings if each and each.get("floor_ms")), None)
        drawn = bars.chart(_bars(timings, title), floor, f"{name}-{number}", f"Times, {title}")
        if drawn:
            charts.append((title, drawn))
    return charts


def _bars(timings, title):
    medians = baseline_medians([each for _, each in timings if each])
    rows = [
        bars.Bar(one_line(baseline_name(name)), bars.BASELINE, _point(medians[name])) for name in ordered_baselines(medians)
    ]
    for result, each in timings:
        spread = (each or {}).get("time_ms")
        if spread or title == FORWARD:
            rows.append(bars.Bar(one_line(result["variant"]), bars.VARIANT, spread, _why_not(result)))
        graphed = ((each or {}).get("graphed") or {}).get("time_ms")
        if graphed:
            rows.append(bars.Bar("in a CUDA graph", bars.GRAPHED, graphed))
    return rows


def _point(median):
    return {"median": median, "p20": median, "p80": median}


def _why_not(result):
    return "not timed" if result["verdict"] == "pass" else f"{result['verdict']}, not timed"


def roofline_charts(results, ceilings, place):
    """(wide <svg>, narrow <svg>, points) of a place's forward passes; ('', '', []) where ceilings or work were not recorded."""
    points = _points(results)
    title = f"Roofline, forward, on {place}"
    wide, narrow = (
        roofline.chart(points, ceilings, size, f"roof-{place}-{kind}", title)
        for kind, size in (("wide", roofline.WIDE), ("narrow", roofline.NARROW))
    )
    return wide, narrow, points if wide else []


def _points(results):
    """The work is that of the model at its sizes, so a result that did not record it has that of one that did."""
    models = {}
    for result in results:
        if result["time_ms"]:
            models.setdefault((one_line(result["model"]), str((result.get("shape") or {}).get("inputs"))), []).append(result)
    points = []
    for (model, _), of_model in models.items():
        work, medians = next((each["work"] for each in of_model if each.get("work")), None), baseline_medians(of_model)
        if not work:
            continue
        fastest = min(medians, key=medians.get, default=None)
        if "eager" in medians and "as_written" in work:
            label = "eager, by what its operators do"
            points.append(roofline.Point(model, label, roofline.AS_WRITTEN, work["as_written"], medians["eager"]))
        for name in ordered_baselines(medians):
            label = one_line(baseline_name(name))
            points.append(roofline.Point(model, label, roofline.BASELINE, work["least"], medians[name], name == fastest))
        for result in of_model:
            median = result["time_ms"]["median"]
            points.append(roofline.Point(model, one_line(result["variant"]), roofline.VARIANT, work["least"], median, True))
    return points
