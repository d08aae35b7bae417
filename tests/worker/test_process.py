"""One worker, asked directly: what becomes of it, and of what it started, in every way of ending."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from typed import wait_for

from playground.worker import WorkerFailure, WorkerProcess, kill_all, owner, pause_others, process

HARMLESS = "import torch\nclass ModelNew(torch.nn.Module):\n    def __init__(self, *_): super().__init__()\n"

# Started by the file of a variant: a grandchild of the driver, its own child, and one that a shell leaves behind.
STARTS_OTHERS = """
import os, subprocess, sys
sleep = "import time; open('{folder}/asleep', 'a').write('.'); time.sleep(1e6)"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {{sleep!r}}])"
children = [subprocess.Popen([sys.executable, "-c", nested]), subprocess.Popen([sys.executable, "-c", sleep], process_group=0)]
subprocess.run(["sh", "-c", "sleep 1000000 & echo $! > {folder}/orphan"])
open("{folder}/children", "w").write(" ".join(str(child.pid) for child in children))
import time
while not os.path.exists("{folder}/asleep") or os.path.getsize("{folder}/asleep") < 2:  # both are
    time.sleep(0.01)
{then}
"""


@pytest.fixture
def load(tiny_problem, write_variant):
    """load(worker, name, text, limit=60, place="cpu"): has the worker load a variant of that text."""

    def load(worker, name, text, limit=60, place="cpu"):
        may_be_loaded = text if "ModelNew" in text else f"{text}\nModelNew = None\n"  # what defines none is not run
        path = write_variant(name, may_be_loaded).path
        arguments = {"problem": str(tiny_problem), "variant": str(path), "settings": {}, "place": place, "weights": None}
        worker.limit = limit
        return worker.ask("load", seed=0, **arguments)

    return load


@pytest.fixture
def worker():
    with WorkerProcess("candidate", 60) as worker:
        yield worker


@pytest.fixture(scope="module")
def lasting():
    """A worker of all tests that leave it alive."""
    with WorkerProcess("candidate", 60) as worker:
        yield worker


def alive(processes):
    _, left = psutil.wait_procs(processes, timeout=5)
    return [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def started(folder):
    """The processes that STARTS_OTHERS made, with their children."""
    wait_for((folder / "children").exists, 30)
    pids = (folder / "children").read_text().split() + (folder / "orphan").read_text().split()
    processes = [psutil.Process(int(pid)) for pid in pids]
    return processes + wait_for(processes[0].children, 30)


def test_it_goes_on_after_a_request_that_raised(lasting, load):
    with pytest.raises(WorkerFailure, match="ValueError: no") as failure:
        load(lasting, "raises_on_import", "raise ValueError('no')")
    assert "raise ValueError('no')" in failure.value.details
    assert load(lasting, "harmless", HARMLESS).precision is None


def test_a_request_that_does_not_exist(lasting):
    with pytest.raises(WorkerFailure, match="AttributeError"):
        lasting.ask("nonsense")


def test_what_it_printed_is_in_the_details(worker, load):
    with pytest.raises(WorkerFailure) as failure:
        load(worker, "prints", "import os; os.system('echo from a child'); print('from python', flush=True); os._exit(5)")
    assert str(failure.value) == "ended the process (exit status 5)"
    assert "from a child" in failure.value.details and "from python" in failure.value.details


def test_a_dead_worker_fails_every_further_request(worker, load):
    with pytest.raises(WorkerFailure, match=r"crashed \(SIGKILL, which is how a machine that is out of memory ends a process"):
        load(worker, "dies", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WorkerFailure, match="SIGKILL"):
        worker.ask("build", seed=0)


def test_requests_that_nobody_reads(worker, load, monkeypatch):
    """It fills the pipe of its requests, and says that it has been loaded."""
    reply = '{"result": {"precision": null, "weights": "by name", "difference": null}}'
    fills = f"""
import contextlib, os, sys, time
pipe = os.open(f"/proc/self/fd/{{sys.argv[1]}}", os.O_WRONLY | os.O_NONBLOCK)
with contextlib.suppress(BlockingIOError):
    while True:
        os.write(pipe, b"[")
os.write(int(sys.argv[2]), b'{reply}\\n')
time.sleep(1e6)"""
    load(worker, "fills", fills)
    monkeypatch.setattr(worker, "limit", 1.0)
    with pytest.raises(WorkerFailure, match="no answer within the time limit of 1 s"):
        worker.ask("build", seed=0)


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        pytest.param('{"result": 1}', marks=pytest.mark.full),
        '{"error": " ", "details": "", "is_finding": false}',
        "' + 200000 * b'[' + b'",
    ],
)
def test_a_reply_that_is_none(worker, load, line):
    """A judged file knows the pipe's number; what it writes there ends its own process and nothing else."""
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match="something that is no reply"):
        load(worker, "forges", f"import os, sys, time\nos.write(int(sys.argv[2]), b'{line}\\n'); time.sleep(1e6)")
    assert time.monotonic() - start < 30
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.full
def test_a_worker_that_closes_its_pipe_and_lives_on(worker, load):
    with pytest.raises(WorkerFailure, match="closed its connection"):
        load(worker, "closes", "import os, sys, time\nos.close(int(sys.argv[2])); time.sleep(1e6)")
    worker.close()
    assert not psutil.pid_exists(worker.pid)


def test_the_environment_is_added(load):
    with (
        WorkerProcess("candidate", 60, {"PLAYGROUND_TEST": "here"}) as worker,
        pytest.raises(WorkerFailure, match="RuntimeError: here"),
    ):
        load(worker, "reads", "import os; raise RuntimeError(os.environ['PLAYGROUND_TEST'])")


def test_each_thread_gets_the_reply_to_its_own_request(lasting, load):
    """Variants of one problem share its baselines' process, and are judged side by side."""
    load(lasting, "any", HARMLESS)

    def ask(wanted):
        reply = lasting.ask("device_code" if wanted == "texts" else "accepted_races")
        return hasattr(reply, wanted)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, ["texts", "lines"] * 100))


def test_it_does_not_read_the_terminal(lasting, load):
    with pytest.raises(WorkerFailure, match="EOFError"):
        load(lasting, "asks", "input()")


def test_a_time_limit_ends_its_family(worker, load, tmp_path):
    load(worker, "harmless_at_first", HARMLESS)  # PyTorch is imported
    text = STARTS_OTHERS.format(folder=tmp_path, then="time.sleep(1e6)")
    with pytest.raises(WorkerFailure, match="no answer within the time limit of 4 s"):
        load(worker, "starts_and_hangs", text, limit=4)
    assert not psutil.pid_exists(worker.pid)
    pids = [int(pid) for name in ("children", "orphan") for pid in (tmp_path / name).read_text().split()]
    assert not alive([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])


ENDLESS = """
import ctypes
from torch import nn
from torch.utils.cpp_extension import load_inline

source = '''
__global__ void count(float* x) {
    for (;;) x[0] = 1 - x[0];  // here
}
extern "C" void run(float* x) { count<<<1, 1>>>(x); }
'''
library = ctypes.CDLL(load_inline("endless", "", source, is_python_module=False, no_implicit_headers=True))


class ModelNew(nn.Module):
    def __init__(self, *sizes):
        super().__init__()

    def forward(self, x):
        library.run(ctypes.c_void_p(x.data_ptr()))
        return x
"""


def test_a_time_limit_says_where_the_emulator_was(worker, load):
    load(worker, "endless_loop", ENDLESS, limit=300, place="emulator")
    line = 1 + next(n for n, text in enumerate(ENDLESS.splitlines()) if text.endswith("// here"))
    with pytest.raises(WorkerFailure, match=rf"time limit of 2 s: .*endless_loop\.py:{line}: time limit: ") as failure:
        worker.limit = 2
        worker.ask("build", seed=0)
    assert not failure.value.is_finding  # nobody knows whether it would have ended
    assert not psutil.pid_exists(worker.pid)


FORGES_WHERE = """
import os, signal, sys, time
from cuda_emulator import CALL_OFF
forged = b'{"error": "' + 100_000 * b'x' + b'", "details": "", "is_finding": true}\\n'
signal.signal(CALL_OFF, lambda *_: os.write(int(sys.argv[2]), forged))
while True: time.sleep(0.1)
"""


@pytest.mark.full
def test_what_a_file_says_of_where_it_was_is_kept_in_bounds(worker, load):
    load(worker, "harmless_there", HARMLESS, limit=120, place="emulator")  # PyTorch is imported, the runtime made
    with pytest.raises(WorkerFailure, match="time limit of 4 s: xxx") as failure:
        load(worker, "forges_where", FORGES_WHERE, limit=4, place="emulator")
    assert len(str(failure.value)) < 3000


def test_a_text_that_utf8_does_not_have(lasting, load):
    with pytest.raises(WorkerFailure, match=r"ValueError: lone \?"):
        load(lasting, "surrogate", "raise ValueError('lone ' + chr(0xd800))")


@pytest.mark.full
def test_a_signal_without_a_name(worker, load):
    with pytest.raises(WorkerFailure, match=r"crashed \(signal 40\)"):
        load(worker, "real_time_signal", "import os; os.kill(os.getpid(), 40)")


def test_a_crash_ends_its_family(load, tmp_path):
    """The orphans of a worker that is dead already have another parent; they end when it is closed."""
    with WorkerProcess("candidate", 60) as worker:
        with pytest.raises(WorkerFailure, match="SIGSEGV"):
            text = STARTS_OTHERS.format(folder=tmp_path, then="os.kill(os.getpid(), 11)")
            load(worker, "starts_and_crashes", text)
        family = started(tmp_path)
    assert not alive(family)


def test_its_signals_are_its_own(lasting, load):
    """It leads a session, so that Ctrl-C reaches the driver alone."""
    assert os.getsid(lasting.pid) == lasting.pid != os.getsid(0)
    load(lasting, "harmless_too", HARMLESS)
    os.killpg(os.getpgid(lasting.pid), signal.SIGCONT)


# Both a worker and what it has started write into files, for a second.
WRITES = """
import subprocess, sys, time
writes = "import sys, time\\nfor _ in range(100): open(sys.argv[1], 'a').write('.'); time.sleep(0.01)"
child = subprocess.Popen([sys.executable, "-c", writes, "{folder}/child"], process_group=0)
for _ in range(100):
    open("{folder}/own", "a").write("."); time.sleep(0.01)
child.wait()
{then}
"""


def test_in_a_standstill_the_others_do_nothing_and_lose_no_time(lasting, load, tmp_path):
    files = [tmp_path / "own", tmp_path / "child"]
    with ThreadPoolExecutor(1) as pool, WorkerProcess("candidate", 60) as timed:
        loaded = pool.submit(load, lasting, "writes", WRITES.format(folder=tmp_path, then=HARMLESS))
        wait_for(lambda: all(file.exists() for file in files))
        with pause_others({timed}):
            before = [file.stat().st_size for file in files]
            time.sleep(0.5)
            assert [file.stat().st_size for file in files] == before
            with pytest.raises(WorkerFailure, match="AttributeError"):
                timed.ask("nonsense")
        loaded.result()
        assert [file.stat().st_size for file in files] == [100, 100]


@pytest.mark.parametrize("processors", [2, 4])
def test_compilers_that_were_kept_off_go_on_beside_a_gpu(lasting, load, tmp_path, monkeypatch, processors):
    """The worker that waits for them does not: its file's forward would use the GPU. Two processors are too few for both."""
    monkeypatch.setattr(process, "usable_processors", lambda: set(range(processors)))
    monkeypatch.setattr(process, "FOR_A_GPU", 0)  # this machine may have two
    files = [tmp_path / "own", tmp_path / "child"]
    with ThreadPoolExecutor(1) as pool:
        lasting.keep_compilers_off()
        loaded = pool.submit(load, lasting, "writes", WRITES.format(folder=tmp_path, then=HARMLESS))
        wait_for(lambda: all(file.exists() for file in files))
        for beside, goes_on in ((True, processors == 4), (False, False)):
            with pause_others(set(), True, beside):
                before = [file.stat().st_size for file in files]
                time.sleep(0.3)
                own, child = (file.stat().st_size > size for file, size in zip(files, before, strict=True))
                assert (own, child) == (False, goes_on)
        loaded.result()
        assert [file.stat().st_size for file in files] == [100, 100]


def test_the_time_limit_is_that_of_the_time_in_which_it_may_run(lasting, load):
    """It sleeps for less than its limit, and stands still for longer."""
    load(lasting, "harmless", HARMLESS)
    lasting.limit = 1.0
    with ThreadPoolExecutor(1) as pool:
        with pause_others(set()):
            asked = pool.submit(lasting.ask, "nonsense")
            time.sleep(2.0)
            assert not asked.done()
        with pytest.raises(WorkerFailure, match="AttributeError"):
            asked.result()


BUILDS = """
import subprocess
text = "#include <regex>\\nint main() {{ return std::regex_match(std::string(), std::regex(std::string())); }}"
subprocess.run(["g++", "-x", "c++", "-O1", "-c", "-o", "/dev/null", "-"], input=text, text=True, check=True)
"""


@pytest.mark.full
def test_a_build_beside_a_full_machine_has_its_time(worker, load):
    """By the clock it takes longer than its limit, since it gets a small part of a processor."""
    load(worker, "harmless_first", HARMLESS)
    worker.make_nice(5)
    with contextlib.ExitStack() as stack:
        for _ in range(4 * os.cpu_count()):
            spinning = [sys.executable, "-c", "while True: pass"]
            stack.callback(subprocess.Popen(spinning, start_new_session=True).kill)  # Linux may share among sessions
        began = time.monotonic()
        load(worker, "builds", BUILDS + HARMLESS, limit=8)
        assert time.monotonic() - began > 8
        with pytest.raises(WorkerFailure, match="no answer within the time limit of 2 s"):
            load(worker, "spins", "while True: pass", limit=2)


def test_no_worker_starts_in_a_standstill_and_one_follows_the_other():
    order = []

    def start():
        with WorkerProcess("candidate", 60):
            order.append("started")

    def stand():
        with pause_others(set()):
            order.append("second")

    with pause_others(set()):
        threads = [threading.Thread(target=start), threading.Thread(target=stand)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        order.append("first")
    for thread in threads:
        thread.join()
    assert order[0] == "first" and sorted(order[1:]) == ["second", "started"]


def test_what_has_another_owner_lives_on():
    class Run:
        pass

    ours = owner.set(Run())
    try:
        with WorkerProcess("candidate", 60) as mine:
            ended = mine.owner
            owner.set(Run())
            with WorkerProcess("candidate", 60) as other:
                kill_all(ended)
                assert mine.has_ended and not other.has_ended
            owner.set(ended)
            with pytest.raises(WorkerFailure, match="the run has been ended"):
                WorkerProcess("candidate", 60)
    finally:
        owner.reset(ours)


PRINTS = """
import ctypes, sys, torch
class ModelNew(torch.nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        print("from Python")
        print("a warning", file=sys.stderr)
        ctypes.CDLL(None).printf(b"from the C library\\n")
        {more}
"""


def test_what_a_variant_prints_is_kept_in_bounds(worker, load):
    for more, most in (("pass", 100), ("print('x' * 100_000)", 8100)):
        load(worker, f"prints_{most}", PRINTS.format(more=more))
        printed = worker.printed()
        assert "from Python\n" in printed and "a warning" not in printed
        assert len(printed) <= most
        assert ("more bytes)" in printed) == (most > 1000)
        assert "from the C library\n" in printed
    assert "a warning\n" in worker.output()


@pytest.mark.parametrize("end", ["close", "kill_all"])
def test_ending_it_ends_its_family(load, tmp_path, end):
    """The last test, since kill_all ends the lasting worker, too."""
    worker = WorkerProcess("candidate", 60)
    load(worker, "starts", STARTS_OTHERS.format(folder=tmp_path, then=HARMLESS))
    family = [psutil.Process(worker.pid), *started(tmp_path)]
    {"close": worker.close, "kill_all": kill_all}[end]()
    assert not alive(family)
    worker.close()
    worker.close()


def test_a_launch_that_was_called_off_says_how_far_it_came_and_what_to_do():
    told = "time limit: the launch has not ended in time: 1 of its 4096 blocks were begun, so that smaller sizes or more"
    todo = "in block 1 of 4096: make it smaller with --set, or raise --time-limit"
    assert process.in_which_block(f"/a b/my.py:8: {told} time may be all it needs; kernel k") == f"/a b/my.py:8: {todo}"
    assert process.in_which_block(told) == todo
    all_begun = told.replace("1 of its 4096", "2 of its 2").split(",")[0]
    assert process.in_which_block(all_begun) == all_begun
