"""The server that forks workers: they are as new processes are, each environment has its own, and it ends with the driver."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typed import wait_for

from playground.catalog import ROOT
from playground.worker import UNTIMED, WorkerFailure, WorkerProcess, prepare
from playground.worker.ahead import AHEAD


def is_forked(worker):
    """By a server, which is its parent."""
    return psutil.Process(worker.pid).ppid() != os.getpid()


@pytest.fixture
def told(tiny_problem, write_variant):
    """told(worker, expression): what a variant's file reads in the worker, as JSON."""

    def told(worker, expression):
        text = f"import json, os, random, sys, numpy, torch\nraise RuntimeError(json.dumps({expression}))\nModelNew = None"
        path = write_variant("tells", text).path
        original = {"problem": str(tiny_problem), "variant": str(path), "settings": {}, "place": "cpu", "weights": None}
        with pytest.raises(WorkerFailure) as failure:
            worker.ask("load", seed=0, **original)
        return json.loads(str(failure.value).partition("RuntimeError: ")[2])

    return told


@pytest.fixture
def forked():
    with WorkerProcess("candidate", 60, UNTIMED) as worker:
        assert is_forked(worker)
        yield worker


def test_another_one_starts_in_a_moment(forked):
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        with WorkerProcess("candidate", 60, UNTIMED) as worker, pytest.raises(WorkerFailure, match="AttributeError"):
            worker.ask("nonsense")
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5, seconds  # a new process imports PyTorch, which takes two


def test_each_environment_has_its_own_server():
    """Of a forked process /proc tells the environment that its server was started with, as libgomp has read it."""
    for policy in ("PASSIVE", "ACTIVE"):
        with WorkerProcess("candidate", 60, {"OMP_WAIT_POLICY": policy}) as worker:
            assert is_forked(worker)
            assert psutil.Process(worker.pid).environ()["OMP_WAIT_POLICY"] == policy


def test_it_stands_where_the_driver_does(told, tmp_path, monkeypatch, forked):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLAYGROUND_TEST", "later")
    with WorkerProcess("candidate", 60, UNTIMED) as worker:
        there = told(worker, "[os.getcwd(), os.environ.get('PLAYGROUND_TEST'), sys.argv[6]]")
        assert there == [str(tmp_path), "later", "candidate"]
        assert psutil.Process(worker.pid).ppid() == psutil.Process(forked.pid).ppid() != os.getpid()


def test_it_has_nothing_of_other_workers_open(told, forked):
    with WorkerProcess("candidate", 60, UNTIMED) as worker:
        told(worker, "0")
        files = [str(entry.readlink()) for entry in Path(f"/proc/{worker.pid}/fd").iterdir()]
        assert not [file for file in files if file.startswith("socket:")]
        assert sum(file.startswith("pipe:") for file in files) == 2, files


def test_its_generators_are_its_own(told):
    found = []
    for _ in range(2):
        with WorkerProcess("candidate", 60, UNTIMED) as worker:
            found.append(told(worker, "[torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand()]"))
    assert all(one != another for one, another in zip(*found, strict=True)), found


def test_it_computes_on_several_threads(told, forked):
    """A thread pool of OpenMP that was there before a fork would never answer."""
    product = "(torch.ones(1 << 20) @ torch.ones(1 << 20)).item() + (numpy.ones((300, 300)) @ numpy.ones((300, 300)))[0, 0]"
    assert told(forked, product) == (1 << 20) + 300


def test_where_a_thread_is_left_workers_are_new_processes(told, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'playground.worker.server' in sys.orig_argv:\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    with WorkerProcess("candidate", 60, {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}) as worker:
        assert not is_forked(worker)
        assert told(worker, "6 * 7") == 42


def test_it_imports_ahead_and_still_forks(told):
    def has_all():
        with WorkerProcess("candidate", 60, UNTIMED) as worker:
            assert is_forked(worker)
            return told(worker, f"all(module in sys.modules for module in {AHEAD})")

    prepare(UNTIMED, ahead=True)
    wait_for(has_all)


DRIVER = """
import time
from playground.worker import UNTIMED, WorkerProcess
worker = WorkerProcess("candidate", 60, UNTIMED)
print(worker.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(1e6)", "pass"])
def test_it_ends_with_the_driver(then):
    command = [sys.executable, "-c", DRIVER.format(then=then)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver:
        worker = int(driver.stdout.readline())
        family = [psutil.Process(worker)]
        family.append(family[0].parent())
        if then != "pass":
            driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_for(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family), 10)
