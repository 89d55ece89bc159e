"""Clients take turns; a full queue refuses; every waiting thread is woken."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.errors import QueueFull
from dflash_runtime.engine.fair_queue import FairQueue


def taken(queue: FairQueue[str]) -> list[str | None]:
    return [queue.take() for _ in range(len(queue))]


def test_clients_take_turns_however_much_each_asked_for() -> None:
    queue: FairQueue[str] = FairQueue(20)
    for client, item in zip("aaaaabbc", "123456789", strict=False):
        queue.put(client, client + item)
    assert taken(queue) == ["a1", "b6", "c8", "a2", "b7", "a3", "a4", "a5"]


def test_what_waits_is_listed_in_the_order_in_which_it_is_taken() -> None:
    queue: FairQueue[str] = FairQueue(20)
    for client, item in zip("aaaaabbc", "123456789", strict=False):
        queue.put(client, client + item)
    for most in (0, 1, 4, 8, 100):
        assert queue.waiting(most) == ["a1", "b6", "c8", "a2", "b7", "a3", "a4", "a5"][:most]
    assert queue.waiting(100) == taken(queue)


def test_one_client_fills_half_and_all_together_the_whole() -> None:
    queue: FairQueue[int] = FairQueue(4)
    for item in range(2):
        queue.put("a", item)
    with pytest.raises(QueueFull):
        queue.put("a", 2)
    queue.put("b", 3)
    queue.put("c", 4)
    with pytest.raises(QueueFull):
        queue.put("d", 5)
    assert queue.take() == 0
    queue.put("d", 5)
    assert len(queue) == 4


def test_what_is_removed_is_gone_and_makes_room() -> None:
    queue: FairQueue[int] = FairQueue(2)
    queue.put("a", 1)
    queue.put("b", 2)
    assert queue.remove("a", 1)
    assert not queue.remove("a", 1)
    assert not queue.remove("nobody", 1)
    queue.put("b2", 3)
    assert [queue.take(), queue.take(), len(queue)] == [2, 3, 0]


def test_a_closed_queue_gives_what_is_left_then_none() -> None:
    queue: FairQueue[int] = FairQueue(2)
    queue.put("a", 1)
    queue.close()
    assert [queue.take(), queue.take(), queue.take()] == [1, None, None]


def test_a_waiting_thread_is_woken_by_an_item_and_by_the_end() -> None:
    queue: FairQueue[int] = FairQueue(2)
    got: list[int | None] = []

    def take_all() -> None:
        while (item := queue.take()) is not None:
            got.append(item)

    thread = threading.Thread(target=take_all)
    thread.start()
    queue.put("a", 1)
    queue.put("b", 2)
    queue.close()
    thread.join(10)
    assert not thread.is_alive()
    assert got == [1, 2]


@given(st.lists(st.sampled_from(["a", "b", "c", "take"]), max_size=60))
def test_order_within_a_client_stays_and_no_client_is_passed_over_twice(steps: list[str]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(1000)
    waiting: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    passed_over = dict.fromkeys(waiting, 0)
    for number, step in enumerate(steps):
        if step != "take":
            queue.put(step, (step, number))
            waiting[step].append(number)
            continue
        if not len(queue):
            continue
        item = queue.take()
        assert item is not None
        assert waiting[item[0]].pop(0) == item[1]
        for client, items in waiting.items():
            passed_over[client] = passed_over[client] + 1 if items and client != item[0] else 0
        assert max(passed_over.values()) <= len(waiting) - 1


def test_a_wait_for_an_item_may_end_without_one() -> None:
    queue: FairQueue[int] = FairQueue(4)
    with pytest.raises(TimeoutError):
        queue.take(0.01)
    queue.put("a", 1)
    assert queue.take(0.01) == 1
    queue.close()
    assert queue.take(0.01) is None
