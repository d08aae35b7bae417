"""What a report prints on a console."""

import io

from rich.console import Console


def printed(show, width=80, **console):
    """The text that show(console) prints."""
    file = io.StringIO()
    show(Console(file=file, width=width, **console))
    return file.getvalue()


def unfolded(text):
    return " ".join(text.split())
