"""The JSON document of a run: reading and writing it, and whether a result of it is stale."""

import dataclasses
import json
import os
from pathlib import Path

from playground.catalog import code_sha256, kernels_sha256, sha256
from playground.run_record import load_document
from playground.serial import DocumentError, dump

LAUNCHES_COUNT_BELOW_MS = 0.1  # where the host may take as long to launch a call as the GPU to compute it


def write(document, path):
    """Write a run_record.Document to `path`, whole or not at all. Raises DocumentError for values that it must not have."""
    write_whole(path, as_text(document))


def as_text(document):
    """Return the JSON of a run_record.Document, as `write` writes it: NaN and infinities are null."""
    value = dump(document)
    load_document(value)
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read(path):
    """Return the run_record.Document in `path`; DocumentError says in one line why there is none."""

    def refuse(constant):
        raise ValueError(f"{constant} is not a JSON number")

    try:
        if Path(path).is_char_device():  # /dev/zero has no end
            raise DocumentError("a device, not a file")
        return load_document(json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        kind = "" if isinstance(error, (OSError, DocumentError)) else "not JSON: "
        raise DocumentError(f"{path}: {kind}{why}") from error


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


def is_stale(result, variant_file, model_file):
    """Return whether a file is another than was measured, but for a docstring, or code around the kernels of a long pass."""
    if not (variant_file.is_file() and model_file.is_file()):
        return True
    source, code, model = sha256(variant_file), code_sha256(variant_file), sha256(model_file)
    now = dataclasses.replace(result, source_sha256=source, code_sha256=code, model_sha256=model)
    same_kernels = result.kernels_sha256 and result.kernels_sha256 == kernels_sha256(variant_file)
    if same_kernels and result.model_sha256 == now.model_sha256 and not result.training and result.time_ms:
        return has_changed(result, now) and result.time_ms.median < LAUNCHES_COUNT_BELOW_MS
    return has_changed(result, now)


def has_changed(result, now):
    """Return whether a result is stale beside `now`, by code_sha256 where both have it, or source_sha256; and model_sha256."""
    models = {each.model_sha256 for each in (result, now)} - {None}
    key = "code_sha256" if result.code_sha256 and now.code_sha256 else "source_sha256"
    return getattr(result, key) != getattr(now, key) or len(models) > 1
