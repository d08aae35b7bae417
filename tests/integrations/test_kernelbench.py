"""KernelBench's call: its signature, its fields, and what they say of solutions."""

import dataclasses
import functools
import inspect
import os

import pytest
import torch

from playground.catalog import CatalogError
from playground.integrations import kernelbench
from playground.integrations.kernelbench import KernelExecResult, eval_kernel_against_ref
from playground.record import Ratio
from tests.conftest import TINY_PROBLEM as PROBLEM

pytestmark = pytest.mark.usefixtures("no_sandbox")

CPU = torch.device("cpu")
RIGHT = PROBLEM.replace("class Model(", "class ModelNew(")
# Of KernelBench's commit 423217d: (name, default) of each parameter in order, and the result's fields with their defaults.
PARAMETERS = {
    **{"original_model_src": inspect.Parameter.empty, "custom_model_src": inspect.Parameter.empty, "seed_num": 42},
    **{"num_correct_trials": 1, "num_perf_trials": 10, "measure_performance": False, "timing_method": "cuda_event"},
    **{"verbose": False, "build_dir": None, "device": None, "backend": "cuda", "precision": torch.float32},
    **{"check_for_excessive_speedup": True, "excessive_speedup_threshold": 10},
}
FIELDS = {"compiled": False, "correctness": False, "metadata": {}, "runtime": -1.0, "runtime_stats": {}}
FIELDS |= {"ref_runtime": -1.0, "ref_runtime_stats": {}}


def test_signature_and_fields_are_kernelbenchs():
    found = inspect.signature(eval_kernel_against_ref).parameters.values()
    assert [(each.name, each.default) for each in found] == list(PARAMETERS.items())
    assert dataclasses.asdict(KernelExecResult()) == FIELDS
    assert list(dataclasses.asdict(KernelExecResult())) == list(FIELDS)


def test_a_right_solution():
    found = eval_kernel_against_ref(PROBLEM, RIGHT, device=CPU)
    assert (found.compiled, found.correctness, found.runtime, found.ref_runtime) == (True, True, -1.0, -1.0), found
    assert found.metadata["verdict"] == "pass" and found.metadata["device"] == "cpu"


@pytest.mark.parametrize(
    "change, compiled, key, says",
    [
        (("tanh", "sigmoid"), True, "correctness_issue", "off by"),
        (("return torch", "return 1 / 0; torch"), True, "runtime_error", "ZeroDivisionError"),
        (("super().__init__()", "raise KeyError(3)"), True, "runtime_error", "KeyError"),
        (("class ModelNew(", "class Other("), False, "compilation_error", "ModelNew"),
        (("import torch\n", "import torch ("), False, "compilation_error", "SyntaxError"),
        (("return torch", "torch"), True, "runtime_error", "forward returns None"),
    ],
)
def test_what_is_wrong_is_in_the_metadata(change, compiled, key, says):
    found = eval_kernel_against_ref(PROBLEM, RIGHT.replace(*change, 1), device=CPU)
    assert not found.correctness and found.compiled is compiled, found
    assert says in found.metadata[key]
    names = {"ZeroDivisionError", "KeyError", "SyntaxError"}
    name = f"builtins.{says if says in names else 'RuntimeError'}"
    assert key == "correctness_issue" or found.metadata[f"{key}_name"] == name, "as KernelBench names them"


def test_what_is_missing_of_a_drop_in_is_no_error_of_a_right_solution():
    found = eval_kernel_against_ref(PROBLEM, RIGHT.replace("return torch", "x = x.detach(); return torch"), device=CPU)
    assert found.correctness and found.metadata["verdict"] == "forward only", found
    assert not any("error" in key for key in found.metadata)


@pytest.mark.parametrize("problem", ["class (", PROBLEM.replace("return [", "return 1 / 0, [")])
def test_a_problem_that_does_not_run_is_no_solutions_fault(problem):
    with pytest.raises(CatalogError, match=r"problem\.py:\d+: (SyntaxError|ZeroDivisionError)"):
        eval_kernel_against_ref(problem, RIGHT, device=CPU)


def test_lower_precision_is_that_of_model_and_inputs():
    found = eval_kernel_against_ref(PROBLEM, RIGHT, device=CPU, precision=torch.bfloat16)
    assert found.correctness, found


def test_times_are_told_and_too_good_ones_marked(monkeypatch):
    real = functools.cache(kernelbench.compare)

    def timed(*arguments, **options):
        assert options["check_only"] is False
        spread = {"median": 0.1, "p20": 0.1, "p80": 0.1}
        found = real(*arguments, **options | {"check_only": True})
        times = {"time_ms": spread, "baselines_ms": {"eager": dict.fromkeys(spread, 2.0)}, "calls": 9}
        ratio = Ratio(ratio=20.0, low=19.0, high=21.0)
        return dataclasses.replace(found, result=found.result | times, speedups={"eager": ratio})

    monkeypatch.setattr(kernelbench, "compare", timed)
    found = eval_kernel_against_ref(PROBLEM, RIGHT, device=CPU, measure_performance=True)
    assert (found.runtime, found.ref_runtime, found.runtime_stats["num_trials"]) == (0.1, 2.0, 9)
    assert found.metadata["excessive_speedup"] is True
    more = {"measure_performance": True, "excessive_speedup_threshold": 30}
    found = eval_kernel_against_ref(PROBLEM, RIGHT, device=CPU, **more)
    assert "excessive_speedup" not in found.metadata


@pytest.mark.parametrize("visible, index, seen", [(None, 2, "2"), ("4,7", 1, "7"), ("4,7", 0, "4")])
def test_a_gpu_by_its_index_is_the_only_one_that_is_seen(monkeypatch, visible, index, seen):
    def asked(*_, device, **options):
        assert (device, os.environ["CUDA_VISIBLE_DEVICES"]) == ("cuda", seen)
        raise InterruptedError

    monkeypatch.setattr(kernelbench, "compare", asked)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for device in (index, torch.device("cuda", index)):
        with pytest.raises(InterruptedError):
            eval_kernel_against_ref(PROBLEM, RIGHT, device=device)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_what_cannot_be_judged_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"torch\.float64, expected one of torch\.float32"):
        eval_kernel_against_ref(PROBLEM, RIGHT, precision=torch.float64)
    with pytest.raises(ValueError, match="AMD"):
        eval_kernel_against_ref(PROBLEM, RIGHT, backend="hip")
    with pytest.raises(ValueError, match="expected the index of a GPU"):
        eval_kernel_against_ref(PROBLEM, RIGHT, device="cuda:0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with pytest.raises(ValueError, match="has GPUs 0 to 1"):
        eval_kernel_against_ref(PROBLEM, RIGHT, device=2)
