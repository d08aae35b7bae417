"""The function `build` that all variants share: what it builds, when it builds again, and under which name."""

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import project_variants
import pytest
import torch
from torch.utils import cpp_extension

from playground import catalog

MODEL, VARIANT = next(param.values for param in project_variants.variants("cpu") if param.values[0].name == "alexnet_conv1")

PRINT_NAMES = """
import project_variants
from playground import catalog
from torch.utils import cpp_extension

def record(name, *arguments, **options):
    print(name)
    raise KeyboardInterrupt

record.emulates_cuda = True  # or operators would take a GPU's tensors alone
cpp_extension.load_inline = record
print(hash("x"))
for param in project_variants.variants():
    model, variant = param.values
    problem = catalog.load_problem(model.path, catalog.SETTINGS["emulator"][model.name])
    try:
        catalog.load_variant(variant.path).ModelNew(*problem.get_init_inputs())(*problem.get_inputs())
    except KeyboardInterrupt:
        pass
"""


@pytest.fixture
def asked(monkeypatch):
    """What load_inline was asked to build, (name, text, options) each; nothing is built, and the build is told so."""
    asked = []

    def record(name, cpp_sources, **options):
        asked.append((name, cpp_sources, options))
        raise RuntimeError("not built")

    monkeypatch.setattr(cpp_extension, "load_inline", record)
    return asked


def name_of(asked, *sources, **constants):
    with pytest.raises(RuntimeError, match="not built"):
        catalog.load_variant(VARIANT.path).build(*sources, **constants)
    return asked[-1][0]


SCHEMA = "forward(Tensor x) -> Tensor"


def forward(kernels, x):
    return x + kernels.one()


def original(x):
    return x + 1


def test_the_name_follows_everything_that_is_built(asked):
    def otherwise(kernels, x):
        return x + kernels.two()

    sources = ("shelf", "text", SCHEMA, forward, original)
    seen = {
        name_of(asked, *sources),
        name_of(asked, "shelf", "another text", SCHEMA, forward, original),
        name_of(asked, "shelf", "text", "forward(Tensor y) -> Tensor", forward, original),
        name_of(asked, "shelf", "text", SCHEMA, otherwise, original),
        name_of(asked, "shelf", "text", SCHEMA, forward, otherwise),
        name_of(asked, *sources, fused=(otherwise,)),
        name_of(asked, *sources, flags=("-O1",)),
        name_of(asked, *sources, SIZE=3),
        name_of(asked, *sources, SIZE=4),
    }
    assert len(seen) == 9
    assert all(name.startswith("shelf_") and name.isidentifier() for name in seen)


def test_the_name_does_not_depend_on_place_or_order(asked):
    text = "def forward(kernels, x):\n    return [n for n in (1, 2)]\n"
    above, below = {}, {}
    exec(compile(text, "cell 1", "exec"), above)
    exec(compile("\n\n\n" + text, "cell 2", "exec"), below)
    one = name_of(asked, "shelf", "text", SCHEMA, above["forward"], original, A=1, B=2)
    assert name_of(asked, "shelf", "text", SCHEMA, below["forward"], original, B=2, A=1) == one


def test_every_process_finds_the_builds_of_the_others():
    """Python's hashes of strings change from process to process; the names must not."""
    path, printed = os.pathsep.join([str(catalog.ROOT), str(Path(__file__).parent)]), []
    for seed in "1", "2":
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", PRINT_NAMES], env=environment, capture_output=True, text=True, check=True)
        printed.append(done.stdout.split())
    (a_hash, *names), (another_hash, *again) = printed
    assert a_hash != another_hash
    assert names == again and len(set(names)) == len(project_variants.variants())


@pytest.mark.parametrize("version, narrow", [("2.4.0", False), ("2.8.0", True), ("2.11.0", True)])
def test_an_older_pytorch_gets_what_it_knows(asked, monkeypatch, version, narrow):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    name_of(asked, "shelf", "text", SCHEMA, forward, original)
    ((_, text, options),) = asked
    assert ("no_implicit_headers" in options) is narrow and text == "text"


def test_a_pytorch_too_old_is_named(asked, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.3.1+cu121"))
    with pytest.raises(RuntimeError, match=r"^shelf: needs PyTorch 2\.4 or later, this is 2\.3\.1\+cu121$"):
        catalog.load_variant(VARIANT.path).build("shelf", "text", SCHEMA, forward, original)
    assert not asked


def test_a_failed_registration_is_not_taken_for_done():
    """Without it the operator has no autograd: gradients would be missing, not refused."""
    build = catalog.load_variant(VARIANT.path).build

    def fuse(*arguments):
        raise ZeroDivisionError("a slip in what registers")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="slip in what registers"):
            build("shelf_of_slips", 'extern "C" int one() { return 1; }', SCHEMA, forward, original, (fuse,))


def test_threads_build_once(monkeypatch):
    """As nn.DataParallel's do, whose replicas run their first forward at the same time."""
    asked, registered, found = [], [], []
    both_ask = threading.Barrier(2)
    module = catalog.load_variant(VARIANT.path)

    def pretend(name, text, flags):
        asked.append(name)
        time.sleep(0.2)  # the other thread comes to the same place
        return types.SimpleNamespace()

    def register(operators, *arguments):
        registered.append(operators.name)
        return operators.name

    def ask():
        both_ask.wait()
        found.append(module.build("shelf_of_threads", "text", SCHEMA, forward, original))

    monkeypatch.setattr(module, "load", pretend)
    monkeypatch.setattr(module, "register", register)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == len(registered) == 1
    assert found == [asked[0]] * 2
