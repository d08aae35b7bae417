"""--junit and --sarif: documents as what continuous integration reads, checked against what the formats require."""

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
from made import document_of, make_passed, not_passed, read

from cuda_emulator import ci_files
from playground.report import ci

FILE = Path("/somewhere/a b/v.py")
RACE = (
    f"{FILE}:19: shared memory race on `partial[0]`: thread (1,0,0) reads it here, thread (0,0,0) wrote it at line 21, no "
    "barrier or __syncwarp() between them"
)
OUTCOMES = ("failure", "error", "skipped")


def sarif_of(text):
    """The results of a text that keeps what SARIF 2.1.0 requires (sections 3.13 to 3.30 of the specification)."""
    log = json.loads(text)
    assert log["version"] == "2.1.0" and log.keys() <= {"$schema", "version", "runs"}
    assert isinstance(log["runs"], list)
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        assert isinstance(driver["name"], str) and driver["name"]
        rules = driver.get("rules", [])
        assert all(isinstance(rule["id"], str) for rule in rules)
        assert len({json.dumps(rule) for rule in rules}) == len(rules), "the items of `rules` are unique"
        bases = run.get("originalUriBaseIds", {})
        assert all(urlsplit(base["uri"]).scheme and base["uri"].endswith("/") for base in bases.values())
        for result in run["results"]:
            assert isinstance(result["message"]["text"], str) and result["message"]["text"]
            assert result["level"] in ("none", "note", "warning", "error")
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
            for location in result.get("locations", []):
                place = location["physicalLocation"]
                artifact = place["artifactLocation"]
                assert all(33 <= ord(character) < 127 for character in artifact["uri"]), "a URI reference (RFC 3986)"
                assert artifact.get("uriBaseId") in (None, *bases)
                assert bool(urlsplit(artifact["uri"]).scheme) != ("uriBaseId" in artifact)
                if "region" in place:
                    assert type(place["region"]["startLine"]) is int and place["region"]["startLine"] >= 1
    return [result for run in log["runs"] for result in run["results"]]


def cases_of(text):
    """[(classname, name, element of the outcome or None)] of JUnit's XML, whose counts are those of its cases."""
    root = ElementTree.fromstring(text.encode())
    (suite,) = root.findall("testsuite")
    found = suite.findall("testcase")
    outcomes = [next((child for child in case if child.tag in OUTCOMES), None) for case in found]
    counts = {tag: sum(o is not None and o.tag == tag for o in outcomes) for tag in OUTCOMES}
    assert counts == {tag: int(suite.get(tag if tag == "skipped" else f"{tag}s")) for tag in OUTCOMES}
    assert int(suite.get("tests")) == len(found)
    assert float(suite.get("time")) == pytest.approx(sum(float(case.get("time")) for case in found), abs=0.01)
    return [(case.get("classname"), case.get("name"), outcome) for case, outcome in zip(found, outcomes, strict=True)]


def place(result):
    physical = result["locations"][0]["physicalLocation"]
    return unquote(physical["artifactLocation"]["uri"]), physical.get("region", {}).get("startLine")


@pytest.fixture
def report():
    race = not_passed("fail", RACE, model="m", variant="v") | {"findings": [RACE], "phases": {"build": 1.5, "check": 0.25}}
    forward = make_passed("m", "forward") | {"verdict": "forward only", "reason": "no backward"}
    caveat = {"tag": "no-gradient", "text": "the output is detached", "costs": "drop-in", "line": 7}
    forward |= {"caveats": [caveat, {"tag": "random", "text": "it draws", "costs": None, "line": None}]}
    crash = not_passed("error", "crashed:\x1b[31m \x00 <&", model="m", variant="crash") | {"details": "a\x00b ]]> <"}
    skipped = not_passed("skipped", "no GPU", model="m", variant="skipped") | {"ran_on": None}
    right = make_passed("m", "right", settings={"batch_size": 4})
    refused = not_passed("error", "ValueError: odd", model="m", variant="refused")
    return read(document_of(race, forward, crash, skipped, right, refused))


FILES = {("m", name): FILE for name in ("v", "forward", "crash")}


def test_junit_has_a_case_for_each_result_with_the_reason(report):
    found = cases_of(ci_files.junit("tool", ci.cases(report, FILES)))
    assert [group for group, *_ in found] == ["m"] * 6
    named = {name: outcome for _, name, outcome in found}
    assert {name: outcome is not None and outcome.tag for name, outcome in named.items()} == {
        **{"v": "failure", "forward": "failure", "crash": "error", "skipped": "skipped"},
        **{"right: batch 4": False, "refused": "error"},
    }
    assert named["v"].get("message") == RACE
    assert "no-gradient: forward.py:7: the output is detached" in named["forward"].get("message")
    assert named["crash"].text == "a\ufffdb ]]> <", "no character that XML forbids"
    assert named["skipped"].get("message") == "no GPU"


def test_what_meets_the_standard_that_was_asked_for_passes(report):
    for result in report.results:
        object.__setattr__(result, "standard", "forward")
    found = cases_of(ci_files.junit("tool", ci.cases(report, FILES)))
    assert next(outcome for _, name, outcome in found if name == "forward") is None
    results = sarif_of(ci_files.sarif("tool", ci.cases(report, FILES), "/"))
    (caveat,) = (each for each in results if each["ruleId"] == "no-gradient")
    assert caveat["level"] == "warning"


def test_in_a_sweep_a_refused_size_is_skipped(report):
    found = cases_of(ci_files.junit("tool", ci.cases(report, FILES, axes={"n": (1, 2)})))
    assert next(outcome.tag for _, name, outcome in found if name == "refused") == "skipped"


def test_sarif_names_each_line(report):
    results = sarif_of(ci_files.sarif("tool", ci.cases(report, FILES), "/somewhere"))
    told = [(each["ruleId"], each["level"], *(place(each) if "locations" in each else ())) for each in results]
    assert told == [
        ("fail", "error", "a b/v.py", 19),
        ("fail", "error", "a b/v.py", 21),  # the other party
        ("no-gradient", "error", "a b/v.py", 7),
        ("random", "note", "a b/v.py", None),
        ("error", "error", "a b/v.py", None),
        ("error", "error"),  # whose file is not known
    ]
    elsewhere = sarif_of(ci_files.sarif("tool", ci.cases(report, FILES), "/tmp"))
    assert place(elsewhere[0]) == ("file:///somewhere/a b/v.py", 19)
    assert sarif_of(ci_files.sarif("tool", [], "/")) == []


def test_the_two_files_of_a_run(compare, tiny_problem, write_forward, tmp_path):
    wrong = write_forward("wrong", "return torch.sigmoid(self.linear(x))").path
    crash = write_forward("crash", "raise KeyError(x.shape)").path
    right = write_forward("right", "return torch.tanh(self.linear(x))").path
    files = {name: tmp_path / name for name in ("junit", "sarif", "json")}
    options = [option for name, path in files.items() for option in (f"--{name}", path)]
    status, *_ = compare("--model", tiny_problem, "--variant", wrong, crash, right, "--check-only", *options)
    assert status == 1
    found = {name: outcome is not None and outcome.tag for _, name, outcome in cases_of(files["junit"].read_text())}
    assert found == {"wrong": "failure", "crash": "error", "right": False}
    results = sarif_of(files["sarif"].read_text())
    line = 1 + crash.read_text().splitlines().index("        raise KeyError(x.shape)")
    assert any(Path(place(each)[0]).name == "crash.py" and place(each)[1] == line for each in results)
    assert any(Path(place(each)[0]).name == "wrong.py" for each in results)

    gate = ["--model", tiny_problem, "--check-only", "--against", files["json"], "--fail-on-regression", "--variant"]
    assert compare(*gate, right)[0] == 0
    right.write_text(wrong.read_text())
    status, out, _ = compare(*gate, right)
    assert status == 1 and "regression: tiny/right: pass then, fail now" in " ".join(out.split())
    status, _, err = compare(*[each for each in gate if each not in ("--against", files["json"])], right)
    assert status == 2 and "--against FILE" in err
    status, _, err = compare("--model", tiny_problem, "--variant", right, "--sarif", tmp_path / "none" / "x")
    assert status == 2 and "make it first" in err
