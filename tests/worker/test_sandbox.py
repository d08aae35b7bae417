"""Hostile files, each in a sandbox: none gets further than its own verdict, and the next file's is the same as ever.

hostile_files.py has their texts, whose words between two @ are replaced by what they aim at, and their verdicts.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from hostile_files import HOSTILE, declared, text_of
from typed import wait_for

from playground import catalog
from playground.clock import outer
from playground.command import main
from playground.driver.runner import Runner, sweep
from playground.driver.session import load_candidate
from playground.driver.task import Options, Task
from playground.judge.evaluation import judge
from playground.judge.failure import remove
from playground.judge.verdict import UNJUDGED, failed
from playground.machine import requirements
from playground.report.progress import Progress
from playground.worker import UNTIMED, WorkerFailure, WorkerProcess, pause_others, sandbox
from playground.worker.referee_client import RefereeClient

PROBLEM = Path(__file__).parents[1] / "judge" / "problems" / "gelu" / "problem.py"
OPTIONS = Options(quick=True, time_limit=60, sandbox="require")
SECRET = "to be read by nobody"
GIB = 1 << 30
SMALL = sandbox.Limits(memory=2 * GIB, processes=100, file=GIB, folder=GIB // 16, scratch=GIB // 4)
OF_THE_DEFAULT_TIER = ("forks_without_end",)


def why_missing():
    try:
        return not sandbox.version()
    except sandbox.Missing as missing:
        return str(missing)


pytestmark = pytest.mark.skipif(bool(why_missing()), reason=f"no sandbox here: {why_missing()}")


def files_that_need(*needs):
    return [name for name in HOSTILE if declared(name)[2] in needs]


class Aims:
    """What the files aim at. `words` are put into their texts; `assert_unharmed` looks at all of it."""

    def __init__(self, folder, open_for_now):
        self.folder = folder
        self.secret, self.outside = folder / "home" / "key", folder / "outside"
        for path, text in ((self.secret, SECRET), (self.outside, SECRET), (folder / "files" / "neighbour.py", SECRET)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        name = f"playground-{os.getpid()}"
        self.listeners[1].bind(f"\0{name}")
        self.listeners[1].listen()
        self.sibling = subprocess.Popen(["sleep", "1000"])
        self.other = sandbox.Room([], folder, folder)
        (self.other.exchange / "results").write_text(SECRET)
        open_for_now.enter_context(contextlib.closing(self))
        self.judge = {path: path.read_bytes() for path in (catalog.ROOT / "playground" / "judge").glob("*.py")}
        self.words = {
            "SECRET": self.secret,
            "OUTSIDE": self.outside,
            "NEIGHBOUR": folder / "files" / "neighbour.py",
            "RESULTS": self.other.exchange / "results",
            "BUILDS": self.other.builds,
            "KEY": SECRET,
            "PORT": self.listeners[0].getsockname()[1],
            "ABSTRACT": name,
            "DRIVER": os.getpid(),
            "SIBLING": self.sibling.pid,
            "MARK": f"{name}-mark",
        }

    def aimed(self, name):
        """The path of the file of that name, with its aims."""
        text = re.sub("@([A-Z]+)@", lambda match: str(self.words[match[1]]), text_of(name))
        text += "" if "ModelNew" in text else "\nModelNew = None\n"  # a file that defines none is not run
        path = self.folder / "files" / f"{name}.py"
        path.write_text(text)
        return path

    def assert_unharmed(self):
        assert self.secret.read_text() == self.outside.read_text() == SECRET
        assert psutil.Process(self.sibling.pid).status() == psutil.STATUS_SLEEPING
        assert [path.name for path in self.other.exchange.iterdir()] == ["results"]
        assert not list(self.other.builds.iterdir())
        assert {path: path.read_bytes() for path in self.judge} == self.judge
        for listener in self.listeners:
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()

    def close(self):
        for listener in self.listeners:
            listener.close()
        self.sibling.kill()
        self.sibling.wait()
        self.other.close()


@pytest.fixture(scope="module")
def aims(tmp_path_factory):
    requirements.prepare_environment()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        folder = tmp_path_factory.mktemp("aims")
        aims = Aims(folder, stack)
        patch.setenv("HOME", str(aims.secret.parent))
        patch.setenv("PLAYGROUND_TEST_KEY", SECRET)
        patch.setattr(sandbox, "limits", lambda folder: SMALL)
        yield aims


@pytest.fixture(scope="module")
def runner():
    runner = Runner(OPTIONS, Progress())
    yield runner
    runner.close()


def task_of(path):
    return Task(catalog.find_model(str(PROBLEM)), catalog.Variant(path.stem, path, "cpu"), "cpu")


def loaded(runner, worker, task):
    """The result of a file that is only loaded."""
    try:
        load_candidate(worker, runner.original(task), task, OPTIONS, None)
    except WorkerFailure as failure:
        return failed(UNJUDGED, failure)
    return UNJUDGED


def expect(result, name):
    verdict, reason, _ = declared(name)
    assert result.verdict in verdict.split(" or ") and re.match(reason, result.reason or ""), (name, result.reason)
    assert SECRET not in result.reason + result.details.replace(f'"{SECRET}" in value', ""), name


def test_what_only_tries(aims, runner):
    """One after the other in one process: their room is the same, which is less than each has in a run."""
    names = files_that_need("") + (files_that_need("a compiler") if not requirements.missing_for("cpu") else [])
    assert len(names) >= 20
    with (
        contextlib.closing(runner.new_room(task_of(PROBLEM), [aims.aimed(name) for name in names])) as room,
        WorkerProcess("candidate", OPTIONS.time_limit, UNTIMED, room=room) as worker,
    ):
        for name in names:
            expect(loaded(runner, worker, task_of(aims.folder / "files" / f"{name}.py")), name)
    assert not room.exchange.exists() and not room.builds.exists()
    aims.assert_unharmed()


@pytest.mark.parametrize(
    "name",
    [
        name if name in OF_THE_DEFAULT_TIER else pytest.param(name, marks=pytest.mark.full)
        for name in files_that_need("a process of its own")
    ],
)
def test_what_ends_its_process(aims, runner, name):
    before = set(psutil.pids())
    began = time.monotonic()
    with contextlib.closing(runner.new_room(task_of(PROBLEM), [aims.aimed(name)])) as room:
        with WorkerProcess("candidate", OPTIONS.time_limit, UNTIMED, room=room) as worker:
            expect(loaded(runner, worker, task_of(aims.folder / "files" / f"{name}.py")), name)
        assert time.monotonic() - began < 50, "a limit, and not the time limit"
    assert not room.exchange.exists() and not room.builds.exists()
    mark = aims.words["MARK"]
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not [process for process in left if mark in " ".join(process.info["cmdline"] or [])]
    aims.assert_unharmed()


def test_what_the_referee_reads(aims, runner):
    """Results that are none, and the verdict of an honest file afterwards."""
    with contextlib.ExitStack() as stack:
        honest = task_of(aims.aimed("honest"))
        truth = RefereeClient(runner.original(honest), runner.folder(honest.group), runner.probe_seed, OPTIONS.time_limit)
        stack.callback(truth.close)
        truth.load()
        truth.prepare()
        names = [name for name in files_that_need("the whole check") if name != "honest"]
        names.sort(key="puts_a_folder".__eq__)  # last: unless this is root, its folder stays for who writes to the same place
        shown = [aims.aimed(name) for name in names]
        room = stack.enter_context(contextlib.closing(runner.new_room(honest, shown)))
        shared = stack.enter_context(WorkerProcess("candidate", OPTIONS.time_limit, UNTIMED, room=room))
        other = stack.enter_context(WorkerProcess("candidate", OPTIONS.time_limit, UNTIMED, room=runner.room(honest)))
        for name in [*names, "honest"]:
            task = task_of(aims.folder / "files" / f"{name}.py")
            worker = other if name == "honest" else shared
            try:
                loaded_as = load_candidate(worker, runner.original(task), task, OPTIONS, truth.weights)
                result = judge(worker, truth, "cpu", loaded_as, task.variant.path).judgment
            except WorkerFailure as failure:
                result = failed(UNJUDGED, failure)
            if name == "honest":
                assert (result.verdict, result.reason) == ("pass", None)
            else:
                expect(result, name)
    aims.assert_unharmed()


@pytest.mark.parametrize("mode", ["require", pytest.param("off", marks=pytest.mark.full)])
def test_what_the_outer_clock_exchanges(aims, mode):
    """It times the file as any other, and what it writes lies at no name that the file can reach."""
    task = task_of(aims.folder / "files" / "lays_links_for_the_clock.py")
    task.variant.path.touch()
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(contextlib.closing(Runner(Options(sandbox=mode), Progress())))
        truth = RefereeClient(runner.original(task), runner.folder(task.group), runner.probe_seed, OPTIONS.time_limit)
        stack.callback(truth.close)
        truth.load()
        truth.prepare()
        truth.ask("prepare_timed", probe="timed", mode="forward", seed=7)
        original = runner.original(task) | {"weights": truth.weights}
        eager = stack.enter_context(WorkerProcess("baselines", OPTIONS.time_limit))
        judged = stack.enter_context(WorkerProcess("candidate", OPTIONS.time_limit, room=runner.room(task)))
        answers, sides = truth.answers(judged), {outer.VARIANT: judged, outer.EAGER: eager}
        aims.words |= {"ANSWERS": answers.path, "NAMES": "shared outer-inputs timed"}
        aims.aimed("lays_links_for_the_clock")
        eager.ask("load", **original)
        judged.ask("load", variant=str(task.variant.path), **original)
        players = {}
        for name, worker in sides.items():
            players[name] = outer.Player(name, "forward", worker, 10.0)
            worker.ask("start", side=name, mode="forward", seeds=[1, 2, 3])
        assert outer.measure(truth, players, "cpu", None, 1).rounds >= outer.FEWEST_ROUNDS
        judged.ask("time", side=outer.VARIANT, mode="forward", seeds=[7])
        timed = answers.file("timed")
        assert "symbolic" in truth.compare("outputs", "timed", str(timed.held))["complaint"]
        remove(timed.held)
        judged.ask("result", side=outer.VARIANT, mode="forward", outputs=str(timed.path))
        assert truth.compare("outputs", "timed", str(timed.held))["complaint"] is None
    aims.assert_unharmed()


COUNTS = """
import os, subprocess, sys
file = os.environ["TORCH_EXTENSIONS_DIR"] + "/count"
text = f"import itertools, time\\nfor i in itertools.count():\\n    open({file!r}, 'a').write('.')\\n    time.sleep(0.01)"
subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
raise ValueError("started")
ModelNew = None
"""


def test_a_standstill_reaches_what_runs_inside_and_the_end_too(runner, write_variant):
    task = task_of(write_variant("counts", COUNTS).path)
    with WorkerProcess("candidate", OPTIONS.time_limit, UNTIMED, room=runner.room(task)) as worker:
        assert loaded(runner, worker, task).reason == "ValueError: started"
        count = worker.room.builds / "count"
        wait_for(count.exists, 20)
        with pause_others(set()):
            time.sleep(0.1)
            before = count.stat().st_size
            time.sleep(0.3)
            assert count.stat().st_size == before
        wait_for(lambda: count.stat().st_size > before, 20)
        family = [psutil.Process(pid) for pid in sandbox.family_of(worker.pid, 100)]
        assert len(family) >= 4, "bubblewrap, its first process inside, the worker, and what that has started"
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    runner.close_room(task)


def test_what_a_killed_driver_leaves(tmp_path, write_variant, monkeypatch):
    """Nothing that runs, and folders and groups that the next start removes; those of a run that is alive stay."""
    variant = write_variant("sleeps", "import time\nprint('asleep', flush=True)\ntime.sleep(1e6)\nModelNew = None")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("cuda_emulator.toolchain.JUST_MADE", 0.0)
    command = [sys.executable, "compare.py", "--model", str(PROBLEM), "--variant", str(variant.path), "--sandbox", "require"]

    def left():
        groups = [group for parent in sandbox.GROUPS for group in Path(parent).glob(f"playground-{driver.pid}-*")]
        return [*tmp_path.glob("playground-run-*"), *tmp_path.glob("extensions/judged/builds-*"), *groups]

    with subprocess.Popen(command, cwd=catalog.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        family, deadline = [], time.monotonic() + 120
        while len(family) < 4 and time.monotonic() < deadline:  # itself, bubblewrap, its first process inside, the worker
            time.sleep(0.5)
            family = [psutil.Process(pid) for pid in sandbox.family_of(driver.pid, 100)]
        driver.kill()
    _, running = psutil.wait_procs(family, timeout=10)
    assert len(family) >= 4 and not running
    assert len(left()) >= 2
    alive = Runner(OPTIONS, Progress())
    with contextlib.closing(alive.new_room(task_of(PROBLEM), [])) as room:
        sweep()
        assert left() == [room.exchange.parent, room.builds]
    alive.close()


def test_a_first_sandbox_sees_what_the_emulator_makes_after_it_was_begun(tmp_path, monkeypatch):
    """Whether there is a sandbox is asked first: what it is shown is known then, and nothing is made yet."""
    monkeypatch.setenv("CUDA_EMULATOR_CACHE", str(tmp_path / "new"))
    sandbox._programs.cache_clear()
    try:
        with contextlib.closing(sandbox.Room([], tmp_path, tmp_path)) as room:
            shown = room.command(["cat", str(tmp_path / "new" / "headers" / "made")])
            (tmp_path / "new" / "headers" / "made").write_text("found")
            done = subprocess.run(shown, capture_output=True, text=True, env=room.environment())
        assert (done.stdout, done.returncode) == ("found", 0), done.stderr
    finally:
        sandbox._programs.cache_clear()


def test_builds_are_kept_for_the_same_files_alone(tmp_path):
    """What a killed build has left there is removed, and nothing behind a link."""
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "lock").touch()
    with contextlib.closing(sandbox.Room([], tmp_path, tmp_path, "key")) as first:
        with contextlib.closing(sandbox.Room([], tmp_path, tmp_path, "key")) as beside:
            assert beside.builds != first.builds
        (first.builds / "built").mkdir()
        (first.builds / "built" / "lock").touch()
        (first.builds / "link").symlink_to(tmp_path / "others")
        first.close(keep=True)
    with contextlib.closing(sandbox.Room([], tmp_path, tmp_path, "another key")) as another:
        assert not list(another.builds.iterdir())
    with contextlib.closing(sandbox.Room([], tmp_path, tmp_path, "key")) as again:
        assert again.builds == first.builds and not (again.builds / "built" / "lock").exists()
        assert (tmp_path / "others" / "lock").exists()
        (again.builds / "large").write_bytes(b"x" * (sandbox.MOST_KEPT_BYTES + 1))
        again.close(keep=True)
        assert not again.builds.exists()


def test_the_first_of_many_kept_builds_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("cuda_emulator.toolchain.JUST_MADE", 0.0)
    monkeypatch.setattr(sandbox, "MOST_KEPT", 2)
    judged = tmp_path / "judged"
    judged.mkdir()
    for turn in range(3):
        room = sandbox.Room([], tmp_path, judged, f"{turn}")
        room.close(keep=True)
        os.utime(room.builds, (turn, turn))
    sandbox.sweep(set())
    assert sorted(path.name for path in judged.iterdir()) == ["kept-1", "kept-2"]


@pytest.mark.full
def test_a_file_that_is_judged_again_is_not_built_again(tmp_path, monkeypatch):
    """Nor is what it built used for another file, though it has the same kernel."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    problem = catalog.Model("softmax", catalog.ROOT / "examples" / "softmax.py")
    text = (catalog.ROOT / "examples" / "softmax_new.py").read_text()
    built = []
    for more in ("", "", "# another"):
        (tmp_path / "solution.py").write_text(text + more)
        task = Task(problem, catalog.Variant("solution", tmp_path / "solution.py", "cuda"), "emulator")
        (result,) = Runner(Options(time_limit=600, sandbox="require"), Progress()).run([task])
        assert result["verdict"] == "forward only", result["reason"]
        built.append(result["built"])
    assert built == [True, False, True]


@pytest.mark.full
def test_a_suite_over_night(aims, tmp_path, capsys):
    """The two commands' way: each hostile file beside honest ones, which pass as if they were alone."""
    names = ["honest", *files_that_need("")[:4], "links_its_results", "leaves_things_behind", "outlives_its_run"]
    pairs = [{"problem": str(PROBLEM), "solution": str(aims.aimed(name))} for name in names]
    (aims.folder / "files" / "last.py").write_text(text_of("honest"))
    pairs.append({"problem": str(PROBLEM), "solution": str(aims.folder / "files" / "last.py")})
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    arguments = ["--suite", str(tmp_path / "pairs.json"), "--quick", "--json", str(tmp_path / "out.json")]
    assert main.compare([*arguments, "--sandbox", "require", "--device", "cpu"]) == 1
    document = json.loads((tmp_path / "out.json").read_text())
    assert f"sandbox: on ({sandbox.version()})" in capsys.readouterr().out
    verdicts = [result["verdict"] for result in document["results"]]
    assert verdicts == ["pass", *["error"] * 4, "fail", "error", "error", "pass"]
    aims.assert_unharmed()


@pytest.fixture
def honest(tmp_path):
    (tmp_path / "honest.py").write_text(text_of("honest"))
    return tmp_path / "honest.py"


def test_without_bubblewrap(honest, monkeypatch, capsys):
    """Refused where it is required, off with the reason otherwise."""

    def missing():
        raise sandbox.Missing("bwrap is not on PATH")

    monkeypatch.setattr(sandbox, "version", missing)
    problem = ["--model", str(PROBLEM), "--variant", str(honest)]
    assert main.compare([*problem, "--sandbox", "require"]) == 2
    assert capsys.readouterr().err == "--sandbox require: bwrap is not on PATH\n"
    task = task_of(honest)
    assert not Options(sandbox="auto").isolates(task)
    assert Options(sandbox="auto").isolation([task]) == "off (bwrap is not on PATH)"


def test_what_is_isolated(honest):
    own = Task(*(lambda model: (model, catalog.variants(model)[0]))(catalog.models()[0]), "cpu")
    other = task_of(honest)
    isolated = {mode: [Options(sandbox=mode).isolates(task) for task in (own, other)] for mode in sandbox.MODES}
    assert isolated == {"auto": [False, True], "require": [True, True], "off": [False, False]}
    assert Options(sandbox="auto").isolation([own]) == "off (all files are the project's)"
    assert Options(sandbox="auto", sanitize=True).isolation([other]).startswith("off (compute-sanitizer")
