"""The driver's side of the stopwatch: known ratios, and what is not what it seems.

Real processes first; then a simulated device, whose workers answer as real ones would, on a clock that goes by what they take.
"""

import contextlib
import itertools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from playground import catalog, untrusted
from playground.clock import race
from playground.clock.baselines import BASELINES
from playground.clock.outcome import outcome
from playground.clock.race import Measured, Patience, Race, Rejected, Side
from playground.driver import originals, timing
from playground.driver.floor import Floor
from playground.driver.runner import Runner
from playground.driver.task import Options, Task
from playground.driver.timing import own_clock
from playground.judge.evaluation import Judged
from playground.judge.verdict import UNJUDGED
from playground.record import MINE, NOBODY, TRUST, Ceilings, Check, Clocks, Judgment, Outer, Ratio, Work, Works
from playground.report.progress import Progress
from playground.run_record import load_result
from playground.serial import dump
from playground.worker import WorkerFailure
from playground.worker.replies import Loaded, Started, Times
from tests.conftest import TINY_PROBLEM


@pytest.fixture(scope="module")
def slow_problem(tmp_path_factory):
    """slow_problem(seconds) takes so long in every call, whatever else the machine does."""

    def write(seconds):
        path = tmp_path_factory.mktemp("problem") / "slow.py"
        path.write_text("import time\n" + TINY_PROBLEM.replace("        return", f"        time.sleep({seconds}); return"))
        return catalog.find_model(path)

    return write


FINE = Judged(UNJUDGED, None, None, None)
RIGHT = "time.sleep({seconds}); return torch.tanh(self.linear(x))"
LATER_WRONG = """
self.calls = getattr(self, "calls", 0) + 1
if self.calls > 3:
    {wrong}
self.old = torch.tanh(self.linear(x))
return self.old
"""
PATCHED_STOPWATCH = """
from playground.clock import timer
honest = timer.CpuClock.time
timer.CpuClock.time = lambda self, step: (0.001, False, honest(self, step)[2])
"""

# Name -> (body of forward, what stands at the top of the file). The warm-up calls each three times.
VARIANTS = {
    "same": (RIGHT.format(seconds=0.05), ""),
    "twice_as_slow": (RIGHT.format(seconds=0.1), ""),
    "faster_and_patches_time": (
        RIGHT.format(seconds=0.01),
        "time.perf_counter_ns = time.perf_counter = time.monotonic = lambda: 0",
    ),
    "patches_the_stopwatch": (RIGHT.format(seconds=0.025), PATCHED_STOPWATCH),
    "remembers": (LATER_WRONG.format(wrong="return self.old"), ""),
    "breaks": (LATER_WRONG.format(wrong="if self.calls > 6: raise ZeroDivisionError('enough')"), ""),
}


class Load:
    """An OtherLoad of a machine with 4 processors on which other processes use `cores`, whatever really runs."""

    def __init__(self, cores):
        self.cores = cores
        self.share = cores / 4
        self.watched = contextlib.nullcontext


def run(problem, variants):
    """{name: result} of variants that are timed against eager PyTorch, and hardly judged: this is not about the judge.

    As far as the stopwatch can tell, no other process uses a processor.
    """

    def no_probes(worker, *_):
        check = Check(max_error=0.0, allowed=1.0, eager_error=0.0, gradients=None)
        return Judged(Judgment(verdict="pass", reason=None, check=check), None, worker, None)

    with pytest.MonkeyPatch.context() as patch, Progress() as progress:
        patch.setattr("playground.driver.session.judge", no_probes)
        patch.setattr(Runner, "build", lambda self, task: task.subject)
        patch.setattr(originals, "judge", lambda *_, **__: FINE)
        patch.setattr(originals, "names_for", lambda *_: ["eager"])
        patch.setattr(Floor, "of", lambda *_: (None, None, None))
        for module in (timing, race):
            patch.setattr(module, "OtherLoad", lambda *_: Load(0.0))
        results = Runner(Options(quick=True), progress).run([Task(problem, variant, "cpu") for variant in variants])
    return {result.variant: dump(result) for result in results}


@pytest.fixture(scope="module")
def written(write_forward):
    """{name: catalog.Variant}"""
    return {name: write_forward(name, body, f"import time\n{top}\n") for name, (body, top) in VARIANTS.items()}


@pytest.fixture(scope="module")
def results(slow_problem, written):
    return run(slow_problem(0.025), [written[name] for name in VARIANTS if name not in ("same", "twice_as_slow")])


@pytest.mark.full
def test_a_model_against_itself_is_a_tie(slow_problem, written):
    results = run(slow_problem(0.05), [written["same"], written["twice_as_slow"]])
    assert results["twice_as_slow"]["outcome"]["verdict"] == "loss"
    assert results["twice_as_slow"]["speedup"]["eager"]["ratio"] == pytest.approx(0.5, rel=0.15)
    same = results["same"]
    assert same["verdict"] == "pass"
    assert same["outcome"]["verdict"] == "tie" and same["outcome"]["against"] == "eager"
    assert same["speedup"]["eager"]["low"] <= 1.01 and same["speedup"]["eager"]["high"] >= 0.99
    assert same["calls"] >= same["rounds"] >= race.MIN_ROUNDS
    assert same["rechecked"] == 2 + (same["rounds"] > race.MIN_ROUNDS) and same["clocks"] is None
    assert same["back_to_back_ms"] >= 50


def test_a_known_ratio_whatever_timer_functions_the_file_replaces(results):
    fast = results["faster_and_patches_time"]
    assert fast["verdict"] == "pass", (fast["reason"], fast["details"])
    assert (fast["verdict"], fast["outcome"]["verdict"]) == ("pass", "win"), fast["outcome"]
    assert fast["speedup"]["eager"]["ratio"] == pytest.approx(2.5, rel=0.15)
    assert fast["time_ms"]["median"] >= 10


def test_a_patched_stopwatch_is_seen_from_outside(results):
    patched = results["patches_the_stopwatch"]
    assert patched["verdict"] == "fail"
    assert patched["reason"].startswith("its process reports 0.001 ms a call, but the driver's clock sees ")
    assert patched["time_ms"] is None and patched["speedup"] is None and patched["outcome"] is None


def test_what_is_right_at_first_and_wrong_when_it_is_timed(results):
    wrong = results["remembers"]
    assert wrong["verdict"] == "fail"
    assert wrong["reason"].startswith("is right when it is checked and wrong when it is timed: the output is off by")
    assert wrong["time_ms"] is None


def test_a_variant_that_breaks_when_it_is_timed(results):
    assert (results["breaks"]["verdict"], results["breaks"]["reason"]) == ("error", "ZeroDivisionError: enough")


def takes(value, round_number, count):
    """Milliseconds of so many calls: of a number, of a list that repeats in each round, or of a function of the round."""
    value = value(round_number) if callable(value) else value
    values = value if isinstance(value, list) else [value]
    return (values * count)[:count]


class Device:
    """A simulated device and its workers. Each answers any request, and those that `failing` has by side and mode, or by side
    and request, fail as it says. `ms` are times by side and mode, or by side; a side of none takes as long as eager.
    """

    pid = os.getpid()
    has_ended = False
    stopped = contextlib.nullcontext
    rates = Ceilings(1e12, 1e12, 1e12, 1e12, 1e12)
    work = Works(least=Work(0, 0), certain=Work(0, 0))

    def __init__(self, ms, failing=()):
        self.ms = ms
        self.own = {}  # side -> milliseconds a call back to back, by the driver's clock; otherwise as it says
        self.failing = dict(failing)
        self.flush_ms, self.in_a_row = 0.1, [1.0]  # how long each of many flushes takes, beside one alone; the last one stays
        self.shared_in_the_end = False  # whether another process comes once the variant has been timed
        self.late = False  # whether the device is busy on other streams after the variant's calls
        self.launch_ms = {}  # side -> what the host takes to launch a call
        self.free_mib = 8.0  # beside the variant; eager PyTorch takes 1
        self.loads, self.load = [], 0.0  # processors that others use in the rounds, in turn, and meanwhile otherwise
        self.clocks = []
        self.now = 0.0  # seconds
        self.asked, self.started, self.repeated, self.compared, self.truths, self.threads = [], [], [], [], [], []
        self.rounds = {}

    # What clock.race and driver.timing take for the module `time`, for a process, and for what makes one.
    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds):
        self.now += seconds

    def close(self):
        pass

    kill = close

    def taken(self, side, mode):
        for key in ((side, mode), side, ("eager", mode), "eager"):
            if key in self.ms:
                return self.ms[key]

    def ask(self, request, side=None, mode=None, seeds=(), count=0, **arguments):
        self.asked.append((request, side))
        self.threads.append(threading.get_ident())
        for key in ((side, mode), (side, request)):
            if key in self.failing and (request == "start" or key[1] == request):
                raise WorkerFailure(self.failing[key])
        if request == "start":
            self.started.append((side, mode))
        if request == "time":
            self.rounds[side, mode] = number = self.rounds.get((side, mode), 0) + 1
            times = takes(self.taken(side, mode), number, len(seeds))
            self.now += sum(times) / 1e3
            late = [side == "variant" and self.late] * len(seeds)
            flushes = takes(self.flush_ms, number, len(seeds)) if side == "eager" else [0.1] * len(seeds)
            launches = [self.launch_ms.get(side, 0.01)] * len(seeds)
            return Times(times, late, flushes, launches)
        if request == "repeat":
            self.repeated.append(count)
            said = takes(self.taken(side, mode), 1, 1)[0]
            self.now += count * self.own.get(side, said) / 1e3
            if side == "variant" and self.shared_in_the_end:
                self.in_a_row = [2.0]
        if request == "flush_in_a_row":
            return {"milliseconds": arguments["flush_ms"] * (self.in_a_row.pop(0) if self.in_a_row[1:] else self.in_a_row[0])}
        known = {"start": Started(60.0, 1.0), "load": Loaded(None, "by name", None), "free_memory": {"mib": self.free_mib}}
        return (known | {"ceilings": self.rates, "work": self.work}).get(request, {})

    def side(self, name, mode="forward", settling=0, **more):
        """A Side of that name, which is ready."""
        made = Side(name, mode, "cuda" if settling else "cpu", self.ask, **more)
        made.start()
        return made

    def others(self, *pids):
        """Who is busy, and how much, in the place of OtherLoad and Others."""
        return SimpleNamespace(busiest=lambda _: ["cc1plus -quiet, pid 42, used 1.97 cores"] if self.load else [])

    def put_in_place(self, patch):
        """Have clock.race and driver.timing take this device and machine for the real ones."""
        for module in (race, timing):
            patch.setattr(module, "time", self)
        patch.setattr(race, "Others", self.others)
        patch.setattr(race, "OtherLoad", lambda *_: Load(self.loads.pop(0) if self.loads else 0.0))
        patch.setattr(timing, "OtherLoad", lambda *_: Load(self.load))
        patch.setattr(originals, "WorkerProcess", lambda *_, **__: self)
        patch.setattr(originals, "judge", lambda *_, **__: FINE)
        patch.setattr(timing.clocks, "sample", lambda: self.clocks.pop(0) if self.clocks else None)

    def compare(self, what, probe, *_):
        self.compared.append((what, " ".join(probe.split()[1:-1])))
        right = {"complaint": self.failing.get(self.compared[-1][1])}
        return right if what == "outputs" else {"w": right}


class Process:
    """A process of its own on a device."""

    def __init__(self, device):
        self.ask, self.pid = device.ask, device.pid


class Timed:
    """timed(device) is the timing of a right variant on it; what it is called with besides is put into the result before."""

    def __init__(self, folder, patch):
        self._folder, self._patch = untrusted.Folder(folder), patch

    def stopwatch(self, device, place="cuda", patience=10.0, is_catalogued=True, **options):
        device.put_in_place(self._patch)
        silent = SimpleNamespace(started=lambda *_: None, finished=lambda *_: None)
        model = SimpleNamespace(name="model", catalogued_as=None)
        variant = SimpleNamespace(is_catalogued=is_catalogued)
        task = SimpleNamespace(place=place, model=model, variant=variant, pair=None, names=lambda what: ("model", what))
        referee = SimpleNamespace(
            has_layouts=True,
            uses_tf32=True,
            answers=lambda worker: self._folder,
            compare=device.compare,
            ask=lambda what, probe, mode, seed: device.truths.append(mode),
            worker=Process(device),
            reserved=contextlib.nullcontext,
        )
        return timing.Stopwatch(task, {}, referee, Options(training=True, **options), silent, Measured(Patience(patience)))

    def __call__(self, device, place="cuda", training=True, **more):
        stopwatch = self.stopwatch(device, place)
        return dump(stopwatch.time(stopwatch.enter(device, self.result(training, **more))))

    def result(self, training=True, **more):
        right = {"max_error": 0.0, "allowed": 1.0, "eager_error": 0.0}
        check = right | {"gradients": {"w": right} if training else None}
        known = {"model": "model", "variant": "v", "backend": "cuda", "ran_on": "cuda", "source_sha256": "0" * 64}
        known |= {"build_seconds": None, "built": False, "precision": "tf32", "verdict": "pass", "reason": None, "check": check}
        return load_result(known | dict.fromkeys(("time_ms", "peak_mib", "speedup")) | more)


@pytest.fixture
def timed(tmp_path, monkeypatch):
    return Timed(tmp_path, monkeypatch)


def played(name, ms, settling=0, **more):
    """A Side that has played nine rounds."""
    side = Device({name: ms}).side(name, settling=settling, **more)
    for seed in range(9):
        side.play(seed)
    return side


def test_calls_of_a_round_cannot_be_foreseen_and_settling_is_not_counted():
    device = Device({"eager": [7.0, 1.0, 1.0, 1.0, 1.0, 1.0]})
    side = device.side("eager", settling=1)
    side.resume(Started(15.0, None))
    for seed in range(9):
        side.play(seed)
    assert {len(samples) for samples in side.rounds} <= {2, 3, 4}
    assert len({len(samples) for samples in side.rounds}) > 1
    assert set(side.samples) == {1.0}


@pytest.mark.parametrize("nonsense", [math.nan, -1.0, math.inf])
def test_times_that_are_none(nonsense):
    with pytest.raises(Rejected, match="was asked to time"):
        played("variant", nonsense)


def test_no_time_at_all_has_a_ratio_too():
    assert 0 < min(played("variant", 0.0).samples) <= 1e-6


def test_too_few_times():
    device = Device({"variant": 1.0})
    side = device.side("variant")
    side._ask = lambda request, **more: Times(*(each[1:] for each in vars(device.ask(request, **more)).values()))
    with pytest.raises(Rejected):
        side.play(1)


@pytest.fixture
def slow(monkeypatch):
    """A device whose variant says that a call takes 1 ms, and takes 2."""
    device = Device({"variant": 1.0})
    device.own = {"variant": 2.0}
    device.put_in_place(monkeypatch)
    return device


def test_own_clock_counts_every_call_once_and_watches_what_else_runs_in_every_try(slow):
    load, began = Load(0.0), []
    load.watched = lambda: contextlib.nullcontext(began.append(len(slow.repeated)))
    assert own_clock(slow.side("variant"), 1.0, 1.5, load) == pytest.approx(2.0)
    repeated = slow.repeated
    assert len(repeated) == 1 + len(timing.PAUSES) and all(3 <= count <= 1000 for count in repeated)
    assert began == list(range(len(repeated)))


def test_own_clock_stops_at_the_first_try_within_the_limit(slow):
    assert own_clock(slow.side("variant"), 1.0, 100.0) == pytest.approx(2.0)
    assert len(slow.repeated) == 1


def claiming(seen, others):
    """A device whose variant claims 1 ms, where the driver sees others, beside a load of so many cores."""
    device = Device({"variant": 1.0} | dict.fromkeys(BASELINES, 4.0))
    device.own, device.load = {"variant": seen}, others
    return device


@pytest.mark.parametrize(
    "place, seen, others",
    [("cpu", 2.0, 0.0), ("cpu", 2.0, 0.2), ("cpu", 100.0, 0.9), ("cuda", 2.7, 0.0), ("cuda", 4.0, 1.0), ("cuda", 100.0, 3.8)],
)
def test_a_difference_that_load_does_not_explain(timed, place, seen, others):
    with pytest.raises(Rejected, match=rf"its process reports 1 ms a call, but the driver's clock sees {seen:g} ms"):
        timed(claiming(seen, others), place, training=False)


@pytest.mark.parametrize(
    "place, seen, others, percent",
    [("cpu", 2.0, 0.24, 6), ("cpu", 100.0, 1.0, 25), ("cpu", 100.0, 4.0, 100), ("cuda", 4.0, 1.6, 40)],
)
def test_where_load_explains_a_difference_nothing_is_claimed(timed, place, seen, others, percent):
    found = timed(claiming(seen, others), place, training=False)
    assert found["back_to_back_ms"] == pytest.approx(seen) and found["time_ms"]["median"] == 1.0
    reason = f"other processes used {percent}% of the cores while the clocks were compared: 1 and {seen:g} ms a call"
    assert found["outcome"]["reason"] == f"the machine is busy ({reason})" and found["speedup"] == {}


@pytest.mark.parametrize("others", [0.0, 4.0])
def test_what_is_within_the_limit_needs_no_note(timed, others):
    found = timed(claiming(1.54, others), "cpu", training=False)
    assert (found["back_to_back_ms"], found["notes"], found["time_ms"]["median"]) == (pytest.approx(1.54), [], 1.0)
    found = timed(claiming(1.7, others), "cuda", training=False)
    assert (found["back_to_back_ms"], found["time_ms"]["median"]) == pytest.approx((1.7, 1.7))
    assert [note[:12] for note in found["notes"]] == ["a call takes"]


def of(precision, declared=None):
    """A result of the original's precision and the declared one."""
    return SimpleNamespace(precision=precision, variant_precision=declared, caveats=[])


def test_outcome_is_against_the_fastest_that_is_as_precise():
    others = [played(name, ms) for name, ms in (("eager", 4.0), ("compile", 2.0), ("eager_fp32", 3.0))]
    same = Ratio(ratio=1.0, low=1.0, high=1.0)
    strict = outcome(played("variant", [1.0]), others, of("fp32"), same)
    assert (strict.against, strict.ratio, strict.any_precision) == ("eager_fp32", 3.0, "compile")
    tf32 = outcome(played("variant", [1.0]), others, of("tf32"), same)
    assert (tf32.against, tf32.verdict, tf32.any_precision) == ("compile", "win", None)
    lower = outcome(played("variant", [4.0]), others, of("fp32", "fp16"), same)
    assert (lower.against, lower.verdict) == ("compile", "loss")
    others += [played("compile_fp16", [1.5])]
    assert outcome(played("variant", [1.0]), others, of("fp32"), same) == strict
    assert outcome(played("variant", [1.0]), others, of("tf32"), same) == tf32
    lower = outcome(played("variant", [1.0]), others, of("tf32", "fp16"), same)
    assert (lower.against, lower.verdict) == ("compile_fp16", "win")
    assert outcome(played("variant", [1.0]), [], of("fp32"), same) is None


@pytest.mark.parametrize("imprecise, rounds, rechecked", [(0, 9, 2), (2, 15, 3), (5, 24, 3)])
def test_results_of_the_last_rounds_are_rechecked_too(timed, imprecise, rounds, rechecked):
    """A variant could wait for the first nine rounds to be over. So many rounds that differ make an interval too wide."""
    device = Device({"variant": lambda number: 3.0 if number <= imprecise else 2.0} | dict.fromkeys(BASELINES, 8.0))
    at, compare = [], device.compare

    def watching(*arguments):
        at.append(device.rounds["variant", "forward"])
        return compare(*arguments)

    device.compare = watching
    found = timed(device, training=False)
    assert (found["rounds"], found["rechecked"], len(device.compared)) == (rounds, rechecked, rechecked)
    assert max(at[:2]) <= race.MIN_ROUNDS and all(rounds - race.ROUNDS_BETWEEN_LOOKS < each <= rounds for each in at[2:])
    assert len(device.truths) == 3, "a pause in the middle would announce a recheck"


def test_variants_that_are_ready_race_together(timed):
    """Beside the same baselines: these play one round for all of them. One that fails leaves, and the others go on."""
    device, broken = Device({"variant": 2.0} | dict.fromkeys(BASELINES, 8.0)), Device({"variant": 2.0})
    broken.failing["variant", "time"] = "crashed (SIGSEGV)"
    stopwatch = timed.stopwatch(device)
    right = [stopwatch.enter(device, timed.result(training=False)) for _ in range(3)]
    wrong = stopwatch.enter(broken, timed.result(training=False))
    found = [dump(stopwatch.time(entry)) for entry in right]
    assert {each["speedup"]["eager"]["ratio"] for each in found} == {4.0}
    rounds = found[0]["rounds"]
    assert device.asked.count(("time", "eager")) == rounds and device.asked.count(("time", "variant")) == 3 * rounds
    assert [each["rechecked"] for each in found] == [2, 2, 2] and len(device.compared) == 6
    with pytest.raises(WorkerFailure, match="SIGSEGV"):
        stopwatch.time(wrong)


def test_threads_are_timed_one_after_the_other(timed):
    """Another's graph in the baselines' process would take the place of the one that is being timed."""
    device = Device({"variant": 2.0} | dict.fromkeys(BASELINES, 8.0))
    stopwatch = timed.stopwatch(device)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(lambda: stopwatch.time(stopwatch.enter(device, timed.result()))) for _ in range(4)]
        asked.append(threads.submit(stopwatch.warm_up, threads.submit(lambda: None)))
    assert [each.exception() for each in asked] == [None] * 5
    changes = sum(a != b for a, b in itertools.pairwise(device.threads))
    assert changes < 5, "the requests of two calls are mixed"


def test_a_floor_that_cannot_be_counted_is_asked_for_once(timed):
    device = Device({"variant": 2.0} | dict.fromkeys(BASELINES, 8.0), {(None, "work"): "RuntimeError: no meta"})
    stopwatch = timed.stopwatch(device)
    for _ in range(2):
        found = dump(stopwatch.time(stopwatch.enter(device, timed.result(training=False))))
        assert found["floor_ms"] is None and found["baselines_unavailable"] == {"floor": "RuntimeError: no meta"}
    assert device.asked.count(("work", None)) == 1


def test_disturbances(timed):
    """A clock that drops is said; a baseline that stops working is left out, and the others go on."""
    device = Device({"variant": 2.0} | dict.fromkeys(BASELINES, 2.0), {("channels_last", "time"): "crashed (SIGSEGV)"})
    device.clocks = [Clocks(1980, 1980, 50, ()), Clocks(1980, 1980, 50, ()), Clocks(1200, 1980, 80, ("power cap",))]
    found = timed(device, training=False)
    assert found["baselines_unavailable"] == {"channels_last": "crashed (SIGSEGV)"}
    assert device.asked.count(("time", "channels_last")) == 1
    assert "eager" in found["speedup"] and "channels_last" not in found["speedup"]
    assert found["notes"] == [
        "the GPU was slowed down while it was timed: power cap",
        "the SM clock went from 1980 to 1200 MHz while it was timed",
    ]
    assert found["clocks"]["after"]["sm_mhz"] == 1200


def raced(loads=(), patience=10.0, control=4.0, place="cpu", busy=0.0, slower=(), **more):
    """A Race of a variant of 1 ms and eager PyTorch of 4, in whose rounds other processes use `loads` processors, then none.

    `slower` are the milliseconds of further baselines. `more` is of the Device.
    """
    device = Device({"variant": 1.0, "eager": 4.0, "control": control} | {f"of {ms} ms": ms for ms in slower})
    vars(device).update(more, loads=list(loads), load=busy)
    with pytest.MonkeyPatch.context() as patch:
        device.put_in_place(patch)
        variant, eager = device.side("variant", is_trusted=False), device.side("eager")
        others = [eager, *(device.side(f"of {ms} ms") for ms in slower)]
        made = Race(place, variant, others, device.side("control"), [], Measured(Patience(0.0)), lambda: [eager])
        made.plan([1, 2, 3], 0, lambda seed: None)
        race.play([made], 0.0, Patience(patience))
        made.played = device.rounds["variant", "forward"]
        made.said = made.disturbance()
    return made


def test_rounds_that_others_disturb_do_not_count():
    made = raced(loads=[0.0, 1.5, 0.1, 2.0])
    undisturbed = race.MIN_ROUNDS + race.ROUNDS_BETWEEN_LOOKS  # the last ones, since more were played than are rechecked
    assert (made.played, len(made.variant.rounds)) == (undisturbed + 2, undisturbed)
    assert made.said is None
    assert made.control() == Ratio(ratio=1.0, low=1.0, high=1.0)


def test_a_baseline_far_from_the_fastest_is_not_timed_longer_than_an_interval_takes():
    made = raced(loads=[1.5], slower=[4.2, 9.0])
    rounds = {side.name: len(side.rounds) for side in made.others}
    assert rounds == {"eager": len(made.variant.rounds), "of 4.2 ms": race.MIN_ROUNDS, "of 9.0 ms": race.FIRST_LOOK}


def test_where_the_machine_stays_busy_it_is_said_who_kept_it_so():
    made = raced(loads=[1.5] * 99, patience=0.0, busy=1.5)
    assert made.played == race.MIN_ROUNDS
    assert made.said == "the machine is busy (cc1plus -quiet, pid 42, used 1.97 cores)"
    assert len(made.variant.rounds) == race.MIN_ROUNDS, "what was seen is reported all the same"


USED = "other processes used what is timed"
ON_A_GPU = {"place": "cuda", "patience": 0.0}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"control": 4.1}, None),
        ({"control": 5.0}, "the original against itself came out at 0.8x"),
        ({"control": lambda number: (9.0, 4.0)[number % 2]}, "the original took 4 to 9 ms"),
        (ON_A_GPU | {"flush_ms": 0.3}, USED),  # those of the control take 0.1
        (ON_A_GPU | {"flush_ms": [0.1, 0.105]}, None),
        (ON_A_GPU | {"in_a_row": [1.9]}, USED),  # a process has the GPU in turns
    ],
)
def test_signs_of_a_disturbance(given, said):
    assert raced(**given).said == (said and f"the machine is busy ({said})")


def test_a_process_that_has_the_gpu_for_a_while():
    made = raced(place="cuda", in_a_row=[1.9, 1.02, 1.9, 1.0])
    assert made.said is None and made.played == len(made.variant.rounds) + 2


def test_launches_differ_between_two_processes_by_more_than_the_control_of_two_others_shows():
    def allowed(place, variant_ms, mode="forward"):
        variant, eager, control = (played(name, ms) for name, ms in zip(SIDES, (1.0, 1.05, 1.05), strict=True))
        for side in (variant, eager, control):
            side.rounds = [[variant_ms * sample for sample in samples] for samples in side.rounds]
        variant.mode = mode
        made = Race(place, variant, [eager], control, [], Measured(Patience(0.0)), lambda: [eager])
        return made.luck(), dump(race.statistics.spanning([made.control()], made.luck()))

    assert allowed("cuda", 0.05) == (0.09, pytest.approx({"low": 0.91, "high": 1.09}))
    assert allowed("cuda", 0.01)[0] == 0.09 and allowed("cuda", 0.5)[0] == pytest.approx(0.005)
    assert allowed("cuda", 0.015, "graphed forward")[0] == pytest.approx(0.02)
    assert allowed("cuda", 1.5)[0] == allowed("cpu", 0.015)[0] == 0.0
    assert allowed("cuda", 1.5)[1] == {"low": 1.0, "high": 1.0}


SIDES = "variant", "eager", "control"


def test_a_claim_is_only_as_narrow_as_the_control():
    others = [played("eager", 1.04)]
    known = of("fp32")
    assert outcome(played("variant", 1.0), others, known, Ratio(ratio=1.0, low=1.0, high=1.0)).verdict == "win"
    assert outcome(played("variant", 1.0), others, known, Ratio(ratio=1.0, low=1.0, high=1.04)).verdict == "tie"
    noisy = Ratio(ratio=1.0, low=0.7, high=1.4)
    assert outcome(played("variant", 1.0), others, known, noisy).reason == "too noisy: anything from 0.743x to 1.49x"
    withheld = outcome(played("variant", 1.0), others, known, None, "the machine is busy (...)")
    assert (withheld.verdict, withheld.ratio, withheld.reason) == ("not measured", None, "the machine is busy (...)")


MS = {  # in any mode unless it is named
    "variant": 0.3,
    ("variant", "graphed forward"): 0.1,
    ("variant", "graphed weights"): 0.2,
    "eager": 7.0,
    "channels_last": 6.0,
    "eager_fp32": 2.0,
    "channels_last_fp32": 0.6,
    "compile": 2.0,
    "compile_fp32": 2.0,
    "compile_fp16": 2.0,
}
LONG = dict.fromkeys(BASELINES, 9.0) | {"variant": 1.1, "eager": 2.0, "channels_last": 1.0}


def test_beside_a_variant_that_takes_the_memory_nothing_is_claimed(timed):
    device = Device(MS)
    device.free_mib = 0.75
    found = timed(device)
    assert found["outcome"]["verdict"] == "not measured" and not found["speedup"]
    assert found["outcome"]["reason"] == "only 0.75 MiB of GPU memory are free beside it, PyTorch may need 1"


@pytest.mark.parametrize("late", [True, False])
def test_work_on_other_streams_is_told(timed, late):
    device = Device(MS)
    device.late = late
    assert (timing.LATE_NOTE in timed(device)["notes"]) == late


@pytest.mark.parametrize("shared", [True, False])
def test_on_a_gpu_that_another_process_uses_the_drivers_clock_says_nothing(timed, monkeypatch, shared):
    """Whether one does is looked at while the variant's process stands still."""
    device, runs_on = Device(MS), []
    device.own, device.shared_in_the_end = {"variant": 100.0}, shared
    variant = Process(device)

    def pause_others(but, *_):
        runs_on.append(variant in but)
        return contextlib.nullcontext()

    monkeypatch.setattr(originals, "pause_others", pause_others)
    stopwatch = timed.stopwatch(device)
    if not shared:
        with pytest.raises(Rejected, match="the driver's clock sees 100 ms"):
            stopwatch.time(stopwatch.enter(variant, timed.result(training=False)))
        return
    found = dump(
        stopwatch.time(stopwatch.enter(variant, timed.result(training=False, caveats=[{"tag": "no-graph", "text": "no"}])))
    )
    assert (found["outcome"]["verdict"], found["outcome"]["reason"]) == ("not measured", timing.SHARED)
    assert (found["time_ms"]["median"], found["speedup"]) == (0.3, {})
    assert runs_on == [True, True, False, False], "in the race, beside the clock; not while that is looked at, nor for ceilings"


def test_one_timing_does_not_use_up_what_a_whole_run_has_for_a_busy_machine(timed, monkeypatch):
    monkeypatch.delenv("PLAYGROUND_PATIENCE")
    device = Device(LONG)
    stopwatch = timed.stopwatch(device, patience=80.0)
    left = [80.0]
    for _ in range(3):
        device.loads = [99.0] * 10_000
        assert stopwatch.time(stopwatch.enter(device, timed.result(training=False))).outcome.verdict == "not measured"
        left.append(stopwatch._measured.patience.seconds)
    assert [a - b for a, b in itertools.pairwise(left)] == pytest.approx([30, 30, 20], abs=1)


def test_an_earlier_timing_s_control_widens_a_later_one_s_interval(timed):
    slow = LONG | {"channels_last": 9.0}
    device = Device(slow | {"control": lambda number: 2.0 * (1.0, 0.8, 1.25)[number % 3]})
    stopwatch = timed.stopwatch(device)
    earlier = dump(stopwatch.time(stopwatch.enter(device, timed.result(training=False))))
    device.ms = slow
    later = dump(stopwatch.time(stopwatch.enter(device, timed.result(training=False))))
    assert later["control"]["high"] == 1.0 and earlier["control"]["high"] == pytest.approx(1.25)
    assert later["outcome"]["low"] == earlier["outcome"]["low"] == pytest.approx(later["outcome"]["ratio"] / 1.25)
    assert later["speedup"] == earlier["speedup"]


def test_a_process_of_the_judge_s_that_has_ended_is_replaced():
    """As under the outer clock, which asks it directly: the next one that is timed finds another, which knows the same."""
    devices, loaded = [Device({"eager": 1.0}) for _ in range(2)], []
    left = iter(devices)
    process = originals.Original(lambda: next(left), loaded.append)
    for device in devices:
        for _ in range(2):
            side = Side("eager", "forward", "cpu", process.ask)
            process.warm_up(side)
            side.play(1)
        assert process.worker is device and device.started == [("eager", "forward")]
        device.has_ended = True
    assert loaded == devices


def test_short_steps_are_timed_in_graphs_and_slow_baselines_as_they_are(timed):
    device = Device(MS, {("compile", "graphed weights"): "RuntimeError: cannot be captured"})
    found = timed(device)
    graphed = found["graphed"]
    assert (found["outcome"]["against"], found["outcome"]["ratio"]) == ("channels_last_fp32", pytest.approx(2))
    assert (graphed["outcome"]["against"], graphed["outcome"]["ratio"]) == ("channels_last_fp32", pytest.approx(6))
    assert graphed["not_graphed"] == ["eager", "channels_last"] and graphed["speedup"]["eager"]["ratio"] == pytest.approx(70)
    assert graphed["notes"] == []
    weights = found["training"]["weights"]["graphed"]
    assert weights["time_ms"]["median"] == 0.2 and weights["baselines_ms"]["eager"]["median"] == 7.0
    assert weights["baselines_unavailable"] == {"compile": "RuntimeError: cannot be captured"}
    assert (
        weights["notes"][0] == "torch.compile, the fastest without a graph, could not be timed in one: the ratio is over eager"
    )
    assert {"time_ms", "speedup", "rounds", "outer"} <= set(graphed)
    modes = [mode for side, mode in device.started if side == "variant"]
    assert list(dict.fromkeys(modes)) == ["forward", "weights", "graphed forward", "graphed weights"]
    assert not {("eager", "graphed forward"), ("eager", "graphed weights")} & set(device.started)
    assert {("gradients", "graphed weights"), ("outputs", "graphed forward")} <= set(device.compared)
    assert device.truths == [*3 * ["forward"], *2 * ["weights"], *3 * ["forward"], *2 * ["weights"]]


def test_a_variant_that_cannot_be_captured_is_timed_without_a_graph(timed):
    device = Device(MS, {("variant", "graphed forward"): "RuntimeError: it waits"})
    found = timed(device)
    assert found["graphed"] == {"unavailable": "RuntimeError: it waits"}
    other = found["training"]["weights"]["graphed"]
    assert other == {"unavailable": "not tried after that of another mode had failed: RuntimeError: it waits"}
    assert found["time_ms"]["median"] == found["training"]["weights"]["time_ms"]["median"] == 0.3


@pytest.mark.parametrize("ms, tag", [(MS, "no-graph"), (MS, "default-stream"), (LONG, None)])
def test_long_steps_and_what_no_graph_can_hold_are_not_timed_in_graphs(timed, ms, tag):
    device = Device(ms)
    found = timed(device, caveats=[{"tag": tag, "text": "no"}] if tag else [])
    assert found["time_ms"]["median"] == ms["variant"]
    assert found.get("graphed") is None and found["training"]["weights"].get("graphed") is None
    assert not any("graphed" in mode for _, mode in device.started)


@pytest.mark.parametrize("control", [7.0, 9.0])
def test_where_launches_bind_a_graph_tells(timed, control):
    """A deep network of many small kernels takes as long as the host takes to launch them, which differs between processes."""
    graphed = {("variant", "graphed forward"): 0.5, ("eager", "graphed forward"): 1.0}
    device = Device(MS | graphed | {"variant": 6.0, ("control", "forward"): control})
    device.launch_ms = {"eager": 6.5}
    found = timed(device)
    assert found["launch_ms"] == 6.5 and found["graphed"]["not_graphed"] == []
    assert found["graphed"]["speedup"]["eager"]["ratio"] == pytest.approx(2)
    assert (timing.IN_A_GRAPH in found["notes"]) == (control == 9.0)
    assert found["outcome"]["verdict"] != "not measured"


@pytest.fixture
def outside(monkeypatch):
    """outside(ratio): from now on the outer clock says so, within 5%; what it was asked about is in the list that it gives."""

    def says(ratio, failure=None):
        asked = []

        def measure(referee, players, *_):
            asked.append(sorted(players))
            if failure:
                raise WorkerFailure(failure)
            seen = {"ratio": ratio, "low": 0.95 * ratio, "high": 1.05 * ratio, "ms": 4.0, "eager_ms": 14.0}
            return Outer(**seen, **LEFT, warm=Ratio(ratio=WARM, low=WARM, high=WARM))

        monkeypatch.setattr(timing.outer, "measure", measure)
        return asked

    return says


WARM = 3.3  # of cold calls it is 3.5
LEFT = {"null_ms": 0.3, "control": 1.0, "rounds": 9, "calls": 1}


def time_as(timed, trust, is_catalogued=False, variant=4.0):
    """The result of a file that takes 4 ms, where eager PyTorch takes 14, on these terms."""
    device = Device(dict.fromkeys(BASELINES, 14.0) | {"variant": variant})
    stopwatch = timed.stopwatch(device, is_catalogued=is_catalogued, trust=trust)
    return dump(stopwatch.time(stopwatch.enter(device, timed.result(training=False))))


def test_the_caller_s_own_file_is_timed_by_the_inner_clock_alone_as_the_project_s_are(timed, outside):
    asked = outside(1.0)
    found = {(trust, own): time_as(timed, trust, own) for trust in TRUST for own in (True, False) if own or trust == MINE}
    assert not asked
    for each in found.values():
        assert each["speedup"] == each["measured"] == found[MINE, True]["speedup"] and each.get("proved") is None
        assert each["speedup"]["eager"]["ratio"] == pytest.approx(3.5) and each["outcome"]["verdict"] == "win"


def test_of_anybody_s_file_both_figures_are_kept_apart(timed, outside):
    asked = outside(3.4)
    found = time_as(timed, NOBODY)
    assert asked == [["control", "eager", "variant"]]
    assert found["speedup"]["eager"]["ratio"] == pytest.approx(WARM)
    assert found["measured"]["eager"]["ratio"] == pytest.approx(3.5)
    assert found["proved"] == pytest.approx({"ratio": 3.4, "low": 0.95 * 3.4, "high": 1.05 * 3.4})
    assert found["speedup"]["eager"]["low"] == found["proved"]["low"]


def test_where_the_outer_clock_counts_the_inner_one_plays_no_rounds_for_the_last_percents(timed, outside):
    outside(3.4)
    rounds = {trust: time_as(timed, trust, variant=lambda number: (4.0, 4.15)[number % 2])["rounds"] for trust in TRUST}
    assert rounds[NOBODY] == race.MIN_ROUNDS < rounds[MINE]


def test_what_the_outer_clock_cannot_bear_it_decides(timed, outside):
    outside(1.0)
    found = time_as(timed, NOBODY)
    assert found["speedup"]["eager"] == found["proved"] and found["proved"]["ratio"] == 1.0
    assert found["measured"]["eager"]["ratio"] == pytest.approx(3.5)


def test_what_is_measured_and_not_proved_counts_nowhere(timed, outside):
    outside(1.0, "its own processes go on")
    found = time_as(timed, NOBODY)
    assert found["speedup"] == {} and found.get("proved") is None and found["outcome"]["verdict"] == "not proved"
    assert found["measured"]["eager"]["ratio"] == pytest.approx(3.5) and "processes go on" in found["outcome"]["reason"]


def test_a_wrong_replay_is_rejected(timed):
    with pytest.raises(Rejected, match="wrong when it is timed: is off"):
        timed(Device(MS, {"graphed weights": "is off"}))
