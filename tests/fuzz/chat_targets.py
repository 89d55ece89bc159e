"""Fuzz target of what a program and the process that renders its chat templates say."""

from __future__ import annotations

import math
from datetime import datetime

import msgpack

from dflash_adapters.text.chat_messages import (
    LENGTH,
    ChatRequest,
    ReplyKind,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from dflash_protocol.errors import ProtocolError
from fuzz.message_targets import damaged_header
from fuzz.mutation import Mutator
from fuzz.target import Target

_REQUEST, _REPLY = b"request", b"reply"
_NOW = datetime(2025, 2, 3, 4, 5, 6)


def _body(message: bytes) -> bytes:
    return message[LENGTH.size :]


class ChatMessages(Target):
    """Both directions. The first frame says which, the second is a message without its length."""

    refusals = (ProtocolError,)

    def __init__(self) -> None:
        conversation = [{"role": "user", "content": "é😀\ud800"}, {"role": "tool", "n": [2**70]}]
        self._requests = [
            ChatRequest("{{ messages }}", conversation, "<s>", "</s>", now=_NOW),
            ChatRequest("", [], extra={"tools": [{"a": {"b": None}}], "x": 1.5}, now=_NOW),
        ]
        self._replies = [
            (ReplyKind.TEXT, "a\nb é😀"),
            (ReplyKind.REFUSED, "No."),
            (ReplyKind.FAILED, ""),
        ]
        self._request_bodies = [_body(encode_request(request)) for request in self._requests]
        self._reply_bodies = [_body(encode_reply(*reply)) for reply in self._replies]

    def make(self, mutator: Mutator) -> list[bytes]:
        if mutator.chance(0.7):
            bodies = self._request_bodies
            body = mutator.choose(bodies)
            if mutator.chance(0.5):
                return [_REQUEST, mutator.damage(body, mutator.choose(bodies))]
            # Maps of other fields, in sound msgpack.
            plain = [msgpack.packb(_plain(each)) for each in bodies]
            return [_REQUEST, damaged_header(mutator, plain, mutator.choose(plain))]
        body = mutator.choose(self._reply_bodies)
        return [_REPLY, mutator.damage(body, mutator.choose(self._reply_bodies))]

    def feed(self, frames: list[bytes]) -> None:
        which, body = frames
        if which == _REPLY:
            kind, text = decode_reply(body)
            assert isinstance(kind, ReplyKind)
            assert isinstance(text, str)
            return
        request = decode_request(body)
        assert isinstance(request.template, str)
        assert isinstance(request.messages, list)
        assert isinstance(request.now, datetime)
        assert all(isinstance(name, str) for name in request.extra)
        assert isinstance(request.deadline_s, float)
        assert 0 < request.deadline_s < math.inf

    def serve_good(self) -> None:
        for request, body in zip(self._requests, self._request_bodies, strict=True):
            assert decode_request(body) == request
        for reply, body in zip(self._replies, self._reply_bodies, strict=True):
            assert decode_reply(body) == reply


def _plain(body: bytes) -> dict[str, object]:
    """A request's fields without what only it can hold."""
    values: dict[str, object] = msgpack.unpackb(
        body, unicode_errors="replace", ext_hook=lambda *_: 7
    )
    return values
