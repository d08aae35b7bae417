"""A suite on a cluster, without a GPU: workers share pairs, one dies, a scheduler is elsewhere, the user interrupts."""

import contextlib
import importlib.util
import json
import os
import signal
import socket

import pytest
from typed import run, running, wait_for

from playground import suite
from playground.command import main
from playground.driver import plan
from playground.driver.measurement import measure
from playground.driver.task import Options
from playground.report import document

pytestmark = pytest.mark.usefixtures("cluster")

RIGHT = "return torch.tanh(self.linear(x))"
# Kills the Dask worker, whose child each judged process is: `{mark}` is made, and holds it back where it is there.
KILLS = """
import os, signal
try:
    os.mkdir({mark!r} + str({each}))
    os.kill(os.getppid(), signal.SIGKILL)
except FileExistsError:
    pass
return torch.tanh(self.linear(x))
"""
HANGS = "import time\ntime.sleep(600)"


@pytest.fixture
def pairs(tmp_path, tiny_problem, write_forward):
    """pairs(name=body of forward, ...) -> the JSON list of pairs of the tiny problem."""

    def write(**bodies):
        listed = [{"problem": str(tiny_problem), "solution": str(write_forward(*each).path)} for each in bodies.items()]
        (tmp_path / "pairs.json").write_text(json.dumps(listed))
        return tmp_path / "pairs.json"

    return write


def measured(connection, listed):
    options = Options(device="cpu", quick=True, check_only=True)
    return measure(plan.of_suite(suite.read(listed), options), options, cluster=connection)


@pytest.fixture(scope="module")
def cluster():
    return pytest.importorskip("playground.driver.cluster")


@pytest.fixture(scope="module")
def two_workers(cluster):
    with cluster.connected(cluster.LOCAL, without_gpu=2) as connection:
        yield connection


@pytest.mark.full
def test_workers_share_the_pairs_and_a_wrong_one_names_the_users_file(two_workers, pairs):
    listed = pairs(a=RIGHT, b=RIGHT, c=RIGHT, wrong="return torch.tanh(self.linear(y))")
    report = measured(two_workers, listed)
    verdicts = [row.verdict for row in report.results]
    assert verdicts == ["pass", "pass", "pass", "error"] and report.environment.complete
    assert {row.device.worker for row in report.results} == {"CPU 0", "CPU 1"}
    assert len({row.device.probe_seed for row in report.results}) == 4
    assert json.loads(listed.read_text())[-1]["solution"] in report.results[-1].details
    assert report.environment.lost_workers == 0


@pytest.mark.full
def test_the_pair_of_a_lost_worker_is_tried_again(two_workers, pairs, tmp_path, capsys):
    before = two_workers.lost
    report = measured(two_workers, pairs(kills_once=KILLS.format(mark=str(tmp_path / "killed"), each=0), right=RIGHT))
    assert [row.verdict for row in report.results] == ["pass", "pass"] and report.environment.complete
    assert two_workers.lost == before + 1 and "a worker was lost" in capsys.readouterr().err


@pytest.mark.full
def test_a_pair_that_ends_every_worker_is_reported_and_the_run_has_the_rest(two_workers, pairs, tmp_path):
    always = KILLS.format(mark=str(tmp_path / "killed"), each="os.getppid()")
    report = measured(two_workers, pairs(kills_always=always, right=RIGHT))
    lost, right = report.results
    assert right.verdict == "pass"
    assert lost.verdict == "error" and "each worker that judged it was lost (3 of them)" in lost.reason


def compare(listed, cluster_at, file):
    """The command line of a run on a cluster that only checks."""
    options = ["--check-only", "--sandbox", "off", "--json", str(file)]
    return "compare.py", "--suite", str(listed), "--cluster", cluster_at, *options


@pytest.mark.full
def test_a_running_scheduler(pairs, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    listed, file = pairs(a=RIGHT, b=RIGHT), tmp_path / "out.json"
    scheduler = ["-m", "dask", "scheduler", "--host", address, "--no-dashboard"]
    with running(*scheduler), running("-m", "dask", "worker", address, "--nthreads", "2", "--name", "there", "--no-dashboard"):
        wait_for(lambda: listens(address))
        status, out, err = run(*compare(listed, address, file))
    assert status == 0, err
    assert "2 pairs: 2 pass" in out
    assert {row.device.worker for row in document.read(file).results} == {"there"}


def listens(address):
    host, _, port = address.removeprefix("tcp://").partition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True


@pytest.mark.full
def test_an_interrupt_keeps_what_is_finished(pairs, tmp_path):
    listed, file = pairs(right=RIGHT, hangs=HANGS), tmp_path / "out.json"
    with running(*compare(listed, "local", file)) as process:
        wait_for(file.exists)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert f"interrupted; --resume {file} goes on" in err and "Traceback" not in err
    assert "1 pass" in out
    assert [row.verdict for row in document.read(file).results] == ["pass"]


def test_no_scheduler_at_the_address(cluster, pairs, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "ANSWER_WITHIN", 1)
    assert main.compare(["--suite", str(pairs(a=RIGHT)), "--cluster", "tcp://127.0.0.1:9"]) == 2
    assert "--cluster tcp://127.0.0.1:9: no scheduler answers there" in capsys.readouterr().err


def test_without_dask_it_is_said_how_to_get_it(pairs, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main.compare(["--suite", str(pairs(a=RIGHT)), "--cluster", "local"]) == 2
    assert "--cluster needs dask and distributed: python -m pip install dask distributed" in capsys.readouterr().err


def test_each_worker_has_whole_cores_of_its_own(cluster, monkeypatch, tmp_path):
    """Eight processors are four cores of two packages; 0 and 4 are hyperthreads of one core."""
    for processor in range(8):
        (tmp_path / str(processor)).mkdir()
        (tmp_path / str(processor) / "physical_package_id").write_text(str(processor % 4 // 2))
        (tmp_path / str(processor) / "core_id").write_text(str(processor % 2))
    monkeypatch.setattr(cluster, "TOPOLOGY", str(tmp_path / "{}"))
    monkeypatch.setattr(cluster.os, "sched_getaffinity", lambda _: set(range(8)))
    assert cluster.shares(2) == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert cluster.shares(4) == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert cluster.shares(5) == [set(range(8))] * 5, "fewer cores than workers"
