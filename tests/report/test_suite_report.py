"""What the pairs of a suite come to: KernelBench's figures under both standards, in text, on the page and in its format."""

import copy
import io
import json
import math
import re

import pytest
from made import UNTIMED, document_of, make_passed, read, read_result, summarised

from playground.report import drawing, page, suite, suite_table
from playground.report.layout import make_console
from tools import published, records

PAIR = {"problem": "a", "solution": "b"}


@pytest.fixture
def pairs():
    """Six pairs: drop-in at 0.5x and 4x, forward only at 2x, right but not timed, wrong, and one that ended in an error."""

    def pair(number, verdict, over_eager=None, caveats=(), kind=None):
        result = copy.deepcopy(make_passed(f"level1/{number}_Problem", f"level_1_problem_{number}_sample_0_kernel"))
        result["pair"] = {
            "problem": "a",
            "solution": "b",
            "level": 1,
            "problem_id": number,
            "sample_id": 0,
            "origin": "a collection",
        }
        result["verdict"] = verdict
        result["caveats"] = [{"tag": tag, "text": f"what {tag} means", "line": None, "costs": "drop-in"} for tag in caveats]
        result["accuracy"] = kind and {"class": kind, "error": 1e-6, "limit": 1e-5}
        if over_eager is None:
            result.update(UNTIMED)
        else:
            ratio = {"ratio": over_eager, "low": 0.9 * over_eager, "high": 1.1 * over_eager}
            result["speedup"] = {"eager": ratio}
            result["outcome"] |= {**ratio, "against": "eager"}
        if verdict == "error":
            result.update(
                check=None, build_seconds=None, reason='SyntaxError: "their secret line"', details="their secret line"
            )
        elif verdict == "fail":
            result["reason"] = "the output is off"
        elif verdict == "forward only":
            result["reason"] = "no gradient"
        return result

    return document_of(
        pair(1, "pass", 0.5, kind="float32"),
        pair(20, "pass", 4.0, kind="float32"),
        pair(3, "forward only", 2.0, caveats=("no-gradient", "default-stream")),
        pair(4, "pass"),
        pair(5, "fail"),
        pair(6, "error"),
    )


def test_fast_p_counts_all_pairs_and_is_strict(pairs):
    summary = summarised(pairs)
    forward, drop_in = summary["standards"]["forward"], summary["standards"]["drop_in"]
    assert (forward["correct"], forward["timed"]) == (4, 3) and (drop_in["correct"], drop_in["timed"]) == (3, 2)
    sixth = 1 / 6
    assert forward["over"]["eager"]["fast_p"] == pytest.approx(
        {"0": 4 * sixth, "0.5": 2 * sixth, "1": 2 * sixth, "1.5": 2 * sixth, "2": sixth}
    )
    assert drop_in["over"]["eager"]["fast_p"] == pytest.approx(
        {"0": 3 * sixth, "0.5": sixth, "1": sixth, "1.5": sixth, "2": sixth}
    )
    assert summary["verdicts"] == {"pass": 3, "forward only": 1, "fail": 1, "error": 1}
    assert summary["caveats"] == {"no-gradient": 1, "default-stream": 1} and summary["accuracy"] == {"float32": 2}


def test_the_geometric_mean_is_that_of_the_correct_and_timed_with_their_bounds(pairs):
    mean = summarised(pairs)["standards"]["forward"]["over"]["eager"]["geometric_mean"]
    assert mean == pytest.approx({"ratio": 4 ** (1 / 3), "low": 0.9 * 4 ** (1 / 3), "high": 1.1 * 4 ** (1 / 3), "pairs": 3})
    assert math.isclose(summarised(pairs)["standards"]["drop_in"]["over"]["fastest"]["geometric_mean"]["ratio"], 2**0.5)


def test_a_disturbed_timing_is_correct_and_not_counted_as_timed(pairs):
    pairs["results"][1]["outcome"] = {"verdict": "not measured", "reason": "the machine is busy"}
    forward = summarised(pairs)["standards"]["forward"]
    assert (forward["correct"], forward["timed"]) == (4, 2)
    assert forward["over"]["eager"]["fast_p"]["2"] == 0


def test_a_problem_without_a_solution_counts_as_wrong(pairs):
    """As in benchmark_eval_analysis.py, which adds what is missing."""
    forward = summarised(pairs, unsolved=["level1/7_A", "level1/8_B"])["standards"]["forward"]
    assert (forward["fast_0"], forward["over"]["eager"]["fast_p"]["1"]) == pytest.approx((4 / 8, 2 / 8))


def test_kernelbench_reads_its_own_format(pairs, tmp_path):
    """As benchmark_eval_analysis.py takes it: by problem, the entry of sample 0, `compiled`, `correctness` and `runtime`."""
    pairs["results"][0]["pair"] = pairs["results"][0]["pair"] | {"sample_id": 1}
    pairs["results"][1]["outcome"] = {"verdict": "not measured", "reason": "the machine is busy"}
    suite.write_eval_results(read(pairs), tmp_path / "eval_{level}.json")
    found = json.loads((tmp_path / "eval_1.json").read_text())
    assert list(found) == ["1", "3", "5", "6"], "what is right and has no time is left out"
    first = {key: [each for each in entries if each["sample_id"] == 0] for key, entries in found.items()}
    assert first.pop("1") == []
    assert {key: (e["compiled"], e["correctness"]) for key, (e,) in first.items()} == {
        "3": (True, True),
        "5": (True, False),
        "6": (False, False),
    }
    assert first["3"][0]["runtime"] == pairs["results"][2]["time_ms"]["median"]
    assert first["3"][0]["metadata"]["caveats"] == ["no-gradient", "default-stream"]
    assert first["5"][0]["runtime"] == -1.0 and first["5"][0]["runtime_stats"] == {}
    runtimes = [entry["runtime"] for entries in found.values() for entry in entries if entry["correctness"]]
    assert min(runtimes) > 0, "its script takes the geometric mean of these"


def test_facts_hold_no_line_of_a_solution(pairs):
    pairs["suite"] = summarised(pairs)
    facts = records.facts(read(pairs))
    assert "secret" not in json.dumps(facts)
    first, error = facts["results"][0], facts["results"][-1]
    assert first["origin"] == "a collection" and first["source_sha256"] == pairs["results"][0]["source_sha256"]
    assert first["standards"] == {"forward": True, "drop_in": True} and first["time_ms"]["median"] > 0
    assert error["reason"] == "SyntaxError" and facts["results"][4]["reason"] == "the output is off"


def shown(report, width=150):
    console = make_console(io.StringIO())
    console.width = width
    view = suite_table.Pairs(console, {"": len(report["results"])})
    view.update(read(report | {"results": report["results"][:1]}))
    view.end(read(report))
    return console.file.getvalue()


def of_a_case(result, kind, milliseconds, over_eager):
    """The result as that of a problem's test or benchmark."""
    case = {"kind": kind, "name": f"{kind} n={milliseconds}", "benchmarks": 2, "ranking": "geom"}
    result = copy.deepcopy(result) | {
        "model": "squares",
        "variant": "mine",
        "pair": PAIR | {"case": case},
    }
    result["check"]["own_check"] = {"complaint": None}
    result["shape"]["settings"] = {"n": milliseconds}
    if kind == "benchmark":
        result["time_ms"] = dict.fromkeys(("median", "p20", "p80"), milliseconds)
        result["speedup"]["eager"] = dict.fromkeys(("ratio", "low", "high"), over_eager)
    return result


def test_benchmarks_have_a_geometric_mean_where_all_that_is_listed_is_right(pairs):
    _, timed, _, right, wrong, _ = pairs["results"]
    rows = [of_a_case(right, "test", 0, 0), of_a_case(timed, "benchmark", 1.0, 2.0), of_a_case(timed, "benchmark", 4.0, 8.0)]
    (found,) = summarised(pairs | {"results": rows})["cases"]
    assert (found["geometric_mean_ms"], found["over_eager"]) == (pytest.approx(2), pytest.approx(4))
    text = shown(pairs | {"results": rows, "suite": summarised(pairs | {"results": rows})})
    assert "squares, mine, benchmark n=1.0: 1.00 ms" in text and "2 of 2 right" in text and "accepts 3 of 3" in text
    for fewer in ([rows[0], rows[1]], [of_a_case(wrong, "test", 0, 0), *rows[1:]]):
        assert summarised(pairs | {"results": fewer})["cases"][0]["geometric_mean_ms"] is None


def test_the_problems_own_check_is_shown_where_it_decides_otherwise(pairs):
    _, _, _, right, wrong, _ = pairs["results"]
    assert suite.own_check(read_result(right)) is None, "the file has none"
    right["check"]["own_check"] = {"complaint": "2 elements differ"}
    assert suite.own_check(read_result(right)) == (
        "the problem's own check rejects what is right here, off by 1.1e-5 standard deviations (allowed 2.4e-5): "
        "2 elements differ"
    )
    wrong["check"]["own_check"] = {"complaint": "2 elements differ"}
    assert suite.own_check(read_result(wrong)) is None, "both reject it"
    wrong["check"]["own_check"] = {"complaint": None}
    assert suite.own_check(read_result(wrong)) == "the problem's own check accepts it"


def test_a_line_a_pair_then_the_table(pairs):
    text = shown(pairs | {"suite": summarised(pairs, ["level1/7_Unsolved"])})
    lines = text.splitlines()
    assert lines[1].startswith(
        "1/6 pass level1/1_Problem, sample 0: 0.142 ms; 0.500x over eager, 0.500x over fastest; accuracy: float32"
    )
    ratios = "2.00x over eager, 2.00x over fastest (forward only)"
    assert lines[3].endswith(f"0.142 ms; {ratios}; caveats: no-gradient, default-stream")
    assert lines[5] == "5/6 fail level1/5_Problem, sample 0: the output is off"
    assert "6 pairs: 3 pass, 1 forward only, 1 fail, 1 error" in text
    assert "problems without a solution, which count as wrong in fast_p: 1" in " ".join(text.split())
    (row,) = [line.split() for line in lines if line.split()[:1] == ["forward"] and "eager" in line]
    assert row == ["forward", "4", "of", "6", "eager", "0.571", "0.286", "0.286", "0.286", "0.143", "1.59x", "1.43x-1.75x", "3"]


def test_a_row_has_what_is_proved_beside_what_is_measured(pairs):
    first, second, third, *_ = pairs["results"]
    for each in (first, second):
        each |= {"measured": each["speedup"], "proved": {"ratio": 3.9, "low": 3.8, "high": 4.1}}
    first |= {
        "measured": {"eager": {"ratio": 29.0, "low": 28.0, "high": 30.0}},
        "proved": {"ratio": 0.5, "low": 0.45, "high": 0.6},
    }
    third["speedup_proof"] = "by a trusted author"
    pairs["suite"] = summarised(pairs)
    lines, made = shown(pairs).splitlines(), page.render(read(pairs), [])
    assert "; 0.500x by the outer clock, proved 0.450x over eager, 0.500x over fastest;" in lines[1]
    assert (
        "; 4.00x, proved 3.80x over eager, 4.00x over fastest;" in lines[2]
        and "(forward only, by a trusted author)" in lines[3]
    )
    assert "0.500x by the outer clock, proved 0.450x" in made and "4.00x, proved 3.80x" in made


def test_the_page_sorts_without_a_script(pairs):
    pairs["suite"] = summarised(pairs)
    made = page.render(read(pairs), [])
    assert "<script" not in made and made.count('name="order"') == 5 and made.count('id="only-is-') == 4
    styles = re.findall(r'<tr role="row" class="[^"]*\bis-[\w-]+" style="([^"]*)"', made)
    places = [dict(each.split(":") for each in style.rstrip(";").split(";")) for style in styles]
    by_eager = sorted(range(6), key=lambda index: int(places[index]["--by-eager"]))
    assert by_eager[:3] == [1, 2, 0], "the greatest speed-up first, what was not timed last"
    by_verdict = [
        pairs["results"][index]["verdict"] for index in sorted(range(6), key=lambda i: int(places[i]["--by-verdict"]))
    ]
    assert by_verdict == ["pass", "pass", "pass", "forward only", "fail", "error"]
    assert "no-gradient: what no-gradient means" in made and "0.667" in made


def test_published_solutions_are_counted_by_what_was_claimed_and_what_is(pairs):
    results = [each | {"claimed_speedup": 2.0, "solution": "a.py"} for each in records.facts(read(pairs))["results"]]
    *_, total = published.table(results).splitlines()
    _, judged, right, drop_in, *_, claimed, right_too, over_eager, are = (cell.strip() for cell in total.strip("|").split("|"))
    assert (int(judged), int(claimed)) == (len(results), len(results))
    assert int(drop_in) <= int(right) < int(judged)
    assert right_too == right and int(over_eager) == 2, "at 4x and 2x"
    assert int(are) == sum("faster" in published.kinds(each) for each in results) >= 1
    earlier = [{key: value for key, value in each.items() if key != "outer"} for each in results]
    assert f"{right} are to be timed again" in published.sentence(earlier), "nobody but the judged process has seen these times"
    assert not any("timed" in published.kinds(each) for each in earlier)
    said = published.sentence(results)
    both = sum({"faster", "over eager"} <= published.kinds(each) for each in results)
    assert f"Of {judged} published" in said and f" {both} of these also than PyTorch's best" in said
    picture = published.image(results)
    assert picture.count(drawing.ANYWHERE["floor"]) >= sum("right" not in published.kinds(each) for each in results)
