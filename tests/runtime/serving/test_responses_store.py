"""Responses that are kept: how many, how large, how long, and for whom."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_runtime.serving.doors.responses_pages import page_of, read_items
from dflash_runtime.serving.doors.responses_store import ResponseStore, StoredResponse
from dflash_runtime.serving.errors import ApiError


def stored(key: str, size: int = 10) -> StoredResponse:
    return StoredResponse(key, (b"[]", b"x" * size), b"{}")


def test_a_response_is_known_to_its_key_until_it_is_removed() -> None:
    store = ResponseStore(1 << 20)
    store.put("a", StoredResponse("0", (b"[1]", b"[2]"), b"{}"))
    found = store.get("a", key="0")
    assert found is not None
    assert (found.items, found.response) == ((b"[1]", b"[2]"), b"{}")
    assert store.get("a", key="1") is None
    store.remove("a")
    assert (store.get("a", key="0"), len(store), store.num_bytes) == (None, 0, 0)


def test_items_are_listed_in_pages() -> None:
    texts = [{"type": "message", "role": "user", "content": []}, {"type": "reasoning", "id": "r"}]
    items = read_items(
        [json.dumps(texts).encode(), b'[{"type": "function_call_output"}]'], "resp_x"
    )
    assert [item["id"] for item in items] == ["msg_x_0", "r", "item_x_2"]
    page = page_of({}).of(items)
    assert [item["id"] for item in page["data"]] == ["item_x_2", "r", "msg_x_0"]
    assert (page["object"], page["has_more"]) == ("list", False)
    assert (page["first_id"], page["last_id"]) == ("item_x_2", "msg_x_0")
    page = page_of({"limit": "2", "order": "asc"}).of(items)
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (["msg_x_0", "r"], True)
    page = page_of({"limit": "2", "order": "asc", "after": "r"}).of(items)
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (["item_x_2"], False)
    assert page_of({"after": "msg_x_0"}).of(items)["data"] == []
    wrong = [("limit", each) for each in ("0", "101", "x", "-1", "1.5", "\u0663", "9" * 5000)]
    for field, value in [*wrong, ("order", "up"), ("after", "other")]:
        with pytest.raises(ApiError) as caught:
            page_of({field: value}).of(items)
        assert (caught.value.status, caught.value.param) == (400, field)


def test_after_an_hour_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    store = ResponseStore(1 << 20)
    store.put("a", StoredResponse("0", (), b"{}", made_s=now_s))
    now_s += 3599
    store.put("b", StoredResponse("0", (), b"{}", made_s=now_s))
    assert store.get("a", key="0") is not None
    now_s += 2
    assert store.get("a", key="0") is None
    assert (len(store), store.get("b", key="0") is not None) == (1, True)


def test_one_key_has_half_of_it_and_the_oldest_go_first() -> None:
    store = ResponseStore(1 << 30)
    for index in range(600):
        store.put(f"a{index}", stored("0"))
    assert len(store) == 512
    assert store.get("a87", key="0") is None
    assert store.get("a88", key="0") is not None
    for index in range(600):
        store.put(f"b{index}", stored("1"))
    assert len(store) == 1024
    assert store.get("a88", key="0") is not None
    store.put("c", stored("2"))
    assert store.get("a88", key="0") is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9000)), max_size=60))
def test_the_bounds_hold(puts: list[tuple[int, int]]) -> None:
    most = 20_000
    store = ResponseStore(most)
    for index, (key, size) in enumerate(puts):
        store.put(str(index), stored(str(key), size))
        kept = [
            found
            for key in range(3)
            for name in range(index + 1)
            if (found := store.get(str(name), key=str(key))) is not None
        ]
        assert store.num_bytes == sum(each.num_bytes for each in kept) <= most
        for each in "012":
            assert sum(k.num_bytes for k in kept if k.key == each) <= most // 2
