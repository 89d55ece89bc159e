"""Forms of streams: what readers take for lines, and terminals for commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from dflash_runtime.serving.wire import EVENTS, EVENTS_UNTIL_DONE, JSON_LINES, NAMED_EVENTS, Wire
from support.serving import CHAT_TEMPLATE

Serve = Callable[..., AbstractAsyncContextManager[Any]]
ODD = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1e\x7f\x9b31mé日"
"""What `str.splitlines` divides, as clients do that read lines, and a terminal's commands."""


@pytest.mark.parametrize("wire", [EVENTS, EVENTS_UNTIL_DONE, NAMED_EVENTS, JSON_LINES])
def test_a_chunk_is_a_line_for_every_reader(wire: Wire) -> None:
    chunk = {"type": "text", "text": ODD}
    text = wire.encoded(chunk).decode()
    assert text.splitlines() == text.rstrip("\n").split("\n") + [""] * (text.count("\n\n"))
    assert json.loads(text[text.index("{") :]) == chunk
    assert "é日" in text
    assert all(each.isprintable() or each == "\n" for each in text)


@pytest.mark.asyncio
async def test_answers_send_no_commands_to_terminals(serve: Serve) -> None:
    async with serve(template=CHAT_TEMPLATE) as served:
        body = {"messages": [{"role": "user", "content": "x"}], "choice": [ODD]}
        for fields in ({}, {"stream": True}):
            answer = await served.post("/v1/chat/completions", **body, **fields)
            assert answer.status_code == 200
            text = answer.content.decode()
            assert "é" in text  # in the same event or in two, as the tokens came
            assert "日" in text
            assert all(each.isprintable() or each == "\n" for each in text)
