"""Every variant stands alone and reads alike: what a future author must keep to, and what the failure tells them to do."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys

import project_variants
import pytest
import torch

from playground import catalog, tensors
from playground.command import shared_text

FILES = sorted(catalog.KERNELS.glob("*/*.py"))
VARIANTS = pytest.mark.parametrize("model, variant", project_variants.variants())

IMPORT_AND_RUN = """
import runpy, subprocess, sys
import torch.utils.cpp_extension as cpp_extension

def refuse(*args, **kwargs):
    raise AssertionError("something is built or started before the first forward")

starts, subprocess.Popen = subprocess.Popen, refuse
cpp_extension.load = cpp_extension.load_inline = cpp_extension._jit_compile = refuse
number = int(sys.argv[1])
for path in sys.argv[2 : number + 2]:
    print(path)
    runpy.run_path(path, run_name="imported")
subprocess.Popen = starts
for path in sys.argv[number + 2 :]:
    try:
        runpy.run_path(path, run_name="__main__")
    except (AssertionError, RuntimeError) as error:
        print(error)
"""


def test_each_file_names_its_licence():
    assert [path.name for path in FILES if "MIT; copy it." not in ast.get_docstring(ast.parse(path.read_text()))] == []


def test_what_all_files_write_alike_is_the_same_text():
    different = [str(path.relative_to(catalog.ROOT)) for path in shared_text.different()]
    assert not different, f"python -m playground.command.shared_text writes it into {different}"


@pytest.mark.parametrize(
    "edit",
    [
        ("within 1 ulp", "within 2 ulp"),
        ('"=f"(power)', '"+f"(power)'),
        ("setmaxnreg.inc", "setmaxnreg.dec"),
        ("#define EIGHT(d, i)", "#define EIGHT(i, d)"),
        ("// As bar_sync;", "// Like bar_sync;"),
        ('or "emulated"', ""),
        ("extra_c", "more_c"),
    ],
)
@pytest.mark.parametrize("language", ["CUDA", "CPP"])
def test_a_text_that_differs_is_found_and_mended(edit, language):
    shared = [shared_text.shell(language == "CUDA"), "own", shared_text.main_text()]
    text = "\n\n".join(["#define DEVICE", f"{language} = 0", *shared_text.device_functions().values(), *shared])
    assert shared_text.as_shared(text) == text
    edited = text.replace(*edit)
    assert edited != text
    assert shared_text.as_shared(edited) == text


# Their texts are those that were recorded on a GPU. They take the shared wrappers of bf16 before the next recording.
OWN_WRAPPERS = pytest.mark.xfail(strict=True, reason="two types in one wrapper, until the next recording")
OF_TWO_TYPES = ("alexnet_conv1/v4_tensor_core", "alexnet_conv1/v5_hopper")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=[OWN_WRAPPERS] if name in OF_TWO_TYPES else [])
        for path in FILES
        if not path.name.startswith("cpu_") and (name := f"{path.parent.name}/{path.stem}")
    ],
)
def test_each_ptx_wrapper_has_its_one_text(path):
    """A function around an instruction of PTX has its name and text from templates/device.txt."""
    text = path.read_text(encoding="utf-8")
    for block in shared_text.device_functions().values():
        text = text.replace(block if "#define DEVICE" in text else block.replace("DEVICE", "__device__ __forceinline__"), "")
    others = re.findall(r"^.*\basm\b.*$", text, re.MULTILINE)
    assert not others, f"give the wrapper its instruction's name and add it to {shared_text.TEMPLATES / 'device.txt'}: {others}"


@VARIANTS
def test_name_says_where_it_runs(model, variant):
    assert variant.name.startswith("cpu_") == (variant.backend == "cpu")
    name = project_variants.constant(variant, "NAME")
    assert name == f"{model.name}_{variant.name}", "NAME names the build and the operators: the model's name and the file's"


@VARIANTS
def test_parameters_and_signatures(model, variant):
    """Those of its original: names, order, and the same bits after the same seed."""
    problem = catalog.load_problem(model.path)
    kinds = problem.Model, catalog.load_variant(variant.path).ModelNew
    original, new = (tensors.make_model(problem, kind, seed=3) for kind in kinds)
    theirs, ours = original.state_dict(), new.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    trained = [{name: value.requires_grad for name, value in made.named_parameters()} for made in (original, new)]
    assert trained[0] == trained[1]
    for method in ("__init__", "forward"):
        theirs, ours = (str(inspect.signature(getattr(kind, method))) for kind in kinds)
        assert ours == theirs, method


@VARIANTS
def test_imports_only_torch_and_the_standard_library(model, variant):
    imported = set()
    for node in ast.walk(ast.parse(project_variants.text_of(variant))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import does not work in a notebook cell"
            imported.add(node.module)
    foreign = {name for name in imported if name.split(".")[0] not in {"torch", *sys.stdlib_module_names}}
    assert not foreign, f"a variant stands alone; it imports {foreign}"


def own_functions(path):
    """{name: syntax tree} of the functions of a file that no other file need have."""
    text = path.read_text(encoding="utf-8")
    own = text[text.index(shared_text.OWN) : text.rindex(shared_text.MAIN)]
    return {node.name: node for node in ast.parse(own).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_next_paste_replaces_no_function(path):
    """In a notebook, functions of the same name in the next file replace those of this one, so no call looks them up."""
    own = own_functions(path)
    others = [own_functions(each) for each in FILES if each != path]
    replaced = {
        name
        for name, node in own.items()
        if any(name in each and ast.unparse(each[name]) != ast.unparse(node) for each in others)
    }
    for name, node in own.items():
        given = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
        used = {each.id for part in node.body for each in ast.walk(part) if isinstance(each, ast.Name)}
        found = (used - given) & replaced
        assert not found, f"{name} takes {found} as a default, such as original=original"


@pytest.mark.parametrize("model, variant", project_variants.variants("cuda"))
def test_cuda_text_has_no_torch_header(model, variant):
    cuda = project_variants.constant(variant, "CUDA")
    assert isinstance(cuda, str), "the CUDA text is the module constant CUDA, one string literal"
    included = re.findall(r'^\s*#\s*include\s*[<"](.+?)[>"]', cuda, re.MULTILINE)
    torch_headers = [header for header in included if header.split("/")[0] in ("torch", "ATen", "c10", "caffe2", "pybind11")]
    assert not torch_headers, f"they cost half a minute a build; they belong into BINDING: {torch_headers}"


def test_nothing_is_built_on_import_and_as_a_script_without_a_gpu_it_says_so():
    pairs = [param.values for param in project_variants.variants("cuda")]
    command = [sys.executable, "-c", IMPORT_AND_RUN, len(FILES), *FILES, *(variant.path for _, variant in pairs)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=environment)
    imported, ran = result.stdout.splitlines()[: len(FILES)], result.stdout.splitlines()[len(FILES) :]
    assert (result.returncode, result.stderr) == (0, ""), f"after {result.stdout.splitlines()[-1:]}"
    assert imported == [str(path) for path in FILES]
    assert len(ran) == len(pairs)
    for line in ran:
        assert re.fullmatch(r"Torch not compiled with CUDA enabled|No CUDA GPUs are available", line), (
            "one line: what is missing"
        )


@pytest.mark.full
@pytest.mark.parametrize("model, variant", project_variants.variants("cpu"))
def test_a_copy_elsewhere_as_a_script_on_the_cpu(model, variant, tmp_path):
    copy = shutil.copy(variant.path, tmp_path / "copied.py")
    result = subprocess.run([sys.executable, copy], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    line = (
        rf"{model.name}_{variant.name}: differs from float64 by ([-+.e\d]+) of the outputs' spread, limit ([-.e\d]+): right; "
        r"([.\d]+) ms, PyTorch ([.\d]+) ms.*\n"
    )
    match = re.fullmatch(line, result.stdout)
    assert match, f"one line: the difference, its limit, both times; got {result.stdout!r}"
    error, limit, ours, theirs = map(float, match.groups())
    assert error <= limit <= 1e-3
    assert ours > 0 and theirs > 0
