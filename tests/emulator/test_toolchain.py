"""The cache of compiled things, and PyTorch's headers in it."""

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from playground.emulator import toolchain
from playground.emulator.errors import EmulatorError


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAYGROUND_EMULATOR_CACHE", str(tmp_path))
    return tmp_path


def test_what_several_need_at_once_is_made_once(empty_cache):
    made, together = [], threading.Barrier(4)

    def make(path):
        made.append(path)
        time.sleep(0.2)
        path.write_text("made")

    def need(_):
        together.wait()
        return toolchain.kept("objects", ".o", "key", make)

    with ThreadPoolExecutor(4) as pool:
        (path,) = set(pool.map(need, range(4)))
    assert len(made) == 1 and path.read_text() == "made"
    assert list((empty_cache / "objects").iterdir()) == [path]


def test_what_could_not_be_made_is_tried_again(empty_cache):
    def fail(path):
        path.write_text("half")
        raise EmulatorError("no")

    with pytest.raises(EmulatorError):
        toolchain.kept("objects", ".o", "key", fail)
    assert toolchain.kept("objects", ".o", "key", lambda path: path.write_text("whole")).read_text() == "whole"


def test_the_compiler_takes_the_precompiled_headers(tmp_path):
    flags = [f"-I{toolchain.INCLUDE}", "-O1", *toolchain.LINES_ONLY, "-fPIC", "-fno-gnu-unique", "-w"]
    flags += toolchain.torch_flags()[0]
    header = toolchain.precompiled_torch_header(flags)
    text = tmp_path / "text.cpp"
    text.write_text("#include <torch/library.h>\nstatic at::Tensor tensor;\n")
    for own, precompiled in (([], True), (["-fno-exceptions"], False)):
        command = [*toolchain.compiler()[0], *flags, *own, "-include", str(header), "-fsyntax-only", "-H", str(text)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert (f"! {header}.gch" in run.stderr) is precompiled
        assert run.returncode == 0 or own
