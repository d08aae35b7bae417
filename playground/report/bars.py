"""The bars of README's plot: times on a logarithmic scale."""

import math
from dataclasses import dataclass

from playground.report.figures import with_unit
from playground.report.page import svg

ROW, BAR, TEXT = 19, 9, 11
VARIANT, BASELINE = "variant", "baseline"


@dataclass(frozen=True)
class Bar:
    """One row. `kind` is VARIANT or BASELINE; `median` is in ms; `after` stands behind the time."""

    label: str
    kind: str
    median: float
    after: str = ""


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
    """A label, the bar from the scale's left end to the median, the median."""
    weight, baseline = "bold" if bar.kind == VARIANT else "normal", middle + TEXT / 3
    axes.text(scale.left - 6, baseline, bar.label, ha="right", fontsize=TEXT, weight=weight)
    # Variants are filled, baselines are frames, so that they differ without colour, too.
    look = {"facecolor": svg.PAPER, "edgecolor": svg.BASELINE, "linewidth": 1.2}
    if bar.kind == VARIANT:
        look = {"facecolor": svg.VARIANT}
    axes.barh(middle, scale(bar.median) - scale.left, height=BAR, left=scale.left, zorder=3, **look)
    axes.text(scale(bar.median) + 5, baseline, with_unit(bar.median, " ms") + bar.after, fontsize=TEXT, zorder=6)


def in_words(bars, floor_ms):
    """The chart for those who cannot see it."""
    parts = [f"{bar.label} {with_unit(bar.median, ' ms')}{bar.after}" for bar in bars]
    return "; ".join([*parts, *([f"floor {with_unit(floor_ms, ' ms')}"] if floor_ms else [])]) + "."
