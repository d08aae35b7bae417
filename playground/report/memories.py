"""What a block of v3 to v5 keeps in which memory, and who hands what to whom: docs/pictures/<model>-<variant>.svg.

Of the forward pass at the original's size, TF32 permitted, on a GPU whose blocks may have 227 KB of shared memory. `PICTURES`
says what there is; `image` draws any of them. A test holds the bytes of shared memory against the kernels' own docstrings.
"""

from dataclasses import dataclass

from playground.report import plain_svg
from playground.report.plain_svg import DEVICE, REGISTERS, SHARED

BANDS = {DEVICE: "device memory", SHARED: "shared memory of a block", REGISTERS: "registers"}
SLOT, BOX_WIDTH, BOX_HEIGHT = 152, 134, 58  # a slot is as wide as a box and the arrow to the next one
BAND_HEIGHT, HEAD, GAP = 84, 20, 58  # of a band, of its name, between bands
MARGIN = 12


@dataclass(frozen=True)
class Box:
    """`size` is in bytes, None where it is not fixed; `memory` is one of BANDS. Overlaid: later, in other boxes' bytes."""

    memory: str
    slot: int
    name: str
    size: int | None
    detail: str
    is_overlaid: bool = False


@dataclass(frozen=True)
class Picture:
    """`kernel` is the launch whose block is drawn. `arrows` are (from, to, who hands it over): keys of `boxes`."""

    kernel: str
    who: str
    boxes: dict
    arrows: tuple

    @property
    def shared_bytes(self):
        return sum(box.size for box in self.boxes.values() if box.memory == SHARED and not box.is_overlaid)


POOL_X = Box(DEVICE, 0, "x", 128 * 8 * 384 * 384 * 4, "128 x 8 x 384 x 384")
CONV_X = Box(DEVICE, 0, "x", 128 * 8 * 16 * 64 * 64 * 4, "128 x 8 x 16 x 64 x 64")
ALEX_X = Box(DEVICE, 0, "x", 256 * 3 * 224 * 224 * 4, "256 x 3 x 224 x 224")
ALEX_OUT = Box(DEVICE, 5, "out", 256 * 96 * 55 * 55 * 4, "256 x 96 x 55 x 55")
POOL_WEIGHTS, CONV_WEIGHTS = 64 * 8 * 9 * 4, 16 * 8 * 27 * 4

PICTURES = {
    ("conv_pool_sigmoid_sum", "v3_box_sums"): Picture(
        "sum_sigmoids",
        "128 threads: a tile of 32 x 4 windows, 18 of 72 terms at a time",
        {
            "x": POOL_X,
            "columns": Box(SHARED, 1, "column sums", 6 * 4 * 160 * 4, "6 x 4 rows x 160"),
            "row": Box(REGISTERS, 2, "column sums", 128 * 6 * 4, "6 a thread"),
            "boxes": Box(SHARED, 3, "box sums", 18 * 128 * 4, "18 terms x 128"),
            "weight": Box(DEVICE, 4, "weights", POOL_WEIGHTS, "64 x 72"),
            "weights": Box(SHARED, 4, "weights", 18 * 68 * 4, "18 terms x 68"),
            "sums": Box(REGISTERS, 4, "sums", 128 * 64 * 4, "8 x 8 a thread"),
            "reduced": Box(SHARED, 5, "sums of warps", 4 * 4, "4"),
            "out": Box(DEVICE, 5, "sums of tiles", 128 * 72 * 4, "128 x 72"),
        },
        (
            ("x", "columns", "a thread: 6 pixels,|added 4 at a time"),
            ("columns", "row", "a window's thread"),
            ("row", "boxes", "added 4|at a time"),
            ("boxes", "sums", "8 windows"),
            ("weight", "weights", "scaled, by all"),
            ("weights", "sums", "8 channels"),
            ("sums", "reduced", "sigmoid, sum"),
            ("reduced", "out", "thread 0"),
        ),
    ),
    ("conv_pool_sigmoid_sum", "v4_tensor_core"): Picture(
        "conv_pool_sum",
        "12 warps of 16 positions each, in 3 groups of 4",
        {
            "x": POOL_X,
            "pipelines": Box(SHARED, 1, "12 pipelines", 12 * 8704, "4 rows a warp"),
            "rest": Box(SHARED, 2, "biases, scales", 512, "and the segment"),
            "boxes": Box(REGISTERS, 2, "box sums, fp32", 384 * 36 * 4, "36 a lane"),
            "stored": Box(SHARED, 3, "box sums, fp16", 3 * 10240, "64 positions a group"),
            "weight": Box(DEVICE, 4, "weights", POOL_WEIGHTS, "64 x 72"),
            "weights": Box(SHARED, 4, "weights, fp16", 20480, "high and low parts"),
            "sums": Box(REGISTERS, 4, "sums", 384 * 16 * 4, "16 x 32 a warp"),
            "out": Box(DEVICE, 5, "sums of samples", 128 * 4, "128"),
        },
        (
            ("x", "pipelines", "cp.async, each warp|for itself"),
            ("pipelines", "boxes", "ld.shared, by the|same warp"),
            ("boxes", "stored", "scaled,|16 positions"),
            ("stored", "sums", "ldmatrix, 64|positions"),
            ("weight", "weights", "once, by all"),
            ("weights", "sums", "mma.sync's a"),
            ("sums", "out", "sigmoid, sum over|a sample"),
        ),
    ),
    ("conv_pool_sigmoid_sum", "v5_hopper"): Picture(
        "conv_pool_sum",
        "1 producer warpgroup, 3 consumer warpgroups of 64 positions each",
        {
            "x": POOL_X,
            "stages": Box(SHARED, 1, "pipeline", 6 * 26624, "6 stages of 26,624"),
            "rest": Box(SHARED, 2, "biases, mbarriers", 600, "full and empty"),
            "boxes": Box(REGISTERS, 2, "box sums, TF32", 384 * 40 * 4, "40 a thread"),
            "weight": Box(DEVICE, 4, "weights", POOL_WEIGHTS, "64 x 72"),
            "weights": Box(SHARED, 4, "weights, TF32", 36864, "high and low parts"),
            "sums": Box(REGISTERS, 4, "sums", 384 * 32 * 4, "64 x 64 a warpgroup"),
            "out": Box(DEVICE, 5, "sums of samples", 128 * 4, "128"),
        },
        (
            ("x", "stages", "TMA, by one|producer thread"),
            ("stages", "boxes", "ld.shared, by|consumer warps"),
            ("boxes", "sums", "wgmma's a"),
            ("weight", "weights", "once"),
            ("weights", "sums", "wgmma's b"),
            ("sums", "out", "sigmoid, sum over|a sample"),
        ),
    ),
    ("conv3d_div_max_gap_bias_sum", "v3_single_kernel"): Picture(
        "conv_max_mean",
        "128 threads: a window of 2 x 2 x 2 positions each, in 8 of 16 channels",
        {
            "x": CONV_X,
            "pixels": Box(REGISTERS, 1, "pixels", 128 * 16 * 4, "16 a thread"),
            "weight": Box(DEVICE, 3, "weights", CONV_WEIGHTS, "16 x 216"),
            "weights": Box(SHARED, 3, "weights", 216 * 8 * 4, "216 x 8 channels"),
            "sums": Box(REGISTERS, 3, "sums", 128 * 64 * 4, "8 x 8 a thread"),
            "maxima": Box(REGISTERS, 5, "maxima", 128 * 8 * 8, "8 with index a thread"),
            "reduced": Box(SHARED, 5, "sums of warps", 160, "8 x 4, totals, a flag"),
            "out": Box(DEVICE, 5, "sums of blocks", 128 * 53 * 2 * 8 * 4, "13,568 x 8"),
        },
        (
            ("x", "pixels", "ld, cached in L1: each|thread for itself"),
            ("pixels", "sums", "192 multiply-adds"),
            ("weight", "weights", "once, by all"),
            ("weights", "sums", "24 of 3 taps"),
            ("sums", "maxima", "scanned in order"),
            ("maxima", "reduced", "shuffles"),
            ("reduced", "out", "8 threads"),
        ),
    ),
    ("conv3d_div_max_gap_bias_sum", "v4_tensor_core"): Picture(
        "conv_max_mean",
        "4 producer warps, 8 consumer warps of 8 windows each",
        {
            "x": CONV_X,
            "values": Box(REGISTERS, 1, "values of x", None, "128 producer threads"),
            "stages": Box(SHARED, 2, "pipeline, fp16", 3 * 32768, "3 bands of 32,768"),
            "weight": Box(DEVICE, 4, "weights", CONV_WEIGHTS, "16 x 216"),
            "rest": Box(SHARED, 3, "scales, mbarriers", 256, "full and empty"),
            "sums": Box(REGISTERS, 4, "sums", 256 * 32 * 4, "16 x 8 x 8 a warp"),
            "reduced": Box(SHARED, 5, "sums of warps", 512, "8 x 16"),
            "out": Box(DEVICE, 5, "out", 128 * 4, "128"),
        },
        (
            ("x", "values", "ld, 16 bytes|a thread"),
            ("values", "stages", "scaled,|as fp16"),
            ("stages", "sums", "ldmatrix: 4 planes,|16 registers each"),
            ("weight", "sums", "once, into 54|registers a thread"),
            ("sums", "reduced", "maxima, shuffles"),
            ("reduced", "out", "warp 0"),
        ),
    ),
    ("conv3d_div_max_gap_bias_sum", "v5_hopper"): Picture(
        "stream_max_mean",
        "4 producer warps, 8 consumer warps of 8 windows each",
        {
            "x": CONV_X,
            "stages": Box(SHARED, 1, "stages, fp32", 2 * 32768, "2 of 32,768"),
            "values": Box(REGISTERS, 2, "values of x", 128 * 104 * 4, "producers' registers"),
            "rest": Box(SHARED, 2, "scales, mbarriers", 288, "and segments"),
            "bands": Box(SHARED, 3, "bands, fp16", 4 * 32768, "4 of 32,768"),
            "weight": Box(DEVICE, 4, "weights", CONV_WEIGHTS, "16 x 216"),
            "weights": Box(SHARED, 4, "weights, fp16", 2 * 27 * 256, "high and low parts"),
            "sums": Box(REGISTERS, 4, "sums", 256 * 32 * 4, "16 x 8 x 8 a warp"),
            "reduced": Box(SHARED, 5, "sums of warps", 1024, "2 x 8 x 16"),
            "out": Box(DEVICE, 5, "out", 128 * 4, "128"),
        },
        (
            ("x", "stages", "TMA, asked for by|one producer"),
            ("stages", "values", "ld.shared, by|producers"),
            ("values", "bands", "scaled,|as fp16"),
            ("bands", "sums", "ldmatrix;|two planes stay"),
            ("weight", "weights", "once"),
            ("weights", "sums", "54 registers"),
            ("sums", "reduced", "maxima, shuffles"),
            ("reduced", "out", "warp 0"),
        ),
    ),
    ("alexnet_conv1", "v3_tiled"): Picture(
        "conv2d",
        "128 threads: 2 x 56 positions x 96 channels, in 9 slices of 4 rows of the kernel",
        {
            "x": ALEX_X,
            "rows": Box(SHARED, 1, "rows of x", 2 * 8 * 232 * 4, "2 stages of 8 rows"),
            "pixels": Box(REGISTERS, 2, "pixels", 128 * 35 * 4, "35 a thread"),
            "weight": Box(DEVICE, 4, "packed weights", 9 * 44 * 96 * 4, "9 slices x 44 x 96"),
            "weights": Box(SHARED, 4, "weights", 2 * 44 * 96 * 4, "2 stages of 44 x 96"),
            "sums": Box(REGISTERS, 4, "sums", 128 * 84 * 4, "7 x 12 a thread"),
            "staging": Box(SHARED, 5, "outputs", 96 * 113 * 4, "in the stages' place", True),
            "out": ALEX_OUT,
        },
        (
            ("x", "rows", "cp.async, while the other|stage is read"),
            ("rows", "pixels", "once for 11 taps"),
            ("pixels", "sums", "924 multiply-adds"),
            ("weight", "weights", "cp.async"),
            ("weights", "sums", "12 a tap"),
            ("sums", "staging", "and the bias"),
            ("staging", "out", "coalesced"),
        ),
    ),
    ("alexnet_conv1", "v4_tensor_core"): Picture(
        "convolve",
        "4 producer warps, 8 consumer warps of 64 positions x 48 outputs each",
        {
            "x": ALEX_X,
            "values": Box(REGISTERS, 1, "rows of x", None, "128 producer threads"),
            "rest": Box(SHARED, 1, "scales, mbarriers", 880, "full and empty"),
            "stages": Box(SHARED, 2, "pipeline, fp16", 4 * 14592, "4 stages of 14,592"),
            "weight": Box(DEVICE, 3, "packed weights", 82944, "fp16"),
            "weights": Box(SHARED, 3, "weights, fp16", 82944, "3 x 18 units x 96"),
            "sums": Box(REGISTERS, 4, "sums", 256 * 96 * 4, "64 x 48 a warp"),
            "staging": Box(SHARED, 5, "outputs", 17408, "8 channels a warp"),
            "out": ALEX_OUT,
        },
        (
            ("x", "values", "ld, a channel's|rows at a time"),
            ("values", "stages", "scaled,|as fp16"),
            ("stages", "sums", "ldmatrix: a tap|is an address"),
            ("weight", "weights", "cp.async, once"),
            ("weights", "sums", "ldmatrix"),
            ("sums", "staging", "8 channels"),
            ("staging", "out", "coalesced"),
        ),
    ),
    ("alexnet_conv1", "v5_hopper"): Picture(
        "convolve",
        "2 producer and 2 consumer warpgroups, in pairs; a consumer has 192 positions x 96 outputs",
        {
            "x": ALEX_X,
            "values": Box(REGISTERS, 1, "rows of x", 256 * 72 * 4, "producers' registers"),
            "rest": Box(SHARED, 1, "scales, mbarriers", 1096, "full and empty"),
            "stages": Box(SHARED, 2, "pipelines, fp16", 2 * 4 * 12768, "2 x 4 stages"),
            "weight": Box(DEVICE, 3, "packed weights", 82944, "fp16"),
            "weights": Box(SHARED, 3, "weights, fp16", 82944, "3 x 18 units x 96"),
            "sums": Box(REGISTERS, 4, "sums", 256 * 144 * 4, "144 a thread"),
            "staging": Box(SHARED, 5, "outputs", 2 * 3 * 8 * 196 * 4, "2 x 3 x 8 channels"),
            "out": ALEX_OUT,
        },
        (
            ("x", "values", "ld, a channel's|rows at a time"),
            ("values", "stages", "scaled,|as fp16"),
            ("stages", "sums", "wgmma's a:|a tap is an address"),
            ("weight", "weights", "bulk copy, once"),
            ("weights", "sums", "wgmma's b"),
            ("sums", "staging", "8 channels"),
            ("staging", "out", "bulk copies"),
        ),
    ),
}


def images(model):
    """(variant, text of an SVG file) of every picture of the model."""
    for (own, variant), picture in PICTURES.items():
        if own == model:
            yield variant, image(picture, f"{model}, {variant}: what a block keeps where")


def image(picture, title):
    """The text of an SVG file."""
    slots = 1 + max(box.slot for box in picture.boxes.values())
    width = 2 * MARGIN + slots * SLOT - (SLOT - BOX_WIDTH)
    tops = {memory: 24 + n * (BAND_HEIGHT + GAP) for n, memory in enumerate(BANDS)}
    drawing = plain_svg.Drawing(width, tops[REGISTERS] + BAND_HEIGHT + 6)
    drawing.text(MARGIN, 12, f"{picture.kernel}: {picture.who}", anchor="start", bold=True)
    for memory, name in BANDS.items():
        if memory == SHARED:
            name += f": {picture.shared_bytes:,} bytes"
        drawing.frame(2, tops[memory], width - 4, BAND_HEIGHT)
        drawing.text(MARGIN + SLOT * (memory == SHARED), tops[memory] + 14, name, anchor="start")  # clear of x's arrow
    for arrow in picture.arrows:
        _draw_arrow(drawing, picture, tops, arrow)
    for box in picture.boxes.values():
        lines = [box.name, "" if box.size is None else f"{box.size:,} bytes", box.detail]
        drawing.box(_left(box), tops[box.memory] + HEAD, BOX_WIDTH, BOX_HEIGHT, box.memory, [line for line in lines if line])
    return drawing.svg(title, _in_words(picture))


def _left(box):
    return MARGIN + box.slot * SLOT


def _draw_arrow(drawing, picture, tops, arrow):
    """Down, then across; or across, then up. Within a band across, and within a slot straight up or down."""
    start, end = picture.boxes[arrow[0]], picture.boxes[arrow[1]]
    order = list(BANDS)
    down = order.index(end.memory) - order.index(start.memory)
    top, other_top = tops[start.memory] + HEAD, tops[end.memory] + HEAD
    entering = [first for first, to, _ in picture.arrows if to == arrow[1] and picture.boxes[first].slot < end.slot]
    level = (
        other_top + BOX_HEIGHT / 2 + 12 * (entering.index(arrow[0]) - (len(entering) - 1) / 2 if arrow[0] in entering else 0)
    )
    if down == 0:
        y = top + BOX_HEIGHT / 2
        points = [(_left(start) + BOX_WIDTH, y), (_left(end), y)]
        label, anchor = ((points[0][0] + points[1][0]) / 2, y - 8), "middle"
    elif start.slot == end.slot:
        x = _left(start) + BOX_WIDTH / 2
        points = [(x, top + BOX_HEIGHT * (down > 0)), (x, other_top + BOX_HEIGHT * (down < 0))]
        label, anchor = (x + 6, _gap(tops, start, end)), "start"
    elif down > 0:
        x = _left(start) + BOX_WIDTH * 3 / 4
        points = [(x, top + BOX_HEIGHT), (x, level), (_left(end), level)]
        label, anchor = (x + 6, _gap(tops, start, end)), "start"
    else:
        x, y = _left(end) + BOX_WIDTH / 4, top + BOX_HEIGHT / 2
        points = [(_left(start) + BOX_WIDTH, y), (x, y), (x, other_top + BOX_HEIGHT)]
        is_last = end.slot == max(box.slot for box in picture.boxes.values())  # no arrow leaves it downwards
        label, anchor = (x + 6 if is_last else x - 6, _gap(tops, start, end)), "start" if is_last else "end"
    drawing.arrow(points)
    lines = arrow[2].split("|")
    for n, line in enumerate(lines):
        drawing.text(label[0], label[1] + 13 * (n - (len(lines) - 1) / 2), line, anchor=anchor)


def _gap(tops, start, end):
    """The middle between the bands that an arrow comes past first, a baseline."""
    upper = min(tops[start.memory], tops[end.memory])
    return upper + BAND_HEIGHT + GAP / 2 + 4


def _in_words(picture):
    """For those who cannot see it."""
    kept = "; ".join(
        f"{BANDS[box.memory]}: {box.name}{'' if box.size is None else f', {box.size:,} bytes'} ({box.detail})"
        for box in picture.boxes.values()
    )
    handed = "; ".join(
        f"{picture.boxes[first].name} to {picture.boxes[to].name}: {how.replace('|', ' ')}" for first, to, how in picture.arrows
    )
    return f"{picture.who}. {kept}. {handed}."
