"""Messages to the process that tries grammars: as those of ``chat_messages``, a request is a list
of the kind, the text, and what may be between JSON's tokens."""

from __future__ import annotations

import msgpack

from dflash_adapters.text.chat_messages import LENGTH
from dflash_adapters.text.grammar import GrammarKind, GrammarSource
from dflash_protocol.errors import ProtocolError

TRIAL_S = 2.0
"""CPU time that a trial may take; the kernel ends the process `child_loop.LATE_S` later."""


def encode_source(source: GrammarSource) -> bytes:
    """A request's message, its length first."""
    values = [source.kind.value, source.text, source.space]
    body: bytes = msgpack.packb(values, unicode_errors="surrogatepass")
    return LENGTH.pack(len(body)) + body


def decode_source(body: bytes | bytearray) -> GrammarSource:
    """Raises: ProtocolError."""
    try:
        kind, text, space = msgpack.unpackb(body, raw=False, unicode_errors="surrogatepass")
        if isinstance(text, str) and (space is None or isinstance(space, str)):
            return GrammarSource(GrammarKind(kind), text, space)
    except (ValueError, TypeError, msgpack.UnpackException):
        pass
    raise ProtocolError("a request to try a grammar is damaged")
