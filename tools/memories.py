"""What a block of v3 to v5 keeps in which memory, and who hands what to whom: the drawings of memories.txt."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from playground.report import drawing
from playground.report.drawing import DEVICE, PANEL, SHARED, VARIANT

# Letter -> name and colour of a band, from top to bottom.
MEMORIES = {"D": ("device memory", DEVICE), "S": ("shared memory of a block", SHARED), "R": ("registers", VARIANT)}
SLOT, WIDTH, HEIGHT = 152, 134, 58  # units: a slot is as wide as a box and the arrow to the next one
BAND, HEAD, GAP, MARGIN, TOP = 84, 20, 58, 12, 28  # units: of a band, of its name, between bands


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
    def at(self):
        """Return the left and upper edge, in units."""
        return MARGIN + int(self.place[1:]) * SLOT, _band(self.place[0]) + HEAD

    @property
    def lines(self):
        return [self.name, *([] if self.size is None else [f"{self.size:,} bytes"]), self.detail]


def _read():
    """Return {(model, variant): (title, boxes)}."""
    lines = (Path(__file__).parent / "memories.txt").read_text(encoding="utf-8").splitlines()
    found = {}
    for part in "\n".join(line for line in lines if not line.startswith("#")).strip().split("\n\n"):
        head, *rows = part.splitlines()
        model, variant, title = re.match(r"(\w+)/(\w+): (.*)", head).groups()
        found[model, variant] = title, [*map(Box.of, rows)]
    return found


PICTURES = _read()


def shared_bytes(boxes):
    """Return the bytes of shared memory that a block has at a time."""
    return sum(box.size for box in boxes if box.place[0] == "S" and not box.is_overlaid)


def image(model, variant):
    """Return the text of an SVG file."""
    title, boxes = PICTURES[model, variant]
    longest, names = max(len(line) for box in boxes for line in box.how), {box.place: box.name for box in boxes}
    width = max(box.at[0] for box in boxes) + WIDTH + max(MARGIN, 6.3 * longest - WIDTH / 2)
    kept = (f"{MEMORIES[each.place[0]][0]}: {', '.join(each.lines[:-1])} ({each.detail})" for each in boxes)
    handed = (f"{each.name} to {names[each.to]}: {' '.join(each.how)}" for each in boxes if each.to)
    with drawing.style(PANEL, 11.5):
        figure = drawing.figure(width, _band("R") + BAND + 6)
        axes = drawing.sheet(figure)
        _write(axes, (MARGIN, 12), [title], weight="bold")
        for letter, (words, _) in MEMORIES.items():
            words += f": {shared_bytes(boxes):,} bytes" if letter == "S" else ""
            axes.barh(_band(letter) + BAND / 2, width - 4, height=BAND, left=2, facecolor=PANEL, alpha=0.1)
            _write(axes, (MARGIN + SLOT * (letter == "S"), _band(letter) + 11), [words])  # clear of x's arrow
        for box in boxes:
            (left, top), look = box.at, {"ha": "center", "color": "#ffffff"}
            axes.barh(top + HEIGHT / 2, WIDTH, height=HEIGHT, left=left, facecolor=MEMORIES[box.place[0]][1])
            for line, text in enumerate(box.lines, 1):
                at = left + WIDTH / 2, top + HEIGHT * line / (len(box.lines) + 1)
                _write(axes, at, [text], weight="bold" if line == 1 else "normal", **look)
            if box.to:
                _draw_arrow(axes, box, boxes)
        words = f"{title}. {'; '.join(kept)}. {'; '.join(handed)}."
        return drawing.svg(figure, "memories", f"{model}, {variant}: what a block keeps where", words, drawing.ANYWHERE) + "\n"


def _band(letter):
    return TOP + list(MEMORIES).index(letter) * (BAND + GAP)


def _write(axes, at, lines, **look):
    for number, line in enumerate(lines):
        axes.text(at[0], at[1] + 13 * (number - (len(lines) - 1) / 2), line, va="center", **look)


def _draw_arrow(axes, start, boxes):
    """Draw an arrow down, then across; or across, then up. Within a band across, within a slot straight up or down."""
    end = next(box for box in boxes if box.place == start.to)
    (x, y), (to_x, to_y) = start.at, end.at
    gap = min(y, to_y) - HEAD + BAND + GAP / 2  # the middle between the bands that it comes past first
    corner, side = "arc3", "left"
    if y == to_y:
        begin, tip = (x + WIDTH, y + HEIGHT / 2), (to_x, y + HEIGHT / 2)
        label, side = ((begin[0] + to_x) / 2, begin[1] - 12), "center"
    elif x == to_x:
        begin, tip = (x + WIDTH / 2, y + HEIGHT * (to_y > y)), (x + WIDTH / 2, to_y + HEIGHT * (to_y < y))
        label = begin[0] + 6, gap
    elif to_y > y:
        entering = [box for box in boxes if box.to == end.place and box.at[0] < to_x]
        begin = x + WIDTH * 3 / 4, y + HEIGHT
        tip = to_x, to_y + HEIGHT / 2 + 12 * (entering.index(start) - (len(entering) - 1) / 2)
        label, corner = (begin[0] + 6, gap), "angle,angleA=90,angleB=0"
    else:
        begin, tip = (x + WIDTH, y + HEIGHT / 2), (to_x + WIDTH / 4, to_y + HEIGHT)
        is_last = to_x == max(box.at[0] for box in boxes)  # no arrow leaves it downwards
        label, side, corner = (tip[0] + (6 if is_last else -6), gap), "left" if is_last else "right", "angle,angleA=0,angleB=90"
    arrow = {"arrowstyle": "-|>,head_length=0.5,head_width=0.25", "color": PANEL, "linewidth": 1.6, "connectionstyle": corner}
    axes.annotate("", tip, begin, arrowprops=arrow | {"shrinkA": 0, "shrinkB": 0})
    _write(axes, label, start.how, ha=side)
