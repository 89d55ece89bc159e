"""How large the memory is that a parent shares, and when it shares none."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ring import compiled as ring_native
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.wire.messages import Welcome
from dflash_runtime.experts.daemons import data_path
from dflash_runtime.experts.daemons.data_path import (
    SegmentOffer,
    SharingPlan,
    make_offer,
    why_not_shared,
)

WELCOME = Welcome(
    version=2,
    link_id="00",
    model_identity="",
    placement_fingerprint="",
    numeric_class="",
    device="cpu",
    data_port=0,
    max_tokens=1024,
    free_memory_bytes=0,
    pairs_per_second=1.0,
    can_share=True,
)
MOST_BYTES = 128 << 20


@given(
    hidden_size=st.integers(1, 1 << 15),
    num_used=st.integers(1, 64),
    more=st.integers(0, 1 << 30),
    max_tokens=st.integers(1, 4096),
)
def test_a_segment_holds_several_requests_within_its_bound(
    hidden_size: int, num_used: int, more: int, max_tokens: int
) -> None:
    shape = SharingPlan(hidden_size, num_used, more).shape(max_tokens)
    assert shape is not None
    assert shape.num_slots >= 2
    assert shape.segment_bytes <= max(MOST_BYTES, more) + 4096
    assert shape.hidden_size == hidden_size
    assert 1 <= shape.max_tokens <= max_tokens
    assert shape.max_pairs == shape.max_tokens * num_used
    if shape.max_tokens < max_tokens:  # only since there was not the room
        refused = 2 * shape.max_tokens + 1  # at most: it was halved and rounded down
        larger = RingShape(2, refused, hidden_size, refused * num_used)
        assert larger.segment_bytes > max(MOST_BYTES, more)


def test_rows_that_no_segment_holds_are_not_shared() -> None:
    assert SharingPlan(1 << 26, 1, 0).shape(16) is None


def test_reasons_not_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/run/somewhere")
    assert not why_not_shared(WELCOME, folder)
    assert "path" in why_not_shared(WELCOME, None)
    assert "offer" in why_not_shared(replace(WELCOME, can_share=False), folder)
    monkeypatch.setattr(ring_native, "is_available", lambda: False)
    assert "numba" in why_not_shared(WELCOME, folder)


def test_a_cancelled_offer_leaves_no_names(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an engine is closed while it connects."""
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(*args: Any) -> SegmentOffer:
        has_begun.set()
        assert may_end.wait(30.0)
        return make_offer(*args)

    monkeypatch.setattr(data_path, "make_offer", slow)

    async def play() -> None:
        making = asyncio.create_task(
            data_path._make_offer(run_dir, WELCOME, SharingPlan(64, 2, 1 << 20))
        )
        assert await asyncio.to_thread(has_begun.wait, 30.0)
        making.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await making

    asyncio.run(play())
    assert not any(run_dir.iterdir())
