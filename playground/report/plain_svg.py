"""Boxes, bars and arrows as the text of an SVG file whose colours are readable on white and on black."""

from html import escape

DEVICE, SHARED, REGISTERS, LINE = "#5b6672", "#17703c", "#2b62b0", "#74808c"  # white text is readable on the first three
FLOOR = "#c8641a"
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
TEXT = 11.5


class Drawing:
    """All coordinates are units of the view box, from the upper left corner; a text's y is that of its baseline."""

    def __init__(self, width, height):
        self.width, self.height = width, height
        self._parts = []

    def text(self, x, y, text, anchor="middle", fill=LINE, bold=False):
        weight = ' font-weight="600"' if bold else ""
        self._add(f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(text)}</text>')

    def frame(self, x, y, width, height):
        self._add(f'<rect {_box(x, y, width, height)} rx="6" fill="{LINE}" fill-opacity="0.1"/>')

    def bar(self, x, y, width, height, fill):
        self._add(f'<rect {_box(x, y, width, height)} fill="{fill}"/>')

    def box(self, x, y, width, height, fill, lines):
        """The first of its lines is bold."""
        self._add(f'<rect {_box(x, y, width, height)} rx="5" fill="{fill}"/>')
        first = y + height / 2 + 4 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * number, line, fill="#ffffff", bold=number == 0)

    def line(self, points):
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._add(f'<polyline points="{places}" fill="none" stroke="{LINE}" stroke-width="1.6"/>')

    def arrow(self, points):
        """A line with a head at its last point."""
        (x0, y0), (x, y) = points[-2:]
        right, down = (x > x0) - (x < x0), (y > y0) - (y < y0)
        back_x, back_y = x - 8 * right, y - 8 * down
        self.line([*points[:-1], (back_x, back_y)])
        corners = (x, y), (back_x - 4 * down, back_y + 4 * right), (back_x + 4 * down, back_y - 4 * right)
        self._add(f'<polygon points="{" ".join(f"{_n(a)},{_n(b)}" for a, b in corners)}" fill="{LINE}"/>')

    def svg(self, title, description):
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" width="{_n(self.width)}" height="{_n(self.height)}"'
        names = 'role="img" aria-labelledby="title" aria-describedby="description"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}" font-size="{TEXT}" {names}>'
        words = f'<title id="title">{escape(title)}</title>\n<desc id="description">{escape(description)}</desc>'
        return "\n".join([head, words, *self._parts, "</svg>"]) + "\n"

    def _add(self, element):
        self._parts.append(element)


def _n(number):
    return f"{number:.1f}".removesuffix(".0")


def _box(x, y, width, height):
    return f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
