"""What a reply to a request must look like. A judged file runs in the process that answers, and can write to the pipe, too."""

import math

OPTIONAL_TEXT = (str, type(None))


def number(value):
    """Return whether a value of JSON is a number of a float's size, a NaN or an infinity."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def amount(value):
    """Return whether it is a number, neither negative nor infinite."""
    return number(value) and math.isfinite(value) and value >= 0


def optional_amount(value):
    return value is None or amount(value)


# Request -> {key: its form}: a type, or several; [form] is a list of it; {type} a dict of it by name; {key: form, ...} a dict.
FORMS = {
    "candidate.load": {"precision": OPTIONAL_TEXT, "weights": str, "difference": OPTIONAL_TEXT},
    "candidate.build": {"seconds": optional_amount, "built": bool},
    "candidate.device_code": {"texts": [{"text": str, "flags": [str]}], "capability": OPTIONAL_TEXT},
    "candidate.accepted_races": {"lines": {int}},
    "candidate.run": {"peak_mib": optional_amount, "complaints": {str}, "refused": OPTIONAL_TEXT, "form": OPTIONAL_TEXT}
    | {"handed_memory": optional_amount},
    "candidate.backward_work": {"own": (bool, type(None))},
    "candidate.made_contiguous": {"strided": OPTIONAL_TEXT},
    "candidate.differentiate": {"unsupported": OPTIONAL_TEXT, "failed": OPTIONAL_TEXT, "complaints": [str], "in_part": [str]},
    "candidate.try_out": {"of": OPTIONAL_TEXT, "complaint": OPTIONAL_TEXT, "note": OPTIONAL_TEXT},
    "candidate.work": {
        **{"builds": [str], "opened": [str], "means_to_build": bool, "triton": bool, "own_calls": amount, "spoiled": bool},
        **{"kernels": [{"name": str, "calls": amount, "microseconds": amount}], "own_share": optional_amount},
    },
    "candidate.start": {"milliseconds": number, "peak_mib": optional_amount},
    "candidate.time": {"samples_ms": [number], "late": [bool], "flush_ms": [number]},
}


def malformed(request, result):
    """Return what is wrong with the result of a request, in one line; None when nothing is, or when no form is known."""
    for key, form in FORMS.get(request, {}).items():
        if key not in result:
            return f"its reply to {request} lacks {key!r}"
        if not _has(form, result[key]):
            return f"its reply to {request} has {key!r} = {str(result[key])[:80]!r}"
    return None


def _has(form, value):
    if isinstance(form, list):
        return isinstance(value, list) and all(_has(form[0], each) for each in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(key in value and _has(each, value[key]) for key, each in form.items())
    if isinstance(form, set):
        (kind,) = form
        return isinstance(value, dict) and all(isinstance(each, kind) for each in value.values())
    if not isinstance(form, (type, tuple)):
        return form(value)
    return isinstance(value, form)
