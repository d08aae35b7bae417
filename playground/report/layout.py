"""How text and tables are laid out in ASCII: folded or stacked on a terminal, whole lines in a pipe, and never cut off."""

import contextlib
import itertools
import os
import re
import sys

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from playground.report.text import one_line, printable

MIN_WIDTH = 60
UNFOLDED = 1 << 16  # columns: no line reaches that
GAP = 2  # between columns
INDENT = 2
MIN_NAME_WIDTH = 16
MIN_PROSE_WIDTH = 30  # of a table's last column; where there is less, it becomes a table of its own

RULE_BELOW_HEAD = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
LOOK = {"box": RULE_BELOW_HEAD, "show_edge": False, "pad_edge": False, "padding": (0, GAP - 1, 0, 0), "header_style": "dim"}

STYLES = dict.fromkeys(("pass", "ok", "faster"), "green") | {"fail": "bold red", "error": "bold red", "slower": "red"}
STYLES |= dict.fromkeys(("forward only", "refused", "not comparable", "skipped", "none"), "yellow")


class _WithoutTrailingBlanks:
    """A text file without the blanks that rich pads lines with. A run goes on where a disk is full or nobody reads a pipe."""

    def __init__(self, file):
        self._file = file

    def write(self, text):
        return self._try(self._file.write, re.sub(r" +(?=\n)", "", text))

    def flush(self):
        self._try(self._file.flush)

    def _try(self, action, *arguments):
        try:
            return action(*arguments)
        except OSError as complaint:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())  # what is in the buffer goes there, too
            os.close(nowhere)
            if not isinstance(complaint, BrokenPipeError):
                with contextlib.suppress(OSError):  # nor can that be written, where a terminal is gone
                    print(f"the output cannot be written: {complaint.strerror}", file=sys.stderr)

    def __getattr__(self, name):
        return getattr(self._file, name)


def make_console(file=None):
    """Return a console on `file` (stdout), MIN_WIDTH or more columns wide; nothing is folded without a terminal and COLUMNS."""
    file = file or sys.stdout
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="backslashreplace")  # a name that the encoding lacks must not end the run
    console = Console(file=_WithoutTrailingBlanks(file), **unstyled())
    unfolded = not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit()
    console.width = UNFOLDED if unfolded else max(MIN_WIDTH, console.width)
    return console


def unstyled():
    """Return the arguments of a rich Console that keep it from any style, bold and dim, too, where NO_COLOR is set."""
    return {"color_system": None} if os.environ.get("NO_COLOR") else {}


def print_folded(console, text, indent=0, style="", hanging=0):
    """Print text from anywhere: no markup, folded where it must be, the lines after the first `hanging` columns further in."""
    line = text if isinstance(text, Text) else Text(one_line(text), style=style)
    room = console.width - indent
    hanging = min(hanging, room // 2)
    room -= hanging
    pieces = line.wrap(console, room, overflow="fold") or [Text()]
    for index, piece in enumerate(pieces):
        piece.rstrip()
        margin = Text(" " * (indent + (hanging if index else 0)))
        console.print(margin.append_text(piece), highlight=False, no_wrap=True, overflow="ignore", crop=False)


def print_indented(console, table):
    console.print(Padding(table, (0, 0, 0, INDENT), expand=False))


def verdict(word):
    """Return a verdict in its colour: green, red, or yellow for what is neither."""
    return Text(word, style=STYLES.get(word, ""))


def as_cell(value):
    return value if isinstance(value, Text) else Text(printable(value))


def fitted(rows, width, words):
    """Return a table of {name: cell} rows that fits a width, up to four columns of numbers, or `words`, below one another."""
    rows = [{name: as_cell(value) for name, value in row.items()} for row in rows]
    runs = [list(run) for _, run in itertools.groupby(rows[0], key=lambda name: name in words)]
    for depth in (1, 2, 3, 4):
        groups = [run[at : at + depth] for run in runs for at in range(0, len(run), depth)]
        heads = [Text("\n".join(name.replace("\n", " ") for name in group) if len(group) > 1 else group[0]) for group in groups]
        lines = [[_stacked(row, group) for group in groups] for row in rows]
        widths = natural_widths([heads, *lines])
        if total_width(widths) <= width:
            break
    excess = max(0, total_width(widths) - width)
    widths[0] = max(widths[0] - excess, min(widths[0], MIN_NAME_WIDTH))
    made = Table(**LOOK)
    for head, size, group in zip(heads, widths, groups, strict=True):
        made.add_column(head, width=size, justify="left" if group[0] in words else "right", overflow="fold")
    for line in lines:
        made.add_row(*line)
    return made


def _stacked(row, group):
    """Return the cells below one another, all but the first dim, unless they have a colour."""
    first, *others = (row[name] for name in group)
    return Text("\n").join([first, *(cell if cell.style else Text(cell.plain, style="dim") for cell in others)])


def natural_widths(lines):
    """Return how wide each column must be so that nothing is folded."""
    columns = zip(*lines, strict=True)
    return [max(cell_len(line) for cell in column for line in str(cell).split("\n")) for column in columns]


def total_width(widths):
    return sum(widths) + GAP * (len(widths) - 1)


def print_rows(console, rows, words):
    """Print a table of {name: str or Text} rows below what was printed last, indented; nothing where there are none."""
    if rows:
        console.print()
        print_indented(console, fitted(rows, console.width - INDENT, words))


def print_prose(console, heads, rows):
    """Print a table of lists of str or Text whose last column is prose; where that has no room, it gets a table of its own."""
    if not rows:
        return
    rows = [[as_cell(value) for value in row] for row in rows]
    room = console.width - INDENT - total_width(natural_widths([[*heads[:-1], ""], *([*row[:-1], ""] for row in rows)]))
    if len(heads) > 2 and room < min(MIN_PROSE_WIDTH, max(natural_widths([[row[-1]] for row in rows]))):
        print_prose(console, heads[:-1], [row[:-1] for row in rows])
        heads, rows = (heads[0], heads[-1]), [(row[0], row[-1]) for row in rows if row[-1].plain]
    made = Table(**LOOK)
    for index, head in enumerate(heads):
        made.add_column(head, overflow="fold", no_wrap=0 < index < len(heads) - 1)
    for row in rows:
        made.add_row(*row)
    console.print()
    print_indented(console, made)
