"""The roofline plot: each variant and baseline under the ceilings that were measured in the same run.

All that computes the same model stands in one column, that of the least work (stopwatch.floors): how high it stands is how fast
it does that work, and how far below the roof, how far from the floor. Eager PyTorch stands there a second time, by what its
operators really move and do.
"""

import math
import re
from dataclasses import dataclass

from playground.report import drawing
from playground.report.drawing import BASELINE, FAINT, FLOOR, INK, PAPER, SOFT, VARIANT
from playground.report.figures import baseline_medians, baseline_name, fastest_baseline
from playground.report.text import one_line, significant

OF_VARIANT, OF_BASELINE, AS_WRITTEN = "variant", "baseline", "as written"
FEWEST = 2  # variants; of fewer the table says it all
LETTER, LINE = 5.6, 12  # units: of a letter, from one line of text to the next
RATES = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"))
BANDWIDTHS = ((1e12, "TB/s"), (1e9, "GB/s"))
SIZES = {"wide": (1000, 470), "narrow": (360, 400)}
FRAME = 44, 8, 14, 42  # units left, right, above and below the axes
MARKS = {
    OF_VARIANT: {"marker": "o", "color": VARIANT, "markersize": 7, "zorder": 6},
    OF_BASELINE: {"marker": "s", "color": PAPER, "mec": BASELINE, "mew": 1.3, "markersize": 6, "zorder": 5},
    AS_WRITTEN: {"marker": "D", "color": PAPER, "mec": FLOOR, "mew": 1.3, "markersize": 6, "zorder": 5},
}


@dataclass(frozen=True)
class Point:
    """`work` is {"bytes", "flops"} of one step, which takes `milliseconds`. Only what is `labelled` is drawn, with its name."""

    model: str
    name: str
    kind: str
    work: dict
    milliseconds: float
    labelled: bool = False

    @property
    def intensity(self):
        return self.work["flops"] / self.work["bytes"]

    @property
    def rate(self):
        """FLOPs a second."""
        return self.work["flops"] / self.milliseconds * 1e3


class Roofs:
    """Bytes a second, and {"TF32": FLOPs a second, ...}."""

    def __init__(self, ceilings):
        rates = {"fp32": ceilings["fp32_flops"], "TF32": ceilings.get("tf32_flops"), "fp16": ceilings.get("fp16_flops")}
        self.rates = {name: rate for name, rate in rates.items() if rate}
        self.bandwidth = max(ceilings["read_bytes_per_second"], ceilings["copy_bytes_per_second"])
        self.highest = max(self.rates.values())


def points_of(results):
    """Return the points of the results of one place.

    The work is that of the model at its sizes, so a result that did not record it has that of one that did.
    """
    timed = [result for result in results if result["time_ms"]]
    sizes = [(one_line(result["model"]), str((result.get("shape") or {}).get("inputs"))) for result in timed]
    points = []
    for model, inputs in dict.fromkeys(sizes):
        own = [result for result, size in zip(timed, sizes, strict=True) if size == (model, inputs)]
        work, medians = next((each["work"] for each in own if each.get("work")), None), baseline_medians(own)
        if not work:
            continue
        if "eager" in medians and "as_written" in work:
            points.append(Point(model, "operators", AS_WRITTEN, work["as_written"], medians["eager"], True))
        for name, median in medians.items():
            is_labelled = name in ("eager", fastest_baseline(medians))
            points.append(Point(model, one_line(baseline_name(name)), OF_BASELINE, work["least"], median, is_labelled))
        for result in own:
            name, median = one_line(result["variant"]), result["time_ms"]["median"]
            points.append(Point(model, name, OF_VARIANT, work["least"], median, True))
    return [point for point in points if min(point.work["flops"], point.work["bytes"], point.milliseconds) > 0]


def charts(points, ceilings, place):
    """Return {"wide": <svg>, "narrow": <svg>}; {} where too few points are there, or no ceilings to measure them by."""
    if sum(point.kind == OF_VARIANT for point in points) < FEWEST or not ceilings:
        return {}
    return {kind: _chart(points, Roofs(ceilings), kind, place) for kind in SIZES}


def _chart(points, roofs, kind, place):
    width, height = SIZES[kind]
    left, right, above, below = FRAME
    with drawing.style():
        figure = drawing.figure(width, height)
        box = [left / width, below / height, (width - left - right) / width, (height - above - below) / height]
        axes = figure.add_axes(box, xscale="log", yscale="log")
        axes.patch.set_visible(False)
        _draw_axes(axes, points, roofs)
        labels = _Labels(axes, kind == "narrow")
        _draw_roofs(axes, roofs, labels)
        _draw_columns(axes, points, roofs, labels)
        _draw_points(axes, points, labels)
        words = _in_words(points, roofs)
        return drawing.svg(figure, f"roof-{place}-{kind}", f"Roofline, forward, on {place}", words)


def _with_unit(value, units):
    per, name = next((each for each in units if value >= each[0]), units[-1])
    return f"{significant(value / per)} {name}"


def _draw_axes(axes, points, roofs):
    unit, unit_name = next((each for each in RATES if roofs.highest >= each[0]), RATES[-1])
    intensities, rates = [point.intensity for point in points], [point.rate for point in points]
    axes.set_xlim(min(intensities) / 3, max(max(intensities) * 4, roofs.highest / roofs.bandwidth * 2.5))
    axes.set_ylim(min(rates) / 3, max(roofs.highest, *rates) * 2)
    axes.spines[["top", "right"]].set_visible(False)
    for axis, per in ((axes.xaxis, 1), (axes.yaxis, unit)):
        low, high = axis.get_view_interval()
        decades = [10.0**k * per for k in range(-9, 10)]
        ticks = [tick for tick in decades if low <= tick <= high]
        if len(ticks) < 2:
            ticks = [step * tick for tick in decades for step in (1, 2, 5) if low <= step * tick <= high]
        axis.set_ticks(ticks, labels=[f"{tick / per:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.tick_params(length=3, width=0.6, colors=SOFT, labelsize=10)
    axes.set_xlabel("FLOP per byte", color=SOFT, size=10.5)
    axes.text(0, 1, f"{unit_name} of useful work", transform=axes.transAxes, va="bottom", fontsize=10.5, color=SOFT)
    axes.grid(True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


class _Labels:
    """Texts beside places of the drawing, moved until none covers another, or a point."""

    def __init__(self, axes, is_short):
        self.axes, self.is_short = axes, is_short
        self.taken = []  # (left, bottom, right, top) in units

    def at(self, place):
        """Return where a place (intensity, rate) is, in units: a figure's dots are units (drawing.figure)."""
        return self.axes.transData.transform(place) * drawing.UNITS_AN_INCH / self.axes.figure.dpi

    def keep(self, place, left, bottom, right, top):
        x, y = self.at(place)
        self.taken.append((x + left, y + bottom, x + right, y + top))

    def short(self, name):
        """Return, where there is little room, 'v3' of a variant's name and 'compile' of torch.compile's."""
        name = name.removeprefix("torch.") if self.is_short else name
        number = re.match(r"(v\d+|cpu)_", name)
        return number[1] if self.is_short and number else name if len(name) <= 22 else name[:21] + "…"

    def put(self, place, text, **look):
        """Write beside a place, right of it where there is room, as near to its height as can be, and rather below than above.

        So texts of a column keep the order of their points, where they are put from above.
        """
        x, y = self.at(place)
        length = LETTER * len(text)
        end = self.at((self.axes.get_xlim()[1], place[1]))[0]
        for rise in (*range(0, -40, -3), *range(3, 91, 3), *range(-42, -90, -3)):
            for left in (x + 7, x - 7 - length):
                box = left, y + rise - LINE / 2, left + length, y + rise + LINE / 2
                if left >= FRAME[0] and box[2] <= end and not any(_overlap(box, other) for other in self.taken):
                    self.taken.append(box)
                    is_right = left > x
                    offset = {"xytext": (7 if is_right else -7, rise), "textcoords": "offset points", "va": "center_baseline"}
                    self.axes.annotate(text, place, ha="left" if is_right else "right", fontsize=10.5, **offset, **look)
                    return


def _overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _draw_roofs(axes, roofs, labels):
    low, high = axes.get_xlim()
    ridge = roofs.highest / roofs.bandwidth
    axes.plot([low, ridge], [low * roofs.bandwidth, roofs.highest], color=FLOOR, linewidth=1.8)
    look = {"textcoords": "offset points", "color": FLOOR, "fontsize": 10.5}
    start = max(low, axes.get_ylim()[0] / roofs.bandwidth) * 1.25
    first, last = (labels.at((x, x * roofs.bandwidth)) for x in (start, ridge))
    turned = {"rotation": math.degrees(math.atan2(*(last - first)[::-1])), "rotation_mode": "anchor"}
    text = f"memory, {_with_unit(roofs.bandwidth, BANDWIDTHS)}"
    axes.annotate(text, (start, start * roofs.bandwidth), (-4, 6), **look, **turned)
    for name, rate in roofs.rates.items():
        axes.plot([rate / roofs.bandwidth, high], [rate, rate], color=FLOOR, linewidth=1.8)
        text = f"{name}, {_with_unit(rate, RATES)}"
        axes.annotate(text, (high, rate), (-2, 5), ha="right", **look)
        labels.keep((high, rate), -LETTER * len(text), 0, 0, 18)


def _draw_columns(axes, points, roofs, labels):
    """Draw each model's least work as a line up to the roof, with its name at the foot, in a row of its own.

    Names stand left of their lines, and lines further right reach further down, so that none crosses a name. Where there is no
    room at the left, it is the same the other way round.
    """
    bottom, (left, right) = axes.get_ylim()[0], ((labels.at((x, 1))[0]) for x in axes.get_xlim())
    columns = {point.model: point.intensity for point in points if point.kind != AS_WRITTEN}
    columns = sorted(columns.items(), key=lambda each: each[1])
    side = -1 if labels.at((columns[0][1], bottom))[0] - left > LETTER * min(len(columns[0][0]), 30) else 1
    for row, (model, intensity) in enumerate(columns[::side]):
        (x, y), top = labels.at((intensity, bottom)), min(roofs.highest, intensity * roofs.bandwidth)
        dots = (y + 4 + LINE * row) * axes.figure.dpi / drawing.UNITS_AN_INCH
        foot = axes.transData.inverted().transform((0, dots))[1]
        axes.plot([intensity] * 2, [foot, top], color=BASELINE, linewidth=0.8, linestyle=(0, (2, 2)), zorder=2)
        room = 30 if side < 0 else int((right - x - 4) / LETTER)
        name = model if len(model) <= room else model[: room - 1] + "…"
        look = {"textcoords": "offset points", "ha": "right" if side < 0 else "left", "fontsize": 10, "color": SOFT}
        axes.annotate(name, (intensity, bottom), (4 * side, 5 + LINE * row), **look)
        ends = sorted((0, side * LETTER * len(name)))
        labels.keep((intensity, bottom), ends[0], LINE * row, ends[1], LINE * row + 14)
        labels.taken.append((*(labels.at((intensity, foot)) - 1), *(labels.at((intensity, top)) + 1)))  # no text crosses it


def _draw_points(axes, points, labels):
    """Draw variants, eager and the fastest baseline, and what eager does as it is written; the others are in the table.

    Where a model has several sizes, each of PyTorch's names stands once.
    """
    drawn = sorted((point for point in points if point.labelled), key=lambda each: (each.kind != OF_VARIANT, -each.rate))
    eager = {point.model: point for point in drawn if point.kind == OF_BASELINE and point.name == "eager"}
    for point in drawn:
        axes.plot([point.intensity], [point.rate], linestyle="none", **MARKS[point.kind])
        labels.keep((point.intensity, point.rate), -4, -4, 4, 4)
        if point.kind == AS_WRITTEN and (other := eager.get(point.model)):
            ends = [point.intensity, other.intensity], [point.rate, other.rate]
            axes.plot(*ends, color=SOFT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=2)
    named = set()
    for point in drawn:
        if point.kind == OF_VARIANT or (point.model, point.kind, point.name) not in named:
            named.add((point.model, point.kind, point.name))
            look = {"weight": "bold", "color": INK} if point.kind == OF_VARIANT else {"color": SOFT}
            labels.put((point.intensity, point.rate), labels.short(point.name), zorder=7, **look)


def _in_words(points, roofs):
    ceilings = [f"memory {_with_unit(roofs.bandwidth, BANDWIDTHS)}"]
    ceilings += [f"{name} {_with_unit(rate, RATES)}" for name, rate in roofs.rates.items()]
    placed = [f"{significant(each.intensity)} FLOP per byte, {_with_unit(each.rate, RATES)}" for each in points]
    words = [f"{each.model}, {each.name}: {at}" for each, at in zip(points, placed, strict=True)]
    return f"Ceilings: {', '.join(ceilings)}. {'; '.join(words)}."
