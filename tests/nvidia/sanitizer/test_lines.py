"""nvcc is told the variant's own lines."""

import shutil
import subprocess
from pathlib import Path

import pytest

from playground.machine.ptxas import find_nvcc
from playground.nvidia.sanitizer import lines

VARIANT = '''"""A variant."""

DEVICE = r"""
__device__ float twice(float x) { return 2 * x; }
"""

CUDA = DEVICE + r"""
__global__ void kernel(float* p) {
    __shared__ float s[32];
    s[threadIdx.x] = twice(*p);
    __syncthreads();
    p[threadIdx.x] = s[31 - threadIdx.x];
}
"""
'''


@pytest.fixture
def variant(tmp_path):
    path = tmp_path / "variant.py"
    path.write_text(VARIANT)
    return path


@pytest.fixture
def given():
    """What the real load_inline would get, call by call."""
    return []


@pytest.fixture
def load_inline(given, variant):
    def load_inline(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=None, is_python_module=True):
        given.append({"name": name, "cuda": cuda_sources, "flags": extra_cuda_cflags})
        return "library"

    return lines.numbered(load_inline, str(variant))


def text_of(variant):
    return {} if exec(variant.read_text(), found := {}) else "#define N 1\n" + found["CUDA"]


def test_each_line_is_that_of_the_file(load_inline, given, variant):
    flags = ["-O3"]
    assert load_inline("x", "", text_of(variant), extra_cuda_cflags=flags) == "library"
    assert given[0]["flags"] == ["-O3", "-lineinfo"] and flags == ["-O3"]
    numbers, number, file = {}, 0, None
    for line in given[0]["cuda"][0].split("\n"):
        if line.startswith("#line"):
            number, file = int(line.split()[1]) - 1, line.split()[2].strip('"')
        elif line.strip():
            numbers[line] = number, file
        number += 1
    of_file = {line: number for number, line in enumerate(VARIANT.split("\n"), 1)}
    for line in ("__device__ float twice(float x) { return 2 * x; }", "    __syncthreads();", "}"):
        assert numbers[line] == (of_file[line], str(variant))


@pytest.mark.parametrize("flags", [["-lineinfo"], ["-G", "-O0"]])
def test_flags_that_keep_lines_are_left_alone(load_inline, given, flags):
    load_inline("x", "", ["a", "b"], flags)
    assert given[0]["flags"] == flags


def test_without_cuda_nothing_changes(load_inline, given):
    load_inline("x", "int a;")
    assert given[0]["cuda"] is None


def test_files_of_their_own_keep_their_lines():
    given = []
    load = lines.numbered(
        lambda name, sources, extra_cuda_cflags=None: given.append((sources, extra_cuda_cflags)), "variant.py"
    )
    load("x", ["a.cu"])
    assert given == [(["a.cu"], ["-lineinfo"])]


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc, which CUDA's compiler packages have")
def test_nvcc_keeps_them(load_inline, given, variant, tmp_path):
    load_inline("x", "", text_of(variant))
    (tmp_path / "x.cu").write_text(given[0]["cuda"][0])
    nvcc = shutil.which(find_nvcc()) or find_nvcc()
    subprocess.run([nvcc, "-ptx", *given[0]["flags"], "x.cu", "-o", "x.ptx"], cwd=tmp_path, check=True, timeout=120)
    ptx = Path(tmp_path / "x.ptx").read_text()
    before_the_barrier = ptx[: ptx.index("bar.sync")].rsplit(".loc", 1)[1].split()
    file, line = before_the_barrier[:2]
    assert f'.file\t{file} "{variant}"' in ptx
    assert VARIANT.split("\n")[int(line) - 1].strip() == "__syncthreads();"
