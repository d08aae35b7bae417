"""The JSON document of a run: its contract, and reading and writing it."""

import datetime
import json
import math
import os
from pathlib import Path

from playground.catalog import code_sha256, sha256
from playground.report.figures import TIMED, ordered_baselines

SCHEMA = 1
BACKENDS = ("cuda", "cpu")
RAN_ON = ("cuda", "cpu", "emulator")
VERDICTS = (*TIMED, "fail", "error", "skipped")
STANDARDS = {"forward": "forward", "drop-in": "drop_in"}  # as --standard names them -> their keys in a result
WEIGHTS = ("by name", "by seed")  # how a variant came by the original's
BOUNDS = ("memory", "compute")

# The order of keys in the file. Those not named here follow in alphabetical order.
DOCUMENT_KEYS = ("schema", "environment", "against", "suite", "results")
ENVIRONMENT_KEYS = ("date", "gpu", "driver", "cuda", "torch", "python", "cpu")
RESULT_KEYS = (
    *("model", "variant", "backend", "ran_on", "precision", "variant_precision", "shape", "verdict", "reason", "details"),
    *("standard", "standards", "caveats", "accuracy", "weights", "weights_differ", "printed", "findings", "accepted_races"),
    *("source_sha256", "check", "build_seconds", "built", "ptxas", "time_ms", "peak_mib", "floor_ms", "floor_bound", "work"),
    *(
        "ceilings",
        "speedup",
        "speedup_proof",
        "outer",
        "outcome",
        "control",
        "baselines_ms",
        "baselines_unavailable",
        "rounds",
        "calls",
        "rechecked",
    ),
    *("back_to_back_ms", "clocks", "notes", "graphed", "training"),
)
CEILING_KEYS = ("read_bytes_per_second", "copy_bytes_per_second", "fp32_flops", "tf32_flops")
WORK_KEYS = ("bytes", "flops")  # of work["least"] and work["as_written"]
PTXAS_KEYS = ("registers", "stack", "spill_stores", "spill_loads", "shared")
SHAPE_KEYS = ("inputs", "settings", "defaults")
STANDARD_KEYS = ("verdict", "reasons")
CAVEAT_KEYS = ("tag", "text", "line", "costs")
ACCURACY_KEYS = ("class", "error", "limit")
CHECK_KEYS = ("max_error", "allowed", "eager_error", "permitted_error", "gradients", "mutants_rejected", "mutants_survived")
ERROR_KEYS = ("max_error", "allowed", "eager_error")  # which a check and each of its gradients must have
TIME_KEYS = ("median", "p20", "p80")
RATIO_KEYS = ("ratio", "low", "high")
OUTCOME_KEYS = ("verdict", "against", *RATIO_KEYS, "precise", "any_precision", "reason")
INNER_KEYS = {
    **{"accuracy": ACCURACY_KEYS, "shape": SHAPE_KEYS, "check": CHECK_KEYS},
    **{"time_ms": TIME_KEYS, "outcome": OUTCOME_KEYS, "control": RATIO_KEYS},
}
OUTCOMES = ("win", "tie", "loss", "not measured")


class DocumentError(ValueError):
    """A document that is not as the contract says, or no document at all."""


def write(document, path):
    """Write `document` to `path`, whole or not at all. NaN and infinities become null; a broken contract raises."""
    write_whole(path, as_text(document))


def as_text(document):
    """The JSON of `document`, as `write` writes it."""
    document = _finite(document)
    validate(document)
    return json.dumps(_in_order(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(path):
    """The document in `path`; DocumentError says in one line why there is none."""

    def refuse(constant):
        raise ValueError(f"{constant} is not a JSON number")

    if Path(path).is_char_device():  # /dev/zero has no end
        raise DocumentError(f"{path}: a device, not a file")
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{path}: not JSON: {error}") from error
    try:
        validate(document)
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from error
    return document


def write_whole(path, text):
    """Write a text file so that a reader finds the old text or the new one, never a part; a pipe is written directly."""
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def date_of(environment):
    """The moment at which a document was recorded; without a time zone it is taken as UTC."""
    moment = datetime.datetime.fromisoformat(environment["date"].replace("Z", "+00:00"))
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def is_stale(result, variant_file, model_file):
    """Whether the variant's file, but for its docstring, or the model's is not the one that was measured, or is not there."""
    if not (variant_file.is_file() and model_file.is_file()):
        return True
    now = {"source_sha256": sha256(variant_file), "code_sha256": code_sha256(variant_file), "model_sha256": sha256(model_file)}
    return has_changed(result, now)


def has_changed(result, now):
    """Whether a result is stale beside `now`, another result or the hashes of the present files.

    It compares code_sha256 where both have one, otherwise source_sha256; and model_sha256 where both have one. A result may
    name another file besides the measured one, of which compilers make the same: "code_same_as" (tests/kernels/same_sass.py).
    """
    models = {each.get("model_sha256") for each in (result, now)} - {None}
    if "code_sha256" not in result or "code_sha256" not in now:
        return result["source_sha256"] != now["source_sha256"] or len(models) > 1
    return _codes(result).isdisjoint(_codes(now)) or len(models) > 1


def _codes(result):
    return {result["code_sha256"], (result.get("code_same_as") or result)["code_sha256"]}


def validate(document):
    """Raise DocumentError, naming the place, unless `document` is as the contract says. Additional keys are allowed."""
    _object(document, "document")
    schema = _field(document, "schema", "document")
    if isinstance(schema, bool) or schema != SCHEMA:
        raise DocumentError(f"schema {_brief(schema)}: this program reads schema {SCHEMA}")
    _environment(_field(document, "environment", "document"))
    results = _field(document, "results", "document")
    _require(isinstance(results, list), "results", "a list", results)
    for index, result in enumerate(results):
        where = f"results[{index}]"
        _object(result, where)
        _result(result, where)


def _environment(environment):
    _object(environment, "environment")
    date = _field(environment, "date", "environment")
    try:
        date_of(environment)
    except (AttributeError, TypeError, ValueError):
        raise DocumentError(f"environment.date: expected an ISO 8601 date, got {_brief(date)}") from None
    for key in ENVIRONMENT_KEYS:
        if environment.get(key) is not None:
            _text(environment[key], f"environment.{key}")


def _result(result, where):
    for key in ("model", "variant"):
        _text(_field(result, key, where), f"{where}.{key}")
    where = f"{where} ({result['model']}/{result['variant']})"
    verdict = _one_of(_field(result, "verdict", where), VERDICTS, f"{where}.verdict")
    judged = verdict in (*TIMED, "fail")
    _one_of(_field(result, "backend", where), BACKENDS, f"{where}.backend", null=not judged)
    _one_of(_field(result, "ran_on", where), RAN_ON, f"{where}.ran_on", null=not judged)
    _text(_field(result, "reason", where), f"{where}.reason", null=verdict == "pass")

    digest = _field(result, "source_sha256", where)
    is_digest = isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    _require(is_digest or (digest is None and not judged), f"{where}.source_sha256", "64 hexadecimal digits", digest)

    _check(_field(result, "check", where), f"{where}.check", passed=verdict == "pass", null=not judged)
    _standards(result, where)
    _number(_field(result, "build_seconds", where), f"{where}.build_seconds")
    built = _field(result, "built", where)
    _require(isinstance(built, bool), f"{where}.built", "true or false", built)
    for key in ("time_ms", "speedup", "training"):
        value = _field(result, key, where)
        _require(value is None or verdict in TIMED, f"{where}.{key}", f"null, since the verdict is {verdict}", value)
    _timings(result, where)
    bound = _one_of(_field(result, "floor_bound", where), BOUNDS, f"{where}.floor_bound", null=True)
    floor = _number(_field(result, "floor_ms", where), f"{where}.floor_ms")
    _require(floor is None or bound is not None, f"{where}.floor_bound", " or ".join(BOUNDS), bound)
    _training(result["training"], f"{where}.training")
    _circumstances(result, where)


def _standards(result, where):
    """What both standards say; a result of an earlier version has none of it."""
    _one_of(result.get("standard"), STANDARDS, f"{where}.standard", null=True)
    _one_of(result.get("weights"), WEIGHTS, f"{where}.weights", null=True)
    for name, found in _mapping(result.get("standards"), f"{where}.standards"):
        at = f"{where}.standards.{name}"
        _one_of(name, STANDARDS.values(), at)
        _object(found, at)
        _one_of(_field(found, "verdict", at), ("pass", "fail", "error", "skipped"), f"{at}.verdict", null=True)
        _texts(_field(found, "reasons", at), f"{at}.reasons", null=False)
    caveats = result.get("caveats") or []
    _require(isinstance(caveats, list), f"{where}.caveats", "a list", caveats)
    for caveat in caveats:
        _require(isinstance(caveat, dict), f"{where}.caveats", "a list of objects", caveat)
        for key in ("tag", "text"):
            _text(_field(caveat, key, f"{where}.caveats"), f"{where}.caveats.{key}")
        _number(caveat.get("line"), f"{where}.caveats.line")
        _one_of(caveat.get("costs"), ("drop-in",), f"{where}.caveats.costs", null=True)
    if accuracy := dict(_mapping(result.get("accuracy"), f"{where}.accuracy")):
        _text(_field(accuracy, "class", f"{where}.accuracy"), f"{where}.accuracy.class")
        _numbers(accuracy, ("error", "limit"), f"{where}.accuracy")


def _training(modes, where):
    for mode, timings in _mapping(modes, where):
        if timings is not None:
            _object(timings, f"{where}.{mode}", null=True)
            _timings(timings, f"{where}.{mode}")


def _circumstances(result, where):
    """What is known besides verdict and times; a key that an earlier version did not write may be missing."""
    if same := dict(_mapping(result.get("code_same_as"), f"{where}.code_same_as")):
        for key in ("code_sha256", "compared_with"):
            _text(_field(same, key, f"{where}.code_same_as"), f"{where}.code_same_as.{key}")
    for name, reason in _mapping(result.get("baselines_unavailable"), f"{where}.baselines_unavailable"):
        _text(reason, f"{where}.baselines_unavailable.{name}")
    for key in ("precision", "variant_precision"):
        _text(result.get(key), f"{where}.{key}", null=True)
    _ptxas(result.get("ptxas"), f"{where}.ptxas")
    _number(result.get("shared_limit_kb"), f"{where}.shared_limit_kb")
    if ceilings := dict(_mapping(result.get("ceilings"), f"{where}.ceilings")):
        for key in CEILING_KEYS:
            _number(_field(ceilings, key, f"{where}.ceilings"), f"{where}.ceilings.{key}", null=key == "tf32_flops")
        _number(ceilings.get("fp16_flops"), f"{where}.ceilings.fp16_flops", null=True)  # an earlier version did not measure it
    for key in ("details", "printed"):
        text = result.get(key)
        _require(text is None or isinstance(text, str), f"{where}.{key}", "a text", text)
    _texts(result.get("findings"), f"{where}.findings")
    for line, count in _mapping(result.get("accepted_races"), f"{where}.accepted_races"):
        _number(count, f"{where}.accepted_races.{line}")
    for key, value in _mapping(result.get("shape"), f"{where}.shape"):
        expected = (list, "a list") if key == "inputs" else (dict, "an object")
        if value is not None and key in SHAPE_KEYS:
            _require(isinstance(value, expected[0]), f"{where}.shape.{key}", expected[1], value)


def _ptxas(found, where):
    """{"unknown": why} or {architecture: [kernel, ...]}."""
    for architecture, kernels in _mapping(found, where):
        at = f"{where}.{architecture}"
        if architecture == "unknown":
            _text(kernels, at)
            continue
        _require(isinstance(kernels, list), at, "a list", kernels)
        for kernel in kernels:
            _require(isinstance(kernel, dict), at, "a list of objects", kernel)
            _text(_field(kernel, "name", at), f"{at}.name")
            _numbers(kernel, PTXAS_KEYS, at, null=False)


def _check(check, where, passed, null):
    if check is None and null:
        return
    _object(check, where)
    _numbers(check, ERROR_KEYS, where, null=not passed)
    _text(check.get("mutants_rejected"), f"{where}.mutants_rejected", null=True)
    _texts(check.get("mutants_survived"), f"{where}.mutants_survived")
    for name, each in _mapping(_field(check, "gradients", where), f"{where}.gradients"):
        if name == "unsupported" and isinstance(each, str):
            continue
        _object(each, f"{where}.gradients.{name}")
        _numbers(each, ERROR_KEYS, f"{where}.gradients.{name}", null=not passed)


def _timings(holder, where):
    """What forward and each training mode have in common."""
    _spread(_field(holder, "time_ms", where), f"{where}.time_ms")
    _number(_field(holder, "peak_mib", where), f"{where}.peak_mib")
    for name, spread in _mapping(holder.get("baselines_ms"), f"{where}.baselines_ms"):
        _spread(spread, f"{where}.baselines_ms.{name}")
    for name, ratio in _mapping(_field(holder, "speedup", where), f"{where}.speedup"):
        _ratio(ratio, f"{where}.speedup.{name}")
    if holder.get("control") is not None:
        _ratio(holder["control"], f"{where}.control")
    if holder.get("outcome") is not None:
        at = f"{where}.outcome"
        _object(holder["outcome"], at)
        _one_of(_field(holder["outcome"], "verdict", at), OUTCOMES, f"{at}.verdict")
        if holder["outcome"]["verdict"] == "not measured":
            _text(_field(holder["outcome"], "reason", at), f"{at}.reason")
        else:
            _ratio(holder["outcome"], at)
            _text(_field(holder["outcome"], "against", at), f"{at}.against")
        _text(holder["outcome"].get("any_precision"), f"{at}.any_precision", null=True)
    for kind, work in _mapping(holder.get("work"), f"{where}.work"):
        _object(work, f"{where}.work.{kind}")
        _numbers(work, WORK_KEYS, f"{where}.work.{kind}", null=False)
    for key in ("rounds", "calls", "rechecked", "back_to_back_ms"):
        _number(holder.get(key), f"{where}.{key}")
    for key in ("notes", "not_graphed"):
        _texts(holder.get(key), f"{where}.{key}")
    graphed = holder.get("graphed")
    _object(graphed, f"{where}.graphed", null=True)
    if graphed and "unavailable" in graphed:
        _text(graphed["unavailable"], f"{where}.graphed.unavailable")
    elif graphed is not None:
        _timings(graphed, f"{where}.graphed")


def _ratio(ratio, where):
    _object(ratio, where)
    _numbers(ratio, RATIO_KEYS, where, null=False)
    _require(ratio["low"] <= ratio["high"], where, "low <= high", ratio)


def _spread(spread, where):
    if spread is None:
        return
    _object(spread, where, null=True)
    _numbers(spread, TIME_KEYS, where, null=False)
    _require(spread["p20"] <= spread["median"] <= spread["p80"], where, "p20 <= median <= p80", spread)


def _mapping(value, where):
    _object(value, where, null=True)
    return (value or {}).items()


def _object(value, where, null=False):
    expected = "an object or null" if null else "an object"
    _require(isinstance(value, dict) or (null and value is None), where, expected, value)


def _field(mapping, key, where):
    if key not in mapping:
        raise DocumentError(f"{where}: '{key}' is missing")
    return mapping[key]


def _number(value, where, null=True):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    _require(is_number or (null and value is None), where, "a number that is not negative", value)
    return value


def _numbers(mapping, keys, where, null=True):
    for key in keys:
        _number(_field(mapping, key, where), f"{where}.{key}", null)


def _texts(value, where, null=True):
    are_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    _require(are_texts or (null and not value), where, "a list of texts", value)


def _text(value, where, null=False):
    _require((isinstance(value, str) and value.strip()) or (null and value is None), where, "a text", value)


def _one_of(value, choices, where, null=False):
    is_choice = isinstance(value, str) and value in choices
    _require(is_choice or (null and value is None), where, " or ".join(choices), value)
    return value


def _require(holds, where, expected, value):
    if not holds:
        raise DocumentError(f"{where}: expected {expected}, got {_brief(value)}")


def _brief(value):
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _finite(value):
    """`value` as JSON can hold it: tuples as lists, numbers that are not finite as None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sorted_keys(mapping, keys):
    known = [key for key in keys if key in mapping]
    return {key: mapping[key] for key in known + sorted(mapping.keys() - set(known))}


def _in_order(document):
    return {
        **_sorted_keys(document, DOCUMENT_KEYS),
        "environment": _sorted_keys(document["environment"], ENVIRONMENT_KEYS),
        "results": [_result_in_order(result) for result in document["results"]],
    }


def _result_in_order(result):
    """A result, or the timings of one training mode: the keys that both have are ordered in the same way."""
    result = _sorted_keys(result, RESULT_KEYS)
    if "caveats" in result:
        result["caveats"] = [_sorted_keys(caveat, CAVEAT_KEYS) for caveat in result["caveats"]]
    if result.get("standards"):
        of_both = _sorted_keys(result["standards"], STANDARDS.values())
        result["standards"] = {name: _sorted_keys(found, STANDARD_KEYS) for name, found in of_both.items()}
    for key, inner in INNER_KEYS.items():
        if result.get(key):
            result[key] = _sorted_keys(result[key], inner)
    for key, inner in (("speedup", RATIO_KEYS), ("baselines_ms", TIME_KEYS)):
        if result.get(key):
            names = ordered_baselines(sorted(result[key]))
            result[key] = {name: result[key][name] and _sorted_keys(result[key][name], inner) for name in names}
    if result.get("graphed"):
        result["graphed"] = _result_in_order(result["graphed"])
    if result.get("training"):
        modes = _sorted_keys(result["training"], ("weights", "weights_and_input"))
        result["training"] = {mode: timings and _result_in_order(timings) for mode, timings in modes.items()}
    return result
