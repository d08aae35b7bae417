"""The package: built, checked and installed from a wheel into an environment of its own, and used outside of the clone."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from playground import catalog

PROGRAM = catalog.ROOT / "tests" / "cuda_emulator" / "programs" / "mistakes.cu"


def run(*command, folder, status=0):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder=catalog.ROOT)
    return sorted(folder.glob("*.whl")) + sorted(folder.glob("*.tar.gz"))


class User:
    """Somebody who has installed what pip takes, with the packages of this Python, and is in an empty folder."""

    def __init__(self, folder, *installed):
        self.environment, self.folder = folder / "environment", folder / "work"
        self.folder.mkdir()
        venv.create(self.environment, with_pip=False, symlinks=True)
        python = self.environment / "bin" / "python"
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(self.environment)}))
        (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
        run(*pip, "--no-build-isolation", *installed, folder=self.folder)

    def types(self, program, *words, status=0):
        return run(self.environment / "bin" / program, *words, folder=self.folder, status=status)


@pytest.fixture(scope="module")
def user(built, tmp_path_factory):
    return User(tmp_path_factory.mktemp("user"), built[0])


def test_the_files_may_be_published(built):
    run(sys.executable, "-m", "twine", "check", "--strict", *built, folder=catalog.ROOT)


def test_no_name_of_others_is_taken(built):
    names = {name.partition("/")[0] for name in zipfile.ZipFile(built[0]).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"playground", "cuda_emulator"}


def test_models_and_variants_are_found(user):
    assert user.types("kernel-playground", "--list") == run(sys.executable, "compare.py", "--list", folder=catalog.ROOT)


@pytest.fixture(scope="module")
def examples(user):
    assert user.types("kernel-playground", "--copy", "examples") == "examples is a copy\n"
    return user.folder / "examples"


def test_a_copy_overwrites_nothing(user, examples):
    (examples / "softmax_new.py").rename(examples / "mine.py")
    assert "softmax.py is there already; nothing was written" in user.types("kernel-playground", "--copy", "examples", status=2)
    assert not (examples / "softmax_new.py").exists()
    (examples / "mine.py").rename(examples / "softmax_new.py")


def test_an_example_is_judged(user, examples):
    text = (examples / "softmax.py").read_text()
    (user.folder / "wrong.py").write_text(text.replace("Model(", "ModelNew(").replace("dim=1", "dim=0"))
    judge = ["--model", "examples/softmax.py", "--variant", "wrong.py", "--device", "cpu", "--check-only", "--sandbox", "off"]
    assert re.search(r"wrong fail\n  reason +the output is off by", user.types("kernel-playground", *judge, status=1))


@pytest.mark.full
def test_an_example_is_judged_under_the_emulator(user, examples):
    text = (examples / "softmax_new.py").read_text()
    (user.folder / "racing.py").write_text("".join(line for line in text.splitlines(True) if "all have read" not in line))
    judge = ["--model", "examples/softmax.py", "--variant", "racing.py", "--device", "emulator"]
    said = " ".join(user.types("kernel-playground", *judge, status=1).split())  # its lines are folded
    assert "racing.py:19: shared memory race" in said


def test_a_new_variant_goes_to_the_working_folder(user):
    said = user.types("kernel-playground", "--new", "alexnet_conv1", "cpu_mine")
    assert f"kernel-playground --model alexnet_conv1 --variant {user.folder / 'cpu_mine.py'}" in said
    assert "class ModelNew" in (user.folder / "cpu_mine.py").read_text()


def test_the_emulators_command_is_there(user):
    assert "FILE.cu [FILE ...]" in user.types("cuda-emulator", "--help")


@pytest.mark.full
def test_a_plain_program_runs(user):
    assert "global memory out of bounds at `out[4]`" in user.types("cuda-emulator", PROGRAM, "--", "bounds", status=1)


def test_from_the_clone(tmp_path):
    """An editable installation uses the clone's own files, and says what its user types there."""
    user = User(tmp_path, "-e", catalog.ROOT)
    assert "usage: compare.py --model" in user.types("kernel-playground", "compare", "--help")
    for words, status in ((["run", "--help"], 0), ([], 2)):
        user.types("kernel-playground", *words, status=status)
