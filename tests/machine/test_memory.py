"""Who gets memory and processors, who waits for them, and how many compilers run at once."""

import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from playground.machine import memory
from playground.machine.memory import Memory, Processors

GIB = 1 << 30


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """10 GiB on the host, 10 of files, 8 on the GPU."""
    monkeypatch.setattr(memory, "SHARE", 1.0)
    monkeypatch.setattr(memory, "free_on_host", lambda: 10 * GIB)
    monkeypatch.setattr(memory, "free_on_gpu", lambda: 8 * GIB)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10 * GIB}))
    made = Memory()
    assert made.capacity(tmp_path, on_gpu=True) == {"host": 10 * GIB, "files": 10 * GIB, "device": 8 * GIB}
    return made


def need(host=1, files=0, device=0):
    return {"host": host * GIB, "files": files * GIB, "device": device * GIB}


def waits(shared, kind, wanted, patience=0.3):
    """Whether it has to wait, which shows after some seconds; it never gets it then."""
    began, over, got = threading.Event(), threading.Event(), threading.Event()

    def take():
        began.set()
        with shared.taken(kind, wanted, over.is_set):
            if not over.is_set():
                got.set()

    thread = threading.Thread(target=take)
    thread.start()
    began.wait()
    has_it = got.wait(patience)
    over.set()
    thread.join()
    return not has_it


@pytest.mark.parametrize("wanted, has_to_wait", [(need(4), False), (need(5), True), (need(1, 5), True), (need(1, 0, 6), True)])
def test_what_fits_beside_the_others_is_taken_at_once(shared, wanted, has_to_wait):
    with shared.taken("judgement", need(6, 6, 3)):
        assert waits(shared, "judgement", wanted, 0.3 if has_to_wait else 10.0) == has_to_wait
    assert not waits(shared, "judgement", wanted, 10.0)


def test_one_that_takes_more_than_there_is_has_it_alone(shared):
    with shared.taken("judgement", need(20)):
        assert waits(shared, "judgement", need(1))
        with shared.taken("call", need(1)):  # which no judgement may wait for, since that waits for calls
            assert waits(shared, "call", need(1))


def test_who_waits_gets_what_is_given_back(shared):
    first = shared.taken("judgement", need(8))
    first.__enter__()
    got = threading.Event()

    def take():
        with shared.taken("judgement", need(8)):
            got.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not got.wait(0.2)
    first.__exit__(None, None, None)
    assert got.wait(10)
    thread.join()


def test_processes_of_one_host_have_equal_parts(shared, tmp_path):
    shared.shared_by = 2
    assert shared.capacity(tmp_path, on_gpu=False)["host"] == 5 * GIB


@pytest.mark.parametrize("names", memory.GROUPS)
def test_a_containers_limit_counts(tmp_path, names):
    limit, usage = (tmp_path / name for name in names)
    limit.parent.mkdir(exist_ok=True)
    limit.write_text("3000\n")
    usage.write_text("1500\n")
    (limit.parent / "memory.stat").write_text("anon 100\ninactive_file 500\n")
    assert memory.free_on_host(tmp_path) == 2000
    limit.write_text("max\n")
    assert memory.free_on_host(tmp_path) > GIB // 8


@pytest.mark.parametrize(
    "processors, free, shared_by, expected",
    [
        (16, 128 * GIB, 1, 16),  # as many as processors
        (16, 7 * GIB, 1, 3),  # as memory has room for
        (32, 31 * GIB, 2, 7),  # the half of what the host bears
        (2, 1 * GIB, 1, 1),
        (2, 64 * GIB, 4, 1),  # a rank always builds
    ],
)
def test_processors_and_memory_bound_it(monkeypatch, processors, free, shared_by, expected):
    monkeypatch.setattr(memory.os, "sched_getaffinity", lambda pid: set(range(processors)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert memory.builds_at_once(shared_by) == expected


def begun(processors, count):
    """(an event that is set once a build has begun, one that ends it)."""
    has_begun, end = threading.Event(), threading.Event()

    def build():
        with processors.build(count):
            has_begun.set()
            end.wait(60)

    threading.Thread(target=build, daemon=True).start()
    return has_begun, end


def test_builds_wait_for_their_part():
    processors = Processors(4)
    builds = [begun(processors, 2) for _ in range(3)]
    until = time.monotonic() + 30
    while sum(has_begun.is_set() for has_begun, _ in builds) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert sum(has_begun.is_set() for has_begun, _ in builds) == 2
    next(end for has_begun, end in builds if has_begun.is_set()).set()
    assert all(has_begun.wait(30) for has_begun, _ in builds)
    for _, end in builds:
        end.set()


def test_a_judgement_waits_for_nobody_and_one_build_is_always_under_way():
    processors = Processors(2)
    with processors.judgement(), processors.judgement(), processors.judgement():
        first, end = begun(processors, 2)
        assert first.wait(30)
        second, end_second = begun(processors, 2)
        assert not second.wait(0.2)
        end.set()
        assert second.wait(30)  # as the only one
        end_second.set()
