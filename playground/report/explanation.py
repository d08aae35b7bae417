"""A variant's own explanation: its docstring, which is read, never run."""

import ast
import re
import textwrap

from rich.text import Text

from playground.catalog import COMPARE, CatalogError, parsed
from playground.report.layout import INDENT, print_folded
from playground.report.text import printable

KEEPS_LINES = re.compile(r"^ |\S {2}| = ", re.MULTILINE)  # columns and formulas


def docstring(path):
    """Return the docstring of a Python file. Raises CatalogError when it has none or is no Python."""
    text = ast.get_docstring(parsed(path, path.read_text(encoding="utf-8", errors="replace")))
    if not text:
        raise CatalogError(f"{path.name} has no docstring; a variant explains itself there (see kernels/ for examples)")
    return text


def title(path):
    """Return the first line of a docstring, without the name that stands before it; "" for a file without one."""
    try:
        return re.sub(r"^\w+(, v\d+|, cpu| on the CPU): ", "", printable(docstring(path).splitlines()[0]))
    except CatalogError:
        return ""


def sections(text):
    """Return (title, [(heading or None, text)]), all printable, of a docstring whose headings have indented texts below."""
    title, *lines = [printable(line).rstrip() for line in text.expandtabs(4).splitlines()]
    parts = re.split(r"^(?=\S.*\n )", "\n".join(lines), flags=re.MULTILINE)
    split = [re.match(r"(?:(\S[^\n]*)\n(?= ))?(.*)", part, re.DOTALL).groups() for part in parts if part.strip()]
    return title, [(heading, textwrap.dedent(body).strip("\n")) for heading, body in split]


def show(variant, console, siblings=()):
    """Print the explanation of a variant. `siblings` are the variants of its model, among which its parent is looked for."""
    text = docstring(variant.path)
    title, parts = sections(text)
    print_folded(console, title, style="bold")
    for heading, body in parts:
        console.print()
        if heading:
            print_folded(console, heading, style="bold cyan")
        for number, paragraph in enumerate(body.split("\n\n")):
            console.print(end="\n" * bool(number))
            keeps = KEEPS_LINES.search(paragraph)
            for line in paragraph.split("\n") if keeps else [paragraph.replace("\n", " ")]:
                print_folded(console, Text(line), INDENT if heading else 0, hanging=4 if keeps else 0)
    console.print()
    count = len(variant.path.read_text(encoding="utf-8", errors="replace").splitlines())
    print_folded(console, f"{variant.path}, {count} lines", style="dim")
    said, number = re.search(r"^Like (v\d+)\b", text, re.MULTILINE), re.match(r"v(\d+)_", variant.name)
    parent = said[1] if said else number and f"v{int(number[1]) - 1}"
    for ancestor in [each for each in siblings if parent and each.name.startswith(f"{parent}_")]:
        names = " ".join(f"{variant.path.parent.name}/{each.name}" for each in (ancestor, variant))
        print_folded(console, f"What it changed: {COMPARE} --diff {names}", style="dim")
