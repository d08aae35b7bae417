"""How numbers are written, and texts from untrusted files made safe: no character that does not show."""

import math

NOTHING = "-"


def significant(value):
    """Return three significant digits: 0.142, 11.3, 206, 12300, 1.2e-5 as 1.20e-5; '-' for what was not measured."""
    if value is None or not math.isfinite(value):
        return NOTHING
    exponent = int(f"{value:.2e}".partition("e")[2])
    if value == 0 or not -4 <= exponent < 6:
        return scientific(value)
    return f"{round(value, 2 - exponent):.{max(0, 2 - exponent)}f}"


def scientific(value):
    """Return three significant digits, below 1 with an exponent, so that errors can be compared at a glance: 1.10e-5, 18.2."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    if 1 <= value < 999.5:
        return f"{value:#.3g}".removesuffix(".")
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def with_unit(value, unit):
    text = significant(value)
    return text if text == NOTHING else text + unit


def span(low, high, unit=""):
    return f"{with_unit(low, unit)}-{with_unit(high, unit)}"


def interval(ratio):
    """Return '2.30x (2.29x-2.31x)'."""
    return f"{with_unit(ratio.ratio, 'x')} ({span(ratio.low, ratio.high, 'x')})"


def printable(line):
    """Return `line` without control characters: it may come from an untrusted file or a compiler."""
    return "".join(c if c.isprintable() else " " for c in str(line))


def one_line(text):
    """Return `text` on one line, printable."""
    return " ".join(printable(text).split())


def plain(text):
    """Return `text` with every invisible character written out; line breaks, tabs and all kinds of letters stay."""
    odd = {character for character in str(text) if not (character.isprintable() or character in "\n\t\u00a0")}
    return str(text).translate({ord(character): f"[U+{ord(character):04X}]" for character in odd})


def grouped(values, key):
    """Return {key(value): [values that have it]}, in their order."""
    groups = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups
