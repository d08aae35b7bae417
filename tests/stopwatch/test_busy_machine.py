"""A speed-up is a speed-up on a busy machine, too, or it is withheld: see busy_machine.py, which has more of it."""

import busy_machine
import pytest

from playground import catalog
from playground.driver import timing
from playground.driver.runner import Options, Runner, Task
from playground.report.progress import Progress


def hardly_judged(folder, device, copies):
    """What busy_machine.claims gives, without what takes longest beside a busy loop, and is not about times."""

    def accept(worker, truth, result, *_):
        result["check"] = {"max_error": 0.0, "allowed": 1.0, "eager_error": 0.0, "gradients": None, "mutants_rejected": None}
        result["verdict"] = "pass"
        return worker

    problem, paths = busy_machine.write_files(folder, copies)
    model = catalog.find_model(problem)
    variants = [catalog.Variant(path.name.split(".")[0], path, device) for path in paths]
    with pytest.MonkeyPatch.context() as patch, Progress() as progress:
        patch.setattr("playground.driver.session.judge", accept)
        patch.setattr(Runner, "build", lambda *_: None)
        patch.setattr(timing, "judge", lambda *_, **__: None)
        patch.setattr(timing.Stopwatch, "_floor", lambda *_: {"floor_ms": None, "floor_bound": None})
        results = Runner(Options(quick=True), progress).run([Task(model, variant, device) for variant in variants])
    return [(result["variant"], result) for result in results]


@pytest.mark.parametrize(
    "condition, claims",
    [
        ("a busy loop", hardly_judged),
        pytest.param("a busy loop on every core, niced", busy_machine.claims, marks=pytest.mark.full),
    ],
    ids=["a busy loop", "a busy loop on every core, niced"],
)
def test_the_original_is_never_a_win(condition, claims, tmp_path):
    busy_machine.write_files(tmp_path)
    with busy_machine.beside(condition, tmp_path):
        found = dict(claims(tmp_path, "cpu", copies=1))
    same, half = found["the_original"], found["half_the_work"]
    assert same["verdict"] == half["verdict"] == "pass"
    assert same["outcome"]["verdict"] in ("tie", "not measured"), same["outcome"]
    assert half["outcome"]["verdict"] in ("win", "not measured"), half["outcome"]
    for result in (same, half):
        if result["outcome"]["verdict"] == "not measured":
            assert result["outcome"]["reason"].startswith(("the machine is busy (", "too noisy: ")) and result["speedup"] == {}
