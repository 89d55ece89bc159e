"""Grammars that a generated text follows: JSON schemas, regular expressions, GBNF, choices.

`GrammarCompiler` in grammar_compiler.py compiles them.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.errors import GrammarError, one_line
from dflash_protocol.ids import BoolArray, U8Array

if TYPE_CHECKING:  # importing it takes a tenth of a second, and few texts follow a grammar
    from llguidance import LLMatcher

MOST_GRAMMAR_BYTES = 1 << 18
LONGEST_END = 128
"""Bytes of the end of a free text before a grammar."""
LONGEST_REASON = 300
"""Characters of the reason in a GrammarError."""
_MOST_RENEWED_S = 0.1
_FEW_TOKENS = 64
"""At most so many may come where several tokens are forced: those that begin the forced text."""


class GrammarKind(StrEnum):
    """What the text of a `GrammarSource` is."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    GBNF = "grammar"
    """In llama.cpp's notation, or llguidance's (Lark's)."""
    CALLS = "grammar of calls"
    """As `answers.enforced` makes them, of checked schemas."""
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
    """A free text before a grammar: it ends with the token that completes a match of `ends`,
    however tokens divide that; `mask` has what may come."""

    ends: re.Pattern[bytes]
    mask: U8Array
    token_bytes: Callable[[int], bytes]


class TokenMatcher:
    """A text that follows a grammar, token by token. Used by one thread.

    States: before the grammar begins; within it; complete; failed, for good.
    """

    def __init__(self, compiled: CompiledGrammar, prelude: Prelude | None) -> None:
        self._compiled, self._matcher = compiled, compiled.copy()
        self._mask: U8Array | None = None
        self._prelude = prelude
        """None: the grammar has begun."""
        self._latest = b""
        """The end of the text before."""
        self.forced: deque[int] = deque()
        """Tokens that come next, as the grammar allows one text only; known once `mask` was asked
        for. They divide it as the tokenizer does, not as another of the tokens that begin it."""
        self._written: list[int] | None = [] if compiled.can_be_renewed else None
        """Since the grammar began; None: it is not to be compiled anew."""

    def mask(self) -> U8Array:
        """A bit for each token that may come next, the lowest first: one if some are forced. Found
        once, until `accept`.

        Shapes: result [ceil(V / 8)].
        Raises: GrammarError if there is none, or finding out takes too much.
        """
        if self._prelude is not None:
            return self._prelude.mask
        if self._mask is None:
            self._mask = self._forced_mask() if self.forced else self._next_mask()
        return self._mask

    def _next_mask(self) -> U8Array:
        mask = self._found_mask()
        if self._matcher.is_error() and self._written is not None:
            self._renew(self._written)
            mask = self._found_mask()
        self._check()
        num_tokens = int(np.bitwise_count(mask).sum())
        if num_tokens == 0:
            raise GrammarError("the grammar allows no token here")
        if num_tokens > _FEW_TOKENS:
            return mask
        self.forced.extend(self._matcher.compute_ff_tokens())
        return self._forced_mask() if self.forced else mask

    def _forced_mask(self) -> U8Array:
        mask = np.zeros(-(-self._compiled.num_tokens // 8), np.uint8)
        byte, bit = divmod(self.forced[0], 8)
        mask[byte] = 1 << bit
        return mask

    def _found_mask(self) -> U8Array:
        # llguidance has room for one more token.
        num_bytes = -(-self._compiled.num_tokens // 8)
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8, num_bytes)

    def allowed(self) -> BoolArray:
        """`mask`, an element for each token. Shapes: result [V]. Raises: as `mask`."""
        num_tokens = self._compiled.num_tokens
        return np.unpackbits(self.mask(), bitorder="little", count=num_tokens).view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on after a token. Raises: GrammarError if the grammar does not allow it."""
        self._mask = None
        if self.forced and self.forced.popleft() != token_id:
            self.forced.clear()
        if self._prelude is None:
            self._matcher.consume_token(token_id)
            if self._matcher.is_error() and self._written is not None:
                self._renew(self._written)
                self._matcher.consume_token(token_id)
            self._check()
            if self._written is not None:
                self._written.append(token_id)
            return
        self._latest += self._prelude.token_bytes(token_id)
        if self._prelude.ends.search(self._latest):
            self._prelude = None
        self._latest = self._latest[-LONGEST_END:]

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end of the text."""
        if self._prelude is not None or self._matcher.is_error():
            return False
        return self._matcher.is_stopped()

    def _renew(self, written: list[int]) -> None:
        """Start over with states of this text alone: the states of all texts of a grammar count
        towards one bound."""
        self._matcher = self._compiled.renewed()
        self._written = None
        for token_id in written:
            self._matcher.consume_token(token_id)

    def _check(self) -> None:
        if self._matcher.is_error():
            # The first line; those that follow quote the grammar.
            reason = self._matcher.get_error().split("\n", 1)[0]
            raise GrammarError(one_line(reason, LONGEST_REASON))


class CompiledGrammar:
    """A grammar compiled for one vocabulary of `num_tokens`. Thread-safe."""

    def __init__(self, new_matcher: Callable[[], LLMatcher], num_tokens: int) -> None:
        """`new_matcher` compiles it anew."""
        self.num_tokens = num_tokens
        self._new_matcher = new_matcher
        started_s = time.perf_counter()
        self._matcher = new_matcher()
        """At the beginning of a text, and never moved on; its copies share their states."""
        self.can_be_renewed = time.perf_counter() - started_s < _MOST_RENEWED_S
        """Whether compiling it again is fast enough to be done between two tokens."""
        self._lock = threading.Lock()

    def copy(self) -> LLMatcher:
        """A matcher at the beginning of a text."""
        with self._lock:
            return self._matcher.deep_copy()

    def renewed(self) -> LLMatcher:
        """The same, which shares nothing with those before."""
        with self._lock:
            self._matcher = self._new_matcher()
            return self._matcher.deep_copy()


class Grammar:
    """What a text follows: a compiled grammar, which may begin behind a free text."""

    def __init__(self, compiled: CompiledGrammar, prelude: Prelude | None = None) -> None:
        self._compiled, self._prelude = compiled, prelude

    def after(self, ends: str, tokenizer: Tokenizer) -> Grammar:
        """The same for what follows a match of the regular expression `ends`, of up to LONGEST_END
        bytes; what comes before that is free, but for tokens that end a text."""
        num_tokens = self._compiled.num_tokens
        allowed = np.ones(num_tokens, np.bool_)
        allowed[[each for each in tokenizer.stop_ids if each < num_tokens]] = False
        mask = np.packbits(allowed, bitorder="little")
        return Grammar(
            self._compiled, Prelude(re.compile(ends.encode()), mask, tokenizer.token_bytes)
        )

    def matcher(self) -> TokenMatcher:
        """A new text."""
        return TokenMatcher(self._compiled, self._prelude)
