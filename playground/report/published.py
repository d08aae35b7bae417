"""Other people's published solutions: a table and a plot of the facts in results/published/, which suite.py wrote."""

import json
import math

from playground.report import plain_svg
from playground.report.figures import TIE, significant, with_unit
from playground.report.plain_svg import DEVICE, FLOOR, SHARED

FOLDER = "results/published"
HEAD = (
    *("collection", "judged", "right", "drop-in", "measured", "faster than PyTorch's best"),
    *("claimed to be faster", "of these right", "faster than eager", "than PyTorch's best"),
)
LEFT, TOP, SIDE, STRIP = 76, 52, 500, 44  # of the plot; the strip below it holds those that fail
LEAST, MOST = 0.02, 50.0  # speed-ups on the axes
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
DOT = 7


def read(root):
    """The results of all files, one of each solution: that of the file whose name comes last."""
    found = {}
    for path in sorted((root / FOLDER).glob("*.json")):
        found |= {each["source_sha256"]: each for each in json.loads(path.read_text(encoding="utf-8"))["results"]}
    return list(found.values())


def is_right(result):
    return result["standards"]["forward"]


def is_win(result):
    """Whether it is faster than the fastest baseline that is as precise, its whole interval above 1.01."""
    return is_right(result) and (result["outcome"] or {}).get("verdict") == "win"


def beats_eager(result):
    """Whether it is faster than eager PyTorch, the whole interval of the ratio above 1.01."""
    return is_timed(result) and result["speedup"]["eager"]["low"] > 1 + TIE


def is_timed(result):
    return is_right(result) and (result["outcome"] or {}).get("verdict") not in (None, "not measured")


def claims(result):
    """Whether its publisher says that it is faster than eager PyTorch."""
    return (result.get("claimed_speedup") or 0) > 1


def sentence(results):
    """The numbers for README's first screen."""
    faster = [each for each in results if claims(each)]
    right, drop_in = sum(map(is_right, results)), sum(each["standards"]["drop_in"] for each in results)
    fail, over_eager, wins = sum(not is_right(each) for each in faster), sum(map(beats_eager, faster)), sum(map(is_win, faster))
    unmeasured = sum(is_right(each) and not is_timed(each) for each in faster)
    return (
        f"Of {len(results)} published KernelBench solutions, {right} are right on their problem's own inputs and "
        f"{drop_in or 'none'} can replace the original everywhere. Of the {len(faster)} that claim a speed-up over eager "
        f"PyTorch, {fail} fail, {unmeasured} could not be measured, {over_eager} are faster than eager and {wins} than "
        f"PyTorch's best ([details](docs/published_solutions.md))."
    )


def table(results):
    """The rows of Markdown, a collection each and all together."""
    origins = sorted({each["origin"] for each in results})
    groups = {origin: [each for each in results if each["origin"] == origin] for origin in origins}
    rows = [HEAD, ("---", *("--:" for _ in HEAD[1:])), *(_row(*item) for item in groups.items()), _row("all", results)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def _row(title, results):
    faster = [each for each in results if claims(each)]
    drop_in = sum(each["standards"]["drop_in"] for each in results)
    right, timed, wins = (sum(map(test, results)) for test in (is_right, is_timed, is_win))
    of_faster = (sum(map(test, faster)) for test in (is_right, beats_eager, is_win))
    return title, len(results), right, drop_in, timed, wins, len(faster), *of_faster


def image(results):
    """The text of an SVG file: the claimed speed-up of each solution to the right, the measured one over eager upwards."""
    drawing = plain_svg.Drawing(LEFT + SIDE + 20, TOP + SIDE + STRIP + 52)
    drawing.text(8, 14, "Published solutions: speed-up over eager PyTorch, claimed and measured", anchor="start", bold=True)
    drawing.text(8, 31, "Green: right and faster than PyTorch's best. Grey: right. Orange, below: fails.", anchor="start")
    bottom = TOP + SIDE
    drawing.frame(LEFT, TOP, SIDE, SIDE)
    drawing.frame(LEFT, bottom + 4, SIDE, STRIP - 8)
    drawing.line([(LEFT, bottom), (LEFT + SIDE, TOP)])
    drawing.line([(_x(1), TOP), (_x(1), bottom)])
    drawing.line([(LEFT, _y(1)), (LEFT + SIDE, _y(1))])
    for tick in TICKS:
        drawing.text(_x(tick), bottom + STRIP + 14, f"{tick:g}x")
        drawing.text(LEFT - 6, _y(tick) + 4, f"{tick:g}x", anchor="end")
    drawing.text(LEFT - 6, bottom + STRIP / 2 + 4, "fails", anchor="end", fill=FLOOR)
    drawing.text(LEFT + SIDE / 2, bottom + STRIP + 34, "claimed by the publisher")
    for result in results:
        if claimed := result.get("claimed_speedup"):
            _draw(drawing, result, claimed, bottom)
    return drawing.svg("Claimed and measured speed-ups of published solutions", " ".join(map(_in_words, results)))


def _draw(drawing, result, claimed, bottom):
    if not is_right(result):
        return drawing.bar(_x(claimed) - DOT / 2, bottom + STRIP / 2 - DOT / 2, DOT, DOT, FLOOR)
    if is_timed(result):
        measured = result["speedup"]["eager"]["ratio"]
        drawing.bar(_x(claimed) - DOT / 2, _y(measured) - DOT / 2, DOT, DOT, SHARED if is_win(result) else DEVICE)


def _x(speedup):
    return LEFT + SIDE * _place(speedup)


def _y(speedup):
    return TOP + SIDE * (1 - _place(speedup))


def _place(speedup):
    """On a logarithmic scale, 0 to 1."""
    return math.log(min(max(speedup, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)


def _in_words(result):
    claimed = f"claimed {with_unit(result['claimed_speedup'], 'x')}" if result.get("claimed_speedup") else "nothing claimed"
    name = f"Level {result['level']} problem {result['problem_id']}" if result.get("level") else result["solution"]
    if not is_right(result):
        return f"{name}: {claimed}, {result['verdict']}."
    measured = f"{significant(result['speedup']['eager']['ratio'])}x" if is_timed(result) else "not measured"
    return f"{name}: {claimed}, {measured}."
