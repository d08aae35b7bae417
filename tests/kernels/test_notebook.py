"""A variant's file pasted whole into a cell of a real Jupyter kernel: it runs, runs again, and runs after an edit. And the
notebook of notebooks/ does what its text says.

In a notebook every file is `__main__`, and every paste replaces the names of the one before.
"""

import json
import re
import sys
import textwrap
import time

import project_variants
import pytest
import torch

from playground import catalog

pytestmark = pytest.mark.full

# (model, variant) for what any variant would show; its main takes the shortest time.
ALEXNET = next(param.values for param in project_variants.variants("cpu") if param.values[0].name == "alexnet_conv1")

# `builds` gets a name for each call of load_inline, the only way in which a variant builds or loads anything.
COUNT_BUILDS = """
import functools
import torch
from torch.utils import cpp_extension

builds, uncounted = [], cpp_extension.load_inline

@functools.wraps(uncounted)
def counted(name, *arguments, **options):
    builds.append(name)
    return uncounted(name, *arguments, **options)

cpp_extension.load_inline = counted

def make(ModelNew, init_inputs):
    torch.manual_seed(0)
    model = ModelNew(*init_inputs).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    return model
"""


# The stop button sends SIGINT to the process group of the kernel, so compilers get it too. Here: as soon as one of them runs.
INTERRUPT_THE_COMPILER = """
import os, psutil, signal, threading, time

def compiles(process):
    try:
        return process.name() in ("cc1plus", "clang", "clang++")
    except psutil.NoSuchProcess:
        return False

def interrupt_the_compiler():
    while not any(map(compiles, psutil.Process().children(recursive=True))):
        time.sleep(0.01)
    os.killpg(os.getpgrp(), signal.SIGINT)

assert os.getpgrp() == os.getpid(), "the kernel leads no process group of its own"
interrupter = threading.Thread(target=interrupt_the_compiler, daemon=True)
interrupter.start()
"""


@pytest.fixture
def run_notebook(tmp_path, monkeypatch):
    """run_notebook(cells, raises={2: "RuntimeError"}) -> what each cell printed, in a fresh kernel of this very Python.

    Cells whose index is in `raises` must raise the exception of that name, and no other may raise.
    """
    nbclient, nbformat, _ = map(pytest.importorskip, ("nbclient", "nbformat", "ipykernel"))
    spec = tmp_path / "jupyter" / "kernels" / "this_python" / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "this Python", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    def run(cells, raises=None):
        raises = raises or {}
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
        for index in raises:
            book.cells[index].metadata["tags"] = ["raises-exception"]
        nbclient.NotebookClient(book, timeout=300, kernel_name="this_python").execute(cwd=str(tmp_path))
        for index, name in raises.items():
            errors = [output.ename for output in book.cells[index].outputs if output.output_type == "error"]
            assert errors == [name], f"cell {index} raised {errors} instead of {name}"
        return ["".join(o.text for o in cell.outputs if o.get("name") == "stdout") for cell in book.cells]

    return run


def problem_of(model):
    """(init inputs, shape of the input) at a small size."""
    problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"][model.name])
    (x,) = problem.get_inputs()
    return problem.get_init_inputs(), tuple(x.shape)


@pytest.mark.parametrize(
    "line, edited",
    [("expected {fits} to fit", "{fits} is no match"), (".run_forward, x,", ".run_forward, 0 * x,")],
    ids=["a check", "the launch"],
)
def test_an_edited_python_part_counts(run_notebook, line, edited):
    """Also for an instance that was made before: a paste replaces the operator."""
    model, variant = ALEXNET
    text, (init_inputs, shape) = project_variants.text_of(variant), problem_of(model)
    assert text.count(line) == 1
    call = f"""
        for model in (before, ModelNew(*{init_inputs!r})):
            try:
                model(torch.zeros({(*shape[:-1], 1)!r}))
            except RuntimeError as error:
                print("no match" in str(error), (model(torch.randn({shape!r})).std() > 0.1).item())
    """
    *_, printed = run_notebook([text, f"before = ModelNew(*{init_inputs!r})", text.replace(line, edited), call])
    assert printed == 2 * f"{'match' in edited} {'0 *' not in edited}\n"


def test_a_refused_text_and_its_correction(run_notebook):
    """A slip of the pen in the kernel raises with the compiler's words; the corrected cell runs."""
    text = project_variants.text_of(ALEXNET[1])
    assert text.count("s * LANES, out[s] + bias);") == 1
    slip = text.replace("s * LANES, out[s] + bias);", "s * LANES, out[s] + bais);")
    printed = run_notebook([slip, text], raises={0: "RuntimeError"})
    assert "differs from" in printed[1]


# The line of cuda_emulator/README.md; `debug` because it builds without optimisation, far sooner.
EMULATE = "import cuda_emulator as emulator; emulator.install(debug=True)"
EDITED = "alexnet_conv1/v1_direct"
EDITED_LINE = "out[index] = bias ? sum + bias[o] : sum;"


def run_cell(model, name="output"):
    init_inputs, shape = problem_of(model)
    return f"torch.manual_seed(1); {name} = make(ModelNew, {init_inputs!r})(torch.randn({shape!r}))"


def pasted_twice(model, variant):
    """Cells that paste a variant, run it on small CPU tensors, and do both once more."""
    text = project_variants.text_of(variant)
    first = "assert expected.isfinite().all() and expected.std() > 0; before = {*builds}; assert before"
    again = "assert torch.equal(output, expected); assert {*builds} == before, 'built again'; builds.clear()"
    return [text, f"{run_cell(model, 'expected')}; {first}", text, f"{run_cell(model)}; {again}"]


def edited_and_interrupted(model, variant):
    """Cells with an edit that counts, and a build that is stopped while the compiler runs and done when the cell is run again.

    The last but four must raise KeyboardInterrupt.
    """
    text, (init_inputs, shape) = project_variants.text_of(variant), problem_of(model)
    assert text.count(EDITED_LINE) == 1
    doubled = text.replace(EDITED_LINE, "out[index] = 2 * (bias ? sum + bias[o] : sum);")
    # A text that no cache has, so that there is something to interrupt.
    fresh = doubled.replace("2 * (bias", f"0 * {time.time_ns()}u + 2 * (bias")
    interrupted = f"{INTERRUPT_THE_COMPILER}\n{fresh}"  # whose main builds it
    old = f"old = make(ModelNew, {init_inputs!r}); x = torch.randn({shape!r}); unedited = old(x)"
    replaced = "assert torch.equal(old(x), 2 * unedited), 'an instance made before the edit runs the new kernel'"
    twice = "assert torch.equal(output, 2 * expected)"
    in_peace = "interrupter.join(); del output"
    return [old, doubled, replaced, run_cell(model), twice, interrupted, in_peace, fresh, run_cell(model), twice]


def test_every_variant(run_notebook, monkeypatch):
    """All in one kernel, one below the other; those in CUDA under the emulator, that of EDITED last.

    An instance of the first, first called after the others were pasted, is still the first.
    """
    monkeypatch.setenv("PYTHONPATH", str(catalog.ROOT))
    native = project_variants.variants("cpu")
    emulated = sorted(project_variants.variants("cuda"), key=lambda param: param.id == EDITED)
    init_inputs, shape = problem_of(native[0].values[0])
    cells, place_of = [COUNT_BUILDS], {}
    for param in [*native, *emulated]:
        if param is emulated[0]:
            cells += ["assert torch.equal(held(x), expected_of_held)", EMULATE, COUNT_BUILDS]
        place_of[param.id] = len(cells)
        cells += pasted_twice(*param.values)
        if param is native[0]:
            made = f"make(ModelNew, {init_inputs!r})"
            cells.append(f"x = torch.randn({shape!r}); held, expected_of_held = {made}, {made}(x)")
    assert emulated[-1].id == EDITED
    cells += edited_and_interrupted(*emulated[-1].values)
    printed = run_notebook(cells, raises={len(cells) - 5: "KeyboardInterrupt"})
    for name, place in place_of.items():
        ran = "under the emulator, .+|emulated" if "/cpu_" not in name else r"[\d.]+ ms, PyTorch [\d.]+ ms.*"
        line = rf"{name.replace('/', '_')}: differs from float64 by \S+ of .+, limit \S+: right; ({ran})\n"
        for text in (printed[place], printed[place + 2]):
            assert re.fullmatch(line, text), f"the file's main prints one line in the cell; got {text!r}"


def test_the_first_kernel(run_notebook, monkeypatch):
    """Changed it is right, broken it is wrong or a race, repaired it is right; the last but one cell has a speed-up."""
    monkeypatch.setenv("PYTHONPATH", str(catalog.ROOT))
    book = pytest.importorskip("nbformat").read(catalog.ROOT / "notebooks" / "first_kernel.ipynb", as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "keep it without outputs"
    _, _, kernel, given, edited, scaled, racing, repaired, timed, on_a_gpu = run_notebook([cell.source for cell in cells])
    assert "__syncthreads();" in kernel
    for printed in (given, edited, repaired):
        assert re.search(r": differs from float64 by .+: right; (under the emulator|emulated)", printed), printed
    assert re.search(r": differs from float64 by .+: wrong; (under the emulator|emulated)", scaled), scaled
    assert re.match(r"finding: \S*my_kernel\.py:\d+: shared memory race on `warp_sums\[\d+\]`: .+ at line \d+", racing), racing
    assert re.search(r": right; [\d.]+ ms, PyTorch [\d.]+ ms", timed), timed
    assert torch.cuda.is_available() or on_a_gpu == "no GPU here\n"
