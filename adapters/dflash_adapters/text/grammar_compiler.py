"""Compiles grammars for a vocabulary.

`llguidance` does: it says before each token which tokens may come. It fetches nothing (``$ref`` to
another document is refused), and its work is bounded by counts.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from dflash_adapters.text.gbnf import gbnf_to_lark
from dflash_adapters.text.grammar import (
    LONGEST_REASON,
    MOST_GRAMMAR_BYTES,
    CompiledGrammar,
    Grammar,
    GrammarKind,
    GrammarSource,
)
from dflash_adapters.text.json_grammar import known_schema
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.errors import GrammarError, one_line

_KEPT_GRAMMARS = 16
_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # of 1 to 2 kB
    max_grammar_size=100_000,
    verbose_errors=False,  # they quote the grammar, and what was written
)
_RULE = re.compile(r"^[ \t]*[?!]*\w+[^:\n]*:", re.MULTILINE)
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
"""What GBNF has not."""
_MOST_RULES = 500
"""The compiler is as deep in calls as rules name each other."""
_MOST_ALTERNATIVES = 5000
_MOST_ANDS = 4
"""In Lark's notation: the work of compiling doubles with each."""


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
        with self._lock:
            vocabulary, grammar = self._vocabulary, self._kept.get(source)
        if grammar is None:  # which other threads need not wait for
            grammar = compiled(source, vocabulary)
        with self._lock:
            self._kept[source] = grammar
            self._kept.move_to_end(source)
            if len(self._kept) > _KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

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


def compiled(source: GrammarSource, vocabulary: LLTokenizer) -> Grammar:
    """Raises: GrammarError."""
    try:
        if len(source.text.encode()) > MOST_GRAMMAR_BYTES:
            raise GrammarError(f"a {source.kind} has {MOST_GRAMMAR_BYTES:,} bytes at most")
        text = _FORMS[source.kind](source)
    except (ValueError, RecursionError) as error:  # JSON; texts with lone surrogates
        raise GrammarError(one_line(error, LONGEST_REASON)) from None

    def new_matcher() -> LLMatcher:
        return LLMatcher(vocabulary, text, log_level=0, limits=_LIMITS)

    grammar = Grammar(CompiledGrammar(new_matcher, vocabulary.vocab_size))
    grammar.matcher().mask()  # one that allows no text
    return grammar


def _json_schema(source: GrammarSource) -> str:
    text, options = known_schema(source)
    return LLMatcher.grammar_from_json_schema(text, overrides=options)


def _gbnf(source: GrammarSource) -> str:
    text = source.text
    lark = text if _LARK.search(text) else gbnf_to_lark(text)
    if lark is text and lark.count("&") > _MOST_ANDS:
        raise GrammarError(f"a grammar has at most {_MOST_ANDS} times '&'")
    if lark.count("|") > _MOST_ALTERNATIVES:
        raise GrammarError(f"a grammar has at most {_MOST_ALTERNATIVES} alternatives")
    if len(_RULE.findall(lark)) > _MOST_RULES:
        raise GrammarError(f"a grammar has at most {_MOST_RULES} rules")
    return LLMatcher.grammar_from_lark(lark)


def _choice(source: GrammarSource) -> str:
    texts = [json.dumps(each).replace("\x7f", "\\u007f") for each in json.loads(source.text)]
    if not texts:
        raise GrammarError("there is nothing to choose from")
    # One terminal: rules have a bound on what they may choose from.
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}\n")


_FORMS: dict[GrammarKind, Callable[[GrammarSource], str]] = {
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: lambda source: LLMatcher.grammar_from_regex(source.text),
    GrammarKind.GBNF: _gbnf,
    GrammarKind.CALLS: lambda source: LLMatcher.grammar_from_lark(source.text),
    GrammarKind.CHOICE: _choice,
}
