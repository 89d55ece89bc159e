"""SentencePiece vocabularies, as ``tokenizer.ggml.model`` ``llama`` names them: pieces with scores.

Characters are merged pair by pair: always the pair whose piece has the highest score, the leftmost
of equals, as in SentencePiece's ``bpe_model.cc`` (Kudo and Richardson 2018) and llama.cpp's
``llm_tokenizer_spm_session``. What no piece spells is left as its bytes. Knows nothing of special
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from dflash_adapters.text.vocabulary import BYTE_OF_TOKEN
from dflash_protocol.ids import F32Array

SPACE = "\u2581"  # stands for a space in pieces

_MAX_RUN = 1 << 20  # characters that are merged at once
_MAX_PIECE_CHARACTERS = 1 << 24  # of all pieces together; published: 1.5 million
_MAX_JOINED = 1 << 20  # pairs of characters; published: 45612
_MAX_KEPT = 1 << 15  # short runs whose ids are kept: texts repeat their words
_MAX_KEPT_RUN = 32
_AT_ONCE = 1 << 14  # tokens that are given together, and those of the run that they end with
# A pair in the queue is one integer: rank of its piece, where it begins, where it ends.
_PLACE_BITS = _MAX_RUN.bit_length()
_PLACE_MASK = (1 << _PLACE_BITS) - 1


class ScoredPieces:
    """Encodes with one vocabulary. May be used from several threads."""

    def __init__(self, ids: dict[str, int], scores: F32Array) -> None:
        """Take the pieces over, `ids` by spelling. Shapes: scores [tokens] float32, finite."""
        self._ids = ids
        self._byte_ids = [ids.get(text, ids.get(chr(b), -1)) for text, b in BYTE_OF_TOKEN.items()]
        # The same rank for the same score: which of those is first, its place decides.
        ranks = np.unique(-scores, return_inverse=True)[1].tolist()
        self._ranks = {text: ranks[token_id] for text, token_id in ids.items() if len(text) > 1}
        self._longest = max(map(len, self._ranks), default=0)
        self._joined = _joined_pairs(self._ranks)
        self._kept: dict[str, list[int]] = {}

    def encoded(self, text: str) -> Iterator[list[int]]:
        """Token ids of a text without special tokens, in parts that are made one by one."""
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
        """What a piece stands for."""
        return text.replace(SPACE, " ").encode()

    def _runs(self, text: str) -> Iterator[str]:
        """The text, cut between characters that no piece has side by side: nothing merges there."""
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
        # Where the symbol that begins here ends, 0 once it is part of the one before it; and where
        # the one before it begins.
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
            # Neither symbol may have changed since.
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
        """The ids of all symbols; bytes where a symbol, then a single character, is no piece."""
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
    """All characters that stand side by side in a piece; None if that is too much to find out."""
    joined: set[tuple[str, str]] = set()
    num_left = _MAX_PIECE_CHARACTERS
    for text in texts:
        num_left -= len(text)
        if num_left < 0 or len(joined) > _MAX_JOINED:
            return None
        joined.update(pairwise(text))
    return joined
