"""A speed-up is a speed-up on a busy machine, too, or it is withheld: see busy_machine.py, which has more of it."""

import busy_machine
import pytest


@pytest.mark.full  # tests/driver/test_timing.py has a simulated machine that is busy
@pytest.mark.parametrize("condition", ["a busy loop", "a busy loop on every core, niced"])
def test_the_original_is_never_a_win(condition, tmp_path):
    busy_machine.write_files(tmp_path)
    with busy_machine.beside(condition, tmp_path):
        found = dict(busy_machine.claims(tmp_path, "cpu", copies=1))
    same, half = found["the_original"], found["half_the_work"]
    assert same["verdict"] == half["verdict"] == "pass"
    assert same["outcome"]["verdict"] in ("tie", "not measured"), same["outcome"]
    assert half["outcome"]["verdict"] in ("win", "not measured"), half["outcome"]
    for result in (same, half):
        if result["outcome"]["verdict"] == "not measured":
            assert result["outcome"]["reason"].startswith(("the machine is busy (", "too noisy: ")) and result["speedup"] == {}
