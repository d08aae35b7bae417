"""Solutions in KernelBench's usual style run as they are under check mode; broken copies of them are named for what they are.

Each runs in a process of its own: a module of one name is loaded once in a process.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STRANGERS = sorted((Path(__file__).parent / "strangers").glob("*.py"))
ROOT = Path(__file__).parents[2]

RUN = """
import importlib.util, sys
import torch
import cuda_emulator as emulator

with emulator.install(mode="check", time_limit=120):
    spec = importlib.util.spec_from_file_location("stranger", sys.argv[1])
    stranger = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stranger)
    torch.manual_seed(0)
    inputs = stranger.get_inputs()
    with torch.no_grad():
        torch.testing.assert_close(stranger.ModelNew()(*inputs), stranger.reference(*inputs), rtol=1e-4, atol=1e-5)
    assert emulator.launches()
"""


def run(path):
    return subprocess.run([sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.full
@pytest.mark.parametrize("path", STRANGERS, ids=lambda path: path.stem)
def test_right(path):
    result = run(path)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("path", STRANGERS, ids=lambda path: path.stem)
def test_broken(path, tmp_path):
    text = path.read_text()
    names = {}
    exec(text[text.index("BROKEN = ") :], names)
    old, new, kind = names["BROKEN"]
    code = text[: text.index("BROKEN = ")]
    assert code.count(old) == 1
    broken = tmp_path / path.name
    broken.write_text(code.replace(old, new))
    result = run(broken)
    last = result.stderr.strip().splitlines()[-1]
    assert f"{broken}:" in last and kind in last, result.stderr[-3000:]


PRINTS = '''
import torch
from torch.utils.cpp_extension import load_inline

CUDA = """
__global__ void twice(const float* x, float* out, int* last, int n) {
    const int i = threadIdx.x;
    if (i == 0) printf("n is %d\\\\n", n);
    *last = n;  // emulator: benign race
    if (i < n) out[i] = 2 * x[i];
}
at::Tensor twice(at::Tensor x) {
    at::Tensor out = at::empty_like(x), last = at::zeros({1}, x.options().dtype(at::kInt));
    twice<<<1, 64>>>(x.data_ptr<float>(), out.data_ptr<float>(), last.data_ptr<int>(), x.numel());
    return out;
}
"""
module = load_inline("prints", "at::Tensor twice(at::Tensor x);", CUDA, functions=["twice"])

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return module.twice(x)
'''
PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + x

def get_inputs():
    return [torch.rand(n)]

def get_init_inputs():
    return []

n = 40
"""


@pytest.mark.full
def test_what_a_kernel_prints_and_which_races_it_accepts_are_in_the_result(tmp_path):
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "prints.py").write_text(PRINTS)
    command = [sys.executable, "compare.py", "--model", tmp_path / "problem.py", "--variant", tmp_path / "prints.py"]
    done = subprocess.run([*command, "--device", "emulator", "--json", "-"], capture_output=True, text=True, cwd=ROOT)
    (result,) = json.loads(done.stdout)["results"]
    assert "n is 40\n" in result["printed"], result["reason"]
    line = 1 + PRINTS.splitlines().index("    *last = n;  // emulator: benign race")
    assert list(result["accepted_races"]) == [str(line)] and result["accepted_races"][str(line)] > 0
