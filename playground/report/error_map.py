"""Where a wrong result is wrong, drawn for the page from the lines that a terminal prints (judge.diagnosis)."""

import re

from matplotlib.patches import Rectangle

from playground.report import drawing
from playground.report.drawing import BAD, SOFT

SHADES = " ░▒▓█"  # judge.diagnosis's, which imports PyTorch
MAP = re.compile(rf"(where it is wrong: .*\n)((?:\|[{SHADES}]+\|(?:\n|\Z))+)")
WIDTH, HEAD, HEIGHT = 384, 16, 84  # units: of the map, of the line above it, of its rows together


def split(details, name):
    """Return (`details` without the map that begins them, the map as an <svg>); (`details`, None) where there is none."""
    if not (found := MAP.match(details)):
        return details, None
    title, rows = found[1].strip(), [row.strip("|") for row in found[2].splitlines()]
    width, height = WIDTH / len(rows[0]), HEIGHT / len(rows)
    with drawing.style():
        figure = drawing.figure(WIDTH, HEAD + HEIGHT)
        axes = drawing.sheet(figure)
        axes.text(0, HEAD - 5, title, fontsize=10, color=SOFT)
        axes.add_patch(Rectangle((0.5, HEAD), WIDTH - 1, HEIGHT - 0.5, fill=False, edgecolor=SOFT, linewidth=0.6))
        for y, row in enumerate(rows):
            for run in re.finditer(r"([^ ])\1*", row):
                at, size = (run.start() * width, HEAD + y * height), (len(run[0]) * width, height)
                alpha = SHADES.index(run[1]) / (len(SHADES) - 1)
                axes.add_patch(Rectangle(at, *size, facecolor=BAD, linewidth=0, alpha=alpha))
        return details[found.end() :], drawing.svg(figure, f"{name}-map", title, "the darker, the more of the values are wrong")
