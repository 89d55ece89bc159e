"""Grammars that a generated text follows: JSON schemas, regular expressions, GBNF, choices.

`GrammarCompiler` in grammar_compiler.py compiles them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from dflash_protocol.errors import GrammarError
from dflash_protocol.ids import BoolArray, U8Array

if TYPE_CHECKING:  # importing it takes a tenth of a second, and few texts follow a grammar
    from llguidance import LLMatcher

MOST_GRAMMAR_BYTES = 1 << 18


class GrammarKind(StrEnum):
    """What the text of a `GrammarSource` is."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    GBNF = "grammar"
    """In llama.cpp's notation, or llguidance's (Lark's)."""
    CHOICE = "choice"
    """A JSON list of texts, one of which is written."""


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a client wrote it."""

    kind: GrammarKind
    text: str
    space: str | None = None
    """For JSON: the regular expression of what may be between tokens; "": nothing; None: a space or
    line breaks with an indent."""


@dataclass(frozen=True, slots=True, eq=False)
class Prelude:
    """A free text before a grammar: it ends with the tokens `ends`; `mask` has what may come."""

    ends: tuple[int, ...]
    mask: U8Array


class TokenMatcher:
    """A text that follows a grammar, token by token. Used by one thread.

    States: before the grammar begins; within it; complete; failed, for good.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, prelude: Prelude | None = None) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._mask: U8Array | None = None
        self._prelude = prelude
        """None: the grammar has begun."""
        self._latest = deque[int](maxlen=None if prelude is None else len(prelude.ends))

    def mask(self) -> U8Array:
        """A bit for each token that may come next, the lowest first; found once, until `accept`.

        Shapes: result [B], with room for V bits.
        Raises: GrammarError if there is none, or finding out takes too much.
        """
        if self._prelude is not None:
            return self._prelude.mask
        if self._mask is None:
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            if not mask.any():
                raise GrammarError("the grammar allows no token here")
            self._mask = mask
        return self._mask

    def allowed(self) -> BoolArray:
        """`mask`, an element for each token. Shapes: result [V]. Raises: as `mask`."""
        allowed = np.unpackbits(self.mask(), bitorder="little", count=self._vocab_size)
        return allowed.view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on after a token. Raises: GrammarError if the grammar does not allow it."""
        self._mask = None
        if self._prelude is None:
            self._matcher.consume_token(token_id)
            self._check()
            return
        self._latest.append(token_id)
        if (*self._latest,) == self._prelude.ends:
            self._prelude = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end of the text."""
        return self._prelude is None and self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(reason_of(self._matcher))


class Grammar:
    """A grammar compiled for one vocabulary. Thread-safe."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, prelude: Prelude | None = None) -> None:
        """`matcher`: at the beginning of a text, and never moved on."""
        self._matcher, self._vocab_size, self._prelude = matcher, vocab_size, prelude
        self._lock = threading.Lock()

    def after(self, ends: Sequence[int], *, stop_ids: Collection[int]) -> Grammar:
        """The same for what follows the tokens `ends`; what comes before them is free, but for
        tokens that end a text."""
        allowed = np.ones(self._vocab_size, np.bool_)
        allowed[[token_id for token_id in stop_ids if token_id < self._vocab_size]] = False
        prelude = Prelude((*ends,), np.packbits(allowed, bitorder="little"))
        return Grammar(self._matcher, self._vocab_size, prelude)

    def matcher(self) -> TokenMatcher:
        """A new text."""
        with self._lock:
            return TokenMatcher(self._matcher.deep_copy(), self._vocab_size, self._prelude)


def reason_of(matcher: LLMatcher) -> str:
    """The first line of a matcher's error; those that follow quote the grammar."""
    return matcher.get_error().split("\n", 1)[0]
