"""The HTML page of a run: one file that needs no network. `render` makes it; `missing` says which library that lacks."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

# jinja2 comes with torch and pygments with rich; they are named all the same, since the page imports them itself.
LIBRARIES = ("jinja2", "matplotlib", "pygments")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Files:
    """Where a model and a variant of it stand, and their names in the document where those are not the files'."""

    model: Path
    variant: Path
    names: tuple[str, str] | None = None


def missing():
    """Return the line that says what to install before a page can be made; None when nothing is missing."""
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    return f"--html needs {', '.join(absent)}: python -m pip install {' '.join(absent)}" if absent else None


def render(document, known):
    """Return the page of a valid `document` as text, escaped; sources are those of the Files `known`."""
    import jinja2  # its libraries are wanted for a page alone
    from markupsafe import Markup

    from playground.report.page import variant, view
    from playground.report.text import plain, scientific, with_unit

    def shown(value):
        return "" if value is None else plain(value) if type(value) is str else value

    loader, undefined = jinja2.FileSystemLoader(HERE), jinja2.StrictUndefined
    whitespace = {"trim_blocks": True, "lstrip_blocks": True}
    templates = jinja2.Environment(loader=loader, autoescape=True, finalize=shown, undefined=undefined, **whitespace)
    style = Markup((HERE / "style.css").read_text(encoding="utf-8"))
    templates.globals |= {"mark_of": variant.mark, "scientific": scientific, "with_unit": with_unit}
    return templates.get_template("page.html").render(style=style, **view.page(document, known))
