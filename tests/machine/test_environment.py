import getpass
import json
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch

from playground.machine import environment
from playground.serial import dump

ROOT = Path(__file__).resolve().parents[2]


def strings(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_it_is_json_and_names_no_machine():
    described = dump(environment.describe())
    assert json.loads(json.dumps(described)) == described
    secrets = [platform.node(), str(Path.home()), str(ROOT), sys.prefix]
    for text in strings(described):
        assert not any(secret in text for secret in secrets if len(secret) > 1)
        assert not text.startswith("/")
        assert getpass.getuser() not in text.split()


def test_what_is_known_everywhere():
    described = dump(environment.describe())
    assert described["torch"] == torch.__version__
    assert described["cuda"] == torch.version.cuda
    assert described["python"] == platform.python_version()
    assert described["cpu"]
    assert described["cpu_details"]["threads"] == torch.get_num_threads()
    assert 1 <= described["cpu_details"]["usable_logical_cores"] <= described["cpu_details"]["logical_cores"]
    assert described["memory_mib"] > 100
    assert len(described["gpus"]) == torch.cuda.device_count()
    assert described["gpu"] == next((gpu["name"] for gpu in described["gpus"]), None)
    for gpu in described["gpus"]:
        assert set(gpu) == {"name", "compute_capability", "memory_mib", "multiprocessors"}
        assert described["driver"]
    date = datetime.fromisoformat(described["date"])
    assert date.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - date) < timedelta(minutes=1)


def test_the_commit_and_whether_files_differ_from_it(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *arguments], capture_output=True, text=True, check=True).stdout

    monkeypatch.setattr(environment, "PROJECT", tmp_path)
    assert environment.describe().git == {"commit": None, "dirty": None}
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    commit = git("rev-parse", "HEAD").strip()
    assert environment.describe().git == {"commit": commit, "dirty": False}
    (tmp_path / "a").write_text("2")
    assert environment.describe().git == {"commit": commit, "dirty": True}
    git("checkout", "a")
    (tmp_path / "new").touch()
    assert environment.describe().git == {"commit": commit, "dirty": True}

    (tmp_path / "copy").mkdir()
    monkeypatch.setattr(environment, "PROJECT", tmp_path / "copy")
    assert environment.describe().git == {"commit": None, "dirty": None}, "the commit of a repository around the project"


def test_a_machine_without_programs_to_ask(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert shutil.which("git") is None
    described = dump(environment.describe())
    assert described["git"] == {"commit": None, "dirty": None}
    assert described["driver"] is None
    assert described["torch"] == torch.__version__
