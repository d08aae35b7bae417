"""What the JSON document of a run has to look like, and in which order its keys stand.

A check is called with a value and where it stands, and raises DocumentError. A Keys says which keys an object has, in their
order; more are allowed and follow in alphabetical order.
"""

import math
from dataclasses import dataclass

from playground.report.figures import TIMED, ordered_baselines

SCHEMA = 1
BACKENDS = ("cuda", "cpu")
RAN_ON = ("cuda", "cpu", "emulator")
VERDICTS = (*TIMED, "fail", "error", "skipped")
STANDARDS = {"forward": "forward", "drop-in": "drop_in"}  # as --standard names them -> their keys in a result
WEIGHTS = ("by name", "by seed")  # how a variant came by the original's
BOUNDS = ("memory", "compute")
OUTCOMES = ("win", "tie", "loss", "not measured")
ERRORS = ("max_error", "allowed", "eager_error")  # which a check and each of its gradients must have


class DocumentError(ValueError):
    """A document that is not as the contract says, or no document at all."""


def require(holds, where, expected, value):
    if not holds:
        text = repr(value)
        raise DocumentError(f"{where}: expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}")


def number(value, where):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    require(is_number, where, "a number that is not negative", value)


def text(value, where):
    require(isinstance(value, str) and value.strip(), where, "a text", value)


def printed(value, where):
    require(isinstance(value, str), where, "a text", value)


def texts(value, where):
    are_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    require(are_texts, where, "a list of texts", value)


def flag(value, where):
    require(isinstance(value, bool), where, "true or false", value)


def anything(value, where):
    """Check nothing."""


def one_of(*choices):
    return lambda value, where: require(isinstance(value, str) and value in choices, where, " or ".join(choices), value)


def digest(value, where):
    is_digest = isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
    require(is_digest, where, "64 hexadecimal digits", value)


@dataclass(frozen=True)
class Maybe:
    """What passes a check, or null."""

    check: object

    def __call__(self, value, where):
        if value is not None:
            self.check(value, where)

    def in_order(self, value):
        return in_order(value, self.check)


@dataclass(frozen=True)
class Keys:
    """An object. `keys` are {name: check}; one that ends in "?" may be missing. `rule` checks the whole."""

    keys: dict
    null: bool = False
    rule: object = anything

    def __call__(self, value, where):
        require_object(value, where, self.null)
        for key, check in self.keys.items() if value is not None else ():
            name = key.rstrip("?")
            if name in value:
                check(value[name], f"{where}.{name}")
            elif key == name:
                raise DocumentError(f"{where}: '{name}' is missing")
        if value is not None:
            self.rule(value, where)

    def in_order(self, value):
        checks = {key.rstrip("?"): check for key, check in self.keys.items()}
        names = [name for name in checks if name in value] + sorted(value.keys() - checks.keys())
        return {name: in_order(value[name], checks.get(name)) for name in names}


@dataclass(frozen=True)
class Each:
    """An object of any names, whose values pass one check; sorted: baselines in their usual order, others by name."""

    check: object
    null: bool = True
    is_sorted: bool = False

    def __call__(self, value, where):
        require_object(value, where, self.null)
        for name, each in (value or {}).items():
            self.check(each, f"{where}.{name}")

    def in_order(self, value):
        names = ordered_baselines(sorted(value)) if self.is_sorted else value
        return {name: in_order(value[name], self.check) for name in names}


@dataclass(frozen=True)
class Rows:
    """A list whose values pass one check."""

    check: object

    def __call__(self, value, where):
        require(isinstance(value, list), where, "a list", value)
        for index, each in enumerate(value):
            self.check(each, f"{where}[{index}]")

    def in_order(self, value):
        return [in_order(each, self.check) for each in value]


def require_object(value, where, null=False):
    expected = "an object or null" if null else "an object"
    require(isinstance(value, dict) or (null and value is None), where, expected, value)


def in_order(value, check):
    """Return `value` with its keys in the order of a check."""
    return check.in_order(value) if value and hasattr(check, "in_order") else value


def _ordered(*names):
    expected = " <= ".join(names)
    return lambda value, where: require([value[n] for n in names] == sorted(value[n] for n in names), where, expected, value)


RATIO_KEYS = ("ratio", "low", "high")
RATIO = Keys(dict.fromkeys(RATIO_KEYS, number), rule=lambda ratio, where: _ordered("low", "high")(ratio, where))
SPREAD = Keys(dict.fromkeys(("median", "p20", "p80"), number), null=True, rule=_ordered("p20", "median", "p80"))
ERROR = Keys(dict.fromkeys(ERRORS, Maybe(number)))


def _outcome(value, where):
    if value["verdict"] == "not measured":
        Keys({"reason": text})(value, where)
    else:
        Keys({**RATIO.keys, "against": text}, rule=RATIO.rule)(value, where)


OUTCOME = Keys(
    {
        **{"verdict": one_of(*OUTCOMES), "against?": anything, "ratio?": anything, "low?": anything, "high?": anything},
        **{"precise?": anything, "any_precision?": Maybe(text), "reason?": anything},
    },
    null=True,
    rule=_outcome,
)


def _gradients(value, where):
    require_object(value, where, null=True)
    for name, each in (value or {}).items():
        if name != "unsupported" or not isinstance(each, str):
            ERROR(each, f"{where}.{name}")


def _graphed(value, where):
    require_object(value, where, null=True)
    if value is not None:
        (Keys({"unavailable": text}) if "unavailable" in value else TIMINGS)(value, where)


def _ptxas(value, where):
    require_object(value, where, null=True)
    kernel = Keys({"name": text, **dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "shared"), number)})
    for architecture, kernels in (value or {}).items():
        (text if architecture == "unknown" else Rows(kernel))(kernels, f"{where}.{architecture}")


class _Graphed:
    __call__ = staticmethod(_graphed)

    def in_order(self, value):
        return in_order(value, TIMINGS)


CEILINGS = {**dict.fromkeys(("read_bytes_per_second", "copy_bytes_per_second", "fp32_flops"), number)}
CEILINGS |= {"tf32_flops": Maybe(number), "fp16_flops?": Maybe(number)}  # an earlier version did not measure the last
OUTER_KEYS = ("ratio", "low", "high", "ms", "eager_ms", "null_ms", "control", "rounds")  # see driver/outer.py
OUTER = Keys(dict.fromkeys(OUTER_KEYS, Maybe(number)), null=True)
# What forward and each training mode have in common.
TIMED_KEYS = {
    **{"time_ms": SPREAD, "peak_mib": Maybe(number), "floor_ms?": Maybe(number), "floor_bound?": Maybe(one_of(*BOUNDS))},
    **{"work?": Each(Keys({"bytes": number, "flops": number})), "ceilings?": Keys(CEILINGS, null=True)},
    **{
        "speedup": Each(RATIO, is_sorted=True),
        "speedup_proof?": Maybe(text),
        "outer?": OUTER,
        "outcome?": OUTCOME,
        "control?": Keys(RATIO.keys, null=True, rule=RATIO.rule),
    },
    **{"baselines_ms?": Each(SPREAD, is_sorted=True), "baselines_unavailable?": Each(text)},
    **dict.fromkeys(("rounds?", "calls?", "rechecked?", "back_to_back_ms?", "launch_ms?"), Maybe(number)),
    **{"clocks?": anything, "notes?": Maybe(texts), "graphed?": _Graphed(), "not_graphed?": Maybe(texts)},
}
TIMINGS = Keys(TIMED_KEYS, null=True)


def _rules(result, where):
    """Check what depends on the verdict: what is wrong is never timed."""
    verdict, check = result["verdict"], result["check"]
    if verdict in (*TIMED, "fail"):
        one_of(*BACKENDS)(result["backend"], f"{where}.backend")
        one_of(*RAN_ON)(result["ran_on"], f"{where}.ran_on")
        digest(result["source_sha256"], f"{where}.source_sha256")
        require_object(check, f"{where}.check")
    if verdict != "pass":
        text(result["reason"], f"{where}.reason")
    else:
        gradients = {name: each for name, each in (check["gradients"] or {}).items() if isinstance(each, dict)}
        for name, each in {"check": check, **{f"check.gradients.{name}": each for name, each in gradients.items()}}.items():
            Keys(dict.fromkeys(ERRORS, number))(each, f"{where}.{name}")
    for key in ("time_ms", "speedup", "training") if verdict not in TIMED else ():
        require(result[key] is None, f"{where}.{key}", f"null, since the verdict is {verdict}", result[key])
    if result["floor_ms"] is not None:
        one_of(*BOUNDS)(result["floor_bound"], f"{where}.floor_bound")


STANDARD = Keys({"verdict": Maybe(one_of("pass", "fail", "error", "skipped")), "reasons": texts})
CAVEAT = Keys({"tag": text, "text": text, "line?": Maybe(number), "costs?": Maybe(one_of("drop-in"))})
CHECK = Keys(
    {
        **{"max_error": Maybe(number), "allowed": Maybe(number), "eager_error": Maybe(number), "permitted_error?": anything},
        **{"gradients": _gradients, "mutants_rejected?": Maybe(text), "mutants_survived?": Maybe(texts)},
        "own_check?": Keys({"complaint": Maybe(text)}),
    },
    null=True,
)
RESULT = Keys(
    {
        **{"model": text, "variant": text, "backend": Maybe(one_of(*BACKENDS)), "ran_on": Maybe(one_of(*RAN_ON))},
        **{"precision?": Maybe(text), "variant_precision?": Maybe(text)},
        "shape?": Keys({"inputs?": Maybe(Rows(anything)), "settings?": Each(anything), "defaults?": Each(anything)}, null=True),
        **{"verdict": one_of(*VERDICTS), "reason": Maybe(text), "details?": Maybe(printed)},
        "standard?": Maybe(one_of(*STANDARDS)),
        "standards?": Keys(dict.fromkeys((f"{key}?" for key in STANDARDS.values()), STANDARD), null=True),
        "caveats?": Maybe(Rows(CAVEAT)),
        "accuracy?": Keys({"class": text, "error": Maybe(number), "limit": Maybe(number)}, null=True),
        **{"weights?": Maybe(one_of(*WEIGHTS)), "weights_differ?": anything},
        **{"printed?": Maybe(printed), "findings?": Maybe(texts), "accepted_races?": Each(number)},
        **{"source_sha256": Maybe(digest), "check": CHECK, "build_seconds": Maybe(number), "built": flag, "ptxas?": _ptxas},
        **TIMED_KEYS,
        # Of a result the floor has to be known, or null.
        **{"floor_ms": Maybe(number), "floor_bound": Maybe(one_of(*BOUNDS)), "training": Each(TIMINGS, is_sorted=True)},
        "shared_limit_kb?": Maybe(number),
    },
    rule=_rules,
)
ENVIRONMENT_KEYS = ("date", "gpu", "driver", "cuda", "torch", "python", "cpu")
ENVIRONMENT = Keys({"date": anything, **{f"{key}?": Maybe(text) for key in ENVIRONMENT_KEYS[1:]}})
DOCUMENT_KEYS = ("schema", "environment", "against", "suite", "results")
