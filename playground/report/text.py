"""Text from untrusted files, made safe: what would not show, or would reorder what does, is written out as U+202E."""

from markupsafe import Markup, escape


def plain(text):
    """Return `text` with every invisible character written out; line breaks, tabs and all kinds of letters stay."""
    return _replaced(str(text), "[U+{:04X}]")


def marked(html):
    """Return HTML, escaped already, in which what was written out is marked."""
    return _replaced(html, '<span class="odd">U+{:04X}</span>')


def visible(text):
    """Return any text as such HTML."""
    return Markup(marked(escape(str(text))))


def _replaced(text, form):
    odd = {character for character in text if not (character.isprintable() or character in "\n\t\u00a0")}
    return text.translate({ord(character): form.format(ord(character)) for character in odd})
