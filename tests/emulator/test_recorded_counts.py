"""Every CUDA variant does exactly what is recorded of it: sectors, wavefronts, barriers, atomics, matrix instructions, bytes.

A change that adds bank conflicts or memory traffic shows here and, in the recording, in review.
"""

import json
import os
import subprocess
import sys

import pytest

from playground import catalog
from playground.emulator import counting

pytestmark = pytest.mark.full

VARIANTS = counting.variants()


@pytest.mark.parametrize("model, variant", VARIANTS, ids=[f"{model.name}.{variant.name}" for model, variant in VARIANTS])
def test_counts_are_those_recorded(model, variant):
    command = f"python -m playground.emulator.counting --model {model.name} --variant {variant.name} --record"
    path = counting.recording(model, variant)
    assert path.exists(), f"nothing is recorded of this variant; run `{command}` and commit {path.relative_to(catalog.ROOT)}"
    old, new = json.loads(path.read_text()), counting.measure_apart(model, variant)
    for counts in (old, new):  # an edited comment changes no count
        counts.pop("source_sha256", None)
    compilers = old.pop("compiler"), new.pop("compiler")
    changed = counting.differences(old, new)
    other = "" if compilers[0] == compilers[1] else f"\n(recorded with {compilers[0]}, counted with {compilers[1]})"
    assert not changed, "\n".join(changed) + f"\nIf this is meant, run `{command}`" + other


def test_no_recording_without_its_variant():
    known = {counting.recording(model, variant).name for model, variant in VARIANTS}
    assert {path.name for path in counting.RECORDED.glob("*.json")} <= known


def test_differences_are_named():
    old = {"forward": {"k": {"barriers": 4, "shared memory read": {"wavefronts": 128}}}, "backward": None}
    new = {
        "forward": {"k": {"barriers": 4, "shared memory read": {"wavefronts": 4096}}, "l": {"barriers": 1}},
        "backward": None,
    }
    assert counting.differences(old, new) == [
        "forward, k, shared memory read, wavefronts: 128 -> 4096",
        "forward, l: None -> {'barriers': 1}",
    ]


def test_the_host_does_not_matter():
    """Without the host's own instructions and the hand-written switch of threads, the counts are the same."""
    model, variant = VARIANTS[0]
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
    assert counting.differences(plain, json.loads(done.stdout)) == []
