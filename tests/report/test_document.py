import copy
import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made import document_of, make_passed, own_work, read

from playground import record, run_record
from playground.catalog import ROOT
from playground.report import document as documents
from playground.report import terminal
from playground.report.document import write
from playground.report.layout import make_console
from playground.serial import DocumentError, dump


def test_what_is_written_is_read_back(document, tmp_path):
    path = tmp_path / "new folder" / "run.json"
    write(read(document), path)
    assert json.loads(path.read_text()) == dump(documents.read(path)) == json.loads(json.dumps(document))
    assert list(path.parent.iterdir()) == [path]


def test_numbers_that_are_not_finite_become_null(gpu_document, tmp_path):
    report = read(gpu_document)
    (index,) = [index for index, result in enumerate(report.results) if result.verdict == "fail"]
    check = report.results[index].check
    bias = dataclasses.replace(check.gradients["conv.bias"], max_error=math.inf)
    check = dataclasses.replace(check, max_error=math.nan, gradients=check.gradients | {"conv.bias": bias})
    report.results[index] = dataclasses.replace(report.results[index], check=check)
    write(report, tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    failed = documents.read(tmp_path / "run.json").results[index]
    assert failed.check.max_error is None
    assert failed.check.gradients["conv.bias"].max_error is None


def test_a_failed_write_leaves_the_old_file(gpu_document, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(DocumentError):
        write(dataclasses.replace(read(gpu_document), schema=2), path)

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(documents.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write(read(gpu_document), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_and_permissions_are_those_of_a_new_file(gpu_document, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    write(read(gpu_document), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    (tmp_path / "plain").touch()
    assert (tmp_path / "run.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_a_pipe_is_written_directly(gpu_document, tmp_path):
    write(read(gpu_document), tmp_path / "run.json")
    code = "import sys; from playground.report.document import read, write; write(read(sys.argv[1]), '/dev/stdout')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run.json"], capture_output=True, check=True)
    assert done.stdout == (tmp_path / "run.json").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"schema": NaN}', "NaN is not a JSON number"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", r"expected an object, got \[\]"),
        (b"{}", "'schema' is missing"),
        (b'{"schema": 2}', "schema 2: this program reads schema 1"),
        (b'{"schema": true}', "schema True"),
        (b'{"schema": 1, "environment": {"date": "2026-11-20"}}', "'results' is missing"),
    ],
)
def test_read_says_what_is_wrong_with_a_file(content, message, tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=message) as raised:
        documents.read(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_read_of_a_missing_file(tmp_path):
    with pytest.raises(DocumentError, match=r"absent\.json: No such file"):
        documents.read(tmp_path / "absent.json")


FACTS = ("published", "originals", "exhibits")  # folders of what is no document
REQUIRED = {"model", "variant", "backend", "ran_on", "verdict", "reason", "source_sha256", "check", "build_seconds", "built"}
REQUIRED |= {"time_ms", "peak_mib", "speedup"}
MISSING = object()
BROKEN = [
    ("environment", [], r"environment: expected an object, got \[\]"),
    ("environment.date", "yesterday", "environment.date: expected an ISO 8601 date, got 'yesterday'"),
    ("results", {}, "results: expected a list"),
    ("results.0", None, r"results\[0\]: expected an object, got None"),
    ("results.0.model", "", r"results\[0\].model: expected a text"),
    ("results.0.backend", "rocm", "backend: expected cuda or cpu, got 'rocm'"),
    ("results.0.ran_on", None, "ran_on: expected a value, since the verdict is pass, got None"),
    ("results.0.verdict", "passed", r"\(pool/v1\).verdict: expected pass or forward only or fail or error or skipped"),
    ("results.0.verdict", "fail", "reason"),
    ("results.0.source_sha256", "12ab", "source_sha256: expected 64 hexadecimal digits, got '12ab'"),
    ("results.0.check", None, r"\.check: expected a value, since the verdict is pass, got None"),
    ("results.0.check.max_error", None, "check.max_error: expected a number"),
    ("results.0.check.allowed", -1, "check.allowed: expected a number that is not negative, got -1"),
    ("results.0.check.eager_error", True, "check.eager_error"),
    ("results.0.check.gradients", MISSING, "'gradients' is missing"),
    ("results.0.check.gradients.conv.weight", 0.1, "check.gradients.conv.weight: expected an object"),
    ("results.0.check.mutants_survived", "conv2d: bias dropped", "mutants_survived: expected a list, got"),
    ("results.0.built", None, "built: expected true or false, got None"),
    ("results.0.time_ms.median", math.nan, "time_ms.median: expected a number"),
    ("results.0.time_ms.median", 9e9, "time_ms: expected p20 <= median <= p80"),
    ("results.0.floor_bound", None, "floor_bound: expected memory or compute"),
    ("results.0.speedup.eager.low", MISSING, "speedup.eager: 'low' is missing"),
    ("results.0.speedup.eager.low", 1e9, "speedup.eager: expected low <= high"),
    ("results.0.baselines_unavailable", ["compile"], "baselines_unavailable: expected an object"),
    ("results.0.training.weights.time_ms.p20", MISSING, "training.weights.time_ms: 'p20' is missing"),
    ("results.0.outcome.verdict", "draw", "outcome.verdict: expected win or tie or .* or not proved, got 'draw'"),
    ("results.0.outcome.low", 1e9, "outcome: expected low <= high"),
    ("results.0.outcome.against", MISSING, "outcome.against: expected a text, got None"),
    ("results.0.graphed", {}, "graphed: '(time_ms|peak_mib|speedup)' is missing"),
    ("results.0.graphed", {"unavailable": None}, "graphed.unavailable: expected a text, got None"),
    (
        "results.0.training.weights.graphed",
        {"time_ms": 1.0, "peak_mib": 1.0, "speedup": {}},
        "training.weights.graphed.time_ms: expected an object",
    ),
    ("results.0.training.weights.outcome.ratio", None, "training.weights.outcome.ratio: expected a number"),
    ("results.0.findings", [1], r"findings\[0\]: expected a text, got 1"),
    ("results.0.time", 1.0, "unknown key 'time'"),
    ("results.0.check.probes", {"own": {"maximum": 0.0}}, r"check\.probes\.own: unknown key 'maximum'"),
]


@pytest.mark.parametrize(("place", "value", "message"), BROKEN)
def test_validate_names_the_place_that_breaks_the_contract(place, value, message):
    document = document_of(make_passed("pool", "v1"))
    read(document)
    holder = document
    *path, key = place.replace("conv.weight", "conv/weight").split(".")
    for step in path:
        holder = holder[int(step) if isinstance(holder, list) else step]
    key = int(key) if isinstance(holder, list) else key.replace("/", ".")
    if value is MISSING:
        del holder[key]
    else:
        holder[key] = value
    with pytest.raises(DocumentError, match=message) as raised:
        run_record.load_document(document)
    assert "\n" not in str(raised.value)


# The ends of places at which there may be anything.
ANY_FORM = re.compile(r"\.(settings|inputs)\..*$")


def places(value, path=()):
    """The path of each value in a document."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(one, (*path, key))


def test_every_value_has_a_form():
    """In a result that has many keys which others lack."""
    result = make_passed("pool", "v1", settings={"batch_size": 4})
    result |= {"launch_ms": 1.0, "not_graphed": [], "phases": {"build": 1.0}}
    result["sanitizer"] = {"tools": {"memcheck": {"findings": 0}}}
    result["check"] |= {"permitted_error": 0.0, "mutants_survived": [], "own_check": {"complaint": None}, "work": own_work()}
    result["training"]["weights"]["graphed"] = copy.deepcopy(result["training"]["weights"])
    whole = document_of(result)
    for path in places(whole):
        broken = holder = copy.deepcopy(whole)
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = {0}  # a set is of no form
        if ANY_FORM.search(".".join(map(str, path))):
            run_record.load_document(broken)
        else:
            with pytest.raises(DocumentError, match=rf"{path[-1]}\]?( \(.*\))?: expected .*, got {{0}}|schema {{0}}"):
                run_record.load_document(broken)


def test_recorded_documents_are_written_as_they_were_read():
    recorded = [path for path in (ROOT / "results").rglob("*.json") if path.parent.name not in FACTS]
    assert len(recorded) >= 3
    for path in recorded:
        assert dump(documents.read(path)) == json.loads(path.read_text()), path


def test_the_form_that_is_printed_names_every_key():
    text = subprocess.run([sys.executable, "-m", "playground.run_record"], capture_output=True, text=True, check=True).stdout
    for key in ("schema", "time_ms", "not_graphed", "unsupported", "class", "mutants_rejected", "claimed_speedup"):
        assert re.search(rf"^    {key}\b", text, re.MULTILINE), key
    assert "win | tie | loss" in text and "NoneType" not in text


def test_what_is_not_right_is_never_timed(gpu_document):
    for verdict in ("fail", "error", "skipped"):
        broken = copy.deepcopy(gpu_document)
        broken["results"][0].update(verdict=verdict, reason="wrong")
        with pytest.raises(DocumentError, match=f"time_ms: expected null, since the verdict is {verdict}"):
            read(broken)


@pytest.mark.parametrize("key", [each.name for each in dataclasses.fields(record.Result)])
def test_keys_of_the_contract_are_required_and_no_view_misses_others(key, gpu_document):
    gpu_document["results"][1].update(
        verdict="forward only", reason="streams: no", work={"as_written": {"bytes": 1, "flops": 1}}
    )
    for result in gpu_document["results"]:
        result.pop(key, None)
    if key == "floor_bound":
        with pytest.raises(DocumentError, match="floor_bound: expected memory or compute, got None"):
            read(gpu_document)
    elif key in REQUIRED:
        with pytest.raises(DocumentError, match=f"'{key}' is missing"):
            read(gpu_document)
    else:
        report = read(gpu_document)
        terminal.Details(make_console(io.StringIO()), checks=True).end(report)
        terminal.Summary(make_console(io.StringIO()), {}).end(report)
