"""The emulator is a package of its own: without the project around it and, for plain programs, without PyTorch."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cuda_emulator
from cuda_emulator import toolchain

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "mistakes.cu"
NEITHER = "import sys; sys.modules['torch'] = sys.modules['playground'] = None; sys.argv[0] = 'python -m cuda_emulator'; "


def imports_of(path):
    """(module, names) of each import in a file, wherever it stands; relative ones without their package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", tuple(alias.name for alias in node.names)


@pytest.mark.parametrize("path", sorted((ROOT / "cuda_emulator").rglob("*.py")), ids=lambda path: path.name)
def test_nothing_in_it_knows_the_playground(path):
    assert not [module for module, _ in imports_of(path) if module.split(".")[0] == "playground"]
    assert "PLAYGROUND" not in path.read_text()


def test_the_playground_uses_its_public_names_alone():
    used, public = set(), set(cuda_emulator.__all__)
    for path in (ROOT / "playground").rglob("*.py"):
        if path == ROOT / "playground" / "emulator" / "__main__.py":  # the command, under its former name
            continue
        tree = ast.parse(path.read_text())
        for module, names in imports_of(path):
            assert not module.startswith("cuda_emulator."), f"{path}: {module}"
            used |= set(names) - {"*", "__all__"} if module == "cuda_emulator" else set()
        known_as = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "cuda_emulator"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known_as:
                used |= {node.attr} - {"__file__"}
    assert {"install", "devices", "kernel_names"} <= used <= public, used - public


def test_every_public_name_is_there():
    assert [name for name in cuda_emulator.__all__ if not hasattr(cuda_emulator, name)] == []


def test_installed_alone_it_runs_a_program(tmp_path):
    """By pip, into a folder where nothing else is; a program then needs neither PyTorch nor the project.

    The runtime, of the same sources, is not compiled again.
    """
    shutil.copytree(ROOT / "cuda_emulator", tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path / "alone", tmp_path / "source"], check=True, capture_output=True, text=True)
    code = f"""{NEITHER}
sys.path.insert(0, {str(tmp_path / "alone")!r})
from cuda_emulator import __main__, toolchain
assert str(toolchain.runtime_library()) == {str(toolchain.runtime_library())!r}
sys.exit(__main__.main())"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(PROGRAM), "--", "bounds"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "global memory out of bounds at `out[4]`" in done.stderr, done.stderr
