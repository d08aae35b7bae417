"""What the JSON document of a run has to look like: document.txt, which says how it is to be read, and rules of its objects."""

import math
import re
from pathlib import Path

from playground.report.figures import TIMED


class DocumentError(ValueError):
    """A document that is not as the contract says, or no document at all."""


def _read():
    """Return {object: {key: form}}."""
    found, name = {}, None
    for line in (Path(__file__).parent / "document.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            keys, form = re.match(r" +((?:[^ ,]+, )*[^ ,]+) *(.*)", line).groups()
            found[name] |= dict.fromkeys(keys.split(", "), form) if form else found[keys.strip("()")]
        elif line and not line.startswith("#"):
            name = line
            found[name] = {}
    return found


OBJECTS = _read()
SCHEMA = 1
VERDICTS = tuple(OBJECTS["result"]["verdict"].split(" | "))
STANDARDS = {"forward": "forward", "drop-in": "drop_in"}  # as --standard names them -> their keys in a result
KEYS = tuple(key.rstrip("?") for key in OBJECTS["result"])  # of a result
ENVIRONMENT_KEYS = tuple(key.rstrip("?") for key in OBJECTS["environment"])
RATIO_KEYS = tuple(OBJECTS["ratio"])
LEAVES = {  # form -> what is expected, in words, and whether a value is that
    "any": ("anything", lambda value: True),
    "text": ("a text", lambda value: isinstance(value, str) and value.strip()),
    "string": ("a text", lambda value: isinstance(value, str)),
    "texts": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)),
    "number": ("a number that is not negative", lambda value: type(value) in (int, float) and 0 <= value < math.inf),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "digest": ("64 hexadecimal digits", lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)),
}


def require(holds, where, expected, value):
    if not holds:
        text = repr(value)
        raise DocumentError(f"{where}: expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}")


def check(form, value, where):
    """Raise DocumentError, which names the place, unless a value has a form as document.txt writes it."""
    may_be_null, form = form.startswith(("null or ", "{")), form.removeprefix("null or ")
    if value is None and may_be_null:
        return
    form = "text" if isinstance(value, str) and form.startswith("text or ") else form.removeprefix("text or ")
    if form in LEAVES:
        expected, holds = LEAVES[form]
        require(holds(value), where, expected, value)
    elif form in OBJECTS:
        check_object(OBJECTS[form], value, where)
    elif form[0] == "[":
        require(isinstance(value, list), where, "a list", value)
        for index, one in enumerate(value):
            check(form[1:-1], one, f"{where}[{index}]")
    elif form[0] == "{":
        check_object(dict.fromkeys(value, form[1:-1]) if isinstance(value, dict) else {}, value, where)
    elif form not in RULES:
        words = form.split(" | ")
        require(isinstance(value, str) and value in words, where, " or ".join(words), value)
    if form in RULES:
        RULES[form](value, where)


def check_object(fields, value, where):
    """Raise DocumentError unless a value is an object with `fields`, {key: form}."""
    require(isinstance(value, dict), where, "an object", value)
    if others := fields.get("*"):
        fields = {name: fields.get(f"{name}?", others) for name in value}
    for key, form in fields.items():
        name = key.rstrip("?")
        if name in value:
            check(form, value[name], f"{where}.{name}".lstrip("."))
        elif key == name:
            raise DocumentError(f"{where or 'document'}: '{name}' is missing")


def _rising(*names):
    expected = " <= ".join(names)
    return lambda value, where: require([value[n] for n in names] == sorted(value[n] for n in names), where, expected, value)


def _outcome(value, where):
    is_measured = value["verdict"] != "not measured"
    check_object({"against": "text", **OBJECTS["ratio"]} if is_measured else {"reason": "text"}, value, where)
    if is_measured:
        RULES["ratio"](value, where)


def _graphed(value, where):
    if isinstance(value, dict) and "unavailable" in value:
        return check_object({"unavailable": "text"}, value, where)
    return check("null or timed", value, where)


def _result(result, where):
    """Check what depends on the verdict: what is wrong is never timed."""
    verdict = result["verdict"]
    if verdict in (*TIMED, "fail"):
        needed = {"backend": "cuda | cpu", "ran_on": "cuda | cpu | emulator", "source_sha256": "digest", "check": "check"}
        check_object(needed, result, where)
    if verdict != "pass":
        check("text", result["reason"], f"{where}.reason")
    else:
        errors = dict.fromkeys(OBJECTS["errors"], "number")
        check_object(errors, result["check"], f"{where}.check")
        for name, one in (result["check"]["gradients"] or {}).items():
            if isinstance(one, dict):
                check_object(errors, one, f"{where}.check.gradients.{name}")
    for key in ("time_ms", "speedup", "training") if verdict not in TIMED else ():
        require(result[key] is None, f"{where}.{key}", f"null, since the verdict is {verdict}", result[key])
    if result["floor_ms"] is not None:
        check("memory | compute", result["floor_bound"], f"{where}.floor_bound")


RULES = {"ratio": _rising("low", "high"), "spread": _rising("p20", "median", "p80")}
RULES |= {"outcome": _outcome, "result": _result, "graphed": _graphed}
