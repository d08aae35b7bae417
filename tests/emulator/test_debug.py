"""--debug: what it prints works in the real gdb, thread by thread, and where nothing is emulated it is a clear error."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import cuda_emulator as emulator
from cuda_emulator import debugging
from playground import catalog
from playground.emulator import step
from playground.worker.candidate import Candidate

MODEL = catalog.find_model("conv_pool_sigmoid_sum")
VARIANT = catalog.find_variant(MODEL, "v1_fused_tail")
SETTINGS = catalog.SETTINGS["emulator"][MODEL.name]


def line_of(text):
    """The number of the variant's first line with this text."""
    return next(number for number, line in enumerate(VARIANT.path.read_text().splitlines(), 1) if text in line)


def test_first_kernel():
    assert debugging.first_kernel(VARIANT.path.read_text()) == debugging.Kernel(
        "fused_tail", line_of("fused_tail(const Element*")
    )
    for text in (
        "__global__ void k(float* x) {}",
        'extern "C" __global__ void\n__launch_bounds__(4 * (N), 2)\nk(float* x)',
        "// a __global__ function\n\n__global__ __cluster_dims__(2, 1, 1) void k (int n)",
    ):
        assert debugging.first_kernel(text) == debugging.Kernel(
            "k", text.count("\n", 0, text.index(" k" if " k" in text else "\nk") + 1) + 1
        )
    assert debugging.first_kernel("no kernel, only the word __global__") is None


@pytest.mark.full
def test_the_command_prints_the_recipe():
    options = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    command = ["compare.py", "--model", MODEL.name, "--variant", VARIANT.name, "--debug", "--time-limit", "0.001", *options]
    done = subprocess.run([sys.executable, *command, "--device", "emulator"], cwd=catalog.ROOT, capture_output=True, text=True)
    assert done.returncode == 1  # what follows is not the matter here
    assert step.recipe(MODEL, VARIANT, SETTINGS) in done.stderr


def test_the_emulator_is_told():
    candidate = Candidate()
    try:
        original = {"problem": str(MODEL.path), "settings": SETTINGS, "place": "emulator", "seed": 0}
        candidate.load(str(VARIANT.path), None, debug=True, **original)
        assert candidate.emulator.debug
    finally:
        emulator.uninstall()


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("gdb"), reason="gdb is not installed")
def test_the_recipe_in_gdb():
    """Stops in thread 5, steps through lines and over a barrier without leaving it, then stops in thread 6 of the block."""
    recipe = next(line for line in step.recipe(MODEL, VARIANT, SETTINGS).splitlines() if line.strip().startswith("gdb "))
    barrier = line_of("__syncthreads();")
    thread = "print emulator::current->thread_index.x"
    commands = [
        thread, "next", "next", "info locals",
        f"tbreak {VARIANT.path}:{barrier} if emulator::current->thread_index.x == 5", "continue",
        "next", thread,
        f"tbreak {VARIANT.path}:{barrier} if emulator::current->thread_index.x == 6", "continue", thread, "kill",
    ]  # fmt: skip
    given = shlex.split(recipe)
    at = given.index("--args")
    command = [given[0], "-batch", *given[1:at], *(part for text in commands for part in ("-ex", text)), *given[at:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, "DEBUGINFOD_URLS": ""})
    assert re.search(rf"hit Breakpoint 1.*fused_tail.* at {re.escape(str(VARIANT.path))}:\d+", done.stdout), (
        done.stdout + done.stderr
    )
    printed = re.findall(r"^\$\d+ = (.*)", done.stdout, re.M)
    assert printed == ["5", "5", "6"], done.stdout
    assert re.search(r"^rows = 10", done.stdout, re.M), done.stdout
