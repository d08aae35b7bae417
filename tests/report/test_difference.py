"""compare.py --diff V1 V2: files taken apart by sections and functions, and what is said of each."""

import re

import pytest
from drawn import printed

from playground import catalog
from playground.report import difference
from tests.kernels.project_variants import variants

OLD = '''"""m, v1: one.

Why it is slow
    It is.
"""

import torch

CUDA = r"""
#include <cstdint>

struct Part { int a; };

// Doubles.
template <int N>
__global__ void __launch_bounds__(THREADS) twice(const float* x, float* out) {
    const char* brace = "}";  // { in a comment

    out[0] = 2 * x[0];
}

__global__ void gone(float* out) { out[0] = 0; }

namespace inner {
int kept(int a) {
    return a;
}

int changed(int a) { return a; }
}
"""


def register(namespace):
    return 1


class ModelNew(torch.nn.Module):
    pass
'''
NEW = (
    OLD.replace("v1: one", "v2: two")
    .replace("2 * x[0]", "x[0] + x[0]")
    .replace("__global__ void gone(float* out) { out[0] = 0; }", "__global__ void fresh(float* out) { out[0] = 1; }")
    .replace("int changed(int a) { return a; }", "int changed(int a) { return -a; }")
    .replace("return 1", "return 2")
)


@pytest.fixture
def pair(write_variant):
    return write_variant("v1_old", OLD), write_variant("v2_new", NEW)


def shown(old, new, width=80):
    return printed(lambda console: difference.show(old, new, console), width)


def test_what_changed(pair):
    text = shown(*pair)
    words = {
        "title": "changed",
        "twice": "changed",
        "fresh": "new",
        "changed": "changed",
        "gone": "removed",
        "register": "changed",
    }
    assert dict(re.findall(r"^(?:docstring|CUDA text|Python): (\w+), (\w+)$", text, re.MULTILINE)) == words
    assert re.search(r"same +\(rest\), struct Part, kept\n", text) and re.search(r"same +\(rest\), ModelNew\n", text)


def test_lines_have_the_numbers_of_their_files(pair):
    text = shown(*pair)
    number = NEW.splitlines().index("    out[0] = x[0] + x[0];") + 1
    (hunk,) = re.findall(r"CUDA text: twice, changed\n@@ -(\d+),(\d+) \+(\d+),(\d+) @@\n((?:[ +-].*\n)+)", text)
    first, lines = int(hunk[2]), hunk[4].splitlines()
    new_side = [line for line in lines if not line.startswith("-")]
    assert "-    out[0] = 2 * x[0];" in lines and "+    out[0] = x[0] + x[0];" in lines
    assert new_side[number - first] == "+    out[0] = x[0] + x[0];"
    assert "+__global__ void fresh(float* out) { out[0] = 1; }" in text
    assert "-__global__ void gone(float* out) { out[0] = 0; }" in text


def test_the_overview_names_kernels_and_counts_lines(pair):
    text = shown(*pair)
    assert "CUDA text: +3 -3 lines" in text
    assert re.search(r"new +fresh \(kernel\)\n", text) and re.search(r"removed +gone \(kernel\)\n", text)
    assert re.search(r"changed +twice \(kernel\), changed\n", text)


def test_code_is_neither_folded_nor_cut(write_variant):
    long = "x = '" + "long" * 60 + "'\n"
    text = shown(write_variant("a", "y = 1\n"), write_variant("b", long), 60)
    assert f"+{long}" in text


def test_a_file_and_itself(pair):
    assert shown(pair[0], pair[0]).endswith("docstring: the same\n\nPython: the same\n\nCUDA text: the same\n")


@pytest.mark.parametrize("model, variant", variants())
def test_every_variant(model, variant):
    """Every line that is not blank is in one piece, but for the quotes around a text, and every kernel is found."""
    sections = difference.sections(variant.path)
    numbers = sorted(number for section in sections.values() for piece in section.values() for number, _ in piece)
    lines = variant.path.read_text().splitlines()
    filled = [k for k, line in enumerate(lines, start=1) if line.strip() and not re.fullmatch(r'(\w+ = r)?"""', line)]
    assert len(numbers) == len(set(numbers))
    assert set(filled) <= set(numbers)
    kernels = set(re.findall(r"__global__[^;{]*?\b(\w+)\(const", variant.path.read_text()))
    named = {name for section in sections.values() for name in section}
    assert kernels <= named | {"__launch_bounds__"}, kernels - named


def test_what_is_no_python(write_variant, pair):
    with pytest.raises(catalog.CatalogError, match="is not Python"):
        difference.sections(write_variant("broken", "def (:\n").path)


def test_a_text_ends_at_its_closing_quotes(tmp_path):
    """Wherever in a line they stand: Python that changed is no CUDA text."""
    text = 'source = """\n__global__ void k(float* x) {\n}"""\n\n\ndef build():\n    return 1\n'
    (tmp_path / "m.py").write_text(text)
    found = difference.sections(tmp_path / "m.py")
    assert [number for number, _ in found["Python"]["build"]] == [6, 7]
    assert "build" not in found["CUDA text"] and "k" in found["CUDA text"]
