"""One worker, asked directly: what becomes of it, and of what it started, in every way of ending."""

import os
import signal
import time

import psutil
import pytest

from playground.worker import WorkerFailure, WorkerProcess, kill_all

# Started by the file of a variant: a grandchild of the driver, its own child, and one that a shell leaves behind.
STARTS_OTHERS = """
import os, subprocess, sys
sleep = "import time; time.sleep(1e6)"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {{sleep!r}}])"
children = [subprocess.Popen([sys.executable, "-c", nested]), subprocess.Popen([sys.executable, "-c", sleep], process_group=0)]
subprocess.run(["sh", "-c", "sleep 1000000 & echo $! > {folder}/orphan"])
open("{folder}/children", "w").write(" ".join(str(child.pid) for child in children))
{then}
"""


@pytest.fixture
def load(tiny_problem, write_variant):
    """load(worker, name, text, limit=60): has the worker load a variant of that text."""

    def load(worker, name, text, limit=60):
        path = write_variant(name, text).path
        arguments = {"problem": str(tiny_problem), "variant": str(path), "settings": {}, "place": "cpu", "weights": None}
        return worker.ask("candidate.load", limit, seed=0, **arguments)

    return load


@pytest.fixture
def worker():
    with WorkerProcess() as worker:
        yield worker


def pid_of(worker):
    return worker._process.pid


def alive(processes):
    _, left = psutil.wait_procs(processes, timeout=5)
    return [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def started(folder):
    """The processes that STARTS_OTHERS made, with their children."""
    deadline = time.monotonic() + 30
    while not (folder / "children").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = (folder / "children").read_text().split() + (folder / "orphan").read_text().split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    while not (nested := processes[0].children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert nested
    return processes + nested


def test_it_goes_on_after_a_request_that_raised(worker, load):
    with pytest.raises(WorkerFailure, match="ValueError: no") as failure:
        load(worker, "raises_on_import", "raise ValueError('no')")
    assert "raise ValueError('no')" in failure.value.details
    assert load(worker, "harmless", "class ModelNew:\n    def __init__(self, *_): self.to = print\n") == {"precision": None}


def test_a_request_that_does_not_exist(worker):
    with pytest.raises(WorkerFailure, match="KeyError"):
        worker.ask("nonsense.load", 60)
    with pytest.raises(WorkerFailure, match="AttributeError"):
        worker.ask("candidate.nonsense", 60)


def test_what_it_printed_is_in_the_details(worker, load):
    with pytest.raises(WorkerFailure) as failure:
        load(worker, "prints", "import os; os.system('echo from a child'); print('from python', flush=True); os._exit(5)")
    assert str(failure.value) == "ended the process (exit status 5)"
    assert "from a child" in failure.value.details and "from python" in failure.value.details


def test_a_dead_worker_fails_every_further_request(worker, load):
    with pytest.raises(WorkerFailure, match="SIGTERM"):
        load(worker, "dies", "import os; os.kill(os.getpid(), 15)")
    with pytest.raises(WorkerFailure, match="SIGTERM"):
        worker.ask("candidate.build", 60, seed=0)


@pytest.mark.parametrize(
    "line",
    [
        *("garbage", "", "5", "[]", "{}", '{"result": 1}', '{"error": 1}', '{"error": "no details"}', "\\\\xff"),
        *('{"error": " ", "details": "", "is_finding": false}', "' + 200000 * b'[' + b'"),
    ],
)
def test_a_reply_that_is_none(worker, load, line):
    """A judged file knows the pipe's number; what it writes there ends its own process and nothing else."""
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match="something else than a reply"):
        load(worker, "forges", f"import os, sys, time\nos.write(int(sys.argv[2]), b'{line}\\n'); time.sleep(1e6)")
    assert time.monotonic() - start < 30
    assert not psutil.pid_exists(pid_of(worker))


def test_a_worker_that_closes_its_pipe_and_lives_on(worker, load):
    with pytest.raises(WorkerFailure, match="closed its connection"):
        load(worker, "closes", "import os, sys, time\nos.close(int(sys.argv[2])); time.sleep(1e6)")
    worker.close()
    assert not psutil.pid_exists(pid_of(worker))


def test_the_environment_is_added(load):
    with WorkerProcess({"PLAYGROUND_TEST": "here"}) as worker, pytest.raises(WorkerFailure, match="RuntimeError: here"):
        load(worker, "reads", "import os; raise RuntimeError(os.environ['PLAYGROUND_TEST'])")


def test_it_does_not_read_the_terminal(worker, load):
    with pytest.raises(WorkerFailure, match="EOFError"):
        load(worker, "asks", "input()")


def test_a_time_limit_ends_its_family(worker, load, tmp_path):
    text = STARTS_OTHERS.format(folder=tmp_path, then="import time; time.sleep(1e6)")
    with pytest.raises(WorkerFailure, match="no answer within the time limit of 20 s"):
        load(worker, "starts_and_hangs", text, limit=20)
    assert not psutil.pid_exists(pid_of(worker))
    pids = [int(pid) for name in ("children", "orphan") for pid in (tmp_path / name).read_text().split()]
    assert not alive([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])


def test_a_text_that_utf8_does_not_have(worker, load):
    with pytest.raises(WorkerFailure, match=r"ValueError: lone \?"):
        load(worker, "surrogate", "raise ValueError('lone ' + chr(0xd800))")


def test_a_signal_without_a_name(worker, load):
    with pytest.raises(WorkerFailure, match=r"crashed \(signal 40\)"):
        load(worker, "real_time_signal", "import os; os.kill(os.getpid(), 40)")


@pytest.mark.parametrize("end", ["close", "kill", "kill_all"])
def test_ending_it_ends_its_family(load, tmp_path, end):
    worker = WorkerProcess()
    load(
        worker,
        "starts",
        STARTS_OTHERS.format(folder=tmp_path, then="class ModelNew:\n    def __init__(self, *_): self.to = print"),
    )
    family = [psutil.Process(pid_of(worker)), *started(tmp_path)]
    {"close": worker.close, "kill": worker.kill, "kill_all": kill_all}[end]()
    assert not alive(family)
    worker.close()
    worker.close()


def test_a_crash_ends_its_family(load, tmp_path):
    """The orphans of a worker that is dead already have another parent; they end when it is closed."""
    with WorkerProcess() as worker:
        then = "import time; time.sleep(2); os.kill(os.getpid(), 11)"
        with pytest.raises(WorkerFailure, match="SIGSEGV"):
            load(worker, "starts_and_crashes", STARTS_OTHERS.format(folder=tmp_path, then=then))
        family = started(tmp_path)
    assert not alive(family)


def test_its_signals_are_its_own(worker, load):
    """It leads a session, so that Ctrl-C reaches the driver alone."""
    assert os.getsid(pid_of(worker)) == pid_of(worker) != os.getsid(0)
    load(worker, "harmless_too", "class ModelNew:\n    def __init__(self, *_): self.to = print\n")
    os.killpg(os.getpgid(pid_of(worker)), signal.SIGCONT)
