"""compare.py --new: what it writes is right at once, reads like the project's variants, and never overwrites anything."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from typed import run

from playground import catalog, tensors
from playground.command import look, new_variant
from tests.judge.problems import pairs

pytestmark = pytest.mark.full

MODELS = [model.name for model in catalog.models()]
KINDS = {"v9_start": "cuda", "cpu_start": "cpu"}
STRANGER = "max_with_index"  # it gives two tensors of different types


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the project's simplest kernels, of which a start is a copy, and a stranger's problem stand."""
    folder = tmp_path_factory.mktemp("new")
    for v1 in catalog.KERNELS.glob("*/v1_*.py"):
        (folder / v1.parent.name).mkdir(exist_ok=True)
        shutil.copy(v1, folder / v1.parent.name)
    shutil.copy(pairs.folder() / STRANGER / "problem.py", folder / f"7_{STRANGER}.py")
    return folder


@pytest.fixture(autouse=True)
def kernels_elsewhere(folder, monkeypatch):
    monkeypatch.setattr(catalog, "KERNELS", folder)


def path_of(folder, model, name):
    """The file of a new variant, written when it is first asked for; `model` is a name, or STRANGER."""
    found = catalog.find_model(str(folder / f"7_{STRANGER}.py") if model == STRANGER else model)
    path = (folder / model if model in MODELS else folder) / f"{name}.py"
    return found, (path if path.exists() else new_variant.create(found, name))


@pytest.mark.parametrize("model", MODELS)
def test_a_kernel_is_a_copy_of_v1(folder, model):
    """But for its name and the beginning of its docstring, which says that it is a start."""
    found, path = path_of(folder, model, "v9_start")
    v1 = next(variant for variant in catalog.variants(found) if variant.name.startswith("v1_"))
    ours, theirs = (file.read_text().split("\nWhy it is ", 1) for file in (path, v1.path))
    assert ours[0].startswith(f'"""{model}, v9: a start, the kernel of {v1.name}, to be changed.\n\nLike v1')
    assert ours[1].replace(f"{model}_v9_start", f"{model}_{v1.name}") == theirs[1]


@pytest.mark.parametrize("model, name", [(STRANGER, "v9_start"), *((model, "cpu_start") for model in [*MODELS, STRANGER])])
def test_any_other_is_the_original_and_a_copy_of_its_result(folder, model, name):
    _, path = path_of(folder, model, name)
    text = path.read_text()
    build = re.search(r'^module = load_inline\("(\w+)"', text, re.MULTILINE)
    assert build[1] == f"{model if model in MODELS else f'problem_7_{STRANGER}'}_{name}"
    assert "class Model(" in text and "class ModelNew(Model):" in text and "# WORK" in text and "$" not in text
    assert catalog.find_any_variant(str(path)).backend == KINDS[name]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", KINDS)
def test_it_is_well_formed(folder, model, name):
    ruff = shutil.which("ruff", path=f"{sys.prefix}/bin") or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    _, path = path_of(folder, model, name)
    config = ["--config", str(catalog.ROOT / "pyproject.toml"), "--no-cache"]
    allowed = ["--ignore", "I001,F811"] if name == "cpu_start" else []  # the original's imports stand beside the variant's own
    for command in (["check", *allowed], ["format", "--check"]):
        done = subprocess.run([ruff, *command, *config, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_kernel_is_right_before_the_judge_at_once(folder):
    """In check mode, through the command line; that of a model of the project's is v1's, which tests/emulator judges."""
    problem, path = path_of(folder, STRANGER, "v9_start")
    status, out, err = run("compare.py", "--model", problem.path, "--variant", path, "--device", "emulator")
    assert status == 0, out + err
    assert re.search(r"^v9_start forward only: right", out, re.MULTILINE)
    # A copy of each of its two results.
    assert "2 calls of its own code in a forward pass, and the result depends on it" in " ".join(out.split())


@pytest.mark.parametrize("model", [*MODELS, STRANGER])
def test_cpp_is_right_at_once(folder, model):
    problem_file, path = path_of(folder, model, "cpu_start")
    problem = catalog.load_problem(problem_file.path, catalog.SETTINGS["emulator"].get(model))
    original = tensors.make_model(problem, problem.Model, 1)
    new = tensors.make_model(problem, catalog.load_variant(path).ModelNew, 1)
    assert list(new.state_dict()) == list(original.state_dict())
    inputs = [torch.randn_like(value) if value.is_floating_point() else value for value in tensors.make_inputs(problem, 2)]
    with torch.no_grad():
        ours, theirs = tensors.flatten(new(*inputs)), tensors.flatten(original(*inputs))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * max(1.0, other.double().std().item()))


def test_its_main_runs_under_the_emulator(folder):
    _, path = path_of(folder, MODELS[0], "v9_start")
    code = f"import cuda_emulator, runpy; cuda_emulator.install(); runpy.run_path({str(path)!r}, run_name='__main__')"
    status, out, err = run("-c", code)
    assert status == 0, err
    assert re.fullmatch(r"\S+: differs from float64 by .+: right; emulated\n", out), out


@pytest.mark.parametrize(
    "missing, options", [(None, (" --json start.json", " --against start.json")), ("no GPU", ("", " --watch"))]
)
def test_the_next_two_commands_are_printed(folder, compare, monkeypatch, missing, options):
    """Where nothing is timed, nothing is to be compared with an earlier run."""
    monkeypatch.setattr(look.requirements, "missing_for", lambda device: missing)
    (folder / "alexnet_conv1" / "v8_tiles.py").unlink(missing_ok=True)
    status, out, err = compare("--new", "alexnet_conv1", "v8_tiles")
    assert (status, err) == (0, "")
    path = folder / "alexnet_conv1" / "v8_tiles.py"
    assert path.is_file() and str(path) in out
    first, second = (line.strip() for line in out.splitlines() if line.startswith("    "))
    named = "python compare.py --model alexnet_conv1 --variant v8_tiles"
    assert (first, second) == tuple(named + option for option in options)


def test_a_strangers_goes_beside_the_problem(folder, compare):
    problem = folder / f"7_{STRANGER}.py"
    status, out, _ = compare("--new", problem, "v1_mine")
    assert status == 0
    assert f'load_inline("problem_7_{STRANGER}_v1_mine"' in (folder / "v1_mine.py").read_text()
    assert f"--model {problem} --variant {folder / 'v1_mine.py'}" in out


@pytest.mark.parametrize(
    "text, message",
    [
        ("def get_inputs():\n    return []\n", "does not define Model, get_init_inputs"),
        ("class (:\n", "is not Python"),
        (
            "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\ndef module(): ...\n",
            "defines module, as the new",
        ),
    ],
)
def test_problems_that_cannot_be_wrapped(tmp_path, compare, text, message):
    (tmp_path / "problem.py").write_text(text)
    status, out, err = compare("--new", tmp_path / "problem.py", "v1_mine")
    assert (status, out) == (2, "")
    assert message in err and not (tmp_path / "v1_mine.py").exists()


def test_future_imports_stay_first(tmp_path):
    problem = tmp_path / "problem.py"
    text = (pairs.folder() / STRANGER / "problem.py").read_text()
    main = 'if __name__ == "__main__":\n    raise SystemExit(1)\n'
    problem.write_text(f'"""Odd."""\nfrom __future__ import annotations\n\f\n{text}\n{main}')  # a form feed ends no line
    path = new_variant.create(catalog.find_model(str(problem)), "v1_mine")
    compile(path.read_text(), str(path), "exec")
    assert "SystemExit" not in path.read_text() and '"""Odd."""' not in path.read_text()
