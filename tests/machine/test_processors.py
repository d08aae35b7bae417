"""A build waits for processors that judgements and other builds have; a judgement does not."""

import threading
import time

from playground.machine.processors import Processors


def begun(processors, count, is_over=lambda: False):
    """(an event that is set once a build has begun, one that ends it)."""
    has_begun, end = threading.Event(), threading.Event()

    def build():
        with processors.build(count, is_over):
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
    assert sum(has_begun.is_set() for has_begun, _ in builds) == 2 and processors.free == 0
    next(end for has_begun, end in builds if has_begun.is_set()).set()
    assert all(has_begun.wait(30) for has_begun, _ in builds)
    for _, end in builds:
        end.set()


def test_a_judgement_waits_for_nobody_and_one_build_is_always_under_way():
    processors = Processors(2)
    with processors.judgement(), processors.judgement(), processors.judgement():
        assert processors.free == -1
        first, end = begun(processors, 2)
        assert first.wait(30)
        second, end_second = begun(processors, 2)
        assert not second.wait(0.2)
        end.set()
        assert second.wait(30)  # as the only one
        end_second.set()


def test_what_waits_goes_on_where_the_run_is_over():
    processors = Processors(1)
    over = threading.Event()
    (first, end), (second, end_second) = begun(processors, 1), begun(processors, 1, over.is_set)
    assert first.wait(30) and not second.wait(0.1)
    over.set()
    assert second.wait(30)
    end.set(), end_second.set()
