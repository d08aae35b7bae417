"""Locks of builds that are really killed, and of builds that live."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton
from typed import wait_for

from playground.machine import build_locks, requirements

pytestmark = pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason="this torch's locks end with the process that holds them"
)

BATON = Path(sys.modules[FileBaton.__module__].__file__)
TAKE_LOCK = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("file_baton", {str(BATON)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
baton = module.FileBaton(sys.argv[1])
assert baton.try_acquire()
print("acquired", flush=True)
sys.stdin.read()
"""
BUILD = """
from torch.utils import cpp_extension
source = "extern \\"C\\" int answer() { return 42; }"
print(cpp_extension.load_inline("slow", source, is_python_module=False, no_implicit_headers=True))
"""


def lock_in(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True)
    return root / name / "lock"


@contextlib.contextmanager
def process(*command, **options):
    """A process in a session of its own, which is killed, with all that it started, at the end."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True, **options}
    child = subprocess.Popen(command, **options)
    try:
        yield child
    finally:
        kill_session(child.pid)
        child.communicate()


def kill_session(leader: int) -> None:
    """Not the process group: ninja starts each compiler in a group of its own."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def holder(lock: Path):
    """A process that holds `lock` as torch does: by the very code that torch runs."""
    with process(sys.executable, "-c", TAKE_LOCK, str(lock)) as child:
        assert child.stdout.readline() == "acquired\n"
        yield child


def leave_stale(lock: Path) -> Path:
    with holder(lock) as child:
        child.kill()
    assert lock.exists()
    return lock


def test_stale_and_held_locks_are_told_apart(tmp_path):
    stale = [leave_stale(lock_in(tmp_path, name)) for name in ("a", "b")]
    (tmp_path / "a" / "build.ninja").touch()
    with holder(lock_in(tmp_path, "c")) as living:
        cleared, held = build_locks.clear_stale_locks(tmp_path, grace=0)
        assert cleared == stale
        assert list(held) == [tmp_path / "c" / "lock"]
        assert f"(pid {living.pid})" in held[tmp_path / "c" / "lock"]
    assert [path.exists() for path in (*stale, *held)] == [False, False, True]
    assert [path.name for path in stale[0].parent.iterdir()] == ["build.ninja"]
    assert FileBaton(str(stale[0])).try_acquire(), "the next build still waits"


def test_a_lock_of_this_process_is_held(tmp_path):
    baton = FileBaton(str(lock_in(tmp_path, "a")))
    assert baton.try_acquire()
    cleared, held = build_locks.clear_stale_locks(tmp_path, grace=0)
    assert not cleared
    assert [f"(pid {os.getpid()})" in reason for reason in held.values()] == [True]
    baton.release()
    assert build_locks.clear_stale_locks(tmp_path) == ([], {})


def test_a_young_lock_is_looked_at_again_when_it_has_aged(tmp_path):
    lock = leave_stale(lock_in(tmp_path, "a"))
    made = lock.stat().st_mtime
    assert build_locks.clear_stale_locks(tmp_path, grace=1.0) == ([lock], {})
    assert time.time() - made >= 1.0


def test_what_changes_between_the_looks(tmp_path):
    """A build that begins keeps its lock; so does one without a visible holder; what is released is no one's."""
    begins, replaced, released = [leave_stale(lock_in(tmp_path, name)) for name in "abc"]
    baton = FileBaton(str(begins))

    def change():
        begins.unlink()
        assert baton.try_acquire()
        other = replaced.with_name("other")
        other.touch()
        other.replace(replaced)
        released.unlink()

    timer = threading.Timer(0.3, change)
    timer.start()
    cleared, held = build_locks.clear_stale_locks(tmp_path, grace=1.5)
    timer.join()
    assert (cleared, list(held)) == ([], [begins, replaced])
    assert "a build that has just begun" in held[replaced]
    baton.release()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_lock_is_kept(tmp_path):
    lock = leave_stale(lock_in(tmp_path, "a"))
    for directory in (lock.parent, tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == 0 and directory.is_relative_to("/tmp") and directory != Path("/tmp"):
            directory.chmod(0o755)
    os.seteuid(65534)
    try:
        cleared, held = build_locks.clear_stale_locks(tmp_path, grace=0)
    finally:
        os.seteuid(0)
    assert (cleared, lock.exists()) == ([], True)
    assert "made by another user (uid 0)" in held[lock]


def test_the_file_system_is_that_of_the_innermost_mount_point(tmp_path, monkeypatch):
    locks = [leave_stale(lock_in(tmp_path / root, "a")) for root in ("local", "shared")]
    mount = psutil.disk_partitions(all=True)[0]
    mounts = [mount._replace(mountpoint=point, fstype=kind) for point, kind in [("/", "ext4"), (f"{tmp_path}/shared", "nfs4")]]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    found = [build_locks.clear_stale_locks(lock.parents[1], grace=0) for lock in locks]
    assert [(cleared, list(held)) for cleared, held in found] == [([locks[0]], []), ([], [locks[1]])]
    assert "on a network file system (nfs4)" in found[1].held[locks[1]]


def test_a_real_build_that_is_killed(tmp_path):
    """Its ninja and compiler outlive it: the lock is stale only when they are gone too. The next build then succeeds."""
    requirements.prepare_environment()
    if missing := requirements.missing_for("cpu"):
        pytest.skip(str(missing))
    compiler = tmp_path / "slow-c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -c "*) touch "$STARTED"; sleep 60;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    started, root = tmp_path / "started", tmp_path / "root"
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(root), "CXX": str(compiler), "STARTED": str(started)}
    with process(sys.executable, "-c", BUILD, env=env, stderr=subprocess.DEVNULL) as build:
        wait_for(started.exists, 30)
        lock = root / "slow" / "lock"
        assert lock.exists()
        assert build_locks.clear_stale_locks(root, grace=0).cleared == []

        build.kill()
        build.wait()
        cleared, held = build_locks.clear_stale_locks(root, grace=0)
        assert (cleared, list(held)) == ([], [lock])
        kill_session(build.pid)
        wait_for(lambda: not build_locks.clear_stale_locks(root, grace=0).held, 30)
    assert not lock.exists()

    env["CXX"] = "c++"
    again = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "slow.so" in again.stdout


@pytest.mark.parametrize("variable", ["TORCH_EXTENSIONS_DIR", None])
def test_the_root_is_torchs(tmp_path, monkeypatch, variable):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    for name in (variable or "HOME", variable or "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert build_locks.extensions_root() == Path(cpp_extension._get_build_directory("a", False)).parent
    assert build_locks.extensions_root().is_relative_to(tmp_path)
