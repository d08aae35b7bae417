"""Every line about what is missing is provoked for real: programs run with a PATH, compilers and toolkits made for it."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from playground.machine import requirements

ROOT = Path(__file__).resolve().parents[2]
PATH = os.environ["PATH"]
REAL_TOOLKIT = requirements.find_toolkit()
NINJA = shutil.which("ninja", path=os.pathsep.join([str(Path(sys.executable).parent), PATH]))

needs_ninja = pytest.mark.skipif(NINJA is None, reason="no ninja on this machine")
needs_toolkit = pytest.mark.skipif(
    REAL_TOOLKIT is None or shutil.which("gcc") is None, reason="no CUDA toolkit on this machine, or no gcc for it"
)
needs_cuda_torch = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def link(directory: Path, name: str, target: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).symlink_to(target)
    return directory


def fake_toolkit(home: Path, release: str, include: str = "include") -> Path:
    """A directory that looks like a toolkit, with an nvcc that answers the two questions that are put to it."""
    answers = f'case "$1" in --version) echo "Cuda compilation tools, release {release}, V{release}.88";;'
    script(home / "bin" / "nvcc", f"{answers} --dryrun) echo '#$ TOP={home}/bin/..' >&2;; *) exit 1;; esac")
    (home / include).mkdir(parents=True)
    (home / include / "cuda_runtime.h").touch()
    return home


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """This process on a machine where nothing is installed."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.setenv(name, "")  # so that what the tests set is undone even where there was nothing
        monkeypatch.delenv(name)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(requirements, "INSTALL_PREFIX", tmp_path / "usr-local")
    return monkeypatch


def one_line(missing) -> str:
    assert missing is not None
    assert "\n" not in str(missing)
    assert missing.what
    assert missing.remedy
    return str(missing)


class TestCompiler:
    def test_none_on_path(self, machine):
        assert "no C++ compiler: c++ is not on PATH: install one" in one_line(requirements.missing_compiler())
        assert "no C++ compiler" in one_line(requirements.missing_for("cpu"))

    @pytest.mark.parametrize("named", ["/nowhere/g++", ""])
    def test_cxx_names_nothing(self, machine, named):
        machine.setenv("CXX", named)
        assert f"CXX is '{named}', which does not run" in one_line(requirements.missing_compiler())

    def test_a_compiler_of_another_name_is_pointed_out(self, machine, tmp_path):
        compiler = script(tmp_path / "bin" / "g++", "exit 0")
        machine.setenv("PATH", str(compiler.parent))
        assert f"export CXX={compiler}" in one_line(requirements.missing_compiler())
        launcher = script(tmp_path / "launch", 'exec "$@"')
        for named in compiler, f"{launcher} {compiler}":
            machine.setenv("CXX", str(named))
            assert requirements.missing_compiler() is None

    def test_found_but_it_does_not_run(self, machine, tmp_path):
        compiler = script(tmp_path / "bin" / "c++", "echo 'invalid active developer path' >&2; exit 1")
        machine.setenv("PATH", str(compiler.parent))
        assert f"{compiler} does not run" in one_line(requirements.missing_compiler())


def run_in_venv(directory: Path, path: str, code: str) -> str:
    """Run `code` with the Python of a virtual environment that is not activated; it sees this one's packages too."""
    venv.create(directory, with_pip=False, symlinks=True)
    env = {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [str(directory / "bin" / "python"), "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


VERDICT_BEFORE_AND_AFTER = """
import os, subprocess
from playground.machine import requirements
print(requirements.missing_ninja())
requirements.prepare_environment()
before = dict(os.environ)
requirements.prepare_environment()
assert dict(os.environ) == before, "not idempotent"
print(requirements.missing_ninja())
if not requirements.missing_ninja():
    print(subprocess.run(["ninja", "--version"], capture_output=True, text=True).stdout.strip())
"""


class TestNinja:
    def test_not_installed(self, tmp_path):
        before, after = run_in_venv(tmp_path / "venv", str(tmp_path), VERDICT_BEFORE_AND_AFTER).splitlines()
        assert before == after == f"no ninja: {tmp_path}/venv/bin/python -m pip install ninja"

    @needs_ninja
    @pytest.mark.parametrize("broken", [False, True])
    def test_in_a_virtual_environment_that_is_not_activated(self, tmp_path, broken):
        """Alone, or behind one on PATH that does not run."""
        shim = tmp_path / "shims" / "ninja"
        if broken:
            script(shim, "echo 'command not found' >&2; exit 127")
        link(tmp_path / "venv" / "bin", "ninja", NINJA)
        before, after, version = run_in_venv(tmp_path / "venv", str(shim.parent), VERDICT_BEFORE_AND_AFTER).splitlines()
        assert before.startswith(f"{shim} does not run: " if broken else "no ninja: ")
        assert after == "None" and version[0].isdigit()

    @needs_ninja
    def test_on_path_nothing_is_changed(self, machine, tmp_path):
        machine.setenv("PATH", str(link(tmp_path / "bin", "ninja", NINJA)))
        requirements.prepare_environment()
        assert os.environ["PATH"] == str(tmp_path / "bin")
        assert requirements.missing_ninja() is None


class TestToolkit:
    def test_none(self, machine):
        line = one_line(requirements.missing_toolkit("13.0"))
        assert line.startswith("no CUDA toolkit: no nvcc: install a CUDA 13 toolkit")

    def test_an_nvcc_without_a_toolkit(self, machine, tmp_path):
        nvcc = script(tmp_path / "bin" / "nvcc", "echo release 13.0,")
        machine.setenv("PATH", str(nvcc.parent))
        assert f"{nvcc} belongs to none that has bin/nvcc and include/cuda_runtime.h" in one_line(
            requirements.missing_toolkit("13.0")
        )

    def test_on_path(self, machine, tmp_path):
        home = fake_toolkit(tmp_path / "toolkit", "13.0")
        machine.setenv("PATH", str(home / "bin"))
        assert requirements.missing_toolkit("13.0") is None
        requirements.set_cuda_home("13.0")
        assert os.environ["CUDA_HOME"] == str(home)

    def test_of_conda(self, machine, tmp_path):
        home = fake_toolkit(tmp_path / "toolkit", "13.0", include="targets/x86_64-linux/include")
        assert requirements.toolkit_at(home) == requirements.Toolkit(home, "13.0")

    @pytest.mark.parametrize("release, torch_cuda", [("12.4", "13.0"), ("13.0", "12.8")])
    def test_of_another_major_version_than_torch(self, machine, tmp_path, release, torch_cuda):
        home = fake_toolkit(tmp_path / "toolkit", release)
        machine.setenv("PATH", str(home / "bin"))
        line = one_line(requirements.missing_toolkit(torch_cuda))
        assert f"nvcc {release} ({home}) does not fit a torch built for CUDA {torch_cuda}" in line
        assert f"install a CUDA {torch_cuda[:2]} toolkit" in line
        requirements.set_cuda_home(torch_cuda)
        assert "CUDA_HOME" not in os.environ

    def test_of_another_minor_version_is_fine(self, machine, tmp_path):
        machine.setenv("PATH", str(fake_toolkit(tmp_path / "toolkit", "13.2") / "bin"))
        assert requirements.missing_toolkit("13.0") is None

    def test_the_one_that_fits_torch_is_taken(self, machine, tmp_path):
        machine.setenv("PATH", str(fake_toolkit(tmp_path / "toolkit", "12.4") / "bin"))
        for release in ("9.2", "13.0", "12.8"):
            fake_toolkit(tmp_path / "usr-local" / f"cuda-{release}", release)
        assert requirements.missing_toolkit("13.1") is None
        requirements.set_cuda_home("13.1")
        assert os.environ["CUDA_HOME"] == str(tmp_path / "usr-local" / "cuda-13.0")

    @pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
    def test_cuda_home_is_wrong(self, machine, tmp_path, variable):
        machine.setenv(variable, str(tmp_path / "nowhere"))
        assert f"CUDA_HOME is {tmp_path}/nowhere, which holds no CUDA toolkit" in one_line(requirements.missing_toolkit("13.0"))
        home = fake_toolkit(tmp_path / "usr-local" / "cuda", "13.0")
        assert one_line(requirements.missing_toolkit("13.0")).endswith(f": export CUDA_HOME={home}")
        requirements.set_cuda_home("13.0")
        assert os.environ[variable] == str(tmp_path / "nowhere"), "what the user set was changed"

    def test_cuda_home_of_another_major_version(self, machine, tmp_path):
        machine.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "old", "12.4")))
        home = fake_toolkit(tmp_path / "usr-local" / "cuda", "13.0")
        line = one_line(requirements.missing_toolkit("13.0"))
        assert "nvcc 12.4" in line
        assert f": export CUDA_HOME={home}, or install a torch built for CUDA 12" in line

    @pytest.mark.parametrize("real", [False, pytest.param(True, marks=needs_toolkit)])
    @pytest.mark.parametrize("kind", ["wrapper", "link"])
    def test_an_nvcc_on_path_that_is_not_in_the_toolkit(self, machine, tmp_path, kind, real):
        """torch would take the directory above that of the nvcc on PATH."""
        home = REAL_TOOLKIT.home if real else fake_toolkit(tmp_path / "toolkit", "13.0")
        directory, release = tmp_path / "prefix" / "bin", REAL_TOOLKIT.release if real else "13.0"
        if kind == "link":
            link(directory, "nvcc", str(home / "bin" / "nvcc"))
        else:
            script(directory / "nvcc", f'exec {home}/bin/nvcc "$@"')
        machine.setenv("PATH", f"{directory}{os.pathsep}{PATH}" if real else str(directory))  # for nvcc's host compiler
        assert requirements.toolkit_at(tmp_path / "prefix") is None
        requirements.set_cuda_home(release)
        assert Path(os.environ["CUDA_HOME"]).resolve() == home.resolve()
        assert requirements.missing_toolkit(release) is None

    def test_torch_that_was_imported_before_learns_it(self, machine, tmp_path):
        from torch.utils import cpp_extension

        machine.setattr(cpp_extension, "CUDA_HOME", "/wrong")
        home = fake_toolkit(tmp_path / "usr-local" / "cuda", "13.0")
        requirements.set_cuda_home("13.0")
        assert str(home) == cpp_extension.CUDA_HOME


class TestGpu:
    @pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
    def test_torch_without_cuda(self):
        line = one_line(requirements.missing_for("cuda"))
        assert line.startswith(f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch")

    @needs_cuda_torch
    def test_none_is_visible(self):
        code = "from playground.machine import requirements; print(requirements.missing_for('cuda'))"
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        expected = "CUDA_VISIBLE_DEVICES is ''" if torch.cuda.is_available() else "no NVIDIA driver"
        assert expected in result.stdout
        assert len(result.stdout.splitlines()) == 1
        assert result.stderr == ""


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="'cuda' or 'cpu', not 'rocm'"):
        requirements.missing_for("rocm")
