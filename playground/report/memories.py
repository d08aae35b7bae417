"""What a block of v3 to v5 keeps in which memory, and who hands what to whom: docs/pictures/<model>-<variant>.svg.

Of the forward pass at the original's size, TF32 permitted, on a GPU whose blocks may have 227 KB of shared memory. `PICTURES`
says what there is; `image` draws any of them. A test holds the bytes of shared memory against the kernels' own docstrings.
"""

from dataclasses import dataclass

from playground.report import drawing
from playground.report.drawing import DEVICE, PANEL, SHARED, VARIANT

MEMORIES = {  # letter -> name and colour of a band, from top to bottom
    "D": ("device memory", DEVICE),
    "S": ("shared memory of a block", SHARED),
    "R": ("registers", VARIANT),
}
SLOT, BOX_WIDTH, BOX_HEIGHT = 152, 134, 58  # a slot is as wide as a box and the arrow to the next one
BAND_HEIGHT, HEAD, GAP = 84, 20, 58  # of a band, of its name, between bands
MARGIN, TOP = 12, 28
LOOK = {"fontsize": 11.5, "color": PANEL, "va": "center"}


@dataclass(frozen=True)
class Box:
    """What stands at `place`: a memory's letter and a slot, from the left.

    `size` is in bytes, None where it is not fixed. `to` is the place to which an arrow leads, `how` says who hands it over, in
    lines separated by "|". Overlaid: later, in other boxes' bytes.
    """

    place: str
    name: str
    size: int | None
    detail: str
    to: str = ""
    how: str = ""
    is_overlaid: bool = False

    @property
    def memory(self):
        return self.place[0]

    @property
    def slot(self):
        return int(self.place[1:])

    @property
    def left(self):
        return MARGIN + self.slot * SLOT

    @property
    def top(self):
        return _band(self.memory) + HEAD


# (model, variant) -> the launch whose block is drawn and who works in it, then the boxes.
PICTURES = {
    ("conv_pool_sigmoid_sum", "v3_box_sums"): (
        "sum_sigmoids: 128 threads: a tile of 32 x 4 windows, 18 of 72 terms at a time",
        Box("D0", "x", 128 * 8 * 384 * 384 * 4, "128 x 8 x 384 x 384", "S1", "a thread: 6 pixels,|added 4 at a time"),
        Box("S1", "column sums", 6 * 4 * 160 * 4, "6 x 4 rows x 160", "R2", "a window's thread"),
        Box("R2", "column sums", 128 * 6 * 4, "6 a thread", "S3", "added 4|at a time"),
        Box("S3", "box sums", 18 * 128 * 4, "18 terms x 128", "R4", "8 windows"),
        Box("D4", "weights", 64 * 72 * 4, "64 x 72", "S4", "scaled, by all"),
        Box("S4", "weights", 18 * 68 * 4, "18 terms x 68", "R4", "8 channels"),
        Box("R4", "sums", 128 * 64 * 4, "8 x 8 a thread", "S5", "sigmoid, sum"),
        Box("S5", "sums of warps", 4 * 4, "4", "D5", "thread 0"),
        Box("D5", "sums of tiles", 128 * 72 * 4, "128 x 72"),
    ),
    ("conv_pool_sigmoid_sum", "v4_tensor_core"): (
        "conv_pool_sum: 12 warps of 16 positions each, in 3 groups of 4",
        Box("D0", "x", 128 * 8 * 384 * 384 * 4, "128 x 8 x 384 x 384", "S1", "cp.async, each warp|for itself"),
        Box("S1", "12 pipelines", 12 * 8704, "4 rows a warp", "R2", "ld.shared, by the|same warp"),
        Box("S2", "biases, scales", 512, "and the segment"),
        Box("R2", "box sums, fp32", 384 * 36 * 4, "36 a lane", "S3", "scaled,|16 positions"),
        Box("S3", "box sums, fp16", 3 * 10240, "64 positions a group", "R4", "ldmatrix, 64|positions"),
        Box("D4", "weights", 64 * 72 * 4, "64 x 72", "S4", "once, by all"),
        Box("S4", "weights, fp16", 20480, "high and low parts", "R4", "mma.sync's a"),
        Box("R4", "sums", 384 * 16 * 4, "16 x 32 a warp", "D5", "sigmoid, sum over|a sample"),
        Box("D5", "sums of samples", 128 * 4, "128"),
    ),
    ("conv_pool_sigmoid_sum", "v5_hopper"): (
        "conv_pool_sum: 1 producer warpgroup, 3 consumer warpgroups of 64 positions each",
        Box("D0", "x", 128 * 8 * 384 * 384 * 4, "128 x 8 x 384 x 384", "S1", "TMA, by one|producer thread"),
        Box("S1", "pipeline", 6 * 26624, "6 stages of 26,624", "R2", "ld.shared, by|consumer warps"),
        Box("S2", "biases, mbarriers", 600, "full and empty"),
        Box("R2", "box sums, TF32", 384 * 40 * 4, "40 a thread", "R4", "wgmma's a"),
        Box("D4", "weights", 64 * 72 * 4, "64 x 72", "S4", "once"),
        Box("S4", "weights, TF32", 36864, "high and low parts", "R4", "wgmma's b"),
        Box("R4", "sums", 384 * 32 * 4, "64 x 64 a warpgroup", "D5", "sigmoid, sum over|a sample"),
        Box("D5", "sums of samples", 128 * 4, "128"),
    ),
    ("conv3d_div_max_gap_bias_sum", "v3_single_kernel"): (
        "conv_max_mean: 128 threads: a window of 2 x 2 x 2 positions each, in 8 of 16 channels",
        Box("D0", "x", 128 * 8 * 16 * 64 * 64 * 4, "128 x 8 x 16 x 64 x 64", "R1", "ld, cached in L1: each|thread for itself"),
        Box("R1", "pixels", 128 * 16 * 4, "16 a thread", "R3", "192 multiply-adds"),
        Box("D3", "weights", 16 * 216 * 4, "16 x 216", "S3", "once, by all"),
        Box("S3", "weights", 216 * 8 * 4, "216 x 8 channels", "R3", "24 of 3 taps"),
        Box("R3", "sums", 128 * 64 * 4, "8 x 8 a thread", "R5", "scanned in order"),
        Box("R5", "maxima", 128 * 8 * 4, "8 a thread", "S5", "shuffles"),
        Box("S5", "sums of warps", 160, "8 x 4, totals, a flag", "D5", "8 threads"),
        Box("D5", "sums of blocks", 128 * 53 * 2 * 8 * 4, "13,568 x 8"),
    ),
    ("conv3d_div_max_gap_bias_sum", "v4_tensor_core"): (
        "conv_max_mean: 4 producer warps, 8 consumer warps of 8 windows each",
        Box("D0", "x", 128 * 8 * 16 * 64 * 64 * 4, "128 x 8 x 16 x 64 x 64", "R1", "ld, 16 bytes|a thread"),
        Box("R1", "values of x", None, "128 producer threads", "S2", "scaled,|as fp16"),
        Box("S2", "pipeline, fp16", 3 * 32768, "3 bands of 32,768", "R4", "ldmatrix: 4 planes,|16 registers each"),
        Box("D4", "weights", 16 * 216 * 4, "16 x 216", "R4", "once, into 54|registers a thread"),
        Box("S3", "scales, mbarriers", 256, "full and empty"),
        Box("R4", "sums", 256 * 32 * 4, "16 x 8 x 8 a warp", "S5", "maxima, shuffles"),
        Box("S5", "sums of warps", 512, "8 x 16", "D5", "warp 0"),
        Box("D5", "out", 128 * 4, "128"),
    ),
    ("conv3d_div_max_gap_bias_sum", "v5_hopper"): (
        "stream_max_mean: 4 producer warps, 8 consumer warps of 8 windows each",
        Box("D0", "x", 128 * 8 * 16 * 64 * 64 * 4, "128 x 8 x 16 x 64 x 64", "S1", "TMA, asked for by|one producer"),
        Box("S1", "stages, fp32", 2 * 32768, "2 of 32,768", "R2", "ld.shared, by|producers"),
        Box("R2", "values of x", 128 * 104 * 4, "producers' registers", "S3", "scaled,|as fp16"),
        Box("S2", "scales, mbarriers", 288, "and segments"),
        Box("S3", "bands, fp16", 4 * 32768, "4 of 32,768", "R4", "ldmatrix;|two planes stay"),
        Box("D4", "weights", 16 * 216 * 4, "16 x 216", "S4", "once"),
        Box("S4", "weights, fp16", 2 * 27 * 256, "high and low parts", "R4", "54 registers"),
        Box("R4", "sums", 256 * 32 * 4, "16 x 8 x 8 a warp", "S5", "maxima, shuffles"),
        Box("S5", "sums of warps", 1024, "2 x 8 x 16", "D5", "warp 0"),
        Box("D5", "out", 128 * 4, "128"),
    ),
    ("alexnet_conv1", "v3_tiled"): (
        "conv2d: 128 threads: 2 x 56 positions x 96 channels, in 9 slices of 4 rows of the kernel",
        Box("D0", "x", 256 * 3 * 224 * 224 * 4, "256 x 3 x 224 x 224", "S1", "cp.async, while the other|stage is read"),
        Box("S1", "rows of x", 2 * 8 * 232 * 4, "2 stages of 8 rows", "R2", "once for 11 taps"),
        Box("R2", "pixels", 128 * 35 * 4, "35 a thread", "R4", "924 multiply-adds"),
        Box("D4", "packed weights", 9 * 44 * 96 * 4, "9 slices x 44 x 96", "S4", "cp.async"),
        Box("S4", "weights", 2 * 44 * 96 * 4, "2 stages of 44 x 96", "R4", "12 a tap"),
        Box("R4", "sums", 128 * 84 * 4, "7 x 12 a thread", "S5", "and the bias"),
        Box("S5", "outputs", 96 * 113 * 4, "in the stages' place", "D5", "coalesced", is_overlaid=True),
        Box("D5", "out", 256 * 96 * 55 * 55 * 4, "256 x 96 x 55 x 55"),
    ),
    ("alexnet_conv1", "v4_tensor_core"): (
        "convolve: 4 producer warps, 8 consumer warps of 64 positions x 48 outputs each",
        Box("D0", "x", 256 * 3 * 224 * 224 * 4, "256 x 3 x 224 x 224", "R1", "ld, a channel's|rows at a time"),
        Box("R1", "rows of x", None, "128 producer threads", "S2", "scaled,|as fp16"),
        Box("S1", "scales, mbarriers", 880, "full and empty"),
        Box("S2", "pipeline, fp16", 4 * 14592, "4 stages of 14,592", "R4", "ldmatrix: a tap|is an address"),
        Box("D3", "packed weights", 82944, "fp16", "S3", "cp.async, once"),
        Box("S3", "weights, fp16", 82944, "3 x 18 units x 96", "R4", "ldmatrix"),
        Box("R4", "sums", 256 * 96 * 4, "64 x 48 a warp", "S5", "8 channels"),
        Box("S5", "outputs", 17408, "8 channels a warp", "D5", "coalesced"),
        Box("D5", "out", 256 * 96 * 55 * 55 * 4, "256 x 96 x 55 x 55"),
    ),
    ("alexnet_conv1", "v5_hopper"): (
        "convolve: 2 producer and 2 consumer warpgroups, in pairs; a consumer has 192 positions x 96 outputs",
        Box("D0", "x", 256 * 3 * 224 * 224 * 4, "256 x 3 x 224 x 224", "R1", "ld, a channel's|rows at a time"),
        Box("R1", "rows of x", 256 * 72 * 4, "producers' registers", "S2", "scaled,|as fp16"),
        Box("S1", "scales, mbarriers", 1096, "full and empty"),
        Box("S2", "pipelines, fp16", 2 * 4 * 12768, "2 x 4 stages", "R4", "wgmma's a:|a tap is an address"),
        Box("D3", "packed weights", 82944, "fp16", "S3", "bulk copy, once"),
        Box("S3", "weights, fp16", 82944, "3 x 18 units x 96", "R4", "wgmma's b"),
        Box("R4", "sums", 256 * 144 * 4, "144 a thread", "S5", "8 channels"),
        Box("S5", "outputs", 2 * 3 * 8 * 196 * 4, "2 x 3 x 8 channels", "D5", "bulk copies"),
        Box("D5", "out", 256 * 96 * 55 * 55 * 4, "256 x 96 x 55 x 55"),
    ),
}


def shared_bytes(boxes):
    """Return the bytes of shared memory that a block has at a time."""
    return sum(box.size for box in boxes if box.memory == "S" and not box.is_overlaid)


def images(model):
    """Yield (variant, text of an SVG file) of every picture of the model."""
    for (own, variant), (title, *boxes) in PICTURES.items():
        if own == model:
            yield variant, image(title, boxes, f"{model}, {variant}: what a block keeps where")


def image(title, boxes, name):
    """Return the text of an SVG file."""
    longest = max(len(line) for box in boxes for line in box.how.split("|") if box.to)
    last = max(boxes, key=lambda box: box.slot)
    width = last.left + BOX_WIDTH + max(MARGIN, 6.3 * longest - BOX_WIDTH / 2)
    with drawing.style():
        figure = drawing.figure(width, _band("R") + BAND_HEIGHT + 6)
        axes = drawing.sheet(figure)
        axes.text(MARGIN, 12, title, weight="bold", **LOOK)
        for memory, (words, _) in MEMORIES.items():
            words += f": {shared_bytes(boxes):,} bytes" if memory == "S" else ""
            axes.barh(_band(memory) + BAND_HEIGHT / 2, width - 4, height=BAND_HEIGHT, left=2, facecolor=PANEL, alpha=0.1)
            axes.text(MARGIN + SLOT * (memory == "S"), _band(memory) + 11, words, **LOOK)  # clear of x's arrow
        for box in boxes:
            _draw_box(axes, box)
            _draw_arrow(axes, box, boxes)
        return drawing.svg(figure, "memories", name, _in_words(title, boxes), drawing.ANYWHERE) + "\n"


def _band(memory):
    return TOP + list(MEMORIES).index(memory) * (BAND_HEIGHT + GAP)


def _draw_box(axes, box):
    axes.barh(box.top + BOX_HEIGHT / 2, BOX_WIDTH, height=BOX_HEIGHT, left=box.left, facecolor=MEMORIES[box.memory][1])
    lines = [box.name, f"{box.size:,} bytes" if box.size is not None else "", box.detail]
    lines = [line for line in lines if line]
    for number, line in enumerate(lines):
        at = box.left + BOX_WIDTH / 2, box.top + BOX_HEIGHT / 2 + 16 * (number - (len(lines) - 1) / 2)
        axes.text(*at, line, ha="center", weight="normal" if number else "bold", **LOOK | {"color": "#ffffff"})


def _draw_arrow(axes, start, boxes):
    """Draw an arrow down, then across; or across, then up. Within a band across, within a slot straight up or down."""
    end = next((box for box in boxes if box.place == start.to), None)
    if end is None:
        return
    down = list(MEMORIES).index(end.memory) - list(MEMORIES).index(start.memory)
    middle, side = start.top + BOX_HEIGHT / 2, "left"
    gap = min(start.top, end.top) - HEAD + BAND_HEIGHT + GAP / 2  # the middle between the bands that it comes past first
    entering = [box for box in boxes if box.to == end.place and box.slot < end.slot]
    if down == 0:
        points = [(start.left + BOX_WIDTH, middle), (end.left, middle)]
        label, side = ((points[0][0] + points[1][0]) / 2, middle - 12), "center"
    elif start.slot == end.slot:
        x = start.left + BOX_WIDTH / 2
        points = [(x, start.top + BOX_HEIGHT * (down > 0)), (x, end.top + BOX_HEIGHT * (down < 0))]
        label = x + 6, gap
    elif down > 0:
        x = start.left + BOX_WIDTH * 3 / 4
        level = end.top + BOX_HEIGHT / 2 + 12 * (entering.index(start) - (len(entering) - 1) / 2)
        points = [(x, start.top + BOX_HEIGHT), (x, level), (end.left, level)]
        label = x + 6, gap
    else:
        x = end.left + BOX_WIDTH / 4
        points = [(start.left + BOX_WIDTH, middle), (x, middle), (x, end.top + BOX_HEIGHT)]
        is_last = end.slot == max(box.slot for box in boxes)  # no arrow leaves it downwards
        label, side = (x + 6 if is_last else x - 6, gap), "left" if is_last else "right"
    axes.plot(*zip(*points[:-1], strict=True), color=PANEL, linewidth=1.6)
    head = {"arrowstyle": "-|>,head_length=0.5,head_width=0.25", "color": PANEL, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops=head)
    lines = start.how.split("|")
    for number, line in enumerate(lines):
        axes.text(label[0], label[1] + 13 * (number - (len(lines) - 1) / 2), line, ha=side, **LOOK)


def _in_words(title, boxes):
    """Say the picture for those who cannot see it."""
    names = {box.place: box.name for box in boxes}
    sizes = {box: "" if box.size is None else f", {box.size:,} bytes" for box in boxes}
    kept = "; ".join(f"{MEMORIES[box.memory][0]}: {box.name}{sizes[box]} ({box.detail})" for box in boxes)
    handed = "; ".join(f"{box.name} to {names[box.to]}: {box.how.replace('|', ' ')}" for box in boxes if box.to)
    return f"{title}. {kept}. {handed}."
