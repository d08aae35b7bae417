"""The driver's side of the stopwatch: known ratios, and what is not what it seems."""

import contextlib
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from playground import catalog
from playground.driver import race, timing
from playground.driver.race import Patience, Quiet, Race, Rejected, Side
from playground.driver.runner import Options, Runner, Task
from playground.driver.timing import Measured, outcome, own_clock
from playground.machine.clocks import Clocks
from playground.report.progress import Progress
from playground.worker import WorkerFailure

PROBLEM = """
import time
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, x):
        time.sleep(0.05)
        return torch.tanh(self.linear(x))

batch_size, features, outputs = 5, 8, 4

def get_inputs():
    return [torch.rand(batch_size, features)]

def get_init_inputs():
    return [features, outputs]
"""

SOLUTION = """
import time
import torch
import torch.nn as nn

{top}

class ModelNew(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.linear = nn.Linear(features, outputs)
        self.calls = 0

    def forward(self, x):
        {forward}
"""


@pytest.fixture(scope="module")
def slow_problem(tmp_path_factory):
    """50 ms in every call, whatever else the machine does."""
    path = tmp_path_factory.mktemp("problem") / "slow.py"
    path.write_text(PROBLEM)
    return catalog.find_model(path)


RIGHT = "time.sleep({seconds}); return torch.tanh(self.linear(x))"
LATER_WRONG = """
self.calls += 1
if self.calls > 3:
    {wrong}
self.old = torch.tanh(self.linear(x))
return self.old
"""
PATCHED_STOPWATCH = """
from playground.stopwatch import timer
honest = timer.CpuClock.time
timer.CpuClock.time = lambda self, step: (0.001, False, honest(self, step)[2])
"""

# Name -> (body of forward, what stands at the top of the file). The warm-up calls each three times.
VARIANTS = {
    "same": (RIGHT.format(seconds=0.05), ""),
    "twice_as_slow": (RIGHT.format(seconds=0.1), ""),
    "faster_and_patches_time": (
        RIGHT.format(seconds=0.02),
        "time.perf_counter_ns = time.perf_counter = time.monotonic = lambda: 0",
    ),
    "patches_the_stopwatch": (RIGHT.format(seconds=0.05), PATCHED_STOPWATCH),
    "remembers": (LATER_WRONG.format(wrong="return self.old"), ""),
    "breaks": (LATER_WRONG.format(wrong="if self.calls > 6: raise ZeroDivisionError('enough')"), ""),
}


class Load:
    """An OtherLoad of a machine with 4 processors on which other processes use `cores`, whatever really runs."""

    def __init__(self, cores):
        self.cores = cores
        self.share = cores / 4
        self.watched = contextlib.nullcontext


class Quietly:
    """Others of whom none does anything."""

    def __init__(self, *pids):
        pass

    def busiest(self, least_steal):
        return []


def run(problem, variants, baselines=("eager",), others=0.0):
    """{name: result} of variants that are timed against `baselines`, and hardly judged: this is not about the judge.

    As far as the stopwatch can tell, other processes use as many processors as `others` says.
    """

    def no_probes(worker, truth, result, *_):
        result["check"] = {"max_error": 0.0, "allowed": 1.0, "eager_error": 0.0, "gradients": None, "mutants_rejected": None}
        result["verdict"] = "pass"
        return worker

    with pytest.MonkeyPatch.context() as patch, Progress() as progress:
        patch.setattr("playground.driver.session.judge", no_probes)
        patch.setattr(Runner, "build", lambda *_: None)
        patch.setattr(timing, "judge", lambda *_: None)
        patch.setattr(timing, "names_for", lambda *_: baselines)
        patch.setattr(timing.Stopwatch, "_floor", lambda *_: {"floor_ms": None, "floor_bound": None})
        patch.setattr(timing, "OtherLoad", lambda pid: Load(others))
        patch.setattr(race, "OtherLoad", lambda *pids: Load(0.0))
        results = Runner(Options(quick=True), progress).run([Task(problem, variant, "cpu") for variant in variants])
    return {result["variant"]: result for result in results}


@pytest.fixture(scope="module")
def written(write_variant):
    """{name: catalog.Variant}"""

    def body(forward):
        return forward.strip().replace("\n", "\n        ")

    return {name: write_variant(name, SOLUTION.format(top=top, forward=body(fwd))) for name, (fwd, top) in VARIANTS.items()}


@pytest.fixture(scope="module")
def results(slow_problem, written):
    return run(slow_problem, [written[name] for name in VARIANTS if name not in ("same", "twice_as_slow")])


@pytest.mark.full
def test_a_model_against_itself_is_a_tie(slow_problem, written):
    results = run(slow_problem, [written["same"], written["twice_as_slow"]])
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
    assert (fast["verdict"], fast["outcome"]["verdict"]) == ("pass", "win")
    assert fast["speedup"]["eager"]["ratio"] == pytest.approx(2.5, rel=0.15)
    assert fast["time_ms"]["median"] >= 20


def test_a_patched_stopwatch_is_seen_from_outside(results):
    patched = results["patches_the_stopwatch"]
    assert patched["verdict"] == "fail"
    assert patched["reason"].startswith("its process reports 0.001 ms a call, but the driver's clock sees ")
    assert patched["time_ms"] is None and patched["speedup"] is None and patched["outcome"] is None


BUSY = (
    "the machine was busy: other processes used {}% of the cores while the clocks were compared, so the {} ms a call that its "
    "process reports may be true, or not: the driver's clock sees {} ms; run again when it is quiet"
)


def test_what_is_right_at_first_and_wrong_when_it_is_timed(results):
    wrong = results["remembers"]
    assert wrong["verdict"] == "fail"
    assert wrong["reason"].startswith("is right when it is checked and wrong when it is timed: the output is off by")
    assert wrong["time_ms"] is None


def test_a_variant_that_breaks_when_it_is_timed(results):
    assert (results["breaks"]["verdict"], results["breaks"]["reason"]) == ("error", "ZeroDivisionError: enough")


class Process:
    """Answers as a worker would, from lists of times."""

    def __init__(self, samples, seconds=0.0, flushes=None, in_a_row=()):
        self.flushes = flushes or [0.1]
        self.in_a_row = list(in_a_row)
        self.samples = samples
        self.seconds = seconds
        self.repeated = []

    def __call__(self, request, side, mode, **arguments):
        if request == "start":
            return {"milliseconds": 30.0, "peak_mib": None}
        if request == "time":
            count = len(arguments["seeds"])
            return {
                "samples_ms": (self.samples * count)[:count],
                "late": [False] * count,
                "flush_ms": (self.flushes * count)[:count],
                "launch_ms": [0.01] * count,
            }
        if request == "flush_in_a_row":
            return {"milliseconds": arguments["flush_ms"] * (self.in_a_row.pop(0) if self.in_a_row else 1.0)}
        if request == "repeat":
            self.repeated.append(arguments["count"])
            import time

            time.sleep(self.seconds * arguments["count"])
        return {}


def played(name, *process, settling=0):
    side = Side(name, "forward", settling, Process(*process))
    side.start()
    for seed in range(9):
        side.play(seed)
    return side


def test_calls_of_a_round_cannot_be_foreseen_and_settling_is_not_counted():
    side = played("eager", [7.0, 1.0, 1.0, 1.0, 1.0, 1.0], settling=1)
    assert {len(samples) for samples in side.rounds} <= {2, 3, 4}
    assert len({len(samples) for samples in side.rounds}) > 1
    assert set(side.samples) == {1.0}


@pytest.mark.parametrize("nonsense", [[math.nan], [-1.0], [math.inf]])
def test_times_that_are_none(nonsense):
    side = Side("variant", "forward", 0, Process(nonsense))
    side.start()
    with pytest.raises(Rejected, match="was asked to time"):
        side.play(1)


def test_too_few_times():
    class Short(Process):
        def __call__(self, request, **arguments):
            answer = super().__call__(request, **arguments)
            return {key: value[1:] for key, value in answer.items()} if request == "time" else answer

    side = Side("variant", "forward", 0, Short([1.0]))
    side.start()
    with pytest.raises(Rejected):
        side.play(1)


def test_own_clock_counts_every_call_once(monkeypatch):
    monkeypatch.setattr(timing, "PAUSES", (0.0, 0.0))
    side = played("variant", [1.0], 0.002)
    assert own_clock(side, 1.0, 1.5) >= 2.0
    repeated = side._ask.repeated
    assert len(repeated) == 4 + 2 * (1 + timing.SHORT_TRIES) and all(3 <= count <= 1000 for count in repeated)
    assert max(repeated[5:9]) < min(repeated[1:5])  # short ones


def test_own_clock_watches_what_else_runs_in_every_try(monkeypatch):
    monkeypatch.setattr(timing, "PAUSES", (0.0,))
    side, load, began = played("variant", [1.0], 0.002), Load(0.0), []
    load.watched = lambda: contextlib.nullcontext(began.append(len(side._ask.repeated)))
    own_clock(side, 1.0, 1.5, load)
    assert began == list(range(len(side._ask.repeated)))


def test_own_clock_stops_at_the_first_try_within_the_limit():
    side = played("variant", [1.0], 0.002)
    assert own_clock(side, 1.0, 100.0) >= 2.0
    assert len(side._ask.repeated) == 1


def compared(monkeypatch, place, claimed, seen, others):
    """What comes of a variant that claims so many ms, where the driver sees others, beside a load of so many cores."""
    monkeypatch.setattr(timing, "own_clock", lambda side, *_: seen)
    stopwatch = timing.Stopwatch(SimpleNamespace(place=place), {}, None, None, None, Measured(Patience(10.0)))
    variant = played("variant", [claimed])
    load = Load(others)
    back_to_back, limit = stopwatch._own_clock(variant, None, load, contextlib.nullcontext)
    return back_to_back, stopwatch._heed_own_clock(variant, back_to_back, limit, load), variant.median


@pytest.mark.parametrize(
    "place, seen, others",
    [("cpu", 2.0, 0.0), ("cpu", 2.0, 0.2), ("cpu", 100.0, 0.9), ("cuda", 2.7, 0.0), ("cuda", 4.0, 1.0), ("cuda", 100.0, 3.8)],
)
def test_a_difference_that_load_does_not_explain(monkeypatch, place, seen, others):
    with pytest.raises(Rejected, match=rf"its process reports 1 ms a call, but the driver's clock sees {seen:g} ms"):
        compared(monkeypatch, place, 1.0, seen, others)


@pytest.mark.parametrize(
    "place, seen, others, percent",
    [("cpu", 2.0, 0.24, 6), ("cpu", 100.0, 1.0, 25), ("cpu", 100.0, 4.0, 100), ("cuda", 4.0, 1.6, 40)],
)
def test_a_difference_that_load_explains_is_said(monkeypatch, place, seen, others, percent):
    back_to_back, notes, counted = compared(monkeypatch, place, 1.0, seen, others)
    assert back_to_back == seen
    assert notes[0] == BUSY.format(percent, 1, f"{seen:g}")
    assert (counted, len(notes)) == ((1.0, 1) if place == "cpu" else (seen, 2))


@pytest.mark.parametrize("others", [0.0, 4.0])
def test_what_is_within_the_limit_needs_no_note(monkeypatch, others):
    assert compared(monkeypatch, "cpu", 1.0, 1.54, others) == (1.54, [], 1.0)
    seen, notes, counted = compared(monkeypatch, "cuda", 1.0, 1.7, others)
    assert (seen, counted) == (1.7, pytest.approx(1.7)) and [note[:12] for note in notes] == ["back to back"]


def test_outcome_is_against_the_fastest_that_is_as_precise():
    others = [played(name, [ms]) for name, ms in (("eager", 4.0), ("compile", 2.0), ("eager_fp32", 3.0))]
    same = {"ratio": 1.0, "low": 1.0, "high": 1.0}
    strict = outcome(played("variant", [1.0]), others, {"precision": "fp32", "variant_precision": None}, same)
    assert (strict["against"], strict["ratio"], strict["any_precision"]) == ("eager_fp32", 3.0, "compile")
    tf32 = outcome(played("variant", [1.0]), others, {"precision": "tf32", "variant_precision": None}, same)
    assert (tf32["against"], tf32["verdict"], tf32["any_precision"]) == ("compile", "win", None)
    lower = outcome(played("variant", [4.0]), others, {"precision": "fp32", "variant_precision": "fp16"}, same)
    assert (lower["against"], lower["verdict"]) == ("compile", "loss")
    others += [played("compile_fp16", [1.5])]
    assert outcome(played("variant", [1.0]), others, {"precision": "fp32", "variant_precision": None}, same) == strict
    assert outcome(played("variant", [1.0]), others, {"precision": "tf32", "variant_precision": None}, same) == tf32
    lower = outcome(played("variant", [1.0]), others, {"precision": "tf32", "variant_precision": "fp16"}, same)
    assert (lower["against"], lower["verdict"]) == ("compile_fp16", "win")
    assert outcome(played("variant", [1.0]), [], {"precision": "fp32", "variant_precision": None}, same) is None


@pytest.mark.parametrize("precise_after, rounds, rechecked", [(9, 9, 2), (12, 15, 3), (21, 24, 3)])
def test_results_of_the_last_rounds_are_rechecked_too(tmp_path, monkeypatch, precise_after, rounds, rechecked):
    """A variant could wait for the first nine rounds to be over."""
    gpu = FakeGpu({"variant": 2.0, "eager": 8.0})
    stopwatch = gpu.stopwatch(tmp_path, monkeypatch)
    monkeypatch.setattr(timing, "names_for", lambda *_: ["eager"])
    monkeypatch.setattr(timing.statistics, "is_precise", lambda _: len(played_rounds) >= precise_after)
    played_rounds, at, play, recheck = [], [], race.Side.play, timing.Stopwatch._recheck

    def counting(side, seed):
        if side.name == "variant":
            played_rounds.append(seed)
        play(side, seed)

    def watching(self, variant, *arguments):
        at.append(len(variant.rounds))
        recheck(self, variant, *arguments)

    monkeypatch.setattr(race.Side, "play", counting)
    monkeypatch.setattr(timing.Stopwatch, "_recheck", watching)
    timed = stopwatch._time_mode(gpu, gpu.result(), "forward")
    assert (timed["rounds"], timed["rechecked"], len(gpu.compared)) == (rounds, rechecked, rechecked)
    assert max(at[:2]) <= race.MIN_ROUNDS and all(rounds - race.ROUNDS_BETWEEN_LOOKS < each <= rounds for each in at[2:])
    assert len(gpu.truths) == 3, "a pause in the middle would announce a recheck"


def test_threads_are_timed_one_after_the_other(tmp_path, monkeypatch):
    """Another's graph in the baselines' process would take the place of the one that is being timed."""
    stopwatch = FakeGpu({"variant": 2.0, "eager": 8.0}).stopwatch(tmp_path, monkeypatch)
    inside, most = [], []

    def time_mode(*_):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return {}

    for method in ("_time_mode", "_start_baselines"):
        monkeypatch.setattr(stopwatch, method, time_mode)
    for method in ("_add_graphed", "_start_control"):
        monkeypatch.setattr(stopwatch, method, lambda *_: None)
    with ThreadPoolExecutor(4) as threads:
        for call in [*[lambda: stopwatch.time(None, {"caveats": []})] * 4, stopwatch.warm_up]:
            threads.submit(call)
    assert len(most) == 5 and max(most) == 1


def test_a_floor_that_cannot_be_counted_is_asked_for_once(tmp_path, monkeypatch):
    gpu = FakeGpu({"variant": 2.0, "eager": 8.0})
    count, asked = timing.Stopwatch._floor, []
    stopwatch = gpu.stopwatch(tmp_path, monkeypatch)
    monkeypatch.setattr(timing, "names_for", lambda *_: ["eager"])
    monkeypatch.setattr(timing.Stopwatch, "_floor", count)
    stopwatch._task.model.catalogued_as = None

    def ask(self, request, **arguments):
        if request == "work":
            asked.append(request)
            raise WorkerFailure("RuntimeError: no meta")
        return gpu.ask(request, 0, **arguments)

    monkeypatch.setattr(timing.Stopwatch, "_ask_baselines", ask)
    for _ in range(2):
        timed = stopwatch._time_mode(gpu, gpu.result(), "forward")
        assert timed["floor_ms"] is None and timed["baselines_unavailable"] == {"floor": "RuntimeError: no meta"}
    assert asked == ["work"]


def test_disturbances(slow_problem, written, monkeypatch):
    """A clock that drops is said; a baseline that stops working is left out, and the others go on."""
    seen = iter([Clocks(1980, 1980, 50, ()), Clocks(1980, 1980, 50, ()), Clocks(1200, 1980, 80, ("power cap",))])
    monkeypatch.setattr(timing.Stopwatch, "_sample_clocks", lambda self: next(seen))
    honest, asked = timing.Stopwatch._ask_baselines, []

    def failing(self, request, **arguments):
        if arguments.get("side") == "channels_last" and request == "time":
            asked.append(request)
            self._worker.close()
            self._worker, self._started = None, {}
            raise WorkerFailure("crashed (SIGSEGV)")
        return honest(self, request, **arguments)

    monkeypatch.setattr(timing.Stopwatch, "_ask_baselines", failing)
    result = run(slow_problem, [written["same"]], ["eager", "channels_last"])["same"]
    assert result["verdict"] == "pass"
    assert result["baselines_unavailable"] == {"channels_last": "crashed (SIGSEGV)"} and len(asked) == 1
    assert set(result["speedup"]) == {"eager"}
    assert result["notes"] == [
        "the GPU was slowed down while it was timed: power cap",
        "the SM clock went from 1980 to 1200 MHz while it was timed",
    ]
    assert result["clocks"]["after"]["sm_mhz"] == 1200


def raced(played_by, loads=(), patience=10.0, control=("control", [4.0]), seconds=0.0, flushes=None, slower=(), in_a_row=()):
    """A Race of a variant of 1 ms and eager PyTorch of 4, in whose rounds other processes use `loads` processors, then none.

    `slower` are the milliseconds of further baselines; of flushes in a row each takes `in_a_row` times as long as one alone.
    """
    left = list(loads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "OtherLoad", lambda *pids: Load(left.pop(0) if left else 0.0))
        patch.setattr(race, "Others", played_by)
        patch.setattr(race, "PAUSE", 0.0)
        variant = Side("variant", "forward", 0, Process([1.0]), is_trusted=False)
        eager = Side("eager", "forward", 0, Process([4.0], flushes=flushes, in_a_row=in_a_row))
        original = control and Side(control[0], "forward", 0, Process(control[1]))
        others = [eager, *(Side(f"of {ms} ms", "forward", 0, Process([ms])) for ms in slower)]
        for side in filter(None, (variant, *others, original)):
            side.start()
        made = Race("cuda" if flushes else "cpu", variant, others, original, [], Quiet(), lambda: [eager])
        made.run(seconds, Patience(patience), [1, 2, 3], 0, lambda seed: None)
    return made


class Compiler(Quietly):
    def busiest(self, least_steal):
        return ["cc1plus -quiet, pid 42, used 1.97 cores"]


def test_rounds_that_others_disturb_do_not_count():
    made = raced(Compiler, loads=[0.0, 1.5, 0.1, 2.0])
    undisturbed = race.MIN_ROUNDS + race.ROUNDS_BETWEEN_LOOKS  # the last ones, since more were played than are rechecked
    assert (made._played, len(made.variant.rounds)) == (undisturbed + 2, undisturbed)
    assert made.disturbance() is None
    assert made.control() == {"ratio": 1.0, "low": 1.0, "high": 1.0}


def test_a_baseline_far_from_the_fastest_is_not_timed_longer_than_an_interval_takes():
    made = raced(Quietly, loads=[1.5], slower=[4.2, 9.0])
    played = {side.name: len(side.rounds) for side in made.others}
    assert played == {"eager": len(made.variant.rounds), "of 4.2 ms": race.MIN_ROUNDS, "of 9.0 ms": race.FIRST_LOOK}


def test_where_the_machine_stays_busy_it_is_said_who_kept_it_so():
    made = raced(Compiler, loads=[1.5] * 99, patience=0.0)
    assert made._played == race.MIN_ROUNDS
    assert made.disturbance() == "the machine is busy (cc1plus -quiet, pid 42, used 1.97 cores)"
    assert len(made.variant.rounds) == race.MIN_ROUNDS, "what was seen is reported all the same"


def test_a_control_that_is_not_itself_is_a_disturbance():
    assert raced(Quietly, control=("control", [4.1])).disturbance() is None
    made = raced(Quietly, control=("control", [5.0]))
    assert made.disturbance() == "the machine is busy (the original against itself came out at 0.8x)"


def test_the_originals_own_times_show_a_disturbance():
    made = raced(Quietly, control=("control", [4.0, 9.0]))
    assert made.disturbance() == "the machine is busy (the original took 4 to 9 ms)"


def test_flushes_that_take_longer_show_another_user_of_the_gpu():
    busy = raced(Quietly, flushes=[0.3], patience=0.0)  # those of the control take 0.1
    assert busy.disturbance() == "the machine is busy (other processes used what is timed)"
    assert raced(Quietly, flushes=[0.1, 0.105]).disturbance() is None


def test_flushes_in_a_row_show_a_process_that_has_the_gpu_in_turns():
    busy = raced(Quietly, flushes=[0.1], in_a_row=[1.9] * 99, patience=0.0)
    assert busy.disturbance() == "the machine is busy (other processes used what is timed)"
    for_a_while = raced(Quietly, flushes=[0.1], in_a_row=[1.9, 1.02, 1.9])
    assert for_a_while.disturbance() is None and for_a_while._played == len(for_a_while.variant.rounds) + 2


def test_controls_of_several_timings_allow_the_least_that_any_does():
    controls = [{"ratio": 1.0, "low": 0.97, "high": 1.01}, {"ratio": 1.05, "low": 1.02, "high": 1.08}]
    assert race.statistics.spanning(controls, luck=0.05) == {"low": 0.95, "high": 1.08}
    allowed = race.statistics.spanning(controls, luck=0.0)
    assert allowed == {"low": 0.97, "high": 1.08}
    ratio = {"ratio": 1.06, "low": 1.05, "high": 1.07}
    assert race.statistics.verdict(race.statistics.widened(ratio, controls[0])) == "win"
    assert race.statistics.verdict(race.statistics.widened(ratio, allowed)) == "tie"


def test_launches_differ_between_two_processes_by_more_than_the_control_of_two_others_shows():
    def allowed(place, variant_ms, mode="forward"):
        variant, eager = played("variant", [variant_ms]), played("eager", [variant_ms * 1.05])
        variant.mode = mode
        control = played("control", [variant_ms * 1.05])
        made = Race(place, variant, [eager], control, [], Quiet(), lambda: [eager])
        return made.luck(), race.statistics.spanning([made.control()], made.luck())

    assert allowed("cuda", 0.015) == (0.07, pytest.approx({"low": 0.93, "high": 1.07}))
    assert allowed("cuda", 0.015, "graphed forward")[0] == pytest.approx(0.02)
    assert allowed("cuda", 1.5)[0] == allowed("cpu", 0.015)[0] == 0.0
    assert allowed("cuda", 1.5)[1] == {"low": 1.0, "high": 1.0}


def test_a_claim_is_only_as_narrow_as_the_control():
    ratio = {"ratio": 1.04, "low": 1.03, "high": 1.05}
    assert race.statistics.widened(ratio, {"ratio": 1.0, "low": 1.0, "high": 1.0}) == ratio
    wide = race.statistics.widened(ratio, {"ratio": 1.02, "low": 0.98, "high": 1.04})
    assert wide["ratio"] == 1.04 and wide["low"] == pytest.approx(1.03 / 1.04) and wide["high"] == pytest.approx(1.05 / 0.98)
    assert race.statistics.verdict(wide) == "tie"
    others = [played("eager", [1.04])]
    known = {"precision": "fp32", "variant_precision": None}
    assert outcome(played("variant", [1.0]), others, known, {"ratio": 1.0, "low": 1.0, "high": 1.0})["verdict"] == "win"
    assert outcome(played("variant", [1.0]), others, known, {"ratio": 1.0, "low": 1.0, "high": 1.04})["verdict"] == "tie"
    noisy = {"ratio": 1.0, "low": 0.7, "high": 1.4}
    assert outcome(played("variant", [1.0]), others, known, noisy)["reason"] == "too noisy: anything from 0.743x to 1.49x"
    withheld = outcome(played("variant", [1.0]), others, known, None, "the machine is busy (...)")
    assert (withheld["verdict"], withheld["ratio"], withheld["reason"]) == ("not measured", None, "the machine is busy (...)")


STRICT = dict.fromkeys(("eager_fp32", "channels_last_fp32", "compile_fp32"), 9.0)
MS = {  # of fake sides, in any mode unless it is named
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


def side_of(gpu, name, mode):
    """The control, which takes as long as that side."""
    side = Side("control", mode, 1, lambda request, side, **more: gpu.ask(request, 0, side=name, **more))
    side.start()
    return side


class Referee:
    pid = os.getpid()


class FakeGpu:
    """Workers on a GPU, as far as the driver can tell: they answer with the times in `ms`, and fail where `failing` says so."""

    pid = os.getpid()

    def __init__(self, ms, failing=()):
        self.ms = ms
        self.in_a_row = 1.0  # how long each of many flushes takes, beside one alone
        self.late = False  # whether the device is busy on other streams after the variant's calls
        self.free_mib = 8.0  # beside the variant; eager PyTorch takes 1
        self.failing = dict(failing)
        self.launch_ms = {}  # side -> what the host takes to launch a call
        self.started = []
        self.compared = []
        self.truths = []

    def ask(self, what, limit, side=None, mode=None, seeds=(), **arguments):
        request = what.removeprefix("candidate.")
        if request == "start":
            self.started.append((side, mode))
            if (side, mode) in self.failing:
                raise WorkerFailure(self.failing[side, mode])
            return {"milliseconds": 60.0, "peak_mib": 1.0}
        if request == "free_memory":
            return {"mib": self.free_mib}
        if request == "flush_in_a_row":
            return {"milliseconds": self.in_a_row * arguments["flush_ms"]}
        times = [self.ms.get((side, mode), self.ms.get(side))] * len(seeds)
        late = [side == "variant" and self.late] * len(seeds)
        answer = {"samples_ms": times, "late": late, "flush_ms": [0.1] * len(seeds)}
        return answer | {"launch_ms": [self.launch_ms.get(side, 0.01)] * len(seeds)} if request == "time" else {}

    def stopwatch(self, tmp_path, monkeypatch):
        monkeypatch.setattr(
            timing.Stopwatch, "_ask_baselines", lambda _, request, **arguments: self.ask(request, 0, **arguments)
        )
        monkeypatch.setattr(timing.Stopwatch, "_start_control", self.control)
        monkeypatch.setattr(timing.Stopwatch, "_floor", lambda *_: {"floor_ms": None, "floor_bound": None})
        monkeypatch.setattr(timing.clocks, "sample", lambda: None)
        monkeypatch.setattr(timing, "OtherLoad", lambda pid: Load(0.0))
        monkeypatch.setattr(race, "OtherLoad", lambda *pids: Load(0.0))
        monkeypatch.setattr(race, "Others", Quietly)
        silent = SimpleNamespace(started=lambda *_: None, finished=lambda *_: None)
        variant, model = SimpleNamespace(is_catalogued=True), SimpleNamespace(name="model")
        task = SimpleNamespace(place="cuda", model=model, variant=variant, names=lambda what: ("model", what))
        return timing.Stopwatch(task, {}, self.truth(tmp_path), Options(training=True), silent, Measured(Patience(10.0)))

    def control(self, mode, not_graphed):
        """As fast as eager, which it is."""
        return side_of(self, "eager", mode.removeprefix("graphed ") if "eager" in not_graphed else mode)

    def truth(self, folder):
        def compare(what, probe, *_):
            self.compared.append((what, " ".join(probe.split()[1:-1])))
            return {"complaint": None} if what == "outputs" else {"w": {"complaint": None}}

        return SimpleNamespace(
            answers=lambda worker: folder,
            compare=compare,
            prepare_timed=lambda probe, step, seed: self.truths.append(step),
            worker=Referee(),
            reserved=contextlib.nullcontext,
        )

    def result(self):
        return {"check": {"gradients": {"w": {}}}, "precision": "tf32", "variant_precision": None}


def test_beside_a_variant_that_takes_the_memory_nothing_is_claimed(tmp_path, monkeypatch):
    gpu = FakeGpu(MS)
    gpu.free_mib = 0.75
    monkeypatch.setattr(timing, "own_clock", lambda side, *_: side.median)
    timed = gpu.stopwatch(tmp_path, monkeypatch).time(gpu, gpu.result())
    assert timed["outcome"]["verdict"] == "not measured" and not timed["speedup"]
    assert timed["outcome"]["reason"] == "only 0.75 MiB of GPU memory are free beside it, PyTorch may need 1"


@pytest.mark.parametrize("late", [True, False])
def test_work_on_other_streams_is_told(tmp_path, monkeypatch, late):
    gpu = FakeGpu(MS)
    gpu.late = late
    monkeypatch.setattr(timing, "own_clock", lambda side, *_: side.median)
    timed = gpu.stopwatch(tmp_path, monkeypatch).time(gpu, gpu.result())
    assert (timing.LATE_NOTE in timed["notes"]) == late


@pytest.mark.parametrize("shared", [True, False])
def test_on_a_gpu_that_another_process_uses_the_drivers_clock_says_nothing(tmp_path, monkeypatch, shared):
    """Whether one does is looked at while the variant's process stands still."""
    gpu, runs_on = FakeGpu(MS), []

    def slow(side, *_):
        gpu.in_a_row = 2.0 if shared else 1.0
        return 100.0 if side.name == "variant" else side.median

    def pause_others(but, *_):
        runs_on.append(gpu in but)
        return contextlib.nullcontext()

    monkeypatch.setattr(timing, "own_clock", slow)
    monkeypatch.setattr(timing, "pause_others", pause_others)
    stopwatch = gpu.stopwatch(tmp_path, monkeypatch)
    if not shared:
        with pytest.raises(Rejected, match="the driver's clock sees 100 ms"):
            stopwatch._time_mode(gpu, gpu.result(), "forward")
        return
    timed = stopwatch._time_mode(gpu, gpu.result(), "forward")
    assert (timed["outcome"]["verdict"], timed["outcome"]["reason"]) == ("not measured", timing.SHARED)
    assert (timed["time_ms"]["median"], timed["speedup"], runs_on) == (0.3, {}, [True, True, False])


def test_one_timing_does_not_use_up_what_a_whole_run_has_for_a_busy_machine(tmp_path, monkeypatch):
    def run(self, seconds, patience, *_):
        had.append(patience.seconds)
        patience.spend(25.0)
        raise Rejected("enough")

    gpu, had = FakeGpu(MS), []
    monkeypatch.delenv("PLAYGROUND_PATIENCE")
    monkeypatch.setattr(race.Race, "run", run)
    stopwatch = gpu.stopwatch(tmp_path, monkeypatch)
    stopwatch._measured.patience = whole = Patience(80.0)
    for _ in range(3):
        with pytest.raises(Rejected):
            stopwatch._time_mode(gpu, gpu.result(), "forward")
    assert (had, whole.seconds) == ([30.0, 30.0, 30.0], 5.0)
    assert whole.portion(30.0).seconds == 5.0


def test_an_earlier_timing_s_control_widens_a_later_one_s_interval(tmp_path, monkeypatch):
    gpu, controls = FakeGpu(MS), [{"ratio": 1.0, "low": 0.8, "high": 1.25}, {"ratio": 1.0, "low": 1.0, "high": 1.0}]
    monkeypatch.setattr(timing, "own_clock", lambda side, *_: side.median)
    monkeypatch.setattr(race.Race, "control", lambda _: controls[0])
    stopwatch = gpu.stopwatch(tmp_path, monkeypatch)
    earlier = stopwatch._time_mode(gpu, gpu.result(), "forward")
    controls.pop(0)
    later = stopwatch._time_mode(gpu, gpu.result(), "forward")
    assert later["control"]["high"] == 1.0
    assert later["outcome"]["low"] == earlier["outcome"]["low"] == pytest.approx(later["outcome"]["ratio"] / 1.25)
    assert later["speedup"] == earlier["speedup"]


def test_short_steps_are_timed_in_graphs_and_slow_baselines_as_they_are(tmp_path, monkeypatch):
    gpu = FakeGpu(MS, {("compile", "graphed weights"): "RuntimeError: cannot be captured"})
    timed = gpu.stopwatch(tmp_path, monkeypatch).time(gpu, gpu.result())
    graphed = timed["graphed"]
    assert (timed["outcome"]["against"], timed["outcome"]["ratio"]) == ("channels_last_fp32", pytest.approx(2))
    assert (graphed["outcome"]["against"], graphed["outcome"]["ratio"]) == ("channels_last_fp32", pytest.approx(6))
    assert graphed["not_graphed"] == ["eager", "channels_last"] and graphed["speedup"]["eager"]["ratio"] == pytest.approx(70)
    assert graphed["notes"] == []
    weights = timed["training"]["weights"]["graphed"]
    assert weights["time_ms"]["median"] == 0.2 and weights["baselines_ms"]["eager"]["median"] == 7.0
    assert weights["baselines_unavailable"] == {"compile": "RuntimeError: cannot be captured"}
    assert (
        weights["notes"][0] == "torch.compile, the fastest without a graph, could not be timed in one: the ratio is over eager"
    )
    assert set(graphed) - {"not_graphed"} == set(timed) - {"graphed", "training", "ceilings"}
    modes = [mode for side, mode in gpu.started if side == "variant"]
    assert list(dict.fromkeys(modes)) == ["forward", "weights", "graphed forward", "graphed weights"]
    assert not {("eager", "graphed forward"), ("eager", "graphed weights")} & set(gpu.started)
    assert {("gradients", "graphed weights"), ("outputs", "graphed forward")} <= set(gpu.compared)
    assert gpu.truths == [*3 * ["forward"], *2 * ["weights"], *3 * ["forward"], *2 * ["weights"]]


def test_a_variant_that_cannot_be_captured_is_timed_without_a_graph(tmp_path, monkeypatch):
    gpu = FakeGpu(MS, {("variant", "graphed forward"): "RuntimeError: it waits"})
    timed = gpu.stopwatch(tmp_path, monkeypatch).time(gpu, gpu.result())
    assert timed["graphed"] == {"unavailable": "RuntimeError: it waits"}
    other = timed["training"]["weights"]["graphed"]
    assert other == {"unavailable": "not tried after that of another mode had failed: RuntimeError: it waits"}
    assert timed["time_ms"]["median"] == timed["training"]["weights"]["time_ms"]["median"] == 0.3


@pytest.mark.parametrize("tag", ["no-graph", "default-stream"])
def test_what_no_graph_can_hold_is_not_captured(tmp_path, monkeypatch, tag):
    gpu = FakeGpu(MS)
    timed = gpu.stopwatch(tmp_path, monkeypatch).time(gpu, gpu.result() | {"caveats": [{"tag": tag}]})
    assert timed["time_ms"]["median"] == 0.3 and "graphed" not in timed
    assert not any("graphed" in mode for _, mode in gpu.started)


def test_long_steps_are_not_timed_in_graphs(tmp_path, monkeypatch):
    gpu = FakeGpu({"variant": 1.1, "eager": 2.0, "channels_last": 1.0, "compile": 9.0, "compile_fp16": 9.0, **STRICT})
    timed = gpu.stopwatch(tmp_path, monkeypatch).time(gpu, gpu.result())
    assert timed["graphed"] is None and timed["training"]["weights"]["graphed"] is None
    assert not any("graphed" in mode for _, mode in gpu.started)


@pytest.mark.parametrize("control", [7.0, 9.0])
def test_where_launches_bind_a_graph_tells(tmp_path, monkeypatch, control):
    """A deep network of many small kernels takes as long as the host takes to launch them, which differs between processes."""
    gpu = FakeGpu(
        {**MS, "variant": 6.0, "control": control, ("variant", "graphed forward"): 0.5, ("eager", "graphed forward"): 1.0}
    )
    gpu.launch_ms = {"eager": 6.5}
    monkeypatch.setattr(gpu, "control", lambda _, mode, __: side_of(gpu, "control" if mode == "forward" else "eager", mode))
    timed = gpu.stopwatch(tmp_path, monkeypatch).time(gpu, gpu.result())
    assert timed["launch_ms"] == 6.5 and timed["graphed"]["not_graphed"] == []
    assert timed["graphed"]["speedup"]["eager"]["ratio"] == pytest.approx(2)
    assert (timing.IN_A_GRAPH in timed["notes"]) == (control == 9.0)
    assert timed["outcome"]["verdict"] != "not measured"


def test_a_wrong_replay_is_rejected(tmp_path, monkeypatch):
    gpu = FakeGpu(MS)
    stopwatch = gpu.stopwatch(tmp_path, monkeypatch)
    honest = stopwatch._referee.compare

    def compare(what, probe, *rest):
        return {"w": {"complaint": "is off"}} if "graphed weights" in probe else honest(what, probe, *rest)

    stopwatch._referee.compare = compare
    with pytest.raises(Rejected, match="wrong when it is timed: is off"):
        stopwatch.time(gpu, gpu.result())
