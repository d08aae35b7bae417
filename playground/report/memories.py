"""What a block of v3 to v5 keeps in which memory, and who hands what to whom: the drawings of memories.txt.

A test compares the bytes of shared memory with those in the kernels' docstrings.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from playground.report import drawing
from playground.report.drawing import DEVICE, PANEL, SHARED, VARIANT

MEMORIES = {  # letter -> name and colour of a band, from top to bottom
    "D": ("device memory", DEVICE),
    "S": ("shared memory of a block", SHARED),
    "R": ("registers", VARIANT),
}
BANDS = "".join(MEMORIES)
SLOT, BOX_WIDTH, BOX_HEIGHT = 152, 134, 58  # a slot is as wide as a box and the arrow to the next one
BAND_HEIGHT, HEAD, GAP = 84, 20, 58  # of a band, of its name, between bands
MARGIN, TOP = 12, 28
LOOK = {"fontsize": 11.5, "color": PANEL, "va": "center"}


@dataclass(frozen=True)
class Box:
    """A row of memories.txt; `size` is None where it is not fixed, `to` is "" where no arrow leaves, `how` are lines."""

    place: str
    name: str
    size: int | None
    detail: str
    to: str
    how: tuple
    is_overlaid: bool

    @staticmethod
    def of(row):
        place, name, size, detail, arrow = [*map(str.strip, row.split(" | ")), ""][:5]
        to, _, how = arrow.partition(": ")
        product, _, overlaid = size.partition(" ")
        bytes_ = None if product == "?" else math.prod(map(int, product.split("*")))
        return Box(place, name, bytes_, detail, to, tuple(how.split(" / ")), bool(overlaid))

    @property
    def band(self):
        return BANDS.index(self.place[0])

    @property
    def slot(self):
        return int(self.place[1:])

    @property
    def left(self):
        return MARGIN + self.slot * SLOT

    @property
    def top(self):
        return _band(self.band) + HEAD

    @property
    def bytes(self):
        return [] if self.size is None else [f"{self.size:,} bytes"]


def _read():
    """Return {(model, variant): (title, boxes)}."""
    lines = (Path(__file__).parent / "memories.txt").read_text(encoding="utf-8").splitlines()
    parts = "\n".join(line for line in lines if not line.startswith("#")).strip().split("\n\n")
    heads = [re.match(r"(\w+)/(\w+): (.*)\n", part) for part in parts]
    rows = [part[head.end() :].splitlines() for part, head in zip(parts, heads, strict=True)]
    return {head.group(1, 2): (head[3], [*map(Box.of, own)]) for head, own in zip(heads, rows, strict=True)}


PICTURES = _read()


def shared_bytes(boxes):
    """Return the bytes of shared memory that a block has at a time."""
    return sum(box.size for box in boxes if box.place[0] == "S" and not box.is_overlaid)


def images(model):
    """Yield (variant, text of an SVG file) of every picture of the model."""
    for (own, variant), (title, boxes) in PICTURES.items():
        if own == model:
            yield variant, image(title, boxes, f"{model}, {variant}: what a block keeps where")


def image(title, boxes, name):
    """Return the text of an SVG file."""
    longest = max(len(line) for box in boxes for line in box.how)
    width = max(box.left for box in boxes) + BOX_WIDTH + max(MARGIN, 6.3 * longest - BOX_WIDTH / 2)
    with drawing.style():
        figure = drawing.figure(width, _band(len(BANDS) - 1) + BAND_HEIGHT + 6)
        axes = drawing.sheet(figure)
        axes.text(MARGIN, 12, title, weight="bold", **LOOK)
        for band, (words, _) in enumerate(MEMORIES.values()):
            words += f": {shared_bytes(boxes):,} bytes" if BANDS[band] == "S" else ""
            axes.barh(_band(band) + BAND_HEIGHT / 2, width - 4, height=BAND_HEIGHT, left=2, facecolor=PANEL, alpha=0.1)
            axes.text(MARGIN + SLOT * (BANDS[band] == "S"), _band(band) + 11, words, **LOOK)  # clear of x's arrow
        for box in boxes:
            _draw_box(axes, box)
            _draw_arrow(axes, box, boxes)
        return drawing.svg(figure, "memories", name, _in_words(title, boxes), drawing.ANYWHERE) + "\n"


def _band(number):
    return TOP + number * (BAND_HEIGHT + GAP)


def _draw_box(axes, box):
    colour = MEMORIES[box.place[0]][1]
    axes.barh(box.top + BOX_HEIGHT / 2, BOX_WIDTH, height=BOX_HEIGHT, left=box.left, facecolor=colour)
    lines = [box.name, *box.bytes, box.detail]
    for number, line in enumerate(lines):
        at = box.left + BOX_WIDTH / 2, box.top + BOX_HEIGHT / 2 + 16 * (number - (len(lines) - 1) / 2)
        axes.text(*at, line, ha="center", weight="normal" if number else "bold", **LOOK | {"color": "#ffffff"})


def _draw_arrow(axes, start, boxes):
    """Draw an arrow down, then across; or across, then up. Within a band across, within a slot straight up or down."""
    end = next((box for box in boxes if box.place == start.to), None)
    if end is None:
        return
    down = end.band - start.band
    middle, side = start.top + BOX_HEIGHT / 2, "left"
    gap = min(start.top, end.top) - HEAD + BAND_HEIGHT + GAP / 2  # the middle between the bands that it comes past first
    if down == 0:
        begin, to = (start.left + BOX_WIDTH, middle), (end.left, middle)
        label, side = ((begin[0] + to[0]) / 2, middle - 12), "center"
    elif start.slot == end.slot:
        x = start.left + BOX_WIDTH / 2
        begin, to = (x, start.top + BOX_HEIGHT * (down > 0)), (x, end.top + BOX_HEIGHT * (down < 0))
        label = x + 6, gap
    elif down > 0:
        entering = [box for box in boxes if box.to == end.place and box.slot < end.slot]
        begin = start.left + BOX_WIDTH * 3 / 4, start.top + BOX_HEIGHT
        to = end.left, end.top + BOX_HEIGHT / 2 + 12 * (entering.index(start) - (len(entering) - 1) / 2)
        label = begin[0] + 6, gap
    else:
        begin, to = (start.left + BOX_WIDTH, middle), (end.left + BOX_WIDTH / 4, end.top + BOX_HEIGHT)
        is_last = end.slot == max(box.slot for box in boxes)  # no arrow leaves it downwards
        label, side = (to[0] + (6 if is_last else -6), gap), "left" if is_last else "right"
    corner = (
        "arc3" if 0 in (down, end.slot - start.slot) else f"angle,angleA={90 if down > 0 else 0},angleB={0 if down > 0 else 90}"
    )
    arrow = {"arrowstyle": "-|>,head_length=0.5,head_width=0.25", "color": PANEL, "linewidth": 1.6, "connectionstyle": corner}
    axes.annotate("", to, begin, arrowprops=arrow | {"shrinkA": 0, "shrinkB": 0})
    for number, line in enumerate(start.how):
        axes.text(label[0], label[1] + 13 * (number - (len(start.how) - 1) / 2), line, ha=side, **LOOK)


def _in_words(title, boxes):
    """Say the picture for those who cannot see it."""
    names = {box.place: box.name for box in boxes}
    kept = "; ".join(f"{MEMORIES[box.place[0]][0]}: {', '.join([box.name, *box.bytes])} ({box.detail})" for box in boxes)
    handed = "; ".join(f"{box.name} to {names[box.to]}: {' '.join(box.how)}" for box in boxes if box.to)
    return f"{title}. {kept}. {handed}."
