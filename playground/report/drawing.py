"""matplotlib's figures as SVG: text stays text, and colours are names that a page, a theme or a file fills in."""

import io
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from playground.report.text import plain

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
UNITS_AN_INCH = 72  # of the view box; figures are laid out in these units
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

NAMES = ("ink", "soft", "faint", "paper", "variant", "graphed", "baseline", "floor", "good", "bad", "device", "shared", "panel")
# What stands in a figure for the colours of these names.
INK, SOFT, FAINT, PAPER, VARIANT, GRAPHED, BASELINE, FLOOR, GOOD, BAD, DEVICE, SHARED, PANEL = COLOURS = tuple(
    f"#01{number:02x}01" for number in range(1, len(NAMES) + 1)
)
PAGE = {name: f"var(--{name})" for name in NAMES}
# Readable on white and on black; white text is readable on the filled ones.
ANYWHERE = dict.fromkeys(NAMES, "#74808c") | {"paper": "none", "variant": "#2b62b0", "floor": "#c8641a"}
ANYWHERE |= {"good": "#17703c", "shared": "#17703c", "device": "#5b6672", "bad": "#c8641a"}
# GitHub's pages, whose background shows through.
LIGHT = ANYWHERE | {"ink": "#1f2328", "soft": "#59636e", "faint": "#d1d9e0", "variant": "#0969da", "graphed": "#80b9ff"}
LIGHT |= {"baseline": "#59636e", "floor": "#bc4c00"}
DARK = ANYWHERE | {"ink": "#f0f6fc", "soft": "#9198a1", "faint": "#3d444d", "variant": "#4493f8", "graphed": "#1f6feb"}
DARK |= {"baseline": "#9198a1", "floor": "#f0883e"}

STYLE = {
    "svg.fonttype": "none",  # text, not outlines: smaller, and it can be found, copied and read aloud
    "svg.hashsalt": "playground",
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.family": "sans-serif",
    "axes.facecolor": "none",
    "axes.linewidth": 0.6,
    "axes.unicode_minus": False,
}
LINES = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def style(colour=INK, size=10):
    """Return the context in which figures are drawn and saved, with lines of that colour and text of that size."""
    return matplotlib.rc_context(STYLE | dict.fromkeys(LINES, colour) | {"font.size": size})


def figure(width, height):
    """Return an empty figure of that many units, with no background; call it inside `style()`."""
    made = Figure(figsize=(width / UNITS_AN_INCH, height / UNITS_AN_INCH))
    FigureCanvasSVG(made)
    made.patch.set_visible(False)
    return made


def sheet(made):
    """Return axes over the whole figure, in units from the upper left corner and without anything drawn."""
    width, height = made.get_size_inches() * UNITS_AN_INCH
    axes = made.add_axes([0, 0, 1, 1], xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return axes


def svg(drawn, name, title, description, colours=PAGE):
    """Return a figure as an <svg> element with `colours`, ids that begin with `name`, a text for those who cannot see it."""
    file = io.StringIO()
    drawn.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    filled = dict(zip(COLOURS, (colours[each] for each in NAMES), strict=True))
    root[:] = [child for child in root if child.tag != f"{SVG}metadata" and child.find(f"{SVG}style") is None]
    used = set(re.findall(r"#(\w+)\)?\"", file.getvalue()))
    for node in root.iter():
        node.tail, node.text = None, node.text if node.tag == f"{SVG}text" else None
        if node.attrib.get("id") not in used:
            node.attrib.pop("id", None)
        is_page_link = node.tag == f"{SVG}a"  # to a place of the page
        tidied = {key: value if is_page_link else _tidy(key, value, name, filled) for key, value in node.attrib.items()}
        node.attrib = {"href" if key == LINK else key: value for key, value in tidied.items() if value or key != "transform"}
    box = root.get("viewBox")
    root.attrib = {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title", "aria-describedby": f"{name}-text"}
    size = dict(zip(("width", "height"), box.split()[2:], strict=True))
    root.attrib |= {"class": "plot"} if colours is PAGE else size | {"font-family": FONTS}
    for place, (tag, text, ending) in enumerate((("title", title, "title"), ("desc", description, "text"))):
        root.insert(place, ElementTree.Element(f"{SVG}{tag}", {"id": f"{name}-{ending}"}))
        root[place].text = plain(text)
    ElementTree.register_namespace("", SVG.strip("{}"))
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _tidy(key, value, name, colours):
    if key == "id":
        return f"{name}-{value}"
    value = re.sub(r"^#|(?<=url\()#", f"#{name}-", value) if key in (LINK, "clip-path") else value
    value = re.sub("#01[0-9a-f]{2}01", lambda match: colours.get(match[0], match[0]), value)
    value = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
    value = re.sub(r"font: ([\d.]+px) [^;]*", r"font-size: \1", value)
    value = re.sub(r"font-family: [^;]*; |; stroke-linecap: square|; stroke-linejoin: miter|rotate\(-0 [^)]*\)", "", value)
    return " ".join(value.split())
