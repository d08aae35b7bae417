"""What the JSON document of a run has to look like.

A form is a function, which is called with a value and where it stands, and raises DocumentError; a tuple of the words that a
text may be; a list of one form, that of each element; or a dict of forms: an object's, of which one whose key ends in "?" may
be missing. More keys are allowed. A rule, under WHOLE, checks the object.
"""

import math
import re
from dataclasses import dataclass

from playground.report.figures import TIMED

SCHEMA = 1
VERDICTS = (*TIMED, "fail", "error", "skipped")
STANDARDS = {"forward": "forward", "drop-in": "drop_in"}  # as --standard names them -> their keys in a result
ERRORS = ("max_error", "allowed", "eager_error")  # which a check and each of its gradients must have
WHOLE = object()  # no key


class DocumentError(ValueError):
    """A document that is not as the contract says, or no document at all."""


@dataclass(frozen=True)
class Null:
    """What has a form, or null."""

    form: object


@dataclass(frozen=True)
class Each:
    """An object of any names, whose values have one form, or null."""

    form: object


def require(holds, where, expected, value):
    if not holds:
        text = repr(value)
        raise DocumentError(f"{where}: expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}")


def check(form, value, where, null=False):
    """Raise DocumentError, which names the place, unless a value has a form (or is None, with `null`)."""
    null = null or isinstance(form, Each)
    if isinstance(form, Null):
        check(form.form, value, where, null=True)
    elif null and value is None:
        pass
    elif isinstance(form, tuple):
        require(isinstance(value, str) and value in form, where, " or ".join(form), value)
    elif isinstance(form, list):
        require(isinstance(value, list), where, "a list", value)
        for index, each in enumerate(value):
            check(form[0], each, f"{where}[{index}]")
    elif isinstance(form, (dict, Each)):
        require(isinstance(value, dict), where, "an object or null" if null else "an object", value)
        forms = form if isinstance(form, dict) else dict.fromkeys(value, form.form)
        for key, each in forms.items():
            name = key if key is WHOLE or isinstance(form, Each) else key.rstrip("?")
            if key is WHOLE:
                each(value, where)
            elif name in value:
                check(each, value[name], f"{where}.{name}".lstrip("."))
            elif key == name:
                raise DocumentError(f"{where or 'document'}: '{name}' is missing")
    else:
        form(value, where)


def _leaf(expected, holds):
    return lambda value, where: require(holds(value), where, expected, value)


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


anything = _leaf("anything", lambda value: True)
number = _leaf("a number that is not negative", _is_number)
text = _leaf("a text", lambda value: isinstance(value, str) and value.strip())
printed = _leaf("a text", lambda value: isinstance(value, str))
texts = _leaf("a list of texts", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value))
flag = _leaf("true or false", lambda value: isinstance(value, bool))
digest = _leaf("64 hexadecimal digits", lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value))


def _rising(*names):
    expected = " <= ".join(names)
    return lambda value, where: require([value[n] for n in names] == sorted(value[n] for n in names), where, expected, value)


RATIO_KEYS = ("ratio", "low", "high")
RATIO = {**dict.fromkeys(RATIO_KEYS, number), WHOLE: _rising("low", "high")}
SPREAD = Null({**dict.fromkeys(("median", "p20", "p80"), number), WHOLE: _rising("p20", "median", "p80")})
BACKENDS, RAN_ON, BOUNDS = ("cuda", "cpu"), ("cuda", "cpu", "emulator"), ("memory", "compute")


def _outcome(value, where):
    check({"reason": text} if value["verdict"] == "not measured" else {"against": text, **RATIO}, value, where)


def _gradients(value, where):
    check(Each(anything), value, where)
    for name, each in (value or {}).items():
        if name != "unsupported" or not isinstance(each, str):
            check(dict.fromkeys(ERRORS, Null(number)), each, f"{where}.{name}")


def _graphed(value, where):
    is_missing = isinstance(value, dict) and "unavailable" in value
    check({"unavailable": text} if is_missing else Null(TIMED_KEYS), value, where)


def _ptxas(value, where):
    check(Each(anything), value, where)
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
        for name, each in (result["check"]["gradients"] or {}).items():
            if isinstance(each, dict):
                check(errors, each, f"{where}.check.gradients.{name}")
    for key in ("time_ms", "speedup", "training") if verdict not in TIMED else ():
        require(result[key] is None, f"{where}.{key}", f"null, since the verdict is {verdict}", result[key])
    if result["floor_ms"] is not None:
        check(BOUNDS, result["floor_bound"], f"{where}.floor_bound")


# What forward and each training mode have in common.
TIMED_KEYS = {
    **{"time_ms": SPREAD, "peak_mib": Null(number), "floor_ms?": Null(number), "floor_bound?": Null(BOUNDS)},
    "work?": Each({"bytes": number, "flops": number}),
    "ceilings?": Null(
        {
            **dict.fromkeys(("read_bytes_per_second", "copy_bytes_per_second", "fp32_flops"), number),
            **{"tf32_flops": Null(number), "fp16_flops?": Null(number)},  # an earlier version did not measure the last
        }
    ),
    **{"speedup": Each(RATIO), "speedup_proof?": Null(text)},
    # See driver/outer.py.
    "outer?": Null(dict.fromkeys(("ratio", "low", "high", "ms", "eager_ms", "null_ms", "control", "rounds"), Null(number))),
    "outcome?": Null(
        {
            "verdict": ("win", "tie", "loss", "not measured"),
            **dict.fromkeys(("against?", "ratio?", "low?", "high?", "precise?"), anything),
            **{"any_precision?": Null(text), "reason?": anything, WHOLE: _outcome},
        }
    ),
    **{"control?": Null(RATIO), "baselines_ms?": Each(SPREAD), "baselines_unavailable?": Each(text)},
    **dict.fromkeys(("rounds?", "calls?", "rechecked?", "back_to_back_ms?", "launch_ms?"), Null(number)),
    **{"clocks?": anything, "notes?": Null(texts), "graphed?": _graphed, "not_graphed?": Null(texts)},
}
STANDARD = {"verdict": Null(("pass", "fail", "error", "skipped")), "reasons": texts}
RESULT = {
    **{"model": text, "variant": text, "backend": Null(BACKENDS), "ran_on": Null(RAN_ON)},
    **{"precision?": Null(text), "variant_precision?": Null(text)},
    "shape?": Null({"inputs?": Null([anything]), "settings?": Each(anything), "defaults?": Each(anything)}),
    **{"verdict": VERDICTS, "reason": Null(text), "details?": Null(printed), "standard?": Null((*STANDARDS,))},
    "standards?": Null(dict.fromkeys((f"{key}?" for key in STANDARDS.values()), STANDARD)),
    "caveats?": Null([{"tag": text, "text": text, "line?": Null(number), "costs?": Null(("drop-in",))}]),
    "accuracy?": Null({"class": text, "error": Null(number), "limit": Null(number)}),
    **{"weights?": Null(("by name", "by seed")), "weights_differ?": anything},  # how a variant came by the original's
    **{"printed?": Null(printed), "findings?": Null(texts), "accepted_races?": Each(number), "source_sha256": Null(digest)},
    "check": Null(
        {
            **dict.fromkeys(ERRORS, Null(number)),
            **{"permitted_error?": anything, "gradients": _gradients},
            **{"mutants_rejected?": Null(text), "mutants_survived?": Null(texts), "own_check?": {"complaint": Null(text)}},
        }
    ),
    **{"build_seconds": Null(number), "built": flag, "ptxas?": _ptxas},
    # Of a result the floor has to be known, or null.
    **TIMED_KEYS,
    **{"floor_ms": Null(number), "floor_bound": Null(BOUNDS), "training": Each(Null(TIMED_KEYS))},
    **{"shared_limit_kb?": Null(number), WHOLE: _rules},
}
ENVIRONMENT_KEYS = ("date", "gpu", "driver", "cuda", "torch", "python", "cpu")
ENVIRONMENT = {"date": anything, **{f"{key}?": Null(text) for key in ENVIRONMENT_KEYS[1:]}}
