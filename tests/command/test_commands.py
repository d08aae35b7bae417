"""The two commands as a user types them: exit status, what goes to stdout and stderr, and no process left behind."""

import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.utils import cpp_extension

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


def run(*arguments, **environment):
    """(exit status, stdout, stderr) of a command."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def right(write_forward):
    return str(write_forward("right", "return torch.tanh(self.linear(x))").path)


@pytest.fixture(scope="module")
def wrong(write_forward):
    return str(write_forward("wrong", "return torch.sigmoid(self.linear(x))").path)


@pytest.mark.full
def test_one_that_passes(tiny_problem, right, tmp_path):
    file = tmp_path / "out.json"
    status, out, err = run("compare.py", "--model", str(tiny_problem), "--variant", right, "--json", str(file))
    assert status == 0, err
    assert "pass" in out and "right" in out
    assert "\x1b" not in out and "build tiny" not in out, "progress and colours do not belong into a pipe's stdout"
    assert "build tiny/right" in err
    found = document.read(file)
    (result,) = found["results"]
    assert result["verdict"] == "pass" and result["ran_on"] == "cpu"
    said = "not proved against deceit" if found["environment"]["sandbox"].startswith("off") else None
    assert result["speedup_proof"] == said and (said or "pass") in " ".join(out.split())
    assert set(result["baselines_ms"]) == {"eager", "compile"}
    assert result["check"]["max_error"] <= result["check"]["allowed"]
    assert result["floor_ms"] > 0 and result["floor_bound"] in ("memory", "compute")
    assert json.loads(file.read_text())["schema"] == 1


@pytest.mark.full
def test_one_that_fails_beside_one_that_passes(tiny_problem, right, wrong, tmp_path):
    file = tmp_path / "page.html"
    status, out, err = run(
        "compare.py", "--model", str(tiny_problem), "--variant", wrong, right, "--quick", "--html", str(file)
    )
    assert status == 1, err
    assert "fail" in out and "of its spread" in out and "pass" in out
    page = file.read_text(encoding="utf-8")
    assert "of its spread" in page and 'aria-labelledby="first-' in page, "the speed bars"


@pytest.mark.full
def test_training_is_timed_with_grad(tiny_problem, right, tmp_path):
    file = tmp_path / "out.json"
    status, _, err = run("compare.py", "--model", str(tiny_problem), "--variant", right, "--grad", "--json", str(file))
    assert status == 0, err
    (result,) = document.read(file)["results"]
    assert set(result["training"]) == {"weights", "weights_and_input"}
    assert set(result["training"]["weights"]["baselines_ms"]) == {"eager", "compile"}


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


def test_a_machine_without_a_compiler(tiny_problem, right, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    status, out, err = run("compare.py", "--model", str(tiny_problem), "--variant", right, PATH=str(tmp_path), CXX="")
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1 and "compiler" in err


@pytest.mark.full
def test_a_stale_lock_is_named_and_removed(tiny_problem, right, tmp_path):
    build = tmp_path / "some_extension"
    build.mkdir()
    take = "import sys, os; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", take, str(build / "lock")], check=False)
    assert (build / "lock").exists()
    command = ["compare.py", "--model", str(tiny_problem), "--variant", right]
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
    command = [sys.executable, "compare.py", "--model", str(tiny_problem), "--variant", str(variant.path)]
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as driver:
        family = []
        deadline = time.monotonic() + 60
        while not any(map(compiles, family)):
            assert time.monotonic() < deadline, "the compiler never ran"
            time.sleep(0.2)
            family = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(signal_number)
        out, err = driver.communicate(timeout=60)
        assert driver.returncode == 128 + signal_number
        last = err.decode().splitlines()[-1]
        assert (out, last) == (b"", "interrupted") and b"Traceback" not in err and b"error" not in err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]


def test_an_interrupt_while_pytorch_is_imported():
    command = [sys.executable, "compare.py", "--model", "alexnet_conv1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as driver:
        maps, deadline = Path(f"/proc/{driver.pid}/maps"), time.monotonic() + 60
        while "libtorch" not in maps.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        driver.send_signal(signal.SIGINT)
        assert driver.communicate(timeout=60) == (b"", b"interrupted\n")
        assert driver.returncode == 130


@pytest.mark.full
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_shows_and_keeps_what_is_finished(tiny_problem, wrong, write_forward, tmp_path, signal_number):
    hangs, file = write_forward("hangs", "while True: pass").path, tmp_path / "out.json"
    page = tmp_path / "out.html"
    command = [sys.executable, "compare.py", "--model", str(tiny_problem), "--variant", wrong, str(hangs)]
    command += ["--json", str(file), "--html", str(page)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        deadline = time.monotonic() + 120
        while not file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        driver.send_signal(signal_number)
        out, err = driver.communicate(timeout=60)
    assert driver.returncode == 128 + signal_number and "Traceback" not in err
    assert err.splitlines()[-1] == f"interrupted; --resume {file} goes on"
    assert "wrong fail" in out and "hangs" not in out
    assert [result["variant"] for result in document.read(file)["results"]] == ["wrong"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "out.json"]
    assert "wrong" in page.read_text() and "hangs" not in page.read_text()


def test_an_interrupted_summary_has_a_table_of_what_is_finished(monkeypatch, capsys):
    results = [json.loads((ROOT / "results" / "nvidia-h200.json").read_text())]
    results[0]["environment"]["complete"] = False
    del results[0]["results"][1:]

    def measure(tasks, options, file, resume, add, show, cluster):
        show(results[0])
        raise signals.Interrupted(signal.SIGHUP)

    monkeypatch.setattr(main, "measure", measure)
    assert main.run_all(["--device", "cpu"]) == 128 + signal.SIGHUP
    out, err = capsys.readouterr()
    assert results[0]["results"][0]["variant"] in out and out.splitlines()[-1] == "1 passed"
    assert err.splitlines()[-1] == "interrupted"


@pytest.mark.full
def test_a_disk_that_is_full_at_the_end(tiny_problem, write_forward, small_disk):
    fill = f"""
with open({str(small_disk / "filler")!r}, "ab", buffering=0) as file:
    try:
        while True: file.write(bytes(4096))
    except OSError: pass
return torch.sigmoid(self.linear(x))"""
    fills, file = write_forward("fills", fill).path, small_disk / "out.json"
    command = ["compare.py", "--model", str(tiny_problem), "--variant", str(fills), "--json", str(file), "--sandbox", "off"]
    status, out, err = run(*command)
    assert status == 2 and "fills fail" in out, err
    told = re.search(rf"--json {file}: No space left on device; what was to be written is in (\S+)", err)
    assert [result["verdict"] for result in document.read(told[1])["results"]] == ["fail"]
    Path(told[1]).unlink()


@pytest.mark.full
def test_no_room_for_what_processes_exchange(tiny_problem, write_forward, small_disk):
    """The referee's inputs do not fit; then a variant's result does not, since something else has filled the disk."""
    fill = f"""
with open({str(small_disk / "filler")!r}, "ab", buffering=0) as file:
    try:
        while True: file.write(bytes(4096))
    except OSError: pass
return torch.tanh(self.linear(x))"""
    for size, body in ((20_000, "return torch.tanh(self.linear(x))"), (5, fill)):
        variant = write_forward(f"exchanges_{size}", body)
        command = ["compare.py", "--model", str(tiny_problem), "--variant", str(variant.path), "--set", f"batch_size={size}"]
        status, out, err = run(*command, "--device", "cpu", "--sandbox", "off", "--quick", TMPDIR=str(small_disk))
        assert status == 2, err
        reason = re.search(rf"exchanges_{size} error\n +reason +(.*)", out, re.DOTALL)[1]
        told = "".join(reason.split())  # it is wrapped, at a long path
        assert re.match(rf"noroomin{small_disk}[^,]*,whereprocessesexchangetensors:makesomethere,orsetTMPDIR", told), told


@pytest.mark.full
def test_two_runs_with_one_file(tiny_problem, wrong, write_forward, tmp_path):
    hangs, file = write_forward("hangs", "while True: pass").path, tmp_path / "out.json"
    command = [sys.executable, "compare.py", "--model", str(tiny_problem), "--json", str(file), "--variant"]
    with subprocess.Popen([*command, str(hangs)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        while not (tmp_path / ".out.json.lock").exists():
            assert first.poll() is None
            time.sleep(0.1)
        status, out, err = run(*command[1:], wrong)
        first.send_signal(signal.SIGINT)
        first.wait(60)
    assert (status, out) == (2, "") and err == f"--json {file}: another run or option writes it; name another file\n"


def test_workers_end_with_a_driver_that_is_killed(tiny_problem, write_forward):
    variant = write_forward("sleeps", "import time; time.sleep(1e6)")
    command = [sys.executable, "compare.py", "--model", str(tiny_problem), "--variant", str(variant.path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        workers = []
        deadline = time.monotonic() + 60
        while not workers and time.monotonic() < deadline:
            time.sleep(0.2)
            workers = psutil.Process(driver.pid).children()
        time.sleep(1)  # past the worker's first lines, which ask the kernel for this
        driver.kill()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.full
@pytest.mark.skipif(shutil.which("script") is None, reason="needs util-linux's script for a terminal")
def test_colours_only_on_a_terminal(tiny_problem, right):
    command = f"{sys.executable} compare.py --model {tiny_problem} --variant {right}"
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0
    assert "\x1b[" in done.stdout


@pytest.mark.full
def test_pip_installs_the_two_commands(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--prefix", str(tmp_path)]
    subprocess.run([*install, "-e", str(ROOT)], check=True)
    program, environment = tmp_path / "bin" / "kernel-playground", {**os.environ, "PYTHONPATH": str(ROOT)}
    for words, status in ((["compare", "--explain", "conv_pool_sigmoid_sum/v3_box_sums"], 0), (["run", "--help"], 0), ([], 2)):
        done = subprocess.run([program, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
