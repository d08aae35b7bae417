"""A build that compiles is told from one that finds a finished library."""

import os

import pytest
from torch.utils import cpp_extension

from playground.machine import requirements
from playground.worker.builds import BuildWatch

pytestmark = pytest.mark.skipif(requirements.missing_for("cpu") is not None, reason="needs a C++ compiler and ninja")


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    requirements.prepare_environment()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("load", "load_inline"):  # put back what the watch replaces
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))


def build():
    source = '#include <Python.h>\nextern "C" PyObject* PyInit_watched() { return PyModule_New("watched"); }'
    cpp_extension.load_inline("watched", source, is_python_module=False, no_implicit_headers=True)


def test_a_build_and_its_reuse(tmp_path):
    first = BuildWatch()
    assert (first.seconds, first.built, first.names) == (0.0, False, [])
    build()
    assert first.built and first.names == ["watched"] and first.seconds > 0.1
    (library,) = tmp_path.rglob("watched*.so")
    os.utime(library, (1e9, 1e9))
    again = BuildWatch()
    build()
    assert not again.built and again.names == ["watched"]


def test_the_cuda_texts_are_kept(monkeypatch):
    def pretended(name, cpp_sources, cuda_sources=None, extra_cuda_cflags=None, no_implicit_headers=False):
        pass

    monkeypatch.setattr(cpp_extension, "load_inline", pretended)
    watch = BuildWatch()
    cpp_extension.load_inline("a", "", ["int f;", "int g;"], extra_cuda_cflags=("-O3",), no_implicit_headers=True)
    cpp_extension.load_inline("b", "", cuda_sources="int h;")
    cpp_extension.load_inline("c", "int only_cpp;")
    with pytest.raises(TypeError):
        cpp_extension.load_inline("d", "", no_such_argument=1)
    assert watch.device_code == [
        {"text": "int f;\nint g;", "flags": ["-O3"]},
        {"text": "#include <torch/types.h>\nint h;", "flags": []},
    ]


def test_a_build_that_fails_is_watched_too():
    watch = BuildWatch()
    with pytest.raises(RuntimeError, match="Error building"):
        cpp_extension.load_inline("fails", "int f() { return undeclared; }", functions=[], no_implicit_headers=True)
    assert watch.names == ["fails"] and not watch.built and watch.seconds > 0


def pretend(monkeypatch, build):
    """Have load_inline call `build()` and nothing else."""
    monkeypatch.setattr(cpp_extension, "load_inline", lambda name: build())


def emulated(folder, name):
    """Where the emulator keeps a library of this name."""
    folder.mkdir(exist_ok=True)
    return folder / f"{'0' * 32}-{name}.so"


def test_what_others_build_meanwhile_under_the_emulator_is_not_this_build(monkeypatch, tmp_path):
    """Libraries of other names, and what has gone by the time it is looked at, here a link to nothing."""
    monkeypatch.setenv("CUDA_EMULATOR_CACHE", str(tmp_path))
    libraries = tmp_path / "libraries"

    def others():
        emulated(libraries, "other").touch()
        emulated(libraries, "and-mine").touch()
        emulated(libraries, "gone").symlink_to(tmp_path / "nothing")

    pretend(monkeypatch, others)
    watch = BuildWatch(emulated=True)
    cpp_extension.load_inline("mine")
    assert watch.names == ["mine"] and not watch.built
    pretend(monkeypatch, lambda: emulated(libraries, "mine").touch())
    watch = BuildWatch(emulated=True)
    cpp_extension.load_inline("mine")
    assert watch.built


def test_a_library_of_its_own_that_vanishes_does_not_end_the_build(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_EMULATOR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    for emulator, gone in ((True, emulated(tmp_path / "cache" / "libraries", "mine")), (False, tmp_path / "mine" / "mine.so")):
        gone.parent.mkdir(exist_ok=True)
        gone.symlink_to(tmp_path / "nothing")
        pretend(monkeypatch, lambda: "loaded")
        watch = BuildWatch(emulated=emulator)
        assert cpp_extension.load_inline("mine") == "loaded" and not watch.built


def test_a_verbose_build_says_what_is_wrong_in_its_exception(capfd):
    BuildWatch()
    with pytest.raises(RuntimeError, match=r"main\.cpp:1:\d+: error: "):
        cpp_extension.load_inline("broken", "int f( {", is_python_module=False, no_implicit_headers=True, verbose=True)
