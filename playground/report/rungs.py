"""Where the time of each rung of a ladder goes, kernel by kernel: docs/pictures/<model>-time.svg, of what results/ recorded."""

import re

from playground.report import plain_svg
from playground.report.figures import share_of_floor, with_unit
from playground.report.plain_svg import DEVICE, FLOOR, REGISTERS, SHARED

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 900, 132, 726, 64, 48, 22
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
    """The text of an SVG file; None where no result has both a time and its kernels. `where` says which run this was."""
    rungs = [(result, parts(result)) for result in results if result["time_ms"] and parts(result)]
    if not rungs:
        return None
    drawing = plain_svg.Drawing(WIDTH, TOP + ROW * len(rungs) + 22)
    drawing.text(8, 14, f"{model}: where the time of a forward pass goes", anchor="start", bold=True)
    drawing.text(
        8,
        31,
        "A bar is a rung's whole time, however long; the mark above: what the floor is of it. By PyTorch's profiler.",
        anchor="start",
    )
    drawing.text(8, 47, where, anchor="start")
    for number, (result, shares) in enumerate(rungs):
        top = TOP + ROW * number
        drawing.text(8, top + 15, result["variant"], anchor="start", bold=True)
        drawing.text(RIGHT + 10, top + 15, with_unit(result["time_ms"]["median"], " ms"), anchor="start", bold=True)
        _draw_parts(drawing, top, shares)
        if share := share_of_floor(result):
            at = LEFT + (RIGHT - LEFT) * min(share, 1)
            drawing.bar(at - 1.5, top - 7, 3, 7, FLOOR)
            drawing.text(RIGHT + 76, top + 15, f"floor {with_unit(100 * share, '%')}", anchor="start", fill=FLOOR)
    return drawing.svg(f"{model}: where the time goes", " ".join(_in_words(result, shares) for result, shares in rungs))


def parts(result):
    """[(name, share of the time, whether it is the variant's own kernel)], of a pass by PyTorch's profiler; kernels of one name
    together, in the profiler's order. What is left of the measured time, if any, is in no kernel.
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


def _draw_parts(drawing, top, shares):
    """Names stand in their parts where there is room, else below."""
    left, below = LEFT, []
    for number, (name, share, is_own) in enumerate(shares):
        width = (RIGHT - LEFT) * share
        fill = (REGISTERS, SHARED)[number % 2] if is_own else DEVICE
        if name == OUTSIDE:
            drawing.frame(left, top, width, BAR)
        else:
            drawing.bar(left, top, max(width - 1, 0.5), BAR, fill)
        text = f"{name} {with_unit(100 * share, '%')}"
        if name != OUTSIDE and width > LETTER * len(text):
            drawing.text(left + width / 2, top + 15, text, fill="#ffffff")
        elif share >= LEAST_SHARE:
            below.append(text)
        left += width
    if below:
        drawing.text(RIGHT, top + BAR + 15, ", ".join(below), anchor="end")


def _in_words(result, shares):
    spent = ", ".join(f"{name} {with_unit(100 * share, '%')}" for name, share, _ in shares)
    return f"{result['variant']}, {with_unit(result['time_ms']['median'], ' ms')}: {spent}."
