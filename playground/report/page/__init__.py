"""The HTML page of a run: one file that needs no network. `render` makes it; `missing` says which library that lacks."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

# jinja2 comes with torch and pygments with rich; they are named all the same, since the page imports them itself.
LIBRARIES = ("jinja2", "matplotlib", "pygments")


@dataclass(frozen=True)
class Files:
    """Where a model and a variant of it stand, and their names in the document where those are not the files'."""

    model: Path
    variant: Path
    names: tuple[str, str] | None = None


def missing():
    """The line that says what to install before a page can be made; None when nothing is missing."""
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    return f"--html needs {', '.join(absent)}: python -m pip install -r requirements-html.txt" if absent else None


def render(document, known):
    """The page of a valid `document` as text. `known` are the Files of its results, in any order; others are of no concern.

    A result whose file is not among them has no source on the page, nor an explanation.
    """
    from playground.report.page import templates  # its libraries are wanted for a page alone

    return templates.render(document, known)
