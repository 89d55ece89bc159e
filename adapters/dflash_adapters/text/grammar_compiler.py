"""Compiles grammars for a vocabulary.

`llguidance` does: it says before each token which tokens may come. It fetches nothing (``$ref`` to
another document is refused), and its work is bounded by counts.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from dflash_adapters.text.grammar import (
    MOST_GRAMMAR_BYTES,
    Grammar,
    GrammarKind,
    GrammarSource,
    TokenMatcher,
    reason_of,
)
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.errors import GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_KEPT_GRAMMARS = 16
_SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""Between the tokens of JSON, unless a request says otherwise. Bounded, as in llama.cpp's grammars:
a model that likes spaces would write nothing else."""
_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # of 1 to 2 kB
    max_grammar_size=100_000,
    verbose_errors=False,  # they quote the grammar, and what was written
)


class GrammarCompiler:
    """Compiles grammars for a tokenizer's vocabulary, of which a model writes the first
    `num_tokens` at most; keeps the latest. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = min(num_tokens, tokenizer.vocab_size)
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make what all grammars share, once: with 150,000 tokens it takes a second."""
        with self._lock:
            _ = self._vocabulary

    def compile(self, source: GrammarSource) -> Grammar:
        """Raises: GrammarError for a grammar that is wrong, too large, or asks for what is not
        supported."""
        if len(source.text.encode(errors="replace")) > MOST_GRAMMAR_BYTES:
            raise GrammarError(f"a {source.kind} has {MOST_GRAMMAR_BYTES:,} bytes at most")
        with self._lock:
            grammar = self._kept.get(source)
            if grammar is None:
                grammar = self._kept[source] = self._compiled(source)
                if len(self._kept) > _KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(source)
            return grammar

    def _compiled(self, source: GrammarSource) -> Grammar:
        vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary, _FORMS[source.kind](source), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(reason_of(matcher))
        TokenMatcher(matcher.deep_copy(), vocabulary.vocab_size).mask()  # one without a text
        return Grammar(matcher, vocabulary.vocab_size)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        num_tokens = self._num_tokens
        stop_ids = sorted(each for each in self._tokenizer.stop_ids if each < num_tokens)
        if not stop_ids:
            raise GrammarError("the model has no token that ends a text")
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, num_tokens, stop_ids[0])),
            n_vocab=num_tokens,
            eos_token=stop_ids,
        )


class _Vocabulary:
    """What llguidance reads of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_id: int) -> None:
        self.eos_token_id, self.bos_token_id = eos_id, tokenizer.bos_id
        self.tokens: Sequence[bytes] = [
            tokenizer.token_bytes(token_id) for token_id in range(num_tokens)
        ]
        self.special_token_ids = [
            token_id
            for _, token_id, is_control in tokenizer.special
            if is_control and token_id < num_tokens
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, str) else text.decode(errors="replace")
        return self._encode(whole, parse_special=False)


def _json_schema(source: GrammarSource) -> str:
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object, and not false")
    space = _SPACE if source.space is None else source.space
    options: JsonCompileOptions = {"whitespace_pattern": space}
    if not space:
        options = {"whitespace_flexible": False}
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def _gbnf(source: GrammarSource) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(source.text))
    except Exception as error:  # the converter raises what its parser meets
        raise GrammarError(f"not a grammar: {error}") from None


def _choice(source: GrammarSource) -> str:
    texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(source.text))
    if not texts:
        raise GrammarError("there is nothing to choose from")
    return LLMatcher.grammar_from_lark(f"start: {texts}")


_FORMS: dict[GrammarKind, Callable[[GrammarSource], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: lambda source: LLMatcher.grammar_from_regex(source.text),
    GrammarKind.GBNF: _gbnf,
    GrammarKind.CHOICE: _choice,
}
