"""PyTorch and a model's variants as bars whose length is their speed, with the floor at the end: on the page and in README.

A bar's length is floor / time, on a linear scale from 0: twice as long is twice as fast. On a linear scale of milliseconds the
slowest step would leave the fast ones no length at all. Where there is no floor, the fastest stands for it.
"""

import statistics
from dataclasses import dataclass

from playground.report import drawing, figures
from playground.report.drawing import BASELINE, FLOOR, GRAPHED, INK, PAPER, SOFT, VARIANT
from playground.report.text import one_line, with_unit

HEAD, ROW, NOTE = 30, 17, 11  # units: above the rows, of a row, of a remark below it
TIME, RATIO, LETTER = 58, 54, 6.6  # units: of the columns behind the bars, of a letter
PAGE_WIDTH, FILE_WIDTH = 384, 820


@dataclass(frozen=True)
class Row:
    """`ms` is None for what has no time, of which `why` says what it is instead. `link` is an id of the page."""

    name: str
    kind: str
    ms: float | None
    ratio: str = ""
    floor: float | None = None
    why: str = ""
    link: str | None = None
    notes: tuple = ()


@dataclass(frozen=True)
class Picture:
    """The bars of one pass of a model at one place and size; `floor` is in ms, None where it is not known."""

    title: str
    rows: list
    floor: float | None

    def share(self, row):
        """Return which part of the scale a row reaches: 1 is the floor, or the fastest where there is none."""
        return (row.floor or self.floor or min(each.ms for each in self.rows if each.ms)) / row.ms

    def notes(self, row):
        beyond = self.floor and row.ms and self.share(row) > 1
        return (*row.notes, figures.BEYOND_FLOOR) if beyond else row.notes

    @property
    def height(self):
        return HEAD + sum(ROW + NOTE * len(self.notes(row)) for row in self.rows) + 4

    def words(self):
        """Say the picture for those who cannot see it."""
        parts = [f"{row.name} {with_unit(row.ms, ' ms') if row.ms else row.why} {row.ratio}".strip() for row in self.rows]
        return "; ".join([*parts, *([f"floor {with_unit(self.floor, ' ms')}"] if self.floor else [])]) + "."


def pictures(members, brief=False):
    """Return a Picture of forward and of each training mode of (result, what the page shows of it) at one place and size.

    `brief`: of forward alone, without CUDA graphs, and of PyTorch only eager and the fastest.
    """
    titles = dict.fromkeys(
        title for result, _ in members for title in figures.timed_modes(result) if figures.GRAPH not in title
    )
    made = (_picture(members, title, brief) for title in ([figures.FORWARD] if brief else titles))
    return [each for each in made if each]


def _picture(members, title, brief):
    """Return None where nothing has a time."""
    timings = [(result, shown, figures.timed_modes(result).get(title) or {}) for result, shown in members]
    medians = figures.baseline_medians([each for _, _, each in timings])
    fastest = figures.fastest_baseline(medians)
    named = [name for name in figures.ordered_baselines(medians) if not brief or name in ("eager", fastest)]
    rows = [Row(_name(name), BASELINE, medians[name], "fastest" if name == fastest else "") for name in named]
    for result, shown, each in timings:
        if each.get("time_ms") or title == figures.FORWARD:
            rows.append(_variant(one_line(result["variant"]), VARIANT, result, each, fastest, shown))
        if not brief and (graphed := each.get("graphed") or {}).get("time_ms"):
            rows.append(_variant("... in a CUDA graph", GRAPHED, result, graphed, fastest, None))
    floors = [each["floor_ms"] for _, _, each in timings if each.get("floor_ms")]
    return Picture(title, rows, statistics.median(floors) if floors else None) if any(row.ms for row in rows) else None


def _name(baseline):
    name = one_line(figures.baseline_name(baseline))
    return name if name.startswith("torch.") else f"PyTorch {name}"


def _variant(name, kind, result, timings, fastest, shown):
    """Return a row that names the baseline where that is another than the `fastest`."""
    best, ratio = figures.headline(timings)
    time = (timings.get("time_ms") or {}).get("median")
    return Row(
        name,
        kind,
        time,
        figures.labelled(with_unit(ratio["ratio"], "x"), result) if ratio else "",
        timings.get("floor_ms"),
        f"{one_line(result['verdict'])}, not timed",
        shown and shown["id"],
        (f"over {one_line(figures.baseline_name(best))}",) if ratio and best != fastest else (),
    )


def page_svg(picture, name, title):
    """Return a picture as an <svg> of the page."""
    with drawing.style():
        figure = drawing.figure(PAGE_WIDTH, picture.height)
        _draw(drawing.sheet(figure), picture, 0, PAGE_WIDTH, 152)
        return drawing.svg(figure, name, title, picture.words())


def image(title, models, colours):
    """Return the text of an SVG file; `models` are {model: results that have times}. Of none the image is its title alone."""
    drawn = {_heading(*each): pictures([(result, None) for result in each[1]], brief=True)[0] for each in models.items()}
    height = 30 + sum(20 + picture.height + 8 for picture in drawn.values()) + 24 * bool(drawn)
    with drawing.style():
        figure = drawing.figure(FILE_WIDTH, height)
        axes = drawing.sheet(figure)
        axes.text(8, 18, title, fontsize=13, weight="bold")
        top = 30
        for heading, picture in drawn.items():
            axes.text(8, top + 16, heading, fontsize=12, color=SOFT)
            _draw(axes, picture, top + 18, FILE_WIDTH - 8, 168, left=8)
            top += 20 + picture.height + 8
        if drawn:
            text = "speed, on a linear scale from 0: twice as long is twice as fast; dashed: the floor, the roofline's bound; "
            axes.text(8, top + 12, text + "speed-up: over PyTorch's fastest", fontsize=10, color=SOFT)
        words = " ".join(f"{heading}: {picture.words()}" for heading, picture in drawn.items())
        return drawing.svg(figure, "times", title, words or title, colours) + "\n"


def _heading(model, results):
    inputs = ", ".join("×".join(map(str, each)) for each in results[0]["shape"]["inputs"] if isinstance(each, list))
    return f"{model}, {inputs}"


def _draw(axes, picture, top, right, track, left=0):
    """Draw a picture from `top` down, names at `left`, bars from `track` on, times and speed-ups at the `right`."""
    labels = [row.ratio for row in picture.rows]
    ratio = right - max(RATIO, LETTER * max(map(len, labels)))
    time, end = ratio, ratio - TIME - 10
    longest = max([1.0, *(picture.share(row) for row in picture.rows if row.ms)])
    floor_at = track + (end - track) / longest
    head = {"fontsize": 9.5, "va": "baseline"}
    text = f"floor {with_unit(picture.floor, ' ms')}" if picture.floor else "the fastest"
    axes.text(floor_at, top + 22, text, ha="right" if longest < 1.5 else "center", color=FLOOR, weight="bold", **head)
    axes.text(time, top + 22, "time", ha="right", color=SOFT, **head)
    axes.text(right, top + 22, "speed-up", ha="right", color=SOFT, **head)
    y = top + HEAD
    for row in picture.rows:
        _draw_row(axes, picture, row, y, (left, track, end, time, right), longest)
        y += ROW + NOTE * len(picture.notes(row))
    if picture.floor:
        axes.plot([floor_at] * 2, [top + HEAD - 3, y], color=FLOOR, linewidth=1.6, linestyle=(0, (4, 2.5)), zorder=4)


def _draw_row(axes, picture, row, y, places, longest):
    left, track, end, time, right = places
    is_own = row.kind == VARIANT
    look = {"fontsize": 10.5, "va": "baseline", "weight": "bold" if is_own else "normal", "color": INK if is_own else SOFT}
    room = int((track - left) / LETTER)
    name = row.name if len(row.name) <= room else row.name[: room - 1] + "…"
    axes.text(left, y + 12, name, url=f"#{row.link}" if row.link else None, **look)
    if not row.ms:
        axes.text(track, y + 12, row.why, **look | {"weight": "normal", "color": SOFT})
        return
    height = 7 if row.kind == GRAPHED else 11
    # Variants are filled, baselines are frames, so that they differ without colour, too.
    fill = {"facecolor": PAPER, "edgecolor": BASELINE, "linewidth": 1.2} if row.kind == BASELINE else {"facecolor": row.kind}
    axes.barh(y + 8, max(1.5, (end - track) * picture.share(row) / longest), height=height, left=track, zorder=3, **fill)
    axes.text(time, y + 12, with_unit(row.ms, " ms"), ha="right", **look)
    axes.text(right, y + 12, row.ratio, ha="right", **look)
    for number, note in enumerate(picture.notes(row), 1):
        axes.text(
            right, y + 10 + NOTE * number, note, ha="right", fontsize=8.5, color=FLOOR if note == figures.BEYOND_FLOOR else SOFT
        )
