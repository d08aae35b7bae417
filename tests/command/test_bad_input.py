"""Bad input, case by case: the exit status, and the first line that the user sees."""

import ast
import json
import re
import shlex
import signal
import sys

import pytest
import torch
from typed import run

from playground import packages
from playground.catalog import ROOT
from playground.command import entry

ALEXNET, POOL, SWEEP = "--model alexnet_conv1", "--model conv_pool_sigmoid_sum", "--sweep batch_size=3,4"
TINY = "--model {problem} --device cpu --quick --variant {right}"

# name -> (command line, pattern of the first line), with exit status 2; {problem} and {right} are files, {tmp} is a folder with
# FILES
COMMAND_LINES = {
    "no model": ("compare", r"compare.py: error: the following arguments are required: --model; --help lists the options"),
    "unknown option": ("compare --varaint v1", r".*unrecognized arguments: --varaint v1 \(did you mean --variant\?\)"),
    "empty argument": ("run_all ''", r"run_all\.py: error: unrecognized arguments: ; --help lists the options"),
    "no file's name": (f"compare --model {'a' * 300}", r"\[Errno 36\] File name too long: 'aaa"),
    "no such device": ("run_all --device tpu", r"run_all.py: error: argument --device: invalid choice: 'tpu'"),
    "no time": (f"compare {ALEXNET} --time-limit 0", r".*--time-limit: takes a number of seconds above 0, got '0'"),
    "time in words": (f"compare {ALEXNET} --time-limit soon", r".*takes a number of seconds above 0, got 'soon'"),
    "endless time": (f"compare {ALEXNET} --time-limit inf", r".*takes a number of seconds above 0, got 'inf'"),
    "no accuracy": (f"compare {ALEXNET} --accept 0.5", r".*--accept: takes accuracy=X, an X up to 0.01, .*; got '0.5'"),
    "too inaccurate": (f"compare {ALEXNET} --accept accuracy=1", r".*an X up to 0.01, .*got 'accuracy=1'"),
    "no precision": (f"compare {ALEXNET} --precision fp8", r".*--precision: invalid choice: 'fp8'"),
    "no standard": (f"compare {ALEXNET} --standard best", r".*--standard: invalid choice: 'best'"),
    "unknown model": (
        "compare --model nonsense",
        r"no model is called 'nonsense', and there is no such \.py file; known: .*alexnet",
    ),
    "misspelt model": ("compare --model alexnet_conv", r"no model is called 'alexnet_conv' \(did you mean alexnet_conv1\?\)"),
    "one of two models": ("run_all --models alexnet_conv1,nonsense", r"no model is called 'nonsense'"),
    "no model's name": ("run_all --models ,", r"no model is called ''"),
    "a folder": ("compare --model {tmp}", r"no model is called '.*', and there is no such \.py file"),
    "no Python file": ("compare --model {tmp}/list.json", r"no model is called '.*list\.json', and there is no such \.py file"),
    "unknown variant": (f"compare {ALEXNET} --variant v9", r"no variant of alexnet_conv1 is called 'v9'.*v1_direct"),
    "unknown before a known one": (f"compare {TINY} --variant v9", r"no variant of tiny is called 'v9'"),
    "unknown after a known one": (f"compare {TINY} no_such.py", r"no variant of tiny is called 'no_such\.py'"),
    "misspelt variant": (f"compare {ALEXNET} --variant v3_tild", r"no variant .* 'v3_tild' \(did you mean v3_tiled\?\)"),
    "no variant of it": ("compare --model {problem}", r"tiny has no variants here; name a solution file with --variant FILE"),
    "set without value": (f"compare {ALEXNET} --set batch_size", r"--set takes NAME=VALUE, for example batch_size=4; got"),
    "set to a word": (f"compare {ALEXNET} --set batch_size=many", r"--set batch_size=many: 'many' is not a Python literal"),
    "unknown constant": (
        f"compare {TINY} --set depth=3",
        r"--set: tiny has no constant called depth; it has: batch_size, features, outputs",
    ),
    "set twice": (
        f"compare {TINY} --set features=3 --set features=4",
        r"--set features is given twice; for several values use",
    ),
    "swept twice": (f"compare {TINY} --sweep features=3 --sweep features=4", r"--sweep features is given twice; name all its"),
    "set and swept": (f"compare {TINY} --set features=3 --sweep features=3,4", r"--set and --sweep both name features: leave"),
    "sweep of nothing": (f"compare {ALEXNET} --sweep batch_size", r"--sweep .*batch_size"),
    "sweep of words": (f"compare {ALEXNET} --sweep batch_size=a,b", r"--sweep batch_size=a,b: expected Python literals"),
    "sweep of what is not": (f"compare {TINY} --sweep depth=3,4", r"--sweep: tiny has no constant called depth"),
    "plot of no sweep": (f"compare {TINY} --plot {{tmp}}/a.svg", r"--plot draws a sweep: name what is to be swept"),
    "plot of no format": (
        f"compare {TINY} {SWEEP} --plot {{tmp}}/a.bmp",
        r"--plot .*a\.bmp: the name has to end with one of \.svg",
    ),
    "json in no folder": (
        f"compare {TINY} --json {{tmp}}/none/x.json",
        r"--json .*x\.json: cannot be written: there is no folder .*none; make it first",
    ),
    "json in a folder's place": (f"compare {TINY} --json {{tmp}}", r"--json .*: cannot be written: it is a folder"),
    "json where none can be": (f"compare {TINY} --json /proc/nowhere/a.json", r"--json /proc/nowhere/a\.json: cannot be writ"),
    "json below a file": (f"compare {TINY} --json {{problem}}/a.json", r"--json .*tiny\.py/a\.json: cannot be written: "),
    "page where none can be": (f"compare {TINY} --html /proc/nowhere/a.html", r"--html /proc/nowhere/a\.html: cannot be writ"),
    "plot where none can be": (
        f"compare {TINY} {SWEEP} --plot /proc/nowhere/a.svg",
        r"--plot /proc/nowhere/a\.svg: cannot be writ",
    ),
    "page to stdout": (f"compare {TINY} --html -", r"--html -: only --json goes to standard output; name a file"),
    "one file for two": (f"compare {TINY} --json {{tmp}}/a --html {{tmp}}/a", r"--html .*/a: another run or"),
    "resume of nothing": (f"compare {TINY} --resume {{tmp}}/none.json", r"--resume .*none\.json: No such file"),
    "resume of no JSON": (f"compare {TINY} --resume {{problem}}", r"--resume .*tiny\.py: not JSON"),
    "resume of a device": (f"compare {TINY} --resume /dev/zero", r"--resume /dev/zero: a device, not a file"),
    "an option of the other": ("run_all --variant v1", r".*unrecognized arguments: --variant v1 \(compare\.py has it\)"),
    "against nothing": (f"compare {TINY} --against {{tmp}}/none.json", r"--against .*none\.json: No such file"),
    "against no results": (
        f"compare {TINY} --against {{tmp}}/list.json",
        r"--against .*list\.json: document: expected an object",
    ),
    "a list of three": ("compare --suite {tmp}/three.json", r"--suite .*three\.json: entry 0 names no problem and solution"),
    "a watch keeps no files": ("compare --model {problem} --watch --json {tmp}/a.json", r".*--watch.*leave out --json"),
    "no suite": ("compare --suite {tmp}/none.json", r".*none\.json"),
    "suite and model": (
        "compare --suite {tmp} --model a",
        r".*--suite names its problems and solutions itself: leave out --mo",
    ),
    "solutions alone": ("compare --model a --solutions {tmp}", r".*--solutions goes with --suite"),
    "no variant's name": ("compare --new alexnet_conv1 Fast", r"a variant is called v<N>_<idea> or cpu_<idea>"),
    "a variant's name in capitals": ("compare --new alexnet_conv1 v9_Tiles", r"a variant is called v<N>_<idea> or cpu_<idea>"),
    "a variant's name with a folder": ("compare --new alexnet_conv1 v9_../../x", r"a variant is called v<N>_<idea>"),
    "a variant's name that claims": ("compare --new alexnet_conv1 v9_fast_tiles", r".*idea is, not how good it is: fast"),
    "a variant of nobody's": ("compare --new nonsense v2_tiles", r"no model is called 'nonsense'"),
    "a variant that is there": ("compare --new alexnet_conv1 v1_direct", r".*is there already; nothing was written"),
    "a taken number": ("compare --new alexnet_conv1 v1_again", r"v1 is taken by v1_direct; the next number is v\d"),
    "explain nobody": ("compare --explain v3_box", r".*\(did you mean conv_pool_sigmoid_sum/v3_box_sums\?\)"),
    "one of several": ("compare --explain v4_tensor_core", r"there are several variants called 'v4_tensor_core'; name one"),
    "explain and time": (
        "compare --explain v3_box_sums --quick",
        r".*--explain VARIANT judges and times nothing: leave out --qu",
    ),
    "a copy of nothing": ("compare --copy nonsense", r"no variant is called 'nonsense'"),
    "new and timed": ("compare --new alexnet_conv1 v9_x --json x --set a=1", r".*times nothing: leave out --set, --json"),
    "one of two to diff": ("compare --diff v1_direct", r".*expected 2 arguments"),
    "explain and diff": ("compare --explain v1_direct --diff a b", r".*not allowed with argument --explain"),
    "suite and more": ("compare --suite x --set n=1 --model y", r".*leave out --model, --set"),
    "suite and explain": ("compare --suite x --explain", r".*leave out --explain"),
    "against no JSON": (f"compare {TINY} --against {{problem}}", r"--against .*tiny\.py: not JSON"),
    "diff with nobody": ("compare --diff v3_box_sums v3_nothing", r"no variant is called 'v3_nothing'"),
    "sanitize on the CPU": (
        f"compare {ALEXNET} --device cpu --sanitize",
        r"--sanitize looks at kernels on a GPU, and with --device cpu none of these variants runs there",
    ),
    "sanitize under the emulator": (
        f"compare {ALEXNET} --device emulator --sanitize",
        r"--sanitize .* with --device emulator none of these .* \(the emulator finds such mistakes by itself\)",
    ),
    "debug on the CPU": (
        f"compare {ALEXNET} --device cpu --debug",
        r"--debug is for what runs under the emulator.*add --device emu",
    ),
    "nothing to run": (f"compare {ALEXNET} --variant v1_direct --device cpu", r"none of these variants runs on --device cpu"),
}

# name -> (environment, pattern of the first line)
MACHINES = {
    "no home": (
        {"HOME": "/proc/1", "XDG_CACHE_HOME": None, "TORCH_EXTENSIONS_DIR": None},
        r"/proc/1/\.cache/.*, where PyTorch's builds go, cannot be writ",
    ),
    "no place for builds": (
        {"TORCH_EXTENSIONS_DIR": "{problem}"},
        r".*tiny\.py, .* \(File exists\): set TORCH_EXTENSIONS_DIR to a f",
    ),
    "no compiler": ({"CXX": "/nowhere/c++"}, r"no C\+\+ compiler: CXX is '/nowhere/c\+\+', which does not run: export CXX="),
    "nothing on the path": ({"CXX": "", "PATH": "/nowhere"}, r"no C\+\+ compiler: CXX is '', which does not run"),
}

MODEL = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + x\n"
INPUTS = "def get_inputs():\n    return [torch.rand(n)]\ndef get_init_inputs():\n    return []\nn = 4\n"
# name -> (the problem's text, more arguments, pattern of the first line); all end with status 2 before anything is built
PROBLEMS = {
    "no_python": ("class Model(\n", "", r"FILE:1: SyntaxError: '\(' was never closed"),
    "no_text": ("\0", "", r"FILE: SyntaxError: source code string cannot contain null bytes"),
    "no_model": ("import torch\n" + INPUTS, "", r"FILE: .*does not define Model"),
    "no_inputs": (MODEL, "", r"FILE: .*does not define get_inputs, get_init_inputs"),
    "missing_import": ("import no_such_module\n", "", r"FILE:1: ModuleNotFoundError: No module named 'no_such_module'"),
    "inputs_raise": (MODEL + INPUTS.replace("return [torch", "raise ValueError('no') #"), "", r"FILE:6: ValueError: no"),
    "inputs_are_no_list": (MODEL + INPUTS.replace("[torch.rand(n)]", "0"), "", r"FILE: TypeError: get_inputs must ret"),
    "forward_raises": (MODEL.replace("x + x", "x @ x.T.T.nothing") + INPUTS, "", r"FILE:4: AttributeError: "),
    "exits": (MODEL + INPUTS + "import sys; sys.exit(3)\n", "", r"FILE:\d+: the file called sys\.exit\(3\)"),
    "crashes": (MODEL + INPUTS + "import ctypes; ctypes.string_at(0)\n", "", r"FILE: crashed \(SIGSEGV in <module>, FILE:10\)"),
    "hangs": (MODEL + INPUTS + "while True: pass\n", "--time-limit 8", r"FILE: no answer within the time limit of 8 s"),
    "negative": (
        MODEL + INPUTS,
        "--set n=-3",
        r"FILE:6: RuntimeError: Trying to create tensor with negative dim.* \(with n=-3\)",
    ),
    "half": (MODEL + INPUTS, "--set n=2.5", r"FILE:6: TypeError: rand\(\).* \(with n=2\.5\)"),
    "huge": (MODEL + INPUTS, f"--set n={10**15}", r"FILE:?\d*: out of memory: .*\(with n=1000000000000000\)"),
}

BUILDS = """
import torch
from torch.utils.cpp_extension import load_inline

CPP = '''
int f(int x) {
    return x + undeclared;
}
'''

class ModelNew(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        load_inline("bad_input", CPP, functions=[], no_implicit_headers=True)
"""
# name -> (body of forward or whole file, patterns of the reason and of the details' first line); the verdict is an error
VARIANTS = {
    "v_syntax": ("class ModelNew(\n", r"FILE:1: SyntaxError: ", r"FILE:1: SyntaxError: '\(' was never closed"),
    "v_nothing": ("import torch\n", r"v_nothing\.py does not define ModelNew", None),
    "v_imports": ("import no_such_module\n", r"ModuleNotFoundError: No module named", r"FILE:1: in <module>"),
    "v_compiles_not": (BUILDS, r"does not compile: FILE:7: error: .*undeclared", r" *7 \|     return x \+ undeclared;"),
    "v_raises": ("raise ValueError('no such luck')", r"ValueError: no such luck", r"FILE:\d+: in forward"),
    "v_exits": ("import sys; sys.exit(3)", r"the file called sys\.exit\(3\)", r"FILE:\d+: in forward"),
    "v_ends": ("import os; os._exit(0)", r"ended the process \(exit status 0\)", None),
    "v_crashes": ("import ctypes; ctypes.string_at(0)", r"crashed \(SIGSEGV in forward, FILE:\d+\)", r"Fatal Python error"),
    "v_makes_none": ("import torch\ndef ModelNew(*sizes): pass\n", r"TypeError: ModelNew must make a torch\.nn\.Mod", None),
    "v_has_no_text": (
        "class NoText(Exception):\n    def __str__(self):\n        return 1 / 0\nraise NoText()",
        r"NoText, whose text raises ZeroDivisionError",
        None,
    ),
    "v_grabs": ("return torch.empty(1 << 50) + x", r"out of memory: ", r"FILE:\d+: in forward"),
    "v_returns_none": ("return None", r"FILE:\d+: forward returns None", None),
}


@pytest.fixture
def filled(tiny_problem, write_forward, tmp_path):
    """filled(text) -> the text with the names of files in it."""
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "three.json").write_text('[["a.py", "b.py", "c.py"]]')
    right = write_forward("right", "return torch.tanh(self.linear(x))").path
    return lambda text: text.format(problem=tiny_problem, right=right, tmp=tmp_path)


@pytest.fixture
def as_before(monkeypatch, tmp_path):
    """What a command does with signals ends with the test, and it finds no locks of others."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def require(pattern, err):
    assert "Traceback" not in err
    first = err.splitlines()[0]
    assert re.match(pattern, first), first


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_command_line(name, filled, as_before, capsys, compare):
    command, pattern = COMMAND_LINES[name]
    which, *arguments = shlex.split(filled(command))
    status, out, err = compare(*arguments, command=lambda given: entry.enter(which, given))
    assert (status, out) == (2, "")
    require(pattern, err)
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_machine_without_a_gpu(as_before, compare):
    status, _, err = compare(*ALEXNET.split(), "--device", "cuda")
    assert status == 2 and re.match(r"(torch .* is built without CUDA|no NVIDIA driver|no GPU)", err)


@pytest.mark.full
@pytest.mark.parametrize("name", MACHINES)
def test_a_machine(name, filled):
    environment, pattern = MACHINES[name]
    given = {key: value and filled(value) for key, value in environment.items()}
    status, out, err = run("compare.py", *filled(TINY).split(), **given)
    assert (status, out) == (2, "")
    require(pattern, err)
    assert len(err.splitlines()) == 1


def test_a_place_for_the_emulators_builds(filled, monkeypatch, as_before, compare):
    monkeypatch.setenv("CUDA_EMULATOR_CACHE", filled("{problem}/below"))
    status, _, err = compare(*ALEXNET.split(), "--variant", "v1_direct", "--device", "emulator")
    said = r".*below, where the emulator's builds go, cannot be written \(Not a directory\): set CUDA_EMULATOR_CACHE"
    assert status == 2 and re.match(said, err)


def test_a_python_that_is_too_old(monkeypatch):
    """And it can read all that is imported before it is told so."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert packages.missing().startswith(f"{sys.executable} is Python 3.10, and this needs 3.11 or newer: make a virtual")
    for name in ("__init__", "packages", "command/__init__", "command/entry", "command/signals"):
        path = ROOT / "playground" / f"{name}.py"
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 6))


@pytest.mark.full
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem(name, filled, tmp_path):
    text, arguments, pattern = PROBLEMS[name]
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    command = f"compare.py {filled('--variant {right} --device cpu')} --model {file} {arguments}"
    status, out, err = run(*command.split(), TORCH_EXTENSIONS_DIR=str(tmp_path / "builds"))
    assert (status, out) == (2, "") and "build" not in err
    require(pattern.replace("FILE", re.escape(str(file))), err)
    assert len(err.splitlines()) == 1


def test_a_problem_that_raises_is_at_fault_itself(filled, tmp_path):
    """One of the above, in the default tier."""
    test_a_problem("negative", filled, tmp_path)


@pytest.fixture(scope="module")
def judged(tiny_problem, write_forward, write_variant):
    """One run of all of VARIANTS: ({name: file}, {name: result}, what was printed)."""
    files = {}
    for name, (text, *_) in VARIANTS.items():
        write = (
            write_variant if "ModelNew" in text or text.startswith("import torch") or "such_module" in text else write_forward
        )
        files[name] = write(name, text).path
    options = ["--device", "cpu", "--quick", "--time-limit", "30", "--json", "-"]
    status, out, err = run("compare.py", "--model", tiny_problem, "--variant", *files.values(), *options)
    assert status == 1, err
    return files, {result["variant"]: result for result in json.loads(out)["results"]}, err


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant(name, judged):
    files, results, printed = judged
    _, reason, details = (each and each.replace("FILE", re.escape(str(files[name]))) for each in VARIANTS[name])
    result = results[name]
    assert result["verdict"] == "error" and result["time_ms"] is None
    assert re.match(reason, result["reason"]), result["reason"]
    assert f"{name} error" in printed, "with --json - the tables go to stderr"
    assert "playground/worker" not in result["details"], result["details"]
    if details:
        assert re.match(details, result["details"].splitlines()[0]), result["details"]
