"""What two processes share under the outer clock: where tensors lie, and memory without a name."""

import os
import types

import pytest
import torch

from playground import tensors, untrusted
from playground.clock.clocked import Side
from playground.clock.memory import ALIGNED, HEADER, Host, Unshareable, laid_out, lying_as, placed
from playground.clock.referee import Drawn, OnCpu
from playground.clock.timer import CpuClock
from playground.clock.workload import Workload

CPU = torch.device("cpu")


def test_inputs_lie_in_a_block_as_they_are():
    inputs = [torch.rand(3, 5), 7, torch.arange(4), torch.rand(6, 4).t(), torch.rand(2).to(torch.bfloat16), torch.empty(0, 3)]
    places, end = laid_out(inputs, HEADER)
    block = torch.zeros(end, dtype=torch.uint8)
    found = [placed(block, place) for place in places]
    assert found[1] is None
    for value, again in zip(inputs, found, strict=True):
        if again is not None:
            again.copy_(value)
    for value, again in zip(inputs, found, strict=True):
        if again is not None:
            assert torch.equal(again, value) and again.stride() == value.stride() and again.dtype == value.dtype
    offsets = [place["offset"] for place in places[:-1] if place]
    assert all(offset % ALIGNED == 0 for offset in offsets) and len(set(offsets)) == len(offsets) and offsets[0] == HEADER


@pytest.mark.parametrize("value", [torch.rand(4, 8)[:, ::2], torch.rand(4, 1).expand(4, 4)])
def test_an_input_with_holes_or_shared_elements_is_laid_out_without(value):
    (place,), end = laid_out([value])
    assert place["stride"] == [4, 1] and end == ALIGNED


@pytest.mark.parametrize("stride", [[1, 4], [0, 0], [1, 1], [6, 1], [1], ["1", 4], [1, -4], [1, 1 << 80], "14", None])
def test_a_result_lies_as_it_is_given_where_that_leaves_no_gaps(stride):
    (place, square), _ = laid_out([torch.empty(4, 3), torch.empty(3, 3)])
    assert lying_as(place, stride)["stride"] == (stride if stride == [1, 4] else [3, 1])
    assert lying_as(square, [2, 2])["stride"] == [3, 1]  # as long as without gaps, but elements share memory
    (row,), _ = laid_out([torch.empty(1, 3)])
    assert lying_as(row, [1 << 62, 1])["stride"] == [1 << 62, 1] and lying_as(row, [1 << 63, 1])["stride"] == [3, 1]


def test_results_in_another_order_than_the_originals_are_copied_as_they_lie():
    descriptor, problem = untrusted.memory("shared"), types.SimpleNamespace(get_inputs=lambda: [torch.rand(2, 3, 4, 5)])
    model, own = torch.nn.Hardtanh(), torch.nn.Module()
    own.forward = lambda x: model(x).contiguous(memory_format=torch.channels_last)
    referee = OnCpu(Drawn(Workload(problem, model, "forward", CPU), {}, None, calls=2))
    side = Side(Workload(problem, own, "forward", CPU), Host(descriptor), CpuClock())
    referee.arrange("side", **side.join(referee.open("side", untrusted.held_at(descriptor))))
    turn = referee.draw("side", anew=True)
    side.ready(turn)
    referee.release()
    side.call(null=False, number=0)
    for (_, (given,)), call in zip(referee._latest, turn["calls"], strict=True):
        found = placed(referee._current[1], call["due"][0])
        assert found.is_contiguous(memory_format=torch.channels_last) and torch.equal(found, model(given))
    side.close()
    referee.close()
    os.close(descriptor)


def test_what_is_not_dense_cannot_be_shared():
    with pytest.raises(Unshareable, match="sparse"):
        laid_out([torch.eye(3).to_sparse()])


def test_a_side_on_a_cpu_draws_from_the_seeds_that_it_is_given():
    """In memory that the referee finds under a path, and that both map."""
    descriptor = untrusted.memory("shared")
    model, problem = torch.nn.Dropout(), types.SimpleNamespace(get_inputs=lambda: [torch.rand(64) + 1])
    referee = OnCpu(Drawn(Workload(problem, model, "forward", CPU), {}, None, calls=3))
    side = Side(Workload(problem, model, "forward", CPU), Host(descriptor), CpuClock())
    referee.arrange("side", **side.join(referee.open("side", untrusted.held_at(descriptor))))
    for _ in range(2):
        turn = referee.draw("side", anew=True)
        side.ready(turn)
        referee.release()
        told = side.call(null=False, number=0)
        assert told["milliseconds"] > 0 and not told["share"] and len(set(turn["draws"])) == 3
        kept = referee._current[1].clone()
        for (call, (given,)), place in zip(referee._latest, turn["calls"], strict=True):
            tensors.seed_draws(call.draws)
            assert torch.equal(placed(kept, place["due"][0]), model(given))
    side.close()
    referee.close()
    os.close(descriptor)
