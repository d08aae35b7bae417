"""The JSON document of a run: its contract, and reading and writing it."""

import datetime
import json
import math
import os
from pathlib import Path

from playground.catalog import code_sha256, sha256
from playground.report import contract
from playground.report.contract import SCHEMA, DocumentError


def write(document, path):
    """Write `document` to `path`, whole or not at all. NaN and infinities become null; a broken contract raises."""
    write_whole(path, as_text(document))


def as_text(document):
    """Return the JSON of `document`, as `write` writes it."""
    document = _finite(document)
    validate(document)
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(path):
    """Return the document in `path`; DocumentError says in one line why there is none."""

    def refuse(constant):
        raise ValueError(f"{constant} is not a JSON number")

    try:
        if Path(path).is_char_device():  # /dev/zero has no end
            raise DocumentError("a device, not a file")
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse)
        validate(document)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        kind = "" if isinstance(error, (OSError, DocumentError)) else "not JSON: "
        raise DocumentError(f"{path}: {kind}{why}") from error
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
    """Return the moment at which a document was recorded; without a time zone it is taken as UTC."""
    moment = datetime.datetime.fromisoformat(environment["date"].replace("Z", "+00:00"))
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def is_stale(result, variant_file, model_file):
    """Return whether the variant's file, but for its docstring, or the model's is another than was measured, or missing."""
    if not (variant_file.is_file() and model_file.is_file()):
        return True
    now = {"source_sha256": sha256(variant_file), "code_sha256": code_sha256(variant_file), "model_sha256": sha256(model_file)}
    return has_changed(result, now)


def has_changed(result, now):
    """Return whether a result is stale beside `now`, by code_sha256 where both have it, or source_sha256; and model_sha256."""
    models = {each.get("model_sha256") for each in (result, now)} - {None}
    key = "code_sha256" if "code_sha256" in result and "code_sha256" in now else "source_sha256"
    return result[key] != now[key] or len(models) > 1


def validate(document):
    """Raise DocumentError, naming the place, unless `document` is as the contract says. Additional keys are allowed."""
    contract.check_object({"schema": "any"}, document, "document")
    if isinstance(document["schema"], bool) or document["schema"] != SCHEMA:
        raise DocumentError(f"schema {document['schema']!r:.60}: this program reads schema {SCHEMA}")
    contract.check_object({"environment": "environment", "results": "[any]"}, document, "")
    try:
        date_of(document["environment"])
    except (AttributeError, TypeError, ValueError):
        contract.require(False, "environment.date", "an ISO 8601 date", document["environment"]["date"])
    for index, result in enumerate(document["results"]):
        validate_result(result, f"results[{index}]")


def validate_result(result, where):
    """Raise DocumentError, which names the place, unless a result is as the contract says."""
    contract.check_object({"model": "text", "variant": "text"}, result, where)
    contract.check("result", _finite(result), f"{where} ({result['model']}/{result['variant']})")


def _finite(value):
    """`value` as JSON can hold it: tuples as lists, numbers that are not finite as None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
