"""Every wrong kernel of the shelf is reported as what it is, at its line, in every schedule where it shows; no right one is."""

from pathlib import Path

import pytest
import shelf
import torch

from playground.emulator import Finding
from playground.emulator.kernels import KernelLibrary

N = 150
SOURCE = Path(shelf.__file__)


@pytest.fixture(scope="module")
def library():
    library = KernelLibrary(shelf.whole_text(), "check", "shelf", str(SOURCE))
    yield library
    library.close()


def run(library, name, schedule):
    out, given = torch.empty(N), torch.rand(N)
    library.call(name, out, given, N, schedule=schedule, time_limit=2 if "endless" in name or "nobody" in name else 60)


@pytest.mark.parametrize("schedule", shelf.ALL)
@pytest.mark.parametrize("pair", shelf.PAIRS, ids=lambda pair: pair.name)
def test_pair(library, pair, schedule):
    run(library, pair.name + "_right", schedule)
    if schedule in pair.schedules:
        with pytest.raises(Finding) as caught:
            run(library, pair.name + "_wrong", schedule)
        finding = caught.value
        assert finding.kind in pair.kind.split("|"), str(finding)
        assert finding.file == str(SOURCE)
        marked = shelf.lines_marked(pair)
        assert marked & {finding.line, *finding.callers}, str(finding)
        if "race" in finding.kind:
            assert marked & {finding.other.line, *finding.other.callers}, str(finding)


def test_the_shelf_is_long_enough():
    assert len(shelf.PAIRS) >= 20
    assert len({pair.kind for pair in shelf.PAIRS}) >= 15
