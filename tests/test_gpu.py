"""What only a GPU can show: faults of kernels, and the CUDA variants themselves at odd sizes."""

import time
from pathlib import Path

import pytest
import torch

from playground import catalog
from playground.clock import timer
from playground.clock.workload import Graphed, Workload
from playground.driver.runner import Runner
from playground.driver.task import Options, Task
from playground.judge.evaluation import Judged
from playground.nvidia.tool import missing
from playground.record import Check, GradientErrors, Judgment
from playground.report.progress import Progress
from playground.serial import dump
from tests.conftest import TINY_PROBLEM
from tests.judge.exhibits import cases
from tests.kernels.project_variants import variants

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

ILLEGAL_ACCESS = """
import torch
from torch.utils.cpp_extension import load_inline

CUDA = "__global__ void scribble(float* p) { p[threadIdx.x] = 1; }\\nvoid launch(float* p) { scribble<<<1, 32>>>(p); }"
BINDING = '''
#include <torch/library.h>
#include <ATen/core/Tensor.h>
void launch(float*);
at::Tensor scribble(const at::Tensor& x) { launch((float*)64); return x.clone(); }
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("scribble(Tensor x) -> Tensor", &scribble); }
'''

class ModelNew(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = torch.nn.Linear(features, outputs)

    def forward(self, x):
        load_inline("illegal_access", BINDING, CUDA, is_python_module=False, no_implicit_headers=True)
        return torch.ops.illegal_access.scribble(torch.tanh(self.linear(x)))
"""


EXHIBITS = Path(__file__).parent / "judge" / "exhibits"
OF_CUDA = pytest.mark.parametrize("model, variant", variants("cuda"))


def run(tasks, **options):
    with Progress() as progress:
        return list(map(dump, Runner(Options(quick=True, **options), progress).run(tasks)))


def hardly_judged(tasks, gradients=None, **options):
    """Results of tasks that are timed, and right whatever they compute; `gradients` are the names of those they have."""
    right = {"max_error": 0.0, "allowed": 1.0, "eager_error": 0.0}
    check = Check(**right, gradients=gradients and dict.fromkeys(gradients, GradientErrors(**right)))

    def accept(worker, *_):
        return Judged(Judgment(verdict="pass", reason=None, check=check), None, worker, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("playground.driver.session.judge", accept)
        return run(tasks, **options)


def test_faults_are_verdicts_and_the_rest_goes_on(tiny_problem, write_variant, write_forward):
    model = catalog.find_model(tiny_problem)
    variants = [
        write_variant("illegal_access", ILLEGAL_ACCESS),
        write_forward("out_of_memory", "return torch.empty(1 << 42, device=x.device) + x"),
        write_forward("hangs", "torch.cuda._sleep(1 << 62); return torch.tanh(self.linear(x))"),
        write_forward("right", "return torch.tanh(self.linear(x))"),
    ]
    results = run([Task(model, variant, "cuda") for variant in variants], time_limit=60)
    reasons = {result["variant"]: result["reason"] for result in results}
    assert [result["verdict"] for result in results] == ["error", "error", "error", "pass"], reasons
    assert "illegal memory access" in reasons["illegal_access"]
    assert "out of memory" in reasons["out_of_memory"]
    assert "time limit" in reasons["hangs"]


ODD_SIZES = {
    "conv_pool_sigmoid_sum": [
        "batch_size=1 height=23 width=31",
        "batch_size=3 in_channels=5 out_channels=7 kernel_size=5 pool_kernel_size=3 height=40 width=29",
        "batch_size=200 height=64 width=64",
        "batch_size=2 in_channels=1 out_channels=130 kernel_size=1 pool_kernel_size=1 height=9 width=9",
    ],
    "conv3d_div_max_gap_bias_sum": [
        "batch_size=1 depth=5 height=9 width=11",
        "batch_size=3 divisor=-3.0 pool_size=(1,3,2) depth=6 height=13 width=17",
        "batch_size=2 sum_dim=(0,2) in_channels=3 out_channels=5 depth=7 height=8 width=9",
        "batch_size=300 depth=4 height=10 width=10",
    ],
    "alexnet_conv1": [
        "batch_size=1",
        "batch_size=3 height=35 width=50",
        "batch_size=300 height=63",
    ],
}


FOR_TENSOR_CORES = "v4_tensor_core", "v5_hopper", "training_hopper", "training_tensor_core"
LEFT_TO_PYTORCH = {  # (model, height): the variants whose kernels do not take that
    ("conv_pool_sigmoid_sum", 23): ("v5_hopper", "training_hopper"),
    ("conv_pool_sigmoid_sum", 40): FOR_TENSOR_CORES,
    ("conv_pool_sigmoid_sum", 9): FOR_TENSOR_CORES,
    ("conv3d_div_max_gap_bias_sum", 13): FOR_TENSOR_CORES,
}


@pytest.mark.parametrize("name, sizes", [(name, each) for name, all_sizes in ODD_SIZES.items() for each in all_sizes])
def test_cuda_variants_at_odd_sizes(name, sizes):
    model, settings = catalog.find_model(name), catalog.parse_settings(sizes.split())
    cuda = [variant for variant in catalog.variants(model) if variant.backend == "cuda"]
    results = run([Task(model, variant, "cuda", settings) for variant in cuda])
    left = LEFT_TO_PYTORCH.get((name, settings.get("height")), ())
    expected = {v.name: ("fail", "its own kernels were never called") if v.name in left else ("pass", None) for v in cuda}
    assert {r["variant"]: (r["verdict"], r["reason"]) for r in results} == expected


@OF_CUDA
def test_empty_batches_and_graphs(model, variant):
    """Batch 0 gives an empty result; the same bits come twice and out of a CUDA graph; torch.compile(fullgraph=True) works."""
    sizes = {"depth": 6, "height": 12, "width": 12} if "3d" in model.name else {"height": 64, "width": 64}
    problem = catalog.load_problem(model.path, {"batch_size": 2} | sizes)
    (x,) = (value.cuda() for value in problem.get_inputs())
    new = catalog.load_variant(variant.path).ModelNew(*problem.get_init_inputs()).cuda()
    with torch.no_grad():
        expected = new(x)
        assert new(x[:0]).shape[0] == 0
        assert torch.equal(new(x), expected)
        compiled = torch.compile(new, fullgraph=True)(x)
        torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=0)  # PyTorch's own convolution in v1 may differ
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            new(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = new(x)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)
        for _ in range(5):  # a kernel that starts early must not read what the replay before left
            x.copy_(torch.rand_like(x))
            graph.replay()
            assert torch.equal(captured, new(x))


SAMPLES = 3  # at either end of a large batch


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 100 << 30,
    reason="needs 100 GiB of GPU memory: v1's convolutions leave that much",
)
@OF_CUDA
def test_more_than_2_to_the_31_elements(model, variant):
    """The first and the last samples of a batch that 32 bits cannot index give what they give by themselves."""
    problem = catalog.load_problem(model.path, {"batch_size": 1})
    (one,) = problem.get_inputs()
    batch = (1 << 31) // one.numel() + 2 * SAMPLES
    few = torch.randn(2 * SAMPLES, *one.shape[1:], device="cuda")
    many = torch.zeros(batch, *one.shape[1:], device="cuda")
    assert many.numel() > 1 << 31
    many[:SAMPLES], many[-SAMPLES:] = few[:SAMPLES], few[SAMPLES:]
    new = catalog.load_variant(variant.path).ModelNew(*problem.get_init_inputs()).cuda()

    def ends(output):
        return torch.cat([output[:SAMPLES], output[-SAMPLES:]])

    def near(got, expected):
        return (got - expected).abs().max() <= 1e-2 * expected.std()

    with torch.no_grad():
        expected = new(few)
        assert near(ends(new(many)), expected)
    # The training of v1 and v2 keeps PyTorch's own intermediate results, which are larger than the GPU's memory.
    if catalog.natural_order(variant.name) < catalog.natural_order("v3"):
        return
    upstream = torch.randn_like(expected)
    new(few).backward(upstream)
    alone = [parameter.grad for parameter in new.parameters()]
    new.zero_grad()
    output = new(many)
    large = torch.zeros_like(output)
    large[:SAMPLES], large[-SAMPLES:] = upstream[:SAMPLES], upstream[SAMPLES:]
    output.backward(large)
    for parameter, expected in zip(new.parameters(), alone, strict=True):
        spread, magnitude = expected.std(), expected.abs().max()
        varies = spread > 1e-4 * magnitude  # a bias may have the same gradient everywhere
        assert (parameter.grad - expected).abs().max() <= 1e-2 * (spread if varies else magnitude)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@OF_CUDA
def test_a_device_that_is_not_the_current_one(model, variant, monkeypatch):
    """Results and gradients of tensors on cuda:1 are those of cuda:0, bit for bit, while cuda:0 is current."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # v1's gradients are PyTorch's
    problem = catalog.load_problem(model.path, {"batch_size": 3})
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    (x,) = problem.get_inputs()
    new = catalog.load_variant(variant.path).ModelNew(*problem.get_init_inputs())

    def everything_on(device):
        new.to(device).zero_grad()
        here = x.to(device).requires_grad_()
        with torch.no_grad():
            found = [new(here)]
        try:
            output = new(here)
            output.sum().backward()
        except NotImplementedError:  # it is forward only
            return found
        found.append(output)
        return found + [here.grad] + [parameter.grad.clone() for parameter in new.parameters()]

    assert torch.cuda.current_device() == 0
    on_first, on_second = everything_on(first), everything_on(second)
    assert {value.device for value in on_second} == {second}
    assert len(on_first) == len(on_second)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(on_first, on_second, strict=True))


@OF_CUDA
def test_wrong_tensors_are_refused(model, variant):
    problem = catalog.load_problem(model.path, {"batch_size": 1})
    (x,) = (value.cuda() for value in problem.get_inputs())
    new = catalog.load_variant(variant.path).ModelNew(*problem.get_init_inputs()).cuda()
    for wrong in (x.double(), x.cpu(), x[0, 0], x[:, :1]):
        with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError)):
            new(wrong)


# compute-sanitizer. One kernel of four mistakes, each behind a switch of its own; none of them changes the result.
SANITIZED = """
import torch
from torch.utils.cpp_extension import load_inline

CUDA = r'''
#include <cuda_runtime.h>

__global__ void planted(const float* x, float* y, float* scratch, int n) {
    __shared__ float s[64];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x] = i < n ? x[i] : 0.0f;
    if (MISTAKE != 2) __syncthreads();
    const float other = s[63 - threadIdx.x];  // races without the barrier
    if (MISTAKE == 1 && i == 0) scratch[n] = other;  // one behind the last
    if (MISTAKE == 3 && i == 0 && scratch[0] == 12345.0f) y[0] = other;  // read before anything was written
    if (MISTAKE == 4 && threadIdx.x < 48) __syncthreads();  // where the others do not wait
    __syncthreads();
    if (i < n) y[i] = other == 12345.0f ? other : x[i];
}

void launch(const float* x, float* y, float* scratch, int n, cudaStream_t stream) {
    planted<<<(n + 63) / 64, 64, 0, stream>>>(x, y, scratch, n);
}
'''
BINDING = r'''
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>
void launch(const float* x, float* y, float* scratch, int n, cudaStream_t stream);
at::Tensor same(const at::Tensor& x) {
    at::Tensor y = at::empty_like(x), scratch = at::empty_like(x);
    cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    launch(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), scratch.mutable_data_ptr<float>(), x.numel(), stream);
    return y;
}
TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("same(Tensor x) -> Tensor", &same); }
'''

class ModelNew(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = torch.nn.Linear(features, outputs)

    def forward(self, x):
        if torch.is_grad_enabled():
            raise NotImplementedError("forward only")
        define = "#define MISTAKE {mistake}" + chr(10)
        load_inline("planted_{mistake}", BINDING, define + CUDA, is_python_module=False, no_implicit_headers=True)
        return torch.ops.planted_{mistake}.same(torch.tanh(self.linear(x)))
"""
# Tool -> (its mistake, what the line it names holds, what it says).
PLANTED = {
    "memcheck": (1, "scratch[n] = other", "Invalid __global__ write of size 4 bytes"),
    "racecheck": (2, "s[threadIdx.x] = ", "shared memory race: write here and read"),
    "initcheck": (3, "scratch[0] == ", "Uninitialized __global__ memory read of size 4 bytes"),
    "synccheck": (4, "__syncthreads();  // where the others do not wait", "Barrier error detected"),
}
needs_sanitizer = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def sanitized(tiny_problem, write_variant):
    """{tool: result} of the variants with a mistake for it; "none" is that without one, "v1" the project's first kernel."""
    names = {tool: mistake for tool, (mistake, *_) in PLANTED.items()} | {"none": 0}
    texts = {name: SANITIZED.replace("{mistake}", str(mistake)) for name, mistake in names.items()}
    tasks = [
        Task(catalog.find_model(tiny_problem), write_variant(f"planted_{name}", text), "cuda") for name, text in texts.items()
    ]
    model = catalog.find_model("conv_pool_sigmoid_sum")
    tasks.append(
        Task(model, catalog.find_variant(model, "v1_fused_tail"), "cuda", {"batch_size": 2, "height": 40, "width": 40})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("playground.driver.session.Session._time", lambda *_: None)
        results = run(tasks, sanitize=True)
    return dict(zip([*texts, "v1"], results, strict=True))


@needs_sanitizer
@pytest.mark.parametrize("tool", PLANTED)
def test_the_sanitizer_names_the_line_of_a_mistake(sanitized, tool):
    result, (_, line, said) = sanitized[tool], PLANTED[tool]
    assert result["verdict"] == "fail", (result["reason"], result["sanitizer"])
    place, _, rest = result["reason"].partition(": ")
    number = SANITIZED.split("\n").index(next(each for each in SANITIZED.split("\n") if line in each)) + 1
    assert place == f"planted_{tool}.py:{number}"
    assert rest.startswith(said) and "kernel planted" in rest and f"({tool}" in rest
    assert {name for name, counts in result["sanitizer"]["tools"].items() if counts["findings"]} == {tool}


@needs_sanitizer
@pytest.mark.parametrize("name, passes", [("none", ["forward"]), ("v1", ["forward", "backward"])])
def test_the_sanitizer_finds_nothing_in_right_kernels(sanitized, name, passes):
    result = sanitized[name]
    assert (result["verdict"], result["reason"]) == ("pass", None), result["sanitizer"]
    assert result["sanitizer"]["passes"] == passes and result["sanitizer"]["problem"] is None


# The stopwatch. The original keeps the GPU busy for a while that both sides know.
BUSY_PROBLEM = TINY_PROBLEM.replace(
    "batch_size = 5\nfeatures = 8\noutputs = features // 2", "batch_size, features, outputs = 64, 256, 64"
)
# Cycles: about 1.5 ms, so that half of it is timed in a CUDA graph as well.
BUSY_PROBLEM = BUSY_PROBLEM.replace(
    "        return", "        if x.is_cuda:\n            torch.cuda._sleep(3_000_000)\n        return"
)

PATCHED_EVENTS = """
torch.cuda.Event.elapsed_time = lambda self, other: 0.001
torch.cuda.Event.record = lambda self, stream=None: None
torch.cuda.Event.synchronize = torch.cuda.synchronize = lambda *_: None
"""

TIMED = {
    "same": ("torch.cuda._sleep(3_000_000)", ""),
    "twice_as_slow": ("torch.cuda._sleep(6_000_000)", ""),
    "twice_as_fast": ("torch.cuda._sleep(1_500_000)", ""),
    "patched_events": ("torch.cuda._sleep(3_000_000)", PATCHED_EVENTS),
    "launch_bound": ("", ""),
}


@pytest.fixture(scope="module")
def timed(tmp_path_factory, write_forward):
    """{name: result} of variants that are timed and hardly judged."""
    path = tmp_path_factory.mktemp("problem") / "busy.py"
    path.write_text(BUSY_PROBLEM)

    then = "\nreturn torch.tanh(self.linear(x))"
    variants = [write_forward(f"timed_{name}", body + then, f"import torch\n{top}") for name, (body, top) in TIMED.items()]
    results = hardly_judged([Task(catalog.find_model(path), variant, "cuda") for variant in variants])
    return {result["variant"].removeprefix("timed_"): result for result in results}


def test_a_model_against_itself_is_a_tie(timed):
    assert timed["same"]["verdict"] == "pass", timed["same"]["reason"]
    assert timed["same"]["outcome"]["verdict"] == "tie"
    eager = timed["same"]["speedup"]["eager"]
    assert eager["low"] <= 1.01 and eager["high"] >= 0.99
    assert timed["same"]["notes"] == [] or all("clock" in note or "slowed" in note for note in timed["same"]["notes"])


@pytest.mark.parametrize("name, ratio, verdict", [("twice_as_slow", 0.5, "loss"), ("twice_as_fast", 2.0, "win")])
def test_a_known_ratio(timed, name, ratio, verdict):
    assert timed[name]["outcome"]["verdict"] == verdict
    assert timed[name]["speedup"]["eager"]["ratio"] == pytest.approx(ratio, rel=0.05)


def test_patched_events_change_nothing(timed):
    assert timed["patched_events"]["verdict"] == "pass", timed["patched_events"]["reason"]
    assert timed["patched_events"]["time_ms"]["median"] == pytest.approx(timed["same"]["time_ms"]["median"], rel=0.05)


def test_a_launch_bound_case_is_also_timed_in_a_graph(timed):
    result = timed["launch_bound"]
    assert result["time_ms"]["median"] < 0.05
    assert 0 < result["graphed"]["time_ms"]["median"] <= 1.5 * result["time_ms"]["median"]
    assert "eager" in result["graphed"]["speedup"]
    assert timed["same"]["graphed"] is None


def test_a_known_ratio_in_a_graph(timed):
    graphed = timed["twice_as_fast"]["graphed"]
    assert graphed["outcome"]["verdict"] == "win" and graphed["not_graphed"] == []
    assert graphed["speedup"]["eager"]["ratio"] == pytest.approx(2.0, rel=0.05)
    assert graphed["time_ms"]["median"] == pytest.approx(timed["twice_as_fast"]["time_ms"]["median"], rel=0.05)


def test_a_solution_that_launches_on_the_default_stream_is_timed(write_variant):
    """As most of the field's do. A CUDA graph would hold nothing of it, and its replay would give an old result."""
    text = cases.text_of("wrong/default_stream")
    text = text.replace("build().sigmoid", "OPERATORS.sigmoid").replace(
        "class ModelNew", "OPERATORS = build()\n\n\nclass ModelNew"
    )
    model = catalog.find_model(EXHIBITS / "problem.py")
    (result,) = run([Task(model, write_variant("on_the_default_stream", text), "cuda")])
    assert result["verdict"] == "forward only", result["reason"]
    assert "default-stream" in [caveat["tag"] for caveat in result["caveats"]]
    assert result["time_ms"]["median"] < 1.0 and result["graphed"] is None
    assert result["outcome"]["verdict"] in ("win", "tie", "loss"), result["outcome"]


CONV_PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, channels, outputs):
        super().__init__()
        self.conv = nn.Conv2d(channels, outputs, 3)
        self.frozen = nn.Parameter(torch.ones(outputs, 1, 1), requires_grad=False)

    def forward(self, x):
        return torch.sigmoid(self.conv(x) * self.frozen).sum(dim=(1, 2, 3))

batch_size, channels, outputs = 4, 3, 8

def get_inputs():
    return [torch.randn(batch_size, channels, 32, 32)]

def get_init_inputs():
    return [channels, outputs]
"""


@pytest.fixture(scope="module")
def conv_problem(tmp_path_factory):
    path = tmp_path_factory.mktemp("problem") / "small_conv.py"
    path.write_text(CONV_PROBLEM)
    return catalog.find_model(path)


@pytest.mark.parametrize("mode", ["weights", "weights_and_input"])
def test_gradients_of_a_replay_are_those_of_the_eager_step(conv_problem, mode):
    problem = catalog.load_problem(conv_problem.path, {})
    model = problem.Model(*problem.get_init_inputs()).cuda()
    eager = Workload(problem, model, mode, torch.device("cuda"))
    graphed = Graphed(Workload(problem, model, mode, torch.device("cuda")), 1)
    seen = []
    for seed in (2, 3):  # other content than the capture's
        expected, actual = eager(content := eager.fresh(seed)), graphed(graphed.fresh(seed))
        assert graphed.names(content) == ["conv.weight", "conv.bias"] + ["input0"] * (mode == "weights_and_input")
        assert len(actual) == len(expected) == len(graphed.names(content))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-3 * e.abs().max().item())
        seen.append([each.clone() for each in actual])
    assert not any(torch.equal(a, b) for a, b in zip(*seen, strict=True))


CONV_SOLUTION = CONV_PROBLEM.split("batch_size,")[0].replace("class Model(", "class ModelNew(")
STALLS = "if torch.is_grad_enabled(): torch.cuda.synchronize()"
TRAINED = {"again": CONV_SOLUTION, "waits": CONV_SOLUTION.replace("return", f"{STALLS}\n        return")}


@pytest.fixture(scope="module")
def trained(conv_problem, write_variant):
    """{name: result} of variants of a small convolution that are timed in every mode and hardly judged."""

    variants = [write_variant(f"trained_{name}", text) for name, text in TRAINED.items()]
    tasks = [Task(conv_problem, variant, "cuda") for variant in variants]
    results = hardly_judged(tasks, ("conv.weight", "conv.bias", "input0"), training=True)
    return {result["variant"].removeprefix("trained_"): result for result in results}


@pytest.mark.parametrize("mode", ["weights", "weights_and_input"])
def test_a_short_training_step_is_also_timed_in_a_graph(trained, mode):
    assert trained["again"]["verdict"] == "pass", trained["again"]["reason"]
    eager = trained["again"]["training"][mode]
    graphed = eager["graphed"]
    assert "unavailable" not in graphed, graphed
    assert set(graphed["speedup"]) == set(graphed["baselines_ms"]) == {"eager", "eager_fp32"}
    assert graphed["speedup"]["eager"]["ratio"] == pytest.approx(1.0, rel=0.1)
    assert 0 < graphed["time_ms"]["median"] <= 1.1 * eager["time_ms"]["median"] and graphed["rechecked"] == 1


def test_a_training_step_that_cannot_be_captured_says_why(trained):
    assert trained["waits"]["verdict"] == "pass", trained["waits"]["reason"]
    assert trained["waits"]["graphed"]["time_ms"]["median"] > 0
    assert "captur" in trained["waits"]["training"]["weights"]["graphed"]["unavailable"]
    assert "not tried" in trained["waits"]["training"]["weights_and_input"]["graphed"]["unavailable"]


def test_clocks_are_recorded(timed):
    before, after = timed["same"]["clocks"]["before"], timed["same"]["clocks"]["after"]
    assert 0 < before["sm_mhz"] <= before["max_sm_mhz"] and 0 < after["sm_mhz"] <= after["max_sm_mhz"]


def test_the_cache_is_flushed():
    """A tensor that fits into L2 is read more slowly after a flush than when it was just read."""
    clock = timer.CudaClock()
    x = torch.ones(torch.cuda.get_device_properties(0).L2_cache_size // 8, device="cuda")  # half of L2

    def median(flush):
        samples = []
        for _ in range(20):
            x.sum()
            if flush:
                clock.flush()
            samples.append(clock.time(lambda: x.sum())[0])
        return sorted(samples)[10]

    assert median(True) > median(False) + 0.001  # ms; an H200 takes 0.003 longer


@pytest.mark.parametrize("milliseconds", [0.05, 0.5])
def test_work_on_another_stream_begins_after_the_first_event_and_is_waited_for(milliseconds):
    clock, x, other = timer.CudaClock(), torch.ones(64, device="cuda"), torch.cuda.Stream()

    def both():
        x.sum()
        with torch.cuda.stream(other):
            torch.cuda._sleep(round(milliseconds * timer.CYCLES_PER_MS))

    def median(step):
        clock.flush()
        return sorted(clock.time(step)[:2] for _ in range(20))[10]

    alone, late = median(x.sum)
    assert alone < 0.02 and not late
    together, late = median(both)
    assert together > 0.7 * milliseconds and late


def test_a_step_that_captures_a_graph_is_timed():
    clock, x = timer.CudaClock(), torch.ones(64, device="cuda")

    def captures():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
        graph.replay()
        return y

    for _ in range(3):
        clock.flush()
        assert clock.time(captures)[2].sum() == 128


def test_a_slow_host_is_waited_for():
    """What launches for 0.5 ms, on a busy host, is timed as the device sees it, as soon as that is known."""
    clock, x = timer.CudaClock(), torch.ones(64, device="cuda")

    def slow_to_launch():
        x.sum()
        until = time.perf_counter() + 5e-4
        while time.perf_counter() < until:
            pass
        x.sum()

    samples = [clock.time(slow_to_launch)[0] for _ in range(20)]
    assert samples[0] > 0.1 and sorted(samples)[10] < 0.05  # ms


def test_a_flush_takes_as_long_alone_as_among_others():
    """Where it does not, another process has the GPU in turns; see clock.race."""
    clock, alone = timer.CudaClock(), []
    for _ in range(20):
        clock.flush()
        clock.wait()
        alone.append(clock.flush_ms)
    least = sorted(alone)[4]
    assert 0.8 * least < clock.flush_in_a_row(least) < 1.15 * least
