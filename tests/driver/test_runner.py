"""What the threads of a run share."""

import contextlib
import errno
import math
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typed import wait_for

from playground import catalog
from playground.driver import plan, runner
from playground.driver.runner import Runner
from playground.driver.session import SharedSession, candidate_arguments
from playground.driver.task import PATIENCE_FOR_A_PAIR, Options, Task
from playground.driver.timing import Stopwatch
from playground.judge.evaluation import Judged
from playground.judge.verdict import UNJUDGED
from playground.machine.memory import MOST_JUDGED_AT_ONCE, builds_at_once
from playground.record import NOT_TIMED, UNCHECKED, Caveat, Ceilings, Judgment, Result, compose
from playground.report.progress import Progress
from playground.subject import Subject
from playground.worker import WorkerFailure, WorkerProcess


class Session:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_a_bench_is_made_once_and_closed_after_the_last_use():
    made, together = [], threading.Barrier(3)

    def make():
        made.append(Session())
        return made[-1]

    shared = SharedSession(make, 3)
    assert not made

    def use(_):
        with shared:
            together.wait()
            return shared.session(), made[0].closed

    with ThreadPoolExecutor(3) as pool:
        used = list(pool.map(use, range(3)))
    assert used == [(made[0], 0)] * 3
    assert made[0].closed == 1


def test_a_whole_run_waits_longer_for_a_machine_that_is_busy(monkeypatch):
    monkeypatch.delenv("PLAYGROUND_PATIENCE")
    alone, paired = (Task(None, None, "cuda", pair=pair) for pair in (None, {"level": 1}))
    assert [Options(quick=quick).patience([alone] * 5) for quick in (True, False)] == [10.0, 30.0]
    assert Options(quick=True).patience([paired] * 100) == 10.0 + 100 * PATIENCE_FOR_A_PAIR


def test_what_was_never_used_is_closed_all_the_same():
    made = []
    shared = SharedSession(lambda: made.append(Session()) or made[-1], 2)
    shared.close()
    assert not made
    with shared:
        shared.session()
    assert not made[0].closed
    shared.close()
    assert made[0].closed == 1


PLAIN = "import torch\nclass ModelNew(torch.nn.Module): ..."
FILES = {
    "plain": (PLAIN, "cuda", "cpu"),
    "names_cuda": (PLAIN + "\nmodule = ModelNew().cuda()", "cuda", "emulator"),
    "synchronizes": (PLAIN + "\ntorch.cuda.synchronize()", "cuda", "emulator"),
    "builds_for_cuda": (PLAIN + "\nload_inline('f', '', cuda_sources=CUBLAS)", "cuda", "emulator"),
    "asks_for_cuda": (PLAIN + "\nif torch.cuda.is_available(): ...", "cuda", "cpu"),
    "triton": ("import triton\n" + PLAIN, "cuda", "emulator"),
    "kernel": (PLAIN + "\nCUDA = '__global__ void f() {}'", "cuda", "emulator"),
    "cpu_kernel": (PLAIN, "cpu", "cpu"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_stranger_s_file_runs_on_the_gpu_where_there_is_one_whether_or_not_it_has_kernels(tmp_path, monkeypatch, name):
    text, with_gpu, without = FILES[name]
    (tmp_path / f"{name}.py").write_text(text)
    variant = catalog.find_any_variant(str(tmp_path / f"{name}.py"))
    for missing, place in (([], with_gpu), (["no GPU"], without)):
        monkeypatch.setattr(plan.requirements, "missing_for", lambda _, missing=missing: missing)
        assert plan.place_of(variant, "auto") == place


# As if measured earlier, which takes some 2 s of each processor.
CEILINGS = Ceilings(1e10, 1e10, 1e11)


# Appends how its process waits between parallel loops to the file `seen`.
WRITES_POLICY = """
import os
with open({seen!r}, "a") as seen:
    print(os.environ.get("OMP_WAIT_POLICY"), file=seen)
return torch.tanh(self.linear(x))
"""


@pytest.mark.parametrize(
    "place, policies", [("cpu", ["PASSIVE", "None"]), pytest.param("emulator", ["PASSIVE"], marks=pytest.mark.full)]
)
def test_only_a_process_that_is_timed_waits_actively(tmp_path, monkeypatch, tiny_problem, write_forward, place, policies):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    seen = tmp_path / "seen"
    variant = write_forward(f"writes_policy_{place}", WRITES_POLICY.format(seen=str(seen)))
    with Progress() as progress:
        one = Runner(Options(quick=True), progress)
        one.measured.ceilings["cpu"] = CEILINGS
        (result,) = one.run([Task(catalog.find_model(str(tiny_problem)), variant, place)])
    assert result.verdict == "pass", result.reason
    assert list(dict.fromkeys(seen.read_text().split())) == policies


@pytest.mark.parametrize(
    "pair, others, ready", [({"level": 1}, True, ["after"]), (None, True, ["before"]), ({}, False, ["before"])]
)
def test_a_wrong_pair_needs_no_baselines(tiny_problem, write_forward, monkeypatch, pair, others, ready):
    """Where other pairs are timed meanwhile; else what compares is prepared beside the check."""
    seen, judged = [], []
    monkeypatch.setattr(Stopwatch, "warm_up", lambda *_: seen.append("after" if judged else "before"))
    monkeypatch.setattr(Stopwatch, "time", lambda *_: NOT_TIMED)
    with Progress() as progress:
        run = Runner(Options(quick=True), progress)
        run.are_beside = others
        model = catalog.find_model(str(tiny_problem))
        tasks = [
            Task(model, write_forward(f"pair_{name}", f"return torch.tanh({sign}self.linear(x))"), "cpu", pair=pair)
            for name, sign in (("wrong", "-"), ("right", ""))
        ]
        with contextlib.closing(run), contextlib.closing(run.session_for(tasks[0])) as session:
            for task in tasks:
                judged.append(session.check_and_time(task, task.subject).verdict)
    assert judged == ["fail", "pass"] and seen == ready


def test_what_a_timing_compares_with_is_ready_when_its_check_ends(tiny_problem, write_forward, monkeypatch):
    """Processes start, and baselines run, beside the check; what is timed has the machine to itself."""
    asked, ask = [], WorkerProcess.ask

    def asking(worker, what, **arguments):
        entry = [f"{worker.role}.{what}", arguments.get("side"), time.monotonic(), math.inf]
        asked.append(entry)
        try:
            return ask(worker, what, **arguments)
        finally:
            entry[-1] = time.monotonic()

    def began(what):
        wait_for(lambda: any(entry[0] == what for entry in asked), 100)

    def judged(worker, *_):
        began("baselines.work")
        return Judged(Judgment(verdict="pass", reason=None, check=UNCHECKED), None, worker, None)

    def control_judged(worker, *_, **__):
        began("baselines.start")
        return Judged(UNJUDGED, None, worker, None)

    monkeypatch.setattr("playground.driver.session.judge", judged)
    monkeypatch.setattr("playground.driver.originals.judge", control_judged)
    monkeypatch.setattr(WorkerProcess, "ask", asking)
    task = Task(catalog.find_model(tiny_problem), write_forward("same", "return torch.tanh(self.linear(x))"), "cpu")
    with Progress() as progress:
        one = Runner(Options(quick=True), progress)
        one.measured.ceilings["cpu"] = CEILINGS
        (result,) = one.run([task])
    assert result.verdict == "pass" and result.rounds, (result.reason, result.details)
    names = [what for what, *_ in asked]
    assert names.count("candidate.size_up") == names.count("baselines.load") == names.count("baselines.work") == 1
    timed = [entry for entry in asked if entry[0].endswith((".time", ".repeat"))]
    assert {side for _, side, *_ in timed} == {"variant", "control", "eager"}
    for one in timed:
        assert not [other for other in asked if other is not one and other[2] < one[3] and one[2] < other[3]]


def passed(task):
    """The result of a variant that nothing is known against."""
    return compose(task.subject, Judgment(verdict="pass", reason=None, check=UNCHECKED))


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """on_gpu(judge, count): results of so many models on a GPU, two at a time, each what `judge(task)` gives."""

    def run(judge, count, build=lambda self, task: None, made=lambda: None, settings=({},)):
        files = [tmp_path / f"model_{number}.py" for number in range(count)]
        for file in files:
            file.write_text("class ModelNew: ...")
        named = [(catalog.Model(file.stem, file), catalog.Variant(file.stem, file, "cuda")) for file in files]
        tasks = [Task(*pair, "cuda", each) for pair in named * (2 if len(settings) > 1 else 1) for each in settings]
        session = SimpleNamespace(group=None, check_and_time=lambda task, *_: judge(task), close=lambda: None)
        monkeypatch.setattr(Runner, "build", lambda self, task: build(self, task) or task.subject)
        monkeypatch.setattr(Runner, "session_for", lambda *_: made() or session)
        monkeypatch.setattr(runner, "judged_at_once", lambda: 2)
        kept = []
        with Progress() as progress:
            results = Runner(Options(), progress).run(tasks, lambda results: kept.append(len(results)))
        assert kept == list(range(1, len(tasks) + 1))
        return results

    return run


@pytest.mark.parametrize(
    ("verdict", "reason", "caveats"),
    [("error", "out of memory: 8 GiB", ()), ("pass", None, [Caveat("no-gradient", "CUDA out of memory")])],
)
def test_models_are_judged_side_by_side_and_what_lacked_memory_again_alone(on_gpu, verdict, reason, caveats):
    together, judged, running = threading.Barrier(2), [], set()

    def judge(task):
        running.add(task.model.name)
        lacks_memory = task.model.name == "model_1" and "model_1" not in [name for name, _ in judged]
        judged.append((task.model.name, sorted(running)))
        if len(judged) <= 4:
            together.wait(timeout=60)
        running.discard(task.model.name)
        lacking = replace(passed(task), verdict=verdict, reason=reason, caveats=list(caveats))
        return lacking if lacks_memory else passed(task)

    results = on_gpu(judge, 4)
    assert [result.verdict for result in results] == ["pass"] * 4
    assert len(judged) == 5 and judged[-1] == ("model_1", ["model_1"])


def test_builds_run_ahead_of_the_judge_but_not_far(on_gpu):
    """Compilers would take the processors from who judges, for variants whose turn comes in an hour."""
    built, ahead = [], []

    def judge(task):
        ahead.append(len(built) - len(ahead))
        return passed(task)

    on_gpu(judge, 100, lambda self, task: built.append(task))
    assert 1 < max(ahead) <= builds_at_once() + MOST_JUDGED_AT_ONCE + 2


def test_a_build_is_never_overtaken_by_more_than_may_run_ahead(on_gpu):
    """Who judges waits for it, and may hold the memory that those behind it wait for."""
    built, judged, late = [], [], []

    def build(self, task):
        place = int(task.model.name.removeprefix("model_"))
        late.append(place - len(judged))
        built.append(place)

    def judge(task):
        judged.append(task)
        return passed(task)

    on_gpu(judge, 100, build)
    assert sorted(built) == list(range(100)) and max(late) <= builds_at_once() + MOST_JUDGED_AT_ONCE


def test_who_shares_an_original_comes_one_after_the_other(on_gpu):
    """Two submissions in three cases: one that waits for a case's memory must not have another case's."""
    sizes = []

    def judge(task):
        sizes.append(task.settings["n"])
        return passed(task)

    on_gpu(judge, 1, settings=[{"n": n} for n in (1, 2, 3)])
    assert sizes == [1, 1, 2, 2, 3, 3]


def test_a_variant_is_built_outside_of_a_run(tiny_problem, write_forward):
    """As --watch has it."""
    task = Task(catalog.find_model(tiny_problem), write_forward("right", "return torch.tanh(self.linear(x))"), "cpu")
    with Progress() as progress:
        one = Runner(Options(), progress)
        built = one.build(task)
        one.close()
    assert isinstance(built, Subject) and not isinstance(built, Result), "nothing is known of its verdict"


def test_references_are_made_while_variants_are_built(on_gpu):
    made = threading.Event()
    waited = []
    results = on_gpu(passed, 3, lambda *_: waited.append(made.wait(30)), made.set)
    assert waited == [True] * 3 and [result.verdict for result in results] == ["pass"] * 3


def test_what_goes_wrong_in_the_driver_costs_one_result(on_gpu):
    mistakes = {"model_0": OSError("no such luck"), "model_1": OSError(errno.ENOSPC, "No space left on device")}

    def judge(task):
        if task.model.name in mistakes:
            raise mistakes[task.model.name]
        return passed(task)

    broken, full, other = on_gpu(judge, 3)
    assert (broken.verdict, broken.reason) == ("error", "internal error (report it): OSError: no such luck")
    assert full.verdict == "error" and full.reason.startswith(f"no room in {tempfile.gettempdir()}, ")
    assert other.verdict == "pass"


def test_an_interrupt_ends_all_lanes(on_gpu):
    judged = []

    def judge(task):
        judged.append(task.model.name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_gpu(judge, 50)
    assert len(judged) < 50


def test_a_worker_that_waits_is_for_its_own_sandbox(monkeypatch):
    waiting = []

    def made(role, limit, environment, room):
        waiting.append(SimpleNamespace(untimed=environment, room=room))
        return waiting[-1]

    monkeypatch.setattr(runner, "WorkerProcess", made)
    monkeypatch.setattr(Runner, "room", lambda self, task: task.room)
    monkeypatch.setattr(runner, "_make_emulator", lambda *_: None)
    variant = SimpleNamespace(path="v.py")
    kinds = [(place, room) for place in ("cpu", "emulator") for room in (None, "its own")]
    tasks = [SimpleNamespace(place=place, room=room, variant=variant) for place, room in kinds]
    one = Runner(Options(), progress=None)
    for task in tasks:
        one.start_ahead(task)
    assert [one.worker_for(task) for task in tasks] == waiting and len(waiting) == len(tasks)
    assert [(bool(worker.untimed), worker.room) for worker in waiting] == [(each.place != "cpu", each.room) for each in tasks]
    assert one.worker_for(tasks[0]) is not waiting[0]


def test_a_file_that_changes_in_a_run_is_an_error(write_variant):
    """Not judged as what it was, nor as what it became."""
    case = Task(catalog.find_model("alexnet_conv1"), write_variant("changes", "class ModelNew: pass\n"), "cpu")
    arguments = candidate_arguments({}, case, Options(), None)
    assert arguments["content"] == "class ModelNew: pass\n" and arguments["borrowed"] == []
    case.variant.path.write_text("class ModelNew: other = True\n")
    with pytest.raises(WorkerFailure, match=r"changes\.py has changed since this run read it; expected the same file"):
        candidate_arguments({}, case, Options(), None)
