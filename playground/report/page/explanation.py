"""A variant's docstring as HTML: prose runs on, formulas keep their lines, tables are tables."""

import re

from markupsafe import Markup

from playground.catalog import CatalogError
from playground.report.explanation import Columns, Lines, Prose, docstring, sections
from playground.report.page.text import visible


def of(path):
    """(title, HTML of the rest) of the docstring of the file at `path`; ("", "") where there is none or no such file."""
    try:
        text = docstring(path)
    except (CatalogError, OSError, RecursionError, MemoryError):
        return "", ""
    title, parts = sections(text)
    return _short(title), Markup("").join(_section(part) for part in parts)


def about(path):
    """The first paragraph of a model's docstring, '' where there is none."""
    try:
        return " ".join(docstring(path).split("\n\n")[0].split())
    except (CatalogError, OSError, RecursionError, MemoryError):
        return ""


def _short(title):
    """Without the names in front and the full stop behind, which stand beside it anyway."""
    return re.sub(r"^\w+(?:, \w+| on the CPU)?: ", "", title).rstrip(".")


def _section(section):
    heading = Markup("<h5>{}</h5>").format(_inline(section.heading)) if section.heading else Markup("")
    return heading + Markup("").join(map(_block, section.blocks))


def _block(block):
    if isinstance(block, Prose):
        return Markup("<p>{}</p>").format(_inline(block.text))
    if isinstance(block, Lines):
        return Markup('<pre class="columns" tabindex="0">{}</pre>').format(visible("\n".join(block.lines)))
    return _table(block) if isinstance(block, Columns) else Markup("")


def _table(columns):
    heads = Markup("").join(Markup('<th scope="col">{}</th>').format(_inline(head)) for head in columns.heads)
    rows = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(_inline(cell)) for cell in row))
        for row in columns.rows
    )
    table = '<div class="scroll columns" tabindex="0"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    return Markup(table).format(heads, rows)


def _inline(text):
    """What stands in backquotes is code."""
    parts = re.split(r"`([^`\n]+)`", text)
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(visible(part)) if number % 2 else visible(part) for number, part in enumerate(parts))
