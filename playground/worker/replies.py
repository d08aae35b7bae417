"""What a reply to a request must look like. A judged file runs in the process that answers, and can write to the pipe, too."""

OPTIONAL_NUMBER = (int, float, type(None))
OPTIONAL_TEXT = (str, type(None))
NUMBER = (int, float)

# Request -> {key: its form}: a type, or several; [form] is a list of it; {type} a dict of it by name; {key: form, ...} a dict.
FORMS = {
    "candidate.load": {"precision": OPTIONAL_TEXT},
    "candidate.build": {"seconds": OPTIONAL_NUMBER, "built": bool},
    "candidate.device_code": {"texts": [{"text": str, "flags": [str]}], "capability": OPTIONAL_TEXT},
    "candidate.run": {"peak_mib": OPTIONAL_NUMBER, "complaints": {str}, "refused": OPTIONAL_TEXT},
    "candidate.differentiate": {"unsupported": OPTIONAL_TEXT},
    "candidate.try_out": {"of": OPTIONAL_TEXT, "complaint": OPTIONAL_TEXT, "note": OPTIONAL_TEXT},
    "candidate.work": {
        "builds": [str],
        "means_to_build": bool,
        "triton": bool,
        "own_calls": int,
        "spoiled": bool,
        "kernels": [{"name": str, "calls": int, "microseconds": NUMBER}],
        "own_share": OPTIONAL_NUMBER,
    },
    "candidate.start": {"milliseconds": NUMBER, "peak_mib": OPTIONAL_NUMBER},
    "candidate.time": {"samples_ms": [NUMBER], "idle_ms": [NUMBER]},
}


def malformed(request, result):
    """What is wrong with the result of a request, in one line; None when nothing is, or when no form is known."""
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
    return isinstance(value, form)
