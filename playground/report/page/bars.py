"""Bar charts of times on a logarithmic scale, with the floor as a line."""

import math
from dataclasses import dataclass, replace

from playground.report.figures import with_unit
from playground.report.page import svg

WIDTH = 360  # readable as it is on a telephone; wider pages set charts side by side
LEFT, RIGHT, TOP, BOTTOM = 126, 354, 26, 34  # of the bars
ROW, BAR, TEXT = 19, 9, 11
ROOM_FOR_VALUE = 60  # right of the longest bar
LONGEST_LABEL = 20  # what fits beside the bars
VARIANT, GRAPHED, BASELINE = "variant", "graphed", "baseline"


@dataclass(frozen=True)
class Bar:
    """One row. `kind` is VARIANT, GRAPHED (a variant in a CUDA graph) or BASELINE.

    `spread` is {"median", "p20", "p80"} in ms, or None where `remark` says why there is none. `after` stands behind the time.
    """

    label: str
    kind: str
    spread: dict | None
    remark: str = ""
    after: str = ""


def chart(bars, floor_ms, name, title):
    """An <svg> of the bars, top to bottom; '' where none of them has a time."""
    times = [bar.spread["median"] for bar in bars if bar.spread and bar.spread["median"] > 0]
    if not times:
        return ""
    height = TOP + ROW * len(bars) + BOTTOM
    with svg.style():
        figure = svg.figure(WIDTH, height)
        axes = figure.add_axes([0, BOTTOM / height, 1, ROW * len(bars) / height])
        axes.set_axis_off()
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(ROW * len(bars), 0)
        scale = Scale(min([*times, floor_ms or math.inf]) / 1.6, max(times), LEFT, RIGHT - ROOM_FOR_VALUE)
        _draw_ticks(axes, scale, ROW * len(bars))
        if floor_ms:
            _draw_floor(axes, scale(floor_ms), floor_ms, ROW * len(bars))
        for row, bar in enumerate(bars):
            draw_bar(axes, scale, ROW * (row + 0.5), replace(bar, label=shortened(bar.label)))
        return svg.element(figure, name, title, in_words(bars, floor_ms))


class Scale:
    """Milliseconds, from `low` to `high`, to horizontal places from `left` to `right`, logarithmically."""

    def __init__(self, low, high, left, right):
        self.low, self.left = low, left
        self._unit = (right - left) / math.log10(high / low)

    def __call__(self, milliseconds):
        return max(self.left, self.left + self._unit * math.log10(milliseconds / self.low))

    def ticks(self, end):
        """Powers of ten up to the place `end`, with steps between them where there would be fewer than three."""
        for steps in ((1,), (1, 3), (1, 2, 5)):
            ticks = [step * 10.0**decade for decade in range(-6, 9) for step in steps]
            ticks = [tick for tick in ticks if tick >= self.low and self(tick) <= end]
            if len(ticks) >= 3:
                break
        return ticks


def draw_bar(axes, scale, middle, bar):
    """A label, the bar from the scale's left end to the median with a line from the 20th to the 80th percentile, the median."""
    weight, baseline = "bold" if bar.kind == VARIANT else "normal", middle + TEXT / 3
    axes.text(scale.left - 6, baseline, bar.label, ha="right", fontsize=TEXT, weight=weight)
    if not bar.spread or bar.spread["median"] <= 0:
        axes.text(scale.left + 5, baseline, bar.remark, fontsize=TEXT, color=svg.BAD)
        return
    length = scale(bar.spread["median"]) - scale.left
    # Variants are filled, baselines are frames, so that they differ without colour, too.
    look = {"facecolor": svg.PAPER, "edgecolor": svg.BASELINE, "linewidth": 1.2}
    if bar.kind != BASELINE:
        look = {"facecolor": svg.VARIANT if bar.kind == VARIANT else svg.GRAPHED}
    axes.barh(middle, length, height=BAR, left=scale.left, zorder=3, **look)
    ends = [scale(bar.spread[key]) for key in ("p20", "p80") if bar.spread[key] > 0]
    axes.plot(ends, [middle] * len(ends), color=svg.INK, linewidth=1.2, zorder=5)
    beyond = max([scale.left + length, *ends])
    axes.text(beyond + 5, baseline, with_unit(bar.spread["median"], " ms") + bar.after, fontsize=TEXT, zorder=6)


def _draw_ticks(axes, scale, bottom):
    for tick in scale.ticks(RIGHT - 10):
        axes.plot([scale(tick)] * 2, [0, bottom + 3], color=svg.FAINT, linewidth=0.7, clip_on=False, zorder=0)
        axes.text(scale(tick), bottom + 14, f"{tick:g}", ha="center", fontsize=10, color=svg.SOFT)
    axes.text(RIGHT, bottom + 28, "milliseconds, logarithmic scale", ha="right", fontsize=10, color=svg.SOFT)


def _draw_floor(axes, at, floor_ms, bottom):
    axes.plot([at, at], [-4, bottom + 3], color=svg.FLOOR, linewidth=1.6, linestyle=(0, (4, 2.5)), clip_on=False, zorder=4)
    axes.text(at - 8, -9, f"floor {with_unit(floor_ms, ' ms')}", color=svg.FLOOR, fontsize=11, weight="bold")


def shortened(label):
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def in_words(bars, floor_ms):
    """The chart for those who cannot see it."""
    parts = [f"{bar.label} {with_unit(bar.spread['median'], ' ms') + bar.after if bar.spread else bar.remark}" for bar in bars]
    return "; ".join([*parts, *([f"floor {with_unit(floor_ms, ' ms')}"] if floor_ms else [])]) + "."
