"""Where the time of each step of a ladder goes, kernel by kernel: docs/pictures/<model>-time.svg, of what results/ recorded."""

import re

from playground.report import drawing
from playground.report.drawing import DEVICE, FLOOR, PANEL, SHARED, VARIANT
from playground.report.figures import share_of_floor
from playground.report.text import with_unit

WIDTH, ROW, LETTER = 900, 44, 6.4  # units: of the picture, of a row, of a letter at most
AXES = 188, 612  # units: where they begin, how wide they are
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
LOOK = {"fontsize": 11.5, "color": PANEL}


def image(model, results, where):
    """Return the text of an SVG file; None where no result has both a time and its kernels. `where` says which run this was."""
    steps = [(result, parts(result)) for result in results if result["time_ms"] and parts(result)]
    if not steps:
        return None
    height = 110 + ROW * len(steps)
    with drawing.style():
        figure = drawing.figure(WIDTH, height)
        axes = figure.add_axes([AXES[0] / WIDTH, 44 / height, AXES[1] / WIDTH, ROW * len(steps) / height])
        axes.set(xlim=(0, 100), ylim=(len(steps) - 0.5, -0.5), xlabel="% of the step's own time")
        axes.set_yticks(
            range(len(steps)), [f"{each['variant']}\n{with_unit(each['time_ms']['median'], ' ms')}" for each, _ in steps]
        )
        axes.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, colors=PANEL, labelsize=11.5)
        axes.xaxis.label.set(**LOOK)
        title = f"{model}: which kernels take a step's forward pass"
        about = "Each bar is all of its step's time. Orange: how much of it the floor is. By PyTorch's profiler."
        for line, text in enumerate((title, about, where)):
            figure.text(8 / WIDTH, 1 - (16 + 17 * line) / height, text, weight="normal" if line else "bold", **LOOK)
        for number, (result, shares) in enumerate(steps):
            _draw_parts(axes, number, shares)
            if share := share_of_floor(result):
                axes.plot([100 * min(share, 1)] * 2, [number - 0.46, number - 0.3], color=FLOOR, linewidth=3)
                axes.text(101.5, number, f"floor {with_unit(100 * share, '%')}", va="center", **LOOK | {"color": FLOOR})
        words = "; ".join(f"{each['variant']}: {', '.join(_told(*part[:2]) for part in shares)}" for each, shares in steps)
        return drawing.svg(figure, "time", f"{model}: where the time goes", words, drawing.ANYWHERE) + "\n"


def _told(name, share):
    return f"{name} {with_unit(100 * share, '%')}"


def parts(result):
    """Return [(name, share of the time, whether it is the variant's own kernel)] of a pass, by PyTorch's profiler.

    Kernels of one name stand together, in the profiler's order. What is left of the measured time, if any, is in no kernel.
    """
    kernels = ((result["check"] or {}).get("work") or {}).get("kernels") or []
    microseconds = {}
    for kernel in kernels:
        other = next((name for part, name in OTHERS.items() if part in kernel["name"]), None)
        key = other or re.sub(r"^void |[<(].*", "", kernel["name"]), other is None
        microseconds[key] = microseconds.get(key, 0.0) + kernel["microseconds"]
    inside = sum(microseconds.values())
    whole = max(inside, 1e3 * result["time_ms"]["median"])
    shares = [(name, spent / whole, is_own) for (name, is_own), spent in microseconds.items()]
    return shares + [(OUTSIDE, 1 - inside / whole, False)] * (inside > 0 and 1 - inside / whole > LEAST_SHARE)


def _draw_parts(axes, row, shares):
    """Names stand in their parts where there is room, else below."""
    left, below = 0.0, []
    for number, (name, share, is_own) in enumerate(shares):
        fill = {"facecolor": (VARIANT, SHARED)[number % 2] if is_own else DEVICE}
        fill = {"facecolor": PANEL, "alpha": 0.15} if name == OUTSIDE else fill
        axes.barh(row - 0.05, 100 * share, height=0.5, left=left, **fill)
        text = _told(name, share)
        if name != OUTSIDE and AXES[1] * share > LETTER * len(text):
            axes.text(left + 50 * share, row - 0.05, text, ha="center", va="center", **LOOK | {"color": "#ffffff"})
        elif share >= LEAST_SHARE:
            below.append(text)
        left += 100 * share
    axes.text(100, row + 0.36, ", ".join(below), ha="right", va="center", **LOOK | {"fontsize": 10.5})
