"""What runs under a tool, here without one and on the CPU: the passes it makes, and what it says of the variant."""

import json
import os
import signal

import pytest
import torch
from torch.utils import cpp_extension

from playground import tensors
from playground.nvidia.sanitizer import target

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
    """run(body, gradients=True) -> (reply, calls of the real load_inline)."""
    calls = []

    def load_inline(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=None):
        calls.append((cuda_sources, extra_cuda_cflags, os.environ["TORCH_EXTENSIONS_DIR"]))
        return {}

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    monkeypatch.setattr(cpp_extension, "load", cpp_extension.load)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))

    def run(body="", gradients=True):
        variant = write_variant("variant", VARIANT.format(body=body))
        probe = {"inputs": [torch.randn(3, 8)], "upstream": [torch.randn(3, 4)] if gradients else None, "wanted_inputs": [0]}
        tensors.save(probe, tmp_path / "inputs")
        load = {"problem": str(tiny_problem), "variant": str(variant.path), "settings": {}, "place": "cpu", "weights": None}
        request = {"load": load | {"seed": 1}, "inputs": str(tmp_path / "inputs"), "tool": None, "limit": 60}
        (tmp_path / "request").write_text(json.dumps(request))
        try:
            target.main(tmp_path / "request", tmp_path / "reply")
        finally:
            signal.alarm(0)
        return json.loads((tmp_path / "reply").read_text()), calls

    return run


def test_a_variant_that_trains(run):
    reply, _ = run()
    assert reply["passes"] == ["forward", "backward"]
    assert (reply["kernels"], reply["refused"], reply["error"]) == (["planted"], None, None)


def test_a_variant_without_a_backward(run):
    reply, _ = run("if torch.is_grad_enabled(): raise NotImplementedError('forward only')")
    assert (reply["passes"], reply["refused"], reply["error"]) == (["forward"], None, None)


def test_a_model_without_gradients(run):
    assert run(gradients=False)[0]["passes"] == ["forward"]


def test_a_variant_that_takes_no_such_inputs(run):
    reply, _ = run("raise ValueError('five rows only')")
    assert (reply["passes"], reply["refused"], reply["error"]) == ([], "ValueError: five rows only", None)


def test_a_backward_that_fails(run):
    reply, _ = run("if torch.is_grad_enabled(): raise RuntimeError('CUDA error: unspecified launch failure')")
    assert reply["passes"] == ["forward"] and reply["error"] == "RuntimeError: CUDA error: unspecified launch failure"


def test_what_it_builds_has_lines_and_a_folder_of_its_own(run, tmp_path):
    build = 'cpp_extension.load_inline("x", "", CUDA + "__global__ void second() {}")'
    reply, calls = run(f"self.built = getattr(self, 'built', None) or {build}")
    (text,), flags, folder = calls[0]
    assert flags == ["-lineinfo"] and folder == str(tmp_path / "ext" / "with_lines")
    assert '#line 7 "' in text and "variant.py" in text
    assert reply["kernels"] == ["planted", "second"]


def test_a_file_that_does_not_load(run):
    reply, _ = run("return x +")
    assert reply["error"].startswith("SyntaxError") or "SyntaxError" in reply["error"]
    assert reply["kernels"] == []
