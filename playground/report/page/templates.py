"""The page's template filled in."""

from pathlib import Path

import jinja2
from markupsafe import Markup

from playground.report.page import view
from playground.report.text import plain

HERE = Path(__file__).parent


def render(document, known):
    """The page of a valid `document` as text; `known` are the page.Files of its results."""
    template = _templates().get_template("page.html")
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    return template.render(style=style, **view.page(document, known))


def _templates():
    """Every value that a template writes is made visible and escaped, but for the HTML that this package has made."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["zip"] = zip
    return templates


def _shown(value):
    if value is None:
        return ""
    return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
