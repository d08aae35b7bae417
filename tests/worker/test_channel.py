"""Messages over a pair of pipes: whole, in order, and with a clear end."""

import os
import threading
import time

import pytest

from playground.worker.channel import Channel


@pytest.fixture
def ends():
    """Two connected channels, and the descriptor that the first one writes to."""
    here, there = os.pipe(), os.pipe()
    yield Channel(here[0], there[1]), Channel(there[0], here[1]), there[1]
    for fd in (*here, *there):
        try:
            os.close(fd)
        except OSError:
            continue


def test_messages_come_whole_and_in_order(ends):
    here, there, _ = ends
    messages = [{"request": "a.b", "arguments": {"text": "line\nline", "number": 0.1, "none": None}}, {}, {"ü": ["\x00"]}]
    for message in messages:
        here.send(message)
    assert [there.receive(1) for _ in messages] == messages
    there.send({"back": True})
    assert here.receive(1) == {"back": True}


def test_a_message_larger_than_the_pipe(ends):
    here, there, _ = ends
    message = {"samples_ms": list(range(200_000))}
    sender = threading.Thread(target=here.send, args=(message,))
    sender.start()
    assert there.receive(10) == message
    sender.join()


def test_a_message_that_comes_in_pieces(ends):
    _, there, written = ends
    for piece in (b'{"a"', b": 1}", b'\n{"b": 2}\n{"c"'):
        os.write(written, piece)
    assert there.receive(1) == {"a": 1}
    assert there.receive(1) == {"b": 2}
    with pytest.raises(TimeoutError):
        there.receive(0.05)
    os.write(written, b": 3}\n")
    assert there.receive(1) == {"c": 3}


def test_time_limit(ends):
    here, *_ = ends
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        here.receive(0.2)
    assert 0.15 < time.monotonic() - start < 2


@pytest.mark.parametrize("line", [b"garbage\n", b"\n", b"\xff\xfe\n", b'{"result": {}\n'])
def test_what_is_no_json_is_a_value_error(ends, line):
    _, there, written = ends
    os.write(written, line)
    with pytest.raises(ValueError):
        there.receive(1)


def test_the_end_of_the_stream(ends):
    here, there, written = ends
    here.send({"last": 1})
    os.write(written, b'{"half')
    here.close()
    assert there.receive(1) == {"last": 1}
    with pytest.raises(EOFError):
        there.receive(1)
    with pytest.raises(BrokenPipeError):
        there.send({})
