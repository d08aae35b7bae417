"""What nvidia-smi says, with a program of that name that says what the test wants."""

import pytest

from playground.machine import clocks
from playground.machine.clocks import Clocks


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(script) puts a shell script of that name on the path, and nothing else."""

    def write(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return write


PLAIN = "1980, 1980, 40, 0x0000000000000001"
SLOWED = {"power cap": 5_000_000, "temperature (software)": 0, "temperature (hardware)": 70, "power brake": 0}
ANSWERS = {
    "a sample": (
        '[ "$2" = 0 ] && echo "1755, 1980, 61, 0x0000000000000024"',
        Clocks(1755, 1980, 61, ("power cap", "temperature (software)")),
    ),
    "an older driver, which calls reasons otherwise": (
        f'case "$3" in *throttle*) echo "{PLAIN}";; *) exit 2;; esac',
        Clocks(1980, 1980, 40, ()),
    ),
    "the time for which it was slowed down": (
        f'case "$3" in *counters*) echo "{PLAIN}, 5000000, 0, 70, 0";; *) exit 2;; esac',
        Clocks(1980, 1980, 40, (), SLOWED),
    ),
    "a driver without these counters": (
        f'case "$3" in *counters*) echo "{PLAIN}, [N/A], [N/A], [N/A], [N/A]";; *) echo "{PLAIN}";; esac',
        Clocks(1980, 1980, 40, ()),
    ),
    "a failure": ("exit 9", None),
    "no clock": ('echo "[N/A], [N/A], 40, [N/A]"', None),
    "no GPU": ("echo No devices were found", None),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_read(nvidia_smi, answer):
    script, expected = ANSWERS[answer]
    nvidia_smi(script)
    assert clocks.sample() == expected


def test_the_gpu_that_torch_uses(nvidia_smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a,1")
    nvidia_smi(f'[ "$2" = GPU-5a ] && echo "{PLAIN}"')
    assert clocks.sample() == Clocks(1980, 1980, 40, ())


def test_no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clocks.sample() is None


def test_notes():
    steady, capped, slow = (
        Clocks(1980, 1980, 50, ()),
        Clocks(1950, 1980, 70, ("power cap",)),
        Clocks(1500, 1980, 85, ("power cap", "temperature (hardware)")),
    )
    assert clocks.notes(steady, steady) == []
    assert clocks.notes(steady, capped) == ["the GPU was slowed down while it was timed: power cap"]
    assert clocks.notes(steady, slow) == [
        "the GPU was slowed down while it was timed: power cap, temperature (hardware)",
        "the SM clock went from 1980 to 1500 MHz while it was timed",
    ]
    began, ended = (Clocks(1980, 1980, 50, (), {"power cap": us, "power brake": 7}) for us in (1_000_000, 1_350_000))
    assert clocks.notes(began, began) == []
    assert clocks.notes(began, ended) == ["the GPU was slowed down while it was timed: power cap for 0.35 s"], "in between"
    assert clocks.notes(None, steady) == [] and clocks.record(None, steady) is None
    assert clocks.record(steady, slow).after.sm_mhz == 1500
