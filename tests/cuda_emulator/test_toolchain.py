"""The cache of compiled things, PyTorch's headers and the bindings in it."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from cuda_emulator import extension, toolchain
from cuda_emulator.errors import EmulatorError
from cuda_emulator.extension import Builder
from cuda_emulator.prepared import is_the_same_under_any_name


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_EMULATOR_CACHE", str(tmp_path))
    return tmp_path


def test_what_files_share_is_looked_for_without_making_it(empty_cache, monkeypatch):
    assert not extension.is_made(__file__) and not any(empty_cache.rglob("*.so"))
    monkeypatch.setattr(extension, "OWN_LIBRARIES", (lambda: toolchain.kept("objects", ".o", "key", Path.touch),))
    assert not extension.is_made(__file__)
    toolchain.kept("objects", ".o", "key", Path.touch)
    assert extension.is_made("")


def test_what_several_need_at_once_is_made_once(empty_cache):
    made, together = [], threading.Barrier(4)

    def make(path):
        made.append(path)
        time.sleep(0.2)
        path.write_text("made")

    def need(_):
        together.wait()
        return toolchain.kept("objects", ".o", "key", make)

    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(need, range(4)))
    assert len(made) == 1 and path.read_text() == "made"
    assert list((empty_cache / "objects").iterdir()) == [path]


def test_what_could_not_be_made_is_tried_again(empty_cache):
    def fail(path):
        path.write_text("half")
        raise EmulatorError("no")

    with pytest.raises(EmulatorError):
        toolchain.kept("objects", ".o", "key", fail)
    assert toolchain.kept("objects", ".o", "key", lambda path: path.write_text("whole")).read_text() == "whole"


def test_what_a_killed_process_was_making_is_swept_and_what_is_made_now_is_not(empty_cache, monkeypatch):
    monkeypatch.setattr(toolchain, "JUST_MADE", 600.0)  # however busy the machine is
    text = "import os; from cuda_emulator import toolchain; "
    killed = f"{text} toolchain.kept('objects', '.o', 'a', lambda path: os.kill(os.getpid(), 9))"
    living = f"{text} toolchain.kept('objects', '.o', 'b', lambda path: (print('making', flush=True), input()))"
    subprocess.run([sys.executable, "-c", killed], cwd=toolchain.ROOT.parent)
    (left,) = empty_cache.glob("objects/making-*")
    with subprocess.Popen(
        [sys.executable, "-c", living], cwd=toolchain.ROOT.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as maker:
        maker.stdout.readline()
        (made,) = set(empty_cache.glob("objects/making-*")) - {left}
        toolchain.sweep()
        assert left.exists() and made.exists(), "they are younger than a process may take from making to holding one"
        for folder in (left, made):
            os.utime(folder, (0, 0))
        toolchain.sweep()
        assert made.exists() and not left.exists()
        maker.kill()


@pytest.mark.full
def test_the_precompiled_headers_that_were_used_last_stay(empty_cache):
    folder = empty_cache / "headers"
    folder.mkdir()
    for age in range(toolchain.KEPT_HEADERS + 2):
        made = folder / f"{age}.h.gch"
        made.write_text("")
        os.utime(made, (1e9 - age, 1e9 - age))
    (folder / "x.names").write_text("")
    toolchain.remove_old_headers()
    assert sorted(path.name for path in folder.iterdir()) == [*(f"{i}.h.gch" for i in range(toolchain.KEPT_HEADERS)), "x.names"]


def test_the_compiler_takes_the_precompiled_headers(tmp_path):
    flags = [*extension.BINDING_FLAGS, *toolchain.torch_flags()[0]]
    header = extension.binding_header()
    text = tmp_path / "text.cpp"
    text.write_text("#include <torch/library.h>\nstatic at::Tensor tensor;\n")
    for own, precompiled in (([], True), (["-fno-exceptions"], False)):
        command = [*toolchain.compiler()[0], *flags, *own, "-include", str(header), "-fsyntax-only", "-H", str(text)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert (f"! {header}.gch" in run.stderr) is precompiled
        assert run.returncode == 0 or own


def test_what_is_wrong_with_one_text_ends_the_compilers_of_the_others():
    """And it, not their end, is what is said."""
    started = threading.Event()

    def endless():
        started.set()
        toolchain.run_compiler(["sh", "-c", "sleep 600 & wait"], EmulatorError)

    def wrong():
        started.wait()
        toolchain.run_compiler(["sh", "-c", "echo said >&2; exit 1"], EmulatorError)

    begin = time.monotonic()
    with pytest.raises(EmulatorError, match="said"):
        extension._side_by_side([endless, wrong])
    assert time.monotonic() - begin < 300
    assert extension._side_by_side([lambda: 1, lambda: 2]) == [1, 2]


BINDING = """
#include <torch/library.h>
#include <string>

void launch(int64_t* result);

int64_t answer() {
    int64_t result = 0;
    launch(&result);
    return result;
}

TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("answer() -> int"); }
TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, m) { m.impl("answer", &answer); }
"""

KERNEL = """
#include <cstdint>

__global__ void answer(int64_t* result) { *result = 42; }

void launch(int64_t* result) { answer<<<1, 1>>>(result); }
"""


@pytest.fixture
def compiled(monkeypatch):
    """The sources that are compiled while the test runs."""
    texts, run_compiler = [], toolchain.run_compiler

    def watched(command, explain=None):
        texts.extend(Path(part).read_text() for part in command if part.endswith(".cpp"))
        run_compiler(command, explain)

    monkeypatch.setattr(toolchain, "run_compiler", watched)
    return texts


def load(folder, name, binding, kernel):
    """Load the two as a variant's file would that contains them; returns the file."""
    file = folder / f"{name}.py"
    file.write_text(f'BINDING = r"""{binding}"""\nCUDA = r"""{kernel}"""\n')
    builder = Builder(mode="fast", debug=False, source_file=str(file))
    builder.load_inline(name, binding, kernel, is_python_module=False, no_implicit_headers=True)
    return file


def test_a_binding_is_compiled_once_for_every_edit_of_the_kernels(tmp_path, compiled):
    binding = BINDING.replace("#include <string>", f"// {tmp_path}")  # no earlier run has compiled it
    load(tmp_path, "shared_before", binding, KERNEL)
    load(tmp_path, "shared_after", binding, KERNEL.replace("42", "43"))
    assert sum("int64_t answer()" in text for text in compiled) == 1
    load(tmp_path, "edited", binding.replace("return result", "return -result"), KERNEL)
    assert sum("int64_t answer()" in text for text in compiled) == 2
    assert torch.ops.shared_before.answer() == 42
    assert torch.ops.shared_after.answer() == 43
    assert torch.ops.edited.answer() == -42


def test_a_shared_binding_knows_its_librarys_name(tmp_path, compiled):
    keeps = f"// {tmp_path}\nstatic const std::string LIBRARY = C10_STRINGIZE(TORCH_EXTENSION_NAME);"
    binding = BINDING.replace("#include <string>", f"#include <string>\n{keeps}")
    binding = binding.replace("return result", "return result + LIBRARY.size()")
    load(tmp_path, "named", binding, KERNEL)
    load(tmp_path, "named_at_length", binding, KERNEL)
    assert sum("int64_t answer()" in text for text in compiled) == 1
    assert (torch.ops.named.answer(), torch.ops.named_at_length.answer()) == (42 + 5, 42 + 15)


def test_a_mistake_in_a_shared_binding_is_reported_in_its_file(tmp_path):
    with pytest.raises(EmulatorError) as raised:
        load(tmp_path, "mistaken", BINDING.replace("return result", "return reslut"), KERNEL)
    assert str(raised.value).startswith(f"{tmp_path / 'mistaken.py'}:10: error: ‘reslut’ was not declared")


@pytest.mark.full
@pytest.mark.parametrize("of_kernels", [True, False])
def test_texts_with_pytorchs_headers_take_the_light_ones_parsed_beforehand(tmp_path, of_kernels):
    header = extension.light_kernel_header() if of_kernels else extension.light_binding_header()
    own = [*toolchain.kernel_flags("check", False), *extension.HALF_FLAGS] if of_kernels else ["-DLIGHT_PYBIND"]
    own = own if of_kernels else [*own, *extension.BINDING_FLAGS]
    text = tmp_path / "text.cpp"
    text.write_text("#include <torch/types.h>\nstatic at::Tensor tensor;\n")
    command = [*toolchain.compiler()[0], *extension.LIGHT, *own, *toolchain.torch_flags()[0], "-include", str(header), "-H"]
    run = subprocess.run([*command, "-DTORCH_EXTENSION_NAME=any", "-fsyntax-only", str(text)], capture_output=True, text=True)
    assert run.returncode == 0 and f"! {header}.gch" in run.stderr, run.stderr


@pytest.mark.full
@pytest.mark.parametrize("right, wrong", [("m = partial", "m = mm; m = partial"), ("softmax_kernel<<<", "softmx_kernel<<<")])
def test_a_typo_is_not_compiled_with_all_of_pytorchs_headers(tmp_path, monkeypatch, right, wrong):
    """`mm` is the name of an operator, too."""
    commands, run_compiler = [], toolchain.run_compiler
    monkeypatch.setattr(
        toolchain, "run_compiler", lambda command, explain=None: (commands.append(command), run_compiler(command, explain))
    )
    text = (Path(__file__).parents[2] / "examples" / "softmax_new.py").read_text()
    file = tmp_path / "mistaken.py"
    file.write_text(text.replace(right, wrong, 1))
    cuda = file.read_text().split('"""')[4 - 1]
    with pytest.raises(EmulatorError, match=r"mistaken.py:\d+: error: ‘(mm|softmx_kernel)’ was not declared"):
        Builder(mode="check", debug=False, source_file=str(file)).load_inline(
            "mistaken", "torch::Tensor softmax(torch::Tensor x);", cuda, functions=["softmax"]
        )
    sources = [command for command in commands if any(part.endswith(".cpp") and "objects" in part for part in command)]
    assert sources and all(any(part.startswith(extension.LIGHT[0]) for part in command) for command in sources)


@pytest.mark.parametrize(
    "more, shared",
    [
        ("", True),
        ("TORCH_LIBRARY_FRAGMENT( TORCH_EXTENSION_NAME, m) {}", True),
        ("TORCH_LIBRARY_IMPL(aten, CPU, m) {}", True),
        ("PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}", False),
        ("static const std::string LIBRARY = C10_STRINGIZE(TORCH_EXTENSION_NAME);", True),
        ('const char* name = C10_STRINGIZE(TORCH_EXTENSION_NAME) "::answer";', False),
    ],
)
def test_which_bindings_are_the_same_under_any_name(more, shared):
    assert is_the_same_under_any_name(BINDING + more) is shared


def test_what_is_said_of_pytorch_without_importing_it():
    flags, _ = toolchain.torch_flags()
    assert toolchain.torch_version().__version__ == torch.__version__ == toolchain.torch_identity()[0]
    assert {f"-isystem{path}" for path in cpp_extension.include_paths()} <= set(flags)
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}" in flags
