"""Marks behind figures that an earlier version of the variant's file gave, and what they mean."""

from playground.catalog import kernels_sha256
from playground.report.document import is_stale

OTHER_KERNELS, OTHER_HOST_CODE = "†", "‡"  # the latter is the lighter one
MEANINGS = {
    OTHER_KERNELS: "measured before the file's last change",
    OTHER_HOST_CODE: "measured before a change to the code around the kernels, whose text is the same",
}


def mark(result, source):
    """What stands behind the variant's name: nothing where the file, but for its docstring, is still the one measured."""
    if not is_stale(result, source):
        return ""
    recorded = result.get("kernels_sha256")
    return f" {OTHER_HOST_CODE if recorded and recorded == kernels_sha256(source) else OTHER_KERNELS}"


def heaviest(marks):
    """Of several files' marks the one that holds for all of them together."""
    return next((f" {each}" for each in MEANINGS if f" {each}" in marks), "")


def legend(text):
    """A sentence on each mark that the text has."""
    return "".join(f" {each} {meaning}." for each, meaning in MEANINGS.items() if each in text)
