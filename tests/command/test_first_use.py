"""What a first user does wrong, and the first line that says so: files of their own beside examples/softmax.py."""

import json
import re
import sys

import pytest
import torch
from typed import run

from playground import catalog
from playground.catalog import ROOT
from playground.command import entry
from playground.driver import preparations
from playground.judge import work
from playground.report import document
from playground.worker.interface import WrongInterface, misfit, source_line

PROBLEM, SOLUTION = ROOT / "examples/softmax.py", ROOT / "examples/softmax_new.py"
BARRIER = "    __syncthreads();  // all have read the maximum before the sums overwrite it\n"
FORWARD, CALL = "    def forward(self, x):\n", "        return module.softmax(x)"
DECORATED = "    @__import__('torch').no_grad()\n    def forward(self):\n"
FORWARD_AND_CALL = FORWARD + CALL, "    pass"
CONSTRUCTOR = "    def __init__(self, n):\n        super().__init__()\n\n"
PUT = "__device__ __forceinline__ void put(float* y, float value) { y[1 << 20] = value; }"
DOUBLE = "softmax(torch::Tensor x) {", "softmax(torch::Tensor x, double scale) {"
# What published files ask before they build.
ASKS_FIRST = (
    "module = load_inline(",
    "import torch, torch.nn as nn\nmodule = None\nDEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    "if (torch.cuda.device_count() and torch.version.cuda and torch.cuda.get_device_capability()[0] >= 7\n"
    "        and torch.cuda.get_device_properties(0).multi_processor_count and DEVICE == 'cuda'):\n    module = load_inline(",
)
CUDNN = """
from torch import nn
from torch.utils.cpp_extension import load_inline

CPP = '''#include <torch/extension.h>
#include <cudnn.h>
torch::Tensor softmax(torch::Tensor x) {
    cudnnHandle_t handle;
    return x;
}'''
module = load_inline("uses_cudnn", CPP, "", functions=["softmax"], extra_ldflags=["-lcudnn"], with_cuda=True)


class ModelNew(nn.Module):
    def forward(self, x):
        return module.softmax(x)
"""
# name -> (what is replaced in the solution by what, or a whole file; verdict, pattern of the reason); LINE is that of the text
# in the third place. Numbers are those of the review of a first use.
MISTAKES = {
    "race": ((BARRIER, ""), "fail", r"FILE:19: shared memory race .* wrote it at line 21, no barrier"),
    "constructor_2": ((FORWARD, CONSTRUCTOR + FORWARD), "error", r"FILE:39: __init__ takes n; get_init_inputs gives none$"),
    "arguments_3": (("(self, x)", "(self, x, y=1, *, z)"), "error", r"FILE:39: forward takes x, y=1, \*, z; get_inputs .* 1$"),
    "return_3": ((CALL, CALL.replace("return ", "")), "error", r"FILE:39: forward returns None: end it with `return`"),
    "cudnn_8": (CUDNN, "error", r"FILE:8: calls cuDNN \(cudnnHandle_t\), which the emulator lacks: judge the file on a GPU$"),
    "host_memory_68_1": (
        ("torch::empty_like(x)", "torch::empty({x.size(0), x.size(1)}, torch::kFloat32)"),
        "fail",
        r"FILE:32: host memory: y is a CPU tensor, and a kernel gets its pointer; kernel softmax_kernel",
    ),
    "host_tensor_68_1": (
        (CALL, CALL.replace("(x)", "(x.cpu())")),
        "fail",
        r"FILE:32: host memory: x is a CPU tensor, and a kernel gets its pointer; kernel softmax_kernel",
    ),
    "host_tensor_that_changes_its_type_68_1": (
        ("torch::empty_like(x)", "torch::empty({x.size(0), x.size(1)}).to(x.scalar_type())"),
        "fail",
        r"FILE:32: host memory: y is a CPU tensor, and a kernel gets its pointer; kernel softmax_kernel",
    ),
    "host_constant_68_1": (
        (
            "\n\nclass ModelNew",
            "\nONES = __import__('torch').ones(64, 1000)\n\nclass ModelNew",
            CALL,
            CALL.replace("(x)", "(ONES)"),
        ),
        "fail",
        r"FILE:32: host memory: x is a CPU tensor, and a kernel gets its pointer; kernel softmax_kernel",
    ),
    "nvcc_by_hand_68_10": (
        ("module = load_inline(", "__import__('subprocess').run(['nvcc', '-shared', 'k.cu'])\nmodule = load_inline("),
        "error",
        r"FILE:35: calls nvcc itself, and what that builds needs a GPU: judge the file on one, or build by load_",
    ),
    "host_variable_68_2": (
        ("-INFINITY, sum = 0;", "-INFINITY, sum = EPS;", "__global__ void", "float EPS = 0; __global__ void"),
        "error",
        r"FILE:11: error: EPS is a variable of the host, undefined in device code",
    ),
    "functions_68_5": (
        ('functions=["softmax"]', 'functions=["soft_max"]'),
        "error",
        r"FILE:35: functions names soft_max; cpp_sources declares softmax$",
    ),
    "signatures_68_6": (
        ("softmax(torch::Tensor x);", "softmax(torch::Tensor x, float scale);", *DOUBLE),
        "error",
        r"FILE:35: softmax\(torch::Tensor x, float scale\) is declared here, and defined in line 30 as "
        r"softmax\(torch::Tensor x, double scale\)$",
    ),
    "too_few_68_7": ((CALL, CALL.replace("(x)", "()")), "error", r"FILE:40: softmax takes 1 argument, got 0$"),
    "another_kind_68_7": (
        (CALL, CALL.replace("(x)", "('x, y')")),
        "error",
        r"FILE:40: softmax takes \(arg0: torch.Tensor\), got \('x, y'\)$",
    ),
    "too_many_threads_68_19": ((", 256>>>", ", 2048>>>"), "fail", r"FILE:32: invalid launch: .* 2048 threads in a block"),
    "nothing_launched_68_20": (
        ("    softmax_kernel<<<", "    if (x.size(0) < 0) softmax_kernel<<<"),
        "fail",
        r"FILE:40: output never written: element \[0, 0\] of a result of shape \(64, 1000\) was never written, nor were 63999 "
        r"others: the call launched no",
    ),
    "semicolon_68_25": (
        ("float m = -INFINITY, sum = 0;", "float m = -INFINITY, sum = 0"),
        "error",
        r"FILE:11: error: expected",
    ),
    "semicolon_before_a_launch_68_25": (
        ("torch::empty_like(x);", "torch::empty_like(x)"),
        "error",
        r"FILE:31: error: expected .,. or .;.$",
    ),
    "another_name_68_18": (("class ModelNew", "class Model"), "error", r"another_name_68_18.py does not define ModelNew$"),
    "st clamp (v2) 68_12": (
        ("__global__", f"{PUT}\n__global__", "y[i] = expf(x[i] - m) / partial[0]", "put(y + i, expf(x[i] - m) / partial[0])"),
        "fail",
        r"FILE:7: global memory out of bounds .*, called from line 29$",
    ),
    "asks_for_a_gpu_68_10": (ASKS_FIRST, "forward only", r"no backward: loss.backward\(\) would silently skip this layer"),
    "shape_9": (
        ("torch::empty_like(x)", "torch::empty({x.size(0), x.size(1) + 1})"),
        "fail",
        r"FILE:7: a result has the shape \(64, 1001\), and the original's \(64, 1000\); output never written",
    ),
    "strides_10": (
        (CALL, CALL.replace("(x)", "(x.t().contiguous().t())")),
        "fail",
        r"the output is off by .*; argument 1 of softmax \(shape \(64, 1000\), strides \(1, 64\)\) is not contiguous, and its "
        r"data_ptr is read as if it were: right with \.contiguous\(\)",
    ),
    "text_3": ((CALL, "        return 'a text'"), "error", r"FILE:39: forward must return a tensor .*, got str$"),
    "no_forward_3": (FORWARD_AND_CALL, "error", r"FILE:38: ModelNew has no forward; get_inputs gives 1$"),
    "decorated_3": ((FORWARD, DECORATED), "error", r"FILE:39: forward takes no arguments; get_"),
    "semicolon_15": ((BARRIER, "    __syncthreads()\n\n"), "error", r"FILE:20: error: expected .;. before .for."),
    "syntax_18": (("(self, x):", "(self, x:"), "error", r"FILE:39: SyntaxError: '\(' was never closed$"),
    "undeclared_18": (
        ('"torch::Tensor softmax(torch::Tensor x);"', '""'),
        "error",
        r"FILE:35: functions names softmax; cpp_sources declares no function$",
    ),
}


def changed(change):
    """The text of the solution with a change: a whole text, or what is replaced by what, by turns."""
    text = SOLUTION.read_text()
    for old, new in () if isinstance(change, str) else zip(change[::2], change[1::2], strict=True):
        assert old in text
        text = text.replace(old, new, 1)
    return change if isinstance(change, str) else text


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """One run of all MISTAKES and of the example itself: {name: (file, result)}."""
    folder = tmp_path_factory.mktemp("first_use")
    files = {}
    for name, (change, *_) in MISTAKES.items():
        files[name] = folder / f"{name}.py"
        files[name].write_text(changed(change))
    status, out, err = run(
        "compare.py", "--model", PROBLEM, "--variant", *files.values(), SOLUTION, "--device", "emulator", "--json", "-"
    )
    assert status == 1, err
    results = {result["variant"]: result for result in json.loads(out)["results"]}
    return {name: (path, results[name]) for name, path in (files | {SOLUTION.stem: SOLUTION}).items()}, err


@pytest.mark.full
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_said_at_its_line(judged, name):
    file, result = judged[0][name]
    _, verdict, reason = MISTAKES[name]
    assert result["verdict"] == verdict
    assert re.match(reason.replace("FILE", re.escape(str(file))), result["reason"]), result["reason"]
    assert "playground/worker" not in result["details"]


def test_a_strided_tensor_that_is_given_by_its_address():
    """As to a function of ctypes: in its place stands the address of a contiguous copy."""
    own, strided, seen = work.OwnCode(), torch.rand(300, 400).t(), []
    with own.watched(contiguous=True):
        own.run_foreign(lambda address, n: seen.append((address, n)), (strided.data_ptr(), 300), {})
        assert seen[0][0] != strided.data_ptr() and seen[0][1] == 300
    assert re.search(r"argument 1 of .*\(shape \(400, 300\), strides \(1, 400\)\)$", own.strided)


@pytest.mark.full
def test_what_a_kernel_for_inference_lacks_is_said_once(judged):
    """The example is right; its caveat is one sentence, and what such a file can do nothing about is in one line."""
    shown = " ".join(judged[1].split())
    about = shown[shown.index("softmax_new forward only: right; no backward yet caveat no-gradient: softmax_new.py:39:") :]
    assert "gradients none" in about and "raises (allowed): torch.compile, double()" in about
    assert "Unsupported" not in about and "fail" not in about.partition("work")[0]
    assert "1 call of its own code in a forward pass, and the result depends on it" in about


@pytest.mark.parametrize(
    "given, expected",
    [((), r"__init__ takes n; get_init_inputs gives none"), ((1, 2), r"__init__ takes n; .* gives 2"), ((1,), None)],
)
def test_whose_fault_a_type_error_is(given, expected):
    """A constructor that does not fit is the file's fault; one that raises by itself says its own."""

    class ModelNew:
        def __init__(self, n):
            n + "a text"

    with pytest.raises(TypeError) as error:
        ModelNew(*given)
    found = misfit(error.value.with_traceback(None), ModelNew, "__init__", given, "get_init_inputs")
    assert found is None if expected is None else isinstance(found, WrongInterface) and re.search(expected, str(found))
    assert not found or re.match(rf"{re.escape(__file__)}:\d+: ", str(found))


def test_a_function_in_the_place_of_a_class_has_a_line():
    def ModelNew(*sizes):
        return None

    line = ModelNew.__code__.co_firstlineno
    assert source_line(ModelNew, "__init__") == source_line(ModelNew, "forward") == f"{__file__}:{line}: "
    assert misfit(TypeError("no module"), ModelNew, "__init__", (1, 2), "get_init_inputs") is None


@pytest.mark.full
def test_weights_of_other_names_lead_a_suites_line(tiny_problem, write_variant, tmp_path):
    """Number 6, and 17: half precision has one name. What relates wrong to right says that the weights are the same."""
    text = """
        import torch

        class ModelNew(torch.nn.Module):
            def __init__(self, features, outputs):
                super().__init__()
                torch.rand({drawn})
                self.{name} = torch.nn.Linear(features, outputs)

            def forward(self, x):
                return torch.tanh(self.{name}(x){end}
    """
    files = [
        write_variant("own", text.format(name="mine", drawn=9, end=")")).path,
        write_variant("moved", text.format(name="mine", drawn=0, end=") + 3")).path,
        write_variant("half", text.format(name="linear", drawn=0, end=").bfloat16().float()")).path,
    ]
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps([[str(tiny_problem), str(file)] for file in files]))
    status, out, err = run("compare.py", "--suite", pairs, "--check-only", "--device", "cpu")
    assert status == 1, err
    lines = re.split(r"\n(?=\d/3 )", out)  # what is longer than the terminal goes on below
    of_own, of_moved, of_half = (" ".join(next(line for line in lines if f"{path.stem}: " in line).split()) for path in files)
    assert "own: ModelNew's parameters differ from the original's: it lacks linear.weight;" in of_own, of_own
    assert "so its weights may not be the original's: the output is off by" in of_own, of_own
    assert re.search("moved: the output is off by .*; every value is the right one [+] 3;", of_moved), of_moved
    assert re.search(r"(operands in|that of) bf16", of_half) and of_half.count("bf16") == 1 and "fp16" not in of_half, of_half


@pytest.mark.full
@pytest.mark.parametrize(
    "body, phase", [(None, r"still compiling \(g\+\+\); raise\s+--time-limit"), ("while True: pass", "in the first")]
)
def test_a_time_limit_names_the_phase(tmp_path, write_forward, tiny_problem, body, phase):
    """Number 7: a compiler that does not come to an end, and a call of forward."""
    slow = tmp_path / "g++"
    slow.write_text('#!/bin/sh\ncase "$*" in *version*) exec g++ "$@";; esac\nsleep 300\n')
    slow.chmod(0o755)
    variant = write_forward("endless", body).path if body else SOLUTION
    arguments = ["--model", tiny_problem if body else PROBLEM, "--variant", variant, "--device", "cpu" if body else "emulator"]
    compiler = {} if body else {"CXX": str(slow), "CUDA_EMULATOR_CACHE": str(tmp_path)}
    seconds = 15 if body else 30
    status, out, err = run("compare.py", *arguments, "--time-limit", seconds, "--check-only", **compiler)
    assert status == 1 and re.search(rf"no answer within the time limit of {seconds} s: {phase}", out), out + err


@pytest.mark.parametrize("given, expected", [(("find_model", SOLUTION), "--variant"), (("find_variant", PROBLEM), "--model")])
def test_files_in_one_anothers_places(given, expected):
    """Number 8."""
    name, file = given
    arguments = [str(file)] if name == "find_model" else [catalog.find_model(str(PROBLEM)), str(file)]
    with pytest.raises(catalog.CatalogError, match=rf"^{re.escape(str(file))}: defines .*: give it to {expected}"):
        getattr(catalog, name)(*arguments)


@pytest.mark.full
def test_nothing_is_timed_beside_what_fails(tiny_problem, write_forward):
    """Number 11: no baseline is made ready once nothing is left to time."""
    wrong = write_forward("wrong", "return torch.tanh(self.linear(x)) + 3").path
    status, _, err = run("compare.py", "--model", tiny_problem, "--variant", wrong, "--device", "cpu")
    assert status == 1 and "torch.compile: ready" not in err, err


@pytest.mark.full
def test_against_says_verdicts_then_and_now(tiny_problem, write_forward, tmp_path):
    """Number 12, where nothing is timed."""
    variant, file = write_forward("changing", "return torch.tanh(self.linear(x))").path, tmp_path / "start.json"
    arguments = ["--model", tiny_problem, "--variant", variant, "--device", "cpu", "--check-only"]
    status, _, err = run("compare.py", *arguments, "--json", file)
    assert status == 0, err
    variant.write_text(variant.read_text().replace("tanh", "sin"))
    status, out, _ = run("compare.py", *arguments, "--against", file, "--json", file.with_name("now.json"))
    assert status == 1 and "not timed in this run: pass then, fail now" in out
    now = document.read(file.with_name("now.json"))
    assert sum(now.against.counts.values()) == now.against.counts["not comparable"] == 1
    assert now.results[0].against[0].verdict == "not comparable"


TYPOS = {
    ("compare", "--lst"): "(did you mean --list?)",
    ("compare", "--device", "gpu"): "invalid choice: 'gpu'",
    ("compare", "--model", "alexnet_con1"): "(did you mean alexnet_conv1?)",
    ("run_all", "--models", "alexnet_con1"): "(did you mean alexnet_conv1?)",
}
TYPED = f"""
import sys
from playground.command.entry import enter
for command, *arguments in {list(TYPOS)}:
    try:
        status = enter(command, arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2 and 'torch' not in sys.modules
"""


def test_a_typo_is_answered_before_pytorch_is_imported():
    """Number 14."""
    status, _, err = run("-c", TYPED)
    assert status == 0, err
    for line, expected in zip(err.splitlines(), TYPOS.values(), strict=True):
        assert expected in line


def test_the_installed_command_has_help(monkeypatch, capsys):
    """Number 16."""
    monkeypatch.setattr(sys, "argv", ["kernel-playground", "--help"])
    assert entry.program() == 0
    assert capsys.readouterr().out.startswith("usage: kernel-playground [compare] --model PROBLEM --variant SOLUTION")


def test_a_first_build_says_what_it_prepares(monkeypatch, tmp_path):
    """Number 20: once for each, while it is being made, and when it is."""
    monkeypatch.setenv("CUDA_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(preparations, "LOOK_AGAIN", 0.01)
    told = []
    with preparations.told(told.append):
        (tmp_path / "headers" / "making-1").mkdir(parents=True)
        (tmp_path / "runtime").mkdir()
        (tmp_path / "runtime" / "made.so").touch()
        for _ in range(500):
            if len(told) == 2:
                break
            if told and (tmp_path / "headers" / "making-1").exists():
                (tmp_path / "headers" / "making-1").rmdir()
            preparations.threading.Event().wait(0.01)
    assert told == [
        "compiling PyTorch's headers, the first time only: about 25 s on two free cores",
        "PyTorch's headers are ready; compiling the file",
    ]
