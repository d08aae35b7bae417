"""What two processes share under the outer clock: layouts, places that are claimed, the page of flags."""

import pytest
import torch

from playground.stopwatch import outer


def test_inputs_lie_in_a_block_as_they_are():
    inputs = [torch.rand(3, 5), 7, torch.arange(4), torch.rand(6, 4).t(), torch.rand(2).to(torch.bfloat16)]
    layout = outer.Layout(inputs)
    block = torch.zeros(layout.bytes, dtype=torch.uint8)
    for value, place in zip(inputs, layout.places, strict=True):
        if place:
            outer.placed(block, place).copy_(value)
    found = [outer.placed(block, place) if place else None for place in layout.places]
    assert found[1] is None
    for value, again in zip(inputs, found, strict=True):
        if again is not None:
            assert torch.equal(again, value) and again.stride() == value.stride() and again.dtype == value.dtype
    offsets = [place["offset"] for place in layout.places if place]
    assert all(offset % outer.ALIGNED == 0 for offset in offsets) and len(set(offsets)) == len(offsets)


def test_an_input_with_holes_is_laid_out_without():
    (place,) = outer.Layout([torch.rand(4, 8)[:, ::2]]).places
    assert place["stride"] == [4, 1]


PLACE = {"offset": 0, "shape": [4, 4], "stride": [4, 1], "dtype": "torch.float32"}


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 4},  # the last element is beyond the memory
        {"offset": -4},
        {"offset": 2},  # between two elements
        {"shape": [5, 4]},
        {"stride": [1 << 40, 1]},
        {"stride": [-4, 1]},
        {"shape": [4]},
        {"shape": [True, "4"]},
        {"shape": [4, 1.5]},
        {"dtype": "torch.qint8"},
    ],
)
def test_a_place_outside_of_its_memory_is_refused(change):
    block = torch.zeros(64, dtype=torch.uint8)
    assert outer.placed(block, PLACE).shape == (4, 4)
    with pytest.raises(outer.Unshareable):
        outer.placed(block, PLACE | change)


def test_flags_and_text_reach_the_other_side(tmp_path):
    mine = outer.Page(tmp_path / "page", create=True)
    others = outer.Page(tmp_path / "page")
    others.say([{"offset": 1}])
    others.set(outer.QUEUED, 3)
    assert mine.wait(outer.QUEUED, 3, seconds=1) and mine.text() == [{"offset": 1}]
    assert not mine.wait(outer.QUEUED, 4, seconds=0.01)


def test_what_the_other_side_does_to_the_page_ends_nobody(tmp_path):
    path = tmp_path / "page"
    mine = outer.Page(path, create=True)
    mine.set(outer.LENGTH, 2**32 - 1)
    with pytest.raises(outer.Unshareable):
        mine.text()
    with path.open("r+b") as file:
        file.truncate(0)
    assert mine.get(outer.QUEUED) == 0 and not mine.wait(outer.QUEUED, 1, seconds=0.01)
    with pytest.raises(outer.Unshareable):
        mine.text()


def test_a_page_is_made_in_no_place_of_others(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "page").symlink_to(victim)
    with pytest.raises(OSError):
        outer.Page(tmp_path / "page", create=True)
    assert victim.read_text() == "untouched"
