"""The two commands as a user types them: exit status, what goes to stdout and stderr, and no process left behind."""

import dataclasses
import operator
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.utils import cpp_extension
from typed import run, running, wait_for

from playground import compare
from playground.catalog import ROOT
from playground.command import main, needs, signals
from playground.report import document

FREEZES = """
import torch
from torch.utils.cpp_extension import load_inline
class ModelNew(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        load_inline("freezes_{pid}", '#include <torch/extension.h>\\nint f() {{ return 1; }}', functions=["f"])
"""


FILL = """
with open({file!r}, "ab", buffering=0) as file:
    try:
        while True: file.write(bytes(4096))
    except OSError: pass
"""
RIGHT = "return torch.tanh(self.linear(x))"


@pytest.fixture(scope="module")
def right(write_forward):
    return str(write_forward("right", RIGHT).path)


@pytest.fixture(scope="module")
def wrong(write_forward):
    return str(write_forward("wrong", "return torch.sigmoid(self.linear(x))").path)


@pytest.mark.full
def test_one_that_passes(tiny_problem, right, tmp_path):
    file = tmp_path / "out.json"
    status, out, err = run("compare.py", "--model", tiny_problem, "--variant", right, "--grad", "--json", file)
    assert status == 0, err
    assert "pass" in out and "right" in out
    assert "\x1b" not in out and "build tiny" not in out, "progress and colours do not belong into a pipe's stdout"
    assert "build tiny/right" in err
    found = document.read(file)
    (result,) = found.results
    assert result.verdict == "pass" and result.ran_on == "cpu"
    assert found.environment.options["trust"] == "mine"
    assert result.speedup_proof == "by a trusted author" and result.speedup_proof in " ".join(out.split())
    assert set(result.baselines_ms) == {"eager", "compile"}
    assert result.check.max_error <= result.check.allowed
    assert result.floor_ms > 0 and result.floor_bound in ("memory", "compute")
    assert set(result.training) == {"weights", "weights_and_input"}
    assert set(result.training["weights"].baselines_ms) == {"eager", "compile"}


@pytest.mark.full
def test_one_that_fails_beside_one_that_passes(tiny_problem, right, wrong, tmp_path):
    file = tmp_path / "page.html"
    status, out, err = run("compare.py", "--model", tiny_problem, "--variant", wrong, right, "--quick", "--html", file)
    assert status == 1, err
    assert "fail" in out and "standard deviations" in out and "pass" in out
    page = file.read_text(encoding="utf-8")
    assert "standard deviations" in page and 'aria-labelledby="first-' in page, "the speed bars"


def test_a_shell_completes_names_without_waiting_for_pytorch(tmp_path):
    pytest.importorskip("argcomplete")
    line = "compare.py --model alexnet_conv1 --variant v1"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "told"), "PYTHONPROFILEIMPORTTIME": "1"}
    _, _, err = run("compare.py", **asked)
    assert (tmp_path / "told").read_text().split() == ["v1_direct"]
    assert "argcomplete" in err and not re.search(r"\| +torch$", err, re.MULTILINE)


def test_a_machine_without_the_sanitizer(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(needs.Impossible, match=r"^no compute-sanitizer on this machine: .*cuda-downloads"):
        needs.require_sanitizer([SimpleNamespace(place="cpu"), SimpleNamespace(place="cuda")], "auto", operator.call)


@pytest.mark.full
def test_a_stale_lock_is_named_and_removed(tiny_problem, right, tmp_path):
    build = tmp_path / "some_extension"
    build.mkdir()
    take = "import sys, os; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", take, str(build / "lock")], check=False)
    assert (build / "lock").exists()
    command = ["compare.py", "--model", tiny_problem, "--variant", right, "--check-only"]
    status, _, err = run(*command, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert status == 0, err
    if hasattr(cpp_extension, "FileBaton"):  # torch before 2.14.1
        assert str(build / "lock") in err
        assert not (build / "lock").exists()


def compiles(process):
    try:
        return process.name() == "cc1plus"
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.full) for each in (signal.SIGTERM, signal.SIGHUP))]
)
def test_an_interrupt_leaves_no_process(tiny_problem, write_variant, tmp_path, signal_number):
    variant = write_variant("freezes", FREEZES.format(pid=os.getpid()))
    command = ["compare.py", "--model", tiny_problem, "--variant", variant.path]
    with running(*command, TORCH_EXTENSIONS_DIR=str(tmp_path)) as driver:

        def family():
            found = psutil.Process(driver.pid).children(recursive=True)
            return found if any(map(compiles, found)) else None

        members = wait_for(family)
        driver.send_signal(signal_number)
        out, err = driver.communicate(timeout=60)
        assert driver.returncode == 128 + signal_number
        assert (out, err.splitlines()[-1]) == ("", "interrupted") and "Traceback" not in err and "error" not in err
    _, alive = psutil.wait_procs(members, timeout=10)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]


IMPORTS = """
import sys
from playground.command.entry import enter
print(enter("compare", sys.argv[1:]), "torch" in sys.modules)
"""


def test_the_driver_imports_no_pytorch(tiny_problem, right):
    given = ["--model", tiny_problem, "--variant", right, "--check-only", "--sandbox", "off"]
    _, out, err = run("-c", IMPORTS, *given)
    assert out.endswith("\n0 False\n"), out + err


TYPO = '''
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline
CUDA = """
__global__ void copy_kernel(float* y, const float* x) { y[0] = x[0] + mispelt; }
torch::Tensor copy(torch::Tensor x) {
    auto y = torch::empty_like(x);
    copy_kernel<<<1, 1>>>(y.data_ptr<float>(), x.data_ptr<float>());
    return y;
}
"""
module = load_inline("typo", "torch::Tensor copy(torch::Tensor x);", CUDA, functions=["copy"])
class ModelNew(nn.Module):
    def __init__(self, *given):
        super().__init__()
    def forward(self, x):
        return module.copy(x)
'''


def test_a_text_that_does_not_compile_is_an_error_before_its_file_runs(tiny_problem, tmp_path):
    """What is said is what the process that loads the file would say."""
    typo, file = tmp_path / "typo.py", tmp_path / "found.json"
    typo.write_text(TYPO)
    given = ["--model", tiny_problem, "--variant", typo, "--device", "emulator", "--json", file]
    status, _, err = run("compare.py", *given)
    assert status == 1 and "compile tiny/typo: error" in err
    found = document.read(file)
    assert not any(name.startswith("candidate.") for name in found.environment.requests)
    (early,), late = found.results, compare(tiny_problem, typo, device="emulator", sandbox="off")
    assert early.verdict == late.verdict == "error" and "mispelt" in early.reason
    assert (early.reason, early.details) == (late.reason, late.details)


def test_an_interrupt_while_pytorch_is_imported():
    with running("compare.py", "--model", "alexnet_conv1") as driver:
        started = lambda: [psutil.Process(driver.pid), *psutil.Process(driver.pid).children()]  # noqa: E731
        wait_for(lambda: any("libtorch" in Path(f"/proc/{each.pid}/maps").read_text() for each in started()))
        driver.send_signal(signal.SIGINT)
        assert driver.communicate(timeout=60) == ("", "interrupted\n")
        assert driver.returncode == 130


@pytest.mark.full
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_shows_and_keeps_what_is_finished(tiny_problem, wrong, write_forward, tmp_path, signal_number):
    hangs, file = write_forward("hangs", "while True: pass").path, tmp_path / "out.json"
    page = tmp_path / "out.html"
    command = ["compare.py", "--model", tiny_problem, "--variant", wrong, hangs, "--json", file, "--html", page]
    with running(*command) as driver:
        wait_for(file.exists)
        driver.send_signal(signal_number)
        out, err = driver.communicate(timeout=60)
    assert driver.returncode == 128 + signal_number and "Traceback" not in err
    assert err.splitlines()[-1] == f"interrupted; --resume {file} goes on"
    assert "wrong fail" in out and "hangs" not in out
    assert [result.variant for result in document.read(file).results] == ["wrong"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]
    assert "wrong" in page.read_text() and "hangs" not in page.read_text()


def test_an_interrupted_summary_has_a_table_of_what_is_finished(monkeypatch, capsys):
    recorded = document.read(ROOT / "results" / "nvidia-h200.json")
    cut = dataclasses.replace(recorded.environment, complete=False)
    report = dataclasses.replace(recorded, environment=cut, results=recorded.results[:1])

    def measure(tasks, options, file, resume, add, show, cluster, check):
        show(report)
        raise signals.Interrupted(signal.SIGHUP)

    monkeypatch.setattr(main, "measure", measure)
    assert main.run_all(["--device", "cpu"]) == 128 + signal.SIGHUP
    out, err = capsys.readouterr()
    assert report.results[0].variant in out and out.splitlines()[-1] == "1 passed"
    assert err.splitlines()[-1] == "interrupted"


@pytest.mark.full
def test_a_disk_that_is_full_at_the_end(tiny_problem, write_forward, small_disk):
    fill = FILL.format(file=str(small_disk / "filler"))
    fills, file = write_forward("fills", f"{fill}return torch.sigmoid(self.linear(x))").path, small_disk / "out.json"
    command = ["compare.py", "--model", tiny_problem, "--variant", fills, "--json", file, "--sandbox", "off"]
    status, out, err = run(*command)
    assert status == 2 and "fills fail" in out, err
    told = re.search(rf"--json {file}: No space left on device; what was to be written is in (\S+)", err)
    assert [result.verdict for result in document.read(told[1]).results] == ["fail"]
    Path(told[1]).unlink()


@pytest.mark.full
def test_no_room_for_what_processes_exchange(tiny_problem, write_forward, small_disk):
    """The referee's inputs do not fit; then a variant's result does not, since something else has filled the disk."""
    for size, body in ((20_000, RIGHT), (5, FILL.format(file=str(small_disk / "filler")) + RIGHT)):
        variant = write_forward(f"exchanges_{size}", body)
        command = ["compare.py", "--model", tiny_problem, "--variant", variant.path, "--set", f"batch_size={size}"]
        status, out, err = run(*command, "--device", "cpu", "--sandbox", "off", "--quick", TMPDIR=str(small_disk))
        assert status == 2, err
        reason = re.search(rf"exchanges_{size} error\n +reason +(.*)", out, re.DOTALL)[1]
        told = "".join(reason.split())  # it is wrapped, at a long path
        assert re.match(rf"noroomin{small_disk}[^,]*,whereprocessesexchangetensors:makesomethere,orsetTMPDIR", told), told


@pytest.mark.full
def test_two_runs_with_one_file(tiny_problem, wrong, write_forward, tmp_path):
    hangs, file = write_forward("hangs", "while True: pass").path, tmp_path / "out.json"
    command = ["compare.py", "--model", tiny_problem, "--json", file, "--variant"]
    with running(*command, hangs) as first:
        wait_for((tmp_path / ".out.json.lock").exists)
        status, out, err = run(*command, wrong)
        first.send_signal(signal.SIGINT)
        first.wait(60)
    assert (status, out) == (2, "") and err == f"--json {file}: another run or option writes it; name another file\n"


def test_workers_end_with_a_driver_that_is_killed(tiny_problem, write_forward):
    variant = write_forward("sleeps", "import time; time.sleep(1e6)")
    with running("compare.py", "--model", tiny_problem, "--variant", variant.path) as driver:
        workers = wait_for(psutil.Process(driver.pid).children)
        time.sleep(1)  # past the worker's first lines, which ask the kernel for this
        driver.kill()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
