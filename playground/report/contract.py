"""What the JSON document of a run has to look like.

A form is a function, which is called with a value and where it stands, and raises DocumentError; a tuple of the words that a
text may be; a list of one form, that of each element; or a dict of forms: an object's, of which one whose key ends in "?" may
be missing. More keys are allowed. A rule, under WHOLE, checks the object.
"""

import math
import re

from playground.report.figures import TIMED

SCHEMA = 1
VERDICTS = (*TIMED, "fail", "error", "skipped")
STANDARDS = {"forward": "forward", "drop-in": "drop_in"}  # as --standard names them -> their keys in a result
ERRORS = ("max_error", "allowed", "eager_error")  # which a check and each of its gradients must have
WHOLE = ""  # no key


class DocumentError(ValueError):
    """A document that is not as the contract says, or no document at all."""


def require(holds, where, expected, value):
    if not holds:
        text = repr(value)
        raise DocumentError(f"{where}: expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}")


def check(form, value, where):
    """Raise DocumentError, which names the place, unless a value has a form."""
    if callable(form):
        form(value, where)
    elif isinstance(form, tuple):
        require(isinstance(value, str) and value in form, where, " or ".join(form), value)
    elif isinstance(form, list):
        require(isinstance(value, list), where, "a list", value)
        for index, one in enumerate(value):
            check(form[0], one, f"{where}[{index}]")
    else:
        require(isinstance(value, dict), where, "an object", value)
        for key, one in form.items():
            name = key.rstrip("?")
            if key == WHOLE:
                one(value, where)
            elif name in value:
                check(one, value[name], f"{where}.{name}".lstrip("."))
            elif key == name:
                raise DocumentError(f"{where or 'document'}: '{name}' is missing")


def null(form):
    """Return the form of what has a form, or is null."""
    return lambda value, where: None if value is None else check(form, value, where)


def each(form):
    """Return the form of null, or an object of any names, whose values have one form."""
    return null(lambda value, where: check(dict.fromkeys(value, form) if isinstance(value, dict) else {}, value, where))


def _leaf(expected, holds):
    return lambda value, where: require(holds(value), where, expected, value)


anything = _leaf("anything", lambda value: True)
number = _leaf("a number that is not negative", lambda value: type(value) in (int, float) and 0 <= value < math.inf)
text = _leaf("a text", lambda value: isinstance(value, str) and value.strip())
printed = _leaf("a text", lambda value: isinstance(value, str))
texts = _leaf("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))
flag = _leaf("true or false", lambda value: isinstance(value, bool))
digest = _leaf("64 hexadecimal digits", lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value))


def _rising(*names):
    expected = " <= ".join(names)
    return lambda value, where: require([value[n] for n in names] == sorted(value[n] for n in names), where, expected, value)


RATIO_KEYS = ("ratio", "low", "high")
RATIO = {**dict.fromkeys(RATIO_KEYS, number), WHOLE: _rising("low", "high")}
SPREAD = null({**dict.fromkeys(("median", "p20", "p80"), number), WHOLE: _rising("p20", "median", "p80")})
BACKENDS, RAN_ON, BOUNDS = ("cuda", "cpu"), ("cuda", "cpu", "emulator"), ("memory", "compute")


def _outcome(value, where):
    check({"reason": text} if value["verdict"] == "not measured" else {"against": text, **RATIO}, value, where)


def _gradients(value, where):
    check(each(anything), value, where)
    for name, one in (value or {}).items():
        if name != "unsupported" or not isinstance(one, str):
            check(dict.fromkeys(ERRORS, null(number)), one, f"{where}.{name}")


def _graphed(value, where):
    is_missing = isinstance(value, dict) and "unavailable" in value
    check({"unavailable": text} if is_missing else null(TIMED_KEYS), value, where)


def _ptxas(value, where):
    check(each(anything), value, where)
    kernel = {"name": text, **dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "shared"), number)}
    for architecture, kernels in (value or {}).items():
        check(text if architecture == "unknown" else [kernel], kernels, f"{where}.{architecture}")


def _rules(result, where):
    """Check what depends on the verdict: what is wrong is never timed."""
    verdict = result["verdict"]
    if verdict in (*TIMED, "fail"):
        needed = {"backend": BACKENDS, "ran_on": RAN_ON, "source_sha256": digest, "check": {"gradients": anything}}
        check(needed, result, where)
    if verdict != "pass":
        text(result["reason"], f"{where}.reason")
    else:
        errors = dict.fromkeys(ERRORS, number)
        check(errors, result["check"], f"{where}.check")
        for name, one in (result["check"]["gradients"] or {}).items():
            if isinstance(one, dict):
                check(errors, one, f"{where}.check.gradients.{name}")
    for key in ("time_ms", "speedup", "training") if verdict not in TIMED else ():
        require(result[key] is None, f"{where}.{key}", f"null, since the verdict is {verdict}", result[key])
    if result["floor_ms"] is not None:
        check(BOUNDS, result["floor_bound"], f"{where}.floor_bound")


# What forward and each training mode have in common.
TIMED_KEYS = {
    **{"time_ms": SPREAD, "peak_mib": null(number), "floor_ms?": null(number), "floor_bound?": null(BOUNDS)},
    "work?": each({"bytes": number, "flops": number}),
    "ceilings?": null(
        {
            **dict.fromkeys(("read_bytes_per_second", "copy_bytes_per_second", "fp32_flops"), number),
            **{"tf32_flops": null(number), "fp16_flops?": null(number)},  # an earlier version did not measure the last
        }
    ),
    **{"speedup": each(RATIO), "speedup_proof?": null(text)},
    # See driver/outer.py.
    "outer?": null(dict.fromkeys(("ratio", "low", "high", "ms", "eager_ms", "null_ms", "control", "rounds"), null(number))),
    "outcome?": null(
        {
            "verdict": ("win", "tie", "loss", "not measured"),
            **dict.fromkeys(("against?", "ratio?", "low?", "high?", "precise?"), anything),
            **{"any_precision?": null(text), "reason?": anything, WHOLE: _outcome},
        }
    ),
    **{"control?": null(RATIO), "baselines_ms?": each(SPREAD), "baselines_unavailable?": each(text)},
    **dict.fromkeys(("rounds?", "calls?", "rechecked?", "back_to_back_ms?", "launch_ms?"), null(number)),
    **{"clocks?": anything, "notes?": null(texts), "graphed?": _graphed, "not_graphed?": null(texts)},
}
STANDARD = {"verdict": null(("pass", "fail", "error", "skipped")), "reasons": texts}
RESULT = {
    **{"model": text, "variant": text, "backend": null(BACKENDS), "ran_on": null(RAN_ON)},
    **{"precision?": null(text), "variant_precision?": null(text)},
    "shape?": null({"inputs?": null([anything]), "settings?": each(anything), "defaults?": each(anything)}),
    **{"verdict": VERDICTS, "reason": null(text), "details?": null(printed), "standard?": null((*STANDARDS,))},
    "standards?": null(dict.fromkeys((f"{key}?" for key in STANDARDS.values()), STANDARD)),
    "caveats?": null([{"tag": text, "text": text, "line?": null(number), "costs?": null(("drop-in",))}]),
    "accuracy?": null({"class": text, "error": null(number), "limit": null(number)}),
    **{"weights?": null(("by name", "by seed")), "weights_differ?": anything},  # how a variant came by the original's
    **{"printed?": null(printed), "findings?": null(texts), "accepted_races?": each(number), "source_sha256": null(digest)},
    "check": null(
        {
            **dict.fromkeys(ERRORS, null(number)),
            **{"permitted_error?": anything, "gradients": _gradients},
            **{"mutants_rejected?": null(text), "mutants_survived?": null(texts), "own_check?": {"complaint": null(text)}},
        }
    ),
    **{"build_seconds": null(number), "built": flag, "ptxas?": _ptxas},
    # Of a result the floor has to be known, or null.
    **TIMED_KEYS,
    **{"floor_ms": null(number), "floor_bound": null(BOUNDS), "training": each(null(TIMED_KEYS))},
    **{"shared_limit_kb?": null(number), WHOLE: _rules},
}
ENVIRONMENT_KEYS = ("date", "gpu", "driver", "cuda", "torch", "python", "cpu")
ENVIRONMENT = {"date": anything, **{f"{key}?": null(text) for key in ENVIRONMENT_KEYS[1:]}}
