"""Problems of FlashInfer-Bench and SOL-ExecBench: how they are read, judged, and written as traces."""

import json
import re

import pytest
import torch

from playground import catalog, definitions
from playground.catalog import CatalogError
from playground.report import trace
from tests.report.made import document_of, make_passed, not_passed, read

REFERENCE = """
from __future__ import annotations
import torch

def run(x, weight, eps):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return {"y": (y * weight.float()).to(x.dtype), "rows": x.float().sum(1)}
"""
AXES = {"rows": {"type": "var"}, "columns": {"type": "const", "value": 40}, "all": {"type": "expr", "expression": "rows * 2"}}
DEFINITION = {
    "name": "rms",
    "axes": AXES,
    "inputs": {
        "x": {"shape": ["rows", "columns"], "dtype": "float32"},
        "weight": {"shape": ["columns"], "dtype": "float32"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["rows", "columns"], "dtype": "float32"}, "rows": {"shape": ["rows"], "dtype": "float32"}},
    "reference": REFERENCE,
}
RANDOM, EPS = {"type": "random"}, {"type": "scalar", "value": 1e-5}
WORKLOADS = [
    {"uuid": f"u{rows}", "axes": {"rows": rows}, "inputs": {"x": RANDOM, "weight": RANDOM, "eps": EPS}} for rows in (5, 7)
]
# In destination-passing style.
RIGHT = """
import torch
def kernel(x, weight, eps, y, rows):
    y.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)
    rows.copy_(x.sum(1))
"""


def solution_of(text, entry="kernel.py::kernel", **more):
    spec = {"entry_point": entry, "languages": ["pytorch"]}
    sources = [{"path": entry.partition("::")[0], "content": text}]
    return {"name": "mine", "definition": "rms", "author": "me", "spec": spec, "sources": sources} | more


def write_problem(folder, definition=DEFINITION, workloads=WORKLOADS, solutions=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "definition.json").write_text(json.dumps(definition))
    (folder / "workload.jsonl").write_text("".join(json.dumps(each) + "\n" for each in workloads))
    for name, solution in (solutions if solutions is not None else {"solution": solution_of(RIGHT)}).items():
        (folder / f"{name}.json").write_text(json.dumps(solution))
    return folder


def loaded(pair):
    return catalog.load_problem(pair.problem, pair.settings)


def test_each_workload_and_solution_is_a_pair(tmp_path):
    first, second = definitions.read(write_problem(tmp_path / "rms"), None).pairs
    assert (first.problem_name, first.solution_name, first.workload, first.case.name) == (
        "rms",
        "mine",
        WORKLOADS[0],
        "workload rows=5",
    )
    assert second.workload["uuid"] == "u7"
    problem = loaded(second)
    x, weight, eps = problem.get_inputs()
    assert (x.shape, weight.shape, eps) == ((7, 40), (40,), 1e-5)
    y, rows = problem.Model(*problem.get_init_inputs())(x, weight, eps)
    mine = catalog.load_variant(second.solution, model_new_of=problem.model_new_of).ModelNew()
    torch.testing.assert_close(mine(x, weight, eps), (y, rows))
    assert mine(x[:3], weight, eps)[0].shape == (3, 40), "outputs are as large as the inputs make them"


def test_flashinfer_benchs_folders(tmp_path):
    for folder in ("definitions/norm", "workloads/norm", "solutions/me"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "definitions/norm/rms.json").write_text(json.dumps(DEFINITION))
    traces = [{"definition": "rms", "workload": each, "solution": None, "evaluation": None} for each in WORKLOADS]
    (tmp_path / "workloads/norm/rms.jsonl").write_text("\n".join(map(json.dumps, traces)))
    (tmp_path / "solutions/me/mine.json").write_text(json.dumps(solution_of(RIGHT)))
    (tmp_path / "solutions/me/cuda.json").write_text(json.dumps(solution_of("//", "a.cu::run", name="cuda")))
    pairs = definitions.read(tmp_path, None).pairs
    assert [(pair.solution_name, pair.workload["uuid"]) for pair in pairs] == [
        (n, u) for n in ("cuda", "mine") for u in ("u5", "u7")
    ]
    assert pairs[0].skipped == "internal limit: its entry point is a.cu, which is not Python" and pairs[2].skipped is None


def test_custom_inputs_and_types(tmp_path):
    reference = "import torch\ndef made(given, device):\n    return {'i': torch.arange(given['rows'], device=device)}\n"
    reference += "def run(i):\n    return i * 2.0\n"
    definition = DEFINITION | {"inputs": {"i": {"shape": ["rows"], "dtype": "int64"}}, "reference": reference}
    definition |= {"outputs": {"o": {"shape": ["all"], "dtype": "float32"}}, "custom_inputs_entrypoint": "made"}
    workload = {"uuid": "u", "axes": {"rows": 4}, "inputs": {"i": {"type": "custom"}}}
    folder = write_problem(tmp_path / "a", definition, [workload])
    assert loaded(definitions.read(folder, None).pairs[0]).get_inputs()[0].tolist() == [0, 1, 2, 3]
    random = loaded(definitions.read(write_problem(folder, definition, [workload | {"inputs": {}}]), None).pairs[0])
    (drawn,) = random.get_inputs()
    assert drawn.dtype == torch.int64 and drawn.abs().max() <= 1024
    assert random.model_new_of(type("", (), {"run": lambda i, o: o.fill_(3)}))().forward(torch.arange(4)).tolist() == [3.0] * 8
    files = workload | {"inputs": {"i": {"type": "safetensors", "path": "x", "tensor_key": "i"}}}
    (pair,) = definitions.read(write_problem(folder, definition, [files]), None).pairs
    assert pair.skipped == "internal limit: safetensors inputs are not read"


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"reference": 3}, "definition.json: expected a str called `reference`, got 3"),
        ({"inputs": None}, "expected a dict called `inputs`"),
    ],
)
def test_a_faulty_definition_is_named(tmp_path, change, complaint):
    with pytest.raises(CatalogError, match=re.escape(complaint)):
        definitions.read(write_problem(tmp_path / "a", DEFINITION | change), None)
    write_problem(tmp_path / "b", DEFINITION | {"name": "other"}, solutions={"s": solution_of(RIGHT, definition="other")})
    assert [pair.broken is None for pair in definitions.read(tmp_path, None).pairs] == [False, True, True], "it costs its own"


@pytest.mark.parametrize(
    "write, complaint",
    [
        (lambda folder: (folder / "workload.jsonl").write_text("{}\n"), "workload.jsonl:1: expected a workload with axes"),
        (lambda folder: (folder / "workload.jsonl").write_text("\n{\n"), "workload.jsonl:2: not JSON"),
        (lambda folder: (folder / "workload.jsonl").write_text(""), "no workload of rms is there"),
        (lambda folder: (folder / "solution.json").unlink(), "no solutions of"),
    ],
)
def test_what_is_missing_is_named(tmp_path, write, complaint):
    write(folder := write_problem(tmp_path / "a"))
    with pytest.raises(CatalogError, match=re.escape(complaint)):
        definitions.read(folder, None)


def test_a_run_judges_them_and_writes_traces(compare, tmp_path):
    solutions = {"right": solution_of(RIGHT), "wrong": solution_of(RIGHT.replace("+ eps", "+ 0.1"), name="wrong")}
    solutions["raises"] = solution_of(RIGHT.replace("rows.copy_", "rows.none_"), name="raises")
    solutions["shape"] = solution_of("def run(x, weight, eps):\n    return x.sum(1), x * 3", "a.py::run", name="shape")
    folder = write_problem(tmp_path / "rms", workloads=WORKLOADS[:1], solutions=solutions)
    status, out, err = compare("--model", folder, "--device", "cpu", "--check-only", "--trace", tmp_path / "t.jsonl")
    assert status == 1, err
    assert re.search(r"forward only rms, mine|pass rms, mine", out), out
    found = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert {each["solution"]: each["evaluation"]["status"] for each in found} == {
        **{"wrong": "INCORRECT_NUMERICAL", "raises": "RUNTIME_ERROR", "shape": "INCORRECT_SHAPE"},
    }
    assert "--trace leaves out 1 right: not timed" in err
    assert all(each["definition"] == "rms" and each["workload"] == WORKLOADS[0] for each in found)
    (tmp_path / "own.py").write_text(RIGHT + "run = kernel\n")
    status, out, err = compare("--model", folder, "--variant", tmp_path / "own.py", "--device", "cpu", "--check-only")
    assert status == 0 and "rms, own" in out, err
    assert compare("--model", folder, "--set", "rows=3")[0] == 2


def test_traces_keep_what_their_form_demands():
    pair = {"problem": "rms", "solution": "mine", "workload": WORKLOADS[0]}
    slow = not_passed("error", "no answer within the time limit of 3 s", model="rms", variant="a") | {"pair": pair}
    broken = not_passed("error", "does not compile: no", model="rms", variant="a") | {"pair": pair}
    found = trace.traces(read(document_of(make_passed("rms", "mine") | {"pair": pair}, slow, broken, make_passed("m", "v"))))
    assert [each["evaluation"]["status"] for each in found] == ["PASSED", "TIMEOUT", "COMPILE_ERROR"]
    for each in found:
        evaluation = each["evaluation"]
        assert (evaluation["performance"] is not None) == (evaluation["status"] == "PASSED")
        assert (evaluation["correctness"] is not None) == (evaluation["status"] in ("PASSED", "INCORRECT_NUMERICAL"))
        assert evaluation["environment"]["hardware"] and evaluation["timestamp"]
    assert found[0]["evaluation"]["performance"]["latency_ms"] == 0.142
