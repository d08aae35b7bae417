"""The process that a tool watches, here on the CPU: the passes it makes, its reply, and the lines that nvcc is told."""

import json
import os
import shutil
import signal
import subprocess

import pytest
import torch
from torch.utils import cpp_extension

from playground import tensors
from playground.machine.ptxas import find_nvcc
from playground.nvidia import target

VARIANT = """
import torch
import torch.nn as nn
from torch.utils import cpp_extension

CUDA = '''
__global__ void planted(float* p) {{ }}
'''

class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x):
        {body}
        return torch.tanh(self.linear(x))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, tiny_problem, write_variant):
    """run(body, gradients=True, place="cpu", tool=None) -> (reply, calls of the real load_inline)."""
    calls = []

    def load_inline(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=None):
        calls.append((cuda_sources, extra_cuda_cflags, os.environ["TORCH_EXTENSIONS_DIR"]))
        return {}

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(cpp_extension, "load", cpp_extension.load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))

    def run(body="", gradients=True, place="cpu", tool=None):
        variant = write_variant("variant", VARIANT.format(body=body))
        content = {"inputs": [torch.randn(3, 8)], "upstream": [torch.randn(3, 4)] if gradients else None, "wanted_inputs": [0]}
        tensors.save(content, tmp_path / "inputs")
        load = {"problem": str(tiny_problem), "variant": str(variant.path), "settings": {}, "place": place, "weights": None}
        request = {"load": load | {"seed": 1}, "inputs": str(tmp_path / "inputs"), "tool": tool, "limit": 60}
        (tmp_path / "request").write_text(json.dumps(request))
        try:
            error = target.main(tmp_path / "request", tmp_path / "reply")
        finally:
            signal.alarm(0)
        reply = json.loads((tmp_path / "reply").read_text())
        assert error == reply["error"]
        return reply, calls

    return run


BOTH, NO_GRADIENT = ["forward", "backward"], "if torch.is_grad_enabled(): raise "
FAILS = "RuntimeError: CUDA error: unspecified launch failure"


@pytest.mark.parametrize(
    "body, gradients, passes, refused, error",
    [
        ("", True, BOTH, None, None),
        (f"{NO_GRADIENT}NotImplementedError('forward only')", True, ["forward"], None, None),
        ("", False, ["forward"], None, None),  # a model without gradients
        ("raise ValueError('five rows only')", True, [], "ValueError: five rows only", None),
        (f"{NO_GRADIENT}RuntimeError('{FAILS.partition(': ')[2]}')", True, ["forward"], None, FAILS),
    ],
)
def test_which_passes_run_and_what_is_refused(run, body, gradients, passes, refused, error):
    assert run(body, gradients)[0] == {"kernels": [], "passes": passes, "refused": refused, "error": error}


def test_what_it_builds_has_lines_and_a_folder_of_its_own(run, tmp_path):
    build = 'cpp_extension.load_inline("x", "", CUDA + "__global__ void second() {}")'
    reply, calls = run(f"self.built = getattr(self, 'built', None) or {build}")
    (text,), flags, folder = calls[0]
    assert flags == ["-lineinfo"] and folder == str(tmp_path / "ext" / "with_lines")
    assert '#line 7 "' in text and "variant.py" in text
    assert reply["kernels"] == ["planted", "second"]


@pytest.mark.parametrize("body", ["", "raise RuntimeError('CUDA error')"])
def test_the_control_mistake_is_made_after_the_variant_whatever_that_does(run, monkeypatch, body):
    made = []
    monkeypatch.setattr(target.control, "build", lambda load_inline: made.append("built") or made.append)
    run(body, place="cuda")
    assert made == ["built"], "without a tool nothing is to be found"
    run(body, place="cuda", tool="racecheck")
    assert made == ["built", "built", "racecheck"]


def test_a_file_that_does_not_load(run):
    reply, _ = run("return x +")
    assert "SyntaxError" in reply["error"]
    assert reply["kernels"] == []


LINES = '''"""A variant."""

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
def file(tmp_path):
    path = tmp_path / "variant.py"
    path.write_text(LINES)
    return path


@pytest.fixture
def given():
    """What the real load_inline would get, call by call."""
    return []


@pytest.fixture
def load_inline(given, file):
    def load_inline(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=None, is_python_module=True):
        given.append({"name": name, "cuda": cuda_sources, "flags": extra_cuda_cflags})
        return "library"

    return target.numbered(load_inline, str(file))


def text_of(file):
    """What the file would give load_inline."""
    found = {}
    exec(file.read_text(), found)
    return "#define N 1\n" + found["CUDA"]


def test_each_line_is_that_of_the_file(load_inline, given, file):
    flags = ["-O3"]
    assert load_inline("x", "", text_of(file), extra_cuda_cflags=flags) == "library"
    assert given[0]["flags"] == ["-O3", "-lineinfo"] and flags == ["-O3"]
    numbers, number, named = {}, 0, None
    for line in given[0]["cuda"][0].split("\n"):
        if line.startswith("#line"):
            number, named = int(line.split()[1]) - 1, line.split()[2].strip('"')
        elif line.strip():
            numbers[line] = number, named
        number += 1
    of_file = {line: number for number, line in enumerate(LINES.split("\n"), 1)}
    for line in ("__device__ float twice(float x) { return 2 * x; }", "    __syncthreads();", "}"):
        assert numbers[line] == (of_file[line], str(file))


@pytest.mark.parametrize("flags", [["-lineinfo"], ["-G", "-O0"]])
def test_flags_that_keep_lines_are_left_alone(load_inline, given, flags):
    load_inline("x", "", ["a", "b"], flags)
    assert given[0]["flags"] == flags


def test_files_of_their_own_keep_their_lines():
    given = []
    load = target.numbered(
        lambda name, sources, extra_cuda_cflags=None: given.append((sources, extra_cuda_cflags)), "variant.py"
    )
    load("x", ["a.cu"])
    assert given == [(["a.cu"], ["-lineinfo"])]


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc, which CUDA's compiler packages have")
def test_nvcc_keeps_them(load_inline, given, file, tmp_path):
    load_inline("x", "", text_of(file))
    (tmp_path / "x.cu").write_text(given[0]["cuda"][0])
    nvcc = shutil.which(find_nvcc()) or find_nvcc()
    subprocess.run([nvcc, "-ptx", *given[0]["flags"], "x.cu", "-o", "x.ptx"], cwd=tmp_path, check=True, timeout=120)
    ptx = (tmp_path / "x.ptx").read_text()
    before_the_barrier = ptx[: ptx.index("bar.sync")].rsplit(".loc", 1)[1].split()
    number, line = before_the_barrier[:2]
    assert f'.file\t{number} "{file}"' in ptx
    assert LINES.split("\n")[int(line) - 1].strip() == "__syncthreads();"
