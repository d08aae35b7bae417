"""A variant's own explanation: its docstring, taken apart, and laid out for a terminal of any width.

The docstring is read, never run. What stands in columns stays in columns, formulas stay on their lines, and prose is filled
anew, so that 80 columns show no ragged lines.
"""

import ast
import re
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from playground.catalog import CatalogError
from playground.report.figures import printable
from playground.report.layout import GAP, INDENT, RULE_BELOW_HEAD, print_folded, print_indented

PROSE_WIDTH = 100  # longer lines are hard to read
FULL = 0.8  # a line of prose that, with the next line's first word, is longer than this part of the longest goes on in the next
FORMULA = re.compile(r"\[[^\]]*\].* = | = .*\[[^\]]*\]")  # an equation of something with indices
COLUMN_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
PARENT = re.compile(r"^Like (v\d+)\b", re.MULTILINE)


@dataclass(frozen=True)
class Prose:
    """A paragraph, or a sentence that the author gave a line of its own."""

    text: str


@dataclass(frozen=True)
class Lines:
    """Formulas and the like: each line stays one."""

    lines: list


@dataclass(frozen=True)
class Columns:
    """A table: `rows` are as long as `heads`."""

    heads: list
    rows: list


@dataclass
class Section:
    """`heading` is None for what stands before the first one. `blocks` are Prose, Lines and Columns; None is a blank line."""

    heading: str | None
    blocks: list = field(default_factory=list)


def docstring(path):
    """The docstring of a Python file. Raises CatalogError when it has none or is no Python."""
    try:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
    except (SyntaxError, ValueError) as error:
        raise CatalogError(f"{path.name} is not Python: {error}") from None
    if not text:
        raise CatalogError(f"{path.name} has no docstring; a variant explains itself there (see kernels/ for examples)")
    return text


def sections(text):
    """(title, [Section]) of a docstring whose headings stand at the left edge, each with an indented text below."""
    title, *lines = [printable(line).rstrip() for line in text.expandtabs(4).splitlines()]
    longest = max(map(len, lines), default=0)
    found = [Section(None)]
    start = 0
    for index, line in enumerate([*lines, "end"]):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        is_heading = bool(line) and not line.startswith(" ") and following.startswith(" ")
        if is_heading or index == len(lines):
            found[-1].blocks = _blocks(_without_margin(lines[start:index]), longest)
            start = index + 1
        if is_heading:
            found.append(Section(line))
    return title, [section for section in found if section.blocks or section.heading]


def parent(text):
    """'v2' where the docstring says that the variant is like v2; None where it names none."""
    match = PARENT.search(text)
    return match and match.group(1)


def show(variant, console, siblings=()):
    """Print the explanation of a variant. `siblings` are the variants of its model, among which its parent is looked for."""
    text = docstring(variant.path)
    title, parts = sections(text)
    print_folded(console, title, style="bold")
    for section in parts:
        console.print()
        if section.heading:
            print_folded(console, section.heading, style="bold cyan")
        for block in section.blocks:
            _show_block(console, block, INDENT if section.heading else 0)
    console.print()
    source = len(variant.path.read_text(encoding="utf-8", errors="replace").splitlines())
    print_folded(console, f"{variant.path}, {source} lines", style="dim")
    begins = f"{parent(text)}_"
    for ancestor in [sibling for sibling in siblings if sibling.name.startswith(begins)]:
        names = " ".join(f"{variant.path.parent.name}/{each.name}" for each in (ancestor, variant))
        print_folded(console, f"What it changed: python compare.py --diff {names}", style="dim")


def _without_margin(lines):
    """`lines` without blank ones at the ends and without the indentation that all of them share."""
    while lines and not lines[0]:
        lines = lines[1:]
    while lines and not lines[-1]:
        lines = lines[:-1]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return [line[margin:] for line in lines]


def _blocks(lines, longest):
    blocks = []
    index = 0
    goes_on = False  # the last line was full, so what follows may belong to it
    while index < len(lines):
        line = lines[index]
        table, taken = _columns(lines[index:])
        if not line:
            blocks.append(None)
        elif table:
            blocks.append(table)
            index += taken
        elif line.startswith(" ") or COLUMN_GAP.search(line) or FORMULA.search(line):
            if not (blocks and isinstance(blocks[-1], Lines)):
                blocks.append(Lines([]))
            blocks[-1].lines.append(line)
        elif goes_on and isinstance(blocks[-1], Prose):
            blocks[-1] = Prose(f"{blocks[-1].text} {line}")
        elif goes_on and isinstance(blocks[-1], Lines) and line[0].islower():
            blocks[-1].lines[-1] += f" {line}"
        else:
            blocks.append(Prose(line))
        following = lines[index + 1].split(" ")[0] if index + 1 < len(lines) else ""
        goes_on = bool(following) and len(line) + 1 + len(following) > FULL * longest
        index += 1
    return blocks


def _columns(lines):
    """(the table that begins with the first line, how many lines it takes below that); (None, 0) where none begins there.

    It has heads of three columns or more, and rows that keep to them.
    """
    heads = COLUMN_GAP.split(lines[0])
    if len(heads) < 3 or lines[0].startswith(" ") or FORMULA.search(lines[0]):
        return None, 0
    starts = [0, *(match.end() for match in COLUMN_GAP.finditer(lines[0]))]
    rows = []
    taken = 0
    for line in lines[1:]:
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        keeps = not any(line[start - 1 : start].strip() for start in starts[1:])
        if keeps and COLUMN_GAP.search(line):
            rows.append(cells)
        elif keeps and rows and line and not cells[0]:  # the row before goes on
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
        else:
            break
        taken += 1
    return (Columns(heads, rows), taken) if rows else (None, 0)


def _show_block(console, block, indent):
    if block is None:
        console.print()
    elif isinstance(block, Prose):
        print_folded(console, block.text, indent, width=PROSE_WIDTH)
    elif isinstance(block, Lines):
        for line in block.lines:
            print_folded(console, Text(line), indent, hanging=len(line) - len(line.lstrip()) + 4)
    else:
        table = Table(box=RULE_BELOW_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="dim")
        for head in block.heads:
            table.add_column(Text(head), overflow="fold")
        for row in block.rows:
            table.add_row(*map(Text, row))
        print_indented(console, table, indent)
