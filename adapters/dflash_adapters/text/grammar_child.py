"""The process that tries grammars of clients, since no bound on their size bounds the time that
compiling takes: 240 kB of ``a?`` take minutes.

It compiles them for a vocabulary of bytes. What a real vocabulary takes beyond that is bounded by
the compiler's own counts.

Example:
  python -I -S -c 'import sys; sys.path += sys.argv[1:]
  from dflash_adapters.text.grammar_child import main
  main()' FOLDER...
"""

from __future__ import annotations

import os
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from dflash_adapters.text.chat_messages import ReplyKind
from dflash_adapters.text.child_loop import bounded, serve
from dflash_adapters.text.grammar_compiler import compiled
from dflash_adapters.text.grammar_messages import TRIAL_S, decode_source
from dflash_protocol.errors import GrammarError, ProtocolError

_MEMORY_BYTES = 1 << 30
"""Address space beside what is in use once all is imported."""
_END_ID = 256


class _Bytes:
    """A vocabulary of all bytes, and a token that ends a text."""

    eos_token_id, bos_token_id = _END_ID, None
    tokens = (*(bytes([each]) for each in range(_END_ID)), b"<end>")
    special_token_ids = (_END_ID,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Serve requests until the end of input."""
    vocabulary = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=_END_ID + 1, eos_token=[_END_ID])
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = num_pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES

    def answer(body: bytearray) -> tuple[ReplyKind, str]:
        try:
            source = decode_source(body)
            with bounded(TRIAL_S, most_bytes):
                compiled(source, vocabulary)
        except (GrammarError, ProtocolError) as error:
            return ReplyKind.REFUSED, str(error)
        return ReplyKind.TEXT, ""

    serve(answer)
