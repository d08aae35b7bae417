"""The queue that ranks share, with several of them in this process."""

import pytest
import torch.distributed

from playground.driver import board
from playground.driver.board import ATTEMPTS, Board, work_off


@pytest.fixture
def boards():
    """boards(rank) -> its Board, all on one store."""
    store = torch.distributed.HashStore()
    return lambda rank: Board(store, rank)


def test_an_item_is_taken_once(boards):
    first, second = boards(0), boards(1)
    first.sign_of_life()
    assert first.take("run", [0, 1]) == 0
    assert second.take("run", [0, 1]) == 1
    assert first.take("run", [0, 1]) is None
    assert second.taken("run", [0, 1, 2]) == [0, 1]


def test_what_a_lost_rank_had_is_taken_once_more_and_then_given_up(boards):
    ranks = [boards(rank) for rank in range(ATTEMPTS + 1)]
    for attempt in range(ATTEMPTS):
        assert ranks[attempt].take("run", [7]) == 7
        ranks[-1].declare_lost(attempt)
    assert ranks[-1].take("run", [7]) is None
    assert ranks[-1].unfinished("run", [7]) == [] and ranks[-1].outcome("run", 7) is None


def test_the_first_outcome_counts(boards):
    boards(0).finish("run", 0, {"verdict": "pass"})
    boards(1).finish("run", 0, {"verdict": "fail"})
    assert boards(2).outcome("run", 0) == {"verdict": "pass"}


def test_kinds_are_apart(boards):
    assert boards(0).take("build on host 0", [0]) == 0
    assert boards(1).take("build on host 1", [0]) == 0


def test_a_rank_without_signs_of_life_is_lost(boards, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(board.time, "monotonic", lambda: now[0])
    alive, observer = boards(0), boards(1)
    assert not observer.is_lost(0), "it may still be starting"
    now[0] += board.FIRST_SIGN_WITHIN - 1
    assert not observer.is_lost(0)
    alive.sign_of_life()
    assert not observer.is_lost(0)
    now[0] += board.LOST_AFTER - 1
    assert not observer.is_lost(0)
    alive.sign_of_life()
    assert not observer.is_lost(0)
    now[0] += board.LOST_AFTER + 1
    assert observer.is_lost(0)
    alive.sign_of_life()
    assert not observer.is_lost(0)


def test_working_off_waits_for_what_others_have_taken(boards, monkeypatch):
    mine, others = boards(0), boards(1)
    others.sign_of_life()
    others.take("run", [1])
    done = []

    def pause(_):
        others.finish("run", 1, "theirs")

    monkeypatch.setattr(board.time, "sleep", pause)
    work_off(mine, "run", range(3), lambda item: done.append(item) or f"mine {item}")
    assert done == [0, 2]
    assert [mine.outcome("run", item) for item in range(3)] == ["mine 0", "theirs", "mine 2"]


def test_the_order_is_the_ranks_own(boards):
    done = []
    work_off(boards(0), "run", range(3), lambda item: done.append(item), order=lambda items: items[::-1])
    assert done == [2, 1, 0]
