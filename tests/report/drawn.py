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


def contrast(one, other):
    """WCAG 2's contrast ratio."""

    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
