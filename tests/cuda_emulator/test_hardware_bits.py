"""The host body of every instruction and intrinsic against what a GPU made of the same bits.

hardware_bits.npz is recorded by hardware_bits.py on a GPU. The same text runs here under the emulator, on the same inputs; each
case's rule (hardware_cases.py) says whether the bits must agree or how far the manual allows the hardware to be away.
"""

import json
from pathlib import Path

import hardware_bits
import hardware_cases
import numpy as np
import pytest

import cuda_emulator as emulator

DATA = Path(__file__).with_name("hardware_bits.npz")
COMMAND = "python tests/cuda_emulator/hardware_bits.py tests/cuda_emulator/hardware_bits.npz"
CASES = [(section, case) for section, cases in hardware_cases.SECTIONS.items() for case in cases]


@pytest.fixture(scope="module")
def recorded():
    assert DATA.exists(), f"{DATA.name} is missing: run `{COMMAND}` on a machine with a GPU of compute capability 9.0"
    with np.load(DATA) as data:
        return {name: data[name] for name in data.files}


@pytest.fixture(scope="module")
def libraries():
    """{section: library}, built by the emulator."""
    with emulator.install(mode="fast"):
        yield {section: hardware_bits.build(section) for section in hardware_cases.SECTIONS}


def values_of(words, letters):
    """The words of a result as float64, one row for each number in them; None where they are no floating-point numbers."""
    rows = []
    at = 0
    for letter in letters:
        kind = hardware_cases.TYPES[letter][4]
        word = words[at]
        if kind == "float32":
            rows.append(word.view(np.float32).astype(np.float64))
        elif kind == "float64":
            rows.append((words[at].astype(np.uint64) | words[at + 1].astype(np.uint64) << np.uint64(32)).view(np.float64))
        elif kind in ("float16", "float16x2"):
            halves = [word & 0xFFFF] + ([word >> 16] if kind.endswith("x2") else [])
            rows.extend(half.astype(np.uint16).view(np.float16).astype(np.float64) for half in halves)
        elif kind in ("bfloat16", "bfloat16x2"):
            halves = [word & 0xFFFF] + ([word >> 16] if kind.endswith("x2") else [])
            rows.extend((half.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for half in halves)
        at += hardware_cases.TYPES[letter][2]
    return np.array(rows) if rows else None


def without_signs(words, letters):
    """The operands' absolute values."""
    signs = [{"f": 0x80000000, "q": 0x80808080}.get(letter, 0x80008000) for letter in letters]
    return words & ~np.array(signs, np.uint32)[:, None]


def same(ours, hardware):
    """Equal to the sign of zero, where any NaN equals any NaN."""
    return (np.isnan(ours) & np.isnan(hardware)) | ((ours == hardware) & (np.signbit(ours) == np.signbit(hardware)))


def disagreements(case, inputs, ours, hardware, library):
    """A line for each of the first results that the rule does not allow, and how many there are."""
    mine, theirs = values_of(ours, case.result), values_of(hardware, case.result)
    if mine is None:
        right = ours == hardware
    elif case.rule.bound is None:
        right = same(mine, theirs)
    else:
        letters = case.pool.split(" ")[0]
        if case.name.startswith(("mma", "wgmma")):
            magnitude = hardware_bits.outputs(library, case, without_signs(inputs, letters), "cpu")
            given = values_of(magnitude, case.result)
        else:
            given = values_of(inputs, letters)
        with np.errstate(all="ignore"):
            right = (np.abs(mine - theirs) <= case.rule.bound(given, mine)) | same(mine, theirs)
    wrong = np.argwhere(~right)
    lines = []
    for row, column in wrong[:4]:
        operands = ", ".join(f"{word:08x}" for word in inputs[:, column][:8])
        shown = (ours, hardware) if mine is None else (mine, theirs)
        lines.append(f"{operands} -> {shown[0][row, column]} here, {shown[1][row, column]} on the GPU")
    return lines, len(wrong), right.size


@pytest.mark.parametrize("section, case", CASES, ids=[case.name for _, case in CASES])
def test_agrees_with_the_hardware(recorded, libraries, section, case):
    digests = json.loads(str(recorded["about"]))["digests"]
    if case.name not in digests:
        pytest.skip(f"no GPU has been asked yet: run `{COMMAND}`")
    assert digests.get(case.name) == hardware_bits.digest(section, case), (
        f"{case.name} is not what was recorded: run `{COMMAND}` on a machine with a GPU of compute capability 9.0"
    )
    inputs, hardware = recorded[f"inputs {case.pool}"], recorded[f"outputs {case.name}"]
    ours = hardware_bits.outputs(libraries[section], case, inputs, "cpu")
    with np.errstate(invalid="ignore"):  # signalling NaNs are converted, too
        lines, wrong, total = disagreements(case, inputs, ours, hardware, libraries[section])
    assert not wrong, f"{wrong} of {total} results differ by more than {case.rule.why}:\n" + "\n".join(lines)
