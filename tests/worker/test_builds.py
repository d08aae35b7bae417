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


def test_a_build_that_fails_is_watched_too():
    watch = BuildWatch()
    with pytest.raises(RuntimeError, match="Error building"):
        cpp_extension.load_inline("fails", "int f() { return undeclared; }", functions=[], no_implicit_headers=True)
    assert watch.names == ["fails"] and not watch.built and watch.seconds > 0
