"""`from playground import compare`: what it takes, what it tells, and that nothing is left of a call."""

import gc
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from playground import catalog, compare
from playground.api import CannotCompare, Comparison
from playground.record import Outcome, Ratio, Spread, Timed
from playground.serial import values
from playground.worker import UNTIMED, prepare, process
from tests.conftest import TINY_PROBLEM as PROBLEM

RIGHT = PROBLEM.replace("class Model(", "class ModelNew(")
WRONG = RIGHT.replace("tanh", "sigmoid")
RAISES = "raise ValueError('no')\n"


@pytest.fixture
def left_behind(tmp_path, tmp_path_factory, monkeypatch):
    """left_behind() counts what a call could leave: open files, processes, threads, temporary files.

    The servers that fork workers are there already, and stay for the next call.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where tensors are exchanged
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))  # PyTorch's own, which stays
    prepare()
    prepare(UNTIMED)
    return lambda: {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "processes": len(psutil.Process().children(recursive=True)),
        "workers": len(process._living),
        "threads": threading.active_count(),
        "temporary": len(list(tmp_path.iterdir())),
    }


def test_a_right_solution_is_told_with_its_times(tmp_path, monkeypatch, no_sandbox):
    """The problem is a path, the solution a text; a setting changes the problem's constant. The stopwatch's answer is given."""
    ratio = Ratio(ratio=2.0, low=1.9, high=2.1)
    own, eager = (Spread(median=ms, p20=ms, p80=ms) for ms in (0.1, 0.2))
    won = Outcome(verdict="win", against="eager", **values(ratio))
    found = Timed(time_ms=own, peak_mib=None, baselines_ms={"eager": eager}, speedup={"eager": ratio}, outcome=won)
    for name, answer in (("start_processes", None), ("warm_up", None), ("time", found)):
        monkeypatch.setattr(f"playground.driver.timing.Stopwatch.{name}", lambda *_, answer=answer: answer)
    (tmp_path / "tanh.py").write_text(PROBLEM)
    found = compare(tmp_path / "tanh.py", RIGHT, settings={"batch_size": 3}, device="cpu", standard="drop-in")
    assert isinstance(found, Comparison) and found.verdict == "pass" and found.is_right, found.details
    assert (found.reason, found.ran_on, found.result["model"]) == (None, "cpu", "tanh")
    assert (found.milliseconds, found.baselines, found.not_measured) == (0.1, {"eager": 0.2}, None)
    assert found.speedups == dict.fromkeys(("eager", "fastest"), ratio)
    assert found.result["shape"]["inputs"] == [[3, 8]]


def test_a_wrong_solution_is_told_and_nothing_is_raised(left_behind):
    before = left_behind()
    wrong = compare(PROBLEM, WRONG, device="cpu")
    assert (wrong.verdict, wrong.is_right, wrong.milliseconds, wrong.speedups) == ("fail", False, None, {})
    assert "standard deviations" in wrong.reason
    assert left_behind() == before


def test_modules_names_and_what_does_not_run_there():
    model = catalog.find_model("alexnet_conv1")
    module = catalog.load_variant(catalog.find_variant(model, "v1_direct").path)
    skipped = compare("alexnet_conv1", module, device="cpu")
    assert skipped.verdict == "skipped" and not skipped.is_right and skipped.reason == "it does not run on device 'cpu'"


@pytest.mark.parametrize(
    "arguments, error, complaint",
    [
        ({"problem": "nowhere.py"}, catalog.CatalogError, "no model is called 'nowhere.py'"),
        ({"settings": {"batch": 1}}, catalog.CatalogError, "no constant called batch; it has: batch_size"),
        ({"solution": 3}, TypeError, "expected a path, a name, the text of a file or a module, got int"),
        ({"solution": ModuleType("made")}, TypeError, "module 'made' has no file"),
        ({"device": "gpu"}, ValueError, "device is 'gpu', expected one of 'auto', 'cuda', 'cpu', 'emulator'"),
        ({"standard": "backward"}, ValueError, "expected one of None, 'drop-in', 'forward'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, complaint):
    with pytest.raises(error, match=complaint):
        compare(**({"problem": PROBLEM, "solution": RIGHT} | arguments))


def test_a_machine_without_what_it_needs_says_so(monkeypatch):
    monkeypatch.setattr("playground.api._missing", lambda backend: "no GPU" if backend == "cuda" else None)
    with pytest.raises(CannotCompare, match="no GPU"):
        compare(PROBLEM, RIGHT, device="cuda")


@pytest.mark.full
def test_thirty_calls_side_by_side_leave_nothing(left_behind):
    """Only what is right is timed, which takes longest."""
    texts = [RIGHT, WRONG, RAISES]
    expected = ["pass", "fail", "error"]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda text: compare(PROBLEM, text, device="cpu"), texts))
        assert [each.verdict for each in found] == expected
        assert found[0].milliseconds > 0 and found[0].baselines["eager"] > 0
        assert found[2].reason == "ValueError: no" and "raise ValueError" in found[2].details
        gc.collect()
        before, memory = left_behind(), psutil.Process().memory_info().rss
        found = list(pool.map(lambda text: compare(PROBLEM, text, device="cpu"), 3 * (texts + 3 * texts[1:])))
        assert [each.verdict for each in found] == 3 * (expected + 3 * expected[1:])
        del found
        gc.collect()
        assert left_behind() == before
    assert psutil.Process().memory_info().rss - memory < 16 << 20
