"""The roofline of each model: its variants and PyTorch under the ceilings that were measured in the same run.

All that computes the model at one size stands in one column, that of the least work (floor.bound): how high it stands is
how fast it does that work, and how far below the roof, how far from the floor. Eager PyTorch stands there a second time, by
what its operators really move and do.
"""

import math
from dataclasses import dataclass

import numpy as np

from playground.record import Work
from playground.report import drawing
from playground.report.drawing import BASELINE, FAINT, FLOOR, INK, PAPER, SOFT, VARIANT
from playground.report.figures import baseline_medians, baseline_name, fastest_baseline, inputs_text
from playground.report.text import grouped, one_line, significant, with_unit

OF_VARIANT, OF_BASELINE, AS_WRITTEN = "variant", "baseline", "as written"
FEWEST = 2  # variants; of fewer the table of verdicts says it all
WIDTH, HEIGHT, LINE, LETTER = 384, 300, 12, 5.6  # units: of the chart, from one line of text to the next, of a letter
COLUMN_AT = 0.55  # of the width; right of it stand the names
TERA, UNIT, MEMORY = 1e12, " TFLOP/s", "memory {} TB/s"
MARKS = {
    OF_VARIANT: {"marker": "o", "color": VARIANT, "markersize": 7, "zorder": 6},
    OF_BASELINE: {"marker": "s", "color": PAPER, "mec": BASELINE, "mew": 1.3, "markersize": 6, "zorder": 5},
    AS_WRITTEN: {"marker": "D", "color": PAPER, "mec": FLOOR, "mew": 1.3, "markersize": 6, "zorder": 5},
}


@dataclass(frozen=True)
class Point:
    """`work` is what one step moves and computes, which takes `milliseconds`."""

    name: str
    kind: str
    work: Work
    milliseconds: float

    @property
    def intensity(self):
        return self.work.flops / self.work.bytes

    @property
    def rate(self):
        """Return TFLOPs a second."""
        return self.work.flops / self.milliseconds * 1e3 / TERA


def points_of(results):
    """Return {(model, inputs): points} of the results of one place; a result that did not record its work has another's."""
    found, timed = {}, [result for result in results if result.time_ms]
    for key, own in grouped(timed, lambda result: (one_line(result.model), inputs_text(result))).items():
        medians, works = baseline_medians(own), [each.work for each in own if each.work and each.work.least]
        if not works or min(works[0].least.bytes, works[0].least.flops) <= 0:
            continue
        work = works[0]
        shown = {name: medians[name] for name in ("eager", fastest_baseline(medians)) if name in medians}
        points = [Point(one_line(each.variant), OF_VARIANT, work.least, each.time_ms.median) for each in own]
        points += [Point(baseline_name(name), OF_BASELINE, work.least, ms) for name, ms in shown.items()]
        if "eager" in medians and (written := work.as_written) and min(written.bytes, written.flops) > 0:
            points.append(Point("operators", AS_WRITTEN, written, medians["eager"]))
        found[key] = [point for point in points if point.milliseconds > 0]
    return found


def chart(points, ceilings, name, title):
    """Return the <svg> of one model's points; None where they are too few, or no ceilings are there to measure them by."""
    if sum(point.kind == OF_VARIANT for point in points) < FEWEST or not ceilings:
        return None
    names = {"fp32": "fp32_flops", "TF32": "tf32_flops", "fp16": "fp16_flops"}
    roofs = {name: rate / TERA for name, key in names.items() if (rate := getattr(ceilings, key))}
    bandwidth = max(ceilings.read_bytes_per_second, ceilings.copy_bytes_per_second) / TERA
    with drawing.style():
        figure = drawing.figure(WIDTH, HEIGHT)
        place = [44 / WIDTH, 40 / HEIGHT, (WIDTH - 106) / WIDTH, (HEIGHT - 60) / HEIGHT]
        axes = figure.add_axes(place, xscale="log", yscale="log")
        _draw_axes(axes, points, roofs, bandwidth)
        _draw_points(axes, points)
        words = [f"{each.name}: {significant(each.intensity)} FLOP per byte, {with_unit(each.rate, UNIT)}" for each in points]
        ceiling = [MEMORY.format(significant(bandwidth)), *(f"{name} {with_unit(rate, UNIT)}" for name, rate in roofs.items())]
        return drawing.svg(figure, name, title, f"Ceilings: {', '.join(ceiling)}. {'; '.join(words)}.")


def _draw_axes(axes, points, roofs, bandwidth):
    highest, column = max(roofs.values()), points[0].intensity
    left = min(point.intensity for point in points) / 4
    right = max(left * (column / left) ** (1 / COLUMN_AT), highest / bandwidth * 2)
    left = min(left, column ** (1 / (1 - COLUMN_AT)) / right ** (COLUMN_AT / (1 - COLUMN_AT)))
    axes.set(xlim=(left, right), ylim=(min(point.rate for point in points) / 3, max(highest, *(p.rate for p in points)) * 1.5))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        ticks = [10.0**k for k in range(-9, 10) if low <= 10.0**k <= high]
        axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.tick_params(length=3, width=0.6, colors=SOFT, labelsize=10)
    axes.set_xlabel("FLOP per byte", color=SOFT, size=10.5)
    look = {"fontsize": 10.5, "color": FLOOR}
    axes.text(0, 1.02, f"{UNIT.strip()} of useful work", transform=axes.transAxes, fontsize=10.5, color=SOFT)
    ridge, low = highest / bandwidth, max(left, axes.get_ylim()[0] / bandwidth)
    axes.plot([low, ridge], [low * bandwidth, highest], color=FLOOR, linewidth=1.8)
    (x, y), (end, top) = axes.transData.transform([(low, low * bandwidth), (ridge, highest)])
    turned = {"rotation": math.degrees(math.atan2(top - y, end - x)), "rotation_mode": "anchor", "textcoords": "offset points"}
    axes.annotate(MEMORY.format(significant(bandwidth)), (low, low * bandwidth), (12, 20), **turned, **look)
    for name, rate in roofs.items():
        axes.plot([rate / bandwidth, right], [rate, rate], color=FLOOR, linewidth=1.8)
        axes.text(right, rate, f" {name} {significant(rate)}", va="center", **look)
    ends = axes.get_ylim()[0], min(highest, column * bandwidth)
    axes.plot([column] * 2, ends, "--", color=BASELINE, linewidth=0.8, zorder=2)


def _draw_points(axes, points):
    """Draw the marks, and the names beside the column, each as near to its mark as the others let it: on the right of it, or
    on the left where `operators` stand on the right.
    """
    for point in points:
        axes.plot([point.intensity], [point.rate], linestyle="none", **MARKS[point.kind])
    per_unit = axes.figure.dpi / drawing.UNITS_AN_INCH
    room = int((1 - COLUMN_AT) * axes.bbox.width / per_unit / LETTER)
    column = sorted((point for point in points if point.kind != AS_WRITTEN), key=lambda point: point.rate)
    places = [axes.transData.transform((1, point.rate))[1] / per_unit for point in column]
    # From below: no name stands lower than the axes, or nearer than a line to the one below it.
    lines = LINE * np.arange(len(column))
    heights = np.maximum.accumulate(np.maximum(places, axes.bbox.y0 / per_unit + LINE / 2) - lines) + lines
    side = -1 if any(point.intensity > column[0].intensity for point in points) else 1
    for point, place, height in zip(column, places, heights, strict=True):
        look = {"weight": "bold", "color": INK} if point.kind == OF_VARIANT else {"color": SOFT}
        name = point.name if len(point.name) <= room else point.name[: room - 1] + "…"
        look |= {"textcoords": "offset points", "va": "center_baseline", "ha": "left" if side > 0 else "right"}
        axes.annotate(name, (point.intensity, point.rate), (8 * side, height - place), fontsize=10.5, zorder=7, **look)
    for point in points:
        if point.kind == AS_WRITTEN:
            look = {"textcoords": "offset points", "ha": "center", "fontsize": 10.5, "color": SOFT}
            axes.annotate(point.name, (point.intensity, point.rate), (0, -16), **look)
