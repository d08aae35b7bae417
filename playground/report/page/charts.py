"""Which points of the roofline the results of one place give."""

from playground.report.figures import baseline_medians, baseline_name, one_line, ordered_baselines
from playground.report.page import roofline


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
            label = "operators"
            points.append(roofline.Point(model, label, roofline.AS_WRITTEN, work["as_written"], medians["eager"], True))
        for name in ordered_baselines(medians):
            label = one_line(baseline_name(name))
            points.append(
                roofline.Point(model, label, roofline.BASELINE, work["least"], medians[name], name in ("eager", fastest))
            )
        for result in of_model:
            median = result["time_ms"]["median"]
            points.append(roofline.Point(model, one_line(result["variant"]), roofline.VARIANT, work["least"], median, True))
    return points
