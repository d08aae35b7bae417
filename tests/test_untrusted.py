"""What a judged process may leave at a name that a process which judges opens: each thing, at each kind of name.

Nobody waits for it, nothing outside of the folder is read or changed, and what is refused is refused in one line.
"""

import contextlib
import fcntl
import json
import os
import stat
import threading

import pytest
import torch

from playground import tensors, untrusted
from playground.judge.case import erase
from playground.judge.failure import remove
from playground.machine import build_locks
from playground.nvidia import tool
from playground.worker import WorkerFailure

MOST = 4096
OUTSIDE = b"not to be touched"

pytestmark = pytest.mark.timeout(60)


def sparse(path, outside):
    path.touch()
    try:
        os.truncate(path, 1 << 40)
    except OSError:
        pytest.skip("no file of 1 TB here")


def device(path, outside):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which has no end
    except PermissionError:
        pytest.skip("this user makes no devices")


def folder(path, outside):
    path.mkdir()
    (path / "link").symlink_to(outside.parent)


THINGS = {
    "a link": lambda path, outside: path.symlink_to(outside),
    "a link to a file that is not there yet": lambda path, outside: path.symlink_to(outside.with_name("made")),
    "a link to a folder": lambda path, outside: path.symlink_to(outside.parent),
    "a hard link": lambda path, outside: os.link(outside, path),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a device": device,
    "a folder": folder,
    "a file of 1 TB": sparse,
    "a file that grows": lambda path, outside: path.touch(),
}
FILES = ("a file of 1 TB", "a file that grows")  # they are this user's own, and may be opened, erased and removed


@pytest.fixture
def place(tmp_path):
    """A folder of a judged process, held open, beside a file that is none of its business."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(OUTSIDE)
    (tmp_path / "judged").mkdir()
    held = untrusted.Folder(tmp_path / "judged")
    yield held
    held.close()


@contextlib.contextmanager
def left_at(place, name, thing):
    """The thing lies at that name; what is outside stays as it is."""
    file, outside = place.file(name), place.path.parent / "outside" / "file"
    THINGS[thing](file.path, outside)
    over = threading.Event()

    def grow():
        while not over.is_set() and file.path.is_file():
            with contextlib.suppress(OSError), file.path.open("r+b") as growing:
                growing.seek(0, os.SEEK_END)
                growing.write(bytes(MOST))

    thread = threading.Thread(target=grow if thing == "a file that grows" else lambda: None)
    thread.start()
    try:
        yield file
    finally:
        over.set()
        thread.join()
    assert [path.name for path in outside.parent.iterdir()] == ["file"] and outside.read_bytes() == OUTSIDE


@pytest.mark.parametrize("thing", THINGS)
def test_at_the_name_of_results(place, thing):
    with left_at(place, "outputs", thing) as file:
        with pytest.raises(tensors.NotTensors, match=r"the file of results (is no|cannot|has|holds)"):
            tensors.load_results(file.held, MOST)
        assert untrusted.erase(file.held) == (thing in FILES)
        with contextlib.nullcontext() if thing in FILES else pytest.raises((OSError, untrusted.Refused)):
            tensors.save_results(tensors.Results([torch.ones(3)]), file.path)


@pytest.mark.parametrize("thing", THINGS)
def test_at_a_name_that_is_removed(place, thing):
    """Also where the driver would first erase it."""
    for clear in remove, erase:
        with left_at(place, clear.__name__, thing) as file:
            if thing == "a folder":
                with pytest.raises(WorkerFailure, match="left something that cannot be removed where its results go"):
                    clear(file.held)
            else:
                clear(file.held)
                assert clear is erase or not os.path.lexists(file.path)


@pytest.mark.parametrize("thing", THINGS)
def test_at_the_names_of_a_tools_files(place, thing, monkeypatch):
    """Left there by an earlier file, and by the one that the tool looks at."""
    monkeypatch.setattr(tool, "TARGET", ("true",))
    with contextlib.ExitStack() as left:
        if thing not in ("a folder", "a file that grows"):
            for what in ("request", "reply", "log", "output"):
                left.enter_context(left_at(place, f"tool.{what}", thing))
        run = left.enter_context(tool.Run("tool", {"limit": 30}, place.path))
        run.wait()
        assert json.loads((place.path / "tool.request").read_text()) == {"limit": 30}
        assert run.reply() is None and run.said() == "\n"
        monkeypatch.setattr(tool, "MOST", MOST)
        left.enter_context(left_at(place, "tool.reply", thing))
        left.enter_context(left_at(place, "tool.log", thing))
        assert run.reply() is None
        assert OUTSIDE.decode() not in run.said() and len(run.said()) < 2 * MOST


@pytest.mark.parametrize("thing", THINGS)
def test_in_a_folder_that_is_measured(place, thing):
    with left_at(place, "anything", thing):
        assert place.size(10) < 1 << 30


@pytest.mark.parametrize("where", ["extension", "judged/file/extension", "judged/builds-1/extension"])
def test_a_folder_of_builds_is_a_link_elsewhere(tmp_path, where):
    """There may be a file called lock, which is none of PyTorch's."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    link = tmp_path / "root" / where
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    assert build_locks.clear_stale_locks(tmp_path / "root", grace=0) == ([], {})
    assert (tmp_path / "elsewhere" / "lock").exists()


@pytest.mark.parametrize("thing", THINGS)
def test_at_the_name_of_a_lock(place, thing):
    (place.path / "extension").mkdir()
    with left_at(place, "extension/lock", thing):
        build_locks.clear_stale_locks(place.path, grace=0)


def test_a_folder_that_was_exchanged_is_still_the_one_that_was_held(place):
    outside = place.path.parent / "outside"
    place.path.rename(place.path.with_name("moved"))
    place.path.symlink_to(outside)
    descriptor = untrusted.opened(place.file("file").held, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"new")
    os.close(descriptor)
    assert (place.path.with_name("moved") / "file").read_bytes() == b"new"
    assert untrusted.read(place.file("file").held, MOST) == b"new" and (outside / "file").read_bytes() == OUTSIDE
    with pytest.raises(OSError):
        untrusted.Folder(place.path)


def test_anothers_file_is_refused(place, monkeypatch):
    (place.path / "file").touch()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(untrusted.Refused, match="no regular file of its own"):
        untrusted.opened(place.file("file").held)


def test_results_that_grow_while_they_are_read(place, monkeypatch):
    """Each tensor that the header promises is as large as the file was; together they would take any memory."""
    file, ones = place.file("outputs"), torch.ones(MOST, dtype=torch.uint8)
    tensors.save_results(tensors.Results([ones, ones]), file.path)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-MOST])
    as_ever = tensors._read_tensor

    def read_and_grow(*arguments):
        file.path.write_bytes(whole)
        return as_ever(*arguments)

    monkeypatch.setattr(tensors, "_read_tensor", read_and_grow)
    with pytest.raises(tensors.NotTensors, match="something that is no tensor"):
        tensors.load_results(file.held, len(whole))


def test_what_is_too_much_to_be_measured(place):
    for i in range(5):
        (place.path / str(i)).write_bytes(bytes(1 << 16))
    assert 5 << 16 <= place.size(5) < 6 << 16
    assert place.size(4) == float("inf")
    deep = place.path / "/".join("d" * untrusted.DEEPEST)
    deep.mkdir(parents=True)
    assert place.size(1000) < float("inf")
    (deep / "d").mkdir()
    assert place.size(1000) == float("inf")


def test_memory_that_is_mapped_cannot_be_shortened():
    descriptor = untrusted.memory("shared")
    with untrusted.held_at(descriptor).open("r+b") as file:
        file.truncate(MOST)
        assert len(file.read()) == MOST
        with pytest.raises(PermissionError):
            file.truncate(0)
        with pytest.raises(PermissionError):  # or no process that judges could write there any more
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    os.close(descriptor)
