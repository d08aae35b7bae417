"""What is counted of a variant is the same on every host."""

import json
import os
import subprocess
import sys

import pytest

from playground import catalog
from playground.emulator import counting

pytestmark = pytest.mark.full


def test_the_host_does_not_matter():
    """Without the host's own instructions and the hand-written switch of threads, the counts are the same."""
    model = catalog.models()[0]
    variant = next(each for each in catalog.variants(model) if each.backend == "cuda")
    environment = {**os.environ, "CXX": f"{os.environ.get('CXX') or 'g++'} -DEMULATOR_PORTABLE"}
    code = (
        "import json, sys; from playground.emulator import counting; from cuda_emulator import toolchain; "
        "toolchain.machine_flags = lambda: (); counting.main(sys.argv[1:])"
    )
    arguments = counting.command(model, variant)[2:]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=catalog.ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    plain = counting.measure_apart(model, variant)
    counted = json.loads(done.stdout)
    assert counted["forward"] and counted | {"compiler": None} == plain | {"compiler": None}
