"""The command that measures the emulator: it compares each kernel's result with PyTorch before it tells a speed."""

import json
import subprocess
import sys

import pytest

from cuda_emulator import speed

pytestmark = pytest.mark.full


@pytest.mark.parametrize("mode", speed.MODES)
def test_every_kernel_is_right_and_has_a_speed(mode):
    command = [sys.executable, "-m", "cuda_emulator.speed", mode]
    speeds = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert speeds.keys() == speed.KERNELS.keys()
    assert all(value > 0 for value in speeds.values())


def test_a_wrong_result_has_no_speed(monkeypatch):
    monkeypatch.setattr(speed, "TEXT", speed.TEXT.replace("sum += left[threadIdx.y][i]", "sum += 2 * left[threadIdx.y][i]"))
    with pytest.raises(ArithmeticError, match="product in fast mode is off by"):
        speed.measure("fast", repeats=1)
