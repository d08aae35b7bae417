"""Other people's published solutions: a table and a plot of the facts in results/published/, which tools.records wrote."""

import collections
import json

from playground.record import NOT_MEASURED, UNPROVED
from playground.report import drawing
from playground.report.drawing import DEVICE, FLOOR, GOOD, PANEL
from playground.report.figures import TIE
from playground.report.text import grouped, significant, with_unit
from tools.markdown import markdown_table

HEAD = (
    *("collection", "judged", "right", "drop-in", "measured", "faster than PyTorch's best"),
    *("claimed to be faster", "of these right", "faster than eager", "than PyTorch's best"),
)
LEAST, MOST = 0.02, 50.0  # speed-ups on the axes
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def read(root):
    """Return the results of all files, one of each solution: that of the file whose name comes last."""
    found = {}
    for path in sorted((root / "results" / "published").glob("*.json")):
        found |= {each["source_sha256"]: each for each in json.loads(path.read_text(encoding="utf-8"))["results"]}
    return list(found.values())


def kinds(result):
    """Return what a result is: "right", "drop-in", "looked at" by the outer clock, "timed", and faster.

    Its whole interval is above 1.01 if it is "faster" than the fastest baseline that is as precise, "over eager" PyTorch, or
    "over both". Times older than the outer clock count as unmeasured.
    """
    found = {"all"} | {word for word, key in (("right", "forward"), ("drop-in", "drop_in")) if result["standards"][key]}
    outcome = (result.get("outcome") or {}).get("verdict", NOT_MEASURED)
    if "right" in found and "outer" in result:
        found.add("looked at")
    if "looked at" in found and outcome not in (NOT_MEASURED, UNPROVED):
        over = {"faster": outcome == "win", "over eager": result["speedup"]["eager"]["low"] > 1 + TIE}
        found |= {"timed", *(word for word, holds in (over | {"over both": all(over.values())}).items() if holds)}
    return found


def counts(results):
    """Return {kind: how many of the results}, and the same of those whose publisher claims a speed-up over eager PyTorch."""
    claiming = [each for each in results if (each.get("claimed_speedup") or 0) > 1]
    return tuple(collections.Counter(kind for each in of for kind in kinds(each)) for of in (results, claiming))


def sentence(results):
    """Return the numbers for README's first screen."""
    found, claiming = counts(results)
    later = claiming["right"] - claiming["looked at"]
    return (
        f"Of {found['all']} published KernelBench solutions, {found['right']} are right on their problem's own inputs and "
        f"{found['drop-in'] or 'none'} can replace the original everywhere. {claiming['all']} claim a speed-up over eager "
        f"PyTorch: {claiming['all'] - claiming['right']} of them fail, "
        f"{claiming['looked at'] - claiming['timed'] or 'none'} are too short or too noisy to be measured, and of "
        f"{claiming['timed']} that were, {claiming['over eager']} are faster here, "
        f"{claiming['over both']} of these also than PyTorch's best{f'; {later} are to be timed again' if later else ''} "
        "([details](docs/published_solutions.md))."
    )


def table(results):
    """Return the rows of Markdown, a collection each and all together."""
    groups, rows = grouped(results, lambda each: each["origin"]), []
    for title, own in [*sorted(groups.items()), ("all", results)]:
        found, claiming = counts(own)
        rows.append([title, *(found[what] for what in ("all", "right", "drop-in", "timed", "faster"))])
        rows[-1] += [claiming[what] for what in ("all", "right", "over eager", "faster")]
    return markdown_table(HEAD, rows)


def image(results):
    """Return the text of an SVG file: each solution's claimed speed-up to the right, the measured one over eager upwards."""
    claimed = [each for each in results if each.get("claimed_speedup")]
    with drawing.style(PANEL, 11):
        figure = drawing.figure(640, 690)
        axes, failed = figure.subplots(2, sharex=True, height_ratios=(12, 1))
        figure.subplots_adjust(left=0.13, right=0.97, top=0.9, bottom=0.08, hspace=0.04)
        title = "Published solutions: speed-up over eager PyTorch, claimed and measured"
        figure.text(0.01, 0.97, title, weight="bold")
        figure.text(0.01, 0.943, f"Triangles: beyond {LEAST:g}x or {MOST:g}x, drawn at the edge.")
        ends = LEAST / 1.15, MOST * 1.15
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="measured here")
        axes.plot(ends, ends, color=PANEL, linewidth=1.2)
        axes.text(0.07, 0.075, "as claimed", rotation=45, rotation_mode="anchor", ha="center")
        for line in (axes.axvline, axes.axhline, failed.axvline):
            line(1, color=PANEL, linewidth=0.8, linestyle=(0, (4, 3)))
        timed = [(each, each["speedup"]["eager"]["ratio"], kinds(each)) for each in claimed if "timed" in kinds(each)]
        _scatter(axes, [(each, ratio, GOOD if "faster" in of else DEVICE) for each, ratio, of in timed])
        for label, colour in (("right and faster than PyTorch's best", GOOD), ("right", DEVICE)):
            axes.plot([], [], "s", color=colour, markersize=6, label=label)
        axes.legend(loc="upper left", frameon=False)
        _scatter(failed, [(each, 1, FLOOR) for each in claimed if "right" not in kinds(each)])
        labels = [f"{tick:g}x" for tick in TICKS]
        failed.set(xticks=TICKS, xticklabels=labels, yticks=[1], yticklabels=["fails"], xlabel="claimed by the publisher")
        axes.set(yticks=TICKS, yticklabels=labels)
        for panel in (axes, failed):
            panel.minorticks_off()
        return drawing.svg(figure, "published", title, " ".join(map(_in_words, results)), drawing.ANYWHERE) + "\n"


def _scatter(axes, points):
    """Draw squares; triangles at the edge for what lies beyond it, of which the largest factor decides the direction."""
    for result, y, colour in points:
        x = result["claimed_speedup"]
        beyond = {"<": LEAST / x, ">": x / MOST, "v": LEAST / y, "^": y / MOST}
        direction = max(beyond, key=beyond.get)
        marker, size = (direction, 7) if beyond[direction] > 1 else ("s", 5)
        place = [min(max(value, LEAST), MOST) for value in (x, y)]
        axes.plot(*place, marker, color=colour, markersize=size, markeredgewidth=0, clip_on=False)


def _in_words(result):
    claimed = f"claimed {with_unit(result['claimed_speedup'], 'x')}" if result.get("claimed_speedup") else "nothing claimed"
    name = f"Level {result['level']} problem {result['problem_id']}" if result.get("level") else result["solution"]
    own = kinds(result)
    measured = f"{significant(result['speedup']['eager']['ratio'])}x" if "timed" in own else "not measured"
    return f"{name}: {claimed}, {measured if 'right' in own else result['verdict']}."
