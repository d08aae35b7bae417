"""Poisoned memory, weights by name, and the problem's functions as they were before the variant's file was loaded."""

import types

import pytest
import torch
import torch.nn as nn

from playground import modes, tensors
from playground.judge import behaviour, global_state, probes
from playground.judge.failure import JUDGE_BROKE
from playground.worker.candidate import Candidate
from playground.worker.failures import describe
from playground.worker.interface import WrongInterface, copy_weights
from tests.judge.problems import pairs


def test_a_file_may_leave_determinism_as_it_is_without_nan_in_new_memory():
    with modes.uninitialised_is_nan():
        before = global_state.flags()
        torch.use_deterministic_algorithms(True)
        assert "the deterministic mode" in global_state.changed(before, global_state.flags())
        torch.use_deterministic_algorithms(False)
        assert global_state.changed(before, global_state.flags()) is None
        assert torch.empty(3).isnan().all(), "a file that ends the mode would find what an earlier step left"


def test_a_file_that_ends_determinism_for_good_is_told():
    torch.set_deterministic_debug_mode(2)
    try:
        with modes.uninitialised_is_nan():
            before = global_state.flags()
            torch.set_deterministic_debug_mode(0)
            assert "the deterministic mode" in global_state.changed(before, global_state.flags())
            assert torch.empty(3).isnan().all()
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.set_deterministic_debug_mode(0)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_memory_that_is_not_written_is_nan_until_the_end_whatever_that_is(mode):
    from torch._inductor import config

    torch.set_deterministic_debug_mode(mode)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        with pytest.raises(ZeroDivisionError), modes.uninitialised_is_nan():
            assert torch.empty(3).isnan().all()
            assert torch.empty_like(torch.ones(2, 3)).isnan().all()
            assert torch.ones(2).new_empty(5).isnan().all()
            assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
            raise ZeroDivisionError
        assert (torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory) == (mode, filled)
        assert not config.deterministic, "what the variant compiles is timed"
    finally:
        torch.set_deterministic_debug_mode(0)


def test_weights_are_copied_by_name():
    original, copy = nn.Linear(3, 2), nn.Linear(3, 2)
    copy_weights(copy, original.state_dict())
    assert torch.equal(copy.weight, original.weight) and torch.equal(copy.bias, original.bias)
    assert copy.weight.requires_grad


@pytest.mark.parametrize(
    "model, complaint",
    [
        (nn.Linear(3, 2, bias=False), "it lacks bias$"),
        (nn.Linear(4, 2), r"it weight is \(2, 4\) instead of \(2, 3\)$"),
        (nn.Bilinear(3, 3, 2), r"it weight is \(2, 3, 3\) instead of \(2, 3\)$"),
        (nn.Sequential(nn.Linear(3, 2)), "it lacks weight; lacks bias; has 0.weight, which the original lacks; has 0.bias"),
    ],
)
def test_weights_that_differ_are_named(model, complaint):
    with pytest.raises(WrongInterface, match=complaint):
        copy_weights(model, nn.Linear(3, 2).state_dict())


PROBLEM = """
class Model(nn.Module):
    def forward(self, x):
        return x + 1

def get_inputs():
    return [torch.rand(2)]
"""

REPLACES = """
import sys
import torch
import torch.nn as nn

for module in list(sys.modules.values()):
    if getattr(module, "__file__", None) and module.__file__.endswith("asked.py"):
        module.get_inputs = lambda: [torch.zeros(2)]
        REPLACED = True

class ModelNew(nn.Module):
    replaced = REPLACED

    def forward(self, x):
        return x + 1
"""


def test_a_variant_that_replaces_get_inputs_changes_nothing(tmp_path):
    problem, variant = tmp_path / "asked.py", tmp_path / "replaces.py"
    problem.write_text(pairs.whole(PROBLEM))
    variant.write_text(REPLACES)
    candidate = Candidate()
    candidate.load(str(variant), None, problem=str(problem), settings={}, place="cpu", seed=0)
    assert candidate.model.replaced
    asked, *_ = candidate._subject("variant")
    assert isinstance(asked, types.SimpleNamespace) and asked.get_inputs()[0].any()


@pytest.fixture
def original(tmp_path):
    """A Candidate that is the original itself, and the file of a probe."""
    (tmp_path / "asked.py").write_text(pairs.whole(PROBLEM))
    candidate = Candidate()
    candidate.load(None, None, problem=str(tmp_path / "asked.py"), settings={}, place="cpu", seed=0)
    probe = str(tmp_path / "probe")
    tensors.save(vars(probes.own(candidate.problem, 1)), probe)
    return candidate, probe


@pytest.mark.parametrize("is_of_judge", [True, False])
def test_a_mistake_of_the_judge_s_is_no_complaint_about_the_variant(original, monkeypatch, tmp_path, is_of_judge):
    candidate, probe = original

    def try_out():
        return candidate.try_out("new content in the same memory", probe, probe, str(tmp_path / "outputs"))

    if not is_of_judge:
        monkeypatch.setattr(candidate.model, "forward", lambda x: undefined)  # noqa: F821 - that is the point
        assert try_out()["complaint"] == "raises NameError: name 'undefined' is not defined"
        return
    monkeypatch.delattr(behaviour, "_refill")
    with pytest.raises(NameError) as broke:
        try_out()
    without_this_file = broke.value.__traceback__.tb_next.tb_next
    reason, details = describe(broke.value.with_traceback(without_this_file))
    assert reason == f"{JUDGE_BROKE}NameError: name '_refill' is not defined"
    assert "behaviour.py" in details, "whose line is the only one that can be mended"
