"""PyTorch and a model's variants as bars of length floor / time: twice as long, twice as fast."""

import statistics
from dataclasses import dataclass

from playground.record import NOT_TIMED
from playground.report import drawing, figures
from playground.report.drawing import BASELINE, FLOOR, GRAPHED, INK, PAPER, SOFT, VARIANT
from playground.report.text import one_line, with_unit

HEAD, ROW, NOTE = 30, 17, 11  # units: above the rows, of a row, of a remark below it
TIME, RATIO, LETTER = 58, 54, 6.6  # units: of the columns behind the bars, of a letter
PAGE_WIDTH = 384


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

    @property
    def height(self):
        return HEAD + sum(ROW + NOTE * len(row.notes) for row in self.rows) + 4

    def words(self):
        """Say the picture for those who cannot see it."""
        parts = [f"{row.name} {with_unit(row.ms, ' ms') if row.ms else row.why} {row.ratio}".strip() for row in self.rows]
        return "; ".join(parts + [f"floor {with_unit(self.floor, ' ms')}"] * bool(self.floor)) + "."


def pictures(members, brief=False):
    """Return a Picture of each mode of (result, what the page shows of it) at one size; `brief`: of forward without graphs."""
    modes = [title for result, _ in members for title in figures.timed_modes(result) if figures.GRAPH not in title]
    made = (_picture(members, title, brief) for title in ([figures.FORWARD] if brief else dict.fromkeys(modes)))
    return [each for each in made if any(row.ms for row in each.rows)]


def _picture(members, title, brief):
    timings = [(result, shown, figures.timed_modes(result).get(title, NOT_TIMED)) for result, shown in members]
    medians = figures.baseline_medians(each for *_, each in timings)
    fastest, rows = figures.fastest_baseline(medians), []
    for name in figures.ordered_baselines(medians):
        if not brief or name in ("eager", fastest):
            shown = one_line(figures.baseline_name(name))
            shown = shown if shown.startswith("torch.") else f"PyTorch {shown}"
            rows.append(Row(shown, BASELINE, medians[name], "fastest" * (name == fastest)))
    for result, shown, each in timings:
        if each.time_ms or title == figures.FORWARD:
            rows.append(_variant(one_line(result.variant), VARIANT, result, each, fastest, shown))
        if not brief and (graphed := each.in_a_graph) and graphed.time_ms:
            rows.append(_variant("... in a CUDA graph", GRAPHED, result, graphed, fastest, None))
    floors = [each.floor_ms for *_, each in timings if each.floor_ms]
    return Picture(title, rows, statistics.median(floors) if floors else None)


def _variant(name, kind, result, timings, fastest, shown):
    best, ratio = figures.headline(timings)
    time, why = timings.median_ms, f"{one_line(result.verdict)}, not timed"
    speedup = figures.labelled(with_unit(ratio.ratio, "x"), result) if ratio else ""
    notes = [f"over {one_line(figures.baseline_name(best))}"] if ratio and best != fastest else []
    notes += [figures.BEYOND_FLOOR] * ((figures.share_of_floor(timings) or 0) > 1)
    return Row(name, kind, time, speedup, timings.floor_ms, why, shown and shown["id"], tuple(notes))


def page_svg(picture, name, title):
    """Return a picture as an <svg> of the page."""
    with drawing.style():
        figure = drawing.figure(PAGE_WIDTH, picture.height)
        draw(drawing.sheet(figure), picture, 0, 0, 152, PAGE_WIDTH)
        return drawing.svg(figure, name, title, picture.words())


def draw(axes, picture, top, left, track, right):
    """Draw a picture from `top` down, names at `left`, bars from `track` on, times and speed-ups at the `right`."""
    time = right - max(RATIO, LETTER * max(len(row.ratio) for row in picture.rows))
    longest = max([1.0, *(picture.share(row) for row in picture.rows if row.ms)])
    scale, room = (time - TIME - 10 - track) / longest, int((track - left) / LETTER)
    head, y = {"fontsize": 9.5, "va": "baseline"}, top + HEAD
    text = f"floor {with_unit(picture.floor, ' ms')}" if picture.floor else "the fastest"
    axes.text(track + scale, top + 22, text, ha="right" if longest < 1.5 else "center", color=FLOOR, weight="bold", **head)
    for place, text in ((time, "time"), (right, "speed-up")):
        axes.text(place, top + 22, text, ha="right", color=SOFT, **head)
    for row in picture.rows:
        quiet = {"fontsize": 10.5, "va": "baseline", "color": SOFT}
        look = quiet | {"weight": "bold", "color": INK} if row.kind == VARIANT else quiet
        name = row.name if len(row.name) <= room else row.name[: room - 1] + "…"
        axes.text(left, y + 12, name, url=f"#{row.link}" if row.link else None, **look)
        if row.ms:
            # Variants are filled, baselines are frames, so that they differ without colour, too.
            frame = {"facecolor": PAPER, "edgecolor": BASELINE, "linewidth": 1.2}
            fill, height = frame if row.kind == BASELINE else {"facecolor": row.kind}, 7 if row.kind == GRAPHED else 11
            axes.barh(y + 8, max(1.5, scale * picture.share(row)), height=height, left=track, zorder=3, **fill)
            axes.text(time, y + 12, with_unit(row.ms, " ms"), ha="right", **look)
            axes.text(right, y + 12, row.ratio, ha="right", **look)
        else:
            axes.text(track, y + 12, row.why, **quiet)
        y += ROW
        for note in row.notes:
            axes.text(right, y + 4, note, ha="right", fontsize=8.5, color=FLOOR if note == figures.BEYOND_FLOOR else SOFT)
            y += NOTE
    if picture.floor:
        axes.plot([track + scale] * 2, [top + HEAD - 3, y], color=FLOOR, linewidth=1.6, linestyle=(0, (4, 2.5)), zorder=4)
