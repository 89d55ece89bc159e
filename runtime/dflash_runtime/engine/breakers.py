"""Sequence breakers: texts across which DRY sees no repetition, as tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import I64Array, U8Array

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's."""
MOST_BREAKERS = 64
LONGEST_BREAKER = 40
"""Characters."""
_MOST_CHARACTERS = 512
"""Of all of them: each costs a look at the whole vocabulary."""
LONGEST_TAIL = 20
"""Tokens of a breaker after the first."""
_KEPT = 16


@dataclass(frozen=True, slots=True)
class Breakers:
    """Compiled breakers. A token begins one if it is a key of `tails`, and one of them follows."""

    tails: Mapping[int, frozenset[tuple[int, ...]]] = field(default_factory=dict)
    """What must follow each token; (): nothing, it has the whole text in it."""


class BreakerCompiler:
    """Compiles breakers for a tokenizer; the latest are kept. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[tuple[str, ...], Breakers] = {}
        self._lock = threading.Lock()

    def compile(self, texts: tuple[str, ...] = DEFAULT_BREAKERS) -> Breakers:
        """The breakers of these texts. Raises: SettingsError if there are too many, or one is
        empty or too long."""
        if len(texts) > MOST_BREAKERS:
            raise _refused(f"at most {MOST_BREAKERS}")
        if any(not 0 < len(text) <= LONGEST_BREAKER for text in texts):
            raise _refused(f"texts of 1 to {LONGEST_BREAKER} characters")
        if sum(map(len, texts)) > _MOST_CHARACTERS:
            raise _refused(f"{_MOST_CHARACTERS} characters together at most")
        with self._lock:
            if texts not in self._kept:
                tails: dict[int, set[tuple[int, ...]]] = {}
                for text in dict.fromkeys(texts):
                    for token_id, tail in self._heads(text):
                        tails.setdefault(token_id, set()).add(tail)
                frozen = {token_id: frozenset(each) for token_id, each in tails.items()}
                self._kept[texts] = Breakers(frozen)
                if len(self._kept) > _KEPT:
                    del self._kept[next(iter(self._kept))]
            return self._kept[texts]

    def _heads(self, text: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each token that has the text in it or ends with its beginning, and what follows then."""
        data = text.encode(errors="replace")
        vocabulary, starts = self._spelled
        places = np.arange(max(0, vocabulary.size - len(data) + 1))
        for index, byte in enumerate(data):
            places = places[vocabulary[places + index] == byte]
        token_ids = np.searchsorted(starts, places, side="right") - 1
        whole = np.unique(token_ids[places + len(data) <= starts[token_ids + 1]])
        for token_id in whole.tolist():
            yield token_id, ()
        others = np.setdiff1d(np.arange(starts.size - 1), whole)
        for length in range(1, len(text)):
            begin = text[:length].encode(errors="replace")
            found = others[starts[others + 1] - starts[others] >= len(begin)]
            for index, byte in enumerate(reversed(begin)):
                found = found[vocabulary[starts[found + 1] - 1 - index] == byte]
            if found.size:
                tail = self._tokenizer.encode(text[length:], parse_special=False)
                for token_id in found.tolist():
                    yield token_id, tuple(tail[:LONGEST_TAIL])

    @cached_property
    def _spelled(self) -> tuple[U8Array, I64Array]:
        """The bytes of all tokens, one after the other, and where each begins.
        Shapes: [N], [V + 1]."""
        size = self._tokenizer.vocab_size
        words = [self._tokenizer.token_bytes(token_id) for token_id in range(size)]
        starts = np.array([0, *accumulate(map(len, words))], np.int64)
        return np.frombuffer(b"".join(words), np.uint8), starts


def _refused(what: str) -> SettingsError:
    return SettingsError(f"dry_sequence_breakers=…: must be {what}")
