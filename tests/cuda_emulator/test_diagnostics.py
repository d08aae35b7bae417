"""The compiler's messages as the first error with its line in the author's file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_emulator.diagnostics import describe, errors_in, of_the_text

ROOT = Path(__file__).parents[2]
MESSAGES = """
In file included from /include/emulator/launch.h:5,
                 from v.py:3:
/include/emulator/launch.h: In instantiation of ‘void launch(T) [with T = int]’:
v.py:12:7:   required from here
/include/emulator/launch.h:50:9: error: no match for call to ‘(f) (int)’
v.py: In function ‘void g()’:
v.py:14:5: error: ‘sume’ was not declared in this scope; did you mean ‘sum’?
   14 |     sume = 1;
      |     ^~~~
/include/macros.h:2:20: error: ‘b’ was not declared in this scope
v.py:16:3: note: in expansion of macro ‘ADD’
"""


def test_errors_in_headers_lead_to_the_text():
    errors = errors_in(MESSAGES, lambda name: name == "v.py")
    assert [(error.line, error.column) for error in errors] == [(12, None), (14, 5), (16, None)]
    assert errors[1].names == ["sume", "sum"]


def test_the_first_line_is_the_file_s(tmp_path):
    file = tmp_path / "v.py"
    file.write_text("one\n\tx = sume;\n")
    errors = errors_in("t.cu:7:6: error: ‘sume’ was not declared in this scope\nt.cu:9:1: error: more\n", lambda name: True)
    told = describe(errors, lambda line: (file, line - 5), column_holds=lambda line: False)
    assert told.splitlines() == [
        f"{file}:2: error: ‘sume’ was not declared in this scope",
        "    2 | \tx = sume;",
        "      | \t    ^",
        "(and 1 more error)",
    ]


def test_undefined_functions_have_their_line():
    linker = "/usr/bin/ld: /tmp/0.o: in function `main':\nv.cu:12: undefined reference to `later(int)'\n"
    (error,) = errors_in(linker, lambda name: name == "v.cu")
    assert (error.line, error.text) == (12, "undefined reference to `later(int)'")


NAMES = {"empty_like", "zeros_like", "FLT_MAX", "optional", "nn", "std"}  # in PyTorch's headers


@pytest.mark.parametrize(
    "text, wants",
    [
        ("‘__syncthread’ was not declared in this scope; did you mean ‘empty_like’?", False),
        ("‘empty_like’ was not declared in this scope", True),  # the text calls it: its arguments' namespace may have it
        ("‘zeros_like’ was not declared in this scope", False),  # a variable's name, or a typo
        ("‘FLT_MAX’ was not declared in this scope", True),
        ("‘optional’ is not a member of ‘std’", True),
        ("‘opional’ is not a member of ‘std’", False),
        ("‘torch::nn’ has not been declared", True),
        ("‘class at::Tensor’ has no member named ‘empty_lik’; did you mean ‘empty_like’?", False),
        ("cannot convert ‘at::Tensor’ to ‘float*’", False),
        ("invalid use of incomplete type ‘class torch::nn::Module’", True),
        ("expected ‘;’ before ‘}’ token", False),
    ],
)
def test_what_full_headers_may_serve(text, wants):
    (error,) = errors_in(f"v.cu:1:1: error: {text}", lambda name: True)
    text = "void f(at::Tensor x) { TORCH_CHECK(true); empty_like(x); x = zeros_like; }"
    assert of_the_text([error], NAMES, text) == ([] if wants else [error])
    if "zeros_like" in error.text:
        assert not of_the_text([error], NAMES, f"using namespace at; {text}")


def test_an_unknown_macro_is_a_mistake_of_syntax():
    (error,) = errors_in("v.cu:1:1: error: expected constructor before ‘(’ token", lambda name: True)
    assert not of_the_text([error], NAMES, "TORCH_LIBRARY(name, m) {}")


def test_a_mistake_of_syntax_comes_first_where_a_macro_stands_elsewhere():
    messages = "v.cu:2:1: error: expected ‘;’ before ‘int’\nv.cu:3:9: error: ‘lane’ was not declared in this scope\n"
    text = "int row = 1\nint lane = 2;\nint x = lane;\n\nvoid f() { C10_CUDA_KERNEL_LAUNCH_CHECK(); }"
    errors = errors_in(messages, lambda name: True)
    assert of_the_text(errors, NAMES, text) == errors
    assert of_the_text(errors, NAMES, text.replace("\n\n", "\n").replace("row = 1", "row = TORCH_X(1)")) == errors[1:]


CELL = '''from torch.utils.cpp_extension import load_inline

import cuda_emulator as emulator

emulator.install()
CUDA = """
__global__ void twice(float* x) {
    x[threadIdx.x] *= 2;
    __syncthread();
}
at::Tensor twice(at::Tensor x) { return twice<<<1, 32>>>(x.data_ptr<float>()), x; }
"""
module = load_inline("cell", "at::Tensor twice(at::Tensor x);", CUDA, functions=["twice"])
'''
NOTEBOOK = """
import sys, traceback
from IPython.core.interactiveshell import InteractiveShell

InteractiveShell.instance().showtraceback = lambda *_, **__: None
error = InteractiveShell.instance().run_cell(sys.argv[1]).error_in_exec
print(error)
print(*(frame.filename for frame in traceback.extract_tb(error.__traceback__)), sep="\\n")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "right, wrong, line, told",
    [
        ("__syncthreads", "__syncthread", 9, "‘__syncthread’ was not declared in this scope; did you mean ‘__syncthreads’?"),
        ('"at::Tensor', '"at::Tensr', 13, "‘Tensr’ in namespace ‘at’ does not name a type; did you mean ‘Tensor’?"),
    ],
)
def test_a_notebook_s_error_has_the_cell_s_line_whichever_text_is_broken(right, wrong, line, told):
    """Although load_inline was imported before the emulator was installed; a single frame is the emulator's."""
    cell = CELL.replace("__syncthread()", "__syncthreads()").replace(right, wrong)
    shown = subprocess.run([sys.executable, "-c", NOTEBOOK, cell], capture_output=True, text=True, cwd=ROOT)
    lines = shown.stdout.splitlines()
    assert re.fullmatch(rf"<ipython-input-.*>:{line}: error: {re.escape(told)}", lines[0]), shown.stdout + shown.stderr
    assert lines[1].startswith(f"{line:5} | ")
    assert sum("/cuda_emulator/" in name for name in lines) == 1
