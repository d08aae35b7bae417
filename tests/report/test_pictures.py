"""The drawings of the ladders: what they say is what kernels and results say, and they can be read on white and on black."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from playground import catalog
from tools import memories

PICTURES = sorted((catalog.ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.mark.parametrize(("model", "variant"), memories.PICTURES)
def test_shared_memory_is_what_the_kernels_docstring_says(model, variant):
    """To the precision that it has: whole KB, or halves."""
    title, boxes = memories.PICTURES[model, variant]
    docstring = (catalog.KERNELS / model / f"{variant}.py").read_text().split('"""')[1]
    said = re.search(
        rf"^Launches\n.*?\b{title.partition(':')[0]}(?::|  ).*?([\d.]+) Ki?B\b", docstring, re.DOTALL | re.MULTILINE
    )[1]
    found = memories.shared_bytes(boxes)
    assert abs(found / 1024 - float(said)) <= 0.6, f"{found:,} bytes, and {said} KB"


@pytest.mark.parametrize(("model", "variant"), memories.PICTURES)
def test_arrows_lead_from_box_to_box_and_no_two_boxes_share_a_place(model, variant):
    _, boxes = memories.PICTURES[model, variant]
    places = {box.place: box.name for box in boxes}
    assert len(places) == len(boxes) and {box.to for box in boxes if box.to} <= set(places)
    assert {place[0] for place in places} == set(memories.MEMORIES)
    reached = {box.to for box in boxes}
    assert "D5" in reached and "D0" not in reached and places["D0"] == "x"


def test_every_picture_is_shown():
    shown = {
        path.parent / target
        for path in (catalog.ROOT / "docs").glob("*.md")
        for target in re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", path.read_text())
    }
    assert shown == set(PICTURES) and len(shown) == len(memories.PICTURES) + 1  # published solutions


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_says_what_it_is(path):
    names = [node.tag.split("}")[1] for node in ElementTree.fromstring(path.read_text())]
    assert names[:2] == ["title", "desc"]
