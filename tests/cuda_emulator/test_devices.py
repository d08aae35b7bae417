"""A file that names the device "cuda" finds the emulated GPU there: the CPU's memory, one stream, properties."""

import os
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from cuda_emulator import devices
from cuda_emulator.errors import EmulatorError
from playground import tensors
from playground.judge import probes
from playground.worker import WorkerFailure, WorkerProcess
from tests.kernels import apart


class NamesCuda(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).cuda()
        self.scale = torch.full((2,), 2.0, device="cuda")

    def forward(self, x):
        if x.device.type != "cuda" or not x.is_cuda:
            raise ValueError("on a GPU only")
        zeros = torch.zeros(2, device=x.device)
        return (
            zeros + self.linear(x.cuda()) * self.scale.to(torch.device("cuda", 0)) + torch.ones(2, device=torch.device("cuda"))
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a real device here")
def test_without_it_there_is_no_such_device():
    with pytest.raises((AssertionError, RuntimeError)):
        NamesCuda()


def test_a_model_that_names_it_is_made_and_runs():
    model = devices.emulated(NamesCuda)()
    x = torch.rand(4, 3)
    result = devices.emulated(model)(x)
    assert result.device.type == "cpu" and {value.device.type for value in model.parameters()} == {"cpu"}
    torch.testing.assert_close(result, model.linear(x) * 2 + 1)


def test_nothing_of_it_stays_behind():
    before = torch.nn.Module.cuda, torch.cuda.synchronize, torch.cuda.Event
    with pytest.raises(ZeroDivisionError):
        devices.emulated(lambda: 1 / 0)()
    assert (torch.nn.Module.cuda, torch.cuda.synchronize, torch.cuda.Event) == before
    assert not torch.rand(2).is_cuda


def test_what_a_file_replaces_meanwhile_is_not_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)  # and put back
    devices.emulated(lambda: setattr(torch.cuda, "synchronize", print))()
    assert torch.cuda.synchronize is print


@devices.emulated
def doubled_on_a_stream(x):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start.record()
    with torch.cuda.device(x.device), torch.cuda.stream(stream):
        y = 2 * x.pin_memory().cuda(non_blocking=True)
        y.record_stream(stream)
        end.record(stream)
    torch.cuda.current_stream().wait_event(end)
    torch.cuda.synchronize(x.device)
    assert 0 <= start.elapsed_time(end) < 60_000
    assert stream.cuda_stream == 0, "what host code is given"
    return y


def test_streams_and_events():
    x = torch.rand(3)
    assert torch.equal(doubled_on_a_stream(x), 2 * x)


def test_the_device_s_properties_are_those_that_host_code_sees():
    header = (Path(devices.__file__).parent / "include" / "emulator" / "host_device.h").read_text()
    found = devices.emulated(lambda: torch.cuda.get_device_properties("cuda:0"))()
    assert devices.emulated(lambda: torch.cuda.get_device_capability())() == (found.major, found.minor)
    in_header = {
        "total_memory": "totalGlobalMem",
        "multi_processor_count": "multiProcessorCount",
        "max_threads_per_multi_processor": "maxThreadsPerMultiProcessor",
        "regs_per_multiprocessor": "regsPerMultiprocessor",
        "shared_memory_per_block": "sharedMemPerBlock",
        "shared_memory_per_block_optin": "sharedMemPerBlockOptin",
        "shared_memory_per_multiprocessor": "sharedMemPerMultiprocessor",
        "L2_cache_size": "l2CacheSize",
        "major": "major",
        "minor": "minor",
    }
    for name, theirs in in_header.items():
        text = re.search(rf"\b{theirs} = (?:\(size_t\))?([^,;]+)", header)[1]
        assert getattr(found, name) == eval(text), name


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: torch.cuda.CUDAGraph(), "torch.cuda.CUDAGraph is not emulated"),
        (lambda: torch.cuda.graph(None), "torch.cuda.graph is not emulated"),
        (lambda: torch.cuda.get_device_properties(1), "there is no number 1"),
        (lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()), "enable_timing=True"),
    ],
)
def test_what_is_not_emulated_says_so(call, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        devices.emulated(call)()


AT_LOADING = """
import torch
import torch.nn as nn

TWO = torch.full((1,), 2.0, device="cuda")


class ModelNew(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.one = torch.ones(1).cuda()

    def forward(self, x):
        return x.cuda() * TWO + self.one
"""


IN_BOTH_PASSES = """
import torch
import torch.nn as nn


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.cuda.synchronize()
        return 2 * x

    @staticmethod
    def backward(ctx, upstream):
        with torch.cuda.stream(torch.cuda.Stream()):
            return 2 * upstream


class ModelNew(nn.Module):
    def __init__(self, *args):
        super().__init__()

    def forward(self, x):
        return Double.apply(x)
"""


@pytest.fixture(scope="module")
def worker():
    with WorkerProcess("candidate", 120) as process:
        yield process


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a real device here")
def test_streams_in_a_backward_pass(worker, tiny_problem, write_variant, tmp_path):
    original = {"problem": str(tiny_problem), "settings": {}, "place": "emulator", "weights": None, "seed": 0}
    x, upstream = torch.rand(2, 3), torch.rand(2, 3)
    probe = probes.Probe("scaled", [x], [upstream], (0,))
    tensors.save(vars(probe), tmp_path / "inputs")
    worker.ask("load", **original, variant=str(write_variant("in_both_passes", IN_BOTH_PASSES).path))
    worker.ask("build", seed=0)
    files = {"inputs": str(tmp_path / "inputs"), "outputs": str(tmp_path / "outputs")}
    assert not any(vars(worker.ask("differentiate", **files)).values())
    results = tensors.load_results(tmp_path / "outputs", 1 << 20)
    assert torch.equal(results.outputs[0], 2 * x) and torch.equal(results.gradients["input0"], 2 * upstream)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a real device here")
def test_a_file_under_the_emulator_may_put_tensors_there_as_it_is_loaded(worker, tiny_problem, write_variant):
    original = {"problem": str(tiny_problem), "settings": {}, "place": "emulator", "weights": None, "seed": 0}
    variant = write_variant("at_loading", AT_LOADING)
    worker.ask("load", **original, variant=str(variant.path))
    worker.ask("build", seed=0)
    with WorkerProcess("candidate", 120) as another, pytest.raises(WorkerFailure, match="CUDA"):
        another.ask("load", **original | {"place": "cpu"}, variant=str(variant.path))


WITH_A_FALLBACK = """
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

KERNEL = '''
#include <torch/extension.h>
__global__ void twice(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2 * x[i];
}
at::Tensor run(at::Tensor x) {
    at::Tensor y = at::empty_like(x);
    twice<<<(x.numel() + 31) / 32, 32>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
    return y;
}
'''


class ModelNew(nn.Module):
    def __init__(self, *args):
        super().__init__()

    def forward(self, x):
        if not (torch.cuda.is_available() and x.device.type == "cuda"):
            return 2 * x
        return load_inline("twice", "at::Tensor run(at::Tensor x);", KERNEL, functions=["run"]).run(x.contiguous())
"""


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a real device here")
def test_a_file_that_goes_on_without_its_kernel_where_there_is_no_gpu_runs_it(tiny_problem, write_variant):
    original = {"problem": str(tiny_problem), "settings": {}, "place": "emulator", "weights": None, "seed": 0}
    with WorkerProcess("candidate", 120) as worker:
        worker.ask("load", **original, variant=str(write_variant("with_a_fallback", WITH_A_FALLBACK).path))
        assert worker.ask("build", seed=0).built


INSTALLED = """
import sys
from types import ModuleType
from torch.utils import cpp_extension
import cuda_emulator as emulator

original = cpp_extension.load_inline
sys.modules["imported_it"] = other = ModuleType("imported_it")
other.load_inline = original
load = cpp_extension.load
emulator.install()
assert cpp_extension.load_inline is other.load_inline is not original
try:
    cpp_extension.load("of_files", ["a.cpp", "b.cu"])
except emulator.EmulatorError as error:
    assert str(error) == "a.cpp: No such file or directory"
cpp_extension.load_inline = lambda *given: None  # somebody wraps it
emulator.uninstall()
assert cpp_extension.load_inline is other.load_inline is original and cpp_extension.load is load
"""


def test_uninstalling_puts_load_inline_back_wherever_it_was_imported():
    apart.run(INSTALLED)


ASKS = """
import torch

found = {
    "available": torch.cuda.is_available(), "count": torch.cuda.device_count(), "version": torch.version.cuda,
    "capability": torch.cuda.get_device_capability(), "built": torch.backends.cuda.is_built(),
    "memory": torch.cuda.get_device_properties(0).total_memory,
}
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a real device here")
def test_a_file_that_asks_for_a_gpu_is_told_of_one_and_nobody_else():
    before = torch.cuda.is_available, torch.version.cuda, type(torch.version)
    answers, told = devices.Answers("judged.py"), {}
    answers.begin()
    try:
        exec(compile(ASKS, "judged.py", "exec"), told)
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0 and torch.version.cuda == before[1]
        torch.Generator().manual_seed(1)  # torch's own code, which asks, too
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))[0] == 2
    finally:
        answers.end()
    assert told["found"] == {
        **{"available": True, "count": 1, "version": devices.VERSION, "capability": (9, 0), "built": True},
        "memory": devices.PROPERTIES.total_memory,
    }
    assert (torch.cuda.is_available, torch.version.cuda, type(torch.version)) == before


@pytest.mark.parametrize(
    "command, is_refused",
    [
        ("subprocess.run(['/usr/local/cuda/bin/nvcc', '-shared', 'k.cu'])", True),
        ("subprocess.check_output('nvcc -o k k.cu', shell=True)", True),
        ("os.system('nvcc k.cu')", True),
        ("subprocess.run([sys.executable, '--version'], check=True)", False),
        ("subprocess.run('nvcc --version', shell=True)", False),
    ],
)
def test_a_file_that_calls_nvcc_itself_is_told_what_to_do(command, is_refused):
    before = os.system, subprocess.Popen.__init__
    answers = devices.Answers("judged.py")
    answers.begin()
    try:
        code = compile(f"import os, subprocess, sys\n{command}", "judged.py", "exec")
        with pytest.raises(EmulatorError, match="calls nvcc itself") if is_refused else nullcontext():
            exec(code, {})
    finally:
        answers.end()
    assert (os.system, subprocess.Popen.__init__) == before
