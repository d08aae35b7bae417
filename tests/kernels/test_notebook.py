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

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.full

CUDA_VARIANT = "conv_pool_sigmoid_sum/v1_fused_tail"

# variant -> (a line of its kernel, the same with a result twice as large). Doubling is exact in floating point, so where the
# biases are zero the edited variant must give exactly twice what it gave before.
EDITS = {
    "conv_pool_sigmoid_sum/cpu_box_sums": ("i < LANES; ++i) sum += total[i];", "i < LANES; ++i) sum += 2 * total[i];"),
    "conv3d_div_max_gap_bias_sum/cpu_winograd": ("s.outputs + o] = add_lanes(", "s.outputs + o] = 2 * add_lanes("),
    "alexnet_conv1/cpu_polyphase_winograd": ("s * LANES, out[s] + bias);", "s * LANES, 2 * out[s] + bias);"),
    CUDA_VARIANT: ("out[blockIdx.x] = sum;", "out[blockIdx.x] = 2 * sum;"),
}

# (model, variant) for what any variant would show; its main takes the shortest time.
ALEXNET = next(param.values for param in project_variants.variants("cpu") if param.values[0].name == "alexnet_conv1")

# `builds` gets a name for each call of load_inline, the only way in which a variant builds or loads anything.
COUNT_BUILDS = """
import functools
import torch
from torch.utils import cpp_extension

builds, load_inline = [], cpp_extension.load_inline

@functools.wraps(load_inline)
def counted(name, *arguments, **options):
    builds.append(name)
    return load_inline(name, *arguments, **options)

cpp_extension.load_inline = counted

def make(ModelNew, init_inputs, device):
    torch.manual_seed(0)
    model = ModelNew(*init_inputs).to(device).requires_grad_(False)
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


def paste_twice_and_edit(run_notebook, model, variant, device):
    name = f"{model.name}/{variant.name}"
    assert name in EDITS, f"add to EDITS a line of the kernel of {name} that scales its result"
    text = project_variants.text_of(variant)
    old_line, new_line = EDITS[name]
    assert text.count(old_line) == 1, f"EDITS names a line that is not in {name}, or not once: {old_line!r}"
    init_inputs, shape = problem_of(model)
    printed = run_notebook(
        [
            COUNT_BUILDS,
            text,
            f"""
            first = make(ModelNew, {init_inputs!r}, {device!r})
            x = torch.randn({shape!r}, device={device!r})
            expected = first(x)
            assert expected.abs().sum() > 0
            before = len(builds)
            assert before > 0
            """,
            text,
            f"""
            again = make(ModelNew, {init_inputs!r}, {device!r})
            assert type(again) is not type(first)
            assert torch.equal(again(x), expected)
            assert len(builds) == before, f"built again for the same text: {{builds[before:]}}"
            """,
            text.replace(old_line, new_line),
            f"""
            edited = make(ModelNew, {init_inputs!r}, {device!r})
            assert torch.equal(edited(x), 2 * expected), "the edit has no effect"
            assert len(set(builds)) > len(set(builds[:before])), "the edited text was not built under a name of its own"
            for old in (first, again):
                assert torch.equal(old(x), expected), "an instance made before the edit has changed"
            """,
        ]
    )
    for cell in (1, 3, 5):
        assert f"{model.name}_{variant.name}: differs from" in printed[cell], "the file's main did not run in the cell"


@pytest.mark.parametrize("model, variant", project_variants.variants("cpu"))
def test_paste_twice_and_edit(run_notebook, model, variant):
    paste_twice_and_edit(run_notebook, model, variant, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_paste_twice_and_edit_on_a_gpu(run_notebook):
    (param,) = [param for param in project_variants.variants("cuda") if param.id == CUDA_VARIANT]
    paste_twice_and_edit(run_notebook, *param.values, "cuda")


def test_variants_of_different_models_live_side_by_side(run_notebook):
    """An instance of the first, made before the second was pasted and first called after it, is still the first."""
    one, two, *_ = [param.values for param in project_variants.variants("cpu")]
    (one_init, one_shape), (two_init, two_shape) = problem_of(one[0]), problem_of(two[0])
    run_notebook(
        [
            COUNT_BUILDS,
            project_variants.text_of(one[1]),
            f"first, same = make(ModelNew, {one_init!r}, 'cpu'), make(ModelNew, {one_init!r}, 'cpu')",
            f"x = torch.randn({one_shape!r}); expected = same(x)",
            project_variants.text_of(two[1]),
            f"""
            second = make(ModelNew, {two_init!r}, "cpu")
            assert second(torch.randn({two_shape!r})).isfinite().all()
            assert torch.equal(first(x), expected)
            assert first.namespace().startswith({one[0].name!r}) and second.namespace().startswith({two[0].name!r})
            """,
        ]
    )


@pytest.mark.parametrize(
    "line, edited",
    [("does not fit {got}", "is no match for {got}"), ("launch(kernels.run_forward, x,", "launch(kernels.run_forward, 0 * x,")],
    ids=["called by forward", "forward"],
)
def test_an_edited_python_part_counts(run_notebook, line, edited):
    """Also of a function that `forward` calls; an instance made before the edit has not changed."""
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
    assert printed == f"False True\n{'match' in edited} {'0 *' not in edited}\n"


def test_a_refused_text_and_its_correction(run_notebook):
    """A slip of the pen in the kernel raises with the compiler's words; the corrected cell runs."""
    text = project_variants.text_of(ALEXNET[1])
    assert text.count("s * LANES, out[s] + bias);") == 1
    slip = text.replace("s * LANES, out[s] + bias);", "s * LANES, out[s] + bais);")
    printed = run_notebook([slip, text], raises={0: "RuntimeError"})
    assert "differs from" in printed[1]


def test_a_build_that_failed_or_was_interrupted_is_tried_again(run_notebook, tmp_path, monkeypatch):
    """The same cell in the same kernel: without a compiler (twice), stopped while the compilers run, and at last in peace."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("CXX", raising=False)
    text = project_variants.text_of(ALEXNET[1])
    hide_compiler = 'import os; path, os.environ["PATH"] = os.environ["PATH"], os.devnull'
    interrupt = f"os.environ['PATH'] = path\n{INTERRUPT_THE_COMPILER}"
    in_peace = "interrupter.join()"
    printed = run_notebook(
        [hide_compiler, text, text, interrupt, text, in_peace, text],
        raises={1: "RuntimeError", 2: "RuntimeError", 4: "KeyboardInterrupt"},
    )
    assert "differs from" in printed[6]


# The line of cuda_emulator/README.md, in a cell before; `debug` because it builds without optimisation, far sooner.
EMULATE = "import cuda_emulator as emulator; emulator.install(debug=True)"
EDITED = "alexnet_conv1/v1_direct"
EDITED_LINE = "out[index] = bias ? sum + bias[o] : sum;"


def run_cell(model, name="output"):
    init_inputs, shape = problem_of(model)
    return f"torch.manual_seed(1); {name} = make(ModelNew, {init_inputs!r}, 'cpu')(torch.randn({shape!r}))"


def pasted_twice(model, variant):
    """Cells that paste a variant, run it on small CPU tensors, and do both once more."""
    text = project_variants.text_of(variant)
    first = "assert expected.isfinite().all() and expected.std() > 0; before = len(builds); assert before > 0"
    again = "assert torch.equal(output, expected); assert len(builds) == before, 'built again'; builds.clear()"
    return [text, f"{run_cell(model, 'expected')}; {first}", text, f"{run_cell(model)}; {again}"]


def edited_and_interrupted(model, variant):
    """Cells with an edit that counts, and a build that is stopped while the compiler runs and done when the cell is run again.

    The last but four must raise KeyboardInterrupt.
    """
    text = project_variants.text_of(variant)
    assert text.count(EDITED_LINE) == 1
    doubled = text.replace(EDITED_LINE, "out[index] = 2 * (bias ? sum + bias[o] : sum);")
    # A text that no cache has, so that there is something to interrupt.
    fresh = doubled.replace("2 * (bias", f"0 * {time.time_ns()}u + 2 * (bias")
    interrupted = f"{INTERRUPT_THE_COMPILER}\n{fresh}"  # whose main builds it
    twice = "assert torch.equal(output, 2 * expected)"
    return [doubled, run_cell(model), twice, interrupted, "interrupter.join(); del output", fresh, run_cell(model), twice]


def test_every_cuda_variant_under_the_emulator(run_notebook, monkeypatch):
    """All in one kernel, one below the other; the one of EDITED last."""
    monkeypatch.setenv("PYTHONPATH", str(catalog.ROOT))
    params = sorted(project_variants.variants("cuda"), key=lambda param: param.id == EDITED)
    cells = [EMULATE, COUNT_BUILDS, *(cell for param in params for cell in pasted_twice(*param.values))]
    assert params[-1].id == EDITED
    cells += edited_and_interrupted(*params[-1].values)
    printed = run_notebook(cells, raises={len(cells) - 5: "KeyboardInterrupt"})
    for position, param in enumerate(params):
        for text in (printed[2 + 4 * position], printed[4 + 4 * position]):
            name = param.id.replace("/", "_")
            line = rf"{name}: differs from float64 by \S+ of .+, limit \S+: right; under the emulator, .+ \(\d.*\)\n"
            assert re.fullmatch(line, text), f"the file's main prints one line in the cell; got {text!r}"


def test_the_first_kernel(run_notebook, monkeypatch):
    """Changed it is right, broken it is wrong or a race, repaired it is right; the last but one cell has a speed-up."""
    monkeypatch.setenv("PYTHONPATH", str(catalog.ROOT))
    book = nbformat.read(catalog.ROOT / "notebooks" / "first_kernel.ipynb", as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "keep it without outputs"
    _, _, kernel, given, edited, scaled, racing, repaired, timed, on_a_gpu = run_notebook([cell.source for cell in cells])
    assert "__syncthreads();" in kernel
    for printed in (given, edited, repaired):
        assert re.search(r": differs from float64 by .+: right; under the emulator", printed), printed
    assert re.search(r": differs from float64 by .+: wrong; under the emulator", scaled), scaled
    assert re.match(r"finding: \S*my_kernel\.py:\d+: shared memory race: .+`warp_sums`.+\(line \d+\)$", racing), racing
    assert re.search(r": right; [\d.]+ ms, PyTorch [\d.]+ ms", timed), timed
    assert torch.cuda.is_available() or on_a_gpu == "no GPU here\n"
