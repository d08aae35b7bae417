"""What is said of an exception. What else a variant may do in its process: tests/command/test_bad_input.py, test_process.py."""

import runpy
import subprocess

import pytest
import torch

from playground.machine import ptxas
from playground.worker.failures import describe


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_file_that_asks_for_a_gpu_where_there_is_none():
    with pytest.raises((AssertionError, RuntimeError)) as failed:
        torch.zeros(1, device="cuda")
    assert describe(failed.value)[0].endswith("there is none here: leave the device out, or run it where there is one")


@pytest.mark.skipif(not ptxas.find_nvcc(), reason="needs nvcc")
def test_nvccs_first_error_names_the_users_line(tmp_path):
    cuda = "\n__global__ void k(float* p) {\n    p[threadIdx.x] = 1;\n    __synchthreads();\n}\n"
    user, compiled = tmp_path / "user.py", tmp_path / "cuda.cu"
    user.write_text(f'CUDA = """{cuda}"""\n\n\ndef build(output):\n    raise RuntimeError(output)\n')
    compiled.write_text(cuda)
    done = subprocess.run([ptxas.find_nvcc(), "-c", compiled, "-o", tmp_path / "cuda.o"], capture_output=True, text=True)
    with pytest.raises(RuntimeError) as failed:
        runpy.run_path(str(user))["build"](f"Error building extension 'x': [1/2] nvcc\n{done.stderr}{done.stdout}")
    reason, details = describe(failed.value)
    assert reason == f'does not compile: {user}:4: error: identifier "__synchthreads" is undefined'
    assert details.splitlines()[0] == "    4 |     __synchthreads();"


USER = '''CPP = "torch::Tensor norm(torch::Tensor x, float eps);"
CUDA = """
torch::Tensor norm(torch::Tensor x, double eps) { return x; }
"""


def build(output):
    raise RuntimeError(output)
'''
COMMAND = "Error building extension 'fused': [1/2] /usr/bin/g++ -MMD -MF main.o.d -c main.cpp -o main.o"


@pytest.mark.parametrize(
    "output, told",
    [
        (
            "main.cpp:(.text+0x1f): undefined reference to `norm(at::Tensor, float)'\ncollect2: error: ld returned 1",
            "{user}:1: norm(torch::Tensor x, float eps) is declared here, and defined in line 3 as "
            "norm(torch::Tensor x, double eps)",
        ),
        (
            "/usr/bin/ld: cannot find -lnone: No such file\ncollect2: error: ld returned 1",
            "/usr/bin/ld: cannot find -lnone: No such file",
        ),
        (
            "FAILED: main.o \n/usr/bin/c++ -c main.cpp\nKilled signal terminated program cc1plus",
            "Killed signal terminated program cc1plus",
        ),
    ],
)
def test_a_build_s_reason_is_no_command(tmp_path, output, told):
    user = tmp_path / "user.py"
    user.write_text(USER)
    with pytest.raises(RuntimeError) as failed:
        runpy.run_path(str(user))["build"](f"{COMMAND}\n{output}")
    assert describe(failed.value)[0] == "does not compile: " + told.format(user=user)
