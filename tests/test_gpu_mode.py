"""GPU MODE's problems: which pairs a folder makes, what is said of faulty ones, and how they are judged."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typed import run

from playground import gpu_mode, gpu_mode_problem
from playground.catalog import ROOT, CatalogError, Model, borrowed_names, load_problem, load_variant
from playground.driver.session import named_failure
from playground.worker import WorkerFailure
from playground.worker.failures import describe

EXAMPLE = ROOT / "examples" / "gpu_mode"
REFERENCE = """
import torch
from task import STEP

def generate_input(n, seed, case="plain"):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(n, n, device="cuda", generator=generator)
    return x, {"bias": torch.randn(n, device="cuda", generator=generator), "step": STEP}, torch.empty(n, device="cuda")

def ref_kernel(data):
    x, more, _ = data
    return (x * x).sum(1) + more["step"] * more["bias"]

def check_implementation(data, output):
    expected = ref_kernel(data)
    return bool(torch.allclose(output.float(), expected, rtol=0.02)), "too far"
"""
TASK = {
    "files": [{"name": f"{name}.py", "source": f"{name}.py"} for name in ("task", "reference")],
    "tests": [{"n": 40, "seed": 1}, {"n": 7, "seed": 2}, {"n": 30, "seed": 3, "case": "other"}],
    "benchmarks": [{"n": 300, "seed": 4}, {"n": 500, "seed": 5}],
    "ranking_by": "geom",
}
SUBMISSION = """
import torch
from task import STEP

def custom_kernel(data):
    x, more, output = data
    {body}
    return output
"""
RIGHT = "output[...] = torch.einsum('ij,ij->i', x, x) + STEP * more['bias']"
CUDA = 'TEXT = "__global__ void f() {}"'


@pytest.fixture
def write(tmp_path):
    """write(name, text) -> the path of a file in the folder of a problem that is right; a dict is task.yml's (JSON is YAML)."""

    def write(name, text):
        path = tmp_path / "squares" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(text) if isinstance(text, dict) else text)
        return path

    for name, text in {"task.yml": TASK, "task.py": "STEP = 0.5", "reference.py": REFERENCE}.items():
        write(name, text)
    return write


def cases(*arguments):
    return [(pair.solution_name, pair.settings, pair.timed) for pair in gpu_mode.read(*arguments).pairs]


def test_tests_are_judged_and_benchmarks_timed_on_a_gpu(write):
    folder = write("submission.py", SUBMISSION.format(body=RIGHT)).parent
    tests, benchmarks = TASK["tests"], TASK["benchmarks"]
    timed = [("submission", each, True) for each in benchmarks]
    assert cases(folder, None, True) == [("submission", each, False) for each in tests] + timed
    assert cases(folder, None, False) == [("submission", each, False) for each in tests]
    assert cases(folder, None, False, {"n": 9}) == [("submission", tests[i] | {"n": 9}, False) for i in (0, 2)]
    cuda = write("solutions/correct/cuda.py", CUDA)
    assert cases(folder, [cuda], False) == [("solutions/correct/cuda", tests[1], False)], "the smallest test"
    (triton,) = gpu_mode.read(folder, [write("t.py", "import torch\nimport triton\n")], False).pairs
    assert triton.skipped == "it imports triton, whose kernels run on a GPU only"
    (found,) = gpu_mode.read(folder, [cuda], False).pairs
    assert Path(found.solution) == cuda, "what is judged is the file itself"


@pytest.mark.parametrize(
    "name, text, complaint",
    [
        ("task.yml", "files: 3\ntests: [", "task.yml:2: not YAML: expected the node content"),
        ("task.yml", "files:\n\t- a", "task.yml:2: not YAML: found character"),
        ("task.yml", "- a list", "expected a list called `files`, got []"),
        ("task.yml", {"tests": [{"n": 1}]}, "expected a list called `files`, got []"),
        ("task.yml", TASK | {"tests": 5}, "expected a list called `tests`, got 5"),
        ("task.yml", TASK | {"benchmarks": {"n": 1}}, "expected a list called `benchmarks`, got {'n': 1}"),
        (
            "task.yml",
            TASK | {"multi_gpu": True},
            "expected a problem in Python for one GPU, got {'lang': 'py', 'multi_gpu': True}",
        ),
        ("task.yml", TASK | {"lang": "cu"}, "expected a problem in Python for one GPU, got {'lang': 'cu'"),
        ("task.yml", TASK | {"files": TASK["files"][:1]}, "expected reference.py among `files`, got ['task']"),
        ("task.yml", TASK | {"files": ["reference.py"]}, "expected a file as name and source, got 'reference.py'"),
        ("task.yml", TASK | {"tests": [[1]]}, "expected a test as name: value of generate_input's arguments, got [1]"),
        ("task.yml", TASK | {"tests": [{"n m": 1}]}, "expected a test as name: value"),
        ("task.yml", TASK | {"files": [{"name": "a.py", "source": "gone.py"}]}, "expected gone.py, which `files` names"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(write, name, text, complaint):
    folder = write("submission.py", CUDA).parent
    write(name, text)
    with pytest.raises(CatalogError) as told:
        gpu_mode.read(folder, None, False)
    assert complaint in str(told.value)
    good = folder.parent / "good"
    good.mkdir()
    for each, content in {"task.yml": json.dumps(TASK), "task.py": "", "reference.py": "", "submission.py": CUDA}.items():
        (good / each).write_text(content)
    (pair,) = gpu_mode.read(folder.parent, None, False).pairs[1:]
    assert complaint in pair.broken, "of several problems it costs its own pairs alone"


def test_an_unknown_argument_and_a_missing_library_are_named(write, monkeypatch):
    folder = write("submission.py", CUDA).parent
    with pytest.raises(CatalogError, match="--set: squares has no m; it has: n, seed"):
        gpu_mode.read(folder, None, False, {"m": 1})
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(CatalogError, match="needs PyYAML: python -m pip install PyYAML"):
        gpu_mode.read(folder, None, False)


@pytest.fixture
def load(write):
    """load() -> the example problem's module at its first test, as a worker has it."""

    def load():
        (pair, *_) = gpu_mode.read(write("submission.py", CUDA).parent, None, False).pairs
        return load_problem(pair.problem, TASK["tests"][0])

    return load


def test_data_is_taken_apart_and_put_together_with_new_memory_for_the_output(load):
    loaded = load()
    torch.manual_seed(1)
    *values, form = loaded.get_inputs()
    assert [tuple(value.shape) for value in values] == [(40, 40), (40,)], "the output is none of the inputs"
    x, more, output = gpu_mode_problem.data([*values, form])
    assert x is values[0] and more["bias"] is values[1] and more["step"] == 0.5 and tuple(output.shape) == (40,)
    assert gpu_mode_problem.data([*values, form])[2].data_ptr() != output.data_ptr()
    wide = gpu_mode_problem.data([*(value.double() for value in values), form])
    assert wide[2].dtype == torch.float64, "the reference is not rounded on its way out"
    again = loaded.get_inputs()
    assert not torch.equal(again[0], values[0]), "each draw has a seed of its own"
    right = loaded.Model()(*values, form)
    assert loaded.check_outputs([*values, form], [right]) is None
    assert loaded.check_outputs([*values, form], [right + 9]) == "too far"


def test_other_forms_of_data(write, load):
    write(
        "reference.py",
        """
import torch
from dataclasses import dataclass

@dataclass
class Config:
    weight: torch.Tensor
    sizes: list

def generate_input(n, seed, case=None):
    counts = torch.empty(n, dtype=torch.int64, device="cuda")
    return [Config(torch.ones(n, device="cuda"), [n, None]), torch.ones(n).to(torch.float8_e4m3fn), counts]

def ref_kernel(data):
    config, small, counts = data
    return {"sum": (config.weight + small.float()).double(), "counts": counts}
""",
    )
    loaded = load()
    given = loaded.get_inputs()
    assert [value.dtype for value in given[:-1]] == [torch.float32, torch.uint8], "floats of a byte are no probe's"
    config, small, counts = gpu_mode_problem.data(given)
    assert config.sizes == [40, None] and small.dtype == torch.float8_e4m3fn and counts.dtype == torch.int64
    found = loaded.Model()(*given)["sum"]
    assert found.dtype == torch.float32 and found.tolist() == [2.0] * 40, "no more precision is asked for than came in"


KERNEL, GENERATOR = (
    SUBMISSION.format(body="raise ValueError('no luck')"),
    REFERENCE.replace("    x =", "    raise ValueError\n    x ="),
)


@pytest.mark.parametrize(
    "name, text, told",
    [
        ("submission.py", KERNEL, "{}:7: in custom_kernel"),
        ("submission.py", SUBMISSION.format(body="return None"), "{}:5: custom_kernel must return a tensor"),
        ("submission.py", "import task\n1 / task.none", "{}:2: in <module>"),
        ("submission.py", "def custom_kernel(data)\n", "{}:1: SyntaxError"),
        ("submission.py", "x = n", "{}:1: in <module>"),  # that the problem has an argument of this name helps nobody
        ("submission.py", "x = 1", "{} does not define custom_kernel(data)"),
        ("reference.py", GENERATOR, "{}:7: in generate_input"),
        (
            "reference.py",
            REFERENCE.replace("(n, seed, case", "(m, seed, case"),
            "{}:5: generate_input: missing a required argument",
        ),
        ("reference.py", REFERENCE.replace("return (x", "x.none; return (x"), "{}:12: in ref_kernel"),
        ("reference.py", REFERENCE.replace("return (x", "return None; (x"), "{}:10: ref_kernel must return a tensor"),
        ("reference.py", REFERENCE.replace("def ref_kernel", "def kernel"), "{} does not define ref_kernel"),
        ("reference.py", REFERENCE.replace("return x,", "return range(3),"), "{}:5: generate_input gives a range"),
        ("reference.py", REFERENCE.replace("return x,", "return 5; x,"), "{}:5: no tensor is made"),
        ("task.py", "STEP = none", "{}:1: in <module>"),
    ],
)
def test_what_goes_wrong_is_told_at_the_users_own_line(write, name, text, told):
    solution = write("submission.py", SUBMISSION.format(body=RIGHT))
    path = write(name, text)
    (pair, *_) = gpu_mode.read(solution.parent, None, False).pairs
    with pytest.raises(Exception) as raised:
        problem = load_problem(pair.problem, pair.settings)
        given = problem.get_inputs()
        problem.Model()(*given)
        names = {each: vars(problem)[each] for each in borrowed_names(pair.solution, pair.problem)}
        load_variant(pair.solution, None, names, problem.model_new_of).ModelNew()(*given)
    reason, details = describe(raised.value)
    assert (details if ": in " in told else reason).startswith(told.format(path)), (reason, details)


@pytest.mark.parametrize(
    "reason, details, named",
    [
        ("ValueError: no", "/x/reference.py:3: in ref_kernel\nTraceback", "/x/reference.py:3: ValueError: no"),
        ("/x/reference.py:10: ref_kernel must return a tensor", "", "/x/reference.py:10: ref_kernel must return a tensor"),
        ("out of memory", "", "/x/p.py: out of memory"),
    ],
)
def test_an_original_that_fails_is_named_by_the_line_of_the_file_that_it_uses(reason, details, named):
    assert named_failure(Model("p", Path("/x/p.py")), WorkerFailure(reason, details)) == named


def test_a_submission_may_change_its_inputs_where_gradients_are_on(write, load):
    loaded = load()
    solution = write("submission.py", SUBMISSION.format(body="x *= 2; return x.sum(1)"))
    *values, form = loaded.get_inputs()
    values = [value.requires_grad_() for value in values]
    assert not load_variant(solution, model_new_of=loaded.model_new_of).ModelNew()(*values, form).requires_grad


def test_a_problem_without_a_check_of_its_own(write, load):
    write("reference.py", REFERENCE.partition("def check")[0])
    assert not load().check_outputs


@pytest.mark.parametrize(
    "body, is_narrowed",
    [
        ("return data.to(torch.float64).cumsum(0)", True),
        ("return data.double().sum()", True),
        ("return data.to(torch.float64).sum().to(torch.float32)", False),
        ("return data", False),
    ],
)
def test_float64_counts_where_the_reference_returns_it(body, is_narrowed):
    text = f"import torch\n\ndef ref_kernel(data):\n    {body}\n\ndef check_implementation(data, output):\n    data.double()\n"
    assert bool(gpu_mode_problem.IN_FLOAT64.search(text)) == is_narrowed


BODIES = {
    "right": RIGHT,
    "constant": RIGHT.replace("STEP", "0.51"),
    "unwritten": "",
    "dtype": RIGHT + "; output = output.double()",
    "stale": "kept.setdefault(x.shape, torch.einsum('ij,ij->i', x, x)); output[...] = kept[x.shape] + STEP * more['bias']",
}


HEAD = "kept = {}\n"
REASONS = {"constant": "off by", "unwritten": "off by|NaN", "dtype": "has the type torch.float64", "stale": "off by"}


@pytest.mark.parametrize("names", [["right"], pytest.param(list(BODIES), marks=pytest.mark.full)])
def test_right_and_wrong_submissions_are_told_apart_and_their_own_check_is_shown_beside(compare, write, tmp_path, names):
    bodies = {name: BODIES[name] for name in names}
    files = [str(write(f"{name}.py", HEAD + SUBMISSION.format(body=body))) for name, body in bodies.items()]
    folder = str(tmp_path / "squares")
    report = tmp_path / "out.json"
    write("task.yml", TASK | {"tests": TASK["tests"][1:2]})
    options = ["--device", "cpu", "--check-only", "--json", str(report)]
    status, out, err = compare("--model", folder, "--variant", *files, *options)
    assert status == (1 if len(names) > 1 else 0), err
    document = json.loads(report.read_text())
    found = {result["variant"]: result for result in document["results"]}
    assert {name: result["verdict"] for name, result in found.items()} == dict.fromkeys(bodies, "fail") | {"right": "pass"}
    for name in names[1:]:
        assert re.search(REASONS[name], found[name]["reason"]), found[name]["reason"]
    accepted = {name for name, result in found.items() if result["check"]["own_check"]["complaint"] is None}
    assert accepted - {"stale"} == {"right", "constant", "dtype"} & bodies.keys()
    lines = " ".join(out.split())  # folded at a terminal's width
    told = re.findall(r"constant, test n=7: the output is off by(.*?)\d/\d", lines)
    assert len(told) == names.count("constant") and all("the problem's own check accepts it" in line for line in told)
    (right,) = [each for each in document["suite"]["cases"] if each["solution"] == "right"]
    assert right["test"] == {"right": 1, "ran": 1, "listed": 1} and right["benchmark"] == {"right": 0, "ran": 0, "listed": 2}
    assert right["geometric_mean_ms"] is None and "2 on a GPU only" in out


@pytest.mark.full
def test_the_example_is_right_under_the_emulator():
    status, out, err = run("compare.py", "--model", str(EXAMPLE), "--device", "emulator")
    assert status == 0 and "1/1 pass gpu_mode, submission, test rows=5 columns=33" in out, out + err
