"""Where the time of each step of a ladder goes, kernel by kernel: docs/pictures/<model>-time.svg, of what results/ recorded."""

import re

from playground.report import drawing
from playground.report.drawing import DEVICE, FLOOR, PANEL, SHARED, VARIANT
from playground.report.figures import share_of_floor
from playground.report.text import with_unit

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 900, 188, 800, 66, 44, 22
LETTER = 6.4  # a letter's width, at most
OTHERS = {  # kernels that are not the variant's
    "implicit_gemm": "cuDNN: convolution",
    "nchwToNhwc": "cuDNN: to channels last",
    "nhwcToNchw": "cuDNN: back from it",
    "max_pool3d": "PyTorch: max pool",
    "FillFunctor": "PyTorch: fill",
    "elementwise_kernel": "PyTorch: elementwise",
}
OUTSIDE = "outside the profiled kernels"  # of the measured time, what the profiled kernels leave
LEAST_SHARE = 0.02  # of a bar, to be told


def image(model, results, where):
    """Return the text of an SVG file; None where no result has both a time and its kernels. `where` says which run this was."""
    steps = [(result, parts(result)) for result in results if result["time_ms"] and parts(result)]
    if not steps:
        return None
    bottom = TOP + ROW * len(steps)
    with drawing.style():
        figure = drawing.figure(WIDTH, bottom + 40)
        axes = drawing.sheet(figure)
        look = {"fontsize": 11.5, "color": PANEL, "va": "baseline"}
        axes.text(8, 16, f"{model}: which kernels take a step's forward pass", weight="bold", **look)
        about = "Each bar is all of its step's time. Orange: how much of it the floor is. By PyTorch's profiler."
        axes.text(8, 34, about, **look)
        axes.text(8, 51, where, **look)
        for number, (result, shares) in enumerate(steps):
            top, share = TOP + ROW * number, share_of_floor(result)
            axes.text(8, top + 15, result["variant"], weight="bold", **look)
            axes.text(LEFT - 10, top + 15, with_unit(result["time_ms"]["median"], " ms"), ha="right", weight="bold", **look)
            _draw_parts(axes, top, shares, look)
            if share:
                axes.barh(top - 3, 3, height=7, left=_at(min(share, 1)) - 1.5, facecolor=FLOOR)
                floor = f"floor {with_unit(100 * share, '%')}"
                axes.text(RIGHT + 10, top + 15, floor, **look | {"color": FLOOR})
        for tick in range(0, 101, 25):
            axes.text(_at(tick / 100), bottom + 8, f"{tick}%", ha="center", **look)
        axes.text(_at(0.5), bottom + 28, "share of the step's own time", ha="center", **look)
        words = " ".join(_in_words(result, shares) for result, shares in steps)
        return drawing.svg(figure, "time", f"{model}: where the time goes", words, drawing.ANYWHERE) + "\n"


def parts(result):
    """Return [(name, share of the time, whether it is the variant's own kernel)] of a pass, by PyTorch's profiler.

    Kernels of one name stand together, in the profiler's order. What is left of the measured time, if any, is in no kernel.
    """
    kernels = ((result["check"] or {}).get("work") or {}).get("kernels") or []
    microseconds = {}
    for kernel in kernels:
        other = next((name for part, name in OTHERS.items() if part in kernel["name"]), None)
        name = other or re.sub(r"^void |[<(].*", "", kernel["name"])
        key = name, other is None
        microseconds[key] = microseconds.get(key, 0.0) + kernel["microseconds"]
    inside = sum(microseconds.values())
    whole = max(inside, 1e3 * result["time_ms"]["median"]) if inside else 0
    shares = [(name, spent / whole, is_own) for (name, is_own), spent in microseconds.items()]
    if whole and 1 - inside / whole > LEAST_SHARE:
        shares.append((OUTSIDE, 1 - inside / whole, False))
    return shares


def _at(share):
    return LEFT + (RIGHT - LEFT) * share


def _draw_parts(axes, top, shares, look):
    """Names stand in their parts where there is room, else below."""
    left, below = 0.0, []
    for number, (name, share, is_own) in enumerate(shares):
        width = (RIGHT - LEFT) * share
        fill = {"facecolor": (VARIANT, SHARED)[number % 2] if is_own else DEVICE}
        fill = {"facecolor": PANEL, "alpha": 0.15} if name == OUTSIDE else fill
        axes.barh(top + BAR / 2, max(width - 1, 0.5), height=BAR, left=_at(left), **fill)
        text = f"{name} {with_unit(100 * share, '%')}"
        if name != OUTSIDE and width > LETTER * len(text):
            axes.text(_at(left + share / 2), top + 15, text, ha="center", **look | {"color": "#ffffff"})
        elif share >= LEAST_SHARE:
            below.append(text)
        left += share
    if below:
        axes.text(RIGHT, top + BAR + 13, ", ".join(below), ha="right", **look | {"fontsize": 10.5})


def _in_words(result, shares):
    spent = ", ".join(f"{name} {with_unit(100 * share, '%')}" for name, share, _ in shares)
    return f"{result['variant']}, {with_unit(result['time_ms']['median'], ' ms')}: {spent}."
