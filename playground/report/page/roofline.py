"""The roofline plot: each variant and baseline under the ceilings that were measured in the same run.

All that computes the same model stands in one column, that of the least work (stopwatch.floors): how high it stands is how fast
it does that work, and how far below the roof, how far from the floor. Eager PyTorch stands there a second time, by what its
operators really move and do.
"""

import math
import re
from dataclasses import dataclass

from playground.report.figures import significant
from playground.report.page import svg

VARIANT, BASELINE, AS_WRITTEN = "variant", "baseline", "as written"
LABEL = 11  # units between the baselines of two labels, at least
ROW, LETTER, LONGEST_NAME = 12, 5.6, 30  # of the models' names: units from one to the next, of a letter; letters
WIDEST_LABEL = {True: 60, False: 110}  # of short names, of whole ones
COLUMN = {"color": svg.BASELINE, "linewidth": 0.8, "linestyle": (0, (2, 2)), "zorder": 2}
RATES = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"))
BANDWIDTHS = ((1e12, "TB/s"), (1e9, "GB/s"))
MARKS = {
    VARIANT: {"marker": "o", "color": svg.VARIANT, "markersize": 7, "zorder": 6},
    BASELINE: {"marker": "s", "color": svg.PAPER, "mec": svg.BASELINE, "mew": 1.3, "markersize": 6, "zorder": 5},
    AS_WRITTEN: {"marker": "D", "color": svg.PAPER, "mec": svg.FLOOR, "mew": 1.3, "markersize": 6, "zorder": 5},
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


@dataclass(frozen=True)
class Roofs:
    """Bytes a second, and {"TF32": FLOPs a second, ...}."""

    bandwidth: float
    rates: dict

    @classmethod
    def of(cls, ceilings):
        rates = {"fp32": ceilings["fp32_flops"], "TF32": ceilings.get("tf32_flops"), "fp16": ceilings.get("fp16_flops")}
        bandwidth = max(ceilings["read_bytes_per_second"], ceilings["copy_bytes_per_second"])
        return cls(bandwidth, {name: rate for name, rate in rates.items() if rate})

    @property
    def highest(self):
        return max(self.rates.values())


@dataclass(frozen=True)
class Size:
    width: int
    height: int
    short_names: bool


WIDE, NARROW = Size(1000, 470, False), Size(360, 400, True)


def chart(points, ceilings, size, name, title):
    """An <svg> of the points under the roofs; '' where there is nothing to place or to measure it by."""
    points = [point for point in points if min(point.work["flops"], point.work["bytes"], point.milliseconds) > 0]
    if not points or not ceilings:
        return ""
    roofs = Roofs.of(ceilings)
    with svg.style():
        figure = svg.figure(size.width, size.height)
        left, right, top, bottom = 44, size.width - 8, size.height - 14, 42
        box = [left / size.width, bottom / size.height, (right - left) / size.width, (top - bottom) / size.height]
        axes = figure.add_axes(box, xscale="log", yscale="log")
        axes.patch.set_visible(False)
        unit, unit_name = next((each for each in RATES if roofs.highest >= each[0]), RATES[-1])
        _limit(axes, points, roofs)
        _draw_axes(axes, unit, unit_name)
        place = _Placer(axes, size, box)
        _draw_roofs(axes, roofs, place)
        _draw_columns(axes, points, roofs, place)
        _draw_points(axes, points, place)
        return svg.element(figure, name, title, _in_words(points, roofs, unit, unit_name))


def _limit(axes, points, roofs):
    intensities = [point.intensity for point in points]
    ridge = roofs.highest / roofs.bandwidth
    axes.set_xlim(min(intensities) / 3, max(max(intensities) * 4, ridge * 2.5))
    axes.set_ylim(min(point.rate for point in points) / 3, max(roofs.highest, *(point.rate for point in points)) * 2)


def _draw_axes(axes, unit, unit_name):
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    for axis, per, label in ((axes.xaxis, 1, "FLOP per byte"), (axes.yaxis, unit, "")):
        low, high = axis.get_view_interval()
        decades = [10.0**k * per for k in range(-9, 10)]
        ticks = [tick for tick in decades if low <= tick <= high]
        if len(ticks) < 2:
            ticks = [step * tick for tick in decades for step in (1, 2, 5) if low <= step * tick <= high]
        axis.set_ticks(ticks, labels=[f"{tick / per:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
        axis.set_label_text(label)
    axes.tick_params(length=3, width=0.6, colors=svg.SOFT, labelsize=10)
    axes.xaxis.label.set(color=svg.SOFT, size=10.5)
    look = {"va": "bottom", "fontsize": 10.5, "color": svg.SOFT}
    axes.text(0.0, 1.0, f"{unit_name} of useful work", transform=axes.transAxes, **look)
    axes.grid(True, color=svg.FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


class _Placer:
    """Data to units of the drawing, to keep labels apart and to turn them along a slope."""

    def __init__(self, axes, size, box):
        self.short = size.short_names
        (self._x0, x1), (self._y0, y1) = axes.get_xlim(), axes.get_ylim()
        self.width = box[2] * size.width
        self._a_decade_x = box[2] * size.width / math.log10(x1 / self._x0)
        self._a_decade_y = box[3] * size.height / math.log10(y1 / self._y0)
        self.slope = math.degrees(math.atan2(self._a_decade_y, self._a_decade_x))

    def x(self, intensity):
        return self._a_decade_x * math.log10(intensity / self._x0)

    def units(self, rate):
        return self._a_decade_y * math.log10(rate / self._y0)

    def above(self, rate, units):
        """The rate that lies so many units above another."""
        return rate * 10 ** (units / self._a_decade_y)

    def name(self, name):
        """Where there is little room, 'v3' of a variant's name and 'compile' of torch.compile's."""
        name = name.removeprefix("torch.") if self.short else name
        short = re.match(r"(v\d+|cpu)_", name)
        return short[1] if self.short and short else name if len(name) <= 22 else name[:21] + "…"


def _draw_roofs(axes, roofs, place):
    low, high = axes.get_xlim()
    ridge = roofs.highest / roofs.bandwidth
    axes.plot([low, ridge], [low * roofs.bandwidth, roofs.highest], color=svg.FLOOR, linewidth=1.8)
    start = max(low, axes.get_ylim()[0] / roofs.bandwidth) * 1.25
    per, unit = next((each for each in BANDWIDTHS if roofs.bandwidth >= each[0]), BANDWIDTHS[-1])
    text = f"memory, {significant(roofs.bandwidth / per)} {unit}"
    turned = {"rotation": place.slope, "rotation_mode": "anchor"}
    axes.annotate(
        text, (start, start * roofs.bandwidth), (-4, 6), textcoords="offset points", color=svg.FLOOR, fontsize=10.5, **turned
    )
    for name, rate in roofs.rates.items():
        axes.plot([rate / roofs.bandwidth, high], [rate, rate], color=svg.FLOOR, linewidth=1.8)
        per, unit = next((each for each in RATES if rate >= each[0]), RATES[-1])
        text = f"{name}, {significant(rate / per)} {unit}"
        above = {"textcoords": "offset points", "ha": "right", "color": svg.FLOOR, "fontsize": 10.5}
        axes.annotate(text, (high, rate), (-2, 5), **above)


def _draw_columns(axes, points, roofs, place):
    """Each model's least work as a line up to the roof, with its name at the foot.

    Each name has a row of its own and stands left of its line. Lines further right reach further down, so that none crosses a
    name. Where there is no room at the left, it is the same the other way round.
    """
    bottom = axes.get_ylim()[0]
    columns = sorted(
        {point.model: point.intensity for point in points if point.kind != AS_WRITTEN}.items(), key=lambda each: each[1]
    )
    is_left = place.x(columns[0][1]) > LETTER * min(len(columns[0][0]), LONGEST_NAME)
    for row, (model, intensity) in enumerate(reversed(columns) if is_left else columns):
        top = min(roofs.highest, intensity * roofs.bandwidth)
        axes.plot([intensity] * 2, [place.above(bottom, 4 + ROW * row), top], **COLUMN)
        room = LONGEST_NAME if is_left else min(LONGEST_NAME, int((place.width - place.x(intensity) - 4) / LETTER))
        name = model if len(model) <= room else model[: room - 1] + "…"
        foot = {"textcoords": "offset points", "ha": "right" if is_left else "left", "fontsize": 10, "color": svg.SOFT}
        axes.annotate(name, (intensity, bottom), (-4 if is_left else 4, 5 + ROW * row), **foot)


def _draw_points(axes, points, place):
    """Variants, eager and the fastest baseline, and what eager does as it is written; the others are in the table.

    Where a model has several sizes, each of PyTorch's names stands once.
    """
    drawn = sorted((point for point in points if point.labelled), key=lambda each: (each.kind != VARIANT, -each.rate))
    eager = {point.model: point for point in drawn if point.kind == BASELINE and point.name == "eager"}
    for point in drawn:
        axes.plot([point.intensity], [point.rate], linestyle="none", **MARKS[point.kind])
        if point.kind == AS_WRITTEN and point.model in eager:
            other = eager[point.model]
            ends = [point.intensity, other.intensity], [point.rate, other.rate]
            axes.plot(*ends, color=svg.SOFT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=2)  # behind the names
    is_right, taken, named = _sides(points, place), {}, set()
    for point in drawn:
        name = point.model, point.kind, point.name
        if point.kind == VARIANT or name not in named:
            named.add(name)
            _draw_label(axes, point, place, taken.setdefault(point.model, []), is_right)


def _sides(points, place):
    """{model: whether its labels stand right of its column}: not where the next column is too near."""
    columns = {point.model: place.x(point.intensity) for point in points if point.kind != AS_WRITTEN}
    return {
        model: not any(0 < other - x < WIDEST_LABEL[place.short] for other in columns.values()) for model, x in columns.items()
    }


def _draw_label(axes, point, place, taken, is_right):
    """Beside the point, moved up or down as far as `taken` heights of its column make it; above it where it is in no column."""
    if point.kind == AS_WRITTEN:
        above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 10.5, "color": svg.SOFT}
        axes.annotate("" if place.short else point.name, (point.intensity, point.rate), **above)
        return
    at = place.units(point.rate)
    steps = sorted((step * LABEL / 4 for step in range(-400, 401)), key=abs)
    free = next((at + step for step in steps if all(abs(at + step - other) >= LABEL for other in taken)), at)
    taken.append(free)
    strong = {"weight": "bold", "color": svg.INK} if point.kind == VARIANT else {"color": svg.SOFT}
    offset = {
        "xytext": (7 if is_right[point.model] else -7, free - at - 3.5),
        "textcoords": "offset points",
        "fontsize": 10.5,
        "zorder": 7,
    }
    side = "left" if is_right[point.model] else "right"
    axes.annotate(place.name(point.name), (point.intensity, point.rate), ha=side, **offset, **strong)


def _in_words(points, roofs, unit, unit_name):
    per, bandwidth = next((each for each in BANDWIDTHS if roofs.bandwidth >= each[0]), BANDWIDTHS[-1])
    ceilings = [f"memory {significant(roofs.bandwidth / per)} {bandwidth}"]
    ceilings += [f"{name} {significant(rate / unit)} {unit_name}" for name, rate in roofs.rates.items()]
    placed = [(point, significant(point.intensity), significant(point.rate / unit)) for point in points]
    words = [f"{each.model}, {each.name}: {x} FLOP per byte, {y} {unit_name}" for each, x, y in placed]
    return f"Ceilings: {', '.join(ceilings)}. " + "; ".join(words) + "."
