"""SentencePiece vocabularies, as ``tokenizer.ggml.model`` ``llama`` names them: pieces with scores.

Characters are merged pair by pair: always the pair whose piece has the highest score, on a tie the
leftmost, as in SentencePiece's ``bpe_model.cc`` (Kudo and Richardson 2018) and llama.cpp's
``llm_tokenizer_spm_session``. Characters that are no piece become byte tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from dflash_adapters.text.vocabulary import BYTE_OF_TOKEN
from dflash_protocol.ids import F32Array

SPACE = "\u2581"  # represents a space in pieces

_MAX_RUN = 1 << 20  # characters that are merged at once
_MAX_PIECE_CHARACTERS = 1 << 24  # of all pieces together; published: 1.5 million
_MAX_JOINED = 1 << 20  # pairs of characters; published: 45612
_MAX_KEPT = 1 << 15  # short runs whose ids are cached, since texts repeat words
_MAX_KEPT_RUN = 32
_AT_ONCE = 1 << 14  # tokens yielded at once, plus the rest of the last run
# A pair in the queue is packed into one integer: rank of its piece, begin, end.
_PLACE_BITS = _MAX_RUN.bit_length()
_PLACE_MASK = (1 << _PLACE_BITS) - 1


class ScoredPieces:
    """Encodes with one vocabulary. Thread-safe."""

    def __init__(self, ids: dict[str, int], scores: F32Array) -> None:
        """`ids` are by spelling. Shapes: scores [tokens] float32, finite."""
        self._ids = ids
        self._byte_ids = [ids.get(text, ids.get(chr(b), -1)) for text, b in BYTE_OF_TOKEN.items()]
        # Equal scores get equal ranks, so that the position decides ties.
        ranks = np.unique(-scores, return_inverse=True)[1].tolist()
        self._ranks = {text: ranks[token_id] for text, token_id in ids.items() if len(text) > 1}
        self._longest = max(map(len, self._ranks), default=0)
        self._joined = _joined_pairs(self._ranks)
        self._kept: dict[str, list[int]] = {}

    def encoded(self, text: str) -> Iterator[list[int]]:
        """Token ids of a text without special tokens, in parts computed lazily."""
        ids: list[int] = []
        for run in self._runs(text.replace(" ", SPACE)):
            known = self._kept.get(run)
            if known is None:
                known = self._merge(run)
                if len(run) <= _MAX_KEPT_RUN and len(self._kept) < _MAX_KEPT:
                    self._kept[run] = known
            ids += known
            if len(ids) >= _AT_ONCE:
                yield ids
                ids = []
        yield ids

    def spelled(self, text: str) -> bytes:
        """The bytes of a piece."""
        return text.replace(SPACE, " ").encode()

    def _runs(self, text: str) -> Iterator[str]:
        """Split the text between characters that are adjacent in no piece, and so never merge."""
        start = 0
        joined = self._joined
        if joined is not None:
            for place, pair in enumerate(pairwise(text), 1):
                if pair not in joined or place - start == _MAX_RUN:
                    yield text[start:place]
                    start = place
        for place in range(start, len(text), _MAX_RUN):
            yield text[place : place + _MAX_RUN]

    def _merge(self, text: str) -> list[int]:
        """Token ids of one run."""
        ranks, longest = self._ranks, self._longest
        # By begin of a symbol: its end, 0 once it is merged into the symbol before it; and the
        # begin of that symbol.
        ends = list(range(1, len(text) + 1))
        befores = list(range(-1, len(text) - 1))
        queue = [
            rank << 2 * _PLACE_BITS | begin << _PLACE_BITS | begin + 2
            for begin in range(len(text) - 1)
            if (rank := ranks.get(text[begin : begin + 2])) is not None
        ]
        heapify(queue)
        while queue:
            pair = heappop(queue)
            begin, end = pair >> _PLACE_BITS & _PLACE_MASK, pair & _PLACE_MASK
            middle = ends[begin]
            # Skip pairs of which a symbol has been merged since.
            if middle == 0 or middle >= end or ends[middle] != end:
                continue
            ends[begin], ends[middle] = end, 0
            before = befores[begin]
            if before >= 0 and end - before <= longest:
                rank = ranks.get(text[before:end])
                if rank is not None:
                    heappush(queue, rank << 2 * _PLACE_BITS | before << _PLACE_BITS | end)
            if end < len(text):
                befores[end] = begin
                after = ends[end]
                if after - begin <= longest:
                    rank = ranks.get(text[begin:after])
                    if rank is not None:
                        heappush(queue, rank << 2 * _PLACE_BITS | begin << _PLACE_BITS | after)
        return self._tokens(text, ends)

    def _tokens(self, text: str, ends: list[int]) -> list[int]:
        """Ids of all symbols; a symbol that is no piece, a single character, becomes its bytes."""
        ids = []
        begin = 0
        while begin < len(text):
            symbol = text[begin : ends[begin]]
            token_id = self._ids.get(symbol)
            if token_id is None:
                ids += [self._byte_ids[byte] for byte in symbol.encode()]
            else:
                ids.append(token_id)
            begin = ends[begin]
        return ids


def _joined_pairs(texts: Iterable[str]) -> set[tuple[str, str]] | None:
    """All pairs of adjacent characters in pieces; None if there are too many."""
    joined: set[tuple[str, str]] = set()
    num_left = _MAX_PIECE_CHARACTERS
    for text in texts:
        num_left -= len(text)
        if num_left < 0 or len(joined) > _MAX_JOINED:
            return None
        joined.update(pairwise(text))
    return joined
