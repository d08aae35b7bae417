"""The commands under torchrun, without a GPU: ranks share the work, one of them dies, and a run goes on where it ended."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from playground.catalog import ROOT
from playground.report import document
from playground.worker import sandbox

pytestmark = pytest.mark.full

# Kills the process of its rank that does the work, in the second call of a process: the first is that of the build.
KILLS = """
import os, signal
if not hasattr(self, "called"):
    self.called = 0
self.called += 1
if self.called == 2 and {condition}:
    os.kill(os.getppid(), signal.SIGKILL)
return torch.tanh(self.linear(x))
"""


# A process that judges has as forebears the rank's worker, the rank's process, and the host's torchrun. In its second call,
# when `until` holds, it kills the first of them, as many as `doomed` says, once.
KILLS_FOREBEARS = """
import os, psutil, time
if not hasattr(self, "called"):
    self.called = 0
self.called += 1
if self.called == 2:
    forebears = psutil.Process().parents()
    rank = int(forebears[1].environ()["RANK"])
    while not ({until}):
        time.sleep(0.1)
    if {doomed} and not os.path.exists({mark!r}):
        os.mkdir({mark!r})
        for process in reversed(forebears[:{doomed}]):
            process.kill()
        os._exit(1)
return torch.tanh(self.linear(x))
"""


@pytest.fixture(scope="module")
def torchrun(tiny_problem):
    """torchrun(ranks, variants, *arguments) -> (exit status, stdout, stderr) of compare.py on them."""

    def run(ranks, variants, *arguments):
        launcher = ["--standalone", f"--nproc-per-node={ranks}"]
        with started(launcher, tiny_problem, variants, arguments) as process:
            out, err = process.communicate(timeout=400)
        return process.returncode, out, err

    return run


@pytest.fixture(scope="module")
def two_hosts(tiny_problem, tmp_path_factory):
    """two_hosts(variants, *arguments): the same of two torchruns with a rank each, rank 0's first.

    Both are on this machine; what makes a host is that its torchrun knows its own processes only, and a folder for temporary
    files of its own, where the lock is that those who time on the host's CPU share.
    """

    def run(variants, *arguments):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        launcher = [
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{port}",
            "--rdzv-id=2",
        ]
        found = []
        with contextlib.ExitStack() as ending:
            hosts = []
            for _ in range(2):
                folder = str(tmp_path_factory.mktemp("host"))
                hosts.append(ending.enter_context(started(launcher, tiny_problem, variants, arguments, TMPDIR=folder)))
                wait_for_rendezvous(port)  # the first keeps it, and has rank 0, since its process has the lower number
            for host in hosts:
                out, err = host.communicate(timeout=250)
                found.append((host.returncode, out, err))
        return sorted(found, key=lambda host: "[rank 0]" not in host[2])

    return run


def wait_for_rendezvous(port):
    """Until somebody listens there."""
    latest = time.monotonic() + 60
    while time.monotonic() < latest:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("localhost", port)):
            return
        time.sleep(0.1)
    raise AssertionError("the first torchrun keeps no rendezvous")


@contextlib.contextmanager
def started(launcher, problem, variants, arguments, **variables):
    """compare.py below a torchrun, which ends with the block."""
    files = [str(variant.path) for variant in variants]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "compare.py", "--model", str(problem), "--quick"]
    command += ["--sandbox", "off", "--variant", *files, *map(str, arguments)]  # out of which these files reach further
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment | variables, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def right(write_forward):
    return [write_forward(f"right_{name}", "return torch.tanh(self.linear(x))") for name in "ab"]


@pytest.fixture(scope="module")
def shared(torchrun, right, tmp_path_factory):
    """(exit status, stdout, stderr, file) of two ranks with two variants."""
    file = tmp_path_factory.mktemp("shared") / "out.json"
    return *torchrun(2, right, "--json", file), file


def test_ranks_share_the_work(shared):
    status, out, err, file = shared
    assert status == 0, err
    report = document.read(file)
    assert [result["verdict"] for result in report["results"]] == ["pass", "pass"]
    assert {result["device"]["rank"] for result in report["results"]} <= {0, 1}
    assert [each["rank"] for each in report["environment"]["ranks"]] == [0, 1]
    assert report["environment"]["lost_ranks"] == [] and report["environment"]["complete"]
    assert len({each["probe_seed"] for each in report["environment"]["ranks"]}) == 2
    for name in ("right_a", "right_b"):
        assert out.count(f"{name} pass") == 1, "one table"
        assert len(re.findall(rf"\[rank \d\] build tiny/{name}: ", err)) == 1, "a build happens once a host"


def test_timed_on_all_threads(shared):
    """torchrun sets OMP_NUM_THREADS to 1; what is timed must not see that."""
    assert json.loads(shared[3].read_text())["environment"]["cpu_details"]["threads"] > 1 or os.cpu_count() == 1


def test_the_task_of_a_rank_that_dies_is_taken_by_another(torchrun, right, write_forward, tmp_path):
    condition = f"not os.path.exists({str(tmp_path / 'killed')!r}) and not os.mkdir({str(tmp_path / 'killed')!r})"
    once = write_forward("kills_once", KILLS.format(condition=condition))
    status, _, err = torchrun(3, [once, right[0]], "--json", tmp_path / "out.json")
    assert status == 1, err
    assert re.search(r"rank \d ended \(SIGKILL\); the others go on", err)
    report = document.read(tmp_path / "out.json")
    assert {result["variant"]: result["verdict"] for result in report["results"]} == {"kills_once": "pass", "right_a": "pass"}
    (lost,) = report["environment"]["lost_ranks"]
    assert report["results"][0]["device"]["rank"] != lost


def test_a_task_that_ends_every_rank_is_reported_and_the_run_has_the_rest(torchrun, right, write_forward, tmp_path):
    always = write_forward("kills_always", KILLS.format(condition="True"))
    status, out, err = torchrun(3, [always, right[0]], "--json", tmp_path / "out.json")
    assert status == 1, err
    results = {result["variant"]: result for result in document.read(tmp_path / "out.json")["results"]}
    assert results["right_a"]["verdict"] == "pass"
    assert results["kills_always"]["verdict"] == "error"
    assert "each rank that took it ended before it was done" in results["kills_always"]["reason"]
    assert "each rank that took it ended" in " ".join(out.split())


def test_a_run_resumes_where_it_ended(shared, torchrun, right, tmp_path):
    report = json.loads(shared[3].read_text())
    report["results"] = report["results"][:1]
    (tmp_path / "part.json").write_text(json.dumps(report))
    status, _, err = torchrun(1, right, "--resume", tmp_path / "part.json", "--json", tmp_path / "whole.json")
    assert status == 0, err
    assert "right_a" not in err and "build tiny/right_b" in err
    whole = document.read(tmp_path / "whole.json")
    assert whole["results"][0] == report["results"][0] and whole["results"][1]["verdict"] == "pass"


def test_an_interrupt_shows_and_keeps_what_is_finished(tiny_problem, right, write_forward, tmp_path):
    """The status is torchrun's own, which it gives whatever its processes end with."""
    body = KILLS_FOREBEARS.format(until=f"os.path.exists({str(tmp_path / 'never')!r})", doomed=0, mark="")
    hangs, file = write_forward("hangs_when_checked", body), tmp_path / "out.json"
    launcher = ["--standalone", "--nproc-per-node=2"]
    with started(launcher, tiny_problem, [right[0], hangs], ["--json", file, "--html", tmp_path / "out.html"]) as process:
        latest = time.monotonic() + 300
        while not file.exists() and time.monotonic() < latest:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "forcefully exiting" not in err, "torchrun kills what does not end within 30 s"
    assert "right_a pass" in out and "hangs_when_checked" not in out
    assert [line for line in err.splitlines() if "interrupted" in line] == [f"interrupted; --resume {file} goes on"]
    assert [result["variant"] for result in document.read(file)["results"]] == ["right_a"]
    assert "right_a" in (tmp_path / "out.html").read_text()


def test_each_rank_builds_what_it_runs_in_a_sandbox(torchrun, right, tmp_path):
    try:
        sandbox.version()
    except sandbox.Missing as missing:
        pytest.skip(str(missing))
    status, out, err = torchrun(2, right, "--sandbox", "require", "--json", tmp_path / "out.json")
    assert status == 0, err
    assert f"sandbox: on ({sandbox.version()})" in out
    for name in ("right_a", "right_b"):
        (builder,) = re.findall(rf"\[rank (\d)\] build tiny/{name}: built", err)
        assert f"[rank {builder}] check tiny/{name}: pass" in err


def test_two_hosts_share_the_work_and_what_an_earlier_run_has(shared, two_hosts, right, tmp_path):
    report = json.loads(shared[3].read_text())
    report["results"] = report["results"][:1]
    (tmp_path / "out.json").write_text(json.dumps(report))
    (status, out, err), (other_status, other_out, other_err) = two_hosts(
        right, "--resume", tmp_path / "out.json", "--json", tmp_path / "out.json"
    )
    assert status == other_status == 0, err + other_err
    whole = document.read(tmp_path / "out.json")
    assert [result["verdict"] for result in whole["results"]] == ["pass", "pass"] and whole["environment"]["complete"]
    assert [(each["rank"], each["host"]) for each in whole["environment"]["ranks"]] == [(0, 0), (1, 1)]
    assert "right_b pass" in out and not other_out, "one table"
    for rank, said in enumerate((err, other_err)):
        assert len(re.findall(rf"\[rank {rank}\] build tiny/right_b: ", said)) == 1, "a build happens once a host"
    assert len(re.findall(r"check tiny/right_b: pass", err + other_err)) == 1
    assert "right_a" not in err + other_err


def test_both_hosts_end_with_status_1_when_a_variant_fails(two_hosts, write_forward, tmp_path):
    """At once: a torchrun whose processes succeeded would wait for the other for minutes."""
    refuses = write_forward("refuses", "raise NotImplementedError")
    (status, _, err), (other_status, _, other_err) = two_hosts([refuses], "--json", tmp_path / "out.json")
    assert status == other_status == 1
    assert "exit barrier" not in err + other_err
    assert document.read(tmp_path / "out.json")["environment"]["complete"]


def test_a_host_that_is_lost(two_hosts, write_forward, tmp_path):
    """All its processes end at once and say nothing; its task is taken by the other host."""
    mark = str(tmp_path / "killed")
    body = KILLS_FOREBEARS.format(until=f"rank == 1 or os.path.exists({mark!r})", doomed="(3 if rank == 1 else 0)", mark=mark)
    variants = [write_forward(f"kills_host_{name}", body) for name in "ab"]
    (status, _, err), (other_status, _, _) = two_hosts(variants, "--json", tmp_path / "out.json")
    assert status == 1 and other_status < 0, err
    assert "rank 1 gives no sign of life; the others go on" in err
    report = document.read(tmp_path / "out.json")
    assert [result["verdict"] for result in report["results"]] == ["pass", "pass"]
    assert report["environment"]["lost_ranks"] == [1] and report["environment"]["complete"]


def test_when_torchrun_ends_a_run_its_results_are_kept(torchrun, right, write_forward, tmp_path):
    """torchrun knows only the process of a rank that does not work, and ends all of them when that is killed."""
    file, mark = tmp_path / "out.json", str(tmp_path / "killed")
    kills = write_forward("kills_rank", KILLS_FOREBEARS.format(until=f"os.path.exists({str(file)!r})", doomed=2, mark=mark))
    status, _, err = torchrun(1, [right[0], kills], "--json", file)
    assert status == 1, err
    report = document.read(file)
    assert [(result["variant"], result["verdict"]) for result in report["results"]] == [("right_a", "pass")]
    assert not report["environment"]["complete"]
    status, _, err = torchrun(1, [right[0], kills], "--resume", file, "--json", file)
    assert status == 0, err
    assert "right_a" not in err
    assert [result["verdict"] for result in document.read(file)["results"]] == ["pass", "pass"]
