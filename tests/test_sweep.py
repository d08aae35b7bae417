"""Grids of a model's constants, and where a variant starts to win."""

from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension

from playground import catalog, sweep
from playground.catalog import CatalogError
from playground.driver import plan
from playground.driver.task import Options
from playground.machine import requirements
from playground.record import Outcome
from playground.subject import Shape
from playground.worker.candidate import Candidate
from playground.worker.failures import describe

AXES = {"batch_size": (1, 8, 64), "pool_size": ((2, 2, 2), (1, 2, 2))}


def point(batch_size, ratio, pool_size=(2, 2, 2), verdict=None):
    """A result of one variant; tuples are lists, as JSON has them."""
    verdict = verdict or ("win" if ratio > 1.01 else "loss" if ratio < 0.99 else "tie")
    settings = {"batch_size": batch_size, "pool_size": list(pool_size)}
    outcome = Outcome(verdict=verdict, ratio=ratio)
    return SimpleNamespace(shape=Shape(settings=settings), outcome=outcome)


def test_values_are_literals():
    assert sweep.parse(["batch_size=1,8", "pool_size=(2, 2, 2),(1,2,2)", "eps=1e-3"]) == {
        "batch_size": (1, 8),
        "pool_size": ((2, 2, 2), (1, 2, 2)),
        "eps": (1e-3,),
    }
    assert sweep.parse(["batch_size=8,1,8"]) == {"batch_size": (8, 1)}, "a value is measured once"
    assert sweep.parse([]) == {}


@pytest.mark.parametrize("text", ["batch_size", "batch_size=", "batch_size=1,,2", "batch_size=many", "=1,2", "a b=1"])
def test_what_is_no_sweep_is_refused(text):
    with pytest.raises(CatalogError, match="--sweep"):
        sweep.parse([text])


def test_a_grid_has_every_combination():
    points = sweep.grid({"a": (1, 2), "b": (3, 4)})
    assert points == [{"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4}]
    assert sweep.grid({}) == [{}]


def test_lines_run_along_one_axis():
    results = [point(b, 1.0, pool) for pool in AXES["pool_size"] for b in (64, 1, 8)]
    lines = sweep.lines_along(results, AXES, "batch_size")
    assert [others for others, _ in lines] == [{"pool_size": (2, 2, 2)}, {"pool_size": (1, 2, 2)}]
    assert [r.shape.settings["batch_size"] for r in lines[0][1]] == [1, 8, 64]
    across = sweep.lines_along(results, AXES, "pool_size")
    assert [others for others, _ in across] == [{"batch_size": 1}, {"batch_size": 8}, {"batch_size": 64}]
    assert [tuple(r.shape.settings["pool_size"]) for r in across[0][1]] == list(AXES["pool_size"]), "in the order given"


@pytest.mark.parametrize(
    "reason, refused",
    [
        ("ValueError: batches up to 1000", True),
        ("NotImplementedError: dilation", True),
        ("TypeError: ModelNew.forward() takes 2 positional arguments but 3 were given", False),
        ("RuntimeError: kernel 7 is larger than the image", False),  # nothing says where it was raised
        ("crashed (SIGSEGV)", False),
        ("no answer within the time limit of 300 s", False),
        ("out of memory: CUDA out of memory", False),
        ("AttributeError: 'ModelNew' object has no attribute 'conv'", False),
    ],
)
def test_a_refusal_is_an_exception_on_purpose(reason, refused):
    assert sweep.is_refusal(SimpleNamespace(verdict="error", reason=reason, details="", variant="v")) is refused
    assert not sweep.is_refusal(SimpleNamespace(verdict="fail", reason=reason))


LIMITED = 'at::Tensor f(at::Tensor x) { TORCH_CHECK(x.size(0) < 5, "up to 4 samples, got ", x.size(0)); return x.relu(); }'
OPERATOR = f"""
#include <torch/library.h>
#include <ATen/ATen.h>
{LIMITED}
TORCH_LIBRARY(sweep_operator, m) {{ m.def("f(Tensor x) -> Tensor", &f); }}
"""
FUNCTION = f"#include <torch/extension.h>\n{LIMITED}"
BUILD = "from torch.utils.cpp_extension import load_inline\n"
BUILD_OPERATOR = f"{BUILD}load_inline('sweep_operator', {OPERATOR!r}, is_python_module=False, no_implicit_headers=True)\n"
BUILD_FUNCTION = f"{BUILD}f = load_inline('sweep_function', {FUNCTION!r}, functions=['f'], no_implicit_headers=True).f\n"

RUNTIME_ERRORS = {
    "its operator": (f"{BUILD_OPERATOR}return torch.ops.sweep_operator.f(x)", "up to 4 samples, got 5", True),
    "its function": (f"{BUILD_FUNCTION}return f(x)", "up to 4 samples, got 5", True),
    "its raise": ("raise RuntimeError('up to 4 samples')", "up to 4 samples", True),
    "an operator of PyTorch's": ("return x + torch.ones(7)", "The size of tensor a (8) must match", False),
    "a function of PyTorch's": ("return nn.functional.conv2d(x, x)", "Expected", False),
    "a module of PyTorch's": ("return nn.Linear(3, 4)(x)", "mat1 and mat2 shapes", False),
    "the GPU": ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", "CUDA error", False),
}


@pytest.fixture
def result_of(tiny_problem, write_forward, monkeypatch):
    """result_of(body of forward) -> the keys of a result that an exception in it sets, as a worker describes it."""
    requirements.prepare_environment()
    for name in ("load", "load_inline"):  # put back what the candidate replaces
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))

    def run(body):
        variant = write_forward("says_no", body)
        candidate = Candidate()
        candidate.load(str(variant.path), None, problem=str(tiny_problem), settings={}, place="cpu", seed=0)
        with pytest.raises(RuntimeError) as raised:
            candidate.build(0)
        reason, details = describe(raised.value)
        return SimpleNamespace(verdict="error", variant=variant.name, reason=reason, details=details + "what it printed\n")

    return run


@pytest.mark.full
@pytest.mark.parametrize("body, said, refused", RUNTIME_ERRORS.values(), ids=RUNTIME_ERRORS)
def test_a_runtime_error_is_a_refusal_where_the_variants_own_code_raises_it(result_of, body, said, refused):
    result = result_of(body)
    assert result.reason.startswith(f"RuntimeError: {said}"), result.details
    assert sweep.is_refusal(result) is refused


def test_tasks_are_told_apart_by_what_is_swept():
    model = catalog.find_model("alexnet_conv1")
    (variant,) = [each for each in catalog.variants(model) if each.backend == "cpu"]
    points = sweep.grid({"batch_size": (1, 2), "height": (47,)})
    one, two = plan.of_variants(model, [variant], points, Options(device="cpu"))
    assert one.names() == ("alexnet_conv1", f"{variant.name}, batch_size=1")
    assert two.names("float64") == ("alexnet_conv1", "float64, batch_size=2")
    assert two.settings["height"] == 47
    (alone,) = plan.of_variants(model, [variant], points[:1], Options(device="cpu"))
    assert alone.names() == ("alexnet_conv1", variant.name)
