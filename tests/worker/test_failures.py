"""Whatever a variant does in its process is its own verdict, with one line of reason, and the others go on.

More of them are in tests/command/test_bad_input.py.
"""

import re
import runpy
import subprocess

import pytest
import torch

from playground import catalog
from playground.driver import timing
from playground.driver.runner import Options, Runner, Task
from playground.machine import ptxas
from playground.report.figures import TIMED
from playground.report.progress import Progress
from playground.worker.failures import describe

# name -> (forward's body, verdict, what the reason says)
FORWARDS = {
    "right": (
        "with open({seen!r}, 'a') as seen: print(os.environ.get('OMP_WAIT_POLICY'), file=seen)\n"
        "return torch.tanh(self.linear(x))",
        "pass",
        None,
    ),
    "crashes": ("ctypes.string_at(0)", "error", r"crashed \(SIGSEGV"),
    "hangs": ("time.sleep(1e6)", "error", "no answer within the time limit of 15 s"),
    "refuses_gradients": ("return Refuse.apply(torch.tanh(self.linear(x)))", "pass", None),
}
REFUSE = """
import ctypes, os, sys, time, torch
class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("forward only")
"""

FILES = {
    "does_not_compile": (
        """
        import torch
        from torch.utils.cpp_extension import load_inline
        class ModelNew(torch.nn.Module):
            def __init__(self, features, outputs):
                super().__init__()
                load_inline("does_not_compile", "int f() { return undeclared; }", functions=[], no_implicit_headers=True)
        """,
        "error",
        r"does not compile: .*does_not_compile\.py:\d+: error: .*undeclared",
    )
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Where the right one writes how the threads of OpenMP wait in its process."""
    return tmp_path_factory.mktemp("seen") / "policy"


@pytest.fixture(scope="module")
def results(tiny_problem, write_forward, write_variant, seen):
    """One run of all of them: {name: result}."""
    model = catalog.find_model(tiny_problem)
    variants = [write_forward(name, body.replace("{seen!r}", repr(str(seen)))) for name, (body, _, _) in FORWARDS.items()]
    for variant in variants:
        variant.path.write_text(REFUSE + variant.path.read_text())
    variants += [write_variant(name, text) for name, (text, _, _) in FILES.items()]
    tasks = [Task(model, variant, "cpu") for variant in variants]
    with Progress() as progress, pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_WAIT_POLICY")
        patch.setattr(timing.Stopwatch, "_floor", lambda *_: {"floor_ms": None, "floor_bound": None})
        patch.setattr(timing, "names_for", lambda *_: ["eager"])
        patch.setattr(timing, "judge", lambda *_, **__: None)  # of the control: this is about the variants
        done = Runner(Options(quick=True, time_limit=15), progress).run(tasks)
    return {result["variant"]: result for result in done}


@pytest.mark.parametrize("name", [*FORWARDS, *FILES])
def test_verdict_and_reason(results, name):
    _, verdict, reason = {**FORWARDS, **FILES}[name]
    result = results[name]
    assert result["verdict"] == verdict, result["reason"]
    if reason is None:
        assert result["reason"] is None
    else:
        assert "\n" not in result["reason"]
        assert re.search(reason, result["reason"]), result["reason"]


def test_only_what_is_right_is_timed(results):
    for result in results.values():
        assert (result["time_ms"] is not None) == (result["verdict"] in TIMED)


def test_a_variant_that_refuses_to_train_says_so(results):
    assert results["refuses_gradients"]["check"]["gradients"] == {"unsupported": "forward only"}
    probes = results["refuses_gradients"]["check"]["probes"].values()
    assert not any("forward only" in (entry["note"] or "") for entry in probes), "it is said once"
    assert results["right"]["check"]["gradients"].keys() == {"linear.weight", "linear.bias", "input0"}


def test_only_a_process_that_is_timed_waits_actively(results, seen):
    assert results["right"]["verdict"] == "pass"
    assert list(dict.fromkeys(seen.read_text().split())) == ["PASSIVE", "None"]


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
