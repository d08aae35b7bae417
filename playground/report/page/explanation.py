"""A variant's docstring as HTML: its text as it stands, below its headings."""

import re

from markupsafe import Markup

from playground.catalog import CatalogError
from playground.report.explanation import docstring, sections
from playground.report.text import visible


def of(path):
    """(title, HTML of the rest) of the docstring of the file at `path`; ("", "") where there is none or no such file."""
    title, parts = sections(_docstring(path) or "\n")
    return _short(title), Markup("").join(_section(*part) for part in parts)


def about(path):
    """The first paragraph of a model's docstring, '' where there is none."""
    return " ".join(_docstring(path).split("\n\n")[0].split())


def _docstring(path):
    try:
        return docstring(path)
    except (CatalogError, OSError, RecursionError, MemoryError):
        return ""


def _short(title):
    """Without the names in front and the full stop behind, which stand beside it anyway."""
    return re.sub(r"^\w+(?:, \w+| on the CPU)?: ", "", title).rstrip(".")


def _section(heading, body):
    above = Markup("<h5>{}</h5>").format(visible(heading)) if heading else Markup("")
    return above + Markup('<pre class="docstring" tabindex="0">{}</pre>').format(visible(body))
