"""matplotlib's figures as SVG elements of a page: text stays text, and colours are names that the page fills in."""

import io
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from playground.report.page.text import plain

SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
UNITS_AN_INCH = 72  # of the view box; figures are laid out in these units

# Colours in a figure are placeholders; a page replaces them by CSS variables, an image by what suits its background.
INK, SOFT, FAINT, PAPER = "#010101", "#020202", "#030303", "#040404"
VARIANT, GRAPHED, BASELINE, FLOOR, BAD = "#050505", "#060606", "#070707", "#080808", "#090909"
NAMES = {
    **{INK: "ink", SOFT: "soft", FAINT: "faint", PAPER: "paper"},
    **{VARIANT: "variant", GRAPHED: "graphed", BASELINE: "baseline", FLOOR: "floor", BAD: "bad"},
}
AS_VARIABLES = {colour: f"var(--{name})" for colour, name in NAMES.items()}

STYLE = {
    "svg.fonttype": "none",  # text, not outlines: smaller, and it can be found, copied and read aloud
    "svg.hashsalt": "playground",
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.family": "sans-serif",
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.linewidth": 0.6,
    "axes.unicode_minus": False,
}


def figure(width, height):
    """An empty figure of that many units, in the project's style (use it inside `style()`)."""
    made = Figure(figsize=(width / UNITS_AN_INCH, height / UNITS_AN_INCH))
    FigureCanvasSVG(made)
    made.patch.set_visible(False)
    return made


def style():
    """The context in which figures are drawn and saved."""
    return matplotlib.rc_context(STYLE)


def element(drawn, name, title, description, colours=AS_VARIABLES, **attributes):
    """A figure as an <svg> element. `name` keeps its ids apart from those of other figures on the page.

    `title` and `description` are for those who cannot see it. Everything that came from elsewhere is escaped. `attributes` are
    added to the element.
    """
    file = io.StringIO()
    drawn.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    _rename_ids(root, name)
    for node in root.iter():
        for key, value in list(node.attrib.items()):
            node.set(key, _tidy(value, colours))
        if node.get("transform", "").startswith("rotate(-0 "):
            del node.attrib["transform"]
    box = root.get("viewBox")
    root.attrib.clear()
    accessible = {"role": "img", "aria-labelledby": f"{name}-title", "aria-describedby": f"{name}-text"}
    root.attrib.update({"viewBox": box, "class": "plot", **accessible, **attributes})
    for tag, text, ending in (("desc", description, "text"), ("title", title, "title")):
        node = ElementTree.Element(f"{{{SVG}}}{tag}", {"id": f"{name}-{ending}"})
        node.text = plain(text)
        root.insert(0, node)
    for node in root.iter():
        node.tail = None
        if node.tag not in (f"{{{SVG}}}text", f"{{{SVG}}}title", f"{{{SVG}}}desc"):
            node.text = None
    ElementTree.register_namespace("", SVG)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _rename_ids(root, name):
    """Ids that are referred to get short names of their own; the others go."""
    text = " ".join(value for node in root.iter() for value in node.attrib.values())
    used = set(re.findall(r"#([\w-]+)", text))
    new = {old: f"{name}-{number}" for number, old in enumerate(sorted(used))}
    for node in root.iter():
        if "id" in node.attrib:
            old = node.attrib.pop("id")
            if old in new:
                node.set("id", new[old])
        if LINK in node.attrib:
            node.set("href", "#" + new[node.attrib.pop(LINK).removeprefix("#")])
        for key, value in node.attrib.items():
            node.set(key, re.sub(r"url\(#([\w-]+)\)", lambda match: f"url(#{new[match[1]]})", value))


def _tidy(value, colours):
    """Placeholders filled in, coordinates to a tenth of a unit, and the page's own fonts."""
    for colour, meant in colours.items():
        value = value.replace(colour, meant)
    value = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
    value = re.sub(r"font: (?:(\d+|bold) )?([\d.]+px) [^;]*", _font, value)
    value = re.sub(r"font-family: [^;]*(?:; )?|; stroke-linecap: square", "", value)
    return " ".join(value.split())


def _font(match):
    return f"font-size: {match[2]}" + (f"; font-weight: {match[1]}" if match[1] else "")
