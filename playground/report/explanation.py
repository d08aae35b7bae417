"""A variant's own explanation: its docstring, which is read, never run."""

import ast
import itertools
import re
import textwrap

from rich.text import Text

from playground.catalog import CatalogError
from playground.report.figures import printable
from playground.report.layout import INDENT, print_folded

KEEPS_LINES = re.compile(r"\S {2}| = ")  # columns and formulas
PARENT = re.compile(r"^Like (v\d+)\b", re.MULTILINE)


def docstring(path):
    """The docstring of a Python file. Raises CatalogError when it has none or is no Python."""
    try:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
    except (SyntaxError, ValueError) as error:
        raise CatalogError(f"{path.name} is not Python: {error}") from None
    if not text:
        raise CatalogError(f"{path.name} has no docstring; a variant explains itself there (see kernels/ for examples)")
    return text


def title(path):
    """The first line of a docstring, without the name that stands before it; "" for a file without one."""
    try:
        return re.sub(r"^\w+(, v\d+|, cpu| on the CPU): ", "", printable(docstring(path).splitlines()[0]))
    except CatalogError:
        return ""


def sections(text):
    """(title, [(heading, text)]) of a docstring whose headings stand at the left edge, each with an indented text below.

    The heading is None for what stands before the first one. All is printable.
    """
    title, *lines = [printable(line).rstrip() for line in text.expandtabs(4).splitlines()]
    found = [(None, [])]
    for line, following in itertools.pairwise([*lines, ""]):
        if line and not line.startswith(" ") and following.startswith(" "):
            found.append((line, []))
        else:
            found[-1][1].append(line)
    parts = [(heading, textwrap.dedent("\n".join(body)).strip("\n")) for heading, body in found]
    return title, [(heading, body) for heading, body in parts if heading or body]


def show(variant, console, siblings=()):
    """Print the explanation of a variant. `siblings` are the variants of its model, among which its parent is looked for."""
    text = docstring(variant.path)
    title, parts = sections(text)
    print_folded(console, title, style="bold")
    for heading, body in parts:
        console.print()
        if heading:
            print_folded(console, heading, style="bold cyan")
        for line in _filled(body):
            print_folded(console, Text(line), INDENT if heading else 0, hanging=4 if KEEPS_LINES.search(line) else 0)
    console.print()
    source = len(variant.path.read_text(encoding="utf-8", errors="replace").splitlines())
    print_folded(console, f"{variant.path}, {source} lines", style="dim")
    parent = PARENT.search(text)
    for ancestor in [sibling for sibling in siblings if parent and sibling.name.startswith(f"{parent[1]}_")]:
        names = " ".join(f"{variant.path.parent.name}/{each.name}" for each in (ancestor, variant))
        print_folded(console, f"What it changed: python compare.py --diff {names}", style="dim")


def _filled(text):
    """The lines of a section, prose joined into one line a paragraph."""
    for number, paragraph in enumerate(text.split("\n\n")):
        yield from [""] * bool(number)
        lines = paragraph.split("\n")
        is_prose = not any(line.startswith(" ") or KEEPS_LINES.search(line) for line in lines)
        yield from [" ".join(lines)] if is_prose else lines
