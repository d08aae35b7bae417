"""Every stage of every pipeline is filled again at the emulator's sizes: a mistake in how it is given back shows only then."""

import json
import subprocess
import sys

import pytest

from playground import catalog

pytestmark = pytest.mark.full

PIPELINED = {
    path
    for path in catalog.KERNELS.glob("*/v*.py")
    if any(instruction in path.read_text() for instruction in ("cp.async", "mbarrier.init"))
}
# What a kernel fills once by design, its packed weights: (variant, kernel, kind) and how many places.
ONCE = {("alexnet_conv1/v4_tensor_core", "convolve", "cp.async"): None, ("alexnet_conv1/v5_hopper", "convolve", "mbarrier"): 1}

RUN = """
import json, sys
import torch
import cuda_emulator as emulator
from playground import catalog, tensors
from cuda_emulator import runtime
from playground.judge import precision

path, model = sys.argv[1:]
emulator.install(mode="check", source_file=path)
problem = catalog.load_problem(catalog.find_model(model).path, catalog.SETTINGS["emulator"][model])
new = tensors.make_model(problem, catalog.load_variant(path).ModelNew, 0)
inputs = tensors.make_inputs(problem, 0)
for forbid in (lambda: None, precision.forbid_tf32):
    forbid()
    with torch.no_grad():
        new(*inputs)
    new(*(each.clone().requires_grad_() for each in inputs)).sum().backward()
print(json.dumps([[kernel, *place, n] for kernel, places in runtime.rounds().items() for place, n in places.items()]))
"""


@pytest.mark.parametrize("path", sorted(PIPELINED), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_stage_has_two_rounds(path):
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(path), path.parent.name]
    done = subprocess.run(command, cwd=catalog.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counted = json.loads(done.stdout.splitlines()[-1])
    assert counted
    once = {}
    for kernel, kind, address, rounds in counted:
        if rounds < 2:
            once.setdefault((f"{path.parent.name}/{path.stem}", kernel.split("<")[0], kind), {}).setdefault(kernel, []).append(
                address
            )
    for place, by_kernel in once.items():
        assert place in ONCE, f"used once: {by_kernel}"
        assert all(len(addresses) == (ONCE[place] or len(addresses)) for addresses in by_kernel.values()), by_kernel
