"""Which pairs there are in KernelBench's folders and in a list, and what is said of those that are none."""

import json

import pytest

from playground import suite
from playground.catalog import CatalogError
from playground.driver import plan
from playground.driver.task import Options


@pytest.fixture
def kernelbench(tmp_path):
    """(problems, solutions): three problems of level 1, one of level 2; three solutions, one of a problem that is not there."""
    problems, run = tmp_path / "KernelBench", tmp_path / "run"
    solved = "level1/3_Batched.py", "level1/20_LeakyReLU.py"
    for name in (*solved, "level1/21_Alone.py", "level2/3_Fused.py", "level1/README.md"):
        (problems / name).parent.mkdir(parents=True, exist_ok=True)
        (problems / name).write_text("")
    run.mkdir()
    for level, problem, sample in ((1, 20, 0), (1, 3, 0), (1, 3, 1), (3, 1, 0)):
        (run / f"level_{level}_problem_{problem}_sample_{sample}_kernel.py").write_text("class ModelNew: ...")
    (run / "eval_results.json").write_text("{}")
    return problems, run


def test_folders_are_paired_by_their_numbers_in_their_order(kernelbench):
    found = suite.read(*kernelbench)
    assert [(pair.problem_name, pair.level, pair.problem_id, pair.sample_id) for pair in found.pairs[:3]] == [
        ("level1/3_Batched", 1, 3, 0),
        ("level1/3_Batched", 1, 3, 1),
        ("level1/20_LeakyReLU", 1, 20, 0),
    ]
    assert [pair.broken for pair in found.pairs[:3]] == [None] * 3
    assert "no problem 1 of level 3" in found.pairs[3].broken
    assert found.unsolved == ("level1/21_Alone",), "of level 2 nothing was solved: it is no part of the run"
    assert found.levels == [1, 3]


def test_one_level_is_a_suite_too(kernelbench):
    problems, run = kernelbench
    assert [pair.problem_name for pair in suite.read(problems / "level1", run).pairs[:3]] == ["3_Batched"] * 2 + [
        "20_LeakyReLU"
    ]


def test_a_list_names_files_beside_it_and_may_say_numbers_settings_and_origin(tmp_path):
    for name in ("a/problem.py", "a/right.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("batch_size = 4")
    full = {"problem": "a/problem.py", "solution": "a/right.py", "level": 1, "problem_id": 3, "settings": {"batch_size": 2}}
    (tmp_path / "pairs.json").write_text(
        json.dumps(
            [["a/problem.py", "a/gone.py"], ["a/\0.py", "a/right.py"], full | {"origin": "by hand", "claimed_speedup": 2.5}]
        )
    )
    gone, odd, right = suite.read(tmp_path / "pairs.json").pairs
    assert "a/gone.py: No such file" in gone.broken and odd.broken.endswith(": embedded null byte")
    assert right.broken is None and (right.problem_name, right.solution_name) == ("a/problem", "a/right")
    assert (right.facts().origin, right.facts().claimed_speedup) == ("by hand", 2.5)
    assert (right.level, right.problem_id, right.sample_id) == (1, 3, None)
    assert right.settings == {"batch_size": 2}


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "neither a folder of problems nor a JSON list"),
        ("{}", "got dict"),
        ("[]", "an empty list"),
        ('[["a.py"]]', "entry 0 names no problem and solution"),
        ('[{"problem": "a.py", "solution": "b.py", "levle": 1}]', "unknown keys levle"),
        ('[{"problem": "a.py", "solution": "b.py", "level": true}]', "level is True"),
    ],
)
def test_a_list_that_is_none_is_refused(tmp_path, text, complaint):
    (tmp_path / "pairs.json").write_text(text)
    with pytest.raises(CatalogError, match=complaint):
        suite.read(tmp_path / "pairs.json")


def test_folders_without_pairs_are_refused(kernelbench, tmp_path):
    problems, run = kernelbench
    for given, complaint in (
        ((problems,), "--solutions RUN"),
        ((run, run), "no problem such as"),
        ((problems, problems), "no solution such as"),
        ((problems, tmp_path / "gone"), "no such folder"),
        ((run / "eval_results.json", run), "goes with a folder of problems"),
    ):
        with pytest.raises(CatalogError, match=complaint):
            suite.read(*given)


def test_what_cannot_run_is_settled_and_the_rest_is_not(kernelbench):
    problems, run = kernelbench
    (run / "level_1_problem_3_sample_1_kernel.py").write_text('CUDA = "__global__ void f() {}"\nclass ModelNew: ...')
    tasks = plan.of_suite(suite.read(problems, run), Options(device="cpu"))
    assert [task.settled and task.settled[0] for task in tasks] == [None, "skipped", None, "error"]
    assert tasks[1].settled[1] == "it does not run on --device cpu"
    assert [task.place for task in tasks] == ["cpu", None, "cpu", None]
    assert tasks[3].hashes["model_sha256"] is None and tasks[3].hashes["source_sha256"]


def test_settings_of_a_pair_must_be_constants_of_its_problem(tmp_path):
    for name in ("problem.py", "right.py"):
        (tmp_path / name).write_text("batch_size = 4")
    pair = {"problem": "problem.py", "solution": "right.py"}
    pairs = [pair | {"settings": settings} for settings in ({"batch": 2}, {"batch_size": 2})]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    wrong, right = plan.of_suite(suite.read(tmp_path / "pairs.json"), Options(device="cpu"))
    assert wrong.settled == ("error", "settings: problem has no constant called batch; it has: batch_size")
    assert right.settled is None and right.settings == {"batch_size": 2}
