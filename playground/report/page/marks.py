"""How something went, in a sign, a word and a colour, any of which would do."""

from dataclasses import dataclass

from playground.report.figures import NOTHING, is_within, scientific, with_unit

GOOD, BAD, UNKNOWN = "good", "bad", "unknown"
SIGNS = {GOOD: "✓", BAD: "✗", UNKNOWN: "–"}
STATES = {"pass": GOOD, "ok": GOOD, "win": GOOD, "fail": BAD, "error": BAD, "loss": BAD}


@dataclass(frozen=True)
class Mark:
    state: str
    text: str

    @property
    def sign(self):
        return SIGNS[self.state]


def of(word):
    """The Mark of a verdict, an outcome such as 'win in fp16', or 'ok' and 'fail'."""
    return Mark(STATES.get(word.split(" ")[0], UNKNOWN), "not run" if word == NOTHING else word)


def _within(check):
    if check.get("complaint"):
        return Mark(BAD, "wrong")
    if check.get("allowed") is None:
        return Mark(UNKNOWN, "not compared")
    return Mark(GOOD, "within") if is_within(check) else Mark(BAD, "beyond")


def errors(check):
    """An error beside eager's and what is allowed, as texts, and whether it is within."""
    own, eager, allowed = (check.get(key) for key in ("max_error", "eager_error", "allowed"))
    return {
        "own": scientific(own),
        "eager": scientific(eager),
        "of_eager": with_unit(own / eager if own is not None and eager else None, "x"),
        "allowed": scientific(allowed),
        "mark": _within(check),
    }
