"""The mistakes that the tools are held to are such mistakes: the emulator finds each of them."""

import pytest
from torch.utils import cpp_extension

import cuda_emulator as emulator
from playground.machine import requirements
from playground.nvidia import control
from playground.nvidia.sanitizer import TOOLS

SAID = {
    "memcheck": "out of bounds",
    "racecheck": "shared memory race",
    "initcheck": "uninitialised global read",
    "synccheck": "barrier",
}


@pytest.fixture(scope="module")
def make_mistake():
    if missing := requirements.missing_for("cpu"):
        pytest.skip(str(missing))
    installed = emulator.install(mode="check")
    with installed:
        control_of = control.build(cpp_extension.load_inline, "cpu")
        yield lambda tool: (control_of(tool), installed.raise_kept())


@pytest.mark.parametrize("tool", TOOLS)
def test_each_is_a_mistake(make_mistake, tool):
    with pytest.raises(emulator.Finding, match=SAID[tool]) as caught:
        make_mistake(tool)
    assert f"kernel {control.kernel_of(tool)}" in str(caught.value)
