"""What a report prints on a console, and how well a colour can be read on another."""

import io

from rich.console import Console


def printed(show, width=80, **console):
    """The text that show(console) prints."""
    file = io.StringIO()
    show(Console(file=file, width=width, **console))
    return file.getvalue()


def unfolded(text):
    return " ".join(text.split())
