"""Text from untrusted files, made safe: what would not show, or would reorder what does, is written out as U+202E."""

from markupsafe import Markup, escape


def plain(text):
    """`text` with every invisible character written out; line breaks, tabs and all kinds of letters stay."""
    text = str(text)
    return text if text.isprintable() else "".join(c if _shows(c) else f"[U+{ord(c):04X}]" for c in text)


def visible(text):
    """The same as HTML, in which what was written out is marked."""
    text = str(text)
    if text.isprintable():
        return escape(text)
    marked = (escape(c) if _shows(c) else Markup('<span class="odd">U+{:04X}</span>').format(ord(c)) for c in text)
    return Markup("").join(marked)


def _shows(character):
    return character.isprintable() or character in "\n\t\u00a0"
