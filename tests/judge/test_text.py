"""What the text of a file says, before anything of it runs."""

import pytest

from playground.judge.text import Builds

USUAL = """
from torch import nn
from torch.utils.cpp_extension import load_inline
NAME, CPP = "n", "void f();"
CPU = "void f();"
CUDA = "void g() {}" + "void f() {}"
module = load_inline(name="n", cpp_sources=[CPU], cuda_sources=CUDA, functions=["f"])
class ModelNew(nn.Module):
    pass
"""
CALL = {"name": "n", "cpp_sources": ["void f();"], "cuda_sources": "void g() {}void f() {}", "functions": ["f"]}
AS_ATTRIBUTE = USUAL.replace("from torch.utils.cpp_extension import load_inline", "from torch.utils import cpp_extension")
AS_ATTRIBUTE = AS_ATTRIBUTE.replace("= load_inline", "= cpp_extension.load_inline")


@pytest.mark.parametrize("text", [USUAL, AS_ATTRIBUTE, USUAL.replace("name=", "").replace("cpp_sources=", "")])
def test_a_file_that_builds_constants_as_it_is_loaded(text):
    found = Builds(text.encode())
    assert found.calls == [CALL] and found.fails_with_them


@pytest.mark.parametrize(
    "old, new",
    [
        ("module = ", "if True:\n    module = "),
        ("module = ", "def build():\n    return "),
        ("module = ", "with open('x') as file:\n    module = "),
        ("module = ", "def load_inline(**given): pass\nmodule = "),
        ("module = ", "import other\nload_inline = other.f\nmodule = "),
        ("module = ", "exec('load_inline = print')\nmodule = "),
        ("torch.utils.cpp_extension import", "mine import"),
        ("class ModelNew", "class Other"),
    ],
)
def test_one_that_may_be_loaded_all_the_same(old, new):
    text = USUAL.replace(old, new)
    assert text != USUAL and not Builds(text.encode()).fails_with_them


@pytest.mark.parametrize(
    "old, new",
    [
        ('CUDA = "', 'CUDA = other() + "'),
        ("module = ", "CUDA = CUDA.upper()\nmodule = "),
        ("module = ", "CUDA += CPU\nmodule = "),
        ("module = ", "for CUDA in []: pass\nmodule = "),
        ('functions=["f"]', "**more"),
        ('functions=["f"]', "functions=names()"),
        ('name="n"', 'name=f"n{1}"'),
    ],
)
def test_one_whose_text_is_made_at_run_time(old, new):
    found = Builds(USUAL.replace(old, new).encode())
    assert not found.calls and not found.fails_with_them
